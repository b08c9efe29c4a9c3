//! The receiver's side: granted receives, and the shares of each that have arrived.

mod progress;

use super::NotInFlight;
use crate::wire::control::{OpenReceive, Received};
use crate::wire::ids::{LaneId, Slot};
use crate::wire::immediate::Immediate;
use crate::wire::{PARTS, SLOTS};

/// All receives of one connection.
#[derive(Debug)]
pub struct Receives {
    slots: [SlotState; SLOTS],
    /// The parts of each slot's receive; entries beyond its part count are stale.
    parts: [[Part; PARTS]; SLOTS],
    /// Lane that carried each slot's last clear-to-send.
    lanes: [LaneId; SLOTS],
    /// Slots (one bit each) whose clear-to-send must be resent: lane lost, or keys changed.
    owed: u32,
    /// The slots of `owed` whose lane still works and whose keys have changed. The resend must take
    /// the same lane: on another one it could arrive before the first clear-to-send.
    bound: u32,
    /// Slots whose clear-to-send is being resent. Not granted again before that is done, because a
    /// late resend could overwrite the entry of the slot's next receive.
    repeating: u32,
    next: u64,
    open: usize,
    chunk_bytes: u64,
}

#[derive(Debug, Clone, Copy)]
enum SlotState {
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

/// Completion notification of a receive that NCCL is still to get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Claim {
    /// Due when all bytes have arrived.
    Pending,
    /// Due immediately, because the caller reads flags in the data.
    Optional,
    /// Already given; the slot waits for its last immediate.
    Told,
}

#[derive(Debug, Clone, Copy, Default)]
struct Part {
    room: u64,
    bytes: u64,
    /// Bit set of the shares that have arrived.
    seen: u8,
    /// Number of shares; 0 before the first has arrived.
    shares: u8,
}

impl Part {
    #[inline(always)]
    fn is_whole(&self) -> bool {
        // A single share needs no counting. In 16 bits because eight shares fill all of `seen`.
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

/// A clear-to-send that must be resent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owed {
    /// The receive.
    pub grant: Grant,
    /// Number of its parts.
    pub parts: usize,
    /// The lane that must carry it, if only one will do.
    pub lane: Option<LaneId>,
}

/// Result of an immediate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// Part of a receive has arrived; more is missing.
    Part,
    /// A receive is complete.
    Whole,
    /// The immediate is from an earlier use of the slot, or repeats one without bytes.
    Stale,
}

/// An immediate that the protocol does not allow. The peer is broken or malicious.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The receive has no such part, or the part has no such share.
    #[error("unexpected share {share} of part {part}")]
    Part {
        /// The part named.
        part: u8,
        /// The share of it.
        share: u8,
    },
    /// The share has already arrived, and bytes were written for it again.
    #[error("share {share} of part {part} came again, with {bytes} bytes")]
    Again {
        /// The part.
        part: u8,
        /// Its share.
        share: u8,
        /// Bytes written the second time.
        bytes: u32,
    },
    /// Two immediates of one message disagree.
    #[error("message of {now} shares, announced as {before}")]
    Shares {
        /// Number of shares in the first immediate.
        before: u8,
        /// Number of shares in this one.
        now: u8,
    },
    /// The message is larger than the receive.
    #[error("{bytes} bytes for a receive of {room} bytes")]
    Overrun {
        /// Bytes that arrived.
        bytes: u64,
        /// Size of the receive's buffer.
        room: u64,
    },
}

impl Receives {
    /// Returns an empty set of receives. `chunk_bytes` is the size that the connection agreed on.
    pub fn new(chunk_bytes: u64) -> Self {
        Self {
            slots: [SlotState::Free; SLOTS],
            parts: [[Part::default(); PARTS]; SLOTS],
            lanes: [LaneId::default(); SLOTS],
            owed: 0,
            bound: 0,
            repeating: 0,
            next: 0,
            open: 0,
            chunk_bytes,
        }
    }

    /// Size of every write of a share except the last.
    pub fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    /// Returns true if a receive can be granted now.
    #[inline(always)]
    pub fn has_room(&self) -> bool {
        let slot = Slot::of(self.next);
        matches!(self.slots[slot.index()], SlotState::Free) && self.repeating & slot.bit() == 0
    }

    /// Number of receives that wait for bytes.
    #[inline(always)]
    pub fn open(&self) -> usize {
        self.open
    }

    /// Takes the next slot for a receive with the given part sizes (1 to [`PARTS`] of them), whose
    /// clear-to-send `lane` carries. `None` while that slot is in use. An optional receive is
    /// reported done before its bytes have arrived.
    #[inline(always)]
    pub fn grant(&mut self, rooms: impl ExactSizeIterator<Item = u64>, optional: bool, lane: LaneId) -> Option<Grant> {
        if !self.has_room() {
            return None;
        }
        let count = rooms.len().min(PARTS) as u8;
        let sequence = self.next;
        let slot = Slot::of(sequence);
        for (part, room) in self.parts[slot.index()].iter_mut().zip(rooms) {
            *part = Part { room, bytes: 0, seen: 0, shares: 0 };
        }
        let claim = if optional { Claim::Optional } else { Claim::Pending };
        self.slots[slot.index()] = SlotState::Granted(Granted { sequence, count, unfinished: count, claim });
        self.lanes[slot.index()] = lane;
        // A resend that the slot's previous receive had pending is no longer needed.
        self.owed &= !slot.bit();
        self.bound &= !slot.bit();
        self.next += 1;
        self.open += 1;
        Some(Grant { slot, sequence })
    }

    /// Records an immediate and the bytes of the write that carried it.
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
    /// Linux' soft-RoCE can repeat an immediate without bytes: when acknowledgements are lost, its
    /// requester may consider a write acknowledged but incomplete. It then restarts the write
    /// behind its last byte, with its immediate and a new packet number (`req_retry` and
    /// `retry_first_write_send` in drivers/infiniband/sw/rxe/rxe_req.c). It writes nothing.
    #[cold]
    #[inline(never)]
    fn arrived_again(&self, immediate: Immediate, bytes: u32) -> Result<Arrival, Violation> {
        let Immediate { slot, part, share, shares, .. } = immediate;
        let known = &self.parts[slot.index()][usize::from(part) % PARTS];
        let has_come = match &self.slots[slot.index()] {
            SlotState::Granted(granted) => part < granted.count && share < shares && known.seen & 1 << (share & 7) != 0,
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
            SlotState::Granted(g) if Immediate::generation_of(g.sequence) == immediate.generation => g,
            _ => return Ok(Arrival::Stale),
        };
        let part = &mut self.parts[at][usize::from(immediate.part) % PARTS];
        let bit = 1 << (immediate.share & 7);
        if immediate.part >= granted.count || immediate.share >= immediate.shares || part.seen & bit != 0 {
            return Err(Violation::Part { part: immediate.part, share: immediate.share });
        }
        if part.shares != 0 && part.shares != immediate.shares {
            return Err(Violation::Shares { before: part.shares, now: immediate.shares });
        }
        let total = part.bytes + u64::from(immediate.leads) * self.chunk_bytes + u64::from(bytes);
        if total > part.room {
            return Err(Violation::Overrun { bytes: total, room: part.room });
        }
        (part.bytes, part.shares, part.seen) = (total, immediate.shares, part.seen | bit);
        if !part.is_whole() {
            return Ok(Arrival::Part);
        }
        granted.unfinished -= 1;
        if granted.unfinished > 0 {
            return Ok(Arrival::Part);
        }
        if granted.claim == Claim::Told {
            *state = SlotState::Free;
        }
        self.open -= 1;
        Ok(Arrival::Whole)
    }

    /// Returns true if a receive is finished. Then calls `tell` with the index and size of each
    /// part, and frees the slot. An optional receive is finished immediately, reports its buffer
    /// sizes, and keeps its slot until its bytes have arrived.
    ///
    /// # Errors
    /// [`NotInFlight`].
    #[inline(always)]
    pub fn test(&mut self, slot: Slot, mut tell: impl FnMut(usize, u64)) -> Result<bool, NotInFlight> {
        let state = &mut self.slots[slot.index()];
        let SlotState::Granted(granted) = state else { return Err(NotInFlight(slot.number())) };
        let whole = granted.unfinished == 0;
        match granted.claim {
            Claim::Told => return Err(NotInFlight(slot.number())),
            Claim::Pending if !whole => return Ok(false),
            Claim::Pending | Claim::Optional => {}
        }
        let size = |part: &Part| if whole { part.bytes } else { part.room };
        let [first, others @ ..] = &self.parts[slot.index()];
        tell(0, size(first));
        // Most receives are not groups.
        for index in 1..usize::from(granted.count).min(PARTS) {
            tell(index, size(&others[index - 1]));
        }
        if whole {
            *state = SlotState::Free;
        } else {
            granted.claim = Claim::Told;
        }
        Ok(true)
    }

    /// Lists the arrived shares, for a sender that must know what a lost rail delivered.
    pub fn received(&self) -> Received {
        let open = self.slots.iter().zip(&self.parts).filter_map(|(state, parts)| match state {
            SlotState::Granted(g) if g.unfinished > 0 => {
                Some(OpenReceive { sequence: g.sequence, shares: parts.map(|part| part.seen) })
            }
            _ => None,
        });
        Received { granted: self.next, open: open.collect() }
    }

    /// Marks the pending clear-to-sends of a lost lane, stopped on both sides, for a resend.
    pub fn lost(&mut self, lane: LaneId) {
        for ((slot, state), by) in Slot::all().zip(&self.slots).zip(self.lanes) {
            if by != lane {
                continue;
            }
            self.repeating &= !slot.bit();
            self.bound &= !slot.bit();
            if matches!(state, SlotState::Granted(granted) if granted.unfinished > 0) {
                self.owed |= slot.bit();
            }
        }
    }

    /// Marks the clear-to-sends of all pending receives for a resend, because their keys have
    /// changed. `tell` gets each receive and its number of parts before any is resent.
    pub fn renew(&mut self, mut tell: impl FnMut(Grant, usize)) {
        for (slot, state) in Slot::all().zip(&self.slots) {
            if let SlotState::Granted(Granted { sequence, count, unfinished: 1.., .. }) = *state {
                // A slot in `owed` already has a lost lane.
                self.bound |= slot.bit() & !self.owed;
                self.owed |= slot.bit();
                tell(Grant { slot, sequence }, usize::from(count));
            }
        }
    }

    /// Returns a clear-to-send to resend now, if any, that is not being resent already. `takes`
    /// checks the required lane for room, or all lanes for `None`. The caller posts the
    /// clear-to-send, then calls [`Receives::repeats`].
    pub fn next_owed(&mut self, mut takes: impl FnMut(Option<LaneId>) -> bool) -> Option<Owed> {
        let mut left = self.owed & !self.repeating;
        while let Some(slot) = Slot::first_in(left) {
            left &= !slot.bit();
            let lane = (self.bound & slot.bit() != 0).then(|| self.lanes[slot.index()]);
            match self.slots[slot.index()] {
                SlotState::Granted(Granted { sequence, count, unfinished: 1.., .. }) => {
                    if takes(lane) {
                        return Some(Owed { grant: Grant { slot, sequence }, parts: usize::from(count), lane });
                    }
                }
                _ => {
                    self.owed &= !slot.bit();
                    self.bound &= !slot.bit();
                }
            }
        }
        None
    }

    /// Returns true if a clear-to-send must be resent.
    pub fn is_owing(&self) -> bool {
        let waits = |slot: Slot| matches!(self.slots[slot.index()], SlotState::Granted(g) if g.unfinished > 0);
        Slot::all().any(|slot| self.owed & slot.bit() != 0 && waits(slot))
    }

    /// Records that a clear-to-send was posted again on `lane`.
    pub fn repeats(&mut self, slot: Slot, lane: LaneId) {
        self.owed &= !slot.bit();
        self.bound &= !slot.bit();
        self.repeating |= slot.bit();
        self.lanes[slot.index()] = lane;
    }

    /// Records that the resend has completed, so the sender has the entry.
    pub fn repeated(&mut self, slot: Slot) {
        self.repeating &= !slot.bit();
    }

    /// Number of the oldest receive that waits for bytes, and of the next one to be granted.
    pub fn span(&self) -> (u64, u64) {
        (self.delivered(), self.next)
    }

    /// Number of receives, counted from the first, that have all their bytes.
    pub fn delivered(&self) -> u64 {
        let waiting = self.slots.iter().filter_map(|state| match state {
            SlotState::Granted(g) if g.unfinished > 0 => Some(g.sequence),
            _ => None,
        });
        waiting.min().unwrap_or(self.next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::ids::lane;

    const CHUNK: u64 = 4096;

    /// The last write of share `share.0` of `share.1`.
    fn immediate(grant: Grant, part: u8, share: (u8, u8), leads: u16) -> Immediate {
        let (generation, (share, shares)) = (Immediate::generation_of(grant.sequence), share);
        Immediate { slot: grant.slot, part, generation, shares, share, leads }
    }

    /// The sizes of a finished receive.
    fn test(receives: &mut Receives, slot: Slot) -> Result<Option<Vec<u64>>, NotInFlight> {
        let mut sizes = Vec::new();
        let done = receives.test(slot, |part, bytes| {
            assert_eq!(part, sizes.len());
            sizes.push(bytes);
        })?;
        Ok(done.then_some(sizes))
    }

    fn one(receives: &mut Receives, room: u64) -> Grant {
        receives.grant([room].into_iter(), false, lane(0)).unwrap()
    }

    #[test]
    fn shares_in_any_order_make_the_true_size() {
        let mut receives = Receives::new(CHUNK);
        let grant = one(&mut receives, 100_000);
        assert_eq!(receives.arrived(&immediate(grant, 0, (2, 3), 0), 10), Ok(Arrival::Part));
        assert_eq!(receives.arrived(&immediate(grant, 0, (0, 3), 2), 0), Ok(Arrival::Part));
        assert_eq!(test(&mut receives, grant.slot), Ok(None));
        assert_eq!(receives.delivered(), 0);
        assert_eq!(receives.arrived(&immediate(grant, 0, (1, 3), 1), 5), Ok(Arrival::Whole));
        assert_eq!(test(&mut receives, grant.slot), Ok(Some(vec![3 * CHUNK + 15])));
        assert_eq!(test(&mut receives, grant.slot), Err(NotInFlight(grant.slot.number())));
        assert_eq!((receives.open(), receives.delivered()), (0, 1));
    }

    #[test]
    fn a_group_is_done_when_all_its_parts_are() {
        let mut receives = Receives::new(CHUNK);
        let grant = receives.grant([8, 8, 8].into_iter(), false, lane(0)).unwrap();
        for (part, bytes) in [(2, 0), (0, 8)] {
            assert_eq!(receives.arrived(&immediate(grant, part, (0, 1), 0), bytes), Ok(Arrival::Part));
            assert_eq!(test(&mut receives, grant.slot), Ok(None));
        }
        assert_eq!(receives.arrived(&immediate(grant, 1, (0, 1), 0), 3), Ok(Arrival::Whole));
        assert_eq!(test(&mut receives, grant.slot), Ok(Some(vec![8, 3, 0])));
    }

    #[test]
    fn an_optional_receive_is_told_at_once_and_keeps_its_slot() {
        let mut receives = Receives::new(CHUNK);
        let grant = receives.grant([64].into_iter(), true, lane(0)).unwrap();
        assert_eq!(test(&mut receives, grant.slot), Ok(Some(vec![64])));
        assert_eq!(test(&mut receives, grant.slot), Err(NotInFlight(grant.slot.number())));
        for _ in 1..SLOTS {
            let other = one(&mut receives, 1);
            receives.arrived(&immediate(other, 0, (0, 1), 0), 1).unwrap();
            test(&mut receives, other.slot).unwrap().unwrap();
        }
        assert!(!receives.has_room(), "the slot's immediate has not arrived");
        assert_eq!(receives.grant([1].into_iter(), false, lane(0)), None);
        assert_eq!(receives.arrived(&immediate(grant, 0, (0, 1), 0), 64), Ok(Arrival::Whole));
        assert_eq!(one(&mut receives, 1).slot, grant.slot);
    }

    #[test]
    fn what_an_earlier_use_left_behind_is_dropped() {
        let mut receives = Receives::new(CHUNK);
        let grant = one(&mut receives, 8);
        let old = Immediate { generation: 5, ..immediate(grant, 0, (0, 1), 0) };
        assert_eq!(receives.arrived(&old, 8), Ok(Arrival::Stale));
        let free = Immediate { slot: Slot::of(9), ..immediate(grant, 0, (0, 1), 0) };
        assert_eq!(receives.arrived(&free, 8), Ok(Arrival::Stale));
        assert_eq!(test(&mut receives, grant.slot), Ok(None));
    }

    #[test]
    fn a_lying_peer_is_caught() {
        let mut receives = Receives::new(CHUNK);
        let grant = receives.grant([8, 8].into_iter(), false, lane(0)).unwrap();
        let mut say = |part, share, leads, bytes| receives.arrived(&immediate(grant, part, share, leads), bytes);
        assert_eq!(say(2, (0, 1), 0, 8), Err(Violation::Part { part: 2, share: 0 }));
        assert_eq!(say(0, (1, 1), 0, 8), Err(Violation::Part { part: 0, share: 1 }));
        assert_eq!(say(0, (0, 1), 0, 9), Err(Violation::Overrun { bytes: 9, room: 8 }));
        assert_eq!(say(0, (0, 1), 1, 0), Err(Violation::Overrun { bytes: 4096, room: 8 }));
        assert_eq!(say(0, (1, 2), 0, 4), Ok(Arrival::Part));
        assert_eq!(say(0, (0, 3), 0, 4), Err(Violation::Shares { before: 2, now: 3 }));
        let again = |share, bytes| Err(Violation::Again { part: 0, share, bytes });
        assert_eq!(say(0, (1, 2), 0, 4), again(1, 4));
        assert_eq!(say(0, (1, 3), 0, 0), again(1, 0), "the number of shares differs");
        assert_eq!(say(0, (0, 2), 0, 4), Ok(Arrival::Part));
        assert_eq!(say(0, (0, 2), 0, 1), again(0, 1));
        assert_eq!(say(0, (2, 3), 0, 0), Err(Violation::Shares { before: 2, now: 3 }));
        assert_eq!(test(&mut receives, Slot::of(9)), Err(NotInFlight(9)));
    }

    #[test]
    fn a_share_that_comes_again_without_bytes_counts_for_nothing() {
        let mut receives = Receives::new(CHUNK);
        let grant = one(&mut receives, 8);
        let mut say = |share, bytes| receives.arrived(&immediate(grant, 0, (share, 2), 0), bytes);
        assert_eq!(say(1, 4), Ok(Arrival::Part));
        for _ in 0..100 {
            assert_eq!(say(1, 0), Ok(Arrival::Stale), "while the other share is missing");
        }
        assert_eq!(say(0, 3), Ok(Arrival::Whole));
        assert_eq!(say(0, 0), Ok(Arrival::Stale), "and when all shares have arrived");
        assert_eq!(test(&mut receives, grant.slot), Ok(Some(vec![7])));
    }

    #[test]
    fn what_a_slots_last_receive_was_owed_its_next_one_is_not() {
        let mut receives = Receives::new(CHUNK);
        let first = one(&mut receives, 8);
        receives.lost(lane(0));
        receives.arrived(&immediate(first, 0, (0, 1), 0), 8).unwrap();
        test(&mut receives, first.slot).unwrap().unwrap();
        for _ in 1..SLOTS {
            let other = receives.grant([8].into_iter(), false, lane(1)).unwrap();
            receives.arrived(&immediate(other, 0, (0, 1), 0), 8).unwrap();
            test(&mut receives, other.slot).unwrap().unwrap();
        }
        let again = receives.grant([8].into_iter(), false, lane(1)).unwrap();
        assert_eq!((again.slot, receives.next_owed(|_| true)), (first.slot, None));
    }

    #[test]
    fn eight_shares_are_all_there_are() {
        let mut receives = Receives::new(CHUNK);
        let grant = one(&mut receives, 100);
        for share in 0..7 {
            assert_eq!(receives.arrived(&immediate(grant, 0, (share, 8), 0), 1), Ok(Arrival::Part));
        }
        assert!(receives.received().has(0, 0, 6) && !receives.received().has(0, 0, 7));
        assert_eq!(receives.arrived(&immediate(grant, 0, (7, 8), 0), 1), Ok(Arrival::Whole));
        assert!(receives.received().has(0, 0, 7) && !receives.received().has(1, 0, 0));
    }

    #[test]
    fn what_went_by_a_lost_lane_goes_once_more_and_holds_its_slot() {
        let mut receives = Receives::new(CHUNK);
        let first = receives.grant([8, 8].into_iter(), false, lane(1)).unwrap();
        let by_other = receives.grant([8].into_iter(), false, lane(0)).unwrap();
        let done = receives.grant([8].into_iter(), false, lane(1)).unwrap();
        receives.arrived(&immediate(done, 0, (0, 1), 0), 8).unwrap();
        receives.lost(lane(1));
        assert_eq!(receives.next_owed(|_| true), Some(Owed { grant: first, parts: 2, lane: None }));
        receives.repeats(first.slot, lane(0));
        assert_eq!(receives.next_owed(|_| true), None, "one is done, and one used another lane");
        for part in [0, 1] {
            receives.arrived(&immediate(first, part, (0, 1), 0), 8).unwrap();
        }
        receives.arrived(&immediate(by_other, 0, (0, 1), 0), 8).unwrap();
        (0..3).map(Slot::of).for_each(|slot| assert!(test(&mut receives, slot).unwrap().is_some()));
        for _ in 3..SLOTS {
            let other = one(&mut receives, 1);
            receives.arrived(&immediate(other, 0, (0, 1), 0), 1).unwrap();
            test(&mut receives, other.slot).unwrap().unwrap();
        }
        assert!(!receives.has_room(), "the slot's clear-to-send is still under way");
        receives.repeated(first.slot);
        assert_eq!(one(&mut receives, 1).slot, first.slot);
        receives.lost(lane(0));
        assert!(receives.next_owed(|_| true).is_some_and(|owed| owed.grant.sequence == SLOTS as u64));
    }

    #[test]
    fn what_has_other_keys_goes_once_more_by_its_own_lane() {
        let mut receives = Receives::new(CHUNK);
        let by_one = receives.grant([8].into_iter(), false, lane(1)).unwrap();
        let by_other = receives.grant([8, 8].into_iter(), false, lane(2)).unwrap();
        let by_lost = receives.grant([8].into_iter(), false, lane(0)).unwrap();
        let done = receives.grant([8].into_iter(), false, lane(1)).unwrap();
        receives.arrived(&immediate(done, 0, (0, 1), 0), 8).unwrap();
        receives.lost(lane(0));
        let mut told = Vec::new();
        receives.renew(|grant, parts| told.push((grant, parts)));
        assert_eq!(told, [(by_one, 1), (by_other, 2), (by_lost, 1)]);
        assert!(receives.is_owing());
        let owed = receives.next_owed(|at| at == Some(lane(2)));
        assert_eq!(owed, Some(Owed { grant: by_other, parts: 2, lane: Some(lane(2)) }), "lane 1 has no room");
        receives.repeats(by_other.slot, lane(2));
        assert_eq!(receives.next_owed(|at| at.is_none()), Some(Owed { grant: by_lost, parts: 1, lane: None }));
        receives.renew(|_, _| {});
        assert_eq!(receives.next_owed(|at| at == Some(lane(2))), None, "the resend before is still under way");
        receives.repeated(by_other.slot);
        assert!(receives.next_owed(|at| at == Some(lane(2))).is_some());
        receives.lost(lane(2));
        assert_eq!(receives.next_owed(|at| at.is_none()).map(|owed| owed.grant), Some(by_other), "by any lane now");
    }
}
