//! Pairs the rails of the two sides of a connection. A rail is a port of an RDMA function. Twins
//! are the two functions of one physical port, each on its own PCIe link.
//!
//! Rails with addresses in one subnet can reach each other. A subnet may allow several pairs for a
//! rail (if both twins are in one subnet, or all rails on a switch are). Then the ports' names and
//! the numbers of the PCIe links decide. The pairs are spread over all links, because two rails on
//! one link together carry no more than one of them alone.
//!
//! The remaining rails pair by [`Route`]s, because routers forward RoCE v2 packets. A Spark's NIC
//! can also forward packets from one cable to another, if its owner sets rules for this. (Opposite
//! Sparks of a ring then reach each other.) The accepting side computes the pairs, and asks its
//! kernel for routes. The connecting side refuses an offered pair if its own kernel has no route
//! back.
//!
//! In a common layout, only one of two twins has an address besides its link-local address. The
//! other twin is paired with a rail of the peer on the same cable. The addresses, the ports' names
//! or the lack of another possible cable identify that cable; otherwise the twin is not paired by
//! its cable. A rail that has no link or address yet is paired in the same way, for later. Test
//! writes then show whether the pair works. A pair stays the same for the whole
//! connection. When it returns after a loss, only its addresses are chosen again.

use crate::wire::MAX_RAILS;
use crate::wire::fields::{Address, RailAdvert};
use std::net::Ipv6Addr;

#[cfg(test)]
mod tests;

/// A pair of rails, one on each side.
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
    /// The smaller of the two path MTUs.
    pub mtu_bytes: u32,
    /// The smaller of the two speeds.
    pub speed_mbps: u32,
    /// True if both rails can be used now. Otherwise the pair is kept for their return.
    pub is_usable: bool,
    /// True if one of the rails has had no link or no address since its host loaded the plugin. It
    /// may never have one. So this pair is no reason to wait, to leave a route unused, or to expect
    /// less of the other pairs.
    pub is_late: bool,
    /// True if the rails share no subnet, and the pair uses a route of the accepting side.
    pub is_routed: bool,
}

/// A route from an accepting side's rail to a connecting side's address outside the rail's subnets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// Index into the accepting side's rails.
    pub acceptor: usize,
    /// Address of the accepting side's rail.
    pub acceptor_gid: [u8; 16],
    /// The connecting side's address.
    pub connector_gid: [u8; 16],
}

impl Pair {
    fn of(
        (ci, c): (usize, &RailAdvert),
        (ai, a): (usize, &RailAdvert),
        (connector_gid, acceptor_gid): Gids,
    ) -> Self {
        let mtu_bytes = c.mtu_bytes.min(a.mtu_bytes);
        let speed_mbps = c.speed_mbps.min(a.speed_mbps);
        let is_usable = c.is_usable && a.is_usable;
        let is_late = [c, a].iter().any(|rail| has_placeholder(rail));
        // A pair for later may have a placeholder, which is link-local, in place of an address.
        let is_link_local = [connector_gid, acceptor_gid].iter().any(is_link_local);
        let is_routed = !is_link_local && same_subnet(c, a).is_none();
        Self {
            connector: ci,
            acceptor: ai,
            connector_gid,
            acceptor_gid,
            mtu_bytes,
            speed_mbps,
            is_usable,
            is_late,
            is_routed,
        }
    }
}

/// Returns at most [`MAX_RAILS`] pairs, in the order of the connecting side's rails. First, rails
/// that can be used now are paired with each other. Then the rails that are left over get pairs,
/// for later use. `routes` must be the [`existing_routes`].
pub fn pair(connector: &[RailAdvert], acceptor: &[RailAdvert], routes: &[Route]) -> Vec<Pair> {
    let mut found = Pairing {
        connector,
        acceptor,
        routes,
        pairs: Vec::new(),
    };
    found.pair_up(|c, a| c.is_usable && a.is_usable);
    found.pair_up(|_, _| true);
    let mut pairs = found.pairs;
    pairs.truncate(MAX_RAILS);
    pairs.sort_by_key(|pair| (pair.connector, pair.acceptor));
    pairs
}

/// Returns the existing routes between rails that cannot be paired without routes. `exists` tells
/// whether a route exists. Of the routes between two rails, the preferred one comes first.
pub fn existing_routes(
    connector: &[RailAdvert],
    acceptor: &[RailAdvert],
    exists: impl Fn(&Route) -> bool,
) -> Vec<Route> {
    let mut pairs = pair(connector, acceptor, &[]);
    pairs.retain(|pair| !pair.is_late);
    let without_pair = |rails: &[RailAdvert], of: fn(&Pair) -> usize| -> Vec<(usize, Address)> {
        let alone = rails
            .iter()
            .enumerate()
            .filter(|(at, _)| !pairs.iter().any(|pair| of(pair) == *at));
        alone
            .flat_map(|(at, rail)| rail.addresses.iter().map(move |address| (at, *address)))
            .collect()
    };
    let ours = without_pair(acceptor, |pair| pair.acceptor);
    let theirs = without_pair(connector, |pair| pair.connector);
    let mut routes = Vec::new();
    for (acceptor, own) in ours.iter().filter(|(_, address)| !address.is_link_local()) {
        let is_ipv4 = |address: &Address| Ipv6Addr::from(address.gid).to_ipv4_mapped().is_some();
        let reachable =
            |(_, peer): &&(usize, Address)| !peer.is_link_local() && is_ipv4(own) == is_ipv4(peer);
        let possible = theirs.iter().filter(reachable).map(|(_, peer)| Route {
            acceptor: *acceptor,
            acceptor_gid: own.gid,
            connector_gid: peer.gid,
        });
        routes.extend(possible.filter(|route| exists(route)));
    }
    routes
}

/// Returns true if the host needs a route, because the peer's address is outside the subnet of the
/// host's address `own`. Returns false if this subnet is unknown, or if both addresses are
/// link-local.
pub fn needs_route(own: &Address, peer_gid: [u8; 16]) -> bool {
    let peer = Address {
        gid: peer_gid,
        prefix: own.prefix,
    };
    own.prefix.is_some() && !are_link_local(&own.gid, &peer_gid) && !in_one_subnet(own, &peer)
}

/// Chooses the addresses of a pair that returns after a loss. Does not check that the two rails
/// share a cable. The rails alone do not show this, because a cable may join ports of different
/// names.
///
/// `attempt` counts the attempts since the pair last worked, from 1. Every second attempt prefers
/// the link-local addresses, if both rails have one. Twins can answer ARP for each other, and
/// packets to an IPv4 address then reach the wrong twin. IPv6 has no such problem: only the
/// interface that has an address answers neighbour solicitations for it.
///
/// A [`RailAdvert`] omits an address that the rail's interface lacks. If the interface cannot be
/// seen, for example in a container, only a failed attempt shows that the address is missing.
pub fn pair_again(
    connector: &RailAdvert,
    acceptor: &RailAdvert,
    routes: &[Route],
    attempt: u32,
) -> Option<Pair> {
    let by_ip = same_subnet(connector, acceptor).or_else(|| routed(connector, acceptor, routes));
    let link_local = both_link_local(connector, acceptor);
    let gids = if attempt.is_multiple_of(2) {
        link_local.or(by_ip)
    } else {
        by_ip.or(link_local)
    }?;
    Some(Pair::of((0, connector), (0, acceptor), gids))
}

/// Returns one side's rails and addresses, for the error that no rails could be paired. Link-local
/// addresses are shown only for rails without other addresses.
pub fn describe(rails: &[RailAdvert]) -> String {
    if rails.is_empty() {
        return "no rail".to_owned();
    }
    let one = |rail: &RailAdvert| {
        let is_shown = |address: &&Address| only_link_local(rail) || !address.is_link_local();
        let addresses: Vec<String> = rail
            .addresses
            .iter()
            .filter(is_shown)
            .map(describe_address)
            .collect();
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

struct Pairing<'a> {
    connector: &'a [RailAdvert],
    acceptor: &'a [RailAdvert],
    routes: &'a [Route],
    pairs: Vec<Pair>,
}

type Gids = ([u8; 16], [u8; 16]);

impl Pairing<'_> {
    fn pair_up(&mut self, allowed: impl Fn(&RailAdvert, &RailAdvert) -> bool) {
        let before = self.pairs.len();
        let in_subnets = self.candidates(same_subnet, &allowed);
        self.take_unpaired(&in_subnets);
        self.even_out(before, &in_subnets);
        let by_cable = {
            let alone = |c: &RailAdvert, a: &RailAdvert| {
                allowed(c, a) && (only_link_local(c) || only_link_local(a))
            };
            let gids =
                |c: &RailAdvert, a: &RailAdvert| both_link_local(c, a).or_else(|| for_later(c, a));
            let mut candidates = self.candidates(gids, alone);
            let mut known: Vec<([u8; 2], bool)> = Vec::new();
            candidates.retain(|candidate| {
                let (c, a) = self.ends(candidate);
                let cables = [cable(c), cable(a)];
                let at = known
                    .iter()
                    .position(|(other, _)| *other == cables)
                    .unwrap_or_else(|| {
                        known.push((cables, self.is_one_cable(cables[0], cables[1])));
                        known.len() - 1
                    });
                known[at].1
            });
            candidates
        };
        self.take_unpaired(&by_cable);
        let first_routed = self.pairs.len();
        let by_route = self.candidates(|c, a| routed(c, a, self.routes), &allowed);
        self.take_unpaired(&by_route);
        self.even_out(first_routed, &by_route);
        self.take_spare_speed(&in_subnets);
        self.take_spare_speed(&by_route);
        // The order matters: `pair` drops the last pairs beyond `MAX_RAILS`.
        self.pairs[before..].sort_by_key(|pair| (pair.connector, pair.acceptor));
    }

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
        all.sort_by_key(|pair| self.rank(pair));
        all
    }

    fn ends(&self, pair: &Pair) -> (&RailAdvert, &RailAdvert) {
        (
            &self.connector[pair.connector],
            &self.acceptor[pair.acceptor],
        )
    }

    fn connector_paired(&self, index: usize) -> bool {
        self.pairs.iter().any(|pair| pair.connector == index)
    }

    fn acceptor_paired(&self, index: usize) -> bool {
        self.pairs.iter().any(|pair| pair.acceptor == index)
    }

    fn take_unpaired(&mut self, candidates: &[Pair]) {
        for candidate in candidates {
            if !self.connector_paired(candidate.connector)
                && !self.acceptor_paired(candidate.acceptor)
            {
                self.pairs.push(candidate.clone());
            }
        }
    }

    /// Returns the sort key of a candidate pair; the smallest is the best. Criteria: the same port
    /// name on both sides, the same link number on both sides (two Sparks have the same PCIe
    /// domains), then the difference of the two rails' indices.
    fn rank(&self, pair: &Pair) -> (bool, bool, usize, usize, usize) {
        let (c, a) = self.ends(pair);
        let distance = pair.connector.abs_diff(pair.acceptor);
        (
            self.has_other_ports(pair),
            link(c) != link(a),
            distance,
            pair.connector,
            pair.acceptor,
        )
    }

    /// Spreads the pairs from index `first` on over the PCIe links. A candidate with one unpaired
    /// rail replaces the pair of its other rail, if this lowers the crowding ([`crowd`]) and the
    /// ports' names match no worse. Then pairs the freed rail again, if possible.
    fn even_out(&mut self, first: usize, candidates: &[Pair]) {
        // Terminates: each new pair lowers the number of unpaired rails. A replacement keeps that
        // number and lowers the crowding, which is a whole number.
        while let Some((at, better)) = self.better(first, candidates) {
            self.pairs[at] = better;
            self.take_unpaired(candidates);
        }
    }

    fn better(&self, first: usize, candidates: &[Pair]) -> Option<(usize, Pair)> {
        let now = crowd(self, &self.pairs);
        for (at, pair) in self.pairs.iter().enumerate().skip(first) {
            let replaces = |other: &&Pair| {
                let connector =
                    other.connector == pair.connector && !self.acceptor_paired(other.acceptor);
                let acceptor =
                    other.acceptor == pair.acceptor && !self.connector_paired(other.connector);
                (connector || acceptor) && self.has_other_ports(other) <= self.has_other_ports(pair)
            };
            for other in candidates.iter().filter(replaces) {
                let mut pairs = self.pairs.clone();
                pairs[at] = other.clone();
                if crowd(self, &pairs) < now {
                    return Some((at, other.clone()));
                }
            }
        }
        None
    }

    fn has_other_ports(&self, pair: &Pair) -> bool {
        let (c, a) = self.ends(pair);
        c.phys_port != a.phys_port
    }

    /// Returns true if cable `here` of the connecting side is cable `there` of the accepting side.
    /// If either cable has a pair that needs no route, this pair decides. Otherwise returns false
    /// if the cables lead to different hosts, and true if the ports' names match or no other cable
    /// is possible.
    fn is_one_cable(&self, here: u8, there: u8) -> bool {
        let of_one_cable = self.pairs.iter().filter(|pair| !pair.is_routed);
        let mut known =
            of_one_cable.map(|pair| (cable(self.ends(pair).0), cable(self.ends(pair).1)));
        if let Some((of_c, of_a)) = known.find(|(of_c, of_a)| *of_c == here || *of_a == there) {
            return of_c == here && of_a == there;
        }
        if self.lead_to_different_hosts(here, there) {
            return false;
        }
        let is_named_alike = on(self.connector, here)
            .any(|c| on(self.acceptor, there).any(|a| c.phys_port == a.phys_port));
        let is_only_one = || {
            let unknown = |rails: &[RailAdvert], of: fn(&Self, &Pair) -> u8| {
                let mut cables: Vec<u8> = rails.iter().map(cable).collect();
                cables.sort_unstable();
                cables.dedup();
                cables.retain(|cable| !self.pairs.iter().any(|pair| of(self, pair) == *cable));
                cables
            };
            let ours = unknown(self.connector, |found, pair| cable(found.ends(pair).0));
            let theirs = unknown(self.acceptor, |found, pair| cable(found.ends(pair).1));
            !ours
                .iter()
                .any(|other| *other != here && !self.lead_to_different_hosts(*other, there))
                && !theirs
                    .iter()
                    .any(|other| *other != there && !self.lead_to_different_hosts(here, *other))
        };
        is_named_alike || is_only_one()
    }

    fn lead_to_different_hosts(&self, here: u8, there: u8) -> bool {
        let addressed =
            |rails: &'_ [RailAdvert], cable| on(rails, cable).any(|rail| !only_link_local(rail));
        let shares = |c: &RailAdvert| on(self.acceptor, there).any(|a| same_subnet(c, a).is_some());
        addressed(self.connector, here)
            && addressed(self.acceptor, there)
            && !on(self.connector, here).any(shares)
    }

    /// Pairs a fast rail with several slower rails of the other side, as long as the fast rail's
    /// spare speed is at least half of the speed of the next slower rail.
    fn take_spare_speed(&mut self, candidates: &[Pair]) {
        for candidate in candidates {
            if let Some(speed_mbps) = self.spare_mbps(candidate) {
                self.pairs.push(Pair {
                    speed_mbps,
                    ..candidate.clone()
                });
            }
        }
    }

    /// Returns the speed that the paired rail of `candidate` can spare for the unpaired rail.
    /// Returns `None` if this speed is too low for another pair, or if the paired rail already has
    /// a pair with a rail on the unpaired rail's PCIe link. Also returns `None` unless exactly one
    /// of the two rails is paired.
    fn spare_mbps(&self, candidate: &Pair) -> Option<u32> {
        let (c, a) = self.ends(candidate);
        let is_with_connector = |pair: &&Pair| pair.connector == candidate.connector;
        let is_with_acceptor = |pair: &&Pair| pair.acceptor == candidate.acceptor;
        let (fast, slow, others): (_, _, Vec<(&Pair, &RailAdvert)>) = match (
            self.connector_paired(candidate.connector),
            self.acceptor_paired(candidate.acceptor),
        ) {
            (true, false) => {
                let others = self.pairs.iter().filter(is_with_connector);
                (c, a, others.map(|pair| (pair, self.ends(pair).1)).collect())
            }
            (false, true) => {
                let others = self.pairs.iter().filter(is_with_acceptor);
                (a, c, others.map(|pair| (pair, self.ends(pair).0)).collect())
            }
            _ => return None,
        };
        let shares_link = |(_, other): &(&Pair, &RailAdvert)| {
            other.attachment.link_mbps > 0 && link(other) == link(slow)
        };
        let used_mbps: u32 = others.iter().map(|(pair, _)| pair.speed_mbps).sum();
        let spare = fast
            .speed_mbps
            .saturating_sub(used_mbps)
            .min(slow.speed_mbps);
        (spare > 0 && spare >= slow.speed_mbps / 2 && !others.iter().any(shares_link))
            .then_some(spare)
    }
}

/// Returns a measure of crowding: the number of pairs on each PCIe link of either side is squared,
/// and the squares are added up.
fn crowd(found: &Pairing, pairs: &[Pair]) -> usize {
    let alike = |one: &Pair| {
        let (c, a) = found.ends(one);
        let shares = |other: &Pair| {
            let (of_c, of_a) = found.ends(other);
            usize::from(link(of_c) == link(c)) + usize::from(link(of_a) == link(a))
        };
        pairs.iter().map(shares).sum::<usize>()
    };
    pairs.iter().map(alike).sum()
}

fn on(rails: &[RailAdvert], of: u8) -> impl Iterator<Item = &RailAdvert> {
    rails.iter().filter(move |rail| cable(rail) == of)
}

fn cable(rail: &RailAdvert) -> u8 {
    rail.attachment.cable
}

fn link(rail: &RailAdvert) -> u8 {
    rail.attachment.link
}

fn only_link_local(rail: &RailAdvert) -> bool {
    rail.addresses.iter().all(Address::is_link_local)
}

fn both_link_local(c: &RailAdvert, a: &RailAdvert) -> Option<Gids> {
    let of = |rail: &RailAdvert| {
        rail.addresses
            .iter()
            .find(|address| address.is_link_local())
            .map(|address| address.gid)
    };
    Some((of(c)?, of(a)?))
}

/// Returns any addresses for a pair that cannot be used now. They are chosen again before its first
/// use.
fn for_later(c: &RailAdvert, a: &RailAdvert) -> Option<Gids> {
    let is_for_later = !(c.is_usable && a.is_usable);
    let first = |rail: &RailAdvert| rail.addresses.first().map(|address| address.gid);
    Some((first(c)?, first(a)?)).filter(|_| is_for_later)
}

/// Returns true if the rail's only address is a placeholder: link-local, with an unknown subnet.
fn has_placeholder(rail: &RailAdvert) -> bool {
    let is_one = |address: &Address| address.is_link_local() && address.prefix.is_none();
    !rail.is_usable && rail.addresses.iter().all(is_one)
}

fn is_link_local(gid: &[u8; 16]) -> bool {
    Ipv6Addr::from(*gid).is_unicast_link_local()
}

fn are_link_local(one: &[u8; 16], other: &[u8; 16]) -> bool {
    is_link_local(one) && is_link_local(other)
}

fn routed(c: &RailAdvert, a: &RailAdvert, routes: &[Route]) -> Option<Gids> {
    let has = |rail: &RailAdvert, gid| rail.addresses.iter().any(|address| address.gid == gid);
    let route = routes
        .iter()
        .find(|route| has(c, route.connector_gid) && has(a, route.acceptor_gid));
    route
        .filter(|_| same_subnet(c, a).is_none())
        .map(|route| (route.connector_gid, route.acceptor_gid))
}

fn same_subnet(c: &RailAdvert, a: &RailAdvert) -> Option<Gids> {
    let pairs = c
        .addresses
        .iter()
        .flat_map(|ours| a.addresses.iter().map(move |theirs| (ours, theirs)));
    let mut matching = pairs.filter(|(ours, theirs)| in_one_subnet(ours, theirs));
    matching.next().map(|(ours, theirs)| (ours.gid, theirs.gid))
}

fn in_one_subnet(one: &Address, other: &Address) -> bool {
    if one.is_link_local() || other.is_link_local() {
        return false;
    }
    let x = Ipv6Addr::from(one.gid);
    let y = Ipv6Addr::from(other.gid);
    let ipv4 = x.to_ipv4_mapped().is_some();
    if ipv4 != y.to_ipv4_mapped().is_some() {
        return false;
    }
    // Prefix length to assume if the interface cannot be seen (in a container without the netdev):
    // IPv4 /24 (which is 120 in the mapped address), IPv6 /64.
    let usual = if ipv4 { 120 } else { 64 };
    let prefix = match (one.prefix, other.prefix) {
        (Some(p), Some(q)) => p.max(q),
        (Some(p), None) | (None, Some(p)) => p,
        (None, None) => usual,
    };
    let host_bits = 128 - u32::from(prefix.min(128));
    x.to_bits().checked_shr(host_bits).unwrap_or(0)
        == y.to_bits().checked_shr(host_bits).unwrap_or(0)
}
