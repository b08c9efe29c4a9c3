//! A fault in this plugin: what is left of a connection after a panic went through its data path, and what the peer hears. Both ends
//! stand in this process, on the fabric of the simulation.

#![allow(unsafe_code)]

mod common;
mod sim;

use nccl_net_spark::comm::half::Shared;
use nccl_net_spark::comm::peer::Presence;
use nccl_net_spark::wire::control::Letter;
use sim::fabric::{Fabric, Pair};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Both wardens look after their ends, and hear what the other has to say.
fn talk(fabric: &mut Fabric, pair: &mut Pair) {
    for _ in 0..10 {
        fabric.pass(1_000_000);
        let (now, mut letters) = (fabric.now(), [Vec::<Letter>::new(), Vec::new()]);
        for (side, warden) in pair.wardens.iter_mut().enumerate() {
            warden.tend(now, false, &mut |letter| {
                letters[1 - side].push(letter);
                true
            });
        }
        for (warden, letters) in pair.wardens.iter_mut().zip(letters) {
            letters.iter().for_each(|letter| warden.hear(letter, now));
        }
    }
}

#[test]
fn a_data_path_with_a_fault_is_left_alone_and_both_ends_part_in_good_order() {
    let mut fabric = Fabric::new();
    for broken in [0, 1] {
        let mut pair = fabric.connect(2, 1);
        let halves: [Arc<dyn Shared>; 2] = [pair.send.clone(), pair.recv.clone()];
        talk(&mut fabric, &mut pair);
        // The service thread's looks do not count as a use: one that nobody uses is looked at each time.
        assert!(halves.iter().all(|half| half.is_unused()));
        let fault = catch_unwind(AssertUnwindSafe(|| {
            let _held = (pair.send.enter().filter(|_| broken == 0), pair.recv.enter().filter(|_| broken == 1));
            panic!("on purpose");
        }));
        assert!(fault.is_err());
        let mut is_lent = false;
        halves[broken].borrow(&mut |_| is_lent = true);
        assert!(!is_lent, "it may be half-changed");
        talk(&mut fabric, &mut pair);
        let mut is_lent = false;
        halves[broken].borrow(&mut |_| is_lent = true);
        assert!(!is_lent, "it may be half-changed");
        // What the other end says does not make its warden touch it, or take the peer for a liar.
        pair.wardens[1 - broken].close();
        talk(&mut fabric, &mut pair);
        assert!(matches!(pair.ends[broken].peer.presence(), Presence::Closed { .. }), "the other's goodbye is heard");
        pair.wardens[broken].close();
        talk(&mut fabric, &mut pair);
        let heard = pair.ends[1 - broken].peer.presence();
        assert_eq!(heard, Presence::Closed { delivered: 0 }, "its goodbye is heard");
    }
}
