//! Replaces the plugin's `comm/rail.rs`: no model has a rail.

/// A rail.
pub struct Rail;
