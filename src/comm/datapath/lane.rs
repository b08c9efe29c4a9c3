//! A lane: one rail within one connection, with its queue pairs and its completion queue. A lane
//! also counts the work requests for which its queue pairs have room.

use super::stopping::LostQueues;
use super::wr_id::{Work, WrId};
use crate::comm::rail::path_quality::PathQuality;
use crate::comm::rail::{Rail, RailSnapshot};
use host::config::QpConfig;
use host::counters::Record;
use host::counters::layout::Word;
#[cfg(doc)]
use host::error::Error;
use host::error::{Internal, Missing, Quick, Result, Violation};
use proto::device::SourceGid;
use proto::flow::pace::Moment;
use proto::wire::cts::ENTRY_BYTES;
use proto::wire::fields::{LaneEnd, Priority, QpEnd};
use proto::wire::{PARTS, SLOTS};
use std::num::NonZeroUsize;
use std::sync::Arc;
use verbs::{
    Access, Completion, CompletionBuffer, Cq, Mr, Path, Qp, QpCaps, Readable, Region, Remote, Write,
};

pub use proto::flow::recovery::Role;

/// Largest number of writes in flight on a sender's queue pair. NCCL may start more sends: up to
/// 256, for 32 receives that are groups of eight. Further writes wait until earlier writes
/// complete.
const SENDER_DEPTH: u32 = 128;
/// Largest write whose bytes travel inside the work request, which saves the NIC a PCIe round trip.
/// With this size, a work request on mlx5 takes 192 bytes of the queue.
const SENDER_INLINE_BYTES: u32 = 128;
/// Largest number of writes in flight on a receiver's queue pair: one CTS write for each slot, and
/// the unsignaled writes whose room no later completion has freed yet.
const RECEIVER_DEPTH: u32 = 4 * SLOTS as u32;
/// Of this many consecutive writes on a queue pair, at least one is signaled. Its completion frees
/// the room of the unsignaled writes before it.
const SIGNAL_EVERY: u16 = 16;
/// Number of receives in a batch. Once immediates have used up this number of receives, a new batch
/// is posted.
const REFILL: u32 = 64;
/// Receives kept on a receiver's queue pair: enough for an immediate for every part of every slot,
/// even just before the next batch is posted.
const RECEIVE_DEPTH: u32 = (SLOTS * PARTS) as u32 + REFILL;

/// One rail of one connection.
pub struct Lane {
    /// Rail of this host.
    pub rail: Arc<Rail>,
    /// Name of the peer's rail, for messages.
    pub peer_rail: String,
    /// Measurements of the path to the peer's rail, shared by all connections of this process.
    pub path_quality: Arc<PathQuality>,
    /// Remote key of the peer's mailbox on this lane.
    pub peer_mailbox_rkey: u32,
    generation: u32,
    path_mtu_bytes: u32,
    source: Option<SourceGid>,
    /// Empty while the rail is lost.
    queues: Vec<LaneQueue>,
    inline_bytes: u32,
    cq: Option<Cq>,
    /// Number of the last completion queue ([`Cq::number`]), also after the loss of the rail.
    cq_number: Option<NonZeroUsize>,
    /// Queue pairs of the lost rail, until the service thread stops them ([`Lane::take_lost`]).
    lost: Option<Box<LostQueues>>,
    /// Registration of this end's mailbox on this device, kept as long as the queue pairs.
    mailbox_key: Option<Mr>,
    turn: usize,
    pending: u32,
    /// Bytes of large writes in flight on this lane. [`Rail::backlog_bytes`] includes these bytes.
    backlog_bytes: u64,
    /// Traffic counters of this lane.
    pub record: Record,
}

struct LaneQueue {
    qp: Qp,
    psn: u32,
    room: u32,
    unsignaled: u16,
    used_receives: u32,
}

/// Keys of both ends' mailboxes on one lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MailboxKeys {
    /// Local key of this end's mailbox, for this host's NIC.
    pub own_lkey: u32,
    /// Remote key of the peer's mailbox.
    pub peer_rkey: u32,
}

/// Room for one write on a queue pair of a lane.
pub struct LaneSlot<'a> {
    queue: &'a mut LaneQueue,
    index: u8,
    pending: &'a mut u32,
}

/// An RDMA write from registered memory.
#[derive(Debug, Clone, Copy, Default)]
pub struct LaneWrite {
    /// Purpose of the write.
    pub work: Work,
    /// Local address of the bytes.
    pub local_addr: u64,
    /// Key of the local memory.
    pub lkey: u32,
    /// Number of bytes.
    pub bytes: u32,
    /// Remote address and key.
    pub remote: Remote,
    /// Immediate data.
    pub immediate: Option<u32>,
    /// True if the caller needs the completion.
    pub signaled: bool,
}

/// What this end needs to connect the queue pairs of a lane: the addresses of both ends, the peer's
/// queue pairs, and properties of the packets.
pub struct Route<'a> {
    /// Current state of this end's rail, just queried.
    pub snapshot: &'a RailSnapshot,
    /// GID of this end.
    pub gid: [u8; 16],
    /// GID of the peer's end.
    pub peer_gid: [u8; 16],
    /// Path MTU.
    pub mtu_bytes: u32,
    /// Queue pairs of the peer.
    pub ends: &'a [QpEnd],
    /// Traffic class and service level of the connection's packets.
    pub priority: Priority,
}

impl Lane {
    /// Creates the queue pairs of a lane, without connecting them.
    ///
    /// # Errors
    /// [`Error::Os`] if the device refuses. [`Error::Missing`] if the device is not in use or its
    /// limits are too low.
    pub fn open(rail: &Arc<Rail>, role: Role, queue_count: usize) -> Result<Lane> {
        let (pd, generation) = rail.device.opened()?;
        let context = pd.context();
        let limit = context.limits().max_qp_wr.max(1);
        let caps = match role {
            Role::Sender => QpCaps {
                send_requests: SENDER_DEPTH.min(limit),
                receive_requests: 1,
                inline_bytes: SENDER_INLINE_BYTES,
            },
            Role::Receiver if limit < RECEIVE_DEPTH => {
                return Err(Missing::WorkRequests {
                    rail: rail.name(),
                    most: limit,
                    needed: RECEIVE_DEPTH,
                }
                .into());
            }
            Role::Receiver => QpCaps {
                send_requests: RECEIVER_DEPTH,
                receive_requests: RECEIVE_DEPTH,
                inline_bytes: ENTRY_BYTES as u32,
            },
        };
        // Room for a full flush: all requests of all queue pairs may fail together.
        let flush = (caps.send_requests + caps.receive_requests) * queue_count as u32;
        if flush > context.limits().max_cqe {
            let most = context.limits().max_cqe;
            return Err(Missing::CqEntries {
                rail: rail.name(),
                most,
                needed: flush,
            }
            .into());
        }
        let cq = Cq::new(context, flush)?;
        let mut queues = Vec::with_capacity(queue_count);
        for _ in 0..queue_count {
            let room = caps.send_requests;
            let mut qp = Qp::new(&pd, &cq, QpCaps { ..caps })?;
            qp.init(rail.info.port)?;
            let psn = random_psn()?;
            queues.push(LaneQueue {
                qp,
                psn,
                room,
                unsignaled: 0,
                used_receives: 0,
            });
        }
        let inline_bytes = queues
            .iter()
            .map(|queue| queue.qp.inline_bytes())
            .min()
            .unwrap_or(0);
        let mut lane = Self::without_queues(rail, String::new());
        lane.cq_number = NonZeroUsize::new(cq.number());
        (lane.generation, lane.queues, lane.inline_bytes, lane.cq) =
            (generation, queues, inline_bytes, Some(cq));
        Ok(lane)
    }

    /// Returns a lane without queue pairs, for a rail that is not connected yet or was lost.
    pub fn without_queues(rail: &Arc<Rail>, peer_rail: String) -> Lane {
        let (path_quality, mailbox_key, peer_mailbox_rkey) = Default::default();
        let (generation, path_mtu_bytes, queues, inline_bytes, cq, cq_number, turn, lost) =
            Default::default();
        let (source, pending, backlog_bytes) = Default::default();
        let rail = Arc::clone(rail);
        Lane {
            rail,
            peer_rail,
            path_quality,
            mailbox_key,
            peer_mailbox_rkey,
            generation,
            path_mtu_bytes,
            source,
            queues,
            inline_bytes,
            cq,
            cq_number,
            lost,
            turn,
            pending,
            backlog_bytes,
            record: Record::detached(),
        }
    }

    /// Returns the numbers and first PSNs of this end's queue pairs.
    pub fn ends(&self) -> Vec<QpEnd> {
        self.queues
            .iter()
            .map(|queue| QpEnd {
                number: queue.qp.number(),
                psn: queue.psn,
            })
            .collect()
    }

    /// Returns true if `cq` is the number of this lane's last completion queue ([`Cq::number`]). An
    /// error of the queue also counts after the loss of the rail: the completions that were lost
    /// are missing in the fence.
    pub fn has_cq(&self, cq: usize) -> bool {
        self.cq_number.is_some_and(|own| own.get() == cq)
    }

    /// Returns the device generation that the queue pairs belong to.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Returns the path MTU of the queue pairs; 0 until they are connected.
    pub fn path_mtu_bytes(&self) -> u32 {
        self.path_mtu_bytes
    }

    /// Returns the source address of the queue pairs; `None` until they are connected.
    pub fn source(&self) -> Option<SourceGid> {
        self.source
    }

    /// Registers this connection's mailbox, the memory that the peer writes, on the rail's device.
    ///
    /// # Errors
    /// [`Error::Os`] if the device refuses. [`Error::Missing`] if the device is not in use.
    pub fn register_mailbox(&mut self, region: &Arc<Region>) -> Result<()> {
        // Without relaxed ordering: the mailbox is read while its bytes arrive.
        self.mailbox_key = Some(region.register(
            &self.rail.device.pd()?,
            Access::LOCAL_WRITE | Access::REMOTE_WRITE,
        )?);
        Ok(())
    }

    /// Returns the keys of both ends' mailboxes on this lane.
    #[inline(always)]
    pub fn mailbox_keys(&self) -> MailboxKeys {
        MailboxKeys {
            own_lkey: self.mailbox_key.as_ref().map_or(0, Mr::lkey),
            peer_rkey: self.peer_mailbox_rkey,
        }
    }

    /// Returns the remote key of this end's mailbox, for the peer.
    pub fn mailbox_rkey(&self) -> u32 {
        self.mailbox_key.as_ref().map_or(0, Mr::rkey)
    }

    /// Returns the description of this end that the peer needs in order to connect.
    pub fn end(&self) -> LaneEnd {
        LaneEnd {
            qps: self.ends(),
            mailbox_rkey: self.mailbox_rkey(),
        }
    }

    /// Connects the queue pairs. Posts receives on a receiver's queue pairs first.
    ///
    /// # Errors
    /// [`Error::Os`] if the peer's address cannot be resolved or the device refuses.
    /// [`Error::Network`] if the port no longer has the agreed address, or the kernel has no route.
    /// [`Error::Protocol`] if the peer sent another number of queue pairs, or a larger path MTU
    /// than the port has.
    pub fn connect(&mut self, role: Role, config: QpConfig, route: &Route<'_>) -> Result<()> {
        if route.ends.len() != self.queues.len() {
            let theirs = route.ends.len();
            let ours = self.queues.len();
            return Err(Violation::QueuePairs { theirs, ours }.into());
        }
        let most = route.snapshot.port.active_mtu_bytes;
        if route.mtu_bytes > most {
            return Err(Violation::PathMtu {
                rail: self.rail.name(),
                mtu_bytes: route.mtu_bytes,
                most,
            }
            .into());
        }
        self.rail
            .check_route(route.snapshot, route.gid, route.peer_gid)?;
        let gid_index = self.rail.gid_index(route.snapshot, &route.gid)?;
        let Priority {
            traffic_class,
            service_level,
        } = route.priority;
        self.path_quality = self.rail.path_qualities.of(route.peer_gid);
        self.path_mtu_bytes = route.mtu_bytes;
        self.source = Some(SourceGid {
            gid: route.gid,
            gid_index,
        });
        for (index, (queue, end)) in self.queues.iter_mut().zip(route.ends).enumerate() {
            if role == Role::Receiver {
                queue
                    .qp
                    .post_receives(RECEIVE_DEPTH, WrId::of_receives(index as u8))?;
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
                flow_label: config.flow_label,
            })?;
            queue.qp.ready_to_send(config, queue.psn)?;
        }
        Ok(())
    }

    /// Returns the index of the queue pair for the next message. The queue pairs take turns.
    #[inline(always)]
    pub fn next_queue(&mut self) -> u8 {
        let queue = self.turn;
        self.turn = if queue + 1 < self.queues.len() {
            queue + 1
        } else {
            0
        };
        queue as u8
    }

    /// Returns the number of queue pairs.
    pub fn queue_count(&self) -> usize {
        self.queues.len()
    }

    /// Returns the largest write whose bytes can travel inside the work request.
    #[inline(always)]
    pub fn inline_bytes(&self) -> u32 {
        self.inline_bytes
    }

    /// Returns true if a signaled write has not completed yet.
    #[inline(always)]
    pub fn has_pending(&self) -> bool {
        self.pending > 0
    }

    /// Returns true if another write can be posted on a queue pair.
    #[inline(always)]
    pub fn has_room(&self, queue: u8) -> bool {
        self.queues
            .get(usize::from(queue))
            .is_some_and(|queue| queue.room > 0)
    }

    /// Returns room for one write on a queue pair, or `None` if the queue pair is full.
    #[inline(always)]
    pub fn slot(&mut self, index: u8) -> Option<LaneSlot<'_>> {
        let queue = self
            .queues
            .get_mut(usize::from(index))
            .filter(|queue| queue.room > 0)?;
        Some(LaneSlot {
            queue,
            index,
            pending: &mut self.pending,
        })
    }

    /// Returns room for one write on the queue pair whose turn it is, or `None` if that queue pair
    /// is full.
    #[inline(always)]
    pub fn next_slot(&mut self) -> Option<LaneSlot<'_>> {
        let queue = self.next_queue();
        self.slot(queue)
    }

    /// Polls the completion queue.
    #[inline(always)]
    pub fn poll<'a>(&mut self, buffer: &'a mut CompletionBuffer) -> Quick<&'a [Completion]> {
        match &mut self.cq {
            Some(cq) => cq.poll(buffer),
            None => Ok(&[]),
        }
    }

    /// Returns true if the lane has queue pairs. It has none while its rail is lost.
    #[inline(always)]
    pub fn is_open(&self) -> bool {
        self.cq.is_some()
    }

    /// Ends the use of the queue pairs, without a call into the device: the lane neither posts nor
    /// polls any longer. The queue pairs continue until the fence stops them, and their completions
    /// stay in the completion queue, which has room for all of them.
    #[cold]
    pub fn set_aside(&mut self) {
        let Some(cq) = self.cq.take() else { return };
        let queue_pairs = std::mem::take(&mut self.queues)
            .into_iter()
            .map(|queue| queue.qp)
            .collect();
        let keys = self.mailbox_keys();
        let mailbox = self.mailbox_key.take().map(|own| (own, keys));
        let lost = LostQueues::new(&self.rail, self.generation, queue_pairs, cq, mailbox);
        self.lost = Some(Box::new(lost));
        (self.pending, self.turn) = (0, 0);
    }

    /// Takes the queue pairs of the lost rail, in order to stop them. The caller keeps them, or the
    /// thread that stops them, until they have stopped.
    #[cold]
    pub fn take_lost(&mut self) -> Option<Box<LostQueues>> {
        self.lost.take()
    }

    /// Ends the use of a new lane, and returns its queue pairs in order to stop them.
    #[cold]
    pub fn into_lost(mut self) -> Option<Box<LostQueues>> {
        self.set_aside();
        self.take_lost()
    }

    /// Removes the bytes of the lost shares from the backlog of the rail. Called after the last
    /// completion of the lost queue pairs.
    #[cold]
    pub fn drop_backlog(&mut self) {
        self.rail.settled(std::mem::take(&mut self.backlog_bytes));
    }

    /// Posts a test write ([`Work::Probe`]) on every queue pair.
    ///
    /// # Errors
    /// [`Error::Os`] if the device refuses a write, [`Error::Internal`] if a queue pair has no
    /// room.
    pub fn write_on_each(&mut self, write: &LaneWrite) -> Result<()> {
        for queue in 0..self.queue_count() {
            let slot = self
                .slot(queue as u8)
                .ok_or(Internal::NoRoomForTest(queue))?;
            slot.write(
                &LaneWrite {
                    work: Work::Probe,
                    ..*write
                },
                None,
            )?;
        }
        Ok(())
    }

    /// Records the completion of a signaled write. Frees the room of this write and of the
    /// unsignaled writes before it.
    #[inline(always)]
    pub fn retire(&mut self, id: WrId) {
        if let Some(queue) = self.queues.get_mut(usize::from(id.queue())) {
            queue.room += u32::from(id.retires());
            self.pending = self.pending.saturating_sub(1);
        }
    }

    /// Records that an immediate used up a receive, and posts the next batch when one is due.
    #[inline(always)]
    pub fn used_receive(&mut self, index: u8) -> Quick<()> {
        let Some(queue) = self.queues.get_mut(usize::from(index)) else {
            return Ok(());
        };
        queue.used_receives += 1;
        if queue.used_receives < REFILL {
            return Ok(());
        }
        queue.used_receives = 0;
        queue.qp.post_receives(REFILL, WrId::of_receives(index))
    }

    /// Records that a large share was given to this lane. Other connections see its bytes as load
    /// on the rail.
    #[inline(always)]
    pub fn add_backlog(&mut self, bytes: u64) {
        self.backlog_bytes += bytes;
        self.rail.posted(bytes);
    }

    /// Records the confirmation of a share that [`Lane::add_backlog`] has recorded.
    #[inline(always)]
    pub fn remove_backlog(&mut self, bytes: u64) {
        self.backlog_bytes = self.backlog_bytes.saturating_sub(bytes);
        self.rail.settled(bytes);
        self.path_quality.add_carried_bytes(bytes);
    }

    /// Returns `now_ns`, and the number of bytes that the path has carried so far for all
    /// connections of this process. From two such moments, the speed of the rail is measured.
    #[inline(always)]
    pub fn moment(&self, now_ns: u64) -> Moment {
        Moment {
            now_ns,
            carried_bytes: self.path_quality.carried_bytes(),
        }
    }

    /// Replaces this lane, whose queue pairs are lost, with a new one. The traffic counters
    /// continue.
    #[cold]
    pub fn take_over(&mut self, mut new: Lane) {
        std::mem::swap(&mut self.record, &mut new.record);
        *self = new;
    }

    /// Counts a share of any size. A sender calls this when the share is confirmed. A receiver
    /// calls it when the share has arrived, with the bytes of the share's last write.
    #[inline(always)]
    pub fn count(&mut self, bytes: u64) {
        self.record.add_write(bytes);
    }

    /// Adds the bytes of the `full_chunks` writes (of `bytes` each) that preceded the last write of
    /// a share. [`Lane::count`] counts the share itself.
    #[inline(never)]
    pub fn count_full_chunks(&mut self, full_chunks: u16, bytes: u64) {
        self.record
            .add(Word::Bytes, u64::from(full_chunks).wrapping_mul(bytes));
    }

    /// Counts a timed share that was confirmed.
    #[inline(never)]
    pub fn count_timed(&mut self, took_ns: u64) {
        self.record.add(Word::TimedWrites, 1);
        self.record.add(Word::TimedNs, took_ns);
        self.record.raise(Word::LongestNs, took_ns);
    }
}

impl LaneSlot<'_> {
    /// Posts the write. Copies the bytes of `inline` before it returns. `inline` must not be longer
    /// than [`Lane::inline_bytes`]; the queue pair refuses a longer one. Without `inline`, the
    /// device may read the bytes at the local address at any time until the completion.
    #[inline(always)]
    pub fn write(self, write: &LaneWrite, inline: Option<Readable<'_>>) -> Quick<()> {
        let Self {
            queue,
            index,
            pending,
        } = self;
        queue.room -= 1;
        let retires = queue.unsignaled + 1;
        let signaled = write.signaled || retires >= SIGNAL_EVERY;
        queue.unsignaled = if signaled { 0 } else { retires };
        *pending += u32::from(signaled);
        let wr_id = WrId::new(write.work, index, retires).bits();
        let LaneWrite {
            local_addr,
            lkey,
            bytes,
            remote,
            immediate,
            ..
        } = *write;
        match inline {
            Some(bytes) => queue
                .qp
                .write_inline(bytes, remote, immediate, wr_id, signaled),
            None => queue.qp.write(&Write {
                local_addr,
                bytes,
                lkey,
                remote,
                immediate,
                wr_id,
                signaled,
            }),
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.set_aside();
        self.drop_backlog();
    }
}

/// Returns a random 24-bit PSN, so that late packets of earlier connections are refused.
fn random_psn() -> Result<u32> {
    Ok(getrandom::u32()? & 0xff_ffff)
}

/// Describes a connection's lanes and the bytes that each lane has carried, for messages.
#[cold]
pub fn lanes_text(lanes: &[Lane]) -> String {
    let one = |lane: &Lane| {
        let here = lane.rail.name();
        let there = &lane.peer_rail;
        match (
            lane.record.read(Word::Bytes),
            lane.record.read(Word::Writes),
        ) {
            _ if !lane.is_open() => format!("{here} to {there} (lost)"),
            (_, 0) => format!("{here} to {there}"),
            (bytes, writes) => format!("{here} to {there} ({bytes} bytes in {writes} writes)"),
        }
    };
    format!(
        "rails {}",
        lanes.iter().map(one).collect::<Vec<_>>().join(", ")
    )
}
