//! This host in a measurement: its sheet, the rate of its rails, and the environment of its rank.

use super::neighbours;
use super::sheet::Sheet;
use crate::commands::doctor::answer::{Answer, Seen};
use crate::commands::doctor::look::PluginKind;
use crate::commands::doctor::place::Place;
use crate::commands::doctor::rail::{self, RailSheet};
use crate::fabric::SoftRails;
use crate::output;
use crate::places::PluginOption;
use anyhow::{Result, anyhow};
use nccl_net_spark::config::Settings;
use nccl_net_spark::interfaces::routes;
use nccl_net_spark::rails::{Rail, Survey};
use nix::net::if_::if_nametoindex;
use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};

/// Time limit for a pair of rails to carry, in seconds. It allows some attempts of the plugin, and
/// is below `measure::STUCK`, so that the plugin's reason is reported for a pair that does not
/// carry.
const FIRST_RAIL_S: u32 = 20;

/// This host.
pub struct Host {
    /// The sheet for the other host.
    pub sheet: Sheet,
    /// The plugin's library, which takes part in the measurements.
    pub plugin: PathBuf,
    place: Place,
    survey: Survey,
    soft: Option<SoftRails>,
}

impl Host {
    /// Takes the doctor's facts of this host. NCCL's choice of the plugin takes part, or else the
    /// plugin of `program`.
    ///
    /// # Errors
    /// A refused setting, which would stop the plugin in each measurement.
    pub fn new(place: &Place, answer: &Answer, seen: &Seen, program: &Path) -> Result<Self> {
        let loaded = seen.libraries.plugin.as_ref().filter(|plugin| plugin.kind() == PluginKind::Ours);
        let plugin = match loaded {
            Some(plugin) => plugin.path.clone(),
            None => PluginOption::default().library(program)?,
        };
        let settings = Settings::of_this_process()?;
        let held: Vec<(String, String)> =
            settings.held().iter().map(|held| (held.row.name.to_owned(), held.value.clone())).collect();
        let verbs = held.iter().find(|(name, _)| name == "NCCL_IBVERBS_LIB").map_or("", |(_, value)| value);
        let soft = SoftRails::of_environment(verbs)?;
        let sheet = Sheet::of(place, answer, seen, &plugin, &held);
        Ok(Self { sheet, plugin, place: place.clone(), survey: seen.facts.survey.clone(), soft })
    }

    /// Returns the sheet with the current ARP table.
    pub fn sheet_now(&self) -> Sheet {
        Sheet { neighbours: neighbours::read(&self.place, &self.sheet.rails), ..self.sheet.clone() }
    }

    /// Returns true if this host's kernel has a route from an address of a rail, through the rail's
    /// interface, to an address of the peer. False with `NCCL_SPARK_RING_TCP=1`: the plugin uses no
    /// routes then.
    pub fn has_route(&self, rail: &RailSheet, own: Ipv6Addr, peer: Ipv6Addr) -> bool {
        let uses_tcp = self.sheet.settings.get("NCCL_SPARK_RING_TCP").is_some_and(|value| value == "1");
        let interface = rail.netdev.as_deref().and_then(|netdev| if_nametoindex(netdev).ok());
        // A kernel that gives no answer leaves the rail without a pair, and that is a finding.
        let has_route = |index| routes::has_route(index, own.octets(), peer.octets()).unwrap_or(false);
        !uses_tcp && interface.is_some_and(has_route)
    }

    /// Computes the payload rate of these rails together in Mb/s, from their links and ports.
    /// Returns `None` for an unknown rate.
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

    /// Environment of a rank that uses these rails alone.
    ///
    /// # Errors
    /// Names one that is no rail of this host.
    pub fn environment(&self, names: &[String]) -> Result<Vec<(String, String)>> {
        let rails: Vec<String> = self.rails(names)?.iter().map(rail::name).collect();
        Ok(vec![
            ("NCCL_IB_HCA".to_owned(), format!("={}", rails.join(","))),
            ("NCCL_SPARK_CONNECT_TIMEOUT_S".to_owned(), FIRST_RAIL_S.to_string()),
            // The plugin would warn of the rails that are left out on purpose.
            ("NCCL_DEBUG".to_owned(), output::nccl_debug().unwrap_or("NONE").to_owned()),
        ])
    }

    fn rails(&self, names: &[String]) -> Result<Vec<Rail>> {
        let one = |name: &String| {
            let found = self.survey.rails.iter().find(|rail| rail::name(rail) == *name);
            found.cloned().ok_or_else(|| anyhow!("{} has no rail {name}", self.sheet.host))
        };
        names.iter().map(one).collect()
    }
}
