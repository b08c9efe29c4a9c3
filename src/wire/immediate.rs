//! The 32 bits that travel with the last write of a message on each rail.
//!
//! From them and the completion's byte count the receiver knows which receive the bytes belong to, whether they are
//! old, how many such completions there are to wait for, and the true size: a rail's share of a message is `leads`
//! writes of exactly the connection's chunk size followed by one write of the completion's byte count.

use super::ids::Slot;
use super::{MAX_RAILS, PARTS, SLOTS};

/// The decoded immediate data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Immediate {
    /// The receive's slot.
    pub slot: Slot,
    /// Sub-receive within the slot, below [`PARTS`].
    pub part: u8,
    /// How often the slot was used before, modulo [`GENERATIONS`]: an immediate of an earlier use is dropped.
    pub generation: u8,
    /// How many shares the message has, each closed by one immediate: 1 to [`MAX_SHARES`].
    pub shares: u8,
    /// Which of them this closes: what is missing when a rail is lost is asked for by this number.
    pub share: u8,
    /// Full chunks that went before this write in its share, at most [`MAX_LEADS`].
    pub leads: u16,
}

/// Generations told apart.
pub const GENERATIONS: u64 = 64;
/// Shares of one message: one for each rail at most.
pub const MAX_SHARES: usize = MAX_RAILS;
/// Full chunks before the closing write of one share.
pub const MAX_LEADS: u64 = (1 << 12) - 1;

const _: () = assert!(SLOTS == 1 << 5 && PARTS == 1 << 3 && GENERATIONS == 1 << 6 && MAX_SHARES == 1 << 3);

impl Immediate {
    /// The generation of a receive's sequence number.
    #[inline(always)]
    pub fn generation_of(sequence: u64) -> u8 {
        ((sequence / SLOTS as u64) % GENERATIONS) as u8
    }

    /// Packs the fields. Fields out of range are cut to their width; the callers hold them in range.
    #[inline(always)]
    pub fn encode(self) -> u32 {
        self.slot.index() as u32
            | (u32::from(self.part) & 7) << 5
            | (u32::from(self.generation) & 63) << 8
            | (u32::from(self.shares.wrapping_sub(1)) & 7) << 14
            | (u32::from(self.share) & 7) << 17
            | (u32::from(self.leads) & 0xfff) << 20
    }

    /// Unpacks the fields; every 32-bit value is one.
    #[inline(always)]
    pub fn decode(bits: u32) -> Self {
        Self {
            slot: Slot::of_bits(bits),
            part: (bits >> 5 & 7) as u8,
            generation: (bits >> 8 & 63) as u8,
            shares: (bits >> 14 & 7) as u8 + 1,
            share: (bits >> 17 & 7) as u8,
            leads: (bits >> 20) as u16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_word_is_one_value(bits: u32) {
            prop_assert_eq!(Immediate::decode(bits).encode(), bits);
        }
    }

    #[test]
    fn the_widest_values_fit() {
        let widest =
            Immediate { slot: Slot::of(31), part: 7, generation: 63, shares: 8, share: 7, leads: MAX_LEADS as u16 };
        assert_eq!(Immediate::decode(widest.encode()), widest);
        assert_eq!(widest.encode(), u32::MAX);
        assert_eq!(Immediate::generation_of(0), 0);
        assert_eq!(Immediate::generation_of(32 * 64), 0);
        assert_eq!(Immediate::generation_of(32 * 64 + 32), 1);
    }
}
