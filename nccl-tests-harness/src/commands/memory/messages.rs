//! The messages between the command and the process that tries a kind of memory.

use super::litmus::{self, Found};
use crate::gpu::{About, Kind};
use crate::ranks::device::Network;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The only order to the process: the kind of memory, and the messages or the test in it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Setup {
    /// The kind of memory.
    pub kind: Kind,
    /// The plugin's library.
    pub plugin: PathBuf,
    /// In place of NCCL's communicator.
    pub job: u64,
    /// Sizes of the messages, the largest last (one or more).
    pub sizes: Vec<usize>,
    /// The GPU that writes, and the one that checks.
    pub gpus: [u32; 2],
    /// The litmus test of LL128, in buffers of the largest size, in place of messages.
    pub litmus: Option<litmus::Order>,
}

/// The answers of the process: first `Ready`, then `Registered`, then the result.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Answer {
    /// The plugin is up and connected with itself.
    Ready(Ready),
    /// The plugin registered both buffers, or the row ends here with this result.
    Registered(Result<(), Fate>),
    /// The result of moving.
    Moved(Moved),
    /// The result of the litmus test.
    Litmus(Found),
}

/// The network and the GPUs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Ready {
    /// The network as NCCL would see it.
    pub network: Network,
    /// The plugin's log lines about the connection.
    pub connections: Vec<String>,
    /// The GPUs that write and check, or why there are none.
    pub gpus: Result<[About; 2], String>,
}

/// The result of a kind of memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// There is no such memory here.
    NotTried {
        /// Why there is none.
        reason: String,
    },
    /// The plugin did not register it.
    Refused {
        /// The plugin's error.
        reason: String,
    },
    /// An error ended the attempt.
    Failed {
        /// True if both buffers were registered before the error.
        registered: bool,
        /// The error.
        reason: String,
    },
    /// All messages arrived.
    Moved(Moved),
}

/// The result of moving.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// The writer of the sender's memory.
    pub written_by: String,
    /// The checker of the receiver's memory.
    pub checked_by: String,
    /// The messages, one for each size.
    pub messages: Vec<Message>,
}

/// A message that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Size of the message.
    pub bytes: usize,
    /// Wrong bytes.
    pub wrong: u32,
    /// The place of the first wrong byte.
    pub first_wrong: Option<u32>,
    /// Bytes after the message that were changed.
    pub beyond: u32,
}

impl Message {
    /// Describes the errors of the message, if it has any.
    pub fn fault(&self) -> Option<String> {
        let Self { bytes, wrong, first_wrong, beyond } = self;
        let first = first_wrong.map(|first| format!(", the first at {first}")).unwrap_or_default();
        match (*wrong, *beyond) {
            (0, 0) => None,
            (_, 0) => Some(format!("{wrong} of {bytes} bytes WRONG{first}")),
            (0, _) => Some(format!("{beyond} of the bytes after a message of {bytes} bytes CHANGED")),
            _ => Some(format!("{wrong} of {bytes} bytes WRONG{first}, and {beyond} of the bytes after them CHANGED")),
        }
    }
}

impl Moved {
    /// Counts the wrong bytes of all messages, and the changed ones after them.
    pub fn wrong(&self) -> u64 {
        self.messages.iter().map(|message| u64::from(message.wrong) + u64::from(message.beyond)).sum()
    }
}
