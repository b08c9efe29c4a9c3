//! The receiving half of a connection: the data path of `irecv` and of `test` on receives.

use super::Host;
use super::lane::{Lane, LaneWrite};
use super::owner::Owner;
use super::patience::Patience;
use super::peer::{Peer, Presence};
use super::registration::Registration;
use super::service::WatchId;
use super::trouble::{Stall, broken_protocol, completion_failure, lanes_text, not_in_flight, outside, stall_verdict};
use super::work::{Work, WorkId};
use crate::error::{Error, Result};
use crate::flow::receives::{Arrival, Grant, Receives};
use crate::flow::striping::Striping;
use crate::verbs::{Completion, CompletionBuffer, HostMemory, Mr, Region, Remote};
use crate::wire::cts::{ENTRY_BYTES, ENTRY_WORDS, Entry, MAX_RECEIVE_BYTES, entry_word};
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
    buffer: CompletionBuffer,
    patience: Patience,
    failed: Option<Error>,
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
    #[inline]
    pub fn irecv(&self, parts: &[RecvPart<'_>], optional: bool) -> Result<Option<u16>> {
        match self.path.enter() {
            Some(mut path) => path.irecv(self, parts, optional),
            None => Ok(None),
        }
    }

    /// Whether a receive is finished; then `tell` hears the size of each buffer, by its place in the group.
    ///
    /// # Errors
    /// [`Error::Argument`] when there is no such request; [`Error::Remote`] when the connection has failed.
    #[inline]
    pub fn test(&self, request: u16, tell: impl FnMut(usize, u64)) -> Result<bool> {
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

    #[inline]
    fn irecv(&mut self, comm: &RecvComm, parts: &[RecvPart<'_>], optional: bool) -> Result<Option<u16>> {
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        check_parts(parts)?;
        let lane = self.cts_lane();
        if !self.receives.has_room() || !self.lanes[lane].has_room(0) {
            self.progress(comm)?;
            if !self.receives.has_room() || !self.lanes[lane].has_room(0) {
                return self.stalled(comm, "a receive that finds no room").map(|()| None);
            }
        }
        let Some(grant) = self.receives.grant(parts.iter().map(|part| part.bytes as u64), optional) else {
            return Ok(None);
        };
        match self.clear_to_send(lane, grant, parts, optional) {
            Ok(()) => Ok(Some(grant.slot)),
            Err(error) => Err(self.fail(error)),
        }
    }

    /// The lane for a clear-to-send: the one used last, unless it is busy.
    #[inline]
    fn cts_lane(&mut self) -> usize {
        let lanes = &self.lanes;
        let elsewhere = |rail: usize| lanes.get(rail).map_or(0, |lane| lane.rail.backlog_bytes());
        self.striping.rail_for(ENTRY_BYTES as u64, elsewhere)
    }

    /// Tells the sender where to write: one write into its ring.
    #[inline]
    fn clear_to_send(&mut self, lane: usize, grant: Grant, parts: &[RecvPart<'_>], strict: bool) -> Result<()> {
        let at = entry_word(grant.sequence, 0);
        let remote = Remote { addr: self.ring.addr + at as u64 * 8, rkey: self.ring.rkeys[lane % MAX_RAILS] };
        if let [part] = parts
            && self.lanes[lane].inline_bytes() >= ENTRY_BYTES as u32
        {
            let words = self.entry(part, 0, 1, strict).encode(grant.sequence);
            let mut bytes = [0; ENTRY_BYTES];
            for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
                to.copy_from_slice(&word.to_ne_bytes());
            }
            let write = LaneWrite { work: Work::Cts, queue: 0, remote, ..LaneWrite::default() };
            return self.lanes[lane].write_inline(bytes.as_slice().into(), &write);
        }
        for (index, part) in parts.iter().enumerate() {
            let words = self.entry(part, index, parts.len(), strict).encode(grant.sequence);
            let place = self.shadow.words().iter().skip(at + index * ENTRY_WORDS);
            for (cell, word) in place.zip(words) {
                // Relaxed: the provider orders these before the doorbell that makes the NIC read them.
                cell.store(word, Ordering::Relaxed);
            }
        }
        let lkey = self.shadow_keys.get(lane).map_or(0, Mr::lkey);
        self.lanes[lane].write(&LaneWrite {
            work: Work::Cts,
            queue: 0,
            local_addr: self.shadow.addr() + at as u64 * 8,
            lkey,
            bytes: (parts.len() * ENTRY_BYTES) as u32,
            remote,
            immediate: None,
            signaled: false,
        })
    }

    #[inline]
    fn entry(&self, part: &RecvPart<'_>, index: usize, count: usize, strict: bool) -> Entry {
        let mut rkeys = [0; MAX_RAILS];
        for (rkey, lane) in rkeys.iter_mut().zip(&self.lanes) {
            let keys = part.memory.keys(lane.rail.index);
            *rkey = keys.map_or(0, |keys| if strict { keys.strict_rkey } else { keys.relaxed_rkey });
        }
        let bytes = part.bytes as u64;
        Entry { addr: part.addr, bytes, tag: part.tag, parts: count as u8, part: index as u8, rkeys }
    }

    #[inline]
    fn test(&mut self, comm: &RecvComm, request: u16, mut tell: impl FnMut(usize, u64)) -> Result<bool> {
        if self.receives.test(request, &mut tell).map_err(not_in_flight)? {
            return Ok(true);
        }
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        if !self.progress(comm)? {
            return self.stalled(comm, "a receive").map(|()| false);
        }
        self.receives.test(request, tell).map_err(not_in_flight)
    }

    /// Takes in what has arrived; whether anything had. Looks at the lane that bytes last came by, and only when it
    /// has nothing at one other, in turn: an idle rail costs nothing while others are busy.
    #[inline]
    fn progress(&mut self, comm: &RecvComm) -> Result<bool> {
        if self.take_in(comm, self.hot)? {
            self.patience.moved();
            return Ok(true);
        }
        if self.lanes.len() > 1 {
            self.cold = if self.cold + 1 < self.lanes.len() { self.cold + 1 } else { 0 };
            if self.cold != self.hot && self.take_in(comm, self.cold)? {
                self.hot = self.cold;
                self.patience.moved();
                return Ok(true);
            }
        }
        Ok(false)
    }

    #[inline]
    fn take_in(&mut self, comm: &RecvComm, index: usize) -> Result<bool> {
        let lane = &mut self.lanes[index];
        if self.receives.open() == 0 && !lane.has_pending() {
            return Ok(false);
        }
        let completions = lane.poll(&mut self.buffer)?;
        let moved = !completions.is_empty();
        for completion in completions {
            if let Err(error) = arrive(lane, &mut self.receives, comm, completion) {
                self.failed = Some(error.clone());
                return Err(error);
            }
        }
        Ok(moved)
    }

    #[inline]
    fn stalled(&mut self, comm: &RecvComm, what: &str) -> Result<()> {
        match (self.patience.idle(), comm.peer.presence()) {
            (None, Presence::Here) => Ok(()),
            (waited, presence) => self.waiting(comm, what, waited, presence),
        }
    }

    #[cold]
    fn waiting(&mut self, comm: &RecvComm, what: &str, waited: Option<Duration>, presence: Presence) -> Result<()> {
        if presence != Presence::Here {
            // What arrived before the peer left may lie on a lane whose turn has not come.
            for index in 0..self.lanes.len() {
                if self.take_in(comm, index)? {
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
    fn fail(&mut self, error: Error) -> Error {
        self.failed = Some(error.clone());
        error
    }
}

#[inline]
fn check_parts(parts: &[RecvPart<'_>]) -> Result<()> {
    if parts.is_empty() || parts.len() > PARTS {
        return Err(group_size(parts.len()));
    }
    for part in parts {
        if part.bytes as u64 > MAX_RECEIVE_BYTES || !part.memory.covers(part.addr, part.bytes) {
            return Err(outside("irecv", part.addr, part.bytes, part.memory));
        }
    }
    Ok(())
}

/// Acts on one completion of a receiver's lane.
#[inline]
fn arrive(lane: &mut Lane, receives: &mut Receives, comm: &RecvComm, completion: &Completion) -> Result<()> {
    if completion.status() != 0 {
        // A peer that has closed takes its queue pairs away: clear-to-sends that it never needed fail then.
        return match comm.peer.presence() {
            Presence::Closed { .. } => Ok(()),
            _ => Err(completion_failure(&comm.peer, lane, completion)),
        };
    }
    let id = WorkId::decode(completion.wr_id());
    if !completion.is_receive_immediate() {
        lane.retire(id);
        return Ok(());
    }
    let (immediate, bytes) = (Immediate::decode(completion.immediate()), completion.bytes());
    match receives.arrived(immediate, bytes) {
        Ok(Arrival::Part | Arrival::Whole) => {}
        Ok(Arrival::Stale) => tracing::debug!("{} sent a stale {immediate:?}", comm.peer.name),
        Err(violation) => return Err(broken_protocol(&comm.peer, &violation)),
    }
    lane.used_receive(id.queue)
}

#[cold]
fn group_size(count: usize) -> Error {
    Error::Argument(format!("a group of {count} receives: 1 to {PARTS} are possible"))
}
