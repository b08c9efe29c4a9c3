//! Two connections share the process's limit on bytes in flight (`NCCL_SPARK_INFLIGHT_BYTES`), in
//! virtual time. The first test measures the bytes in the queues of the simulated fabric. All tests
//! also check the plugin's own count of reserved bytes.

#![allow(unsafe_code)]

mod common;
mod sim;

use nccl_net_spark::comm::RecvPart;
use nccl_net_spark::error::Internal;
use nccl_net_spark::flow::in_flight::Bound;
use nccl_net_spark::wire::control::ControlFrame;
use sim::fabric::{Fabric, Pair, Start};
use std::sync::{Arc, MutexGuard};

/// Virtual time after which a test counts as hanging.
const PATIENCE_NS: u64 = 60_000_000_000;

/// Size in bytes of the buffer of a receive. The buffers use 16 places of the receiver's arena by
/// turns.
const ROOM: usize = 16 * 1024;

struct Stage {
    fabric: MutexGuard<'static, Option<Fabric>>,
    pairs: [Option<Pair>; 2],
    /// By connection: the control frames in transit to the sender, then those to the receiver.
    frames: [[Vec<ControlFrame>; 2]; 2],
    bound: Arc<Bound>,
    granted: usize,
}

impl Stage {
    fn new(rails: usize, most_bytes: u64) -> Self {
        let mut fabric = sim::lock_fabric();
        let there = fabric.get_or_insert_with(Fabric::new);
        (0..rails).for_each(|rail| there.set(rail, true));
        let bound = Arc::new(Bound::new(most_bytes));
        let pairs = [0, 1]
            .map(|_| Some(there.connect_as(rails, 1, Start { bound: Some(Arc::clone(&bound)), ..Start::default() })));
        Self { fabric, pairs, frames: Default::default(), bound, granted: 0 }
    }

    fn fabric(&mut self) -> &mut Fabric {
        self.fabric.as_mut().unwrap()
    }

    fn pair(&mut self, at: usize) -> &mut Pair {
        self.pairs[at].as_mut().unwrap()
    }

    fn grant(&mut self, at: usize) -> u16 {
        let place = self.granted % 16 * ROOM;
        self.granted += 1;
        let fabric = self.fabric.as_ref().unwrap();
        let part =
            RecvPart { addr: fabric.to.as_ptr() as u64 + place as u64, bytes: ROOM, tag: 0, memory: &fabric.into };
        let pair = self.pairs[at].as_ref().unwrap();
        let request = pair.recv.enter().unwrap().irecv(&pair.contexts[1], &[part], false).unwrap();
        request.expect("a free slot")
    }

    fn settle(&mut self) {
        (0..100).for_each(|_| self.fabric().pass(10_000));
    }

    fn posted_bytes(&self) -> u64 {
        let fabric = self.fabric.as_ref().unwrap();
        self.pairs.iter().flatten().map(|pair| fabric.posted_bytes(pair)).sum()
    }

    fn isend(&mut self, at: usize, bytes: usize) -> Option<u16> {
        let fabric = self.fabric.as_ref().unwrap();
        let pair = self.pairs[at].as_ref().unwrap();
        let addr = fabric.from.as_ptr() as u64;
        pair.send.enter().unwrap().isend(&pair.contexts[0], addr, bytes, 0, &fabric.out).unwrap()
    }

    fn test(&mut self, at: usize, request: u16) -> Option<u64> {
        let pair = self.pair(at);
        pair.send.enter().unwrap().test(&pair.contexts[0], request).unwrap()
    }

    fn test_receive(&mut self, at: usize, request: u16) -> bool {
        let pair = self.pair(at);
        pair.recv.enter().unwrap().test(&pair.contexts[1], request, |_, _| {}).unwrap()
    }

    fn poll(&mut self, at: usize) {
        let now = self.fabric().now();
        self.fabric().hosts.iter().for_each(|host| host.process().tick(now));
        for side in [0, 1] {
            let came = std::mem::take(&mut self.frames[at][side]);
            let sent = &mut self.frames[at][1 - side];
            let driver = &mut self.pairs[at].as_mut().unwrap().drivers[side];
            came.iter().for_each(|frame| driver.receive_frame(frame, now));
            driver.poll(now, true, &mut |frame| {
                sent.push(frame);
                true
            });
        }
    }

    fn finish(&mut self, at: usize, send: u16, receive: u16) -> u64 {
        let limit = self.fabric().now_ns() + PATIENCE_NS;
        loop {
            self.fabric().pass(50_000);
            self.poll(at);
            self.test_receive_if_open(at, receive);
            if let Some(bytes) = self.test(at, send) {
                return bytes;
            }
            assert!(self.fabric().now_ns() < limit, "the send hangs");
        }
    }

    /// Tests a receive, as NCCL does while it waits. Ignores an error, because the receive may have
    /// been reported done already.
    fn test_receive_if_open(&mut self, at: usize, request: u16) {
        let pair = self.pair(at);
        let _ = pair.recv.enter().unwrap().test(&pair.contexts[1], request, |_, _| {});
    }
}

struct Running {
    at: usize,
    send: u16,
    receive: u16,
    bytes: usize,
}

#[test]
fn two_connections_share_the_in_flight_limit_and_a_larger_message_is_sent_alone() {
    const MOST: u64 = 5000;
    let mut stage = Stage::new(3, MOST);
    let sizes = [900, 3000, 1, 0, 12_000, 64, 2500, 4999, 5000, 5001, 100, 3000];
    let mut waiting: [Vec<(u16, usize)>; 2] = Default::default();
    for (at, waiting) in waiting.iter_mut().enumerate() {
        for turn in 0..sizes.len() {
            // Because of the offset, the two connections do not send their large messages at the
            // same time.
            let bytes = sizes[(turn + 5 * at) % sizes.len()];
            waiting.insert(0, (stage.grant(at), bytes));
        }
    }
    stage.settle();
    let (mut running, mut refused, mut fullest, mut alone) = (Vec::<Running>::new(), 0, 0, 0);
    let limit = stage.fabric().now_ns() + PATIENCE_NS;
    while waiting.iter().any(|of| !of.is_empty()) || !running.is_empty() {
        for (at, waiting) in waiting.iter_mut().enumerate() {
            let Some((receive, bytes)) = waiting.last().copied() else { continue };
            let Some(send) = stage.isend(at, bytes) else {
                refused += 1;
                continue;
            };
            waiting.pop();
            running.push(Running { at, send, receive, bytes });
            let largest = running.iter().map(|one| one.bytes as u64).max().unwrap_or(0);
            let posted = stage.posted_bytes();
            assert!(posted <= MOST.max(largest), "{posted} bytes are posted");
            if largest > MOST {
                let others = running.iter().filter(|one| one.bytes > 0).count();
                assert!(posted <= largest && others == 1, "{others} messages beside a large one");
                alone += 1;
            } else {
                fullest = posted.max(fullest);
            }
        }
        stage.fabric().pass(200);
        running.retain(|one| {
            let done = stage.test(one.at, one.send);
            if let Some(bytes) = done {
                assert_eq!(bytes, one.bytes as u64);
                while !stage.test_receive(one.at, one.receive) {
                    stage.fabric().pass(200);
                    assert!(stage.fabric().now_ns() < limit, "a receive hangs");
                }
            }
            done.is_none()
        });
        assert!(stage.fabric().now_ns() < limit, "a send hangs");
    }
    assert_eq!(stage.bound.reserved_bytes(), 0);
    assert!(refused > 0 && alone >= 4 && fullest > 3000, "{refused} refused, {alone} alone, {fullest} at most");
}

#[test]
fn a_refused_peer_leaves_once_the_other_connection_is_done() {
    let mut stage = Stage::new(1, 4000);
    let receives = [stage.grant(0), stage.grant(1)];
    stage.settle();
    let first = stage.isend(0, 3000).expect("room");
    assert_eq!((stage.isend(1, 1001), stage.bound.reserved_bytes()), (None, 3000));
    assert_eq!(stage.finish(0, first, receives[0]), 3000);
    let second = stage.isend(1, 1001).expect("room, now that the other is done");
    assert_eq!(stage.finish(1, second, receives[1]), 1001);
    assert_eq!(stage.bound.reserved_bytes(), 0);
}

#[test]
fn a_lost_rail_returns_its_share_of_the_in_flight_limit() {
    // The delays reach from before the first byte to after the last acknowledgement.
    for delay_ns in (0..12_000).step_by(200).chain([40_000]) {
        let mut stage = Stage::new(2, 4000);
        let receives = [stage.grant(0), stage.grant(1)];
        stage.settle();
        let send = stage.isend(0, 4000).expect("room");
        // Some bytes may have arrived without being acknowledged.
        stage.fabric().pass(delay_ns);
        stage.fabric().set(0, false);
        assert_eq!(stage.isend(1, 1), None, "it is not done");
        assert_eq!(stage.finish(0, send, receives[0]), 4000);
        assert_eq!(stage.bound.reserved_bytes(), 0, "after {delay_ns} ns");
        let other = stage.isend(1, 4000).expect("room");
        stage.fabric().set(0, true);
        assert_eq!(stage.finish(1, other, receives[1]), 4000);
        assert_eq!(stage.bound.reserved_bytes(), 0);
    }
}

#[test]
fn a_connection_that_ends_returns_its_bytes_in_flight_once() {
    for drops in [false, true] {
        let mut stage = Stage::new(1, 4000);
        stage.grant(0);
        let receive = stage.grant(1);
        stage.settle();
        stage.isend(0, 3500).expect("room");
        assert_eq!((stage.isend(1, 600), stage.bound.reserved_bytes()), (None, 3500));
        if drops {
            stage.pairs[0] = None;
        } else {
            let now = stage.fabric().now();
            let driver = &mut stage.pairs[0].as_mut().unwrap().drivers[0];
            driver.give_up(Internal::PathPanicked.into());
            driver.poll(now, false, &mut |_| true);
        }
        assert_eq!(stage.bound.reserved_bytes(), 0);
        let other = stage.isend(1, 600).expect("room");
        assert_eq!(stage.bound.reserved_bytes(), 600);
        stage.pairs[0] = None;
        assert_eq!(stage.bound.reserved_bytes(), 600, "it returned bytes of another send");
        assert_eq!(stage.finish(1, other, receive), 600);
        assert_eq!(stage.bound.reserved_bytes(), 0);
    }
}
