//! Tests of token ports: the right connection, wrong tokens, another version, clients without a
//! token, and a port that is not the partner's.

use super::*;
use crate::ranks::greeting::{Challenge, ClientHello, Introduction, PROTOCOL};
use crate::ranks::line::GreetingStream;
use crate::ranks::token::{Nonces, Side, nonce};
use std::io::Write;

fn far() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn token_port() -> (TokenPort, SocketAddr, Token) {
    let token = Token::new().unwrap();
    let token_port = TokenPort::open([127, 0, 0, 1].into(), &token).unwrap();
    let address = token_port.address;
    (token_port, address, token)
}

fn dial(address: SocketAddr) -> GreetingStream {
    GreetingStream::new(TcpStream::connect(address).unwrap(), "the port", far()).unwrap()
}

#[track_caller]
fn welcome<T: serde::de::DeserializeOwned>(line: &mut GreetingStream) -> T {
    match line.receive(CONNECT_TIMEOUT).unwrap() {
        Answer::Welcome(welcome) => welcome,
        Answer::Refused { reason } => panic!("refused: {reason}"),
    }
}

#[track_caller]
fn refusal(line: &mut GreetingStream) -> String {
    match line.receive::<Answer<()>>(CONNECT_TIMEOUT).unwrap() {
        Answer::Refused { reason } => reason,
        Answer::Welcome(()) => panic!("admitted"),
    }
}

/// Sends a first message whose proof is made with `token`, and returns the reason of the refusal.
fn shown(address: SocketAddr, token: &Token, side: Side) -> String {
    let mut line = dial(address);
    let nonce = nonce().unwrap();
    line.send(&ClientHello {
        protocol: PROTOCOL,
        nonce: nonce.clone(),
    })
    .unwrap();
    let challenge: Challenge = welcome(&mut line);
    let proof = token.prove(
        side,
        Nonces {
            connecting: &nonce,
            listening: &challenge.nonce,
        },
        "null",
    );
    line.send(&Introduction {
        proof,
        hello: "null".to_owned(),
    })
    .unwrap();
    refusal(&mut line)
}

#[test]
fn a_token_opens_one_connection_and_clients_without_one_block_no_other() {
    let (token_port, address, token) = token_port();
    let waiting = std::thread::spawn(move || token_port.accept_one(far()));
    let silent = TcpStream::connect(address).unwrap();
    let wrong = Token::new().unwrap();
    for reason in [
        shown(address, &wrong, Side::Connecting),
        shown(address, &token, Side::Listening),
    ] {
        assert!(reason.starts_with("the token is wrong"), "{reason}");
    }
    let error = connect(&[address], "the port", &wrong, far())
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("the port is not trusted: the token is wrong"),
        "{error}"
    );
    let mut line = dial(address);
    line.send(&ClientHello {
        protocol: PROTOCOL + 1,
        nonce: String::new(),
    })
    .unwrap();
    let reason = refusal(&mut line);
    assert!(
        reason.contains("version 3") && reason.contains("the other one 4"),
        "{reason}"
    );
    let mut noise = TcpStream::connect(address).unwrap();
    noise.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let connected = connect(&[address], "the port", &token, far()).unwrap();
    let admitted = waiting.join().unwrap().unwrap();
    GreetingStream::new(admitted, "the other", far())
        .unwrap()
        .send(&7)
        .unwrap();
    assert_eq!(
        GreetingStream::new(connected, "the port", far())
            .unwrap()
            .receive::<u8>(CONNECT_TIMEOUT)
            .unwrap(),
        7
    );
    // The port is closed.
    let error = format!(
        "{:#}",
        connect(&[address], "the port", &token, far()).unwrap_err()
    );
    assert!(
        error.starts_with(&format!("connect to the port: {address}: ")),
        "{error}"
    );
    drop(silent);
}

/// The doctor must not send its proof, or a message, to a program that has not proved the token.
#[test]
fn an_impostor_gets_a_random_number_and_no_proof() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let impostor = std::thread::spawn(move || {
        let mut line =
            GreetingStream::new(listener.accept().unwrap().0, "the doctor", far()).unwrap();
        let hello: ClientHello = line.receive(CONNECT_TIMEOUT).unwrap();
        // Returns what it got, as its own proof.
        line.send(&Answer::Welcome(Challenge {
            nonce: hello.nonce.clone(),
            proof: hello.nonce,
        }))
        .unwrap();
        line.receive_next::<serde_json::Value>(CONNECT_TIMEOUT)
            .unwrap_or_default()
    });
    let error = connect(&[address], "the port", &Token::new().unwrap(), far())
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("the port is not trusted: the token is wrong"),
        "{error}"
    );
    assert_eq!(impostor.join().unwrap(), None);
}

#[test]
fn a_listener_without_clients_closes_at_its_limit() {
    let (token_port, address, _) = token_port();
    let expected = format!("no doctor connected to {address} in time");
    assert_eq!(
        token_port
            .accept_one(Instant::now() + Duration::from_millis(50))
            .unwrap_err()
            .to_string(),
        expected
    );
}

#[test]
fn unknown_clients_do_not_block_the_port() {
    let (token_port, address, token) = token_port();
    let waiting = std::thread::spawn(move || token_port.accept_one(far()));
    let mut unauthenticated: Vec<GreetingStream> = (0..MAX_UNAUTHENTICATED + 8)
        .map(|_| dial(address))
        .collect();
    // The first clients have 5 s for a message. Connections above the limit are closed immediately.
    let begin = Instant::now();
    assert!(
        unauthenticated
            .last_mut()
            .unwrap()
            .receive::<u8>(CONNECT_TIMEOUT * 6)
            .is_err()
    );
    assert!(begin.elapsed() < CONNECT_TIMEOUT * 6);
    drop(unauthenticated);
    let until = far();
    while connect(&[address], "the port", &token, far()).is_err() {
        assert!(Instant::now() < until, "there is no room");
        std::thread::sleep(Duration::from_millis(10));
    }
    waiting.join().unwrap().unwrap();
}
