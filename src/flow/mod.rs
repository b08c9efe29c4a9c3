//! The state of a connection's traffic: which receives are granted, which sends run, and which rail carries what.
//!
//! Pure: no I/O, no clock, no locks, no allocation after construction, no `unsafe`. `comm` feeds it what the NICs
//! say and does what it answers.

pub mod plan;
pub mod receives;
pub mod sends;

use crate::wire::PARTS;

/// The sizes of a finished request: one for a send, one for each sub-receive of a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// How many there are.
    pub count: usize,
    /// The bytes really transferred.
    pub bytes: [usize; PARTS],
}

/// A request number that names nothing in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("request {0} is not in flight")]
pub struct NotInFlight(pub u16);
