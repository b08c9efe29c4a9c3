//! One log line for a stall, regardless of the number of connections with the peer that stall.
//!
//! [`Stalls`] guarantees for each peer:
//! - One WARN names the greatest [`Cause`] of all connections, which is the cause that tells most.
//!   This WARN is written once the time [`SETTLED`] has passed since the first report of a stall.
//!   NCCL opens many connections to a peer, and they stall together.
//! - A further WARN follows if the greatest cause changes, and for each new stall. At least
//!   `NCCL_SPARK_STALL_WARN_S` passes between two WARNs.
//!
//! Set-up creates a [`ConnectionStall`] for each connection. All other calls come from the service
//! thread, and each takes a lock.

use crate::comm::threads::lock;
use crate::error::StallCause;
use crate::flow::stall::Cause;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Time for other connections to report their causes. The service thread samples each data path
/// twice in this time.
pub const SETTLED: Duration = Duration::from_secs(1);

/// The present stalls of this process's connections.
#[derive(Debug, Default)]
pub struct Stalls {
    peers: Mutex<Vec<PeerStalls>>,
    members: AtomicU64,
}

#[derive(Debug)]
struct PeerStalls {
    peer: String,
    stalled: Vec<Stalled>,
    due: Instant,
    /// Cause that the last line about the present stall has named; `None` before the first line.
    logged: Option<Cause>,
}

#[derive(Debug)]
struct Stalled {
    connection: u64,
    cause: Cause,
    why: StallCause,
    since: Instant,
}

/// One connection's entry in the stalls of its peer.
#[derive(Debug)]
pub struct ConnectionStall {
    stalls: Arc<Stalls>,
    id: u64,
    peer: String,
    is_stalled: bool,
}

impl Stalls {
    /// Writes the lines that are due. `window` is the shortest time between two lines about a peer.
    /// `losses` returns a text about lost packets, with which each line ends.
    pub fn tick(&self, window: Duration, now: Instant, losses: impl Fn() -> String) {
        let mut peers = lock(&self.peers);
        // A peer without a stall is kept while its last line is recent.
        peers.retain(|of| !of.stalled.is_empty() || now < of.due);
        for PeerStalls { peer, stalled, due, logged } in peers.iter_mut().filter(|of| now >= of.due) {
            let Some(worst) = stalled.iter().max_by_key(|one| one.cause) else { continue };
            if *logged != Some(worst.cause) {
                (*logged, *due) = (Some(worst.cause), now + window);
                let (waited, why) = (now.saturating_duration_since(worst.since), &worst.why);
                let connections = match stalled.len() {
                    1 => "1 connection".to_owned(),
                    count => format!("{count} connections"),
                };
                tracing::warn!("no progress with {peer} for {waited:.0?} on {connections}: {why}{}", losses());
            }
        }
    }
}

impl ConnectionStall {
    /// Adds a connection with `peer`.
    pub fn new(stalls: &Arc<Stalls>, peer: &str) -> Self {
        let id = stalls.members.fetch_add(1, Ordering::Relaxed);
        Self { stalls: Arc::clone(stalls), id, peer: peer.to_owned(), is_stalled: false }
    }

    /// Records the cause of a stall that has lasted since `since`.
    pub fn stalled(&mut self, cause: Cause, why: StallCause, since: Instant, now: Instant) {
        self.is_stalled = true;
        let mut peers = lock(&self.stalls.peers);
        let at = peers.iter().position(|of| of.peer == self.peer).unwrap_or_else(|| {
            peers.push(PeerStalls { peer: self.peer.clone(), stalled: Vec::new(), due: now, logged: None });
            peers.len() - 1
        });
        let of = &mut peers[at];
        if of.stalled.is_empty() {
            (of.due, of.logged) = (of.due.max(now + SETTLED), None);
        }
        of.stalled.retain(|one| one.connection != self.id);
        of.stalled.push(Stalled { connection: self.id, cause, why, since });
    }

    /// Records that the connection no longer stalls, or that it has ended.
    pub fn ended(&mut self) {
        if std::mem::take(&mut self.is_stalled) {
            let mut peers = lock(&self.stalls.peers);
            let stalled = peers.iter_mut().filter(|of| of.peer == self.peer).map(|of| &mut of.stalled);
            stalled.for_each(|stalled| stalled.retain(|one| one.connection != self.id));
        }
    }
}

impl Drop for ConnectionStall {
    fn drop(&mut self) {
        self.ended();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_secs(60);
    const SECOND: Duration = Duration::from_secs(1);

    fn logged(stalls: &Stalls) -> Vec<(usize, Option<Cause>)> {
        lock(&stalls.peers).iter().map(|of| (of.stalled.len(), of.logged)).collect()
    }

    #[test]
    fn the_greatest_cause_of_all_connections_is_logged_once() {
        let stalls = Arc::new(Stalls::default());
        let mut members: Vec<_> = (0..3).map(|_| ConnectionStall::new(&stalls, "a:1")).collect();
        let now = Instant::now();
        let why = || StallCause::NoAnswer { silent: SECOND, unacknowledged: String::new() };
        members[0].stalled(Cause::NotPosted, why(), now, now);
        stalls.tick(WINDOW, now, String::new);
        assert_eq!(logged(&stalls), [(1, None)], "other connections may know more");
        members[1].stalled(Cause::NotGranted, why(), now, now + SECOND / 2);
        stalls.tick(WINDOW, now + SECOND, String::new);
        assert_eq!(logged(&stalls), [(2, Some(Cause::NotGranted))]);
        // A greater cause waits until the window has passed.
        members[2].stalled(Cause::NoAnswer, why(), now, now + 2 * SECOND);
        stalls.tick(WINDOW, now + WINDOW, String::new);
        assert_eq!(logged(&stalls), [(3, Some(Cause::NotGranted))]);
        stalls.tick(WINDOW, now + WINDOW + SECOND, String::new);
        assert_eq!(logged(&stalls), [(3, Some(Cause::NoAnswer))]);
        members.iter_mut().for_each(ConnectionStall::ended);
        stalls.tick(WINDOW, now + WINDOW + 2 * SECOND, String::new);
        assert_eq!(logged(&stalls), [(0, Some(Cause::NoAnswer))], "the last line is recent");
        // A new stall waits for the end of the window, and is logged again.
        let now = now + WINDOW + 2 * SECOND;
        members[0].stalled(Cause::NoAnswer, why(), now, now);
        stalls.tick(WINDOW, now + 2 * SECOND, String::new);
        assert_eq!(logged(&stalls), [(1, None)]);
        stalls.tick(WINDOW, now + WINDOW, String::new);
        assert_eq!(logged(&stalls), [(1, Some(Cause::NoAnswer))]);
        // The same cause is not logged again, so the next line's time stays.
        let due = || lock(&stalls.peers)[0].due;
        let before = due();
        stalls.tick(WINDOW, now + 2 * WINDOW, String::new);
        assert_eq!(due(), before);
        drop(members);
        stalls.tick(WINDOW, now + 3 * WINDOW, String::new);
        assert!(logged(&stalls).is_empty());
    }
}
