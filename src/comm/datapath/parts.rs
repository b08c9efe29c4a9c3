//! What set-up hands to a data path.

use super::lane::Lane;
use super::mailbox::PeerMailbox;
use crate::flow::striping::Striping;
use crate::verbs::{Mr, Region};
use std::sync::Arc;

/// What a data path is made of.
pub struct PathParts {
    /// Its lanes, 1 to [`MAX_RAILS`](crate::wire::MAX_RAILS).
    pub lanes: Vec<Lane>,
    /// The memory that the peer writes into.
    pub region: Arc<Region>,
    /// The region's registrations, one a lane.
    pub keys: Vec<Mr>,
    /// The peer's memory.
    pub peer: PeerMailbox,
    /// The largest write.
    pub chunk_bytes: u32,
    /// How messages are divided.
    pub striping: Striping,
}
