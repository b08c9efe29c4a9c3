use super::inbound::{Inbound, Landing};
use super::outbound::{Chunk, Outbound};
use super::*;
use crate::wire::SLOTS;
use crate::wire::ids::Slot;
use crate::wire::stream::{Data, StreamFrame, StreamGrant};
use proptest::prelude::*;
use std::collections::VecDeque;

struct StreamPair {
    inbound: Inbound,
    outbound: Outbound,
    grants: VecDeque<StreamGrant>,
    streams: [VecDeque<Chunk>; 4],
}

fn pair() -> StreamPair {
    let (inbound, outbound, grants, streams) = Default::default();
    StreamPair {
        inbound,
        outbound,
        grants,
        streams,
    }
}

impl StreamPair {
    fn irecv(&mut self, parts: &[(i32, u64)]) -> Option<Slot> {
        let grants = &mut self.grants;
        self.inbound
            .grant(parts.iter().copied(), |grant| grants.push_back(grant))
    }

    fn isend(&mut self, tag: i32, bytes: u64) -> Option<u16> {
        while let Some(grant) = self.grants.pop_front() {
            let Ok(StreamFrame::Grant(read)) =
                StreamFrame::decode(&StreamFrame::Grant(grant).encode())
            else {
                panic!("{grant:?}")
            };
            self.outbound.granted(&read).unwrap();
        }
        let head = self.outbound.find(tag).unwrap()?;
        assert!(bytes <= head.buffer_bytes);
        self.outbound.start(head, bytes)
    }

    /// Gives the next chunk to a stream, which writes it to the kernel immediately.
    fn take(&mut self, stream: usize) -> bool {
        let Some(chunk) = self.outbound.next_chunk() else {
            return false;
        };
        self.streams[stream].push_back(chunk);
        self.outbound.written(&chunk);
        true
    }

    fn land(&mut self, stream: usize) -> Option<Landing> {
        let Chunk { data, .. } = self.streams[stream].pop_front()?;
        let Ok(StreamFrame::Data(read)) = StreamFrame::decode(&StreamFrame::Data(data).encode())
        else {
            panic!("{data:?}")
        };
        let landing = self.inbound.announced(&read).unwrap();
        self.inbound
            .landed(landing.slot, landing.part, landing.bytes);
        Some(landing)
    }

    fn sizes(&mut self, slot: Slot) -> Option<Vec<u64>> {
        let mut sizes = Vec::new();
        self.inbound
            .test(slot, |_, bytes| sizes.push(bytes))
            .unwrap()
            .then_some(sizes)
    }
}

#[test]
fn a_message_arrives_in_chunks_by_any_streams() {
    let mut pair = pair();
    let total = 5 * u64::from(CHUNK_BYTES) + 13;
    let slot = pair.irecv(&[(7, total + 1)]).unwrap();
    assert_eq!(pair.isend(8, 1), None, "another tag");
    let request = pair.isend(7, total).unwrap();
    for stream in [3, 0, 0, 1, 2] {
        assert!(pair.take(stream));
        assert_eq!(pair.outbound.test(request), Ok(None));
    }
    assert!(pair.take(1) && !pair.take(0));
    assert_eq!(pair.outbound.test(request), Ok(Some(total)));
    let mut covered = Vec::new();
    for stream in [2, 1, 1, 0, 0, 3] {
        assert_eq!(pair.sizes(slot), None);
        let Landing { offset, bytes, .. } = pair.land(stream).unwrap();
        covered.push((offset, offset + u64::from(bytes)));
    }
    covered.sort_unstable();
    assert!(
        covered[0].0 == 0
            && covered.windows(2).all(|two| two[0].1 == two[1].0)
            && covered[5].1 == total
    );
    assert_eq!(pair.sizes(slot), Some(vec![total]));
}

#[test]
fn an_empty_message_is_a_message() {
    let mut pair = pair();
    let slot = pair.irecv(&[(0, 0), (0, 8)]).unwrap();
    for bytes in [0, 0] {
        let request = pair.isend(0, bytes).unwrap();
        assert!(pair.take(0));
        assert_eq!(pair.outbound.test(request), Ok(Some(0)));
    }
    assert_eq!(pair.sizes(slot), None);
    pair.land(0).unwrap();
    pair.land(0).unwrap();
    assert_eq!(pair.sizes(slot), Some(vec![0, 0]));
}

#[test]
fn an_empty_message_is_announced_once() {
    let mut pair = pair();
    let slot = pair.irecv(&[(0, 8)]).unwrap();
    let empty = Data {
        sequence: 0,
        part: 0,
        offset: 0,
        bytes: 0,
        total: 0,
    };
    assert!(pair.inbound.announced(&empty).is_ok());
    assert_eq!(
        pair.inbound.announced(&empty),
        Err(StreamViolation::NotGranted {
            sequence: 0,
            part: 0
        })
    );
    assert!(pair.inbound.landed(slot, 0, 0) && !pair.inbound.landed(slot, 0, 0));
}

#[test]
fn a_message_of_more_than_4_gib_is_counted_whole() {
    let mut pair = pair();
    let total = (9 << 30) + 1;
    let slot = pair.irecv(&[(0, total)]).unwrap();
    pair.isend(0, total).unwrap();
    while pair.take(0) {
        pair.land(0).unwrap();
    }
    assert_eq!(pair.sizes(slot), Some(vec![total]));
}

/// The first chunk of a message of 300 bytes.
const HONEST: Data = Data {
    sequence: 0,
    part: 0,
    offset: 0,
    bytes: 128,
    total: 300,
};

fn not_granted(sequence: u64, part: u8) -> Result<Landing, StreamViolation> {
    Err(StreamViolation::NotGranted { sequence, part })
}

#[test]
fn data_without_a_grant_or_beyond_its_buffer_is_refused() {
    let mut pair = pair();
    let slot = pair.irecv(&[(0, 1000), (1, 8)]).unwrap();
    let inbound = &mut pair.inbound;
    for (sequence, part) in [(1, 0), (32, 0), (0, 2), (0, 8)] {
        assert_eq!(
            inbound.announced(&Data {
                sequence,
                part,
                ..HONEST
            }),
            not_granted(sequence, part)
        );
    }
    assert_eq!(
        inbound.announced(&Data {
            total: 1001,
            ..HONEST
        }),
        Err(StreamViolation::Overrun {
            total: 1001,
            buffer_bytes: 1000
        })
    );
    assert!(!inbound.landed(slot, 0, 0), "nothing was announced");
    assert!(inbound.announced(&HONEST).is_ok());
}

#[test]
fn a_message_has_one_size_and_no_more_bytes() {
    let mut pair = pair();
    let slot = pair.irecv(&[(0, 1000), (1, 8)]).unwrap();
    let inbound = &mut pair.inbound;
    assert_eq!(
        inbound.announced(&HONEST),
        Ok(Landing {
            slot,
            part: 0,
            offset: 0,
            bytes: 128
        })
    );
    assert_eq!(
        inbound.announced(&Data {
            total: 301,
            ..HONEST
        }),
        Err(StreamViolation::Total {
            before: 300,
            now: 301
        })
    );
    // Repeated bytes count towards the message's size, so later bytes exceed it. The receive is not
    // done before all announced bytes have landed.
    assert!(inbound.announced(&HONEST).is_ok());
    assert_eq!(
        inbound.announced(&HONEST),
        Err(StreamViolation::Surplus {
            announced: 384,
            total: 300
        })
    );
    assert!(
        inbound
            .announced(&Data {
                offset: 256,
                bytes: 44,
                ..HONEST
            })
            .is_ok()
    );
    assert!(!inbound.landed(slot, 0, 256) && inbound.landed(slot, 0, 44));
    assert_eq!(inbound.announced(&HONEST), not_granted(0, 0));
    assert_eq!(
        inbound.announced(&Data {
            bytes: 0,
            total: 0,
            ..HONEST
        }),
        not_granted(0, 0)
    );
}

#[test]
fn a_lying_receiver_is_caught() {
    let grant = StreamGrant {
        sequence: 0,
        part: 0,
        parts: 2,
        tag: 0,
        buffer_bytes: 8,
    };
    let order = |sequence, part| Err(StreamViolation::GrantOrder { sequence, part });
    let mut outbound = Outbound::default();
    assert_eq!(
        outbound.granted(&StreamGrant {
            sequence: 1,
            ..grant
        }),
        order(1, 0)
    );
    assert_eq!(
        outbound.granted(&StreamGrant { part: 1, ..grant }),
        order(0, 1)
    );
    outbound.granted(&grant).unwrap();
    assert_eq!(outbound.granted(&grant), order(0, 0));
    assert_eq!(outbound.find(0), Ok(None), "half a group");
    outbound
        .granted(&StreamGrant {
            part: 1,
            parts: 3,
            ..grant
        })
        .unwrap();
    assert_eq!(outbound.find(0), Err(cts::Violation::Parts(3)));
    let mut outbound = Outbound::default();
    let alone = |sequence| StreamGrant {
        sequence,
        parts: 1,
        ..grant
    };
    for sequence in 0..SLOTS as u64 {
        outbound.granted(&alone(sequence)).unwrap();
    }
    assert_eq!(
        outbound.granted(&alone(SLOTS as u64)),
        Err(StreamViolation::GrantAhead(SLOTS as u64))
    );
    let head = outbound.find(0).unwrap().unwrap();
    outbound.start(head, 8).unwrap();
    outbound.granted(&alone(SLOTS as u64)).unwrap();
}

proptest! {
    /// Posts groups of receives with any tags and sizes. Receives, sends, and the chunks of four
    /// streams are mixed in any order. In the end, every receive has reported the sizes that were
    /// sent, as many bytes have landed as were sent, and no request remains.
    #[test]
    fn everything_arrives_once_in_any_order(
        groups in prop::collection::vec(
            prop::collection::vec((0..3i32, 0..3u64 * u64::from(CHUNK_BYTES)), 1..=8), 1..80),
        steps in prop::collection::vec((0..4u8, 0..4usize), 0..400),
    ) {
        let mut pair = pair();
        let mut wanted: VecDeque<_> = groups.clone().into();
        let mut to_send: VecDeque<Vec<(i32, u64)>> = groups.clone().into();
        let mut running: Vec<(u16, u64)> = Vec::new();
        let mut waiting: Vec<(Slot, Vec<u64>)> = Vec::new();
        let mut landed = 0;
        let drain = (0..).map(|at| (at as u8 % 4, at / 4 % 4));
        for (step, stream) in steps.into_iter().chain(drain) {
            match step {
                0 => if let Some(parts) = wanted.front().cloned()
                    && let Some(slot) = pair.irecv(&parts) {
                    wanted.pop_front();
                    let sizes = parts.iter().map(|(_, bytes)| *bytes).collect::<Vec<_>>();
                    waiting.push((slot, sizes));
                },
                1 => if let Some(group) = to_send.front_mut() {
                    // Sends with equal tags must be in the order of the parts. Sends with different
                    // tags may be in any order.
                    let at = group.iter().position(|(tag, _)| *tag as usize == stream % 3).unwrap_or(0);
                    let (tag, bytes) = group[at];
                    if let Some(request) = pair.isend(tag, bytes) {
                        running.push((request, bytes));
                        group.remove(at);
                        if group.is_empty() { to_send.pop_front(); }
                    }
                },
                2 => _ = pair.take(stream),
                _ => if let Some(landing) = pair.land(stream) { landed += u64::from(landing.bytes) },
            }
            running.retain(|(request, bytes)| {
                let done = pair.outbound.test(*request).unwrap();
                assert!(done.is_none() || done == Some(*bytes));
                done.is_none()
            });
            waiting.retain(|(slot, sizes)| {
                let done = pair.sizes(*slot);
                assert!(done.is_none() || done.as_ref() == Some(sizes));
                done.is_none()
            });
            if to_send.is_empty() && running.is_empty() && waiting.is_empty() && pair.inbound.open() == 0 { break; }
        }
        let all: u64 = groups.iter().flatten().map(|(_, bytes)| bytes).sum();
        prop_assert_eq!(landed, all);
        prop_assert!(!pair.outbound.is_running() && !pair.outbound.has_chunks());
    }
}
