//! The clear-to-send entry: 64 bytes that a receiver writes into the sender's ring for each sub-receive.
//!
//! The ring is written by a NIC while the sender reads it. One entry is one aligned cache line, but nothing says in
//! which order the bytes of a write become visible, neither across lines nor (on a weakly ordered machine) within
//! one. So an entry proves itself: its first word names the receive, and its last is a digest of all others and of
//! the full 64-bit sequence number. A reader that sees some words of the old entry and some of the new one sees a
//! wrong digest and looks again later. No ordering of the NIC's stores is assumed.

use super::ids::LaneId;
use super::{MAX_RAILS, PARTS, SLOTS};

/// 64-bit words of one entry.
pub const ENTRY_WORDS: usize = 8;
/// Bytes of one entry: one cache line on x86-64 and on Arm.
pub const ENTRY_BYTES: usize = ENTRY_WORDS * 8;
/// Words of the whole ring.
pub const RING_WORDS: usize = SLOTS * PARTS * ENTRY_WORDS;
/// Largest receive an entry can name: NCCL's own limit on a transfer (`NCCL_MAX_NET_SIZE_BYTES`, 2^40).
pub const MAX_RECEIVE_BYTES: u64 = 1 << 40;

/// Generation of the receiver's keys in an entry. It wraps around.
///
/// When one of the receiver's devices has returned with other keys, the receiver takes the next
/// epoch as it answers the JOIN, and writes all open grants again with its present keys. Each goes
/// by the lane that it went by before: on another lane the older entry could land last and replace
/// it. JOINED names the first epoch with keys for the lane that returns. The sender posts nothing
/// by that lane for an older entry, neither a new send nor a resent share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Epoch(u8);

/// Bits of an [`Epoch`] in an entry, and how many are below them.
const EPOCH_BITS: u32 = 7;
const EPOCH_AT: u32 = 48 - EPOCH_BITS;

impl Epoch {
    /// The epoch of this number; `None` for one that there is not.
    pub fn new(number: u8) -> Option<Self> {
        (number >> EPOCH_BITS == 0).then_some(Self(number))
    }

    /// Its number.
    pub fn number(self) -> u8 {
        self.0
    }

    /// The one after it.
    pub fn next(self) -> Self {
        Self((self.0 + 1) % (1 << EPOCH_BITS))
    }

    /// It, or one that is later and can still be told from `newest`: what is granted has been granted once more since then.
    pub fn near(self, newest: Self) -> Self {
        const FAR: u8 = 1 << (EPOCH_BITS - 2);
        if newest.0.wrapping_sub(self.0) % (1 << EPOCH_BITS) < FAR {
            self
        } else {
            Self(newest.0.wrapping_sub(FAR - 1) % (1 << EPOCH_BITS))
        }
    }

    /// Whether it is not before `other`, of two that are less than 64 apart ([`Epoch::near`]).
    pub fn is_since(self, other: Self) -> bool {
        self.0.wrapping_sub(other.0) % (1 << EPOCH_BITS) < 1 << (EPOCH_BITS - 1)
    }
}

/// Remote keys by lane, two to a word, the lower number in the lower half.
pub type PackedKeys = [u64; MAX_RAILS / 2];

/// What a receiver grants for one sub-receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Terms {
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
    /// Which of the receiver's keys it has.
    pub epoch: Epoch,
}

/// One sub-receive as it travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Entry {
    words: [u64; ENTRY_WORDS],
}

/// An entry that arrived whole but says something it must not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The group's size is none, or differs between its entries.
    #[error("invalid group of {0} receives")]
    Parts(u8),
    /// The entry stands in another's place.
    #[error("part {0} in place of part {1}")]
    Part(u8, u8),
    /// The buffer is larger than any receive, or wraps around.
    #[error("invalid buffer of {bytes} bytes at {addr:#x}")]
    Buffer {
        /// The address it names.
        addr: u64,
        /// Its size.
        bytes: u64,
    },
}

impl Entry {
    /// The entry for the receive `sequence`; of the buffer's keys, those beyond the connection's rails are not looked at.
    #[inline(always)]
    pub fn new(terms: &Terms, keys: &PackedKeys, sequence: u64) -> Self {
        let [k0, k1, k2, k3] = *keys;
        let epoch = u64::from(terms.epoch.0) << EPOCH_AT;
        let sizes = terms.bytes | epoch | u64::from(terms.parts) << 48 | u64::from(terms.part) << 56;
        let mut words = [first_word(sequence, terms.tag), terms.addr, sizes, k0, k1, k2, k3, 0];
        words[7] = digest(&words, sequence);
        Self { words }
    }

    /// Its words, to be written.
    #[inline(always)]
    pub fn words(&self) -> &[u64; ENTRY_WORDS] {
        &self.words
    }

    /// Whether `first` can be the first word of the entry for `sequence`: the cheap look before the whole read.
    #[inline(always)]
    pub fn may_be(first: u64, sequence: u64) -> bool {
        first as u32 == stamp(sequence)
    }

    /// The entry in `words`, `None` while it has not wholly arrived. What it says is not looked at: [`Entry::check`] does
    /// that.
    #[inline(always)]
    pub fn whole(words: [u64; ENTRY_WORDS], sequence: u64) -> Option<Entry> {
        (Self::may_be(words[0], sequence) && words[7] == digest(&words, sequence)).then_some(Entry { words })
    }

    /// Whether it is a receive of its own, in no group, with the keys of this epoch and a buffer that can be one: what most receives are.
    #[inline(always)]
    pub fn is_alone(&self, epoch: Epoch) -> bool {
        // Epoch, parts and part in one look.
        self.words[2] >> EPOCH_AT == 1 << EPOCH_BITS | u64::from(epoch.0) && self.has_buffer()
    }

    /// Whether what it says is allowed at this place of its group.
    ///
    /// # Errors
    /// A [`Violation`].
    pub fn check(&self, place: u8) -> Result<(), Violation> {
        let (addr, bytes, parts, part) = (self.addr(), self.bytes(), self.parts(), self.part());
        if parts == 0 || usize::from(parts) > PARTS {
            Err(Violation::Parts(parts))
        } else if part != place || part >= parts {
            Err(Violation::Part(part, place))
        } else if !self.has_buffer() {
            Err(Violation::Buffer { addr, bytes })
        } else {
            Ok(())
        }
    }

    #[inline(always)]
    fn has_buffer(&self) -> bool {
        self.bytes() <= MAX_RECEIVE_BYTES && self.addr().checked_add(self.bytes()).is_some()
    }

    /// Address in the receiver.
    #[inline(always)]
    pub fn addr(&self) -> u64 {
        self.words[1]
    }

    /// Room there.
    #[inline(always)]
    pub fn bytes(&self) -> u64 {
        self.words[2] & ((1 << EPOCH_AT) - 1)
    }

    /// Which of the receiver's keys it has.
    #[inline(always)]
    pub fn epoch(&self) -> Epoch {
        Epoch((self.words[2] >> EPOCH_AT) as u8 % (1 << EPOCH_BITS))
    }

    /// The buffer's key on a lane's rail.
    pub fn rkey(&self, lane: LaneId) -> u32 {
        let (word, shift) = rkey_in(lane);
        (self.words[word] >> shift) as u32
    }

    /// NCCL's tag.
    #[inline(always)]
    pub fn tag(&self) -> i32 {
        (self.words[0] >> 32) as u32 as i32
    }

    /// Sub-receives in the group.
    #[inline(always)]
    pub fn parts(&self) -> u8 {
        (self.words[2] >> 48) as u8
    }

    /// Which of them this is.
    #[inline(always)]
    pub fn part(&self) -> u8 {
        (self.words[2] >> 56) as u8
    }
}

/// Which word of an entry holds the buffer's key on a lane's rail, and how many bits below it.
#[inline(always)]
pub fn rkey_in(lane: LaneId) -> (usize, u32) {
    (3 + lane.index() / 2, lane.index() as u32 % 2 * 32)
}

/// Where in the ring the entry of a receive's part begins, in words.
#[inline(always)]
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
/// entries' words passes with a chance of about 2^-64. Two words a round: a difference in the first is spread over all bits
/// before it could meet one in the second.
#[inline(always)]
fn digest(words: &[u64; ENTRY_WORDS], sequence: u64) -> u64 {
    // The odd constant of Fibonacci hashing, 2^64 / golden ratio.
    const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
    let [w0, w1, w2, w3, w4, w5, w6, _] = *words;
    let mut state = sequence ^ MULTIPLIER;
    for (first, second) in [(w0, w1), (w2, w3), (w4, w5), (w6, 0)] {
        state = (state.rotate_left(29) ^ first).wrapping_mul(MULTIPLIER) ^ second;
    }
    state ^ state >> 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn terms() -> impl Strategy<Value = (Terms, PackedKeys)> {
        (any::<u32>(), 0..=MAX_RECEIVE_BYTES, any::<i32>(), 1..=8u8, any::<PackedKeys>(), any::<u8>(), 0..128_u8)
            .prop_map(|(addr, bytes, tag, parts, keys, part, epoch)| {
                let epoch = Epoch::new(epoch).unwrap();
                (Terms { addr: u64::from(addr) << 12, bytes, tag, parts, part: part % parts, epoch }, keys)
            })
    }

    fn terms_of(entry: &Entry) -> (Terms, PackedKeys) {
        let key = |lane| {
            let (word, shift) = rkey_in(LaneId::new(lane).unwrap());
            entry.words[word] >> shift & 0xffff_ffff
        };
        let keys = std::array::from_fn(|pair| key(2 * pair) | key(2 * pair + 1) << 32);
        let (addr, bytes, tag) = (entry.addr(), entry.bytes(), entry.tag());
        (Terms { addr, bytes, tag, parts: entry.parts(), part: entry.part(), epoch: entry.epoch() }, keys)
    }

    proptest! {
        #[test]
        fn an_entry_comes_back((terms, keys) in terms(), sequence: u64) {
            let back = Entry::whole(*Entry::new(&terms, &keys, sequence).words(), sequence);
            prop_assert_eq!(back.map(|entry| entry.check(terms.part)), Some(Ok(())));
            prop_assert_eq!(back.map(|entry| entry.is_alone(terms.epoch)), Some(terms.parts == 1));
            prop_assert_eq!(back.map(|entry| entry.is_alone(terms.epoch.next())), Some(false));
            prop_assert_eq!(back.map(|entry| terms_of(&entry)), Some((terms, keys)));
        }

        #[test]
        fn a_torn_entry_has_not_arrived(old in terms(), new in terms(), sequence in 32..u64::MAX, mask in 1..255u8) {
            let before = *Entry::new(&old.0, &old.1, sequence - 32).words();
            let (new, keys) = new;
            let mut seen = *Entry::new(&new, &keys, sequence).words();
            prop_assume!((0..8).any(|i| mask & 1 << i != 0 && before[i] != seen[i]));
            for i in 0..8 { if mask & 1 << i != 0 { seen[i] = before[i]; } }
            prop_assert_eq!(Entry::whole(seen, sequence), None);
        }

        #[test]
        fn any_words_are_answered(words: [u64; 8], sequence: u64, place in 0..8u8) {
            let _ = Entry { words }.check(place);
            let _ = Entry::whole(words, sequence);
        }
    }

    #[test]
    fn epochs_wrap_around() {
        let (mut epoch, mut before) = (Epoch::default(), Vec::new());
        for _ in 0..300 {
            before.push(epoch);
            epoch = epoch.next();
            assert_eq!(Epoch::new(epoch.number()), Some(epoch));
            for old in before.iter().rev().take(63) {
                assert!(epoch.is_since(*old) && !old.is_since(epoch) && epoch.is_since(epoch));
            }
        }
        assert_eq!(Epoch::new(128), None);
        let mut since = Epoch::default();
        let mut newest = since;
        for _ in 0..1000 {
            newest = newest.next();
            since = since.near(newest);
            assert!(newest.is_since(since) && newest.is_since(newest.near(newest)));
        }
    }

    #[test]
    fn a_fresh_ring_holds_no_entry_and_lies_are_named() {
        assert_eq!(Entry::whole([0; 8], 0), None);
        let epoch = Epoch::default();
        let good = Terms { addr: 4096, bytes: 8, tag: 3, parts: 2, part: 1, epoch };
        let told = |terms: Terms, place| Entry::new(&terms, &[7; 4], 5).check(place);
        assert_eq!(told(Terms { parts: 9, ..good }, 1), Err(Violation::Parts(9)));
        assert_eq!(told(Terms { parts: 0, ..good }, 1), Err(Violation::Parts(0)));
        assert_eq!(told(good, 0), Err(Violation::Part(1, 0)));
        assert_eq!(told(Terms { part: 2, ..good }, 2), Err(Violation::Part(2, 2)));
        let wraps = Terms { addr: u64::MAX, bytes: 2, ..good };
        assert_eq!(told(wraps, 1), Err(Violation::Buffer { addr: u64::MAX, bytes: 2 }));
        assert!(told(Terms { bytes: MAX_RECEIVE_BYTES + 1, ..good }, 1).is_err());
        let alone = |terms| Entry::new(&terms, &[7; 4], 5).is_alone(epoch);
        assert!(
            alone(Terms { parts: 1, part: 0, ..good }) && !alone(good) && !alone(Terms { parts: 1, part: 0, ..wraps })
        );
    }
}
