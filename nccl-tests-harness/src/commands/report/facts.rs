//! The facts of a report, field by field, read from the JSON of a command or of `machine`. A field
//! that is not named here is not read. Each value is a number, a boolean, an enum of this program,
//! a [`Name`], a [`Digest`] or [`LeftOut`].

use super::names::{Digest, LeftOut, Name, Value};
use super::parts::Part;
use crate::commands::memory::litmus::Read;
use crate::commands::memory::messages::Message;
use crate::gpu::Kind;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Defines structs that are read from JSON and written to the report.
macro_rules! facts {
    ($($(#[$about:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? })*) => {
        $($(#[$about])* #[derive(Debug, Serialize, Deserialize)] pub(super) struct $name { $($field: $type),* })*
    };
}

facts! {
    Machine {
        doctor: Doctor, versions: Versions, hardware: Hardware, rails: Rails, functions: Vec<Function>,
        settings: Vec<Setting>, variables: Vec<Variable>,
    }
    Versions {
        kernel: Option<Name>, os: Option<Name>, os_version: Option<Name>, dgx_os: Option<Name>, bios: Option<Name>,
        bios_date: Option<Name>, nvidia_driver: Option<Name>, cuda_toolkit: Option<Name>, mlx5_driver: Option<Name>,
        libibverbs: Option<Name>, glibc: Option<(u32, u32)>, nccl: Vec<Nccl>, network_plugin: Option<Name>,
        plugin_copies: u32, plugin_bytes: Option<u64>, plugin_sha256: Option<Digest>,
    }
    Nccl { version: Option<Name>, build_id: Digest }
    /// `product` and `gpus` have only the known words of the product names (`names::PRODUCTS`).
    Hardware {
        product: Vec<Name>, gpus: Vec<Vec<Name>>, cuda: Vec<Cuda>, container: Option<Name>, processors: u32,
        deepest_idle_us: Option<u64>, memlock_bytes: Option<u64>, pinned_bytes: u64, cpu_latency_requests: u32, cma_total_kib: Option<u64>, cma_free_kib: Option<u64>,
        modules: Vec<Name>, has_hotplug_marker: bool,
    }
    Cuda { integrated: Option<bool>, gpu_direct_rdma: Option<bool>, dma_buf: Option<bool> }
    Rails { expected_mbps: u32, limited_by: Name, announced_mbps: u32, rails: Vec<Rail>, pcie_links: Vec<PcieLink> }
    Rail {
        device: Name, port: u8, physical_port: Option<Name>, pcie_link: u32, cable: u32, twin: Option<Name>,
        speed_mbps: u32, path_mtu_bytes: u32, netdev_mtu_bytes: Option<u32>, addresses: Vec<Address>,
    }
    Address { prefix: Option<u8>, gid_index: u16 }
    PcieLink { payload_mbps: Option<u32> }
    /// An RDMA function. `refusal` is the reason why it is no rail. Counters have kernel names.
    Function {
        device: Name, refusal: Option<Name>, physical_port: Option<Name>, firmware: Option<Name>, board: Option<Name>,
        iommu: Option<Name>, mtu_bytes: Option<u32>, pause_rx: Option<bool>, pause_tx: Option<bool>, pcie: Option<Pcie>,
        pcie_errors: Option<PcieErrors>, counters: BTreeMap<Name, u64>,
    }
    Pcie {
        domain: u32, is_virtual: bool, width: Option<u16>, max_width: Option<u16>, speed_mts: Option<u32>,
        max_speed_mts: Option<u32>, max_payload_bytes: Option<u32>, max_read_request_bytes: Option<u32>,
    }
    PcieErrors { corrected: u64, nonfatal: u64, fatal: u64 }
    /// A setting of the plugin, with the value in effect. `source` is default, file or environment.
    Setting { name: Name, value: Option<Value>, source: Name }
    /// A variable of the environment that NCCL or the plugin may read, with its effect.
    Variable { name: Name, value: Option<Value>, effect: Name }

    /// The facts of `nccl-spark doctor`; with `--peer` also about the other machine and the paths.
    Doctor { verdict: Name, findings: Vec<Finding>, peer: Option<Peer> }
    Finding { severity: Name, id: Name }
    Peer { verdict: Name, findings: Vec<Finding>, paths: Vec<Path> }
    /// A pair of rails, or all pairs together. Rates are in Mb/s.
    Path {
        here: Vec<Name>, there: Vec<Name>, expected_mbps: Option<f64>, port_mtu_bytes: Option<u32>,
        measured: Option<Figures>, failed: Option<LeftOut>, not_measured: Option<LeftOut>,
    }
    Figures {
        to_peer: Rate, from_peer: Rate, latency_us: f64, wrong_bytes: u64, path_mtu_bytes: Option<u32>,
    }
    Rate { mbps: f64, grade: Option<Name> }

    /// The facts of `nccl-spark doctor --hosts`. Hosts are in the order of the option.
    Hosts { hosts: Vec<Host> }
    /// `pairs` has the number of rail pairs of this host with each host.
    Host { rails: Vec<Name>, pairs: Vec<u32> }

    Memory {
        ok: bool, error: Option<LeftOut>, fabric: Name, gpus: Option<Vec<Gpu>>, kinds: Vec<MemoryKind>,
        litmus: Option<Litmus>,
    }
    Gpu {
        integrated: bool, pageable_memory_access: bool, managed_memory: bool, concurrent_managed_access: bool,
    }
    MemoryKind { kind: Kind, outcome: Outcome, fault: Option<LeftOut> }
    Outcome {
        not_tried: Option<LeftOut>, refused: Option<LeftOut>, failed: Option<Failed>, moved: Option<Moved>,
    }
    Failed { registered: bool }
    Moved { messages: Vec<Message> }
    Litmus { planted: bool, outcome: LitmusOutcome, fault: Option<LeftOut> }
    LitmusOutcome { ran: Option<Lines>, failed: Option<LeftOut> }
    Lines { seconds: f64, messages: u64, missing: u64, reads: Vec<Read> }

    AllGather {
        ok: bool, error: Option<LeftOut>, fabric: Name, ranks: u32, channels: u32, iters: u32, check_iters: u32,
        networks: Vec<Network>, rows: Vec<Size>, average_busbw_gb_s: Option<f64>,
    }
    Network { devices: u32, speed_mbps: u32 }
    Size {
        size_bytes: u64, time_us: f64, time_p50_us: f64, time_p99_us: f64, algbw_gb_s: f64, busbw_gb_s: f64,
        longest_pause_us: f64, wrong: Option<u64>,
    }

    NcclTests { networks: Vec<Compared> }
    Compared {
        name: Name, nccl_version: Option<Name>, channels: Option<Channels>, failure: Option<LeftOut>,
        wrong: Option<f64>, medians: Vec<Median>, rounds: Vec<Vec<Row>>,
    }
    Channels {
        coll: Option<u32>, collnet: Option<u32>, nvls: Option<u32>, p2p: Option<u32>, p2p_per_peer: Option<u32>,
    }
    Median { bytes: u64, time_us: Option<f64>, busbw_gb_s: Option<f64> }
    Row { bytes: u64, out_of_place: Half, in_place: Half }
    Half { time_us: f64, busbw_gb_s: f64, wrong: Option<f64> }

    Tune { ranks: u32, minimal_gain: f64, collectives: Vec<Sweep> }
    Sweep {
        collective: Name, nccl: Record, candidates: Vec<Record>, groups: Vec<Group>, sizes: Vec<Best>,
        confirmation: Option<Confirmation>,
    }
    Record {
        choice: Option<Name>, rounds_time_us_by_bytes: Vec<BTreeMap<u64, f64>>, dropped: Option<LeftOut>,
    }
    Group { members: u32, nccl: Record, candidates: Vec<Record> }
    Best { bytes: u64, nccl_us: Option<f64>, choice: Option<Name>, choice_us: Option<f64> }
    Confirmation { nccl: Record, table: Record, sizes: Vec<Confirmed> }
    Confirmed { bytes: u64, choice: Option<Name>, differs: bool, row_is_written: bool }
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Facts {
    Machine(Box<Machine>),
    Hosts(Hosts),
    Peer(Doctor),
    Memory(Memory),
    AllGather(AllGather),
    NcclTests(NcclTests),
    Tune(Tune),
}

impl Facts {
    /// Reads the facts of a part from JSON. Fails if a fact is missing or has another type.
    pub(super) fn read(part: Part, json: serde_json::Value) -> serde_json::Result<Self> {
        Ok(match part {
            Part::Machine => Self::Machine(serde_json::from_value(json)?),
            Part::Hosts => Self::Hosts(serde_json::from_value(json)?),
            Part::Peer => Self::Peer(serde_json::from_value(json)?),
            Part::Memory => Self::Memory(serde_json::from_value(json)?),
            Part::AllGather => Self::AllGather(serde_json::from_value(json)?),
            Part::NcclTests => Self::NcclTests(serde_json::from_value(json)?),
            Part::Tune => Self::Tune(serde_json::from_value(json)?),
        })
    }
}
