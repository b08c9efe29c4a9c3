//! One log line for a stall, regardless of the number of connections with the peer that stall.
//!
//! [`Stalls`] guarantees for each peer:
//! - One WARN names the greatest [`Cause`] of all connections, which is the cause that tells most.
//!   This WARN is written once the time [`SETTLED`] has passed since the first report of a stall.
//!   NCCL opens many connections to a peer, and they stall together.
//! - A further WARN follows if the greatest cause changes, and for each new stall. At least
//!   `NCCL_SPARK_STALL_WARN_S` passes between two WARNs.
//! - If the peer's process has waited as long for data that this process has not posted, one WARN
//!   says so, unless this process stalls with the peer itself. So the log of a rank that has
//!   skipped a collective names it too.
//! - While the peer's process waits for data of this process, no WARN and no error blames the
//!   peer's program for its lateness ([`StallCause::PeerWaits`]). A receiver that waits for data
//!   asks its sender every few seconds, so the sender's process knows.
//!
//! Set-up creates a [`ConnectionStall`] for each connection. All other calls come from the service
//! thread, and each takes a lock.

use crate::comm::threads::lock;
use host::error::{StallCause, in_operation};
use proto::flow::stall::Cause;
use proto::time::Instant;
use proto::wire::operation::Operation;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Time for other connections to report their causes. The service thread samples each data path
/// twice in this time.
pub const SETTLED: Duration = Duration::from_secs(1);
/// Time after the peer's question until the peer no longer counts as waiting. A peer that waits
/// asks again five seconds after an answer, and an answer takes a few seconds if TCP loses packets.
const ASKED_LATELY: Duration = Duration::from_secs(12);

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
    /// Connections on which the peer waits for data of this process.
    awaited: Vec<Awaited>,
    due: Instant,
    /// Cause that the last line about the present stall has named; `None` before the first line.
    logged: Option<Cause>,
    /// True once a line has said that the peer waits for this process.
    has_logged_wait: bool,
}

#[derive(Debug)]
struct Stalled {
    connection: u64,
    cause: Cause,
    why: StallCause,
    /// NCCL's operation on this side.
    operation: Option<Operation>,
    since: Instant,
}

#[derive(Debug)]
struct Awaited {
    connection: u64,
    cause: Cause,
    why: StallCause,
    since: Instant,
    /// `None`: until the connection ends.
    until: Option<Instant>,
}

/// One connection's entry in the stalls of its peer.
#[derive(Debug)]
pub struct ConnectionStall {
    stalls: Arc<Stalls>,
    id: u64,
    peer: String,
    is_stalled: bool,
    is_awaited: bool,
}

impl PeerStalls {
    /// Returns `why`, or if it would blame the peer's program although the peer waits for data of
    /// this process, the cause of the peer's wait.
    fn explained(&self, why: &StallCause) -> StallCause {
        match (why, self.awaited.iter().max_by_key(|one| one.cause)) {
            (
                StallCause::NoReceive { idle, .. }
                | StallCause::NoSend { idle, .. }
                | StallCause::NotTested { idle },
                Some(awaited),
            ) => StallCause::PeerWaits {
                why: Box::new(awaited.why.clone()),
                idle: *idle,
            },
            _ => why.clone(),
        }
    }

    fn forget_old_questions(&mut self, now: Instant) {
        self.awaited
            .retain(|one| one.until.is_none_or(|until| now < until));
    }

    /// Writes one line while the peer waits for data that this process has not posted.
    fn log_wait(&mut self, window: Duration, now: Instant) {
        let is_late = |one: &&Awaited| one.cause == Cause::NotPosted;
        let Some(first) = self
            .awaited
            .iter()
            .filter(is_late)
            .min_by_key(|one| one.since)
        else {
            self.has_logged_wait = false;
            return;
        };
        let waited = now.saturating_duration_since(first.since);
        if waited >= window && self.stalled.is_empty() && !self.has_logged_wait {
            self.has_logged_wait = true;
            tracing::warn!("{} has waited for {waited:.0?}: {}", self.peer, first.why);
        }
    }
}

impl Stalls {
    /// Writes the lines that are due. `window` is the shortest time between two lines about a peer.
    /// `losses` returns a text about lost packets, with which each line ends.
    pub fn tick(&self, window: Duration, now: Instant, losses: impl Fn() -> String) {
        let mut peers = lock(&self.peers);
        peers.iter_mut().for_each(|of| of.forget_old_questions(now));
        // A peer without a stall is kept while its last line is recent.
        peers.retain(|of| !of.stalled.is_empty() || !of.awaited.is_empty() || now < of.due);
        for of in peers.iter_mut().filter(|of| now >= of.due) {
            let Some(worst) = of.stalled.iter().max_by_key(|one| one.cause) else {
                continue;
            };
            if of.logged != Some(worst.cause) {
                let waited = now.saturating_duration_since(worst.since);
                let why = of.explained(&worst.why);
                (of.logged, of.due) = (Some(worst.cause), now + window);
                let connections = match of.stalled.len() {
                    1 => "1 connection".to_owned(),
                    count => format!("{count} connections"),
                };
                tracing::warn!(
                    "no progress with {} for {waited:.0?}{} on {connections}: {why}{}",
                    of.peer,
                    in_operation(worst.operation),
                    losses()
                );
            }
        }
        peers.iter_mut().for_each(|of| of.log_wait(window, now));
    }
}

impl ConnectionStall {
    /// Adds a connection with `peer`.
    pub fn new(stalls: &Arc<Stalls>, peer: &str) -> Self {
        let id = stalls.members.fetch_add(1, Ordering::Relaxed);
        Self {
            stalls: Arc::clone(stalls),
            id,
            peer: peer.to_owned(),
            is_stalled: false,
            is_awaited: false,
        }
    }

    /// Records the cause of a stall that has lasted since `since`.
    pub fn stalled(
        &mut self,
        cause: Cause,
        why: StallCause,
        operation: Option<Operation>,
        since: Instant,
        now: Instant,
    ) {
        self.is_stalled = true;
        self.with_peer(now, |of| {
            if of.stalled.is_empty() {
                (of.due, of.logged) = (of.due.max(now + SETTLED), None);
            }
            of.stalled.retain(|one| one.connection != self.id);
            of.stalled.push(Stalled {
                connection: self.id,
                cause,
                why,
                operation,
                since,
            });
        });
    }

    /// Records the peer's question: the peer waits for data of this connection since `since`, with
    /// this cause.
    pub fn peer_waits(&mut self, cause: Cause, why: StallCause, since: Instant, now: Instant) {
        self.awaits(cause, why, since, Some(now + ASKED_LATELY), now);
    }

    /// Records that the peer waits for data of this connection, until the connection ends.
    pub fn peer_waits_until_the_end(&mut self, cause: Cause, why: StallCause, now: Instant) {
        self.awaits(cause, why, now, None, now);
    }

    fn awaits(
        &mut self,
        cause: Cause,
        why: StallCause,
        since: Instant,
        until: Option<Instant>,
        now: Instant,
    ) {
        self.is_awaited = true;
        self.with_peer(now, |of| {
            // A wait until the end outlasts later questions.
            of.awaited
                .retain(|one| one.connection != self.id || one.until.is_none());
            of.awaited.push(Awaited {
                connection: self.id,
                cause,
                why,
                since,
                until,
            });
        });
    }

    /// Returns `why`, or if the peer waits for data of this process, the cause of the peer's wait
    /// in place of the lateness of its program.
    pub fn explained(&self, why: StallCause, now: Instant) -> StallCause {
        self.with_peer(now, |of| {
            of.forget_old_questions(now);
            of.explained(&why)
        })
    }

    fn with_peer<T>(&self, now: Instant, use_it: impl FnOnce(&mut PeerStalls) -> T) -> T {
        let mut peers = lock(&self.stalls.peers);
        let at = peers
            .iter()
            .position(|of| of.peer == self.peer)
            .unwrap_or_else(|| {
                let peer = self.peer.clone();
                let stalled = Vec::new();
                let awaited = Vec::new();
                peers.push(PeerStalls {
                    peer,
                    stalled,
                    awaited,
                    due: now,
                    logged: None,
                    has_logged_wait: false,
                });
                peers.len() - 1
            });
        use_it(&mut peers[at])
    }

    /// Records that the connection no longer stalls, or that it has ended.
    pub fn ended(&mut self) {
        if std::mem::take(&mut self.is_stalled) {
            let mut peers = lock(&self.stalls.peers);
            let stalled = peers
                .iter_mut()
                .filter(|of| of.peer == self.peer)
                .map(|of| &mut of.stalled);
            stalled.for_each(|stalled| stalled.retain(|one| one.connection != self.id));
        }
    }
}

impl Drop for ConnectionStall {
    fn drop(&mut self) {
        self.ended();
        if self.is_awaited {
            for of in lock(&self.stalls.peers).iter_mut() {
                of.awaited.retain(|one| one.connection != self.id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    const WINDOW: Duration = Duration::from_secs(60);
    const SECOND: Duration = Duration::from_secs(1);

    fn logged(stalls: &Stalls) -> Vec<(usize, Option<Cause>)> {
        lock(&stalls.peers)
            .iter()
            .map(|of| (of.stalled.len(), of.logged))
            .collect()
    }

    fn no_receive(idle: Duration) -> StallCause {
        let (number, there) = (12, None);
        StallCause::NoReceive {
            idle,
            number,
            there,
        }
    }

    fn no_send(idle: Duration) -> StallCause {
        let (number, there) = (12, None);
        StallCause::NoSend {
            idle,
            number,
            there,
        }
    }

    fn not_sent_here() -> StallCause {
        let (here, there) = (None, None);
        StallCause::NotSentHere {
            number: 12_590,
            here,
            there,
        }
    }

    #[test]
    fn one_line_says_that_the_peer_has_waited_for_this_process() {
        let stalls = Arc::new(Stalls::default());
        let [mut asked, mut stalled] = ["a:1"; 2].map(|of| ConnectionStall::new(&stalls, of));
        let has_logged = || {
            let peers = lock(&stalls.peers);
            peers.first().is_some_and(|of| of.has_logged_wait)
        };
        let since = clock::now();
        let asks = |asked: &mut ConnectionStall, at: Duration| {
            asked.peer_waits(Cause::NotPosted, not_sent_here(), since, since + at);
            stalls.tick(WINDOW, since + at, String::new);
        };
        asks(&mut asked, WINDOW - SECOND);
        assert!(!has_logged(), "too early");
        asks(&mut asked, WINDOW);
        assert!(has_logged());
        stalls.tick(WINDOW, since + WINDOW + ASKED_LATELY, String::new);
        assert!(
            !has_logged(),
            "the peer asks no more, so a later wait is another"
        );
        // The line about this process's own stall says the same.
        let now = since + 2 * WINDOW;
        stalled.stalled(Cause::NotPosted, no_send(SECOND), None, since, now);
        asks(&mut asked, 2 * WINDOW);
        assert!(!has_logged());
    }

    #[test]
    fn the_greatest_cause_of_all_connections_is_logged_once() {
        let stalls = Arc::new(Stalls::default());
        let mut members: Vec<_> = (0..3)
            .map(|_| ConnectionStall::new(&stalls, "a:1"))
            .collect();
        let now = clock::now();
        let why = || StallCause::NoAnswer {
            silent: SECOND,
            unacknowledged: String::new(),
        };
        members[0].stalled(Cause::NotPosted, why(), None, now, now);
        stalls.tick(WINDOW, now, String::new);
        assert_eq!(
            logged(&stalls),
            [(1, None)],
            "other connections may know more"
        );
        members[1].stalled(Cause::NotGranted, why(), None, now, now + SECOND / 2);
        stalls.tick(WINDOW, now + SECOND, String::new);
        assert_eq!(logged(&stalls), [(2, Some(Cause::NotGranted))]);
        // A greater cause waits until the window has passed.
        members[2].stalled(Cause::NoAnswer, why(), None, now, now + 2 * SECOND);
        stalls.tick(WINDOW, now + WINDOW, String::new);
        assert_eq!(logged(&stalls), [(3, Some(Cause::NotGranted))]);
        stalls.tick(WINDOW, now + WINDOW + SECOND, String::new);
        assert_eq!(logged(&stalls), [(3, Some(Cause::NoAnswer))]);
        members.iter_mut().for_each(ConnectionStall::ended);
        stalls.tick(WINDOW, now + WINDOW + 2 * SECOND, String::new);
        assert_eq!(
            logged(&stalls),
            [(0, Some(Cause::NoAnswer))],
            "the last line is recent"
        );
        // A new stall waits for the end of the window, and is logged again.
        let now = now + WINDOW + 2 * SECOND;
        members[0].stalled(Cause::NoAnswer, why(), None, now, now);
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

    #[test]
    fn a_peer_that_waits_for_data_is_not_called_late() {
        let stalls = Arc::new(Stalls::default());
        let [mut asked, mut lost, late, other] =
            ["a:1", "a:1", "a:1", "b:1"].map(|of| ConnectionStall::new(&stalls, of));
        let now = clock::now();
        let idle = SECOND;
        let waits = |why| StallCause::PeerWaits {
            why: Box::new(why),
            idle,
        };
        asked.peer_waits(Cause::NotPosted, not_sent_here(), now, now);
        for why in [
            no_receive(idle),
            no_send(idle),
            StallCause::NotTested { idle },
        ] {
            assert_eq!(late.explained(why.clone(), now), waits(not_sent_here()));
            assert_eq!(other.explained(why.clone(), now), why, "another peer");
        }
        assert_eq!(
            late.explained(StallCause::HeldBack, now),
            StallCause::HeldBack,
            "this host's own fault"
        );
        lost.peer_waits_until_the_end(Cause::NotArrived, StallCause::NotArrivedThere, now);
        let explained = |now| late.explained(no_send(idle), now);
        assert_eq!(
            explained(now),
            waits(StallCause::NotArrivedThere),
            "the greatest cause"
        );
        asked.peer_waits(Cause::NotGranted, StallCause::NoGrantHere, now, now);
        lost.peer_waits(Cause::NotArrived, StallCause::NotArrivedThere, now, now);
        stalls.tick(WINDOW, now + 2 * WINDOW, String::new);
        assert_eq!(
            explained(now + 2 * WINDOW),
            waits(StallCause::NotArrivedThere)
        );
        drop(lost);
        assert_eq!(
            explained(now + 2 * WINDOW),
            no_send(idle),
            "the question is old"
        );
        asked.peer_waits(Cause::NotGranted, StallCause::NoGrantHere, now, now);
        assert_eq!(
            explained(now + ASKED_LATELY - SECOND),
            waits(StallCause::NoGrantHere)
        );
        assert_eq!(explained(now + ASKED_LATELY), no_send(idle));
        // A line's text is decided when the line is written.
        let mut late = late;
        late.stalled(Cause::NotPosted, no_send(idle), None, now, now);
        asked.peer_waits(Cause::NotGranted, StallCause::NoGrantHere, now, now);
        let worst = |peers: &[PeerStalls]| {
            peers
                .iter()
                .find(|of| of.peer == "a:1")
                .map(|of| of.explained(&of.stalled[0].why))
        };
        assert_eq!(
            worst(&lock(&stalls.peers)),
            Some(waits(StallCause::NoGrantHere))
        );
    }
}
