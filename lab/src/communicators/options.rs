//! The command line of `spark-lab communicators`, checked before anything starts.

use anyhow::Result;
use clap::builder::RangedU64ValueParser;
use clap::{Args, ValueEnum};
use nccl_tests_harness::scene::network::Network;
use nccl_tests_harness::scene::{SceneOptions, Setting};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// A test of communicators. The order is the order of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum Scenario {
    /// Eight communicators together, all running all-reduces.
    Several,
    /// Communicators split in several ways; the parent is used after its children, and destroyed
    /// before one of them.
    Split,
    /// Communicators created, used and destroyed repeatedly; memory, descriptors and threads must
    /// not grow.
    Again,
    /// Communicators aborted by all ranks during all-reduces, then created again.
    Abort,
    /// The last rank is killed during all-reduces; the others must get an error.
    Lost,
    /// The last rank uses NCCL's Socket network, the others the plugin; all must get an error.
    Mixed,
    /// One device of rank 0, then all of them, leave the bus during all-reduces and return; the
    /// next communicator must use all. Only on the software fabric, and over the plugin.
    Returns,
}

impl Scenario {
    pub fn name(self) -> String {
        self.to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// Options of communicators.
#[derive(Debug, Args)]
pub struct Options {
    #[command(flatten)]
    tests: Tests,
    #[command(flatten)]
    scene: SceneOptions,
}

/// The options that say which tests run.
#[derive(Debug, Args)]
pub struct Tests {
    /// Scenarios to run [default: all that the network allows].
    #[arg(value_name = "SCENARIO", value_enum, default_values_t = Scenario::value_variants().to_vec(), hide_default_value = true)]
    pub scenarios: Vec<Scenario>,
    /// Number of ranks to start on this machine; to NCCL each is a host of its own.
    #[arg(short, long, value_name = "N", default_value_t = 2, value_parser = RangedU64ValueParser::<usize>::new().range(2..=16))]
    pub ranks: usize,
    /// Number of communicators that scenario `again` creates.
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(20..=100_000))]
    pub count: u32,
    /// Network to use, for comparison.
    #[arg(long, value_name = "NETWORK", value_enum, default_value = "spark")]
    pub network: Network,
}

#[derive(Debug)]
pub struct Plan {
    pub tests: Tests,
    pub setting: Setting,
}

impl Options {
    /// Checks the options. `program` is this program's file. Fails if options contradict each other
    /// or the plugin is missing.
    pub fn plan(self, program: &Path) -> Result<Plan> {
        Ok(Plan {
            tests: self.tests,
            setting: self.scene.setting(program)?,
        })
    }
}
