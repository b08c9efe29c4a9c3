//! Set-up of a connection over TCP streams, on both sides. The set-up starts when the accepting
//! side answers HELLO with STREAMS because no rail reaches the peer. The connecting side then opens
//! the other streams: the first stream is the connection that carried HELLO. When all streams are
//! open, the accepting side sends CARRIES.

use super::Setup;
use super::admission::Admission;
use super::negotiate::{self, LocalRails};
use crate::clock;
use crate::comm::channel::{Channel, Received};
use crate::comm::datapath::try_cell::TryCell;
use crate::comm::descriptors::DescriptorWarning;
use crate::comm::endpoint::{RecvComm, SendComm, StreamEndpoint};
use crate::comm::log::once::Subject;
use crate::comm::process::Process;
use crate::comm::rail::interfaces::in_own_scope;
use crate::comm::streams::context::StreamContext;
use crate::comm::streams::recv::StreamRecvPath;
use crate::comm::streams::send::StreamSendPath;
use crate::comm::streams::sockets::Sockets;
use host::error::{Error, Network, Result, TcpPath, Usage, Violation};
use host::interfaces;
use proto::time::Instant;
use proto::wire::handle::TOKEN_BYTES;
use proto::wire::message::{ByTcp, Hello, Message, Stream, Streams};
use proto::wire::stream::MAX_STREAMS;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

/// Number of TCP streams of a connection. One stream fills a 10 Gb/s network unless packets are
/// lost. Of several streams, a loss slows down only one. The host can also receive several streams
/// on several cores.
const STREAMS: usize = 4;

const _: () = assert!(STREAMS <= MAX_STREAMS);

/// Pause before redialling a stream. The peer drops streams if its port has too many
/// unauthenticated connections.
const REDIAL: Duration = Duration::from_millis(10);

/// Checks that both sides allow TCP. Called if no rail of one side pairs with a rail of the other.
///
/// # Errors
/// [`Error::Usage`] if one side does not allow TCP. The text has the remedy, or the reason.
pub fn allow(process: &Process, rails: &LocalRails, hello: &Hello) -> Result<()> {
    let by_tcp = rails.by_tcp(&process.config.setup);
    let rails = rails.nothing_in_common(process, &hello.rails, &hello.name);
    // `check_ring_tcp` has checked that `NCCL_SPARK_RING_TCP` is the same on both sides, so `Off`
    // on one side implies `Off` on the other.
    let (host, why) = match (by_tcp, &hello.by_tcp) {
        (ByTcp::Withheld(why), _) => (&process.name, why),
        (ByTcp::Allowed, ByTcp::Withheld(why)) => (&hello.name, why.clone()),
        (ByTcp::Allowed, ByTcp::Allowed) => return Ok(()),
        (ByTcp::Off, _) | (_, ByTcp::Off) => {
            return Err(Usage::NothingInCommon { rails }.into());
        }
    };
    Err(Usage::TcpWithheld {
        rails,
        host: host.clone(),
        why,
    }
    .into())
}

/// State of the accepting side, which waits for the other streams of a connection.
pub struct Gathering {
    token: [u8; TOKEN_BYTES],
    /// The streams other than the one that HELLO came over.
    channels: [Option<Channel>; STREAMS - 1],
    was_answered: bool,
}

impl Gathering {
    /// Starts to wait for the streams. Also returns the answer to HELLO.
    ///
    /// # Errors
    /// [`Error::Missing`] if the system supplies no random numbers.
    pub fn new(process: &Process) -> Result<(Self, Streams)> {
        let mut token = [0; TOKEN_BYTES];
        getrandom::fill(&mut token)?;
        let name = process.name.clone();
        let channels = [const { None }; STREAMS - 1];
        Ok((
            Self {
                token,
                channels,
                was_answered: false,
            },
            Streams {
                name,
                count: STREAMS as u8,
                token,
            },
        ))
    }

    /// Adds connected streams. A stream replaces an earlier stream with the same number, which the
    /// peer has given up.
    pub fn poll(&mut self, admission: &mut Admission, descriptors: &DescriptorWarning) {
        for (channel, Stream { number, .. }) in admission.look_for_streams(descriptors, &self.token)
        {
            if let Some(place) = usize::from(number)
                .checked_sub(1)
                .and_then(|at| self.channels.get_mut(at))
            {
                *place = Some(channel);
            }
        }
    }

    /// Sends CARRIES once all streams are connected. Returns true when CARRIES is fully sent.
    ///
    /// # Errors
    /// The errors of [`Channel::send`].
    pub fn is_complete(&mut self, first: &mut Channel) -> Result<bool> {
        if self.channels.iter().any(Option::is_none) {
            return Ok(false);
        }
        if !std::mem::replace(&mut self.was_answered, true) {
            first.send(&Message::Carries)?;
        }
        first.is_flushed()
    }

    /// Creates the connection's data path.
    ///
    /// # Errors
    /// [`Error::Os`] if a socket cannot be set up.
    pub fn finish(self, setup: &Setup, first: Channel, peer: String) -> Result<RecvComm> {
        let channels = std::iter::once(first)
            .chain(self.channels.into_iter().flatten())
            .collect();
        let comm = finish(setup, channels, peer, StreamRecvPath::new)?;
        Ok(RecvComm::Streams(Box::new(comm)))
    }
}

/// State of the connecting side, which opens the other streams of a connection.
pub struct OpeningStreams {
    peer: String,
    token: [u8; TOKEN_BYTES],
    address: SocketAddr,
    opening: Vec<OpeningStream>,
}

enum OpeningStream {
    /// To be dialled at this time.
    Waiting(Instant),
    Dialling(Channel),
    /// Connected. The message STREAM was sent, or is queued.
    Sent(Channel),
}

impl OpeningStreams {
    /// Prepares the streams that the accepting side asks for. [`OpeningStreams::step`] dials them
    /// at `address`.
    ///
    /// # Errors
    /// The errors of [`in_own_scope`].
    pub fn new(process: &Process, streams: Streams, address: SocketAddr) -> Result<Self> {
        let Streams {
            name: peer,
            count,
            token,
        } = streams;
        let now = clock::now();
        let opening = (1..count).map(|_| OpeningStream::Waiting(now)).collect();
        Ok(Self {
            peer,
            token,
            address: in_own_scope(address, &process.config.setup)?,
            opening,
        })
    }

    /// Continues to open all streams. `first` is the first stream. Returns true once the peer has
    /// confirmed all streams with CARRIES.
    ///
    /// # Errors
    /// [`Error::Network`] if the peer cannot be reached, [`Error::PeerGone`] if it closes the first
    /// stream, [`Error::Usage`] if it refuses the connection, [`Error::Protocol`] if it sends
    /// another message, [`Error::Os`] if no socket can be created.
    pub fn step(&mut self, first: &mut Channel) -> Result<bool> {
        let Self {
            token,
            address,
            opening,
            ..
        } = self;
        for (number, stream) in (1..).zip(opening) {
            let before = std::mem::replace(stream, OpeningStream::Waiting(clock::now() + REDIAL));
            *stream = before.step(
                *address,
                Stream {
                    token: *token,
                    number,
                },
            )?;
        }
        match negotiate::receive(first)? {
            Some(Message::Carries) => Ok(true),
            Some(other) => Err(negotiate::out_of_turn(first, &other)),
            None => Ok(false),
        }
    }

    /// Creates the connection's data path.
    ///
    /// # Errors
    /// [`Error::Protocol`] if the peer has confirmed streams that are not open yet; [`Error::Os`]
    /// if a socket cannot be set up.
    pub fn finish(self, setup: &Setup, first: Channel) -> Result<SendComm> {
        let mut channels = vec![first];
        for stream in self.opening {
            match stream {
                OpeningStream::Sent(channel) => channels.push(channel),
                OpeningStream::Waiting(_) | OpeningStream::Dialling(_) => {
                    return Err(Violation::NotOpen { peer: self.peer }.into());
                }
            }
        }
        let comm = finish(setup, channels, self.peer, StreamSendPath::new)?;
        Ok(SendComm::Streams(Box::new(comm)))
    }
}

impl OpeningStream {
    fn step(self, address: SocketAddr, stream: Stream) -> Result<Self> {
        let again = || Ok(Self::Waiting(clock::now() + REDIAL));
        let cannot = |error: std::io::Error| {
            Network::Unreachable {
                address,
                why: error.to_string(),
            }
            .into()
        };
        match self {
            Self::Waiting(when) if clock::now() < when => Ok(self),
            Self::Waiting(_) => Channel::dial(address).map(Self::Dialling),
            Self::Dialling(mut channel) => match channel.connected() {
                Ok(false) => Ok(Self::Dialling(channel)),
                Ok(true) => match channel.send(&Message::Stream(stream)) {
                    Ok(()) => Ok(Self::Sent(channel)),
                    Err(Error::PeerGone(_)) => again(),
                    Err(error) => Err(error),
                },
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe
                    ) =>
                {
                    again()
                }
                Err(error) => Err(cannot(error)),
            },
            // `Channel::receive` first sends what is still queued of the message STREAM. After
            // `Closed`, dial again: the peer may have dropped the stream before it read STREAM.
            Self::Sent(mut channel) => match channel.receive()? {
                Received::Nothing => Ok(Self::Sent(channel)),
                Received::Closed => again(),
                Received::Unreachable(network) => Err(network.into()),
                Received::Message(message) => Err(negotiate::out_of_turn(&channel, &message)),
            },
        }
    }
}

/// Creates a connection over streams. `path` makes the data path. Its argument is the bytes that
/// have already arrived on each stream.
fn finish<P>(
    setup: &Setup,
    channels: Vec<Channel>,
    peer: String,
    path: impl FnOnce(&[Vec<u8>]) -> P,
) -> Result<StreamEndpoint<P>> {
    let process = Arc::clone(&setup.process);
    let local = channels
        .first()
        .and_then(|first| first.addresses().ok())
        .map(|[own, _]| own.ip());
    let interface = local.map_or_else(|| "an unknown interface".to_owned(), interface_with);
    let (sockets, read) = Sockets::new(channels, TcpPath { peer, interface })?;
    report(&process, &sockets);
    let context = StreamContext {
        sockets: Arc::new(sockets),
        stall_warn: process.config.data_path.stall_warn,
        log: Arc::clone(&process.log),
        totals: Arc::clone(&process.by_streams),
    };
    process.opened(&context.sockets.tcp.peer);
    let path = TryCell::new(path(&read));
    Ok(StreamEndpoint {
        context,
        process,
        service: Arc::clone(&setup.service),
        path,
    })
}

/// Returns the name of the interface with this address, or the address as text if there is none.
fn interface_with(ip: IpAddr) -> String {
    let all = interfaces::all().unwrap_or_else(|error| {
        tracing::debug!("{error}");
        Vec::new()
    });
    let has = |interface: &&interfaces::Interface| {
        interface
            .addresses
            .iter()
            .any(|each| each.address.ip() == ip)
    };
    all.iter()
        .find(has)
        .map_or_else(|| ip.to_string(), |interface| interface.name.clone())
}

/// Logs the new connection: at INFO the first time for this peer, later at DEBUG. Warns once for
/// each peer if the interface is Wi-Fi.
fn report(process: &Process, sockets: &Sockets) {
    let TcpPath { peer, interface } = &sockets.tcp;
    let line = format!(
        "connected with {peer} by TCP over {interface}, {} streams, because no rail reaches it (NCCL_SPARK_RING_TCP)",
        sockets.count()
    );
    if process.log.is_first(peer, Subject::Connected(line.clone())) {
        tracing::info!("{line}");
    } else {
        tracing::debug!("{line}");
    }
    if interfaces::is_wireless(&process.config.rails.sysfs, interface)
        && process.log.is_first(peer, Subject::Wireless)
    {
        tracing::warn!(
            "TCP with {peer} goes over {interface}, which is Wi-Fi: set NCCL_SOCKET_IFNAME to a wired interface on every node"
        );
    }
}
