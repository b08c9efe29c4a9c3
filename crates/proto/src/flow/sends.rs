//! The sender's state of one connection: the next receive in the ring, and the running sends.
//!
//! The ring is the memory into which the receiver writes CTS (clear-to-send) entries, one for each
//! part of a receive. A send is for one part. It is cut into shares, one for each lane that it
//! uses; a lane is a rail of this connection. A share is one write, or several if it is larger than
//! the connection's chunk size. Only the last write of a share has an immediate. The receiver's
//! memory keys have a generation, the epoch.

use super::NotInFlight;
use super::epochs::Epochs;
use super::next::{self, Head, Next, Peek};
use super::plan::Share;
use crate::wire::control::{Progress, Received};
use crate::wire::cts::{Epoch, Violation};
use crate::wire::ids::{LaneId, Slot};
use crate::wire::immediate::{Immediate, MAX_FULL_CHUNKS};
use crate::wire::{MAX_RAILS, PARTS, SLOTS};
use std::sync::atomic::AtomicU64;

/// Maximum number of sends in flight on one connection: one for each part of each receive.
pub const REQUESTS: usize = SLOTS * PARTS;

/// All sends of one connection, at most `R` at a time. The ring has `N` slots: all [`SLOTS`], or
/// fewer in the tests' model.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct Sends<const N: usize = SLOTS, const R: usize = REQUESTS> {
    requests: Box<[Request; R]>,
    /// Shares of the running sends. Not used for a send that is [`Request::SingleWrite`].
    shares: Box<[[RunningShare; MAX_RAILS]; R]>,
    free: [u16; R],
    free_count: usize,
    next: Next<N>,
    epochs: Epochs,
    /// True while a share waits for another lane, because its lane was lost.
    has_lost_shares: bool,
}

#[derive(Debug, Clone, Copy, Hash)]
enum Request {
    Free,
    /// A send in one write, which was posted when the send started.
    SingleWrite(SingleWrite),
    Cut(Cut),
    Done {
        bytes: u64,
    },
}

/// The receive part that a send matches, and the addresses of source and destination. Kept for a
/// resend.
#[derive(Debug, Clone, Copy, Hash)]
struct Origin {
    sequence: u64,
    part: u8,
    registration_id: u32,
    local_addr: u64,
    remote_addr: u64,
}

#[derive(Debug, Clone, Copy, Hash)]
struct SingleWrite {
    origin: Origin,
    bytes: u64,
    lane: LaneId,
}

/// A send with an entry in [`Sends::shares`] for each of its shares. [`Sends::start`] started it,
/// or it was a [`Request::SingleWrite`] that lost its lane.
#[derive(Debug, Clone, Copy, Hash)]
struct Cut {
    origin: Origin,
    bytes: u64,
    /// Number of shares.
    count: u8,
    /// Bit set of the shares that are not confirmed.
    unfinished: u8,
    /// Bit set of the shares of which at least one write is not posted.
    unposted: u8,
}

#[derive(Debug, Clone, Copy, Default)]
struct RunningShare {
    lane: LaneId,
    full_chunks: u16,
    route: Route,
    offset: u64,
    bytes: u64,
    /// The bytes that are not posted yet, as offsets in the message.
    left: Left,
}

impl RunningShare {
    fn set_all_unposted(&mut self) {
        self.left = Left::Range {
            from: self.offset,
            to: self.offset + self.bytes,
        };
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
enum Left {
    #[default]
    Nothing,
    /// From `from` up to, but not including, `to`. The range is empty for the single write of an
    /// empty message.
    Range { from: u64, to: u64 },
    /// The whole share must be posted again, on a lane that is not chosen yet. Both ends have
    /// stopped its old lane.
    Lost,
}

/// A share of a lost lane, which must be sent again on another lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostShare {
    /// Size of the share.
    pub bytes: u64,
    /// Id of the registration of the bytes, as given to [`Sends::start`].
    pub registration_id: u32,
    /// First of the lanes in `lanes`.
    first: LaneId,
    /// Bit set of the lanes that can carry the share.
    lanes: u8,
}

impl LostShare {
    /// Returns the preferred lane if it can carry the share, otherwise the first lane that can.
    pub fn lane(&self, preferred: LaneId) -> LaneId {
        if self.lanes & preferred.bit() != 0 {
            preferred
        } else {
            self.first
        }
    }
}

/// Lane, queue pair and local key for a share that is sent again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalRoute {
    /// The lane.
    pub lane: LaneId,
    /// Queue pair of the lane.
    pub queue: u8,
    /// The rail's key of the caller's buffer.
    pub lkey: u32,
}

/// The queue pair and the keys for a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Route {
    /// Queue pair of the lane.
    pub queue: u8,
    /// The rail's key of the caller's buffer.
    pub lkey: u32,
    /// The rail's key of the receiver's buffer.
    pub rkey: u32,
    /// True if the completion is timed, to measure the rail's speed.
    pub timed: bool,
}

/// The next write of a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NextWrite {
    /// Lane of the write.
    pub lane: LaneId,
    /// Queue pair and keys on that lane.
    pub route: Route,
    /// Source address.
    pub local_addr: u64,
    /// Destination address in the peer's memory.
    pub remote_addr: u64,
    /// Size of the write.
    pub bytes: u32,
    /// Immediate data; only the share's last write has it.
    pub immediate: Option<Immediate>,
}

impl<const N: usize, const R: usize> Sends<N, R> {
    /// Returns true if another send can start.
    #[inline(always)]
    pub fn has_room(&self) -> bool {
        self.free_count > 0
    }

    /// Finds the receive part for a send with `tag`, if the next receive has a single part (the
    /// common case). Returns [`Peek::Search`] in the other cases.
    #[inline(always)]
    pub fn peek(&self, ring: &[AtomicU64], tag: i32) -> Peek {
        self.next.peek(ring, tag)
    }

    /// Finds the first part of the next receive that has `tag` and no send yet, if any.
    #[inline(never)]
    pub fn search(&mut self, ring: &[AtomicU64], tag: i32) -> Result<Option<Head>, Violation> {
        self.next.search(ring, tag)
    }

    /// Sets the first epoch with valid keys for a lane. The receiver's control message JOINED names
    /// this epoch. Afterwards, only [`Sends::search`] finds receives of older epochs;
    /// [`Sends::peek`] does not. Returns true if the lane's keys are new.
    pub fn learn_epoch(&mut self, lane: LaneId, epoch: Epoch) -> bool {
        let is_new = self.epochs.learn(lane, epoch);
        self.next.set_epoch(self.epochs.newest());
        is_new
    }

    /// Returns the first epoch whose ring entries have valid keys for a lane.
    pub fn epoch_of(&self, lane: LaneId) -> Epoch {
        self.epochs.first_valid(lane)
    }

    /// Returns the lanes of the set `open` that can carry a send for this receive part. The part's
    /// key for a lane is invalid if the receiver's device was removed and has returned since the
    /// grant. The lane can carry the send again after the receiver has repeated the grant.
    pub fn lanes_with_keys(&self, open: u8, head: &Head) -> u8 {
        self.epochs.lanes_with_keys(open, head.epoch)
    }

    #[inline(always)]
    fn run(&mut self, part: u8, request: Request) -> Option<u16> {
        self.free_count = self.free_count.checked_sub(1)?;
        let number = self.free[self.free_count % R];
        self.next.take(part);
        self.requests[usize::from(number) % R] = request;
        Some(number)
    }

    /// Starts a send that the caller posts immediately, as one write on `lane`. Returns the request
    /// number and the write's immediate, or `None` if there is no room ([`Sends::has_room`]).
    ///
    /// `head` comes from [`Sends::peek`] or [`Sends::search`]. `source` is the address of the bytes
    /// and the id of their registration, for a resend.
    #[inline(always)]
    pub fn start_single_write(
        &mut self,
        head: Head,
        source: (u64, u32),
        bytes: u64,
        lane: LaneId,
    ) -> Option<(u16, Immediate)> {
        let origin = Origin::new(&head, source);
        let request = self.run(
            head.part,
            Request::SingleWrite(SingleWrite {
                origin,
                bytes,
                lane,
            }),
        )?;
        Some((request, immediate(&origin, (0, 1), 0)))
    }

    /// Starts a send that is cut into `shares`, and returns its request number. For each share, the
    /// caller then calls [`Sends::post_share`] if it posts the share immediately, or
    /// [`Sends::keep_share`] if it posts the share later. `head` and `source` are as for
    /// [`Sends::start_single_write`].
    #[inline(always)]
    pub fn start(&mut self, head: &Head, source: (u64, u32), shares: &[Share]) -> Option<u16> {
        let count = shares.len() as u8;
        let bytes = shares.iter().map(|share| share.bytes).sum();
        let all = (0xff_u16 >> (8 - u16::from(count).min(8))) as u8;
        let cut = Cut {
            origin: Origin::new(head, source),
            bytes,
            count,
            unfinished: all,
            unposted: all,
        };
        self.run(head.part, Request::Cut(cut))
    }

    /// Records that the caller posts a new send's share as one write. Returns its immediate.
    #[inline(always)]
    pub fn post_share(&mut self, request: u16, number: u8, share: &Share) -> Option<Immediate> {
        let at = usize::from(request) % R;
        let Request::Cut(running) = &mut self.requests[at] else {
            return None;
        };
        running.unposted &= !(1 << (number & 7));
        let place = &mut self.shares[at][usize::from(number) % MAX_RAILS];
        let Share {
            lane,
            offset,
            bytes,
        } = *share;
        *place = RunningShare {
            lane,
            full_chunks: 0,
            route: place.route,
            offset,
            bytes,
            left: Left::Nothing,
        };
        Some(immediate(&running.origin, (number, running.count), 0))
    }

    /// Records that the caller posts a new send's share later, with [`Sends::next_write`].
    pub fn keep_share(
        &mut self,
        request: u16,
        number: u8,
        share: &Share,
        route: Route,
        chunk_bytes: u64,
    ) {
        let full_chunks = full_chunks(share.bytes, chunk_bytes).min(MAX_FULL_CHUNKS) as u16;
        let place = &mut self.shares[usize::from(request) % R][usize::from(number) % MAX_RAILS];
        let Share {
            lane,
            offset,
            bytes,
        } = *share;
        *place = RunningShare {
            lane,
            full_chunks,
            route,
            offset,
            bytes,
            left: Left::Nothing,
        };
        place.set_all_unposted();
    }

    /// Returns a share's next write, if any. After posting this write, the caller must call
    /// [`Sends::posted`].
    #[inline(always)]
    pub fn next_write(&self, request: u16, share: u8, chunk_bytes: u64) -> Option<NextWrite> {
        let at = usize::from(request) % R;
        let Request::Cut(running) = &self.requests[at] else {
            return None;
        };
        let part =
            self.shares[at][..usize::from(running.count).min(MAX_RAILS)].get(usize::from(share))?;
        let Left::Range { from, to } = part.left else {
            return None;
        };
        let left = to - from;
        let last = left <= chunk_bytes;
        Some(NextWrite {
            lane: part.lane,
            route: part.route,
            local_addr: running.origin.local_addr + from,
            remote_addr: running.origin.remote_addr + from,
            bytes: left.min(chunk_bytes) as u32,
            immediate: last
                .then(|| immediate(&running.origin, (share, running.count), part.full_chunks)),
        })
    }

    /// Records that the caller has posted the write from [`Sends::next_write`].
    #[inline(always)]
    pub fn posted(&mut self, request: u16, share: u8, write: &NextWrite) {
        let at = usize::from(request) % R;
        let Request::Cut(running) = &mut self.requests[at] else {
            return;
        };
        let left = &mut self.shares[at][usize::from(share) % MAX_RAILS].left;
        if write.immediate.is_some() {
            *left = Left::Nothing;
            running.unposted &= !(1 << (share & 7));
        } else if let Left::Range { from, .. } = left {
            *from += u64::from(write.bytes);
        }
    }

    /// Returns how many shares a running send has, posted or not. Returns 0 if all writes of all
    /// shares are posted.
    #[inline(always)]
    pub fn shares_to_post(&self, request: u16) -> u8 {
        match self.requests.get(usize::from(request)) {
            Some(Request::Cut(running)) if running.unposted != 0 => running.count,
            _ => 0,
        }
    }

    /// Records that a share's last write was confirmed. Returns the share's size.
    #[inline(always)]
    pub fn confirmed(&mut self, request: u16, share: u8) -> Result<u64, NotInFlight> {
        let at = usize::from(request) % R;
        let slot = &mut self.requests[at];
        if let Request::SingleWrite(SingleWrite { bytes, .. }) = *slot {
            *slot = Request::Done { bytes };
            return Ok(bytes);
        }
        let Request::Cut(running) = slot else {
            return Err(NotInFlight(request));
        };
        let bytes = self.shares[at][usize::from(share) % MAX_RAILS].bytes;
        running.unfinished &= !(1 << (share & 7));
        if running.unfinished == 0 {
            let bytes = running.bytes;
            *slot = Request::Done { bytes };
        }
        Ok(bytes)
    }

    /// Completes the fully posted sends for receives with numbers below `delivered`. The peer's BYE
    /// has reported that these receives have all their bytes. Returns true if there was such a
    /// send.
    pub fn delivered(&mut self, delivered: u64) -> bool {
        let mut any = false;
        for slot in self.requests.iter_mut() {
            let bytes = match slot {
                Request::SingleWrite(single) if single.origin.sequence < delivered => single.bytes,
                Request::Cut(running)
                    if running.origin.sequence < delivered && running.unposted == 0 =>
                {
                    running.bytes
                }
                _ => continue,
            };
            *slot = Request::Done { bytes };
            any = true;
        }
        any
    }

    /// Records the loss of a lane that both ends have fenced. `received` is the peer's list of the
    /// shares that have arrived. The lane's shares in this list count as confirmed. The lane's
    /// other shares wait for [`Sends::resend`].
    pub fn lost(&mut self, lane: LaneId, received: &Received) {
        for (slot, shares) in self.requests.iter_mut().zip(self.shares.iter_mut()) {
            if let Request::SingleWrite(single) = slot
                && single.lane == lane
            {
                slot.cut(shares);
            }
            let Request::Cut(running) = slot else {
                continue;
            };
            for (number, share) in shares
                .iter_mut()
                .enumerate()
                .take(usize::from(running.count))
            {
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
                    share.left = Left::Lost;
                    self.has_lost_shares = true;
                }
            }
            if running.unfinished == 0 {
                let bytes = running.bytes;
                *slot = Request::Done { bytes };
            }
        }
    }

    /// Moves each share of a lost lane to another lane of the set `open`. `choose` selects a lane
    /// ([`LostShare::lane`]) and returns the share's route on that lane, or `None` to leave the
    /// share for the next call. A share is also left for the next call if no lane can carry it, or
    /// if the receiver is rewriting the ring entry of the share's receive part. The caller then
    /// posts the writes of the requests in [`Sends::waiting`].
    pub fn resend(
        &mut self,
        ring: &[AtomicU64],
        open: u8,
        mut choose: impl FnMut(&LostShare) -> Option<LocalRoute>,
    ) {
        self.has_lost_shares = false;
        for (slot, shares) in self.requests.iter_mut().zip(self.shares.iter_mut()) {
            let Request::Cut(running) = slot else {
                continue;
            };
            let Origin {
                sequence,
                part,
                registration_id,
                ..
            } = running.origin;
            for share in shares
                .iter_mut()
                .take(usize::from(running.count))
                .filter(|share| share.left == Left::Lost)
            {
                let found = next::granted(ring, sequence, part).and_then(|entry| {
                    let lanes = self.epochs.lanes_with_keys(open, entry.epoch());
                    let first = LaneId::first_in(lanes)?;
                    let LocalRoute { lane, queue, lkey } = choose(&LostShare {
                        bytes: share.bytes,
                        registration_id,
                        first,
                        lanes,
                    })?;
                    Some((
                        lane,
                        Route {
                            queue,
                            lkey,
                            rkey: entry.rkey(lane),
                            timed: false,
                        },
                    ))
                });
                match found {
                    Some(found) => {
                        (share.lane, share.route) = found;
                        share.set_all_unposted();
                    }
                    None => self.has_lost_shares = true,
                }
            }
        }
    }

    /// Returns true while a share waits for [`Sends::resend`].
    pub fn has_lost_shares(&self) -> bool {
        self.has_lost_shares
    }

    /// Returns the receive numbers of the oldest running send and of the next send to start.
    pub fn message_range(&self) -> (u64, u64) {
        let running = self.requests.iter().filter_map(|request| match request {
            Request::SingleWrite(single) => Some(single.origin.sequence),
            Request::Cut(running) => Some(running.origin.sequence),
            Request::Free | Request::Done { .. } => None,
        });
        let next = self.next.sequence();
        (running.min().unwrap_or(next), next)
    }

    /// Returns the progress of all sends, for stall messages. `ring` has the peer's CTS entries.
    pub fn progress(&self, ring: &[AtomicU64]) -> Progress {
        let mut running = 0;
        let mut lanes = 0;
        let mut untested = 0;
        for (request, shares) in self.requests.iter().zip(self.shares.iter()) {
            match request {
                Request::Free => continue,
                Request::Done { .. } => {
                    untested += 1;
                    continue;
                }
                Request::SingleWrite(single) => lanes |= single.lane.bit(),
                Request::Cut(cut) => {
                    let unfinished = shares
                        .iter()
                        .enumerate()
                        .filter(|(number, _)| cut.unfinished >> number & 1 == 1);
                    unfinished.for_each(|(_, share)| lanes |= share.lane.bit());
                }
            }
            running += 1;
        }
        let begun = self.next.sequence();
        Progress::Sender {
            begun,
            is_granted: next::granted(ring, begun, 0).is_some(),
            running,
            lanes,
            untested,
        }
    }

    /// Returns true if a send runs.
    pub fn is_running(&self) -> bool {
        self.requests
            .iter()
            .any(|request| matches!(request, Request::SingleWrite(_) | Request::Cut(_)))
    }

    /// Returns the requests with unposted writes.
    pub fn waiting(&self) -> impl Iterator<Item = u16> {
        (0..R as u16).filter(|request| self.shares_to_post(*request) > 0)
    }

    /// Frees a finished send's request number and returns the send's size; `None` while it runs.
    #[inline(always)]
    pub fn test(&mut self, request: u16) -> Result<Option<u64>, NotInFlight> {
        let slot = self
            .requests
            .get_mut(usize::from(request))
            .ok_or(NotInFlight(request))?;
        match *slot {
            Request::Free => Err(NotInFlight(request)),
            Request::SingleWrite(_) | Request::Cut(_) => Ok(None),
            Request::Done { bytes } => {
                *slot = Request::Free;
                self.free[self.free_count % R] = request;
                self.free_count += 1;
                Ok(Some(bytes))
            }
        }
    }
}

impl<const N: usize, const R: usize> Default for Sends<N, R> {
    fn default() -> Self {
        let mut free = [0; R];
        for (index, slot) in free.iter_mut().enumerate() {
            *slot = (R - 1 - index) as u16;
        }
        Self {
            requests: Box::new([Request::Free; R]),
            shares: Box::new([[RunningShare::default(); MAX_RAILS]; R]),
            free,
            free_count: R,
            next: Next::default(),
            epochs: Epochs::default(),
            has_lost_shares: false,
        }
    }
}

impl Request {
    /// Turns [`Request::SingleWrite`] into [`Request::Cut`] with one share, which is fully posted.
    fn cut(&mut self, shares: &mut [RunningShare; MAX_RAILS]) {
        let Self::SingleWrite(SingleWrite {
            origin,
            bytes,
            lane,
        }) = *self
        else {
            return;
        };
        *self = Self::Cut(Cut {
            origin,
            bytes,
            count: 1,
            unfinished: 1,
            unposted: 0,
        });
        shares[0] = RunningShare {
            lane,
            bytes,
            ..RunningShare::default()
        };
    }
}

impl Origin {
    #[inline(always)]
    fn new(head: &Head, (local_addr, registration_id): (u64, u32)) -> Self {
        let Head {
            sequence,
            part,
            addr: remote_addr,
            ..
        } = *head;
        Self {
            sequence,
            part,
            registration_id,
            local_addr,
            remote_addr,
        }
    }
}

#[inline(always)]
fn immediate(origin: &Origin, (share, shares): (u8, u8), full_chunks: u16) -> Immediate {
    let slot = Slot::of(origin.sequence);
    let generation = Immediate::generation_of(origin.sequence);
    Immediate {
        slot,
        part: origin.part,
        generation,
        shares,
        share,
        full_chunks,
    }
}

/// Returns the number of full chunks that precede the last write of a share of `bytes`.
#[inline(always)]
pub fn full_chunks(bytes: u64, chunk_bytes: u64) -> u64 {
    bytes.saturating_sub(1) / chunk_bytes
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
