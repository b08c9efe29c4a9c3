//! Numbers that name a lane.
//!
//! Each is checked once, where it comes into being: as a control message is read, or as the lanes of a connection are counted.

use super::MAX_RAILS;
use std::fmt;

/// Number of a lane within its connection, from 0 and below [`MAX_RAILS`]. A connection may have fewer lanes than that.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct LaneId(u8);

const _: () = assert!(MAX_RAILS == u8::BITS as usize);

impl LaneId {
    /// The lane of this number; `None` where no connection has so many.
    #[inline(always)]
    pub const fn new(number: usize) -> Option<Self> {
        if number < MAX_RAILS { Some(Self(number as u8)) } else { None }
    }

    /// The lanes of a connection that has `count` of them, in order.
    #[inline(always)]
    pub fn all(count: usize) -> impl DoubleEndedIterator<Item = Self> + ExactSizeIterator + Clone {
        (0..count.min(MAX_RAILS) as u8).map(Self)
    }

    /// The one whose turn comes after this one's, of the `count` lanes of a connection.
    #[inline(always)]
    pub const fn next(self, count: usize) -> Self {
        let next = self.index() + 1;
        if next < count { Self((next % MAX_RAILS) as u8) } else { Self(0) }
    }

    /// The number, for what there is one of for each lane.
    #[inline(always)]
    pub const fn index(self) -> usize {
        // It is below that already. Said here, arrays of MAX_RAILS are indexed without a check.
        self.0 as usize % MAX_RAILS
    }

    /// The lane's bit in a set of lanes.
    #[inline(always)]
    pub const fn bit(self) -> u8 {
        1 << (self.0 & 7)
    }

    /// The number, as control messages carry it.
    #[inline(always)]
    pub(super) const fn byte(self) -> u8 {
        self.0
    }
}

/// Alone, in texts for people and in those of `Debug`.
impl fmt::Display for LaneId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for LaneId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// A lane that there can be, for tests.
#[cfg(test)]
pub(crate) fn lane(number: usize) -> LaneId {
    LaneId::new(number).unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_no_more_lanes_than_a_connection_can_have() {
        assert_eq!((LaneId::new(MAX_RAILS), LaneId::new(usize::MAX)), (None, None));
        let all: Vec<usize> = LaneId::all(usize::MAX).map(LaneId::index).collect();
        assert_eq!(all, (0..MAX_RAILS).collect::<Vec<_>>());
        assert_eq!(LaneId::all(MAX_RAILS).fold(0, |bits, lane| bits | lane.bit()), u8::MAX);
        assert_eq!((LaneId::all(3).len(), LaneId::all(0).next()), (3, None));
    }

    #[test]
    fn lanes_take_turns() {
        let turns =
            |count| (0..4).scan(LaneId::default(), move |lane, _| Some(std::mem::replace(lane, lane.next(count))));
        assert_eq!(turns(3).map(LaneId::index).collect::<Vec<_>>(), [0, 1, 2, 0]);
        assert_eq!(turns(1).map(LaneId::index).collect::<Vec<_>>(), [0; 4]);
        assert_eq!(lane(7).next(8), lane(0));
        assert_eq!(lane(7).next(usize::MAX), lane(0));
    }

    #[test]
    fn a_lane_is_written_as_its_number() {
        assert_eq!(format!("{} {:?} {:?}", lane(3), lane(3), Some(lane(5))), "3 3 Some(5)");
    }
}
