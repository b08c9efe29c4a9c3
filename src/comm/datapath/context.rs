//! Input of a data path besides its queue pairs. The data path knows nothing else of the process,
//! of set-up, or of recovery.

use super::peer::Peer;
use super::waker::Waker;
use crate::comm::rail::registration::Registrations;
use std::sync::Arc;
use std::time::Duration;

/// State that the data path of one connection shares with the rest of the process. On the fast path
/// only `peer` is read; the rest is used after something has gone wrong.
pub struct PathContext {
    /// Process at the other end.
    pub peer: Arc<Peer>,
    /// Registered memory, to find a send's keys again when it is posted on another rail.
    pub registrations: Arc<Registrations>,
    /// Time without progress after which a request is logged.
    pub stall_warn: Duration,
    /// Wakes the service thread when a rail is lost.
    pub waker: Arc<dyn Waker>,
}
