//! Back-off for dead paths: findings about paths, shared by all connections of a process.
//!
//! A path leads from one rail of this host to one address of a peer. It can be dead although both
//! ports are up. Either the address does not resolve, which the kernel finds after a second in
//! `ibv_modify_qp`; or it resolves, but packets are not acknowledged. The result of one
//! connection's attempt counts for all connections of the process that use the path. It counts for
//! new connections (`src/comm/setup`) and for lost rails (`src/comm/recovery`), whether this host
//! is the connecting side or the accepting side:
//!
//! - A dead path is not used during a pause. Each failed attempt doubles the pause.
//! - After the pause, one connection gets a trial: it tries the path on behalf of all. The others
//!   ask again later ([`Advice::Wait`]), so that no call blocks. If nothing is known about a path,
//!   one of its new connections also gets a trial, and the others wait. A trial ends by
//!   [`KnownPaths::end_trial`] or at its time limit, so an abandoned connection delays no other.
//! - The back-off ends when an attempt succeeds, or when the port comes up or its device returns
//!   ([`KnownPaths::forget`]).
//!
//! If a path carries only small packets, a largest path MTU is kept for the path until the
//! port comes up or its device returns.
//!
//! `W` is the caller's reason why an attempt failed; it comes back in a [`Refusal`].

use crate::time::Instant;
use crate::wire::ids::RailId;
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

/// Knowledge that a new connection needs before it uses a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requirement {
    /// The peer's address resolves. The connecting side needs only this.
    Address,
    /// A test write is acknowledged. The accepting side needs this.
    Acknowledgement,
}

/// Advice for a new connection about a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Advice<W> {
    /// Use the path.
    Use,
    /// Try the path, on behalf of all connections. Holds the trial's number.
    Try(u64),
    /// Ask again later, because another connection tries the path.
    Wait,
    /// Leave the path out for now. Recovery tries the path later.
    LeaveOut(Refusal<W>),
}

/// Reason why a path may not be used now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal<W> {
    /// Packets above this number of bytes are lost.
    LosesAbove(u32),
    /// The last attempt failed.
    Dead {
        /// Reason of the failure.
        why: W,
        /// Time until the next attempt.
        left: Duration,
    },
    /// Another connection tries the path.
    OnTrial,
}

/// Result of connecting queue pairs over a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Connected<W> {
    /// The address resolves.
    Resolved,
    /// The address does not resolve.
    Unresolved(W),
    /// Another failure, which is not the path's.
    Failed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Death {
    /// The address does not resolve.
    Unresolved,
    /// Packets are not acknowledged.
    Silent,
}

#[derive(Debug)]
enum Finding<W> {
    Nothing,
    Resolved(Instant),
    Carried(Instant),
    Dead(Dead<W>),
}

#[derive(Debug)]
struct Dead<W> {
    how: Death,
    /// Failed attempts in a row before the last one.
    failed: u32,
    until: Instant,
    why: W,
}

#[derive(Debug)]
struct KnownPath<W> {
    id: PathId,
    finding: Finding<W>,
    /// Largest path MTU in bytes, if larger packets were lost.
    largest_mtu: Option<u32>,
    /// Number and end time of the trial under way.
    trial: Option<(u64, Instant)>,
}

/// Findings about paths.
#[derive(Debug)]
pub struct KnownPaths<W> {
    paths: Vec<KnownPath<W>>,
    /// Number of the last trial.
    trials: u64,
}

impl<W> Default for KnownPaths<W> {
    fn default() -> Self {
        Self {
            paths: Vec::new(),
            trials: 0,
        }
    }
}

impl<W: Clone> KnownPaths<W> {
    /// Advises a new connection with path MTU `mtu_bytes` about a path. A trial ends after `limit`.
    pub fn ask(
        &mut self,
        id: PathId,
        need: Requirement,
        mtu_bytes: u32,
        limit: Duration,
        now: Instant,
    ) -> Advice<W> {
        let path = self.path(id, now);
        if let Some(largest) = path.largest_mtu.filter(|largest| *largest < mtu_bytes) {
            return Advice::LeaveOut(Refusal::LosesAbove(largest));
        }
        match &path.finding {
            Finding::Dead(dead) if now < dead.until => return Advice::LeaveOut(dead.refusal(now)),
            Finding::Carried(at) if now < *at + FRESH => return Advice::Use,
            Finding::Resolved(at) if need == Requirement::Address && now < *at + FRESH => {
                return Advice::Use;
            }
            _ => {}
        }
        if path.is_tried(now) {
            return Advice::Wait;
        }
        Advice::Try(self.begin_trial(id, limit, now))
    }

    /// Returns the reason why a path is dead, during the pause in which it is not used. Returns
    /// `None` at other times.
    pub fn dead(&self, id: PathId, now: Instant) -> Option<Refusal<W>> {
        let dead = self.known(id)?.death()?;
        (now < dead.until).then(|| dead.refusal(now))
    }

    /// Checks that an attempt to reconnect a lost rail may use this path now.
    ///
    /// # Errors
    /// The reason against it.
    pub fn is_due(&self, id: PathId, now: Instant) -> Result<(), Refusal<W>> {
        if let Some(refusal) = self.dead(id, now) {
            return Err(refusal);
        }
        match self.known(id) {
            Some(path) if path.death().is_some() && path.is_tried(now) => Err(Refusal::OnTrial),
            _ => Ok(()),
        }
    }

    /// Checks a path as [`Self::is_due`] does. If the path was dead, begins a trial and returns its
    /// number. Otherwise returns `None`, because no trial is needed: over a path that is not dead,
    /// all lost rails may reconnect at the same time.
    ///
    /// # Errors
    /// The reason against it.
    pub fn retry(
        &mut self,
        id: PathId,
        limit: Duration,
        now: Instant,
    ) -> Result<Option<u64>, Refusal<W>> {
        self.is_due(id, now)?;
        let is_suspect = self.path(id, now).death().is_some();
        Ok(is_suspect.then(|| self.begin_trial(id, limit, now)))
    }

    /// Records the result of connecting queue pairs over a path.
    pub fn connected(&mut self, id: PathId, result: Connected<W>, now: Instant) {
        match result {
            Connected::Resolved => {
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
            Connected::Unresolved(why) => self.died(id, Death::Unresolved, why, now),
            Connected::Failed => {}
        }
    }

    /// Records a result as [`Self::connected`] does, unless the trial has ended already, for
    /// example because the port has come up since it began.
    pub fn tried(&mut self, id: PathId, trial: u64, result: Connected<W>, now: Instant) {
        if self.paths.iter().any(|path| path.is_in_trial(trial)) {
            self.connected(id, result, now);
        }
    }

    /// Ends a trial, if it has not ended already.
    pub fn end_trial(&mut self, trial: u64) {
        let own = self.paths.iter_mut().filter(|path| path.is_in_trial(trial));
        own.for_each(|path| path.trial = None);
    }

    /// Records that a test write was acknowledged.
    pub fn carried(&mut self, id: PathId, now: Instant) {
        self.path(id, now).finding = Finding::Carried(now);
    }

    /// Records that a test write was not acknowledged.
    pub fn silent(&mut self, id: PathId, why: W, now: Instant) {
        self.died(id, Death::Silent, why, now);
    }

    /// Records that packets above `bytes` get lost on a path, and smaller ones arrive.
    pub fn set_largest_mtu(&mut self, id: PathId, bytes: u32, now: Instant) {
        let path = self.path(id, now);
        // The small packets were acknowledged, so the path is not dead.
        path.largest_mtu = Some(bytes);
        path.finding = Finding::Resolved(now);
    }

    /// Returns a path's largest path MTU in bytes; `None` if larger packets were not lost.
    pub fn largest_mtu(&self, id: PathId) -> Option<u32> {
        self.known(id)?.largest_mtu
    }

    /// Forgets the findings about a rail's paths, because the rail's port has come up or its device
    /// has returned.
    pub fn forget(&mut self, rail: RailId) {
        self.paths.retain(|path| path.id.rail != rail);
    }

    fn begin_trial(&mut self, id: PathId, limit: Duration, now: Instant) -> u64 {
        self.trials += 1;
        let number = self.trials;
        self.path(id, now).trial = Some((number, now + limit));
        number
    }

    fn known(&self, id: PathId) -> Option<&KnownPath<W>> {
        self.paths.iter().find(|path| path.id == id)
    }

    /// Returns a path's entry, which may be new. Also drops the other entries that are out of date.
    fn path(&mut self, id: PathId, now: Instant) -> &mut KnownPath<W> {
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

    fn died(&mut self, id: PathId, how: Death, why: W, now: Instant) {
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

impl<W> KnownPath<W> {
    fn death(&self) -> Option<&Dead<W>> {
        if let Finding::Dead(dead) = &self.finding {
            Some(dead)
        } else {
            None
        }
    }

    fn is_in_trial(&self, trial: u64) -> bool {
        self.trial.is_some_and(|(number, _)| number == trial)
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

impl<W: Clone> Dead<W> {
    fn refusal(&self, now: Instant) -> Refusal<W> {
        Refusal::Dead {
            why: self.why.clone(),
            left: self.until.saturating_duration_since(now),
        }
    }
}

#[cfg(test)]
mod tests;
