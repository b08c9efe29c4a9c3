//! Expected behaviour: the messages of a run, their bytes, and their progress.

use super::Dice;
use super::fabric::ARENA;

/// Value of each byte of a buffer before its receive is posted. The bytes after the message keep
/// this value.
const BLANK: u8 = 0xee;
/// Value of each byte of a buffer after it was handed back to the caller. From then on a write to
/// the buffer is an error.
const HANDED_BACK: u8 = 0xc5;

pub struct Part {
    /// Offset in the sender's arena and in the receiver's, which have the same layout.
    pub at: usize,
    /// Size of the receive's buffer in bytes.
    pub room: usize,
    /// Size of the send in bytes. It is at most `room`.
    pub bytes: usize,
    pub send: Option<u16>,
    pub is_sent: bool,
}

/// A receive of one or more parts, and the sends for it.
pub struct Group {
    pub receive: u16,
    /// The parts of the receive. A part's index is also its tag.
    pub parts: Vec<Part>,
    /// True for an optional receive, which is reported done before its bytes have come.
    pub optional: bool,
    pub is_reported: bool,
    handed_back: bool,
}

#[derive(Default)]
pub struct Model {
    pub groups: Vec<Group>,
    used: usize,
}

impl Model {
    /// Draws the parts of the next group. Returns `None` when the arena is used up.
    pub fn draw(&mut self, dice: &mut Dice) -> Option<Vec<Part>> {
        let count = if dice.one_in(4) { 1 + dice.below(4) } else { 1 };
        let mut parts = Vec::new();
        for _ in 0..count {
            let limit = [8, 200, 1500, 3000][dice.below(4) as usize];
            let room = dice.below(limit) as usize;
            let bytes = if dice.one_in(3) {
                dice.below(room as u64 + 1) as usize
            } else {
                room
            };
            if self.used + room + 64 > ARENA {
                return None;
            }
            parts.push(Part {
                at: self.used,
                room,
                bytes,
                send: None,
                is_sent: false,
            });
            self.used += (room + 64).next_multiple_of(64);
        }
        Some(parts)
    }

    pub fn granted(&mut self, receive: u16, parts: Vec<Part>, optional: bool) {
        self.groups.push(Group {
            receive,
            parts,
            optional,
            is_reported: false,
            handed_back: false,
        });
    }

    /// Returns the first group that has a send that has not begun. Only sends of this group can
    /// begin.
    pub fn next_to_send(&mut self) -> Option<&mut Group> {
        self.groups
            .iter_mut()
            .find(|group| group.parts.iter().any(|part| part.send.is_none()))
    }

    pub fn blank(to: &mut [u8], part: &Part) {
        to[part.at..part.at + part.room + 64].fill(BLANK);
    }

    pub fn fill(from: &mut [u8], seed: u64, part: &Part) {
        for (n, byte) in from[part.at..part.at + part.bytes].iter_mut().enumerate() {
            *byte = expected(seed, part, n);
        }
    }

    /// Hands a group's buffers back once the caller may reuse them. For an optional receive, this
    /// is when all its sends are done; for others, when the receive was reported done. The bytes
    /// have to be right then, and must not change later.
    pub fn hand_back(&mut self, index: usize, seed: u64, to: &mut [u8]) {
        let group = &mut self.groups[index];
        let is_over = if group.optional {
            group.parts.iter().all(|part| part.is_sent)
        } else {
            group.is_reported
        };
        if group.handed_back || !is_over {
            return;
        }
        group.handed_back = true;
        for part in &group.parts {
            let bytes = &mut to[part.at..part.at + part.room + 64];
            for (n, byte) in bytes.iter().enumerate() {
                let right = if n < part.bytes {
                    expected(seed, part, n)
                } else {
                    BLANK
                };
                assert_eq!(*byte, right, "byte {n} of {} in group {index}", part.bytes);
            }
            bytes.fill(HANDED_BACK);
        }
    }

    pub fn is_done(&self) -> bool {
        self.groups
            .iter()
            .all(|group| group.is_reported && group.parts.iter().all(|part| part.is_sent))
    }

    /// Hands all buffers back, because the connection's end was reported to the receiver's caller.
    pub fn take_back(&mut self, to: &mut [u8]) {
        for group in self.groups.iter_mut().filter(|group| !group.handed_back) {
            group.handed_back = true;
            for part in &group.parts {
                to[part.at..part.at + part.room + 64].fill(HANDED_BACK);
            }
        }
    }

    /// Overwrites the bytes of unfinished sends, because the connection's end was reported to the
    /// sender's caller.
    pub fn overwrite_unfinished(&self, from: &mut [u8]) {
        let parts = self.groups.iter().flat_map(|group| &group.parts);
        for part in parts.filter(|part| part.send.is_some() && !part.is_sent) {
            from[part.at..part.at + part.bytes].fill(HANDED_BACK);
        }
    }

    pub fn check_that_all_is_over(&self) {
        for (index, group) in self.groups.iter().enumerate() {
            assert!(group.handed_back, "group {index} is not over");
        }
    }

    pub fn check_what_was_handed_back(&self, to: &[u8]) {
        for (index, group) in self
            .groups
            .iter()
            .enumerate()
            .filter(|(_, group)| group.handed_back)
        {
            for part in &group.parts {
                let bytes = &to[part.at..part.at + part.room + 64];
                assert!(
                    bytes.iter().all(|byte| *byte == HANDED_BACK),
                    "group {index} was written after its return"
                );
            }
        }
    }
}

fn expected(seed: u64, part: &Part, n: usize) -> u8 {
    let state = (seed << 24 ^ (part.at + n) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (state >> 56) as u8
}
