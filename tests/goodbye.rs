//! The BYE of a connection that is closed: the closing thread sends it, because its process may end
//! directly afterwards. Over the software fabric.

#![allow(unsafe_code)]

#[path = "failover/bed.rs"]
mod bed;
mod common;
#[path = "redial/frozen.rs"]
mod frozen;

use bed::{Bed, RAILS, SLOT_BYTES, Stream, host};
use common::captured_log;
use common::comms::{Receiving, Sending};
use common::{turn, until};
use frozen::Frozen;
use host::config::Config;
use host::error::Error;
use nccl_net_spark::comm::{Host, HostMemory, RecvComm, RecvPart, Registration, SendComm};
use nccl_net_spark::plugin::bring_up;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::sync::{Arc, Condvar, Mutex, Once};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// Checks that the error is about a peer that has closed, not about one that was lost.
fn assert_closed(error: &Error) {
    let text = error.to_string();
    assert!(
        matches!(error, Error::PeerGone(_)) && text.contains("closed the connection"),
        "{text}"
    );
}

#[test]
fn the_peer_gets_bye_although_the_service_thread_is_blocked() {
    for closing in [0, 1] {
        let bed = Bed::new(&[]);
        let mut stream = Stream::new(&bed);
        stream.run(&bed, 20);
        until(|| stream.finish_step(&bed).unwrap().then_some(()));
        let frozen = Frozen::new(&bed.hosts[closing]);
        frozen.freeze();
        let addr = stream.to.as_ptr() as u64;
        if closing == 0 {
            let part = RecvPart {
                addr,
                bytes: 8,
                tag: 3,
                memory: &stream.into,
            };
            let receive = until(|| bed.recv.irecv(&[part], false).unwrap());
            bed.send.close();
            assert_closed(&until(|| bed.recv.test(receive, |_, _| {}).err()));
            bed.recv.close();
        } else {
            bed.recv.close();
            let from = stream.from.as_ptr() as u64;
            assert_closed(&until(|| bed.send.isend(from, 8, 3, &stream.out).err()));
            bed.send.close();
        }
        frozen.thaw();
    }
}

/// Process of another test: prints its handle, and receives one message.
fn receiving_process() -> (Arc<Host>, RecvComm) {
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
    let to = [0_u8; 8];
    // SAFETY: the buffer lives until the message has arrived, and is registered no longer.
    let memory = unsafe { HostMemory::from_caller(to.as_ptr() as usize, to.len()) };
    let into = recv.register(memory).unwrap();
    let part = RecvPart {
        addr: to.as_ptr() as u64,
        bytes: to.len(),
        tag: 3,
        memory: &into,
    };
    let receive = until(|| recv.irecv(&[part], false).unwrap());
    until(|| recv.test(receive, |_, _| {}).unwrap().then_some(()));
    (host, recv)
}

/// Process that another test has started, connected to this one, which has sent it one message.
struct Peer {
    process: std::process::Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    send: SendComm,
    from: Vec<u8>,
    out: Arc<Registration>,
}

impl Peer {
    fn start(name: &str) -> Self {
        let own = host(0, &[]);
        let (_, library) = common::test_rails();
        let mut process = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--ignored", "--nocapture"])
            .envs(library)
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let hex = find(&mut lines, "handle ");
        let mut handle =
            std::array::from_fn(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap());
        let send = until(|| own.connect(&mut handle, None).unwrap());
        let from = vec![7_u8; SLOT_BYTES];
        // SAFETY: the buffer lives until the connection has failed, and is not read after that.
        let memory = unsafe { HostMemory::from_caller(from.as_ptr() as usize, from.len()) };
        let out = send.register(memory).unwrap();
        let request = until(|| send.isend(from.as_ptr() as u64, 8, 3, &out).unwrap());
        // The send succeeds although the peer may end before it acknowledges: BYE confirms it.
        until(|| send.test(request).unwrap());
        Self {
            process,
            lines,
            send,
            from,
            out,
        }
    }

    /// Sends until the connection fails.
    fn error(&self) -> Error {
        *until(|| {
            self.send
                .isend(self.from.as_ptr() as u64, 8, 3, &self.out)
                .err()
        })
    }
}

/// Returns the rest of the next line that begins with `start`.
fn find(lines: &mut impl Iterator<Item = std::io::Result<String>>, start: &str) -> String {
    let mut rest = lines
        .map_while(Result::ok)
        .filter_map(|line| line.strip_prefix(start).map(str::to_owned));
    rest.next()
        .unwrap_or_else(|| panic!("the process prints no line with {start:?}"))
}

/// Process of [`a_process_that_ends_directly_after_close_says_goodbye`].
#[test]
#[ignore = "another test's process"]
fn closing_process() {
    let (host, recv) = receiving_process();
    // The service thread does not run again in this process, however late the process ends.
    let frozen = Frozen::new(&host);
    frozen.freeze();
    recv.close();
    std::process::exit(0);
}

#[test]
fn a_process_that_ends_directly_after_close_says_goodbye() {
    let _turn = turn();
    let mut peer = Peer::start("closing_process");
    assert!(peer.process.wait().unwrap().success());
    assert_closed(&peer.error());
    peer.send.close();
}

/// Process of [`a_killed_process_is_noticed_although_its_child_lives`]. Forks a child, as PyTorch's
/// DataLoader does, prints the child's number, and kills itself.
#[test]
#[ignore = "another test's process"]
fn forking_process() {
    let _connection = receiving_process();
    // SAFETY: the child calls nothing but `pause`, which is allowed in a child of a threaded
    // process.
    let child = match unsafe { libc::fork() } {
        0 => loop {
            // SAFETY: takes no memory.
            unsafe { libc::pause() };
        },
        child => child,
    };
    println!("\nchild {child}");
    // SAFETY: takes no memory.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
}

#[test]
fn a_killed_process_is_noticed_although_its_child_lives() {
    let _turn = turn();
    let mut peer = Peer::start("forking_process");
    let child: libc::pid_t = find(&mut peer.lines, "child ").parse().unwrap();
    assert_eq!(peer.process.wait().unwrap().signal(), Some(libc::SIGKILL));
    let killed = Instant::now();
    let error = peer.error();
    let took = killed.elapsed();
    // SAFETY: takes no memory. The child lives until this call.
    let result = unsafe { libc::kill(child, libc::SIGKILL) };
    assert_eq!(result, 0, "the child was alive all the time");
    println!("noticed after {took:.1?}: {error}");
    assert!(matches!(error, Error::PeerGone(_)), "{error}");
    // Without the end of TCP, the kernel's limit for unacknowledged bytes decides: 60 s.
    assert!(
        took < Duration::from_secs(30),
        "noticed after {took:?}: {error}"
    );
    peer.send.close();
}

/// The thread whose close is watched, and the number of times that a peer has received BYE.
static CLOSE: Mutex<(Option<ThreadId>, u32)> = Mutex::new((None, 0));
static BYE: Condvar = Condvar::new();

/// Watches the log lines. The line of a closed connection comes directly before the wait for the
/// ports' counters. There, the watched thread waits until its peer has received BYE.
fn watch_lines() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        captured_log::see(|line| {
            let mut close = CLOSE.lock().unwrap();
            if line.contains(" sent Bye ") {
                close.1 += 1;
                BYE.notify_all();
            } else if line.starts_with("connection with ")
                && line.ends_with(" closed")
                && close.0 == Some(std::thread::current().id())
            {
                let (close, waited) = BYE
                    .wait_timeout_while(close, Duration::from_secs(30), |close| close.1 == 0)
                    .unwrap();
                drop(close);
                // Not in the lock, which other threads need.
                assert!(
                    !waited.timed_out(),
                    "the peer gets no BYE before the wait for the counters"
                );
            }
        });
    });
}

#[test]
fn the_peer_gets_bye_before_close_waits_for_the_counters() {
    watch_lines();
    let bed = Bed::new(&[]);
    let mut stream = Stream::new(&bed);
    stream.run(&bed, 5);
    until(|| stream.finish_step(&bed).unwrap().then_some(()));
    *CLOSE.lock().unwrap() = (Some(std::thread::current().id()), 0);
    bed.send.close();
    CLOSE.lock().unwrap().0 = None;
    bed.recv.close();
}
