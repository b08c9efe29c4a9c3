//! Connections that are set up while a path is dead, on a Spark's rails of the software fabric. One
//! connection detects the dead path for all.
//!
//! The tests run one at a time, because they share the fabric's rails. They count the attempts to
//! use the dead path. After a failed attempt, the plugin tries the path again only after a pause of
//! at least two seconds. So the time that a test takes limits the number of attempts (`at_most`),
//! even on a slow machine.

#![allow(unsafe_code)]

mod common;

use common::captured_log::CapturedLog;
use common::comms::{Receiving, Sending};
use common::until;
use host::config::Config;
use host::error::{Call, Error};
use nccl_net_spark::clock;
use nccl_net_spark::comm::rail::backoff::Advice;
use nccl_net_spark::comm::{Host, ListenComm, RecvComm, SendComm};
use nccl_net_spark::plugin::bring_up;
use proto::backoff::{PathId, Requirement};
use proto::wire::handle::HANDLE_BYTES;
use softverbs::control::{Action, control, status};
use softverbs::path::PathFault;
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier, MutexGuard};
use std::time::Duration;

const CONNECTIONS: usize = 32;
/// Device of the rail whose path is dead. It is one of the cable's two functions.
const DEAD: &str = "roceP2p1s0f0";

/// Two hosts without knowledge of each other's paths, and a fabric without faults.
struct Bed {
    hosts: [Arc<Host>; 2],
    _turn: MutexGuard<'static, ()>,
}

impl Bed {
    fn new(settings: &[(&str, &str)]) -> Self {
        let turn = common::turn();
        let (rails, library) = common::test_rails_of("spark-1cable");
        let host = |side: usize| {
            let name = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
            let mut variables: Vec<(String, String)> = settings.iter().map(name).collect();
            variables.push(("NCCL_IB_HCA".to_owned(), rails[side].clone()));
            variables.push(("NCCL_SOCKET_IFNAME".to_owned(), "lo".to_owned()));
            variables.extend(library.clone());
            bring_up(Config::from_variables(&variables).unwrap())
                .unwrap()
                .0
        };
        let bed = Self {
            hosts: [0, 1].map(host),
            _turn: turn,
        };
        bed.repair();
        bed
    }

    fn set(&self, action: Action) {
        control(
            &common::fabric_folder(),
            &common::fabric_name(),
            None,
            DEAD,
            action,
        )
        .unwrap();
    }

    fn repair(&self) {
        self.set(Action::Unresolved(0));
        self.set(Action::Path(PathFault::Silent, false));
    }

    /// Returns how many queue pairs failed to resolve an address. `of` is the number of failures
    /// that the test injected.
    fn unresolved_count(&self, of: u32) -> u32 {
        let status = status(&common::fabric_folder(), &common::fabric_name()).unwrap();
        let rail = status.nodes[0]
            .rails
            .iter()
            .find(|rail| rail.device == DEAD)
            .unwrap();
        of - rail.unanswered
    }

    fn path(&self) -> PathId {
        let [there, here] = [0, 1].map(|side: usize| {
            let process = self.hosts[side].process();
            Arc::clone(
                process
                    .rails
                    .iter()
                    .find(|rail| rail.info.device == DEAD)
                    .unwrap(),
            )
        });
        let snapshot = there.snapshot(&[]).unwrap();
        let mapped = |gid: &[u8; 16]| !gid.starts_with(&[0xfe, 0x80]);
        let gid = snapshot
            .addresses
            .iter()
            .map(|address| address.gid)
            .find(mapped)
            .unwrap();
        PathId {
            rail: here.id,
            peer_gid: gid,
        }
    }

    /// Makes `count` connections concurrently on one thread, like NCCL.
    fn connect(&self, count: usize) -> (Vec<String>, Duration) {
        let log = CapturedLog::default();
        let begun = clock::now();
        let mut pending: Vec<Pending> = (0..count).map(|_| Pending::new(&self.hosts[1])).collect();
        log.capture(|| {
            until(|| {
                pending
                    .iter_mut()
                    .for_each(|each| each.step(&self.hosts[0]));
                pending
                    .iter()
                    .all(|each| each.ends.0.is_some() && each.ends.1.is_some())
                    .then_some(())
            })
        });
        let took = clock::elapsed(begun);
        (
            log.take().into_iter().map(|(_, words)| words).collect(),
            took,
        )
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.ends.0.iter().for_each(SendComm::close);
        self.ends.1.iter().for_each(RecvComm::close);
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.repair();
    }
}

struct Pending {
    listener: ListenComm,
    handle: [u8; HANDLE_BYTES],
    ends: (Option<SendComm>, Option<RecvComm>),
}

impl Pending {
    fn new(host: &Arc<Host>) -> Self {
        let (listener, handle) = host.listen().unwrap();
        Self {
            listener,
            handle,
            ends: (None, None),
        }
    }

    fn step(&mut self, connecting: &Arc<Host>) {
        if self.ends.0.is_none() {
            self.ends.0 = connecting.connect(&mut self.handle, None).unwrap();
        }
        if self.ends.1.is_none() {
            self.ends.1 = self.listener.accept().unwrap();
        }
    }
}

/// Maximum number of attempts within `took`, if two seconds pass after each failed attempt.
fn at_most(took: Duration) -> usize {
    1 + (took.as_secs_f64() / 2.0) as usize
}

fn connected_over(words: &[String], rails: &str) -> usize {
    words
        .iter()
        .filter(|line| {
            line.starts_with("connected with") && line.contains(&format!(" over {rails}: "))
        })
        .count()
}

fn comes_back(bed: &Bed) {
    bed.repair();
    // Waits until new connections try the path again and use it.
    until(|| {
        std::thread::sleep(Duration::from_millis(100));
        (connected_over(&bed.connect(1).0, "2 rails") == 2).then_some(())
    });
}

#[test]
fn where_every_path_counts_as_dead_all_connections_are_made_as_soon_as_one_carries_again() {
    let call = Call::ModifyQp {
        device: "mlx5_0".to_owned(),
        qp: 5,
        state: "RTR",
    };
    let nobody = Error::Os {
        call,
        errno: libc::ETIMEDOUT,
    };
    for is_silent in [false, true] {
        let bed = Bed::new(&[]);
        let now = clock::now();
        for (here, there) in [(0, 1), (1, 0)] {
            let [here, there] = [here, there].map(|side: usize| bed.hosts[side].process());
            let snapshots = there.rails.iter().map(|rail| rail.snapshot(&[]).unwrap());
            for gid in snapshots
                .flat_map(|snapshot| snapshot.addresses)
                .map(|address| address.gid)
            {
                for rail in &here.rails {
                    let path = PathId {
                        rail: rail.id,
                        peer_gid: gid,
                    };
                    match is_silent {
                        true => here
                            .backoff
                            .silent(path, "test write not acknowledged", now),
                        false => here.backoff.connected(path, Some(&nobody), now),
                    }
                }
            }
        }
        bed.connect(CONNECTIONS);
    }
}

#[test]
fn without_a_fault_every_connection_has_both_twins() {
    let bed = Bed::new(&[]);
    assert_eq!(
        connected_over(&bed.connect(CONNECTIONS).0, "2 rails"),
        2 * CONNECTIONS
    );
}

#[test]
fn one_connection_resolves_an_address_for_all() {
    let bed = Bed::new(&[]);
    bed.set(Action::Unresolved(1000));
    let (words, took) = bed.connect(CONNECTIONS);
    assert_eq!(
        connected_over(&words, "1 rail"),
        2 * CONNECTIONS,
        "{words:#?}"
    );
    let tried = bed.unresolved_count(1000) as usize;
    assert!(
        (1..=at_most(took)).contains(&tried),
        "tried {tried} times in {took:?}"
    );
    let left_out = words
        .iter()
        .filter(|line| line.contains(DEAD) && line.contains("Connection timed out"))
        .count();
    assert_eq!(left_out, 2 * CONNECTIONS, "{words:#?}");
    // The next connections know the failure, and do not resolve the address again.
    let (words, later) = bed.connect(CONNECTIONS);
    let tried = bed.unresolved_count(1000) as usize;
    assert!(
        (1..=at_most(took + later)).contains(&tried),
        "tried {tried} times in {took:?} and {later:?}"
    );
    assert_eq!(
        connected_over(&words, "1 rail"),
        2 * CONNECTIONS,
        "{words:#?}"
    );
    comes_back(&bed);
}

#[test]
fn a_path_that_resolves_and_does_not_carry_is_tested_by_one_connection_for_all() {
    let bed = Bed::new(&[]);
    bed.set(Action::Path(PathFault::Silent, true));
    let (words, took) = bed.connect(CONNECTIONS);
    assert_eq!(
        connected_over(&words, "1 rail"),
        2 * CONNECTIONS,
        "{words:#?}"
    );
    let left_out: Vec<_> = words
        .iter()
        .filter(|line| line.contains(DEAD) && line.contains("not used"))
        .collect();
    assert_eq!(left_out.len(), 2 * CONNECTIONS, "{words:#?}");
    // Both ends of the connection that tested the path report it without announcing a next attempt.
    let has_tested =
        |line: &&&String| line.contains("test write failed") && !line.contains("next attempt in");
    let tested = left_out.iter().filter(has_tested).count();
    assert!(
        (1..=at_most(took)).contains(&(tested / 2)),
        "tested {} times in {took:?}",
        tested / 2
    );
    comes_back(&bed);
}

#[test]
fn an_abandoned_connection_blocks_no_path_for_others() {
    // A test write fails only after half a minute: 4.096 us x 2^20 x 8.
    let bed = Bed::new(&[
        ("NCCL_IB_TIMEOUT", "20"),
        ("NCCL_IB_RETRY_CNT", "7"),
        ("NCCL_SPARK_PROBE_TIMEOUT_MS", "60000"),
    ]);
    bed.set(Action::Path(PathFault::Silent, true));
    let path = bed.path();
    let process = bed.hosts[1].process();
    let ask = || {
        process.backoff.ask(
            path,
            Requirement::Acknowledgement,
            4096,
            Duration::from_secs(60),
            clock::now(),
        )
    };
    let mut first = Pending::new(&bed.hosts[1]);
    until(|| {
        first.step(&bed.hosts[0]);
        matches!(ask(), Advice::Wait).then_some(())
    });
    // NCCL aborts: it closes the listener and does not continue the connection.
    drop(first);
    // A thread may still be connecting the queue pairs, so the path may become free a little later.
    // If the abandoned connection kept the path, its test write would take half a minute, and other
    // connections could not try the path for more than a minute.
    let begun = clock::now();
    until(|| matches!(ask(), Advice::Try(_)).then_some(()));
    assert!(
        clock::elapsed(begun) < Duration::from_secs(30),
        "the abandoned connection still blocks the path"
    );
}

/// Prints the time that it takes to make 32 connections, half of them in each direction. Each host
/// uses one thread. To run it: `cargo test --release --test known_paths -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn how_long_32_connections_take_with_one_dead_twin() {
    for round in 0..5 {
        for (name, fault) in [
            ("no fault", None),
            (
                "the address does not resolve",
                Some(Action::Unresolved(1000)),
            ),
            (
                "the address resolves, the path is dead",
                Some(Action::Path(PathFault::Silent, true)),
            ),
        ] {
            let bed = Bed::new(&[]);
            fault.into_iter().for_each(|fault| bed.set(fault));
            let took = both_ways(&bed);
            println!(
                "round {round}, {name}: {:.0} ms",
                took.as_secs_f64() * 1000.0
            );
        }
    }
}

fn both_ways(bed: &Bed) -> Duration {
    let begin = Barrier::new(2);
    let (to_b, at_b) = channel();
    let (to_a, at_a) = channel();
    let drive = |side: usize,
                 to_peer: std::sync::mpsc::Sender<_>,
                 from_peer: std::sync::mpsc::Receiver<_>| {
        let host = &bed.hosts[side];
        let (listeners, handles): (Vec<_>, Vec<_>) =
            (0..CONNECTIONS / 2).map(|_| host.listen().unwrap()).unzip();
        to_peer.send(handles).unwrap();
        let mut handles: Vec<[u8; HANDLE_BYTES]> = from_peer.recv().unwrap();
        let mut sends: Vec<Option<SendComm>> = handles.iter().map(|_| None).collect();
        let mut receives: Vec<Option<RecvComm>> = listeners.iter().map(|_| None).collect();
        begin.wait();
        let begun = clock::now();
        until(|| {
            for (handle, send) in handles
                .iter_mut()
                .zip(&mut sends)
                .filter(|(_, send)| send.is_none())
            {
                *send = host.connect(handle, None).unwrap();
            }
            for (listener, receive) in listeners
                .iter()
                .zip(&mut receives)
                .filter(|(_, receive)| receive.is_none())
            {
                *receive = listener.accept().unwrap();
            }
            (sends.iter().all(Option::is_some) && receives.iter().all(Option::is_some))
                .then_some(())
        });
        let took = clock::elapsed(begun);
        // Neither side closes before the other has all connections.
        begin.wait();
        sends.iter().flatten().for_each(SendComm::close);
        receives.iter().flatten().for_each(RecvComm::close);
        took
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| drive(1, to_a, at_b));
        drive(0, to_b, at_a).max(other.join().unwrap())
    })
}
