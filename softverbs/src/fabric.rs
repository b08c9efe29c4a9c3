//! A fabric, and this process's place in it.

use crate::counters::{self, Counter};
use crate::engine::{Engine, Serve};
use crate::folder::Folder;
use crate::hotplug::{Phase, Presence};
use crate::os::process::{let_peers_read, pid_namespace, started};
use crate::os::shm::{
    self, DOORBELL_WORDS, FabricMemory, MAX_PROCESSES, ProcessMemory, QpMemory, RailMemory,
};
use crate::pacing::Resource;
use crate::profile::{MAX_NODES, MAX_RAILS, Profile, RailSpec};
use crate::regions::Regions;
use crate::settings::Settings;
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use verbs_sys::{
    IBV_EVENT_DEVICE_FATAL, IBV_EVENT_GID_CHANGE, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR,
};

/// A process's place in a fabric.
pub struct Node {
    /// The fabric's shared memory.
    pub memory: &'static FabricMemory,
    /// Index of this process in [`FabricMemory::processes`].
    pub(crate) process_index: usize,
    pub(crate) node: usize,
    profile: Profile,
    devices: Vec<Device>,
    engines: Vec<Mutex<Engine>>,
    events: Vec<Events>,
    qps: Mutex<HashMap<usize, Weak<dyn Serve>>>,
    orphans: Mutex<Vec<Orphan>>,
    /// Length of `orphans`. Each poll reads this number, without the lock of `orphans`.
    orphaned: AtomicUsize,
    pub(crate) regions: Regions,
    adversary: Option<u64>,
    threads: usize,
    spare: bool,
    running: AtomicBool,
    trees: PathBuf,
    /// Holds a shared lock on the fabric's file. The lock shows other processes that the fabric is
    /// in use.
    _user: File,
}

/// A queue pair that its program destroyed while the device had failed or programs were cut off
/// from it. The queue pair exists until the device's removal ([`crate::hotplug`]). Until then, the
/// device serves it whenever the device works.
struct Orphan {
    device: usize,
    generation: u32,
    qp: Arc<dyn Serve>,
}

/// An RDMA device of this machine.
#[derive(Debug, Clone)]
pub struct Device {
    pub(crate) name: String,
    /// The device's GUID, in this machine's byte order.
    pub(crate) guid: u64,
    /// RoCE v2 addresses: first a link-local address, then an IPv4-mapped address if the port has a
    /// cable. [`RailMemory::gid_table`] has their indices.
    pub gids: Vec<[u8; 16]>,
    /// The speed that the port reports, in Mb/s.
    pub(crate) speed_mbps: u32,
    pub(crate) mtu_bytes: u32,
    /// Largest message in bytes.
    pub max_message_bytes: u32,
    spec: RailSpec,
    links: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RailOf {
    pub(crate) node: usize,
    pub(crate) device: usize,
}

/// An asynchronous event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// An `ibv_event_type`.
    pub kind: u32,
    /// The object that the event concerns.
    pub about: EventObject,
}

/// The object that an event concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventObject {
    /// The device, not one of its ports or objects.
    Device,
    /// The device's only port.
    Port,
    /// The queue pair of this number.
    QueuePair(u32),
    /// The completion queue of this number.
    CompletionQueue(u32),
}

#[derive(Debug)]
struct Events {
    queue: Mutex<VecDeque<Event>>,
    /// Readable while `queue` may have events.
    bell: EventFd,
    was_down: AtomicBool,
    /// The last GID table that was announced.
    gid_table: AtomicU32,
    /// Number of removals of the function that were announced.
    losses: AtomicU32,
    /// Generation, plus one, of the last function whose firmware failure was announced (0: none).
    failures: AtomicU32,
}

impl Node {
    /// Joins the fabric that the environment names. Later calls return the first call's result. The
    /// error names the wrong setting, or the failed step.
    pub(crate) fn join() -> Result<Arc<Node>, String> {
        static JOINED: OnceLock<Result<Arc<Node>, String>> = OnceLock::new();
        JOINED
            .get_or_init(|| {
                Settings::from_environment().and_then(|settings| Self::enter(&settings))
            })
            .clone()
    }

    /// Joins a fabric as if by a new process, even if this process has joined the fabric before.
    pub fn enter(settings: &Settings) -> Result<Arc<Node>, String> {
        let folder = Folder::new(&settings.dir, &settings.fabric);
        let _membership = folder.lock_membership()?;
        if folder.path().join("fabric").exists() && !folder.has_users() {
            // The last run has ended, and this one may have another profile.
            folder.clear()?;
        }
        let wanted = Profile::load(&settings.profile, settings.scale)?;
        let (memory, profile) = folder.open(Some(&wanted))?;
        let user = folder.lock_as_user()?;
        let (process_index, node) =
            claim_entry(memory, settings, profile.wires.nodes().unwrap_or(MAX_NODES))?;
        let_peers_read();
        let devices: Vec<Device> = (0..profile.rails.len())
            .map(|index| Device::new(&profile, index, node))
            .collect();
        let events = devices
            .iter()
            .map(|_| Events::new())
            .collect::<nix::Result<_>>();
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
        let node = Arc::new(Node {
            trees: folder.path().join("sys/nodes"),
            memory,
            process_index,
            node,
            profile,
            engines: devices.iter().map(|_| Mutex::default()).collect(),
            events: events.map_err(|e| format!("no event descriptor: {e}"))?,
            threads: settings
                .threads
                .unwrap_or(processors / 4)
                .clamp(1, devices.len()),
            spare: processors >= 8,
            devices,
            qps: Mutex::default(),
            orphans: Mutex::default(),
            orphaned: AtomicUsize::new(0),
            regions: Default::default(),
            adversary: settings.adversary,
            running: AtomicBool::new(false),
            _user: user,
        });
        let rails = (0..node.devices.len()).map(|device| RailOf {
            node: node.node,
            device,
        });
        rails.for_each(|rail| node.publish(rail, &Counter::ALL));
        Ok(node)
    }

    /// Writes counters of a rail into the sysfs tree of its node, if the node has such a tree.
    pub(crate) fn publish(&self, rail: RailOf, counters: &[Counter]) {
        let class = self
            .trees
            .join(rail.node.to_string())
            .join("class/infiniband");
        let device = class.join(&self.devices[rail.device].name);
        if device.exists() {
            counters.iter().for_each(|counter| {
                counters::publish(&device, *counter, || self.rail_of(rail).counted(*counter));
            });
        }
    }

    /// This machine's devices.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Presence of a device's function on the bus.
    pub fn presence(&self, device: usize) -> Presence {
        self.memory.rails[self.node][device].presence()
    }

    pub(crate) fn rail(&self, device: usize) -> &'static RailMemory {
        &self.memory.rails[self.node][device]
    }

    /// True while a device's port is up.
    pub fn port_up(&self, device: usize) -> bool {
        self.memory.rails[self.node][device]
            .down
            .load(Ordering::Acquire)
            == 0
    }

    pub(crate) fn event_fd(&self, device: usize) -> RawFd {
        self.events[device].bell.as_raw_fd()
    }

    /// Takes a device's next event.
    pub fn next_event(&self, device: usize) -> Option<Event> {
        lock(&self.events[device].queue).pop_front()
    }

    /// Waits until a device has an event, and resets the device's descriptor. If the descriptor is
    /// non-blocking, does not wait: returns false if there is no event.
    pub(crate) fn take_event_announcement(&self, device: usize) -> bool {
        let events = &self.events[device];
        let took = events.bell.read().is_ok();
        // Reading the descriptor resets it. The caller takes one event from the queue. If there are
        // more, the descriptor must be readable again.
        if lock(&events.queue).len() > 1 {
            let _ = events.bell.write(1);
        }
        took
    }

    pub(crate) fn announce(&self, device: usize, event: Event) {
        lock(&self.events[device].queue).push_back(event);
        let _ = self.events[device].bell.write(1);
    }

    /// Announces what has happened since the last call: functions that have failed or were removed,
    /// ports that went up or down, and changes of their addresses.
    pub fn watch_ports(&self) {
        for (device, events) in self.events.iter().enumerate() {
            let presence = self.presence(device);
            // The number of removals so far. A function that has come back was removed in between,
            // even if no call saw that.
            let losses = presence.generation + u32::from(presence.phase == Phase::Gone);
            let fatal = Event {
                kind: IBV_EVENT_DEVICE_FATAL,
                about: EventObject::Device,
            };
            if events.losses.swap(losses, Ordering::Relaxed) != losses {
                self.announce(device, fatal);
            }
            let failures = presence.generation + 1;
            if presence.phase == Phase::Failed
                && events.failures.swap(failures, Ordering::Relaxed) != failures
            {
                self.announce(device, fatal);
            }
            if presence.phase != Phase::Here {
                continue;
            }
            let down = !self.port_up(device);
            if events.was_down.swap(down, Ordering::Relaxed) != down {
                let kind = if down {
                    IBV_EVENT_PORT_ERR
                } else {
                    IBV_EVENT_PORT_ACTIVE
                };
                self.announce(
                    device,
                    Event {
                        kind,
                        about: EventObject::Port,
                    },
                );
            }
            let table = self.rail(device).gid_table().word();
            if events.gid_table.swap(table, Ordering::Relaxed) != table {
                self.announce(
                    device,
                    Event {
                        kind: IBV_EVENT_GID_CHANGE,
                        about: EventObject::Port,
                    },
                );
            }
        }
    }

    /// True if packets pass between a device and a peer's rail, provided that both are present.
    pub(crate) fn carries(&self, device: usize, to: RailOf, now_ns: u64) -> bool {
        [self.rail(device), self.rail_of(to)]
            .iter()
            .all(|rail| rail.carries(now_ns))
    }

    /// Resolves the address of the rail `to` for a device, as the kernel does: from the device's
    /// neighbour table, or by asking on the wire. Returns false if nothing answers.
    pub(crate) fn resolves(&self, device: usize, to: RailOf, is_ipv4: bool, now_ns: u64) -> bool {
        let own = self.rail(device);
        let peer = self.rail_of(to);
        let is_found = own.is_neighbour(to.node, to.device, is_ipv4)
            || !own.is_blocked(now_ns)
                && !peer.is_blocked(now_ns)
                && peer.gid_table().has_addresses();
        if is_found {
            own.add_neighbour(to.node, to.device, is_ipv4);
        }
        is_found
    }

    /// True if the packets of a rail's queue pair, including its acknowledgements, do not reach its
    /// peer: they go to another function, or their source address has left the GID table.
    pub(crate) fn is_misrouted(&self, qp: &QpMemory, rail: RailOf) -> bool {
        let own_gid_index = qp.own_gid_index.load(Ordering::Relaxed) as usize;
        qp.misrouted.load(Ordering::Relaxed) != 0
            || self
                .rail_of(rail)
                .gid_table()
                .address_at(own_gid_index)
                .is_none()
    }

    pub(crate) fn rail_of(&self, rail: RailOf) -> &'static RailMemory {
        &self.memory.rails[rail.node][rail.device]
    }

    /// Finds the rail that a device of this machine reaches at an address.
    ///
    /// # Errors
    /// - `ENETUNREACH` if no rail has the address. Also if the profile has no wires and the rail
    ///   that has the address has another name than the device: without wires, the rails of each
    ///   name have a switch of their own.
    /// - `ETIMEDOUT` if the profile has wires and no wire leads to the rail. Then the address does
    ///   not answer.
    pub(crate) fn look_up(&self, device: usize, gid: &[u8; 16]) -> Result<RailOf, i32> {
        let all = (0..MAX_NODES)
            .flat_map(|node| (0..self.devices.len()).map(move |device| RailOf { node, device }));
        let found = all
            .into_iter()
            .find(|at| self.profile.gids(at.node, at.device).contains(gid));
        let found = found.ok_or(libc::ENETUNREACH)?;
        match self
            .profile
            .reaches((self.node, device), (found.node, found.device))
        {
            true => Ok(found),
            false if self.profile.wires.is_empty() => Err(libc::ENETUNREACH),
            false => Err(libc::ETIMEDOUT),
        }
    }

    pub(crate) fn forbids(&self, device: usize) -> bool {
        self.profile.forbids(self.node, device)
    }

    /// This process's part of the shared memory.
    pub fn process(&self) -> &'static ProcessMemory {
        &self.memory.processes[self.process_index]
    }

    pub(crate) fn qp_memory(&self, slot: usize) -> &'static QpMemory {
        &self.memory.qps[slot % shm::MAX_QPS]
    }

    /// The resources that a message from one rail to another uses.
    pub(crate) fn resources_between(&self, from: RailOf, to: RailOf) -> [&'static Resource; 6] {
        let shared = |at: RailOf| {
            let Device { spec, links, .. } = &self.devices[at.device];
            let of_node = &self.memory.shared[at.node];
            (&of_node[spec.link], &of_node[links + spec.cable])
        };
        let ((out_link, out_cable), (in_link, in_cable)) = (shared(from), shared(to));
        let out = &self.rail_of(from).line.tx;
        let home = &self.rail_of(to).line.rx;
        [
            out,
            &out_link.tx,
            &out_cable.tx,
            &in_cable.rx,
            &in_link.rx,
            home,
        ]
    }

    pub(crate) fn latency_ns(&self, device: usize) -> u64 {
        self.devices[device].spec.latency_ns
    }

    /// Rate of one queue pair; 0: no limit.
    pub(crate) fn qp_rate_mbps(&self, device: usize) -> f64 {
        self.devices[device].spec.qp_mbps
    }

    pub(crate) fn adversary(&self) -> Option<u64> {
        self.adversary
    }

    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// True if engine threads may spin instead of sleeping while the process polls.
    pub(crate) fn has_processors_to_spare(&self) -> bool {
        self.spare
    }

    pub(crate) fn engine(&self, device: usize) -> &Mutex<Engine> {
        &self.engines[device]
    }

    /// Runs a device's engine, unless another thread does. Returns the time at which the engine has
    /// to run again, if that is known.
    pub(crate) fn run_engine(&self, device: usize, now_ns: u64) -> Option<u64> {
        self.end_orphans();
        let mut engine = self.engines[device].try_lock().ok()?;
        engine.answer_doorbells(self.process(), device, |slot| self.find(slot));
        engine.serve(self.adversary, now_ns)
    }

    /// True for the first caller, who has to start the threads. Always false in virtual time.
    pub(crate) fn claim_threads(&self) -> bool {
        !self.memory.is_virtual() && !self.running.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn destroy_after_removal(&self, device: usize, generation: u32, qp: Arc<dyn Serve>) {
        let mut orphans = lock(&self.orphans);
        orphans.push(Orphan {
            device,
            generation,
            qp,
        });
        self.orphaned.store(orphans.len(), Ordering::Release);
    }

    fn end_orphans(&self) {
        if self.orphaned.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut orphans = lock(&self.orphans);
        let is_over = |orphan: &mut Orphan| {
            self.presence(orphan.device).phase_of(orphan.generation) == Phase::Gone
        };
        let over: Vec<_> = orphans.extract_if(.., is_over).collect();
        self.orphaned.store(orphans.len(), Ordering::Release);
        drop(orphans);
        over.iter().for_each(|orphan| orphan.qp.end());
    }

    pub(crate) fn add_queue_pair(&self, slot: usize, qp: Weak<dyn Serve>) {
        lock(&self.qps).insert(slot, qp);
    }

    pub(crate) fn remove_queue_pair(&self, slot: usize) {
        lock(&self.qps).remove(&slot);
    }

    pub(crate) fn find(&self, slot: usize) -> Option<Arc<dyn Serve>> {
        lock(&self.qps).get(&slot)?.upgrade()
    }

    pub(crate) fn has_qps(&self) -> bool {
        !lock(&self.qps).is_empty()
    }

    pub(crate) fn all_qps(&self) -> Vec<Arc<dyn Serve>> {
        lock(&self.qps).values().filter_map(Weak::upgrade).collect()
    }
}

impl Device {
    fn new(profile: &Profile, index: usize, node: usize) -> Self {
        let spec = profile.rails[index].clone();
        Self {
            name: spec.name.clone(),
            guid: 0x5f5f_5f00_0000_0000 | (node as u64) << 16 | (index as u64 + 1),
            gids: profile.gids(node, index),
            speed_mbps: (spec.speed_mbps as u32).max(1),
            mtu_bytes: spec.mtu_bytes,
            // 2^`log_max_msg` (`mlx5_query_port_roce` in mlx5's main.c); ConnectX devices report a
            // `log_max_msg` of 30.
            max_message_bytes: 1 << 30,
            spec,
            links: profile.links.len(),
        }
    }
}

impl Device {
    /// Returns the address at an index of the GID table of the device's port, whose memory is
    /// `rail`; `None` for an empty entry.
    pub(crate) fn gid_at(&self, rail: &RailMemory, index: usize) -> Option<[u8; 16]> {
        let address = rail.gid_table().address_at(index)?;
        self.gids.get(address).copied()
    }
}

impl Events {
    fn new() -> nix::Result<Self> {
        let (queue, was_down, gid_table, losses, failures) = Default::default();
        Ok(Self {
            queue,
            bell: EventFd::from_flags(EfdFlags::EFD_CLOEXEC)?,
            was_down,
            gid_table,
            losses,
            failures,
        })
    }
}

/// Clears the shared memory's entries of dead processes, and claims an entry for this process.
/// Returns the entry's index, and the number of the machine that this process belongs to.
fn claim_entry(
    memory: &FabricMemory,
    settings: &Settings,
    nodes: usize,
) -> Result<(usize, usize), String> {
    let namespace = pid_namespace();
    let first =
        memory
            .pid_namespace
            .compare_exchange(0, namespace, Ordering::AcqRel, Ordering::Acquire);
    if first.is_err_and(|other| other != namespace) {
        return Err(format!(
            "the fabric {:?} in {} is used by processes of another PID namespace (container), whose memory this process cannot \
             read: set SOFTVERBS_FABRIC or SOFTVERBS_DIR to another one, or let the containers share one PID namespace",
            settings.fabric,
            settings.dir.display()
        ));
    }
    for (index, process) in memory.processes.iter().enumerate() {
        if process.pid.load(Ordering::Acquire) != 0 && !memory.is_alive(index) {
            clear(memory, index);
        }
    }
    let taken = |node: usize| {
        memory.processes.iter().any(|p| {
            p.pid.load(Ordering::Acquire) != 0 && p.node.load(Ordering::Acquire) as usize == node
        })
    };
    let node = match settings.node {
        Some(node) if node < nodes => node,
        Some(node) => {
            return Err(format!(
                "SOFTVERBS_NODE={node}: the profile has cables for {nodes} machines, 0 to {}",
                nodes - 1
            ));
        }
        None => (0..nodes)
            .find(|node| !taken(*node))
            .ok_or(format!("all {nodes} machines of the fabric are taken"))?,
    };
    let pid = std::process::id();
    let free = memory
        .processes
        .iter()
        .position(|process| process.pid.load(Ordering::Acquire) == 0);
    let process_index = free.ok_or(format!(
        "{MAX_PROCESSES} processes are in the fabric already"
    ))?;
    if !taken(node) {
        // The machine's first process: its links come up.
        memory.rails[node]
            .iter()
            .for_each(|rail| rail.link_up(memory.now_ns()));
    }
    let process = &memory.processes[process_index];
    process.node.store(node as u32, Ordering::Relaxed);
    process
        .started
        .store(started(pid).unwrap_or(0), Ordering::Relaxed);
    process.pid.store(pid, Ordering::Release);
    Ok((process_index, node))
}

fn clear(memory: &FabricMemory, process_index: usize) {
    for qp in &memory.qps {
        // Otherwise the next process in this entry would seem to hold the send queue.
        let _ = qp.holder.compare_exchange(
            process_index as u32 + 1,
            0,
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
        if qp.number.load(Ordering::Acquire) != 0
            && qp.process.load(Ordering::Acquire) as usize == process_index
        {
            qp.number.store(0, Ordering::Release);
        }
    }
    let process = &memory.processes[process_index];
    process
        .rung
        .iter()
        .for_each(|word| word.store(0, Ordering::Relaxed));
    process
        .doorbells
        .iter()
        .flatten()
        .take(MAX_RAILS * DOORBELL_WORDS)
        .for_each(|word| word.store(0, Ordering::Relaxed));
    process.sleeping.store(0, Ordering::Relaxed);
    process.registrations.store(0, Ordering::Relaxed);
    process.pid.store(0, Ordering::Release);
}

/// Locks a mutex, even if a thread has panicked while it held the mutex.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
