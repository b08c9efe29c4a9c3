//! Two ends of a connection in this process, and messages between them.

use super::comms::{Receiving, Sending};
use super::{fill, is_filled, until};
use host::error::Error;
use nccl_net_spark::comm::{
    Host, HostMemory, ListenComm, RecvComm, RecvPart, Registration, SendComm,
};
use proto::wire::handle::HANDLE_BYTES;
use std::sync::Arc;

pub struct Ends {
    pub send: SendComm,
    pub recv: RecvComm,
}

/// Message sizes of [`Ends::check`], in bytes.
pub const CHECKED: [usize; 6] = [0, 1, 100, 5000, 300_000, 3_000_001];

impl Ends {
    pub fn check(&self, seed: u64) {
        for bytes in CHECKED {
            let from = Buffer::filled(bytes, seed);
            let to = Buffer::blank(bytes + 64);
            assert_eq!(transfer(self, &from, &to, bytes, bytes + 64), bytes);
            assert!(is_filled(&to.0[..bytes], seed), "{bytes} bytes differ");
            assert!(
                to.0[bytes..].iter().all(|byte| *byte == 0xee),
                "bytes beyond {bytes} were touched"
            );
        }
    }
}

/// Connects two hosts. Returns the first error of either end.
pub fn connect(from: &Arc<Host>, to: &Arc<Host>) -> Result<Ends, Error> {
    let (listener, handle) = to.listen()?;
    meet(from, &listener, handle)
}

/// Connects a host to a listener by `handle`. Returns the first error of either end.
pub fn meet(
    from: &Arc<Host>,
    listener: &ListenComm,
    mut handle: [u8; HANDLE_BYTES],
) -> Result<Ends, Error> {
    let mut send = None;
    let mut recv = None;
    until(|| {
        if send.is_none() {
            match from.connect(&mut handle, None) {
                Ok(made) => send = made,
                Err(error) => return Some(Err(error)),
            }
        }
        if recv.is_none() {
            match listener.accept() {
                Ok(made) => recv = made,
                Err(error) => return Some(Err(error)),
            }
        }
        (send.is_some() && recv.is_some()).then_some(Ok(()))
    })?;
    Ok(Ends {
        send: send.unwrap(),
        recv: recv.unwrap(),
    })
}

/// Memory that a test keeps while a connection uses it.
pub struct Buffer(pub Vec<u8>);

impl Buffer {
    pub fn filled(len: usize, seed: u64) -> Self {
        // Never empty, because even an empty message needs registered memory.
        let mut bytes = vec![0; len.max(1)];
        fill(&mut bytes, seed);
        Self(bytes)
    }

    pub fn blank(len: usize) -> Self {
        Self(vec![0xee; len.max(1)])
    }

    pub fn addr(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    pub fn memory(&self) -> HostMemory {
        // SAFETY: every test keeps its buffers until its connections have ended, and reads the
        // peer's bytes only after the receive is done.
        unsafe { HostMemory::from_caller(self.0.as_ptr() as usize, self.0.len()) }
    }
}

/// Sends a message of `bytes` bytes into a receive whose buffer has `room` bytes. Returns the size
/// that the receiver reports.
pub fn transfer(ends: &Ends, from: &Buffer, to: &Buffer, bytes: usize, room: usize) -> usize {
    let out = ends.send.register(from.memory()).unwrap();
    let into = ends.recv.register(to.memory()).unwrap();
    let part = RecvPart {
        addr: to.addr(),
        bytes: room,
        tag: 5,
        memory: &into,
    };
    let receive = until(|| ends.recv.irecv(&[part], false).unwrap());
    let send = until(|| ends.send.isend(from.addr(), bytes, 5, &out).unwrap());
    let mut received = None;
    let mut sent = None;
    until(|| {
        received = received.take().or_else(|| sizes(&ends.recv, receive));
        sent = sent.or_else(|| ends.send.test(send).unwrap());
        received.as_ref().and(sent)
    });
    assert_eq!(sent.unwrap(), bytes as u64);
    received.unwrap()[0]
}

/// Returns the sizes of a receive's parts once it is finished.
pub fn sizes(recv: &RecvComm, request: u16) -> Option<Vec<usize>> {
    let mut sizes = Vec::new();
    let done = recv.test(request, |part, bytes| {
        assert_eq!(part, sizes.len());
        sizes.push(bytes as usize);
    });
    done.unwrap().then_some(sizes)
}

/// Sends messages of these sizes into exact and larger receives, and checks each byte.
pub fn every_size(ends: &Ends, sizes: &[usize]) {
    for (round, &bytes) in sizes.iter().enumerate() {
        for room in [bytes, bytes + 1000] {
            let from = Buffer::filled(bytes, round as u64 + 1);
            let to = Buffer::blank(room);
            assert_eq!(
                transfer(ends, &from, &to, bytes, room),
                bytes,
                "{bytes} bytes into {room}"
            );
            assert!(to.0[..bytes] == from.0[..bytes], "{bytes} bytes differ");
            assert!(
                to.0[bytes..].iter().all(|b| *b == 0xee),
                "bytes beyond {bytes} were touched"
            );
        }
    }
}

/// Posts all sends and receives that a connection may have, with tags out of order. Each part of a
/// receive has a buffer of `piece` bytes. `wait` gets the request numbers of the sends and of the
/// receives, and the expected sizes of a receive's parts. It must return only when all requests are
/// done.
pub fn full_window(ends: &Ends, piece: usize, wait: impl Fn(Vec<u16>, Vec<u16>, &[usize])) {
    const SLOTS: usize = 32;
    const PARTS: usize = 8;
    let expected: Vec<usize> = (0..PARTS).map(|part| piece - part / 2).collect();
    let from = Buffer::filled(SLOTS * PARTS * piece, 1);
    let to = Buffer::blank(SLOTS * PARTS * piece);
    let out = ends.send.register(from.memory()).unwrap();
    let into = ends.recv.register(to.memory()).unwrap();
    for round in 0..3 {
        let receive = |slot: usize| {
            // Tags 0, 0, 1, 1, 2, 2, 3, 3: sends and receives with equal tags match in order.
            let part = |part: usize| RecvPart {
                addr: to.addr() + ((slot * PARTS + part) * piece) as u64,
                bytes: piece,
                tag: (part / 2) as i32,
                memory: &into,
            };
            let parts: Vec<RecvPart<'_>> = (0..PARTS).map(part).collect();
            until(|| ends.recv.irecv(&parts, false).unwrap())
        };
        let receives = (0..SLOTS).map(receive).collect();
        let one = RecvPart {
            addr: to.addr(),
            bytes: 1,
            tag: 0,
            memory: &into,
        };
        assert_eq!(
            ends.recv.irecv(&[one], false).unwrap(),
            None,
            "a 33rd receive found room"
        );
        let mut sends = Vec::new();
        for slot in 0..SLOTS {
            for tag in [3, 1, 0, 2] {
                for twin in 0..2 {
                    let at = from.addr() + ((slot * PARTS + tag * 2 + twin) * piece) as u64;
                    sends.push(until(|| {
                        ends.send.isend(at, piece - tag, tag as i32, &out).unwrap()
                    }));
                }
            }
        }
        assert_eq!(
            ends.send.isend(from.addr(), 1, 0, &out).unwrap(),
            None,
            "a 257th send found room"
        );
        wait(sends, receives, &expected);
        for (at, (a, b)) in from.0.iter().zip(&to.0).enumerate() {
            let part = at / piece % PARTS;
            let within = at % piece;
            assert!(
                within >= piece - part / 2 || a == b,
                "byte {at} in round {round}"
            );
        }
    }
}

/// A connection, with memory for the messages of both ends.
pub struct Bed {
    pub out: Arc<Registration>,
    pub into: Arc<Registration>,
    pub ends: Ends,
    pub from: Buffer,
    pub to: Buffer,
}

impl Bed {
    pub fn new(ends: Ends, bytes: usize) -> Self {
        let from = Buffer::filled(bytes, 1);
        let to = Buffer::blank(bytes);
        Self {
            out: ends.send.register(from.memory()).unwrap(),
            into: ends.recv.register(to.memory()).unwrap(),
            ends,
            from,
            to,
        }
    }
}
