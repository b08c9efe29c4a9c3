//! LL128 lines: the words that the litmus test writes, and how the CPU reads them. `kernels.ptx`
//! does the same on a GPU.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

/// Bytes of a line. They become visible together where LL128 is safe.
pub const LINE_BYTES: usize = 128;
/// 8-byte words of a line; the last one is its flag.
pub const WORDS: usize = LINE_BYTES / size_of::<u64>();
pub const FLAG: usize = WORDS - 1;
/// Words that one thread of a warp stores and loads together: a piece of 16 bytes.
pub const PIECE_WORDS: usize = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Round {
    /// First line, counted from the start of the buffer.
    pub first: u32,
    pub lines: u32,
    /// New value of the flags: not 0, and higher than in any earlier round.
    pub sequence: u32,
    /// Sleep of a warp after four lines, in nanoseconds: at most 1,000,000.
    pub pause_ns: u32,
    /// If not 0, the writer plants torn lines: it stores the flags, sleeps this long (in
    /// nanoseconds, at most 1,000,000), and stores the rest.
    pub delay_ns: u32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Lines whose flag arrived.
    pub lines: u64,
    /// Lines with an old word when the flag was first seen.
    pub torn: u64,
    /// Lines with an old word when they were loaded a second time.
    pub torn_again: u64,
    /// Lines whose flag did not arrive.
    pub missing: u64,
    /// Bit i: piece i was old in some torn line.
    pub pieces: u64,
    /// Bit i: piece i was old in the second load of some line.
    pub pieces_again: u64,
}

impl Tally {
    pub fn add(&mut self, pieces: u8, pieces_again: u8) {
        self.lines += 1;
        self.torn += u64::from(pieces != 0);
        self.torn_again += u64::from(pieces_again != 0);
        self.pieces |= u64::from(pieces);
        self.pieces_again |= u64::from(pieces_again);
    }
}

/// Returns the value of a line's word. `line` counts from the start of the buffer.
pub fn word(sequence: u32, line: u32, index: usize) -> u64 {
    match index {
        FLAG => u64::from(sequence),
        _ => u64::from(sequence) << 32 | u64::from(line) << 4 | index as u64,
    }
}

/// Reads a line as NCCL's proxy does. Returns `None` until its flag arrives, then a bit for each
/// old piece.
///
/// The flag is loaded with acquire, so the data words are loaded after it, on Arm too (x86-64 never
/// reorders loads). A word that is still old then was not yet visible when the flag was. The writer
/// is a GPU or a NIC and makes no release that pairs with this acquire: the test examines whether
/// the writer's stores to one line become visible together.
pub fn read_line(line: &[AtomicU64; WORDS], sequence: u32, number: u32) -> Option<u8> {
    (line[FLAG].load(Acquire) == u64::from(sequence)).then(|| old_pieces(line, sequence, number))
}

/// Returns a bit for each piece of a line that has a word of another sequence or of another line.
pub fn old_pieces(line: &[AtomicU64; WORDS], sequence: u32, number: u32) -> u8 {
    let is_old = |index: &usize| line[*index].load(Relaxed) != word(sequence, number, *index);
    (0..WORDS).filter(is_old).fold(0, |pieces, index| pieces | 1 << (index / PIECE_WORDS))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(sequence: u32, number: u32) -> [AtomicU64; WORDS] {
        std::array::from_fn(|index| AtomicU64::new(word(sequence, number, index)))
    }

    #[test]
    fn words_match_the_kernels_formula() {
        assert_eq!(word(5, 0, 0), 0x5_0000_0000);
        assert_eq!(word(5, 4800, 14), 0x5_0001_2c0e);
        assert_eq!(word(5, 4800, 15), 5);
        assert_eq!(word(u32::MAX, 38_399, 0), 0xffff_ffff_0009_5ff0);
    }

    #[test]
    fn a_line_is_read_after_its_flag_and_each_old_word_is_found() {
        assert_eq!(read_line(&line(6, 3), 7, 3), None);
        assert_eq!(read_line(&line(7, 3), 7, 3), Some(0));
        for index in 0..FLAG {
            for other in [word(6, 3, index), word(7, 4, index), 0] {
                let line = line(7, 3);
                line[index].store(other, Relaxed);
                assert_eq!(read_line(&line, 7, 3), Some(1 << (index / 2)), "{index}");
            }
        }
        let half = line(7, 3);
        (0..8).for_each(|index| half[index].store(word(6, 3, index), Relaxed));
        assert_eq!(read_line(&half, 7, 3), Some(0x0f));
    }

    #[test]
    fn torn_lines_and_their_pieces_are_counted_for_each_load() {
        let mut tally = Tally::default();
        tally.add(0, 0);
        tally.add(0x0f, 0);
        tally.add(0x10, 0x01);
        let expected = Tally { lines: 3, torn: 2, torn_again: 1, missing: 0, pieces: 0x1f, pieces_again: 0x01 };
        assert_eq!(tally, expected);
    }
}
