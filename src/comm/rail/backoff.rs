//! Back-off for dead paths: what all connections of this process know of paths, so that they do not find it out one after the other.
//!
//! A path leads from one rail of this host to one address of a peer. With both ports up it can be dead in two ways: nobody answers at
//! the address, for which the kernel looks for a second within `ibv_modify_qp`; or the address resolves and what is sent is not
//! acknowledged. What an attempt finds counts for every connection, those that are being made (`comm/setup`) and those that ask for a lost
//! rail (`comm/recovery`), in either role:
//!
//! - A dead path is left alone for a while, with the reason of the attempt that found it dead. Each attempt in vain doubles that while.
//! - After that, one connection tries it for all. So it is too where connections are made over a path of which nothing is known: one has
//!   the [`Trial`], and the others wait ([`Advice::Wait`]): they ask again, and no call blocks. A trial ends when it is dropped, for
//!   whatever reason, or when its time is up, so that nobody waits for a connection that was abandoned.
//! - A path that carries, or a port that comes up ([`Backoff::forget`]), ends all this.
//!
//! A path that carries small packets alone has a largest path MTU, which counts for every connection until the port comes up again.
//!
//! It only records what its callers report: it touches no queue pair, starts no thread, and reads no clock.

use super::Rail;
use crate::error::{Error, Result};
use crate::wire::ids::RailId;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long the kernel looks for an address: `rdma_addr_find_l2_eth_by_grh` passes 1000 ms to `rdma_resolve_ip`
/// (drivers/infiniband/core/addr.c).
pub const SEARCH: Duration = Duration::from_secs(1);
/// How long a path is left alone at first: behind a switch a port that has just come up may not be heard for a moment. Each attempt in
/// vain doubles it.
const FIRST: Duration = Duration::from_secs(2);
/// At most it is so many searches times the dead paths: together they get a tenth of the service thread's time in the end, however many
/// connections ask.
const REST: u32 = 10;
/// But not longer than this, in which a path that works again is to be found out. (More than six such paths get more than a tenth.)
const MOST: Duration = Duration::from_secs(60);
/// For how long an attempt that went well says that the next one will not block: the kernel keeps a neighbour that has answered for no less
/// than 15 s (half of `base_reachable_time`, 30 s: net/core/neighbour.c, `neigh_rand_reach_time`), and uses it for longer.
const FRESH: Duration = Duration::from_secs(10);
/// Paths that are kept in mind: more than a host has. (The addresses are the peers' word.)
const MOST_PATHS: usize = 256;

/// A path: from one rail of this host to an address of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathId {
    /// This host's rail.
    pub rail: RailId,
    /// The peer's address.
    pub peer_gid: [u8; 16],
}

/// What a connection that is being made has to know of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// That the peer's address resolves: the connecting side's, which connects its queue pairs and no more.
    Address,
    /// That a test write is acknowledged: the accepting side's.
    Acknowledgement,
}

/// What a connection that is being made does about a path.
#[derive(Debug)]
pub enum Advice {
    /// Uses it: nothing speaks against it.
    Use,
    /// Tries it, for all connections.
    Try(Trial),
    /// Asks again later: another connection tries it.
    Wait,
    /// Leaves it out for now, for this reason: recovery brings it back.
    LeaveOut(String),
}

/// How a path is dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Death {
    /// Nobody answers at the address.
    Unresolved,
    /// What is sent is not acknowledged.
    Silent,
}

/// What was found out about a path.
#[derive(Debug)]
enum Finding {
    Nothing,
    /// The address resolved then.
    Resolved(Instant),
    /// A test write was acknowledged then.
    Carried(Instant),
    Dead(Dead),
}

#[derive(Debug)]
struct Dead {
    how: Death,
    /// Attempts in vain before the last one, one after the other.
    vain: u32,
    until: Instant,
    why: String,
}

#[derive(Debug)]
struct Path {
    id: PathId,
    finding: Finding,
    /// Largest path MTU in bytes, where larger packets were seen to get lost.
    largest_mtu: Option<u32>,
    /// The number of the trial that is under way, and when it is over at the latest.
    trial: Option<(u64, Instant)>,
}

#[derive(Debug, Default)]
struct Known {
    paths: Vec<Path>,
    trials: u64,
    /// The service thread has looked for somebody in vain since all connections were looked after.
    is_spent: bool,
}

/// What all connections know of paths. It locks: for what sets connections up and for the service thread, never for a message.
#[derive(Debug, Default)]
pub struct Backoff(Arc<Mutex<Known>>);

/// The right of one connection to try a path while the others wait. They stop waiting when it is dropped.
#[derive(Debug)]
pub struct Trial {
    known: Arc<Mutex<Known>>,
    id: PathId,
    number: u64,
}

impl Backoff {
    /// What a connection that is being made, with path MTU `mtu_bytes`, does about a path; if it tries it, within `limit`.
    pub fn ask(&self, id: PathId, need: Need, mtu_bytes: u32, limit: Duration, now: Instant) -> Advice {
        let mut known = lock(&self.0);
        let path = known.path(id, now);
        if let Some(largest) = path.largest_mtu.filter(|largest| *largest < mtu_bytes) {
            return Advice::LeaveOut(format!("packets above {largest} bytes get lost on the way"));
        }
        match &path.finding {
            Finding::Dead(dead) if now < dead.until => return Advice::LeaveOut(dead.text(now)),
            Finding::Carried(at) if now < *at + FRESH => return Advice::Use,
            Finding::Resolved(at) if need == Need::Address && now < *at + FRESH => return Advice::Use,
            _ => {}
        }
        if path.is_tried(now) {
            return Advice::Wait;
        }
        Advice::Try(self.begin(&mut known, id, limit, now))
    }

    /// Why a path is to be left out of a connection that is being made, if it is.
    pub fn dead(&self, id: PathId, now: Instant) -> Option<String> {
        lock(&self.0).dead(id).filter(|dead| now < dead.until).map(|dead| dead.text(now))
    }

    /// Whether a lost rail is to be asked for by this path now.
    ///
    /// # Errors
    /// [`Error::Network`] says why not, and when it is tried again.
    pub fn is_due(&self, id: PathId, now: Instant) -> Result<()> {
        let known = lock(&self.0);
        match known.paths.iter().find(|path| path.id == id) {
            Some(Path { finding: Finding::Dead(dead), .. }) if now < dead.until => Err(Error::Network(dead.text(now))),
            Some(path) if path.is_suspect() && path.is_tried(now) => {
                Err(Error::Network("another connection tests this path".to_owned()))
            }
            _ => Ok(()),
        }
    }

    /// The same for the service thread, which may have to wait for the kernel: not twice before all connections were looked after.
    ///
    /// # Errors
    /// As [`Self::is_due`].
    pub fn check(&self, id: PathId, now: Instant) -> Result<()> {
        self.is_due(id, now)?;
        if lock(&self.0).is_spent {
            return Err(Error::Network("another path just timed out; the other connections go first".to_owned()));
        }
        Ok(())
    }

    /// The same; where the path was dead until now, with the right to try it for all. (Where it was not, all lost rails return at once.)
    ///
    /// # Errors
    /// As [`Self::is_due`].
    pub fn retry(&self, id: PathId, limit: Duration, now: Instant) -> Result<Option<Trial>> {
        self.check(id, now)?;
        let mut known = lock(&self.0);
        let is_suspect = known.path(id, now).is_suspect();
        Ok(is_suspect.then(|| self.begin(&mut known, id, limit, now)))
    }

    /// All connections have been looked after since the service thread last looked for an address in vain.
    pub fn begin_round(&self) {
        lock(&self.0).is_spent = false;
    }

    /// The service thread has connected queue pairs, or not; if nobody answered, it has lost a second by that.
    pub fn spend(&self, id: PathId, outcome: &Result<()>, now: Instant) {
        let mut known = lock(&self.0);
        if known.connected(id, outcome, now) {
            known.is_spent = true;
        }
    }

    /// Queue pairs were connected, or not, which counts here if that is because nobody answered.
    pub fn connected(&self, id: PathId, outcome: &Result<()>, now: Instant) {
        lock(&self.0).connected(id, outcome, now);
    }

    /// A test write was acknowledged.
    pub fn carried(&self, id: PathId, now: Instant) {
        lock(&self.0).path(id, now).finding = Finding::Carried(now);
    }

    /// A test write was not acknowledged: `why`, for a message.
    pub fn silent(&self, id: PathId, why: &str, now: Instant) {
        lock(&self.0).died(id, Death::Silent, why.to_owned(), now);
    }

    /// Packets above `bytes` get lost on a path, and others arrive.
    pub fn set_largest_mtu(&self, id: PathId, bytes: u32, now: Instant) {
        let mut known = lock(&self.0);
        let path = known.path(id, now);
        // The small packets were acknowledged, so the path is not dead.
        (path.largest_mtu, path.finding) = (Some(bytes), Finding::Resolved(now));
    }

    /// Largest path MTU in bytes of a path, where larger packets were seen to get lost.
    pub fn largest_mtu(&self, id: PathId) -> Option<u32> {
        lock(&self.0).paths.iter().find(|path| path.id == id)?.largest_mtu
    }

    /// Whether the last attempt was in vain, and not long ago.
    pub fn knows(&self, id: PathId) -> bool {
        lock(&self.0).dead(id).is_some()
    }

    /// A rail's port has come up: what was found of the paths from there is over.
    pub fn forget(&self, rail: &Rail) {
        lock(&self.0).paths.retain(|path| path.id.rail != rail.id);
    }

    fn begin(&self, known: &mut Known, id: PathId, limit: Duration, now: Instant) -> Trial {
        known.trials += 1;
        let number = known.trials;
        known.path(id, now).trial = Some((number, now + limit));
        Trial { known: Arc::clone(&self.0), id, number }
    }
}

impl Trial {
    /// As [`Backoff::connected`], unless the port has come up since the trial began. Who only wants to know the address goes on from here.
    pub fn connected(&self, outcome: &Result<()>, now: Instant) {
        let mut known = lock(&self.known);
        if known.paths.iter().any(|path| path.trial.is_some_and(|(number, _)| number == self.number)) {
            known.connected(self.id, outcome, now);
        }
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        let mut known = lock(&self.known);
        let own = known.paths.iter_mut().filter(|path| path.trial.is_some_and(|(number, _)| number == self.number));
        own.for_each(|path| path.trial = None);
    }
}

impl Known {
    /// A path, which is new to this if nobody has asked for it for long.
    fn path(&mut self, id: PathId, now: Instant) -> &mut Path {
        self.paths.retain(|path| path.id == id || path.is_worth_keeping(now));
        let at = self.paths.iter().position(|path| path.id == id).unwrap_or_else(|| {
            if self.paths.len() >= MOST_PATHS {
                self.paths.swap_remove(0);
            }
            self.paths.push(Path { id, finding: Finding::Nothing, largest_mtu: None, trial: None });
            self.paths.len() - 1
        });
        &mut self.paths[at]
    }

    fn dead(&self, id: PathId) -> Option<&Dead> {
        self.paths.iter().filter(|path| path.id == id).find_map(Path::death)
    }

    /// Whether nobody answered.
    fn connected(&mut self, id: PathId, outcome: &Result<()>, now: Instant) -> bool {
        match outcome {
            Ok(()) => {
                let path = self.path(id, now);
                match &path.finding {
                    // It has resolved before too.
                    Finding::Dead(Dead { how: Death::Silent, .. }) => {}
                    Finding::Carried(at) if now < *at + FRESH => {}
                    _ => path.finding = Finding::Resolved(now),
                }
                false
            }
            // (`EHOSTUNREACH` is the same in the words of the neighbour table.)
            Err(error @ Error::Os { errno: libc::ETIMEDOUT | libc::EHOSTUNREACH, .. }) => {
                self.died(id, Death::Unresolved, error.to_string(), now);
                true
            }
            // What else goes wrong goes wrong at once, and is not the path's.
            Err(_) => false,
        }
    }

    fn died(&mut self, id: PathId, how: Death, why: String, now: Instant) {
        let others = self.paths.iter().filter(|path| path.id != id && path.is_suspect()).count() as u32;
        let path = self.path(id, now);
        let vain = match &path.finding {
            // Another connection that was under way at the same time has found out the same.
            Finding::Dead(dead) if now < dead.until => return,
            Finding::Dead(dead) => dead.vain + 1,
            _ => 0,
        };
        let most = (SEARCH * REST).saturating_mul(others + 1).min(MOST);
        let rest = (FIRST * (1 << vain.min(8))).min(most);
        path.finding = Finding::Dead(Dead { how, vain, until: now + rest, why });
    }
}

impl Path {
    fn death(&self) -> Option<&Dead> {
        if let Finding::Dead(dead) = &self.finding { Some(dead) } else { None }
    }

    /// Whether the last attempt was in vain.
    fn is_suspect(&self) -> bool {
        self.death().is_some()
    }

    fn is_tried(&self, now: Instant) -> bool {
        self.trial.is_some_and(|(_, until)| now < until)
    }

    fn is_worth_keeping(&self, now: Instant) -> bool {
        let has_news = match &self.finding {
            Finding::Nothing => false,
            Finding::Resolved(at) | Finding::Carried(at) => now < *at + FRESH,
            Finding::Dead(dead) => now < dead.until + MOST,
        };
        has_news || self.largest_mtu.is_some() || self.is_tried(now)
    }
}

impl Dead {
    fn text(&self, now: Instant) -> String {
        let left = self.until.saturating_duration_since(now);
        format!("{}; next attempt in {left:.0?}", self.why)
    }
}

fn lock(known: &Mutex<Known>) -> MutexGuard<'_, Known> {
    // A panic in a holder leaves a list of paths, whole.
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
