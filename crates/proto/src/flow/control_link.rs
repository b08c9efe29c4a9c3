//! The control messages between the two ends of a connection. Each message is delivered exactly
//! once and in order, although the paths may lose, duplicate and delay control frames.
//!
//! The protocol is stop-and-wait: one control message is under way at a time, and its frame is sent
//! again until the peer acknowledges the message. A single path that works from time to time is
//! enough.
//!
//! A side that closes cannot wait for acknowledgements, because its process may end. So it also
//! sends its queued messages ahead ([`ControlLink::send_ahead`]), each in a frame of its own.

use crate::wire::codec::Malformed;
use crate::wire::control::{ControlFrame, ControlMessage};
use std::collections::VecDeque;

/// One end's outgoing control messages, and the number of the last message received.
#[derive(Debug, Default, Clone, Hash)]
pub struct ControlLink {
    /// Control messages that were queued and not sent yet.
    waiting: VecDeque<ControlMessage>,
    /// Number of the last control message sent, counted from 1.
    sent: u64,
    /// Encoding of the last control message sent.
    message: Vec<u8>,
    /// Number of the last control message that was sent ahead, before its turn. 0 if none was.
    sent_ahead: u64,
    /// Number of the last control message that the peer has acknowledged.
    confirmed: u64,
    /// Number of the last control message received from the peer.
    received: u64,
    /// True while a frame is due: for a new message, an acknowledgement or a repetition.
    is_due: bool,
}

impl ControlLink {
    /// Queues a control message for the peer. Returns the message's number, counted from 1.
    pub fn queue(&mut self, message: ControlMessage) -> u64 {
        self.waiting.push_back(message);
        self.send_next();
        self.sent + self.waiting.len() as u64
    }

    /// Returns true if the peer has acknowledged the control message with this number.
    pub fn is_confirmed(&self, number: u64) -> bool {
        self.confirmed >= number
    }

    /// Returns true until the peer has acknowledged every queued control message.
    pub fn is_waiting(&self) -> bool {
        self.sent > self.confirmed || !self.waiting.is_empty()
    }

    /// Returns the number of control messages queued behind the one under way.
    pub fn backlog(&self) -> usize {
        self.waiting.len()
    }

    /// Returns the number of the control message under way, which was sent but is not acknowledged.
    /// `None` if no message is under way.
    pub fn under_way(&self) -> Option<u64> {
        (self.sent > self.confirmed).then_some(self.sent)
    }

    /// Makes [`ControlLink::next_frame`] repeat the current frame, which the path may have lost.
    pub fn send_again(&mut self) {
        self.is_due = true;
    }

    /// Returns the control frame to send now, if one is due.
    pub fn next_frame(&mut self) -> Option<ControlFrame> {
        std::mem::take(&mut self.is_due).then(|| self.frame())
    }

    /// Returns the current control frame. It contains the message under way, if any, and
    /// acknowledges the last message received.
    pub fn frame(&self) -> ControlFrame {
        let awaits_confirmation = self.sent > self.confirmed;
        let message = if awaits_confirmation {
            self.message.clone()
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

    /// Returns the current control frame, and a frame for each queued message. On a path that keeps
    /// their order, the peer accepts all of them. The messages stay queued, because the path may
    /// lose the frames.
    pub fn send_ahead(&mut self) -> Vec<ControlFrame> {
        self.is_due = false;
        let mut frames = vec![self.frame()];
        for (number, message) in (self.sent + 1..).zip(&self.waiting) {
            self.sent_ahead = number;
            let message = message.encode();
            frames.push(ControlFrame {
                number,
                received: self.received,
                awaits_confirmation: true,
                message,
            });
        }
        frames
    }

    /// Returns the frame of a queued message, as [`ControlLink::send_ahead`] does for all of them.
    /// The peer accepts it only if it has received every message before. `None` if the peer has
    /// acknowledged the message.
    pub fn frame_ahead(&mut self, number: u64) -> Option<ControlFrame> {
        let is_due = self.is_due;
        let frames = self.send_ahead();
        self.is_due = is_due;
        let is_wanted = |frame: &ControlFrame| frame.awaits_confirmation && frame.number == number;
        frames.into_iter().find(is_wanted)
    }

    /// Accepts a control frame, and returns its control message if the message is new.
    ///
    /// # Errors
    /// [`Malformed`] if the control message cannot be decoded. This end still acknowledges the
    /// message, so that the peer sends the next one.
    pub fn receive_frame(
        &mut self,
        frame: &ControlFrame,
    ) -> Result<Option<ControlMessage>, Malformed> {
        if (self.sent..=self.sent.max(self.sent_ahead)).contains(&frame.received) {
            // The peer has accepted this number of messages that were sent ahead.
            let accepted = frame.received - self.sent;
            self.waiting.drain(..accepted as usize);
            (self.sent, self.confirmed) = (frame.received, frame.received);
            self.send_next();
        }
        if !frame.awaits_confirmation || frame.number > self.received + 1 {
            return Ok(None);
        }
        // A repeated message is acknowledged too, because the first acknowledgement may be lost.
        self.is_due = true;
        if frame.number <= self.received {
            return Ok(None);
        }
        self.received = frame.number;
        ControlMessage::decode(&frame.message).map(Some)
    }

    fn send_next(&mut self) {
        if self.sent == self.confirmed
            && let Some(message) = self.waiting.pop_front()
        {
            self.message = message.encode();
            self.sent += 1;
            self.is_due = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::ids::lane;
    use proptest::prelude::*;

    #[test]
    fn a_message_is_answered_once_and_then_no_frame_is_sent() {
        let mut one = ControlLink::default();
        let mut other = ControlLink::default();
        assert_eq!(
            [1, 2].map(|at| one.queue(ControlMessage::Live { lane: lane(at) })),
            [1, 2],
            "their numbers"
        );
        let first = one.next_frame().unwrap();
        assert!(one.next_frame().is_none() && one.is_waiting());
        assert_eq!(
            other.receive_frame(&first),
            Ok(Some(ControlMessage::Live { lane: lane(1) }))
        );
        assert_eq!(
            other.receive_frame(&first),
            Ok(None),
            "the same frame again"
        );
        let echo = other.next_frame().unwrap();
        assert_eq!(one.receive_frame(&echo), Ok(None));
        assert!(one.is_confirmed(1) && !one.is_confirmed(2));
        assert_eq!(
            other.receive_frame(&one.next_frame().unwrap()),
            Ok(Some(ControlMessage::Live { lane: lane(2) }))
        );
        assert_eq!(one.receive_frame(&other.next_frame().unwrap()), Ok(None));
        assert!(!one.is_waiting() && one.next_frame().is_none() && other.next_frame().is_none());
    }

    #[test]
    fn messages_that_were_sent_ahead_arrive_without_acknowledgements() {
        let mut one = ControlLink::default();
        let mut other = ControlLink::default();
        let message = |at| ControlMessage::Live { lane: lane(at) };
        (0..3).for_each(|at| _ = one.queue(message(at)));
        let frames = one.send_ahead();
        assert!(
            one.next_frame().is_none(),
            "the current frame was sent ahead too"
        );
        let received: Vec<_> = frames
            .iter()
            .map(|frame| other.receive_frame(frame).unwrap())
            .collect();
        assert_eq!(received, [0, 1, 2].map(|at| Some(message(at))));
        // The acknowledgement of the last message is one for all.
        assert_eq!(one.receive_frame(&other.next_frame().unwrap()), Ok(None));
        assert!(!one.is_waiting() && one.is_confirmed(3) && one.next_frame().is_none());
        // A peer cannot acknowledge a message that was not sent.
        (3..5).for_each(|at| _ = one.queue(message(at)));
        let early = ControlFrame {
            number: 0,
            received: 5,
            awaits_confirmation: false,
            message: Vec::new(),
        };
        assert_eq!(one.receive_frame(&early), Ok(None));
        assert_eq!((one.under_way(), one.backlog()), (Some(4), 1));
    }

    proptest! {
        #[test]
        fn every_message_is_delivered_once_and_in_order(script in prop::collection::vec(0..8u8, 0..400), counts in [0..12u64, 0..12u64]) {
            let mut ends = [ControlLink::default(), ControlLink::default()];
            let mut said = [0, 0];
            let mut received = [Vec::new(), Vec::new()];
            let mut under_way: [VecDeque<ControlFrame>; 2] = Default::default();
            let calm = (0..200).flat_map(|_| [0, 1, 4, 5]);
            // Step 8 delivers all frames in transit, so that the calm steps see few.
            for step in script.into_iter().chain([8]).chain(calm) {
                let at = usize::from(step % 2);
                match step {
                    0 | 1 => {
                        if said[at] < counts[at] {
                            ends[at].queue(ControlMessage::Bye { delivered: said[at] });
                            said[at] += 1;
                        }
                        let frame = ends[at].frame();
                        under_way[at].push_back(frame);
                    }
                    8 => {
                        for at in [0, 1] {
                            for frame in std::mem::take(&mut under_way[at]) {
                                received[1 - at].extend(ends[1 - at].receive_frame(&frame).unwrap());
                            }
                        }
                    }
                    6 | 7 => under_way[at].extend(ends[at].send_ahead()),
                    // Step 2 loses a frame. Step 3 delivers the newest frame early; the same frame
                    // is delivered again later.
                    2 => _ = under_way[0].pop_front(),
                    3 => {
                        if let Some(frame) = under_way[1].back().cloned() {
                            received[0].extend(ends[0].receive_frame(&frame).unwrap());
                        }
                    }
                    _ => {
                        if let Some(frame) = under_way[at].pop_front() {
                            received[1 - at].extend(ends[1 - at].receive_frame(&frame).unwrap());
                        }
                    }
                }
            }
            for at in [0, 1] {
                let all: Vec<ControlMessage> = (0..counts[1 - at]).map(|delivered| ControlMessage::Bye { delivered }).collect();
                prop_assert_eq!(&received[at], &all);
                prop_assert!(!ends[at].is_waiting());
            }
        }
    }
}
