//! Reads this machine as JSON. `facts` then keeps only the fields and texts that a report may have.

use super::names::{Name, Value, is_counter};
use crate::commands::doctor::look::{Facts, Function, Libraries, PluginKind};
use crate::commands::doctor::place::Place;
use crate::commands::doctor::{Request, answer};
use crate::commands::rails::Found;
use crate::digest::sha256;
use anyhow::{Context, Error, Result};
use host::config::{Settings, Source};
use host::nic::CORE_MODULE;
use host::rails::{LinkRate, Obstacle, PciFunction, Survey};
use serde_json::{Value as Json, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Reads the machine at `place`. `program` is this program's file, `variables` its environment.
/// Fails if the doctor cannot examine the machine.
pub(super) fn read(
    place: &Place,
    program: &Path,
    variables: Vec<(String, String)>,
) -> Result<Json> {
    let request = Request {
        own_program: program.to_owned(),
        variables,
        ..Request::default()
    };
    let (answer, examined) = answer(place, request).map_err(Error::msg)?;
    let examined = examined.context("this machine was not examined")?;
    let variables = answer
        .variables
        .iter()
        .map(|one| json!({ "name": one.name, "value": Value::new(&one.name, &one.value), "effect": one.effect }));
    let functions = examined
        .facts
        .functions
        .iter()
        .map(|one| function(one, &examined.facts.survey));
    Ok(json!({
        "versions": versions(place, &examined.libraries),
        "hardware": hardware(place, &examined.facts),
        "rails": Found::from(examined.facts.survey.clone()),
        "functions": functions.collect::<Vec<_>>(),
        "settings": settings(),
        "variables": variables.collect::<Vec<_>>(),
        "doctor": answer,
    }))
}

fn versions(place: &Place, libraries: &Libraries) -> Json {
    let plugin = libraries
        .copies
        .first()
        .and_then(|copy| std::fs::read(place.path(&copy.path)).ok());
    let of_shell = |path: &str, name: &str| {
        let text = place.text(path)?;
        let value = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix('='))?;
        Some(value.trim_matches('"').to_owned())
    };
    let toolkit = place.text("/usr/local/cuda/version.json");
    let toolkit = toolkit.and_then(|text| {
        serde_json::from_str::<Json>(&text)
            .ok()?
            .pointer("/cuda/version")
            .cloned()
    });
    let verbs = libraries
        .verbs
        .as_deref()
        .and_then(|path| place.resolve(path));
    let nccl = libraries
        .nccl
        .iter()
        .filter_map(|file| file.library.as_ref().ok());
    let nccl = nccl.map(|library| {
        let version = library.nccl_version().map(|(text, _)| text);
        json!({ "version": version, "build_id": library.build_id })
    });
    json!({
        "kernel": place.text("/proc/sys/kernel/osrelease").map(|text| Name::version(&text)),
        "os": of_shell("/etc/os-release", "ID"), "os_version": of_shell("/etc/os-release", "VERSION_ID"),
        "dgx_os": of_shell("/etc/dgx-release", "DGX_SWBUILD_VERSION"),
        "bios": place.text("/sys/class/dmi/id/bios_version"),
        "bios_date": place.text("/sys/class/dmi/id/bios_date"),
        "nvidia_driver": place.text("/sys/module/nvidia/version"),
        "cuda_toolkit": toolkit,
        "mlx5_driver": place.text(format!("/sys/module/{CORE_MODULE}/version")),
        "libibverbs": verbs.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy()),
        "glibc": libraries.glibc,
        "nccl": nccl.collect::<Vec<_>>(),
        "network_plugin": libraries.plugin.as_ref().map(|plugin| match plugin.kind() {
            PluginKind::Ours => "spark",
            PluginKind::HpcX => "hpcx",
            PluginKind::Other => "other",
        }),
        "plugin_copies": libraries.copies.len(), "plugin_bytes": plugin.as_ref().map(Vec::len),
        "plugin_sha256": plugin.map(|bytes| sha256(&bytes)),
    })
}

fn hardware(place: &Place, facts: &Facts) -> Json {
    let machine = &facts.machine;
    let folder = "/proc/driver/nvidia/gpus";
    let model = |gpu: String| {
        let text = place.text(format!("{folder}/{gpu}/information"))?;
        text.lines()
            .find_map(|line| line.strip_prefix("Model:"))
            .map(Name::product)
    };
    let cuda = facts.cuda.iter().flatten().map(|gpu| {
        let direct = gpu.has_gpu_direct_rdma;
        let dma_buf = gpu.has_dma_buf;
        json!({ "integrated": gpu.is_integrated, "gpu_direct_rdma": direct, "dma_buf": dma_buf })
    });
    json!({
        "product": machine.product.as_deref().map(Name::product).unwrap_or_default(),
        "gpus": place.names(folder).into_iter().filter_map(model).collect::<Vec<_>>(),
        "cuda": cuda.collect::<Vec<_>>(),
        "container": machine.container, "processors": machine.cpus.allowed.len(),
        "deepest_idle_us": machine.cpus.deepest_idle().map(|state| state.latency_us), "memlock_bytes": machine.memlock_bytes,
        "pinned_bytes": machine.pinned_bytes, "cpu_latency_requests": machine.cpu_latency_requests,
        "cma_total_kib": machine.cma_kib.map(|(total, _)| total),
        "cma_free_kib": machine.cma_kib.map(|(_, free)| free),
        "modules": machine.modules, "has_hotplug_marker": machine.has_hotplug_marker,
    })
}

fn function(one: &Function, survey: &Survey) -> Json {
    let refused = survey
        .refused
        .iter()
        .find(|port| port.device == one.device && !one.is_rail);
    json!({
        "device": one.device,
        "refusal": refused.map(|port| match port.obstacle {
            Obstacle::State(_) | Obstacle::NoCarrier(_) => "no_link",
            Obstacle::Excluded => "excluded",
            Obstacle::LinkLayer(_)
            | Obstacle::Iwarp
            | Obstacle::NoGid
            | Obstacle::NoInterface
            | Obstacle::NoRoce(_)
            | Obstacle::RoceV1(_)
            | Obstacle::NoAddress(_) => "unusable",
        }),
        "physical_port": refused.and_then(|port| port.phys_port.as_ref()),
        "firmware": one.firmware, "board": one.board, "iommu": one.iommu, "mtu_bytes": one.mtu_bytes,
        "pause_rx": one.pause.map(|pause| pause.rx), "pause_tx": one.pause.map(|pause| pause.tx),
        "pcie": one.pci.as_ref().map(pcie),
        "pcie_errors": one.aer.map(|aer| {
            json!({ "corrected": aer.correctable, "nonfatal": aer.nonfatal, "fatal": aer.fatal })
        }),
        "counters": one.counters.iter().filter(|(name, _)| is_counter(name))
            .collect::<BTreeMap<_, _>>(),
    })
}

fn pcie(pci: &PciFunction) -> Json {
    let width = |rate: Option<LinkRate>| rate.map(|rate| rate.width);
    let speed = |rate: Option<LinkRate>| rate.map(|rate| rate.speed_mts);
    json!({
        "domain": pci.domain, "is_virtual": pci.is_virtual,
        "width": width(pci.current), "max_width": width(pci.max),
        "speed_mts": speed(pci.current), "max_speed_mts": speed(pci.max),
        "max_payload_bytes": pci.max_payload_bytes, "max_read_request_bytes": pci.max_read_request_bytes,
    })
}

/// Returns this process's settings. If a value is refused, returns no setting at all: the doctor
/// reports the refused value.
fn settings() -> Vec<Json> {
    let settings = Settings::of_this_process();
    let held = settings.iter().flat_map(Settings::in_effect).map(|held| {
        let source = match held.source {
            Source::Default => "default",
            Source::File { .. } => "file",
            Source::Environment => "environment",
        };
        json!({ "name": held.row.name, "value": Value::new(held.row.name, &held.value), "source": source })
    });
    held.collect()
}
