//! Log lines that are written once for all connections with a peer.
//!
//! Each call takes a lock. The callers are the set-up and the closing of connections, the service
//! thread, and sends and receives over TCP streams that make no progress for
//! `NCCL_SPARK_STALL_WARN_S`. Messages that make progress cause no call.

use crate::comm::threads::lock;
pub use host::counters::layout::Direction;
use proto::time::Instant;
use proto::wire::ids::RailId;
use std::sync::Mutex;
use std::time::Duration;

/// Subjects already logged, for each connected peer.
#[derive(Debug, Default)]
pub struct LogOnce(Mutex<Vec<About>>);

/// A subject that is logged once for all connections with a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    /// The connection is ready. Contains the log line.
    Connected(String),
    /// No rail works yet, this number of seconds after the handshake.
    NoRailYet(u64),
    /// A rail of this host loses packets of the ports' full MTU, so it uses a smaller path MTU.
    SmallPathMtu(RailId),
    /// A rail of this host is not used.
    NotUsed(RailId),
    /// A port of this host and the port of the peer rail have different MTUs.
    PathMtu(RailId),
    /// The peer sends its data with another priority than this host does.
    Priority,
    /// TCP with the peer uses a wireless network.
    Wireless,
    /// The peer has answered after its TCP connection was closed.
    Answered,
    /// The connection has failed.
    Failed,
}

#[derive(Debug)]
struct About {
    peer: String,
    connections: usize,
    logged: Vec<Subject>,
    stalls: Vec<(Direction, Instant)>,
}

impl LogOnce {
    /// Returns true for the first call with `subject`. After the last connection with the peer has
    /// closed, all subjects are new again.
    pub fn is_first(&self, peer: &str, subject: Subject) -> bool {
        self.about(peer, |about| {
            let is_first = !about.logged.contains(&subject);
            if is_first {
                about.logged.push(subject);
            }
            is_first
        })
    }

    /// Warns once that a rail uses a smaller path MTU because it loses larger packets.
    pub fn warn_of_small_packets(
        &self,
        peer: &str,
        (id, rail): (RailId, &str),
        peer_rail: &str,
        why: &str,
    ) {
        if self.is_first(peer, Subject::SmallPathMtu(id)) {
            tracing::warn!(
                "rail {rail} to {peer}: {why} (peer rail {peer_rail}); using path MTU 1024: set MTU 9000 (4200 at least) on \
                 every switch port between the two"
            );
        }
    }

    /// Returns true if no stall in this direction was logged within the last `window`. The caller
    /// must then log the stall, because this call records it as logged.
    pub fn is_first_stall(
        &self,
        peer: &str,
        direction: Direction,
        window: Duration,
        now: Instant,
    ) -> bool {
        self.about(peer, |about| {
            about
                .stalls
                .retain(|(_, logged)| now.saturating_duration_since(*logged) < window);
            let is_first = !about.stalls.iter().any(|(other, _)| *other == direction);
            if is_first {
                about.stalls.push((direction, now));
            }
            is_first
        })
    }

    /// Counts a new connection with the peer.
    pub fn opened(&self, peer: &str) {
        self.about(peer, |about| about.connections += 1);
    }

    /// Counts a closed connection. After the last one, every subject may be logged again.
    pub fn closed(&self, peer: &str) {
        self.about(peer, |about| {
            about.connections = about.connections.saturating_sub(1)
        });
        lock(&self.0).retain(|about| about.peer != peer || about.connections > 0);
    }

    fn about<T>(&self, peer: &str, use_it: impl FnOnce(&mut About) -> T) -> T {
        let mut all = lock(&self.0);
        let at = all
            .iter()
            .position(|about| about.peer == peer)
            .unwrap_or_else(|| {
                let (connections, logged, stalls) = Default::default();
                all.push(About {
                    peer: peer.to_owned(),
                    connections,
                    logged,
                    stalls,
                });
                all.len() - 1
            });
        use_it(&mut all[at])
    }
}
