//! How fast a rail really carries, measured from its completions.
//!
//! A rail serves the writes of a connection in order. So one is in service from when it was posted, or from when the one
//! before it was done, and the rate is the bytes done over the time in service, both fading: what was eight writes ago
//! counts for a tenth. That holds whatever the rail is slow from: its cable, a PCIe link that it shares, the
//! peer's port, other jobs.
//!
//! Writes that followed one another are what counts. One that found the rail idle says less: its time on the way counts as
//! service, and what a rail saved up while it was idle (a shaper's credit, buffers) makes it look quicker than it is. It
//! counts where there is nothing else to go by.

/// How much of the past is left in the sums after one more write.
const FADE: f64 = 0.75;
/// What was seen before a pause of this length says little of the rail as it is now.
const OLD_NS: u64 = 150_000_000;
/// After so many writes that found the rail idle, these are what it is judged by.
const ALONE: u8 = 16;

/// One rail of one connection.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pace {
    /// Bytes given to it that it has not confirmed.
    pub outstanding_bytes: u64,
    /// Timed writes given to it that it has not confirmed.
    timed: u32,
    /// When the oldest of these went into service.
    mark_ns: u64,
    /// Whether that one found the rail idle, and whether the last one did that took its time.
    alone: bool,
    was_alone: bool,
    /// When a timed write was last given to it.
    pub given_ns: u64,
    /// Of writes that followed one another.
    following: Served,
    /// Of writes that found the rail idle, and how many of them there were since others.
    single: Served,
    singles: u8,
}

/// Bytes, and how long they took, fading.
#[derive(Debug, Clone, Copy, Default)]
struct Served {
    bytes: f64,
    busy_ns: f64,
}

impl Served {
    #[inline(always)]
    fn add(&mut self, bytes: u64, busy_ns: u64) {
        self.bytes = self.bytes * FADE + bytes as f64;
        self.busy_ns = self.busy_ns * FADE + busy_ns as f64;
    }

    /// In bytes per microsecond.
    #[inline(always)]
    fn rate(&self) -> Option<f64> {
        (self.busy_ns > 0.0).then(|| self.bytes * 1000.0 / self.busy_ns)
    }
}

impl Pace {
    /// Whether no timed write is under way: the next one's service begins when it is given, else when the one before it is
    /// confirmed.
    #[inline(always)]
    pub fn is_idle(&self) -> bool {
        self.timed == 0
    }

    /// A write was given to the rail, at `now_ns` if it is one that is timed.
    #[inline(always)]
    pub fn given(&mut self, bytes: u64, now_ns: Option<u64>) {
        self.outstanding_bytes += bytes;
        if let Some(now_ns) = now_ns {
            if self.timed == 0 {
                self.mark_ns = now_ns;
                self.alone = true;
                if now_ns.saturating_sub(self.given_ns) > OLD_NS {
                    (self.following, self.single) = Default::default();
                }
            }
            self.timed += 1;
            self.given_ns = now_ns;
        }
    }

    /// The rail confirmed a write; `now_ns` as it was when that was given.
    #[inline(always)]
    pub fn confirmed(&mut self, bytes: u64, now_ns: Option<u64>) {
        self.outstanding_bytes = self.outstanding_bytes.saturating_sub(bytes);
        if let Some(now_ns) = now_ns {
            let busy_ns = now_ns.saturating_sub(self.mark_ns);
            if busy_ns > 0 {
                self.was_alone = self.alone;
            }
            // Seen together with the one before: its time is counted there already, so its bytes are too.
            match (self.was_alone, busy_ns) {
                (true, 0) => self.single.bytes += bytes as f64,
                (false, 0) => self.following.bytes += bytes as f64,
                (true, _) => {
                    self.single.add(bytes, busy_ns);
                    self.singles = self.singles.saturating_add(1);
                }
                (false, _) => {
                    self.following.add(bytes, busy_ns);
                    self.singles = 0;
                }
            }
            self.timed = self.timed.saturating_sub(1);
            (self.mark_ns, self.alone) = (now_ns, false);
        }
    }

    /// What it carries, in bytes per microsecond; `None` before the first timed write was confirmed, and for a while after a
    /// pause.
    #[inline(always)]
    pub fn measured(&self) -> Option<f64> {
        let single = self.single.rate();
        if self.singles < ALONE { self.following.rate().or(single) } else { single }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_does_not_count_and_queueing_does_not_either() {
        let mut pace = Pace::default();
        assert_eq!(pace.measured(), None);
        // 1000 bytes in 100 ns: 10 bytes a nanosecond, whether alone or behind another.
        for start in [0, 50_000, 1_000_000] {
            pace.given(1000, Some(start));
            pace.given(1000, Some(start));
            assert_eq!(pace.outstanding_bytes, 2000);
            pace.confirmed(1000, Some(start + 100));
            pace.confirmed(1000, Some(start + 200));
        }
        assert!((pace.measured().unwrap() - 10_000.0).abs() < 1e-6, "{pace:?}");
        assert_eq!(pace.outstanding_bytes, 0);
    }

    #[test]
    fn a_burst_after_idle_time_does_not_count_beside_a_stream() {
        let mut pace = Pace::default();
        for start in [0, 50_000, 100_000] {
            for _ in 0..3 {
                pace.given(1000, Some(start));
            }
            // The first is through at once.
            for done in [start + 1, start + 101, start + 201] {
                pace.confirmed(1000, Some(done));
            }
        }
        assert!((pace.measured().unwrap() - 10_000.0).abs() < 1e-6, "{pace:?}");
        for start in (200_000..).step_by(1000).take(usize::from(ALONE)) {
            pace.given(1000, Some(start));
            pace.confirmed(1000, Some(start + 400));
        }
        assert!((2_490.0..2_530.0).contains(&pace.measured().unwrap()), "alone for long: {pace:?}");
    }

    #[test]
    fn completions_seen_late_and_together_average_out() {
        let mut pace = Pace::default();
        pace.given(1000, Some(0));
        pace.given(1000, Some(0));
        pace.confirmed(1000, Some(200));
        pace.confirmed(1000, Some(200));
        pace.given(1000, Some(200));
        pace.given(1000, Some(200));
        pace.given(1000, Some(200));
        pace.confirmed(1000, Some(400));
        pace.confirmed(1000, Some(400));
        pace.confirmed(1000, Some(500));
        let rate = pace.measured().unwrap();
        assert!((8_000.0..13_000.0).contains(&rate), "{rate}");
    }

    #[test]
    fn a_rail_that_slows_is_known_within_eight_writes() {
        let mut pace = Pace::default();
        let mut now = 0;
        let mut run = |pace: &mut Pace, each_ns: u64| {
            for _ in 0..8 {
                pace.given(1000, Some(now));
                now += each_ns;
                pace.confirmed(1000, Some(now));
            }
        };
        run(&mut pace, 100);
        run(&mut pace, 400);
        assert!((2_500.0..2_900.0).contains(&pace.measured().unwrap()), "{pace:?}");
        run(&mut pace, 100);
        assert!((7_000.0..10_000.0).contains(&pace.measured().unwrap()), "{pace:?}");
    }

    #[test]
    fn after_a_pause_one_write_is_enough() {
        let mut pace = Pace::default();
        for start in [0, 100, 200, 300] {
            pace.given(1000, Some(start));
            pace.confirmed(1000, Some(start + 100));
        }
        pace.given(1000, Some(300_000_000));
        pace.confirmed(1000, Some(300_001_000));
        assert!(pace.measured().unwrap() < 1_200.0, "{pace:?}");
    }

    #[test]
    fn what_is_not_timed_only_waits() {
        let mut pace = Pace::default();
        pace.given(8, None);
        assert_eq!((pace.outstanding_bytes, pace.measured()), (8, None));
        pace.confirmed(8, None);
        assert_eq!((pace.outstanding_bytes, pace.measured()), (0, None));
    }
}
