//! Accepted TCP connections that have not sent a token yet. The bootstrap's port is open to the
//! network, so any program may connect.
//!
//! A client must send one well-formed message within a time limit, with a token that only expected
//! peers know. The owner of the listener looks at this message and decides if the client is
//! admitted. All other clients are dropped, and do not disturb admitted ones. Two modules own such
//! a listener: [`super::setup::admission`] admits the peer that got the listener's handle from
//! NCCL. [`super::recovery::redial`] admits peers whose TCP connection was lost.

use super::channel::{Channel, Received};
use super::descriptors::{DescriptorWarning, shortage_text};
use crate::clock;
use proto::time::Instant;
use proto::wire::message::Message;
use std::net::{IpAddr, TcpListener};
use std::time::Duration;
use verbs::OwnSocket;

/// Largest number of unauthenticated connections. One more connection replaces the oldest one from
/// the address that has the most connections.
const MOST_UNAUTHENTICATED: usize = 64;
/// Time within which a client must send its first message.
const TOKEN_LIMIT: Duration = Duration::from_secs(10);
/// Shortest time between two log lines about rejections at one listener.
const QUIET: Duration = Duration::from_secs(60);

/// A listening socket and its connections that have not sent a token.
pub struct Unauthenticated {
    listener: OwnSocket<TcpListener>,
    connections: Vec<Connection>,
    shortage: Option<String>,
    rejections: Rejections,
}

/// Logs at most one rejection in each [`QUIET`], and counts the others: any program in the network
/// can cause rejections.
#[derive(Default)]
struct Rejections {
    said: Option<Instant>,
    others: u64,
}

/// The owner's decision about a client's first message.
pub enum Verdict {
    /// Admits the client.
    Admit,
    /// Drops the client, and logs that its message has no token.
    Reject,
    /// Drops the client and sends it the reason.
    Refuse(&'static str),
    /// Drops the client. The judge has logged the reason.
    Drop,
}

/// An admitted connection.
pub struct Admitted {
    /// The channel to the peer.
    pub channel: Channel,
    /// The client's first message.
    pub message: Message,
}

struct Connection {
    since: Instant,
    from: IpAddr,
    channel: Channel,
}

/// Function that decides about a client's first message. If it returns [`Verdict::Refuse`] or
/// [`Verdict::Drop`], it has logged the reason. The channel gives it the client's address for the
/// log line.
pub type Judge<'a> = &'a mut dyn FnMut(&Message, &Channel) -> Verdict;

impl Unauthenticated {
    /// Creates the set for a non-blocking listener.
    pub fn new(listener: TcpListener) -> Self {
        Self {
            listener: OwnSocket::new(listener),
            connections: Vec::new(),
            shortage: None,
            rejections: Rejections::default(),
        }
    }

    /// Returns the reason why connections cannot be accepted at the moment.
    pub fn shortage(&self) -> Option<&str> {
        self.shortage.as_deref()
    }

    /// Drops all connections.
    pub fn clear(&mut self) {
        self.connections.clear();
    }

    /// Accepts connections and reads their first messages. Returns the connections that `judge`
    /// admits, in the order in which they connected. Connections that were admitted while they had
    /// to make room for new ones come before all others. Logs the errors of connections that are
    /// not admitted.
    pub fn poll(&mut self, descriptors: &DescriptorWarning, judge: Judge<'_>) -> Vec<Admitted> {
        let mut admitted = Vec::new();
        self.accept(descriptors, judge, &mut admitted);
        for connection in std::mem::take(&mut self.connections) {
            match ask(connection, judge, &mut self.rejections) {
                FirstMessage::Admitted(peer) => admitted.push(peer),
                FirstMessage::Silent(connection) => self.connections.push(connection),
                FirstMessage::Dropped => {}
            }
        }
        admitted
    }

    fn accept(
        &mut self,
        descriptors: &DescriptorWarning,
        judge: Judge<'_>,
        admitted: &mut Vec<Admitted>,
    ) {
        for _ in 0..MOST_UNAUTHENTICATED {
            match self.listener.accept() {
                Ok((stream, from)) => {
                    self.shortage = None;
                    if self.connections.len() >= MOST_UNAUTHENTICATED {
                        admitted.extend(self.make_room(judge));
                    }
                    match Channel::new(stream, from) {
                        Ok(channel) => {
                            let since = clock::now();
                            let from = from.ip();
                            self.connections.push(Connection {
                                since,
                                from,
                                channel,
                            });
                        }
                        Err(error) => tracing::debug!("bootstrap connection dropped: {error}"),
                    }
                }
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                    self.shortage = None;
                    break;
                }
                Err(e) => match shortage_text(&e) {
                    // Drop an older connection to free its descriptor. If there is none, the peer
                    // stays in the backlog, and the next call tries again.
                    Some(why) => {
                        descriptors.tell("cannot accept connections on the bootstrap port", &why);
                        self.shortage = Some(why);
                        if self.connections.is_empty() {
                            break;
                        }
                        admitted.extend(self.make_room(judge));
                    }
                    // Other errors, such as a reset before accept, concern only this connection.
                    None => {
                        tracing::debug!("bootstrap connection failed before it was accepted: {e}")
                    }
                },
            }
        }
    }

    /// Takes out the oldest connection from the address that has the most connections. Returns that
    /// connection if `judge` admits it now, and drops it otherwise.
    fn make_room(&mut self, judge: Judge<'_>) -> Option<Admitted> {
        let all = &self.connections;
        let many = |one: &Connection| all.iter().filter(|other| other.from == one.from).count();
        // `max_by_key` returns the last maximum: in this reverse order, the oldest connection.
        let crowding = (0..all.len()).rev().max_by_key(|at| many(&all[*at]))?;
        let connection = self.connections.remove(crowding);
        match ask(connection, judge, &mut self.rejections) {
            FirstMessage::Admitted(peer) => return Some(peer),
            FirstMessage::Silent(Connection { channel, .. }) => tracing::debug!(
                "bootstrap connection from {} dropped: too many unauthenticated connections",
                channel.peer()
            ),
            FirstMessage::Dropped => {}
        }
        None
    }
}

enum FirstMessage {
    Admitted(Admitted),
    /// The client has sent no message yet, and its time has not run out.
    Silent(Connection),
    /// The judge did not admit the client, there was an error or a timeout, or the client has
    /// closed its end.
    Dropped,
}

fn ask(mut connection: Connection, judge: Judge<'_>, rejections: &mut Rejections) -> FirstMessage {
    let Connection { since, channel, .. } = &mut connection;
    match channel.receive() {
        Ok(Received::Message(message)) => {
            match judge(&message, channel) {
                Verdict::Admit => {
                    return FirstMessage::Admitted(Admitted {
                        channel: connection.channel,
                        message,
                    });
                }
                Verdict::Refuse(why) => {
                    if let Err(unsent) = channel.send(&Message::Refuse(why.to_owned())) {
                        tracing::debug!("could not send the refusal: {unsent}");
                    }
                }
                Verdict::Reject => {
                    let who = channel.peer();
                    let kind = message.kind();
                    rejections.tell(
                    &format!("bootstrap connection from {who} rejected: {kind} message without the token"),
                    clock::now(),
                );
                }
                Verdict::Drop => {}
            }
        }
        Ok(Received::Nothing) if clock::elapsed(*since) < TOKEN_LIMIT => {
            return FirstMessage::Silent(connection);
        }
        Ok(Received::Nothing) => {
            let text = format!(
                "bootstrap connection from {} rejected: no token within 10 s",
                channel.peer()
            );
            rejections.tell(&text, clock::now());
        }
        Ok(Received::Closed | Received::Unreachable(_)) => {
            tracing::debug!("unauthenticated bootstrap connection closed by its peer")
        }
        Err(error) => rejections.tell(
            &format!("bootstrap connection rejected: {error}"),
            clock::now(),
        ),
    }
    FirstMessage::Dropped
}

impl Rejections {
    fn tell(&mut self, text: &str, now: Instant) {
        let Self { said, others } = self;
        if said.is_some_and(|said| now.saturating_duration_since(said) < QUIET) {
            *others += 1;
            return tracing::debug!("{text}");
        }
        *said = Some(now);
        match std::mem::take(others) {
            0 => tracing::info!("{text}"),
            others => {
                tracing::info!("{text}; {others} others were rejected since the previous line")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suppressed_lines_are_counted_and_a_minute_later_another_is_logged() {
        let mut rejections = Rejections::default();
        let now = clock::now();
        let unsaid =
            |Rejections { said, others }: &Rejections| (said.map(|said| said - now), *others);
        let second = Duration::from_secs(1);
        (0..3).for_each(|at| rejections.tell("no", now + at * second));
        assert_eq!(unsaid(&rejections), (Some(Duration::ZERO), 2));
        rejections.tell("no", now + QUIET - second);
        assert_eq!(unsaid(&rejections), (Some(Duration::ZERO), 3));
        rejections.tell("no", now + QUIET);
        assert_eq!(unsaid(&rejections), (Some(QUIET), 0));
    }
}
