//! Connections that fail at one end, and the message that the peer gets, on the simulation's
//! fabric. The failures are panics in a data path, and errors of the driver or the data path.

#![allow(unsafe_code)]

mod common;
mod sim;

use host::error::{Error, Internal, Network, PeerGone, Usage};
use nccl_net_spark::comm::datapath::path::Faults;
use nccl_net_spark::comm::datapath::peer::PeerState;
use nccl_net_spark::comm::datapath::shared::{NotBorrowed, SharedPath};
use proto::device::PortChange;
use proto::wire::control::ControlFrame;
use sim::fabric::{Fabric, Pair};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

fn talk(fabric: &mut Fabric, pair: &mut Pair) {
    talk_for(10, true, fabric, pair);
}

/// Lets both drivers work for `ms` milliseconds, with or without TCP.
fn talk_for(ms: u64, has_tcp: bool, fabric: &mut Fabric, pair: &mut Pair) {
    for _ in 0..ms {
        fabric.pass(1_000_000);
        let now = fabric.now();
        let mut frames = [Vec::<ControlFrame>::new(), Vec::new()];
        for (side, driver) in pair.drivers.iter_mut().enumerate() {
            driver.poll(now, false, &mut |frame| {
                if has_tcp {
                    frames[1 - side].push(frame);
                }
                has_tcp
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

/// Returns the error of an end that has failed.
fn failure(pair: &Pair, side: usize) -> Option<Error> {
    let paths: [&dyn SharedPath; 2] = [&*pair.send, &*pair.recv];
    let Ok(mut path) = paths[side].borrow() else {
        panic!("the data path is in use");
    };
    path.rails().status.failure().cloned()
}

/// Makes an end fail: its driver, or its data path as NCCL's thread does it.
fn fail(pair: &mut Pair, side: usize, error: Error, is_in_driver: bool) {
    if is_in_driver {
        return pair.drivers[side].give_up(error);
    }
    let paths: [&dyn SharedPath; 2] = [&*pair.send, &*pair.recv];
    let Ok(mut path) = paths[side].borrow() else {
        panic!("the data path is in use");
    };
    path.end(&pair.contexts[side], Box::new(error));
}

fn not_flushed() -> Error {
    let (rail, peer) = ("x0:1".to_owned(), "end 9".to_owned());
    Network::NotFlushed { rail, peer }.into()
}

#[test]
fn a_failure_reaches_the_other_end_with_its_reason_over_tcp_and_over_the_rails() {
    let mut fabric = sim::lock_fabric();
    let fabric = fabric.get_or_insert_with(Fabric::new);
    for (side, is_in_driver) in [(0, true), (0, false), (1, true), (1, false)] {
        for (has_tcp, most_ms) in [(true, 1000), (false, 2000)] {
            let mut pair = fabric.connect(2, 1);
            talk(fabric, &mut pair);
            fail(&mut pair, side, not_flushed(), is_in_driver);
            talk_for(most_ms, has_tcp, fabric, &mut pair);
            let Some(Error::PeerGone(PeerGone::Failed { peer, why })) = failure(&pair, 1 - side)
            else {
                panic!(
                    "side {side}, in its driver: {is_in_driver}, TCP: {has_tcp}: {:?}",
                    failure(&pair, 1 - side)
                );
            };
            assert_eq!(peer, pair.contexts[1 - side].peer.name);
            assert_eq!(why, not_flushed().to_string());
            assert_eq!(failure(&pair, side), Some(not_flushed()));
        }
    }
}

#[test]
fn a_failure_that_both_ends_find_keeps_each_ends_own_error() {
    let mut fabric = sim::lock_fabric();
    let fabric = fabric.get_or_insert_with(Fabric::new);
    // Both fail at the same time.
    let mut pair = fabric.connect(2, 1);
    talk(fabric, &mut pair);
    let errors = [not_flushed(), Usage::Closed.into()];
    for (side, error) in errors.iter().enumerate() {
        fail(&mut pair, side, error.clone(), side == 0);
    }
    talk_for(200, true, fabric, &mut pair);
    assert_eq!([0, 1].map(|side| failure(&pair, side).unwrap()), errors);
    // The peer will find the same, with its own rails.
    let (peer, rails) = ("end 9".to_owned(), String::new());
    let mut pair = fabric.connect(2, 1);
    talk(fabric, &mut pair);
    let error = Internal::NotArrivedThere { peer, rails }.into();
    fail(&mut pair, 0, error, true);
    talk_for(200, true, fabric, &mut pair);
    assert_eq!(failure(&pair, 1), None);
}
