//! Ports from sysfs alone, for a process that lacks a verbs library or the right to open a device.
//!
//! The facts are the same as from verbs, except two. The largest message is not in sysfs, so 1 GiB
//! is assumed. The path MTU is computed from the interface's MTU, as in the kernel (`iboe_get_mtu`
//! in include/rdma/ib_addr.h, used by mlx5 and soft-RoCE).

use super::model::PortFacts;
use super::sysfs::{self, names, read};
use crate::port::{GidEntry, GidKind, LinkLayer, PortInfo, PortState};
use std::net::Ipv6Addr;
use std::path::Path;

/// Returns every port of every RDMA device in sysfs, in the order of the devices' names and the
/// ports' numbers.
pub fn ports_from_sysfs(sysfs: &Path) -> Vec<PortFacts> {
    let mut found = Vec::new();
    for device in names(&sysfs.join("class/infiniband")) {
        let folder = sysfs.join("class/infiniband").join(&device);
        let guid = read(&folder.join("node_guid"))
            .and_then(|guid| u64::from_str_radix(&guid.replace(':', ""), 16).ok());
        let mut ports: Vec<u8> = names(&folder.join("ports"))
            .iter()
            .filter_map(|name| name.parse().ok())
            .collect();
        ports.sort_unstable();
        for port in ports {
            found.push(port_facts(sysfs, &device, guid.unwrap_or(0), port));
        }
    }
    found
}

/// Largest sum of the headers of a RoCE packet, in bytes: global route 40, UDP 8, base transport
/// 12, XRC 4, atomic 28, invariant CRC 4.
const HEADERS_BYTES: u32 = 96;

fn port_facts(sysfs: &Path, device: &str, guid: u64, port: u8) -> PortFacts {
    let folder = sysfs
        .join("class/infiniband")
        .join(device)
        .join("ports")
        .join(port.to_string());
    let gids = gid_table(sysfs, &folder);
    let netdev = sysfs::function_netdevs(sysfs, device, port)
        .into_iter()
        .next();
    let netdev = netdev.or_else(|| read(&folder.join("gid_attrs/ndevs/0")));
    let payload_bytes = |mtu: u32| {
        [4096, 2048, 1024, 512]
            .into_iter()
            .find(|size| size + HEADERS_BYTES <= mtu)
            .unwrap_or(256)
    };
    let info = PortInfo {
        state: state(&read(&folder.join("state")).unwrap_or_default()),
        link_layer: match read(&folder.join("link_layer")).as_deref() {
            Some("Ethernet") => LinkLayer::Ethernet,
            Some("InfiniBand") => LinkLayer::InfiniBand,
            _ => LinkLayer::Unspecified,
        },
        active_mtu_bytes: netdev
            .and_then(|name| sysfs::netdev_mtu(sysfs, &name))
            .map_or(1024, payload_bytes),
        max_message_bytes: 1 << 30,
        speed_mbps: read(&folder.join("rate"))
            .and_then(|rate| rate_mbps(&rate))
            .unwrap_or(0),
    };
    PortFacts {
        device: device.to_owned(),
        guid,
        port,
        info,
        gids,
    }
}

/// Parses `4: ACTIVE`.
fn state(text: &str) -> PortState {
    match text
        .split(':')
        .next()
        .and_then(|number| number.trim().parse().ok())
    {
        Some(1) => PortState::Down,
        Some(2) => PortState::Init,
        Some(3) => PortState::Armed,
        Some(4) => PortState::Active,
        Some(other) => PortState::Other(other),
        None => PortState::Other(0),
    }
}

/// Parses `200 Gb/sec (2X NDR)`, `2.5 Gb/sec (1X SDR)`.
fn rate_mbps(text: &str) -> Option<u32> {
    let (whole, tenths) = match text.split_whitespace().next()?.split_once('.') {
        Some((whole, part)) => (whole, part.get(..1)?.parse().ok()?),
        None => (text.split_whitespace().next()?, 0),
    };
    whole
        .parse::<u32>()
        .ok()?
        .checked_mul(1000)?
        .checked_add(tenths * 100)
}

/// Reads a port's GID table. Omits empty entries, whose GID is zero and which have no kind.
fn gid_table(sysfs: &Path, port: &Path) -> Vec<GidEntry> {
    let mut entries = Vec::new();
    for name in names(&port.join("gids")) {
        let Ok(index) = name.parse::<u16>() else {
            continue;
        };
        let gid = read(&port.join("gids").join(&name)).and_then(|gid| gid.parse::<Ipv6Addr>().ok());
        let Some(gid) = gid.filter(|gid| !gid.is_unspecified()) else {
            continue;
        };
        let kind = match read(&port.join("gid_attrs/types").join(&name))
            .as_deref()
            .map(|kind| kind.ends_with("v2"))
        {
            Some(true) => GidKind::RoceV2,
            Some(false) => GidKind::RoceV1,
            None => continue,
        };
        let ifindex = read(&port.join("gid_attrs/ndevs").join(&name)).and_then(|netdev| {
            read(&sysfs.join("class/net").join(netdev).join("ifindex"))?
                .parse()
                .ok()
        });
        entries.push(GidEntry {
            index,
            gid: gid.octets(),
            kind,
            ifindex: ifindex.unwrap_or(0),
        });
    }
    entries.sort_by_key(|entry| entry.index);
    entries
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn states_and_rates_match_the_kernels() {
        assert_eq!(state("4: ACTIVE"), PortState::Active);
        assert_eq!(state("1: DOWN"), PortState::Down);
        assert_eq!(state(""), PortState::Other(0));
        for (text, mbps) in [
            ("200 Gb/sec (2X NDR)", Some(200_000)),
            ("2.5 Gb/sec (1X SDR)", Some(2_500)),
            ("", None),
        ] {
            assert_eq!(rate_mbps(text), mbps, "{text}");
        }
    }

    #[test]
    fn a_port_is_read_from_its_files() {
        let sysfs = tempfile::tempdir().unwrap();
        let port = sysfs.path().join("class/infiniband/mlx5_0/ports/1");
        let write = |path: std::path::PathBuf, text: &str| {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write(port.join("state"), "4: ACTIVE\n");
        write(port.join("rate"), "200 Gb/sec (2X NDR)\n");
        write(port.join("link_layer"), "Ethernet\n");
        write(port.join("gid_attrs/ndevs/0"), "eth1\n");
        write(sysfs.path().join("class/net/eth1/mtu"), "1500\n");
        write(sysfs.path().join("class/net/eth1/ifindex"), "7\n");
        for (index, gid, kind) in [
            (0, "fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1"),
            (3, "0000:0000:0000:0000:0000:ffff:c0a8:6401", "RoCE v2"),
            (4, "0000:0000:0000:0000:0000:0000:0000:0000", ""),
        ] {
            write(port.join(format!("gids/{index}")), gid);
            write(port.join(format!("gid_attrs/types/{index}")), kind);
            write(port.join(format!("gid_attrs/ndevs/{index}")), "eth1\n");
        }
        let found = ports_from_sysfs(sysfs.path());
        let [facts] = &found[..] else {
            panic!("{found:?}")
        };
        assert_eq!(
            (facts.device.as_str(), facts.port, facts.info.speed_mbps),
            ("mlx5_0", 1, 200_000)
        );
        assert_eq!(
            (facts.info.state, facts.info.active_mtu_bytes),
            (PortState::Active, 1024)
        );
        let gids: Vec<_> = facts
            .gids
            .iter()
            .map(|entry| (entry.index, entry.kind, entry.ifindex))
            .collect();
        assert_eq!(gids, [(0, GidKind::RoceV1, 7), (3, GidKind::RoceV2, 7)]);
    }
}
