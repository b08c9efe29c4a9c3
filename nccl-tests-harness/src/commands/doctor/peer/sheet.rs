//! The part of a doctor's result that another host's doctor needs: the findings, and the facts that
//! have to fit together.

use crate::commands::doctor::answer::{Answer, Seen};
use crate::commands::doctor::finding::{Finding, Verdict};
use crate::commands::doctor::look::Qos;
use crate::commands::doctor::place::Place;
use crate::commands::doctor::rail::RailSheet;
use crate::commands::rails::Found;
use crate::digest::sha256;
use crate::output;
use crate::ranks::seats;
use nccl_net_spark::rails::RailQos;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::Path;

/// A host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sheet {
    pub host: String,
    /// The version of this program there.
    pub program: String,
    /// The plugin that takes part in measurements.
    pub plugin: Option<PluginSheet>,
    /// The libnccl that a job there loads.
    pub nccl: Option<NcclSheet>,
    /// Variables and settings that have to agree, with their values where they are set.
    pub settings: BTreeMap<String, String>,
    pub rails: Vec<RailSheet>,
    /// Priorities of the rails' interfaces.
    #[serde(default)]
    pub qos: BTreeMap<String, QosSheet>,
    /// Interfaces with their hardware addresses.
    pub interfaces: Vec<(String, String)>,
    /// Its ARP table for the rails. Empty until [`super::Host::sheet_now`].
    pub neighbours: Vec<Neighbour>,
    /// The verdict of its own doctor.
    pub verdict: Verdict,
    /// The findings of its own doctor.
    pub findings: Vec<Finding>,
}

/// A copy of this plugin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PluginSheet {
    pub path: String,
    /// SHA-256 of the file.
    pub sha256: String,
}

/// A libnccl.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NcclSheet {
    pub path: String,
    /// The version, if the file has one.
    pub version: Option<String>,
    pub build_id: String,
}

/// Priorities of a rail.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QosSheet {
    /// The priority of RoCE.
    pub priority: u8,
    /// The priorities with PFC, one bit each.
    pub pfc: u8,
    /// A description.
    pub text: String,
}

/// An entry of a host's ARP table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbour {
    /// The address that it resolves.
    pub address: Ipv4Addr,
    /// The hardware address.
    pub hardware: String,
    /// The interface of this host.
    pub interface: String,
}

/// Variables and settings that have to agree on all hosts of a job.
const TO_AGREE: &str = "NCCL_SPARK_TUNER NCCL_SPARK_TUNER_TABLE NCCL_SPARK_LL128 NCCL_SPARK_RING_TCP NCCL_ALGO \
    NCCL_PROTO NCCL_BUFFSIZE NCCL_LL_BUFFSIZE NCCL_LL128_BUFFSIZE NCCL_P2P_NET_CHUNKSIZE NCCL_MIN_NCHANNELS \
    NCCL_MAX_NCHANNELS NCCL_MIN_CTAS NCCL_MAX_CTAS NCCL_NCHANNELS_PER_NET_PEER NCCL_NTHREADS NCCL_CROSS_NIC \
    NCCL_TUNER_PLUGIN NCCL_IB_TC NCCL_IB_SL";

fn has_to_agree(name: &str) -> bool {
    TO_AGREE.split_whitespace().any(|one| one == name)
}

/// A host has no more rails than a connection can be offered.
const MOST_RAILS: usize = 32;
/// The most entries of any other list of a sheet. With 256 findings it is below the longest line.
pub const MOST: usize = 256;
/// The longest text in a sheet, in characters.
const TEXT_CHARACTERS: usize = 2000;

impl Sheet {
    /// The sheet of this host. `plugin` is the library that takes part in the measurements,
    /// `settings` the plugin's settings with their values, from the environment and from its files.
    pub fn of(place: &Place, answer: &Answer, seen: &Seen, plugin: &Path, settings: &[(String, String)]) -> Self {
        let variables = seen.variables.iter().map(|one| (one.name.clone(), one.value.trim().to_owned()));
        let all =
            settings.iter().cloned().chain(variables).filter(|(name, value)| has_to_agree(name) && !value.is_empty());
        let (listed, interfaces) = (Found::from(seen.facts.survey.clone()), seen.facts.interfaces.iter());
        let hardware = |name: &str| place.text(format!("/sys/class/net/{name}/address"));
        Self {
            host: seats::host(),
            program: env!("PROGRAM_VERSION").to_owned(),
            plugin: plugin_sheet(plugin),
            nccl: seen.libraries.nccl.iter().find_map(|file| {
                let library = file.library.as_ref().ok()?;
                Some(NcclSheet {
                    path: file.path.display().to_string(),
                    version: library.nccl_version().map(|(version, _)| version),
                    build_id: library.build_id.clone(),
                })
            }),
            settings: all.collect(),
            rails: RailSheet::all(&listed.rails, &listed.pcie_links),
            qos: qos_sheets(&seen.facts.qos),
            interfaces: interfaces.filter_map(|one| Some((one.name.clone(), hardware(&one.name)?))).collect(),
            neighbours: Vec::new(),
            verdict: answer.verdict,
            findings: answer.findings.iter().take(MOST).cloned().collect(),
        }
    }

    /// Checks a sheet that came from another host: refuses lists that are too long, and replaces
    /// control characters.
    ///
    /// # Errors
    /// Names the list that is too long.
    pub fn received(self) -> Result<Self, String> {
        if self.rails.len() > MOST_RAILS {
            return Err(format!("it has {} rails, and {MOST_RAILS} at most are taken", self.rails.len()));
        }
        let mut value = serde_json::to_value(self).map_err(|error| error.to_string())?;
        bound("parts", &mut value)?;
        let mut sheet: Self = serde_json::from_value(value).map_err(|error| error.to_string())?;
        sheet.settings.retain(|name, _| has_to_agree(name));
        Ok(sheet)
    }
}

/// Bounds all lists and texts below `value`, which is called `name`.
fn bound(name: &str, value: &mut Value) -> Result<(), String> {
    let check = |length| match length > MOST {
        true => Err(format!("it has {length} {name}, and {MOST} at most are taken")),
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
            all.iter_mut().try_for_each(|(name, one)| bound(name, one))?;
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
    Ok(())
}

/// Returns the text without control characters, and cuts what is longer than a sentence.
pub fn plain(text: &str) -> String {
    output::plain(&text.chars().take(TEXT_CHARACTERS).collect::<String>())
}

fn qos_sheets(qos: &Qos) -> BTreeMap<String, QosSheet> {
    let sheet = |one: &RailQos| QosSheet {
        priority: one.port.priority(qos.roce),
        pfc: one.port.pfc,
        text: one.port.text(qos.roce),
    };
    qos.rails.iter().map(|one| (one.netdev.clone(), sheet(one))).collect()
}

fn plugin_sheet(path: &Path) -> Option<PluginSheet> {
    Some(PluginSheet { path: path.display().to_string(), sha256: sha256(&std::fs::read(path).ok()?) })
}
