//! Bandwidth of merged rails.

use super::{PcieLink, Rail};

/// Overhead of a RoCE v2 packet, in bytes: preamble and gap 20, Ethernet 14, IPv4 20, UDP 8, base
/// transport header 12, invariant CRC 4, frame check 4 (IEEE 802.3; InfiniBand Architecture annex
/// A17). The sum leaves out the RDMA header, because only a message's first packet has one.
pub(super) const FRAMING_BYTES: u64 = 82;

/// Bandwidth of a set of rails in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Bandwidth in Mb/s.
    pub mbps: u32,
    /// The limit that applies.
    pub limit: Limit,
}

/// What limits a capacity. If cables and PCIe links each limit some of the flow, the limit that
/// applies to more of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// There are no rails.
    Nothing,
    /// The cables and their ports.
    Cables,
    /// The PCIe links.
    PcieLinks,
}

/// Computes the largest flow from the PCIe links through the rails onto the cables.
///
/// In the flow's graph, a rail is an edge from its link to its cable. The edge's capacity is the
/// lesser of the port's speed and the cable's rate. Twins share a cable and functions of one slot
/// share a link, so the sum of links, rails or cables alone is too high. By the max-flow min-cut
/// theorem, the flow equals the cheapest cut. The function tries each set of cables as the cables
/// that are cut. The cost is the rates of these cables, plus for every link the lesser of its own
/// rate and the summed capacities of its rails to other cables. The sets have only cables with
/// several rails: the capacity of a lone rail on a cable is already limited by that cable.
///
/// `cable_mbps` returns the rate of a rail's cable: line rate, or payload rate after framing. If it
/// differs among the rails of one cable, the highest rate counts.
pub(super) fn capacity(
    rails: &[Rail],
    links: &[PcieLink],
    cable_mbps: impl Fn(&Rail) -> u32,
) -> Capacity {
    let cables: Vec<CableRails> = cables(rails, &cable_mbps);
    let shared: Vec<usize> = (0..cables.len())
        .filter(|c| cables[*c].rails > 1)
        .take(MAX_SHARED_CABLES)
        .collect();
    let mut best = CapacityCut {
        cables: u64::MAX,
        links: 0,
    };
    for choice in 0_u32..1 << shared.len() {
        let is_cut = |cable: usize| {
            shared
                .iter()
                .position(|c| *c == cable)
                .is_some_and(|bit| choice >> bit & 1 == 1)
        };
        let cut_cables = (0..cables.len())
            .filter(|c| is_cut(*c))
            .map(|c| u64::from(cables[c].mbps));
        let mut cut = CapacityCut {
            cables: cut_cables.sum(),
            links: 0,
        };
        for (at, link) in links.iter().enumerate() {
            let left = rails
                .iter()
                .filter(|rail| rail.link == at && !is_cut(rail.cable));
            let wires: u64 = left
                .map(|rail| u64::from(rail.speed_mbps.min(cables[rail.cable].mbps)))
                .sum();
            match link.payload_mbps.map(u64::from) {
                Some(payload) if payload < wires => cut.links += payload,
                _ => cut.cables += wires,
            }
        }
        if cut.total() < best.total() {
            best = cut;
        }
    }
    Capacity {
        mbps: u32::try_from(best.total()).unwrap_or(u32::MAX),
        limit: best.limit(),
    }
}

/// Largest number of cables that the sets of [`capacity`] are made of: 12 cables have 2^12 sets. A
/// Spark has two cables with several rails.
const MAX_SHARED_CABLES: usize = 12;

struct CableRails {
    mbps: u32,
    rails: usize,
}

struct CapacityCut {
    cables: u64,
    links: u64,
}

impl CapacityCut {
    fn total(&self) -> u64 {
        self.cables.saturating_add(self.links)
    }

    fn limit(&self) -> Limit {
        match self.total() {
            0 => Limit::Nothing,
            _ if self.cables >= self.links => Limit::Cables,
            _ => Limit::PcieLinks,
        }
    }
}

fn cables(rails: &[Rail], cable_mbps: &impl Fn(&Rail) -> u32) -> Vec<CableRails> {
    let count = rails.iter().map(|rail| rail.cable + 1).max().unwrap_or(0);
    let of = |cable: usize| rails.iter().filter(move |rail| rail.cable == cable);
    (0..count)
        .map(|c| CableRails {
            mbps: of(c).map(cable_mbps).max().unwrap_or(0),
            rails: of(c).count(),
        })
        .collect()
}
