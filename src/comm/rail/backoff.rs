//! Back-off for unreachable paths: what all connections of this process know of them, so that they do not find it out one after the
//! other.
//!
//! To connect a queue pair the kernel looks for the peer's address, and where nothing answers (the ports are up, the path between them is
//! dead) that takes it a second, in which the service thread looks after no connection at all. So a path that did not answer is left
//! alone for a while, whichever connection asks for it; and between two such seconds every connection is looked after.

use super::Rail;
use crate::error::{Error, Result};
use crate::wire::ids::RailId;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long the kernel looks for an address (`rdma_addr_find_l2_eth_by_grh` gives up after so long).
const SEARCH: Duration = Duration::from_secs(1);
/// How long a path is left alone at first: behind a switch a port that has just come up may not be heard for a moment. Each failed search
/// doubles it.
const FIRST: Duration = Duration::from_secs(2);
/// At most it is so many searches times the paths that do not answer: together they get a tenth of the service thread's time in the end,
/// however many connections ask.
const REST: u32 = 10;
/// But not longer than this, in which a path that answers again is to be found out. (More than six such paths get more than a tenth.)
const MOST: Duration = Duration::from_secs(60);
/// Paths that are kept in mind: more than a host has. (The addresses are the peers' word.)
const MOST_PATHS: usize = 256;

/// The unreachable paths. For the service thread only: it locks.
#[derive(Debug, Default)]
pub struct Backoff(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    paths: Vec<Unreachable>,
    /// Somebody was looked for in vain since all connections were looked after.
    is_spent: bool,
}

#[derive(Debug)]
struct Unreachable {
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
        known.paths.retain(|path| now < path.until + MOST);
        if let Some(path) = known.paths.iter().find(|path| path.is(rail.id, peer_gid) && now < path.until) {
            let (why, left) = (&path.why, path.until.saturating_duration_since(now));
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
        let at = known.paths.iter().position(|path| path.is(rail.id, peer_gid));
        let before = at.map(|at| known.paths.swap_remove(at));
        // What else goes wrong goes wrong at once. (`EHOSTUNREACH` is the same in the words of the neighbour table.)
        let Err(error @ Error::Os { errno: libc::ETIMEDOUT | libc::EHOSTUNREACH, .. }) = outcome else { return };
        known.is_spent = true;
        let vain = before.map_or(0, |path| path.vain + 1);
        if known.paths.len() >= MOST_PATHS {
            known.paths.swap_remove(0);
        }
        let most = (SEARCH * REST).saturating_mul(known.paths.len() as u32 + 1).min(MOST);
        let rest = (FIRST * (1 << vain.min(8))).min(most);
        known.paths.push(Unreachable { rail: rail.id, peer_gid, vain, until: now + rest, why: error.to_string() });
    }

    /// Whether the last search for an address was in vain, and not long ago.
    pub fn knows(&self, rail: &Rail, peer_gid: [u8; 16]) -> bool {
        self.known().paths.iter().any(|path| path.is(rail.id, peer_gid))
    }

    /// A rail's port has come up: what was found of the paths from there is over.
    pub fn forget(&self, rail: &Rail) {
        self.known().paths.retain(|path| path.rail != rail.id);
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // A panic in a holder leaves a list of paths, whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Unreachable {
    fn is(&self, rail: RailId, peer_gid: [u8; 16]) -> bool {
        (self.rail, self.peer_gid) == (rail, peer_gid)
    }
}
