//! Messages over a connection's TCP connections (streams), for a peer that no rail reaches.
//!
//! Receives, groups, tags and request numbers work as on connections over rails
//! ([`super::receives`], [`super::sends`]). A message is always a single share, which is cut into
//! chunks. Each chunk may be sent on any stream.

pub mod inbound;
pub mod outbound;

use crate::wire::cts;
use crate::wire::stream::MAX_CHUNK_BYTES;

/// Largest chunk, a multiple of [`LINE_BYTES`](crate::wire::stream::LINE_BYTES).
pub const CHUNK_BYTES: u32 = 128 << 10;

const _: () = assert!(
    CHUNK_BYTES <= MAX_CHUNK_BYTES
        && (CHUNK_BYTES as u64).is_multiple_of(crate::wire::stream::LINE_BYTES)
);

/// A frame that the protocol does not allow. The peer is broken or malicious.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StreamViolation {
    /// A chunk for a part that was not granted, or that has all its bytes. Or an empty chunk for a
    /// part that already has a chunk: an empty chunk is the only chunk of an empty message.
    #[error("bytes for part {part} of receive {sequence}, which expects none")]
    NotGranted {
        /// Number of the receive that the chunk names.
        sequence: u64,
        /// The part that the chunk names.
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
    /// The chunks of one message have more bytes together than the message.
    #[error("{announced} bytes of a message of {total} bytes")]
    Surplus {
        /// Sum of the chunks' sizes, including this chunk.
        announced: u64,
        /// The message's size.
        total: u64,
    },
    /// A grant out of order. Grants must come in the order of receives, and within a receive in the
    /// order of its parts.
    #[error("grant of part {part} of receive {sequence} out of order")]
    GrantOrder {
        /// Number of the receive that the grant names.
        sequence: u64,
        /// The part that the grant names.
        part: u8,
    },
    /// A grant while as many receives as there are slots still wait for their sends. The field is
    /// the number of the granted receive.
    #[error("receive {0} granted, but more receives are outstanding than there are slots")]
    GrantAhead(u64),
    /// A grant with impossible contents.
    #[error(transparent)]
    Grant(#[from] cts::Violation),
}

#[cfg(test)]
mod tests;
