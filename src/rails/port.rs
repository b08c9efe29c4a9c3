//! One port: what verbs and sysfs say of it together, and whether it is a rail.

use super::{HcaFilter, Interface, PciFunction, PortFacts, Rail, RailAddress, Refused, sysfs};
use crate::verbs::{GidEntry, GidKind, LinkLayer, PortState};
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

/// All that is known of a port.
#[derive(Debug, Clone)]
pub(super) struct Port<'a> {
    pub(super) facts: &'a PortFacts,
    pub(super) netdev: Option<String>,
    pub(super) phys_port: Option<String>,
    pub(super) pci: Option<PciFunction>,
    pub(super) addresses: Vec<RailAddress>,
    pub(super) obstacle: Option<Obstacle>,
    pub(super) is_admitted: bool,
    pub(super) is_in_sysfs: bool,
    /// Line rate in Mb/s; `None` where nobody says.
    pub(super) speed_mbps: Option<u32>,
    netdev_mtu_bytes: Option<u32>,
    system_image_guid: Option<u64>,
}

/// Why a port cannot carry RoCE v2, whatever the filter says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Obstacle {
    LinkLayer(LinkLayer),
    State(PortState),
    NoGid,
}

/// What tells two cables apart: the adapter and its physical port, or the port itself where neither is known.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Cable {
    Port { adapter: Option<u64>, port: String },
    Own { device: String, port: u8 },
}

impl<'a> Port<'a> {
    /// Puts together what is known of a port.
    pub(super) fn look(sysfs: &Path, facts: &'a PortFacts, interfaces: &[Interface], filter: &HcaFilter) -> Self {
        let (device, port) = (facts.device.as_str(), facts.port);
        let function_netdevs = sysfs::function_netdevs(sysfs, device, port);
        let netdev = netdev(sysfs, facts, interfaces, &function_netdevs);
        let named = netdev.iter().chain(&function_netdevs);
        let mut phys_ports = named.filter_map(|name| sysfs::phys_port_name(sysfs, name));
        let seen = netdev.as_ref().and_then(|name| interfaces.iter().find(|interface| interface.name == *name));
        Self {
            phys_port: phys_ports.next(),
            pci: sysfs::pci_function(sysfs, device),
            addresses: addresses(facts, interfaces),
            obstacle: obstacle(facts),
            is_admitted: filter.admits(device, Some(port)),
            is_in_sysfs: sysfs::has_device(sysfs, device),
            netdev_mtu_bytes: seen.map(|interface| interface.mtu).filter(|mtu| *mtu > 0),
            speed_mbps: Some(facts.info.speed_mbps)
                .filter(|mbps| *mbps > 0)
                .or_else(|| sysfs::netdev_speed_mbps(sysfs, netdev.as_ref()?)),
            system_image_guid: sysfs::system_image_guid(sysfs, device),
            netdev,
            facts,
        }
    }

    /// Whether it carries traffic.
    pub(super) fn is_rail(&self) -> bool {
        self.is_admitted && self.obstacle.is_none()
    }

    /// The cable in its physical port.
    ///
    /// A virtual function, and an interface in another namespace, show no port name: there the physical function's
    /// number stands for it, as these adapters have one function for each port.
    pub(super) fn cable(&self) -> Cable {
        let by_function = || {
            let function = self.pci.as_ref()?.function;
            Some(if self.facts.port == 1 { format!("p{function}") } else { format!("p{function}.{}", self.facts.port) })
        };
        match self.phys_port.clone().or_else(by_function) {
            // Where no adapter shows a GUID the port's name alone is left to go by.
            Some(port) if self.pci.is_some() => Cable::Port { adapter: self.system_image_guid, port },
            _ => Cable::Own { device: self.facts.device.clone(), port: self.facts.port },
        }
    }

    /// `domain:bus:device` of the PCIe link.
    pub(super) fn slot(&self) -> Option<&str> {
        self.pci.as_ref().map(|pci| pci.slot.as_str())
    }

    /// The adapter's GUID, or the device's own.
    pub(super) fn adapter_guid(&self) -> u64 {
        self.system_image_guid.unwrap_or(self.facts.guid)
    }

    /// The port as a rail on these links and cables.
    pub(super) fn rail(&self, link: usize, cable: usize) -> Rail {
        Rail {
            device: self.facts.device.clone(),
            port: self.facts.port,
            netdev: self.netdev.clone(),
            phys_port: self.phys_port.clone(),
            pci: self.pci.clone(),
            link,
            cable,
            twin: None,
            speed_mbps: self.speed_mbps.unwrap_or(ASSUMED_SPEED_MBPS),
            path_mtu_bytes: self.facts.info.active_mtu_bytes,
            netdev_mtu_bytes: self.netdev_mtu_bytes,
            max_message_bytes: self.facts.info.max_message_bytes,
            addresses: self.addresses.clone(),
        }
    }

    /// The port with the reason why it is not a rail, if it is not.
    pub(super) fn refused(&self) -> Option<Refused> {
        let reason = match self.obstacle {
            _ if self.is_rail() => return None,
            _ if !self.is_admitted => "NCCL_IB_HCA excludes it".to_owned(),
            Some(obstacle) => obstacle.text(),
            None => return None,
        };
        Some(Refused {
            device: self.facts.device.clone(),
            port: self.facts.port,
            netdev: self.netdev.clone(),
            phys_port: self.phys_port.clone(),
            pci: self.pci.clone(),
            reason,
        })
    }
}

impl Obstacle {
    /// The reason for a person.
    pub(super) fn text(self) -> String {
        match self {
            Self::LinkLayer(LinkLayer::InfiniBand) => "its link layer is InfiniBand, not Ethernet".to_owned(),
            Self::LinkLayer(_) => "its link layer is not Ethernet".to_owned(),
            Self::State(PortState::Down) => "the port is down: no cable, or its interface is not up".to_owned(),
            Self::State(PortState::Init) => "the port is not active yet (state INIT)".to_owned(),
            Self::State(PortState::Armed) => "the port is not active yet (state ARMED)".to_owned(),
            Self::State(state) => format!("the port is not active (state {state:?})"),
            Self::NoGid => "it has no RoCE v2 GID: its interface has neither an IPv4 nor an IPv6 address".to_owned(),
        }
    }
}

/// What NCCL's socket transport takes an interface for that does not tell its speed.
pub(super) const ASSUMED_SPEED_MBPS: u32 = 10_000;

fn obstacle(facts: &PortFacts) -> Option<Obstacle> {
    if facts.info.link_layer != LinkLayer::Ethernet {
        Some(Obstacle::LinkLayer(facts.info.link_layer))
    } else if facts.info.state != PortState::Active {
        Some(Obstacle::State(facts.info.state))
    } else if roce_v2(facts).next().is_none() {
        Some(Obstacle::NoGid)
    } else {
        None
    }
}

fn roce_v2(facts: &PortFacts) -> impl Iterator<Item = &GidEntry> {
    facts.gids.iter().filter(|entry| entry.kind == GidKind::RoceV2 && entry.gid != [0; 16])
}

fn addresses(facts: &PortFacts, interfaces: &[Interface]) -> Vec<RailAddress> {
    let mut found: Vec<RailAddress> = roce_v2(facts)
        .map(|entry| {
            let prefix = holder(entry, interfaces).map(|(_, prefix)| prefix);
            RailAddress { gid: entry.gid, gid_index: entry.index, prefix }
        })
        .collect();
    found.sort_by_key(|address| (remoteness(&address.gid), address.gid_index));
    found
}

/// IPv4 before routable IPv6 before link-local.
fn remoteness(gid: &[u8; 16]) -> u8 {
    let gid = Ipv6Addr::from(*gid);
    match gid {
        _ if gid.to_ipv4_mapped().is_some() => 0,
        _ if gid.is_unicast_link_local() => 2,
        _ => 1,
    }
}

/// The interface that has this GID's address, with the length of its prefix.
///
/// The interface's index alone does not tell: it is one of the namespace that owns the interface, which in a container
/// need not be ours, where the same index may be some other interface.
fn holder<'i>(entry: &GidEntry, interfaces: &'i [Interface]) -> Option<(&'i Interface, u8)> {
    let ip = Ipv6Addr::from(entry.gid).to_canonical();
    let holds = |interface: &'i Interface| {
        let prefix = interface.addresses.iter().find(|(address, _)| *address == ip)?.1;
        Some((interface, prefix))
    };
    let mut holders = interfaces.iter().filter_map(holds);
    let first = holders.next()?;
    Some(if first.0.index == entry.ifindex {
        first
    } else {
        // A link-local address can be on an interface and on a VLAN over it: the index decides among those.
        holders.find(|(interface, _)| interface.index == entry.ifindex).unwrap_or(first)
    })
}

/// The network interface of a port: the one with its address, else the function's, else the one that the kernel names.
fn netdev(sysfs: &Path, facts: &PortFacts, interfaces: &[Interface], function_netdevs: &[String]) -> Option<String> {
    let mut entries: Vec<&GidEntry> = roce_v2(facts).collect();
    entries.sort_by_key(|entry| (remoteness(&entry.gid), entry.index));
    let by_address =
        || entries.iter().find_map(|entry| holder(entry, interfaces)).map(|(holder, _)| holder.name.clone());
    let by_kernel = || {
        let (index, ifindex) = entries.first().map_or((0, 0), |entry| (entry.index, entry.ifindex));
        let name = sysfs::gid_netdev(sysfs, &facts.device, facts.port, index)?;
        // The name may be another namespace's, and one of ours be called the same.
        let is_another = interfaces.iter().any(|interface| interface.name == name && interface.index != ifindex);
        (!is_another).then_some(name)
    };
    by_address().or_else(|| function_netdevs.first().cloned()).or_else(by_kernel)
}

/// The IPv4 subnet of an address, as (network, prefix length).
pub(super) fn ipv4_subnet(address: &RailAddress) -> Option<(u32, u8)> {
    let prefix = address.prefix.filter(|prefix| *prefix <= 32)?;
    match Ipv6Addr::from(address.gid).to_canonical() {
        IpAddr::V4(ip) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
            Some((ip.to_bits() & mask, prefix))
        }
        IpAddr::V6(_) => None,
    }
}
