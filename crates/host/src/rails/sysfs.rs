//! Facts about an RDMA device from sysfs, all optional: a container hides parts of the tree, and
//! soft-RoCE has no PCI.

use super::pcie::{self, LinkRate, PciFunction};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

pub(super) fn has_device(sysfs: &Path, device: &str) -> bool {
    rdma_device(sysfs, device).exists()
}

/// Returns the system image GUID, which all functions of an adapter share. A DGX Spark's four
/// functions have one system image GUID, and each has its own node GUID (`ibstat` in
/// geerlingguy/sbc-reviews#92).
pub(super) fn system_image_guid(sysfs: &Path, device: &str) -> Option<u64> {
    let text = read(&rdma_device(sysfs, device).join("sys_image_guid"))?;
    u64::from_str_radix(&text.replace(':', ""), 16)
        .ok()
        .filter(|guid| *guid != 0)
}

/// Returns a device's PCI function. `None` for soft-RoCE, or if sysfs does not show the function.
pub(super) fn pci_function(sysfs: &Path, device: &str) -> Option<PciFunction> {
    let parent = fs::canonicalize(rdma_device(sysfs, device).join("device")).ok()?;
    // A scalable function is an auxiliary device below its PCI function.
    let path = parent
        .ancestors()
        .find(|folder| pci_address(folder).is_some())?
        .to_path_buf();
    let address = pci_address(&path)?.to_owned();
    let (domain, own_slot, own_function) = pcie::parse_address(&address)?;
    let physical = fs::canonicalize(path.join("physfn")).ok();
    // A virtual function's own link registers read as zero (SR-IOV specification), so its physical
    // function's registers are read.
    let link_folder = physical.as_deref().unwrap_or(&path);
    let (slot, function) = match pci_address(link_folder).and_then(pcie::parse_address) {
        Some((_, slot, function)) => (slot.to_owned(), function),
        None => (own_slot.to_owned(), own_function),
    };
    let sizes = pcie::transaction_sizes(&read_start(&link_folder.join("config")));
    Some(PciFunction {
        domain,
        slot,
        function,
        is_virtual: physical.is_some(),
        current: link_rate(link_folder, "current"),
        max: link_rate(link_folder, "max"),
        max_payload_bytes: sizes.and_then(|sizes| sizes.payload_bytes),
        max_read_request_bytes: sizes.and_then(|sizes| sizes.read_request_bytes),
        address,
        path,
    })
}

/// Returns the names of the interfaces of a device's PCI function that are visible in this network
/// namespace. They are sorted, but the interface of `port` comes first if sysfs has its port number
/// (`dev_port`, counted from 0).
pub(super) fn function_netdevs(sysfs: &Path, device: &str, port: u8) -> Vec<String> {
    let folder = rdma_device(sysfs, device).join("device/net");
    let mut names = names(&folder);
    let is_other_port = |name: &String| {
        let dev_port: Option<u8> =
            read(&folder.join(name).join("dev_port")).and_then(|text| text.parse().ok());
        dev_port.and_then(|n| n.checked_add(1)) != Some(port)
    };
    names.sort_by_cached_key(|name| (is_other_port(name), name.clone()));
    names
}

/// Returns the physical port's name ("p0"); virtual functions and VLANs have none.
pub(super) fn phys_port_name(sysfs: &Path, netdev: &str) -> Option<String> {
    read(&sysfs.join("class/net").join(netdev).join("phys_port_name"))
}

pub(super) fn netdev_mtu(sysfs: &Path, netdev: &str) -> Option<u32> {
    read(&sysfs.join("class/net").join(netdev).join("mtu"))?
        .parse()
        .ok()
}

/// Returns true if an interface is a bond of several others.
pub(super) fn is_bond(sysfs: &Path, netdev: &str) -> bool {
    let folder = sysfs.join("class/net").join(netdev).join("bonding");
    folder.is_dir()
}

/// Returns true if a device speaks iWARP: the kernel calls its node type `4: RNIC`
/// (`node_type_show` in drivers/infiniband/core/sysfs.c).
pub(super) fn is_iwarp(sysfs: &Path, device: &str) -> bool {
    read(&rdma_device(sysfs, device).join("node_type")).is_some_and(|kind| kind.starts_with("4:"))
}

/// Returns true if an interface is up and has a carrier. The kernel gives none for an interface
/// that is down.
pub(super) fn has_carrier(sysfs: &Path, netdev: &str) -> bool {
    read(&sysfs.join("class/net").join(netdev).join("carrier"))
        .is_some_and(|carrier| carrier == "1")
}

/// Returns the speed of an interface, if known. Virtual interfaces report -1, or nothing.
pub(super) fn netdev_speed_mbps(sysfs: &Path, netdev: &str) -> Option<u32> {
    read(&sysfs.join("class/net").join(netdev).join("speed"))?
        .parse()
        .ok()
        .filter(|mbps| *mbps > 0)
}

fn rdma_device(sysfs: &Path, device: &str) -> PathBuf {
    sysfs.join("class/infiniband").join(device)
}

fn pci_address(folder: &Path) -> Option<&str> {
    folder
        .file_name()?
        .to_str()
        .filter(|name| pcie::parse_address(name).is_some())
}

fn link_rate(folder: &Path, which: &str) -> Option<LinkRate> {
    let width = read(&folder.join(format!("{which}_link_width")))?;
    let speed = read(&folder.join(format!("{which}_link_speed")))?;
    pcie::parse_link_rate(&width, &speed)
}

/// Returns the names of a folder's entries, sorted; none if the folder cannot be read.
pub(super) fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

/// Returns a file's text without surrounding spaces; `None` if it is empty or cannot be read.
pub(super) fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path)
        .ok()
        .map(|text| text.trim().to_owned())
        .filter(|text| !text.is_empty())
}

/// Reads at most 256 bytes, the conventional configuration space.
fn read_start(path: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    match fs::File::open(path).and_then(|file| file.take(256).read_to_end(&mut bytes)) {
        Ok(_) => bytes,
        Err(_) => Vec::new(),
    }
}
