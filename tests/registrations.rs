//! Registers memory whose driver requires local write access. A send alone does not need this
//! access.

#![allow(unsafe_code)]

mod common;
mod sim;

use common::captured_log::CapturedLog;
use nccl_net_spark::comm::{Purpose, RecvPart};
use sim::fabric::{Fabric, RAILS};
use tracing::Level;
use verbs::HostMemory;

const BYTES: usize = 4096;

// One test only: a process has one fabric and one virtual clock.
#[test]
fn sends_get_local_write_access_only_where_needed_and_peers_get_none() {
    let mut fabric = Fabric::new();
    let log = CapturedLog::default();
    let buffers = [0, 1, 2].map(|seed| vec![seed + 1_u8; BYTES]);
    // SAFETY: the buffers live until the end of the test, after their registrations.
    let memory =
        |at: usize| unsafe { HostMemory::from_caller(buffers[at].as_ptr() as usize, BYTES) };
    let process = fabric.hosts[0].process().clone();
    let register = |at: usize| log.capture(|| process.register(memory(at), Purpose::Send));
    let infos = || {
        log.take()
            .into_iter()
            .filter(|(level, _)| *level <= Level::INFO)
            .collect::<Vec<_>>()
    };

    register(0).unwrap();
    assert!(infos().is_empty(), "without need there is nothing to say");
    (0..RAILS).for_each(|rail| fabric.need_local_write(rail, rail == 1));
    let out = register(1).unwrap();
    let lines = infos();
    assert_eq!(lines.len(), 1, "{lines:?}");
    let words = "rail x1:1: sends are registered with LOCAL_WRITE, because without it: cannot register 4096 bytes";
    assert!(
        lines[0].1.starts_with(words) && lines[0].1.ends_with("Bad address (os error 14)"),
        "{}",
        lines[0].1
    );
    let _again = register(2).unwrap();
    assert!(infos().is_empty(), "it is logged once");

    // A send from that memory arrives over the rail that needed the access.
    let pair = fabric.connect_over(&[1], 1, sim::fabric::Start::default());
    let part = RecvPart {
        addr: fabric.to.as_ptr() as u64,
        bytes: BYTES,
        tag: 0,
        memory: &fabric.into,
    };
    let receive = pair
        .recv
        .enter()
        .unwrap()
        .irecv(&pair.contexts[1], &[part], false)
        .unwrap()
        .unwrap();
    (0..100).for_each(|_| fabric.pass(10_000));
    let from = buffers[1].as_ptr() as u64;
    pair.send
        .enter()
        .unwrap()
        .isend(&pair.contexts[0], from, BYTES, 0, &out)
        .unwrap()
        .unwrap();
    (0..100).for_each(|_| fabric.pass(10_000));
    assert!(
        pair.recv
            .enter()
            .unwrap()
            .test(&pair.contexts[1], receive, |_, _| {})
            .unwrap()
    );
    assert_eq!(fabric.to[..BYTES], buffers[1]);
    // No peer may write there, because there is no key for peers.
    assert!(!out.allows_write(from, BYTES) && out.packed_keys(true) == out.packed_keys(false));
    assert!(out.packed_keys(true).iter().all(|word| *word == 0));
}
