//! Differences between mlx5 and soft-RoCE, and a few common behaviours. `src/abi/rounding.rs` tests
//! the sizes of queues. `c_surface` and `c_surface_soft_roce` test the differences in the C
//! interface.

#![allow(unsafe_code)]

mod common;

use common::*;
use softverbs::completion_queue::{Completion, CompletionQueue};
use softverbs::control::{Action, control};
use softverbs::fabric::Node;
use softverbs::nic::Nic;
use softverbs::path::PathFault;
use softverbs::queue_pair::{Change, PathToPeer, State};
use softverbs::status;
use softverbs::work_request::{Operation, Sge};
use std::sync::Arc;
use verbs_sys::*;

fn statuses(completions: &[Completion]) -> Vec<u32> {
    completions
        .iter()
        .map(|completion| completion.status)
        .collect()
}

fn events(node: &Arc<Node>) -> Vec<u32> {
    node.watch_ports();
    std::iter::from_fn(|| node.next_event(0))
        .map(|event| event.kind)
        .collect()
}

#[test]
fn mlx5_keeps_the_places_of_requests_without_a_completion_and_soft_roce_frees_them() {
    for (nic, again) in [(Nic::Mlx5, Err(libc::ENOMEM)), (Nic::SoftRoce, Ok(()))] {
        let bed = Bed::of(nic);
        let pair = bed.pair(0, 7);
        let to = (pair.b.bytes.as_ptr() as u64, pair.b.key);
        let unsignaled = || {
            pair.a
                .post_with(false, Operation::Write, &[pair.a.sge(0, 8)], None, to)
        };
        (0..16).for_each(|_| unsignaled().unwrap());
        assert_eq!(
            unsignaled(),
            Err(libc::ENOMEM),
            "{nic:?}: nothing is acknowledged yet"
        );
        bed.at(1_000_000);
        pair.b.poll();
        // The sender's queue has not been polled.
        assert_eq!(unsignaled(), again, "{nic:?}");
    }
}

#[test]
fn soft_roce_puts_the_completions_of_signaled_requests_into_their_queue_before_it_is_polled() {
    let bed = Bed::of(Nic::SoftRoce);
    let pair = bed.pair(0, 7);
    (0..16).for_each(|_| pair.a.write(8, None, &pair.b));
    bed.at(1_000_000);
    pair.b.poll();
    pair.a.write(8, None, &pair.b);
    bed.at(2_000_000);
    assert_eq!(statuses(&pair.poll().0), [0; 17]);
}

#[test]
fn a_senders_overflow_ends_its_queue_on_mlx5_and_loses_the_completion_on_soft_roce() {
    for (nic, first, told, state, second) in [
        (
            Nic::Mlx5,
            0,
            vec![IBV_EVENT_CQ_ERR, IBV_EVENT_QP_FATAL],
            State::Error,
            0,
        ),
        (
            Nic::SoftRoce,
            2,
            vec![IBV_EVENT_CQ_ERR, IBV_EVENT_CQ_ERR],
            State::ReadyToSend,
            1,
        ),
    ] {
        let bed = Bed::of(nic);
        let cq = CompletionQueue::new(&bed.nodes[0], 0, 2).unwrap();
        let pair = Pair {
            a: End::with_queue(&bed.nodes[0], 0, &cq),
            b: End::new(&bed.nodes[1], 0),
        };
        let pair = bed.connect(pair, [1, 0], 0, 7);
        (0..4).for_each(|_| pair.a.write(10, None, &pair.b));
        bed.at(100_000);
        assert_eq!(statuses(&pair.poll().0), vec![0; first], "{nic:?}");
        assert_eq!(
            (events(&bed.nodes[0]), pair.a.qp.state()),
            (told, state),
            "{nic:?}"
        );
        pair.a.write(10, None, &pair.b);
        bed.at(200_000);
        assert_eq!(statuses(&pair.poll().0), vec![0; second], "{nic:?}");
    }
}

#[test]
fn sends_that_are_flushed_make_one_event_where_their_queue_is_full() {
    for (nic, flushed, told) in [
        (Nic::Mlx5, vec![], vec![IBV_EVENT_CQ_ERR]),
        (
            Nic::SoftRoce,
            vec![status::FLUSHED; 2],
            vec![IBV_EVENT_CQ_ERR],
        ),
    ] {
        let bed = Bed::of(nic);
        let cq = CompletionQueue::new(&bed.nodes[0], 0, 2).unwrap();
        let pair = Pair {
            a: End::with_queue(&bed.nodes[0], 0, &cq),
            b: End::new(&bed.nodes[1], 0),
        };
        let pair = bed.connect(pair, [1, 0], 0, 7);
        (0..6).for_each(|_| pair.a.write(10, None, &pair.b));
        pair.a.qp.change(Change::Error).unwrap();
        assert_eq!(statuses(&pair.a.poll()), flushed, "{nic:?}");
        assert_eq!(
            (events(&bed.nodes[0]), pair.a.poll()),
            (told, vec![]),
            "{nic:?}"
        );
    }
}

#[test]
fn a_receivers_overflow_reaches_the_peer_by_nak_on_mlx5_and_by_time_out_on_soft_roce() {
    for (nic, at_once, after, told, got) in [
        (
            Nic::Mlx5,
            vec![0, status::REMOTE_OPERATION],
            vec![],
            vec![IBV_EVENT_CQ_ERR, IBV_EVENT_QP_FATAL],
            vec![],
        ),
        // The events are for the second receive, and for the third, whose flush fails. The fourth
        // receive is then not flushed, and makes no event.
        (
            Nic::SoftRoce,
            vec![0],
            vec![status::RETRY_EXCEEDED],
            vec![IBV_EVENT_CQ_ERR, IBV_EVENT_CQ_ERR],
            vec![0],
        ),
    ] {
        let bed = Bed::of(nic);
        let cq = CompletionQueue::new(&bed.nodes[1], 0, 1).unwrap();
        let pair = Pair {
            a: End::new(&bed.nodes[0], 0),
            b: End::with_queue(&bed.nodes[1], 0, &cq),
        };
        let pair = bed.connect(pair, [1, 0], 0, 7);
        (0..4).for_each(|wr_id| pair.b.qp.post_receive(wr_id, &[]).unwrap());
        (0..2).for_each(|imm| pair.a.write(10, Some(imm), &pair.b));
        bed.at(100_000);
        let (a, b) = pair.poll();
        assert_eq!((statuses(&a), statuses(&b)), (at_once, got), "{nic:?}");
        assert_eq!(
            (events(&bed.nodes[1]), pair.b.qp.state()),
            (told, State::Error),
            "{nic:?}"
        );
        // Two tries of 4096 x 2^8 ns.
        bed.at(3_000_000);
        assert_eq!(statuses(&pair.poll().0), after, "{nic:?}");
    }
}

#[test]
fn seven_tries_are_seven_on_mlx5_and_have_no_end_on_soft_roce() {
    for (nic, tries, ends) in [
        (Nic::Mlx5, 7, true),
        (Nic::SoftRoce, 7, false),
        (Nic::Mlx5, 6, true),
        (Nic::SoftRoce, 6, true),
    ] {
        let bed = Bed::of(nic);
        let ends_of = Pair {
            a: End::new(&bed.nodes[0], 0),
            b: End::new(&bed.nodes[1], 0),
        };
        let pair = bed.connect_with(ends_of, [1, 0], 0, (tries, 7));
        control(
            &bed.settings.dir,
            &bed.settings.fabric,
            None,
            "x0",
            Action::Path(PathFault::Silent, true),
        )
        .unwrap();
        pair.a.write(8, None, &pair.b);
        bed.at(4096 * 256 * (u64::from(tries) + 1));
        assert_eq!(pair.poll().0, [], "{nic:?} {tries}");
        bed.at(60_000_000_000);
        let expected = if ends {
            vec![status::RETRY_EXCEEDED]
        } else {
            vec![]
        };
        assert_eq!(statuses(&pair.poll().0), expected, "{nic:?} {tries}");
        // Waiting requests arrive when the rail carries again.
        control(
            &bed.settings.dir,
            &bed.settings.fabric,
            None,
            "x0",
            Action::Path(PathFault::Silent, false),
        )
        .unwrap();
        bed.at(61_000_000_000);
        assert_eq!(
            statuses(&pair.poll().0),
            if ends { vec![] } else { vec![0] },
            "{nic:?} {tries}"
        );
    }
}

#[test]
fn a_refused_key_ends_both_queue_pairs_and_only_mlx5_makes_an_event_of_it() {
    for (nic, told) in [
        (Nic::Mlx5, vec![IBV_EVENT_QP_ACCESS_ERR]),
        (Nic::SoftRoce, vec![]),
    ] {
        let bed = Bed::of(nic);
        let pair = bed.pair(0, 7);
        let to = (pair.b.bytes.as_ptr() as u64, pair.b.key ^ 1);
        pair.a
            .post(Operation::Write, &[pair.a.sge(0, 8)], None, to)
            .unwrap();
        bed.at(100_000);
        assert_eq!(statuses(&pair.poll().0), [status::REMOTE_ACCESS], "{nic:?}");
        assert_eq!(
            (pair.a.qp.state(), pair.b.qp.state()),
            (State::Error, State::Error),
            "{nic:?}"
        );
        assert_eq!(events(&bed.nodes[1]), told, "{nic:?}");
    }
}

#[test]
fn own_memory_that_a_key_does_not_allow_is_a_protection_error_on_mlx5_and_an_operation_error_on_soft_roce()
 {
    for (nic, refused) in [
        (Nic::Mlx5, IBV_WC_LOC_PROT_ERR),
        (Nic::SoftRoce, IBV_WC_LOC_QP_OP_ERR),
    ] {
        for (operation, expected) in [
            (Operation::Write, refused),
            (Operation::Send, refused),
            (Operation::Read, IBV_WC_LOC_PROT_ERR),
        ] {
            let bed = Bed::of(nic);
            let pair = bed.pair(0, 7);
            pair.b.qp.post_receive(1, &[pair.b.sge(0, 100)]).unwrap();
            let wild = Sge {
                lkey: pair.a.key ^ 1,
                ..pair.a.sge(0, 8)
            };
            pair.a
                .post(
                    operation,
                    &[wild],
                    None,
                    (pair.b.bytes.as_ptr() as u64, pair.b.key),
                )
                .unwrap();
            bed.at(100_000);
            assert_eq!(
                statuses(&pair.poll().0),
                [expected],
                "{nic:?} {operation:?}"
            );
        }
        // A receive whose key does not allow its memory: the sender gets the same status from both
        // devices.
        let bed = Bed::of(nic);
        let pair = bed.pair(0, 7);
        pair.b
            .qp
            .post_receive(
                1,
                &[Sge {
                    lkey: pair.b.key ^ 1,
                    ..pair.b.sge(0, 100)
                }],
            )
            .unwrap();
        pair.a
            .post(Operation::Send, &[pair.a.sge(0, 8)], None, (0, 0))
            .unwrap();
        bed.at(100_000);
        let (a, b) = pair.poll();
        assert_eq!(
            (statuses(&a), statuses(&b)),
            (vec![status::REMOTE_OPERATION], vec![refused]),
            "{nic:?}"
        );
    }
}

#[test]
fn a_receive_that_is_too_short_is_a_length_error_on_mlx5_and_has_the_senders_status_on_soft_roce() {
    for (nic, expected) in [
        (Nic::Mlx5, IBV_WC_LOC_LEN_ERR),
        (Nic::SoftRoce, IBV_WC_REM_INV_REQ_ERR),
    ] {
        let bed = Bed::of(nic);
        let pair = bed.pair(0, 7);
        pair.b.qp.post_receive(1, &[pair.b.sge(0, 7)]).unwrap();
        pair.a
            .post(Operation::Send, &[pair.a.sge(0, 8)], None, (0, 0))
            .unwrap();
        bed.at(100_000);
        let (a, b) = pair.poll();
        assert_eq!(
            (statuses(&a), statuses(&b)),
            (vec![status::REMOTE_INVALID], vec![expected]),
            "{nic:?}"
        );
    }
}

#[test]
fn a_send_that_is_too_large_to_post_is_enomem_on_mlx5_and_einval_on_soft_roce() {
    for (nic, refused) in [(Nic::Mlx5, libc::ENOMEM), (Nic::SoftRoce, libc::EINVAL)] {
        let bed = Bed::of(nic);
        let pair = bed.pair(0, 7);
        let pieces = |count: usize| vec![pair.a.sge(0, 8); count];
        let to = (pair.b.bytes.as_ptr() as u64, pair.b.key);
        let post = |count| pair.a.post(Operation::Write, &pieces(count), None, to);
        assert_eq!(
            (post(2), post(3)),
            (Ok(()), Err(refused)),
            "{nic:?}: it was made for two pieces"
        );
        let inline = |bytes| pair.a.post_inline(bytes, &pair.b);
        assert_eq!(
            (inline(64), inline(65)),
            (Ok(()), Err(refused)),
            "{nic:?}: and for 64 inline bytes"
        );
        // A receive gets the same error from both devices.
        let receive = |count: usize| pair.b.qp.post_receive(1, &pieces(count));
        assert_eq!(
            (receive(2), receive(3)),
            (Ok(()), Err(libc::EINVAL)),
            "{nic:?}"
        );
    }
}

#[test]
fn a_port_announces_messages_of_a_gibibyte_as_mlx5_and_of_8_mib_as_soft_roce() {
    for (nic, bytes) in [(Nic::Mlx5, 1 << 30), (Nic::SoftRoce, 8 << 20)] {
        let bed = Bed::of(nic);
        assert!(
            bed.nodes[0]
                .devices()
                .iter()
                .all(|device| device.max_message_bytes == bytes),
            "{nic:?}"
        );
    }
}

#[test]
fn mlx5_and_soft_roce_agree_elsewhere() {
    let told = Nic::ALL.map(|nic| {
        let bed = Bed::of(nic);
        // A key of another protection domain.
        let pair = bed.pair(0, 7);
        // SAFETY: the bytes live as long as their end, and are read only between the tests' steps.
        let key = unsafe {
            pair.b.node.register(
                (0, 5),
                pair.b.bytes.as_ptr() as usize,
                pair.b.bytes.len(),
                7,
            )
        }
        .unwrap();
        pair.a
            .post(
                Operation::Write,
                &[pair.a.sge(0, 8)],
                None,
                (pair.b.bytes.as_ptr() as u64, key),
            )
            .unwrap();
        // Beyond a region's end.
        let beyond = bed.pair(0, 7);
        let end = beyond.b.bytes.as_ptr() as u64 + beyond.b.bytes.len() as u64 - 4;
        beyond
            .a
            .post(
                Operation::Write,
                &[beyond.a.sge(0, 8)],
                None,
                (end, beyond.b.key),
            )
            .unwrap();
        // There is never a receive.
        let patient = bed.pair(0, 7);
        patient.a.write(8, Some(1), &patient.b);
        bed.at(100_000);
        let refused = [
            statuses(&pair.poll().0),
            statuses(&beyond.poll().0),
            statuses(&patient.poll().0),
        ];
        // An address that does not resolve.
        control(
            &bed.settings.dir,
            &bed.settings.fabric,
            Some(0),
            "x0",
            Action::Unresolved(1),
        )
        .unwrap();
        let end = End::new(&bed.nodes[0], 0);
        end.qp.change(Change::Init { access: 7, port: 1 }).unwrap();
        let answer = end.qp.change(Change::ReadyToReceive(PathToPeer {
            mtu_bytes: 4096,
            remote_qp: end.qp.number(),
            receive_psn: 5,
            remote_gid: bed.nodes[0].devices()[0].gids[1],
            own_gid_index: 1,
            min_rnr_timer: 1,
        }));
        (refused, answer, end.qp.post_receive(1, &[]))
    });
    let refused = [
        vec![status::REMOTE_ACCESS],
        vec![status::REMOTE_ACCESS],
        vec![],
    ];
    assert_eq!(told[0], (refused, Err(libc::ETIMEDOUT), Ok(())));
    assert_eq!(told[0], told[1]);
}
