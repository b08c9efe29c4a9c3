//! Examines a machine or process: reads its facts, judges them, and collects the results.

use super::finding::{Fact, Finding, NotSeen, Verdict};
use super::findings::variables::{self, Judged};
use super::findings::{self, JobFacts};
use super::hosts::PeerResult;
use super::look::silence::{self, Silence};
use super::look::variables::{Variable, known_variables, of_process, with_files};
use super::look::{self, Facts, Job, Libraries, Process};
use super::place::Place;
use super::show::picture;
use crate::commands::doctor::findings::variables::PLUGIN_NOT_NAMED;
use crate::places::{self, in_path};
use crate::unique::unique;
use host::rails::{CudaDevice, RailAddress, gbps, host_pointers_reason};
use serde::Serialize;
use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[derive(Debug, Clone, Default)]
pub struct Request {
    pub is_env_alone: bool,
    pub pid: Option<u32>,
    pub python: Option<PathBuf>,
    pub program: Option<PathBuf>,
    /// Time limit for the measurement of a silent peer, if that is wanted.
    pub silence_limit: Option<Duration>,
    pub own_program: PathBuf,
    pub variables: Vec<(String, String)>,
}

#[derive(Debug, Clone, Default, Serialize)]
pub struct Answer {
    /// Version of this JSON. It increases when a field is removed or changes its meaning.
    pub schema: u32,
    pub verdict: Verdict,
    pub findings: Vec<Finding>,
    pub variables: Vec<Judged>,
    pub not_seen: Vec<NotSeen>,
    pub facts: Vec<Fact>,
    pub picture: Vec<String>,
    /// Each rail's time to report a silent peer, with `--silence`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub silence: Option<Silence>,
    /// Results for both hosts, with `--peer`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<PeerResult>,
}

#[derive(Debug)]
pub struct Examined {
    pub facts: Facts,
    pub libraries: Libraries,
    pub variables: Vec<Variable>,
}

impl Answer {
    /// Drops findings that another one explains, sorts the others (worst first), removes
    /// duplicates, and sets the verdict.
    pub fn settle(&mut self) {
        self.schema = 1;
        findings::take_in(&mut self.findings);
        self.findings.sort_by_key(|finding| finding.severity);
        self.findings = unique(std::mem::take(&mut self.findings));
        let own = Verdict::of(&self.findings);
        self.verdict = self.peer.as_ref().map_or(own, |peer| own.max(peer.verdict));
    }
}

/// Path of the plugin after `nccl-spark install`. Cures name this path if no plugin is found that
/// belongs to this program.
const USUAL_PLUGIN: &str = "/usr/local/lib/libnccl-net-spark.so";

/// Examines a machine or process. Also returns the facts, except with `--env`.
///
/// # Errors
/// The process does not exist, or its environment cannot be read.
pub fn answer(place: &Place, request: Request) -> Result<(Answer, Option<Examined>), String> {
    let mut answer = Answer::default();
    let environment = match request.pid {
        Some(pid) => of_process(place, pid)
            .map_err(|error| format!("--pid {pid}: its environment cannot be read: {error}"))?,
        None => request.variables.clone(),
    };
    let inside = match request.pid.filter(|_| place.is_live()) {
        // The process sees the files of its container, which are below this folder.
        Some(pid) => Place::new(format!("/proc/{pid}/root")),
        None => place.clone(),
    };
    let home = environment
        .iter()
        .find(|(name, _)| name == "HOME")
        .map(|(_, value)| value.as_str());
    let variables = with_files(known_variables(&environment), home, &inside);
    let own_plugin = places::plugin(&request.own_program);
    let plugin = own_plugin
        .as_ref()
        .map_or(USUAL_PLUGIN.to_owned(), |path| path.display().to_string());
    let verdicts = variables::judge(&variables, &plugin, &|path| inside.missing_reason(path));
    answer.variables = verdicts.variables;
    answer.findings = verdicts.findings;
    let examined = (!request.is_env_alone).then(|| {
        let job = JobVariables {
            environment: &environment,
            known: &variables,
        };
        let (facts, libraries) = examine(
            place,
            &inside,
            request,
            &job,
            plugin,
            own_plugin,
            &mut answer,
        );
        Examined {
            facts,
            libraries,
            variables: variables.clone(),
        }
    });
    for cure in answer
        .findings
        .iter_mut()
        .filter_map(|finding| finding.cure.as_mut())
    {
        *cure = variables::at_its_source(cure, &variables);
    }
    answer.settle();
    Ok((answer, examined))
}

/// The variables of a job: those of its environment, and those that NCCL knows, also from files.
struct JobVariables<'a> {
    environment: &'a [(String, String)],
    known: &'a [Variable],
}

impl JobVariables<'_> {
    fn value(&self, name: &str) -> Option<String> {
        let environment = || {
            let mut all = self.environment.iter();
            all.find(|(known, _)| known == name)
                .map(|(_, value)| value.clone())
        };
        let known = self.known.iter().find(|one| one.name == name);
        known
            .map(|one| one.value.trim().to_owned())
            .or_else(environment)
    }

    fn filled(&self, name: &str) -> Option<String> {
        self.value(name).filter(|value| !value.is_empty())
    }
}

/// Reads and judges the machine and the job's libraries. `inside` has the files that the job sees.
fn examine(
    place: &Place,
    inside: &Place,
    request: Request,
    variables: &JobVariables,
    plugin: String,
    own_plugin: Option<PathBuf>,
    answer: &mut Answer,
) -> (Facts, Libraries) {
    let job_facts = JobFacts {
        plugin,
        nvls_is_off: variables.filled("NCCL_NVLS_ENABLE").as_deref() == Some("0"),
        proxy_cpus: variables.filled("NCCL_PROXY_CPUSET"),
        socket_interfaces: variables.filled("NCCL_SOCKET_IFNAME"),
        gloo_interfaces: variables.filled("GLOO_SOCKET_IFNAME"),
    };
    if let Some(pid) = request.pid {
        answer.not_seen.extend(other_network(place, pid));
    }
    let facts = look::facts(place, request.pid, variables.known, &mut answer.not_seen);
    answer
        .findings
        .extend(findings::machine(&facts, &job_facts));
    answer.silence = request.silence_limit.and_then(|limit| {
        let not_seen = &mut answer.not_seen;
        silence::silence(place, variables.known, &facts.survey, limit, not_seen)
    });
    if let Some(silence) = &answer.silence {
        answer.findings.extend(findings::silence(silence));
    }
    let value = |name: &str| variables.value(name);
    let python = request.python.or_else(|| python_in_path(inside, &value));
    if request.pid.is_none() && request.program.is_none() && python.is_none() {
        answer.not_seen.push(NotSeen::new(
            "the libnccl that Python would load",
            "PATH has no python3",
        ));
    }
    let process = request
        .pid
        .and_then(|pid| mapped(inside, pid, &mut answer.not_seen));
    let job = Job {
        value: &value,
        python,
        program: request.program,
        own_plugin,
        process,
    };
    let libraries = look::libraries(inside, job, &mut answer.not_seen);
    let has_mlx5 = facts
        .functions
        .iter()
        .any(|function| function.is_mellanox());
    answer
        .findings
        .extend(findings::libraries(&libraries, &job_facts, has_mlx5));
    drop_redundant(&libraries, &mut answer.findings);
    answer.picture = picture::picture(&facts.survey);
    answer.facts = facts_to_show(&facts, &libraries);
    (facts, libraries)
}

/// Reads the files that process `pid` has mapped. A container's `/proc`, below `/proc/N/root`, may
/// have other process numbers, so the doctor's own `/proc` is read.
fn mapped(place: &Place, pid: u32, not_seen: &mut Vec<NotSeen>) -> Option<Process> {
    let is_container = place.path("/").starts_with("/proc/");
    let place = if is_container {
        Place::new("/")
    } else {
        place.clone()
    };
    let why = |error: std::io::Error| {
        NotSeen::new(format!("what process {pid} has loaded"), error.to_string())
    };
    Process::read(&place, pid)
        .map_err(|error| not_seen.push(why(error)))
        .ok()
}

/// Returns a [`NotSeen`] if the process is in another network namespace, so that the doctor cannot
/// see its network interfaces.
fn other_network(place: &Place, pid: u32) -> Option<NotSeen> {
    let namespace =
        |process: &str| std::fs::read_link(place.path(format!("/proc/{process}/ns/net"))).ok();
    let own = namespace("self");
    let its = namespace(&pid.to_string());
    let what = format!("the network interfaces of process {pid}: those of this shell are judged");
    let why = "it is in another network namespace: run nccl-spark doctor in its container";
    (own != its).then(|| NotSeen::new(what, why))
}

fn python_in_path(place: &Place, value: &dyn Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let own = value("VIRTUAL_ENV")
        .map(|folder| format!("{folder}/bin"))
        .into_iter();
    let folders: Vec<String> = own.chain(value("PATH")).collect();
    in_path("python3", &folders.join(":"), |file| place.has(file))
}

/// Drops `plugin-not-named` if NCCL finds the plugin without a variable.
fn drop_redundant(libraries: &Libraries, findings: &mut Vec<Finding>) {
    let plugin = libraries.plugin.as_ref();
    if plugin.is_some_and(|plugin| plugin.kind() == look::PluginKind::Ours) {
        findings.retain(|finding| finding.id != PLUGIN_NOT_NAMED.id);
    }
}

fn facts_to_show(facts: &Facts, libraries: &Libraries) -> Vec<Fact> {
    let mut shown = facts_of_machine(facts);
    shown.extend(facts_of_libraries(libraries));
    let functions = facts.functions.iter();
    shown.extend(functions.map(|one| Fact::new(&one.device, of_function(one, facts))));
    shown.extend(facts.ports.iter().filter_map(|port| {
        let errors = pcie_errors(port.aer?);
        Some(Fact::new(format!("PCIe port {}", port.address), errors))
    }));
    shown
}

fn facts_of_machine(facts: &Facts) -> Vec<Fact> {
    let machine = &facts.machine;
    let memory = |limit: u64, pinned: u64| {
        let limit = if limit == u64::MAX {
            "unlimited".to_owned()
        } else {
            format!("{} MiB", limit >> 20)
        };
        format!(
            "{limit}; all processes have pinned {} MiB now",
            pinned >> 20
        )
    };
    let has_peermem = machine
        .modules
        .iter()
        .any(|module| module == "nvidia_peermem");
    let deepest = machine.cpus.deepest_idle();
    let all = [
        ("machine", machine.product.clone()),
        ("BIOS", machine.bios.clone()),
        ("kernel", machine.kernel.clone()),
        ("container", machine.container.map(str::to_owned)),
        (
            "locked memory",
            machine
                .memlock_bytes
                .map(|limit| memory(limit, machine.pinned_bytes)),
        ),
        ("hotplug handler", machine.hotplug_state.clone()),
        (
            "CUDA",
            facts
                .cuda
                .is_ok()
                .then(|| host_pointers_reason(&facts.cuda)),
        ),
        (
            "symmetric memory, GIN and RMA",
            facts
                .cuda
                .as_deref()
                .ok()
                .and_then(without_vmm_rdma)
                .map(str::to_owned),
        ),
        (
            "nvidia-peermem",
            Some(
                if has_peermem {
                    "loaded"
                } else {
                    "not loaded, as expected"
                }
                .to_owned(),
            ),
        ),
        (
            "deepest idle state",
            deepest.map(|state| format!("{}, {} us to leave", state.name, state.latency_us)),
        ),
        (
            "processors allowed",
            Some(machine.cpus.allowed.len())
                .filter(|count| *count > 0)
                .map(|count| count.to_string()),
        ),
    ];
    all.into_iter().filter_map(named).collect()
}

fn named((name, value): (&str, Option<String>)) -> Option<Fact> {
    Some(Fact::new(name, value?))
}

fn facts_of_libraries(libraries: &Libraries) -> Vec<Fact> {
    let path = |path: &Path| path.display().to_string();
    let nccl = libraries.nccl.iter().filter_map(|file| {
        let library = file.library.as_ref().ok()?;
        let version = library
            .nccl_version()
            .map_or("unknown".to_owned(), |(version, _)| version);
        let compilers = library.compilers.join("; ");
        let text = format!(
            "{version}, build id {}, {compilers}, for {}",
            library.build_id, file.by
        );
        Some(Fact::new(path(&file.path), text))
    });
    let of_libraries = [
        (
            "network plugin",
            libraries.plugin.as_ref().map(|plugin| path(&plugin.path)),
        ),
        ("libibverbs", libraries.verbs.as_deref().map(path)),
        (
            "mlx5 provider",
            libraries.mlx5_provider.as_deref().map(path),
        ),
        (
            "glibc",
            libraries
                .glibc
                .map(|(major, minor)| format!("{major}.{minor}")),
        ),
    ];
    nccl.chain(of_libraries.into_iter().filter_map(named))
        .collect()
}

/// Returns the reason why NCCL uses neither symmetric memory nor its device-side network functions.
/// Returns `None` if no GPU keeps NCCL from using them.
fn without_vmm_rdma(gpus: &[CudaDevice]) -> Option<&'static str> {
    let is_without = gpus.iter().any(|gpu| gpu.has_vmm_rdma == Some(false));
    is_without.then_some(
        "NCCL leaves them off: GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED=0, as on every Spark",
    )
}

fn of_function(function: &look::Function, facts: &Facts) -> String {
    let survey = &facts.survey;
    let qos = facts
        .qos
        .rails
        .iter()
        .find(|qos| qos.device == function.device);
    let ecn = facts
        .qos
        .ecn
        .iter()
        .find(|(netdev, _)| Some(netdev) == function.netdev.as_ref());
    let pci = function.pci.as_ref();
    let rail = survey
        .rails
        .iter()
        .find(|rail| rail.device == function.device);
    let refused = survey
        .refused
        .iter()
        .find(|one| one.device == function.device);
    let parts = [
        Some(refused.map_or("rail".to_owned(), |refused| {
            format!("not used: {}", refused.obstacle)
        })),
        rail.map(|rail| format!("cable {}", survey.cable_name(rail))),
        refused
            .and_then(|one| one.phys_port.as_ref())
            .map(|port| format!("port {port}")),
        rail.map(|rail| gbps(rail.speed_mbps)),
        rail.map(|rail| format!("path MTU {}", rail.path_mtu_bytes)),
        rail.map(|rail| addresses(&rail.addresses)),
        function
            .firmware
            .as_ref()
            .map(|version| format!("firmware {version}")),
        function.board.clone(),
        pci.and_then(|pci| pci.current).map(|rate| rate.to_string()),
        pci.and_then(|pci| pci.max_payload_bytes)
            .map(|bytes| format!("MaxPayload {bytes} B")),
        pci.and_then(|pci| pci.max_read_request_bytes)
            .map(|bytes| format!("MaxReadReq {bytes} B")),
        function.iommu.as_ref().map(|mode| format!("IOMMU {mode}")),
        function.mtu_bytes.map(|bytes| format!("MTU {bytes}")),
        function
            .pause
            .map(|pause| format!("pause rx {} tx {}", on(pause.rx), on(pause.tx))),
        qos.map(|qos| qos.port.text(facts.qos.roce)),
        ecn.map(|(_, [np, rp])| {
            format!(
                "ECN of that priority: receiver {}, sender {}",
                on(*np),
                on(*rp)
            )
        }),
        Some(counted(function)).filter(|text| !text.is_empty()),
        function.aer.map(pcie_errors),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn addresses(all: &[RailAddress]) -> String {
    let text = |one: &RailAddress| {
        let address = Ipv6Addr::from(one.gid).to_canonical();
        format!("{address} (GID {})", one.gid_index)
    };
    all.iter().map(text).collect::<Vec<_>>().join(" ")
}

/// Lists the port's counters that are not 0 and do not count traffic.
fn counted(function: &look::Function) -> String {
    let counted = function
        .counters
        .iter()
        .filter(|(name, value)| **value > 0 && !is_traffic(name));
    let texts: Vec<String> = counted
        .map(|(name, value)| format!("{name} {value}"))
        .collect();
    texts.join(" ")
}

fn pcie_errors(aer: look::PcieErrorCounts) -> String {
    format!(
        "PCIe errors {} corrected, {} not",
        aer.correctable,
        aer.nonfatal + aer.fatal
    )
}

fn is_traffic(name: &str) -> bool {
    let starts = [
        "port_xmit_data",
        "port_rcv_data",
        "unicast",
        "multicast",
        "rx_write",
        "rx_read",
        "rx_atomic",
        "lifespan",
    ];
    name.ends_with("packets") || starts.iter().any(|start| name.starts_with(start))
}

fn on(is_on: bool) -> &'static str {
    if is_on { "on" } else { "off" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::finding::Severity;
    use crate::commands::doctor::findings::rails::NO_RAIL;

    #[test]
    fn the_worst_finding_is_first_and_none_is_repeated() {
        let find = |severity| NO_RAIL.finding(format!("{severity:?}")).at(severity);
        let mut answer = Answer {
            findings: [
                Severity::Note,
                Severity::Fragile,
                Severity::Broken,
                Severity::Slow,
                Severity::Note,
            ]
            .map(find)
            .into(),
            ..Answer::default()
        };
        answer.settle();
        let order: Vec<_> = answer
            .findings
            .iter()
            .map(|finding| finding.severity)
            .collect();
        assert_eq!(
            order,
            [
                Severity::Broken,
                Severity::Slow,
                Severity::Fragile,
                Severity::Note
            ]
        );
        assert_eq!((answer.verdict, answer.schema), (Verdict::Broken, 1));
    }
}
