//! The connecting side's handshake. Never blocks: each call goes as far as it can.

use super::Setup;
use super::finish::{Agreed, AgreedPair, AwaitingRail, finish};
use super::join::{JoinStep, Joining, NewRoute};
use super::negotiate::{self, KnownRail, LocalRails, in_time, out_of_turn, receive, understood};
use super::pending::Pending;
use super::streams::OpeningStreams;
use crate::clock;
use crate::comm::channel::{Channel, Received};
use crate::comm::datapath::lane::{Lane, Role};
use crate::comm::datapath::send::SendPath;
use crate::comm::endpoint::SendComm;
use crate::comm::process::Process;
use crate::comm::rail::{Rail, interfaces};
use crate::comm::recovery::redial::RedialHandle;
use crate::comm::recovery::tcp::Redialling;
#[cfg(doc)]
use host::error::Error;
use host::error::{Internal, Network, Result, Usage, Violation};
use proto::backoff::PathId;
use proto::flow::paths::End;
use proto::flow::recovery::PathChoice;
use proto::time::Instant;
use proto::wire::fields::Priority;
use proto::wire::handle::{HANDLE_BYTES, Handle};
use proto::wire::ids::RailId;
use proto::wire::mailbox::MAILBOX_BYTES;
use proto::wire::message::{
    Go, Hello, Message, NotYet, Offer, Offered, PairGo, PairOffer, PairReady, Ready,
};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use verbs::Region;

/// Pause before redialling a peer that closed the TCP connection before it answered. The peer may
/// be alive: a listener with too many unauthenticated connections drops an old one. If the peer's
/// process has ended, its host refuses the next dial.
const REDIAL: Duration = Duration::from_millis(10);

enum Connecting {
    Handshaking(Box<Handshake>),
    AwaitingRail(AwaitingRail<SendPath>),
}

struct Handshake {
    channel: Channel,
    started: Instant,
    priority: Priority,
    handle: Handle,
    stage: ConnectStage,
}

enum ConnectStage {
    Redialling(Instant),
    Dialling,
    AwaitingOffer(LocalRails),
    Joining(Box<AcceptedOffer>),
    AwaitingGo(Box<AcceptedOffer>),
    /// No rail reaches the peer, so TCP streams are being opened.
    OpeningStreams(Box<OpeningStreams>),
}

struct AcceptedOffer {
    peer: String,
    chunk_bytes: u32,
    priority: Priority,
    region: Arc<Region>,
    pairs: Vec<OfferedPair>,
    left_out: Vec<(RailId, String)>,
}

struct OfferedPair {
    rail: Arc<Rail>,
    /// Both ends, this side's first.
    ends: [End; 2],
    peer_rail: String,
    queue_count: u8,
    is_late: bool,
    choice: PathChoice,
    made: LaneProgress,
}

/// State of a pair's lane on this side. A lane with queue pairs has registered this side's mailbox.
enum LaneProgress {
    Joining(Joining),
    Lane(Lane),
    /// This side cannot use the lane now.
    NotReady(NotYet),
    /// The peer cannot use the lane now. Its GO has the reason.
    PeerNotReady,
}

/// Connections that are still being set up. NCCL repeats each `connect` call with the same handle
/// memory until it gets the connection.
pub struct PendingConnections(Pending<Connecting>);

impl Default for PendingConnections {
    fn default() -> Self {
        Self(Pending::new(Connecting::peer))
    }
}

impl PendingConnections {
    /// Starts or continues the connection of `handle`. The first call writes a ticket into the last
    /// bytes of the handle, and later calls find the connection by that ticket ([`Pending`]).
    /// Returns `None` until the connection has its first rail.
    ///
    /// # Errors
    /// [`Error::Usage`] for a handle of another network or version, or if no rail is in common;
    /// [`Error::Network`], [`Error::PeerGone`], [`Error::Protocol`] or [`Error::TimedOut`] if the
    /// peer does not answer or gives up.
    pub fn connect(
        &self,
        setup: &Setup,
        handle: &mut [u8; HANDLE_BYTES],
        traffic_class: Option<u8>,
    ) -> Result<Option<SendComm>> {
        let decoded =
            Handle::decode(handle).map_err(|foreign| Usage::Handle(foreign.to_string()))?;
        let Self(pending) = self;
        let (ticket, connecting) = match Handle::ticket(handle) {
            0 => {
                let ticket = pending.ticket();
                Handle::set_ticket(handle, ticket);
                (
                    ticket,
                    Connecting::begin(decoded, &setup.process, traffic_class)?,
                )
            }
            ticket => (ticket, pending.take(ticket)?),
        };
        match connecting.step(setup)? {
            ConnectStep::Done(comm) => Ok(Some(*comm)),
            ConnectStep::Waiting(connecting) => {
                pending.keep(&setup.service, ticket, connecting);
                Ok(None)
            }
        }
    }

    /// Gives up the connections that NCCL has abandoned at time `now`, as the service thread does.
    pub fn give_up_abandoned(&self, now: Instant) {
        self.0.give_up_abandoned(now);
    }
}

enum ConnectStep {
    Done(Box<SendComm>),
    Waiting(Connecting),
}

impl Connecting {
    fn begin(handle: Handle, process: &Process, traffic_class: Option<u8>) -> Result<Self> {
        let channel = dial(process, &handle)?;
        let started = clock::now();
        let priority = process.priority(traffic_class);
        let handshake = Handshake {
            channel,
            started,
            priority,
            handle,
            stage: ConnectStage::Dialling,
        };
        Ok(Self::Handshaking(Box::new(handshake)))
    }

    fn peer(&self) -> String {
        match self {
            Self::Handshaking(handshake) => handshake.handle.address.to_string(),
            Self::AwaitingRail(awaiting) => awaiting.peer(),
        }
    }

    fn step(self, setup: &Setup) -> Result<ConnectStep> {
        let mut awaiting = match self {
            Self::AwaitingRail(awaiting) => awaiting,
            Self::Handshaking(handshake) => match handshake.step(setup)? {
                HandshakeStep::Waiting(handshake) => {
                    return Ok(ConnectStep::Waiting(Self::Handshaking(handshake)));
                }
                HandshakeStep::Streams(comm) => return Ok(ConnectStep::Done(comm)),
                HandshakeStep::Rails(awaiting) => awaiting,
            },
        };
        Ok(match awaiting.step()? {
            Some(comm) => ConnectStep::Done(Box::new(SendComm::Rails(Box::new(comm)))),
            None => ConnectStep::Waiting(Self::AwaitingRail(awaiting)),
        })
    }
}

enum HandshakeStep {
    Waiting(Box<Handshake>),
    Rails(AwaitingRail<SendPath>),
    Streams(Box<SendComm>),
}

impl Handshake {
    fn step(mut self: Box<Self>, setup: &Setup) -> Result<HandshakeStep> {
        let process = &*setup.process;
        loop {
            let waiting_for = match self.stage {
                ConnectStage::Redialling(when) if clock::now() >= when => {
                    self.channel = dial(process, &self.handle)?;
                    self.stage = ConnectStage::Dialling;
                    continue;
                }
                ConnectStage::Redialling(_) => {
                    "a second attempt (the listener closed the first unread)"
                }
                ConnectStage::Dialling => {
                    match dialled(process, &mut self.channel, &self.handle, self.priority)? {
                        Some(stage) => {
                            self.stage = stage;
                            continue;
                        }
                        None => "the TCP handshake",
                    }
                }
                ConnectStage::AwaitingOffer(rails) => {
                    let address = self.handle.address;
                    self.stage =
                        await_offer(process, &mut self.channel, address, rails, self.priority)?;
                    if !matches!(self.stage, ConnectStage::AwaitingOffer(_)) {
                        continue;
                    }
                    "the OFFER message"
                }
                ConnectStage::Joining(mut connected) => {
                    if connected.join(&setup.process) {
                        self.channel.send(&Message::Ready(connected.answer()))?;
                        self.stage = ConnectStage::AwaitingGo(connected);
                        continue;
                    }
                    self.stage = ConnectStage::Joining(connected);
                    "address resolution for the rails"
                }
                ConnectStage::AwaitingGo(connected) => match receive(&mut self.channel)? {
                    Some(Message::Go(go)) => {
                        return connected
                            .finish(setup, self.channel, self.started, go)
                            .map(HandshakeStep::Rails);
                    }
                    Some(other) => return Err(out_of_turn(&self.channel, &other)),
                    None => {
                        self.stage = ConnectStage::AwaitingGo(connected);
                        "the GO message"
                    }
                },
                ConnectStage::OpeningStreams(mut opening) => {
                    if opening.step(&mut self.channel)? {
                        let comm = opening.finish(setup, self.channel)?;
                        return Ok(HandshakeStep::Streams(Box::new(comm)));
                    }
                    self.stage = ConnectStage::OpeningStreams(opening);
                    "the CARRIES message"
                }
            };
            in_time(
                process,
                self.started,
                &format!("{waiting_for} of the peer at {}", self.handle.address),
            )?;
            return Ok(HandshakeStep::Waiting(self));
        }
    }
}

fn dialled(
    process: &Process,
    channel: &mut Channel,
    handle: &Handle,
    priority: Priority,
) -> Result<Option<ConnectStage>> {
    match channel.connected() {
        Ok(true) => send_hello(process, channel, handle, priority)
            .map(|rails| Some(ConnectStage::AwaitingOffer(rails))),
        Ok(false) => Ok(None),
        Err(error) if is_dropped(&error) => Ok(Some(redial(handle.address))),
        Err(error) => Err(Network::Unreachable {
            address: handle.address,
            why: error.to_string(),
        }
        .into()),
    }
}

/// Returns the stage after the peer has dropped this side's connection without reading HELLO.
fn redial(address: SocketAddr) -> ConnectStage {
    tracing::debug!("{address} closed the connection before it read HELLO; dialling again");
    ConnectStage::Redialling(clock::now() + REDIAL)
}

/// Returns true if the peer accepted the connection and then dropped it, so the peer is alive.
fn is_dropped(error: &std::io::Error) -> bool {
    use std::io::ErrorKind;
    matches!(
        error.kind(),
        ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted | ErrorKind::BrokenPipe
    )
}

fn dial(process: &Process, handle: &Handle) -> Result<Channel> {
    Channel::dial(interfaces::in_own_scope(
        handle.address,
        &process.config.setup,
    )?)
}

fn send_hello(
    process: &Process,
    channel: &mut Channel,
    handle: &Handle,
    priority: Priority,
) -> Result<LocalRails> {
    let rails = LocalRails::query(process)?;
    let sent = channel.send(&Message::Hello(Hello {
        token: handle.token,
        name: process.name.clone(),
        chunk_bytes: rails.chunk_bytes(),
        qps_per_rail: negotiate::qps_wanted(&process.config.setup),
        tuner_hash: process.tuner.hash,
        gpu: process.tuner.gpu.clone(),
        priority,
        by_tcp: rails.by_tcp(&process.config.setup),
        rails: rails.adverts.clone(),
    }));
    if let Err(unsent) = sent {
        // The wait for the answer will report the closed connection.
        tracing::debug!("{unsent}");
    }
    Ok(rails)
}

/// Reads the peer's answer to HELLO. Returns the next stage, or the same one if the answer has not
/// arrived.
fn await_offer(
    process: &Process,
    channel: &mut Channel,
    address: SocketAddr,
    rails: LocalRails,
    priority: Priority,
) -> Result<ConnectStage> {
    match channel.receive()? {
        Received::Closed => Ok(redial(address)),
        Received::Message(Message::Offer(offer)) => {
            channel.name_peer(&offer.name);
            AcceptedOffer::new(process, &rails, offer, priority).map(ConnectStage::Joining)
        }
        Received::Message(Message::Streams(streams)) => {
            let opening = OpeningStreams::new(process, streams, address)?;
            Ok(ConnectStage::OpeningStreams(Box::new(opening)))
        }
        other => match understood(channel, other)? {
            Some(message) => Err(out_of_turn(channel, &message)),
            None => Ok(ConnectStage::AwaitingOffer(rails)),
        },
    }
}

impl AcceptedOffer {
    fn new(
        process: &Process,
        rails: &LocalRails,
        offer: Offer,
        priority: Priority,
    ) -> Result<Box<Self>> {
        if offer.pairs.is_empty() {
            return Err(Violation::NoPairs {
                peer: offer.name.clone(),
            }
            .into());
        }
        let region = Region::new(MAILBOX_BYTES)?;
        let mut pairs = Vec::with_capacity(offer.pairs.len());
        let mut paired = Vec::with_capacity(offer.pairs.len());
        for pair in &offer.pairs {
            let rail_index = usize::from(pair.connector_rail);
            let Some(known) = rails.known.get(rail_index) else {
                return Err(Violation::UnknownRail {
                    peer: offer.name.clone(),
                    rail: rail_index,
                }
                .into());
            };
            paired.push(rail_index);
            pairs.push(OfferedPair::open(process, known, pair, &region, priority));
        }
        let chunk_bytes = offer.chunk_bytes.min(rails.chunk_bytes());
        let left_out = negotiate::unpaired(rails, &paired, Role::Sender);
        Ok(Box::new(Self {
            peer: offer.name,
            chunk_bytes,
            priority,
            region,
            pairs,
            left_out,
        }))
    }

    /// Continues connecting the lanes. Returns true when every lane has its result.
    fn join(&mut self, process: &Arc<Process>) -> bool {
        for pair in &mut self.pairs {
            let before = std::mem::replace(&mut pair.made, LaneProgress::PeerNotReady);
            pair.made = match before {
                LaneProgress::Joining(joining) => match joining.step(process) {
                    JoinStep::Waiting(joining) => LaneProgress::Joining(joining),
                    JoinStep::Joined(lane, _) => LaneProgress::Lane(lane),
                    JoinStep::LeftOut(not_yet) => LaneProgress::NotReady(not_yet),
                },
                decided => decided,
            };
        }
        !self
            .pairs
            .iter()
            .any(|pair| matches!(pair.made, LaneProgress::Joining(_)))
    }

    fn answer(&self) -> Ready {
        let answer = |pair: &OfferedPair| match &pair.made {
            LaneProgress::Lane(lane) => PairReady::Connected {
                mailbox_rkey: lane.mailbox_rkey(),
                qps: lane.ends(),
            },
            LaneProgress::NotReady(not_yet) => PairReady::NotYet(not_yet.clone()),
            LaneProgress::PeerNotReady => PairReady::NotYet(NotYet::temporary(String::new())),
            LaneProgress::Joining(_) => PairReady::NotYet(NotYet {
                why: Internal::NotConnected.to_string(),
                is_temporary: false,
            }),
        };
        Ready {
            mailbox_addr: self.region.addr(),
            pairs: self.pairs.iter().map(answer).collect(),
        }
    }

    fn finish(
        self,
        setup: &Setup,
        channel: Channel,
        started: Instant,
        go: Go,
    ) -> Result<AwaitingRail<SendPath>> {
        let Self {
            peer,
            chunk_bytes,
            priority,
            region,
            pairs: offered,
            left_out,
        } = self;
        negotiate::check_pair_count(&peer, go.pairs.len(), offered.len())?;
        let mut pairs = Vec::new();
        for (pair, answer) in offered.into_iter().zip(go.pairs) {
            pairs.push(pair.agree(&setup.process, &peer, answer)?);
        }
        let role = Role::Sender;
        let peer_addr = go.mailbox_addr;
        let agreed = Agreed {
            role,
            peer,
            started,
            priority,
            chunk_bytes,
            region,
            peer_addr,
            pairs,
            left_out,
        };
        let redialling = |channel: &mut Channel, _: &mut RedialHandle| {
            Ok(Redialling::dials(channel, go.redial, &setup.descriptors))
        };
        finish(setup, channel, agreed, SendPath::new, redialling)
    }
}

impl OfferedPair {
    /// Opens this side's queue pairs for a pair of the OFFER, and starts to connect them.
    fn open(
        process: &Process,
        known: &KnownRail,
        pair: &PairOffer,
        region: &Arc<Region>,
        priority: Priority,
    ) -> Self {
        let choice = PathChoice {
            peer_gid: pair.acceptor_gid,
            mtu_bytes: pair.mtu_bytes,
        };
        let made = match &pair.queue_pairs {
            Offered::Later(_) | Offered::Late(_) => match &known.problem {
                Some(why) => LaneProgress::NotReady(NotYet::temporary(why.clone())),
                None => LaneProgress::PeerNotReady,
            },
            Offered::Now(ends) => {
                let route = NewRoute {
                    snapshot: known.snapshot.clone(),
                    gid: pair.connector_gid,
                    choice,
                    ends: ends.clone(),
                    priority,
                };
                match open_lane(known, pair, region) {
                    Ok(lane) => {
                        LaneProgress::Joining(Joining::new(process, Role::Sender, lane, route))
                    }
                    Err(not_yet) => LaneProgress::NotReady(not_yet),
                }
            }
        };
        let theirs = End {
            rail: pair.acceptor_rail,
            attachment: pair.acceptor,
        };
        Self {
            rail: Arc::clone(&known.rail),
            ends: [known.rail.end(), theirs],
            peer_rail: pair.acceptor_name.clone(),
            queue_count: pair.queue_pairs.count(),
            is_late: matches!(pair.queue_pairs, Offered::Late(_)),
            choice,
            made,
        }
    }

    /// Combines the results of both sides. `peer` names the peer in the error.
    fn agree(self, process: &Process, peer: &str, answer: PairGo) -> Result<AgreedPair> {
        let Self {
            rail,
            ends,
            peer_rail,
            queue_count,
            is_late,
            choice,
            made,
        } = self;
        let lane = match (made, answer) {
            (LaneProgress::Lane(mut lane), PairGo::Carries { mailbox_rkey }) => {
                let path = PathId {
                    rail: rail.id,
                    peer_gid: choice.peer_gid,
                };
                process.backoff.carried(path, clock::now());
                lane.peer_mailbox_rkey = mailbox_rkey;
                Ok(lane)
            }
            (LaneProgress::NotReady(_) | LaneProgress::PeerNotReady, PairGo::Carries { .. }) => {
                let peer = peer.to_owned();
                return Err(Violation::NotConnected { peer }.into());
            }
            (LaneProgress::Lane(_) | LaneProgress::PeerNotReady, PairGo::NotYet(why))
            | (LaneProgress::NotReady(NotYet { why, .. }), PairGo::NotYet(_)) => Err(why),
            (LaneProgress::Joining(_), _) => return Err(Internal::NotConnected.into()),
        };
        Ok(AgreedPair {
            rail,
            ends,
            peer_rail,
            queue_count,
            is_late,
            choice,
            lane,
        })
    }
}

fn open_lane(
    known: &KnownRail,
    pair: &PairOffer,
    region: &Arc<Region>,
) -> std::result::Result<Lane, NotYet> {
    if let Some(why) = &known.problem {
        return Err(NotYet::temporary(why.clone()));
    }
    let open = || {
        let mut lane = Lane::open(
            &known.rail,
            Role::Sender,
            usize::from(pair.queue_pairs.count()),
        )?;
        lane.register_mailbox(region)?;
        Ok(lane)
    };
    let mut lane = open().map_err(|error| negotiate::not_yet(&known.rail, &error))?;
    lane.peer_rail.clone_from(&pair.acceptor_name);
    Ok(lane)
}
