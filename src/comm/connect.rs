//! The connecting side's handshake. Never waits: each call goes as far as it can.

use super::Host;
use super::board::{Board, FarBoard};
use super::channel::{Channel, Received};
use super::half::Ends;
use super::handshake::{self, Rails, in_time};
use super::lane::{Lane, Role, Route};
use super::network;
use super::owner::Owner;
use super::peer::Peer;
use super::send::{SendComm, SendPath};
use super::ward::Ward;
use super::warden::Warden;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::flow::ways::End;
use crate::verbs::{Access, Mr, Region};
use crate::wire::MAX_RAILS;
use crate::wire::board::BOARD_BYTES;
use crate::wire::handle::{HANDLE_BYTES, Handle};
use crate::wire::message::{Go, Hello, Message, Offer, PairGo, PairOffer, PairReady, Ready};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long to wait before a peer is dialled again that has closed before it said anything: strangers crowd its door, and this
/// side was in the wrong place among them. (One that has gone refuses the next connection.)
const REDIAL: Duration = Duration::from_millis(10);

/// A connection being made.
pub struct Connecting {
    channel: Channel,
    started: Instant,
    traffic_class: Option<u8>,
    handle: Handle,
    stage: Stage,
}

enum Stage {
    /// Until then it has to wait.
    Redialling(Instant),
    Dialling,
    AwaitingOffer(Rails),
    AwaitingGo(Box<Connected>),
}

/// Queue pairs connected on this side.
struct Connected {
    peer: String,
    chunk_bytes: u32,
    traffic_class: Option<u8>,
    board: Arc<Region>,
    /// One for each pair of the offer.
    pairs: Vec<OfferedPair>,
    left_out: Vec<(usize, String)>,
}

/// A pair of the offer, on this side.
struct OfferedPair {
    /// This host's rail.
    index: usize,
    /// The peer's rail, for messages.
    acceptor: String,
    /// Both ends, this side's first.
    ends: [End; 2],
    /// The connected lane with its key of the board, or why this side cannot use it.
    made: std::result::Result<(Lane, Mr), String>,
}

/// Goes on with the connection that `handle` asks for; `None` while it is not there. NCCL calls it again with the same
/// memory: the handle's last bytes name the connection from the first call on.
///
/// # Errors
/// [`Error::Usage`] for a handle of another network or version, or when no rail is in common; [`Error::Remote`] when
/// the peer does not answer or gives up.
pub fn connect(
    host: &Arc<Host>,
    handle: &mut [u8; HANDLE_BYTES],
    traffic_class: Option<u8>,
) -> Result<Option<SendComm>> {
    let decoded = Handle::decode(handle).map_err(|foreign| Error::Usage(foreign.to_string()))?;
    let ticket = match Handle::ticket(handle) {
        0 => {
            let ticket = host.new_ticket();
            Handle::set_ticket(handle, ticket);
            host.keep_connecting(ticket, Connecting::begin(decoded, &host.config, traffic_class)?);
            ticket
        }
        ticket => ticket,
    };
    let Some(connecting) = host.take_connecting(ticket) else {
        return Err(Error::Remote("connect called again for a connection that has failed or timed out".to_owned()));
    };
    match connecting.step(host)? {
        Step::Done(comm) => Ok(Some(*comm)),
        Step::Waiting(connecting) => {
            host.keep_connecting(ticket, connecting);
            Ok(None)
        }
    }
}

enum Step {
    Done(Box<SendComm>),
    Waiting(Connecting),
}

impl Connecting {
    fn begin(handle: Handle, config: &Config, traffic_class: Option<u8>) -> Result<Self> {
        let channel = Channel::dial(network::in_own_scope(handle.address, config)?)?;
        Ok(Self { channel, started: Instant::now(), traffic_class, handle, stage: Stage::Dialling })
    }

    pub(super) fn started(&self) -> Instant {
        self.started
    }

    fn step(mut self, host: &Arc<Host>) -> Result<Step> {
        loop {
            let waiting_for = match self.stage {
                Stage::Redialling(when) if Instant::now() >= when => {
                    self.channel = Channel::dial(network::in_own_scope(self.handle.address, &host.config)?)?;
                    self.stage = Stage::Dialling;
                    continue;
                }
                Stage::Redialling(_) => "room in the listen queue",
                Stage::Dialling => match self.channel.connected() {
                    Ok(true) => {
                        self.stage = Stage::AwaitingOffer(say_hello(host, &mut self.channel, &self.handle)?);
                        continue;
                    }
                    Ok(false) => "the TCP handshake",
                    Err(error) if is_dropped(&error) => {
                        self.stage = redial(self.handle.address);
                        continue;
                    }
                    Err(error) => {
                        let address = self.handle.address;
                        return Err(Error::Remote(format!("cannot reach the peer at {address}: {error}")));
                    }
                },
                Stage::AwaitingOffer(rails) => match self.channel.receive()? {
                    Received::Closed => {
                        self.stage = redial(self.handle.address);
                        continue;
                    }
                    Received::Message(Message::Offer(offer)) => {
                        let connected = Connected::from_offer(host, &rails, offer, self.traffic_class)?;
                        self.channel.send(&Message::Ready(connected.answer()))?;
                        self.stage = Stage::AwaitingGo(Box::new(connected));
                        continue;
                    }
                    other => match understood(&self.channel, other)? {
                        Some(message) => return Err(out_of_turn(&self.channel, &message)),
                        None => {
                            self.stage = Stage::AwaitingOffer(rails);
                            "the OFFER message"
                        }
                    },
                },
                Stage::AwaitingGo(connected) => match receive(&mut self.channel)? {
                    Some(Message::Go(go)) => {
                        return connected.finish(host, self.channel, go).map(|comm| Step::Done(Box::new(comm)));
                    }
                    Some(other) => return Err(out_of_turn(&self.channel, &other)),
                    None => {
                        self.stage = Stage::AwaitingGo(connected);
                        "the rail test"
                    }
                },
            };
            in_time(host, self.started, &format!("{waiting_for} of the peer at {}", self.handle.address))?;
            return Ok(Step::Waiting(self));
        }
    }
}

/// What comes next when the peer dropped this side before it had heard it.
fn redial(address: SocketAddr) -> Stage {
    tracing::debug!("{address} closed the connection before it read HELLO; dialling again");
    Stage::Redialling(Instant::now() + REDIAL)
}

/// Whether the other end took the connection and dropped it, and so is there.
fn is_dropped(error: &std::io::Error) -> bool {
    use std::io::ErrorKind;
    matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted | ErrorKind::BrokenPipe)
}

fn say_hello(host: &Host, channel: &mut Channel, handle: &Handle) -> Result<Rails> {
    let rails = Rails::look(host)?;
    let said = channel.send(&Message::Hello(Hello {
        token: handle.token,
        name: host.name.clone(),
        chunk_bytes: rails.chunk_bytes(),
        qps_per_rail: handshake::qps_wanted(&host.config),
        tuner_hash: host.tuner_hash,
        rails: rails.adverts.clone(),
    }));
    if let Err(unsent) = said {
        // Whoever waits for the answer hears that the connection is closed.
        tracing::debug!("{unsent}");
    }
    Ok(rails)
}

/// A message from the peer, `None` while there is none.
pub(super) fn receive(channel: &mut Channel) -> Result<Option<Message>> {
    let received = channel.receive()?;
    understood(channel, received)
}

fn understood(channel: &Channel, received: Received) -> Result<Option<Message>> {
    match received {
        Received::Message(Message::Refuse(why)) => {
            Err(Error::Usage(format!("{} refused the connection: {why}", channel.peer())))
        }
        Received::Message(message) => Ok(Some(message)),
        Received::Nothing => Ok(None),
        Received::Unreachable(why) => Err(Error::Remote(why)),
        Received::Closed => {
            Err(Error::Remote(format!("{} closed the bootstrap connection during connection set-up", channel.peer())))
        }
    }
}

/// A message that has no place where the handshake stands.
pub(super) fn out_of_turn(channel: &Channel, message: &Message) -> Error {
    Error::Remote(format!("{} sent an unexpected {} message during connection set-up", channel.peer(), message.kind()))
}

impl Connected {
    fn from_offer(host: &Host, rails: &Rails, offer: Offer, traffic_class: Option<u8>) -> Result<Self> {
        let board = Region::new(BOARD_BYTES)?;
        let mut pairs = Vec::with_capacity(offer.pairs.len());
        let mut paired = Vec::with_capacity(offer.pairs.len());
        for pair in &offer.pairs {
            let place = usize::from(pair.connector_rail);
            let Some((rail, look)) = rails.usable.get(place) else {
                return Err(Error::Remote(format!(
                    "{} offered rail {place}, which this host does not have",
                    offer.name
                )));
            };
            paired.push(place);
            let route = Route {
                look,
                gid: pair.connector_gid,
                peer_gid: pair.acceptor_gid,
                mtu_bytes: pair.mtu_bytes,
                ends: &pair.qps,
                traffic_class,
            };
            let made = connect_lane(host, rail, pair, &route, &board).map_err(|error| error.to_string());
            let ends = [
                End { rail: rail.index as u8, attachment: rail.info.attachment },
                End { rail: pair.acceptor_rail, attachment: pair.acceptor },
            ];
            pairs.push(OfferedPair { index: rail.index, acceptor: pair.acceptor_name.clone(), ends, made });
        }
        let chunk_bytes = offer.chunk_bytes.min(rails.chunk_bytes());
        let left_out = handshake::unpaired(rails, &paired, Role::Sender);
        Ok(Self { peer: offer.name, chunk_bytes, traffic_class, board, pairs, left_out })
    }

    fn answer(&self) -> Ready {
        let answer = |pair: &OfferedPair| match &pair.made {
            Ok((lane, key)) => PairReady::Connected { board_rkey: key.rkey(), qps: lane.ends() },
            Err(why) => PairReady::Failed(why.clone()),
        };
        Ready { board_addr: self.board.addr(), pairs: self.pairs.iter().map(answer).collect() }
    }

    fn finish(self, host: &Arc<Host>, channel: Channel, go: Go) -> Result<SendComm> {
        let Self { peer, chunk_bytes, traffic_class, board, pairs, mut left_out } = self;
        if go.pairs.len() != pairs.len() {
            let (theirs, ours) = (go.pairs.len(), pairs.len());
            return Err(Error::Remote(format!("{peer} answered for {theirs} rails; {ours} were offered")));
        }
        let (mut lanes, mut keys, mut live, mut ways) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (mut lkeys, mut rkeys) = ([0; MAX_RAILS], [0; MAX_RAILS]);
        for (OfferedPair { index, acceptor, ends, made }, word) in pairs.into_iter().zip(go.pairs) {
            match (made, word) {
                (Ok((lane, key)), PairGo::Carries { board_rkey }) => {
                    live.push((index, format!("{} to {acceptor}", lane.rail.name())));
                    (lkeys[lanes.len() % MAX_RAILS], rkeys[lanes.len() % MAX_RAILS]) = (key.lkey(), board_rkey);
                    lanes.push(lane);
                    keys.push(key);
                    ways.push(ends);
                }
                (Ok(_), PairGo::LeftOut(why)) => left_out.push((index, why)),
                (Err(own), _) => left_out.push((index, own)),
            }
        }
        if lanes.is_empty() || lanes.len() > MAX_RAILS {
            let left_out = handshake::left_out_text(host, &left_out);
            return Err(Error::Remote(format!("no usable rail to {peer}: {left_out}")));
        }
        let striping = handshake::striping(host, &ways);
        handshake::report(host, &peer, Role::Sender, &live, &left_out);
        let ends = Arc::new(Ends { host: Arc::clone(host), peer: Arc::new(Peer::new(peer)) });
        let wards = lanes.iter().map(Ward::of).collect();
        let far = FarBoard { addr: go.board_addr, rkeys };
        let path = SendPath::new(lanes, Arc::clone(&board), keys, chunk_bytes, striping);
        let path = Arc::new(Owner::new(path));
        let board = Board { region: board, lkeys, far };
        let warden = Warden::new(Arc::clone(&ends), path.clone(), Role::Sender, traffic_class, board, wards);
        let watch = host.service.watch(channel, warden)?;
        host.opened(&ends.peer.name);
        Ok(SendComm::new(ends, watch, path))
    }
}

fn connect_lane(
    host: &Host,
    rail: &Arc<super::rail::Rail>,
    pair: &PairOffer,
    route: &Route<'_>,
    board: &Arc<Region>,
) -> Result<(Lane, Mr)> {
    let mut lane = Lane::open(rail, Role::Sender, pair.qps.len())?;
    lane.peer_rail.clone_from(&pair.acceptor_name);
    lane.connect(Role::Sender, &host.config, route)?;
    // Strict: the sender looks at these bytes while they arrive.
    let key = board.register(&rail.pd, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    Ok((lane, key))
}
