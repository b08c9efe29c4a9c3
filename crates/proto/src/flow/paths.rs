//! Expected rates of the paths between two hosts while all paths are busy.
//!
//! A path is a pair of rails, one on each side. On each side it passes a PCIe link, a port and a
//! cable: its passages. Several paths may share a passage and its bandwidth. For example, two rails
//! on one PCIe link together carry no more than one of them alone. [`Paths::even_rates`] gives each
//! path the rate that its narrowest passage allows.

use crate::wire::MAX_RAILS;
use crate::wire::fields::Attachment;
use crate::wire::ids::RailId;

/// Maximum number of passages: link, port and cable on each side of each path.
const PASSAGES: usize = 6 * MAX_RAILS;

/// The paths of one connection.
#[derive(Debug, Clone, Default)]
pub struct Paths {
    count: usize,
    /// Capacity of each passage, in Mb/s.
    capacity: Vec<f64>,
    /// For each path, the bit set of its passages: bit `n` is the passage of `capacity[n]`.
    passes: [u64; MAX_RAILS],
    /// Bit set of the paths that may never work ([`Pair::is_late`](super::pairing::Pair::is_late)).
    late: u8,
}

/// End of a path on one side.
#[derive(Debug, Clone, Copy)]
pub struct End {
    /// The rail's number on its host.
    pub rail: RailId,
    /// The rail's PCIe link, cable and port.
    pub attachment: Attachment,
}

#[derive(PartialEq, Eq, Clone, Copy)]
enum Passage {
    Link(usize, u8),
    Port(usize, RailId),
    Cable(usize, u8),
}

impl Paths {
    /// Builds the paths of at most [`MAX_RAILS`] pairs. The first end of each pair is this side's.
    pub fn new(pairs: &[[End; 2]]) -> Self {
        let mut paths = Self::default();
        let mut known: Vec<Passage> = Vec::with_capacity(PASSAGES);
        for (path, ends) in pairs.iter().take(MAX_RAILS).enumerate() {
            for (
                side,
                End {
                    rail,
                    attachment: at,
                },
            ) in ends.iter().enumerate()
            {
                let link_mbps = if at.link_mbps == 0 {
                    f64::INFINITY
                } else {
                    f64::from(at.link_mbps)
                };
                let port_mbps = f64::from(at.port_mbps.max(1));
                for (passage, mbps) in [
                    (Passage::Link(side, at.link), link_mbps),
                    (Passage::Port(side, *rail), port_mbps),
                    (Passage::Cable(side, at.cable), port_mbps),
                ] {
                    let at = known
                        .iter()
                        .position(|other| *other == passage)
                        .unwrap_or_else(|| {
                            known.push(passage);
                            paths.capacity.push(mbps);
                            known.len() - 1
                        });
                    // Several ports may share a cable. The cable is as fast as its fastest port.
                    paths.capacity[at] = paths.capacity[at].max(mbps);
                    paths.passes[path] |= 1 << at;
                }
            }
            paths.count = path + 1;
        }
        paths
    }

    /// Builds the paths of a connection. Those that are true in `late` may never work, and the
    /// expected rates of the others do not allow for them.
    pub fn with_late(pairs: &[[End; 2]], late: &[bool]) -> Self {
        let numbers = (0..MAX_RAILS).zip(late).filter(|(_, is_late)| **is_late);
        Self {
            late: numbers.fold(0, |late, (path, _)| late | 1 << path),
            ..Self::new(pairs)
        }
    }

    /// Returns the bit set of the late paths.
    pub fn late(&self) -> u8 {
        self.late
    }

    /// Returns the number of paths.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the rate of each path while all paths are busy, in Mb/s. A late path is busy only in
    /// the computation of its own rate.
    pub fn even_rates(&self) -> [f64; MAX_RAILS] {
        let mut rates = self.rates_with_late();
        if self.late != 0 {
            let in_time = (0..self.count).filter(|path| self.late >> path & 1 == 0);
            let alone = self.rates_of(in_time.clone().collect());
            in_time.for_each(|path| rates[path] = alone[path]);
        }
        rates
    }

    /// Returns the rate of each path while all paths are busy, also the late ones.
    pub fn rates_with_late(&self) -> [f64; MAX_RAILS] {
        self.rates_of((0..self.count).collect())
    }

    /// Returns the rates of the paths in `growing` while only these are busy. The rates are max-min
    /// fair: all grow together, and a path's rate stops growing when one of its passages is full.
    fn rates_of(&self, mut growing: Vec<usize>) -> [f64; MAX_RAILS] {
        let mut rates = [0.0; MAX_RAILS];
        let mut left = self.capacity.clone();
        while !growing.is_empty() {
            let on = |passage: usize| {
                growing
                    .iter()
                    .filter(|path| self.passes[**path] >> passage & 1 == 1)
                    .count() as f64
            };
            let steps = (0..left.len())
                .filter(|passage| on(*passage) > 0.0)
                .map(|passage| left[passage] / on(passage));
            let step = steps.fold(f64::INFINITY, f64::min);
            let mut full: u64 = 0;
            for (passage, (left, capacity)) in left.iter_mut().zip(&self.capacity).enumerate() {
                let several = on(passage);
                if several > 0.0 {
                    *left -= step * several;
                    // A link of unknown speed never fills.
                    if capacity.is_finite() && *left <= 1e-6 * capacity {
                        full |= 1 << passage;
                    }
                }
            }
            growing.iter().for_each(|path| rates[*path] += step);
            growing.retain(|path| self.passes[*path] & full == 0);
        }
        rates
    }
}

/// Returns true if another rail on `cable`, a cable of this side, would add no bandwidth. This is
/// so if the paths fill `cable`. It is also so if every path on `cable` leads to a full cable of
/// the peer. The first end of each pair is this side's. A cable counts as full at nine tenths of
/// its ports' line rate, because the line rate includes the framing, and the rate of a PCIe link
/// does not.
pub fn is_cable_full(pairs: &[[End; 2]], cable: u8) -> bool {
    let rates = Paths::new(pairs).even_rates();
    let is_full = |side: usize, cable: u8| {
        let on_it = || {
            pairs
                .iter()
                .zip(rates)
                .filter(|(ends, _)| ends[side].attachment.cable == cable)
        };
        let carried: f64 = on_it().map(|(_, rate)| rate).sum();
        let port_mbps = on_it()
            .map(|(ends, _)| ends[side].attachment.port_mbps)
            .max()
            .unwrap_or(0);
        carried >= 0.9 * f64::from(port_mbps)
    };
    let mut peers = pairs
        .iter()
        .filter(|[here, _]| here.attachment.cable == cable)
        .map(|[_, there]| there.attachment.cable);
    is_full(0, cable) || peers.all(|there| is_full(1, there))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rail(number: u8) -> RailId {
        RailId::new(number.into()).unwrap()
    }

    /// Returns rails with these PCIe links and cables: ports of 200 Gb/s on links of 112 Gb/s.
    fn spark(rails: &[(u8, u8)]) -> Vec<End> {
        let end = |(rail, &(link, cable)): (RailId, &(u8, u8))| {
            let attachment = Attachment {
                link,
                link_mbps: 112_000,
                cable,
                port_mbps: 200_000,
            };
            End { rail, attachment }
        };
        RailId::all(rails.len()).zip(rails).map(end).collect()
    }

    fn straight(ends: &[End]) -> Paths {
        Paths::new(&ends.iter().map(|end| [*end, *end]).collect::<Vec<_>>())
    }

    fn rounded(paths: &Paths) -> Vec<u64> {
        paths.even_rates()[..paths.count()]
            .iter()
            .map(|rate| rate.round() as u64)
            .collect()
    }

    const TWO_CABLES: [(u8, u8); 4] = [(0, 0), (1, 0), (0, 1), (1, 1)];

    #[test]
    fn two_functions_of_one_link_are_not_two_rails_worth() {
        assert_eq!(rounded(&straight(&spark(&TWO_CABLES))), [56_000; 4]);
        assert_eq!(rounded(&straight(&spark(&[(0, 0), (0, 1)]))), [56_000; 2]);
        assert_eq!(
            rounded(&straight(&spark(&[(0, 0), (1, 0)]))),
            [100_000; 2],
            "one cable"
        );
        assert_eq!(
            rounded(&straight(&spark(&[(0, 0), (1, 1)]))),
            [112_000; 2],
            "each has its own link and cable"
        );
        assert_eq!(
            rounded(&straight(&spark(&[(0, 0), (0, 1), (1, 1)]))),
            [56_000, 56_000, 112_000]
        );
    }

    #[test]
    fn equal_rails_without_shared_parts_carry_the_sum_of_their_ports() {
        let plain = |at: u8| End {
            rail: rail(at),
            attachment: Attachment {
                link: at,
                link_mbps: 0,
                cable: at,
                port_mbps: 10_000,
            },
        };
        assert_eq!(
            rounded(&straight(&[plain(0), plain(1), plain(2), plain(3)])),
            [10_000; 4]
        );
        assert_eq!(rounded(&straight(&[])), []);
    }

    #[test]
    fn a_slow_port_limits_no_other_where_links_are_unknown() {
        let port = |(at, port_mbps): (u8, u32)| End {
            rail: rail(at),
            attachment: Attachment {
                link: at,
                link_mbps: 0,
                cable: at,
                port_mbps,
            },
        };
        assert_eq!(
            rounded(&straight(
                &[(0, 10_000), (1, 25_000), (2, 100_000)].map(port)
            )),
            [10_000, 25_000, 100_000]
        );
    }

    #[test]
    fn a_cable_is_full_at_its_own_rate_or_at_the_peers_port() {
        let end = |number, link, cable, port_mbps| End {
            rail: rail(number),
            attachment: Attachment {
                link,
                link_mbps: 112_000,
                cable,
                port_mbps,
            },
        };
        let one = end(0, 0, 0, 200_000);
        assert!(!is_cable_full(&[[one, one]], 0), "a twin is missing");
        assert!(is_cable_full(
            &[[one, one], [end(1, 1, 0, 200_000), end(1, 1, 0, 200_000)]],
            0
        ));
        assert!(
            is_cable_full(&[[one, end(0, 0, 0, 100_000)]], 0),
            "the peer's port has 100 Gb/s"
        );
        assert!(
            is_cable_full(&[[end(0, 0, 0, 100_000), one]], 0),
            "the cable runs at 100 Gb/s"
        );
        let elsewhere = end(1, 1, 1, 200_000);
        assert!(
            is_cable_full(&[[one, end(0, 0, 0, 100_000)], [elsewhere, elsewhere]], 0),
            "cable 0 is full although another cable is free"
        );
        assert!(!is_cable_full(
            &[[one, end(0, 0, 0, 100_000)], [elsewhere, elsewhere]],
            1
        ));
        let [first, second] = [end(0, 0, 0, 200_000), end(1, 1, 0, 200_000)];
        assert!(
            is_cable_full(&[[one, first], [elsewhere, second]], 1),
            "both cables lead to the peer's only one"
        );
    }

    #[test]
    fn a_late_path_takes_nothing_from_the_expected_rates_of_the_others() {
        let ends = spark(&TWO_CABLES).into_iter().map(|end| [end, end]);
        let late = [false, false, true, true];
        let paths = Paths::with_late(&ends.collect::<Vec<_>>(), &late);
        assert_eq!(rounded(&paths), [100_000, 100_000, 56_000, 56_000]);
    }

    #[test]
    fn a_single_port_of_the_peer_is_shared() {
        let spark = spark(&TWO_CABLES);
        let port = End {
            rail: rail(0),
            attachment: Attachment {
                link: 0,
                link_mbps: 0,
                cable: 0,
                port_mbps: 100_000,
            },
        };
        assert_eq!(
            rounded(&Paths::new(&[[spark[0], port], [spark[1], port]])),
            [50_000, 50_000]
        );
    }
}
