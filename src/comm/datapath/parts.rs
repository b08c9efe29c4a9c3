//! What set-up hands to a data path.

use super::lane::Lane;
use crate::flow::in_flight::Bound;
use crate::flow::striping::Striping;
use crate::verbs::Region;
use std::sync::Arc;

/// What a data path is made of.
pub struct PathParts {
    /// Its lanes, with the keys of both sides' regions, 1 to [`MAX_RAILS`](crate::wire::MAX_RAILS).
    pub lanes: Vec<Lane>,
    /// The memory that the peer writes into.
    pub region: Arc<Region>,
    /// Where the peer's is.
    pub peer_addr: u64,
    /// The largest write.
    pub chunk_bytes: u32,
    /// How messages are divided.
    pub striping: Striping,
    /// What all sends of the process may have in flight together, where that is bounded.
    pub bound: Option<Arc<Bound>>,
}
