//! The sending half of a connection: the data path of `isend` and of `test` on sends.

use super::Host;
use super::lane::{Lane, LaneWrite, loads};
use super::owner::Owner;
use super::patience::Patience;
use super::peer::{Peer, Presence};
use super::registration::Registration;
use super::service::WatchId;
use super::trouble::{Stall, broken_protocol, completion_failure, lanes_text, not_in_flight, outside, stall_verdict};
use super::work::{Work, WorkId};
use crate::error::{Error, Result};
use crate::flow::Sizes;
use crate::flow::plan::{Shares, plan, stays};
use crate::flow::sends::{Matched, Sends, Target, leads};
use crate::verbs::{CompletionBuffer, HostMemory, Mr, Region, Remote};
use crate::wire::MAX_RAILS;
use crate::wire::immediate::MAX_LEADS;
use crate::wire::message::Bye;
use std::sync::Arc;
use std::time::Duration;

/// A connection that sends. `isend` and `test` come from one thread at a time; `register` from any.
pub struct SendComm {
    host: Arc<Host>,
    peer: Arc<Peer>,
    watch: WatchId,
    path: Owner<SendPath>,
}

/// What the data path works on.
pub struct SendPath {
    sends: Sends,
    lanes: Vec<Lane>,
    ring: Arc<Region>,
    /// The ring's registrations, one a lane.
    _ring_keys: Vec<Mr>,
    chunk_bytes: u64,
    min_share_bytes: u64,
    favourite: usize,
    buffer: CompletionBuffer,
    patience: Patience,
    failed: Option<Error>,
}

impl SendComm {
    pub(super) fn new(host: Arc<Host>, peer: Arc<Peer>, watch: WatchId, path: SendPath) -> Self {
        Self { host, peer, watch, path: Owner::new(path) }
    }

    /// Registers memory on every rail.
    ///
    /// # Errors
    /// As [`super::registration::Registrations::register`].
    pub fn register(&self, memory: HostMemory) -> Result<Arc<Registration>> {
        self.host.registrations.register(&self.host.rails, memory)
    }

    /// Starts to send `bytes` at `addr`; its request number, or `None` when the receiver has not yet granted a
    /// receive for `tag` or there is no room: try again.
    ///
    /// # Errors
    /// [`Error::Argument`] when the memory is not registered; [`Error::Usage`] when the receive is smaller than the
    /// send; [`Error::Remote`] when the connection has failed.
    #[inline]
    pub fn isend(&self, addr: u64, bytes: usize, tag: i32, memory: &Registration) -> Result<Option<u16>> {
        match self.path.enter() {
            Some(mut path) => path.isend(self, addr, bytes, tag, memory),
            None => Ok(None),
        }
    }

    /// The size of a finished send; `None` while it runs.
    ///
    /// # Errors
    /// [`Error::Argument`] when there is no such request; [`Error::Remote`] when the connection has failed.
    #[inline]
    pub fn test(&self, request: u16) -> Result<Option<Sizes>> {
        match self.path.enter() {
            Some(mut path) => path.test(self, request),
            None => Ok(None),
        }
    }

    /// Closes the connection. The peer need not be there.
    pub fn close(self) {
        let path = self.path.into_inner();
        self.host.closed(&self.peer.name);
        self.host.service.close(self.watch, Bye { delivered: 0 }, Box::new(path));
    }
}

impl SendPath {
    /// A path over connected lanes (1 to [`MAX_RAILS`]); `ring` is what the peer writes its clear-to-sends into.
    pub(super) fn new(
        lanes: Vec<Lane>,
        ring: Arc<Region>,
        ring_keys: Vec<Mr>,
        chunk_bytes: u32,
        min_share_bytes: u64,
    ) -> Self {
        Self {
            sends: Sends::new(),
            lanes,
            ring,
            _ring_keys: ring_keys,
            chunk_bytes: u64::from(chunk_bytes),
            min_share_bytes,
            favourite: 0,
            buffer: CompletionBuffer::new(),
            patience: Patience::default(),
            failed: None,
        }
    }

    #[inline]
    fn isend(
        &mut self,
        comm: &SendComm,
        addr: u64,
        bytes: usize,
        tag: i32,
        memory: &Registration,
    ) -> Result<Option<u16>> {
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        // A peer that has closed grants nothing any more, and what it confirms now may be named like a new request.
        if comm.peer.presence() != Presence::Here {
            return self.stalled(comm, "a send", bytes).map(|()| None);
        }
        if !memory.covers(addr, bytes) {
            return Err(outside("isend", addr, bytes, memory));
        }
        if !self.sends.has_room() {
            return self.stalled(comm, "a send", bytes).map(|()| None);
        }
        let found = match self.sends.peek(self.ring.words(), tag) {
            Ok(found) => found,
            Err(violation) => return Err(self.fail(broken_protocol(&comm.peer, &violation))),
        };
        let Some((part, matched)) = found else {
            return self.stalled(comm, "a send without a receive", bytes).map(|()| None);
        };
        let size = bytes as u64;
        if size > matched.entry.bytes || leads(size, self.chunk_bytes) > MAX_LEADS {
            return Err(too_large(&comm.peer, size, tag, &matched, self.chunk_bytes));
        }
        self.patience.moved();
        let shares = self.plan(size);
        self.sends.take(part);
        let target = self.target(addr, memory, matched, &shares);
        let (lanes, chunk_bytes) = (&mut self.lanes, self.chunk_bytes);
        let request = self.sends.start(matched.sequence, target, size, &shares, chunk_bytes, |lane| {
            lanes.get_mut(usize::from(lane)).map_or(0, Lane::next_queue)
        });
        let Some(request) = request else { return Ok(None) };
        for share in shares.as_slice() {
            self.lanes[usize::from(share.lane)].began(share.bytes);
        }
        self.post(request)?;
        Ok(Some(request))
    }

    #[inline]
    fn plan(&mut self, bytes: u64) -> Shares {
        if stays(bytes, &self.lanes[self.favourite].load(), self.min_share_bytes) {
            return Shares::whole(self.favourite, bytes);
        }
        let (loads, count) = loads(&self.lanes);
        let shares = plan(bytes, &loads[..count], self.min_share_bytes, self.favourite);
        if let [only] = shares.as_slice() {
            self.favourite = usize::from(only.lane);
        }
        shares
    }

    #[inline]
    fn target(&self, local_addr: u64, memory: &Registration, matched: Matched, shares: &Shares) -> Target {
        let mut lkeys = [0; MAX_RAILS];
        for share in shares.as_slice() {
            let lane = usize::from(share.lane);
            lkeys[lane] = memory.keys(self.lanes[lane].rail.index).map_or(0, |keys| keys.lkey);
        }
        Target { local_addr, lkeys, entry: matched.entry }
    }

    /// Posts what a send has not posted, as far as the queue pairs have room.
    #[inline]
    fn post(&mut self, request: u16) -> Result<()> {
        for share in 0..self.sends.shares_to_post(request) {
            while let Some((next, target)) = self.sends.next_write(request, share, self.chunk_bytes) {
                let lane = &mut self.lanes[usize::from(next.lane)];
                if !lane.has_room(next.qp) {
                    break;
                }
                let place = usize::from(next.lane) % MAX_RAILS;
                let remote = Remote { addr: target.entry.addr + next.offset, rkey: target.entry.rkeys[place] };
                let last = next.immediate.is_some();
                let posted = lane.write(&LaneWrite {
                    work: if last { Work::Share { request, share } } else { Work::Lead },
                    queue: next.qp,
                    local_addr: target.local_addr + next.offset,
                    lkey: target.lkeys[place],
                    bytes: next.bytes,
                    remote,
                    immediate: next.immediate.map(|immediate| immediate.encode()),
                    signaled: last,
                });
                if let Err(error) = posted {
                    return Err(self.fail(error));
                }
                self.sends.posted(request, share, &next);
            }
        }
        Ok(())
    }

    #[inline]
    fn test(&mut self, comm: &SendComm, request: u16) -> Result<Option<Sizes>> {
        if let Some(sizes) = self.sends.test(request).map_err(not_in_flight)? {
            return Ok(Some(sizes));
        }
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        if self.progress(comm)? {
            self.patience.moved();
            self.post(request)?;
            return self.sends.test(request).map_err(not_in_flight);
        }
        self.stalled(comm, "a running send", 0)?;
        self.sends.test(request).map_err(not_in_flight)
    }

    /// Takes in what has completed; whether anything had.
    #[inline]
    fn progress(&mut self, comm: &SendComm) -> Result<bool> {
        let mut moved = false;
        for index in 0..self.lanes.len() {
            let lane = &mut self.lanes[index];
            if !lane.has_pending() {
                continue;
            }
            for completion in lane.poll(&mut self.buffer)? {
                moved = true;
                if completion.status() != 0 {
                    if let Presence::Closed { .. } = comm.peer.presence() {
                        continue;
                    }
                    let failure = completion_failure(&comm.peer, lane, completion);
                    self.failed = Some(failure.clone());
                    return Err(failure);
                }
                let id = WorkId::decode(completion.wr_id());
                lane.retire(id);
                if let Work::Share { request, share } = id.work
                    && let Ok(bytes) = self.sends.confirmed(request, share)
                {
                    lane.finished(bytes);
                }
            }
        }
        Ok(moved)
    }

    /// Nothing can be done now. Every now and then this looks whether the peer is still there, and says so when it
    /// has taken long. What runs is done when a peer that closed had received it.
    #[inline]
    fn stalled(&mut self, comm: &SendComm, what: &str, bytes: usize) -> Result<()> {
        match (self.patience.idle(), comm.peer.presence()) {
            (None, Presence::Here) => Ok(()),
            (waited, presence) => self.waiting(comm, what, bytes, waited, presence),
        }
    }

    #[cold]
    fn waiting(
        &mut self,
        comm: &SendComm,
        what: &str,
        bytes: usize,
        waited: Option<Duration>,
        presence: Presence,
    ) -> Result<()> {
        let waited = waited.unwrap_or_else(|| self.patience.elapsed());
        if let Presence::Closed { delivered } = presence
            && self.sends.delivered(delivered)
        {
            self.patience.moved();
            return Ok(());
        }
        match stall_verdict(&mut self.patience, &comm.peer, presence, waited, comm.host.config.stall_warn) {
            Stall::Wait => Ok(()),
            Stall::Warn => {
                let (peer, lanes) = (&comm.peer.name, lanes_text(&self.lanes));
                tracing::warn!("{what} of {bytes} bytes to {peer} has waited {waited:.0?}; {lanes}");
                Ok(())
            }
            Stall::Fail(why) => {
                Err(self.fail(Error::Remote(format!("{why} while {what} was waiting; {}", lanes_text(&self.lanes)))))
            }
        }
    }

    #[cold]
    fn fail(&mut self, error: Error) -> Error {
        self.failed = Some(error.clone());
        error
    }
}

#[cold]
fn too_large(peer: &Peer, bytes: u64, tag: i32, matched: &Matched, chunk_bytes: u64) -> Error {
    let room = matched.entry.bytes;
    if bytes > room {
        return Error::Usage(format!(
            "a send of {bytes} bytes meets a receive of {room} bytes (tag {tag:#x}, peer {}): the ranks disagree on a size",
            peer.name
        ));
    }
    Error::Argument(format!("a send of {bytes} bytes: at most {} on this connection", chunk_bytes * (MAX_LEADS + 1)))
}
