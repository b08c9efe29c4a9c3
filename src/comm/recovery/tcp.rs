//! A running connection's TCP: control frames go over it until it is given up, and the connecting side dials for another one.
//!
//! What it promises:
//! - It never waits: dialling and answers are states, and each attempt has a limit ([`crate::flow::redial`]).
//! - The accepting side takes a new TCP connection in place of the old one whatever it thinks of that: the connecting side has given the
//!   old one up (it need not be closed: a child that the process forked may hold it open), and only who knows the token can dial. A late
//!   attempt does not replace a later one, and one far ahead of its time is refused ([`is_timely`]).
//! - A new TCP connection that is closed before a control frame came by it may be an attempt that was given up, or a peer that has died: a
//!   peer that is there answers over a rail. Without a rail it says nothing about the peer.
//! - Frames that the old one lost are sent once more by the new one ([`Driver::channel_opened`]).

use super::driver::Driver;
use crate::comm::channel::{Channel, Received};
use crate::comm::datapath::peer::Presence;
use crate::comm::descriptors::{DescriptorWarning, waits_for_descriptors};
use crate::counters::nanos;
use crate::error::{Error, Result};
use crate::flow::redial::{Attempts, Need, Step, is_timely};
use crate::wire::control::ControlFrame;
use crate::wire::handle::TOKEN_BYTES;
use crate::wire::message::{Message, Redial, RedialAt};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

/// Messages of one peer that are taken in at a time.
const MESSAGES: usize = 16;

/// A running connection's TCP.
pub struct Tcp {
    line: Line,
    redialling: Redialling,
}

enum Line {
    Open(Channel),
    /// Taken in place of another, and no control frame has come by it yet.
    New(Channel),
    /// The network under it, or the peer's end of it, is gone.
    GivenUp,
}

/// How a connection gets another TCP connection.
pub enum Redialling {
    /// This side dials.
    Dials(Box<Dialler>),
    /// The peer dials.
    Awaits {
        /// What it has to show.
        token: [u8; TOKEN_BYTES],
        /// Its last attempt that was let in.
        attempt: u64,
        /// When the connection came up.
        since: Instant,
    },
    /// Not at all: the accepting side has no listener.
    Never,
}

/// The connecting side's attempts.
pub struct Dialler {
    /// The peer's address, as it was reached when the connection was made.
    address: SocketAddr,
    token: [u8; TOKEN_BYTES],
    attempts: Attempts,
    /// What the times of `attempts` count from: when the connection came up.
    origin: Instant,
    descriptors: Arc<DescriptorWarning>,
    /// What was dialled, and waits for its answer.
    dialled: Option<Channel>,
}

/// What came of a look at the attempts.
enum Progress {
    Nothing,
    /// The attempt was in vain.
    Failed,
    /// The peer has taken the new TCP connection.
    Taken(Channel),
}

impl Redialling {
    /// Of the connecting side, by what the accepting side's GO says.
    pub fn dials(channel: &Channel, redial: Option<RedialAt>, descriptors: &Arc<DescriptorWarning>) -> Self {
        let (Some(RedialAt { port, token }), Ok([_, mut address])) = (redial, channel.addresses()) else {
            tracing::debug!("{} cannot be dialled again", channel.peer());
            return Self::Never;
        };
        address.set_port(port.get());
        let (attempts, dialled) = Default::default();
        let (origin, descriptors) = (Instant::now(), Arc::clone(descriptors));
        Self::Dials(Box::new(Dialler { address, token, attempts, origin, descriptors, dialled }))
    }

    /// Of the accepting side.
    pub fn awaits(token: [u8; TOKEN_BYTES]) -> Self {
        Self::Awaits { token, attempt: 0, since: Instant::now() }
    }
}

impl Tcp {
    /// Of a connection that has just come up.
    pub fn new(channel: Channel, redialling: Redialling) -> Self {
        Self { line: Line::Open(channel), redialling }
    }

    /// Whether control frames may come by it.
    pub fn is_open(&self) -> bool {
        !matches!(self.line, Line::GivenUp)
    }

    /// Whether the peer may dial.
    pub fn is_awaited(&self) -> bool {
        matches!(self.redialling, Redialling::Awaits { .. })
    }

    /// What to wait for.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let dialled = match &self.redialling {
            Redialling::Dials(dialler) => dialler.dialled.as_ref(),
            Redialling::Awaits { .. } | Redialling::Never => None,
        };
        let open = match &self.line {
            Line::Open(channel) | Line::New(channel) => Some(channel),
            Line::GivenUp => None,
        };
        open.into_iter().chain(dialled).map(AsFd::as_fd)
    }

    /// Sends a control frame; whether it was taken.
    pub fn send(&mut self, frame: ControlFrame) -> bool {
        let (Line::Open(channel) | Line::New(channel)) = &mut self.line else { return false };
        match channel.offer(&Message::Control(frame)) {
            Ok(taken) => taken,
            Err(error) => {
                tracing::debug!("{error}");
                false
            }
        }
    }

    /// Takes in what has come, and dials where that is called for.
    pub fn tend(&mut self, driver: &mut Driver, now: Instant) {
        self.listen(driver, now);
        let is_unreachable = self.dial(driver, now);
        if !self.is_open() {
            driver.channel_away(is_unreachable, now);
        }
    }

    /// Dials where that is called for; whether an attempt has failed.
    fn dial(&mut self, driver: &mut Driver, now: Instant) -> bool {
        let need = driver.channel_need(self.is_open(), now);
        let Redialling::Dials(dialler) = &mut self.redialling else { return false };
        match dialler.go_on(need, now) {
            Progress::Nothing => false,
            Progress::Failed => true,
            Progress::Taken(channel) => {
                self.line = Line::Open(channel);
                driver.channel_opened();
                driver.channel_carries(now);
                false
            }
        }
    }

    /// Whether a peer that dials with these words is let in.
    pub fn expects(&self, redial: &Redial, driver: &Driver) -> bool {
        match &self.redialling {
            // A peer that counts as gone is not back: its connection has failed.
            Redialling::Awaits { token, attempt, since } => {
                *token == redial.token
                    && is_timely(redial.attempt, *attempt, nanos(since.elapsed()))
                    && driver.peer().presence() != Presence::Gone
            }
            Redialling::Dials(_) | Redialling::Never => false,
        }
    }

    /// Takes what the peer has dialled in place of what there is.
    pub fn replace(&mut self, mut channel: Channel, redial: &Redial, driver: &mut Driver) {
        if let Redialling::Awaits { attempt, .. } = &mut self.redialling {
            *attempt = redial.attempt;
        }
        if let Err(error) = channel.send(&Message::Resumed) {
            // What there is, if anything, is what the peer has given up.
            tracing::debug!("{error}");
        }
        self.line = Line::New(channel);
        driver.channel_opened();
    }

    /// Hears what came over the channel.
    fn listen(&mut self, driver: &mut Driver, now: Instant) {
        for _ in 0..MESSAGES {
            let is_new = matches!(self.line, Line::New(_));
            let (Line::Open(channel) | Line::New(channel)) = &mut self.line else { return };
            match channel.receive() {
                Ok(Received::Message(Message::Control(frame))) => {
                    driver.hear(&frame, now);
                    if is_new {
                        self.prove();
                        driver.channel_carries(now);
                    }
                }
                Ok(Received::Message(other)) => {
                    let (name, kind) = (&driver.peer().name, other.kind());
                    tracing::warn!("{name} sent an unexpected {kind} message: ignored");
                }
                Ok(Received::Nothing) => return,
                // Nothing but another attempt could answer, which may take long; the limit of a connection without a rail is running.
                Ok(Received::Closed) if is_new && !driver.has_rail() => {
                    driver.lost_channel("a TCP connection that was dialled again closed at once", now);
                    self.line = Line::GivenUp;
                }
                Ok(Received::Closed) => {
                    driver.suspect(now);
                    self.line = Line::GivenUp;
                }
                Ok(Received::Unreachable(why)) => {
                    driver.lost_channel(&why, now);
                    self.line = Line::GivenUp;
                }
                Err(error) => {
                    driver.broken_channel(&error, now);
                    self.line = Line::GivenUp;
                }
            }
        }
    }

    /// The peer uses the new TCP connection.
    fn prove(&mut self) {
        self.line = match std::mem::replace(&mut self.line, Line::GivenUp) {
            Line::New(channel) => Line::Open(channel),
            other => other,
        };
    }
}

impl Dialler {
    /// Dials when it is time, and hears the answer.
    fn go_on(&mut self, need: Need, now: Instant) -> Progress {
        let at = nanos(now.saturating_duration_since(self.origin));
        if let Some(mut dialled) = self.dialled.take() {
            match heard(&mut dialled) {
                Ok(true) => {
                    self.attempts.succeeded(at);
                    return Progress::Taken(dialled);
                }
                Ok(false) => self.dialled = Some(dialled),
                Err(error) => return self.failed(&error, at),
            }
        }
        match self.attempts.poll(need, at) {
            None => Progress::Nothing,
            Some(Step::Dial(attempt)) => match self.dial(attempt) {
                Ok(channel) => {
                    self.dialled = Some(channel);
                    Progress::Nothing
                }
                Err(error) => self.failed(&error, at),
            },
            Some(Step::Abandon) => {
                tracing::debug!("dialling {} again: no answer in time", self.address);
                self.dialled = None;
                Progress::Failed
            }
        }
    }

    fn failed(&mut self, error: &Error, at: u64) -> Progress {
        match waits_for_descriptors(error) {
            Some(why) => self.descriptors.tell(&format!("cannot dial {} again", self.address), &why),
            None => tracing::debug!("dialling {} again: {error}", self.address),
        }
        self.attempts.failed(at);
        Progress::Failed
    }

    /// What is to be said first is sent when the TCP connection is there: until then the kernel takes nothing, and it waits here.
    fn dial(&self, attempt: u64) -> Result<Channel> {
        let mut channel = Channel::dial(self.address)?;
        channel.send(&Message::Redial(Redial { token: self.token, attempt }))?;
        Ok(channel)
    }
}

/// Whether the peer has taken the TCP connection.
fn heard(dialled: &mut Channel) -> Result<bool> {
    match dialled.receive()? {
        Received::Message(Message::Resumed) => Ok(true),
        Received::Message(other) => Err(Error::Protocol(other.kind().to_owned())),
        Received::Nothing => Ok(false),
        Received::Closed => Err(Error::PeerGone("closed".to_owned())),
        Received::Unreachable(why) => Err(Error::Network(why)),
    }
}
