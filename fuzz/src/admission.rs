//! Fuzzes the bootstrap port as an unauthenticated client could: the target runs the real listener
//! and framing over TCP on the loopback.
//!
//! The input is a flag, then pieces; each piece is a length and bytes. The client writes the pieces
//! one by one and then closes its side. If the flag is set, the target writes the listener's own
//! token to the place where a HELLO has its token: a client can know everything else without
//! authentication, but the fuzzer cannot guess the token. The listener's host has no rails, and the
//! host's tuner is off. So for a client with the token, the listener returns an error about the
//! tuner, TCP or rails. Every other client gets no answer.

use crate::tape::Tape;
use crate::target::Seeds;
use crate::{handshake, memory};
use host::config::Config;
use nccl_net_spark::comm::process::TunerIdentity;
use nccl_net_spark::comm::{Host, ListenComm};
use proto::wire::PROTOCOL_VERSION;
use proto::wire::codec::Writer;
use proto::wire::control::ControlFrame;
use proto::wire::handle::Handle;
use proto::wire::message::{ByTcp, HEADER_BYTES, Header, Hello, Message};
use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

/// Hash of the listener's tuner, which is off.
const TUNER_HASH: u64 = 0;

/// Maximum number of clients of one listener. The listener fails if no peer is admitted within an
/// hour, so a new listener replaces it after this number of clients, which take less time.
const MAX_CLIENTS: u32 = 1000;

thread_local! {
    static BOOTSTRAP: RefCell<Option<(Bootstrap, u32)>> = const { RefCell::new(None) };
}

struct Bootstrap {
    listener: ListenComm,
    handle: Handle,
}

impl Bootstrap {
    fn new() -> Self {
        let variables = [
            ("NCCL_SOCKET_IFNAME", "=lo"),
            ("NCCL_SPARK_CONNECT_TIMEOUT_S", "3600"),
        ];
        let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let config = Config::from_variables(&variables).expect("settings");
        let host = Arc::new(Host::new(
            config,
            Vec::new(),
            TunerIdentity {
                hash: TUNER_HASH,
                gpu: "NVIDIA GB10".to_owned(),
            },
        ));
        let (listener, handle) = host.listen().expect("a listener on the loopback");
        Self {
            listener,
            handle: Handle::decode(&handle).expect("its handle"),
        }
    }
}

/// Runs one client. Returns true if it was admitted.
pub fn check(data: &[u8]) -> bool {
    BOOTSTRAP.with_borrow_mut(|slot| {
        let (bootstrap, clients) = slot.get_or_insert_with(|| (Bootstrap::new(), 0));
        let is_admitted = serve(bootstrap, data);
        *clients += 1;
        // A listener takes one peer only, so it is replaced after it has admitted a client.
        if is_admitted || *clients >= MAX_CLIENTS {
            *slot = None;
        }
        is_admitted
    })
}

fn serve(bootstrap: &Bootstrap, data: &[u8]) -> bool {
    let mut tape = Tape::new(data);
    let has_token = tape.u8() & 1 == 1;
    let mut pieces = Vec::new();
    while let Some(length) = tape.step() {
        let length = if length == u8::MAX {
            usize::from(tape.u16())
        } else {
            usize::from(length)
        };
        pieces.push(tape.bytes(length));
    }
    let lengths: Vec<usize> = pieces.iter().map(|piece| piece.len()).collect();
    let mut sent = pieces.concat();
    if has_token
        && let Some(place) = sent.get_mut(HEADER_BYTES..HEADER_BYTES + bootstrap.handle.token.len())
    {
        place.copy_from_slice(&bootstrap.handle.token);
    }
    let refusal = refusal(bootstrap, &sent);
    let is_admitted = refusal.is_some();
    // The few bytes of a client without the token must not cause a large allocation.
    let poll_listener = |bootstrap| {
        if is_admitted {
            poll_listener(bootstrap)
        } else {
            memory::bounded(sent.len() + 64, || poll_listener(bootstrap))
        }
    };
    let mut client = TcpStream::connect(bootstrap.handle.address).expect("the port is open");
    client.set_nodelay(true).expect("TCP_NODELAY is set");
    let mut error = None;
    let mut rest = &sent[..];
    for length in lengths {
        let (piece, remaining) = rest.split_at(length);
        rest = remaining;
        // The listener may have dropped the client already.
        if client.write_all(piece).is_err() {
            break;
        }
        error = error.or(poll_listener(bootstrap));
    }
    // Fails if the listener has already dropped the client.
    _ = client.shutdown(std::net::Shutdown::Write);
    client.set_nonblocking(true).expect("the client's socket");
    while error.is_none() && !is_gone(&mut client) {
        error = poll_listener(bootstrap);
    }
    match (&error, refusal) {
        (Some(error), Some(refusal)) => assert!(error.contains(refusal), "{error}"),
        (None, None) => {}
        _ => panic!("expected the error {refusal:?}; the listener returned {error:?}"),
    }
    is_admitted
}

/// Polls the listener as NCCL does. Returns the listener's error, if any. Only a client with the
/// token may cause an error.
fn poll_listener(bootstrap: &Bootstrap) -> Option<String> {
    match bootstrap.listener.accept() {
        Ok(None) => None,
        Ok(Some(_)) => panic!("a connection was accepted although the host has no rails"),
        Err(error) => Some(error.to_string()),
    }
}

/// Returns true if the listener has closed the connection, as it must for a client without the
/// token.
fn is_gone(client: &mut TcpStream) -> bool {
    let mut answer = [0; 4096];
    match client.read(&mut answer) {
        Ok(0) => true,
        Ok(_) => false,
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    }
}

/// Returns text that the listener's error must contain, or `None` if the listener must return no
/// error. Only a client whose first message is a HELLO with the token causes an error.
fn refusal(bootstrap: &Bootstrap, sent: &[u8]) -> Option<&'static str> {
    let (header, body) = sent.split_first_chunk::<HEADER_BYTES>()?;
    let header = Header::decode(*header).ok()?;
    let body = body.get(..header.body_bytes)?;
    let Ok(Message::Hello(hello)) = Message::decode(header, body) else {
        return None;
    };
    if hello.token != bootstrap.handle.token {
        return None;
    }
    Some(match hello.by_tcp {
        ByTcp::Off if hello.tuner_hash == TUNER_HASH => "no rail",
        ByTcp::Off => "so collectives would hang",
        ByTcp::Allowed | ByTcp::Withheld(_) => "NCCL_SPARK_RING_TCP=1 is set on",
    })
}

/// Inputs of clients with the token (in one piece or many), and of clients without the token.
pub fn seeds() -> Seeds {
    let hello = Message::Hello(handshake::hello([0; 16], Vec::new())).encode();
    let frame = Message::Control(ControlFrame {
        number: 1,
        received: 0,
        awaits_confirmation: true,
        message: vec![7],
    })
    .encode();
    let mut at_once = Writer::default();
    at_once.u8(1).u8(hello.len() as u8).bytes(&hello);
    let mut by_bytes = Writer::default();
    by_bytes.u8(1);
    hello.iter().for_each(|byte| _ = by_bytes.u8(1).u8(*byte));
    let mut with_more = Writer::default();
    let hello_and_frame = [&hello[..], &frame].concat();
    with_more
        .u8(1)
        .u8(hello_and_frame.len() as u8)
        .bytes(&hello_and_frame)
        .u8(3)
        .bytes(b"and");
    let mut large_length = Writer::default();
    let large = [0x50, 0x53, 1, PROTOCOL_VERSION as u8, 0, 0x80, 0, 0];
    large_length
        .u8(1)
        .u8(8)
        .bytes(&large)
        .u8(255)
        .u16(2000)
        .bytes(&[1; 2000]);
    let other_tuner = Hello {
        tuner_hash: TUNER_HASH + 1,
        ..handshake::hello([0; 16], Vec::new())
    };
    let other_tuner = Message::Hello(other_tuner).encode();
    let mut with_other_tuner = Writer::default();
    with_other_tuner
        .u8(1)
        .u8(other_tuner.len() as u8)
        .bytes(&other_tuner);
    let by_tcp = Hello {
        by_tcp: ByTcp::Allowed,
        ..handshake::hello([0; 16], Vec::new())
    };
    let by_tcp = Message::Hello(by_tcp).encode();
    let mut that_wants_tcp = Writer::default();
    that_wants_tcp.u8(1).u8(by_tcp.len() as u8).bytes(&by_tcp);
    vec![
        ("that-wants-tcp", that_wants_tcp.into_bytes()),
        ("at-once", at_once.into_bytes()),
        ("byte-by-byte", by_bytes.into_bytes()),
        ("with-another-tuner", with_other_tuner.into_bytes()),
        ("frame-after-hello", with_more.into_bytes()),
        ("refused-incomplete-body", large_length.into_bytes()),
        (
            "refused-without-token",
            [&[0, hello.len() as u8][..], &hello].concat(),
        ),
        (
            "refused-web-browser",
            [&[0, 18][..], b"GET / HTTP/1.1\r\n\r\n"].concat(),
        ),
    ]
}
