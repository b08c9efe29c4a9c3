//! The receiver's side: granted receives, and what has arrived of them.

use super::NotInFlight;
use crate::wire::immediate::Immediate;
use crate::wire::{PARTS, SLOTS};

/// All receives of one connection.
#[derive(Debug)]
pub struct Receives {
    slots: [Slot; SLOTS],
    /// Their buffers, written only as far as a receive has them.
    parts: [[Part; PARTS]; SLOTS],
    next: u64,
    open: usize,
    stale: u64,
    chunk_bytes: u64,
}

#[derive(Debug, Clone, Copy)]
enum Slot {
    Free,
    Granted(Granted),
}

#[derive(Debug, Clone, Copy)]
struct Granted {
    sequence: u64,
    count: u8,
    unfinished: u8,
    claim: Claim,
}

/// Who still has to hear of a receive's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Claim {
    /// The caller, when the bytes are there.
    Pending,
    /// The caller, who reads the bytes' own flags: told at once.
    Optional,
    /// Nobody: the caller was told, the slot waits for its last immediate.
    Told,
}

#[derive(Debug, Clone, Copy, Default)]
struct Part {
    room: u64,
    bytes: u64,
    seen: u8,
    shares: u8,
}

/// A granted receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    /// Its request number: the slot.
    pub slot: u16,
    /// Its number on this connection, from 0.
    pub sequence: u64,
}

/// What an immediate meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// Bytes of a receive that still waits for others.
    Part,
    /// The last bytes of a receive.
    Whole,
    /// It belongs to an earlier use of the slot.
    Stale,
}

/// An immediate that the protocol does not allow: the peer is broken or lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The receive has no such part, or the part is complete.
    #[error("data for part {part} of a receive that does not wait for it")]
    Part {
        /// The part named.
        part: u8,
    },
    /// Two immediates of one message disagree.
    #[error("a message of {now} shares, announced as {before}")]
    Shares {
        /// What the first said.
        before: u8,
        /// What this one says.
        now: u8,
    },
    /// More bytes than were granted.
    #[error("{bytes} bytes for a receive of {room}")]
    Overrun {
        /// What arrived.
        bytes: u64,
        /// What was granted.
        room: u64,
    },
}

impl Receives {
    /// No receives yet; `chunk_bytes` is the connection's.
    pub fn new(chunk_bytes: u64) -> Self {
        Self {
            slots: [Slot::Free; SLOTS],
            parts: [[Part::default(); PARTS]; SLOTS],
            next: 0,
            open: 0,
            stale: 0,
            chunk_bytes,
        }
    }

    /// Whether a receive could be granted now.
    #[inline(always)]
    pub fn has_room(&self) -> bool {
        matches!(self.slots[self.next as usize % SLOTS], Slot::Free)
    }

    /// Receives that wait for bytes.
    #[inline(always)]
    pub fn open(&self) -> usize {
        self.open
    }

    /// Immediates of earlier uses that were dropped.
    pub fn stale(&self) -> u64 {
        self.stale
    }

    /// Takes the next slot for a receive with the given rooms (1 to [`PARTS`]); `None` while that slot is in use.
    /// An optional receive is reported done before its bytes are there.
    #[inline(always)]
    pub fn grant(&mut self, rooms: impl ExactSizeIterator<Item = u64>, optional: bool) -> Option<Grant> {
        if !self.has_room() {
            return None;
        }
        let count = rooms.len().min(PARTS) as u8;
        let sequence = self.next;
        let slot = sequence as usize % SLOTS;
        for (part, room) in self.parts[slot].iter_mut().zip(rooms) {
            *part = Part { room, bytes: 0, seen: 0, shares: 0 };
        }
        let claim = if optional { Claim::Optional } else { Claim::Pending };
        self.slots[slot] = Slot::Granted(Granted { sequence, count, unfinished: count, claim });
        self.next += 1;
        self.open += 1;
        Some(Grant { slot: slot as u16, sequence })
    }

    /// Takes note of an immediate and the bytes of the write it came with.
    ///
    /// # Errors
    /// A [`Violation`]; nothing changed then.
    #[inline(always)]
    pub fn arrived(&mut self, immediate: Immediate, bytes: u32) -> Result<Arrival, Violation> {
        let at = usize::from(immediate.slot) % SLOTS;
        let slot = &mut self.slots[at];
        let granted = match slot {
            Slot::Granted(g) if Immediate::generation_of(g.sequence) == immediate.generation => g,
            _ => {
                self.stale += 1;
                return Ok(Arrival::Stale);
            }
        };
        let part = &mut self.parts[at][usize::from(immediate.part) % PARTS];
        if immediate.part >= granted.count || (part.shares != 0 && part.seen == part.shares) {
            return Err(Violation::Part { part: immediate.part });
        }
        if part.shares != 0 && part.shares != immediate.shares {
            return Err(Violation::Shares { before: part.shares, now: immediate.shares });
        }
        let total = part.bytes + u64::from(immediate.leads) * self.chunk_bytes + u64::from(bytes);
        if total > part.room {
            return Err(Violation::Overrun { bytes: total, room: part.room });
        }
        (part.bytes, part.shares, part.seen) = (total, immediate.shares, part.seen + 1);
        if part.seen < part.shares {
            return Ok(Arrival::Part);
        }
        granted.unfinished -= 1;
        if granted.unfinished > 0 {
            return Ok(Arrival::Part);
        }
        if granted.claim == Claim::Told {
            *slot = Slot::Free;
        }
        self.open -= 1;
        Ok(Arrival::Whole)
    }

    /// Whether a receive is finished; then `tell` hears the size of each part, and its slot is free from then on. An
    /// optional receive is finished at once, with what was asked for as its sizes, and keeps its slot until its bytes are
    /// there.
    ///
    /// # Errors
    /// [`NotInFlight`].
    #[inline(always)]
    pub fn test(&mut self, request: u16, mut tell: impl FnMut(usize, u64)) -> Result<bool, NotInFlight> {
        let slot = self.slots.get_mut(usize::from(request)).ok_or(NotInFlight(request))?;
        let Slot::Granted(granted) = slot else { return Err(NotInFlight(request)) };
        let whole = granted.unfinished == 0;
        match granted.claim {
            Claim::Told => return Err(NotInFlight(request)),
            Claim::Pending if !whole => return Ok(false),
            Claim::Pending | Claim::Optional => {}
        }
        let parts = &self.parts[usize::from(request) % SLOTS];
        for (index, part) in parts.iter().enumerate().take(usize::from(granted.count)) {
            tell(index, if whole { part.bytes } else { part.room });
        }
        if whole {
            *slot = Slot::Free;
        } else {
            granted.claim = Claim::Told;
        }
        Ok(true)
    }

    /// How many receives, from the first on, have all their bytes.
    pub fn delivered(&self) -> u64 {
        let waiting = self.slots.iter().filter_map(|slot| match slot {
            Slot::Granted(g) if g.unfinished > 0 => Some(g.sequence),
            _ => None,
        });
        waiting.min().unwrap_or(self.next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: u64 = 4096;

    fn immediate(grant: Grant, part: u8, shares: u8, leads: u16) -> Immediate {
        let generation = Immediate::generation_of(grant.sequence);
        Immediate { slot: grant.slot as u8, part, generation, shares, leads }
    }

    /// The sizes of a finished receive.
    fn test(receives: &mut Receives, request: u16) -> Result<Option<Vec<u64>>, NotInFlight> {
        let mut sizes = Vec::new();
        let done = receives.test(request, |part, bytes| {
            assert_eq!(part, sizes.len());
            sizes.push(bytes);
        })?;
        Ok(done.then_some(sizes))
    }

    fn one(receives: &mut Receives, room: u64) -> Grant {
        receives.grant([room].into_iter(), false).unwrap()
    }

    #[test]
    fn shares_in_any_order_make_the_true_size() {
        let mut receives = Receives::new(CHUNK);
        let grant = one(&mut receives, 100_000);
        assert_eq!(receives.arrived(immediate(grant, 0, 3, 0), 10), Ok(Arrival::Part));
        assert_eq!(receives.arrived(immediate(grant, 0, 3, 2), 0), Ok(Arrival::Part));
        assert_eq!(test(&mut receives, grant.slot), Ok(None));
        assert_eq!(receives.delivered(), 0);
        assert_eq!(receives.arrived(immediate(grant, 0, 3, 1), 5), Ok(Arrival::Whole));
        assert_eq!(test(&mut receives, grant.slot), Ok(Some(vec![3 * CHUNK + 15])));
        assert_eq!(test(&mut receives, grant.slot), Err(NotInFlight(grant.slot)));
        assert_eq!((receives.open(), receives.delivered()), (0, 1));
    }

    #[test]
    fn a_group_is_done_when_all_its_parts_are() {
        let mut receives = Receives::new(CHUNK);
        let grant = receives.grant([8, 8, 8].into_iter(), false).unwrap();
        for (part, bytes) in [(2, 0), (0, 8)] {
            assert_eq!(receives.arrived(immediate(grant, part, 1, 0), bytes), Ok(Arrival::Part));
            assert_eq!(test(&mut receives, grant.slot), Ok(None));
        }
        assert_eq!(receives.arrived(immediate(grant, 1, 1, 0), 3), Ok(Arrival::Whole));
        assert_eq!(test(&mut receives, grant.slot), Ok(Some(vec![8, 3, 0])));
    }

    #[test]
    fn an_optional_receive_is_told_at_once_and_keeps_its_slot() {
        let mut receives = Receives::new(CHUNK);
        let grant = receives.grant([64].into_iter(), true).unwrap();
        assert_eq!(test(&mut receives, grant.slot), Ok(Some(vec![64])));
        assert_eq!(test(&mut receives, grant.slot), Err(NotInFlight(grant.slot)));
        for _ in 1..SLOTS {
            let other = one(&mut receives, 1);
            receives.arrived(immediate(other, 0, 1, 0), 1).unwrap();
            test(&mut receives, other.slot).unwrap().unwrap();
        }
        assert!(!receives.has_room(), "the slot's immediate has not come");
        assert_eq!(receives.grant([1].into_iter(), false), None);
        assert_eq!(receives.arrived(immediate(grant, 0, 1, 0), 64), Ok(Arrival::Whole));
        assert_eq!(one(&mut receives, 1).slot, grant.slot);
    }

    #[test]
    fn what_an_earlier_use_left_behind_is_dropped() {
        let mut receives = Receives::new(CHUNK);
        let grant = one(&mut receives, 8);
        let old = Immediate { generation: 5, ..immediate(grant, 0, 1, 0) };
        assert_eq!(receives.arrived(old, 8), Ok(Arrival::Stale));
        let free = Immediate { slot: 9, ..immediate(grant, 0, 1, 0) };
        assert_eq!(receives.arrived(free, 8), Ok(Arrival::Stale));
        assert_eq!(receives.stale(), 2);
        assert_eq!(test(&mut receives, grant.slot), Ok(None));
    }

    #[test]
    fn a_lying_peer_is_caught() {
        let mut receives = Receives::new(CHUNK);
        let grant = receives.grant([8, 8].into_iter(), false).unwrap();
        assert_eq!(receives.arrived(immediate(grant, 2, 1, 0), 8), Err(Violation::Part { part: 2 }));
        assert_eq!(receives.arrived(immediate(grant, 0, 1, 0), 9), Err(Violation::Overrun { bytes: 9, room: 8 }));
        assert_eq!(receives.arrived(immediate(grant, 0, 1, 1), 0), Err(Violation::Overrun { bytes: 4096, room: 8 }));
        receives.arrived(immediate(grant, 0, 2, 0), 4).unwrap();
        assert_eq!(receives.arrived(immediate(grant, 0, 3, 0), 4), Err(Violation::Shares { before: 2, now: 3 }));
        receives.arrived(immediate(grant, 0, 2, 0), 4).unwrap();
        assert_eq!(receives.arrived(immediate(grant, 0, 2, 0), 0), Err(Violation::Part { part: 0 }));
        assert_eq!(test(&mut receives, 40), Err(NotInFlight(40)));
    }
}
