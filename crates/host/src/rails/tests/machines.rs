//! Hosts for tests of cabling: Sparks, a workstation and pods. Names and figures come from listings
//! that owners of such machines have published.

use crate::rails::testbed::{Function, SPARK_GUID, TestHost, spark, spark_function};
use std::net::IpAddr;

pub(super) const F0: &str = "rocep1s0f0";
pub(super) const P2F0: &str = "roceP2p1s0f0";
pub(super) const F1: &str = "rocep1s0f1";
pub(super) const P2F1: &str = "roceP2p1s0f1";

/// The functions of the Spark with number `host`. Only the ports in `cables` have a cable. Each of
/// `addresses` is a device and its address with prefix length. The functions have no other
/// addresses, except for link-local ones.
pub(super) fn spark_with(host: u8, cables: &[u8], addresses: &[(&str, &str)]) -> Vec<Function> {
    let mut functions = spark(cables);
    for function in &mut functions {
        let guid = SPARK_GUID + (u64::from(host) << 24);
        function.guid = guid + (function.guid - SPARK_GUID);
        (function.system_image_guid, function.v4) = (Some(guid), None);
    }
    for (device, address) in addresses {
        set_address(
            functions.iter_mut().find(|f| f.device == *device).unwrap(),
            address,
        );
    }
    functions
}

fn set_address(function: &mut Function, address: &str) {
    let (ip, prefix) = address.split_once('/').unwrap();
    match ip.parse().unwrap() {
        IpAddr::V4(v4) => {
            (function.v4, function.v4_prefix) = (Some(v4.octets()), prefix.parse().unwrap())
        }
        IpAddr::V6(v6) => function.v6 = Some(v6),
    }
}

/// A host whose interfaces answer ARP only for their own addresses.
pub(super) fn host(functions: &[Function]) -> TestHost {
    with_arp(functions, 1, 2)
}

pub(super) fn with_arp(functions: &[Function], arp_ignore: u32, rp_filter: u32) -> TestHost {
    let host = TestHost::new(functions);
    let visible = functions
        .iter()
        .filter(|f| f.is_visible)
        .filter_map(|f| f.netdev);
    visible
        .chain(["all"])
        .for_each(|netdev| host.set_arp(netdev, arp_ignore, rp_filter));
    host
}

/// A port of a workstation's ConnectX-5, with 100 Gb/s. `function` is its PCI function, 0 or 1.
pub(super) fn workstation(function: u8) -> Function {
    Function {
        device: "mlx5_0",
        netdev: Some("enp65s0np0"),
        pci: Some(if function == 0 {
            "0000:41:00.0"
        } else {
            "0000:41:00.1"
        }),
        guid: 0x0c42_a103_0012_3456 + u64::from(function),
        system_image_guid: Some(0x0c42_a103_0012_3456),
        width: 16,
        max_width: 16,
        gt_per_s: "16.0 GT/s PCIe",
        max_gt_per_s: "16.0 GT/s PCIe",
        speed_mbps: 100_000,
        v4: Some([192, 168, 100, 9]),
        ..spark_function(0, 0)
    }
}

/// A virtual function of port p0 of Spark `n`, in PCIe domain `domain` (0 or 2). A pod sees the
/// function under another name, and without a port name. Tests of pods leave out all functions
/// whose devices the pod's cgroup forbids, because a pod cannot open them.
pub(super) fn pod_function(n: u8, domain: u8) -> Function {
    let (device, netdev, pci, physical) = match domain {
        0 => ("mlx5_4", "net1", "0000:01:00.2", "0000:01:00.0"),
        _ => ("mlx5_9", "net2", "0002:01:00.2", "0002:01:00.0"),
    };
    Function {
        device,
        netdev: Some(netdev),
        pci: Some(pci),
        physical: Some(physical),
        phys_port: None,
        guid: SPARK_GUID + 0x100 + (u64::from(n) << 24) + u64::from(domain),
        system_image_guid: Some(SPARK_GUID + (u64::from(n) << 24)),
        v4: Some([192, 168, 177 + domain, n]),
        ..spark_function(domain, 0)
    }
}

/// The functions of Spark `n`, with the addresses of a netplan file. Understands only the syntax of
/// the examples in docs/guide/netplan.
pub(super) fn spark_from_netplan(n: u8, file: &str) -> Vec<Function> {
    let text = std::fs::read_to_string(file).unwrap();
    let mut addresses: Vec<(String, String)> = Vec::new();
    for line in text.lines().map(str::trim) {
        match line.strip_suffix(':').filter(|name| name.starts_with("en")) {
            Some(netdev) => addresses.push((netdev.to_owned(), String::new())),
            None => {
                let address = line
                    .strip_prefix("addresses: [")
                    .and_then(|rest| rest.strip_suffix(']'));
                address
                    .into_iter()
                    .for_each(|address| addresses.last_mut().unwrap().1 = address.to_owned());
            }
        }
    }
    assert_eq!(addresses.len(), 4, "{file}");
    let of_device = |(netdev, address): &(String, String)| {
        let function = spark_with(n, &[0, 1], &[])
            .into_iter()
            .find(|f| f.netdev == Some(netdev.as_str()))
            .unwrap();
        (function.device, address.clone())
    };
    let addresses: Vec<(&str, String)> = addresses.iter().map(of_device).collect();
    spark_with(
        n,
        &[0, 1],
        &addresses
            .iter()
            .map(|(device, ip)| (*device, ip.as_str()))
            .collect::<Vec<_>>(),
    )
}
