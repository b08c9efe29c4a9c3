//! Two hosts whose rails share no subnet, with connections and messages between them.
#![allow(dead_code, reason = "each test uses a part")]

use crate::common::comms::{Receiving, Sending};
pub use crate::common::ends::{Buffer, Ends, connect, sizes, transfer};
use crate::common::{self, until};
use host::config::Config;
use host::error::Error;
use nccl_net_spark::comm::{Host, RecvComm, RecvPart, Registration, SendComm};
use nccl_net_spark::plugin::bring_up;
use std::sync::Arc;

/// Two devices with addresses in different subnets.
pub const NEAR: &str = "rocep1s0f0";
pub const FAR: &str = "roceP2p1s0f0";
pub const RING_TCP: (&str, &str) = ("NCCL_SPARK_RING_TCP", "1");

pub fn host(devices: &str, settings: &[(&str, &str)]) -> Arc<Host> {
    let (_, library) = common::test_rails();
    let mut variables = vec![
        ("NCCL_IB_HCA".to_owned(), devices.to_owned()),
        ("NCCL_SOCKET_IFNAME".to_owned(), "lo".to_owned()),
    ];
    variables.extend(library);
    for (name, value) in settings {
        variables.retain(|(known, _)| known != name);
        variables.push(((*name).to_owned(), (*value).to_owned()));
    }
    bring_up(Config::from_variables(&variables).unwrap())
        .unwrap()
        .0
}

pub fn apart() -> Ends {
    connect(&host(NEAR, &[RING_TCP]), &host(FAR, &[RING_TCP])).unwrap()
}

pub fn is_by_tcp(ends: &Ends) -> bool {
    match (&ends.send, &ends.recv) {
        (SendComm::Streams(_), RecvComm::Streams(_)) => true,
        (SendComm::Rails(_), RecvComm::Rails(_)) => false,
        _ => panic!("the two ends disagree"),
    }
}

pub fn irecv(recv: &RecvComm, to: &Buffer, bytes: usize, tag: i32, memory: &Registration) -> u16 {
    let part = RecvPart {
        addr: to.addr(),
        bytes,
        tag,
        memory,
    };
    until(|| recv.irecv(&[part], false).unwrap())
}

pub fn receive_error(recv: &RecvComm, request: u16) -> Error {
    *until(|| recv.test(request, |_, _| {}).err())
}

pub fn send_error(send: &SendComm, from: &Buffer, memory: &Registration) -> Error {
    *until(|| send.isend(from.addr(), 1, 0, memory).err())
}
