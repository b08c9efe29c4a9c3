//! One log line for an event that affects many connections.

/// Target of the lines about a rail that is back, or was lost while others remain. Newer NCCLs have
/// a level for such lines ([`crate::abi::logger`]).
pub const ATTENTION: &str = "attention";

pub mod losses;
pub mod once;
pub mod outages;
pub mod returned;
pub mod stalls;
pub mod tcp;
