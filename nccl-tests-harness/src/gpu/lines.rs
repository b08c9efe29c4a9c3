//! LL128 lines: the words that the litmus test writes, and how the CPU reads them. `kernels.ptx`
//! does the same on a GPU.
//!
//! NCCL's protocol LL128 sends lines of 128 bytes. A reader that sees a line's flag takes the whole
//! line as arrived. The litmus test looks for torn lines: lines whose flag is visible while another
//! word is still old.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

/// Bytes of a line. They become visible together where LL128 is safe.
pub const LINE_BYTES: usize = 128;
/// Number of 8-byte words in a line.
pub const WORDS: usize = LINE_BYTES / size_of::<u64>();
/// Index of a line's flag, which is the line's last word.
pub const FLAG: usize = WORDS - 1;
/// Number of words in a piece. A piece is the 16 bytes of a line that one thread of a warp stores
/// or loads with one instruction.
pub const PIECE_WORDS: usize = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Round {
    /// Index of the round's first line in the buffer.
    pub first: u32,
    /// Number of lines.
    pub lines: u32,
    /// New value of the flags: not 0, and higher than in any earlier round.
    pub sequence: u32,
    /// Time that a warp sleeps after each four lines, in nanoseconds: at most 1,000,000.
    pub pause_ns: u32,
    /// If not 0, the writer plants torn lines: it stores the pieces with the flags, sleeps this
    /// long (in nanoseconds, at most 1,000,000), and stores the other pieces.
    pub delay_ns: u32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Number of lines whose flag arrived.
    pub lines: u64,
    /// Number of lines that had an old word when their flag was first seen.
    pub torn: u64,
    /// Number of lines that had an old word when they were loaded a second time.
    pub torn_again: u64,
    /// Number of lines whose flag did not arrive.
    pub missing: u64,
    /// Bit i is set if piece i had an old word in some line when the line's flag was first seen.
    pub pieces: u64,
    /// Bit i is set if piece i had an old word in the second load of some line.
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

/// Returns the value of word `index` of a line. `line` is the line's index in the buffer.
pub fn word(sequence: u32, line: u32, index: usize) -> u64 {
    match index {
        FLAG => u64::from(sequence),
        _ => u64::from(sequence) << 32 | u64::from(line) << 4 | index as u64,
    }
}

/// Reads a line as NCCL's proxy does. Returns `None` until the line's flag arrives, then the bits
/// of [`old_pieces`]. `number` is the line's index in the buffer.
///
/// The flag is loaded with acquire, so the data words are loaded after it, on Arm too (x86-64 never
/// reorders loads). A word that is still old then was not yet visible when the flag was. The writer
/// is a GPU or a NIC and makes no release that pairs with this acquire: the test examines whether
/// the writer's stores to one line become visible together.
pub fn read_line(line: &[AtomicU64; WORDS], sequence: u32, number: u32) -> Option<u8> {
    (line[FLAG].load(Acquire) == u64::from(sequence)).then(|| old_pieces(line, sequence, number))
}

/// Returns a bit mask of a line's old pieces. Bit i is set if piece i has a word of another
/// sequence or of another line.
pub fn old_pieces(line: &[AtomicU64; WORDS], sequence: u32, number: u32) -> u8 {
    let is_old = |index: &usize| line[*index].load(Relaxed) != word(sequence, number, *index);
    (0..WORDS)
        .filter(is_old)
        .fold(0, |pieces, index| pieces | 1 << (index / PIECE_WORDS))
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
        let expected = Tally {
            lines: 3,
            torn: 2,
            torn_again: 1,
            missing: 0,
            pieces: 0x1f,
            pieces_again: 0x01,
        };
        assert_eq!(tally, expected);
    }
}
