//! The bootstrap port as a stranger finds it: the real listener and the real framing, over the loopback's TCP.
//!
//! Input: a tape of pieces, each a length and bytes, that the stranger writes one by one before it closes its side. A byte at the
//! front says whether the door's own token goes in where a hello's would be: all else a stranger can send, that it cannot.
//! The listener's host has no rails, so that an invited peer is told so, in an error, and everybody else in silence.

use crate::tape::Tape;
use crate::{Seeds, handshake, memory};
use nccl_net_spark::comm::{Host, ListenComm, listen};
use nccl_net_spark::config::Config;
use nccl_net_spark::wire::PROTOCOL_VERSION;
use nccl_net_spark::wire::codec::Writer;
use nccl_net_spark::wire::control::Letter;
use nccl_net_spark::wire::handle::Handle;
use nccl_net_spark::wire::message::{HEADER_BYTES, Header, Message};
use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

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
        let host = Arc::new(Host::new(config, Vec::new(), 0));
        let (listener, handle) = listen::listen(&host).expect("a listener on the loopback");
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
    let is_invited = is_invited(door, &said);
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
    match (&told, is_invited) {
        (Some(error), true) => assert!(error.contains("no rail"), "{error}"),
        (None, false) => {}
        _ => panic!("invited: {is_invited}; the door says {told:?}"),
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

/// Whether the first message is whole, and a hello with the token.
fn is_invited(door: &Door, said: &[u8]) -> bool {
    let Some((header, body)) = said.split_first_chunk::<HEADER_BYTES>() else { return false };
    let Ok(header) = Header::decode(*header) else { return false };
    let Some(body) = body.get(..header.body_bytes) else { return false };
    matches!(Message::decode(header, body), Ok(Message::Hello(hello)) if hello.token == door.handle.token)
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
    vec![
        ("at-once", at_once.into_bytes()),
        ("byte-by-byte", by_bytes.into_bytes()),
        ("with-more-behind", with_more.into_bytes()),
        ("stranger-half-of-the-largest", announced.into_bytes()),
        ("stranger-without-token", [&[0, hello.len() as u8][..], &hello].concat()),
        ("stranger-web-browser", [&[0, 18][..], b"GET / HTTP/1.1\r\n\r\n"].concat()),
    ]
}
