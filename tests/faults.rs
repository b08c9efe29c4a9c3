//! Panics in a data path, and the message that the peer gets, on the simulation's fabric.

#![allow(unsafe_code)]

mod common;
mod sim;

use nccl_net_spark::comm::datapath::peer::PeerState;
use nccl_net_spark::comm::datapath::shared::{NotBorrowed, SharedPath};
use proto::device::PortChange;
use proto::wire::control::ControlFrame;
use sim::fabric::{Fabric, Pair};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

fn talk(fabric: &mut Fabric, pair: &mut Pair) {
    for _ in 0..10 {
        fabric.pass(1_000_000);
        let now = fabric.now();
        let mut frames = [Vec::<ControlFrame>::new(), Vec::new()];
        for (side, driver) in pair.drivers.iter_mut().enumerate() {
            driver.poll(now, false, &mut |frame| {
                frames[1 - side].push(frame);
                true
            });
        }
        for (driver, frames) in pair.drivers.iter_mut().zip(frames) {
            frames
                .iter()
                .for_each(|frame| driver.receive_frame(frame, now));
        }
    }
}

fn break_path(pair: &Pair, side: usize) {
    let fault = catch_unwind(AssertUnwindSafe(|| {
        let _held = (
            pair.send.enter().filter(|_| side == 0),
            pair.recv.enter().filter(|_| side == 1),
        );
        panic!("on purpose");
    }));
    assert!(fault.is_err());
}

#[test]
fn a_data_path_with_a_fault_does_not_say_that_it_has_stopped_a_rail() {
    let mut fabric = sim::lock_fabric();
    let fabric = fabric.get_or_insert_with(Fabric::new);
    for broken in [0, 1] {
        let mut pair = fabric.connect(2, 1);
        talk(fabric, &mut pair);
        break_path(&pair, broken);
        let rail = fabric.hosts[1 - broken].process().rails[1].clone();
        let now = fabric.now();
        pair.drivers[1 - broken].port_changed(&rail, PortChange::Down, now);
        talk(fabric, &mut pair);
        let text = pair.drivers[1 - broken].text();
        assert_eq!(
            text,
            "x0:1 to x0:1: up, x1:1 to x1:1: lost, not acknowledged by the peer"
        );
    }
}

#[test]
fn a_failed_data_path_is_not_used_again_and_both_ends_close_in_good_order() {
    let mut fabric = sim::lock_fabric();
    let fabric = fabric.get_or_insert_with(Fabric::new);
    for broken in [0, 1] {
        let mut pair = fabric.connect(2, 1);
        let paths: [Arc<dyn SharedPath>; 2] = [pair.send.clone(), pair.recv.clone()];
        talk(fabric, &mut pair);
        // Polls by the service thread do not count as use: it polls unused paths in each round.
        assert!(paths.iter().all(|path| path.is_unused()));
        break_path(&pair, broken);
        assert!(
            matches!(paths[broken].borrow(), Err(NotBorrowed::Broken)),
            "the data path may be half-changed"
        );
        talk(fabric, &mut pair);
        assert!(
            matches!(paths[broken].borrow(), Err(NotBorrowed::Broken)),
            "the data path may be half-changed"
        );
        // On the other end's message, the driver neither touches the data path nor blames the peer.
        pair.close(1 - broken, fabric.now());
        talk(fabric, &mut pair);
        assert!(
            matches!(
                pair.contexts[broken].peer.presence(),
                PeerState::Closed { .. }
            ),
            "the other end's BYE has arrived"
        );
        pair.close(broken, fabric.now());
        talk(fabric, &mut pair);
        let presence = pair.contexts[1 - broken].peer.presence();
        assert_eq!(
            presence,
            PeerState::Closed { delivered: 0 },
            "its BYE has arrived"
        );
    }
}
