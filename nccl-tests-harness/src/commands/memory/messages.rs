//! The kinds of memory, and the messages between the command and the process that tries one.

use super::litmus::{self, Found};
use crate::gpu::About;
use crate::net::Pointer;
use crate::ranks::device::Network;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A kind of memory, and what the plugin registers it as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The allocator's: pageable.
    Malloc,
    /// Pinned by CUDA, portable and mapped.
    HostAlloc,
    /// The allocator's, pinned by CUDA after the fact.
    HostRegister,
    /// Shared by processor and GPU.
    Managed,
    /// The GPU's own, by its address, as if it were the host's.
    Device,
    /// The GPU's own, said to be that.
    DeviceAsCuda,
}

impl Kind {
    /// All of them, in the order of the table.
    pub const ALL: [Self; 6] =
        [Self::Malloc, Self::HostAlloc, Self::HostRegister, Self::Managed, Self::Device, Self::DeviceAsCuda];

    /// By the function that allocates it, as CUDA's users know it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Malloc => "malloc",
            Self::HostAlloc => "cudaHostAlloc",
            Self::HostRegister => "cudaHostRegister",
            Self::Managed => "cudaMallocManaged",
            Self::Device => "cudaMalloc",
            Self::DeviceAsCuda => "cudaMalloc, as CUDA",
        }
    }

    /// Whether NCCL needs it: its buffers are of these kinds.
    pub fn must_register(self) -> bool {
        matches!(self, Self::Malloc | Self::HostAlloc | Self::HostRegister)
    }

    /// The pointer type for regMr.
    pub fn pointer(self) -> Pointer {
        match self {
            Self::DeviceAsCuda => Pointer::Cuda,
            _ => Pointer::Host,
        }
    }
}

/// From the command to the process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Order {
    /// First of all: the kind of memory and the messages.
    Setup(Setup),
    /// Do the next thing: register, then move.
    Go,
}

/// The set-up of the process.
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
    /// In place of messages of these sizes: the litmus test of LL128, in buffers of the greatest size.
    pub litmus: Option<litmus::Order>,
}

/// The answers of the process: one to the set-up, then one to each [`Order::Go`].
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
    /// Who wrote the sender's memory.
    pub written_by: String,
    /// Who checked the receiver's.
    pub checked_by: String,
    /// One for each size.
    pub messages: Vec<Message>,
}

/// A message that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Its size.
    pub bytes: usize,
    /// Wrong bytes.
    pub wrong: u32,
    /// The first of them.
    pub first_wrong: Option<u32>,
    /// Bytes after it that were changed.
    pub beyond: u32,
}

impl Message {
    /// Describes its errors, if it has any.
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
    /// Wrong bytes of all messages, and changed ones after them.
    pub fn wrong(&self) -> u64 {
        self.messages.iter().map(|message| u64::from(message.wrong) + u64::from(message.beyond)).sum()
    }
}
