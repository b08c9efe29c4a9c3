//! The receive that is next in the ring of clear-to-sends: whether it has come, whole, and which of its parts is for a send.

use crate::wire::PARTS;
use crate::wire::cts::{ENTRY_WORDS, Entry, Epoch, Violation, entry_word, rkey_in};
use crate::wire::ids::LaneId;
use std::sync::atomic::{AtomicU64, Ordering};

/// The receive at the head of the ring: the only one that sends are matched with. Its entries stay in the ring: the
/// receiver writes them anew only after it has all bytes of their sends.
#[derive(Debug, Default)]
pub(super) struct Next {
    sequence: u64,
    /// Parts of it that no send has taken, a bit each; 0 while the group has not arrived, or is one part that was not
    /// searched for.
    waiting: u8,
    /// The epoch of the receiver's keys that entries have, as far as is known.
    epoch: Epoch,
}

/// The receive's part that a send was matched with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// The receive's number on this connection.
    pub sequence: u64,
    /// Which of its parts.
    pub part: u8,
    /// Where to write.
    pub addr: u64,
    /// How much at most.
    pub room_bytes: u64,
    /// Which of the receiver's keys its entry has.
    pub epoch: Epoch,
    /// Where its entry begins in the ring, in words.
    pub(super) at: usize,
}

impl Head {
    /// The buffer's key on a lane's rail, from the same ring; to be asked before the send is done.
    #[inline(always)]
    pub fn rkey(&self, ring: &[AtomicU64], lane: LaneId) -> u32 {
        rkey_at(ring, self.at, lane)
    }
}

/// The entry of a receive's part, for which a send runs; `None` while it is being written once more.
pub fn granted(ring: &[AtomicU64], sequence: u64, part: u8) -> Option<Entry> {
    entry_at(ring, entry_word(sequence, usize::from(part)), sequence)
}

#[inline(always)]
fn rkey_at(ring: &[AtomicU64], at: usize, lane: LaneId) -> u32 {
    let (word, shift) = rkey_in(lane);
    let place = ring.get(at + word);
    // Relaxed: this word was read before, as part of a whole entry, and it does not change until the receiver has all bytes of the
    // send: should the entry be written once more before that, it has the same key for each rail that is in use. (A rail whose key
    // changes is lost meanwhile, and is used with what [`granted`] finds.)
    place.map_or(0, |place| (place.load(Ordering::Relaxed) >> shift) as u32)
}

/// What a look at the head of the ring found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peek {
    /// The receive has not come.
    Nothing,
    /// It has, and is for this send.
    Found(Head),
    /// It is a group, or has another tag: [`super::sends::Sends::search`] tells.
    Search,
}

impl Next {
    /// The receive's number on this connection.
    pub(super) fn sequence(&self) -> u64 {
        self.sequence
    }

    /// As [`super::sends::Sends::peek`].
    #[inline(always)]
    pub(super) fn peek(&self, ring: &[AtomicU64], tag: i32) -> Peek {
        if self.waiting != 0 {
            return Peek::Search;
        }
        match self.entry(ring, 0) {
            Some(only) if only.is_alone(self.epoch) && only.tag() == tag => Peek::Found(self.head(&only, 0)),
            Some(_) => Peek::Search,
            None => Peek::Nothing,
        }
    }

    /// As [`super::sends::Sends::search`].
    pub(super) fn search(&mut self, ring: &[AtomicU64], tag: i32) -> Result<Option<Head>, Violation> {
        if self.waiting == 0 && !self.has_come(ring)? {
            return Ok(None);
        }
        self.find(ring, tag)
    }

    /// Takes the part that was found. When it was the last of its group the group after it is the next.
    #[inline(always)]
    pub(super) fn take(&mut self, part: u8) {
        self.waiting &= !(1 << (part & 7));
        if self.waiting == 0 {
            self.sequence += 1;
        }
    }

    #[inline(always)]
    fn head(&self, entry: &Entry, part: u8) -> Head {
        let sequence = self.sequence;
        let at = entry_word(sequence, usize::from(part));
        Head { sequence, part, addr: entry.addr(), room_bytes: entry.bytes(), epoch: entry.epoch(), at }
    }

    /// The first part with `tag` that no send has taken.
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

    /// Looks whether all entries of the group have arrived.
    fn has_come(&mut self, ring: &[AtomicU64]) -> Result<bool, Violation> {
        let Some(first) = self.checked(ring, 0)? else { return Ok(false) };
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

    /// The entry of a part, once it is there, whole and allowed.
    fn checked(&self, ring: &[AtomicU64], part: u8) -> Result<Option<Entry>, Violation> {
        let Some(entry) = self.entry(ring, part) else { return Ok(None) };
        entry.check(part).map(|()| Some(entry))
    }

    /// The entry of a part, once it is there, whole.
    #[inline(always)]
    fn entry(&self, ring: &[AtomicU64], part: u8) -> Option<Entry> {
        entry_at(ring, entry_word(self.sequence, usize::from(part)), self.sequence)
    }

    /// The receiver's entries have keys of this epoch from here on.
    pub(super) fn set_epoch(&mut self, epoch: Epoch) {
        self.epoch = epoch;
    }
}

#[inline(always)]
fn entry_at(ring: &[AtomicU64], at: usize, sequence: u64) -> Option<Entry> {
    let place = ring.get(at..at + ENTRY_WORDS)?;
    // Acquire: the words after it, and whatever is done because of them, come after it in this thread. The NIC
    // promises nothing about the order of its stores within an entry; the entry's digest is what tells a whole
    // entry from a torn one, so the loads that follow may be relaxed.
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
