//! Replaces the plugin's `comm/rail.rs` and `comm/process.rs`: no model has a rail.

/// A rail.
pub struct Rail;

/// State that all connections share.
pub struct Process;
