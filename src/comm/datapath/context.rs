//! Input of a data path's calls besides the data path itself: the peer, and what the data path
//! needs from this process when a rail is lost or a request waits.

use super::peer::Peer;
use super::waker::Waker;
use crate::comm::operation::CurrentOperation;
use crate::comm::rail::registration::Registrations;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// State that a data path shares with the process. The fast path reads only `peer`.
pub struct PathContext {
    /// Process at the other end.
    pub peer: Arc<Peer>,
    /// Registered memory. A data path looks up the keys of running requests here again after a rail
    /// was lost or has returned.
    pub registrations: Arc<Registrations>,
    /// Time without progress after which a log line names the waiting request.
    pub stall_warn: Duration,
    /// Wakes the service thread when a rail is lost.
    pub waker: Arc<dyn Waker>,
    /// NCCL's operation on the connection's communicator, if NCCL announces operations.
    pub operation: OnceLock<&'static CurrentOperation>,
}
