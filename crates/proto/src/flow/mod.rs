//! The decisions of a connection, as state machines without I/O, clock, locks or `unsafe`.
//!
//! The plugin's `comm` reports events of NICs and TCP, and executes the decisions. Code that runs
//! for each message allocates nothing.
//!
//! A lane is a rail within one connection. A CTS (clear-to-send) entry grants the sender one part
//! of a receive. The ring is the sender's memory for these entries.
//!
//! - Messages: `receives` (granted receives), `shadow` (the receiver's copy of the ring), `next`
//!   (the next receive in the ring), `sends` (running sends), `epochs` (generations of keys in CTS
//!   entries), `streams` (messages over TCP).
//! - Lanes of a message: `striping` (choice of lanes), `plan` (bytes for each lane), `pace`
//!   (measured rates), `paths` (expected rates).
//! - Rails of a connection: `pairing` (pairs of rails), `recovery` (from the loss of a rail to its
//!   return), `control_link` (control messages in order, over paths that lose and duplicate
//!   frames), `redial` (when to dial a new TCP connection), `stall` (cause of a stall).

#![forbid(unsafe_code)]

pub mod control_link;
mod epochs;
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

/// Returns the number of the receive after receive number `sequence`. A receive's number, modulo
/// [`SLOTS`], is its slot. `N` is [`SLOTS`], except in the tests' model: the model has only the
/// first `N` slots, so this function skips the numbers of the other slots.
#[inline(always)]
const fn sequence_after<const N: usize>(sequence: u64) -> u64 {
    let next = sequence + 1;
    if (next as usize % SLOTS) < N {
        next
    } else {
        next.next_multiple_of(SLOTS as u64)
    }
}

/// Error of a request number that names no request in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("request {0} is not in flight")]
pub struct NotInFlight(pub u16);
