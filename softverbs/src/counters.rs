//! Counters of a port, as sysfs shows them.
//!
//! The counters are in shared memory. If the fabric was made with [`crate::control::prepare`], they
//! also have files in the sysfs tree of their node. A process writes all files of its own rails
//! when it joins. When it counts an error, it writes that error's files, for each end of the path
//! that counts it. So error counts are current, and packet counts are as of the last lost packet or
//! the last destroyed queue pair.

use crate::nic::Nic;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// A counter of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counter {
    /// Packets sent, including lost and repeated ones.
    Sent,
    /// Packets received.
    Received,
    /// Own packets that were lost, as the peer reported after a later packet.
    SequenceError,
    /// Peer's packets that were lost, as this end noticed by a later packet.
    OutOfSequence,
    /// Own packets that were lost with no later packet: the sender waited for the timeout.
    AckTimeout,
    /// Refusals of a peer that had no receive posted (RNR NAK).
    ReceiverNotReady,
}

impl Counter {
    /// Every counter.
    pub const ALL: [Self; 6] = [
        Self::Sent,
        Self::Received,
        Self::SequenceError,
        Self::OutOfSequence,
        Self::AckTimeout,
        Self::ReceiverNotReady,
    ];

    /// Returns the file below `ports/1`. mlx5: drivers/infiniband/hw/mlx5/counters.c and
    /// drivers/infiniband/core/sysfs.c. rxe: rxe_hw_counters.c, which has packet counts only in
    /// `hw_counters`.
    fn file(self, nic: Nic) -> &'static str {
        let (mlx5, rxe) = match self {
            Self::Sent => ("counters/port_xmit_packets", "hw_counters/sent_pkts"),
            Self::Received => ("counters/port_rcv_packets", "hw_counters/rcvd_pkts"),
            Self::SequenceError => ("hw_counters/packet_seq_err", "hw_counters/rcvd_seq_err"),
            Self::OutOfSequence => ("hw_counters/out_of_sequence", "hw_counters/out_of_seq_request"),
            Self::AckTimeout => ("hw_counters/local_ack_timeout_err", "hw_counters/completer_retry_err"),
            Self::ReceiverNotReady => ("hw_counters/rnr_nak_retry_err", "hw_counters/rcvd_rnr_err"),
        };
        match nic {
            Nic::Mlx5 => mlx5,
            Nic::SoftRoce => rxe,
        }
    }
}

/// Writes a counter into its device's entry in sysfs. Other processes may write the same file: each
/// repeats the write until the file has the value that `current` returns.
pub(crate) fn publish(device: &Path, nic: Nic, counter: Counter, current: impl Fn() -> u64) {
    static FILES: AtomicU64 = AtomicU64::new(0);
    let number = FILES.fetch_add(1, Ordering::Relaxed);
    let (file, new) = (device.join("ports/1").join(counter.file(nic)), format!(".new-{}-{number}", std::process::id()));
    let (new, mut value) = (device.join(new), current());
    // An error is ignored: a removed device or a deleted fabric has no counters to show.
    while write(&file, &new, value).is_ok() && current() != value {
        value = current();
    }
}

/// Replaces the file, so that no reader sees a part of its text.
fn write(file: &Path, new: &Path, value: u64) -> std::io::Result<()> {
    std::fs::create_dir_all(file.parent().unwrap_or(file))?;
    std::fs::write(new, format!("{value}\n"))?;
    std::fs::rename(new, file)
}
