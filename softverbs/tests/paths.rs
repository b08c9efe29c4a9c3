//! Faults of the path between two ports that are up, in virtual time.

#![allow(unsafe_code)]

mod common;

use common::*;
use softverbs::completion_queue::Completion;
use softverbs::control::{Action, control};
use softverbs::counters::Counter;
use softverbs::fabric::Node;
use softverbs::path::PathFault;
use softverbs::profile::Profile;
use softverbs::queue_pair::{Change, PathToPeer};
use softverbs::settings::Settings;
use softverbs::status;
use softverbs::work_request::Operation;
use std::sync::Arc;
use std::time::Duration;
use verbs_sys::{IBV_EVENT_GID_CHANGE, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR};

/// Index of a device's link-local GID while its addresses have not left.
const LINK_LOCAL: usize = 0;
/// Index of a device's IPv4 GID.
const IPV4: usize = 1;
/// Two tries of 4096 x 2^8 ns, after which a queue pair fails.
const PATIENCE_NS: u64 = 2 * 4096 * 256;
const SECOND_NS: u64 = 1_000_000_000;

fn set(bed: &Bed, node: usize, action: Action) {
    control(
        &bed.settings.dir,
        &bed.settings.fabric,
        Some(node),
        "x0",
        action,
    )
    .unwrap();
}

fn statuses(completions: &[Completion]) -> Vec<u32> {
    completions
        .iter()
        .map(|completion| completion.status)
        .collect()
}

fn resolve(end: &End, to: &End, gid: usize, mtu_bytes: u32) -> Result<(), i32> {
    resolve_from(end, to, gid, gid as u8, mtu_bytes)
}

fn resolve_from(
    end: &End,
    to: &End,
    gid: usize,
    own_gid_index: u8,
    mtu_bytes: u32,
) -> Result<(), i32> {
    end.qp.change(Change::Reset).unwrap();
    end.qp.change(Change::Init { access: 7, port: 1 }).unwrap();
    end.qp.change(Change::ReadyToReceive(PathToPeer {
        mtu_bytes,
        remote_qp: to.qp.number(),
        receive_psn: 5,
        remote_gid: to.node.devices()[to.device].gids[gid],
        own_gid_index,
        min_rnr_timer: 1,
    }))
}

/// Makes a queue pair on each machine.
fn unconnected(bed: &Bed) -> Pair {
    Pair {
        a: End::new(&bed.nodes[0], 0),
        b: End::new(&bed.nodes[1], 0),
    }
}

/// Makes a queue pair on each machine, and connects both with each other by their GIDs of index
/// `gid`.
fn connected(bed: &Bed, gid: usize, mtu_bytes: u32) -> Pair {
    let pair = unconnected(bed);
    for (this, that) in [(&pair.a, &pair.b), (&pair.b, &pair.a)] {
        resolve(this, that, gid, mtu_bytes).unwrap();
    }
    get_ready_to_send(&pair);
    pair
}

fn get_ready_to_send(pair: &Pair) {
    for end in [&pair.a, &pair.b] {
        end.qp
            .change(Change::ReadyToSend {
                timeout: 8,
                retry_count: 1,
                rnr_retry: 7,
                send_psn: 5,
            })
            .unwrap();
    }
}

/// Lets both engines work, and returns the statuses of the completions at `a` and at `b`.
fn told(pair: &Pair) -> [Vec<u32>; 2] {
    let (early, b) = pair.poll();
    let late = pair.b.poll();
    [statuses(&early), statuses(&[b, late].concat())]
}

#[test]
fn packets_on_a_silent_rail_are_lost_although_its_port_is_up() {
    let bed = Bed::new();
    let set = |is_silent| {
        control(
            &bed.settings.dir,
            &bed.settings.fabric,
            Some(1),
            "x0",
            Action::Path(PathFault::Silent, is_silent),
        )
        .unwrap();
        bed.nodes.iter().for_each(|node| node.watch_ports());
    };
    set(true);
    // The address resolves.
    let dead = bed.pair(0, 7);
    let late = bed.pair(0, 7);
    let is_quiet = |node: &Arc<Node>| node.port_up(0) && node.next_event(0).is_none();
    assert!(bed.nodes.iter().all(is_quiet), "a port reports the fault");
    dead.a.write(8, None, &dead.b);
    bed.at(2_000_000);
    assert_eq!(dead.poll(), (vec![], vec![]));
    // Two tries of 4096 x 2^8 ns.
    bed.at(2_097_153);
    assert_eq!(
        dead.poll().0.iter().map(|c| c.status).collect::<Vec<_>>(),
        [status::RETRY_EXCEEDED]
    );
    // A packet that is sent again arrives.
    late.a.write(8, None, &late.b);
    bed.at(3_000_000);
    assert_eq!(late.poll(), (vec![], vec![]));
    set(false);
    bed.at(3_500_000);
    assert_eq!(
        late.poll().0.iter().map(|c| c.status).collect::<Vec<_>>(),
        [0]
    );
}

#[test]
fn an_address_answered_by_the_twin_leads_to_the_twin_while_the_queue_pair_is_connected() {
    let bed = Bed::new();
    set(&bed, 1, Action::Path(PathFault::CrossedArp, true));
    let astray = connected(&bed, IPV4, 4096);
    let [back, reads, good] = [IPV4, IPV4, LINK_LOCAL].map(|gid| connected(&bed, gid, 4096));
    set(&bed, 1, Action::Path(PathFault::CrossedArp, false));
    let later = connected(&bed, IPV4, 4096);
    let before = astray.b.bytes.clone();
    for pair in [&astray, &good, &later] {
        pair.a.write(8, None, &pair.b);
    }
    // From b to a the address resolves correctly. Bytes arrive, but acknowledgements and read
    // answers go to the twin.
    back.a.qp.post_receive(33, &[]).unwrap();
    back.b.write(8, Some(1), &back.a);
    let unread = reads.b.bytes.clone();
    reads
        .b
        .post(
            Operation::Read,
            &[reads.b.sge(0, 8)],
            None,
            (reads.a.bytes.as_ptr() as u64 + 99, reads.a.key),
        )
        .unwrap();
    bed.at(PATIENCE_NS);
    let arrived = back.a.poll();
    assert_eq!(
        arrived
            .iter()
            .map(|c| (c.wr_id, c.status))
            .collect::<Vec<_>>(),
        [(33, 0)]
    );
    assert_eq!(back.a.bytes[9..17], back.b.bytes[..8]);
    assert!(
        [&astray.b, &astray.a, &back.b, &reads.b]
            .iter()
            .all(|end| end.poll().is_empty())
    );
    assert_eq!(
        [&good, &later].map(|pair| statuses(&pair.poll().0)),
        [[0], [0]]
    );
    bed.at(PATIENCE_NS + 1);
    for end in [&astray.a, &back.b, &reads.b] {
        assert_eq!(statuses(&end.poll()), [status::RETRY_EXCEEDED]);
    }
    assert!(astray.b.bytes == before && reads.b.bytes == unread);
}

#[test]
fn an_address_that_goes_takes_its_queue_pairs_along_and_returns_at_another_index() {
    let bed = Bed::new();
    let [there, back] = [IPV4, IPV4].map(|gid| connected(&bed, gid, 4096));
    set(&bed, 1, Action::Addresses(false));
    bed.nodes.iter().for_each(|node| node.watch_ports());
    let events = [0, 1].map(|node: usize| bed.nodes[node].next_event(0).map(|event| event.kind));
    assert_eq!(events, [None, Some(IBV_EVENT_GID_CHANGE)]);
    let unread = back.a.bytes.clone();
    there.a.write(8, None, &there.b);
    back.b.write(8, None, &back.a);
    bed.at(PATIENCE_NS);
    assert_eq!([told(&there), told(&back)].concat(), [[], [], [], []]);
    bed.at(PATIENCE_NS + 1);
    let exceeded = vec![status::RETRY_EXCEEDED];
    assert_eq!(told(&there), [exceeded.clone(), vec![]]);
    assert_eq!(told(&back), [vec![], exceeded]);
    assert!(back.a.bytes == unread, "a packet without a source arrives");
    // The address returns. Its old index stays empty, and so does an old queue pair's source.
    let late = unconnected(&bed);
    assert_eq!(resolve(&late.b, &late.a, IPV4, 4096), Err(libc::ENODATA));
    set(&bed, 1, Action::Addresses(true));
    bed.nodes[1].watch_ports();
    assert!(
        bed.nodes[1]
            .next_event(0)
            .is_some_and(|event| event.kind == IBV_EVENT_GID_CHANGE)
    );
    assert_eq!(resolve(&late.b, &late.a, IPV4, 4096), Err(libc::ENODATA));
    resolve_from(&late.b, &late.a, IPV4, 3, 4096).unwrap();
    resolve(&late.a, &late.b, IPV4, 4096).unwrap();
    get_ready_to_send(&late);
    late.a.write(8, None, &late.b);
    late.b.write(8, None, &late.a);
    bed.at(PATIENCE_NS + 1_000_000);
    let ends: Vec<_> = (0..3).map(|_| told(&late)).collect();
    assert_eq!(
        [0, 1].map(|end| ends.iter().map(|told| told[end].len()).sum::<usize>()),
        [1, 1]
    );
    assert!(
        ends.iter().flatten().flatten().all(|status| *status == 0),
        "{ends:?}"
    );
}

#[test]
fn only_a_rail_with_a_twin_has_its_address_answered_by_another() {
    let alone = "cable d payload=0\n    rail y0 netdev=e2 port=p2 link=A cable=d function=2 line=0 qp=0 latency=0";
    let bed = Bed::wired(alone);
    let error = control(
        &bed.settings.dir,
        &bed.settings.fabric,
        None,
        "y0",
        Action::Path(PathFault::CrossedArp, true),
    );
    assert_eq!(
        error,
        Err("rail y0 has no twin on its cable that could answer ARP for it".to_owned())
    );
    let error =
        Profile::parse("p", &format!("{PROFILE}\n{alone} path=silent,crossed-arp")).unwrap_err();
    assert_eq!(
        error,
        "p: rail y0 has no twin on its cable that could answer ARP for it"
    );
    let error = Profile::parse("p", &format!("{PROFILE}\n{alone} path=silent,slow")).unwrap_err();
    assert!(
        error.contains("path=silent,slow: \"slow\" must be silent, crossed-arp, switch-mtu, "),
        "{error}"
    );
}

#[test]
fn a_switch_for_1500_bytes_drops_what_is_longer_and_only_that() {
    let bed = Bed::new();
    set(&bed, 1, Action::Path(PathFault::SwitchMtu, true));
    for (mtu_bytes, bytes, passes) in [
        (4096, 1024, true),
        (4096, 1025, false),
        (2048, 1025, false),
        (2048, 5000, false),
        (1024, 100_000, true),
    ] {
        let pair = connected(&bed, IPV4, mtu_bytes);
        let begun_ns = bed.now_ns();
        let place = |end: &End| (end.bytes.as_ptr() as u64 + 9, end.key);
        pair.a.write(bytes, None, &pair.b);
        pair.b
            .post(
                Operation::Read,
                &[pair.b.sge(200_000, bytes)],
                None,
                place(&pair.a),
            )
            .unwrap();
        bed.at(begun_ns + PATIENCE_NS);
        let ends = told(&pair);
        let expected = if passes { vec![0] } else { vec![] };
        assert_eq!(ends, [expected.clone(), expected], "{mtu_bytes} {bytes}");
        bed.at(begun_ns + PATIENCE_NS + 1);
        let ends = told(&pair);
        let expected = if passes {
            vec![]
        } else {
            vec![status::RETRY_EXCEEDED]
        };
        assert_eq!(ends, [expected.clone(), expected], "{mtu_bytes} {bytes}");
    }
}

#[test]
fn packets_before_a_dropped_one_are_acknowledged_and_later_ones_wait() {
    let bed = Bed::new();
    let pair = connected(&bed, IPV4, 4096);
    (0..3).for_each(|wr_id| pair.b.qp.post_receive(wr_id, &[]).unwrap());
    set(&bed, 0, Action::Path(PathFault::SwitchMtu, true));
    let post = || {
        [1024, 4096, 8]
            .iter()
            .for_each(|bytes| pair.a.write(*bytes, Some(*bytes), &pair.b))
    };
    let received = |told: &[Completion]| told.iter().map(|c| c.bytes).collect::<Vec<_>>();
    post();
    bed.at(PATIENCE_NS);
    let (a, b) = pair.poll();
    assert_eq!((statuses(&a), received(&b)), (vec![0], vec![1024]));
    // The sender repeats the request until its tries are used up. The tries count from the last
    // answer, which came at the poll above.
    set(&bed, 0, Action::Path(PathFault::SwitchMtu, false));
    bed.at(2 * PATIENCE_NS);
    let (a, b) = pair.poll();
    assert_eq!((statuses(&a), received(&b)), (vec![0, 0], vec![4096, 8]));
    set(&bed, 0, Action::Path(PathFault::SwitchMtu, true));
    (0..3).for_each(|wr_id| pair.b.qp.post_receive(wr_id, &[]).unwrap());
    post();
    bed.at(3 * PATIENCE_NS);
    let (a, b) = pair.poll();
    assert_eq!((statuses(&a), received(&b)), (vec![0], vec![1024]));
    bed.at(4 * PATIENCE_NS + 1);
    assert_eq!(
        statuses(&pair.poll().0),
        [status::RETRY_EXCEEDED, status::FLUSHED]
    );
}

#[test]
fn a_switch_port_drops_all_frames_for_a_while_after_its_link_came_up_and_arp_with_them() {
    let bed = Bed::new();
    let fault = PathFault::SpanningTree(Duration::from_secs(5));
    set(&bed, 1, Action::Path(fault, true));
    // The nodes joined long ago, so the time in which their links drop frames is over.
    bed.at(10 * SECOND_NS);
    let pair = connected(&bed, IPV4, 4096);
    pair.a.write(8, None, &pair.b);
    bed.at(10 * SECOND_NS + 500_000);
    assert_eq!(statuses(&pair.poll().0), [0]);
    [Action::Down, Action::Up].into_iter().for_each(|action| {
        set(&bed, 1, action);
        bed.nodes[1].watch_ports();
    });
    let events: Vec<_> = std::iter::from_fn(|| bed.nodes[1].next_event(0))
        .map(|event| event.kind)
        .collect();
    assert!(
        events == [IBV_EVENT_PORT_ERR, IBV_EVENT_PORT_ACTIVE] && bed.nodes[1].port_up(0),
        "{events:?}"
    );
    bed.at(15 * SECOND_NS + 400_000);
    set(&bed, 1, Action::Up);
    // The machine whose link was down has forgotten its peer's address. The other machine still
    // knows the IPv4 address.
    assert_eq!(resolve(&pair.b, &pair.a, IPV4, 4096), Err(libc::ETIMEDOUT));
    assert_eq!(
        resolve(&pair.a, &pair.b, LINK_LOCAL, 4096),
        Err(libc::ETIMEDOUT)
    );
    assert_eq!(resolve(&pair.a, &pair.b, IPV4, 4096), Ok(()));
    bed.at(15 * SECOND_NS + 500_000);
    for gid in [LINK_LOCAL, IPV4] {
        let pair = connected(&bed, gid, 4096);
        pair.a.write(8, None, &pair.b);
        bed.at(bed.now_ns() + 500_000);
        assert_eq!(statuses(&pair.poll().0), [0]);
    }
}

#[test]
fn packets_dropped_by_a_switch_port_arrive_when_resent() {
    let bed = Bed::new();
    let dead = connected(&bed, IPV4, 4096);
    let late = connected(&bed, IPV4, 4096);
    set(
        &bed,
        1,
        Action::Path(PathFault::SpanningTree(Duration::from_millis(3)), true),
    );
    [Action::Down, Action::Up]
        .into_iter()
        .for_each(|action| set(&bed, 1, action));
    dead.a.write(8, None, &dead.b);
    bed.at(PATIENCE_NS + 1);
    assert_eq!(statuses(&dead.poll().0), [status::RETRY_EXCEEDED]);
    late.a.write(8, None, &late.b);
    bed.at(2_999_999);
    assert_eq!(late.poll(), (vec![], vec![]));
    bed.at(3_500_000);
    assert_eq!(statuses(&late.poll().0), [0]);
}

#[test]
fn the_link_of_a_function_that_returns_comes_up_as_well() {
    let bed = Bed::new();
    set(
        &bed,
        1,
        Action::Path(PathFault::SpanningTree(Duration::from_millis(3)), true),
    );
    bed.at(SECOND_NS);
    [Action::Unplug, Action::Plug]
        .into_iter()
        .for_each(|action| set(&bed, 1, action));
    let try_at = |ns| {
        bed.at(ns);
        let [end, peer] = [1, 0].map(|node| End::new(&bed.nodes[node], 0));
        resolve(&end, &peer, IPV4, 4096)
    };
    assert_eq!(try_at(SECOND_NS + 2_999_999), Err(libc::ETIMEDOUT));
    assert_eq!(try_at(SECOND_NS + 3_000_000), Ok(()));
}

#[test]
fn a_machines_links_come_up_when_its_first_process_joins() {
    let bed = Bed::wired(
        "rail y0 netdev=e2 port=p2 link=A cable=c function=2 line=0 qp=0 latency=0 path=spanning-tree:2",
    );
    bed.at(10 * SECOND_NS);
    let join = |node| {
        Node::enter(&Settings {
            node: Some(node),
            ..bed.settings.clone()
        })
        .unwrap()
    };
    let third = join(2);
    let nodes = [&bed.nodes[0], &bed.nodes[1], &third];
    let try_at = |from: usize, to: usize, ns| {
        bed.at(ns);
        let [end, peer] = [from, to].map(|node| End::new(nodes[node], 2));
        resolve(&end, &peer, IPV4, 4096)
    };
    assert_eq!(try_at(1, 0, 12 * SECOND_NS - 1), Ok(()));
    assert_eq!(try_at(0, 2, 12 * SECOND_NS - 1), Err(libc::ETIMEDOUT));
    assert_eq!(try_at(0, 2, 12 * SECOND_NS), Ok(()));
    let _second_process = join(2);
    assert_eq!(try_at(2, 0, 12 * SECOND_NS), Ok(()));
}

/// Values in the counter files of rail `x0` of a node, in the order of [`Counter::ALL`].
fn shown(bed: &Bed, node: usize) -> Vec<String> {
    let port = bed
        .settings
        .dir
        .join(&bed.settings.fabric)
        .join(format!("sys/nodes/{node}/class/infiniband/x0/ports/1"));
    let names = [
        "counters/port_xmit_packets",
        "counters/port_rcv_packets",
        "hw_counters/packet_seq_err",
    ]
    .into_iter()
    .chain([
        "hw_counters/out_of_sequence",
        "hw_counters/local_ack_timeout_err",
        "hw_counters/rnr_nak_retry_err",
    ]);
    names
        .map(|name| {
            std::fs::read_to_string(port.join(name))
                .unwrap_or_default()
                .trim()
                .to_owned()
        })
        .collect()
}

#[test]
fn lost_packets_are_sent_again_and_counted_at_both_ends() {
    let bed = Bed::new();
    let folder = bed.settings.dir.join(&bed.settings.fabric);
    let profile = Profile::load(&bed.settings.profile, 1.0).unwrap();
    (0..2).for_each(|node| {
        profile
            .write_sysfs(&folder.join(format!("sys/nodes/{node}")))
            .unwrap()
    });
    set(&bed, 1, Action::Path(PathFault::Loss(4), true));
    let pair = bed.pair(0, 7);
    let counted = |node: usize| {
        Counter::ALL.map(|counter| bed.nodes[0].memory.rails[node][0].counted(counter))
    };
    let go = |steps: u64, ns: u64| {
        let step = |_| {
            bed.at(bed.now_ns() + ns);
            told(&pair)[0].clone()
        };
        (0..steps).flat_map(step).collect::<Vec<u32>>()
    };
    // Eleven packets take 14: the peer reports the 4th, the 8th and the 12th as lost.
    pair.a.write(11 * 4096, None, &pair.b);
    assert_eq!(go(100, 10_000), [0]);
    assert_eq!(pair.b.bytes[9..][..11 * 4096], pair.a.bytes[..11 * 4096]);
    assert_eq!(
        (counted(0), counted(1)),
        ([14, 0, 3, 0, 0, 0], [0, 11, 0, 3, 0, 0])
    );
    // The 15th packet arrives. The 16th is lost, and no packet follows it: so its sender waits for
    // 4096 x 2^8 ns.
    pair.a.write(8, None, &pair.b);
    assert_eq!(go(10, 10_000), [0]);
    pair.a.write(8, None, &pair.b);
    assert_eq!(go(1, 1000), [0; 0]);
    assert_eq!(
        go(1, 4096 * 256 - 2000),
        [0; 0],
        "sent again before the timeout"
    );
    assert_eq!(go(10, 10_000), [0]);
    assert_eq!(
        (counted(0), counted(1)),
        ([17, 0, 3, 0, 1, 0], [0, 13, 0, 3, 0, 0])
    );
    // The files: error counts are current, packet counts are as of the last error.
    assert_eq!(
        (shown(&bed, 0).join(" "), shown(&bed, 1).join(" ")),
        ("16  3  1 ".into(), " 12  3  ".into())
    );
    // The packets of the other direction have a count of their own, which decides which of them is
    // lost.
    pair.b.write(5 * 4096, None, &pair.a);
    (0..20).for_each(|_| _ = go(1, 10_000));
    assert_eq!(
        (counted(1), counted(0)[1..4].to_vec()),
        ([6, 13, 1, 3, 0, 0], vec![5, 3, 1])
    );
    set(&bed, 1, Action::Path(PathFault::Loss(4), false));
    pair.a.write(20 * 4096, None, &pair.b);
    assert_eq!(go(100, 10_000), [0]);
    assert_eq!(counted(0)[..3], [37, 5, 3]);
}
