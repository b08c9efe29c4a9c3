//! Tests of doors: the right connection, wrong tokens, another version, clients without a token.

use super::*;
use crate::ranks::line::Line;
use std::io::Write;

fn far() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn door() -> Door {
    Door::open([127, 0, 0, 1].into()).unwrap()
}

fn refused(address: SocketAddr, opening: &Opening) -> String {
    let mut line = Line::new(TcpStream::connect(address).unwrap(), "the door", far()).unwrap();
    line.send(opening).unwrap();
    match line.receive(OPENING).unwrap() {
        Answer::Refused { reason } => reason,
        Answer::Welcome { .. } => panic!("{opening:?} was admitted"),
    }
}

#[test]
fn a_token_opens_one_connection_and_clients_without_one_block_no_other() {
    let door = door();
    let (address, token) = (door.address, door.token.clone());
    let waiting = std::thread::spawn(move || door.admit(far()));
    let silent = TcpStream::connect(address).unwrap();
    let wrong = Token::new().unwrap();
    for shown in ["", wrong.text(), &token.text()[..31]] {
        let reason = refused(address, &Opening { protocol: PROTOCOL, token: shown.to_owned() });
        assert!(reason.starts_with("the token is wrong"), "{reason}");
    }
    let reason = refused(address, &Opening { protocol: PROTOCOL + 1, token: token.text().to_owned() });
    assert!(reason.contains("version 2") && reason.contains("the other one 3"), "{reason}");
    let mut noise = TcpStream::connect(address).unwrap();
    noise.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let entered = enter(&[address], "the door", &token, far()).unwrap();
    let admitted = waiting.join().unwrap().unwrap();
    Line::new(admitted, "the other", far()).unwrap().send(&7).unwrap();
    assert_eq!(Line::new(entered, "the door", far()).unwrap().receive::<u8>(OPENING).unwrap(), 7);
    // The port is closed.
    let error = format!("{:#}", enter(&[address], "the door", &token, far()).unwrap_err());
    assert!(error.starts_with(&format!("connect to the door: {address}: ")), "{error}");
    drop(silent);
}

#[test]
fn a_listener_without_clients_closes_at_its_limit() {
    let door = door();
    let expected = format!("nobody connected to {} in time", door.address);
    assert_eq!(door.admit(Instant::now() + Duration::from_millis(50)).unwrap_err().to_string(), expected);
}

#[test]
fn unknown_clients_do_not_block_the_port() {
    let door = door();
    let (address, token) = (door.address, door.token.clone());
    let waiting = std::thread::spawn(move || door.admit(far()));
    let dial = || Line::new(TcpStream::connect(address).unwrap(), "the door", far()).unwrap();
    let mut strangers: Vec<Line> = (0..MAX_UNAUTHENTICATED + 8).map(|_| dial()).collect();
    // The first clients have 5 s for a message. Connections above the limit are closed immediately.
    let begin = Instant::now();
    assert!(strangers.last_mut().unwrap().receive::<u8>(OPENING * 6).is_err());
    assert!(begin.elapsed() < OPENING * 6);
    drop(strangers);
    let until = far();
    while enter(&[address], "the door", &token, far()).is_err() {
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
