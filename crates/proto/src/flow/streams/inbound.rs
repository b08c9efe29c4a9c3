//! The receiving side: granted receives, and their announced and received bytes.

use super::StreamViolation;
use crate::flow::NotInFlight;
use crate::flow::receives::{Arrival, Receives};
use crate::wire::ids::{LaneId, Slot};
use crate::wire::immediate::Immediate;
use crate::wire::stream::{Data, StreamGrant};
use crate::wire::{PARTS, SLOTS};

/// Unit in which messages are reported to [`Receives`], which was made for the chunks of rails: the
/// largest chunk size of a rail. A complete message is reported as a number of full units, and a
/// rest. (The chunks of streams are smaller than the unit.)
const UNIT_BYTES: u64 = 1 << 30;

/// All receives of one connection.
#[derive(Debug)]
pub struct Inbound {
    receives: Receives,
    slots: Box<[Receive; SLOTS]>,
}

/// The receive that took a slot last. It may be finished.
#[derive(Debug, Clone, Copy, Default)]
struct Receive {
    sequence: u64,
    parts: [InboundPart; PARTS],
}

#[derive(Debug, Clone, Copy, Default)]
enum InboundPart {
    /// No bytes are expected: the part was not granted, or is complete.
    #[default]
    Closed,
    Granted {
        buffer_bytes: u64,
    },
    /// The header of at least one chunk has arrived. `total` is the message's size. The headers so
    /// far announce `announced` bytes, and `landed` of these bytes are in the buffer.
    Arriving {
        total: u64,
        announced: u64,
        landed: u64,
    },
}

/// Destination of a chunk's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Landing {
    /// The receive's slot.
    pub slot: Slot,
    /// Part of that receive.
    pub part: u8,
    /// Offset in the part's buffer.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u32,
}

impl Inbound {
    /// Returns the number of receives that wait for bytes.
    pub fn open(&self) -> usize {
        self.receives.open()
    }

    /// Takes the next slot for a receive. `parts` has the tag and the buffer size of each part, for
    /// 1 to [`PARTS`] parts. Calls `tell` with the grant of each part, in order; the caller sends
    /// these grants to the peer. Returns `None` while the next slot is in use.
    ///
    /// Unlike on rails, a receive is never reported done before its bytes have arrived. The sockets
    /// are read only while the caller polls, and the caller stops polling when a receive is done.
    pub fn grant(
        &mut self,
        parts: impl ExactSizeIterator<Item = (i32, u64)> + Clone,
        mut tell: impl FnMut(StreamGrant),
    ) -> Option<Slot> {
        let count = parts.len().min(PARTS) as u8;
        let sizes = parts.clone().map(|(_, buffer_bytes)| buffer_bytes);
        let granted = self.receives.grant(sizes, false, LaneId::default())?;
        let sequence = granted.sequence;
        let receive = &mut self.slots[granted.slot.index()];
        *receive = Receive {
            sequence,
            parts: [InboundPart::Closed; PARTS],
        };
        for ((part, place), (tag, buffer_bytes)) in (0..count).zip(&mut receive.parts).zip(parts) {
            *place = InboundPart::Granted { buffer_bytes };
            tell(StreamGrant {
                sequence,
                part,
                parts: count,
                tag,
                buffer_bytes,
            });
        }
        Some(granted.slot)
    }

    /// Accepts a chunk's header and returns the place for its bytes.
    ///
    /// # Errors
    /// A [`StreamViolation`]; the state is unchanged then.
    pub fn announced(&mut self, data: &Data) -> Result<Landing, StreamViolation> {
        let Data {
            sequence,
            part,
            offset,
            bytes,
            total,
        } = *data;
        let slot = Slot::of(sequence);
        let receive = &mut self.slots[slot.index()];
        let place = &mut receive.parts[usize::from(part) % PARTS];
        let not_granted = StreamViolation::NotGranted { sequence, part };
        if receive.sequence != sequence || usize::from(part) >= PARTS {
            return Err(not_granted);
        }
        let (known, so_far, landed) = match *place {
            InboundPart::Closed => return Err(not_granted),
            InboundPart::Granted { buffer_bytes } if total > buffer_bytes => {
                return Err(StreamViolation::Overrun {
                    total,
                    buffer_bytes,
                });
            }
            InboundPart::Granted { .. } => (total, 0, 0),
            // Only the single chunk of an empty message is empty.
            InboundPart::Arriving { .. } if bytes == 0 => return Err(not_granted),
            InboundPart::Arriving {
                total,
                announced,
                landed,
            } => (total, announced, landed),
        };
        if known != total {
            return Err(StreamViolation::Total {
                before: known,
                now: total,
            });
        }
        let announced = so_far + u64::from(bytes);
        // The frame's decoder has checked that the chunk lies within its message.
        if announced > total {
            return Err(StreamViolation::Surplus { announced, total });
        }
        *place = InboundPart::Arriving {
            total,
            announced,
            landed,
        };
        Ok(Landing {
            slot,
            part,
            offset,
            bytes,
        })
    }

    /// Records that an announced chunk's bytes are in the buffer. Returns true if the message is
    /// now complete. Must also be called for an empty chunk.
    pub fn landed(&mut self, slot: Slot, part: u8, bytes: u32) -> bool {
        let receive = &mut self.slots[slot.index()];
        let place = &mut receive.parts[usize::from(part) % PARTS];
        let InboundPart::Arriving { total, landed, .. } = place else {
            return false;
        };
        *landed += u64::from(bytes);
        if *landed < *total {
            return false;
        }
        let full_chunks = (*total / UNIT_BYTES) as u16;
        let rest = (*total % UNIT_BYTES) as u32;
        *place = InboundPart::Closed;
        let generation = Immediate::generation_of(receive.sequence);
        let whole = Immediate {
            slot,
            part,
            generation,
            shares: 1,
            share: 0,
            full_chunks,
        };
        // `announced` has checked that the message fits, so `arrived` accepts it.
        matches!(
            self.receives.arrived(&whole, rest),
            Ok(Arrival::Complete | Arrival::Part)
        )
    }

    /// Returns true if the receive in `slot` is finished. If so, calls `tell` for each part, with
    /// the part's index and the size of its message, and frees the slot.
    pub fn test(&mut self, slot: Slot, tell: impl FnMut(usize, u64)) -> Result<bool, NotInFlight> {
        self.receives.test(slot, tell)
    }
}

impl Default for Inbound {
    fn default() -> Self {
        Self {
            receives: Receives::new(UNIT_BYTES),
            slots: Box::new([Receive::default(); SLOTS]),
        }
    }
}
