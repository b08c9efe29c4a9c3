//! The messages between the command and its ranks: one JSON object per line over a socket. The
//! socket is the rank's standard input: a socket pair if the command started the rank, TCP if a
//! launcher did.

use crate::output;
use anyhow::{Context, Result, anyhow, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Mutex, PoisonError, mpsc};

/// A kind of work that ranks do, with its messages.
pub trait Work {
    /// The hidden command that starts a rank of this kind.
    const COMMAND: &'static str;
    /// A message from the command to a rank.
    type Order: Serialize + DeserializeOwned + Send + 'static;
    /// A message from a rank to the command.
    type Answer: Serialize + DeserializeOwned + Send + 'static;

    /// Does the work in a rank's process until the orders end. `library` is the plugin's path on
    /// this machine. If it is `None`, the work uses the path in the orders.
    ///
    /// # Errors
    /// Fails on errors of the plugin, and on unexpected orders.
    fn work(
        library: Option<&Path>,
        orders: &mpsc::Receiver<Self::Order>,
        answer: &dyn Fn(Self::Answer) -> Result<()>,
    ) -> Result<()>;
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ToRank<Order> {
    Order(Order),
    /// Close everything and exit.
    Finish,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum FromRank<Answer> {
    Answer(Answer),
    /// Sent four times per second.
    Beat {
        /// Count of the work completed since the rank's start.
        ticks: u64,
        doing: String,
    },
    Failed {
        reason: String,
    },
}

/// Makes a function that accepts one kind of message as the answer to an order, and returns `None`
/// for any other message. Example: `answer!(Answer::Connected { lines } => lines)`.
#[macro_export]
macro_rules! answer {
    ($pattern:pat => $value:expr) => {
        |message| match message {
            $pattern => Some($value),
            _ => None,
        }
    };
}
pub use answer;

/// A message of this length or more is refused, so that the other host cannot fill this host's
/// memory. The length includes the newline.
const LINE_MAX_BYTES: u64 = 16 << 20;

pub(crate) struct Sender(Mutex<File>);

pub(crate) struct Receiver(BufReader<File>);

pub(crate) fn split(socket: impl Into<OwnedFd>) -> Result<(Sender, Receiver)> {
    let stream = File::from(socket.into());
    let reader = stream.try_clone().context("duplicate the control socket")?;
    Ok((Sender(Mutex::new(stream)), Receiver(BufReader::new(reader))))
}

impl Sender {
    pub fn send(&self, message: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(message).context("encode a control message")?;
        line.push(b'\n');
        let mut stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        stream
            .write_all(&line)
            .context("write to the control socket")
    }
}

impl Receiver {
    /// Works like [`Receiver::receive`], for a peer that is not this process's child: a terminal
    /// would not act on the message's texts ([`output::plain`]).
    pub fn receive_plain<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        let Some(mut message) = self.receive::<Value>()? else {
            return Ok(None);
        };
        make_plain(&mut message);
        serde_json::from_value(message)
            .map(Some)
            .context("malformed control message")
    }

    /// Returns the next message, or `None` at the end of the stream.
    pub fn receive<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        let mut line = String::new();
        match self.0.by_ref().take(LINE_MAX_BYTES).read_line(&mut line) {
            Ok(0) => Ok(None),
            Ok(bytes) if bytes as u64 == LINE_MAX_BYTES => {
                bail!("a control message has more than {LINE_MAX_BYTES} bytes")
            }
            Ok(_) => serde_json::from_str(&line)
                .map(Some)
                .map_err(|error| anyhow!("control message {line:?}: {error}")),
            Err(error) => Err(error).context("read from the control socket"),
        }
    }
}

fn make_plain(message: &mut Value) {
    match message {
        Value::String(text) => *text = output::plain(text),
        Value::Array(all) => all.iter_mut().for_each(make_plain),
        Value::Object(all) => all.values_mut().for_each(make_plain),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn texts_of_a_guest_do_not_reach_the_terminal_as_they_are() {
        let (near, far) = UnixStream::pair().unwrap();
        let (sender, _) = split(far).unwrap();
        let reason = "\u{1b}]0;x\u{7}\u{202e}gone".to_owned();
        sender.send(&FromRank::<u8>::Failed { reason }).unwrap();
        let (_, mut receiver) = split(near).unwrap();
        let Some(FromRank::<u8>::Failed { reason }) = receiver.receive_plain().unwrap() else {
            panic!()
        };
        assert_eq!(reason, "?]0;x??gone");
    }
}
