//! Actions that recovery asks its caller for, and its reports.

use super::Changed;
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
    /// First epoch whose clear-to-sends have keys of use on the rail.
    pub epoch: Epoch,
}

/// An action for the caller.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Stop the rail's queue pairs, take in what has come, and destroy them; then call
    /// [`fenced`](super::Recovery::fenced).
    Fence(LaneId),
    /// Both sides have stopped the rail, and the peer has these receives: send the missing shares by
    /// other rails.
    Resend(LaneId, Received),
    /// Make new queue pairs; then call [`opened`](super::Recovery::opened).
    OpenQps(LaneId),
    /// Make new queue pairs and connect them to these of the peer's; then call
    /// [`answered`](super::Recovery::answered).
    AnswerQps(LaneId, Box<RailAdvert>, LaneEnd),
    /// Connect the new queue pairs and post a test write on each; then call
    /// [`connected`](super::Recovery::connected), and [`probed`](super::Recovery::probed) when the
    /// result is known.
    ConnectQps(LaneId, Answer),
    /// Use the rail from here on, with the new queue pairs; then call
    /// [`activated`](super::Recovery::activated).
    Activate(LaneId),
    /// Destroy the new queue pairs.
    DropQps(LaneId),
    /// The peer closes, and has delivered this number of receives.
    PeerClosed(u64),
    /// The peer is gone.
    PeerGone,
    /// The connection has failed.
    Fail(Failure),
    /// A rail's state has changed: count and log it.
    Changed(Box<Changed>),
    /// Log this.
    Log(LogEntry),
}

/// Reason why a connection has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// No rail has ever carried, within the limit for the first one.
    NoFirstRail,
    /// No rail is left, for this number of nanoseconds.
    NoRail(u64),
    /// The peer does not acknowledge the loss of this rail.
    NotAcknowledged(LaneId),
    /// This rail was lost, and its device does not stop.
    NotStopped(LaneId),
    /// The peer broke the protocol.
    Protocol(String),
}

/// An entry for the log.
#[derive(Debug, Clone, PartialEq)]
pub enum LogEntry {
    /// A message of the peer's.
    Heard(Box<ControlMessage>),
    /// A frame that is not readable.
    Malformed(String),
    /// A message about a rail that does not exist.
    NoSuchRail(LaneId),
    /// A message that does not fit the rail's state.
    OutOfTurn(LaneId),
    /// The peer, whose TCP was closed, answers.
    PeerAnswers,
}

/// A control frame to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// By the bootstrap's TCP; by every rail that is up if there is no TCP.
    First(ControlFrame),
    /// Again, by every rail that is up.
    Repeated(ControlFrame),
}
