//! The connections at a listener that have not shown a token: a TCP port of the bootstrap is open to the network.
//!
//! A client must say, in one well-formed message and within a time limit, what the listener's owner admits it for; every other client is
//! dropped without disturbing those that are admitted. What an owner admits is its own affair: [`super::setup::admission`] the peer of a
//! handle, [`super::recovery::redial`] peers whose TCP connection was given up.

use super::channel::{Channel, Received};
use super::descriptors::{DescriptorWarning, shortage_text};
use crate::wire::message::Message;
use std::net::{IpAddr, TcpListener};
use std::time::{Duration, Instant};

/// Unauthenticated connections at a time. One more and one of them makes room: of the address that most of them come from, the oldest.
const MOST_UNAUTHENTICATED: usize = 64;
/// How long a connection may take to show the token.
const TOKEN_LIMIT: Duration = Duration::from_secs(10);
/// How often a listener that is open as long as the job runs tells the user of connections that it rejected.
const QUIET: Duration = Duration::from_secs(60);

/// A listening socket, and the connections there that have not shown a token.
pub struct Unauthenticated {
    listener: TcpListener,
    connections: Vec<Connection>,
    /// What there is too little of to accept connections.
    shortage: Option<String>,
    rejections: Rejections,
}

/// How the user is told of connections that were rejected.
enum Rejections {
    /// Each has a line.
    Each,
    /// A line in [`QUIET`] at most; the others are counted.
    Seldom { said: Option<Instant>, others: u64 },
}

/// What a listener's owner does with a client's first message.
pub enum Verdict {
    /// It is let in.
    Admit,
    /// It is dropped: its message is not one that shows a token.
    Reject,
    /// It is dropped, and told why.
    Refuse(&'static str),
    /// It is dropped.
    Drop,
}

/// A connection that was let in.
pub struct Admitted {
    /// The channel to the peer.
    pub channel: Channel,
    /// What it said.
    pub message: Message,
}

struct Connection {
    since: Instant,
    from: IpAddr,
    channel: Channel,
}

/// Says of a client's first message whether the client is let in, and logs why it is dropped or refused. With the client's channel, for its name.
pub type Judge<'a> = &'a mut dyn FnMut(&Message, &Channel) -> Verdict;

impl Unauthenticated {
    /// At a listener that does not block.
    pub fn new(listener: TcpListener) -> Self {
        Self { listener, connections: Vec::new(), shortage: None, rejections: Rejections::Each }
    }

    /// At one that is open as long as the job runs: whoever talks to it shall not fill the log.
    pub fn lasting(listener: TcpListener) -> Self {
        Self { rejections: Rejections::Seldom { said: None, others: 0 }, ..Self::new(listener) }
    }

    /// Why connections cannot be accepted at the moment.
    pub fn shortage(&self) -> Option<&str> {
        self.shortage.as_deref()
    }

    /// Drops all of them.
    pub fn clear(&mut self) {
        self.connections.clear();
    }

    /// Accepts connections and reads what they say; those that `judge` lets in, in the order in which they connected. What goes wrong with
    /// the others is logged.
    pub fn look(&mut self, descriptors: &DescriptorWarning, judge: Judge<'_>) -> Vec<Admitted> {
        let mut admitted = Vec::new();
        self.accept(descriptors, judge, &mut admitted);
        for connection in std::mem::take(&mut self.connections) {
            match ask(connection, judge, &mut self.rejections) {
                Asked::Admitted(peer) => admitted.push(peer),
                Asked::Silent(connection) => self.connections.push(connection),
                Asked::Dropped => {}
            }
        }
        admitted
    }

    fn accept(&mut self, descriptors: &DescriptorWarning, judge: Judge<'_>, admitted: &mut Vec<Admitted>) {
        for _ in 0..MOST_UNAUTHENTICATED {
            match self.listener.accept() {
                Ok((stream, from)) => {
                    self.shortage = None;
                    if self.connections.len() >= MOST_UNAUTHENTICATED {
                        admitted.extend(self.make_room(judge));
                    }
                    match Channel::from_stream(stream) {
                        Ok(channel) => {
                            let (since, from) = (Instant::now(), from.ip());
                            self.connections.push(Connection { since, from, channel });
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
                        if self.connections.is_empty() {
                            break;
                        }
                        admitted.extend(self.make_room(judge));
                    }
                    // The others are errors of the one connection (reset before it was taken, say), not of the port.
                    None => tracing::debug!("bootstrap connection failed at once: {e}"),
                },
            }
        }
    }

    /// Drops one of them, unless it has just now shown a token.
    fn make_room(&mut self, judge: Judge<'_>) -> Option<Admitted> {
        let all = &self.connections;
        let many = |one: &Connection| all.iter().filter(|other| other.from == one.from).count();
        // Of several with the most the last is taken, so from the back it is the oldest.
        let crowding = (0..all.len()).rev().max_by_key(|at| many(&all[*at]))?;
        let connection = self.connections.remove(crowding);
        match ask(connection, judge, &mut self.rejections) {
            Asked::Admitted(peer) => return Some(peer),
            Asked::Silent(Connection { channel, .. }) => tracing::debug!(
                "bootstrap connection from {} dropped: too many unauthenticated connections",
                channel.peer()
            ),
            Asked::Dropped => {}
        }
        None
    }
}

/// What came of asking a connection for the token.
enum Asked {
    Admitted(Admitted),
    /// It has said nothing yet, and has time left.
    Silent(Connection),
    /// It said something else, took too long or is gone.
    Dropped,
}

fn ask(mut connection: Connection, judge: Judge<'_>, rejections: &mut Rejections) -> Asked {
    let Connection { since, channel, .. } = &mut connection;
    match channel.receive() {
        Ok(Received::Message(message)) => match judge(&message, channel) {
            Verdict::Admit => return Asked::Admitted(Admitted { channel: connection.channel, message }),
            Verdict::Refuse(why) => {
                if let Err(unsent) = channel.send(&Message::Refuse(why.to_owned())) {
                    tracing::debug!("could not send the refusal: {unsent}");
                }
            }
            Verdict::Reject => {
                let (who, kind) = (channel.peer(), message.kind());
                rejections.tell(
                    &format!("bootstrap connection from {who} rejected: {kind} message without the token"),
                    Instant::now(),
                );
            }
            Verdict::Drop => {}
        },
        Ok(Received::Nothing) if since.elapsed() < TOKEN_LIMIT => return Asked::Silent(connection),
        Ok(Received::Nothing) => {
            let text = format!("bootstrap connection from {} rejected: no token within 10 s", channel.peer());
            rejections.tell(&text, Instant::now());
        }
        Ok(Received::Closed | Received::Unreachable(_)) => {
            tracing::debug!("unauthenticated bootstrap connection closed by its peer")
        }
        Err(error) => rejections.tell(&format!("bootstrap connection rejected: {error}"), Instant::now()),
    }
    Asked::Dropped
}

impl Rejections {
    fn tell(&mut self, text: &str, now: Instant) {
        let Self::Seldom { said, others } = self else { return tracing::info!("{text}") };
        if said.is_some_and(|said| now.saturating_duration_since(said) < QUIET) {
            *others += 1;
            return tracing::debug!("{text}");
        }
        *said = Some(now);
        match std::mem::take(others) {
            0 => tracing::info!("{text}"),
            others => tracing::info!("{text}; {others} others were rejected since the line before"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_said_is_counted_and_a_minute_later_there_is_another_line() {
        let (mut rejections, now) = (Rejections::Seldom { said: None, others: 0 }, Instant::now());
        let unsaid = |rejections: &Rejections| match rejections {
            Rejections::Seldom { said, others } => (said.map(|said| said - now), *others),
            Rejections::Each => panic!("each has a line"),
        };
        let second = Duration::from_secs(1);
        (0..3).for_each(|at| rejections.tell("no", now + at * second));
        assert_eq!(unsaid(&rejections), (Some(Duration::ZERO), 2));
        rejections.tell("no", now + QUIET - second);
        assert_eq!(unsaid(&rejections), (Some(Duration::ZERO), 3));
        rejections.tell("no", now + QUIET);
        assert_eq!(unsaid(&rejections), (Some(QUIET), 0));
    }
}
