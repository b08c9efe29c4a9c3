//! One log line for the loss of a rail, regardless of the number of connections that lose it.
//!
//! NCCL opens many connections to a peer over the same rails (two for each channel), and a pulled
//! cable affects all of them. The user has one problem to solve, so there is one line.
//!
//! [`RailOutages`] guarantees for each pair of a rail of this host and a rail of a peer's host:
//! - The first connection that loses the rail writes a WARN. The others write DEBUG lines.
//! - The last connection that recovers the rail writes the WARN that ends the outage. A WARN of the
//!   first connection that recovers would be untrue for the others, and would hide a connection
//!   that never recovers.
//! - If only some connections recover the rail, a WARN says how many, once the time [`SETTLED`] has
//!   passed since the last recovery. A later loss is a new outage, with a WARN of its own.
//! - Connections that have failed, were closed, or whose peer has ended do not delay these lines.
//! - While the peer's process may have ended, a connection holds its lines about lost rails back.
//!   If the peer has ended, the rails are not the cause, and the lines are dropped.
//!
//! Each call takes a lock. The callers are set-up and the service thread, never the data path.

use super::ATTENTION;
use crate::comm::threads::lock;
use proto::time::Instant;
use proto::wire::ids::LaneId;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Time after the last recovery until a line reports the connections that still lack the rail. This
/// time is longer than an attempt to reconnect takes if the peer does not answer.
pub const SETTLED: Duration = Duration::from_secs(15);

/// The present rail outages of this process's connections.
#[derive(Debug, Default)]
pub struct RailOutages {
    open: Mutex<Vec<Outage>>,
    members: AtomicU64,
}

/// A rail of this host, and the rail of the peer's host that it is paired with. Connections to
/// different processes of the peer's host have the same pair.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RailPair {
    rail: String,
    peer_host: String,
    peer_rail: String,
}

#[derive(Debug)]
struct Outage {
    path: RailPair,
    peer: String,
    since: Instant,
    without: Vec<u64>,
    recovered: Vec<u64>,
    last_recovery: Instant,
    logged: Logged,
}

/// The last WARN about an outage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Logged {
    /// There was no WARN: a connection began without the rail, and none has lost it since.
    Nothing,
    Loss,
    /// Only some connections have recovered the rail.
    PartialRecovery,
}

/// One connection's entries in the outages of its rails.
#[derive(Debug)]
pub struct ConnectionOutages {
    outages: Arc<RailOutages>,
    id: u64,
    peer: String,
    paths: Vec<RailPair>,
    /// Time without any rail until the connection fails.
    loss_timeout: Duration,
    is_without_one: bool,
    held_back: Vec<Loss>,
    /// Lanes of rails that have never had a link and an address.
    late: Vec<LaneId>,
}

/// A loss that is not recorded yet, because the peer's process may have ended.
#[derive(Debug)]
struct Loss {
    lane: LaneId,
    why: String,
    next: String,
    at: Instant,
}

impl RailOutages {
    /// Logs outages that only some connections have recovered from.
    pub fn tick(&self, now: Instant) {
        for outage in lock(&self.open).iter_mut() {
            let is_over_for_some =
                !outage.recovered.is_empty() && outage.logged != Logged::PartialRecovery;
            if is_over_for_some && now.saturating_duration_since(outage.last_recovery) >= SETTLED {
                outage.logged = Logged::PartialRecovery;
                let Outage {
                    path:
                        RailPair {
                            rail, peer_rail, ..
                        },
                    peer,
                    without,
                    recovered,
                    ..
                } = &*outage;
                let back = recovered.len();
                let all = recovered.len() + without.len();
                let left = without.len();
                tracing::warn!(
                    target: ATTENTION,
                    "rail {rail} to {peer} recovered for {back} of {all} connections (peer rail {peer_rail}); {left} still retrying"
                );
            }
        }
    }
}

impl Outage {
    fn new(path: RailPair, peer: String, connection: u64, logged: Logged, now: Instant) -> Self {
        let without = vec![connection];
        let recovered = Vec::new();
        Self {
            path,
            peer,
            since: now,
            without,
            recovered,
            last_recovery: now,
            logged,
        }
    }

    /// Adds a connection that has lost the rail. Returns true if this is a new outage.
    fn lost_by(&mut self, connection: u64, now: Instant) -> bool {
        self.add(connection);
        let is_new = std::mem::replace(&mut self.logged, Logged::Loss) != Logged::Loss;
        if is_new {
            self.since = now;
            self.recovered.clear();
        }
        is_new
    }

    fn add(&mut self, connection: u64) {
        self.recovered.retain(|other| *other != connection);
        if !self.without.contains(&connection) {
            self.without.push(connection);
        }
    }

    /// Removes a connection from `without`. Returns true if it was in this list.
    fn forget(&mut self, connection: u64) -> bool {
        let before = self.without.len();
        self.without.retain(|other| *other != connection);
        self.without.len() < before
    }

    fn seconds(&self) -> f64 {
        self.last_recovery
            .saturating_duration_since(self.since)
            .as_secs_f64()
    }
}

impl ConnectionOutages {
    /// Adds a connection with `peer`. `rails` has the names of each pair, this host's rail first.
    pub fn new(
        outages: &Arc<RailOutages>,
        peer: &str,
        loss_timeout: Duration,
        rails: impl Iterator<Item = (String, String)>,
    ) -> Self {
        // A peer's name is HOST:PID.
        let host = peer.rsplit_once(':').map_or(peer, |(host, _)| host);
        let path = |(rail, peer_rail)| RailPair {
            rail,
            peer_host: host.to_owned(),
            peer_rail,
        };
        let paths = rails.map(path).collect();
        let peer = peer.to_owned();
        let id = outages.members.fetch_add(1, Ordering::Relaxed);
        let outages = Arc::clone(outages);
        Self {
            outages,
            id,
            peer,
            paths,
            loss_timeout,
            is_without_one: false,
            held_back: Vec::new(),
            late: Vec::new(),
        }
    }

    /// Holds back the record of a loss until [`Self::peer_answers`] or [`Self::ended`]. The
    /// arguments are those of [`Self::lost`].
    pub fn hold_back(&mut self, lane: LaneId, why: String, next: String, now: Instant) {
        tracing::debug!(
            "lane {lane} of the connection with {} lost while its peer may have ended: {why}",
            self.peer
        );
        self.held_back.push(Loss {
            lane,
            why,
            next,
            at: now,
        });
    }

    /// Records the losses that were held back, because the peer's process has not ended.
    pub fn peer_answers(&mut self) {
        for Loss {
            lane,
            why,
            next,
            at,
        } in std::mem::take(&mut self.held_back)
        {
            self.lost(lane, &why, &next, at);
        }
    }

    /// Records the loss of a rail. `next` describes the next step for the log line.
    pub fn lost(&mut self, lane: LaneId, why: &str, next: &str, now: Instant) {
        let Some(path) = self.paths.get(lane.index()) else {
            return;
        };
        self.is_without_one = true;
        let mut open = lock(&self.outages.open);
        let is_new = match open.iter_mut().find(|outage| outage.path == *path) {
            Some(outage) => outage.lost_by(self.id, now),
            None => {
                open.push(Outage::new(
                    path.clone(),
                    self.peer.clone(),
                    self.id,
                    Logged::Loss,
                    now,
                ));
                true
            }
        };
        let left = self.in_use(&open);
        let of = self.paths.len() - self.late.len();
        drop(open);
        let (
            RailPair {
                rail, peer_rail, ..
            },
            peer,
        ) = (path, &self.peer);
        if !is_new {
            tracing::debug!("rail {rail} to {peer} lost by one more connection: {why}");
            return;
        }
        let is_last = left == 0;
        let left = match left {
            0 => format!(
                "no rail remains, connections fail in {} s",
                self.loss_timeout.as_secs()
            ),
            1 => format!("1 of {of} rails remains"),
            _ => format!("{left} of {of} rails remain"),
        };
        let text =
            format!("rail {rail} to {peer} lost: {why} (peer rail {peer_rail}); {left}; {next}");
        if is_last {
            tracing::warn!("{text}");
        } else {
            tracing::warn!(target: ATTENTION, "{text}");
        }
    }

    /// Records that the connection started without a rail. Set-up has already logged the reason.
    /// A late rail counts as one of the connection's rails only after it has come.
    pub fn begins_without(&mut self, lane: LaneId, is_late: bool, now: Instant) {
        if is_late {
            self.late.push(lane);
        }
        let Some(path) = self.paths.get(lane.index()) else {
            return;
        };
        self.is_without_one = true;
        let mut open = lock(&self.outages.open);
        match open.iter_mut().find(|outage| outage.path == *path) {
            Some(outage) => outage.add(self.id),
            None => open.push(Outage::new(
                path.clone(),
                self.peer.clone(),
                self.id,
                Logged::Nothing,
                now,
            )),
        }
    }

    /// Records that the connection has recovered a lost rail.
    pub fn recovered(&mut self, lane: LaneId, now: Instant) {
        self.held_back.retain(|loss| loss.lane != lane);
        self.late.retain(|late| *late != lane);
        let Some(path) = self.paths.get(lane.index()) else {
            return;
        };
        let mut open = lock(&self.outages.open);
        let Some(at) = open.iter().position(|outage| outage.path == *path) else {
            return;
        };
        let outage = &mut open[at];
        if !outage.forget(self.id) {
            return;
        }
        outage.recovered.push(self.id);
        outage.last_recovery = now;
        let (
            RailPair {
                rail, peer_rail, ..
            },
            left,
        ) = (path, outage.without.len());
        if left > 0 {
            tracing::debug!(
                "rail {rail} to {} recovered by one connection; {left} without it",
                self.peer
            );
            return;
        }
        let outage = open.swap_remove(at);
        let in_use = self.in_use(&open);
        let of = self.paths.len() - self.late.len();
        drop(open);
        let peer = &outage.peer;
        let seconds = outage.seconds();
        tracing::warn!(
            target: ATTENTION,
            "rail {rail} to {peer} recovered after {seconds:.1} s (peer rail {peer_rail}); {in_use} of {of} rails in use"
        );
    }

    /// Records that the connection has failed or was closed, or that its peer has ended.
    pub fn ended(&mut self) {
        self.held_back.clear();
        if !std::mem::take(&mut self.is_without_one) {
            return;
        }
        let mut over = Vec::new();
        let mut open = lock(&self.outages.open);
        for outage in std::mem::take(&mut *open)
            .into_iter()
            .map(|mut outage| (outage.forget(self.id), outage))
        {
            match outage {
                (true, outage) if outage.without.is_empty() => over.push(outage),
                (_, outage) => open.push(outage),
            }
        }
        drop(open);
        for outage in over.iter().filter(|outage| !outage.recovered.is_empty()) {
            let (
                RailPair {
                    rail, peer_rail, ..
                },
                peer,
                seconds,
            ) = (&outage.path, &outage.peer, outage.seconds());
            tracing::warn!(
                target: ATTENTION,
                "rail {rail} to {peer} recovered after {seconds:.1} s (peer rail {peer_rail}); the connections still without it are closed"
            );
        }
    }

    fn in_use(&self, open: &[Outage]) -> usize {
        let is_lost = |path: &RailPair| {
            open.iter()
                .any(|one| one.path == *path && one.without.contains(&self.id))
        };
        self.paths.iter().filter(|path| !is_lost(path)).count()
    }
}

impl Drop for ConnectionOutages {
    fn drop(&mut self) {
        self.ended();
    }
}
