//! The data path of connections by TCP allocates nothing. (Its system calls move the data.)

#![allow(unsafe_code)]

mod common;
#[path = "common/counting.rs"]
mod counting;

use common::comms::{Receiving, Sending};
use nccl_net_spark::comm::{RecvPart, SendComm};
use nccl_net_spark::config::Config;
use nccl_net_spark::plugin::bring_up;
use nccl_net_spark::verbs::HostMemory;

#[test]
fn no_allocation_by_tcp_once_connected() {
    let (_, library) = common::test_rails();
    // The two hosts' addresses are in different subnets.
    let host = |hca: &str| {
        let settings = [
            ("NCCL_IB_HCA", hca),
            ("NCCL_SOCKET_IFNAME", "lo"),
            ("NCCL_SPARK_RING_TCP", "1"),
        ];
        let mut settings: Vec<_> = settings
            .iter()
            .map(|(n, v)| ((*n).to_owned(), (*v).to_owned()))
            .collect();
        settings.extend(library.clone());
        bring_up(Config::from_variables(&settings).unwrap())
            .unwrap()
            .0
    };
    let a = host("rocep1s0f0");
    let b = host("roceP2p1s0f0");
    let (listener, mut handle) = b.listen().unwrap();
    let mut send = None;
    let mut recv = None;
    while send.is_none() || recv.is_none() {
        send = send.or_else(|| a.connect(&mut handle, None).unwrap());
        recv = recv.or_else(|| listener.accept().unwrap());
    }
    let send = send.unwrap();
    let recv = recv.unwrap();
    assert!(matches!(send, SendComm::Streams(_)));
    let from = vec![7u8; 4 << 20];
    let to = vec![0u8; 4 << 20];
    // SAFETY: both buffers outlive the connections, and are read only when nothing is in flight.
    let memory =
        |bytes: &Vec<u8>| unsafe { HostMemory::from_caller(bytes.as_ptr() as usize, bytes.len()) };
    let out = send.register(memory(&from)).unwrap();
    let into = recv.register(memory(&to)).unwrap();
    let one = |size: usize, parts: usize, is_watched: bool| {
        let part = RecvPart {
            addr: to.as_ptr() as u64,
            bytes: size,
            tag: 0,
            memory: &into,
        };
        let receive = recv
            .irecv(&[part; 8][..parts], is_watched)
            .unwrap()
            .unwrap();
        let mut running = [None; 8];
        for place in &mut running[..parts] {
            while place.is_none() {
                *place = send.isend(from.as_ptr() as u64, size, 0, &out).unwrap();
            }
        }
        let mut is_received = false;
        while running.iter().any(Option::is_some) || !is_received {
            for place in &mut running {
                *place = place.filter(|request| send.test(*request).unwrap().is_none());
            }
            is_received = is_received || recv.test(receive, |_, _| {}).unwrap();
        }
    };
    one(8, 1, false);
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
                one(size, parts, is_watched);
            }
        }
    });
    assert_eq!(allocations, 0, "the data path allocates or frees");
    send.close();
    recv.close();
}
