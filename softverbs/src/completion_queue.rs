//! Completion queues.
//!
//! When a completion finds its queue full, the program gets `IBV_EVENT_CQ_ERR` and the queue goes
//! to error, "and the CQ cannot be used" (ibv_poll_cq(3)). The InfiniBand specification (volume 1,
//! affiliated asynchronous errors) does not say whether the completions in the queue can still be
//! polled; here they cannot. By the specification, each queue pair that has to add another
//! completion goes to error (`IBV_EVENT_QP_FATAL`, a local work queue catastrophic error).

use crate::fabric::{Event, EventObject, Node, lock};
use crate::hotplug::Phase;
use crate::os::shm::RailMemory;
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use verbs_sys::IBV_EVENT_CQ_ERR;

/// A completion queue.
pub struct CompletionQueue {
    number: u32,
    node: Arc<Node>,
    device: usize,
    generation: u32,
    capacity: usize,
    entries: Mutex<Entries>,
    /// Queue pairs with unfinished sends. The sends' completions go to this queue.
    senders: Mutex<Vec<Arc<dyn SendQueue>>>,
    /// Queue pairs that the next `reap` adds to `senders`. The order of locks is: `senders`, a
    /// queue pair, `joining`. `reap` locks `senders` and then a queue pair. `expect` may be called
    /// under a queue pair's lock, so it must not lock `senders`: it adds to this list instead.
    joining: Mutex<Vec<Arc<dyn SendQueue>>>,
    /// Readable from a notification until the program takes it.
    bell: EventFd,
    armed: AtomicU32,
    polls: AtomicU64,
}

enum Entries {
    Kept(VecDeque<Completion>),
    Overrun,
}

/// Error of a completion queue that was overrun. The queue pair that made the completion must go to
/// error too.
#[derive(Debug)]
pub(crate) struct QueueInError;

pub(crate) trait SendQueue: Send + Sync {
    fn number(&self) -> u32;

    /// Adds the completions of finished sends to `cq`. Returns true if the next
    /// [`CompletionQueue::reap`] must call this again: either sends are still under way, or the
    /// device's firmware has failed. A failed device may work again and complete its sends
    /// ([`crate::hotplug`]).
    fn reap(&self, now_ns: u64, cq: &CompletionQueue) -> bool;
}

/// A completion, with the fields of `ibv_wc`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Completion {
    /// The work request's `wr_id`.
    pub wr_id: u64,
    /// `ibv_wc_status`.
    pub status: u32,
    /// `ibv_wc_opcode`.
    pub opcode: u32,
    /// Always 0.
    pub vendor_err: u32,
    /// Bytes received, read or written.
    pub bytes: u32,
    /// Immediate data, in the byte order in which the sender's memory has it.
    pub imm: u32,
    /// `ibv_wc_flags`: `IBV_WC_WITH_IMM` or 0.
    pub flags: u32,
    /// This side's queue pair.
    pub qp_num: u32,
    /// The peer's queue pair.
    pub src_qp: u32,
}

const ARMED: u32 = 1;
const ARMED_SOLICITED: u32 = 2;

impl CompletionQueue {
    /// Creates a queue with room for `entries` completions. Fails with an `errno`.
    pub fn new(node: &Arc<Node>, device: usize, entries: usize) -> Result<Arc<Self>, i32> {
        static COUNT: AtomicU32 = AtomicU32::new(1);
        Ok(Arc::new(Self {
            number: COUNT.fetch_add(1, Ordering::Relaxed),
            node: Arc::clone(node),
            device,
            generation: node.presence(device).generation,
            capacity: entries,
            entries: Mutex::new(Entries::Kept(VecDeque::with_capacity(entries))),
            senders: Mutex::default(),
            joining: Mutex::default(),
            bell: EventFd::from_flags(EfdFlags::EFD_CLOEXEC).map_err(|e| e as i32)?,
            armed: AtomicU32::new(0),
            polls: AtomicU64::new(0),
        }))
    }

    /// Identifies the queue in events.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Runs the device's engine, then moves completions to `out` and returns their number. Never
    /// fails.
    ///
    /// Once the device is removed, a poll that finds nothing shows that no completion will follow:
    /// it waits until no other thread is in the middle of serving a request of this device. A
    /// device that has left the bus acknowledges nothing more.
    pub fn poll(&self, out: &mut [Completion]) -> Result<usize, i32> {
        let now = self.node.memory.now_ns();
        self.node.process().polled_ns.store(now, Ordering::Relaxed);
        self.node.run_engine(self.device, now);
        if self.node.presence(self.device).phase_of(self.generation) == Phase::Gone {
            drop(lock(self.node.engine(self.device)));
        }
        self.reap(now);
        let most = match self.node.adversary() {
            // The adversary (`SOFTVERBS_ADVERSARY`) may hold completions back, but only while the
            // device works.
            Some(seed) if self.node.presence(self.device).works(self.generation) => {
                let turn = self.polls.fetch_add(1, Ordering::Relaxed) ^ seed;
                (turn.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61) as usize
            }
            _ => out.len(),
        };
        let mut entries = lock(&self.entries);
        let Entries::Kept(queue) = &mut *entries else {
            return Ok(0);
        };
        let count = queue.len().min(out.len()).min(most);
        for place in &mut out[..count] {
            if let Some(completion) = queue.pop_front() {
                *place = completion;
            }
        }
        Ok(count)
    }

    /// Asks for one event, at the next completion (`ibv_req_notify_cq`). With `solicited_only`,
    /// only a solicited completion or one with an error makes the event.
    pub(crate) fn arm(&self, solicited_only: bool) {
        let (from, to) = if solicited_only {
            (0, ARMED_SOLICITED)
        } else {
            (ARMED_SOLICITED, ARMED)
        };
        // Asking for solicited completions does not undo an earlier request for all completions.
        if self
            .armed
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed)
            .is_err()
            && !solicited_only
        {
            self.armed.store(ARMED, Ordering::Release);
        }
    }

    pub(crate) fn is_armed(&self) -> bool {
        self.armed.load(Ordering::Acquire) != 0
    }

    /// Returns a descriptor that becomes readable when an armed queue gets a completion.
    pub(crate) fn notify_fd(&self) -> RawFd {
        self.bell.as_raw_fd()
    }

    /// Consumes all events that were signalled. Returns false if there was none.
    pub(crate) fn take_notification(&self) -> bool {
        self.bell.read().is_ok()
    }

    /// Adds a completion, and signals an event if the queue is armed for it. Fails if the queue is
    /// full or was overrun before, or if an injected fault is due.
    pub(crate) fn push(&self, completion: Completion, solicited: bool) -> Result<(), QueueInError> {
        let mut entries = lock(&self.entries);
        let Entries::Kept(queue) = &mut *entries else {
            return Err(QueueInError);
        };
        if queue.len() >= self.capacity || RailMemory::is_due(&self.node.rail(self.device).overruns)
        {
            *entries = Entries::Overrun;
            drop(entries);
            let about = EventObject::CompletionQueue(self.number);
            self.node.announce(
                self.device,
                Event {
                    kind: IBV_EVENT_CQ_ERR,
                    about,
                },
            );
            return Err(QueueInError);
        }
        queue.push_back(completion);
        drop(entries);
        let armed = self.armed.load(Ordering::Acquire);
        if armed == ARMED || (armed == ARMED_SOLICITED && (solicited || completion.status != 0)) {
            self.armed.store(0, Ordering::Release);
            let _ = self.bell.write(1);
        }
        Ok(())
    }

    pub(crate) fn reap(&self, now_ns: u64) {
        let mut senders = lock(&self.senders);
        senders.append(&mut lock(&self.joining));
        let mut at = 0;
        while at < senders.len() {
            if senders[at].reap(now_ns, self) {
                at += 1;
            } else {
                senders.swap_remove(at);
            }
        }
    }

    /// Adds a queue pair that has sends to complete. The next [`Self::reap`] asks it for them.
    pub(crate) fn expect(&self, qp: Arc<dyn SendQueue>) {
        lock(&self.joining).push(qp);
    }

    pub(crate) fn forget(&self, number: u32) {
        lock(&self.joining).retain(|qp| qp.number() != number);
        lock(&self.senders).retain(|qp| qp.number() != number);
        if let Entries::Kept(queue) = &mut *lock(&self.entries) {
            queue.retain(|completion| completion.qp_num != number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Settings;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    /// An engine may be serving a queue pair while its function is removed. The engine then adds
    /// one more completion and acknowledges the request, so a poll must not miss the completion:
    /// the peer will not send the bytes again.
    #[test]
    #[allow(clippy::disallowed_methods, reason = "a folder of its own")]
    fn a_poll_after_the_removal_finds_everything_that_was_acknowledged() {
        let dir = std::env::temp_dir().join(format!("softverbs-removal-{}", std::process::id()));
        let settings = Settings {
            dir: dir.clone(),
            fabric: "removal".to_owned(),
            node: Some(0),
            profile: "unpaced".to_owned(),
            scale: 1.0,
            threads: Some(1),
            adversary: None,
        };
        let node = Node::enter(&settings).unwrap();
        let queue = CompletionQueue::new(&node, 0, 4).unwrap();
        let (serves, is_serving) = channel();
        let engine = {
            let node = Arc::clone(&node);
            let queue = Arc::clone(&queue);
            std::thread::spawn(move || {
                let _engine = lock(node.engine(0));
                serves.send(()).unwrap();
                std::thread::sleep(Duration::from_millis(100));
                queue
                    .push(
                        Completion {
                            wr_id: 7,
                            ..Completion::default()
                        },
                        false,
                    )
                    .unwrap();
            })
        };
        is_serving.recv().unwrap();
        node.rail(0).move_to(Phase::Gone);
        let mut out = [Completion::default(); 4];
        assert_eq!((queue.poll(&mut out), out[0].wr_id), (Ok(1), 7));
        engine.join().unwrap();
        std::fs::remove_dir_all(dir).unwrap();
    }
}
