//! The data that the ranks send, and the check of received data.
//!
//! A byte depends on the sending rank, the offset in that rank's data, and the iteration. So
//! misplaced, stale or damaged data fails the check.

use std::ops::Range;

/// One rank's data in one iteration.
#[derive(Debug, Clone, Copy)]
pub struct Pattern {
    seed: u64,
    /// Eight copies of the byte that is added to every byte of the data. For rank 0 and odd ranks,
    /// this byte is the iteration's low byte; for other ranks, it is the negative of the low byte.
    /// Two iterations that differ only in the low byte thus differ in every byte of a rank's data.
    /// In the sum of the data of ranks 0 to n, for any n, the low byte is added once or twice in
    /// total. So if the two iterations are also less than 128 apart, they differ in every byte of
    /// the sum. Therefore even a stale slice of one byte is found.
    shift: u64,
}

/// Data of several ranks in one iteration, added up byte by byte. Bytes wrap around.
#[derive(Debug, Clone)]
pub struct Sum(Vec<Pattern>);

/// Difference between received and sent bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Mismatch {
    /// Number of wrong bytes.
    pub wrong: u64,
    /// The first wrong byte.
    pub first: Option<WrongByte>,
}

/// A wrong byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WrongByte {
    /// Offset in the sending rank's data, in bytes. In a sum, the offset in the data of each rank
    /// that was added up.
    pub offset: usize,
    /// Received value.
    pub found: u8,
    /// Sent value, or the sum of the sent values.
    pub sent: u8,
}

const WORD_BYTES: usize = 8;

impl Pattern {
    /// Returns the data of `rank` in `iteration`.
    pub fn new(rank: usize, iteration: u64) -> Self {
        let low = iteration as u8;
        let shift = if rank == 0 || rank % 2 == 1 {
            low
        } else {
            low.wrapping_neg()
        };
        Self {
            seed: mix((rank as u64) << 40 ^ (iteration >> 8)),
            shift: u64::from_ne_bytes([shift; WORD_BYTES]),
        }
    }

    /// Fills `bytes` with the data that starts at `offset`.
    pub fn fill(&self, offset: usize, bytes: &mut [u8]) {
        for (index, within, at) in words(offset, bytes.len()) {
            let word = self.word(index);
            bytes[at..at + within.len()].copy_from_slice(&word[within]);
        }
    }

    fn word(&self, index: usize) -> [u8; WORD_BYTES] {
        self.packed(index).to_le_bytes()
    }

    fn packed(&self, index: usize) -> u64 {
        add_bytes(mix(self.seed.wrapping_add(index as u64)), self.shift)
    }
}

impl Sum {
    /// Returns the data of `ranks` (one or more) in `iteration`.
    pub fn new(ranks: Range<usize>, iteration: u64) -> Self {
        Self(ranks.map(|rank| Pattern::new(rank, iteration)).collect())
    }

    /// Compares `bytes` with the data that starts at `offset`.
    pub fn compare(&self, offset: usize, bytes: &[u8]) -> Mismatch {
        let mut mismatch = Mismatch::default();
        for (index, within, at) in words(offset, bytes.len()) {
            let word = self.word(index);
            let chunk = &bytes[at..at + within.len()];
            if *chunk == word[within.clone()] {
                continue;
            }
            for (place, &found) in within
                .zip(chunk)
                .filter(|(place, found)| **found != word[*place])
            {
                mismatch.wrong += 1;
                let offset = index * WORD_BYTES + place;
                mismatch.first.get_or_insert(WrongByte {
                    offset,
                    found,
                    sent: word[place],
                });
            }
        }
        mismatch
    }

    fn word(&self, index: usize) -> [u8; WORD_BYTES] {
        self.0
            .iter()
            .fold(0, |sum, pattern| add_bytes(sum, pattern.packed(index)))
            .to_le_bytes()
    }
}

/// Adds eight bytes to eight bytes. Each byte wraps around.
fn add_bytes(left: u64, right: u64) -> u64 {
    const TOP_BITS: u64 = 0x8080_8080_8080_8080;
    ((left & !TOP_BITS) + (right & !TOP_BITS)) ^ ((left ^ right) & TOP_BITS)
}

/// Returns the 8-byte words that hold the `bytes` bytes from `offset` on. For each word: its index,
/// the range within the word that belongs to these bytes, and the distance of that range from
/// `offset`.
fn words(offset: usize, bytes: usize) -> impl Iterator<Item = (usize, Range<usize>, usize)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = (offset + at) % WORD_BYTES;
        let take = (WORD_BYTES - start).min(bytes - at);
        let word = ((offset + at) / WORD_BYTES, start..start + take, at);
        at += take;
        (take > 0).then_some(word)
    })
}

impl Mismatch {
    /// Adds the wrong bytes of a later part of the same data.
    pub fn add(&mut self, later: Mismatch) {
        self.wrong += later.wrong;
        self.first = self.first.or(later.first);
    }
}

/// Returns output number `index` (the first output is number 1) of the splitmix64 generator whose
/// state starts at 0 (Steele, Lea and Flood 2014).
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

    fn one(rank: usize, iteration: u64) -> Sum {
        Sum::new(rank..rank + 1, iteration)
    }

    #[test]
    fn sent_data_passes_whole_and_in_parts() {
        let bytes = data(3, 7);
        let pattern = one(3, 7);
        assert_eq!(pattern.compare(0, &bytes), Mismatch::default());
        for (start, end) in [(1024, LEN), (3, LEN), (13, 14), (7, 9), (8, 8)] {
            assert_eq!(
                pattern.compare(start, &bytes[start..end]),
                Mismatch::default(),
                "{start} {end}"
            );
            let mut part = vec![0; end - start];
            Pattern::new(3, 7).fill(start, &mut part);
            assert_eq!(part, bytes[start..end]);
        }
    }

    #[test]
    fn a_flipped_bit_is_one_wrong_byte_at_its_place() {
        for at in [0, 1, 7, 8, 2049, LEN - 1] {
            let mut bytes = data(0, 1);
            bytes[at] ^= 0x10;
            let sent = bytes[at] ^ 0x10;
            let first = Some(WrongByte {
                offset: at,
                found: bytes[at],
                sent,
            });
            assert_eq!(one(0, 1).compare(0, &bytes), Mismatch { wrong: 1, first });
        }
    }

    #[test]
    fn swapped_chunks_are_seen() {
        let mut bytes = data(0, 1);
        let (low, high) = bytes.split_at_mut(2048);
        low[..512].swap_with_slice(&mut high[..512]);
        let mismatch = one(0, 1).compare(0, &bytes);
        assert!(mismatch.wrong > 1000, "{mismatch:?}");
    }

    #[test]
    fn every_byte_of_a_stale_iteration_is_wrong() {
        for (stale, now) in [(6, 7), (1, 200), (255, 256), (511, 512)] {
            let mismatch = one(1, now).compare(0, &data(1, stale));
            let least = if stale >> 8 == now >> 8 {
                LEN
            } else {
                LEN * 9 / 10
            };
            assert!(
                mismatch.wrong >= least as u64,
                "{stale} for {now}: {mismatch:?}"
            );
        }
    }

    #[test]
    fn another_ranks_data_and_untouched_memory_are_seen() {
        assert!(one(1, 1).compare(0, &data(2, 1)).wrong > 4000);
        assert!(one(1, 1).compare(0, &[0; LEN]).wrong > 4000);
    }

    #[test]
    fn a_sum_is_that_of_all_its_ranks() {
        let mut sum = data(1, 5);
        for rank in 2..5 {
            sum.iter_mut()
                .zip(data(rank, 5))
                .for_each(|(sum, byte)| *sum = sum.wrapping_add(byte));
        }
        assert_eq!(Sum::new(1..5, 5).compare(0, &sum), Mismatch::default());
        assert_eq!(Sum::new(1..5, 5).compare(9, &sum[9..]), Mismatch::default());
        assert!(Sum::new(1..4, 5).compare(0, &sum).wrong > 4000);
        for now in [4, 6, 69, 132] {
            for ranks in 2..6 {
                let mut stale = vec![0_u8; LEN];
                let sum = Sum::new(0..ranks, now);
                for rank in 0..ranks {
                    stale
                        .iter_mut()
                        .zip(data(rank, 5))
                        .for_each(|(sum, byte)| *sum = sum.wrapping_add(byte));
                }
                assert_eq!(
                    sum.compare(0, &stale).wrong,
                    LEN as u64,
                    "{ranks} ranks, iteration 5 for {now}"
                );
            }
        }
        sum[77] ^= 1;
        assert_eq!(Sum::new(1..5, 5).compare(0, &sum).wrong, 1);
    }
}
