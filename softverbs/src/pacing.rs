//! The fabric's model of time: when a piece of a message begins and ends, given what it shares its way with.
//!
//! Pure, and one for both clocks: the caller says what time it is. A resource is busy until a moment. A piece begins when it
//! was posted and all its resources are free; each resource is then busy for as long as it takes at its own rate, and the piece
//! ends with the slowest.

use std::sync::atomic::{AtomicU64, Ordering};

/// Something that carries one thing at a time: a rail, link or cable in one direction, or a queue pair.
#[derive(Debug)]
#[repr(C)]
pub struct Resource {
    /// Nanoseconds of the fabric's clock at which it is free.
    free_at_ns: AtomicU64,
    /// Bits of an `f64`: Mb/s; 0: no limit.
    rate: AtomicU64,
}

impl Resource {
    /// Sets the rate in Mb/s; 0: no limit.
    pub fn set_rate(&self, mbps: f64) {
        self.rate.store(mbps.to_bits(), Ordering::Relaxed);
    }

    /// The rate in Mb/s.
    pub fn rate_mbps(&self) -> f64 {
        f64::from_bits(self.rate.load(Ordering::Relaxed))
    }

    fn free_at_ns(&self) -> u64 {
        if self.rate_mbps() > 0.0 { self.free_at_ns.load(Ordering::Relaxed) } else { 0 }
    }

    /// Takes the resource from `begin_ns` on, or from when it is free; when it is done.
    fn take(&self, begin_ns: u64, bytes: u64) -> u64 {
        let rate = self.rate_mbps();
        if rate <= 0.0 {
            return begin_ns;
        }
        // Mb/s are bits per microsecond: bytes x 8 / rate microseconds.
        let busy_ns = (bytes as f64 * 8_000.0 / rate) as u64;
        let taken = self
            .free_at_ns
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| Some(free.max(begin_ns) + busy_ns));
        taken.unwrap_or(begin_ns).max(begin_ns) + busy_ns
    }
}

/// When a piece that was posted at `posted_ns` can begin.
pub fn begins_at_ns(posted_ns: u64, way: &[&Resource]) -> u64 {
    way.iter().map(|resource| resource.free_at_ns()).fold(posted_ns, u64::max)
}

/// Sends a piece over its way; when its last byte is there, without latency.
pub fn carry(begin_ns: u64, bytes: u64, way: &[&Resource]) -> u64 {
    way.iter().map(|resource| resource.take(begin_ns, bytes)).fold(begin_ns, u64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resource(mbps: f64) -> Resource {
        let made = Resource { free_at_ns: AtomicU64::new(0), rate: AtomicU64::new(0) };
        made.set_rate(mbps);
        made
    }

    fn send(posted_ns: u64, bytes: u64, way: &[&Resource]) -> u64 {
        carry(begins_at_ns(posted_ns, way), bytes, way)
    }

    #[test]
    fn the_slowest_part_of_the_way_sets_the_pace_and_lateness_is_not_lost() {
        let (rail, qp) = (resource(8_000.0), resource(4_000.0));
        // 8000 Mb/s: a byte a nanosecond.
        assert_eq!(send(0, 1000, &[&rail]), 1000);
        assert_eq!(send(0, 1000, &[&rail]), 2000);
        assert_eq!(send(500, 1000, &[&rail]), 3000, "posted early, served late");
        assert_eq!(send(10_000, 1000, &[&rail, &qp]), 12_000);
        assert_eq!(send(10_000, 1000, &[&rail]), 12_000, "the rail was free again after half of that");
    }

    #[test]
    fn two_queue_pairs_share_a_rail_and_no_rate_is_no_limit() {
        let (rail, one, other, open) = (resource(8_000.0), resource(8_000.0), resource(8_000.0), resource(0.0));
        assert_eq!(send(0, 1000, &[&rail, &one]), 1000);
        assert_eq!(send(0, 1000, &[&rail, &other]), 2000);
        assert_eq!(send(7, 1 << 40, &[&open]), 7);
    }
}
