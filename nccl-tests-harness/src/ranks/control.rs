//! The messages between the command and its ranks: one JSON object a line over a socket, which is a rank's standard input: a
//! socket pair where the command started the rank, TCP where a launcher did.

use crate::commands::collectives::Collective;
use crate::proofs::bench::messages::{Answer, BenchSetup, Order};
use crate::proofs::memory::messages as memory;
use crate::ranks::device::Network;
use anyhow::{Context, Result, anyhow, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// From the command to a rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum ToRank {
    /// First of all: what the job is.
    Setup(Setup),
    /// The handles to connect to, one for each link.
    Connect {
        /// As the plugins of the ranks that the links go to filled them.
        handles: Vec<Vec<u8>>,
    },
    /// Get ready to time a size: fill, and run the warm-up.
    Prepare {
        /// How many elements nccl-tests would count.
        count: usize,
    },
    /// All ranks are ready: run the timed iterations, then the checked ones. A process that tries memory: do the next thing.
    Go,
    /// First of all, of a rank that is measured with single messages: what it is.
    Bench(BenchSetup),
    /// What such a rank does next.
    Order(Order),
    /// First of all, of a process that tries a kind of memory: which one.
    Memory(memory::Setup),
    /// Close everything and exit.
    Finish,
}

/// What a rank has to know.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Setup {
    /// Its number.
    pub rank: usize,
    /// How many there are.
    pub ranks: usize,
    /// Which collective.
    pub collective: Collective,
    /// How many connections to each rank that it sends to.
    pub channels: usize,
    /// The plugin's library.
    pub plugin: PathBuf,
    /// Stands for NCCL's communicator: the same number in all ranks.
    pub job: u64,
    /// The greatest count of elements.
    pub max_count: usize,
    /// Iterations before the timed ones.
    pub warmup_iters: u32,
    /// Timed iterations.
    pub iters: u32,
    /// Checked iterations after the timed ones; 0 switches all checks off.
    pub check_iters: u32,
}

/// From a rank to the command.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum FromRank {
    /// The plugin is up and listens.
    Listening {
        /// What it turned out to be.
        network: Network,
        /// One handle for each link.
        handles: Vec<Vec<u8>>,
    },
    /// All links are connected, all memory is registered.
    Connected {
        /// What the plugin said about the connections, each line once.
        lines: Vec<String>,
    },
    /// Filled and warmed up.
    Ready,
    /// A size is done.
    Measured(Measurement),
    /// The plugin of a rank that is measured with single messages is up.
    Up {
        /// What it turned out to be.
        network: Network,
        /// The version of the plugin interface that is spoken.
        abi: u32,
    },
    /// What came of an order.
    Answer(Answer),
    /// What came of a kind of memory.
    Memory(memory::Answer),
    /// A sign of life, four times a second.
    Beat {
        /// Counts what got done since the start.
        ticks: u64,
        /// What it does at the moment.
        doing: String,
    },
    /// It cannot go on.
    Failed {
        /// The error.
        reason: String,
    },
}

/// What one rank measured at one size.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Measurement {
    /// The time of all timed iterations together, in seconds.
    pub seconds: f64,
    /// The median time of one of them, in seconds.
    pub p50_s: f64,
    /// The time that 99 % of them do not exceed, in seconds.
    pub p99_s: f64,
    /// The longest time within them in which nothing was posted or completed, in seconds.
    pub longest_pause_s: f64,
    /// Wrong bytes of all checked iterations; none without checks.
    pub wrong: Option<u64>,
    /// The first of them in words.
    pub first_wrong: Option<String>,
}

/// The function that takes one kind of message as the answer to what was asked: `answer!(FromRank::Connected { lines } => lines)`.
macro_rules! answer {
    ($pattern:pat => $value:expr) => {
        |message| match message {
            $pattern => Some($value),
            _ => None,
        }
    };
}
pub(crate) use answer;

/// More is no message of these: the other end may be another host's, and must not take this one's memory.
const LINE_MAX_BYTES: u64 = 16 << 20;

/// The writing half of a line between command and rank.
pub struct Sender(Mutex<File>);

/// The reading half.
pub struct Receiver(BufReader<File>);

/// Splits a connected socket in its halves.
pub fn split(socket: impl Into<OwnedFd>) -> Result<(Sender, Receiver)> {
    let stream = File::from(socket.into());
    let reader = stream.try_clone().context("duplicate the control socket")?;
    Ok((Sender(Mutex::new(stream)), Receiver(BufReader::new(reader))))
}

impl Sender {
    /// Sends one message.
    pub fn send(&self, message: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(message).context("encode a control message")?;
        line.push(b'\n');
        let mut stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        stream.write_all(&line).context("write to the control socket")
    }
}

impl Receiver {
    /// The next message; none at the end.
    pub fn receive<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        let mut line = String::new();
        match self.0.by_ref().take(LINE_MAX_BYTES).read_line(&mut line) {
            Ok(0) => Ok(None),
            Ok(bytes) if bytes as u64 == LINE_MAX_BYTES => {
                bail!("a control message has more than {LINE_MAX_BYTES} bytes")
            }
            Ok(_) => {
                serde_json::from_str(&line).map(Some).map_err(|error| anyhow!("control message {line:?}: {error}"))
            }
            Err(error) => Err(error).context("read from the control socket"),
        }
    }
}
