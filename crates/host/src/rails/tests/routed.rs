//! A ring of four hosts whose NICs forward packets between opposite hosts, with host routes (`ip
//! route add PEER/32 via NEIGHBOUR dev INTERFACE`).

use super::machines::{F0, F1, P2F0, P2F1, host, spark_with};
use super::topologies::adverts;
use proto::flow::pairing::{self, Pair};
use proto::wire::fields::RailAdvert;
use std::net::Ipv6Addr;

/// A host's rails and its kernel's host routes, each as (rail, destination).
struct Routed {
    adverts: Vec<RailAdvert>,
    routes: Vec<(&'static str, String)>,
}

/// Returns the address of a device of host `n`. p0 of each host is cabled to p1 of the next host.
/// Each cable has two subnets, one for each twin.
fn address(n: u8, device: &str) -> String {
    let (cable, end) = if device.ends_with("f0") {
        (n, 1)
    } else {
        ((n + 3) % 4, 2)
    };
    let twin = u8::from(device.starts_with("roceP2"));
    format!("10.{cable}.{twin}.{end}")
}

/// Host `n` with routes to the opposite host. Between hosts 0 and 2, the first twins are routed by
/// host 1, and the second twins by host 3. With a 32-bit prefix, neighbours need host routes too.
fn ring_host(n: u8, prefix: u8) -> Routed {
    let next = (n + 1) % 4;
    let opposite = (n + 2) % 4;
    let before = (n + 3) % 4;
    let addresses =
        [F0, P2F0, F1, P2F1].map(|device| (device, format!("{}/{prefix}", address(n, device))));
    let addresses: Vec<(&str, &str)> = addresses
        .iter()
        .map(|(device, ip)| (*device, ip.as_str()))
        .collect();
    let ends = if n < 2 {
        [(F0, F1), (P2F1, P2F0)]
    } else {
        [(F1, F0), (P2F0, P2F1)]
    };
    let mut routes = ends
        .map(|(here, there)| (here, address(opposite, there)))
        .to_vec();
    if prefix == 32 {
        routes.extend([(F0, F1), (P2F0, P2F1)].map(|(here, there)| (here, address(next, there))));
        routes.extend([(F1, F0), (P2F1, P2F0)].map(|(here, there)| (here, address(before, there))));
    }
    Routed {
        adverts: adverts(&host(&spark_with(n, &[0, 1], &addresses)).survey("")),
        routes,
    }
}

/// Pairs rails for a connection from `one` to `other`. Returns each pair as text, `RAIL - RAIL`.
fn connect(one: &Routed, other: &Routed) -> Vec<String> {
    let routes = pairing::existing_routes(&one.adverts, &other.adverts, |route| {
        let rail = &other.adverts[route.acceptor].name;
        let to = Ipv6Addr::from(route.connector_gid).to_canonical();
        other
            .routes
            .iter()
            .any(|(device, peer)| rail == &format!("{device}:1") && *peer == to.to_string())
    });
    let name = |rail: &RailAdvert| rail.name.trim_end_matches(":1").to_owned();
    let text = |pair: &Pair| {
        // The connector must have a route back for a routed pair: without one it refuses the pair.
        let here = &one.adverts[pair.connector];
        let to = Ipv6Addr::from(pair.acceptor_gid).to_canonical().to_string();
        let own = here
            .addresses
            .iter()
            .find(|address| address.gid == pair.connector_gid)
            .unwrap();
        let has = one
            .routes
            .iter()
            .any(|(device, peer)| *device == name(here) && *peer == to);
        assert!(
            pairing::needs_route(own, pair.acceptor_gid) == pair.is_routed && has == pair.is_routed,
            "{pair:?}"
        );
        format!("{} - {}", name(here), name(&other.adverts[pair.acceptor]))
    };
    pairing::pair(&one.adverts, &other.adverts, &routes)
        .iter()
        .map(text)
        .collect()
}

#[test]
fn opposite_hosts_of_a_ring_pair_by_their_host_routes() {
    for prefix in [24, 32] {
        let hosts = [0, 1, 2, 3].map(|n| ring_host(n, prefix));
        for n in 0..4 {
            let [next, across, before] =
                [1, 2, 3].map(|step| connect(&hosts[n], &hosts[(n + step) % 4]));
            assert_eq!(
                next,
                [format!("{F0} - {F1}"), format!("{P2F0} - {P2F1}")],
                "{prefix}"
            );
            assert_eq!(
                before,
                [format!("{F1} - {F0}"), format!("{P2F1} - {P2F0}")],
                "{prefix}"
            );
            let diagonal = if n < 2 {
                [(F0, F1), (P2F1, P2F0)]
            } else {
                [(P2F0, P2F1), (F1, F0)]
            };
            assert_eq!(
                across,
                diagonal.map(|(here, there)| format!("{here} - {there}")),
                "{prefix}"
            );
        }
    }
}
