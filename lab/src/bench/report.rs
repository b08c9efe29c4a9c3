//! A measurement as JSON, for programs. Every number has its unit in its name.

use super::figures::Point;
use super::plan::{Plan, Scenario, Settings};
use super::slowdown::Course;
use crate::pair::side::About;
use nccl_tests_harness::ranks::device::Network;
use serde::Serialize;
use serde_json::Value;
use std::path::PathBuf;

/// A run.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// What it is.
    pub command: &'static str,
    /// This program's version.
    pub version: &'static str,
    /// The user's name for it.
    pub label: Option<String>,
    /// What was set.
    pub settings: Settings,
    /// The fabric: `soft` or `verbs`.
    pub fabric: &'static str,
    /// The same in words.
    pub fabric_text: String,
    /// What the rails carry together in one direction, in payload; null where no limit is known.
    pub limit_gb_s: Option<f64>,
    /// The same in words, and where it comes from.
    pub limit_text: String,
    /// The libraries, ours first.
    pub sides: Vec<SideReport>,
    /// What was measured, in order.
    pub scenarios: Vec<ScenarioReport>,
}

/// A library.
#[derive(Debug, Serialize)]
pub struct SideReport {
    /// `ours` or `theirs`.
    pub name: &'static str,
    /// Its file.
    pub library: PathBuf,
    /// The version of the plugin interface that was used.
    pub plugin_interface: u32,
    /// Environment of its ranks alone, as on the command line.
    pub environment: Vec<String>,
    /// The network as NCCL would see it, by rank.
    pub networks: Vec<Network>,
    /// What the plugin logged about its connections, by rank.
    pub connections: Vec<Vec<String>>,
}

/// A scenario.
#[derive(Debug, Serialize)]
pub struct ScenarioReport {
    /// Its name.
    pub name: &'static str,
    /// One for each size, number of connections, or phase.
    pub points: Vec<Value>,
    /// Streams window by window, where a rail was slowed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub courses: Vec<Course>,
    /// Descriptions of the first wrong bytes.
    pub first_wrong: Vec<String>,
}

impl Report {
    /// The report of a run that has not begun.
    pub fn new(plan: &Plan) -> Self {
        Self {
            command: "bench",
            version: env!("CARGO_PKG_VERSION"),
            label: plan.label.clone(),
            settings: plan.settings.clone(),
            ..Self::default()
        }
    }

    /// Adds the results of a scenario.
    pub fn add(
        &mut self,
        scenario: Scenario,
        names: &[&str],
        points: &[Point],
        first_wrong: Vec<String>,
        courses: Vec<Course>,
    ) {
        let points = points.iter().map(|point| point.to_json(names)).collect();
        self.scenarios.push(ScenarioReport { name: scenario.name(), points, courses, first_wrong });
    }
}

impl SideReport {
    /// What is known about a library at the end of `plan`.
    pub fn new(about: &About, plan: &Plan) -> Self {
        let own = if about.name == "theirs" { plan.against_env.as_slice() } else { &[] };
        Self {
            name: about.name,
            library: about.library.clone(),
            plugin_interface: about.abi,
            environment: own.iter().map(|(name, value)| format!("{name}={value}")).collect(),
            networks: about.networks.clone(),
            connections: about.connections.clone(),
        }
    }
}
