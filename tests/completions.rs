//! Completion queues in virtual time. A stopped lane flushes everything that it has posted, and its
//! completion queue has room for all these completions. Lost completions cost the sender the rail,
//! and the receiver the connection.

#![allow(unsafe_code)]

mod common;
mod sim;

use nccl_net_spark::comm::datapath::lane::LaneWrite;
use nccl_net_spark::comm::datapath::shared::SharedPath;
use sim::fabric::Fabric;

/// Number of writes that a queue pair can hold (`comm/datapath/lane.rs`).
const WRITES: usize = 128;
/// Number of posted receives on a receiver's queue pair (`comm/datapath/lane.rs`).
const RECEIVES: usize = 32 * 8 + 64;

// One test only: a process has one fabric and one virtual clock.
#[test]
fn a_completion_queue_holds_a_full_flush_and_lost_completions_cost_the_rail() {
    let mut fabric = Fabric::new();
    a_lane_holds_a_full_flush(&mut fabric);
    lost_completions_cost_the_sender_its_rail(&mut fabric);
    lost_completions_cost_the_receiver_its_connection(&mut fabric);
}

fn a_lane_holds_a_full_flush(fabric: &mut Fabric) {
    const QUEUES: usize = 2;
    let pair = fabric.connect(1, QUEUES);
    // With the rail down, no write completes.
    fabric.set(0, false);
    let write = LaneWrite {
        signaled: true,
        ..LaneWrite::default()
    };
    let paths: [&dyn SharedPath; 2] = [&*pair.send, &*pair.recv];
    for (path, expected) in paths
        .into_iter()
        .zip([QUEUES * WRITES, QUEUES * (WRITES + RECEIVES)])
    {
        let mut path = path.borrow().unwrap();
        let lane = &mut path.rails().lanes[0];
        while lane.has_room(0) && lane.has_room(1) {
            lane.write_on_each(&write).unwrap();
        }
        assert!(!lane.has_room(0) && !lane.has_room(1));
        lane.set_aside();
        let mut lost = lane.take_lost().unwrap();
        lost.fail();
        // The fabric's polls may return fewer completions than are pending.
        for _ in 0..10_000 {
            lost.poll().unwrap();
        }
        assert!(
            lost.completions()
                .iter()
                .all(|completion| completion.status() != 0)
        );
        assert_eq!(
            lost.completions().len(),
            expected,
            "one completion per request"
        );
    }
    fabric.set(0, true);
}

fn lost_completions_cost_the_sender_its_rail(fabric: &mut Fabric) {
    let mut pair = fabric.connect(2, 1);
    let cq = number_of(&*pair.send);
    let now = fabric.now();
    // Each driver ignores the completion queues of other connections.
    pair.drivers[1].completions_lost(cq, now);
    assert!(pair.drivers[1].is_whole());
    pair.drivers[0].completions_lost(cq, now);
    assert!(!pair.drivers[0].is_whole() && !pair.send.borrow().unwrap().rails().lanes[0].is_open());
    assert!(pair.send.borrow().unwrap().rails().status.check().is_ok());
    for _ in 0..2000 {
        fabric.pass(5_000_000);
        let now = fabric.now();
        for side in [0, 1] {
            let mut frames = Vec::new();
            fabric.hosts[side].process().tick(now);
            pair.drivers[side].poll(now, true, &mut |frame| {
                frames.push(frame);
                true
            });
            frames
                .iter()
                .for_each(|frame| pair.drivers[1 - side].receive_frame(frame, now));
        }
        if pair.drivers.iter().all(|driver| driver.is_whole()) {
            return;
        }
    }
    panic!("the rail does not come back: {}", pair.drivers[0].text());
}

fn lost_completions_cost_the_receiver_its_connection(fabric: &mut Fabric) {
    let mut pair = fabric.connect(2, 1);
    let cq = number_of(&*pair.recv);
    let now = fabric.now();
    pair.drivers[1].completions_lost(cq, now);
    // The rails tell the peer of the failure before they stop.
    for _ in 0..20 {
        fabric.pass(5_000_000);
        let now = fabric.now();
        pair.drivers[1].poll(now, true, &mut |_| true);
    }
    let error = pair
        .recv
        .borrow()
        .unwrap()
        .rails()
        .status
        .check()
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("x0:1") && error.contains("IBV_EVENT_CQ_ERR"),
        "{error}"
    );
    assert!(
        pair.recv
            .borrow()
            .unwrap()
            .rails()
            .lanes
            .iter()
            .all(|lane| !lane.is_open()),
        "the rails go with it"
    );
}

/// Returns the number of the completion queue of a path's first lane.
fn number_of(path: &dyn SharedPath) -> usize {
    let mut path = path.borrow().unwrap();
    let lane = &path.rails().lanes[0];
    (1..1 << 20).find(|cq| lane.has_cq(*cq)).unwrap()
}
