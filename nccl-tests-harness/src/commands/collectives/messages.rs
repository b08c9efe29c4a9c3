//! The messages between the command and the ranks of a collective.

use super::Collective;
use crate::ranks::device::Network;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    Setup(Setup),
    /// Connect to the peers. For each link, `handles` has a handle of the rank that the link sends
    /// to.
    Connect {
        handles: Vec<Vec<u8>>,
    },
    /// Fill the memory, unless checks are off, and run the warm-up iterations of a size.
    Prepare {
        /// Number of elements for this size, from [`Collective::count`].
        count: usize,
    },
    /// All ranks are ready: run the timed iterations, then the checked ones.
    Go,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct RunParameters {
    pub collective: Collective,
    /// Number of ranks (2 or more).
    pub ranks: usize,
    /// Connections from each rank to each rank that it sends to (1 or more).
    pub channels: usize,
    pub warmup_iters: u32,
    /// Timed iterations (1 or more).
    pub iters: u32,
    /// Checked iterations after the timed ones; 0 switches all checks off.
    pub check_iters: u32,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Setup {
    pub rank: usize,
    pub plugin: PathBuf,
    /// Number passed to the plugin in place of NCCL's communicator id; the same in all ranks.
    pub job: u64,
    pub max_count: usize,
    pub terms: RunParameters,
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    Listening {
        network: Network,
        handles: Vec<Vec<u8>>,
    },
    Connected {
        /// Log lines of the plugin about the connections, each line once.
        lines: Vec<String>,
    },
    Ready,
    Measured(Measurement),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Measurement {
    pub seconds: f64,
    pub p50_s: f64,
    pub p99_s: f64,
    /// Longest time, within the timed iterations, in which no message was posted or completed.
    pub longest_pause_s: f64,
    /// Wrong bytes in all checked iterations; `None` if checks are off.
    pub wrong: Option<u64>,
    pub first_wrong: Option<String>,
}
