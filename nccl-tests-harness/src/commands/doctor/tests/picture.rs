//! The picture of the rails, the facts, and the facts that could not be read.

use super::bed::{Bed, FUNCTIONS};
use crate::commands::doctor::look;
use crate::commands::doctor::place::Place;
use host::rails::report;

#[test]
fn a_spark_with_two_cables_is_drawn_with_links_cables_and_the_speed_to_expect() {
    let answer = Bed::spark(&["p0", "p1"]).answer();
    let expected = [
        "  PCIe 0000:01:00 Gen5 x4 112 Gb/s -- rocep1s0f0:1   -.  cable p0, 200 Gb/s",
        "  PCIe 0002:01:00 Gen5 x4 112 Gb/s -- roceP2p1s0f0:1 -'",
        "  PCIe 0000:01:00 Gen5 x4 112 Gb/s -- rocep1s0f1:1   -.  cable p1, 200 Gb/s",
        "  PCIe 0002:01:00 Gen5 x4 112 Gb/s -- roceP2p1s0f1:1 -'",
        "  together: 224.1 Gb/s (28.0 GB/s) each way, limited by the PCIe links",
    ];
    assert_eq!(answer.picture, expected);
}

/// `rails` and `doctor` name a cable by its port. If two adapters have ports of the same name, or
/// the kernel does not name the port, both commands use the cable's number.
#[test]
fn a_cable_has_one_name() {
    let named = |plant: fn(&Bed)| {
        let bed = Bed::spark(&["p0", "p1"]);
        plant(&bed);
        let survey = look::facts(&Place::new(bed.path("")), None, &[], &mut Vec::new()).survey;
        let answer = bed.answer();
        for (rail, fact) in survey.rails.iter().zip(
            answer
                .facts
                .iter()
                .filter(|fact| fact.name.starts_with("roce")),
        ) {
            let name = survey.cable_name(rail);
            assert!(
                report(&survey).contains(&format!("{}:1  used: cable {name},", rail.device)),
                "{name}"
            );
            assert!(
                fact.value.starts_with(&format!("rail, cable {name},")),
                "{fact:?}"
            );
        }
        let drawn = [0, 2].map(|at| {
            answer.picture[at]
                .split("cable ")
                .nth(1)
                .unwrap()
                .to_owned()
        });
        drawn.map(|cable| cable.trim_end_matches(", 200 Gb/s").to_owned())
    };
    assert_eq!(named(|_| ()), ["p0", "p1"]);
    let unnamed = |bed: &Bed| {
        let netdevs = FUNCTIONS.map(|function| function.1);
        netdevs
            .iter()
            .for_each(|netdev| bed.remove(&format!("sys/class/net/{netdev}/phys_port_name")));
    };
    assert_eq!(named(unnamed), ["0", "1"]);
    let adapters = |bed: &Bed| {
        for device in ["rocep1s0f1", "roceP2p1s0f1"] {
            bed.write(
                &format!("sys/class/infiniband/{device}/sys_image_guid"),
                "fc4c:ea03:00f9:4238\n",
            );
        }
        for netdev in ["enp1s0f1np1", "enP2p1s0f1np1"] {
            bed.write(&format!("sys/class/net/{netdev}/phys_port_name"), "p0\n");
        }
    };
    assert_eq!(named(adapters), ["0", "1"]);
}

#[test]
fn one_cable_is_the_limit_of_its_two_rails() {
    let answer = Bed::spark(&["p0"]).answer();
    assert_eq!(answer.picture.len(), 3, "{:#?}", answer.picture);
    assert!(
        answer.picture[2].ends_with("limited by the cables"),
        "{:#?}",
        answer.picture
    );
    assert!(Bed::plain().answer().picture.is_empty());
}

#[test]
fn facts_are_listed_and_gaps_are_stated() {
    let bed = Bed::spark(&["p0"]);
    let answer = bed.answer();
    let fact = |name: &str| {
        answer
            .facts
            .iter()
            .find(|fact| fact.name == name)
            .map(|fact| fact.value.clone())
    };
    assert_eq!(fact("BIOS").as_deref(), Some("5.36_0ACUM018 07/29/2025"));
    assert_eq!(fact("kernel").as_deref(), Some("6.17.0-1014-nvidia"));
    assert_eq!(fact("glibc").as_deref(), Some("2.39"));
    assert_eq!(
        fact("nvidia-peermem").as_deref(),
        Some("not loaded, as expected")
    );
    assert!(
        fact("CUDA")
            .unwrap()
            .contains("INTEGRATED=1 GPU_DIRECT_RDMA_SUPPORTED=0 DMA_BUF_SUPPORTED=0")
    );
    let function = fact("rocep1s0f0").unwrap();
    for part in [
        "rail, cable p0, 200 Gb/s, path MTU 4096, 192.168.100.1 (GID 3)",
        "firmware 28.45.4028",
        "NVD0000000087",
        "Gen5 x4",
        "MaxPayload 512 B",
        "MaxReadReq 512 B",
        "IOMMU DMA-FQ",
        "MTU 9000",
        "pause rx on tx on",
        "PCIe errors 0 corrected, 0 not",
    ] {
        assert!(function.contains(part), "no {part} in {function}");
    }
    assert!(
        fact(&format!("/{}/libnccl.so.2", super::bed::LIB))
            .unwrap()
            .starts_with("2.28.9+cuda13.0, build id c0db9360")
    );
}

/// The process to examine is in a container with its own network namespace.
#[test]
fn another_network_namespace_is_stated() {
    let mut other = Bed::spark(&["p0"]);
    other.process("42");
    other.write(
        "proc/42/environ",
        "NCCL_NET=Spark\0NCCL_NET_PLUGIN=/usr/local/lib/libnccl-net-spark.so\0",
    );
    other.request.pid = Some(42);
    for (process, namespace) in [("self", "net:[1]"), ("42", "net:[2]")] {
        std::fs::create_dir_all(other.path(&format!("proc/{process}/ns"))).unwrap();
        std::os::unix::fs::symlink(namespace, other.path(&format!("proc/{process}/ns/net")))
            .unwrap();
    }
    let not_seen = other.answer().not_seen;
    assert!(
        not_seen
            .iter()
            .any(|one| one.why.contains("another network namespace")),
        "{not_seen:#?}"
    );
}

/// The doctor runs without privileges, in a container without the DMI files of sysfs.
#[test]
fn facts_that_cannot_be_read_are_stated() {
    let bed = Bed::spark(&["p0"]);
    bed.remove("sys/class/dmi/id/bios_version");
    bed.remove("sys/class/dmi/id/bios_date");
    for device in ["rocep1s0f0", "rocep1s0f1", "roceP2p1s0f0", "roceP2p1s0f1"] {
        std::fs::write(
            bed.path(&format!("sys/class/infiniband/{device}/device/config")),
            [0_u8; 64],
        )
        .unwrap();
    }
    bed.remove("sys/class/infiniband/rocep1s0f1/device/config");
    bed.remove("answers/cuda");
    bed.remove("answers/ethtool-a/enp1s0f0np0");
    bed.remove("proc/self/limits");
    let answer = bed.answer();
    for (what, why) in [
        ("the BIOS version", "dmi"),
        (
            "PCIe payload and read request size of rocep1s0f0, ",
            "CAP_SYS_ADMIN",
        ),
        (
            "PCIe payload and read request size of rocep1s0f1",
            "no configuration space",
        ),
        ("CUDA's attributes", "answers/cuda"),
        ("pause frames of enp1s0f0np0", "ethtool"),
        ("the limit of locked memory", "/proc/self/limits"),
    ] {
        let found = answer
            .not_seen
            .iter()
            .any(|one| one.what.contains(what) && one.why.contains(why));
        assert!(found, "{what}: {:#?}", answer.not_seen);
    }
    assert_eq!(answer.findings, [], "what is not seen is no finding");
}
