//! What a data path needs besides its queue pairs. It knows nothing else of the process, and nothing of set-up and recovery.

use super::peer::Peer;
use super::waker::Waker;
use crate::comm::log::once::{Direction, LogOnce};
use crate::comm::rail::registration::Registrations;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the data path of one connection needs. It is asked only when something is wrong, but for the peer's presence.
pub struct PathContext {
    /// The other end.
    pub peer: Arc<Peer>,
    /// Where a send finds its memory again that has to be posted on another rail.
    pub registrations: Arc<Registrations>,
    /// After how long without progress a request is logged.
    pub stall_warn: Duration,
    /// What has been logged about the peer.
    pub log: Arc<LogOnce>,
    /// Wakes the service thread when a rail is lost.
    pub waker: Arc<dyn Waker>,
}

impl PathContext {
    /// Whether a request that makes no progress is the first one lately, of all connections with the peer.
    #[cold]
    pub fn is_first_stall(&self, direction: Direction) -> bool {
        self.log.is_first_stall(&self.peer.name, direction, self.stall_warn, Instant::now())
    }
}
