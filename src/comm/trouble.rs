//! What both halves of a connection say when something goes wrong. Never on the way of a message that goes well.

use super::lane::Lane;
use super::owner::Owner;
use super::patience::Patience;
use super::peer::{Peer, Presence};
use super::registration::Registration;
use crate::error::{Error, Quick};
use crate::flow::NotInFlight;
use crate::verbs::{Blame, Completion};
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
        Presence::Closed { .. } => Stall::Fail(format!("{} closed the connection", peer.name)),
        // (Of one that broke the protocol its breach is told, and not this.)
        Presence::Gone => Stall::Fail(format!(
            "{} is gone: its bootstrap connection closed without BYE and it did not answer over any rail",
            peer.name
        )),
    }
}

/// The lanes of a connection and what became of them, for a message.
#[cold]
pub fn lanes_text(lanes: &[Lane]) -> String {
    let one = |lane: &Lane| {
        let (here, there) = (lane.rail.name(), &lane.peer_rail);
        match lane.sent() {
            _ if !lane.is_open() => format!("{here} to {there} (lost)"),
            (_, 0) => format!("{here} to {there}"),
            (bytes, writes) => format!("{here} to {there} ({bytes} bytes confirmed in {writes} writes)"),
        }
    };
    format!("rails {}", lanes.iter().map(one).collect::<Vec<_>>().join(", "))
}

/// What a failed work request means.
#[derive(Debug)]
pub enum Failure {
    /// Its rail is lost.
    Rail(String),
    /// Its device does not answer any more: the rail is lost, and there is nothing more to hear of it.
    Device(String),
    /// Its rail is lost, and perhaps because of the request: see [`super::health::Strikes`].
    Doubtful(String),
    /// The request itself is wrong, on every rail: the connection has failed.
    Fatal(String),
}

impl Failure {
    /// Of a completion with an error.
    #[cold]
    #[inline(never)]
    pub fn of_completion(completion: &Completion) -> Box<Self> {
        let (text, status) = (completion.status_text(), completion.status());
        let (vendor, qp) = (completion.vendor_error(), completion.qp_num());
        let why = format!("{text} (status {status}, vendor error {vendor:#x}, QP {qp})");
        Box::new(match completion.blame() {
            Blame::Way => Self::Rail(why),
            Blame::Either => Self::Doubtful(why),
            Blame::Request => Self::Fatal(why),
        })
    }

    /// Of a queue pair that does not take a request.
    #[cold]
    pub fn of_refusal(error: Box<Error>) -> Box<Self> {
        Box::new(Self::Rail(error.to_string()))
    }

    /// Of a completion queue that cannot be polled.
    #[cold]
    pub fn of_device(error: Box<Error>) -> Box<Self> {
        Box::new(Self::Device(error.to_string()))
    }
}

/// Why a call could not enter its data path: the service thread has it for a moment, or a fault has ended it.
///
/// # Errors
/// [`Error::Internal`] for the fault, which was told when it came.
#[cold]
#[inline(never)]
pub fn not_entered<P>(path: &Owner<P>) -> Quick<()> {
    if path.is_broken() { Err(broken().into()) } else { Ok(()) }
}

/// A fault went through a data path, which is not used again.
#[cold]
pub fn broken() -> Error {
    Error::Internal("this connection cannot be used: its data path panicked".to_owned())
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
        "{call}: {bytes} bytes at {addr:#x} are outside the registered range {:#x} to {:#x}",
        range.start, range.end
    ))
}

/// A peer that says what it must not.
#[cold]
pub fn broken_protocol(peer: &Peer, violation: &dyn std::fmt::Display) -> Error {
    Error::Remote(format!("{} violated the protocol: {violation}", peer.name))
}
