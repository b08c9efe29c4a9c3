//! Findings about the libraries of a job: builds of NCCL, network plugins, libibverbs, glibc.

use super::cures::JobFacts;
use crate::commands::doctor::finding::{Finding, Severity};
use crate::commands::doctor::id::Id;
use crate::commands::doctor::look::{Libraries, Library, NcclFile, PluginKind};

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

fn nccl(file: &NcclFile, job_facts: &JobFacts, findings: &mut Vec<Finding>) {
    let path = file.path.display();
    let library = match &file.library {
        Ok(library) => library,
        Err(why) => {
            let text = format!("{path} ({}) cannot be read: {why}", file.by);
            findings.push(Id::NcclUnreadable.finding(text));
            return;
        }
    };
    let Some((version, numbers)) = library.nccl_version() else {
        let text = format!("{path} ({}) does not say which NCCL it is", file.by);
        findings.push(Id::NcclUnknown.finding(text));
        return;
    };
    let told = format!(
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
                "{told}: it leaks proxy slots on aarch64, and jobs stop after a while (NVIDIA/nccl 2353)"
            );
            findings.push(Id::NcclBadBuild.finding(text).cured_by(newer));
        }
        None if leaks(library, numbers) => {
            let text = format!(
                "{told}, compiled by GCC {}: builds of 2.28.9 to 2.29.2 by a GCC before 10 leak proxy slots on aarch64 (NVIDIA/nccl 2353)",
                library.oldest_gcc().unwrap_or(0)
            );
            findings.push(Id::NcclBadBuild.finding(text).cured_by(newer));
        }
        None => {
            let text = format!("{told}: {}", of_version(numbers));
            findings.push(Id::NcclUnknownBuild.finding(text));
        }
    }
    if numbers == [2, 30, 4] && !job_facts.nvls_is_off {
        let text = format!("{told}: its NVLS fails on 2 to 8 Sparks (NVIDIA/nccl 2167)");
        findings.push(
            Id::NcclNvls
                .finding(text)
                .cured_by("export NCCL_NVLS_ENABLE=0"),
        );
    }
    if numbers < [2, 20, 0] {
        let text = format!("{told}: the plugin has interfaces from NCCL 2.20 on");
        findings.push(Id::NcclTooOld.finding(text).cured_by(newer));
    }
}

/// Returns the known facts about this version on Sparks. The interfaces need no warning here: the
/// plugin has the newest network and tuner interface of each NCCL from 2.27 to 2.32.3
/// (docs/evidence/nccl.md).
fn of_version(version: [u32; 3]) -> &'static str {
    match version {
        // Fixed in NCCL 2.32.3, which initialises the constants that it passes to tuners.
        [2, 31, _] => {
            "it has few reports from Sparks; it hands tuners uninitialised constants, which the plugin's tuner does not read"
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
        Id::NcclSeveral
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
            findings.push(Id::OtherPlugin.finding(text).cured_by(cure));
        }
        (None, Some(process)) if !found.nccl.is_empty() => {
            let text = format!(
                "process {} has NCCL loaded and no network plugin",
                process.pid
            );
            findings.push(Id::PluginNotLoaded.finding(text).cured_by(cure));
        }
        (None, Some(process)) => {
            let text = format!(
                "process {} has not loaded NCCL (yet): try its parent or worker processes",
                process.pid
            );
            findings.push(
                Id::NcclNotLoaded
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
    findings.push(Id::PluginCopies.finding(text).at(severity).cured_by(
        "sudo nccl-spark uninstall    # keep one; of a package: apt remove, pip uninstall",
    ));
}

fn verbs(found: &Libraries, has_mlx5: bool, findings: &mut Vec<Finding>) {
    const INSTALL: &str =
        "sudo apt install libibverbs1 ibverbs-providers    # in a container: in its image";
    if found.verbs.is_none() {
        let text = "libibverbs.so.1 is not where the loader looks: the plugin does not start";
        findings.push(Id::Libibverbs.finding(text).cured_by(INSTALL));
    } else if has_mlx5 && found.mlx5_provider.is_none() {
        let text = "libibverbs has no provider for mlx5 (libmlx5-rdmav*.so): it shows none of the NIC's devices";
        findings.push(Id::Mlx5Provider.finding(text).cured_by(INSTALL));
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
        findings.push(Id::Glibc.finding(text).cured_by(cure));
    }
}
