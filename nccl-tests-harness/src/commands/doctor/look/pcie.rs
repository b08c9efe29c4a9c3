//! PCIe errors: the counters of functions and of the PCIe ports above them. Also the kernel log's
//! lines about the NIC.

use crate::commands::doctor::finding::NotSeen;
use crate::commands::doctor::place::Place;
use host::nic::{MODULE_ERROR_MARK, NICS, PCIE_ERROR_MARKS};
use host::rails::PciFunction;
use std::fs::OpenOptions;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The kernel's counts of PCIe errors since boot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PcieErrorCounts {
    /// Errors that the link corrected.
    pub correctable: u64,
    /// Uncorrected errors that were not fatal.
    pub nonfatal: u64,
    pub fatal: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PciePort {
    pub address: String,
    /// RDMA devices below the port. Empty if the kernel has removed the NIC.
    pub devices: Vec<String>,
    pub aer: Option<PcieErrorCounts>,
}

pub(super) fn ports<'a>(
    place: &Place,
    functions: impl Iterator<Item = (&'a String, &'a PciFunction)>,
) -> Vec<PciePort> {
    let mut ports: Vec<PciePort> = Vec::new();
    for (device, pci) in functions {
        let above = pci
            .path
            .parent()
            .and_then(Path::file_name)
            .map(|name| name.to_string_lossy().into_owned());
        // In sysfs, the folder above a function's folder is that of the PCIe port above the
        // function. If there is no such port, the folder above is that of the bus, which is not a
        // PCI device.
        let Some(address) = above.filter(|address| place.has(folder(address))) else {
            continue;
        };
        match ports.iter_mut().find(|port| port.address == address) {
            Some(port) => port.devices.push(device.clone()),
            None => ports.push(PciePort {
                aer: aer(place, &folder(&address)),
                address,
                devices: vec![device.clone()],
            }),
        }
    }
    let is_bridge = |address: &str| {
        place
            .text(format!("{}/class", folder(address)))
            .is_some_and(|class| class.starts_with("0x0604"))
    };
    // The counters of the root ports above a Spark's NIC are read even if no device is below them.
    for &address in NICS.iter().flat_map(|nic| nic.root_ports) {
        if ports.iter().all(|port| port.address != address) && is_bridge(address) {
            let aer = root_port_counts(place, &folder(address));
            ports.push(PciePort {
                address: address.to_owned(),
                devices: Vec::new(),
                aer,
            });
        }
    }
    ports
}

pub(super) fn aer(place: &Place, folder: &str) -> Option<PcieErrorCounts> {
    totals(|kind| {
        let short = if kind == "correctable" {
            "COR".to_owned()
        } else {
            kind.to_uppercase()
        };
        let text = place.text(format!("{folder}/aer_dev_{kind}"))?;
        text.lines()
            .find_map(|line| line.strip_prefix(&format!("TOTAL_ERR_{short}")))?
            .trim()
            .parse()
            .ok()
    })
}

/// Reads a root port's counts of the errors that it and the devices below it reported. These counts
/// remain when a device is removed.
fn root_port_counts(place: &Place, folder: &str) -> Option<PcieErrorCounts> {
    totals(|kind| {
        place.number(format!(
            "{folder}/aer_rootport_total_err_{}",
            kind.replace("correctable", "cor")
        ))
    })
}

fn totals(total: impl Fn(&str) -> Option<u64>) -> Option<PcieErrorCounts> {
    Some(PcieErrorCounts {
        correctable: total("correctable")?,
        nonfatal: total("nonfatal")?,
        fatal: total("fatal")?,
    })
}

fn folder(address: &str) -> String {
    format!("/sys/bus/pci/devices/{address}")
}

/// Lines of the kernel log about the NIC's functions and the PCIe ports above them.
#[derive(Debug, Default)]
pub struct KernelLog {
    /// Uncorrected PCIe errors, and their recovery.
    pub pcie: Vec<String>,
    /// Errors of a port's cable or module.
    pub module: Vec<String>,
}

/// Parts of kernel messages about uncorrected errors and recovery, from drivers/pci/pcie (aer.c,
/// err.c). The NIC's driver has others: [`PCIE_ERROR_MARKS`].
const PCIE_MARKS: [&str; 3] = ["Uncorrectable (", "Uncorrected (", "device recovery failed"];

pub(super) fn log(place: &Place, addresses: &[&str], not_seen: &mut Vec<NotSeen>) -> KernelLog {
    if addresses.is_empty() {
        return KernelLog::default();
    }
    let text = kernel_log(place).unwrap_or_else(|error| {
        not_seen.push(NotSeen::new(
            "errors of the NIC in the kernel log",
            format!("/dev/kmsg: {error}"),
        ));
        String::new()
    });
    // A record has priority, number, time and flags, then `;` and the text. Lines that begin with a
    // blank are properties of the record above.
    let texts = text
        .lines()
        .filter(|line| !line.starts_with(' '))
        .filter_map(|line| Some(line.split_once(';')?.1));
    let mut found = KernelLog::default();
    for text in texts.filter(|text| addresses.iter().any(|address| text.contains(address))) {
        if text.contains(MODULE_ERROR_MARK) {
            found.module.push(text.to_owned());
        } else if is_pcie_error(text) {
            found.pcie.push(text.to_owned());
        }
    }
    found
}

fn is_pcie_error(text: &str) -> bool {
    let mut marks = PCIE_MARKS.iter().chain(&PCIE_ERROR_MARKS);
    marks.any(|mark| text.contains(mark))
}

/// Reads the kernel log (dev-kmsg in the kernel's Documentation/ABI/testing).
fn kernel_log(place: &Place) -> io::Result<String> {
    const MOST_BYTES: usize = 16 << 20;
    let mut file = OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_NONBLOCK)
        .open(place.path("/dev/kmsg"))?;
    let mut text = Vec::new();
    let mut record = [0; 8192];
    while text.len() < MOST_BYTES {
        match file.read(&mut record) {
            Ok(0) => break,
            Ok(bytes) => text.extend_from_slice(&record[..bytes]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            // A record was overwritten before it was read. The next read continues after it.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
            Err(error) => return Err(error),
        }
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}
