//! A rail of a connection as its recovery driver has it: what names it, and the queue pairs that are to bring it back.

use crate::comm::datapath::lane::Lane;
use crate::comm::rail::backoff::{PathId, Trial};
use crate::comm::rail::{Look, Rail};
use crate::counters::Outages;
use crate::flow::recovery::State;
use std::sync::Arc;
use std::time::Instant;

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
    /// The paths that its last two attempts went by, the newest first; they may take turns.
    pub paths: [Option<PathId>; 2],
    /// Connecting side: the new queue pairs of an attempt to bring it back. (Those of the accepting side are the data path's:
    /// [`crate::comm::datapath::status::Status::keep`].)
    pub attempt: Option<Attempt>,
}

/// New queue pairs on their way into use.
pub enum Attempt {
    /// The peer was asked for its own.
    Asked(Box<Asked>),
    /// They are connected, and a trial write is under way on each.
    Trying(Box<Trying>),
}

/// New queue pairs, with what they are to be connected by.
pub struct Asked {
    /// The queue pairs, not connected.
    pub lane: Lane,
    /// The rail as it was when they were made.
    pub look: Look,
}

/// New queue pairs that are tested.
pub struct Trying {
    /// The queue pairs.
    pub lane: Lane,
    /// The path that they go by.
    pub path: PathId,
    /// A test write that is not confirmed by then gets lost.
    pub until: Instant,
    /// The right to try the path, where it was dead before.
    pub trial: Option<Trial>,
}

impl ManagedRail {
    /// Of a lane of a connection that comes up, with so many queue pairs there, now or later.
    pub fn of(lane: &Lane, queue_count: usize) -> Self {
        let (rail, peer_rail) = (Arc::clone(&lane.rail), lane.peer_rail.clone());
        let opening = lane.is_open().then_some(lane.opening());
        // Nothing is granted yet, and what will be has the keys of the devices that are there.
        let granted = opening.or_else(|| rail.device.opened().ok().map(|(_, opening)| opening));
        // Where it does not carry, that was the first attempt.
        let answers = u32::from(opening.is_none());
        let outages = Outages::of(&lane.record);
        Self { rail, peer_rail, outages, queue_count, opening, granted, answers, paths: [None; 2], attempt: None }
    }

    /// An attempt goes by a path.
    pub fn goes_by(&mut self, path: PathId) {
        self.paths = [Some(path), self.paths[0]];
    }

    /// The rail and its state, for messages.
    pub fn text(&self, state: Option<&State>) -> String {
        let text = match state {
            Some(State::Up { .. }) => "up",
            Some(State::Fencing { .. } | State::Fenced { .. }) => "lost, not acknowledged by the peer",
            Some(State::Down { .. }) | None => "lost",
            Some(State::Opening | State::Requested { .. } | State::Connecting) => "reconnecting",
            Some(State::Probing { .. } | State::Answering | State::AwaitingLive) => "under test",
        };
        format!("{} to {}: {text}", self.rail.name(), self.peer_rail)
    }
}
