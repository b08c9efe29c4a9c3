//! Serving a queue pair: checks, carries, stores and completes the peer's requests, in order. A
//! request is carried in pieces of at most [`BOUNCE_BYTES`].

use crate::completion_queue::Completion;
use crate::counters::Counter;
use crate::engine::{Serve, Served};
use crate::fabric::{RailOf, lock};
use crate::hotplug::Phase;
use crate::os::memory::{self, BOUNCE_BYTES, Bounce, Fault, Piece};
use crate::os::shm::{INLINE_BYTES, MAX_PROCESSES, QpMemory, RailMemory};
use crate::pacing::{Route, SHORT_BYTES};
use crate::path::{PathFault, SMALL_PACKET_BYTES};
use crate::queue_pair::{CarriedRequest, Local, QueuePair, Remote, Rnr, State};
use crate::status;
use crate::work_request::{Operation, Request};
use std::sync::atomic::Ordering;

/// Delay before the next try to serve a queue pair whose rail is down, whose request was lost, or
/// whose peer's send queue has another holder at the moment. Also the shortest time after which a
/// sender that gets no answer sends a lost packet again.
const LATER_NS: u64 = 200_000;

/// Upper limit of the delays by the adversary (`SOFTVERBS_ADVERSARY`). Such delays expose programs
/// that poll in a loop and assume a shorter delay.
const LATE_NS: u64 = 50_000;

enum Step {
    Again,
    Until(u64),
    Nothing,
    /// The request does not arrive; the peer repeats it until its tries are used up.
    Lost,
}

impl Serve for QueuePair {
    fn number(&self) -> u32 {
        self.number()
    }

    fn end(&self) {
        self.destroy();
    }

    fn collect_sends(&self, now_ns: u64) {
        if self.send_cq.is_armed() {
            self.send_cq.reap(now_ns);
        }
    }

    fn serve(&self, now_ns: u64, pieces: usize, bounce: &mut Bounce) -> Served {
        let mut local = lock(&self.local);
        let Some(remote) = local.remote else {
            return Served::Idle;
        };
        let phase = self.phase();
        if !matches!(local.state, State::ReadyToReceive | State::ReadyToSend)
            || phase == Phase::Gone
        {
            return Served::Idle;
        }
        let peer = self.node.qp_memory(remote.slot);
        let sender = self.node.rail_of(remote.rail).presence();
        let carries = self.node.carries(self.device, remote.rail, now_ns);
        // The slot may belong to another queue pair by now; `serve_held` checks that.
        if !carries
            || phase == Phase::Failed
            || !sender.works(peer.generation.load(Ordering::Acquire))
        {
            local.serving.not_before_ns = now_ns;
            return Served::Until(now_ns + LATER_NS);
        }
        if !peer.hold(self.node.memory, self.node.process_index) {
            return Served::Until(now_ns + LATER_NS);
        }
        let served = self.serve_held(&mut local, &remote, peer, now_ns, pieces, bounce);
        peer.release(self.node.process_index);
        served
    }
}

impl QueuePair {
    fn serve_held(
        &self,
        local: &mut Local,
        remote: &Remote,
        peer: &QpMemory,
        now_ns: u64,
        pieces: usize,
        bounce: &mut Bounce,
    ) -> Served {
        // Checked while this process holds the send queue: before that, the queue's owner could
        // give the slot to another queue pair.
        let mine = peer.number.load(Ordering::Acquire) == remote.number
            && peer.remote.load(Ordering::Relaxed) == self.number()
            && peer.state.load(Ordering::Acquire) == State::ReadyToSend as u32
            && peer.send_psn.load(Ordering::Relaxed) == remote.receive_psn
            && !self.node.is_misrouted(peer, remote.rail);
        if !mine {
            return Served::Idle;
        }
        // Acknowledgements on their way count as answers too.
        let mut is_answered = !local.serving.ending.is_empty();
        let mut served = Served::More;
        for _ in 0..pieces {
            let step = self.step(local, remote, peer, now_ns, bounce);
            is_answered |= !matches!(step, Step::Lost);
            match step {
                Step::Again => {}
                Step::Lost => {
                    local.serving.not_before_ns = now_ns;
                    served = Served::Until(now_ns + LATER_NS);
                    break;
                }
                Step::Until(when) => {
                    served = Served::Until(when);
                    break;
                }
                Step::Nothing => {
                    served = Served::Idle;
                    break;
                }
            }
        }
        if is_answered && !self.is_misrouted() {
            peer.served_ns.store(now_ns, Ordering::Relaxed);
        }
        self.end_due(local, peer, now_ns);
        match (local.serving.ending.front(), served) {
            (Some(ending), Served::Idle) => Served::Until(ending.at_ns),
            (Some(ending), Served::Until(when)) => Served::Until(when.min(ending.at_ns)),
            _ => served,
        }
    }

    fn end_due(&self, local: &mut Local, peer: &QpMemory, now_ns: u64) {
        while let Some(ending) = local
            .serving
            .ending
            .front()
            .copied()
            .filter(|ending| ending.at_ns <= now_ns)
        {
            local.serving.ending.pop_front();
            if let Some((completion, solicited)) = ending.completion {
                let is_lost =
                    completion.status == 0 && RailMemory::is_due(&self.rail().lost_arrivals);
                if !is_lost && self.recv_cq.push(completion, solicited).is_err() {
                    self.fail_on_cq_overflow(local);
                    return self.acknowledge(peer, ending.number, status::REMOTE_OPERATION);
                }
                if let Some(late_ns) = self.late_ack_ns(ending.number) {
                    let at_ns = now_ns + late_ns;
                    local.serving.ending.push_front(CarriedRequest {
                        at_ns,
                        completion: None,
                        ..ending
                    });
                    continue;
                }
            }
            self.acknowledge(peer, ending.number, ending.status);
            if ending.status != 0 {
                self.after_failure(local, ending.status);
                return;
            }
        }
    }

    fn acknowledge(&self, peer: &QpMemory, number: u64, status: u32) {
        if self.is_misrouted() {
            return;
        }
        peer.slot(number)
            .status
            .store(u64::from(status), Ordering::Relaxed);
        // Release: a peer that sees `done` sees the status too, and the bytes of a read.
        peer.done.store(number + 1, Ordering::Release);
        if status != 0 {
            peer.state.store(State::Error as u32, Ordering::Release);
        }
    }

    /// [`Node::is_misrouted`](crate::fabric::Node::is_misrouted) for this end.
    fn is_misrouted(&self) -> bool {
        self.node.is_misrouted(self.memory(), self.own_rail())
    }

    fn own_rail(&self) -> RailOf {
        RailOf {
            node: self.node.node,
            device: self.device,
        }
    }

    /// True if the path loses the packets of a request, or the packets that answer a read.
    fn is_lost(&self, remote: &Remote, peer: &QpMemory, request: &Request) -> bool {
        let is_read = request.is_read();
        let sender = if is_read { self.memory() } else { peer };
        let rails = [self.rail(), self.node.rail_of(remote.rail)];
        let drops_large = rails
            .iter()
            .any(|rail| rail.path().has(PathFault::SwitchMtu));
        // Size of the request's largest packet: all its packets but the last one have the path MTU.
        let packet_bytes = u64::from(sender.mtu_bytes.load(Ordering::Relaxed)).min(request.bytes);
        // A request that its own device refused was never sent.
        request.status == 0
            && (is_read && self.is_misrouted()
                || drops_large && packet_bytes > u64::from(SMALL_PACKET_BYTES))
    }

    /// Acts on a failure as the verbs specification requires of the target.
    fn after_failure(&self, local: &mut Local, status: u32) {
        if matches!(
            status,
            status::REMOTE_ACCESS | status::REMOTE_INVALID | status::REMOTE_OPERATION
        ) {
            self.refuse(local);
        }
    }

    fn step(
        &self,
        local: &mut Local,
        remote: &Remote,
        peer: &QpMemory,
        now_ns: u64,
        bounce: &mut Bounce,
    ) -> Step {
        if local
            .serving
            .ending
            .back()
            .is_some_and(|ending| ending.status != 0)
        {
            return Step::Nothing;
        }
        let number = local.serving.next;
        if number >= peer.posted.load(Ordering::Acquire) {
            return Step::Nothing;
        }
        let request = local
            .serving
            .admitted
            .unwrap_or_else(|| Request::read(peer.slot(number)));
        if self.is_lost(remote, peer, &request) {
            return Step::Lost;
        }
        if local.serving.admitted.is_none() {
            match self.admit(local, peer, &request, now_ns) {
                Ok(()) => local.serving.admitted = Some(request),
                Err(Refusal::NotReady(again_ns)) => return Step::Until(again_ns),
                Err(Refusal::Failed(status)) => {
                    return self.end(local, number, status, None, now_ns);
                }
            }
        }
        let shared = self.node.resources_between(remote.rail, self.own_rail());
        let route = Route {
            queue_pair: &peer.pace,
            shared: &shared,
            is_short: request.bytes <= SHORT_BYTES,
        };
        let begins_ns = route.begins_at_ns(request.posted_ns.max(local.serving.not_before_ns));
        if begins_ns > now_ns {
            return Step::Until(begins_ns);
        }
        if let Some(until_ns) = self.held_back(local, number, now_ns) {
            return Step::Until(until_ns);
        }
        let (piece, retry_ns) = self.transmit(local, remote, peer, &request);
        if let Err(status) = self.move_piece(local, peer, number, &request, piece as usize, bounce)
        {
            return self.end(local, number, status, None, now_ns);
        }
        self.node
            .rail_of(remote.rail)
            .sent_bytes
            .fetch_add(piece, Ordering::Relaxed);
        local.serving.arrives_ns =
            route.carry(begins_ns, piece) + self.node.latency_ns(self.device);
        local.serving.cursor += piece;
        if let Some(retry_ns) = retry_ns {
            local.serving.not_before_ns = now_ns + retry_ns;
            return Step::Until(local.serving.not_before_ns);
        }
        if local.serving.cursor < request.bytes {
            return Step::Again;
        }
        let completion = self.receive_completion(local, &request);
        let arrives_ns = local.serving.arrives_ns;
        self.end(local, number, 0, completion, arrives_ns)
    }

    /// Sends the packets of the next piece, up to the first that is lost. Returns the bytes that
    /// arrive and, after a loss, the time until the lost packet is sent again.
    fn transmit(
        &self,
        local: &Local,
        remote: &Remote,
        peer: &QpMemory,
        request: &Request,
    ) -> (u64, Option<u64>) {
        let own = self.own_rail();
        let is_read = request.is_read();
        let (from, to, sender) = if is_read {
            (own, remote.rail, self.memory())
        } else {
            (remote.rail, own, peer)
        };
        let from_rail = self.node.rail_of(from);
        let to_rail = self.node.rail_of(to);
        let left = request.bytes - local.serving.cursor;
        let piece = left.min(BOUNCE_BYTES as u64);
        let packet_bytes = u64::from(sender.mtu_bytes.load(Ordering::Relaxed)).max(1);
        let packets = piece.div_ceil(packet_bytes).max(1);
        // A loss of N means that one packet in N is lost. Of two rails with loss, the one that
        // loses more counts: it has the smaller N.
        let loss = [from_rail, to_rail]
            .map(|rail| rail.path().loss())
            .into_iter()
            .filter(|loss| *loss > 0)
            .min();
        let (sent, is_lost) = from_rail.send(packets, loss.unwrap_or(0));
        to_rail.count(Counter::Received, sent - u64::from(is_lost));
        if !is_lost {
            return (piece, None);
        }
        let is_last = sent == packets
            && piece == left
            && local.serving.next + 1 == peer.posted.load(Ordering::Acquire);
        let (error, retry_ns) = match is_last {
            true => (
                Counter::AckTimeout,
                peer.ack_timeout_ns.load(Ordering::Relaxed).max(LATER_NS),
            ),
            false => (
                Counter::SequenceError,
                2 * self.node.latency_ns(self.device),
            ),
        };
        from_rail.count(error, 1);
        self.node.publish(from, &[Counter::Sent, error]);
        let noticed = Some(Counter::OutOfSequence).filter(|_| !is_last);
        noticed
            .iter()
            .for_each(|counter| to_rail.count(*counter, 1));
        self.node.publish(
            to,
            &[Some(Counter::Received), noticed]
                .into_iter()
                .flatten()
                .collect::<Vec<_>>(),
        );
        ((sent - 1) * packet_bytes, Some(retry_ns))
    }

    /// Time for which the adversary delays an acknowledgement. The acknowledgement does not arrive
    /// while the rail is down.
    fn late_ack_ns(&self, number: u64) -> Option<u64> {
        let seed = self.node.adversary()?;
        let dice = (seed ^ number << 8).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        Some(dice % LATE_NS)
    }

    /// Time until which the adversary holds the next piece back, if that is later than now.
    fn held_back(&self, local: &mut Local, number: u64, now_ns: u64) -> Option<u64> {
        let seed = self.node.adversary()?;
        let cursor = local.serving.cursor;
        let until_ns = *local.serving.held_until_ns.get_or_insert_with(|| {
            let dice = (seed ^ number << 20 ^ cursor).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
            now_ns + dice % LATE_NS
        });
        if now_ns < until_ns {
            return Some(until_ns);
        }
        local.serving.held_until_ns = None;
        None
    }

    fn admit(
        &self,
        local: &mut Local,
        peer: &QpMemory,
        request: &Request,
        now_ns: u64,
    ) -> Result<(), Refusal> {
        if request.status != 0 {
            return Err(Refusal::Failed(request.status));
        }
        if RailMemory::is_due(&self.rail().refusals) {
            return Err(Refusal::Failed(status::REMOTE_INVALID));
        }
        let total: u64 = request.pieces.iter().map(|(_, bytes)| bytes).sum();
        if total != request.bytes
            || request.bytes > 1 << 31
            || request.head.operation > Operation::Read as u8
        {
            return Err(Refusal::Failed(status::LOCAL_LENGTH));
        }
        if !self.key_allows(local, request, 0, request.bytes) {
            return Err(Refusal::Failed(status::REMOTE_ACCESS));
        }
        if request.needs_receive() {
            if let Some(rnr) = local.serving.rnr.filter(|rnr| now_ns < rnr.again_ns) {
                return Err(Refusal::NotReady(rnr.again_ns));
            }
            let Some(receive) = local.receives.pop_front() else {
                if let Some(Remote { rail, .. }) = local.remote {
                    self.node.rail_of(rail).count(Counter::ReceiverNotReady, 1);
                    self.node.publish(rail, &[Counter::ReceiverNotReady]);
                }
                return Err(not_ready(local, peer, now_ns));
            };
            if local.serving.rnr.take().is_some() {
                local.serving.not_before_ns = now_ns;
            }
            local.serving.receive = Some(receive);
            let room: u64 = receive.sges[..receive.count]
                .iter()
                .map(|sge| u64::from(sge.bytes))
                .sum();
            if request.head.operation == Operation::Send as u8 && request.bytes > room {
                return Err(Refusal::Failed(status::REMOTE_INVALID));
            }
        }
        Ok(())
    }

    /// True if the remote key allows the write or read of `bytes` bytes from `offset` on, and for
    /// any send, which has no remote key. The key is checked for the request, and again for each
    /// piece, because a registration can end between two pieces.
    fn key_allows(&self, local: &Local, request: &Request, offset: u64, bytes: u64) -> bool {
        let access = match request.head.operation {
            0 => status::REMOTE_WRITE,
            2 => status::REMOTE_READ,
            _ => return true,
        };
        let Some(addr) = request.remote_addr.checked_add(offset) else {
            return false;
        };
        bytes == 0 || local.access & access != 0 && self.allows(request.rkey, addr, bytes, access)
    }

    fn move_piece(
        &self,
        local: &Local,
        peer: &QpMemory,
        number: u64,
        request: &Request,
        bytes: usize,
        bounce: &mut Bounce,
    ) -> Result<(), u32> {
        let cursor = local.serving.cursor;
        if bytes == 0 {
            return Ok(());
        }
        if !self.key_allows(local, request, cursor, bytes as u64) {
            return Err(status::REMOTE_ACCESS);
        }
        let process = peer.process.load(Ordering::Relaxed) as usize % MAX_PROCESSES;
        let pid = self.node.memory.processes[process]
            .pid
            .load(Ordering::Acquire);
        let mut inline = [0u64; INLINE_BYTES / 8];
        if request.head.inline_bytes > 0 {
            if request.head.inline_bytes as u64 != request.bytes {
                return Err(status::LOCAL_LENGTH);
            }
            for (word, cell) in inline.iter_mut().zip(&peer.slot(number).inline) {
                *word = cell.load(Ordering::Relaxed);
            }
        }
        let carried = (request.head.inline_bytes > 0).then_some(&inline[..]);
        let source = Source {
            pid,
            pieces: &request.pieces,
            carried,
        };
        let moved = match request.head.operation {
            1 => self.fill_receive(local, &source, cursor, bytes, bounce)?,
            2 => memory::answer_read(
                pid,
                request.remote_addr + cursor,
                bytes,
                &request.pieces,
                cursor,
            ),
            _ => source.store(bounce, cursor, bytes, request.remote_addr + cursor),
        };
        moved.map_err(|fault| self.status_of(fault))
    }

    fn fill_receive(
        &self,
        local: &Local,
        source: &Source<'_>,
        mut cursor: u64,
        bytes: usize,
        bounce: &mut Bounce,
    ) -> Result<Result<(), Fault>, u32> {
        let Some(receive) = local.serving.receive else {
            return Err(status::REMOTE_OPERATION);
        };
        let mut skip = cursor;
        let mut left = bytes as u64;
        for sge in &receive.sges[..receive.count] {
            let room = u64::from(sge.bytes);
            if skip >= room {
                skip -= room;
                continue;
            }
            let here = (room - skip).min(left);
            let place = sge.addr + skip;
            if !self.allows(sge.lkey, place, here, status::LOCAL_WRITE) {
                return Err(status::REMOTE_OPERATION);
            }
            if let Err(fault) = source.store(bounce, cursor, here as usize, place) {
                return Ok(Err(fault));
            }
            (skip, left, cursor) = (0, left - here, cursor + here);
            if left == 0 {
                break;
            }
        }
        Ok(Ok(()))
    }

    fn status_of(&self, fault: Fault) -> u32 {
        match fault {
            Fault::Memory => status::LOCAL_PROTECTION,
            Fault::Gone => status::RETRY_EXCEEDED,
            Fault::Forbidden => {
                eprintln!(
                    "softverbs: the kernel does not let this process read its peer's memory (process_vm_readv): run both as one \
                     user, and in a container with --cap-add SYS_PTRACE"
                );
                status::RETRY_EXCEEDED
            }
        }
    }

    fn receive_completion(
        &self,
        local: &mut Local,
        request: &Request,
    ) -> Option<(Completion, bool)> {
        let receive = local.serving.receive.take()?;
        let written = request.head.operation == Operation::Write as u8;
        let completion = Completion {
            wr_id: receive.wr_id,
            status: 0,
            opcode: if written {
                status::RECEIVED_IMMEDIATE
            } else {
                status::RECEIVED
            },
            vendor_err: 0,
            bytes: request.bytes as u32,
            imm: request.imm,
            flags: if request.head.has_imm {
                status::WITH_IMMEDIATE
            } else {
                0
            },
            qp_num: self.number(),
            src_qp: local.remote.map_or(0, |remote| remote.number),
        };
        Some((completion, request.head.solicited))
    }

    /// Handles the receive that a failed request has taken. If the receive caused the failure,
    /// returns its completion with an error of the InfiniBand specification (volume 1, completion
    /// return status). Otherwise queues the receive again.
    fn receive_of_failure(&self, local: &mut Local, failure: u32) -> Option<(Completion, bool)> {
        let receive = local.serving.receive.take()?;
        let why = match failure {
            status::REMOTE_INVALID => status::LOCAL_LENGTH,
            status::REMOTE_OPERATION => status::LOCAL_PROTECTION,
            _ => {
                local.receives.push_front(receive);
                return None;
            }
        };
        let wr_id = receive.wr_id;
        let qp_num = self.number();
        let opcode = status::RECEIVED;
        Some((
            Completion {
                wr_id,
                status: why,
                opcode,
                qp_num,
                ..Completion::default()
            },
            true,
        ))
    }

    fn end(
        &self,
        local: &mut Local,
        number: u64,
        status: u32,
        completion: Option<(Completion, bool)>,
        at_ns: u64,
    ) -> Step {
        let completion = completion.or_else(|| self.receive_of_failure(local, status));
        // Requests end in order.
        let at_ns = local
            .serving
            .ending
            .back()
            .map_or(at_ns, |before| before.at_ns.max(at_ns));
        local.serving.ending.push_back(CarriedRequest {
            at_ns,
            number,
            status,
            completion,
        });
        local.serving.admitted = None;
        local.serving.cursor = 0;
        local.serving.next = number + 1;
        if status == 0 {
            Step::Again
        } else {
            Step::Until(at_ns)
        }
    }
}

enum Refusal {
    NotReady(u64),
    Failed(u32),
}

fn not_ready(local: &mut Local, peer: &QpMemory, now_ns: u64) -> Refusal {
    let tries = local.serving.rnr.map_or(0, |rnr| rnr.tries);
    let allowed = peer.rnr_retry.load(Ordering::Relaxed);
    if allowed < 7 && tries >= allowed {
        return Refusal::Failed(status::RNR_RETRY_EXCEEDED);
    }
    let again_ns = now_ns + local.rnr_wait_ns.max(1);
    local.serving.rnr = Some(Rnr {
        again_ns,
        tries: tries + 1,
    });
    Refusal::NotReady(again_ns)
}

struct Source<'a> {
    pid: u32,
    pieces: &'a [Piece],
    carried: Option<&'a [u64]>,
}

impl Source<'_> {
    fn store(&self, bounce: &mut Bounce, offset: u64, bytes: usize, to: u64) -> Result<(), Fault> {
        match self.carried {
            Some(words) => memory::store_carried(words, offset as usize, bytes, to),
            None => memory::store_from(bounce, self.pid, self.pieces, offset, bytes, to),
        }
    }
}
