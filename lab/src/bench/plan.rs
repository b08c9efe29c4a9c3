//! What `spark-lab bench` is to do: the scenarios and the checked options.

use super::figures::Metric;
use super::show::Places;
use crate::pair::messages::Layout;
use anyhow::Result;
use nccl_tests_harness::fabric::{Kind, Wish};
use nccl_tests_harness::output::report::Target;
use nccl_tests_harness::ranks::job::RankEnv;
use nccl_tests_harness::ranks::launch::World;
use nccl_tests_harness::ranks::rendezvous::Meeting;
use nccl_tests_harness::sizes::{self, Step};
use nccl_tests_harness::usage::wrong;
use serde::Serialize;
use std::path::PathBuf;
use std::time::Duration;

/// Two: one sends, one receives.
pub const RANKS: usize = 2;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Scenario {
    /// Payload per second, by message size.
    Bandwidth,
    /// Half a round trip, by message size.
    Latency,
    /// Small messages per second.
    Rate,
    /// 1, 2, 4 and more connections at once.
    Connections,
    /// Bandwidth with one rail at a quarter of its rate (software fabric; on verbs the rails as they are).
    Unequal,
    /// A stream during which one rail is slowed to a quarter of its rate and restored.
    Slowdown,
}

/// What is the same in all scenarios, as the JSON shows it.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Settings {
    /// Rounds of each measurement (1 or more).
    pub rounds: u32,
    /// About how long a run takes.
    pub seconds: f64,
    /// How long a rank sleeps when nothing moved, in microseconds.
    pub rest_us: u32,
    /// Messages in flight on each connection (1 to 32).
    pub in_flight: usize,
    /// Connections of a stream (1 or more).
    pub channels: usize,
    /// Size of the messages over many connections.
    pub connection_bytes: usize,
    /// Size of the messages while a rail is slowed.
    pub flow_bytes: usize,
    /// Commands that slow a rail and restore it.
    pub turns: Option<[String; 2]>,
    /// Environment of single ranks, of both libraries.
    pub rank_env: Vec<RankEnv>,
}

/// What to run, checked.
#[derive(Debug, Clone)]
pub struct Plan {
    /// What is the same in all scenarios.
    pub settings: Settings,
    /// The scenarios asked for; empty: all that the fabric allows.
    pub scenarios: Vec<Scenario>,
    /// Our library.
    pub plugin: PathBuf,
    /// The version of the plugin interface to use with it.
    pub abi: Option<u32>,
    /// The other library.
    pub against: Option<PathBuf>,
    /// The version of the plugin interface to use with that.
    pub against_abi: Option<u32>,
    /// Environment of the other library's ranks alone.
    pub against_env: Vec<(String, String)>,
    /// The first size, in place of the scenario's own.
    pub min_bytes: Option<usize>,
    /// The largest size, in place of the scenario's own.
    pub max_bytes: Option<usize>,
    /// The factor from one size to the next (2 or more).
    pub step_factor: Option<usize>,
    /// The most connections at once.
    pub max_connections: usize,
    /// What the rails carry together in payload, where the user says it.
    pub limit_mbps: Option<f64>,
    /// The user's name for the run.
    pub label: Option<String>,
    /// How long a run may make no progress.
    pub timeout: Duration,
    /// The fabric asked for.
    pub fabric: Wish,
    /// The verbs library that the user's environment names.
    pub verbs_library: Option<String>,
    /// Where the JSON goes.
    pub json: Option<Target>,
    /// The folder for charts.
    pub plot: Option<PathBuf>,
    /// The launcher that started this process as one of the ranks, and where those meet.
    pub launched: Option<(World, Meeting)>,
}

impl Settings {
    /// Messages of a size.
    pub fn layout(&self, bytes: usize) -> Layout {
        Layout { bytes, in_flight: self.in_flight, rest_us: self.rest_us }
    }
}

impl Scenario {
    /// Connections come first: memory that the others leave behind would be counted as theirs.
    pub const ALL: [Self; 6] =
        [Self::Connections, Self::Bandwidth, Self::Latency, Self::Rate, Self::Unequal, Self::Slowdown];

    /// Its name as in the command.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bandwidth => "bandwidth",
            Self::Latency => "latency",
            Self::Rate => "rate",
            Self::Connections => "connections",
            Self::Unequal => "unequal",
            Self::Slowdown => "slowdown",
        }
    }

    /// What the first column of its table has.
    pub fn places(self) -> Places {
        match self {
            Self::Connections => Places::Connections,
            Self::Slowdown => Places::Phases,
            _ => Places::Sizes,
        }
    }

    /// What is measured at each place; the first is the one that the limit is for.
    pub fn metrics(self) -> &'static [Metric] {
        match self {
            Self::Bandwidth | Self::Unequal | Self::Slowdown => &[Metric::Bandwidth],
            Self::Latency => &[Metric::P50, Metric::P99, Metric::Least],
            Self::Rate => &[Metric::Rate],
            Self::Connections => &[Metric::Bandwidth, Metric::Connect, Metric::SenderMemory, Metric::ReceiverMemory],
        }
    }
}

impl Plan {
    /// The sizes of a scenario, in bytes.
    pub fn sizes(&self, scenario: Scenario) -> Vec<usize> {
        let (least, most, factor) = match scenario {
            Scenario::Latency => (8, 1 << 20, 8),
            Scenario::Rate => return vec![8, 512, 4096],
            _ => (4 << 10, 16 << 20, 4),
        };
        // One end alone moves the other as far as it must.
        let (least, most) = match (self.min_bytes, self.max_bytes) {
            (Some(least), Some(most)) => (least, most),
            (Some(given), None) => (given, most.max(given)),
            (None, Some(given)) => (least.min(given), given),
            (None, None) => (least, most),
        };
        let mut sizes: Vec<_> = sizes::sweep(least, most, Step::Factor(self.step_factor.unwrap_or(factor))).collect();
        // The largest is measured whether the steps meet it or not.
        if sizes.last().is_some_and(|last| *last < most) {
            sizes.push(most);
        }
        sizes
    }

    /// The libraries to measure: name, file, and version of the plugin interface.
    pub fn libraries(&self) -> Vec<(&'static str, &PathBuf, Option<u32>)> {
        let ours = ("ours", &self.plugin, self.abi);
        let theirs = self.against.as_ref().map(|library| ("theirs", library, self.against_abi));
        std::iter::once(ours).chain(theirs).collect()
    }

    /// Environment of the ranks of library `number`.
    pub fn environment(&self, number: usize) -> Vec<RankEnv> {
        let both = |(name, value): &(String, String)| {
            let env = |rank| RankEnv { rank, name: name.clone(), value: value.clone() };
            (0..RANKS).map(env).collect::<Vec<_>>()
        };
        let own: Vec<RankEnv> = if number == 1 { self.against_env.iter().flat_map(both).collect() } else { Vec::new() };
        // What comes last counts.
        self.settings.rank_env.iter().cloned().chain(own).collect()
    }

    /// The scenarios to measure on a fabric of `kind`.
    ///
    /// # Errors
    /// When one was asked for that needs options which are not given.
    pub fn scenarios(&self, kind: Kind) -> Result<Vec<Scenario>> {
        let soft = kind == Kind::Soft;
        let all = Scenario::ALL.into_iter().filter(|scenario| match scenario {
            Scenario::Unequal => soft,
            Scenario::Slowdown => soft || self.settings.turns.is_some(),
            _ => true,
        });
        let scenarios = if self.scenarios.is_empty() { all.collect() } else { self.scenarios.clone() };
        if scenarios.contains(&Scenario::Slowdown) && !soft && self.settings.turns.is_none() {
            return Err(wrong(
                "slowdown on verbs needs --fall COMMAND and --return COMMAND, which slow a rail and restore it",
            ))?;
        }
        Ok(scenarios)
    }
}
