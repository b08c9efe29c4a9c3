//! Whole hosts: Sparks with one and two cables, virtual functions in a container, soft-RoCE.

mod guide;
mod late;
mod topologies;
mod topology;

use super::testbed::{
    Function, SPARK_GUID, TestHost, hca, interface, link_local, spark, spark_function,
};
use super::{Limit, LinkRate, Survey, check_sysfs, report, survey};
use crate::interfaces;
use crate::port::{LinkLayer, PortState};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

fn names(survey: &Survey) -> Vec<&str> {
    survey
        .rails
        .iter()
        .map(|rail| rail.device.as_str())
        .collect()
}

fn reason(survey: &Survey, device: &str) -> String {
    survey
        .refused
        .iter()
        .find(|refused| refused.device == device)
        .unwrap()
        .obstacle
        .to_string()
}

#[track_caller]
fn assert_warned(survey: &Survey, count: usize, words: &[&str]) {
    assert_eq!(survey.warnings.len(), count, "{:#?}", survey.warnings);
    let all = survey
        .warnings
        .iter()
        .map(|warning| warning.text.as_str())
        .collect::<Vec<_>>()
        .join("\n");
    for word in words {
        assert!(all.contains(word), "no {word:?} in\n{all}");
    }
}

#[test]
fn a_spark_with_one_cable_is_its_two_twins_and_200_gbps() {
    let host = TestHost::new(&spark(&[0]));
    let found = host.survey("");
    assert_eq!(names(&found), ["rocep1s0f0", "roceP2p1s0f0"]);
    assert_eq!(
        (found.rails[0].twin, found.rails[1].twin),
        (Some(1), Some(0))
    );
    assert_eq!(found.rails[0].cable, found.rails[1].cable);
    assert_ne!(found.rails[0].link, found.rails[1].link);
    // Two links of 112 Gb/s, one cable of 200.
    assert_eq!(found.speed_mbps, 200_000);
    assert_eq!(found.payload().limit, Limit::Cables);
    assert_eq!(found.payload().mbps, 196_074);
    // `ib_write_bw` over both functions of a cable (NVIDIA's playbook): less than 4 % below the
    // payload rate.
    let measured_mbps = 189_850;
    assert!((measured_mbps..measured_mbps * 104 / 100).contains(&found.payload().mbps));
    assert_eq!(found.guid, SPARK_GUID);
    assert!(
        reason(&found, "rocep1s0f1").contains("down")
            && reason(&found, "roceP2p1s0f1").contains("down")
    );
    assert_warned(&found, 0, &[]);

    let rail = &found.rails[1];
    assert_eq!(rail.netdev.as_deref(), Some("enP2p1s0f0np0"));
    assert_eq!(rail.phys_port.as_deref(), Some("p0"));
    assert_eq!(
        (rail.speed_mbps, rail.path_mtu_bytes, rail.netdev_mtu_bytes),
        (200_000, 4096, Some(9000))
    );
    let pci = rail.pci.as_ref().unwrap();
    assert_eq!(
        (pci.address.as_str(), pci.domain, pci.is_virtual),
        ("0002:01:00.0", 2, false)
    );
    assert_eq!(
        pci.current,
        Some(LinkRate {
            width: 4,
            speed_mts: 32_000
        })
    );
    assert_eq!(pci.max_payload_bytes, Some(512));
    assert_eq!(
        found.links[rail.link].devices,
        ["roceP2p1s0f0", "roceP2p1s0f1"]
    );
}

#[test]
fn a_spark_whose_uncabled_functions_are_not_on_pci_is_the_same() {
    let functions: Vec<Function> = spark(&[1])
        .into_iter()
        .filter(|f| f.phys_port == Some("p1"))
        .collect();
    let found = TestHost::new(&functions).survey("");
    assert_eq!(names(&found), ["rocep1s0f1", "roceP2p1s0f1"]);
    assert_eq!(found.rails[0].twin, Some(1));
    assert_eq!(found.speed_mbps, 200_000);
    assert!(found.refused.is_empty());
    assert_warned(&found, 0, &[]);
}

#[test]
fn a_spark_with_two_cables_is_four_rails_on_two_links_and_not_400_gbps() {
    let found = TestHost::new(&spark(&[0, 1])).survey("");
    assert_eq!(
        names(&found),
        ["rocep1s0f0", "roceP2p1s0f0", "rocep1s0f1", "roceP2p1s0f1"]
    );
    let places: Vec<_> = found
        .rails
        .iter()
        .map(|rail| (rail.cable, rail.link, rail.twin))
        .collect();
    assert_eq!(
        places,
        [
            (0, 0, Some(1)),
            (0, 1, Some(0)),
            (1, 0, Some(3)),
            (1, 1, Some(2))
        ]
    );
    assert_eq!(found.links.len(), 2);
    assert_eq!(found.speed_mbps, 2 * 112_027);
    assert_eq!(found.payload().limit, Limit::PcieLinks);
    assert_warned(&found, 0, &[]);
}

#[test]
fn facts_that_only_root_can_read_change_neither_announced_speed_nor_page() {
    let with = |exponent| {
        let functions: Vec<_> = spark(&[0, 1])
            .into_iter()
            .map(|f| Function {
                max_payload_exponent: exponent,
                ..f
            })
            .collect();
        TestHost::new(&functions).survey("")
    };
    for (exponent, max_payload_bytes) in [(Some(1), Some(256)), (Some(2), Some(512)), (None, None)]
    {
        let found = with(exponent);
        assert_eq!(
            found.rails[0].pci.as_ref().unwrap().max_payload_bytes,
            max_payload_bytes
        );
        assert_eq!(found.speed_mbps, 2 * 112_027, "{exponent:?}");
        assert_eq!(report(&found), report(&with(Some(2))), "{exponent:?}");
    }
}

#[test]
fn a_filter_within_one_link_is_a_warning_that_names_a_device_on_another_link() {
    let host = TestHost::new(&spark(&[0, 1]));
    let found = host.survey("=rocep1s0f0,rocep1s0f1");
    assert_eq!(names(&found), ["rocep1s0f0", "rocep1s0f1"]);
    assert_eq!((found.rails[0].link, found.rails[1].link), (0, 0));
    assert_eq!(found.speed_mbps, 112_027);
    assert!(reason(&found, "roceP2p1s0f0").contains("NCCL_IB_HCA"));
    assert_warned(
        &found,
        1,
        &[
            "share one PCIe link (Gen5 x4)",
            "excludes roceP2p1s0f0 on another link; unset NCCL_IB_HCA",
        ],
    );

    // That device is on the same cable if possible, not on another adapter.
    let other = Function {
        device: "mlx5_0",
        netdev: Some("ens1np0"),
        pci: Some("0000:00:03.0"),
        system_image_guid: Some(7),
        v4: Some([10, 0, 0, 1]),
        ..spark_function(0, 0)
    };
    let functions: Vec<_> = spark(&[0, 1]).into_iter().chain([other]).collect();
    let found = TestHost::new(&functions).survey("=rocep1s0f0,rocep1s0f1");
    assert_warned(
        &found,
        1,
        &["excludes roceP2p1s0f0 on another link; unset NCCL_IB_HCA"],
    );

    for both in [
        "rocep1s0f0,roceP2p1s0f0",
        "rocep1s0f0,roceP2p1s0f1",
        "^=rocep1s0f1,roceP2p1s0f1",
    ] {
        let found = host.survey(both);
        assert_eq!(found.rails.len(), 2);
        assert_ne!(found.rails[0].link, found.rails[1].link, "{both}");
        assert!(found.speed_mbps >= 200_000, "{both}");
        assert_warned(&found, 0, &[]);
    }
}

#[test]
fn a_filter_that_excludes_the_twin_or_everything_is_a_warning() {
    let host = TestHost::new(&spark(&[0]));
    let found = host.survey("rocep1s0f0");
    assert_eq!(
        (names(&found), found.speed_mbps),
        (vec!["rocep1s0f0"], 112_027)
    );
    assert_eq!(found.rails[0].twin, None);
    assert_warned(
        &found,
        1,
        &[
            "112 Gb/s of its port's 200 Gb/s",
            "NCCL_IB_HCA excludes its twin roceP2p1s0f0",
        ],
    );

    let found = host.survey("rocep2s0f0");
    assert!(found.rails.is_empty());
    assert_eq!(
        (found.speed_mbps, found.guid, found.payload().limit),
        (0, 0, Limit::Nothing)
    );
    assert_warned(
        &found,
        1,
        &[
            "matches no device",
            "rocep1s0f0, roceP2p1s0f0, rocep1s0f1, roceP2p1s0f1",
        ],
    );

    // A filter that is only a prefix asks for no particular device, so there is no warning. A whole
    // name asks for its device.
    assert_warned(&host.survey("roce"), 0, &[]);
    // NVIDIA's recipe names all four functions. A cable that is not plugged in is no fault.
    assert_warned(
        &host.survey("rocep1s0f0,roceP2p1s0f0,rocep1s0f1,roceP2p1s0f1"),
        0,
        &[],
    );
    let mut functions = spark(&[0, 1]);
    let named = functions.iter_mut().find(|one| one.device == "rocep1s0f1");
    let named = named.unwrap();
    *named = named.clone().down();
    assert_warned(
        &TestHost::new(&functions).survey("rocep1s0f0,roceP2p1s0f0,rocep1s0f1,roceP2p1s0f1"),
        1,
        &["names rocep1s0f1, which is not usable: the port is down"],
    );
}

#[test]
fn a_twin_that_is_down_or_missing_is_a_warning() {
    let mut functions = spark(&[0]);
    let twin = functions
        .iter_mut()
        .find(|f| f.device == "roceP2p1s0f0")
        .unwrap();
    *twin = twin.clone().down();
    let found = TestHost::new(&functions).survey("");
    assert_eq!(
        (names(&found), found.speed_mbps),
        (vec!["rocep1s0f0"], 112_027)
    );
    assert_warned(
        &found,
        1,
        &[
            "twin roceP2p1s0f0",
            "the port is down",
            "ip link set enP2p1s0f0np0 up",
        ],
    );

    let found = TestHost::new(&[spark_function(0, 0)]).survey("");
    assert_eq!(found.speed_mbps, 112_027);
    assert_warned(&found, 1, &["no other function of its cable is visible"]);
}

#[test]
fn a_twin_with_a_link_local_address_only_is_a_rail() {
    let mut functions = spark(&[0]);
    functions
        .iter_mut()
        .find(|f| f.device == "roceP2p1s0f0")
        .unwrap()
        .v4 = None;
    let found = TestHost::new(&functions).survey("");
    assert_eq!(names(&found), ["rocep1s0f0", "roceP2p1s0f0"]);
    let [first, second] = [&found.rails[0].addresses, &found.rails[1].addresses];
    assert_eq!(
        Ipv6Addr::from(first[0].gid),
        Ipv4Addr::new(192, 168, 100, 1).to_ipv6_mapped()
    );
    assert_eq!((first[0].gid_index, first[0].prefix), (3, Some(24)));
    assert_eq!((first[1].gid_index, first[1].prefix), (1, Some(64)));
    assert_eq!(second.len(), 1);
    assert_eq!(Ipv6Addr::from(second[0].gid), link_local(SPARK_GUID + 4));
    assert_eq!(found.speed_mbps, 200_000);
    assert_warned(&found, 0, &[]);
}

#[test]
fn a_narrow_or_slow_link_is_reported_and_counted_as_it_is() {
    let narrow: Vec<_> = spark(&[0])
        .into_iter()
        .map(|f| Function { width: 2, ..f })
        .collect();
    let found = TestHost::new(&narrow).survey("");
    assert_eq!(found.speed_mbps, 2 * 56_013);
    assert_warned(
        &found,
        2,
        &[
            "rocep1s0f0 and rocep1s0f1 runs at Gen5 x2 and could run at Gen5 x4",
            "BIOS",
        ],
    );

    let slow = Function {
        gt_per_s: "16.0 GT/s PCIe",
        ..spark_function(0, 0)
    };
    let found = TestHost::new(&[slow, spark_function(2, 0)]).survey("");
    assert_eq!(found.speed_mbps, 56_013 + 112_027);
    assert_warned(&found, 1, &["Gen4 x4 and could run at Gen5 x4"]);
}

#[test]
fn a_small_mtu_and_a_shared_subnet_are_warnings() {
    let mut functions = spark(&[0]);
    for function in functions.iter_mut().filter(|f| f.v4.is_some()) {
        function.netdev_mtu = 1500;
    }
    let found = TestHost::new(&functions).survey("");
    assert_eq!(found.rails[0].path_mtu_bytes, 1024);
    let words = "rocep1s0f0 and roceP2p1s0f0 have a path MTU of 1024 bytes because enp1s0f0np0 and enP2p1s0f0np0 have MTU 1500;";
    assert_warned(&found, 1, &[words, "ip link set enP2p1s0f0np0 mtu 9000"]);

    let mut functions = spark(&[0]);
    let twins = functions.iter_mut().filter(|f| f.v4.is_some()).zip(1..);
    twins.for_each(|(function, host)| function.v4 = Some([192, 168, 7, host]));
    let found = TestHost::new(&functions).survey("");
    assert_warned(
        &found,
        1,
        &[
            "rocep1s0f0 and roceP2p1s0f0, the twins of one cable, are in one subnet (192.168.7.0/24)",
        ],
    );

    let mut functions = spark(&[0]);
    functions
        .iter_mut()
        .find(|f| f.device == "rocep1s0f0")
        .unwrap()
        .netdev_mtu = 1500;
    let words = "rocep1s0f0 has a path MTU of 1024 bytes because enp1s0f0np0 has MTU 1500;";
    assert_warned(&TestHost::new(&functions).survey(""), 1, &[words]);
}

#[test]
fn virtual_functions_in_a_container_are_rails_on_their_physical_link() {
    let virtual_function = |domain, device, netdev, pci, physical| Function {
        device,
        netdev,
        pci: Some(pci),
        physical: Some(physical),
        phys_port: None,
        guid: u64::from(domain) + 0x1234,
        ..spark_function(domain, 0)
    };
    let first = virtual_function(0, "mlx5_4", Some("net1"), "0000:01:00.2", "0000:01:00.0");
    let second = virtual_function(2, "mlx5_9", Some("net2"), "0002:01:00.2", "0002:01:00.0");
    let hidden = Function {
        netdev: Some("host_name"),
        is_visible: false,
        ..second.clone()
    };
    for (second, second_netdev) in [(second, "net2"), (hidden, "host_name")] {
        let is_visible = second.is_visible;
        let host = TestHost::new(&[first.clone(), second]);
        let found = host.survey("");
        assert_eq!(names(&found), ["mlx5_4", "mlx5_9"]);
        let pci = found.rails[0].pci.as_ref().unwrap();
        assert!(pci.is_virtual);
        assert_eq!(
            (pci.slot.as_str(), pci.function, pci.address.as_str()),
            ("0000:01:00", 0, "0000:01:00.2")
        );
        assert_eq!(
            pci.current,
            Some(LinkRate {
                width: 4,
                speed_mts: 32_000
            })
        );
        assert_eq!(found.rails[0].twin, Some(1));
        assert_eq!(found.speed_mbps, 200_000);
        assert_eq!(found.rails[0].netdev.as_deref(), Some("net1"));
        assert_eq!(found.rails[1].netdev.as_deref(), Some(second_netdev));
        assert_eq!(found.rails[1].addresses[0].prefix, is_visible.then_some(24));
        assert!(report(&found).contains("(VF of 0000:01:00.0)"));
        assert_warned(&found, 0, &[]);
    }
}

#[test]
fn two_virtual_functions_of_one_port_share_its_cable_and_link() {
    let of = |device, pci| Function {
        device,
        netdev: None,
        pci: Some(pci),
        physical: Some("0000:01:00.0"),
        phys_port: None,
        ..spark_function(0, 0)
    };
    // The PCI address has room for functions 0 to 7. mlx5_5 is a later virtual function of the same
    // port, so its device number is 1.
    let found =
        TestHost::new(&[of("mlx5_5", "0000:01:01.0"), of("mlx5_4", "0000:01:00.2")]).survey("");
    assert_eq!(names(&found), ["mlx5_4", "mlx5_5"]);
    assert_eq!(found.rails[0].cable, found.rails[1].cable);
    assert_eq!(
        (
            found.rails[0].link,
            found.rails[1].link,
            found.rails[0].twin
        ),
        (0, 0, None)
    );
    assert_eq!((found.links.len(), found.speed_mbps), (1, 112_027));
}

#[test]
fn a_plain_host_adds_up_its_adapters() {
    let card = |device, netdev, pci, guid, speed_mbps| Function {
        device,
        netdev: Some(netdev),
        pci: Some(pci),
        phys_port: Some("p0"),
        guid,
        system_image_guid: Some(guid),
        width: 16,
        max_width: 16,
        speed_mbps,
        v4: Some([10, 0, guid as u8, 1]),
        ..spark_function(0, 0)
    };
    // Each of two cards has a "p0", and the cards are in different PCIe domains. Their ports are no
    // twins, because the cards have different system image GUIDs.
    let host = TestHost::new(&[
        card("mlx5_1", "ens2np0", "0001:41:00.0", 20, 100_000),
        card("mlx5_0", "ens1np0", "0000:21:00.0", 10, 400_000),
    ]);
    let found = host.survey("");
    assert_eq!(names(&found), ["mlx5_0", "mlx5_1"]);
    assert_eq!((found.rails[0].twin, found.rails[1].twin), (None, None));
    assert_ne!(found.rails[0].cable, found.rails[1].cable);
    assert_eq!((found.speed_mbps, found.guid), (500_000, 10));
    assert_warned(&found, 0, &[]);
    assert_eq!(host.survey("mlx5_1:1").rails.len(), 1);
    assert_eq!(host.survey("mlx5_1:2").rails.len(), 0);
}

#[test]
fn cables_and_links_limit_together_and_not_one_by_one() {
    // The twins' cable limits them to 100 Gb/s, and the third rail's link limits it to 112 Gb/s:
    // 212 together. The cables alone would give 300 Gb/s, the three links alone 336.
    let mut functions: Vec<Function> = spark(&[0]).into_iter().filter(|f| f.v4.is_some()).collect();
    functions
        .iter_mut()
        .for_each(|function| function.speed_mbps = 100_000);
    functions.push(Function {
        device: "mlx5_7",
        netdev: Some("ens7np0"),
        pci: Some("0004:01:00.0"),
        system_image_guid: Some(7),
        guid: 7,
        v4: Some([10, 0, 0, 1]),
        ..spark_function(0, 0)
    });
    let found = TestHost::new(&functions).survey("");
    assert_eq!(found.rails.len(), 3);
    assert_eq!(found.speed_mbps, 100_000 + 112_027);
}

#[test]
fn soft_roce_works_without_pci() {
    let soft = |device, netdev, last| Function {
        device,
        netdev: Some(netdev),
        pci: None,
        phys_port: None,
        system_image_guid: None,
        guid: u64::from(last),
        speed_mbps: 10_000,
        v4: Some([10, 0, last, 1]),
        ..spark_function(0, 0)
    };
    let found = TestHost::new(&[soft("rxe1", "veth1", 2), soft("rxe0", "veth0", 1)]).survey("");
    assert_eq!(names(&found), ["rxe0", "rxe1"]);
    assert_eq!(found.rails[0].netdev.as_deref(), Some("veth0"));
    assert_eq!(
        (found.rails[0].pci.is_none(), found.rails[0].twin),
        (true, None)
    );
    assert_ne!(found.rails[0].link, found.rails[1].link);
    assert_eq!((found.speed_mbps, found.guid), (20_000, 1));
    assert_eq!(found.links[0].payload_mbps, None);
    assert_warned(&found, 0, &[]);
    assert!(report(&found).contains("PCIe link 0: unknown"));
}

#[test]
fn a_port_without_a_speed_takes_its_interfaces_or_an_assumed_one() {
    let host = TestHost::new(&[Function {
        speed_mbps: 0,
        ..spark_function(0, 0)
    }]);
    let found = host.survey("");
    assert_eq!(found.speed_mbps, 10_000);
    assert_warned(
        &found,
        1,
        &["rocep1s0f0 reports no speed; 10 Gb/s is assumed"],
    );
    std::fs::write(host.path("class/net/enp1s0f0np0/speed"), "25000\n").unwrap();
    assert_eq!(host.survey("").speed_mbps, 25_000);
    std::fs::write(host.path("class/net/enp1s0f0np0/speed"), "-1\n").unwrap();
    assert_eq!(host.survey("").speed_mbps, 10_000);
}

#[test]
fn ports_without_roce_v2_are_refused_with_a_reason() {
    let infiniband = Function {
        link_layer: LinkLayer::InfiniBand,
        ..spark_function(0, 0)
    };
    let bare = Function {
        v4: None,
        gid_has_link_local: false,
        ..spark_function(0, 1)
    };
    let starting = Function {
        state: PortState::Init,
        ..spark_function(2, 0)
    };
    let odd = Function {
        state: PortState::Other(5),
        ..spark_function(2, 1)
    };
    let found = TestHost::new(&[infiniband, bare, starting, odd]).survey("");
    assert!(found.rails.is_empty());
    assert!(reason(&found, "rocep1s0f0").contains("InfiniBand"));
    assert!(reason(&found, "rocep1s0f1").contains("no RoCE v2 GID"));
    assert!(reason(&found, "roceP2p1s0f0").contains("INIT"));
    assert!(reason(&found, "roceP2p1s0f1").contains("Other(5)"));

    let mut host = TestHost::new(&[spark_function(0, 0)]);
    host.ports[0]
        .gids
        .retain(|entry| entry.kind == crate::port::GidKind::RoceV1);
    assert!(reason(&host.survey(""), "rocep1s0f0").contains("no RoCE v2 GID"));
}

#[test]
fn an_index_of_another_namespace_does_not_pick_an_interface() {
    let mut host = TestHost::new(&[Function {
        is_visible: false,
        ..spark_function(0, 0)
    }]);
    host.ports[0]
        .gids
        .iter_mut()
        .for_each(|entry| entry.ifindex = 1);
    let found = host.survey("");
    assert_ne!(found.rails[0].netdev.as_deref(), Some("lo"));
    assert_eq!(found.rails[0].addresses[0].prefix, None);
}

#[test]
fn a_name_of_another_namespace_does_not_pick_an_interface() {
    let mut host = TestHost::new(&[Function {
        netdev: Some("eth0"),
        is_visible: false,
        ..spark_function(0, 0)
    }]);
    assert_eq!(host.survey("").rails[0].netdev.as_deref(), Some("eth0"));
    std::fs::create_dir_all(host.path("class/net/eth0")).unwrap();
    std::fs::write(host.path("class/net/eth0/mtu"), "1500\n").unwrap();
    host.interfaces.push(interface("eth0", 9, []));
    let found = host.survey("");
    assert_eq!(
        (
            found.rails[0].netdev.as_deref(),
            found.rails[0].netdev_mtu_bytes
        ),
        (None, None)
    );
}

#[test]
fn the_order_does_not_depend_on_the_order_of_the_devices() {
    let mut functions = spark(&[0, 1]);
    let expected = report(&TestHost::new(&functions).survey(""));
    functions.reverse();
    assert_eq!(report(&TestHost::new(&functions).survey("")), expected);
    functions.swap(1, 2);
    assert_eq!(report(&TestHost::new(&functions).survey("")), expected);
}

#[test]
fn the_text_page_lists_merged_ports_and_reasons_for_the_others() {
    let page = report(&TestHost::new(&spark(&[0])).survey(""));
    println!("{page}");
    let verdict = "2 rails are merged into one device: rocep1s0f0:1, roceP2p1s0f0:1\n\
                   expected payload: 196.1 Gb/s (24.5 GB/s) each way, limited by the cables\n\
                   announced to NCCL: one device of 200000 Mb/s\n\n\
                   rocep1s0f0:1  used: cable p0, PCIe link 0, twin of roceP2p1s0f0\n";
    assert!(page.starts_with(verdict), "{page}");
    for words in [
        "    enp1s0f0np0 (p0), PCI 0000:01:00.0, Gen5 x4, 200 Gb/s, path MTU 4096\n",
        "192.168.100.1/24 (GID 3)",
        "rocep1s0f1:1  not used: the port is down",
        "PCIe link 0: 0000:01:00 Gen5 x4, carries 112 Gb/s; shared by rocep1s0f0,\n  rocep1s0f1\n",
    ] {
        assert!(page.contains(words), "no {words:?} in\n{page}");
    }
    assert!(page.lines().all(|line| line.len() <= 80), "{page}");
    let one = report(&TestHost::new(&[spark_function(0, 0)]).survey(""));
    assert!(
        one.starts_with("1 rail is usable: rocep1s0f0:1\nexpected payload: 112 Gb/s"),
        "{one}"
    );
    let empty = survey(
        Path::new("/nonexistent"),
        Path::new("/nonexistent"),
        &[],
        &interfaces::all().unwrap(),
        &hca(""),
    );
    let page = report(&empty);
    assert!(
        page.starts_with("No rail is usable") && page.contains("--device\n/dev/infiniband"),
        "{page}"
    );
}

#[test]
fn where_nothing_is_usable_the_page_begins_with_the_reasons() {
    let page = report(&TestHost::new(&spark(&[])).survey("^rocep1s0f1"));
    let down = "the port is down: no cable, or its interface is not up";
    let reasons = format!(
        "No rail is usable:\n  rocep1s0f0:1, roceP2p1s0f0:1 and roceP2p1s0f1:1: the port is down: no cable,\n    or its \
         interface is not up\n  rocep1s0f1:1: NCCL_IB_HCA excludes it\n\nrocep1s0f0:1  not used: {down}\n"
    );
    assert!(page.starts_with(&reasons), "{page}");
    assert!(page.lines().all(|line| line.len() <= 80), "{page}");
}

#[test]
fn a_missing_sysfs_is_an_error_and_one_without_devices_is_a_warning() {
    let host = TestHost::new(&spark(&[0, 1]));
    check_sysfs(&host.path("")).unwrap();
    for (sysfs, why) in [
        (PathBuf::from("/no/such/sys"), "No such file"),
        (host.path("class"), "no folder `class`"),
    ] {
        let error = check_sysfs(&sysfs).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("NCCL_SPARK_SYSFS={sysfs:?}")) && error.contains(why),
            "{error}"
        );
    }
    let elsewhere = tempfile::tempdir().unwrap();
    let found = survey(
        elsewhere.path(),
        elsewhere.path(),
        &host.ports,
        &host.interfaces,
        &hca("rocep1s0f0"),
    );
    assert_warned(
        &found,
        1,
        &[
            "does not list rocep1s0f0 (class/infiniband)",
            "NCCL_SPARK_SYSFS",
        ],
    );
}

#[test]
fn a_link_local_gid_unknown_to_its_interface_is_ignored() {
    let mut host = TestHost::new(&spark(&[0]));
    host.remove_link_local("enp1s0f0np0");
    let found = host.survey("");
    assert_eq!(names(&found), ["rocep1s0f0", "roceP2p1s0f0"]);
    let counts: Vec<usize> = found
        .rails
        .iter()
        .map(|rail| rail.addresses.len())
        .collect();
    assert_eq!(counts, [1, 2]);
    assert_eq!(
        Ipv6Addr::from(found.rails[0].addresses[0].gid),
        Ipv4Addr::new(192, 168, 100, 1).to_ipv6_mapped()
    );
    assert_warned(&found, 0, &[]);

    let mut functions = spark(&[0]);
    functions
        .iter_mut()
        .find(|f| f.device == "roceP2p1s0f0")
        .unwrap()
        .v4 = None;
    let mut host = TestHost::new(&functions);
    host.remove_link_local("enP2p1s0f0np0");
    let found = host.survey("");
    assert_eq!(names(&found), ["rocep1s0f0"]);
    let why = reason(&found, "roceP2p1s0f0");
    for words in [
        "its interface enP2p1s0f0np0 does not have",
        "IPv4 address",
        "link-local: [ipv6] in netplan",
    ] {
        assert!(why.contains(words), "{why}");
    }
    assert_warned(
        &found,
        1,
        &[&format!(
            "its twin roceP2p1s0f0 on another link is not usable: {why}."
        )],
    );
    assert_eq!(
        found
            .refused
            .iter()
            .find(|r| r.device == "roceP2p1s0f0")
            .unwrap()
            .netdev
            .as_deref(),
        Some("enP2p1s0f0np0")
    );
}

#[test]
fn another_link_local_address_of_the_interface_is_the_rails() {
    let mut host = TestHost::new(&[Function {
        v4: None,
        ..spark_function(0, 0)
    }]);
    host.remove_link_local("enp1s0f0np0");
    let stable_privacy: Ipv6Addr = "fe80::9a1c:77d2:41f0:5b3e".parse().unwrap();
    let entry = crate::port::GidEntry {
        index: 3,
        gid: stable_privacy.octets(),
        ..host.ports[0].gids[1]
    };
    host.ports[0].gids.push(entry);
    host.interfaces[1] = interface("enp1s0f0np0", 2, [(stable_privacy.into(), 64)]);
    let found = host.survey("");
    assert_eq!(
        found.rails[0].addresses.len(),
        1,
        "{:?}",
        found.rails[0].addresses
    );
    let address = found.rails[0].addresses[0];
    assert_eq!(
        (address.gid, address.gid_index, address.prefix),
        (stable_privacy.octets(), 3, Some(64))
    );
}

#[test]
fn a_link_local_gid_is_valid_where_its_interface_is_invisible() {
    let only_link_local = Function {
        v4: None,
        ..spark_function(0, 0)
    };
    // The interface is in another namespace. At first its GID has no interface index. Then the
    // index is that of another interface in this namespace.
    let mut host = TestHost::new(&[Function {
        is_visible: false,
        ..only_link_local.clone()
    }]);
    assert_eq!(host.survey("").rails.len(), 1);
    host.ports[0]
        .gids
        .iter_mut()
        .for_each(|entry| entry.ifindex = 7);
    host.interfaces.push(interface("eth0", 7, []));
    assert_eq!(host.survey("").rails.len(), 1);
    let mut host = TestHost::new(&[only_link_local]);
    host.remove_link_local("enp1s0f0np0");
    assert_eq!(host.survey("").rails.len(), 0);
    host.interfaces[1].index = 9;
    assert_eq!(host.survey("").rails.len(), 1);
    // Without the folder `gid_attrs` in sysfs, the name of the GID's interface is unknown.
    host.interfaces[1].index = 2;
    std::fs::remove_dir_all(host.path("class/infiniband/rocep1s0f0/ports/1/gid_attrs")).unwrap();
    assert_eq!(host.survey("").rails.len(), 1);
}

const ARP: &str = "an ARP request for the address of one of rocep1s0f0 and roceP2p1s0f0 may be answered by another of them";
const CURE: &str = "sysctl -w net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2";
const LOOSE: &str = "net.ipv4.conf.all.rp_filter=2";

fn addressed_twins(same_subnet: bool) -> TestHost {
    let mut functions = spark(&[0]);
    let twins = functions.iter_mut().filter(|f| f.v4.is_some()).zip(1..);
    twins.for_each(|(function, n)| function.v4 = Some([10, 0, if same_subnet { 0 } else { n }, n]));
    TestHost::new(&functions)
}

#[test]
fn twins_that_answer_arp_for_each_other_are_a_warning_with_the_cure() {
    for same_subnet in [true, false] {
        let host = addressed_twins(same_subnet);
        for (rp_filter, arp_ignore) in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)] {
            for netdev in ["all", "enp1s0f0np0", "enP2p1s0f0np0"] {
                host.set_arp(netdev, arp_ignore, rp_filter);
            }
            let is_right = if same_subnet {
                rp_filter != 1 && arp_ignore > 0
            } else {
                rp_filter == 1 || arp_ignore > 0
            };
            let texts = host
                .survey("")
                .warnings
                .into_iter()
                .map(|warning| warning.text);
            let said: Vec<String> = texts.filter(|w| w.contains("ARP")).collect();
            assert_eq!(
                said.len(),
                usize::from(!is_right),
                "{same_subnet} {rp_filter} {arp_ignore}: {said:?}"
            );
            for line in &said {
                assert!(
                    line.starts_with(ARP) && line.contains(CURE) && line.contains("/etc/sysctl.d"),
                    "{line}"
                );
                assert_eq!(line.contains(LOOSE), rp_filter == 1, "{line}");
                assert!(
                    report(&host.survey(""))
                        .replace("\n    ", " ")
                        .contains("WARNING: an ARP request")
                );
            }
        }
    }
}

#[test]
fn the_larger_of_all_and_the_interfaces_own_arp_setting_counts() {
    let host = addressed_twins(true);
    let is_warned = || {
        host.survey("")
            .warnings
            .iter()
            .any(|warning| warning.text.starts_with(ARP))
    };
    let set = |all: (u32, u32), first: (u32, u32), second: (u32, u32)| {
        for (netdev, (arp_ignore, rp_filter)) in [
            ("all", all),
            ("enp1s0f0np0", first),
            ("enP2p1s0f0np0", second),
        ] {
            host.set_arp(netdev, arp_ignore, rp_filter);
        }
    };
    assert!(!is_warned());
    set((1, 0), (0, 0), (0, 0));
    assert!(!is_warned());
    set((0, 0), (1, 0), (1, 0));
    assert!(!is_warned());
    set((0, 0), (1, 0), (0, 0));
    assert!(is_warned());
    set((1, 2), (0, 1), (0, 1));
    assert!(!is_warned());
    set((1, 0), (0, 1), (0, 0));
    assert!(is_warned());
    std::fs::remove_file(host.path("proc/sys/net/ipv4/conf/enP2p1s0f0np0/rp_filter")).unwrap();
    assert!(!is_warned());
}

#[test]
fn functions_of_two_cables_share_no_wire_unless_they_share_a_subnet() {
    let separate: Vec<Function> = spark(&[0, 1])
        .into_iter()
        .filter(|f| f.device.starts_with("rocep"))
        .collect();
    let mut joined = separate.clone();
    joined
        .iter_mut()
        .zip(1..)
        .for_each(|(function, n)| function.v4 = Some([10, 0, 0, n]));
    for (functions, count) in [(separate, 0), (joined, 1)] {
        let host = TestHost::new(&functions);
        ["all", "enp1s0f0np0", "enp1s0f1np1"]
            .iter()
            .for_each(|netdev| host.set_arp(netdev, 0, 2));
        let said = host
            .survey("")
            .warnings
            .iter()
            .filter(|warning| warning.text.contains("ARP"))
            .count();
        assert_eq!(said, count);
    }
}
