//! Findings about the machine's device files, memory, kernel and processors.

use super::cures::{JobFacts, group_by_key, list, singular_or_plural};
use crate::commands::doctor::finding::{Finding, Severity};
use crate::commands::doctor::id::Id;
use crate::commands::doctor::look::{Cpus, DeviceFile, Facts, Machine};
use crate::output::numbers::count;
use nccl_net_spark::config::locked::{CHANNELS, locked_bytes};
use std::io::ErrorKind;

pub(super) fn judge(facts: &Facts, job_facts: &JobFacts, found: &mut Vec<Finding>) {
    let machine = &facts.machine;
    devices(facts, found);
    memlock(facts, found);
    contiguous_memory(machine, found);
    hotplug(machine, found);
    peermem(machine, found);
    processors(&machine.cpus, job_facts, found);
    idle(&machine.cpus, found);
}

const HOST_DRIVER: &str = "sudo apt install rdma-core ibverbs-providers && sudo modprobe mlx5_ib";
const CONTAINER: &str = "docker run $(nccl-spark env --for docker) --gpus all IMAGE";

fn devices(facts: &Facts, found: &mut Vec<Finding>) {
    let machine = &facts.machine;
    let has_ports = !facts.survey.rails.is_empty() || !facts.survey.refused.is_empty();
    let unbound = facts
        .unbound
        .iter()
        .map(|(driver, address)| (driver.as_deref().unwrap_or("no driver"), address));
    for (driver, addresses) in group_by_key(unbound) {
        let text = format!(
            "{} at {} ({driver}) {} no RDMA device: the driver mlx5_ib is not loaded",
            singular_or_plural(&addresses, "the NIC", "the NICs"),
            list(&addresses),
            singular_or_plural(&addresses, "has", "have")
        );
        found.push(
            Id::RdmaDriver
                .finding(text)
                .cured_by("sudo modprobe mlx5_ib"),
        );
    }
    if !has_ports {
        let cure = if machine.container.is_some() {
            CONTAINER
        } else {
            HOST_DRIVER
        };
        const NONE: &str = "no RDMA device";
        let why = facts
            .verbs
            .as_ref()
            .err()
            .and_then(|why| why.split(". On the host").next())
            .unwrap_or(NONE);
        let why = if why.starts_with(NONE) {
            why.to_owned()
        } else {
            format!("{NONE}: {why}")
        };
        found.push(Id::NoRdmaDevice.finding(why).cured_by(cure));
        return;
    }
    let failed: Vec<_> = machine
        .device_files
        .iter()
        .filter(|file| file.error.is_some())
        .collect();
    if !machine.has_dev_infiniband {
        let text = "sysfs shows RDMA devices, and /dev/infiniband does not exist: programs cannot open the devices";
        found.push(Id::DevInfiniband.finding(text).cured_by(CONTAINER));
    } else {
        device_files(machine, &failed, found);
    }
    let explained = !machine.has_dev_infiniband || !failed.is_empty();
    if let (Err(why), false) = (&facts.verbs, explained) {
        let text = format!("libibverbs does not work: {why}");
        found.push(
            Id::Verbs
                .finding(text)
                .cured_by("sudo apt install libibverbs1 ibverbs-providers"),
        );
    }
}

fn device_files(machine: &Machine, failed: &[&DeviceFile], found: &mut Vec<Finding>) {
    // If no device can be opened, nothing works. If some can be opened, only some rails are
    // missing.
    let severity = if failed.len() == machine.device_files.len() {
        Severity::Broken
    } else {
        Severity::Slow
    };
    let id = |file: &DeviceFile| {
        let error = file.error.as_ref()?;
        match error.kind() {
            _ if error.raw_os_error() == Some(nix::libc::EPERM) => Some(Id::DeviceForbidden),
            ErrorKind::PermissionDenied => Some(Id::DevicePermissions),
            ErrorKind::NotFound => Some(Id::DeviceFile),
            _ => None,
        }
    };
    let mut failed = failed.to_vec();
    failed.sort_by(|one, other| one.file.cmp(&other.file));
    for (id, files) in group_by_key(
        failed
            .into_iter()
            .filter_map(|file| Some((id(file)?, file))),
    ) {
        let names: Vec<String> = files
            .iter()
            .map(|file| format!("{} ({})", file.file, file.device))
            .collect();
        let names = list(&names);
        let (text, cure) = match id {
            Id::DeviceForbidden => {
                let them = singular_or_plural(&files, "it", "them");
                let text = format!(
                    "{names} may not be opened here: the container was not given {them} (EPERM)"
                );
                (text, CONTAINER.to_owned())
            }
            Id::DevicePermissions => {
                let paths: Vec<&str> = files.iter().map(|file| file.file.as_str()).collect();
                (
                    format!("this user may not open {names}"),
                    format!("sudo chmod a+rw {}", paths.join(" ")),
                )
            }
            _ => {
                let is = singular_or_plural(&files, "is", "are");
                let cure = if machine.container.is_some() {
                    CONTAINER
                } else {
                    "sudo modprobe ib_uverbs"
                };
                (format!("{names} {is} not there"), cure.to_owned())
            }
        };
        found.push(id.finding(text).at(severity).cured_by(cure));
    }
}

fn memlock(facts: &Facts, found: &mut Vec<Finding>) {
    let Some(bytes) = facts
        .machine
        .memlock_bytes
        .filter(|bytes| *bytes != u64::MAX)
    else {
        return;
    };
    let rails = facts.survey.rails.len().max(1) as u64;
    let [usual, most] = CHANNELS.map(|channels| (locked_bytes(rails, channels), channels));
    let megabytes = |bytes: u64| bytes / 1_000_000;
    let needs = format!(
        "NCCL's buffers need {} MB over {} with {} channels, and {} MB with {}",
        megabytes(usual.0),
        count(rails as usize, "rail"),
        usual.1,
        megabytes(most.0),
        most.1
    );
    let (severity, effect) = match bytes < usual.0 {
        true => (Severity::Broken, "registering them fails with ENOMEM"),
        false => (
            Severity::Fragile,
            "a program that registers its own buffers can reach the limit, because every rail's registration counts",
        ),
    };
    let text = format!(
        "the limit of locked memory is {} MB. {needs}: {effect}",
        megabytes(bytes)
    );
    let cure = match facts.machine.container {
        Some(_) => "docker run --ulimit memlock=-1 ...",
        None => {
            "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/90-memlock.conf    # then log in again"
        }
    };
    found.push(Id::Memlock.finding(text).at(severity).cured_by(cure));
}

/// Finds kernels that report more free memory than total memory in their contiguous memory area
/// (CMA), such as 7.0.0-1019, -1031 and 7.0.0-31-generic. Such kernels refuse to pin memory.
fn contiguous_memory(machine: &Machine, found: &mut Vec<Finding>) {
    let Some((total, free)) = machine.cma_kib.filter(|(total, free)| free > total) else {
        return;
    };
    let kernel = machine.kernel.as_deref().unwrap_or("unknown");
    let text = format!(
        "the kernel's contiguous memory area is broken (CmaFree {free} kB, more than CmaTotal {total} kB), so registering memory fails with ENOMEM; \
         kernels 7.0.0-1019, 7.0.0-1031 and 7.0.0-31-generic have this bug, and this kernel is {kernel}"
    );
    let cure = "echo 'GRUB_CMDLINE_LINUX=\"$GRUB_CMDLINE_LINUX kho=off\"' | sudo tee /etc/default/grub.d/kho.cfg && sudo update-grub && sudo reboot";
    found.push(Id::CmaRegression.finding(text).cured_by(cure));
}

fn hotplug(machine: &Machine, found: &mut Vec<Finding>) {
    let is_on = machine
        .hotplug_state
        .as_deref()
        .is_some_and(|state| state != "0");
    const MARKER: &str = "/etc/nvidia/cx7-hotplug-enabled";
    let (what, cure) = match (machine.has_hotplug_marker, is_on) {
        (true, _) => (
            format!("on ({MARKER})"),
            format!("sudo mv {MARKER} {MARKER}.off && sudo reboot"),
        ),
        (false, true) => (
            "still on until the next boot".to_owned(),
            "sudo reboot".to_owned(),
        ),
        (false, false) => return,
    };
    let text = format!(
        "DGX OS's hotplug handler is {what}: if one cable is pulled or bad, the handler removes all four functions from PCI, including those of the other cable"
    );
    found.push(Id::Hotplug.finding(text).cured_by(cure));
}

fn peermem(machine: &Machine, found: &mut Vec<Finding>) {
    if let [first, ..] = &machine.peermem_files[..] {
        let text = format!(
            "{} loads nvidia-peermem at boot; on a Spark this fails (Invalid argument), and nothing needs the module",
            list(&machine.peermem_files)
        );
        let cure = format!("sudo sed -i '/^nvidia[-_]peermem/d' {first}");
        found.push(Id::PeermemAtBoot.finding(text).cured_by(cure));
    }
    if machine
        .modules
        .iter()
        .any(|module| module == "nvidia_peermem")
    {
        let text = "nvidia-peermem is loaded but unused: the plugin tells NCCL to give it host memory only";
        found.push(
            Id::PeermemLoaded
                .finding(text)
                .cured_by("sudo modprobe -r nvidia-peermem"),
        );
    }
}

/// An idle state with this exit latency or more gets a finding: waking then takes longer than a
/// small all-reduce. This is the shallowest of a GB10's three states.
const LONG_IDLE_US: u64 = 42;

fn processors(cpus: &Cpus, job_facts: &JobFacts, found: &mut Vec<Finding>) {
    if let [only] = cpus.allowed[..]
        && cpus.capacities.len() > 1
    {
        let text = format!(
            "the process may run only on processor {only}, which NCCL's threads and the program's threads must share"
        );
        found.push(
            Id::OneProcessor
                .finding(text)
                .cured_by("mpirun --bind-to none ..."),
        );
        return;
    }
    let fastest = cpus
        .capacities
        .iter()
        .map(|(_, capacity)| *capacity)
        .max()
        .unwrap_or(0);
    let is_fast = |cpu: &u32| {
        cpus.capacities
            .iter()
            .any(|(number, capacity)| number == cpu && *capacity == fastest)
    };
    if job_facts.proxy_cpus.is_none()
        && fastest > 0
        && !cpus.allowed.is_empty()
        && !cpus.allowed.iter().any(is_fast)
    {
        let fast: Vec<u32> = cpus
            .capacities
            .iter()
            .filter(|(_, capacity)| *capacity == fastest)
            .map(|(cpu, _)| *cpu)
            .collect();
        let text = "the process may run only on slow processors, where NCCL's proxy threads delay every message";
        found.push(
            Id::SlowProcessors
                .finding(text)
                .cured_by(format!("taskset -c {} COMMAND", ranges(&fast))),
        );
    }
}

fn idle(cpus: &Cpus, found: &mut Vec<Finding>) {
    if let Some(deepest) = cpus
        .deepest_idle()
        .filter(|state| state.latency_us >= LONG_IDLE_US)
    {
        let text = format!(
            "processors may enter idle state {}; leaving it takes {} us, longer than a small all-reduce, unless the job's user \
             may write to /dev/cpu_dma_latency: on a GB10 the plugin then keeps processors out of it",
            deepest.name, deepest.latency_us
        );
        let cure = "export NCCL_SPARK_CPU_LATENCY_US=20    # on a GB10 the default; needs root or the group rdma with the udev rule of `install`";
        found.push(Id::DeepIdle.finding(text).cured_by(cure));
    }
}

/// Formats 5, 6, 7, 9 as "5-7,9".
fn ranges(numbers: &[u32]) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == *number => *last = *number,
            _ => parts.push((*number, *number)),
        }
    }
    let text = |(first, last): &(u32, u32)| {
        if first == last {
            first.to_string()
        } else {
            format!("{first}-{last}")
        }
    };
    parts.iter().map(text).collect::<Vec<_>>().join(",")
}
