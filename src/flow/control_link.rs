//! One side of the talk between the two ends of a running connection: control messages in order, each exactly once.
//!
//! Stop and wait: one control message is under way at a time, and its control frame is sent again until the other side has heard it. So
//! the paths that control frames take may lose, double and delay them; one path that works now and then is enough.

use crate::wire::codec::Malformed;
use crate::wire::control::{ControlFrame, ControlMessage};
use std::collections::VecDeque;

/// What this side has to tell, and how far it heard the other.
#[derive(Debug, Default, Clone, Hash)]
pub struct ControlLink {
    waiting: VecDeque<ControlMessage>,
    /// The number of the control message under way, or of the last one; and its bytes.
    sent: u64,
    message: Vec<u8>,
    /// The last control message that the other side has heard.
    confirmed: u64,
    /// The last control message of the other side's that was heard.
    heard: u64,
    /// Whether there is something that the other side has not been sent.
    news: bool,
}

impl ControlLink {
    /// Has something to tell.
    pub fn say(&mut self, message: ControlMessage) {
        self.waiting.push_back(message);
        self.go_on();
    }

    /// Whether something that was said has not been heard.
    pub fn is_waiting(&self) -> bool {
        self.sent > self.confirmed || !self.waiting.is_empty()
    }

    /// How many control messages wait behind the one under way.
    pub fn backlog(&self) -> usize {
        self.waiting.len()
    }

    /// The number of the control message that was sent and that the other side has not heard.
    pub fn under_way(&self) -> Option<u64> {
        (self.sent > self.confirmed).then_some(self.sent)
    }

    /// What was sent may be lost with the path that it took: the frame counts as news.
    pub fn send_again(&mut self) {
        self.news = true;
    }

    /// The control frame to send at once, if there is news for the other side.
    pub fn news(&mut self) -> Option<ControlFrame> {
        std::mem::take(&mut self.news).then(|| self.frame())
    }

    /// The control frame as it is now: what is under way, and how far the other side was heard.
    pub fn frame(&self) -> ControlFrame {
        let asks = self.sent > self.confirmed;
        let message = if asks { self.message.clone() } else { Vec::new() };
        ControlFrame { number: self.sent, heard: self.heard, asks, message }
    }

    /// A control frame came in; the control message in it, if it is a new one.
    ///
    /// # Errors
    /// [`Malformed`] when its control message is none. It counts as heard, so that the talk goes on.
    pub fn hear(&mut self, frame: &ControlFrame) -> Result<Option<ControlMessage>, Malformed> {
        if frame.heard == self.sent {
            self.confirmed = self.sent;
            self.go_on();
        }
        if !frame.asks || frame.number > self.heard + 1 {
            return Ok(None);
        }
        // The other side does not know that this was heard, whether now or before.
        self.news = true;
        if frame.number <= self.heard {
            return Ok(None);
        }
        self.heard = frame.number;
        ControlMessage::decode(&frame.message).map(Some)
    }

    fn go_on(&mut self) {
        if self.sent == self.confirmed
            && let Some(message) = self.waiting.pop_front()
        {
            self.message = message.encode();
            self.sent += 1;
            self.news = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::ids::lane;
    use proptest::prelude::*;

    #[test]
    fn a_word_and_its_echo_and_then_silence() {
        let (mut one, mut other) = (ControlLink::default(), ControlLink::default());
        one.say(ControlMessage::Live { lane: lane(1) });
        one.say(ControlMessage::Live { lane: lane(2) });
        let first = one.news().unwrap();
        assert!(one.news().is_none() && one.is_waiting());
        assert_eq!(other.hear(&first), Ok(Some(ControlMessage::Live { lane: lane(1) })));
        assert_eq!(other.hear(&first), Ok(None), "the same once more");
        let echo = other.news().unwrap();
        assert_eq!(one.hear(&echo), Ok(None));
        assert_eq!(other.hear(&one.news().unwrap()), Ok(Some(ControlMessage::Live { lane: lane(2) })));
        assert_eq!(one.hear(&other.news().unwrap()), Ok(None));
        assert!(!one.is_waiting() && one.news().is_none() && other.news().is_none());
    }

    proptest! {
        /// Control frames are lost, doubled and delayed, by a script of what happens next.
        #[test]
        fn every_message_is_heard_once_and_in_order(script in prop::collection::vec(0..6u8, 0..400), counts in [0..12u64, 0..12u64]) {
            let mut ends = [ControlLink::default(), ControlLink::default()];
            let mut said = [0, 0];
            let mut heard = [Vec::new(), Vec::new()];
            let mut under_way: [VecDeque<ControlFrame>; 2] = Default::default();
            let calm = (0..200).flat_map(|_| [0, 1, 4, 5]);
            for step in script.into_iter().chain(calm) {
                let at = usize::from(step % 2);
                match step {
                    // Says something, or repeats itself.
                    0 | 1 => {
                        if said[at] < counts[at] {
                            ends[at].say(ControlMessage::Bye { delivered: said[at] });
                            said[at] += 1;
                        }
                        let frame = ends[at].frame();
                        under_way[at].push_back(frame);
                    }
                    // A control frame is lost, or comes ahead of those before it and once more.
                    2 => _ = under_way[0].pop_front(),
                    3 => {
                        if let Some(frame) = under_way[1].back().cloned() {
                            heard[0].extend(ends[0].hear(&frame).unwrap());
                        }
                    }
                    _ => {
                        if let Some(frame) = under_way[at].pop_front() {
                            heard[1 - at].extend(ends[1 - at].hear(&frame).unwrap());
                        }
                    }
                }
            }
            for at in [0, 1] {
                let all: Vec<ControlMessage> = (0..counts[1 - at]).map(|delivered| ControlMessage::Bye { delivered }).collect();
                prop_assert_eq!(&heard[at], &all);
                prop_assert!(!ends[at].is_waiting());
            }
        }
    }
}
