//! Tests of token ports: the right connection, wrong tokens, another version, clients without a
//! token.

use super::*;
use crate::ranks::line::GreetingStream;
use std::io::Write;

fn far() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn token_port() -> TokenPort {
    TokenPort::open([127, 0, 0, 1].into()).unwrap()
}

fn refused(address: SocketAddr, hello: &ClientHello) -> String {
    let mut line = GreetingStream::new(TcpStream::connect(address).unwrap(), "the port", far()).unwrap();
    line.send(hello).unwrap();
    match line.receive(CONNECT_TIMEOUT).unwrap() {
        Answer::Refused { reason } => reason,
        Answer::Welcome { .. } => panic!("{hello:?} was admitted"),
    }
}

#[test]
fn a_token_opens_one_connection_and_clients_without_one_block_no_other() {
    let token_port = token_port();
    let (address, token) = (token_port.address, token_port.token.clone());
    let waiting = std::thread::spawn(move || token_port.accept_one(far()));
    let silent = TcpStream::connect(address).unwrap();
    let wrong = Token::new().unwrap();
    for shown in ["", wrong.text(), &token.text()[..31]] {
        let reason = refused(address, &ClientHello { protocol: PROTOCOL, token: shown.to_owned() });
        assert!(reason.starts_with("the token is wrong"), "{reason}");
    }
    let reason = refused(address, &ClientHello { protocol: PROTOCOL + 1, token: token.text().to_owned() });
    assert!(reason.contains("version 2") && reason.contains("the other one 3"), "{reason}");
    let mut noise = TcpStream::connect(address).unwrap();
    noise.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let connected = connect(&[address], "the port", &token, far()).unwrap();
    let admitted = waiting.join().unwrap().unwrap();
    GreetingStream::new(admitted, "the other", far()).unwrap().send(&7).unwrap();
    assert_eq!(GreetingStream::new(connected, "the port", far()).unwrap().receive::<u8>(CONNECT_TIMEOUT).unwrap(), 7);
    // The port is closed.
    let error = format!("{:#}", connect(&[address], "the port", &token, far()).unwrap_err());
    assert!(error.starts_with(&format!("connect to the port: {address}: ")), "{error}");
    drop(silent);
}

#[test]
fn a_listener_without_clients_closes_at_its_limit() {
    let token_port = token_port();
    let expected = format!("no doctor connected to {} in time", token_port.address);
    assert_eq!(token_port.accept_one(Instant::now() + Duration::from_millis(50)).unwrap_err().to_string(), expected);
}

#[test]
fn unknown_clients_do_not_block_the_port() {
    let token_port = token_port();
    let (address, token) = (token_port.address, token_port.token.clone());
    let waiting = std::thread::spawn(move || token_port.accept_one(far()));
    let dial = || GreetingStream::new(TcpStream::connect(address).unwrap(), "the port", far()).unwrap();
    let mut unauthenticated: Vec<GreetingStream> = (0..MAX_UNAUTHENTICATED + 8).map(|_| dial()).collect();
    // The first clients have 5 s for a message. Connections above the limit are closed immediately.
    let begin = Instant::now();
    assert!(unauthenticated.last_mut().unwrap().receive::<u8>(CONNECT_TIMEOUT * 6).is_err());
    assert!(begin.elapsed() < CONNECT_TIMEOUT * 6);
    drop(unauthenticated);
    let until = far();
    while connect(&[address], "the port", &token, far()).is_err() {
        assert!(Instant::now() < until, "there is no room");
        std::thread::sleep(Duration::from_millis(10));
    }
    waiting.join().unwrap().unwrap();
}

#[test]
fn a_token_equals_only_itself() {
    let (one, other) = (Token::new().unwrap(), Token::new().unwrap());
    assert!(one.is(one.text()) && !one.is(other.text()) && !one.is("") && !one.is(&one.text()[..31]));
    assert_eq!(Token::parse(&format!(" {}\n", one.text())), Ok(one.clone()));
    assert!(Token::parse("secret").is_err() && Token::parse(&"g".repeat(32)).is_err());
    assert_eq!(format!("{one:?}"), "Token(..)");
}
