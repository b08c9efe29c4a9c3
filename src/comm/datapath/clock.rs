//! Clock for measuring the pace of rails.

use std::time::Instant;

/// Monotonic clock that counts nanoseconds from its start. Where the kernel lets user space read
/// the time (vDSO), as on x86-64 and Arm, a reading makes no system call.
#[derive(Debug, Clone, Copy)]
pub struct Clock(Instant);

impl Clock {
    /// Starts the clock at zero.
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Returns the nanoseconds since the start.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        self.0.elapsed().as_nanos() as u64
    }
}
