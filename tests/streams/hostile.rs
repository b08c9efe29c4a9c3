//! Peers that have the right token, and then violate the protocol of TCP streams. Each invalid
//! frame ends the connection with an error that names the fault. Nothing outside the receive's
//! buffer is written.

use crate::bed::{Buffer, FAR, NEAR, RING_TCP, host, irecv, receive_error, sizes};
use crate::common::comms::{Receiving, Sending};
use crate::common::{LIMIT, fill, is_filled, until};
use host::error::Error;
use nccl_net_spark::comm::{Host, RecvComm, RecvPart, SendComm};
use proto::wire::fields::Priority;
use proto::wire::handle::Handle;
use proto::wire::message::{ByTcp, Header, Hello, Message, Stream, Streams};
use proto::wire::stream::{Data, FRAME_BYTES, StreamFrame, StreamGrant};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;

fn limited(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.set_write_timeout(Some(LIMIT)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

fn dial(address: SocketAddr) -> TcpStream {
    limited(TcpStream::connect(address).unwrap())
}

fn send_message(stream: &mut TcpStream, message: &Message) {
    stream.write_all(&message.encode()).unwrap();
}

fn receive_message(stream: &mut TcpStream) -> Message {
    let mut header = [0; 8];
    stream.read_exact(&mut header).unwrap();
    let header = Header::decode(header).unwrap();
    let mut body = vec![0; header.body_bytes];
    stream.read_exact(&mut body).unwrap();
    Message::decode(header, &body).unwrap()
}

fn hello(token: [u8; 16], host: &Host) -> Hello {
    Hello {
        token,
        name: "liar:1".to_owned(),
        chunk_bytes: 1 << 20,
        qps_per_rail: 0,
        tuner_hash: host.process().tuner.hash,
        gpu: String::new(),
        priority: Priority::default(),
        by_tcp: ByTcp::Allowed,
        rails: Vec::new(),
    }
}

/// Returns a real receiver, and the streams of the false sender that is connected to it.
fn lying_sender() -> (RecvComm, Vec<TcpStream>) {
    let host = host(FAR, &[RING_TCP]);
    let (listener, handle) = host.listen().unwrap();
    let Handle { address, token } = Handle::decode(&handle).unwrap();
    let hello = hello(token, &host);
    let liar = std::thread::spawn(move || {
        let mut first = dial(address);
        send_message(&mut first, &Message::Hello(hello));
        let Message::Streams(Streams { count, token, .. }) = receive_message(&mut first) else {
            panic!("no STREAMS")
        };
        // A client without the token gets no further.
        let mut stranger = dial(address);
        send_message(
            &mut stranger,
            &Message::Stream(Stream {
                token: [0; 16],
                number: 1,
            }),
        );
        assert_eq!(
            stranger.read(&mut [0; 8]).unwrap(),
            0,
            "the listener accepted a stream without the token"
        );
        let mut streams = vec![first];
        for number in 1..count {
            let mut stream = dial(address);
            send_message(&mut stream, &Message::Stream(Stream { token, number }));
            streams.push(stream);
        }
        assert_eq!(receive_message(&mut streams[0]), Message::Carries);
        streams
    });
    let recv = until(|| listener.accept().unwrap());
    (recv, liar.join().unwrap())
}

/// Returns a real sender, and the streams of the false receiver that is connected to it.
fn lying_receiver(count: u8) -> (SendComm, Vec<TcpStream>) {
    dropping_receiver(count, 0)
}

/// Does the same as [`lying_receiver`], but closes the first `drops` streams without reading them.
fn dropping_receiver(count: u8, drops: usize) -> (SendComm, Vec<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut handle = Handle {
        address: listener.local_addr().unwrap(),
        token: [1; 16],
    }
    .encode();
    let liar = std::thread::spawn(move || {
        let mut first = limited(listener.accept().unwrap().0);
        assert!(
            matches!(receive_message(&mut first), Message::Hello(hello) if hello.by_tcp == ByTcp::Allowed)
        );
        send_message(
            &mut first,
            &Message::Streams(Streams {
                name: "liar:2".into(),
                count,
                token: [2; 16],
            }),
        );
        (0..drops).for_each(|_| drop(listener.accept().unwrap()));
        let mut streams: Vec<Option<TcpStream>> = (0..count).map(|_| None).collect();
        while streams.iter().skip(1).any(Option::is_none) {
            let mut stream = limited(listener.accept().unwrap().0);
            let Message::Stream(Stream {
                token: [2, ..],
                number,
            }) = receive_message(&mut stream)
            else {
                panic!("no STREAM")
            };
            streams[usize::from(number)] = Some(stream);
        }
        send_message(&mut first, &Message::Carries);
        streams[0] = Some(first);
        streams.into_iter().map(Option::unwrap).collect()
    });
    let host = host(NEAR, &[RING_TCP]);
    let send = until(|| host.connect(&mut handle, None).unwrap());
    (send, liar.join().unwrap())
}

const VALID_DATA: Data = Data {
    sequence: 0,
    part: 0,
    offset: 0,
    bytes: 128,
    total: 300,
};

fn data(data: Data) -> Vec<u8> {
    [
        &StreamFrame::Data(data).encode()[..],
        &vec![7; data.bytes as usize],
    ]
    .concat()
}

#[test]
fn an_invalid_frame_of_a_sender_fails_the_receive_and_writes_nothing_outside_it() {
    for (expected, bytes) in invalid_frames().into_iter().chain(misplaced_chunks()) {
        for stream in [0, 3] {
            check_that_the_receive_fails(stream, &bytes, expected);
        }
    }
}

/// Returns frames that no sender may send, each with a part of the error's text.
fn invalid_frames() -> Vec<(&'static str, Vec<u8>)> {
    let grant = StreamFrame::Grant(StreamGrant {
        sequence: 0,
        part: 0,
        parts: 1,
        tag: 0,
        buffer_bytes: 8,
    });
    let mut oversized = StreamFrame::Data(Data {
        bytes: 300,
        ..VALID_DATA
    })
    .encode();
    oversized[4..8].copy_from_slice(&301_u32.to_le_bytes());
    vec![
        ("invalid mark of a stream's frame", vec![0xff; 64]),
        ("invalid chunk size", oversized.to_vec()),
        ("a grant frame from the sender", grant.encode().to_vec()),
        (
            "a frame after its BYE",
            [StreamFrame::Bye.encode().to_vec(), data(VALID_DATA)].concat(),
        ),
    ]
}

/// Returns chunks that do not belong to the receive in [`check_that_the_receive_fails`], or that
/// contradict each other. Each has a part of the error's text.
fn misplaced_chunks() -> Vec<(&'static str, Vec<u8>)> {
    let another_receive = Data {
        sequence: 1,
        ..VALID_DATA
    };
    let last_receive = Data {
        sequence: u64::MAX,
        ..VALID_DATA
    };
    let another_part = Data {
        part: 3,
        ..VALID_DATA
    };
    let too_long = Data {
        total: 1001,
        ..VALID_DATA
    };
    let another_total = Data {
        total: 301,
        ..VALID_DATA
    };
    vec![
        (
            "bytes for part 0 of receive 1, which expects none",
            data(another_receive),
        ),
        (
            "bytes for part 0 of receive 18446744073709551615",
            data(last_receive),
        ),
        ("bytes for part 3 of receive 0", data(another_part)),
        (
            "message of 1001 bytes for a receive of 1000",
            data(too_long),
        ),
        (
            "chunks of one message disagree: 300 and 301 bytes",
            [data(VALID_DATA), data(another_total)].concat(),
        ),
        (
            "384 bytes of a message of 300 bytes",
            data(VALID_DATA).repeat(3),
        ),
    ]
}

/// Sends `bytes` on a stream to a receive of 1000 bytes, which must fail with the `expected` error.
fn check_that_the_receive_fails(stream: usize, bytes: &[u8], expected: &str) {
    let (recv, mut streams) = lying_sender();
    let to = Buffer::blank(3000);
    let into = recv.register(to.memory()).unwrap();
    let part = RecvPart {
        addr: to.addr() + 1000,
        bytes: 1000,
        tag: 0,
        memory: &into,
    };
    let receive = until(|| recv.irecv(&[part], false).unwrap());
    streams[stream].write_all(bytes).unwrap();
    let error = receive_error(&recv, receive);
    let text = error.to_string();
    assert!(
        matches!(error, Error::Protocol(_)) && text.contains(expected),
        "{expected}: {text}"
    );
    assert!(text.contains("liar:1"), "{text}");
    drop(recv);
    assert!(
        to.0[..1000]
            .iter()
            .chain(&to.0[1300..])
            .all(|byte| *byte == 0xee),
        "{expected}"
    );
}

#[test]
fn a_lying_receiver_is_refused_with_an_error() {
    let valid = StreamGrant {
        sequence: 0,
        part: 0,
        parts: 1,
        tag: 9,
        buffer_bytes: 8,
    };
    let encode = |grants: &[StreamGrant]| {
        grants
            .iter()
            .flat_map(|grant| StreamFrame::Grant(*grant).encode())
            .collect::<Vec<u8>>()
    };
    let too_many: Vec<StreamGrant> = (0..33)
        .map(|sequence| StreamGrant { sequence, ..valid })
        .collect();
    let first_of_two = StreamGrant { parts: 2, ..valid };
    let cases = [
        ("invalid mark of a stream's frame", vec![0xff; 64]),
        (
            "grant of part 0 of receive 1 out of order",
            encode(&[StreamGrant {
                sequence: 1,
                ..valid
            }]),
        ),
        (
            "grant of part 0 of receive 0 out of order",
            encode(&[valid, valid]),
        ),
        (
            "receive 32 granted, but more receives are outstanding than there are slots",
            encode(&too_many),
        ),
        (
            "invalid group of 3 receives",
            encode(&[
                first_of_two,
                StreamGrant {
                    part: 1,
                    parts: 3,
                    ..valid
                },
            ]),
        ),
        ("a data frame sent to the sender", data(VALID_DATA)),
        (
            "a frame after its BYE",
            [StreamFrame::Bye.encode().to_vec(), encode(&[valid])].concat(),
        ),
    ];
    for (expected, bytes) in cases {
        let (send, mut streams) = lying_receiver(3);
        let from = Buffer::filled(100, 1);
        let out = send.register(from.memory()).unwrap();
        streams[0].write_all(&bytes).unwrap();
        let error = *until(|| send.isend(from.addr(), 1, 0, &out).err());
        let text = error.to_string();
        assert!(
            matches!(error, Error::Protocol(_)) && text.contains(expected),
            "{expected}: {text}"
        );
        assert!(text.contains("liar:2 violated the protocol"), "{text}");
        assert_have_ended(&mut streams);
        drop(send);
    }
}

#[test]
fn valid_frames_arrive_however_they_are_cut_and_over_any_stream() {
    let (recv, mut streams) = lying_sender();
    for is_watched in [false, true] {
        let to = Buffer::blank(5000);
        let total = 3000_usize;
        let into = recv.register(to.memory()).unwrap();
        let part = RecvPart {
            addr: to.addr(),
            bytes: 4000,
            tag: 0,
            memory: &into,
        };
        let receive = until(|| recv.irecv(&[part], is_watched).unwrap());
        let mut message = vec![0; total];
        fill(&mut message, 4);
        let sequence = u64::from(is_watched);
        // Sends the last chunk first, and writes each byte separately.
        for (stream, from, until_byte) in [(3, 2944, 3000), (1, 128, 2944), (2, 0, 128)] {
            let chunk = &message[from..until_byte];
            let bytes = chunk.len() as u32;
            let offset = from as u64;
            let frame = StreamFrame::Data(Data {
                sequence,
                part: 0,
                offset,
                bytes,
                total: total as u64,
            })
            .encode();
            for byte in frame.iter().chain(chunk) {
                streams[stream].write_all(&[*byte]).unwrap();
                if byte.is_multiple_of(16) && from > 0 {
                    assert_eq!(sizes(&recv, receive), None);
                }
            }
        }
        assert_eq!(until(|| sizes(&recv, receive)), [total]);
        assert!(is_filled(&to.0[..total], 4) && to.0[total..].iter().all(|byte| *byte == 0xee));
    }
}

#[test]
fn a_stream_that_ends_early_yields_no_message() {
    let (recv, mut streams) = lying_sender();
    let to = Buffer::blank(1000);
    let into = recv.register(to.memory()).unwrap();
    let receive = irecv(&recv, &to, 1000, 0, &into);
    streams[1].write_all(&data(VALID_DATA)).unwrap();
    streams[2]
        .write_all(
            &data(Data {
                offset: 128,
                bytes: 100,
                ..VALID_DATA
            })[..FRAME_BYTES + 50],
        )
        .unwrap();
    drop(streams.remove(2));
    let error = receive_error(&recv, receive);
    let text = error.to_string();
    assert!(
        matches!(error, Error::PeerGone(_))
            && text.contains("stream 2")
            && text.contains("over lo"),
        "{text}"
    );
    assert_have_ended(&mut streams);
    drop(recv);
}

/// Checks that the plugin ended each stream after a failure, before its caller closed the
/// connection.
fn assert_have_ended(streams: &mut [TcpStream]) {
    for stream in streams {
        // Grants may come before the end. A reset counts as an end; a time-out does not.
        let end = stream.read_to_end(&mut Vec::new());
        let has_ended = end
            .as_ref()
            .map_or_else(|why| why.kind() == ErrorKind::ConnectionReset, |_| true);
        assert!(has_ended, "{end:?}");
    }
}

#[test]
fn a_stream_dropped_before_it_was_read_is_dialled_again() {
    for drops in 1..6 {
        let (send, streams) = dropping_receiver(4, drops);
        assert_eq!(streams.len(), 4);
        send.close();
    }
}

#[test]
fn a_single_stream_works_and_a_missing_stream_is_an_error() {
    let (send, mut streams) = lying_receiver(1);
    let from = Buffer::filled(300_000, 6);
    let out = send.register(from.memory()).unwrap();
    let grant = StreamFrame::Grant(StreamGrant {
        sequence: 0,
        part: 0,
        parts: 1,
        tag: 0,
        buffer_bytes: 300_000,
    });
    streams[0].write_all(&grant.encode()).unwrap();
    let request = until(|| send.isend(from.addr(), 300_000, 0, &out).unwrap());
    let reader = std::thread::spawn(move || {
        let mut message = vec![0; 300_000];
        let mut came = 0;
        while came < message.len() {
            let mut frame = [0; FRAME_BYTES];
            streams[0].read_exact(&mut frame).unwrap();
            let Ok(StreamFrame::Data(Data {
                offset,
                bytes,
                total: 300_000,
                ..
            })) = StreamFrame::decode(&frame)
            else {
                panic!()
            };
            let at = offset as usize;
            streams[0]
                .read_exact(&mut message[at..at + bytes as usize])
                .unwrap();
            came += bytes as usize;
        }
        message
    });
    until(|| send.test(request).unwrap());
    assert!(reader.join().unwrap() == from.0);

    let host: Arc<Host> = host(NEAR, &[RING_TCP]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut handle = Handle {
        address: listener.local_addr().unwrap(),
        token: [1; 16],
    }
    .encode();
    let liar = std::thread::spawn(move || {
        let mut first = limited(listener.accept().unwrap().0);
        receive_message(&mut first);
        send_message(
            &mut first,
            &Message::Streams(Streams {
                name: "liar:3".into(),
                count: 2,
                token: [2; 16],
            }),
        );
        // The second stream is never accepted, and its port is closed.
        drop(listener);
        send_message(&mut first, &Message::Carries);
        first
    });
    let error = until(|| host.connect(&mut handle, None).err());
    let text = error.to_string();
    assert!(
        text.contains("uses streams that are not open") || text.contains("cannot reach the peer"),
        "{text}"
    );
    drop(liar.join().unwrap());
}
