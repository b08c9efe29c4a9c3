//! The connecting side's handshake. Never waits: each call goes as far as it can.

use super::Host;
use super::channel::{Channel, Received};
use super::handshake::{self, Rails, in_time};
use super::lane::{Lane, Role, Route};
use super::network;
use super::peer::Peer;
use super::send::{SendComm, SendPath};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::flow::ways::End;
use crate::verbs::{Access, Mr, Region};
use crate::wire::MAX_RAILS;
use crate::wire::cts::{PROBE_BYTES, RING_WORDS};
use crate::wire::handle::{HANDLE_BYTES, Handle};
use crate::wire::message::{Go, Hello, Message, Offer, PairOffer, PairReady, Ready};
use std::sync::Arc;
use std::time::Instant;

/// A connection being made.
pub struct Connecting {
    channel: Channel,
    started: Instant,
    traffic_class: Option<u8>,
    handle: Handle,
    stage: Stage,
}

enum Stage {
    Dialling,
    AwaitingOffer(Rails),
    AwaitingGo(Box<Connected>),
}

/// Queue pairs connected on this side.
struct Connected {
    peer: String,
    chunk_bytes: u32,
    ring: Arc<Region>,
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
    /// The connected lane with its key of the ring, or why this side cannot use it.
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
        return Err(Error::Remote("this connection was given up before: it had failed, or taken too long".to_owned()));
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
                Stage::Dialling => match self.channel.connected() {
                    Ok(true) => {
                        self.stage = Stage::AwaitingOffer(say_hello(host, &mut self.channel, &self.handle)?);
                        continue;
                    }
                    Ok(false) => "the TCP connection",
                    Err(error) => {
                        let address = self.handle.address;
                        return Err(Error::Remote(format!("the peer at {address} cannot be reached: {error}")));
                    }
                },
                Stage::AwaitingOffer(rails) => match receive(&mut self.channel)? {
                    Some(Message::Offer(offer)) => {
                        let connected = Connected::from_offer(host, &rails, offer, self.traffic_class)?;
                        self.channel.send(&Message::Ready(connected.answer()))?;
                        self.stage = Stage::AwaitingGo(Box::new(connected));
                        continue;
                    }
                    Some(other) => return Err(out_of_turn(&self.channel, &other)),
                    None => {
                        self.stage = Stage::AwaitingOffer(rails);
                        "the offer"
                    }
                },
                Stage::AwaitingGo(connected) => match receive(&mut self.channel)? {
                    Some(Message::Go(go)) => {
                        return connected.finish(host, self.channel, &go).map(|comm| Step::Done(Box::new(comm)));
                    }
                    Some(other) => return Err(out_of_turn(&self.channel, &other)),
                    None => {
                        self.stage = Stage::AwaitingGo(connected);
                        "the trial of the rails"
                    }
                },
            };
            in_time(host, self.started, &format!("{waiting_for} of the peer at {}", self.handle.address))?;
            return Ok(Step::Waiting(self));
        }
    }
}

fn say_hello(host: &Host, channel: &mut Channel, handle: &Handle) -> Result<Rails> {
    let rails = Rails::look(host)?;
    channel.send(&Message::Hello(Hello {
        token: handle.token,
        name: host.name.clone(),
        chunk_bytes: rails.chunk_bytes(),
        qps_per_rail: handshake::qps_wanted(&host.config),
        rails: rails.adverts.clone(),
    }))?;
    Ok(rails)
}

/// A message from the peer, `None` while there is none.
pub(super) fn receive(channel: &mut Channel) -> Result<Option<Message>> {
    match channel.receive()? {
        Received::Message(Message::Refuse(why)) => Err(Error::Usage(format!("{} refuses: {why}", channel.peer()))),
        Received::Message(message) => Ok(Some(message)),
        Received::Nothing => Ok(None),
        Received::Closed => {
            Err(Error::Remote(format!("{} closed the bootstrap connection during the handshake", channel.peer())))
        }
    }
}

/// A message that has no place where the handshake stands.
pub(super) fn out_of_turn(channel: &Channel, message: &Message) -> Error {
    Error::Remote(format!("{} sent a {} out of turn", channel.peer(), message.kind()))
}

impl Connected {
    fn from_offer(host: &Host, rails: &Rails, offer: Offer, traffic_class: Option<u8>) -> Result<Self> {
        let ring = Region::new(RING_WORDS * 8 + PROBE_BYTES)?;
        let mut pairs = Vec::with_capacity(offer.pairs.len());
        let mut paired = Vec::with_capacity(offer.pairs.len());
        for pair in &offer.pairs {
            let place = usize::from(pair.connector_rail);
            let Some((rail, look)) = rails.usable.get(place) else {
                return Err(Error::Remote(format!(
                    "{} offers a rail {place} that this side does not have",
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
            let made = connect_lane(host, rail, pair, &route, &ring).map_err(|error| error.to_string());
            let ends = [
                End { rail: rail.index as u8, attachment: rail.info.attachment },
                End { rail: pair.acceptor_rail, attachment: pair.acceptor },
            ];
            pairs.push(OfferedPair { index: rail.index, acceptor: pair.acceptor_name.clone(), ends, made });
        }
        let chunk_bytes = offer.chunk_bytes.min(rails.chunk_bytes());
        Ok(Self { peer: offer.name, chunk_bytes, ring, pairs, left_out: handshake::unpaired(rails, &paired) })
    }

    fn answer(&self) -> Ready {
        let answer = |pair: &OfferedPair| match &pair.made {
            Ok((lane, ring_key)) => PairReady::Connected { ring_rkey: ring_key.rkey(), qps: lane.ends() },
            Err(why) => PairReady::Failed(why.clone()),
        };
        Ready { ring_addr: self.ring.addr(), pairs: self.pairs.iter().map(answer).collect() }
    }

    fn finish(self, host: &Arc<Host>, channel: Channel, go: &Go) -> Result<SendComm> {
        if go.left_out.len() != self.pairs.len() {
            return Err(Error::Remote(format!(
                "{} answers for {} rails, not {}",
                self.peer,
                go.left_out.len(),
                self.pairs.len()
            )));
        }
        let (mut lanes, mut keys, mut live, mut left_out) = (Vec::new(), Vec::new(), Vec::new(), self.left_out);
        let mut ways = Vec::new();
        for (OfferedPair { index, acceptor, ends, made }, why) in self.pairs.into_iter().zip(&go.left_out) {
            match (made, why.is_empty()) {
                (Ok((lane, key)), true) => {
                    live.push((index, format!("{} to {acceptor}", lane.rail.name())));
                    lanes.push(lane);
                    keys.push(key);
                    ways.push(ends);
                }
                (Ok(_), false) => left_out.push((index, why.clone())),
                (Err(own), _) => left_out.push((index, own)),
            }
        }
        if lanes.is_empty() || lanes.len() > MAX_RAILS {
            return Err(Error::Remote(format!(
                "{}: no rail carries: {}",
                self.peer,
                handshake::left_out_text(host, &left_out)
            )));
        }
        let striping = handshake::striping(host, &ways);
        handshake::report(host, &self.peer, &live, &left_out);
        let peer = Arc::new(Peer::new(self.peer));
        let watch = host.service.watch(channel, Arc::clone(&peer))?;
        host.opened();
        let path = SendPath::new(lanes, self.ring, keys, self.chunk_bytes, striping);
        Ok(SendComm::new(Arc::clone(host), peer, watch, path))
    }
}

fn connect_lane(
    host: &Host,
    rail: &Arc<super::rail::Rail>,
    pair: &PairOffer,
    route: &Route<'_>,
    ring: &Arc<Region>,
) -> Result<(Lane, Mr)> {
    let mut lane = Lane::open(rail, Role::Sender, pair.qps.len())?;
    lane.peer_rail.clone_from(&pair.acceptor_name);
    lane.connect(Role::Sender, &host.config, route)?;
    // Strict: the sender looks at these bytes while they arrive.
    let ring_key = ring.register(&rail.pd, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    Ok((lane, ring_key))
}
