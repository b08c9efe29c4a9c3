//! How fast a rail really carries, measured from its completions.
//!
//! A rail serves the writes of a connection in order. So one is in service from when it was posted, or from when the one
//! before it was done. The rate is the bytes done over the time in service, both fading; the bytes are those of all
//! connections of this process with the peer, because the rail serves them in the same time. That holds whatever the rail is
//! slow from: its cable, a PCIe link that it shares, the peer's port, other jobs.
//!
//! Writes that followed one another are what counts. One that found the rail idle says less: its time on the way counts as
//! service, and what a rail saved up while it was idle (a shaper's credit, buffers) makes it look quicker than it is. It
//! counts where there is nothing else to go by.
//!
//! What one write shows is mostly what other connections did at that moment, so many are averaged (`Steady`): shares that
//! follow noise leave rails idle. A change that is more than noise is followed within a few writes.

/// How much of the past is left in the sums after one more write: the average of some four, which shows a change, ...
const QUICK: f64 = 0.75;
/// ... and of some 32, which shows the rail.
const SLOW: f64 = 31.0 / 32.0;
/// The quick average is off when it is this many times the slow one, or less than the inverse of it; far off from the
/// second one on.
const OFF: f64 = 1.6;
const FAR_OFF: f64 = 2.5;
/// Points for a write after which the quick average is off, or far off; at so many of them in a row it is the rail that changed.
const OFF_POINTS: u8 = 1;
const FAR_OFF_POINTS: u8 = 3;
const CHANGED_POINTS: u8 = 6;
/// What was seen before a pause of this length says little of the rail as it is now.
const OLD_NS: u64 = 150_000_000;
/// After so many writes that found the rail idle, these are what it is judged by.
const ALONE: u8 = 16;

/// A time, and what the rail had carried by then.
#[derive(Debug, Clone, Copy, Default)]
pub struct Moment {
    /// The time.
    pub now_ns: u64,
    /// Bytes that all connections of this process have had confirmed there.
    pub carried_bytes: u64,
}

/// One rail of one connection.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pace {
    /// Bytes given to it that it has not confirmed.
    pub outstanding_bytes: u64,
    /// Timed writes given to it that it has not confirmed.
    timed: u32,
    /// When the oldest of these went into service.
    mark: Moment,
    /// Whether that one found the rail idle, and whether the last one did that took its time.
    alone: bool,
    was_alone: bool,
    /// When a timed write was last given to it.
    pub given_ns: u64,
    /// Of writes that followed one another.
    following: Steady,
    /// Of writes that found the rail idle, and how many of them there were since others.
    single: Served,
    singles: u8,
}

/// An average that noise does not move much and a change of the rail does soon.
#[derive(Debug, Clone, Copy, Default)]
struct Steady {
    quick: Served,
    slow: Served,
    /// How much speaks for a change.
    points: u8,
}

/// Bytes, and how long they took, fading.
#[derive(Debug, Clone, Copy, Default)]
struct Served {
    bytes: f64,
    busy_ns: f64,
}

impl Served {
    #[inline(always)]
    fn add(&mut self, bytes: u64, busy_ns: u64, keep: f64) {
        self.bytes = self.bytes * keep + bytes as f64;
        self.busy_ns = self.busy_ns * keep + busy_ns as f64;
    }

    /// In bytes per microsecond.
    #[inline(always)]
    fn rate(&self) -> Option<f64> {
        (self.busy_ns > 0.0).then(|| self.bytes * 1000.0 / self.busy_ns)
    }
}

impl Steady {
    #[inline(always)]
    fn add(&mut self, bytes: u64, busy_ns: u64) {
        self.quick.add(bytes, busy_ns, QUICK);
        self.slow.add(bytes, busy_ns, SLOW);
        // The ratio of the two rates, without dividing: its terms, and the greater over the lesser of them.
        let (quick, slow) = (self.quick.bytes * self.slow.busy_ns, self.slow.bytes * self.quick.busy_ns);
        let (more, less) = if quick > slow { (quick, slow) } else { (slow, quick) };
        if more <= OFF * less {
            self.points = 0;
        } else {
            self.points += if more > FAR_OFF * less { FAR_OFF_POINTS } else { OFF_POINTS };
            if self.points >= CHANGED_POINTS {
                (self.slow, self.points) = (self.quick, 0);
            }
        }
    }

    /// More bytes for the time that was added last.
    #[inline(always)]
    fn add_bytes(&mut self, bytes: u64) {
        self.quick.bytes += bytes as f64;
        self.slow.bytes += bytes as f64;
    }
}

impl Pace {
    /// Whether no timed write is under way: the next one's service begins when it is given, else when the one before it is
    /// confirmed.
    #[inline(always)]
    pub fn is_idle(&self) -> bool {
        self.timed == 0
    }

    /// A write was given to the rail, at `now` if it is one that is timed.
    #[inline(always)]
    pub fn given(&mut self, bytes: u64, now: Option<Moment>) {
        self.outstanding_bytes += bytes;
        if let Some(now) = now {
            let now_ns = now.now_ns;
            if self.timed == 0 {
                self.mark = now;
                self.alone = true;
                if now_ns.saturating_sub(self.given_ns) > OLD_NS {
                    (self.following, self.single) = Default::default();
                }
            }
            self.timed += 1;
            self.given_ns = now_ns;
        }
    }

    /// The rail confirmed a write; `now` is there where it was when that was given, and includes the write.
    #[inline(always)]
    pub fn confirmed(&mut self, bytes: u64, now: Option<Moment>) {
        self.outstanding_bytes = self.outstanding_bytes.saturating_sub(bytes);
        if let Some(now) = now {
            let busy_ns = now.now_ns.saturating_sub(self.mark.now_ns);
            // In the meantime the rail has served others too.
            let bytes = now.carried_bytes.saturating_sub(self.mark.carried_bytes);
            if busy_ns > 0 {
                self.was_alone = self.alone;
            }
            // Seen together with the one before: its time is counted there already, so its bytes are too.
            match (self.was_alone, busy_ns) {
                (true, 0) => self.single.bytes += bytes as f64,
                (false, 0) => self.following.add_bytes(bytes),
                (true, _) => {
                    self.single.add(bytes, busy_ns, QUICK);
                    self.singles = self.singles.saturating_add(1);
                }
                (false, _) => {
                    self.following.add(bytes, busy_ns);
                    self.singles = 0;
                }
            }
            self.timed = self.timed.saturating_sub(1);
            (self.mark, self.alone) = (now, false);
        }
    }

    /// What it carries, in bytes per microsecond; `None` before the first timed write was confirmed, and for a while after a
    /// pause.
    #[inline(always)]
    pub fn measured(&self) -> Option<f64> {
        let single = self.single.rate();
        if self.singles < ALONE { self.following.slow.rate().or(single) } else { single }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A connection that is alone on its rail.
    #[derive(Debug, Default)]
    struct Alone {
        pace: Pace,
        carried_bytes: u64,
    }

    impl Alone {
        fn given(&mut self, bytes: u64, now_ns: Option<u64>) {
            let carried_bytes = self.carried_bytes;
            self.pace.given(bytes, now_ns.map(|now_ns| Moment { now_ns, carried_bytes }));
        }

        fn confirmed(&mut self, bytes: u64, now_ns: Option<u64>) {
            self.carried_bytes += bytes;
            let carried_bytes = self.carried_bytes;
            self.pace.confirmed(bytes, now_ns.map(|now_ns| Moment { now_ns, carried_bytes }));
        }
    }

    impl std::ops::Deref for Alone {
        type Target = Pace;

        fn deref(&self) -> &Pace {
            &self.pace
        }
    }

    #[test]
    fn idle_time_does_not_count_and_queueing_does_not_either() {
        let mut pace = Alone::default();
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
        let mut pace = Alone::default();
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
        let mut pace = Alone::default();
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

    /// Writes of 1000 bytes that follow one another, each taking so long.
    fn run(pace: &mut Alone, now: &mut u64, each_ns: impl IntoIterator<Item = u64>) {
        if pace.is_idle() {
            pace.given(1000, Some(*now));
        }
        for each_ns in each_ns {
            pace.given(1000, Some(*now));
            *now += each_ns;
            pace.confirmed(1000, Some(*now));
        }
    }

    #[test]
    fn a_rail_that_slows_is_known_within_eight_writes_and_so_is_its_return() {
        let (mut pace, mut now) = (Alone::default(), 0);
        run(&mut pace, &mut now, [100; 40]);
        run(&mut pace, &mut now, [400; 8]);
        assert!((2_400.0..3_600.0).contains(&pace.measured().unwrap()), "{pace:?}");
        run(&mut pace, &mut now, [400; 40]);
        run(&mut pace, &mut now, [100; 12]);
        assert!((6_000.0..10_500.0).contains(&pace.measured().unwrap()), "{pace:?}");
    }

    #[test]
    fn noise_does_not_move_it_much() {
        let (mut pace, mut now) = (Alone::default(), 0);
        // Now alone on the rail, now behind another connection's writes: 133 on average.
        let mut dice = 1_u64;
        let noise = std::iter::from_fn(|| {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            Some(if dice >> 33 & 1 == 0 { 67 } else { 200 })
        });
        let mut seen = Vec::new();
        for each_ns in noise.take(400) {
            run(&mut pace, &mut now, [each_ns]);
            seen.push(pace.measured().unwrap());
        }
        let (least, most) =
            seen[64..].iter().fold((f64::MAX, 0.0_f64), |(least, most), r| (least.min(*r), most.max(*r)));
        assert!(most < 1.5 * least, "{least} to {most}");
    }

    #[test]
    fn after_a_pause_one_write_is_enough() {
        let mut pace = Alone::default();
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
        let mut pace = Alone::default();
        pace.given(8, None);
        assert_eq!((pace.outstanding_bytes, pace.measured()), (8, None));
        pace.confirmed(8, None);
        assert_eq!((pace.outstanding_bytes, pace.measured()), (0, None));
    }
}
