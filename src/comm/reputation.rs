//! What all connections of this process found of a way: from one rail of this host to one port of a peer.
//!
//! A connection alone sees on each rail what the others left it at that moment. Were it to plan by that, connections would part the
//! rails among themselves and stay with their parts, and rails would idle whenever one of them has nothing to send. What they
//! find together is what the rail is. (Four connections over four equal rails, 2 to 8 MiB both ways, 0.56 GB/s in all: 0.47 to
//! 0.54 GB/s each by itself, 0.54 to 0.55 together; rung 3.)

use super::lane::Lane;
use crate::flow::striping::Others;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// How many findings are averaged, about.
const AVERAGED: f64 = 8.0;
/// Parts of one in which it is kept.
const ONE: f64 = 1e6;
/// The least that a way is said to keep: what waits on one that stands still has a bound.
const LEAST: f64 = 1e-3;

/// How much of its promise a way keeps, beside the best one of the same connection. Any thread may ask and tell: it is a hint for
/// who chooses a rail, and no other memory hangs on it, so all orderings are relaxed, and a finding may get lost in a race.
#[derive(Debug, Default)]
pub struct Reputation {
    /// In millionths; 0: nobody told yet.
    kept: AtomicU32,
}

impl Reputation {
    /// Adds that a connection found it to keep `kept` (above 0, to 1); what all found.
    #[inline]
    pub fn add(&self, kept: f64) -> f64 {
        let kept = kept.clamp(LEAST, 1.0) * ONE;
        let before = f64::from(self.kept.load(Ordering::Relaxed));
        let now = if before > 0.0 { before + (kept - before) / AVERAGED } else { kept };
        self.kept.store(now as u32, Ordering::Relaxed);
        now / ONE
    }

    /// How long so many bytes take on it, as the bytes that a way which keeps its promise carries in that time.
    #[inline]
    pub fn weigh(&self, bytes: u64) -> u64 {
        match self.kept.load(Ordering::Relaxed) {
            0 => bytes,
            kept => (bytes as f64 * (ONE / f64::from(kept))) as u64,
        }
    }
}

/// The ways from a rail, by the peer's address: of connections that are open. For set-up only: it locks.
#[derive(Debug, Default)]
pub struct Reputations(Mutex<Vec<([u8; 16], Weak<Reputation>)>>);

impl Reputations {
    /// That of the way to an address.
    pub fn of(&self, peer_gid: [u8; 16]) -> Arc<Reputation> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|(_, reputation)| reputation.strong_count() > 0);
        let there = known.iter().find(|(gid, _)| *gid == peer_gid).and_then(|(_, reputation)| reputation.upgrade());
        there.unwrap_or_else(|| {
            let new = Arc::default();
            known.push((peer_gid, Arc::downgrade(&new)));
            new
        })
    }
}

/// The lanes of a connection that sends, beside the other connections on their rails.
pub struct Sending<'a>(pub &'a [Lane]);

impl Others for Sending<'_> {
    #[inline(always)]
    fn waiting_bytes(&self, rail: usize) -> u64 {
        self.0.get(rail).map_or(0, |lane| lane.rail.backlog_bytes())
    }

    fn confer(&self, rail: usize, kept: f64) -> f64 {
        self.0.get(rail).map_or(kept, |lane| lane.reputation.add(kept))
    }
}

/// The lanes of a connection that receives, and so sends nothing but grants, which show no rate. A slow rail has little to carry
/// and takes long for it, and a grant that waits behind that holds up the other direction: so what counts is how long, not how
/// much.
pub struct Granting<'a>(pub &'a [Lane]);

impl Others for Granting<'_> {
    #[inline(always)]
    fn waiting_bytes(&self, rail: usize) -> u64 {
        self.0.get(rail).map_or(0, |lane| lane.reputation.weigh(lane.rail.backlog_bytes()))
    }

    fn confer(&self, _rail: usize, kept: f64) -> f64 {
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_all_find_is_averaged_and_a_change_is_followed() {
        let reputation = Reputation::default();
        assert_eq!(reputation.weigh(100), 100, "nobody told yet");
        assert!((reputation.add(0.8) - 0.8).abs() < 1e-5);
        // Two connections that find the opposite, in turns.
        let seen: Vec<f64> = (0..40).map(|turn| reputation.add(if turn % 2 == 0 { 1.0 } else { 0.5 })).collect();
        assert!(seen[20..].iter().all(|kept| (0.68..0.82).contains(kept)), "{seen:?}");
        for _ in 0..24 {
            reputation.add(0.25);
        }
        assert!((reputation.add(0.25) - 0.25).abs() < 0.03);
        assert!((360..=400).contains(&reputation.weigh(100)));
        for kept in [0.0, f64::MIN_POSITIVE, -1.0] {
            (0..200).for_each(|_| _ = reputation.add(kept));
            assert!((90_000..=100_000).contains(&reputation.weigh(100)), "a way that stands still has a bound");
        }
    }

    #[test]
    fn connections_of_one_way_share_it_while_they_are_open() {
        let rail = Reputations::default();
        let (one, other, elsewhere) = (rail.of([1; 16]), rail.of([1; 16]), rail.of([2; 16]));
        one.add(0.5);
        assert_eq!((other.weigh(100), elsewhere.weigh(100)), (200, 100));
        drop((one, other));
        assert_eq!(rail.of([1; 16]).weigh(100), 100, "the next ones begin anew");
        assert_eq!(rail.0.lock().unwrap().len(), 2);
    }
}
