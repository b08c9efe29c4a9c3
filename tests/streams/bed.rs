//! Two hosts whose rails share no subnet, with connections and messages between them.
#![allow(dead_code, reason = "each test uses a part")]

use crate::common::comms::{Receiving, Sending};
use crate::common::{self, fill, is_filled, until};
use nccl_net_spark::comm::{Host, RecvComm, RecvPart, Registration, SendComm};
use nccl_net_spark::config::Config;
use nccl_net_spark::error::Error;
use nccl_net_spark::plugin::bring_up;
use nccl_net_spark::verbs::HostMemory;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Two devices with addresses in different subnets.
pub const NEAR: &str = "rocep1s0f0";
pub const FAR: &str = "roceP2p1s0f0";
/// The setting that allows TCP.
pub const RING_TCP: (&str, &str) = ("NCCL_SPARK_RING_TCP", "1");

/// Lock for tests whose connections have rails, because one of them takes a port down.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn host(devices: &str, settings: &[(&str, &str)]) -> Arc<Host> {
    let (_, library) = common::test_rails();
    let mut variables =
        vec![("NCCL_IB_HCA".to_owned(), devices.to_owned()), ("NCCL_SOCKET_IFNAME".to_owned(), "lo".to_owned())];
    variables.extend(library);
    for (name, value) in settings {
        variables.retain(|(known, _)| known != name);
        variables.push(((*name).to_owned(), (*value).to_owned()));
    }
    bring_up(Config::from_variables(&variables).unwrap()).unwrap().0
}

pub struct Ends {
    pub send: SendComm,
    pub recv: RecvComm,
}

/// Connects two hosts. Returns the first error of either end.
pub fn connect(from: &Arc<Host>, to: &Arc<Host>) -> Result<Ends, Error> {
    let (listener, mut handle) = to.listen()?;
    let (mut send, mut recv) = (None, None);
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
    Ok(Ends { send: send.unwrap(), recv: recv.unwrap() })
}

/// Connects two hosts without a common rail.
pub fn apart() -> Ends {
    connect(&host(NEAR, &[RING_TCP]), &host(FAR, &[RING_TCP])).unwrap()
}

pub fn is_by_tcp(ends: &Ends) -> bool {
    match (&ends.send, &ends.recv) {
        (SendComm::Streams(_), RecvComm::Streams(_)) => true,
        (SendComm::Rails(_), RecvComm::Rails(_)) => false,
        _ => panic!("the two ends disagree"),
    }
}

/// Memory that a test keeps as long as it is in use.
pub struct Buffer(pub Vec<u8>);

impl Buffer {
    /// Bytes of a message that no other message has.
    pub fn filled(len: usize, seed: u64) -> Self {
        // Never empty: even an empty message needs registered memory.
        let mut bytes = vec![0; len.max(1)];
        fill(&mut bytes, seed);
        Self(bytes)
    }

    /// Bytes that no message has.
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

/// Sends `bytes` into a receive with `room`. Returns the size that the receiver got.
pub fn transfer(ends: &Ends, from: &Buffer, to: &Buffer, bytes: usize, room: usize) -> usize {
    let (out, into) = (ends.send.register(from.memory()).unwrap(), ends.recv.register(to.memory()).unwrap());
    let part = RecvPart { addr: to.addr(), bytes: room, tag: 5, memory: &into };
    let receive = until(|| ends.recv.irecv(&[part], false).unwrap());
    let send = until(|| ends.send.isend(from.addr(), bytes, 5, &out).unwrap());
    let (mut received, mut sent) = (None, None);
    until(|| {
        received = received.take().or_else(|| sizes(&ends.recv, receive));
        sent = sent.or_else(|| ends.send.test(send).unwrap());
        received.as_ref().and(sent)
    });
    assert_eq!(sent.unwrap(), bytes as u64);
    received.unwrap()[0]
}

/// Sends messages of several sizes, and checks each byte.
pub fn check(ends: &Ends, seed: u64) {
    for bytes in [0, 1, 100, 5000, 300_000, 3_000_001] {
        let (from, to) = (Buffer::filled(bytes, seed), Buffer::blank(bytes + 64));
        assert_eq!(transfer(ends, &from, &to, bytes, bytes + 64), bytes);
        assert!(is_filled(&to.0[..bytes], seed), "{bytes} bytes differ");
        assert!(to.0[bytes..].iter().all(|byte| *byte == 0xee), "bytes beyond {bytes} were touched");
    }
}

/// The sizes of a receive, once it is finished.
pub fn sizes(recv: &RecvComm, request: u16) -> Option<Vec<usize>> {
    let mut sizes = Vec::new();
    let done = recv.test(request, |part, bytes| {
        assert_eq!(part, sizes.len());
        sizes.push(bytes as usize);
    });
    done.unwrap().then_some(sizes)
}

pub fn irecv(recv: &RecvComm, to: &Buffer, bytes: usize, tag: i32, memory: &Registration) -> u16 {
    let part = RecvPart { addr: to.addr(), bytes, tag, memory };
    until(|| recv.irecv(&[part], false).unwrap())
}

pub fn receive_error(recv: &RecvComm, request: u16) -> Error {
    *until(|| recv.test(request, |_, _| {}).err())
}

/// Waits for the error of a sender that gets no grants.
pub fn send_error(send: &SendComm, from: &Buffer, memory: &Registration) -> Error {
    *until(|| send.isend(from.addr(), 1, 0, memory).err())
}
