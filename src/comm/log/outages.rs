//! One log line for the loss of a rail, whatever the number of connections that lose it.
//!
//! NCCL opens many connections to a peer over the same rails (two for each channel), and a pulled cable affects all of them. There is
//! one thing to do about it, so one line says it.
//!
//! [`Outages`] promises, for each pair of a rail of this host and a rail of a peer's host:
//! - The first connection that loses it writes a WARN. The others of the same outage write DEBUG lines.
//! - The last one that has it back writes the WARN that ends it. Written by the first, it would be untrue for the others, and
//!   a connection that never has it back would show nowhere.
//! - Where some have it back and others do not, a WARN says so [`SETTLED`] after the last recovery. A loss after that is a new
//!   outage, with a WARN of its own.
//! - A connection that has failed, that was closed, or whose peer is gone is not waited for.
//!
//! Called while connections are made and by the service thread, never while messages go well. It locks.

use crate::wire::ids::LaneId;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long after the last recovery other connections may be without the rail before a line says so: longer than an attempt takes
/// whose peer does not answer.
pub const SETTLED: Duration = Duration::from_secs(15);

/// The rail outages that connections of this process have now.
#[derive(Debug, Default)]
pub struct Outages {
    open: Mutex<Vec<Outage>>,
    members: AtomicU64,
}

/// A rail of this host and the peer's rail that it is paired with, on any process of the peer's host.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Path {
    rail: String,
    peer_host: String,
    peer_rail: String,
}

#[derive(Debug)]
struct Outage {
    path: Path,
    /// As the connection names it that lost the rail first.
    peer: String,
    since: Instant,
    /// The connections that lost the rail and do not have it back.
    without: Vec<u64>,
    recovered: Vec<u64>,
    last_recovery: Instant,
    /// A line has said that only some have it back.
    is_settled: bool,
}

/// One connection's part in the outages of its rails.
#[derive(Debug)]
pub struct Member {
    outages: Arc<Outages>,
    id: u64,
    peer: String,
    paths: Vec<Path>,
    /// How long it may be without any rail before it fails.
    loss_timeout: Duration,
    is_without_one: bool,
}

impl Outages {
    /// Says where only some connections have a rail back.
    pub fn tick(&self, now: Instant) {
        for outage in self.lock().iter_mut() {
            let is_over_for_some = !outage.recovered.is_empty() && !outage.is_settled;
            if is_over_for_some && now.saturating_duration_since(outage.last_recovery) >= SETTLED {
                outage.is_settled = true;
                let Outage { path: Path { rail, peer_rail, .. }, peer, without, recovered, .. } = &*outage;
                let (back, all, left) = (recovered.len(), recovered.len() + without.len(), without.len());
                tracing::warn!(
                    "rail {rail} to {peer} recovered for {back} of {all} connections (peer rail {peer_rail}); {left} still retrying"
                );
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Outage>> {
        // A panic in a holder leaves a list of outages, each whole.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Outage {
    fn new(path: Path, peer: String, connection: u64, now: Instant) -> Self {
        let (recovered, is_settled) = Default::default();
        Self { path, peer, since: now, without: vec![connection], recovered, last_recovery: now, is_settled }
    }

    /// One more connection loses the rail; whether that is a new outage.
    fn lost_by(&mut self, connection: u64, now: Instant) -> bool {
        self.recovered.retain(|other| *other != connection);
        if !self.without.contains(&connection) {
            self.without.push(connection);
        }
        let is_new = std::mem::take(&mut self.is_settled);
        if is_new {
            self.since = now;
            self.recovered.clear();
        }
        is_new
    }

    /// Takes a connection off those without the rail; whether it was among them.
    fn forget(&mut self, connection: u64) -> bool {
        let before = self.without.len();
        self.without.retain(|other| *other != connection);
        self.without.len() < before
    }

    fn seconds(&self) -> f64 {
        self.last_recovery.saturating_duration_since(self.since).as_secs_f64()
    }
}

impl Member {
    /// A connection with `peer` over these pairs of rails, this host's first.
    pub fn new(
        outages: &Arc<Outages>,
        peer: &str,
        loss_timeout: Duration,
        rails: impl Iterator<Item = (String, String)>,
    ) -> Self {
        // A process is named by its host and number.
        let host = peer.rsplit_once(':').map_or(peer, |(host, _)| host);
        let path = |(rail, peer_rail)| Path { rail, peer_host: host.to_owned(), peer_rail };
        let (paths, peer) = (rails.map(path).collect(), peer.to_owned());
        let id = outages.members.fetch_add(1, Ordering::Relaxed);
        Self { outages: Arc::clone(outages), id, peer, paths, loss_timeout, is_without_one: false }
    }

    /// The connection has lost a rail. `next` says what is done about it.
    pub fn lost(&mut self, lane: LaneId, why: &str, next: &str, now: Instant) {
        let Some(path) = self.paths.get(lane.index()) else { return };
        self.is_without_one = true;
        let mut open = self.outages.lock();
        let is_new = match open.iter_mut().find(|outage| outage.path == *path) {
            Some(outage) => outage.lost_by(self.id, now),
            None => {
                open.push(Outage::new(path.clone(), self.peer.clone(), self.id, now));
                true
            }
        };
        let (left, of) = (self.in_use(&open), self.paths.len());
        drop(open);
        let (Path { rail, peer_rail, .. }, peer) = (path, &self.peer);
        if !is_new {
            tracing::debug!("rail {rail} to {peer} lost by one more connection: {why}");
            return;
        }
        let left = match left {
            0 => format!("no rail remains, connections fail in {} s", self.loss_timeout.as_secs()),
            1 => format!("1 of {of} rails remains"),
            _ => format!("{left} of {of} rails remain"),
        };
        tracing::warn!("rail {rail} to {peer} lost: {why} (peer rail {peer_rail}); {left}; {next}");
    }

    /// The connection came up without a rail, and a line has said so.
    pub fn begins_without(&mut self, lane: LaneId, now: Instant) {
        let Some(path) = self.paths.get(lane.index()) else { return };
        self.is_without_one = true;
        let mut open = self.outages.lock();
        match open.iter_mut().find(|outage| outage.path == *path) {
            Some(outage) => _ = outage.lost_by(self.id, now),
            None => open.push(Outage::new(path.clone(), self.peer.clone(), self.id, now)),
        }
    }

    /// The connection has a lost rail back.
    pub fn recovered(&mut self, lane: LaneId, now: Instant) {
        let Some(path) = self.paths.get(lane.index()) else { return };
        let mut open = self.outages.lock();
        let Some(at) = open.iter().position(|outage| outage.path == *path) else { return };
        let outage = &mut open[at];
        if !outage.forget(self.id) {
            return;
        }
        outage.recovered.push(self.id);
        outage.last_recovery = now;
        let (Path { rail, peer_rail, .. }, left) = (path, outage.without.len());
        if left > 0 {
            tracing::debug!("rail {rail} to {} recovered by one connection; {left} without it", self.peer);
            return;
        }
        let outage = open.swap_remove(at);
        let (in_use, of) = (self.in_use(&open), self.paths.len());
        drop(open);
        let (peer, seconds) = (&outage.peer, outage.seconds());
        tracing::warn!(
            "rail {rail} to {peer} recovered after {seconds:.1} s (peer rail {peer_rail}); {in_use} of {of} rails in use"
        );
    }

    /// The connection uses no rail any more: it has failed or was closed, or its peer is gone.
    pub fn ended(&mut self) {
        if !std::mem::take(&mut self.is_without_one) {
            return;
        }
        let mut over = Vec::new();
        let mut open = self.outages.lock();
        for outage in std::mem::take(&mut *open).into_iter().map(|mut outage| (outage.forget(self.id), outage)) {
            match outage {
                (true, outage) if outage.without.is_empty() => over.push(outage),
                (_, outage) => open.push(outage),
            }
        }
        drop(open);
        for outage in over.iter().filter(|outage| !outage.recovered.is_empty()) {
            let (Path { rail, peer_rail, .. }, peer, seconds) = (&outage.path, &outage.peer, outage.seconds());
            tracing::warn!(
                "rail {rail} to {peer} recovered after {seconds:.1} s (peer rail {peer_rail}); the connections still without it are closed"
            );
        }
    }

    /// Number of rails that this connection has not lost. An outage of other connections alone does
    /// not count.
    fn in_use(&self, open: &[Outage]) -> usize {
        let is_lost = |path: &Path| open.iter().any(|one| one.path == *path && one.without.contains(&self.id));
        self.paths.iter().filter(|path| !is_lost(path)).count()
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.ended();
    }
}
