//! Frames of a connection over TCP streams, which is used if no rail reaches the peer. A message is
//! cut into chunks, and each chunk follows a data frame on one of the streams.
//!
//! Every frame is [`FRAME_BYTES`] long. The receiving side sends a grant for each part of a
//! receive, in order, on the first stream. A side that closes the connection in order, without a
//! failure, ends each stream with [`StreamFrame::Bye`].

use super::PARTS;
use super::codec::{Malformed, Reader};
use super::cts::MAX_RECEIVE_BYTES;
use super::fields::ranged;

/// Size of a frame in bytes, without the chunk that follows a data frame.
pub const FRAME_BYTES: usize = 32;
/// Largest size of a chunk, in bytes.
pub const MAX_CHUNK_BYTES: u32 = 1 << 20;
/// The offset of a chunk in its message is a multiple of this number of bytes. So no 128-byte line
/// of NCCL's LL128 protocol is split over two chunks: the words of a line must arrive in order.
pub const LINE_BYTES: u64 = 128;
/// Largest number of streams of a connection.
pub const MAX_STREAMS: usize = 8;

/// First two bytes of every frame. If the byte count of a chunk was wrong, the next frame does not
/// begin with them, which shows the error immediately.
const MARK: u16 = 0x7453;

/// One frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamFrame {
    /// From the sending side: the header of a chunk, whose bytes follow.
    Data(Data),
    /// From the receiving side: permission to send one part of a receive.
    Grant(StreamGrant),
    /// Last frame of this side on the stream.
    Bye,
}

/// Header of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Data {
    /// Number of the receive that the message is for.
    pub sequence: u64,
    /// Part of the receive, below [`PARTS`].
    pub part: u8,
    /// Offset of the chunk in the message, a multiple of [`LINE_BYTES`].
    pub offset: u64,
    /// Size of the chunk, at most [`MAX_CHUNK_BYTES`]; 0 only if the message is empty.
    pub bytes: u32,
    /// Size of the message, at most [`MAX_RECEIVE_BYTES`].
    pub total: u64,
}

/// Permission to send one part of a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamGrant {
    /// Number of the receive on this connection, from 0.
    pub sequence: u64,
    /// Number of the part within the receive, below `parts`.
    pub part: u8,
    /// Number of the receive's parts: 1 to [`PARTS`].
    pub parts: u8,
    /// NCCL's tag.
    pub tag: i32,
    /// Buffer size in bytes, at most [`MAX_RECEIVE_BYTES`].
    pub buffer_bytes: u64,
}

const DATA: u8 = 1;
const GRANT: u8 = 2;
const BYE: u8 = 3;

impl StreamFrame {
    /// Encodes the frame, without an allocation.
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        let (kind, part, word, sequence, first, second) = match *self {
            Self::Data(Data {
                sequence,
                part,
                offset,
                bytes,
                total,
            }) => (DATA, part, bytes, sequence, offset, total),
            Self::Grant(StreamGrant {
                sequence,
                part,
                parts,
                tag,
                buffer_bytes,
            }) => (
                GRANT,
                part,
                tag.cast_unsigned(),
                sequence,
                buffer_bytes,
                u64::from(parts),
            ),
            Self::Bye => (BYE, 0, 0, 0, 0, 0),
        };
        let mut frame = [0; FRAME_BYTES];
        frame[..2].copy_from_slice(&MARK.to_le_bytes());
        frame[2] = kind;
        frame[3] = part;
        frame[4..8].copy_from_slice(&word.to_le_bytes());
        frame[8..16].copy_from_slice(&sequence.to_le_bytes());
        frame[16..24].copy_from_slice(&first.to_le_bytes());
        frame[24..].copy_from_slice(&second.to_le_bytes());
        frame
    }

    /// Decodes a frame.
    pub fn decode(frame: &[u8; FRAME_BYTES]) -> Result<Self, Malformed> {
        let mut r = Reader::new(frame);
        let mark = r.u16()?;
        ranged(
            "mark of a stream's frame",
            u64::from(mark),
            u64::from(MARK),
            u64::from(MARK),
        )?;
        let kind = r.u8()?;
        let part = r.u8()?;
        let word = r.u32()?;
        let sequence = r.u64()?;
        let first = r.u64()?;
        let second = r.u64()?;
        match kind {
            DATA => Data::checked(sequence, part, word, first, second).map(Self::Data),
            GRANT => {
                let parts = ranged("parts of a receive", second, 1, PARTS as u64)? as u8;
                let part = ranged(
                    "part of a receive",
                    u64::from(part),
                    0,
                    u64::from(parts) - 1,
                )? as u8;
                let buffer_bytes = ranged("room of a receive", first, 0, MAX_RECEIVE_BYTES)?;
                Ok(Self::Grant(StreamGrant {
                    sequence,
                    part,
                    parts,
                    tag: word.cast_signed(),
                    buffer_bytes,
                }))
            }
            BYE => {
                for value in [u64::from(part), u64::from(word), sequence, first, second] {
                    ranged("field of a BYE", value, 0, 0)?;
                }
                Ok(Self::Bye)
            }
            kind => Err(Malformed::Value {
                what: "kind of a stream's frame",
                value: u64::from(kind),
            }),
        }
    }
}

impl Data {
    fn checked(
        sequence: u64,
        part: u8,
        bytes: u32,
        offset: u64,
        total: u64,
    ) -> Result<Self, Malformed> {
        ranged("part of a message", u64::from(part), 0, PARTS as u64 - 1)?;
        ranged("message size", total, 0, MAX_RECEIVE_BYTES)?;
        ranged(
            "chunk size",
            u64::from(bytes),
            u64::from(total > 0),
            u64::from(MAX_CHUNK_BYTES).min(total),
        )?;
        // In an empty message, `total` and `bytes` are 0, so the offset must be 0.
        ranged("chunk offset", offset, 0, total - u64::from(bytes))?;
        if !offset.is_multiple_of(LINE_BYTES) {
            return Err(Malformed::Value {
                what: "chunk offset",
                value: offset,
            });
        }
        Ok(Self {
            sequence,
            part,
            offset,
            bytes,
            total,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frames() -> impl Strategy<Value = StreamFrame> {
        let data = (
            any::<u64>(),
            0..8u8,
            0..1u64 << 33,
            1..=MAX_CHUNK_BYTES,
            0..1u64 << 33,
        )
            .prop_map(|(sequence, part, line, bytes, more)| {
                let offset = line / LINE_BYTES * LINE_BYTES;
                StreamFrame::Data(Data {
                    sequence,
                    part,
                    offset,
                    bytes,
                    total: offset + u64::from(bytes) + more,
                })
            });
        let grant = (
            any::<u64>(),
            1..=8u8,
            any::<u8>(),
            any::<i32>(),
            0..=MAX_RECEIVE_BYTES,
        )
            .prop_map(|(sequence, parts, part, tag, buffer_bytes)| {
                StreamFrame::Grant(StreamGrant {
                    sequence,
                    part: part % parts,
                    parts,
                    tag,
                    buffer_bytes,
                })
            });
        let empty = (any::<u64>(), 0..8u8).prop_map(|(sequence, part)| {
            StreamFrame::Data(Data {
                sequence,
                part,
                offset: 0,
                bytes: 0,
                total: 0,
            })
        });
        prop_oneof![data, grant, empty, Just(StreamFrame::Bye)]
    }

    proptest! {
        #[test]
        fn a_frame_survives_encoding_and_decoding(frame in frames()) {
            prop_assert_eq!(StreamFrame::decode(&frame.encode()), Ok(frame));
        }

        /// Every byte of an accepted frame counts: the decoded frame is encoded as the same bytes.
        #[test]
        fn any_bytes_are_decoded_or_refused(frame in frames(), at in 0..FRAME_BYTES, other: u8, bytes: [u8; FRAME_BYTES]) {
            let mut changed = frame.encode();
            changed[at] = other;
            for bytes in [changed, bytes] {
                if let Ok(read) = StreamFrame::decode(&bytes) {
                    prop_assert_eq!(read.encode(), bytes);
                }
            }
        }
    }

    #[test]
    fn a_chunk_outside_of_its_message_is_refused() {
        let data = Data {
            sequence: 0,
            part: 0,
            offset: 128,
            bytes: 72,
            total: 200,
        };
        let read = |data: Data| StreamFrame::decode(&StreamFrame::Data(data).encode());
        assert_eq!(read(data), Ok(StreamFrame::Data(data)));
        for wrong in [
            Data { bytes: 73, ..data },
            Data { bytes: 0, ..data },
            Data { offset: 64, ..data },
            Data {
                offset: u64::MAX - 127,
                ..data
            },
            Data { part: 8, ..data },
            Data {
                total: MAX_RECEIVE_BYTES + 1,
                ..data
            },
            Data {
                bytes: MAX_CHUNK_BYTES + 1,
                total: MAX_RECEIVE_BYTES,
                ..data
            },
            Data {
                offset: 0,
                bytes: 1,
                total: 0,
                ..data
            },
            Data {
                offset: 128,
                bytes: 0,
                total: 0,
                ..data
            },
        ] {
            assert!(read(wrong).is_err(), "{wrong:?}");
        }
    }
}
