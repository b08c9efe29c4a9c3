//! Honest connections and a proxy between the two ends, for the tests of the bootstrap port.
#![allow(dead_code, reason = "each test program uses a part")]

use crate::common::comms::{Receiving, Sending};
use crate::common::ends::{Ends, meet};
use crate::common::{self, LIMIT, until};
use host::config::Config;
use host::error::Error;
use nccl_net_spark::comm::{Host, ListenComm, RecvPart};
use nccl_net_spark::plugin::bring_up;
use proto::wire::handle::{HANDLE_BYTES, Handle};
use proto::wire::message::{Header, Message};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use verbs::HostMemory;

pub const HEADER_BYTES: usize = 8;
pub const TOKEN: std::ops::Range<usize> = HEADER_BYTES..HEADER_BYTES + 16;

/// The software fabric's profile "unpaced", but with path MTU 1024. So a test can name a larger
/// one.
const PROFILE: &str = "link A pci=0000:01:00 gts=32 width=4 payload=0
    link B pci=0002:01:00 gts=32 width=4 payload=0
    cable p0 payload=0
    rail rocep1s0f0 netdev=enp1s0f0np0 port=p0 link=A cable=p0 function=0 line=0 qp=0 latency=0 mtu=1024
    rail roceP2p1s0f0 netdev=enP2p1s0f0np0 port=p0 link=B cable=p0 function=0 line=0 qp=0 latency=0 mtu=1024";

pub fn host(side: usize) -> Arc<Host> {
    host_with(side, &[])
}

pub fn host_with(side: usize, settings: &[(&str, &str)]) -> Arc<Host> {
    let (rails, library) = common::test_rails_of(PROFILE);
    let mut variables = vec![
        ("NCCL_IB_HCA".to_owned(), rails[side].clone()),
        ("NCCL_SOCKET_IFNAME".to_owned(), "lo".to_owned()),
    ];
    variables.extend(library);
    variables.extend(
        settings
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned())),
    );
    bring_up(Config::from_variables(&variables).unwrap())
        .unwrap()
        .0
}

pub struct Listener {
    pub listen: ListenComm,
    pub handle: [u8; HANDLE_BYTES],
    /// The decoded `handle`.
    pub known: Handle,
}

impl Listener {
    pub fn open(host: &Arc<Host>) -> Self {
        let (listen, handle) = host.listen().unwrap();
        Self {
            listen,
            handle,
            known: Handle::decode(&handle).unwrap(),
        }
    }

    /// Connects a host to this listener. Other clients may connect at the same time.
    pub fn meet(&self, from: &Arc<Host>) -> Ends {
        self.try_by(from, self.handle).unwrap()
    }

    /// Connects a host by `handle`, which may lead to this listener through a proxy. Returns the
    /// first error of either end.
    pub fn try_by(&self, from: &Arc<Host>, handle: [u8; HANDLE_BYTES]) -> Result<Ends, Error> {
        meet(from, &self.listen, handle)
    }
}

impl Ends {
    pub fn receiver_error(&self) -> Box<Error> {
        let to = [0_u8; 64];
        // SAFETY: the buffer outlives its registration; the peer sends nothing into it.
        let memory = unsafe { HostMemory::from_caller(to.as_ptr() as usize, to.len()) };
        let into = self.recv.register(memory).unwrap();
        let part = RecvPart {
            addr: to.as_ptr() as u64,
            bytes: 8,
            tag: 9,
            memory: &into,
        };
        let mut waiting: Vec<u16> = Vec::new();
        until(|| {
            let granted = self.recv.irecv(&[part], false);
            let tested = waiting
                .iter()
                .find_map(|receive| self.recv.test(*receive, |_, _| {}).err());
            match (granted, tested) {
                (Err(error), _) | (_, Some(error)) => return Some(error),
                (Ok(new), None) => waiting.extend(new),
            }
            None
        })
    }

    pub fn sender_error(&self) -> Box<Error> {
        let from = [0_u8; 64];
        // SAFETY: the buffer outlives its registration; the peer grants nothing for it.
        let memory = unsafe { HostMemory::from_caller(from.as_ptr() as usize, from.len()) };
        let out = self.send.register(memory).unwrap();
        until(|| self.send.isend(from.as_ptr() as u64, 8, 9, &out).err())
    }
}

/// Connects a stream whose reads and writes have a time limit.
pub fn dial(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    limited(&stream);
    stream
}

fn limited(stream: &TcpStream) {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.set_write_timeout(Some(LIMIT)).unwrap();
}

/// Reads the next frame. Returns `None` at the end of the stream.
pub fn read_frame(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut frame = vec![0; HEADER_BYTES];
    stream.read_exact(&mut frame).ok()?;
    let body_bytes = u32::from_le_bytes(frame[4..].try_into().unwrap()) as usize;
    frame.resize(HEADER_BYTES + body_bytes, 0);
    stream.read_exact(&mut frame[HEADER_BYTES..]).ok()?;
    Some(frame)
}

pub fn decoded(frame: &[u8]) -> Message {
    let header = Header::decode(frame[..HEADER_BYTES].try_into().unwrap()).unwrap();
    Message::decode(header, &frame[HEADER_BYTES..]).unwrap()
}

pub struct Taken {
    pub to_sender: TcpStream,
    pub to_receiver: TcpStream,
    /// The frames of HELLO, OFFER, READY and GO, before any change; fewer if the handshake failed.
    pub frames: Vec<Vec<u8>>,
}

/// Starts a proxy for one handshake. Returns a connection handle with the proxy's address, and the
/// proxy's thread. The proxy forwards the handshake's frames as changed by `alter`, which gets each
/// frame's index. It forwards no later frames.
pub fn proxy(
    real: &Listener,
    alter: impl Fn(usize, Vec<u8>) -> Vec<u8> + Send + 'static,
) -> Between {
    proxy_after_drops(real, 0, alter)
}

/// Does the same as [`proxy`], but first drops `drops` connections without reading.
pub fn proxy_after_drops(
    real: &Listener,
    drops: usize,
    alter: impl Fn(usize, Vec<u8>) -> Vec<u8> + Send + 'static,
) -> Between {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, known) = (listener.local_addr().unwrap(), real.known.address);
    let taken = std::thread::spawn(move || {
        (0..drops).for_each(|_| drop(listener.accept().unwrap()));
        let mut ends = [listener.accept().unwrap().0, dial(known)];
        limited(&ends[0]);
        let mut frames = Vec::new();
        while frames.len() < 4 {
            let from = frames.len() % 2;
            let Some(frame) = read_frame(&mut ends[from]) else {
                break;
            };
            if ends[1 - from]
                .write_all(&alter(frames.len(), frame.clone()))
                .is_err()
            {
                break;
            }
            frames.push(frame);
        }
        let [to_sender, to_receiver] = ends;
        Taken {
            to_sender,
            to_receiver,
            frames,
        }
    });
    (
        Handle {
            address,
            ..real.known
        }
        .encode(),
        taken,
    )
}

pub type Between = ([u8; HANDLE_BYTES], JoinHandle<Taken>);

/// Connects through a proxy that changes nothing.
pub fn connect_through_proxy(hosts: &[Arc<Host>; 2]) -> (Ends, Taken) {
    let listener = Listener::open(&hosts[1]);
    let (handle, taken) = proxy(&listener, |_, frame| frame);
    let met = listener.try_by(&hosts[0], handle).unwrap();
    let taken = taken.join().unwrap();
    assert_eq!(taken.frames.len(), 4);
    (met, taken)
}
