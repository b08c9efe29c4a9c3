//! The receiving half of a connection: the data path of `irecv` and of `test` on receives. What it does when a rail is lost is
//! in `recv/failover.rs`.

mod failover;

use super::context::PathContext;
use super::fault::{Fault, broken_protocol, not_in_flight, outside};
use super::lane::{Lane, LaneWrite, Role};
use super::load::Granting;
use super::parts::PathParts;
use super::path::Faults;
use super::peer::Presence;
use super::rails::Rails;
use super::stall::{StallTimer, Stalled};
use super::wr_id::{Work, WrId};
use crate::comm::log::once::Direction;
use crate::comm::rail::registration::{Registration, pack};
use crate::error::{Error, Quick};
use crate::flow::NotInFlight;
use crate::flow::receives::{Arrival, Grant, Receives};
use crate::verbs::{Blame, Completion, CompletionBuffer, Region, Remote};
use crate::wire::cts::{ENTRY_BYTES, ENTRY_WORDS, Entry, Epoch, MAX_RECEIVE_BYTES, PackedKeys, Terms, entry_word};
use crate::wire::ids::{LaneId, Slot};
use crate::wire::immediate::Immediate;
use crate::wire::{MAX_RAILS, PARTS, SLOTS};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// One buffer of a grouped receive.
#[derive(Clone, Copy)]
pub struct RecvPart<'a> {
    /// Where the bytes shall land.
    pub addr: u64,
    /// Room there.
    pub bytes: usize,
    /// Which of the sends it is for.
    pub tag: i32,
    /// The registration that holds it.
    pub memory: &'a Registration,
}

/// What the data path works on.
pub struct RecvPath {
    receives: Receives,
    rails: Rails,
    /// The entries as they are written, for those too long to travel in the work request.
    shadow: Arc<Region>,
    /// Where the peer's ring is.
    ring_addr: u64,
    /// Whose keys each entry has, as it lies in the shadow.
    memory: Box<[Source; SLOTS * PARTS]>,
    /// Which of this host's keys new entries have.
    epoch: Epoch,
    /// From which epoch on entries have keys of use on a lane.
    since: [Epoch; MAX_RAILS],
    /// The lane that the last immediate came by, or that was looked at for the next one.
    hot: LaneId,
    cold: LaneId,
    /// Whether each lane's number is its rail's number on this host, as it is unless a rail is left out.
    lanes_are_rails: bool,
    buffer: CompletionBuffer,
    stall: StallTimer,
}

/// Whose keys an entry has.
#[derive(Debug, Clone, Copy, Default)]
struct Source {
    /// The registration's number.
    memory: u32,
    /// Whether those that keep the order of writes.
    strict: bool,
}

/// Where the source of an entry's keys is kept.
#[inline(always)]
fn source_of(grant: Grant, part: usize) -> usize {
    entry_word(grant.sequence, part) / ENTRY_WORDS
}

impl RecvPath {
    /// A path over connected lanes. The region keeps the clear-to-sends that are written into the peer's.
    pub fn new(parts: PathParts) -> Self {
        let PathParts { lanes, region: shadow, peer_addr: ring_addr, chunk_bytes, striping, .. } = parts;
        Self {
            receives: Receives::new(u64::from(chunk_bytes)),
            lanes_are_rails: lanes.iter().enumerate().all(|(number, lane)| lane.rail.id.index() == number),
            rails: Rails::new(Role::Receiver, lanes, striping),
            shadow,
            ring_addr,
            memory: Box::new([Source::default(); SLOTS * PARTS]),
            epoch: Epoch::default(),
            since: [Epoch::default(); MAX_RAILS],
            hot: LaneId::default(),
            cold: LaneId::default(),
            buffer: CompletionBuffer::new(),
            stall: StallTimer::default(),
        }
    }

    /// Grants a receive of 1 to [`PARTS`] buffers; its request number, or `None` while there is no room: try
    /// again. An `optional` receive is reported done at once; its caller looks at the bytes themselves.
    ///
    /// # Errors
    /// [`Error::Argument`] when the memory is not registered or the group too large; else why the connection has failed.
    #[inline(always)]
    pub fn irecv(&mut self, context: &PathContext, parts: &[RecvPart<'_>], optional: bool) -> Quick<Option<u16>> {
        self.rails.status.check()?;
        check_parts(parts)?;
        let lane = self.cts_lane();
        if !self.has_room(lane) && !self.make_room(context, lane)? {
            return Ok(None);
        }
        let Some(grant) = self.receives.grant(parts.iter().map(|part| part.bytes as u64), optional, lane) else {
            return Ok(None);
        };
        if let Err(error) = self.clear_to_send(lane, grant, parts, optional) {
            // The rail is lost, and the receive is not: it is granted by another one.
            self.lose_by(context, lane, error.to_string());
        }
        Ok(Some(grant.slot.number()))
    }

    #[inline(always)]
    fn has_room(&self, lane: LaneId) -> bool {
        self.receives.has_room() && self.rails.lanes[lane.index()].has_room(0)
    }

    #[inline(never)]
    fn make_room(&mut self, context: &PathContext, lane: LaneId) -> Quick<bool> {
        // That lane first: bytes may keep coming by another one.
        if self.take_in(context, lane)? == Found::Nothing {
            self.progress(context)?;
        }
        if self.has_room(lane) {
            return Ok(true);
        }
        self.stalled(context, "a receive without a free slot").map(|()| false)
    }

    /// The lane for a clear-to-send: the one used last, unless it is busy.
    #[inline(always)]
    fn cts_lane(&mut self) -> LaneId {
        self.rails.striping.lane_for(ENTRY_BYTES as u64, &Granting(&self.rails.lanes))
    }

    /// Tells the sender where to write: one write into its ring.
    #[inline(always)]
    fn clear_to_send(&mut self, lane: LaneId, grant: Grant, parts: &[RecvPart<'_>], strict: bool) -> Quick<()> {
        let [part] = parts else { return self.write_group(lane, grant, parts, strict) };
        if self.rails.lanes[lane.index()].inline_bytes() < ENTRY_BYTES as u32 || !self.lanes_are_rails {
            return self.write_group(lane, grant, parts, strict);
        }
        let write = LaneWrite { work: Work::Cts, remote: self.place(lane, grant), ..LaneWrite::default() };
        let kept = kept(&self.shadow, grant, 0).ok_or_else(no_room)?;
        keep(kept, &Entry::new(&terms(part, 0, 1, self.epoch), &part.memory.packed_keys(strict), grant.sequence));
        self.memory[source_of(grant, 0)] = Source { memory: part.memory.id, strict };
        let slot = self.rails.lanes[lane.index()].slot(0).ok_or_else(no_room)?;
        slot.write(&write, Some(kept.into()))
    }

    /// As [`RecvPath::clear_to_send`], for a group, for a device whose work requests have no room for an entry,
    /// and for keys in the order of the lanes.
    #[inline(never)]
    fn write_group(&mut self, lane: LaneId, grant: Grant, parts: &[RecvPart<'_>], strict: bool) -> Quick<()> {
        for (index, part) in parts.iter().enumerate() {
            let keys = self.keys(part.memory, strict);
            let kept = kept(&self.shadow, grant, index).ok_or_else(no_room)?;
            keep(kept, &Entry::new(&terms(part, index, parts.len(), self.epoch), &keys, grant.sequence));
            self.memory[source_of(grant, index)] = Source { memory: part.memory.id, strict };
        }
        self.write_from_shadow(lane, grant, parts.len(), Work::Cts)
    }

    /// Writes a receive's entries as they are kept: a single one within the work request, if it has room.
    fn write_from_shadow(&mut self, lane: LaneId, grant: Grant, parts: usize, work: Work) -> Quick<()> {
        let write = LaneWrite {
            work,
            local_addr: self.shadow.addr() + entry_word(grant.sequence, 0) as u64 * 8,
            lkey: self.rails.lanes[lane.index()].mailbox_keys().own_lkey,
            bytes: (parts * ENTRY_BYTES) as u32,
            remote: self.place(lane, grant),
            signaled: work != Work::Cts,
            ..LaneWrite::default()
        };
        let is_inline = parts == 1 && self.rails.lanes[lane.index()].inline_bytes() >= ENTRY_BYTES as u32;
        let entry = kept(&self.shadow, grant, 0).filter(|_| is_inline);
        self.rails.lanes[lane.index()].slot(0).ok_or_else(no_room)?.write(&write, entry.map(Into::into))
    }

    #[inline(always)]
    fn place(&self, lane: LaneId, grant: Grant) -> Remote {
        let addr = self.ring_addr + entry_word(grant.sequence, 0) as u64 * 8;
        Remote { addr, rkey: self.rails.lanes[lane.index()].peer_mailbox_rkey }
    }

    /// The buffer's keys by the connection's lanes.
    fn keys(&self, memory: &Registration, strict: bool) -> PackedKeys {
        if self.lanes_are_rails {
            return memory.packed_keys(strict);
        }
        pack(self.rails.lanes.iter().map(|lane| {
            let keys = memory.keys(lane.rail.id);
            keys.map_or(0, |keys| if strict { keys.strict_rkey } else { keys.relaxed_rkey })
        }))
    }

    /// Whether a receive is finished; then `tell` is called with the size of each buffer, by its place in the group.
    ///
    /// # Errors
    /// [`Error::Argument`] when there is no such request; else why the connection has failed.
    #[inline(always)]
    pub fn test(&mut self, context: &PathContext, request: u16, mut tell: impl FnMut(usize, u64)) -> Quick<bool> {
        let Some(slot) = Slot::new(request) else { return Err(not_in_flight(NotInFlight(request))) };
        match self.receives.test(slot, &mut tell) {
            Ok(false) => {
                let moved = self.progress_or_wait(context)?;
                if moved { self.receives.test(slot, tell).map_err(not_in_flight) } else { Ok(false) }
            }
            known => known.map_err(not_in_flight),
        }
    }

    #[inline(always)]
    fn progress_or_wait(&mut self, context: &PathContext) -> Quick<bool> {
        self.rails.status.check()?;
        let moved = self.progress(context)?;
        if !moved {
            self.stalled(context, "a receive")?;
        }
        Ok(moved)
    }

    /// Takes in what has arrived; whether anything had. Looks at the lane that bytes last came by, and only when it
    /// has nothing at one other, in turn: an idle rail costs nothing while others are busy. What came in part has its
    /// rest on the others.
    #[inline(always)]
    fn progress(&mut self, context: &PathContext) -> Quick<bool> {
        let mut found = self.take_in(context, self.hot)?;
        if found == Found::Nothing && self.rails.lanes.len() > 1 {
            self.cold = self.after(self.cold);
            if self.cold != self.hot {
                found = self.take_in(context, self.cold)?;
                if found != Found::Nothing {
                    self.hot = self.cold;
                }
            }
        }
        if found == Found::Nothing {
            return Ok(false);
        }
        self.stall.moved();
        if found == Found::InPart {
            self.take_in_others(context)?;
        }
        Ok(true)
    }

    #[inline(never)]
    fn take_in_others(&mut self, context: &PathContext) -> Quick<()> {
        let first = self.hot;
        let mut lane = self.after(first);
        while lane != first {
            if self.take_in(context, lane)? != Found::Nothing {
                self.hot = lane;
            }
            lane = self.after(lane);
        }
        Ok(())
    }

    /// The lane whose turn comes after this one's.
    #[inline(always)]
    fn after(&self, lane: LaneId) -> LaneId {
        lane.next(self.rails.lanes.len())
    }

    #[inline(always)]
    fn take_in(&mut self, context: &PathContext, lane: LaneId) -> Quick<Found> {
        if self.receives.open() == 0 && !self.rails.lanes[lane.index()].has_pending() {
            return Ok(Found::Nothing);
        }
        match self.absorb(context, lane) {
            Ok(found) => Ok(found),
            Err(fault) => self.fault(context, lane, *fault).map(|()| Found::InPart),
        }
    }

    /// Takes in what has come on one lane. What is behind a fault there is taken in too.
    #[inline(always)]
    fn absorb(&mut self, context: &PathContext, lane: LaneId) -> std::result::Result<Found, Box<Fault>> {
        let (mut found, mut fault) = (Found::Nothing, None);
        let lane = &mut self.rails.lanes[lane.index()];
        for completion in lane.poll(&mut self.buffer).map_err(Fault::of_device)? {
            if completion.status() != 0 {
                let next = failed(lane, context, completion);
                fault.get_or_insert(next);
                continue;
            }
            match arrive(lane, &mut self.receives, context, completion) {
                Ok(what) => found = what,
                Err(next) => _ = fault.get_or_insert(next),
            }
        }
        match fault {
            None => Ok(found),
            Some(fault) => Err(fault),
        }
    }

    #[inline(always)]
    fn stalled(&mut self, context: &PathContext, what: &str) -> Quick<()> {
        match (self.stall.idle(), context.peer.presence()) {
            (None, Presence::Here) => Ok(()),
            (waited, _) => self.waiting(context, what, waited),
        }
    }

    #[cold]
    fn waiting(&mut self, context: &PathContext, what: &str, waited: Option<Duration>) -> Quick<()> {
        if !context.peer.is_here() {
            // What arrived before the peer left may lie on a lane whose turn has not come.
            for lane in LaneId::all(self.rails.lanes.len()) {
                if self.take_in(context, lane)? != Found::Nothing {
                    self.stall.moved();
                    return Ok(());
                }
            }
        }
        let waited = waited.unwrap_or_else(|| self.stall.elapsed());
        let stalled = Stalled { direction: Direction::Receive, what, count: self.receives.open() };
        let checked = stalled.check(context, &mut self.stall, waited, &self.rails.lanes);
        checked.map_err(|error| self.end(error))
    }
}

/// Whether a receive may have these buffers.
///
/// # Errors
/// [`Error::Argument`] when the memory is not registered or the group too large.
#[inline(always)]
pub fn check_parts(parts: &[RecvPart<'_>]) -> Quick<()> {
    if parts.is_empty() || parts.len() > PARTS {
        return Err(group_size(parts.len()).into());
    }
    for part in parts {
        if part.bytes as u64 > MAX_RECEIVE_BYTES || !part.memory.takes(part.addr, part.bytes) {
            return Err(outside("irecv", part.addr, part.bytes, part.memory).into());
        }
    }
    Ok(())
}

/// What a look at a lane found: the last of it is what counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Nothing,
    Something,
    /// Bytes of a message whose others come by other lanes.
    InPart,
}

/// Acts on one completion of a receiver's lane, which is no fault.
#[inline(always)]
fn arrive(
    lane: &mut Lane,
    receives: &mut Receives,
    context: &PathContext,
    completion: &Completion,
) -> std::result::Result<Found, Box<Fault>> {
    let id = WrId::of(completion.wr_id());
    if !completion.is_receive_immediate() {
        if id.work() == Work::Receive {
            return Err(without_immediate(context));
        }
        lane.retire(id);
        if let Work::Repeat { slot } = id.work() {
            receives.repeated(slot);
        }
        return Ok(Found::Something);
    }
    let immediate = Immediate::decode(completion.immediate());
    let found = match receives.arrived(&immediate, completion.bytes()) {
        Ok(Arrival::Whole) => Found::Something,
        Ok(Arrival::Part) => Found::InPart,
        Ok(Arrival::Stale) => return stale(context, lane, completion),
        Err(violation) => return Err(Box::new(Fault::Violation(broken_protocol(&context.peer.name, &violation)))),
    };
    lane.count(u64::from(completion.bytes()));
    if immediate.leads != 0 {
        lane.count_leads(immediate.leads, receives.chunk_bytes());
    }
    lane.used_receive(id.queue()).map_err(Fault::of_refusal)?;
    Ok(found)
}

/// Where the shadow of the ring has the entry of a receive's part, to be written from there now, and once more when its rail is lost.
#[inline(always)]
fn kept(shadow: &Region, grant: Grant, part: usize) -> Option<&[AtomicU64; ENTRY_WORDS]> {
    shadow.words().get(entry_word(grant.sequence, part)..)?.first_chunk()
}

#[inline(always)]
fn keep(kept: &[AtomicU64; ENTRY_WORDS], entry: &Entry) {
    for (cell, word) in kept.iter().zip(entry.words()) {
        // Relaxed: the provider orders these before the doorbell that makes the NIC read them, or reads them itself.
        cell.store(*word, Ordering::Relaxed);
    }
}

#[inline(always)]
fn terms(part: &RecvPart<'_>, index: usize, count: usize, epoch: Epoch) -> Terms {
    Terms { addr: part.addr, bytes: part.bytes as u64, tag: part.tag, parts: count as u8, part: index as u8, epoch }
}

/// What belongs to an earlier use of its slot: it has used up a receive, and does not count.
#[cold]
#[inline(never)]
fn stale(context: &PathContext, lane: &mut Lane, completion: &Completion) -> std::result::Result<Found, Box<Fault>> {
    tracing::debug!("{} sent a stale {:?}", context.peer.name, Immediate::decode(completion.immediate()));
    lane.used_receive(WrId::of(completion.wr_id()).queue()).map_err(Fault::of_refusal)?;
    Ok(Found::Something)
}

/// What a completion with an error means.
#[cold]
#[inline(never)]
fn failed(lane: &mut Lane, context: &PathContext, completion: &Completion) -> Box<Fault> {
    let id = WrId::of(completion.wr_id());
    if id.work() == Work::Receive {
        lane.flushed(id.queue());
    }
    match (id.work(), completion.blame()) {
        // Receives have no memory: what is too long for one was not written but sent.
        (Work::Receive, Blame::Request) => without_immediate(context),
        _ => Fault::of_completion(completion),
    }
}

/// The peer has sent in place of writing: the receive that this took would be missed, and nothing tells what it was about.
#[cold]
#[inline(never)]
fn without_immediate(context: &PathContext) -> Box<Fault> {
    let what = "message without immediate data, or SEND in place of RDMA WRITE";
    Box::new(Fault::Violation(broken_protocol(&context.peer.name, &what)))
}

#[cold]
fn no_room() -> Box<Error> {
    Box::new(Error::Internal("no room for a clear-to-send".into()))
}

#[cold]
fn group_size(count: usize) -> Error {
    Error::Argument(format!("group of {count} receives; 1 to {PARTS} are allowed"))
}
