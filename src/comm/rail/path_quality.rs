//! Measurements of a path from one rail of this host to one address of a peer, shared by all
//! connections of this process.
//!
//! A single connection sees only the bandwidth that the other connections leave. If each connection
//! planned by its own measurements, the connections would divide the rails among themselves, and a
//! rail would idle whenever its connection has nothing to send. Combined measurements show the
//! rail's real bandwidth.
//!
//! Evidence from rung 3 (the software fabric across processes), with four connections over four
//! equal rails of 0.56 GB/s in total, and messages of 2 to 8 MiB in both directions: separate
//! measurements gave 0.47 to 0.54 GB/s, shared measurements 0.54 to 0.55 GB/s.

use crate::comm::threads::lock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// Approximate number of samples in the moving average.
const AVERAGED_SAMPLES: f64 = 8.0;
/// A quality of 1 in the unit of the stored value, which is a millionth.
const ONE: f64 = 1e6;
/// Lowest quality. It limits the result of `bytes_at_expected_rate` to 1,000 times the argument, so
/// that a stalled path's backlog has a bounded weight in the choice of a rail.
const MIN_QUALITY: f64 = 1e-3;

/// Quality of a path, above 0 and at most 1. Each connection measures the rates of its paths, and
/// divides each by the path's expected rate. A sample is this quotient, divided by the largest
/// quotient of the same connection. The quality is the moving average of all connections' samples.
///
/// Any thread may read and write the quality. All orderings are relaxed, and a race may lose a
/// sample. This is safe: the quality is only a hint for the choice of a rail, and no other memory
/// depends on it.
#[derive(Debug, Default)]
pub struct PathQuality {
    /// The quality in millionths; 0 before the first sample.
    quality_millionths: AtomicU32,
    carried_bytes: AtomicU64,
}

impl PathQuality {
    /// Adds one connection's sample `kept`, after limiting it to the range from `MIN_QUALITY` to 1.
    /// Returns the new average.
    #[inline]
    pub fn add(&self, kept: f64) -> f64 {
        let kept = kept.clamp(MIN_QUALITY, 1.0) * ONE;
        let before = f64::from(self.quality_millionths.load(Ordering::Relaxed));
        let now = if before > 0.0 {
            before + (kept - before) / AVERAGED_SAMPLES
        } else {
            kept
        };
        self.quality_millionths.store(now as u32, Ordering::Relaxed);
        now / ONE
    }

    /// Records that large writes of this many bytes were confirmed.
    #[inline]
    pub fn add_carried_bytes(&self, bytes: u64) {
        self.carried_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the confirmed bytes of large writes, over all connections of this process.
    #[inline]
    pub fn carried_bytes(&self) -> u64 {
        self.carried_bytes.load(Ordering::Relaxed)
    }

    /// Returns the bytes that the path would carry at its expected rate in the time that it now
    /// needs for `bytes`.
    #[inline]
    pub fn bytes_at_expected_rate(&self, bytes: u64) -> u64 {
        match self.quality_millionths.load(Ordering::Relaxed) {
            0 => bytes,
            kept => (bytes as f64 * (ONE / f64::from(kept))) as u64,
        }
    }
}

/// Qualities of one rail's paths that have open connections, by the peer's address. Takes a lock,
/// so it is used only when queue pairs are connected.
#[derive(Debug, Default)]
pub struct PathQualities(Mutex<Vec<([u8; 16], Weak<PathQuality>)>>);

impl PathQualities {
    /// Returns the quality of the path to an address.
    pub fn of(&self, peer_gid: [u8; 16]) -> Arc<PathQuality> {
        let mut known = lock(&self.0);
        known.retain(|(_, quality)| quality.strong_count() > 0);
        let there = known
            .iter()
            .find(|(gid, _)| *gid == peer_gid)
            .and_then(|(_, quality)| quality.upgrade());
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
    fn the_quality_averages_samples_and_follows_changes() {
        let quality = PathQuality::default();
        assert_eq!(quality.bytes_at_expected_rate(100), 100, "no sample yet");
        assert!((quality.add(0.8) - 0.8).abs() < 1e-5);
        // Two connections with opposite samples, in turns.
        let seen: Vec<f64> = (0..40)
            .map(|turn| quality.add(if turn % 2 == 0 { 1.0 } else { 0.5 }))
            .collect();
        assert!(
            seen[20..].iter().all(|kept| (0.68..0.82).contains(kept)),
            "{seen:?}"
        );
        for _ in 0..24 {
            quality.add(0.25);
        }
        assert!((quality.add(0.25) - 0.25).abs() < 0.03);
        assert!((360..=400).contains(&quality.bytes_at_expected_rate(100)));
        for kept in [0.0, f64::MIN_POSITIVE, -1.0] {
            (0..200).for_each(|_| _ = quality.add(kept));
            assert!(
                (90_000..=100_000).contains(&quality.bytes_at_expected_rate(100)),
                "the weight of a stalled path is bounded"
            );
        }
    }

    #[test]
    fn open_connections_share_the_quality_of_their_path() {
        let rail = PathQualities::default();
        let one = rail.of([1; 16]);
        let other = rail.of([1; 16]);
        let elsewhere = rail.of([2; 16]);
        one.add(0.5);
        assert_eq!(
            (
                other.bytes_at_expected_rate(100),
                elsewhere.bytes_at_expected_rate(100)
            ),
            (200, 100)
        );
        drop((one, other));
        assert_eq!(
            rail.of([1; 16]).bytes_at_expected_rate(100),
            100,
            "later connections start without samples"
        );
        assert_eq!(rail.0.lock().unwrap().len(), 2);
    }
}
