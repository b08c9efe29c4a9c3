//! A port for one connection, on a network where strangers may find it. A token admits the
//! connection, and is good for no other: the port closes behind it.

use crate::output::plain;
use crate::ranks::line::Line;
use crate::ranks::rendezvous::{Answer, Arrivals};
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::fmt;
use std::io::Read;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// The version of what is said on a door's connections; it grows when that changes. [`Opening`]
/// and its answer stay, so that each side can say what is wrong.
pub const PROTOCOL: u32 = 2;
/// Most connections that have not shown a token. More are closed.
const STRANGERS: usize = 64;
/// Time to connect, and to be admitted.
pub const OPENING: Duration = Duration::from_secs(10);

/// A port for one connection.
pub struct Door {
    /// Where it is.
    pub address: SocketAddr,
    /// The token that admits.
    pub token: Token,
    arrivals: Arrivals<Opening>,
}

/// The first message on a connection to a door.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Opening {
    /// [`PROTOCOL`] of the side that connects.
    protocol: u32,
    token: String,
}

/// A secret that is good for one connection.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Door {
    /// Listens on a port of the system's choice, with a new token.
    ///
    /// # Errors
    /// Fails when that address is none of this host's, or the system gives no random bytes.
    pub fn open(address: IpAddr) -> Result<Self> {
        let listener = TcpListener::bind((address, 0)).with_context(|| format!("listen on {address}"))?;
        let arrivals = Arrivals::of(listener, STRANGERS)?;
        Ok(Self { address: arrivals.address()?, token: Token::new()?, arrivals })
    }

    /// Waits for the connection with the token, and turns away those without it.
    ///
    /// # Errors
    /// Fails when it does not come by `end`.
    pub fn admit(self, end: Instant) -> Result<TcpStream> {
        loop {
            ensure!(Instant::now() < end, "nobody connected to {} in time", self.address);
            let Some((opening, mut line, _)) = self.arrivals.next() else { continue };
            let Err(reason) = self.check(&opening) else {
                line.say(&Answer::Welcome { environment: Vec::new() })?;
                return line.settle();
            };
            // The other end may be gone.
            let _ = line.say(&Answer::Refused { reason });
        }
    }

    fn check(&self, opening: &Opening) -> Result<(), String> {
        if opening.protocol != PROTOCOL {
            let theirs = opening.protocol;
            return Err(format!(
                "this side has version {PROTOCOL} of the messages, the other one {theirs}: install the same \
                 nccl-spark on both hosts"
            ));
        }
        match self.token.is(&opening.token) {
            true => Ok(()),
            false => Err("the token is wrong, or was used before: each start of a partner has a new one".to_owned()),
        }
    }
}

/// Connects to a door by the first of its addresses that answers. `whom` is its name, for errors.
///
/// # Errors
/// Fails when none answers by `end`, or the door refuses the token.
pub fn enter(addresses: &[SocketAddr], whom: &str, token: &Token, end: Instant) -> Result<TcpStream> {
    let mut line = Line::new(dial(addresses, whom, end)?, whom, end)?;
    line.say(&Opening { protocol: PROTOCOL, token: token.0.clone() })?;
    match line.hear(OPENING)? {
        Answer::Welcome { .. } => line.settle(),
        Answer::Refused { reason } => bail!("{whom} refused this doctor: {}", plain(&reason)),
    }
}

fn dial(addresses: &[SocketAddr], whom: &str, end: Instant) -> Result<TcpStream> {
    let mut last = None;
    for address in addresses {
        let left = end.saturating_duration_since(Instant::now()).min(OPENING);
        if left.is_zero() {
            break;
        }
        match TcpStream::connect_timeout(address, left) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = Some((address, error)),
        }
    }
    match last {
        Some((address, error)) => bail!("connect to {whom} at {address}: {error}"),
        None => bail!("{whom} has no address that could be tried in time"),
    }
}

impl Token {
    /// A new one, of 128 random bits.
    ///
    /// # Errors
    /// Fails when the system gives no random bytes.
    pub fn new() -> Result<Self> {
        let mut bytes = [0; 16];
        let random = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
        random.context("read /dev/urandom for a token")?;
        Ok(Self(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// Parses a token as a person gives it.
    ///
    /// # Errors
    /// The form that is allowed.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        if is_hex { Ok(Self(text.to_owned())) } else { Err("a token has 32 hexadecimal digits".to_owned()) }
    }

    /// The token as it is sent.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// Compares `shown` with this token, in a time that says nothing about where they differ.
    fn is(&self, shown: &str) -> bool {
        let (own, other) = (Sha256::digest(&self.0), Sha256::digest(shown));
        own.iter().zip(other.iter()).fold(0, |difference, (one, other)| difference | (one ^ other)) == 0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

#[cfg(test)]
mod tests;
