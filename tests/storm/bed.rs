//! Two nodes of a software fabric in virtual time, each with a process of the plugin: its rails,
//! its devices, and both ends of many connections. One thread plays everything: the callers, the
//! service threads of both processes, and the NICs.

use super::caller::{Channel, Terms};
use super::events::{Change, RAILS, Storm, What, places};
use crate::common::comms::{Receiving, Sending};
use crate::common::{fabric_folder, fabric_library, fabric_name, records};
use crate::sim::waker::Mark;
use crate::sim::{Dice, ends, threads};
use host::config::Config;
use host::counters::layout::{Direction, State};
use host::counters::{CountedConnection, CountedLane};
use host::error::{Quick, Result};
use host::interfaces;
use nccl_net_spark::clock;
use nccl_net_spark::comm::datapath::context::PathContext;
use nccl_net_spark::comm::datapath::lane::{Lane, Role, Route};
use nccl_net_spark::comm::datapath::mailbox::Mailboxes;
use nccl_net_spark::comm::datapath::parts::PathParts;
use nccl_net_spark::comm::datapath::recv::RecvPath;
use nccl_net_spark::comm::datapath::send::SendPath;
use nccl_net_spark::comm::datapath::shared::Shareable;
use nccl_net_spark::comm::datapath::try_cell::TryCell;
use nccl_net_spark::comm::process::Process;
use nccl_net_spark::comm::rail::{Rail, RailSnapshot};
use nccl_net_spark::comm::recovery::attempt::ManagedRail;
use nccl_net_spark::comm::recovery::devices::{DeviceChange, Devices};
use nccl_net_spark::comm::recovery::driver::{Driver, Terms as DriverTerms};
use nccl_net_spark::comm::setup::negotiate;
use nccl_net_spark::comm::{Host, HostMemory, Purpose, RecvPart, Registration};
use nccl_net_spark::plugin::bring_up;
use proto::flow::paths::Paths;
use proto::flow::recovery::Missing;
use proto::time::Instant;
use proto::wire::control::ControlFrame;
use proto::wire::fields::Priority;
use proto::wire::mailbox::MAILBOX_BYTES;
use softverbs::control::{Prepared, REMOVAL_STEP, prepare, sysfs_of_node};
use softverbs::hotplug::Phase;
use softverbs::os::shm::{self, FabricMemory};
use softverbs::profile::Profile;
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use verbs::{CompletionBuffer, Cq, Region};

const MS: u64 = 1_000_000;
/// Longest step of time while messages move.
const MOVING_STEP_NS: u64 = 200_000;
/// Longest step of time: as long as a busy service thread waits.
const LONGEST_STEP_NS: u64 = 5 * MS;
/// Virtual time after the last event within which everything must be done.
const PATIENCE_NS: u64 = 120_000 * MS;
/// Factor on the rates of a Spark, so that a storm of seconds moves few bytes.
const SCALE: f64 = 0.0005;
/// Placeholder for the address of a late rail.
const PLACEHOLDER: [u8; 16] = [0xff; 16];

pub struct Bed {
    memory: &'static FabricMemory,
    profile: Profile,
    trees: [PathBuf; 2],
    nodes: [Node; 2],
    _prepared: Prepared,
    begun: Instant,
    now_ns: u64,
    late: LateRails,
}

/// Set of the late rails of each node.
pub type LateRails = [u8; 2];

/// Each late rail, as the numbers of its node and of the rail.
fn late_places(late: LateRails) -> impl Iterator<Item = (usize, usize)> {
    places().filter(move |(node, rail)| late[*node] >> rail & 1 == 1)
}

/// One process.
struct Node {
    host: Arc<Host>,
    snapshots: Vec<RailSnapshot>,
    devices: Devices,
    waker: Arc<Mark>,
    /// A completion queue for each rail, which stays empty. Polling them drives the node's NICs.
    nics: Vec<Cq>,
}

/// One connection. Index 0 is the sending end, index 1 the receiving end.
struct Link {
    drivers: [Driver; 2],
    /// Node of the sending end.
    from: usize,
    /// Control frames on their way to each end over TCP, with the time of their arrival.
    frames: [VecDeque<(u64, ControlFrame)>; 2],
    /// Counters of both ends. They exist as long as this.
    _counted: [CountedConnection; 2],
}

pub struct End<P> {
    path: Arc<TryCell<P>>,
    context: Arc<PathContext>,
    process: Arc<Process>,
}

pub type SendEnd = End<SendPath>;
pub type RecvEnd = End<RecvPath>;

impl Sending for SendEnd {
    fn register(&self, memory: HostMemory) -> Result<Arc<Registration>> {
        self.process.register(memory, Purpose::Send)
    }

    fn isend(
        &self,
        addr: u64,
        bytes: usize,
        tag: i32,
        memory: &Registration,
    ) -> Quick<Option<u16>> {
        let mut path = self.path.enter().expect("one thread uses the path");
        let done = path.isend(&self.context, addr, bytes, tag, memory);
        path.leave();
        done
    }

    fn test(&self, request: u16) -> Quick<Option<u64>> {
        let mut path = self.path.enter().expect("one thread uses the path");
        let done = path.test(&self.context, request);
        path.leave();
        done
    }

    fn close(&self) {}
}

impl Receiving for RecvEnd {
    fn register(&self, memory: HostMemory) -> Result<Arc<Registration>> {
        self.process.register(memory, Purpose::Receive)
    }

    fn irecv(&self, parts: &[RecvPart<'_>], optional: bool) -> Quick<Option<u16>> {
        let mut path = self.path.enter().expect("one thread uses the path");
        let done = path.irecv(&self.context, parts, optional);
        path.leave();
        done
    }

    fn test(&self, request: u16, tell: impl FnMut(usize, u64)) -> Quick<bool> {
        let mut path = self.path.enter().expect("one thread uses the path");
        let done = path.test(&self.context, request, tell);
        path.leave();
        done
    }

    fn close(&self) {}
}

impl Bed {
    /// Sets up the fabric. A process must do this only once.
    pub fn new() -> Self {
        threads::replace();
        let dir = fabric_folder();
        let name = fabric_name();
        std::fs::create_dir_all(&dir).unwrap();
        let profile = Profile::load("spark-2cable", SCALE).unwrap();
        let prepared = prepare(&dir, &name, &profile, 2).unwrap();
        let shared = dir.join(&name).join("sys").display().to_string();
        let trees = [0, 1].map(|node| PathBuf::from(sysfs_of_node(&shared, node)));
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(dir.join(&name).join("fabric"))
            .unwrap();
        let memory = shm::map(&file).unwrap();
        // From here on the fabric has no engine threads, and this is its only clock.
        memory.virtual_clock.store(1, Ordering::Release);
        let begun = clock::now();
        let nodes = [0, 1].map(|node| Node::new(node, &prepared, &trees[node]));
        Self {
            memory,
            profile,
            trees,
            nodes,
            _prepared: prepared,
            begun,
            now_ns: 0,
            late: [0; 2],
        }
    }

    fn now(&self) -> Instant {
        self.begun + Duration::from_nanos(self.now_ns)
    }

    /// Lets time pass, and the NICs of both nodes work.
    fn pass(&mut self, ns: u64) {
        self.now_ns += ns;
        self.memory
            .virtual_clock
            .store(self.now_ns + 1, Ordering::Release);
        let mut buffer = CompletionBuffer::new();
        for nic in self.nodes.iter_mut().flat_map(|node| &mut node.nics) {
            assert!(nic.poll(&mut buffer).unwrap().is_empty());
        }
    }

    fn change(&self, node: usize, rail: usize, step: Step) {
        let memory = &self.memory.rails[node][rail];
        match step {
            Step::Port(is_up) => memory.set_port(is_up, self.now_ns),
            Step::Addresses(are_there) => memory.set_addresses(are_there),
            Step::To(phase) => {
                memory.move_to(phase);
                if phase == Phase::Gone && memory.presence().phase == Phase::Gone {
                    self.profile
                        .show_device(&self.trees[node], rail, false)
                        .unwrap();
                }
            }
            Step::Return if memory.presence().phase == Phase::Gone => {
                self.profile
                    .show_device(&self.trees[node], rail, true)
                    .unwrap();
                memory.link_up(self.now_ns);
                memory.move_to(Phase::Here);
            }
            Step::Return => {}
        }
    }

    fn mend(&mut self) {
        for (node, rail) in places() {
            let memory = &self.memory.rails[node][rail];
            if memory.presence().phase != Phase::Here {
                self.change(node, rail, Step::To(Phase::Gone));
                self.change(node, rail, Step::Return);
            }
            self.change(node, rail, Step::Port(true));
            self.change(node, rail, Step::Addresses(true));
        }
    }

    /// Sets the time after which the NICs report a silent peer to queue pairs that connect from now
    /// on. `None`: the settings decide, which makes it half a second.
    fn set_silence(&self, silence: Option<Duration>) {
        let silence_ns = silence.map_or(0, |time| time.as_nanos() as u64);
        for (node, rail) in places() {
            let memory = &self.memory.rails[node][rail];
            memory.silence_ns.store(silence_ns, Ordering::Relaxed);
        }
    }

    /// Puts all functions on the bus, and lets both processes open them.
    fn reopen(&mut self) {
        self.mend();
        for node in 0..2 {
            let process = Arc::clone(self.nodes[node].host.process());
            process
                .rails
                .iter()
                .for_each(|rail| _ = rail.device.query_presence(rail.info.port));
            // Still idle only if the previous run failed.
            for rail in &process.rails {
                _ = rail.device.require_memory();
            }
            while process.rails.iter().any(|rail| rail.device.pd().is_err()) {
                self.pass(1000 * MS);
                process.look_for_returned(self.now());
            }
            process
                .rails
                .iter()
                .for_each(|rail| process.backoff.forget(rail));
            self.nodes[node].devices = Devices::default();
        }
    }

    /// Takes the link of rails as if they had none when the processes opened them.
    fn set_late(&mut self, late: LateRails) {
        self.late = late;
        for (node, rail) in late_places(late) {
            self.change(node, rail, Step::Port(false));
            let mut rails = self.nodes[node].host.process().rails.iter();
            let rail = rails.find(|it| it.info.device == RAILS[rail]).unwrap();
            rail.announce(PLACEHOLDER).unwrap();
        }
    }

    /// Returns the set of the lanes whose rail is late on one of the nodes.
    fn late_lanes(&self) -> u8 {
        let is_late = |(_, rail): &(usize, &Arc<Rail>)| {
            let number = RAILS.iter().position(|name| rail.info.device == *name);
            (self.late[0] | self.late[1]) >> number.unwrap() & 1 == 1
        };
        let rails = self.nodes[0].host.process().rails.iter().enumerate();
        rails.filter(is_late).map(|(lane, _)| 1 << lane).sum()
    }

    /// Connects one node to the other, over all rails that have a link on both.
    fn connect(&self, from: usize) -> (Link, SendEnd, RecvEnd) {
        let nodes = [&self.nodes[from], &self.nodes[1 - from]];
        let mailboxes = [0, 1].map(|_| Region::new(MAILBOX_BYTES).unwrap());
        let late = self.late_lanes();
        let mut lanes = lanes(nodes, late);
        ends::exchange_mailbox_keys(&mut lanes, &mailboxes);
        let paths = ends::paths(&lanes[0]);
        let counted = [0, 1].map(|side: usize| {
            let directions = [Direction::Send, Direction::Receive];
            count(nodes[side], directions[side], &mut lanes[side])
        });
        let rails = [0, 1].map(|side: usize| ends::managed_rails(&lanes[side], 1));
        let missing = ends::missing(late, RAILS.len(), true);
        let is_late = [0, 1, 2, 3].map(|rail| late >> rail & 1 == 1);
        let paths = Paths::with_late(&paths, &is_late);
        let parts = |side: usize, lanes| {
            let mut striping = negotiate::striping(nodes[side].host.process(), &paths);
            missing.iter().for_each(|late| striping.lose(late.lane));
            PathParts {
                lanes,
                region: Arc::clone(&mailboxes[side]),
                peer_addr: mailboxes[1 - side].addr(),
                chunk_bytes: 1 << 30,
                striping,
            }
        };
        let [send_lanes, recv_lanes] = lanes;
        let send = SendEnd {
            path: Arc::new(TryCell::new(SendPath::new(parts(0, send_lanes)))),
            context: nodes[0].context(format!("node {}", 1 - from)),
            process: Arc::clone(nodes[0].host.process()),
        };
        let recv = RecvEnd {
            path: Arc::new(TryCell::new(RecvPath::new(parts(1, recv_lanes)))),
            context: nodes[1].context(format!("node {from}")),
            process: Arc::clone(nodes[1].host.process()),
        };
        let [send_rails, recv_rails] = rails;
        let drivers = [
            send.driver(
                Role::Sender,
                ends::mailboxes_of(0, &mailboxes),
                send_rails,
                &missing,
            ),
            recv.driver(
                Role::Receiver,
                ends::mailboxes_of(1, &mailboxes),
                recv_rails,
                &missing,
            ),
        ];
        let link = Link {
            drivers,
            from,
            frames: Default::default(),
            _counted: counted,
        };
        (link, send, recv)
    }
}

impl<P: Shareable + 'static> End<P> {
    fn driver(
        &self,
        role: Role,
        mailboxes: Mailboxes,
        rails: Vec<ManagedRail>,
        missing: &[Missing],
    ) -> Driver {
        Driver::new(
            Arc::clone(&self.process),
            Arc::clone(&self.context),
            self.path.clone(),
            driver_terms(role),
            mailboxes,
            rails,
            missing,
        )
    }
}

fn driver_terms(role: Role) -> DriverTerms {
    DriverTerms {
        role,
        priority: Priority::default(),
        first_rail_timeout: Duration::from_secs(3600),
    }
}

/// Gives the lanes counters. Readers do not see a late lane before it works.
fn count(node: &Node, direction: Direction, lanes: &mut [Lane]) -> CountedConnection {
    let counted = |lane: &Lane| CountedLane {
        rail: lane.rail.name(),
        peer_rail: lane.peer_rail.clone(),
        bits_per_s: 1,
        path_mtu_bytes: lane.path_mtu_bytes(),
        state: if lane.is_open() {
            State::Carries
        } else {
            State::Free
        },
    };
    let all: Vec<_> = lanes.iter().map(counted).collect();
    let counting = &node.host.process().counting;
    let counted = counting.connection(direction, "peer", &all);
    for (number, lane) in lanes.iter_mut().enumerate() {
        lane.record = counted.record(number);
    }
    counted
}

fn lanes(nodes: [&Node; 2], late: u8) -> [Vec<Lane>; 2] {
    let mut lanes: [Vec<Lane>; 2] = Default::default();
    for rail in 0..RAILS.len() {
        let rails = nodes.map(|node| &node.host.process().rails[rail]);
        if late >> rail & 1 == 1 {
            for side in [0, 1] {
                let lane = Lane::without_queues(rails[side], rails[1 - side].name());
                lanes[side].push(lane);
            }
            continue;
        }
        let mut pair = [(0, Role::Sender), (1, Role::Receiver)]
            .map(|(side, role): (usize, _)| Lane::open(rails[side], role, 1).unwrap());
        let ends = [pair[0].ends(), pair[1].ends()];
        let gids = nodes.map(|node| node.snapshots[rail].addresses[0].gid);
        for (side, role) in [(1, Role::Receiver), (0, Role::Sender)] {
            let route = Route {
                snapshot: &nodes[side].snapshots[rail],
                gid: gids[side],
                peer_gid: gids[1 - side],
                mtu_bytes: 4096,
                ends: &ends[1 - side],
                priority: Priority::default(),
            };
            let process = nodes[side].host.process();
            pair[side].connect(role, process.config.qp, &route).unwrap();
            pair[side].peer_rail = rails[1 - side].name();
        }
        let [sender, receiver] = pair;
        lanes[0].push(sender);
        lanes[1].push(receiver);
    }
    lanes
}

impl Node {
    fn new(node: usize, prepared: &Prepared, tree: &std::path::Path) -> Self {
        // Each node has a copy of the fabric's library: a library joins the fabric once, as one
        // process.
        let library = prepared.folder().join("lib").join(format!("node-{node}"));
        std::fs::create_dir_all(library.parent().unwrap()).unwrap();
        std::fs::copy(fabric_library(), &library).unwrap();
        let number = node.to_string();
        let variables = prepared
            .environment
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()));
        for (name, value) in variables.chain([
            ("SOFTVERBS_NODE", number.as_str()),
            ("SOFTVERBS_PROFILE", "spark-2cable"),
        ]) {
            // SAFETY: the program has one thread at this time, apart from the test's runner, which
            // does not read the environment.
            unsafe { std::env::set_var(name, value) };
        }
        let settings = [
            ("NCCL_IBVERBS_LIB", library.display().to_string()),
            ("NCCL_SPARK_SYSFS", tree.display().to_string()),
            ("NCCL_SOCKET_IFNAME", "lo".to_owned()),
            ("NCCL_IB_HCA", RAILS.join(",")),
            ("NCCL_SPARK_LOSS_TIMEOUT_S", "3600".to_owned()),
            ("NCCL_SPARK_MIN_SHARE_BYTES", "1024".to_owned()),
        ];
        let settings: Vec<_> = settings
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect();
        let host = bring_up(Config::from_variables(&settings).unwrap())
            .unwrap()
            .0;
        let interfaces = interfaces::all().unwrap();
        let rails = &host.process().rails;
        let snapshots = rails
            .iter()
            .map(|rail| rail.snapshot(&interfaces).unwrap())
            .collect();
        let nics = rails
            .iter()
            .map(|rail| Cq::new(rail.device.pd().unwrap().context(), 1).unwrap())
            .collect();
        Self {
            host,
            snapshots,
            devices: Devices::default(),
            waker: Arc::default(),
            nics,
        }
    }

    fn context(&self, peer_name: String) -> Arc<PathContext> {
        ends::context(self.host.process(), peer_name, Arc::clone(&self.waker))
    }
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Port(bool),
    Addresses(bool),
    To(Phase),
    Return,
}

/// Steps of a change, each with its time.
fn steps(change: &Change) -> Vec<(u64, usize, usize, Step)> {
    let Change {
        at_ms,
        node,
        rail,
        what,
        is_return,
    } = *change;
    let at_ns = at_ms * MS;
    let step_ns = REMOVAL_STEP.as_nanos() as u64;
    let steps = match (what, is_return) {
        (What::Port, _) => vec![(0, Step::Port(is_return))],
        (What::Address, _) => vec![(0, Step::Addresses(is_return))],
        (What::Function, true) => vec![(2 * step_ns, Step::Return)],
        (What::Function, false) => [Phase::Cut, Phase::Keyless, Phase::Gone]
            .into_iter()
            .enumerate()
            .map(|(turn, phase)| (turn as u64 * step_ns, Step::To(phase)))
            .collect(),
    };
    steps
        .into_iter()
        .map(|(after_ns, step)| (at_ns + after_ns, node, rail, step))
        .collect()
}

fn pop_due<T>(queue: &mut VecDeque<T>, is_due: impl Fn(&T) -> bool) -> Option<T> {
    queue
        .front()
        .is_some_and(is_due)
        .then(|| queue.pop_front())?
}

/// One run: connections, a storm, and the caller's traffic.
pub struct Run<'b> {
    bed: &'b mut Bed,
    dice: Dice,
    links: Vec<Link>,
    channels: [Vec<Channel<SendEnd, RecvEnd>>; 2],
    /// By rank and channel: time of the next operation, while the channel is idle.
    resume_ns: [Vec<Option<u64>>; 2],
    /// Longest pause between two operations.
    longest_pause_ns: u64,
    /// Longest step of time while messages move and no change is near. Most runs hurry through such
    /// times.
    calm_step_ns: u64,
    /// Time of the last change.
    changed_ns: u64,
    steps: VecDeque<(u64, usize, usize, Step)>,
    /// Time of the next round of each node's service thread.
    rounds_ns: [u64; 2],
    storm: Storm,
}

impl<'b> Run<'b> {
    /// Connects the channels. `silence` is the time in which the NICs report a silent peer, if not
    /// that of the settings. The rails of `late` get their first link during the run.
    pub fn new(
        bed: &'b mut Bed,
        storm: Storm,
        (silence, late): (Option<Duration>, LateRails),
        channels: &[Terms],
        mut dice: Dice,
    ) -> Self {
        bed.set_silence(silence);
        bed.pass(1000 * MS);
        bed.reopen();
        bed.set_late(late);
        let (mut links, mut both): (Vec<Link>, [Vec<_>; 2]) = Default::default();
        for terms in channels {
            let (there, send_0, recv_1) = bed.connect(0);
            let (back, send_1, recv_0) = bed.connect(1);
            links.extend([there, back]);
            both[0].push(Channel::new(*terms, 0, send_0, recv_0).unwrap());
            both[1].push(Channel::new(*terms, 1, send_1, recv_1).unwrap());
        }
        // The storm begins once messages are in flight.
        let start_ns = bed.now_ns + (20 + dice.below(200)) * MS;
        let mut steps: Vec<_> = storm.changes().iter().flat_map(steps).collect();
        steps.iter_mut().for_each(|(at_ns, ..)| *at_ns += start_ns);
        for (node, rail) in late_places(late) {
            let up_ns = start_ns + dice.below(10_000) * MS;
            steps.push((up_ns, node, rail, Step::Port(true)));
        }
        steps.sort_by_key(|(at_ns, ..)| *at_ns);
        let rounds_ns = [bed.now_ns; 2];
        let resume_ns = [vec![None; channels.len()], vec![None; channels.len()]];
        let longest_pause_ns = [0, 1, 50, 2000][dice.below(4) as usize] * MS;
        let calm_step_ns =
            [MOVING_STEP_NS, 2 * MS, LONGEST_STEP_NS, LONGEST_STEP_NS][dice.below(4) as usize];
        Self {
            changed_ns: bed.now_ns,
            bed,
            dice,
            links,
            channels: both,
            resume_ns,
            longest_pause_ns,
            calm_step_ns,
            steps: steps.into(),
            rounds_ns,
            storm,
        }
    }

    /// Plays the run to its end. Returns the number of messages, or a description of the failure.
    pub fn play(mut self) -> std::result::Result<u64, String> {
        let mut last_ns = self
            .steps
            .back()
            .map_or(self.bed.now_ns, |(at_ns, ..)| *at_ns);
        let mut limit_ns = last_ns + PATIENCE_NS;
        let mut is_ending = false;
        let mut quiet = 0;
        loop {
            let moved = self
                .progress()
                .map_err(|error| format!("{error}\n{}", self.state()))?;
            self.take_steps();
            self.serve();
            // Without events, messages go on for a while after the last late rail has joined.
            if self.storm.0.is_empty() && !self.is_whole() {
                last_ns = self.bed.now_ns;
            }
            if self.steps.is_empty()
                && !is_ending
                && self.bed.now_ns > last_ns + self.dice.below(2000) * MS
            {
                self.bed.mend();
                self.changed_ns = self.bed.now_ns;
                self.end();
                is_ending = true;
                limit_ns = self.bed.now_ns + PATIENCE_NS;
            }
            if is_ending && self.is_done() {
                break;
            }
            if self.bed.now_ns > limit_ns {
                return Err(format!("it hangs\n{}", self.state()));
            }
            // While nothing moves, time passes in larger and larger steps, up to those of a busy
            // service thread.
            quiet = if moved { 0 } else { quiet + 1 };
            let shortest_ns = if self.is_calm() {
                self.calm_step_ns
            } else {
                MOVING_STEP_NS
            };
            let longest_ns = (shortest_ns << (quiet / 8).min(5)).min(LONGEST_STEP_NS);
            let ns = self.dice.below(longest_ns);
            self.bed.pass(ns);
        }
        if self.storm.0.is_empty() {
            self.check_losses()?;
        }
        Ok(self.channels.iter().flatten().map(Channel::consumed).sum())
    }

    /// Checks that no rail was lost, as is right without events.
    fn check_losses(&self) -> std::result::Result<(), String> {
        let records = self.bed.nodes.iter().flat_map(|node| records(&node.host));
        let lost: Vec<String> = records
            .filter(|lane| lane.state != State::Closed && lane.counts.losses > 0)
            .map(|lane| format!("{} to {}: {:?}", lane.rail, lane.peer_rail, lane.counts))
            .collect();
        if lost.is_empty() {
            return Ok(());
        }
        Err(format!("lost without a reason: {}", lost.join("\n")))
    }

    /// Returns true if all messages have arrived and all rails are in use.
    fn is_done(&self) -> bool {
        self.channels.iter().flatten().all(Channel::is_done) && self.is_whole()
    }

    fn is_whole(&self) -> bool {
        let mut drivers = self.links.iter().flat_map(|link| &link.drivers);
        drivers.all(Driver::is_whole)
    }

    /// Returns true if no change is near.
    fn is_calm(&self) -> bool {
        let now_ns = self.bed.now_ns;
        let is_far = self
            .steps
            .front()
            .is_none_or(|(at_ns, ..)| *at_ns > now_ns + 20 * MS);
        is_far && now_ns > self.changed_ns + 300 * MS
    }

    fn progress(&mut self) -> std::result::Result<bool, host::error::Error> {
        let mut moved = false;
        let Self {
            channels,
            resume_ns,
            dice,
            bed,
            longest_pause_ns,
            ..
        } = self;
        for (channel, resume_ns) in channels
            .iter_mut()
            .flatten()
            .zip(resume_ns.iter_mut().flatten())
        {
            if channel.is_idle() {
                let due_ns = *resume_ns
                    .get_or_insert_with(|| bed.now_ns + dice.below(*longest_pause_ns + 1));
                if due_ns > bed.now_ns || channel.is_done() {
                    continue;
                }
                *resume_ns = None;
                channel.begin_operation();
            }
            moved |= channel.progress()?;
        }
        Ok(moved)
    }

    fn take_steps(&mut self) {
        while let Some((_, node, rail, step)) =
            pop_due(&mut self.steps, |(at_ns, ..)| *at_ns <= self.bed.now_ns)
        {
            self.bed.change(node, rail, step);
            self.changed_ns = self.bed.now_ns;
        }
    }

    /// Lets each service thread whose time has come do a round.
    fn serve(&mut self) {
        for node in 0..2 {
            let now_ns = self.bed.now_ns;
            if now_ns < self.rounds_ns[node] {
                continue;
            }
            self.round(node);
            let is_busy = self.links.iter().any(|link| link.driver_on(node).is_busy());
            let longest_ns = if is_busy { 5 * MS } else { 50 * MS };
            self.rounds_ns[node] = now_ns + self.dice.below(longest_ns);
        }
    }

    fn round(&mut self, node: usize) {
        let now_ns = self.bed.now_ns;
        let now = self.bed.now();
        let process = Arc::clone(self.bed.nodes[node].host.process());
        let changes = self.bed.nodes[node].devices.round(&process, now);
        process.tick(now);
        let is_woken = self.bed.nodes[node].waker.take() || self.dice.one_in(16);
        for link in &mut self.links {
            let side = link.side_of(node);
            let Link {
                drivers, frames, ..
            } = link;
            for change in &changes {
                match change {
                    DeviceChange::Port(rail, port) => drivers[side].port_changed(rail, *port, now),
                    DeviceChange::CompletionsLost(cq) => drivers[side].completions_lost(*cq, now),
                }
            }
            while let Some((_, frame)) = pop_due(&mut frames[side], |(at_ns, _)| *at_ns <= now_ns) {
                drivers[side].receive_frame(&frame, now);
            }
            let delay_ns = 50_000 + self.dice.below(200_000);
            drivers[side].poll(now, is_woken, &mut |frame| {
                frames[1 - side].push_back((now_ns + delay_ns, frame));
                true
            });
        }
    }

    /// Lets both ranks end after the same number of steps.
    fn end(&mut self) {
        let [ours, theirs] = &mut self.channels;
        for (one, other) in ours.iter_mut().zip(theirs) {
            let steps = one.begun().max(other.begun());
            one.end_after(steps);
            other.end_after(steps);
        }
    }

    fn state(&self) -> String {
        let channels = self
            .channels
            .iter()
            .flatten()
            .map(|channel| channel.state() + "\n");
        let drivers = self.links.iter().enumerate().flat_map(|(number, link)| {
            let text = move |side: usize| {
                format!(
                    "link {number} from node {}, side {side}: {}\n",
                    link.from,
                    link.drivers[side].text()
                )
            };
            [text(0), text(1)]
        });
        format!(
            "{}{}{}",
            self.storm,
            channels.collect::<String>(),
            drivers.collect::<String>()
        )
    }
}

impl Link {
    fn side_of(&self, node: usize) -> usize {
        usize::from(node != self.from)
    }

    fn driver_on(&self, node: usize) -> &Driver {
        &self.drivers[self.side_of(node)]
    }
}
