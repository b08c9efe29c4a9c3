//! The wake-up of a service thread that does not exist: a mark for the simulation's next round.

use nccl_net_spark::comm::datapath::waker::Waker;
use std::sync::atomic::{AtomicBool, Ordering};

#[derive(Default)]
pub struct Mark(AtomicBool);

impl Mark {
    /// Returns true if the service thread was woken since the last call.
    pub fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

impl Waker for Mark {
    fn wake(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
