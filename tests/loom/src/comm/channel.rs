//! In place of the plugin's `comm/channel.rs`: a peer who says nothing.

/// A channel to a peer who says nothing.
pub struct Channel;
