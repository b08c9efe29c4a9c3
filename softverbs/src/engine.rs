//! The engine of a device does a NIC's work: it takes the work requests that peers have posted for
//! this process's queue pairs, and serves the queue pairs in turn. A *piece* is the part of a
//! request that is moved at once, at most 64 KiB (`os::memory::BOUNCE_BYTES`). The *doorbells* of a
//! process are bits in shared memory, one for each of its queue pairs. A peer that posts a request
//! sets the bit.

use crate::os::memory::Bounce;
use crate::os::process::wake;
use crate::os::shm::{FabricMemory, MAX_PROCESSES, MAX_QPS, ProcessMemory};
use crate::profile::MAX_RAILS;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Value of a process's `sleeping` word while its engine is awake.
pub const AWAKE: u32 = 0;
/// Value while the engine sleeps for a short time, because its process polls. Each poll does the
/// engine's work.
pub const NAPPING: u32 = 1;
/// Value while the engine sleeps, and a post must wake it.
pub const ASLEEP: u32 = 2;
/// Time after a poll in which a process counts as polling. During this time, a post does not wake
/// the process's napping engine.
const POLLING_NS: u64 = 100_000;
/// Maximum number of pieces that one call of [`Engine::serve`] moves for one queue pair.
const PIECES_A_TURN: usize = 16;

pub(crate) trait Serve: Send + Sync {
    fn number(&self) -> u32;

    /// Serves the peer's due requests. Stops after `pieces` pieces, and then returns
    /// [`Served::More`].
    fn serve(&self, now_ns: u64, pieces: usize, bounce: &mut Bounce) -> Served;

    /// Collects completed sends for a program that waits for events. Called periodically.
    fn collect_sends(&self, now_ns: u64);

    /// Destroys a queue pair that its program destroyed earlier, while no such command reached the
    /// device. Called after the removal of the device's function.
    fn end(&self);
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Served {
    /// There is nothing to serve until the doorbell rings again.
    Idle,
    /// Nothing can be done before this time.
    Until(u64),
    More,
}

#[derive(Default)]
pub(crate) struct Engine {
    active: Vec<Arc<dyn Serve>>,
    bounce: Bounce,
    turn: u64,
}

impl Engine {
    /// Adds the queue pairs whose doorbells peers have rung to those that the engine serves. `find`
    /// returns the queue pair in a slot of the shared memory.
    pub(crate) fn answer_doorbells(
        &mut self,
        process: &ProcessMemory,
        device: usize,
        find: impl Fn(usize) -> Option<Arc<dyn Serve>>,
    ) {
        let mut rung = process.rung[device].swap(0, Ordering::AcqRel);
        while rung != 0 {
            let word = rung.trailing_zeros() as usize;
            rung &= rung - 1;
            let mut bells = process.doorbells[device][word].swap(0, Ordering::AcqRel);
            while bells != 0 {
                let slot = word * 64 + bells.trailing_zeros() as usize;
                bells &= bells - 1;
                if let Some(qp) = find(slot)
                    && !self
                        .active
                        .iter()
                        .any(|known| known.number() == qp.number())
                {
                    self.active.push(qp);
                }
            }
        }
    }

    /// Serves the due requests. Returns the time at which there is more to do, or `None` if that
    /// depends on a doorbell. With an adversary's seed, the queue pairs are served out of turn.
    pub(crate) fn serve(&mut self, adversary: Option<u64>, now_ns: u64) -> Option<u64> {
        // Queue pairs take turns of one piece each, as on a NIC. Otherwise a queue pair that always
        // has more to send would be first whenever the rail is free.
        let (passes, pieces) = if self.active.len() > 1 {
            (PIECES_A_TURN, 1)
        } else {
            (1, PIECES_A_TURN)
        };
        for _ in 1..passes {
            match self.pass(adversary, now_ns, pieces) {
                Some(when) if when <= now_ns => {}
                later => return later,
            }
        }
        self.pass(adversary, now_ns, pieces)
    }

    /// Serves each queue pair once. A queue pair that has more to send moves to the end.
    fn pass(&mut self, adversary: Option<u64>, now_ns: u64, pieces: usize) -> Option<u64> {
        let mut soonest: Option<u64> = None;
        let mut at = 0;
        for _ in 0..self.active.len() {
            if let Some(seed) = adversary {
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

    pub(crate) fn forget(&mut self, number: u32) {
        self.active.retain(|qp| qp.number() != number);
    }
}

/// Rings the doorbell of the queue pair in `slot` after a post, and wakes its process if necessary.
pub(crate) fn ring(memory: &FabricMemory, slot: usize, now_ns: u64) {
    let slot = slot % MAX_QPS;
    let qp = &memory.qps[slot];
    let device = qp.device.load(Ordering::Relaxed) as usize % MAX_RAILS;
    let place = qp.process.load(Ordering::Relaxed) as usize % MAX_PROCESSES;
    let process = &memory.processes[place];
    process.doorbells[device][slot / 64].fetch_or(1 << (slot % 64), Ordering::AcqRel);
    process.rung[device].fetch_or(1 << (slot / 64), Ordering::SeqCst);
    // Sequentially consistent: this function sets a bit of `rung`, and then reads `sleeping`. The
    // sleeper sets `sleeping`, and then reads `rung`. So at least one of the two sees what the
    // other has set.
    let is_to_wake = match process.sleeping.load(Ordering::SeqCst) {
        AWAKE => false,
        NAPPING => now_ns.saturating_sub(process.polled_ns.load(Ordering::Relaxed)) > POLLING_NS,
        // An engine that sleeps deeply is woken even after a recent poll, because a program that
        // waits for bytes may not poll again.
        _ => true,
    };
    if is_to_wake && process.sleeping.swap(AWAKE, Ordering::SeqCst) != AWAKE {
        wake(&process.sleeping);
    }
}
