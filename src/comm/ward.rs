//! A rail of a connection as its watch has it: what names it, and the queue pairs that are to bring it back.

use super::lane::Lane;
use super::rail::{Look, Rail};
use crate::flow::recovery::State;
use std::sync::Arc;

/// A rail under watch.
pub struct Ward {
    /// This host's rail.
    pub rail: Arc<Rail>,
    /// The peer's, for messages.
    pub peer_rail: String,
    /// Queue pairs of the connection on it.
    pub queue_count: usize,
    /// Connecting side: the new queue pairs of an attempt to bring it back. (Those of the accepting side are the data path's:
    /// [`super::health::Health::keep`].)
    pub attempt: Option<Attempt>,
}

/// New queue pairs on their way into use.
pub enum Attempt {
    /// The peer was asked for its own.
    Asked(Box<Asked>),
    /// They are connected, and a trial write is under way on each.
    Trying(Box<Lane>),
}

/// New queue pairs, with what they are to be connected by.
pub struct Asked {
    /// The queue pairs, not connected.
    pub lane: Lane,
    /// The rail as it was when they were made.
    pub look: Look,
}

impl Ward {
    /// Of a lane that carries.
    pub fn of(lane: &Lane) -> Self {
        let (rail, peer_rail, queue_count) = (Arc::clone(&lane.rail), lane.peer_rail.clone(), lane.queue_count());
        Self { rail, peer_rail, queue_count, attempt: None }
    }

    /// The rail and its state, for messages.
    pub fn text(&self, state: Option<&State>) -> String {
        let stands = match state {
            Some(State::Up { .. }) => "up",
            Some(State::Fencing { .. } | State::Fenced { .. }) => "lost, not acknowledged by the peer",
            Some(State::Down { .. }) | None => "lost",
            Some(State::Opening | State::Requested { .. } | State::Connecting) => "reconnecting",
            Some(State::Probing { .. } | State::Answering | State::AwaitingLive) => "under test",
        };
        format!("{} to {}: {stands}", self.rail.name(), self.peer_rail)
    }
}
