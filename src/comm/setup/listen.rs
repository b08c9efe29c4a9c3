//! The accepting side's handshake. Never waits: each call goes as far as it can.

use super::Setup;
use super::admission::Admission;
use super::finish::{Agreed, AgreedPair, finish};
use super::join::{self, Joining, NewRoute, Step as JoinStep};
use super::negotiate::{self, KnownRail, Rails, in_time, out_of_turn, receive};
use super::streams::{self, Gathering};
use crate::comm::channel::Channel;
use crate::comm::datapath::lane::{Lane, LaneWrite, Role};
use crate::comm::datapath::mailbox::Mailboxes;
use crate::comm::datapath::recv::RecvPath;
use crate::comm::datapath::test_write::{self, Tested};
use crate::comm::descriptors::waits_for_descriptors;
use crate::comm::endpoint::RecvComm;
use crate::comm::log::once::Subject;
use crate::comm::process::Process;
use crate::comm::rail::backoff::{PathId, Trial};
use crate::comm::rail::{Rail, interfaces, neighbours};
use crate::error::{Error, Result};
use crate::flow::pairing::{self, Pair};
use crate::flow::paths::{End, Paths};
use crate::verbs::{CompletionBuffer, Region};
use crate::wire::fields::RailAdvert;
use crate::wire::handle::{HANDLE_BYTES, Handle, TOKEN_BYTES};
use crate::wire::ids::RailId;
use crate::wire::mailbox::MAILBOX_BYTES;
use crate::wire::message::{Go, Hello, Message, Offer, Offered, PairGo, PairOffer, PairReady, Ready, Streams};
use std::net::TcpListener;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// A listener. Closed by dropping it.
pub struct ListenComm {
    setup: Arc<Setup>,
    state: Mutex<Listening>,
}

struct Listening {
    admission: Admission,
    waiting_since: Option<Instant>,
    /// The peer that has shown the token.
    accepting: Option<Box<Accepting>>,
}

/// A connection being made with a peer that has shown the token.
struct Accepting {
    channel: Channel,
    started: Instant,
    peer: String,
    stage: Stage,
}

enum Stage {
    /// It has shown the token, and waits for an offer.
    AwaitingOffer(Hello),
    AwaitingReady(OfferMade),
    Probing(Probing),
    /// No rail reaches it: its streams are waited for.
    Gathering(Gathering),
}

/// What HELLO is answered with.
enum Answer {
    Rails(OfferMade, Offer),
    Streams(Gathering, Streams),
}

/// Queue pairs offered, not connected.
struct OfferMade {
    rails: Rails,
    /// The peer's rails.
    theirs: Vec<RailAdvert>,
    chunk_bytes: u32,
    pairs: Vec<OpenedPair>,
    left_out: Vec<(RailId, String)>,
}

/// A pair that was offered.
struct OpenedPair {
    pair: Pair,
    /// Both ends, this side's first.
    ends: [End; 2],
    peer_rail: String,
    queue_count: u8,
    /// This side's queue pairs; or why the pair is for later.
    opened: std::result::Result<Lane, String>,
}

/// Queue pairs that are being connected and tested.
struct Probing {
    chunk_bytes: u32,
    mailboxes: Mailboxes,
    /// The peer's rails.
    theirs: Vec<RailAdvert>,
    pairs: Vec<ProbedPair>,
    left_out: Vec<(RailId, String)>,
}

struct ProbedPair {
    rail: Arc<Rail>,
    pair: Pair,
    /// Both ends, this side's first.
    ends: [End; 2],
    peer_rail: String,
    queue_count: u8,
    state: Probed,
}

enum Probed {
    /// Its queue pairs are being connected.
    Joining(Joining),
    /// A write is under way on each.
    Waiting(Tried),
    Carries(Lane),
    NotYet(String),
    /// Its queue pairs are connected, and a test write was not acknowledged.
    Silent(String),
}

struct Tried {
    lane: Lane,
    probe: LaneWrite,
    /// When to write once more: a lost packet is sent again at once when a later one arrives, while the queue pair's
    /// own time-out (4 s and more at NCCL's default) is longer than the trial.
    again: Option<Instant>,
    /// A write that is not acknowledged by then gets lost.
    until: Instant,
    path: PathId,
    /// The right to test the path while other connections wait.
    _trial: Option<Trial>,
}

/// Opens a listener on the interface that the settings choose; with it, the handle for the peer.
///
/// # Errors
/// [`Error::Missing`] when no interface is admitted; [`Error::Os`].
pub fn listen(setup: &Arc<Setup>) -> Result<(ListenComm, [u8; HANDLE_BYTES])> {
    let config = &setup.process.config;
    let address =
        interfaces::bootstrap_address(&interfaces::addresses()?, &config.socket_interfaces, config.socket_family)?;
    let trouble = |e: std::io::Error| Error::os(format!("cannot listen on {address}"), &e);
    let listener = TcpListener::bind(address).map_err(trouble)?;
    listener.set_nonblocking(true).map_err(trouble)?;
    let mut token = [0; TOKEN_BYTES];
    getrandom::fill(&mut token).map_err(|e| Error::Missing(format!("cannot get random numbers: {e}")))?;
    let handle = Handle { address: listener.local_addr().map_err(trouble)?, token };
    let listening = Listening { admission: Admission::new(listener, token), waiting_since: None, accepting: None };
    Ok((ListenComm { setup: Arc::clone(setup), state: Mutex::new(listening) }, handle.encode()))
}

impl ListenComm {
    /// Goes on with the handshakes of this listener; a connection when one is complete.
    ///
    /// # Errors
    /// [`Error::Usage`] when no rail is in common with the peer; [`Error::Network`], [`Error::PeerGone`], [`Error::Protocol`] or
    /// [`Error::TimedOut`] when the peer fails in the middle of its handshake or none comes in time.
    pub fn accept(&self) -> Result<Option<RecvComm>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let Listening { admission, waiting_since, accepting } = &mut *state;
        let since = *waiting_since.get_or_insert_with(Instant::now);
        if accepting.as_ref().is_some_and(|accepting| matches!(accepting.stage, Stage::AwaitingOffer(_))) {
            // It waits for descriptors: unauthenticated connections shall not have them.
            admission.clear();
        } else if let Some(Stage::Gathering(gathering)) = accepting.as_mut().map(|accepting| &mut accepting.stage) {
            gathering.look(admission, &self.setup.descriptors);
        } else if let Some((channel, hello)) = admission.look(&self.setup.descriptors) {
            *accepting = Some(Box::new(Accepting::begin(channel, hello)));
        }
        match accepting.take() {
            Some(peer) => match peer.step(&self.setup)? {
                Step::Done(comm) => {
                    *waiting_since = None;
                    return Ok(Some(*comm));
                }
                Step::Waiting(peer) => *accepting = Some(peer),
            },
            None => {
                let short = admission.shortage().map_or_else(String::new, |why| format!(" ({why})"));
                in_time(&self.setup.process, since, &format!("the peer to connect{short}"))?;
            }
        }
        Ok(None)
    }
}

enum Step {
    Done(Box<RecvComm>),
    Waiting(Box<Accepting>),
}

impl Accepting {
    fn begin(channel: Channel, hello: Hello) -> Self {
        Self { channel, started: Instant::now(), peer: hello.name.clone(), stage: Stage::AwaitingOffer(hello) }
    }

    fn step(mut self, setup: &Setup) -> Result<Step> {
        let process = &*setup.process;
        if let Stage::AwaitingOffer(hello) = self.stage {
            self.stage = answer(setup, &mut self.channel, hello, self.started)?;
            if let Stage::AwaitingOffer(_) = self.stage {
                return Ok(Step::Waiting(Box::new(self)));
            }
        }
        if let Stage::AwaitingReady(offered) = self.stage {
            match receive(&mut self.channel)? {
                Some(Message::Ready(ready)) => {
                    self.stage = Stage::Probing(offered.connect(process, &self.peer, ready)?);
                }
                Some(other) => return Err(out_of_turn(&self.channel, &other)),
                None => {
                    in_time(process, self.started, &format!("{} to connect its queue pairs", self.peer))?;
                    self.stage = Stage::AwaitingReady(offered);
                    return Ok(Step::Waiting(Box::new(self)));
                }
            }
        }
        if let Stage::Gathering(mut gathering) = self.stage {
            if let Some(other) = receive(&mut self.channel)? {
                return Err(out_of_turn(&self.channel, &other));
            }
            if gathering.is_complete(&mut self.channel)? {
                return gathering.finish(setup, self.channel, self.peer).map(|comm| Step::Done(Box::new(comm)));
            }
            in_time(process, self.started, &format!("{} to open its TCP streams", self.peer))?;
            self.stage = Stage::Gathering(gathering);
            return Ok(Step::Waiting(Box::new(self)));
        }
        let Stage::Probing(mut probing) = self.stage else {
            return Err(Error::Internal("connection set-up is in no stage".to_owned()));
        };
        // A peer that has gone acknowledges nothing, which says nothing of the paths to it.
        if let Some(other) = receive(&mut self.channel)? {
            return Err(out_of_turn(&self.channel, &other));
        }
        if probing.look(&setup.process) {
            return probing.finish(setup, self.channel, self.peer).map(|comm| Step::Done(Box::new(comm)));
        }
        self.stage = Stage::Probing(probing);
        Ok(Step::Waiting(Box::new(self)))
    }
}

/// Answers a HELLO; the stage after that, or the same while there are no descriptors for what that takes.
fn answer(setup: &Setup, channel: &mut Channel, hello: Hello, started: Instant) -> Result<Stage> {
    let process = &*setup.process;
    let mut error = match Answer::to(process, &hello) {
        Ok(Answer::Rails(offered, offer)) => {
            return channel.send(&Message::Offer(offer)).map(|()| Stage::AwaitingReady(offered));
        }
        Ok(Answer::Streams(gathering, streams)) => {
            return channel.send(&Message::Streams(streams)).map(|()| Stage::Gathering(gathering));
        }
        Err(error) => error,
    };
    let peer = &hello.name;
    if let Some(why) = waits_for_descriptors(&error) {
        setup.descriptors.tell(&format!("cannot answer {peer}"), &why);
        match in_time(process, started, &format!("resources to answer {peer} ({why})")) {
            Ok(()) => return Ok(Stage::AwaitingOffer(hello)),
            Err(late) => error = late,
        }
    }
    // The peer's own error tells its user; if it cannot be told, ours stands.
    if let Err(unsent) = channel.send(&Message::Refuse(error.to_string())) {
        tracing::debug!("could not send the refusal to {peer}: {unsent}");
    }
    Err(error)
}

impl Answer {
    fn to(process: &Process, hello: &Hello) -> Result<Self> {
        negotiate::check_ring_tcp(process, hello)?;
        negotiate::check_tuner(process, hello)?;
        let rails = Rails::look(process)?;
        let pairs = pairing::pair(&hello.rails, &rails.adverts);
        if pairs.is_empty() {
            streams::allow(process, &rails, hello)?;
            return Gathering::new(process).map(|(gathering, streams)| Self::Streams(gathering, streams));
        }
        OfferMade::new(process, rails, pairs, hello).map(|(made, offer)| Self::Rails(made, offer))
    }
}

impl OfferMade {
    fn new(process: &Process, rails: Rails, pairs: Vec<Pair>, hello: &Hello) -> Result<(Self, Offer)> {
        let ends: Vec<[End; 2]> =
            pairs.iter().map(|pair| rails.ends(pair.acceptor, &hello.rails, pair.connector)).collect();
        let queue_pairs =
            negotiate::queue_pairs(negotiate::qps_wanted(&process.config).max(hello.qps_per_rail), &Paths::new(&ends));
        let chunk_bytes = rails.chunk_bytes().min(hello.chunk_bytes);
        let paired: Vec<usize> = pairs.iter().map(|pair| pair.acceptor).collect();
        let mut left_out = negotiate::unpaired(&rails, &paired, Role::Receiver);
        let (mut offers, mut all) = (Vec::new(), Vec::new());
        let dead = |pair: &Pair| negotiate::dead(process, &rails.known[pair.acceptor].rail, pair.connector_gid);
        let all_dead = pairs.iter().filter(|pair| pair.is_usable).all(|pair| dead(pair).is_some());
        for ((pair, ends), queue_count) in pairs.into_iter().zip(ends).zip(queue_pairs) {
            let known = &rails.known[pair.acceptor];
            let (rail, theirs) = (&known.rail, &hello.rails[pair.connector]);
            let opened = open(known, theirs, dead(&pair).filter(|_| !all_dead), queue_count)?;
            if opened.is_ok() {
                warn_of_mtu(process, rail, theirs, &rails.adverts[pair.acceptor], &hello.name);
            }
            offers.push(PairOffer {
                connector_rail: pair.connector as u8,
                connector_gid: pair.connector_gid,
                acceptor_rail: rail.id,
                acceptor: rail.info.attachment,
                acceptor_name: rail.name(),
                acceptor_gid: pair.acceptor_gid,
                mtu_bytes: pair.mtu_bytes,
                queue_pairs: opened.as_ref().map_or(Offered::Later(queue_count), |lane| Offered::Now(lane.ends())),
            });
            let peer_rail = theirs.name.clone();
            all.push(OpenedPair { pair, ends, peer_rail, queue_count, opened });
        }
        if all.iter().all(|pair| pair.opened.is_err()) {
            let why = |pair: &OpenedPair| Some((pair.ends[0].rail, pair.opened.as_ref().err()?.clone()));
            left_out.extend(all.iter().filter_map(why));
            return Err(Error::Missing(format!(
                "cannot create queue pairs for {}: {}",
                hello.name,
                negotiate::left_out_text(process, &left_out)
            )));
        }
        let offer = Offer { name: process.name.clone(), chunk_bytes, pairs: offers };
        let theirs = hello.rails.clone();
        Ok((Self { rails, theirs, chunk_bytes, pairs: all, left_out }, offer))
    }

    /// Begins to connect this side's queue pairs; then a whole packet is written on each of them to see whether it carries.
    fn connect(self, process: &Process, peer: &str, ready: Ready) -> Result<Probing> {
        if ready.pairs.len() != self.pairs.len() {
            return Err(Error::Protocol(format!(
                "{peer} answered for {} rails; {} were offered",
                ready.pairs.len(),
                self.pairs.len()
            )));
        }
        let region = Region::new(MAILBOX_BYTES)?;
        let mut pairs = Vec::with_capacity(self.pairs.len());
        let is_dead = |OpenedPair { pair, opened, .. }: &OpenedPair| {
            let lane = opened.as_ref().ok()?;
            Some(negotiate::dead(process, &lane.rail, pair.connector_gid).is_some())
        };
        let connected =
            self.pairs.iter().zip(&ready.pairs).filter(|(_, answer)| matches!(answer, PairReady::Connected { .. }));
        let all_dead = connected.filter_map(|(pair, _)| is_dead(pair)).all(|is_dead| is_dead);
        for (OpenedPair { pair, ends, peer_rail, queue_count, opened }, answer) in
            self.pairs.into_iter().zip(ready.pairs)
        {
            let KnownRail { rail, look, .. } = &self.rails.known[pair.acceptor];
            let state = match (opened, answer) {
                (Err(why), _) => Probed::NotYet(why),
                (Ok(_), PairReady::Failed(why)) => Probed::NotYet(format!("{peer} cannot use it: {why}")),
                (Ok(mut lane), PairReady::Connected { mailbox_rkey, qps }) => {
                    let route = NewRoute {
                        look: look.clone(),
                        gid: pair.acceptor_gid,
                        peer_gid: pair.connector_gid,
                        mtu_bytes: pair.mtu_bytes,
                        ends: qps,
                        traffic_class: None,
                    };
                    match lane.register_mailbox(&region) {
                        Ok(()) => {
                            lane.peer_mailbox_rkey = mailbox_rkey;
                            Probed::Joining(Joining::new(process, Role::Receiver, lane, route, all_dead))
                        }
                        Err(error) => Probed::NotYet(error.to_string()),
                    }
                }
            };
            pairs.push(ProbedPair { rail: Arc::clone(rail), pair, ends, peer_rail, queue_count, state });
        }
        let (chunk_bytes, theirs, left_out) = (self.chunk_bytes, self.theirs, self.left_out);
        let mailboxes = Mailboxes { region, peer_addr: ready.mailbox_addr };
        Ok(Probing { chunk_bytes, mailboxes, theirs, pairs, left_out })
    }
}

/// Queue pairs for a rail, with those of the peer's to come; or why there can be none now.
fn open(
    known: &KnownRail,
    theirs: &RailAdvert,
    dead: Option<String>,
    queue_count: u8,
) -> Result<std::result::Result<Lane, String>> {
    if let Some(problem) = &known.problem {
        return Ok(Err(problem.clone()));
    }
    if !theirs.is_usable {
        return Ok(Err(format!("the peer cannot use its rail {} now", theirs.name)));
    }
    if let Some(why) = dead {
        return Ok(Err(why));
    }
    match Lane::open(&known.rail, Role::Receiver, usize::from(queue_count)) {
        Ok(mut lane) => {
            lane.peer_rail.clone_from(&theirs.name);
            Ok(Ok(lane))
        }
        Err(error) if error.is_shortage() => Err(error),
        Err(error) => Ok(Err(error.to_string())),
    }
}

/// Both ends' ports should have one MTU: said here, where both are known.
fn warn_of_mtu(process: &Process, rail: &Rail, theirs: &RailAdvert, ours: &RailAdvert, peer: &str) {
    let (here, there) = (ours.mtu_bytes, theirs.mtu_bytes);
    if here != there && process.log.is_first(peer, Subject::PathMtu(rail.id)) {
        let (rail, their_rail) = (rail.name(), &theirs.name);
        tracing::warn!(
            "rail {rail} to {peer}: path MTU {here} here, {there} on peer rail {their_rail}; using the smaller: set the same MTU on both ports"
        );
    }
}

impl Tried {
    /// Writes a packet on each queue pair.
    fn start(process: &Process, mut lane: Lane, path: PathId, probe: LaneWrite, trial: Option<Trial>) -> Result<Self> {
        lane.write_on_each(&probe)?;
        let (now, limit) = (Instant::now(), process.config.probe_timeout);
        Ok(Self { lane, probe, again: Some(now + limit / 3), until: now + limit, path, _trial: trial })
    }
}

impl Probing {
    /// Goes on with what is being connected and tested; whether all is decided.
    fn look(&mut self, process: &Arc<Process>) -> bool {
        let mut buffer = CompletionBuffer::new();
        for pair in &mut self.pairs {
            let before = std::mem::replace(&mut pair.state, Probed::NotYet(String::new()));
            let after = match before {
                Probed::Joining(joining) => match joining.step(process) {
                    JoinStep::Waiting(joining) => Probed::Joining(joining),
                    JoinStep::LeftOut(why) => Probed::NotYet(why),
                    JoinStep::Joined(lane, trial) => {
                        let probe = self.mailboxes.probe_write(lane.mailbox_keys(), pair.pair.mtu_bytes);
                        let path = join::path(&lane, pair.pair.connector_gid);
                        Tried::start(process, lane, path, probe, trial)
                            .map_or_else(|error| Probed::NotYet(error.to_string()), Probed::Waiting)
                    }
                },
                other => other,
            };
            pair.state = match after {
                Probed::Waiting(tried) => tried.look(process, &mut buffer),
                other => other,
            };
        }
        !self.pairs.iter().any(|pair| matches!(pair.state, Probed::Joining(_) | Probed::Waiting(_)))
    }

    fn finish(self, setup: &Setup, mut channel: Channel, peer: String) -> Result<RecvComm> {
        let Self { chunk_bytes, mailboxes, theirs, pairs: probed, left_out } = self;
        let Mailboxes { region, peer_addr } = mailboxes;
        let (mut pairs, mut words) = (Vec::new(), Vec::new());
        for ProbedPair { rail, pair: Pair { connector, connector_gid, .. }, ends, peer_rail, queue_count, state } in
            probed
        {
            let lane = match state {
                Probed::Carries(lane) => Ok(lane),
                Probed::NotYet(why) => Err(why),
                Probed::Silent(why) => {
                    let netdev = rail.info.netdev.as_deref();
                    Err(why + &neighbours::sent_to(netdev, connector_gid, &theirs, connector, &peer))
                }
                Probed::Joining(_) | Probed::Waiting(_) => {
                    return Err(Error::Internal("a rail was neither tested nor left out".to_owned()));
                }
            };
            words.push(match &lane {
                Ok(lane) => PairGo::Carries { mailbox_rkey: lane.mailbox_rkey() },
                Err(why) => PairGo::NotYet(why.clone()),
            });
            pairs.push(AgreedPair { rail, ends, peer_rail, queue_count, lane });
        }
        if pairs.iter().all(|pair| pair.lane.is_err()) {
            let error = negotiate::no_usable_rail(&setup.process, &peer, &AgreedPair::not_yet(&pairs, left_out));
            channel.send(&Message::Refuse(error.to_string()))?;
            return Err(error);
        }
        let mailbox_addr = region.addr();
        let (role, traffic_class) = (Role::Receiver, None);
        let agreed = Agreed { role, peer, traffic_class, chunk_bytes, region, peer_addr, pairs, left_out };
        let comm = finish(setup, channel, agreed, RecvPath::new, |channel, standing| {
            let (redialling, redial) = standing.invite(channel, &setup.descriptors);
            channel.send(&Message::Go(Go { mailbox_addr, pairs: words, redial }))?;
            Ok(redialling)
        })?;
        Ok(RecvComm::Rails(Box::new(comm)))
    }
}

impl Tried {
    fn look(mut self, process: &Process, buffer: &mut CompletionBuffer) -> Probed {
        let now = Instant::now();
        let silent = match test_write::look(&mut self.lane, buffer) {
            Tested::Carries => {
                process.backoff.carried(self.path, now);
                return Probed::Carries(self.lane);
            }
            Tested::Failed(why) => return Probed::NotYet(why),
            Tested::Silent(why) => why,
            Tested::UnderWay if now < self.until => {
                if self.again.is_some_and(|again| now >= again) {
                    self.again = None;
                    if let Err(error) = self.lane.write_on_each(&self.probe) {
                        return Probed::NotYet(error.to_string());
                    }
                }
                return Probed::Waiting(self);
            }
            Tested::UnderWay => "test write not acknowledged within NCCL_SPARK_PROBE_TIMEOUT_MS".to_owned(),
        };
        process.backoff.silent(self.path, &silent, now);
        Probed::Silent(silent)
    }
}
