//! The streams of one connection, and the meaning of their errors.

use super::caller_memory;
use crate::comm::channel::Channel;
use crate::error::{Error, Result};
use std::fmt;
use std::io::ErrorKind;
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

/// The open streams of one connection.
#[derive(Debug)]
pub struct Sockets {
    streams: Vec<TcpStream>,
    /// The peer, for log lines.
    pub peer: String,
    /// This host's interface that the streams use, for log lines.
    pub interface: String,
}

/// The streams of one connection, with the bytes received on each after the handshake.
pub type Opened = (Sockets, Vec<Vec<u8>>);

impl Sockets {
    /// Takes over the channels of the handshake, the one of HELLO first.
    ///
    /// # Errors
    /// [`Error::Os`] if an option of a socket cannot be set.
    pub fn new(channels: Vec<Channel>, peer: String, interface: String) -> Result<Opened> {
        let (mut streams, mut read) = (Vec::with_capacity(channels.len()), Vec::with_capacity(channels.len()));
        for channel in channels {
            let (stream, rest) = channel.into_stream()?;
            streams.push(stream);
            read.push(rest);
        }
        Ok((Self { streams, peer, interface }, read))
    }

    /// Returns the number of streams.
    pub fn count(&self) -> usize {
        self.streams.len()
    }

    /// Returns a stream, or the last one if the number is too high.
    pub fn stream(&self, number: usize) -> &TcpStream {
        &self.streams[number.min(self.streams.len() - 1)]
    }

    /// Returns the longest time without an acknowledgement among the streams with outstanding
    /// bytes.
    pub fn unacknowledged(&self) -> Option<Duration> {
        self.streams.iter().filter_map(caller_memory::unacknowledged).max()
    }

    /// Converts an error of a stream.
    #[cold]
    pub fn failed(&self, number: usize, error: &std::io::Error) -> Error {
        match error.kind() {
            ErrorKind::ConnectionReset
            | ErrorKind::ConnectionAborted
            | ErrorKind::BrokenPipe
            | ErrorKind::UnexpectedEof => Error::PeerGone(format!(
                "{self} ended without BYE (stream {number}: {error}): the peer's process has failed or is gone"
            )),
            _ => Error::Network(format!("{self} failed (stream {number}: {error})")),
        }
    }

    /// Shuts down all streams in both directions, so that the peer's requests fail.
    pub fn cut(&self) {
        for stream in &self.streams {
            if let Err(error) = stream.shutdown(Shutdown::Both) {
                tracing::debug!("{self}: {error}");
            }
        }
    }
}

impl fmt::Display for Sockets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TCP with {} over {}", self.peer, self.interface)
    }
}
