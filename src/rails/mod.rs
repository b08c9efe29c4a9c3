//! What this host has: every port with its interface, GIDs, addresses, PCIe link and cable, and which of them become
//! rails.
//!
//! [`survey`] takes what verbs says of the ports as plain data, adds what sysfs knows, and answers with the rails in the
//! order in which they are to be used, with a reason for each port that is left out, and with warnings for a person.
//!
//! Two things are shared, and counting either twice promises bandwidth that is not there. Functions in one PCI slot
//! share that slot's **link**; functions of one adapter that name the same physical port share its **cable**. The two
//! functions of one cable on different links are **twins**: on a DGX Spark one cable needs both to be filled. Names say
//! nothing about any of this and are not looked at.

mod advice;
mod capacity;
mod cuda;
mod interfaces;
mod pcie;
mod port;
mod report;
mod sysfs;
#[cfg(test)]
mod testbed;
#[cfg(test)]
mod tests;

pub use crate::config::NameFilter as HcaFilter;
pub use capacity::{Capacity, Limit};
pub use cuda::{CudaDevice, cuda_devices, gpu_name, host_pointers_reason};
pub use interfaces::{Interface, interfaces};
pub use pcie::{LinkRate, PciFunction};
pub use report::{folded, report};

use crate::error::{Error, Result};
use crate::verbs::{GidEntry, PortInfo};
use port::Port;
use std::path::Path;

/// What verbs says of one port.
#[derive(Debug, Clone)]
pub struct PortFacts {
    /// The RDMA device's name.
    pub device: String,
    /// The device's node GUID.
    pub guid: u64,
    /// The port's number, from 1.
    pub port: u8,
    /// State, speed and sizes.
    pub info: PortInfo,
    /// The entries of the port's GID table that are in use.
    pub gids: Vec<GidEntry>,
}

/// What a host's ports amount to.
#[derive(Debug, Clone)]
pub struct Survey {
    /// The usable ports, twins side by side: the first n use as many PCIe links as n rails can.
    pub rails: Vec<Rail>,
    /// The other ports, each with the reason.
    pub refused: Vec<Refused>,
    /// The PCIe links under the rails.
    pub links: Vec<PcieLink>,
    /// What a person should know or change, a full sentence each.
    pub warnings: Vec<String>,
    /// What all rails carry at once in one direction, in Mb/s: PCIe payload, capped by the cables' line rate.
    pub speed_mbps: u32,
    /// The lowest system image GUID (or node GUID, where sysfs has none) of the rails; 0 without rails.
    pub guid: u64,
}

/// A port that carries traffic.
#[derive(Debug, Clone)]
pub struct Rail {
    /// The RDMA device's name.
    pub device: String,
    /// The port's number, from 1.
    pub port: u8,
    /// Its network interface; a container may not show it.
    pub netdev: Option<String>,
    /// The physical port's name ("p0"), if its interface has one.
    pub phys_port: Option<String>,
    /// The PCI function; soft-RoCE has none.
    pub pci: Option<PciFunction>,
    /// Its PCIe link: an index in [`Survey::links`]. Rails on one link share it.
    pub link: usize,
    /// Its cable, counted from 0. Rails on one cable share it.
    pub cable: usize,
    /// A rail on the same cable by another PCIe link: an index in [`Survey::rails`].
    pub twin: Option<usize>,
    /// Line rate of the port in Mb/s.
    pub speed_mbps: u32,
    /// Path MTU of the port in bytes, 256 to 4096.
    pub path_mtu_bytes: u32,
    /// MTU of the network interface in bytes, where it can be seen.
    pub netdev_mtu_bytes: Option<u32>,
    /// The largest message of the port in bytes.
    pub max_message_bytes: u32,
    /// Its RoCE v2 addresses, never empty: IPv4 first, then routable IPv6, then link-local.
    pub addresses: Vec<RailAddress>,
}

/// A RoCE v2 address of a rail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RailAddress {
    /// The GID: an IPv6 address, or an IPv4 address mapped into one.
    pub gid: [u8; 16],
    /// Where the GID table had it; it moves when addresses change.
    pub gid_index: u16,
    /// Length of the subnet's prefix in bits, of the IPv4 address where the GID maps one; `None` if no visible interface
    /// has the address.
    pub prefix: Option<u8>,
}

/// A port that is not a rail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The RDMA device's name.
    pub device: String,
    /// The port's number, from 1.
    pub port: u8,
    /// Its network interface, if there is one to be seen.
    pub netdev: Option<String>,
    /// The physical port's name, if its interface has one.
    pub phys_port: Option<String>,
    /// The PCI function, if there is one.
    pub pci: Option<PciFunction>,
    /// Why it is not.
    pub reason: String,
}

/// A PCIe link, and who is on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PcieLink {
    /// `domain:bus:device`; `None` under a device without PCI.
    pub slot: Option<String>,
    /// All surveyed devices on it, rails or not.
    pub devices: Vec<String>,
    /// What it runs at, where sysfs knows.
    pub rate: Option<LinkRate>,
    /// What it carries in payload in Mb/s, one direction; `None`: not known, the ports' speeds alone count.
    pub payload_mbps: Option<u32>,
}

/// Whether sysfs can be read at the place that `NCCL_SPARK_SYSFS` names: without it the rails' links and cables are unknown, and the
/// rate would be the sum of all ports.
///
/// # Errors
/// [`Error::Setting`] when it cannot.
pub fn check_sysfs(sysfs: &str) -> Result<()> {
    let allowed = match std::fs::metadata(sysfs) {
        Err(error) => format!("{error}"),
        Ok(_) if Path::new(sysfs).join("class").is_dir() => return Ok(()),
        Ok(_) => "it has no folder `class`".to_owned(),
    };
    let (name, value) = ("NCCL_SPARK_SYSFS".to_owned(), sysfs.to_owned());
    Err(Error::Setting { name, value, allowed: format!("{allowed}; it must be where sysfs is mounted, usually /sys") })
}

/// Looks at all ports and says which are rails. `sysfs` is where sysfs is mounted ("/sys").
pub fn survey(sysfs: &Path, ports: &[PortFacts], interfaces: &[Interface], filter: &HcaFilter) -> Survey {
    let seen = sorted(ports.iter().map(|facts| Port::look(sysfs, facts, interfaces, filter)).collect());
    let mut links = Vec::new();
    let mut cables = Vec::new();
    let mut rails: Vec<Rail> = seen
        .iter()
        .filter(|port| port.is_rail())
        .map(|port| port.rail(link_index(&mut links, port, &seen), index_of(&mut cables, port.cable())))
        .collect();
    for at in 0..rails.len() {
        let is_twin = |other: &Rail| other.cable == rails[at].cable && other.link != rails[at].link;
        rails[at].twin = rails.iter().position(is_twin);
    }
    let refused = seen.iter().filter_map(Port::refused).collect();
    let speed_mbps = capacity::capacity(&rails, &links, |rail| rail.speed_mbps).mbps;
    let guid = seen.iter().filter(|port| port.is_rail()).map(Port::adapter_guid).min().unwrap_or(0);
    let warnings = advice::warnings(&seen, &rails, &links, filter);
    Survey { rails, refused, links, warnings, speed_mbps, guid }
}

impl Survey {
    /// What the rails carry at once in payload, after the framing of RoCE v2 on the cables.
    pub fn payload(&self) -> Capacity {
        capacity::capacity(&self.rails, &self.links, |rail| {
            let mtu = u64::from(rail.path_mtu_bytes);
            let mbps = u64::from(rail.speed_mbps) * mtu / (mtu + FRAMING_BYTES);
            u32::try_from(mbps).unwrap_or(u32::MAX)
        })
    }
}

/// Around the payload of each RoCE v2 packet: preamble and gap 20, Ethernet 14, IPv4 20, UDP 8, base transport header
/// 12, invariant CRC 4, frame check 4 (IEEE 802.3; InfiniBand Architecture annex A17). The RDMA header of a message's
/// first packet is left out.
const FRAMING_BYTES: u64 = 82;

/// Cable by cable (in the order of their lowest PCI function), within a cable by PCIe domain; those without PCI last.
fn sorted(seen: Vec<Port>) -> Vec<Port> {
    let place = |port: &Port| {
        let pci = port.pci.as_ref();
        (pci.is_none(), pci.map(|pci| (pci.domain, pci.slot.clone(), pci.function, pci.address.clone())))
    };
    let cable_place = |port: &Port| seen.iter().filter(|other| other.cable() == port.cable()).map(place).min();
    let key = |port: &Port| (cable_place(port), place(port), port.facts.device.clone(), port.facts.port);
    let keys: Vec<_> = seen.iter().map(key).collect();
    let mut keyed: Vec<_> = keys.into_iter().zip(seen).collect();
    keyed.sort_by(|(one, _), (other, _)| one.cmp(other));
    keyed.into_iter().map(|(_, port)| port).collect()
}

fn link_index(links: &mut Vec<PcieLink>, port: &Port, seen: &[Port]) -> usize {
    let slot = port.pci.as_ref().map(|pci| pci.slot.clone());
    let is_same = |link: &PcieLink| match &slot {
        Some(_) => link.slot == slot,
        None => link.slot.is_none() && link.devices.contains(&port.facts.device),
    };
    if let Some(at) = links.iter().position(is_same) {
        return at;
    }
    let mut devices: Vec<String> = seen
        .iter()
        .filter(|other| other.facts.device == port.facts.device || (slot.is_some() && other.slot() == slot.as_deref()))
        .map(|other| other.facts.device.clone())
        .collect();
    devices.dedup();
    let pci = port.pci.as_ref();
    links.push(PcieLink {
        devices,
        rate: pci.and_then(|pci| pci.current),
        payload_mbps: pci.and_then(PciFunction::payload_mbps),
        slot,
    });
    links.len() - 1
}

fn index_of<T: PartialEq>(known: &mut Vec<T>, value: T) -> usize {
    known.iter().position(|other| *other == value).unwrap_or_else(|| {
        known.push(value);
        known.len() - 1
    })
}
