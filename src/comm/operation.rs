//! NCCL's present operation on a communicator, for messages about its connections.

use proto::wire::operation::Operation;
use std::sync::atomic::{AtomicU32, Ordering};

/// The operation that NCCL announced last. Any thread may use it.
#[derive(Debug)]
pub struct CurrentOperation(AtomicU32);

impl CurrentOperation {
    /// Returns the value for a new communicator, without an operation.
    pub const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Records what NCCL has announced.
    pub fn set(&self, operation: Option<Operation>) {
        // Relaxed: nothing else depends on it.
        self.0
            .store(Operation::to_word(operation), Ordering::Relaxed);
    }

    /// Returns the operation, if NCCL has announced one.
    pub fn get(&self) -> Option<Operation> {
        // Relaxed: as in `set`.
        Operation::of_word(self.0.load(Ordering::Relaxed))
    }
}

impl Default for CurrentOperation {
    fn default() -> Self {
        Self::new()
    }
}
