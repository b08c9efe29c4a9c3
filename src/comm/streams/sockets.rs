//! The streams of one connection, and what becomes of their errors.

use super::caller_memory;
use crate::comm::channel::Channel;
use crate::error::{Error, Result};
use std::fmt;
use std::io::ErrorKind;
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

/// The streams of one connection, set up.
#[derive(Debug)]
pub struct Sockets {
    streams: Vec<TcpStream>,
    /// The peer, for messages.
    pub peer: String,
    /// The interface of this host that they go by, for messages.
    pub interface: String,
}

/// The streams of one connection, with what was read of each beyond the handshake.
pub type Opened = (Sockets, Vec<Vec<u8>>);

impl Sockets {
    /// Those of the handshake: the channel of HELLO first.
    ///
    /// # Errors
    /// [`Error::Os`] when an option of a socket cannot be set.
    pub fn new(channels: Vec<Channel>, peer: String, interface: String) -> Result<Opened> {
        let (mut streams, mut read) = (Vec::with_capacity(channels.len()), Vec::with_capacity(channels.len()));
        for channel in channels {
            let (stream, rest) = channel.into_stream()?;
            streams.push(stream);
            read.push(rest);
        }
        Ok((Self { streams, peer, interface }, read))
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.streams.len()
    }

    /// One of them; of a number that there is not, the last.
    pub fn stream(&self, number: usize) -> &TcpStream {
        &self.streams[number.min(self.streams.len() - 1)]
    }

    /// The longest that the peer has acknowledged nothing on one of them although bytes are under way there.
    pub fn unacknowledged(&self) -> Option<Duration> {
        self.streams.iter().filter_map(caller_memory::unacknowledged).max()
    }

    /// What an error of a stream means.
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

    /// Ends them at once, both ways: what the peer waits for fails.
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
