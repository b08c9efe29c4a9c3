//! Tests of many connections over the same rails, in virtual time: throughput and shares.

use super::super::*;
use super::rails;
use crate::wire::ids::lane;
use std::cell::Cell;
use std::collections::VecDeque;

const MIN: u64 = 16 * 1024;

/// State of each rail that all connections share. Each field borrows the field of [`Crowd`] with
/// the same name.
struct CrowdState<'a> {
    waiting: &'a [u64],
    busy: &'a [u64],
    quality: &'a [Cell<f64>],
}

impl OtherConnections for CrowdState<'_> {
    fn waiting_bytes(&self, lane: LaneId) -> u64 {
        self.waiting[lane.index()]
    }

    fn busy_bytes(&self, lane: LaneId) -> u64 {
        self.busy[lane.index()]
    }

    /// Computes the average as `comm::rail::path_quality` does.
    fn share_quality(&self, lane: LaneId, quality: f64) -> f64 {
        let all = &self.quality[lane.index()];
        all.set(if all.get() > 0.0 {
            all.get() + (quality - all.get()) / 8.0
        } else {
            quality
        });
        all.get()
    }
}

struct CrowdShare {
    connection: usize,
    message: u64,
    bytes: u64,
    left: f64,
}

/// Connections, each with a window of messages, over rails that serve their queues in order.
struct Crowd {
    stripings: Vec<Striping>,
    /// Rate of each rail, in bytes per microsecond.
    rates: Vec<f64>,
    queues: Vec<VecDeque<CrowdShare>>,
    /// Bytes under way on each rail.
    waiting: Vec<u64>,
    /// Bytes posted on each rail since it was last idle.
    busy: Vec<u64>,
    /// Average of the qualities that the connections have reported for each rail.
    quality: Vec<Cell<f64>>,
    /// Bytes that each rail has carried so far.
    carried: Vec<u64>,
    /// For each connection, its messages under way. Each has its number, and its count of
    /// unfinished shares.
    unfinished: Vec<VecDeque<(u64, usize)>>,
    now_us: f64,
    next: u64,
    messages: u64,
    shares: u64,
    done_bytes: u64,
}

impl Crowd {
    fn new(connections: usize, rates_mbps: &[f64]) -> Self {
        let paths = rails(&vec![10_000; rates_mbps.len()]);
        Self {
            stripings: vec![Striping::new(&paths, MIN); connections],
            rates: rates_mbps.iter().map(|mbps| mbps / 8.0).collect(),
            queues: rates_mbps.iter().map(|_| VecDeque::new()).collect(),
            waiting: vec![0; rates_mbps.len()],
            busy: vec![0; rates_mbps.len()],
            quality: vec![Cell::new(0.0); rates_mbps.len()],
            carried: vec![0; rates_mbps.len()],
            unfinished: vec![VecDeque::new(); connections],
            now_us: 0.0,
            next: 0,
            messages: 0,
            shares: 0,
            done_bytes: 0,
        }
    }

    /// Runs until the connections have sent `each` messages on average. Every connection always has
    /// `window` messages under way. Returns the throughput in bytes per microsecond.
    fn run(&mut self, each: usize, window: usize, bytes: u64) -> f64 {
        let begin = self.now_us;
        let before = self.done_bytes;
        (self.messages, self.shares) = (0, 0);
        while self.done_bytes - before < (each * self.stripings.len()) as u64 * bytes {
            for connection in 0..self.stripings.len() {
                while self.unfinished[connection].len() < window {
                    self.send(connection, bytes);
                }
            }
            self.step(bytes);
        }
        (self.done_bytes - before) as f64 / (self.now_us - begin)
    }

    /// Sends `each` messages on each connection, at most two at a time. Returns the time until all
    /// rails are idle, in microseconds.
    fn burst(&mut self, each: usize, bytes: u64) -> f64 {
        let begin = self.now_us;
        let mut left = vec![each; self.stripings.len()];
        loop {
            for (connection, left) in left.iter_mut().enumerate() {
                while *left > 0 && self.unfinished[connection].len() < 2 {
                    self.send(connection, bytes);
                    *left -= 1;
                }
            }
            if self.queues.iter().all(VecDeque::is_empty) {
                return self.now_us - begin;
            }
            self.step(bytes);
        }
    }

    fn send(&mut self, connection: usize, bytes: u64) {
        let now_ns = (self.now_us * 1000.0) as u64;
        let others = CrowdState {
            waiting: &self.waiting,
            busy: &self.busy,
            quality: &self.quality,
        };
        let striping = &mut self.stripings[connection];
        let shares = if bytes > striping.max_unsplit_bytes() {
            striping.cut(bytes, now_ns, &others)
        } else {
            let mut by = striping.lane_for(bytes, &others);
            if striping.is_counted(bytes) {
                by = striping.lane_or_trial(by, bytes, now_ns, &others);
            }
            Shares::whole(by, bytes)
        };
        for share in shares.as_slice() {
            let lane = share.lane;
            let carried_bytes = self.carried[lane.index()];
            self.stripings[connection].record_queued(
                lane,
                share.bytes,
                Some(Moment {
                    now_ns,
                    carried_bytes,
                }),
            );
            let busy = if self.waiting[lane.index()] == 0 {
                0
            } else {
                self.busy[lane.index()]
            };
            self.busy[lane.index()] = busy + share.bytes;
            self.waiting[lane.index()] += share.bytes;
            let write = CrowdShare {
                connection,
                message: self.next,
                bytes: share.bytes,
                left: share.bytes as f64,
            };
            self.queues[lane.index()].push_back(write);
        }
        self.messages += 1;
        self.shares += shares.as_slice().len() as u64;
        self.unfinished[connection].push_back((self.next, shares.as_slice().len()));
        self.next += 1;
    }

    fn step(&mut self, bytes: u64) {
        let heads = self.queues.iter().zip(&self.rates);
        let step = heads
            .filter_map(|(queue, rate)| Some(queue.front()?.left / rate))
            .fold(f64::INFINITY, f64::min);
        self.now_us += step;
        let now_ns = (self.now_us * 1000.0) as u64;
        for lane in LaneId::all(self.queues.len()) {
            let Some(head) = self.queues[lane.index()].front_mut() else {
                continue;
            };
            head.left -= step * self.rates[lane.index()];
            if head.left > 1e-3 {
                continue;
            }
            let CrowdShare {
                connection,
                message,
                bytes: share,
                ..
            } = self.queues[lane.index()].pop_front().unwrap();
            self.waiting[lane.index()] -= share;
            self.carried[lane.index()] += share;
            let carried_bytes = self.carried[lane.index()];
            self.stripings[connection].confirmed(
                lane,
                share,
                Some(Moment {
                    now_ns,
                    carried_bytes,
                }),
            );
            let messages = &mut self.unfinished[connection];
            messages
                .iter_mut()
                .find(|(number, _)| *number == message)
                .unwrap()
                .1 -= 1;
            // The caller tests messages in order, so a finished message waits for earlier messages.
            while messages.front().is_some_and(|(_, left)| *left == 0) {
                messages.pop_front();
                self.done_bytes += bytes;
            }
        }
    }

    fn shares_of_a_message(&self) -> f64 {
        self.shares as f64 / self.messages as f64
    }
}

/// Uses 18 connections, because NCCL uses 18 channels on a Spark.
#[test]
fn many_waiting_messages_are_sent_unsplit_and_no_rail_is_idle() {
    for bytes in [64 * 1024, 128 * 1024] {
        let mut crowd = Crowd::new(18, &[56_000.0; 4]);
        crowd.run(50, 4, bytes);
        let rate = crowd.run(200, 4, bytes);
        assert!(rate > 0.99 * 28_000.0, "{bytes}: {rate} of 28,000 bytes/us");
        assert!(
            crowd.shares_of_a_message() < 1.02,
            "{bytes}: {} shares",
            crowd.shares_of_a_message()
        );
    }
}

/// Sends the messages of one collective. If messages of 1 MiB were sent unsplit, some rails would
/// be idle at the end.
#[test]
fn a_burst_of_large_messages_ends_on_all_rails_together() {
    for each in [2, 4, 8] {
        let mut crowd = Crowd::new(18, &[56_000.0; 4]);
        let taken_us = crowd.burst(each, 1 << 20);
        let least_us = ((18 * each) << 20) as f64 / 28_000.0;
        assert!(
            taken_us < 1.01 * least_us,
            "{each} messages of each connection: {taken_us} us, at best {least_us} us"
        );
    }
}

#[test]
fn few_waiting_messages_are_split() {
    for (connections, window) in [(1, 1), (1, 8), (2, 2)] {
        let mut crowd = Crowd::new(connections, &[56_000.0; 4]);
        crowd.run(50, window, 256 * 1024);
        let rate = crowd.run(200, window, 256 * 1024);
        assert!(
            rate > 0.98 * 28_000.0,
            "{connections} x {window}: {rate} of 28,000 bytes/us"
        );
        let shares = crowd.shares_of_a_message();
        assert!(shares > 3.0, "{connections} x {window}: {shares} shares");
    }
}

#[test]
fn unequal_rails_carry_their_sum_for_many_connections() {
    for (slow, bytes) in [
        (14_000.0, 128 * 1024),
        (14_000.0, 1 << 20),
        (2_000.0, 128 * 1024),
    ] {
        let mut crowd = Crowd::new(18, &[56_000.0, slow, 56_000.0, 56_000.0]);
        crowd.run(200, 4, bytes);
        let rate = crowd.run(400, 4, bytes);
        let all = (3.0 * 56_000.0 + slow) / 8.0;
        assert!(
            rate > 0.98 * all,
            "a rail of {slow} Mb/s, {bytes} bytes: {rate} of {all} bytes/us"
        );
    }
}

/// A message is cut over the free rails, even if another rail is stalled.
#[test]
fn a_rail_that_waits_for_others_does_not_prevent_splitting() {
    let mut striping = Striping::new(&rails(&[10_000; 4]), MIN);
    let quality = [const { Cell::new(0.0) }; 4];
    let shared = |waiting| CrowdState {
        waiting,
        busy: &[1 << 30; 4],
        quality: &quality,
    };
    let shares = striping.cut(128 * 1024, 0, &shared(&[0, 0, 0, 1 << 30]));
    assert_eq!(shares.as_slice().len(), 3, "the other rails are free");
    let shares = striping.cut((1 << 17) + 128, 0, &shared(&[0, 0, 0, 1 << 30]));
    assert_eq!(
        shares.as_slice().len(),
        4,
        "a large message ignores the backlog of other connections"
    );
    let crowded = [1 << 24, 1 << 24, (1 << 24) - (1 << 17), 1 << 24];
    let shares = striping.cut(1 << 17, 0, &shared(&crowded));
    let [share] = shares.as_slice() else {
        panic!("{shares:?}")
    };
    assert_eq!(
        (share.lane, share.bytes),
        (lane(2), 1 << 17),
        "the rail that is done first"
    );
    assert_eq!(
        striping
            .cut((1 << 17) + 128, 0, &shared(&crowded))
            .as_slice()
            .len(),
        4,
        "a large message is cut"
    );
}

/// Returns the best possible time of a burst, in microseconds. Each message is cut into equal
/// pieces of at least [`MIN`] bytes; a smaller message is one piece. Each piece in turn goes to the
/// rail that finishes it first.
fn best_us(connections: usize, each: usize, bytes: u64, rates: &[f64]) -> f64 {
    let pieces = (bytes / MIN).max(1);
    let piece = bytes as f64 / pieces as f64;
    let mut done: Vec<f64> = vec![0.0; rates.len()];
    for _ in 0..(connections * each) as u64 * pieces {
        let after = |rail: &usize| done[*rail] + piece / rates[*rail];
        let rail = (0..rates.len())
            .min_by(|a, b| after(a).total_cmp(&after(b)))
            .unwrap();
        done[rail] = after(&rail);
    }
    done.into_iter().fold(0.0, f64::max)
}

/// Covers the bursts that NCCL's channels, steps and sizes produce. Messages that are always sent
/// unsplit may stay on one rail while others are idle ([`STAY_BYTES`]). So the test prints the rows
/// of these sizes, but does not check them.
#[test]
fn a_burst_of_messages_of_any_size_ends_on_all_rails_within_5_percent_of_the_best_time() {
    const FULL: f64 = 56_000.0;
    let fabrics: [&[f64]; 4] = [
        &[FULL; 2],
        &[FULL; 4],
        &[FULL, FULL / 4.0],
        &[FULL, FULL / 4.0, FULL, FULL],
    ];
    let mut late = Vec::new();
    println!(
        "time over the best time, the worst of 1 to 32 connections with 1 to 8 messages; shares of a message at 18 x 2"
    );
    for rates_mbps in fabrics {
        println!("rails of {rates_mbps:?} Mb/s");
        for kib in [8, 16, 32, 43, 58, 64, 87, 128, 174, 256, 512, 1024, 4096] {
            let mut worst = 1.0_f64;
            let mut shares = 0.0;
            for (connections, each) in
                (1..=32).flat_map(|connections| [1, 2, 4, 8].map(|each| (connections, each)))
            {
                let mut crowd = Crowd::new(connections, rates_mbps);
                if rates_mbps.iter().any(|rate| *rate != FULL) {
                    // First, the connections measure the rails.
                    crowd.run(64, 4, 256 * 1024);
                    crowd.burst(0, 0);
                }
                (crowd.messages, crowd.shares) = (0, 0);
                let taken = crowd.burst(each, kib * 1024);
                let best = best_us(connections, each, kib * 1024, &crowd.rates);
                let ratio = if taken - best <= STAY_US {
                    1.0
                } else {
                    taken / best
                };
                worst = worst.max(ratio);
                if (connections, each) == (18, 2) {
                    shares = crowd.shares_of_a_message();
                }
                if ratio > 1.05 && kib * 1024 > crowd.stripings[0].max_unsplit_bytes() {
                    late.push((rates_mbps, kib, connections, each, ratio));
                }
            }
            println!("{kib:>6} KiB {worst:.2}, {shares:.1} shares");
        }
    }
    assert!(late.is_empty(), "late: {late:?}");
}
