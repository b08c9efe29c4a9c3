//! The clear-to-send (CTS) entry: 64 bytes that grant the sender one part of a receive. The
//! receiver writes the entry into the ring, which is in the sender's memory.
//!
//! The sender may read the ring while a NIC writes it. An entry is one aligned cache line, but the
//! order in which its bytes become visible is not guaranteed. On a weakly ordered machine, a reader
//! can see a mix of old and new words even within one line. So the first word identifies the
//! receive, and the last word is a digest of the other words and of the receive's 64-bit sequence
//! number. A reader that finds a wrong digest tries again later.

use super::ids::LaneId;
use super::{MAX_RAILS, PARTS, SLOTS};

/// Number of 64-bit words in one entry.
pub const ENTRY_WORDS: usize = 8;
/// Size of one entry in bytes: one cache line on x86-64 and on Arm.
pub const ENTRY_BYTES: usize = ENTRY_WORDS * 8;
/// Number of 64-bit words in the whole ring.
pub const RING_WORDS: usize = SLOTS * PARTS * ENTRY_WORDS;
/// Largest size of an entry's buffer, in bytes: NCCL's limit for a message
/// (`NCCL_MAX_NET_SIZE_BYTES`, 2^40).
pub const MAX_RECEIVE_BYTES: u64 = 1 << 40;

/// Generation of the receiver's memory keys in an entry. It wraps around.
///
/// A device of the receiver that was removed and returns has new keys. The receiver then begins an
/// epoch, before it answers the sender's control message JOIN. It writes the entries of all open
/// receives again, with its current keys. Each entry is written on the same lane as before: on
/// another lane, the old entry could arrive last and replace the new one. Another lane is used only
/// if the entry's lane was lost, because a lost lane's queue pairs are stopped. The answer JOINED
/// names the first epoch with keys for the returning lane. For entries of earlier epochs, the
/// sender uses other lanes: it posts neither new sends nor resent shares on the returning lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Epoch(u8);

/// Width of an [`Epoch`] in an entry's third word, in bits.
const EPOCH_BITS: u32 = 7;
/// Position of the lowest bit of an [`Epoch`] in that word.
const EPOCH_AT: u32 = 48 - EPOCH_BITS;

impl Epoch {
    /// Returns the epoch with this number, or `None` if the number needs more than 7 bits.
    pub fn new(number: u8) -> Option<Self> {
        (number >> EPOCH_BITS == 0).then_some(Self(number))
    }

    /// Returns the epoch's number.
    pub fn number(self) -> u8 {
        self.0
    }

    /// Returns the following epoch.
    pub fn next(self) -> Self {
        Self((self.0 + 1) % (1 << EPOCH_BITS))
    }

    /// Returns this epoch if it is at most 31 before `newest`, otherwise the epoch 31 before
    /// `newest`. So [`Epoch::is_since`] can compare the result with the epochs of entries. The
    /// replacement changes nothing for open grants: the receiver writes their entries again in each
    /// new epoch, so the entries' epochs are later than this epoch and its replacement.
    pub fn near(self, newest: Self) -> Self {
        const FAR: u8 = 1 << (EPOCH_BITS - 2);
        if newest.0.wrapping_sub(self.0) % (1 << EPOCH_BITS) < FAR {
            self
        } else {
            Self(newest.0.wrapping_sub(FAR - 1) % (1 << EPOCH_BITS))
        }
    }

    /// Returns true if this epoch is `other` or comes after it. The two must be less than 64 apart;
    /// see [`Epoch::near`].
    pub fn is_since(self, other: Self) -> bool {
        self.0.wrapping_sub(other.0) % (1 << EPOCH_BITS) < 1 << (EPOCH_BITS - 1)
    }
}

/// Remote keys by lane, two in each word. The key of the lower lane is in the lower half.
pub type PackedKeys = [u64; MAX_RAILS / 2];

/// Contents of an entry, except its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Terms {
    /// Address of the buffer in the receiver's memory.
    pub addr: u64,
    /// Buffer size in bytes, at most [`MAX_RECEIVE_BYTES`].
    pub bytes: u64,
    /// NCCL's tag.
    pub tag: i32,
    /// Number of parts of the receive: 1 to [`PARTS`].
    pub parts: u8,
    /// Index of the entry's part within the receive.
    pub part: u8,
    /// Generation of the entry's keys.
    pub epoch: Epoch,
}

/// The encoded entry of one part of a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Entry {
    words: [u64; ENTRY_WORDS],
}

/// Error of a complete entry with an invalid field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The number of parts is out of range, or differs between the entries of a receive.
    #[error("invalid group of {0} receives")]
    Parts(u8),
    /// The entry's part number (the first field) is not the number of its place in the ring (the
    /// second field), or is not below the receive's number of parts.
    #[error("part {0} in place of part {1}")]
    Part(u8, u8),
    /// The buffer is larger than [`MAX_RECEIVE_BYTES`], or its address range wraps around.
    #[error("invalid buffer of {bytes} bytes at {addr:#x}")]
    Buffer {
        /// Address of the buffer.
        addr: u64,
        /// Size of the buffer in bytes.
        bytes: u64,
    },
}

impl Entry {
    /// Creates the entry for receive number `sequence`. Keys of lanes that the connection does not
    /// have may have any value.
    #[inline(always)]
    pub fn new(terms: &Terms, keys: &PackedKeys, sequence: u64) -> Self {
        let [k0, k1, k2, k3] = *keys;
        let epoch = u64::from(terms.epoch.0) << EPOCH_AT;
        let sizes =
            terms.bytes | epoch | u64::from(terms.parts) << 48 | u64::from(terms.part) << 56;
        let mut words = [
            first_word(sequence, terms.tag),
            terms.addr,
            sizes,
            k0,
            k1,
            k2,
            k3,
            0,
        ];
        words[7] = digest(&words, sequence);
        Self { words }
    }

    /// Returns the words to write.
    #[inline(always)]
    pub fn words(&self) -> &[u64; ENTRY_WORDS] {
        &self.words
    }

    /// Returns true if `first` can be the first word of the entry for `sequence`. A cheap first
    /// test before [`Entry::whole`].
    #[inline(always)]
    pub fn may_be(first: u64, sequence: u64) -> bool {
        first as u32 == stamp(sequence)
    }

    /// Returns the entry for `sequence` in `words`, or `None` if it has not arrived completely. The
    /// fields are not validated; see [`Entry::check`].
    #[inline(always)]
    pub fn whole(words: [u64; ENTRY_WORDS], sequence: u64) -> Option<Entry> {
        (Self::may_be(words[0], sequence) && words[7] == digest(&words, sequence))
            .then_some(Entry { words })
    }

    /// Returns true for the usual entry: the receive has one part, the keys have this epoch, and
    /// the buffer is valid.
    #[inline(always)]
    pub fn is_alone(&self, epoch: Epoch) -> bool {
        // Compares epoch, parts and part together.
        self.words[2] >> EPOCH_AT == 1 << EPOCH_BITS | u64::from(epoch.0) && self.has_buffer()
    }

    /// Validates the fields of the entry in the place of part number `place`.
    ///
    /// # Errors
    /// A [`Violation`] describes the first invalid field.
    pub fn check(&self, place: u8) -> Result<(), Violation> {
        let addr = self.addr();
        let bytes = self.bytes();
        let parts = self.parts();
        let part = self.part();
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

    /// Returns the address of the buffer in the receiver's memory.
    #[inline(always)]
    pub fn addr(&self) -> u64 {
        self.words[1]
    }

    /// Returns the buffer size in bytes.
    #[inline(always)]
    pub fn bytes(&self) -> u64 {
        self.words[2] & ((1 << EPOCH_AT) - 1)
    }

    /// Returns the generation of the entry's keys.
    #[inline(always)]
    pub fn epoch(&self) -> Epoch {
        Epoch((self.words[2] >> EPOCH_AT) as u8 % (1 << EPOCH_BITS))
    }

    /// Returns the buffer's key for a lane.
    pub fn rkey(&self, lane: LaneId) -> u32 {
        let (word, shift) = rkey_in(lane);
        (self.words[word] >> shift) as u32
    }

    /// Returns NCCL's tag.
    #[inline(always)]
    pub fn tag(&self) -> i32 {
        (self.words[0] >> 32) as u32 as i32
    }

    /// Returns the number of parts of the receive.
    #[inline(always)]
    pub fn parts(&self) -> u8 {
        (self.words[2] >> 48) as u8
    }

    /// Returns the index of the entry's part within the receive.
    #[inline(always)]
    pub fn part(&self) -> u8 {
        (self.words[2] >> 56) as u8
    }
}

/// Returns the position of a lane's key in an entry: index of the word, and shift in bits.
#[inline(always)]
pub fn rkey_in(lane: LaneId) -> (usize, u32) {
    (3 + lane.index() / 2, lane.index() as u32 % 2 * 32)
}

/// Returns the index in the ring of the first word of a receive part's entry.
#[inline(always)]
pub fn entry_word(sequence: u64, part: usize) -> usize {
    ((sequence as usize % SLOTS) * PARTS + part % PARTS) * ENTRY_WORDS
}

fn stamp(sequence: u64) -> u32 {
    // One is added so that a ring of zeros does not look like the entry of receive 0.
    (sequence as u32).wrapping_add(1)
}

fn first_word(sequence: u64, tag: i32) -> u64 {
    u64::from(stamp(sequence)) | u64::from(tag as u32) << 32
}

/// Multiply-rotate digest. If two entries differ at random, a mix of their words has a valid digest
/// with a probability of about 2^-64. The digest does not protect against an adversary, who could
/// write whole entries. Each round combines two words. Multiplication spreads a difference in the
/// first word over the bits above it before the second word is combined.
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
        (
            any::<u32>(),
            0..=MAX_RECEIVE_BYTES,
            any::<i32>(),
            1..=8u8,
            any::<PackedKeys>(),
            any::<u8>(),
            0..128_u8,
        )
            .prop_map(|(addr, bytes, tag, parts, keys, part, epoch)| {
                let epoch = Epoch::new(epoch).unwrap();
                (
                    Terms {
                        addr: u64::from(addr) << 12,
                        bytes,
                        tag,
                        parts,
                        part: part % parts,
                        epoch,
                    },
                    keys,
                )
            })
    }

    fn terms_of(entry: &Entry) -> (Terms, PackedKeys) {
        let key = |lane| {
            let (word, shift) = rkey_in(LaneId::new(lane).unwrap());
            entry.words[word] >> shift & 0xffff_ffff
        };
        let keys = std::array::from_fn(|pair| key(2 * pair) | key(2 * pair + 1) << 32);
        let addr = entry.addr();
        let bytes = entry.bytes();
        let tag = entry.tag();
        (
            Terms {
                addr,
                bytes,
                tag,
                parts: entry.parts(),
                part: entry.part(),
                epoch: entry.epoch(),
            },
            keys,
        )
    }

    proptest! {
        #[test]
        fn an_entry_survives_encoding_and_decoding((terms, keys) in terms(), sequence: u64) {
            let back = Entry::whole(*Entry::new(&terms, &keys, sequence).words(), sequence);
            prop_assert_eq!(back.map(|entry| entry.check(terms.part)), Some(Ok(())));
            prop_assert_eq!(back.map(|entry| entry.is_alone(terms.epoch)), Some(terms.parts == 1));
            prop_assert_eq!(back.map(|entry| entry.is_alone(terms.epoch.next())), Some(false));
            prop_assert_eq!(back.map(|entry| terms_of(&entry)), Some((terms, keys)));
        }

        #[test]
        fn a_partly_written_entry_is_not_read(old in terms(), new in terms(), sequence in 32..u64::MAX, mask in 1..255u8) {
            let before = *Entry::new(&old.0, &old.1, sequence - 32).words();
            let (new, keys) = new;
            let mut seen = *Entry::new(&new, &keys, sequence).words();
            prop_assume!((0..8).any(|i| mask & 1 << i != 0 && before[i] != seen[i]));
            for i in 0..8 { if mask & 1 << i != 0 { seen[i] = before[i]; } }
            prop_assert_eq!(Entry::whole(seen, sequence), None);
        }

        #[test]
        fn any_words_are_decoded_or_refused(words: [u64; 8], sequence: u64, place in 0..8u8) {
            let _ = Entry { words }.check(place);
            let _ = Entry::whole(words, sequence);
        }
    }

    #[test]
    fn epochs_wrap_around() {
        let mut epoch = Epoch::default();
        let mut before = Vec::new();
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
    fn a_new_ring_holds_no_entry_and_invalid_entries_are_named() {
        assert_eq!(Entry::whole([0; 8], 0), None);
        let epoch = Epoch::default();
        let good = Terms {
            addr: 4096,
            bytes: 8,
            tag: 3,
            parts: 2,
            part: 1,
            epoch,
        };
        let told = |terms: Terms, place| Entry::new(&terms, &[7; 4], 5).check(place);
        assert_eq!(
            told(Terms { parts: 9, ..good }, 1),
            Err(Violation::Parts(9))
        );
        assert_eq!(
            told(Terms { parts: 0, ..good }, 1),
            Err(Violation::Parts(0))
        );
        assert_eq!(told(good, 0), Err(Violation::Part(1, 0)));
        assert_eq!(
            told(Terms { part: 2, ..good }, 2),
            Err(Violation::Part(2, 2))
        );
        let wraps = Terms {
            addr: u64::MAX,
            bytes: 2,
            ..good
        };
        assert_eq!(
            told(wraps, 1),
            Err(Violation::Buffer {
                addr: u64::MAX,
                bytes: 2
            })
        );
        assert!(
            told(
                Terms {
                    bytes: MAX_RECEIVE_BYTES + 1,
                    ..good
                },
                1
            )
            .is_err()
        );
        let alone = |terms| Entry::new(&terms, &[7; 4], 5).is_alone(epoch);
        assert!(
            alone(Terms {
                parts: 1,
                part: 0,
                ..good
            }) && !alone(good)
                && !alone(Terms {
                    parts: 1,
                    part: 0,
                    ..wraps
                })
        );
    }
}
