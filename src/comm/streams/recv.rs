//! The receiving half of a connection over streams: `irecv`, and `test` of receives.
//!
//! Each stream carries frames. A data frame announces a chunk of a message, whose bytes follow the
//! frame. Frames are read into the stream's inbox. Most bytes of a large chunk are read directly
//! into NCCL's buffer, unless NCCL polls the buffer while the bytes arrive.

use super::caller_memory;
use super::context::{Failure, StreamContext, Waiting};
use super::farewell::FinalBytes;
use crate::comm::channel::write_queued;
use crate::comm::datapath::fault::{broken_protocol, not_in_flight};
use crate::comm::datapath::recv::{RecvPart, check_parts};
use crate::comm::datapath::stall::StallTimer;
use crate::comm::log::once::Direction;
use host::error::{Error, Network, PeerGone, Quick};
use proto::flow::NotInFlight;
use proto::flow::streams::inbound::{Inbound, Landing};
use proto::wire::ids::Slot;
use proto::wire::stream::{FRAME_BYTES, LINE_BYTES, StreamFrame};
use proto::wire::{PARTS, SLOTS};
use std::io::ErrorKind;
use std::net::TcpStream;
use verbs::HostMemory;

/// Size of a stream's inbox: a frame, and small messages after it.
const INBOX_BYTES: usize = 16 << 10;
/// Number of bytes of the inbox that are used while no chunk is announced. The next frame may
/// announce a large chunk, whose bytes are better read directly into their destination.
const PEEK_BYTES: usize = FRAME_BYTES + (4 << 10);
/// Largest number of reads of one stream in one call, because NCCL's thread also serves other
/// connections.
const READS: usize = 32;

/// The receive data path.
pub struct StreamRecvPath {
    inbound: Inbound,
    buffers: Box<[Buffers; SLOTS]>,
    streams: Vec<Incoming>,
    /// Grant frames that the first stream has not accepted yet. Each slot has at most one set of
    /// grants here, because a slot is granted again only after the bytes for its last grants have
    /// arrived.
    outbox: Vec<u8>,
    /// Number of the stream on which bytes arrived last. It is polled first.
    hot: usize,
    /// Number of the stream that last had its turn because nothing had arrived on `hot`.
    cold: usize,
    stall: StallTimer,
    failure: Failure,
}

#[derive(Clone, Copy)]
struct Buffers {
    parts: [HostMemory; PARTS],
    /// True if the caller polls the bytes while they arrive.
    is_watched: bool,
}

struct Incoming {
    inbox: Box<[u8]>,
    /// Range of the inbox with bytes that were received and not used yet.
    unused: std::ops::Range<usize>,
    /// The announced chunk, until all its bytes have arrived.
    chunk: Option<Arriving>,
    end: StreamEnd,
}

struct Arriving {
    slot: Slot,
    part: u8,
    /// Destination of the chunk's bytes that are not stored there yet.
    to: HostMemory,
    is_watched: bool,
}

enum StreamEnd {
    Open,
    /// Ended by BYE.
    Closed,
    Broken(Error),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Polled {
    Nothing,
    /// Bytes that do not complete their message. The rest may arrive on other streams.
    InPart,
    Whole,
}

impl StreamRecvPath {
    /// Creates the data path. `read` has the bytes received after the handshake on each stream.
    pub fn new(read: &[Vec<u8>]) -> Self {
        let none = Buffers {
            parts: [HostMemory::none(); PARTS],
            is_watched: false,
        };
        Self {
            inbound: Inbound::default(),
            buffers: Box::new([none; SLOTS]),
            streams: read.iter().map(|read| Incoming::new(read)).collect(),
            outbox: Vec::with_capacity((SLOTS * PARTS + 1) * FRAME_BYTES),
            hot: 0,
            cold: 0,
            stall: StallTimer::default(),
            failure: Failure::default(),
        }
    }

    /// Grants a receive of 1 to [`PARTS`] buffers. Returns its request number, or `None` while the
    /// next slot is in use. If `is_watched` is true, the caller polls the bytes while they arrive
    /// (LL and LL128), so they are stored in the order that these protocols need. The receive is
    /// still reported done only when all bytes have arrived: NCCL's proxy tests the receive until
    /// then, and the sockets are read only during NCCL's calls.
    ///
    /// # Errors
    /// [`Error::Argument`] if the memory is not registered or the group is too large; otherwise the
    /// error that ended the connection.
    pub fn irecv(
        &mut self,
        context: &StreamContext,
        parts: &[RecvPart<'_>],
        is_watched: bool,
    ) -> Quick<Option<u16>> {
        self.failure.check()?;
        check_parts(parts)?;
        let outbox = &mut self.outbox;
        let granted = self.inbound.grant(
            parts.iter().map(|part| (part.tag, part.bytes as u64)),
            |grant| {
                outbox.extend_from_slice(&StreamFrame::Grant(grant).encode());
            },
        );
        let Some(slot) = granted else {
            self.progress_or_wait(context, "a receive without a free slot")?;
            return Ok(None);
        };
        let buffers = &mut self.buffers[slot.index()];
        buffers.is_watched = is_watched;
        for (place, part) in buffers.parts.iter_mut().zip(parts) {
            // `check_parts` has checked that the buffer is inside its registration.
            *place = part
                .memory
                .target(part.addr, part.bytes)
                .unwrap_or(HostMemory::none());
        }
        self.send_grants(context)?;
        Ok(Some(slot.number()))
    }

    /// Returns true if a receive is done, after calling `report` with each buffer's index and size.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such request; otherwise the error that ended the
    /// connection.
    pub fn test(
        &mut self,
        context: &StreamContext,
        request: u16,
        mut report: impl FnMut(usize, u64),
    ) -> Quick<bool> {
        let Some(slot) = Slot::new(request) else {
            return Err(not_in_flight(NotInFlight(request)));
        };
        if self
            .inbound
            .test(slot, &mut report)
            .map_err(not_in_flight)?
        {
            return Ok(true);
        }
        self.failure.check()?;
        self.progress_or_wait(context, "a receive")?;
        self.inbound.test(slot, report).map_err(not_in_flight)
    }

    /// Receives available bytes. If there are none, checks if the connection can still progress.
    fn progress_or_wait(&mut self, context: &StreamContext, what: &'static str) -> Quick<()> {
        self.send_grants(context)?;
        if self.progress(context)? {
            self.stall.moved();
            return Ok(());
        }
        if self
            .streams
            .iter()
            .any(|stream| !matches!(stream.end, StreamEnd::Open))
        {
            return self.ended(context, what);
        }
        self.waiting(what)
            .check(context, &mut self.stall)
            .map_err(|error| self.failure.record(context, *error))
    }

    fn waiting(&self, what: &'static str) -> Waiting {
        Waiting {
            direction: Direction::Receive,
            what,
            count: self.inbound.open(),
        }
    }

    /// Called after some stream has ended. If bytes remain on a stream, receives them. If no stream
    /// has bytes left, handles the end.
    #[cold]
    fn ended(&mut self, context: &StreamContext, what: &'static str) -> Quick<()> {
        for stream in 0..self.streams.len() {
            if self.take_in(context, stream)? != Polled::Nothing {
                self.stall.moved();
                return Ok(());
            }
        }
        let waited = self.waiting(what).after(self.stall.elapsed());
        let broken = self.streams.iter().find_map(|stream| match &stream.end {
            StreamEnd::Broken(error) => Some(error.clone()),
            StreamEnd::Open | StreamEnd::Closed => None,
        });
        let error = match broken {
            Some(Error::PeerGone(gone)) => PeerGone::While(Box::new(gone), waited).into(),
            Some(Error::Network(network)) => Network::While(Box::new(network), waited).into(),
            Some(other) => other,
            // Some streams have ended with BYE, and the ends of the others are still in transit.
            None if self
                .streams
                .iter()
                .any(|stream| matches!(stream.end, StreamEnd::Open)) =>
            {
                return self
                    .waiting(what)
                    .check(context, &mut self.stall)
                    .map_err(|error| self.failure.record(context, *error));
            }
            None => PeerGone::StreamsClosed {
                tcp: context.sockets.tcp.clone(),
                waited,
            }
            .into(),
        };
        Err(self.failure.record(context, error))
    }

    /// Sends as many grants as the first stream accepts.
    fn send_grants(&mut self, context: &StreamContext) -> Quick<()> {
        let stream = context.sockets.stream(0);
        match write_queued(&mut self.outbox, |bytes| {
            caller_memory::send(stream, bytes, HostMemory::none())
        }) {
            Ok(()) => Ok(()),
            // The peer reads no more. Its last bytes can still be read, and may show why.
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::BrokenPipe | ErrorKind::ConnectionReset
                ) =>
            {
                tracing::debug!("{}: no more grants: {error}", context.sockets);
                self.outbox.clear();
                Ok(())
            }
            Err(error) => Err(self
                .failure
                .record(context, context.sockets.failed(0, &error))),
        }
    }

    /// Receives available bytes, and returns true if there were any. First polls the stream on
    /// which bytes arrived last. If nothing has arrived there, polls one of the other streams, in
    /// turn. If the bytes found last do not complete their message, polls all other streams.
    fn progress(&mut self, context: &StreamContext) -> Quick<bool> {
        let mut found = self.take_in(context, self.hot)?;
        if found == Polled::Nothing && self.streams.len() > 1 {
            self.cold = (self.cold + 1) % self.streams.len();
            if self.cold != self.hot {
                found = self.take_in(context, self.cold)?;
                if found != Polled::Nothing {
                    self.hot = self.cold;
                }
            }
        }
        if found == Polled::InPart {
            let first = self.hot;
            let count = self.streams.len();
            for stream in (first + 1..first + count).map(|stream| stream % count) {
                if self.take_in(context, stream)? != Polled::Nothing {
                    self.hot = stream;
                }
            }
        }
        Ok(found != Polled::Nothing)
    }

    fn take_in(&mut self, context: &StreamContext, number: usize) -> Quick<Polled> {
        let Self {
            inbound,
            buffers,
            streams,
            ..
        } = self;
        let stream = &mut streams[number];
        let mut found = Polled::Nothing;
        for _ in 0..READS {
            match stream.use_inbox(inbound, buffers, &mut found) {
                Ok(()) => {}
                Err(why) => {
                    return Err(self.failure.record(
                        context,
                        broken_protocol(&context.sockets.tcp.peer, &why).into(),
                    ));
                }
            }
            if !matches!(stream.end, StreamEnd::Open) {
                break;
            }
            match stream.read(context.sockets.stream(number), inbound, &mut found) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    stream.end = StreamEnd::Broken(context.sockets.failed(number, &error))
                }
            }
        }
        Ok(found)
    }
}

impl Incoming {
    fn new(read: &[u8]) -> Self {
        let mut inbox = vec![0; INBOX_BYTES.max(read.len())].into_boxed_slice();
        inbox[..read.len()].copy_from_slice(read);
        Self {
            inbox,
            unused: 0..read.len(),
            chunk: None,
            end: StreamEnd::Open,
        }
    }

    fn use_inbox(
        &mut self,
        inbound: &mut Inbound,
        buffers: &[Buffers; SLOTS],
        found: &mut Polled,
    ) -> std::result::Result<(), String> {
        loop {
            let unused = &self.inbox[self.unused.clone()];
            if let Some(chunk) = &mut self.chunk {
                let count = chunk.store(unused);
                if count == 0 && !chunk.to.is_empty() {
                    return Ok(());
                }
                self.unused.start += count;
                self.landed(count, inbound, found);
                continue;
            }
            let Some(frame) = unused.first_chunk::<FRAME_BYTES>() else {
                return Ok(());
            };
            let frame = StreamFrame::decode(frame).map_err(|malformed| malformed.to_string())?;
            if !matches!(self.end, StreamEnd::Open) {
                return Err("a frame after its BYE".to_owned());
            }
            self.unused.start += FRAME_BYTES;
            match frame {
                StreamFrame::Data(data) => {
                    let Landing {
                        slot,
                        part,
                        offset,
                        bytes,
                    } = inbound
                        .announced(&data)
                        .map_err(|violation| violation.to_string())?;
                    let Buffers { parts, is_watched } = buffers[slot.index()];
                    // The chunk fits into this buffer. `decode` has checked that the chunk lies
                    // within its message. The grant had the buffer's size, and `announced` has
                    // checked that the message is no larger than granted.
                    let to = parts[usize::from(part) % PARTS]
                        .without_first(offset as usize)
                        .first(bytes as usize);
                    self.chunk = Some(Arriving {
                        slot,
                        part,
                        to,
                        is_watched,
                    });
                }
                StreamFrame::Bye => self.end = StreamEnd::Closed,
                StreamFrame::Grant(_) => return Err("a grant frame from the sender".to_owned()),
            }
        }
    }

    fn landed(&mut self, count: usize, inbound: &mut Inbound, found: &mut Polled) {
        let Some(chunk) = &mut self.chunk else { return };
        let is_last = inbound.landed(chunk.slot, chunk.part, count as u32);
        *found = if is_last {
            Polled::Whole
        } else {
            Polled::InPart
        };
        if chunk.to.is_empty() {
            self.chunk = None;
        }
    }

    /// Reads available bytes of the socket. Bytes of the current chunk go directly into their
    /// destination, unless the caller polls the destination. Other bytes go into the inbox. Returns
    /// true if more bytes may be available.
    fn read(
        &mut self,
        socket: &TcpStream,
        inbound: &mut Inbound,
        found: &mut Polled,
    ) -> std::io::Result<bool> {
        self.inbox.copy_within(self.unused.clone(), 0);
        self.unused = 0..self.unused.len();
        let (to, most) = match &self.chunk {
            Some(chunk) if chunk.is_watched => (HostMemory::none(), INBOX_BYTES),
            // The rest of the chunk and the next frame, but no bytes after it.
            Some(chunk) => (chunk.to, FRAME_BYTES),
            None => (HostMemory::none(), PEEK_BYTES),
        };
        let end = most.min(self.inbox.len()).max(self.unused.end);
        let count = match caller_memory::receive(socket, to, &mut self.inbox[self.unused.end..end])
        {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(true),
            Err(error) => return Err(error),
        };
        let placed = count.min(to.len());
        self.unused.end += count - placed;
        if placed > 0 {
            if let Some(chunk) = &mut self.chunk {
                chunk.to = chunk.to.without_first(placed);
            }
            self.landed(placed, inbound, found);
        }
        Ok(true)
    }
}

impl Arriving {
    /// Stores as many of `bytes` in the destination as can be stored now. Returns the number of
    /// bytes stored.
    fn store(&mut self, bytes: &[u8]) -> usize {
        let mut count = bytes.len().min(self.to.len());
        if self.is_watched && count < self.to.len() {
            // Leave an incomplete line for a later call.
            let beyond = (self.to.addr() + count) % LINE_BYTES as usize;
            count = count.saturating_sub(beyond);
        }
        if self.is_watched {
            caller_memory::store_in_lines(self.to, &bytes[..count]);
        } else {
            caller_memory::store(self.to, &bytes[..count]);
        }
        self.to = self.to.without_first(count);
        count
    }
}

impl FinalBytes for StreamRecvPath {
    fn final_bytes(&mut self) -> Option<Vec<Vec<u8>>> {
        let is_cut = self.failure.close();
        let mut all = vec![Vec::new(); self.streams.len()];
        all[0] = std::mem::take(&mut self.outbox);
        all.iter_mut()
            .for_each(|bytes| bytes.extend_from_slice(&StreamFrame::Bye.encode()));
        (!is_cut).then_some(all)
    }
}
