//! Connections by TCP between hosts that no rail joins (`NCCL_SPARK_RING_TCP`), with both ends in
//! this process, on the software fabric.

#![allow(unsafe_code)]

#[path = "streams/abi.rs"]
mod abi;
#[path = "streams/bed.rs"]
mod bed;
mod common;
#[path = "streams/hostile.rs"]
mod hostile;
#[path = "streams/refusals.rs"]
mod refusals;

use bed::{
    Buffer, FAR, NEAR, RING_TCP, apart, connect, host, irecv, is_by_tcp, receive_error, send_error,
    sizes, transfer,
};
use common::captured_log::CapturedLog;
use common::comms::{Receiving, Sending};
use common::ends::{every_size, full_window};
use common::{fill, is_filled, turn, until};
use host::error::Error;
use nccl_net_spark::comm::RecvPart;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tracing::Level;

#[test]
fn every_size_arrives_whole_and_is_reported() {
    let ends = apart();
    assert!(is_by_tcp(&ends));
    every_size(
        &ends,
        &[
            0,
            1,
            7,
            8,
            127,
            128,
            129,
            4095,
            4096,
            16_383,
            65_537,
            131_072,
            131_073,
            1 << 20,
            (1 << 22) + 13,
        ],
    );
    let from = Buffer::filled(64 << 20, 99);
    let to = Buffer::blank(64 << 20);
    assert_eq!(transfer(&ends, &from, &to, 64 << 20, 64 << 20), 64 << 20);
    assert!(from.0 == to.0);
}

#[test]
fn a_full_window_of_groups_with_tags_out_of_order() {
    let ends = apart();
    full_window(&ends, 30_000, |mut sends, mut receives, expected| {
        until(|| {
            sends.retain(|send| ends.send.test(*send).unwrap().is_none());
            receives.retain(|receive| match sizes(&ends.recv, *receive) {
                Some(sizes) => {
                    assert_eq!(sizes, expected);
                    false
                }
                None => true,
            });
            (sends.is_empty() && receives.is_empty()).then_some(())
        });
    });
}

#[test]
fn watched_receives_arrive_and_their_log_lines_are_whole() {
    const LINE_WORDS: usize = 16;
    let ends = apart();
    for (bytes, rounds) in [(128, 3000), (4096, 300), (200 << 10, 20)] {
        let words = bytes / 8;
        // Aligned like NCCL's buffers.
        let memory: Vec<AtomicU64> = (0..words + LINE_WORDS).map(|_| AtomicU64::new(0)).collect();
        let first = memory
            .iter()
            .position(|word| (std::ptr::from_ref(word) as usize).is_multiple_of(128))
            .unwrap();
        let to = &memory[first..first + words];
        // SAFETY: the memory outlives the connection, and is accessed as atomics.
        let region = unsafe { verbs::HostMemory::from_caller(to.as_ptr() as usize, bytes) };
        let mut from = Buffer::blank(bytes);
        let out = ends.send.register(from.memory()).unwrap();
        let into = ends.recv.register(region).unwrap();
        let is_over = AtomicBool::new(false);
        let torn = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    for line in to.chunks(LINE_WORDS) {
                        // The last word is the flag, as in LL128.
                        let flag = line[LINE_WORDS - 1].load(Ordering::Acquire);
                        let older = line[..LINE_WORDS - 1]
                            .iter()
                            .any(|word| word.load(Ordering::Relaxed) < flag);
                        torn.fetch_add(u64::from(older), Ordering::Relaxed);
                    }
                }
            });
            for round in 1..=rounds {
                from.0
                    .chunks_exact_mut(8)
                    .for_each(|word| word.copy_from_slice(&u64::to_ne_bytes(round)));
                let part = RecvPart {
                    addr: to.as_ptr() as u64,
                    bytes,
                    tag: 1,
                    memory: &into,
                };
                let receive = until(|| ends.recv.irecv(&[part], true).unwrap());
                assert_eq!(
                    sizes(&ends.recv, receive),
                    None,
                    "nothing is sent for it yet"
                );
                let send = until(|| ends.send.isend(from.addr(), bytes, 1, &out).unwrap());
                // Like NCCL's proxy, posts nothing more until the GPU has seen the bytes.
                let mut received = None;
                let mut sent = None;
                until(|| {
                    sent = sent.or_else(|| ends.send.test(send).unwrap());
                    received = received.take().or_else(|| sizes(&ends.recv, receive));
                    to.iter()
                        .all(|word| word.load(Ordering::Acquire) == round)
                        .then_some(())
                });
                assert_eq!(
                    received.or_else(|| sizes(&ends.recv, receive)),
                    Some(vec![bytes])
                );
                until(|| sent.or_else(|| ends.send.test(send).unwrap()));
            }
            is_over.store(true, Ordering::Relaxed);
        });
        assert_eq!(
            torn.load(Ordering::Relaxed),
            0,
            "a line's flag came before its words ({bytes} bytes)"
        );
    }
}

#[test]
fn many_connections_both_ways() {
    let a = host(NEAR, &[RING_TCP]);
    let b = host(FAR, &[RING_TCP]);
    let all: Vec<_> = (0..12)
        .map(|n| {
            if n % 2 == 0 {
                connect(&a, &b)
            } else {
                connect(&b, &a)
            }
            .unwrap()
        })
        .collect();
    for (n, ends) in all.iter().enumerate() {
        ends.check(n as u64 + 1);
    }
    const BYTES: usize = 700_001;
    let mut buffers: Vec<(Buffer, Buffer)> = (0..all.len())
        .map(|n| (Buffer::filled(BYTES, n as u64), Buffer::blank(4 * BYTES)))
        .collect();
    let mut running = Vec::new();
    for (ends, (from, to)) in all.iter().zip(&mut buffers) {
        let out = ends.send.register(from.memory()).unwrap();
        let into = ends.recv.register(to.memory()).unwrap();
        for place in 0..4 {
            let part = RecvPart {
                addr: to.addr() + (place * BYTES) as u64,
                bytes: BYTES,
                tag: 0,
                memory: &into,
            };
            running.push((
                ends,
                None,
                Some(until(|| ends.recv.irecv(&[part], false).unwrap())),
            ));
        }
        for _ in 0..4 {
            running.push((
                ends,
                Some(until(|| {
                    ends.send.isend(from.addr(), BYTES, 0, &out).unwrap()
                })),
                None,
            ));
        }
    }
    until(|| {
        running.retain(|(ends, send, receive)| match (send, receive) {
            (Some(send), _) => ends.send.test(*send).unwrap().is_none(),
            (_, Some(receive)) => sizes(&ends.recv, *receive).is_none(),
            _ => false,
        });
        running.is_empty().then_some(())
    });
    for (n, (_, to)) in buffers.iter().enumerate() {
        assert!(
            to.0.chunks(BYTES)
                .all(|message| is_filled(message, n as u64)),
            "connection {n}"
        );
    }
}

#[test]
fn a_process_has_rails_to_one_peer_and_tcp_to_another() {
    // A test of `refusals` makes faults on the rails that this one uses.
    let _turn = turn();
    let here = host(NEAR, &[RING_TCP]);
    let near = host(NEAR, &[RING_TCP]);
    let far = host(FAR, &[RING_TCP]);
    let log = CapturedLog::default();
    let (by_rails, by_tcp, again) = log.capture(|| {
        (
            connect(&here, &near).unwrap(),
            connect(&here, &far).unwrap(),
            connect(&here, &far).unwrap(),
        )
    });
    assert!(!is_by_tcp(&by_rails) && is_by_tcp(&by_tcp) && is_by_tcp(&again));
    // All ends are in this process. Each host logs its line for a peer at INFO only once.
    let lines = log.take();
    let lines: Vec<_> = lines
        .iter()
        .filter(|(_, line)| line.contains("by TCP over lo, 4 streams"))
        .collect();
    let infos = lines
        .iter()
        .filter(|(level, _)| *level == Level::INFO)
        .count();
    assert!(
        infos == 2 && lines.len() == 4 && lines[0].1.contains("because no rail reaches it"),
        "{lines:?}"
    );
    for (ends, seed) in [(&by_rails, 1), (&by_tcp, 2), (&by_rails, 3), (&again, 4)] {
        ends.check(seed);
    }
    let total = 2 * (1 + 100 + 5000 + 300_000 + 3_000_001);
    let closing = log.clone();
    closing.capture(|| {
        for ends in [by_rails, by_tcp, again] {
            ends.send.close();
            ends.recv.close();
        }
    });
    let lines = log.take();
    let words = format!(
        "connections closed: {total} bytes sent and 0 received by rails, {total} bytes sent by TCP in 12 messages (NCCL_SPARK_RING_TCP)"
    );
    assert!(
        lines.iter().any(|(_, line)| line.starts_with(&words)),
        "{lines:?}"
    );
    assert_eq!(here.process().registrations.in_use(), 0);
}

#[test]
fn sent_messages_arrive_although_the_sender_closes_with_unread_grants() {
    for bytes in [1000, 900_000] {
        let ends = apart();
        let from = Buffer::filled(bytes, 5);
        let to = Buffer::blank(bytes);
        let out = ends.send.register(from.memory()).unwrap();
        let into = ends.recv.register(to.memory()).unwrap();
        let receive = irecv(&ends.recv, &to, bytes, 0, &into);
        let send = until(|| ends.send.isend(from.addr(), bytes, 0, &out).unwrap());
        // The receiver reads nothing here. A send larger than the sockets' buffers would stay open.
        let begun = Instant::now();
        let is_done = loop {
            if ends.send.test(send).unwrap().is_some() {
                break true;
            }
            if begun.elapsed() > Duration::from_secs(1) {
                break false;
            }
        };
        assert!(is_done, "{bytes} bytes do not fit four sockets");
        // The sender closes before it reads these grants. A socket that is closed with unread data
        // resets its connection.
        let more: Vec<u16> = (0..20)
            .map(|_| irecv(&ends.recv, &to, bytes, 0, &into))
            .collect();
        std::thread::sleep(Duration::from_millis(50));
        ends.send.close();
        drop(ends.send);
        // A grant to a closed socket resets the connection. The kernel then drops unsent data.
        irecv(&ends.recv, &to, bytes, 0, &into);
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(until(|| sizes(&ends.recv, receive)), [bytes]);
        assert!(is_filled(&to.0, 5));
        let error = receive_error(&ends.recv, more[0]);
        let text = error.to_string();
        assert!(
            matches!(error, Error::PeerGone(_)) && text.contains("closed by the peer"),
            "{text}"
        );
        assert!(
            text.contains("TCP with")
                && text.contains("over lo")
                && text.contains("21 receives pending"),
            "{text}"
        );
    }
}

#[test]
fn closing_in_any_order_leaves_nothing_behind() {
    let a = host(NEAR, &[RING_TCP]);
    let b = host(FAR, &[RING_TCP]);
    for order in 0..8 {
        let ends = connect(&a, &b).unwrap();
        let from = Buffer::filled(5000, order);
        let to = Buffer::blank(5000);
        assert_eq!(transfer(&ends, &from, &to, 5000, 5000), 5000);
        let out = ends.send.register(from.memory()).unwrap();
        let into = ends.recv.register(to.memory()).unwrap();
        let open = (order & 2 != 0).then(|| irecv(&ends.recv, &to, 10, 0, &into));
        if order & 1 == 0 {
            ends.send.close();
            drop(ends.send);
            if let Some(open) = open.filter(|_| order & 4 != 0) {
                assert!(matches!(
                    receive_error(&ends.recv, open),
                    Error::PeerGone(_)
                ));
            }
            ends.recv.close();
        } else {
            ends.recv.close();
            drop(ends.recv);
            if order & 4 != 0 {
                let error = if open.is_some() {
                    // The receiver granted a receive before it closed. So this send succeeds, and
                    // the next one fails.
                    until(|| ends.send.isend(from.addr(), 10, 0, &out).unwrap());
                    send_error(&ends.send, &from, &out)
                } else {
                    send_error(&ends.send, &from, &out)
                };
                assert!(matches!(error, Error::PeerGone(_)), "{error}");
            }
            ends.send.close();
        }
    }
}

#[test]
fn the_error_for_an_ended_peer_names_the_peer_the_interface_and_the_request() {
    let ends = apart();
    let from = Buffer::filled(100, 1);
    let to = Buffer::blank(100);
    let out = ends.send.register(from.memory()).unwrap();
    let into = ends.recv.register(to.memory()).unwrap();
    let receive = irecv(&ends.recv, &to, 100, 0, &into);
    // The kernel closes the sockets of a killed process, without a BYE. This drop does the same.
    drop(ends.send);
    let error = receive_error(&ends.recv, receive);
    let text = error.to_string();
    assert!(matches!(error, Error::PeerGone(_)), "{text}");
    for words in [
        "TCP with",
        &format!(":{}", std::process::id()),
        "over lo",
        "without BYE",
        "1 receives pending",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert_eq!(
        ends.recv.test(receive, |_, _| {}).unwrap_err().to_string(),
        text,
        "the first error stays"
    );

    let ends = apart();
    drop(ends.recv);
    let error = send_error(&ends.send, &from, &out);
    assert!(
        matches!(error, Error::PeerGone(_)) && error.to_string().contains("over lo"),
        "{error}"
    );
}

#[test]
fn an_aborted_message_fails_its_receive() {
    let ends = apart();
    // More than the sockets' buffers take: the message is in progress when its sender closes.
    let bytes = 64 << 20;
    let from = Buffer::filled(bytes, 1);
    let to = Buffer::blank(bytes);
    let out = ends.send.register(from.memory()).unwrap();
    let into = ends.recv.register(to.memory()).unwrap();
    let receive = irecv(&ends.recv, &to, bytes, 0, &into);
    let send = until(|| ends.send.isend(from.addr(), bytes, 0, &out).unwrap());
    for _ in 0..100 {
        assert_eq!(ends.send.test(send).unwrap(), None);
    }
    ends.send.close();
    assert!(
        ends.send.test(send).is_err(),
        "its buffer is no longer used"
    );
    let error = receive_error(&ends.recv, receive);
    assert!(
        matches!(error, Error::PeerGone(_)) && error.to_string().contains("without BYE"),
        "{error}"
    );
}

#[test]
fn invalid_calls_are_refused_and_lose_nothing() {
    let ends = apart();
    let from = Buffer::filled(4096, 1);
    let to = Buffer::blank(4096);
    let out = ends.send.register(from.memory()).unwrap();
    let into = ends.recv.register(to.memory()).unwrap();
    let part = RecvPart {
        addr: to.addr(),
        bytes: 1000,
        tag: 0,
        memory: &into,
    };
    let receive = until(|| ends.recv.irecv(&[part], false).unwrap());
    let far = to.addr() + (1 << 30);
    let outside = ends
        .recv
        .irecv(&[RecvPart { addr: far, ..part }], false)
        .unwrap_err();
    assert!(
        outside.to_string().contains("outside the registered"),
        "{outside}"
    );
    let for_sends = ends.send.register(to.memory()).unwrap();
    assert!(
        ends.recv
            .irecv(
                &[RecvPart {
                    memory: &for_sends,
                    ..part
                }],
                false
            )
            .is_err()
            || for_sends.is_for_receives()
    );
    assert!(ends.recv.irecv(&[], false).is_err() && ends.recv.irecv(&[part; 9], false).is_err());
    assert!(
        ends.send
            .isend(from.addr() + (1 << 30), 8, 0, &out)
            .is_err()
    );
    assert_eq!(
        ends.send.isend(from.addr(), 8, 1, &out).unwrap(),
        None,
        "another tag"
    );
    let large = until(|| ends.send.isend(from.addr(), 1001, 0, &out).err());
    assert!(
        large
            .to_string()
            .contains("1001 bytes into a receive of 1000"),
        "{large}"
    );
    assert!(ends.send.test(200).is_err() && ends.recv.test(31, |_, _| {}).is_err());
    let send = until(|| ends.send.isend(from.addr(), 1000, 0, &out).unwrap());
    until(|| ends.send.test(send).unwrap());
    assert_eq!(until(|| sizes(&ends.recv, receive)), [1000]);
    assert!(
        ends.recv.test(receive, |_, _| {}).is_err(),
        "a finished request was still there"
    );
}

#[test]
fn a_long_wait_is_logged_once() {
    let settings = [RING_TCP, ("NCCL_SPARK_STALL_WARN_S", "1")];
    let ends = connect(&host(NEAR, &settings), &host(FAR, &settings)).unwrap();
    let to = Buffer::blank(100);
    let into = ends.recv.register(to.memory()).unwrap();
    let receive = irecv(&ends.recv, &to, 100, 0, &into);
    let log = CapturedLog::default();
    log.capture(|| {
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(1500) {
            assert!(sizes(&ends.recv, receive).is_none());
        }
    });
    let warnings: Vec<_> = log
        .take()
        .into_iter()
        .filter(|(level, _)| *level == Level::WARN)
        .collect();
    assert!(
        warnings.len() == 1 && warnings[0].1.contains("a receive by TCP with"),
        "{warnings:?}"
    );
}

#[test]
fn alternating_kinds_of_messages_keep_their_bytes() {
    let ends = apart();
    let mut dice = 1_u64;
    let mut roll = |limit: u64| {
        dice = common::mix(dice);
        dice % limit
    };
    let mut to = Buffer::blank(8 * 600_000);
    let into = ends.recv.register(to.memory()).unwrap();
    for round in 0..60 {
        let parts = 1 + roll(8) as usize;
        let is_small = roll(2) == 0;
        let bytes: Vec<usize> = (0..parts)
            .map(|_| roll(if is_small { 300 } else { 600_000 }) as usize)
            .collect();
        let mut sources = Vec::new();
        for (part, bytes) in bytes.iter().enumerate() {
            let mut source = Buffer::blank(*bytes);
            fill(&mut source.0[..*bytes], round * 8 + part as u64);
            sources.push(source);
        }
        let place = |part: usize| to.addr() + (part * 600_000) as u64;
        let group: Vec<_> = (0..parts)
            .map(|part| RecvPart {
                addr: place(part),
                bytes: 600_000,
                tag: part as i32,
                memory: &into,
            })
            .collect();
        let receive = until(|| ends.recv.irecv(&group, false).unwrap());
        let mut sends = Vec::new();
        for part in (0..parts).rev() {
            let out = ends.send.register(sources[part].memory()).unwrap();
            sends.push(until(|| {
                ends.send
                    .isend(sources[part].addr(), bytes[part], part as i32, &out)
                    .unwrap()
            }));
        }
        let mut received = None;
        until(|| {
            sends.retain(|send| ends.send.test(*send).unwrap().is_none());
            received = received.take().or_else(|| sizes(&ends.recv, receive));
            (sends.is_empty() && received.is_some()).then_some(())
        });
        assert_eq!(received.unwrap(), bytes);
        for (part, bytes) in bytes.iter().enumerate() {
            let at = part * 600_000;
            assert!(
                is_filled(&to.0[at..at + bytes], round * 8 + part as u64),
                "part {part} of round {round}"
            );
            assert!(
                to.0[at + bytes..at + 600_000]
                    .iter()
                    .all(|byte| *byte == 0xee),
                "part {part} of round {round}"
            );
        }
        to.0.fill(0xee);
    }
}
