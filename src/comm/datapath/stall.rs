//! Detection of stalls, that is, of requests that make no progress. Counts the stalls, and fails
//! the requests if the peer has left. Reads no clock while requests make progress. The service
//! thread finds the cause of a stall (`comm::recovery::driver`).
//!
//! An idle poll is a call of NCCL that finds no progress.

use super::context::PathContext;
use super::lane::{Lane, lanes_text};
use super::peer::PeerState;
use crate::clock;
use crate::comm::log::once::Direction;
use host::counters::layout::Word;
use host::counters::{Record, nanos};
#[cfg(doc)]
use host::error::Error;
use host::error::{PeerGone, Quick, Waited};
use proto::time::Instant;
use std::time::Duration;

/// Number of idle polls between two readings of the clock. This number of polls takes some
/// milliseconds, so the readings cost next to nothing.
const POLLS_PER_READING: u64 = 1 << 14;

/// Time without progress after which a request is counted as stalled.
const STALL: Duration = Duration::from_secs(1);

/// Time for late completions after the peer has closed or vanished. Then waiting requests fail.
const GONE_GRACE: Duration = Duration::from_secs(2);

/// Bit of [`StallTimer::idle_polls`], set if `times` belongs to the current period without
/// progress.
const KNOWN: u64 = 1 << 63;

/// Counter of idle polls and timer of the period without progress.
#[derive(Debug, Default)]
pub struct StallTimer {
    /// Idle polls since the last progress, and the bit [`KNOWN`]: one store resets both.
    idle_polls: u64,
    times: Times,
}

#[derive(Debug, Default)]
struct Times {
    since: Option<Instant>,
    warned: bool,
    peer_left_at: Option<Instant>,
    /// How much of the period's length the traffic counters already include.
    counted: Duration,
}

impl StallTimer {
    /// Records progress.
    #[inline(always)]
    pub fn moved(&mut self) {
        self.idle_polls = 0;
    }

    /// Records an idle poll. On every `POLLS_PER_READING`th call returns the time without progress.
    #[inline(always)]
    pub fn idle(&mut self) -> Option<Duration> {
        self.idle_polls = self.idle_polls.wrapping_add(1);
        if self.idle_polls.is_multiple_of(POLLS_PER_READING) {
            Some(self.elapsed())
        } else {
            None
        }
    }

    /// Returns the time without progress, measured from the first call of this method in the
    /// present period.
    #[cold]
    pub fn elapsed(&mut self) -> Duration {
        clock::elapsed(*self.times().since.get_or_insert_with(clock::now))
    }

    /// Returns the time for which the peer has been known to have left: the time since the first
    /// call of this method in the present period without progress.
    #[cold]
    pub fn away(&mut self) -> Duration {
        clock::elapsed(*self.times().peer_left_at.get_or_insert_with(clock::now))
    }

    /// Returns true once in each period without progress, when the period has lasted for `limit`.
    pub fn should_warn(&mut self, waited: Duration, limit: Duration) -> bool {
        let times = self.times();
        let now = waited >= limit && !times.warned;
        times.warned |= now;
        now
    }

    /// Counts a stall once it has lasted for one second, and adds its length to the counters as it
    /// grows. The time between the last reading of the clock and the end of the stall is not
    /// counted.
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
        if self.idle_polls & KNOWN == 0 {
            (self.idle_polls, self.times) = (self.idle_polls | KNOWN, Times::default());
        }
        &mut self.times
    }
}

/// A request that makes no progress, for messages.
pub struct Stalled {
    /// Direction of the request.
    pub direction: Direction,
    /// Name of the request with an article, such as "a posted send".
    pub what: &'static str,
    /// Size in bytes of a send that has not started, 0 for sends that are posted; or the number of
    /// pending receives.
    pub count: usize,
}

impl Stalled {
    /// Counts a stalled request, and logs it under `NCCL_DEBUG=TRACE`. Fails the request if the
    /// peer closed or vanished at least `GONE_GRACE` ago.
    ///
    /// # Errors
    /// [`Error::PeerGone`], with which the caller ends the connection.
    #[cold]
    pub fn check(
        &self,
        context: &PathContext,
        timer: &mut StallTimer,
        waited: Duration,
        lanes: &[Lane],
    ) -> Quick<()> {
        if let Some(first) = lanes.first() {
            timer.count(waited, &first.record);
        }
        let peer = || context.peer.name.clone();
        let gone = match context.peer.presence() {
            PeerState::Here if timer.should_warn(waited, context.stall_warn) => {
                let what = self.what;
                let count = self.count;
                let peer = &context.peer.name;
                let lanes = lanes_text(lanes);
                tracing::debug!(
                    "{what} ({count}) with {peer} has made no progress for {waited:.0?}; {lanes}"
                );
                return Ok(());
            }
            PeerState::Here => return Ok(()),
            _ if timer.away() < GONE_GRACE => return Ok(()),
            PeerState::Closed { .. } => PeerGone::Closed { peer: peer() },
            // If the peer violated the protocol, the connection has already ended with that error.
            PeerState::Gone => PeerGone::Vanished { peer: peer() },
        };
        let what = self.what;
        let waited = match self.direction {
            Direction::Send => Waited::Send { what, waited },
            Direction::Receive => Waited::Receive {
                what,
                waited,
                pending: self.count,
            },
        };
        Err(Box::new(
            PeerGone::OnLanes {
                gone: Box::new(gone),
                waited,
                lanes: lanes_text(lanes),
            }
            .into(),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::counters::CountedLane;
    use host::counters::layout::State;

    #[test]
    fn the_clock_is_read_rarely_and_a_stall_is_reported_once() {
        let mut stall = StallTimer::default();
        let asked = (0..4 * POLLS_PER_READING)
            .filter(|_| stall.idle().is_some())
            .count();
        assert_eq!(asked, 4);
        let limit = Duration::from_secs(60);
        assert!(!stall.should_warn(Duration::from_secs(59), limit));
        assert!(stall.should_warn(limit, limit) && !stall.should_warn(2 * limit, limit));
        stall.moved();
        assert!(stall.should_warn(limit, limit));
    }

    #[test]
    fn a_stall_counts_once_and_its_length_grows() {
        let mut stall = StallTimer::default();
        let seconds = Duration::from_secs;
        let counting = host::counters::Counting::new(false);
        let (rail, peer_rail) = Default::default();
        let lane = CountedLane {
            rail,
            peer_rail,
            bits_per_s: 0,
            path_mtu_bytes: 0,
            state: State::Carries,
        };
        let counted = counting.connection(host::counters::layout::Direction::Send, "b", &[lane]);
        let record = counted.record(0);
        let mut count = |waited, moved: bool| {
            if moved {
                stall.moved();
            }
            stall.count(waited, &record);
            (
                record.read(Word::Stalls),
                record.read(Word::StalledNs) / 1_000_000,
            )
        };
        assert_eq!(count(Duration::from_millis(999), false), (0, 0));
        assert_eq!(count(Duration::from_millis(1001), false), (1, 1001));
        assert_eq!(count(seconds(7), false), (1, 7000));
        assert_eq!(count(Duration::from_millis(10), true), (1, 7000));
        assert_eq!(count(seconds(2), false), (2, 9000));
    }
}
