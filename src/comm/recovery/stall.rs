//! State of the stall detection.

use crate::comm::log::stalls::ConnectionStall;
use crate::comm::process::Process;
use host::config::Config;
use host::counters::nanos;
use proto::flow::stall::{StallLimits, StallWatch};
use proto::wire::operation::Operation;
use std::time::Duration;

/// Stall detection of one connection, used by `driver::stall`.
pub struct Stall {
    /// State machine that makes the decisions.
    pub watch: StallWatch,
    /// Contributes this connection to the process's log lines about stalls.
    pub log: ConnectionStall,
    /// NCCL's operation at the peer, from the peer's last question or answer.
    pub peer_operation: Option<Operation>,
    /// Time of the next sample, on recovery's clock.
    pub next_sample: u64,
    /// True once this side has closed the connection.
    pub is_closed: bool,
}

impl Stall {
    /// Returns the state of a new connection.
    pub fn new(process: &Process, peer: &str) -> Self {
        let Config {
            data_path,
            recovery,
            ..
        } = &process.config;
        let warn = data_path.stall_warn;
        let abort = recovery.stall_abort_s.map(Duration::from_secs);
        let limits = StallLimits {
            warn: nanos(warn),
            abort: abort.map(nanos),
        };
        let log = ConnectionStall::new(&process.stalls, peer);
        Self {
            watch: StallWatch::new(limits),
            log,
            peer_operation: None,
            next_sample: 0,
            is_closed: false,
        }
    }
}
