//! One rail of one connection: its queue pairs, its completion queue, and how full they are.

use super::wr_id::{Work, WrId};
use crate::comm::rail::device::Presence;
use crate::comm::rail::path_quality::PathQuality;
use crate::comm::rail::{Look, Rail};
use crate::comm::threads;
use crate::config::Config;
use crate::counters::Record;
use crate::counters::layout::Word;
use crate::error::{Error, Quick, Result};
use crate::flow::pace::Moment;
use crate::verbs::{
    Access, Completion, CompletionBuffer, Cq, Mr, Path, Qp, QpCaps, Readable, Region, Remote, Timing, Write,
};
use crate::wire::cts::ENTRY_BYTES;
use crate::wire::fields::{LaneEnd, Priority, QpEnd};
use crate::wire::{PARTS, SLOTS};
use std::sync::Arc;

pub use crate::flow::recovery::Role;

/// Writes in flight on a sender's queue pair. NCCL keeps up to 32 receives open on a connection; a group of eight for each
/// of them finds room here by and by.
const SENDER_DEPTH: u32 = 128;
/// Sends up to this size travel in the work request itself: the NIC need not fetch them, which takes a PCIe round trip.
/// With it a request of mlx5's takes 192 bytes of its queue.
const SENDER_INLINE_BYTES: u32 = 128;
/// Writes in flight on a receiver's queue pair: one clear-to-send for each slot, and room for those whose completion
/// comes with a later one.
const RECEIVER_DEPTH: u32 = 4 * SLOTS as u32;
/// A write that nobody waits for is signaled when this many unsignaled ones went before it.
const SIGNAL_EVERY: u16 = 16;
/// Receives that immediates have used up are posted again in batches of this size.
const REFILL: u32 = 64;
/// Receives kept on a receiver's queue pair: an immediate for every part of every slot cannot find it empty, even
/// just before a batch is posted again.
const RECEIVE_DEPTH: u32 = (SLOTS * PARTS) as u32 + REFILL;

/// One rail of one connection.
pub struct Lane {
    /// This host's rail.
    pub rail: Arc<Rail>,
    /// The peer's rail, for messages.
    pub peer_rail: String,
    /// What this process's connections measured of the path to it.
    pub path_quality: Arc<PathQuality>,
    /// The key there of the peer's.
    pub peer_mailbox_rkey: u32,
    /// Which opening of the device its queue pairs are of.
    opening: u32,
    /// Path MTU of its queue pairs; 0 until they are connected.
    path_mtu_bytes: u32,
    /// None while the rail is lost.
    queues: Vec<Queue>,
    inline_bytes: u32,
    /// As long as there are queue pairs.
    cq: Option<Cq>,
    /// Queue pairs of a device that was cut off, which may still read and write memory.
    stranded: Option<(Vec<Queue>, Cq)>,
    /// The registration there of the connection's own memory: until the queue pairs are gone.
    mailbox_key: Option<Mr>,
    turn: usize,
    pending: u32,
    /// Bytes of large writes under way, which the rail knows of too.
    backlog_bytes: u64,
    /// Where it is counted what it does.
    pub record: Record,
}

struct Queue {
    qp: Qp,
    psn: u32,
    room: u32,
    unsignaled: u16,
    used_receives: u32,
    /// Whether a receive of it came back unused: it is stopped, and all that came by it before has been polled.
    is_flushed: bool,
}

/// What became of a lane's queue pairs when they were stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// They are in error: what is posted completes as flushed.
    Flushing,
    /// Their device has failed or was cut off, and may still read and write memory.
    Not,
    /// Their device is gone. What it had completed can be polled, and no more comes.
    Gone,
}

/// The keys of both sides' mailboxes on one lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MailboxKeys {
    /// Of this side's, for its own NIC.
    pub own_lkey: u32,
    /// Of the peer's.
    pub peer_rkey: u32,
}

/// Room for one write on a queue pair of a lane.
pub struct LaneSlot<'a> {
    queue: &'a mut Queue,
    index: u8,
    pending: &'a mut u32,
}

/// A write of registered memory.
#[derive(Debug, Clone, Copy, Default)]
pub struct LaneWrite {
    /// What it is.
    pub work: Work,
    /// Where to read.
    pub local_addr: u64,
    /// Local key.
    pub lkey: u32,
    /// How much.
    pub bytes: u32,
    /// Where to write.
    pub remote: Remote,
    /// Immediate data.
    pub immediate: Option<u32>,
    /// Whether its completion is waited for.
    pub signaled: bool,
}

/// How the two ends of a lane find each other.
pub struct Route<'a> {
    /// This side's rail, as it was just looked at.
    pub look: &'a Look,
    /// This side's address.
    pub gid: [u8; 16],
    /// The peer's address.
    pub peer_gid: [u8; 16],
    /// Path MTU.
    pub mtu_bytes: u32,
    /// The peer's queue pairs.
    pub ends: &'a [QpEnd],
    /// Priority of the connection's packets.
    pub priority: Priority,
}

impl Lane {
    /// Creates the queue pairs of a lane, not connected yet.
    ///
    /// # Errors
    /// [`Error::Os`] when the device refuses.
    pub fn open(rail: &Arc<Rail>, role: Role, queue_count: usize) -> Result<Lane> {
        let (pd, opening) = rail.device.opened()?;
        let context = pd.context();
        let limit = context.limits().max_qp_wr.max(1);
        let caps = match role {
            Role::Sender => QpCaps {
                send_requests: SENDER_DEPTH.min(limit),
                receive_requests: 1,
                inline_bytes: SENDER_INLINE_BYTES,
            },
            Role::Receiver if limit < RECEIVE_DEPTH => {
                let what = format!(
                    "{}: the device allows {limit} work requests per QP, {RECEIVE_DEPTH} are needed",
                    rail.name()
                );
                return Err(Error::Missing(what));
            }
            Role::Receiver => QpCaps {
                send_requests: RECEIVER_DEPTH,
                receive_requests: RECEIVE_DEPTH,
                inline_bytes: ENTRY_BYTES as u32,
            },
        };
        // A full flush: every request of every queue pair can complete with an error at once.
        let flush = (caps.send_requests + caps.receive_requests) * queue_count as u32;
        if flush > context.limits().max_cqe {
            let (name, most) = (rail.name(), context.limits().max_cqe);
            return Err(Error::Missing(format!("{name}: the device allows {most} entries per CQ, {flush} are needed")));
        }
        let cq = Cq::new(context, flush)?;
        let mut queues = Vec::with_capacity(queue_count);
        for _ in 0..queue_count {
            let room = caps.send_requests;
            let mut qp = Qp::new(&pd, &cq, QpCaps { ..caps })?;
            qp.init(rail.info.port)?;
            let psn = random_psn()?;
            queues.push(Queue { qp, psn, room, unsignaled: 0, used_receives: 0, is_flushed: false });
        }
        let inline_bytes = queues.iter().map(|queue| queue.qp.inline_bytes()).min().unwrap_or(0);
        let mut lane = Self::not_yet(rail, String::new());
        (lane.opening, lane.queues, lane.inline_bytes, lane.cq) = (opening, queues, inline_bytes, Some(cq));
        Ok(lane)
    }

    /// A lane of a rail that does not carry yet: without queue pairs, as one whose rail was lost.
    pub fn not_yet(rail: &Arc<Rail>, peer_rail: String) -> Lane {
        let (path_quality, mailbox_key, peer_mailbox_rkey) = Default::default();
        let (opening, path_mtu_bytes, queues, inline_bytes, cq, turn, stranded) = Default::default();
        let (pending, backlog_bytes) = Default::default();
        let rail = Arc::clone(rail);
        Lane {
            rail,
            peer_rail,
            path_quality,
            mailbox_key,
            peer_mailbox_rkey,
            opening,
            path_mtu_bytes,
            queues,
            inline_bytes,
            cq,
            stranded,
            turn,
            pending,
            backlog_bytes,
            record: Record::nowhere(),
        }
    }

    /// This side's queue pairs.
    pub fn ends(&self) -> Vec<QpEnd> {
        self.queues.iter().map(|queue| QpEnd { number: queue.qp.number(), psn: queue.psn }).collect()
    }

    /// Whether its completions come to this completion queue, by the number that the device's events name it by.
    pub fn is_on(&self, cq: usize) -> bool {
        let stranded = self.stranded.as_ref().map(|(_, cq)| cq);
        self.cq.as_ref().or(stranded).is_some_and(|own| own.number() == cq)
    }

    /// Which opening of the device its queue pairs are of.
    pub fn opening(&self) -> u32 {
        self.opening
    }

    /// Path MTU of its queue pairs; 0 until they are connected.
    pub fn path_mtu_bytes(&self) -> u32 {
        self.path_mtu_bytes
    }

    /// Registers the connection's own memory there, for the peer to write into.
    ///
    /// # Errors
    /// [`Error::Os`] when the device refuses, [`Error::Missing`] when it was removed.
    pub fn register_mailbox(&mut self, region: &Arc<Region>) -> Result<()> {
        // Strict: its bytes are looked at while they arrive.
        self.mailbox_key = Some(region.register(&self.rail.device.pd()?, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?);
        Ok(())
    }

    /// The keys there of the connection's own memory and of the peer's.
    #[inline(always)]
    pub fn mailbox_keys(&self) -> MailboxKeys {
        MailboxKeys { own_lkey: self.mailbox_key.as_ref().map_or(0, Mr::lkey), peer_rkey: self.peer_mailbox_rkey }
    }

    /// The key there of the connection's own memory, for the peer.
    pub fn mailbox_rkey(&self) -> u32 {
        self.mailbox_key.as_ref().map_or(0, Mr::rkey)
    }

    /// What the peer must know of it.
    pub fn end(&self) -> LaneEnd {
        LaneEnd { qps: self.ends(), mailbox_rkey: self.mailbox_rkey() }
    }

    /// Connects the queue pairs; a receiver's are given their receives first.
    ///
    /// # Errors
    /// [`Error::Os`] when the peer's address cannot be resolved or the device refuses; [`Error::Network`] when the port no longer has the
    /// agreed address; [`Error::Protocol`] when the peer named another number of queue pairs, or a larger path MTU than the port has.
    pub fn connect(&mut self, role: Role, config: &Config, route: &Route<'_>) -> Result<()> {
        if route.ends.len() != self.queues.len() {
            let (theirs, ours) = (route.ends.len(), self.queues.len());
            return Err(Error::Protocol(format!("the peer sent {theirs} queue pairs; {ours} were agreed")));
        }
        let most = route.look.port.active_mtu_bytes;
        if route.mtu_bytes > most {
            let (mtu_bytes, name) = (route.mtu_bytes, self.rail.name());
            return Err(Error::Protocol(format!(
                "the peer asked for path MTU {mtu_bytes} on {name}, whose port has {most}"
            )));
        }
        let gid_index = route
            .look
            .gid_index(&route.gid)
            .ok_or_else(|| Error::Network(format!("{} no longer has the agreed address", self.rail.name())))?;
        let Priority { traffic_class, service_level } = route.priority;
        self.path_quality = self.rail.path_qualities.of(route.peer_gid);
        self.path_mtu_bytes = route.mtu_bytes;
        for (index, (queue, end)) in self.queues.iter_mut().zip(route.ends).enumerate() {
            if role == Role::Receiver {
                queue.qp.post_receives(RECEIVE_DEPTH, receive_id(index as u8))?;
            }
            queue.qp.ready_to_receive(&Path {
                port: self.rail.info.port,
                mtu_bytes: route.mtu_bytes,
                remote_qp: end.number,
                receive_psn: end.psn,
                gid_index,
                remote_gid: route.peer_gid,
                traffic_class,
                service_level,
            })?;
            let (timeout, retry_count) = (config.timeout, config.retry_count);
            queue.qp.ready_to_send(&Timing { timeout, retry_count, send_psn: queue.psn })?;
        }
        Ok(())
    }

    /// The queue pair for the next message: they take turns.
    #[inline(always)]
    pub fn next_queue(&mut self) -> u8 {
        let queue = self.turn;
        self.turn = if queue + 1 < self.queues.len() { queue + 1 } else { 0 };
        queue as u8
    }

    /// How many queue pairs there are.
    pub fn queue_count(&self) -> usize {
        self.queues.len()
    }

    /// Largest write whose bytes travel in the work request itself.
    #[inline(always)]
    pub fn inline_bytes(&self) -> u32 {
        self.inline_bytes
    }

    /// Whether completions of writes are due.
    #[inline(always)]
    pub fn has_pending(&self) -> bool {
        self.pending > 0
    }

    /// Whether a queue pair takes another write.
    #[inline(always)]
    pub fn has_room(&self, queue: u8) -> bool {
        self.queues.get(usize::from(queue)).is_some_and(|queue| queue.room > 0)
    }

    /// Room for one write on a queue pair.
    #[inline(always)]
    pub fn slot(&mut self, index: u8) -> Option<LaneSlot<'_>> {
        let queue = self.queues.get_mut(usize::from(index)).filter(|queue| queue.room > 0)?;
        Some(LaneSlot { queue, index, pending: &mut self.pending })
    }

    /// Room for one write on the queue pair whose turn it is.
    #[inline(always)]
    pub fn next_slot(&mut self) -> Option<LaneSlot<'_>> {
        let queue = self.next_queue();
        self.slot(queue)
    }

    /// The completions that have come.
    ///
    /// # Errors
    /// [`Error::Os`] when the device is gone.
    #[inline(always)]
    pub fn poll<'a>(&mut self, buffer: &'a mut CompletionBuffer) -> Quick<&'a [Completion]> {
        match &mut self.cq {
            Some(cq) => cq.poll(buffer),
            None => Ok(&[]),
        }
    }

    /// Whether it has queue pairs: it has none while its rail is lost.
    #[inline(always)]
    pub fn is_open(&self) -> bool {
        self.cq.is_some()
    }

    /// Stops the queue pairs: nothing comes in or goes out by them from here on, and what has come can still be polled. Where the device
    /// has failed or was cut off they are put aside instead, and this is to be called again: until it is gone nothing is known of them.
    #[cold]
    pub fn stop(&mut self) -> Stopped {
        // A device that does not answer is given no command: it might not return.
        match self.strand() {
            Stopped::Flushing => {}
            stopped => return stopped,
        }
        for queue in &mut self.queues {
            if let Err(error) = queue.qp.fail() {
                // Of another error destroying it makes an end.
                tracing::debug!("{error}");
                self.rail.device.heard(&error, self.opening);
            }
        }
        // Where none failed too: for a device that has failed the kernel says that they have stopped, and the device was not asked.
        self.strand()
    }

    /// Puts the queue pairs aside if their device has failed or was cut off, until it is gone.
    #[cold]
    pub fn strand(&mut self) -> Stopped {
        self.rail.device.look(self.rail.info.port);
        match self.rail.device.presence_of(self.opening) {
            Presence::Here => {
                self.restore();
                Stopped::Flushing
            }
            Presence::CutOff => {
                if let Some(cq) = self.cq.take() {
                    self.stranded = Some((std::mem::take(&mut self.queues), cq));
                }
                Stopped::Not
            }
            Presence::Gone => {
                self.restore();
                Stopped::Gone
            }
        }
    }

    fn restore(&mut self) {
        if let Some((queues, cq)) = self.stranded.take() {
            (self.queues, self.cq) = (queues, Some(cq));
        }
    }

    /// Posts a write on every queue pair, as [`Work::Probe`], to see whether each carries.
    ///
    /// # Errors
    /// [`Error::Os`] when the device refuses one; [`Error::Internal`] when a queue pair has no room.
    pub fn write_on_each(&mut self, write: &LaneWrite) -> Result<()> {
        for queue in 0..self.queue_count() {
            let full = || Error::Internal(format!("queue pair {queue} has no room for a test write"));
            self.slot(queue as u8).ok_or_else(full)?.write(&LaneWrite { work: Work::Probe, ..*write }, None)?;
        }
        Ok(())
    }

    /// A receive came back unused. (Receives complete in order, and a receiver's queue pairs always have some.)
    #[cold]
    pub fn flushed(&mut self, index: u8) {
        if let Some(queue) = self.queues.get_mut(usize::from(index)) {
            queue.is_flushed = true;
        }
    }

    /// Whether all that a receiver's queue pairs had received when they were stopped has been polled.
    #[cold]
    pub fn is_drained(&self) -> bool {
        self.queues.iter().all(|queue| queue.is_flushed)
    }

    /// Takes the queue pairs away, with all that was not polled. Of a device that does not answer, they are destroyed by a thread of
    /// their own, which may take as long as the device.
    #[cold]
    pub fn close(&mut self) {
        let ended = (std::mem::take(&mut self.queues), self.cq.take(), self.stranded.take());
        if self.rail.device.is_stuck() {
            let ended = (ended, self.mailbox_key.take());
            threads::detach("spark-device", move || drop(ended));
        }
        (self.pending, self.turn) = (0, 0);
        self.rail.settled(std::mem::take(&mut self.backlog_bytes));
    }

    /// A signaled write completed.
    #[inline(always)]
    pub fn retire(&mut self, id: WrId) {
        if let Some(queue) = self.queues.get_mut(usize::from(id.queue())) {
            queue.room += u32::from(id.retires());
            self.pending = self.pending.saturating_sub(1);
        }
    }

    /// An immediate used up a receive.
    ///
    /// # Errors
    /// [`Error::Os`] when the device refuses the next batch.
    #[inline(always)]
    pub fn used_receive(&mut self, index: u8) -> Quick<()> {
        let Some(queue) = self.queues.get_mut(usize::from(index)) else { return Ok(()) };
        queue.used_receives += 1;
        if queue.used_receives < REFILL {
            return Ok(());
        }
        queue.used_receives = 0;
        queue.qp.post_receives(REFILL, receive_id(index))
    }

    /// A large share was given to this lane: other connections on the rail should know.
    #[inline(always)]
    pub fn began(&mut self, bytes: u64) {
        self.backlog_bytes += bytes;
        self.rail.posted(bytes);
    }

    /// It was confirmed.
    #[inline(always)]
    pub fn finished(&mut self, bytes: u64) {
        self.backlog_bytes = self.backlog_bytes.saturating_sub(bytes);
        self.rail.settled(bytes);
        self.path_quality.carried(bytes);
    }

    /// The present moment, for the pace of the rail.
    #[inline(always)]
    pub fn moment(&self, now_ns: u64) -> Moment {
        Moment { now_ns, carried_bytes: self.path_quality.carried_bytes() }
    }

    /// Takes new queue pairs in place of those that were lost. It counts where it did.
    #[cold]
    pub fn take_over(&mut self, mut new: Lane) {
        std::mem::swap(&mut self.record, &mut new.record);
        *self = new;
    }

    /// A share of any size was confirmed, or came.
    #[inline(always)]
    pub fn count(&mut self, bytes: u64) {
        self.record.add_write(bytes);
    }

    /// The bytes of a share's writes that came before the one with its immediate: `leads` of them, of `bytes` each.
    #[inline(never)]
    pub fn count_leads(&mut self, leads: u16, bytes: u64) {
        self.record.add(Word::Bytes, u64::from(leads).wrapping_mul(bytes));
    }

    /// A share was confirmed that was timed.
    #[inline(never)]
    pub fn count_timed(&mut self, took_ns: u64) {
        self.record.add(Word::TimedWrites, 1);
        self.record.add(Word::TimedNs, took_ns);
        self.record.raise(Word::LongestNs, took_ns);
    }
}

impl LaneSlot<'_> {
    /// Posts a write. With `inline`, of at most [`Lane::inline_bytes`] bytes, those are read at once; otherwise the device
    /// reads the local address some time before the completion.
    ///
    /// # Errors
    /// [`Error::Os`] when the device refuses.
    #[inline(always)]
    pub fn write(self, write: &LaneWrite, inline: Option<Readable<'_>>) -> Quick<()> {
        let Self { queue, index, pending } = self;
        queue.room -= 1;
        let retires = queue.unsignaled + 1;
        let signaled = write.signaled || retires >= SIGNAL_EVERY;
        queue.unsignaled = if signaled { 0 } else { retires };
        *pending += u32::from(signaled);
        let wr_id = WrId::new(write.work, index, retires).bits();
        let LaneWrite { local_addr, lkey, bytes, remote, immediate, .. } = *write;
        match inline {
            Some(bytes) => queue.qp.write_inline(bytes, remote, immediate, wr_id, signaled),
            None => queue.qp.write(&Write { local_addr, bytes, lkey, remote, immediate, wr_id, signaled }),
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.close();
    }
}

fn receive_id(queue: u8) -> u64 {
    WrId::new(Work::Receive, queue, 0).bits()
}

/// Random, so that a packet of an earlier connection is not taken for one of this.
fn random_psn() -> Result<u32> {
    let random = getrandom::u32().map_err(|e| Error::Missing(format!("cannot get random numbers: {e}")))?;
    Ok(random & 0xff_ffff)
}

/// The lanes of a connection and what became of them, for a message.
#[cold]
pub fn lanes_text(lanes: &[Lane]) -> String {
    let one = |lane: &Lane| {
        let (here, there) = (lane.rail.name(), &lane.peer_rail);
        match (lane.record.read(Word::Bytes), lane.record.read(Word::Writes)) {
            _ if !lane.is_open() => format!("{here} to {there} (lost)"),
            (_, 0) => format!("{here} to {there}"),
            (bytes, writes) => format!("{here} to {there} ({bytes} bytes in {writes} writes)"),
        }
    };
    format!("rails {}", lanes.iter().map(one).collect::<Vec<_>>().join(", "))
}
