//! The words between the command and the ranks that are measured with single messages: rank 0 sends, rank 1 receives.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What a rank has to know.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BenchSetup {
    /// Its number: 0 or 1.
    pub rank: usize,
    /// The plugin's library.
    pub plugin: PathBuf,
    /// The version of the plugin interface to speak; none: the newest that the library has.
    pub abi: Option<u32>,
    /// Stands for NCCL's communicator: the same number in both ranks.
    pub job: u64,
}

/// How messages lie in memory, and how many are under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Bytes of each message (1 or more).
    pub bytes: usize,
    /// Messages under way on each connection (1 or more).
    pub in_flight: usize,
    /// How long a rank rests when nothing moved, in microseconds; 0: it gives way and looks again, as NCCL does.
    pub rest_us: u32,
}

/// From the command to a rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Order {
    /// Listen for so many connections more.
    Listen {
        /// How many.
        connections: usize,
    },
    /// Connect to these and accept what was listened for; then register memory for each.
    Connect {
        /// As the other rank's plugin filled them.
        handles: Vec<Vec<u8>>,
        /// Bytes of memory for each connection.
        buffer_bytes: usize,
    },
    /// Send as many messages as lie in memory side by side, and check every byte that comes.
    Check {
        /// How they lie.
        layout: Layout,
        /// Tells the data from earlier data.
        iteration: u64,
    },
    /// Send, or receive, so many messages on each connection.
    Stream {
        /// How they lie.
        layout: Layout,
        /// How many.
        messages: u64,
    },
    /// Send so many messages to and fro, each after the one before.
    PingPong {
        /// How they lie.
        layout: Layout,
        /// How many each way.
        messages: u64,
    },
    /// Send, or receive, until told otherwise.
    Flow {
        /// How they lie.
        layout: Layout,
        /// Length of the windows in which bytes are counted, in milliseconds.
        window_ms: u64,
    },
    /// In a flow: note the time.
    Mark,
    /// In a flow: begin no further message.
    Stop,
    /// In a flow: end it after so many messages, or after those begun where they are more.
    Until {
        /// How many since the start of the flow.
        messages: u64,
    },
    /// Close all connections.
    Close,
}

/// What came of an order.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Answer {
    /// The rank listens.
    Listening {
        /// A handle for each connection.
        handles: Vec<Vec<u8>>,
    },
    /// All are connected.
    Connected(Opened),
    /// What came of a check.
    Checked {
        /// Wrong bytes.
        wrong: u64,
        /// The first of them in words.
        first_wrong: Option<String>,
    },
    /// The stream is through.
    Streamed {
        /// From the first call to the last completion.
        seconds: f64,
    },
    /// The last message is back; times of rank 0.
    PingPonged {
        /// From the first call to the last completion.
        seconds: f64,
        /// Half a round trip.
        half_trip: HalfTrip,
    },
    /// The flow has begun.
    Flowing,
    /// The time is noted.
    Marked,
    /// No further message is begun unless an end beyond is named.
    Stopped {
        /// How many were begun.
        messages: u64,
    },
    /// The flow is through.
    Flowed(Flowed),
    /// All connections are closed.
    Closed,
}

/// How connections came up.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Opened {
    /// From the first call of `connect` or `accept` to the last connection.
    pub seconds: f64,
    /// Resident memory before, in bytes.
    pub rss_before_bytes: u64,
    /// Resident memory after, in bytes, without that for messages.
    pub rss_after_bytes: u64,
    /// What the plugin said about them.
    pub lines: Vec<String>,
}

/// Half a round trip.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct HalfTrip {
    /// The least, in microseconds.
    pub min_us: f64,
    /// Half of them took no longer, in microseconds.
    pub p50_us: f64,
    /// 99 of 100 took no longer, in microseconds.
    pub p99_us: f64,
}

/// What was counted in a flow.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Flowed {
    /// Bytes completed in each window.
    pub windows_bytes: Vec<u64>,
    /// When `Mark` came, in seconds since the start.
    pub marks_s: Vec<f64>,
}
