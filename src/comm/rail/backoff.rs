//! Back-off for unreachable paths: what all connections of this process know of them, so that they do not find it out one after the
//! other.
//!
//! To connect a queue pair the kernel looks for the peer's address, and where nothing answers (the ports are up, the way between them is
//! dead) that takes it a second, in which the service thread looks after no connection at all. So a way that did not answer is left
//! alone for a while, whichever connection asks for it; and between two such seconds every connection is looked after.

use super::Rail;
use crate::error::{Error, Result};
use crate::wire::ids::RailId;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long the kernel looks for an address (`rdma_addr_find_l2_eth_by_grh` gives up after so long).
const SEARCH: Duration = Duration::from_secs(1);
/// How long a way is left alone at first: behind a switch a port that has just come up may not be heard for a moment. Each search in vain
/// doubles it.
const FIRST: Duration = Duration::from_secs(2);
/// At most it is so many searches times the ways that do not answer: together they get a tenth of the service thread's time in the end,
/// however many connections ask.
const REST: u32 = 10;
/// But not longer than this, in which a way that answers again is to be found out. (More than six such ways get more than a tenth.)
const MOST: Duration = Duration::from_secs(60);
/// Ways that are kept in mind: more than a host has. (The addresses are the peers' word.)
const WAYS: usize = 256;

/// The ways on which nobody answered. For the service thread only: it locks.
#[derive(Debug, Default)]
pub struct Backoff(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    ways: Vec<Way>,
    /// Somebody was looked for in vain since all connections were looked after.
    is_spent: bool,
}

#[derive(Debug)]
struct Way {
    rail: RailId,
    peer_gid: [u8; 16],
    /// Searches in vain, one after the other.
    vain: u32,
    until: Instant,
    why: String,
}

impl Backoff {
    /// All connections have been looked after since the last search.
    pub fn begin_round(&self) {
        self.known().is_spent = false;
    }

    /// Whether queue pairs may be connected to an address now.
    ///
    /// # Errors
    /// [`Error::Network`] says why not, and when it is tried again.
    pub fn check(&self, rail: &Rail, peer_gid: [u8; 16], now: Instant) -> Result<()> {
        let mut known = self.known();
        // Nobody has asked for it for long.
        known.ways.retain(|way| now < way.until + MOST);
        if let Some(way) = known.ways.iter().find(|way| way.is(rail.id, peer_gid) && now < way.until) {
            let (why, left) = (&way.why, way.until.saturating_duration_since(now));
            return Err(Error::Network(format!("{why}; next attempt in {left:.0?}")));
        }
        if known.is_spent {
            return Err(Error::Network("another path just timed out; the other connections go first".to_owned()));
        }
        Ok(())
    }

    /// Queue pairs were connected, or not, which counts here if that is because nobody answered.
    pub fn note(&self, rail: &Rail, peer_gid: [u8; 16], outcome: &Result<()>, now: Instant) {
        let mut known = self.known();
        let at = known.ways.iter().position(|way| way.is(rail.id, peer_gid));
        let before = at.map(|at| known.ways.swap_remove(at));
        // What else goes wrong goes wrong at once. (`EHOSTUNREACH` is the same in the words of the neighbour table.)
        let Err(error @ Error::Os { errno: libc::ETIMEDOUT | libc::EHOSTUNREACH, .. }) = outcome else { return };
        known.is_spent = true;
        let vain = before.map_or(0, |way| way.vain + 1);
        if known.ways.len() >= WAYS {
            known.ways.swap_remove(0);
        }
        let most = (SEARCH * REST).saturating_mul(known.ways.len() as u32 + 1).min(MOST);
        let rest = (FIRST * (1 << vain.min(8))).min(most);
        known.ways.push(Way { rail: rail.id, peer_gid, vain, until: now + rest, why: error.to_string() });
    }

    /// Whether the last search for an address was in vain, and not long ago.
    pub fn knows(&self, rail: &Rail, peer_gid: [u8; 16]) -> bool {
        self.known().ways.iter().any(|way| way.is(rail.id, peer_gid))
    }

    /// A rail's port has come up: what was found of the ways from there is over.
    pub fn forget(&self, rail: &Rail) {
        self.known().ways.retain(|way| way.rail != rail.id);
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // A panic in a holder leaves a list of ways, whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Way {
    fn is(&self, rail: RailId, peer_gid: [u8; 16]) -> bool {
        (self.rail, self.peer_gid) == (rail, peer_gid)
    }
}
