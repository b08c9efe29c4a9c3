//! What both halves of a connection say when something goes wrong. Never on the way of a message that goes well.

use super::lane::Lane;
use super::patience::Patience;
use super::peer::{Peer, Presence};
use super::registration::Registration;
use crate::error::Error;
use crate::flow::NotInFlight;
use crate::verbs::Completion;
use std::time::Duration;

/// How long completions may still trickle in after a peer has closed or vanished, before what waits has failed.
const GONE_GRACE: Duration = Duration::from_secs(2);

/// What to do about a connection on which nothing moves.
#[derive(Debug)]
pub enum Stall {
    /// Wait on.
    Wait,
    /// Wait on, and say so.
    Warn,
    /// Give up; the text begins the reason.
    Fail(String),
}

/// Decides about a stall.
#[cold]
pub fn stall_verdict(
    patience: &mut Patience,
    peer: &Peer,
    presence: Presence,
    waited: Duration,
    warn_after: Duration,
) -> Stall {
    match presence {
        Presence::Here if patience.should_warn(waited, warn_after) => Stall::Warn,
        Presence::Here => Stall::Wait,
        _ if patience.away() < GONE_GRACE => Stall::Wait,
        Presence::Closed { .. } => Stall::Fail(format!("{} has closed the connection", peer.name)),
        Presence::Gone => Stall::Fail(format!("{} is gone: its bootstrap connection broke", peer.name)),
    }
}

/// The lanes of a connection, for a message.
#[cold]
pub fn lanes_text(lanes: &[Lane]) -> String {
    let one = |lane: &Lane| format!("{} to {}", lane.rail.name(), lane.peer_rail);
    format!("rails {}", lanes.iter().map(one).collect::<Vec<_>>().join(", "))
}

/// A work request that failed.
#[cold]
pub fn completion_failure(peer: &Peer, lane: &Lane, completion: &Completion) -> Error {
    Error::Remote(format!(
        "rail {} to {} of {} failed: {} (status {}, vendor {:#x}, queue pair {})",
        lane.rail.name(),
        lane.peer_rail,
        peer.name,
        completion.status_text(),
        completion.status(),
        completion.vendor_error(),
        completion.qp_num(),
    ))
}

/// A request number that names nothing.
#[cold]
pub fn not_in_flight(error: NotInFlight) -> Box<Error> {
    Box::new(Error::Argument(error.to_string()))
}

/// Memory outside its registration.
#[cold]
pub fn outside(call: &str, addr: u64, bytes: usize, memory: &Registration) -> Error {
    let range = memory.range();
    Error::Argument(format!(
        "{call} of {bytes} bytes at {addr:#x}: outside the registered {:#x} to {:#x}",
        range.start, range.end
    ))
}

/// A peer that says what it must not.
#[cold]
pub fn broken_protocol(peer: &Peer, violation: &dyn std::fmt::Display) -> Error {
    Error::Remote(format!("{} breaks the protocol: {violation}", peer.name))
}
