//! Messages over a connection's TCP connections (streams), for a peer that no rail reaches.
//!
//! Receives, groups, tags and request numbers work as on connections over rails
//! ([`super::receives`], [`super::sends`]). A message is always a single share. It is cut into
//! chunks, and each chunk may be sent on any stream.

pub mod inbound;
pub mod outbound;

use crate::wire::cts;
use crate::wire::stream::MAX_CHUNK_BYTES;

/// Largest chunk, a multiple of [`LINE_BYTES`](crate::wire::stream::LINE_BYTES).
pub const CHUNK_BYTES: u32 = 128 << 10;

const _: () =
    assert!(CHUNK_BYTES <= MAX_CHUNK_BYTES && (CHUNK_BYTES as u64).is_multiple_of(crate::wire::stream::LINE_BYTES));

/// A frame that the protocol does not allow. The peer is broken or malicious.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StreamViolation {
    /// Bytes for a part of a receive that was not granted, or that has all its bytes.
    #[error("bytes for part {part} of receive {sequence}, which expects none")]
    NotGranted {
        /// The receive named.
        sequence: u64,
        /// The part named.
        part: u8,
    },
    /// A message larger than its receive.
    #[error("message of {total} bytes for a receive of {buffer_bytes} bytes")]
    Overrun {
        /// Size that the chunk gives for its message.
        total: u64,
        /// Size of the receive's buffer.
        buffer_bytes: u64,
    },
    /// Two chunks of one message give different sizes of the message.
    #[error("chunks of one message disagree: {before} and {now} bytes")]
    Total {
        /// The first size.
        before: u64,
        /// The size in this chunk.
        now: u64,
    },
    /// More bytes than the message has.
    #[error("{announced} bytes of a message of {total} bytes")]
    Surplus {
        /// Sum of the chunks' sizes, including this chunk.
        announced: u64,
        /// The message's size.
        total: u64,
    },
    /// A grant other than the next one.
    #[error("grant of part {part} of receive {sequence} out of order")]
    GrantOrder {
        /// The receive named.
        sequence: u64,
        /// The part named.
        part: u8,
    },
    /// More outstanding receives than there are slots.
    #[error("receive {0} granted, but more receives are outstanding than there are slots")]
    GrantAhead(u64),
    /// A grant with impossible contents.
    #[error(transparent)]
    Grant(#[from] cts::Violation),
}

#[cfg(test)]
mod tests;
