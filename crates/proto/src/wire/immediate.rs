//! The 32 bits of immediate data in the last write of each share. A share is the part of a message
//! that is sent on one rail.
//!
//! The bits identify the receive by its slot and generation. They also give the number of shares of
//! the message, so that the receiver knows the number of immediates to expect. A share consists of
//! `full_chunks` writes of exactly the connection's chunk size, and a last write with these bits.
//! The receiver's completion of the last write states the bytes of that write, so the receiver can
//! compute the share's size.

use super::ids::Slot;
use super::{MAX_RAILS, PARTS, SLOTS};

/// The decoded immediate data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Immediate {
    /// The receive's slot.
    pub slot: Slot,
    /// Part of the receive, below [`PARTS`].
    pub part: u8,
    /// Number of earlier uses of the slot, modulo [`GENERATIONS`]. By this number the receiver
    /// recognises and drops immediates of an earlier use.
    pub generation: u8,
    /// Number of shares of the message: 1 to [`MAX_SHARES`]. Each share has one immediate.
    pub shares: u8,
    /// Index of the share. After a loss, the receiver lists the arrived shares by this index.
    pub share: u8,
    /// Number of full chunks before the share's last write, at most [`MAX_FULL_CHUNKS`].
    pub full_chunks: u16,
}

/// Number of distinct generations.
pub const GENERATIONS: u64 = 64;
/// Largest number of shares of a message: one for each rail.
pub const MAX_SHARES: usize = MAX_RAILS;
/// Largest number of full chunks before the last write of a share.
pub const MAX_FULL_CHUNKS: u64 = (1 << 12) - 1;

const _: () =
    assert!(SLOTS == 1 << 5 && PARTS == 1 << 3 && GENERATIONS == 1 << 6 && MAX_SHARES == 1 << 3);

impl Immediate {
    /// Returns the generation of receive number `sequence`.
    #[inline(always)]
    pub fn generation_of(sequence: u64) -> u8 {
        ((sequence / SLOTS as u64) % GENERATIONS) as u8
    }

    /// Packs the fields. The caller must keep them in range: excess bits are dropped.
    #[inline(always)]
    pub fn encode(self) -> u32 {
        self.slot.index() as u32
            | (u32::from(self.part) & 7) << 5
            | (u32::from(self.generation) & 63) << 8
            | (u32::from(self.shares.wrapping_sub(1)) & 7) << 14
            | (u32::from(self.share) & 7) << 17
            | (u32::from(self.full_chunks) & 0xfff) << 20
    }

    /// Unpacks the fields. Every 32-bit value is valid.
    #[inline(always)]
    pub fn decode(bits: u32) -> Self {
        Self {
            slot: Slot::of_bits(bits),
            part: (bits >> 5 & 7) as u8,
            generation: (bits >> 8 & 63) as u8,
            shares: (bits >> 14 & 7) as u8 + 1,
            share: (bits >> 17 & 7) as u8,
            full_chunks: (bits >> 20) as u16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_word_decodes_to_one_value(bits: u32) {
            prop_assert_eq!(Immediate::decode(bits).encode(), bits);
        }
    }

    #[test]
    fn the_widest_values_fit() {
        let full_chunks = MAX_FULL_CHUNKS as u16;
        let widest = Immediate {
            slot: Slot::of(31),
            part: 7,
            generation: 63,
            shares: 8,
            share: 7,
            full_chunks,
        };
        assert_eq!(Immediate::decode(widest.encode()), widest);
        assert_eq!(widest.encode(), u32::MAX);
        assert_eq!(Immediate::generation_of(0), 0);
        assert_eq!(Immediate::generation_of(32 * 64), 0);
        assert_eq!(Immediate::generation_of(32 * 64 + 32), 1);
    }
}
