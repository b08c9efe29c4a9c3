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
use nccl_net_spark::comm::RecvPart;
use nccl_net_spark::config::Config;
use nccl_net_spark::plugin::bring_up;
use nccl_net_spark::verbs::HostMemory;

#[test]
fn no_allocation_and_no_system_call_once_connected() {
    let ([a, b], library) = common::test_rails();
    let host = |hca: &str| {
        let settings = [("NCCL_IB_HCA", hca), ("NCCL_SOCKET_IFNAME", "lo")];
        let mut settings: Vec<_> = settings
            .iter()
            .map(|(n, v)| ((*n).to_owned(), (*v).to_owned()))
            .collect();
        settings.extend(library.clone());
        bring_up(Config::from_variables(&settings).unwrap())
            .unwrap()
            .0
    };
    let a = host(&a);
    let b = host(&b);
    let (listener, mut handle) = b.listen().unwrap();
    let mut send = None;
    let mut recv = None;
    while send.is_none() || recv.is_none() {
        send = send.or_else(|| a.connect(&mut handle, None).unwrap());
        recv = recv.or_else(|| listener.accept().unwrap());
    }
    let send = send.unwrap();
    let recv = recv.unwrap();
    let from = vec![7u8; 1 << 20];
    let to = vec![0u8; 1 << 20];
    // SAFETY: both buffers outlive the connections, and are read only when nothing is in flight.
    let memory =
        |bytes: &Vec<u8>| unsafe { HostMemory::from_caller(bytes.as_ptr() as usize, bytes.len()) };
    let out = send.register(memory(&from)).unwrap();
    let into = recv.register(memory(&to)).unwrap();
    let one = |size: usize, parts: usize, optional: bool| {
        let part = RecvPart {
            addr: to.as_ptr() as u64,
            bytes: size,
            tag: 0,
            memory: &into,
        };
        let receive = loop {
            match recv.irecv(&[part; 8][..parts], optional).unwrap() {
                Some(request) => break request,
                // An optional receive keeps its slot until its bytes have arrived.
                None => std::hint::spin_loop(),
            }
        };
        for _ in 0..parts {
            let running = loop {
                if let Some(request) = send.isend(from.as_ptr() as u64, size, 0, &out).unwrap() {
                    break request;
                }
            };
            while send.test(running).unwrap().is_none() {}
        }
        while !recv.test(receive, |_, _| {}).unwrap() {}
    };
    let mark = |name: &str| assert!(std::fs::metadata(name).is_err(), "{name} exists");
    one(8, 1, false);
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
                one(size, parts, optional);
            }
        }
    });
    mark("/data-path-ends");
    assert_eq!(allocations, 0, "the data path allocates or frees");
    send.close();
    recv.close();
}
