//! One of the two hosts, as its own side knows it: its sheet, what its rails carry, and the process that takes part in a measurement.

use super::rail;
use super::sheet::Sheet;
use crate::commands::doctor::answer::{Answer, Seen};
use crate::commands::doctor::look::PluginKind;
use crate::commands::doctor::place::Place;
use crate::fabric::SoftRails;
use crate::output;
use crate::places;
use anyhow::{Result, anyhow};
use nccl_net_spark::config::Settings;
use nccl_net_spark::rails::{Rail, Survey};
use std::path::{Path, PathBuf};

/// Time for a pair of rails to carry, in seconds: some attempts of the plugin, and less than a rank may take without progress
/// (`measure::STUCK`), so that a pair that does not carry is reported with the plugin's reason.
const FIRST_RAIL_S: u32 = 20;

/// This host.
pub struct Host {
    /// What it tells the other one.
    pub sheet: Sheet,
    /// The plugin's library, which takes part in the measurements.
    pub plugin: PathBuf,
    survey: Survey,
    soft: Option<SoftRails>,
}

impl Host {
    /// This host, by what the doctor has seen of it. The plugin is the one that NCCL loads, or else the one that belongs to `program`.
    ///
    /// # Errors
    /// A setting that is not usable, which would stop the plugin in each measurement.
    pub fn new(place: &Place, answer: &Answer, seen: &Seen, program: &Path) -> Result<Self> {
        let loaded = seen.libraries.plugin.as_ref().filter(|plugin| plugin.kind == PluginKind::Ours);
        let plugin = match loaded {
            Some(plugin) => plugin.path.clone(),
            None => places::library(None, program)?,
        };
        let settings = Settings::of_this_process()?;
        let held: Vec<(String, String)> =
            settings.held().iter().map(|held| (held.row.name.to_owned(), held.value.clone())).collect();
        let verbs = held.iter().find(|(name, _)| name == "NCCL_IBVERBS_LIB").map_or("", |(_, value)| value);
        let soft = SoftRails::of_environment(verbs)?;
        let sheet = Sheet::of(place, answer, seen, &plugin, &held);
        Ok(Self { sheet, plugin, survey: seen.facts.survey.clone(), soft })
    }

    /// What these rails carry together in payload, in Mb/s, by what their links and ports say; none where that is not known.
    ///
    /// # Errors
    /// Names one that is no rail of this host.
    pub fn expected_mbps(&self, names: &[String]) -> Result<Option<f64>> {
        let rails = self.rails(names)?;
        if let Some(soft) = &self.soft {
            let devices: Vec<&str> = rails.iter().map(|rail| rail.device.as_str()).collect();
            return Ok(soft.payload_mbps(&devices));
        }
        let mbps = Survey { rails, ..self.survey.clone() }.payload().mbps;
        Ok(Some(f64::from(mbps)).filter(|mbps| *mbps > 0.0))
    }

    /// What a process gets for its environment so that it uses these rails alone.
    ///
    /// # Errors
    /// Names one that is no rail of this host.
    pub fn environment(&self, names: &[String]) -> Result<Vec<(String, String)>> {
        let rails: Vec<String> = self.rails(names)?.iter().map(rail::name).collect();
        let mut environment = vec![("NCCL_IB_HCA".to_owned(), format!("={}", rails.join(",")))];
        environment.push(("NCCL_SPARK_CONNECT_TIMEOUT_S".to_owned(), FIRST_RAIL_S.to_string()));
        // It warns of the rails that are left out, which is what is wanted here.
        environment.push(("NCCL_DEBUG".to_owned(), output::nccl_debug().unwrap_or("NONE").to_owned()));
        Ok(environment)
    }

    fn rails(&self, names: &[String]) -> Result<Vec<Rail>> {
        let one = |name: &String| {
            let found = self.survey.rails.iter().find(|rail| rail::name(rail) == *name);
            found.cloned().ok_or_else(|| anyhow!("{} has no rail {name}", self.sheet.host))
        };
        names.iter().map(one).collect()
    }
}

/// What two hosts promise together: the lesser.
pub fn lesser(one: Option<f64>, other: Option<f64>) -> Option<f64> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}
