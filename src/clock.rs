//! The clock of the process. No other code of the plugin reads the time (`clippy.toml`).

use proto::time::Instant;
use std::sync::OnceLock;
use std::time::Duration;

/// Monotonic clock. A reading makes no system call where there is a vDSO, as on x86-64 and Arm.
/// Each data path has a clock of its own, because striping's first pauses begin with the
/// connection.
#[derive(Debug, Clone, Copy)]
pub struct Clock(std::time::Instant);

impl Clock {
    /// Returns a clock whose zero is now.
    #[allow(clippy::disallowed_methods)]
    pub fn start() -> Self {
        Self(std::time::Instant::now())
    }

    /// Returns the nanoseconds since the clock's zero.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        self.0.elapsed().as_nanos() as u64
    }
}

/// Largest time before the first reading that an [`Instant`] can express, in nanoseconds: a day.
const BEFORE_START_NS: u64 = 24 * 3600 * 1_000_000_000;

/// Returns the present time.
pub fn now() -> Instant {
    static START: OnceLock<Clock> = OnceLock::new();
    Instant::from_nanos(BEFORE_START_NS + START.get_or_init(Clock::start).now_ns())
}

/// Returns the time that has passed since `since`.
pub fn elapsed(since: Instant) -> Duration {
    now().saturating_duration_since(since)
}
