//! Priorities of ports, in the form that `mlnx_qos` prints: configurations that owners published of
//! Sparks behind switches, and one of another host.

use super::bed::Bed;

fn without_pause(bed: &Bed) {
    for netdev in ["enp1s0f0np0", "enP2p1s0f0np0"] {
        bed.replace(
            &format!("answers/ethtool-a/{netdev}"),
            "RX:\t\ton\nTX:\t\ton",
            "RX:\t\toff\nTX:\t\toff",
        );
    }
}

const PFC_ON_3: &str = "0   0   0   1   0   0   0   0   ";

/// Four Sparks on a CRS804 switch, before any change (a note of 2026-06-29, "Four Spark Cluster
/// Baseline").
fn factory(bed: &mut Bed) {
    bed.mlnx_qos("pcp", "0   0   0   0   0   0   0   0   ");
}

/// Four Sparks on a CRS812 switch: PFC on priority 3 in hosts and switch, but RoCE in priority 0
/// (gitee.com/alexlu0912_admin, branch 4node: prefill ten times slower).
fn pcp(bed: &mut Bed) {
    bed.mlnx_qos("pcp", PFC_ON_3);
}

/// The configuration of `pcp` after the cure, with an enabled unit.
fn pcp_cured(bed: &mut Bed) {
    bed.mlnx_qos("dscp", PFC_ON_3);
    bed.qos_unit();
    bed.set("NCCL_IB_TC", "106");
}

/// Four Sparks (MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks 115 and 128): a launcher that did not
/// pass NCCL_IB_TC on, and PFC without pause frames.
fn without_class(bed: &mut Bed) {
    bed.mlnx_qos("dscp", PFC_ON_3);
    bed.qos_unit();
    without_pause(bed);
}

/// The Sparks of `without_class` with NCCL_IB_TC, before their owner wrote the unit.
fn until_reboot(bed: &mut Bed) {
    bed.mlnx_qos("dscp", PFC_ON_3);
    without_pause(bed);
    bed.set("NCCL_IB_TC", "106");
}

/// Three Sparks on a Nexus 3232C (note of 2026-08-08, "PFC + ECN for RoCEv2"): traffic class 104,
/// and a configuration that is lost at boot.
fn nexus(bed: &mut Bed) {
    bed.mlnx_qos("dscp", PFC_ON_3);
    bed.set("NCCL_IB_TC", "104");
}

/// The sample in att/netarbiter, nvmf/OUTPUTSAMPLE.setup-nic-lossless-layer3.sh.md, without its
/// lines about bandwidth classes.
fn netarbiter(bed: &mut Bed) {
    let text = "DCBX mode: OS controlled\nPriority trust state: dscp\ndscp2prio mapping:
        prio:0 dscp:07,06,05,04,03,02,01,00,
        prio:1 dscp:15,14,13,12,11,10,09,08,
        prio:2 dscp:23,22,21,20,19,18,17,16,
        prio:3 dscp:31,30,29,28,27,26,25,24,
        prio:4 dscp:39,38,37,36,35,34,33,32,
        prio:5 dscp:47,46,45,44,43,42,41,40,
        prio:6 dscp:55,54,53,52,51,50,49,48,
        prio:7 dscp:63,62,61,60,59,58,57,56,
Cable len: 7\nPFC configuration:
        priority    0   1   2   3   4   5   6   7
        enabled     0   0   0   1   0   0   0   0   \n";
    bed.write("answers/mlnx_qos/enp1s0f0np0", text);
    bed.qos_unit();
    bed.set("NCCL_IB_TC", "106");
}

#[test]
fn published_configurations_are_read_and_judged() {
    type Case = (fn(&mut Bed), &'static str, &'static [&'static str]);
    let cases: [Case; 7] = [
        (
            factory,
            "RoCE has priority 0 without PFC (service level 0; trust PCP, PFC on none)",
            &[],
        ),
        (
            pcp,
            "RoCE has priority 0 without PFC (service level 0; trust PCP, PFC on 3)",
            &["unprotected-priority", "qos-until-reboot"],
        ),
        (
            pcp_cured,
            "RoCE has priority 3 with PFC (traffic class 106; trust DSCP, PFC on 3)",
            &[],
        ),
        (
            without_class,
            "RoCE has priority 0 without PFC (traffic class 0; trust DSCP, PFC on 3)",
            &["unprotected-priority", "no-pause"],
        ),
        (
            until_reboot,
            "RoCE has priority 3 with PFC (traffic class 106; trust DSCP, PFC on 3)",
            &["qos-until-reboot"],
        ),
        (
            nexus,
            "RoCE has priority 3 with PFC (traffic class 104; trust DSCP, PFC on 3)",
            &["qos-until-reboot"],
        ),
        (
            netarbiter,
            "RoCE has priority 3 with PFC (traffic class 106; trust DSCP, PFC on 3)",
            &[],
        ),
    ];
    for (plant, text, ids) in cases {
        let mut bed = Bed::spark(&["p0"]);
        plant(&mut bed);
        let answer = bed.answer();
        let found: Vec<&str> = answer.findings.iter().map(|finding| &*finding.id).collect();
        assert_eq!(found, ids, "{text}: {:#?}", answer.findings);
        let rail = answer
            .facts
            .iter()
            .find(|fact| fact.name == "rocep1s0f0")
            .unwrap();
        assert!(rail.value.contains(text), "{rail:?}");
    }
}

/// A disabled unit sets nothing, and neither does a unit whose script is missing. In a container
/// the host's files are not visible, so nothing is found.
#[test]
fn only_what_runs_at_boot_keeps_priorities() {
    let found = |plant: fn(&Bed)| {
        let mut bed = Bed::spark(&["p0"]);
        nexus(&mut bed);
        plant(&bed);
        bed.answer()
            .findings
            .iter()
            .any(|finding| finding.id == "qos-until-reboot")
    };
    assert!(found(|bed| bed.write(
        "etc/systemd/system/roce.service",
        "ExecStart=mlnx_qos -i x --trust dscp\n"
    )));
    assert!(found(|bed| {
        bed.qos_unit();
        bed.remove("usr/local/sbin/roce.sh");
    }));
    assert!(!found(Bed::qos_unit));
    assert!(!found(|bed| {
        bed.write(
            "etc/systemd/system/nccl-spark-qos@.service",
            "ExecStart=/usr/local/sbin/nccl-spark-qos %I\n",
        );
        bed.write(
            "etc/systemd/system/sys-subsystem-net-devices-x.device.wants/nccl-spark-qos@x.service",
            "",
        );
        bed.write(
            "usr/local/sbin/nccl-spark-qos",
            "#!/bin/sh\ndcb pfc set dev x prio-pfc 3:on\n",
        );
    }));
    assert!(!found(|bed| bed.write(
        "etc/NetworkManager/dispatcher.d/50-roce",
        "#!/bin/sh\ndcb pfc set dev x 3:on\n"
    )));
    assert!(!found(|bed| bed.write(
        "etc/rc.local",
        "#!/bin/sh\nlldptool -T -i x -V PFC enabled=3\n"
    )));
    assert!(!found(|bed| bed.write(".dockerenv", "")));
}

#[test]
fn ecn_is_that_of_the_jobs_priority() {
    let mut bed = Bed::spark(&["p0"]);
    nexus(&mut bed);
    for (part, value) in [("roce_np", "1\n"), ("roce_rp", "0\n")] {
        bed.write(
            &format!("sys/class/net/enp1s0f0np0/ecn/{part}/enable/3"),
            value,
        );
    }
    let facts = bed.answer().facts;
    let value = |name: &str| &facts.iter().find(|fact| fact.name == name).unwrap().value;
    assert!(
        value("rocep1s0f0").contains("ECN of that priority: receiver on, sender off"),
        "{facts:?}"
    );
    assert!(!value("roceP2p1s0f0").contains("ECN"), "{facts:?}");
}

/// On owners' Sparks, the attribute GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED is 0. Older drivers do
/// not have this attribute.
#[test]
fn what_nccl_leaves_off_is_explained() {
    let bed = Bed::spark(&["p0"]);
    let explains = || {
        bed.answer().facts.iter().any(|fact| {
            fact.value
                .contains("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED=0")
        })
    };
    for (attributes, wanted) in [("1 0 0", false), ("1 0 0 1", false), ("1 0 0 0", true)] {
        bed.write("answers/cuda", attributes);
        assert_eq!(explains(), wanted, "{attributes}");
    }
}
