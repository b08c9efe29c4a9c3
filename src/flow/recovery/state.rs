//! The two sides of a connection, and where a rail of it stands.

use crate::wire::control::Received;

/// A side of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Has connected. Writes data, gets clear-to-send entries.
    Sender,
    /// Has accepted. Writes clear-to-send entries, gets data.
    Receiver,
}

/// Limits of a connection, in nanoseconds.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// How long it may have no rail, and the peer may take to acknowledge a loss.
    pub loss: u64,
    /// How long a trial write may take.
    pub probe: u64,
    /// How long it may be without the first rail after it was agreed.
    pub first_rail: u64,
}

/// Where a rail of a connection stands.
#[derive(Debug, Clone, PartialEq)]
pub enum State {
    /// In use.
    Up {
        /// Since then.
        since: u64,
    },
    /// [`Action::Fence`](super::Action::Fence) was asked for `since` then; its result is to come, which can take long where a device was cut off. `why` is how
    /// the loss showed, and `peer_has` what the peer said that it has, once it has heard of the loss or told of it.
    #[allow(missing_docs)]
    Fencing { since: u64, why: String, peer_has: Option<Received> },
    /// This side has stopped it and said so. The peer has not answered.
    Fenced {
        /// Since then.
        since: u64,
    },
    /// Both sides have.
    Down {
        /// Connecting side: when to ask for it again.
        retry_at: u64,
    },
    /// Connecting side: [`Action::OpenQps`](super::Action::OpenQps) was asked for; its result is to come.
    Opening,
    /// Connecting side: has asked the peer, with new queue pairs.
    Requested {
        /// The peer answers by then.
        until: u64,
    },
    /// Connecting side: [`Action::ConnectQps`](super::Action::ConnectQps) was asked for; its result is to come.
    Connecting,
    /// Connecting side: a trial write is under way on each new queue pair.
    Probing {
        /// They are confirmed by then.
        until: u64,
    },
    /// Accepting side: [`Action::AnswerQps`](super::Action::AnswerQps) was asked for; its result is to come.
    Answering,
    /// Accepting side: new queue pairs are connected, and unused until the peer says LIVE.
    AwaitingLive,
}
