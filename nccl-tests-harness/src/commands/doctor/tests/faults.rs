//! Injects one fault at a time into a healthy machine. The doctor must find and name the fault,
//! with its cure. On a healthy machine it must find nothing. The faults are beside the kinds of
//! their findings.

use super::bed::{Bed, FUNCTIONS, LIB, link};
use crate::commands::doctor::finding::{Finding, Severity, Verdict};
use crate::commands::doctor::findings::{self, JobFacts};
use crate::commands::doctor::look::{self, Facts};
use crate::commands::doctor::place::Place;
use host::rails::{Warning, WarningKind};

pub struct Fault {
    pub name: &'static str,
    pub plant: fn() -> Bed,
    pub severity: Severity,
    pub id: &'static str,
    pub words: &'static [&'static str],
    /// A part of the finding's commands, for good or until the next boot. Empty if it has none.
    pub cure: &'static str,
}

pub fn one() -> Bed {
    Bed::spark(&["p0"])
}

pub fn two() -> Bed {
    Bed::spark(&["p0", "p1"])
}

pub fn with(mut bed: Bed, plant: impl FnOnce(&mut Bed)) -> Bed {
    plant(&mut bed);
    bed
}

use Severity::{Broken, Fragile, Note, Slow};

macro_rules! faults {
    ($($name:literal: $plant:expr => $severity:ident $id:literal [$($word:literal),*] $cure:literal;)*) => {
        pub const FAULTS: &[$crate::commands::doctor::tests::faults::Fault] = &[$($crate::commands::doctor::tests::faults::Fault {
            name: $name, plant: || $plant, severity: $crate::commands::doctor::finding::Severity::$severity, id: $id, words: &[$($word),*], cure: $cure,
        },)*];
    };
}

pub(in crate::commands::doctor) use faults;

/// All faults of one machine, each beside the kind of its finding.
pub fn all() -> impl Iterator<Item = &'static Fault> {
    let of_files = [
        findings::machine::faults::FAULTS,
        findings::rails::faults::FAULTS,
        findings::sockets::faults::FAULTS,
        findings::counters::faults::FAULTS,
        findings::silence::faults::FAULTS,
        findings::functions::faults::FAULTS,
        findings::qos::faults::FAULTS,
        findings::libraries::faults::FAULTS,
        findings::variables::variable::faults::FAULTS,
        findings::variables::faults::FAULTS,
    ];
    of_files.into_iter().flatten()
}

/// Returns all commands of a finding.
fn commands(finding: &Finding) -> String {
    let all = finding.cure.iter().chain(&finding.now);
    all.map(String::as_str).collect::<Vec<_>>().join("\n")
}

pub fn without_carrier(name: &str, index: u32) -> serde_json::Value {
    let mut link = link(name, index, "");
    link["flags"] = serde_json::json!(["BROADCAST", "UP"]);
    link
}

/// A machine whose only NIC is an E810 in iWARP mode, with an address.
pub fn iwarp() -> Bed {
    with(one(), |bed| {
        for (device, _, pci, ..) in FUNCTIONS {
            bed.write(
                &format!("sys/class/infiniband/{device}/node_type"),
                "4: RNIC\n",
            );
            bed.write(&format!("sys/bus/pci/devices/{pci}/vendor"), "0x8086\n");
        }
    })
}

pub fn process(loaded: &str) -> Bed {
    let mut bed = one();
    bed.process("42");
    bed.write(
        "proc/42/environ",
        "NCCL_NET=Spark\0NCCL_NET_PLUGIN=/usr/local/lib/libnccl-net-spark.so\0HF_TOKEN=secret\0",
    );
    let map = |path: &str| format!("ffff80000000-ffff80001000 r-xp 00000000 08:01 77 {path}\n");
    bed.write(
        "proc/42/maps",
        &[
            map(&format!("/{LIB}/libnccl.so.2")),
            map(loaded),
            map(&format!("/{LIB}/libibverbs.so.1")),
        ]
        .concat(),
    );
    bed.request.pid = Some(42);
    bed
}

/// A machine with the Debian package. `/lib` is a link to `/usr/lib`, so each library has a path
/// below each of the two.
fn deb() -> Bed {
    with(one(), |bed| {
        std::os::unix::fs::symlink("usr/lib", bed.path("lib")).unwrap();
        bed.remove("usr/local/lib/libnccl-net-spark.so");
        bed.plugin(&format!("{LIB}/libnccl-net-spark.so"));
        bed.set("NCCL_NET_PLUGIN", &format!("/{LIB}/libnccl-net-spark.so"));
        bed.set("VLLM_NCCL_SO_PATH", &format!("/{LIB}/libnccl.so.2"));
    })
}

/// A machine with NetworkManager profiles that are no fault: static addresses, DHCP that the owner
/// chose, and the management network.
fn profiles() -> Bed {
    with(two(), |bed| {
        bed.profile("enP7s7", "-999", "Wired connection 1", "auto");
        bed.profile("enp1s0f0np0", "0", "netplan-enp1s0f0np0", "manual");
        bed.profile("enP2p1s0f0np0", "-999", "Wired connection 2", "manual");
        bed.profile("enp1s0f1np1", "0", "rail: by DHCP", "auto");
    })
}

#[test]
fn nothing_is_found_on_healthy_machines() {
    for (name, bed) in [
        ("a Spark with one cable", one()),
        ("a Spark with two cables", two()),
        (
            "a process on it",
            process("/usr/local/lib/libnccl-net-spark.so"),
        ),
        ("a deb where /lib is a link to /usr/lib", deb()),
        (
            "NetworkManager's profiles that somebody chose, or of other interfaces",
            profiles(),
        ),
        ("NVIDIA's recipe: four names, one cable", nvidias_recipe()),
    ] {
        let answer = bed.answer();
        assert_eq!(answer.findings, [], "{name}");
        assert_eq!(answer.verdict, Verdict::Good, "{name}");
        let text = serde_json::to_string(&answer).unwrap();
        assert!(
            !text.contains("secret") && !text.contains("HF_TOKEN"),
            "{name}: {text}"
        );
    }
}

/// A Spark with one cable, whose filter has the names of all four functions.
fn nvidias_recipe() -> Bed {
    with(one(), |bed| {
        let names: Vec<&str> = FUNCTIONS.iter().map(|function| function.0).collect();
        bed.set("NCCL_IB_HCA", &names.join(","));
    })
}

/// No command may touch the interface of the default route, over which the owner's ssh session may
/// run, and no statement may contradict a fact that the doctor itself lists.
#[test]
fn no_finding_does_harm_or_contradicts_a_fact() {
    const CHANGES: [&str; 7] = [
        "ip link set",
        "ip address",
        "ip neigh flush",
        "ethtool -A",
        "nmcli con delete",
        "netplan set",
        "dcb ",
    ];
    for fault in all() {
        let bed = (fault.plant)();
        let answer = bed.answer();
        for finding in &answer.findings {
            for command in commands(finding)
                .split([';', '\n'])
                .flat_map(|line| line.split("&&"))
            {
                let command = command.split('#').next().unwrap();
                let is_change = CHANGES.iter().any(|change| command.contains(change));
                assert!(
                    !is_change || !command.contains("enP7s7"),
                    "{}: {finding:?}",
                    fault.name
                );
                assert!(
                    !command.contains("ip address flush") && !command.contains("ip address change"),
                    "{finding:?}"
                );
            }
            for link in bed.links_written() {
                let name = link["ifname"].as_str().unwrap();
                let has_address = !link["addr_info"].as_array().unwrap().is_empty();
                let says_none =
                    finding.text.contains("neither an IPv4") && finding.text.contains(name);
                assert!(!has_address || !says_none, "{}: {finding:?}", fault.name);
            }
            let is_loaded = std::fs::read_to_string(bed.path("proc/modules"))
                .unwrap()
                .contains("mlx5_ib");
            assert!(
                !is_loaded || !finding.text.contains("mlx5_ib is not loaded"),
                "{}: {finding:?}",
                fault.name
            );
        }
    }
}

/// For the ids of some faults: other ids that may be found together with the fault.
const TOGETHER: &[(&str, &[&str])] = &[
    ("shared-subnet", &["subnet-clash", "arp"]),
    ("arp", &["shared-subnet", "subnet-clash"]),
    ("no-rdma-device", &["hotplug"]),
    ("late-report", &["slow-failover"]),
];

#[test]
fn each_fault_is_found_and_named_with_its_cure() {
    let mut strange = Vec::new();
    for fault in all() {
        let answer = (fault.plant)().answer();
        let matches = |finding: &&Finding| {
            let named = fault.words.iter().all(|word| finding.text.contains(word));
            finding.id == fault.id && finding.severity == fault.severity && named
        };
        let found = answer.findings.iter().find(matches);
        let found =
            found.unwrap_or_else(|| panic!("{}: not found in {:#?}", fault.name, answer.findings));
        let cure = commands(found);
        assert!(
            cure.contains(fault.cure) && cure.is_empty() == fault.cure.is_empty(),
            "{}: {cure}",
            fault.name
        );
        let wanted = match fault.severity {
            Broken => Verdict::Broken,
            Slow | Fragile => Verdict::Impaired,
            Note => Verdict::Good,
        };
        assert_eq!(
            answer.verdict, wanted,
            "{}: {:#?}",
            fault.name, answer.findings
        );
        let with = TOGETHER
            .iter()
            .find(|(id, _)| *id == fault.id)
            .map_or(&[][..], |(_, with)| with);
        let others = answer
            .findings
            .iter()
            .filter(|finding| finding.id != fault.id && !with.contains(&&*finding.id));
        strange.extend(others.map(|finding| (fault.name, finding.clone())));
    }
    assert!(strange.is_empty(), "{strange:#?}");
}

/// If an error removes a NIC's functions, their counters disappear too. Only the root port still
/// shows the error.
#[test]
fn a_root_port_without_its_nic_still_reports_fatal_errors() {
    let bed = with(Bed::plain(), |bed| {
        let kinds = [("cor", "7\n"), ("nonfatal", "0\n"), ("fatal", "2\n")];
        for address in ["0000:00:00.0", "0002:00:00.0"] {
            let port = format!("sys/bus/pci/devices/{address}");
            bed.write(&format!("{port}/class"), "0x060400\n");
            kinds.iter().for_each(|(kind, text)| {
                bed.write(&format!("{port}/aer_rootport_total_err_{kind}"), text)
            });
        }
        // On other machines this is the address of the host bridge, which is no PCIe port.
        bed.write("sys/bus/pci/devices/0000:00:00.0/class", "0x060000\n");
    });
    let answer = bed.answer();
    let found: Vec<_> = answer
        .findings
        .iter()
        .filter(|finding| finding.id == "pcie-uncorrected")
        .collect();
    let [finding] = found[..] else {
        panic!("{:#?}", answer.findings)
    };
    let text = "the PCIe port 0002:00:00.0 (without an RDMA device below it) has had 2 fatal and 0 other uncorrected";
    assert!(finding.text.starts_with(text), "{finding:?}");
}

/// Faults of both functions of a cable: the bed, the finding's id, words of its text, and of its
/// commands.
fn faults_of_both_functions() -> Vec<(Bed, &'static str, &'static str, &'static str)> {
    let both = |plant: fn(&mut Bed, &str, &str)| {
        with(one(), |bed| {
            plant(bed, "rocep1s0f0", "enp1s0f0np0");
            plant(bed, "roceP2p1s0f0", "enP2p1s0f0np0");
        })
    };
    let no_pause = |bed: &mut Bed, _: &str, netdev: &str| {
        bed.replace(
            &format!("answers/ethtool-a/{netdev}"),
            "RX:\t\ton\nTX:\t\ton",
            "RX:\t\toff\nTX:\t\toff",
        );
    };
    let payload = |bed: &mut Bed, device: &str, _: &str| bed.transactions(device, 0, 2);
    let mtu = |bed: &mut Bed, _: &str, netdev: &str| {
        bed.write(&format!("sys/class/net/{netdev}/mtu"), "1500\n")
    };
    let profile = |bed: &mut Bed, _: &str, netdev: &str| {
        bed.profile(netdev, "-999", &format!("Wired {netdev}"), "auto")
    };
    let down = with(one(), |bed| {
        ["rocep1s0f0", "roceP2p1s0f0"]
            .iter()
            .for_each(|device| bed.port(device, "state", "1: DOWN\n"));
    });
    let closed = with(one(), |bed| {
        [0, 2]
            .iter()
            .for_each(|at| bed.write(&format!("answers/open/uverbs{at}"), "EPERM"));
    });
    vec![
        (
            both(no_pause),
            "no-pause",
            "enp1s0f0np0 (rocep1s0f0) and enP2p1s0f0np0 (roceP2p1s0f0) neither take nor send pause",
            " && ",
        ),
        (
            both(payload),
            "pcie-payload",
            "the largest PCIe payload of rocep1s0f0 and roceP2p1s0f0 is 128 bytes",
            "fwupdmgr",
        ),
        (
            both(profile),
            "automatic-profile",
            "(\"Wired enP2p1s0f0np0\"): NetworkManager's automatic profiles keep them",
            "sudo nmcli con delete \"Wired enp1s0f0np0\" && sudo nmcli con delete \"Wired enP2p1s0f0np0\" && sudo netplan apply",
        ),
        (
            both(mtu),
            "small-mtu",
            "rocep1s0f0 and roceP2p1s0f0 have a path MTU of 1024",
            " && ",
        ),
        (
            down,
            "no-rail",
            "roceP2p1s0f1 cannot be used: the ports are down: no cable, or their interfaces are not up",
            "with a cable in p0 or p1",
        ),
        (
            closed,
            "device-forbidden",
            "uverbs0 (rocep1s0f0) and /dev/infiniband/uverbs2 (roceP2p1s0f0) may not be opened here: the container was not given them",
            "docker",
        ),
    ]
}

/// Two faults that files cannot describe, so the test plants them in the facts: libibverbs fails,
/// and libibverbs lists a port that sysfs lacks.
#[test]
fn a_copy_of_a_machine_is_judged_despite_missing_parts() {
    let job_facts = JobFacts {
        plugin: String::new(),
        nvls_is_off: false,
        proxy_cpus: None,
        socket_interfaces: None,
        gloo_interfaces: None,
    };
    let mut facts = look::facts(&Place::new(one().path("")), None, &[], &mut Vec::new());
    let judged = |facts: &Facts| {
        let found = findings::machine(facts, &job_facts);
        found
            .into_iter()
            .map(|finding| (finding.severity, finding.id))
            .collect::<Vec<_>>()
    };
    let warning = Warning {
        kind: WarningKind::UnknownWiring,
        devices: vec!["mlx5_0".into()],
        text: "mlx5_0".into(),
    };
    facts.survey.warnings = vec![warning];
    facts.verbs = Err("the RDMA library libibverbs.so.1 has no function ibv_reg_mr".to_owned());
    assert_eq!(
        judged(&facts),
        [(Broken, "verbs".into()), (Fragile, "unknown-wiring".into())]
    );
}

#[test]
fn a_fault_of_several_rails_is_one_finding() {
    for (bed, id, words, cure) in faults_of_both_functions() {
        let answer = bed.answer();
        let found: Vec<_> = answer
            .findings
            .iter()
            .filter(|finding| finding.id == id)
            .collect();
        let [finding] = found[..] else {
            panic!("{id}: {:#?}", answer.findings)
        };
        assert!(finding.text.contains(words), "{finding:?}");
        assert!(commands(finding).contains(cure), "{finding:?}");
    }
}

/// A name with characters that a shell acts on does not get into a command.
#[test]
fn a_profile_with_an_odd_name_is_deleted_by_its_uuid() {
    let odd = with(one(), |bed| {
        bed.profile("enp1s0f0np0", "-999", "x$(reboot): \"", "auto")
    })
    .answer();
    let found = odd
        .findings
        .iter()
        .find(|finding| finding.id == "automatic-profile")
        .unwrap();
    assert!(
        found
            .cure
            .as_deref()
            .unwrap()
            .starts_with("sudo nmcli con delete 3c1f9d0e-"),
        "{found:?}"
    );
}

#[test]
fn several_excluded_ports_are_one_finding() {
    let bed = with(one(), |bed| bed.set("NCCL_IB_HCA", "rocep1s0f1"));
    let answer = bed.answer();
    let text = "no rail: rocep1s0f0, roceP2p1s0f0 and roceP2p1s0f1 cannot be used: NCCL_IB_HCA excludes them";
    let found = answer.findings.iter().find(|finding| finding.text == text);
    let found = found.unwrap_or_else(|| panic!("{:#?}", answer.findings));
    assert_eq!(found.cure.as_deref(), Some("unset NCCL_IB_HCA"));
}

/// Kinds of findings that no row of `faults!` plants, each with the test that covers it.
const ELSEWHERE: &[(&str, &str)] = &[
    (
        "verbs",
        "a_copy_of_a_machine_is_judged_despite_missing_parts",
    ),
    (
        "unknown-wiring",
        "a_copy_of_a_machine_is_judged_despite_missing_parts",
    ),
    ("network-not-spark", "tests/variables.rs"),
    ("plugin-not-first", "tests/variables.rs"),
    ("plugin-not-named", "tests/variables.rs"),
    ("setting-refused", "tests/variables.rs"),
    ("ib-disable", "tests/variables.rs"),
    ("gid-index-pinned", "tests/variables.rs"),
    ("roce-version", "tests/variables.rs"),
    ("other-tuner", "tests/variables.rs"),
    ("few-channels", "tests/variables.rs"),
    ("launcher", "tests/variables.rs"),
];

#[test]
fn each_kind_of_finding_has_a_fault() {
    let peers = [
        crate::commands::doctor::hosts::peer::compare::KINDS,
        crate::commands::doctor::hosts::peer::neighbours::KINDS,
        crate::commands::doctor::hosts::peer::grade::KINDS,
        crate::commands::doctor::hosts::peer::KINDS,
    ];
    let tests = include_str!("../hosts/peer/tests.rs");
    let process_tests = include_str!("../../../../tests/doctor_peer.rs");
    for kind in peers.into_iter().flatten() {
        let quoted = format!("\"{}\"", kind.id);
        let is_covered = tests.contains(&quoted) || process_tests.contains(&quoted);
        assert!(is_covered, "no test between hosts finds {}", kind.id);
    }
    let between_hosts = |id: &str| {
        peers
            .iter()
            .any(|kinds| kinds.iter().any(|kind| kind.id == id))
    };
    for kind in crate::commands::doctor::kinds().filter(|kind| !between_hosts(kind.id)) {
        let is_planted = all().any(|fault| fault.id == kind.id);
        let is_elsewhere = ELSEWHERE.iter().any(|(id, _)| *id == kind.id);
        assert!(
            is_planted != is_elsewhere,
            "{}: planted {is_planted}, elsewhere {is_elsewhere}",
            kind.id
        );
    }
}
