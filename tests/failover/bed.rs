//! Connections whose rails can be pulled and plugged, and a stream of messages over them.
#![allow(dead_code, reason = "each test program uses a part")]

use crate::common::captured_log::{CapturedLog, everywhere};
use crate::common::comms::{Receiving, Sending};
use crate::common::{self, fill, mix, until};
use host::config::Config;
use host::error::Error;
use nccl_net_spark::comm::{Host, ListenComm, RecvComm, RecvPart, Registration, SendComm};
use nccl_net_spark::plugin::bring_up;
use proto::wire::handle::HANDLE_BYTES;
use softverbs::control::{Action, control};
use softverbs::profile::Profile;
use std::ops::Deref;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard, Once, OnceLock};
use std::time::{Duration, Instant};
use verbs::HostMemory;

pub const RAILS: [&str; 2] = ["rocep1s0f0", "roceP2p1s0f0"];
/// Number of messages in flight at a time. Each has its own [`SLOT_BYTES`] of the buffers.
pub const WINDOW: usize = 12;
pub const SLOT_BYTES: usize = 1 << 20;

pub struct Bed {
    pub hosts: [Arc<Host>; 2],
    pub send: Open<SendComm>,
    pub recv: Open<RecvComm>,
    _listen: ListenComm,
    /// Lock that a test holds while it uses the rails. A test that closes this connection before it
    /// has finished takes the lock out first.
    pub turn: Option<MutexGuard<'static, ()>>,
}

impl Bed {
    pub fn new(settings: &[(&str, &str)]) -> Self {
        Self::new_with_handle(settings, |handle| handle)
    }

    /// Like [`Bed::new`], but connects with the handle that `map_handle` makes from the listener's.
    pub fn new_with_handle(
        settings: &[(&str, &str)],
        map_handle: impl FnOnce([u8; HANDLE_BYTES]) -> [u8; HANDLE_BYTES],
    ) -> Self {
        let turn = common::turn();
        let hosts = [host(0, settings), host(1, settings)];
        RAILS.iter().for_each(|rail| set(rail, Action::Up));
        until(|| {
            hosts[0]
                .process()
                .rails
                .iter()
                .all(|rail| common::is_up(rail))
                .then_some(())
        });
        let mut bed = Self::with_handle(hosts, map_handle);
        bed.turn = Some(turn);
        bed
    }

    pub fn over(hosts: [Arc<Host>; 2]) -> Self {
        Self::with_handle(hosts, |handle| handle)
    }

    /// Connects with the handle that `map_handle` makes from the listener's.
    pub fn with_handle(
        hosts: [Arc<Host>; 2],
        map_handle: impl FnOnce([u8; HANDLE_BYTES]) -> [u8; HANDLE_BYTES],
    ) -> Self {
        let (listener, handle) = hosts[1].listen().unwrap();
        let mut handle = map_handle(handle);
        let mut send = None;
        let mut recv = None;
        until(|| {
            if send.is_none() {
                send = hosts[0].connect(&mut handle, None).unwrap();
            }
            if recv.is_none() {
                recv = listener.accept().unwrap();
            }
            (send.is_some() && recv.is_some()).then_some(())
        });
        Self {
            hosts,
            send: Open::new(send.unwrap(), SendComm::close),
            recv: Open::new(recv.unwrap(), RecvComm::close),
            _listen: listener,
            turn: None,
        }
    }

    pub fn carried(&self) -> Vec<u64> {
        common::sent_bytes(&self.hosts[0])
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        for rail in RAILS {
            set(rail, Action::Refuse(0));
            set(rail, Action::Unresolved(0));
            set(rail, Action::Up);
            set(rail, Action::Addresses(true));
        }
    }
}

/// One end of a connection. It is closed at the end of its test at the latest: else the service
/// thread would keep it, and log its losses in later tests.
pub struct Open<C> {
    comm: C,
    close: fn(&C),
    is_closed: AtomicBool,
}

impl<C> Open<C> {
    fn new(comm: C, close: fn(&C)) -> Self {
        Self {
            comm,
            close,
            is_closed: AtomicBool::new(false),
        }
    }

    pub fn close(&self) {
        if !self.is_closed.swap(true, Ordering::Relaxed) {
            (self.close)(&self.comm);
        }
    }

    /// Makes the drop skip the close.
    pub fn skip_close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
    }
}

impl<C> Deref for Open<C> {
    type Target = C;

    fn deref(&self) -> &C {
        &self.comm
    }
}

impl<C> Drop for Open<C> {
    fn drop(&mut self) {
        self.close();
    }
}

pub fn host(side: usize, settings: &[(&str, &str)]) -> Arc<Host> {
    let (rails, library) = common::test_rails();
    let mut variables = vec![
        ("NCCL_IB_HCA".to_owned(), rails[side].clone()),
        ("NCCL_SOCKET_IFNAME".to_owned(), "lo".to_owned()),
    ];
    // Sysfs tree of this process's node, in which an unplugged function is missing.
    static TREE: Once = Once::new();
    let of_node = |(name, value): (String, String)| match name.as_str() {
        "NCCL_SPARK_SYSFS" => {
            let tree = format!("{value}/nodes/0");
            TREE.call_once(|| {
                Profile::load("unpaced", 1.0)
                    .unwrap()
                    .write_sysfs(Path::new(&tree))
                    .unwrap()
            });
            (name, tree)
        }
        _ => (name, value),
    };
    variables.extend(library.into_iter().map(of_node));
    variables.extend(
        settings
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned())),
    );
    bring_up(Config::from_variables(&variables).unwrap())
        .unwrap()
        .0
}

/// Returns the log lines of every thread.
pub fn log() -> &'static CapturedLog {
    static LOG: OnceLock<CapturedLog> = OnceLock::new();
    LOG.get_or_init(everywhere)
}

pub fn set(rail: &str, action: Action) {
    let dir = std::env::var("SOFTVERBS_DIR").unwrap();
    let fabric = std::env::var("SOFTVERBS_FABRIC").unwrap();
    control(Path::new(&dir), &fabric, None, rail, action).unwrap();
}

/// A stream of messages of many sizes, each checked byte for byte.
pub struct Stream {
    pub from: Vec<u8>,
    pub to: Vec<u8>,
    pub out: Arc<Registration>,
    pub into: Arc<Registration>,
    under_way: Vec<Message>,
    next: u64,
    pub done: u64,
    /// Duration of the longest call of the data path.
    pub longest: Duration,
}

/// Makes a call of the data path. Stores its duration if that is the longest so far.
fn timed<T>(longest: &mut Duration, call: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let done = call();
    *longest = begun.elapsed().max(*longest);
    done
}

struct Message {
    number: u64,
    send: Option<u16>,
    is_sent: bool,
    receive: u16,
    is_reported: bool,
}

impl Stream {
    pub fn new(bed: &Bed) -> Self {
        let from = vec![0_u8; WINDOW * SLOT_BYTES];
        let to = vec![0_u8; WINDOW * SLOT_BYTES];
        // SAFETY: both live as long as the stream, which the tests keep until the connection is
        // closed; bytes written by the NIC are read only after the receive is done.
        let memory =
            |bytes: &[u8]| unsafe { HostMemory::from_caller(bytes.as_ptr() as usize, bytes.len()) };
        let out = bed.send.register(memory(&from)).unwrap();
        let into = bed.recv.register(memory(&to)).unwrap();
        Self {
            from,
            to,
            out,
            into,
            under_way: Vec::new(),
            next: 0,
            done: 0,
            longest: Duration::ZERO,
        }
    }

    fn size(number: u64) -> usize {
        let dice = mix(number);
        match dice % 4 {
            0 => (dice >> 8) as usize % 200,
            1 => (dice >> 8) as usize % 20_000,
            2 => (dice >> 8) as usize % 300_000,
            _ => (dice >> 8) as usize % SLOT_BYTES,
        }
    }

    fn place(number: u64) -> std::ops::Range<usize> {
        let at = number as usize % WINDOW * SLOT_BYTES;
        at..at + Self::size(number)
    }

    pub fn step(&mut self, bed: &Bed) -> Result<(), Error> {
        self.begin(bed)?;
        self.advance(bed)
    }

    /// Takes one step without a new message. Returns true if all messages are done.
    pub fn finish_step(&mut self, bed: &Bed) -> Result<bool, Error> {
        self.advance(bed)?;
        Ok(self.under_way.is_empty())
    }

    fn begin(&mut self, bed: &Bed) -> Result<(), Error> {
        let is_free = self
            .under_way
            .iter()
            .all(|other| other.number % WINDOW as u64 != self.next % WINDOW as u64);
        if is_free && self.under_way.len() < WINDOW {
            let place = Self::place(self.next);
            fill(&mut self.from[place.clone()], self.next);
            self.to[place.clone()].fill(0xee);
            let addr = self.to.as_ptr() as u64 + place.start as u64;
            let bytes = place.len();
            let part = RecvPart {
                addr,
                bytes,
                tag: 3,
                memory: &self.into,
            };
            if let Some(receive) =
                timed(&mut self.longest, || bed.recv.irecv(&[part], false)).map_err(|e| *e)?
            {
                let number = self.next;
                self.under_way.push(Message {
                    number,
                    send: None,
                    is_sent: false,
                    receive,
                    is_reported: false,
                });
                self.next += 1;
            }
        }
        Ok(())
    }

    fn advance(&mut self, bed: &Bed) -> Result<(), Error> {
        // Sends match receives in order.
        if let Some(message) = self
            .under_way
            .iter_mut()
            .find(|message| message.send.is_none())
        {
            let place = Self::place(message.number);
            let addr = self.from.as_ptr() as u64 + place.start as u64;
            let longest = &mut self.longest;
            let out = &self.out;
            message.send =
                timed(longest, || bed.send.isend(addr, place.len(), 3, out)).map_err(|e| *e)?;
        }
        for message in &mut self.under_way {
            if let Some(send) = message.send.filter(|_| !message.is_sent) {
                message.is_sent = timed(&mut self.longest, || bed.send.test(send))
                    .map_err(|e| *e)?
                    .is_some();
            }
            if !message.is_reported {
                let size = Self::size(message.number) as u64;
                let tell =
                    |_: usize, bytes: u64| assert_eq!(bytes, size, "message {}", message.number);
                let test = || bed.recv.test(message.receive, tell);
                message.is_reported = timed(&mut self.longest, test).map_err(|e| *e)?;
            }
        }
        let to = &self.to;
        let done = &mut self.done;
        let mut place = vec![0; SLOT_BYTES];
        self.under_way.retain(|message| {
            if message.is_sent && message.is_reported {
                let range = Self::place(message.number);
                fill(&mut place[..range.len()], message.number);
                assert!(
                    place[..range.len()] == to[range],
                    "message {} differs",
                    message.number
                );
                *done += 1;
                return false;
            }
            true
        });
        Ok(())
    }

    pub fn run(&mut self, bed: &Bed, count: u64) {
        let goal = self.done + count;
        until(|| {
            self.step(bed).unwrap();
            (self.done >= goal).then_some(())
        });
    }
}
