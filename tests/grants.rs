//! Clear-to-sends in virtual time: one of a single buffer travels in its work request, so the NIC need not fetch it.

#![allow(unsafe_code)]

mod common;
mod sim;

use nccl_net_spark::comm::RecvPart;
use nccl_net_spark::comm::datapath::path::SharedPath;
use nccl_net_spark::verbs::Region;
use nccl_net_spark::wire::mailbox::MAILBOX_BYTES;
use sim::fabric::{Fabric, Start};

const BYTES: usize = 64;

// One test: there is one fabric in a process, and its time is the process's.
#[test]
fn a_clear_to_send_of_one_buffer_travels_in_its_work_request() {
    let mut fabric = Fabric::new();
    assert!(is_inline(&mut fabric, &[0], 1));
    assert!(is_inline(&mut fabric, &[0, 1, 2], 1));
    // The second cable of a triangle, and lanes in another order: no lane has its rail's number.
    assert!(is_inline(&mut fabric, &[1, 2], 1));
    assert!(is_inline(&mut fabric, &[2, 0], 1));
    // A group is too long for a work request, so this test can tell the two apart.
    assert!(!is_inline(&mut fabric, &[1, 2], 2));
}

/// Grants a receive of `parts` buffers over these rails, where no NIC may read the memory that grants are
/// kept in. True if the sender gets it; messages then arrive by it.
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
    for lane in pair.recv.borrow().unwrap().lanes() {
        lane.register_mailbox(&elsewhere).unwrap();
    }
    let receive = pair.recv.enter().unwrap().irecv(&pair.contexts[1], &buffers, false).unwrap().unwrap();
    (0..100).for_each(|_| fabric.pass(10_000));
    for tag in 0..parts {
        let from = fabric.from.as_ptr() as u64;
        let mut path = pair.send.enter().unwrap();
        if path.isend(&pair.contexts[0], from, BYTES, tag as i32, &fabric.out).unwrap().is_none() {
            return false;
        }
    }
    (0..100).for_each(|_| fabric.pass(10_000));
    while !pair.recv.enter().unwrap().test(&pair.contexts[1], receive, |_, _| {}).unwrap() {}
    assert!(fabric.to[..parts * BYTES].iter().all(|byte| *byte == 7));
    true
}
