//! Tests of one end alone: which actions it requests, and when.

mod search;
mod world;

use super::bootstrap::{ASK_INTERVAL, SIGN_OF_LIFE};
use super::*;
use crate::flow::redial::Need;
use crate::wire::cts::Epoch;
use crate::wire::fields::{Attachment, QpEnd};
use crate::wire::ids::lane;

const LIMITS: Limits = Limits {
    loss: 30 * SECOND,
    probe: 5 * SECOND,
    first_rail: 120 * SECOND,
};

/// A rail that the handshake could not bring up.
fn missing(lane: LaneId) -> Missing {
    Missing {
        is_late: false,
        lane,
        path: PathChoice {
            peer_gid: [2; 16],
            mtu_bytes: 1024,
        },
        why: "silent".to_owned(),
    }
}

fn advert() -> RailAdvert {
    RailAdvert {
        name: "a".into(),
        phys_port: "p0".into(),
        attachment: Attachment {
            link: 0,
            link_mbps: 1,
            cable: 0,
            port_mbps: 1,
        },
        speed_mbps: 1,
        mtu_bytes: 1024,
        addresses: Vec::new(),
        is_usable: true,
    }
}

fn new_end() -> LaneEnd {
    LaneEnd {
        qps: vec![QpEnd { number: 1, psn: 1 }],
        mailbox_rkey: 7,
    }
}

fn joined(at: usize, attempt: u8) -> ControlMessage {
    ControlMessage::Joined {
        lane: lane(at),
        attempt,
        answer: answer(),
    }
}

fn answer() -> JoinAnswer {
    JoinAnswer {
        connector_gid: [1; 16],
        acceptor_gid: [2; 16],
        mtu_bytes: 1024,
        end: new_end(),
        epoch: Epoch::default(),
    }
}

struct End {
    recovery: Recovery,
    number: u64,
}

impl End {
    fn new(role: Role) -> Self {
        Self {
            recovery: Recovery::new(role, LIMITS, 2),
            number: 0,
        }
    }

    /// Delivers a message from a peer that has acknowledged all of this end's messages.
    fn receive(&mut self, message: &ControlMessage, now: u64) {
        self.number += 1;
        let frame = ControlFrame {
            number: self.number,
            received: self.recovery.frame().number,
            awaits_confirmation: true,
            message: message.encode(),
        };
        self.recovery.receive_frame(&frame, 0, now);
    }

    /// Returns the requested actions, except those for the log and the counters.
    fn actions(&mut self) -> Vec<Action> {
        std::iter::from_fn(|| self.recovery.poll_action())
            .filter(|action| !matches!(action, Action::Log(_) | Action::Changed(_)))
            .collect()
    }

    fn next_message(&mut self, now: u64) -> Option<ControlMessage> {
        match self.recovery.poll_frame(now)? {
            Frame::First(frame) | Frame::Repeated(frame) if frame.awaits_confirmation => {
                Some(ControlMessage::decode(&frame.message).unwrap())
            }
            _ => None,
        }
    }

    /// Loses a rail, and stops it.
    fn lose(&mut self, lane: LaneId, now: u64) {
        self.recovery.rail_down(lane, "loss", now);
        assert!(self.actions().contains(&Action::Fence(lane)));
        self.recovery.fenced(lane, Received::default(), now);
    }

    /// Loses rail 0. Afterwards both ends have stopped it.
    fn loses_a_rail(&mut self, now: u64) {
        self.lose(lane(0), now);
        assert_eq!(
            self.next_message(now),
            Some(ControlMessage::Fenced {
                lane: lane(0),
                received: Received::default()
            })
        );
        self.receive(
            &ControlMessage::Fenced {
                lane: lane(0),
                received: Received::default(),
            },
            now,
        );
        assert_eq!(
            self.actions(),
            [Action::Resend(lane(0), Received::default())]
        );
    }
}

#[test]
fn a_lost_rail_is_asked_for_tried_and_used() {
    let mut end = End::new(Role::Sender);
    let mut now = 20 * SECOND;
    end.loses_a_rail(now);
    end.recovery.tick(now + RETRY_PAUSE_NS - 1);
    assert_eq!(end.actions(), []);
    now += RETRY_PAUSE_NS;
    end.recovery.tick(now);
    assert_eq!(end.actions(), [Action::OpenQps(lane(0))]);
    end.recovery.opened(lane(0), Ok((advert(), new_end())), now);
    assert_eq!(
        end.next_message(now),
        Some(ControlMessage::Join {
            lane: lane(0),
            attempt: 1,
            rail: advert(),
            end: new_end()
        })
    );
    end.receive(&joined(0, 1), now);
    assert!(matches!(end.actions()[..], [Action::ConnectQps(at, _)] if at == lane(0)));
    end.recovery.connected(lane(0), Ok(()), now);
    end.recovery.probed(lane(0), Ok(()), now);
    assert_eq!(end.actions(), [Action::Activate(lane(0))]);
    end.recovery.activated(lane(0), Ok(()), now);
    assert_eq!(
        end.next_message(now),
        Some(ControlMessage::Live { lane: lane(0) })
    );
    assert_eq!(
        end.recovery.rails_up().collect::<Vec<_>>(),
        [lane(0), lane(1)]
    );
}

#[test]
fn failed_attempts_become_rare_and_a_port_that_comes_up_is_tried_immediately() {
    let mut end = End::new(Role::Sender);
    let mut now = 20 * SECOND;
    end.loses_a_rail(now);
    for pause in [
        RETRY_PAUSE_NS,
        2 * RETRY_PAUSE_NS,
        4 * RETRY_PAUSE_NS,
        4 * RETRY_PAUSE_NS,
    ] {
        end.recovery.tick(now + pause - 1);
        assert_eq!(end.actions(), []);
        now += pause;
        end.recovery.tick(now);
        assert_eq!(end.actions(), [Action::OpenQps(lane(0))]);
        end.recovery
            .opened(lane(0), Err(Cause::Failed("port down".into())), now);
    }
    end.recovery.port_up(lane(0), now);
    end.recovery.tick(now);
    assert_eq!(end.actions(), [Action::OpenQps(lane(0))]);
}

#[test]
fn a_call_that_does_not_return_ends_its_attempt() {
    let mut end = End::new(Role::Sender);
    let mut now = 20 * SECOND;
    end.loses_a_rail(now);
    let waits_without_answer = |end: &mut End, now: &mut u64| {
        end.recovery.tick(*now + STEP - 1);
        assert_eq!(end.actions(), []);
        assert!(
            end.recovery
                .poll_timeout()
                .is_some_and(|at| at <= *now + STEP)
        );
        *now += STEP;
        end.recovery.tick(*now);
        assert_eq!(end.actions(), [Action::DropQps(lane(0))]);
    };
    now += RETRY_PAUSE_NS;
    end.recovery.tick(now);
    assert_eq!(end.actions(), [Action::OpenQps(lane(0))]);
    waits_without_answer(&mut end, &mut now);
    assert_eq!(
        end.next_message(now),
        None,
        "the peer knows nothing of the attempt"
    );
    end.recovery.opened(lane(0), Ok((advert(), new_end())), now);
    assert_eq!(
        (end.actions(), end.next_message(now)),
        (vec![], None),
        "too late"
    );
    now += 2 * RETRY_PAUSE_NS;
    end.recovery.tick(now);
    end.recovery.opened(lane(0), Ok((advert(), new_end())), now);
    assert!(matches!(
        end.next_message(now),
        Some(ControlMessage::Join { .. })
    ));
    end.actions();
    end.receive(&joined(0, 1), now);
    assert!(matches!(end.actions()[..], [Action::ConnectQps(at, _)] if at == lane(0)));
    waits_without_answer(&mut end, &mut now);
    let why = Cause::NoReturn.to_string();
    assert_eq!(
        end.next_message(now),
        Some(ControlMessage::NotNow {
            lane: lane(0),
            attempt: 1,
            why
        })
    );
    end.recovery.connected(lane(0), Ok(()), now);
    assert_eq!(end.actions(), [], "too late");
}

#[test]
fn a_peer_that_does_not_answer_is_logged_once_and_its_late_answer_changes_nothing() {
    let mut end = End::new(Role::Sender);
    let mut now = 20 * SECOND;
    end.loses_a_rail(now);
    now += RETRY_PAUSE_NS;
    end.recovery.tick(now);
    end.actions();
    end.recovery.opened(lane(0), Ok((advert(), new_end())), now);
    assert!(matches!(
        end.next_message(now),
        Some(ControlMessage::Join { .. })
    ));
    now += STEP;
    end.recovery.tick(now);
    assert_eq!(end.actions(), [Action::DropQps(lane(0))]);
    end.receive(&joined(0, 1), now);
    assert_eq!(end.actions(), []);
    // The late JOINED confirms the JOIN. So the next message can be sent: NOT NOW, after which the
    // peer drops its queue pairs.
    assert!(
        matches!(end.next_message(now), Some(ControlMessage::NotNow { lane: at, .. }) if at == lane(0))
    );
    end.receive(&ControlMessage::AreYouThere, now);
    assert_eq!(end.next_message(now), None, "sent only once");
}

#[test]
fn an_abandoned_request_ends_its_slow_answer() {
    let mut end = End::new(Role::Receiver);
    let now = 20 * SECOND;
    end.loses_a_rail(now);
    let join = |attempt| ControlMessage::Join {
        lane: lane(0),
        attempt,
        rail: advert(),
        end: new_end(),
    };
    end.receive(&join(1), now);
    assert!(matches!(end.actions()[..], [Action::AnswerQps(at, ..)] if at == lane(0)));
    end.receive(
        &ControlMessage::NotNow {
            lane: lane(0),
            attempt: 1,
            why: String::new(),
        },
        now + STEP,
    );
    assert_eq!(end.actions(), [Action::DropQps(lane(0))]);
    end.receive(&join(2), now + STEP);
    assert!(matches!(end.actions()[..], [Action::AnswerQps(at, ..)] if at == lane(0)));
}

#[test]
fn an_answer_to_an_abandoned_attempt_changes_nothing() {
    let mut end = End::new(Role::Sender);
    let mut now = 20 * SECOND;
    end.loses_a_rail(now);
    let asks_again = |end: &mut End, now: &mut u64| {
        *now += STEP;
        end.recovery.tick(*now);
        assert_eq!(end.actions(), [Action::OpenQps(lane(0))]);
        end.recovery
            .opened(lane(0), Ok((advert(), new_end())), *now);
        end.receive(&ControlMessage::AreYouThere, *now);
    };
    asks_again(&mut end, &mut now);
    now += STEP;
    end.recovery.tick(now);
    assert_eq!(end.actions(), [Action::DropQps(lane(0))]);
    asks_again(&mut end, &mut now);
    end.receive(&joined(0, 1), now);
    end.receive(
        &ControlMessage::NotNow {
            lane: lane(0),
            attempt: 1,
            why: String::new(),
        },
        now,
    );
    assert_eq!(end.actions(), [], "both are about the first attempt");
    end.receive(&joined(0, 2), now);
    assert!(matches!(end.actions()[..], [Action::ConnectQps(at, _)] if at == lane(0)));
}

#[test]
fn a_rail_that_did_not_carry_at_first_is_asked_for() {
    let mut end = End::new(Role::Sender);
    end.recovery.mark_missing_at_start(&[missing(lane(1))]);
    assert_eq!(end.recovery.rails_up().collect::<Vec<_>>(), [lane(0)]);
    end.recovery.tick(0);
    assert_eq!(end.actions(), []);
    end.recovery.tick(2 * RETRY_PAUSE_NS);
    assert_eq!(end.actions(), [Action::OpenQps(lane(1))]);
    // Nothing was posted on the rail, so it needs no FENCED.
    assert_eq!(end.next_message(2 * RETRY_PAUSE_NS), None);
}

#[test]
fn without_any_first_rail_all_rails_are_asked_for_after_the_same_pause() {
    let mut end = End::new(Role::Sender);
    end.recovery
        .mark_missing_at_start(&[missing(lane(0)), missing(lane(1))]);
    end.recovery.tick(RETRY_PAUSE_NS - 1);
    assert_eq!(end.actions(), []);
    end.recovery.tick(RETRY_PAUSE_NS);
    assert_eq!(
        end.actions(),
        [Action::OpenQps(lane(0)), Action::OpenQps(lane(1))]
    );
}

#[test]
fn each_loss_soon_after_a_return_doubles_the_pause() {
    let mut end = End::new(Role::Sender);
    let mut now = 20 * SECOND;
    let losses = [
        (0, RETRY_PAUSE_NS),
        (STEADY, 2 * RETRY_PAUSE_NS),
        (STEADY, 4 * RETRY_PAUSE_NS),
        (STEADY, 4 * RETRY_PAUSE_NS),
        (STEADY + 1, RETRY_PAUSE_NS),
    ];
    for (attempt, (used, pause)) in (1..).zip(losses) {
        now += used;
        end.loses_a_rail(now);
        end.recovery.tick(now + pause - 1);
        assert_eq!(end.actions(), [], "loss {attempt}");
        now += pause;
        end.recovery.tick(now);
        assert_eq!(end.actions(), [Action::OpenQps(lane(0))]);
        end.recovery.opened(lane(0), Ok((advert(), new_end())), now);
        assert!(matches!(
            end.next_message(now),
            Some(ControlMessage::Join { .. })
        ));
        end.receive(&joined(0, attempt), now);
        end.recovery.connected(lane(0), Ok(()), now);
        end.recovery.probed(lane(0), Ok(()), now);
        end.recovery.activated(lane(0), Ok(()), now);
        assert_eq!(
            end.next_message(now),
            Some(ControlMessage::Live { lane: lane(0) })
        );
        end.receive(&ControlMessage::AreYouThere, now);
        end.actions();
    }
}

#[test]
fn the_accepting_side_uses_new_queue_pairs_after_live_and_drops_them_after_not_now() {
    for (word, done) in [
        (
            ControlMessage::Live { lane: lane(0) },
            Action::Activate(lane(0)),
        ),
        (
            ControlMessage::NotNow {
                lane: lane(0),
                attempt: 1,
                why: String::new(),
            },
            Action::DropQps(lane(0)),
        ),
    ] {
        let mut end = End::new(Role::Receiver);
        let now = 20 * SECOND;
        end.receive(
            &ControlMessage::Fenced {
                lane: lane(0),
                received: Received::default(),
            },
            now,
        );
        assert_eq!(end.actions(), [Action::Fence(lane(0))]);
        end.recovery.fenced(lane(0), Received::default(), now);
        assert_eq!(
            end.actions(),
            [Action::Resend(lane(0), Received::default())]
        );
        end.receive(
            &ControlMessage::Join {
                lane: lane(0),
                attempt: 1,
                rail: advert(),
                end: new_end(),
            },
            now,
        );
        assert!(matches!(end.actions()[..], [Action::AnswerQps(at, ..)] if at == lane(0)));
        end.recovery.answered(lane(0), Ok(answer()), now);
        assert_eq!(end.actions(), []);
        end.receive(&word, now);
        assert_eq!(end.actions(), [done]);
    }
}

#[test]
fn without_a_rail_the_connection_fails_after_the_limit_and_once() {
    let mut end = End::new(Role::Receiver);
    let now = 20 * SECOND;
    end.lose(lane(0), now);
    end.lose(lane(1), now);
    end.recovery.tick(now);
    end.recovery.tick(now + LIMITS.loss - 1);
    assert_eq!(end.actions(), []);
    end.recovery.tick(now + LIMITS.loss);
    end.recovery.tick(now + 2 * LIMITS.loss);
    assert_eq!(end.actions(), [Action::Fail(Failure::NoRail(LIMITS.loss))]);
}

#[test]
fn a_loss_that_the_peer_does_not_acknowledge_fails_the_connection() {
    let mut end = End::new(Role::Sender);
    let now = 20 * SECOND;
    end.lose(lane(1), now);
    end.recovery.tick(now + LIMITS.loss);
    assert_eq!(end.actions(), []);
    end.recovery.tick(now + LIMITS.loss + 1);
    assert_eq!(
        end.actions(),
        [Action::Fail(Failure::NotAcknowledged(lane(1)))]
    );
}

#[test]
fn a_peer_whose_tcp_closed_counts_as_dead_unless_it_answers() {
    let mut end = End::new(Role::Sender);
    let now = 20 * SECOND;
    end.recovery.bootstrap_closed(now);
    assert_eq!(end.next_message(now), Some(ControlMessage::AreYouThere));
    end.recovery.tick(now + SIGN_OF_LIFE);
    assert_eq!(end.actions(), []);
    end.recovery.tick(now + SIGN_OF_LIFE + 1);
    assert_eq!(end.actions(), [Action::PeerGone]);
    assert!(!end.recovery.recovers() && end.recovery.poll_frame(now + 9 * SECOND).is_none());

    let mut end = End::new(Role::Sender);
    end.recovery.bootstrap_closed(now);
    assert_eq!(end.next_message(now), Some(ControlMessage::AreYouThere));
    end.receive(&ControlMessage::AreYouThere, now);
    end.recovery.tick(now + SIGN_OF_LIFE + 1);
    assert_eq!((end.actions(), end.recovery.recovers()), (vec![], true));
}

#[test]
fn a_peer_that_has_answered_counts_as_alive_while_later_messages_wait() {
    let mut end = End::new(Role::Receiver);
    let now = 100 * SECOND;
    end.recovery.bootstrap_closed(now);
    assert_eq!(end.next_message(now), Some(ControlMessage::AreYouThere));
    // Both rails are lost, so FENCED messages wait behind the question.
    LaneId::all(2).for_each(|lane| end.lose(lane, now));
    end.receive(&ControlMessage::AreYouThere, now + SECOND);
    assert!(end.recovery.is_waiting());
    end.recovery.tick(now + SIGN_OF_LIFE + 1);
    assert!(!end.actions().contains(&Action::PeerGone));
}

#[test]
fn a_peer_whose_tcp_closed_may_answer_over_new_tcp_without_a_rail() {
    for answers in [true, false] {
        let mut end = End::new(Role::Sender);
        let now = 20 * SECOND;
        [0, 1].into_iter().for_each(|at| end.lose(lane(at), now));
        end.actions();
        end.recovery.bootstrap_closed(now);
        assert_eq!(end.recovery.bootstrap_need(false, now), Need::Urgent);
        end.recovery.tick(now + SIGN_OF_LIFE);
        assert_eq!(end.actions(), []);
        if answers {
            // Messages that were lost with TCP are repeated until all are acknowledged.
            while end.recovery.is_waiting() {
                end.recovery.bootstrap_opened();
                assert!(end.next_message(now).is_some());
                end.receive(&ControlMessage::AreYouThere, now);
            }
        }
        end.recovery.tick(now + SIGN_OF_LIFE + 1);
        let is_gone = end.actions().contains(&Action::PeerGone);
        assert_eq!((is_gone, end.recovery.recovers()), (!answers, answers));
        let need = if answers { Need::Urgent } else { Need::No };
        assert_eq!(end.recovery.bootstrap_need(false, now), need);
    }
}

#[test]
fn without_tcp_the_peer_is_asked_periodically_over_the_rails() {
    for role in [Role::Sender, Role::Receiver] {
        let mut end = End::new(role);
        let now = 20 * SECOND;
        let asks = |end: &mut End, is_unreachable, now| {
            end.recovery.bootstrap_away(is_unreachable, now);
            let says = end.next_message(now);
            assert!(matches!(says, None | Some(ControlMessage::AreYouThere)));
            says.is_some()
        };
        assert!(asks(&mut end, false, now));
        assert!(!asks(&mut end, true, now));
        end.receive(&ControlMessage::AreYouThere, now);
        assert!(!asks(&mut end, false, now + ASK_INTERVAL - 1));
        assert!(asks(&mut end, true, now + ASK_INTERVAL - 1));
        end.receive(&ControlMessage::AreYouThere, now + ASK_INTERVAL);
        assert!(asks(&mut end, false, now + 2 * ASK_INTERVAL));
        end.receive(&ControlMessage::AreYouThere, now + 2 * ASK_INTERVAL);
        // After another loss of TCP, ARE YOU THERE is sent immediately.
        end.recovery.bootstrap_opened();
        assert!(end.next_message(now + 2 * ASK_INTERVAL).is_none());
        assert!(asks(&mut end, false, now + 2 * ASK_INTERVAL + 1));
        end.receive(&ControlMessage::AreYouThere, now + 3 * ASK_INTERVAL);
        end.recovery.peer_gone();
        assert!(!asks(&mut end, true, now + 9 * ASK_INTERVAL));
    }
}

#[test]
fn silent_tcp_is_redialled_where_it_alone_carries_frames() {
    let mut end = End::new(Role::Sender);
    let now = 20 * SECOND;
    end.lose(lane(0), now);
    assert!(end.next_message(now).is_some());
    assert_eq!(
        end.recovery.bootstrap_need(true, now + 9 * SECOND),
        Need::No
    );
    assert_eq!(
        end.recovery.bootstrap_need(false, now + 9 * SECOND),
        Need::NotUrgent
    );
    end.lose(lane(1), now);
    assert_eq!(
        end.recovery.bootstrap_need(true, now + 2 * SECOND),
        Need::No
    );
    assert_eq!(
        end.recovery.bootstrap_need(true, now + 2 * SECOND + 1),
        Need::Urgent
    );
    // With a new TCP connection, the time without an acknowledgement starts again.
    end.recovery.bootstrap_opened();
    assert!(end.recovery.poll_frame(now + 3 * SECOND).is_some());
    assert_eq!(
        end.recovery.bootstrap_need(true, now + 5 * SECOND),
        Need::No
    );
    assert_eq!(
        end.recovery.bootstrap_need(true, now + 5 * SECOND + 1),
        Need::Urgent
    );
    end.recovery.fail();
    assert_eq!(
        end.recovery.bootstrap_need(false, now + 9 * SECOND),
        Need::No
    );
}

#[test]
fn a_peer_whose_tcp_was_closed_is_dialled_in_time() {
    let mut end = End::new(Role::Sender);
    let now = 20 * SECOND;
    assert_eq!(end.recovery.bootstrap_need(false, now), Need::NotUrgent);
    // Urgent, because the rails may already be lost.
    end.recovery.bootstrap_closed(now);
    assert_eq!(end.recovery.bootstrap_need(false, now), Need::Urgent);
    assert!(end.next_message(now).is_some());
    end.receive(&ControlMessage::AreYouThere, now + 1);
    end.recovery.tick(now + 1);
    assert_eq!(end.recovery.bootstrap_need(false, now + 1), Need::NotUrgent);
}

#[test]
fn forbidden_control_messages_fail_the_connection() {
    let fenced = ControlMessage::Fenced {
        lane: lane(0),
        received: Received {
            granted: 99,
            open: Vec::new(),
        },
    };
    let report = |progress| StallReport {
        number: 0,
        idle_ms: 0,
        progress,
        rail_changes: None,
        operation: None,
    };
    for (role, message, why) in [
        (
            Role::Sender,
            ControlMessage::Live { lane: lane(0) },
            "must not send LIVE",
        ),
        (Role::Receiver, joined(0, 1), "must not send JOINED"),
        (Role::Sender, ControlMessage::Bye { delivered: 1 }, ""),
        (
            Role::Sender,
            ControlMessage::StallQuery(report(SENDS)),
            "progress of the wrong side",
        ),
        (
            Role::Sender,
            ControlMessage::StallReply(report(SENDS)),
            "progress of the wrong side",
        ),
        (
            Role::Receiver,
            ControlMessage::StallQuery(report(RECEIVES)),
            "progress of the wrong side",
        ),
        (
            Role::Receiver,
            ControlMessage::StallReply(report(RECEIVES)),
            "progress of the wrong side",
        ),
        (Role::Sender, fenced, ""),
    ] {
        let mut end = End::new(role);
        end.receive(&message, SECOND);
        let actions = end.actions();
        let [Action::Fail(Failure::Protocol(text))] = &actions[..] else {
            panic!("{message:?}: {actions:?}")
        };
        assert!(text.contains(why), "{text}");
    }
}

const SENDS: Progress = Progress::Sender {
    begun: 1,
    is_granted: false,
    running: 0,
    lanes: 0,
    untested: 0,
};
const RECEIVES: Progress = Progress::Receiver {
    granted: 1,
    delivered: 0,
    open: 1,
    arrived: 0,
    untested: 0,
};

const WAITING: StallReport = StallReport {
    number: 1,
    idle_ms: 0,
    progress: RECEIVES,
    rail_changes: None,
    operation: None,
};

#[test]
fn a_question_about_a_stall_gets_its_answer() {
    let mut end = End::new(Role::Sender);
    let now = 20 * SECOND;
    let report = |number, progress| StallReport {
        number,
        idle_ms: 5,
        progress,
        rail_changes: Some(2),
        operation: None,
    };
    end.recovery.ask_about_stall(report(7, SENDS));
    assert_eq!(
        end.next_message(now),
        Some(ControlMessage::StallQuery(report(7, SENDS)))
    );
    end.receive(&ControlMessage::StallReply(report(7, RECEIVES)), now);
    assert_eq!(end.actions(), [Action::StallReply(report(7, RECEIVES))]);
    end.receive(&ControlMessage::StallQuery(report(3, RECEIVES)), now);
    assert_eq!(end.actions(), [Action::StallQuery(report(3, RECEIVES))]);
    end.recovery.reply_to_stall(report(3, SENDS));
    assert_eq!(
        end.next_message(now),
        Some(ControlMessage::StallReply(report(3, SENDS)))
    );
    // The number of questions to a peer that confirms nothing is limited.
    (0..1000).for_each(|number| end.recovery.ask_about_stall(report(number, SENDS)));
    assert!(end.recovery.link.backlog() <= CROWDED);
}

#[test]
fn changes_of_rails_count_once_they_are_complete_on_both_sides() {
    let mut end = End::new(Role::Receiver);
    let now = 20 * SECOND;
    assert_eq!(end.recovery.settled_changes(), Some(0));
    // Messages about a stall may be under way, because they change no rail.
    end.recovery.ask_about_stall(WAITING);
    assert_eq!(end.recovery.settled_changes(), Some(0));
    end.receive(&ControlMessage::AreYouThere, now);
    end.recovery.rail_down(lane(0), "down", now);
    assert_eq!(
        end.recovery.settled_changes(),
        None,
        "the rail is being fenced"
    );
    end.recovery.fenced(lane(0), Received::default(), now);
    assert_eq!(
        end.recovery.settled_changes(),
        None,
        "the peer has not fenced the rail"
    );
    end.receive(
        &ControlMessage::Fenced {
            lane: lane(0),
            received: Received::default(),
        },
        now,
    );
    assert_eq!(
        end.recovery.settled_changes(),
        Some(1),
        "the peer has acknowledged FENCED"
    );
    let join = ControlMessage::Join {
        lane: lane(0),
        attempt: 1,
        rail: advert(),
        end: new_end(),
    };
    end.receive(&join, now);
    assert_eq!(
        end.recovery.settled_changes(),
        None,
        "queue pairs are being connected"
    );
    end.recovery.answered(lane(0), Ok(answer()), now);
    assert_eq!(
        end.recovery.settled_changes(),
        None,
        "the peer's LIVE is missing"
    );
    end.receive(&ControlMessage::Live { lane: lane(0) }, now);
    end.recovery.activated(lane(0), Ok(()), now);
    assert_eq!(end.recovery.settled_changes(), Some(2));
}

#[test]
fn changes_of_rails_count_once_the_peer_has_acknowledged_live() {
    let mut end = End::new(Role::Sender);
    let now = 20 * SECOND;
    end.recovery
        .link
        .queue(ControlMessage::Live { lane: lane(0) });
    assert_eq!(
        end.recovery.settled_changes(),
        None,
        "LIVE is not acknowledged"
    );
    end.recovery.ask_about_stall(WAITING);
    assert_eq!(end.recovery.settled_changes(), None, "LIVE is under way");
    end.receive(&ControlMessage::AreYouThere, now);
    assert_eq!(end.recovery.settled_changes(), Some(0));
    end.recovery.link.queue(ControlMessage::AreYouThere);
    assert_eq!(end.recovery.settled_changes(), None, "a message waits");
}

#[test]
fn an_unconfirmed_frame_is_sent_again() {
    let mut end = End::new(Role::Sender);
    let now = 20 * SECOND;
    end.lose(lane(0), now);
    let Some(Frame::First(first)) = end.recovery.poll_frame(now) else {
        panic!("no frame to send")
    };
    assert_eq!(end.recovery.poll_frame(now + REPEAT_AFTER_NS - 1), None);
    assert_eq!(
        end.recovery.poll_frame(now + REPEAT_AFTER_NS),
        Some(Frame::Repeated(first))
    );
}

#[test]
fn a_failure_is_reported_once_and_only_to_a_peer_that_still_needs_it() {
    let mut end = End::new(Role::Receiver);
    let now = 20 * SECOND;
    end.recovery.fail();
    assert_eq!(end.recovery.last_words(), None);
    let why = "no memory".to_owned();
    end.recovery.report_failure(why.clone());
    end.recovery.report_failure("another".to_owned());
    let failed = ControlMessage::Failed { why };
    let words = end.recovery.last_words().expect("FAILED is unconfirmed");
    assert_eq!(ControlMessage::decode(&words.message), Ok(failed.clone()));
    assert_eq!(end.recovery.bootstrap_need(true, now), Need::No);
    assert_eq!(end.recovery.bootstrap_need(false, now), Need::NotUrgent);
    assert_eq!(end.next_message(now), Some(failed));
    end.receive(&ControlMessage::AreYouThere, now);
    assert_eq!(end.recovery.last_words(), None, "confirmed");
    assert_eq!(end.recovery.bootstrap_need(false, now), Need::No);
    for leaves in [
        |end: &mut End| end.recovery.peer_gone(),
        |end: &mut End| end.receive(&ControlMessage::Bye { delivered: 0 }, 20 * SECOND),
        |end: &mut End| end.receive(&peer_failed(), 20 * SECOND),
    ] {
        let mut end = End::new(Role::Receiver);
        leaves(&mut end);
        end.recovery.fail();
        end.recovery.report_failure("late".to_owned());
        assert_eq!(end.recovery.last_words(), None);
    }
}

fn peer_failed() -> ControlMessage {
    ControlMessage::Failed {
        why: "no memory".to_owned(),
    }
}

#[test]
fn a_failed_peer_ends_the_connection_with_its_reason_unless_this_side_has_one() {
    let mut end = End::new(Role::Sender);
    let now = 20 * SECOND;
    end.receive(&peer_failed(), now);
    assert_eq!(
        end.actions(),
        [Action::Fail(Failure::AtPeer("no memory".to_owned()))]
    );
    assert!(end.recovery.has_failed() && !end.recovery.recovers());
    end.receive(&peer_failed(), now);
    assert_eq!(end.actions(), []);
    let mut end = End::new(Role::Sender);
    end.recovery.fail();
    end.receive(&peer_failed(), now);
    assert_eq!(end.actions(), [], "the first reason counts");
    // A peer that has closed has no failure to report.
    let mut end = End::new(Role::Sender);
    end.receive(&ControlMessage::Bye { delivered: 0 }, now);
    end.actions();
    end.receive(&peer_failed(), now);
    assert_eq!(end.actions(), []);
}
