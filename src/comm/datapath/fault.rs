//! What goes wrong on a data path: what a failed work request means, and how long a request may wait. Never on the way of a message
//! that goes well.

use super::context::PathContext;
use super::lane::Lane;
use super::peer::{Peer, Presence};
use super::stall::StallTimer;
use super::try_cell::TryCell;
use crate::comm::log::once::Direction;
use crate::comm::rail::registration::Registration;
use crate::error::{Error, Quick};
use crate::flow::NotInFlight;
use crate::verbs::{Blame, Completion};
use std::time::Duration;

/// How long completions may still trickle in after a peer has closed or vanished, before what waits has failed.
const GONE_GRACE: Duration = Duration::from_secs(2);

/// A request that makes no progress, for messages.
pub struct Stalled<'a> {
    /// Its direction.
    pub direction: Direction,
    /// What waits, with an article: "a posted send".
    pub what: &'a str,
    /// Of a send, its bytes; of a receive, how many are pending.
    pub count: usize,
}

impl Stalled<'_> {
    /// Logs a request that has waited for long, and fails one whose peer is gone.
    ///
    /// # Errors
    /// [`Error::PeerGone`], for the connection to end with.
    #[cold]
    pub fn check(&self, context: &PathContext, timer: &mut StallTimer, waited: Duration, lanes: &[Lane]) -> Quick<()> {
        let (peer, Self { what, count, .. }) = (&context.peer.name, self);
        let why = match context.peer.presence() {
            Presence::Here if timer.should_warn(waited, context.stall_warn) => {
                self.warn(context, waited, lanes);
                return Ok(());
            }
            Presence::Here => return Ok(()),
            _ if timer.away() < GONE_GRACE => return Ok(()),
            Presence::Closed { .. } => format!("{peer} closed the connection"),
            // (Where it broke the protocol, the connection has ended with that error before.)
            Presence::Gone => format!(
                "{peer} is gone: its bootstrap connection closed without BYE and it did not answer over any rail"
            ),
        };
        let lanes = lanes_text(lanes);
        let text = match self.direction {
            Direction::Send => format!("{why}; {what} had waited {waited:.1?}; {lanes}"),
            Direction::Receive => {
                format!("{why}; {what} had waited {waited:.1?} ({count} receives pending); {lanes}")
            }
        };
        Err(Error::PeerGone(text).into())
    }

    fn warn(&self, context: &PathContext, waited: Duration, lanes: &[Lane]) {
        let (peer, Self { what, count, .. }) = (&context.peer.name, self);
        let is_first = context.is_first_stall(self.direction);
        let lanes = lanes_text(lanes);
        match (self.direction, is_first) {
            (Direction::Send, true) => tracing::warn!(
                "{what} to {peer} has made no progress for {waited:.0?} ({count} bytes): the peer computes or is stuck; {lanes}"
            ),
            (Direction::Receive, true) => tracing::warn!(
                "{what} from {peer} has made no progress for {waited:.0?} ({count} receives pending): the peer computes or is stuck; {lanes}"
            ),
            (Direction::Send, false) => {
                tracing::debug!("{what} to {peer} has made no progress for {waited:.0?} ({count} bytes); {lanes}");
            }
            (Direction::Receive, false) => {
                tracing::debug!("{what} from {peer} has made no progress for {waited:.0?}; {lanes}");
            }
        }
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
pub enum Fault {
    /// Its rail is lost.
    Rail(String),
    /// Its device does not answer any more: the rail is lost, and there is nothing more to hear of it.
    Device(String),
    /// Its rail is lost, and perhaps because of the request: see [`super::status::Strikes`].
    Doubtful(String),
    /// The request itself is wrong, on every rail: the connection has failed.
    Fatal(String),
    /// The peer broke the protocol: the connection has failed.
    Violation(String),
}

impl Fault {
    /// Of a completion with an error.
    #[cold]
    #[inline(never)]
    pub fn of_completion(completion: &Completion) -> Box<Self> {
        let (text, status) = (completion.status_text(), completion.status());
        let (vendor, qp) = (completion.vendor_error(), completion.qp_num());
        let why = format!("{text} (status {status}, vendor error {vendor:#x}, QP {qp})");
        Box::new(match completion.blame() {
            Blame::Path => Self::Rail(why),
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

/// Why a call could not enter its data path: the service thread has it for a moment, or a panic has ended it.
///
/// # Errors
/// [`Error::Internal`] after a panic, which was logged when it came.
#[cold]
#[inline(never)]
pub fn not_entered<P>(path: &TryCell<P>) -> Quick<()> {
    if path.is_broken() { Err(broken().into()) } else { Ok(()) }
}

/// The error of a data path that a panic went through: it is not used again.
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

/// How a peer broke the protocol, for [`Error::Protocol`].
#[cold]
pub fn broken_protocol(peer: &Peer, violation: &dyn std::fmt::Display) -> String {
    format!("{} violated the protocol: {violation}", peer.name)
}
