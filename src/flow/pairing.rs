//! Which rail of one side talks to which rail of the other.
//!
//! Pure. Rails with addresses in one subnet can talk. A rail that has only its link-local address (a common layout
//! gives an address to one twin of a cable alone) is paired with the peer's rail of the same cable; whether that
//! works is left to the probe that follows on every pair. Two rails that are a pair stay one: when they return after a loss, only
//! their addresses are chosen anew.

use crate::wire::MAX_RAILS;
use crate::wire::fields::{Address, RailAdvert};
use std::net::Ipv6Addr;

/// One rail of each side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pair {
    /// Index into the connecting side's rails.
    pub connector: usize,
    /// Index into the accepting side's rails.
    pub acceptor: usize,
    /// The connecting side's address.
    pub connector_gid: [u8; 16],
    /// The accepting side's address.
    pub acceptor_gid: [u8; 16],
    /// The smaller path MTU.
    pub mtu_bytes: u32,
    /// The smaller speed.
    pub speed_mbps: u32,
    /// Whether both rails can be used now. If not, the pair is for later.
    pub is_usable: bool,
}

impl Pair {
    fn of((ci, c): (usize, &RailAdvert), (ai, a): (usize, &RailAdvert), (connector_gid, acceptor_gid): Gids) -> Self {
        let (mtu_bytes, speed_mbps) = (c.mtu_bytes.min(a.mtu_bytes), c.speed_mbps.min(a.speed_mbps));
        let is_usable = c.is_usable && a.is_usable;
        Self { connector: ci, acceptor: ai, connector_gid, acceptor_gid, mtu_bytes, speed_mbps, is_usable }
    }
}

/// Pairs the rails; by the connecting side's order, at most [`MAX_RAILS`]. Those that can be used now come first; a rail that is lost
/// gets one of what is left, for later.
pub fn pair(connector: &[RailAdvert], acceptor: &[RailAdvert]) -> Vec<Pair> {
    let mut found = Found { connector, acceptor, pairs: Vec::new() };
    found.pair_up(|c, a| c.is_usable && a.is_usable);
    found.pair_up(|_, _| true);
    let mut pairs = found.pairs;
    pairs.truncate(MAX_RAILS);
    pairs.sort_by_key(|pair| (pair.connector, pair.acceptor));
    pairs
}

/// The same two rails as a pair, by the addresses that they have now. Which cable they hang on was settled when the connection came up,
/// by what the other rails showed, and cannot be seen from these two alone: a cable may join ports of different names.
///
/// `attempt` counts the attempts since they last carried, from 1. Every second one goes by the link-local addresses where both
/// interfaces are seen to have one (such an address has a prefix): twins can answer ARP for each other, so that what is sent to an IPv4
/// address reaches the wrong one, while a neighbour solicitation is answered by the interface alone that has the address.
pub fn pair_again(connector: &RailAdvert, acceptor: &RailAdvert, attempt: u32) -> Option<Pair> {
    let in_subnet = same_subnet(connector, acceptor);
    let gids = match own_link_local(connector, acceptor) {
        Some(gids) if attempt.is_multiple_of(2) => gids,
        _ => in_subnet.or_else(|| both_link_local(connector, acceptor))?,
    };
    Some(Pair::of((0, connector), (0, acceptor), gids))
}

/// Both sides' rails and addresses, for the error that says why nothing could be paired.
pub fn describe(rails: &[RailAdvert]) -> String {
    if rails.is_empty() {
        return "no rail".to_owned();
    }
    let one = |rail: &RailAdvert| {
        let addresses: Vec<String> = rail.addresses.iter().map(describe_address).collect();
        format!("{} ({})", rail.name, addresses.join(", "))
    };
    rails.iter().map(one).collect::<Vec<_>>().join("; ")
}

fn describe_address(address: &Address) -> String {
    let ip = Ipv6Addr::from(address.gid).to_canonical();
    match address.prefix {
        Some(prefix) if ip.is_ipv4() => format!("{ip}/{}", prefix.saturating_sub(96)),
        Some(prefix) => format!("{ip}/{prefix}"),
        None => ip.to_string(),
    }
}

struct Found<'a> {
    connector: &'a [RailAdvert],
    acceptor: &'a [RailAdvert],
    pairs: Vec<Pair>,
}

type Gids = ([u8; 16], [u8; 16]);

impl Found<'_> {
    /// Adds pairs of rails that `allowed` admits.
    fn pair_up(&mut self, allowed: impl Fn(&RailAdvert, &RailAdvert) -> bool) {
        let before = self.pairs.len();
        let in_subnets = self.candidates(same_subnet, &allowed);
        self.take_unpaired(&in_subnets);
        let by_cable = {
            let alone = |c: &RailAdvert, a: &RailAdvert| allowed(c, a) && (only_link_local(c) || only_link_local(a));
            let mut candidates = self.candidates(both_link_local, alone);
            candidates.retain(|candidate| self.same_cable(candidate));
            candidates
        };
        self.take_unpaired(&by_cable);
        self.take_spare_speed(&in_subnets);
        // What is beyond the limit is to be the last, by the order of the rails.
        self.pairs[before..].sort_by_key(|pair| (pair.connector, pair.acceptor));
    }

    /// All pairs that `gids` finds addresses for, the likeliest first: the same port of both machines, then by place.
    fn candidates(
        &self,
        gids: impl Fn(&RailAdvert, &RailAdvert) -> Option<Gids>,
        allowed: impl Fn(&RailAdvert, &RailAdvert) -> bool,
    ) -> Vec<Pair> {
        let mut all = Vec::new();
        for (ci, c) in self.connector.iter().enumerate() {
            for (ai, a) in self.acceptor.iter().enumerate() {
                if let Some(gids) = gids(c, a).filter(|_| allowed(c, a)) {
                    all.push(Pair::of((ci, c), (ai, a), gids));
                }
            }
        }
        all.sort_by_key(|p| {
            let other_port = self.connector[p.connector].phys_port != self.acceptor[p.acceptor].phys_port;
            (other_port, p.connector.abs_diff(p.acceptor), p.connector, p.acceptor)
        });
        all
    }

    fn connector_paired(&self, index: usize) -> bool {
        self.pairs.iter().any(|pair| pair.connector == index)
    }

    fn acceptor_paired(&self, index: usize) -> bool {
        self.pairs.iter().any(|pair| pair.acceptor == index)
    }

    fn take_unpaired(&mut self, candidates: &[Pair]) {
        for candidate in candidates {
            if !self.connector_paired(candidate.connector) && !self.acceptor_paired(candidate.acceptor) {
                self.pairs.push(candidate.clone());
            }
        }
    }

    /// Whether the two rails hang on one cable: as their twins' pairs show, else by the port's name.
    fn same_cable(&self, candidate: &Pair) -> bool {
        let (c, a) = (&self.connector[candidate.connector], &self.acceptor[candidate.acceptor]);
        let mut known =
            self.pairs.iter().map(|p| (cable(&self.connector[p.connector]), cable(&self.acceptor[p.acceptor])));
        match known.find(|(of_c, of_a)| *of_c == cable(c) || *of_a == cable(a)) {
            Some((of_c, of_a)) => of_c == cable(c) && of_a == cable(a),
            None => c.phys_port == a.phys_port,
        }
    }

    /// A fast rail serves several slower ones of the other side, while it has speed to spare for at least half of one.
    fn take_spare_speed(&mut self, candidates: &[Pair]) {
        for candidate in candidates {
            let (c_paired, a_paired) =
                (self.connector_paired(candidate.connector), self.acceptor_paired(candidate.acceptor));
            let used = |of_connector: bool| -> u32 {
                let same = |p: &&Pair| {
                    if of_connector { p.connector == candidate.connector } else { p.acceptor == candidate.acceptor }
                };
                self.pairs.iter().filter(same).map(|p| p.speed_mbps).sum()
            };
            let (c, a) = (&self.connector[candidate.connector], &self.acceptor[candidate.acceptor]);
            let spare = match (c_paired, a_paired) {
                (true, false) => c.speed_mbps.saturating_sub(used(true)).min(a.speed_mbps),
                (false, true) => a.speed_mbps.saturating_sub(used(false)).min(c.speed_mbps),
                _ => continue,
            };
            let wanted = if c_paired { a.speed_mbps } else { c.speed_mbps };
            if spare > 0 && spare >= wanted / 2 {
                self.pairs.push(Pair { speed_mbps: spare, ..candidate.clone() });
            }
        }
    }
}

fn cable(rail: &RailAdvert) -> u8 {
    rail.attachment.cable
}

fn is_link_local(gid: &[u8; 16]) -> bool {
    Ipv6Addr::from(*gid).is_unicast_link_local()
}

fn only_link_local(rail: &RailAdvert) -> bool {
    rail.addresses.iter().all(|address| is_link_local(&address.gid))
}

fn both_link_local(c: &RailAdvert, a: &RailAdvert) -> Option<Gids> {
    let of = |rail: &RailAdvert| rail.addresses.iter().map(|x| x.gid).find(is_link_local);
    Some((of(c)?, of(a)?))
}

/// Link-local addresses that an interface of each side is seen to have.
fn own_link_local(c: &RailAdvert, a: &RailAdvert) -> Option<Gids> {
    let is_own = |address: &&Address| address.prefix.is_some() && is_link_local(&address.gid);
    let of = |rail: &RailAdvert| rail.addresses.iter().find(is_own).map(|address| address.gid);
    Some((of(c)?, of(a)?))
}

fn same_subnet(c: &RailAdvert, a: &RailAdvert) -> Option<Gids> {
    let pairs = c.addresses.iter().flat_map(|ours| a.addresses.iter().map(move |theirs| (ours, theirs)));
    let mut matching = pairs.filter(|(ours, theirs)| in_one_subnet(ours, theirs));
    matching.next().map(|(ours, theirs)| (ours.gid, theirs.gid))
}

fn in_one_subnet(one: &Address, other: &Address) -> bool {
    if is_link_local(&one.gid) || is_link_local(&other.gid) {
        return false;
    }
    let (x, y) = (Ipv6Addr::from(one.gid), Ipv6Addr::from(other.gid));
    let ipv4 = x.to_ipv4_mapped().is_some();
    if ipv4 != y.to_ipv4_mapped().is_some() {
        return false;
    }
    // Where no interface shows the prefix (a port lent to a container without its netdev): a /24, and a /64 for IPv6.
    let usual = if ipv4 { 120 } else { 64 };
    let prefix = match (one.prefix, other.prefix) {
        (Some(p), Some(q)) => p.max(q),
        (Some(p), None) | (None, Some(p)) => p,
        (None, None) => usual,
    };
    let host_bits = 128 - u32::from(prefix.min(128));
    x.to_bits().checked_shr(host_bits).unwrap_or(0) == y.to_bits().checked_shr(host_bits).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::fields::Attachment;

    fn rail(name: &str, port: &str, cable: u8, speed_mbps: u32, addresses: &[&str]) -> RailAdvert {
        let address = |text: &&str| {
            let (ip, prefix) =
                text.split_once('/').map_or((*text, None), |(ip, p)| (ip, Some(p.parse::<u8>().unwrap())));
            match ip.parse().unwrap() {
                std::net::IpAddr::V4(v4) => {
                    Address { gid: v4.to_ipv6_mapped().octets(), prefix: prefix.map(|p| p + 96) }
                }
                std::net::IpAddr::V6(v6) => Address { gid: v6.octets(), prefix },
            }
        };
        RailAdvert {
            name: name.into(),
            phys_port: port.into(),
            attachment: Attachment { link: 0, link_mbps: 0, cable, port_mbps: speed_mbps },
            speed_mbps,
            mtu_bytes: 4096,
            addresses: addresses.iter().map(address).collect(),
            is_usable: true,
        }
    }

    fn indices(connector: &[RailAdvert], acceptor: &[RailAdvert]) -> Vec<(usize, usize)> {
        pair(connector, acceptor).iter().map(|p| (p.connector, p.acceptor)).collect()
    }

    fn spark(n: u8) -> Vec<RailAdvert> {
        let ip = |net: u8| format!("192.168.{net}.{n}/24");
        vec![
            rail("f0", "p0", 0, 100_000, &["fe80::1/64", &ip(100)]),
            rail("P2f0", "p0", 0, 100_000, &["fe80::2/64", &ip(101)]),
            rail("f1", "p1", 1, 100_000, &["fe80::3/64", &ip(102)]),
            rail("P2f1", "p1", 1, 100_000, &["fe80::4/64", &ip(103)]),
        ]
    }

    #[test]
    fn subnets_decide_whatever_the_order() {
        assert_eq!(indices(&spark(1), &spark(2)), [(0, 0), (1, 1), (2, 2), (3, 3)]);
        let mut turned = spark(2);
        turned.reverse();
        assert_eq!(indices(&spark(1), &turned), [(0, 3), (1, 2), (2, 1), (3, 0)]);
        assert_eq!(indices(&spark(1)[..2], &spark(2)), [(0, 0), (1, 1)]);
        assert_eq!(indices(&spark(1)[1..2], &spark(2)), [(0, 1)]);
    }

    #[test]
    fn a_rail_of_another_subnet_is_not_reached_by_its_link_local_address() {
        let far = vec![rail("x", "p0", 0, 100_000, &["fe80::9/64", "10.0.0.1/24"])];
        assert_eq!(indices(&spark(1), &far), []);
        assert!(describe(&far).contains("x (fe80::9/64, 10.0.0.1/24)"), "{}", describe(&far));
    }

    #[test]
    fn the_twin_without_an_address_goes_with_its_cable() {
        let bare = |n: u8| {
            let mut rails = spark(n);
            rails[1].addresses.truncate(1);
            rails[3].addresses.truncate(1);
            rails
        };
        assert_eq!(indices(&bare(1), &bare(2)), [(0, 0), (1, 1), (2, 2), (3, 3)]);
        let pairs = pair(&bare(1), &spark(2));
        assert!(pairs.iter().any(|p| (p.connector, p.acceptor) == (1, 1) && is_link_local(&p.acceptor_gid)));
        // The cable goes from one machine's p0 to the other's p1: the addressed twins show it.
        let crossed: Vec<RailAdvert> = [(2, "p1", 1), (3, "p1", 1)]
            .iter()
            .zip(["192.168.100.2/24", ""])
            .map(|((ll, port, cable), ip)| {
                let ll = format!("fe80::{ll}/64");
                let all: Vec<&str> = [ll.as_str(), ip].into_iter().filter(|a| !a.is_empty()).collect();
                rail("crossed", port, *cable, 100_000, &all)
            })
            .collect();
        let at_first = pair(&bare(1), &crossed);
        assert_eq!(at_first.iter().map(|p| (p.connector, p.acceptor)).collect::<Vec<_>>(), [(0, 0), (1, 1)]);
        // Each pair returns by the same addresses, without the other one to show the cable.
        for Pair { connector, acceptor, connector_gid, acceptor_gid, .. } in at_first {
            let again = pair_again(&bare(1)[connector], &crossed[acceptor], 1).expect("it is a pair");
            assert_eq!((again.connector_gid, again.acceptor_gid), (connector_gid, acceptor_gid));
        }
    }

    #[test]
    fn every_second_attempt_goes_by_the_link_local_addresses_that_interfaces_have() {
        let is_by_link_local = |c: &RailAdvert, a: &RailAdvert, attempt| {
            let pair = pair_again(c, a, attempt).expect("it is a pair");
            assert_eq!(is_link_local(&pair.connector_gid), is_link_local(&pair.acceptor_gid));
            is_link_local(&pair.connector_gid)
        };
        let (here, there) = (&spark(1)[0], &spark(2)[0]);
        assert_eq!([1, 2, 3, 4].map(|attempt| is_by_link_local(here, there, attempt)), [false, true, false, true]);
        // An address that no interface is seen to have, on either side, or none at all.
        let unseen = rail("f0", "p0", 0, 100_000, &["fe80::1", "192.168.100.3/24"]);
        let without = rail("f0", "p0", 0, 100_000, &["192.168.100.3/24"]);
        for other in [&unseen, &without] {
            assert_eq!([1, 2, 3].map(|attempt| is_by_link_local(here, other, attempt)), [false; 3]);
            assert_eq!([1, 2, 3].map(|attempt| is_by_link_local(other, here, attempt)), [false; 3]);
        }
        // Where there is nothing else, each attempt goes by them.
        let bare = rail("f0", "p0", 0, 100_000, &["fe80::5"]);
        assert_eq!([1, 2].map(|attempt| is_by_link_local(here, &bare, attempt)), [true; 2]);
    }

    #[test]
    fn a_fast_port_serves_two_slower_ones_of_its_subnet() {
        let workstation = vec![rail("w", "", 0, 200_000, &["192.168.100.9/23"])];
        let near: Vec<RailAdvert> = spark(1)
            .into_iter()
            .take(2)
            .map(|mut rail| {
                for address in &mut rail.addresses {
                    address.prefix = address.prefix.map(|p| if p == 120 { 119 } else { p });
                }
                rail
            })
            .collect();
        assert_eq!(indices(&near, &workstation), [(0, 0), (1, 0)]);
        let slow = vec![rail("w", "", 0, 100_000, &["192.168.100.9/23"])];
        assert_eq!(indices(&near, &slow), [(0, 0)]);
    }

    #[test]
    fn a_rail_that_cannot_be_used_now_gets_what_is_left() {
        let away = |mut rails: Vec<RailAdvert>, lost: &[usize]| {
            lost.iter().for_each(|at| rails[*at].is_usable = false);
            rails
        };
        let all = |connector: &[RailAdvert], acceptor: &[RailAdvert]| -> Vec<(usize, usize, bool)> {
            pair(connector, acceptor).iter().map(|p| (p.connector, p.acceptor, p.is_usable)).collect()
        };
        let mended = [(0, 0, true), (1, 1, false), (2, 2, true), (3, 3, true)];
        assert_eq!(all(&away(spark(1), &[1]), &spark(2)), mended);
        assert_eq!(all(&spark(1), &away(spark(2), &[1])), mended);
        assert_eq!(all(&away(spark(1), &[1]), &away(spark(2), &[1])), mended);
        // In one subnet those that work find each other, whatever their order.
        let one = |n: u8| -> Vec<RailAdvert> {
            let rail = |at: u8| rail("r", "", at, 100_000, &[&format!("10.0.{n}.{at}/16")]);
            (0..2).map(rail).collect()
        };
        assert_eq!(all(&away(one(1), &[0]), &away(one(2), &[1])), [(0, 1, false), (1, 0, true)]);
    }

    #[test]
    fn the_pair_takes_the_smaller_of_both() {
        let mut peer = spark(2);
        peer[0].mtu_bytes = 1024;
        peer[0].speed_mbps = 25_000;
        let pairs = pair(&spark(1), &peer);
        assert_eq!((pairs[0].mtu_bytes, pairs[0].speed_mbps, pairs[1].mtu_bytes), (1024, 25_000, 4096));
    }

    #[test]
    fn unknown_prefixes_are_the_usual_ones() {
        let known = [rail("a", "", 0, 1, &["10.1.2.3/16"])];
        assert_eq!(indices(&known, &[rail("b", "", 0, 1, &["10.1.9.9"])]), [(0, 0)]);
        assert_eq!(indices(&[rail("a", "", 0, 1, &["10.1.2.3"])], &[rail("b", "", 0, 1, &["10.1.9.9"])]), []);
        assert_eq!(
            indices(&[rail("a", "", 0, 1, &["2001:db8::1"])], &[rail("b", "", 0, 1, &["2001:db8::2"])]),
            [(0, 0)]
        );
    }
}
