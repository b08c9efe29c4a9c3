//! A connection on which two processes greet each other, one JSON object per line. Reads and writes
//! have time limits, and a line has a size limit.
//!
//! Bytes after a message stay in the socket. The socket may become a control connection
//! (`control`), whose reader needs these bytes.

use anyhow::{Context, Result, anyhow, bail, ensure};
use nix::sys::socket::{setsockopt, sockopt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

pub const LINE_MAX_BYTES: usize = 256 << 10;
const CONNECT: Duration = Duration::from_millis(20);
const WRITE: Duration = Duration::from_secs(5);
const SHOWN_CHARACTERS: usize = 60;
/// Time without an acknowledgement after which the connection fails.
const UNACKNOWLEDGED_MS: u32 = 30_000;

pub struct GreetingStream {
    stream: TcpStream,
    /// Name of the other end, for errors.
    peer_name: String,
    /// The time from which on every read fails, whatever its own limit is.
    end: Instant,
}

/// Tries `addresses` in order, and returns the first connection that is made by `end`. Each address
/// has at least 20 ms, even after `end`. Fails with the error of the last address.
pub fn connect(addresses: &[SocketAddr], end: Instant) -> Result<TcpStream> {
    let mut last = anyhow!("no address");
    for address in addresses {
        let left = end.saturating_duration_since(Instant::now()).max(CONNECT);
        match TcpStream::connect_timeout(address, left) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = anyhow!("{address}: {error}"),
        }
    }
    Err(last)
}

impl GreetingStream {
    pub fn new(stream: TcpStream, peer_name: impl Into<String>, end: Instant) -> Result<Self> {
        let peer_name = peer_name.into();
        let set = || -> std::io::Result<()> {
            stream.set_nonblocking(false)?;
            stream.set_nodelay(true)?;
            stream.set_write_timeout(Some(WRITE))
        };
        set().with_context(|| format!("set up the connection with {peer_name}"))?;
        Ok(Self {
            stream,
            peer_name,
            end,
        })
    }

    /// Sends one message. Fails when the other end has closed, or reads nothing for 5 s.
    pub fn send(&mut self, what: &impl Serialize) -> Result<()> {
        let mut text = serde_json::to_vec(what).context("encode a message")?;
        text.push(b'\n');
        self.stream
            .write_all(&text)
            .with_context(|| format!("lost the connection to {}", self.peer_name))
    }

    /// Returns the next message. Fails when no complete message comes within `limit` or by the
    /// `end` that [`GreetingStream::new`] got, or the message is too long or malformed.
    pub fn receive<T: DeserializeOwned>(&mut self, limit: Duration) -> Result<T> {
        self.receive_next(limit)?
            .with_context(|| format!("{} closed the connection", self.peer_name))
    }

    /// Works like [`GreetingStream::receive`]. Returns `None` if the other end closes between two
    /// messages.
    pub fn receive_next<T: DeserializeOwned>(&mut self, limit: Duration) -> Result<Option<T>> {
        let begin = Instant::now();
        let until = (begin + limit).min(self.end);
        let mut text: Vec<u8> = Vec::new();
        let mut window = vec![0; 16 << 10];
        loop {
            let seen = self.peek(&mut window, begin, until)?;
            if seen == 0 {
                ensure!(
                    text.is_empty(),
                    "{} closed the connection within a message",
                    self.peer_name
                );
                return Ok(None);
            }
            let newline = window[..seen].iter().position(|byte| *byte == b'\n');
            let taken = newline.map_or(seen, |at| at + 1);
            let read = self.stream.read_exact(&mut window[..taken]);
            read.with_context(|| format!("lost the connection to {}", self.peer_name))?;
            text.extend_from_slice(&window[..newline.unwrap_or(taken)]);
            ensure!(
                text.len() <= LINE_MAX_BYTES,
                "{} sent a line of more than {LINE_MAX_BYTES} bytes",
                self.peer_name
            );
            if newline.is_some() {
                return serde_json::from_slice(&text)
                    .map(Some)
                    .map_err(|_| self.malformed(&text));
            }
        }
    }

    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Returns the socket as a control connection, on which reads may take any time. The connection
    /// to a dead machine fails when sent data is not acknowledged for 30 s.
    pub fn settle(self) -> Result<TcpStream> {
        let set = || -> std::io::Result<()> {
            self.stream.set_read_timeout(None)?;
            self.stream.set_write_timeout(None)?;
            setsockopt(&self.stream, sockopt::TcpUserTimeout, &UNACKNOWLEDGED_MS)?;
            Ok(())
        };
        set().with_context(|| format!("set up the connection with {}", self.peer_name))?;
        Ok(self.stream)
    }

    /// Waits for bytes, and copies them to `window` without removing them from the socket. Returns
    /// their number, or 0 at the end of the stream.
    fn peek(&self, window: &mut [u8], begin: Instant, until: Instant) -> Result<usize> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!(
                    "{} sent no complete message in {:.0} s",
                    self.peer_name,
                    begin.elapsed().as_secs_f64().max(1.0)
                );
            }
            self.stream
                .set_read_timeout(Some(left))
                .context("set the connection's time limit")?;
            match self.stream.peek(window) {
                Ok(seen) => return Ok(seen),
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("lost the connection to {}", self.peer_name));
                }
            }
        }
    }

    fn malformed(&self, text: &[u8]) -> anyhow::Error {
        let shown: String = String::from_utf8_lossy(text)
            .chars()
            .take(SHOWN_CHARACTERS)
            .collect();
        anyhow!(
            "{} sent no message of nccl-spark: {shown:?}",
            self.peer_name
        )
    }
}

#[cfg(test)]
mod tests;
