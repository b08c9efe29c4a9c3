//! What should happen: the messages of a run, their bytes, and what has become of them.

use super::Dice;
use super::fabric::ARENA;

/// What a buffer holds before its receive is posted, and beyond its message for ever.
const BLANK: u8 = 0xee;
/// What a buffer is given when it was handed back: from then on nothing may write to it.
const HANDED_BACK: u8 = 0xc5;

/// One buffer of a group, and the send for it.
pub struct Part {
    /// Where it is in the arenas.
    pub at: usize,
    /// Room of the receive.
    pub room: usize,
    /// Size of the send, at most the room.
    pub bytes: usize,
    /// The send's request, once it has one.
    pub send: Option<u16>,
    /// Whether the send was told to be done.
    pub is_sent: bool,
}

/// A grouped receive, and the sends for it.
pub struct Group {
    /// The receive's request.
    pub receive: u16,
    /// Its parts; each has its place as its tag.
    pub parts: Vec<Part>,
    /// Whether it was reported done at once.
    pub optional: bool,
    /// Whether the receive was told to be done.
    pub is_told: bool,
    handed_back: bool,
}

/// All of a run.
#[derive(Default)]
pub struct Model {
    /// The groups, in the order of their grants.
    pub groups: Vec<Group>,
    used: usize,
}

impl Model {
    /// Sizes for the next group: its parts' places, rooms and sizes. `None` when the arena is used up.
    pub fn draw(&mut self, dice: &mut Dice) -> Option<Vec<Part>> {
        let count = if dice.one_in(4) { 1 + dice.below(4) } else { 1 };
        let mut parts = Vec::new();
        for _ in 0..count {
            let most = [8, 200, 1500, 3000][dice.below(4) as usize];
            let room = dice.below(most) as usize;
            let bytes = if dice.one_in(3) { dice.below(room as u64 + 1) as usize } else { room };
            if self.used + room + 64 > ARENA {
                return None;
            }
            parts.push(Part { at: self.used, room, bytes, send: None, is_sent: false });
            self.used += (room + 64).next_multiple_of(64);
        }
        Some(parts)
    }

    /// A group was granted.
    pub fn granted(&mut self, receive: u16, parts: Vec<Part>, optional: bool) {
        self.groups.push(Group { receive, parts, optional, is_told: false, handed_back: false });
    }

    /// The first group of which not all sends have begun: only for it can one begin.
    pub fn next_to_send(&mut self) -> Option<&mut Group> {
        self.groups.iter_mut().find(|group| group.parts.iter().any(|part| part.send.is_none()))
    }

    /// A buffer is ready for its message.
    pub fn blank(to: &mut [u8], part: &Part) {
        to[part.at..part.at + part.room + 64].fill(BLANK);
    }

    /// The message of a part.
    pub fn fill(from: &mut [u8], seed: u64, part: &Part) {
        for (n, byte) in from[part.at..part.at + part.bytes].iter_mut().enumerate() {
            *byte = expected(seed, part, n);
        }
    }

    /// Looks whether a group is over for its owner: its receive was told, or, where that was told at once, all its sends were. Then its
    /// bytes have to be right, and nothing may touch them any more.
    pub fn hand_back(&mut self, index: usize, seed: u64, to: &mut [u8]) {
        let group = &mut self.groups[index];
        let is_over = if group.optional { group.parts.iter().all(|part| part.is_sent) } else { group.is_told };
        if group.handed_back || !is_over {
            return;
        }
        group.handed_back = true;
        for part in &group.parts {
            let bytes = &mut to[part.at..part.at + part.room + 64];
            for (n, byte) in bytes.iter().enumerate() {
                let right = if n < part.bytes { expected(seed, part, n) } else { BLANK };
                assert_eq!(*byte, right, "byte {n} of {} in group {index}", part.bytes);
            }
            bytes.fill(HANDED_BACK);
        }
    }

    /// Whether all of it was told, once.
    pub fn is_done(&self) -> bool {
        self.groups.iter().all(|group| group.is_told && group.parts.iter().all(|part| part.is_sent))
    }

    /// The receiver's caller has been told that the connection is at its end: all buffers are its own again.
    pub fn take_back(&mut self, to: &mut [u8]) {
        for group in self.groups.iter_mut().filter(|group| !group.handed_back) {
            group.handed_back = true;
            for part in &group.parts {
                to[part.at..part.at + part.room + 64].fill(HANDED_BACK);
            }
        }
    }

    /// The sender's caller has been told so, and uses what it had to send for something else.
    pub fn spoil(&self, from: &mut [u8]) {
        let parts = self.groups.iter().flat_map(|group| &group.parts);
        for part in parts.filter(|part| part.send.is_some() && !part.is_sent) {
            from[part.at..part.at + part.bytes].fill(HANDED_BACK);
        }
    }

    /// All was handed back.
    pub fn check_that_all_is_over(&self) {
        for (index, group) in self.groups.iter().enumerate() {
            assert!(group.handed_back, "group {index} is not over");
        }
    }

    /// Nothing was written into a buffer after it was handed back.
    pub fn check_what_was_handed_back(&self, to: &[u8]) {
        for (index, group) in self.groups.iter().enumerate().filter(|(_, group)| group.handed_back) {
            for part in &group.parts {
                let bytes = &to[part.at..part.at + part.room + 64];
                assert!(bytes.iter().all(|byte| *byte == HANDED_BACK), "group {index} was written to when it was over");
            }
        }
    }
}

fn expected(seed: u64, part: &Part, n: usize) -> u8 {
    let state = (seed << 24 ^ (part.at + n) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (state >> 56) as u8
}
