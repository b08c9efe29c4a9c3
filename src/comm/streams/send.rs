//! The sending half of a connection over streams: `isend`, and `test` of sends.

use super::caller_memory;
use super::context::{Failure, StreamContext, Waiting};
use super::farewell::FinalBytes;
use crate::comm::datapath::fault::{
    broken_protocol, not_in_flight, outside_registration, too_large,
};
use crate::comm::datapath::stall::StallTimer;
use crate::comm::log::once::Direction;
use crate::comm::rail::registration::Registration;
use host::error::{Error, PeerGone, Quick};
use proto::flow::next::Head;
use proto::flow::sends::REQUESTS;
use proto::flow::streams::outbound::{Chunk, Outbound};
use proto::wire::cts::MAX_RECEIVE_BYTES;
use proto::wire::stream::{FRAME_BYTES, StreamFrame};
use std::fmt::Display;
use std::io::ErrorKind;
use verbs::HostMemory;

/// Largest number of chunks that one call starts, because NCCL's thread also serves other
/// connections.
const CHUNKS: usize = 16;
/// Size of the buffer for grants: those of 32 receives in flight, with 8 parts each.
const GRANT_BYTES: usize = 256 * FRAME_BYTES;

/// The send data path.
pub struct StreamSendPath {
    outbound: Outbound,
    /// The memory of each running send, by its request number.
    sources: Box<[HostMemory; REQUESTS]>,
    /// The chunk that each stream is sending, by the stream's number. `None` if the stream is free.
    begun: Vec<Option<Begun>>,
    /// Number of the stream for the next chunk, modulo the number of streams. If that stream is not
    /// free, the next free one takes the chunk.
    turn: usize,
    /// Buffer for received grant frames.
    grants: Box<[u8]>,
    /// Number of bytes in `grants` that were received and not used yet.
    granted_bytes: usize,
    /// True after BYE on the first stream.
    peer_has_closed: bool,
    stall: StallTimer,
    failure: Failure,
}

/// A chunk that a stream has accepted partly or not at all.
struct Begun {
    chunk: Chunk,
    frame: [u8; FRAME_BYTES],
    /// Number of bytes that the kernel has accepted, of frame and chunk together.
    sent: usize,
}

impl StreamSendPath {
    /// Creates the data path. `read` has the bytes received after the handshake on each stream.
    pub fn new(read: &[Vec<u8>]) -> Self {
        let mut grants =
            vec![0; GRANT_BYTES.max(read.first().map_or(0, Vec::len))].into_boxed_slice();
        let mut granted_bytes = 0;
        // Only the first stream carries bytes in this direction.
        for (place, byte) in grants.iter_mut().zip(read.first().into_iter().flatten()) {
            (*place, granted_bytes) = (*byte, granted_bytes + 1);
        }
        Self {
            outbound: Outbound::default(),
            sources: Box::new([HostMemory::none(); REQUESTS]),
            begun: std::iter::repeat_with(|| None).take(read.len()).collect(),
            turn: 0,
            grants,
            granted_bytes,
            peer_has_closed: false,
            stall: StallTimer::default(),
            failure: Failure::default(),
        }
    }

    /// Starts to send the `bytes` bytes at `addr`. Returns the request number. Returns `None` if
    /// the receiver has not granted a receive for `tag` yet, or if all requests are in use.
    ///
    /// # Errors
    /// [`Error::Argument`] if the memory is not registered; [`Error::Usage`] if the receive is
    /// smaller than the send; otherwise the error that ended the connection.
    pub fn isend(
        &mut self,
        context: &StreamContext,
        addr: u64,
        bytes: usize,
        tag: i32,
        memory: &Registration,
    ) -> Quick<Option<u16>> {
        self.failure.check()?;
        let Some(source) = memory.source(addr, bytes) else {
            return Err(outside_registration("isend", addr, bytes, memory).into());
        };
        if !self.outbound.has_room() {
            self.progress_or_wait(context, "a send", bytes)?;
            return Ok(None);
        }
        let found = match self.find(context, tag)? {
            None if self.take_grants(context)? => self.find(context, tag)?,
            found => found,
        };
        let Some(head) = found else {
            // Continue other sends, because the grant may depend on them.
            if !self.push(context)? {
                self.idle(context, "a send without a matching receive", bytes)?;
            }
            return Ok(None);
        };
        if bytes as u64 > head.buffer_bytes {
            let peer = &context.sockets.tcp.peer;
            return Err(too_large(
                peer,
                bytes as u64,
                tag,
                head.buffer_bytes,
                MAX_RECEIVE_BYTES,
            ));
        }
        let Some(request) = self.outbound.start(head, bytes as u64) else {
            return Ok(None);
        };
        self.sources[usize::from(request) % REQUESTS] = source;
        self.stall.moved();
        self.push(context)?;
        Ok(Some(request))
    }

    /// Returns the size of a finished send, or `None` while it runs.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such request; otherwise the error that ended the
    /// connection.
    pub fn test(&mut self, context: &StreamContext, request: u16) -> Quick<Option<u64>> {
        if let Some(bytes) = self.outbound.test(request).map_err(not_in_flight)? {
            return Ok(Some(bytes));
        }
        self.failure.check()?;
        self.progress_or_wait(
            context,
            "a posted send",
            self.sources[usize::from(request) % REQUESTS].len(),
        )?;
        self.outbound.test(request).map_err(not_in_flight)
    }

    fn find(&mut self, context: &StreamContext, tag: i32) -> Quick<Option<Head>> {
        match self.outbound.find(tag) {
            Ok(found) => Ok(found),
            Err(violation) => Err(self.breach(context, &violation)),
        }
    }

    /// Sends what the streams accept. If they accept nothing, receives grants. If none has arrived
    /// either, checks if the connection can still progress.
    fn progress_or_wait(
        &mut self,
        context: &StreamContext,
        what: &'static str,
        bytes: usize,
    ) -> Quick<()> {
        if self.push(context)? || self.take_grants(context)? {
            self.stall.moved();
            return Ok(());
        }
        self.idle(context, what, bytes)
    }

    fn idle(&mut self, context: &StreamContext, what: &'static str, bytes: usize) -> Quick<()> {
        let waiting = Waiting {
            direction: Direction::Send,
            what,
            count: bytes,
        };
        if self.peer_has_closed {
            let tcp = context.sockets.tcp.clone();
            let waited = waiting.after(self.stall.elapsed());
            return Err(self
                .failure
                .record(context, PeerGone::StreamsClosed { tcp, waited }.into()));
        }
        waiting
            .check(context, &mut self.stall)
            .map_err(|error| self.failure.record(context, *error))
    }

    /// Sends what the streams accept. Returns true if they accepted any bytes.
    fn push(&mut self, context: &StreamContext) -> Quick<bool> {
        let mut moved = false;
        for stream in 0..self.begun.len() {
            moved |= self.push_stream(context, stream)?;
        }
        for _ in 0..CHUNKS {
            if !self.outbound.has_chunks() {
                break;
            }
            let Some(stream) = self.free_stream() else {
                break;
            };
            let Some(chunk) = self.outbound.next_chunk() else {
                break;
            };
            // After the last chunk of a message, the next message starts on the same stream. After
            // any other chunk, the next one uses another stream.
            self.turn = if chunk.is_last { stream } else { stream + 1 };
            self.begun[stream] = Some(Begun {
                frame: StreamFrame::Data(chunk.data).encode(),
                chunk,
                sent: 0,
            });
            moved |= self.push_stream(context, stream)?;
        }
        Ok(moved)
    }

    /// Returns the first free stream, beginning with the one whose turn it is.
    fn free_stream(&self) -> Option<usize> {
        let count = self.begun.len();
        (self.turn..self.turn + count)
            .map(|stream| stream % count)
            .find(|stream| self.begun[*stream].is_none())
    }

    /// Sends what one stream accepts of its chunk. Returns true if it accepted any bytes.
    fn push_stream(&mut self, context: &StreamContext, stream: usize) -> Quick<bool> {
        let mut moved = false;
        while let Some(begun) = &mut self.begun[stream] {
            let source = self.sources[usize::from(begun.chunk.request) % REQUESTS];
            match begun.send(context.sockets.stream(stream), source) {
                Ok(false) => moved = true,
                Ok(true) => {
                    if let Some(bytes) = self.outbound.written(&begun.chunk) {
                        context.totals.count(bytes);
                    }
                    self.begun[stream] = None;
                    return Ok(true);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return self.broken(context, stream, &error).map(|()| moved),
            }
        }
        Ok(moved)
    }

    /// Handles a stream that accepts no more bytes. This is no failure if the peer has sent BYE.
    #[cold]
    fn broken(
        &mut self,
        context: &StreamContext,
        stream: usize,
        error: &std::io::Error,
    ) -> Quick<()> {
        while self.take_grants(context)? {}
        if self.peer_has_closed {
            Ok(())
        } else {
            Err(self
                .failure
                .record(context, context.sockets.failed(stream, error)))
        }
    }

    /// Receives grants, and the peer's BYE. Returns true if there were any.
    fn take_grants(&mut self, context: &StreamContext) -> Quick<bool> {
        if self.granted_bytes < FRAME_BYTES && !self.peer_has_closed {
            let rest = &mut self.grants[self.granted_bytes..];
            match caller_memory::receive(context.sockets.stream(0), HostMemory::none(), rest) {
                Ok(0) => {
                    let end = std::io::Error::from(ErrorKind::UnexpectedEof);
                    return Err(self
                        .failure
                        .record(context, context.sockets.failed(0, &end)));
                }
                Ok(count) => self.granted_bytes += count,
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => {
                    return Err(self
                        .failure
                        .record(context, context.sockets.failed(0, &error)));
                }
            }
        }
        self.read_grants(context)
    }

    fn read_grants(&mut self, context: &StreamContext) -> Quick<bool> {
        let (frames, _) = self.grants[..self.granted_bytes].as_chunks::<FRAME_BYTES>();
        let count = frames.len();
        let mut outcome = Ok(());
        for frame in frames {
            outcome = match StreamFrame::decode(frame) {
                _ if self.peer_has_closed => Err("a frame after its BYE".to_owned()),
                Ok(StreamFrame::Grant(grant)) => self
                    .outbound
                    .granted(&grant)
                    .map_err(|violation| violation.to_string()),
                Ok(StreamFrame::Bye) => {
                    self.peer_has_closed = true;
                    Ok(())
                }
                Ok(StreamFrame::Data(_)) => Err("a data frame sent to the sender".to_owned()),
                Err(malformed) => Err(malformed.to_string()),
            };
            if outcome.is_err() {
                break;
            }
        }
        if let Err(why) = outcome {
            return Err(self.breach(context, &why));
        }
        self.grants
            .copy_within(count * FRAME_BYTES..self.granted_bytes, 0);
        self.granted_bytes -= count * FRAME_BYTES;
        Ok(count > 0)
    }

    #[cold]
    fn breach(&mut self, context: &StreamContext, why: &dyn Display) -> Box<Error> {
        self.failure.record(
            context,
            broken_protocol(&context.sockets.tcp.peer, why).into(),
        )
    }
}

impl Begun {
    /// Sends what the socket accepts without blocking. Returns true once the whole chunk is sent.
    fn send(&mut self, socket: &std::net::TcpStream, source: HostMemory) -> std::io::Result<bool> {
        let bytes = self.chunk.data.bytes as usize;
        let done = self.sent.saturating_sub(FRAME_BYTES);
        let body = source
            .without_first(self.chunk.data.offset as usize)
            .first(bytes)
            .without_first(done);
        self.sent += caller_memory::send(
            socket,
            self.frame.get(self.sent..).unwrap_or_default(),
            body,
        )?;
        Ok(self.sent == FRAME_BYTES + bytes)
    }
}

impl FinalBytes for StreamSendPath {
    fn final_bytes(&mut self) -> Option<Vec<Vec<u8>>> {
        let is_cut = self.failure.close() || self.outbound.is_running();
        let bye = || StreamFrame::Bye.encode().to_vec();
        (!is_cut).then(|| self.begun.iter().map(|_| bye()).collect())
    }
}
