//! Faults of a data path. Classifies failed work requests, and makes the errors that calls return.
//! Nothing here runs while messages succeed.

use super::try_cell::TryCell;
use crate::comm::rail::registration::Registration;
use host::error::{Argument, Error, Internal, Quick, Usage, Violation};
use proto::flow::NotInFlight;
use std::ops::Range;
use verbs::{Blame, Completion};

/// Text of the fault of a lane whose completion queue is in error. A sender then loses the rail. A
/// receiver's connection fails. A lane's completion queue has room for a full flush, so it should
/// never overrun.
pub const OVERRUN: &str = "completion queue error (IBV_EVENT_CQ_ERR): completions were lost";

/// Meaning and consequence of a failure on a lane. The text describes the failure.
#[derive(Debug)]
pub enum Fault {
    /// The rail is lost.
    Rail(String),
    /// The rail is lost because its device no longer answers. No more completions can be polled.
    Device(String),
    /// The rail is lost, and the work request may be the cause. [`super::status::Strikes`] counts
    /// such losses.
    SuspectRequest(String),
    /// The rail is lost, and the work request's key may be the cause. A valid request can fail this
    /// way too: once on each rail whose device is being removed.
    KeyRefused(String),
    /// The connection has failed. Either the work request itself is wrong and would fail on every
    /// rail, or completions of a receiver were lost ([`OVERRUN`]).
    Fatal(String),
    /// The peer violated the protocol. The connection has failed.
    Violation(Violation),
}

impl Fault {
    /// Classifies a completion with an error.
    #[cold]
    #[inline(never)]
    pub fn of_completion(completion: &Completion) -> Box<Self> {
        let text = completion.status_text();
        let status = completion.status();
        let vendor = completion.vendor_error();
        let qp = completion.qp_num();
        let why = format!("{text} (status {status}, vendor error {vendor:#x}, QP {qp})");
        Box::new(match completion.blame() {
            Blame::Path => Self::Rail(why),
            Blame::Either => Self::SuspectRequest(why),
            Blame::Key => Self::KeyRefused(why),
            Blame::Request => Self::Fatal(why),
        })
    }

    /// Classifies the refusal of a work request by a queue pair.
    #[cold]
    pub fn of_refusal(error: Box<Error>) -> Box<Self> {
        Box::new(Self::Rail(error.to_string()))
    }

    /// Classifies the failure to poll a completion queue.
    #[cold]
    pub fn of_device(error: Box<Error>) -> Box<Self> {
        Box::new(Self::Device(error.to_string()))
    }
}

/// Returns the result of a call that could not enter its data path. `Ok` means that the service
/// thread uses the data path at this moment. The error means that a panic has ended all use of the
/// data path.
///
/// # Errors
/// [`Error::Internal`] after a panic, which was logged when it happened.
#[cold]
#[inline(never)]
pub fn not_entered<P>(path: &TryCell<P>) -> Quick<()> {
    if path.is_broken() {
        Err(broken().into())
    } else {
        Ok(())
    }
}

/// Returns the error of a data path that is not used again, because a thread panicked in it.
#[cold]
pub fn broken() -> Error {
    Internal::PathPanicked.into()
}

/// Returns the error for a request number that names no request in flight.
#[cold]
pub fn not_in_flight(error: NotInFlight) -> Box<Error> {
    Box::new(Argument::NotInFlight(error.0).into())
}

/// Returns the error for a call whose memory is outside the registration, or is registered only for
/// sends.
#[cold]
pub fn outside_registration(
    call: &'static str,
    addr: u64,
    bytes: usize,
    memory: &Registration,
) -> Error {
    if !memory.is_for_receives() && memory.covers(addr, bytes) {
        return Argument::ForSends { call, addr }.into();
    }
    let Range { start, end } = memory.range();
    Argument::Outside {
        call,
        addr,
        bytes,
        start,
        end,
    }
    .into()
}

/// Returns the error for a send that is larger than its receive buffer (`room` bytes), or larger
/// than any send may be (`most` bytes).
#[cold]
pub fn too_large(peer: &str, bytes: u64, tag: i32, room: u64, most: u64) -> Box<Error> {
    if bytes > room {
        return Box::new(
            Usage::Sizes {
                peer: peer.to_owned(),
                bytes,
                room,
                tag,
            }
            .into(),
        );
    }
    Box::new(Argument::TooLarge { bytes, most }.into())
}

/// Returns the error for a peer that violated the protocol. `how` describes the violation.
#[cold]
pub fn broken_protocol(peer: &str, how: &dyn std::fmt::Display) -> Violation {
    Violation::Breach {
        peer: peer.to_owned(),
        how: how.to_string(),
    }
}
