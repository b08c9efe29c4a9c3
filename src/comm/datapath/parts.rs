//! The values from which connection set-up creates a data path.

use super::lane::Lane;
use proto::flow::striping::Striping;
use std::sync::Arc;
use verbs::Region;

/// The values from which a data path is created.
pub struct PathParts {
    /// 1 to [`MAX_RAILS`](proto::wire::MAX_RAILS) lanes. A lane is connected and has the keys of
    /// both mailboxes, or it has no queue pairs because its rail does not work yet.
    pub lanes: Vec<Lane>,
    /// This end's mailbox, which the peer writes into.
    pub region: Arc<Region>,
    /// Address of the peer's mailbox.
    pub peer_addr: u64,
    /// Largest number of bytes in one write.
    pub chunk_bytes: u32,
    /// Division of messages over the lanes.
    pub striping: Striping,
}
