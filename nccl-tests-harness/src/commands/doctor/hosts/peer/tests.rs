//! Comparisons of two hosts, and grades of measured paths, with one injected fault at a time.

use super::compare::compare;
use super::grade;
use super::neighbours;
use super::partner::address;
use super::reach::parse;
use super::sheet::{NcclSheet, Neighbour, PluginSheet, QosSheet, Sheet};
use crate::commands::doctor::finding::{Finding, Severity, Verdict};
use crate::commands::doctor::hosts::rail::{Pair, PairedBy, RailSheet, pairs};
use crate::commands::doctor::hosts::together::{Figures, Grade, Outcome, Path, Rate};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr};

/// Makes the sheet of a Spark with two cables. Its four rails have the addresses
/// 192.168.N.`number`/24, where each rail has its own N from `subnets`. Rails 0 and 1 are the
/// functions of p0.
fn spark(number: u8, subnets: [u8; 4]) -> Sheet {
    let devices = ["rocep1s0f0", "roceP2p1s0f0", "rocep1s0f1", "roceP2p1s0f1"];
    let rail = |at: usize| RailSheet {
        name: format!("{}:1", devices[at]),
        netdev: Some(format!("eth{at}")),
        phys_port: Some(format!("p{}", at / 2)),
        link: (at % 2) as u8,
        link_mbps: 112_027,
        cable: (at / 2) as u8,
        port_mbps: 200_000,
        share_mbps: 59_300,
        mtu_bytes: 4096,
        addresses: vec![(
            Ipv4Addr::new(192, 168, subnets[at], number).to_ipv6_mapped(),
            Some(24),
        )],
    };
    Sheet {
        host: format!("spark-{number}"),
        program: "1.0".to_owned(),
        plugin: Some(PluginSheet {
            path: "/usr/local/lib/libnccl-net-spark.so".to_owned(),
            sha256: "aa".repeat(32),
        }),
        nccl: Some(NcclSheet {
            path: "/usr/lib/libnccl.so.2".to_owned(),
            version: Some("2.30.7+cuda13.0".to_owned()),
            build_id: "b1".to_owned(),
        }),
        settings: BTreeMap::from([("NCCL_SPARK_TUNER".to_owned(), "auto".to_owned())]),
        gpu: Some("NVIDIA GB10".to_owned()),
        rails: (0..4).map(rail).collect(),
        qos: (0..4).map(|at| (format!("eth{at}"), qos(3))).collect(),
        interfaces: (0..4)
            .map(|at| (format!("eth{at}"), format!("4c:bb:47:00:0{number}:0{at}")))
            .collect(),
        neighbours: Vec::new(),
        verdict: Verdict::Good,
        findings: Vec::new(),
    }
}

fn qos(priority: u8) -> QosSheet {
    QosSheet {
        priority,
        pfc: 0b1000,
        text: format!("RoCE has priority {priority}"),
    }
}

const SUBNETS: [u8; 4] = [100, 101, 102, 103];

fn ids(found: &[Finding]) -> Vec<(Severity, &'static str)> {
    let own = |finding: &Finding| match finding.id {
        Cow::Borrowed(id) => (finding.severity, id),
        Cow::Owned(_) => panic!("{finding:?} has the id of another host"),
    };
    found.iter().map(own).collect()
}

fn compared(here: &Sheet, there: &Sheet) -> Vec<Finding> {
    compare(
        here,
        there,
        &pairs(&here.rails, &there.rails, |_, _, _| false),
    )
}

#[test]
fn two_hosts_that_are_alike_have_no_differences() {
    let one = spark(1, SUBNETS);
    let other = spark(2, SUBNETS);
    assert_eq!(compared(&one, &other), []);
    assert_eq!(pairs(&one.rails, &other.rails, |_, _, _| false).len(), 4);
    // In a triangle one cable leads to this peer, and the other to the third host.
    assert_eq!(compared(&one, &spark(2, [100, 101, 7, 8])), []);
}

/// A difference between two hosts: its description, the change that causes it, the severity and id
/// of its finding, and a word of the finding's text.
type Difference = (
    &'static str,
    fn(&mut Sheet),
    Severity,
    &'static str,
    &'static str,
);

fn set(host: &mut Sheet, name: &str, value: &str) {
    host.settings.insert(name.to_owned(), value.to_owned());
}

const DIFFERENCES: [Difference; 14] = [
    (
        "another version of nccl-spark",
        |host| host.program = "2.0".to_owned(),
        Severity::Fragile,
        "peer-version",
        "1.0",
    ),
    (
        "another build of the plugin",
        |host| host.plugin.as_mut().unwrap().sha256 = "bb".repeat(32),
        Severity::Fragile,
        "peer-plugin",
        "libnccl-net-spark",
    ),
    (
        "no plugin",
        |host| host.plugin = None,
        Severity::Broken,
        "peer-plugin-missing",
        "has no plugin",
    ),
    (
        "another version of NCCL",
        |host| host.nccl.as_mut().unwrap().version = Some("2.28.9".to_owned()),
        Severity::Fragile,
        "peer-nccl",
        "2.28.9",
    ),
    (
        "another build of NCCL",
        |host| host.nccl.as_mut().unwrap().build_id = "b2".to_owned(),
        Severity::Note,
        "peer-nccl-build",
        "b2",
    ),
    (
        "another tuner table",
        |host| {
            set(
                host,
                "NCCL_SPARK_TUNER_TABLE",
                &"for=GB10/4x224054/x;".repeat(9),
            )
        },
        Severity::Broken,
        "peer-tuner",
        "NCCL_SPARK_TUNER_TABLE",
    ),
    (
        "another GPU",
        |host| host.gpu = Some("NVIDIA RTX PRO 6000".to_owned()),
        Severity::Broken,
        "peer-tuner",
        "RTX PRO 6000",
    ),
    (
        "another NCCL_ALGO",
        |host| set(host, "NCCL_ALGO", "Ring"),
        Severity::Fragile,
        "peer-settings",
        "NCCL_ALGO",
    ),
    (
        "NCCL_SPARK_RING_TCP on one host alone",
        |host| set(host, "NCCL_SPARK_RING_TCP", "1"),
        Severity::Broken,
        "peer-settings",
        "NCCL_SPARK_RING_TCP",
    ),
    (
        "another traffic class",
        |host| set(host, "NCCL_IB_TC", "106"),
        Severity::Fragile,
        "peer-settings",
        "NCCL_IB_TC",
    ),
    (
        "another priority on a rail",
        |host| host.qos.extend([("eth1".to_owned(), qos(0))]),
        Severity::Fragile,
        "peer-priority",
        "RoCE has priority 0",
    ),
    (
        "another path MTU",
        |host| host.rails[1].mtu_bytes = 1024,
        Severity::Slow,
        "peer-mtu",
        "4096",
    ),
    (
        "one function of a cable in another subnet",
        |host| host.rails[1].addresses[0].0 = Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped(),
        Severity::Slow,
        "peer-half-cable",
        "has no counterpart",
    ),
    (
        "a cable from p0 to p1",
        |host| {
            host.rails[..2]
                .iter_mut()
                .for_each(|rail| rail.phys_port = Some("p1".to_owned()))
        },
        Severity::Note,
        "asymmetric-cabling",
        "p1",
    ),
];

#[test]
fn each_difference_is_found_on_either_side_and_names_both_hosts() {
    for (what, plant, severity, id, word) in DIFFERENCES {
        for is_there in [false, true] {
            let mut hosts = [spark(1, SUBNETS), spark(2, SUBNETS)];
            plant(&mut hosts[usize::from(is_there)]);
            let found = compared(&hosts[0], &hosts[1]);
            let is_it = |one: &Finding| (one.severity, &*one.id) == (severity, id);
            assert!(
                !found.is_empty() && found.iter().all(is_it),
                "{what}: {found:?}"
            );
            let text = &found[0].text;
            assert!(text.contains(word), "{what}: {text}");
            let names_both = text.contains("spark-1") && text.contains("spark-2");
            assert!(names_both || id == "peer-plugin-missing", "{what}: {text}");
        }
    }
}

/// NetworkManager's or a blog's recipe on both hosts can give both the same address. The hosts then
/// still share a subnet, but no packet reaches the other.
#[test]
fn an_address_that_both_hosts_have_is_named() {
    let one = spark(1, SUBNETS);
    let mut other = spark(2, SUBNETS);
    other.rails[1].addresses = one.rails[1].addresses.clone();
    let found = compared(&one, &other);
    assert_eq!(ids(&found), [(Severity::Broken, "peer-duplicate-address")]);
    let text = &found[0].text;
    assert!(
        text.starts_with(
            "roceP2p1s0f0:1 of spark-1 and roceP2p1s0f0:1 of spark-2 have one address, 192.168."
        ),
        "{text}"
    );
}

#[test]
fn hosts_without_a_common_subnet_are_listed_with_their_subnets() {
    let found = compared(&spark(1, SUBNETS), &spark(2, [1, 2, 3, 4]));
    assert_eq!(ids(&found), [(Severity::Broken, "no-common-subnet")]);
    assert!(
        found[0].text.contains("192.168.100.1/24") && found[0].text.contains("192.168.4.2/24"),
        "{}",
        found[0].text
    );
    let mut none = spark(2, SUBNETS);
    none.rails.clear();
    assert!(
        compared(&spark(1, SUBNETS), &none)[0]
            .text
            .contains("spark-2 has no rail")
    );
}

#[test]
fn hosts_without_a_common_subnet_pair_where_this_host_has_a_route() {
    let one = spark(1, SUBNETS);
    let other = spark(2, [1, 2, 3, 4]);
    let has_route = |rail: &RailSheet, own: Ipv6Addr, peer: Ipv6Addr| {
        rail.name == one.rails[1].name
            && own == rail.addresses[0].0
            && peer == other.rails[2].addresses[0].0
    };
    let found = pairs(&one.rails, &other.rails, has_route);
    assert_eq!(
        found,
        [Pair {
            here: 1,
            there: 2,
            by: PairedBy::Route
        }]
    );
    assert_eq!(
        ids(&compare(&one, &other, &found)),
        [],
        "the two ends of a route need not be one cable's"
    );
}

/// One cable leads from p0 to p1 with both functions, and the other from p1 to p0.
#[test]
fn crossed_cables_pair_by_their_subnets() {
    let one = spark(1, [100, 101, 102, 103]);
    let other = spark(2, [102, 103, 100, 101]);
    let found = pairs(&one.rails, &other.rails, |_, _, _| false);
    let places: Vec<(usize, usize)> = found.iter().map(|pair| (pair.here, pair.there)).collect();
    assert_eq!(places, [(0, 2), (1, 3), (2, 0), (3, 1)]);
    assert!(
        ids(&compared(&one, &other))
            .iter()
            .all(|id| *id == (Severity::Note, "asymmetric-cabling"))
    );
}

#[test]
fn a_hardware_address_of_another_function_or_host_is_found() {
    let one = spark(1, SUBNETS);
    let other = spark(2, SUBNETS);
    let all: Vec<(usize, usize)> = (0..4).map(|at| (at, at)).collect();
    let entry = |subnet: u8, hardware: &str, interface: &str| Neighbour {
        address: Ipv4Addr::new(192, 168, subnet, 2),
        hardware: hardware.to_owned(),
        interface: interface.to_owned(),
    };
    let right = [
        entry(100, "4C:BB:47:00:02:00", "eth0"),
        entry(101, "4c:bb:47:00:02:01", "eth1"),
        entry(7, "aa", "eth0"),
    ];
    assert_eq!(neighbours::judge(&one, &right, &other, &all), []);
    let twins = neighbours::judge(
        &one,
        &[entry(100, "4c:bb:47:00:02:01", "eth0")],
        &other,
        &all,
    );
    assert_eq!(
        ids(&twins),
        [(Severity::Fragile, "arp-answered-by-another")]
    );
    assert!(
        twins[0].text.contains("which is eth1 of spark-2"),
        "{twins:?}"
    );
    let foreign = neighbours::judge(
        &one,
        &[entry(100, "00:11:22:33:44:55", "eth0")],
        &other,
        &all,
    );
    assert_eq!(ids(&foreign), [(Severity::Fragile, "arp-foreign")]);
    // An entry of another interface does not affect the rail.
    assert_eq!(
        neighbours::judge(
            &one,
            &[entry(100, "00:11:22:33:44:55", "wlan0")],
            &other,
            &all
        ),
        []
    );
    let swapped = neighbours::swapped(&[Pair {
        here: 0,
        there: 2,
        by: PairedBy::Subnet,
    }]);
    assert_eq!(swapped, [(2, 0)]);
}

/// Makes a path of one pair. `rates` are the rates to the peer and back, in Gb/s; without them the
/// path has failed. The expected rate is 112 Gb/s.
fn way(at: usize, rates: Option<(f64, f64)>) -> Path {
    let expected_mbps = Some(112_000.0);
    let figures = |(to, from): (f64, f64)| Figures {
        to_peer: Rate::of(to * 1e3, expected_mbps),
        from_peer: Rate::of(from * 1e3, expected_mbps),
        latency_us: 2.0,
        wrong_bytes: 0,
        path_mtu_bytes: Some(4096),
    };
    let outcome = rates.map_or(Outcome::Failed("no acknowledgement".to_owned()), |rates| {
        Outcome::Measured(figures(rates))
    });
    let names = || vec![format!("mlx5_{at}:1")];
    Path {
        here: names(),
        there: names(),
        expected_mbps,
        port_mtu_bytes: Some(4096),
        outcome,
    }
}

#[test]
fn a_slow_rail_is_distinguished_from_a_slow_host() {
    let judge =
        |pairs: &[Path], merged: Option<&Path>| ids(&grade::judge("spark-2", pairs, merged));
    let good = || way(0, Some((108.0, 107.0)));
    assert_eq!(judge(&[good(), good()], Some(&good())), []);
    // A rail with 13 Gb/s despite correct attributes, in one or both directions. The slow rail also
    // explains the slow total.
    for slow in [(13.0, 13.0), (108.0, 13.0), (13.0, 108.0)] {
        let found = judge(
            &[good(), way(1, Some(slow))],
            Some(&way(9, Some((60.0, 60.0)))),
        );
        assert_eq!(found, [(Severity::Slow, "slow-rail")]);
    }
    let found = grade::judge("spark-2", &[good(), way(1, Some((108.0, 13.0)))], None);
    assert!(
        found[0].text.contains("mlx5_1:1")
            && found[0].text.contains("13.0 Gb/s (12 %) back of 112 Gb/s"),
        "{found:?}"
    );
    assert!(found[0].cure.as_ref().unwrap().contains("poweroff"));
    // If all rails are slow, no rail has `slow-rail`.
    let all = judge(
        &[way(0, Some((40.0, 40.0))), way(1, Some((40.0, 40.0)))],
        None,
    );
    assert_eq!(
        all,
        [(Severity::Slow, "slow-path"), (Severity::Slow, "slow-path")]
    );
    // 13 Gb/s on every function is a state of the node. It explains the slow total.
    let node = judge(
        &[way(0, Some((13.0, 12.9))), way(1, Some((13.2, 13.0)))],
        Some(&way(9, Some((13.0, 13.0)))),
    );
    assert_eq!(node, [(Severity::Slow, "slow-node")]);
    assert_eq!(
        judge(&[way(0, Some((13.0, 13.0)))], None),
        [(Severity::Slow, "slow-node")]
    );
    assert_eq!(
        judge(&[good(), good()], Some(&way(9, Some((60.0, 108.0))))),
        [(Severity::Slow, "slow-merged")]
    );
    assert_eq!(
        judge(&[good(), way(1, Some((95.0, 108.0)))], None),
        [(Severity::Note, "fair-rail")]
    );
}

/// If no rail reaches its expected rate, rails are compared with the best rail.
#[test]
fn a_rail_that_is_much_slower_than_the_others_is_named_where_none_is_good() {
    let judge = |pairs: &[Path]| grade::judge("spark-2", pairs, None);
    let found = judge(&[way(0, Some((60.0, 60.0))), way(1, Some((13.0, 60.0)))]);
    assert_eq!(
        ids(&found),
        [(Severity::Slow, "slow-path"), (Severity::Slow, "slow-rail")]
    );
    assert!(
        found[1]
            .text
            .ends_with("; another rail carries 54 % of the expected rate"),
        "{found:?}"
    );
    let found = judge(&[way(0, Some((60.0, 60.0))), way(1, Some((25.0, 60.0)))]);
    assert_eq!(ids(&found), [(Severity::Slow, "slow-path"); 2]);
    let good = |at| way(at, Some((108.0, 108.0)));
    let bad = way(2, Some((13.0, 13.0)));
    let last = |pairs: &[Path]| judge(pairs)[0].text.rsplit("; ").next().unwrap().to_owned();
    assert_eq!(
        last(&[good(0), bad.clone()]),
        "another rail carries the expected rate"
    );
    assert_eq!(
        last(&[good(0), good(1), bad]),
        "other rails carry the expected rate"
    );
}

#[test]
fn a_switch_with_a_small_mtu_is_found_by_the_path_mtu_that_was_measured() {
    let with = |port: Option<u32>, measured: Option<u32>, gbps: f64| {
        let mut path = way(1, Some((gbps, gbps)));
        path.port_mtu_bytes = port;
        if let Outcome::Measured(figures) = &mut path.outcome {
            figures.path_mtu_bytes = measured;
        }
        path
    };
    let good = || way(0, Some((108.0, 108.0)));
    let judge = |path: Path| grade::judge("spark-2", &[good(), path], None);
    for gbps in [108.0, 95.0, 60.0] {
        let found = judge(with(Some(4096), Some(1024), gbps));
        assert_eq!(
            ids(&found),
            [(Severity::Slow, "switch-mtu")],
            "whatever the rate is"
        );
        let begins = "packets above 1024 bytes get lost between mlx5_1:1 here and mlx5_1:1 of spark-2, whose ports \
                      have path MTU 4096: ";
        assert!(found[0].text.starts_with(begins), "{found:?}");
        assert!(
            found[0]
                .cure
                .as_ref()
                .unwrap()
                .contains("MTU 9000 (4200 at least)"),
            "{found:?}"
        );
    }
    // No finding for ports with a small MTU, nor for unknown path MTUs.
    for (port, measured) in [
        (Some(1024), Some(1024)),
        (Some(4096), None),
        (None, Some(1024)),
    ] {
        assert_eq!(judge(with(port, measured, 108.0)), []);
    }
}

#[test]
fn a_dead_rail_is_worse_where_no_other_carries() {
    let judge = |pairs: &[Path]| ids(&grade::judge("spark-2", pairs, None));
    assert_eq!(
        judge(&[way(0, None), way(1, Some((108.0, 108.0)))]),
        [(Severity::Slow, "pair-unreachable")]
    );
    assert_eq!(
        judge(&[way(0, None), way(1, None)]),
        [(Severity::Broken, "pair-unreachable"); 2]
    );
    let mut wrong = way(0, Some((108.0, 108.0)));
    if let Outcome::Measured(figures) = &mut wrong.outcome {
        figures.wrong_bytes = 3;
    }
    assert_eq!(judge(&[wrong]), [(Severity::Broken, "wrong-bytes")]);
    // Without an expected rate nothing is graded.
    let mut free = way(0, Some((1.0, 1.0)));
    free.expected_mbps = None;
    if let Outcome::Measured(figures) = &mut free.outcome {
        (figures.to_peer, figures.from_peer) = (Rate::of(1.0, None), Rate::of(1.0, None));
    }
    assert_eq!(judge(&[free]), []);
}

#[test]
fn facts_from_another_host_are_bounded_and_printable() {
    let mut sheet = spark(2, SUBNETS);
    sheet.host = "spark-2\x1b[2J\n".to_owned();
    sheet.settings.insert("HF_TOKEN".to_owned(), "x".to_owned());
    sheet.findings.push(Finding {
        severity: Severity::Note,
        id: "x".into(),
        text: "y".repeat(9999),
        cure: None,
        now: None,
    });
    let taken = sheet.clone().received().unwrap();
    assert_eq!(
        (taken.host.as_str(), taken.findings[0].text.len()),
        ("spark-2?[2J?", 2000)
    );
    assert!(!taken.settings.contains_key("HF_TOKEN"));
    sheet.rails = vec![sheet.rails[0].clone(); 33];
    assert!(sheet.received().unwrap_err().contains("33 rails"));
}

#[test]
fn a_rate_is_graded_against_the_expected_one() {
    let grade = |mbps| Rate::of(mbps, Some(1000.0)).grade.unwrap();
    assert_eq!([950.0, 901.0].map(grade), [Grade::Good; 2]);
    assert_eq!([900.0, 850.0, 800.0].map(grade), [Grade::Fair; 3]);
    assert_eq!([799.0, 130.0, 0.0].map(grade), [Grade::Bad; 3]);
    assert_eq!(Rate::of(5.0, None).grade, None);
    assert_eq!(Rate::of(5.0, Some(0.0)).grade, None);
}

#[test]
fn a_partners_output_is_checked() {
    let token = "0123456789abcdef0123456789abcdef";
    let (address, parsed) = parse(&format!(" 3 192.168.1.12:40001 {token}")).unwrap();
    assert!(address.to_string() == "192.168.1.12:40001" && parsed.text() == token);
    assert!(parse(&format!(" 3 [fd00::2]:40001 {token}")).is_ok());
    let error = |text: &str| format!("{:#}", parse(text).unwrap_err());
    assert!(error(&format!(" 1 192.168.1.12:40001 {token}")).contains("version 1"));
    assert!(error(" 3 spark-2 x").contains("token"));
    assert!(error(&format!(" 3 192.168.1.12 {token}")).contains("its address"));
    assert!(error("").contains("are expected"));
}

#[test]
fn a_partner_listens_on_the_given_address_or_on_that_of_ssh() {
    let ssh = Some("192.168.1.7 51034 192.168.1.12 22");
    let of = |wanted, ssh| {
        address(wanted, ssh)
            .map(|ip| ip.to_string())
            .map_err(|error| error.to_string())
    };
    assert_eq!(of(None, ssh).unwrap(), "192.168.1.12");
    assert_eq!(of(Some("10.0.0.1"), ssh).unwrap(), "10.0.0.1");
    assert_eq!(of(Some("lo"), None).unwrap(), "127.0.0.1");
    assert!(of(None, None).unwrap_err().contains("--interface"));
    assert!(of(None, Some("what is this")).is_err());
    assert!(
        of(Some("nosuch0"), ssh)
            .unwrap_err()
            .contains("the interfaces: ")
    );
}
