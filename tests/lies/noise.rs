//! Random content of mailboxes and control messages.

use super::Stage;
use super::messages::{QPS, join, joined, lane, not_now};
use crate::sim::Dice;
use nccl_net_spark::comm::datapath::shared::SharedPath;
use proto::wire::control::{ControlFrame, ControlMessage, FRAME_WORDS, Received};
use proto::wire::mailbox::INBOX_AT;
use std::sync::atomic::Ordering;

#[test]
fn no_content_of_mailbox_or_control_queue_crashes_a_side() {
    let mut stage = Stage::new(2);
    let mut dice = Dice::new(3);
    for round in 0..300 {
        stage.again();
        for number in 1..20 {
            let side = dice.below(2) as usize;
            let message = match dice.below(8) {
                0 => (0..dice.below(1900))
                    .map(|_| dice.below(256) as u8)
                    .collect(),
                1 => ControlMessage::Fenced {
                    lane: lane(dice.below(8)),
                    received: Received::default(),
                }
                .encode(),
                2 => not_now(lane(dice.below(8)), dice.below(3) as u8).encode(),
                3 => join(lane(dice.below(8)), dice.below(3) as u8).encode(),
                4 => joined(256, &QPS).encode(),
                5 => ControlMessage::Live {
                    lane: lane(dice.below(8)),
                }
                .encode(),
                6 => ControlMessage::Bye {
                    delivered: dice.below(2),
                }
                .encode(),
                _ => ControlMessage::AreYouThere.encode(),
            };
            if dice.one_in(2) {
                stage.deliver_control(side, number, message);
            } else {
                // Writes the frame to the mailbox, sometimes with a damaged word.
                let mut words = ControlFrame {
                    number,
                    received: dice.below(3),
                    awaits_confirmation: true,
                    message,
                }
                .to_words();
                if dice.one_in(3) {
                    let at = dice.below(words.len() as u64) as usize;
                    words[at] = dice.below(u64::MAX);
                }
                let inbox =
                    &stage.pair.mailboxes[side].words()[INBOX_AT / 8..INBOX_AT / 8 + FRAME_WORDS];
                inbox
                    .iter()
                    .zip(words)
                    .for_each(|(cell, word)| cell.store(word, Ordering::Release));
            }
            stage.talk(1);
            let _ = (stage.complaint(0), stage.complaint(1), round);
        }
    }
    stage.again();
    stage.check();
    // Earlier errors have no after-effects.
    assert_eq!(
        stage
            .pair
            .recv
            .borrow()
            .expect("no panic went through it")
            .delivered(),
        4
    );
}
