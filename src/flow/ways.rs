//! What the ways between two hosts share, and so which of them are worth using.
//!
//! A way is a rail of each side. It passes a PCIe link, a port and a cable here, and the same there, and any of them may
//! serve other ways too: two functions of one PCIe link are not two rails' worth. [`Ways::even_rates`] gives every
//! way as much as its narrowest passage leaves it. Where a few ways reach what all do (a Spark with two cables: one
//! function of each PCIe link, each on another cable), the others are spares: more work requests for nothing.

use crate::wire::MAX_RAILS;
use crate::wire::message::Attachment;

/// How near to the best sum of rates a smaller set of ways must come.
const AS_GOOD: f64 = 0.99;
/// Link, port and cable on each side.
const PASSAGES: usize = 6 * MAX_RAILS;

/// The ways of one connection.
#[derive(Debug, Clone, Default)]
pub struct Ways {
    count: usize,
    /// What each passage carries, in Mb/s.
    capacity: Vec<f64>,
    /// The passages of each way, a bit each.
    passes: [u64; MAX_RAILS],
    /// What each way carries alone, in Mb/s.
    alone: [f64; MAX_RAILS],
}

/// A set of ways, a bit each.
pub type Set = u8;

/// One side's end of a way.
#[derive(Debug, Clone, Copy)]
pub struct End {
    /// The rail's number on its host.
    pub rail: u8,
    /// What the rail hangs on.
    pub attachment: Attachment,
}

#[derive(PartialEq, Eq, Clone, Copy)]
enum Passage {
    Link(usize, u8),
    Port(usize, u8),
    Cable(usize, u8),
}

impl Ways {
    /// The ways between pairs of rails, at most [`MAX_RAILS`]: this side's end first.
    pub fn new(pairs: &[[End; 2]]) -> Self {
        let mut ways = Self::default();
        let mut known: Vec<Passage> = Vec::with_capacity(PASSAGES);
        for (way, ends) in pairs.iter().take(MAX_RAILS).enumerate() {
            ways.alone[way] = f64::INFINITY;
            for (side, End { rail, attachment: at }) in ends.iter().enumerate() {
                let link_mbps = if at.link_mbps == 0 { f64::INFINITY } else { f64::from(at.link_mbps) };
                let port_mbps = f64::from(at.port_mbps.max(1));
                for (passage, mbps) in [
                    (Passage::Link(side, at.link), link_mbps),
                    (Passage::Port(side, *rail), port_mbps),
                    (Passage::Cable(side, at.cable), port_mbps),
                ] {
                    let at = known.iter().position(|other| *other == passage).unwrap_or_else(|| {
                        known.push(passage);
                        ways.capacity.push(mbps);
                        known.len() - 1
                    });
                    // A cable is as wide as the widest port on it.
                    ways.capacity[at] = ways.capacity[at].max(mbps);
                    ways.passes[way] |= 1 << at;
                    ways.alone[way] = ways.alone[way].min(mbps);
                }
            }
            ways.count = way + 1;
        }
        ways
    }

    /// All of them.
    pub fn all(&self) -> Set {
        (0xff_u16 >> (MAX_RAILS - self.count)) as Set
    }

    /// What a way carries while no other is used, in Mb/s.
    pub fn alone(&self, way: usize) -> f64 {
        self.alone[way % MAX_RAILS]
    }

    /// What each way of a set carries while all of the set are busy, in Mb/s, by max-min fairness: the rates of all grow
    /// together, and those whose passage is full stay where they are.
    pub fn even_rates(&self, set: Set) -> [f64; MAX_RAILS] {
        let mut rates = [0.0; MAX_RAILS];
        let mut left = self.capacity.clone();
        let mut growing = set & self.all();
        while growing != 0 {
            let on = |passage: usize| members(growing).filter(|way| self.passes[*way] >> passage & 1 == 1).count();
            let step = |passage: usize| match on(passage) {
                0 => f64::INFINITY,
                several => left[passage] / several as f64,
            };
            let step = (0..left.len()).map(step).fold(f64::INFINITY, f64::min);
            let mut full: u64 = 0;
            for (passage, (left, capacity)) in left.iter_mut().zip(&self.capacity).enumerate() {
                let several = on(passage);
                if several > 0 {
                    *left -= step * several as f64;
                    if *left <= 1e-6 * capacity {
                        full |= 1 << passage;
                    }
                }
            }
            for way in members(growing) {
                rates[way] += step;
            }
            growing = members(growing).filter(|way| self.passes[*way] & full == 0).fold(0, |set, way| set | 1 << way);
        }
        rates
    }

    /// The fewest of the `usable` ways that carry as much as the best set of them does, the earlier ones where it is
    /// the same. All of them when a single one would do: a second at work is what a slow one is told by.
    pub fn primaries(&self, usable: Set) -> Set {
        let usable = usable & self.all();
        let sum = |set: Set| self.even_rates(set).iter().sum::<f64>();
        let sets: Vec<(Set, f64)> = (1..=usable).filter(|set| set & !usable == 0).map(|set| (set, sum(set))).collect();
        let best = sets.iter().map(|(_, sum)| *sum).fold(0.0, f64::max);
        let good = sets.iter().filter(|(_, sum)| *sum >= AS_GOOD * best).map(|(set, _)| *set);
        match good.min_by_key(|set| (set.count_ones(), set.reverse_bits() ^ 0xff)) {
            Some(set) if set.count_ones() > 1 => set,
            _ => usable,
        }
    }

    /// What a way could carry beside others that carry `rates`, in the unit of those; `scale` turns Mb/s into it.
    #[inline]
    pub fn left_over(&self, way: usize, rates: &[f64; MAX_RAILS], used: Set, scale: f64) -> f64 {
        let mut passages = self.passes[way % MAX_RAILS];
        let mut least = f64::INFINITY;
        while passages != 0 {
            let at = passages.trailing_zeros() as usize;
            let taken: f64 = members(used).filter(|other| self.passes[*other] >> at & 1 == 1).map(|w| rates[w]).sum();
            least = least.min(self.capacity.get(at).map_or(0.0, |mbps| mbps * scale) - taken);
            passages &= passages - 1;
        }
        least.max(0.0)
    }
}

/// The ways of a set, by number.
#[inline]
pub fn members(set: Set) -> impl Iterator<Item = usize> {
    let mut left = set;
    std::iter::from_fn(move || {
        let way = left.trailing_zeros() as usize;
        left &= left.wrapping_sub(1);
        (way < MAX_RAILS).then_some(way)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rails by PCIe link, cable; 200 Gb/s ports on links of 112 Gb/s.
    fn spark(rails: &[(u8, u8)]) -> Vec<End> {
        let end = |(rail, &(link, cable)): (usize, &(u8, u8))| {
            let attachment = Attachment { link, link_mbps: 112_000, cable, port_mbps: 200_000 };
            End { rail: rail as u8, attachment }
        };
        rails.iter().enumerate().map(end).collect()
    }

    fn straight(ends: &[End]) -> Ways {
        Ways::new(&ends.iter().map(|end| [*end, *end]).collect::<Vec<_>>())
    }

    fn rounded(ways: &Ways, set: Set) -> Vec<u64> {
        ways.even_rates(set)[..ways.count].iter().map(|rate| rate.round() as u64).collect()
    }

    const TWO_CABLES: [(u8, u8); 4] = [(0, 0), (1, 0), (0, 1), (1, 1)];

    #[test]
    fn two_functions_of_one_link_are_not_two_rails_worth() {
        let ways = straight(&spark(&TWO_CABLES));
        assert_eq!(rounded(&ways, 0b1111), [56_000; 4]);
        assert_eq!(rounded(&ways, 0b0101), [56_000, 0, 56_000, 0]);
        assert_eq!(rounded(&ways, 0b0011), [100_000, 100_000, 0, 0], "one cable");
        assert_eq!(rounded(&ways, 0b1001), [112_000, 0, 0, 112_000], "the two that reach the ceiling");
        assert!((ways.alone(2) - 112_000.0).abs() < 1.0);
    }

    #[test]
    fn with_two_cables_two_rails_carry_the_job() {
        let ways = straight(&spark(&TWO_CABLES));
        assert_eq!(ways.primaries(0b1111), 0b1001);
        assert_eq!(ways.primaries(0b1110), 0b0110, "the first is lost");
        assert_eq!(ways.primaries(0b1100), 0b1100);
        assert_eq!(ways.primaries(0b0101), 0b0101, "one link: no spare, the two would tell of each other");
        assert_eq!(straight(&spark(&TWO_CABLES[..2])).primaries(0b11), 0b11, "one cable wants both twins");
    }

    #[test]
    fn equal_rails_with_nothing_shared_all_work() {
        let plain = |rail: u8| End {
            rail,
            attachment: Attachment { link: rail, link_mbps: 0, cable: rail, port_mbps: 10_000 },
        };
        let ways = straight(&[plain(0), plain(1), plain(2), plain(3)]);
        assert_eq!((ways.primaries(0b1111), rounded(&ways, 0b1111)), (0b1111, vec![10_000; 4]));
    }

    #[test]
    fn a_single_port_of_the_peer_is_shared() {
        let spark = spark(&TWO_CABLES);
        let port = End { rail: 0, attachment: Attachment { link: 0, link_mbps: 0, cable: 0, port_mbps: 100_000 } };
        let ways = Ways::new(&[[spark[0], port], [spark[1], port]]);
        assert_eq!(rounded(&ways, 0b11), [50_000, 50_000]);
        assert_eq!(ways.primaries(0b11), 0b11);
    }

    #[test]
    fn a_spare_has_what_the_others_leave() {
        let ways = straight(&spark(&TWO_CABLES));
        let rates = [112_000.0, 0.0, 0.0, 28_000.0, 0.0, 0.0, 0.0, 0.0];
        assert!(ways.left_over(2, &rates, 0b1001, 1.0) < 1.0);
        assert!((ways.left_over(1, &rates, 0b1001, 1.0) - 84_000.0).abs() < 1.0);
    }
}
