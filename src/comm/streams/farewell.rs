//! A closed connection's streams, until the peer has closed them too.
//!
//! A socket that is closed while it has unread bytes is reset, and what it had sent and the peer had not read is lost. So a closed
//! connection's last bytes are sent, its sending side is shut, and what still comes is read and dropped, until the peer's end of the stream
//! or `LINGER`. After that the kernel goes on alone.

use super::sockets::Sockets;
use std::io::{ErrorKind, Read, Result, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the peer has to close: as over rails.
const LINGER: Duration = Duration::from_secs(10);
/// Reads of one stream at a time.
const READS: usize = 64;

/// What a data path has to say last.
pub trait Last {
    /// Ends the data path: it does not touch its caller's buffers again. What goes by each stream before its end; `None` where the peer is to
    /// fail, because messages were under way or because this side has failed.
    fn last_words(&mut self) -> Option<Vec<Vec<u8>>>;
}

/// A closed connection's streams.
pub struct Farewell {
    sockets: Arc<Sockets>,
    stages: Vec<Stage>,
    until: Instant,
}

enum Stage {
    /// These bytes, then the end of what is sent.
    Saying(Vec<u8>),
    /// The peer's end is waited for.
    Draining,
    Over,
}

impl Farewell {
    /// Closes streams in good order, each with its last bytes.
    pub fn new(sockets: Arc<Sockets>, words: Vec<Vec<u8>>, now: Instant) -> Self {
        Self { sockets, stages: words.into_iter().map(Stage::Saying).collect(), until: now + LINGER }
    }

    /// Goes as far as it can; whether it is over.
    pub fn tend(&mut self, now: Instant) -> bool {
        for (number, stage) in self.stages.iter_mut().enumerate() {
            if let Err(error) = stage.go_on(&self.sockets, number) {
                // The peer has closed, or is gone: there is nobody to say more to.
                tracing::debug!("{}: closing stream {number}: {error}", self.sockets);
                *stage = Stage::Over;
            }
        }
        now >= self.until || self.stages.iter().all(|stage| matches!(stage, Stage::Over))
    }
}

impl Stage {
    fn go_on(&mut self, sockets: &Sockets, number: usize) -> Result<()> {
        let mut stream = sockets.stream(number);
        if let Self::Saying(words) = self {
            while !words.is_empty() {
                match stream.write(words) {
                    Ok(count) => drop(words.drain(..count)),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            if words.is_empty() {
                stream.shutdown(Shutdown::Write)?;
                *self = Self::Draining;
            }
        }
        // While there is something to say too: a peer that closes at the same time may be waiting for room.
        let mut dropped = [0; 16 << 10];
        for _ in 0..READS {
            match stream.read(&mut dropped) {
                Ok(0) if matches!(self, Self::Draining) => *self = Self::Over,
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
