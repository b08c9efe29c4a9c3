//! A peer that is connected, and then lies in its grants (CTS entries), immediates and control
//! messages. Both ends are in this process, on the simulation's fabric. They are connected without
//! a handshake. The lies are written to the memory that the peer's NIC would write, posted on the
//! peer's queue pairs, or passed to the driver. Each lie changes nothing, or ends in an error that
//! names the peer and the violation.

#![allow(unsafe_code)]

mod common;
#[path = "lies/messages.rs"]
mod messages;
#[path = "lies/noise.rs"]
mod noise;
#[path = "lies/sent.rs"]
mod sent;
mod sim;

use common::captured_log::CapturedLog;
use host::error::{Argument, Error, Quick};
use messages::{QPS, advert, end, join, joined, lane};
use nccl_net_spark::comm::RecvPart;
use nccl_net_spark::comm::datapath::lane::LaneWrite;
use nccl_net_spark::comm::datapath::path::{DataPath, Faults};
use nccl_net_spark::comm::datapath::peer::PeerState;
use nccl_net_spark::comm::datapath::shared::SharedPath;
use nccl_net_spark::comm::datapath::wr_id::Work;
use proto::wire::control::{ControlFrame, ControlMessage, OpenReceive, Received};
use proto::wire::cts::{ENTRY_WORDS, Entry, Epoch, MAX_RECEIVE_BYTES, Terms, entry_word};
use proto::wire::fields::RailAdvert;
use proto::wire::ids::Slot;
use proto::wire::immediate::Immediate;
use proto::wire::{MAX_RAILS, PARTS, SLOTS};
use sim::Dice;
use sim::fabric::{Fabric, Pair};
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;
use std::time::Duration;

struct Stage {
    fabric: MutexGuard<'static, Option<Fabric>>,
    pair: Pair,
}

impl Stage {
    fn new(rails: usize) -> Self {
        let mut fabric = sim::lock_fabric();
        let pair = fabric
            .get_or_insert_with(Fabric::of_small_packets)
            .connect(rails, 1);
        Self { fabric, pair }
    }

    fn again(&mut self) {
        let rails = self.pair.recv.enter().unwrap().rails().lanes.len();
        self.pair = self.fabric.as_ref().unwrap().connect(rails, 1);
    }

    fn fabric(&mut self) -> &mut Fabric {
        self.fabric.as_mut().unwrap()
    }

    /// Writes a CTS entry to the sender's ring, as the receiver's NIC would. `at` is the index of
    /// the entry's first word.
    fn forge(&self, at: usize, entry: &Entry) {
        let ring = &self.pair.mailboxes[0].words()[at..at + ENTRY_WORDS];
        for (cell, word) in ring.iter().zip(entry.words()) {
            cell.store(*word, Ordering::Release);
        }
    }

    /// Makes a call of the data path of `side`. If the connection has failed, lets the driver tell
    /// the peer and stop the queue pairs, and makes the call again, which then returns the error.
    fn call<T>(&mut self, side: usize, call: impl Fn(&Self) -> Quick<T>) -> Quick<T> {
        let done = call(self);
        if !self.is_ending(side) {
            return done;
        }
        self.poll_until(|stage| {
            let now = stage.fabric().now();
            stage.pair.drivers[side].poll(now, true, &mut |_| true);
            (!stage.is_ending(side)).then_some(())
        })
        .expect("the queue pairs stop");
        call(self)
    }

    fn is_ending(&self, side: usize) -> bool {
        let path: &dyn SharedPath = if side == 0 {
            &*self.pair.send
        } else {
            &*self.pair.recv
        };
        let mut path = path.borrow().expect("no panic went through it");
        path.rails().status.is_ending()
    }

    fn isend(&mut self, bytes: usize, tag: i32) -> Quick<Option<u16>> {
        self.call(0, |stage| {
            let fabric = stage.fabric.as_ref().unwrap();
            let mut path = stage.pair.send.enter().unwrap();
            path.isend(
                &stage.pair.contexts[0],
                fabric.from.as_ptr() as u64,
                bytes,
                tag,
                &fabric.out,
            )
        })
    }

    fn irecv(&mut self, rooms: &[usize]) -> Quick<Option<u16>> {
        self.call(1, |stage| {
            let fabric = stage.fabric.as_ref().unwrap();
            let place = |(at, room): (usize, &usize)| RecvPart {
                addr: fabric.to.as_ptr() as u64 + 4096 * at as u64,
                bytes: *room,
                tag: at as i32,
                memory: &fabric.into,
            };
            let parts: Vec<RecvPart<'_>> = rooms.iter().enumerate().map(place).collect();
            stage
                .pair
                .recv
                .enter()
                .unwrap()
                .irecv(&stage.pair.contexts[1], &parts, false)
        })
    }

    /// Posts an empty write with an immediate on the sending end's queue pair.
    fn post_immediate(&mut self, immediate: u32) {
        let write = LaneWrite {
            work: Work::Probe,
            immediate: Some(immediate),
            signaled: true,
            ..LaneWrite::default()
        };
        // Waits until earlier writes are acknowledged, if the queue has no room.
        for _ in 0..10_000 {
            {
                let mut path = self.pair.send.enter().unwrap();
                let _ = path.poll(&self.pair.contexts[0]);
                if let Some(slot) = path.rails().lanes[0].slot(0) {
                    slot.write(&write, None).unwrap();
                    return;
                }
            }
            let _ = self.received(0);
            if !self.pair.recv.enter().unwrap().rails().lanes[0].is_open() {
                // The receiver has ended the connection because of an earlier immediate.
                return;
            }
            self.fabric().pass(100_000);
        }
        panic!("there is never room for an immediate");
    }

    fn received(&mut self, request: u16) -> Quick<bool> {
        self.call(1, |stage| {
            let mut path = stage.pair.recv.enter().unwrap();
            path.test(&stage.pair.contexts[1], request, |_, _| {})
        })
    }

    /// Calls `poll` every millisecond until it returns a value, for at most a second. The times are
    /// virtual.
    fn poll_until<T>(&mut self, mut poll: impl FnMut(&mut Self) -> Option<T>) -> Option<T> {
        let mut round = |_| (self.fabric().pass(1_000_000), poll(self)).1;
        (0..1000).find_map(&mut round)
    }

    fn check(&mut self) {
        for bytes in [0, 8, 100, 3000_usize] {
            let fabric = self.fabric();
            for (at, byte) in fabric.from[..bytes].iter_mut().enumerate() {
                *byte = (at * 13 + bytes) as u8;
            }
            fabric.to[..bytes].fill(0xee);
            let receive = self
                .poll_until(|stage| stage.irecv(&[bytes]).unwrap())
                .expect("a receive is granted");
            let send = self
                .poll_until(|stage| stage.isend(bytes, 0).unwrap())
                .expect("a send begins");
            let mut sent = false;
            self.poll_until(|stage| {
                let mut path = stage.pair.send.enter().unwrap();
                sent = sent || path.test(&stage.pair.contexts[0], send).unwrap().is_some();
                drop(path);
                (stage.received(receive).unwrap()).then_some(())
            })
            .expect("the message arrives");
            self.poll_until(|stage| {
                let mut path = stage.pair.send.enter().unwrap();
                sent = sent || path.test(&stage.pair.contexts[0], send).unwrap().is_some();
                sent.then_some(())
            })
            .expect("the send ends");
            let fabric = self.fabric();
            assert!(
                fabric.to[..bytes] == fabric.from[..bytes],
                "{bytes} bytes differ"
            );
        }
    }

    /// Passes a control message to the driver of `side`, in a control frame with this number.
    fn deliver_control(&mut self, side: usize, number: u64, message: Vec<u8>) {
        let now = self.fabric().now();
        self.pair.drivers[side].receive_frame(
            &ControlFrame {
                number,
                received: 0,
                awaits_confirmation: true,
                message,
            },
            now,
        );
    }

    /// Delivers a FENCED of lane 1 as the first control message to `side`, from a peer that has
    /// granted `granted` receives.
    fn deliver_fenced(&mut self, side: usize, granted: u64) {
        let fenced = ControlMessage::Fenced {
            lane: lane(1),
            received: Received {
                granted,
                open: Vec::new(),
            },
        };
        self.deliver_control(side, 1, fenced.encode());
    }

    fn check_that_only_rail_1_is_lost(&self, side: usize) {
        let text = self.pair.drivers[side].text();
        assert!(
            text.contains("x0:1 to x0:1: up") && text.contains("x1:1 to x1:1: lost"),
            "{text}"
        );
    }

    fn complaint(&mut self, side: usize) -> Option<Box<Error>> {
        if side == 0 {
            self.isend(8, 0).err()
        } else {
            self.irecv(&[8]).err()
        }
    }

    fn talk(&mut self, rounds: usize) {
        self.talk_by(rounds, |_| {});
    }

    /// Like `talk`, with an intermediary that may change the control frames.
    fn talk_by(&mut self, rounds: usize, mut alter: impl FnMut(&mut ControlFrame)) {
        for _ in 0..rounds {
            self.fabric().pass(20_000_000);
            let now = self.fabric().now();
            for side in [0, 1] {
                let mut frames = Vec::new();
                self.pair.drivers[side].poll(now, true, &mut |mut frame| {
                    alter(&mut frame);
                    frames.push(frame);
                    true
                });
                frames
                    .iter()
                    .for_each(|frame| self.pair.drivers[1 - side].receive_frame(frame, now));
            }
        }
    }
}

fn terms(addr: u64, bytes: u64) -> Terms {
    Terms {
        addr,
        bytes,
        tag: 0,
        parts: 1,
        part: 0,
        epoch: Epoch::default(),
    }
}

/// Returns true if the error is a violation of the protocol, and its text contains `who` and `how`.
fn breaks_protocol(error: &Error, who: &str, how: &str) -> bool {
    let text = error.to_string();
    matches!(error, Error::Protocol(_)) && text.contains(who) && text.contains(how)
}

#[test]
fn an_invalid_grant_ends_the_connection_with_an_error() {
    let mut stage = Stage::new(1);
    let place = |part| entry_word(0, part);
    let group = |parts, part| Terms {
        parts,
        part,
        ..terms(4096, 8)
    };
    // Each row has entries, each with the part in whose place it is written, and the expected
    // error.
    let lies: [(Vec<(usize, Terms)>, &str); 8] = [
        (
            vec![(0, terms(u64::MAX - 3, 100))],
            "invalid buffer of 100 bytes at 0xfffffffffffffffc",
        ),
        (
            vec![(0, terms(4096, MAX_RECEIVE_BYTES + 1))],
            "invalid buffer of 1099511627777 bytes",
        ),
        (vec![(0, group(0, 0))], "invalid group of 0 receives"),
        (vec![(0, group(9, 0))], "invalid group of 9 receives"),
        (vec![(0, group(255, 255))], "invalid group of 255 receives"),
        (vec![(0, group(8, 3))], "part 3 in place of part 0"),
        (
            vec![(0, group(2, 0)), (1, group(2, 0))],
            "part 0 in place of part 1",
        ),
        (
            vec![(0, group(2, 0)), (1, group(3, 1))],
            "invalid group of 3 receives",
        ),
    ];
    for (entries, violation) in lies {
        stage.again();
        for (part, terms) in entries {
            stage.forge(place(part), &Entry::new(&terms, &[0; MAX_RAILS / 2], 0));
        }
        let error = stage.isend(8, 0).unwrap_err();
        assert!(breaks_protocol(&error, "end 1", violation), "{error}");
        assert_eq!(stage.isend(8, 0), Err(error));
    }
}

#[test]
fn an_incomplete_or_out_of_order_grant_is_ignored() {
    let mut stage = Stage::new(1);
    for sequence in [1, 5, 32, 1 << 32, u64::MAX] {
        for at in [0, entry_word(sequence, 0)] {
            stage.forge(at, &Entry::new(&terms(4096, 8), &[0; 4], sequence));
            assert_eq!(stage.isend(8, 0), Ok(None), "receive {sequence} at {at}");
        }
    }
    stage.again();
    // One entry of this group of two receives is missing, so no send into the group begins.
    stage.forge(
        0,
        &Entry::new(
            &Terms {
                parts: 2,
                ..terms(4096, 8)
            },
            &[0; 4],
            0,
        ),
    );
    assert_eq!(stage.isend(8, 0), Ok(None));
    // This grant has a tag that the send does not match.
    stage.again();
    stage.forge(
        0,
        &Entry::new(
            &Terms {
                tag: 7,
                ..terms(4096, 8)
            },
            &[0; 4],
            0,
        ),
    );
    assert_eq!(stage.isend(8, 0), Ok(None));
    // The same grant is too small for this send. Only this send fails.
    let error = *stage.isend(9, 7).unwrap_err();
    let Error::Usage(usage) = &error else {
        panic!("{error:?}")
    };
    let text = usage.to_string();
    assert!(
        text.contains("9 bytes into a receive of 8 bytes") && text.contains("end 1"),
        "{text}"
    );
    stage.again();
    stage.check();
}

#[test]
fn a_grant_of_foreign_memory_ends_the_connection_and_writes_nothing() {
    let mut stage = Stage::new(2);
    let to = stage.fabric().to.as_ptr() as u64;
    let real = stage.fabric().into.packed_keys(true);
    let outside = to + sim::fabric::ARENA as u64 + 8192;
    let beyond = to + (1 << 40);
    for (addr, keys) in [
        (to, [0; 4]),
        (to, [u64::MAX; 4]),
        (0, real),
        (beyond, real),
        (outside, real),
    ] {
        stage.again();
        let before = stage.fabric().to.to_vec();
        stage.forge(0, &Entry::new(&terms(addr, 4096), &keys, 0));
        let send = stage
            .isend(4096, 0)
            .unwrap()
            .expect("nothing is wrong with the grant itself");
        let error = (0..20).find_map(|_| {
            stage.talk(20);
            stage.poll_until(|stage| {
                let mut path = stage.pair.send.enter().unwrap();
                path.test(&stage.pair.contexts[0], send)
                    .map(|done| assert_eq!(done, None))
                    .err()
            })
        });
        let Some(Error::Network(network)) = error.as_deref() else {
            panic!("{error:?}")
        };
        let text = network.to_string();
        assert!(
            text.contains("to end 1 failed: peer denied access to its memory"),
            "{text}"
        );
        assert!(
            *before == *stage.fabric().to,
            "bytes were written where none may be"
        );
    }
}

#[test]
fn no_grant_crashes_the_sender() {
    let mut stage = Stage::new(2);
    let mut dice = Dice::new(1);
    for _ in 0..300 {
        stage.again();
        for sequence in 0..4 {
            for part in 0..PARTS {
                let worst = |dice: &mut Dice| {
                    [0, 1, u64::MAX, 1 << 40, dice.below(u64::MAX)][dice.below(5) as usize]
                };
                let terms = Terms {
                    addr: worst(&mut dice),
                    bytes: worst(&mut dice) & ((1 << 41) - 1),
                    tag: dice.below(2) as i32,
                    parts: [1, 2, 8, 0, 9][dice.below(5) as usize],
                    part: if dice.one_in(4) {
                        dice.below(256) as u8
                    } else {
                        part as u8
                    },
                    epoch: Epoch::new(if dice.one_in(4) {
                        dice.below(128) as u8
                    } else {
                        0
                    })
                    .unwrap(),
                };
                let keys = std::array::from_fn(|_| worst(&mut dice));
                stage.forge(
                    entry_word(sequence, part),
                    &Entry::new(&terms, &keys, sequence),
                );
            }
        }
        for _ in 0..20 {
            let bytes = dice.below(5000) as usize;
            let tag = dice.below(2) as i32;
            if let Ok(Some(request)) = stage.isend(bytes, tag) {
                stage.fabric().pass(1_000_000);
                let mut path = stage.pair.send.enter().unwrap();
                let _ = path.test(&stage.pair.contexts[0], request);
            }
        }
    }
    stage.again();
    stage.check();
}

#[test]
fn an_invalid_immediate_ends_the_connection_with_an_error() {
    let mut stage = Stage::new(1);
    let good = Immediate {
        slot: Slot::of(0),
        part: 0,
        generation: 0,
        shares: 1,
        share: 0,
        full_chunks: 0,
    };
    let lies: [(Vec<Immediate>, &str); 5] = [
        (
            vec![Immediate { part: 2, ..good }],
            "unexpected share 0 of part 2",
        ),
        (
            vec![Immediate { part: 7, ..good }],
            "unexpected share 0 of part 7",
        ),
        (
            vec![Immediate { share: 1, ..good }],
            "unexpected share 1 of part 0",
        ),
        (
            vec![Immediate {
                full_chunks: 4095,
                ..good
            }],
            "1048320 bytes for a receive of 100",
        ),
        (
            vec![
                Immediate { shares: 2, ..good },
                Immediate {
                    shares: 3,
                    share: 1,
                    ..good
                },
            ],
            "immediates of one message disagree: 2 and 3 shares",
        ),
    ];
    for (words, violation) in lies {
        stage.again();
        let receive = stage.irecv(&[100, 100]).unwrap().unwrap();
        words
            .iter()
            .for_each(|word| stage.post_immediate(word.encode()));
        let error = stage.poll_until(|stage| {
            stage
                .received(receive)
                .map(|done| assert!(!done, "it is done"))
                .err()
        });
        let error = error.unwrap_or_else(|| panic!("{violation}: no error"));
        assert!(breaks_protocol(&error, "end 0", violation), "{error}");
        assert!(stage.irecv(&[1]).is_err());
    }
}

#[test]
fn repeated_empty_shares_are_ignored() {
    let mut stage = Stage::new(1);
    let receive = stage.irecv(&[100]).unwrap().unwrap();
    let share = |share| {
        Immediate {
            slot: Slot::of(0),
            part: 0,
            generation: 0,
            shares: 2,
            share,
            full_chunks: 0,
        }
        .encode()
    };
    // These are more immediates than receives posted at first, so the receiver must post new ones.
    for _ in 0..2000 {
        stage.post_immediate(share(0));
        stage.fabric().pass(1_000_000);
        assert_eq!(stage.received(receive), Ok(false));
    }
    stage.post_immediate(share(1));
    stage
        .poll_until(|stage| stage.received(receive).unwrap().then_some(()))
        .expect("the other share arrives");
}

#[test]
fn stale_and_misplaced_immediates_are_ignored() {
    let mut stage = Stage::new(1);
    let receive = stage.irecv(&[100]).unwrap().unwrap();
    for number in 0..2000_u64 {
        let slot = Slot::of(1 + number % (SLOTS as u64 - 1));
        let other_slot = Immediate {
            slot,
            part: 7,
            generation: 0,
            shares: 8,
            share: 7,
            full_chunks: 4095,
        };
        let other_time = Immediate {
            slot: Slot::of(0),
            generation: 1 + (number % 63) as u8,
            ..other_slot
        };
        stage.post_immediate(
            if number % 2 == 0 {
                other_slot
            } else {
                other_time
            }
            .encode(),
        );
    }
    for _ in 0..100 {
        stage.fabric().pass(1_000_000);
        assert_eq!(stage.received(receive), Ok(false));
    }
    assert_eq!(
        stage.received(32),
        Err(Box::new(Argument::NotInFlight(32).into())),
        "no such slot"
    );
    stage.post_immediate(
        Immediate {
            slot: Slot::of(0),
            part: 0,
            generation: 0,
            shares: 1,
            share: 0,
            full_chunks: 0,
        }
        .encode(),
    );
    stage
        .poll_until(|stage| stage.received(receive).unwrap().then_some(()))
        .expect("the true share arrives");
}

#[test]
fn no_immediate_crashes_the_receiver() {
    let mut stage = Stage::new(1);
    let mut dice = Dice::new(2);
    for _ in 0..200 {
        stage.again();
        for _ in 0..SLOTS {
            let parts = 1 + dice.below(PARTS as u64) as usize;
            let rooms: Vec<usize> = (0..parts).map(|_| dice.below(4000) as usize).collect();
            stage.irecv(&rooms).unwrap();
        }
        for _ in 0..20 {
            let mut word = dice.below(1 << 32) as u32;
            if dice.one_in(2) {
                word &= 31 | 7 << 5 | 1 << 14;
            }
            stage.post_immediate(word);
            stage.fabric().pass(50_000);
            for receive in 0..SLOTS as u16 {
                let _ = stage.received(receive);
            }
        }
    }
    stage.again();
    stage.check();
}

#[test]
fn impossible_claims_of_a_receiver_are_refused() {
    let mut stage = Stage::new(2);
    let open = |sequence| OpenReceive {
        sequence,
        shares: [255; PARTS],
    };
    for received in [
        Received {
            granted: u64::MAX,
            open: Vec::new(),
        },
        Received {
            granted: 200,
            open: Vec::new(),
        },
        Received {
            granted: 4,
            open: vec![open(4)],
        },
        Received {
            granted: 4,
            open: vec![open(u64::MAX)],
        },
        Received {
            granted: 4,
            open: vec![open(1), open(1)],
        },
    ] {
        stage.again();
        stage.check();
        stage.deliver_control(
            0,
            1,
            ControlMessage::Fenced {
                lane: lane(1),
                received,
            }
            .encode(),
        );
        let error = stage.complaint(0).expect("an error");
        assert!(breaks_protocol(&error, "end 1", "FENCED claims"), "{error}");
    }
    for (side, delivered) in [(0, 5), (0, u64::MAX), (1, 1), (1, u64::MAX)] {
        stage.again();
        stage.check();
        stage.deliver_control(side, 1, ControlMessage::Bye { delivered }.encode());
        let text = stage.complaint(side).expect("an error").to_string();
        let violation = format!(
            "end {} violated the protocol: BYE claims {delivered} delivered messages",
            1 - side
        );
        assert!(text.contains(&violation), "{text}");
        assert_eq!(stage.pair.contexts[side].peer.presence(), PeerState::Here);
    }
}

#[test]
fn a_control_message_from_the_wrong_side_ends_the_connection() {
    let mut stage = Stage::new(2);
    let lies = [
        (0, join(lane(1), 1), "the accepting side must not send JOIN"),
        (
            0,
            ControlMessage::Live { lane: lane(1) },
            "the accepting side must not send LIVE",
        ),
        (
            1,
            joined(1024, &QPS),
            "the connecting side must not send JOINED",
        ),
    ];
    for (side, message, why) in lies {
        for is_down in [false, true] {
            stage.again();
            stage.check();
            let mut number = 1;
            if is_down {
                stage.deliver_fenced(side, if side == 0 { 4 } else { 0 });
                number += 1;
            }
            stage.deliver_control(side, number, message.encode());
            let text = stage.complaint(side).expect("an error").to_string();
            let violation = format!("end {} violated the protocol: {why}", 1 - side);
            assert!(text.contains(&violation), "{text}");
        }
    }
}

#[test]
fn unusable_answers_to_a_join_leave_a_lost_rail_lost_and_the_other_carries() {
    let mut stage = Stage::new(2);
    let answers = [
        joined(1024, &QPS),
        joined(4096, &QPS),
        joined(1024, &[QPS[0]; 16]),
        ControlMessage::NotNow {
            lane: lane(1),
            attempt: 1,
            why: "\u{202e}x".repeat(100),
        },
    ];
    for answer in answers {
        stage.again();
        stage.check();
        stage.deliver_fenced(0, 4);
        // The driver asks for the rail's return.
        let now = stage.fabric().now() + Duration::from_secs(5);
        stage.pair.drivers[0].poll(now, true, &mut |_| true);
        let text = stage.pair.drivers[0].text();
        assert!(text.contains("x1:1 to x1:1: reconnecting"), "{text}");
        stage.deliver_control(0, 2, answer.encode());
        stage.check_that_only_rail_1_is_lost(0);
        assert_eq!(stage.isend(8, 0), Ok(None));
    }
}

#[test]
fn joins_of_an_unknown_rail_leave_a_lost_rail_lost_and_the_other_carries() {
    let mut stage = Stage::new(2);
    let without_addresses = RailAdvert {
        addresses: Vec::new(),
        ..advert(None)
    };
    for rail in [advert(None), advert(Some(0)), without_addresses] {
        stage.again();
        stage.deliver_fenced(1, 0);
        // These queue pairs do not exist.
        let join = ControlMessage::Join {
            lane: lane(1),
            attempt: 1,
            rail,
            end: end(&[QPS[0]; 16]),
        };
        stage.deliver_control(1, 2, join.encode());
        stage.check_that_only_rail_1_is_lost(1);
    }
}

#[test]
fn an_unsupported_path_mtu_keeps_a_lost_rail_lost_until_a_supported_one_is_offered() {
    let mut stage = Stage::new(2);
    // The ports have an MTU of 1024.
    for lie in [2048, 4096, 0, 1, 1023, 1500, 8192, u32::MAX] {
        stage.again();
        stage.check();
        stage.pair.send.enter().unwrap().lose_rail(
            &stage.pair.contexts[0],
            lane(1),
            "pulled".to_owned(),
        );
        let mut lies = 0;
        let log = CapturedLog::default();
        let alter = |frame: &mut ControlFrame| {
            if let Ok(ControlMessage::Joined {
                lane,
                attempt,
                mut answer,
            }) = ControlMessage::decode(&frame.message)
            {
                assert_eq!(answer.mtu_bytes, 1024);
                answer.mtu_bytes = lie;
                frame.message = ControlMessage::Joined {
                    lane,
                    attempt,
                    answer,
                }
                .encode();
                lies += 1;
            }
        };
        log.capture(|| stage.talk_by(1000, alter));
        assert!(lies > 0, "there was nothing to lie about");
        let line = match lie {
            2048 | 4096 => {
                format!(
                    "end 1 not recovered yet: the peer asked for path MTU {lie} on x1:1, whose port has 1024"
                )
            }
            _ => format!(
                "end 1 sent a malformed control message, ignored: path MTU {lie} is not 256, 512, 1024, 2048 or 4096"
            ),
        };
        assert!(
            log.take().iter().any(|(_, text)| text.contains(&line)),
            "no end logs: {line}"
        );
        let states = |stage: &Stage| [0, 1].map(|side: usize| stage.pair.drivers[side].text());
        let [text, _] = states(&stage);
        assert!(
            text.contains("x0:1 to x0:1: up") && !text.contains("x1:1 to x1:1: up"),
            "{lie}: {text}"
        );
        stage.check();
        stage.talk(1000);
        assert!(
            states(&stage)
                .iter()
                .all(|text| text.contains("x1:1 to x1:1: up")),
            "{lie}: {:?}",
            states(&stage)
        );
        stage.check();
    }
}

#[test]
fn a_peer_that_sends_and_never_reads_is_disconnected() {
    let mut stage = Stage::new(2);
    stage.deliver_fenced(1, 0);
    let mut end = None;
    for number in 2..10_000 {
        // The receiving side answers each request with a refusal, which is never delivered.
        stage.deliver_control(1, number, join(lane(1), 1).encode());
        end = stage.complaint(1).map(|error| (number, error));
        if end.is_some() {
            break;
        }
        if number % 16 == 0 {
            // Lets the fabric send the grants that `complaint` posts. They do not matter here.
            stage.fabric().pass(1000);
        }
    }
    let (number, error) = end.expect("the peer is never cut off");
    let violation = "peer sends control frames but does not acknowledge ours";
    assert!(
        number < 200 && breaks_protocol(&error, "end 0", violation),
        "{number}: {error}"
    );
}
