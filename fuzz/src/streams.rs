//! TCP streams that carry data. The peer lies in its frames to a receiver and to a sender.
//!
//! For the receiver, the model keeps the granted, announced and arrived bytes of each part of a
//! receive, and knows which frames are allowed. To the sender, the peer grants any receives. Each
//! chunk must be within its message, and no send may complete before all its bytes are written.

use crate::memory;
use crate::tape::Tape;
use crate::target::Seeds;
use proto::flow::streams::inbound::Inbound;
use proto::flow::streams::outbound::Outbound;
use proto::flow::streams::{CHUNK_BYTES, StreamViolation};
use proto::wire::codec::Writer;
use proto::wire::cts::MAX_RECEIVE_BYTES;
use proto::wire::ids::Slot;
use proto::wire::stream::{
    Data, FRAME_BYTES, LINE_BYTES, MAX_CHUNK_BYTES, StreamFrame, StreamGrant,
};
use proto::wire::{PARTS, SLOTS};

/// Runs the input as a tape of frames and calls. The first byte selects the side.
pub fn check(data: &[u8]) -> bool {
    let mut tape = Tape::new(data);
    if tape.u8() & 1 == 0 {
        receive(&mut tape)
    } else {
        send(&mut tape)
    }
    true
}

#[derive(Debug, Clone, Copy, Default)]
struct Part {
    buffer_bytes: u64,
    /// Size of the message; `None` before the first chunk was announced.
    total: Option<u64>,
    announced: u64,
    landed: u64,
    is_whole: bool,
}

#[derive(Debug, Clone)]
struct Open {
    sequence: u64,
    parts: Vec<Part>,
}

impl Open {
    fn is_whole(&self) -> bool {
        self.parts.iter().all(|part| part.is_whole)
    }
}

#[derive(Default)]
struct Receiver {
    inbound: Inbound,
    slots: Vec<Option<Open>>,
    granted: u64,
    /// Announced chunks that have not fully arrived: slot, part and the number of missing bytes.
    coming: Vec<(Slot, u8, u32)>,
}

fn receive(tape: &mut Tape<'_>) {
    let mut model = Receiver {
        slots: vec![None; SLOTS],
        ..Receiver::default()
    };
    while let Some(step) = tape.step() {
        match step % 6 {
            0 => model.grant(tape),
            1 => model.receive(tape.bytes(FRAME_BYTES)),
            2 | 3 => model.receive_nearly(tape),
            4 => model.lands(tape),
            _ => model.test(tape.below(SLOTS)),
        }
        let open = model
            .slots
            .iter()
            .flatten()
            .filter(|open| !open.is_whole())
            .count();
        assert_eq!(model.inbound.open(), open);
    }
}

impl Receiver {
    fn grant(&mut self, tape: &mut Tape<'_>) {
        let count = 1 + tape.below(PARTS);
        let buffer_sizes: Vec<u64> = (0..count)
            .map(|_| u64::from(tape.u32()) << (tape.u8() % 9))
            .collect();
        let place = Slot::of(self.granted).index();
        let mut told = Vec::new();
        let granted = self.inbound.grant(
            buffer_sizes.iter().map(|buffer_bytes| (7, *buffer_bytes)),
            |grant| told.push(grant),
        );
        assert_eq!(granted.is_some(), self.slots[place].is_none());
        if granted.is_none() {
            assert!(told.is_empty());
            return;
        }
        for (part, (grant, buffer_bytes)) in (0..).zip(told.iter().zip(&buffer_sizes)) {
            let expected = StreamGrant {
                sequence: self.granted,
                part,
                parts: count as u8,
                tag: 7,
                buffer_bytes: *buffer_bytes,
            };
            assert_eq!(
                (
                    *grant,
                    StreamFrame::decode(&StreamFrame::Grant(*grant).encode())
                ),
                (expected, Ok(StreamFrame::Grant(expected)))
            );
        }
        let parts = buffer_sizes
            .iter()
            .map(|buffer_bytes| Part {
                buffer_bytes: *buffer_bytes,
                ..Part::default()
            })
            .collect();
        self.slots[place] = Some(Open {
            sequence: self.granted,
            parts,
        });
        self.granted += 1;
    }

    fn receive(&mut self, bytes: &[u8]) {
        let Some(frame) = bytes.first_chunk::<FRAME_BYTES>() else {
            return;
        };
        let Ok(read) = StreamFrame::decode(frame) else {
            return;
        };
        assert_eq!(read.encode(), *frame, "a frame has only one encoding");
        if let StreamFrame::Data(data) = read {
            self.announced(data);
        }
    }

    /// Delivers a frame as an honest sender would, or one close to it.
    fn receive_nearly(&mut self, tape: &mut Tape<'_>) {
        let sequence = self.granted.wrapping_sub(1 + tape.below(SLOTS + 2) as u64);
        let part = tape.below(PARTS) as u8;
        let of_slot = self.slots[Slot::of(sequence).index()].as_ref();
        let known = of_slot
            .and_then(|open| open.parts.get(usize::from(part)))
            .copied()
            .unwrap_or_default();
        let total = known
            .total
            .unwrap_or(known.buffer_bytes)
            .wrapping_add_signed(i64::from(tape.u8() as i8 >> 6));
        let offset = known.announced / LINE_BYTES * LINE_BYTES;
        let left = total.saturating_sub(offset).min(u64::from(MAX_CHUNK_BYTES));
        let bytes = left.saturating_sub(u64::from(tape.u16() >> (tape.u8() % 16))) as u32;
        let frame = StreamFrame::Data(Data {
            sequence,
            part,
            offset,
            bytes,
            total,
        })
        .encode();
        self.receive(&frame);
    }

    fn announced(&mut self, data: Data) {
        let Data {
            sequence,
            part,
            offset,
            bytes,
            total,
        } = data;
        assert!(
            offset + u64::from(bytes) <= total
                && total <= MAX_RECEIVE_BYTES
                && offset.is_multiple_of(LINE_BYTES)
        );
        let said = memory::bounded(0, || self.inbound.announced(&data));
        let open = self.slots[Slot::of(sequence).index()]
            .as_mut()
            .filter(|open| open.sequence == sequence);
        let place = open
            .and_then(|open| open.parts.get_mut(usize::from(part)))
            .filter(|place| !place.is_whole);
        let place = place.filter(|place| bytes > 0 || place.total.is_none());
        let Some(place) = place else {
            assert_eq!(said, Err(StreamViolation::NotGranted { sequence, part }));
            return;
        };
        let announced = place.announced + u64::from(bytes);
        let expected = match place.total {
            None if total > place.buffer_bytes => Err(StreamViolation::Overrun {
                total,
                buffer_bytes: place.buffer_bytes,
            }),
            Some(before) if before != total => Err(StreamViolation::Total { before, now: total }),
            _ if announced > total => Err(StreamViolation::Surplus { announced, total }),
            _ => Ok(()),
        };
        assert_eq!(said.map(|_| ()), expected);
        if let Ok(landing) = said {
            assert_eq!(
                (landing.part, landing.offset, landing.bytes),
                (part, offset, bytes)
            );
            assert!(
                offset + u64::from(bytes) <= place.buffer_bytes,
                "beyond the buffer"
            );
            (place.total, place.announced) = (Some(total), announced);
            self.coming.push((landing.slot, part, bytes));
        }
    }

    fn lands(&mut self, tape: &mut Tape<'_>) {
        if self.coming.is_empty() {
            return;
        }
        let at = tape.below(self.coming.len().min(256));
        let (slot, part, left) = self.coming[at];
        let bytes = if tape.u8() & 1 == 0 {
            left
        } else {
            left.min(tape.u32())
        };
        self.coming[at].2 -= bytes;
        if self.coming[at].2 == 0 {
            self.coming.swap_remove(at);
        }
        let Some(open) = &mut self.slots[slot.index()] else {
            panic!("bytes of a finished receive")
        };
        let place = &mut open.parts[usize::from(part)];
        let was_whole = place.is_whole;
        place.landed += u64::from(bytes);
        place.is_whole = place.total.is_some_and(|total| place.landed >= total);
        let is_last = place.is_whole && !was_whole;
        assert_eq!(self.inbound.landed(slot, part, bytes), is_last);
    }

    fn test(&mut self, at: usize) {
        let slot = Slot::new(at as u16).expect("a slot");
        let mut sizes = Vec::new();
        let said = self.inbound.test(slot, |part, bytes| {
            assert_eq!(part, sizes.len());
            sizes.push(bytes);
        });
        let Some(open) = &self.slots[at] else {
            assert!(said.is_err());
            return;
        };
        assert_eq!(said, Ok(open.is_whole()));
        if open.is_whole() {
            assert_eq!(
                sizes,
                open.parts
                    .iter()
                    .map(|part| part.total.unwrap_or_default())
                    .collect::<Vec<_>>()
            );
            self.slots[at] = None;
        }
    }
}

fn send(tape: &mut Tape<'_>) {
    let mut outbound = Outbound::default();
    let mut taken = Vec::new();
    let mut honest = StreamGrant {
        sequence: 0,
        part: 0,
        parts: 1,
        tag: 0,
        buffer_bytes: 0,
    };
    while let Some(step) = tape.step() {
        match step % 5 {
            0 => {
                if let Some(frame) = tape.bytes(FRAME_BYTES).first_chunk::<FRAME_BYTES>()
                    && let Ok(StreamFrame::Grant(grant)) = StreamFrame::decode(frame)
                    && outbound.granted(&grant).is_ok()
                {
                    assert_eq!((grant.sequence, grant.part), (honest.sequence, honest.part));
                    honest = after(&grant);
                }
            }
            1 => {
                let parts = if honest.part > 0 {
                    honest.parts
                } else {
                    1 + tape.below(PARTS) as u8
                };
                let grant = StreamGrant {
                    parts,
                    tag: i32::from(tape.u8() & 3),
                    buffer_bytes: u64::from(tape.u32()),
                    ..honest
                };
                match outbound.granted(&grant) {
                    Ok(()) => honest = after(&grant),
                    Err(violation) => assert!(
                        matches!(violation, StreamViolation::GrantAhead(_)),
                        "{violation}"
                    ),
                }
            }
            2 => {
                let tag = i32::from(tape.u8() & 3);
                if let Ok(Some(head)) = outbound.find(tag)
                    && outbound.has_room()
                {
                    let bytes = head.buffer_bytes.saturating_sub(u64::from(tape.u16()));
                    let request = outbound.start(head, bytes).expect("there was room");
                    assert_eq!(outbound.test(request), Ok(None));
                }
            }
            3 => {
                if let Some(chunk) = outbound.next_chunk() {
                    let Data {
                        offset,
                        bytes,
                        total,
                        ..
                    } = chunk.data;
                    assert!(offset + u64::from(bytes) <= total && bytes <= CHUNK_BYTES);
                    assert_eq!(chunk.is_last, offset + u64::from(bytes) == total);
                    assert_eq!(
                        StreamFrame::decode(&StreamFrame::Data(chunk.data).encode()),
                        Ok(StreamFrame::Data(chunk.data))
                    );
                    taken.push(chunk);
                }
            }
            _ => {
                if taken.is_empty() {
                    continue;
                }
                let chunk = taken.swap_remove(tape.below(taken.len().min(256)));
                let done = outbound.written(&chunk);
                let is_under_way = taken.iter().any(|other| other.request == chunk.request);
                if let Some(bytes) = done {
                    assert!(!is_under_way && bytes == chunk.data.total);
                    assert_eq!(outbound.test(chunk.request), Ok(Some(bytes)));
                } else {
                    assert_eq!(outbound.test(chunk.request), Ok(None));
                }
            }
        }
    }
}

fn after(grant: &StreamGrant) -> StreamGrant {
    match grant.part + 1 < grant.parts {
        true => StreamGrant {
            part: grant.part + 1,
            ..*grant
        },
        false => StreamGrant {
            sequence: grant.sequence + 1,
            part: 0,
            ..*grant
        },
    }
}

/// A message in two chunks, and a case with false frames, for the receiver and for the sender.
pub fn seeds() -> Seeds {
    let data = |offset: u64, bytes: u32| {
        StreamFrame::Data(Data {
            sequence: 0,
            part: 0,
            offset,
            bytes,
            total: 300,
        })
        .encode()
    };
    let mut received = Writer::default();
    received.u8(0).u8(0).u8(0).u32(300).u8(0);
    received
        .u8(1)
        .bytes(&data(256, 44))
        .u8(4)
        .u8(0)
        .u8(0)
        .u8(1)
        .bytes(&data(0, 256))
        .u8(4)
        .u8(0)
        .u8(0)
        .u8(5)
        .u8(0);
    let mut lied_to = Writer::default();
    lied_to
        .u8(0)
        .u8(0)
        .u8(0)
        .u32(200)
        .u8(0)
        .u8(1)
        .bytes(&data(0, 128))
        .u8(2)
        .bytes(&[0; 6])
        .u8(5)
        .u8(0);
    let grant = StreamFrame::Grant(StreamGrant {
        sequence: 0,
        part: 0,
        parts: 1,
        tag: 2,
        buffer_bytes: 200_000,
    })
    .encode();
    let mut sent = Writer::default();
    sent.u8(1)
        .u8(0)
        .bytes(&grant)
        .u8(2)
        .u8(2)
        .u16(0)
        .u8(3)
        .u8(3)
        .u8(4)
        .u8(1)
        .u8(4)
        .u8(0);
    let mut granted = Writer::default();
    granted.u8(1);
    for _ in 0..34 {
        granted.u8(1).u8(0).u8(0).u32(8);
    }
    vec![
        ("received", received.into_bytes()),
        ("lied-to", lied_to.into_bytes()),
        ("sent", sent.into_bytes()),
        ("granted-ahead", granted.into_bytes()),
    ]
}
