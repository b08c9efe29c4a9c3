//! A connection between the two doctors that carries one JSON object a line. Every read and write has a limit, and so has a line.

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// The longest line. A sheet with 256 findings is below it.
pub const LINE_MAX_BYTES: usize = 256 << 10;
/// How long a write may take.
const WRITE: Duration = Duration::from_secs(5);
/// So much of a line that means nothing is shown.
const SHOWN_CHARACTERS: usize = 60;

/// One end of a connection.
pub struct Line {
    stream: TcpStream,
    /// Who is at the other end, for errors.
    whom: String,
    /// When all of it ends.
    end: Instant,
}

impl Line {
    /// A line over a connected socket, which is read until `end` at the latest. `whom` is who is at the other end.
    ///
    /// # Errors
    /// The system's.
    pub fn new(stream: TcpStream, whom: impl Into<String>, end: Instant) -> Result<Self> {
        let whom = whom.into();
        let set = || -> std::io::Result<()> {
            stream.set_nonblocking(false)?;
            stream.set_nodelay(true)?;
            stream.set_write_timeout(Some(WRITE))
        };
        set().with_context(|| format!("set up the connection with {whom}"))?;
        Ok(Self { stream, whom, end })
    }

    /// Sends one message.
    ///
    /// # Errors
    /// When the other end is gone, or takes nothing for 5 s.
    pub fn say(&mut self, what: &impl Serialize) -> Result<()> {
        let mut text = serde_json::to_vec(what).context("encode a message")?;
        text.push(b'\n');
        self.stream.write_all(&text).with_context(|| format!("{} is gone", self.whom))
    }

    /// The next message, and not a byte beyond it: what follows may belong to somebody else.
    ///
    /// # Errors
    /// When it does not come within `limit`, is too long, or is no such message.
    pub fn hear<T: DeserializeOwned>(&mut self, limit: Duration) -> Result<T> {
        let begin = Instant::now();
        let until = (begin + limit).min(self.end);
        let mut text: Vec<u8> = Vec::new();
        let mut window = vec![0; 16 << 10];
        loop {
            let seen = self.peek(&mut window, begin, until)?;
            let newline = window[..seen].iter().position(|byte| *byte == b'\n');
            let taken = newline.map_or(seen, |at| at + 1);
            self.stream.read_exact(&mut window[..taken]).with_context(|| format!("{} is gone", self.whom))?;
            text.extend_from_slice(&window[..newline.unwrap_or(taken)]);
            ensure!(text.len() <= LINE_MAX_BYTES, "{} sent a line of more than {LINE_MAX_BYTES} bytes", self.whom);
            if newline.is_some() {
                return serde_json::from_slice(&text).map_err(|_| anyhow!("{} sent no {}", self.whom, shown(&text)));
            }
        }
    }

    /// Who is at the other end.
    pub fn whom(&self) -> &str {
        &self.whom
    }

    /// The other end's address.
    ///
    /// # Errors
    /// When it is gone.
    pub fn peer(&self) -> Result<SocketAddr> {
        self.stream.peer_addr().with_context(|| format!("{} is gone", self.whom))
    }

    /// The socket.
    pub fn into_stream(self) -> TcpStream {
        self.stream
    }

    /// How many of the next bytes are there; at least one.
    fn peek(&self, window: &mut [u8], begin: Instant, until: Instant) -> Result<usize> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("{} said nothing more for {:.0} s", self.whom, begin.elapsed().as_secs_f64().max(1.0));
            }
            self.stream.set_read_timeout(Some(left)).context("set the connection's time limit")?;
            match self.stream.peek(window) {
                Ok(0) => bail!("{} closed the connection", self.whom),
                Ok(seen) => return Ok(seen),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error).with_context(|| format!("{} is gone", self.whom)),
            }
        }
    }
}

/// A line that means nothing, as an error shows it.
fn shown(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    format!("message of the doctor: {:?}", text.chars().take(SHOWN_CHARACTERS).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Two ends, of which the second is given as it is.
    fn pair(end: Duration) -> (Line, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (other, _) = listener.accept().unwrap();
        (Line::new(stream, "spark-2", Instant::now() + end).unwrap(), other)
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_message_is_taken_and_nothing_beyond_it() {
        let (mut line, mut other) = pair(LONG);
        other.write_all(b"[1,2]\n\"next\"\nrest").unwrap();
        assert_eq!(line.hear::<Vec<u8>>(LONG).unwrap(), [1, 2]);
        assert_eq!(line.hear::<String>(LONG).unwrap(), "next");
        let mut rest = [0; 4];
        line.into_stream().read_exact(&mut rest).unwrap();
        assert_eq!(&rest, b"rest");
    }

    #[test]
    fn what_does_not_come_is_too_long_or_means_nothing_is_an_error_that_names_the_other_end() {
        let said = |bytes: &[u8], limit_ms| {
            let (mut line, mut other) = pair(LONG);
            let writer = bytes.to_vec();
            let thread = std::thread::spawn(move || {
                // The reader may give up first.
                let _ = other.write_all(&writer);
                other
            });
            let error = line.hear::<Vec<u8>>(Duration::from_millis(limit_ms)).unwrap_err();
            drop(line);
            drop(thread.join().unwrap());
            format!("{error:#}")
        };
        assert!(said(b"", 50).starts_with("spark-2 said nothing more for "));
        assert!(said(b"[1,", 50).starts_with("spark-2 said nothing more for "));
        assert_eq!(said(b"<html>\n", 60_000), "spark-2 sent no message of the doctor: \"<html>\"");
        assert!(said(&vec![b'x'; LINE_MAX_BYTES + 2], 60_000).contains("a line of more than 262144 bytes"));
        let (mut line, other) = pair(LONG);
        drop(other);
        assert_eq!(line.hear::<u8>(LONG).unwrap_err().to_string(), "spark-2 closed the connection");
    }

    #[test]
    fn who_sends_a_byte_now_and_then_does_not_make_the_limit_longer() {
        let (mut line, mut other) = pair(Duration::from_millis(300));
        let dripping = std::thread::spawn(move || {
            while other.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let begin = Instant::now();
        assert!(line.hear::<u8>(LONG).unwrap_err().to_string().contains("said nothing more"));
        assert!(begin.elapsed() < LONG / 2);
        drop(line);
        dripping.join().unwrap();
    }
}
