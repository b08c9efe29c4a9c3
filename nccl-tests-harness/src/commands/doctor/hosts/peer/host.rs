//! This host in a measurement: its sheet, its rails' expected rate, and its rank's environment.

use super::neighbours;
use super::sheet::Sheet;
use crate::commands::doctor::answer::{Answer, Examined};
use crate::commands::doctor::hosts::rail::{self, RailSheet};
use crate::commands::doctor::look::PluginKind;
use crate::commands::doctor::place::Place;
use crate::fabric::SoftRails;
use crate::output;
use crate::places::PluginOption;
use anyhow::{Result, anyhow};
use host::config::Settings;
use host::interfaces::routes;
use host::rails::{Rail, Survey};
use nix::net::if_::if_nametoindex;
use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};

/// Time limit in seconds for the plugin's connection to have its first rail. It allows several
/// attempts. It is below `measure::STUCK`, so that the plugin can report the reason why a pair
/// fails before the measurement is ended.
const FIRST_RAIL_S: u32 = 20;

pub struct Host {
    pub sheet: Sheet,
    pub plugin: PathBuf,
    place: Place,
    survey: Survey,
    soft: Option<SoftRails>,
}

impl Host {
    /// Collects the facts about this host. The measurements use the file of this plugin that NCCL
    /// loads. If NCCL loads none, they use the plugin that belongs to `program`.
    ///
    /// # Errors
    /// The plugin is not found, or it refuses a setting and so would not start.
    pub fn new(
        place: &Place,
        answer: &Answer,
        examined: &Examined,
        program: &Path,
    ) -> Result<Self> {
        let loaded = examined
            .libraries
            .plugin
            .as_ref()
            .filter(|plugin| plugin.kind() == PluginKind::Ours);
        let plugin = match loaded {
            Some(plugin) => plugin.path.clone(),
            None => PluginOption::default().library(program)?,
        };
        let settings = Settings::of_this_process()?;
        let held: Vec<(String, String)> = settings
            .in_effect()
            .iter()
            .map(|held| (held.row.name.to_owned(), held.value.clone()))
            .collect();
        let verbs = held
            .iter()
            .find(|(name, _)| name == "NCCL_IBVERBS_LIB")
            .map_or("", |(_, value)| value);
        let soft = SoftRails::of_environment(verbs)?;
        let sheet = Sheet::of(place, answer, examined, &plugin, &held);
        Ok(Self {
            sheet,
            plugin,
            place: place.clone(),
            survey: examined.facts.survey.clone(),
            soft,
        })
    }

    pub fn sheet_with_arp_table(&self) -> Sheet {
        Sheet {
            neighbours: neighbours::read(&self.place, &self.sheet.rails),
            ..self.sheet.clone()
        }
    }

    /// Returns true if this host's kernel has a route from an address of a rail, through the rail's
    /// interface, to an address of the peer. False with `NCCL_SPARK_RING_TCP=1`: the plugin uses no
    /// routes then.
    pub fn has_route(&self, rail: &RailSheet, own: Ipv6Addr, peer: Ipv6Addr) -> bool {
        let uses_tcp = self
            .sheet
            .settings
            .get("NCCL_SPARK_RING_TCP")
            .is_some_and(|value| value == "1");
        let interface = rail
            .netdev
            .as_deref()
            .and_then(|netdev| if_nametoindex(netdev).ok());
        // If the kernel gives no answer, the route counts as absent.
        let has_route =
            |index| routes::has_route(index, own.octets(), peer.octets()).unwrap_or(false);
        !uses_tcp && interface.is_some_and(has_route)
    }

    /// Returns the payload rate in Mb/s that is expected of these rails together, by their links
    /// and ports. Returns `None` if this rate is unknown.
    ///
    /// # Errors
    /// A name is not a rail of this host.
    pub fn expected_mbps(&self, names: &[String]) -> Result<Option<f64>> {
        let rails = self.rails(names)?;
        if let Some(soft) = &self.soft {
            let devices: Vec<&str> = rails.iter().map(|rail| rail.device.as_str()).collect();
            return Ok(soft.payload_mbps(&devices));
        }
        let mbps = Survey {
            rails,
            ..self.survey.clone()
        }
        .payload()
        .mbps;
        Ok(Some(f64::from(mbps)).filter(|mbps| *mbps > 0.0))
    }

    /// Returns the environment of a rank that uses only these rails.
    ///
    /// # Errors
    /// A name is not a rail of this host.
    pub fn environment(&self, names: &[String]) -> Result<Vec<(String, String)>> {
        let rails: Vec<String> = self.rails(names)?.iter().map(rail::name).collect();
        Ok(vec![
            ("NCCL_IB_HCA".to_owned(), format!("={}", rails.join(","))),
            (
                "NCCL_SPARK_CONNECT_TIMEOUT_S".to_owned(),
                FIRST_RAIL_S.to_string(),
            ),
            // The plugin would warn about the rails that are excluded on purpose.
            (
                "NCCL_DEBUG".to_owned(),
                output::nccl_debug().unwrap_or("NONE").to_owned(),
            ),
        ])
    }

    fn rails(&self, names: &[String]) -> Result<Vec<Rail>> {
        let one = |name: &String| {
            let found = self
                .survey
                .rails
                .iter()
                .find(|rail| rail::name(rail) == *name);
            found
                .cloned()
                .ok_or_else(|| anyhow!("{} has no rail {name}", self.sheet.host))
        };
        names.iter().map(one).collect()
    }
}
