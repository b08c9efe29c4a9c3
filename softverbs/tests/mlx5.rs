//! Behaviours of mlx5 that other devices do not share. `core` tests more of them: events, and
//! completion queues that overrun.

mod common;

use common::*;
use softverbs::completion_queue::{Completion, CompletionQueue};
use softverbs::control::{Action, control};
use softverbs::path::PathFault;
use softverbs::queue_pair::Change;
use softverbs::status;
use softverbs::work_request::{Operation, Sge};
use verbs_sys::IBV_EVENT_CQ_ERR;

fn statuses(completions: &[Completion]) -> Vec<u32> {
    completions
        .iter()
        .map(|completion| completion.status)
        .collect()
}

#[test]
fn sends_that_are_flushed_make_one_event_where_their_queue_is_full() {
    let bed = Bed::new();
    let cq = CompletionQueue::new(&bed.nodes[0], 0, 2).unwrap();
    let pair = Pair {
        a: End::with_queue(&bed.nodes[0], 0, &cq),
        b: End::new(&bed.nodes[1], 0),
    };
    let pair = bed.connect(pair, [1, 0], 0, 7);
    (0..6).for_each(|_| pair.a.write(10, None, &pair.b));
    pair.a.qp.change(Change::Error).unwrap();
    assert_eq!(pair.a.poll(), []);
    let events: Vec<_> = std::iter::from_fn(|| bed.nodes[0].next_event(0))
        .map(|event| event.kind)
        .collect();
    assert_eq!(events, [IBV_EVENT_CQ_ERR]);
}

#[test]
fn seven_retries_have_an_end() {
    let bed = Bed::new();
    let ends = Pair {
        a: End::new(&bed.nodes[0], 0),
        b: End::new(&bed.nodes[1], 0),
    };
    let pair = bed.connect_with(ends, [1, 0], 0, (7, 7));
    let silent = Action::Path(PathFault::Silent, true);
    control(&bed.settings.dir, &bed.settings.fabric, None, "x0", silent).unwrap();
    pair.a.write(8, None, &pair.b);
    bed.at(4096 * 256 * 8);
    assert_eq!(pair.poll().0, []);
    bed.at(60_000_000_000);
    assert_eq!(statuses(&pair.poll().0), [status::RETRY_EXCEEDED]);
}

/// With adaptive retransmission, the NIC's profile and not the program decides when a silent peer
/// is reported.
#[test]
fn a_destroyed_peer_is_reported_after_the_time_of_the_rails_profile() {
    const SECOND: u64 = 1_000_000_000;
    let bed = Bed::wired(
        "rail x2 netdev=e2 port=p0 link=A cable=c function=2 line=0 qp=0 latency=0 silence=4000",
    );
    for (device, silence_ns) in [(0, 2 * (4096 << 8)), (2, 4 * SECOND)] {
        let pair = bed.pair(device, 7);
        pair.a.write(8, None, &pair.b);
        bed.at(bed.now_ns() + 100_000);
        assert_eq!(statuses(&pair.poll().0), [0], "rail x{device}");
        pair.b.qp.destroy();
        let posted_ns = bed.now_ns();
        pair.a.write(8, None, &pair.b);
        bed.at(posted_ns + silence_ns - 1);
        assert_eq!(pair.a.poll(), [], "rail x{device}");
        bed.at(posted_ns + silence_ns + 1);
        let reported = statuses(&pair.a.poll());
        assert_eq!(reported, [status::RETRY_EXCEEDED], "rail x{device}");
    }
}

#[test]
fn own_memory_that_a_key_does_not_allow_is_a_protection_error() {
    for operation in [Operation::Write, Operation::Send, Operation::Read] {
        let bed = Bed::new();
        let pair = bed.pair(0, 7);
        pair.b.qp.post_receive(1, &[pair.b.sge(0, 100)]).unwrap();
        let wild = Sge {
            lkey: pair.a.key ^ 1,
            ..pair.a.sge(0, 8)
        };
        let to = (pair.b.bytes.as_ptr() as u64, pair.b.key);
        pair.a.post(operation, &[wild], None, to).unwrap();
        bed.at(100_000);
        assert_eq!(
            statuses(&pair.poll().0),
            [status::LOCAL_PROTECTION],
            "{operation:?}"
        );
    }
    // A receive whose key does not allow its memory.
    let bed = Bed::new();
    let pair = bed.pair(0, 7);
    let wild = Sge {
        lkey: pair.b.key ^ 1,
        ..pair.b.sge(0, 100)
    };
    pair.b.qp.post_receive(1, &[wild]).unwrap();
    pair.a
        .post(Operation::Send, &[pair.a.sge(0, 8)], None, (0, 0))
        .unwrap();
    bed.at(100_000);
    let (a, b) = pair.poll();
    assert_eq!(
        (statuses(&a), statuses(&b)),
        (
            vec![status::REMOTE_OPERATION],
            vec![status::LOCAL_PROTECTION]
        )
    );
}

#[test]
fn a_send_that_is_too_large_to_post_is_enomem_and_a_receive_einval() {
    let bed = Bed::new();
    let pair = bed.pair(0, 7);
    let pieces = |count: usize| vec![pair.a.sge(0, 8); count];
    let to = (pair.b.bytes.as_ptr() as u64, pair.b.key);
    let post = |count| pair.a.post(Operation::Write, &pieces(count), None, to);
    assert_eq!(
        (post(2), post(3)),
        (Ok(()), Err(libc::ENOMEM)),
        "it was made for two pieces"
    );
    let inline = |bytes| pair.a.post_inline(bytes, &pair.b);
    assert_eq!(
        (inline(64), inline(65)),
        (Ok(()), Err(libc::ENOMEM)),
        "and for 64 inline bytes"
    );
    let receive = |count: usize| pair.b.qp.post_receive(1, &pieces(count));
    assert_eq!((receive(2), receive(3)), (Ok(()), Err(libc::EINVAL)));
}
