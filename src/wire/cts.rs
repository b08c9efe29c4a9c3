//! The clear-to-send entry: 64 bytes that a receiver writes into the sender's ring for each sub-receive.
//!
//! The ring is written by a NIC while the sender reads it. One entry is one aligned cache line, but nothing says in
//! which order the bytes of a write become visible, neither across lines nor (on a weakly ordered machine) within
//! one. So an entry proves itself: its first word names the receive, and its last is a digest of all others and of
//! the full 64-bit sequence number. A reader that sees some words of the old entry and some of the new one sees a
//! wrong digest and looks again later. No ordering of the NIC's stores is assumed.

use super::{MAX_RAILS, PARTS, SLOTS};

/// 64-bit words of one entry.
pub const ENTRY_WORDS: usize = 8;
/// Bytes of one entry: one cache line on x86-64 and on Arm.
pub const ENTRY_BYTES: usize = ENTRY_WORDS * 8;
/// Words of the whole ring.
pub const RING_WORDS: usize = SLOTS * PARTS * ENTRY_WORDS;
/// Bytes behind the ring that the handshake's trial writes go to: the largest path MTU.
pub const PROBE_BYTES: usize = 4096;
/// Largest receive an entry can name: NCCL's own limit on a transfer (`NCCL_MAX_NET_SIZE_BYTES`, 2^40).
pub const MAX_RECEIVE_BYTES: u64 = 1 << 40;

/// One sub-receive, as the receiver grants it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Entry {
    /// Address in the receiver.
    pub addr: u64,
    /// Room there, at most [`MAX_RECEIVE_BYTES`].
    pub bytes: u64,
    /// NCCL's tag.
    pub tag: i32,
    /// Sub-receives in the group: 1 to [`PARTS`].
    pub parts: u8,
    /// Which of them this is.
    pub part: u8,
    /// Remote keys by the connection's rail number; rails beyond the connection's are zero.
    pub rkeys: [u32; MAX_RAILS],
}

/// An entry that arrived whole but says something it must not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The group's size is none, or differs between its entries.
    #[error("a group of {0} receives")]
    Parts(u8),
    /// The entry stands in another's place.
    #[error("part {0} in the place of part {1}")]
    Part(u8, u8),
    /// The buffer is larger than any receive, or wraps around.
    #[error("a buffer of {bytes} bytes at {addr:#x}")]
    Buffer {
        /// The address it names.
        addr: u64,
        /// Its size.
        bytes: u64,
    },
}

impl Entry {
    /// The words to be written for the receive `sequence`.
    #[inline]
    pub fn encode(&self, sequence: u64) -> [u64; ENTRY_WORDS] {
        let mut words = [0; ENTRY_WORDS];
        words[0] = first_word(sequence, self.tag);
        words[1] = self.addr;
        words[2] = self.bytes | u64::from(self.parts) << 48 | u64::from(self.part) << 56;
        for (word, pair) in words[3..7].iter_mut().zip(self.rkeys.chunks_exact(2)) {
            *word = u64::from(pair[0]) | u64::from(pair[1]) << 32;
        }
        words[7] = digest(&words, sequence);
        words
    }

    /// Whether `first` can be the first word of the entry for `sequence`: the cheap look before the whole read.
    #[inline]
    pub fn may_be(first: u64, sequence: u64) -> bool {
        first as u32 == stamp(sequence)
    }

    /// The entry in `words`, `None` while it has not wholly arrived.
    ///
    /// # Errors
    /// A [`Violation`] when it arrived and is not allowed.
    #[inline]
    pub fn decode(words: &[u64; ENTRY_WORDS], sequence: u64, place: u8) -> Result<Option<Entry>, Violation> {
        if !Self::may_be(words[0], sequence) || words[7] != digest(words, sequence) {
            return Ok(None);
        }
        let mut entry = Entry {
            addr: words[1],
            bytes: words[2] & ((1 << 48) - 1),
            tag: (words[0] >> 32) as u32 as i32,
            parts: (words[2] >> 48) as u8,
            part: (words[2] >> 56) as u8,
            rkeys: [0; MAX_RAILS],
        };
        for (pair, word) in entry.rkeys.chunks_exact_mut(2).zip(&words[3..7]) {
            pair[0] = *word as u32;
            pair[1] = (*word >> 32) as u32;
        }
        entry.check(place).map(Some)
    }

    fn check(self, place: u8) -> Result<Entry, Violation> {
        if self.parts == 0 || usize::from(self.parts) > PARTS {
            return Err(Violation::Parts(self.parts));
        }
        if self.part != place || self.part >= self.parts {
            return Err(Violation::Part(self.part, place));
        }
        if self.bytes > MAX_RECEIVE_BYTES || self.addr.checked_add(self.bytes).is_none() {
            return Err(Violation::Buffer { addr: self.addr, bytes: self.bytes });
        }
        Ok(self)
    }
}

/// Where in the ring the entry of a receive's part begins, in words.
#[inline]
pub fn entry_word(sequence: u64, part: usize) -> usize {
    ((sequence as usize % SLOTS) * PARTS + part % PARTS) * ENTRY_WORDS
}

fn stamp(sequence: u64) -> u32 {
    // One more than the sequence, so that a fresh ring of zeros is not the entry of the first receive.
    (sequence as u32).wrapping_add(1)
}

fn first_word(sequence: u64, tag: i32) -> u64 {
    u64::from(stamp(sequence)) | u64::from(tag as u32) << 32
}

/// A multiply-rotate digest: not against an adversary (who may write whole entries anyway), but so that a mix of two
/// entries' words passes with a chance of about 2^-64.
#[inline]
fn digest(words: &[u64; ENTRY_WORDS], sequence: u64) -> u64 {
    // The odd constant of Fibonacci hashing, 2^64 / golden ratio.
    const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut state = sequence ^ MULTIPLIER;
    for word in &words[..7] {
        state = (state.rotate_left(29) ^ word).wrapping_mul(MULTIPLIER);
    }
    state ^ state >> 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entries() -> impl Strategy<Value = Entry> {
        (any::<u32>(), 0..=MAX_RECEIVE_BYTES, any::<i32>(), 1..=8u8, any::<[u32; MAX_RAILS]>(), any::<u8>()).prop_map(
            |(addr, bytes, tag, parts, rkeys, part)| Entry {
                addr: u64::from(addr) << 12,
                bytes,
                tag,
                parts,
                part: part % parts,
                rkeys,
            },
        )
    }

    proptest! {
        #[test]
        fn an_entry_comes_back(entry in entries(), sequence: u64) {
            prop_assert_eq!(Entry::decode(&entry.encode(sequence), sequence, entry.part), Ok(Some(entry)));
        }

        #[test]
        fn a_torn_entry_has_not_arrived(old in entries(), new in entries(), sequence in 32..u64::MAX, mask in 1..255u8) {
            let before = old.encode(sequence - 32);
            let mut seen = new.encode(sequence);
            prop_assume!((0..8).any(|i| mask & 1 << i != 0 && before[i] != seen[i]));
            for i in 0..8 { if mask & 1 << i != 0 { seen[i] = before[i]; } }
            prop_assert_eq!(Entry::decode(&seen, sequence, new.part), Ok(None));
        }

        #[test]
        fn any_words_are_answered(words: [u64; 8], sequence: u64, place in 0..8u8) {
            let _ = Entry::decode(&words, sequence, place);
        }
    }

    #[test]
    fn a_fresh_ring_holds_no_entry_and_lies_are_named() {
        assert_eq!(Entry::decode(&[0; 8], 0, 0), Ok(None));
        let good = Entry { addr: 4096, bytes: 8, tag: 3, parts: 2, part: 1, rkeys: [7; 8] };
        let told = |entry: Entry, place| Entry::decode(&entry.encode(5), 5, place);
        assert_eq!(told(Entry { parts: 9, ..good }, 1), Err(Violation::Parts(9)));
        assert_eq!(told(Entry { parts: 0, ..good }, 1), Err(Violation::Parts(0)));
        assert_eq!(told(good, 0), Err(Violation::Part(1, 0)));
        assert_eq!(told(Entry { part: 2, ..good }, 2), Err(Violation::Part(2, 2)));
        let wraps = Entry { addr: u64::MAX, bytes: 2, ..good };
        assert_eq!(told(wraps, 1), Err(Violation::Buffer { addr: u64::MAX, bytes: 2 }));
        assert!(told(Entry { bytes: MAX_RECEIVE_BYTES + 1, ..good }, 1).is_err());
    }
}
