//! A rail of a connection, under watch: its state, with what each state owns.

use super::lane::Lane;
use super::rail::{Look, Rail};
use super::work::WorkId;
use crate::verbs::CompletionBuffer;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How soon the sending side asks whether a lost rail carries again. (A port that comes up is asked for at once.) Each attempt in vain
/// doubles it, up to so many times; a rail that has carried for long begins anew.
const RETRY: Duration = Duration::from_millis(500);
const DOUBLED_AT_MOST: u32 = 2;

/// A rail under watch.
pub struct Ward {
    /// This host's rail.
    pub rail: Arc<Rail>,
    /// The peer's, for messages.
    pub peer_rail: String,
    /// Queue pairs of the connection on it.
    pub queue_count: usize,
    /// Where it stands.
    pub phase: Phase,
    /// Losses and attempts in vain since it last carried for long.
    pub tries: u32,
    /// Since when it carries, or did.
    pub carries_since: Instant,
}

impl Ward {
    /// As it is when both sides have stopped it, or an attempt was in vain.
    pub fn down(&self, now: Instant) -> Phase {
        Phase::Down { retry: now + self.pause() }
    }

    /// How long to wait before the next attempt.
    pub fn pause(&self) -> Duration {
        RETRY * (1 << self.tries.min(DOUBLED_AT_MOST))
    }

    /// The rail and its state, for messages.
    pub fn text(&self) -> String {
        let stands = match self.phase {
            Phase::Live => "up",
            Phase::Fenced(_) => "lost, not acknowledged by the peer",
            Phase::Down { .. } => "lost",
            Phase::Asking(..) => "reconnecting",
            Phase::Trying(..) | Phase::Answered => "under test",
        };
        format!("{} to {}: {stands}", self.rail.name(), self.peer_rail)
    }

    /// Of a lane that carries.
    pub fn of(lane: &Lane) -> Self {
        Self {
            rail: Arc::clone(&lane.rail),
            peer_rail: lane.peer_rail.clone(),
            queue_count: lane.queue_count(),
            phase: Phase::Live,
            tries: 0,
            carries_since: Instant::now(),
        }
    }
}

/// Where a rail of a connection stands.
pub enum Phase {
    /// It carries.
    Live,
    /// This side has stopped it and said so; the other side has not answered, since then.
    Fenced(Instant),
    /// Both sides have. Sending side: when to ask for it again.
    Down {
        /// From then on.
        retry: Instant,
    },
    /// Sending side: has asked, with these queue pairs, and waits until then.
    Asking(Box<Asked>, Instant),
    /// Sending side: these queue pairs are connected, and tried until then.
    Trying(Box<Lane>, Instant),
    /// Receiving side: has connected new queue pairs, which the data path keeps ([`super::health::Health::keep`]); the sending side
    /// tries them. They are not used before it says that they carry, and not looked at: what it sends before that is heard waits
    /// in them.
    Answered,
}

/// New queue pairs, with what they are to be connected by.
pub struct Asked {
    /// The queue pairs, not connected.
    pub lane: Lane,
    /// The rail as it was when they were made.
    pub look: Look,
}

/// Whether the trial writes on new queue pairs have been confirmed.
///
/// # Errors
/// Why the trial has failed.
pub fn look_at_trial(lane: &mut Lane) -> std::result::Result<bool, String> {
    let mut buffer = CompletionBuffer::new();
    for completion in lane.poll(&mut buffer).map_err(|error| error.to_string())? {
        if completion.status() != 0 {
            return Err(format!("test write failed: {}", completion.status_text()));
        }
        lane.retire(WorkId::of(completion.wr_id()));
    }
    Ok(!lane.has_pending())
}
