//! Actions that recovery requests from its caller, and the data in them.

use super::Changed;
use crate::wire::control::{ControlFrame, ControlMessage, JoinAnswer, Received, StallReport};
use crate::wire::fields::{LaneEnd, RailAdvert};
use crate::wire::ids::LaneId;

/// An action for the caller.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Stop the rail's queue pairs, process their completions and destroy them. Then call
    /// [`fenced`](super::Recovery::fenced).
    Fence(LaneId),
    /// Both sides have stopped the rail. The list has the shares that arrived at the peer; for a
    /// receiver, it is empty. A sender sends its missing shares over other rails. A receiver
    /// repeats the rail's grants.
    Resend(LaneId, Received),
    /// Create new queue pairs. Then call [`opened`](super::Recovery::opened).
    OpenQps(LaneId),
    /// Create queue pairs, and connect them to the peer's queue pairs. The action has the peer's
    /// rail and its end of the lane. Then call [`answered`](super::Recovery::answered).
    AnswerQps(LaneId, Box<RailAdvert>, LaneEnd),
    /// Connect the new queue pairs and post test writes on each. Then call
    /// [`connected`](super::Recovery::connected), and after the test
    /// [`probed`](super::Recovery::probed).
    ConnectQps(LaneId, JoinAnswer),
    /// Start to use the new queue pairs. Then call [`activated`](super::Recovery::activated).
    Activate(LaneId),
    /// Destroy the new queue pairs.
    DropQps(LaneId),
    /// The peer has closed the connection. The number counts the peer's receives before the first
    /// one that waits for bytes; it is 0 if the peer is the sender.
    PeerClosed(u64),
    /// The peer's process has ended, or TCP delivered invalid bytes.
    PeerGone,
    /// The connection has failed.
    Fail(Failure),
    /// The peer has asked a question, with its own state. Answer it with
    /// [`reply_to_stall`](super::Recovery::reply_to_stall).
    StallQuery(StallReport),
    /// The peer has answered a question.
    StallReply(StallReport),
    /// Count and log the change of a rail's state.
    Changed(Box<Changed>),
    /// Write a log entry.
    Log(LogEntry),
}

/// Reason why a connection has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// No rail came into use within [`Limits::first_rail`](super::Limits::first_rail).
    NoFirstRail,
    /// No rail has been up for this number of nanoseconds.
    NoRail(u64),
    /// The peer did not acknowledge the loss of this rail.
    NotAcknowledged(LaneId),
    /// This rail was lost, and its device did not stop.
    NotStopped(LaneId),
    /// The peer violated the protocol.
    Protocol(String),
    /// The connection has failed at the peer, for this reason.
    AtPeer(String),
}

/// A log entry.
#[derive(Debug, Clone, PartialEq)]
pub enum LogEntry {
    /// A message from the peer.
    MessageReceived(Box<ControlMessage>),
    /// An unreadable frame.
    Malformed(String),
    /// A message about a rail that does not exist.
    NoSuchRail(LaneId),
    /// A message that is not expected in the rail's state.
    OutOfTurn(LaneId),
    /// The peer has confirmed a frame after its TCP was closed, so it is alive.
    PeerAnswers,
}

/// A control frame to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// First transmission: over TCP, or if there is no TCP, over every rail that is up.
    First(ControlFrame),
    /// Repetition, over every rail that is up.
    Repeated(ControlFrame),
}
