//! Roles of the two sides of a connection, and states of its rails.

use crate::wire::control::Received;
use crate::wire::ids::LaneId;
use std::fmt;

/// Role of one side of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The connecting side: writes data, and receives CTS entries.
    Sender,
    /// The accepting side: writes CTS entries, and receives data.
    Receiver,
}

/// Time limits of a connection, in nanoseconds.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Limit for the time without any rail, for a fence on this side, and for the peer's FENCED.
    pub loss: u64,
    /// Limit for the test writes.
    pub probe: u64,
    /// Limit for the time from the handshake to the first rail.
    pub first_rail: u64,
}

/// State of one rail of a connection. Times are in nanoseconds of recovery's clock.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum State {
    /// In use.
    Up { since: u64 },
    /// [`Action::Fence`](super::Action::Fence) is in progress. It takes long if the device was cut
    /// off or hangs. `peer_received` is the list in the peer's FENCED, if the message has already
    /// arrived.
    Fencing {
        since: u64,
        peer_received: Option<Received>,
    },
    /// This side has stopped the rail and sent FENCED. The peer has not answered yet.
    Fenced { since: u64 },
    /// Both sides have stopped the rail. The connecting side tries to reconnect it at `retry_at`.
    Down { retry_at: u64 },
    /// Connecting side: [`Action::OpenQps`](super::Action::OpenQps) may take until `until`.
    Opening { until: u64 },
    /// Connecting side: JOIN was sent. The peer has until `until` to answer.
    Requested { until: u64 },
    /// Connecting side: [`Action::ConnectQps`](super::Action::ConnectQps) may take until `until`.
    Connecting { until: u64 },
    /// Connecting side: the test writes on the new queue pairs may take until `until`.
    Probing { until: u64 },
    /// Accepting side: [`Action::AnswerQps`](super::Action::AnswerQps) is in progress.
    Answering,
    /// Accepting side: new queue pairs are connected. They are not used before the peer's LIVE.
    AwaitingLive,
    /// [`Action::Activate`](super::Action::Activate) is in progress.
    Activating,
}

/// A change of a rail's state.
#[derive(Debug, Clone, PartialEq)]
pub struct Changed {
    /// Lane of the rail.
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
    /// A work request, a queue pair, a port or a device failed on this side.
    Lost(String),
    /// The peer sent FENCED.
    LostByPeer,
    /// This side's queue pairs have stopped.
    Stopped,
    /// Both sides' queue pairs have stopped.
    StoppedByBoth,
    /// The pause before the next attempt has ended.
    Due,
    /// The current step of the attempt succeeded, here or at the peer.
    Done,
    /// Connecting side: a call that creates or connects queue pairs did not return in time.
    NoReturn,
    /// The peer did not answer JOIN in time.
    NoAnswer,
    /// The test writes were not acknowledged in time.
    NotConfirmed,
    /// The connection ends, so the attempt ends too.
    ConnectionEnds,
    /// The attempt failed on this side.
    Failed(String),
    /// Back-off has postponed the attempt.
    Deferred(String),
    /// The attempt failed at the peer.
    Refused(String),
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lost(why) | Self::Failed(why) | Self::Deferred(why) | Self::Refused(why) => why,
            Self::LostByPeer => "the peer reports it lost",
            Self::Stopped => "stopped",
            Self::StoppedByBoth => "stopped by both sides",
            Self::Due => "due",
            Self::Done => "done",
            Self::NoReturn => "a call to the connecting side's device did not return in time",
            Self::NoAnswer => "the peer did not answer the reconnect request in time",
            Self::NotConfirmed => "test write not acknowledged in time",
            Self::ConnectionEnds => "the connection ends",
        })
    }
}
