//! A fabric of three rails in virtual time, with both ends on one machine.

use super::Dice;
use super::busy::Busy;
use super::ends;
use super::liar::Liar;
use super::waker::Mark;
use host::config::Config;
use host::interfaces;
use nccl_net_spark::clock;
use nccl_net_spark::comm::datapath::context::PathContext;
use nccl_net_spark::comm::datapath::lane::{Lane, Role, Route};
use nccl_net_spark::comm::datapath::parts::PathParts;
use nccl_net_spark::comm::datapath::recv::RecvPath;
use nccl_net_spark::comm::datapath::send::SendPath;
use nccl_net_spark::comm::datapath::shared::SharedPath;
use nccl_net_spark::comm::datapath::try_cell::TryCell;
use nccl_net_spark::comm::rail::RailSnapshot;
use nccl_net_spark::comm::recovery::driver::{Driver, Terms};
use nccl_net_spark::comm::setup::negotiate;
use nccl_net_spark::comm::{Host, Purpose, Rail, Registration};
use nccl_net_spark::plugin::bring_up;
use proto::flow::paths::Paths;
use proto::flow::striping::Striping;
use proto::time::Instant;
use proto::wire::fields::Priority;
use proto::wire::ids::{LaneId, RailId};
use proto::wire::mailbox::MAILBOX_BYTES;
use softverbs::fabric::Node;
use softverbs::hotplug::{Phase, Presence};
use softverbs::os::shm::MAX_QPS;
use softverbs::path::{PathFault, PathFaults};
use softverbs::profile::Profile;
use softverbs::settings::Settings;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use verbs::{CompletionBuffer, Cq, HostMemory, Region};

pub const RAILS: usize = 3;
/// Size in bytes of an arena, the memory for the messages of one run. Each side has one arena.
pub const ARENA: usize = 512 * 1024;
/// Time that a connection has to get its first rail, longer than any run.
const FIRST_RAIL: Duration = Duration::from_secs(3600);
/// Size in bytes of the largest RDMA write. A larger share takes several writes.
pub const CHUNK: u32 = 256;

const PROFILE: &str = "link A pci=0000:01:00 gts=32 width=4 payload=0
    link B pci=0002:01:00 gts=32 width=4 payload=0
    link C pci=0004:01:00 gts=32 width=4 payload=0
    cable a payload=0
    cable b payload=0
    cable c payload=0
    rail x0 netdev=e0 port=p0 link=A cable=a function=0 line=8000 qp=0 latency=1000
    rail x1 netdev=e1 port=p0 link=B cable=b function=0 line=4000 qp=0 latency=5000
    rail x2 netdev=e2 port=p0 link=C cable=c function=0 line=16000 qp=0 latency=300";

pub struct Fabric {
    node: Arc<Node>,
    /// The sending side's host, then the receiving side's.
    pub hosts: [Arc<Host>; 2],
    snapshots: Vec<RailSnapshot>,
    pub from: Box<[u8]>,
    pub to: Box<[u8]>,
    pub out: Arc<Registration>,
    pub into: Arc<Registration>,
    /// A completion queue for each rail. The queues stay empty. Polling them drives the fabric's
    /// NICs, which have no threads here.
    nics: Vec<Cq>,
    begun: Instant,
    now_ns: u64,
    /// Folder that both hosts use as sysfs.
    sysfs: PathBuf,
    /// The profile whose devices `sysfs` shows.
    profile: Profile,
}

pub struct Pair {
    pub send: Arc<TryCell<SendPath>>,
    pub recv: Arc<TryCell<RecvPath>>,
    /// The sender's context, then the receiver's. All arrays of this struct have this order.
    pub contexts: [Arc<PathContext>; 2],
    pub drivers: [Driver; 2],
    pub wakers: [Arc<Mark>; 2],
    /// The memory of each side that the other side writes.
    pub mailboxes: [Arc<Region>; 2],
    /// Number of queue pairs, on both sides, that do not exist yet because their lanes are in
    /// [`Start::not_yet`].
    pub missing_queue_pairs: usize,
}

#[derive(Default)]
pub struct Start {
    /// Bit mask of the lanes that have no queue pairs when the connection begins.
    pub not_yet: u8,
    /// True if the receiving side's host (`Fabric::hosts`) sends, and the sending side's receives.
    pub is_backward: bool,
}

impl Start {
    /// Indices in [`Fabric::hosts`] of the sender and of the receiver.
    fn hosts(&self) -> [usize; 2] {
        if self.is_backward { [1, 0] } else { [0, 1] }
    }
}

impl Pair {
    /// Closes one side. Its last frames arrive immediately.
    pub fn close(&mut self, side: usize, now: Instant) {
        let mut frames = Vec::new();
        self.drivers[side].close(now, now, &mut |frame| {
            frames.push(frame);
            true
        });
        frames
            .iter()
            .for_each(|frame| self.drivers[1 - side].receive_frame(frame, now));
    }
}

impl Fabric {
    /// Sets up the fabric. A process must do this only once.
    pub fn new() -> Self {
        Self::of(PROFILE, &[])
    }

    pub fn with_settings(more: &[(&str, &str)]) -> Self {
        Self::of(PROFILE, more)
    }

    /// As `new`, with ports whose path MTU is 1024 bytes, so that a peer can ask for a larger one.
    pub fn of_small_packets() -> Self {
        let with_mtu = |line: &str| {
            line.to_owned()
                + if line.contains(" rail ") {
                    " mtu=1024\n"
                } else {
                    "\n"
                }
        };
        Self::of(&PROFILE.lines().map(with_mtu).collect::<String>(), &[])
    }

    fn of(text: &str, more: &[(&str, &str)]) -> Self {
        super::threads::replace();
        let dir = std::env::temp_dir().join("spark-tests");
        let fabric = format!("test-{}", std::process::id());
        std::fs::create_dir_all(&dir).unwrap();
        let profile = dir.join(format!("{fabric}.profile"));
        std::fs::write(&profile, text).unwrap();
        let settings = Settings {
            dir: dir.clone(),
            fabric: fabric.clone(),
            node: Some(0),
            profile: profile.display().to_string(),
            scale: 1.0,
            threads: Some(1),
            adversary: None,
        };
        let node = Node::enter(&settings).unwrap();
        // From here on the fabric has no engine threads, and this is its only clock.
        node.memory.virtual_clock.store(1, Ordering::Release);
        let hosts = [0, 1].map(|_| bring_up_host(&dir, &fabric, &settings.profile, more));
        let shown = Profile::load(&settings.profile, 1.0).unwrap();
        std::fs::remove_file(&profile).unwrap();
        let interfaces = interfaces::all().unwrap();
        let snapshots = hosts[0]
            .process()
            .rails
            .iter()
            .map(|rail| rail.snapshot(&interfaces).unwrap())
            .collect();
        let from = vec![0; ARENA].into_boxed_slice();
        let to = vec![0; ARENA].into_boxed_slice();
        // SAFETY: both live as long as the fabric, which outlives every connection over them. One
        // thread drives the fabric, and it reads the written bytes only between steps.
        let memory =
            |bytes: &[u8]| unsafe { HostMemory::from_caller(bytes.as_ptr() as usize, bytes.len()) };
        let out = hosts[0]
            .process()
            .register(memory(&from), Purpose::Send)
            .unwrap();
        let into = hosts[1]
            .process()
            .register(memory(&to), Purpose::Receive)
            .unwrap();
        let nics = hosts[0]
            .process()
            .rails
            .iter()
            .map(|rail| Cq::new(rail.device.pd().unwrap().context(), 1).unwrap())
            .collect();
        let begun = clock::now();
        let sysfs = dir.join(&fabric).join("sys");
        Self {
            node,
            hosts,
            snapshots,
            from,
            to,
            out,
            into,
            nics,
            begun,
            now_ns: 0,
            sysfs,
            profile: shown,
        }
    }

    pub fn pass(&mut self, ns: u64) {
        self.now_ns += ns;
        self.node
            .memory
            .virtual_clock
            .store(self.now_ns + 1, Ordering::Release);
        let mut buffer = CompletionBuffer::new();
        for nic in &mut self.nics {
            assert!(nic.poll(&mut buffer).unwrap().is_empty());
        }
    }

    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    pub fn now(&self) -> Instant {
        self.begun + Duration::from_nanos(self.now_ns)
    }

    pub fn show(&self, rail: usize, is_there: bool) {
        self.profile
            .show_device(&self.sysfs, rail, is_there)
            .unwrap();
    }

    pub fn move_to(&self, rail: usize, phase: Phase) {
        self.node.memory.rails[0][rail].move_to(phase);
    }

    pub fn presence(&self, rail: usize) -> Presence {
        self.node.memory.rails[0][rail].presence()
    }

    /// Puts all functions on the bus, and lets both hosts open them.
    pub fn plug_all(&mut self) {
        for rail in 0..RAILS {
            if self.presence(rail).phase != Phase::Here {
                self.move_to(rail, Phase::Gone);
                self.show(rail, false);
                self.show(rail, true);
                self.move_to(rail, Phase::Here);
            }
        }
        for side in [0, 1] {
            let process = Arc::clone(self.hosts[side].process());
            for rail in &process.rails {
                rail.device.query_presence(rail.info.port);
            }
            while process.rails.iter().any(|rail| rail.device.pd().is_err()) {
                self.pass(1_000_000_000);
                process.look_for_returned(self.now());
            }
        }
    }

    pub fn is_up(&self, rail: usize) -> bool {
        self.node.memory.rails[0][rail].down.load(Ordering::Acquire) == 0
    }

    /// True while a rail is present and up, its path has no fault, and no injected fault is pending
    /// for its next request or post.
    pub fn is_quiet(&self, rail: usize) -> bool {
        let memory = &self.node.memory.rails[0][rail];
        let is_zero = |what: &std::sync::atomic::AtomicU32| what.load(Ordering::Acquire) == 0;
        let all = [&memory.down, &memory.refusals, &memory.failing_posts];
        let has_no_fault = memory.path() == PathFaults::default() && all.into_iter().all(is_zero);
        self.presence(rail).phase == Phase::Here && has_no_fault
    }

    pub fn set(&self, rail: usize, is_up: bool) {
        self.node.memory.rails[0][rail].set_port(is_up, self.now_ns);
    }

    /// Lets a rail refuse the next `count` incoming requests as invalid.
    pub fn refuse(&self, rail: usize, count: u32) {
        self.node.memory.rails[0][rail]
            .refusals
            .store(count, Ordering::Release);
    }

    /// Loses the completions of the next `count` receives on a rail. Their data is acknowledged.
    pub fn lose_arrivals(&self, rail: usize, count: u32) {
        self.node.memory.rails[0][rail]
            .lost_arrivals
            .store(count, Ordering::Release);
    }

    /// Lets the next `count` posts on a rail fail, at either end.
    pub fn fail_posts(&self, rail: usize, count: u32) {
        self.node.memory.rails[0][rail]
            .failing_posts
            .store(count, Ordering::Release);
    }

    pub fn set_path(&self, rail: usize, fault: PathFault, is_on: bool) {
        let rail = &self.node.memory.rails[0][rail];
        rail.set_path(rail.path().with(fault, is_on));
    }

    /// Gives each rail of the bit mask `rails` a random fault that new installations have, or no
    /// fault.
    pub fn give_path_faults(&self, rails: u8, dice: &mut Dice) {
        for rail in (0..RAILS).filter(|rail| rails & 1 << rail != 0) {
            match dice.below(5) {
                0 => self.set_path(rail, PathFault::CrossedArp, true),
                1 => self.set_path(rail, PathFault::SwitchMtu, true),
                2 => {
                    let blocking = Duration::from_millis(1 + dice.below(2000));
                    self.set_path(rail, PathFault::SpanningTree(blocking), true);
                    self.set(rail, false);
                    self.set(rail, true);
                }
                3 => self.silence(rail, 1 + dice.below(4) as u32),
                _ => {}
            }
        }
    }

    pub fn forget_path_faults(&self) {
        (0..RAILS).for_each(|rail| {
            PathFault::ALL
                .into_iter()
                .for_each(|fault| self.set_path(rail, fault, false))
        });
    }

    /// Makes the next `count` attempts to connect a queue pair on a rail, at either end, fail as if
    /// the peer's address did not answer.
    pub fn silence(&self, rail: usize, count: u32) {
        self.node.memory.rails[0][rail]
            .unanswered
            .store(count, Ordering::Release);
    }

    /// Number of faults injected by [`Fabric::silence`] that have not hit a queue pair yet.
    pub fn silence_left(&self, rail: usize) -> u32 {
        self.node.memory.rails[0][rail]
            .unanswered
            .load(Ordering::Acquire)
    }

    pub fn forget_silence(&self) {
        for host in &self.hosts {
            host.process()
                .rails
                .iter()
                .for_each(|rail| host.process().backoff.forget(rail));
        }
    }

    /// Makes registrations on a rail require local write access, or no longer require it.
    pub fn need_local_write(&self, rail: usize, is_needed: bool) {
        self.node.memory.rails[0][rail]
            .needs_local_write
            .store(u32::from(is_needed), Ordering::Release);
    }

    /// Registers memory twice: first while a rail refuses it, so that the registration fails, and
    /// then without the fault.
    pub fn fail_to_register(&self, side: usize, rail: usize) {
        let is_there = |rail: &Arc<Rail>| {
            rail.device.query_presence(rail.info.port) == proto::device::Presence::Here
        };
        if !self.hosts[side].process().rails.iter().all(is_there) {
            // An absent rail would be left out, and the refusal would hit another registration.
            return;
        }
        let host = &self.hosts[side];
        let before = host.process().registrations.in_use();
        let memory = vec![0_u8; 3 * 4096].into_boxed_slice();
        // SAFETY: the memory outlives its registration, which ends with this function, and is never
        // written.
        let asked = || unsafe { HostMemory::from_caller(memory.as_ptr() as usize, memory.len()) };
        self.node.memory.rails[0][rail]
            .failing_registrations
            .store(1, Ordering::Release);
        let error = host
            .process()
            .register(asked(), Purpose::Receive)
            .map(|_| ())
            .expect_err("a rail refuses")
            .to_string();
        assert!(
            error.contains(&host.process().rails[rail].info.device)
                && error.contains("Cannot allocate memory"),
            "{error}"
        );
        assert_eq!(host.process().registrations.in_use(), before);
        let done = host
            .process()
            .register(asked(), Purpose::Receive)
            .expect("no rail refuses");
        assert!(RailId::all(RAILS).all(|rail| done.keys(rail).is_some()));
    }

    /// True if the queue pair is in the error state, even if its owner has not polled yet.
    pub fn is_in_error(&self, number: u32) -> bool {
        self.node.memory.qps[number as usize % MAX_QPS].is_in_error()
    }

    pub fn queue_pairs(&self) -> usize {
        self.node
            .memory
            .qps
            .iter()
            .filter(|qp| qp.number.load(Ordering::Acquire) != 0)
            .count()
    }

    pub fn connect(&self, rails: usize, queue_count: usize) -> Pair {
        self.connect_as(rails, queue_count, Start::default())
    }

    pub fn connect_as(&self, rails: usize, queue_count: usize, start: Start) -> Pair {
        let rails: Vec<usize> = (0..rails).collect();
        self.connect_over(&rails, queue_count, start)
    }

    /// Connects over these rails. The lanes have the order of `rails`.
    pub fn connect_over(&self, rails: &[usize], queue_count: usize, start: Start) -> Pair {
        let mailboxes = [0, 1].map(|_| Region::new(MAILBOX_BYTES).unwrap());
        self.join(
            self.lanes(rails, queue_count, start.hosts()),
            mailboxes,
            None,
            start,
        )
    }

    /// Connects over the first rail. A [`Liar`] with its own queue pair is the receiver's peer.
    pub fn connect_liar(&self) -> (Pair, Liar) {
        let mailboxes = [0, 1].map(|_| Region::new(MAILBOX_BYTES).unwrap());
        let mut liar = Liar::new(&self.node, Arc::clone(&mailboxes[0]));
        let snapshot = &self.snapshots[0];
        let gid = snapshot.addresses[0].gid;
        let [sender, receiver] = [(0, Role::Sender), (1, Role::Receiver)]
            .map(|(side, role)| Lane::open(&self.hosts[side].process().rails[0], role, 1).unwrap());
        let mut lanes = [vec![sender], vec![receiver]];
        let mtu_bytes = 1024;
        let priority = Priority::default();
        lanes[1][0].peer_rail = "a rail".to_owned();
        liar.connect(lanes[1][0].ends()[0], gid);
        let ends = [liar.end()];
        let route = Route {
            snapshot,
            gid,
            peer_gid: gid,
            mtu_bytes,
            ends: &ends,
            priority,
        };
        lanes[1][0]
            .connect(Role::Receiver, self.hosts[1].process().config.qp, &route)
            .unwrap();
        (
            self.join(lanes, mailboxes, Some(liar.key()), Start::default()),
            liar,
        )
    }

    fn lanes(&self, rails: &[usize], queue_count: usize, hosts: [usize; 2]) -> [Vec<Lane>; 2] {
        let mut lanes: [Vec<Lane>; 2] = Default::default();
        for &rail in rails {
            let mut pair = [(0, Role::Sender), (1, Role::Receiver)]
                .map(|(side, role)| (&self.hosts[hosts[side]].process().rails[rail], role))
                .map(|(rail, role)| Lane::open(rail, role, queue_count).unwrap());
            let snapshot = &self.snapshots[rail];
            let gid = snapshot.addresses[0].gid;
            let ends = [pair[0].ends(), pair[1].ends()];
            for (side, role) in [(1, Role::Receiver), (0, Role::Sender)] {
                let mtu_bytes = 1024;
                let priority = Priority::default();
                let route = Route {
                    snapshot,
                    gid,
                    peer_gid: gid,
                    mtu_bytes,
                    ends: &ends[1 - side],
                    priority,
                };
                pair[side]
                    .connect(role, self.hosts[hosts[side]].process().config.qp, &route)
                    .unwrap();
                pair[side].peer_rail = self.hosts[hosts[1 - side]].process().rails[rail].name();
            }
            let [sender, receiver] = pair;
            lanes[0].push(sender);
            lanes[1].push(receiver);
        }
        lanes
    }

    /// Builds data paths and drivers. If a liar is the receiver's peer, `liar_key` is the key with
    /// which the receiver writes to the liar's mailbox.
    fn join(
        &self,
        mut lanes: [Vec<Lane>; 2],
        mailboxes: [Arc<Region>; 2],
        liar_key: Option<u32>,
        start: Start,
    ) -> Pair {
        let hosts = start.hosts();
        ends::exchange_mailbox_keys(&mut lanes, &mailboxes);
        if let Some(key) = liar_key {
            lanes[1][0].peer_mailbox_rkey = key;
        }
        let queue_count = lanes[0][0].queue_count();
        let mut striping = self.striping(hosts, &lanes[0]);
        for (striping, lanes) in striping.iter_mut().zip(&mut lanes) {
            leave_out(start.not_yet, striping, lanes);
        }
        let missing = ends::missing(start.not_yet, lanes[0].len(), false);
        let rails = [0, 1].map(|side: usize| ends::managed_rails(&lanes[side], queue_count));
        let [send_lanes, recv_lanes] = lanes;
        let [send_striping, recv_striping] = striping;
        let send = SendPath::new(parts(0, send_lanes, &mailboxes, send_striping));
        let recv = RecvPath::new(parts(1, recv_lanes, &mailboxes, recv_striping));
        let send = Arc::new(TryCell::new(send));
        let recv = Arc::new(TryCell::new(recv));
        let wakers: [Arc<Mark>; 2] = Default::default();
        let contexts = [0, 1].map(|side: usize| {
            let process = self.hosts[hosts[side]].process();
            let peer_name = format!("end {}", hosts[1 - side]);
            ends::context(process, peer_name, Arc::clone(&wakers[side]))
        });
        let driver = |side: usize, role, path: Arc<dyn SharedPath>, rails| {
            let process = Arc::clone(self.hosts[hosts[side]].process());
            let context = Arc::clone(&contexts[side]);
            let terms = Terms {
                role,
                priority: Priority::default(),
                first_rail_timeout: FIRST_RAIL,
            };
            let mailboxes = ends::mailboxes_of(side, &mailboxes);
            Driver::new(process, context, path, terms, mailboxes, rails, &missing)
        };
        let [send_rails, recv_rails] = rails;
        let drivers = [
            driver(0, Role::Sender, Arc::new(Busy(send.clone())), send_rails),
            driver(1, Role::Receiver, Arc::new(Busy(recv.clone())), recv_rails),
        ];
        Pair {
            send,
            recv,
            contexts,
            drivers,
            wakers,
            mailboxes,
            missing_queue_pairs: 2 * queue_count * start.not_yet.count_ones() as usize,
        }
    }

    /// Returns the striping of the sender and of the receiver over these lanes.
    fn striping(&self, hosts: [usize; 2], lanes: &[Lane]) -> [Striping; 2] {
        let paths = ends::paths(lanes);
        hosts.map(|host| negotiate::striping(self.hosts[host].process(), &Paths::new(&paths)))
    }
}

/// Takes the queue pairs of the lanes in the bit mask `not_yet`.
fn leave_out(not_yet: u8, striping: &mut Striping, lanes: &mut [Lane]) {
    for (id, lane) in LaneId::all(lanes.len()).zip(lanes) {
        if not_yet & id.bit() != 0 {
            striping.lose(id);
            *lane = Lane::without_queues(&lane.rail, lane.peer_rail.clone());
        }
    }
}

fn parts(
    side: usize,
    lanes: Vec<Lane>,
    mailboxes: &[Arc<Region>; 2],
    striping: Striping,
) -> PathParts {
    PathParts {
        lanes,
        region: Arc::clone(&mailboxes[side]),
        peer_addr: mailboxes[1 - side].addr(),
        chunk_bytes: CHUNK,
        striping,
    }
}

fn bring_up_host(dir: &Path, fabric: &str, profile: &str, more: &[(&str, &str)]) -> Arc<Host> {
    let exe = std::env::current_exe().unwrap();
    let library = exe.ancestors().nth(2).unwrap().join("softverbs-ibverbs");
    assert!(
        library.exists(),
        "{} is not built: cargo build (with --release for a release test)",
        library.display()
    );
    let variables = [
        ("SOFTVERBS_DIR", dir.display().to_string()),
        ("SOFTVERBS_FABRIC", fabric.to_owned()),
        ("SOFTVERBS_PROFILE", profile.to_owned()),
        ("SOFTVERBS_NODE", "0".to_owned()),
        // Polls return less than they could, queue pairs are served out of turn, and bytes and
        // acknowledgements arrive late.
        ("SOFTVERBS_ADVERSARY", "7".to_owned()),
    ];
    for (name, value) in variables {
        // SAFETY: called before the fabric reads its settings, and no other code of this program
        // reads the environment meanwhile.
        unsafe { std::env::set_var(name, value) };
    }
    let settings = [
        ("NCCL_IBVERBS_LIB", library.display().to_string()),
        (
            "NCCL_SPARK_SYSFS",
            dir.join(fabric).join("sys").display().to_string(),
        ),
        ("NCCL_SOCKET_IFNAME", "lo".to_owned()),
        // 4.096 us x 8 x 7: a lost rail shows after 229 us of virtual time.
        ("NCCL_IB_TIMEOUT", "3".to_owned()),
        ("NCCL_SPARK_MIN_SHARE_BYTES", "128".to_owned()),
        ("NCCL_SPARK_PROBE_TIMEOUT_MS", "100".to_owned()),
        ("NCCL_SPARK_LOSS_TIMEOUT_S", "3600".to_owned()),
    ];
    let more = more
        .iter()
        .map(|(name, value)| (*name, (*value).to_owned()));
    let settings: Vec<_> = settings
        .into_iter()
        .chain(more)
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    bring_up(Config::from_variables(&settings).unwrap())
        .unwrap()
        .0
}
