//! Tests with DGX Sparks, in the cablings and with the addresses that owners use. The tests check
//! rails, pairs, addresses, rates and warnings. Each host is a sysfs tree. Its [`RailAdvert`]s
//! describe the rails to a peer; they are encoded into a HELLO of the handshake and decoded again.

use super::machines::{
    F0, F1, P2F0, P2F1, host, pod_function, spark_from_netplan, spark_with, with_arp, workstation,
};
use crate::rails::testbed::{Function, TestHost};
use crate::rails::{Rail, Survey, report};
use proto::flow::pairing::{self, Pair};
use proto::flow::paths::{End, Paths, is_cable_full};
use proto::wire::fields::{Address, Priority, RailAdvert};
use proto::wire::ids::RailId;
use proto::wire::message::{ByTcp, HEADER_BYTES, Header, Hello, Message};
use std::net::Ipv6Addr;

pub(super) fn adverts(survey: &Survey) -> Vec<RailAdvert> {
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
    let token = [1; 16];
    let name = "spark:1".to_owned();
    let gpu = String::new();
    let by_tcp = ByTcp::Off;
    let rails = survey.rails.iter().map(advert).collect();
    let chunk_bytes = 1 << 20;
    let priority = Priority::default();
    let hello = Hello {
        token,
        name,
        chunk_bytes,
        qps_per_rail: 0,
        tuner_hash: 0,
        gpu,
        priority,
        by_tcp,
        rails,
    };
    let frame = Message::Hello(hello).encode();
    let header = Header::decode(frame[..HEADER_BYTES].try_into().unwrap()).unwrap();
    let Ok(Message::Hello(hello)) = Message::decode(header, &frame[HEADER_BYTES..]) else {
        panic!("no HELLO")
    };
    hello.rails
}

struct Meeting {
    /// Each pair as `RAIL ADDRESS - RAIL ADDRESS`, in the order of the first host's rails.
    rails: Vec<String>,
    mbps: u64,
    mtu_bytes: Vec<u32>,
}

/// Pairs the rails of two hosts. Panics if the pairs depend on which host connects.
#[track_caller]
fn pair_hosts(one: &TestHost, other: &TestHost) -> Meeting {
    let ours = adverts(&one.survey(""));
    let theirs = adverts(&other.survey(""));
    let pairs = pairing::pair(&ours, &theirs, &[]);
    let text = |[c, a]: [&[RailAdvert]; 2], pair: &Pair| -> [String; 2] {
        let end = |rail: &RailAdvert, gid: [u8; 16]| match Ipv6Addr::from(gid) {
            ip if ip.is_unicast_link_local() => {
                format!("{} link-local", rail.name.trim_end_matches(":1"))
            }
            ip => format!("{} {}", rail.name.trim_end_matches(":1"), ip.to_canonical()),
        };
        [
            end(&c[pair.connector], pair.connector_gid),
            end(&a[pair.acceptor], pair.acceptor_gid),
        ]
    };
    let rails: Vec<[String; 2]> = pairs
        .iter()
        .map(|pair| text([&ours, &theirs], pair))
        .collect();
    let mut turned: Vec<[String; 2]> = pairing::pair(&theirs, &ours, &[])
        .iter()
        .map(|pair| text([&theirs, &ours], pair))
        .map(|[there, here]| [here, there])
        .collect();
    turned.sort_by_key(|pair| rails.iter().position(|known| known == pair));
    assert_eq!(rails, turned, "who connects makes a difference");
    let both = ends(&ours, &theirs, &pairs);
    warns_of_no_lone_twin(&ours, &both);
    warns_of_no_lone_twin(
        &theirs,
        &both
            .iter()
            .map(|[here, there]| [*there, *here])
            .collect::<Vec<_>>(),
    );
    let mbps = Paths::new(&both).even_rates()[..pairs.len()]
        .iter()
        .sum::<f64>();
    Meeting {
        rails: rails
            .iter()
            .map(|[here, there]| format!("{here} - {there}"))
            .collect(),
        mbps: mbps.round() as u64,
        mtu_bytes: pairs.iter().map(|pair| pair.mtu_bytes).collect(),
    }
}

fn ends(ours: &[RailAdvert], theirs: &[RailAdvert], pairs: &[Pair]) -> Vec<[End; 2]> {
    let end = |rails: &[RailAdvert], at: usize| {
        let rail = RailId::new(at).unwrap();
        let attachment = rails[at].attachment;
        End { rail, attachment }
    };
    pairs
        .iter()
        .map(|pair| [end(ours, pair.connector), end(theirs, pair.acceptor)])
        .collect()
}

/// Checks that no rail without a pair causes a warning (`comm/setup/negotiate.rs`). Such a rail
/// causes a warning if another rail of its cable has a pair, and both rails together would carry
/// more than the other rail alone ([`is_cable_full`] returns false).
#[track_caller]
fn warns_of_no_lone_twin(rails: &[RailAdvert], ends: &[[End; 2]]) {
    for (at, rail) in rails
        .iter()
        .enumerate()
        .filter(|(at, _)| !ends.iter().any(|[here, _]| here.rail.index() == *at))
    {
        let cable = rail.attachment.cable;
        let is_alone = ends.iter().any(|[here, _]| here.attachment.cable == cable)
            && !is_cable_full(ends, cable);
        assert!(!is_alone, "rail {at} would be missed on cable {cable}");
    }
}

#[track_caller]
fn assert_pairs(one: &TestHost, other: &TestHost, rails: &[String], mbps: u64) {
    let found = pair_hosts(one, other);
    assert_eq!(found.rails, rails);
    assert_eq!(found.mbps, mbps, "{:?}", found.rails);
}

#[track_caller]
fn assert_quiet(hosts: &[&TestHost]) {
    hosts
        .iter()
        .for_each(|host| assert_eq!(host.survey("").warnings, []));
}

fn pair(here: &str, there: &str) -> String {
    format!("{here} - {there}")
}

/// The rate of one cable is the limit: a Spark's two PCIe links together carry more.
const ONE_CABLE_MBPS: u64 = 200_000;
/// The rate of a Spark's two PCIe links is the limit: two cables carry more.
const TWO_CABLES_MBPS: u64 = 2 * 112_027;

#[test]
fn two_sparks_with_one_cable() {
    let [one, two] = [1, 2].map(|n: u8| {
        let ip = |net: u8| format!("192.168.{net}.{n}/24");
        host(&spark_with(n, &[0], &[(F0, &ip(100)), (P2F0, &ip(101))]))
    });
    assert_quiet(&[&one, &two]);
    let rails = [
        pair("rocep1s0f0 192.168.100.1", "rocep1s0f0 192.168.100.2"),
        pair("roceP2p1s0f0 192.168.101.1", "roceP2p1s0f0 192.168.101.2"),
    ];
    assert_pairs(&one, &two, &rails, ONE_CABLE_MBPS);
    assert_eq!(pair_hosts(&one, &two).mtu_bytes, [4096, 4096]);
    assert_eq!(one.survey("").speed_mbps, 200_000);
}

#[test]
fn two_sparks_with_two_cables_straight_and_crossed() {
    let four = |n: u8, nets: [u8; 4]| {
        let ips = nets.map(|net| format!("192.168.{net}.{n}/24"));
        let addresses: Vec<(&str, &str)> = [F0, P2F0, F1, P2F1]
            .into_iter()
            .zip(ips.iter().map(String::as_str))
            .collect();
        host(&spark_with(n, &[0, 1], &addresses))
    };
    let one = four(1, [100, 101, 102, 103]);
    let straight = four(2, [100, 101, 102, 103]);
    let crossed = four(2, [102, 103, 100, 101]);
    assert_quiet(&[&one, &straight, &crossed]);
    let nets = [
        (F0, F0, 100),
        (P2F0, P2F0, 101),
        (F1, F1, 102),
        (P2F1, P2F1, 103),
    ];
    let rails = nets.map(|(here, there, net)| {
        pair(
            &format!("{here} 192.168.{net}.1"),
            &format!("{there} 192.168.{net}.2"),
        )
    });
    assert_pairs(&one, &straight, &rails, TWO_CABLES_MBPS);
    let nets = [
        (F0, F1, 100),
        (P2F0, P2F1, 101),
        (F1, F0, 102),
        (P2F1, P2F0, 103),
    ];
    let rails = nets.map(|(here, there, net)| {
        pair(
            &format!("{here} 192.168.{net}.1"),
            &format!("{there} 192.168.{net}.2"),
        )
    });
    assert_pairs(&one, &crossed, &rails, TWO_CABLES_MBPS);
    assert_eq!(one.survey("").speed_mbps, 2 * 112_027);

    let one = host(&spark_with(1, &[0, 1], &[(F0, "10.0.0.1/24")]));
    let crossed = host(&spark_with(2, &[0, 1], &[(F1, "10.0.0.2/24")]));
    let twins = |here: &str, there: &str| {
        pair(
            &format!("{here} link-local"),
            &format!("{there} link-local"),
        )
    };
    let first = pair(&format!("{F0} 10.0.0.1"), &format!("{F1} 10.0.0.2"));
    let rails = [first, twins(P2F0, P2F1), twins(F1, F0), twins(P2F1, P2F0)];
    assert_pairs(&one, &crossed, &rails, TWO_CABLES_MBPS);
}

/// Two cables in one subnet: ports of the same name pair, even if one function is missing.
#[test]
fn two_cables_in_one_subnet() {
    let [one, mut two] = [1, 2].map(|n| {
        let ips = [0, 1, 2, 3].map(|at| format!("169.254.{at}.{n}/16"));
        let addresses: Vec<(&str, &str)> = [F0, P2F0, F1, P2F1]
            .into_iter()
            .zip(ips.iter().map(String::as_str))
            .collect();
        spark_with(n, &[0, 1], &addresses)
    });
    let rail = |name: &str, at: u8| {
        pair(
            &format!("{name} 169.254.{at}.1"),
            &format!("{name} 169.254.{at}.2"),
        )
    };
    let rails = [rail(F0, 0), rail(P2F0, 1), rail(F1, 2), rail(P2F1, 3)];
    assert_quiet(&[&host(&one), &host(&two)]);
    assert_pairs(&host(&one), &host(&two), &rails, TWO_CABLES_MBPS);
    two.iter_mut()
        .filter(|f| f.device == P2F0)
        .for_each(|f| *f = f.clone().down());
    let ours = adverts(&host(&one).survey(""));
    let theirs = adverts(&host(&two).survey(""));
    let names = |pair: &Pair| {
        [&ours[pair.connector], &theirs[pair.acceptor]]
            .map(|rail| rail.name.trim_end_matches(":1").to_owned())
    };
    let found: Vec<[String; 2]> = pairing::pair(&ours, &theirs, &[])
        .iter()
        .map(names)
        .collect();
    assert_eq!(found, [F0, F1, P2F1].map(|name| [name, name]));
}

#[test]
fn p1_of_one_spark_to_p0_of_the_other() {
    let rails = [
        pair("rocep1s0f1 10.0.0.1", "rocep1s0f0 10.0.0.2"),
        pair("roceP2p1s0f1 10.0.1.1", "roceP2p1s0f0 10.0.1.2"),
    ];
    let one = host(&spark_with(
        1,
        &[1],
        &[(F1, "10.0.0.1/24"), (P2F1, "10.0.1.1/24")],
    ));
    let two = host(&spark_with(
        2,
        &[0],
        &[(F0, "10.0.0.2/24"), (P2F0, "10.0.1.2/24")],
    ));
    assert_quiet(&[&one, &two]);
    assert_pairs(&one, &two, &rails, ONE_CABLE_MBPS);

    // Without an address on the second twin, or on both, the twins still pair along the cable.
    let one = host(&spark_with(1, &[1], &[(F1, "10.0.0.1/24")]));
    let two = host(&spark_with(2, &[0], &[(F0, "10.0.0.2/24")]));
    let twins = pair("roceP2p1s0f1 link-local", "roceP2p1s0f0 link-local");
    assert_pairs(
        &one,
        &two,
        &[rails[0].clone(), twins.clone()],
        ONE_CABLE_MBPS,
    );
    let [one, two] = [
        host(&spark_with(1, &[1], &[])),
        host(&spark_with(2, &[0], &[])),
    ];
    assert_pairs(
        &one,
        &two,
        &[
            pair("rocep1s0f1 link-local", "rocep1s0f0 link-local"),
            twins,
        ],
        ONE_CABLE_MBPS,
    );

    // Both twins in one subnet: each pairs within its PCIe domain.
    let one = host(&spark_with(
        1,
        &[1],
        &[(F1, "10.0.0.1/24"), (P2F1, "10.0.0.11/24")],
    ));
    let two = host(&spark_with(
        2,
        &[0],
        &[(F0, "10.0.0.2/24"), (P2F0, "10.0.0.12/24")],
    ));
    assert_quiet(&[&one, &two]);
    let rails = [
        pair("rocep1s0f1 10.0.0.1", "rocep1s0f0 10.0.0.2"),
        pair("roceP2p1s0f1 10.0.0.11", "roceP2p1s0f0 10.0.0.12"),
    ];
    assert_pairs(&one, &two, &rails, ONE_CABLE_MBPS);
}

#[test]
fn both_twins_in_one_subnet() {
    for [ours, theirs] in [
        [
            ["192.168.100.10/24", "192.168.100.14/24"],
            ["192.168.100.11/24", "192.168.100.15/24"],
        ],
        [
            ["169.254.17.3/16", "169.254.201.9/16"],
            ["169.254.240.77/16", "169.254.5.18/16"],
        ],
    ] {
        let functions =
            |n: u8, [first, second]: [&str; 2]| spark_with(n, &[0], &[(F0, first), (P2F0, second)]);
        let one = host(&functions(1, ours));
        let two = host(&functions(2, theirs));
        assert_quiet(&[&one, &two]);
        let ip = |address: &str| address.split('/').next().unwrap().to_owned();
        let rail = |device: &str, at: usize| {
            pair(
                &format!("{device} {}", ip(ours[at])),
                &format!("{device} {}", ip(theirs[at])),
            )
        };
        assert_pairs(&one, &two, &[rail(F0, 0), rail(P2F0, 1)], ONE_CABLE_MBPS);

        // With arp_ignore 0 (Ubuntu's setting, with rp_filter 2) the twins answer ARP for each
        // other. With a strict rp_filter (1), requests for one twin's address get no answer. In
        // both cases there are two warnings: of the subnet and of ARP.
        for (arp_ignore, rp_filter) in [(0, 2), (0, 0), (1, 1)] {
            let said = with_arp(&functions(1, ours), arp_ignore, rp_filter)
                .survey("")
                .warnings;
            assert_eq!(said.len(), 2, "{said:#?}");
            assert!(
                said[0].text.contains(
                    "rocep1s0f0 and roceP2p1s0f0, the twins of one cable, are in one subnet"
                ),
                "{said:#?}"
            );
            assert!(
                said[1].text.starts_with(
                    "an ARP request for the address of one of rocep1s0f0 and roceP2p1s0f0"
                ),
                "{said:#?}"
            );
        }
        let said = TestHost::new(&functions(1, ours)).survey("").warnings;
        assert!(
            said.len() == 1 && said[0].text.contains("are in one subnet"),
            "{said:#?}"
        );
    }
}

#[test]
fn one_twin_without_an_address() {
    let one = host(&spark_with(1, &[0], &[(F0, "192.168.100.1/24")]));
    let two = host(&spark_with(2, &[0], &[(F0, "192.168.100.2/24")]));
    assert_quiet(&[&one, &two]);
    let first = pair("rocep1s0f0 192.168.100.1", "rocep1s0f0 192.168.100.2");
    let twins = pair("roceP2p1s0f0 link-local", "roceP2p1s0f0 link-local");
    assert_pairs(&one, &two, &[first, twins], ONE_CABLE_MBPS);
    // `one` has its address on the first twin, `other` on the second twin.
    let other = host(&spark_with(3, &[0], &[(P2F0, "192.168.100.3/24")]));
    let rails = [
        pair("rocep1s0f0 192.168.100.1", "roceP2p1s0f0 192.168.100.3"),
        pair("roceP2p1s0f0 link-local", "rocep1s0f0 link-local"),
    ];
    assert_pairs(&one, &other, &rails, ONE_CABLE_MBPS);
}

/// The GID table always has the MAC's link-local address, even if the interface does not have it.
#[test]
fn netplan_without_link_local_addresses() {
    let without = |mut functions: Vec<Function>| {
        functions
            .iter_mut()
            .for_each(|function| function.interface_has_link_local = false);
        functions
    };
    let [one, two] = [1, 2].map(|n: u8| {
        let ip = |net: u8| format!("192.168.{net}.{n}/24");
        host(&without(spark_with(
            n,
            &[0],
            &[(F0, &ip(100)), (P2F0, &ip(101))],
        )))
    });
    assert_quiet(&[&one, &two]);
    assert!(
        one.survey("")
            .rails
            .iter()
            .all(|rail| rail.addresses.len() == 1)
    );
    let rails = [
        pair("rocep1s0f0 192.168.100.1", "rocep1s0f0 192.168.100.2"),
        pair("roceP2p1s0f0 192.168.101.1", "roceP2p1s0f0 192.168.101.2"),
    ];
    assert_pairs(&one, &two, &rails, ONE_CABLE_MBPS);

    let survey = host(&without(spark_with(1, &[0], &[(F0, "192.168.100.1/24")]))).survey("");
    assert_eq!(survey.rails.len(), 1);
    assert!(
        survey.warnings.len() == 1
            && survey.warnings[0]
                .text
                .contains("link-local: [ipv6] in netplan"),
        "{survey:#?}"
    );
}

#[test]
fn ipv6_only() {
    let [one, two] = [1, 2].map(|n: u8| {
        let ip = |net: u16| format!("fd00:0:0:{net}::{n}/64");
        host(&spark_with(n, &[0], &[(F0, &ip(100)), (P2F0, &ip(101))]))
    });
    assert_quiet(&[&one, &two]);
    let rails = [
        pair("rocep1s0f0 fd00:0:0:100::1", "rocep1s0f0 fd00:0:0:100::2"),
        pair(
            "roceP2p1s0f0 fd00:0:0:101::1",
            "roceP2p1s0f0 fd00:0:0:101::2",
        ),
    ];
    assert_pairs(&one, &two, &rails, ONE_CABLE_MBPS);

    let [one, two] = [1, 2].map(|n| host(&spark_with(n, &[0, 1], &[])));
    assert_quiet(&[&one, &two]);
    let rails = [F0, P2F0, F1, P2F1]
        .map(|name| pair(&format!("{name} link-local"), &format!("{name} link-local")));
    assert_pairs(&one, &two, &rails, TWO_CABLES_MBPS);
}

#[test]
fn sparse_gid_tables() {
    let functions = |n: u8| {
        let mut functions = spark_with(
            n,
            &[0],
            &[
                (F0, &format!("10.0.0.{n}/24")),
                (P2F0, &format!("10.0.1.{n}/24")),
            ],
        );
        functions
            .iter_mut()
            .find(|f| f.device == F0)
            .unwrap()
            .gid_indices = &[0, 1, 4, 5];
        functions
            .iter_mut()
            .find(|f| f.device == P2F0)
            .unwrap()
            .gid_indices = &[2, 7, 30, 31];
        functions
    };
    let [mut one, two] = [1, 2].map(|n| host(&functions(n)));
    assert_quiet(&[&one, &two]);
    let survey = one.survey("");
    let indices = |at: usize| {
        survey.rails[at]
            .addresses
            .iter()
            .map(|address| address.gid_index)
            .collect::<Vec<_>>()
    };
    assert_eq!((indices(0), indices(1)), (vec![5, 1], vec![31, 7]));
    let rails = [
        pair("rocep1s0f0 10.0.0.1", "rocep1s0f0 10.0.0.2"),
        pair("roceP2p1s0f0 10.0.1.1", "roceP2p1s0f0 10.0.1.2"),
    ];
    assert_pairs(&one, &two, &rails, ONE_CABLE_MBPS);

    // Each port of `one` has more addresses than fit into a HELLO. The HELLO still has the last
    // address of the table, which is the one that pairs.
    for port in &mut one.ports {
        let last = port.gids.last().copied().unwrap();
        for n in 0..40_u16 {
            let gid = Ipv6Addr::new(0xfd00, 9, 9, 9, 0, 0, 1, n).octets();
            port.gids.insert(
                0,
                crate::port::GidEntry {
                    index: 100 + n,
                    gid,
                    ..last
                },
            );
        }
    }
    assert_pairs(&one, &two, &rails, ONE_CABLE_MBPS);
}

/// Three Sparks with a cable in each port. Only `addresses` show which ports a cable joins.
fn triangle(addresses: [&[(&str, &str)]; 3]) -> [TestHost; 3] {
    let mut n = 0;
    addresses.map(|addresses| {
        n += 1;
        host(&spark_with(n, &[0, 1], addresses))
    })
}

/// p0 of each Spark is cabled to p1 of the next.
#[test]
fn a_triangle_with_six_subnets() {
    let hosts = triangle([
        &[
            (F0, "10.0.0.1/24"),
            (P2F0, "10.0.1.1/24"),
            (F1, "10.0.4.1/24"),
            (P2F1, "10.0.5.1/24"),
        ],
        &[
            (F0, "10.0.2.2/24"),
            (P2F0, "10.0.3.2/24"),
            (F1, "10.0.0.2/24"),
            (P2F1, "10.0.1.2/24"),
        ],
        &[
            (F0, "10.0.4.3/24"),
            (P2F0, "10.0.5.3/24"),
            (F1, "10.0.2.3/24"),
            (P2F1, "10.0.3.3/24"),
        ],
    ]);
    assert_quiet(&hosts.each_ref());
    for (one, next, net) in [(0, 1, 0), (1, 2, 2), (2, 0, 4)] {
        let rail = |here: &str, there: &str, net: u8| {
            pair(
                &format!("{here} 10.0.{net}.{}", one + 1),
                &format!("{there} 10.0.{net}.{}", next + 1),
            )
        };
        let rails = [rail(F0, F1, net), rail(P2F0, P2F1, net + 1)];
        assert_pairs(&hosts[one], &hosts[next], &rails, ONE_CABLE_MBPS);
    }
}

/// NVIDIA's connect-three-sparks: p0 of each Spark is cabled to p1 of the next. Each cable has one
/// /24, which contains both twins at both ends.
#[test]
fn a_triangle_as_nvidia_has_it() {
    let hosts = triangle([
        &[
            (F0, "192.168.0.1/24"),
            (P2F0, "192.168.0.2/24"),
            (F1, "192.168.1.1/24"),
            (P2F1, "192.168.1.2/24"),
        ],
        &[
            (F0, "192.168.2.1/24"),
            (P2F0, "192.168.2.2/24"),
            (F1, "192.168.0.3/24"),
            (P2F1, "192.168.0.4/24"),
        ],
        &[
            (F0, "192.168.1.3/24"),
            (P2F0, "192.168.1.4/24"),
            (F1, "192.168.2.3/24"),
            (P2F1, "192.168.2.4/24"),
        ],
    ]);
    assert_quiet(&hosts.each_ref());
    for (one, next, net, [here, there]) in [(0, 1, 0, [1, 3]), (1, 2, 2, [1, 3]), (2, 0, 1, [3, 1])]
    {
        let rail = |twin: u8, one: &str, two: &str| {
            pair(
                &format!("{one} 192.168.{net}.{}", here + twin),
                &format!("{two} 192.168.{net}.{}", there + twin),
            )
        };
        assert_pairs(
            &hosts[one],
            &hosts[next],
            &[rail(0, F0, F1), rail(1, P2F0, P2F1)],
            ONE_CABLE_MBPS,
        );
    }
}

/// The three cables join p0 to p0, p1 to p0, and p1 to p1. Twins without an address pair along
/// their cables.
#[test]
fn a_triangle_where_one_twin_of_each_cable_has_an_address() {
    let hosts = triangle([
        &[(F0, "10.0.0.1/24"), (F1, "10.0.2.1/24")],
        &[(F0, "10.0.0.2/24"), (F1, "10.0.1.2/24")],
        &[(F0, "10.0.2.3/24"), (F1, "10.0.1.3/24")],
    ]);
    assert_quiet(&hosts.each_ref());
    let twins = |here: &str, there: &str| {
        pair(
            &format!("{here} link-local"),
            &format!("{there} link-local"),
        )
    };
    for (one, two, rails) in [
        (
            0,
            1,
            [
                pair("rocep1s0f0 10.0.0.1", "rocep1s0f0 10.0.0.2"),
                twins(P2F0, P2F0),
            ],
        ),
        (
            1,
            2,
            [
                pair("rocep1s0f1 10.0.1.2", "rocep1s0f1 10.0.1.3"),
                twins(P2F1, P2F1),
            ],
        ),
        (
            0,
            2,
            [
                pair("rocep1s0f1 10.0.2.1", "rocep1s0f0 10.0.2.3"),
                twins(P2F1, P2F0),
            ],
        ),
    ] {
        assert_pairs(&hosts[one], &hosts[two], &rails, ONE_CABLE_MBPS);
    }
}

/// Four Sparks, p0 of each cabled to p1 of the next.
#[test]
fn a_ring_of_four_has_no_rails_on_its_diagonals() {
    let nets = |n: u8| {
        let back = (n + 3) % 4;
        [
            (F0, 2 * n),
            (P2F0, 2 * n + 1),
            (F1, 2 * back),
            (P2F1, 2 * back + 1),
        ]
        .map(|(device, net)| (device, format!("10.0.{net}.{}/24", n + 1)))
    };
    let ring = |all: bool| {
        [0, 1, 2, 3].map(|n| {
            let nets = nets(n);
            let addresses: Vec<(&str, &str)> = nets
                .iter()
                .map(|(device, ip)| (*device, ip.as_str()))
                .collect();
            let some: Vec<_> = addresses
                .iter()
                .copied()
                .filter(|(device, _)| all || device.starts_with("rocep"))
                .collect();
            host(&spark_with(n, &[0, 1], &some))
        })
    };
    for hosts in [ring(true), ring(false)] {
        assert_quiet(&hosts.each_ref());
        for n in 0..4 {
            let next = &hosts[(n + 1) % 4];
            let across = &hosts[(n + 2) % 4];
            let found = pair_hosts(&hosts[n], next);
            assert_eq!(
                (found.rails.len(), found.mbps),
                (2, ONE_CABLE_MBPS),
                "{:?}",
                found.rails
            );
            assert!(
                found.rails[0].starts_with("rocep1s0f0 10.0.")
                    && found.rails[0].contains(" - rocep1s0f1 10.0.")
            );
            assert!(
                found.rails[1].starts_with("roceP2p1s0f0 ")
                    && found.rails[1].contains(" - roceP2p1s0f1 ")
            );
            assert_eq!(pair_hosts(&hosts[n], across).rails, Vec::<String>::new());
        }
    }
    let text = pairing::describe(&adverts(&ring(true)[0].survey("")));
    let rails = "rocep1s0f0:1 (10.0.0.1/24); roceP2p1s0f0:1 (10.0.1.1/24); rocep1s0f1:1 (10.0.6.1/24); roceP2p1s0f1:1 (10.0.7.1/24)";
    assert_eq!(text, rails);
}

#[test]
fn a_switch_with_everything_in_one_subnet() {
    for speed_mbps in [100_000, 200_000] {
        let on_switch = |n: u8, cables: &[u8]| {
            let ips = [0, 1, 2, 3].map(|at| format!("10.1.{at}.{n}/16"));
            let addresses = [F0, P2F0, F1, P2F1]
                .into_iter()
                .zip(ips.iter().map(String::as_str));
            let here = addresses.filter(|(device, _)| {
                cables
                    .iter()
                    .any(|port| device.ends_with(&format!("f{port}")))
            });
            let mut functions = spark_with(n, cables, &here.collect::<Vec<_>>());
            functions
                .iter_mut()
                .filter(|f| f.v4.is_some())
                .for_each(|f| f.speed_mbps = speed_mbps);
            functions
        };
        let same = |names: &[&str]| -> Vec<String> {
            let at = |name: &&str| {
                [F0, P2F0, F1, P2F1]
                    .iter()
                    .position(|other| other == name)
                    .unwrap()
            };
            names
                .iter()
                .map(|name| {
                    pair(
                        &format!("{name} 10.1.{}.1", at(name)),
                        &format!("{name} 10.1.{}.2", at(name)),
                    )
                })
                .collect()
        };
        let [one, two] = [1, 2].map(|n| host(&on_switch(n, &[0])));
        assert_quiet(&[&one, &two]);
        assert_pairs(&one, &two, &same(&[F0, P2F0]), u64::from(speed_mbps));
        let [one, two] = [1, 2].map(|n| host(&on_switch(n, &[0, 1])));
        assert_quiet(&[&one, &two]);
        let both = (2 * u64::from(speed_mbps)).min(TWO_CABLES_MBPS);
        assert_pairs(&one, &two, &same(&[F0, P2F0, F1, P2F1]), both);

        // The second twin of p0 is down on host `one`, and its peer has only one cable. The pairs
        // still use both PCIe links of `one`.
        let mut functions = on_switch(1, &[0, 1]);
        let down = functions.iter_mut().find(|f| f.device == P2F0).unwrap();
        *down = down.clone().down();
        let one = host(&functions);
        for cable in [0, 1] {
            let found = pair_hosts(&one, &host(&on_switch(2, &[cable])));
            assert_eq!(found.mbps, u64::from(speed_mbps), "{:?}", found.rails);
            assert!(
                found.rails.iter().any(|rail| rail.starts_with(P2F1)),
                "{:?}",
                found.rails
            );
        }
    }
}

/// If the rails were paired in their order, both pairs would share one PCIe link (112 Gb/s).
#[test]
fn ports_of_other_machines_do_not_crowd_one_pcie_link() {
    let mut functions = spark_with(
        1,
        &[0, 1],
        &[
            (F0, "10.0.0.1/24"),
            (P2F0, "10.0.0.2/24"),
            (F1, "10.0.0.3/24"),
        ],
    );
    functions.retain(|f| f.device != P2F1);
    let port = |number: u8, name: &'static str| {
        let (device, netdev) = if number == 0 {
            ("mlx5_0", "ens1f0np0")
        } else {
            ("mlx5_1", "ens1f1np1")
        };
        Function {
            device,
            netdev: Some(netdev),
            phys_port: Some(name),
            v4: Some([10, 0, 0, 9 + number]),
            ..workstation(number)
        }
    };
    let found = pair_hosts(&host(&functions), &host(&[port(0, "p0"), port(1, "p1")]));
    assert_eq!(found.mbps, 200_000, "{:?}", found.rails);
}

#[test]
fn a_spark_with_a_workstation() {
    // One twin fills the workstation's port of 100 Gb/s, also if a switch gives the Spark 200 Gb/s.
    for (speed_mbps, second) in [
        (100_000, Some("192.168.101.1/24")),
        (200_000, Some("192.168.101.1/24")),
        (100_000, None),
    ] {
        let addresses = [
            (F0, "192.168.100.1/24"),
            (P2F0, second.unwrap_or("192.168.101.1/24")),
        ];
        let mut functions = spark_with(1, &[0], &addresses[..if second.is_some() { 2 } else { 1 }]);
        functions
            .iter_mut()
            .filter(|f| f.device.ends_with("f0"))
            .for_each(|f| f.speed_mbps = speed_mbps);
        let spark = host(&functions);
        let other = host(&[Function {
            netdev_mtu: 1500,
            ..workstation(0)
        }]);
        assert_quiet(&[&spark]);
        let said = other.survey("").warnings;
        assert!(
            said.len() == 1 && said[0].text.contains("enp65s0np0 has MTU 1500"),
            "{said:#?}"
        );
        assert_pairs(
            &spark,
            &other,
            &[pair("rocep1s0f0 192.168.100.1", "mlx5_0 192.168.100.9")],
            100_000,
        );
        assert_eq!(pair_hosts(&spark, &other).mtu_bytes, [1024]);
    }
    // The twins of both cables are in the workstation's subnet. One rail of each PCIe link pairs.
    let all = [
        (F0, "192.168.100.1/24"),
        (P2F0, "192.168.100.2/24"),
        (F1, "192.168.100.3/24"),
        (P2F1, "192.168.100.4/24"),
    ];
    let found = pair_hosts(
        &host(&spark_with(1, &[0, 1], &all)),
        &host(&[workstation(0)]),
    );
    assert_eq!(found.mbps, 100_000);
    let rails = [
        pair("rocep1s0f0 192.168.100.1", "mlx5_0 192.168.100.9"),
        pair("roceP2p1s0f0 192.168.100.2", "mlx5_0 192.168.100.9"),
    ];
    assert_eq!(found.rails, rails);
}

#[test]
fn virtual_functions_in_pods() {
    let [one, two] = [1, 2].map(|n| host(&[pod_function(n, 0), pod_function(n, 2)]));
    assert_quiet(&[&one, &two]);
    let rails = [
        pair("mlx5_4 192.168.177.1", "mlx5_4 192.168.177.2"),
        pair("mlx5_9 192.168.179.1", "mlx5_9 192.168.179.2"),
    ];
    assert_pairs(&one, &two, &rails, ONE_CABLE_MBPS);
    let bare = host(&spark_with(
        3,
        &[0],
        &[(F0, "192.168.177.3/24"), (P2F0, "192.168.179.3/24")],
    ));
    let rails = [
        pair("mlx5_4 192.168.177.1", "rocep1s0f0 192.168.177.3"),
        pair("mlx5_9 192.168.179.1", "roceP2p1s0f0 192.168.179.3"),
    ];
    assert_pairs(&one, &bare, &rails, ONE_CABLE_MBPS);
    let bare = host(&spark_with(3, &[0], &[(F0, "192.168.177.3/24")]));
    let lone = host(&[
        pod_function(1, 0),
        Function {
            v4: None,
            ..pod_function(1, 2)
        },
    ]);
    let twins = pair("mlx5_9 link-local", "roceP2p1s0f0 link-local");
    assert_pairs(&lone, &bare, &[rails[0].clone(), twins], ONE_CABLE_MBPS);

    let survey = host(&[pod_function(1, 0)]).survey("");
    assert_eq!((survey.rails.len(), survey.speed_mbps), (1, 112_027));
    assert!(
        survey.warnings.len() == 1
            && survey.warnings[0]
                .text
                .contains("no other function of its cable is visible"),
        "{survey:#?}"
    );
    assert!(report(&survey).contains("(VF of 0000:01:00.0)"));
}

#[test]
fn functions_without_a_cable_may_be_absent() {
    let addresses = |n: u8| {
        [
            (F1, format!("10.0.0.{n}/24")),
            (P2F1, format!("10.0.1.{n}/24")),
        ]
    };
    let [listed, absent] = [1, 2].map(|n| {
        let addresses = addresses(n);
        let addresses: Vec<(&str, &str)> = addresses
            .iter()
            .map(|(device, ip)| (*device, ip.as_str()))
            .collect();
        let mut functions = spark_with(n, &[1], &addresses);
        functions.retain(|f| n == 1 || f.phys_port == Some("p1"));
        host(&functions)
    });
    assert_quiet(&[&listed, &absent]);
    assert_eq!(
        (
            listed.survey("").refused.len(),
            absent.survey("").refused.len()
        ),
        (2, 0)
    );
    let rails = [
        pair("rocep1s0f1 10.0.0.1", "rocep1s0f1 10.0.0.2"),
        pair("roceP2p1s0f1 10.0.1.1", "roceP2p1s0f1 10.0.1.2"),
    ];
    assert_pairs(&listed, &absent, &rails, ONE_CABLE_MBPS);
}

#[test]
fn the_guides_netplan_files() {
    let hosts = |kind: &str, count: u8| -> Vec<TestHost> {
        (1..=count)
            .map(|n| {
                host(&spark_from_netplan(
                    n,
                    &format!(
                        "{}/../../docs/guide/netplan/{kind}-{n}.yaml",
                        env!("CARGO_MANIFEST_DIR")
                    ),
                ))
            })
            .collect()
    };
    let names = |found: &Meeting| -> Vec<String> {
        let words = |rail: &String| {
            rail.split(' ')
                .step_by(3)
                .map(str::to_owned)
                .collect::<Vec<_>>()
                .join(" ")
        };
        found.rails.iter().map(words).collect()
    };
    for (kind, count) in [("pair", 2), ("triangle", 3), ("ring", 4)] {
        let hosts = hosts(kind, count);
        assert_quiet(&hosts.iter().collect::<Vec<_>>());
        for (at, one) in hosts.iter().enumerate() {
            let next = pair_hosts(one, &hosts[(at + 1) % hosts.len()]);
            match kind {
                "pair" => {
                    assert_eq!(
                        names(&next),
                        [F0, P2F0, F1, P2F1].map(|name| format!("{name} {name}"))
                    );
                    assert_eq!(next.mbps, TWO_CABLES_MBPS);
                }
                _ => {
                    assert_eq!(
                        names(&next),
                        [format!("{F0} {F1}"), format!("{P2F0} {P2F1}")],
                        "{kind}"
                    );
                    assert_eq!(next.mbps, ONE_CABLE_MBPS);
                }
            }
            if kind == "ring" {
                assert_eq!(
                    pair_hosts(one, &hosts[(at + 2) % hosts.len()]).rails,
                    Vec::<String>::new()
                );
            }
        }
    }
}
