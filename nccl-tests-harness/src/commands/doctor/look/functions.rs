//! The PCI functions that have an RDMA device, each with its firmware, PCIe facts, counters and
//! pause frames.

use super::pcie::{self, PcieErrorCounts};
use crate::commands::doctor::finding::NotSeen;
use crate::commands::doctor::place::Place;
use host::counters::nic::{self, PortCounters};
use host::nic::PCI_VENDOR;
use host::rails::{PciFunction, Survey};
use std::path::Path;
use std::process::Command;

#[derive(Debug, Clone)]
pub struct Function {
    pub device: String,
    pub is_rail: bool,
    pub netdev: Option<String>,
    pub pci: Option<PciFunction>,
    /// PCI vendor id of the NIC, as in [`PCI_VENDOR`].
    pub vendor: Option<String>,
    pub firmware: Option<String>,
    pub board: Option<String>,
    pub aer: Option<PcieErrorCounts>,
    /// IOMMU mode: `DMA`, `DMA-FQ` or `identity`.
    pub iommu: Option<String>,
    pub mtu_bytes: Option<u32>,
    /// The interface below `netdev`, if `netdev` is a VLAN or the like.
    pub below: Option<Below>,
    /// `None` if ethtool gives no answer, and for a function that is no rail: ethtool is run only
    /// for rails.
    pub pause: Option<Pause>,
    /// The port's counters in sysfs (`counters` and `hw_counters`). For a rail also the discards
    /// and pauses of `ethtool -S`.
    pub counters: PortCounters,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Below {
    pub netdev: String,
    pub mtu_bytes: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pause {
    /// The port obeys pause frames.
    pub rx: bool,
    /// The port sends pause frames.
    pub tx: bool,
}

impl Function {
    pub fn is_mellanox(&self) -> bool {
        self.vendor.as_deref() == Some(PCI_VENDOR)
    }
}

pub(super) fn functions(
    place: &Place,
    sysfs: &Path,
    survey: &Survey,
    not_seen: &mut Vec<NotSeen>,
) -> Vec<Function> {
    let rails = survey
        .rails
        .iter()
        .map(|rail| (&rail.device, rail.port, true, &rail.netdev, &rail.pci));
    let others = survey
        .refused
        .iter()
        .map(|one| (&one.device, one.port, false, &one.netdev, &one.pci));
    let mut without_pause: Vec<(&str, String)> = Vec::new();
    let mut found = Vec::new();
    for (device, port, is_rail, netdev, pci) in rails.chain(others) {
        let class = format!("/sys/class/infiniband/{device}");
        let rail = netdev.as_ref().filter(|_| is_rail);
        found.push(Function {
            vendor: place.text(format!("{class}/device/vendor")),
            firmware: place.text(format!("{class}/fw_ver")),
            board: place.text(format!("{class}/board_id")),
            aer: pci
                .as_ref()
                .and_then(|_| pcie::aer(place, &format!("{class}/device"))),
            iommu: place.text(format!("{class}/device/iommu_group/type")),
            mtu_bytes: netdev
                .as_ref()
                .and_then(|name| number(place, &format!("/sys/class/net/{name}/mtu"))),
            below: netdev.as_ref().and_then(|name| below(place, name)),
            pause: rail.and_then(|name| {
                pause(place, name)
                    .map_err(|why| without_pause.push((name, why)))
                    .ok()
            }),
            counters: nic::read(sysfs, device, port, |_| true)
                .into_iter()
                .chain(
                    rail.map(|name| discards_and_pauses(place, name))
                        .unwrap_or_default(),
                )
                .collect(),
            device: device.clone(),
            is_rail,
            netdev: netdev.clone(),
            pci: pci.clone(),
        });
    }
    not_seen.extend(unread(&found));
    let (netdevs, reasons): (Vec<&str>, Vec<String>) = without_pause.into_iter().unzip();
    not_seen.extend(
        reasons
            .first()
            .map(|why| NotSeen::new(format!("pause frames of {}", netdevs.join(", ")), why)),
    );
    found
}

/// Lists the facts that could not be read, with the functions and the reason.
fn unread(functions: &[Function]) -> Vec<NotSeen> {
    const SIZES: &str = "PCIe payload and read request size";
    // See `pci_read_config` in the kernel's drivers/pci/pci-sysfs.c.
    const PRIVILEGED: &str = "the kernel shows the configuration space with CAP_SYS_ADMIN alone: sudo; in a container --cap-add SYS_ADMIN";
    // The software fabric has no configuration space file.
    let has_space = |one: &Function, has: bool| {
        let unread = one
            .pci
            .as_ref()
            .filter(|pci| pci.max_payload_bytes.is_none());
        unread.is_some_and(|pci| pci.path.join("config").exists() == has)
    };
    type Test<'a> = &'a dyn Fn(&&Function) -> bool;
    let kinds: [(&str, &str, Test); 4] = [
        (SIZES, "sysfs shows no configuration space", &|one| {
            has_space(one, false)
        }),
        (SIZES, PRIVILEGED, &|one| has_space(one, true)),
        (
            "PCIe error counters",
            "the kernel has no aer_dev_* files for it",
            &|one| one.pci.is_some() && one.aer.is_none(),
        ),
        ("port counters", nic::NONE, &|one| {
            one.is_rail && one.counters.is_empty()
        }),
    ];
    let of = |(what, why, is_unread): (&str, &str, Test)| {
        let names: Vec<&str> = functions
            .iter()
            .filter(is_unread)
            .map(|one| one.device.as_str())
            .collect();
        (!names.is_empty()).then(|| NotSeen::new(format!("{what} of {}", names.join(", ")), why))
    };
    kinds.into_iter().filter_map(of).collect()
}

/// Finds Mellanox NICs without an RDMA device. Returns the driver (if any) and PCI address of each.
/// Leaves out members of a bond: in RoCE LAG, one RDMA device serves all of them.
pub(super) fn unbound(place: &Place) -> Vec<(Option<String>, String)> {
    let folder = "/sys/bus/pci/devices";
    let is_nic = |address: &String| {
        let read = |name: &str| {
            place
                .text(format!("{folder}/{address}/{name}"))
                .unwrap_or_default()
        };
        // Class of an Ethernet or InfiniBand controller.
        read("vendor") == PCI_VENDOR
            && (read("class").starts_with("0x0200") || read("class").starts_with("0x0207"))
    };
    let is_in_bond = |address: &String| {
        let netdevs = place.names(format!("{folder}/{address}/net"));
        let mut masters = netdevs
            .iter()
            .map(|netdev| format!("/sys/class/net/{netdev}/master"));
        masters.any(|master| place.has(format!("{master}/bonding")))
    };
    let names = place.names(folder).into_iter().filter(is_nic);
    names
        .filter(|address| !is_in_bond(address))
        .filter(|address| {
            place
                .names(format!("{folder}/{address}/infiniband"))
                .is_empty()
        })
        .map(|address| {
            let link = std::fs::read_link(place.path(format!("{folder}/{address}/driver"))).ok();
            let driver =
                link.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
            (driver, address)
        })
        .collect()
}

/// Finds the interface below another one. A bond has several interfaces below it, and sets their
/// MTU itself.
fn below(place: &Place, netdev: &str) -> Option<Below> {
    let names = place.names(format!("/sys/class/net/{netdev}"));
    let mut lower = names.iter().filter_map(|name| name.strip_prefix("lower_"));
    let (only, None) = (lower.next()?, lower.next()) else {
        return None;
    };
    Some(Below {
        netdev: only.to_owned(),
        mtu_bytes: number(place, &format!("/sys/class/net/{only}/mtu")),
    })
}

/// Returns true if PCI has a Mellanox device, and `None` if sysfs shows no PCI device at all.
pub(super) fn has_nic(place: &Place) -> Option<bool> {
    let folder = "/sys/bus/pci/devices";
    let addresses = place.names(folder);
    let is_nic = |address: &String| {
        let vendor = place.text(format!("{folder}/{address}/vendor"));
        vendor.as_deref() == Some(PCI_VENDOR)
    };
    (!addresses.is_empty()).then(|| addresses.iter().any(is_nic))
}

fn number<T: TryFrom<u64>>(place: &Place, file: &str) -> Option<T> {
    T::try_from(place.number(file)?).ok()
}

/// Runs ethtool. If `place` is a copy of another machine's files, reads ethtool's output from the
/// copy: for the option `-a`, from `answers/ethtool-a/NETDEV`.
fn ethtool(place: &Place, option: &str, netdev: &str) -> Result<String, String> {
    if !place.is_live() {
        let text = place.text(format!("/answers/ethtool{option}/{netdev}"));
        return text.ok_or_else(|| format!("the copy has no answers/ethtool{option} for it"));
    }
    let output = ["ethtool", "/usr/sbin/ethtool"]
        .iter()
        .find_map(|program| Command::new(program).args([option, netdev]).output().ok());
    let output = output.ok_or("ethtool is not installed")?;
    if !output.status.success() {
        return Err(format!(
            "ethtool {option}: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        ));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Reads the counts of discarded packets and pause frames, which sysfs lacks. Empty if ethtool
/// fails. `pause` also runs ethtool, and its error is reported.
fn discards_and_pauses(place: &Place, netdev: &str) -> PortCounters {
    let text = ethtool(place, "-S", netdev).unwrap_or_default();
    let lines = text.lines().filter_map(|line| line.trim().split_once(": "));
    let wanted = lines.filter(|(name, _)| name.contains("discard") || name.contains("pause"));
    wanted
        .filter_map(|(name, value)| Some((name.to_owned(), value.trim().parse().ok()?)))
        .collect()
}

fn pause(place: &Place, netdev: &str) -> Result<Pause, String> {
    let text = ethtool(place, "-a", netdev)?;
    let is_on = |name: &str| {
        let line = text.lines().find_map(|line| line.trim().strip_prefix(name));
        line.map(|value| value.trim() == "on")
            .ok_or_else(|| format!("ethtool -a says nothing of {name}"))
    };
    Ok(Pause {
        rx: is_on("RX:")?,
        tx: is_on("TX:")?,
    })
}
