//! A fabric, and this process's place in it.

use crate::engine::{Engine, Serve};
use crate::folder::Folder;
use crate::os::process::{Bell, let_peers_read, pid_namespace, started};
use crate::os::shm::{self, DOORBELL_WORDS, FabricMemory, MAX_NODES, MAX_PROCESSES, ProcessMemory, QpMemory};
use crate::pacing::Resource;
use crate::profile::{MAX_RAILS, Profile, RailSpec};
use crate::regions::Regions;
use crate::settings::Settings;
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use verbs_sys::{IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR};

/// A process's place in a fabric.
pub struct Node {
    /// The shared file.
    pub memory: &'static FabricMemory,
    /// Place of this process in it.
    pub(crate) place: usize,
    /// The machine that this process is on.
    pub(crate) node: usize,
    devices: Vec<Device>,
    engines: Vec<Mutex<Engine>>,
    events: Vec<Events>,
    qps: Mutex<HashMap<usize, Weak<dyn Serve>>>,
    /// Registered memory.
    pub(crate) regions: Regions,
    adversary: Option<u64>,
    threads: usize,
    spare: bool,
    running: AtomicBool,
    /// Others see by its lock that the fabric is used.
    _user: File,
}

/// An RDMA device of this machine.
#[derive(Debug, Clone)]
pub struct Device {
    /// Its name.
    pub(crate) name: String,
    /// Node GUID, in this machine's byte order.
    pub(crate) guid: u64,
    /// Its RoCE v2 addresses: link-local, then IPv4-mapped.
    pub gids: Vec<[u8; 16]>,
    /// What its port says of its speed, in Mb/s.
    pub(crate) speed_mbps: u32,
    /// Path MTU in bytes.
    pub(crate) mtu_bytes: u32,
    /// Largest message in bytes.
    pub(crate) max_message_bytes: u32,
    spec: RailSpec,
    links: usize,
}

/// An asynchronous event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// An `ibv_event_type`.
    pub kind: u32,
    /// The port.
    pub(crate) port: u8,
    /// The queue pair, for events of one.
    pub(crate) qp: Option<u32>,
}

#[derive(Debug)]
struct Events {
    queue: Mutex<VecDeque<Event>>,
    bell: Bell,
    was_down: AtomicBool,
}

impl Node {
    /// This process's place in the fabric that its environment names. It joins once, and stays.
    ///
    /// # Errors
    /// Says which setting is not usable, or what is in the way.
    pub(crate) fn join() -> Result<Arc<Node>, String> {
        static JOINED: OnceLock<Result<Arc<Node>, String>> = OnceLock::new();
        JOINED.get_or_init(|| Settings::from_environment().and_then(|settings| Self::enter(&settings))).clone()
    }

    /// Joins a fabric as one more process, though it be this one again.
    ///
    /// # Errors
    /// As [`Node::join`].
    pub fn enter(settings: &Settings) -> Result<Arc<Node>, String> {
        let folder = Folder::new(&settings.dir, &settings.fabric);
        let _door = folder.door()?;
        if folder.path().join("fabric").exists() && !folder.has_users() {
            // The last run is over: the next may have another profile.
            folder.clear()?;
        }
        let wanted = Profile::load(&settings.profile, settings.scale)?;
        let (memory, profile) = folder.open(Some(&wanted))?;
        let user = folder.use_it()?;
        let (place, node) = seat(memory, settings)?;
        let_peers_read();
        let devices: Vec<Device> = (0..profile.rails.len()).map(|index| Device::new(&profile, index, node)).collect();
        let events = devices.iter().map(|_| Events::new()).collect::<Result<_, i32>>();
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
        Ok(Arc::new(Node {
            memory,
            place,
            node,
            engines: devices.iter().map(|_| Mutex::default()).collect(),
            events: events.map_err(|e| format!("no event descriptor: {}", std::io::Error::from_raw_os_error(e)))?,
            threads: settings.threads.unwrap_or(processors / 4).clamp(1, devices.len()),
            spare: processors >= 8,
            devices,
            qps: Mutex::default(),
            regions: Default::default(),
            adversary: settings.adversary,
            running: AtomicBool::new(false),
            _user: user,
        }))
    }

    /// This machine's devices.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Whether a device's port is up.
    pub fn port_up(&self, device: usize) -> bool {
        self.memory.rails[self.node][device].down.load(Ordering::Acquire) == 0
    }

    /// A descriptor that is readable while a device has events.
    pub(crate) fn event_fd(&self, device: usize) -> RawFd {
        self.events[device].bell.fd()
    }

    /// The next event of a device. Each takes one announcement from the descriptor.
    pub fn next_event(&self, device: usize) -> Option<Event> {
        lock(&self.events[device].queue).pop_front()
    }

    /// Waits for an announcement of a device's events, unless its descriptor does not block. Whether there was one.
    pub(crate) fn take_event_announcement(&self, device: usize) -> bool {
        let events = &self.events[device];
        let took = events.bell.take();
        // The descriptor counts all announcements at once: leave one for those that are still queued.
        if lock(&events.queue).len() > 1 {
            events.bell.ring();
        }
        took
    }

    /// Something happened to a device.
    pub(crate) fn announce(&self, device: usize, event: Event) {
        lock(&self.events[device].queue).push_back(event);
        self.events[device].bell.ring();
    }

    /// Looks whether ports have gone up or down.
    pub(crate) fn watch_ports(&self) {
        for (device, events) in self.events.iter().enumerate() {
            let down = !self.port_up(device);
            if events.was_down.swap(down, Ordering::Relaxed) != down {
                let kind = if down { IBV_EVENT_PORT_ERR } else { IBV_EVENT_PORT_ACTIVE };
                self.announce(device, Event { kind, port: 1, qp: None });
            }
        }
    }

    /// The machine and device that a GID belongs to.
    pub(crate) fn whose(&self, gid: &[u8; 16]) -> Option<(usize, usize)> {
        let candidates = (0..MAX_NODES).flat_map(|node| (0..self.devices.len()).map(move |device| (node, device)));
        candidates.into_iter().find(|&(node, device)| gids(node, device).contains(gid))
    }

    /// This process's seat.
    pub fn process(&self) -> &'static ProcessMemory {
        &self.memory.processes[self.place]
    }

    /// A queue pair, as its peer sees it.
    pub(crate) fn qp_memory(&self, slot: usize) -> &'static QpMemory {
        &self.memory.qps[slot % shm::MAX_QPS]
    }

    /// What a message from a device of machine `node` to the same device of machine `to` passes through.
    pub(crate) fn way(&self, device: usize, node: usize, to: usize) -> [&'static Resource; 6] {
        let spec = &self.devices[device].spec;
        let cable = self.devices[device].links + spec.cable;
        let (from, into) = (&self.memory.shared[node], &self.memory.shared[to]);
        let (out, home) = (&self.memory.rails[node][device].way.tx, &self.memory.rails[to][device].way.rx);
        [out, &from[spec.link].tx, &from[cable].tx, &into[cable].rx, &into[spec.link].rx, home]
    }

    /// One way, in nanoseconds.
    pub(crate) fn latency_ns(&self, device: usize) -> u64 {
        self.devices[device].spec.latency_ns
    }

    /// What one queue pair of a device carries, in Mb/s; 0: no limit.
    pub(crate) fn qp_rate_mbps(&self, device: usize) -> f64 {
        self.devices[device].spec.qp_mbps
    }

    /// The adversary's seed.
    pub(crate) fn adversary(&self) -> Option<u64> {
        self.adversary
    }

    /// How many engine threads there shall be.
    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// Whether engines may stay awake while the process works.
    pub(crate) fn has_processors_to_spare(&self) -> bool {
        self.spare
    }

    /// The engine of a device.
    pub(crate) fn engine(&self, device: usize) -> &Mutex<Engine> {
        &self.engines[device]
    }

    /// Lets the engine of a device continue, unless another thread drives it now. Returns when it has to continue, if that is known.
    pub(crate) fn drive(&self, device: usize, now_ns: u64) -> Option<u64> {
        let mut engine = self.engines[device].try_lock().ok()?;
        engine.answer_doorbells(self.process(), device, |slot| self.find(slot));
        engine.serve(self.adversary, now_ns)
    }

    /// Whether the caller is to start the engines' threads: once in a process, and never in virtual time.
    pub(crate) fn claim_threads(&self) -> bool {
        self.memory.virtual_clock.load(Ordering::Acquire) == 0 && !self.running.swap(true, Ordering::AcqRel)
    }

    /// Adds a queue pair of this process.
    pub(crate) fn enlist(&self, slot: usize, qp: Weak<dyn Serve>) {
        lock(&self.qps).insert(slot, qp);
    }

    /// Forgets a queue pair.
    pub(crate) fn strike(&self, slot: usize) {
        lock(&self.qps).remove(&slot);
    }

    /// A queue pair of this process.
    pub(crate) fn find(&self, slot: usize) -> Option<Arc<dyn Serve>> {
        lock(&self.qps).get(&slot)?.upgrade()
    }

    /// Whether any queue pair is there.
    pub(crate) fn has_qps(&self) -> bool {
        !lock(&self.qps).is_empty()
    }

    /// All queue pairs of this process.
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
            gids: gids(node, index).to_vec(),
            speed_mbps: (spec.speed_mbps as u32).max(1),
            mtu_bytes: spec.mtu_bytes,
            max_message_bytes: 1 << 30,
            spec,
            links: profile.links.len(),
        }
    }
}

impl Events {
    fn new() -> Result<Self, i32> {
        Ok(Self { queue: Mutex::default(), bell: Bell::new()?, was_down: AtomicBool::new(false) })
    }
}

/// A rail's addresses: link-local as from a hardware address, and 192.168.(100 + rail).(machine + 1).
fn gids(node: usize, device: usize) -> [[u8; 16]; 2] {
    let (n, d) = (node as u8, device as u8);
    let link_local = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0x5e, 0x5f, 0x5f, 0xff, 0xfe, 0x5f, n, d];
    let ipv4 = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 168, 100 + d, n + 1];
    [link_local, ipv4]
}

/// Takes a place for this process, after those of dead ones have been cleared.
fn seat(memory: &FabricMemory, settings: &Settings) -> Result<(usize, usize), String> {
    let namespace = pid_namespace();
    let first = memory.pid_namespace.compare_exchange(0, namespace, Ordering::AcqRel, Ordering::Acquire);
    if first.is_err_and(|other| other != namespace) {
        return Err(format!(
            "the fabric {:?} in {} is used by processes of another PID namespace (container), whose memory this process cannot \
             read: set SOFTVERBS_FABRIC or SOFTVERBS_DIR to another one, or let the containers share one PID namespace",
            settings.fabric,
            settings.dir.display()
        ));
    }
    for (place, process) in memory.processes.iter().enumerate() {
        if process.pid.load(Ordering::Acquire) != 0 && !memory.alive(place) {
            clear(memory, place);
        }
    }
    let taken = |node: usize| {
        memory
            .processes
            .iter()
            .any(|p| p.pid.load(Ordering::Acquire) != 0 && p.node.load(Ordering::Acquire) as usize == node)
    };
    let node = match settings.node {
        Some(node) => node,
        None => (0..MAX_NODES)
            .find(|node| !taken(*node))
            .ok_or(format!("all {MAX_NODES} machines of the fabric are taken"))?,
    };
    let pid = std::process::id();
    let free = memory.processes.iter().position(|process| process.pid.load(Ordering::Acquire) == 0);
    let place = free.ok_or(format!("{MAX_PROCESSES} processes are in the fabric already"))?;
    let process = &memory.processes[place];
    process.node.store(node as u32, Ordering::Relaxed);
    process.started.store(started(pid).unwrap_or(0), Ordering::Relaxed);
    process.pid.store(pid, Ordering::Release);
    Ok((place, node))
}

/// Clears the place of a dead process, and its queue pairs.
fn clear(memory: &FabricMemory, place: usize) {
    for qp in &memory.qps {
        // What it held would look held by whoever gets this place next.
        let _ = qp.holder.compare_exchange(place as u32 + 1, 0, Ordering::AcqRel, Ordering::Relaxed);
        if qp.number.load(Ordering::Acquire) != 0 && qp.process.load(Ordering::Acquire) as usize == place {
            qp.number.store(0, Ordering::Release);
        }
    }
    let process = &memory.processes[place];
    process.rung.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    process
        .doorbells
        .iter()
        .flatten()
        .take(MAX_RAILS * DOORBELL_WORDS)
        .for_each(|word| word.store(0, Ordering::Relaxed));
    process.sleeping.store(0, Ordering::Relaxed);
    process.pid.store(0, Ordering::Release);
}

/// Locks; a panic in another holder does not make its content unusable here.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
