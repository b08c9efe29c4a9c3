//! The bootstrap TCP connection of a running connection. It carries control frames until it is
//! given up. Then the connecting side dials another one.
//!
//! - Nothing blocks: dialling and waiting for answers are states, and each attempt has a time limit
//!   ([`proto::flow::redial`]).
//! - The accepting side takes a new TCP connection without checking the old one. The connecting
//!   side has given up the old one, and only a caller that knows the token can dial. The old one
//!   may still be open, if its end has not arrived.
//! - An attempt is refused if it or a later one was accepted.
//! - A new TCP connection may close before a control frame arrives on it, because the attempt was
//!   given up or the peer has died. A live peer still answers over a rail. Without a rail, the
//!   close does not show whether the peer is alive.
//! - Frames that the old connection lost are sent again over the new one
//!   ([`Driver::tcp_opened`]).

use super::driver::Driver;
use crate::clock;
use crate::comm::channel::{Channel, Received};
use crate::comm::datapath::fault::broken_protocol;
use crate::comm::datapath::peer::PeerState;
use crate::comm::descriptors::{DescriptorWarning, waits_for_descriptors};
use host::counters::nanos;
use host::error::{Error, PeerGone, Result};
use proto::flow::redial::{Attempts, Need, Step};
use proto::time::Instant;
use proto::wire::control::ControlFrame;
use proto::wire::handle::TOKEN_BYTES;
use proto::wire::message::{Message, Redial, RedialAt};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use verbs::OwnSocket;

const MESSAGES: usize = 16;

/// Bootstrap TCP of a running connection.
pub struct Tcp {
    state: TcpState,
    redialling: Redialling,
}

enum TcpState {
    Open(Channel),
    /// Replaces an earlier connection. No control frame has arrived on it yet.
    New(Channel),
    /// The network failed, or the peer closed its end.
    GivenUp,
}

/// Means to get another TCP connection.
pub enum Redialling {
    /// This end dials.
    Dials(Box<Dialler>),
    /// The peer dials.
    Awaits {
        /// Token that the peer must send.
        token: [u8; TOKEN_BYTES],
        /// Number of the peer's last accepted attempt.
        attempt: u64,
    },
    /// No other TCP connection is possible: the accepting side has no listener.
    Never,
}

/// Attempts of the connecting side.
pub struct Dialler {
    /// Address of the peer's listener for redials: the IP address at which the peer was reached
    /// during set-up, with the port from the peer's GO.
    address: SocketAddr,
    token: [u8; TOKEN_BYTES],
    attempts: Attempts,
    /// The time when the connection came up. The times in `attempts` are counted from it.
    origin: Instant,
    descriptors: Arc<DescriptorWarning>,
    /// New TCP connection that waits for the peer's answer.
    dialled: Option<Channel>,
}

enum Progress {
    Nothing,
    Failed,
    Taken(Channel),
}

impl Redialling {
    /// Returns the value for the connecting side, from the data in the peer's GO.
    pub fn dials(
        channel: &Channel,
        redial: Option<RedialAt>,
        descriptors: &Arc<DescriptorWarning>,
    ) -> Self {
        let (Some(RedialAt { port, token }), Ok([_, mut address])) = (redial, channel.addresses())
        else {
            tracing::debug!("{} cannot be dialled again", channel.peer());
            return Self::Never;
        };
        address.set_port(port.get());
        let (attempts, dialled) = Default::default();
        let origin = clock::now();
        let descriptors = Arc::clone(descriptors);
        Self::Dials(Box::new(Dialler {
            address,
            token,
            attempts,
            origin,
            descriptors,
            dialled,
        }))
    }

    /// Returns the value for the accepting side.
    pub fn awaits(token: [u8; TOKEN_BYTES]) -> Self {
        Self::Awaits { token, attempt: 0 }
    }
}

impl Tcp {
    /// Wraps the TCP connection of a connection that has just come up.
    pub fn new(channel: Channel, redialling: Redialling) -> Self {
        Self {
            state: TcpState::Open(channel),
            redialling,
        }
    }

    /// Returns true if control frames may arrive over TCP.
    pub fn is_open(&self) -> bool {
        !matches!(self.state, TcpState::GivenUp)
    }

    /// Returns true if the peer, not this end, dials again when TCP is lost.
    pub fn is_awaited(&self) -> bool {
        matches!(self.redialling, Redialling::Awaits { .. })
    }

    /// Returns the sockets to poll for input.
    pub fn sockets(&self) -> impl Iterator<Item = Arc<OwnSocket<TcpStream>>> {
        let dialled = match &self.redialling {
            Redialling::Dials(dialler) => dialler.dialled.as_ref(),
            Redialling::Awaits { .. } | Redialling::Never => None,
        };
        let open = match &self.state {
            TcpState::Open(channel) | TcpState::New(channel) => Some(channel),
            TcpState::GivenUp => None,
        };
        open.into_iter().chain(dialled).map(Channel::socket)
    }

    /// Sends a control frame. Returns false if it could not be sent.
    pub fn send(&mut self, frame: ControlFrame) -> bool {
        let (TcpState::Open(channel) | TcpState::New(channel)) = &mut self.state else {
            return false;
        };
        match channel.offer(&Message::Control(frame)) {
            Ok(taken) => taken,
            Err(error) => {
                tracing::debug!("{error}");
                false
            }
        }
    }

    /// Processes received messages, and dials if necessary.
    pub fn poll(&mut self, driver: &mut Driver, now: Instant) {
        self.receive_messages(driver, now);
        let is_unreachable = self.dial(driver, now);
        if !self.is_open() {
            driver.tcp_missing(is_unreachable, now);
        }
    }

    /// Dials if necessary. Returns true if an attempt has failed.
    fn dial(&mut self, driver: &mut Driver, now: Instant) -> bool {
        let need = driver.tcp_need(self.is_open(), now);
        let Redialling::Dials(dialler) = &mut self.redialling else {
            return false;
        };
        match dialler.poll(need, now) {
            Progress::Nothing => false,
            Progress::Failed => true,
            Progress::Taken(channel) => {
                self.state = TcpState::Open(channel);
                driver.tcp_opened();
                driver.tcp_confirmed(now);
                false
            }
        }
    }

    /// Returns true if a peer that sends this REDIAL may replace the TCP connection.
    pub fn expects(&self, redial: &Redial, driver: &Driver) -> bool {
        match &self.redialling {
            // After `PeerState::Gone` the connection has failed, so the peer cannot return.
            Redialling::Awaits { token, attempt } => {
                *token == redial.token
                    && redial.attempt > *attempt
                    && driver.peer().presence() != PeerState::Gone
            }
            Redialling::Dials(_) | Redialling::Never => false,
        }
    }

    /// Replaces the TCP connection by one that the peer has dialled.
    pub fn replace(&mut self, mut channel: Channel, redial: &Redial, driver: &mut Driver) {
        if let Redialling::Awaits { attempt, .. } = &mut self.redialling {
            *attempt = redial.attempt;
        }
        if let Err(error) = channel.send(&Message::Resumed) {
            // Keep the new TCP connection: the peer has given up every earlier one.
            tracing::debug!("{error}");
        }
        self.state = TcpState::New(channel);
        driver.tcp_opened();
    }

    fn receive_messages(&mut self, driver: &mut Driver, now: Instant) {
        for _ in 0..MESSAGES {
            let is_new = matches!(self.state, TcpState::New(_));
            let (TcpState::Open(channel) | TcpState::New(channel)) = &mut self.state else {
                return;
            };
            match channel.receive() {
                Ok(Received::Message(Message::Control(frame))) => {
                    driver.receive_frame(&frame, now);
                    if is_new {
                        self.mark_confirmed();
                        driver.tcp_confirmed(now);
                    }
                }
                Ok(Received::Message(other)) => {
                    let name = &driver.peer().name;
                    let kind = other.kind();
                    tracing::warn!("{name} sent an unexpected {kind} message: ignored");
                }
                Ok(Received::Nothing) => return,
                // Without a rail, only another attempt to dial could get an answer from the peer,
                // and that attempt may take long. Until then only the time limit of a connection
                // without a rail applies.
                Ok(Received::Closed) if is_new && !driver.has_rail() => {
                    driver.tcp_failed("a redialled TCP connection closed immediately", now);
                    self.state = TcpState::GivenUp;
                }
                Ok(Received::Closed) => {
                    driver.tcp_closed_by_peer(now);
                    self.state = TcpState::GivenUp;
                }
                Ok(Received::Unreachable(why)) => {
                    driver.tcp_failed(&why.to_string(), now);
                    self.state = TcpState::GivenUp;
                }
                Err(error) => {
                    driver.tcp_malformed(&error, now);
                    self.state = TcpState::GivenUp;
                }
            }
        }
    }

    fn mark_confirmed(&mut self) {
        self.state = match std::mem::replace(&mut self.state, TcpState::GivenUp) {
            TcpState::New(channel) => TcpState::Open(channel),
            other => other,
        };
    }
}

impl Dialler {
    fn poll(&mut self, need: Need, now: Instant) -> Progress {
        let at = nanos(now.saturating_duration_since(self.origin));
        if let Some(mut dialled) = self.dialled.take() {
            match is_answered(&mut dialled) {
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
            Some(why) => self
                .descriptors
                .tell(&format!("cannot dial {} again", self.address), &why),
            None => tracing::debug!("dialling {} again: {error}", self.address),
        }
        self.attempts.failed(at);
        Progress::Failed
    }

    /// Starts to dial. The channel keeps the first message until the TCP connection is established,
    /// because the kernel accepts no data earlier.
    fn dial(&self, attempt: u64) -> Result<Channel> {
        let mut channel = Channel::dial(self.address)?;
        channel.send(&Message::Redial(Redial {
            token: self.token,
            attempt,
        }))?;
        Ok(channel)
    }
}

fn is_answered(dialled: &mut Channel) -> Result<bool> {
    match dialled.receive()? {
        Received::Message(Message::Resumed) => Ok(true),
        Received::Message(other) => Err(broken_protocol(&dialled.peer(), &other.kind()).into()),
        Received::Nothing => Ok(false),
        Received::Closed => Err(PeerGone::Closed {
            peer: dialled.peer(),
        }
        .into()),
        Received::Unreachable(network) => Err(network.into()),
    }
}
