//! Tests in which rails fail and return during transfers over the software fabric. Except in one
//! test, both ends run in this process and every byte is compared. The tests run one at a time,
//! because they share the fabric's rails.

#![allow(unsafe_code)]

#[path = "failover/bed.rs"]
mod bed;
mod common;
#[path = "failover/hangs.rs"]
mod hangs;

use bed::{Bed, RAILS, SLOT_BYTES, Stream, WINDOW, host, log, set};
use common::comms::{Receiving, Sending};
use common::{fill, turn, until, without_files};
use host::config::Config;
use host::counters::layout::State;
use host::error::{Error, Network};
use nccl_net_spark::comm::channel::Channel;
use nccl_net_spark::comm::datapath::context::PathContext;
use nccl_net_spark::comm::datapath::lane::Role;
use nccl_net_spark::comm::datapath::mailbox::Mailboxes;
use nccl_net_spark::comm::datapath::peer::Peer;
use nccl_net_spark::comm::datapath::shared::{NotBorrowed, PathGuard, SharedPath};
use nccl_net_spark::comm::rail::registration::Keys;
use nccl_net_spark::comm::recovery::driver::{Driver, Terms};
use nccl_net_spark::comm::recovery::redial::RedialHandle;
use nccl_net_spark::comm::recovery::tcp::Redialling;
use nccl_net_spark::comm::{Host, RecvPart};
use nccl_net_spark::plugin::bring_up;
use proto::backoff::PathId;
use proto::wire::fields::Priority;
use proto::wire::mailbox::MAILBOX_BYTES;
use softverbs::control::Action;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tracing::Level;
use verbs::{HostMemory, Region};

#[test]
fn a_rail_dies_in_mid_transfer_and_returns() {
    let bed = Bed::new(&[]);
    let mut stream = Stream::new(&bed);
    stream.run(&bed, 50);
    for rail in RAILS.iter().cycle().take(6) {
        set(rail, Action::Down);
        stream.run(&bed, 100);
        set(rail, Action::Up);
        stream.run(&bed, 20);
    }
    let before = until(|| {
        stream.step(&bed).unwrap();
        Some(bed.carried()).filter(|carried| carried.iter().all(|bytes| *bytes > 0))
    });
    until(|| {
        stream.run(&bed, 20);
        for rail in RAILS {
            set(rail, Action::Down);
            stream.run(&bed, 20);
            set(rail, Action::Up);
            stream.run(&bed, 200);
        }
        bed.carried()
            .iter()
            .zip(&before)
            .all(|(now, before)| now > before)
            .then_some(())
    });
}

#[test]
fn a_device_removed_during_start_up_costs_only_its_rail() {
    let _turn = turn();
    // The first host creates the fabric.
    host(0, &[]);
    let rails = std::thread::scope(|scope| {
        let rails = scope.spawn(|| {
            (0..2000)
                .map(|_| host(0, &[]).process().rails.len())
                .collect::<Vec<_>>()
        });
        while !rails.is_finished() {
            set(RAILS[0], Action::Unplug);
            set(RAILS[0], Action::Plug);
        }
        rails.join().unwrap()
    });
    assert!(
        rails.iter().all(|count| [1, 2].contains(count)),
        "{rails:?}"
    );
}

/// Runs the stream until a rail has carried more data.
fn run_until_it_carries(stream: &mut Stream, bed: &Bed, rail: usize) {
    let before = bed.carried()[rail];
    until(|| {
        stream.run(bed, 20);
        (bed.carried()[rail] > before).then_some(())
    });
}

/// Numbers of the lines that report the loss of a rail's address, and of those that report another
/// loss of the rail. A side may report that its peer has lost the rail.
fn losses(lines: &[(Level, String)], rail: &str) -> (usize, usize) {
    let lost = |line: &&(Level, String)| {
        line.1.starts_with(&format!("rail {rail}:1 ")) && line.1.contains(" lost: ")
    };
    let names_address = |(_, line): &&(Level, String)| {
        line.contains(" lost: address ") && line.contains(" of the GID table")
    };
    let is_peers = |(_, line): &&(Level, String)| line.contains(" lost: the peer reports");
    let (named, others): (Vec<_>, Vec<_>) = lines.iter().filter(lost).partition(names_address);
    (
        named.len(),
        others.iter().filter(|line| !is_peers(line)).count(),
    )
}

/// As `ip address del` and `add`, and as `netplan apply`, which does it to all rails. The NIC would
/// report the loss after 30 s.
#[test]
fn an_address_that_goes_costs_the_rail_until_it_returns_at_another_index() {
    let bed = Bed::new(&[
        ("NCCL_IB_TIMEOUT", "20"),
        ("NCCL_SPARK_LOSS_TIMEOUT_S", "100"),
    ]);
    let mut stream = Stream::new(&bed);
    run_until_it_carries(&mut stream, &bed, 0);
    let index = |rail: usize| {
        let rail = &bed.hosts[0].process().rails[rail];
        let snapshot = rail.snapshot(&[]).unwrap();
        rail.gid_index(&snapshot, &snapshot.addresses[0].gid)
            .unwrap()
    };
    // In the last case the addresses may be back before a service thread looks.
    for (rails, returns_soon) in [
        (&[0][..], false),
        (&[1], false),
        (&[0, 1], false),
        (&[0, 1], true),
    ] {
        let before: Vec<u16> = rails.iter().map(|rail| index(*rail)).collect();
        log().take();
        let change = |is_there| {
            rails
                .iter()
                .for_each(|rail| set(RAILS[*rail], Action::Addresses(is_there)));
        };
        let begun = Instant::now();
        change(false);
        if returns_soon {
            change(true);
        }
        let mut lines = Vec::new();
        until(|| {
            stream.step(&bed).unwrap();
            lines.extend(log().take());
            let is_lost = |rail: &usize| losses(&lines, RAILS[*rail]).0 > 0;
            rails.iter().all(is_lost).then_some(())
        });
        assert!(begun.elapsed() < Duration::from_secs(20), "{lines:?}");
        if let [rail] = rails {
            run_until_it_carries(&mut stream, &bed, 1 - rail);
        }
        change(true);
        rails
            .iter()
            .for_each(|rail| run_until_it_carries(&mut stream, &bed, *rail));
        lines.extend(log().take());
        for (rail, before) in rails.iter().zip(before) {
            assert_eq!(losses(&lines, RAILS[*rail]).1, 0, "{lines:#?}");
            assert_ne!(index(*rail), before);
        }
    }
}

#[test]
fn all_rails_die_and_one_returns_in_time() {
    let bed = Bed::new(&[("NCCL_SPARK_LOSS_TIMEOUT_S", "100")]);
    let mut stream = Stream::new(&bed);
    for round in 0..4 {
        stream.run(&bed, 30);
        RAILS.iter().for_each(|rail| set(rail, Action::Down));
        let before = stream.done;
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(150) {
            stream.step(&bed).unwrap();
        }
        assert!(
            stream.done <= before + WINDOW as u64,
            "messages arrived while all rails were down"
        );
        set(RAILS[round % 2], Action::Up);
        stream.run(&bed, 30);
        set(RAILS[1 - round % 2], Action::Up);
    }
}

#[test]
fn a_rail_missing_at_connect_joins_later() {
    let whole = Bed::new(&[]);
    for (rail, lost, back) in [
        (0, Action::Down, Action::Up),
        (1, Action::Unplug, Action::Plug),
    ] {
        set(RAILS[rail], lost);
        let ports = || whole.hosts.iter().map(|host| &host.process().rails[rail]);
        until(|| ports().all(|port| !common::is_up(port)).then_some(()));
        let bed = Bed::over(whole.hosts.clone());
        let mut stream = Stream::new(&bed);
        stream.run(&bed, 50);
        set(RAILS[rail], back);
        // Ends once the returned rail has carried 100 messages while the other rail was down.
        until(|| {
            stream.run(&bed, 20);
            if ports().all(|port| common::is_up(port)) {
                set(RAILS[1 - rail], Action::Down);
                let begun = Instant::now();
                let before = stream.done;
                while begun.elapsed() < Duration::from_millis(500) && stream.done < before + 100 {
                    stream.step(&bed).unwrap();
                }
                set(RAILS[1 - rail], Action::Up);
                return (stream.done >= before + 100).then_some(());
            }
            None
        });
    }
}

#[test]
fn a_port_without_a_link_when_the_plugin_starts_joins_running_connections() {
    let _whole = Bed::new(&[]);
    for down in [RAILS[1], RAILS[0]] {
        set(down, Action::Down);
        let hosts = [host(0, &[]), host(1, &[])];
        let names: Vec<String> = hosts[0].process().rails.iter().map(|r| r.name()).collect();
        assert!(
            names.len() == 2 && names[1] == format!("{down}:1"),
            "a port without a link comes last: {names:?}"
        );
        let bed = Bed::over(hosts);
        let mut stream = Stream::new(&bed);
        stream.run(&bed, 50);
        assert_eq!(bed.carried()[1], 0);
        let late = bed.hosts[0].process().rails[1].id;
        assert_eq!(stream.out.keys(late), Some(Keys::default()), "no memory");
        for host in &bed.hosts {
            let records = common::records(host);
            assert!(records.iter().all(|it| it.state == State::Carries));
            assert!(records.iter().all(|it| it.rail != format!("{down}:1")));
        }
        set(down, Action::Up);
        until(|| {
            stream.run(&bed, 20);
            (bed.carried()[1] > 0).then_some(())
        });
        // Both rails carry alike soon. Load on this machine can disturb a few rounds.
        until(|| {
            let before = bed.carried();
            stream.run(&bed, 300);
            let carried = bed.carried();
            let gained: Vec<u64> = carried.iter().zip(before).map(|(now, b)| now - b).collect();
            let all: u64 = gained.iter().sum();
            gained.iter().all(|bytes| 3 * bytes >= all).then_some(())
        });
        let records = common::records(&bed.hosts[0]);
        assert!(records.iter().all(|it| it.counts.losses == 0));
        assert_ne!(stream.out.keys(late), Some(Keys::default()));
    }
}

#[test]
fn both_ends_fail_after_too_long_without_any_rail() {
    let bed = Bed::new(&[("NCCL_SPARK_LOSS_TIMEOUT_S", "1")]);
    let mut stream = Stream::new(&bed);
    stream.run(&bed, 10);
    RAILS.iter().for_each(|rail| set(rail, Action::Down));
    let first = until(|| stream.step(&bed).err());
    let names_rails_and_timeout = |error: &Error| {
        let text = error.to_string();
        matches!(error, Error::Network(_))
            && RAILS.iter().all(|rail| text.contains(rail))
            && text.contains("LOSS_TIMEOUT_S=1")
    };
    assert!(names_rails_and_timeout(&first), "{first}");
    // Both ends report the error, whichever end detected the loss first.
    let part = RecvPart {
        addr: stream.to.as_ptr() as u64,
        bytes: 8,
        tag: 3,
        memory: &stream.into,
    };
    let receiver = until(|| bed.recv.irecv(&[part], false).err());
    let sender = until(|| {
        bed.send
            .isend(stream.from.as_ptr() as u64, 8, 3, &stream.out)
            .err()
    });
    assert!(
        names_rails_and_timeout(&receiver) && names_rails_and_timeout(&sender),
        "{receiver}; {sender}"
    );
}

#[test]
fn an_address_that_does_not_answer_delays_no_other_rail() {
    let bed = Bed::new(&[]);
    let mut stream = Stream::new(&bed);
    stream.run(&bed, 20);
    set(RAILS[0], Action::Unresolved(1000));
    set(RAILS[0], Action::Down);
    stream.run(&bed, 20);
    set(RAILS[0], Action::Up);
    // Runs until the receiving side knows that the sender's address does not answer.
    let addresses = bed.hosts[0].process().rails[0]
        .snapshot(&[])
        .unwrap()
        .addresses;
    let rail = &bed.hosts[1].process().rails[0];
    until(|| {
        stream.step(&bed).unwrap();
        let is_known = |peer_gid| {
            bed.hosts[1]
                .process()
                .backoff
                .dead(
                    PathId {
                        rail: rail.id,
                        peer_gid,
                    },
                    nccl_net_spark::clock::now(),
                )
                .is_some()
        };
        addresses
            .iter()
            .any(|address| is_known(address.gid))
            .then_some(())
    });
    // The other rail must return and carry data, although rail 0's address does not answer.
    let before = bed.carried()[1];
    until(|| {
        set(RAILS[1], Action::Down);
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(50) {
            stream.step(&bed).unwrap();
        }
        set(RAILS[1], Action::Up);
        stream.run(&bed, 20);
        (bed.carried()[1] > before).then_some(())
    });
}

#[test]
fn a_remote_invalid_request_error_loses_the_rail_but_not_the_connection() {
    let bed = Bed::new(&[]);
    let mut stream = Stream::new(&bed);
    for rail in RAILS.iter().cycle().take(12) {
        set(rail, Action::Refuse(1));
        stream.run(&bed, 40);
    }
}

#[test]
fn a_remote_invalid_request_error_on_every_rail_ends_the_connection() {
    let bed = Bed::new(&[]);
    let stream = Stream::new(&bed);
    let part = RecvPart {
        addr: stream.to.as_ptr() as u64,
        bytes: 8,
        tag: 3,
        memory: &stream.into,
    };
    // No send matches this receive. The rails refuse the grants that follow, so these grants never
    // reach the peer.
    let receive = until(|| bed.recv.irecv(&[part], false).unwrap());
    let error = until(|| {
        RAILS.iter().for_each(|rail| set(rail, Action::Refuse(1)));
        let granted = bed.recv.irecv(&[part], false);
        std::thread::sleep(Duration::from_millis(5));
        // Stop refusing, so that the trials of the lost rails succeed and the rails may return.
        RAILS.iter().for_each(|rail| set(rail, Action::Refuse(0)));
        std::thread::sleep(Duration::from_millis(50));
        granted
            .and_then(|_| bed.recv.test(receive, |_, _| {}))
            .err()
    });
    let text = error.to_string();
    assert!(
        text.contains("peer rejected the request")
            && text.contains("the same request already failed on other rails"),
        "{text}"
    );
    // The other end learns the reason, and need not wait for its own limits.
    let told = until(|| {
        let sent = bed
            .send
            .isend(stream.from.as_ptr() as u64, 8, 3, &stream.out);
        sent.err()
    });
    let told = told.to_string();
    assert!(
        told.starts_with("the connection has failed at ") && told.contains(&text),
        "{told}"
    );
}

#[test]
fn unused_grants_survive_the_loss_of_their_rail() {
    const BYTES: usize = 5000;
    let bed = Bed::new(&[]);
    let mut stream = Stream::new(&bed);
    for round in 0..20_u64 {
        // A receive with optional completion is done immediately, and its caller stops polling.
        // So only the service thread can see that a grant failed.
        let rail = RAILS[round as usize % 2];
        set(rail, Action::Down);
        let slot_addr = |n: u64| stream.to.as_ptr() as u64 + n * SLOT_BYTES as u64;
        for n in 0..WINDOW as u64 {
            let part = RecvPart {
                addr: slot_addr(n),
                bytes: BYTES,
                tag: 3,
                memory: &stream.into,
            };
            let receive = until(|| bed.recv.irecv(&[part], true).unwrap());
            assert!(until(|| bed
                .recv
                .test(receive, |_, _| {})
                .unwrap()
                .then_some(true)));
        }
        for n in 0..WINDOW {
            fill(
                &mut stream.from[n * SLOT_BYTES..n * SLOT_BYTES + BYTES],
                round * 100 + n as u64,
            );
            let addr = stream.from.as_ptr() as u64 + (n * SLOT_BYTES) as u64;
            let send = until(|| bed.send.isend(addr, BYTES, 3, &stream.out).unwrap());
            until(|| bed.send.test(send).unwrap());
            let at = n * SLOT_BYTES..n * SLOT_BYTES + BYTES;
            assert!(
                stream.from[at.clone()] == stream.to[at],
                "message {n} of round {round} differs"
            );
        }
        set(rail, Action::Up);
    }
}

struct Faulty;

impl SharedPath for Faulty {
    fn borrow(&self) -> Result<PathGuard<'_>, NotBorrowed> {
        panic!("on purpose");
    }

    fn is_unused(&self) -> bool {
        true
    }
}

/// A data path that cannot be borrowed. Records that a caller tried.
#[derive(Default)]
struct NeverBorrowed {
    was_asked_for: AtomicBool,
}

impl SharedPath for NeverBorrowed {
    fn borrow(&self) -> Result<PathGuard<'_>, NotBorrowed> {
        self.was_asked_for.store(true, Ordering::Release);
        Err(NotBorrowed::Broken)
    }

    fn is_unused(&self) -> bool {
        true
    }
}

/// Makes a connection over `path` for a service thread to watch. The returned `TcpStream` is the
/// peer's end of its TCP connection; the peer sends nothing.
fn watched(
    host: &Host,
    path: Arc<dyn SharedPath>,
) -> (Channel, Driver, Arc<PathContext>, TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let far_end = listener.accept().unwrap().0;
    let process = Arc::clone(host.process());
    let context = Arc::new(PathContext {
        peer: Arc::new(Peer::new("nobody".to_owned())),
        registrations: Arc::clone(&process.registrations),
        stall_warn: process.config.data_path.stall_warn,
        waker: host.setup().service.clone(),
        operation: Default::default(),
    });
    let mailboxes = Mailboxes {
        region: Region::new(MAILBOX_BYTES).unwrap(),
        peer_addr: 0,
    };
    let terms = Terms {
        role: Role::Sender,
        priority: Priority::default(),
        first_rail_timeout: Duration::from_secs(60),
    };
    let driver = Driver::new(
        process,
        Arc::clone(&context),
        path,
        terms,
        mailboxes,
        Vec::new(),
        &[],
    );
    (
        Channel::new(stream, listener.local_addr().unwrap()).unwrap(),
        driver,
        context,
        far_end,
    )
}

#[test]
fn a_connection_that_cannot_be_watched_is_dropped_and_the_next_one_works() {
    let _turn = turn();
    let hosts = [host(0, &[]), host(1, &[])];
    let (channel, driver, context, _far) = watched(&hosts[0], Arc::new(NeverBorrowed::default()));
    let mut was_called = false;
    let refused = without_files(|| {
        hosts[0].setup().service.watch(channel, driver, |_, _| {
            was_called = true;
            Ok(Redialling::Never)
        })
    });
    assert!(matches!(refused, Err(Error::Os { .. })), "{refused:?}");
    assert_eq!(
        (Arc::strong_count(&context), was_called),
        (1, false),
        "the service kept the connection, or the peer was informed"
    );
    // Here the last message of the handshake cannot be sent to the peer.
    let (channel, driver, context, _far) = watched(&hosts[0], Arc::new(NeverBorrowed::default()));
    let cannot_send = |_: &mut Channel, _: &mut RedialHandle| Err(Network::SetupEnded.into());
    assert!(
        hosts[0]
            .setup()
            .service
            .watch(channel, driver, cannot_send)
            .is_err()
    );
    assert_eq!(
        Arc::strong_count(&context),
        1,
        "the service kept the connection"
    );
    let bed = Bed::over(hosts);
    Stream::new(&bed).run(&bed, 10);
}

#[test]
fn a_panic_of_the_service_thread_fails_its_connections_with_an_error_and_later_ones_work() {
    let bed = Bed::new(&[]);
    let mut stream = Stream::new(&bed);
    stream.run(&bed, 10);
    let (channel, driver, _, _far) = watched(&bed.hosts[0], Arc::new(Faulty));
    bed.hosts[0]
        .setup()
        .service
        .watch(channel, driver, |_, _| Ok(Redialling::Never))
        .unwrap();
    let error = until(|| {
        bed.send
            .isend(stream.from.as_ptr() as u64, 8, 3, &stream.out)
            .err()
    });
    assert!(
        matches!(*error, Error::Internal(_)) && error.to_string().contains("on purpose"),
        "{error}"
    );
    let receive = RecvPart {
        addr: stream.to.as_ptr() as u64,
        bytes: 8,
        tag: 3,
        memory: &stream.into,
    };
    let error = until(|| {
        let granted = bed.recv.irecv(&[receive], false);
        granted
            .and_then(|request| {
                request.map_or(Ok(false), |request| bed.recv.test(request, |_, _| {}))
            })
            .err()
    });
    assert!(matches!(*error, Error::PeerGone(_)), "{error:?}");
    let carries = |host: &Host| {
        common::records(host)
            .iter()
            .filter(|record| record.state == State::Carries)
            .count()
    };
    assert_eq!(
        carries(&bed.hosts[0]),
        0,
        "a failed connection is still in state Carries"
    );
    let again = Bed::over(bed.hosts.clone());
    Stream::new(&again).run(&again, 10);
}

/// A data path that blocks the service thread until the test releases it. The next borrow panics.
struct PanicsOnRelease {
    entered: Sender<()>,
    release: Mutex<Receiver<()>>,
}

impl SharedPath for PanicsOnRelease {
    fn borrow(&self) -> Result<PathGuard<'_>, NotBorrowed> {
        panic!("on purpose");
    }

    fn is_unused(&self) -> bool {
        self.entered.send(()).unwrap();
        self.release.lock().unwrap().recv().unwrap();
        false
    }
}

#[test]
fn a_panic_of_the_service_thread_fails_newly_added_connections_too() {
    let _turn = turn();
    let host = host(0, &[]);
    let ((entered, has_entered), (releaser, release)) = (channel(), channel());
    let (line, driver, _, _far) = watched(
        &host,
        Arc::new(PanicsOnRelease {
            entered,
            release: Mutex::new(release),
        }),
    );
    let faulty = host
        .setup()
        .service
        .watch(line, driver, |_, _| Ok(Redialling::Never))
        .unwrap();
    has_entered.recv().unwrap();
    // The service thread has locked this connection. So in its next round it finds two commands,
    // this `close` and the `watch` below, and panics in the `close`.
    host.setup().service.close(&faulty);
    let path = Arc::new(NeverBorrowed::default());
    let (line, driver, _, _far) = watched(&host, path.clone());
    host.setup()
        .service
        .watch(line, driver, |_, _| Ok(Redialling::Never))
        .unwrap();
    releaser.send(()).unwrap();
    until(|| (Arc::strong_count(&path) == 1).then_some(()));
    assert!(
        path.was_asked_for.load(Ordering::Acquire),
        "the service never borrowed the data path"
    );
}

/// Receiving process of [`a_killed_peer_ends_the_connection_and_a_frozen_peer_is_waited_for`].
/// Prints its handle, then receives messages until it is killed.
#[test]
#[ignore = "another test's process"]
fn receiving_process() {
    let given = |name: &str| {
        std::env::var(name)
            .unwrap_or_else(|_| panic!("{name} is not set: another test runs this one"))
    };
    let names = ["NCCL_IBVERBS_LIB", "NCCL_SPARK_SYSFS"];
    let mut settings: Vec<(String, String)> =
        names.map(|name| (name.to_owned(), given(name))).to_vec();
    settings.push(("NCCL_IB_HCA".to_owned(), RAILS.join(",")));
    settings.push(("NCCL_SOCKET_IFNAME".to_owned(), "lo".to_owned()));
    let host = bring_up(Config::from_variables(&settings).unwrap())
        .unwrap()
        .0;
    let (listener, handle) = host.listen().unwrap();
    let hex: String = handle.iter().map(|byte| format!("{byte:02x}")).collect();
    println!("\nhandle {hex}");
    let recv = until(|| listener.accept().unwrap());
    let to = vec![0_u8; SLOT_BYTES];
    // SAFETY: the buffer lives as long as the process.
    let memory = unsafe { HostMemory::from_caller(to.as_ptr() as usize, to.len()) };
    let into = recv.register(memory).unwrap();
    let part = RecvPart {
        addr: to.as_ptr() as u64,
        bytes: SLOT_BYTES,
        tag: 3,
        memory: &into,
    };
    loop {
        let receive = until(|| recv.irecv(&[part], false).unwrap());
        until(|| recv.test(receive, |_, _| {}).unwrap().then_some(()));
    }
}

#[test]
fn a_killed_peer_ends_the_connection_and_a_frozen_peer_is_waited_for() {
    use nix::sys::signal::{Signal, kill};
    use std::io::{BufRead, BufReader};
    let _turn = turn();
    let (_, library) = common::test_rails();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "receiving_process", "--ignored", "--nocapture"])
        .envs(library)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let pid = nix::unistd::Pid::from_raw(child.id() as i32);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let hex = lines
        .by_ref()
        .map_while(Result::ok)
        .find_map(|line| line.strip_prefix("handle ").map(str::to_owned));
    let hex = hex.expect("the receiving process prints its handle");
    let mut handle =
        std::array::from_fn(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap());
    let own = host(0, &[]);
    let send = until(|| own.connect(&mut handle, None).unwrap());
    let from = vec![7_u8; SLOT_BYTES];
    // SAFETY: the buffer lives until the connection has failed, and is not read after that.
    let memory = unsafe { HostMemory::from_caller(from.as_ptr() as usize, from.len()) };
    let out = send.register(memory).unwrap();
    let send_one = || -> Result<(), Error> {
        let addr = from.as_ptr() as u64;
        let request =
            until(|| send.isend(addr, SLOT_BYTES, 3, &out).transpose()).map_err(|e| *e)?;
        until(|| send.test(request).transpose())
            .map(|_| ())
            .map_err(|e| *e)
    };
    (0..20).for_each(|_| send_one().unwrap());
    // The receiving process runs its rails in software, so they freeze with it. This process loses
    // them, and they return when the other process continues.
    kill(pid, Signal::SIGSTOP).unwrap();
    let thaw = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(3));
        kill(pid, Signal::SIGCONT).unwrap();
    });
    (0..20).for_each(|_| send_one().unwrap());
    thaw.join().unwrap();
    kill(pid, Signal::SIGKILL).unwrap();
    let error = (0..1_000_000)
        .find_map(|_| send_one().err())
        .expect("a send to a killed peer fails");
    let text = error.to_string();
    assert!(
        matches!(error, Error::PeerGone(_))
            && text.contains(&format!(
                ":{pid} is gone: its bootstrap connection closed without BYE"
            )),
        "{text}"
    );
    assert!(RAILS.iter().all(|rail| text.contains(rail)), "{text}");
    child.wait().unwrap();
    send.close();
}
