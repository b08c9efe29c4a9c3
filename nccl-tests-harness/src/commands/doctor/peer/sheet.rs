//! What one host tells the other of itself.

use super::rail::RailSheet;
use super::together::Remote;
use crate::commands::doctor::answer::{Answer, Seen};
use crate::commands::doctor::finding::{Finding, Verdict};
use crate::commands::doctor::place::Place;
use crate::ranks::seats;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::path::Path;

/// A host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sheet {
    /// Its name.
    pub host: String,
    /// The version of this program there.
    pub program: String,
    /// The plugin that is measured.
    pub plugin: Option<PluginSheet>,
    /// The libnccl that a job there loads.
    pub nccl: Option<NcclSheet>,
    /// Variables and settings, those that have to agree.
    pub settings: BTreeMap<String, String>,
    /// Its rails.
    pub rails: Vec<RailSheet>,
    /// Its interfaces with their hardware addresses.
    pub interfaces: Vec<(String, String)>,
    /// What its own doctor says.
    pub verdict: Verdict,
    /// What is wrong there.
    pub findings: Vec<Remote>,
}

/// A copy of this plugin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PluginSheet {
    /// Where it is.
    pub path: String,
    /// SHA-256 of the file.
    pub sha256: String,
}

/// A libnccl.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NcclSheet {
    /// Where it is.
    pub path: String,
    /// Its version, where the file says it.
    pub version: Option<String>,
    /// Its build id.
    pub build_id: String,
}

/// What has to agree on all hosts of a job.
pub const TO_AGREE: [&str; 18] = [
    "NCCL_SPARK_TUNER",
    "NCCL_SPARK_TUNER_TABLE",
    "NCCL_SPARK_LL128",
    "NCCL_SPARK_RING_TCP",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_BUFFSIZE",
    "NCCL_LL_BUFFSIZE",
    "NCCL_LL128_BUFFSIZE",
    "NCCL_P2P_NET_CHUNKSIZE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    "NCCL_NCHANNELS_PER_NET_PEER",
    "NCCL_NTHREADS",
    "NCCL_CROSS_NIC",
    "NCCL_TUNER_PLUGIN",
];

/// A host has no more rails than a connection can be offered.
const MOST_RAILS: usize = 32;
/// The most of everything else in a sheet.
const MOST: usize = 256;
/// The longest text in a sheet, in characters.
const TEXT_CHARACTERS: usize = 2000;

impl Sheet {
    /// What this host tells. `plugin` is the library that takes part in the measurements, `settings` the plugin's settings with their
    /// values, from the environment and from its files.
    pub fn of(place: &Place, answer: &Answer, seen: &Seen, plugin: &Path, settings: &[(String, String)]) -> Self {
        let wanted = |name: &str| TO_AGREE.contains(&name);
        let variables = seen.variables.iter().map(|one| (one.name.clone(), one.value.trim().to_owned()));
        let all = settings.iter().cloned().chain(variables).filter(|(name, value)| wanted(name) && !value.is_empty());
        let survey = &seen.facts.survey;
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
            rails: survey.rails.iter().map(|rail| RailSheet::of(rail, survey)).collect(),
            interfaces: seen
                .facts
                .interfaces
                .iter()
                .filter_map(|one| Some((one.name.clone(), hardware(&one.name)?)))
                .collect(),
            verdict: answer.verdict,
            findings: answer.findings.iter().take(MOST).map(Remote::of).collect(),
        }
    }

    /// A sheet as it came from another host: what is too much is refused, and what a terminal would take for a command is taken out.
    ///
    /// # Errors
    /// What is too much.
    pub fn received(mut self) -> Result<Self, String> {
        let parts = [
            ("rails", self.rails.len(), MOST_RAILS),
            ("settings", self.settings.len(), MOST),
            ("interfaces", self.interfaces.len(), MOST),
            ("findings", self.findings.len(), MOST),
            ("addresses", self.rails.iter().map(|rail| rail.addresses.len()).max().unwrap_or(0), MOST),
        ];
        if let Some((what, count, most)) = parts.into_iter().find(|(_, count, most)| count > most) {
            return Err(format!("it has {count} {what}, and {most} at most are taken"));
        }
        let mut texts: Vec<&mut String> = vec![&mut self.host, &mut self.program];
        texts.extend(self.plugin.iter_mut().flat_map(|plugin| [&mut plugin.path, &mut plugin.sha256]));
        if let Some(nccl) = &mut self.nccl {
            texts.extend([&mut nccl.path, &mut nccl.build_id]);
            texts.extend(&mut nccl.version);
        }
        texts.extend(self.settings.values_mut());
        for rail in &mut self.rails {
            texts.push(&mut rail.name);
            texts.extend(rail.netdev.iter_mut().chain(&mut rail.phys_port));
        }
        texts.extend(self.interfaces.iter_mut().flat_map(|(name, address)| [name, address]));
        for finding in &mut self.findings {
            texts.extend([&mut finding.id, &mut finding.text]);
            texts.extend(&mut finding.cure);
        }
        texts.into_iter().for_each(|text| *text = plain(text));
        // Names of variables are compared with those of this host and shown.
        self.settings.retain(|name, _| TO_AGREE.contains(&name.as_str()));
        Ok(self)
    }
}

impl Remote {
    fn of(finding: &Finding) -> Self {
        let Finding { severity, id, text, cure } = finding.clone();
        Self { severity, id: id.to_owned(), text, cure }
    }
}

/// The text without control characters, and not longer than a sentence is.
pub fn plain(text: &str) -> String {
    text.chars().take(TEXT_CHARACTERS).map(|c| if c.is_control() { '?' } else { c }).collect()
}

fn plugin_sheet(path: &Path) -> Option<PluginSheet> {
    let bytes = std::fs::read(path).ok()?;
    let sha256 = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    Some(PluginSheet { path: path.display().to_string(), sha256 })
}
