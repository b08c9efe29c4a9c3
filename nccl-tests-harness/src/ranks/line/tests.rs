//! Messages that come whole, in part, malformed, too late or not at all.

use super::*;
use std::net::TcpListener;

fn pair(end: Duration) -> (GreetingStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (other, _) = listener.accept().unwrap();
    (
        GreetingStream::new(stream, "spark-2", Instant::now() + end).unwrap(),
        other,
    )
}

const LONG: Duration = Duration::from_secs(60);

#[test]
fn a_message_is_read_and_nothing_beyond_it() {
    let (mut line, mut other) = pair(LONG);
    other.write_all(b"[1,2]\n\"next\"\nrest").unwrap();
    assert_eq!(line.receive::<Vec<u8>>(LONG).unwrap(), [1, 2]);
    assert_eq!(line.receive::<String>(LONG).unwrap(), "next");
    let mut rest = [0; 4];
    line.settle().unwrap().read_exact(&mut rest).unwrap();
    assert_eq!(&rest, b"rest");
}

#[test]
fn missing_long_or_invalid_messages_are_errors_that_name_the_other_end() {
    let error_text = |bytes: &[u8], limit_ms| {
        let (mut line, mut other) = pair(LONG);
        let writer = bytes.to_vec();
        let thread = std::thread::spawn(move || {
            // The reader may give up first.
            let _ = other.write_all(&writer);
            other
        });
        let error = line
            .receive::<Vec<u8>>(Duration::from_millis(limit_ms))
            .unwrap_err();
        drop(line);
        drop(thread.join().unwrap());
        format!("{error:#}")
    };
    assert!(error_text(b"", 50).starts_with("spark-2 sent no complete message in "));
    assert!(error_text(b"[1,", 50).starts_with("spark-2 sent no complete message in "));
    assert_eq!(
        error_text(b"<html>\n", 60_000),
        "spark-2 sent no message of nccl-spark: \"<html>\""
    );
    assert!(
        error_text(&vec![b'x'; LINE_MAX_BYTES + 2], 60_000)
            .contains("a line of more than 262144 bytes")
    );
    let (mut line, other) = pair(LONG);
    drop(other);
    assert_eq!(
        line.receive::<u8>(LONG).unwrap_err().to_string(),
        "spark-2 closed the connection"
    );
}

#[test]
fn slow_senders_do_not_extend_the_limit() {
    let (mut line, mut other) = pair(Duration::from_millis(300));
    let dripping = std::thread::spawn(move || {
        while other.write_all(b" ").is_ok() {
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    let begin = Instant::now();
    assert!(
        line.receive::<u8>(LONG)
            .unwrap_err()
            .to_string()
            .contains("sent no complete message")
    );
    assert!(begin.elapsed() < LONG / 2);
    drop(line);
    dripping.join().unwrap();
}
