//! The data that the ranks send, and the check of what arrived.
//!
//! A byte is a function of the rank that it comes from, of its offset in that rank's data and of the iteration, so data
//! that is misplaced, left over from an earlier iteration, or damaged does not pass for what was sent.

/// What one rank's data holds in one iteration.
#[derive(Debug, Clone, Copy)]
pub struct Pattern {
    seed: u64,
    /// The iteration's low byte in every byte of a word: two iterations less than 256 apart differ in every byte, so
    /// that even a stale slice of one byte is seen for certain.
    mask: u64,
}

/// How received bytes differ from what was sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Mismatch {
    /// How many bytes are wrong.
    pub wrong: u64,
    /// The first of them.
    pub first: Option<WrongByte>,
}

/// One byte that is not what was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WrongByte {
    /// Where in the sending rank's data, in bytes.
    pub offset: usize,
    /// What arrived.
    pub found: u8,
    /// What was sent.
    pub sent: u8,
}

const WORD_BYTES: usize = 8;

impl Pattern {
    /// The data of `rank` in `iteration`.
    pub fn new(rank: usize, iteration: u64) -> Self {
        Self {
            seed: mix((rank as u64) << 40 ^ (iteration >> 8)),
            mask: u64::from(iteration as u8) * 0x0101_0101_0101_0101,
        }
    }

    /// Writes the data that starts at `offset` (a multiple of 8) into `bytes`.
    pub fn fill(&self, offset: usize, bytes: &mut [u8]) {
        debug_assert_eq!(offset % WORD_BYTES, 0);
        for (index, chunk) in (offset / WORD_BYTES..).zip(bytes.chunks_mut(WORD_BYTES)) {
            chunk.copy_from_slice(&self.word(index)[..chunk.len()]);
        }
    }

    /// Compares `bytes` with the data that starts at `offset` (a multiple of 8).
    pub fn compare(&self, offset: usize, bytes: &[u8]) -> Mismatch {
        debug_assert_eq!(offset % WORD_BYTES, 0);
        let mut mismatch = Mismatch::default();
        for (index, chunk) in (offset / WORD_BYTES..).zip(bytes.chunks(WORD_BYTES)) {
            let word = self.word(index);
            if *chunk == word[..chunk.len()] {
                continue;
            }
            for (at, (&found, &sent)) in chunk.iter().zip(&word).enumerate().filter(|(_, (found, sent))| found != sent)
            {
                mismatch.wrong += 1;
                mismatch.first.get_or_insert(WrongByte { offset: index * WORD_BYTES + at, found, sent });
            }
        }
        mismatch
    }

    fn word(&self, index: usize) -> [u8; WORD_BYTES] {
        (mix(self.seed.wrapping_add(index as u64)) ^ self.mask).to_le_bytes()
    }
}

impl Mismatch {
    /// Adds what a later part of the same data had wrong.
    pub fn add(&mut self, later: Mismatch) {
        self.wrong += later.wrong;
        self.first = self.first.or(later.first);
    }
}

/// The output function of the splitmix64 generator (Steele, Lea and Flood 2014), with its increment.
fn mix(index: u64) -> u64 {
    let mut word = index.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = 4099;

    fn data(rank: usize, iteration: u64) -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        Pattern::new(rank, iteration).fill(0, &mut bytes);
        bytes
    }

    #[test]
    fn what_was_sent_passes_whole_and_in_parts() {
        let bytes = data(3, 7);
        let pattern = Pattern::new(3, 7);
        assert_eq!(pattern.compare(0, &bytes), Mismatch::default());
        assert_eq!(pattern.compare(1024, &bytes[1024..]), Mismatch::default());
    }

    #[test]
    fn a_flipped_bit_is_one_wrong_byte_at_its_place() {
        for at in [0, 1, 7, 8, 2049, LEN - 1] {
            let mut bytes = data(0, 1);
            bytes[at] ^= 0x10;
            let sent = bytes[at] ^ 0x10;
            let first = Some(WrongByte { offset: at, found: bytes[at], sent });
            assert_eq!(Pattern::new(0, 1).compare(0, &bytes), Mismatch { wrong: 1, first });
        }
    }

    #[test]
    fn swapped_chunks_are_seen() {
        let mut bytes = data(0, 1);
        let (low, high) = bytes.split_at_mut(2048);
        low[..512].swap_with_slice(&mut high[..512]);
        let mismatch = Pattern::new(0, 1).compare(0, &bytes);
        assert!(mismatch.wrong > 1000, "{mismatch:?}");
    }

    #[test]
    fn every_byte_of_a_stale_iteration_is_wrong() {
        for (stale, now) in [(6, 7), (1, 200), (255, 256), (511, 512)] {
            let mismatch = Pattern::new(1, now).compare(0, &data(1, stale));
            let least = if stale >> 8 == now >> 8 { LEN } else { LEN * 9 / 10 };
            assert!(mismatch.wrong >= least as u64, "{stale} for {now}: {mismatch:?}");
        }
    }

    #[test]
    fn another_ranks_data_and_untouched_memory_are_seen() {
        assert!(Pattern::new(1, 1).compare(0, &data(2, 1)).wrong > 4000);
        assert!(Pattern::new(1, 1).compare(0, &[0; LEN]).wrong > 4000);
    }
}
