//! Tests of the plugin over machines that are cabled to each other without a switch, and in
//! containers that may open only some devices. Settings have their defaults, unless a test sets one
//! for its ranks (`NCCL_SPARK_RING_TCP`, for example).
//!
//! A port's *twins* are its two RDMA functions, each a rail of its own. In a ring of four hosts, a
//! *diagonal* is a pair of opposite hosts, which no cable joins.

mod common;

use common::{ProgramOutput, built, is_built, nccl_spark};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use softverbs::profile::Profile;
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv6Addr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

fn run(arguments: &str) -> ProgramOutput {
    run_as(nccl_spark(), arguments)
}

fn run_as(mut command: Command, arguments: &str) -> ProgramOutput {
    command
        .args(arguments.split_whitespace())
        .args(["--json", "-"]);
    command
        .arg("--plugin")
        .arg(built().expect("is_built() was checked first"));
    command
        .env_remove("NCCL_IB_HCA")
        .env_remove("NCCL_SPARK_SYSFS")
        .env_remove("SOFTVERBS_DIR");
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().unwrap().wait_with_output().unwrap().into()
}

/// Checks that all bytes are right, that nothing warns, and that `is_right` accepts the log line of
/// every connection, which says over which rails it runs, or over TCP. `rows` is the expected
/// number of rows in the table.
#[track_caller]
fn assert_right(output: &ProgramOutput, rows: usize, is_right: impl Fn(&str) -> bool) {
    assert_eq!(output.status, Some(0), "{output:?}");
    assert!(!output.err.contains("WARN"), "{output:?}");
    let json: Value = serde_json::from_str(&output.out).unwrap();
    let table = json["rows"].as_array().unwrap();
    assert!(
        table.len() == rows && table.iter().all(|row| row["wrong"] == 0),
        "{json}"
    );
    let ranks = json["connections"].as_array().unwrap();
    let lines: Vec<&str> = ranks
        .iter()
        .flat_map(|rank| rank.as_array().unwrap())
        .map(|line| line.as_str().unwrap())
        .collect();
    assert!(
        lines.len() >= ranks.len() && lines.iter().all(|line| is_right(line)),
        "{lines:#?}"
    );
}

/// Returns true for a line about two rails: the twins of one port, connected to the twins of the
/// port at the other end of the cable.
fn is_one_cable(line: &str) -> bool {
    let up = "over 2 rails: rocep1s0f0:1 to rocep1s0f1:1, roceP2p1s0f0:1 to roceP2p1s0f1:1";
    let down = "over 2 rails: rocep1s0f1:1 to rocep1s0f0:1, roceP2p1s0f1:1 to roceP2p1s0f0:1";
    line.contains(up) || line.contains(down)
}

/// The parts of a file of `crates/host/topologies` that a fabric can have.
#[derive(Deserialize)]
struct Topology {
    wires: Vec<String>,
    hosts: BTreeMap<String, IgnoredAny>,
    pairs: Option<IgnoredAny>,
    routes: Option<IgnoredAny>,
}

impl Topology {
    /// Returns the `wire` lines of a profile, if the wires between Sparks alone define the pairs.
    fn wires(&self) -> Option<String> {
        // `spark-1.p0` is `0.p0` in a profile.
        let end = |end: &str| {
            let (number, port) = end.strip_prefix("spark-")?.split_once('.')?;
            Some(format!("{}.{port}", number.parse::<usize>().ok()? - 1))
        };
        let mut lines = String::new();
        for (wire, name) in self.wires.iter().zip('a'..) {
            let (one, other) = wire.split_once(" - ")?;
            lines += &format!("wire {name} ends={},{}\n", end(one)?, end(other)?);
        }
        (self.pairs.is_none() && self.routes.is_none()).then_some(lines)
    }
}

/// Returns the rails of each possible connection, in the form of its log line.
fn connections(profile: &Profile) -> BTreeMap<[usize; 2], BTreeSet<String>> {
    let mut connections = BTreeMap::<_, BTreeSet<String>>::new();
    for [one, other] in profile.wires.iter().map(|wire| wire.ends) {
        for ends in [[one, other], [other, one]] {
            let [ours, theirs] = ends.map(|port| {
                let rails = profile.rails.iter();
                rails.filter(move |rail| rail.cable == port.cable)
            });
            let both = ours.zip(theirs);
            let pairs = both.map(|(our, their)| format!("{}:1 to {}:1", our.name, their.name));
            let hosts = ends.map(|port| port.node);
            connections.entry(hosts).or_default().extend(pairs);
        }
    }
    connections
}

/// A wire has a subnet for each pair of its rails, or one subnet as in NVIDIA's playbook
/// connect-three-sparks.
#[test]
fn jobs_are_right_over_the_wires_of_each_topology() {
    if !is_built() {
        return;
    }
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/host/topologies");
    let mut cablings = BTreeMap::new();
    for file in std::fs::read_dir(folder).unwrap() {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
        let topology: Topology = basic_toml::from_str(&text).unwrap();
        cablings.extend(topology.wires().map(|wires| (wires, topology.hosts.len())));
    }
    for name in ["spark-triangle", "spark-ring"] {
        let built_in = Profile::load(name, 0.01).unwrap().to_text();
        let built_in = built_in.replace(" subnets=each", "");
        assert!(
            cablings.keys().any(|wires| built_in.ends_with(wires)),
            "{built_in}"
        );
    }
    for (wires, hosts) in cablings {
        jobs_are_right(&wires, hosts);
        jobs_are_right(&wires.replace('\n', " subnets=one\n"), hosts);
    }
}

/// Runs each collective for which the hosts have cables, and a job for each two joined hosts.
fn jobs_are_right(wires: &str, hosts: usize) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("profile");
    let text = Profile::load("spark-2cable", 0.01).unwrap().to_text() + wires;
    std::fs::write(&file, &text).unwrap();
    let connections = connections(&Profile::parse("wires", &text).unwrap());
    let is_ring = (0..hosts).all(|host| connections.contains_key(&[host, (host + 1) % hosts]));
    let mut collectives = Vec::new();
    if is_ring {
        collectives.extend([
            "all-gather",
            "all-reduce",
            "reduce-scatter",
            "broadcast",
            "sendrecv",
        ]);
    }
    if connections.len() == hosts * (hosts - 1) {
        collectives.push("alltoall");
    }
    let of_all = collectives
        .iter()
        .map(|collective| format!("{collective} -r {hosts}"));
    let of_two = connections.keys().map(|[one, other]| {
        format!(
            "sendrecv -r 2 --rank-env 0:SOFTVERBS_NODE={one} --rank-env 1:SOFTVERBS_NODE={other}"
        )
    });
    let is_right = |line: &str| {
        let rails = line.split(" rails: ").nth(1).unwrap_or_default();
        let rails = rails.split(" (").next().unwrap().split(", ");
        let rails: BTreeSet<String> = rails.map(str::to_owned).collect();
        connections.values().any(|known| *known == rails)
    };
    for job in of_all.chain(of_two) {
        let job = format!("{job} --profile {} -b 96 -e 1M -f 256 -n 2", file.display());
        assert_right(&run(&job), 2, is_right);
    }
}

/// Before the plugin makes any queue pair, it detects that the two hosts have no rail in common. So
/// it does not wait for an address that never answers.
#[test]
fn collectives_over_a_rings_diagonal_fail_and_name_both_sides() {
    if !is_built() {
        return;
    }
    let swapped = "all-gather -r 4 --rank-env 1:SOFTVERBS_NODE=2 --rank-env 2:SOFTVERBS_NODE=1";
    for job in ["alltoall -r 4", swapped] {
        let output = run(&format!(
            "{job} --profile spark-ring --scale 0.01 -b 1M -e 1M -n 1"
        ));
        assert_eq!(output.status, Some(1), "{output:?}");
        // A rank that fails closes its listeners. So other ranks may report a closed connection
        // instead of the missing rail.
        let errors = output
            .err
            .lines()
            .filter(|line| line.starts_with("nccl-spark: rank "));
        let named: Vec<&str> = errors
            .filter_map(|line| line.split_once("no rail in common: "))
            .map(|(_, rest)| rest)
            .collect();
        assert!(!named.is_empty(), "{output:?}");
        for rest in named {
            // The error names four rails of each side. Their addresses are 10.CABLE.TWIN.NODE, and
            // each side has two cables.
            assert_eq!(
                (
                    rest.matches("rocep1s0f").count(),
                    rest.matches("roceP2p1s0f").count()
                ),
                (4, 4),
                "{rest}"
            );
            let cables: BTreeSet<&str> = rest.split("(10.").skip(1).map(|ip| &ip[..1]).collect();
            assert_eq!(cables.len(), 4, "{rest}");
            assert!(
                rest.contains("(the diagonal of a ring)") && rest.contains("NCCL_ALGO=Ring"),
                "{rest}"
            );
        }
        for late in ["timed out", "no progress", "Connection timed out"] {
            assert!(!output.err.contains(late), "{late}: {output:?}");
        }
    }
}

/// Each process uses its cables to its two neighbours, and TCP to the opposite host.
#[test]
fn diagonals_of_a_ring_use_tcp_where_set_and_other_pairs_use_rails() {
    if !is_built() {
        return;
    }
    let set: Vec<String> = (0..4)
        .map(|rank| format!("--rank-env {rank}:NCCL_SPARK_RING_TCP=1"))
        .collect();
    let job = format!(
        "alltoall -r 4 {} --profile spark-ring --scale 0.01 -b 32 -e 1M -f 256 -n 2",
        set.join(" ")
    );
    let output = run(&job);
    let by_tcp =
        |line: &str| line.contains("by TCP over") && line.contains("because no rail reaches it");
    assert_right(&output, 2, |line| is_one_cable(line) || by_tcp(line));
    let json: Value = serde_json::from_str(&output.out).unwrap();
    for rank in json["connections"].as_array().unwrap() {
        let lines: Vec<&str> = rank
            .as_array()
            .unwrap()
            .iter()
            .map(|line| line.as_str().unwrap())
            .collect();
        // Each host has one opposite host and two neighbours.
        let count =
            |is_one: &dyn Fn(&str) -> bool| lines.iter().filter(|line| is_one(line)).count();
        assert_eq!((count(&by_tcp), count(&is_one_cable)), (1, 2), "{lines:#?}");
    }
}

/// Pairs of rails with host routes between them. The first is a rail of host 0 or 1. The second is
/// a rail of the opposite host: 2 for host 0, 3 for host 1.
const DIAGONAL: [[&str; 2]; 2] = [
    ["rocep1s0f0", "rocep1s0f1"],
    ["roceP2p1s0f1", "roceP2p1s0f0"],
];

/// Returns commands that give a network namespace the interfaces of a ring of four hosts. Each
/// address, of one rail of one host, has a routing table of its own. The table has a route if the
/// rail is the host's rail in a pair of [`DIAGONAL`], and `has(host, rail)` returns true. The route
/// leads to the pair's other rail, on the opposite host. The table declares all other destinations
/// unreachable.
fn ring_of_routes(profile: &Profile, has: impl Fn(usize, &str) -> bool) -> String {
    let rail = |name: &str| {
        profile
            .rails
            .iter()
            .position(|rail| rail.name == name)
            .unwrap()
    };
    let address = |node, rail| Ipv6Addr::from(profile.gids(node, rail)[1]).to_canonical();
    // By default, the kernel looks in the table `local` first. All hosts' addresses are in this
    // namespace, so `local` would make every destination local, whatever the other tables contain.
    // These rules move `local` behind the other tables.
    let mut commands =
        "set -e; ip link set lo up; ip rule add pref 100 lookup local; ip rule del pref 0\n"
            .to_owned();
    commands += "cd /proc/sys/net/ipv4/conf/all; echo 1 >arp_ignore; echo 2 >arp_announce; cd \"$OLDPWD\"\n";
    for (index, spec) in profile.rails.iter().enumerate() {
        let netdev = &spec.netdev;
        commands += &format!("ip link add {netdev} type veth peer name peer{index}\n");
        commands += &format!("ip link set {netdev} up; ip link set peer{index} up\n");
        for node in 0..4 {
            let own = address(node, index);
            let table = 200 + 4 * index + node;
            commands += &format!(
                "ip address add {own}/24 dev {netdev}; ip rule add pref 1 from {own} lookup {table}\n"
            );
            commands += &format!("ip route add unreachable default table {table}\n");
            let turned = |[one, other]: [&'static str; 2]| {
                if node < 2 { [one, other] } else { [other, one] }
            };
            let ends = DIAGONAL
                .map(turned)
                .into_iter()
                .find(|[here, _]| *here == spec.name);
            if let Some([_, there]) = ends.filter(|[here, _]| has(node, here)) {
                let peer = address((node + 2) % 4, rail(there));
                commands += &format!("ip route add {peer}/32 dev {netdev} table {table}\n");
            }
        }
    }
    commands
}

/// A profile of a ring whose hosts forward packets, for jobs in a network namespace with routes.
struct ForwardingRing {
    profile: Profile,
    file: PathBuf,
    _folder: tempfile::TempDir,
}

impl ForwardingRing {
    /// Returns `None` if the test must be skipped.
    fn new() -> Option<Self> {
        if !is_built() {
            return None;
        }
        let can_make = in_namespace("set -e; ip link add here type veth peer name there")
            .arg("true")
            .status();
        if !can_make.is_ok_and(|status| status.success()) {
            common::skip::skip(
                "this user cannot make a network namespace with interfaces (unshare --map-root-user --net)",
            );
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("forwarding-ring");
        let forwards: String = (0..4)
            .map(|node| format!("node {node} forwards=p0,p1\n"))
            .collect();
        let profile = Profile::load("spark-ring", 0.01).unwrap();
        std::fs::write(&file, profile.to_text() + &forwards).unwrap();
        Some(Self {
            profile,
            file,
            _folder: folder,
        })
    }

    /// Runs a job whose hosts have the routes for which `has_route` returns true
    /// ([`ring_of_routes`]).
    fn run(&self, job: &str, has_route: fn(usize, &str) -> bool) -> ProgramOutput {
        let mut command = in_namespace(&ring_of_routes(&self.profile, has_route));
        command
            .arg(nccl_spark().get_program())
            .env("NCCL_SOCKET_IFNAME", "lo");
        run_as(command, &format!("{job} --profile {}", self.file.display()))
    }
}

/// Returns a command that runs its arguments in a new network namespace, after `commands`.
fn in_namespace(commands: &str) -> Command {
    let mut command = Command::new("unshare");
    command
        .args(["--map-root-user", "--net", "bash", "-c"])
        .arg(format!("{commands}\nexec \"$0\" \"$@\""));
    command
}

/// The kernel's routes pair the rails of opposite hosts, and the fabric's NICs forward the packets.
#[test]
fn a_rings_diagonal_goes_by_rails_where_there_are_routes() {
    let Some(ring) = ForwardingRing::new() else {
        return;
    };
    let output = ring.run("alltoall -r 4 -b 32 -e 1M -f 256 -n 2", |_, _| true);
    assert_right(&output, 2, |line| is_one_cable(line) || is_diagonal(line));
    let json: Value = serde_json::from_str(&output.out).unwrap();
    for rank in json["connections"].as_array().unwrap() {
        let lines: Vec<&str> = rank
            .as_array()
            .unwrap()
            .iter()
            .map(|line| line.as_str().unwrap())
            .collect();
        let peers = |is_one: fn(&str) -> bool| {
            let found = lines
                .iter()
                .filter(|line| is_one(line))
                .map(|line| line.split(" over ").next());
            found.collect::<BTreeSet<_>>().len()
        };
        assert_eq!(
            (peers(is_diagonal), peers(is_one_cable)),
            (1, 2),
            "{lines:#?}"
        );
    }
}

/// Returns true for a line about the two rails that the routes of [`DIAGONAL`] join.
fn is_diagonal(line: &str) -> bool {
    let joins = |one, other| line.contains(&format!("{one}:1 to {other}:1"));
    line.contains("over 2 rails: ")
        && (DIAGONAL.iter().all(|[one, other]| joins(one, other))
            || DIAGONAL.iter().all(|[one, other]| joins(other, one)))
}

/// With `NCCL_SPARK_RING_TCP=1`, TCP is allowed between hosts that share no subnet. Then the plugin
/// does not use the routes.
#[test]
fn a_rings_diagonal_goes_by_tcp_where_set_although_there_are_routes() {
    let Some(ring) = ForwardingRing::new() else {
        return;
    };
    let tcp: String = (0..4)
        .map(|rank| format!(" --rank-env {rank}:NCCL_SPARK_RING_TCP=1"))
        .collect();
    let job = format!("alltoall -r 4 -b 1K -e 1K -n 1{tcp}");
    let output = ring.run(&job, |_, _| true);
    assert_right(&output, 1, |line| {
        is_one_cable(line) || line.contains("by TCP over")
    });
}

/// The opposite hosts 0 and 2 have one route each: host 0 from its rail of the first pair in
/// [`DIAGONAL`], and host 2 from its rail of the second pair. So for each route, the rail at its
/// far end has no route back.
#[test]
fn a_rings_diagonal_without_a_route_back_is_an_error_that_names_the_missing_route() {
    let Some(ring) = ForwardingRing::new() else {
        return;
    };
    // The route may be added later, so the ranks try until the time limit. Index 1 is that of the
    // IPv4 address: the simulated NICs also forward packets to link-local addresses.
    let variables = |rank| {
        format!(
            "--rank-env {rank}:NCCL_SPARK_CONNECT_TIMEOUT_S=4 --rank-env {rank}:NCCL_IB_GID_INDEX=1"
        )
    };
    let limit = [0, 1].map(variables).join(" ");
    let output = ring.run(
        &format!("all-gather -r 2 --rank-env 1:SOFTVERBS_NODE=2 {limit} -b 1M -e 1M -n 1"),
        |node, rail| [(0, "rocep1s0f0"), (2, "roceP2p1s0f0")].contains(&(node, rail)),
    );
    assert!(
        output.status == Some(1)
            && output.err.contains("it has no route from 10.")
            && output.err.contains("via NEXT_HOST dev"),
        "{output:?}"
    );
}

/// A pod has only some of a host's devices. The others are listed, but cannot be opened.
#[test]
fn devices_missing_in_a_container_are_no_errors() {
    if !is_built() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let profile = Profile::load("spark-2cable", 0.01).unwrap();
    let file = folder.path().join("pods");
    let pods = "node 0 forbids=rocep1s0f1,roceP2p1s0f1\nnode 1 forbids=rocep1s0f1,roceP2p1s0f1\n";
    std::fs::write(&file, profile.to_text() + pods).unwrap();
    let job = format!(
        "all-gather --profile {} -b 1M -e 1M -n 2 --rank-env 1:NCCL_DEBUG=INFO",
        file.display()
    );
    let output = run(&job);
    let twins = "over 2 rails: rocep1s0f0:1 to rocep1s0f0:1, roceP2p1s0f0:1 to roceP2p1s0f0:1";
    assert_right(&output, 1, |line| line.contains(twins));
    for device in ["rocep1s0f1", "roceP2p1s0f1"] {
        let line = format!(
            "INFO NET/Spark: cannot open {device}: the device rules of this container leave it out"
        );
        assert!(output.err.contains(&line), "{line}: {output:?}");
    }

    let none = "node 1 forbids=rocep1s0f0,rocep1s0f1,roceP2p1s0f0,roceP2p1s0f1\n";
    std::fs::write(&file, profile.to_text() + none).unwrap();
    let output = run(&job);
    assert_eq!(output.status, Some(1), "{output:?}");
    let why = "cannot open rocep1s0f0: the device rules of this container leave it out";
    assert!(
        output.err.contains(why) && output.err.contains("--device /dev/infiniband"),
        "{output:?}"
    );
}
