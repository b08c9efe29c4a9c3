//! Completion queues.

use crate::fabric::{Node, lock};
use crate::os::process::Bell;
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A completion queue.
pub struct CompletionQueue {
    node: Arc<Node>,
    device: usize,
    queue: Mutex<VecDeque<Completion>>,
    /// Queue pairs whose sends end here, while some are under way.
    senders: Mutex<Vec<Arc<dyn SendQueue>>>,
    /// Those that have just begun to have some: a lock under which no other is taken, since who adds holds a queue pair that
    /// `reap` may want.
    joining: Mutex<Vec<Arc<dyn SendQueue>>>,
    bell: Bell,
    armed: AtomicU32,
    polls: AtomicU64,
}

/// The send queue of a queue pair, as its completion queue sees it.
pub(crate) trait SendQueue: Send + Sync {
    /// The queue pair's number.
    fn number(&self) -> u32;

    /// Pushes the completions of sends that have ended to `cq`. Returns whether more sends are under way.
    fn reap(&self, now_ns: u64, cq: &CompletionQueue) -> bool;
}

/// A completion, as `ibv_wc` has it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Completion {
    /// The work request's number.
    pub wr_id: u64,
    /// `ibv_wc_status`.
    pub status: u32,
    /// `ibv_wc_opcode`.
    pub opcode: u32,
    /// 0.
    pub vendor_err: u32,
    /// Bytes received, read or written.
    pub bytes: u32,
    /// Immediate data, as the sender had it in memory.
    pub imm: u32,
    /// `IBV_WC_WITH_IMM`.
    pub flags: u32,
    /// The queue pair of this side.
    pub qp_num: u32,
    /// The queue pair of the other side.
    pub src_qp: u32,
}

const ARMED: u32 = 1;
const ARMED_SOLICITED: u32 = 2;

impl CompletionQueue {
    /// A new one, of at least `entries`.
    ///
    /// # Errors
    /// An `errno`.
    pub fn new(node: &Arc<Node>, device: usize, entries: usize) -> Result<Arc<Self>, i32> {
        Ok(Arc::new(Self {
            node: Arc::clone(node),
            device,
            queue: Mutex::new(VecDeque::with_capacity(entries)),
            senders: Mutex::default(),
            joining: Mutex::default(),
            bell: Bell::new()?,
            armed: AtomicU32::new(0),
            polls: AtomicU64::new(0),
        }))
    }

    /// Takes completions out, as many as there are and `out` holds. Lets the device's engine go on first.
    ///
    /// # Errors
    /// None: the result is what `ibv_poll_cq` has.
    pub fn poll(&self, out: &mut [Completion]) -> Result<usize, i32> {
        let now = self.node.memory.now_ns();
        self.node.process().polled_ns.store(now, Ordering::Relaxed);
        self.node.drive(self.device, now);
        self.reap(now);
        let most = match self.node.adversary() {
            // Now and then nothing, now and then less than there is.
            Some(seed) => {
                let turn = self.polls.fetch_add(1, Ordering::Relaxed) ^ seed;
                (turn.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61) as usize
            }
            None => out.len(),
        };
        let mut queue = lock(&self.queue);
        let count = queue.len().min(out.len()).min(most);
        for place in &mut out[..count] {
            if let Some(completion) = queue.pop_front() {
                *place = completion;
            }
        }
        Ok(count)
    }

    /// Asks for one announcement, at the next completion.
    pub(crate) fn arm(&self, solicited_only: bool) {
        let (from, to) = if solicited_only { (0, ARMED_SOLICITED) } else { (ARMED_SOLICITED, ARMED) };
        // Armed for all it stays so, whatever is asked for after.
        if self.armed.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_err() && !solicited_only {
            self.armed.store(ARMED, Ordering::Release);
        }
    }

    /// Whether an announcement is asked for.
    pub(crate) fn is_armed(&self) -> bool {
        self.armed.load(Ordering::Acquire) != 0
    }

    /// A descriptor that is readable when an armed queue got a completion.
    pub(crate) fn notify_fd(&self) -> RawFd {
        self.bell.fd()
    }

    /// Takes the announcements.
    pub(crate) fn take_notification(&self) -> bool {
        self.bell.take()
    }

    /// A completion has come.
    pub(crate) fn push(&self, completion: Completion, solicited: bool) {
        lock(&self.queue).push_back(completion);
        let armed = self.armed.load(Ordering::Acquire);
        if armed == ARMED || (armed == ARMED_SOLICITED && (solicited || completion.status != 0)) {
            self.armed.store(0, Ordering::Release);
            self.bell.ring();
        }
    }

    /// Takes in the ends of sends.
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

    /// A queue pair has sends under way that end here.
    pub(crate) fn expect(&self, qp: Arc<dyn SendQueue>) {
        lock(&self.joining).push(qp);
    }

    /// A queue pair is destroyed: nothing of it is left here.
    pub(crate) fn forget(&self, number: u32) {
        lock(&self.joining).retain(|qp| qp.number() != number);
        lock(&self.senders).retain(|qp| qp.number() != number);
        lock(&self.queue).retain(|completion| completion.qp_num != number);
    }
}
