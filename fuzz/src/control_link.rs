//! The control link, which numbers and confirms control frames between two ends. The peer sends
//! frames with any numbers, confirmations and messages. In between, this side queues messages of
//! its own.

use crate::control::messages;
use crate::memory;
use crate::tape::Tape;
use crate::target::Seeds;
use proto::flow::control_link::ControlLink;
use proto::wire::codec::Writer;
use proto::wire::control::{ControlFrame, ControlMessage};

/// The protocol's rules. A control message is sent only after the message before it was confirmed,
/// unless all queued messages are sent ahead. A received message is accepted only if its number is
/// the next one.
#[derive(Default)]
struct Model {
    queued: Vec<ControlMessage>,
    sent: u64,
    sent_ahead: u64,
    confirmed: u64,
    received: u64,
    is_due: bool,
}

impl Model {
    fn go_on(&mut self) {
        if self.sent == self.confirmed && self.sent < self.queued.len() as u64 {
            self.sent += 1;
            self.is_due = true;
        }
    }

    fn frame(&self) -> ControlFrame {
        let awaits_confirmation = self.sent > self.confirmed;
        let message = if awaits_confirmation {
            self.queued[self.sent as usize - 1].encode()
        } else {
            Vec::new()
        };
        ControlFrame {
            number: self.sent,
            received: self.received,
            awaits_confirmation,
            message,
        }
    }

    /// Returns the current frame, and the frames of all messages after it.
    fn send_ahead(&mut self) -> Vec<ControlFrame> {
        self.is_due = false;
        let first = self.frame();
        let later = (self.sent + 1..).zip(&self.queued[self.sent as usize..]);
        let frame = |(number, message): (u64, &ControlMessage)| ControlFrame {
            number,
            awaits_confirmation: true,
            message: message.encode(),
            ..first
        };
        let frames = std::iter::once(first.clone())
            .chain(later.map(frame))
            .collect();
        self.sent_ahead = self.queued.len() as u64;
        frames
    }

    /// Takes a frame. Returns true if its message is new.
    fn receive(&mut self, frame: &ControlFrame) -> bool {
        if frame.received >= self.sent && frame.received <= self.sent.max(self.sent_ahead) {
            (self.sent, self.confirmed) = (frame.received, frame.received);
            self.go_on();
        }
        let is_next =
            frame.awaits_confirmation && frame.number.checked_sub(1) == Some(self.received);
        let is_old = frame.awaits_confirmation && frame.number <= self.received;
        self.is_due |= is_next || is_old;
        self.received += u64::from(is_next);
        is_next
    }
}

/// Runs the input as a tape of this side's messages and of the peer's control frames.
pub fn check(data: &[u8]) -> bool {
    let mut control_link = ControlLink::default();
    let mut model = Model::default();
    let mut tape = Tape::new(data);
    let known = messages();
    let mut received_count = 0;
    while let Some(step) = tape.step() {
        match step % 8 {
            0 | 4 => {
                let (_, message) = &known[tape.below(known.len())];
                control_link.queue(message.clone());
                model.queued.push(message.clone());
                model.go_on();
            }
            7 => assert_eq!(control_link.send_ahead(), model.send_ahead()),
            1 | 5 => {
                let expected = std::mem::take(&mut model.is_due).then(|| model.frame());
                assert_eq!(control_link.next_frame(), expected);
            }
            _ => {
                let frame = frame(&mut tape, &model);
                let is_new = model.receive(&frame);
                // A call may allocate memory for this frame's message and for this side's message
                // under way. The number of the peer's frames must not matter.
                let room = frame.message.len() + model.frame().message.len() + 256;
                let told = memory::bounded(room, || control_link.receive_frame(&frame));
                match (&told, is_new) {
                    (Ok(None), false) => {}
                    (told, true) => {
                        assert_eq!(told, &ControlMessage::decode(&frame.message).map(Some))
                    }
                    (told, false) => panic!("{told:?} of {frame:?}"),
                }
                received_count += u32::from(matches!(told, Ok(Some(_))));
            }
        }
        assert_eq!(control_link.frame(), model.frame());
        assert_eq!(
            control_link.is_waiting(),
            model.confirmed < model.queued.len() as u64
        );
    }
    received_count > 0
}

/// Reads a frame whose numbers are mostly close to the right ones.
fn frame(tape: &mut Tape<'_>, model: &Model) -> ControlFrame {
    let kind = tape.u8();
    let mut number = |near: u64, is_any: bool| {
        if is_any {
            tape.u64()
        } else {
            near.wrapping_add(tape.u8() as i8 as u64)
        }
    };
    let (number, received) = (
        number(model.received + 1, kind & 1 == 1),
        number(model.sent, kind & 2 == 2),
    );
    let count = if kind & 4 == 4 {
        usize::from(tape.u16())
    } else {
        usize::from(tape.u8() % 32)
    };
    ControlFrame {
        number,
        received,
        awaits_confirmation: kind & 8 == 0,
        message: tape.bytes(count).to_vec(),
    }
}

/// A valid exchange, and an invalid one.
pub fn seeds() -> Seeds {
    let received = |w: &mut Writer, kind: u8, near: (i8, i8), message: &[u8]| {
        w.u8(2)
            .u8(kind)
            .u8(near.0 as u8)
            .u8(near.1 as u8)
            .u8(message.len() as u8)
            .bytes(message);
    };
    let mut talk = Writer::default();
    talk.u8(0).u8(4).u8(0).u8(6).u8(1);
    received(&mut talk, 0, (0, 0), &[5, 1]);
    talk.u8(1);
    received(&mut talk, 0, (-1, -1), &[5, 1]);
    received(&mut talk, 0, (0, 0), &[6, 9, 0, 0, 0, 0, 0, 0, 0]);
    received(&mut talk, 8, (0, 0), &[]);
    talk.u8(1);
    let mut nonsense = Writer::default();
    nonsense.u8(0).u8(2);
    received(&mut nonsense, 0, (0, 5), &[99]);
    received(&mut nonsense, 0, (7, 1), &[7]);
    nonsense.u8(2).u8(3).u64(u64::MAX).u64(u64::MAX).u8(1).u8(7);
    received(&mut nonsense, 0, (0, 0), &[7]);
    vec![
        ("talk", talk.into_bytes()),
        ("nonsense", nonsense.into_bytes()),
    ]
}
