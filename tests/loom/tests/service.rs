//! Models of how NCCL's threads give commands to the service thread and wake it
//! (`comm/recovery/service.rs`). No command may be lost, whether the service thread works, waits,
//! or ends for lack of work. Loom reports a lost command as a deadlock: the wait on the modelled
//! pipe has no time-out that could end it, and each model waits until all its connections are
//! closed.

use loom::model::Builder;
use loom::thread;
use loom_models::comm::channel::Channel;
use loom_models::comm::datapath::waker::Waker;
use loom_models::comm::process::Process;
use loom_models::comm::recovery::driver::{CallLog, Driver};
use loom_models::comm::recovery::redial::RedialHandle;
use loom_models::comm::recovery::service::Service;
use loom_models::comm::recovery::tcp::Redialling;
use std::sync::Arc;

/// Maximum number of times that loom interrupts a thread that could continue. Two are enough to
/// find the known bugs.
const PREEMPTIONS: usize = 3;

fn model(run: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(PREEMPTIONS));
    builder.check(run);
}

/// Watches a connection, wakes the service thread `wakes` times, and closes the connection.
fn connection(service: &Service, wakes: u32) {
    connection_with(service, wakes, |_| Redialling::Never);
}

fn connection_with(
    service: &Service,
    wakes: u32,
    redialling: impl FnOnce(&mut RedialHandle) -> Redialling,
) {
    let log = Arc::new(CallLog::default());
    let watch = service
        .watch(Channel, Driver::new(&log), |_, redial_handle| {
            Ok(redialling(redial_handle))
        })
        .unwrap();
    for _ in 0..wakes {
        service.wake();
    }
    if wakes > 0 {
        log.wait_until(|calls| calls.wakes_handled > 0);
    }
    service.close(&watch);
    let calls = log.wait_until(|calls| calls.is_unwatched);
    assert!(
        calls.closes == 1 && !calls.failed && calls.wakes_handled <= wakes,
        "{calls:?}"
    );
}

#[test]
fn connections_are_watched_and_closed_one_after_another() {
    model(|| {
        let service = Service::new(Arc::new(Process));
        connection(&service, 0);
        // The first connection's service thread may be ending, or may have ended.
        connection(&service, 0);
    });
}

#[test]
fn a_wake_up_reaches_the_driver() {
    model(|| connection(&Service::new(Arc::new(Process)), 2));
}

#[test]
fn two_threads_watch_connections_at_the_same_time() {
    model(|| {
        let service = Arc::new(Service::new(Arc::new(Process)));
        let other = {
            let service = Arc::clone(&service);
            thread::spawn(move || connection(&service, 0))
        };
        connection(&service, 0);
        other.join().unwrap();
    });
}

#[test]
fn the_listener_is_open_while_a_connection_needs_it() {
    model(|| {
        let service = Arc::new(Service::new(Arc::new(Process)));
        let other = {
            let service = Arc::clone(&service);
            thread::spawn(move || connection_with(&service, 0, RedialHandle::prepare_redial))
        };
        connection_with(&service, 0, RedialHandle::prepare_redial);
        other.join().unwrap();
    });
}

#[test]
fn a_chore_is_repeated_until_it_is_done() {
    model(|| {
        let service = Arc::new(Service::new(Arc::new(Process)));
        let other = {
            let service = Arc::clone(&service);
            thread::spawn(move || {
                let log = Arc::new(CallLog::default());
                let mut rounds = 0;
                let end = Arc::clone(&log);
                // The chore needs two rounds: the caller runs the first, the service thread the
                // second.
                let chore = move |_| {
                    rounds += 1;
                    if rounds == 2 {
                        end.record(|calls| calls.is_unwatched = true);
                    }
                    rounds == 2
                };
                service.repeat(chore).unwrap();
                log.wait_until(|calls| calls.is_unwatched);
            })
        };
        connection(&service, 0);
        other.join().unwrap();
    });
}

#[test]
fn a_wake_up_without_connections_starts_no_thread() {
    model(|| {
        let service = Service::new(Arc::new(Process));
        service.wake();
        connection(&service, 0);
        service.wake();
    });
}
