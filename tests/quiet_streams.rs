//! The data path of connections by TCP allocates nothing. (Its system calls move the data.)

#![allow(unsafe_code)]

mod common;
#[path = "common/counting.rs"]
mod counting;

use common::comms::{Receiving, Sending};
use common::ends::{Bed, connect};
use host::config::Config;
use nccl_net_spark::comm::{Host, RecvPart, SendComm};
use nccl_net_spark::plugin::bring_up;
use std::sync::Arc;

#[test]
fn no_allocation_by_tcp_once_connected() {
    let (_, library) = common::test_rails();
    // The two hosts' addresses are in different subnets.
    let a = host("rocep1s0f0", &library);
    let b = host("roceP2p1s0f0", &library);
    let ends = connect(&a, &b).unwrap();
    assert!(matches!(ends.send, SendComm::Streams(_)));
    let bed = Bed::new(ends, 4 << 20);
    transfer(&bed, 8, 1, false);
    let allocations = counting::allocations(|| {
        for _ in 0..50 {
            for (size, parts, is_watched) in [
                (0, 1, false),
                (8, 1, false),
                (8, 1, true),
                (70_000, 1, true),
                (300, 8, false),
                (4 << 20, 1, false),
            ] {
                transfer(&bed, size, parts, is_watched);
            }
        }
    });
    assert_eq!(allocations, 0, "the data path allocates or frees");
    bed.ends.send.close();
    bed.ends.recv.close();
}

fn host(devices: &str, library: &[(String, String)]) -> Arc<Host> {
    let mut settings = vec![
        ("NCCL_IB_HCA".to_owned(), devices.to_owned()),
        ("NCCL_SOCKET_IFNAME".to_owned(), "lo".to_owned()),
        ("NCCL_SPARK_RING_TCP".to_owned(), "1".to_owned()),
    ];
    settings.extend_from_slice(library);
    bring_up(Config::from_variables(&settings).unwrap())
        .unwrap()
        .0
}

/// Moves a message of `size` bytes to each part of a receive.
fn transfer(bed: &Bed, size: usize, parts: usize, is_watched: bool) {
    let part = RecvPart {
        addr: bed.to.addr(),
        bytes: size,
        tag: 0,
        memory: &bed.into,
    };
    let receive = bed.ends.recv.irecv(&[part; 8][..parts], is_watched);
    let receive = receive.unwrap().unwrap();
    let mut running = [None; 8];
    for place in &mut running[..parts] {
        while place.is_none() {
            *place = bed
                .ends
                .send
                .isend(bed.from.addr(), size, 0, &bed.out)
                .unwrap();
        }
    }
    let mut is_received = false;
    while running.iter().any(Option::is_some) || !is_received {
        for place in &mut running {
            *place = place.filter(|request| bed.ends.send.test(*request).unwrap().is_none());
        }
        is_received = is_received || bed.ends.recv.test(receive, |_, _| {}).unwrap();
    }
}
