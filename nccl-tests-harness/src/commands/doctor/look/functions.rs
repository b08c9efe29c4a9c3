//! The RDMA functions, one by one: firmware, PCIe, counters, pause frames.

use super::pcie::{self, Aer};
use crate::commands::doctor::finding::NotSeen;
use crate::commands::doctor::place::Place;
use nccl_net_spark::rails::{PciFunction, Survey};
use std::collections::BTreeMap;
use std::process::Command;

/// An RDMA function.
#[derive(Debug, Clone)]
pub struct Function {
    /// The RDMA device.
    pub device: String,
    /// Whether it is a rail.
    pub is_rail: bool,
    /// Its network interface.
    pub netdev: Option<String>,
    /// Its PCI function, as the survey has it.
    pub pci: Option<PciFunction>,
    /// The NIC's maker, as PCI numbers it.
    pub vendor: Option<String>,
    /// Firmware version.
    pub firmware: Option<String>,
    /// The board.
    pub board: Option<String>,
    /// PCIe errors that it has seen since boot.
    pub aer: Option<Aer>,
    /// What the IOMMU does for it: `DMA`, `DMA-FQ` or `identity`.
    pub iommu: Option<String>,
    /// MTU of the interface in bytes.
    pub mtu_bytes: Option<u32>,
    /// Pause frames; `None` where they could not be asked for.
    pub pause: Option<Pause>,
    /// `counters` and `hw_counters` of the port.
    pub counters: BTreeMap<String, u64>,
}

/// Whether a port sends and takes pause frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pause {
    /// Takes them.
    pub rx: bool,
    /// Sends them.
    pub tx: bool,
}

/// A function of a NIC that could do RDMA and has no RDMA device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unbound {
    /// Its PCI address.
    pub address: String,
    /// The driver that has it, if one has.
    pub driver: Option<String>,
}

/// All functions that the survey lists, rails first.
pub(super) fn functions(place: &Place, survey: &Survey, not_seen: &mut Vec<NotSeen>) -> Vec<Function> {
    let rails = survey.rails.iter().map(|rail| (&rail.device, rail.port, true, &rail.netdev, &rail.pci));
    let others = survey.refused.iter().map(|one| (&one.device, one.port, false, &one.netdev, &one.pci));
    let mut unread = Unread::default();
    let found = rails
        .chain(others)
        .map(|(device, port, is_rail, netdev, pci)| {
            let class = format!("/sys/class/infiniband/{device}");
            let counters = ["counters", "hw_counters"]
                .iter()
                .flat_map(|kind| counters(place, &format!("{class}/ports/{port}/{kind}")));
            let function = Function {
                vendor: place.text(format!("{class}/device/vendor")),
                firmware: place.text(format!("{class}/fw_ver")),
                board: place.text(format!("{class}/board_id")),
                aer: pci.as_ref().and_then(|_| pcie::aer(place, &format!("{class}/device"))),
                iommu: place.text(format!("{class}/device/iommu_group/type")),
                mtu_bytes: netdev.as_ref().and_then(|name| number(place, &format!("/sys/class/net/{name}/mtu"))),
                pause: netdev.as_ref().filter(|_| is_rail).and_then(|name| unread.pause(pause(place, name), name)),
                counters: counters.collect(),
                device: device.clone(),
                is_rail,
                netdev: netdev.clone(),
                pci: pci.clone(),
            };
            unread.note(&function);
            function
        })
        .collect();
    not_seen.extend(unread.into_not_seen());
    found
}

/// Functions with something unreadable, by name.
#[derive(Default)]
struct Unread {
    /// Without a file for the configuration space, as in the software fabric.
    configuration: Vec<String>,
    payload: Vec<String>,
    aer: Vec<String>,
    counters: Vec<String>,
    pause: Vec<(String, String)>,
}

impl Unread {
    fn note(&mut self, function: &Function) {
        if let Some(pci) = &function.pci {
            if pci.max_payload_bytes.is_none() {
                let has_file = pci.path.join("config").exists();
                let names = if has_file { &mut self.payload } else { &mut self.configuration };
                names.push(function.device.clone());
            }
            if function.aer.is_none() {
                self.aer.push(function.device.clone());
            }
        }
        if function.is_rail && function.counters.is_empty() {
            self.counters.push(function.device.clone());
        }
    }

    fn pause(&mut self, answer: Result<Pause, String>, netdev: &str) -> Option<Pause> {
        answer.map_err(|why| self.pause.push((netdev.to_owned(), why))).ok()
    }

    fn into_not_seen(self) -> Vec<NotSeen> {
        let one = |what: &str, of: Vec<String>, why: &str| {
            (!of.is_empty()).then(|| NotSeen { what: format!("{what} of {}", of.join(", ")), why: why.to_owned() })
        };
        let (netdevs, reasons): (Vec<String>, Vec<String>) = self.pause.into_iter().unzip();
        let reason = reasons.first().cloned().unwrap_or_default();
        const SIZES: &str = "PCIe payload and read request size";
        // `pci_read_config` in the kernel's drivers/pci/pci-sysfs.c.
        const PRIVILEGED: &str = "the kernel shows the configuration space with CAP_SYS_ADMIN alone: sudo; in a container --cap-add SYS_ADMIN";
        [
            one(SIZES, self.configuration, "sysfs shows no configuration space"),
            one(SIZES, self.payload, PRIVILEGED),
            one("PCIe error counters", self.aer, "the kernel has no aer_dev_* files for it"),
            one("port counters", self.counters, "sysfs has none"),
            one("pause frames", netdevs, &reason),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

/// Functions of Mellanox NICs that no RDMA device belongs to.
pub(super) fn unbound(place: &Place) -> Vec<Unbound> {
    let folder = "/sys/bus/pci/devices";
    let is_nic = |address: &String| {
        let read = |name: &str| place.text(format!("{folder}/{address}/{name}")).unwrap_or_default();
        // An Ethernet or InfiniBand controller of Mellanox's.
        read("vendor") == "0x15b3" && (read("class").starts_with("0x0200") || read("class").starts_with("0x0207"))
    };
    let names = place.names(folder).into_iter().filter(is_nic);
    names
        .filter(|address| place.names(format!("{folder}/{address}/infiniband")).is_empty())
        .map(|address| {
            let link = std::fs::read_link(place.path(format!("{folder}/{address}/driver"))).ok();
            let driver = link.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
            Unbound { address, driver }
        })
        .collect()
}

fn counters(place: &Place, folder: &str) -> Vec<(String, u64)> {
    let names = place.names(folder).into_iter();
    names.filter_map(|name| Some((name.clone(), place.number(format!("{folder}/{name}"))?))).collect()
}

fn number<T: TryFrom<u64>>(place: &Place, file: &str) -> Option<T> {
    T::try_from(place.number(file)?).ok()
}

/// By `ethtool -a`, or what it said on a copied machine (`answers/ethtool-a/NETDEV`).
fn pause(place: &Place, netdev: &str) -> Result<Pause, String> {
    let text = if place.is_live() {
        let output = ["ethtool", "/usr/sbin/ethtool"]
            .iter()
            .find_map(|program| Command::new(program).args(["-a", netdev]).output().ok());
        let output = output.ok_or("ethtool is not installed")?;
        if !output.status.success() {
            return Err(format!("ethtool -a: {}", String::from_utf8_lossy(&output.stderr).trim()));
        }
        String::from_utf8_lossy(&output.stdout).into_owned()
    } else {
        place.text(format!("/answers/ethtool-a/{netdev}")).ok_or("the copy has no answers/ethtool-a for it")?
    };
    let is_on = |name: &str| {
        let line = text.lines().find_map(|line| line.trim().strip_prefix(name));
        line.map(|value| value.trim() == "on").ok_or_else(|| format!("ethtool -a says nothing of {name}"))
    };
    Ok(Pause { rx: is_on("RX:")?, tx: is_on("TX:")? })
}
