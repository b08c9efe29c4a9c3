//! Back-off for dead paths: findings about paths, shared by all connections of this process.
//!
//! A path leads from one rail of this host to one address of a peer. It can be dead although both
//! ports are up. Either the address does not resolve, which the kernel finds after a second in
//! `ibv_modify_qp`; or it resolves, but packets are not acknowledged. The result of one
//! connection's attempt counts for all connections of this process that use the path. It counts for
//! new connections (`comm/setup`) and for lost rails (`comm/recovery`), whether this host is the
//! connecting side or the accepting side:
//!
//! - A dead path is not used during a pause. Each failed attempt doubles the pause. Messages give
//!   the reason why the attempt failed.
//! - After the pause, one connection gets a [`Trial`]: it tries the path on behalf of all. The
//!   others ask again later ([`Advice::Wait`]), so that no call blocks. If nothing is known about a
//!   path, one of its new connections also gets a trial, and the others wait. A trial ends when it
//!   is dropped or at its time limit, so an abandoned connection delays no other.
//! - The back-off ends when an attempt succeeds, or when the port comes up or its device returns
//!   ([`Backoff::forget`]).
//!
//! If a path carries only small packets, a largest path MTU is kept for the path until the
//! port comes up or its device returns.
//!
//! This module only records reports. It touches no queue pair, starts no thread, reads no clock.

use super::Rail;
use crate::comm::threads::lock;
use host::error::{Error, Network, Result};
use proto::time::Instant;
use proto::wire::ids::RailId;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Time that the kernel searches for an address: `rdma_addr_find_l2_eth_by_grh` passes 1000 ms to
/// `rdma_resolve_ip` (drivers/infiniband/core/addr.c).
pub const SEARCH: Duration = Duration::from_secs(1);
/// First pause for a dead path. It is short: a switch may not forward frames for a moment after a
/// port came up.
const FIRST: Duration = Duration::from_secs(2);
/// Longest pause for a dead path, and so the time to detect that it works again. An attempt costs a
/// second of a thread, or some packets.
const LONGEST: Duration = Duration::from_secs(15);
/// Time after a successful attempt during which another attempt will not block. A neighbour that
/// has answered counts as reachable in the kernel for at least 15 s (half of `base_reachable_time`,
/// 30 s: `neigh_rand_reach_time` in net/core/neighbour.c). The kernel uses its address for longer.
const FRESH: Duration = Duration::from_secs(10);
/// Largest number of paths that are kept. A host has fewer paths, but a faulty peer may send any
/// number of addresses.
const MOST_PATHS: usize = 256;

/// A path from one rail of this host to an address of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathId {
    /// This host's rail.
    pub rail: RailId,
    /// The peer's address.
    pub peer_gid: [u8; 16],
}

/// What a new connection must know about a path before it uses the path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requirement {
    /// The peer's address resolves. The connecting side needs only this.
    Address,
    /// A test write is acknowledged. The accepting side needs this.
    Acknowledgement,
}

/// Advice for a new connection about a path.
#[derive(Debug)]
pub enum Advice {
    /// Use the path.
    Use,
    /// Try the path, on behalf of all connections.
    Try(Trial),
    /// Ask again later, because another connection tries the path.
    Wait,
    /// Leave the path out for now, for this reason. Recovery tries the path later.
    LeaveOut(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Death {
    /// The address does not resolve.
    Unresolved,
    /// Packets are not acknowledged.
    Silent,
}

#[derive(Debug)]
enum Finding {
    Nothing,
    Resolved(Instant),
    Carried(Instant),
    Dead(Dead),
}

#[derive(Debug)]
struct Dead {
    how: Death,
    /// Failed attempts in a row before the last one.
    failed: u32,
    until: Instant,
    why: String,
}

#[derive(Debug)]
struct KnownPath {
    id: PathId,
    finding: Finding,
    /// Largest path MTU in bytes, if larger packets were lost.
    largest_mtu: Option<u32>,
    /// Number and end time of the trial under way.
    trial: Option<(u64, Instant)>,
}

#[derive(Debug, Default)]
struct KnownPaths {
    paths: Vec<KnownPath>,
    trials: u64,
}

/// Findings about paths. Each call takes a lock, so only set-up and the service thread use them.
#[derive(Debug, Default)]
pub struct Backoff(Arc<Mutex<KnownPaths>>);

/// Right of one connection to try a path while the others wait. It ends on drop.
#[derive(Debug)]
pub struct Trial {
    known: Arc<Mutex<KnownPaths>>,
    id: PathId,
    number: u64,
}

impl Backoff {
    /// Advises a new connection with path MTU `mtu_bytes` about a path. A trial ends after `limit`.
    pub fn ask(
        &self,
        id: PathId,
        need: Requirement,
        mtu_bytes: u32,
        limit: Duration,
        now: Instant,
    ) -> Advice {
        let mut known = lock(&self.0);
        let path = known.path(id, now);
        if let Some(largest) = path.largest_mtu.filter(|largest| *largest < mtu_bytes) {
            return Advice::LeaveOut(format!(
                "packets above {largest} bytes are lost on this path"
            ));
        }
        match &path.finding {
            Finding::Dead(dead) if now < dead.until => return Advice::LeaveOut(dead.text(now)),
            Finding::Carried(at) if now < *at + FRESH => return Advice::Use,
            Finding::Resolved(at) if need == Requirement::Address && now < *at + FRESH => {
                return Advice::Use;
            }
            _ => {}
        }
        if path.is_tried(now) {
            return Advice::Wait;
        }
        Advice::Try(self.begin(&mut known, id, limit, now))
    }

    /// Returns the reason why a path is dead, during the pause in which it is not used. Returns
    /// `None` at other times.
    pub fn dead(&self, id: PathId, now: Instant) -> Option<String> {
        lock(&self.0)
            .dead(id)
            .filter(|dead| now < dead.until)
            .map(|dead| dead.text(now))
    }

    /// Checks that an attempt to reconnect a lost rail may use this path now.
    ///
    /// # Errors
    /// [`Error::Network`] with the reason against it; for a dead path, also the time until the next
    /// attempt.
    pub fn is_due(&self, id: PathId, now: Instant) -> Result<()> {
        lock(&self.0).is_due(id, now)
    }

    /// Checks a path as [`Self::is_due`] does. If the path was dead, returns the right to try it on
    /// behalf of all connections. Otherwise returns `None`, because nobody needs that right: over a
    /// path that is not dead, all lost rails may reconnect at the same time.
    pub fn retry(&self, id: PathId, limit: Duration, now: Instant) -> Result<Option<Trial>> {
        let mut known = lock(&self.0);
        known.is_due(id, now)?;
        let is_suspect = known.path(id, now).is_suspect();
        Ok(is_suspect.then(|| self.begin(&mut known, id, limit, now)))
    }

    /// Records that queue pairs were connected over a path, or failed to connect with `error`. Only
    /// an error that shows an unresolved address counts against the path.
    pub fn connected(&self, id: PathId, error: Option<&Error>, now: Instant) {
        lock(&self.0).connected(id, error, now);
    }

    /// Records that a test write was acknowledged.
    pub fn carried(&self, id: PathId, now: Instant) {
        lock(&self.0).path(id, now).finding = Finding::Carried(now);
    }

    /// Records that a test write was not acknowledged. `why` is for messages.
    pub fn silent(&self, id: PathId, why: &str, now: Instant) {
        lock(&self.0).died(id, Death::Silent, why.to_owned(), now);
    }

    /// Records that packets above `bytes` get lost on a path, and smaller ones arrive.
    pub fn set_largest_mtu(&self, id: PathId, bytes: u32, now: Instant) {
        let mut known = lock(&self.0);
        let path = known.path(id, now);
        // The small packets were acknowledged, so the path is not dead.
        (path.largest_mtu, path.finding) = (Some(bytes), Finding::Resolved(now));
    }

    /// Returns a path's largest path MTU in bytes; `None` if larger packets were not lost.
    pub fn largest_mtu(&self, id: PathId) -> Option<u32> {
        lock(&self.0)
            .paths
            .iter()
            .find(|path| path.id == id)?
            .largest_mtu
    }

    /// Forgets the findings about a rail's paths, because the rail's port has come up or its device
    /// has returned.
    pub fn forget(&self, rail: &Rail) {
        lock(&self.0).paths.retain(|path| path.id.rail != rail.id);
    }

    fn begin(&self, known: &mut KnownPaths, id: PathId, limit: Duration, now: Instant) -> Trial {
        known.trials += 1;
        let number = known.trials;
        known.path(id, now).trial = Some((number, now + limit));
        Trial {
            known: Arc::clone(&self.0),
            id,
            number,
        }
    }
}

impl Trial {
    /// Records a result as [`Backoff::connected`] does, unless the trial has ended already, for
    /// example because the port has come up since it began.
    pub fn connected(&self, error: Option<&Error>, now: Instant) {
        let mut known = lock(&self.known);
        if known
            .paths
            .iter()
            .any(|path| path.trial.is_some_and(|(number, _)| number == self.number))
        {
            known.connected(self.id, error, now);
        }
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        let mut known = lock(&self.known);
        let own = known
            .paths
            .iter_mut()
            .filter(|path| path.trial.is_some_and(|(number, _)| number == self.number));
        own.for_each(|path| path.trial = None);
    }
}

impl KnownPaths {
    /// Returns a path's entry, which may be new. Also drops the other entries that are out of date.
    fn path(&mut self, id: PathId, now: Instant) -> &mut KnownPath {
        self.paths
            .retain(|path| path.id == id || path.is_worth_keeping(now));
        let at = self
            .paths
            .iter()
            .position(|path| path.id == id)
            .unwrap_or_else(|| {
                if self.paths.len() >= MOST_PATHS {
                    self.paths.swap_remove(0);
                }
                self.paths.push(KnownPath {
                    id,
                    finding: Finding::Nothing,
                    largest_mtu: None,
                    trial: None,
                });
                self.paths.len() - 1
            });
        &mut self.paths[at]
    }

    fn is_due(&self, id: PathId, now: Instant) -> Result<()> {
        match self.paths.iter().find(|path| path.id == id) {
            Some(KnownPath {
                finding: Finding::Dead(dead),
                ..
            }) if now < dead.until => Err(Network::DeadPath(dead.text(now)).into()),
            Some(path) if path.is_suspect() && path.is_tried(now) => {
                Err(Network::PathOnTrial.into())
            }
            _ => Ok(()),
        }
    }

    fn dead(&self, id: PathId) -> Option<&Dead> {
        self.paths
            .iter()
            .filter(|path| path.id == id)
            .find_map(KnownPath::death)
    }

    fn connected(&mut self, id: PathId, error: Option<&Error>, now: Instant) {
        match error {
            None => {
                let path = self.path(id, now);
                match &path.finding {
                    // The address of a silent path resolves too, so this success proves nothing.
                    Finding::Dead(Dead {
                        how: Death::Silent, ..
                    }) => {}
                    Finding::Carried(at) if now < *at + FRESH => {}
                    _ => path.finding = Finding::Resolved(now),
                }
            }
            // `ETIMEDOUT` is the kernel's error after its search for the address. `EHOSTUNREACH` is
            // the neighbour table's error for the same failure.
            Some(
                error @ Error::Os {
                    errno: libc::ETIMEDOUT | libc::EHOSTUNREACH,
                    ..
                },
            ) => {
                self.died(id, Death::Unresolved, error.to_string(), now);
            }
            // Other failures return immediately, and the path is not their cause.
            Some(_) => {}
        }
    }

    fn died(&mut self, id: PathId, how: Death, why: String, now: Instant) {
        let path = self.path(id, now);
        let failed = match &path.finding {
            // An attempt of another connection at the same time has already reported the dead path.
            Finding::Dead(dead) if now < dead.until => return,
            Finding::Dead(dead) => dead.failed + 1,
            _ => 0,
        };
        let rest = (FIRST * (1 << failed.min(8))).min(LONGEST);
        path.finding = Finding::Dead(Dead {
            how,
            failed,
            until: now + rest,
            why,
        });
    }
}

impl KnownPath {
    fn death(&self) -> Option<&Dead> {
        if let Finding::Dead(dead) = &self.finding {
            Some(dead)
        } else {
            None
        }
    }

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
            Finding::Dead(dead) => now < dead.until + 4 * LONGEST,
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

#[cfg(test)]
mod tests;
