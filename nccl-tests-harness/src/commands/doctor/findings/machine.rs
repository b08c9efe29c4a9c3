//! Findings about the machine's device files, memory, kernel and processors.

use super::cures::{JobFacts, group_by_key, list, show_roce, singular_or_plural};
use super::functions::spark_nic;
use crate::commands::doctor::finding::kinds;
use crate::commands::doctor::finding::{Finding, Severity};
use crate::commands::doctor::look::{Cpus, DeviceFile, Facts, Machine};
use crate::output::numbers::count;
use host::config::locked::{CHANNELS, locked_bytes};
use host::nic::{Nic, RDMA_MODULE};
use std::io::ErrorKind;

kinds! {
    NO_RDMA_DEVICE = Broken "no-rdma-device": "this host or container shows no RDMA device", "`sudo modprobe mlx5_ib`; [containers.md](containers.md)";
    DEV_INFINIBAND = Broken "dev-infiniband": "sysfs shows RDMA devices, and `/dev/infiniband` is not there", "`--device /dev/infiniband`; on a host `sudo modprobe ib_uverbs`";
    DEVICE_FILE = Broken "device-file": "one device's file is missing below `/dev/infiniband`", "`sudo modprobe ib_uverbs`; `--device /dev/infiniband`";
    DEVICE_PERMISSIONS = Broken "device-permissions": "this user may not open a device's file", "a udev rule";
    DEVICE_FORBIDDEN = Broken "device-forbidden": "the container's rules forbid a device (EPERM)", "`--device /dev/infiniband`. Nothing if the device belongs to another pod";
    RDMA_DRIVER = Broken "rdma-driver": "a NIC is present without an RDMA device: `mlx5_ib` is not loaded, or RoCE is off", "`sudo modprobe mlx5_ib`, or turn RoCE on";
    VERBS = Broken "verbs": "libibverbs is installed and cannot be used", "`sudo apt install libibverbs1 ibverbs-providers`";
    MEMLOCK = Fragile "memlock": "locked memory is limited", "the line of README's Install, then log in again; in containers [locked memory](containers.md#locked-memory)";
    CMA_REGRESSION = Broken "cma-regression": "the kernel's contiguous memory is broken, and registering fails with ENOMEM", "`kho=off` on the kernel's command line, or kernel 6.17";
    HOTPLUG = Fragile "hotplug": "DGX OS's hotplug handler takes all four functions away when one cable is pulled", "[failover.md](failover.md#dgx-oss-hotplug-handler)";
    PEERMEM_AT_BOOT = Note "peermem-at-boot": "nvidia-peermem is to be loaded at boot, which fails on a Spark", "remove it from `/etc/modules-load.d`";
    PEERMEM_LOADED = Note "peermem-loaded": "nvidia-peermem is loaded, and nothing uses it", "`sudo modprobe -r nvidia-peermem`; it does no harm";
    ONE_PROCESSOR = Slow "one-processor": "the process may run only on one processor", "`mpirun --bind-to none`";
    SLOW_PROCESSORS = Slow "slow-processors": "the process may run only on slow processors", "`taskset -c` with the fast processors";
    DEEP_IDLE = Note "deep-idle": "processors sleep so deeply that waking takes longer than a small all-reduce", "[settings.md](settings.md#cpu-wake-up-latency)";
}

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

const LOAD_UVERBS: &str =
    "echo ib_uverbs | sudo tee /etc/modules-load.d/ib_uverbs.conf && sudo modprobe ib_uverbs";

/// Returns the cure for a container that lacks the rails' devices.
pub(super) fn container_cure(engine: &str) -> &'static str {
    match engine {
        "kubernetes" => {
            "kubectl apply -f host-network.yaml    # examples/containers/kubernetes: hostNetwork and /dev/infiniband, or multus-rdma.yaml"
        }
        "podman" => {
            "podman run --network host --ipc host --device /dev/infiniband --ulimit memlock=-1:-1 --device nvidia.com/gpu=all IMAGE"
        }
        _ => "docker run $(nccl-spark env --for docker) --gpus all IMAGE",
    }
}

fn devices(facts: &Facts, found: &mut Vec<Finding>) {
    let machine = &facts.machine;
    let has_ports = !facts.survey.rails.is_empty() || !facts.survey.refused.is_empty();
    nics_without_device(facts, found);
    let absent = spark_nic(facts).filter(|_| !has_ports && facts.has_nic == Some(false));
    if let Some(nic) = absent {
        found.push(no_nic(nic, machine));
        return;
    }
    if !has_ports {
        let cure = machine.container.map_or(HOST_DRIVER, container_cure);
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
        found.push(NO_RDMA_DEVICE.finding(why).cured_by(cure));
        return;
    }
    let failed: Vec<_> = machine
        .device_files
        .iter()
        .filter(|file| file.error.is_some())
        .collect();
    if !machine.has_dev_infiniband {
        let text = "sysfs shows RDMA devices, and /dev/infiniband does not exist: programs cannot open the devices";
        let is_loaded = machine.modules.iter().any(|module| module == "ib_uverbs");
        // Modules of a host show in its containers too. With the module loaded, this is a container
        // whose engine left no mark.
        let (why, cure) = match machine.container {
            None if !is_loaded => (": the driver ib_uverbs is not loaded", LOAD_UVERBS),
            engine => ("", container_cure(engine.unwrap_or("docker"))),
        };
        found.push(
            DEV_INFINIBAND
                .finding(format!("{text}{why}"))
                .cured_by(cure),
        );
    } else {
        device_files(machine, &failed, found);
    }
    let explained = !machine.has_dev_infiniband || !failed.is_empty();
    if let (Err(why), false) = (&facts.verbs, explained) {
        let text = format!("libibverbs does not work: {why}");
        found.push(
            VERBS
                .finding(text)
                .cured_by("sudo apt install libibverbs1 ibverbs-providers"),
        );
    }
}

/// Finds NICs that have no RDMA device.
fn nics_without_device(facts: &Facts, found: &mut Vec<Finding>) {
    let unbound = facts
        .unbound
        .iter()
        .map(|(driver, address)| (driver.as_deref().unwrap_or("no driver"), address));
    let is_loaded = facts
        .machine
        .modules
        .iter()
        .any(|module| module == RDMA_MODULE);
    for (driver, addresses) in group_by_key(unbound) {
        let text = format!(
            "{} at {} ({driver}) {} no RDMA device",
            singular_or_plural(&addresses, "the NIC", "the NICs"),
            list(&addresses),
            singular_or_plural(&addresses, "has", "have")
        );
        found.push(if is_loaded {
            RDMA_DRIVER
                .finding(format!("{text}, although the driver mlx5_ib is loaded: is RoCE off on it?"))
                .cured_by(show_roce(&addresses))
        } else {
            RDMA_DRIVER
                .finding(format!("{text}: the driver mlx5_ib is not loaded"))
                .cured_by("echo mlx5_ib | sudo tee /etc/modules-load.d/mlx5_ib.conf && sudo modprobe mlx5_ib")
        });
    }
}

/// Makes the finding for a Spark whose NIC is not on PCI, so that no driver can help.
fn no_nic(nic: &Nic, machine: &Machine) -> Finding {
    let text = format!("no RDMA device: PCI shows no {}", nic.name);
    if is_hotplug_on(machine) {
        let text = format!(
            "{text}. DGX OS's hotplug handler removes the NIC while no port has a cable: plug a cable in, or turn the handler off"
        );
        return NO_RDMA_DEVICE.finding(text);
    }
    let text = format!(
        "{text}. The NIC can be missing after a warm boot that follows an update, until the power is cut"
    );
    NO_RDMA_DEVICE
        .finding(text)
        .cured_by("sudo poweroff    # on the host; then the power cable out for a minute")
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
            _ if error.raw_os_error() == Some(nix::libc::EPERM) => Some(DEVICE_FORBIDDEN),
            ErrorKind::PermissionDenied => Some(DEVICE_PERMISSIONS),
            ErrorKind::NotFound => Some(DEVICE_FILE),
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
            DEVICE_FORBIDDEN => {
                let them = singular_or_plural(&files, "it", "them");
                let text = format!(
                    "{names} may not be opened here: the container was not given {them} (EPERM)"
                );
                let engine = machine.container.unwrap_or("docker");
                (text, container_cure(engine).to_owned())
            }
            DEVICE_PERMISSIONS => {
                let paths: Vec<&str> = files.iter().map(|file| file.file.as_str()).collect();
                const RULE: &str =
                    r#"KERNEL=="uverbs*", SUBSYSTEM=="infiniband_verbs", MODE="0666""#;
                let now = format!("sudo chmod a+rw {}", paths.join(" "));
                let cure =
                    format!("echo '{RULE}' | sudo tee /etc/udev/rules.d/90-uverbs.rules && {now}");
                (format!("this user may not open {names}"), cure)
            }
            _ => {
                let is = singular_or_plural(&files, "is", "are");
                let cure = machine.container.map_or(LOAD_UVERBS, container_cure);
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
    let limit = match bytes {
        ..1_000_000 => format!("{} kB", bytes / 1000),
        _ => format!("{} MB", megabytes(bytes)),
    };
    let service = facts.machine.service.as_deref();
    let whose = service
        .map(|name| format!(" ({name}, like each systemd service, does not read limits.d)"))
        .unwrap_or_default();
    let text = format!("the limit of locked memory is {limit}{whose}. {needs}: {effect}");
    let for_host = service.map_or_else(|| LIMITS.to_owned(), limit_of_service);
    let cure = match facts.machine.container {
        Some("kubernetes") => {
            "sudo install -D -m 644 10-memlock.conf /etc/systemd/system/containerd.service.d/10-memlock.conf && sudo systemctl daemon-reload    # examples/containers/kubernetes; on each node, then restart containerd (or the unit that starts it, such as k3s)"
        }
        Some("podman") => {
            "podman run --ulimit memlock=-1:-1 ...    # without root, first the host's limit: limits.d, then log in again"
        }
        Some(_) => "docker run --ulimit memlock=-1 ...",
        None if service.is_some() && facts.machine.may_raise_memlock => {
            "ulimit -l unlimited    # in the job's script, before its program"
        }
        None => for_host.as_str(),
    };
    found.push(MEMLOCK.finding(text).at(severity).cured_by(cure));
}

const LIMITS: &str = "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/90-memlock.conf    # then log in again";

/// Returns the cure for processes of a systemd service. The service must be restarted, which the
/// command leaves to the owner: it may end jobs.
fn limit_of_service(name: &str) -> String {
    let folder = format!("/etc/systemd/system/{name}.d");
    format!(
        "sudo mkdir -p {folder} && printf '[Service]\\nLimitMEMLOCK=infinity\\n' | sudo tee {folder}/90-memlock.conf && \
         sudo systemctl daemon-reload    # then restart {name}"
    )
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
    found.push(CMA_REGRESSION.finding(text).cured_by(cure));
}

fn is_hotplug_on(machine: &Machine) -> bool {
    let state = machine.hotplug_state.as_deref();
    state.is_some_and(|state| state != "0")
}

fn hotplug(machine: &Machine, found: &mut Vec<Finding>) {
    let is_on = is_hotplug_on(machine);
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
    found.push(HOTPLUG.finding(text).cured_by(cure));
}

fn peermem(machine: &Machine, found: &mut Vec<Finding>) {
    if let [first, ..] = &machine.peermem_files[..] {
        let text = format!(
            "{} loads nvidia-peermem at boot; on a Spark this fails (Invalid argument), and nothing needs the module",
            list(&machine.peermem_files)
        );
        let cure = format!("sudo sed -i '/^nvidia[-_]peermem/d' {first}");
        found.push(PEERMEM_AT_BOOT.finding(text).cured_by(cure));
    }
    if machine
        .modules
        .iter()
        .any(|module| module == "nvidia_peermem")
    {
        let text = "nvidia-peermem is loaded but unused: the plugin tells NCCL to give it host memory only";
        found.push(
            PEERMEM_LOADED
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
            ONE_PROCESSOR
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
            SLOW_PROCESSORS
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
        let entries = deepest.entries.map_or_else(String::new, |entries| {
            format!(" ({entries} times since the boot)")
        });
        let text = format!(
            "processors enter idle state {}{entries}; leaving it takes {} us, longer than a small all-reduce, unless the job's user \
             may write to /dev/cpu_dma_latency: on a GB10 the plugin then keeps processors out of it",
            deepest.name, deepest.latency_us
        );
        let cure = "export NCCL_SPARK_CPU_LATENCY_US=20    # on a GB10 the default; needs root or the group rdma with the udev rule of `install`";
        found.push(DEEP_IDLE.finding(text).cured_by(cure));
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

/// Each row plants one fault in a healthy machine: name, how, severity, id, words of the finding,
/// and a part of its commands.
#[cfg(test)]
pub mod faults {
    use crate::commands::doctor::tests::bed::Bed;
    use crate::commands::doctor::tests::faults::{faults, one, process, with};

    faults! {
        "no RDMA device on a host": Bed::plain() => Broken "no-rdma-device" [] "modprobe mlx5_ib";
        "no RDMA device in a container": with(Bed::plain(), |bed| bed.write(".dockerenv", "")) => Broken "no-rdma-device" [] "--for docker";
        "no RDMA device in a pod": with(Bed::plain(), |bed| bed.write("run/secrets/kubernetes.io/serviceaccount/token", "")) =>
            Broken "no-rdma-device" [] "hostNetwork";
        "no RDMA device in podman": with(Bed::plain(), |bed| bed.write("run/.containerenv", "")) =>
            Broken "no-rdma-device" [] "podman run --network host";
        "a container without /dev/infiniband": Bed::container() => Broken "dev-infiniband" ["/dev/infiniband"] "--for docker";
        // siderolabs/pkgs 1245 (a kernel without ib_uverbs), firedancer-io/firedancer 11320.
        "a host without ib_uverbs": with(one(), |bed| {
            std::fs::remove_dir_all(bed.path("dev/infiniband")).unwrap();
            bed.write("proc/modules", "mlx5_ib 500000 0 - Live 0x0\n");
        }) => Broken "dev-infiniband" ["the driver ib_uverbs is not loaded"] "modprobe ib_uverbs";
        // https://uni.hi.is/helmut/?p=6236: PCI was empty after an update and a warm boot.
        "a Spark whose NIC is not on PCI": with(Bed::plain(), |bed| bed.write("sys/bus/pci/devices/000f:01:00.0/vendor", "0x10de\n")) =>
            Broken "no-rdma-device" ["PCI shows no ConnectX-7", "until the power is cut"] "sudo poweroff";
        // graham33/nixos-dgx-spark 173: the handler is on and no cable is in.
        "a Spark whose NIC the hotplug handler removed": with(Bed::plain(), |bed| {
            bed.write("sys/bus/pci/devices/000f:01:00.0/vendor", "0x10de\n");
            bed.write("sys/devices/platform/MTKP0001:00/pcie_hotplug/hotplug_enabled", "1\n");
        }) => Broken "no-rdma-device" ["while no port has a cable"] "";
        "a device file is closed to this user": with(one(), |bed| bed.write("answers/open/uverbs0", "EACCES")) =>
            Slow "device-permissions" ["/dev/infiniband/uverbs0", "rocep1s0f0"] "chmod a+rw /dev/infiniband/uverbs0";
        "a device that the container's rules forbid": with(one(), |bed| bed.write("answers/open/uverbs2", "EPERM")) =>
            Slow "device-forbidden" ["uverbs2", "roceP2p1s0f0", "EPERM"] "--for docker";
        "all device files are closed": with(one(), |bed| (0..4).for_each(|at| bed.write(&format!("answers/open/uverbs{at}"), "EACCES"))) =>
            Broken "device-permissions" ["uverbs3"] "chmod";
        "a device file is missing": with(one(), |bed| bed.remove("dev/infiniband/uverbs0")) => Slow "device-file" ["uverbs0"] "ib_uverbs";
        "the RDMA driver is not loaded": with(one(), |bed| {
            bed.write("proc/modules", "mlx5_core 2500000 0 - Live 0x0\n");
            bed.write("sys/bus/pci/devices/0003:01:00.0/vendor", "0x15b3\n");
            bed.write("sys/bus/pci/devices/0003:01:00.0/class", "0x020000\n");
        }) => Broken "rdma-driver" ["0003:01:00.0"] "modprobe mlx5_ib";
        "locked memory limited to 8 MiB": with(one(), |bed| bed.replace("proc/self/limits", "unlimited  ", "8388608    ")) =>
            Broken "memlock" ["8 MB", "1040 MB over 2 rails"] "memlock unlimited";
        "locked memory limited to 16 GiB": with(one(), |bed| bed.replace("proc/self/limits", "unlimited  ", "17179869184")) =>
            Fragile "memlock" ["17179 MB", "1849 MB with 32"] "memlock unlimited";
        // ai4d-iasc/trixie 81: limits.conf says unlimited, and a job's soft limit is 64 KiB.
        "a job of Slurm with a soft limit": with(one(), |bed| {
            bed.replace("proc/self/limits", "unlimited            unlimited", "65536                unlimited");
            bed.slurm_job();
        }) => Broken "memlock" ["65 kB (slurmd.service", "does not read limits.d"] "ulimit -l unlimited";
        // clustervision/trinity 498, omnivector-solutions/snap-slurm 92: the daemon's own limit.
        "a job of Slurm under a limited daemon": with(one(), |bed| {
            bed.replace("proc/self/limits", "unlimited            unlimited", "65536                65536    ");
            bed.slurm_job();
        }) => Broken "memlock" ["slurmd.service"] "LimitMEMLOCK=infinity";
        // NVIDIA/nvidia-container-toolkit 2037: IPC_LOCK has no effect for a user other than root.
        "locked memory limited in a pod": with(one(), |bed| {
            bed.write("run/secrets/kubernetes.io/serviceaccount/token", "");
            bed.replace("proc/self/limits", "unlimited  ", "8388608    ");
        }) => Broken "memlock" ["8 MB"] "sudo install -D -m 644 10-memlock.conf";
        // podman-container-tools/podman 19319: -1 is not permitted above the user's limit.
        "locked memory limited in podman": with(one(), |bed| {
            bed.write("run/.containerenv", "rootless=1\n");
            bed.replace("proc/self/limits", "unlimited  ", "8388608    ");
        }) => Broken "memlock" ["8 MB"] "without root, first the host's limit";
        "kernel with the CMA regression": with(one(), |bed| {
            bed.write("proc/meminfo", "CmaTotal:       0 kB\nCmaFree:        1200 kB\n");
            bed.write("proc/sys/kernel/osrelease", "7.0.0-1019-nvidia\n");
        }) => Broken "cma-regression" ["7.0.0-1019-nvidia", "CmaFree 1200"] "kho=off";
        "hotplug marker": with(one(), |bed| {
            bed.write("etc/nvidia/cx7-hotplug-enabled", "");
            bed.write("sys/devices/platform/MTKP0001:00/pcie_hotplug/hotplug_enabled", "1\n");
        }) => Fragile "hotplug" ["/etc/nvidia/cx7-hotplug-enabled"] "mv /etc/nvidia/cx7-hotplug-enabled";
        "hotplug handler on until the next boot":
            with(one(), |bed| bed.write("sys/devices/platform/MTKP0001:00/pcie_hotplug/hotplug_enabled", "1\n")) =>
            Fragile "hotplug" ["until the next boot"] "reboot";
        "nvidia-peermem loaded at boot": with(one(), |bed| bed.write("etc/modules-load.d/nv.conf", "nvidia-peermem\n")) =>
            Note "peermem-at-boot" ["/etc/modules-load.d/nv.conf"] "sed";
        "nvidia-peermem loaded": with(one(), |bed| bed.write("proc/modules", "nvidia_peermem 16384 0 - Live 0x0\n")) =>
            Note "peermem-loaded" ["nvidia-peermem"] "modprobe -r";
        "bound to one processor": with(one(), |bed| bed.replace("proc/self/status", "0-19", "0")) => Slow "one-processor" ["processor 0"] "--bind-to none";
        "bound to the slow processors": with(one(), |bed| bed.replace("proc/self/status", "0-19", "0-4,10-14")) =>
            Slow "slow-processors" [] "taskset -c 5-9,15-19";
        "a deep idle state": with(one(), |bed| {
            for (file, text) in [("name", "C3\n"), ("latency", "900\n"), ("disable", "0\n")] {
                bed.write(&format!("sys/devices/system/cpu/cpu0/cpuidle/state1/{file}"), text);
            }
        }) => Note "deep-idle" ["C3", "900 us"] "NCCL_SPARK_CPU_LATENCY_US";
        "the idle states of a GB10, of which LPI-2 is never entered": with(one(), |bed| {
            let states = [("WFI", 1, 900), ("LPI-1", 42, 100), ("LPI-2", 231, 0), ("LPI-3", 433, 20)];
            for (cpu, (at, (name, latency, usage))) in [0, 9].into_iter().flat_map(|cpu| states.into_iter().enumerate().map(move |state| (cpu, state))) {
                for (file, text) in [("name", name.to_owned()), ("latency", latency.to_string()), ("disable", "0".to_owned()), ("usage", usage.to_string())] {
                    bed.write(&format!("sys/devices/system/cpu/cpu{cpu}/cpuidle/state{at}/{file}"), &format!("{text}\n"));
                }
            }
        }) => Note "deep-idle" ["LPI-3 (40 times since the boot)", "433 us"] "NCCL_SPARK_CPU_LATENCY_US";
        "a GB10 that enters only LPI-2": with(one(), |bed| {
            for (at, (latency, usage)) in [(1, 900), (42, 0), (231, 7), (433, 0)].into_iter().enumerate() {
                for (file, text) in [("name", format!("LPI-{at}")), ("latency", latency.to_string()), ("usage", usage.to_string())] {
                    bed.write(&format!("sys/devices/system/cpu/cpu0/cpuidle/state{at}/{file}"), &format!("{text}\n"));
                }
            }
        }) => Note "deep-idle" ["LPI-2 (7 times since the boot)", "231 us"] "NCCL_SPARK_CPU_LATENCY_US";
        "a NIC without an RDMA device, driver loaded": with(one(), |bed| {
            bed.write("sys/bus/pci/devices/0003:01:00.0/vendor", "0x15b3\n");
            bed.write("sys/bus/pci/devices/0003:01:00.0/class", "0x020000\n");
        }) => Broken "rdma-driver" ["0003:01:00.0", "although the driver mlx5_ib is loaded"] "devlink dev param show pci/0003:01:00.0";
        "a process bound to one processor": with(process("/usr/local/lib/libnccl-net-spark.so"), |bed| {
            bed.replace("proc/42/status", "0-19", "3");
        }) => Slow "one-processor" ["processor 3"] "--bind-to none";
    }
}
