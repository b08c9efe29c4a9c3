//! Who may connect: the TCP port of the bootstrap is open to the network.
//!
//! A client must show the token that NCCL carried to the expected peer, in one well-formed message, within a time limit; every other
//! client is dropped without disturbing the peer. A token is good for one connection.

use super::descriptors::{DescriptorWarning, shortage_text};
use crate::comm::channel::{Channel, Received};
use crate::wire::handle::TOKEN_BYTES;
use crate::wire::message::{Hello, Message};
use std::net::{IpAddr, TcpListener};
use std::time::{Duration, Instant};

/// Unauthenticated connections at a time. One more and one of them makes room: of the address that most of them come from, the oldest.
const MOST_UNAUTHENTICATED: usize = 64;
/// How long a connection may take to show the token.
const TOKEN_LIMIT: Duration = Duration::from_secs(10);

/// The listening socket, and the connections there that have not shown the token.
pub struct Admission {
    listener: TcpListener,
    token: [u8; TOKEN_BYTES],
    unauthenticated: Vec<Unauthenticated>,
    /// Whether somebody has shown the token: a handle is for one connection, and who shows its token later has it from listening to the
    /// first.
    was_shown: bool,
    /// What there is too little of to accept connections.
    shortage: Option<String>,
}

/// A connection that has shown the token.
pub struct Admitted {
    /// The channel to the peer.
    pub channel: Channel,
    /// What it said with the token.
    pub hello: Hello,
}

struct Unauthenticated {
    since: Instant,
    from: IpAddr,
    channel: Channel,
}

impl Admission {
    /// Admits one connection that shows `token`. `listener` does not block.
    pub fn new(listener: TcpListener, token: [u8; TOKEN_BYTES]) -> Self {
        Self { listener, token, unauthenticated: Vec::new(), was_shown: false, shortage: None }
    }

    /// Why connections cannot be accepted at the moment.
    pub fn shortage(&self) -> Option<&str> {
        self.shortage.as_deref()
    }

    /// Drops all unauthenticated connections.
    pub fn clear(&mut self) {
        self.unauthenticated.clear();
    }

    /// Accepts connections and reads what they say; the one that shows the token, once. What goes wrong with the others is logged.
    pub fn look(&mut self, descriptors: &DescriptorWarning) -> Option<Admitted> {
        let mut admitted = self.accept(descriptors);
        for connection in std::mem::take(&mut self.unauthenticated) {
            match self.ask_for_token(connection) {
                Asked::Admitted(peer) => admitted = Some(peer),
                Asked::Silent(connection) => self.unauthenticated.push(connection),
                Asked::Dropped => {}
            }
        }
        admitted
    }

    fn accept(&mut self, descriptors: &DescriptorWarning) -> Option<Admitted> {
        let mut admitted = None;
        for _ in 0..MOST_UNAUTHENTICATED {
            match self.listener.accept() {
                Ok((stream, from)) => {
                    self.shortage = None;
                    if self.unauthenticated.len() >= MOST_UNAUTHENTICATED {
                        admitted = self.make_room().or(admitted);
                    }
                    match Channel::from_stream(stream) {
                        Ok(channel) => {
                            let (since, from) = (Instant::now(), from.ip());
                            self.unauthenticated.push(Unauthenticated { since, from, channel });
                        }
                        Err(error) => tracing::debug!("bootstrap connection dropped: {error}"),
                    }
                }
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                    self.shortage = None;
                    break;
                }
                Err(e) => match shortage_text(&e) {
                    // Out of descriptors or memory: another connection makes room. Without one the peer stays in the backlog, and the
                    // next call tries again.
                    Some(why) => {
                        descriptors.tell("cannot accept connections on the bootstrap port", &why);
                        self.shortage = Some(why);
                        if self.unauthenticated.is_empty() {
                            break;
                        }
                        admitted = self.make_room().or(admitted);
                    }
                    // The others are errors of the one connection (reset before it was taken, say), not of the port.
                    None => tracing::debug!("bootstrap connection failed at once: {e}"),
                },
            }
        }
        admitted
    }

    /// Drops one unauthenticated connection, unless it has just now shown the token.
    fn make_room(&mut self) -> Option<Admitted> {
        let all = &self.unauthenticated;
        let many = |one: &Unauthenticated| all.iter().filter(|other| other.from == one.from).count();
        // Of several with the most the last is taken, so from the back it is the oldest.
        let crowding = (0..all.len()).rev().max_by_key(|at| many(&all[*at]))?;
        let connection = self.unauthenticated.remove(crowding);
        match self.ask_for_token(connection) {
            Asked::Admitted(peer) => return Some(peer),
            Asked::Silent(Unauthenticated { channel, .. }) => tracing::debug!(
                "bootstrap connection from {} dropped: too many unauthenticated connections",
                channel.peer()
            ),
            Asked::Dropped => {}
        }
        None
    }

    fn ask_for_token(&mut self, mut connection: Unauthenticated) -> Asked {
        let Unauthenticated { since, channel, .. } = &mut connection;
        match channel.receive() {
            Ok(Received::Message(Message::Hello(hello))) if hello.token == self.token => {
                if !std::mem::replace(&mut self.was_shown, true) {
                    return Asked::Admitted(Admitted { channel: connection.channel, hello });
                }
                tracing::warn!("bootstrap connection from {} rejected: its token was used before", channel.peer());
                let why = "this connection's token was used before: by another process, or by this one before its TCP \
                           connection was reset";
                if let Err(unsent) = channel.send(&Message::Refuse(why.to_owned())) {
                    tracing::debug!("could not send the refusal: {unsent}");
                }
            }
            Ok(Received::Message(other)) => {
                let (who, kind) = (channel.peer(), other.kind());
                tracing::info!("bootstrap connection from {who} rejected: {kind} message without the token");
            }
            Ok(Received::Nothing) if since.elapsed() < TOKEN_LIMIT => return Asked::Silent(connection),
            Ok(Received::Nothing) => {
                tracing::info!("bootstrap connection from {} rejected: no token within 10 s", channel.peer());
            }
            Ok(Received::Closed | Received::Unreachable(_)) => {
                tracing::debug!("unauthenticated bootstrap connection closed by its peer")
            }
            Err(error) => tracing::info!("bootstrap connection rejected: {error}"),
        }
        Asked::Dropped
    }
}

/// What came of asking a connection for the token.
enum Asked {
    Admitted(Admitted),
    /// It has said nothing yet, and has time left.
    Silent(Unauthenticated),
    /// It said something else, took too long or is gone.
    Dropped,
}
