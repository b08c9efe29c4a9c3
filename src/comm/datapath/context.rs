//! Input of a data path besides its queue pairs. The data path knows nothing else of the process,
//! of set-up, or of recovery.

use super::peer::Peer;
use super::waker::Waker;
use crate::comm::log::losses::Losses;
use crate::comm::log::once::{Direction, LogOnce};
use crate::comm::rail::registration::Registrations;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// State that the data path of one connection shares with the rest of the process. On the fast path
/// only `peer` is read; the rest is used after something has gone wrong.
pub struct PathContext {
    /// Process at the other end.
    pub peer: Arc<Peer>,
    /// Registered memory, to find a send's keys again when it is posted on another rail.
    pub registrations: Arc<Registrations>,
    /// Time without progress after which a request is logged.
    pub stall_warn: Duration,
    /// Record of the messages already logged about the peer, to limit repetition.
    pub log: Arc<LogOnce>,
    /// Packets that the rails lose, for messages.
    pub losses: Arc<Losses>,
    /// Wakes the service thread when a rail is lost.
    pub waker: Arc<dyn Waker>,
}

impl PathContext {
    /// Returns true for the first stalled request within `stall_warn`, over all connections with
    /// the peer.
    #[cold]
    pub fn is_first_stall(&self, direction: Direction) -> bool {
        self.log.is_first_stall(&self.peer.name, direction, self.stall_warn, Instant::now())
    }
}
