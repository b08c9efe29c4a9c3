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
use nccl_net_spark::comm::{HostMemory, RecvPart};
use nccl_net_spark::config::Config;
use nccl_net_spark::error::Error;
use nccl_net_spark::plugin::bring_up;
use std::io::{BufRead, BufReader};
use std::sync::{Condvar, Mutex, Once};
use std::thread::ThreadId;
use std::time::Duration;

/// Checks that the error is about a peer that has closed, not about one that was lost.
fn assert_closed(error: &Error) {
    let text = error.to_string();
    assert!(matches!(error, Error::PeerGone(_)) && text.contains("closed the connection"), "{text}");
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
            let part = RecvPart { addr, bytes: 8, tag: 3, memory: &stream.into };
            let receive = until(|| bed.recv.irecv(&[part], false).unwrap());
            bed.send.close();
            assert_closed(&until(|| bed.recv.test(receive, |_, _| {}).err()));
            bed.recv.close();
        } else {
            bed.recv.close();
            assert_closed(&until(|| bed.send.isend(addr, 8, 3, &stream.out).err()));
            bed.send.close();
        }
        frozen.thaw();
    }
}

/// Process of [`a_process_that_ends_directly_after_close_says_goodbye`]. Prints its handle,
/// receives one message, closes, and ends.
#[test]
#[ignore = "another test's process"]
fn closing_process() {
    let given =
        |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set: another test runs this one"));
    let names = ["NCCL_IBVERBS_LIB", "NCCL_SPARK_SYSFS"];
    let mut settings: Vec<(String, String)> = names.map(|name| (name.to_owned(), given(name))).to_vec();
    settings.push(("NCCL_IB_HCA".to_owned(), RAILS.join(",")));
    settings.push(("NCCL_SOCKET_IFNAME".to_owned(), "lo".to_owned()));
    let host = bring_up(Config::from_variables(&settings).unwrap()).unwrap().0;
    let (listener, handle) = host.listen().unwrap();
    let hex: String = handle.iter().map(|byte| format!("{byte:02x}")).collect();
    println!("\nhandle {hex}");
    let recv = until(|| listener.accept().unwrap());
    let to = [0_u8; 8];
    // SAFETY: the buffer lives as long as the process.
    let memory = unsafe { HostMemory::from_caller(to.as_ptr() as usize, to.len()) };
    let into = recv.register(memory).unwrap();
    let part = RecvPart { addr: to.as_ptr() as u64, bytes: to.len(), tag: 3, memory: &into };
    let receive = until(|| recv.irecv(&[part], false).unwrap());
    until(|| recv.test(receive, |_, _| {}).unwrap().then_some(()));
    // The service thread does not run again in this process, however late the process ends.
    let frozen = Frozen::new(&host);
    frozen.freeze();
    recv.close();
    std::process::exit(0);
}

#[test]
fn a_process_that_ends_directly_after_close_says_goodbye() {
    let _turn = turn();
    let own = host(0, &[]);
    let (_, library) = common::test_rails();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "closing_process", "--ignored", "--nocapture"])
        .envs(library)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let hex = lines.by_ref().map_while(Result::ok).find_map(|line| line.strip_prefix("handle ").map(str::to_owned));
    let hex = hex.expect("the closing process prints its handle");
    let mut handle = std::array::from_fn(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap());
    let send = until(|| own.connect(&mut handle, None).unwrap());
    let from = vec![7_u8; SLOT_BYTES];
    // SAFETY: the buffer lives until the connection has failed, and is not read after that.
    let memory = unsafe { HostMemory::from_caller(from.as_ptr() as usize, from.len()) };
    let out = send.register(memory).unwrap();
    let request = until(|| send.isend(from.as_ptr() as u64, 8, 3, &out).unwrap());
    // The send succeeds although the peer's process ends before it acknowledges: BYE confirms it.
    until(|| send.test(request).unwrap());
    assert!(child.wait().unwrap().success());
    assert_closed(&until(|| send.isend(from.as_ptr() as u64, 8, 3, &out).err()));
    send.close();
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
                let (close, waited) =
                    BYE.wait_timeout_while(close, Duration::from_secs(30), |close| close.1 == 0).unwrap();
                drop(close);
                // Not in the lock, which other threads need.
                assert!(!waited.timed_out(), "the peer gets no BYE before the wait for the counters");
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
