//! What one side knows of the other while they are connected.

use std::sync::atomic::{AtomicU64, Ordering};

/// The other end of a connection. Written by the service thread, read on the data path when nothing moves.
#[derive(Debug)]
pub struct Peer {
    /// Host and process, and where it was met.
    pub name: String,
    /// 0 while it is there, [`GONE`] when it is gone, else one more than the receives it had delivered when it
    /// closed in good order.
    state: AtomicU64,
}

const GONE: u64 = u64::MAX;

/// Whether the other end is still there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// Connected.
    Here,
    /// It closed in good order, having delivered this many receives.
    Closed {
        /// As its BYE said.
        delivered: u64,
    },
    /// Its channel broke without a BYE, and nothing was heard of it by the rails.
    Gone,
}

impl Peer {
    /// A peer that is there.
    pub fn new(name: String) -> Self {
        Self { name, state: AtomicU64::new(0) }
    }

    /// Whether it is still there.
    #[inline(always)]
    pub fn presence(&self) -> Presence {
        // Acquire pairs with the release below: what the peer had done before is seen after this.
        match self.state.load(Ordering::Acquire) {
            0 => Presence::Here,
            GONE => Presence::Gone,
            n => Presence::Closed { delivered: n - 1 },
        }
    }

    /// Whether it is still there, and nothing else.
    #[inline(always)]
    pub fn is_here(&self) -> bool {
        // Acquire: as in `presence`.
        self.state.load(Ordering::Acquire) == 0
    }

    /// It said BYE. What it said first stands.
    pub fn said_bye(&self, delivered: u64) {
        if let Presence::Closed { .. } = self.presence() {
            tracing::debug!("{} sent BYE again", self.name);
            return;
        }
        self.state.store(delivered.saturating_add(1).min(GONE - 1), Ordering::Release);
    }

    /// The channel broke; a BYE that came before stands.
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
    fn the_first_bye_stands_and_comes_before_a_broken_channel() {
        let peer = Peer::new("p".to_owned());
        assert_eq!(peer.presence(), Presence::Here);
        peer.said_bye(3);
        peer.said_bye(9);
        peer.vanished();
        assert_eq!(peer.presence(), Presence::Closed { delivered: 3 });
        let peer = Peer::new("p".to_owned());
        peer.vanished();
        peer.said_bye(u64::MAX);
        assert!(matches!(peer.presence(), Presence::Closed { .. }), "a BYE that comes late by a rail is one");
    }
}
