//! What the data path of a connection over streams knows besides its messages.

use super::sockets::Sockets;
use crate::comm::datapath::stall::StallTimer;
use crate::comm::log::once::{Direction, LogOnce};
use crate::error::{Error, Quick};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long bytes may go unacknowledged while nothing moves before the connection has failed. As for the TCP of the bootstrap; the kernel's
/// own time-out for this would also end a connection whose peer answers and does not read.
const UNACKNOWLEDGED: Duration = Duration::from_secs(60);

/// What one connection over streams needs.
pub struct StreamContext {
    /// Its streams.
    pub sockets: Arc<Sockets>,
    /// After how long without progress a request is logged.
    pub stall_warn: Duration,
    /// What has been logged about the peer.
    pub log: Arc<LogOnce>,
    /// What this process has sent by streams.
    pub totals: Arc<Totals>,
}

/// What a process has sent by TCP streams in all connections.
#[derive(Debug, Default)]
pub struct Totals {
    bytes: AtomicU64,
    messages: AtomicU64,
}

impl Totals {
    /// One more message.
    pub fn count(&self, bytes: u64) {
        // Relaxed: sums for the log.
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.messages.fetch_add(1, Ordering::Relaxed);
    }

    /// Bytes and messages since this was last called.
    pub fn take(&self) -> (u64, u64) {
        (self.bytes.swap(0, Ordering::Relaxed), self.messages.swap(0, Ordering::Relaxed))
    }
}

/// A request that makes no progress.
pub struct Waiting {
    /// Its direction.
    pub direction: Direction,
    /// What waits, with an article.
    pub what: &'static str,
    /// Of a send, its bytes; of a receive, how many are pending.
    pub count: usize,
}

impl Waiting {
    /// Nothing has moved. Every now and then this asks the clock, logs a request that has waited for long, and asks the system whether the
    /// peer's host still answers.
    ///
    /// # Errors
    /// [`Error::Network`] when it does not.
    pub fn check(&self, context: &StreamContext, timer: &mut StallTimer) -> Quick<()> {
        match timer.idle() {
            None => Ok(()),
            Some(waited) => self.waited(context, timer, waited),
        }
    }

    #[cold]
    fn waited(&self, context: &StreamContext, timer: &mut StallTimer, waited: Duration) -> Quick<()> {
        if timer.should_warn(waited, context.stall_warn) {
            self.warn(context, waited);
        }
        let silent = if waited < UNACKNOWLEDGED { None } else { context.sockets.unacknowledged() };
        match silent {
            Some(silent) if silent >= UNACKNOWLEDGED => Err(Box::new(Error::Network(format!(
                "no answer from {} for {silent:.0?}: {}",
                context.sockets,
                self.text(waited)
            )))),
            _ => Ok(()),
        }
    }

    /// The request, for an error that ends it.
    #[cold]
    pub fn text(&self, waited: Duration) -> String {
        let Self { direction, what, count } = self;
        match direction {
            Direction::Send => format!("{what} had waited {waited:.1?} ({count} bytes)"),
            Direction::Receive => format!("{what} had waited {waited:.1?} ({count} receives pending)"),
        }
    }

    fn warn(&self, context: &StreamContext, waited: Duration) {
        let (sockets, Self { direction, what, count }) = (&context.sockets, self);
        let is_first = context.log.is_first_stall(&sockets.peer, *direction, context.stall_warn, Instant::now());
        match (direction, is_first) {
            (Direction::Send, true) => tracing::warn!(
                "{what} by {sockets} has made no progress for {waited:.0?} ({count} bytes): the peer computes or is stuck"
            ),
            (Direction::Receive, true) => tracing::warn!(
                "{what} by {sockets} has made no progress for {waited:.0?} ({count} receives pending): the peer computes or is stuck"
            ),
            (_, false) => tracing::debug!("{what} by {sockets} has made no progress for {waited:.0?} ({count})"),
        }
    }
}
