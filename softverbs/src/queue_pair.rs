//! Queue pairs: states, receives, and completed sends. `posting.rs` posts sends, and `serve.rs`
//! serves the peer's requests.

mod states;

pub use states::{Change, PathToPeer, State};

use crate::completion_queue::{Completion, CompletionQueue, SendQueue};
use crate::counters::Counter;
use crate::engine;
use crate::fabric::{Event, EventObject, Node, RailOf, lock};
use crate::gid_table;
use crate::hotplug::Phase;
use crate::os::shm::{INLINE_BYTES, MAX_QPS, MAX_SGES, QpMemory, RailMemory, SEND_SLOTS};
use crate::pacing::rnr_wait_ns;
use crate::path::PathFault;
use crate::status;
use crate::threads;
use crate::work_request::{Receive, Request, Sge};
use std::collections::VecDeque;
use std::net::Ipv6Addr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;
use verbs_sys::{IBV_EVENT_QP_ACCESS_ERR, IBV_EVENT_QP_FATAL, ibv_event_type};

/// Duration of Linux' search for the hardware address of a silent peer:
/// `rdma_addr_find_l2_eth_by_grh` passes 1000 ms to `rdma_resolve_ip`
/// (drivers/infiniband/core/addr.c).
const SEARCH: Duration = Duration::from_millis(1000);
/// Maximum number of receives in one queue pair.
pub const MAX_RECEIVES: u32 = 8192;

/// A reliable-connected queue pair of this process.
pub struct QueuePair {
    this: Weak<Self>,
    pub(crate) node: Arc<Node>,
    pub(crate) device: usize,
    generation: u32,
    domain: u32,
    slot: usize,
    number: u32,
    caps: Caps,
    pub(crate) send_cq: Arc<CompletionQueue>,
    pub(crate) recv_cq: Arc<CompletionQueue>,
    /// True while the queue pair is in the list of senders that `send_cq` keeps.
    expected: AtomicBool,
    pub(crate) local: Mutex<Local>,
}

/// The part of a queue pair that is not in shared memory.
pub(crate) struct Local {
    pub(crate) state: State,
    pub(crate) access: u32,
    pub(crate) receives: VecDeque<Receive>,
    pub(crate) remote: Option<Remote>,
    pub(crate) rnr_wait_ns: u64,
    pub(crate) serving: Serving,
    pub(crate) sent: Box<[Sent; SEND_SLOTS]>,
    pub(crate) reaped: u64,
    /// Number of sends whose entries in the send queue are free again. A send without a completion
    /// keeps its entry until a later send has a completion: only completions move the tail of
    /// mlx5's queue (`handle_good_req` and `wq->tail` in cq.c).
    pub(crate) freed: u64,
    retry_ns: u64,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Remote {
    pub(crate) slot: usize,
    pub(crate) number: u32,
    pub(crate) rail: RailOf,
    pub(crate) receive_psn: u32,
}

/// Progress of serving the peer's requests.
#[derive(Debug, Default)]
pub(crate) struct Serving {
    /// Number of bytes of the next request that were carried.
    pub(crate) cursor: u64,
    /// Number of the next request. All earlier requests have been carried completely, or have
    /// failed.
    pub(crate) next: u64,
    pub(crate) arrives_ns: u64,
    /// Earliest start of the next piece, after the rail was down, a packet was lost or the receiver
    /// was not ready.
    pub(crate) not_before_ns: u64,
    /// The next request, once it has passed all checks and has the receive that it needs. This is a
    /// copy, because the peer can change shared memory.
    pub(crate) admitted: Option<Request>,
    pub(crate) held_until_ns: Option<u64>,
    pub(crate) receive: Option<Receive>,
    pub(crate) rnr: Option<Rnr>,
    pub(crate) ending: VecDeque<CarriedRequest>,
}

/// State of a peer that waits for a receive (receiver not ready).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rnr {
    pub(crate) again_ns: u64,
    pub(crate) tries: u32,
}

/// A request that was carried completely, or has failed. It completes at `at_ns`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CarriedRequest {
    pub(crate) at_ns: u64,
    pub(crate) number: u64,
    pub(crate) status: u32,
    /// The completion for the receive's completion queue, and true if it is solicited.
    pub(crate) completion: Option<(Completion, bool)>,
}

impl Serving {
    /// The `wr_id`s of the receives that requests have taken, but that have not completed. They are
    /// flushed together with the queue pair.
    fn unfinished(self) -> impl Iterator<Item = u64> {
        let due = self
            .ending
            .into_iter()
            .filter_map(|ending| ending.completion.map(|(completion, _)| completion.wr_id));
        due.chain(self.receive.map(|receive| receive.wr_id))
    }
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sent {
    pub(crate) wr_id: u64,
    pub(crate) opcode: u32,
    pub(crate) signaled: bool,
    pub(crate) bytes: u32,
}

/// The sizes of a queue pair.
#[derive(Debug, Clone, Copy)]
pub struct Caps {
    /// Number of send requests: at most [`SEND_SLOTS`].
    pub send_requests: u32,
    /// Number of receives: at most [`MAX_RECEIVES`].
    pub receive_requests: u32,
    /// Number of scatter/gather entries of one request: at most [`MAX_SGES`].
    pub sges: u32,
    /// Number of bytes of an inline request: at most [`INLINE_BYTES`].
    pub inline_bytes: u32,
    /// True if every send makes a completion.
    pub signal_all: bool,
}

impl Caps {
    /// Fails with `EINVAL` if a size is above the fabric's limit.
    pub fn check(&self) -> Result<(), i32> {
        let too_large = self.send_requests as usize > SEND_SLOTS
            || self.receive_requests > MAX_RECEIVES
            || self.sges as usize > MAX_SGES
            || self.inline_bytes as usize > INLINE_BYTES;
        if too_large { Err(libc::EINVAL) } else { Ok(()) }
    }
}

impl QpMemory {
    /// True if the queue pair is in the error state. Its owner may not have noticed that yet.
    pub fn is_in_error(&self) -> bool {
        self.state.load(Ordering::Acquire) == State::Error as u32
    }
}

impl QueuePair {
    /// Creates a queue pair in the reset state.
    ///
    /// # Errors
    /// `EINVAL` for an unknown device or for sizes above the limits, `ENOMEM` if the fabric has no
    /// free slot. `EIO` if programs are cut off from the device or the device was removed;
    /// `ENOLINK` if its firmware has failed ([`crate::hotplug`]).
    pub fn new(
        node: &Arc<Node>,
        device: usize,
        domain: u32,
        send_cq: &Arc<CompletionQueue>,
        recv_cq: &Arc<CompletionQueue>,
        caps: Caps,
    ) -> Result<Arc<Self>, i32> {
        caps.check()?;
        if device >= node.devices().len() {
            return Err(libc::EINVAL);
        }
        let presence = node.presence(device);
        presence.check_generation(presence.generation)?;
        let (slot, number) = claim(node, device, presence.generation).ok_or(libc::ENOMEM)?;
        let local = Local {
            state: State::Reset,
            access: 0,
            receives: VecDeque::with_capacity(caps.receive_requests as usize),
            remote: None,
            rnr_wait_ns: 0,
            serving: Serving::default(),
            sent: Box::new([Sent::default(); SEND_SLOTS]),
            reaped: 0,
            freed: 0,
            retry_ns: 0,
        };
        let made = Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            node: Arc::clone(node),
            device,
            generation: presence.generation,
            domain,
            slot,
            number,
            caps,
            send_cq: Arc::clone(send_cq),
            recv_cq: Arc::clone(recv_cq),
            expected: AtomicBool::new(false),
            local: Mutex::new(local),
        });
        node.add_queue_pair(slot, Weak::<Self>::clone(&made.this));
        threads::start(node);
        Ok(made)
    }

    /// True if the key is of this queue pair's protection domain and allows `access` to these
    /// bytes. False while the removal of the function makes all keys invalid.
    pub(crate) fn allows(&self, key: u32, addr: u64, bytes: u64, access: u32) -> bool {
        self.phase() != Phase::Keyless
            && self
                .node
                .regions
                .allows(key, (self.device, self.domain), addr, bytes, access)
    }

    /// The queue pair's number, of 24 bits.
    pub fn number(&self) -> u32 {
        self.number
    }

    pub(crate) fn caps(&self) -> Caps {
        self.caps
    }

    /// The queue pair's state.
    pub fn state(&self) -> State {
        if self.failed_from_afar() {
            State::Error
        } else {
            lock(&self.local).state
        }
    }

    pub(crate) fn memory(&self) -> &'static QpMemory {
        self.node.qp_memory(self.slot)
    }

    pub(crate) fn rail(&self) -> &'static RailMemory {
        self.node.rail(self.device)
    }

    pub(crate) fn phase(&self) -> Phase {
        self.rail().presence().phase_of(self.generation)
    }

    /// True if the peer has put this end into the error state through shared memory.
    fn failed_from_afar(&self) -> bool {
        self.memory().is_in_error()
    }

    /// Changes the state. If the function's firmware has failed, the command does not reach it: a
    /// change to error or reset succeeds without effect.
    ///
    /// # Errors
    /// `EINVAL` if the state or a value does not allow the change, `ENODATA` if the own entry of
    /// the GID table is empty (`rdma_get_gid_attr` in Linux's cache.c), `ENETUNREACH` if the port
    /// is down or the peer's GID cannot be reached, `ETIMEDOUT` after a second if the peer's GID
    /// does not answer, `EIO` if programs are cut off from the function, `ENOLINK` if its firmware
    /// has failed.
    pub fn change(&self, change: Change) -> Result<(), i32> {
        match (
            self.rail().presence().check_generation(self.generation),
            change,
        ) {
            (Err(libc::ENOLINK), Change::Error | Change::Reset) => return Ok(()),
            (answer, _) => answer?,
        }
        let mut local = lock(&self.local);
        let memory = self.memory();
        match (local.state, change) {
            (_, Change::Reset) => {
                drop(local);
                self.reset();
            }
            (State::Reset | State::Init, Change::Init { access, port: 1 }) => {
                local.access = access;
                self.enter(&mut local, State::Init);
            }
            (State::Init, Change::ReadyToReceive(path)) => {
                self.get_ready_to_receive(local, path)?
            }
            (
                State::ReadyToReceive,
                Change::ReadyToSend {
                    timeout,
                    retry_count,
                    rnr_retry,
                    send_psn,
                },
            ) => {
                local.retry_ns = match self.rail().silence_ns.load(Ordering::Relaxed) {
                    0 => patience_ns(timeout, retry_count),
                    by_profile => by_profile,
                };
                memory
                    .ack_timeout_ns
                    .store(patience_ns(timeout, 0), Ordering::Relaxed);
                memory
                    .rnr_retry
                    .store(u32::from(rnr_retry), Ordering::Relaxed);
                memory.send_psn.store(send_psn, Ordering::Relaxed);
                self.enter(&mut local, State::ReadyToSend);
            }
            (State::ReadyToSend, Change::ReadyToSend { .. }) => {}
            (State::Reset, Change::Error) => return Err(libc::EINVAL),
            (_, Change::Error) => self.fail(&mut local),
            _ => return Err(libc::EINVAL),
        }
        Ok(())
    }

    fn get_ready_to_receive(
        &self,
        mut local: MutexGuard<'_, Local>,
        path: PathToPeer,
    ) -> Result<(), i32> {
        let PathToPeer {
            mtu_bytes,
            remote_qp,
            receive_psn,
            remote_gid,
            own_gid_index,
            min_rnr_timer,
        } = path;
        let device = &self.node.devices()[self.device];
        if mtu_bytes > device.mtu_bytes || usize::from(own_gid_index) >= gid_table::ENTRIES {
            return Err(libc::EINVAL);
        }
        if device.gid_at(self.rail(), own_gid_index.into()).is_none() {
            return Err(libc::ENODATA);
        }
        if !self.node.port_up(self.device) {
            return Err(libc::ENETUNREACH);
        }
        let is_ipv4 = Ipv6Addr::from(remote_gid).to_ipv4_mapped().is_some();
        let resolved = self.resolve(&remote_gid, is_ipv4);
        if resolved == Err(libc::ETIMEDOUT) && !self.node.memory.is_virtual() {
            drop(local);
            std::thread::sleep(SEARCH);
            return Err(libc::ETIMEDOUT);
        }
        let rail = resolved?;
        local.remote = Some(Remote {
            slot: remote_qp as usize % MAX_QPS,
            number: remote_qp,
            rail,
            receive_psn,
        });
        local.rnr_wait_ns = rnr_wait_ns(min_rnr_timer);
        let is_misrouted = is_ipv4 && self.node.rail_of(rail).path().has(PathFault::CrossedArp);
        let memory = self.memory();
        memory
            .own_gid_index
            .store(own_gid_index.into(), Ordering::Relaxed);
        memory
            .misrouted
            .store(u32::from(is_misrouted), Ordering::Relaxed);
        memory.mtu_bytes.store(mtu_bytes, Ordering::Relaxed);
        memory.remote.store(remote_qp, Ordering::Relaxed);
        self.enter(&mut local, State::ReadyToReceive);
        drop(local);
        // The peer may have posted, and rung the doorbell, before this side was ready.
        engine::ring(self.node.memory, self.slot, self.node.memory.now_ns());
        Ok(())
    }

    /// Resolves the peer's address without waiting. `ETIMEDOUT` if the address does not answer.
    fn resolve(&self, gid: &[u8; 16], is_ipv4: bool) -> Result<RailOf, i32> {
        let rail = self.node.look_up(self.device, gid)?;
        let is_unanswered = RailMemory::is_due(&self.rail().unanswered);
        let answers = !is_unanswered
            && self
                .node
                .resolves(self.device, rail, is_ipv4, self.node.memory.now_ns());
        if answers {
            Ok(rail)
        } else {
            Err(libc::ETIMEDOUT)
        }
    }

    fn enter(&self, local: &mut Local, state: State) {
        local.state = state;
        self.memory().state.store(state as u32, Ordering::Release);
    }

    /// Stops the peer from serving this send queue, until [`QpMemory::release`].
    fn fence(&self, memory: &QpMemory) {
        // This loop ends: a peer holds the send queue only for a few pieces, and a dead holder is
        // replaced.
        while !memory.hold(self.node.memory, self.node.process_index) {
            std::thread::yield_now();
        }
    }

    pub(crate) fn fail(&self, local: &mut Local) {
        self.flush_serving(local);
        if local.state != State::Reset {
            self.enter(local, State::Error);
        }
        self.flush_receives(local);
        // The next poll flushes the sends.
        if let Some(this) = self.this.upgrade() {
            this.expect_ends();
        }
    }

    fn flush_serving(&self, local: &mut Local) {
        self.flush_all(std::mem::take(&mut local.serving).unfinished());
    }

    fn flush_receives(&self, local: &mut Local) {
        self.flush_all(local.receives.drain(..).map(|receive| receive.wr_id));
    }

    /// Flushes receives, up to the first completion for which the completion queue has no room. The
    /// queue pair is in error or about to be, so a lost completion has no further effect.
    fn flush_all(&self, mut receives: impl Iterator<Item = u64>) {
        let status = status::FLUSHED;
        let qp_num = self.number;
        let flushed = |wr_id| Completion {
            wr_id,
            status,
            qp_num,
            opcode: status::RECEIVED,
            ..Completion::default()
        };
        let _ = receives.try_for_each(|wr_id| self.recv_cq.push(flushed(wr_id), false));
    }

    /// Adds this queue pair to the list of senders of its send completion queue, which then
    /// collects the completions.
    pub(crate) fn expect_ends(self: &Arc<Self>) {
        if !self.expected.swap(true, Ordering::AcqRel) {
            self.send_cq.expect(Arc::<Self>::clone(self));
        }
    }

    /// Goes to error because this end refused a request of the peer or could not execute it, for
    /// example because the request's key does not allow it (`mlx5_ib_qp_event` in mlx5's qp.c).
    pub(crate) fn refuse(&self, local: &mut Local) {
        self.fail(local);
        self.announce(IBV_EVENT_QP_ACCESS_ERR);
    }

    /// Goes to error because a completion queue had no room for a completion of this queue pair.
    pub(crate) fn fail_on_cq_overflow(&self, local: &mut Local) {
        if local.state != State::Error {
            self.fail(local);
            self.announce(IBV_EVENT_QP_FATAL);
        }
    }

    fn announce(&self, kind: ibv_event_type) {
        let about = EventObject::QueuePair(self.number);
        self.node.announce(self.device, Event { kind, about });
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// `EINVAL` in the reset state or for too many scatter/gather entries. `ENOMEM` if the queue is
    /// full, or as an injected fault.
    pub fn post_receive(&self, wr_id: u64, sges: &[Sge]) -> Result<(), i32> {
        let mut local = lock(&self.local);
        if local.state == State::Reset || sges.len() > self.caps.sges as usize {
            return Err(libc::EINVAL);
        }
        let is_full = local.receives.len() >= self.caps.receive_requests as usize;
        if is_full || RailMemory::is_due(&self.rail().failing_posts) {
            return Err(libc::ENOMEM);
        }
        let mut receive = Receive {
            wr_id,
            sges: [Sge::default(); MAX_SGES],
            count: sges.len(),
        };
        receive.sges[..sges.len()].copy_from_slice(sges);
        local.receives.push_back(receive);
        if local.state == State::Error {
            self.flush_receives(&mut local);
        }
        Ok(())
    }

    fn reset(&self) {
        let mut local = lock(&self.local);
        let memory = self.memory();
        self.fence(memory);
        local.receives.clear();
        (local.remote, local.serving) = (None, Serving::default());
        (local.reaped, local.freed) = (0, 0);
        memory.posted.store(0, Ordering::Relaxed);
        memory.done.store(0, Ordering::Relaxed);
        self.enter(&mut local, State::Reset);
        memory.release(self.node.process_index);
        // Unlocks the queue pair before `forget`, which locks the completion queue's list of
        // senders: polling locks that list first, and then the queue pair.
        drop(local);
        self.send_cq.forget(self.number);
        self.recv_cq.forget(self.number);
        self.expected.store(false, Ordering::Release);
    }

    /// Ends the program's use of the queue pair. If the device has failed or programs are cut off
    /// from it, the command does not reach it: the queue pair continues until the device's removal.
    pub(crate) fn destroy_or_defer(self: &Arc<Self>) {
        match self.phase() {
            Phase::Failed | Phase::Cut | Phase::Keyless => {
                self.node.destroy_after_removal(
                    self.device,
                    self.generation,
                    Arc::<Self>::clone(self),
                );
            }
            Phase::Here | Phase::Gone => self.destroy(),
        }
    }

    /// Returns the slot to the fabric. Nothing is sent or received after this.
    pub fn destroy(&self) {
        lock(self.node.engine(self.device)).forget(self.number);
        self.reset();
        if self.rail().has_new_packets() {
            let rail = RailOf {
                node: self.node.node,
                device: self.device,
            };
            self.node.publish(rail, &[Counter::Sent, Counter::Received]);
        }
        self.node.remove_queue_pair(self.slot);
        self.memory().remote.store(0, Ordering::Relaxed);
        self.memory().number.store(0, Ordering::Release);
    }

    /// True if the peer has not answered within the time of all tries.
    fn is_timed_out(&self, local: &Local, memory: &QpMemory, now_ns: u64) -> bool {
        let posted = memory.slot(local.reaped).posted_ns.load(Ordering::Relaxed);
        let since = memory.served_ns.load(Ordering::Relaxed).max(posted);
        local.retry_ns > 0 && now_ns.saturating_sub(since) > local.retry_ns
    }

    /// Completes every unfinished send: the first one with status `first`, the others as flushed.
    /// Before them, completes the sends that are done, with their own status.
    fn flush_sends(&self, local: &mut Local, memory: &QpMemory, cq: &CompletionQueue, first: u32) {
        self.fence(memory);
        let done = memory.done.load(Ordering::Acquire);
        while local.reaped < done {
            let status = memory.slot(local.reaped).status.load(Ordering::Relaxed) as u32;
            self.end_of_send(local, cq, status);
        }
        let posted = memory.posted.load(Ordering::Relaxed);
        let mut status = first;
        while local.reaped < posted {
            self.end_of_send(local, cq, status);
            status = status::FLUSHED;
        }
        memory.done.store(posted, Ordering::Release);
        if local.state != State::Error {
            self.flush_serving(local);
            self.enter(local, State::Error);
            self.flush_receives(local);
        }
        memory.release(self.node.process_index);
    }

    fn end_done_sends(&self, local: &mut Local, cq: &CompletionQueue) {
        let memory = self.memory();
        let done = memory.done.load(Ordering::Acquire);
        while local.reaped < done {
            let status = memory.slot(local.reaped).status.load(Ordering::Relaxed) as u32;
            self.end_of_send(local, cq, status);
            if status != 0 {
                self.fail(local);
            }
        }
    }

    /// Completes the next send. If the completion queue has no room, the queue pair goes to error.
    fn end_of_send(&self, local: &mut Local, cq: &CompletionQueue, status: u32) {
        let sent = local.sent[local.reaped as usize % SEND_SLOTS];
        local.reaped += 1;
        if status != 0 || sent.signaled {
            local.freed = local.reaped;
            let wr_id = sent.wr_id;
            let opcode = sent.opcode;
            let bytes = sent.bytes;
            let qp_num = self.number;
            let completion = Completion {
                wr_id,
                status,
                opcode,
                bytes,
                qp_num,
                ..Completion::default()
            };
            if cq.push(completion, false).is_err() {
                self.fail_on_cq_overflow(local);
            }
        }
    }
}

impl SendQueue for QueuePair {
    fn number(&self) -> u32 {
        self.number
    }

    fn reap(&self, now_ns: u64, cq: &CompletionQueue) -> bool {
        match self.phase() {
            Phase::Here | Phase::Cut | Phase::Keyless => {}
            // A device whose firmware has failed may resume its work.
            Phase::Failed => return true,
            // A removed device completes nothing.
            Phase::Gone => {
                self.expected.store(false, Ordering::Release);
                return false;
            }
        }
        let mut local = lock(&self.local);
        let memory = self.memory();
        self.end_done_sends(&mut local, cq);
        if local.state == State::Error || self.failed_from_afar() {
            self.flush_sends(&mut local, memory, cq, status::FLUSHED);
        } else if local.reaped < memory.posted.load(Ordering::Relaxed)
            && self.is_timed_out(&local, memory, now_ns)
        {
            self.flush_sends(&mut local, memory, cq, status::RETRY_EXCEEDED);
        }
        let more = local.reaped < memory.posted.load(Ordering::Relaxed);
        if !more {
            self.expected.store(false, Ordering::Release);
        }
        more
    }
}

/// Time from a queue pair's first try to its failure without an answer; 0: it never fails. It tries
/// once, and then `retry_count` times more, 4.096 us x 2^`timeout` apart. A `timeout` of 0 means
/// that it waits for ever. A `retry_count` of 7 has no special meaning: mlx5 hands the number to
/// the device unchanged (`__mlx5_ib_modify_qp` in qp.c). In the InfiniBand specification, only an
/// RNR retry count of 7 never ends: the retries while the peer has no receive.
fn patience_ns(timeout: u8, retry_count: u8) -> u64 {
    match timeout {
        0 => 0,
        _ => (4096 << timeout.min(31)) * (u64::from(retry_count) + 1),
    }
}

fn claim(node: &Node, device: usize, generation: u32) -> Option<(usize, u32)> {
    for slot in 0..MAX_QPS {
        let memory = node.qp_memory(slot);
        if memory.number.load(Ordering::Acquire) != 0 {
            continue;
        }
        let sequence = node.memory.generations.fetch_add(1, Ordering::Relaxed) % 8190 + 1;
        let number = sequence << 11 | slot as u32;
        if memory
            .number
            .compare_exchange(0, number, Ordering::AcqRel, Ordering::Relaxed)
            .is_err()
        {
            continue;
        }
        memory
            .process
            .store(node.process_index as u32, Ordering::Relaxed);
        memory.node.store(node.node as u32, Ordering::Relaxed);
        memory.device.store(device as u32, Ordering::Relaxed);
        memory.generation.store(generation, Ordering::Relaxed);
        memory.remote.store(0, Ordering::Relaxed);
        memory.posted.store(0, Ordering::Relaxed);
        memory.done.store(0, Ordering::Relaxed);
        memory.served_ns.store(0, Ordering::Relaxed);
        memory.pace.set_rate(node.qp_rate_mbps(device));
        memory.state.store(State::Reset as u32, Ordering::Release);
        return Some((slot, number));
    }
    None
}

const _: () = assert!(
    MAX_QPS == 1 << 11,
    "a queue pair's number holds its place in 11 bits"
);
