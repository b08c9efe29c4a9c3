//! The talk of two ends: letters with any numbers, any answers and any notices, between what this side says.

use crate::control::notices;
use crate::memory;
use crate::tape::Tape;
use crate::target::Seeds;
use nccl_net_spark::flow::dialogue::Dialogue;
use nccl_net_spark::wire::codec::Writer;
use nccl_net_spark::wire::control::{Letter, Notice};

/// What the two rules come to: a notice goes when the one before was confirmed, and one is heard when it is the next.
#[derive(Default)]
struct Model {
    said: Vec<Notice>,
    sent: u64,
    confirmed: u64,
    heard: u64,
    news: bool,
}

impl Model {
    fn go_on(&mut self) {
        if self.sent == self.confirmed && self.sent < self.said.len() as u64 {
            self.sent += 1;
            self.news = true;
        }
    }

    fn letter(&self) -> Letter {
        let asks = self.sent > self.confirmed;
        let notice = if asks { self.said[self.sent as usize - 1].encode() } else { Vec::new() };
        Letter { number: self.sent, heard: self.heard, asks, notice }
    }

    /// Whether the letter's notice is new.
    fn hears(&mut self, letter: &Letter) -> bool {
        if letter.heard == self.sent {
            self.confirmed = self.sent;
            self.go_on();
        }
        let is_next = letter.asks && letter.number.checked_sub(1) == Some(self.heard);
        let is_old = letter.asks && letter.number <= self.heard;
        self.news |= is_next || is_old;
        self.heard += u64::from(is_next);
        is_next
    }
}

/// A tape of words and letters.
pub fn check(data: &[u8]) -> bool {
    let (mut dialogue, mut model, mut tape) = (Dialogue::default(), Model::default(), Tape::new(data));
    let known = notices();
    let mut notices_heard = 0;
    while let Some(step) = tape.step() {
        match step % 4 {
            0 => {
                let (_, notice) = &known[tape.below(known.len())];
                dialogue.say(notice.clone());
                model.said.push(notice.clone());
                model.go_on();
            }
            1 => {
                let expected = std::mem::take(&mut model.news).then(|| model.letter());
                assert_eq!(dialogue.news(), expected);
            }
            _ => {
                let letter = letter(&mut tape, &model);
                let is_new = model.hears(&letter);
                // What this side has to tell grows by what it says, never by what it hears.
                let room = letter.notice.len() + model.letter().notice.len() + 256;
                let told = memory::bounded(room, || dialogue.hear(&letter));
                match (&told, is_new) {
                    (Ok(None), false) => {}
                    (told, true) => assert_eq!(told, &Notice::decode(&letter.notice).map(Some)),
                    (told, false) => panic!("{told:?} of {letter:?}"),
                }
                notices_heard += u32::from(matches!(told, Ok(Some(_))));
            }
        }
        assert_eq!(dialogue.letter(), model.letter());
        assert_eq!(dialogue.is_waiting(), model.confirmed < model.said.len() as u64);
    }
    notices_heard > 0
}

/// Mostly near what would be right.
fn letter(tape: &mut Tape<'_>, model: &Model) -> Letter {
    let kind = tape.u8();
    let mut number = |near: u64, is_any: bool| {
        if is_any { tape.u64() } else { near.wrapping_add(tape.u8() as i8 as u64) }
    };
    let (number, heard) = (number(model.heard + 1, kind & 1 == 1), number(model.sent, kind & 2 == 2));
    let count = if kind & 4 == 4 { usize::from(tape.u16()) } else { usize::from(tape.u8() % 32) };
    Letter { number, heard, asks: kind & 8 == 0, notice: tape.bytes(count).to_vec() }
}

/// A talk as it should be, and one of nonsense.
pub fn seeds() -> Seeds {
    let heard = |w: &mut Writer, kind: u8, near: (i8, i8), notice: &[u8]| {
        w.u8(2).u8(kind).u8(near.0 as u8).u8(near.1 as u8).u8(notice.len() as u8).bytes(notice);
    };
    let mut talk = Writer::default();
    talk.u8(0).u8(4).u8(0).u8(6).u8(1);
    heard(&mut talk, 0, (0, 0), &[5, 1]);
    talk.u8(1);
    heard(&mut talk, 0, (-1, -1), &[5, 1]);
    heard(&mut talk, 0, (0, 0), &[6, 9, 0, 0, 0, 0, 0, 0, 0]);
    heard(&mut talk, 8, (0, 0), &[]);
    talk.u8(1);
    let mut nonsense = Writer::default();
    nonsense.u8(0).u8(2);
    heard(&mut nonsense, 0, (0, 5), &[99]);
    heard(&mut nonsense, 0, (7, 1), &[7]);
    nonsense.u8(2).u8(3).u64(u64::MAX).u64(u64::MAX).u8(1).u8(7);
    heard(&mut nonsense, 0, (0, 0), &[7]);
    vec![("talk", talk.into_bytes()), ("nonsense", nonsense.into_bytes())]
}
