//! Chooses the lanes of each message. A lane is a rail within one connection. A small message is
//! sent unsplit on one lane, the favourite. A large message is cut into shares, one for each lane
//! that makes it finish earlier.
//!
//! Each direction of a connection has one [`Striping`]. It measures the rate of each lane
//! ([`Pace`]), and the planner ([`super::plan`]) computes shares that finish together. Each lane
//! also has an expected rate, computed from its path ([`Paths`]). The quality of a lane is its
//! measured rate divided by its expected rate. Until a lane is measured, its rate is estimated as
//! its expected rate times the average quality of the best measured lanes.
//!
//! All connections of a process use the same rails. For a message of up to 128 KiB, the planner
//! therefore gets the backlog of each rail, summed over all connections. A burst of messages from
//! many connections then ends within 5 % of the best possible time, for messages of 32 KiB and more
//! (`tests/crowd.rs`). For a larger message, the planner gets only this connection's own backlog.
//! Otherwise the backlog for a peer that accepts no data would keep other peers' messages off the
//! rails.

use super::pace::{Moment, Pace};
use super::paths::Paths;
use super::plan::{LaneLoad, SHARE_ALIGNMENT, Shares, divide};
use crate::wire::MAX_RAILS;
use crate::wire::ids::LaneId;

/// A small message stays on the favourite if it waits there for at most this number of
/// microseconds, or if no other lane would finish the message earlier by more than this number. A
/// smaller gain is not worth the change, because the favourite's queue pair and completion queue
/// are in the processor's cache.
const STAY_US: f64 = 5.0;
/// A small message stays on the favourite if at most this number of bytes waits there: eight
/// messages of 4 KiB. If the processor is the bottleneck, a second rail only adds work (soft-RoCE:
/// 13.6 MB/s over four rails, 14.0 MB/s over one).
const STAY_BYTES: u64 = 32 * 1024;

/// Smallest write that counts for a rail's measured rate, and for the load that other connections
/// see. The time of a smaller write is mostly the fixed cost of a message.
const COUNTED_BYTES: u64 = 4096;
/// Unsplit messages up to this size are timed by samples, except in a trial, where each is timed.
/// (When each message was timed, a stream of 4 KiB messages over soft-RoCE was 5 % slower.)
const SAMPLED_BYTES: u64 = 16 * 1024;
/// Number of consecutive messages in a sample. All of them are timed.
const SAMPLE: u32 = 16;
/// One sample is taken in each sequence of this number of messages.
const SAMPLE_EVERY: u32 = 128;

/// A lane replaces the favourite if its rate is more than this factor times the favourite's rate.
const CLEARLY_FASTER: f64 = 1.25;

/// Accepted delay of a message in exchange for fewer shares, as a fraction of the time until the
/// first lane is free: the message must wait for that time in any case. Fewer shares save work,
/// because each share costs a post and two completions. If many messages wait, the rails are busy
/// even if no message is cut.
///
/// Measured on rung 3 (ARCHITECTURE.md), with 18 connections that each had two messages under way,
/// and two cables at 0.05 of their speed. Messages of 64 KiB used 80 to 81 % of the links if each
/// was cut, and 87 to 90 % if none was. Messages of 128 KiB used 94 to 97 % if cut, and 99 % if
/// not.
const MAX_DELAY_PER_WAIT: f64 = 0.25;
/// Second limit for the accepted delay, as a fraction of the time for which the rails have been
/// busy. The delay of a burst's last message delays the whole burst, and no message is known in
/// advance to be the last.
const MAX_DELAY_PER_BUSY_TIME: f64 = 0.03;
/// No delay is accepted for messages above this size, because the cost of a share is small compared
/// with the cost of the message.
///
/// Measured on rung 5, with two H200, 18 channels, and two cables at 0.1 and at 0.25 of their
/// speed. NCCL sends an all_gather of 128 MiB as 72 messages of 0.9 MiB. These used 82 to 97 % of
/// the links if unsplit, and 95 to 98 % if cut. An all_gather of 4 MiB, sent as messages of 58 KiB,
/// took 570 us with unsplit messages and 760 us with cut messages.
const MAX_UNSPLIT_WHEN_BUSY_BYTES: u64 = 128 * 1024;

/// Lanes whose quality is at least this fraction of the best quality count as equally good.
const ALIKE: f64 = 0.75;

/// Minimum time between two updates of the rates for messages that are cut. A change of a rail's
/// speed must take effect within a second, which is 1,000 times as long. (A change of favourite, a
/// trial, and the loss or return of a lane update the rates without this minimum.)
const REFRESH_NS: u64 = 1_000_000;

/// Idle time after which a lane that was too slow for a share is tried again. [`RETRY_PATIENCE`]
/// may lengthen this time. The first trial of another lane also waits for this time.
const RETRY_NS: u64 = 200_000_000;
/// A lane is tried again only if its idle time is more than this factor times the expected duration
/// of the write that tries the lane.
const RETRY_PATIENCE: f64 = 20.0;

/// Number of unsplit messages that a trial of another lane sends there after its first message.
/// This is several times the number of messages in flight, because fewer messages would show the
/// lane's latency instead of its rate.
const TRIAL: u8 = 32;
/// Pause between two trials, at first and after the favourite has changed or slowed. Each trial
/// that finds no better lane doubles the pause, up to [`TRIAL_SELDOM_NS`]. (A constant pause of 50
/// ms made a stream of 4 KiB messages over soft-RoCE 9 % slower.)
const TRIAL_EVERY_NS: u64 = 50_000_000;
/// Longest pause between two trials. It is below a second, so that a trial notices within a second
/// that the favourite has slowed.
const TRIAL_SELDOM_NS: u64 = 800_000_000;
/// The favourite has slowed if its rate falls below this fraction of its rate at the last trial.
const SLOWED: f64 = 0.7;

/// State of the trials. In a trial, a series of unsplit messages uses another lane, to measure it.
///
/// `every_ns` is the pause between trials. The end of a trial doubles or resets it, and a slowed
/// favourite resets it. `rate` is the favourite's rate when a trial last started, or when no lane
/// could be tried.
#[derive(Debug, Clone, Copy)]
enum Trials {
    /// No trial is running. The next one may start at `next_ns`.
    Rest {
        next_ns: u64,
        every_ns: u64,
        rate: f64,
    },
    /// `left` more messages use the lane on trial, which is the favourite until the trial ends.
    /// Then `home`, the favourite before the trial, is the favourite again, unless another lane is
    /// clearly faster.
    Trial {
        left: u8,
        home: LaneId,
        every_ns: u64,
        rate: f64,
    },
}

/// What this connection needs to know of all connections of this process: their load on the lanes'
/// rails, and their measurements. Called only by the thread that uses this connection's data path.
pub trait OtherConnections {
    /// Returns the bytes that all connections of this process, including this one, have under way
    /// on a lane's rail. Only writes of at least `COUNTED_BYTES` count. An implementor may scale
    /// the number to give a slow rail more weight.
    fn waiting_bytes(&self, lane: LaneId) -> u64;
    /// Returns the bytes that all connections of this process have posted on a lane's rail since
    /// the rail was last idle. Only writes of at least `COUNTED_BYTES` count. The default, 0, is
    /// for implementors that cut no messages.
    fn busy_bytes(&self, _lane: LaneId) -> u64 {
        0
    }
    /// Reports a lane's quality as this connection has measured it, relative to the connection's
    /// best lane: above 0, up to 1. Returns the average quality that all connections of this
    /// process have reported for the lane's path.
    fn share_quality(&self, lane: LaneId, quality: f64) -> f64;
}

struct NoOthers;

impl OtherConnections for NoOthers {
    fn waiting_bytes(&self, _lane: LaneId) -> u64 {
        0
    }

    fn share_quality(&self, _lane: LaneId, quality: f64) -> f64 {
        quality
    }
}

/// The lanes of one direction of a connection.
#[derive(Debug, Clone)]
pub struct Striping {
    paces: [Pace; MAX_RAILS],
    /// Estimated rate of each lane, in bytes per microsecond.
    rates: [f64; MAX_RAILS],
    /// For each lane, while it is the favourite: the bytes that may wait there before another lane
    /// is considered for a small message.
    stay_bytes: [u64; MAX_RAILS],
    favourite: LaneId,
    min_share_bytes: u64,
    /// [`COUNTED_BYTES`] if there are several lanes. With one lane `u64::MAX`: then no write
    /// counts, neither for the lane's measured rate nor for the load that other connections see.
    counted_bytes: u64,
    /// Number of calls of [`Striping::is_to_time`]. Wraps around.
    sampled: u32,
    /// Number of lanes, including lost ones.
    count: usize,
    /// Bit set of the lost lanes.
    lost: u8,
    /// True if a timed write was confirmed after the last update of the rates.
    stale: bool,
    refreshed_ns: u64,
    trials: Trials,
    /// Expected rate of each lane, in bytes per microsecond.
    expected_rates: [f64; MAX_RAILS],
    /// Present until the first late lane works.
    late: Option<LateLanes>,
}

/// Lanes that may never work, and what changes when one of them does.
#[derive(Debug, Clone)]
struct LateLanes {
    /// Bit set.
    lanes: u8,
    /// The expected rates from then on.
    expected_rates: [f64; MAX_RAILS],
}

impl Striping {
    /// Returns the state before the first message. `min_share_bytes` is the smallest useful share.
    /// Every connection begins with its first lane as the favourite, unless another lane is clearly
    /// faster. The connections then mostly use one rail for small messages, which costs less work
    /// than several rails.
    pub fn new(paths: &Paths, min_share_bytes: u64) -> Self {
        let expected = |mbps: f64| (mbps / 8.0).max(f64::MIN_POSITIVE);
        let expected_rates = paths.even_rates().map(expected);
        let late = LateLanes {
            lanes: paths.late(),
            expected_rates: paths.rates_with_late().map(expected),
        };
        let count = paths.count().clamp(1, MAX_RAILS);
        let mut striping = Self {
            paces: [Pace::default(); MAX_RAILS],
            rates: [0.0; MAX_RAILS],
            stay_bytes: [0; MAX_RAILS],
            favourite: LaneId::default(),
            min_share_bytes: min_share_bytes.max(SHARE_ALIGNMENT),
            counted_bytes: if count > 1 { COUNTED_BYTES } else { u64::MAX },
            sampled: 0,
            count,
            lost: 0,
            stale: false,
            refreshed_ns: 0,
            trials: Trials::Rest {
                next_ns: RETRY_NS,
                every_ns: TRIAL_EVERY_NS,
                rate: 0.0,
            },
            expected_rates,
            late: Some(late).filter(|late| late.lanes != 0),
        };
        striping.refresh(&NoOthers);
        striping
    }

    /// Removes a lost lane. Discards its measurements and its outstanding bytes.
    pub fn lose(&mut self, lane: LaneId) {
        self.lost |= lane.bit();
        self.paces[lane.index()] = Pace::default();
        if matches!(self.trials, Trials::Trial { .. }) {
            self.trials = Trials::Rest {
                next_ns: 0,
                every_ns: TRIAL_EVERY_NS,
                rate: 0.0,
            };
        }
        self.refresh(&NoOthers);
    }

    /// Restores a lost lane, without a measured speed.
    pub fn regain(&mut self, lane: LaneId) {
        self.lost &= !lane.bit();
        if let Some(late) = self.late.take_if(|late| late.lanes & lane.bit() != 0) {
            self.expected_rates = late.expected_rates;
        }
        self.refresh(&NoOthers);
    }

    /// Returns true if a lane is not lost.
    #[inline(always)]
    pub fn has(&self, lane: LaneId) -> bool {
        self.lost & lane.bit() == 0
    }

    /// Returns the size of the largest message that is always sent unsplit.
    pub fn max_unsplit_bytes(&self) -> u64 {
        if self.count < 2 {
            u64::MAX
        } else {
            2 * self.min_share_bytes - 1
        }
    }

    /// Returns true if a write of this size counts for its lane's measured rate.
    #[inline(always)]
    pub fn is_counted(&self, bytes: u64) -> bool {
        bytes >= self.counted_bytes
    }

    /// Returns true if the next unsplit message must be timed. Called only for sizes that count
    /// ([`Striping::is_counted`]).
    #[inline(always)]
    pub fn is_to_time(&mut self, bytes: u64) -> bool {
        self.sampled = self.sampled.wrapping_add(1);
        self.sampled % SAMPLE_EVERY < SAMPLE
            || bytes > SAMPLED_BYTES
            || matches!(self.trials, Trials::Trial { .. })
    }

    /// Returns true if a lane has no timed write under way.
    #[inline(always)]
    pub fn is_idle(&self, lane: LaneId) -> bool {
        self.paces[lane.index()].is_idle()
    }

    /// Returns the lane for a small message: the favourite, which changes first if too many bytes
    /// wait on it.
    #[inline(always)]
    pub fn lane_for(&mut self, bytes: u64, others: &impl OtherConnections) -> LaneId {
        let favourite = self.favourite;
        if self.count > 1 {
            let waiting = self.paces[favourite.index()]
                .outstanding_bytes
                .max(others.waiting_bytes(favourite));
            if waiting > self.stay_bytes[favourite.index()] {
                self.change_favourite(bytes, others);
            }
        }
        self.favourite
    }

    #[inline(never)]
    fn change_favourite(&mut self, bytes: u64, others: &impl OtherConnections) {
        if self.stale {
            self.refresh(others);
        }
        let done_us = |lane: LaneId| {
            let waiting = self.paces[lane.index()]
                .outstanding_bytes
                .max(others.waiting_bytes(lane));
            (waiting + bytes) as f64 / self.rates[lane.index()]
        };
        let mut best = (self.favourite, done_us(self.favourite) - STAY_US);
        for lane in LaneId::all(self.count) {
            let done = done_us(lane);
            if done < best.1 {
                best = (lane, done);
            }
        }
        self.favourite = best.0;
    }

    /// Cuts a large message into shares.
    #[inline(always)]
    pub fn cut(&mut self, bytes: u64, now_ns: u64, others: &impl OtherConnections) -> Shares {
        if self.stale && now_ns.saturating_sub(self.refreshed_ns) >= REFRESH_NS {
            self.refreshed_ns = now_ns;
            self.refresh(others);
        }
        let mut shares = if bytes > MAX_UNSPLIT_WHEN_BUSY_BYTES {
            let own = self.lanes(|_, own| own);
            divide(bytes, &own[..self.count], self.min_share_bytes, 0.0)
        } else {
            let crowded = self.lanes(|lane, own| own.max(others.waiting_bytes(lane)));
            let crowded = &crowded[..self.count];
            let accepted_delay_us = self.accepted_delay_us(crowded, others);
            divide(bytes, crowded, self.min_share_bytes, accepted_delay_us)
        };
        if shares.as_slice().len() < self.count
            && let Some(lane) = self.lane_to_measure(&shares, now_ns)
        {
            shares.give(lane, self.min_share_bytes);
        }
        shares
    }

    /// Returns the accepted delay of a message, in microseconds, in exchange for fewer shares.
    #[inline(always)]
    fn accepted_delay_us(&self, lanes: &[LaneLoad], others: &impl OtherConnections) -> f64 {
        let mut wait_us = f64::INFINITY;
        let mut busy_bytes = 0;
        let mut bytes_per_us = 0.0;
        for (lane, known) in LaneId::all(self.count)
            .zip(lanes)
            .filter(|(_, known)| known.bytes_per_us > 0.0)
        {
            wait_us = (known.backlog_bytes as f64 / known.bytes_per_us).min(wait_us);
            busy_bytes += others.busy_bytes(lane);
            bytes_per_us += known.bytes_per_us;
        }
        (MAX_DELAY_PER_WAIT * wait_us)
            .min(MAX_DELAY_PER_BUSY_TIME * busy_bytes as f64 / bytes_per_us)
    }

    /// Returns the lanes as the planner's input. The arguments of `backlog_bytes` are a lane and
    /// the bytes that this connection has under way on that lane. It returns the lane's backlog.
    #[inline(always)]
    fn lanes(&self, backlog_bytes: impl Fn(LaneId, u64) -> u64) -> [LaneLoad; MAX_RAILS] {
        let mut lanes = [LaneLoad::default(); MAX_RAILS];
        let known = self
            .paces
            .iter()
            .zip(&self.rates)
            .zip(LaneId::all(self.count));
        for (place, ((pace, &bytes_per_us), lane)) in lanes.iter_mut().zip(known) {
            *place = LaneLoad {
                bytes_per_us,
                backlog_bytes: backlog_bytes(lane, pace.outstanding_bytes),
            };
        }
        lanes
    }

    /// Returns a lane that has no share of this message, but is due for a share that measures the
    /// lane's current speed ([`Striping::is_due`]).
    fn lane_to_measure(&self, shares: &Shares, now_ns: u64) -> Option<LaneId> {
        let left_out = |lane: &LaneId| !shares.as_slice().iter().any(|share| share.lane == *lane);
        LaneId::all(self.count)
            .filter(left_out)
            .find(|lane| self.is_due(*lane, self.min_share_bytes, now_ns))
    }

    /// Returns the lane for an unsplit message whose size counts ([`Striping::is_counted`]).
    /// Normally this is `lane`, the result of [`Striping::lane_for`]. From time to time, a series
    /// of such messages uses another lane, to measure that lane's current speed.
    #[inline(always)]
    pub fn lane_or_trial(
        &mut self,
        lane: LaneId,
        bytes: u64,
        now_ns: u64,
        others: &impl OtherConnections,
    ) -> LaneId {
        match self.trials {
            Trials::Rest { next_ns, .. } if now_ns < next_ns => lane,
            Trials::Rest {
                every_ns,
                rate: before,
                ..
            } => self.start_trial(bytes, now_ns, (every_ns, before), others),
            Trials::Trial { ref mut left, .. } if *left > 1 => {
                *left -= 1;
                lane
            }
            Trials::Trial {
                home,
                every_ns,
                rate,
                ..
            } => self.end_trial((lane, home), now_ns, (every_ns, rate), others),
        }
    }

    #[inline(never)]
    fn start_trial(
        &mut self,
        bytes: u64,
        now_ns: u64,
        (every_ns, before): (u64, f64),
        others: &impl OtherConnections,
    ) -> LaneId {
        self.refresh(others);
        let home = self.favourite;
        let rate = self.rates[self.favourite.index()];
        let every_ns = if rate < SLOWED * before {
            TRIAL_EVERY_NS
        } else {
            every_ns
        };
        let after_home = LaneId::all(self.count)
            .cycle()
            .skip(home.index() + 1)
            .take(self.count - 1);
        let due = after_home.filter(|other| self.is_due(*other, bytes, now_ns));
        // The longest idle lane, so that each lane gets a trial in turn.
        match due.min_by_key(|other| self.paces[other.index()].given_ns) {
            Some(other) => {
                self.trials = Trials::Trial {
                    left: TRIAL,
                    home,
                    every_ns,
                    rate,
                };
                self.favourite = other;
            }
            None => {
                self.trials = Trials::Rest {
                    next_ns: now_ns + TRIAL_EVERY_NS,
                    every_ns,
                    rate,
                }
            }
        }
        self.favourite
    }

    #[inline(never)]
    fn end_trial(
        &mut self,
        (lane, home): (LaneId, LaneId),
        now_ns: u64,
        (every_ns, rate): (u64, f64),
        others: &impl OtherConnections,
    ) -> LaneId {
        self.favourite = home;
        self.refresh(others);
        let every_ns = if self.favourite == home {
            (2 * every_ns).min(TRIAL_SELDOM_NS)
        } else {
            TRIAL_EVERY_NS
        };
        self.trials = Trials::Rest {
            next_ns: now_ns + every_ns,
            every_ns,
            rate,
        };
        lane
    }

    /// Returns true if a write of `bytes` should measure a lane again after a long idle time.
    fn is_due(&self, lane: LaneId, bytes: u64, now_ns: u64) -> bool {
        let idle_ns = now_ns.saturating_sub(self.paces[lane.index()].given_ns);
        // This check usually returns. It comes first, to save the division below.
        if idle_ns <= RETRY_NS || self.paces[lane.index()].outstanding_bytes > 0 || !self.has(lane)
        {
            return false;
        }
        let trial_us = bytes as f64 / self.rates[lane.index()];
        idle_ns > (trial_us * 1000.0 * RETRY_PATIENCE) as u64
    }

    /// Records that a share was posted on a lane. `now` is `Some` if the share is timed.
    #[inline(always)]
    pub fn record_queued(&mut self, lane: LaneId, bytes: u64, now: Option<Moment>) {
        self.paces[lane.index()].record_queued(bytes, now);
    }

    /// Records that a share was confirmed. `now` is `Some` if the share was timed.
    #[inline(always)]
    pub fn confirmed(&mut self, lane: LaneId, bytes: u64, now: Option<Moment>) {
        self.paces[lane.index()].confirmed(bytes, now);
        self.stale |= now.is_some();
    }

    fn refresh(&mut self, others: &impl OtherConnections) {
        self.stale = false;
        let mut qualities = [None; MAX_RAILS];
        let mut best = 0.0_f64;
        for ((quality, pace), expected) in qualities
            .iter_mut()
            .zip(&self.paces)
            .zip(&self.expected_rates)
        {
            *quality = pace.measured().map(|measured| measured / expected);
            best = best.max(quality.unwrap_or(0.0));
        }
        let mut best_of_all = 0.0_f64;
        for (lane, quality) in LaneId::all(MAX_RAILS).zip(&mut qualities) {
            *quality = quality.map(|quality| others.share_quality(lane, quality / best));
            best_of_all = best_of_all.max(quality.unwrap_or(0.0));
        }
        // Lanes of about the best quality all get the average of their qualities: the difference
        // is noise, and shares that follow noise leave rails idle. Lanes without a measurement get
        // the same average.
        let alike = |factor: &f64| *factor >= ALIKE * best_of_all;
        let (sum, several) = qualities
            .iter()
            .flatten()
            .filter(|f| alike(f))
            .fold((0.0, 0.0), |(sum, several), f| (sum + f, several + 1.0));
        let (usual, best) = if several > 0.0 {
            (sum / several, best)
        } else {
            (1.0, 1.0)
        };
        for ((rate, quality), expected) in self
            .rates
            .iter_mut()
            .zip(qualities)
            .zip(&self.expected_rates)
        {
            *rate = quality.filter(|factor| !alike(factor)).unwrap_or(usual) * best * expected;
        }
        for lane in LaneId::all(self.count).filter(|lane| self.lost & lane.bit() != 0) {
            self.rates[lane.index()] = 0.0;
        }
        let mut fastest = self.favourite;
        for lane in LaneId::all(self.count) {
            self.stay_bytes[lane.index()] =
                ((self.rates[lane.index()] * STAY_US) as u64).max(STAY_BYTES);
            if self.rates[lane.index()] > self.rates[fastest.index()] {
                fastest = lane;
            }
        }
        if self.rates[fastest.index()] > CLEARLY_FASTER * self.rates[self.favourite.index()] {
            self.favourite = fastest;
        }
    }
}

#[cfg(test)]
mod tests;
