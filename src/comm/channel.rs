//! TCP channel of a connection, called the bootstrap. It carries framed messages: first the
//! handshake, then control frames. Calls do not block, and buffers are bounded.

use host::error::{Call, Error, Network, PeerGone, Result, Violation};
use proto::wire::message::{HEADER_BYTES, Header, MAX_BODY_BYTES, Message};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;
use verbs::OwnSocket;

/// Time after which the kernel fails the socket if sent bytes get no acknowledgement.
const USER_TIMEOUT: Duration = Duration::from_secs(60);
/// Idle time before the kernel's first keep-alive check of the peer's host. It is also the interval
/// between further checks.
const KEEPALIVE: Duration = Duration::from_secs(15);

/// [`Channel::offer`] queues no further message once this number of bytes is queued. The socket
/// then accepts nothing, because the peer does not read.
const MOST_WAITING_BYTES: usize = HEADER_BYTES + MAX_BODY_BYTES;

/// One end of a channel.
#[derive(Debug)]
pub struct Channel {
    stream: Arc<OwnSocket<TcpStream>>,
    /// Name of the peer, or its address while the name is unknown.
    peer: String,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    /// First error of a write, kept because the socket reports an error only once.
    broken: Option<ErrorKind>,
}

/// Result of reading from a channel.
#[derive(Debug)]
pub enum Received {
    /// A message.
    Message(Message),
    /// No complete message yet.
    Nothing,
    /// The peer closed its end, or its process ended.
    Closed,
    /// The network to the peer has failed; the peer itself may be well.
    Unreachable(Network),
}

impl Channel {
    /// Starts to connect. [`Channel::connected`] reports when the connection is established.
    pub fn dial(address: SocketAddr) -> Result<Self> {
        let trouble = |e: &std::io::Error| Error::os(Call::Connect(address), e);
        let socket = Socket::new(
            Domain::for_address(address),
            Type::STREAM,
            Some(Protocol::TCP),
        )
        .map_err(|e| trouble(&e))?;
        socket.set_nonblocking(true).map_err(|e| trouble(&e))?;
        match socket.connect(&address.into()) {
            Err(e)
                if e.raw_os_error() != Some(libc::EINPROGRESS)
                    && e.kind() != ErrorKind::WouldBlock =>
            {
                Err(trouble(&e))
            }
            _ => Self::new(socket.into(), address),
        }
    }

    /// Creates a channel from an accepted or dialled stream and the address of its other end.
    pub fn new(stream: TcpStream, peer: SocketAddr) -> Result<Self> {
        let trouble = |e: std::io::Error| Error::os(Call::Bootstrap, &e);
        stream.set_nonblocking(true).map_err(trouble)?;
        stream.set_nodelay(true).map_err(trouble)?;
        SockRef::from(&stream)
            .set_tcp_user_timeout(Some(USER_TIMEOUT))
            .map_err(trouble)?;
        let keepalive = TcpKeepalive::new()
            .with_time(KEEPALIVE)
            .with_interval(KEEPALIVE);
        SockRef::from(&stream)
            .set_tcp_keepalive(&keepalive)
            .map_err(trouble)?;
        let stream = Arc::new(OwnSocket::new(stream));
        Ok(Self {
            stream,
            peer: peer.to_string(),
            inbox: Vec::new(),
            outbox: Vec::new(),
            broken: None,
        })
    }

    /// Returns true once the connection is established.
    pub fn connected(&self) -> std::io::Result<bool> {
        if let Some(error) = self.stream.take_error()? {
            return Err(error);
        }
        match self.stream.peer_addr() {
            Ok(_) => Ok(true),
            Err(e) if e.kind() == ErrorKind::NotConnected => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Returns the peer's name, for log lines. Before [`Channel::name_peer`] it is the address.
    pub fn peer(&self) -> String {
        self.peer.clone()
    }

    /// Sets the name that the peer's first message has.
    pub fn name_peer(&mut self, name: &str) {
        name.clone_into(&mut self.peer);
    }

    /// Returns the addresses of both ends, this side's first.
    pub fn addresses(&self) -> std::io::Result<[SocketAddr; 2]> {
        Ok([self.stream.local_addr()?, self.stream.peer_addr()?])
    }

    /// Returns the socket, for a wait that does not borrow the channel.
    pub fn socket(&self) -> Arc<OwnSocket<TcpStream>> {
        Arc::clone(&self.stream)
    }

    /// Sends queued bytes. Returns true once the kernel has all of them.
    pub fn is_flushed(&mut self) -> Result<bool> {
        self.push().map_err(|e| self.failed(&e))?;
        Ok(self.outbox.is_empty())
    }

    /// Returns the stream, for other data, and the bytes received after the last message. Turns off
    /// the kernel's time limit for unacknowledged bytes, because the peer may read nothing for a
    /// long time. The kernel still checks an idle peer, and fails the socket after three failed
    /// checks.
    pub fn into_stream(self) -> Result<(Arc<OwnSocket<TcpStream>>, Vec<u8>)> {
        let trouble = |e: std::io::Error| Error::os(Call::Stream, &e);
        let keepalive = TcpKeepalive::new()
            .with_time(KEEPALIVE)
            .with_interval(KEEPALIVE)
            .with_retries(3);
        let socket = SockRef::from(&**self.stream);
        socket.set_tcp_user_timeout(None).map_err(trouble)?;
        socket.set_tcp_keepalive(&keepalive).map_err(trouble)?;
        Ok((self.stream, self.inbox))
    }

    /// Queues a message and sends as much as the socket accepts.
    ///
    /// # Errors
    /// [`Error::PeerGone`] if the peer has closed its end; [`Error::Network`] if the channel fails.
    pub fn send(&mut self, message: &Message) -> Result<()> {
        self.outbox.extend_from_slice(&message.encode());
        self.push().map_err(|e| self.failed(&e))
    }

    /// Like [`Channel::send`], but returns false, and does not queue the message, if too many bytes
    /// are queued already.
    pub fn offer(&mut self, message: &Message) -> Result<bool> {
        if self.outbox.len() >= MOST_WAITING_BYTES {
            self.push().map_err(|e| self.failed(&e))?;
        }
        if self.outbox.len() >= MOST_WAITING_BYTES {
            return Ok(false);
        }
        self.send(message).map(|()| true)
    }

    fn push(&mut self) -> std::io::Result<()> {
        write_queued(&mut self.outbox, |bytes| (&**self.stream).write(bytes))
            .inspect_err(|e| _ = self.broken.get_or_insert(e.kind()))
    }

    /// Returns the next message if it is complete. One read may deliver several messages, so the
    /// caller must repeat the call until it returns [`Received::Nothing`]. Buffers at most the
    /// bytes of the largest message and of one read. Also sends queued bytes.
    ///
    /// # Errors
    /// [`Error::Protocol`] if the peer does not follow the protocol.
    pub fn receive(&mut self) -> Result<Received> {
        let mut end = self.push().err();
        while self.inbox.len() < HEADER_BYTES + MAX_BODY_BYTES {
            let mut chunk = [0; 4096];
            match (&**self.stream).read(&mut chunk) {
                Ok(0) => {
                    end = Some(ErrorKind::ConnectionReset.into());
                    break;
                }
                Ok(count) => self.inbox.extend_from_slice(&chunk[..count]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => {
                    end = Some(e);
                    break;
                }
            }
        }
        match self.parse()? {
            Some(message) => Ok(Received::Message(message)),
            None => Ok(end.map_or(Received::Nothing, |e| {
                self.ended(&self.broken.map_or(e, Into::into))
            })),
        }
    }

    fn parse(&mut self) -> Result<Option<Message>> {
        let Some(header) = self.inbox.first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let header = Header::decode(*header).map_err(|e| Violation::Header {
            peer: self.peer(),
            how: e.to_string(),
        })?;
        let Some(body) = self
            .inbox
            .get(HEADER_BYTES..HEADER_BYTES + header.body_bytes)
        else {
            return Ok(None);
        };
        let message = Message::decode(header, body).map_err(|e| Violation::Malformed {
            peer: self.peer(),
            how: e.to_string(),
        })?;
        self.inbox.drain(..HEADER_BYTES + header.body_bytes);
        Ok(Some(message))
    }

    fn ended(&self, error: &std::io::Error) -> Received {
        match error.kind() {
            ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted | ErrorKind::BrokenPipe => {
                Received::Closed
            }
            _ => Received::Unreachable(Network::Bootstrap {
                peer: self.peer(),
                why: error.to_string(),
            }),
        }
    }

    fn failed(&self, error: &std::io::Error) -> Error {
        match self.ended(error) {
            Received::Unreachable(network) => network.into(),
            _ => PeerGone::Bootstrap {
                peer: self.peer(),
                why: error.to_string(),
            }
            .into(),
        }
    }
}

/// Writes queued bytes until the socket accepts no more, and removes the written bytes from the
/// queue.
pub fn write_queued(
    queue: &mut Vec<u8>,
    mut write: impl FnMut(&[u8]) -> std::io::Result<usize>,
) -> std::io::Result<()> {
    while !queue.is_empty() {
        match write(queue) {
            Ok(count) => drop(queue.drain(..count)),
            Err(e) if e.kind() == ErrorKind::WouldBlock => break,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::tcp_pair::tcp_pair;
    use proto::wire::control::ControlFrame;

    fn pair() -> (Channel, TcpStream) {
        let [stream, accepted] = tcp_pair();
        let client = accepted.peer_addr().unwrap();
        (Channel::new(accepted, client).unwrap(), stream)
    }

    fn wait(channel: &mut Channel) -> Result<Received> {
        loop {
            match channel.receive() {
                Ok(Received::Nothing) => std::thread::yield_now(),
                other => return other,
            }
        }
    }

    #[test]
    fn messages_are_read_whole_however_their_bytes_arrive() {
        let (mut channel, mut stream) = pair();
        let sent = [
            Message::Control(ControlFrame {
                number: 7,
                received: 2,
                awaits_confirmation: true,
                message: vec![1, 2, 3],
            }),
            Message::Refuse("no".into()),
        ];
        let bytes: Vec<u8> = sent.iter().flat_map(Message::encode).collect();
        let writer = std::thread::spawn(move || {
            for byte in bytes {
                stream.write_all(&[byte]).unwrap();
                stream.flush().unwrap();
            }
        });
        for message in &sent {
            assert!(matches!(wait(&mut channel), Ok(Received::Message(m)) if m == *message));
        }
        writer.join().unwrap();
        assert!(matches!(wait(&mut channel), Ok(Received::Closed)));
    }

    #[test]
    fn a_peer_that_has_closed_is_still_named() {
        let (mut channel, stream) = pair();
        let address = stream.local_addr().unwrap().to_string();
        drop(stream);
        assert!(matches!(wait(&mut channel), Ok(Received::Closed)));
        assert_eq!(channel.peer(), address);
        channel.name_peer("spark-2:77");
        let error = loop {
            match channel.send(&Message::Resumed) {
                Ok(()) => std::thread::yield_now(),
                Err(error) => break error.to_string(),
            }
        };
        assert!(
            error.contains("spark-2:77") && !error.contains(&address),
            "{error}"
        );
    }

    #[test]
    fn a_peer_that_reads_nothing_uses_no_memory_here() {
        let (mut channel, _stream) = pair();
        let frame = ControlFrame {
            number: 1,
            received: 0,
            awaits_confirmation: true,
            message: vec![7; 2000],
        };
        // Far more than the kernel buffers for a socket.
        let taken = (0..100_000)
            .filter(|_| channel.offer(&Message::Control(frame.clone())).unwrap())
            .count();
        assert!(taken < 50_000, "{taken} frames were taken");
        assert!(
            channel.outbox.len() < MOST_WAITING_BYTES + 4096,
            "{} bytes wait",
            channel.outbox.len()
        );
    }

    #[test]
    fn another_protocol_and_an_oversized_message_are_refused_at_the_header() {
        for bytes in [
            &b"GET / HTTP/1.1\r\n\r\n"[..],
            &[0x50, 0x53, 1, 1, 0xff, 0xff, 0xff, 0x7f],
        ] {
            let (mut channel, mut stream) = pair();
            stream.write_all(bytes).unwrap();
            assert!(matches!(wait(&mut channel), Err(Error::Protocol(_))));
        }
    }
}
