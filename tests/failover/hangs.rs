//! A device whose firmware does not answer, while connections use it.

use crate::bed::{Bed, RAILS, Stream, log, set};
use crate::common::comms::{Receiving, Sending};
use crate::common::{self, until};
use host::counters::layout::State;
use nccl_net_spark::comm::{Host, RecvPart};
use proto::device::Presence;
use softverbs::control::{Action, callers};
use std::sync::Arc;
use std::time::Duration;
use verbs::HostMemory;

/// Longest duration of a call that waits for no device, even on a busy machine. The plugin gives a
/// device 3 s to answer.
const NO_WAIT: Duration = Duration::from_secs(1);
/// Number of attempts: on a very busy machine, NCCL's thread may not run for a second.
const ATTEMPTS: usize = 5;

/// The kernel's number of this thread.
fn thread_id() -> u32 {
    let link = std::fs::read_link("/proc/thread-self").unwrap();
    link.file_name().unwrap().to_str().unwrap().parse().unwrap()
}

fn has_lost(host: &Host, rail: &str) -> bool {
    common::records(host)
        .iter()
        .any(|record| record.state == State::Lost && record.rail.starts_with(rail))
}

/// A device's firmware hangs, and then a write on its rail fails. The calls of NCCL's thread return
/// quickly, and give no command to a device. Before the device counts as stuck, another connection
/// of the same process loses its other rail, and resends: the service threads serve it.
#[test]
fn a_device_that_hangs_blocks_neither_nccls_thread_nor_other_connections() {
    let attempt = || {
        let bed = Bed::new(&[("NCCL_SPARK_LOSS_TIMEOUT_S", "120")]);
        let other = Bed::over(bed.hosts.clone());
        let mut stream = Stream::new(&bed);
        let mut others = Stream::new(&other);
        let mut is_served = false;
        let mut id = 0;
        std::thread::scope(|scope| {
            // NCCL's thread.
            scope.spawn(|| {
                id = thread_id();
                stream.run(&bed, 20);
                others.run(&other, 20);
                (stream.longest, others.longest) = Default::default();
                set(RAILS[0], Action::Hang(true));
                set(RAILS[0], Action::Refuse(1));
                until(|| {
                    stream.step(&bed).unwrap();
                    bed.hosts
                        .iter()
                        .any(|host| has_lost(host, RAILS[0]))
                        .then_some(())
                });
                set(RAILS[1], Action::Refuse(1));
                let goal = others.done + 20;
                until(|| {
                    others.step(&other).unwrap();
                    let is_over = others.done >= goal
                        && bed.hosts.iter().any(|host| has_lost(host, RAILS[1]));
                    is_over.then_some(())
                });
                let knows = |host: &Arc<Host>| host.process().rails[0].device.presence();
                is_served = bed
                    .hosts
                    .iter()
                    .map(knows)
                    .all(|presence| presence == Presence::Here);
                // The requests that wait for the device are tested until it counts as stuck.
                until(|| {
                    stream.step(&bed).unwrap();
                    others.step(&other).unwrap();
                    bed.hosts
                        .iter()
                        .map(knows)
                        .all(|presence| presence == Presence::CutOff)
                        .then_some(())
                });
                set(RAILS[0], Action::Hang(false));
                stream.run(&bed, 50);
                others.run(&other, 50);
            });
        });
        for rail in RAILS {
            let callers = callers(&common::fabric_folder(), &common::fabric_name(), rail).unwrap();
            assert!(
                !callers.contains(&id),
                "NCCL's thread has given a command to {rail}"
            );
        }
        let longest = stream.longest.max(others.longest);
        println!(
            "longest call of NCCL's thread: {longest:?}; other connections were served: {is_served}"
        );
        is_served && longest < NO_WAIT
    };
    assert!((0..ATTEMPTS).any(|_| attempt()));
}

fn has_line(parts: &[&str]) -> bool {
    log()
        .take()
        .iter()
        .any(|(_, line)| parts.iter().all(|part| line.contains(part)))
}

#[test]
fn a_deregistration_that_waits_for_a_device_is_named_in_a_warning() {
    let bed = Bed::new(&[]);
    log().take();
    let bytes = vec![0_u8; 4096];
    // SAFETY: the memory lives until the end of the test, and is not written.
    let memory = unsafe { HostMemory::from_caller(bytes.as_ptr() as usize, bytes.len()) };
    let registration = bed.send.register(memory).unwrap();
    set(RAILS[0], Action::Hang(true));
    let release = std::thread::spawn(move || registration.release());
    until(|| has_line(&[RAILS[0], "has not finished deregMr", "see dmesg"]).then_some(()));
    assert!(
        !release.is_finished(),
        "the caller may reuse the memory, but the NIC has its key"
    );
    set(RAILS[0], Action::Hang(false));
    release.join().unwrap();
}

/// NCCL closes a connection while a receive waits, and the device hangs. The NIC may still write
/// into the buffer, so the close waits, but not forever.
#[test]
fn a_close_with_a_running_request_waits_for_a_device_that_hangs_and_then_warns() {
    let bed = Bed::new(&[]);
    log().take();
    let stream = Stream::new(&bed);
    let part = RecvPart {
        addr: stream.to.as_ptr() as u64,
        bytes: 8,
        tag: 3,
        memory: &stream.into,
    };
    until(|| bed.recv.irecv(&[part], false).unwrap());
    set(RAILS[0], Action::Hang(true));
    bed.recv.close();
    assert!(has_line(&[
        RAILS[0],
        "has failed",
        "its NIC may still write to the connection's buffers"
    ]));
    set(RAILS[0], Action::Hang(false));
    bed.send.close();
}
