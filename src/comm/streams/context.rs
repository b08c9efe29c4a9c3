//! State of a connection over streams besides its messages.

use super::sockets::Sockets;
use crate::clock;
use crate::comm::datapath::stall::StallTimer;
use crate::comm::log::once::{Direction, LogOnce};
use host::error::{Error, Network, Quick, Usage, Waited};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Time after which the connection fails if outstanding bytes get no acknowledgement and nothing
/// else progresses. The bootstrap's TCP connection has the same limit. The kernel's own timeout is
/// not used: it would also end a connection whose peer answers but does not read.
const UNACKNOWLEDGED: Duration = Duration::from_secs(60);

/// Context of one connection over streams.
pub struct StreamContext {
    /// The connection's streams.
    pub sockets: Arc<Sockets>,
    /// Time without progress after which a request is logged.
    pub stall_warn: Duration,
    /// Record of the log lines that are written only once for each peer.
    pub log: Arc<LogOnce>,
    /// Totals of data that this process has sent over streams.
    pub totals: Arc<Totals>,
}

/// Totals of data sent over TCP streams, for all connections of a process.
#[derive(Debug, Default)]
pub struct Totals {
    bytes: AtomicU64,
    messages: AtomicU64,
}

impl Totals {
    /// Counts one message of `bytes` bytes.
    pub fn count(&self, bytes: u64) {
        // Relaxed: sums for the log.
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.messages.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of bytes and the number of messages since the last call.
    pub fn take(&self) -> (u64, u64) {
        (
            self.bytes.swap(0, Ordering::Relaxed),
            self.messages.swap(0, Ordering::Relaxed),
        )
    }
}

/// The error that ended a connection over streams, if any.
#[derive(Default)]
pub struct Failure(Option<Box<Error>>);

impl Failure {
    /// Fails if the connection has ended.
    ///
    /// # Errors
    /// The error that ended the connection.
    pub fn check(&self) -> Quick<()> {
        match &self.0 {
            None => Ok(()),
            Some(first) => Err(first.clone()),
        }
    }

    /// Ends the connection because of `error`, and cuts its streams. Returns the error that ended
    /// the connection first. All later calls return the same error.
    #[cold]
    pub fn record(&mut self, context: &StreamContext, error: Error) -> Box<Error> {
        if self.0.is_none() {
            context.sockets.cut();
        }
        self.0.get_or_insert_with(|| Box::new(error)).clone()
    }

    /// Closes the connection, so that later calls fail. Returns true if the connection had ended
    /// with an error before.
    pub fn close(&mut self) -> bool {
        let has_failed = self.0.is_some();
        self.0.get_or_insert_with(|| Box::new(Usage::Closed.into()));
        has_failed
    }
}

/// A request that makes no progress.
pub struct Waiting {
    /// Direction of the request.
    pub direction: Direction,
    /// Description of the request, with an article.
    pub what: &'static str,
    /// For a send, its size in bytes. For a receive, the number of pending receives.
    pub count: usize,
}

impl Waiting {
    /// Records a poll without progress. Occasionally reads the clock, logs a request that has
    /// waited long, and checks that the peer's host still answers.
    ///
    /// # Errors
    /// [`Error::Network`] if the host does not answer.
    pub fn check(&self, context: &StreamContext, timer: &mut StallTimer) -> Quick<()> {
        match timer.idle() {
            None => Ok(()),
            Some(waited) => self.waited(context, timer, waited),
        }
    }

    #[cold]
    fn waited(
        &self,
        context: &StreamContext,
        timer: &mut StallTimer,
        waited: Duration,
    ) -> Quick<()> {
        if timer.should_warn(waited, context.stall_warn) {
            self.warn(context, waited);
        }
        let silent = if waited < UNACKNOWLEDGED {
            None
        } else {
            context.sockets.unacknowledged()
        };
        match silent {
            Some(silent) if silent >= UNACKNOWLEDGED => {
                let tcp = context.sockets.tcp.clone();
                let waited = self.after(waited);
                Err(Box::new(
                    Network::Silent {
                        tcp,
                        silent,
                        waited,
                    }
                    .into(),
                ))
            }
            _ => Ok(()),
        }
    }

    /// Describes the request, for an error that ends it.
    #[cold]
    pub fn after(&self, waited: Duration) -> Waited {
        let Self {
            direction,
            what,
            count,
        } = *self;
        match direction {
            Direction::Send => Waited::StreamSend {
                what,
                waited,
                bytes: count,
            },
            Direction::Receive => Waited::Receive {
                what,
                waited,
                pending: count,
            },
        }
    }

    fn warn(&self, context: &StreamContext, waited: Duration) {
        let (
            sockets,
            Self {
                direction,
                what,
                count,
            },
        ) = (&context.sockets, self);
        let is_first = context.log.is_first_stall(
            &sockets.tcp.peer,
            *direction,
            context.stall_warn,
            clock::now(),
        );
        match (direction, is_first) {
            (Direction::Send, true) => tracing::warn!(
                "{what} by {sockets} has made no progress for {waited:.0?} ({count} bytes): the peer may be computing or stuck"
            ),
            (Direction::Receive, true) => tracing::warn!(
                "{what} by {sockets} has made no progress for {waited:.0?} ({count} receives pending): the peer may be computing or stuck"
            ),
            (_, false) => tracing::debug!(
                "{what} by {sockets} has made no progress for {waited:.0?} ({count})"
            ),
        }
    }
}
