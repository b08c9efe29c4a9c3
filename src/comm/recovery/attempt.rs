//! The driver's handles for a rail of a connection: its device, its names, and the queue pairs and
//! threads of the current attempt. The rail's state, and its attempts so far, are in
//! [`Recovery`](proto::flow::recovery::Recovery).

use crate::comm::datapath::lane::Lane;
use crate::comm::datapath::test_write::LaneTest;
use crate::comm::rail::backoff::Trial;
use crate::comm::rail::calls::{Call, DeviceCalls};
use crate::comm::rail::{Rail, RailSnapshot};
use crate::comm::recovery::fence::Fence;
use host::counters::Outages;
use host::error::Result;
use proto::backoff::PathId;
use proto::device::{Presence, SourceGid};
use proto::flow::recovery::{FailedAttempts, PathChoice, State};
use proto::wire::control::JoinAnswer;
use proto::wire::fields::RailAdvert;
use std::borrow::Cow;
use std::net::Ipv6Addr;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Weak};

/// State of one rail of a connection.
pub struct ManagedRail {
    /// Rail of this host.
    pub rail: Arc<Rail>,
    /// Name of the peer's rail, for messages.
    pub peer_rail: String,
    /// Counters of the rail's losses and recoveries.
    pub outages: Outages,
    /// Number of the connection's queue pairs on the rail.
    pub queue_count: usize,
    /// Device generation (count of the device's openings) of the queue pairs that are in use, or
    /// were last in use. `None` until the rail is first used.
    pub generation: Option<u32>,
    /// SourceGid address of the same queue pairs.
    pub source: Option<SourceGid>,
    /// On a receiver: device generation whose memory keys our CTS entries carry. `None` if the
    /// device was not in use at the start, or at some time since the last new queue pairs.
    pub cts_generation: Option<u32>,
    /// State of the current attempt. On the accepting side, the data path takes the new queue pairs
    /// once they are connected ([`crate::comm::datapath::status::Status::keep`]).
    pub attempt: Option<Attempt>,
    /// Fence of the rail's lost queue pairs, until the data path has processed their completions.
    pub fence: Option<Fence>,
}

/// New queue pairs that are not in use yet.
pub enum Attempt {
    /// A thread creates or connects the queue pairs.
    Working(Worker),
    /// Connecting side: JOIN describes the queue pairs to the peer. The peer's answer, which
    /// describes the peer's queue pairs, is awaited.
    Requested(Box<NewQueuePairs>),
    /// Accepting side: the queue pairs are connected, with the answer for the peer. The data path
    /// takes the queue pairs as soon as it can be borrowed.
    Answered(Box<(Lane, JoinAnswer)>),
    /// Connecting side: the queue pairs are connected and under test.
    Testing(Box<LaneTest>),
}

/// Thread that works for an attempt, until its result is taken. Dropping this value before then
/// gives up the attempt: the device counts the thread's call as one that may hang.
pub struct Worker {
    result: Receiver<Done>,
    calls: Arc<DeviceCalls>,
    call: Weak<Call>,
}

impl Worker {
    /// Returns the state of a thread that makes `call`, one of `calls`, and then sends `result`.
    pub fn new(result: Receiver<Done>, calls: &Arc<DeviceCalls>, call: &Arc<Call>) -> Self {
        Self {
            result,
            calls: Arc::clone(calls),
            call: Arc::downgrade(call),
        }
    }

    /// Takes the thread's result.
    ///
    /// # Errors
    /// [`TryRecvError::Empty`] before the result, [`TryRecvError::Disconnected`] after a panic.
    pub fn take(&mut self) -> std::result::Result<Done, TryRecvError> {
        let done = self.result.try_recv()?;
        // The call has returned, so it no longer counts as one that may hang.
        self.call = Weak::new();
        Ok(done)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.calls.give_up(&self.call);
    }
}

/// Result of a thread's work on new queue pairs.
pub enum Done {
    /// Connecting side: the thread has tried to create the queue pairs.
    Opened(Result<Box<NewQueuePairs>>),
    /// Accepting side: no queue pairs, because back-off does not allow an attempt on the path now.
    Deferred {
        /// Path of the attempt.
        choice: PathChoice,
        /// The reason, for a message.
        why: String,
    },
    /// Accepting side: the thread has tried to create queue pairs and to connect them to the peer's
    /// queue pairs.
    Answered {
        /// Path of the attempt. `None` if no path could be chosen, for example because the two ends
        /// share no subnet.
        choice: Option<PathChoice>,
        /// Right to test the path on behalf of all connections, if the path was dead before.
        trial: Option<Trial>,
        /// The connected queue pairs, and the answer for the peer.
        outcome: Result<Box<(Lane, JoinAnswer)>>,
    },
    /// Connecting side: the thread has tried to connect the queue pairs to the peer's queue pairs.
    Connected {
        /// The queue pairs.
        lane: Box<Lane>,
        /// Path of the attempt.
        choice: PathChoice,
        /// Right to test the path on behalf of all connections, if the path was dead before.
        trial: Option<Trial>,
        /// Result of `ibv_modify_qp`.
        outcome: Result<()>,
    },
}

/// New queue pairs, with the data to connect them.
pub struct NewQueuePairs {
    /// The queue pairs, not connected.
    pub lane: Lane,
    /// State of the rail when the queue pairs were created.
    pub snapshot: RailSnapshot,
    /// Description of the rail for the peer.
    pub advert: RailAdvert,
}

impl ManagedRail {
    /// Returns the state for `lane`, which has `queue_count` queue pairs or gets them later.
    pub fn of(lane: &Lane, queue_count: usize) -> Self {
        let rail = Arc::clone(&lane.rail);
        let peer_rail = lane.peer_rail.clone();
        let generation = lane.is_open().then_some(lane.generation());
        let source = lane.source();
        // The first CTS entries will carry the keys of the device that is present now.
        let cts_generation =
            generation.or_else(|| rail.device.opened().ok().map(|(_, generation)| generation));
        let outages = Outages::of(&lane.record);
        Self {
            rail,
            peer_rail,
            outages,
            queue_count,
            generation,
            source,
            cts_generation,
            attempt: None,
            fence: None,
        }
    }

    /// Returns the back-off key of a path.
    pub fn path(&self, choice: PathChoice) -> PathId {
        PathId {
            rail: self.rail.id,
            peer_gid: choice.peer_gid,
        }
    }

    /// Returns the reason why the rail's queue pairs cannot work, if this host knows one: their
    /// device is away, or was removed since they were created, or the port lost their address.
    pub fn known_loss(&self) -> Option<Cow<'static, str>> {
        let device = &self.rail.device;
        if device.presence_of(self.generation?) != Presence::Here {
            return Some(device.absence_reason().into());
        }
        let SourceGid { gid, gid_index } = self.source.filter(|gid| !device.has_gid(gid))?;
        let address = Ipv6Addr::from(gid).to_canonical();
        Some(format!("address {address} left index {gid_index} of the GID table").into())
    }

    /// Returns the names of both rails, for messages.
    pub fn name(&self) -> String {
        format!("{} to {}", self.rail.name(), self.peer_rail)
    }

    /// Returns the name of this host's rail and its failed attempts, for messages.
    pub fn tries_text(&self, failed: &[FailedAttempts]) -> String {
        let tries: Vec<String> = failed.iter().map(text_of).collect();
        format!("{} ({})", self.rail.name(), tries.join("; "))
    }

    /// Returns the names of both rails and their state, for messages.
    pub fn text(&self, state: Option<&State>) -> String {
        let text = match state {
            Some(State::Up { .. }) => "up",
            Some(State::Fencing { .. } | State::Fenced { .. }) => {
                "lost, not acknowledged by the peer"
            }
            Some(State::Down { .. }) | None => "lost",
            Some(State::Opening { .. } | State::Requested { .. } | State::Connecting { .. }) => {
                "reconnecting"
            }
            Some(
                State::Probing { .. } | State::Answering | State::AwaitingLive | State::Activating,
            ) => "under test",
        };
        format!("{}: {text}", self.name())
    }
}

fn text_of(FailedAttempts { path, count, cause }: &FailedAttempts) -> String {
    let times = if *count == 1 {
        String::new()
    } else {
        format!(", {count} attempts")
    };
    match path {
        Some(PathChoice {
            peer_gid,
            mtu_bytes,
        }) => {
            let address = Ipv6Addr::from(*peer_gid).to_canonical();
            format!("to {address} with path MTU {mtu_bytes}{times}: {cause}")
        }
        None => format!("{cause}{times}"),
    }
}
