//! Connections whose rails do not work during the handshake, on a Spark's rails of the software
//! fabric. Tests each network fault that owners meet on their first day. The tests run one at a
//! time, because they share the fabric's rails.

#![allow(unsafe_code)]

mod common;

use common::captured_log::CapturedLog;
use common::comms::{Receiving, Sending};
use common::{LIMIT, fabric_folder, fabric_name, until};
use host::config::Config;
use host::error::{Error, Result};
use nccl_net_spark::comm::setup::pending::ABANDONED;
use nccl_net_spark::comm::{Host, ListenComm, RecvComm, RecvPart, SendComm};
use nccl_net_spark::plugin::bring_up;
use proto::wire::PROTOCOL_VERSION;
use proto::wire::handle::{HANDLE_BYTES, Handle};
use softverbs::control::{Action, control, priorities};
use softverbs::path::PathFault;
use std::io::Write;
use std::net::TcpStream;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tracing::Level;
use verbs::HostMemory;

const TWINS: [&str; 2] = ["rocep1s0f0", "roceP2p1s0f0"];

/// Two hosts without knowledge of each other's paths, and a fabric with both ports up.
struct Bed {
    hosts: [Arc<Host>; 2],
    log: CapturedLog,
    _turn: MutexGuard<'static, ()>,
}

impl Bed {
    fn new(settings: &[(&str, &str)]) -> Self {
        Self::with_ports(settings, true)
    }

    /// Like `new`. If `are_up` is false, all ports are down at first, and come up while the hosts
    /// wait for a port.
    fn with_ports(settings: &[(&str, &str)], are_up: bool) -> Self {
        static LOG: Mutex<Option<CapturedLog>> = Mutex::new(None);
        let _turn = common::turn();
        let log = LOG
            .lock()
            .unwrap()
            .get_or_insert_with(common::captured_log::everywhere)
            .clone();
        let host = |side: usize| host(side, settings);
        let hosts = if are_up {
            [0, 1].map(host)
        } else {
            set_both(Action::Down);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_secs(1));
                    set_both(Action::Up);
                });
                log.take();
                [0, 1].map(host)
            })
        };
        let bed = Self { hosts, log, _turn };
        if are_up {
            bed.repair();
            bed.log.take();
        }
        bed
    }

    fn set(&self, rail: &str, action: Action) {
        control(&fabric_folder(), &fabric_name(), None, rail, action).unwrap();
    }

    fn both(&self, action: Action) {
        set_both(action);
    }

    fn repair(&self) {
        for fault in PathFault::ALL {
            self.both(Action::Path(fault, false));
        }
        self.both(Action::Unresolved(0));
        self.both(Action::Hang(false));
        self.both(Action::Up);
    }

    fn lines(&self, of: Level) -> Vec<String> {
        self.log
            .take()
            .into_iter()
            .filter(|(level, _)| *level == of)
            .map(|(_, line)| line)
            .collect()
    }
}

fn host(side: usize, settings: &[(&str, &str)]) -> Arc<Host> {
    let (rails, library) = common::test_rails_of("spark-1cable");
    let mut variables = vec![
        ("NCCL_IB_HCA", rails[side].as_str()),
        ("NCCL_SOCKET_IFNAME", "lo"),
    ];
    variables.extend(settings);
    let owned = variables
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let variables: Vec<(String, String)> = owned.chain(library).collect();
    bring_up(Config::from_variables(&variables).unwrap())
        .unwrap()
        .0
}

fn set_both(action: Action) {
    TWINS
        .iter()
        .for_each(|rail| control(&fabric_folder(), &fabric_name(), None, rail, action).unwrap());
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.repair();
    }
}

struct Pair {
    listener: ListenComm,
    handle: [u8; HANDLE_BYTES],
    send: Option<SendComm>,
    recv: Option<RecvComm>,
}

impl Pair {
    fn new(bed: &Bed) -> Self {
        let (listener, handle) = bed.hosts[1].listen().unwrap();
        Self {
            listener,
            handle,
            send: None,
            recv: None,
        }
    }

    fn step(&mut self, bed: &Bed) -> Result<bool> {
        if self.send.is_none() {
            self.send = bed.hosts[0].connect(&mut self.handle, None)?;
        }
        if self.recv.is_none() {
            self.recv = self.listener.accept()?;
        }
        Ok(self.send.is_some() && self.recv.is_some())
    }

    fn make(bed: &Bed) -> (Self, Duration) {
        let mut pair = Self::new(bed);
        let begun = Instant::now();
        until(|| pair.step(bed).unwrap().then_some(()));
        (pair, begun.elapsed())
    }

    /// Tries until both ends have failed. Returns the errors and the time.
    fn fail(bed: &Bed) -> ([Error; 2], Duration) {
        let mut pair = Self::new(bed);
        let begun = Instant::now();
        let mut errors: [Option<Error>; 2] = Default::default();
        until(|| {
            if errors[0].is_none() {
                errors[0] = bed.hosts[0].connect(&mut pair.handle, None).err();
            }
            if errors[1].is_none() {
                errors[1] = pair.listener.accept().err();
            }
            errors.iter().all(Option::is_some).then_some(())
        });
        (errors.map(Option::unwrap), begun.elapsed())
    }

    /// Transfers a message of `bytes` bytes, over several rails if they are up, and checks the
    /// bytes that arrive.
    fn carries(&self, bytes: usize, seed: u64) {
        let send = self.send.as_ref().unwrap();
        let recv = self.recv.as_ref().unwrap();
        let mut from = vec![0; bytes];
        let to = vec![0; bytes];
        common::fill(&mut from, seed);
        // SAFETY: both buffers outlive their registrations and the message, and are not accessed
        // otherwise meanwhile.
        let memory =
            |bytes: &[u8]| unsafe { HostMemory::from_caller(bytes.as_ptr() as usize, bytes.len()) };
        let out = send.register(memory(&from)).unwrap();
        let into = recv.register(memory(&to)).unwrap();
        let part = RecvPart {
            addr: to.as_ptr() as u64,
            bytes,
            tag: 0,
            memory: &into,
        };
        let receive = until(|| recv.irecv(&[part], false).unwrap());
        let request = until(|| send.isend(from.as_ptr() as u64, bytes, 0, &out).unwrap());
        until(|| send.test(request).unwrap());
        let mut received = 0;
        until(|| {
            recv.test(receive, |_, size| received = size)
                .unwrap()
                .then_some(())
        });
        assert_eq!(received, bytes as u64);
        assert!(common::is_filled(&to, seed), "wrong bytes");
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.send.iter().for_each(SendComm::close);
        self.recv.iter().for_each(RecvComm::close);
    }
}

#[test]
fn twins_that_answer_arp_for_each_other_are_reached_by_link_local_addresses() {
    let bed = Bed::new(&[]);
    bed.both(Action::Path(PathFault::CrossedArp, true));
    let (pair, _) = Pair::make(&bed);
    pair.carries(4 << 20, 1);
}

#[test]
fn a_device_whose_firmware_does_not_answer_delays_no_other_rail() {
    let bed = Bed::new(&[("NCCL_SPARK_LOSS_TIMEOUT_S", "120")]);
    let (pair, _) = Pair::make(&bed);
    let waits_for = |text: &str, times: usize| {
        let mut lines = Vec::new();
        until(|| {
            lines.extend(bed.lines(Level::WARN));
            (lines.iter().filter(|line| line.contains(text)).count() >= times).then_some(())
        });
    };
    bed.set(TWINS[0], Action::Hang(true));
    // Waits until both hosts know that the device hangs. Until its host knows, a registration waits
    // for the device.
    waits_for("device rocep1s0f0 has not answered for", 2);
    pair.carries(4 << 20, 3);
    // The other rail is lost and returns while the device hangs.
    bed.set(TWINS[1], Action::Down);
    waits_for("rail roceP2p1s0f0:1", 1);
    bed.set(TWINS[1], Action::Up);
    waits_for("recovered after", 1);
    pair.carries(4 << 20, 4);
    bed.set(TWINS[0], Action::Hang(false));
    waits_for("2 of 2 rails in use", 1);
    pair.carries(4 << 20, 5);
}

#[test]
fn a_switch_that_drops_large_packets_works_with_path_mtu_1024() {
    let bed = Bed::new(&[]);
    bed.both(Action::Path(PathFault::SwitchMtu, true));
    let (pair, _) = Pair::make(&bed);
    pair.carries(4 << 20, 2);
    let warnings = bed.lines(Level::WARN);
    let small: Vec<_> = warnings
        .iter()
        .filter(|line| line.contains("using path MTU 1024"))
        .collect();
    assert!(
        !small.is_empty() && small.iter().all(|line| line.contains("set MTU 9000")),
        "{warnings:#?}"
    );
    // The path MTU of both rails is known now. So later connections use both rails immediately,
    // without a test.
    for rail in TWINS {
        assert!(
            small.iter().any(|line| line.contains(rail)),
            "{rail}: {warnings:#?}"
        );
    }
    drop(pair);
    let connected: Vec<_> = (0..8).map(|_| Pair::make(&bed).0).collect();
    connected.iter().for_each(|pair| pair.carries(1 << 20, 3));
    let lines = bed.lines(Level::WARN);
    assert!(
        lines.iter().all(|line| !line.contains("lost:")),
        "{lines:#?}"
    );
}

#[test]
fn a_switch_port_that_blocks_after_link_up_is_awaited_with_warnings() {
    let bed = Bed::new(&[]);
    bed.both(Action::Path(
        PathFault::SpanningTree(Duration::from_secs(7)),
        true,
    ));
    bed.both(Action::Down);
    bed.both(Action::Up);
    let (pair, took) = Pair::make(&bed);
    pair.carries(1 << 20, 4);
    assert!(
        took >= Duration::from_secs(5),
        "it took {took:?} while frames were dropped for 7 s"
    );
    let warnings = bed.lines(Level::WARN);
    let waited = warnings
        .iter()
        .find(|line| line.contains("works after 5 s"))
        .expect("a warning after 5 s");
    for rail in TWINS {
        assert!(
            waited.contains(&format!("{rail}:1 to {rail}:1"))
                && waited.contains(&format!("{rail}:1 (")),
            "{waited}"
        );
    }
}

#[test]
fn a_port_that_comes_up_during_set_up_is_used() {
    let bed = Bed::new(&[]);
    bed.both(Action::Down);
    let mut pair = Pair::new(&bed);
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(1) {
        assert!(!pair.step(&bed).unwrap(), "no port is up");
    }
    bed.set(TWINS[1], Action::Up);
    until(|| pair.step(&bed).unwrap().then_some(()));
    pair.carries(1 << 20, 5);
}

#[test]
fn addresses_that_do_not_resolve_at_first_are_tried_again() {
    let bed = Bed::new(&[]);
    // The handshake tries each rail of each side once. Here the first six attempts on each device
    // fail.
    bed.both(Action::Unresolved(6));
    let (pair, _) = Pair::make(&bed);
    pair.carries(1 << 20, 6);
}

#[test]
fn a_connection_without_a_rail_fails_in_time_and_names_every_pair_and_attempt() {
    let bed = Bed::new(&[("NCCL_SPARK_CONNECT_TIMEOUT_S", "8")]);
    bed.both(Action::Path(PathFault::Silent, true));
    let (errors, took) = Pair::fail(&bed);
    assert!((Duration::from_secs(7)..LIMIT).contains(&took), "{took:?}");
    for error in &errors {
        let text = error.to_string();
        for rail in TWINS {
            assert!(
                text.contains(&format!("{rail}:1 to {rail}:1"))
                    && text.contains(&format!("{rail}:1 (")),
                "{text}"
            );
        }
        assert!(
            text.contains("with path MTU 4096") && text.contains("test write"),
            "{text}"
        );
        assert!(
            text.contains("to 192.168.") && text.contains("to fe80::"),
            "{text}"
        );
    }
    assert!(
        errors
            .iter()
            .any(|error| error.to_string().contains("NCCL_SPARK_CONNECT_TIMEOUT_S=8")),
        "{errors:?}"
    );
}

#[test]
fn an_abandoned_connection_without_a_rail_is_given_up_and_its_peer_is_informed() {
    let bed = Bed::new(&[("NCCL_SPARK_PROBE_TIMEOUT_MS", "100")]);
    bed.both(Action::Path(PathFault::Silent, true));
    let mut pair = Pair::new(&bed);
    let mut waiting = 0;
    // Each side writes this line once its handshake is finished and no rail works.
    until(|| {
        assert!(!pair.step(&bed).unwrap());
        waiting += bed
            .lines(Level::WARN)
            .iter()
            .filter(|line| line.contains("works after 5 s"))
            .count();
        (waiting >= 2).then_some(())
    });
    bed.hosts[0]
        .pending()
        .give_up_abandoned(nccl_net_spark::clock::now() + ABANDONED);
    let error = until(|| pair.listener.accept().err());
    assert!(
        matches!(error, Error::PeerGone(_)) && error.to_string().contains("closed the connection"),
        "{error}"
    );
    let error = bed.hosts[0]
        .connect(&mut pair.handle, None)
        .map(|_| ())
        .unwrap_err();
    assert!(
        error.to_string().contains("set-up has failed or timed out"),
        "{error}"
    );
    let lines = bed.lines(Level::INFO);
    assert!(
        lines
            .iter()
            .any(|line| line.contains("abandoned: NCCL has not asked for it for 60 s")),
        "{lines:#?}"
    );
}

#[test]
fn a_rail_that_works_lets_the_connection_start_and_the_other_joins_it() {
    let bed = Bed::new(&[]);
    bed.set(TWINS[0], Action::Path(PathFault::SwitchMtu, true));
    let (pair, _) = Pair::make(&bed);
    pair.carries(1 << 20, 7);
    let mut joined = Vec::new();
    until(|| {
        std::thread::sleep(Duration::from_millis(20));
        joined.extend(bed.lines(Level::WARN));
        joined
            .iter()
            .any(|line| line.contains(TWINS[0]) && line.contains("recovered"))
            .then_some(())
    });
    pair.carries(4 << 20, 8);
}

#[test]
fn a_host_without_a_link_waits_for_one_with_a_warning() {
    // Creates the fabric, because its ports can go down only afterwards.
    drop(Bed::new(&[]));
    let bed = Bed::with_ports(&[], false);
    let warnings = bed.lines(Level::WARN);
    let waits = warnings
        .iter()
        .find(|line| line.contains("no port has a link"))
        .expect("a warning");
    assert!(TWINS.iter().all(|rail| waits.contains(rail)), "{waits}");
    let (pair, _) = Pair::make(&bed);
    pair.carries(1 << 20, 9);
}

#[test]
fn the_late_twin_of_a_usable_rail_is_awaited() {
    let bed = Bed::new(&[]);
    let (_, library) = common::test_rails_of("spark-1cable");
    let (_, sysfs) = library
        .iter()
        .find(|(name, _)| name == "NCCL_SPARK_SYSFS")
        .unwrap();
    let interfaces = std::fs::read_dir(std::path::Path::new(sysfs).join("class/net")).unwrap();
    let carriers: Vec<_> = interfaces
        .map(|entry| entry.unwrap().path().join("carrier"))
        .collect();
    let start = || {
        bed.lines(Level::INFO);
        drop(host(0, &[]));
        bed.lines(Level::INFO)
    };
    let says = |lines: &[String], text: &str| lines.iter().any(|line| line.contains(text));
    let late = TWINS[1];
    bed.set(late, Action::Down);
    let lines = start();
    assert!(
        !says(&lines, "waiting up to") && says(&lines, "used as soon as they have a link"),
        "without a carrier nothing is awaited: {lines:?}"
    );
    carriers
        .iter()
        .for_each(|carrier| std::fs::write(carrier, "1\n").unwrap());
    let found = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_secs(1));
            bed.set(late, Action::Up);
        });
        start()
    });
    carriers
        .iter()
        .for_each(|carrier| std::fs::remove_file(carrier).unwrap());
    let waits: Vec<_> = found
        .iter()
        .filter(|line| line.contains("waiting up to 10s for"))
        .collect();
    assert!(
        matches!(&waits[..], [line] if line.contains(late)),
        "{waits:?}"
    );
    assert!(
        !says(&found, "was awaited for") && !says(&found, "used as soon as they have a link"),
        "the twin came in time: {found:?}"
    );
}

#[test]
fn the_accepting_side_uses_the_priority_of_the_connecting_side() {
    let bed = Bed::new(&[("NCCL_IB_SL", "3")]);
    let mut pair = Pair::new(&bed);
    let class = 106;
    let of_class = || {
        priorities(&fabric_folder(), &fabric_name())
            .unwrap()
            .iter()
            .filter(|all| all.0 == class)
            .count()
    };
    assert_eq!(of_class(), 0);
    until(|| {
        if pair.send.is_none() {
            pair.send = bed.hosts[0].connect(&mut pair.handle, Some(class)).unwrap();
        }
        pair.step(&bed).unwrap().then_some(())
    });
    let all = priorities(&fabric_folder(), &fabric_name()).unwrap();
    let both_ends = all
        .iter()
        .filter(|priority| **priority == (class, 3))
        .count();
    assert!(
        both_ends >= 4 && both_ends == of_class(),
        "two rails with two ends: {all:?}"
    );
    bed.set(TWINS[0], Action::Down);
    until(|| (of_class() < both_ends).then_some(()));
    bed.set(TWINS[0], Action::Up);
    until(|| (of_class() == both_ends).then_some(()));
}

#[test]
fn a_peer_with_another_traffic_class_is_named_once() {
    let mut bed = Bed::new(&[("NCCL_IB_TC", "106")]);
    let about_priority = |bed: &Bed| {
        let _two = [Pair::make(bed), Pair::make(bed)];
        bed.lines(Level::WARN)
            .into_iter()
            .filter(|line| line.contains("NCCL_IB_TC"))
            .collect::<Vec<_>>()
    };
    assert_eq!(about_priority(&bed), [""; 0]);
    // The sender does not have the variable, as if its launcher had not passed it on.
    bed.hosts[0] = host(0, &[]);
    let [line] = &about_priority(&bed)[..] else {
        panic!("not once")
    };
    let reason = "sends with traffic class 0 and service level 0, this host with 106 and 0";
    assert!(line.contains(reason), "{line}");
    // If the accepting host has no setting, the peer's class may be the communicator's choice.
    bed.hosts = [host(0, &[("NCCL_IB_TC", "106")]), host(1, &[])];
    assert_eq!(about_priority(&bed), [""; 0]);
    bed.hosts[1] = host(1, &[("NCCL_IB_SL", "3")]);
    assert_eq!(
        about_priority(&bed).len(),
        1,
        "the service level is no choice of communicators"
    );
}

#[test]
fn two_versions_of_the_protocol_refuse_each_other() {
    let bed = Bed::new(&[]);
    let mut pair = Pair::new(&bed);
    // Makes this the handle of a listener whose plugin is one version older. The version follows
    // after eight bytes of magic number.
    let ours = u16::from_le_bytes([pair.handle[8], pair.handle[9]]);
    assert_eq!(ours, PROTOCOL_VERSION);
    pair.handle[8..10].copy_from_slice(&(ours - 1).to_le_bytes());
    let refused = bed.hosts[0]
        .connect(&mut pair.handle, None)
        .map(|_| ())
        .unwrap_err();
    let expected = format!(
        "uses protocol version {}, this plugin uses {ours}: install the same plugin version",
        ours - 1
    );
    assert!(
        matches!(refused, Error::Usage(_)) && refused.to_string().contains(&expected),
        "{refused}"
    );
    // A connecting side of the older version has that version in its HELLO's header.
    pair.handle[8..10].copy_from_slice(&ours.to_le_bytes());
    let address = Handle::decode(&pair.handle).unwrap().address;
    let mut older = TcpStream::connect(address).unwrap();
    older
        .write_all(&[0x50, 0x53, 1, (ours - 1) as u8, 0, 0, 0, 0])
        .unwrap();
    let expected = format!(
        "uses protocol version {}, this host uses {ours}: install the same plugin version",
        ours - 1
    );
    until(|| {
        assert!(pair.listener.accept().unwrap().is_none());
        bed.lines(Level::INFO)
            .iter()
            .any(|line| line.contains(&expected))
            .then_some(())
    });
}
