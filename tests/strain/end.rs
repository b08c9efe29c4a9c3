//! One of the two processes of the bed. It takes orders from standard input, one on each line:
//!
//! - `open FIRST COUNT PLACES`: opens `COUNT` connections, numbered from `FIRST`, and exchanges
//!   messages on them without pause; the process's memory is divided into `PLACES` places for
//!   connections;
//! - `stop`: begins no more messages, and closes the connections once everything has arrived;
//! - `churn FIRST COUNT`: opens `COUNT` connections one after the other, each for one message;
//! - `gauge`: returns the allocator's free memory to the system, and prints the measurements.
//!
//! Connections with even numbers send from process 0 to process 1, and those with odd numbers from
//! process 1 to process 0. The bed forwards lines `peer ...` to the other process.

use super::heap;
use crate::common::comms::{Receiving, Sending};
use crate::common::{fill, is_filled, mix, until};
use host::config::Config;
use nccl_net_spark::comm::{Host, ListenComm, RecvComm, RecvPart, Registration, SendComm};
use nccl_net_spark::plugin::bring_up;
use proto::wire::handle::HANDLE_BYTES;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use verbs::HostMemory;

/// Largest number of messages that a connection has in flight. Each is in memory of its own.
const WINDOW: usize = 8;
/// Size in bytes of the memory to send from. The memory to receive into has the same size.
const MEMORY: usize = 16 << 20;
/// Limit on the size of a message in bytes. Every message is smaller.
const MOST: usize = 1 << 20;
/// Size in bytes of the message of a connection that carries only one.
const SINGLE: usize = 5000;

/// Number of places into which the memory is divided for connections that follow one another.
const CHURN_PLACES: u64 = 64;

pub struct Process {
    side: u64,
    host: Arc<Host>,
    from: Vec<u8>,
    to: Vec<u8>,
    lines: Receiver<String>,
    received: VecDeque<String>,
    orders: VecDeque<String>,
    messages: u64,
    bytes: u64,
}

struct Connection {
    number: u64,
    end: End,
    memory: Arc<Registration>,
    part: Range<usize>,
    under_way: VecDeque<(u64, u16)>,
    next: u64,
    filled: u64,
    done: u64,
    total: Option<u64>,
    is_confirmed: bool,
}

enum End {
    Sends(SendComm),
    Receives(RecvComm),
}

impl Process {
    pub fn new(side: u64, settings: &[(String, String)]) -> Self {
        let host = bring_up(Config::from_variables(settings).unwrap())
            .unwrap()
            .0;
        let (tell, lines) = channel();
        std::thread::spawn(move || {
            std::io::stdin()
                .lines()
                .map_while(Result::ok)
                .try_for_each(|line| tell.send(line))
        });
        // The memory is written here, so that all samples count its pages.
        let from = vec![0x11; MEMORY];
        let to = vec![0xee; MEMORY];
        Self {
            side,
            host,
            from,
            to,
            lines,
            received: VecDeque::new(),
            orders: VecDeque::new(),
            messages: 0,
            bytes: 0,
        }
    }

    pub fn run(&mut self) {
        println!("\nready");
        let mut connections: Vec<Connection> = Vec::new();
        loop {
            let mut moved = false;
            for each in &mut connections {
                moved |= each.step(self);
            }
            if !connections.is_empty() && !moved {
                std::thread::yield_now();
            }
            if !self.listen(connections.is_empty()) {
                return;
            }
            let Some(order) = self.orders.pop_front() else {
                continue;
            };
            let mut words = order.split_whitespace();
            let name = words.next().unwrap_or_default().to_owned();
            let numbers: Vec<u64> = words.map(|word| word.parse().expect("a number")).collect();
            match (name.as_str(), numbers.as_slice()) {
                ("open", [first, count, places]) => {
                    connections = self.open(*first..first + count, *places)
                }
                ("stop", []) => self.finish(std::mem::take(&mut connections)),
                ("churn", [first, count]) => self.churn(*first..first + count),
                ("gauge", []) => self.print_gauge(),
                _ => panic!("no such order: {order}"),
            }
        }
    }

    /// Reads orders, and waits for one if `is_idle`. Returns false once standard input has ended.
    fn listen(&mut self, is_idle: bool) -> bool {
        if is_idle && self.orders.is_empty() {
            match self.lines.recv() {
                Ok(line) => self.take(line),
                Err(_) => return false,
            }
        }
        while let Ok(line) = self.lines.try_recv() {
            self.take(line);
        }
        true
    }

    fn take(&mut self, line: String) {
        match line.strip_prefix("peer ") {
            Some(line) => self.received.push_back(line.to_owned()),
            None => self.orders.push_back(line),
        }
    }

    fn wait_for(&mut self, what: &str, number: u64) -> Option<String> {
        let begin = format!("{what} {number} ");
        let at = self
            .received
            .iter()
            .position(|line| line.starts_with(&begin))?;
        self.received
            .remove(at)
            .map(|line| line[begin.len()..].to_owned())
    }

    fn open(&mut self, numbers: Range<u64>, places: u64) -> Vec<Connection> {
        let begun = Instant::now();
        let connections = self.connect(numbers, places);
        println!("opened {}", begun.elapsed().as_micros());
        connections
    }

    fn connect(&mut self, numbers: Range<u64>, places: u64) -> Vec<Connection> {
        let mut listeners: Vec<(u64, ListenComm)> = Vec::new();
        let (mut silent, mut handles): (Vec<u64>, Vec<(u64, [u8; HANDLE_BYTES])>) =
            Default::default();
        for number in numbers {
            if number % 2 == self.side {
                silent.push(number);
                continue;
            }
            let (listener, handle) = self.host.listen().unwrap();
            let hex: String = handle.iter().map(|byte| format!("{byte:02x}")).collect();
            println!("peer handle {number} {hex}");
            listeners.push((number, listener));
        }
        let mut connections = Vec::new();
        until(|| {
            self.listen(false);
            silent.retain(|number| match self.wait_for("handle", *number) {
                Some(hex) => {
                    let byte = |at: usize| {
                        u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).expect("a byte")
                    };
                    handles.push((*number, std::array::from_fn(byte)));
                    false
                }
                None => true,
            });
            handles.retain_mut(
                |(number, handle)| match self.host.connect(handle, None).unwrap() {
                    Some(send) => {
                        connections.push(Connection::new(self, *number, End::Sends(send), places));
                        false
                    }
                    None => true,
                },
            );
            listeners.retain(|(number, listener)| match listener.accept().unwrap() {
                Some(recv) => {
                    connections.push(Connection::new(self, *number, End::Receives(recv), places));
                    false
                }
                None => true,
            });
            if listeners.is_empty() && silent.is_empty() && handles.is_empty() {
                return Some(());
            }
            std::thread::yield_now();
            None
        });
        connections
    }

    /// Begins no more messages, and closes the connections once everything has arrived. Senders
    /// report how many messages they have begun, and receivers confirm that all have arrived.
    fn finish(&mut self, mut connections: Vec<Connection>) {
        for each in &mut connections {
            if matches!(each.end, End::Sends(_)) {
                each.total = Some(each.next);
                println!("peer total {} {}", each.number, each.next);
            }
        }
        until(|| {
            self.listen(false);
            for each in &mut connections {
                if each.total.is_none() {
                    each.total = self
                        .wait_for("total", each.number)
                        .map(|total| total.parse().expect("a number"));
                }
                each.step(self);
                if each.is_complete() && !each.is_confirmed {
                    each.is_confirmed = match each.end {
                        End::Sends(_) => self.wait_for("have", each.number).is_some(),
                        End::Receives(_) => {
                            println!("peer have {} all", each.number);
                            true
                        }
                    };
                }
            }
            connections
                .iter()
                .all(|each| each.is_confirmed)
                .then_some(())
        });
        connections.into_iter().for_each(Connection::close);
        println!("closed");
    }

    fn churn(&mut self, numbers: Range<u64>) {
        let mut opening = Duration::ZERO;
        let mut using = Duration::ZERO;
        let mut closing = Duration::ZERO;
        for number in numbers {
            let begun = Instant::now();
            let mut connection = self.connect(number..number + 1, CHURN_PLACES).remove(0);
            let opened = Instant::now();
            connection.total = Some(1);
            until(|| {
                connection.step(self);
                if connection.is_complete() {
                    return Some(());
                }
                std::thread::yield_now();
                None
            });
            let used = Instant::now();
            connection.close();
            opening += opened - begun;
            using += used - opened;
            closing += used.elapsed();
        }
        println!(
            "churned {} {} {}",
            opening.as_micros(),
            using.as_micros(),
            closing.as_micros()
        );
    }

    fn print_gauge(&self) {
        // SAFETY: `malloc_trim` touches only free memory. `mallinfo` only reads the allocator's
        // statistics.
        let all = unsafe {
            libc::malloc_trim(0);
            libc::mallinfo()
        };
        let ((blocks, bytes), registrations) =
            (heap::in_use(), self.host.process().registrations.in_use());
        // Not `mallinfo2`, which came with glibc 2.33: Debian 11 has 2.31. The fields are 32 bits
        // wide, which suffices: a process here has less than 4 GiB.
        let heap_bytes = u64::from(all.uordblks as u32) + u64::from(all.hblkhd as u32);
        println!(
            "gauge {heap_bytes} {blocks} {bytes} {registrations} {} {}",
            self.messages, self.bytes
        );
    }
}

impl Connection {
    fn new(process: &Process, number: u64, end: End, places: u64) -> Self {
        let room = MEMORY / places as usize;
        let begin = (number / 2 % places) as usize * room;
        let part = begin..begin + room;
        // SAFETY: the process keeps the memory as long as it has connections, and reads the peer's
        // bytes only after the receive is done.
        let memory =
            |all: &[u8]| unsafe { HostMemory::from_caller(all.as_ptr() as usize + begin, room) };
        let memory = match &end {
            End::Sends(send) => send.register(memory(&process.from)),
            End::Receives(recv) => recv.register(memory(&process.to)),
        };
        Self {
            number,
            end,
            memory: memory.unwrap(),
            part,
            under_way: VecDeque::new(),
            next: 0,
            filled: 0,
            done: 0,
            total: None,
            is_confirmed: false,
        }
    }

    fn place(&self, message: u64) -> Range<usize> {
        let room = self.part.len() / WINDOW;
        let begin = self.part.start + message as usize % WINDOW * room;
        let dice = mix(self.number << 40 ^ message);
        let limit = [200, 20_000, 300_000, MOST][dice as usize % 4].min(room);
        let size = if self.total == Some(1) {
            SINGLE
        } else {
            (dice >> 8) as usize % limit
        };
        begin..begin + size
    }

    fn seed(&self, message: u64) -> u64 {
        mix(message << 20 ^ self.number)
    }

    fn is_complete(&self) -> bool {
        self.total == Some(self.done)
    }

    /// Starts a message if there is room, and tests the oldest one. Returns true on progress.
    fn step(&mut self, process: &mut Process) -> bool {
        let has_room =
            self.under_way.len() < WINDOW && self.total.is_none_or(|total| self.next < total);
        let started = if has_room { self.start(process) } else { None };
        if let Some(request) = started {
            self.under_way.push_back((self.next, request));
            self.next += 1;
        }
        let Some(&(message, request)) = self.under_way.front() else {
            return false;
        };
        let place = self.place(message);
        let ended = match &self.end {
            End::Sends(send) => send.test(request).unwrap().is_some(),
            End::Receives(recv) => {
                let tell = |_: usize, bytes: u64| {
                    assert_eq!(bytes, place.len() as u64, "{}", self.text(message))
                };
                recv.test(request, tell).unwrap()
            }
        };
        if ended {
            self.under_way.pop_front();
            self.done += 1;
            if matches!(self.end, End::Receives(_)) {
                process.messages += 1;
                process.bytes += place.len() as u64;
                let is_right = is_filled(&process.to[place], self.seed(message));
                assert!(is_right, "{} has wrong bytes", self.text(message));
            }
        }
        started.is_some() || ended
    }

    fn start(&mut self, process: &mut Process) -> Option<u16> {
        let place = self.place(self.next);
        match &self.end {
            End::Sends(send) => {
                if self.filled == self.next {
                    fill(&mut process.from[place.clone()], self.seed(self.next));
                    self.filled += 1;
                }
                send.isend(
                    process.from.as_ptr() as u64 + place.start as u64,
                    place.len(),
                    3,
                    &self.memory,
                )
                .unwrap()
            }
            End::Receives(recv) => {
                let addr = process.to.as_ptr() as u64 + place.start as u64;
                let part = RecvPart {
                    addr,
                    bytes: place.len(),
                    tag: 3,
                    memory: &self.memory,
                };
                recv.irecv(&[part], false).unwrap()
            }
        }
    }

    fn text(&self, message: u64) -> String {
        format!("message {message} of connection {}", self.number)
    }

    fn close(self) {
        match self.end {
            End::Sends(send) => send.close(),
            End::Receives(recv) => recv.close(),
        }
    }
}
