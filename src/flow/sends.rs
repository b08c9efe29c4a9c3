//! The sender's side: what the receiver has granted, and the sends that run.

use super::NotInFlight;
use super::in_flight::{Bound, Hold};
use super::next::{Head, Next, Peek};
use super::plan::Share;
use crate::wire::control::Received;
use crate::wire::cts::{Epoch, Violation};
use crate::wire::ids::{LaneId, Slot};
use crate::wire::immediate::{Immediate, MAX_LEADS};
use crate::wire::{MAX_RAILS, PARTS, SLOTS};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Sends in flight on one connection: every part of every receive.
pub const REQUESTS: usize = SLOTS * PARTS;

/// All sends of one connection.
#[derive(Debug)]
pub struct Sends {
    requests: Box<[Request; REQUESTS]>,
    /// The shares of running sends, written only for those that are cut or wait for room.
    shares: Box<[[RunningShare; MAX_RAILS]; REQUESTS]>,
    free: [u16; REQUESTS],
    free_count: usize,
    next: Next,
    /// What those that run have taken of the process's bound, where one is set.
    hold: Option<Hold>,
}

#[derive(Debug, Clone, Copy)]
enum Request {
    Free,
    /// A send in one write, posted when the send started. Where a bound is set, only an empty send
    /// stays in this state ([`Sends::keep_taken`]): it has nothing to give back when it is done.
    Whole(Whole),
    Cut(Cut),
    Done {
        bytes: u64,
    },
}

/// Which receive a send is for, and where its bytes are: what it takes to post it once more.
#[derive(Debug, Clone, Copy)]
struct Origin {
    sequence: u64,
    part: u8,
    memory: u32,
    local_addr: u64,
    remote_addr: u64,
}

/// A send in one write.
#[derive(Debug, Clone, Copy)]
struct Whole {
    origin: Origin,
    bytes: u64,
    lane: LaneId,
}

/// A send that goes in shares, or waits for room.
#[derive(Debug, Clone, Copy)]
struct Cut {
    origin: Origin,
    bytes: u64,
    /// Shares in all.
    count: u8,
    /// Those not confirmed, and those not wholly posted; a bit each.
    unfinished: u8,
    unposted: u8,
}

/// One share of a running send.
#[derive(Debug, Clone, Copy, Default)]
struct RunningShare {
    lane: LaneId,
    leads: u16,
    route: Route,
    offset: u64,
    bytes: u64,
    /// What of it is not posted, as offsets in the message.
    left: Left,
}

impl RunningShare {
    /// Nothing of it is posted.
    fn is_all_left(&mut self) {
        self.left = Left::Range { from: self.offset, to: self.offset + self.bytes };
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Left {
    #[default]
    Nothing,
    /// An empty message too has its one write.
    Range { from: u64, to: u64 },
    /// All of it, by a lane that is to be found: that of the share is lost, on both sides.
    Stranded,
}

/// A share that has to go by another lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stranded {
    /// Its size.
    pub bytes: u64,
    /// What [`Sends::start`] was told of its memory.
    pub memory: u32,
    /// Its receive.
    pub sequence: u64,
    /// Which part of that.
    pub part: u8,
}

/// Where a share goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Route {
    /// Queue pair of the lane.
    pub queue: u8,
    /// The rail's key of the caller's buffer.
    pub lkey: u32,
    /// The rail's key of the receiver's.
    pub rkey: u32,
    /// Whether its time tells how fast the rail is.
    pub timed: bool,
}

/// The next write of a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NextWrite {
    /// The lane that it goes by.
    pub lane: LaneId,
    /// Where it goes there.
    pub route: Route,
    /// Where it reads.
    pub local_addr: u64,
    /// Where it writes.
    pub remote_addr: u64,
    /// Its size.
    pub bytes: u32,
    /// Set on the share's last write.
    pub immediate: Option<Immediate>,
}

impl Sends {
    /// No sends yet.
    pub fn new() -> Self {
        let mut free = [0; REQUESTS];
        for (index, slot) in free.iter_mut().enumerate() {
            *slot = (REQUESTS - 1 - index) as u16;
        }
        Self {
            requests: Box::new([Request::Free; REQUESTS]),
            shares: Box::new([[RunningShare::default(); MAX_RAILS]; REQUESTS]),
            free,
            free_count: REQUESTS,
            next: Next::default(),
            hold: None,
        }
    }

    /// The same where all sends of the process may have no more in flight than `bound`. Each then asks before it starts
    /// ([`Sends::take`]).
    pub fn within(bound: Option<Arc<Bound>>) -> Self {
        Self { hold: bound.map(Hold::new), ..Self::new() }
    }

    /// Whether a send has to ask before it starts.
    pub fn is_bounded(&self) -> bool {
        self.hold.is_some()
    }

    /// A send of `bytes` is to start; whether it may, by the process's bound. From here on it counts, until it is done. One that does
    /// not start after all is given back ([`Sends::give_back`]). An empty one need not ask.
    #[must_use]
    pub fn take(&mut self, bytes: u64) -> bool {
        self.hold.as_mut().is_none_or(|hold| hold.take(bytes))
    }

    /// A send that had taken its bytes does not start after all.
    pub fn give_back(&mut self, bytes: u64) {
        if let Some(hold) = &mut self.hold {
            hold.give(bytes);
        }
    }

    /// A send that had taken its bytes has started. It gives them back when it is done.
    pub fn keep_taken(&mut self, request: u16) {
        let at = usize::from(request) % REQUESTS;
        if self.hold.is_some() {
            self.requests[at].cut(&mut self.shares[at]);
        }
    }

    /// The connection has failed, and its queue pairs are gone: nothing that runs is in flight any more.
    #[cold]
    pub fn ended(&mut self) {
        if let Some(hold) = &mut self.hold {
            hold.give_all();
        }
    }

    /// Whether another send can start.
    #[inline(always)]
    pub fn has_room(&self) -> bool {
        self.free_count > 0
    }

    /// Finds the receive's part for a send with `tag`, where it is the only one of the next receive, as it most often is;
    /// [`Peek::Search`] where it has to be searched for.
    #[inline(always)]
    pub fn peek(&self, ring: &[AtomicU64], tag: i32) -> Peek {
        self.next.peek(ring, tag)
    }

    /// Finds the receive's part for a send with `tag`: the first with that tag in the group at the head of the ring
    /// that no send has taken. `None` while there is none.
    ///
    /// # Errors
    /// A [`Violation`] of the peer's.
    #[inline(never)]
    pub fn search(&mut self, ring: &[AtomicU64], tag: i32) -> Result<Option<Head>, Violation> {
        self.next.search(ring, tag)
    }

    /// The receiver's clear-to-sends have keys of this epoch from here on; older ones are found by [`Sends::search`].
    pub fn set_epoch(&mut self, epoch: Epoch) {
        self.next.set_epoch(epoch);
    }

    #[inline(always)]
    fn run(&mut self, part: u8, request: Request) -> Option<u16> {
        self.free_count = self.free_count.checked_sub(1)?;
        let number = self.free[self.free_count % REQUESTS];
        self.next.take(part);
        self.requests[usize::from(number) % REQUESTS] = request;
        Some(number)
    }

    /// Starts a send that the caller posts at once, whole, in one write by `lane` with this immediate; its request number.
    /// `source` is where its bytes are, and what names their memory should it have to go once more. The head is what
    /// [`Sends::peek`] or [`Sends::search`] found. `None` when there is no room ([`Sends::has_room`]).
    #[inline(always)]
    pub fn start_whole(
        &mut self,
        head: Head,
        source: (u64, u32),
        bytes: u64,
        lane: LaneId,
    ) -> Option<(u16, Immediate)> {
        let origin = Origin::new(&head, source);
        let request = self.run(head.part, Request::Whole(Whole { origin, bytes, lane }))?;
        Some((request, immediate(&origin, (0, 1), 0)))
    }

    /// Starts a send of the bytes at `source` that goes by `shares`; its request number. The caller then says for each
    /// share that it posts it at once ([`Sends::post_share`]) or later ([`Sends::keep_share`]). The rest is as with
    /// [`Sends::start_whole`].
    #[inline(always)]
    pub fn start(&mut self, head: &Head, source: (u64, u32), shares: &[Share]) -> Option<u16> {
        let count = shares.len() as u8;
        let bytes = shares.iter().map(|share| share.bytes).sum();
        let all = (0xff_u16 >> (8 - u16::from(count).min(8))) as u8;
        let cut = Cut { origin: Origin::new(head, source), bytes, count, unfinished: all, unposted: all };
        self.run(head.part, Request::Cut(cut))
    }

    /// The caller posts share number `number` of a send that it just started, in one write with this immediate.
    #[inline(always)]
    pub fn post_share(&mut self, request: u16, number: u8, share: &Share) -> Option<Immediate> {
        let at = usize::from(request) % REQUESTS;
        let Request::Cut(running) = &mut self.requests[at] else { return None };
        running.unposted &= !(1 << (number & 7));
        let place = &mut self.shares[at][usize::from(number) % MAX_RAILS];
        let Share { lane, offset, bytes } = *share;
        *place = RunningShare { lane, leads: 0, route: place.route, offset, bytes, left: Left::Nothing };
        Some(immediate(&running.origin, (number, running.count), 0))
    }

    /// Share number `number` of a send that was just started waits for [`Sends::next_write`].
    pub fn keep_share(&mut self, request: u16, number: u8, share: &Share, route: Route, chunk_bytes: u64) {
        let leads = leads(share.bytes, chunk_bytes).min(MAX_LEADS) as u16;
        let place = &mut self.shares[usize::from(request) % REQUESTS][usize::from(number) % MAX_RAILS];
        let Share { lane, offset, bytes } = *share;
        *place = RunningShare { lane, leads, route, offset, bytes, left: Left::Nothing };
        place.is_all_left();
    }

    /// The next write of a share of a running send, `None` when all of the share was given out. The caller posts it,
    /// then calls [`Sends::posted`].
    #[inline(always)]
    pub fn next_write(&self, request: u16, share: u8, chunk_bytes: u64) -> Option<NextWrite> {
        let at = usize::from(request) % REQUESTS;
        let Request::Cut(running) = &self.requests[at] else { return None };
        let part = self.shares[at][..usize::from(running.count).min(MAX_RAILS)].get(usize::from(share))?;
        let Left::Range { from, to } = part.left else { return None };
        let left = to - from;
        let last = left <= chunk_bytes;
        Some(NextWrite {
            lane: part.lane,
            route: part.route,
            local_addr: running.origin.local_addr + from,
            remote_addr: running.origin.remote_addr + from,
            bytes: left.min(chunk_bytes) as u32,
            immediate: last.then(|| immediate(&running.origin, (share, running.count), part.leads)),
        })
    }

    /// The write that [`Sends::next_write`] gave was posted.
    #[inline(always)]
    pub fn posted(&mut self, request: u16, share: u8, write: &NextWrite) {
        let at = usize::from(request) % REQUESTS;
        let Request::Cut(running) = &mut self.requests[at] else { return };
        let left = &mut self.shares[at][usize::from(share) % MAX_RAILS].left;
        if write.immediate.is_some() {
            *left = Left::Nothing;
            running.unposted &= !(1 << (share & 7));
        } else if let Left::Range { from, .. } = left {
            *from += u64::from(write.bytes);
        }
    }

    /// How many shares a running send has, while some of its writes have not been posted; else 0.
    #[inline(always)]
    pub fn shares_to_post(&self, request: u16) -> u8 {
        match self.requests.get(usize::from(request)) {
            Some(Request::Cut(running)) if running.unposted != 0 => running.count,
            _ => 0,
        }
    }

    /// A share's last write was confirmed; the share's size.
    ///
    /// # Errors
    /// [`NotInFlight`] when no such send runs.
    #[inline(always)]
    pub fn confirmed(&mut self, request: u16, share: u8) -> Result<u64, NotInFlight> {
        let at = usize::from(request) % REQUESTS;
        let slot = &mut self.requests[at];
        if let Request::Whole(Whole { bytes, .. }) = *slot {
            *slot = Request::Done { bytes };
            return Ok(bytes);
        }
        let Request::Cut(running) = slot else { return Err(NotInFlight(request)) };
        let bytes = self.shares[at][usize::from(share) % MAX_RAILS].bytes;
        running.unfinished &= !(1 << (share & 7));
        if running.unfinished == 0 {
            let bytes = running.bytes;
            slot.is_done(bytes, &mut self.hold);
        }
        Ok(bytes)
    }

    /// The peer said that it has received every receive before `delivered`: what runs for those is done. Whether any was.
    pub fn delivered(&mut self, delivered: u64) -> bool {
        let mut any = false;
        for slot in self.requests.iter_mut() {
            let bytes = match slot {
                Request::Whole(whole) if whole.origin.sequence < delivered => whole.bytes,
                Request::Cut(running) if running.origin.sequence < delivered && running.unposted == 0 => running.bytes,
                _ => continue,
            };
            slot.is_done(bytes, &mut self.hold);
            any = true;
        }
        any
    }

    /// A lane is lost, and nothing comes in or goes out by it any more on either side. What went by it and came is
    /// confirmed; what did not waits for [`Sends::reroute`].
    pub fn lost(&mut self, lane: LaneId, received: &Received) {
        for (slot, shares) in self.requests.iter_mut().zip(self.shares.iter_mut()) {
            if let Request::Whole(whole) = slot
                && whole.lane == lane
            {
                slot.cut(shares);
            }
            let Request::Cut(running) = slot else { continue };
            for (number, share) in shares.iter_mut().enumerate().take(usize::from(running.count)) {
                let bit = 1 << number;
                if share.lane != lane || running.unfinished & bit == 0 {
                    continue;
                }
                let Origin { sequence, part, .. } = running.origin;
                if received.has(sequence, part, number as u8) {
                    running.unfinished &= !bit;
                    running.unposted &= !bit;
                    share.left = Left::Nothing;
                } else {
                    running.unposted |= bit;
                    share.left = Left::Stranded;
                }
            }
            if running.unfinished == 0 {
                let bytes = running.bytes;
                slot.is_done(bytes, &mut self.hold);
            }
        }
    }

    /// What waits for a lane, since its own is lost, goes by those that `find` names. Whether something still waits.
    pub fn reroute(&mut self, mut find: impl FnMut(Stranded) -> Option<(LaneId, Route)>) -> bool {
        let mut is_left = false;
        for (slot, shares) in self.requests.iter_mut().zip(self.shares.iter_mut()) {
            let Request::Cut(running) = slot else { continue };
            for share in shares.iter_mut().take(usize::from(running.count)) {
                if share.left != Left::Stranded {
                    continue;
                }
                let Origin { sequence, part, memory, .. } = running.origin;
                match find(Stranded { bytes: share.bytes, memory, sequence, part }) {
                    Some(found) => {
                        (share.lane, share.route) = found;
                        share.is_all_left();
                    }
                    None => is_left = true,
                }
            }
        }
        is_left
    }

    /// The number of the oldest receive for which a send runs, and of the one that the next send is for.
    pub fn span(&self) -> (u64, u64) {
        let running = self.requests.iter().filter_map(|request| match request {
            Request::Whole(whole) => Some(whole.origin.sequence),
            Request::Cut(running) => Some(running.origin.sequence),
            Request::Free | Request::Done { .. } => None,
        });
        let next = self.next.sequence();
        (running.min().unwrap_or(next), next)
    }

    /// Whether a send runs.
    pub fn is_running(&self) -> bool {
        self.requests.iter().any(|request| matches!(request, Request::Whole(_) | Request::Cut(_)))
    }

    /// The requests that wait to be posted, in part or whole.
    pub fn waiting(&self) -> impl Iterator<Item = u16> {
        (0..REQUESTS as u16).filter(|request| self.shares_to_post(*request) > 0)
    }

    /// The size of a finished send, whose request number is free from then on; `None` while it runs.
    ///
    /// # Errors
    /// [`NotInFlight`].
    #[inline(always)]
    pub fn test(&mut self, request: u16) -> Result<Option<u64>, NotInFlight> {
        let slot = self.requests.get_mut(usize::from(request)).ok_or(NotInFlight(request))?;
        match *slot {
            Request::Free => Err(NotInFlight(request)),
            Request::Whole(_) | Request::Cut(_) => Ok(None),
            Request::Done { bytes } => {
                *slot = Request::Free;
                self.free[self.free_count % REQUESTS] = request;
                self.free_count += 1;
                Ok(Some(bytes))
            }
        }
    }
}

impl Default for Sends {
    fn default() -> Self {
        Self::new()
    }
}

impl Request {
    /// Turns a send in one write into a cut one with a single share, which is posted.
    fn cut(&mut self, shares: &mut [RunningShare; MAX_RAILS]) {
        let Self::Whole(Whole { origin, bytes, lane }) = *self else { return };
        *self = Self::Cut(Cut { origin, bytes, count: 1, unfinished: 1, unposted: 0 });
        // A single write, so no chunks go before it.
        shares[0] = RunningShare { lane, bytes, ..RunningShare::default() };
    }

    /// A send is done: the only way to [`Request::Done`] for one that has taken something of the bound, so that none keeps it.
    #[inline(always)]
    fn is_done(&mut self, bytes: u64, hold: &mut Option<Hold>) {
        *self = Request::Done { bytes };
        if let Some(hold) = hold {
            hold.give(bytes);
        }
    }
}

impl Origin {
    #[inline(always)]
    fn new(head: &Head, (local_addr, memory): (u64, u32)) -> Self {
        let Head { sequence, part, addr: remote_addr, .. } = *head;
        Self { sequence, part, memory, local_addr, remote_addr }
    }
}

#[inline(always)]
fn immediate(origin: &Origin, (share, shares): (u8, u8), leads: u16) -> Immediate {
    let slot = Slot::of(origin.sequence);
    Immediate { slot, part: origin.part, generation: Immediate::generation_of(origin.sequence), shares, share, leads }
}

/// Full chunks that go before the last write of a share of `bytes`.
#[inline(always)]
pub fn leads(bytes: u64, chunk_bytes: u64) -> u64 {
    bytes.saturating_sub(1) / chunk_bytes
}

#[cfg(test)]
mod tests;
