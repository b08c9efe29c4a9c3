//! The receiving side: granted receives, and which of their bytes were announced and have come.

use super::Violation;
use crate::flow::NotInFlight;
use crate::flow::receives::{Arrival, Receives};
use crate::wire::ids::{LaneId, Slot};
use crate::wire::immediate::Immediate;
use crate::wire::stream::{Data, Grant};
use crate::wire::{PARTS, SLOTS};

/// What a completion of rails counts in one; a message here may be larger.
const UNIT_BYTES: u64 = 1 << 30;

/// All receives of one connection.
#[derive(Debug)]
pub struct Inbound {
    receives: Receives,
    slots: Box<[Receive; SLOTS]>,
}

/// What a slot was granted for last.
#[derive(Debug, Clone, Copy, Default)]
struct Receive {
    sequence: u64,
    parts: [Part; PARTS],
}

#[derive(Debug, Clone, Copy, Default)]
enum Part {
    /// No bytes are expected: it is not granted, or has come.
    #[default]
    Closed,
    Granted {
        room: u64,
    },
    /// Some of its bytes were announced, and `landed` of these have come.
    Arriving {
        total: u64,
        announced: u64,
        landed: u64,
    },
}

/// Where the bytes of a chunk go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Landing {
    /// The receive's slot.
    pub slot: Slot,
    /// Its part.
    pub part: u8,
    /// Where in its buffer.
    pub offset: u64,
    /// How many bytes.
    pub bytes: u32,
}

impl Inbound {
    /// No receives yet.
    pub fn new() -> Self {
        Self { receives: Receives::new(UNIT_BYTES), slots: Box::new([Receive::default(); SLOTS]) }
    }

    /// Receives that wait for bytes.
    pub fn open(&self) -> usize {
        self.receives.open()
    }

    /// Takes the next slot for a receive of the given tags and rooms (1 to [`PARTS`]); `None` while that slot is in use. `tell` hears each
    /// grant for the peer, in order. No receive is told before its bytes are there, as one over rails may be: bytes come by TCP only
    /// while the caller asks, and it asks no more for what it was told.
    pub fn grant(
        &mut self,
        parts: impl ExactSizeIterator<Item = (i32, u64)> + Clone,
        mut tell: impl FnMut(Grant),
    ) -> Option<Slot> {
        let count = parts.len().min(PARTS) as u8;
        let granted = self.receives.grant(parts.clone().map(|(_, room)| room), false, LaneId::default())?;
        let sequence = granted.sequence;
        let receive = &mut self.slots[granted.slot.index()];
        *receive = Receive { sequence, parts: [Part::Closed; PARTS] };
        for ((part, place), (tag, room)) in (0..count).zip(&mut receive.parts).zip(parts) {
            *place = Part::Granted { room };
            tell(Grant { sequence, part, parts: count, tag, room });
        }
        Some(granted.slot)
    }

    /// A chunk is about to come.
    ///
    /// # Errors
    /// A [`Violation`]; nothing changed then.
    pub fn announced(&mut self, data: &Data) -> Result<Landing, Violation> {
        let Data { sequence, part, offset, bytes, total } = *data;
        let slot = Slot::of(sequence);
        let receive = &mut self.slots[slot.index()];
        let place = &mut receive.parts[usize::from(part) % PARTS];
        let not_granted = Violation::NotGranted { sequence, part };
        if receive.sequence != sequence || usize::from(part) >= PARTS {
            return Err(not_granted);
        }
        let (known, so_far, landed) = match *place {
            Part::Closed => return Err(not_granted),
            Part::Granted { room } if total > room => return Err(Violation::Overrun { total, room }),
            Part::Granted { .. } => (total, 0, 0),
            // An empty message has one chunk.
            Part::Arriving { .. } if bytes == 0 => return Err(not_granted),
            Part::Arriving { total, announced, landed } => (total, announced, landed),
        };
        if known != total {
            return Err(Violation::Total { before: known, now: total });
        }
        let announced = so_far + u64::from(bytes);
        // The frame says itself that the chunk lies within its message.
        if announced > total {
            return Err(Violation::Surplus { announced, total });
        }
        *place = Part::Arriving { total, announced, landed };
        Ok(Landing { slot, part, offset, bytes })
    }

    /// Bytes of a chunk that was announced lie in their buffer; whether they are the last of their message. To be called once for an
    /// empty one too.
    pub fn landed(&mut self, slot: Slot, part: u8, bytes: u32) -> bool {
        let receive = &mut self.slots[slot.index()];
        let place = &mut receive.parts[usize::from(part) % PARTS];
        let Part::Arriving { total, landed, .. } = place else { return false };
        *landed += u64::from(bytes);
        if *landed < *total {
            return false;
        }
        let (leads, rest) = ((*total / UNIT_BYTES) as u16, (*total % UNIT_BYTES) as u32);
        *place = Part::Closed;
        let generation = Immediate::generation_of(receive.sequence);
        let whole = Immediate { slot, part, generation, shares: 1, share: 0, leads };
        // It was granted with room for this, so there is nothing to refuse.
        matches!(self.receives.arrived(&whole, rest), Ok(Arrival::Whole | Arrival::Part))
    }

    /// As [`Receives::test`].
    ///
    /// # Errors
    /// [`NotInFlight`].
    pub fn test(&mut self, slot: Slot, tell: impl FnMut(usize, u64)) -> Result<bool, NotInFlight> {
        self.receives.test(slot, tell)
    }
}

impl Default for Inbound {
    fn default() -> Self {
        Self::new()
    }
}
