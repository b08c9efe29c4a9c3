//! State of the process at the other end of a connection.

use std::sync::atomic::{AtomicU64, Ordering};

/// The other end of a connection. The service thread writes its state. The data path reads the
/// state in each `isend`, and while a request makes no progress.
#[derive(Debug)]
pub struct Peer {
    /// Host, process and address of the peer, for messages.
    pub name: String,
    /// 0 while the peer is connected, [`GONE`] after it vanished. After an orderly close, the
    /// number of receives that the peer has completed, plus one.
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
        /// Number of receives, counted from the first, that have all their bytes, as its BYE says.
        delivered: u64,
    },
    /// The bootstrap connection broke without a BYE, and the peer did not answer over the rails.
    Gone,
}

impl Peer {
    /// Creates the state of a connected peer.
    pub fn new(name: String) -> Self {
        Self { name, state: AtomicU64::new(0) }
    }

    /// Returns the peer's connection state.
    #[inline(always)]
    pub fn presence(&self) -> PeerState {
        // Acquire pairs with the release stores below: earlier writes by the storing thread are
        // visible.
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

    /// Records the peer's BYE. The first BYE is kept.
    pub fn said_bye(&self, delivered: u64) {
        if let PeerState::Closed { .. } = self.presence() {
            tracing::debug!("{} sent BYE again", self.name);
            return;
        }
        self.state.store(delivered.saturating_add(1).min(GONE - 1), Ordering::Release);
    }

    /// Records that the peer vanished. An earlier BYE is kept.
    pub fn vanished(&self) {
        let was_here = self.state.compare_exchange(0, GONE, Ordering::Release, Ordering::Relaxed);
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
        assert!(matches!(peer.presence(), PeerState::Closed { .. }), "a BYE that arrives late over a rail counts");
    }
}
