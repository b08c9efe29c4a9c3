//! Tests with DGX Sparks and other hosts, in the cablings and with the addresses that owners use
//! (`crates/host/topologies`). Each host is a sysfs tree. Its [`RailAdvert`]s describe the rails to
//! a peer; they are encoded into a HELLO of the handshake and decoded again.

use super::topology::{Topology, host, pairs_of_entry, with_arp};
use crate::port::{GidEntry, PortState};
use crate::rails::testbed::{Function, TestHost};
use crate::rails::{Rail, Survey, Warning};
use proto::flow::pairing::{self, Pair};
use proto::flow::paths::{End, Paths, is_cable_full};
use proto::wire::fields::{Address, Priority, RailAdvert};
use proto::wire::ids::RailId;
use proto::wire::message::{ByTcp, HEADER_BYTES, Header, Hello, Message};
use std::collections::BTreeSet;
use std::net::Ipv6Addr;

#[test]
fn each_topology_has_the_rails_pairs_and_warnings_of_its_file() {
    let wrong: Vec<String> = Topology::all().iter().flat_map(differences).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Returns a line for each difference between a topology's file and the plugin's code.
fn differences(topology: &Topology) -> Vec<String> {
    let hosts: Vec<Host> = topology
        .hosts
        .keys()
        .map(|name| Host::new(topology, name))
        .collect();
    let mut wrong: Vec<String> = hosts.iter().flat_map(Host::differences).collect();
    for one in &hosts {
        for other in hosts.iter().filter(|other| other.name != one.name) {
            let connection = Connection::new(one, other);
            wrong.extend(compare(&connection.expected(), &connection.found()));
        }
    }
    let in_file = |line| format!("{}.toml: {line}", topology.name);
    wrong.into_iter().map(in_file).collect()
}

fn compare(expected: &BTreeSet<String>, found: &BTreeSet<String>) -> Vec<String> {
    let missing = expected
        .difference(found)
        .map(|line| format!("expected, not found: {line}"));
    let surplus = found
        .difference(expected)
        .map(|line| format!("found, not expected: {line}"));
    missing.chain(surplus).collect()
}

struct Host<'a> {
    topology: &'a Topology,
    name: &'a str,
    functions: Vec<Function>,
    survey: Survey,
    adverts: Vec<RailAdvert>,
}

impl<'a> Host<'a> {
    fn new(topology: &'a Topology, name: &'a str) -> Self {
        let functions = topology.functions(name);
        let survey = host(&functions).survey("");
        Self {
            adverts: adverts(&survey),
            topology,
            name,
            functions,
            survey,
        }
    }

    fn interface(&self, rail: usize) -> &str {
        self.survey.rails[rail].netdev.as_deref().unwrap()
    }

    fn has_route(&self, rail: usize, peer_gid: [u8; 16]) -> bool {
        let peer = Ipv6Addr::from(peer_gid).to_canonical();
        let route = format!("{peer} dev {}", self.interface(rail));
        let routes = self.topology.routes.get(self.name);
        routes.is_some_and(|routes| routes.contains(&route))
    }

    /// Compares the rails, their addresses and the warnings with the file.
    fn differences(&self) -> Vec<String> {
        let rail = |device: &str, addresses| format!("{} {device}, {addresses} GIDs", self.name);
        let of_function = |f: &Function| {
            let has = [f.v4.is_some(), f.v6.is_some(), f.interface_has_link_local];
            let addresses = has.into_iter().filter(|has| *has).count();
            let is_rail = f.state == PortState::Active && addresses > 0;
            is_rail.then(|| rail(f.device, addresses))
        };
        let expected = self.functions.iter().filter_map(of_function).collect();
        let of_rail = |found: &Rail| rail(&found.device, found.addresses.len());
        let mut wrong = compare(&expected, &self.survey.rails.iter().map(of_rail).collect());
        let parts = self.topology.warnings.get(self.name);
        let warnings = &self.survey.warnings;
        if !has_parts(warnings, parts.map_or(&[], |parts| parts)) {
            wrong.push(format!("{}: {warnings:#?}", self.name));
        }
        wrong
    }
}

fn has_parts(warnings: &[Warning], parts: &[impl AsRef<str>]) -> bool {
    let mut both = warnings.iter().zip(parts);
    warnings.len() == parts.len()
        && both.all(|(warning, part)| warning.text.contains(part.as_ref()))
}

fn adverts(survey: &Survey) -> Vec<RailAdvert> {
    let advert = |rail: &Rail| RailAdvert {
        name: format!("{}:{}", rail.device, rail.port),
        phys_port: rail.phys_port.clone().unwrap_or_default(),
        attachment: survey.attachment(rail),
        speed_mbps: survey.share_of_link_mbps(rail),
        mtu_bytes: rail.path_mtu_bytes,
        addresses: rail
            .addresses
            .iter()
            .map(|address| Address::new(address.gid, address.prefix))
            .collect(),
        is_usable: true,
    };
    let hello = Hello {
        token: [1; 16],
        name: "spark:1".to_owned(),
        chunk_bytes: 1 << 20,
        qps_per_rail: 0,
        tuner_hash: 0,
        gpu: String::new(),
        priority: Priority::default(),
        by_tcp: ByTcp::Off,
        rails: survey.rails.iter().map(advert).collect(),
    };
    let frame = Message::Hello(hello).encode();
    let header = Header::decode(frame[..HEADER_BYTES].try_into().unwrap()).unwrap();
    let Ok(Message::Hello(hello)) = Message::decode(header, &frame[HEADER_BYTES..]) else {
        panic!("no HELLO")
    };
    hello.rails
}

/// A connection between two hosts, as the accepting side computes it.
struct Connection<'a> {
    connector: &'a Host<'a>,
    acceptor: &'a Host<'a>,
    pairs: Vec<Pair>,
}

impl<'a> Connection<'a> {
    fn new(connector: &'a Host<'a>, acceptor: &'a Host<'a>) -> Self {
        let [ours, theirs] = [&connector.adverts, &acceptor.adverts];
        let routes = pairing::existing_routes(ours, theirs, |route| {
            acceptor.has_route(route.acceptor, route.connector_gid)
        });
        let pairs = pairing::pair(ours, theirs, &routes);
        Self {
            connector,
            acceptor,
            pairs,
        }
    }

    /// Returns a line for each pair, for the rate and for each rail that is alone. A pair without
    /// an address at one of its ends uses the link-local addresses.
    fn expected(&self) -> BTreeSet<String> {
        let topology = self.connector.topology;
        let is_at = |end: &str, host: &Host| end.split(' ').next() == Some(host.name);
        let is_here = |end: &&String| is_at(end, self.connector);
        let alone = topology.alone.iter().filter(is_here);
        let mut lines: BTreeSet<String> = alone.map(|rail| format!("{rail} is alone")).collect();
        for [one, other] in topology.pairs() {
            for [here, there] in [[&one, &other], [&other, &one]] {
                if is_here(&here) && is_at(there, self.acceptor) {
                    let ips = topology.ip(here).zip(topology.ip(there));
                    let (ip, peer) = ips.unwrap_or(("link-local", "link-local"));
                    let mtu = topology.mtu_bytes;
                    lines.insert(format!("{here} {ip} - {there} {peer}, MTU {mtu}"));
                    lines.extend(topology.rate_mbps.map(|rate| self.rate(rate)));
                }
            }
        }
        lines
    }

    fn found(&self) -> BTreeSet<String> {
        let ends = self.ends();
        let pairs = self.pairs.iter().map(|pair| self.describe(pair));
        let mut lines: BTreeSet<String> = pairs.collect();
        if self.connector.topology.rate_mbps.is_some() && !lines.is_empty() {
            let rates = Paths::new(&ends).even_rates();
            lines.insert(self.rate(rates[..ends.len()].iter().sum::<f64>().round() as u64));
        }
        // The plugin warns of a rail without a pair if another rail of its cable has a pair in a
        // subnet, and the pairs do not fill the cable (`comm/setup/negotiate.rs`).
        for (at, advert) in self.connector.adverts.iter().enumerate() {
            let cable = advert.attachment.cable;
            let mut pairs = self.pairs.iter().zip(&ends);
            let is_alone = !self.pairs.iter().any(|pair| pair.connector == at)
                && pairs.any(|(pair, [here, _])| !pair.is_routed && here.attachment.cable == cable)
                && !is_cable_full(&ends, cable);
            let Host { name, .. } = self.connector;
            let interface = self.connector.interface(at);
            lines.extend(is_alone.then(|| format!("{name} {interface} is alone")));
        }
        lines
    }

    fn rate(&self, mbps: u64) -> String {
        let [from, to] = [self.connector.name, self.acceptor.name];
        format!("{from} to {to}: {mbps} Mb/s")
    }

    fn describe(&self, pair: &Pair) -> String {
        let end = |host: &Host, rail: usize, gid: [u8; 16]| {
            let ip = match Ipv6Addr::from(gid) {
                ip if ip.is_unicast_link_local() => "link-local".to_owned(),
                ip => ip.to_canonical().to_string(),
            };
            format!("{} {} {ip}", host.name, host.interface(rail))
        };
        let here = end(self.connector, pair.connector, pair.connector_gid);
        let there = end(self.acceptor, pair.acceptor, pair.acceptor_gid);
        let mut text = format!("{here} - {there}, MTU {}", pair.mtu_bytes);
        // The connecting side refuses a pair if its kernel has no route back.
        let addresses = &self.connector.adverts[pair.connector].addresses;
        let mut own = addresses.iter().filter(|own| own.gid == pair.connector_gid);
        let needs_route = pairing::needs_route(own.next().unwrap(), pair.acceptor_gid);
        let has_route = self.connector.has_route(pair.connector, pair.acceptor_gid);
        if [needs_route, has_route] != [pair.is_routed; 2] {
            text += &format!(", needs a route: {needs_route}, has one: {has_route}");
        }
        text
    }

    fn ends(&self) -> Vec<[End; 2]> {
        let end = |host: &Host, at: usize| End {
            rail: RailId::new(at).unwrap(),
            attachment: host.adverts[at].attachment,
        };
        let both = |pair: &Pair| {
            let here = end(self.connector, pair.connector);
            [here, end(self.acceptor, pair.acceptor)]
        };
        self.pairs.iter().map(both).collect()
    }
}

/// With `arp_ignore` 0 (Ubuntu's setting, with `rp_filter` 2) the twins answer ARP for each other.
/// With a strict `rp_filter` (1), requests for one twin's address get no answer.
#[test]
fn twins_in_one_subnet_are_warnings_unless_arp_is_known_to_be_right() {
    let subnet = "rocep1s0f0 and roceP2p1s0f0, the twins of one cable, are in one subnet";
    let arp = "an ARP request for the address of one of rocep1s0f0 and roceP2p1s0f0";
    for name in ["twins-one-subnet", "twins-self-assigned"] {
        let functions = Topology::read(name).functions("spark-1");
        let found = TestHost::new(&functions).survey("").warnings;
        assert!(has_parts(&found, &[subnet]), "{found:#?}");
        for (arp_ignore, rp_filter) in [(0, 2), (0, 0), (1, 1)] {
            let host = with_arp(&functions, arp_ignore, rp_filter);
            let found = host.survey("").warnings;
            assert!(has_parts(&found, &[subnet, arp]), "{found:#?}");
        }
    }
}

#[test]
fn sparse_and_long_gid_tables() {
    let topology = Topology::read("pair-one-cable");
    let mut functions = topology.functions("spark-1");
    for function in &mut functions {
        function.gid_indices = match function.device {
            "rocep1s0f0" => &[0, 1, 4, 5],
            _ => &[2, 7, 30, 31],
        };
    }
    let mut test_host = host(&functions);
    let survey = test_host.survey("");
    let gids = survey.rails.iter().flat_map(|rail| &rail.addresses);
    let indices: Vec<u16> = gids.map(|address| address.gid_index).collect();
    assert_eq!(indices, [5, 1, 31, 7]);
    // A HELLO has no room for all of these addresses. It still has the last address of the table,
    // which is the one that pairs.
    for port in &mut test_host.ports {
        let Some(last) = port.gids.last().copied() else {
            continue;
        };
        port.gids.splice(
            0..0,
            (0..40).map(|n| GidEntry {
                index: 100 + n,
                gid: Ipv6Addr::new(0xfd00, 9, 9, 9, 0, 0, 1, n).octets(),
                ..last
            }),
        );
    }
    let peer = Host::new(&topology, "spark-2");
    for survey in [survey, test_host.survey("")] {
        let one = Host {
            adverts: adverts(&survey),
            survey,
            ..Host::new(&topology, "spark-1")
        };
        for connection in [Connection::new(&one, &peer), Connection::new(&peer, &one)] {
            assert_eq!(connection.found(), connection.expected());
        }
    }
}

#[test]
fn the_error_for_opposite_hosts_of_a_ring_names_each_rail() {
    let text = pairing::describe(&Host::new(&Topology::read("ring"), "spark-1").adverts);
    let first = "rocep1s0f0:1 (192.168.100.1/24); roceP2p1s0f0:1 (192.168.101.1/24); ";
    let second = "rocep1s0f1:1 (192.168.106.1/24); roceP2p1s0f1:1 (192.168.107.1/24)";
    assert_eq!(text, [first, second].concat());
}

#[test]
fn a_switch_with_ports_of_100_gbps() {
    for (name, rate_mbps) in [("switch", 200_000), ("switch-one-cable", 100_000)] {
        let mut topology = Topology::read(name);
        topology.rate_mbps = Some(rate_mbps);
        topology.set_speed(100_000);
        assert_eq!(differences(&topology), [""; 0]);
    }
}

/// Addresses without a subnet: neighbours need host routes too.
#[test]
fn a_ring_with_a_route_to_each_host() {
    let mut ring = Topology::read("ring-routed");
    for wire in ring.wires.clone() {
        for [one, other] in pairs_of_entry(&wire) {
            for [here, there] in [[&one, &other], [&other, &one]] {
                let (host, interface) = here.split_once(' ').unwrap();
                let route = format!("{} dev {interface}", ring.ip(there).unwrap());
                ring.routes.get_mut(host).unwrap().push(route);
            }
        }
    }
    for address in ring.hosts.values_mut().flat_map(|host| host.values_mut()) {
        *address = address.replace("/24", "/32");
    }
    assert_eq!(differences(&ring), [""; 0]);
}
