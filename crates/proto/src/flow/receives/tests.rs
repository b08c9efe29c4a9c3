use super::*;
use crate::wire::cts::{Entry, RING_WORDS, Terms};
use crate::wire::ids::lane;
use std::sync::atomic::Ordering;

const CHUNK: u64 = 4096;

/// Returns the immediate of a share. `share` is the share's index and the number of shares.
fn immediate(grant: Grant, part: u8, share: (u8, u8), full_chunks: u16) -> Immediate {
    let (generation, (share, shares)) = (Immediate::generation_of(grant.sequence), share);
    Immediate {
        slot: grant.slot,
        part,
        generation,
        shares,
        share,
        full_chunks,
    }
}

fn test(receives: &mut Receives, slot: Slot) -> Result<Option<Vec<u64>>, NotInFlight> {
    let mut sizes = Vec::new();
    let done = receives.test(slot, |part, bytes| {
        assert_eq!(part, sizes.len());
        sizes.push(bytes);
    })?;
    Ok(done.then_some(sizes))
}

fn one(receives: &mut Receives, buffer_bytes: u64) -> Grant {
    receives
        .grant([buffer_bytes].into_iter(), false, lane(0))
        .unwrap()
}

#[test]
fn shares_in_any_order_add_up_to_the_size() {
    let mut receives = <Receives>::new(CHUNK);
    let grant = one(&mut receives, 100_000);
    assert_eq!(
        receives.arrived(&immediate(grant, 0, (2, 3), 0), 10),
        Ok(Arrival::Part)
    );
    assert_eq!(
        receives.arrived(&immediate(grant, 0, (0, 3), 2), 0),
        Ok(Arrival::Part)
    );
    assert_eq!(test(&mut receives, grant.slot), Ok(None));
    assert_eq!(receives.delivered(), 0);
    assert_eq!(
        receives.arrived(&immediate(grant, 0, (1, 3), 1), 5),
        Ok(Arrival::Complete)
    );
    assert_eq!(
        test(&mut receives, grant.slot),
        Ok(Some(vec![3 * CHUNK + 15]))
    );
    assert_eq!(
        test(&mut receives, grant.slot),
        Err(NotInFlight(grant.slot.number()))
    );
    assert_eq!((receives.open(), receives.delivered()), (0, 1));
}

#[test]
fn a_group_is_done_when_all_its_parts_are() {
    let mut receives = <Receives>::new(CHUNK);
    let grant = receives
        .grant([8, 8, 8].into_iter(), false, lane(0))
        .unwrap();
    for (part, bytes) in [(2, 0), (0, 8)] {
        assert_eq!(
            receives.arrived(&immediate(grant, part, (0, 1), 0), bytes),
            Ok(Arrival::Part)
        );
        assert_eq!(test(&mut receives, grant.slot), Ok(None));
    }
    assert_eq!(
        receives.arrived(&immediate(grant, 1, (0, 1), 0), 3),
        Ok(Arrival::Complete)
    );
    assert_eq!(test(&mut receives, grant.slot), Ok(Some(vec![8, 3, 0])));
}

#[test]
fn an_optional_receive_is_reported_done_immediately_and_keeps_its_slot() {
    let mut receives = <Receives>::new(CHUNK);
    let grant = receives.grant([64].into_iter(), true, lane(0)).unwrap();
    assert_eq!(test(&mut receives, grant.slot), Ok(Some(vec![64])));
    assert_eq!(
        test(&mut receives, grant.slot),
        Err(NotInFlight(grant.slot.number()))
    );
    for _ in 1..SLOTS {
        let other = one(&mut receives, 1);
        receives
            .arrived(&immediate(other, 0, (0, 1), 0), 1)
            .unwrap();
        test(&mut receives, other.slot).unwrap().unwrap();
    }
    assert!(!receives.has_room(), "the slot's immediate has not arrived");
    assert_eq!(receives.grant([1].into_iter(), false, lane(0)), None);
    assert_eq!(
        receives.arrived(&immediate(grant, 0, (0, 1), 0), 64),
        Ok(Arrival::Complete)
    );
    assert_eq!(one(&mut receives, 1).slot, grant.slot);
}

#[test]
fn immediates_of_an_earlier_use_are_dropped() {
    let mut receives = <Receives>::new(CHUNK);
    let grant = one(&mut receives, 8);
    let old = Immediate {
        generation: 5,
        ..immediate(grant, 0, (0, 1), 0)
    };
    assert_eq!(receives.arrived(&old, 8), Ok(Arrival::Stale));
    let free = Immediate {
        slot: Slot::of(9),
        ..immediate(grant, 0, (0, 1), 0)
    };
    assert_eq!(receives.arrived(&free, 8), Ok(Arrival::Stale));
    assert_eq!(test(&mut receives, grant.slot), Ok(None));
}

#[test]
fn a_lying_peer_is_caught() {
    let mut receives = <Receives>::new(CHUNK);
    let grant = receives.grant([8, 8].into_iter(), false, lane(0)).unwrap();
    let mut arrive = |part, share, full_chunks, bytes| {
        receives.arrived(&immediate(grant, part, share, full_chunks), bytes)
    };
    assert_eq!(
        arrive(2, (0, 1), 0, 8),
        Err(Violation::Part { part: 2, share: 0 })
    );
    assert_eq!(
        arrive(0, (1, 1), 0, 8),
        Err(Violation::Part { part: 0, share: 1 })
    );
    assert_eq!(
        arrive(0, (0, 1), 0, 9),
        Err(Violation::Overrun {
            bytes: 9,
            buffer_bytes: 8
        })
    );
    assert_eq!(
        arrive(0, (0, 1), 1, 0),
        Err(Violation::Overrun {
            bytes: 4096,
            buffer_bytes: 8
        })
    );
    assert_eq!(arrive(0, (1, 2), 0, 4), Ok(Arrival::Part));
    assert_eq!(
        arrive(0, (0, 3), 0, 4),
        Err(Violation::Shares { before: 2, now: 3 })
    );
    let again = |share, bytes| {
        Err(Violation::Again {
            part: 0,
            share,
            bytes,
        })
    };
    assert_eq!(arrive(0, (1, 2), 0, 4), again(1, 4));
    assert_eq!(
        arrive(0, (1, 3), 0, 0),
        again(1, 0),
        "the number of shares differs"
    );
    assert_eq!(arrive(0, (0, 2), 0, 4), Ok(Arrival::Part));
    assert_eq!(arrive(0, (0, 2), 0, 1), again(0, 1));
    assert_eq!(
        arrive(0, (2, 3), 0, 0),
        Err(Violation::Shares { before: 2, now: 3 })
    );
    assert_eq!(test(&mut receives, Slot::of(9)), Err(NotInFlight(9)));
}

#[test]
fn a_repeated_empty_share_is_ignored() {
    let mut receives = <Receives>::new(CHUNK);
    let grant = one(&mut receives, 8);
    let mut arrive = |share, bytes| receives.arrived(&immediate(grant, 0, (share, 2), 0), bytes);
    assert_eq!(arrive(1, 4), Ok(Arrival::Part));
    for _ in 0..100 {
        assert_eq!(
            arrive(1, 0),
            Ok(Arrival::Stale),
            "while the other share is missing"
        );
    }
    assert_eq!(arrive(0, 3), Ok(Arrival::Complete));
    assert_eq!(
        arrive(0, 0),
        Ok(Arrival::Stale),
        "and when all shares have arrived"
    );
    assert_eq!(test(&mut receives, grant.slot), Ok(Some(vec![7])));
}

#[test]
fn a_slots_next_receive_inherits_no_repetition() {
    let mut receives = <Receives>::new(CHUNK);
    let first = one(&mut receives, 8);
    receives.lost(lane(0));
    receives
        .arrived(&immediate(first, 0, (0, 1), 0), 8)
        .unwrap();
    test(&mut receives, first.slot).unwrap().unwrap();
    for _ in 1..SLOTS {
        let other = receives.grant([8].into_iter(), false, lane(1)).unwrap();
        receives
            .arrived(&immediate(other, 0, (0, 1), 0), 8)
            .unwrap();
        test(&mut receives, other.slot).unwrap().unwrap();
    }
    let again = receives.grant([8].into_iter(), false, lane(1)).unwrap();
    assert_eq!(
        (again.slot, receives.next_repeat(lane(0), |_| true)),
        (first.slot, None)
    );
}

#[test]
fn a_message_has_at_most_eight_shares() {
    let mut receives = <Receives>::new(CHUNK);
    let grant = one(&mut receives, 100);
    for share in 0..7 {
        assert_eq!(
            receives.arrived(&immediate(grant, 0, (share, 8), 0), 1),
            Ok(Arrival::Part)
        );
    }
    assert!(receives.received().has(0, 0, 6) && !receives.received().has(0, 0, 7));
    assert_eq!(
        receives.arrived(&immediate(grant, 0, (7, 8), 0), 1),
        Ok(Arrival::Complete)
    );
    assert!(receives.received().has(0, 0, 7) && !receives.received().has(1, 0, 0));
}

#[test]
fn a_grant_of_a_lost_lane_is_repeated_and_holds_its_slot() {
    let mut receives = <Receives>::new(CHUNK);
    let first = receives.grant([8, 8].into_iter(), false, lane(1)).unwrap();
    let by_other = receives.grant([8].into_iter(), false, lane(0)).unwrap();
    let done = receives.grant([8].into_iter(), false, lane(1)).unwrap();
    receives.arrived(&immediate(done, 0, (0, 1), 0), 8).unwrap();
    receives.lost(lane(1));
    assert_eq!(
        receives.next_repeat(lane(0), |_| true),
        Some(Repeat {
            grant: first,
            parts: 2,
            lane: lane(0)
        })
    );
    assert_eq!(
        receives.next_repeat(lane(0), |_| true),
        None,
        "one is done, and one used another lane"
    );
    for part in [0, 1] {
        receives
            .arrived(&immediate(first, part, (0, 1), 0), 8)
            .unwrap();
    }
    receives
        .arrived(&immediate(by_other, 0, (0, 1), 0), 8)
        .unwrap();
    (0..3)
        .map(Slot::of)
        .for_each(|slot| assert!(test(&mut receives, slot).unwrap().is_some()));
    for _ in 3..SLOTS {
        let other = one(&mut receives, 1);
        receives
            .arrived(&immediate(other, 0, (0, 1), 0), 1)
            .unwrap();
        test(&mut receives, other.slot).unwrap().unwrap();
    }
    assert!(
        !receives.has_room(),
        "the slot's clear-to-send is still under way"
    );
    receives.repeated(first.slot);
    assert_eq!(one(&mut receives, 1).slot, first.slot);
    receives.lost(lane(0));
    assert!(
        receives
            .next_repeat(lane(0), |_| true)
            .is_some_and(|it| it.grant.sequence == SLOTS as u64)
    );
}

#[test]
fn grants_with_old_keys_are_repeated_by_their_own_lanes() {
    let mut receives = <Receives>::new(CHUNK);
    let shadow = shadow();
    let by_one = receives.grant([8].into_iter(), false, lane(1)).unwrap();
    let by_other = receives.grant([8, 8].into_iter(), false, lane(2)).unwrap();
    let by_lost = receives.grant([8].into_iter(), false, lane(0)).unwrap();
    let done = receives.grant([8].into_iter(), false, lane(1)).unwrap();
    receives.arrived(&immediate(done, 0, (0, 1), 0), 8).unwrap();
    receives.lost(lane(0));
    let mut asked = Vec::new();
    let keys = |grant, part| {
        asked.push((grant, part));
        Ok::<_, ()>([7; 4])
    };
    receives.take_new_keys(lane(3), &shadow, keys).unwrap();
    assert_eq!(
        asked,
        [(by_one, 0), (by_other, 0), (by_other, 1), (by_lost, 0)]
    );
    assert_eq!(
        (receives.epoch(), receives.epoch_of(lane(3))),
        (Epoch::default().next(), receives.epoch())
    );
    assert!(receives.has_repeats());
    let next = receives.next_repeat(lane(3), |at| at == lane(2));
    assert_eq!(
        next,
        Some(Repeat {
            grant: by_other,
            parts: 2,
            lane: lane(2)
        }),
        "lane 1 has no room"
    );
    let next = receives.next_repeat(lane(3), |at| at == lane(3));
    assert_eq!(
        next,
        Some(Repeat {
            grant: by_lost,
            parts: 1,
            lane: lane(3)
        })
    );
    receives
        .take_new_keys(lane(3), &shadow, |_, _| Ok::<_, ()>([7; 4]))
        .unwrap();
    assert_eq!(
        receives.next_repeat(lane(3), |at| at == lane(2)),
        None,
        "the repetition before is in transit"
    );
    receives.repeated(by_other.slot);
    assert!(receives.next_repeat(lane(3), |at| at == lane(2)).is_some());
    receives.lost(lane(2));
    let next = receives
        .next_repeat(lane(3), |at| at == lane(3))
        .map(|repeat| repeat.grant);
    assert_eq!(next, Some(by_other), "by any lane now");
}

#[test]
fn new_keys_replace_those_of_pending_entries_alone() {
    let mut receives = <Receives>::new(CHUNK);
    let shadow = shadow();
    let mut grant = |tag| {
        let grant = receives.grant([8].into_iter(), false, lane(0)).unwrap();
        let terms = Terms {
            addr: 4096,
            bytes: 8,
            tag,
            parts: 1,
            part: 0,
            epoch: receives.epoch(),
        };
        shadow::store(
            shadow::place(&shadow, grant.sequence, 0).unwrap(),
            &Entry::new(&terms, &[1; 4], grant.sequence),
        );
        grant
    };
    let done = grant(4);
    let pending = grant(5);
    receives.arrived(&immediate(done, 0, (0, 1), 0), 8).unwrap();
    receives
        .take_new_keys(lane(1), &shadow, |_, _| Ok::<_, ()>([7; 4]))
        .unwrap();
    let entry = |grant: Grant| {
        let place = shadow::place(&shadow, grant.sequence, 0).unwrap();
        Entry::whole(
            std::array::from_fn(|word| place[word].load(Ordering::Relaxed)),
            grant.sequence,
        )
        .unwrap()
    };
    let told = |entry: Entry| {
        (
            entry.epoch(),
            entry.rkey(lane(0)),
            entry.tag(),
            entry.addr(),
            entry.bytes(),
        )
    };
    assert_eq!(told(entry(pending)), (receives.epoch(), 7, 5, 4096, 8));
    assert_eq!(told(entry(done)), (Epoch::default(), 1, 4, 4096, 8));
    let failed = receives.take_new_keys(lane(1), &shadow, |_, _| Err("deregistered"));
    assert_eq!(failed, Err("deregistered"));
}

fn shadow() -> Vec<AtomicU64> {
    (0..RING_WORDS).map(|_| AtomicU64::new(0)).collect()
}
