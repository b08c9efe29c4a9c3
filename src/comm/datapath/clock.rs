//! Clock for measuring the speed of rails ([`proto::flow::pace`]).

use std::time::Instant;

/// Monotonic clock. A reading makes no system call where there is a vDSO, as on x86-64 and Arm.
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
