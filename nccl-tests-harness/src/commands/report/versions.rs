//! Which versions of what this machine has. What NCCL it has, the doctor says.

use crate::commands::doctor::place::Place;
use crate::places;
use sha2::{Digest, Sha256};
use std::path::Path;

/// A line for each; what is not there is said so.
pub(super) fn text(place: &Place, program: &Path) -> String {
    let driver = || place.text("/proc/driver/nvidia/version").and_then(|text| text.lines().next().map(str::to_owned));
    let lines = [
        ("nccl-spark", Some(env!("PROGRAM_VERSION").to_owned())),
        ("plugin", Some(plugin(program))),
        ("machine", two(place, "sys_vendor", "product_name")),
        ("BIOS", two(place, "bios_version", "bios_date")),
        ("kernel", place.text("/proc/sys/kernel/osrelease")),
        ("kernel's command line, in part", kernel_options(place)),
        ("OS", of_file(place, "/etc/os-release", &["PRETTY_NAME"])),
        ("DGX OS", of_file(place, "/etc/dgx-release", &["DGX_PRETTY_NAME", "DGX_SWBUILD_VERSION", "DGX_OTA_VERSION"])),
        ("NVIDIA driver", driver().or_else(|| place.text("/sys/module/nvidia/version"))),
        ("mlx5 driver", place.text("/sys/module/mlx5_core/version")),
        ("RDMA firmware", firmware(place)),
        ("NCCL", Some("see the doctor's part".to_owned())),
    ];
    lines.iter().map(|(name, value)| format!("{name}: {}\n", value.as_deref().unwrap_or("not found"))).collect()
}

/// What bears on PCIe, memory and processors. The rest may name disks, hosts and passwords.
fn kernel_options(place: &Place) -> Option<String> {
    let starts =
        ["iommu", "arm-smmu", "kho=", "cma=", "pci", "hugepages", "default_hugepagesz=", "isolcpus=", "nohz", "mem"];
    let text = place.text("/proc/cmdline")?;
    let words: Vec<&str> =
        text.split_whitespace().filter(|word| starts.iter().any(|start| word.starts_with(start))).collect();
    Some(if words.is_empty() { "nothing of interest".to_owned() } else { words.join(" ") })
}

fn two(place: &Place, first: &str, second: &str) -> Option<String> {
    let read = |name: &str| place.text(format!("/sys/class/dmi/id/{name}"));
    let both: Vec<String> = [first, second].into_iter().filter_map(read).collect();
    (!both.is_empty()).then(|| both.join(", "))
}

/// Values of a file of shell variables. Only those that are named: others are serial numbers.
fn of_file(place: &Place, path: &str, names: &[&str]) -> Option<String> {
    let text = place.text(path)?;
    let value = |name: &&str| {
        let mut values = text.lines().filter_map(|line| line.strip_prefix(*name)?.strip_prefix('='));
        values.next_back().map(|value| value.trim_matches('"').to_owned())
    };
    let values: Vec<String> = names.iter().filter_map(value).collect();
    (!values.is_empty()).then(|| values.join(", "))
}

fn firmware(place: &Place) -> Option<String> {
    let devices = place.names("/sys/class/infiniband");
    let of =
        |device: &String| Some(format!("{device} {}", place.text(format!("/sys/class/infiniband/{device}/fw_ver"))?));
    let all: Vec<String> = devices.iter().filter_map(of).collect();
    (!all.is_empty()).then(|| all.join(", "))
}

fn plugin(program: &Path) -> String {
    let Some(path) = places::plugin(program) else { return "none beside this program".to_owned() };
    match std::fs::read(&path) {
        Ok(bytes) => {
            let digest: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
            format!("{}, {} bytes, SHA-256 {digest}", path.display(), bytes.len())
        }
        Err(error) => format!("{}: {error}", path.display()),
    }
}
