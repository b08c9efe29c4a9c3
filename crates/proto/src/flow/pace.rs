//! The speed of a rail, measured from its completions.
//!
//! A rail serves the writes of a connection in order. A write's service begins when the write is
//! posted or when the write before it is done, whichever is later. The rate is a number of bytes
//! divided by the time of their service. Both are decayed sums: each new write lowers the weight of
//! all earlier writes. The sum of bytes includes the bytes of all connections between this process
//! and the peer, because the rail serves them in the same time. So the rate shows every cause of
//! slowness: the cable, a shared PCIe link, the peer's port, other jobs.
//!
//! A write is back-to-back if it is posted while an earlier write is under way. A write that finds
//! the rail idle measures less well: the write's latency lowers the rate, and credit that the idle
//! rail has collected (in a shaper or in buffers) raises the rate. So the rate comes from such
//! writes only if no back-to-back write was measured, or after `MIN_SINGLES` such writes in a row.
//!
//! The time of one write mostly shows the load of other connections at that moment. If shares
//! followed this noise, some rails would be idle. `Steady` therefore averages many writes. But if
//! the rate changes by more than noise, `Steady` follows the change within a few writes.

/// Each new write multiplies the sums of the quick average by this factor. The quick average covers
/// about four writes, to show changes.
const QUICK: f64 = 0.75;
/// Each new write multiplies the sums of the slow average by this factor. The slow average covers
/// about 32 writes, to ignore noise.
const SLOW: f64 = 31.0 / 32.0;
/// The quick average is off if the larger of the two averages is more than this multiple of the
/// smaller one.
const OFF: f64 = 1.6;
/// The quick average is far off if the larger of the two averages is more than this multiple of the
/// smaller one.
const FAR_OFF: f64 = 2.5;
/// Points that a write adds if the quick average is off after the write, but not far off. If the
/// quick average is not off, the points are set to 0.
const OFF_POINTS: u8 = 1;
/// Points that a write adds if the quick average is far off after the write.
const FAR_OFF_POINTS: u8 = 3;
/// Number of points that shows that the rail's speed has changed. The quick average then replaces
/// the slow one.
const CHANGED_POINTS: u8 = 6;
/// A timed write that finds the rail idle discards all measurements, if the timed write before it
/// was posted longer ago than this.
const OLD_NS: u64 = 150_000_000;
/// After this number of writes in a row that found the rail idle, the rate is the average of such
/// writes.
const MIN_SINGLES: u8 = 16;

/// A time, and the bytes that the rail had carried by then.
#[derive(Debug, Clone, Copy, Default)]
pub struct Moment {
    /// Time in nanoseconds.
    pub now_ns: u64,
    /// Bytes on this rail that were confirmed by then, over all connections between this process
    /// and the peer.
    pub carried_bytes: u64,
}

/// Measured speed of one rail, as seen by one connection.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pace {
    /// Bytes posted on the rail and not confirmed.
    pub outstanding_bytes: u64,
    /// Number of timed writes under way.
    timed: u32,
    /// Start of service of the oldest timed write under way.
    mark: Moment,
    /// True if the oldest timed write under way found the rail idle.
    found_idle: bool,
    /// True if the last confirmed write whose service took time had found the rail idle.
    last_found_idle: bool,
    /// Time at which the last timed write was posted.
    pub given_ns: u64,
    back_to_back: Steady,
    /// Average of the writes that found the rail idle.
    single: Served,
    /// Number of writes that found the rail idle, since the last back-to-back write.
    singles: u8,
}

#[derive(Debug, Clone, Copy, Default)]
struct Steady {
    quick: Served,
    slow: Served,
    /// Points for a difference between the two averages; see [`CHANGED_POINTS`].
    points: u8,
}

/// Decayed sums of bytes and of their service time.
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

    /// Returns the rate in bytes per microsecond.
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
        // Compares the ratio of the two rates by cross products, without a division.
        let (quick, slow) = (
            self.quick.bytes * self.slow.busy_ns,
            self.slow.bytes * self.quick.busy_ns,
        );
        let (more, less) = if quick > slow {
            (quick, slow)
        } else {
            (slow, quick)
        };
        if more <= OFF * less {
            self.points = 0;
        } else {
            self.points += if more > FAR_OFF * less {
                FAR_OFF_POINTS
            } else {
                OFF_POINTS
            };
            if self.points >= CHANGED_POINTS {
                (self.slow, self.points) = (self.quick, 0);
            }
        }
    }

    #[inline(always)]
    fn add_bytes(&mut self, bytes: u64) {
        self.quick.bytes += bytes as f64;
        self.slow.bytes += bytes as f64;
    }
}

impl Pace {
    /// Returns true if no timed write is under way. The service of the next timed write then begins
    /// when it is posted.
    #[inline(always)]
    pub fn is_idle(&self) -> bool {
        self.timed == 0
    }

    /// Records that a write was posted on the rail. `now` is set if the write is timed.
    #[inline(always)]
    pub fn record_queued(&mut self, bytes: u64, now: Option<Moment>) {
        self.outstanding_bytes += bytes;
        if let Some(now) = now {
            let now_ns = now.now_ns;
            if self.timed == 0 {
                self.mark = now;
                self.found_idle = true;
                if now_ns.saturating_sub(self.given_ns) > OLD_NS {
                    (self.back_to_back, self.single) = Default::default();
                }
            }
            self.timed += 1;
            self.given_ns = now_ns;
        }
    }

    /// Records that a write was confirmed. `now` is set if the write was timed; its `carried_bytes`
    /// include the write.
    #[inline(always)]
    pub fn confirmed(&mut self, bytes: u64, now: Option<Moment>) {
        self.outstanding_bytes = self.outstanding_bytes.saturating_sub(bytes);
        if let Some(now) = now {
            let busy_ns = now.now_ns.saturating_sub(self.mark.now_ns);
            // Includes the bytes of other connections, which the rail has served in the same time.
            let bytes = now.carried_bytes.saturating_sub(self.mark.carried_bytes);
            if busy_ns > 0 {
                self.last_found_idle = self.found_idle;
            }
            // `busy_ns` is 0 if this write was polled together with the write before it.
            match (self.last_found_idle, busy_ns) {
                (true, 0) => self.single.bytes += bytes as f64,
                (false, 0) => self.back_to_back.add_bytes(bytes),
                (true, _) => {
                    self.single.add(bytes, busy_ns, QUICK);
                    self.singles = self.singles.saturating_add(1);
                }
                (false, _) => {
                    self.back_to_back.add(bytes, busy_ns);
                    self.singles = 0;
                }
            }
            self.timed = self.timed.saturating_sub(1);
            (self.mark, self.found_idle) = (now, false);
        }
    }

    /// Returns the measured rate in bytes per microsecond. Returns `None` until a timed write is
    /// confirmed. A long pause discards the measurements.
    #[inline(always)]
    pub fn measured(&self) -> Option<f64> {
        let single = self.single.rate();
        if self.singles < MIN_SINGLES {
            self.back_to_back.slow.rate().or(single)
        } else {
            single
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default)]
    struct Alone {
        pace: Pace,
        carried_bytes: u64,
    }

    impl Alone {
        fn record_queued(&mut self, bytes: u64, now_ns: Option<u64>) {
            let carried_bytes = self.carried_bytes;
            self.pace.record_queued(
                bytes,
                now_ns.map(|now_ns| Moment {
                    now_ns,
                    carried_bytes,
                }),
            );
        }

        fn confirmed(&mut self, bytes: u64, now_ns: Option<u64>) {
            self.carried_bytes += bytes;
            let carried_bytes = self.carried_bytes;
            self.pace.confirmed(
                bytes,
                now_ns.map(|now_ns| Moment {
                    now_ns,
                    carried_bytes,
                }),
            );
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
        // 1000 bytes in 100 ns, that is 10 bytes per ns, both on an idle rail and back to back.
        for start in [0, 50_000, 1_000_000] {
            pace.record_queued(1000, Some(start));
            pace.record_queued(1000, Some(start));
            assert_eq!(pace.outstanding_bytes, 2000);
            pace.confirmed(1000, Some(start + 100));
            pace.confirmed(1000, Some(start + 200));
        }
        assert!(
            (pace.measured().unwrap() - 10_000.0).abs() < 1e-6,
            "{pace:?}"
        );
        assert_eq!(pace.outstanding_bytes, 0);
    }

    #[test]
    fn a_burst_after_idle_time_does_not_distort_the_pace() {
        let mut pace = Alone::default();
        for start in [0, 50_000, 100_000] {
            for _ in 0..3 {
                pace.record_queued(1000, Some(start));
            }
            for done in [start + 1, start + 101, start + 201] {
                pace.confirmed(1000, Some(done));
            }
        }
        assert!(
            (pace.measured().unwrap() - 10_000.0).abs() < 1e-6,
            "{pace:?}"
        );
        for start in (200_000..).step_by(1000).take(usize::from(MIN_SINGLES)) {
            pace.record_queued(1000, Some(start));
            pace.confirmed(1000, Some(start + 400));
        }
        assert!(
            (2_490.0..2_530.0).contains(&pace.measured().unwrap()),
            "alone for long: {pace:?}"
        );
    }

    #[test]
    fn completions_seen_late_and_together_average_out() {
        let mut pace = Alone::default();
        pace.record_queued(1000, Some(0));
        pace.record_queued(1000, Some(0));
        pace.confirmed(1000, Some(200));
        pace.confirmed(1000, Some(200));
        pace.record_queued(1000, Some(200));
        pace.record_queued(1000, Some(200));
        pace.record_queued(1000, Some(200));
        pace.confirmed(1000, Some(400));
        pace.confirmed(1000, Some(400));
        pace.confirmed(1000, Some(500));
        let rate = pace.measured().unwrap();
        assert!((8_000.0..13_000.0).contains(&rate), "{rate}");
    }

    /// Runs back-to-back writes of 1000 bytes, each with the given service time.
    fn run(pace: &mut Alone, now: &mut u64, each_ns: impl IntoIterator<Item = u64>) {
        if pace.is_idle() {
            pace.record_queued(1000, Some(*now));
        }
        for each_ns in each_ns {
            pace.record_queued(1000, Some(*now));
            *now += each_ns;
            pace.confirmed(1000, Some(*now));
        }
    }

    #[test]
    fn a_slower_rail_and_its_return_are_detected_within_eight_writes() {
        let mut pace = Alone::default();
        let mut now = 0;
        run(&mut pace, &mut now, [100; 40]);
        run(&mut pace, &mut now, [400; 8]);
        assert!(
            (2_400.0..3_600.0).contains(&pace.measured().unwrap()),
            "{pace:?}"
        );
        run(&mut pace, &mut now, [400; 40]);
        run(&mut pace, &mut now, [100; 12]);
        assert!(
            (6_000.0..10_500.0).contains(&pace.measured().unwrap()),
            "{pace:?}"
        );
    }

    #[test]
    fn noise_changes_the_pace_little() {
        let mut pace = Alone::default();
        let mut now = 0;
        // Some writes find the rail free, others wait for other connections: 133 ns on average.
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
        let (least, most) = seen[64..]
            .iter()
            .fold((f64::MAX, 0.0_f64), |(least, most), r| {
                (least.min(*r), most.max(*r))
            });
        assert!(most < 1.5 * least, "{least} to {most}");
    }

    #[test]
    fn after_a_pause_one_write_is_enough() {
        let mut pace = Alone::default();
        for start in [0, 100, 200, 300] {
            pace.record_queued(1000, Some(start));
            pace.confirmed(1000, Some(start + 100));
        }
        pace.record_queued(1000, Some(300_000_000));
        pace.confirmed(1000, Some(300_001_000));
        assert!(pace.measured().unwrap() < 1_200.0, "{pace:?}");
    }

    #[test]
    fn untimed_writes_only_add_to_the_queue() {
        let mut pace = Alone::default();
        pace.record_queued(8, None);
        assert_eq!((pace.outstanding_bytes, pace.measured()), (8, None));
        pace.confirmed(8, None);
        assert_eq!((pace.outstanding_bytes, pace.measured()), (0, None));
    }
}
