//! One port: its attributes from verbs and sysfs, and the decision to use it as a rail.

use super::{HcaFilter, Obstacle, PciFunction, PortFacts, Rail, RailAddress, Refused, sysfs};
use crate::interfaces::{GidOwner, Interface, TableEntry, gid_netdev, gid_owner};
use crate::port::{GidEntry, GidKind, LinkLayer, PortState};
use proto::wire::fields::preference_rank;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

#[derive(Debug, Clone)]
pub(super) struct Port<'a> {
    pub(super) facts: &'a PortFacts,
    pub(super) netdev: Option<String>,
    pub(super) phys_port: Option<String>,
    pub(super) pci: Option<PciFunction>,
    pub(super) addresses: Vec<RailAddress>,
    /// Obstacle other than the filter `NCCL_IB_HCA`.
    pub(super) obstacle: Option<Obstacle>,
    pub(super) is_admitted: bool,
    pub(super) is_in_sysfs: bool,
    /// True if the interface is a bond: all its ports are one RDMA device (RoCE LAG).
    pub(super) is_bond: bool,
    /// Line rate in Mb/s; `None` if neither verbs nor sysfs has it.
    pub(super) speed_mbps: Option<u32>,
    netdev_mtu_bytes: Option<u32>,
    has_carrier: bool,
    system_image_guid: Option<u64>,
}

/// Identity of a cable: the adapter's GUID with the name of its physical port. For a device without
/// PCI, the cable belongs to the RDMA port alone.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Cable {
    Port { adapter: Option<u64>, port: String },
    Own { device: String, port: u8 },
}

impl<'a> Port<'a> {
    pub(super) fn survey(
        sysfs: &Path,
        facts: &'a PortFacts,
        interfaces: &[Interface],
        filter: &HcaFilter,
    ) -> Self {
        let device = facts.device.as_str();
        let port = facts.port;
        let function_netdevs = sysfs::function_netdevs(sysfs, device, port);
        let owned: Vec<OwnedGid> = roce_v2(facts)
            .map(|entry| (entry, owner_of(sysfs, facts, entry, interfaces)))
            .collect();
        let netdev = netdev(sysfs, facts, interfaces, &owned, &function_netdevs);
        let named = netdev.iter().chain(&function_netdevs);
        let mut phys_ports = named.filter_map(|name| sysfs::phys_port_name(sysfs, name));
        let is_seen = |name: &&String| interfaces.iter().any(|interface| interface.name == **name);
        let seen = netdev.as_ref().filter(is_seen);
        let is_bond = netdev
            .as_ref()
            .is_some_and(|name| sysfs::is_bond(sysfs, name));
        let interface = interfaces
            .iter()
            .find(|interface| Some(&interface.name) == netdev.as_ref());
        let is_iwarp = sysfs::is_iwarp(sysfs, device);
        Self {
            // The ports of a bond have several names.
            phys_port: phys_ports.next().filter(|_| !is_bond),
            pci: sysfs::pci_function(sysfs, device),
            addresses: addresses(&owned),
            obstacle: if is_iwarp {
                Some(Obstacle::Iwarp)
            } else {
                obstacle(facts, &owned, interface, netdev.is_some())
            },
            is_admitted: filter.admits(device, Some(port)),
            is_in_sysfs: sysfs::has_device(sysfs, device),
            is_bond,
            netdev_mtu_bytes: seen
                .and_then(|name| sysfs::netdev_mtu(sysfs, name))
                .filter(|mtu| *mtu > 0),
            speed_mbps: Some(facts.info.speed_mbps)
                .filter(|mbps| *mbps > 0)
                .or_else(|| sysfs::netdev_speed_mbps(sysfs, netdev.as_ref()?)),
            system_image_guid: sysfs::system_image_guid(sysfs, device),
            has_carrier: netdev
                .as_ref()
                .is_some_and(|name| sysfs::has_carrier(sysfs, name)),
            netdev,
            facts,
        }
    }

    pub(super) fn is_rail(&self) -> bool {
        self.is_admitted && self.obstacle.is_none()
    }

    /// Returns the cable in the physical port. Virtual functions and interfaces in other namespaces
    /// show no port name. The name is then made from the physical function's number, because in
    /// each PCI slot of these adapters the function's number is the port's number.
    pub(super) fn cable(&self) -> Cable {
        let by_function = || {
            let function = self.pci.as_ref()?.function;
            Some(if self.facts.port == 1 {
                format!("p{function}")
            } else {
                format!("p{function}.{}", self.facts.port)
            })
        };
        match self.phys_port.clone().or_else(by_function) {
            // Cables of adapters without a GUID are told apart only by the port's name.
            Some(port) if self.pci.is_some() && !self.is_bond => Cable::Port {
                adapter: self.system_image_guid,
                port,
            },
            _ => Cable::Own {
                device: self.facts.device.clone(),
                port: self.facts.port,
            },
        }
    }

    pub(super) fn slot(&self) -> Option<&str> {
        self.pci.as_ref().map(|pci| pci.slot.as_str())
    }

    /// Returns the adapter's system image GUID, or the device's node GUID if the former is unknown.
    pub(super) fn adapter_guid(&self) -> u64 {
        self.system_image_guid.unwrap_or(self.facts.guid)
    }

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

    /// Returns true if the port has a valid MTU, and only lacks a link or an address. A virtual
    /// function never counts: a host may have many that nobody will use.
    pub(super) fn may_become_rail(&self) -> bool {
        let is_virtual = self.pci.as_ref().is_some_and(|pci| pci.is_virtual);
        let has_mtu = self.facts.info.active_mtu_bytes > 0;
        self.is_admitted && has_mtu && !is_virtual && self.obstacle.as_ref().is_some_and(can_pass)
    }

    /// Returns the port as the rail that it will be, at the speed of the other rails.
    pub(super) fn late_rail(&self, link: usize, cable: usize, speed_mbps: u32) -> Rail {
        Rail {
            speed_mbps,
            addresses: vec![self.placeholder()],
            ..self.rail(link, cable)
        }
    }

    /// Returns the link-local address that the kernel makes of an identifier, here of the device's
    /// GUID. Nothing is sent to it: the port's addresses are read when it is used.
    fn placeholder(&self) -> RailAddress {
        let mut gid = [0; 16];
        gid[..2].copy_from_slice(&[0xfe, 0x80]);
        gid[8..].copy_from_slice(&self.facts.guid.to_be_bytes());
        RailAddress {
            gid,
            gid_index: 0,
            prefix: None,
        }
    }

    /// Returns the port with its obstacle, or `None` for a rail. `has_twin` is true if
    /// a rail uses the same cable and another PCIe link.
    pub(super) fn refused(&self, has_twin: bool) -> Option<Refused> {
        let obstacle = if self.is_admitted {
            self.obstacle.clone()?
        } else {
            Obstacle::Excluded
        };
        let is_coming = self.has_carrier
            || matches!(obstacle, Obstacle::State(state) if state != PortState::Down);
        let is_late = can_pass(&obstacle) && has_twin && is_coming;
        Some(Refused {
            device: self.facts.device.clone(),
            port: self.facts.port,
            netdev: self.netdev.clone(),
            phys_port: self.phys_port.clone(),
            pci: self.pci.clone(),
            speed_mbps: self.speed_mbps,
            obstacle,
            is_late,
        })
    }
}

/// Speed that NCCL's socket transport assumes for an interface that reports none.
pub(super) const ASSUMED_SPEED_MBPS: u32 = 10_000;

/// Returns true if an obstacle passes once a cable is plugged in or an address is set.
fn can_pass(obstacle: &Obstacle) -> bool {
    obstacle.is_link() || matches!(obstacle, Obstacle::NoGid | Obstacle::NoAddress(_))
}

type OwnedGid<'a> = (&'a GidEntry, GidOwner<'a>);

fn obstacle(
    facts: &PortFacts,
    owned: &[OwnedGid],
    interface: Option<&Interface>,
    has_netdev: bool,
) -> Option<Obstacle> {
    if facts.info.link_layer != LinkLayer::Ethernet {
        return Some(Obstacle::LinkLayer(facts.info.link_layer));
    }
    if facts.info.state != PortState::Active {
        let without_carrier = interface.filter(|one| one.is_up && !one.is_running);
        return Some(match without_carrier {
            Some(one) if facts.info.state == PortState::Down => {
                Obstacle::NoCarrier(one.name.clone())
            }
            _ => Obstacle::State(facts.info.state),
        });
    }
    let without_gid = match interface.filter(|one| !one.addresses.is_empty()) {
        Some(one) if has_roce_v1(facts) => Obstacle::RoceV1(one.name.clone()),
        Some(one) => Obstacle::NoRoce(one.name.clone()),
        None if has_netdev => Obstacle::NoGid,
        None => Obstacle::NoInterface,
    };
    // One entry with a usable address is enough for a rail. Otherwise the last entry gives the
    // reason; without any entry, the reason is `without_gid`.
    owned
        .iter()
        .try_fold(without_gid, |_, (_, owner)| match owner {
            GidOwner::Missing(interface) => Some(Obstacle::NoAddress(interface.name.clone())),
            GidOwner::Found { .. } | GidOwner::Elsewhere => None,
        })
}

fn roce_v2(facts: &PortFacts) -> impl Iterator<Item = &GidEntry> {
    facts
        .gids
        .iter()
        .filter(|entry| entry.kind == GidKind::RoceV2 && entry.gid != [0; 16])
}

fn has_roce_v1(facts: &PortFacts) -> bool {
    let mut gids = facts.gids.iter();
    gids.any(|entry| entry.kind == GidKind::RoceV1 && entry.gid != [0; 16])
}

fn owner_of<'a>(
    sysfs: &Path,
    facts: &PortFacts,
    entry: &GidEntry,
    interfaces: &'a [Interface],
) -> GidOwner<'a> {
    let GidEntry {
        index,
        gid,
        ifindex,
        ..
    } = *entry;
    gid_owner(
        sysfs,
        TableEntry {
            device: &facts.device,
            port: facts.port,
            index,
            gid,
            ifindex,
        },
        interfaces,
    )
}

fn addresses(owned: &[OwnedGid]) -> Vec<RailAddress> {
    let address = |(entry, owner): &OwnedGid| {
        let prefix = match owner {
            GidOwner::Found { prefix, .. } => *prefix,
            GidOwner::Elsewhere => None,
            GidOwner::Missing(_) => return None,
        };
        Some(RailAddress {
            gid: entry.gid,
            gid_index: entry.index,
            prefix,
        })
    };
    let mut found: Vec<RailAddress> = owned.iter().filter_map(address).collect();
    found.sort_by_key(|address| (preference_rank(&address.gid), address.gid_index));
    found
}

/// Returns the port's interface, from the first source that has one: the most preferred GID whose
/// interface is visible, then the first interface of the PCI function, then the interface that the
/// kernel names for the most preferred GID.
fn netdev(
    sysfs: &Path,
    facts: &PortFacts,
    interfaces: &[Interface],
    owned: &[OwnedGid],
    function_netdevs: &[String],
) -> Option<String> {
    let mut entries = owned.to_vec();
    entries.sort_by_key(|(entry, _)| (preference_rank(&entry.gid), entry.index));
    let by_address = || {
        entries.iter().find_map(|(_, owner)| match owner {
            GidOwner::Found { interface, .. } | GidOwner::Missing(interface) => {
                Some(interface.name.clone())
            }
            GidOwner::Elsewhere => None,
        })
    };
    let by_kernel = || {
        let (index, ifindex) = entries
            .first()
            .map_or((0, 0), |(entry, _)| (entry.index, entry.ifindex));
        let name = gid_netdev(sysfs, &facts.device, facts.port, index)?;
        // The name may belong to another namespace, and an interface here may have the same name.
        let is_another = interfaces
            .iter()
            .any(|interface| interface.name == name && interface.index != ifindex);
        (!is_another).then_some(name)
    };
    by_address()
        .or_else(|| function_netdevs.first().cloned())
        .or_else(by_kernel)
}

/// Returns the IPv4 subnet of an address: the network address, and the prefix length in bits.
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
