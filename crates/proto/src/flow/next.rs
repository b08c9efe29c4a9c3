//! The next receive in the ring, which is the sender's memory for CTS (clear-to-send) entries.
//!
//! A receive has one to eight parts, with one entry for each part. A receive with several parts is
//! a group. This file detects that all entries of the next receive have arrived completely, and
//! finds the part that matches a send.

use super::sequence_after;
use crate::wire::PARTS;
use crate::wire::cts::{ENTRY_WORDS, Entry, Epoch, Violation, entry_word, rkey_in};
use crate::wire::ids::LaneId;
use std::sync::atomic::{AtomicU64, Ordering};

/// The receive at the head of the ring. A send can match only a part of this receive. The receiver
/// reuses the receive's place in the ring only after it has all bytes of the receive.
#[derive(Debug, Clone, Default, Hash)]
pub(super) struct Next<const N: usize> {
    sequence: u64,
    /// Bit set of the parts for which no send has started. `search` sets it when all entries of the
    /// receive have arrived; before, it is 0. It stays 0 if `peek` finds the part for a send.
    waiting: u8,
    epoch: Epoch,
}

/// The receive part that a send matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// The receive's number on this connection.
    pub sequence: u64,
    /// Index of the part in that receive.
    pub part: u8,
    /// Address in the receiver's memory to write to.
    pub addr: u64,
    /// Size of the buffer at this address.
    pub buffer_bytes: u64,
    /// Epoch of the receiver's keys in the entry.
    pub epoch: Epoch,
    /// Index in the ring of the entry's first word.
    pub(super) at: usize,
}

impl Head {
    /// Returns the buffer's key on a lane's rail. `ring` must be the ring in which the part was
    /// found. May be called until the send is done: afterwards, the receiver may overwrite the
    /// entry.
    #[inline(always)]
    pub fn rkey(&self, ring: &[AtomicU64], lane: LaneId) -> u32 {
        rkey_at(ring, self.at, lane)
    }
}

/// Returns the CTS entry of part `part` of receive number `sequence`. Returns `None` if the entry
/// has not arrived completely, or while the receiver rewrites it.
pub(super) fn granted(ring: &[AtomicU64], sequence: u64, part: u8) -> Option<Entry> {
    entry_at(ring, entry_word(sequence, usize::from(part)), sequence)
}

#[inline(always)]
fn rkey_at(ring: &[AtomicU64], at: usize, lane: LaneId) -> u32 {
    let (word, shift) = rkey_in(lane);
    let place = ring.get(at + word);
    // Relaxed: this send has already read the word as part of a whole entry, and the lane's key in
    // the word does not change until the receiver has all bytes of the send. Even if the receiver
    // repeats the grant, the entry has the same keys for all rails in use. (A rail whose key
    // changes is lost first. A share that is sent again reads its key with [`granted`].)
    place.map_or(0, |place| (place.load(Ordering::Relaxed) >> shift) as u32)
}

/// Result of reading the entry at the head of the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peek {
    /// The receive's first entry has not arrived completely.
    Nothing,
    /// The receive has a single part, which matches this send.
    Found(Head),
    /// The receive is a group, or has another tag, an epoch other than the newest known one, or an
    /// invalid buffer: use [`super::sends::Sends::search`].
    Search,
}

impl<const N: usize> Next<N> {
    pub(super) fn sequence(&self) -> u64 {
        self.sequence
    }

    #[inline(always)]
    pub(super) fn peek(&self, ring: &[AtomicU64], tag: i32) -> Peek {
        if self.waiting != 0 {
            return Peek::Search;
        }
        match self.entry(ring, 0) {
            Some(only) if only.is_alone(self.epoch) && only.tag() == tag => {
                Peek::Found(self.head(&only, 0))
            }
            Some(_) => Peek::Search,
            None => Peek::Nothing,
        }
    }

    pub(super) fn search(
        &mut self,
        ring: &[AtomicU64],
        tag: i32,
    ) -> Result<Option<Head>, Violation> {
        if self.waiting == 0 && !self.has_come(ring)? {
            return Ok(None);
        }
        self.find(ring, tag)
    }

    /// Marks a part as used by a send. After the last part, advances to the next receive.
    #[inline(always)]
    pub(super) fn take(&mut self, part: u8) {
        self.waiting &= !(1 << (part & 7));
        if self.waiting == 0 {
            self.sequence = sequence_after::<N>(self.sequence);
        }
    }

    #[inline(always)]
    fn head(&self, entry: &Entry, part: u8) -> Head {
        let sequence = self.sequence;
        let at = entry_word(sequence, usize::from(part));
        Head {
            sequence,
            part,
            addr: entry.addr(),
            buffer_bytes: entry.bytes(),
            epoch: entry.epoch(),
            at,
        }
    }

    fn find(&self, ring: &[AtomicU64], tag: i32) -> Result<Option<Head>, Violation> {
        let mut waiting = self.waiting;
        while waiting != 0 {
            let part = waiting.trailing_zeros() as u8;
            match self.checked(ring, part)? {
                Some(entry) if entry.tag() == tag => return Ok(Some(self.head(&entry, part))),
                _ => waiting &= waiting - 1,
            }
        }
        Ok(None)
    }

    fn has_come(&mut self, ring: &[AtomicU64]) -> Result<bool, Violation> {
        let Some(first) = self.checked(ring, 0)? else {
            return Ok(false);
        };
        let parts = first.parts();
        for part in 1..parts {
            match self.checked(ring, part)? {
                Some(entry) if entry.parts() == parts => {}
                Some(entry) => return Err(Violation::Parts(entry.parts())),
                None => return Ok(false),
            }
        }
        self.waiting = (0xff_u16 >> (PARTS as u16 - u16::from(parts).min(PARTS as u16))) as u8;
        Ok(true)
    }

    /// Returns the checked entry of a part, or `None` if it has not arrived completely.
    fn checked(&self, ring: &[AtomicU64], part: u8) -> Result<Option<Entry>, Violation> {
        let Some(entry) = self.entry(ring, part) else {
            return Ok(None);
        };
        entry.check(part).map(|()| Some(entry))
    }

    /// Returns the entry of a part, or `None` if it has not arrived completely.
    #[inline(always)]
    fn entry(&self, ring: &[AtomicU64], part: u8) -> Option<Entry> {
        entry_at(
            ring,
            entry_word(self.sequence, usize::from(part)),
            self.sequence,
        )
    }

    pub(super) fn set_epoch(&mut self, epoch: Epoch) {
        self.epoch = epoch;
    }
}

#[inline(always)]
fn entry_at(ring: &[AtomicU64], at: usize, sequence: u64) -> Option<Entry> {
    let place = ring.get(at..at + ENTRY_WORDS)?;
    // Acquire: the loads of the other words, and everything that depends on them, come after this
    // load. The NIC guarantees no order of its stores within an entry. The entry's digest detects a
    // torn entry, so the other loads may be relaxed.
    let mut words = [0; ENTRY_WORDS];
    words[0] = place[0].load(Ordering::Acquire);
    if !Entry::may_be(words[0], sequence) {
        return None;
    }
    for (word, cell) in words[1..].iter_mut().zip(&place[1..]) {
        *word = cell.load(Ordering::Relaxed);
    }
    Entry::whole(words, sequence)
}
