//! One log line for the loss of the bootstrap's TCP to a peer and one for its return, whatever the number of connections that lose it.
//!
//! [`TcpOutages`] promises, for each peer:
//! - The first connection that is without TCP for [`LASTING`] writes a line; the others of the same outage write DEBUG lines. What is
//!   dialled again sooner is DEBUG alone.
//! - Once no connection is without TCP, and none was for [`SETTLED`], a line ends an outage that had one. A loss before that belongs to the
//!   same outage: a network that breaks connections one after another is one event.
//! - A connection that has failed, that was closed, or whose peer is gone is not waited for.
//!
//! Called by the service thread alone. It locks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a connection is without TCP before a line says so: longer than a peer whose TCP was closed has to show that it is there, which is
/// how long it is not known whether connections continue.
pub const LASTING: Duration = Duration::from_secs(3);
/// How long all connections have TCP again before a line says so. Longer than the pauses between the attempts of the first ten seconds.
pub const SETTLED: Duration = Duration::from_secs(5);

/// The peers that connections of this process have no TCP with.
#[derive(Debug, Default)]
pub struct TcpOutages {
    open: Mutex<Vec<Outage>>,
    members: AtomicU64,
}

#[derive(Debug)]
struct Outage {
    peer: String,
    since: Instant,
    /// The connections without TCP.
    without: Vec<Without>,
    /// When one had it again last.
    last_return: Option<Instant>,
    /// Whether a line has said that it is lost.
    was_logged: bool,
}

#[derive(Debug)]
struct Without {
    connection: u64,
    since: Instant,
    why: String,
}

/// One connection's part in them.
#[derive(Debug)]
pub struct Member {
    outages: Arc<TcpOutages>,
    id: u64,
    peer: String,
}

impl TcpOutages {
    /// Says what has lasted, and what is over.
    pub fn tick(&self, now: Instant) {
        let mut open = self.lock();
        open.iter_mut().for_each(|outage| outage.tick(now));
        open.retain(|outage| !outage.is_over(now));
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Outage>> {
        // A panic in a holder leaves a list of outages, each whole.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Outage {
    fn new(peer: String, since: Instant) -> Self {
        let (without, last_return, was_logged) = Default::default();
        Self { peer, since, without, last_return, was_logged }
    }

    fn tick(&mut self, now: Instant) {
        let has_lasted = |one: &&Without| now.saturating_duration_since(one.since) >= LASTING;
        if !self.was_logged
            && let Some(Without { why, .. }) = self.without.iter().find(has_lasted)
        {
            tracing::info!("{why}; connections with {} continue over the rails", self.peer);
            self.was_logged = true;
        }
    }

    /// Whether it has ended; then the line that says so is written.
    fn is_over(&self, now: Instant) -> bool {
        let Some(last) = self.last_return else { return self.without.is_empty() };
        if !self.without.is_empty() || now.saturating_duration_since(last) < SETTLED {
            return false;
        }
        self.end(last);
        true
    }

    fn end(&self, last_return: Instant) {
        let (peer, seconds) = (&self.peer, last_return.saturating_duration_since(self.since).as_secs_f64());
        if self.was_logged {
            tracing::info!("bootstrap connections with {peer} are back after {seconds:.1} s");
        } else {
            tracing::debug!("bootstrap connections with {peer} were dialled again within {seconds:.1} s");
        }
    }

    /// Takes a connection off those without TCP; whether it was among them.
    fn forget(&mut self, connection: u64) -> bool {
        let before = self.without.len();
        self.without.retain(|one| one.connection != connection);
        self.without.len() < before
    }
}

impl Member {
    /// A connection with `peer`.
    pub fn new(outages: &Arc<TcpOutages>, peer: &str) -> Self {
        let id = outages.members.fetch_add(1, Ordering::Relaxed);
        Self { outages: Arc::clone(outages), id, peer: peer.to_owned() }
    }

    /// The connection has no TCP any more.
    pub fn lost(&mut self, why: &str, now: Instant) {
        tracing::debug!("{why}; a connection with {} is without TCP", self.peer);
        let mut open = self.outages.lock();
        let at = open.iter().position(|outage| outage.peer == self.peer).unwrap_or_else(|| {
            open.push(Outage::new(self.peer.clone(), now));
            open.len() - 1
        });
        let outage = &mut open[at];
        if !outage.without.iter().any(|one| one.connection == self.id) {
            outage.without.push(Without { connection: self.id, since: now, why: why.to_owned() });
        }
    }

    /// The connection has TCP again.
    pub fn returned(&mut self, now: Instant) {
        let mut open = self.outages.lock();
        if let Some(outage) = open.iter_mut().find(|outage| outage.peer == self.peer)
            && outage.forget(self.id)
        {
            outage.last_return = Some(now);
            tracing::debug!("{} connections with {} are without TCP", outage.without.len(), self.peer);
        }
    }

    /// The connection has no use for TCP any more: it has failed or was closed, or its peer is gone.
    pub fn ended(&mut self) {
        let mut open = self.outages.lock();
        open.iter_mut().filter(|outage| outage.peer == self.peer).for_each(|outage| _ = outage.forget(self.id));
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.ended();
        // The thread that would look again may end with this connection.
        let mut open = self.outages.lock();
        let is_over = |outage: &Outage| outage.peer == self.peer && outage.without.is_empty();
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

    const SECOND: Duration = Duration::from_secs(1);

    /// Of a peer's outage: how many are without TCP, and whether a line was written.
    fn open(outages: &TcpOutages, peer: &str) -> Option<(usize, bool)> {
        let open = outages.lock();
        open.iter().find(|outage| outage.peer == peer).map(|outage| (outage.without.len(), outage.was_logged))
    }

    #[test]
    fn an_outage_ends_some_time_after_the_last_connection_that_is_there_has_tcp_again() {
        let outages = Arc::new(TcpOutages::default());
        let mut members: Vec<Member> = (0..3).map(|_| Member::new(&outages, "a:1")).collect();
        let mut other = Member::new(&outages, "b:1");
        let now = Instant::now();
        members.iter_mut().for_each(|member| member.lost("away", now));
        members[0].lost("away", now + SECOND);
        other.lost("away", now + SECOND);
        outages.tick(now + LASTING);
        assert_eq!((open(&outages, "a:1"), open(&outages, "b:1")), (Some((3, true)), Some((1, false))));
        let now = now + LASTING;
        members[1].returned(now);
        members[1].returned(now);
        assert_eq!(open(&outages, "a:1"), Some((2, true)));
        members[0].ended();
        members[2].ended();
        // It may break once more.
        outages.tick(now + SETTLED - SECOND);
        assert_eq!(open(&outages, "a:1"), Some((0, true)));
        outages.tick(now + SETTLED);
        assert_eq!((open(&outages, "a:1"), open(&outages, "b:1")), (None, Some((1, true))));
        drop(other);
        assert!(outages.lock().is_empty());
        // The last one that goes takes with it what waits for its end.
        members[0].lost("away", now);
        members[0].returned(now);
        assert_eq!(open(&outages, "a:1"), Some((0, false)));
        drop(members);
        assert!(outages.lock().is_empty());
    }

    #[test]
    fn connections_that_break_one_after_another_have_one_outage() {
        let outages = Arc::new(TcpOutages::default());
        let mut members: Vec<Member> = (0..100).map(|_| Member::new(&outages, "a:1")).collect();
        let (mut now, since) = (Instant::now(), Instant::now());
        for (at, member) in members.iter_mut().enumerate() {
            member.lost("away", now);
            // One of them is long without.
            now += if at == 50 { LASTING } else { SECOND / 10 };
            outages.tick(now);
            member.returned(now);
            outages.tick(now + SECOND);
            assert_eq!(open(&outages, "a:1"), Some((0, at >= 50)), "{at}");
            now += SECOND;
        }
        assert!(outages.lock()[0].since <= since + SECOND);
    }
}
