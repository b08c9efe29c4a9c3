//! Computes the limit that results are compared with: the highest payload rate that rails, cables
//! and PCIe links allow.
//!
//! The rates in a software fabric's profile are payload rates. A port's speed includes headers, so
//! the port's limit is the fraction of its speed that RoCE v2 leaves for payload.

use softverbs::profile::{Profile, RailSpec};

/// Bytes around the payload of each RoCE v2 packet: preamble and gap 20, Ethernet 14, IPv4 20, UDP
/// 8, base transport header 12, invariant CRC 4, frame check 4 (IEEE 802.3; InfiniBand Architecture
/// annex A17).
const HEADER_BYTES: f64 = 82.0;
/// Payload bytes of a packet at the largest path MTU.
const PACKET_BYTES: f64 = 4096.0;

/// Returns the payload rate in Mb/s of a port whose speed is `mbps`, with RoCE v2 at the largest
/// path MTU.
pub fn payload_of_port(mbps: f64) -> f64 {
    mbps * PACKET_BYTES / (PACKET_BYTES + HEADER_BYTES)
}

/// Highest payload rate and lowest latency of a connection.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Limit {
    /// Payload rate in each direction in Mb/s; `None` if no limit is known.
    pub payload_mbps: Option<f64>,
    /// One-way latency in microseconds.
    pub latency_us: f64,
}

impl Limit {
    /// Returns the greatest bandwidth in GB/s (10^9 bytes per second).
    pub fn gb_s(&self) -> Option<f64> {
        self.payload_mbps.map(|mbps| mbps / 8e3)
    }

    /// Returns the shortest time of a message of `bytes`, in microseconds.
    pub fn one_way_us(&self, bytes: usize) -> Option<f64> {
        // 1 Mb/s is 1 bit per microsecond.
        self.payload_mbps
            .map(|mbps| self.latency_us + bytes as f64 * 8.0 / mbps)
    }

    /// Returns the greatest number of messages of `bytes` per second.
    pub fn messages_per_s(&self, bytes: usize) -> Option<f64> {
        self.payload_mbps
            .map(|mbps| mbps * 1e6 / 8.0 / bytes as f64)
    }
}

/// Returns the limit of several rails of a profile together. Each rail is given as its index and a
/// factor: the fraction of its rate that the rail keeps (1: the whole rate). A rate of 0 in the
/// profile means that there is no limit.
pub fn of_rails(profile: &Profile, rails: &[(usize, f64)]) -> Limit {
    let Profile { links, cables, .. } = profile;
    // The maximum flow from links over rails to cables equals the capacity of the minimum cut
    // (theorem of Ford and Fulkerson). A machine has few links and cables, so all cuts are
    // computed.
    let cuts = (0..1_u32 << (links.len() + cables.len())).map(|cut| cut_mbps(profile, rails, cut));
    let mbps = cuts.fold(f64::INFINITY, f64::min);
    let latency_us = rails
        .iter()
        .map(|(at, _)| profile.rails[*at].latency_ns as f64 / 1e3)
        .reduce(f64::min);
    Limit {
        payload_mbps: Some(mbps).filter(|mbps| mbps.is_finite()),
        latency_us: latency_us.unwrap_or_default(),
    }
}

/// Returns the capacity of a cut in Mb/s. Each bit of `cut` is for a link or a cable, the links
/// first. A set bit means that this link or cable is cut. A rail is cut if neither its link nor its
/// cable is cut.
fn cut_mbps(profile: &Profile, rails: &[(usize, f64)], cut: u32) -> f64 {
    let Profile { links, cables, .. } = profile;
    let is_cut = |at: usize| cut >> at & 1 == 1;
    let shared = links
        .iter()
        .map(|link| link.payload_mbps)
        .chain(cables.iter().map(|cable| cable.payload_mbps));
    let shared: f64 = shared
        .enumerate()
        .filter(|(at, _)| is_cut(*at))
        .map(|(_, mbps)| zero_is_infinite(mbps))
        .sum();
    let rails = rails
        .iter()
        .map(|(at, factor)| (&profile.rails[*at], *factor));
    let cut_rails =
        rails.filter(|(rail, _)| !is_cut(rail.link) && !is_cut(links.len() + rail.cable));
    shared
        + cut_rails
            .map(|(rail, factor)| rail_mbps(profile, rail, factor))
            .sum::<f64>()
}

/// Returns a rail's own limit in Mb/s: its line rate, except for a slowed rail (`factor` below 1).
/// A slowed rail carries `factor` times the rate that it could reach if no other rail sent.
fn rail_mbps(profile: &Profile, rail: &RailSpec, factor: f64) -> f64 {
    let limits_mbps = [
        rail.line_mbps,
        profile.links[rail.link].payload_mbps,
        profile.cables[rail.cable].payload_mbps,
    ];
    match factor < 1.0 {
        true => {
            factor
                * limits_mbps
                    .into_iter()
                    .map(zero_is_infinite)
                    .fold(f64::INFINITY, f64::min)
        }
        false => zero_is_infinite(rail.line_mbps),
    }
}

fn zero_is_infinite(mbps: f64) -> f64 {
    if mbps > 0.0 { mbps } else { f64::INFINITY }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Profile with rails of 200 Mb/s, links of 112 Mb/s and cables of 195 Mb/s, or without limits.
    fn spark(rails: &[(usize, usize)], is_limited: bool) -> Profile {
        let rate = |mbps: u32| if is_limited { mbps } else { 0 };
        let mut text = String::new();
        for at in 0..2 {
            text += &format!(
                "link L{at} pci=000{at}:01:00 gts=32 width=4 payload={}\n",
                rate(112)
            );
            text += &format!("cable c{at} payload={}\n", rate(195));
        }
        for (at, (link, cable)) in rails.iter().enumerate() {
            text += &format!(
                "rail r{at} netdev=e{at} port=p{cable} link=L{link} cable=c{cable} function={cable} "
            );
            text += &format!("line={} qp=1 latency=1400 speed=200\n", rate(200));
        }
        Profile::parse("file", &text).unwrap()
    }

    /// Limits computed by hand, for two links of 112 Mb/s: with one cable of 195 Mb/s, with two
    /// cables, and with a rail slowed to a quarter of 112 Mb/s.
    #[test]
    fn the_limit_is_the_minimum_cut() {
        let one = spark(&[(0, 0), (1, 0)], true);
        let two = spark(&[(0, 0), (0, 1), (1, 0), (1, 1)], true);
        let payload =
            |profile: &Profile, rails: &[(usize, f64)]| of_rails(profile, rails).payload_mbps;
        assert_eq!(payload(&one, &[(0, 1.0), (1, 1.0)]), Some(195.0));
        let all = |factor| [(0, factor), (1, 1.0), (2, 1.0), (3, 1.0)];
        assert_eq!(payload(&two, &all(1.0)), Some(224.0));
        // The other rail on the same link carries what the slowed rail does not.
        assert_eq!(payload(&two, &all(0.25)), Some(224.0));
        assert_eq!(payload(&one, &[(0, 0.25), (1, 1.0)]), Some(28.0 + 112.0));
        assert_eq!(payload(&one, &[(0, 1.0)]), Some(112.0));
        assert_eq!(
            payload(&two, &[(0, 1.0), (2, 1.0)]),
            Some(195.0),
            "the limit is the only cable in use"
        );
    }

    #[test]
    fn rates_of_0_mean_no_limit() {
        let open = of_rails(&spark(&[(0, 0)], false), &[(0, 1.0)]);
        assert_eq!(
            (open, open.gb_s()),
            (
                Limit {
                    payload_mbps: None,
                    latency_us: 1.4
                },
                None
            )
        );
    }

    /// Computed by hand: 4096 of 4178 bytes are payload.
    #[test]
    fn payload_of_port_excludes_headers() {
        assert!((payload_of_port(200_000.0) - 196_074.7).abs() < 0.1);
    }

    /// 8000 Mb/s are one byte per nanosecond.
    #[test]
    fn a_limit_converts_to_gb_s_latency_and_message_rate() {
        let limit = Limit {
            payload_mbps: Some(8_000.0),
            latency_us: 2.0,
        };
        assert_eq!(
            (limit.gb_s(), limit.one_way_us(1000)),
            (Some(1.0), Some(3.0))
        );
        assert_eq!(limit.messages_per_s(1000), Some(1e6));
    }
}
