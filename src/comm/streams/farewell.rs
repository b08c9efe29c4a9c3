//! Closing of a connection's streams.
//!
//! If a socket is closed while received bytes are unread, the kernel resets its TCP connection. The
//! peer then loses the bytes that it has not read yet. So a closed connection sends its last bytes
//! and shuts down its sending side. It then reads and drops incoming bytes until the peer ends the
//! stream or `LINGER` has passed.

use super::sockets::Sockets;
use crate::comm::channel::write_queued;
use proto::time::Instant;
use std::io::{ErrorKind, Read, Result, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::time::Duration;

/// Time for the peer to close its side, the same as over rails.
const LINGER: Duration = Duration::from_secs(10);
/// Largest number of reads of one stream in one poll.
const READS: usize = 64;

/// A data path with last bytes to send.
pub trait FinalBytes {
    /// Ends the data path. Afterwards it accesses none of NCCL's buffers. Returns the last bytes to
    /// send on each stream. Returns `None` if sends were running or this side has failed: then the
    /// caller must cut the streams, so that the peer fails too.
    fn final_bytes(&mut self) -> Option<Vec<Vec<u8>>>;
}

/// The streams of a closed connection.
pub struct StreamClose {
    sockets: Arc<Sockets>,
    stages: Vec<CloseStage>,
    until: Instant,
}

enum CloseStage {
    Sending(Vec<u8>),
    Draining,
    Ended,
}

impl StreamClose {
    /// Starts to close streams in good order. `final_bytes` are the last bytes of each stream.
    pub fn new(sockets: Arc<Sockets>, final_bytes: Vec<Vec<u8>>, now: Instant) -> Self {
        Self {
            sockets,
            stages: final_bytes.into_iter().map(CloseStage::Sending).collect(),
            until: now + LINGER,
        }
    }

    /// Continues to close, without blocking. Returns true when the peer has ended all streams, or
    /// `LINGER` has passed.
    pub fn poll(&mut self, now: Instant) -> bool {
        for (number, stage) in self.stages.iter_mut().enumerate() {
            if let Err(error) = stage.poll(&self.sockets, number) {
                // The peer has closed its end or has failed, so nothing more can be sent.
                tracing::debug!("{}: closing stream {number}: {error}", self.sockets);
                *stage = CloseStage::Ended;
            }
        }
        now >= self.until
            || self
                .stages
                .iter()
                .all(|stage| matches!(stage, CloseStage::Ended))
    }
}

impl CloseStage {
    fn poll(&mut self, sockets: &Sockets, number: usize) -> Result<()> {
        let mut stream = sockets.stream(number);
        if let Self::Sending(final_bytes) = self {
            write_queued(final_bytes, |bytes| stream.write(bytes))?;
            if final_bytes.is_empty() {
                stream.shutdown(Shutdown::Write)?;
                *self = Self::Draining;
            }
        }
        // Read also while bytes are left to send. If both sides close at the same time, each may
        // have to wait until the other reads, which frees buffer space.
        let mut dropped = [0; 16 << 10];
        for _ in 0..READS {
            match stream.read(&mut dropped) {
                Ok(0) if matches!(self, Self::Draining) => *self = Self::Ended,
                Ok(0) => {}
                Ok(_) => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            break;
        }
        Ok(())
    }
}
