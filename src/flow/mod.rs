//! What a connection decides: which receives are granted, which sends run, which rail carries what, which rails belong together, and
//! how a lost rail is given up and comes back.
//!
//! Pure: no I/O, no clock, no locks, no `unsafe`. What runs for each message allocates nothing. `comm` feeds it what the NICs say and
//! does what it answers.

#![forbid(unsafe_code)]
#![deny(clippy::disallowed_types)]

pub mod control_link;
pub mod in_flight;
pub mod next;
pub mod pace;
pub mod pairing;
pub mod paths;
pub mod plan;
pub mod receives;
pub mod recovery;
pub mod redial;
pub mod sends;
pub mod streams;
pub mod striping;

/// A request number that names nothing in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("request {0} is not in flight")]
pub struct NotInFlight(pub u16);
