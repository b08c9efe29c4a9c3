//! Two machines in one process, in virtual time: states, keys, bounds, errors, and exact pacing.

#![allow(unsafe_code)]

mod common;

use common::*;
use softverbs::completion_queue::CompletionQueue;
use softverbs::control::{Action, control};
use softverbs::engine::{ASLEEP, AWAKE, NAPPING};
use softverbs::fabric::EventObject;
use softverbs::hotplug::Phase;
use softverbs::profile::Profile;
use softverbs::queue_pair::{Change, PathToPeer, State};
use softverbs::status;
use softverbs::work_request::{Operation, Sge};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

#[test]
fn a_write_wakes_an_engine_that_is_asleep_though_its_process_has_just_polled() {
    let bed = Bed::new();
    let pair = bed.pair(0, 7);
    // In virtual time no engine thread runs, so the test itself writes the value that one would
    // have written.
    let sleeping = &pair.b.node.process().sleeping;
    let left_as = |depth: u32| {
        sleeping.store(depth, Ordering::SeqCst);
        pair.a.write(8, None, &pair.b);
        sleeping.load(Ordering::SeqCst)
    };
    bed.at(1_000_000);
    assert!(pair.b.poll().is_empty());
    bed.at(1_050_000);
    assert_eq!(left_as(ASLEEP), AWAKE);
    assert_eq!(
        left_as(NAPPING),
        NAPPING,
        "a process that polls drives its engine"
    );
    bed.at(1_150_000);
    assert_eq!(
        left_as(NAPPING),
        AWAKE,
        "a process that polled once does not"
    );
}

#[test]
fn a_write_takes_its_time_lands_whole_and_completes_on_both_sides() {
    let bed = Bed::new();
    let pair = bed.pair(0, 7);
    pair.b.qp.post_receive(33, &[]).unwrap();
    pair.a.write(100_000, Some(0xabcd), &pair.b);
    // 100000 bytes in two pieces, one nanosecond for each byte, and a latency of 1000 ns.
    bed.at(100_999);
    assert_eq!(pair.poll(), (vec![], vec![]));
    bed.at(101_000);
    let (a, b) = pair.poll();
    assert_eq!(
        (a.len(), a[0].wr_id, a[0].status, a[0].opcode),
        (1, 77, 0, 1)
    );
    assert_eq!(
        (b.len(), b[0].wr_id, b[0].bytes, b[0].imm, b[0].opcode),
        (1, 33, 100_000, 0xabcd, 129)
    );
    assert_eq!(pair.b.bytes[9..100_009], pair.a.bytes[..100_000]);
}

#[test]
fn two_rails_on_one_link_share_it_and_a_queue_pair_has_its_own_rate() {
    let bed = Bed::new();
    let one = bed.pair(0, 7);
    let other = bed.pair(1, 7);
    one.a.write(40_000, None, &one.b);
    bed.at(41_000);
    assert_eq!(one.poll().0.len(), 1);
    // Both together: 80000 bytes over the link they share.
    one.a.write(40_000, None, &one.b);
    other.a.write(40_000, None, &other.b);
    let mut done = Vec::new();
    for ns in (41_000..).step_by(500) {
        bed.at(ns);
        for (name, pair) in [("one", &one), ("other", &other)] {
            if !pair.poll().0.is_empty() {
                done.push((name, ns));
            }
        }
        if done.len() == 2 {
            break;
        }
    }
    assert_eq!(
        done,
        [("one", 82_000), ("other", 161_000)],
        "the other's queue pair carries half a byte a nanosecond"
    );
}

#[test]
fn a_busy_queue_pair_does_not_starve_another() {
    let bed = Bed::new();
    let bulk = bed.pair(0, 7);
    let small = bed.pair(0, 7);
    // Four milliseconds of work, at a nanosecond for each byte.
    for _ in 0..8 {
        bulk.a.write(512 * 1024, None, &bulk.b);
    }
    bed.at(100_000);
    bulk.poll();
    small.a.write(64, None, &small.b);
    let mut done_ns = None;
    for ns in (110_000..6_000_000).step_by(10_000) {
        bed.at(ns);
        bulk.poll();
        if !small.poll().0.is_empty() {
            done_ns = Some(ns);
            break;
        }
    }
    // The write is done after one packet of the other queue pair and the latency. So the first poll
    // finds its completion.
    assert_eq!(done_ns, Some(110_000));
}

#[test]
fn sends_fill_receives_and_reads_fetch() {
    let bed = Bed::new();
    let pair = bed.pair(0, 7);
    pair.b
        .qp
        .post_receive(1, &[pair.b.sge(1000, 100), pair.b.sge(5000, 400)])
        .unwrap();
    pair.a
        .post(
            Operation::Send,
            &[pair.a.sge(10, 200), pair.a.sge(600, 200)],
            None,
            (0, 0),
        )
        .unwrap();
    bed.at(10_000);
    let (a, b) = pair.poll();
    assert_eq!(
        (a.len(), b.len(), b[0].bytes, b[0].opcode),
        (1, 1, 400, 128)
    );
    let sent = [&pair.a.bytes[10..210], &pair.a.bytes[600..800]].concat();
    assert_eq!(
        [&pair.b.bytes[1000..1100], &pair.b.bytes[5000..5300]].concat(),
        sent
    );

    let from = pair.b.bytes.as_ptr() as u64 + 300_000;
    pair.a
        .post(
            Operation::Read,
            &[pair.a.sge(900_000, 70_000)],
            None,
            (from, pair.b.key),
        )
        .unwrap();
    bed.at(200_000);
    let (a, b) = pair.poll();
    assert_eq!((a.len(), a[0].status, a[0].opcode, b.len()), (1, 0, 2, 0));
    assert_eq!(
        pair.a.bytes[900_000..970_000],
        pair.b.bytes[300_000..370_000]
    );
}

#[test]
fn a_send_consumes_one_receive_with_or_without_an_immediate_and_a_write_without_one_consumes_none()
{
    let bed = Bed::new();
    let pair = bed.pair(0, 7);
    // Receives without memory, as for immediates.
    (0..3).for_each(|wr_id| pair.b.qp.post_receive(wr_id, &[]).unwrap());
    pair.a.write(10, None, &pair.b);
    pair.a.post(Operation::Send, &[], None, (0, 0)).unwrap();
    pair.a
        .post(Operation::Send, &[], Some(0xabcd), (0, 0))
        .unwrap();
    pair.a.write(10, Some(0xef01), &pair.b);
    bed.at(100_000);
    let (a, b) = pair.poll();
    assert!(
        a.len() == 4 && a.iter().all(|completion| completion.status == 0),
        "{a:?}"
    );
    let got: Vec<_> = b
        .iter()
        .map(|c| (c.wr_id, c.status, c.opcode, c.flags, c.imm, c.bytes))
        .collect();
    let immediate = (status::RECEIVED_IMMEDIATE, status::WITH_IMMEDIATE);
    assert_eq!(
        got,
        [
            (0, 0, status::RECEIVED, 0, 0, 0),
            (1, 0, status::RECEIVED, status::WITH_IMMEDIATE, 0xabcd, 0),
            (2, 0, immediate.0, immediate.1, 0xef01, 10),
        ]
    );
}

#[test]
fn a_send_that_is_longer_than_its_receive_fails_at_both_ends_and_writes_nothing() {
    for room in [0, 99] {
        let bed = Bed::new();
        let pair = bed.pair(0, 7);
        let before = pair.b.bytes.clone();
        let sges = if room == 0 {
            vec![]
        } else {
            vec![pair.b.sge(1000, room)]
        };
        (0..2).for_each(|wr_id| pair.b.qp.post_receive(wr_id, &sges).unwrap());
        pair.a
            .post(Operation::Send, &[pair.a.sge(0, 100)], None, (0, 0))
            .unwrap();
        pair.a.write(10, Some(1), &pair.b);
        bed.at(100_000);
        let (a, b) = pair.poll();
        assert_eq!(
            a.iter().map(|c| c.status).collect::<Vec<_>>(),
            [status::REMOTE_INVALID, status::FLUSHED]
        );
        let of_b: Vec<_> = b.iter().map(|c| (c.wr_id, c.status)).collect();
        assert_eq!(of_b, [(0, status::LOCAL_LENGTH), (1, status::FLUSHED)]);
        assert_eq!(
            (pair.a.qp.state(), pair.b.qp.state()),
            (State::Error, State::Error)
        );
        assert!(pair.b.bytes == before);
    }
}

#[test]
fn a_wrong_key_or_an_address_out_of_bounds_puts_both_queue_pairs_into_error_and_writes_nothing() {
    for (shift, key_change) in [(0, 1), ((1 << 20) - 50, 0), (u64::MAX / 2, 0)] {
        let bed = Bed::new();
        let pair = bed.pair(0, 7);
        let before = pair.b.bytes.clone();
        let to = (pair.b.bytes.as_ptr() as u64).wrapping_add(shift);
        pair.b.qp.post_receive(9, &[]).unwrap();
        pair.a.write(10, None, &pair.b);
        pair.a
            .post(
                Operation::Write,
                &[pair.a.sge(0, 100)],
                None,
                (to, pair.b.key ^ key_change),
            )
            .unwrap();
        pair.a.write(10, None, &pair.b);
        bed.at(100_000);
        let (a, b) = pair.poll();
        let statuses: Vec<u32> = a.iter().map(|c| c.status).collect();
        assert_eq!(statuses, [0, status::REMOTE_ACCESS, status::FLUSHED]);
        assert_eq!((b.len(), b[0].status, b[0].wr_id), (1, status::FLUSHED, 9));
        assert_eq!(
            (pair.a.qp.state(), pair.b.qp.state()),
            (State::Error, State::Error)
        );
        assert_eq!(bed.nodes[1].next_event(0).map(|event| event.kind), Some(3));
        assert_eq!(pair.b.bytes[50..], before[50..]);
    }
}

#[test]
fn a_key_of_another_protection_domain_allows_nothing() {
    for its_own in [true, false] {
        let bed = Bed::new();
        let pair = bed.pair(0, 7);
        let owner = if its_own { &pair.a } else { &pair.b };
        // SAFETY: the bytes live as long as their end, and are read only between the tests' steps.
        let key = unsafe {
            owner
                .node
                .register((0, 5), owner.bytes.as_ptr() as usize, owner.bytes.len(), 7)
        }
        .unwrap();
        let piece = Sge {
            lkey: if its_own { key } else { pair.a.key },
            ..pair.a.sge(0, 8)
        };
        let to = (
            pair.b.bytes.as_ptr() as u64,
            if its_own { pair.b.key } else { key },
        );
        pair.a.post(Operation::Write, &[piece], None, to).unwrap();
        bed.at(100_000);
        let wanted = if its_own {
            status::LOCAL_PROTECTION
        } else {
            status::REMOTE_ACCESS
        };
        assert_eq!(pair.poll().0[0].status, wanted);
        owner.node.deregister(0, key).unwrap();
    }
}

#[test]
fn requests_without_a_completion_keep_their_places_until_one_with_it_is_done() {
    let bed = Bed::new();
    let pair = bed.pair(0, 7);
    let to = (pair.b.bytes.as_ptr() as u64, pair.b.key);
    let unsignaled = || {
        pair.a
            .post_with(false, Operation::Write, &[pair.a.sge(0, 8)], None, to)
    };
    for _ in 0..15 {
        unsignaled().unwrap();
    }
    bed.at(1_000_000);
    assert!(pair.poll().0.is_empty());
    pair.a.write(8, None, &pair.b);
    assert_eq!(
        unsignaled(),
        Err(libc::ENOMEM),
        "fifteen are done, but none was signaled"
    );
    bed.at(2_000_000);
    assert_eq!(pair.poll().0.len(), 1);
    for _ in 0..16 {
        unsignaled().unwrap();
    }
}

#[test]
fn local_memory_is_checked_too() {
    let bed = Bed::new();
    let pair = bed.pair(0, 7);
    let wild = Sge {
        addr: 64,
        bytes: 8,
        lkey: pair.a.key,
    };
    pair.a
        .post(
            Operation::Write,
            &[wild],
            None,
            (pair.b.bytes.as_ptr() as u64, pair.b.key),
        )
        .unwrap();
    bed.at(100_000);
    assert_eq!(pair.poll().0[0].status, status::LOCAL_PROTECTION);
}

#[test]
fn a_write_with_an_immediate_waits_for_a_receive_as_long_as_rnr_retry_says() {
    let bed = Bed::new();
    let patient = bed.pair(0, 7);
    patient.a.write(8, Some(1), &patient.b);
    bed.at(50_000_000);
    assert_eq!(patient.poll(), (vec![], vec![]));
    patient.b.qp.post_receive(4, &[]).unwrap();
    bed.at(50_100_000);
    patient.poll();
    bed.at(50_200_000);
    let (a, b) = patient.poll();
    assert_eq!(
        (a.len(), b.len()),
        (1, 1),
        "the write arrives once there is a receive"
    );

    let hasty = bed.pair(1, 1);
    hasty.a.write(8, Some(1), &hasty.b);
    let mut end = Vec::new();
    for ns in (50_200_000..51_000_000).step_by(5_000) {
        bed.at(ns);
        end.extend(hasty.poll().0);
    }
    assert_eq!(end[0].status, status::RNR_RETRY_EXCEEDED);
}

#[test]
fn a_rail_that_goes_down_ends_in_retries_exceeded_and_one_that_is_slowed_is_slow() {
    let bed = Bed::new();
    let pair = bed.pair(0, 7);
    control(
        &bed.settings.dir,
        &bed.settings.fabric,
        Some(1),
        "x0",
        Action::Slow(0.25),
    )
    .unwrap();
    pair.a.write(40_000, None, &pair.b);
    bed.at(160_999);
    assert_eq!(pair.poll().0, []);
    bed.at(161_000);
    assert_eq!(
        pair.poll().0.len(),
        1,
        "four nanoseconds a byte, and the latency"
    );
    control(
        &bed.settings.dir,
        &bed.settings.fabric,
        None,
        "x0",
        Action::Down,
    )
    .unwrap();
    pair.a.write(8, None, &pair.b);
    pair.a.write(8, None, &pair.b);
    // 4.096 us x 2^8, twice.
    bed.at(161_000 + 2 * 1_048_576);
    assert_eq!(pair.poll().0, []);
    bed.at(161_001 + 2 * 1_048_576);
    let statuses: Vec<u32> = pair.poll().0.iter().map(|c| c.status).collect();
    assert_eq!(statuses, [status::RETRY_EXCEEDED, status::FLUSHED]);
    assert!(!bed.nodes[0].port_up(0) && bed.nodes[0].port_up(1));
    let error = control(
        &bed.settings.dir,
        &bed.settings.fabric,
        None,
        "x7",
        Action::Up,
    )
    .unwrap_err();
    assert!(error.contains("x0, x1"), "{error}");
}

#[test]
fn a_removed_function_is_silent_and_one_that_returns_is_a_new_device() {
    let bed = Bed::new();
    let pair = bed.pair(0, 7);
    let rail = &bed.nodes[0].memory.rails[0][0];
    let before = pair.b.bytes.clone();
    // Cut off: the device still works.
    rail.move_to(Phase::Cut);
    pair.a.write(10, None, &pair.b);
    bed.at(100_000);
    assert_eq!(pair.poll().0.len(), 1);
    assert_ne!(pair.b.bytes[9..19], before[9..19]);
    assert_eq!(pair.a.qp.change(Change::Error), Err(libc::EIO));
    bed.nodes[0].watch_ports();
    assert_eq!(bed.nodes[0].next_event(0), None);
    // Gone: posts have no effect, and the peer's posts end in a time-out at the peer.
    rail.move_to(Phase::Gone);
    let after = pair.b.bytes.clone();
    pair.a
        .post(
            Operation::Write,
            &[pair.a.sge(50, 100)],
            None,
            (pair.b.bytes.as_ptr() as u64, pair.b.key),
        )
        .unwrap();
    pair.b.write(10, None, &pair.a);
    bed.at(60_000_000_000);
    let (a, b) = pair.poll();
    assert_eq!((a, pair.b.bytes == after), (vec![], true));
    assert_eq!(
        b.iter().map(|c| c.status).collect::<Vec<_>>(),
        [status::RETRY_EXCEEDED]
    );
    bed.nodes[0].watch_ports();
    assert_eq!(
        bed.nodes[0].next_event(0).map(|event| event.kind),
        Some(verbs_sys::IBV_EVENT_DEVICE_FATAL)
    );
    // Back: old objects stay dead, and new ones work.
    rail.move_to(Phase::Here);
    assert_eq!(pair.a.qp.change(Change::Error), Err(libc::EIO));
    let new = bed.pair(0, 7);
    new.a.write(10, None, &new.b);
    bed.at(61_000_000_000);
    assert_eq!((new.poll().0.len(), pair.a.poll().len()), (1, 0));
}

#[test]
fn a_failing_function_is_silent_and_loses_its_keys_before_it_leaves() {
    let bed = Bed::new();
    let pair = bed.pair(0, 7);
    let rail = &bed.nodes[0].memory.rails[0][0];
    let events = || {
        bed.nodes[0].watch_ports();
        std::iter::from_fn(|| bed.nodes[0].next_event(0))
            .map(|event| event.kind)
            .collect::<Vec<_>>()
    };
    let before = (pair.a.bytes.clone(), pair.b.bytes.clone());
    // Failed: silent both ways. Only the commands that the kernel does without the device succeed.
    rail.move_to(Phase::Failed);
    pair.a.write(10, None, &pair.b);
    pair.b.write(10, None, &pair.a);
    bed.at(100_000);
    assert_eq!(pair.poll(), (vec![], vec![]));
    let again = Change::ReadyToSend {
        timeout: 8,
        retry_count: 1,
        rnr_retry: 7,
        send_psn: 5,
    };
    assert_eq!(
        (pair.a.qp.change(again), pair.a.qp.change(Change::Error)),
        (Err(libc::ENOLINK), Ok(()))
    );
    assert_eq!(events(), [verbs_sys::IBV_EVENT_DEVICE_FATAL]);
    assert_eq!(events(), [0; 0], "the event comes once");
    assert!(pair.a.bytes == before.0 && pair.b.bytes == before.1);
    // Cut off: the device had never stopped, whatever the kernel reported. The writes arrive now.
    rail.move_to(Phase::Cut);
    bed.at(500_000);
    assert_eq!(
        (pair.a.qp.change(Change::Error), pair.poll().0.len()),
        (Err(libc::EIO), 1)
    );
    assert_ne!(pair.b.bytes[9..19], before.1[9..19]);
    assert_ne!(pair.a.bytes[9..19], before.0[9..19]);
    bed.at(600_000);
    assert_eq!(pair.poll().1.len(), 1);
    // Without keys: the peer is refused, and nothing is written.
    rail.move_to(Phase::Keyless);
    let before = pair.a.bytes.clone();
    pair.b
        .post(
            Operation::Write,
            &[pair.b.sge(70, 10)],
            None,
            (pair.a.bytes.as_ptr() as u64 + 9, pair.a.key),
        )
        .unwrap();
    bed.at(700_000);
    pair.poll();
    bed.at(800_000);
    assert_eq!(
        pair.b.poll().iter().map(|c| c.status).collect::<Vec<_>>(),
        [status::REMOTE_ACCESS]
    );
    assert!(pair.a.bytes == before);
    assert_eq!(events(), [verbs_sys::IBV_EVENT_QP_ACCESS_ERR]);
    rail.move_to(Phase::Gone);
    assert_eq!(events(), [verbs_sys::IBV_EVENT_DEVICE_FATAL]);
}

#[test]
fn an_overflowing_completion_queue_and_its_queue_pair_go_into_error() {
    // A sender gets three completions. Its completion queue has room for two, and then for three.
    for (room, polled, events) in [
        (
            2,
            0,
            vec![verbs_sys::IBV_EVENT_CQ_ERR, verbs_sys::IBV_EVENT_QP_FATAL],
        ),
        (3, 3, vec![]),
    ] {
        let bed = Bed::new();
        let cq = CompletionQueue::new(&bed.nodes[0], 0, room).unwrap();
        let pair = bed.connect(
            Pair {
                a: End::with_queue(&bed.nodes[0], 0, &cq),
                b: End::new(&bed.nodes[1], 0),
            },
            [1, 0],
            0,
            7,
        );
        (0..3).for_each(|_| pair.a.write(10, None, &pair.b));
        bed.at(100_000);
        assert_eq!(pair.poll().0.len(), polled);
        let seen: Vec<_> = std::iter::from_fn(|| bed.nodes[0].next_event(0)).collect();
        assert_eq!(
            seen.iter().map(|event| event.kind).collect::<Vec<_>>(),
            events
        );
        let is_lost = polled == 0;
        assert!(!is_lost || seen[0].about == EventObject::CompletionQueue(cq.number()));
        assert_eq!(pair.a.qp.state() == State::Error, is_lost);
        pair.a.write(10, None, &pair.b);
        bed.at(200_000);
        assert_eq!(pair.poll().0.len(), usize::from(!is_lost));
    }
    // The completion queue of a receiver overflows: the peer gets an error, although the bytes may
    // have arrived.
    let bed = Bed::new();
    let cq = CompletionQueue::new(&bed.nodes[1], 0, 1).unwrap();
    let pair = bed.connect(
        Pair {
            a: End::new(&bed.nodes[0], 0),
            b: End::with_queue(&bed.nodes[1], 0, &cq),
        },
        [1, 0],
        0,
        7,
    );
    (0..2).for_each(|wr_id| pair.b.qp.post_receive(wr_id, &[]).unwrap());
    (0..2).for_each(|imm| pair.a.write(10, Some(imm), &pair.b));
    bed.at(100_000);
    bed.nodes[1].watch_ports();
    let (a, b) = pair.poll();
    assert_eq!(
        a.iter().map(|c| c.status).collect::<Vec<_>>(),
        [0, status::REMOTE_OPERATION]
    );
    assert_eq!((b, pair.b.qp.state()), (vec![], State::Error));
    let events: Vec<_> = std::iter::from_fn(|| bed.nodes[1].next_event(0))
        .map(|event| event.kind)
        .collect();
    assert_eq!(
        events,
        [verbs_sys::IBV_EVENT_CQ_ERR, verbs_sys::IBV_EVENT_QP_FATAL]
    );
}

#[test]
fn states_and_limits_are_enforced() {
    let bed = Bed::new();
    let end = End::new(&bed.nodes[0], 0);
    assert_eq!(
        end.post(Operation::Write, &[], None, (0, 0)),
        Err(libc::EINVAL)
    );
    assert_eq!(
        end.qp.change(Change::ReadyToSend {
            timeout: 1,
            retry_count: 1,
            rnr_retry: 1,
            send_psn: 0
        }),
        Err(libc::EINVAL)
    );
    assert_eq!(
        end.qp.change(Change::Init { access: 0, port: 2 }),
        Err(libc::EINVAL)
    );
    end.qp.change(Change::Init { access: 0, port: 1 }).unwrap();
    let nowhere = Change::ReadyToReceive(PathToPeer {
        mtu_bytes: 4096,
        remote_qp: 1,
        receive_psn: 0,
        remote_gid: [7; 16],
        own_gid_index: 0,
        min_rnr_timer: 1,
    });
    assert_eq!(end.qp.change(nowhere), Err(libc::ENETUNREACH));
    for _ in 0..16 {
        end.qp.post_receive(0, &[]).unwrap();
    }
    assert_eq!(end.qp.post_receive(0, &[]), Err(libc::ENOMEM));
    end.qp.change(Change::Error).unwrap();
    assert_eq!(
        end.poll()
            .iter()
            .filter(|c| c.status == status::FLUSHED)
            .count(),
        16
    );

    let pair = bed.pair(0, 7);
    for _ in 0..16 {
        pair.a.write(8, None, &pair.b);
    }
    let full = pair.a.post(Operation::Write, &[], None, (0, 0));
    assert_eq!(full, Err(libc::ENOMEM));
    bed.at(1_000_000);
    assert_eq!(pair.poll().0.len(), 16);
    pair.a.write(8, None, &pair.b);
}

#[test]
fn deregistered_memory_is_not_reached() {
    let bed = Bed::new();
    let pair = bed.pair(0, 7);
    pair.a.write(8, None, &pair.b);
    bed.nodes[1].deregister(0, pair.b.key).unwrap();
    assert_eq!(bed.nodes[1].deregister(0, pair.b.key), Err(libc::EINVAL));
    bed.at(100_000);
    assert_eq!(pair.poll().0[0].status, status::REMOTE_ACCESS);
}

#[test]
fn the_profile_writes_the_sysfs_of_a_machine() {
    let profile = Profile::load("spark-2cable", 1.0).unwrap();
    let root = std::env::temp_dir().join(format!("softverbs-sysfs-{}", std::process::id()));
    profile.write_sysfs(&root).unwrap();
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    assert_eq!(
        read("class/infiniband/roceP2p1s0f1/device/current_link_width"),
        "4\n"
    );
    assert_eq!(read("class/net/enP2p1s0f1np1/phys_port_name"), "p1\n");
    std::fs::remove_dir_all(&root).unwrap();
}

#[test]
fn every_posted_receive_ends_in_one_completion_whatever_fails() {
    // A send larger than its receive: that receive fails, the others are flushed.
    let bed = Bed::new();
    let pair = bed.pair(0, 7);
    for wr_id in 1..4 {
        pair.b.qp.post_receive(wr_id, &[pair.b.sge(0, 16)]).unwrap();
    }
    pair.a
        .post(Operation::Send, &[pair.a.sge(0, 64)], None, (0, 0))
        .unwrap();
    bed.at(100_000);
    let (a, b) = pair.poll();
    assert_eq!(a[0].status, status::REMOTE_INVALID);
    let ends: Vec<(u64, u32)> = b.iter().map(|c| (c.wr_id, c.status)).collect();
    assert_eq!(
        ends,
        [
            (1, status::LOCAL_LENGTH),
            (2, status::FLUSHED),
            (3, status::FLUSHED)
        ]
    );

    // Stopped while a message arrives: its receive is flushed too.
    let bed = Bed::new();
    let pair = bed.pair(0, 7);
    for wr_id in 1..4 {
        pair.b
            .qp
            .post_receive(wr_id, &[pair.b.sge(0, 1000)])
            .unwrap();
    }
    pair.a
        .post(Operation::Send, &[pair.a.sge(0, 1000)], None, (0, 0))
        .unwrap();
    bed.at(10);
    assert_eq!(pair.poll().1, []);
    pair.b.qp.change(Change::Error).unwrap();
    let mut flushed: Vec<u64> = pair.b.poll().iter().map(|c| c.wr_id).collect();
    flushed.sort_unstable();
    assert_eq!(flushed, [1, 2, 3]);
}

#[test]
fn queue_pairs_that_share_a_completion_queue_and_fail_while_it_is_polled_do_not_deadlock() {
    let (done, wait) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        fail_while_polling();
        done.send(())
    });
    // Far more than the test needs, also under ThreadSanitizer.
    let limit = std::time::Duration::from_secs(600);
    wait.recv_timeout(limit)
        .expect("the polling thread and the engine wait for each other, or a round failed");
}

fn fail_while_polling() {
    let bed = Bed::new();
    bed.nodes[0]
        .memory
        .virtual_clock
        .store(0, Ordering::Release);
    for round in 0..2000u32 {
        let pair = bed.pair_on_one_queue(0);
        let a = &pair.a;
        let b = &pair.b;
        a.post(
            Operation::Write,
            &[a.sge(0, 100)],
            None,
            (b.bytes.as_ptr() as u64, b.key ^ 1),
        )
        .unwrap();
        // Meanwhile the engine's thread serves the queue. The delay differs from round to round.
        for _ in 0..round % 997 * 20 {
            std::hint::spin_loop();
        }
        let mut failed = 0;
        while failed == 0 {
            // The write fails because of the wrong key or, on a busy machine, because no answer
            // comes within 2 ms.
            failed = a.poll().iter().filter(|c| c.status != 0).count();
        }
        assert_eq!(a.qp.state(), State::Error, "round {round}");
    }
}

#[test]
fn resolving_an_unknown_address_takes_a_second_and_no_virtual_time() {
    let bed = Bed::new();
    let device = &bed.nodes[0].devices()[0];
    let try_once = || {
        let end = End::new(&bed.nodes[0], 0);
        end.qp.change(Change::Init { access: 7, port: 1 }).unwrap();
        let change = Change::ReadyToReceive(PathToPeer {
            mtu_bytes: 4096,
            remote_qp: end.qp.number(),
            receive_psn: 5,
            remote_gid: device.gids[1],
            own_gid_index: 1,
            min_rnr_timer: 1,
        });
        let begun = Instant::now();
        let answer = end.qp.change(change);
        (answer, end.qp.state(), begun.elapsed())
    };
    control(
        &bed.settings.dir,
        &bed.settings.fabric,
        Some(0),
        "x0",
        Action::Unresolved(2),
    )
    .unwrap();
    let (answer, state, _) = try_once();
    assert_eq!((answer, state), (Err(libc::ETIMEDOUT), State::Init));
    bed.nodes[0]
        .memory
        .virtual_clock
        .store(0, Ordering::Release);
    let (answer, state, took) = try_once();
    assert_eq!((answer, state), (Err(libc::ETIMEDOUT), State::Init));
    assert!(took >= Duration::from_secs(1), "{took:?}");
    assert_eq!(try_once().0, Ok(()));
}
