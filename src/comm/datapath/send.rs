//! `isend`, and `test` on sends. `send/failover.rs` reacts to lost and returning rails.
//!
//! The receiver grants a receive: it writes CTS (clear-to-send) entries into the ring, which is
//! memory of the sender. `isend` needs a granted receive with its tag. It sends the bytes in
//! shares, one on each lane that it uses. A share is one write, or several writes (chunks) if it is
//! large.

mod failover;

use super::context::PathContext;
use super::fault::{Fault, broken_protocol, not_in_flight, outside_registration, too_large};
use super::lane::{Lane, LaneWrite, Role};
use super::load::Sending;
use super::parts::PathParts;
use super::path::Faults;
use super::peer::PeerState;
use super::rails::Rails;
use super::stall::{StallTimer, Stalled};
use super::wr_id::{Work, WrId};
use crate::clock::Clock;
use crate::comm::log::once::Direction;
use crate::comm::rail::registration::Registration;
#[cfg(doc)]
use host::error::Error;
use host::error::Quick;
use proto::flow::next::{Head, Peek};
use proto::flow::plan::Shares;
use proto::flow::sends::{REQUESTS, Route, Sends};
use proto::flow::striping::Striping;
use proto::wire::ids::LaneId;
use proto::wire::immediate::{Immediate, MAX_FULL_CHUNKS};
use std::sync::Arc;
use std::time::Duration;
use verbs::{Completion, CompletionBuffer, Region, Remote};

/// State of the sending data path.
pub struct SendPath {
    sends: Sends,
    rails: Rails,
    ring: Arc<Region>,
    clock: Clock,
    /// Last reading of the clock.
    now_ns: u64,
    chunk_bytes: u64,
    sizes: Sizes,
    buffer: CompletionBuffer,
    stall: StallTimer,
    /// For each request number: the time when the send was given to its lanes. Valid only if writes
    /// of the send are timed.
    given_ns: Box<[u64; REQUESTS]>,
}

#[derive(Clone, Copy)]
struct Sizes {
    /// Size of the largest send that always is a single write on one lane.
    max_unsplit_bytes: u64,
    /// Size of the largest send. All its bytes must fit into one share: [`MAX_FULL_CHUNKS`] full
    /// chunks, which is the largest number that an immediate can hold, and one last chunk.
    most_bytes: u64,
}

#[derive(Clone, Copy)]
struct Send<'a> {
    addr: u64,
    bytes: u64,
    tag: i32,
    memory: &'a Registration,
}

/// Parts of a data path that the completions of a lane change.
struct Confirmation<'a> {
    by: LaneId,
    lane: &'a mut Lane,
    sends: &'a mut Sends,
    striping: &'a mut Striping,
    clock: &'a Clock,
    now_ns: &'a mut u64,
    given_ns: &'a [u64; REQUESTS],
}

impl Confirmation<'_> {
    /// Processes completions, including those after a failed one. Returns true if there were any.
    #[inline(always)]
    fn take_in(
        self,
        completions: &[Completion],
        is_read: &mut bool,
    ) -> std::result::Result<bool, Box<Fault>> {
        let Self {
            by,
            lane,
            sends,
            striping,
            clock,
            now_ns,
            given_ns,
        } = self;
        let mut fault = None;
        for completion in completions {
            if completion.status() != 0 {
                let next = Fault::of_completion(completion);
                fault.get_or_insert(next);
                continue;
            }
            let id = WrId::of(completion.wr_id());
            lane.retire(id);
            let Some((request, share, timed)) = id.share() else {
                continue;
            };
            let Ok(bytes) = sends.confirmed(request, share) else {
                continue;
            };
            lane.count(bytes);
            if striping.is_counted(bytes) {
                lane.remove_backlog(bytes);
            }
            if !timed {
                striping.confirmed(by, bytes, None);
                continue;
            }
            if !*is_read {
                (*now_ns, *is_read) = (clock.now_ns(), true);
            }
            lane.count_timed(now_ns.saturating_sub(given_ns[usize::from(request) % REQUESTS]));
            striping.confirmed(by, bytes, Some(lane.moment(*now_ns)));
        }
        match fault {
            None => Ok(!completions.is_empty()),
            Some(fault) => Err(fault),
        }
    }
}

impl Send<'_> {
    /// Returns the address of the bytes and the number of their registration.
    #[inline(always)]
    fn source(&self) -> (u64, u32) {
        (self.addr, self.memory.id)
    }

    #[inline(always)]
    fn lkey(&self, lane: &Lane) -> u32 {
        self.memory.keys(lane.rail.id).map_or(0, |keys| keys.lkey)
    }
}

impl SendPath {
    /// Creates a data path. The region of `parts` has the ring, into which the peer writes its CTS
    /// entries.
    pub fn new(parts: PathParts) -> Self {
        let PathParts {
            lanes,
            region: ring,
            chunk_bytes,
            striping,
            ..
        } = parts;
        let chunk_bytes = u64::from(chunk_bytes);
        let max_unsplit_bytes = striping.max_unsplit_bytes().min(chunk_bytes);
        let sizes = Sizes {
            max_unsplit_bytes,
            most_bytes: chunk_bytes * (MAX_FULL_CHUNKS + 1),
        };
        Self {
            sizes,
            sends: Sends::default(),
            rails: Rails::new(Role::Sender, lanes, striping),
            ring,
            clock: Clock::start(),
            now_ns: 0,
            chunk_bytes,
            buffer: CompletionBuffer::new(),
            stall: StallTimer::default(),
            given_ns: Box::new([0; REQUESTS]),
        }
    }

    /// Starts to send the `bytes` bytes at `addr`, and returns the request number. Returns `None`
    /// if the send cannot start yet, for example because no receive is granted for `tag` or there
    /// is no room; the caller tries again.
    ///
    /// # Errors
    /// [`Error::Argument`] if the bytes are outside the registration, or too many for one send.
    /// [`Error::Usage`] if the receive is smaller than the send. Otherwise the reason why the
    /// connection has failed.
    #[inline(always)]
    pub fn isend(
        &mut self,
        context: &PathContext,
        addr: u64,
        bytes: usize,
        tag: i32,
        memory: &Registration,
    ) -> Quick<Option<u16>> {
        self.rails.status.check()?;
        // A closed peer sends no more CTS entries. Also, its BYE may have completed an earlier
        // send. The late completion of that send could be mistaken for a completion of a new send
        // with the same request number.
        if !context.peer.is_here() {
            return self.not_now(context, bytes);
        }
        if !memory.covers(addr, bytes) {
            return Err(outside_registration("isend", addr, bytes, memory).into());
        }
        if !self.sends.has_room() {
            return self.not_now(context, bytes);
        }
        let send = Send {
            addr,
            bytes: bytes as u64,
            tag,
            memory,
        };
        match self.sends.peek(self.ring.words(), tag) {
            Peek::Found(head)
                if send.bytes <= head.buffer_bytes.min(self.sizes.max_unsplit_bytes) =>
            {
                self.send_whole(context, head, send)
            }
            Peek::Found(head) if send.bytes <= head.buffer_bytes.min(self.sizes.most_bytes) => {
                self.send_striped(context, head, send)
            }
            Peek::Nothing => self
                .stalled(context, "a send without a matching receive", bytes)
                .map(|()| None),
            _ => self.send_slow(context, send),
        }
    }

    /// Handles a send that cannot start yet: all requests are in use, or the peer is not connected.
    #[cold]
    #[inline(never)]
    fn not_now(&mut self, context: &PathContext, bytes: usize) -> Quick<Option<u16>> {
        self.stalled(context, "a send", bytes).map(|()| None)
    }

    /// Starts a send that `isend` does not start itself: a send to a grouped receive, or a send
    /// whose grant has old keys. Refuses a send that is too large.
    #[inline(never)]
    fn send_slow(&mut self, context: &PathContext, send: Send<'_>) -> Quick<Option<u16>> {
        let head = match self.sends.search(self.ring.words(), send.tag) {
            Ok(Some(head)) => head,
            Ok(None) => {
                return self
                    .stalled(
                        context,
                        "a send without a matching receive",
                        send.bytes as usize,
                    )
                    .map(|()| None);
            }
            Err(violation) => {
                self.end(
                    context,
                    Box::new(broken_protocol(&context.peer.name, &violation).into()),
                );
                return Ok(None);
            }
        };
        let most_bytes = self.sizes.most_bytes;
        if send.bytes > head.buffer_bytes.min(most_bytes) {
            return Err(too_large(
                &context.peer.name,
                send.bytes,
                send.tag,
                head.buffer_bytes,
                most_bytes,
            ));
        }
        let open = self.rails.open_lanes();
        let usable = self.sends.lanes_with_keys(open, &head);
        if usable != open {
            return self.send_with_old_keys(context, head, send, usable);
        }
        if send.bytes <= self.sizes.max_unsplit_bytes {
            self.send_whole(context, head, send)
        } else {
            self.send_striped(context, head, send)
        }
    }

    /// Starts a send whose receive was granted before a removed device of the receiver returned.
    /// The keys of the grant are valid only on the lanes of the bit set `usable`.
    #[cold]
    fn send_with_old_keys(
        &mut self,
        context: &PathContext,
        head: Head,
        send: Send<'_>,
        usable: u8,
    ) -> Quick<Option<u16>> {
        let Some(lane) = LaneId::first_in(usable) else {
            return self
                .stalled(
                    context,
                    "a send that waits for a repeated grant",
                    send.bytes as usize,
                )
                .map(|()| None);
        };
        self.stall.moved();
        self.send_queued(context, head, send, lane, None)
    }

    /// Starts a small send: one write on one lane.
    #[inline(always)]
    fn send_whole(
        &mut self,
        context: &PathContext,
        head: Head,
        send: Send<'_>,
    ) -> Quick<Option<u16>> {
        self.stall.moved();
        let size = send.bytes;
        let mut by = self
            .rails
            .striping
            .lane_for(size, &Sending(&self.rails.lanes));
        let mut now_ns = None;
        let counted = self.rails.striping.is_counted(size);
        if counted {
            by = self.rails.striping.lane_or_trial(
                by,
                size,
                self.now_ns,
                &Sending(&self.rails.lanes),
            );
            if self.rails.striping.is_to_time(size) {
                // The service of a write that waits behind another write begins when the other
                // write is confirmed. So only a write on an idle lane needs a new reading of the
                // clock.
                if self.rails.striping.is_idle(by) {
                    self.now_ns = self.clock.now_ns();
                }
                now_ns = Some(self.now_ns);
            }
        }
        let lane = &mut self.rails.lanes[by.index()];
        let lkey = send.lkey(lane);
        let inline_bytes = lane.inline_bytes();
        let Some(slot) = lane.next_slot() else {
            return self.send_queued(context, head, send, by, now_ns);
        };
        let rkey = head.rkey(self.ring.words(), by);
        let started = self.sends.start_single_write(head, send.source(), size, by);
        let Some((request, immediate)) = started else {
            return Ok(None);
        };
        let write = LaneWrite {
            work: Work::Share {
                request,
                share: 0,
                timed: now_ns.is_some(),
            },
            local_addr: send.addr,
            lkey,
            bytes: size as u32,
            remote: Remote {
                addr: head.addr,
                rkey,
            },
            immediate: Some(immediate.encode()),
            signaled: true,
        };
        let small = write.bytes.wrapping_sub(1) < inline_bytes;
        let inline = if small {
            send.memory.readable(write.local_addr, write.bytes)
        } else {
            None
        };
        let posted = slot.write(&write, inline);
        let mut now = None;
        if counted {
            let lane = &mut self.rails.lanes[by.index()];
            lane.add_backlog(size);
            now = now_ns.map(|now_ns| lane.moment(now_ns));
            // This entry is read only if the send is timed.
            self.given_ns[usize::from(request) % REQUESTS] = self.now_ns;
        }
        self.rails.striping.record_queued(by, size, now);
        if let Err(error) = posted {
            self.lose_rail(context, by, error.to_string());
        }
        Ok(Some(request))
    }

    /// Starts a send as one share on the given lane. If the lane's queue pair has no room, the
    /// share is posted later.
    #[inline(never)]
    fn send_queued(
        &mut self,
        context: &PathContext,
        head: Head,
        send: Send<'_>,
        lane: LaneId,
        now_ns: Option<u64>,
    ) -> Quick<Option<u16>> {
        if !self.rails.lanes[lane.index()].is_open() {
            return self
                .stalled(context, "a send without a usable rail", send.bytes as usize)
                .map(|()| None);
        }
        if self.rails.striping.is_counted(send.bytes) {
            self.rails.lanes[lane.index()].add_backlog(send.bytes);
        }
        self.start_shares(
            context,
            head,
            send,
            &Shares::whole(lane, send.bytes),
            now_ns,
        )
    }

    /// Starts a large send, with a share for each lane that helps.
    #[inline(never)]
    fn send_striped(
        &mut self,
        context: &PathContext,
        head: Head,
        send: Send<'_>,
    ) -> Quick<Option<u16>> {
        let now_ns = self.clock.now_ns();
        self.now_ns = now_ns;
        let shares = self
            .rails
            .striping
            .cut(send.bytes, now_ns, &Sending(&self.rails.lanes));
        if shares
            .as_slice()
            .iter()
            .any(|share| !self.rails.lanes[share.lane.index()].is_open())
        {
            // A lost lane is chosen only if no lane is open.
            return self
                .stalled(context, "a send without a usable rail", send.bytes as usize)
                .map(|()| None);
        }
        self.stall.moved();
        for share in shares.as_slice() {
            if self.rails.striping.is_counted(share.bytes) {
                self.rails.lanes[share.lane.index()].add_backlog(share.bytes);
            }
        }
        self.start_shares(context, head, send, &shares, Some(now_ns))
    }

    /// Starts the shares of a send. The caller must already have added each large share
    /// ([`is_counted`](proto::flow::striping::Striping::is_counted)) to the backlog of its lane.
    /// With `now_ns`, the large shares are timed from that time on.
    #[inline(never)]
    fn start_shares(
        &mut self,
        context: &PathContext,
        head: Head,
        send: Send<'_>,
        shares: &Shares,
        now_ns: Option<u64>,
    ) -> Quick<Option<u16>> {
        let shares = shares.as_slice();
        let Some(request) = self.sends.start(&head, send.source(), shares) else {
            return Ok(None);
        };
        self.given_ns[usize::from(request) % REQUESTS] = now_ns.unwrap_or_default();
        for (number, share) in shares.iter().enumerate() {
            let by = share.lane;
            let number = number as u8;
            let timed = now_ns.is_some() && self.rails.striping.is_counted(share.bytes);
            let lane = &mut self.rails.lanes[by.index()];
            let now = now_ns.filter(|_| timed).map(|now_ns| lane.moment(now_ns));
            self.rails.striping.record_queued(by, share.bytes, now);
            let queue = lane.next_queue();
            let lkey = send.lkey(lane);
            let rkey = head.rkey(self.ring.words(), by);
            let Some(slot) = lane.slot(queue).filter(|_| share.bytes <= self.chunk_bytes) else {
                self.sends.keep_share(
                    request,
                    number,
                    share,
                    Route {
                        queue,
                        lkey,
                        rkey,
                        timed,
                    },
                    self.chunk_bytes,
                );
                continue;
            };
            let immediate = self.sends.post_share(request, number, share);
            let write = LaneWrite {
                work: Work::Share {
                    request,
                    share: number,
                    timed,
                },
                local_addr: send.addr + share.offset,
                lkey,
                bytes: share.bytes as u32,
                remote: Remote {
                    addr: head.addr + share.offset,
                    rkey,
                },
                immediate: immediate.map(Immediate::encode),
                signaled: true,
            };
            if let Err(error) = slot.write(&write, None) {
                self.lose_rail(context, by, error.to_string());
            }
        }
        if self.sends.shares_to_post(request) > 0 {
            self.post(context, request);
        }
        Ok(Some(request))
    }

    /// Posts the remaining writes of a send, as far as the queue pairs have room.
    #[inline]
    fn post(&mut self, context: &PathContext, request: u16) {
        for share in 0..self.sends.shares_to_post(request) {
            while let Some(next) = self.sends.next_write(request, share, self.chunk_bytes) {
                let Some(slot) = self.rails.lanes[next.lane.index()].slot(next.route.queue) else {
                    break;
                };
                let last = next.immediate.is_some();
                let timed = next.route.timed;
                let write = LaneWrite {
                    work: if last {
                        Work::Share {
                            request,
                            share,
                            timed,
                        }
                    } else {
                        Work::Lead
                    },
                    local_addr: next.local_addr,
                    lkey: next.route.lkey,
                    bytes: next.bytes,
                    remote: Remote {
                        addr: next.remote_addr,
                        rkey: next.route.rkey,
                    },
                    immediate: next.immediate.map(|immediate| immediate.encode()),
                    signaled: last,
                };
                let posted = slot.write(&write, None);
                self.sends.posted(request, share, &next);
                if let Err(error) = posted {
                    self.lose_rail(context, next.lane, error.to_string());
                }
            }
        }
    }

    /// Returns the size of a finished send, or `None` while the send runs.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such request; otherwise the failure of the connection.
    #[inline(always)]
    pub fn test(&mut self, context: &PathContext, request: u16) -> Quick<Option<u64>> {
        match self.sends.test(request) {
            Ok(None) => self.progress_and_test(context, request),
            known => known.map_err(not_in_flight),
        }
    }

    #[inline(always)]
    fn progress_and_test(&mut self, context: &PathContext, request: u16) -> Quick<Option<u64>> {
        self.rails.status.check()?;
        if self.progress(context)? {
            self.stall.moved();
        } else {
            self.stalled(context, "a posted send", 0)?;
        }
        let known = self.sends.test(request).map_err(not_in_flight)?;
        // Post the writes for which the queue pairs had no room. The test of any request may have
        // freed room.
        if known.is_none() && self.sends.shares_to_post(request) > 0 {
            self.post(context, request);
        }
        Ok(known)
    }

    #[inline(always)]
    fn progress(&mut self, context: &PathContext) -> Quick<bool> {
        let mut moved = false;
        // The clock is read at most once for all completions of this call.
        let mut is_read = false;
        for lane in LaneId::all(self.rails.lanes.len()) {
            if !self.rails.lanes[lane.index()].has_pending() {
                continue;
            }
            match self.take_in(lane, &mut is_read) {
                Ok(found) => moved |= found,
                Err(fault) => {
                    self.fault(context, lane, *fault)?;
                    moved = true;
                }
            }
        }
        Ok(moved)
    }

    /// Polls a lane, and processes its completions. Returns true if there were completions.
    #[inline(always)]
    fn take_in(&mut self, by: LaneId, is_read: &mut bool) -> std::result::Result<bool, Box<Fault>> {
        let Self {
            sends,
            rails: Rails {
                lanes, striping, ..
            },
            clock,
            now_ns,
            buffer,
            given_ns,
            ..
        } = self;
        let lane = &mut lanes[by.index()];
        let completions = lane.poll(buffer).map_err(Fault::of_device)?;
        Confirmation {
            by,
            lane,
            sends,
            striping,
            clock,
            now_ns,
            given_ns,
        }
        .take_in(completions, is_read)
    }

    /// Records a call of NCCL that made no progress. Now and then reads the clock, and counts and
    /// logs a long wait. If the peer has closed, completes the running sends that its BYE confirms.
    /// If the peer has left and sends still wait a little later, ends the connection.
    #[inline(always)]
    fn stalled(&mut self, context: &PathContext, what: &'static str, bytes: usize) -> Quick<()> {
        match (self.stall.idle(), context.peer.presence()) {
            (None, PeerState::Here) => Ok(()),
            (waited, _) => self.waiting(context, what, bytes, waited),
        }
    }

    #[cold]
    fn waiting(
        &mut self,
        context: &PathContext,
        what: &'static str,
        bytes: usize,
        waited: Option<Duration>,
    ) -> Quick<()> {
        let waited = waited.unwrap_or_else(|| self.stall.elapsed());
        if let PeerState::Closed { delivered } = context.peer.presence()
            && self.sends.delivered(delivered)
        {
            self.stall.moved();
            return Ok(());
        }
        let stalled = Stalled {
            direction: Direction::Send,
            what,
            count: bytes,
        };
        let checked = stalled.check(context, &mut self.stall, waited, &self.rails.lanes);
        if let Err(error) = checked {
            self.end(context, error);
        }
        Ok(())
    }
}
