//! The ring of clear-to-send (CTS) entries, into which a peer can write anything, and the sends
//! that this side starts from the entries. The peer lies about address, size, tag, part, number of
//! parts, sequence and received shares, and sends its control messages at any time. A share is a
//! contiguous part of a message, sent on one lane.
//!
//! The model reads the ring itself, without `Sends`, and must find the same receive for each tag.
//! The model follows every send: the writes must cover each byte of a share once, into the granted
//! buffer. A share that was lost with its lane is written again from its first byte.

use crate::memory;
use crate::tape::{Tape, lane};
use crate::target::Seeds;
use proto::flow::next::{Head, Peek};
use proto::flow::plan::Share;
use proto::flow::sends::{LocalRoute, REQUESTS, Route, Sends};
use proto::wire::codec::Writer;
use proto::wire::control::{OpenReceive, Received};
use proto::wire::cts::{
    ENTRY_WORDS, Entry, Epoch, MAX_RECEIVE_BYTES, PackedKeys, RING_WORDS, Terms, Violation,
    entry_word, rkey_in,
};
use proto::wire::ids::{LaneId, Slot};
use proto::wire::immediate::Immediate;
use proto::wire::{MAX_RAILS, PARTS, SLOTS};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const LANES: usize = 4;
/// Bytes of a chunk. A chunk is the largest single write, and 4096 bytes are the smallest chunk
/// that a handshake accepts.
const CHUNK: u64 = 4096;
/// Address of the data that this side sends.
const LOCAL: u64 = 0x7f00_0000_0000;

thread_local! {
    static RING: Vec<AtomicU64> = (0..RING_WORDS).map(|_| AtomicU64::new(0)).collect();
}

#[derive(Debug, Clone, Copy)]
struct Posted {
    request: u16,
    share: u8,
    lane: LaneId,
}

#[derive(Debug, Clone)]
struct Sent {
    head: Head,
    bytes: u64,
    /// True for a message that is sent by a single write, which is posted when the send starts.
    /// False once the lane of this write was lost.
    is_whole: bool,
    shares: Vec<Piece>,
}

/// A share of a message, and what has happened to the share.
#[derive(Debug, Clone, Copy)]
struct Piece {
    share: Share,
    posted: u64,
    is_closed: bool,
    is_done: bool,
    waits_for_lane: bool,
}

impl Sent {
    fn is_done(&self) -> bool {
        self.shares.iter().all(|piece| piece.is_done)
    }
}

struct Model<'a> {
    ring: &'a [AtomicU64],
    sends: Sends,
    /// Number of receives granted by the peer.
    granted: u64,
    /// Number of the receive at the head of the ring.
    sequence: u64,
    /// Parts of the receive at the head that no send has matched yet. `None` until a send finds
    /// that the entries of all parts have arrived.
    waiting: Option<Vec<u8>>,
    requests: BTreeMap<u16, Sent>,
    under_way: Vec<Posted>,
    is_lost: [bool; LANES],
    has_said_bye: bool,
    finished: u64,
}

/// Runs the input as a tape of decisions: the peer's writes and this side's calls.
pub fn check(data: &[u8]) -> bool {
    RING.with(|ring| {
        ring.iter().for_each(|word| word.store(0, Relaxed));
        let mut model = Model {
            ring,
            sends: Sends::default(),
            granted: 0,
            sequence: 0,
            waiting: None,
            requests: BTreeMap::new(),
            under_way: Vec::new(),
            is_lost: [false; LANES],
            has_said_bye: false,
            finished: 0,
        };
        let mut tape = Tape::new(data);
        while let Some(step) = tape.step() {
            match step % 16 {
                0..=3 => model.grant(&mut tape),
                4 => {
                    let at = usize::from(tape.u16()) % RING_WORDS;
                    ring[at].store(tape.u64(), Relaxed);
                }
                5..=8 => model.send(&mut tape),
                9 => model.post(tape.u8()),
                10..=11 => model.confirm(usize::from(tape.u8())),
                12 => model.test(u16::from(tape.u8()) + 256 * u16::from(tape.u8() & 1)),
                13 => model.test_oldest(),
                14 => model.lose(&mut tape),
                _ => model.bye(&mut tape),
            }
            model.check_counts();
        }
        model.finished > 0
    })
}

impl Model<'_> {
    /// Writes the entries of one receive as the peer does, one entry for each part. The entries are
    /// correct except for the lies on the tape.
    fn grant(&mut self, tape: &mut Tape<'_>) {
        let shape = tape.u8();
        let lies = tape.u8();
        let parts = (shape & 7) + 1;
        let mut sequence = self.granted;
        if lies & 1 == 1 {
            sequence = sequence.wrapping_add(tape.u8() as i8 as u64);
        } else {
            self.granted += 1;
        }
        for part in 0..parts {
            let tag = if shape & 8 == 8 {
                i32::from(part)
            } else {
                i32::from(shape >> 4)
            };
            let addr = u64::from(part) << 32;
            let mut terms = Terms {
                addr,
                bytes: u64::from(tape.u8()) << 8,
                tag,
                parts,
                part,
                epoch: Epoch::default(),
            };
            let mut mask = u8::MAX;
            if lies >> (part & 3) & 2 == 2 {
                match tape.u8() % 6 {
                    0 => terms.addr = tape.u64(),
                    1 => terms.bytes = tape.u64() & ((1 << 48) - 1),
                    2 => terms.tag = tape.u32() as i32,
                    3 => terms.parts = tape.u8(),
                    4 => terms.part = tape.u8(),
                    _ => mask = tape.u8(),
                }
            }
            let entry = Entry::new(&terms, &keys(sequence, part), sequence);
            let at = entry_word(sequence, usize::from(part));
            for (number, word) in entry
                .words()
                .iter()
                .enumerate()
                .filter(|(number, _)| mask >> number & 1 == 1)
            {
                self.ring[at + number].store(*word, Relaxed);
            }
        }
    }

    fn entry(&self, part: u8) -> Option<Entry> {
        let at = entry_word(self.sequence, usize::from(part));
        let words: [u64; ENTRY_WORDS] =
            std::array::from_fn(|word| self.ring[at + word].load(Relaxed));
        Entry::whole(words, self.sequence)
    }

    fn checked(&self, part: u8) -> Result<Option<Entry>, Violation> {
        self.entry(part)
            .map(|entry| entry.check(part).map(|()| entry))
            .transpose()
    }

    /// Returns the parts of the receive at the head, or `None` until the entries of all parts have
    /// arrived.
    fn arrived(&self) -> Result<Option<Vec<u8>>, Violation> {
        let Some(first) = self.checked(0)? else {
            return Ok(None);
        };
        for part in 1..first.parts() {
            match self.checked(part)? {
                None => return Ok(None),
                Some(entry) if entry.parts() != first.parts() => {
                    return Err(Violation::Parts(entry.parts()));
                }
                Some(_) => {}
            }
        }
        Ok(Some((0..first.parts()).collect()))
    }

    /// Returns the part that a send with this tag matches, and the part's entry.
    fn expect(&mut self, tag: i32) -> Result<Option<(u8, Entry)>, Violation> {
        if self.waiting.is_none() {
            self.waiting = self.arrived()?;
        }
        for part in self.waiting.clone().unwrap_or_default() {
            if let Some(entry) = self.checked(part)?.filter(|entry| entry.tag() == tag) {
                return Ok(Some((part, entry)));
            }
        }
        Ok(None)
    }

    fn find(&mut self, tag: i32) -> Result<Option<Head>, Violation> {
        let found = match self.sends.peek(self.ring, tag) {
            Peek::Found(head) => Ok(Some(head)),
            Peek::Nothing => Ok(None),
            Peek::Search => self.sends.search(self.ring, tag),
        };
        let expected = self.expect(tag);
        let fields = |head: &Head| (head.part, head.addr, head.buffer_bytes);
        let terms = |(part, entry): &(u8, Entry)| (*part, entry.addr(), entry.bytes());
        assert_eq!(
            found.map(|head| head.as_ref().map(fields)),
            expected.map(|found| found.as_ref().map(terms))
        );
        found
    }

    fn send(&mut self, tape: &mut Tape<'_>) {
        let how = tape.u8();
        let tag = i32::from(tape.u8() as i8);
        let wanted = u64::from(tape.u16());
        if self.has_said_bye || self.is_lost.iter().all(|lost| *lost) || !self.sends.has_room() {
            return;
        }
        let Ok(Some(head)) = self.find(tag) else {
            return;
        };
        assert_eq!(head.sequence, self.sequence);
        assert!(head.buffer_bytes <= MAX_RECEIVE_BYTES && usize::from(head.part) < PARTS);
        assert!(
            head.addr.checked_add(head.buffer_bytes).is_some(),
            "{head:?} ends behind the end of memory"
        );
        for lane in LaneId::all(MAX_RAILS) {
            let (word, shift) = rkey_in(lane);
            let at = entry_word(head.sequence, usize::from(head.part));
            assert_eq!(
                head.rkey(self.ring, lane),
                (self.ring[at + word].load(Relaxed) >> shift) as u32
            );
        }
        let bytes = wanted.min(head.buffer_bytes);
        let (request, sent) = if how & 1 == 0 && bytes <= CHUNK {
            self.start_single_write(head, bytes)
        } else {
            self.start_cut(head, bytes, how)
        };
        assert!(usize::from(request) < REQUESTS);
        assert!(
            self.requests.insert(request, sent).is_none(),
            "request {request} is given out twice"
        );
        let mut left = self.waiting.take().expect("it was found");
        left.retain(|part| *part != head.part);
        if left.is_empty() {
            self.sequence += 1;
        } else {
            self.waiting = Some(left);
        }
    }

    fn open_lane(&self, wish: u8) -> LaneId {
        let from = usize::from(wish);
        let mut from_there_on = (0..LANES).map(|step| lane((from + step) % LANES));
        from_there_on
            .find(|lane| !self.is_lost[lane.index()])
            .expect("a lane is open")
    }

    fn start_single_write(&mut self, head: Head, bytes: u64) -> (u16, Sent) {
        let lane = self.open_lane(head.part);
        let (started, allocated) =
            memory::peak(|| self.sends.start_single_write(head, (LOCAL, 7), bytes, lane));
        let (request, immediate) = started.expect("there is room");
        assert_eq!(
            (immediate, allocated),
            (expected_immediate(&head, 0, 1, 0), 0)
        );
        self.under_way.push(Posted {
            request,
            share: 0,
            lane,
        });
        let share = Share {
            lane,
            offset: 0,
            bytes,
        };
        let shares = vec![Piece {
            share,
            posted: bytes,
            is_closed: true,
            is_done: false,
            waits_for_lane: false,
        }];
        (
            request,
            Sent {
                head,
                bytes,
                is_whole: true,
                shares,
            },
        )
    }

    /// Starts a send of up to eight shares on the open lanes. Shares that are not posted here are
    /// posted later by `post`.
    fn start_cut(&mut self, head: Head, bytes: u64, how: u8) -> (u16, Sent) {
        let count = u64::from(how >> 1 & 7) + 1;
        let part = bytes.div_ceil(count).next_multiple_of(128).max(128);
        let mut shares = Vec::new();
        let mut offset = 0;
        while offset < bytes || shares.is_empty() {
            let size = part.min(bytes - offset);
            let lane = self.open_lane(how.wrapping_add(shares.len() as u8));
            shares.push(Share {
                lane,
                offset,
                bytes: size,
            });
            offset += size;
        }
        let request = self
            .sends
            .start(&head, (LOCAL, 7), &shares)
            .expect("there is room");
        let mut pieces = Vec::new();
        for (number, share) in shares.iter().enumerate() {
            let now = how >> 4 & 1 == 1 && share.bytes <= CHUNK;
            if now {
                let immediate = self.sends.post_share(request, number as u8, share);
                assert_eq!(
                    immediate,
                    Some(expected_immediate(&head, number as u8, shares.len(), 0))
                );
                self.under_way.push(Posted {
                    request,
                    share: number as u8,
                    lane: share.lane,
                });
            } else {
                let route = Route {
                    queue: number as u8,
                    lkey: 1,
                    rkey: 2,
                    timed: false,
                };
                self.sends
                    .keep_share(request, number as u8, share, route, CHUNK);
            }
            let posted = if now { share.bytes } else { 0 };
            pieces.push(Piece {
                share: *share,
                posted,
                is_closed: now,
                is_done: false,
                waits_for_lane: false,
            });
        }
        (
            request,
            Sent {
                head,
                bytes,
                is_whole: false,
                shares: pieces,
            },
        )
    }

    /// Posts at most `most` writes of waiting shares on the open lanes.
    fn post(&mut self, most: u8) {
        let mut left = usize::from(most);
        for request in self.sends.waiting().collect::<Vec<_>>() {
            let count = self.sends.shares_to_post(request);
            let sent = self
                .requests
                .get_mut(&request)
                .expect("a waiting request exists");
            assert_eq!(usize::from(count), sent.shares.len());
            for (number, piece) in (0..).zip(&mut sent.shares) {
                while left > 0 && !piece.waits_for_lane && !self.is_lost[piece.share.lane.index()] {
                    let Some(next) = self.sends.next_write(request, number, CHUNK) else {
                        break;
                    };
                    left -= 1;
                    let from = piece.share.offset + piece.posted;
                    let size = (piece.share.bytes - piece.posted).min(CHUNK);
                    let is_last = piece.posted + size == piece.share.bytes;
                    assert!(!piece.is_closed, "more is posted than there is");
                    assert_eq!((next.lane, u64::from(next.bytes)), (piece.share.lane, size));
                    assert_eq!(
                        (next.local_addr, next.remote_addr),
                        (LOCAL + from, sent.head.addr + from)
                    );
                    let full_chunks = (piece.share.bytes.saturating_sub(1) / CHUNK) as u16;
                    let immediate =
                        expected_immediate(&sent.head, number, usize::from(count), full_chunks);
                    assert_eq!(next.immediate, is_last.then_some(immediate));
                    self.sends.posted(request, number, &next);
                    (piece.posted, piece.is_closed) = (piece.posted + size, is_last);
                    if is_last {
                        self.under_way.push(Posted {
                            request,
                            share: number,
                            lane: next.lane,
                        });
                    }
                }
            }
        }
    }

    fn confirm(&mut self, which: usize) {
        if self.under_way.is_empty() {
            return;
        }
        let Posted { request, share, .. } =
            self.under_way.swap_remove(which % self.under_way.len());
        let confirmed = self.sends.confirmed(request, share);
        match self
            .requests
            .get_mut(&request)
            .filter(|sent| !sent.is_done())
        {
            Some(sent) => {
                let piece = &mut sent.shares[usize::from(share)];
                piece.is_done = true;
                assert_eq!(confirmed, Ok(piece.share.bytes));
            }
            // The peer's BYE has claimed the share as received.
            None => assert!(confirmed.is_err() && self.has_said_bye),
        }
    }

    fn test(&mut self, request: u16) {
        let tested = self.sends.test(request);
        match self.requests.get(&request) {
            None => assert!(tested.is_err(), "request {request} is unknown"),
            Some(sent) if sent.is_done() => {
                assert_eq!(tested, Ok(Some(sent.bytes)));
                self.requests.remove(&request);
                self.finished += 1;
            }
            Some(_) => assert_eq!(tested, Ok(None)),
        }
    }

    fn test_oldest(&mut self) {
        if let Some(request) = self
            .requests
            .iter()
            .min_by_key(|(_, sent)| sent.head.sequence)
            .map(|(request, _)| *request)
        {
            self.test(request);
        }
    }

    /// If the tape's lane is open, loses the lane, with any claim by the peer about received
    /// shares. If the lane is lost, brings it back.
    fn lose(&mut self, tape: &mut Tape<'_>) {
        let what = tape.u8();
        let granted = tape.u8();
        let lost = lane(usize::from(what) % LANES);
        if self.is_lost[lost.index()] {
            self.is_lost[lost.index()] = false;
            return;
        }
        let sequence = self.sequence.saturating_sub(u64::from(what >> 4));
        let open = (0..u64::from(what >> 2 & 3)).map(|at| OpenReceive {
            sequence: sequence + at,
            shares: std::array::from_fn(|_| tape.u8()),
        });
        let received = Received {
            open: open.collect(),
            granted: sequence.wrapping_add(granted as i8 as u64),
        };
        self.is_lost[lost.index()] = true;
        self.under_way.retain(|posted| posted.lane != lost);
        self.sends.lost(lost, &received);
        for sent in self.requests.values_mut().filter(|sent| !sent.is_done()) {
            let Head { sequence, part, .. } = sent.head;
            for (number, piece) in (0..).zip(&mut sent.shares) {
                if piece.share.lane == lost && !piece.is_done {
                    (piece.posted, piece.is_closed) = (0, false);
                    piece.is_done = received.has(sequence, part, number);
                    piece.waits_for_lane = !piece.is_done;
                    sent.is_whole = false;
                }
            }
        }
        let other = lane((lost.index() + 1 + usize::from(granted) % (LANES - 1)) % LANES);
        if self.is_lost[other.index()] {
            return;
        }
        // A share is resent on the other lane only if the CTS entry of its receive is complete and
        // has keys for that lane. No lane of the model joins again with new keys, so entries have
        // that lane's keys from the default epoch on.
        let has_keys = |sequence, part: u8| {
            let at = entry_word(sequence, usize::from(part));
            let entry = Entry::whole(
                std::array::from_fn(|word| self.ring[at + word].load(Relaxed)),
                sequence,
            );
            entry.is_some_and(|entry| entry.epoch().is_since(Epoch::default()))
        };
        let mut moved = 0;
        self.sends.resend(self.ring, other.bit(), |share| {
            moved += 1;
            assert!(share.registration_id == 7 && share.bytes <= MAX_RECEIVE_BYTES);
            Some(LocalRoute {
                lane: share.lane(lost),
                queue: 0,
                lkey: 3,
            })
        });
        let mut moved_here = 0;
        let mut is_left = false;
        for sent in self.requests.values_mut().filter(|sent| !sent.is_done()) {
            let has_keys = has_keys(sent.head.sequence, sent.head.part);
            for piece in sent
                .shares
                .iter_mut()
                .filter(|piece| piece.waits_for_lane && !piece.is_done)
            {
                if has_keys {
                    (piece.share.lane, piece.waits_for_lane) = (other, false);
                    moved_here += 1;
                }
                is_left |= !has_keys;
            }
        }
        assert_eq!((moved, self.sends.has_lost_shares()), (moved_here, is_left));
    }

    /// Handles the peer's BYE, which claims that all receives below a number were delivered.
    fn bye(&mut self, tape: &mut Tape<'_>) {
        let delivered = if tape.u8() & 1 == 1 {
            tape.u64()
        } else {
            self.sequence.saturating_sub(u64::from(tape.u8()))
        };
        self.has_said_bye = true;
        let mut any = false;
        for sent in self
            .requests
            .values_mut()
            .filter(|sent| !sent.is_done() && sent.head.sequence < delivered)
        {
            // Unposted bytes cannot have arrived, even if the peer claims so.
            if sent.is_whole
                || sent
                    .shares
                    .iter()
                    .all(|piece| piece.is_closed || piece.is_done)
            {
                sent.shares
                    .iter_mut()
                    .for_each(|piece| piece.is_done = true);
                any = true;
            }
        }
        assert_eq!(self.sends.delivered(delivered), any);
    }

    fn check_counts(&self) {
        let running = self
            .requests
            .values()
            .filter(|sent| !sent.is_done())
            .map(|sent| sent.head.sequence);
        assert_eq!(
            self.sends.message_range(),
            (running.min().unwrap_or(self.sequence), self.sequence)
        );
        assert_eq!(self.sends.has_room(), self.requests.len() < REQUESTS);
    }
}

fn expected_immediate(head: &Head, share: u8, shares: usize, full_chunks: u16) -> Immediate {
    let slot = Slot::new((head.sequence % SLOTS as u64) as u16).expect("it is below SLOTS");
    let generation = (head.sequence / SLOTS as u64 % 64) as u8;
    Immediate {
        slot,
        part: head.part,
        generation,
        shares: shares as u8,
        share,
        full_chunks,
    }
}

fn keys(sequence: u64, part: u8) -> PackedKeys {
    std::array::from_fn(|pair| sequence << 40 | u64::from(part) << 34 | pair as u64)
}

/// Tapes with a receive of one part, a receive whose parts are matched out of order, a message in
/// several shares, a lost lane, and each kind of lie.
pub fn seeds() -> Seeds {
    let send =
        |w: &mut Writer, how: u8, tag: u8, bytes: u16| _ = w.u8(5).u8(how).u8(tag).u16(bytes);
    let mut lone = Writer::default();
    for _ in 0..3 {
        lone.u8(0).u8(0x30).u8(0).u8(16);
        send(&mut lone, 0, 3, 4000);
        lone.u8(10).u8(0).u8(13);
    }
    let mut group = Writer::default();
    group.u8(0).u8(8 | 2).u8(0).bytes(&[16, 1, 255]);
    send(&mut group, 0, 2, 100);
    send(&mut group, 0, 9, 1);
    send(&mut group, 0, 0, 5000);
    send(&mut group, 0x10, 1, 0);
    group
        .u8(9)
        .u8(9)
        .u8(10)
        .u8(0)
        .u8(10)
        .u8(0)
        .u8(10)
        .u8(0)
        .u8(13)
        .u8(13)
        .u8(13);
    let mut cut = Writer::default();
    cut.u8(0).u8(0).u8(0).u8(255);
    send(&mut cut, 0x0f, 0, 60_000);
    cut.u8(9).u8(5).u8(9).u8(255);
    (0..8).for_each(|_| _ = cut.u8(10).u8(1));
    cut.u8(13);
    let mut lost = Writer::default();
    lost.u8(0).u8(0).u8(0).u8(16).u8(0).u8(0).u8(0).u8(200);
    send(&mut lost, 0, 0, 10);
    send(&mut lost, 7, 0, 40_000);
    lost.u8(9)
        .u8(3)
        .u8(14)
        .u8(0x24)
        .u8(0)
        .bytes(&[0; 8])
        .u8(9)
        .u8(255)
        .u8(14)
        .u8(0)
        .u8(0);
    (0..6).for_each(|_| _ = lost.u8(10).u8(0));
    lost.u8(13).u8(13).u8(15).u8(0).u8(0).u8(13);
    let mut lies = Writer::default();
    lies.u8(0).u8(0).u8(0).u8(16);
    send(&mut lies, 0, 0, 1);
    lies.u8(10).u8(0).u8(13);
    lies.u8(0).u8(1).u8(2).u8(1).u8(0).u64(u64::MAX).u8(1);
    send(&mut lies, 0, 0, 1);
    for (kind, value) in [(1, u64::MAX), (2, 5), (3, 9), (4, 3), (5, 0x7f)] {
        lies.u8(0).u8(0).u8(3).u8(0xff).u8(1).u8(kind);
        match kind {
            1 => lies.u64(value),
            2 => lies.u32(value as u32),
            _ => lies.u8(value as u8),
        };
        send(&mut lies, 0, 0, 1);
    }
    lies.u8(4).u16(64).u64(u64::MAX).u8(12).u8(200).u8(1);
    vec![
        ("lone", lone.into_bytes()),
        ("group", group.into_bytes()),
        ("cut", cut.into_bytes()),
        ("lost", lost.into_bytes()),
        ("lies", lies.into_bytes()),
    ]
}
