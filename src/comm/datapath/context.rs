//! Input of a data path besides its queue pairs, and its only access to the rest of the process.

use super::peer::Peer;
use super::waker::Waker;
use crate::comm::rail::registration::Registrations;
use std::sync::Arc;
use std::time::Duration;

/// State that a data path shares with the process. The fast path reads only `peer`.
pub struct PathContext {
    /// Process at the other end.
    pub peer: Arc<Peer>,
    /// Registered memory, to find a request's keys again after a rail was lost or has returned.
    pub registrations: Arc<Registrations>,
    /// Time without progress after which a request is logged.
    pub stall_warn: Duration,
    /// Wakes the service thread when a rail is lost.
    pub waker: Arc<dyn Waker>,
}
