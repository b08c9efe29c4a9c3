//! The accepting side's handshake. Never blocks: each call goes as far as it can.

use super::Setup;
use super::admission::Admission;
use super::finish::{Agreed, AgreedPair, AwaitingRail, finish};
use super::join::{JoinStep, Joining, NewRoute};
use super::negotiate::{self, KnownRail, LocalRails, in_time, out_of_turn, receive};
use super::pending::Pending;
use super::streams::{self, Gathering};
use crate::clock;
use crate::comm::channel::Channel;
use crate::comm::datapath::lane::{Lane, Role};
use crate::comm::datapath::mailbox::Mailboxes;
use crate::comm::datapath::recv::RecvPath;
use crate::comm::datapath::test_write::{LaneTest, TestResult};
use crate::comm::descriptors::waits_for_descriptors;
use crate::comm::endpoint::RecvComm;
use crate::comm::log::once::Subject;
use crate::comm::operation::CurrentOperation;
use crate::comm::process::Process;
use crate::comm::rail::backoff::Trial;
use crate::comm::rail::{Rail, interfaces, neighbours};
use crate::comm::threads::lock;
use host::error::{Call, Error, Internal, Missing, Result};
use proto::backoff::PathId;
use proto::device::Presence;
use proto::flow::pairing::{self, Pair};
use proto::flow::paths::{End, Paths};
use proto::flow::recovery::PathChoice;
use proto::time::Instant;
use proto::wire::fields::{Priority, RailAdvert};
use proto::wire::handle::{HANDLE_BYTES, Handle, TOKEN_BYTES};
use proto::wire::ids::RailId;
use proto::wire::mailbox::MAILBOX_BYTES;
use proto::wire::message::{
    Go, Hello, Message, NotYet, Offer, Offered, PairGo, PairOffer, PairReady, Ready, Streams,
};
use std::net::TcpListener;
use std::sync::{Arc, Mutex, OnceLock};
use verbs::{CompletionBuffer, Region};

/// Text added to the reason why a routed path does not work. On a Spark between the two ends, the
/// NIC consumes RoCE packets itself, so the kernel never gets the packets and cannot forward them.
const ROUTED: &str = "; this path is routed: each host on it must forward RoCE (UDP port 4791) both ways, a Spark in its NIC";

/// A listener. Dropping it closes it.
pub struct ListenComm {
    setup: Arc<Setup>,
    state: Mutex<Listening>,
    /// The connection that is being set up, if any.
    pending: Pending<AcceptProgress>,
    operation: OnceLock<&'static CurrentOperation>,
}

struct Listening {
    admission: Admission,
    waiting_since: Option<Instant>,
    /// Ticket of the connection that is being set up.
    ticket: Option<u64>,
}

enum AcceptProgress {
    /// No peer has sent the token yet.
    Idle,
    Handshaking(Box<Accepting>),
    AwaitingRail(AwaitingRail<RecvPath>),
}

struct Accepting {
    channel: Channel,
    started: Instant,
    peer: String,
    stage: AcceptStage,
}

enum AcceptStage {
    AwaitingOffer(Hello),
    AwaitingReady(OfferMade),
    Probing(Probing),
    /// No rail reaches the peer, so its TCP streams are awaited.
    Gathering(Gathering),
}

enum HelloAnswer {
    Rails(OfferMade, Offer),
    Streams(Gathering, Streams),
}

struct OfferMade {
    rails: LocalRails,
    theirs: Vec<RailAdvert>,
    chunk_bytes: u32,
    priority: Priority,
    pairs: Vec<OpenedPair>,
    left_out: Vec<(RailId, String)>,
}

struct OpenedPair {
    pair: Pair,
    /// Both ends, this side's first.
    ends: [End; 2],
    peer_rail: String,
    queue_count: u8,
    /// This side's queue pairs, or the reason why the pair is left for later.
    opened: std::result::Result<Lane, NotYet>,
}

struct Probing {
    chunk_bytes: u32,
    priority: Priority,
    mailboxes: Mailboxes,
    theirs: Vec<RailAdvert>,
    pairs: Vec<ProbedPair>,
    left_out: Vec<(RailId, String)>,
}

struct ProbedPair {
    rail: Arc<Rail>,
    pair: Pair,
    ends: [End; 2],
    peer_rail: String,
    queue_count: u8,
    state: Probed,
}

enum Probed {
    Joining(Joining),
    Testing(LaneTest),
    Carries(Lane),
    NotYet(NotYet),
}

/// Opens a listener on the interface that the settings choose. Also returns a handle for the peer.
///
/// # Errors
/// [`Error::Missing`] if the settings admit no interface; [`Error::Os`] if a system call fails.
pub fn listen(setup: &Arc<Setup>) -> Result<(ListenComm, [u8; HANDLE_BYTES])> {
    let config = &setup.process.config.setup;
    let address = interfaces::bootstrap_address(&interfaces::addresses()?, config)?;
    let trouble = |e: std::io::Error| Error::os(Call::Listen(address), &e);
    let listener = TcpListener::bind(address).map_err(trouble)?;
    listener.set_nonblocking(true).map_err(trouble)?;
    let mut token = [0; TOKEN_BYTES];
    getrandom::fill(&mut token)?;
    let handle = Handle {
        address: listener.local_addr().map_err(trouble)?,
        token,
    };
    let listening = Listening {
        admission: Admission::new(listener, token),
        waiting_since: None,
        ticket: None,
    };
    let state = Mutex::new(listening);
    let pending = Pending::new(AcceptProgress::peer);
    Ok((
        ListenComm {
            setup: Arc::clone(setup),
            state,
            pending,
            operation: OnceLock::new(),
        },
        handle.encode(),
    ))
}

impl ListenComm {
    /// Continues the handshake of this listener. Returns the connection once it has its first rail.
    ///
    /// # Errors
    /// [`Error::Usage`] if no rail is in common with the peer; [`Error::Network`] if none works
    /// in time; [`Error::Network`], [`Error::PeerGone`], [`Error::Protocol`] or [`Error::TimedOut`]
    /// if the peer fails during its handshake or no peer connects in time.
    pub fn accept(&self) -> Result<Option<RecvComm>> {
        let mut state = lock(&self.state);
        let Listening {
            admission,
            waiting_since,
            ticket,
        } = &mut *state;
        let since = *waiting_since.get_or_insert_with(clock::now);
        let mut progress = match ticket.take() {
            Some(ticket) => self.pending.take(ticket)?,
            None => AcceptProgress::Idle,
        };
        let stage = match &mut progress {
            AcceptProgress::Handshaking(peer) => Some(&mut peer.stage),
            AcceptProgress::Idle | AcceptProgress::AwaitingRail(_) => None,
        };
        match stage {
            // The handshake lacks file descriptors, so unauthenticated connections are dropped.
            Some(AcceptStage::AwaitingOffer(_)) => admission.clear(),
            Some(AcceptStage::Gathering(gathering)) => {
                gathering.poll(admission, &self.setup.descriptors)
            }
            _ => {
                if let Some((channel, hello)) = admission.poll(&self.setup.descriptors) {
                    progress =
                        AcceptProgress::Handshaking(Box::new(Accepting::begin(channel, hello)));
                }
            }
        }
        match progress.step(&self.setup)? {
            ProgressStep::Done(comm) => {
                *waiting_since = None;
                if let Some(operation) = self.operation.get() {
                    comm.belongs_to(operation);
                }
                Ok(Some(*comm))
            }
            ProgressStep::Waiting(AcceptProgress::Idle) => {
                let short = admission
                    .shortage()
                    .map_or_else(String::new, |why| format!(" ({why})"));
                in_time(
                    &self.setup.process,
                    since,
                    &format!("the peer to connect{short}"),
                )
                .map(|()| None)
            }
            ProgressStep::Waiting(progress) => {
                let kept = *ticket.insert(self.pending.ticket());
                self.pending.keep(&self.setup.service, kept, progress);
                Ok(None)
            }
        }
    }

    /// Names NCCL's operation on the communicator in messages about the listener's connections.
    pub fn belongs_to(&self, operation: &'static CurrentOperation) {
        self.operation.get_or_init(|| operation);
    }

    /// Gives up a connection that NCCL has abandoned at time `now`, as the service thread does.
    pub fn give_up_abandoned(&self, now: Instant) {
        self.pending.give_up_abandoned(now);
    }
}

enum ProgressStep {
    Done(Box<RecvComm>),
    Waiting(AcceptProgress),
}

impl AcceptProgress {
    fn step(self, setup: &Setup) -> Result<ProgressStep> {
        let mut awaiting = match self {
            Self::Idle => return Ok(ProgressStep::Waiting(self)),
            Self::AwaitingRail(awaiting) => awaiting,
            Self::Handshaking(peer) => match peer.step(setup)? {
                AcceptStep::Waiting(peer) => {
                    return Ok(ProgressStep::Waiting(Self::Handshaking(peer)));
                }
                AcceptStep::Streams(comm) => return Ok(ProgressStep::Done(comm)),
                AcceptStep::Rails(awaiting) => awaiting,
            },
        };
        Ok(match awaiting.step()? {
            Some(comm) => ProgressStep::Done(Box::new(RecvComm::Rails(Box::new(comm)))),
            None => ProgressStep::Waiting(Self::AwaitingRail(awaiting)),
        })
    }

    fn peer(&self) -> String {
        match self {
            Self::Idle => String::new(),
            Self::Handshaking(peer) => peer.peer.clone(),
            Self::AwaitingRail(awaiting) => awaiting.peer(),
        }
    }
}

enum AcceptStep {
    Waiting(Box<Accepting>),
    Rails(AwaitingRail<RecvPath>),
    Streams(Box<RecvComm>),
}

impl Accepting {
    fn begin(mut channel: Channel, hello: Hello) -> Self {
        channel.name_peer(&hello.name);
        Self {
            channel,
            started: clock::now(),
            peer: hello.name.clone(),
            stage: AcceptStage::AwaitingOffer(hello),
        }
    }

    fn step(mut self, setup: &Setup) -> Result<AcceptStep> {
        let process = &*setup.process;
        if let AcceptStage::AwaitingOffer(hello) = self.stage {
            self.stage = answer(setup, &mut self.channel, hello, self.started)?;
            if let AcceptStage::AwaitingOffer(_) = self.stage {
                return Ok(AcceptStep::Waiting(Box::new(self)));
            }
        }
        if let AcceptStage::AwaitingReady(offered) = self.stage {
            match receive(&mut self.channel)? {
                Some(Message::Ready(ready)) => {
                    self.stage = AcceptStage::Probing(offered.connect(process, &self.peer, ready)?);
                }
                Some(other) => return Err(out_of_turn(&self.channel, &other)),
                None => {
                    in_time(
                        process,
                        self.started,
                        &format!("{} to connect its queue pairs", self.peer),
                    )?;
                    self.stage = AcceptStage::AwaitingReady(offered);
                    return Ok(AcceptStep::Waiting(Box::new(self)));
                }
            }
        }
        if let AcceptStage::Gathering(mut gathering) = self.stage {
            if let Some(other) = receive(&mut self.channel)? {
                return Err(out_of_turn(&self.channel, &other));
            }
            if gathering.is_complete(&mut self.channel)? {
                return gathering
                    .finish(setup, self.channel, self.peer)
                    .map(|comm| AcceptStep::Streams(Box::new(comm)));
            }
            in_time(
                process,
                self.started,
                &format!("{} to open its TCP streams", self.peer),
            )?;
            self.stage = AcceptStage::Gathering(gathering);
            return Ok(AcceptStep::Waiting(Box::new(self)));
        }
        let AcceptStage::Probing(mut probing) = self.stage else {
            return Err(Internal::NoStage.into());
        };
        // Checked before the tests are polled: if the peer has left, the tests fail, although the
        // paths are not at fault.
        if let Some(other) = receive(&mut self.channel)? {
            return Err(out_of_turn(&self.channel, &other));
        }
        if probing.poll(&setup.process, &self.peer) {
            return probing
                .finish(setup, self.channel, self.started, self.peer)
                .map(AcceptStep::Rails);
        }
        self.stage = AcceptStage::Probing(probing);
        Ok(AcceptStep::Waiting(Box::new(self)))
    }
}

/// Answers a HELLO. Returns the next stage, or the same one while file descriptors are short.
fn answer(
    setup: &Setup,
    channel: &mut Channel,
    hello: Hello,
    started: Instant,
) -> Result<AcceptStage> {
    let process = &*setup.process;
    let mut error = match HelloAnswer::to(process, &hello) {
        Ok(HelloAnswer::Rails(offered, offer)) => {
            return channel
                .send(&Message::Offer(offer))
                .map(|()| AcceptStage::AwaitingReady(offered));
        }
        Ok(HelloAnswer::Streams(gathering, streams)) => {
            return channel
                .send(&Message::Streams(streams))
                .map(|()| AcceptStage::Gathering(gathering));
        }
        Err(error) => error,
    };
    let peer = &hello.name;
    if let Some(why) = waits_for_descriptors(&error) {
        setup
            .descriptors
            .tell(&format!("cannot answer {peer}"), &why);
        match in_time(
            process,
            started,
            &format!("resources to answer {peer} ({why})"),
        ) {
            Ok(()) => return Ok(AcceptStage::AwaitingOffer(hello)),
            Err(late) => error = late,
        }
    }
    refuse(channel, peer, &error);
    Err(error)
}

/// Sends the reason of a failure to the peer, which logs it. If the reason cannot be sent, the
/// caller still returns the error.
fn refuse(channel: &mut Channel, peer: &str, error: &Error) {
    if let Err(unsent) = channel.send(&Message::Refuse(error.to_string())) {
        tracing::debug!("could not send the refusal to {peer}: {unsent}");
    }
}

impl HelloAnswer {
    fn to(process: &Process, hello: &Hello) -> Result<Self> {
        negotiate::check_ring_tcp(process, hello)?;
        negotiate::check_tuner(process, hello)?;
        negotiate::warn_of_priority(process, hello);
        let rails = LocalRails::query(process)?;
        let routes = rails.routes(process, &hello.rails);
        let mut pairs = pairing::pair(&hello.rails, &rails.adverts, &routes);
        for pair in &mut pairs {
            let path = PathId {
                rail: rails.known[pair.acceptor].rail.id,
                peer_gid: pair.connector_gid,
            };
            let largest = process.backoff.largest_mtu(path).unwrap_or(pair.mtu_bytes);
            pair.mtu_bytes = pair.mtu_bytes.min(largest);
        }
        if pairs.iter().all(|pair| pair.is_late) {
            streams::allow(process, &rails, hello)?;
            return Gathering::new(process)
                .map(|(gathering, streams)| Self::Streams(gathering, streams));
        }
        OfferMade::new(process, rails, pairs, hello).map(|(made, offer)| Self::Rails(made, offer))
    }
}

impl OfferMade {
    fn new(
        process: &Process,
        rails: LocalRails,
        pairs: Vec<Pair>,
        hello: &Hello,
    ) -> Result<(Self, Offer)> {
        let ends: Vec<[End; 2]> = pairs
            .iter()
            .map(|pair| rails.ends(pair.acceptor, &hello.rails, pair.connector))
            .collect();
        let late: Vec<bool> = pairs.iter().map(|pair| pair.is_late).collect();
        let queue_pairs = negotiate::queue_pairs(
            negotiate::qps_wanted(&process.config.setup).max(hello.qps_per_rail),
            &Paths::with_late(&ends, &late),
        );
        let chunk_bytes = rails.chunk_bytes().min(hello.chunk_bytes);
        let paired: Vec<usize> = pairs.iter().map(|pair| pair.acceptor).collect();
        let mut left_out = negotiate::unpaired(&rails, &paired, Role::Receiver);
        let mut opened = Vec::new();
        for ((pair, ends), queue_count) in pairs.into_iter().zip(ends).zip(queue_pairs) {
            opened.push(OpenedPair::open(
                process,
                &rails,
                hello,
                pair,
                ends,
                queue_count,
            )?);
        }
        if opened.iter().all(OpenedPair::cannot_work) {
            let why = |pair: &OpenedPair| {
                Some((pair.ends[0].rail, pair.opened.as_ref().err()?.why.clone()))
            };
            left_out.extend(opened.iter().filter_map(why));
            let peer = hello.name.clone();
            let rails = negotiate::left_out_text(process, &left_out);
            return Err(Missing::QueuePairs { peer, rails }.into());
        }
        let offer = Offer {
            name: process.name.clone(),
            chunk_bytes,
            pairs: opened.iter().map(|pair| pair.offer(&rails)).collect(),
        };
        let theirs = hello.rails.clone();
        Ok((
            Self {
                rails,
                theirs,
                chunk_bytes,
                priority: hello.priority,
                pairs: opened,
                left_out,
            },
            offer,
        ))
    }

    /// Starts to connect this side's queue pairs. [`Probing`] tests them afterwards.
    fn connect(self, process: &Process, peer: &str, ready: Ready) -> Result<Probing> {
        negotiate::check_pair_count(peer, ready.pairs.len(), self.pairs.len())?;
        let region = Region::new(MAILBOX_BYTES)?;
        let mut pairs = Vec::with_capacity(self.pairs.len());
        for (
            OpenedPair {
                pair,
                ends,
                peer_rail,
                queue_count,
                opened,
            },
            answer,
        ) in self.pairs.into_iter().zip(ready.pairs)
        {
            let KnownRail { rail, snapshot, .. } = &self.rails.known[pair.acceptor];
            let state = match (opened, answer) {
                (Err(not_yet), _) => Probed::NotYet(not_yet),
                (Ok(_), PairReady::NotYet(NotYet { why, is_temporary })) => {
                    Probed::NotYet(NotYet {
                        why: format!("{peer} cannot use it: {why}"),
                        is_temporary,
                    })
                }
                (Ok(mut lane), PairReady::Connected { mailbox_rkey, qps }) => {
                    lane.peer_mailbox_rkey = mailbox_rkey;
                    let route = NewRoute {
                        snapshot: snapshot.clone(),
                        gid: pair.acceptor_gid,
                        choice: path_choice(&pair),
                        ends: qps,
                        priority: self.priority,
                    };
                    Probed::join(process, rail, lane, route, &region)
                }
            };
            pairs.push(ProbedPair {
                rail: Arc::clone(rail),
                pair,
                ends,
                peer_rail,
                queue_count,
                state,
            });
        }
        let Self {
            chunk_bytes,
            priority,
            theirs,
            left_out,
            ..
        } = self;
        let mailboxes = Mailboxes {
            region,
            peer_addr: ready.mailbox_addr,
        };
        Ok(Probing {
            chunk_bytes,
            priority,
            mailboxes,
            theirs,
            pairs,
            left_out,
        })
    }
}

impl OpenedPair {
    /// Creates this side's queue pairs for a pair. If this fails, the pair has the reason.
    ///
    /// # Errors
    /// A shortage of file descriptors.
    fn open(
        process: &Process,
        rails: &LocalRails,
        hello: &Hello,
        pair: Pair,
        ends: [End; 2],
        queue_count: u8,
    ) -> Result<Self> {
        let known = &rails.known[pair.acceptor];
        let theirs = &hello.rails[pair.connector];
        let dead = negotiate::dead_path_reason(process, &known.rail, pair.connector_gid);
        let opened = open_lane(known, theirs, dead, queue_count)?;
        if opened.is_ok() {
            let ours = &rails.adverts[pair.acceptor];
            warn_of_mtu(process, &known.rail, theirs, ours, &hello.name);
        }
        Ok(Self {
            pair,
            ends,
            peer_rail: theirs.name.clone(),
            queue_count,
            opened,
        })
    }

    /// Returns true if this side has no queue pairs for the pair, and the pair is late or failed
    /// permanently.
    fn cannot_work(&self) -> bool {
        self.opened
            .as_ref()
            .is_err_and(|not_yet| self.pair.is_late || !not_yet.is_temporary)
    }

    fn offer(&self, rails: &LocalRails) -> PairOffer {
        let rail = &rails.known[self.pair.acceptor].rail;
        PairOffer {
            connector_rail: self.pair.connector as u8,
            connector_gid: self.pair.connector_gid,
            acceptor_rail: rail.id,
            acceptor: rail.info.attachment,
            acceptor_name: rail.name(),
            acceptor_gid: self.pair.acceptor_gid,
            mtu_bytes: self.pair.mtu_bytes,
            queue_pairs: match &self.opened {
                Ok(lane) => Offered::Now(lane.ends()),
                Err(_) if self.pair.is_late => Offered::Late(self.queue_count),
                Err(_) => Offered::Later(self.queue_count),
            },
        }
    }
}

fn path_choice(pair: &Pair) -> PathChoice {
    PathChoice {
        peer_gid: pair.connector_gid,
        mtu_bytes: pair.mtu_bytes,
    }
}

/// Creates this side's queue pairs for a rail. The inner error is the reason to leave the pair for
/// later. The outer error is a shortage of file descriptors.
fn open_lane(
    known: &KnownRail,
    theirs: &RailAdvert,
    dead: Option<String>,
    queue_count: u8,
) -> Result<std::result::Result<Lane, NotYet>> {
    let away =
        || (!theirs.is_usable).then(|| format!("the peer cannot use its rail {} now", theirs.name));
    if let Some(why) = known.problem.clone().or_else(away).or(dead) {
        return Ok(Err(NotYet::temporary(why)));
    }
    match Lane::open(&known.rail, Role::Receiver, usize::from(queue_count)) {
        Ok(mut lane) => {
            lane.peer_rail.clone_from(&theirs.name);
            Ok(Ok(lane))
        }
        Err(error) if error.is_shortage() => Err(error),
        Err(error) => Ok(Err(negotiate::not_yet(&known.rail, &error))),
    }
}

fn warn_of_mtu(process: &Process, rail: &Rail, theirs: &RailAdvert, ours: &RailAdvert, peer: &str) {
    let here = ours.mtu_bytes;
    let there = theirs.mtu_bytes;
    if here != there && process.log.is_first(peer, Subject::PathMtu(rail.id)) {
        let rail = rail.name();
        let their_rail = &theirs.name;
        tracing::warn!(
            "rail {rail} to {peer}: path MTU {here} here, {there} on peer rail {their_rail}; using the smaller: set the same MTU on both ports"
        );
    }
}

impl Probed {
    /// Registers this side's mailbox on the lane, and starts to connect the lane.
    fn join(
        process: &Process,
        rail: &Rail,
        mut lane: Lane,
        route: NewRoute,
        region: &Arc<Region>,
    ) -> Self {
        match lane.register_mailbox(region) {
            Ok(()) => Self::Joining(Joining::new(process, Role::Receiver, lane, route)),
            Err(error) => Self::NotYet(negotiate::not_yet(rail, &error)),
        }
    }
}

impl ProbedPair {
    fn test(
        &self,
        process: &Process,
        mailboxes: &Mailboxes,
        lane: Lane,
        trial: Option<Trial>,
    ) -> Probed {
        let PathChoice {
            peer_gid,
            mtu_bytes,
        } = path_choice(&self.pair);
        let path = PathId {
            rail: self.rail.id,
            peer_gid,
        };
        let limit = process.config.recovery.probe_timeout;
        LaneTest::start(lane, path, mailboxes, mtu_bytes, limit, trial, clock::now()).map_or_else(
            |error| Probed::NotYet(negotiate::not_yet(&self.rail, &error)),
            Probed::Testing,
        )
    }

    fn poll(
        &self,
        process: &Process,
        (mailboxes, theirs): (&Mailboxes, &[RailAdvert]),
        mut test: LaneTest,
        peer: &str,
        buffer: &mut CompletionBuffer,
    ) -> Probed {
        let not_yet = |why, is_temporary| Probed::NotYet(NotYet { why, is_temporary });
        match test.step(mailboxes, &process.backoff, buffer, clock::now()) {
            TestResult::UnderWay => Probed::Testing(test),
            TestResult::Passed => Probed::Carries(test.lane),
            // Writes also fail if the device is removed during the test. The device may return, so
            // the failure is then temporary.
            TestResult::Failed(why) => not_yet(
                why,
                self.rail.device.query_presence(self.rail.info.port) != Presence::Here,
            ),
            TestResult::Silent(why) => {
                let netdev = self.rail.info.netdev.as_deref();
                let pair = &self.pair;
                let sent_to =
                    neighbours::sent_to(netdev, pair.connector_gid, theirs, pair.connector, peer);
                not_yet(
                    why + &sent_to + if pair.is_routed { ROUTED } else { "" },
                    true,
                )
            }
            TestResult::SmallMtu(why) => {
                let rail = (self.rail.id, self.rail.name());
                process
                    .log
                    .warn_of_small_packets(peer, (rail.0, &rail.1), &self.peer_rail, &why);
                not_yet(why, true)
            }
        }
    }
}

impl Probing {
    /// Continues to connect and test the pairs. Returns true when every pair has its result.
    fn poll(&mut self, process: &Arc<Process>, peer: &str) -> bool {
        let mut buffer = CompletionBuffer::new();
        for pair in &mut self.pairs {
            let undecided = Probed::NotYet(NotYet::temporary(String::new()));
            let after = match std::mem::replace(&mut pair.state, undecided) {
                Probed::Joining(joining) => match joining.step(process) {
                    JoinStep::Waiting(joining) => Probed::Joining(joining),
                    JoinStep::LeftOut(not_yet) => Probed::NotYet(not_yet),
                    JoinStep::Joined(lane, trial) => {
                        pair.test(process, &self.mailboxes, lane, trial)
                    }
                },
                other => other,
            };
            pair.state = match after {
                Probed::Testing(test) => pair.poll(
                    process,
                    (&self.mailboxes, &self.theirs),
                    test,
                    peer,
                    &mut buffer,
                ),
                other => other,
            };
        }
        !self
            .pairs
            .iter()
            .any(|pair| matches!(pair.state, Probed::Joining(_) | Probed::Testing(_)))
    }

    fn finish(
        self,
        setup: &Setup,
        mut channel: Channel,
        started: Instant,
        peer: String,
    ) -> Result<AwaitingRail<RecvPath>> {
        let Self {
            chunk_bytes,
            priority,
            mailboxes,
            pairs: probed,
            left_out,
            ..
        } = self;
        let Mailboxes { region, peer_addr } = mailboxes;
        let is_hopeless = probed.iter().all(ProbedPair::cannot_work);
        let pairs = probed
            .into_iter()
            .map(ProbedPair::agree)
            .collect::<Result<Vec<_>>>()?;
        if is_hopeless {
            let left_out = AgreedPair::not_yet(&pairs, left_out);
            let error = negotiate::no_usable_rail(&setup.process, &peer, &left_out);
            refuse(&mut channel, &peer, &error);
            return Err(error);
        }
        let go_pairs = pairs.iter().map(go).collect();
        let mailbox_addr = region.addr();
        let role = Role::Receiver;
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
        finish(
            setup,
            channel,
            agreed,
            RecvPath::new,
            |channel, redial_handle| {
                let (redialling, redial) =
                    redial_handle.prepare_redial(channel, &setup.descriptors);
                channel.send(&Message::Go(Go {
                    mailbox_addr,
                    pairs: go_pairs,
                    redial,
                }))?;
                Ok(redialling)
            },
        )
    }
}

impl ProbedPair {
    /// Returns true if the pair does not work, and is late or failed permanently.
    fn cannot_work(&self) -> bool {
        matches!(&self.state, Probed::NotYet(not_yet) if self.pair.is_late || !not_yet.is_temporary)
    }

    /// Returns the pair with its result.
    ///
    /// # Errors
    /// [`Error::Internal`] if the pair has no result yet.
    fn agree(self) -> Result<AgreedPair> {
        let lane = match self.state {
            Probed::Carries(lane) => Ok(lane),
            Probed::NotYet(NotYet { why, .. }) => Err(why),
            Probed::Joining(_) | Probed::Testing(_) => return Err(Internal::NotTested.into()),
        };
        Ok(AgreedPair {
            rail: self.rail,
            ends: self.ends,
            peer_rail: self.peer_rail,
            queue_count: self.queue_count,
            is_late: self.pair.is_late,
            choice: path_choice(&self.pair),
            lane,
        })
    }
}

/// Returns the result of a pair for GO.
fn go(pair: &AgreedPair) -> PairGo {
    match &pair.lane {
        Ok(lane) => PairGo::Carries {
            mailbox_rkey: lane.mailbox_rkey(),
        },
        Err(why) => PairGo::NotYet(why.clone()),
    }
}
