//! What the links let through: the limit that results are compared with, always of payload.
//!
//! A profile of the software fabric gives its links and cables in payload. A port's speed counts headers too, so what RoCE v2
//! leaves of it is the limit.

/// Around the payload of each RoCE v2 packet: preamble and gap 20, Ethernet 14, IPv4 20, UDP 8, base transport header 12,
/// invariant CRC 4, frame check 4 (IEEE 802.3; InfiniBand Architecture annex A17).
const HEADER_BYTES: f64 = 82.0;
/// The payload of a packet at the largest path MTU.
const PACKET_BYTES: f64 = 4096.0;

/// What RoCE v2 leaves for payload of a port's speed, at the largest path MTU.
pub fn payload_of_port(mbps: f64) -> f64 {
    mbps * PACKET_BYTES / (PACKET_BYTES + HEADER_BYTES)
}

/// The wiring between two machines that are alike. Rates are in Mb/s of payload; 0 is no limit.
#[derive(Debug, Clone, PartialEq)]
pub struct Wiring {
    /// PCIe links.
    pub links_mbps: Vec<f64>,
    /// Cables.
    pub cables_mbps: Vec<f64>,
    /// Rails.
    pub(crate) rails: Vec<Rail>,
}

/// A rail: the path over one link and one cable.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rail {
    /// Index of its link.
    pub link: usize,
    /// Index of its cable.
    pub cable: usize,
    /// Its own rate in Mb/s; 0: no limit of its own.
    pub line_mbps: f64,
    /// The part of its rate that it has at the moment; 1 for all.
    pub factor: f64,
    /// One way, in microseconds.
    pub latency_us: f64,
}

/// What a connection can carry at best.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Limit {
    /// Payload in each direction in Mb/s; none: no limit is known.
    pub payload_mbps: Option<f64>,
    /// One way, in microseconds.
    pub latency_us: f64,
}

impl Limit {
    /// The greatest bandwidth in GB/s (10^9 bytes a second).
    pub fn gb_s(&self) -> Option<f64> {
        self.payload_mbps.map(|mbps| mbps / 8e3)
    }

    /// The shortest time that a message of `bytes` takes, in microseconds.
    pub fn one_way_us(&self, bytes: usize) -> Option<f64> {
        // Mb/s are bits per microsecond.
        self.payload_mbps.map(|mbps| self.latency_us + bytes as f64 * 8.0 / mbps)
    }

    /// The most messages of `bytes` a second.
    pub fn messages_per_s(&self, bytes: usize) -> Option<f64> {
        self.payload_mbps.map(|mbps| mbps * 1e6 / 8.0 / bytes as f64)
    }
}

impl Wiring {
    /// The limit of all rails together.
    pub fn limit(&self) -> Limit {
        let payload_mbps = Some(self.max_flow_mbps()).filter(|mbps| mbps.is_finite());
        let latency_us = self.rails.iter().map(|rail| rail.latency_us).fold(f64::INFINITY, f64::min);
        Limit { payload_mbps, latency_us: if latency_us.is_finite() { latency_us } else { 0.0 } }
    }

    /// The most that flows from links over rails to cables. By the theorem of Ford and Fulkerson that is the least cut; with
    /// the few links and cables that a machine has, all cuts are looked at.
    fn max_flow_mbps(&self) -> f64 {
        let (links, cables) = (self.links_mbps.len(), self.cables_mbps.len());
        (0..1_u32 << (links + cables)).map(|cut| self.cut_mbps(cut)).fold(f64::INFINITY, f64::min)
    }

    /// What goes through a cut: the links and cables whose bit is set are cut themselves, and so is each rail between two
    /// that are not.
    fn cut_mbps(&self, cut: u32) -> f64 {
        let shared = self.links_mbps.iter().chain(&self.cables_mbps);
        let shared: f64 = shared.enumerate().filter(|(at, _)| is_cut(cut, *at)).map(|(_, mbps)| unlimited(*mbps)).sum();
        let whole = |rail: &&Rail| !is_cut(cut, rail.link) && !is_cut(cut, self.links_mbps.len() + rail.cable);
        shared + self.rails.iter().filter(whole).map(|rail| self.rail_mbps(rail)).sum::<f64>()
    }

    /// A rail that is slowed carries that part of what it could carry alone.
    fn rail_mbps(&self, rail: &Rail) -> f64 {
        let alone = [rail.line_mbps, self.links_mbps[rail.link], self.cables_mbps[rail.cable]];
        match rail.factor < 1.0 {
            true => rail.factor * alone.into_iter().map(unlimited).fold(f64::INFINITY, f64::min),
            false => unlimited(rail.line_mbps),
        }
    }
}

fn is_cut(cut: u32, at: usize) -> bool {
    cut >> at & 1 == 1
}

fn unlimited(mbps: f64) -> f64 {
    if mbps > 0.0 { mbps } else { f64::INFINITY }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rail(link: usize, cable: usize, factor: f64) -> Rail {
        Rail { link, cable, line_mbps: 200.0, factor, latency_us: 1.4 }
    }

    fn spark(rails: Vec<Rail>, cables: usize) -> Wiring {
        Wiring { links_mbps: vec![112.0; 2], cables_mbps: vec![195.0; cables], rails }
    }

    /// By hand: two links of 112 through one cable of 195; the same through two cables; one rail at a quarter of 112.
    #[test]
    fn the_limit_is_the_narrowest_place() {
        let payload = |wiring: &Wiring| wiring.limit().payload_mbps;
        assert_eq!(payload(&spark(vec![rail(0, 0, 1.0), rail(1, 0, 1.0)], 1)), Some(195.0));
        let all = |factor| vec![rail(0, 0, factor), rail(0, 1, 1.0), rail(1, 0, 1.0), rail(1, 1, 1.0)];
        assert_eq!(payload(&spark(all(1.0), 2)), Some(224.0));
        // The link's other rail takes over.
        assert_eq!(payload(&spark(all(0.25), 2)), Some(224.0));
        assert_eq!(payload(&spark(vec![rail(0, 0, 0.25), rail(1, 0, 1.0)], 1)), Some(28.0 + 112.0));
        assert_eq!(payload(&spark(vec![rail(0, 0, 1.0)], 1)), Some(112.0));
    }

    #[test]
    fn no_limit_is_none() {
        let mut open = spark(vec![rail(0, 0, 1.0)], 1);
        (open.links_mbps[0], open.cables_mbps[0], open.rails[0].line_mbps) = (0.0, 0.0, 0.0);
        assert_eq!(open.limit(), Limit { payload_mbps: None, latency_us: 1.4 });
        assert_eq!(open.limit().gb_s(), None);
    }

    /// By hand: 4096 of 4178 bytes.
    #[test]
    fn a_ports_speed_counts_headers() {
        assert!((payload_of_port(200_000.0) - 196_074.7).abs() < 0.1);
    }

    /// By hand: 8000 Mb/s are a byte a nanosecond.
    #[test]
    fn a_limit_in_other_units() {
        let limit = Limit { payload_mbps: Some(8_000.0), latency_us: 2.0 };
        assert_eq!((limit.gb_s(), limit.one_way_us(1000)), (Some(1.0), Some(3.0)));
        assert_eq!(limit.messages_per_s(1000), Some(1e6));
    }
}
