//! Findings about the libraries of a job: builds of NCCL, network plugins, libibverbs, glibc.

use super::cures::JobFacts;
use crate::commands::doctor::finding::kinds;
use crate::commands::doctor::finding::{Finding, Severity};
use crate::commands::doctor::look::{Libraries, Library, NcclFile, PluginKind};

kinds! {
    LIBIBVERBS = Broken "libibverbs": "`libibverbs.so.1` is not where the loader looks", "as for `verbs`, in a container in its image";
    MLX5_PROVIDER = Broken "mlx5-provider": "libibverbs has no provider for mlx5", "as for `libibverbs`";
    GLIBC = Broken "glibc": "the plugin's file needs a newer glibc than is installed", "[containers.md](containers.md#glibc)";
    NCCL_BAD_BUILD = Fragile "nccl-bad-build": "an NCCL that is known to stop after a while on Arm", "DGX OS's own NCCL, or 2.29.3 and later";
    NCCL_NVLS = Fragile "nccl-nvls": "NCCL 2.30.4, whose NVLS fails on Sparks", "`NCCL_NVLS_ENABLE=0`";
    NCCL_TOO_OLD = Broken "nccl-too-old": "an NCCL so old that the plugin has none of its interfaces", "NCCL 2.20 or later";
    NCCL_UNKNOWN_BUILD = Note "nccl-unknown-build": "a build of NCCL with few reports from Sparks", "nothing; suspect this build first if jobs stop";
    NCCL_UNKNOWN = Note "nccl-unknown": "a libnccl that does not say its version, or cannot be read", "correct its permissions";
    NCCL_SEVERAL = Fragile "nccl-several": "several NCCLs, or variables that choose one", "unset `LD_PRELOAD` and `VLLM_NCCL_SO_PATH`";
    NCCL_NOT_LOADED = Note "nccl-not-loaded": "the process has not loaded NCCL", "`--pid` of a worker: `pgrep -P N`";
    OTHER_PLUGIN = Broken "other-plugin": "NCCL loads another network plugin", "`NCCL_NET_PLUGIN` with [the file's path](install.md#turn-it-on-for-a-job)";
    PLUGIN_NOT_LOADED = Broken "plugin-not-loaded": "a process has NCCL and no network plugin", "as for `other-plugin`";
    PLUGIN_COPIES = Fragile "plugin-copies": "several copies of this plugin", "keep one: `sudo nccl-spark uninstall`, `apt remove` or `pip uninstall`";
}

pub(super) fn judge(found: &Libraries, job_facts: &JobFacts, has_mlx5: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in &found.nccl {
        nccl(file, job_facts, &mut findings);
    }
    several_nccls(found, &mut findings);
    plugin(found, job_facts, &mut findings);
    copies(found, &mut findings);
    verbs(found, has_mlx5, &mut findings);
    glibc(found, &mut findings);
    findings
}

enum Known {
    /// A build that ran for an hour without errors on a Spark.
    Good,
    /// A build that leaks proxy slots on aarch64.
    Bad,
}

const BUILDS: &[(&str, Known)] = &[
    // 2.28.9 of DGX OS (issue 41725 of vllm-project/vllm).
    ("c0db9360", Known::Good),
    // 2.28.9 of NVIDIA's wheel nvidia-nccl-cu13 for aarch64.
    ("a7f420a1", Known::Bad),
];

/// The version whose NVLS fails on Sparks.
const NVLS_FAILS: [u32; 3] = [2, 30, 4];
/// The first version that has one of the plugin's interfaces.
const OLDEST: [u32; 3] = [2, 20, 0];

fn nccl(file: &NcclFile, job_facts: &JobFacts, findings: &mut Vec<Finding>) {
    let path = file.path.display();
    let library = match &file.library {
        Ok(library) => library,
        Err(why) => {
            let text = format!("{path} ({}) cannot be read: {why}", file.by);
            findings.push(NCCL_UNKNOWN.finding(text));
            return;
        }
    };
    let Some((version, numbers)) = library.nccl_version() else {
        let text = format!("{path} ({}) does not say which NCCL it is", file.by);
        findings.push(NCCL_UNKNOWN.finding(text));
        return;
    };
    let which = format!(
        "{path} ({}) is NCCL {version}, build id {}",
        file.by,
        short(library)
    );
    let newer = "pip install 'nvidia-nccl-cu13>=2.29.3'";
    match BUILDS
        .iter()
        .find(|(start, _)| library.build_id.starts_with(start))
        .map(|(_, known)| known)
    {
        Some(Known::Good) => {}
        Some(Known::Bad) => {
            let text = format!(
                "{which}: it leaks proxy slots on aarch64, and jobs stop after a while (NVIDIA/nccl 2353)"
            );
            findings.push(NCCL_BAD_BUILD.finding(text).cured_by(newer));
        }
        None if leaks(library, numbers) => {
            let text = format!(
                "{which}, compiled by GCC {}: builds of 2.28.9 to 2.29.2 by a GCC before 10 leak proxy slots on aarch64 (NVIDIA/nccl 2353)",
                library.oldest_gcc().unwrap_or(0)
            );
            findings.push(NCCL_BAD_BUILD.finding(text).cured_by(newer));
        }
        // These have findings of their own.
        None if numbers == NVLS_FAILS || numbers < OLDEST => {}
        None => {
            let text = format!("{which}: {}", of_version(numbers));
            findings.push(NCCL_UNKNOWN_BUILD.finding(text));
        }
    }
    if numbers == NVLS_FAILS && !job_facts.nvls_is_off {
        let text = format!("{which}: its NVLS fails on 2 to 8 Sparks (NVIDIA/nccl 2167)");
        findings.push(
            NCCL_NVLS
                .finding(text)
                .cured_by("export NCCL_NVLS_ENABLE=0"),
        );
    }
    if numbers < OLDEST {
        let text = format!("{which}: the plugin has interfaces from NCCL 2.20 on");
        findings.push(NCCL_TOO_OLD.finding(text).cured_by(newer));
    }
}

/// Returns the known facts about this version on Sparks. The interfaces need no warning here: the
/// plugin has the newest network and tuner interface of each NCCL from 2.27 to 2.32.3
/// (docs/evidence/nccl.md).
fn of_version(version: [u32; 3]) -> &'static str {
    match version {
        // Fixed in NCCL 2.32.3, which initialises the constants that it passes to tuners.
        [2, 31, _] => {
            "NVIDIA's playbook for Sparks builds 2.31.2; it hands tuners uninitialised constants, which the plugin's tuner does not read"
        }
        [2, 32, 3] => "the one report is of two Sparks that ran it (FujitsuPolycom/sparkring)",
        _ => "there are few reports of this build on Sparks, good or bad",
    }
}

/// Returns true if a library leaks proxy slots: an affected version, built for Arm by a GCC older
/// than 10. The sources of 2.29.3 have a fix, so NVIDIA's wheel of 2.29.3 does not leak, although
/// the same compilers built it.
fn leaks(library: &Library, version: [u32; 3]) -> bool {
    let is_affected = ([2, 28, 9]..=[2, 29, 2]).contains(&version);
    is_affected && library.is_aarch64 && library.oldest_gcc().is_some_and(|major| major < 10)
}

fn short(library: &Library) -> &str {
    match library.build_id.get(..16) {
        Some(start) => start,
        None if library.build_id.is_empty() => "none",
        None => &library.build_id,
    }
}

/// Finds a process with several NCCLs. Also finds the variables that can load a second or an
/// unexpected NCCL: `LD_PRELOAD` and `VLLM_NCCL_SO_PATH`.
fn several_nccls(found: &Libraries, findings: &mut Vec<Finding>) {
    let [first, rest @ ..] = &found.nccl[..] else {
        return;
    };
    let forced = found
        .nccl
        .iter()
        .any(|file| file.by.contains("LD_PRELOAD") || file.by.contains("VLLM_NCCL_SO_PATH"));
    if rest.is_empty() || (found.process.is_none() && !forced) {
        return;
    }
    let names: Vec<String> = found
        .nccl
        .iter()
        .map(|file| format!("{} ({})", file.path.display(), file.by))
        .collect();
    let (severity, what) = match &found.process {
        Some(process) => (
            Severity::Fragile,
            format!("process {} has several NCCLs loaded", process.pid),
        ),
        None => {
            let first = first.path.display();
            (
                Severity::Note,
                format!("variables choose the NCCL: {first} comes before the others"),
            )
        }
    };
    let text = format!("{what}: {}", names.join("; "));
    findings.push(
        NCCL_SEVERAL
            .finding(text)
            .at(severity)
            .cured_by("unset LD_PRELOAD VLLM_NCCL_SO_PATH"),
    );
}

fn plugin(found: &Libraries, job_facts: &JobFacts, findings: &mut Vec<Finding>) {
    let cure = format!("export NCCL_NET_PLUGIN={} NCCL_NET=Spark", job_facts.plugin);
    match (&found.plugin, &found.process) {
        (Some(plugin), _) if plugin.kind() == PluginKind::Ours => {}
        (Some(plugin), process) => {
            let whose = if plugin.kind() == PluginKind::HpcX {
                "HPC-X's"
            } else {
                "another"
            };
            let verb = if process.is_some() {
                "NCCL has loaded"
            } else {
                "NCCL loads"
            };
            let text = format!(
                "{verb} {whose} network plugin and not this one: {}",
                plugin.path.display()
            );
            findings.push(OTHER_PLUGIN.finding(text).cured_by(cure));
        }
        (None, Some(process)) if !found.nccl.is_empty() => {
            let text = format!(
                "process {} has NCCL loaded and no network plugin",
                process.pid
            );
            findings.push(PLUGIN_NOT_LOADED.finding(text).cured_by(cure));
        }
        (None, Some(process)) => {
            let text = format!(
                "process {} has not loaded NCCL (yet): try its parent or worker processes",
                process.pid
            );
            findings.push(
                NCCL_NOT_LOADED
                    .finding(text)
                    .cured_by(format!("pgrep -P {}", process.pid)),
            );
        }
        (None, None) => {}
    }
}

fn copies(found: &Libraries, findings: &mut Vec<Finding>) {
    let [first, rest @ ..] = &found.copies[..] else {
        return;
    };
    if rest.is_empty() {
        return;
    }
    let differ = rest
        .iter()
        .any(|other| other.library.build_id != first.library.build_id);
    let names: Vec<String> = found
        .copies
        .iter()
        .map(|copy| copy.path.display().to_string())
        .collect();
    let (severity, what) = match differ {
        true => (
            Severity::Fragile,
            "copies of this plugin are of different builds, and which one is used depends on the loader",
        ),
        false => (Severity::Note, "copies of this plugin are of one build"),
    };
    let text = format!("{} {what}: {}", names.len(), names.join(", "));
    findings.push(PLUGIN_COPIES.finding(text).at(severity).cured_by(
        "sudo nccl-spark uninstall    # keep one; of a package: apt remove, pip uninstall",
    ));
}

fn verbs(found: &Libraries, has_mlx5: bool, findings: &mut Vec<Finding>) {
    const INSTALL: &str =
        "sudo apt install libibverbs1 ibverbs-providers    # in a container: in its image";
    if found.verbs.is_none() {
        let text = "libibverbs.so.1 is not where the loader looks: the plugin does not start";
        findings.push(LIBIBVERBS.finding(text).cured_by(INSTALL));
    } else if has_mlx5 && found.mlx5_provider.is_none() {
        let text = "libibverbs has no provider for mlx5 (libmlx5-rdmav*.so): it shows none of the NIC's devices";
        findings.push(MLX5_PROVIDER.finding(text).cured_by(INSTALL));
    }
}

fn glibc(found: &Libraries, findings: &mut Vec<Finding>) {
    let plugin = found
        .plugin
        .iter()
        .filter(|plugin| plugin.kind() == PluginKind::Ours)
        .chain(&found.copies)
        .next();
    if let (Some(have), Some(plugin)) = (found.glibc, plugin)
        && let Some(need) = plugin.library.glibc.filter(|need| *need > have)
    {
        let path = plugin.path.display();
        let text = format!(
            "{path} needs glibc {}.{}, and {}.{} is here: NCCL cannot load it",
            need.0, need.1, have.0, have.1
        );
        let cure = "sudo apt install ./nccl-net-spark_*.deb    # a package needs glibc 2.28 alone";
        findings.push(GLIBC.finding(text).cured_by(cure));
    }
}

/// Each row plants one fault in a healthy machine: name, how, severity, id, words of the finding,
/// and a part of its commands.
#[cfg(test)]
pub mod faults {
    use crate::commands::doctor::tests::bed::{LIB, Object};
    use crate::commands::doctor::tests::faults::{faults, one, process, with};

    faults! {
        "libibverbs missing": with(one(), |bed| bed.remove(&format!("{LIB}/libibverbs.so.1"))) => Broken "libibverbs" ["libibverbs.so.1"] "libibverbs1";
        "mlx5's provider missing": with(one(), |bed| bed.remove(&format!("{LIB}/libibverbs/libmlx5-rdmav34.so"))) =>
            Broken "mlx5-provider" ["mlx5"] "ibverbs-providers";
        "NCCL 2.28.9 of NVIDIA's wheel, by its build id": with(one(), |bed| bed.object(&format!("{LIB}/libnccl.so.2"), &Object {
            text: "NCCL version 2.28.9+cuda13.0", build_id: "a7f420a15e47d481db802629159ebc51c94d89c9", ..Object::new()
        })) => Fragile "nccl-bad-build" ["2.28.9+cuda13.0", "a7f420a15e47d481", "2353"] "2.29.3";
        "NCCL 2.29.2 by GCC 8": with(one(), |bed| bed.object(&format!("{LIB}/libnccl.so.2"), &Object {
            text: "NCCL version 2.29.2+cuda13.0", compiler: "GCC: (GNU) 8.5.0 20210514 (Red Hat 8.5.0-21)", ..Object::new()
        })) => Fragile "nccl-bad-build" ["2.29.2", "GCC 8"] "2.29.3";
        "an NCCL with few reports from Sparks": with(one(), |bed| bed.object(&format!("{LIB}/libnccl.so.2"), &Object {
            text: "NCCL version 2.29.3+cuda13.1", compiler: "GCC: (GNU) 8.5.0 20210514 (Red Hat 8.5.0-21)", ..Object::new()
        })) => Note "nccl-unknown-build" ["2.29.3", "few reports of this build"] "";
        "NCCL 2.31.2": with(one(), |bed| bed.object(&format!("{LIB}/libnccl.so.2"), &Object {
            text: "NCCL version 2.31.2+cuda13.1", ..Object::new()
        })) => Note "nccl-unknown-build" ["2.31.2", "NVIDIA's playbook"] "";
        "NCCL 2.32.3": with(one(), |bed| bed.object(&format!("{LIB}/libnccl.so.2"), &Object {
            text: "NCCL version 2.32.3+cuda13.2", ..Object::new()
        })) => Note "nccl-unknown-build" ["2.32.3", "two Sparks"] "";
        "NCCL 2.30.4 with NVLS": with(one(), |bed| bed.object(&format!("{LIB}/libnccl.so.2"), &Object {
            text: "NCCL version 2.30.4+cuda13.1", ..Object::new()
        })) => Fragile "nccl-nvls" ["2.30.4", "2167"] "NCCL_NVLS_ENABLE=0";
        "a libnccl without a version": with(one(), |bed| bed.object(&format!("{LIB}/libnccl.so.2"), &Object {
            text: "nothing", build_id: "c0db9360000000000000000000000000000000dd", ..Object::new()
        })) => Note "nccl-unknown" ["libnccl.so.2"] "";
        "a libnccl that is no library": with(one(), |bed| bed.write(&format!("{LIB}/libnccl.so.2"), "\u{7f}ELF")) =>
            Note "nccl-unknown" ["libnccl.so.2"] "";
        "an NCCL that is too old": with(one(), |bed| bed.object(&format!("{LIB}/libnccl.so.2"), &Object {
            text: "NCCL version 2.18.5+cuda12.2", ..Object::new()
        })) => Broken "nccl-too-old" ["2.18.5"] "nvidia-nccl-cu13>=2.29.3";
        "a bad NCCL in PyTorch's own folder": with(one(), |bed| {
            bed.write("venv/bin/python3", "\u{7f}ELF");
            bed.write("venv/pyvenv.cfg", "home = /usr/bin\ninclude-system-site-packages = false\n");
            let site = "venv/lib/python3.12/site-packages";
            bed.object(&format!("{site}/torch/lib/libtorch_cuda.so"), &Object { rpath: Some("$ORIGIN/../../nvidia/nccl/lib"), ..Object::new() });
            bed.object(&format!("{site}/nvidia/nccl/lib/libnccl.so.2"), &Object {
                text: "NCCL version 2.28.9+cuda13.0", build_id: "a7f420a15e47d481db802629159ebc51c94d89c9", ..Object::new()
            });
            bed.request.python = Some("/venv/bin/python3".into());
        }) => Fragile "nccl-bad-build" ["PyTorch of /venv/bin/python3"] "pip install";
        "VLLM_NCCL_SO_PATH beside the system's NCCL": with(one(), |bed| {
            bed.object("opt/nccl/libnccl.so.2", &Object { text: "NCCL version 2.28.9+cuda13.0", build_id: "c0db9360000000000000000000000000000000ee", ..Object::new() });
            bed.set("VLLM_NCCL_SO_PATH", "/opt/nccl/libnccl.so.2");
        }) => Note "nccl-several" ["/opt/nccl/libnccl.so.2 (VLLM_NCCL_SO_PATH)"] "unset LD_PRELOAD VLLM_NCCL_SO_PATH";
        "HPC-X's plugin comes first": with(one(), |bed| {
            bed.object("opt/hpcx/nccl_rdma_sharp_plugin/lib/libnccl-net.so", &Object { text: "IBext_v10", ..Object::new() });
            bed.set("LD_LIBRARY_PATH", "/opt/hpcx/nccl_rdma_sharp_plugin/lib");
            bed.request.variables.retain(|(name, _)| !name.starts_with("NCCL_NET"));
        }) => Broken "other-plugin" ["HPC-X's", "/opt/hpcx/"] "NCCL_NET_PLUGIN=";
        "two builds of this plugin": with(one(), |bed| bed.object(&format!("{LIB}/libnccl-net-spark.so"), &Object {
            text: "spark-rails", build_id: "0000000000000000000000000000000000000002", ..Object::new()
        })) => Fragile "plugin-copies" ["/usr/local/lib/libnccl-net-spark.so", "aarch64-linux-gnu"] "uninstall";
        "a plugin that needs a newer glibc": with(one(), |bed| bed.object("usr/local/lib/libnccl-net-spark.so", &Object {
            text: "spark-rails", glibc: Some("2.41"), ..Object::new()
        })) => Broken "glibc" ["2.41", "2.39"] "deb";
        "a process that has HPC-X's plugin": with(process("/opt/hpcx/lib/libnccl-net.so"), |bed| {
            bed.object("opt/hpcx/lib/libnccl-net.so", &Object { text: "IBext_v10", ..Object::new() });
        }) => Broken "other-plugin" ["has loaded HPC-X's"] "NCCL_NET_PLUGIN=";
        "a process with NCCL and no plugin": process("/usr/bin/python3") => Broken "plugin-not-loaded" ["process 42"] "NCCL_NET_PLUGIN=";
        "a process that has not loaded NCCL": with(process("/usr/bin/python3"), |bed| {
            bed.write("proc/42/maps", "ffff80000000-ffff80001000 r-xp 00000000 08:01 77 /usr/bin/python3\n");
        }) => Note "nccl-not-loaded" ["process 42"] "pgrep -P 42";
    }
}
