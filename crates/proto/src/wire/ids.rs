//! Numbers of lanes, rails and slots, as types whose range is checked once, when a value is
//! created. A rail is a port of a host, and a lane is a rail within one connection. A slot is one
//! of the receives in flight.

use super::{MAX_RAILS, SLOTS};
use std::fmt;

/// Number of a lane within its connection, from 0 and below [`MAX_RAILS`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct LaneId(LaneIndex);

/// An enumeration, so that indexing an array with one element for each lane needs no bounds check.
///
/// With the enumeration in place of an integer, a message takes fewer instructions over one rail,
/// and over four rails with eight messages in flight. Over four rails with one message in flight,
/// it takes 8 instructions more (of 1,206 in total). All 8 are in [`LaneId::next`]. Of five
/// measured forms of that function, the present one is the cheapest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(u8)]
enum LaneIndex {
    #[default]
    L0,
    L1,
    L2,
    L3,
    L4,
    L5,
    L6,
    L7,
}

const LANES: &[LaneId; MAX_RAILS] = &[
    LaneId(LaneIndex::L0),
    LaneId(LaneIndex::L1),
    LaneId(LaneIndex::L2),
    LaneId(LaneIndex::L3),
    LaneId(LaneIndex::L4),
    LaneId(LaneIndex::L5),
    LaneId(LaneIndex::L6),
    LaneId(LaneIndex::L7),
];

/// For each lane, the lane that follows it. Lane 0 follows the last lane.
const AFTER: &[LaneId; MAX_RAILS] = &{
    let mut after = *LANES;
    let mut number = 0;
    while number < MAX_RAILS {
        after[number] = LANES[(number + 1) % MAX_RAILS];
        number += 1;
    }
    after
};

impl LaneId {
    /// Returns the lane with this number, or `None` if the number is not below [`MAX_RAILS`].
    #[inline(always)]
    pub const fn new(number: usize) -> Option<Self> {
        // A match instead of an index into LANES: it compiles to one comparison.
        Some(Self(match number {
            0 => LaneIndex::L0,
            1 => LaneIndex::L1,
            2 => LaneIndex::L2,
            3 => LaneIndex::L3,
            4 => LaneIndex::L4,
            5 => LaneIndex::L5,
            6 => LaneIndex::L6,
            7 => LaneIndex::L7,
            _ => return None,
        }))
    }

    /// Iterates in order over the lanes of a connection with `count` lanes.
    #[inline(always)]
    pub fn all(count: usize) -> impl DoubleEndedIterator<Item = Self> + ExactSizeIterator + Clone {
        LANES[..count.min(MAX_RAILS)].iter().copied()
    }

    /// Returns the next lane in round-robin order among a connection's `count` lanes.
    #[inline(always)]
    pub const fn next(self, count: usize) -> Self {
        // A table, because to add one to the number and check the result would take two
        // comparisons.
        let after = AFTER[self.index()];
        if after.index() < count {
            after
        } else {
            Self(LaneIndex::L0)
        }
    }

    /// Returns the first lane of a set of [`LaneId::bit`]s, or `None` if the set is empty.
    pub const fn first_in(set: u8) -> Option<Self> {
        Self::new(set.trailing_zeros() as usize)
    }

    /// Returns the number, as an index into arrays with an element per lane.
    #[inline(always)]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// Returns the lane's bit in a set of lanes.
    #[inline(always)]
    pub const fn bit(self) -> u8 {
        1 << self.0 as u8
    }

    pub(super) const fn byte(self) -> u8 {
        self.0 as u8
    }
}

/// Number of a rail on its host, from 0. It is the same in all connections. The number of the
/// rail's lane may differ between connections, because a connection may leave rails out. A `RailId`
/// may also be a peer's number for one of the peer's rails. Such a number needs no range check: it
/// is only compared with others, and is never the index into an array.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RailId(u8);

impl RailId {
    /// Returns the rail with this number, or `None` if the number is above 255.
    #[inline(always)]
    pub const fn new(number: usize) -> Option<Self> {
        if number <= u8::MAX as usize {
            Some(Self(number as u8))
        } else {
            None
        }
    }

    /// Iterates in order over the rails of a host with `count` rails.
    pub fn all(count: usize) -> impl ExactSizeIterator<Item = Self> {
        (0..=u8::MAX).take(count).map(Self)
    }

    /// Returns the number, as an index into arrays with an element per rail.
    #[inline(always)]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    pub(super) const fn of_byte(byte: u8) -> Self {
        Self(byte)
    }

    pub(super) const fn byte(self) -> u8 {
        self.0
    }
}

/// Number of a receive in flight, below [`SLOTS`]. It is also the receive's request number, which
/// the caller gets. Receives use the slots in round-robin order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(u8);

const _: () = assert!(SLOTS == u32::BITS as usize);

impl Slot {
    /// Returns the slot with this number, or `None` if the number is not below [`SLOTS`].
    #[inline(always)]
    pub const fn new(number: u16) -> Option<Self> {
        if (number as usize) < SLOTS {
            Some(Self(number as u8))
        } else {
            None
        }
    }

    /// Returns the slot of a connection's receive number `sequence`, from 0.
    #[inline(always)]
    pub const fn of(sequence: u64) -> Self {
        Self((sequence % SLOTS as u64) as u8)
    }

    /// Returns the slot in the low five bits of a field. Higher bits are ignored.
    #[inline(always)]
    pub const fn of_bits(bits: u32) -> Self {
        Self((bits % SLOTS as u32) as u8)
    }

    /// Iterates over all slots in order.
    pub fn all() -> impl ExactSizeIterator<Item = Self> {
        (0..SLOTS as u8).map(Self)
    }

    /// Returns the first slot of a set of [`Slot::bit`]s, or `None` if the set is empty.
    #[inline(always)]
    pub const fn first_in(set: u32) -> Option<Self> {
        Self::new(set.trailing_zeros() as u16)
    }

    /// Returns the number, as an index into arrays with an element per slot.
    #[inline(always)]
    pub const fn index(self) -> usize {
        // The number is below SLOTS in any case. With the modulo, the compiler knows this and drops
        // bounds checks.
        self.0 as usize % SLOTS
    }

    /// Returns the slot's bit in a set of slots.
    #[inline(always)]
    pub const fn bit(self) -> u32 {
        1 << (self.0 & 31)
    }

    /// Returns the number, as a request number.
    #[inline(always)]
    pub const fn number(self) -> u16 {
        self.0 as u16
    }
}

macro_rules! written_as_number {
    ($id:ty) => {
        impl fmt::Display for $id {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.index(), f)
            }
        }

        impl fmt::Debug for $id {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.index(), f)
            }
        }
    };
}

written_as_number!(LaneId);
written_as_number!(RailId);
written_as_number!(Slot);

#[cfg(test)]
pub(crate) fn lane(number: usize) -> LaneId {
    LaneId::new(number).unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_no_more_lanes_than_a_connection_can_have() {
        assert_eq!(
            (LaneId::new(MAX_RAILS), LaneId::new(usize::MAX)),
            (None, None)
        );
        let all: Vec<usize> = LaneId::all(usize::MAX).map(LaneId::index).collect();
        assert_eq!(all, (0..MAX_RAILS).collect::<Vec<_>>());
        assert_eq!(
            LaneId::all(MAX_RAILS).fold(0, |bits, lane| bits | lane.bit()),
            u8::MAX
        );
        assert_eq!((LaneId::all(3).len(), LaneId::all(0).next()), (3, None));
    }

    #[test]
    fn lanes_take_turns() {
        let turns = |count| {
            (0..4).scan(LaneId::default(), move |lane, _| {
                Some(std::mem::replace(lane, lane.next(count)))
            })
        };
        assert_eq!(
            turns(3).map(LaneId::index).collect::<Vec<_>>(),
            [0, 1, 2, 0]
        );
        assert_eq!(turns(1).map(LaneId::index).collect::<Vec<_>>(), [0; 4]);
        assert_eq!(lane(7).next(8), lane(0));
        assert_eq!(lane(7).next(usize::MAX), lane(0));
    }

    #[test]
    fn a_rail_has_a_number_that_a_message_can_name() {
        assert_eq!(
            (RailId::new(255).map(RailId::index), RailId::new(256)),
            (Some(255), None)
        );
        assert_eq!(
            RailId::all(3).map(RailId::index).collect::<Vec<_>>(),
            [0, 1, 2]
        );
        assert!(RailId::all(1000).last() == RailId::new(255) && RailId::all(256).len() == 256);
    }

    #[test]
    fn receives_take_the_slots_in_turn() {
        assert_eq!(
            (
                Slot::new(31).map(Slot::number),
                Slot::new(32),
                Slot::new(u16::MAX)
            ),
            (Some(31), None, None)
        );
        assert_eq!(
            (Slot::of(31), Slot::of(32), Slot::of(u64::MAX)),
            (Slot(31), Slot(0), Slot(31))
        );
        assert_eq!(
            (Slot::of_bits(31), Slot::of_bits(u32::MAX << 5 | 7)),
            (Slot(31), Slot(7))
        );
        assert!(Slot::all().eq((0..32).map(Slot)));
        assert_eq!(
            (
                Slot::first_in(0b1100),
                Slot::first_in(1 << 31),
                Slot::first_in(0)
            ),
            (Some(Slot(2)), Some(Slot(31)), None)
        );
        assert_eq!(Slot::all().fold(0, |set, slot| set | slot.bit()), u32::MAX);
    }

    #[test]
    fn ids_are_written_as_their_numbers() {
        assert_eq!(
            format!("{} {:?} {:?}", lane(3), lane(3), Some(lane(5))),
            "3 3 Some(5)"
        );
        assert_eq!(
            format!("{} {:?} {} {:?}", RailId(40), RailId(41), Slot(1), Slot(2)),
            "40 41 1 2"
        );
    }
}
