//! Hosts for tests: sysfs trees laid out like the kernel's, with the ports that verbs would report.

use super::{HcaFilter, PortFacts, Survey, report, survey};
use crate::config::Config;
use crate::interfaces::{Interface, InterfaceAddress};
use crate::port::{GidEntry, GidKind, LinkLayer, PortInfo, PortState};
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// A function of a host under test: an RDMA device with one port. [`spark_function`] returns a
/// function whose port is active and has addresses.
#[derive(Clone)]
pub(super) struct Function {
    pub(super) device: &'static str,
    pub(super) netdev: Option<&'static str>,
    pub(super) phys_port: Option<&'static str>,
    /// PCI address; `None` for soft-RoCE.
    pub(super) pci: Option<&'static str>,
    /// PCI address of the physical function, if this is a virtual function.
    pub(super) physical: Option<&'static str>,
    pub(super) width: u16,
    pub(super) max_width: u16,
    pub(super) gt_per_s: &'static str,
    pub(super) max_gt_per_s: &'static str,
    /// The maximum payload size is 128 bytes times 2 to this power. `None`: the file `config` has
    /// only its first 64 bytes, as for a reader without root.
    pub(super) max_payload_exponent: Option<u8>,
    pub(super) system_image_guid: Option<u64>,
    pub(super) guid: u64,
    pub(super) state: PortState,
    pub(super) link_layer: LinkLayer,
    pub(super) speed_mbps: u32,
    pub(super) netdev_mtu: u32,
    pub(super) v4: Option<[u8; 4]>,
    pub(super) v4_prefix: u8,
    /// A routable address in a /64.
    pub(super) v6: Option<Ipv6Addr>,
    pub(super) gid_has_link_local: bool,
    /// False with netplan's `link-local: []`: the GID table has the address, but the interface does
    /// not.
    pub(super) interface_has_link_local: bool,
    /// Indices of the entries in the GID table. Each address has two entries, first RoCE v1, then
    /// RoCE v2. An entry without an index here has its own position as index.
    pub(super) gid_indices: &'static [u16],
    /// False if the interface is in another network namespace.
    pub(super) is_visible: bool,
}

pub(super) const SPARK_GUID: u64 = 0xfc4c_ea03_00f9_4230;

/// A Spark's function in PCIe domain `domain` (0 or 2) for physical port `port` (0 or 1). It has
/// the GUIDs, names and PCI addresses that a Spark's `ibstat` and `lspci` print.
pub(super) fn spark_function(domain: u8, port: u8) -> Function {
    let (device, netdev, pci) = match (domain, port) {
        (0, 0) => ("rocep1s0f0", "enp1s0f0np0", "0000:01:00.0"),
        (0, _) => ("rocep1s0f1", "enp1s0f1np1", "0000:01:00.1"),
        (_, 0) => ("roceP2p1s0f0", "enP2p1s0f0np0", "0002:01:00.0"),
        (_, _) => ("roceP2p1s0f1", "enP2p1s0f1np1", "0002:01:00.1"),
    };
    Function {
        device,
        netdev: Some(netdev),
        phys_port: Some(if port == 0 { "p0" } else { "p1" }),
        pci: Some(pci),
        physical: None,
        width: 4,
        max_width: 4,
        gt_per_s: "32.0 GT/s PCIe",
        max_gt_per_s: "32.0 GT/s PCIe",
        max_payload_exponent: Some(2),
        system_image_guid: Some(SPARK_GUID),
        guid: SPARK_GUID + u64::from(domain) * 2 + u64::from(port),
        state: PortState::Active,
        link_layer: LinkLayer::Ethernet,
        speed_mbps: 200_000,
        netdev_mtu: 9000,
        v4: Some([192, 168, 100 + domain + 10 * port, 1]),
        v4_prefix: 24,
        v6: None,
        gid_has_link_local: true,
        interface_has_link_local: true,
        gid_indices: &[],
        is_visible: true,
    }
}

impl Function {
    pub(super) fn down(self) -> Self {
        Self {
            state: PortState::Down,
            speed_mbps: 40_000,
            v4: None,
            ..self
        }
    }

    fn addresses(&self) -> impl Iterator<Item = (IpAddr, u8)> + use<> {
        let v4 = self
            .v4
            .map(|v4| (IpAddr::V4(Ipv4Addr::from(v4)), self.v4_prefix));
        let v6 = self.v6.map(|v6| (IpAddr::V6(v6), 64));
        let own = (self.gid_has_link_local && self.interface_has_link_local)
            .then(|| (IpAddr::V6(link_local(self.guid)), 64));
        v4.into_iter().chain(v6).chain(own)
    }
}

/// A Spark with cables in the given physical ports. The functions of a port without a cable are
/// down.
pub(super) fn spark(cables: &[u8]) -> Vec<Function> {
    let function = |(domain, port)| {
        let up = spark_function(domain, port);
        if cables.contains(&port) {
            up
        } else {
            up.down()
        }
    };
    // A Spark lists its devices in this order.
    [(2, 0), (2, 1), (0, 0), (0, 1)]
        .into_iter()
        .map(function)
        .collect()
}

pub(super) struct TestHost {
    sysfs: tempfile::TempDir,
    pub(super) ports: Vec<PortFacts>,
    pub(super) interfaces: Vec<Interface>,
}

impl TestHost {
    pub(super) fn new(functions: &[Function]) -> Self {
        let sysfs = tempfile::tempdir().unwrap();
        let mut interfaces = vec![interface("lo", 1, [(IpAddr::V4(Ipv4Addr::LOCALHOST), 8)])];
        let mut ports = Vec::new();
        for (function, index) in functions.iter().zip(2..) {
            write_function(sysfs.path(), function);
            if let Some(name) = function.netdev.filter(|_| function.is_visible) {
                interfaces.push(interface(name, index, function.addresses()));
            }
            ports.push(facts(function, if function.is_visible { index } else { 0 }));
        }
        Self {
            sysfs,
            ports,
            interfaces,
        }
    }

    pub(super) fn survey(&self, filter: &str) -> Survey {
        let found = survey(
            self.sysfs.path(),
            &self.path("proc/sys"),
            &self.ports,
            &self.interfaces,
            &hca(filter),
        );
        assert_eq!(found.rails.len() + found.refused.len(), self.ports.len());
        let page = report(&found);
        assert!(
            self.ports.iter().all(|port| page.contains(&port.device)),
            "{page}"
        );
        found
    }

    pub(super) fn path(&self, below: &str) -> PathBuf {
        self.sysfs.path().join(below)
    }
}

impl TestHost {
    /// Removes an interface's IPv6 addresses, here only the link-local address. The GIDs of the
    /// addresses stay in the table.
    pub(super) fn remove_link_local(&mut self, netdev: &str) {
        let interface = self
            .interfaces
            .iter_mut()
            .find(|interface| interface.name == netdev)
            .unwrap();
        interface
            .addresses
            .retain(|each| !matches!(each.address.ip(), IpAddr::V6(_)));
    }

    pub(super) fn set_carrier(&self, interface: &str) {
        write(
            &self.path("class/net").join(interface).join("carrier"),
            "1\n",
        );
    }

    pub(super) fn set_arp(&self, interface: &str, arp_ignore: u32, rp_filter: u32) {
        let folder = self.path("proc/sys/net/ipv4/conf").join(interface);
        write(&folder.join("arp_ignore"), &format!("{arp_ignore}\n"));
        write(&folder.join("rp_filter"), &format!("{rp_filter}\n"));
    }
}

pub(super) fn hca(filter: &str) -> HcaFilter {
    Config::from_variables(&[("NCCL_IB_HCA".to_owned(), filter.to_owned())])
        .unwrap()
        .rails
        .hca
}

pub(super) fn interface(
    name: &str,
    index: u32,
    addresses: impl IntoIterator<Item = (IpAddr, u8)>,
) -> Interface {
    let address = |(ip, prefix)| InterfaceAddress {
        address: SocketAddr::new(ip, 0),
        prefix: Some(prefix),
    };
    let name = name.to_owned();
    let addresses = addresses.into_iter().map(address).collect();
    Interface {
        name,
        index,
        is_loopback: index == 1,
        is_up: true,
        is_running: true,
        addresses,
    }
}

fn facts(function: &Function, ifindex: u32) -> PortFacts {
    let mut gids = Vec::new();
    let mut add = |gid: Ipv6Addr| {
        for kind in [GidKind::RoceV1, GidKind::RoceV2] {
            let index = function
                .gid_indices
                .get(gids.len())
                .copied()
                .unwrap_or(gids.len() as u16);
            gids.push(GidEntry {
                index,
                gid: gid.octets(),
                kind,
                ifindex,
            });
        }
    };
    if function.gid_has_link_local {
        add(link_local(function.guid));
    }
    if let Some(v4) = function.v4 {
        add(Ipv4Addr::from(v4).to_ipv6_mapped());
    }
    if let Some(v6) = function.v6 {
        add(v6);
    }
    let active_mtu_bytes = match function.netdev_mtu {
        4200.. => 4096,
        2200.. => 2048,
        _ => 1024,
    };
    PortFacts {
        device: function.device.to_owned(),
        guid: function.guid,
        port: 1,
        info: PortInfo {
            state: function.state,
            link_layer: function.link_layer,
            active_mtu_bytes,
            max_message_bytes: 1 << 30,
            speed_mbps: function.speed_mbps,
        },
        gids,
    }
}

pub(super) fn link_local(guid: u64) -> Ipv6Addr {
    Ipv6Addr::from_bits((0xfe80 << 112) | u128::from(guid))
}

fn write_function(sysfs: &Path, function: &Function) {
    let parent = match function.pci {
        Some(address) => sysfs.join(pci_folder(address)),
        None => sysfs.join("devices/virtual"),
    };
    let rdma = parent.join("infiniband").join(function.device);
    fs::create_dir_all(rdma.join("ports/1/gid_attrs/ndevs")).unwrap();
    if let Some(guid) = function.system_image_guid {
        let [a, b, c, d] = [48, 32, 16, 0].map(|shift| (guid >> shift) & 0xffff);
        write(
            &rdma.join("sys_image_guid"),
            &format!("{a:04x}:{b:04x}:{c:04x}:{d:04x}\n"),
        );
    }
    link(&rdma, &sysfs.join("class/infiniband").join(function.device));
    if let Some(address) = function.pci {
        link(&parent, &rdma.join("device"));
        write_pci(sysfs, &parent, address, function);
    }
    let Some(netdev) = function.netdev else {
        return;
    };
    for index in (0..4).chain(function.gid_indices.iter().copied()) {
        write(
            &rdma.join(format!("ports/1/gid_attrs/ndevs/{index}")),
            &format!("{netdev}\n"),
        );
    }
    if !function.is_visible {
        return;
    }
    let folder = match function.pci {
        Some(_) => parent.join("net").join(netdev),
        None => sysfs.join("devices/virtual/net").join(netdev),
    };
    write(&folder.join("mtu"), &format!("{}\n", function.netdev_mtu));
    write(&folder.join("dev_port"), "0\n");
    if let Some(phys_port) = function.phys_port {
        write(&folder.join("phys_port_name"), &format!("{phys_port}\n"));
    }
    link(&folder, &sysfs.join("class/net").join(netdev));
}

/// Returns the folder of a function: below the root port of its domain and bus, as on a real
/// machine.
fn pci_folder(address: &str) -> String {
    let (domain, rest) = address.split_once(':').unwrap();
    let bus = rest.split(':').next().unwrap();
    format!("devices/pci{domain}:00/{domain}:00:{bus}.0/{address}")
}

fn write_pci(sysfs: &Path, folder: &Path, address: &str, function: &Function) {
    if let Some(physical) = function.physical {
        let physical_folder = sysfs.join(pci_folder(physical));
        fs::create_dir_all(&physical_folder).unwrap();
        link(&physical_folder, &folder.join("physfn"));
        write_link(folder, "0", "Unknown", "0", "Unknown");
        write_pci(
            sysfs,
            &physical_folder,
            physical,
            &Function {
                physical: None,
                ..function.clone()
            },
        );
        return;
    }
    let width = function.width.to_string();
    let max_width = function.max_width.to_string();
    write_link(
        folder,
        &width,
        function.gt_per_s,
        &max_width,
        function.max_gt_per_s,
    );
    // Configuration space whose first capability, at 0x60, is PCI Express. Its device control
    // register, at 0x68, has the maximum payload size.
    let mut space = vec![0_u8; 64];
    if let Some(exponent) = function.max_payload_exponent {
        space.resize(256, 0);
        (space[0x06], space[0x34], space[0x60], space[0x68]) = (0x10, 0x60, 0x10, exponent << 5);
    }
    fs::write(folder.join("config"), space).unwrap();
    assert!(folder.ends_with(address));
}

fn write_link(folder: &Path, width: &str, speed: &str, max_width: &str, max_speed: &str) {
    write(&folder.join("current_link_width"), width);
    write(&folder.join("current_link_speed"), speed);
    write(&folder.join("max_link_width"), max_width);
    write(&folder.join("max_link_speed"), max_speed);
}

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn link(target: &Path, at: &Path) {
    fs::create_dir_all(at.parent().unwrap()).unwrap();
    symlink(target, at).unwrap();
}
