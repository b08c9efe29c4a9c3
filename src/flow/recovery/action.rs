//! What recovery asks of its caller, and tells it.

use crate::wire::control::{ControlFrame, ControlMessage, Received};
use crate::wire::cts::Epoch;
use crate::wire::fields::{LaneEnd, RailAdvert};
use crate::wire::ids::LaneId;

/// The accepting side's part of a reconnection.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// Address of the connecting side.
    pub connector_gid: [u8; 16],
    /// Address of the accepting side.
    pub acceptor_gid: [u8; 16],
    /// Path MTU, in bytes.
    pub mtu_bytes: u32,
    /// The accepting side's queue pairs.
    pub end: LaneEnd,
    /// Clear-to-sends before this one have no key of use on the rail.
    pub epoch: Epoch,
}

/// What the caller is to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Stop the rail's queue pairs, take in what has come, and destroy them; then call [`fenced`](super::Recovery::fenced).
    Fence(LaneId),
    /// Both sides have stopped the rail, and the peer has this: what is missing goes by other rails.
    Resend(LaneId, Received),
    /// Make new queue pairs; then call [`opened`](super::Recovery::opened).
    OpenQps(LaneId),
    /// Make new queue pairs for these of the peer's and connect them; then call [`answered`](super::Recovery::answered).
    AnswerQps(LaneId, Box<RailAdvert>, LaneEnd),
    /// Connect the new queue pairs and write on each; then call [`connected`](super::Recovery::connected), and [`probed`](super::Recovery::probed) when it is known.
    ConnectQps(LaneId, Answer),
    /// Use the rail from here on, with the new queue pairs.
    Activate(LaneId),
    /// Destroy the new queue pairs.
    DropQps(LaneId),
    /// The peer closes, having delivered so many receives.
    PeerClosed(u64),
    /// The peer is gone.
    PeerGone,
    /// The connection has failed.
    Fail(Cause),
    /// To be logged.
    Log(LogEntry),
}

/// Why a connection has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// No rail has ever carried, within the limit for the first one.
    NoFirstRail,
    /// No rail is left, for so many nanoseconds.
    NoRail(u64),
    /// The peer does not acknowledge the loss of this rail.
    NotAcknowledged(LaneId),
    /// This rail was lost, and its device does not stop.
    NotStopped(LaneId),
    /// The peer says what it must not.
    Protocol(String),
}

/// What happened, for the log.
#[derive(Debug, Clone, PartialEq)]
pub enum LogEntry {
    /// The peer said this.
    Heard(Box<ControlMessage>),
    /// What the peer said is not readable.
    Malformed(String),
    /// What the peer said is about a rail that there is not.
    NoSuchRail(LaneId),
    /// What the peer said does not fit the rail's state.
    OutOfTurn(LaneId),
    /// A rail is lost. Connecting side: it is tried again after so many nanoseconds.
    Lost {
        /// Its lane.
        lane: LaneId,
        /// How that showed.
        why: String,
        /// The pause.
        retry: u64,
    },
    /// A rail cannot return now.
    NotYet(LaneId, String),
    /// The peer, whose TCP was closed, answers.
    PeerAnswers,
}

/// A control frame to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// By the bootstrap's TCP; by every rail that is up where that is gone.
    First(ControlFrame),
    /// Once more, by every rail that is up.
    Repeated(ControlFrame),
}
