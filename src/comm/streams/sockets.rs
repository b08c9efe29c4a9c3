//! The streams of one connection, and the meaning of their errors.

use super::caller_memory;
use crate::comm::channel::Channel;
use host::error::{Error, Network, PeerGone, Result, TcpPath};
use std::fmt;
use std::io::ErrorKind;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::Duration;
use verbs::OwnSocket;

/// The open streams of one connection.
#[derive(Debug)]
pub struct Sockets {
    streams: Vec<Arc<OwnSocket<TcpStream>>>,
    /// The peer and this host's interface, for log lines.
    pub tcp: TcpPath,
}

/// The streams of one connection, with the bytes received on each after the handshake.
pub type Opened = (Sockets, Vec<Vec<u8>>);

impl Sockets {
    /// Takes over the channels of the handshake. The first channel must be the one that has carried
    /// HELLO.
    pub fn new(channels: Vec<Channel>, tcp: TcpPath) -> Result<Opened> {
        let mut streams = Vec::with_capacity(channels.len());
        let mut read = Vec::with_capacity(channels.len());
        for channel in channels {
            let (stream, rest) = channel.into_stream()?;
            streams.push(stream);
            read.push(rest);
        }
        Ok((Self { streams, tcp }, read))
    }

    /// Returns the number of streams.
    pub fn count(&self) -> usize {
        self.streams.len()
    }

    /// Returns a stream, or the last one if the number is too high.
    pub fn stream(&self, number: usize) -> &TcpStream {
        &self.streams[number.min(self.streams.len() - 1)]
    }

    /// Returns the longest time without an acknowledgement among streams with outstanding bytes.
    pub fn unacknowledged(&self) -> Option<Duration> {
        self.streams
            .iter()
            .filter_map(|stream| caller_memory::unacknowledged(stream))
            .max()
    }

    /// Converts an error of a stream to the plugin's error.
    #[cold]
    pub fn failed(&self, number: usize, error: &std::io::Error) -> Error {
        let tcp = self.tcp.clone();
        let why = error.to_string();
        match error.kind() {
            ErrorKind::ConnectionReset
            | ErrorKind::ConnectionAborted
            | ErrorKind::BrokenPipe
            | ErrorKind::UnexpectedEof => PeerGone::StreamEnded { tcp, number, why }.into(),
            _ => Network::Stream { tcp, number, why }.into(),
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
        self.tcp.fmt(f)
    }
}
