use super::*;
use crate::wire::fields::Attachment;

fn rail(name: &str, port: &str, cable: u8, speed_mbps: u32, addresses: &[&str]) -> RailAdvert {
    let address = |text: &&str| {
        let (ip, prefix) = text.split_once('/').map_or((*text, None), |(ip, p)| {
            (ip, Some(p.parse::<u8>().unwrap()))
        });
        match ip.parse().unwrap() {
            std::net::IpAddr::V4(v4) => Address {
                gid: v4.to_ipv6_mapped().octets(),
                prefix: prefix.map(|p| p + 96),
            },
            std::net::IpAddr::V6(v6) => Address {
                gid: v6.octets(),
                prefix,
            },
        }
    };
    RailAdvert {
        name: name.into(),
        phys_port: port.into(),
        attachment: Attachment {
            link: 0,
            link_mbps: 0,
            cable,
            port_mbps: speed_mbps,
        },
        speed_mbps,
        mtu_bytes: 4096,
        addresses: addresses.iter().map(address).collect(),
        is_usable: true,
    }
}

fn indices(connector: &[RailAdvert], acceptor: &[RailAdvert]) -> Vec<(usize, usize)> {
    pair(connector, acceptor, &[])
        .iter()
        .map(|p| (p.connector, p.acceptor))
        .collect()
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
    assert_eq!(
        indices(&spark(1), &spark(2)),
        [(0, 0), (1, 1), (2, 2), (3, 3)]
    );
    let mut turned = spark(2);
    turned.reverse();
    assert_eq!(
        indices(&spark(1), &turned),
        [(0, 3), (1, 2), (2, 1), (3, 0)]
    );
    assert_eq!(indices(&spark(1)[..2], &spark(2)), [(0, 0), (1, 1)]);
    assert_eq!(indices(&spark(1)[1..2], &spark(2)), [(0, 1)]);
}

#[test]
fn a_rail_of_another_subnet_is_not_reached_by_its_link_local_address() {
    let far = vec![rail("x", "p0", 0, 100_000, &["fe80::9/64", "10.0.0.1/24"])];
    assert_eq!(indices(&spark(1), &far), []);
    assert_eq!(describe(&far), "x (10.0.0.1/24)");
    assert_eq!(
        describe(&[rail("y", "p0", 0, 1, &["fe80::9/64"])]),
        "y (fe80::9/64)"
    );
}

#[test]
fn the_twin_without_an_address_goes_with_its_cable() {
    let bare = |n: u8| {
        let mut rails = spark(n);
        rails[1].addresses.truncate(1);
        rails[3].addresses.truncate(1);
        rails
    };
    assert_eq!(
        indices(&bare(1), &bare(2)),
        [(0, 0), (1, 1), (2, 2), (3, 3)]
    );
    let pairs = pair(&bare(1), &spark(2), &[]);
    assert!(
        pairs
            .iter()
            .any(|p| (p.connector, p.acceptor) == (1, 1) && is_link_local(&p.acceptor_gid))
    );
    // The cable joins p0 of one machine to p1 of the other. The twins with addresses show this.
    let crossed: Vec<RailAdvert> = [(2, "p1", 1), (3, "p1", 1)]
        .iter()
        .zip(["192.168.100.2/24", ""])
        .map(|((ll, port, cable), ip)| {
            let ll = format!("fe80::{ll}/64");
            let all: Vec<&str> = [ll.as_str(), ip]
                .into_iter()
                .filter(|a| !a.is_empty())
                .collect();
            rail("crossed", port, *cable, 100_000, &all)
        })
        .collect();
    let at_first = pair(&bare(1), &crossed, &[]);
    assert_eq!(
        at_first
            .iter()
            .map(|p| (p.connector, p.acceptor))
            .collect::<Vec<_>>(),
        [(0, 0), (1, 1)]
    );
    // Each pair returns with the same addresses, even without the pair that identified the cable.
    for Pair {
        connector,
        acceptor,
        connector_gid,
        acceptor_gid,
        ..
    } in at_first
    {
        let again =
            pair_again(&bare(1)[connector], &crossed[acceptor], &[], 1).expect("it is a pair");
        assert_eq!(
            (again.connector_gid, again.acceptor_gid),
            (connector_gid, acceptor_gid)
        );
    }
}

/// A rail without a link or an address, with its placeholder.
fn late(of: &RailAdvert) -> RailAdvert {
    RailAdvert {
        addresses: rail("", "", 0, 1, &["fe80::ff"]).addresses,
        is_usable: false,
        ..of.clone()
    }
}

#[test]
fn a_rail_without_a_link_or_an_address_is_paired_by_its_cable_for_later() {
    let without_link_local = |n| {
        let mut rails = spark(n);
        rails
            .iter_mut()
            .for_each(|rail| _ = rail.addresses.remove(0));
        rails
    };
    for hosts in [[spark(1), spark(2)], [1, 2].map(without_link_local)] {
        let [mut ours, mut theirs] = hosts;
        // One twin is late on one side, a whole cable on both.
        theirs[1] = late(&theirs[1]);
        for at in [2, 3] {
            (ours[at], theirs[at]) = (late(&ours[at]), late(&theirs[at]));
        }
        let pairs = pair(&ours, &theirs, &[]);
        let places = pairs.iter().map(|p| (p.connector, p.acceptor));
        assert_eq!(places.collect::<Vec<_>>(), [(0, 0), (1, 1), (2, 2), (3, 3)]);
        let usable = pairs.iter().map(|p| p.is_usable);
        assert_eq!(usable.collect::<Vec<_>>(), [true, false, false, false]);
        assert!(pairs.iter().all(|pair| !pair.is_routed), "{pairs:?}");
        let is_late = pairs.iter().map(|p| p.is_late);
        assert_eq!(is_late.collect::<Vec<_>>(), [false, true, true, true]);
        // The cables that have addresses are without a pair, so their routes are needed.
        for rail in &mut theirs[..2] {
            rail.addresses = self::rail("", "", 0, 1, &["10.9.0.9/24"]).addresses;
        }
        assert_eq!(existing_routes(&ours[..2], &theirs, |_| true).len(), 4);
    }
    // A rail that has lost its link has its address, and is not late.
    let [ours, mut theirs] = [spark(1), spark(2)];
    theirs.iter_mut().for_each(|rail| rail.is_usable = false);
    assert!(pair(&ours, &theirs, &[]).iter().all(|pair| !pair.is_late));
    // In a ring, the peer's second cable leads to another host.
    let [ours, mut theirs] = [spark(1), spark(2)];
    theirs[2] = rail("f1", "p1", 1, 100_000, &["10.0.0.1/24"]);
    theirs[3] = late(&theirs[3]);
    assert_eq!(indices(&ours, &theirs), [(0, 0), (1, 1)]);
}

#[test]
fn every_second_attempt_goes_by_link_local_addresses() {
    let is_by_link_local = |c: &RailAdvert, a: &RailAdvert, attempt| {
        let pair = pair_again(c, a, &[], attempt).expect("it is a pair");
        assert_eq!(
            is_link_local(&pair.connector_gid),
            is_link_local(&pair.acceptor_gid)
        );
        is_link_local(&pair.connector_gid)
    };
    let here = &spark(1)[0];
    let there = &spark(2)[0];
    assert_eq!(
        [1, 2, 3, 4].map(|attempt| is_by_link_local(here, there, attempt)),
        [false, true, false, true]
    );
    // An address whose interface cannot be seen has no prefix. The result is the same.
    let unseen = rail("f0", "p0", 0, 100_000, &["fe80::1", "192.168.100.3/24"]);
    let without = rail("f0", "p0", 0, 100_000, &["192.168.100.3/24"]);
    for (one, other) in [(here, &unseen), (&unseen, here)] {
        assert_eq!(
            [1, 2].map(|attempt| is_by_link_local(one, other, attempt)),
            [false, true]
        );
    }
    for (one, other) in [(here, &without), (&without, here)] {
        assert_eq!(
            [1, 2, 3].map(|attempt| is_by_link_local(one, other, attempt)),
            [false; 3]
        );
    }
    let bare = rail("f0", "p0", 0, 100_000, &["fe80::5"]);
    assert_eq!(
        [1, 2].map(|attempt| is_by_link_local(here, &bare, attempt)),
        [true; 2]
    );
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
fn an_unavailable_rail_gets_the_remainder_later() {
    let away = |mut rails: Vec<RailAdvert>, lost: &[usize]| {
        lost.iter().for_each(|at| rails[*at].is_usable = false);
        rails
    };
    let all = |connector: &[RailAdvert], acceptor: &[RailAdvert]| -> Vec<(usize, usize, bool)> {
        pair(connector, acceptor, &[])
            .iter()
            .map(|p| (p.connector, p.acceptor, p.is_usable))
            .collect()
    };
    let mended = [(0, 0, true), (1, 1, false), (2, 2, true), (3, 3, true)];
    assert_eq!(all(&away(spark(1), &[1]), &spark(2)), mended);
    assert_eq!(all(&spark(1), &away(spark(2), &[1])), mended);
    assert_eq!(all(&away(spark(1), &[1]), &away(spark(2), &[1])), mended);
    // In one subnet, usable rails are paired with each other, whatever their order.
    let one = |n: u8| -> Vec<RailAdvert> {
        let rail = |at: u8| rail("r", "", at, 100_000, &[&format!("10.0.{n}.{at}/16")]);
        (0..2).map(rail).collect()
    };
    assert_eq!(
        all(&away(one(1), &[0]), &away(one(2), &[1])),
        [(0, 1, false), (1, 0, true)]
    );
}

#[test]
fn the_pair_takes_the_smaller_of_both() {
    let mut peer = spark(2);
    peer[0].mtu_bytes = 1024;
    peer[0].speed_mbps = 25_000;
    let pairs = pair(&spark(1), &peer, &[]);
    assert_eq!(
        (pairs[0].mtu_bytes, pairs[0].speed_mbps, pairs[1].mtu_bytes),
        (1024, 25_000, 4096)
    );
}

#[test]
fn unknown_prefixes_have_the_usual_length() {
    let known = [rail("a", "", 0, 1, &["10.1.2.3/16"])];
    assert_eq!(
        indices(&known, &[rail("b", "", 0, 1, &["10.1.9.9"])]),
        [(0, 0)]
    );
    assert_eq!(
        indices(
            &[rail("a", "", 0, 1, &["10.1.2.3"])],
            &[rail("b", "", 0, 1, &["10.1.9.9"])]
        ),
        []
    );
    assert_eq!(
        indices(
            &[rail("a", "", 0, 1, &["2001:db8::1"])],
            &[rail("b", "", 0, 1, &["2001:db8::2"])]
        ),
        [(0, 0)]
    );
}

#[test]
fn a_fast_port_serves_no_second_rail_of_one_pcie_link() {
    let on = |link: u8, mut rail: RailAdvert| {
        (rail.attachment.link, rail.attachment.link_mbps) = (link, 112_000);
        rail
    };
    let slow = |name: &str, ip: &str, link| on(link, rail(name, "p0", link, 50_000, &[ip]));
    let fast = [on(0, rail("w", "p0", 0, 200_000, &["10.0.0.9/24"]))];
    let same = [slow("a", "10.0.0.1/24", 0), slow("b", "10.0.0.2/24", 0)];
    let other = [slow("a", "10.0.0.1/24", 0), slow("b", "10.0.0.2/24", 1)];
    assert_eq!(
        (indices(&same, &fast), indices(&fast, &same)),
        (vec![(0, 0)], vec![(0, 0)])
    );
    assert_eq!(
        (indices(&other, &fast), indices(&fast, &other)),
        (vec![(0, 0), (1, 0)], vec![(0, 0), (0, 1)])
    );
}

/// Returns the routes that exist. `has` tells whether a route exists. Its arguments are the name of
/// the accepting side's rail and the connecting side's address.
fn asked(
    connector: &[RailAdvert],
    acceptor: &[RailAdvert],
    has: impl Fn(&str, &str) -> bool,
) -> Vec<Route> {
    existing_routes(connector, acceptor, |route| {
        let to = Ipv6Addr::from(route.connector_gid)
            .to_canonical()
            .to_string();
        has(&acceptor[route.acceptor].name, &to)
    })
}

/// Returns rails whose addresses share no subnet with the rails of [`spark`].
fn far() -> Vec<RailAdvert> {
    let mut rails = spark(2);
    for (rail, net) in rails.iter_mut().zip(100..) {
        rail.addresses[1] = Address::new(
            std::net::Ipv4Addr::new(10, 0, net, 2)
                .to_ipv6_mapped()
                .octets(),
            Some(24),
        );
    }
    rails
}

#[test]
fn routes_pair_what_shares_no_subnet() {
    assert_eq!(indices(&spark(1), &far()), []);
    // All pairs have routes and all rails have the same link number, so the ports' names and the
    // order of the rails decide.
    let pairs = pair(&spark(1), &far(), &asked(&spark(1), &far(), |_, _| true));
    let found: Vec<_> = pairs
        .iter()
        .map(|p| (p.connector, p.acceptor, p.is_routed))
        .collect();
    assert_eq!(found, [0, 1, 2, 3].map(|at| (at, at, true)));
    assert!(
        !pairs
            .iter()
            .any(|pair| is_link_local(&pair.connector_gid) || is_link_local(&pair.acceptor_gid))
    );
    // The accepting side has two routes, from different ports (as between opposite Sparks of a
    // ring).
    let diagonal = |from: &str, to: &str| {
        matches!(
            (from, to),
            ("f1", "192.168.100.1") | ("P2f0", "192.168.103.1")
        )
    };
    let pairs = pair(&spark(1), &far(), &asked(&spark(1), &far(), diagonal));
    assert_eq!(
        pairs
            .iter()
            .map(|p| (p.connector, p.acceptor))
            .collect::<Vec<_>>(),
        [(0, 2), (3, 1)]
    );
    let fast = [rail("w", "", 0, 200_000, &["10.9.0.1/24"])];
    let pairs = pair(&spark(1), &fast, &asked(&spark(1), &fast, |_, _| true));
    assert_eq!(
        pairs
            .iter()
            .map(|p| (p.connector, p.acceptor))
            .collect::<Vec<_>>(),
        [(0, 0), (1, 0)]
    );
}

#[test]
fn routes_come_after_subnets_and_are_asked_for_only_where_rails_are_left() {
    assert_eq!(existing_routes(&spark(1), &spark(2), |_| true), []);
    let mut mixed = far();
    mixed[0] = spark(2)[0].clone();
    let routes = asked(&spark(1), &mixed, |_, _| true);
    assert!(routes.iter().all(|route| route.acceptor != 0), "{routes:?}");
    let found = pair(&spark(1), &mixed, &routes);
    let found: Vec<_> = found
        .iter()
        .map(|p| (p.connector, p.acceptor, p.is_routed))
        .collect();
    assert_eq!(
        found,
        [(0, 0, false), (1, 1, true), (2, 2, true), (3, 3, true)]
    );
    let ipv6 = [rail("v6", "", 0, 1, &["fe80::9", "2001:db8::1/64"])];
    assert_eq!(existing_routes(&ipv6, &far(), |_| true), []);
    let far = [rail("far", "", 0, 1, &["fe80::8", "2001:db8:1::1/64"])];
    assert_eq!(existing_routes(&ipv6, &far, |_| true).len(), 1);
}

#[test]
fn a_routed_pair_shows_no_cable() {
    let bare = |mut rails: Vec<RailAdvert>| {
        rails.truncate(2);
        rails[1].addresses.truncate(1);
        rails[1].is_usable = false;
        rails
    };
    let one = bare(spark(1));
    let other = bare(far());
    let found = pair(&one, &other, &asked(&one, &other, |_, _| true));
    assert_eq!(
        found
            .iter()
            .map(|p| (p.connector, p.acceptor))
            .collect::<Vec<_>>(),
        [(0, 0)]
    );
}

#[test]
fn a_routed_pair_returns_by_its_route() {
    let one = &spark(1)[0];
    let other = &far()[0];
    let [one_slice, other_slice] = [one, other].map(std::slice::from_ref);
    let again =
        |routes: &[Route], attempt| pair_again(one, other, routes, attempt).expect("it is a pair");
    let routes = asked(one_slice, other_slice, |_, _| true);
    let pair = again(&routes, 1);
    assert_eq!(
        (pair.connector_gid, pair.acceptor_gid),
        (one.addresses[1].gid, other.addresses[1].gid)
    );
    assert!(pair.is_routed && is_link_local(&again(&routes, 2).connector_gid));
    assert!(is_link_local(&again(&[], 1).connector_gid));
}

#[test]
fn only_an_address_outside_of_the_own_subnet_needs_a_route() {
    let own = |prefix| Address {
        prefix,
        ..spark(1)[0].addresses[1]
    };
    let needs = |prefix, peer: &str| {
        needs_route(&own(prefix), rail("", "", 0, 1, &[peer]).addresses[0].gid)
    };
    assert!(!needs(Some(120), "192.168.100.2") && needs(Some(120), "192.168.101.2"));
    assert!(needs(Some(128), "192.168.100.2") && !needs(None, "10.0.0.1"));
    let link_local = spark(1)[0].addresses[0];
    assert!(!needs_route(&link_local, spark(2)[1].addresses[0].gid));
}
