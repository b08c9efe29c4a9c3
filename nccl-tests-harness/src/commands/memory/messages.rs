//! The messages between the command and the process that tests a kind of memory.

use super::litmus::{self, Found};
use crate::gpu::{GpuInfo, Kind};
use crate::ranks::device::Network;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Setup {
    pub kind: Kind,
    pub plugin: PathBuf,
    /// Number of the job, passed to the plugin in place of NCCL's communicator id.
    pub job: u64,
    /// One or more sizes of messages in bytes, the largest last.
    pub sizes: Vec<usize>,
    /// CUDA's numbers of the GPU that writes and of the GPU that checks.
    pub gpus: [u32; 2],
    /// If set, the LL128 litmus test runs instead of messages, in buffers of the largest size.
    pub litmus: Option<litmus::Order>,
}

/// The answers of the process: first `Ready`, then `Registered`, then the result (`Moved` or
/// `Litmus`).
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Answer {
    Ready(Ready),
    /// `Ok` if the plugin registered both buffers. Otherwise the error is the final result for the
    /// tested kind of memory, and no further answer follows.
    Registered(Result<(), TestResult>),
    Moved(Moved),
    Litmus(Found),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Ready {
    pub network: Network,
    /// The plugin's log lines about the connection.
    pub connections: Vec<String>,
    /// The GPU that writes and the GPU that checks, or the reason why this machine has no GPU.
    pub gpus: Result<[GpuInfo; 2], String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TestResult {
    NotTried {
        reason: String,
    },
    Refused {
        reason: String,
    },
    Failed {
        /// True if both buffers were registered before the error.
        registered: bool,
        reason: String,
    },
    /// All messages arrived, possibly with wrong bytes.
    Moved(Moved),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    pub written_by: String,
    pub checked_by: String,
    pub messages: Vec<Message>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    pub bytes: usize,
    pub wrong: u32,
    /// Position of the first wrong byte.
    pub first_wrong: Option<u32>,
    /// Number of changed bytes after the end of the message.
    pub beyond: u32,
}

impl Message {
    pub fn fault(&self) -> Option<String> {
        let Self {
            bytes,
            wrong,
            first_wrong,
            beyond,
        } = self;
        let first = first_wrong
            .map(|first| format!(", the first at {first}"))
            .unwrap_or_default();
        match (*wrong, *beyond) {
            (0, 0) => None,
            (_, 0) => Some(format!("{wrong} of {bytes} bytes WRONG{first}")),
            (0, _) => Some(format!(
                "{beyond} bytes after the end of a message of {bytes} bytes CHANGED"
            )),
            _ => Some(format!(
                "{wrong} of {bytes} bytes WRONG{first}, and {beyond} of the bytes after them CHANGED"
            )),
        }
    }
}

impl Moved {
    /// Counts the wrong bytes of all messages, including changed bytes after them.
    pub fn wrong(&self) -> u64 {
        self.messages
            .iter()
            .map(|message| u64::from(message.wrong) + u64::from(message.beyond))
            .sum()
    }
}
