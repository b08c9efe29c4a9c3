//! The data path allocates nothing and makes no system calls of its own.
//!
//! This program's allocator counts allocations. In the test bed, `strace` counts system calls
//! (`tests/rxe-vm/cases/33-no-system-calls.sh`). Two queries of files that do not exist mark the
//! start and the end of the data path. System calls of the libibverbs provider for doorbells do not
//! count: soft-RoCE writes to its device for each post, and the software fabric may wake a thread.

#![allow(unsafe_code)]

mod common;
#[path = "common/counting.rs"]
mod counting;

use common::comms::{Receiving, Sending};
use common::ends::{Bed, connect};
use host::config::Config;
use nccl_net_spark::comm::{Host, RecvPart};
use nccl_net_spark::plugin::bring_up;
use std::sync::Arc;

#[test]
fn no_allocation_and_no_system_call_once_connected() {
    let ([a, b], library) = common::test_rails();
    let ends = connect(&host(&a, &library), &host(&b, &library)).unwrap();
    let bed = Bed::new(ends, 1 << 20);
    transfer(&bed, 8, 1, false);
    mark("/data-path-begins");
    let allocations = counting::allocations(|| {
        for _ in 0..50 {
            for (size, parts, optional) in [
                (0, 1, false),
                (8, 1, false),
                (8, 1, true),
                (300, 8, false),
                (1 << 20, 1, false),
            ] {
                transfer(&bed, size, parts, optional);
            }
        }
    });
    mark("/data-path-ends");
    assert_eq!(allocations, 0, "the data path allocates or frees");
    bed.ends.send.close();
    bed.ends.recv.close();
}

fn host(devices: &str, library: &[(String, String)]) -> Arc<Host> {
    let mut settings = vec![
        ("NCCL_IB_HCA".to_owned(), devices.to_owned()),
        ("NCCL_SOCKET_IFNAME".to_owned(), "lo".to_owned()),
    ];
    settings.extend_from_slice(library);
    bring_up(Config::from_variables(&settings).unwrap())
        .unwrap()
        .0
}

/// Moves a message of `size` bytes to each part of a receive.
fn transfer(bed: &Bed, size: usize, parts: usize, optional: bool) {
    let part = RecvPart {
        addr: bed.to.addr(),
        bytes: size,
        tag: 0,
        memory: &bed.into,
    };
    let receive = loop {
        match bed.ends.recv.irecv(&[part; 8][..parts], optional).unwrap() {
            Some(request) => break request,
            // An optional receive keeps its slot until its bytes have arrived.
            None => std::hint::spin_loop(),
        }
    };
    for _ in 0..parts {
        let running = loop {
            if let Some(request) = bed
                .ends
                .send
                .isend(bed.from.addr(), size, 0, &bed.out)
                .unwrap()
            {
                break request;
            }
        };
        while bed.ends.send.test(running).unwrap().is_none() {}
    }
    while !bed.ends.recv.test(receive, |_, _| {}).unwrap() {}
}

/// Queries a file that does not exist, so that the name appears among the system calls.
fn mark(name: &str) {
    assert!(std::fs::metadata(name).is_err(), "{name} exists");
}
