//! Machines cabled with each other: which rails reach each other, and the errors for all others.

#![allow(unsafe_code)]

mod common;

use common::{Bed, End, Pair};
use softverbs::control::{Action, control, prepare};
use softverbs::profile::Profile;
use softverbs::queue_pair::{Change, PathToPeer};
use softverbs::settings::Settings;
use softverbs::work_request::Operation;

/// Rails x0 and x1 are on cable c, rail y1 on cable d. The wire joins port c of the first machine
/// to port d of the second.
const CROSSED: &str = "cable d payload=4000
    rail y1 netdev=e2 port=p1 link=A cable=d function=2 line=8000 qp=0 latency=1000
    wire w ends=0.c,1.d";

fn ready_to_receive(end: &End, to: &End, device: usize) -> Result<(), i32> {
    end.qp.change(Change::Init { access: 7, port: 1 }).unwrap();
    end.qp.change(Change::ReadyToReceive(PathToPeer {
        mtu_bytes: 4096,
        remote_qp: to.qp.number(),
        receive_psn: 5,
        remote_gid: *to.node.devices()[device].gids.last().unwrap(),
        own_gid_index: 0,
        min_rnr_timer: 1,
    }))
}

#[test]
fn a_cable_connects_rails_of_different_names_at_its_rate() {
    let bed = Bed::wired(CROSSED);
    let pair = Pair {
        a: End::new(&bed.nodes[0], 0),
        b: End::new(&bed.nodes[1], 2),
    };
    ready_to_receive(&pair.a, &pair.b, 2).unwrap();
    ready_to_receive(&pair.b, &pair.a, 0).unwrap();
    for end in [&pair.a, &pair.b] {
        end.qp
            .change(Change::ReadyToSend {
                timeout: 8,
                retry_count: 7,
                rnr_retry: 7,
                send_psn: 5,
            })
            .unwrap();
    }
    let to = (pair.b.bytes.as_ptr() as u64, pair.b.key);
    pair.a
        .post(Operation::Write, &[pair.a.sge(7, 8000)], None, to)
        .unwrap();
    // 8,000 bytes, at 8000 Mb/s out of x0 and at 4000 Mb/s into y1: 16 us, and 1 us of latency.
    bed.at(16_999);
    assert!(pair.poll().0.is_empty());
    bed.at(17_001);
    let done = pair.poll().0;
    assert_eq!((done.len(), done[0].status), (1, 0));
    assert_eq!(pair.b.bytes[..8000], pair.a.bytes[7..8007]);
    // With x0 at 2000 Mb/s, x0's end is the slower one: 32 us, and 1 us of latency.
    control(
        &bed.settings.dir,
        &bed.settings.fabric,
        Some(0),
        "x0",
        Action::Slow(0.25),
    )
    .unwrap();
    bed.at(100_000);
    pair.a
        .post(Operation::Write, &[pair.a.sge(7, 8000)], None, to)
        .unwrap();
    bed.at(132_999);
    assert!(pair.poll().0.is_empty());
    bed.at(133_001);
    assert_eq!(pair.poll().0.len(), 1);
    // The port at the other end is on this path too, under its own name: its faults count.
    control(
        &bed.settings.dir,
        &bed.settings.fabric,
        Some(1),
        "y1",
        Action::Down,
    )
    .unwrap();
    pair.a
        .post(Operation::Write, &[pair.a.sge(0, 8)], None, to)
        .unwrap();
    bed.at(1_000_000);
    assert!(pair.poll().0.is_empty());
    control(
        &bed.settings.dir,
        &bed.settings.fabric,
        Some(1),
        "y1",
        Action::Up,
    )
    .unwrap();
    bed.at(2_000_000);
    assert_eq!(pair.poll().0.len(), 1);
}

#[test]
fn an_address_without_a_cable_times_out() {
    let bed = Bed::wired(&format!("{CROSSED}\nwire v ends=0.d,2.c"));
    let ends = |node: usize| [0, 1, 2].map(|device| End::new(&bed.nodes[node], device));
    let here = ends(0);
    let there = ends(1);
    // The first machine's y1 leads to the third machine. The second machine's x0 has no cable: its
    // port is down, and has only a link-local address.
    assert_eq!(
        ready_to_receive(&here[2], &there[2], 2),
        Err(libc::ETIMEDOUT)
    );
    assert_eq!(
        ready_to_receive(&here[2], &there[0], 0),
        Err(libc::ETIMEDOUT)
    );
    assert_eq!(
        ready_to_receive(&there[0], &here[0], 0),
        Err(libc::ENETUNREACH),
        "its own port is down"
    );
    assert_eq!(
        (
            bed.nodes[1].port_up(0),
            bed.nodes[1].port_up(2),
            bed.nodes[0].port_up(2)
        ),
        (false, true, true)
    );
    assert_eq!(bed.nodes[1].devices()[0].gids.len(), 1);
    // Any rail of a port reaches any rail at the other end.
    assert_eq!(ready_to_receive(&here[1], &there[2], 2), Ok(()));
}

#[test]
fn a_fabric_must_have_the_number_of_nodes_that_its_cables_are_for() {
    let bed = Bed::wired(CROSSED);
    for (node, why) in [
        (None, "all 2 machines"),
        (
            Some(2),
            "SOFTVERBS_NODE=2: the profile has cables for 2 machines, 0 to 1",
        ),
    ] {
        let settings = Settings {
            node,
            ..bed.settings.clone()
        };
        let error = softverbs::fabric::Node::enter(&settings)
            .map(|_| ())
            .unwrap_err();
        assert!(error.contains(why), "{error}");
    }
    let profile = Profile::load("spark-ring", 1.0).unwrap();
    let error = prepare(&bed.settings.dir, "five", &profile, 5)
        .map(|_| ())
        .unwrap_err();
    assert_eq!(
        error,
        "profile spark-ring has cables for 4 nodes, not for 5"
    );
}
