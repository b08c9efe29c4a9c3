//! The fabric's model of time: computes when a piece of a message begins and ends, given the
//! traffic that shares its resources. The caller passes the time, so the model is the same for the
//! real and for the virtual clock.
//!
//! A piece begins once its request is posted and all its resources are free. Each resource is then
//! busy for as long as the piece takes at that resource's rate, and the piece ends when the slowest
//! resource is done. A short request of another queue pair does not wait for the whole piece, but
//! for at most one packet, because a NIC switches between queue pairs after each packet. Pieces are
//! larger than packets only because moving bytes packet by packet would cost too much.

use std::sync::atomic::{AtomicU64, Ordering};

/// Largest request that counts as short: far less than a packet.
pub const SHORT_BYTES: u64 = 512;
/// Size of a packet at the largest MTU. A NIC sends one packet of a queue pair before it serves
/// another queue pair.
const PACKET_BYTES: u64 = 4096;

/// A rail, link or cable in one direction, or a queue pair. It carries one piece at a time.
#[derive(Debug)]
#[repr(C)]
pub struct Resource {
    /// Time from which the resource is free, on the fabric's clock.
    free_at_ns: AtomicU64,
    /// Time from which the resource would be free if there were only short requests.
    short_free_at_ns: AtomicU64,
    /// Rate in Mb/s, as the bits of an `f64`; 0: no limit.
    rate: AtomicU64,
}

impl Resource {
    pub fn set_rate(&self, mbps: f64) {
        self.rate.store(mbps.to_bits(), Ordering::Relaxed);
    }

    pub fn rate_mbps(&self) -> f64 {
        f64::from_bits(self.rate.load(Ordering::Relaxed))
    }

    fn free_at_ns(&self) -> u64 {
        if self.rate_mbps() > 0.0 {
            self.free_at_ns.load(Ordering::Relaxed)
        } else {
            0
        }
    }

    /// Returns the earliest start of a short request that is posted at `posted_ns`: after the
    /// earlier short requests and one packet of other traffic, or as soon as the resource is free.
    fn turn_at_ns(&self, posted_ns: u64) -> u64 {
        let in_turn = self
            .short_free_at_ns
            .load(Ordering::Relaxed)
            .max(posted_ns + self.busy_ns(PACKET_BYTES));
        self.free_at_ns().min(in_turn)
    }

    fn busy_ns(&self, bytes: u64) -> u64 {
        let rate = self.rate_mbps();
        // A rate in Mb/s is in bits per microsecond, so the time is bytes x 8 / rate microseconds.
        if rate > 0.0 {
            (bytes as f64 * 8_000.0 / rate) as u64
        } else {
            0
        }
    }

    /// Occupies the resource for the time that `bytes` take, from `begin_ns` on or, if it is not
    /// free by then, from when it is free. Returns the end.
    fn take(&self, begin_ns: u64, bytes: u64) -> u64 {
        if self.rate_mbps() <= 0.0 {
            return begin_ns;
        }
        extend(&self.free_at_ns, begin_ns, self.busy_ns(bytes))
    }

    /// Occupies the resource with a short request. Other traffic is delayed by the request's time.
    /// Returns the end of the request.
    fn take_turn(&self, begin_ns: u64, bytes: u64) -> u64 {
        if self.rate_mbps() <= 0.0 {
            return begin_ns;
        }
        let busy_ns = self.busy_ns(bytes);
        extend(&self.free_at_ns, begin_ns, busy_ns);
        extend(&self.short_free_at_ns, begin_ns, busy_ns)
    }
}

fn extend(free_at_ns: &AtomicU64, begin_ns: u64, busy_ns: u64) -> u64 {
    let taken = free_at_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| {
        Some(free.max(begin_ns) + busy_ns)
    });
    taken.unwrap_or(begin_ns).max(begin_ns) + busy_ns
}

#[derive(Debug, Clone, Copy)]
pub struct Route<'a> {
    /// The request's queue pair, which keeps its requests in order.
    pub queue_pair: &'a Resource,
    pub shared: &'a [&'a Resource],
    /// True for a request of at most [`SHORT_BYTES`]. It waits for one packet of another queue
    /// pair, not for a whole piece.
    pub is_short: bool,
}

impl Route<'_> {
    pub fn begins_at_ns(&self, posted_ns: u64) -> u64 {
        let own_ns = posted_ns.max(self.queue_pair.free_at_ns());
        let free = |resource: &&Resource| {
            if self.is_short {
                resource.turn_at_ns(own_ns)
            } else {
                resource.free_at_ns()
            }
        };
        self.shared.iter().map(free).fold(own_ns, u64::max)
    }

    /// Sends a piece. Returns the arrival time of its last byte, without latency.
    pub fn carry(&self, begin_ns: u64, bytes: u64) -> u64 {
        let take = |resource: &&Resource| match self.is_short {
            true => resource.take_turn(begin_ns, bytes),
            false => resource.take(begin_ns, bytes),
        };
        self.shared
            .iter()
            .map(take)
            .fold(self.queue_pair.take(begin_ns, bytes), u64::max)
    }
}

/// Returns the time that a code of `min_rnr_timer` stands for (InfiniBand specification, 9.7.5.2.8,
/// table 46).
pub(crate) fn rnr_wait_ns(code: u8) -> u64 {
    match code {
        0 => 655_360_000,
        1 => 10_000,
        n => {
            let whole = 10_000u64 << (n / 2).min(15);
            if n % 2 == 0 { whole } else { whole * 3 / 2 }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resource(mbps: f64) -> Resource {
        let made = Resource {
            free_at_ns: AtomicU64::new(0),
            short_free_at_ns: AtomicU64::new(0),
            rate: AtomicU64::new(0),
        };
        made.set_rate(mbps);
        made
    }

    fn send(posted_ns: u64, bytes: u64, shared: &[&Resource]) -> u64 {
        let route = Route {
            queue_pair: &resource(0.0),
            shared,
            is_short: bytes <= SHORT_BYTES,
        };
        route.carry(route.begins_at_ns(posted_ns), bytes)
    }

    #[test]
    fn the_slowest_part_of_the_path_sets_the_pace_and_lateness_is_kept() {
        let rail = resource(8_000.0);
        let qp = resource(4_000.0);
        // 8000 Mb/s: a byte takes a nanosecond.
        assert_eq!(send(0, 1000, &[&rail]), 1000);
        assert_eq!(send(0, 1000, &[&rail]), 2000);
        assert_eq!(send(500, 1000, &[&rail]), 3000, "posted early, served late");
        assert_eq!(send(10_000, 1000, &[&rail, &qp]), 12_000);
        assert_eq!(
            send(10_000, 1000, &[&rail]),
            12_000,
            "the rail was free again after half of that"
        );
    }

    #[test]
    fn two_queue_pairs_share_a_rail_and_no_rate_is_no_limit() {
        let rail = resource(8_000.0);
        let one = resource(8_000.0);
        let other = resource(8_000.0);
        let open = resource(0.0);
        assert_eq!(send(0, 1000, &[&rail, &one]), 1000);
        assert_eq!(send(0, 1000, &[&rail, &other]), 2000);
        assert_eq!(send(7, 1 << 40, &[&open]), 7);
    }

    #[test]
    fn a_short_request_waits_for_a_packet_and_not_for_a_piece_and_costs_the_rail_its_time() {
        let rail = resource(8_000.0);
        assert_eq!(send(0, 65_536, &[&rail]), 65_536);
        assert_eq!(send(1_000, 64, &[&rail]), 1_000 + 4_096 + 64);
        assert_eq!(
            send(1_000, 64, &[&rail]),
            1_000 + 4_096 + 128,
            "after the short one before it"
        );
        assert_eq!(
            send(1_000, 65_536, &[&rail]),
            2 * 65_536 + 128,
            "bulk waits for all"
        );
        assert_eq!(
            send(200_000, 64, &[&rail]),
            200_064,
            "nothing is being sent"
        );
    }

    #[test]
    fn a_short_request_does_not_overtake_its_own_queue_pair() {
        let rail = resource(8_000.0);
        let qp = resource(8_000.0);
        let route = |is_short| Route {
            queue_pair: &qp,
            shared: &[],
            is_short,
        };
        assert_eq!(route(false).carry(0, 65_536), 65_536);
        assert_eq!(
            Route {
                shared: &[&rail],
                ..route(true)
            }
            .begins_at_ns(10),
            65_536
        );
    }
}
