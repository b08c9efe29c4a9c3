//! The accepting side's handshake, and the door that it stands at. Never waits: each call goes as far as it can.
//!
//! The bootstrap port is open to the network. Whoever connects must show the token that NCCL carried to the invited
//! peer, in one well-formed message, within a time limit; everybody else is dropped without disturbing the peer.

use super::Host;
use super::board::{Board, FarBoard};
use super::channel::{Channel, Received};
use super::connect::{out_of_turn, receive};
use super::events::Subject;
use super::half::Ends;
use super::handshake::{self, Rails, in_time};
use super::lane::{Lane, LaneWrite, Role, Route};
use super::network;
use super::owner::Owner;
use super::pairing::{self, Pair};
use super::peer::Peer;
use super::rail::Rail;
use super::recv::{RecvComm, RecvPath};
use super::shortage::{shortage_text, waits_for_descriptors};
use super::ward::Ward;
use super::warden::Warden;
use super::work::{Work, WorkId};
use crate::error::{Error, Result};
use crate::flow::ways::{End, Ways};
use crate::verbs::{Access, CompletionBuffer, Mr, Region, Remote};
use crate::wire::MAX_RAILS;
use crate::wire::board::{BOARD_BYTES, PROBE_AT, PROBE_BYTES};
use crate::wire::handle::{HANDLE_BYTES, Handle, TOKEN_BYTES};
use crate::wire::message::{Go, Hello, Message, Offer, PairGo, PairOffer, PairReady, RailAdvert, Ready};
use std::net::{IpAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Strangers that may stand at the door at a time. One more and one of them makes room: of the address that most of them come
/// from, the one that has stood longest.
const MOST_KNOCKING: usize = 64;
/// How long a stranger may take to show the token.
const KNOCK_LIMIT: Duration = Duration::from_secs(10);

/// A listener. Closed by dropping it.
pub struct ListenComm {
    host: Arc<Host>,
    listener: TcpListener,
    token: [u8; TOKEN_BYTES],
    door: Mutex<Door>,
}

#[derive(Default)]
struct Door {
    waiting_since: Option<Instant>,
    knocking: Vec<Knocker>,
    /// Who has shown the token.
    invited: Option<Box<Accepting>>,
    /// Whether somebody has: a handle is for one connection, and who shows its token later has it from listening to the first.
    was_shown: bool,
    /// What there is too little of to take anybody in, in words.
    shortage: Option<String>,
}

/// Somebody who has shown nothing yet.
struct Knocker {
    since: Instant,
    from: IpAddr,
    channel: Channel,
}

/// A connection being made with an invited peer.
struct Accepting {
    channel: Channel,
    started: Instant,
    peer: String,
    stage: Stage,
}

enum Stage {
    /// It has shown the token, and waits for an offer.
    Invited(Hello),
    AwaitingReady(Offered),
    Probing(Probing),
}

/// Queue pairs offered, not connected.
struct Offered {
    rails: Rails,
    chunk_bytes: u32,
    pairs: Vec<OpenedPair>,
    left_out: Vec<(usize, String)>,
}

/// A pair that was offered, with this side's queue pairs.
struct OpenedPair {
    pair: Pair,
    /// Both ends, this side's first.
    ends: [End; 2],
    lane: Lane,
}

/// Queue pairs connected; a write is under way on each.
struct Probing {
    until: Instant,
    chunk_bytes: u32,
    board: Arc<Region>,
    far_addr: u64,
    pairs: Vec<ProbedPair>,
    left_out: Vec<(usize, String)>,
}

struct ProbedPair {
    index: usize,
    ends: [End; 2],
    state: Probed,
}

enum Probed {
    Waiting(Tried),
    Carries(Tried),
    LeftOut(String),
}

struct Tried {
    lane: Lane,
    probe: LaneWrite,
    /// When to write once more: a lost packet is sent again at once when a later one arrives, while the queue pair's
    /// own time-out (4 s and more at NCCL's default) is longer than the trial.
    again: Option<Instant>,
    board_key: Mr,
    far_rkey: u32,
}

/// Opens a listener on the interface that the settings choose; with it, the handle for the peer.
///
/// # Errors
/// [`Error::Missing`] when no interface is admitted; [`Error::Os`].
pub fn listen(host: &Arc<Host>) -> Result<(ListenComm, [u8; HANDLE_BYTES])> {
    let address =
        network::bootstrap_address(&network::addresses()?, &host.config.socket_interfaces, host.config.socket_family)?;
    let trouble = |e: std::io::Error| Error::os(format!("cannot listen on {address}"), &e);
    let listener = TcpListener::bind(address).map_err(trouble)?;
    listener.set_nonblocking(true).map_err(trouble)?;
    let mut token = [0; TOKEN_BYTES];
    getrandom::fill(&mut token).map_err(|e| Error::Missing(format!("cannot get random numbers: {e}")))?;
    let handle = Handle { address: listener.local_addr().map_err(trouble)?, token };
    let comm = ListenComm { host: Arc::clone(host), listener, token, door: Mutex::default() };
    Ok((comm, handle.encode()))
}

impl ListenComm {
    /// Goes on with the handshakes at this door; a connection when one is complete.
    ///
    /// # Errors
    /// [`Error::Usage`] when no rail is in common with the peer; [`Error::Remote`] when the invited peer fails in
    /// the middle of its handshake or none comes in time.
    pub fn accept(&self) -> Result<Option<RecvComm>> {
        let mut door = self.door.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting_since = *door.waiting_since.get_or_insert_with(Instant::now);
        if door.invited.as_ref().is_some_and(|accepting| matches!(accepting.stage, Stage::Invited(_))) {
            // It waits for descriptors: strangers shall not have them.
            door.knocking.clear();
        } else {
            self.open(&mut door)?;
            self.ask_for_tokens(&mut door)?;
        }
        if let Some(accepting) = door.invited.take() {
            match accepting.step(&self.host)? {
                Step::Done(comm) => {
                    door.waiting_since = None;
                    return Ok(Some(*comm));
                }
                Step::Waiting(accepting) => door.invited = Some(accepting),
            }
        } else {
            let short = door.shortage.as_ref().map_or_else(String::new, |why| format!(" ({why})"));
            in_time(&self.host, waiting_since, &format!("the peer to connect{short}"))?;
        }
        Ok(None)
    }

    /// Lets in whoever connects.
    fn open(&self, door: &mut Door) -> Result<()> {
        for _ in 0..MOST_KNOCKING {
            match self.listener.accept() {
                Ok((stream, from)) => {
                    door.shortage = None;
                    if door.knocking.len() >= MOST_KNOCKING {
                        self.make_room(door)?;
                    }
                    match Channel::from_stream(stream) {
                        Ok(channel) => {
                            let (since, from) = (Instant::now(), from.ip());
                            door.knocking.push(Knocker { since, from, channel });
                        }
                        Err(error) => tracing::debug!("bootstrap connection dropped: {error}"),
                    }
                }
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                    door.shortage = None;
                    break;
                }
                Err(e) => match shortage_text(&e) {
                    // Out of descriptors or memory: a stranger makes room. Without one the peer stays in the backlog, and the next
                    // call tries again.
                    Some(why) => {
                        self.host.shortage.tell("cannot accept connections on the bootstrap port", &why);
                        door.shortage = Some(why);
                        if door.knocking.is_empty() {
                            break;
                        }
                        self.make_room(door)?;
                    }
                    // The others are troubles of the one connection (reset before it was taken, say), not of the port.
                    None => tracing::debug!("bootstrap connection failed at once: {e}"),
                },
            }
        }
        Ok(())
    }

    /// Drops one of those at the door, unless it just now has something to show.
    fn make_room(&self, door: &mut Door) -> Result<()> {
        let many = |knocker: &Knocker| door.knocking.iter().filter(|other| other.from == knocker.from).count();
        // Of several with the most the last is taken, so from the back it is the one that has stood longest.
        let crowding = (0..door.knocking.len()).rev().max_by_key(|at| many(&door.knocking[*at]));
        let Some(at) = crowding else { return Ok(()) };
        let knocker = door.knocking.remove(at);
        if let Some(silent) = self.ask_for_token(door, knocker)? {
            tracing::debug!(
                "bootstrap connection from {} dropped: too many unauthenticated connections",
                silent.channel.peer()
            );
        }
        Ok(())
    }

    /// Hears those at the door.
    fn ask_for_tokens(&self, door: &mut Door) -> Result<()> {
        for knocker in std::mem::take(&mut door.knocking) {
            let silent = self.ask_for_token(door, knocker)?;
            door.knocking.extend(silent);
        }
        Ok(())
    }

    /// Who shows the token is invited, who says anything else or takes too long is dropped; who has said nothing comes back.
    fn ask_for_token(&self, door: &mut Door, mut knocker: Knocker) -> Result<Option<Knocker>> {
        let Knocker { since, channel, .. } = &mut knocker;
        match channel.receive() {
            Ok(Received::Message(Message::Hello(hello))) if hello.token == self.token => {
                if std::mem::replace(&mut door.was_shown, true) {
                    tracing::warn!("bootstrap connection from {} rejected: its token was used before", channel.peer());
                    let why =
                        "this connection's token was used before: by another process, or by this one before its TCP \
                               connection was reset"
                            .to_owned();
                    if let Err(unsent) = channel.send(&Message::Refuse(why)) {
                        tracing::debug!("could not send the refusal: {unsent}");
                    }
                } else {
                    door.invited = Some(Box::new(Accepting::begin(knocker.channel, hello)));
                }
            }
            Ok(Received::Message(other)) => {
                let (who, kind) = (channel.peer(), other.kind());
                tracing::info!("bootstrap connection from {who} rejected: {kind} message without the token");
            }
            Ok(Received::Nothing) if since.elapsed() < KNOCK_LIMIT => return Ok(Some(knocker)),
            Ok(Received::Nothing) => {
                tracing::info!("bootstrap connection from {} rejected: no token within 10 s", channel.peer());
            }
            Ok(Received::Closed | Received::Unreachable(_)) => {
                tracing::debug!("unauthenticated bootstrap connection closed by its peer")
            }
            Err(error) => tracing::info!("bootstrap connection rejected: {error}"),
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
        Self { channel, started: Instant::now(), peer: hello.name.clone(), stage: Stage::Invited(hello) }
    }

    fn step(mut self, host: &Arc<Host>) -> Result<Step> {
        if let Stage::Invited(hello) = self.stage {
            let offered = make_offer(host, &mut self.channel, &hello, self.started)?;
            self.stage = offered.map_or(Stage::Invited(hello), Stage::AwaitingReady);
            if let Stage::Invited(_) = self.stage {
                return Ok(Step::Waiting(Box::new(self)));
            }
        }
        if let Stage::AwaitingReady(offered) = self.stage {
            match receive(&mut self.channel)? {
                Some(Message::Ready(ready)) => {
                    self.stage = Stage::Probing(offered.connect(host, &self.peer, ready)?);
                }
                Some(other) => return Err(out_of_turn(&self.channel, &other)),
                None => {
                    in_time(host, self.started, &format!("{} to connect its queue pairs", self.peer))?;
                    self.stage = Stage::AwaitingReady(offered);
                    return Ok(Step::Waiting(Box::new(self)));
                }
            }
        }
        let Stage::Probing(mut probing) = self.stage else {
            return Err(Error::Internal("connection set-up is in no stage".to_owned()));
        };
        if probing.look() {
            return probing.finish(host, self.channel, self.peer).map(|comm| Step::Done(Box::new(comm)));
        }
        self.stage = Stage::Probing(probing);
        Ok(Step::Waiting(Box::new(self)))
    }
}

/// Answers a greeting with an offer; `None` while there are no descriptors for what that takes.
fn make_offer(host: &Host, channel: &mut Channel, hello: &Hello, started: Instant) -> Result<Option<Offered>> {
    let mut error = match Offered::from_hello(host, hello) {
        Ok((offered, offer)) => return channel.send(&Message::Offer(offer)).map(|()| Some(offered)),
        Err(error) => error,
    };
    let peer = &hello.name;
    if let Some(why) = waits_for_descriptors(&error) {
        host.shortage.tell(&format!("cannot answer {peer}"), &why);
        match in_time(host, started, &format!("resources to answer {peer} ({why})")) {
            Ok(()) => return Ok(None),
            Err(late) => error = late,
        }
    }
    // The peer's own error tells its user; if it cannot be told, ours stands.
    if let Err(unsent) = channel.send(&Message::Refuse(error.to_string())) {
        tracing::debug!("could not send the refusal to {peer}: {unsent}");
    }
    Err(error)
}

impl Offered {
    fn from_hello(host: &Host, hello: &Hello) -> Result<(Self, Offer)> {
        handshake::check_tuner(host, hello)?;
        let rails = Rails::look(host)?;
        let pairs = pairing::pair(&hello.rails, &rails.adverts);
        if pairs.is_empty() {
            return Err(Error::Usage(rails.nothing_in_common(&hello.rails, &hello.name)));
        }
        let ends: Vec<[End; 2]> =
            pairs.iter().map(|pair| rails.ends(pair.acceptor, &hello.rails, pair.connector)).collect();
        let queue_pairs =
            handshake::queue_pairs(handshake::qps_wanted(&host.config).max(hello.qps_per_rail), &Ways::new(&ends));
        let chunk_bytes = rails.chunk_bytes().min(hello.chunk_bytes);
        let paired: Vec<usize> = pairs.iter().map(|pair| pair.acceptor).collect();
        let mut left_out = handshake::unpaired(&rails, &paired, Role::Receiver);
        let (mut offers, mut opened) = (Vec::new(), Vec::new());
        for ((pair, ends), queue_count) in pairs.into_iter().zip(ends).zip(queue_pairs) {
            let (rail, _) = &rails.usable[pair.acceptor];
            let peer_rail = hello.rails[pair.connector].name.clone();
            let mut lane = match Lane::open(rail, Role::Receiver, usize::from(queue_count)) {
                Ok(lane) => lane,
                Err(error) if error.is_shortage() => return Err(error),
                Err(error) => {
                    left_out.push((rail.index, error.to_string()));
                    continue;
                }
            };
            lane.peer_rail.clone_from(&peer_rail);
            warn_of_mtu(host, rail, &hello.rails[pair.connector], &rails.adverts[pair.acceptor], &hello.name);
            offers.push(PairOffer {
                connector_rail: pair.connector as u8,
                connector_gid: pair.connector_gid,
                acceptor_rail: rail.index as u8,
                acceptor: rail.info.attachment,
                acceptor_name: rail.name(),
                acceptor_gid: pair.acceptor_gid,
                mtu_bytes: pair.mtu_bytes,
                qps: lane.ends(),
            });
            opened.push(OpenedPair { pair, ends, lane });
        }
        if opened.is_empty() {
            return Err(Error::Missing(format!(
                "cannot create queue pairs for {}: {}",
                hello.name,
                handshake::left_out_text(host, &left_out)
            )));
        }
        let offer = Offer { name: host.name.clone(), chunk_bytes, pairs: offers };
        Ok((Self { rails, chunk_bytes, pairs: opened, left_out }, offer))
    }

    /// Connects this side's queue pairs, and starts one empty write on each lane to see whether it carries.
    fn connect(self, host: &Host, peer: &str, ready: Ready) -> Result<Probing> {
        if ready.pairs.len() != self.pairs.len() {
            return Err(Error::Remote(format!(
                "{peer} answered for {} rails; {} were offered",
                ready.pairs.len(),
                self.pairs.len()
            )));
        }
        let board = Region::new(BOARD_BYTES)?;
        let mut pairs = Vec::with_capacity(self.pairs.len());
        for (OpenedPair { pair, ends, lane }, answer) in self.pairs.into_iter().zip(ready.pairs) {
            let index = lane.rail.index;
            let state = match answer {
                PairReady::Failed(why) => Probed::LeftOut(format!("{peer} cannot use it: {why}")),
                PairReady::Connected { board_rkey, qps } => {
                    let look = &self.rails.usable[pair.acceptor].1;
                    let route = Route {
                        look,
                        gid: pair.acceptor_gid,
                        peer_gid: pair.connector_gid,
                        mtu_bytes: pair.mtu_bytes,
                        ends: &qps,
                        traffic_class: None,
                    };
                    match Tried::start(host, lane, &route, (ready.board_addr, board_rkey), &board) {
                        Ok(tried) => Probed::Waiting(tried),
                        Err(error) => Probed::LeftOut(error.to_string()),
                    }
                }
            };
            pairs.push(ProbedPair { index, ends, state });
        }
        let until = Instant::now() + host.config.probe_timeout;
        let (chunk_bytes, left_out) = (self.chunk_bytes, self.left_out);
        Ok(Probing { until, chunk_bytes, board, far_addr: ready.board_addr, pairs, left_out })
    }
}

/// Both ends' ports should have one MTU: said here, where both are known.
fn warn_of_mtu(host: &Host, rail: &Rail, theirs: &RailAdvert, ours: &RailAdvert, peer: &str) {
    let (here, there) = (ours.mtu_bytes, theirs.mtu_bytes);
    if here != there && host.said.is_first(peer, Subject::PathMtu(rail.index)) {
        let (rail, their_rail) = (rail.name(), &theirs.name);
        tracing::warn!(
            "rail {rail} to {peer}: path MTU {here} here, {there} on peer rail {their_rail}; using the smaller: set the same MTU on both ports"
        );
    }
}

impl Tried {
    fn start(
        host: &Host,
        mut lane: Lane,
        route: &Route<'_>,
        (far_addr, far_rkey): (u64, u32),
        board: &Arc<Region>,
    ) -> Result<Self> {
        lane.connect(Role::Receiver, &host.config, route)?;
        let board_key = board.register(&lane.rail.pd, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        let probe = LaneWrite {
            work: Work::Probe,
            local_addr: board.addr() + PROBE_AT as u64,
            lkey: board_key.lkey(),
            // A whole packet: a switch or port with a smaller MTU on the way passes empty ones.
            bytes: route.mtu_bytes.min(PROBE_BYTES as u32),
            remote: Remote { addr: far_addr + PROBE_AT as u64, rkey: far_rkey },
            immediate: None,
            signaled: true,
        };
        let again = Some(Instant::now() + host.config.probe_timeout / 3);
        let mut tried = Self { lane, probe, again, board_key, far_rkey };
        tried.lane.write_on_each(&tried.probe)?;
        Ok(tried)
    }
}

impl Probing {
    /// Looks at the writes under way; whether all are decided.
    fn look(&mut self) -> bool {
        let late = Instant::now() >= self.until;
        let mut buffer = CompletionBuffer::new();
        for pair in &mut self.pairs {
            let before = std::mem::replace(&mut pair.state, Probed::LeftOut(String::new()));
            pair.state = match before {
                Probed::Waiting(tried) => tried.look(&mut buffer, late),
                decided => decided,
            };
        }
        !self.pairs.iter().any(|pair| matches!(pair.state, Probed::Waiting(_)))
    }

    fn finish(self, host: &Arc<Host>, mut channel: Channel, peer: String) -> Result<RecvComm> {
        let Self { chunk_bytes, board, far_addr, pairs, mut left_out, .. } = self;
        let (mut lanes, mut keys, mut live, mut ways) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (mut lkeys, mut rkeys, mut words) = ([0; MAX_RAILS], [0; MAX_RAILS], Vec::new());
        for pair in pairs {
            match pair.state {
                Probed::Carries(tried) => {
                    words.push(PairGo::Carries { board_rkey: tried.board_key.rkey() });
                    live.push((pair.index, format!("{} to {}", tried.lane.rail.name(), tried.lane.peer_rail)));
                    let at = lanes.len() % MAX_RAILS;
                    (lkeys[at], rkeys[at]) = (tried.board_key.lkey(), tried.far_rkey);
                    lanes.push(tried.lane);
                    keys.push(tried.board_key);
                    ways.push(pair.ends);
                }
                Probed::LeftOut(why) => {
                    words.push(PairGo::LeftOut(why.clone()));
                    left_out.push((pair.index, why));
                }
                Probed::Waiting(_) => return Err(Error::Internal("a rail was neither tested nor left out".to_owned())),
            }
        }
        if lanes.is_empty() {
            let error =
                Error::Remote(format!("no usable rail to {peer}: {}", handshake::left_out_text(host, &left_out)));
            channel.send(&Message::Refuse(error.to_string()))?;
            return Err(error);
        }
        let go = Message::Go(Go { board_addr: board.addr(), pairs: words });
        let striping = handshake::striping(host, &ways);
        handshake::report(host, &peer, Role::Receiver, &live, &left_out);
        let ends = Arc::new(Ends { host: Arc::clone(host), peer: Arc::new(Peer::new(peer)) });
        let wards = lanes.iter().map(Ward::of).collect();
        let far = FarBoard { addr: far_addr, rkeys };
        let path = RecvPath::new(lanes, Arc::clone(&board), keys, far, chunk_bytes, striping);
        let path = Arc::new(Owner::new(path));
        let board = Board { region: board, lkeys, far };
        let warden = Warden::new(Arc::clone(&ends), path.clone(), Role::Receiver, None, board, wards);
        let watch = host.service.watch_after(channel, warden, |channel| channel.send(&go))?;
        host.opened(&ends.peer.name);
        Ok(RecvComm::new(ends, watch, path))
    }
}

impl Tried {
    fn look(mut self, buffer: &mut CompletionBuffer, late: bool) -> Probed {
        let completions = match self.lane.poll(buffer) {
            Ok(completions) => completions,
            Err(error) => return Probed::LeftOut(error.to_string()),
        };
        for completion in completions {
            if completion.status() != 0 {
                return Probed::LeftOut(format!("test write failed: {}", completion.status_text()));
            }
            self.lane.retire(WorkId::of(completion.wr_id()));
        }
        if self.lane.has_pending() && self.again.is_some_and(|again| Instant::now() >= again) {
            self.again = None;
            if let Err(error) = self.lane.write_on_each(&self.probe) {
                return Probed::LeftOut(error.to_string());
            }
        }
        match (self.lane.has_pending(), late) {
            (false, _) => Probed::Carries(self),
            (true, false) => Probed::Waiting(self),
            (true, true) => {
                Probed::LeftOut("test write not acknowledged within NCCL_SPARK_PROBE_TIMEOUT_MS".to_owned())
            }
        }
    }
}
