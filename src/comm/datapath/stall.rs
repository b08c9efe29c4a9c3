//! How long nothing has moved, without asking the clock while things move; and what becomes of a request that waits for long.

use super::context::PathContext;
use super::lane::{Lane, lanes_text};
use super::peer::Presence;
use crate::comm::log::once::Direction;
use crate::error::{Error, Quick};
use std::time::{Duration, Instant};

/// Fruitless looks between two readings of the clock: some milliseconds' worth, so that the clock costs nothing.
const LOOKS: u32 = 1 << 14;

/// How long completions may still trickle in after a peer has closed or vanished, before what waits has failed.
const GONE_GRACE: Duration = Duration::from_secs(2);

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
                "{peer} is gone: its bootstrap connection closed without BYE and it did not answer over any rail"
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
