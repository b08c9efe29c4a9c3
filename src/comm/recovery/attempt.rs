//! A rail of a connection as its recovery driver has it: its names, the attempts to bring it back, and the queue pairs
//! of the attempt that is under way.

use crate::comm::datapath::lane::Lane;
use crate::comm::datapath::test_write::LaneTest;
use crate::comm::rail::backoff::{PathId, Trial};
use crate::comm::rail::device::Presence;
use crate::comm::rail::{Look, Rail};
use crate::counters::Outages;
use crate::error::Result;
use crate::flow::recovery::{Answer, State};
use crate::wire::fields::RailAdvert;
use std::net::Ipv6Addr;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

/// A rail of a connection.
pub struct ManagedRail {
    /// This host's rail.
    pub rail: Arc<Rail>,
    /// The peer's, for messages.
    pub peer_rail: String,
    /// Counts its losses.
    pub outages: Outages,
    /// Queue pairs of the connection on it.
    pub queue_count: usize,
    /// Which opening of its device it is used with; none before it is.
    pub opening: Option<u32>,
    /// Of a receiver: which opening its clear-to-sends have keys of. None where its device was away when the connection came up.
    pub granted: Option<u32>,
    /// Accepting side: attempts of the peer to bring it back since it last carried.
    pub answers: u32,
    /// The ways of its last two attempts, the newest first; they may take turns.
    pub ways: [Option<Way>; 2],
    /// Progress of the newest attempt, for messages.
    pub stage: Stage,
    /// The failed attempts of a rail that the connection has never had.
    pub tries: Vec<Tries>,
    /// Connecting side: the new queue pairs of an attempt to bring it back. (Those of the accepting side are the data path's:
    /// [`crate::comm::datapath::status::Status::keep`].)
    pub attempt: Option<Attempt>,
}

/// New queue pairs on their way into use.
pub enum Attempt {
    /// A thread makes or connects them, and gives its result here.
    Working(Receiver<Done>),
    /// The peer was asked for its own.
    Asked(Box<Asked>),
    /// The queue pairs are connected and under test.
    Testing(Box<LaneTest>),
}

/// Result of a thread's work on new queue pairs.
pub enum Done {
    /// Connecting side: they are made.
    Opened(Result<Box<Asked>>),
    /// Accepting side: the path rests, so none were made.
    PutOff {
        /// The path.
        way: Way,
        /// The reason, for a message.
        why: String,
    },
    /// Accepting side: they are connected to the peer's.
    Answered {
        /// The path; none where the two sides share none.
        way: Option<Way>,
        /// The right to try the path for all connections, where it was dead before.
        trial: Option<Trial>,
        /// The queue pairs, and the answer to the peer.
        outcome: Result<Box<(Lane, Answer)>>,
    },
    /// Connecting side: they are connected to the peer's, unless `outcome` says otherwise.
    Connected {
        /// The queue pairs.
        lane: Box<Lane>,
        /// The path.
        way: Way,
        /// The right to try the path for all connections, where it was dead before.
        trial: Option<Trial>,
        /// Result of `ibv_modify_qp`.
        outcome: Result<()>,
    },
}

/// A way to the peer's rail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Way {
    /// The peer's address.
    pub peer_gid: [u8; 16],
    /// Path MTU in bytes.
    pub mtu_bytes: u32,
}

/// Progress of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Stage {
    /// The way is not chosen yet.
    #[default]
    Begun,
    /// The attempt goes by the newest way.
    OnItsWay,
    /// Back-off put the attempt off, so it is none.
    PutOff,
}

/// The failed attempts on one way.
#[derive(Debug, Clone)]
pub struct Tries {
    /// The way; none for attempts that ended before it was chosen.
    way: Option<Way>,
    count: u32,
    /// Reason of the first one.
    why: String,
}

/// Largest number of ways in a message. A rail rarely has more combinations of address and path MTU.
const MOST_TRIES: usize = 6;

/// New queue pairs, with what they are to be connected by.
pub struct Asked {
    /// The queue pairs, not connected.
    pub lane: Lane,
    /// The rail as it was when they were made.
    pub look: Look,
    /// The rail, as the peer is told of it.
    pub advert: RailAdvert,
}

impl ManagedRail {
    /// The rail of a lane of a new connection, which has `queue_count` queue pairs there, now or later.
    pub fn of(lane: &Lane, queue_count: usize) -> Self {
        let (rail, peer_rail) = (Arc::clone(&lane.rail), lane.peer_rail.clone());
        let opening = lane.is_open().then_some(lane.opening());
        // The first grants will carry the keys of the devices that are present now.
        let granted = opening.or_else(|| rail.device.opened().ok().map(|(_, opening)| opening));
        // A rail that does not carry has had its first attempt in the handshake.
        let answers = u32::from(opening.is_none());
        let outages = Outages::of(&lane.record);
        let (ways, stage, tries, attempt) = Default::default();
        Self { rail, peer_rail, outages, queue_count, opening, granted, answers, ways, stage, tries, attempt }
    }

    /// The path of a way.
    pub fn path(&self, way: Way) -> PathId {
        PathId { rail: self.rail.id, peer_gid: way.peer_gid }
    }

    /// True if the device of the rail's queue pairs is away, or has been since they were made.
    pub fn is_away(&self) -> bool {
        self.opening.is_some_and(|opening| self.rail.device.presence_of(opening) != Presence::Here)
    }

    /// Notes that an attempt begins, whose way is not chosen yet.
    pub fn begins_attempt(&mut self) {
        self.stage = Stage::Begun;
    }

    /// Notes the way of the attempt.
    pub fn goes_by(&mut self, way: Way) {
        (self.ways, self.stage) = ([Some(way), self.ways[0]], Stage::OnItsWay);
    }

    /// Notes that the attempt failed.
    pub fn failed(&mut self, why: &str) {
        if self.stage == Stage::PutOff {
            return;
        }
        let way = self.ways[0].filter(|_| self.stage == Stage::OnItsWay);
        if let Some(tries) = self.tries.iter_mut().find(|tries| tries.way == way) {
            tries.count += 1;
        } else if self.tries.len() < MOST_TRIES {
            self.tries.push(Tries { way, count: 1, why: why.to_owned() });
        }
    }

    /// This host's rail and the peer's, for messages.
    pub fn name(&self) -> String {
        format!("{} to {}", self.rail.name(), self.peer_rail)
    }

    /// This host's rail and its failed attempts, for messages.
    pub fn tries_text(&self) -> String {
        let tries: Vec<String> = self.tries.iter().map(Tries::text).collect();
        format!("{} ({})", self.rail.name(), tries.join("; "))
    }

    /// The rail and its state, for messages.
    pub fn text(&self, state: Option<&State>) -> String {
        let text = match state {
            Some(State::Up { .. }) => "up",
            Some(State::Fencing { .. } | State::Fenced { .. }) => "lost, not acknowledged by the peer",
            Some(State::Down { .. }) | None => "lost",
            Some(State::Opening | State::Requested { .. } | State::Connecting) => "reconnecting",
            Some(State::Probing { .. } | State::Answering | State::AwaitingLive | State::Activating) => "under test",
        };
        format!("{}: {text}", self.name())
    }
}

impl Tries {
    fn text(&self) -> String {
        let Self { way, count, why } = self;
        let times = if *count == 1 { String::new() } else { format!(", {count} attempts") };
        match way {
            Some(Way { peer_gid, mtu_bytes }) => {
                let address = Ipv6Addr::from(*peer_gid).to_canonical();
                format!("to {address} with path MTU {mtu_bytes}{times}: {why}")
            }
            None => format!("{why}{times}"),
        }
    }
}
