//! One log line for the loss of a peer's bootstrap TCP connections and one for their return,
//! regardless of the number of connections.
//!
//! [`TcpOutages`] guarantees for each peer:
//! - Each loss writes a DEBUG line. The first connection that is without TCP for [`LASTING`] also
//!   writes an INFO line, on behalf of all connections. If TCP is redialled sooner, there are only
//!   DEBUG lines.
//! - After an INFO line about the loss, another INFO line reports the end of the outage, once all
//!   connections have had TCP for [`SETTLED`]. A loss within that time belongs to the same outage:
//!   connections may break in turn. If every connection ends without TCP, no line reports the end.
//! - Connections that have failed, were closed, or whose peer has ended do not delay these lines.
//!
//! Set-up creates a [`ConnectionTcpOutages`] for each connection. All other calls come from the
//! service thread, and each takes a lock.

use crate::comm::threads::lock;
use proto::time::Instant;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Time without TCP until an INFO line is written. If the peer closes TCP, the peer has two seconds
/// to show over a rail or a new TCP connection that it is alive; otherwise the connection fails.
/// `LASTING` is longer than these two seconds, so that a connection that fails because its peer has
/// ended writes no INFO line.
pub const LASTING: Duration = Duration::from_secs(3);
/// A line reports the end of an outage when all connections have had TCP again for this time. It is
/// longer than each of the first five pauses between attempts to dial.
pub const SETTLED: Duration = Duration::from_secs(5);

/// The present TCP outages of this process's connections, one for each peer.
#[derive(Debug, Default)]
pub struct TcpOutages {
    open: Mutex<Vec<TcpOutage>>,
    members: AtomicU64,
}

#[derive(Debug)]
struct TcpOutage {
    peer: String,
    since: Instant,
    without: Vec<Without>,
    last_return: Option<Instant>,
    was_logged: bool,
}

#[derive(Debug)]
struct Without {
    connection: u64,
    since: Instant,
    why: String,
}

/// One connection's entry in the TCP outage of its peer.
#[derive(Debug)]
pub struct ConnectionTcpOutages {
    outages: Arc<TcpOutages>,
    id: u64,
    peer: String,
}

impl TcpOutages {
    /// Logs the outages that have lasted for [`LASTING`], and the outages that have ended.
    pub fn tick(&self, now: Instant) {
        let mut open = lock(&self.open);
        open.iter_mut().for_each(|outage| outage.tick(now));
        open.retain(|outage| !outage.is_over(now));
    }
}

impl TcpOutage {
    fn new(peer: String, since: Instant) -> Self {
        let (without, last_return, was_logged) = Default::default();
        Self {
            peer,
            since,
            without,
            last_return,
            was_logged,
        }
    }

    fn tick(&mut self, now: Instant) {
        let has_lasted = |one: &&Without| now.saturating_duration_since(one.since) >= LASTING;
        if !self.was_logged
            && let Some(Without { why, .. }) = self.without.iter().find(has_lasted)
        {
            tracing::info!(
                "{why}; connections with {} continue over the rails",
                self.peer
            );
            self.was_logged = true;
        }
    }

    /// Returns true if the outage has ended. Logs the end, unless every connection has ended
    /// without TCP.
    fn is_over(&self, now: Instant) -> bool {
        let Some(last) = self.last_return else {
            return self.without.is_empty();
        };
        if !self.without.is_empty() || now.saturating_duration_since(last) < SETTLED {
            return false;
        }
        self.end(last);
        true
    }

    fn end(&self, last_return: Instant) {
        let peer = &self.peer;
        let seconds = last_return
            .saturating_duration_since(self.since)
            .as_secs_f64();
        if self.was_logged {
            tracing::info!("bootstrap connections with {peer} are back after {seconds:.1} s");
        } else {
            tracing::debug!(
                "bootstrap connections with {peer} were dialled again within {seconds:.1} s"
            );
        }
    }

    /// Removes a connection from `without`. Returns true if it was in this list.
    fn forget(&mut self, connection: u64) -> bool {
        let before = self.without.len();
        self.without.retain(|one| one.connection != connection);
        self.without.len() < before
    }
}

impl ConnectionTcpOutages {
    /// Adds a connection with `peer`.
    pub fn new(outages: &Arc<TcpOutages>, peer: &str) -> Self {
        let id = outages.members.fetch_add(1, Ordering::Relaxed);
        Self {
            outages: Arc::clone(outages),
            id,
            peer: peer.to_owned(),
        }
    }

    /// Records that the connection has lost TCP.
    pub fn lost(&mut self, why: &str, now: Instant) {
        tracing::debug!("{why}; a connection with {} is without TCP", self.peer);
        let mut open = lock(&self.outages.open);
        let at = open
            .iter()
            .position(|outage| outage.peer == self.peer)
            .unwrap_or_else(|| {
                open.push(TcpOutage::new(self.peer.clone(), now));
                open.len() - 1
            });
        let outage = &mut open[at];
        if !outage.without.iter().any(|one| one.connection == self.id) {
            outage.without.push(Without {
                connection: self.id,
                since: now,
                why: why.to_owned(),
            });
        }
    }

    /// Records that the connection has TCP again.
    pub fn returned(&mut self, now: Instant) {
        let mut open = lock(&self.outages.open);
        if let Some(outage) = open.iter_mut().find(|outage| outage.peer == self.peer)
            && outage.forget(self.id)
        {
            outage.last_return = Some(now);
            tracing::debug!(
                "{} connections with {} are without TCP",
                outage.without.len(),
                self.peer
            );
        }
    }

    /// Records that the connection has failed or was closed, or that its peer has ended.
    pub fn ended(&mut self) {
        let mut open = lock(&self.outages.open);
        open.iter_mut()
            .filter(|outage| outage.peer == self.peer)
            .for_each(|outage| _ = outage.forget(self.id));
    }
}

impl Drop for ConnectionTcpOutages {
    fn drop(&mut self) {
        self.ended();
        // The service thread may end with this connection. Then no later `tick` logs the end.
        let mut open = lock(&self.outages.open);
        let is_over = |outage: &TcpOutage| outage.peer == self.peer && outage.without.is_empty();
        open.iter()
            .filter(|outage| is_over(outage))
            .filter_map(|outage| Some((outage, outage.last_return?)))
            .for_each(|(outage, last)| outage.end(last));
        open.retain(|outage| !is_over(outage));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    const SECOND: Duration = Duration::from_secs(1);

    /// Returns the number of connections without TCP in a peer's outage, and true if the outage was
    /// logged.
    fn open(outages: &TcpOutages, peer: &str) -> Option<(usize, bool)> {
        let open = lock(&outages.open);
        open.iter()
            .find(|outage| outage.peer == peer)
            .map(|outage| (outage.without.len(), outage.was_logged))
    }

    #[test]
    fn an_outage_ends_after_the_last_open_connection_has_tcp_again() {
        let outages = Arc::new(TcpOutages::default());
        let mut members: Vec<ConnectionTcpOutages> = (0..3)
            .map(|_| ConnectionTcpOutages::new(&outages, "a:1"))
            .collect();
        let mut other = ConnectionTcpOutages::new(&outages, "b:1");
        let now = clock::now();
        members
            .iter_mut()
            .for_each(|member| member.lost("away", now));
        members[0].lost("away", now + SECOND);
        other.lost("away", now + SECOND);
        outages.tick(now + LASTING);
        assert_eq!(
            (open(&outages, "a:1"), open(&outages, "b:1")),
            (Some((3, true)), Some((1, false)))
        );
        let now = now + LASTING;
        members[1].returned(now);
        members[1].returned(now);
        assert_eq!(open(&outages, "a:1"), Some((2, true)));
        members[0].ended();
        members[2].ended();
        // Not over yet: another connection may still break.
        outages.tick(now + SETTLED - SECOND);
        assert_eq!(open(&outages, "a:1"), Some((0, true)));
        outages.tick(now + SETTLED);
        assert_eq!(
            (open(&outages, "a:1"), open(&outages, "b:1")),
            (None, Some((1, true)))
        );
        drop(other);
        assert!(lock(&outages.open).is_empty());
        members[0].lost("away", now);
        members[0].returned(now);
        assert_eq!(open(&outages, "a:1"), Some((0, false)));
        drop(members);
        assert!(lock(&outages.open).is_empty());
    }

    #[test]
    fn connections_that_break_one_after_another_have_one_outage() {
        let outages = Arc::new(TcpOutages::default());
        let mut members: Vec<ConnectionTcpOutages> = (0..100)
            .map(|_| ConnectionTcpOutages::new(&outages, "a:1"))
            .collect();
        let (mut now, since) = (clock::now(), clock::now());
        for (at, member) in members.iter_mut().enumerate() {
            member.lost("away", now);
            // One connection is without TCP for long enough to be logged.
            now += if at == 50 { LASTING } else { SECOND / 10 };
            outages.tick(now);
            member.returned(now);
            outages.tick(now + SECOND);
            assert_eq!(open(&outages, "a:1"), Some((0, at >= 50)), "{at}");
            now += SECOND;
        }
        assert!(lock(&outages.open)[0].since <= since + SECOND);
    }
}
