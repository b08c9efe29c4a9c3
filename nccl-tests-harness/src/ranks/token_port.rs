//! A port for one connection, on a network where other programs may find the port. Only a client
//! that sends the port's token, which is secret, is admitted. Then the port closes.

use crate::ranks::line;
use crate::ranks::rendezvous::{Answer, Arrivals, greet};
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::fmt;
use std::io::Read;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Version of the messages on a token port's connections. It is raised when the messages change.
/// [`ClientHello`] and its answer never change, so that each side can report that the other side
/// has another version.
pub const PROTOCOL: u32 = 2;
/// Maximum number of connections that have not shown a token. Further connections are closed.
const MAX_UNAUTHENTICATED: usize = 64;
/// Time limit for a client to connect. The port's answer to the token has the same limit again.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

pub struct TokenPort {
    pub address: SocketAddr,
    pub token: Token,
    arrivals: Arrivals<ClientHello>,
}

/// First message on a connection to a token port.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct ClientHello {
    /// [`PROTOCOL`] of the connecting side.
    protocol: u32,
    token: String,
}

#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl TokenPort {
    /// Listens on a port that the system chooses, with a new token. Fails when this host does not
    /// have the address, or the system gives no random bytes.
    pub fn open(address: IpAddr) -> Result<Self> {
        let listener = TcpListener::bind((address, 0)).with_context(|| format!("listen on {address}"))?;
        let arrivals = Arrivals::of(listener, MAX_UNAUTHENTICATED)?;
        Ok(Self { address: arrivals.address()?, token: Token::new()?, arrivals })
    }

    /// Waits for the connection that sends the token, and refuses others. Fails if no connection
    /// with the token comes by `end`.
    pub fn accept_one(self, end: Instant) -> Result<TcpStream> {
        loop {
            ensure!(Instant::now() < end, "no doctor connected to {} in time", self.address);
            let Some((hello, mut line, _)) = self.arrivals.next() else { continue };
            let Err(reason) = self.check(&hello) else {
                line.send(&Answer::Welcome { environment: Vec::new() })?;
                return line.settle();
            };
            // The other end may have closed, so errors are ignored.
            let _ = line.send(&Answer::Refused { reason });
        }
    }

    fn check(&self, hello: &ClientHello) -> Result<(), String> {
        if hello.protocol != PROTOCOL {
            let theirs = hello.protocol;
            return Err(format!(
                "this side has version {PROTOCOL} of the messages, the other one {theirs}: install the same \
                 nccl-spark on both hosts"
            ));
        }
        match self.token.is(&hello.token) {
            true => Ok(()),
            false => Err("the token is wrong, or was used before: each start of a partner has a new one".to_owned()),
        }
    }
}

/// Connects to the first of a token port's addresses that answers. Errors name the port by `name`.
/// Fails when no address answers by `end` or within [`CONNECT_TIMEOUT`], or the port refuses the
/// token.
pub fn connect(addresses: &[SocketAddr], name: &str, token: &Token, end: Instant) -> Result<TcpStream> {
    let stream = line::connect(addresses, end.min(Instant::now() + CONNECT_TIMEOUT))
        .with_context(|| format!("connect to {name}"))?;
    let hello = ClientHello { protocol: PROTOCOL, token: token.0.clone() };
    greet(stream, name, &hello, CONNECT_TIMEOUT, "doctor").map(|(stream, _)| stream)
}

impl Token {
    /// Makes a token of 128 random bits. Fails when the system gives no random bytes.
    pub fn new() -> Result<Self> {
        let mut bytes = [0; 16];
        let random = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
        random.context("read /dev/urandom for a token")?;
        Ok(Self(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// Parses a token that a person enters. The error names the allowed form.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        if is_hex { Ok(Self(text.to_owned())) } else { Err("a token has 32 hexadecimal digits".to_owned()) }
    }

    pub fn text(&self) -> &str {
        &self.0
    }

    /// Compares the tokens in a time that does not depend on where they differ.
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
