//! The greeting of two processes that meet over TCP, one JSON object per line:
//!
//! 1. The connecting side sends its version of the messages and a random number.
//! 2. The listening side answers with a random number and its proof of the token.
//! 3. The connecting side sends its proof, which covers its first message, and that message.
//! 4. The listening side answers with a welcome, or with the reason of a refusal.
//!
//! The listening side proves first, so an impostor on its port gets a version and a random number,
//! and nothing else. The later messages are not protected: a program on the path between two hosts
//! can read and change them.
//!
//! Without a token, two processes meet only over loopback and only if the kernel lists the same
//! user as the owner of both sockets (`socket_owner`). Another user of the machine can open rank
//! 0's port first, but not with a socket that is listed as this user's. So loopback needs no token.
//! `--without-token` admits all clients from other addresses.

use crate::output;
use crate::ranks::line::GreetingStream;
use crate::ranks::socket_owner;
use crate::ranks::token::{self, Nonces, Side, Token};
use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Version of the greeting, and of the messages of `doctor --peer` that follow it. It is raised
/// when one of them changes. [`ClientHello::protocol`] and [`Answer::Refused`] never change, so
/// that each side can report that the other side has another version.
pub const PROTOCOL: u32 = 3;
/// Time for a connected client to send each of its two messages.
const HELLO: Duration = Duration::from_secs(5);
/// Longest pause between two looks for connections.
const PAUSE: Duration = Duration::from_millis(20);

/// Conditions on which a side trusts the other.
#[derive(Debug, Clone)]
pub struct Trust {
    /// Token that both sides must prove.
    pub token: Option<Token>,
    /// Without a token, trusts any address.
    pub trusts_anybody: bool,
    /// Cause of a wrong proof and cure, for errors.
    pub mismatch: &'static str,
    /// Cure of a missing token, for errors.
    pub cure: &'static str,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct ClientHello {
    pub protocol: u32,
    /// Empty in messages of other versions.
    #[serde(default)]
    pub nonce: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Challenge {
    pub nonce: String,
    /// Proof of the listening side; empty without a token.
    pub proof: String,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Introduction {
    /// Proof of the connecting side; empty without a token.
    pub proof: String,
    /// The first message as JSON. It is decoded only after the proof is checked.
    pub hello: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Answer<T> {
    Welcome(T),
    Refused { reason: String },
}

impl Trust {
    /// Checks that a meeting at `address` is allowed.
    ///
    /// # Errors
    /// Without a token, an address that is not loopback is refused. The error names the cures.
    pub fn check_address(&self, address: IpAddr) -> Result<()> {
        let is_allowed = self.token.is_some() || self.trusts_anybody || is_loopback(address);
        ensure!(
            is_allowed,
            "at {address} anybody on the network could answer or connect: {}",
            self.cure
        );
        Ok(())
    }

    /// Checks the other end of a connection that has sent its first message.
    fn check_peer(&self, stream: &TcpStream) -> Result<()> {
        let address = stream.peer_addr().context("read the peer's address")?.ip();
        if self.token.is_none() && is_loopback(address) {
            return socket_owner::check(stream)
                .map_err(|error| anyhow!("{error:#}: {}", self.cure));
        }
        self.check_address(address)
    }

    fn prove(&self, side: Side, nonces: Nonces<'_>, message: &str) -> String {
        self.token
            .as_ref()
            .map(|token| token.prove(side, nonces, message))
            .unwrap_or_default()
    }

    /// A side without a token accepts no proof, so that a token on one side alone is noticed.
    fn is_proved(&self, side: Side, nonces: Nonces<'_>, message: &str, proof: &str) -> bool {
        match &self.token {
            Some(token) => token.is_proved(side, nonces, message, proof),
            None => proof.is_empty(),
        }
    }
}

fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

/// Ports, and the connections to them that have introduced themselves. A connection without
/// messages does not delay others and is closed after 5 s.
pub(super) struct Arrivals<T> {
    listeners: Vec<TcpListener>,
    trust: Trust,
    sender: mpsc::Sender<Arrival<T>>,
    receiver: mpsc::Receiver<Arrival<T>>,
    /// Number of connections that have not introduced themselves.
    unauthenticated: Arc<AtomicUsize>,
    /// Maximum number of `unauthenticated`. Further connections are closed.
    unauthenticated_max: usize,
}

pub(super) enum Arrival<T> {
    Admitted {
        hello: T,
        line: GreetingStream,
        address: SocketAddr,
    },
    Refused {
        address: SocketAddr,
        reason: String,
    },
}

impl<T: DeserializeOwned + Send + 'static> Arrivals<T> {
    pub fn new(
        listeners: Vec<TcpListener>,
        trust: Trust,
        unauthenticated_max: usize,
    ) -> Result<Self> {
        for listener in &listeners {
            listener.set_nonblocking(true).context("set the port")?;
        }
        let (sender, receiver) = mpsc::channel();
        Ok(Self {
            listeners,
            trust,
            sender,
            receiver,
            unauthenticated: Arc::default(),
            unauthenticated_max,
        })
    }

    pub fn addresses(&self) -> Result<Vec<SocketAddr>> {
        self.listeners
            .iter()
            .map(|listener| listener.local_addr().context("ask for the port"))
            .collect()
    }

    /// Returns the next connection that has introduced itself or was refused, if any. Waits at most
    /// 20 ms.
    pub fn next(&self) -> Option<Arrival<T>> {
        // An error of `accept` is not reported: no connection is waiting, or the error concerns one
        // connection or is temporary. The caller has a time limit.
        let accepted = self
            .listeners
            .iter()
            .find_map(|listener| listener.accept().ok());
        let Some((stream, address)) = accepted else {
            return self.receiver.recv_timeout(PAUSE).ok();
        };
        if self.unauthenticated.fetch_add(1, Ordering::Relaxed) >= self.unauthenticated_max {
            self.unauthenticated.fetch_sub(1, Ordering::Relaxed);
            return self.receiver.try_recv().ok();
        }
        let sender = self.sender.clone();
        let trust = self.trust.clone();
        let unauthenticated = Arc::clone(&self.unauthenticated);
        std::thread::spawn(move || {
            let admitted = admit(stream, address, &trust);
            unauthenticated.fetch_sub(1, Ordering::Relaxed);
            let arrival = match admitted {
                Ok((hello, line)) => Arrival::Admitted {
                    hello,
                    line,
                    address,
                },
                Err(error) => Arrival::Refused {
                    address,
                    reason: format!("{error:#}"),
                },
            };
            // The listening side may have ended.
            let _ = sender.send(arrival);
        });
        self.receiver.try_recv().ok()
    }
}

/// Does the listening side's part of a greeting, up to the first message. On an error, sends the
/// reason to the other side.
fn admit<T: DeserializeOwned>(
    stream: TcpStream,
    address: SocketAddr,
    trust: &Trust,
) -> Result<(T, GreetingStream)> {
    let mut line = GreetingStream::new(stream, address.to_string(), Instant::now() + 2 * HELLO)?;
    match introduced(&mut line, trust) {
        Ok(hello) => Ok((hello, line)),
        Err(error) => {
            // The other end may have closed.
            let _ = line.send(&Answer::<()>::Refused {
                reason: format!("{error:#}"),
            });
            Err(error)
        }
    }
}

fn introduced<T: DeserializeOwned>(line: &mut GreetingStream, trust: &Trust) -> Result<T> {
    let ClientHello { protocol, nonce } = line.receive(HELLO)?;
    ensure!(
        protocol == PROTOCOL,
        "this side has version {PROTOCOL} of the messages, the other one {protocol}: install the same nccl-spark on \
         both hosts"
    );
    ensure!(
        token::is_nonce(&nonce),
        "the other side sent no random number"
    );
    trust.check_peer(line.stream())?;
    let own = token::nonce()?;
    let nonces = Nonces {
        connecting: &nonce,
        listening: &own,
    };
    line.send(&Answer::Welcome(Challenge {
        nonce: own.clone(),
        proof: trust.prove(Side::Listening, nonces, ""),
    }))?;
    let Introduction { proof, hello } = line.receive(HELLO)?;
    ensure!(
        trust.is_proved(Side::Connecting, nonces, &hello, &proof),
        "{}",
        trust.mismatch
    );
    serde_json::from_str(&hello).context("the first message is malformed")
}

/// Does the connecting side's part of a greeting, with the first message `hello`. Returns the
/// connection and the welcome. `other` and `own` name both sides, for errors. Each answer may take
/// `limit`.
///
/// # Errors
/// The other side is not trusted, refuses this side, or does not answer.
pub(super) fn greet<W: DeserializeOwned>(
    stream: TcpStream,
    [other, own]: [&str; 2],
    trust: &Trust,
    hello: &impl Serialize,
    limit: Duration,
) -> Result<(TcpStream, W)> {
    let mut line = GreetingStream::new(stream, other, Instant::now() + limit)?;
    let nonce = token::nonce()?;
    line.send(&ClientHello {
        protocol: PROTOCOL,
        nonce: nonce.clone(),
    })?;
    let Challenge {
        nonce: theirs,
        proof,
    } = accepted(line.receive(limit)?, other, own)?;
    trust
        .check_peer(line.stream())
        .with_context(|| format!("{other} is not trusted"))?;
    let nonces = Nonces {
        connecting: &nonce,
        listening: &theirs,
    };
    let is_proved =
        token::is_nonce(&theirs) && trust.is_proved(Side::Listening, nonces, "", &proof);
    ensure!(is_proved, "{other} is not trusted: {}", trust.mismatch);
    let hello = serde_json::to_string(hello).context("encode a message")?;
    line.send(&Introduction {
        proof: trust.prove(Side::Connecting, nonces, &hello),
        hello,
    })?;
    let welcome = accepted(line.receive(limit)?, other, own)?;
    Ok((line.settle()?, welcome))
}

fn accepted<T>(answer: Answer<T>, other: &str, own: &str) -> Result<T> {
    match answer {
        Answer::Welcome(accepted) => Ok(accepted),
        Answer::Refused { reason } => {
            bail!("{other} refused this {own}: {}", output::plain(&reason))
        }
    }
}
