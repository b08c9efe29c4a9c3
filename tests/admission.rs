//! Attacks over loopback, while honest peers connect and transfer data, of which every byte is
//! compared. The attacks are on the bootstrap port (where a listener accepts handshakes) and on the
//! control channel (the handshake's TCP connection, which later carries control messages).
//! `tests/lies.rs` covers the false data that an admitted peer writes to memory or posts on its
//! queue pairs.
//!
//! The tests run one at a time, because they measure descriptors and memory of the whole process.

#![allow(unsafe_code)]

#[path = "admission/abandoned.rs"]
mod abandoned;
mod attack;
mod common;
#[path = "admission/path_mtu.rs"]
mod path_mtu;
#[path = "admission/starved.rs"]
mod starved;
#[path = "admission/tuners.rs"]
mod tuners;

use attack::{
    HEADER_BYTES, Listener, TOKEN, Taken, connect_through_proxy, dial, host, proxy,
    proxy_after_drops, read_frame,
};
use common::ends::{CHECKED, Ends};
use common::{turn, until};
use host::error::Error;
use proto::wire::PROTOCOL_VERSION;
use proto::wire::control::{ControlFrame, ControlMessage, JoinAnswer, Received};
use proto::wire::ids::LaneId;
use proto::wire::message::Message;
use socket2::{Domain, SockRef, Socket, Type};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Returns the frames of an honest peer's handshake with another listener, whose token is not valid
/// here.
fn old_handshake() -> Vec<Vec<u8>> {
    let hosts = [host(0), host(1)];
    let (met, taken) = connect_through_proxy(&hosts);
    met.check(1);
    taken.frames
}

fn hello_for(old: &[u8], listener: &Listener) -> Vec<u8> {
    let mut frame = old.to_vec();
    frame[TOKEN].copy_from_slice(&listener.known.token);
    frame
}

fn with_length(frame: &[u8], body_bytes: u32) -> Vec<u8> {
    let mut frame = frame.to_vec();
    frame[4..8].copy_from_slice(&body_bytes.to_le_bytes());
    frame
}

fn nonsense(old: &[Vec<u8>], listener: &Listener) -> Vec<Vec<u8>> {
    let hello = hello_for(&old[0], listener);
    let mut all: Vec<Vec<u8>> = vec![
        Vec::new(),
        b"GET / HTTP/1.1\r\nHost: spark\r\n\r\n".to_vec(),
        vec![0; 4096],
        vec![0xff; 100_000],
        // Replays from an earlier connection.
        old[0].clone(),
        old.concat(),
        old[1].clone(),
        old[2].clone(),
        old[3].clone(),
        Message::Control(ControlFrame {
            number: 1,
            received: 0,
            awaits_confirmation: true,
            message: ControlMessage::Bye { delivered: 0 }.encode(),
        })
        .encode(),
        Message::Refuse("no".repeat(1000)).encode(),
        // Wrong length fields. The limit is 32 KiB.
        with_length(&hello, u32::MAX),
        with_length(&hello, i32::MAX as u32),
        with_length(&hello, 32 * 1024 + 1),
        with_length(&hello[..HEADER_BYTES], 32 * 1024),
        with_length(&hello, 20),
        with_length(&hello, 0),
    ];
    for at in [0, 1, 2, 3] {
        let mut other = hello.clone();
        other[at] = other[at].wrapping_add(1);
        all.push(other);
    }
    let mut close = hello;
    close[TOKEN.end - 1] ^= 1;
    all.push(close);
    all
}

#[test]
fn unauthenticated_clients_do_not_keep_an_honest_peer_out() {
    let _turn = turn();
    let old = old_handshake();
    let hosts = [host(0), host(1)];
    let listener = Listener::open(&hosts[1]);
    let mut clients: Vec<TcpStream> = Vec::new();
    for (number, bytes) in nonsense(&old, &listener).into_iter().enumerate() {
        for closes in [false, true] {
            let mut client = dial(listener.known.address);
            // The listener may drop the client meanwhile.
            let _ = client.write_all(&bytes);
            if !closes {
                clients.push(client);
            } else if number % 2 == 0 {
                // Closes with a reset.
                SockRef::from(&client)
                    .set_linger(Some(Duration::ZERO))
                    .unwrap();
            }
            assert!(
                listener.listen.accept().unwrap().is_none(),
                "message {number} was admitted"
            );
        }
    }
    let met = listener.meet(&hosts[0]);
    met.check(2);
    let dropped = clients
        .iter_mut()
        .map(is_over)
        .filter(|is_over| *is_over)
        .count();
    assert!(
        dropped >= 20,
        "only {dropped} of {} were dropped",
        clients.len()
    );
}

fn is_over(stream: &mut TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    match stream.read(&mut [0; 64]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
    }
}

#[test]
fn a_truncated_hello_is_not_admitted() {
    let _turn = turn();
    let old = old_handshake();
    let hosts = [host(0), host(1)];
    let listener = Listener::open(&hosts[1]);
    let hello = hello_for(&old[0], &listener);
    for cut in 0..hello.len() {
        let mut client = dial(listener.known.address);
        client.write_all(&hello[..cut]).unwrap();
        assert!(
            listener.listen.accept().unwrap().is_none(),
            "the first {cut} bytes of {} were admitted",
            hello.len()
        );
    }
    listener.meet(&hosts[0]).check(3);
}

#[test]
fn slow_clients_do_not_delay_an_honest_peer() {
    let _turn = turn();
    let old = old_handshake();
    let hosts = [host(0), host(1)];
    let listener = Listener::open(&hosts[1]);
    let slow = with_length(&hello_for(&old[0], &listener), 30_000);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..20 {
            scope.spawn(|| {
                let mut client = dial(listener.known.address);
                for byte in &slow {
                    if is_over.load(Ordering::Acquire) || client.write_all(&[*byte]).is_err() {
                        return;
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
        }
        let met = listener.meet(&hosts[0]);
        met.check(4);
        is_over.store(true, Ordering::Release);
    });
}

/// Counts the sockets that a listener has accepted and not closed.
fn taken_in(port: u16) -> usize {
    let lines = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let local = format!(":{port:04X}");
    // Each inode once: the kernel may list a socket twice while others open and close.
    let mut inodes = std::collections::BTreeSet::new();
    for fields in lines
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
    {
        // Skips the listener (0A) and sockets without an inode, which are queued or closed.
        if fields.len() > 9 && fields[1].ends_with(&local) && fields[3] != "0A" && fields[9] != "0"
        {
            inodes.insert(fields[9].to_owned());
        }
    }
    inodes.len()
}

/// Opens silent connections from the address `source`. The last 60 stay open.
fn flood(address: SocketAddr, source: [u8; 4], count: &AtomicUsize, is_over: &AtomicBool) {
    let mut held = std::collections::VecDeque::new();
    while !is_over.load(Ordering::Acquire) {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from((source, 0)).into()).unwrap();
        if socket
            .connect_timeout(&address.into(), Duration::from_millis(500))
            .is_ok()
        {
            count.fetch_add(1, Ordering::Relaxed);
            held.push_back(socket);
        }
        if held.len() > 60 {
            held.pop_front();
        }
    }
}

#[test]
fn thousands_of_silent_connections_use_few_descriptors_and_block_no_peer() {
    let _turn = turn();
    let hosts = [host(0), host(1)];
    let mut peak = 0;
    for round in 0..4 {
        let listener = Listener::open(&hosts[1]);
        let count = AtomicUsize::new(0);
        let is_over = AtomicBool::new(false);
        let met = std::thread::scope(|scope| {
            // From the honest peer's address, and from others.
            for source in [[127, 0, 0, 1], [127, 0, 0, 2], [127, 0, 0, 3]] {
                let count = &count;
                let is_over = &is_over;
                let address = listener.known.address;
                scope.spawn(move || flood(address, source, count, is_over));
            }
            let guard = StopOnDrop(&is_over);
            until(|| {
                assert!(listener.listen.accept().unwrap().is_none());
                peak = peak.max(taken_in(listener.known.address.port()));
                (count.load(Ordering::Relaxed) >= 1000).then_some(())
            });
            let met = listener.meet(&hosts[0]);
            peak = peak.max(taken_in(listener.known.address.port()));
            drop(guard);
            met
        });
        met.check(round);
    }
    assert!(
        (30..=66).contains(&peak),
        "{peak} accepted sockets were open at a time"
    );
}

#[test]
fn a_peer_dropped_before_its_first_message_was_read_connects_again() {
    let _turn = turn();
    let hosts = [host(0), host(1)];
    let listener = Listener::open(&hosts[1]);
    let (handle, taken) = proxy_after_drops(&listener, 5, |_, frame| frame);
    let met = listener.try_by(&hosts[0], handle).unwrap();
    met.check(13);
    assert_eq!(taken.join().unwrap().frames.len(), 4);
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[test]
fn a_replayed_hello_is_refused_and_the_honest_peer_continues() {
    let _turn = turn();
    let hosts = [host(0), host(1)];
    let listener = Listener::open(&hosts[1]);
    let real = listener.known.address;
    let listened = std::sync::Arc::new(Mutex::new(Vec::new()));
    let seen = std::sync::Arc::clone(&listened);
    // An eavesdropper replays the honest peer's HELLO as soon as the listener has answered it.
    let (handle, taken) = proxy(&listener, move |place, frame| {
        if place == 0 {
            *seen.lock().unwrap() = frame.clone();
        }
        if place == 1 {
            let hello = seen.lock().unwrap().clone();
            for _ in 0..3 {
                dial(real).write_all(&hello).unwrap();
            }
            let mut stays = dial(real);
            stays.write_all(&hello).unwrap();
            let answer = read_frame(&mut stays).expect("an answer to the replay");
            // Kind 3 is a refusal with its reason.
            assert_eq!(
                answer[2], 3,
                "the replay was answered by a message of kind {}",
                answer[2]
            );
            let words = String::from_utf8_lossy(&answer).into_owned();
            assert!(
                words.contains("was used before") && words.contains("connection was reset"),
                "{words}"
            );
            assert!(read_frame(&mut stays).is_none(), "the replay was let in");
        }
        frame
    });
    let met = listener.try_by(&hosts[0], handle).unwrap();
    met.check(5);
    let taken = taken.join().unwrap();
    let mut late = dial(real);
    late.write_all(&taken.frames[0]).unwrap();
    late.write_all(&taken.frames[2]).unwrap();
    for _ in 0..100 {
        assert!(
            listener.listen.accept().unwrap().is_none(),
            "a replay made a connection"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    met.check(6);
}

#[test]
fn claimed_lengths_allocate_no_memory() {
    let _turn = turn();
    let old = old_handshake();
    let hosts = [host(0), host(1)];
    let listener = Listener::open(&hosts[1]);
    let before = memory_bytes();
    let hello = hello_for(&old[0], &listener);
    let mut clients = Vec::new();
    for claimed in [u32::MAX, 1 << 30, 32 * 1024 + 1, 32 * 1024]
        .into_iter()
        .cycle()
        .take(200)
    {
        let mut client = dial(listener.known.address);
        let _ = client.write_all(&with_length(&hello[..HEADER_BYTES], claimed));
        clients.push(client);
        assert!(listener.listen.accept().unwrap().is_none());
    }
    let met = listener.meet(&hosts[0]);
    met.check(7);
    // The memory for a single claim of 1 GiB would exceed this limit.
    let grown = memory_bytes().saturating_sub(before);
    assert!(grown < 1 << 29, "{grown} bytes more than before");
}

/// Returns the peak size of this process's address space in bytes.
fn memory_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmPeak:"))
        .unwrap();
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<usize>()
        .unwrap()
        * 1024
}

type Falsify = Box<dyn Fn(&mut Vec<u8>) + Send>;

#[test]
fn a_falsified_handshake_message_fails_with_an_error_that_names_the_peer() {
    let _turn = turn();
    let hosts = [host(0), host(1)];
    // Message 0 (HELLO) is left out: a client without a valid HELLO is only an unauthenticated
    // client, and its mistakes fail no connection.
    for place in 1..4_usize {
        let changes: Vec<(&str, Falsify)> = vec![
            ("a wrong kind", Box::new(|frame| frame[2] = 6)),
            ("an unknown kind", Box::new(|frame| frame[2] = 77)),
            (
                "another version",
                Box::new(|frame| frame[3] = frame[3].wrapping_add(1)),
            ),
            ("gigabytes", Box::new(|frame| frame[7] = 0x7f)),
            (
                "a trailing byte",
                Box::new(|frame| {
                    frame.push(0);
                    let body_bytes = (frame.len() - HEADER_BYTES) as u32;
                    frame[4..8].copy_from_slice(&body_bytes.to_le_bytes());
                }),
            ),
            (
                "a byte less",
                Box::new(|frame| {
                    frame.pop();
                    let body_bytes = (frame.len() - HEADER_BYTES) as u32;
                    frame[4..8].copy_from_slice(&body_bytes.to_le_bytes());
                }),
            ),
        ];
        for (what, falsify) in changes {
            let listener = Listener::open(&hosts[1]);
            let (handle, _taken) = proxy(&listener, move |at, mut frame| {
                if at == place {
                    falsify(&mut frame);
                }
                frame
            });
            let Err(error) = listener.try_by(&hosts[0], handle) else {
                panic!("message {place} with {what} was accepted")
            };
            let text = error.to_string();
            assert!(
                text.contains("127.0.0.1:") || text.contains(&format!(":{}", std::process::id())),
                "{what}: {text}"
            );
        }
    }
}

fn send(stream: &mut TcpStream, number: u64, message: Vec<u8>) {
    let frame = ControlFrame {
        number,
        received: 0,
        awaits_confirmation: true,
        message,
    };
    stream.write_all(&Message::Control(frame).encode()).unwrap();
}

/// True if the text has the peer's process id. Both ends are in this process, so it is our own id.
fn names_peer(text: &str) -> bool {
    text.contains(&format!(":{}", std::process::id()))
}

#[test]
fn invalid_control_data_fails_the_connection_with_an_error_that_names_the_peer() {
    let _turn = turn();
    let hosts = [host(0), host(1)];
    let claims = [
        0x50,
        0x53,
        6,
        PROTOCOL_VERSION as u8,
        0xff,
        0xff,
        0xff,
        0x7f,
    ];
    let mut huge = Message::Control(ControlFrame {
        number: 1,
        received: 0,
        awaits_confirmation: true,
        message: vec![6; 2000],
    })
    .encode();
    let at = HEADER_BYTES + 17;
    huge.resize(HEADER_BYTES + 20_000, 0);
    huge[4..8].copy_from_slice(&20_000_u32.to_le_bytes());
    huge[at..at + 2].copy_from_slice(&19_981_u16.to_le_bytes());
    let attacks: [(&[u8], &str); 4] = [
        (b"GET / HTTP/1.1\r\n\r\n", "not a message of this plugin"),
        (&claims, "bytes announced; at most"),
        (&[0x50, 0x53, 6, 99, 0, 0, 0, 0], "uses protocol version 99"),
        (&huge, "message: 19981, at most"),
    ];
    for (bytes, expected_text) in attacks {
        for side in [0, 1] {
            let (met, taken) = connect_through_proxy(&hosts);
            let Taken {
                mut to_sender,
                mut to_receiver,
                ..
            } = taken;
            met.check(8);
            let stream = if side == 0 {
                &mut to_sender
            } else {
                &mut to_receiver
            };
            stream.write_all(bytes).unwrap();
            let error = if side == 0 {
                met.sender_error()
            } else {
                met.receiver_error()
            };
            let Error::Protocol(violation) = &*error else {
                panic!("{error:?}")
            };
            let text = &violation.to_string();
            assert!(text.contains(expected_text) && names_peer(text), "{text}");
        }
    }
}

#[test]
fn meaningless_frames_are_ignored() {
    let _turn = turn();
    let hosts = [host(0), host(1)];
    let (met, mut taken) = connect_through_proxy(&hosts);
    let meaningless = meaningless_messages();
    for stream in [&mut taken.to_sender, &mut taken.to_receiver] {
        // First control messages with numbers far ahead and behind, then messages of the handshake,
        // then meaningless messages with the right numbers.
        let bye = ControlMessage::Bye { delivered: 0 }.encode();
        send(stream, 1 << 40, bye.clone());
        send(stream, 0, bye);
        send(stream, u64::MAX, vec![1; 1000]);
        for frame in &taken.frames {
            stream.write_all(frame).unwrap();
        }
        stream
            .write_all(&Message::Refuse("go away".to_owned()).encode())
            .unwrap();
        for (number, message) in (1..).zip(&meaningless) {
            send(stream, number, message.clone());
            send(stream, number, message.clone());
        }
    }
    for stream in [&mut taken.to_sender, &mut taken.to_receiver] {
        wait_for_acknowledgement(stream, meaningless.len() as u64);
    }
    (0..20).for_each(|round| met.check(round));
}

/// Returns control messages that cannot be decoded, name lanes that the connection may not have, or
/// do not fit its state.
fn meaningless_messages() -> Vec<Vec<u8>> {
    let gid = [0xfe; 16];
    let lane = LaneId::default();
    let not_now = || ControlMessage::NotNow {
        lane,
        attempt: 1,
        why: "what?".to_owned(),
    };
    let fenced = ControlMessage::Fenced {
        lane,
        received: Received::default(),
    };
    // This JOINED has no queue pairs, so it cannot be decoded.
    let joined = ControlMessage::Joined {
        lane,
        attempt: 1,
        answer: JoinAnswer {
            connector_gid: gid,
            acceptor_gid: gid,
            mtu_bytes: 1024,
            end: Default::default(),
            epoch: Default::default(),
        },
    };
    vec![
        Vec::new(),
        vec![200],
        vec![0; 1900],
        vec![6, 1, 2],
        with_lane_number(0, &not_now()),
        with_lane_number(7, &not_now()),
        with_lane_number(99, &not_now()),
        with_lane_number(5, &fenced),
        with_lane_number(200, &ControlMessage::Live { lane }),
        joined.encode(),
        ControlMessage::AreYouThere.encode(),
    ]
}

/// Encodes a message with another lane number than its own.
fn with_lane_number(number: u8, message: &ControlMessage) -> Vec<u8> {
    let mut bytes = message.encode();
    bytes[1] = number;
    bytes
}

/// Reads frames until one acknowledges the control message with this number.
fn wait_for_acknowledgement(stream: &mut TcpStream, number: u64) {
    const ACKNOWLEDGED: Range<usize> = HEADER_BYTES + 8..HEADER_BYTES + 16;
    until(|| {
        let frame = read_frame(stream).expect("the channel is open");
        let acknowledged = u64::from_le_bytes(frame[ACKNOWLEDGED].try_into().unwrap());
        (acknowledged == number).then_some(())
    });
}

#[test]
fn a_false_report_that_working_rails_are_lost_loses_no_bytes() {
    let _turn = turn();
    let hosts = [host(0), host(1)];
    for side in [0, 1] {
        let (met, mut taken) = connect_through_proxy(&hosts);
        met.check(9);
        let stream = if side == 0 {
            &mut taken.to_sender
        } else {
            &mut taken.to_receiver
        };
        let received = Received {
            granted: CHECKED.len() as u64,
            open: Vec::new(),
        };
        let received = if side == 0 {
            received
        } else {
            Received::default()
        };
        send(
            stream,
            1,
            ControlMessage::Fenced {
                lane: LaneId::default(),
                received: received.clone(),
            }
            .encode(),
        );
        let begun = std::time::Instant::now();
        while begun.elapsed() < Duration::from_secs(2) {
            met.check(10);
        }
    }
}

#[test]
fn only_the_first_bye_counts_and_an_impossible_bye_is_a_violation() {
    let _turn = turn();
    let hosts = [host(0), host(1)];
    let (met, mut taken) = connect_through_proxy(&hosts);
    met.check(11);
    let sent = CHECKED.len() as u64;
    send(
        &mut taken.to_sender,
        1,
        ControlMessage::Bye { delivered: 2 }.encode(),
    );
    send(
        &mut taken.to_sender,
        2,
        ControlMessage::Bye { delivered: sent }.encode(),
    );
    send(
        &mut taken.to_receiver,
        1,
        ControlMessage::Bye { delivered: 0 }.encode(),
    );
    send(
        &mut taken.to_receiver,
        2,
        ControlMessage::Bye { delivered: 0 }.encode(),
    );
    for error in [met.sender_error(), met.receiver_error()] {
        assert!(
            matches!(&*error, Error::PeerGone(gone) if names_peer(&gone.to_string())),
            "{error:?}"
        );
    }
    for (side, delivered) in [(0, sent + 1), (0, u64::MAX), (1, 1)] {
        let (met, mut taken): (Ends, Taken) = connect_through_proxy(&hosts);
        met.check(12);
        let stream = if side == 0 {
            &mut taken.to_sender
        } else {
            &mut taken.to_receiver
        };
        send(stream, 1, ControlMessage::Bye { delivered }.encode());
        let error = if side == 0 {
            met.sender_error()
        } else {
            met.receiver_error()
        };
        let Error::Protocol(violation) = &*error else {
            panic!("{error:?}")
        };
        let text = &violation.to_string();
        assert!(
            text.contains("delivered messages, but this side started only") && names_peer(text),
            "{text}"
        );
    }
}
