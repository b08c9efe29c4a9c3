//! Connections over queue pairs, with both ends in this process, on the software fabric or on the
//! devices of `SPARK_TEST_RAILS="A;B"` (`tests/rxe-vm/suite.sh`: the kernel's soft-RoCE).

mod common;

use common::comms::{Receiving, Sending};
use common::ends::{Buffer, Ends, connect, every_size, full_window, sizes, transfer};
use common::until;
use host::config::Config;
use host::error::Error;
use host::interfaces;
use nccl_net_spark::comm::{Host, Rail, RecvPart, Registration, SendComm};
use nccl_net_spark::plugin::bring_up;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn host(side: usize, settings: &[(&str, &str)]) -> Arc<Host> {
    let (rails, library) = common::test_rails();
    let mut variables = vec![
        ("NCCL_IB_HCA".to_owned(), rails[side].clone()),
        ("NCCL_SOCKET_IFNAME".to_owned(), "lo".to_owned()),
    ];
    variables.extend(library);
    for (name, value) in settings {
        variables.retain(|(known, _)| known != name);
        variables.push(((*name).to_owned(), (*value).to_owned()));
    }
    bring_up(Config::from_variables(&variables).unwrap())
        .unwrap()
        .0
}

fn ends(a: &Arc<Host>, b: &Arc<Host>) -> Ends {
    connect(a, b).unwrap()
}

fn default_ends() -> Ends {
    ends(&host(0, &[]), &host(1, &[]))
}

fn isend(
    send: &SendComm,
    buffer: &Buffer,
    offset: usize,
    bytes: usize,
    tag: i32,
    memory: &Registration,
) -> Option<u16> {
    send.isend(buffer.addr() + offset as u64, bytes, tag, memory)
        .unwrap()
}

/// GID indices differ between PCI functions and hosts, so an index that has a GID on one host may
/// have none on another.
#[test]
fn a_gid_index_without_a_gid_is_ignored_and_another_one_is_used() {
    let indices = |settings: &[(&str, &str)]| -> Vec<u16> {
        let host = host(0, settings);
        let rail = &host.process().rails[0];
        let snapshot = rail.snapshot(&interfaces::all().unwrap()).unwrap();
        snapshot
            .addresses
            .iter()
            .map(|address| rail.gid_index(&snapshot, &address.gid).unwrap())
            .collect()
    };
    let all = indices(&[]);
    assert!(!all.is_empty());
    for index in &all {
        assert_eq!(
            indices(&[("NCCL_IB_GID_INDEX", &index.to_string())]),
            [*index]
        );
    }
    let wrong = [("NCCL_IB_GID_INDEX", "200")];
    assert_eq!(indices(&wrong), all);
    ends(&host(0, &wrong), &host(1, &wrong));
}

#[test]
fn every_size_arrives_whole_and_is_reported() {
    let ends = default_ends();
    every_size(
        &ends,
        &[
            0,
            1,
            7,
            8,
            63,
            127,
            128,
            129,
            4095,
            4096,
            4097,
            16_384,
            32_767,
            32_768,
            65_537,
            1 << 20,
            (1 << 22) + 13,
        ],
    );
}

#[test]
fn a_full_window_of_groups_with_tags_out_of_order() {
    let ends = default_ends();
    full_window(&ends, 3000, |sends, receives, expected| {
        for send in sends.into_iter().rev() {
            until(|| ends.send.test(send).unwrap());
        }
        for receive in receives.into_iter().rev() {
            assert_eq!(until(|| sizes(&ends.recv, receive)), expected);
        }
    });
}

#[test]
fn optional_receives_complete_immediately_and_lose_nothing() {
    let ends = default_ends();
    let from = Buffer::filled(64 * 512, 9);
    let to = Buffer::blank(64 * 512);
    let out = ends.send.register(from.memory()).unwrap();
    let into = ends.recv.register(to.memory()).unwrap();
    let mut sends = Vec::new();
    for at in (0..64).map(|n| n * 512) {
        let part = RecvPart {
            addr: to.addr() + at as u64,
            bytes: 512,
            tag: 1,
            memory: &into,
        };
        let receive = until(|| {
            sends.retain(|send| ends.send.test(*send).unwrap().is_none());
            ends.recv.irecv(&[part], true).unwrap()
        });
        // The receive completes without a send. The test is repeated, because the service thread
        // may hold the data path.
        until(|| sizes(&ends.recv, receive));
        sends.push(until(|| isend(&ends.send, &from, at, 512, 1, &out)));
    }
    for send in sends {
        until(|| ends.send.test(send).unwrap());
    }
    assert!(from.0 == to.0);
}

#[test]
#[ignore = "4 GiB of memory"]
fn messages_of_2_gib_minus_one_byte_and_of_more_arrive_whole() {
    let ends = default_ends();
    let largest = (1 << 31) + 4097;
    let from = Buffer::filled(largest, 3);
    let mut to = Buffer::blank(largest);
    for bytes in [(1 << 31) - 1, largest] {
        to.0.fill(0xee);
        assert_eq!(transfer(&ends, &from, &to, bytes, bytes), bytes);
        assert!(from.0[..bytes] == to.0[..bytes]);
    }
}

#[test]
fn closing_in_any_order_leaves_nothing_behind() {
    let a = host(0, &[]);
    let b = host(1, &[]);
    for order in 0..4 {
        let ends = ends(&a, &b);
        let from = Buffer::filled(5000, order);
        let to = Buffer::blank(5000);
        assert_eq!(transfer(&ends, &from, &to, 5000, 5000), 5000);
        let open = RecvPart {
            addr: to.addr(),
            bytes: 10,
            tag: 0,
            memory: &ends.recv.register(to.memory()).unwrap(),
        };
        if order & 2 != 0 {
            until(|| ends.recv.irecv(&[open], false).unwrap());
        }
        if order & 1 == 0 {
            ends.send.close();
            ends.recv.close();
        } else {
            ends.recv.close();
            ends.send.close();
        }
        let sent: u64 = common::sent_bytes(&a).iter().sum();
        assert_eq!(
            sent,
            5000 * (order + 1),
            "bytes of closed connections stay counted"
        );
    }
    assert_eq!(
        (
            a.process().registrations.in_use(),
            b.process().registrations.in_use()
        ),
        (0, 0)
    );
}

#[test]
fn a_close_by_the_peer_is_reported_and_nothing_hangs() {
    let ends = default_ends();
    let from = Buffer::filled(100, 1);
    let to = Buffer::blank(100);
    let out = ends.send.register(from.memory()).unwrap();
    let into = ends.recv.register(to.memory()).unwrap();
    let part = RecvPart {
        addr: to.addr(),
        bytes: 100,
        tag: 0,
        memory: &into,
    };
    let receive = until(|| ends.recv.irecv(&[part], false).unwrap());
    ends.send.close();
    let error = until(|| ends.recv.test(receive, |_, _| {}).err());
    assert!(matches!(*error, Error::PeerGone(_)), "{error:?}");

    let ends = default_ends();
    ends.recv.close();
    let error = until(|| ends.send.isend(from.addr(), 100, 0, &out).err());
    assert!(matches!(*error, Error::PeerGone(_)), "{error:?}");
}

#[test]
fn invalid_calls_are_refused_and_lose_nothing() {
    let ends = default_ends();
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
    assert!(ends.recv.irecv(&[], false).is_err() && ends.recv.irecv(&[part; 9], false).is_err());
    assert!(
        ends.send
            .isend(from.addr() + (1 << 30), 8, 0, &out)
            .is_err()
    );
    let large = until(|| ends.send.isend(from.addr(), 1001, 0, &out).err());
    assert!(
        large
            .to_string()
            .contains("1001 bytes into a receive of 1000"),
        "{large}"
    );
    assert!(ends.send.test(200).is_err() && ends.recv.test(31, |_, _| {}).is_err());
    let send = until(|| isend(&ends.send, &from, 0, 1000, 0, &out));
    until(|| ends.send.test(send).unwrap());
    assert_eq!(until(|| sizes(&ends.recv, receive))[0], 1000);
    assert!(
        ends.recv.test(receive, |_, _| {}).is_err(),
        "a finished request was still there"
    );
}

#[test]
fn registrations_are_shared_counted_and_safe_from_many_threads() {
    let a = host(0, &[]);
    let b = host(1, &[]);
    let ends = ends(&a, &b);
    let buffer = Buffer::filled(1 << 20, 4);
    let first = ends.send.register(buffer.memory()).unwrap();
    let again = ends.send.register(buffer.memory()).unwrap();
    assert!(Arc::ptr_eq(&first, &again) && a.process().registrations.in_use() == 1);
    let remote_keys = |memory: &Registration, rail: &Rail| {
        let keys = memory.keys(rail.id).unwrap();
        [keys.relaxed_rkey, keys.strict_rkey]
    };
    assert!(
        a.process()
            .rails
            .iter()
            .all(|rail| remote_keys(&first, rail) == [0; 2]),
        "memory registered for sending has no remote key"
    );
    let into = Buffer::blank(1 << 20);
    let received = ends.recv.register(into.memory()).unwrap();
    for rail in &b.process().rails {
        let [relaxed, strict] = remote_keys(&received, rail);
        assert_eq!(
            relaxed != strict,
            rail.relaxed_ordering,
            "a second memory region, with its own key, exactly where ordering is relaxed"
        );
    }
    drop((first, received));
    assert_eq!(a.process().registrations.in_use(), 1);
    let from = Buffer::filled(70_000, 5);
    let to = Buffer::blank(70_000);
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let send = &ends.send;
            let keep = Buffer::filled(30_000, thread);
            scope.spawn(move || {
                for _ in 0..50 {
                    drop(send.register(keep.memory()).unwrap());
                }
            });
        }
        for _ in 0..20 {
            assert_eq!(transfer(&ends, &from, &to, 70_000, 70_000), 70_000);
        }
    });
    drop(again);
    assert_eq!(
        (
            a.process().registrations.in_use(),
            b.process().registrations.in_use()
        ),
        (0, 0)
    );
}

#[test]
fn several_queue_pairs_per_rail_and_many_connections() {
    let a = host(0, &[("NCCL_IB_QPS_PER_CONNECTION", "4")]);
    let b = host(1, &[]);
    let all: Vec<Ends> = (0..8).map(|_| ends(&a, &b)).collect();
    for (n, ends) in all.iter().enumerate() {
        for round in 0..6 {
            let from = Buffer::filled(200_001, n as u64 * 7 + round);
            let to = Buffer::blank(200_001);
            assert_eq!(transfer(ends, &from, &to, 200_001, 200_001), 200_001);
            assert!(from.0 == to.0);
        }
    }
}

#[test]
fn the_last_message_arrives_although_its_sender_closes_after_a_long_wait() {
    let a = host(0, &[]);
    let b = host(1, &[]);
    let from = Buffer::filled(1 << 20, 1);
    let to = Buffer::blank(1 << 20);
    for parity in 0..2 {
        let ends = ends(&a, &b);
        // One large message, so that every rail has been polled.
        assert_eq!(transfer(&ends, &from, &to, 1 << 20, 1 << 20), 1 << 20);
        let out = ends.send.register(from.memory()).unwrap();
        let into = ends.recv.register(to.memory()).unwrap();
        let part = RecvPart {
            addr: to.addr(),
            bytes: 8,
            tag: 0,
            memory: &into,
        };
        let receive = until(|| ends.recv.irecv(&[part], false).unwrap());
        // Polls for longer than a closing peer's grace period, an even or odd number of times.
        let begun = Instant::now();
        let mut snapshots = 0;
        while begun.elapsed() < Duration::from_millis(2500) || snapshots % 2 != parity {
            assert!(sizes(&ends.recv, receive).is_none());
            snapshots += 1;
        }
        let send = until(|| isend(&ends.send, &from, 0, 8, 0, &out));
        until(|| ends.send.test(send).unwrap());
        ends.send.close();
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(until(|| sizes(&ends.recv, receive))[0], 8);
    }
}

#[test]
fn without_a_common_rail_both_ends_fail_immediately_and_list_both_sides() {
    let (rails, _) = common::test_rails();
    let name = |side: usize, at: usize| {
        rails[side]
            .split(',')
            .nth(at)
            .unwrap_or(&rails[side])
            .to_owned()
    };
    let near = name(0, 0);
    let far = name(1, 1);
    let a = host(0, &[("NCCL_IB_HCA", &near)]);
    let b = host(1, &[("NCCL_IB_HCA", &far)]);
    let (listener, mut handle) = b.listen().unwrap();
    let mut refused = None;
    let mut refuser = None;
    until(|| {
        refused = refused
            .take()
            .or_else(|| a.connect(&mut handle, None).err());
        refuser = refuser.take().or_else(|| listener.accept().err());
        refused.as_ref().and(refuser.as_ref()).map(|_| ())
    });
    for error in [refused.unwrap().to_string(), refuser.unwrap().to_string()] {
        assert!(
            error.contains("no rail in common")
                && error.contains("NCCL_IB_HCA hides")
                && error.contains(&near)
                && error.contains(&far),
            "{error}"
        );
    }
}

#[test]
fn a_bye_directly_after_the_handshake_is_received() {
    let a = host(0, &[]);
    let b = host(1, &[]);
    let (listener, mut handle) = b.listen().unwrap();
    // The connecting side makes no further call once the accepting side has its connection. So the
    // connecting side has not finished its handshake.
    let recv = until(|| {
        assert!(a.connect(&mut handle, None).unwrap().is_none());
        (0..50).find_map(|_| {
            std::thread::sleep(Duration::from_millis(20));
            listener.accept().unwrap()
        })
    });
    recv.close();
    std::thread::sleep(Duration::from_millis(300));
    let send = until(|| a.connect(&mut handle, None).unwrap());
    let from = Buffer::filled(100, 1);
    let out = send.register(from.memory()).unwrap();
    let error = until(|| send.isend(from.addr(), 100, 0, &out).err());
    assert!(matches!(*error, Error::PeerGone(_)), "{error:?}");
}

/// NCCL makes connections on its proxy threads, which `NCCL_PROXY_CPUSET` may pin to one core.
#[test]
fn the_service_thread_has_the_cpu_affinity_of_the_process_and_not_of_its_caller() {
    let allowed = |status: &str| {
        let text = std::fs::read_to_string(status).unwrap_or_default();
        text.lines().find_map(|line| {
            line.strip_prefix("Cpus_allowed_list:")
                .map(|list| list.trim().to_owned())
        })
    };
    let of_process = sched_getaffinity(Pid::this()).unwrap();
    let processors: Vec<usize> = (0..CpuSet::count())
        .filter(|cpu| of_process.is_set(*cpu).unwrap())
        .collect();
    if processors.len() < 2 {
        return common::skip::skip("the process may run on one CPU only");
    }
    let pinned = std::thread::spawn(move || {
        let mut one = CpuSet::new();
        one.set(processors[0]).unwrap();
        sched_setaffinity(Pid::from_raw(0), &one).unwrap();
        default_ends()
    });
    let ends = pinned.join().unwrap();
    // Other tests of this program have service threads too.
    let tasks = || {
        std::fs::read_dir("/proc/self/task")
            .unwrap()
            .map(|task| task.unwrap().path())
    };
    let is_service = |task: &PathBuf| {
        std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name == "spark-service\n")
    };
    until(|| {
        let masks: Vec<_> = tasks()
            .filter(is_service)
            .filter_map(|task| allowed(task.join("status").to_str()?))
            .collect();
        let all = masks
            .iter()
            .all(|mask| Some(mask) == allowed("/proc/self/status").as_ref());
        (!masks.is_empty() && all).then_some(())
    });
    drop(ends);
}
