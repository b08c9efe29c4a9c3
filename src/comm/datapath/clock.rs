//! The time, for the pace of rails.

use std::time::Instant;

/// Counts from when it was started. Reading it is no system call where the kernel offers its clock to user space, as it
/// does on x86-64 and Arm.
#[derive(Debug, Clone, Copy)]
pub struct Clock(Instant);

impl Clock {
    /// Starts to count.
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Nanoseconds since the start.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        self.0.elapsed().as_nanos() as u64
    }
}
