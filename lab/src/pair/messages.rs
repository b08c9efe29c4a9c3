//! Messages between the command and a pair of ranks: rank 0 sends, rank 1 receives.

use nccl_tests_harness::ranks::device::Network;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Size of messages, and how ranks post and test them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Bytes of each message (1 or more).
    pub bytes: usize,
    /// Messages in flight on each connection (1 or more).
    pub in_flight: usize,
    /// Microseconds that a rank sleeps when nothing moved; 0: it yields and polls, as NCCL does.
    pub rest_us: u32,
}

/// A message from the command to a rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Order {
    /// Starts the plugin; the first order.
    Setup {
        /// 0 or 1.
        rank: usize,
        plugin: PathBuf,
        /// Version of the plugin interface to use; none: the library's newest.
        abi: Option<u32>,
        /// Number of the job, the same in both ranks; takes the place of NCCL's communicator id.
        job: u64,
    },
    Listen {
        connections: usize,
    },
    /// Connects to the handles of the other rank's listeners, and accepts connections at this
    /// rank's listeners. Then registers memory for each connection.
    Connect {
        handles: Vec<Vec<u8>>,
        buffer_bytes: usize,
    },
    /// Sends each message buffer once, and checks every received byte.
    Check {
        layout: Layout,
        /// Makes the data differ from earlier data.
        iteration: u64,
    },
    /// Sends, or receives, messages on each connection.
    Stream {
        layout: Layout,
        /// Number of messages on each connection.
        messages: u64,
    },
    PingPong {
        layout: Layout,
        /// Number of messages each way.
        messages: u64,
    },
    /// Sends, or receives, until ordered to stop.
    Flow {
        layout: Layout,
        /// Length of the windows in which bytes are counted.
        window_ms: u64,
    },
    /// In a flow: notes the time.
    Mark,
    /// In a flow: lets no connection start more messages than the connection that is furthest ahead
    /// has started.
    Stop,
    /// In a flow: ends the flow after this many messages on each connection since its start. If a
    /// connection has started more, ends the flow after as many as that connection has started.
    Until {
        messages: u64,
    },
    Close,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Answer {
    /// The network as NCCL would see it, and the version of the plugin interface in use.
    Up(Network, u32),
    Listening(Vec<Vec<u8>>),
    Connected(Opened),
    /// Number of wrong bytes, and a description of the first.
    Checked(u64, Option<String>),
    /// Seconds of a stream or a ping-pong from the first call to the last completion. Rank 0 of a
    /// ping-pong adds half a round trip in microseconds: median, 99th percentile, shortest.
    Ran(f64, Vec<f64>),
    /// The flow has begun, the time is noted, or all connections are closed.
    Done,
    /// Number of messages after which each connection stops, unless a later order names a larger
    /// number. No connection has started more.
    Stopped(u64),
    Flowed(Flowed),
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Opened {
    /// From the first call of `connect` or `accept` to the last connection.
    pub seconds: f64,
    pub rss_before_bytes: u64,
    /// Resident memory with the new connections, but before memory for their messages is allocated.
    pub rss_after_bytes: u64,
    pub lines: Vec<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Flowed {
    pub windows_bytes: Vec<u64>,
    /// Seconds from the flow's start to each [`Order::Mark`].
    pub marks_s: Vec<f64>,
}
