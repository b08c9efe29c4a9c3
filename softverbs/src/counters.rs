//! Counters of a port, as sysfs shows them.
//!
//! The counters are in shared memory. If the fabric was made with [`crate::control::prepare`], they
//! also have files in the sysfs tree of their node. A process writes all files of its own rails
//! when it joins. A process that counts an error writes the files of the counters that the error
//! changes, at each end of the path. After the join, a process writes the files of the packet
//! counters only after a lost packet and when it destroys a queue pair. So the files' error counts
//! are current, and their packet counts are as of the last lost packet or the last destroyed queue
//! pair.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// A counter of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counter {
    /// Packets sent, including those that were lost and those that were sent again.
    Sent,
    /// Packets received.
    Received,
    /// Lost packets of this port whose loss the peer noticed when a later packet arrived, and
    /// reported.
    SequenceError,
    /// Lost packets of a peer whose loss this port noticed when a later packet arrived.
    OutOfSequence,
    /// Lost packets of this port that no later packet followed. So the peer could not notice the
    /// loss, and the sender waited for the timeout.
    AckTimeout,
    /// Requests of this port that a peer refused because it had no receive posted (RNR NAK). A
    /// request counts at each refusal.
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

    /// Returns the file below `ports/1`, of drivers/infiniband/core/sysfs.c or
    /// drivers/infiniband/hw/mlx5/counters.c.
    fn file(self) -> &'static str {
        match self {
            Self::Sent => "counters/port_xmit_packets",
            Self::Received => "counters/port_rcv_packets",
            Self::SequenceError => "hw_counters/packet_seq_err",
            Self::OutOfSequence => "hw_counters/out_of_sequence",
            Self::AckTimeout => "hw_counters/local_ack_timeout_err",
            Self::ReceiverNotReady => "hw_counters/rnr_nak_retry_err",
        }
    }
}

/// Writes a counter into its device's entry in sysfs. Other processes may write the same file. So
/// each writer reads `current` again after a write, and repeats the write until `current` returns
/// the value that it has written.
pub(crate) fn publish(device: &Path, counter: Counter, current: impl Fn() -> u64) {
    static FILES: AtomicU64 = AtomicU64::new(0);
    let number = FILES.fetch_add(1, Ordering::Relaxed);
    let file = device.join("ports/1").join(counter.file());
    let new = format!(".new-{}-{number}", std::process::id());
    let new = device.join(new);
    let mut value = current();
    // An error is ignored: a removed device or a deleted fabric has no counters to show.
    while write(&file, &new, value).is_ok() && current() != value {
        value = current();
    }
}

/// Replaces the file as a whole, so that no reader sees an incomplete number.
fn write(file: &Path, new: &Path, value: u64) -> std::io::Result<()> {
    std::fs::create_dir_all(file.parent().unwrap_or(file))?;
    std::fs::write(new, format!("{value}\n"))?;
    std::fs::rename(new, file)
}
