//! Rails that return where that is not easy, in virtual time: both ends of each connection stand in this process without a handshake, on the
//! fabric of the simulation, and what one says to the other can be looked at and changed on its way.

#![allow(unsafe_code)]

mod common;
mod sim;

use nccl_net_spark::wire::control::{Letter, Notice};
use sim::fabric::{Fabric, Pair, RAILS};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// There is one fabric in a process, and its time is the process's.
static FABRIC: Mutex<Option<Fabric>> = Mutex::new(None);

/// Connections between the two hosts.
struct Stage {
    fabric: MutexGuard<'static, Option<Fabric>>,
    pairs: Vec<Pair>,
}

impl Stage {
    fn new(connections: usize, rails: usize) -> Self {
        let mut turn = FABRIC.lock().unwrap_or_else(PoisonError::into_inner);
        let fabric = turn.get_or_insert_with(Fabric::new);
        // What the test before left in the fabric's way is over.
        (0..RAILS).for_each(|rail| fabric.set(rail, true));
        fabric.pass(60_000_000_000);
        let pairs = (0..connections).map(|_| fabric.connect(rails, 1)).collect();
        Self { fabric: turn, pairs }
    }

    fn fabric(&mut self) -> &mut Fabric {
        self.fabric.as_mut().unwrap()
    }

    /// Lets so much time pass, in which all wardens talk; every letter goes by `on_its_way`.
    fn talk(&mut self, ms: u64, mut on_its_way: impl FnMut(&mut Letter)) {
        for _ in 0..ms / 20 {
            self.fabric().pass(20_000_000);
            let now = self.fabric().now();
            for pair in &mut self.pairs {
                for side in [0, 1] {
                    let mut letters = Vec::new();
                    pair.wardens[side].tend(now, true, &mut |letter| {
                        letters.push(letter);
                        true
                    });
                    for letter in &mut letters {
                        on_its_way(letter);
                        pair.wardens[1 - side].hear(letter, now);
                    }
                }
            }
        }
    }

    /// Rails go down on both sides or come up there, and the ports say so.
    fn set(&mut self, rails: &[usize], is_up: bool) {
        for rail in rails {
            self.fabric().set(*rail, is_up);
            let now = self.fabric().now();
            let ports = [0, 1].map(|side: usize| self.fabric().hosts[side].rails[*rail].clone());
            for pair in &mut self.pairs {
                (0..2).for_each(|side| pair.wardens[side].port_changed(&ports[side], is_up, now));
            }
        }
    }

    /// Where the rails stand, by connection: the sender's word, then the receiver's.
    fn text(&self) -> Vec<[String; 2]> {
        self.pairs.iter().map(|pair| [0, 1].map(|side: usize| pair.wardens[side].text())).collect()
    }

    fn is_whole(&self) -> bool {
        self.pairs.iter().all(|pair| pair.wardens.iter().all(|warden| warden.is_whole()))
    }
}

#[test]
fn a_twin_without_an_address_returns_by_a_cable_between_ports_of_different_names() {
    let mut stage = Stage::new(1, 2);
    stage.set(&[1], false);
    stage.talk(200, |_| {});
    let down = "x0:1 to x0:1: carries, x1:1 to x1:1: lost";
    assert_eq!(stage.text(), [[down, down]]);
    stage.set(&[1], true);
    let mut asked = 0;
    stage.talk(10_000, |letter| {
        if let Ok(Notice::Join { lane, mut rail, qps }) = Notice::decode(&letter.notice) {
            // As the sending side's rail would be with the cable in its other port.
            rail.phys_port = "p1".to_owned();
            rail.addresses.retain(|address| address.gid.starts_with(&[0xfe, 0x80]));
            assert_eq!(rail.addresses.len(), 1);
            letter.notice = Notice::Join { lane, rail, qps }.encode();
            asked += 1;
        }
    });
    assert!(stage.is_whole(), "asked for {asked} times: {:?}", stage.text());
}
