//! The messages between the command and the ranks of a collective.

use super::Collective;
use crate::ranks::device::Network;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A message from the command to a rank.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// The first order: the rank's job.
    Setup(Setup),
    /// The handles to connect to, one for each link.
    Connect {
        /// Filled by the plugins of the ranks at the other ends.
        handles: Vec<Vec<u8>>,
    },
    /// Get ready to time a size: fill the memory, and run the warm-up.
    Prepare {
        /// Elements, as nccl-tests counts them.
        count: usize,
    },
    /// All ranks are ready: run the timed iterations, then the checked ones.
    Go,
}

/// A measurement of a collective, the same for all of its ranks.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Terms {
    /// The collective.
    pub collective: Collective,
    /// Number of ranks (2 or more).
    pub ranks: usize,
    /// Connections from each rank to each rank that it sends to (1 or more).
    pub channels: usize,
    /// Iterations before the timed ones.
    pub warmup_iters: u32,
    /// Timed iterations (1 or more).
    pub iters: u32,
    /// Checked iterations after the timed ones; 0 switches all checks off.
    pub check_iters: u32,
}

/// The job of a rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Setup {
    /// Number of this rank.
    pub rank: usize,
    /// The plugin's library.
    pub plugin: PathBuf,
    /// A number in place of NCCL's communicator, the same in all ranks.
    pub job: u64,
    /// The greatest count of elements.
    pub max_count: usize,
    /// The measurement.
    pub terms: Terms,
}

/// A message from a rank to the command.
#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    /// The plugin is up and listens.
    Listening {
        /// The network as NCCL would see it.
        network: Network,
        /// One handle for each link.
        handles: Vec<Vec<u8>>,
    },
    /// All links are connected, all memory is registered.
    Connected {
        /// The plugin's log lines about the connections, each line once.
        lines: Vec<String>,
    },
    /// Filled and warmed up.
    Ready,
    /// A size is done.
    Measured(Measurement),
}

/// Figures of one rank at one size.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Measurement {
    /// The time of all timed iterations together, in seconds.
    pub seconds: f64,
    /// The median time of an iteration, in seconds.
    pub p50_s: f64,
    /// The time that 99 % of the iterations do not exceed, in seconds.
    pub p99_s: f64,
    /// The longest time within the iterations in which nothing was posted or completed, in seconds.
    pub longest_pause_s: f64,
    /// Wrong bytes of all checked iterations; none without checks.
    pub wrong: Option<u64>,
    /// A description of the first wrong byte.
    pub first_wrong: Option<String>,
}
