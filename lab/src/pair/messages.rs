//! The messages between the command and a pair of ranks: rank 0 sends, rank 1 receives.

use nccl_tests_harness::ranks::device::Network;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The size of messages, and how they are driven.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Bytes of each message (1 or more).
    pub bytes: usize,
    /// Messages in flight on each connection (1 or more).
    pub in_flight: usize,
    /// Microseconds that a rank sleeps when nothing moved; 0: it yields and polls again, as NCCL
    /// does.
    pub rest_us: u32,
}

/// From the command to a rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Order {
    /// First of all: start the plugin.
    Setup {
        /// The rank's number: 0 or 1.
        rank: usize,
        /// The plugin's library.
        plugin: PathBuf,
        /// The version of the plugin interface to use; none: the newest that the library has.
        abi: Option<u32>,
        /// In place of NCCL's communicator: the same number in both ranks.
        job: u64,
    },
    /// Listen for more connections.
    Listen {
        /// The number of connections.
        connections: usize,
    },
    /// Connect to these handles, accept on all listeners, then register memory for each connection.
    Connect {
        /// The handles that the other rank's plugin filled.
        handles: Vec<Vec<u8>>,
        /// Bytes of memory for each connection.
        buffer_bytes: usize,
    },
    /// Send each message buffer once, and check every received byte.
    Check {
        /// The messages.
        layout: Layout,
        /// Makes the data differ from earlier data.
        iteration: u64,
    },
    /// Send, or receive, messages on each connection.
    Stream {
        /// The messages.
        layout: Layout,
        /// Their number on each connection.
        messages: u64,
    },
    /// Run a ping-pong.
    PingPong {
        /// The messages.
        layout: Layout,
        /// Their number each way.
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
        /// The number of messages since the start of the flow.
        messages: u64,
    },
    /// Close all connections.
    Close,
}

/// The answer to an order.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Answer {
    /// The network as NCCL would see it, and the version of the plugin interface in use.
    Up(Network, u32),
    /// A handle for each connection that the rank listens for.
    Listening(Vec<Vec<u8>>),
    /// All connections are made.
    Connected(Opened),
    /// The number of wrong bytes, and a description of the first of them.
    Checked(u64, Option<String>),
    /// Seconds of a stream or a ping-pong from the first call to the last completion; half a round
    /// trip of a ping-pong's rank 0 in microseconds: median, 99th percentile, shortest.
    Ran(f64, Vec<f64>),
    /// The flow has begun, the time is noted, or all connections are closed.
    Done,
    /// The number of messages started. No further one is started unless a later order names a later
    /// end.
    Stopped(u64),
    /// The flow has ended.
    Flowed(Flowed),
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
    /// The plugin's log lines about them.
    pub lines: Vec<String>,
}

/// The counts of a flow.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Flowed {
    /// Bytes completed in each window.
    pub windows_bytes: Vec<u64>,
    /// The times of each [`Order::Mark`], in seconds since the start.
    pub marks_s: Vec<f64>,
}
