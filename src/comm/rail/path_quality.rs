//! What all connections of this process measured of a path: from one rail of this host to one port of a peer.
//!
//! A connection alone sees on each rail what the others left it at that moment. Were it to plan by that, connections would part the
//! rails among themselves and stay with their parts, and rails would idle whenever one of them has nothing to send. What they
//! find together is what the rail is. (Four connections over four equal rails, 2 to 8 MiB both ways, 0.56 GB/s in all: 0.47 to
//! 0.54 GB/s each by itself, 0.54 to 0.55 together; rung 3.)

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// How many samples are averaged, about.
const AVERAGED: f64 = 8.0;
/// Parts of one in which it is kept.
const ONE: f64 = 1e6;
/// The least quality: what waits on a path that stands still has a bound.
const LEAST: f64 = 1e-3;

/// How much of its expected rate a path has, beside the best one of the same connection. Any thread may read and write: it is a hint
/// for the choice of a rail, and no other memory depends on it, so all orderings are relaxed, and a sample may get lost in a race.
#[derive(Debug, Default)]
pub struct PathQuality {
    /// In millionths; 0: no sample yet.
    kept: AtomicU32,
    /// Bytes that were confirmed.
    carried_bytes: AtomicU64,
}

impl PathQuality {
    /// Adds the sample of one connection, `kept` (above 0, to 1); the average of all.
    #[inline]
    pub fn add(&self, kept: f64) -> f64 {
        let kept = kept.clamp(LEAST, 1.0) * ONE;
        let before = f64::from(self.kept.load(Ordering::Relaxed));
        let now = if before > 0.0 { before + (kept - before) / AVERAGED } else { kept };
        self.kept.store(now as u32, Ordering::Relaxed);
        now / ONE
    }

    /// Large writes of so many bytes were confirmed.
    #[inline]
    pub fn carried(&self, bytes: u64) {
        self.carried_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes of large writes that were confirmed, of all connections of this process.
    #[inline]
    pub fn carried_bytes(&self) -> u64 {
        self.carried_bytes.load(Ordering::Relaxed)
    }

    /// How long so many bytes take on it, as the bytes that a path at its expected rate carries in that time.
    #[inline]
    pub fn weigh(&self, bytes: u64) -> u64 {
        match self.kept.load(Ordering::Relaxed) {
            0 => bytes,
            kept => (bytes as f64 * (ONE / f64::from(kept))) as u64,
        }
    }
}

/// The paths from a rail that has open connections, by the peer's address. For set-up only: it locks.
#[derive(Debug, Default)]
pub struct PathQualities(Mutex<Vec<([u8; 16], Weak<PathQuality>)>>);

impl PathQualities {
    /// That of the path to an address.
    pub fn of(&self, peer_gid: [u8; 16]) -> Arc<PathQuality> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|(_, quality)| quality.strong_count() > 0);
        let there = known.iter().find(|(gid, _)| *gid == peer_gid).and_then(|(_, quality)| quality.upgrade());
        there.unwrap_or_else(|| {
            let new = Arc::default();
            known.push((peer_gid, Arc::downgrade(&new)));
            new
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_all_find_is_averaged_and_a_change_is_followed() {
        let quality = PathQuality::default();
        assert_eq!(quality.weigh(100), 100, "no sample yet");
        assert!((quality.add(0.8) - 0.8).abs() < 1e-5);
        // Two connections that find the opposite, in turns.
        let seen: Vec<f64> = (0..40).map(|turn| quality.add(if turn % 2 == 0 { 1.0 } else { 0.5 })).collect();
        assert!(seen[20..].iter().all(|kept| (0.68..0.82).contains(kept)), "{seen:?}");
        for _ in 0..24 {
            quality.add(0.25);
        }
        assert!((quality.add(0.25) - 0.25).abs() < 0.03);
        assert!((360..=400).contains(&quality.weigh(100)));
        for kept in [0.0, f64::MIN_POSITIVE, -1.0] {
            (0..200).for_each(|_| _ = quality.add(kept));
            assert!((90_000..=100_000).contains(&quality.weigh(100)), "a path that stands still has a bound");
        }
    }

    #[test]
    fn connections_of_one_path_share_it_while_they_are_open() {
        let rail = PathQualities::default();
        let (one, other, elsewhere) = (rail.of([1; 16]), rail.of([1; 16]), rail.of([2; 16]));
        one.add(0.5);
        assert_eq!((other.weigh(100), elsewhere.weigh(100)), (200, 100));
        drop((one, other));
        assert_eq!(rail.of([1; 16]).weigh(100), 100, "the next ones begin anew");
        assert_eq!(rail.0.lock().unwrap().len(), 2);
    }
}
