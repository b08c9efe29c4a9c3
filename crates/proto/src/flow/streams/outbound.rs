//! The sending side: the receiver's grants, the running sends, and their next chunks.

use super::{CHUNK_BYTES, StreamViolation};
use crate::flow::NotInFlight;
use crate::flow::next::{Head, Peek};
use crate::flow::sends::{REQUESTS, Sends};
use crate::wire::SLOTS;
use crate::wire::cts::{self, Entry, Epoch, RING_WORDS, Terms, entry_word};
use crate::wire::ids::LaneId;
use crate::wire::stream::{Data, StreamGrant};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

/// All sends of one connection.
#[derive(Debug)]
pub struct Outbound {
    sends: Sends,
    /// The receiver's grants, in the layout of the ring of CTS entries.
    ring: Box<[AtomicU64]>,
    /// The grant that must come next: the receive's number, and the part.
    next_grant: (u64, u8),
    /// The message of each send, by request number.
    messages: Box<[OutboundMessage; REQUESTS]>,
    /// Numbers of the requests whose messages have a chunk that no stream has taken, in the order
    /// of their start. A request is in the queue at most once. So the queue never needs more than
    /// its first capacity, [`REQUESTS`].
    queue: VecDeque<u16>,
}

#[derive(Debug, Clone, Copy, Default)]
struct OutboundMessage {
    sequence: u64,
    part: u8,
    total: u64,
    /// Bytes that streams have taken, from the start of the message.
    taken: u64,
    /// Bytes written to the kernel.
    written: u64,
}

/// A chunk for a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// Request number of the chunk's send.
    pub request: u16,
    /// Contents of the chunk's frame header.
    pub data: Data,
    /// True for the last chunk of its message.
    pub is_last: bool,
}

impl Outbound {
    /// Records a grant of one part of a receive.
    ///
    /// # Errors
    /// A [`StreamViolation`]; the state is unchanged then.
    pub fn granted(&mut self, grant: &StreamGrant) -> Result<(), StreamViolation> {
        let StreamGrant {
            sequence,
            part,
            parts,
            tag,
            buffer_bytes,
        } = *grant;
        if (sequence, part) != self.next_grant {
            return Err(StreamViolation::GrantOrder { sequence, part });
        }
        let (_, next) = self.sends.message_range();
        if sequence >= next + SLOTS as u64 {
            return Err(StreamViolation::GrantAhead(sequence));
        }
        // Over TCP, the sender needs neither an address in the receiver's memory nor keys for it.
        let terms = Terms {
            addr: 0,
            bytes: buffer_bytes,
            tag,
            parts,
            part,
            epoch: Epoch::default(),
        };
        let entry = Entry::new(&terms, &Default::default(), sequence);
        entry.check(part)?;
        let at = entry_word(sequence, usize::from(part));
        for (place, word) in self.ring.iter().skip(at).zip(entry.words()) {
            // Relaxed: a single thread writes and reads the ring.
            place.store(*word, Ordering::Relaxed);
        }
        self.next_grant = if part + 1 < parts {
            (sequence, part + 1)
        } else {
            (sequence + 1, 0)
        };
        Ok(())
    }

    /// Finds the receive part for a send with `tag`. Returns `None` if it has not been granted.
    ///
    /// # Errors
    /// [`cts::Violation`] if the parts of a group disagree about their number.
    pub fn find(&mut self, tag: i32) -> Result<Option<Head>, cts::Violation> {
        match self.sends.peek(&self.ring, tag) {
            Peek::Found(head) => Ok(Some(head)),
            Peek::Nothing => Ok(None),
            Peek::Search => self.sends.search(&self.ring, tag),
        }
    }

    /// Returns true if another send can start.
    pub fn has_room(&self) -> bool {
        self.sends.has_room()
    }

    /// Starts a send of `bytes` to the receive part `head`. The caller has checked that `bytes`
    /// does not exceed [`Head::buffer_bytes`]. Returns the request number, or `None` while there is
    /// no room ([`Outbound::has_room`]).
    pub fn start(&mut self, head: Head, bytes: u64) -> Option<u16> {
        let sequence = head.sequence;
        let part = head.part;
        let (request, _) = self
            .sends
            .start_single_write(head, (0, 0), bytes, LaneId::default())?;
        self.messages[usize::from(request) % REQUESTS] = OutboundMessage {
            sequence,
            part,
            total: bytes,
            taken: 0,
            written: 0,
        };
        self.queue.push_back(request);
        Some(request)
    }

    /// Takes the next chunk, which the caller then sends on any stream. Returns `None` if streams
    /// have taken all chunks.
    pub fn next_chunk(&mut self) -> Option<Chunk> {
        let request = *self.queue.front()?;
        let message = &mut self.messages[usize::from(request) % REQUESTS];
        let bytes = (message.total - message.taken).min(u64::from(CHUNK_BYTES));
        let OutboundMessage {
            sequence,
            part,
            total,
            taken: offset,
            ..
        } = *message;
        message.taken += bytes;
        let is_last = message.taken == total;
        if is_last {
            self.queue.pop_front();
        }
        Some(Chunk {
            request,
            data: Data {
                sequence,
                part,
                offset,
                bytes: bytes as u32,
                total,
            },
            is_last,
        })
    }

    /// Records that a chunk was written to the kernel. Returns the message's size if the whole
    /// message is written.
    pub fn written(&mut self, chunk: &Chunk) -> Option<u64> {
        let message = &mut self.messages[usize::from(chunk.request) % REQUESTS];
        message.written += u64::from(chunk.data.bytes);
        if message.written < message.total {
            return None;
        }
        self.sends.confirmed(chunk.request, 0).ok()
    }

    /// Returns true if some message has a chunk that no stream has taken.
    pub fn has_chunks(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Returns true if a send runs.
    pub fn is_running(&self) -> bool {
        self.sends.is_running()
    }

    /// Frees a finished send's request number and returns the send's size; `None` while it runs.
    pub fn test(&mut self, request: u16) -> Result<Option<u64>, NotInFlight> {
        self.sends.test(request)
    }
}

impl Default for Outbound {
    fn default() -> Self {
        Self {
            sends: Sends::default(),
            ring: std::iter::repeat_with(AtomicU64::default)
                .take(RING_WORDS)
                .collect(),
            next_grant: (0, 0),
            messages: Box::new([OutboundMessage::default(); REQUESTS]),
            queue: VecDeque::with_capacity(REQUESTS),
        }
    }
}
