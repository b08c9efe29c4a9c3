//! The messages between the command and a pair of ranks: rank 0 sends, rank 1 receives.

use nccl_tests_harness::ranks::device::Network;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The set-up of a rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Setup {
    /// Its number: 0 or 1.
    pub rank: usize,
    /// The plugin's library.
    pub plugin: PathBuf,
    /// The version of the plugin interface to use; none: the newest that the library has.
    pub abi: Option<u32>,
    /// In place of NCCL's communicator: the same number in both ranks.
    pub job: u64,
}

/// The size of messages, and how many are in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Bytes of each message (1 or more).
    pub bytes: usize,
    /// Messages in flight on each connection (1 or more).
    pub in_flight: usize,
    /// How long a rank sleeps when nothing moved, in microseconds; 0: it yields and polls again, as NCCL does.
    pub rest_us: u32,
}

/// From the command to a rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Order {
    /// First of all: what the rank is.
    Setup(Setup),
    /// Listen for this many more connections.
    Listen {
        /// How many.
        connections: usize,
    },
    /// Connect to these, accept on all listeners, then register memory for each connection.
    Connect {
        /// As the other rank's plugin filled them.
        handles: Vec<Vec<u8>>,
        /// Bytes of memory for each connection.
        buffer_bytes: usize,
    },
    /// Send each message buffer once, and check every byte that is received.
    Check {
        /// The messages.
        layout: Layout,
        /// Makes the data differ from earlier data.
        iteration: u64,
    },
    /// Send, or receive, this many messages on each connection.
    Stream {
        /// The messages.
        layout: Layout,
        /// How many.
        messages: u64,
    },
    /// Run a ping-pong of this many messages.
    PingPong {
        /// The messages.
        layout: Layout,
        /// How many each way.
        messages: u64,
    },
    /// Send, or receive, until ordered to stop.
    Flow {
        /// The messages.
        layout: Layout,
        /// Length of the windows in which bytes are counted, in milliseconds.
        window_ms: u64,
    },
    /// In a flow: note the time.
    Mark,
    /// In a flow: start no more messages.
    Stop,
    /// In a flow: end it after this many messages, or after those started if they are more.
    Until {
        /// How many since the start of the flow.
        messages: u64,
    },
    /// Close all connections.
    Close,
}

/// The answer to an order.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Answer {
    /// The plugin is up.
    Up {
        /// The network as NCCL would see it.
        network: Network,
        /// The version of the plugin interface that is spoken.
        abi: u32,
    },
    /// The rank listens.
    Listening {
        /// A handle for each connection.
        handles: Vec<Vec<u8>>,
    },
    /// All are connected.
    Connected(Opened),
    /// The result of a check.
    Checked {
        /// Wrong bytes.
        wrong: u64,
        /// A description of the first of them.
        first_wrong: Option<String>,
    },
    /// The stream has ended.
    Streamed {
        /// From the first call to the last completion.
        seconds: f64,
    },
    /// The ping-pong has ended; times of rank 0.
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

/// Connections that were opened.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Opened {
    /// From the first call of `connect` or `accept` to the last connection.
    pub seconds: f64,
    /// Resident memory before, in bytes.
    pub rss_before_bytes: u64,
    /// Resident memory after, in bytes, without that for messages.
    pub rss_after_bytes: u64,
    /// What the plugin logged about them.
    pub lines: Vec<String>,
}

/// Half a round trip.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct HalfTrip {
    /// The shortest, in microseconds.
    pub min_us: f64,
    /// The median, in microseconds.
    pub p50_us: f64,
    /// The 99th percentile, in microseconds.
    pub p99_us: f64,
}

/// The counts of a flow.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Flowed {
    /// Bytes completed in each window.
    pub windows_bytes: Vec<u64>,
    /// When `Mark` came, in seconds since the start.
    pub marks_s: Vec<f64>,
}
