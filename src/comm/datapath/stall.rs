//! How long nothing has moved, without asking the clock while things move; and what becomes of a request that waits for long.

use super::context::PathContext;
use super::lane::{Lane, lanes_text};
use super::peer::Presence;
use crate::comm::log::once::Direction;
use crate::counters::layout::Word;
use crate::counters::{Record, nanos};
use crate::error::{Error, Quick};
use std::time::{Duration, Instant};

/// Fruitless looks between two readings of the clock: some milliseconds' worth, so that the clock costs nothing.
const LOOKS: u64 = 1 << 14;

/// A request that makes no progress for so long is counted.
const STALL: Duration = Duration::from_secs(1);

/// How long completions may still trickle in after a peer has closed or vanished, before what waits has failed.
const GONE_GRACE: Duration = Duration::from_secs(2);

/// What is known of the time since something moved last is of this time.
const KNOWN: u64 = 1 << 63;

/// Counts fruitless looks.
#[derive(Debug, Default)]
pub struct StallTimer {
    /// Looks since something moved, with [`KNOWN`]: one word, so that a move costs one store.
    looks: u64,
    times: Times,
}

/// A time in which nothing moves.
#[derive(Debug, Default)]
struct Times {
    since: Option<Instant>,
    warned: bool,
    missed: Option<Instant>,
    /// How much of it stands in the counters.
    counted: Duration,
}

impl StallTimer {
    /// Something moved.
    #[inline(always)]
    pub fn moved(&mut self) {
        self.looks = 0;
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
        self.times().since.get_or_insert_with(Instant::now).elapsed()
    }

    /// For how long the peer has been away without anything moving, counted from the first time this is asked.
    #[cold]
    pub fn away(&mut self) -> Duration {
        self.times().missed.get_or_insert_with(Instant::now).elapsed()
    }

    /// Whether to say so now: once for each time that things stop for longer than `limit`.
    pub fn should_warn(&mut self, waited: Duration, limit: Duration) -> bool {
        let times = self.times();
        let now = waited >= limit && !times.warned;
        times.warned |= now;
        now
    }

    /// Counts a stall once it has lasted for a second, and then its length as it grows. What comes between the last look at the clock and its end
    /// is not known.
    fn count(&mut self, waited: Duration, record: &Record) {
        if waited < STALL {
            return;
        }
        let counted = std::mem::replace(&mut self.times().counted, waited);
        if counted.is_zero() {
            record.add(Word::Stalls, 1);
        }
        record.add(Word::StalledNs, nanos(waited.saturating_sub(counted)));
    }

    fn times(&mut self) -> &mut Times {
        if self.looks & KNOWN == 0 {
            (self.looks, self.times) = (self.looks | KNOWN, Times::default());
        }
        &mut self.times
    }
}

/// A request that makes no progress, for messages.
pub struct Stalled<'a> {
    /// Its direction.
    pub direction: Direction,
    /// What waits, with an article: "a posted send".
    pub what: &'a str,
    /// Of a send, its bytes; of a receive, how many are pending.
    pub count: usize,
}

impl Stalled<'_> {
    /// Logs a request that has waited for long, and fails one whose peer is gone.
    ///
    /// # Errors
    /// [`Error::PeerGone`], for the connection to end with.
    #[cold]
    pub fn check(&self, context: &PathContext, timer: &mut StallTimer, waited: Duration, lanes: &[Lane]) -> Quick<()> {
        let (peer, Self { what, count, .. }) = (&context.peer.name, self);
        if let Some(first) = lanes.first() {
            timer.count(waited, &first.record);
        }
        let why = match context.peer.presence() {
            Presence::Here if timer.should_warn(waited, context.stall_warn) => {
                self.warn(context, waited, lanes);
                return Ok(());
            }
            Presence::Here => return Ok(()),
            _ if timer.away() < GONE_GRACE => return Ok(()),
            Presence::Closed { .. } => format!("{peer} closed the connection"),
            // (Where it broke the protocol, the connection has ended with that error before.)
            Presence::Gone => format!(
                "{peer} is gone: its bootstrap connection closed without BYE, and it answered neither over a rail nor by a new TCP connection"
            ),
        };
        let lanes = lanes_text(lanes);
        let text = match self.direction {
            Direction::Send => format!("{why}; {what} had waited {waited:.1?}; {lanes}"),
            Direction::Receive => {
                format!("{why}; {what} had waited {waited:.1?} ({count} receives pending); {lanes}")
            }
        };
        Err(Error::PeerGone(text).into())
    }

    fn warn(&self, context: &PathContext, waited: Duration, lanes: &[Lane]) {
        let (peer, Self { what, count, .. }) = (&context.peer.name, self);
        let is_first = context.is_first_stall(self.direction);
        let lanes = lanes_text(lanes);
        match (self.direction, is_first) {
            (Direction::Send, true) => tracing::warn!(
                "{what} to {peer} has made no progress for {waited:.0?} ({count} bytes): the peer computes or is stuck; {lanes}"
            ),
            (Direction::Receive, true) => tracing::warn!(
                "{what} from {peer} has made no progress for {waited:.0?} ({count} receives pending): the peer computes or is stuck; {lanes}"
            ),
            (Direction::Send, false) => {
                tracing::debug!("{what} to {peer} has made no progress for {waited:.0?} ({count} bytes); {lanes}");
            }
            (Direction::Receive, false) => {
                tracing::debug!("{what} from {peer} has made no progress for {waited:.0?}; {lanes}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counters::CountedLane;

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

    #[test]
    fn a_stall_counts_once_and_its_length_as_it_grows() {
        let (mut stall, seconds) = (StallTimer::default(), Duration::from_secs);
        let counting = crate::counters::Counting::new(false);
        let (rail, peer_rail) = Default::default();
        let lane = CountedLane { rail, peer_rail, bits_per_s: 0, path_mtu_bytes: 0, carries: true };
        let counted = counting.connection(crate::counters::layout::Direction::Send, "b", &[lane]);
        let record = counted.record(0);
        let mut count = |waited, moved: bool| {
            if moved {
                stall.moved();
            }
            stall.count(waited, &record);
            (record.read(Word::Stalls), record.read(Word::StalledNs) / 1_000_000)
        };
        assert_eq!(count(Duration::from_millis(999), false), (0, 0));
        assert_eq!(count(Duration::from_millis(1001), false), (1, 1001));
        assert_eq!(count(seconds(7), false), (1, 7000));
        assert_eq!(count(Duration::from_millis(10), true), (1, 7000));
        assert_eq!(count(seconds(2), false), (2, 9000));
    }
}
