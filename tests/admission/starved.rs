//! A process without free file descriptors, while unauthenticated clients and an honest peer wait
//! at its listeners. The test runs in a process of its own, so that other tests keep their
//! descriptors.

use crate::attack::{Between, Listener, decoded, dial, host, proxy};
use crate::common::captured_log::CapturedLog;
use crate::common::ends::Ends;
use crate::common::until;
use nccl_net_spark::comm::Host;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use proto::wire::message::Message;
use std::fs::File;
use std::io::Write;
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc;
use tracing::Level;

const LIMIT: u64 = 300;
/// Number of clients without the token that connect to each listener before the honest peer
/// connects to one. As many connect after it.
const UNAUTHENTICATED_CLIENTS: usize = 20;
/// Number of calls of each listener's `accept` while no call can succeed.
const CALLS: usize = 1000;
/// Maximum number of connections that one call of `accept` tries to accept.
const TRIES: usize = 64;

#[test]
fn a_process_without_descriptors_logs_it_once_and_admits_the_peer_later() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "starved::starved_process",
            "--ignored",
            "--nocapture",
        ])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let output_text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        output.status.success() && output_text.contains("1 passed"),
        "{output_text}"
    );
}

/// Holds all descriptors that the process may still open, so that none is free.
struct Hoard(Vec<File>);

impl Hoard {
    fn take() -> Self {
        let mut all = Vec::with_capacity(LIMIT as usize);
        loop {
            match File::open("/dev/null") {
                Ok(file) => all.push(file),
                Err(error) => {
                    assert_eq!(error.raw_os_error(), Some(libc::EMFILE), "{error}");
                    return Self(all);
                }
            }
        }
    }
}

#[derive(Default)]
struct ListenerLog {
    tries: usize,
    /// Number of times that an admitted peer could not be answered yet.
    waits: usize,
    warnings: Vec<String>,
}

impl ListenerLog {
    fn take_lines(&mut self, log: &CapturedLog) {
        for (level, line) in log.take() {
            self.tries += usize::from(
                line.contains("cannot accept connections")
                    || line.contains("failed before it was accepted"),
            );
            self.waits += usize::from(line.contains("cannot answer "));
            if level <= Level::WARN {
                self.warnings.push(line);
            }
        }
    }

    /// Calls each listener's `accept` `calls` times, and asserts that no call returns a connection.
    /// Returns the largest number of attempts in one call.
    fn poll_listeners(&mut self, listeners: &[&Listener], calls: usize) -> usize {
        let log = CapturedLog::default();
        let mut largest = 0;
        for _ in 0..calls {
            for listener in listeners {
                let before = self.tries;
                let made = log.capture(|| listener.listen.accept());
                self.take_lines(&log);
                assert!(
                    made.expect("a shortage is no failure").is_none(),
                    "there were no descriptors for this"
                );
                largest = largest.max(self.tries - before);
            }
        }
        largest
    }
}

/// True if a client in this port's queue has sent exactly this many bytes: the kernel lists them as
/// received and not yet read.
fn has_sent(port: u16, bytes: usize) -> bool {
    let local = format!(":{port:04X}");
    let sent = format!(":{bytes:08X}");
    let lines = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let fields = |line: &str| {
        line.split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    lines
        .lines()
        .map(fields)
        .any(|f| f.len() > 4 && f[1].ends_with(&local) && f[4].ends_with(&sent))
}

fn clients(listeners: &[&Listener]) -> Vec<TcpStream> {
    let one = |number: usize| {
        let mut client = dial(listeners[number % listeners.len()].known.address);
        if number % 4 < 2 {
            client.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        }
        client
    };
    (0..UNAUTHENTICATED_CLIENTS * listeners.len())
        .map(one)
        .collect()
}

/// Process that [`a_process_without_descriptors_logs_it_once_and_admits_the_peer_later`] starts.
#[test]
#[ignore = "another test's process"]
fn starved_process() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, LIMIT, hard).unwrap();
    let hosts = [host(0), host(1)];
    let first = Listener::open(&hosts[1]);
    let other = first.meet(&hosts[0]);
    other.check(1);
    let listeners = [Listener::open(&hosts[1]), Listener::open(&hosts[1])];
    let listeners: Vec<&Listener> = listeners.iter().collect();
    let before = clients(&listeners);
    let (mut handle, taken) = send_hello(&hosts[0], listeners[0]);
    let after = clients(&listeners);
    let mut listener_log = ListenerLog::default();
    let mut hoard = Hoard::take();

    without_any(&mut listener_log, &listeners);
    other.check(2);
    with_one_more_at_a_time(&mut listener_log, &mut hoard, listeners[0], &other);

    // The peer, which is in this process, needs descriptors too.
    hoard.0.truncate(hoard.0.len() - 20);
    let log = CapturedLog::default();
    let mut send = None;
    let mut recv = None;
    until(|| {
        send = send
            .take()
            .or_else(|| hosts[0].connect(&mut handle, None).unwrap());
        recv = recv
            .take()
            .or_else(|| log.capture(|| listeners[0].listen.accept()).unwrap());
        (send.is_some() && recv.is_some()).then_some(())
    });
    listener_log.take_lines(&log);
    let met = Ends {
        send: send.unwrap(),
        recv: recv.unwrap(),
    };
    met.check(5);
    other.check(6);
    let frames = taken.join().unwrap().frames;
    let Message::Offer(offer) = decoded(&frames[1]) else {
        panic!("no offer")
    };
    assert_eq!(
        (frames.len(), offer.pairs.len()),
        (4, hosts[1].process().rails.len()),
        "a rail was left out"
    );
    drop(hoard);

    listeners[1].meet(&hosts[0]).check(7);
    assert_eq!(
        listener_log.warnings.len(),
        1,
        "{:?}",
        listener_log.warnings
    );
    drop((before, after));
}

/// Sends a peer's HELLO to a listener that is not accepting yet.
fn send_hello(from: &Arc<Host>, listener: &Listener) -> Between {
    let (frame_sizes, sizes) = mpsc::channel();
    let (mut handle, taken) = proxy(listener, move |_, frame| {
        // Fails for the later messages, because the receiving end is dropped by then.
        let _ = frame_sizes.send(frame.len());
        frame
    });
    let hello_bytes = until(|| {
        assert!(from.connect(&mut handle, None).unwrap().is_none());
        sizes.try_recv().ok()
    });
    until(|| has_sent(listener.known.address.port(), hello_bytes).then_some(()));
    (handle, taken)
}

fn without_any(listener_log: &mut ListenerLog, listeners: &[&Listener]) {
    assert_eq!(listener_log.poll_listeners(listeners, CALLS), 1);
    assert_eq!(
        (listener_log.tries, listener_log.waits),
        (listeners.len() * CALLS, 0)
    );
    let [warning] = &listener_log.warnings[..] else {
        panic!(
            "{} warnings: {:?}",
            listener_log.warnings.len(),
            listener_log.warnings
        )
    };
    assert!(
        warning.contains(&format!("ulimit -n is {LIMIT}")),
        "{warning}"
    );
}

fn with_one_more_at_a_time(
    listener_log: &mut ListenerLog,
    hoard: &mut Hoard,
    listener: &Listener,
    other: &Ends,
) {
    // The clients get the one free descriptor in turn until the honest peer gets it. The answer to
    // the peer needs more descriptors, so it waits. Later clients stay in the queue.
    let before = listener_log.tries;
    hoard.0.pop();
    assert!(listener_log.poll_listeners(&[listener], CALLS) <= TRIES);
    assert!(
        listener_log.tries - before <= 2 * UNAUTHENTICATED_CLIENTS,
        "{} tries",
        listener_log.tries - before
    );
    assert!(
        listener_log.waits > CALLS / 2,
        "{} waits",
        listener_log.waits
    );
    other.check(3);
    // The peer is answered once there are enough descriptors for the whole answer.
    let mut freed = 1;
    loop {
        hoard.0.pop().expect("the answer needs fewer than all");
        freed += 1;
        let before = listener_log.waits;
        listener_log.poll_listeners(&[listener], 10);
        if listener_log.waits == before {
            break;
        }
    }
    assert!(freed <= 8, "{freed} descriptors for an answer");
    other.check(4);
}
