//! The two sides of a connection, and the states of its rails.

use crate::wire::control::Received;
use crate::wire::ids::LaneId;
use std::fmt;

/// A side of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The connecting side. It writes data, and gets clear-to-send entries.
    Sender,
    /// The accepting side. It writes clear-to-send entries, and gets data.
    Receiver,
}

/// Limits of a connection, in nanoseconds.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Time without any rail, and time for the peer to acknowledge a loss.
    pub loss: u64,
    /// Time for the test writes.
    pub probe: u64,
    /// Time from the handshake to the first rail.
    pub first_rail: u64,
}

/// State of a rail of a connection. Times are those of recovery's clock.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum State {
    /// In use.
    Up { since: u64 },
    /// [`Action::Fence`](super::Action::Fence) is under way, which takes long if the device was cut
    /// off. `peer_has` are the receives that the peer's FENCED lists, if it came first.
    Fencing { since: u64, peer_has: Option<Received> },
    /// This side has stopped the rail and said so. The peer has not answered.
    Fenced { since: u64 },
    /// Both sides have stopped it. The connecting side asks for it again at `retry_at`.
    Down { retry_at: u64 },
    /// Connecting side: [`Action::OpenQps`](super::Action::OpenQps) is under way.
    Opening,
    /// Connecting side: JOIN was sent. The peer answers until `until`.
    Requested { until: u64 },
    /// Connecting side: [`Action::ConnectQps`](super::Action::ConnectQps) is under way.
    Connecting,
    /// Connecting side: a test write is under way on each new queue pair, until `until`.
    Probing { until: u64 },
    /// Accepting side: [`Action::AnswerQps`](super::Action::AnswerQps) is under way.
    Answering,
    /// Accepting side: new queue pairs are connected, and unused until the peer says LIVE.
    AwaitingLive,
    /// [`Action::Activate`](super::Action::Activate) is under way.
    Activating,
}

impl State {
    pub(super) fn fencing(since: u64, peer_has: Option<Received>) -> Self {
        Self::Fencing { since, peer_has }
    }
}

/// A change of a rail's state.
#[derive(Debug, Clone, PartialEq)]
pub struct Changed {
    /// The rail's lane.
    pub lane: LaneId,
    /// State before.
    pub from: State,
    /// State after.
    pub to: State,
    /// Cause of the change.
    pub cause: Cause,
    /// Time of the change, in nanoseconds of recovery's clock.
    pub at: u64,
}

/// Cause of a change of a rail's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// A failure on this side: of a work request, a queue pair, a port or a device.
    Lost(String),
    /// The peer's FENCED.
    LostByPeer,
    /// This side's queue pairs have stopped.
    Stopped,
    /// Both sides' queue pairs have stopped.
    StoppedByBoth,
    /// The pause before the next attempt is over.
    Due,
    /// The step of the attempt that was under way is done, here or at the peer.
    Done,
    /// The peer did not answer JOIN in time.
    NoAnswer,
    /// The test writes were not confirmed in time.
    NotConfirmed,
    /// The connection ends, so the attempt does too.
    Ends,
    /// The attempt failed here.
    Failed(String),
    /// The attempt failed at the peer.
    Refused(String),
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lost(why) | Self::Failed(why) | Self::Refused(why) => why,
            Self::LostByPeer => "the peer reports it lost",
            Self::Stopped => "stopped",
            Self::StoppedByBoth => "fenced",
            Self::Due => "due",
            Self::Done => "done",
            Self::NoAnswer => "the peer did not answer the reconnect request in time",
            Self::NotConfirmed => "test write not acknowledged in time",
            Self::Ends => "the connection ends",
        })
    }
}
