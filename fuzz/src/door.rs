//! The bootstrap port as a stranger finds it: the real listener and the real framing, over the loopback's TCP.
//!
//! Input: a tape of pieces, each a length and bytes, that the stranger writes one by one before it closes its side. A byte at the
//! front says whether the door's own token goes in where a hello's would be: all else a stranger can send, that it cannot.
//! The listener's host has no rails and its tuner is off: an invited peer gets an error about the tuner or about rails, and everybody
//! else gets silence.

use crate::tape::Tape;
use crate::{Seeds, handshake, memory};
use nccl_net_spark::comm::{Host, ListenComm};
use nccl_net_spark::config::Config;
use nccl_net_spark::wire::PROTOCOL_VERSION;
use nccl_net_spark::wire::codec::Writer;
use nccl_net_spark::wire::control::Letter;
use nccl_net_spark::wire::handle::Handle;
use nccl_net_spark::wire::message::{HEADER_BYTES, Header, Hello, Message};
use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

/// What the listener's host decides of collectives: nothing.
const TUNER_HASH: u64 = 0;

/// Inputs for one listener: it waits for its peer for an hour at most.
const MOST_STRANGERS: u32 = 1000;

thread_local! {
    static DOOR: RefCell<Option<(Door, u32)>> = const { RefCell::new(None) };
}

struct Door {
    listener: ListenComm,
    handle: Handle,
}

impl Door {
    fn new() -> Self {
        let variables = [("NCCL_SOCKET_IFNAME", "=lo"), ("NCCL_SPARK_CONNECT_TIMEOUT_S", "3600")];
        let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let config = Config::from_variables(&variables).expect("settings");
        let host = Arc::new(Host::new(config, Vec::new(), TUNER_HASH));
        let (listener, handle) = host.listen().expect("a listener on the loopback");
        Self { listener, handle: Handle::decode(&handle).expect("its handle") }
    }
}

/// A stranger.
pub fn check(data: &[u8]) -> bool {
    DOOR.with_borrow_mut(|slot| {
        let (door, strangers) = slot.get_or_insert_with(|| (Door::new(), 0));
        let is_invited = knock(door, data);
        *strangers += 1;
        // An invited peer that has failed has had its one listener.
        if is_invited || *strangers >= MOST_STRANGERS {
            *slot = None;
        }
        is_invited
    })
}

fn knock(door: &Door, data: &[u8]) -> bool {
    let mut tape = Tape::new(data);
    let knows_the_token = tape.u8() & 1 == 1;
    let mut pieces = Vec::new();
    while let Some(length) = tape.step() {
        let length = if length == u8::MAX { usize::from(tape.u16()) } else { usize::from(length) };
        pieces.push(tape.bytes(length));
    }
    let lengths: Vec<usize> = pieces.iter().map(|piece| piece.len()).collect();
    let mut said = pieces.concat();
    if knows_the_token && let Some(place) = said.get_mut(HEADER_BYTES..HEADER_BYTES + door.handle.token.len()) {
        place.copy_from_slice(&door.handle.token);
    }
    let refusal = refusal(door, &said);
    let is_invited = refusal.is_some();
    // Its few bytes are no reason to make room for many.
    let ask = |door| if is_invited { ask(door) } else { memory::bounded(said.len() + 64, || ask(door)) };
    let mut stranger = TcpStream::connect(door.handle.address).expect("the door is open");
    stranger.set_nodelay(true).expect("small pieces go at once");
    let (mut told, mut rest) = (None, &said[..]);
    for length in lengths {
        let (piece, behind) = rest.split_at(length);
        rest = behind;
        // The door may have closed upon the pieces before.
        if stranger.write_all(piece).is_err() {
            break;
        }
        told = told.or(ask(door));
    }
    // A stranger whom nobody listens to any more cannot close its side.
    _ = stranger.shutdown(std::net::Shutdown::Write);
    stranger.set_nonblocking(true).expect("a socket of ours");
    while told.is_none() && !is_gone(&mut stranger) {
        told = ask(door);
    }
    match (&told, refusal) {
        (Some(error), Some(refusal)) => assert!(error.contains(refusal), "{error}"),
        (None, None) => {}
        _ => panic!("wanted {refusal:?}; the door says {told:?}"),
    }
    is_invited
}

/// What NCCL would be told: strangers must not make it anything.
fn ask(door: &Door) -> Option<String> {
    match door.listener.accept() {
        Ok(None) => None,
        Ok(Some(_)) => panic!("a connection over no rails"),
        Err(error) => Some(error.to_string()),
    }
}

/// Whether the door has closed: to a stranger it says nothing else.
fn is_gone(stranger: &mut TcpStream) -> bool {
    let mut answer = [0; 4096];
    match stranger.read(&mut answer) {
        Ok(0) => true,
        Ok(_) => false,
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    }
}

/// Part of the error that the door owes this stranger: only one whose first message is whole, and a hello with the token, gets any.
fn refusal(door: &Door, said: &[u8]) -> Option<&'static str> {
    let (header, body) = said.split_first_chunk::<HEADER_BYTES>()?;
    let header = Header::decode(*header).ok()?;
    let body = body.get(..header.body_bytes)?;
    let Ok(Message::Hello(hello)) = Message::decode(header, body) else { return None };
    if hello.token != door.handle.token {
        return None;
    }
    Some(if hello.tuner_hash == TUNER_HASH { "no rail" } else { "so collectives would hang" })
}

/// Who is invited, in one piece and in many; and strangers of several kinds, with an invited one behind so that they go somewhere.
pub fn seeds() -> Seeds {
    let hello = Message::Hello(handshake::hello([0; 16], Vec::new())).encode();
    let letter = Message::Letter(Letter { number: 1, heard: 0, asks: true, notice: vec![7] }).encode();
    let mut at_once = Writer::default();
    at_once.u8(1).u8(hello.len() as u8).bytes(&hello);
    let mut by_bytes = Writer::default();
    by_bytes.u8(1);
    hello.iter().for_each(|byte| _ = by_bytes.u8(1).u8(*byte));
    let mut with_more = Writer::default();
    let both = [&hello[..], &letter].concat();
    with_more.u8(1).u8(both.len() as u8).bytes(&both).u8(3).bytes(b"and");
    let mut announced = Writer::default();
    let large = [0x50, 0x53, 1, PROTOCOL_VERSION as u8, 0, 0x80, 0, 0];
    announced.u8(1).u8(8).bytes(&large).u8(255).u16(2000).bytes(&[1; 2000]);
    let other_tuner = Hello { tuner_hash: TUNER_HASH + 1, ..handshake::hello([0; 16], Vec::new()) };
    let other_tuner = Message::Hello(other_tuner).encode();
    let mut with_other_tuner = Writer::default();
    with_other_tuner.u8(1).u8(other_tuner.len() as u8).bytes(&other_tuner);
    vec![
        ("at-once", at_once.into_bytes()),
        ("byte-by-byte", by_bytes.into_bytes()),
        ("with-another-tuner", with_other_tuner.into_bytes()),
        ("with-more-behind", with_more.into_bytes()),
        ("stranger-half-of-the-largest", announced.into_bytes()),
        ("stranger-without-token", [&[0, hello.len() as u8][..], &hello].concat()),
        ("stranger-web-browser", [&[0, 18][..], b"GET / HTTP/1.1\r\n\r\n"].concat()),
    ]
}
