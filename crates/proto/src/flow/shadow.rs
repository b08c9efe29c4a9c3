//! The receiver's copy of the ring of CTS (clear-to-send) entries. To grant a receive, or to repeat
//! the grant after a rail's loss, a NIC reads the entry from this copy and writes it into the
//! sender's ring.

use crate::wire::cts::{ENTRY_WORDS, Entry, Epoch, PackedKeys, Terms, entry_word};
use std::sync::atomic::{AtomicU64, Ordering};

/// Returns the words of the copy that hold the entry of a part of receive number `sequence`.
#[inline(always)]
pub fn place(
    shadow: &[AtomicU64],
    sequence: u64,
    part: usize,
) -> Option<&[AtomicU64; ENTRY_WORDS]> {
    shadow.get(entry_word(sequence, part)..)?.first_chunk()
}

/// Stores an entry in its place.
#[inline(always)]
pub fn store(place: &[AtomicU64; ENTRY_WORDS], entry: &Entry) {
    for (cell, word) in place.iter().zip(entry.words()) {
        // Relaxed: the NIC reads these words after the doorbell, and the provider orders the stores
        // before the doorbell. For an inline write the provider reads the words itself.
        cell.store(*word, Ordering::Relaxed);
    }
}

pub(super) fn replace_keys(
    shadow: &[AtomicU64],
    sequence: u64,
    part: usize,
    keys: &PackedKeys,
    epoch: Epoch,
) {
    let Some(place) = place(shadow, sequence, part) else {
        return;
    };
    let words = std::array::from_fn(|word| place[word].load(Ordering::Relaxed));
    let Some(old) = Entry::whole(words, sequence) else {
        return;
    };
    let addr = old.addr();
    let bytes = old.bytes();
    let tag = old.tag();
    let parts = old.parts();
    let part = old.part();
    store(
        place,
        &Entry::new(
            &Terms {
                addr,
                bytes,
                tag,
                parts,
                part,
                epoch,
            },
            keys,
            sequence,
        ),
    );
}
