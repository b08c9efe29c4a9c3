//! Survey of this host: every port with its interface, GIDs, addresses, PCIe link and cable, and
//! the choice of rails among the ports. [`survey`] takes the ports from verbs and adds facts from
//! sysfs. It returns the rails in order of use, each other port with the reason why it is no rail,
//! and warnings.
//!
//! Rails share two resources: PCIe links and cables. If one were counted twice, the plugin would
//! announce bandwidth that does not exist. Functions in one PCI slot share the slot's **link**.
//! Functions of one adapter that name the same physical port share its **cable**. **Twins** are the
//! two functions of one cable on different links; a DGX Spark needs both to fill a cable. Device
//! names are not used, because they show neither links nor cables.

mod advice;
mod arp;
mod capacity;
mod cuda;
mod from_sysfs;
mod model;
mod pcie;
mod port;
mod qos;
mod report;
mod sysfs;
#[cfg(test)]
mod testbed;
#[cfg(test)]
mod tests;
mod text;

pub use crate::config::NameFilter as HcaFilter;

pub use crate::port::{LinkLayer, PortState};
pub use capacity::{Capacity, Limit};
pub use cuda::{CudaDevice, cuda_devices, gpu_name, gpu_text, host_pointers_reason};
pub use from_sysfs::ports_from_sysfs;
pub use model::{
    Obstacle, PcieLink, PortFacts, Rail, RailAddress, Refused, Survey, Warning, WarningKind,
};
pub use pcie::{LinkRate, PciFunction};
pub use qos::{RailQos, qos_info, qos_warning};
pub use report::{report, wrapped};
pub use text::{gbps, list};

use crate::error::{Error, Result, SettingFault};
use crate::interfaces::Interface;
use arp::Arp;
use port::Port;
use proto::wire::fields::Attachment;
use std::path::Path;

/// Checks that sysfs is readable at `NCCL_SPARK_SYSFS`. Without sysfs, links and cables would be
/// unknown, and the announced rate would be the sum of all ports' speeds.
///
/// # Errors
/// [`Error::Setting`] if it is not readable.
pub fn check_sysfs(sysfs: &Path) -> Result<()> {
    let why = match std::fs::metadata(sysfs) {
        Err(error) => error.to_string(),
        Ok(_) if sysfs.join("class").is_dir() => return Ok(()),
        Ok(_) => "it has no folder `class`".to_owned(),
    };
    let name = "NCCL_SPARK_SYSFS".to_owned();
    let value = sysfs.display().to_string();
    Err(Error::Setting {
        name,
        value,
        fault: SettingFault::Sysfs(why),
    })
}

/// Surveys all ports and chooses the rails. `sysfs` is the mount point of sysfs ("/sys"), and
/// `proc_sys` is the folder of the kernel's settings ("/proc/sys").
pub fn survey(
    sysfs: &Path,
    proc_sys: &Path,
    ports: &[PortFacts],
    interfaces: &[Interface],
    filter: &HcaFilter,
) -> Survey {
    let seen = sorted(
        ports
            .iter()
            .map(|facts| Port::survey(sysfs, facts, interfaces, filter))
            .collect(),
    );
    let mut links = Vec::new();
    let mut cables = Vec::new();
    let mut rails: Vec<Rail> = seen
        .iter()
        .filter(|port| port.is_rail())
        .map(|port| {
            port.rail(
                link_index(&mut links, port, &seen),
                index_of(&mut cables, port.cable()),
            )
        })
        .collect();
    for at in 0..rails.len() {
        let is_twin = |other: &Rail| other.cable == rails[at].cable && other.link != rails[at].link;
        rails[at].twin = rails.iter().position(is_twin);
    }
    let has_twin = |port: &Port| {
        let cable = cables.iter().position(|cable| *cable == port.cable());
        let is_elsewhere =
            |rail: &Rail| rail.pci.as_ref().map(|pci| pci.slot.as_str()) != port.slot();
        rails
            .iter()
            .any(|rail| Some(rail.cable) == cable && is_elsewhere(rail))
    };
    let refused = seen
        .iter()
        .filter_map(|port| port.refused(has_twin(port)))
        .collect();
    let speed_mbps = capacity::capacity(&rails, &links, |rail| rail.speed_mbps).mbps;
    let guid = seen
        .iter()
        .filter(|port| port.is_rail())
        .map(Port::adapter_guid)
        .min()
        .unwrap_or(0);
    let arp = Arp::read(proc_sys, &rails);
    let mut warnings = advice::warnings(&seen, &rails, &links, filter, &arp);
    warnings.extend(arp.warning());
    let late = late_rails(&seen, &rails, &mut links, &mut cables);
    Survey {
        rails,
        refused,
        late,
        links,
        warnings,
        speed_mbps,
        guid,
    }
}

impl Survey {
    /// Returns the payload rate of all rails, after RoCE v2 framing on the cables.
    pub fn payload(&self) -> Capacity {
        capacity::capacity(&self.rails, &self.links, |rail| {
            let mtu = u64::from(rail.path_mtu_bytes);
            let mbps = u64::from(rail.speed_mbps) * mtu / (mtu + capacity::FRAMING_BYTES);
            u32::try_from(mbps).unwrap_or(u32::MAX)
        })
    }

    /// Returns the name of a rail's cable: the port's name ("p0"). If the kernel gives no port
    /// name, or another cable has the same port name, returns the cable's number instead.
    pub fn cable_name(&self, rail: &Rail) -> String {
        let is_shared = |name: &str| {
            let mut others = self.rails.iter().filter(|other| other.cable != rail.cable);
            others.any(|other| other.phys_port.as_deref() == Some(name))
        };
        let name = rail.phys_port.as_deref().filter(|name| !is_shared(name));
        name.map_or_else(|| rail.cable.to_string(), str::to_owned)
    }

    /// Returns a rail's link, cable and speeds in the form that is sent to peers.
    pub fn attachment(&self, rail: &Rail) -> Attachment {
        let link_mbps = self
            .links
            .get(rail.link)
            .and_then(|link| link.payload_mbps)
            .unwrap_or(0);
        Attachment {
            link: rail.link as u8,
            link_mbps,
            cable: rail.cable as u8,
            port_mbps: rail.speed_mbps.max(1),
        }
    }

    /// Returns a rail's rate in Mb/s while the other rails on its PCIe link are equally busy.
    pub fn share_of_link_mbps(&self, rail: &Rail) -> u32 {
        let is_other = |other: &&Rail| (&other.device, other.port) != (&rail.device, rail.port);
        let others = self.rails.iter().filter(is_other);
        let on_link = others.filter(|other| other.link == rail.link);
        let together: u32 = rail.speed_mbps + on_link.map(|other| other.speed_mbps).sum::<u32>();
        match self.links.get(rail.link).and_then(|link| link.payload_mbps) {
            Some(payload) if payload < together => {
                (u64::from(payload) * u64::from(rail.speed_mbps) / u64::from(together.max(1)))
                    as u32
            }
            _ => rail.speed_mbps,
        }
    }
}

/// Returns the ports that may become rails. Their speed is that of a rail on the same cable, or of
/// the fastest rail: a port without a link reports none.
fn late_rails(
    seen: &[Port],
    rails: &[Rail],
    links: &mut Vec<PcieLink>,
    cables: &mut Vec<port::Cable>,
) -> Vec<Rail> {
    let late_rail = |port: &Port| {
        let link = link_index(links, port, seen);
        let cable = index_of(cables, port.cable());
        let on_cable = rails.iter().filter(|rail| rail.cable == cable);
        let speed_mbps = on_cable.map(|rail| rail.speed_mbps).max();
        let fastest = rails.iter().map(|rail| rail.speed_mbps).max();
        let speed_mbps = speed_mbps.or(fastest).unwrap_or(port::ASSUMED_SPEED_MBPS);
        port.late_rail(link, cable, speed_mbps)
    };
    seen.iter()
        .filter(|port| port.may_become_rail())
        .map(late_rail)
        .collect()
}

/// Sorts ports by cable, and the ports of one cable by PCI address, domain first. A cable's place
/// is the place of its lowest PCI address. Ports without PCI are last.
fn sorted(seen: Vec<Port>) -> Vec<Port> {
    let place = |port: &Port| {
        let pci = port.pci.as_ref();
        (
            pci.is_none(),
            pci.map(|pci| {
                (
                    pci.domain,
                    pci.slot.clone(),
                    pci.function,
                    pci.address.clone(),
                )
            }),
        )
    };
    let cable_place = |port: &Port| {
        seen.iter()
            .filter(|other| other.cable() == port.cable())
            .map(place)
            .min()
    };
    let key = |port: &Port| {
        (
            cable_place(port),
            place(port),
            port.facts.device.clone(),
            port.facts.port,
        )
    };
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
        .filter(|other| {
            other.facts.device == port.facts.device
                || (slot.is_some() && other.slot() == slot.as_deref())
        })
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
    known
        .iter()
        .position(|other| *other == value)
        .unwrap_or_else(|| {
            known.push(value);
            known.len() - 1
        })
}
