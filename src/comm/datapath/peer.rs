//! State of the process at the other end of a connection.

use std::sync::atomic::{AtomicU64, Ordering};

/// The other end of a connection. The service thread writes its state. The data path reads the
/// state in each `isend`, and while a request makes no progress.
#[derive(Debug)]
pub struct Peer {
    /// Host, process and address of the peer, for messages.
    pub name: String,
    /// 0 while the peer is connected, [`GONE`] after the peer has vanished. After an orderly close,
    /// one more than [`PeerState::Closed::delivered`].
    state: AtomicU64,
}

const GONE: u64 = u64::MAX;

/// Connection state of the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerState {
    /// The peer is connected.
    Here,
    /// The peer closed the connection in good order.
    Closed {
        /// The peer's BYE says that this number of receives, counted from the first receive of the
        /// connection, have all their bytes.
        delivered: u64,
    },
    /// The bootstrap connection broke without a BYE, and the peer did not answer over the rails.
    Gone,
}

impl Peer {
    /// Creates the state of a connected peer.
    pub fn new(name: String) -> Self {
        Self {
            name,
            state: AtomicU64::new(0),
        }
    }

    /// Returns the peer's connection state.
    #[inline(always)]
    pub fn presence(&self) -> PeerState {
        // Acquire pairs with the release stores below: what the storing thread wrote before its
        // store is visible.
        match self.state.load(Ordering::Acquire) {
            0 => PeerState::Here,
            GONE => PeerState::Gone,
            n => PeerState::Closed { delivered: n - 1 },
        }
    }

    /// Returns true if the peer is connected. Cheaper than [`Peer::presence`].
    #[inline(always)]
    pub fn is_here(&self) -> bool {
        // Acquire: as in `presence`.
        self.state.load(Ordering::Acquire) == 0
    }

    /// Records the peer's BYE, also for a peer that counted as vanished. Ignores a second BYE.
    pub fn said_bye(&self, delivered: u64) {
        if let PeerState::Closed { .. } = self.presence() {
            tracing::debug!("{} sent BYE again", self.name);
            return;
        }
        self.state
            .store(delivered.saturating_add(1).min(GONE - 1), Ordering::Release);
    }

    /// Records that the peer has vanished, unless it has sent BYE.
    pub fn vanished(&self) {
        let was_here = self
            .state
            .compare_exchange(0, GONE, Ordering::Release, Ordering::Relaxed);
        if was_here.is_ok() {
            tracing::debug!("{} is gone", self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bye_counts_and_precedes_a_broken_channel() {
        let peer = Peer::new("p".to_owned());
        assert_eq!(peer.presence(), PeerState::Here);
        peer.said_bye(3);
        peer.said_bye(9);
        peer.vanished();
        assert_eq!(peer.presence(), PeerState::Closed { delivered: 3 });
        let peer = Peer::new("p".to_owned());
        peer.vanished();
        peer.said_bye(u64::MAX);
        assert!(
            matches!(peer.presence(), PeerState::Closed { .. }),
            "a BYE that arrives late over a rail counts"
        );
    }
}
