//! The decisions of a connection, as pure state.
//!
//! No I/O, clock, locks or `unsafe`. Code that runs for each message allocates nothing. `comm`
//! reports what the NICs did and executes the answers.
//!
//! - Messages: `receives` (granted receives), `shadow` (their CTS entries), `next` (the CTS entry
//!   at the head of the ring), `sends` (running sends), `epochs` (of keys in CTS entries),
//!   `in_flight` (the bound of `NCCL_SPARK_INFLIGHT_BYTES`), `streams` (messages over TCP).
//! - Rails of a message: `striping` (which lanes), `plan` (bytes for each lane), `pace` (measured
//!   speed), `paths` (promised speed).
//! - Rails of a connection: `pairing` (which rails belong together), `recovery` (from loss to
//!   return), `control_link` (control messages in order over paths that lose and duplicate frames),
//!   `redial` (when TCP is dialled again), `stall` (which side causes a stall).

#![forbid(unsafe_code)]
#![deny(clippy::disallowed_types)]

pub mod control_link;
mod epochs;
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
pub mod shadow;
pub mod stall;
pub mod streams;
pub mod striping;

use crate::wire::SLOTS;

/// Number of the receive after `sequence`. Skips slots that a model with `N` < [`SLOTS`] lacks.
#[inline(always)]
const fn sequence_after<const N: usize>(sequence: u64) -> u64 {
    let next = sequence + 1;
    if (next as usize % SLOTS) < N { next } else { next.next_multiple_of(SLOTS as u64) }
}

/// A request number with no request in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("request {0} is not in flight")]
pub struct NotInFlight(pub u16);
