//! Clear-to-send entries in virtual time. An entry for one buffer is inline in its work request, so
//! that the NIC need not fetch it. Without a rail, no entry is repeated.

#![allow(unsafe_code)]

mod common;
mod sim;

use nccl_net_spark::comm::RecvPart;
use nccl_net_spark::comm::datapath::shared::SharedPath;
use proto::wire::control::Received;
use proto::wire::ids::LaneId;
use proto::wire::mailbox::MAILBOX_BYTES;
use sim::fabric::{Fabric, Start};
use verbs::Region;

const BYTES: usize = 64;

// One test only: a process has one fabric and one virtual clock.
#[test]
fn a_clear_to_send_of_one_buffer_travels_in_its_work_request_and_waits_while_there_is_no_rail() {
    let mut fabric = Fabric::new();
    assert!(is_inline(&mut fabric, &[0], 1));
    assert!(is_inline(&mut fabric, &[0, 1, 2], 1));
    // The second cable of a triangle, then lanes in another order. In both cases the numbers of
    // lanes and rails differ.
    assert!(is_inline(&mut fabric, &[1, 2], 1));
    assert!(is_inline(&mut fabric, &[2, 0], 1));
    // The entries of a group do not fit into a work request. So this case shows that the test can
    // tell inline entries from others.
    assert!(!is_inline(&mut fabric, &[1, 2], 2));
    assert!(!has_repeats_without_rails(&mut fabric));
}

/// Grants a receive, and loses all rails. Returns true if the receiver still asks the service
/// thread for polls, although no poll could repeat the grant.
fn has_repeats_without_rails(fabric: &mut Fabric) -> bool {
    let pair = fabric.connect_over(&[0, 1], 1, Start::default());
    let addr = fabric.to.as_ptr() as u64;
    let memory = &*fabric.into;
    let buffer = RecvPart {
        addr,
        bytes: BYTES,
        tag: 0,
        memory,
    };
    pair.recv
        .enter()
        .unwrap()
        .irecv(&pair.contexts[1], &[buffer], false)
        .unwrap()
        .unwrap();
    let mut path = pair.recv.borrow().unwrap();
    for lane in LaneId::all(2) {
        path.rails().set_aside(lane);
    }
    for lane in LaneId::all(2) {
        path.recover(&pair.contexts[1], lane, &Received::default())
            .unwrap();
    }
    path.has_repeats()
}

/// Grants a receive of `parts` buffers over these rails while no NIC may read the memory of grants.
/// Returns true if the sender gets the grant. In that case also checks that messages arrive.
fn is_inline(fabric: &mut Fabric, rails: &[usize], parts: usize) -> bool {
    let pair = fabric.connect_over(rails, 1, Start::default());
    fabric.to[..parts * BYTES].fill(0);
    fabric.from[..BYTES].fill(7);
    let part = |at: usize| RecvPart {
        addr: fabric.to.as_ptr() as u64 + (at * BYTES) as u64,
        bytes: BYTES,
        tag: at as i32,
        memory: &fabric.into,
    };
    let buffers: Vec<RecvPart<'_>> = (0..parts).map(part).collect();
    let elsewhere = Region::new(MAILBOX_BYTES).unwrap();
    for lane in &mut pair.recv.borrow().unwrap().rails().lanes {
        lane.register_mailbox(&elsewhere).unwrap();
    }
    let receive = pair
        .recv
        .enter()
        .unwrap()
        .irecv(&pair.contexts[1], &buffers, false)
        .unwrap()
        .unwrap();
    (0..100).for_each(|_| fabric.pass(10_000));
    for tag in 0..parts {
        let from = fabric.from.as_ptr() as u64;
        let mut path = pair.send.enter().unwrap();
        if path
            .isend(&pair.contexts[0], from, BYTES, tag as i32, &fabric.out)
            .unwrap()
            .is_none()
        {
            return false;
        }
    }
    (0..100).for_each(|_| fabric.pass(10_000));
    while !pair
        .recv
        .enter()
        .unwrap()
        .test(&pair.contexts[1], receive, |_, _| {})
        .unwrap()
    {}
    assert!(fabric.to[..parts * BYTES].iter().all(|byte| *byte == 7));
    true
}
