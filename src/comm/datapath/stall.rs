//! How long nothing has moved, without asking the clock while things move.

use std::time::{Duration, Instant};

/// Fruitless looks between two readings of the clock: some milliseconds' worth, so that the clock costs nothing.
const LOOKS: u32 = 1 << 14;

/// Counts fruitless looks.
#[derive(Debug, Default)]
pub struct StallTimer {
    looks: u32,
    since: Option<Instant>,
    warned: bool,
    missed: Option<Instant>,
}

impl StallTimer {
    /// Something moved.
    #[inline(always)]
    pub fn moved(&mut self) {
        if self.looks != 0 {
            *self = Self::default();
        }
    }

    /// Nothing moved; every now and then, for how long that has been so.
    #[inline(always)]
    pub fn idle(&mut self) -> Option<Duration> {
        self.looks = self.looks.wrapping_add(1);
        if self.looks.is_multiple_of(LOOKS) { Some(self.elapsed()) } else { None }
    }

    /// For how long nothing has moved, counted from the first time this is asked.
    #[cold]
    pub fn elapsed(&mut self) -> Duration {
        self.looks = self.looks.max(1);
        self.since.get_or_insert_with(Instant::now).elapsed()
    }

    /// For how long the peer has been away without anything moving, counted from the first time this is asked.
    #[cold]
    pub fn away(&mut self) -> Duration {
        self.looks = self.looks.max(1);
        self.missed.get_or_insert_with(Instant::now).elapsed()
    }

    /// Whether to say so now: once for each time that things stop for longer than `limit`.
    pub fn should_warn(&mut self, waited: Duration, limit: Duration) -> bool {
        let now = waited >= limit && !self.warned;
        self.warned |= now;
        now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_is_asked_rarely_and_a_stall_is_told_once() {
        let mut stall = StallTimer::default();
        let asked = (0..4 * LOOKS).filter(|_| stall.idle().is_some()).count();
        assert_eq!(asked, 4);
        let limit = Duration::from_secs(60);
        assert!(!stall.should_warn(Duration::from_secs(59), limit));
        assert!(stall.should_warn(limit, limit) && !stall.should_warn(2 * limit, limit));
        stall.moved();
        assert!(stall.should_warn(limit, limit));
    }
}
