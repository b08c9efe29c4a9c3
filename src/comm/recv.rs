//! The receiving half of a connection: the data path of `irecv` and of `test` on receives.

use super::Host;
use super::lane::{Lane, LaneWrite};
use super::owner::Owner;
use super::patience::Patience;
use super::peer::{Peer, Presence};
use super::registration::{Registration, pack};
use super::service::WatchId;
use super::trouble::{Stall, broken_protocol, completion_failure, lanes_text, not_in_flight, outside, stall_verdict};
use super::work::{Work, WorkId};
use crate::error::{Error, Quick, Result};
use crate::flow::receives::{Arrival, Grant, Receives};
use crate::flow::striping::Striping;
use crate::verbs::{Completion, CompletionBuffer, HostMemory, Mr, Region, Remote};
use crate::wire::cts::{ENTRY_BYTES, ENTRY_WORDS, Entry, MAX_RECEIVE_BYTES, PackedKeys, Terms, entry_word};
use crate::wire::immediate::Immediate;
use crate::wire::message::Bye;
use crate::wire::{MAX_RAILS, PARTS};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A connection that receives. `irecv` and `test` come from one thread at a time; `register` from any.
pub struct RecvComm {
    host: Arc<Host>,
    peer: Arc<Peer>,
    watch: WatchId,
    path: Owner<RecvPath>,
}

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
    lanes: Vec<Lane>,
    /// The entries as they are written, for those too long to travel in the work request.
    shadow: Arc<Region>,
    /// The shadow's registrations, one a lane.
    shadow_keys: Vec<Mr>,
    /// The peer's ring: its address, and its key on each lane.
    ring: Ring,
    /// The lane that the last immediate came by, or that was looked at for the next one.
    hot: usize,
    cold: usize,
    striping: Striping,
    /// Whether each lane's number is its rail's number on this host, as it is unless a rail is left out.
    lanes_are_rails: bool,
    buffer: CompletionBuffer,
    patience: Patience,
    failed: Option<Box<Error>>,
}

/// Where the sender reads its clear-to-sends.
#[derive(Debug, Clone, Copy)]
pub struct Ring {
    /// Its address in the sender.
    pub addr: u64,
    /// Its keys, by lane.
    pub rkeys: [u32; MAX_RAILS],
}

impl RecvComm {
    pub(super) fn new(host: Arc<Host>, peer: Arc<Peer>, watch: WatchId, path: RecvPath) -> Self {
        Self { host, peer, watch, path: Owner::new(path) }
    }

    /// Registers memory on every rail.
    ///
    /// # Errors
    /// As [`super::registration::Registrations::register`].
    pub fn register(&self, memory: HostMemory) -> Result<Arc<Registration>> {
        self.host.registrations.register(&self.host.rails, memory)
    }

    /// Grants a receive of 1 to [`PARTS`] buffers; its request number, or `None` while there is no room: try again.
    /// An `optional` receive is reported done at once; its caller looks at the bytes themselves.
    ///
    /// # Errors
    /// [`Error::Argument`] when the memory is not registered or the group too large; [`Error::Remote`] when the
    /// connection has failed.
    #[inline(always)]
    pub fn irecv(&self, parts: &[RecvPart<'_>], optional: bool) -> Quick<Option<u16>> {
        match self.path.enter() {
            Some(mut path) => path.irecv(self, parts, optional),
            None => Ok(None),
        }
    }

    /// Whether a receive is finished; then `tell` hears the size of each buffer, by its place in the group.
    ///
    /// # Errors
    /// [`Error::Argument`] when there is no such request; [`Error::Remote`] when the connection has failed.
    #[inline(always)]
    pub fn test(&self, request: u16, tell: impl FnMut(usize, u64)) -> Quick<bool> {
        match self.path.enter() {
            Some(mut path) => path.test(self, request, tell),
            None => Ok(false),
        }
    }

    /// Closes the connection. The peer need not be there.
    pub fn close(self) {
        let path = self.path.into_inner();
        let bye = Bye { delivered: path.receives.delivered() };
        self.host.closed(&self.peer.name);
        self.host.service.close(self.watch, bye, Box::new(path));
    }
}

impl RecvPath {
    /// A path over connected lanes (1 to [`MAX_RAILS`]).
    pub(super) fn new(
        lanes: Vec<Lane>,
        shadow: Arc<Region>,
        shadow_keys: Vec<Mr>,
        ring: Ring,
        chunk_bytes: u32,
        striping: Striping,
    ) -> Self {
        Self {
            receives: Receives::new(u64::from(chunk_bytes)),
            lanes_are_rails: lanes.iter().enumerate().all(|(number, lane)| lane.rail.index == number),
            lanes,
            shadow,
            shadow_keys,
            ring,
            hot: 0,
            cold: 0,
            striping,
            buffer: CompletionBuffer::new(),
            patience: Patience::default(),
            failed: None,
        }
    }

    #[inline(always)]
    fn irecv(&mut self, comm: &RecvComm, parts: &[RecvPart<'_>], optional: bool) -> Quick<Option<u16>> {
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        check_parts(parts)?;
        let lane = self.cts_lane();
        if !self.has_room(lane) && !self.make_room(comm, lane)? {
            return Ok(None);
        }
        let Some(grant) = self.receives.grant(parts.iter().map(|part| part.bytes as u64), optional) else {
            return Ok(None);
        };
        match self.clear_to_send(lane, grant, parts, optional) {
            Ok(()) => Ok(Some(grant.slot)),
            Err(error) => Err(self.fail(error)),
        }
    }

    #[inline(always)]
    fn has_room(&self, lane: usize) -> bool {
        self.receives.has_room() && self.lanes[lane].has_room(0)
    }

    #[inline(never)]
    fn make_room(&mut self, comm: &RecvComm, lane: usize) -> Quick<bool> {
        // That lane first: bytes may keep coming by another one.
        if self.take_in(comm, lane)? == Found::Nothing {
            self.progress(comm)?;
        }
        if self.has_room(lane) {
            return Ok(true);
        }
        self.stalled(comm, "a receive that finds no room").map(|()| false)
    }

    /// The lane for a clear-to-send: the one used last, unless it is busy.
    #[inline(always)]
    fn cts_lane(&mut self) -> usize {
        let lanes = &self.lanes;
        let elsewhere = |rail: usize| lanes.get(rail).map_or(0, |lane| lane.rail.backlog_bytes());
        self.striping.rail_for(ENTRY_BYTES as u64, elsewhere)
    }

    /// Tells the sender where to write: one write into its ring.
    #[inline(always)]
    fn clear_to_send(&mut self, lane: usize, grant: Grant, parts: &[RecvPart<'_>], strict: bool) -> Quick<()> {
        let [part] = parts else { return self.write_from_shadow(lane, grant, parts, strict) };
        if self.lanes[lane].inline_bytes() < ENTRY_BYTES as u32 || !self.lanes_are_rails {
            return self.write_from_shadow(lane, grant, parts, strict);
        }
        let entry = Entry::new(&terms(part, 0, 1), part.memory.packed_keys(strict), grant.sequence);
        let write = LaneWrite { work: Work::Cts, remote: self.place(lane, grant), ..LaneWrite::default() };
        let slot = self.lanes[lane].slot(0).ok_or_else(no_room)?;
        slot.write(&write, Some(entry.words().into()))
    }

    /// As [`RecvPath::clear_to_send`], for what does not fit into a work request, or has keys of other rails.
    #[inline(never)]
    fn write_from_shadow(&mut self, lane: usize, grant: Grant, parts: &[RecvPart<'_>], strict: bool) -> Quick<()> {
        let at = entry_word(grant.sequence, 0);
        for (index, part) in parts.iter().enumerate() {
            let keys = self.keys(part, strict);
            let entry = Entry::new(&terms(part, index, parts.len()), &keys, grant.sequence);
            let place = self.shadow.words().iter().skip(at + index * ENTRY_WORDS);
            for (cell, word) in place.zip(entry.words()) {
                // Relaxed: the provider orders these before the doorbell that makes the NIC read them.
                cell.store(*word, Ordering::Relaxed);
            }
        }
        let write = LaneWrite {
            work: Work::Cts,
            local_addr: self.shadow.addr() + at as u64 * 8,
            lkey: self.shadow_keys.get(lane).map_or(0, Mr::lkey),
            bytes: (parts.len() * ENTRY_BYTES) as u32,
            remote: self.place(lane, grant),
            ..LaneWrite::default()
        };
        self.lanes[lane].slot(0).ok_or_else(no_room)?.write(&write, None)
    }

    #[inline(always)]
    fn place(&self, lane: usize, grant: Grant) -> Remote {
        let addr = self.ring.addr + entry_word(grant.sequence, 0) as u64 * 8;
        Remote { addr, rkey: self.ring.rkeys[lane % MAX_RAILS] }
    }

    /// The buffer's keys by the connection's lanes.
    fn keys(&self, part: &RecvPart<'_>, strict: bool) -> PackedKeys {
        if self.lanes_are_rails {
            return *part.memory.packed_keys(strict);
        }
        pack(self.lanes.iter().map(|lane| {
            let keys = part.memory.keys(lane.rail.index);
            keys.map_or(0, |keys| if strict { keys.strict_rkey } else { keys.relaxed_rkey })
        }))
    }

    #[inline(always)]
    fn test(&mut self, comm: &RecvComm, request: u16, mut tell: impl FnMut(usize, u64)) -> Quick<bool> {
        match self.receives.test(request, &mut tell) {
            Ok(false) => {
                let moved = self.progress_or_wait(comm)?;
                if moved { self.receives.test(request, tell).map_err(not_in_flight) } else { Ok(false) }
            }
            known => known.map_err(not_in_flight),
        }
    }

    #[inline(always)]
    fn progress_or_wait(&mut self, comm: &RecvComm) -> Quick<bool> {
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        let moved = self.progress(comm)?;
        if !moved {
            self.stalled(comm, "a receive")?;
        }
        Ok(moved)
    }

    /// Takes in what has arrived; whether anything had. Looks at the lane that bytes last came by, and only when it
    /// has nothing at one other, in turn: an idle rail costs nothing while others are busy. What came in part has its
    /// rest on the others.
    #[inline(always)]
    fn progress(&mut self, comm: &RecvComm) -> Quick<bool> {
        let mut found = self.take_in(comm, self.hot)?;
        if found == Found::Nothing && self.lanes.len() > 1 {
            self.cold = self.after(self.cold);
            if self.cold != self.hot {
                found = self.take_in(comm, self.cold)?;
                if found != Found::Nothing {
                    self.hot = self.cold;
                }
            }
        }
        if found == Found::Nothing {
            return Ok(false);
        }
        self.patience.moved();
        if found == Found::InPart {
            self.take_in_others(comm)?;
        }
        Ok(true)
    }

    #[inline(never)]
    fn take_in_others(&mut self, comm: &RecvComm) -> Quick<()> {
        let first = self.hot;
        let mut lane = self.after(first);
        while lane != first {
            if self.take_in(comm, lane)? != Found::Nothing {
                self.hot = lane;
            }
            lane = self.after(lane);
        }
        Ok(())
    }

    /// The lane whose turn comes after this one's.
    #[inline(always)]
    fn after(&self, lane: usize) -> usize {
        if lane + 1 < self.lanes.len() { lane + 1 } else { 0 }
    }

    #[inline(always)]
    fn take_in(&mut self, comm: &RecvComm, index: usize) -> Quick<Found> {
        let lane = &mut self.lanes[index];
        let mut found = Found::Nothing;
        if self.receives.open() == 0 && !lane.has_pending() {
            return Ok(found);
        }
        for completion in lane.poll(&mut self.buffer)? {
            found = match arrive(lane, &mut self.receives, comm, completion) {
                Ok(found) => found,
                Err(error) => {
                    self.failed = Some(error.clone());
                    return Err(error);
                }
            };
        }
        Ok(found)
    }

    #[inline(always)]
    fn stalled(&mut self, comm: &RecvComm, what: &str) -> Quick<()> {
        match (self.patience.idle(), comm.peer.presence()) {
            (None, Presence::Here) => Ok(()),
            (waited, presence) => self.waiting(comm, what, waited, presence),
        }
    }

    #[cold]
    fn waiting(&mut self, comm: &RecvComm, what: &str, waited: Option<Duration>, presence: Presence) -> Quick<()> {
        if presence != Presence::Here {
            // What arrived before the peer left may lie on a lane whose turn has not come.
            for index in 0..self.lanes.len() {
                if self.take_in(comm, index)? != Found::Nothing {
                    self.patience.moved();
                    return Ok(());
                }
            }
        }
        let waited = waited.unwrap_or_else(|| self.patience.elapsed());
        let open = self.receives.open();
        match stall_verdict(&mut self.patience, &comm.peer, presence, waited, comm.host.config.stall_warn) {
            Stall::Wait => Ok(()),
            Stall::Warn => {
                let (peer, lanes) = (&comm.peer.name, lanes_text(&self.lanes));
                tracing::warn!("{what} from {peer} has waited {waited:.0?} ({open} receives are open); {lanes}");
                Ok(())
            }
            Stall::Fail(why) => {
                let lanes = lanes_text(&self.lanes);
                Err(self.fail(Error::Remote(format!("{why} while {what} was waiting ({open} are open); {lanes}"))))
            }
        }
    }

    #[cold]
    fn fail(&mut self, error: impl Into<Box<Error>>) -> Box<Error> {
        let error = error.into();
        self.failed = Some(error.clone());
        error
    }
}

#[inline(always)]
fn check_parts(parts: &[RecvPart<'_>]) -> Quick<()> {
    if parts.is_empty() || parts.len() > PARTS {
        return Err(group_size(parts.len()).into());
    }
    for part in parts {
        if part.bytes as u64 > MAX_RECEIVE_BYTES || !part.memory.covers(part.addr, part.bytes) {
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

/// Acts on one completion of a receiver's lane.
#[inline(always)]
fn arrive(lane: &mut Lane, receives: &mut Receives, comm: &RecvComm, completion: &Completion) -> Quick<Found> {
    if completion.status() != 0 {
        // A peer that has closed takes its queue pairs away: clear-to-sends that it never needed fail then.
        return match comm.peer.presence() {
            Presence::Closed { .. } => Ok(Found::Something),
            _ => Err(completion_failure(&comm.peer, lane, completion).into()),
        };
    }
    let id = WorkId::decode(completion.wr_id());
    if !completion.is_receive_immediate() {
        lane.retire(id);
        return Ok(Found::Something);
    }
    let found = match receives.arrived(Immediate::decode(completion.immediate()), completion.bytes()) {
        Ok(Arrival::Whole) => Found::Something,
        Ok(Arrival::Part) => Found::InPart,
        Ok(Arrival::Stale) => stale(comm, completion),
        Err(violation) => return Err(broken_protocol(&comm.peer, &violation).into()),
    };
    lane.used_receive(id.queue)?;
    Ok(found)
}

#[inline(always)]
fn terms(part: &RecvPart<'_>, index: usize, count: usize) -> Terms {
    Terms { addr: part.addr, bytes: part.bytes as u64, tag: part.tag, parts: count as u8, part: index as u8 }
}

#[cold]
#[inline(never)]
fn stale(comm: &RecvComm, completion: &Completion) -> Found {
    tracing::debug!("{} sent a stale {:?}", comm.peer.name, Immediate::decode(completion.immediate()));
    Found::Something
}

#[cold]
fn no_room() -> Box<Error> {
    Box::new(Error::Internal("a clear-to-send without room for it".into()))
}

#[cold]
fn group_size(count: usize) -> Error {
    Error::Argument(format!("a group of {count} receives: 1 to {PARTS} are possible"))
}
