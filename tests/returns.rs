//! Rails that return under difficult conditions, in virtual time. Both ends are in this process,
//! without a handshake, on the simulation's fabric. The tests read and change messages in transit.

#![allow(unsafe_code)]

mod common;
mod sim;

use common::captured_log::CapturedLog;
use host::error::Internal;
use nccl_net_spark::comm::datapath::lane::Role;
use nccl_net_spark::comm::datapath::path::Faults;
use nccl_net_spark::comm::datapath::shared::SharedPath;
use nccl_net_spark::comm::datapath::stopping::{LostQueues, Stopped};
use nccl_net_spark::comm::rail::registration::Keys;
use nccl_net_spark::comm::{Purpose, RecvPart};
use proto::device::{Event, PortChange, Presence};
use proto::wire::control::{ControlFrame, ControlMessage};
use proto::wire::ids::LaneId;
use sim::fabric::{Fabric, Pair, RAILS};
use sim::threads;
use softverbs::hotplug::Phase;
use softverbs::path::PathFault;
use std::sync::MutexGuard;
use std::time::Duration;
use verbs::HostMemory;

struct Stage {
    fabric: MutexGuard<'static, Option<Fabric>>,
    pairs: Vec<Pair>,
}

impl Stage {
    fn new(connections: usize, rails: usize) -> Self {
        let mut turn = sim::lock_fabric();
        let fabric = turn.get_or_insert_with(Fabric::new);
        // Clears the faults of the previous test.
        for rail in 0..RAILS {
            fabric.set(rail, true);
            fabric.silence(rail, 0);
            fabric.set_path(rail, PathFault::Silent, false);
        }
        fabric.forget_silence();
        threads::hang_no_more();
        threads::let_return();
        fabric.pass(1_000_000_000);
        let pairs = (0..connections).map(|_| fabric.connect(rails, 1)).collect();
        Self {
            fabric: turn,
            pairs,
        }
    }

    fn fabric(&mut self) -> &mut Fabric {
        self.fabric.as_mut().unwrap()
    }

    /// Lets `ms` milliseconds pass while all drivers run. `on_its_way` may change each control
    /// frame.
    fn talk(&mut self, ms: u64, mut on_its_way: impl FnMut(&mut ControlFrame)) {
        for _ in 0..ms / 20 {
            self.fabric().pass(20_000_000);
            let now = self.fabric().now();
            self.fabric()
                .hosts
                .iter()
                .for_each(|host| host.process().tick(now));
            for pair in &mut self.pairs {
                for side in [0, 1] {
                    let mut frames = Vec::new();
                    pair.drivers[side].poll(now, true, &mut |frame| {
                        frames.push(frame);
                        true
                    });
                    for frame in &mut frames {
                        on_its_way(frame);
                        pair.drivers[1 - side].receive_frame(frame, now);
                    }
                }
            }
        }
    }

    fn set(&mut self, rails: &[usize], is_up: bool) {
        for rail in rails {
            self.fabric().set(*rail, is_up);
            (0..self.pairs.len()).for_each(|connection| self.tell(connection, *rail, is_up));
        }
    }

    fn tell(&mut self, connection: usize, rail: usize, is_up: bool) {
        let now = self.fabric().now();
        for side in [0, 1] {
            let port = self.fabric().hosts[side].process().rails[rail].clone();
            self.pairs[connection].drivers[side].port_changed(
                &port,
                if is_up {
                    PortChange::Up
                } else {
                    PortChange::Down
                },
                now,
            );
        }
    }

    /// Returns the state of the rails for each connection: the sender's view, then the receiver's.
    fn text(&self) -> Vec<[String; 2]> {
        self.pairs
            .iter()
            .map(|pair| [0, 1].map(|side: usize| pair.drivers[side].text()))
            .collect()
    }

    fn is_whole(&self) -> bool {
        self.pairs
            .iter()
            .all(|pair| pair.drivers.iter().all(|driver| driver.is_whole()))
    }
}

#[test]
fn a_twin_without_an_address_returns_by_a_cable_between_ports_of_different_names() {
    let mut stage = Stage::new(1, 2);
    stage.set(&[1], false);
    stage.talk(200, |_| {});
    let down = "x0:1 to x0:1: up, x1:1 to x1:1: lost";
    assert_eq!(stage.text(), [[down, down]]);
    stage.set(&[1], true);
    let mut asked = 0;
    stage.talk(10_000, |frame| {
        if let Ok(ControlMessage::Join {
            lane,
            attempt,
            mut rail,
            end,
        }) = ControlMessage::decode(&frame.message)
        {
            // Describes the rail as if its cable were in the other port.
            rail.phys_port = "p1".to_owned();
            rail.addresses
                .retain(|address| address.gid.starts_with(&[0xfe, 0x80]));
            assert_eq!(rail.addresses.len(), 1);
            frame.message = ControlMessage::Join {
                lane,
                attempt,
                rail,
                end,
            }
            .encode();
            asked += 1;
        }
    });
    assert!(
        stage.is_whole(),
        "asked for {asked} times: {:?}",
        stage.text()
    );
}

#[test]
fn one_connection_for_all_tries_an_address_that_does_not_answer() {
    let mut stage = Stage::new(4, 2);
    stage.set(&[1], false);
    stage.talk(200, |_| {});
    stage.fabric().silence(1, 1000);
    stage.set(&[1], true);
    let mut words = Vec::new();
    let mut on_frame = |frame: &mut ControlFrame| {
        if let Ok(ControlMessage::NotNow { why, .. }) = ControlMessage::decode(&frame.message) {
            words.push(why);
        }
    };
    stage.talk(9_000, &mut on_frame);
    let tried = |stage: &mut Stage| 1000 - stage.fabric().silence_left(1);
    // One connection tries both addresses on behalf of all: immediately, then after pauses of 2, 4,
    // 8 and then 15 s.
    assert!(
        (4..=6).contains(&tried(&mut stage)),
        "{}",
        tried(&mut stage)
    );
    stage.talk(60_000, &mut on_frame);
    assert!(
        (10..=16).contains(&tried(&mut stage)),
        "{}",
        tried(&mut stage)
    );
    let (first, later) = words.split_first().expect("it is refused");
    assert!(first.contains("to RTR: Connection timed out"), "{first}");
    assert!(
        later.iter().all(|why| why.contains("Connection timed out")),
        "{words:?}"
    );
    assert!(
        later
            .iter()
            .filter(|why| why.contains("next attempt in"))
            .count()
            > 10,
        "{words:?}"
    );
    // The address answers again. The drivers detect it without a notification.
    stage.fabric().silence(1, 0);
    stage.talk(20_000, |_| {});
    assert!(stage.is_whole(), "{:?}", stage.text());
}

#[test]
fn a_path_that_resolves_and_does_not_carry_is_tested_by_one_connection_for_all() {
    let mut stage = Stage::new(4, 2);
    stage.set(&[1], false);
    stage.talk(200, |_| {});
    stage.fabric().set_path(1, PathFault::Silent, true);
    stage.set(&[1], true);
    let mut asked = 0;
    let mut lost = 0;
    let mut on_frame = |frame: &mut ControlFrame| match ControlMessage::decode(&frame.message) {
        Ok(ControlMessage::Join { .. }) => asked += 1,
        Ok(ControlMessage::NotNow { why, .. }) => lost += u32::from(why.contains("test write")),
        _ => {}
    };
    stage.talk(1_500, &mut on_frame);
    // No path was known to be dead, so all connections try both addresses, the IPv4 and the
    // link-local one. A working rail thus returns to all of them together.
    assert_eq!((asked, lost), (8, 8));
    asked = 0;
    lost = 0;
    let mut on_frame = |frame: &mut ControlFrame| match ControlMessage::decode(&frame.message) {
        Ok(ControlMessage::Join { .. }) => asked += 1,
        Ok(ControlMessage::NotNow { why, .. }) => lost += u32::from(why.contains("test write")),
        _ => {}
    };
    stage.talk(60_000, &mut on_frame);
    // One connection tests each of the two addresses, after pauses of 2, 4, 8 and then 15 s. The
    // others do not even ask during the pauses.
    assert!(
        (8..=28).contains(&lost) && asked <= 2 * lost,
        "asked {asked} times, {lost} test writes lost"
    );
    stage.fabric().set_path(1, PathFault::Silent, false);
    stage.talk(20_000, |_| {});
    assert!(stage.is_whole(), "{:?}", stage.text());
}

/// A call can hang in three steps: when the sender creates queue pairs, when the receiver answers,
/// and when the sender connects.
#[test]
fn a_call_that_hangs_keeps_no_rail_under_test_and_no_second_thread_hangs_in_its_device() {
    for step in [0, 1, 2] {
        let mut stage = Stage::new(2, 2);
        let log = CapturedLog::default();
        let lose_and_return = |stage: &mut Stage| {
            stage.set(&[1], false);
            stage.talk(200, |_| {});
            stage.set(&[1], true);
        };
        lose_and_return(&mut stage);
        threads::hang_after(step);
        stage.talk(200, |_| {});
        let (up, lost) = (
            "x0:1 to x0:1: up, x1:1 to x1:1: up",
            "x0:1 to x0:1: up, x1:1 to x1:1: lost",
        );
        assert_eq!(stage.text()[1], [up; 2], "another connection does not wait");
        assert_ne!(stage.text()[0], [up; 2], "step {step} hangs");
        log.capture(|| stage.talk(20_000, |_| {}));
        assert_eq!(stage.text(), [[lost; 2], [up; 2]]);
        log.capture(|| lose_and_return(&mut stage));
        log.capture(|| stage.talk(5_000, |_| {}));
        assert_eq!(
            stage.text(),
            [[lost; 2]; 2],
            "the device gets no second thread"
        );
        assert_eq!(threads::hung(), 1);
        let warnings = log
            .take()
            .into_iter()
            .filter(|(_, line)| line.contains("has not finished a call"))
            .count();
        assert_eq!(warnings, 1);
        threads::let_return();
        stage.talk(5_000, |_| {});
        assert!(stage.is_whole(), "{:?}", stage.text());
    }
}

#[test]
fn a_loss_over_a_device_that_was_cut_off_keeps_its_first_reason() {
    let mut stage = Stage::new(1, 2);
    let log = CapturedLog::default();
    let lane = LaneId::new(1).unwrap();
    stage.fabric().move_to(1, Phase::Cut);
    let pair = &stage.pairs[0];
    pair.send
        .enter()
        .unwrap()
        .lose_rail(&pair.contexts[0], lane, "a write failed".to_owned());
    log.capture(|| stage.talk(20, |_| {}));
    let lines = log.take();
    let expected =
        "rail x1:1 to end 1 lost: its device was removed: a write failed (peer rail x1:1); ";
    assert!(
        lines.iter().any(|(_, line)| line.starts_with(expected)),
        "{lines:?}"
    );
    stage.fabric().move_to(1, Phase::Gone);
    stage.fabric().show(1, false);
    drop(std::mem::take(&mut stage.pairs));
    stage.fabric().plug_all();
}

#[test]
fn memory_freed_before_a_resend_ends_with_an_error_that_names_the_peer() {
    const BYTES: usize = 4096;
    let mut stage = Stage::new(1, 2);
    let Stage { fabric, pairs } = &mut stage;
    let fabric = fabric.as_mut().unwrap();
    let pair = &mut pairs[0];
    let addr = fabric.to.as_ptr() as u64;
    let part = RecvPart {
        addr,
        bytes: BYTES,
        tag: 0,
        memory: &fabric.into,
    };
    pair.recv
        .enter()
        .unwrap()
        .irecv(&pair.contexts[1], &[part], false)
        .unwrap()
        .expect("a receive");
    let from = vec![7_u8; 2 * BYTES].into_boxed_slice();
    // SAFETY: the buffer lives until the end of the test, when nothing is sent any longer.
    let memory = unsafe { HostMemory::from_caller(from.as_ptr() as usize, from.len()) };
    let registered = fabric.hosts[0]
        .process()
        .register(memory, Purpose::Send)
        .unwrap();
    let sent = (0..1000).find_map(|_| {
        fabric.pass(1000);
        pair.send
            .enter()
            .unwrap()
            .isend(
                &pair.contexts[0],
                from.as_ptr() as u64,
                BYTES,
                0,
                &registered,
            )
            .unwrap()
    });
    sent.expect("a send begins");
    // The caller deregisters the memory too early, and a rail that carries a share of it is lost.
    drop(registered);
    stage.set(&[0], false);
    stage.talk(200, |_| {});
    let pair = &mut stage.pairs[0];
    let error = pair
        .send
        .enter()
        .unwrap()
        .test(&pair.contexts[0], sent.unwrap())
        .expect_err("the send fails");
    assert!(
        error
            .to_string()
            .contains("deregistered while a send from it to end 1 was running"),
        "{error}"
    );
}

/// A message has arrived, the receiver has not polled it, and its rail is lost. The sender does not
/// resend what was acknowledged, so BYE must count the message.
#[test]
fn bye_counts_arrivals_in_the_queue_of_a_rail_that_is_being_stopped() {
    const BYTES: usize = 64;
    let mut stage = Stage::new(1, 1);
    let sent = begin_message(&mut stage, BYTES);
    let Stage { fabric, pairs } = &mut stage;
    let fabric = fabric.as_mut().unwrap();
    let pair = &mut pairs[0];
    let is_sent = (0..10_000).any(|_| {
        fabric.pass(10_000);
        pair.send
            .enter()
            .unwrap()
            .test(&pair.contexts[0], sent)
            .unwrap()
            .is_some()
    });
    assert!(is_sent, "the message was not acknowledged");
    threads::hang_fence_after(0);
    let now = fabric.now();
    let rail = fabric.hosts[1].process().rails[0].clone();
    pair.drivers[1].port_changed(&rail, PortChange::Down, now);
    let mut frames = Vec::new();
    let mut close = |pair: &mut Pair| {
        pair.drivers[1].close(now, now + Duration::from_millis(500), &mut |frame| {
            frames.push(frame);
            true
        })
    };
    assert!(!close(pair), "BYE does not wait for the fence");
    threads::let_fences_return();
    assert!(close(pair));
    let messages: Vec<_> = frames
        .iter()
        .filter_map(|frame| ControlMessage::decode(&frame.message).ok())
        .collect();
    let byes: Vec<_> = messages
        .iter()
        .filter(|message| matches!(message, ControlMessage::Bye { .. }))
        .collect();
    assert!(
        matches!(byes[..], [ControlMessage::Bye { delivered: 1 }]),
        "{messages:?}"
    );
}

/// NCCL's thread loses a rail and wakes the service thread, which finds the data path in use.
/// NCCL's thread then uses the path in every round.
#[test]
fn a_loss_is_found_although_the_data_path_was_busy_at_the_wake_up() {
    let mut stage = Stage::new(1, 2);
    let Stage { fabric, pairs } = &mut stage;
    let fabric = fabric.as_mut().unwrap();
    let pair = &mut pairs[0];
    let lane = LaneId::new(0).unwrap();
    pair.send.borrow().unwrap().lose_rail(
        &pair.contexts[0],
        lane,
        "a fault of the test".to_owned(),
    );
    let now = fabric.now();
    let held = pair.send.enter().unwrap();
    pair.drivers[0].poll(now, true, &mut |_| true);
    drop(held);
    drop(pair.send.enter().unwrap());
    pair.drivers[0].poll(now, false, &mut |_| true);
    assert!(
        pair.drivers[0].text().contains("lost"),
        "{}",
        pair.drivers[0].text()
    );
}

/// Begins the transfer of one message, and returns the sender's request.
fn begin_message(stage: &mut Stage, bytes: usize) -> u16 {
    let Stage { fabric, pairs } = stage;
    let fabric = fabric.as_mut().unwrap();
    let pair = &pairs[0];
    let part = RecvPart {
        addr: fabric.to.as_ptr() as u64,
        bytes,
        tag: 0,
        memory: &fabric.into,
    };
    pair.recv
        .enter()
        .unwrap()
        .irecv(&pair.contexts[1], &[part], false)
        .unwrap()
        .expect("a receive");
    let addr = fabric.from.as_ptr() as u64;
    let sent = (0..1000).find_map(|_| {
        fabric.pass(1000);
        pair.send
            .enter()
            .unwrap()
            .isend(&pair.contexts[0], addr, bytes, 0, &fabric.out)
            .unwrap()
    });
    sent.expect("a send begins")
}

#[test]
fn a_failed_device_counts_as_running_whatever_the_kernel_reports() {
    let mut stage = Stage::new(1, 1);
    let device = |stage: &mut Stage| stage.fabric().hosts[0].process().rails[0].clone();
    let not_stopped = |queues: Box<LostQueues>| match queues.stop(Role::Sender) {
        Stopped::NotYet(queues) => queues,
        Stopped::Done(_) | Stopped::NotFlushed => panic!("the device counts as stopped"),
    };
    let rail = device(&mut stage);
    let lost = {
        let mut path = stage.pairs[0].send.borrow().unwrap();
        let lane = &mut path.rails().lanes[0];
        lane.set_aside();
        lane.take_lost().unwrap()
    };
    stage.fabric().move_to(0, Phase::Failed);
    // The device moves queue pairs to the error state without reporting an error.
    let lost = not_stopped(lost);
    rail.device.event(Event::DeviceFatal);
    assert_eq!(rail.device.presence(), Presence::CutOff, "the early event");
    let lost = not_stopped(lost);
    stage.fabric().move_to(0, Phase::Cut);
    let lost = not_stopped(lost);
    // The event of the device's failure may also be read late.
    rail.device.event(Event::DeviceFatal);
    assert_eq!(rail.device.presence(), Presence::CutOff);
    let lost = not_stopped(lost);
    stage.fabric().move_to(0, Phase::Gone);
    // The device's sysfs entry exists.
    let lost = not_stopped(lost);
    stage.fabric().show(0, false);
    assert!(matches!(lost.stop(Role::Sender), Stopped::Done(_)));
    drop(std::mem::take(&mut stage.pairs));
    stage.fabric().plug_all();
}

/// The thread that stops a rail's queue pairs hangs. Until it returns, NCCL does not get the error
/// of the failed connection, because a NIC may still use its buffers. But there is a limit.
#[test]
fn a_failed_connection_reports_its_error_once_its_queue_pairs_have_stopped() {
    for returns in [true, false] {
        let mut stage = Stage::new(1, 2);
        let log = CapturedLog::default();
        threads::hang_fence_after(1);
        stage.pairs[0].drivers[0].give_up(Internal::PathPanicked.into());
        let poll = |stage: &mut Stage, ms: u64| {
            stage.fabric().pass(ms * 1_000_000);
            let now = stage.fabric().now();
            log.capture(|| stage.pairs[0].drivers[0].poll(now, false, &mut |_| true));
            let mut path = stage.pairs[0].send.borrow().unwrap();
            path.rails().status.check().is_err()
        };
        assert!(
            !poll(&mut stage, 0) && !poll(&mut stage, 2900),
            "one rail's queue pairs may run"
        );
        if returns {
            threads::let_return();
            assert!(poll(&mut stage, 1));
        } else {
            assert!(poll(&mut stage, 200), "the limit has passed");
        }
        let warnings = log
            .take()
            .into_iter()
            .filter(|(_, line)| line.contains("x1:1 has not stopped for 3 s"))
            .count();
        assert_eq!(warnings, usize::from(!returns));
        threads::let_return();
    }
}

/// Closes TCP under the sender, and takes down both rails. The peer answers after `answers_after`
/// milliseconds, if it still exists. Returns the log's warnings.
fn warnings_after_a_close(answers_after: Option<u64>) -> Vec<String> {
    let mut stage = Stage::new(1, 2);
    let log = CapturedLog::default();
    log.capture(|| {
        stage.talk(200, |_| {});
        let now = stage.fabric().now();
        stage.pairs[0].drivers[0].tcp_closed_by_peer(now);
        for rail in 0..2 {
            stage.fabric().set(rail, false);
            let now = stage.fabric().now();
            let port = stage.fabric().hosts[0].process().rails[rail].clone();
            stage.pairs[0].drivers[0].port_changed(&port, PortChange::Down, now);
        }
        let talks_alone = |stage: &mut Stage, ms: u64| {
            for _ in 0..ms / 20 {
                stage.fabric().pass(20_000_000);
                let now = stage.fabric().now();
                stage.pairs[0].drivers[0].poll(now, true, &mut |_| false);
            }
        };
        talks_alone(&mut stage, answers_after.unwrap_or(4000));
        let early: Vec<_> = log.take().into_iter().filter(is_warning).collect();
        assert!(early.is_empty(), "before the peer's answer: {early:?}");
        if answers_after.is_some() {
            // Another TCP connection is dialled.
            stage.pairs[0].drivers[0].tcp_opened();
            stage.talk(200, |_| {});
        }
        log.take()
            .into_iter()
            .filter(is_warning)
            .map(|(_, line)| line)
            .collect()
    })
}

#[test]
fn lost_rails_are_no_news_while_the_peer_may_have_ended() {
    assert_eq!(
        warnings_after_a_close(None),
        [""; 0],
        "the peer has ended: its rails are not the cause"
    );
    let warnings = warnings_after_a_close(Some(1000));
    let of_sender: Vec<_> = warnings
        .iter()
        .filter(|line| line.contains("; retrying in"))
        .collect();
    assert!(
        matches!(&of_sender[..], [first, last] if first.contains("1 of 2 rails remains") && last.contains("no rail remains")),
        "the peer lives: {warnings:#?}"
    );
}

/// One buffer was unmapped after its registration, so the device of the late rail refuses it.
#[test]
fn the_device_of_a_late_rail_holds_all_memory_or_none() {
    const BYTES: usize = 4096;
    let mut stage = Stage::new(0, 2);
    let process = stage.fabric().hosts[0].process().clone();
    let rail = process.rails[1].clone();
    rail.announce([0xff; 16]).unwrap();
    let kept = vec![1_u8; BYTES];
    // SAFETY: a new mapping, which nothing else uses.
    let unmapped = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(std::ptr::null_mut(), BYTES, protection, flags, -1, 0)
    };
    assert_ne!(unmapped, libc::MAP_FAILED);
    let [held, refused] = [kept.as_ptr() as usize, unmapped as usize].map(|addr| {
        // SAFETY: the bytes are mapped. Nothing reads or writes them over this registration.
        let memory = unsafe { HostMemory::from_caller(addr, BYTES) };
        process.register(memory, Purpose::Send).unwrap()
    });
    let has_memory = || held.keys(rail.id) != Some(Keys::default());
    assert!(!has_memory(), "the rail may never be used");
    // SAFETY: the mapping from above.
    assert_eq!(unsafe { libc::munmap(unmapped, BYTES) }, 0);

    let log = CapturedLog::default();
    let interfaces = host::interfaces::all().unwrap();
    let wanted = rail.snapshot(&interfaces).unwrap_err();
    assert!(wanted.to_string().contains("is not registered"), "{wanted}");
    for _ in 0..3 {
        stage.fabric().pass(10_000_000_000);
        let now = stage.fabric().now();
        let back = log.capture(|| process.look_for_returned(now));
        assert!(back.is_empty() && !has_memory());
    }
    let warnings: Vec<_> = log.take().into_iter().filter(is_warning).collect();
    assert!(
        matches!(&warnings[..], [(_, line)] if line.contains("x1:1 has a link") && line.contains("4096 bytes")),
        "{warnings:?}"
    );

    drop(refused);
    stage.fabric().pass(10_000_000_000);
    let now = stage.fabric().now();
    assert_eq!(process.look_for_returned(now).len(), 1);
    assert!(has_memory() && rail.snapshot(&interfaces).is_ok());
}

fn is_warning((level, _): &(tracing::Level, String)) -> bool {
    *level == tracing::Level::WARN
}
