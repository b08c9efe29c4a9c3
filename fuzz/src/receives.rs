//! A receiver's handling of immediates. A share is the part of a message that is sent on one rail.
//! Its last write carries an immediate of 32 bits, which names among others the slot, the part, the
//! share, and the number of the share's writes before the last one (full chunks). The peer lies
//! about these fields and about the byte count. Grants, tests and losses of lanes happen between
//! the immediates.
//!
//! The model keeps the arrived shares of each slot with their bytes, and predicts the result of
//! each call.

use crate::memory;
use crate::tape::{Tape, lane};
use crate::target::Seeds;
use proto::flow::NotInFlight;
use proto::flow::receives::{Arrival, Grant, Receives, Repeat, Violation};
use proto::wire::codec::Writer;
use proto::wire::control::{ControlMessage, MAX_CONTROL_BYTES};
use proto::wire::cts::MAX_RECEIVE_BYTES;
use proto::wire::ids::{LaneId, Slot};
use proto::wire::immediate::Immediate;
use proto::wire::{PARTS, SLOTS};
use std::collections::BTreeMap;

const LANES: usize = 4;
/// Bytes of a chunk, the largest single write. No handshake agrees on a smaller chunk.
const CHUNK: u64 = 4096;

#[derive(Debug, Clone, Default)]
struct Part {
    buffer_bytes: u64,
    /// Number of shares that the peer announced; `None` before the first share.
    announced: Option<u8>,
    arrived: BTreeMap<u8, u64>,
}

impl Part {
    fn bytes(&self) -> u64 {
        self.arrived.values().sum()
    }

    fn is_whole(&self) -> bool {
        self.announced
            .is_some_and(|count| self.arrived.len() == usize::from(count))
    }
}

#[derive(Debug, Clone)]
struct Open {
    sequence: u64,
    parts: Vec<Part>,
    optional: bool,
    reported_done: bool,
    lane: LaneId,
    /// True if the lane of its clear-to-send was lost, so that the clear-to-send must be repeated.
    to_repeat: bool,
}

impl Open {
    fn is_whole(&self) -> bool {
        self.parts.iter().all(Part::is_whole)
    }
}

struct Model {
    receives: Receives,
    slots: Vec<Option<Open>>,
    /// For each slot, the lane on which the slot's clear-to-send is being repeated, if any.
    repeating: Vec<Option<LaneId>>,
    granted: u64,
    delivered: u64,
    whole: u64,
}

/// Runs the input as a tape of grants, immediates, tests and losses.
pub fn check(data: &[u8]) -> bool {
    let mut tape = Tape::new(data);
    let slots = vec![None; SLOTS];
    let repeating = vec![None; SLOTS];
    let mut model = Model {
        receives: Receives::new(CHUNK),
        slots,
        repeating,
        granted: 0,
        delivered: 0,
        whole: 0,
    };
    while let Some(step) = tape.step() {
        match step % 8 {
            0 => model.grant(&mut tape),
            1 => model.arrives(Immediate::decode(tape.u32()), tape.u32()),
            2..=4 => model.arrives_nearly(&mut tape),
            5 => model.test(u16::from(tape.u8()) % (SLOTS as u16 + 2)),
            6 => model.lose(tape.lane(LANES)),
            _ => model.repeat(&mut tape),
        }
        model.check_counts();
    }
    model.check_loss_report();
    model.whole > 0
}

impl Model {
    fn grant(&mut self, tape: &mut Tape<'_>) {
        let how = tape.u8();
        let count = usize::from(how & 7) + 1;
        let optional = how & 8 == 8;
        let lane = lane(usize::from(how >> 4) % LANES);
        let buffer_bytes = |tape: &mut Tape<'_>| match tape.u8() {
            255 => MAX_RECEIVE_BYTES,
            kib @ 128.. => u64::from(kib - 127) << 10,
            bytes => u64::from(bytes),
        };
        let buffer_sizes: Vec<u64> = (0..count).map(|_| buffer_bytes(tape)).collect();
        let at = self.granted as usize % SLOTS;
        let is_free = self.slots[at].is_none() && self.repeating[at].is_none();
        assert_eq!(self.receives.has_room(), is_free);
        let (grant, allocated) = memory::peak(|| {
            self.receives
                .grant(buffer_sizes.iter().copied(), optional, lane)
        });
        assert_eq!(
            (grant, allocated),
            (
                is_free.then_some(Grant {
                    slot: slot(at),
                    sequence: self.granted
                }),
                0
            )
        );
        if is_free {
            let parts = buffer_sizes
                .into_iter()
                .map(|buffer_bytes| Part {
                    buffer_bytes,
                    ..Part::default()
                })
                .collect();
            let sequence = self.granted;
            self.slots[at] = Some(Open {
                sequence,
                parts,
                optional,
                reported_done: false,
                lane,
                to_repeat: false,
            });
            self.granted += 1;
        }
    }

    /// Delivers an immediate that fits a granted receive, except for the lies on the tape.
    fn arrives_nearly(&mut self, tape: &mut Tape<'_>) {
        let at = tape.below(SLOTS);
        let shape = tape.u8();
        let lies = tape.u8();
        let sequence = self.slots[at]
            .as_ref()
            .map_or(self.granted, |open| open.sequence);
        let shares = 1 + (shape >> 5);
        let share = shape >> 2 & 7;
        let mut immediate = Immediate {
            slot: slot(at),
            part: tape.u8() & 7,
            generation: Immediate::generation_of(sequence),
            shares,
            share: share % shares,
            full_chunks: u16::from(shape & 3),
        };
        let mut bytes = u32::from(tape.u8());
        if lies & 1 == 1 {
            immediate.generation = tape.u8() & 63;
        }
        if lies & 2 == 2 {
            immediate.share = share;
        }
        if lies & 4 == 4 {
            immediate.full_chunks = tape.u16() & 0xfff;
        }
        if lies & 8 == 8 {
            bytes = tape.u32();
        }
        self.arrives(immediate, bytes);
    }

    fn arrives(&mut self, immediate: Immediate, bytes: u32) {
        assert_eq!(Immediate::decode(immediate.encode()), immediate);
        let expected = self.expect(immediate, u64::from(bytes));
        let (arrived, allocated) = memory::peak(|| self.receives.arrived(&immediate, bytes));
        assert_eq!(
            (arrived, allocated),
            (expected, 0),
            "{immediate:?} with {bytes}"
        );
    }

    fn expect(&mut self, immediate: Immediate, bytes: u64) -> Result<Arrival, Violation> {
        let Immediate {
            slot,
            part,
            generation,
            shares,
            share,
            full_chunks,
        } = immediate;
        let slot = &mut self.slots[slot.index()];
        let Some(open) = slot
            .as_mut()
            .filter(|open| Immediate::generation_of(open.sequence) == generation)
        else {
            return Ok(Arrival::Stale);
        };
        let unknown = Violation::Part { part, share };
        let wanted = open.parts.get_mut(usize::from(part)).ok_or(unknown)?;
        if share >= shares {
            return Err(unknown);
        }
        if wanted.arrived.contains_key(&share) {
            // A repeated immediate without bytes is ignored.
            let is_harmless = bytes == 0 && wanted.announced == Some(shares);
            return if is_harmless {
                Ok(Arrival::Stale)
            } else {
                Err(Violation::Again {
                    part,
                    share,
                    bytes: bytes as u32,
                })
            };
        }
        if let Some(before) = wanted.announced.filter(|before| *before != shares) {
            return Err(Violation::Shares {
                before,
                now: shares,
            });
        }
        let share_bytes = u64::from(full_chunks) * CHUNK + bytes;
        let bytes = wanted.bytes() + share_bytes;
        let buffer_bytes = wanted.buffer_bytes;
        if bytes > buffer_bytes {
            return Err(Violation::Overrun {
                bytes,
                buffer_bytes,
            });
        }
        wanted.announced = Some(shares);
        wanted.arrived.insert(share, share_bytes);
        if !open.is_whole() {
            return Ok(Arrival::Part);
        }
        self.whole += 1;
        if open.reported_done {
            *slot = None;
        }
        Ok(Arrival::Complete)
    }

    fn test(&mut self, request: u16) {
        let Some(slot) = Slot::new(request) else {
            return assert!(usize::from(request) >= SLOTS);
        };
        let mut sizes = Vec::with_capacity(PARTS);
        let (done, allocated) = memory::peak(|| {
            self.receives
                .test(slot, |part, bytes| sizes.push((part, bytes)))
        });
        assert_eq!(allocated, 0);
        let place = &mut self.slots[slot.index()];
        let Some(open) = place.clone().filter(|open| !open.reported_done) else {
            assert_eq!((done, sizes.len()), (Err(NotInFlight(request)), 0));
            return;
        };
        let whole = open.is_whole();
        if !whole && !open.optional {
            assert_eq!((done, sizes.len()), (Ok(false), 0));
            return;
        }
        let reported = |part: &Part| {
            if whole {
                part.bytes()
            } else {
                part.buffer_bytes
            }
        };
        let expected: Vec<(usize, u64)> = open.parts.iter().map(reported).enumerate().collect();
        assert_eq!((done, &sizes), (Ok(true), &expected));
        assert!(
            sizes
                .iter()
                .zip(&open.parts)
                .all(|((_, bytes), part)| *bytes <= part.buffer_bytes),
            "more than there is room for"
        );
        *place = if whole {
            None
        } else {
            Some(Open {
                reported_done: true,
                ..open
            })
        };
    }

    fn lose(&mut self, lane: LaneId) {
        self.receives.lost(lane);
        for (slot, repeating) in self.slots.iter_mut().zip(&mut self.repeating) {
            if *repeating == Some(lane) {
                *repeating = None;
            }
            if let Some(open) = slot
                .as_mut()
                .filter(|open| open.lane == lane && !open.is_whole())
            {
                open.to_repeat = true;
            }
        }
    }

    /// Repeats a grant whose lane was lost, or confirms a repeated grant.
    fn repeat(&mut self, tape: &mut Tape<'_>) {
        let what = tape.u8();
        let lane = tape.lane(LANES);
        if what & 0x80 == 0 {
            assert_eq!(self.receives.next_repeat(lane, |_| false), None);
            let is_due = |open: &&mut Open| open.to_repeat && !open.is_whole();
            let due = (0..)
                .zip(&mut self.slots)
                .find_map(|(at, open)| Some((at, open.as_mut().filter(is_due)?)));
            let expected = due.map(|(at, open)| {
                (open.to_repeat, open.lane) = (false, lane);
                self.repeating[at] = Some(lane);
                Repeat {
                    grant: Grant {
                        slot: slot(at),
                        sequence: open.sequence,
                    },
                    parts: open.parts.len(),
                    lane,
                }
            });
            assert_eq!(self.receives.next_repeat(lane, |by| by == lane), expected);
            return;
        }
        // This side's NIC completes only what was posted, so only a repeat under way is confirmed.
        let at = usize::from(what) % SLOTS;
        if self.repeating[at].take().is_some() {
            self.receives.repeated(slot(at));
        }
    }

    fn check_counts(&mut self) {
        let open = self.slots.iter().flatten().filter(|open| !open.is_whole());
        let oldest = open
            .clone()
            .map(|open| open.sequence)
            .min()
            .unwrap_or(self.granted);
        assert_eq!(
            (self.receives.open(), self.receives.delivered()),
            (open.count(), oldest)
        );
        assert_eq!(self.receives.message_range(), (oldest, self.granted));
        assert!(
            oldest >= self.delivered,
            "a delivered receive is open again"
        );
        self.delivered = oldest;
    }

    /// Checks the list of arrived shares that a sender gets when a rail is lost. It must fit a
    /// control frame.
    fn check_loss_report(&self) {
        let received = self.receives.received();
        assert_eq!(received.granted, self.granted);
        for open in self.slots.iter().flatten() {
            for (at, part) in open.parts.iter().enumerate() {
                for share in 0..part.announced.unwrap_or(8) {
                    let has = open.is_whole() || part.arrived.contains_key(&share);
                    assert_eq!(
                        received.has(open.sequence, at as u8, share),
                        has,
                        "share {share} of {open:?}"
                    );
                }
            }
        }
        let message = ControlMessage::Fenced {
            lane: LaneId::default(),
            received,
        };
        let bytes = message.encode();
        assert!(bytes.len() <= MAX_CONTROL_BYTES);
        assert_eq!(ControlMessage::decode(&bytes), Ok(message));
    }
}

fn slot(number: usize) -> Slot {
    Slot::new(number as u16).expect("the model has no more slots")
}

/// A receive in one share, a receive of three parts in several shares, an optional receive, losses,
/// and lies of each kind.
pub fn seeds() -> Seeds {
    let nearly = |w: &mut Writer,
                  slot: u8,
                  (share, shares, full_chunks): (u8, u8, u8),
                  part: u8,
                  bytes: u8| {
        w.u8(2)
            .u8(slot)
            .u8((shares - 1) << 5 | share << 2 | full_chunks)
            .u8(0)
            .u8(part)
            .u8(bytes);
    };
    let mut one = Writer::default();
    one.u8(0).u8(0).u8(100);
    nearly(&mut one, 0, (0, 1, 0), 0, 99);
    one.u8(5).u8(0).u8(5).u8(0);
    let mut group = Writer::default();
    group.u8(0).u8(2).bytes(&[8, 140, 255]).u8(5).u8(0);
    nearly(&mut group, 0, (1, 2, 1), 1, 7);
    nearly(&mut group, 0, (0, 1, 0), 0, 8);
    nearly(&mut group, 0, (0, 2, 0), 1, 7);
    (0..8).for_each(|share| nearly(&mut group, 0, (share, 8, 3), 2, 255));
    group.u8(5).u8(0);
    let mut optional = Writer::default();
    optional.u8(0).u8(8).u8(64).u8(5).u8(0).u8(5).u8(0);
    (0..SLOTS).for_each(|_| _ = optional.u8(0).u8(0).u8(1));
    nearly(&mut optional, 0, (0, 1, 0), 0, 64);
    optional.u8(0).u8(0).u8(1);
    nearly(&mut optional, 0, (0, 1, 0), 0, 1);
    let mut lost = Writer::default();
    lost.u8(0)
        .u8(0x11)
        .bytes(&[8, 8])
        .u8(0)
        .u8(0)
        .u8(8)
        .u8(6)
        .u8(1)
        .u8(7)
        .u8(0)
        .u8(0);
    nearly(&mut lost, 0, (0, 1, 0), 0, 8);
    lost.u8(6).u8(0).u8(7).u8(0).u8(2).u8(7).u8(0x80).u8(0);
    nearly(&mut lost, 0, (0, 1, 0), 1, 8);
    lost.u8(5).u8(0);
    let mut lies = Writer::default();
    lies.u8(0).u8(1).bytes(&[8, 8]);
    for (share, part, bytes) in [
        ((0, 1, 0), 2, 8),
        ((0, 1, 0), 0, 9),
        ((0, 1, 1), 0, 0),
        ((1, 2, 0), 0, 4),
        ((0, 3, 0), 0, 4),
    ] {
        nearly(&mut lies, 0, share, part, bytes);
    }
    lies.u8(1)
        .u32(u32::MAX)
        .u32(u32::MAX)
        .u8(2)
        .u8(0)
        .u8(0)
        .u8(1)
        .u8(0)
        .u8(0)
        .u8(5)
        .u8(2)
        .u8(0)
        .u8(0)
        .u8(12)
        .u8(0)
        .u8(1);
    lies.u16(0xfff).u32(u32::MAX);
    nearly(&mut lies, 0, (0, 2, 0), 0, 4);
    nearly(&mut lies, 0, (0, 1, 0), 1, 8);
    vec![
        ("one", one.into_bytes()),
        ("group", group.into_bytes()),
        ("optional", optional.into_bytes()),
        ("lost", lost.into_bytes()),
        ("lies", lies.into_bytes()),
    ]
}
