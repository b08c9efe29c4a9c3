//! The picture, and what is shown beside the findings.

use super::bed::Bed;

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

#[test]
fn one_cable_is_the_limit_of_its_two_rails() {
    let answer = Bed::spark(&["p0"]).answer();
    assert_eq!(answer.picture.len(), 3, "{:#?}", answer.picture);
    assert!(answer.picture[2].ends_with("limited by the cables"), "{:#?}", answer.picture);
    assert!(Bed::plain().answer().picture.is_empty());
}

#[test]
fn what_was_read_is_listed_and_what_was_not_is_said() {
    let bed = Bed::spark(&["p0"]);
    let answer = bed.answer();
    let fact = |name: &str| answer.facts.iter().find(|fact| fact.name == name).map(|fact| fact.value.clone());
    assert_eq!(fact("BIOS").as_deref(), Some("5.36_0ACUM018 07/29/2025"));
    assert_eq!(fact("kernel").as_deref(), Some("6.17.0-1014-nvidia"));
    assert_eq!(fact("glibc").as_deref(), Some("2.39"));
    assert_eq!(fact("nvidia-peermem").as_deref(), Some("not loaded, as expected"));
    assert!(fact("CUDA").unwrap().contains("INTEGRATED=1 GPU_DIRECT_RDMA_SUPPORTED=0 DMA_BUF_SUPPORTED=0"));
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
        fact(&format!("/{}/libnccl.so.2", super::bed::LIB)).unwrap().starts_with("2.28.9+cuda13.0, build id c0db9360")
    );
    // As for a process in a container.
    let mut other = Bed::spark(&["p0"]);
    other.process("42");
    other.write("proc/42/environ", "NCCL_NET=Spark\0NCCL_NET_PLUGIN=/usr/local/lib/libnccl-net-spark.so\0");
    other.asked.pid = Some(42);
    for (process, namespace) in [("self", "net:[1]"), ("42", "net:[2]")] {
        std::fs::create_dir_all(other.path(&format!("proc/{process}/ns"))).unwrap();
        std::os::unix::fs::symlink(namespace, other.path(&format!("proc/{process}/ns/net"))).unwrap();
    }
    let not_seen = other.answer().not_seen;
    assert!(not_seen.iter().any(|one| one.why.contains("another network namespace")), "{not_seen:#?}");
    // As for a user without root, in a container without sysfs' DMI files.
    bed.remove("sys/class/dmi/id/bios_version");
    bed.remove("sys/class/dmi/id/bios_date");
    for device in ["rocep1s0f0", "rocep1s0f1", "roceP2p1s0f0", "roceP2p1s0f1"] {
        std::fs::write(bed.path(&format!("sys/class/infiniband/{device}/device/config")), [0_u8; 64]).unwrap();
    }
    bed.remove("answers/cuda");
    bed.remove("answers/ethtool-a/enp1s0f0np0");
    bed.remove("proc/self/limits");
    let answer = bed.answer();
    for (what, why) in [
        ("the BIOS version", "dmi"),
        ("PCIe payload and read request size of rocep1s0f0", "root"),
        ("CUDA's attributes", "answers/cuda"),
        ("pause frames of enp1s0f0np0", "ethtool"),
        ("the limit of locked memory", "/proc/self/limits"),
    ] {
        let found = answer.not_seen.iter().any(|one| one.what.contains(what) && one.why.contains(why));
        assert!(found, "{what}: {:#?}", answer.not_seen);
    }
    assert_eq!(answer.findings, [], "what is not seen is no finding");
}
