//! Messages in chunks over TCP streams, where no rail reaches the peer: what both ends keep of them, and what they refuse.
//!
//! Receives, groups, tags and request numbers are those of connections over rails ([`super::receives`], [`super::sends`]): here a message is
//! always one share, and that share is cut into chunks, each of which goes by any stream.

pub mod inbound;
pub mod outbound;

use crate::wire::cts;
use crate::wire::stream::MAX_CHUNK_BYTES;

/// How much of a message goes in one chunk: larger ones are spread over the streams. A multiple of a line.
pub const CHUNK_BYTES: u32 = 128 << 10;

const _: () =
    assert!(CHUNK_BYTES <= MAX_CHUNK_BYTES && (CHUNK_BYTES as u64).is_multiple_of(crate::wire::stream::LINE_BYTES));

/// A frame that the protocol does not allow: the peer is broken or lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// Bytes for a part of a receive that was not granted, or that has all its bytes.
    #[error("bytes for part {part} of receive {sequence}, which expects none")]
    NotGranted {
        /// The receive named.
        sequence: u64,
        /// The part named.
        part: u8,
    },
    /// A message larger than its receive.
    #[error("message of {total} bytes for a receive of {room} bytes")]
    Overrun {
        /// What was announced.
        total: u64,
        /// What was granted.
        room: u64,
    },
    /// Two chunks of one message disagree.
    #[error("message of {now} bytes, announced as {before}")]
    Total {
        /// What the first said.
        before: u64,
        /// What this one says.
        now: u64,
    },
    /// More bytes than the message has.
    #[error("{announced} bytes of a message of {total} bytes")]
    Surplus {
        /// What was announced with this chunk.
        announced: u64,
        /// The message's size.
        total: u64,
    },
    /// A grant that is not the next one.
    #[error("grant of part {part} of receive {sequence} out of order")]
    GrantOrder {
        /// The receive named.
        sequence: u64,
        /// The part named.
        part: u8,
    },
    /// More receives than there are slots.
    #[error("receive {0} granted while too many wait for their sends")]
    GrantAhead(u64),
    /// What a grant says is not possible.
    #[error(transparent)]
    Grant(#[from] cts::Violation),
}

#[cfg(test)]
mod tests;
