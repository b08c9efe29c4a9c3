//! Carries out the cures that the doctor prints: plants a fault, runs the finding's commands as
//! they are printed, and asks the doctor again. The finding must be gone.
//!
//! The machine is the fault's folder, as the root folder of a shell (chroot), with this machine's
//! programs in `/usr`. So commands change only the folder. Commands about variables change the
//! shell's environment, which the doctor then gets. [`boot`] does to the folder what a boot or a
//! login does to a Spark. Commands that need a kernel's interfaces (`ip link`, `sysctl`) run in the
//! test bed (`tests/rxe-vm/cases/70-doctor.sh`).

use super::bed::Bed;
use super::faults::{Fault, all};
use crate::commands::doctor::finding::Finding;
use crate::skip;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Commands that this test does not run, by a part of them, each with the reason.
const NOT_RUN: &[(&str, &str)] = &[
    ("docker run", "starts a container of the owner's image"),
    ("podman run", "starts a container of the owner's image"),
    (
        "kubectl apply",
        "needs a cluster; tests/containers checks the file",
    ),
    (
        "containerd.service.d",
        "needs a cluster; tests/containers checks the file",
    ),
    ("mpirun", "starts the owner's job"),
    ("taskset", "starts the owner's job"),
    ("lspci", "shows, and changes nothing"),
    ("dmesg", "shows, and changes nothing"),
    ("ethtool -m", "shows, and changes nothing"),
    ("ethtool -S", "shows, and changes nothing"),
    ("ethtool -a", "shows, and changes nothing"),
    ("ethtool enp", "shows, and changes nothing"),
    ("devlink dev param show", "shows, and changes nothing"),
    ("pgrep", "shows, and changes nothing"),
    (
        "ulimit -l",
        "the limit of the job's shell; this user may not raise it",
    ),
    ("nccl-spark all-gather", "shows, and changes nothing"),
    (
        "NCCL_SPARK_CPU_LATENCY_US",
        "takes effect in a job, on a GB10",
    ),
    ("fwupdmgr", "updates firmware"),
    ("the power cable out", "somebody at the machine"),
    (
        "NCCL's own network",
        "the plugin is not for InfiniBand, with or without it",
    ),
    ("re-seat the cable", "a reboot, or somebody at the machine"),
    (
        "devlink dev param set",
        "needs the NIC; kernel documentation, networking/devlink/ice.rst",
    ),
    ("ip link set", "test bed: 70-doctor"),
    ("sysctl -p", "test bed: 70-doctor"),
    (
        "ethtool -A",
        "needs the NIC: veth and virtio have no pause frames",
    ),
    (
        "env --for systemd",
        "tests of env, with stubs of dcb; the bed's NIC has no DCB",
    ),
    ("dcb app replace", "as above"),
    (
        "nmcli con delete",
        "needs NetworkManager; by hand, docs/evidence/doctor.md",
    ),
    (
        "doctor --silence",
        "measures, and changes nothing; needs a rail",
    ),
    (
        "then measure again",
        "needs the NIC: the measurement of a copy does not change",
    ),
    ("apt install", "installs packages"),
    ("pip install", "installs packages"),
    ("nccl-spark uninstall", "tests of install"),
    (
        "modprobe -r nvidia-peermem",
        "unloads a module of the kernel",
    ),
];

/// Kinds of findings whose commands are for the next start of a process.
const OF_A_PROCESS: &str = "a running process keeps its variables";

enum Outcome {
    Cured,
    NotRun(&'static str),
    NoCommands,
}

#[test]
fn each_cure_removes_its_fault() {
    if !has_namespaces() {
        return skip::missing(
            "this user cannot make a mount namespace (unshare --map-root-user --mount)",
        );
    }
    let mut cured = 0;
    for fault in all() {
        let bed = (fault.plant)();
        let finding = of_fault(&bed, fault);
        let outcome = follow(fault, bed, &finding);
        cured += usize::from(matches!(outcome, Outcome::Cured));
        println!("| `{}` | {} | {} |", fault.id, fault.name, outcome.text());
    }
    assert!(cured > 15, "only {cured} cures were run");
}

fn of_fault(bed: &Bed, fault: &Fault) -> Finding {
    let answer = bed.answer();
    let mut found = answer.findings.into_iter();
    found
        .find(|finding| finding.id == fault.id)
        .unwrap_or_else(|| panic!("{}: not found", fault.name))
}

fn follow(fault: &Fault, mut bed: Bed, finding: &Finding) -> Outcome {
    let Some(commands) = finding.cure.as_ref().or(finding.now.as_ref()) else {
        return Outcome::NoCommands;
    };
    if let Some((_, why)) = NOT_RUN.iter().find(|(part, _)| commands.contains(part)) {
        return Outcome::NotRun(why);
    }
    if bed.request.pid.is_some() {
        return Outcome::NotRun(OF_A_PROCESS);
    }
    run(&mut bed, commands, fault.name);
    boot(&bed);
    let after = bed.answer();
    let is_gone = after.findings.iter().all(|one| one.id != finding.id);
    assert!(
        is_gone,
        "{}: after {commands}: {:#?}",
        fault.name, after.findings
    );
    Outcome::Cured
}

impl Outcome {
    fn text(&self) -> String {
        match self {
            Self::Cured => "run, and the finding is gone".to_owned(),
            Self::NotRun(why) => format!("not run: {why}"),
            Self::NoCommands => "words alone".to_owned(),
        }
    }
}

/// Runs commands in the bed's folder. The shell's variables become the bed's.
fn run(bed: &mut Bed, commands: &str, name: &str) {
    const VARIABLES: &str = "variables-after";
    for program in ["reboot", "poweroff", "update-grub", "modprobe", "systemctl"] {
        bed.program(program, "#!/bin/sh\n");
    }
    // Folders that Ubuntu has.
    for folder in [
        "udev/rules.d",
        "security/limits.d",
        "modules-load.d",
        "default/grub.d",
    ] {
        fs::create_dir_all(bed.path(&format!("etc/{folder}"))).expect("a folder");
    }
    bed.program("sudo", "#!/bin/sh\nexec \"$@\"\n");
    const SCRIPT: &str = "set -e; for folder in usr bin sbin lib lib64; do\n\
           [ ! -e /$folder ] || { mkdir -p \"$1/$folder\"; mount --bind /$folder \"$1/$folder\"; }\n\
         done\n\
         root=$1 commands=$2; shift 2\n\
         exec chroot \"$root\" /usr/bin/env -i \"$@\" /bin/sh -c \"$commands\"";
    let commands = format!("{commands}\nstatus=$?; /usr/bin/env -0 >/{VARIABLES}; exit $status");
    let root = bed.path("");
    let mut shell = Command::new("unshare");
    shell.args(["--map-root-user", "--mount", "sh", "-c", SCRIPT]);
    shell.arg("sh").arg(&root).arg(&commands);
    shell.arg("PATH=/stubs:/usr/bin:/bin:/usr/sbin:/sbin");
    let kept = |(name, _): &&(String, String)| name != "PATH";
    let variables = bed.request.variables.iter().filter(kept);
    shell.args(variables.map(|(name, value)| format!("{name}={value}")));
    let output = shell.output().expect("unshare");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {commands}: {said}");
    let after = fs::read(bed.path(VARIABLES)).expect("the shell's variables");
    let pairs = after.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    bed.request.variables = pairs
        .filter_map(|pair| {
            Some(pair.split_once('=')?).map(|(name, value)| (name.to_owned(), value.to_owned()))
        })
        .filter(|(name, _)| !["PATH", "PWD", "OLDPWD", "_", "SHLVL"].contains(&name.as_str()))
        .collect();
    bed.set("PATH", "/usr/bin");
}

/// Does to the folder what a boot and a login do.
fn boot(bed: &Bed) {
    let text = |below: &str| fs::read_to_string(bed.path(below)).unwrap_or_default();
    let has = |below: &str| bed.path(below).exists();
    if !has("etc/nvidia/cx7-hotplug-enabled") {
        let state = "sys/devices/platform/MTKP0001:00/pcie_hotplug/hotplug_enabled";
        if has(state) {
            bed.write(state, "0\n");
        }
    }
    let grub = text("etc/default/grub.d/kho.cfg");
    let evaluated = Command::new("sh")
        .args(["-c", &format!("{grub}\necho \"$GRUB_CMDLINE_LINUX\"")])
        .output()
        .expect("sh");
    if String::from_utf8_lossy(&evaluated.stdout)
        .split_whitespace()
        .any(|word| word == "kho=off")
    {
        bed.write(
            "proc/meminfo",
            "CmaTotal:       32768 kB\nCmaFree:        30000 kB\n",
        );
    }
    let limits = text("etc/security/limits.d/90-memlock.conf");
    if limits
        .split_whitespace()
        .eq(["*", "-", "memlock", "unlimited"])
    {
        bed.process("self");
    }
    let of_slurm = text("etc/systemd/system/slurmd.service.d/90-memlock.conf");
    if of_slurm == "[Service]\nLimitMEMLOCK=infinity\n" {
        bed.process("self");
    }
    for module in ["mlx5_ib", "ib_uverbs"] {
        let loaded = text(&format!("etc/modules-load.d/{module}.conf"));
        if loaded.trim() == module {
            let modules = text("proc/modules");
            bed.write(
                "proc/modules",
                &format!("{modules}{module} 500000 0 - Live 0x0\n"),
            );
            bed.driver_loaded(module);
        }
    }
    let is_open = text("etc/udev/rules.d/90-uverbs.rules").contains("MODE=\"0666\"");
    if is_open && has("answers/open") {
        fs::remove_dir_all(bed.path("answers/open")).expect("the answers of open");
    }
}

fn has_namespaces() -> bool {
    let status = Command::new("unshare")
        .args(["--map-root-user", "--mount", "true"])
        .status();
    status.is_ok_and(|status| status.success()) && Path::new("/usr/sbin/chroot").exists()
}
