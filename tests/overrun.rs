//! An overrun of the plugin's completion queue, in real time over the software fabric. An overrun
//! cannot happen in normal operation (`completions.rs`). So the fabric treats a queue with room as
//! full.

#![allow(unsafe_code)]

mod common;

use common::comms::{Receiving, Sending};
use common::ends::{Buffer, connect, transfer};
use common::until;
use host::config::Config;
use host::error::Error;
use nccl_net_spark::comm::{Host, RecvComm, RecvPart, Registration, SendComm};
use nccl_net_spark::plugin::bring_up;
use softverbs::control::{Action, control};
use std::path::Path;
use std::sync::Arc;

const RAILS: [&str; 2] = ["rocep1s0f0", "roceP2p1s0f0"];

#[test]
fn an_overrun_ends_the_receivers_connection_with_an_error_that_the_sender_gets_too() {
    // Both ends use one host. With two, this process would open each device twice, and only one of
    // the two contexts would get an event.
    let host = host();
    let ends = connect(&host, &host).unwrap();
    let from = Buffer::filled(4096, 1);
    let to = Buffer::blank(4096);
    assert_eq!(transfer(&ends, &from, &to, 4096, 4096), 4096);
    assert!(from.0 == to.0, "all is well so far");

    let out = ends.send.register(from.memory()).unwrap();
    let into = ends.recv.register(to.memory()).unwrap();
    overrun(1);
    let error = receive_error(&ends.recv, &to, &into).to_string();
    assert!(
        error.contains("IBV_EVENT_CQ_ERR") && RAILS.iter().any(|rail| error.contains(rail)),
        "{error}"
    );
    overrun(0);
    wait_for_send_error(&ends.send, &from, &out);
}

fn host() -> Arc<Host> {
    let (rails, library) = common::test_rails();
    let mut variables = vec![
        ("NCCL_IB_HCA".to_owned(), rails[0].clone()),
        ("NCCL_SOCKET_IFNAME".to_owned(), "lo".to_owned()),
        // The sender waits for this time, because the receiver never confirms that it has fenced
        // the rail.
        ("NCCL_SPARK_LOSS_TIMEOUT_S".to_owned(), "1".to_owned()),
    ];
    variables.extend(library);
    bring_up(Config::from_variables(&variables).unwrap())
        .unwrap()
        .0
}

/// Grants receives until the connection fails, and returns the error. Nothing is sent, so the next
/// completion is that of a grant: every sixteenth grant is signaled.
fn receive_error(recv: &RecvComm, to: &Buffer, into: &Registration) -> Box<Error> {
    let part = RecvPart {
        addr: to.addr(),
        bytes: to.0.len(),
        tag: 5,
        memory: into,
    };
    let mut granted = None;
    for _ in 0..20 {
        match until(|| recv.irecv(&[part], false).transpose()) {
            Ok(receive) => granted = Some(receive),
            Err(error) => return error,
        }
    }
    let last = granted.expect("receives were granted");
    until(|| recv.test(last, |_, _| ()).err())
}

/// Waits until the sender has the error, at the latest through its own sends and tests.
fn wait_for_send_error(send: &SendComm, from: &Buffer, out: &Registration) {
    let mut sends = Vec::new();
    until(|| match send.isend(from.addr(), from.0.len(), 5, out) {
        Ok(Some(request)) => {
            sends.push(request);
            None
        }
        Ok(None) => sends.iter().find_map(|request| send.test(*request).err()),
        Err(error) => Some(error),
    });
}

/// Lets the receiver's next completions overrun its queue, or ends the fault with 0.
fn overrun(completions: u32) {
    let dir = std::env::var("SOFTVERBS_DIR").unwrap();
    let fabric = std::env::var("SOFTVERBS_FABRIC").unwrap();
    for rail in RAILS {
        let action = Action::Overrun(completions);
        control(Path::new(&dir), &fabric, None, rail, action).unwrap();
    }
}
