//! Input from connection set-up to a data path.

use super::lane::Lane;
use crate::flow::in_flight::Bound;
use crate::flow::striping::Striping;
use crate::verbs::Region;
use std::sync::Arc;

/// Components of a new data path.
pub struct PathParts {
    /// 1 to [`MAX_RAILS`](crate::wire::MAX_RAILS) connected lanes, with the keys of both mailboxes.
    pub lanes: Vec<Lane>,
    /// This end's mailbox, which the peer writes into.
    pub region: Arc<Region>,
    /// Address of the peer's mailbox.
    pub peer_addr: u64,
    /// Size of the largest single write.
    pub chunk_bytes: u32,
    /// Division of messages over the lanes.
    pub striping: Striping,
    /// Process-wide limit on the bytes that all sends have in flight together, if one is set.
    pub bound: Option<Arc<Bound>>,
}
