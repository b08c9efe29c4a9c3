mod crowd;

use super::*;
use crate::flow::paths::End;
use crate::wire::fields::Attachment;
use crate::wire::ids::{RailId, lane};
use std::collections::VecDeque;

const MIN: u64 = 16 * 1024;

pub(super) fn rails(mbps: &[u32]) -> Paths {
    let end = |(rail, &port_mbps): (RailId, &u32)| {
        let at = rail.index() as u8;
        End {
            rail,
            attachment: Attachment {
                link: at,
                link_mbps: 0,
                cable: at,
                port_mbps,
            },
        }
    };
    Paths::new(
        &RailId::all(mbps.len())
            .zip(mbps)
            .map(end)
            .map(|end| [end, end])
            .collect::<Vec<_>>(),
    )
}

#[derive(Clone)]
struct QueuedShare {
    message: u64,
    bytes: u64,
    timed: bool,
}

/// Simulation in virtual time. A sender always has a window of messages in flight, and each rail
/// serves its queue in order.
struct Run {
    striping: Striping,
    /// Rate of each rail, in bytes per microsecond.
    rates: Vec<f64>,
    /// For each PCIe link, its rails and its capacity in bytes per microsecond.
    links: Vec<(Vec<usize>, f64)>,
    /// Writes in each rail's queue, each with its number of unsent bytes.
    queues: Vec<VecDeque<(QueuedShare, f64)>>,
    /// Messages that are not done. Each has its number, and its count of unconfirmed shares.
    unfinished: VecDeque<(u64, usize)>,
    /// Confirmations in transit to the sender. Each has its time of arrival (in microseconds), the
    /// lane, and the confirmed write.
    confirmations: VecDeque<(f64, LaneId, QueuedShare)>,
    latency_us: f64,
    now_us: f64,
    next: u64,
    done_bytes: u64,
    carried: Vec<u64>,
}

impl Run {
    fn new(promised_mbps: &[u32], rates_mbps: &[f64]) -> Self {
        Self {
            striping: Striping::new(&rails(promised_mbps), MIN),
            rates: rates_mbps.iter().map(|mbps| mbps / 8.0).collect(),
            links: Vec::new(),
            queues: vec![VecDeque::new(); rates_mbps.len()],
            unfinished: VecDeque::new(),
            confirmations: VecDeque::new(),
            latency_us: 0.0,
            now_us: 0.0,
            next: 0,
            done_bytes: 0,
            carried: vec![0; rates_mbps.len()],
        }
    }

    fn now_ns(&self) -> u64 {
        (self.now_us * 1000.0) as u64
    }

    /// Runs for `seconds` with `window` messages of `bytes` under way. Returns the throughput in
    /// MB/s.
    fn run(&mut self, seconds: f64, window: usize, bytes: u64) -> f64 {
        let end = self.now_us + seconds * 1e6;
        let before = self.done_bytes;
        while self.now_us < end {
            while self.unfinished.len() < window {
                self.send(bytes);
            }
            self.step(bytes);
        }
        (self.done_bytes - before) as f64 / 1e6 / seconds
    }

    fn send(&mut self, bytes: u64) {
        let now_ns = self.now_ns();
        let (shares, timed) = if bytes <= self.striping.max_unsplit_bytes() {
            let lane = self.striping.lane_for(bytes, &NoOthers);
            let shares = Shares::whole(
                self.striping.lane_or_trial(lane, bytes, now_ns, &NoOthers),
                bytes,
            );
            (shares, self.striping.is_to_time(bytes))
        } else {
            (self.striping.cut(bytes, now_ns, &NoOthers), true)
        };
        for share in shares.as_slice() {
            let lane = share.lane;
            let moment = Moment {
                now_ns,
                carried_bytes: self.carried[lane.index()],
            };
            self.striping
                .record_queued(lane, share.bytes, timed.then_some(moment));
            let write = QueuedShare {
                message: self.next,
                bytes: share.bytes,
                timed,
            };
            self.queues[lane.index()].push_back((write, share.bytes as f64));
        }
        self.unfinished
            .push_back((self.next, shares.as_slice().len()));
        self.next += 1;
    }

    /// Returns the current rate of each rail. This is the rail's own rate, or a fraction of its
    /// PCIe link's capacity if the link is the bottleneck.
    fn current_rates(&self) -> Vec<f64> {
        let mut rates = self.rates.clone();
        for (rails, capacity) in &self.links {
            let mut busy: Vec<usize> = rails
                .iter()
                .copied()
                .filter(|rail| !self.queues[*rail].is_empty())
                .collect();
            busy.sort_by(|a, b| self.rates[*a].total_cmp(&self.rates[*b]));
            let mut left = *capacity;
            for (place, rail) in busy.iter().enumerate() {
                rates[*rail] = self.rates[*rail].min(left / (busy.len() - place) as f64);
                left -= rates[*rail];
            }
        }
        rates
    }

    fn step(&mut self, bytes: u64) {
        let rates = self.current_rates();
        let heads = self.queues.iter().zip(&rates);
        let served = heads
            .filter_map(|(queue, rate)| Some(queue.front()?.1 / rate))
            .fold(f64::INFINITY, f64::min);
        let confirmed = self
            .confirmations
            .front()
            .map_or(f64::INFINITY, |next| next.0 - self.now_us);
        let step = served.min(confirmed);
        self.now_us += step;
        for (lane, rate) in LaneId::all(rates.len()).zip(&rates) {
            let Some(head) = self.queues[lane.index()].front_mut() else {
                continue;
            };
            head.1 -= step * rate;
            if head.1 > 1e-3 {
                continue;
            }
            let (write, _) = self.queues[lane.index()].pop_front().unwrap();
            self.confirmations
                .push_back((self.now_us + self.latency_us, lane, write));
        }
        let now_ns = self.now_ns();
        while self
            .confirmations
            .front()
            .is_some_and(|next| next.0 <= self.now_us + 1e-6)
        {
            let (_, lane, write) = self.confirmations.pop_front().unwrap();
            self.carried[lane.index()] += write.bytes;
            let moment = Moment {
                now_ns,
                carried_bytes: self.carried[lane.index()],
            };
            self.striping
                .confirmed(lane, write.bytes, write.timed.then_some(moment));
            self.unfinished
                .iter_mut()
                .find(|(number, _)| *number == write.message)
                .unwrap()
                .1 -= 1;
        }
        // The caller tests messages in order, so a finished message waits for earlier messages.
        while self.unfinished.front().is_some_and(|(_, left)| *left == 0) {
            self.unfinished.pop_front();
            self.done_bytes += bytes;
        }
    }
}

/// Other connections with 1 MiB under way on the rail of one lane.
struct LoadOnLane(LaneId);

impl OtherConnections for LoadOnLane {
    fn waiting_bytes(&self, lane: LaneId) -> u64 {
        if lane == self.0 { 1 << 20 } else { 0 }
    }

    fn share_quality(&self, _lane: LaneId, quality: f64) -> f64 {
        quality
    }
}

#[test]
fn unequal_rails_with_equal_announced_rates_carry_their_sum() {
    let mut run = Run::new(&[10_000; 4], &[80.0, 80.0, 80.0, 20.0]);
    run.run(1.0, 8, 512 * 1024);
    let mbytes = run.run(2.0, 8, 512 * 1024);
    assert!(mbytes > 0.98 * 32.5, "{mbytes} of 32.5 MB/s");
}

/// One of two rails on a PCIe link runs at a quarter of its speed. The other rail uses the rest of
/// the link's capacity.
#[test]
fn a_slow_rail_leaves_the_rest_of_its_link_to_the_other_rail() {
    for bytes in [512 * 1024, 1 << 20, 8 << 20] {
        let ends: Vec<_> = [(0, 0), (1, 0), (0, 1), (1, 1)]
            .iter()
            .zip(RailId::all(4))
            .map(|(&(link, cable), rail)| End {
                rail,
                attachment: Attachment {
                    link,
                    link_mbps: 112_000,
                    cable,
                    port_mbps: 200_000,
                },
            })
            .collect();
        let paths = Paths::new(&ends.iter().map(|end| [*end, *end]).collect::<Vec<_>>());
        let mut run = Run::new(&[100_000; 4], &[28_000.0, 112_000.0, 112_000.0, 112_000.0]);
        run.striping = Striping::new(&paths, MIN);
        run.links = vec![(vec![0, 2], 14_000.0), (vec![1, 3], 14_000.0)];
        run.run(0.5, 2, bytes);
        let mbytes = run.run(0.5, 2, bytes);
        assert!(mbytes > 0.97 * 28_000.0, "{bytes}: {mbytes}");
    }
}

#[test]
fn shares_follow_a_changed_rail_rate_within_a_second() {
    let mut run = Run::new(&[10_000; 4], &[80.0; 4]);
    run.run(1.0, 8, 512 * 1024);
    assert!(run.run(1.0, 8, 512 * 1024) > 0.98 * 40.0);
    run.rates[2] = 2.5;
    run.run(1.0, 8, 512 * 1024);
    let fallen = run.run(1.0, 8, 512 * 1024);
    assert!(fallen > 0.95 * 32.5, "{fallen}");
    run.rates[2] = 10.0;
    run.run(1.0, 8, 512 * 1024);
    let back = run.run(1.0, 8, 512 * 1024);
    assert!(back > 0.98 * 40.0, "{back}");
}

#[test]
fn a_rail_left_out_as_too_slow_is_used_again_when_fast() {
    let mut run = Run::new(&[10_000; 4], &[80_000.0, 80_000.0, 80_000.0, 400.0]);
    run.run(0.2, 8, 1 << 20);
    let without = run.run(0.5, 8, 1 << 20);
    assert!(without > 0.98 * 30_000.0, "{without}");
    run.rates[3] = 10_000.0;
    run.run(1.0, 8, 1 << 20);
    let with = run.run(0.5, 8, 1 << 20);
    assert!(with > 0.98 * 40_000.0, "{with}");
}

#[test]
fn shares_are_balanced_with_one_message_in_flight() {
    for slow in [3_000.0, 1_500.0] {
        let mut run = Run::new(&[10_000; 2], &[9_000.0, slow]);
        run.run(0.1, 1, 1 << 20);
        let mbytes = run.run(0.1, 1, 1 << 20);
        assert!(mbytes > 0.97 * (9_000.0 + slow) / 8.0, "{slow}: {mbytes}");
    }
}

/// First, one rail is slow from the start. Later, the rail in use becomes slow.
#[test]
fn unsplit_messages_move_away_from_a_slow_rail() {
    let mut run = Run::new(&[100_000; 4], &[2_500.0, 10_000.0, 10_000.0, 10_000.0]);
    // With this latency, a fast rail with one message in flight is no faster than the slow rail
    // with several messages in flight.
    run.latency_us = 10.0;
    run.run(1.0, 8, 4096);
    let mbytes = run.run(1.0, 8, 4096);
    assert!(mbytes > 0.95 * 1_250.0, "{mbytes}");
    // No trial finds a better rail for two seconds. Then the rail in use becomes slow.
    run.run(2.0, 8, 4096);
    let slow = run.striping.favourite;
    run.rates[slow.index()] = 2_500.0 / 8.0;
    run.run(1.0, 8, 4096);
    let mbytes = run.run(0.5, 8, 4096);
    assert!(
        mbytes > 0.95 * 1_250.0 && run.striping.favourite != slow,
        "{mbytes}"
    );
}

#[test]
fn each_rail_gets_a_trial_in_turn() {
    for fast in 1..4 {
        let mut rates = [1_000.0; 4];
        rates[fast] = 10_000.0;
        let mut run = Run::new(&[100_000; 4], &rates);
        run.latency_us = 10.0;
        run.run(4.0, 8, 4096);
        assert_eq!(run.striping.favourite, lane(fast));
    }
}

#[test]
fn trials_are_rare_when_all_rails_are_equal() {
    let mut run = Run::new(&[100_000; 4], &[10_000.0; 4]);
    run.latency_us = 10.0;
    run.run(4.0, 8, 4096);
    let mut trials = 0;
    let mut trying = false;
    for _ in 0..20_000 {
        run.run(50e-6, 8, 4096);
        let tries = matches!(run.striping.trials, Trials::Trial { .. });
        trials += u32::from(tries && !trying);
        trying = tries;
    }
    assert!((1..=2).contains(&trials), "{trials} trials in a second");
}

#[test]
fn a_small_message_stays_on_its_rail_unless_the_rail_is_busy_or_slow() {
    let mut striping = Striping::new(&rails(&[100_000; 4]), MIN);
    assert_eq!(striping.max_unsplit_bytes(), 2 * MIN - 1);
    assert_eq!(striping.lane_for(8, &NoOthers), lane(0));
    striping.record_queued(lane(0), 1 << 15, None);
    assert_eq!(
        striping.lane_for(8, &NoOthers),
        lane(0),
        "32 KiB queued are too few to change the rail"
    );
    striping.record_queued(lane(0), 1 << 20, None);
    assert_eq!(striping.lane_for(8, &NoOthers), lane(1));
    assert_eq!(
        striping.lane_for(8, &LoadOnLane(lane(1))),
        lane(2),
        "other connections use lane 1"
    );
    // The favourite is lane 2. It is measured nearly ten times slower than lane 3.
    for slow in [lane(2), lane(3)] {
        striping.record_queued(slow, 1 << 20, Some(Moment::default()));
        let now_ns = if slow == lane(2) { 800_000 } else { 84_000 };
        striping.confirmed(
            slow,
            1 << 20,
            Some(Moment {
                now_ns,
                carried_bytes: 1 << 20,
            }),
        );
    }
    striping.cut(1 << 20, REFRESH_NS, &NoOthers);
    assert_ne!(striping.lane_for(8, &NoOthers), lane(2));
}
