//! The sender's side: what the receiver has granted, and the sends that run.

use super::NotInFlight;
use super::next::{Head, Next, Peek};
use super::plan::Share;
use crate::wire::cts::Violation;
use crate::wire::immediate::{Immediate, MAX_LEADS};
use crate::wire::{MAX_RAILS, PARTS, SLOTS};
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
}

#[derive(Debug, Clone, Copy)]
enum Request {
    Free,
    /// It went in one write, which was posted as it began.
    Whole {
        sequence: u64,
        bytes: u64,
    },
    Cut(Cut),
    Done {
        bytes: u64,
    },
}

/// A send that goes in shares, or waits for room.
#[derive(Debug, Clone, Copy)]
struct Cut {
    sequence: u64,
    bytes: u64,
    local_addr: u64,
    remote_addr: u64,
    part: u8,
    /// Shares in all, not yet confirmed, not yet wholly posted.
    count: u8,
    unfinished: u8,
    unposted: u8,
}

/// One share of a running send.
#[derive(Debug, Clone, Copy, Default)]
struct RunningShare {
    lane: u8,
    leads: u16,
    route: Route,
    bytes: u64,
    /// What of it is not posted, as offsets in the message.
    left: Left,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Left {
    #[default]
    Nothing,
    /// An empty message too has its one write.
    Range { from: u64, to: u64 },
}

/// Where a share goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Route {
    /// Queue pair of the rail.
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
    /// Rail number in the connection.
    pub lane: u8,
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

    #[inline(always)]
    fn run(&mut self, part: u8, request: Request) -> Option<u16> {
        self.free_count = self.free_count.checked_sub(1)?;
        let number = self.free[self.free_count % REQUESTS];
        self.next.take(part);
        self.requests[usize::from(number) % REQUESTS] = request;
        Some(number)
    }

    /// Starts a send that the caller posts at once, whole, in one write with this immediate; its request number. The
    /// head is what [`Sends::peek`] or [`Sends::search`] found. `None` when there is no room ([`Sends::has_room`]).
    #[inline(always)]
    pub fn start_whole(&mut self, head: Head, bytes: u64) -> Option<(u16, Immediate)> {
        let sequence = head.sequence;
        let request = self.run(head.part, Request::Whole { sequence, bytes })?;
        Some((request, immediate(sequence, head.part, 1, 0)))
    }

    /// Starts a send of the bytes at `local_addr` that goes by `shares`; its request number. The caller then says for each
    /// share that it posts it at once ([`Sends::post_share`]) or later ([`Sends::keep_share`]). The head is what
    /// [`Sends::peek`] or [`Sends::search`] found. `None` when there is no room ([`Sends::has_room`]).
    #[inline(always)]
    pub fn start(&mut self, head: &Head, local_addr: u64, shares: &[Share]) -> Option<u16> {
        let count = shares.len() as u8;
        let bytes = shares.iter().map(|share| share.bytes).sum();
        let Head { sequence, part, addr: remote_addr, .. } = *head;
        let (unfinished, unposted) = (count, count);
        let cut = Cut { sequence, bytes, local_addr, remote_addr, part, count, unfinished, unposted };
        self.run(part, Request::Cut(cut))
    }

    /// The caller posts share number `share` of a send that it just started, in one write with this immediate.
    #[inline(always)]
    pub fn post_share(&mut self, request: u16, share: u8, bytes: u64) -> Option<Immediate> {
        let at = usize::from(request) % REQUESTS;
        let Request::Cut(running) = &mut self.requests[at] else { return None };
        running.unposted = running.unposted.saturating_sub(1);
        let place = &mut self.shares[at][usize::from(share) % MAX_RAILS];
        (place.bytes, place.left) = (bytes, Left::Nothing);
        Some(immediate(running.sequence, running.part, running.count, 0))
    }

    /// Share number `number` of a send that was just started waits for [`Sends::next_write`].
    pub fn keep_share(&mut self, request: u16, number: u8, share: &Share, route: Route, chunk_bytes: u64) {
        let leads = leads(share.bytes, chunk_bytes).min(MAX_LEADS) as u16;
        let left = Left::Range { from: share.offset, to: share.offset + share.bytes };
        let place = &mut self.shares[usize::from(request) % REQUESTS][usize::from(number) % MAX_RAILS];
        *place = RunningShare { lane: share.lane, leads, route, bytes: share.bytes, left };
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
            local_addr: running.local_addr + from,
            remote_addr: running.remote_addr + from,
            bytes: left.min(chunk_bytes) as u32,
            immediate: last.then(|| immediate(running.sequence, running.part, running.count, part.leads)),
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
            running.unposted = running.unposted.saturating_sub(1);
        } else if let Left::Range { from, .. } = left {
            *from += u64::from(write.bytes);
        }
    }

    /// How many shares a running send has, while some of its writes have not been posted; else 0.
    #[inline(always)]
    pub fn shares_to_post(&self, request: u16) -> u8 {
        match self.requests.get(usize::from(request)) {
            Some(Request::Cut(running)) if running.unposted > 0 => running.count,
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
        if let Request::Whole { bytes, .. } = *slot {
            *slot = Request::Done { bytes };
            return Ok(bytes);
        }
        let Request::Cut(running) = slot else { return Err(NotInFlight(request)) };
        let bytes = self.shares[at][usize::from(share) % MAX_RAILS].bytes;
        running.unfinished = running.unfinished.saturating_sub(1);
        if running.unfinished == 0 {
            *slot = Request::Done { bytes: running.bytes };
        }
        Ok(bytes)
    }

    /// The peer said that it has received every receive before `delivered`: what runs for those is done. Whether any was.
    pub fn delivered(&mut self, delivered: u64) -> bool {
        let mut any = false;
        for slot in self.requests.iter_mut() {
            let bytes = match slot {
                Request::Whole { sequence, bytes } if *sequence < delivered => *bytes,
                Request::Cut(running) if running.sequence < delivered && running.unposted == 0 => running.bytes,
                _ => continue,
            };
            *slot = Request::Done { bytes };
            any = true;
        }
        any
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
            Request::Whole { .. } | Request::Cut(_) => Ok(None),
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

#[inline(always)]
fn immediate(sequence: u64, part: u8, shares: u8, leads: u16) -> Immediate {
    let slot = (sequence % SLOTS as u64) as u8;
    Immediate { slot, part, generation: Immediate::generation_of(sequence), shares, leads }
}

/// Full chunks that go before the last write of a share of `bytes`.
#[inline(always)]
pub fn leads(bytes: u64, chunk_bytes: u64) -> u64 {
    bytes.saturating_sub(1) / chunk_bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::plan::{Lane, divide};
    use crate::wire::cts::{Entry, RING_WORDS, Terms, entry_word};
    use std::sync::atomic::Ordering;

    fn ring() -> Vec<AtomicU64> {
        (0..RING_WORDS).map(|_| AtomicU64::new(0)).collect()
    }

    fn grant(ring: &[AtomicU64], sequence: u64, tags: &[i32]) {
        for (part, &tag) in tags.iter().enumerate() {
            let addr = 0x1000 * (part as u64 + 1);
            let (parts, part) = (tags.len() as u8, part as u8);
            put(ring, sequence, &Terms { addr, bytes: 1 << 30, tag, parts, part });
        }
    }

    fn put(ring: &[AtomicU64], sequence: u64, terms: &Terms) {
        let at = entry_word(sequence, usize::from(terms.part));
        for (cell, word) in ring[at..].iter().zip(Entry::new(terms, &[1; 4], sequence).words()) {
            cell.store(*word, Ordering::Relaxed);
        }
    }

    fn route(lane: u8) -> Route {
        Route { queue: lane + 4, lkey: 20 + u32::from(lane), rkey: 30 + u32::from(lane), timed: lane == 1 }
    }

    /// Starts a send of which nothing is posted at once.
    fn start(sends: &mut Sends, head: &Head, local_addr: u64, shares: &[Share], chunk_bytes: u64) -> Option<u16> {
        let request = sends.start(head, local_addr, shares)?;
        for (number, share) in shares.iter().enumerate() {
            sends.keep_share(request, number as u8, share, route(share.lane), chunk_bytes);
        }
        Some(request)
    }

    fn find(sends: &mut Sends, ring: &[AtomicU64], tag: i32) -> Result<Option<Head>, Violation> {
        match sends.peek(ring, tag) {
            Peek::Nothing => Ok(None),
            Peek::Found(head) => Ok(Some(head)),
            Peek::Search => sends.search(ring, tag),
        }
    }

    fn take(sends: &mut Sends, ring: &[AtomicU64], tag: i32) -> Option<(u64, u8)> {
        let head = find(sends, ring, tag).unwrap()?;
        assert_eq!((head.addr, head.room_bytes), (0x1000 * (u64::from(head.part) + 1), 1 << 30));
        sends.start_whole(head, 0).unwrap();
        Some((head.sequence, head.part))
    }

    #[test]
    fn tags_choose_within_a_group_and_equal_tags_match_in_order() {
        let (mut sends, ring) = (Sends::new(), ring());
        assert_eq!(take(&mut sends, &ring, 7), None);
        grant(&ring, 0, &[7, 9, 7]);
        grant(&ring, 1, &[7]);
        assert_eq!(take(&mut sends, &ring, 9), Some((0, 1)));
        assert_eq!(take(&mut sends, &ring, 8), None);
        assert_eq!(take(&mut sends, &ring, 7), Some((0, 0)));
        assert_eq!(take(&mut sends, &ring, 9), None, "the next group is not open yet");
        assert_eq!(take(&mut sends, &ring, 7), Some((0, 2)));
        assert_eq!(take(&mut sends, &ring, 7), Some((1, 0)));
        assert_eq!(take(&mut sends, &ring, 7), None);
    }

    #[test]
    fn a_group_is_seen_only_when_all_of_it_has_arrived() {
        let (mut sends, ring) = (Sends::new(), ring());
        grant(&ring, 0, &[1, 2, 3]);
        let hole = entry_word(0, 2) + 4;
        let word = ring[hole].swap(0, Ordering::Relaxed);
        assert_eq!(take(&mut sends, &ring, 1), None);
        ring[hole].store(word, Ordering::Relaxed);
        assert_eq!(take(&mut sends, &ring, 1), Some((0, 0)));
    }

    #[test]
    fn a_lie_in_the_ring_is_named() {
        let (mut sends, ring) = (Sends::new(), ring());
        grant(&ring, 0, &[1, 2]);
        put(&ring, 0, &Terms { parts: 3, part: 1, tag: 2, ..Terms::default() });
        assert_eq!(find(&mut sends, &ring, 1), Err(Violation::Parts(3)));
    }

    #[test]
    fn a_send_is_cut_into_chunks_and_done_when_every_share_is_confirmed() {
        let (mut sends, ring) = (Sends::new(), ring());
        grant(&ring, 0, &[0]);
        let bytes = 40_000;
        let head = find(&mut sends, &ring, 0).unwrap().unwrap();
        let shares = divide(bytes, &[Lane { bytes_per_us: 1e4, backlog_bytes: 0 }; 2], 4096);
        let request = start(&mut sends, &head, 0x5000, shares.as_slice(), 8192).unwrap();
        let mut total = 0;
        for share in 0..2 {
            assert_eq!(sends.shares_to_post(request), 2);
            let mut leads = 0;
            loop {
                let write = sends.next_write(request, share, 8192).unwrap();
                assert_eq!((write.lane, write.route), (share, route(share)));
                assert_eq!(write.local_addr - 0x5000, write.remote_addr - 0x1000);
                assert_eq!(write.local_addr - 0x5000, total);
                total += u64::from(write.bytes);
                sends.posted(request, share, &write);
                match write.immediate {
                    Some(immediate) => {
                        assert_eq!((immediate.leads, immediate.shares, immediate.slot), (leads, 2, 0));
                        break;
                    }
                    None => leads += 1,
                }
            }
            assert_eq!(leads, 2);
            assert!(sends.next_write(request, share, 8192).is_none());
        }
        assert_eq!((total, sends.shares_to_post(request)), (bytes, 0));
        assert_eq!(sends.test(request), Ok(None));
        let first = sends.confirmed(request, 0).unwrap();
        assert_eq!(sends.test(request), Ok(None));
        assert_eq!(first + sends.confirmed(request, 1).unwrap(), bytes);
        assert_eq!(sends.test(request), Ok(Some(bytes)));
        assert_eq!(sends.test(request), Err(NotInFlight(request)));
        assert_eq!(sends.confirmed(request, 0), Err(NotInFlight(request)));
    }

    #[test]
    fn shares_that_are_posted_at_once_need_no_other_look() {
        let mut sends = Sends::new();
        let head = Head { sequence: 70, part: 2, addr: 0, room_bytes: 0, at: 0 };
        let share = |lane: u8| Share { lane, offset: u64::from(lane) * 100, bytes: 100 };
        let request = sends.start(&head, 0, &[share(0), share(1)]).unwrap();
        let immediate = sends.post_share(request, 0, 100).unwrap();
        assert_eq!((immediate.slot, immediate.part, immediate.shares, immediate.leads), (70 % SLOTS as u8, 2, 2, 0));
        assert_eq!((sends.shares_to_post(request), sends.next_write(request, 0, 4096)), (2, None));
        sends.keep_share(request, 1, &share(1), route(1), 4096);
        let write = sends.next_write(request, 1, 4096).unwrap();
        assert_eq!((write.local_addr, write.bytes), (100, 100));
        sends.posted(request, 1, &write);
        assert_eq!(sends.shares_to_post(request), 0);
        assert_eq!((sends.confirmed(request, 1), sends.test(request)), (Ok(100), Ok(None)));
        assert_eq!((sends.confirmed(request, 0), sends.test(request)), (Ok(100), Ok(Some(200))));
        assert_eq!(sends.post_share(request, 0, 100), None);
    }

    #[test]
    fn all_requests_can_run_and_come_back() {
        let mut sends = Sends::new();
        let head = Head { sequence: 3, part: 0, addr: 0, room_bytes: 0, at: 0 };
        let shares = [Share { lane: 0, offset: 0, bytes: 0 }];
        let start = |sends: &mut Sends| start(sends, &head, 0, &shares, 4096);
        let running: Vec<u16> = (0..REQUESTS).map(|_| start(&mut sends).unwrap()).collect();
        assert!(!sends.has_room() && start(&mut sends).is_none() && sends.start_whole(head, 0).is_none());
        let write = sends.next_write(running[5], 0, 4096).unwrap();
        assert_eq!((write.bytes, write.immediate.unwrap().leads), (0, 0));
        sends.posted(running[5], 0, &write);
        sends.delivered(3);
        assert_eq!(sends.test(running[5]), Ok(None));
        sends.delivered(4);
        assert!(sends.test(running[5]).unwrap().is_some());
        assert_eq!(sends.test(running[6]), Ok(None), "nothing of it was posted");
        assert!(sends.has_room());
    }
}
