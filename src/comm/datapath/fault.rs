//! What goes wrong on a data path: what a failed work request means, and the errors that calls end with. A message that goes well does
//! not come here.

use super::try_cell::TryCell;
use crate::comm::rail::registration::Registration;
use crate::error::{Error, Quick};
use crate::flow::NotInFlight;
use crate::verbs::{Blame, Completion};

/// How the error of a completion queue shows: no completion should find it full, for a lane's holds a flush of all that it can post.
pub const OVERRUN: &str = "its completion queue is in error (IBV_EVENT_CQ_ERR), and completions are lost";

/// What a failed work request means.
#[derive(Debug)]
pub enum Fault {
    /// Its rail is lost.
    Rail(String),
    /// Its device does not answer any more: the rail is lost, and there is nothing more to hear of it.
    Device(String),
    /// Its rail is lost, and perhaps because of the request: see [`super::status::Strikes`].
    Doubtful(String),
    /// Its rail is lost, and perhaps because of the request's key. That can be once for each rail whose device is taken away.
    Denied(String),
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
            Blame::Key => Self::Denied(why),
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
    if !memory.is_for_receives() && memory.covers(addr, bytes) {
        return Error::Argument(format!(
            "{call}: the memory at {addr:#x} was registered with a connection that sends; register it with this one"
        ));
    }
    Error::Argument(format!(
        "{call}: {bytes} bytes at {addr:#x} are outside the registered range {:#x} to {:#x}",
        range.start, range.end
    ))
}

/// A send that its receive, or the connection, has no room for.
#[cold]
pub fn too_large(peer: &str, bytes: u64, tag: i32, room: u64, most: u64) -> Box<Error> {
    if bytes > room {
        return Box::new(Error::Usage(format!(
            "send of {bytes} bytes into a receive of {room} bytes (tag {tag:#x}, peer {peer}): the ranks disagree on a size"
        )));
    }
    Box::new(Error::Argument(format!("send of {bytes} bytes; at most {most} are allowed on this connection")))
}

/// How a peer broke the protocol, for [`Error::Protocol`].
#[cold]
pub fn broken_protocol(peer: &str, violation: &dyn std::fmt::Display) -> String {
    format!("{peer} violated the protocol: {violation}")
}
