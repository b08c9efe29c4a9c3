use super::*;
use crate::flow::plan::{LaneLoad, divide};
use crate::wire::control::OpenReceive;
use crate::wire::cts::Epoch;
use crate::wire::cts::{Entry, RING_WORDS, Terms, entry_word};
use crate::wire::ids::lane;
use std::sync::atomic::Ordering;

fn ring() -> Vec<AtomicU64> {
    (0..RING_WORDS).map(|_| AtomicU64::new(0)).collect()
}

fn grant(ring: &[AtomicU64], sequence: u64, tags: &[i32]) {
    for (part, &tag) in tags.iter().enumerate() {
        let addr = 0x1000 * (part as u64 + 1);
        let parts = tags.len() as u8;
        let part = part as u8;
        put(
            ring,
            sequence,
            &Terms {
                addr,
                bytes: 1 << 30,
                tag,
                parts,
                part,
                epoch: Epoch::default(),
            },
        );
    }
}

fn put(ring: &[AtomicU64], sequence: u64, terms: &Terms) {
    let at = entry_word(sequence, usize::from(terms.part));
    for (cell, word) in ring[at..]
        .iter()
        .zip(Entry::new(terms, &[1; 4], sequence).words())
    {
        cell.store(*word, Ordering::Relaxed);
    }
}

fn route(lane: LaneId) -> Route {
    let number = lane.index() as u32;
    Route {
        queue: number as u8 + 4,
        lkey: 20 + number,
        rkey: 30 + number,
        timed: number == 1,
    }
}

/// Starts a send without posting any of its writes.
fn start(
    sends: &mut Sends,
    head: &Head,
    local_addr: u64,
    shares: &[Share],
    chunk_bytes: u64,
) -> Option<u16> {
    let request = sends.start(head, (local_addr, 9), shares)?;
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
    assert_eq!(
        (head.addr, head.buffer_bytes),
        (0x1000 * (u64::from(head.part) + 1), 1 << 30)
    );
    sends.start_single_write(head, (0, 9), 0, lane(0)).unwrap();
    Some((head.sequence, head.part))
}

#[test]
fn tags_choose_within_a_group_and_equal_tags_match_in_order() {
    let mut sends = <Sends>::default();
    let ring = ring();
    assert_eq!(take(&mut sends, &ring, 7), None);
    grant(&ring, 0, &[7, 9, 7]);
    grant(&ring, 1, &[7]);
    assert_eq!(take(&mut sends, &ring, 9), Some((0, 1)));
    assert_eq!(take(&mut sends, &ring, 8), None);
    assert_eq!(take(&mut sends, &ring, 7), Some((0, 0)));
    assert_eq!(
        take(&mut sends, &ring, 9),
        None,
        "the next group is not open yet"
    );
    assert_eq!(take(&mut sends, &ring, 7), Some((0, 2)));
    assert_eq!(take(&mut sends, &ring, 7), Some((1, 0)));
    assert_eq!(take(&mut sends, &ring, 7), None);
}

#[test]
fn a_group_is_seen_only_when_all_of_it_has_arrived() {
    let mut sends = <Sends>::default();
    let ring = ring();
    grant(&ring, 0, &[1, 2, 3]);
    let hole = entry_word(0, 2) + 4;
    let word = ring[hole].swap(0, Ordering::Relaxed);
    assert_eq!(take(&mut sends, &ring, 1), None);
    ring[hole].store(word, Ordering::Relaxed);
    assert_eq!(take(&mut sends, &ring, 1), Some((0, 0)));
}

#[test]
fn an_invalid_entry_in_the_ring_is_named() {
    let mut sends = <Sends>::default();
    let ring = ring();
    grant(&ring, 0, &[1, 2]);
    put(
        &ring,
        0,
        &Terms {
            parts: 3,
            part: 1,
            tag: 2,
            ..Terms::default()
        },
    );
    assert_eq!(find(&mut sends, &ring, 1), Err(Violation::Parts(3)));
}

#[test]
fn a_send_is_cut_into_chunks_and_done_when_every_share_is_confirmed() {
    let mut sends = <Sends>::default();
    let ring = ring();
    grant(&ring, 0, &[0]);
    let bytes = 40_000;
    let head = find(&mut sends, &ring, 0).unwrap().unwrap();
    let shares = divide(
        bytes,
        &[LaneLoad {
            bytes_per_us: 1e4,
            backlog_bytes: 0,
        }; 2],
        4096,
        0.0,
    );
    let request = start(&mut sends, &head, 0x5000, shares.as_slice(), 8192).unwrap();
    let mut total = 0;
    for share in 0..2 {
        assert_eq!(sends.shares_to_post(request), 2);
        let mut full_chunks = 0;
        loop {
            let write = sends.next_write(request, share, 8192).unwrap();
            let by = lane(usize::from(share));
            assert_eq!((write.lane, write.route), (by, route(by)));
            assert_eq!(write.local_addr - 0x5000, write.remote_addr - 0x1000);
            assert_eq!(write.local_addr - 0x5000, total);
            total += u64::from(write.bytes);
            sends.posted(request, share, &write);
            match write.immediate {
                Some(immediate) => {
                    assert_eq!(
                        (immediate.full_chunks, immediate.shares, immediate.slot),
                        (full_chunks, 2, Slot::of(0))
                    );
                    assert_eq!(immediate.share, share);
                    break;
                }
                None => full_chunks += 1,
            }
        }
        assert_eq!(full_chunks, 2);
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
fn immediately_posted_shares_need_no_later_check() {
    let mut sends = <Sends>::default();
    let head = Head {
        sequence: 70,
        part: 2,
        addr: 0,
        buffer_bytes: 0,
        epoch: Epoch::default(),
        at: 0,
    };
    let share = |number: u8| Share {
        lane: lane(number.into()),
        offset: u64::from(number) * 100,
        bytes: 100,
    };
    let request = sends.start(&head, (0, 9), &[share(0), share(1)]).unwrap();
    let immediate = sends.post_share(request, 0, &share(0)).unwrap();
    assert_eq!(
        (
            immediate.slot,
            immediate.part,
            immediate.shares,
            immediate.full_chunks
        ),
        (Slot::of(70), 2, 2, 0)
    );
    assert_eq!(
        (
            sends.shares_to_post(request),
            sends.next_write(request, 0, 4096)
        ),
        (2, None)
    );
    sends.keep_share(request, 1, &share(1), route(lane(1)), 4096);
    let write = sends.next_write(request, 1, 4096).unwrap();
    assert_eq!((write.local_addr, write.bytes), (100, 100));
    sends.posted(request, 1, &write);
    assert_eq!(sends.shares_to_post(request), 0);
    assert_eq!(
        (sends.confirmed(request, 1), sends.test(request)),
        (Ok(100), Ok(None))
    );
    assert_eq!(
        (sends.confirmed(request, 0), sends.test(request)),
        (Ok(100), Ok(Some(200)))
    );
    assert_eq!(sends.post_share(request, 0, &share(0)), None);
}

#[test]
fn all_requests_can_run_and_be_reused() {
    let mut sends = <Sends>::default();
    let head = Head {
        sequence: 3,
        part: 0,
        addr: 0,
        buffer_bytes: 0,
        epoch: Epoch::default(),
        at: 0,
    };
    let shares = [Share {
        lane: lane(0),
        offset: 0,
        bytes: 0,
    }];
    let start = |sends: &mut Sends| start(sends, &head, 0, &shares, 4096);
    let running: Vec<u16> = (0..REQUESTS).map(|_| start(&mut sends).unwrap()).collect();
    assert!(!sends.has_room() && start(&mut sends).is_none());
    assert!(sends.start_single_write(head, (0, 9), 0, lane(0)).is_none());
    let write = sends.next_write(running[5], 0, 4096).unwrap();
    assert_eq!((write.bytes, write.immediate.unwrap().full_chunks), (0, 0));
    sends.posted(running[5], 0, &write);
    sends.delivered(3);
    assert_eq!(sends.test(running[5]), Ok(None));
    sends.delivered(4);
    assert!(sends.test(running[5]).unwrap().is_some());
    assert_eq!(
        sends.test(running[6]),
        Ok(None),
        "no write of it was posted"
    );
    assert!(sends.has_room());
}

/// Sends after the loss of lane 1. The peer has reported the shares that had arrived.
struct AfterLoss {
    sends: Sends,
    ring: Vec<AtomicU64>,
    /// One share on lane 1, which is missing.
    whole: u16,
    /// One share on lane 1, which had arrived.
    arrived: u16,
    /// One share on lane 0.
    unhurt: u16,
    /// Shares on lanes 0, 1 and 2. The share on lane 1 had arrived.
    cut: u16,
    /// A share on lane 0, which is confirmed, and one on lane 1. Only the first chunk of the share
    /// on lane 1 was posted, and the share is missing.
    half: u16,
}

impl AfterLoss {
    fn new() -> Self {
        let mut sends = <Sends>::default();
        let head = |sequence| Head {
            sequence,
            part: 0,
            addr: 0x1000,
            buffer_bytes: 0,
            epoch: Epoch::default(),
            at: 0,
        };
        let mut small = |sequence, on| {
            let started = sends.start_single_write(head(sequence), (0x5000, 9), 64, lane(on));
            started.unwrap().0
        };
        let whole = small(0, 1);
        let arrived = small(1, 1);
        let unhurt = small(2, 0);
        let share = |number: u8| Share {
            lane: lane(number.into()),
            offset: u64::from(number) * 10_000,
            bytes: 10_000,
        };
        let cut = sends
            .start(&head(3), (0x9000, 8), &[share(0), share(1), share(2)])
            .unwrap();
        for number in 0..3 {
            sends.post_share(cut, number, &share(number)).unwrap();
        }
        let half = sends
            .start(&head(4), (0x9000, 8), &[share(0), share(1)])
            .unwrap();
        sends.post_share(half, 0, &share(0)).unwrap();
        sends.keep_share(half, 1, &share(1), route(lane(1)), 4096);
        let lead = sends.next_write(half, 1, 4096).unwrap();
        sends.posted(half, 1, &lead);
        sends.confirmed(half, 0).unwrap();

        let open = |sequence, first| OpenReceive {
            sequence,
            shares: [first, 0, 0, 0, 0, 0, 0, 0],
        };
        sends.lost(
            lane(1),
            &Received {
                granted: 5,
                open: vec![open(0, 0), open(3, 0b010), open(4, 0b01)],
            },
        );
        let ring = ring();
        (0..5).for_each(|sequence| grant(&ring, sequence, &[0]));
        Self {
            sends,
            ring,
            whole,
            arrived,
            unhurt,
            cut,
            half,
        }
    }

    /// Resends the missing shares on lane 2, while lanes 0 and 2 are open.
    fn resend(&mut self) {
        let local_route = |_: &LostShare| Some(on_lane_2());
        self.sends.resend(&self.ring, 0b101, local_route);
    }
}

fn on_lane_2() -> LocalRoute {
    LocalRoute {
        lane: lane(2),
        queue: 6,
        lkey: 22,
    }
}

#[test]
fn only_shares_that_had_not_arrived_on_a_lost_lane_wait() {
    let mut after = AfterLoss::new();
    let sends = &mut after.sends;
    assert_eq!(sends.test(after.arrived), Ok(Some(64)));
    assert_eq!(
        sends.waiting().collect::<Vec<_>>(),
        [after.whole, after.half]
    );
    for request in [after.whole, after.unhurt, after.cut] {
        assert_eq!(sends.test(request), Ok(None));
    }
    assert_eq!(sends.shares_to_post(after.cut), 0, "the share had arrived");
}

#[test]
fn shares_missing_from_a_lost_lane_wait_for_an_open_lane() {
    let mut after = AfterLoss::new();
    let sends = &mut after.sends;
    sends.resend(&after.ring, 0, |_| panic!("no lane is open"));
    assert!(sends.has_lost_shares());
    assert_eq!(
        sends.next_write(after.whole, 0, 4096),
        None,
        "no other lane is available"
    );
    let mut asked = Vec::new();
    sends.resend(&after.ring, 0b101, |share| {
        asked.push((share.bytes, share.registration_id));
        assert_eq!(
            (share.lane(lane(2)), share.lane(lane(1))),
            (lane(2), lane(0))
        );
        Some(on_lane_2())
    });
    assert!(!sends.has_lost_shares());
    asked.sort_unstable();
    assert_eq!(asked, [(64, 9), (10_000, 8)]);
}

#[test]
fn shares_missing_from_a_lost_lane_are_resent_on_another() {
    let mut after = AfterLoss::new();
    after.resend();
    let sends = &mut after.sends;
    let by_other = Route {
        queue: 6,
        lkey: 22,
        rkey: 1,
        timed: false,
    };
    let again = sends.next_write(after.whole, 0, 4096).unwrap();
    assert_eq!(
        (again.lane, again.route, again.local_addr, again.remote_addr),
        (lane(2), by_other, 0x5000, 0x1000)
    );
    assert_eq!((again.bytes, again.immediate.unwrap().shares), (64, 1));
    let first = sends.next_write(after.half, 1, 4096).unwrap();
    assert_eq!(
        (first.local_addr, first.remote_addr, first.bytes),
        (0x9000 + 10_000, 0x1000 + 10_000, 4096)
    );
    let mut full_chunks = 0;
    while let Some(write) = sends.next_write(after.half, 1, 4096) {
        sends.posted(after.half, 1, &write);
        match write.immediate {
            Some(immediate) => {
                assert_eq!(
                    (immediate.full_chunks, immediate.share, immediate.shares),
                    (full_chunks, 1, 2)
                );
            }
            None => full_chunks += 1,
        }
    }
}

#[test]
fn sends_with_resent_shares_end_when_these_are_confirmed() {
    let mut after = AfterLoss::new();
    after.resend();
    let sends = &mut after.sends;
    for (request, share) in [(after.whole, 0), (after.half, 1)] {
        while let Some(write) = sends.next_write(request, share, 4096) {
            sends.posted(request, share, &write);
        }
    }
    assert_eq!(
        (sends.confirmed(after.half, 1), sends.test(after.half)),
        (Ok(10_000), Ok(Some(20_000)))
    );
    assert_eq!(
        (sends.confirmed(after.whole, 0), sends.test(after.whole)),
        (Ok(64), Ok(Some(64)))
    );
    for (number, bytes) in [(0, None), (2, Some(30_000))] {
        sends.confirmed(after.cut, number).unwrap();
        assert_eq!(sends.test(after.cut), Ok(bytes));
    }
}

#[test]
fn a_lost_share_waits_for_an_entry_with_a_key_for_an_open_lane() {
    let mut sends = <Sends>::default();
    let ring = ring();
    grant(&ring, 0, &[0]);
    let head = find(&mut sends, &ring, 0).unwrap().unwrap();
    let (request, _) = sends
        .start_single_write(head, (0x5000, 9), 64, lane(1))
        .unwrap();
    sends.lost(
        lane(1),
        &Received {
            granted: 1,
            open: vec![],
        },
    );
    assert_eq!(sends.test(request), Ok(Some(64)), "it had arrived");
    grant(&ring, 1, &[0]);
    let head = find(&mut sends, &ring, 0).unwrap().unwrap();
    let (request, _) = sends
        .start_single_write(head, (0x5000, 9), 64, lane(1))
        .unwrap();
    sends.lost(
        lane(1),
        &Received {
            granted: 1,
            open: vec![],
        },
    );
    let epoch = Epoch::default().next();
    assert!(sends.learn_epoch(lane(1), epoch) && !sends.learn_epoch(lane(1), epoch));
    assert_eq!(
        (sends.lanes_with_keys(0b11, &head), sends.epoch_of(lane(1))),
        (0b01, epoch)
    );
    sends.resend(&ring, 0b10, |_| {
        panic!("the entry has an old key for the lane")
    });
    let at = entry_word(1, 0) + 7;
    let digest = ring[at].swap(0, Ordering::Relaxed);
    sends.resend(&ring, 0b11, |_| panic!("the entry is being rewritten"));
    ring[at].store(digest, Ordering::Relaxed);
    assert!(sends.has_lost_shares());
    put(
        &ring,
        1,
        &Terms {
            addr: 0x1000,
            bytes: 64,
            tag: 0,
            parts: 1,
            part: 0,
            epoch,
        },
    );
    sends.resend(&ring, 0b10, |share| {
        Some(LocalRoute {
            lane: share.lane(lane(0)),
            queue: 0,
            lkey: 0,
        })
    });
    let write = sends.next_write(request, 0, 4096).unwrap();
    assert_eq!(
        (write.lane, write.bytes, sends.has_lost_shares()),
        (lane(1), 64, false)
    );
}
