//! The clock of the process. No other code of the plugin reads the time (`clippy.toml`).

use proto::time::Instant;
use std::sync::OnceLock;
use std::time::Duration;

/// Monotonic clock whose zero is its first use in the process. A reading makes no system call where
/// there is a vDSO, as on x86-64 and Arm. The data path keeps a copy of the clock, so that it does
/// not look up the zero for each reading.
#[derive(Debug, Clone, Copy)]
pub struct Clock(std::time::Instant);

impl Clock {
    /// Returns the clock.
    #[allow(clippy::disallowed_methods)]
    pub fn of_process() -> Self {
        static ZERO: OnceLock<std::time::Instant> = OnceLock::new();
        Self(*ZERO.get_or_init(std::time::Instant::now))
    }

    /// Returns the nanoseconds since the clock's zero.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        self.0.elapsed().as_nanos() as u64
    }
}

/// Largest time before the first reading that an [`Instant`] can stand for, in nanoseconds: a day.
const BEFORE_START_NS: u64 = 24 * 3600 * 1_000_000_000;

/// Returns the present time.
pub fn now() -> Instant {
    Instant::from_nanos(BEFORE_START_NS + Clock::of_process().now_ns())
}

/// Returns the time that has passed since `since`.
pub fn elapsed(since: Instant) -> Duration {
    now().saturating_duration_since(since)
}
