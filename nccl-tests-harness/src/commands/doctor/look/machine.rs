//! Firmware, kernel, memory, limits, device files and processors of the machine.

use crate::commands::doctor::finding::NotSeen;
use crate::commands::doctor::place::Place;
use crate::proc_stat;
use host::nic::{CORE_MODULE, RDMA_MODULE};
use host::rails::CudaDevice;
use std::fs;
use std::io;
use std::path::Path;

#[derive(Debug, Default)]
pub struct Machine {
    /// The container's engine, recognised by its marker file.
    pub container: Option<&'static str>,
    pub product: Option<String>,
    pub bios: Option<String>,
    pub kernel: Option<String>,
    /// Sizes of the contiguous memory area (CMA) in KiB: total and free.
    pub cma_kib: Option<(u64, u64)>,
    /// Limit of locked memory in bytes. `u64::MAX` if there is no limit, or if CAP_IPC_LOCK lifts
    /// the limit.
    pub memlock_bytes: Option<u64>,
    /// True if the process may raise its limit of locked memory by itself: the hard limit is
    /// infinite.
    pub may_raise_memlock: bool,
    /// The systemd service that started the process, if any: slurmd for a job of Slurm. A login and
    /// its user manager do not count.
    pub service: Option<String>,
    /// Memory that all processes have pinned now for devices.
    pub pinned_bytes: u64,
    /// Number of processes that ask the kernel for a CPU wake-up latency now, as far as this user
    /// may see their open files.
    pub cpu_latency_requests: usize,
    pub device_files: Vec<DeviceFile>,
    pub has_dev_infiniband: bool,
    pub modules: Vec<String>,
    /// Files that make the system load nvidia-peermem at boot.
    pub peermem_files: Vec<String>,
    /// True if the marker file of DGX OS's hotplug handler exists.
    pub has_hotplug_marker: bool,
    pub hotplug_state: Option<String>,
    pub cpus: Cpus,
}

#[derive(Debug)]
pub struct DeviceFile {
    pub device: String,
    pub file: String,
    pub error: Option<io::Error>,
}

#[derive(Debug, Clone, Default)]
pub struct Cpus {
    pub allowed: Vec<u32>,
    /// The number and the capacity (`cpu_capacity` in sysfs) of each processor. Empty if the kernel
    /// does not report capacities.
    pub capacities: Vec<(u32, u64)>,
    /// The idle states, as the first allowed processor has them.
    pub idle: Vec<IdleState>,
}

impl Cpus {
    /// Returns the deepest idle state that the allowed processors enter.
    pub fn deepest_idle(&self) -> Option<&IdleState> {
        self.idle
            .iter()
            .filter(|state| state.is_enabled && state.entries != Some(0))
            .max_by_key(|state| state.latency_us)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdleState {
    pub name: String,
    pub latency_us: u64,
    pub is_enabled: bool,
    /// How often the allowed processors have entered the state since the boot, if the kernel counts
    /// it.
    pub entries: Option<u64>,
}

pub(super) fn machine(place: &Place, pid: Option<u32>, not_seen: &mut Vec<NotSeen>) -> Machine {
    let process = pid.map_or("/proc/self".to_owned(), |pid| format!("/proc/{pid}"));
    let dmi = |name: &str| place.text(format!("/sys/class/dmi/id/{name}"));
    let two = |one: &str, other: &str| {
        Some(
            [dmi(one), dmi(other)]
                .into_iter()
                .flatten()
                .collect::<Vec<_>>()
                .join(" "),
        )
    };
    let product = two("sys_vendor", "product_name");
    let bios = two("bios_version", "bios_date");
    let filled = |text: Option<String>| text.filter(|text| !text.is_empty());
    let modules = place.text("/proc/modules").unwrap_or_default();
    let of_interest = |name: &&str| {
        [
            "nvidia_peermem",
            RDMA_MODULE,
            CORE_MODULE,
            "rdma_rxe",
            "ib_uverbs",
        ]
        .contains(name)
    };
    let machine = Machine {
        container: container(place),
        product: filled(product),
        bios: filled(bios),
        kernel: place.text("/proc/sys/kernel/osrelease"),
        cma_kib: cma_kib(place),
        memlock_bytes: memlock_bytes(place, &process),
        may_raise_memlock: memlock_limits(place, &process)
            .is_some_and(|limits| limits.hard == "unlimited"),
        service: service(place, &process),
        pinned_bytes: pinned_bytes(place),
        cpu_latency_requests: cpu_latency_requests(place),
        device_files: device_files(place),
        has_dev_infiniband: place.has("/dev/infiniband"),
        modules: modules
            .lines()
            .filter_map(|line| line.split(' ').next())
            .filter(of_interest)
            .map(str::to_owned)
            .collect(),
        peermem_files: peermem_files(place),
        has_hotplug_marker: place.has("/etc/nvidia/cx7-hotplug-enabled"),
        hotplug_state: place.text("/sys/devices/platform/MTKP0001:00/pcie_hotplug/hotplug_enabled"),
        cpus: cpus(place, &process),
    };
    not_seen.extend(unread(&machine, &process));
    machine
}

/// Lists the facts that could not be read. `process` is the folder of the process in `/proc`.
fn unread(machine: &Machine, process: &str) -> Vec<NotSeen> {
    let kinds = [
        (
            machine.memlock_bytes.is_none(),
            "the limit of locked memory",
            format!("{process}/limits cannot be read"),
        ),
        (
            machine.cpus.allowed.is_empty(),
            "the allowed processors",
            format!("{process}/status cannot be read"),
        ),
        (
            machine.bios.is_none(),
            "the BIOS version",
            "/sys/class/dmi/id has none".to_owned(),
        ),
        (
            machine.cpus.idle.is_empty(),
            "idle states of the processors",
            "the kernel has no cpuidle driver, or hides it".to_owned(),
        ),
    ];
    let missing = kinds.into_iter().filter(|(is_missing, ..)| *is_missing);
    missing
        .map(|(_, what, why)| NotSeen::new(what, why))
        .collect()
}

fn container(place: &Place) -> Option<&'static str> {
    let marks = [
        ("/.dockerenv", "docker"),
        ("/run/.containerenv", "podman"),
        ("/run/secrets/kubernetes.io", "kubernetes"),
    ];
    marks
        .into_iter()
        .find(|(mark, _)| place.has(mark))
        .map(|(_, name)| name)
}

fn cma_kib(place: &Place) -> Option<(u64, u64)> {
    let text = place.text("/proc/meminfo")?;
    let value = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse().ok()
    };
    Some((value("CmaTotal:")?, value("CmaFree:")?))
}

/// Reads the soft limit of locked memory. CAP_IPC_LOCK lifts this limit (`ib_umem_get` in the
/// kernel's drivers/infiniband/core/umem.c).
fn memlock_bytes(place: &Place, process: &str) -> Option<u64> {
    const CAP_IPC_LOCK: u64 = 1 << 14;
    let status = place.text(format!("{process}/status")).unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective
        .and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok())
        .unwrap_or(0);
    if effective & CAP_IPC_LOCK != 0 {
        return Some(u64::MAX);
    }
    match memlock_limits(place, process)?.soft.as_str() {
        "unlimited" => Some(u64::MAX),
        bytes => bytes.parse().ok(),
    }
}

struct Limits {
    soft: String,
    hard: String,
}

fn memlock_limits(place: &Place, process: &str) -> Option<Limits> {
    let text = place.text(format!("{process}/limits"))?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("Max locked memory"))?;
    let mut words = line.split_whitespace().map(str::to_owned);
    Some(Limits {
        soft: words.next()?,
        hard: words.next()?,
    })
}

/// Reads the systemd service of a process from its control group. Slurm moves the processes of jobs
/// into a scope of its own, `slurmstepd.scope`.
fn service(place: &Place, process: &str) -> Option<String> {
    let text = place.text(format!("{process}/cgroup"))?;
    let path = text.lines().find_map(|line| line.strip_prefix("0::"))?;
    let units: Vec<&str> = path.split('/').filter(|unit| !unit.is_empty()).collect();
    if units.iter().any(|unit| unit.starts_with("slurmstepd")) {
        return Some("slurmd.service".to_owned());
    }
    let [slice, service, ..] = units[..] else {
        return None;
    };
    (slice == "system.slice" && service.ends_with(".service")).then(|| service.to_owned())
}

/// Adds up the memory that processes have pinned. The kernel counts each registration of a page.
fn pinned_bytes(place: &Place) -> u64 {
    processes(place)
        .filter_map(|process| {
            proc_stat::pinned_bytes(&place.text(format!("/proc/{process}/status"))?)
        })
        .sum()
}

fn processes(place: &Place) -> impl Iterator<Item = String> {
    place
        .names("/proc")
        .into_iter()
        .filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
}

fn cpu_latency_requests(place: &Place) -> usize {
    let is_request = |process: &str, file: &str| {
        let link = place.path(format!("/proc/{process}/fd/{file}"));
        fs::read_link(link).is_ok_and(|target| target == Path::new("/dev/cpu_dma_latency"))
    };
    let has_request = |process: &String| {
        let files = place.names(format!("/proc/{process}/fd"));
        files.iter().any(|file| is_request(process, file))
    };
    processes(place).filter(has_request).count()
}

/// Opens the uverbs file of each RDMA device. If a file is missing or cannot be opened, its entry
/// has the error.
fn device_files(place: &Place) -> Vec<DeviceFile> {
    let class = "/sys/class/infiniband_verbs";
    let named = place
        .names(class)
        .into_iter()
        .filter(|name| name.starts_with("uverbs"))
        .filter_map(|name| {
            let device = place.text(format!("{class}/{name}/ibdev"))?;
            Some((device, format!("/dev/infiniband/{name}")))
        });
    let mut files: Vec<DeviceFile> = named
        .map(|(device, file)| {
            let error = place.try_device(Path::new(&file)).err();
            DeviceFile {
                device,
                file,
                error,
            }
        })
        .collect();
    files.sort_by(|one, other| one.device.cmp(&other.device));
    files
}

fn peermem_files(place: &Place) -> Vec<String> {
    let folders = [
        "/etc/modules-load.d",
        "/usr/lib/modules-load.d",
        "/run/modules-load.d",
    ];
    let mut files: Vec<String> = folders
        .iter()
        .flat_map(|folder| {
            place
                .names(folder)
                .into_iter()
                .map(move |name| format!("{folder}/{name}"))
        })
        .collect();
    files.push("/etc/modules".to_owned());
    let names_it = |file: &String| {
        let text = place.text(file).unwrap_or_default();
        text.lines()
            .any(|line| matches!(line.trim(), "nvidia-peermem" | "nvidia_peermem"))
    };
    files.retain(names_it);
    files
}

fn cpus(place: &Place, process: &str) -> Cpus {
    let status = place.text(format!("{process}/status")).unwrap_or_default();
    let list = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
        .unwrap_or_default();
    let allowed = cpu_list(list);
    let folder = "/sys/devices/system/cpu";
    let numbers = place
        .names(folder)
        .into_iter()
        .filter_map(|name| name.strip_prefix("cpu")?.parse::<u32>().ok());
    let capacity = |cpu| {
        Some((
            cpu,
            place.number(format!("{folder}/cpu{cpu}/cpu_capacity"))?,
        ))
    };
    let mut capacities: Vec<_> = numbers.filter_map(capacity).collect();
    capacities.sort_unstable();
    let states_of = |cpu: u32| format!("{folder}/cpu{cpu}/cpuidle");
    let states = states_of(allowed.first().copied().unwrap_or(0));
    let idle = place.names(&states).into_iter().filter_map(|state| {
        let file = |name: &str| format!("{states}/{state}/{name}");
        let entries = |cpu: &u32| place.number(format!("{}/{state}/usage", states_of(*cpu)));
        let counted: Vec<u64> = allowed.iter().filter_map(entries).collect();
        Some(IdleState {
            entries: (!counted.is_empty()).then(|| counted.iter().sum()),
            name: place.text(file("name"))?,
            latency_us: place.number(file("latency"))?,
            is_enabled: place
                .number(file("disable"))
                .is_none_or(|disabled| disabled == 0),
        })
    });
    let idle = idle.collect();
    Cpus {
        allowed,
        capacities,
        idle,
    }
}

fn cpu_list(text: &str) -> Vec<u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse::<u32>().ok()?..=last.trim().parse().ok()?)
    };
    text.split(',').filter_map(range).flatten().collect()
}

/// Reads `answers/cuda` of a copied machine. Each GPU has a line with four attributes in this
/// order, each 0 or 1: INTEGRATED, GPU_DIRECT_RDMA_SUPPORTED, DMA_BUF_SUPPORTED,
/// GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED.
pub(super) fn cuda_of_copy(place: &Place) -> Result<Vec<CudaDevice>, String> {
    let text = place
        .read("/answers/cuda")
        .map_err(|error| format!("answers/cuda: {error}"))?;
    let device = |line: &str| {
        let mut digits = line.split_whitespace();
        let mut next = || {
            digits
                .next()
                .and_then(|digit| Some(digit.parse::<u8>().ok()? == 1))
        };
        CudaDevice {
            is_integrated: next(),
            has_gpu_direct_rdma: next(),
            has_dma_buf: next(),
            has_vmm_rdma: next(),
        }
    };
    Ok(text
        .ok_or("the copy has no answers/cuda")?
        .lines()
        .map(device)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors() {
        assert_eq!(cpu_list("\t0-2,5,7-8"), [0, 1, 2, 5, 7, 8]);
        assert_eq!(cpu_list("3"), [3]);
        assert!(cpu_list("").is_empty());
    }
}
