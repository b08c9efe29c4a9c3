//! `irecv`, and `test` on receives. `recv/failover.rs` reacts to lost and returning rails.
//!
//! `irecv` grants a receive: it writes one CTS (clear-to-send) entry for each buffer into the
//! sender's ring. The bytes for a buffer then arrive in shares, one on each lane that the sender
//! uses, and each share ends with an immediate.

mod failover;

use super::context::PathContext;
use super::fault::{Fault, broken_protocol, not_in_flight, outside_registration};
use super::lane::{Lane, LaneWrite, Role};
use super::load::Granting;
use super::parts::PathParts;
use super::path::Faults;
use super::peer::PeerState;
use super::rails::Rails;
use super::stall::{StallTimer, Stalled};
use super::wr_id::{Work, WrId};
use crate::comm::log::once::Direction;
use crate::comm::rail::registration::{Registration, pack};
use host::error::{Argument, Error, Internal, Quick};
use proto::flow::NotInFlight;
use proto::flow::receives::{Arrival, Grant, Receives};
use proto::flow::shadow;
use proto::wire::cts::{
    ENTRY_BYTES, ENTRY_WORDS, Entry, Epoch, MAX_RECEIVE_BYTES, PackedKeys, Terms, entry_word,
};
use proto::wire::ids::{LaneId, Slot};
use proto::wire::immediate::Immediate;
use proto::wire::{PARTS, SLOTS};
use std::sync::Arc;
use std::time::Duration;
use verbs::{Blame, Completion, CompletionBuffer, Region, Remote};

/// One buffer of a receive. A grouped receive has several buffers, other receives have one.
#[derive(Clone, Copy)]
pub struct RecvPart<'a> {
    /// Address that the bytes are written to.
    pub addr: u64,
    /// Size of the buffer in bytes.
    pub bytes: usize,
    /// Tag of the matching send.
    pub tag: i32,
    /// Registration that contains the buffer.
    pub memory: &'a Registration,
}

/// State of the receiving data path.
pub struct RecvPath {
    receives: Receives,
    rails: Rails,
    /// This end's copy of the CTS ring, which is in the peer's memory. An entry is stored here
    /// before it is written to the peer. If the write is not inline, the NIC reads the entry here.
    shadow: Arc<Region>,
    /// Address of the CTS ring in the peer's mailbox.
    ring_addr: u64,
    /// For each entry of `shadow`: the registration that its keys belong to.
    key_sources: Box<[Source; SLOTS * PARTS]>,
    /// Lane on which completions were last found. This lane is polled first.
    hot: LaneId,
    /// Lane whose turn it was when `hot` last had no completions. The lanes take turns.
    cold: LaneId,
    /// True if each lane has the same number as its rail on this host. False, for example, if a
    /// rail was left out of the connection.
    lanes_are_rails: bool,
    buffer: CompletionBuffer,
    stall: StallTimer,
}

#[derive(Debug, Clone, Copy, Default)]
struct Source {
    /// Number of the registration ([`Registration::id`]).
    memory: u32,
    /// True for the registration's keys without relaxed ordering, with which the order of writes is
    /// kept.
    strict: bool,
}

/// Returns the index of an entry's source in [`RecvPath::key_sources`].
#[inline(always)]
fn source_of(grant: Grant, part: usize) -> usize {
    entry_word(grant.sequence, part) / ENTRY_WORDS
}

impl RecvPath {
    /// Creates a data path. The region of `parts` becomes the shadow.
    pub fn new(parts: PathParts) -> Self {
        let PathParts {
            lanes,
            region: shadow,
            peer_addr: ring_addr,
            chunk_bytes,
            striping,
            ..
        } = parts;
        Self {
            receives: Receives::new(u64::from(chunk_bytes)),
            lanes_are_rails: lanes
                .iter()
                .enumerate()
                .all(|(number, lane)| lane.rail.id.index() == number),
            rails: Rails::new(Role::Receiver, lanes, striping),
            shadow,
            ring_addr,
            key_sources: Box::new([Source::default(); SLOTS * PARTS]),
            hot: LaneId::default(),
            cold: LaneId::default(),
            buffer: CompletionBuffer::new(),
            stall: StallTimer::default(),
        }
    }

    /// Grants a receive of 1 to [`PARTS`] buffers, and returns its request number. Returns `None`
    /// if there is no room yet; the caller tries again. An `optional` receive is reported done
    /// by its first test, and NCCL checks the received bytes itself.
    ///
    /// # Errors
    /// [`Error::Argument`] as for [`check_parts`]; otherwise the reason why the connection has
    /// failed.
    #[inline(always)]
    pub fn irecv(
        &mut self,
        context: &PathContext,
        parts: &[RecvPart<'_>],
        optional: bool,
    ) -> Quick<Option<u16>> {
        self.rails.status.check()?;
        check_parts(parts)?;
        let lane = self.cts_lane();
        if !self.has_room(lane) && !self.make_room(context, lane)? {
            return Ok(None);
        }
        let Some(grant) =
            self.receives
                .grant(parts.iter().map(|part| part.bytes as u64), optional, lane)
        else {
            return Ok(None);
        };
        // NCCL reads the bytes of LL and LL128 while they arrive, so their order counts. NCCL marks
        // their receives as optional, but never a group.
        let strict = optional || parts.len() > 1;
        if let Err(error) = self.clear_to_send(lane, grant, parts, strict) {
            // The rail is lost, but not the receive: its grant is sent again over another rail.
            self.lose_rail(context, lane, error.to_string());
        }
        Ok(Some(grant.slot.number()))
    }

    #[inline(always)]
    fn has_room(&self, lane: LaneId) -> bool {
        self.receives.has_room() && self.rails.lanes[lane.index()].has_room(0)
    }

    #[inline(never)]
    fn make_room(&mut self, context: &PathContext, lane: LaneId) -> Quick<bool> {
        // Poll this lane first. Another lane may deliver bytes endlessly without freeing room here.
        if self.take_in(context, lane)? == Found::Nothing {
            self.progress(context)?;
        }
        if self.has_room(lane) {
            return Ok(true);
        }
        self.stalled(context, "a receive without a free slot")
            .map(|()| false)
    }

    /// Returns the lane for a CTS write: the lane of the last CTS write, unless that lane is busy.
    #[inline(always)]
    fn cts_lane(&mut self) -> LaneId {
        self.rails
            .striping
            .lane_for(ENTRY_BYTES as u64, &Granting(&self.rails.lanes))
    }

    /// Writes the CTS entries of a receive, which tell the sender where to write its bytes, into
    /// the sender's ring.
    #[inline(always)]
    fn clear_to_send(
        &mut self,
        lane: LaneId,
        grant: Grant,
        parts: &[RecvPart<'_>],
        strict: bool,
    ) -> Quick<()> {
        let [part] = parts else {
            return self.write_group(lane, grant, parts, strict);
        };
        if self.rails.lanes[lane.index()].inline_bytes() < ENTRY_BYTES as u32
            || !self.lanes_are_rails
        {
            return self.write_group(lane, grant, parts, strict);
        }
        let write = LaneWrite {
            work: Work::Cts,
            remote: self.place(lane, grant),
            ..LaneWrite::default()
        };
        let place = shadow::place(self.shadow.words(), grant.sequence, 0).ok_or_else(no_room)?;
        shadow::store(
            place,
            &Entry::new(
                &terms(part, 0, 1, self.receives.epoch()),
                &part.memory.packed_keys(strict),
                grant.sequence,
            ),
        );
        self.key_sources[source_of(grant, 0)] = Source {
            memory: part.memory.id,
            strict,
        };
        let slot = self.rails.lanes[lane.index()].slot(0).ok_or_else(no_room)?;
        slot.write(&write, Some(place.into()))
    }

    /// Slower version of [`RecvPath::clear_to_send`]. It is for groups, for devices whose work
    /// requests have no room for an entry, and for connections whose lanes are not in the order of
    /// the rails, so that the keys must be put in the order of the lanes.
    #[inline(never)]
    fn write_group(
        &mut self,
        lane: LaneId,
        grant: Grant,
        parts: &[RecvPart<'_>],
        strict: bool,
    ) -> Quick<()> {
        for (index, part) in parts.iter().enumerate() {
            let keys = keys(&self.rails.lanes, self.lanes_are_rails, part.memory, strict);
            let place =
                shadow::place(self.shadow.words(), grant.sequence, index).ok_or_else(no_room)?;
            shadow::store(
                place,
                &Entry::new(
                    &terms(part, index, parts.len(), self.receives.epoch()),
                    &keys,
                    grant.sequence,
                ),
            );
            self.key_sources[source_of(grant, index)] = Source {
                memory: part.memory.id,
                strict,
            };
        }
        self.write_from_shadow(lane, grant, parts.len(), Work::Cts)
    }

    /// Writes a receive's entries from the shadow into the sender's ring. A single entry is written
    /// inline if a work request has room for it.
    fn write_from_shadow(
        &mut self,
        lane: LaneId,
        grant: Grant,
        parts: usize,
        work: Work,
    ) -> Quick<()> {
        let write = LaneWrite {
            work,
            local_addr: self.shadow.addr() + entry_word(grant.sequence, 0) as u64 * 8,
            lkey: self.rails.lanes[lane.index()].mailbox_keys().own_lkey,
            bytes: (parts * ENTRY_BYTES) as u32,
            remote: self.place(lane, grant),
            signaled: work != Work::Cts,
            ..LaneWrite::default()
        };
        let is_inline =
            parts == 1 && self.rails.lanes[lane.index()].inline_bytes() >= ENTRY_BYTES as u32;
        let entry = shadow::place(self.shadow.words(), grant.sequence, 0).filter(|_| is_inline);
        self.rails.lanes[lane.index()]
            .slot(0)
            .ok_or_else(no_room)?
            .write(&write, entry.map(Into::into))
    }

    #[inline(always)]
    fn place(&self, lane: LaneId, grant: Grant) -> Remote {
        let addr = self.ring_addr + entry_word(grant.sequence, 0) as u64 * 8;
        Remote {
            addr,
            rkey: self.rails.lanes[lane.index()].peer_mailbox_rkey,
        }
    }

    /// If a receive is finished, calls `report` for each of its buffers, and returns true. The
    /// arguments of `report` are the buffer's index and the number of bytes received. For an
    /// optional receive whose bytes have not all arrived, the second argument is the buffer's size.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such request; otherwise the failure of the connection.
    #[inline(always)]
    pub fn test(
        &mut self,
        context: &PathContext,
        request: u16,
        mut report: impl FnMut(usize, u64),
    ) -> Quick<bool> {
        let Some(slot) = Slot::new(request) else {
            return Err(not_in_flight(NotInFlight(request)));
        };
        match self.receives.test(slot, &mut report) {
            Ok(false) => {
                let moved = self.progress_or_wait(context)?;
                if moved {
                    self.receives.test(slot, report).map_err(not_in_flight)
                } else {
                    Ok(false)
                }
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

    /// Processes completions, and returns true if there were any. Polls the lane `hot` first. If
    /// `hot` has no completions, polls one other lane; the other lanes take turns. So idle rails
    /// cost nothing while another rail is busy. If an incomplete message is found, polls all other
    /// lanes for its other shares.
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
        if found == Found::PartOfMessage {
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
            Err(fault) => self
                .fault(context, lane, *fault)
                .map(|()| Found::PartOfMessage),
        }
    }

    /// Polls one lane, and processes its completions.
    #[inline(always)]
    fn absorb(
        &mut self,
        context: &PathContext,
        lane: LaneId,
    ) -> std::result::Result<Found, Box<Fault>> {
        let lane = &mut self.rails.lanes[lane.index()];
        let completions = lane.poll(&mut self.buffer).map_err(Fault::of_device)?;
        absorb_all(lane, &mut self.receives, context, completions)
    }

    #[inline(always)]
    fn stalled(&mut self, context: &PathContext, what: &'static str) -> Quick<()> {
        match (self.stall.idle(), context.peer.presence()) {
            (None, PeerState::Here) => Ok(()),
            (waited, _) => self.waiting(context, what, waited),
        }
    }

    #[cold]
    fn waiting(
        &mut self,
        context: &PathContext,
        what: &'static str,
        waited: Option<Duration>,
    ) -> Quick<()> {
        if !context.peer.is_here() {
            // Messages that arrived before the peer left may be on a lane that was not polled yet.
            for lane in LaneId::all(self.rails.lanes.len()) {
                if self.take_in(context, lane)? != Found::Nothing {
                    self.stall.moved();
                    return Ok(());
                }
            }
        }
        let waited = waited.unwrap_or_else(|| self.stall.elapsed());
        let stalled = Stalled {
            direction: Direction::Receive,
            what,
            count: self.receives.open(),
        };
        let checked = stalled.check(context, &mut self.stall, waited, &self.rails.lanes);
        if let Err(error) = checked {
            self.end(context, error);
        }
        Ok(())
    }
}

/// Checks the buffers of a receive.
///
/// # Errors
/// [`Error::Argument`] if a buffer is not within its registration or is too large, if its memory is
/// registered only for sends, or if the number of buffers is not 1 to [`PARTS`].
#[inline(always)]
pub fn check_parts(parts: &[RecvPart<'_>]) -> Quick<()> {
    if parts.is_empty() || parts.len() > PARTS {
        return Err(group_size(parts.len()).into());
    }
    for part in parts {
        if part.bytes as u64 > MAX_RECEIVE_BYTES || !part.memory.allows_write(part.addr, part.bytes)
        {
            return Err(outside_registration("irecv", part.addr, part.bytes, part.memory).into());
        }
    }
    Ok(())
}

/// Result of polling a lane. If there were several completions, the result is that of the last
/// successful one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Nothing,
    Something,
    /// A share of a message that is not complete. The message's other shares may arrive on other
    /// lanes, so these are polled. Also the result after a fault that has not ended the connection.
    PartOfMessage,
}

/// Processes completions of one lane, including those after a failed one.
#[inline(always)]
fn absorb_all(
    lane: &mut Lane,
    receives: &mut Receives,
    context: &PathContext,
    completions: &[Completion],
) -> std::result::Result<Found, Box<Fault>> {
    let mut found = Found::Nothing;
    let mut fault = None;
    for completion in completions {
        if completion.status() != 0 {
            let next = failed(context, completion);
            fault.get_or_insert(next);
            continue;
        }
        match arrive(lane, receives, context, completion) {
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
        Ok(Arrival::Complete) => Found::Something,
        Ok(Arrival::Part) => Found::PartOfMessage,
        Ok(Arrival::Stale) => return stale(context, lane, completion),
        Err(violation) => {
            return Err(Box::new(Fault::Violation(broken_protocol(
                &context.peer.name,
                &violation,
            ))));
        }
    };
    lane.count(u64::from(completion.bytes()));
    if immediate.full_chunks != 0 {
        lane.count_full_chunks(immediate.full_chunks, receives.chunk_bytes());
    }
    lane.used_receive(id.queue()).map_err(Fault::of_refusal)?;
    Ok(found)
}

/// Returns the keys of a registration in the order of the connection's lanes.
fn keys(lanes: &[Lane], lanes_are_rails: bool, memory: &Registration, strict: bool) -> PackedKeys {
    if lanes_are_rails {
        return memory.packed_keys(strict);
    }
    pack(lanes.iter().map(|lane| {
        let keys = memory.keys(lane.rail.id);
        keys.map_or(0, |keys| {
            if strict {
                keys.strict_rkey
            } else {
                keys.relaxed_rkey
            }
        })
    }))
}

#[inline(always)]
fn terms(part: &RecvPart<'_>, index: usize, count: usize, epoch: Epoch) -> Terms {
    Terms {
        addr: part.addr,
        bytes: part.bytes as u64,
        tag: part.tag,
        parts: count as u8,
        part: index as u8,
        epoch,
    }
}

/// Ignores an immediate that belongs to an earlier use of its slot or is a repetition
/// ([`Arrival::Stale`]). Counts the posted receive that the immediate has used up.
#[cold]
#[inline(never)]
fn stale(
    context: &PathContext,
    lane: &mut Lane,
    completion: &Completion,
) -> std::result::Result<Found, Box<Fault>> {
    tracing::debug!(
        "{} sent a stale {:?}",
        context.peer.name,
        Immediate::decode(completion.immediate())
    );
    lane.used_receive(WrId::of(completion.wr_id()).queue())
        .map_err(Fault::of_refusal)?;
    Ok(Found::Something)
}

#[cold]
#[inline(never)]
fn failed(context: &PathContext, completion: &Completion) -> Box<Fault> {
    match (WrId::of(completion.wr_id()).work(), completion.blame()) {
        // Posted receives have no memory, so a length error means that the peer used SEND.
        (Work::Receive, Blame::Request) => without_immediate(context),
        _ => Fault::of_completion(completion),
    }
}

/// Returns the violation of a peer that used SEND instead of RDMA WRITE with immediate data. A SEND
/// uses up a posted receive, and nothing identifies its message.
#[cold]
#[inline(never)]
fn without_immediate(context: &PathContext) -> Box<Fault> {
    let what = "message without immediate data, or SEND in place of RDMA WRITE";
    Box::new(Fault::Violation(broken_protocol(&context.peer.name, &what)))
}

#[cold]
fn no_room() -> Box<Error> {
    Box::new(Internal::NoRoomForCts.into())
}

#[cold]
fn group_size(count: usize) -> Error {
    Argument::Group { count, most: PARTS }.into()
}
