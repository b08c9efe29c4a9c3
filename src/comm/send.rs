//! The sending half of a connection: the data path of `isend` and of `test` on sends.

use super::Host;
use super::clock::Clock;
use super::lane::{Lane, LaneWrite};
use super::owner::Owner;
use super::patience::Patience;
use super::peer::{Peer, Presence};
use super::registration::Registration;
use super::service::WatchId;
use super::trouble::{Stall, broken_protocol, completion_failure, lanes_text, not_in_flight, outside, stall_verdict};
use super::work::{Work, WorkId};
use crate::error::{Error, Result};
use crate::flow::plan::Share;
use crate::flow::sends::{Head, Message, Route, Sends};
use crate::flow::striping::Striping;
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
    striping: Striping,
    clock: Clock,
    chunk_bytes: u64,
    /// The largest send, as many full chunks as an immediate can name and one more.
    most_bytes: u64,
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
    pub fn test(&self, request: u16) -> Result<Option<u64>> {
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
        striping: Striping,
    ) -> Self {
        let chunk_bytes = u64::from(chunk_bytes);
        Self {
            sends: Sends::new(),
            lanes,
            ring,
            _ring_keys: ring_keys,
            striping,
            clock: Clock::start(),
            chunk_bytes,
            most_bytes: chunk_bytes * (MAX_LEADS + 1),
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
        let Some(Head { sequence, entry }) = found else {
            return self.stalled(comm, "a send without a receive", bytes).map(|()| None);
        };
        let size = bytes as u64;
        if size > entry.bytes || size > self.most_bytes {
            return Err(too_large(&comm.peer, size, tag, entry.bytes, self.most_bytes));
        }
        let (part, remote_addr, rkeys) = (entry.part, entry.addr, entry.rkeys);
        let message = Message { sequence, part, bytes: size, local_addr: addr, remote_addr };
        self.patience.moved();
        if !self.striping.is_small(size) {
            return self.send_cut(&message, memory, &rkeys);
        }
        let lanes = &self.lanes;
        let rail = self.striping.rail_for(size, |rail| lanes.get(rail).map_or(0, |lane| lane.rail.backlog_bytes()));
        self.send_whole(&message, rail, memory, &rkeys)
    }

    /// A small message: one write on one rail.
    #[inline]
    fn send_whole(
        &mut self,
        message: &Message,
        rail: usize,
        memory: &Registration,
        rkeys: &[u32; MAX_RAILS],
    ) -> Result<Option<u16>> {
        let lane = &mut self.lanes[rail];
        let queue = lane.next_queue();
        let timed = self.striping.is_timed(message.bytes);
        if timed || !lane.has_room(queue) {
            let share = Share { lane: rail as u8, offset: 0, bytes: message.bytes };
            return self.send_shares(message, &[share], memory, rkeys);
        }
        let Some((request, immediate)) = self.sends.start_whole(message) else { return Ok(None) };
        let write = LaneWrite {
            work: Work::Share { request, share: 0 },
            queue,
            local_addr: message.local_addr,
            lkey: memory.keys(lane.rail.index).map_or(0, |keys| keys.lkey),
            bytes: message.bytes as u32,
            remote: Remote { addr: message.remote_addr, rkey: rkeys[rail % MAX_RAILS] },
            immediate: Some(immediate.encode()),
            signaled: true,
        };
        let inline = if write.bytes <= lane.inline_bytes() && write.bytes > 0 {
            memory.readable(write.local_addr, write.bytes)
        } else {
            None
        };
        let posted = match inline {
            Some(bytes) => lane.write_inline(bytes, &write),
            None => lane.write(&write),
        };
        match posted {
            Ok(()) => {
                self.striping.given(rail, message.bytes, None);
                Ok(Some(request))
            }
            Err(error) => Err(self.fail(error)),
        }
    }

    /// A large message: a share for each rail that helps.
    #[inline(never)]
    fn send_cut(&mut self, message: &Message, memory: &Registration, rkeys: &[u32; MAX_RAILS]) -> Result<Option<u16>> {
        let shares = self.striping.cut(message.bytes, self.clock.now_ns());
        self.send_shares(message, shares.as_slice(), memory, rkeys)
    }

    #[inline(never)]
    fn send_shares(
        &mut self,
        message: &Message,
        shares: &[Share],
        memory: &Registration,
        rkeys: &[u32; MAX_RAILS],
    ) -> Result<Option<u16>> {
        let now_ns = self.clock.now_ns();
        let (lanes, chunk_bytes) = (&mut self.lanes, self.chunk_bytes);
        let request = self.sends.start(message, shares, chunk_bytes, |rail| {
            let lane = &mut lanes[usize::from(rail)];
            let lkey = memory.keys(lane.rail.index).map_or(0, |keys| keys.lkey);
            Route { queue: lane.next_queue(), lkey, rkey: rkeys[usize::from(rail) % MAX_RAILS] }
        });
        let Some(request) = request else { return Ok(None) };
        for share in shares {
            let rail = usize::from(share.lane);
            let timed = self.striping.is_timed(share.bytes);
            self.striping.given(rail, share.bytes, timed.then_some(now_ns));
            if timed {
                self.lanes[rail].began(share.bytes);
            }
        }
        self.post(request)?;
        Ok(Some(request))
    }

    /// Posts what a send has not posted, as far as the queue pairs have room.
    #[inline]
    fn post(&mut self, request: u16) -> Result<()> {
        for share in 0..self.sends.shares_to_post(request) {
            while let Some(next) = self.sends.next_write(request, share, self.chunk_bytes) {
                let lane = &mut self.lanes[usize::from(next.lane)];
                if !lane.has_room(next.route.queue) {
                    break;
                }
                let last = next.immediate.is_some();
                let posted = lane.write(&LaneWrite {
                    work: if last { Work::Share { request, share } } else { Work::Lead },
                    queue: next.route.queue,
                    local_addr: next.local_addr,
                    lkey: next.route.lkey,
                    bytes: next.bytes,
                    remote: Remote { addr: next.remote_addr, rkey: next.route.rkey },
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
    fn test(&mut self, comm: &SendComm, request: u16) -> Result<Option<u64>> {
        if let Some(bytes) = self.sends.test(request).map_err(not_in_flight)? {
            return Ok(Some(bytes));
        }
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        if self.progress(comm)? {
            self.patience.moved();
        } else {
            self.stalled(comm, "a running send", 0)?;
        }
        // What had no room when it began; another request's test may have made it.
        self.post(request)?;
        self.sends.test(request).map_err(not_in_flight)
    }

    /// Takes in what has completed; whether anything had.
    #[inline]
    fn progress(&mut self, comm: &SendComm) -> Result<bool> {
        let mut moved = false;
        // One reading of the clock does for all that is found now.
        let mut now_ns = None;
        for (rail, lane) in self.lanes.iter_mut().enumerate() {
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
                let Work::Share { request, share } = id.work else { continue };
                let Ok(bytes) = self.sends.confirmed(request, share) else { continue };
                lane.count(bytes);
                if self.striping.is_timed(bytes) {
                    let now_ns = *now_ns.get_or_insert_with(|| self.clock.now_ns());
                    self.striping.confirmed(rail, bytes, Some(now_ns));
                    lane.finished(bytes);
                } else {
                    self.striping.confirmed(rail, bytes, None);
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
fn too_large(peer: &Peer, bytes: u64, tag: i32, room: u64, most: u64) -> Error {
    if bytes > room {
        return Error::Usage(format!(
            "a send of {bytes} bytes meets a receive of {room} bytes (tag {tag:#x}, peer {}): the ranks disagree on a size",
            peer.name
        ));
    }
    Error::Argument(format!("a send of {bytes} bytes: at most {most} on this connection"))
}
