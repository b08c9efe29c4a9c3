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
use crate::error::{Error, Quick, Result};
use crate::flow::next::{Head, Peek};
use crate::flow::plan::Shares;
use crate::flow::sends::{Route, Sends};
use crate::flow::striping::Striping;
use crate::verbs::{CompletionBuffer, HostMemory, Mr, Region, Remote};
use crate::wire::immediate::{Immediate, MAX_LEADS};
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
    /// The last reading of the clock.
    now_ns: u64,
    chunk_bytes: u64,
    /// Up to this size a send is one write on one rail.
    whole_bytes: u64,
    /// The largest send, as many full chunks as an immediate can name and one more.
    most_bytes: u64,
    buffer: CompletionBuffer,
    patience: Patience,
    failed: Option<Box<Error>>,
}

/// What `isend` was asked to send.
#[derive(Clone, Copy)]
struct Send<'a> {
    addr: u64,
    bytes: u64,
    tag: i32,
    memory: &'a Registration,
}

impl Send<'_> {
    /// The memory's key on a lane's rail.
    #[inline(always)]
    fn lkey(&self, lane: &Lane) -> u32 {
        self.memory.keys(lane.rail.index).map_or(0, |keys| keys.lkey)
    }
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
    #[inline(always)]
    pub fn isend(&self, addr: u64, bytes: usize, tag: i32, memory: &Registration) -> Quick<Option<u16>> {
        match self.path.enter() {
            Some(mut path) => path.isend(self, addr, bytes, tag, memory),
            None => Ok(None),
        }
    }

    /// The size of a finished send; `None` while it runs.
    ///
    /// # Errors
    /// [`Error::Argument`] when there is no such request; [`Error::Remote`] when the connection has failed.
    #[inline(always)]
    pub fn test(&self, request: u16) -> Quick<Option<u64>> {
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
            whole_bytes: striping.whole_bytes().min(chunk_bytes),
            striping,
            clock: Clock::start(),
            now_ns: 0,
            chunk_bytes,
            most_bytes: chunk_bytes * (MAX_LEADS + 1),
            buffer: CompletionBuffer::new(),
            patience: Patience::default(),
            failed: None,
        }
    }

    #[inline(always)]
    fn isend(
        &mut self,
        comm: &SendComm,
        addr: u64,
        bytes: usize,
        tag: i32,
        memory: &Registration,
    ) -> Quick<Option<u16>> {
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        // A peer that has closed grants nothing any more, and what it confirms now may be named like a new request.
        if comm.peer.presence() != Presence::Here {
            return self.stalled(comm, "a send", bytes).map(|()| None);
        }
        if !memory.covers(addr, bytes) {
            return Err(outside("isend", addr, bytes, memory).into());
        }
        if !self.sends.has_room() {
            return self.stalled(comm, "a send", bytes).map(|()| None);
        }
        let send = Send { addr, bytes: bytes as u64, tag, memory };
        match self.sends.peek(self.ring.words(), tag) {
            Peek::Found(head) if send.bytes <= head.room_bytes.min(self.whole_bytes) => self.send_whole(head, send),
            Peek::Found(head) if send.bytes <= head.room_bytes.min(self.most_bytes) => self.send_cut(head, send),
            Peek::Nothing => self.stalled(comm, "a send without a receive", bytes).map(|()| None),
            _ => self.search_and_send(comm, send),
        }
    }

    /// A send for a part of a group, or of a size that is not possible.
    #[inline(never)]
    fn search_and_send(&mut self, comm: &SendComm, send: Send<'_>) -> Quick<Option<u16>> {
        let head = match self.sends.search(self.ring.words(), send.tag) {
            Ok(Some(head)) => head,
            Ok(None) => return self.stalled(comm, "a send without a receive", send.bytes as usize).map(|()| None),
            Err(violation) => return Err(self.fail(broken_protocol(&comm.peer, &violation))),
        };
        if send.bytes > head.room_bytes.min(self.most_bytes) {
            return Err(too_large(&comm.peer, send.bytes, send.tag, head.room_bytes, self.most_bytes));
        }
        if send.bytes <= self.whole_bytes { self.send_whole(head, send) } else { self.send_cut(head, send) }
    }

    /// A small message: one write on one rail.
    #[inline(always)]
    fn send_whole(&mut self, head: Head, send: Send<'_>) -> Quick<Option<u16>> {
        self.patience.moved();
        let size = send.bytes;
        let lanes = &self.lanes;
        let mut rail = self.striping.rail_for(size, |rail| lanes.get(rail).map_or(0, |lane| lane.rail.backlog_bytes()));
        let mut now_ns = None;
        let counted = self.striping.is_counted(size);
        if counted {
            rail = self.striping.rail_to_try(rail, size, self.now_ns);
            if self.striping.is_to_time(size) {
                // Behind others a write's service begins when the one before is confirmed: the last reading will do.
                if self.striping.is_idle(rail) {
                    self.now_ns = self.clock.now_ns();
                }
                now_ns = Some(self.now_ns);
            }
        }
        let lane = &mut self.lanes[rail];
        if counted {
            lane.began(size);
        }
        let (lkey, inline_bytes) = (send.lkey(lane), lane.inline_bytes());
        let Some(slot) = lane.next_slot() else {
            return self.send_shares(head, send, &Shares::whole(rail, size), now_ns);
        };
        let rkey = head.rkey(self.ring.words(), rail);
        let Some((request, immediate)) = self.sends.start_whole(head, size) else { return Ok(None) };
        let write = LaneWrite {
            work: Work::Share { request, share: 0, timed: now_ns.is_some() },
            local_addr: send.addr,
            lkey,
            bytes: size as u32,
            remote: Remote { addr: head.addr, rkey },
            immediate: Some(immediate.encode()),
            signaled: true,
        };
        let small = write.bytes.wrapping_sub(1) < inline_bytes;
        let inline = if small { send.memory.readable(write.local_addr, write.bytes) } else { None };
        if let Err(error) = slot.write(&write, inline) {
            return Err(self.fail(error));
        }
        self.striping.given(rail, size, now_ns);
        Ok(Some(request))
    }

    /// A large message: a share for each rail that helps.
    #[inline(never)]
    fn send_cut(&mut self, head: Head, send: Send<'_>) -> Quick<Option<u16>> {
        self.patience.moved();
        let now_ns = self.clock.now_ns();
        self.now_ns = now_ns;
        let shares = self.striping.cut(send.bytes, now_ns);
        for share in shares.as_slice() {
            if self.striping.is_counted(share.bytes) {
                self.lanes[usize::from(share.lane)].began(share.bytes);
            }
        }
        self.send_shares(head, send, &shares, Some(now_ns))
    }

    /// `now_ns` is there where the shares are timed that are large enough. The lanes know of what is large enough.
    #[inline(never)]
    fn send_shares(&mut self, head: Head, send: Send<'_>, shares: &Shares, now_ns: Option<u64>) -> Quick<Option<u16>> {
        let shares = shares.as_slice();
        let Some(request) = self.sends.start(&head, send.addr, shares) else { return Ok(None) };
        for (number, share) in shares.iter().enumerate() {
            let (rail, number) = (usize::from(share.lane), number as u8);
            let timed = now_ns.is_some() && self.striping.is_counted(share.bytes);
            self.striping.given(rail, share.bytes, now_ns.filter(|_| timed));
            let lane = &mut self.lanes[rail];
            let (queue, lkey, rkey) = (lane.next_queue(), send.lkey(lane), head.rkey(self.ring.words(), rail));
            let Some(slot) = lane.slot(queue).filter(|_| share.bytes <= self.chunk_bytes) else {
                self.sends.keep_share(request, number, share, Route { queue, lkey, rkey, timed }, self.chunk_bytes);
                continue;
            };
            let immediate = self.sends.post_share(request, number, share.bytes);
            let write = LaneWrite {
                work: Work::Share { request, share: number, timed },
                local_addr: send.addr + share.offset,
                lkey,
                bytes: share.bytes as u32,
                remote: Remote { addr: head.addr + share.offset, rkey },
                immediate: immediate.map(Immediate::encode),
                signaled: true,
            };
            if let Err(error) = slot.write(&write, None) {
                return Err(self.fail(error));
            }
        }
        if self.sends.shares_to_post(request) > 0 {
            self.post(request)?;
        }
        Ok(Some(request))
    }

    /// Posts what a send has not posted, as far as the queue pairs have room.
    #[inline]
    fn post(&mut self, request: u16) -> Quick<()> {
        for share in 0..self.sends.shares_to_post(request) {
            while let Some(next) = self.sends.next_write(request, share, self.chunk_bytes) {
                let Some(slot) = self.lanes[usize::from(next.lane)].slot(next.route.queue) else { break };
                let (last, timed) = (next.immediate.is_some(), next.route.timed);
                let write = LaneWrite {
                    work: if last { Work::Share { request, share, timed } } else { Work::Lead },
                    local_addr: next.local_addr,
                    lkey: next.route.lkey,
                    bytes: next.bytes,
                    remote: Remote { addr: next.remote_addr, rkey: next.route.rkey },
                    immediate: next.immediate.map(|immediate| immediate.encode()),
                    signaled: last,
                };
                if let Err(error) = slot.write(&write, None) {
                    return Err(self.fail(error));
                }
                self.sends.posted(request, share, &next);
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn test(&mut self, comm: &SendComm, request: u16) -> Quick<Option<u64>> {
        match self.sends.test(request) {
            Ok(None) => self.progress_and_test(comm, request),
            known => known.map_err(not_in_flight),
        }
    }

    #[inline(always)]
    fn progress_and_test(&mut self, comm: &SendComm, request: u16) -> Quick<Option<u64>> {
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        if self.progress(comm)? {
            self.patience.moved();
        } else {
            self.stalled(comm, "a running send", 0)?;
        }
        // What had no room when it began; another request's test may have made it.
        if self.sends.shares_to_post(request) > 0 {
            self.post(request)?;
        }
        self.sends.test(request).map_err(not_in_flight)
    }

    /// Takes in what has completed; whether anything had.
    #[inline(always)]
    fn progress(&mut self, comm: &SendComm) -> Quick<bool> {
        let mut moved = false;
        // One reading of the clock does for all that is found now.
        let mut is_read = false;
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
                    let failure = Box::new(completion_failure(&comm.peer, lane, completion));
                    self.failed = Some(failure.clone());
                    return Err(failure);
                }
                let id = WorkId::decode(completion.wr_id());
                lane.retire(id);
                let Work::Share { request, share, timed } = id.work else { continue };
                let Ok(bytes) = self.sends.confirmed(request, share) else { continue };
                lane.count(bytes);
                if self.striping.is_counted(bytes) {
                    lane.finished(bytes);
                }
                if !timed {
                    self.striping.confirmed(rail, bytes, None);
                    continue;
                }
                if !is_read {
                    (self.now_ns, is_read) = (self.clock.now_ns(), true);
                }
                self.striping.confirmed(rail, bytes, Some(self.now_ns));
            }
        }
        Ok(moved)
    }

    /// Nothing can be done now. Every now and then this looks whether the peer is still there, and says so when it
    /// has taken long. What runs is done when a peer that closed had received it.
    #[inline(always)]
    fn stalled(&mut self, comm: &SendComm, what: &'static str, bytes: usize) -> Quick<()> {
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
    ) -> Quick<()> {
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
    fn fail(&mut self, error: impl Into<Box<Error>>) -> Box<Error> {
        let error = error.into();
        self.failed = Some(error.clone());
        error
    }
}

#[cold]
fn too_large(peer: &Peer, bytes: u64, tag: i32, room: u64, most: u64) -> Box<Error> {
    if bytes > room {
        return Box::new(Error::Usage(format!(
            "a send of {bytes} bytes meets a receive of {room} bytes (tag {tag:#x}, peer {}): the ranks disagree on a size",
            peer.name
        )));
    }
    Box::new(Error::Argument(format!("a send of {bytes} bytes: at most {most} on this connection")))
}
