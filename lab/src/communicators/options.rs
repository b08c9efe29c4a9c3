//! The command line of `spark-lab communicators`, checked before anything starts.

use anyhow::Result;
use clap::Args;
use nccl_tests_harness::scene::network::Network;
use nccl_tests_harness::scene::{SceneOptions, Setting};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// What is done to communicators.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
pub enum Scenario {
    /// Eight communicators at once, all running all-reduces.
    Several,
    /// Communicators split in several ways; the parent is used after its children, and destroyed before one of them.
    Split,
    /// Communicators created, used and destroyed repeatedly; memory, descriptors and threads must not grow.
    Again,
    /// Communicators aborted by all ranks during all-reduces, then created again.
    Abort,
    /// The last rank is killed during all-reduces; the others must get an error.
    Lost,
    /// The last rank uses NCCL's Socket network, the others the plugin; all must get an error.
    Mixed,
    /// One device of rank 0, then all of them, leave the bus during all-reduces and return; the next communicator must use all. Only on
    /// the software fabric, and over the plugin.
    Returns,
}

impl Scenario {
    /// All, in the order in which they run.
    pub const ALL: [Self; 7] =
        [Self::Several, Self::Split, Self::Again, Self::Abort, Self::Lost, Self::Mixed, Self::Returns];

    /// As the command line has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Several => "several",
            Self::Split => "split",
            Self::Again => "again",
            Self::Abort => "abort",
            Self::Lost => "lost",
            Self::Mixed => "mixed",
            Self::Returns => "returns",
        }
    }
}

/// Options of communicators.
#[derive(Debug, Args)]
pub struct Options {
    /// Scenarios to run [default: all that the network allows].
    #[arg(value_name = "SCENARIO", value_enum)]
    scenarios: Vec<Scenario>,
    /// Number of ranks to start on this machine; to NCCL each is a host of its own.
    #[arg(short, long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(2..=16))]
    ranks: u16,
    /// Number of communicators that scenario `again` creates.
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(20..=100_000))]
    count: u32,
    /// Network to use, for comparison.
    #[arg(long, value_name = "NETWORK", value_enum, default_value = "spark")]
    network: Network,
    #[command(flatten)]
    scene: SceneOptions,
}

/// What to run.
#[derive(Debug)]
pub struct Plan {
    /// In this order; one or more.
    pub scenarios: Vec<Scenario>,
    /// Two or more.
    pub ranks: usize,
    /// Communicators that [`Scenario::Again`] makes.
    pub count: u32,
    /// What NCCL is to use.
    pub network: Network,
    /// What NCCL is run in.
    pub setting: Setting,
}

impl Options {
    /// What to run; `program` is this program's file.
    ///
    /// # Errors
    /// When options contradict each other, or the plugin is not there.
    pub fn plan(self, program: &Path) -> Result<Plan> {
        let scenarios = if self.scenarios.is_empty() { Scenario::ALL.to_vec() } else { self.scenarios };
        Ok(Plan {
            scenarios,
            ranks: usize::from(self.ranks),
            count: self.count,
            network: self.network,
            setting: self.scene.setting(program)?,
        })
    }
}
