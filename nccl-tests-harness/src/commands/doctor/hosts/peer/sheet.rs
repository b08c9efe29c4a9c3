//! The part of a doctor's result that another host's doctor needs: findings, and facts to compare.

use crate::commands::doctor::answer::{Answer, Examined};
use crate::commands::doctor::finding::{Finding, Verdict};
use crate::commands::doctor::hosts::rail::RailSheet;
use crate::commands::doctor::look::Qos;
use crate::commands::doctor::place::Place;
use crate::commands::rails::Found;
use crate::digest::sha256;
use crate::output;
use crate::ranks::placement;
use host::rails::RailQos;
use proto::wire::MAX_OFFERED_RAILS;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::Path;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sheet {
    pub host: String,
    /// Version of this program on the host.
    pub program: String,
    pub plugin: Option<PluginSheet>,
    pub nccl: Option<NcclSheet>,
    /// The variables and settings of `TO_AGREE` that are set, with their values.
    pub settings: BTreeMap<String, String>,
    /// Name of the host's GPU. `None` if CUDA does not name one.
    #[serde(default)]
    pub gpu: Option<String>,
    pub rails: Vec<RailSheet>,
    /// Priorities of the rails, by interface.
    #[serde(default)]
    pub qos: BTreeMap<String, QosSheet>,
    /// Name and hardware address of each interface.
    pub interfaces: Vec<(String, String)>,
    /// ARP entries of the rails' interfaces, filled in by [`super::Host::sheet_with_arp_table`].
    pub neighbours: Vec<Neighbour>,
    pub verdict: Verdict,
    pub findings: Vec<Finding>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PluginSheet {
    pub path: String,
    pub sha256: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NcclSheet {
    pub path: String,
    pub version: Option<String>,
    pub build_id: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QosSheet {
    pub priority: u8,
    /// Priorities with PFC: bit N is set if priority N has it.
    pub pfc: u8,
    pub text: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbour {
    /// The IP address that the entry resolves.
    pub address: Ipv4Addr,
    pub hardware: String,
    pub interface: String,
}

/// Variables and settings that must agree on all hosts of a job.
const TO_AGREE: &str = "NCCL_SPARK_TUNER NCCL_SPARK_TUNER_TABLE NCCL_SPARK_LL128 NCCL_SPARK_RING_TCP NCCL_ALGO \
    NCCL_PROTO NCCL_BUFFSIZE NCCL_LL_BUFFSIZE NCCL_LL128_BUFFSIZE NCCL_P2P_NET_CHUNKSIZE NCCL_MIN_NCHANNELS \
    NCCL_MAX_NCHANNELS NCCL_MIN_CTAS NCCL_MAX_CTAS NCCL_NCHANNELS_PER_NET_PEER NCCL_NTHREADS NCCL_CROSS_NIC \
    NCCL_TUNER_PLUGIN NCCL_IB_TC NCCL_IB_SL";

fn has_to_agree(name: &str) -> bool {
    TO_AGREE.split_whitespace().any(|one| one == name)
}

/// Maximum length of each list of a sheet. (The list `rails` has a lower maximum.) A sheet with 256
/// findings of usual length fits into one line of `ranks::line`, whose lines have a size limit.
pub const MAX_LIST_LEN: usize = 256;
/// Longest text in a sheet, in characters.
const TEXT_CHARACTERS: usize = 2000;

impl Sheet {
    /// Makes the sheet of this host. `plugin` is the library used in the measurements. `settings`
    /// are the plugin's settings with their values, from the environment and settings files.
    pub fn of(
        place: &Place,
        answer: &Answer,
        examined: &Examined,
        plugin: &Path,
        settings: &[(String, String)],
    ) -> Self {
        let variables = examined
            .variables
            .iter()
            .map(|one| (one.name.clone(), one.value.trim().to_owned()));
        let all = settings
            .iter()
            .cloned()
            .chain(variables)
            .filter(|(name, value)| has_to_agree(name) && !value.is_empty());
        let listed = Found::from(examined.facts.survey.clone());
        let interfaces = examined.facts.interfaces.iter();
        let hardware = |name: &str| place.text(format!("/sys/class/net/{name}/address"));
        Self {
            host: placement::local_host_name(),
            program: env!("PROGRAM_VERSION").to_owned(),
            plugin: plugin_sheet(plugin),
            nccl: examined.libraries.nccl.iter().find_map(|file| {
                let library = file.library.as_ref().ok()?;
                Some(NcclSheet {
                    path: file.path.display().to_string(),
                    version: library.nccl_version().map(|(version, _)| version),
                    build_id: library.build_id.clone(),
                })
            }),
            settings: all.collect(),
            gpu: host::rails::gpu_name().ok(),
            rails: RailSheet::all(&listed.rails, &listed.pcie_links),
            qos: qos_sheets(&examined.facts.qos),
            interfaces: interfaces
                .filter_map(|one| Some((one.name.clone(), hardware(&one.name)?)))
                .collect(),
            neighbours: Vec::new(),
            verdict: answer.verdict,
            findings: answer.findings.iter().take(MAX_LIST_LEN).cloned().collect(),
        }
    }

    /// Checks a sheet from another host. Cuts long texts, replaces control characters, and drops
    /// settings that need not agree.
    ///
    /// # Errors
    /// A list is too long.
    pub fn received(self) -> Result<Self, String> {
        if self.rails.len() > MAX_OFFERED_RAILS {
            return Err(format!(
                "it has {} rails; at most {MAX_OFFERED_RAILS} are supported",
                self.rails.len()
            ));
        }
        let mut value = serde_json::to_value(self).map_err(|error| error.to_string())?;
        bound("parts", &mut value)?;
        let mut sheet: Self = serde_json::from_value(value).map_err(|error| error.to_string())?;
        sheet.settings.retain(|name, _| has_to_agree(name));
        Ok(sheet)
    }
}

fn bound(name: &str, value: &mut Value) -> Result<(), String> {
    let check = |length| match length > MAX_LIST_LEN {
        true => Err(format!(
            "it has {length} {name}; at most {MAX_LIST_LEN} are supported"
        )),
        false => Ok(()),
    };
    match value {
        Value::String(text) => *text = plain(text),
        Value::Array(all) => {
            check(all.len())?;
            all.iter_mut().try_for_each(|one| bound(name, one))?;
        }
        Value::Object(all) => {
            check(all.len())?;
            all.iter_mut()
                .try_for_each(|(name, one)| bound(name, one))?;
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
    Ok(())
}

/// Replaces control characters, and cuts text at `TEXT_CHARACTERS`.
pub fn plain(text: &str) -> String {
    output::plain(&text.chars().take(TEXT_CHARACTERS).collect::<String>())
}

fn qos_sheets(qos: &Qos) -> BTreeMap<String, QosSheet> {
    let sheet = |one: &RailQos| QosSheet {
        priority: one
            .port
            .priority(qos.roce.traffic_class, qos.roce.service_level),
        pfc: one.port.pfc,
        text: one.port.text(qos.roce),
    };
    qos.rails
        .iter()
        .map(|one| (one.netdev.clone(), sheet(one)))
        .collect()
}

fn plugin_sheet(path: &Path) -> Option<PluginSheet> {
    Some(PluginSheet {
        path: path.display().to_string(),
        sha256: sha256(&std::fs::read(path).ok()?),
    })
}
