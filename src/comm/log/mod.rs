//! One log line for an event that affects many connections.

pub mod losses;
pub mod once;
pub mod outages;
pub mod returned;
pub mod stalls;
pub mod tcp;
