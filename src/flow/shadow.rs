//! The receiver's copy of the CTS ring, from which a NIC reads entries, also for repeated grants.

use crate::wire::cts::{ENTRY_WORDS, Entry, Epoch, PackedKeys, Terms, entry_word};
use std::sync::atomic::{AtomicU64, Ordering};

/// Returns the place of the entry for a part of receive number `sequence`.
#[inline(always)]
pub fn place(shadow: &[AtomicU64], sequence: u64, part: usize) -> Option<&[AtomicU64; ENTRY_WORDS]> {
    shadow.get(entry_word(sequence, part)..)?.first_chunk()
}

/// Stores an entry in its place.
#[inline(always)]
pub fn store(place: &[AtomicU64; ENTRY_WORDS], entry: &Entry) {
    for (cell, word) in place.iter().zip(entry.words()) {
        // Relaxed: the provider orders these stores before the doorbell that makes the NIC read
        // them, or reads them itself.
        cell.store(*word, Ordering::Relaxed);
    }
}

pub(super) fn replace_keys(shadow: &[AtomicU64], sequence: u64, part: usize, keys: &PackedKeys, epoch: Epoch) {
    let Some(place) = place(shadow, sequence, part) else { return };
    let words = std::array::from_fn(|word| place[word].load(Ordering::Relaxed));
    let Some(old) = Entry::whole(words, sequence) else { return };
    let (addr, bytes, tag, parts, part) = (old.addr(), old.bytes(), old.tag(), old.parts(), old.part());
    store(place, &Entry::new(&Terms { addr, bytes, tag, parts, part, epoch }, keys, sequence));
}
