//! Which rail carries what: small messages whole on one rail, large ones cut over all that help, unless other messages keep the
//! rails busy anyway.
//!
//! One [`Striping`] for each direction of a connection. It keeps each rail's [`Pace`] and asks the planner
//! ([`super::plan`]) for shares that finish together. What it knows of a rail's speed is what the rail has shown;
//! before that, what its ways promise, scaled by how the rails that were measured keep theirs.

use super::pace::Pace;
use super::plan::{Lane, SHARE_ALIGNMENT, Shares, divide, level_us, soonest};
use super::ways::Ways;
use crate::wire::MAX_RAILS;

/// How long (in microseconds) a small message may have to wait on the rail that carried the one before, until another
/// rail is looked for: a rail in use is cheaper to stay on (its queue pair, its completion queue and the receiver's are
/// warm) than a few packet times are worth.
const STAY_US: f64 = 5.0;
/// So much may wait there in any case: a window of eight messages of 4 KiB. Where the processor is the limit and not the wire, a
/// second rail only costs (the kernel's soft-RoCE: 13.6 MB/s over four rails, 14.0 over one).
const STAY_BYTES: u64 = 32 * 1024;

/// Writes from this size on count for the rail's speed and for what other connections see of it: below, the message's own
/// cost would be most of what is measured.
const COUNTED_BYTES: u64 = 4096;
/// Whole messages up to this size are timed by samples: this many in a row of so many. (The clock for each one took 5 % off
/// a stream of 4 KiB messages over soft-RoCE.)
const SAMPLED_BYTES: u64 = 16 * 1024;
const SAMPLE: u32 = 16;
const SAMPLE_EVERY: u32 = 128;

/// A rail that is this much faster than the one in use becomes the one for small messages.
const CLEARLY_FASTER: f64 = 1.25;

/// A message goes whole to the rail on which it is done first, if that takes longer than all rails together would by at most this part
/// of what it has to wait there: on four rails from a dozen messages under way on. Each share costs a post and two completions, and
/// where many messages wait, parts of them keep the rails no busier than whole ones do. (18 connections, two messages of 64 KiB each
/// under way, two cables at 0.05: 80 and 81 % of the links with each message cut, 87 and 90 % with none; of 128 KiB: 94 to 97, 99 %;
/// rung 3.)
const HARDLY_LATER: f64 = 0.25;

/// Rails that keep so much of what they promise, beside the one that keeps most of it, are taken for equally good.
const ALIKE: f64 = 0.75;

/// Rates are worked out again at most this often: a thousandth of the second in which a change must be answered.
const REFRESH_NS: u64 = 1_000_000;

/// A rail too slow for a share of its own is tried again after this, and after this many times what the trial takes.
const RETRY_NS: u64 = 200_000_000;
const RETRY_PATIENCE: f64 = 20.0;

/// Whole messages that try a rail: several windows, because one alone shows its latency and not the rail's rate.
const TRIAL: u8 = 32;
/// From one trial by whole messages to the next, at first and when the favourite changes or slows; each trial that found
/// nothing better doubles it, up to what still finds a better rail within a second. (Every 50 ms for good took 9 % off a
/// stream of 4 KiB messages over soft-RoCE.)
const TRIAL_EVERY_NS: u64 = 50_000_000;
const TRIAL_SELDOM_NS: u64 = 800_000_000;
/// A favourite that keeps less of its rate than this has slowed.
const SLOWED: f64 = 0.7;

/// When whole messages try another rail than the favourite.
#[derive(Debug, Clone, Copy)]
enum Trials {
    /// Not before `next_ns`, and after it every `every_ns`. The favourite carried `rate` when that was decided.
    Rest { next_ns: u64, every_ns: u64, rate: f64 },
    /// `left` more messages go to the rail on trial, then the rail `home` is the favourite again, unless the other one is
    /// clearly faster.
    Trial { left: u8, home: usize, every_ns: u64, rate: f64 },
}

/// The other connections on the rails. Only the connection's own thread asks.
pub trait Others {
    /// What has to be waited for on a rail: bytes that all connections of this process have under way there.
    fn waiting_bytes(&self, rail: usize) -> u64;
    /// Tells how much of its promise this connection found a rail to keep, beside the best one (above 0, to 1); what all that use it
    /// found.
    fn confer(&self, rail: usize, kept: f64) -> f64;
}

/// Nobody else uses the rails.
struct Nobody;

impl Others for Nobody {
    fn waiting_bytes(&self, _rail: usize) -> u64 {
        0
    }

    fn confer(&self, _rail: usize, kept: f64) -> f64 {
        kept
    }
}

/// The rails of one direction of a connection.
#[derive(Debug, Clone)]
pub struct Striping {
    paces: [Pace; MAX_RAILS],
    /// Bytes per microsecond, by what is known now.
    rates: [f64; MAX_RAILS],
    /// What may wait on a rail before a small message looks for another.
    stay_bytes: [u64; MAX_RAILS],
    favourite: usize,
    min_share_bytes: u64,
    /// [`COUNTED_BYTES`], where there is more than one rail.
    counted_bytes: u64,
    /// Where in the round of samples the last whole message was.
    sampled: u32,
    count: usize,
    /// Rails that are lost, a bit each.
    lost: u8,
    /// Whether something was measured since the rates were worked out.
    stale: bool,
    refreshed_ns: u64,
    trials: Trials,
    /// What each rail promises, in bytes per microsecond.
    nominal: [f64; MAX_RAILS],
}

impl Striping {
    /// Rails that have carried nothing yet. `min_share_bytes`: the smallest part of a message that is worth a rail of its
    /// own. All begin with the first rail: what several connections do on one is cheaper than the same on several.
    pub fn new(ways: &Ways, min_share_bytes: u64) -> Self {
        let nominal = ways.even_rates().map(|mbps| (mbps / 8.0).max(f64::MIN_POSITIVE));
        let count = ways.count().clamp(1, MAX_RAILS);
        let mut striping = Self {
            paces: [Pace::default(); MAX_RAILS],
            rates: [0.0; MAX_RAILS],
            stay_bytes: [0; MAX_RAILS],
            favourite: 0,
            min_share_bytes: min_share_bytes.max(SHARE_ALIGNMENT),
            // One rail has nothing to be compared with.
            counted_bytes: if count > 1 { COUNTED_BYTES } else { u64::MAX },
            sampled: 0,
            count,
            lost: 0,
            stale: false,
            refreshed_ns: 0,
            trials: Trials::Rest { next_ns: RETRY_NS, every_ns: TRIAL_EVERY_NS, rate: 0.0 },
            nominal,
        };
        striping.refresh(&Nobody);
        striping
    }

    /// A rail is lost: it gets nothing more, and what it had is not waited for.
    pub fn lose(&mut self, rail: usize) {
        self.lost |= 1 << (rail & 7);
        self.paces[rail % MAX_RAILS] = Pace::default();
        if matches!(self.trials, Trials::Trial { .. }) {
            self.trials = Trials::Rest { next_ns: 0, every_ns: TRIAL_EVERY_NS, rate: 0.0 };
        }
        self.refresh(&Nobody);
    }

    /// A lost rail is back, with nothing known of its speed.
    pub fn regain(&mut self, rail: usize) {
        self.lost &= !(1 << (rail & 7));
        self.refresh(&Nobody);
    }

    /// Whether a rail is not lost.
    #[inline(always)]
    pub fn has(&self, rail: usize) -> bool {
        self.lost >> (rail & 7) & 1 == 0
    }

    /// Up to this size a message goes whole to one rail.
    pub fn whole_bytes(&self) -> u64 {
        if self.count < 2 { u64::MAX } else { 2 * self.min_share_bytes - 1 }
    }

    /// Whether a write of this size says something of its rail.
    #[inline(always)]
    pub fn is_counted(&self, bytes: u64) -> bool {
        bytes >= self.counted_bytes
    }

    /// Whether the next whole message, of a size that [`Striping::is_counted`], is to be timed.
    #[inline(always)]
    pub fn is_to_time(&mut self, bytes: u64) -> bool {
        self.sampled = self.sampled.wrapping_add(1);
        self.sampled % SAMPLE_EVERY < SAMPLE || bytes > SAMPLED_BYTES || matches!(self.trials, Trials::Trial { .. })
    }

    /// Whether a rail has no timed write under way.
    #[inline(always)]
    pub fn is_idle(&self, rail: usize) -> bool {
        self.paces[rail % MAX_RAILS].is_idle()
    }

    /// The rail for a small message.
    #[inline(always)]
    pub fn rail_for(&mut self, bytes: u64, others: &impl Others) -> usize {
        let favourite = self.favourite;
        if self.count > 1 {
            let waiting = self.paces[favourite % MAX_RAILS].outstanding_bytes.max(others.waiting_bytes(favourite));
            if waiting > self.stay_bytes[favourite % MAX_RAILS] {
                self.look_for_another(bytes, others);
            }
        }
        self.favourite
    }

    #[inline(never)]
    fn look_for_another(&mut self, bytes: u64, others: &impl Others) {
        if self.stale {
            self.refresh(others);
        }
        let done_us = |rail: usize| {
            let waiting = self.paces[rail].outstanding_bytes.max(others.waiting_bytes(rail));
            (waiting + bytes) as f64 / self.rates[rail]
        };
        let mut best = (self.favourite, done_us(self.favourite) - STAY_US);
        for rail in 0..self.count {
            let done = done_us(rail);
            if done < best.1 {
                best = (rail, done);
            }
        }
        self.favourite = best.0;
    }

    /// The shares of a large message.
    #[inline(always)]
    pub fn cut(&mut self, bytes: u64, now_ns: u64, others: &impl Others) -> Shares {
        if self.stale && now_ns.saturating_sub(self.refreshed_ns) >= REFRESH_NS {
            self.refreshed_ns = now_ns;
            self.refresh(others);
        }
        let crowded = self.lanes(|rail, own| own.max(others.waiting_bytes(rail)));
        let crowded = &crowded[..self.count];
        let (rail, whole_us) = soonest(bytes, crowded);
        let wait_us = crowded[rail].backlog_bytes as f64 / crowded[rail].bytes_per_us;
        let mut shares = match whole_us - level_us(bytes, crowded) <= HARDLY_LATER * wait_us {
            true => Shares::whole(rail, bytes),
            false => divide(bytes, &self.lanes(|_, own| own)[..self.count], self.min_share_bytes),
        };
        if shares.as_slice().len() < self.count
            && let Some(rail) = self.to_try_again(&shares, now_ns)
        {
            shares.give(rail, self.min_share_bytes);
        }
        shares
    }

    /// The rails as the planner sees them, with a backlog by the rail's number and what this connection has under way there.
    #[inline(always)]
    fn lanes(&self, backlog_bytes: impl Fn(usize, u64) -> u64) -> [Lane; MAX_RAILS] {
        let mut lanes = [Lane::default(); MAX_RAILS];
        let known = self.paces.iter().zip(&self.rates).take(self.count).enumerate();
        for (lane, (rail, (pace, &bytes_per_us))) in lanes.iter_mut().zip(known) {
            *lane = Lane { bytes_per_us, backlog_bytes: backlog_bytes(rail, pace.outstanding_bytes) };
        }
        lanes
    }

    /// A rail that gets nothing shows by a share of its own, now and then, how fast it is by now.
    fn to_try_again(&self, shares: &Shares, now_ns: u64) -> Option<usize> {
        let left_out = |rail: &usize| !shares.as_slice().iter().any(|share| usize::from(share.lane) == *rail);
        (0..self.count).filter(left_out).find(|rail| self.is_due(*rail, self.min_share_bytes, now_ns))
    }

    /// The rail for a message that goes whole and [`Striping::is_counted`]: the one that [`Striping::rail_for`] gave, or now
    /// and then another one, which shows by some of them in a row how fast it is by now.
    #[inline(always)]
    pub fn rail_to_try(&mut self, rail: usize, bytes: u64, now_ns: u64, others: &impl Others) -> usize {
        match self.trials {
            Trials::Rest { next_ns, .. } if now_ns < next_ns => rail,
            Trials::Rest { every_ns, rate: before, .. } => self.look_round(bytes, now_ns, (every_ns, before), others),
            Trials::Trial { left, .. } if left > 1 => self.go_on_trying(rail),
            Trials::Trial { home, every_ns, rate, .. } => {
                self.end_trial((rail, home), now_ns, (every_ns, rate), others)
            }
        }
    }

    #[inline(never)]
    fn look_round(&mut self, bytes: u64, now_ns: u64, (every_ns, before): (u64, f64), others: &impl Others) -> usize {
        self.refresh(others);
        let (home, rate) = (self.favourite, self.rates[self.favourite]);
        let every_ns = if rate < SLOWED * before { TRIAL_EVERY_NS } else { every_ns };
        let mut others = (1..self.count).map(|step| (home + step) % self.count);
        match others.find(|other| self.is_due(*other, bytes, now_ns)) {
            Some(other) => {
                self.trials = Trials::Trial { left: TRIAL, home, every_ns, rate };
                self.favourite = other;
            }
            None => self.trials = Trials::Rest { next_ns: now_ns + TRIAL_EVERY_NS, every_ns, rate },
        }
        self.favourite
    }

    fn go_on_trying(&mut self, rail: usize) -> usize {
        if let Trials::Trial { left, .. } = &mut self.trials {
            *left -= 1;
        }
        rail
    }

    #[inline(never)]
    fn end_trial(
        &mut self,
        (rail, home): (usize, usize),
        now_ns: u64,
        (every_ns, rate): (u64, f64),
        others: &impl Others,
    ) -> usize {
        self.favourite = home;
        self.refresh(others);
        let every_ns = if self.favourite == home { (2 * every_ns).min(TRIAL_SELDOM_NS) } else { TRIAL_EVERY_NS };
        self.trials = Trials::Rest { next_ns: now_ns + every_ns, every_ns, rate };
        rail
    }

    /// Whether so little is known of a rail's present speed that a write of this size is worth finding out.
    fn is_due(&self, rail: usize, bytes: u64, now_ns: u64) -> bool {
        let idle_ns = now_ns.saturating_sub(self.paces[rail].given_ns);
        // Mostly not; so the division comes last.
        if idle_ns <= RETRY_NS || self.paces[rail].outstanding_bytes > 0 || !self.has(rail) {
            return false;
        }
        let trial_us = bytes as f64 / self.rates[rail];
        idle_ns > (trial_us * 1000.0 * RETRY_PATIENCE) as u64
    }

    /// A share was given to a rail. `now_ns` is there where it is timed.
    #[inline(always)]
    pub fn given(&mut self, rail: usize, bytes: u64, now_ns: Option<u64>) {
        self.paces[rail % MAX_RAILS].given(bytes, now_ns);
    }

    /// A share was confirmed; `now_ns` is there where it was when it was given.
    #[inline(always)]
    pub fn confirmed(&mut self, rail: usize, bytes: u64, now_ns: Option<u64>) {
        self.paces[rail % MAX_RAILS].confirmed(bytes, now_ns);
        self.stale |= now_ns.is_some();
    }

    /// Bytes that were given to a rail and not confirmed.
    pub fn outstanding_bytes(&self, rail: usize) -> u64 {
        self.paces[rail % MAX_RAILS].outstanding_bytes
    }

    /// Works out again what each rail carries.
    fn refresh(&mut self, others: &impl Others) {
        self.stale = false;
        let mut kept = [None; MAX_RAILS];
        let mut best = 0.0_f64;
        for ((kept, pace), nominal) in kept.iter_mut().zip(&self.paces).zip(&self.nominal) {
            *kept = pace.measured().map(|measured| measured / nominal);
            best = best.max(kept.unwrap_or(0.0));
        }
        let mut best_of_all = 0.0_f64;
        for (rail, kept) in kept.iter_mut().enumerate() {
            *kept = kept.map(|kept| others.confer(rail, kept / best));
            best_of_all = best_of_all.max(kept.unwrap_or(0.0));
        }
        // Rails that keep their promise about alike keep it alike: what is between them is noise, and shares that follow
        // noise leave rails idle. A rail that was not measured is taken for one of them.
        let alike = |factor: &f64| *factor >= ALIKE * best_of_all;
        let (sum, several) =
            kept.iter().flatten().filter(|f| alike(f)).fold((0.0, 0.0), |(sum, several), f| (sum + f, several + 1.0));
        let (usual, best) = if several > 0.0 { (sum / several, best) } else { (1.0, 1.0) };
        for ((rate, kept), nominal) in self.rates.iter_mut().zip(kept).zip(&self.nominal) {
            *rate = kept.filter(|factor| !alike(factor)).unwrap_or(usual) * best * nominal;
        }
        for rail in (0..self.count).filter(|rail| self.lost >> rail & 1 == 1) {
            self.rates[rail] = 0.0;
        }
        let mut fastest = self.favourite;
        for rail in 0..self.count {
            self.stay_bytes[rail] = ((self.rates[rail] * STAY_US) as u64).max(STAY_BYTES);
            if self.rates[rail] > self.rates[fastest] {
                fastest = rail;
            }
        }
        if self.rates[fastest] > CLEARLY_FASTER * self.rates[self.favourite] {
            self.favourite = fastest;
        }
    }
}

#[cfg(test)]
mod crowd;
#[cfg(test)]
mod tests;
