//! What a NIC would do by itself: takes work requests that peers have posted for this process's queue pairs, and serves them.

use crate::fabric::Node;
use crate::os::memory::Bounce;
use crate::os::process::{sleep_while, wake};
use crate::queue_pair::QueuePair;
use std::sync::atomic::Ordering;
use std::sync::{Arc, RwLock, Weak};
use std::time::Duration;

/// What `sleeping` of a process says: its engine is not asleep.
pub const AWAKE: u32 = 0;
/// It sleeps for a short time, as the engine of a process that polls does: who polls drives it.
pub const NAPPING: u32 = 1;
/// It sleeps until something comes.
pub const ASLEEP: u32 = 2;
/// How long after its last poll a process still counts as polling, so that an engine that naps need not be woken.
const POLLING_NS: u64 = 100_000;
/// How long after its last poll a process is expected to poll again.
const RECENTLY_NS: u64 = 2_000_000;
/// How long an engine sleeps at most while its process polls.
const SHORT_NAP: Duration = Duration::from_micros(50);
/// How long an engine sleeps at most while queue pairs are there: what it could have missed waits no longer.
const NAP: Duration = Duration::from_millis(1);
/// How long an engine sleeps at most while there are none.
const REST: Duration = Duration::from_millis(100);
/// Up to this long an engine waits awake for what is due.
const SPIN_NS: u64 = 20_000;
/// How many pieces a queue pair is served at most before the engine looks for other work.
const PIECES_A_TURN: usize = 16;

/// The engine of one device.
#[derive(Default)]
pub struct Engine {
    active: Vec<Arc<QueuePair>>,
    bounce: Bounce,
    turn: u64,
}

/// What came of serving a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Served {
    /// Nothing is posted for it.
    Idle,
    /// Nothing can be done before this time.
    Until(u64),
    /// There is more to do.
    More,
}

/// Lets the engine of a device go on, unless another thread is at it. When it has to go on again, if that is known.
pub fn drive(node: &Node, device: usize, now_ns: u64) -> Option<u64> {
    let mut engine = node.engine(device).try_lock().ok()?;
    engine.answer_doorbells(node, device);
    engine.serve(node, now_ns)
}

impl Engine {
    fn answer_doorbells(&mut self, node: &Node, device: usize) {
        let process = node.process();
        let mut rung = process.rung[device].swap(0, Ordering::AcqRel);
        while rung != 0 {
            let word = rung.trailing_zeros() as usize;
            rung &= rung - 1;
            let mut bells = process.doorbells[device][word].swap(0, Ordering::AcqRel);
            while bells != 0 {
                let slot = word * 64 + bells.trailing_zeros() as usize;
                bells &= bells - 1;
                if let Some(qp) = node.find(slot)
                    && !self.active.iter().any(|known| known.number() == qp.number())
                {
                    self.active.push(qp);
                }
            }
        }
    }

    /// Serves what is due. When something is due again, if that is known.
    fn serve(&mut self, node: &Node, now_ns: u64) -> Option<u64> {
        // Several take turns by the piece, as a NIC arbitrates: else one that always has more, being looked at first whenever the
        // rail is free, would keep the others waiting for as long as it has.
        let (passes, pieces) = if self.active.len() > 1 { (PIECES_A_TURN, 1) } else { (1, PIECES_A_TURN) };
        for _ in 1..passes {
            match self.pass(node, now_ns, pieces) {
                Some(when) if when <= now_ns => {}
                later => return later,
            }
        }
        self.pass(node, now_ns, pieces)
    }

    /// Looks at each queue pair once, at those last that had their turn last.
    fn pass(&mut self, node: &Node, now_ns: u64, pieces: usize) -> Option<u64> {
        let mut soonest: Option<u64> = None;
        let mut at = 0;
        for _ in 0..self.active.len() {
            if let Some(seed) = node.adversary() {
                // Out of turn: some are passed over this time.
                self.turn = self.turn.wrapping_add(1);
                if (self.turn ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 62 == 0 {
                    soonest = Some(now_ns);
                    at += 1;
                    continue;
                }
            }
            let when = match self.active[at].serve(now_ns, pieces, &mut self.bounce) {
                Served::Idle => {
                    self.active.remove(at);
                    continue;
                }
                Served::Until(when) => {
                    at += 1;
                    when
                }
                Served::More => {
                    self.active[at..].rotate_left(1);
                    now_ns
                }
            };
            soonest = Some(soonest.map_or(when, |s| s.min(when)));
        }
        soonest
    }

    /// Forgets a queue pair.
    pub fn forget(&mut self, number: u32) {
        self.active.retain(|qp| qp.number() != number);
    }
}

/// Tells the process of the queue pair in `slot` that something was posted for it.
pub fn ring(node: &Node, slot: usize, now_ns: u64) {
    let qp = node.qp_memory(slot);
    let device = qp.device.load(Ordering::Relaxed) as usize % crate::profile::MAX_RAILS;
    let place = qp.process.load(Ordering::Relaxed) as usize % crate::os::shm::MAX_PROCESSES;
    let process = &node.memory.processes[place];
    process.doorbells[device][slot / 64].fetch_or(1 << (slot % 64), Ordering::AcqRel);
    process.rung[device].fetch_or(1 << (slot / 64), Ordering::SeqCst);
    // Sequentially consistent with the sleeper, who announces its sleep and then looks at the doorbells.
    let is_to_wake = match process.sleeping.load(Ordering::SeqCst) {
        AWAKE => false,
        NAPPING => now_ns.saturating_sub(process.polled_ns.load(Ordering::Relaxed)) > POLLING_NS,
        // That it has just polled tells nothing: who has asked for bytes and looks for them in memory need not poll again.
        _ => true,
    };
    if is_to_wake && process.sleeping.swap(AWAKE, Ordering::SeqCst) != AWAKE {
        wake(&process.sleeping);
    }
}

/// Starts the engine's threads. They run until the process ends, asleep when there is nothing to do.
pub fn start(node: &Arc<Node>) {
    for index in 0..node.threads() {
        let weak = Arc::downgrade(node);
        let thread = std::thread::Builder::new().name(format!("softverbs-{index}"));
        if let Err(error) = thread.spawn(move || run(&weak, index)) {
            // Polling still drives the engine; only a process that does not poll would wait.
            eprintln!("softverbs: no engine thread: {error}");
        }
    }
}

fn run(node: &Weak<Node>, index: usize) {
    crate::os::process::block_signals();
    while let Some(node) = node.upgrade() {
        let now = node.memory.now_ns();
        let mut soonest: Option<u64> = None;
        for device in (index..node.devices().len()).step_by(node.threads()) {
            let due = drive(&node, device, now);
            soonest = [soonest, due].into_iter().flatten().min();
        }
        if index == 0 {
            node.watch_ports();
            for qp in node.all_qps() {
                qp.tend(now);
            }
        }
        rest(&node, index, soonest);
    }
}

fn rest(node: &Node, index: usize, soonest: Option<u64>) {
    let now = node.memory.now_ns();
    let ahead = soonest.map(|due| due.saturating_sub(now));
    let process = node.process();
    let polls = now.saturating_sub(process.polled_ns.load(Ordering::Relaxed)) < RECENTLY_NS;
    if ahead.is_some_and(|ns| ns <= SPIN_NS) || (polls && node.has_processors_to_spare()) {
        std::thread::yield_now();
        return;
    }
    let (depth, longest) = match (polls, node.has_qps()) {
        // Peers do not wake a process that polls; should it stop just now, nothing waits long.
        (true, _) => (NAPPING, SHORT_NAP),
        (false, true) => (ASLEEP, NAP),
        (false, false) => (ASLEEP, REST),
    };
    // Only who wakes takes the mark back: another engine of this process may still sleep by it, and deeper.
    let mark = process.sleeping.fetch_max(depth, Ordering::SeqCst).max(depth);
    let mut mine = (index..node.devices().len()).step_by(node.threads());
    if mine.any(|device| process.rung[device].load(Ordering::SeqCst) != 0) {
        return;
    }
    sleep_while(&process.sleeping, mark, ahead.map_or(longest, |ns| longest.min(Duration::from_nanos(ns))));
}

/// Registered memory, by key.
#[derive(Debug, Default)]
pub struct Regions(RwLock<Vec<Option<Region>>>);

/// A registered piece of this process's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Its key, local and remote.
    pub key: u32,
    /// Its device.
    pub device: usize,
    /// Where it begins.
    pub addr: u64,
    /// How long it is.
    pub bytes: u64,
    /// `ibv_access_flags`.
    pub access: u32,
}

impl Regions {
    /// Adds one; `None` when there are too many. Keys are not used again soon: their upper bits count.
    pub fn add(&self, device: usize, addr: u64, bytes: u64, access: u32) -> Option<u32> {
        let mut all = self.0.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        let place = match all.iter().position(Option::is_none) {
            Some(place) => place,
            None if all.len() < 1 << 18 => {
                all.push(None);
                all.len() - 1
            }
            None => return None,
        };
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(1);
        let key = (place as u32) << 14 | (COUNT.fetch_add(1, Ordering::Relaxed) & 0x3fff);
        all[place] = Some(Region { key, device, addr, bytes, access });
        Some(key)
    }

    /// Takes one away; whether it was there.
    pub fn remove(&self, key: u32) -> bool {
        let mut all = self.0.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        match all.get_mut((key >> 14) as usize) {
            Some(place) if place.is_some_and(|region| region.key == key) => place.take().is_some(),
            _ => false,
        }
    }

    /// Whether `bytes` at `addr` may be reached on this device with this key and all of `access`.
    pub fn allows(&self, key: u32, device: usize, addr: u64, bytes: u64, access: u32) -> bool {
        let all = self.0.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let found = all.get((key >> 14) as usize).copied().flatten().filter(|r| r.key == key && r.device == device);
        found.is_some_and(|region| {
            let end = addr.checked_add(bytes);
            region.access & access == access
                && addr >= region.addr
                && end.is_some_and(|end| end <= region.addr + region.bytes)
        })
    }
}
