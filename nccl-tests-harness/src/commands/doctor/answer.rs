//! From what was asked to the answer: which variables count, what is looked at, what it amounts to.

use super::environment::{self, Judged, Variable};
use super::finding::{Fact, Finding, NotSeen, Verdict};
use super::id::Id;
use super::judge::{self, Cures};
use super::look::{self, Facts, Libraries, Loaded, Process};
use super::picture;
use super::place::Place;
use super::together::Together;
use crate::places;
use nccl_net_spark::rails::{RailAddress, Survey, gbps, host_pointers_reason};
use serde::Serialize;
use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};

/// What the doctor was asked.
#[derive(Debug, Clone, Default)]
pub struct Asked {
    /// The variables alone.
    pub is_env_alone: bool,
    /// A running process.
    pub pid: Option<u32>,
    /// A Python.
    pub python: Option<PathBuf>,
    /// A program.
    pub program: Option<PathBuf>,
    /// This program's file, beside which the plugin is.
    pub own_program: PathBuf,
    /// This process's environment.
    pub variables: Vec<(String, String)>,
}

/// The answer, as JSON has it.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Answer {
    /// The form of this document; it grows when a field changes its meaning or goes away.
    pub schema: u32,
    /// What the exit status says.
    pub verdict: Verdict,
    /// The worst first.
    pub findings: Vec<Finding>,
    /// What becomes of each variable that is set.
    pub variables: Vec<Judged>,
    /// What could not be seen.
    pub not_seen: Vec<NotSeen>,
    /// What was read.
    pub facts: Vec<Fact>,
    /// The rails as a picture, line by line.
    pub picture: Vec<String>,
    /// What was found together with a peer, where one was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<Together>,
}

/// What an answer was judged by.
#[derive(Debug)]
pub struct Seen {
    /// The machine.
    pub facts: Facts,
    /// The libraries.
    pub libraries: Libraries,
    /// The variables that count.
    pub variables: Vec<Variable>,
}

impl Answer {
    /// Puts the worst first, findings of one severity in the order in which they were found, each once.
    pub fn settle(&mut self) {
        self.schema = 1;
        let mut kept: Vec<Finding> = Vec::new();
        for finding in self.findings.drain(..) {
            if !kept.contains(&finding) {
                kept.push(finding);
            }
        }
        kept.sort_by_key(|finding| finding.severity);
        self.findings = kept;
        let own = Verdict::of(&self.findings);
        self.verdict = self.peer.as_ref().map_or(own, |peer| own.max(peer.verdict));
    }
}

/// Where `nccl-spark install` puts the plugin, for cures on a machine without one.
const USUAL_PLUGIN: &str = "/usr/local/lib/libnccl-net-spark.so";

/// Looks and judges. What was seen comes with the answer, unless the variables alone were asked for.
///
/// # Errors
/// When there is no such process, or what it was started with cannot be read: nothing could be said of it then.
pub fn answer(place: &Place, asked: Asked) -> Result<(Answer, Option<Seen>), String> {
    let mut answer = Answer::default();
    let mut seen = None;
    let environment = match asked.pid {
        Some(pid) => environment::of_process(place, pid)
            .map_err(|error| format!("--pid {pid}: its environment cannot be read: {error}"))?,
        None => asked.variables.clone(),
    };
    let value = |name: &str| environment.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
    let inside = match asked.pid.filter(|_| place.is_live()) {
        // Its files are those of its container.
        Some(pid) => Place::new(format!("/proc/{pid}/root")),
        None => place.clone(),
    };
    let variables = environment::with_files(environment::passing(&environment), value("HOME").as_deref(), &inside);
    let own_plugin = places::plugin(&asked.own_program);
    let plugin = own_plugin.as_ref().map_or(USUAL_PLUGIN.to_owned(), |path| path.display().to_string());
    let verdicts = environment::judge(&variables, &plugin, &|path| inside.lack(path));
    answer.variables = verdicts.variables;
    answer.findings = verdicts.findings;
    if !asked.is_env_alone {
        let cures = cures(&variables, plugin);
        if let Some(pid) = asked.pid {
            answer.not_seen.extend(other_network(place, pid));
        }
        let facts = look::facts(place, asked.pid, &variables, &mut answer.not_seen);
        answer.findings.extend(judge::machine(&facts, &cures));
        let loaded = loaded(&inside, &asked, &variables, &value, own_plugin, &mut answer.not_seen);
        let libraries = look::libraries(&inside, &loaded, &mut answer.not_seen);
        let has_mlx5 = facts.functions.iter().any(|function| function.vendor.as_deref() == Some("0x15b3"));
        answer.findings.extend(judge::libraries(&libraries, &cures, has_mlx5));
        plugin_after_all(&libraries, &mut answer.findings);
        answer.picture = picture::picture(&facts.survey);
        answer.facts = facts_to_show(&facts, &libraries);
        seen = Some(Seen { facts, libraries, variables });
    }
    answer.settle();
    Ok((answer, seen))
}

fn cures(variables: &[Variable], plugin: String) -> Cures {
    let value = |name: &str| {
        let found = variables.iter().find(|one| one.name == name).map(|one| one.value.trim().to_owned());
        found.filter(|value| !value.is_empty())
    };
    Cures {
        plugin,
        nvls_is_off: value("NCCL_NVLS_ENABLE").as_deref() == Some("0"),
        proxy_cpus: value("NCCL_PROXY_CPUSET"),
        socket_interfaces: value("NCCL_SOCKET_IFNAME"),
    }
}

fn loaded(
    place: &Place,
    asked: &Asked,
    variables: &[Variable],
    value: &dyn Fn(&str) -> Option<String>,
    own_plugin: Option<PathBuf>,
    not_seen: &mut Vec<NotSeen>,
) -> Loaded {
    let set = |name: &str| variables.iter().find(|one| one.name == name).map(|one| one.value.trim().to_owned());
    let process = asked.pid.and_then(|pid| {
        let read = if place.is_live() { Process::read(place, pid) } else { Process::read(&outside(place), pid) };
        let why =
            |error: std::io::Error| NotSeen { what: format!("what process {pid} has loaded"), why: error.to_string() };
        read.map_err(|error| not_seen.push(why(error))).ok()
    });
    let python = asked.python.clone().or_else(|| python_in_path(place, value));
    if asked.pid.is_none() && asked.program.is_none() && python.is_none() {
        not_seen.push(NotSeen {
            what: "the libnccl that Python would load".to_owned(),
            why: "PATH has no python3".to_owned(),
        });
    }
    Loaded {
        library_path: value("LD_LIBRARY_PATH").unwrap_or_default(),
        preload: value("LD_PRELOAD").unwrap_or_default(),
        vllm_nccl: value("VLLM_NCCL_SO_PATH").filter(|path| !path.is_empty()),
        net_plugin: set("NCCL_NET_PLUGIN"),
        verbs_library: set("NCCL_IBVERBS_LIB")
            .filter(|name| !name.is_empty())
            .unwrap_or_else(|| "libibverbs.so.1".to_owned()),
        home: value("HOME"),
        python,
        program: asked.program.clone(),
        own_plugin,
        process,
    }
}

/// The interfaces and devices that are judged are those that this process sees.
fn other_network(place: &Place, pid: u32) -> Option<NotSeen> {
    let namespace = |process: &str| std::fs::read_link(place.path(format!("/proc/{process}/ns/net"))).ok();
    let (own, its) = (namespace("self"), namespace(&pid.to_string()));
    (own != its).then(|| NotSeen {
        what: format!("the network interfaces of process {pid}: those of this shell are judged"),
        why: "it is in another network namespace: run nccl-spark doctor in its container".to_owned(),
    })
}

/// Below `/proc/N/root` there need be no `/proc` of this namespace.
fn outside(place: &Place) -> Place {
    if place.path("/").starts_with("/proc/") { Place::new("/") } else { place.clone() }
}

/// The virtual environment's, or the first in PATH.
fn python_in_path(place: &Place, value: &dyn Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let own = value("VIRTUAL_ENV").map(|folder| Path::new(&folder).join("bin"));
    let path = value("PATH").unwrap_or_default();
    let folders = own.into_iter().chain(path.split(':').filter(|folder| !folder.is_empty()).map(PathBuf::from));
    folders.map(|folder| folder.join("python3")).find(|python| place.has(python))
}

/// "No variable names it" is no finding where the plugin is what NCCL finds.
fn plugin_after_all(libraries: &Libraries, findings: &mut Vec<Finding>) {
    if libraries.plugin.as_ref().is_some_and(|plugin| plugin.kind == look::PluginKind::Ours) {
        findings.retain(|finding| finding.id != Id::PluginNotNamed.text());
    }
    // What a variable does is said once, where it is known which file it names.
    if findings.iter().any(|finding| finding.id == Id::PluginKeptOut.text()) {
        findings.retain(|finding| finding.id != Id::OtherPlugin.text());
    }
}

fn facts_to_show(facts: &Facts, libraries: &Libraries) -> Vec<Fact> {
    let machine = &facts.machine;
    let mut shown = Vec::new();
    let mut add = |name: &str, value: Option<String>| shown.extend(value.map(|value| Fact::new(name, value)));
    add("machine", machine.product.clone());
    add("BIOS", machine.bios.clone());
    add("kernel", machine.kernel.clone());
    add("container", machine.container.map(str::to_owned));
    let limit = |bytes: u64| if bytes == u64::MAX { "unlimited".to_owned() } else { format!("{} MiB", bytes >> 20) };
    add("locked memory", machine.memlock_bytes.map(limit));
    add("hotplug handler", machine.hotplug_state.clone());
    add("CUDA", facts.cuda.is_ok().then(|| host_pointers_reason(&facts.cuda)));
    let peermem = machine.modules.iter().any(|module| module == "nvidia_peermem");
    add("nvidia-peermem", Some(if peermem { "loaded" } else { "not loaded, as expected" }.to_owned()));
    let deepest = machine.cpus.idle.iter().filter(|state| state.is_enabled).max_by_key(|state| state.latency_us);
    add("deepest idle state", deepest.map(|state| format!("{}, {} us to leave", state.name, state.latency_us)));
    add(
        "processors allowed",
        Some(machine.cpus.allowed.len()).filter(|count| *count > 0).map(|count| count.to_string()),
    );
    for file in &libraries.nccl {
        if let Ok(library) = &file.library {
            let version = library.nccl_version().map_or("unknown".to_owned(), |(version, _)| version);
            let compilers = library.compilers.join("; ");
            let text = format!("{version}, build id {}, {compilers}, for {}", library.build_id, file.by);
            add(&file.path.display().to_string(), Some(text));
        }
    }
    add("network plugin", libraries.plugin.as_ref().map(|plugin| plugin.path.display().to_string()));
    add("libibverbs", libraries.verbs.as_ref().map(|path| path.display().to_string()));
    add("mlx5 provider", libraries.mlx5_provider.as_ref().map(|path| path.display().to_string()));
    add("glibc", libraries.glibc.map(|(major, minor)| format!("{major}.{minor}")));
    for function in &facts.functions {
        add(&function.device, Some(of_function(function, &facts.survey)));
    }
    for port in &facts.ports {
        add(&format!("PCIe port {}", port.address), port.aer.map(pcie_errors));
    }
    shown
}

fn of_function(function: &look::Function, survey: &Survey) -> String {
    let pci = function.pci.as_ref();
    let rail = survey.rails.iter().find(|rail| rail.device == function.device);
    let address = |one: &RailAddress| format!("{} (GID {})", Ipv6Addr::from(one.gid).to_canonical(), one.gid_index);
    let refused = survey.refused.iter().find(|one| one.device == function.device);
    let parts = [
        Some(refused.map_or("rail".to_owned(), |refused| format!("not used: {}", refused.reason))),
        rail.map(|rail| format!("cable {}", survey.cable_name(rail))),
        refused.and_then(|one| one.phys_port.as_ref()).map(|port| format!("port {port}")),
        rail.map(|rail| gbps(rail.speed_mbps)),
        rail.map(|rail| format!("path MTU {}", rail.path_mtu_bytes)),
        rail.map(|rail| rail.addresses.iter().map(address).collect::<Vec<_>>().join(" ")),
        function.firmware.as_ref().map(|version| format!("firmware {version}")),
        function.board.clone(),
        pci.and_then(|pci| pci.current).map(|rate| rate.to_string()),
        pci.and_then(|pci| pci.max_payload_bytes).map(|bytes| format!("MaxPayload {bytes} B")),
        pci.and_then(|pci| pci.max_read_request_bytes).map(|bytes| format!("MaxReadReq {bytes} B")),
        function.iommu.as_ref().map(|mode| format!("IOMMU {mode}")),
        function.mtu_bytes.map(|bytes| format!("MTU {bytes}")),
        function.pause.map(|pause| format!("pause rx {} tx {}", on(pause.rx), on(pause.tx))),
        {
            let counted = function.counters.iter().filter(|(name, value)| **value > 0 && !is_traffic(name));
            let counted: Vec<String> = counted.map(|(name, value)| format!("{name} {value}")).collect();
            Some(counted.join(" ")).filter(|text| !text.is_empty())
        },
        function.aer.map(pcie_errors),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn pcie_errors(aer: look::Aer) -> String {
    format!("PCIe errors {} corrected, {} not", aer.correctable, aer.nonfatal + aer.fatal)
}

/// Counters that say how much was carried, and not what went wrong.
fn is_traffic(name: &str) -> bool {
    let starts =
        ["port_xmit_data", "port_rcv_data", "unicast", "multicast", "rx_write", "rx_read", "rx_atomic", "lifespan"];
    name.ends_with("packets") || starts.iter().any(|start| name.starts_with(start))
}

fn on(is_on: bool) -> &'static str {
    if is_on { "on" } else { "off" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::finding::Severity;

    #[test]
    fn the_worst_comes_first_and_nothing_twice() {
        let find = |severity| Finding::new(severity, Id::NoRail, format!("{severity:?}"));
        let mut answer = Answer {
            findings: [Severity::Note, Severity::Fragile, Severity::Broken, Severity::Slow, Severity::Note]
                .map(find)
                .into(),
            ..Answer::default()
        };
        answer.settle();
        let order: Vec<_> = answer.findings.iter().map(|finding| finding.severity).collect();
        assert_eq!(order, [Severity::Broken, Severity::Slow, Severity::Fragile, Severity::Note]);
        assert_eq!((answer.verdict, answer.schema), (Verdict::Broken, 1));
    }
}
