//! The receiver's state of one connection: the granted receives and their arrived shares.
//!
//! A receive has up to eight parts. It is granted when its CTS (clear-to-send) entries, one for
//! each part, are written to the sender. Its slot is its number modulo the number of slots. The
//! sender cuts the message for a part into shares, one for each lane that it uses; a lane is a rail
//! of this connection. The last write of each share has an immediate: 32 bits that name the slot,
//! the part and the share.

mod progress;

use super::epochs::Epochs;
use super::{NotInFlight, sequence_after, shadow};
use crate::wire::control::{OpenReceive, Received};
use crate::wire::cts::{Epoch, PackedKeys};
use crate::wire::ids::{LaneId, Slot};
use crate::wire::immediate::Immediate;
use crate::wire::{PARTS, SLOTS};
use std::sync::atomic::AtomicU64;

/// All receives of one connection, in `N` slots. `N` is [`SLOTS`], or less in the tests' model.
#[derive(Debug, Clone)]
pub struct Receives<const N: usize = SLOTS> {
    slots: [SlotState; N],
    /// The parts of each slot's receive. Elements beyond the receive's part count are left over
    /// from earlier receives.
    parts: [[Part; PARTS]; N],
    /// Lane on which each slot's CTS entries were last written.
    lanes: [LaneId; N],
    /// Slots (one bit each) whose grant must be repeated, because its lane was lost or its keys
    /// have changed.
    to_repeat: u32,
    /// Slots of `to_repeat` whose keys have changed and whose lane works. Their grant is repeated
    /// on the same lane. On another lane, the repeated entries could arrive before the old ones,
    /// and the old ones would then replace them.
    same_lane: u32,
    /// Slots whose repeated grant is not confirmed. No new receive gets such a slot, because the
    /// repeated entries could overwrite the new ones.
    repeating: u32,
    epochs: Epochs,
    next: u64,
    open: usize,
    chunk_bytes: u64,
}

#[derive(Debug, Clone, Copy, Hash)]
enum SlotState {
    Free,
    Granted(Granted),
}

impl SlotState {
    fn is_waiting(&self) -> bool {
        matches!(self, Self::Granted(granted) if granted.unfinished > 0)
    }
}

#[derive(Debug, Clone, Copy, Hash)]
struct Granted {
    sequence: u64,
    /// Number of the receive's parts.
    count: u8,
    /// Number of parts whose shares have not all arrived.
    unfinished: u8,
    completion: Completion,
}

/// State of a receive's completion, as NCCL sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Completion {
    Pending,
    /// The next test reports completion, even if the data has not arrived: NCCL checks flags in
    /// the data.
    Optional,
    /// Completion was reported before all data had arrived. The last immediate of the receive frees
    /// the slot.
    Reported,
}

#[derive(Debug, Clone, Copy, Default, Hash)]
struct Part {
    buffer_bytes: u64,
    bytes: u64,
    /// Bit set of the shares that have arrived.
    seen: u8,
    /// Number of the message's shares; 0 until the first share has arrived.
    shares: u8,
}

impl Part {
    #[inline(always)]
    fn is_whole(&self) -> bool {
        // 16 bits: eight shares set all bits of `seen`, and `seen` plus one would overflow 8 bits.
        self.shares == 1 || (u16::from(self.seen) + 1 == 1 << self.shares && self.shares != 0)
    }
}

/// A granted receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    /// The receive's slot, which is also its request number.
    pub slot: Slot,
    /// The receive's number on this connection, from 0.
    pub sequence: u64,
}

/// A grant to repeat now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Repeat {
    /// The receive whose grant is repeated.
    pub grant: Grant,
    /// Number of the receive's parts.
    pub parts: usize,
    /// Lane on which to repeat the grant.
    pub lane: LaneId,
}

/// Result of an immediate that the protocol allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// A share has arrived; the receive is not complete.
    Part,
    /// A share has arrived, and completes the receive.
    Complete,
    /// The immediate is from an earlier use of the slot, or is a repetition without bytes.
    Stale,
}

/// An immediate that the protocol does not allow. The peer is broken or malicious.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The receive has no part with this number, or the part has no share with this number.
    #[error("unexpected share {share} of part {part}")]
    Part {
        /// Number of the part, from the immediate.
        part: u8,
        /// Number of the share, from the immediate.
        share: u8,
    },
    /// The share has already arrived. The second write has bytes, or its immediate has another
    /// number of shares.
    #[error("share {share} of part {part} arrived twice; the second write had {bytes} bytes")]
    Again {
        /// Number of the part.
        part: u8,
        /// Number of the share.
        share: u8,
        /// Bytes written the second time.
        bytes: u32,
    },
    /// Two immediates of one message disagree about the number of shares.
    #[error("immediates of one message disagree: {before} and {now} shares")]
    Shares {
        /// Number of shares in the earlier immediates.
        before: u8,
        /// Number of shares in the new immediate.
        now: u8,
    },
    /// The message is larger than the receive.
    #[error("{bytes} bytes for a receive of {buffer_bytes} bytes")]
    Overrun {
        /// Bytes of the message that have arrived so far, including the new share.
        bytes: u64,
        /// Size of the receive's buffer.
        buffer_bytes: u64,
    },
}

impl<const N: usize> Receives<N> {
    /// Returns an empty set of receives. `chunk_bytes` is the connection's chunk size: the size of
    /// each write of a share except the last write.
    pub fn new(chunk_bytes: u64) -> Self {
        Self {
            slots: [SlotState::Free; N],
            parts: [[Part::default(); PARTS]; N],
            lanes: [LaneId::default(); N],
            to_repeat: 0,
            same_lane: 0,
            repeating: 0,
            epochs: Epochs::default(),
            next: 0,
            open: 0,
            chunk_bytes,
        }
    }

    /// Returns the chunk size: the size of each write of a share except the last write.
    pub fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    /// Returns true if a receive can be granted now.
    #[inline(always)]
    pub fn has_room(&self) -> bool {
        let slot = Slot::of(self.next);
        matches!(self.slots[slot.index()], SlotState::Free) && self.repeating & slot.bit() == 0
    }

    /// Returns the number of receives that wait for bytes.
    #[inline(always)]
    pub fn open(&self) -> usize {
        self.open
    }

    /// Takes the next slot for a receive. `buffer_bytes` has the size of each part: the caller
    /// checks that there are 1 to [`PARTS`]. `lane` is the lane on which the caller writes the
    /// receive's CTS entries. Returns `None` if there is no room ([`Receives::has_room`]). An
    /// `optional` receive is reported done before its bytes have arrived.
    #[inline(always)]
    pub fn grant(
        &mut self,
        buffer_bytes: impl ExactSizeIterator<Item = u64>,
        optional: bool,
        lane: LaneId,
    ) -> Option<Grant> {
        if !self.has_room() {
            return None;
        }
        let count = buffer_bytes.len().min(PARTS) as u8;
        let sequence = self.next;
        let slot = Slot::of(sequence);
        for (part, buffer_bytes) in self.parts[slot.index()].iter_mut().zip(buffer_bytes) {
            *part = Part {
                buffer_bytes,
                bytes: 0,
                seen: 0,
                shares: 0,
            };
        }
        let completion = if optional {
            Completion::Optional
        } else {
            Completion::Pending
        };
        self.slots[slot.index()] = SlotState::Granted(Granted {
            sequence,
            count,
            unfinished: count,
            completion,
        });
        self.lanes[slot.index()] = lane;
        // The slot's previous receive needs no repeated grant any longer.
        self.to_repeat &= !slot.bit();
        self.same_lane &= !slot.bit();
        self.next = sequence_after::<N>(self.next);
        self.open += 1;
        Some(Grant { slot, sequence })
    }

    /// Records an immediate. `bytes` is the byte count of the write that had the immediate.
    ///
    /// # Errors
    /// A [`Violation`]; the state is unchanged then.
    #[inline(always)]
    pub fn arrived(&mut self, immediate: &Immediate, bytes: u32) -> Result<Arrival, Violation> {
        match self.arrived_once(immediate, bytes) {
            Err(Violation::Part { .. }) => self.arrived_again(*immediate, bytes),
            other => other,
        }
    }

    /// Handles an immediate of a share that does not exist or has already arrived.
    ///
    /// Linux's soft-RoCE can repeat an immediate without bytes. When acknowledgements are lost, the
    /// sending side may find that all bytes of a write are acknowledged although the write is not
    /// complete. It then restarts the write after its last byte. The restarted write has the same
    /// immediate, a new packet number and no bytes (`req_retry` and `retry_first_write_send` in
    /// drivers/infiniband/sw/rxe/rxe_req.c).
    #[cold]
    #[inline(never)]
    fn arrived_again(&self, immediate: Immediate, bytes: u32) -> Result<Arrival, Violation> {
        let Immediate {
            slot,
            part,
            share,
            shares,
            ..
        } = immediate;
        let known = &self.parts[slot.index()][usize::from(part) % PARTS];
        let has_come = match &self.slots[slot.index()] {
            SlotState::Granted(granted) => {
                part < granted.count && share < shares && known.seen & 1 << (share & 7) != 0
            }
            SlotState::Free => false,
        };
        match has_come {
            false => Err(Violation::Part { part, share }),
            true if bytes == 0 && known.shares == shares => Ok(Arrival::Stale),
            true => Err(Violation::Again { part, share, bytes }),
        }
    }

    #[inline(always)]
    fn arrived_once(&mut self, immediate: &Immediate, bytes: u32) -> Result<Arrival, Violation> {
        let at = immediate.slot.index();
        let state = &mut self.slots[at];
        let granted = match state {
            SlotState::Granted(g)
                if Immediate::generation_of(g.sequence) == immediate.generation =>
            {
                g
            }
            _ => return Ok(Arrival::Stale),
        };
        let part = &mut self.parts[at][usize::from(immediate.part) % PARTS];
        let bit = 1 << (immediate.share & 7);
        if immediate.part >= granted.count
            || immediate.share >= immediate.shares
            || part.seen & bit != 0
        {
            return Err(Violation::Part {
                part: immediate.part,
                share: immediate.share,
            });
        }
        if part.shares != 0 && part.shares != immediate.shares {
            return Err(Violation::Shares {
                before: part.shares,
                now: immediate.shares,
            });
        }
        let total =
            part.bytes + u64::from(immediate.full_chunks) * self.chunk_bytes + u64::from(bytes);
        if total > part.buffer_bytes {
            return Err(Violation::Overrun {
                bytes: total,
                buffer_bytes: part.buffer_bytes,
            });
        }
        (part.bytes, part.shares, part.seen) = (total, immediate.shares, part.seen | bit);
        if !part.is_whole() {
            return Ok(Arrival::Part);
        }
        granted.unfinished -= 1;
        if granted.unfinished > 0 {
            return Ok(Arrival::Part);
        }
        if granted.completion == Completion::Reported {
            *state = SlotState::Free;
        }
        self.open -= 1;
        Ok(Arrival::Complete)
    }

    /// Returns true if a receive is finished. Then also calls `tell` with the index of each part
    /// and the number of its bytes, and frees the slot. An optional receive is finished
    /// immediately. If not all its bytes have arrived, `tell` gets the sizes of its buffers, and
    /// the receive keeps its slot until all its bytes have arrived.
    ///
    /// # Errors
    /// [`NotInFlight`] if the slot has no receive, or if completion was reported before.
    #[inline(always)]
    pub fn test(
        &mut self,
        slot: Slot,
        mut tell: impl FnMut(usize, u64),
    ) -> Result<bool, NotInFlight> {
        let state = &mut self.slots[slot.index()];
        let SlotState::Granted(granted) = state else {
            return Err(NotInFlight(slot.number()));
        };
        let whole = granted.unfinished == 0;
        match granted.completion {
            Completion::Reported => return Err(NotInFlight(slot.number())),
            Completion::Pending if !whole => return Ok(false),
            Completion::Pending | Completion::Optional => {}
        }
        let size = |part: &Part| if whole { part.bytes } else { part.buffer_bytes };
        let [first, others @ ..] = &self.parts[slot.index()];
        tell(0, size(first));
        for index in 1..usize::from(granted.count).min(PARTS) {
            tell(index, size(&others[index - 1]));
        }
        if whole {
            *state = SlotState::Free;
        } else {
            granted.completion = Completion::Reported;
        }
        Ok(true)
    }

    /// Lists the open receives and their arrived shares, for the sender's resend after a loss.
    pub fn received(&self) -> Received {
        let open = self
            .slots
            .iter()
            .zip(&self.parts)
            .filter_map(|(state, parts)| match state {
                SlotState::Granted(g) if g.unfinished > 0 => Some(OpenReceive {
                    sequence: g.sequence,
                    shares: parts.map(|part| part.seen),
                }),
                _ => None,
            });
        Received {
            granted: self.next,
            open: open.collect(),
        }
    }

    /// Marks the lost lane's grants that still wait for bytes, so that they are repeated. The
    /// caller ensures that both sides have fenced the lane.
    pub fn lost(&mut self, lane: LaneId) {
        for ((slot, state), by) in Slot::all().zip(&self.slots).zip(self.lanes) {
            if by != lane {
                continue;
            }
            self.repeating &= !slot.bit();
            self.same_lane &= !slot.bit();
            if state.is_waiting() {
                self.to_repeat |= slot.bit();
            }
        }
    }

    /// Returns the current epoch (generation of the keys), for new CTS entries.
    #[inline(always)]
    pub fn epoch(&self) -> Epoch {
        self.epochs.newest()
    }

    /// Returns the first epoch whose entries have valid keys for a lane.
    pub fn epoch_of(&self, lane: LaneId) -> Epoch {
        self.epochs.first_valid(lane)
    }

    /// Begins an epoch, because a lane's device has returned with new keys. For all receives that
    /// wait for bytes, puts new keys into their entries in `shadow` (the receiver's copy of the
    /// ring), and marks their grants to be repeated. `keys_of` returns the keys for one part.
    ///
    /// # Errors
    /// The error of `keys_of`. The connection must then end.
    pub fn take_new_keys<E>(
        &mut self,
        lane: LaneId,
        shadow: &[AtomicU64],
        mut keys_of: impl FnMut(Grant, usize) -> Result<PackedKeys, E>,
    ) -> Result<(), E> {
        self.epochs.begin(lane);
        for (slot, state) in Slot::all().zip(&self.slots) {
            let SlotState::Granted(Granted {
                sequence,
                count,
                unfinished: 1..,
                ..
            }) = *state
            else {
                continue;
            };
            self.same_lane |= slot.bit() & !self.to_repeat;
            self.to_repeat |= slot.bit();
            let grant = Grant { slot, sequence };
            for part in 0..usize::from(count) {
                shadow::replace_keys(
                    shadow,
                    sequence,
                    part,
                    &keys_of(grant, part)?,
                    self.epochs.newest(),
                );
            }
        }
        Ok(())
    }

    /// Returns a grant to repeat now, if any. The caller then writes the grant's CTS entries. The
    /// lane for this is `preferred`, unless the grant must stay on its old lane. `has_room` returns
    /// true if a lane can take the write.
    pub fn next_repeat(
        &mut self,
        preferred: LaneId,
        has_room: impl Fn(LaneId) -> bool,
    ) -> Option<Repeat> {
        let mut left = self.to_repeat & !self.repeating;
        while let Some(slot) = Slot::first_in(left) {
            left &= !slot.bit();
            let is_bound = self.same_lane & slot.bit() != 0;
            let lane = if is_bound {
                self.lanes[slot.index()]
            } else {
                preferred
            };
            let waiting = match self.slots[slot.index()] {
                SlotState::Granted(granted) if granted.unfinished > 0 => Some(granted),
                _ => None,
            };
            if waiting.is_some() && !has_room(lane) {
                continue;
            }
            self.to_repeat &= !slot.bit();
            self.same_lane &= !slot.bit();
            if let Some(Granted {
                sequence, count, ..
            }) = waiting
            {
                self.repeating |= slot.bit();
                self.lanes[slot.index()] = lane;
                return Some(Repeat {
                    grant: Grant { slot, sequence },
                    parts: usize::from(count),
                    lane,
                });
            }
        }
        None
    }

    /// Returns true if a grant must be repeated.
    pub fn has_repeats(&self) -> bool {
        Slot::all()
            .zip(&self.slots)
            .any(|(slot, state)| self.to_repeat & slot.bit() != 0 && state.is_waiting())
    }

    /// Records that the write of a repeated grant was confirmed.
    pub fn repeated(&mut self, slot: Slot) {
        self.repeating &= !slot.bit();
    }

    /// Returns two receive numbers: that of the oldest receive that waits for bytes, and that of
    /// the next new receive. They are equal if no receive waits.
    pub fn message_range(&self) -> (u64, u64) {
        (self.delivered(), self.next)
    }

    /// Returns the number of receives before the first one that waits for bytes.
    pub fn delivered(&self) -> u64 {
        let waiting = self.slots.iter().filter_map(|state| match state {
            SlotState::Granted(g) if g.unfinished > 0 => Some(g.sequence),
            _ => None,
        });
        waiting.min().unwrap_or(self.next)
    }
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
