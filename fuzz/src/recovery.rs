//! Recovery: any messages in any order, mixed with events of this side's ports, devices, data path,
//! TCP and clock.
//!
//! Input: a byte with this side's role and the rails that are missing when the connection begins,
//! then a tape of events. The target plays recovery's caller ([`Caller`]), and checks that the
//! actions for each rail come in the order that `flow::recovery` promises.

use crate::control::messages;
use crate::tape::Tape;
use crate::target::Seeds;
use proto::flow::recovery::{
    Action, Cause, Failure, Limits, Missing, PathChoice, Recovery, Role, State,
};
use proto::flow::redial::Need;
use proto::wire::codec::Writer;
use proto::wire::control::{
    ControlFrame, ControlMessage, JoinAnswer, Progress, Received, StallReport,
};
use proto::wire::cts::Epoch;
use proto::wire::fields::{LaneEnd, QpEnd, RailAdvert};
use proto::wire::ids::LaneId;

const RAILS: usize = 2;
/// Number of kinds of events on the tape.
const STEPS: u8 = 14;
const SECOND: u64 = 1_000_000_000;
const LIMITS: Limits = Limits {
    loss: 30 * SECOND,
    probe: 5 * SECOND,
    first_rail: 120 * SECOND,
};

/// State of a rail's queue pairs, as [`Caller`] keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rail {
    /// In use.
    Used,
    /// Out of use, but not stopped.
    Lost,
    /// No queue pairs. `by_peer` is true if the peer has reported that its queue pairs are stopped,
    /// too.
    Stopped { by_peer: bool },
    /// A thread creates or connects new queue pairs.
    Working,
    /// New, not connected. A JOIN message names them to the peer.
    New,
    /// New and connected.
    Connected,
}

struct Caller {
    recovery: Recovery,
    role: Role,
    rails: [Rail; RAILS],
    /// True for each rail whose loss the data path has noted, until recovery fences it. Its queue
    /// pairs may stop before that.
    losses: [bool; RAILS],
    /// For each rail, the content of the peer's FENCED messages since the rail was last in use.
    fenced_by_peer: [Vec<Received>; RAILS],
    received: Option<ControlMessage>,
    failed: u32,
    /// True once an action was executed that reports a failure, or that the peer has left. No
    /// [`Action::OpenQps`], [`Action::ConnectQps`] or [`Action::Activate`] may follow.
    has_ended: bool,
    has_closed: bool,
    was_up: bool,
    now: u64,
}

/// Runs a tape of events.
pub fn check(data: &[u8]) -> bool {
    let mut tape = Tape::new(data);
    let first = tape.step().unwrap_or(1);
    let mut caller = Caller::new(
        if first & 1 == 0 {
            Role::Sender
        } else {
            Role::Receiver
        },
        first / 2,
    );
    let known = messages();
    let mut number = 0;
    while let Some(step) = tape.step() {
        let lane = tape.lane(RAILS);
        match step % STEPS {
            0 | 1 => {
                let (_, message) = &known[tape.below(known.len())];
                number += 1;
                caller.receive(number, &on_rail(message.clone(), lane), tape.u64() % 64);
            }
            2 | 8 => caller.lose(lane),
            3 => caller.recovery.port_up(lane, caller.now),
            4 => caller.recovery.rail_down(lane, "port", caller.now),
            5 if lane.index() == RAILS - 1 => caller.recovery.bootstrap_opened(),
            5 => caller.recovery.bootstrap_closed(caller.now),
            6 => caller.probed(lane, tape.below(2) == 0),
            9 => caller.stop(lane),
            10 => caller.report(),
            11 => caller.close(),
            12 => caller
                .recovery
                .bootstrap_away(lane.index() == 0, caller.now),
            13 => caller.finish(lane),
            _ => caller.now += [SECOND / 100, SECOND / 2, 3 * SECOND, 20 * SECOND][tape.below(4)],
        }
        caller.act(&mut tape);
        caller.fence_again();
        caller.recovery.tick(caller.now);
        caller.act(&mut tape);
        caller.compare();
        while caller.recovery.poll_frame(caller.now).is_some() {}
    }
    number > 0
}

/// Returns the control message with its lane set to `at`. A BYE gets the count 0, because a count
/// above the number of started sends is a protocol violation, which ends the connection.
fn on_rail(mut message: ControlMessage, at: LaneId) -> ControlMessage {
    match &mut message {
        ControlMessage::Fenced { lane, .. }
        | ControlMessage::Join { lane, .. }
        | ControlMessage::Joined { lane, .. }
        | ControlMessage::NotNow { lane, .. }
        | ControlMessage::Live { lane } => *lane = at,
        ControlMessage::Bye { delivered } => *delivered = 0,
        ControlMessage::AreYouThere
        | ControlMessage::StallQuery(_)
        | ControlMessage::StallReply(_)
        | ControlMessage::Failed { .. } => {}
    }
    message
}

impl Caller {
    /// Creates a connection that begins without the rails whose bits are set in `missing`.
    fn new(role: Role, missing: u8) -> Self {
        let mut caller = Self {
            recovery: Recovery::new(role, LIMITS, RAILS),
            role,
            rails: [Rail::Used; RAILS],
            losses: [false; RAILS],
            fenced_by_peer: Default::default(),
            received: None,
            failed: 0,
            has_ended: false,
            has_closed: false,
            was_up: false,
            now: 0,
        };
        let missing: Vec<_> = LaneId::all(RAILS)
            .filter(|lane| missing >> lane.index() & 1 == 1)
            .collect();
        let at_start = |lane: &LaneId| Missing {
            lane: *lane,
            path: PathChoice {
                peer_gid: [1; 16],
                mtu_bytes: 1024,
            },
            why: "no way".to_owned(),
            is_late: lane.index() == 1,
        };
        let at_start: Vec<_> = missing.iter().map(at_start).collect();
        caller.recovery.mark_missing_at_start(&at_start);
        for lane in missing {
            caller.rails[lane.index()] = Rail::Stopped { by_peer: true };
        }
        caller.was_up = caller.rails.contains(&Rail::Used);
        caller
    }

    fn receive(&mut self, number: u64, message: &ControlMessage, begun: u64) {
        self.received = Some(message.clone());
        if let ControlMessage::Fenced { lane, received } = message {
            self.fenced_by_peer[lane.index()].push(received.clone());
        }
        // Confirms this side's messages, so that none pile up.
        let received = self.recovery.frame().number;
        let frame = ControlFrame {
            number,
            received,
            awaits_confirmation: true,
            message: message.encode(),
        };
        self.recovery.receive_frame(&frame, begun, self.now);
    }

    /// Loses a rail on the data path. `report` tells recovery later.
    fn lose(&mut self, lane: LaneId) {
        if self.rails[lane.index()] == Rail::Used {
            self.rails[lane.index()] = Rail::Lost;
            self.losses[lane.index()] = true;
        }
    }

    /// Stops lost queue pairs: a thread has stopped them, or their device has left the bus.
    fn stop(&mut self, lane: LaneId) {
        if self.rails[lane.index()] == Rail::Lost {
            self.rails[lane.index()] = Rail::Stopped { by_peer: false };
        }
    }

    /// Reports the losses of the data path's status to recovery, as the service thread does.
    fn report(&mut self) {
        for lane in LaneId::all(RAILS) {
            if self.losses[lane.index()] {
                assert_ne!(
                    self.rails[lane.index()],
                    Rail::Used,
                    "a rail in use is not lost"
                );
                self.recovery.rail_down(lane, "loss", self.now);
            }
        }
    }

    fn close(&mut self) {
        if !std::mem::replace(&mut self.has_closed, true) {
            self.recovery.close(0);
        }
    }

    /// Fences again each rail in state `Fencing`: the rail's queue pairs may have stopped
    /// meanwhile.
    fn fence_again(&mut self) {
        for lane in LaneId::all(RAILS) {
            if matches!(self.recovery.state(lane), Some(State::Fencing { .. })) {
                self.fence(lane);
            }
        }
    }

    fn fence(&mut self, lane: LaneId) {
        if self.rails[lane.index()] != Rail::Lost {
            self.rails[lane.index()] = Rail::Stopped { by_peer: false };
            self.recovery.fenced(lane, Received::default(), self.now);
        }
    }

    fn probed(&mut self, lane: LaneId, is_good: bool) {
        let outcome = if is_good {
            Ok(())
        } else {
            Err(Cause::Failed("no answer".to_owned()))
        };
        self.recovery.probed(lane, outcome, self.now);
    }

    fn act(&mut self, tape: &mut Tape<'_>) {
        while let Some(action) = self.recovery.poll_action() {
            match action {
                Action::Fence(lane) => {
                    let is_used = self.rails[lane.index()] == Rail::Used;
                    let was_lost = std::mem::take(&mut self.losses[lane.index()]);
                    assert!(
                        is_used || was_lost,
                        "only a rail that was in use is fenced, and only once"
                    );
                    self.fence(lane);
                }
                Action::Resend(lane, received) => {
                    assert_eq!(
                        self.rails[lane.index()],
                        Rail::Stopped { by_peer: false },
                        "fenced here, and not resent before"
                    );
                    let has_said = self.fenced_by_peer[lane.index()].contains(&received);
                    assert!(has_said, "nothing is resent before the peer says FENCED");
                    self.rails[lane.index()] = Rail::Stopped { by_peer: true };
                }
                Action::OpenQps(lane) => {
                    assert!(
                        !self.has_ended,
                        "a connection that has ended asks for no rail"
                    );
                    assert_eq!(
                        (self.role, self.rails[lane.index()]),
                        (Role::Sender, Rail::Stopped { by_peer: true })
                    );
                    self.work(lane, tape);
                }
                Action::AnswerQps(lane, ..) => {
                    let rail = self.rails[lane.index()];
                    assert_eq!(
                        (self.role, rail),
                        (Role::Receiver, Rail::Stopped { by_peer: true })
                    );
                    self.work(lane, tape);
                }
                Action::ConnectQps(lane, _) => {
                    assert!(
                        !self.has_ended,
                        "a connection that has ended connects nothing"
                    );
                    assert_eq!(
                        (self.role, self.rails[lane.index()]),
                        (Role::Sender, Rail::New)
                    );
                    self.work(lane, tape);
                }
                Action::Activate(lane) => {
                    assert!(
                        !self.has_ended,
                        "a connection that has ended takes no rail into use"
                    );
                    assert_eq!(
                        self.rails[lane.index()],
                        Rail::Connected,
                        "only what is connected is used"
                    );
                    let says_live = matches!(self.received, Some(ControlMessage::Live { lane: of }) if of == lane);
                    assert!(self.role == Role::Sender || says_live, "not before LIVE");
                    self.rails[lane.index()] = Rail::Used;
                    self.losses[lane.index()] = false;
                    self.fenced_by_peer[lane.index()].clear();
                    self.was_up = true;
                    self.recovery.activated(lane, Ok(()), self.now);
                }
                Action::DropQps(lane) => {
                    assert!(matches!(
                        self.rails[lane.index()],
                        Rail::Working | Rail::New | Rail::Connected
                    ));
                    self.rails[lane.index()] = Rail::Stopped { by_peer: true };
                }
                Action::Fail(failure) => {
                    self.failed += 1;
                    self.has_ended = true;
                    assert!(self.recovery.has_failed() && !self.recovery.recovers());
                    assert!(
                        self.failed == 1 || matches!(failure, Failure::Protocol(_)),
                        "{failure:?}"
                    );
                    self.check_failure(&failure);
                    self.recovery.report_failure("failed".to_owned());
                }
                Action::PeerClosed(_) | Action::PeerGone => {
                    assert!(!self.recovery.recovers());
                    self.has_ended = true;
                }
                Action::StallQuery(question) => {
                    self.check_stall_report(&question);
                    let progress = match self.role {
                        Role::Sender => Progress::Sender {
                            begun: 0,
                            is_granted: false,
                            running: 0,
                            lanes: 0,
                            untested: 0,
                        },
                        Role::Receiver => Progress::Receiver {
                            granted: 0,
                            delivered: 0,
                            open: 0,
                            arrived: 0,
                            untested: 0,
                        },
                    };
                    let rail_changes = self.recovery.settled_changes();
                    self.recovery.reply_to_stall(StallReport {
                        progress,
                        rail_changes,
                        ..question
                    });
                }
                Action::StallReply(answer) => self.check_stall_report(&answer),
                Action::Changed(_) | Action::Log(_) => {}
            }
        }
    }

    fn check_stall_report(&self, report: &StallReport) {
        let is_sender = matches!(report.progress, Progress::Sender { .. });
        assert_eq!(
            is_sender,
            self.role == Role::Receiver,
            "the other role's progress"
        );
    }

    fn check_failure(&self, failure: &Failure) {
        let has_no_rail = !self.rails.contains(&Rail::Used);
        let is_true = match failure {
            Failure::NoFirstRail => has_no_rail && !self.was_up,
            Failure::NoRail(_) => has_no_rail && self.was_up,
            Failure::NotAcknowledged(lane) => {
                self.rails[lane.index()] == Rail::Stopped { by_peer: false }
            }
            Failure::NotStopped(lane) => self.rails[lane.index()] == Rail::Lost,
            Failure::Protocol(_) | Failure::AtPeer(_) => true,
        };
        assert!(is_true, "{failure:?} with {:?}", self.rails);
    }

    /// Plays the start of a thread that makes or connects queue pairs. The thread succeeds or fails
    /// at once, or hangs until [`Caller::finish`].
    fn work(&mut self, lane: LaneId, tape: &mut Tape<'_>) {
        self.rails[lane.index()] = Rail::Working;
        match tape.below(4) {
            3 => self.end_work(lane, true),
            2 => {}
            _ => self.end_work(lane, false),
        }
    }

    fn finish(&mut self, lane: LaneId) {
        if self.rails[lane.index()] == Rail::Working {
            self.end_work(lane, false);
        }
    }

    fn end_work(&mut self, lane: LaneId, failed: bool) {
        let fails = || Cause::Failed("no way".to_owned());
        let stopped = Rail::Stopped { by_peer: true };
        match self.recovery.state(lane) {
            Some(State::Opening { .. }) => {
                self.rails[lane.index()] = if failed { stopped } else { Rail::New };
                let outcome = if failed {
                    Err(fails())
                } else {
                    Ok((advert(), end(1)))
                };
                self.recovery.opened(lane, outcome, self.now);
            }
            Some(State::Connecting { .. }) => {
                self.rails[lane.index()] = if failed { stopped } else { Rail::Connected };
                self.recovery
                    .connected(lane, if failed { Err(fails()) } else { Ok(()) }, self.now);
            }
            Some(State::Answering) => {
                self.rails[lane.index()] = if failed { stopped } else { Rail::Connected };
                let connector_gid = [1; 16];
                let acceptor_gid = [2; 16];
                let mtu_bytes = 1024;
                let epoch = Epoch::default();
                let answer = JoinAnswer {
                    connector_gid,
                    acceptor_gid,
                    mtu_bytes,
                    end: end(2),
                    epoch,
                };
                self.recovery.answered(
                    lane,
                    if failed {
                        Err(Cause::Deferred("later".to_owned()))
                    } else {
                        Ok(answer)
                    },
                    self.now,
                );
            }
            other => panic!("a thread works for rail {lane} in {other:?}"),
        }
    }

    /// Compares recovery's state of each rail with the caller's queue pairs, after all actions.
    fn compare(&self) {
        let need = self.recovery.bootstrap_need(false, self.now);
        let is_told = !(self.recovery.has_failed() && self.recovery.is_waiting());
        assert!(
            match need {
                Need::No => !self.recovery.recovers(),
                Need::NotUrgent => self.recovery.recovers() || !is_told,
                Need::Urgent => self.recovery.recovers(),
            },
            "TCP is dialled while rails are recovered, and while the peer has not confirmed FAILED: {need:?}"
        );
        for (lane, rail) in LaneId::all(RAILS).zip(&self.rails) {
            let expected = match self.recovery.state(lane).expect("the rail is there") {
                State::Up { .. } if self.losses[lane.index()] => *rail,
                State::Up { .. } => Rail::Used,
                State::Fencing { .. } => Rail::Lost,
                State::Fenced { .. } => Rail::Stopped { by_peer: false },
                State::Down { .. } => Rail::Stopped { by_peer: true },
                State::Opening { .. } | State::Connecting { .. } | State::Answering => {
                    Rail::Working
                }
                State::Activating => panic!("rail {lane} waits for an action that was executed"),
                State::Requested { .. } => Rail::New,
                State::Probing { .. } | State::AwaitingLive => Rail::Connected,
            };
            assert_eq!(*rail, expected, "rail {lane}");
        }
    }
}

fn end(number: u32) -> LaneEnd {
    LaneEnd {
        qps: vec![QpEnd {
            number,
            psn: number,
        }],
        mailbox_rkey: 0,
    }
}

fn advert() -> RailAdvert {
    let (_, message) = messages()
        .into_iter()
        .find(|(_, message)| matches!(message, ControlMessage::Join { .. }))
        .expect("a JOIN");
    match message {
        ControlMessage::Join { rail, .. } => rail,
        other => unreachable!("{other:?}"),
    }
}

/// A rail that is lost and returns, on either side; a connection that fails while it tries to
/// bring back a rail; a device that is cut off, and stops only after the peer's FENCED; a device
/// that is removed, so that its queue pairs stop before the loss is reported; a start without a
/// rail, and a close.
pub fn seeds() -> Seeds {
    let at = |name: &str| {
        messages()
            .iter()
            .position(|(of, _)| of.contains(name))
            .expect("a message of that name") as u8
    };
    let receive = |w: &mut Writer, which: u8| {
        w.u8(0).u8(0).u8(which).u64(40);
    };
    let mut sender = Writer::default();
    sender.u8(0).u8(2).u8(0).u8(10).u8(0);
    receive(&mut sender, at("fenced"));
    sender.u8(7).u8(0).u8(2);
    sender.u8(0);
    receive(&mut sender, at("joined"));
    sender.u8(0).u8(6).u8(0).u8(0).u8(7).u8(0).u8(0);
    let mut receiver = Writer::default();
    receiver.u8(1);
    receive(&mut receiver, at("fenced"));
    receive(&mut receiver, at("join"));
    receiver.u8(0);
    receive(&mut receiver, at("live"));
    receiver.u8(4).u8(0).u8(5).u8(0).u8(7).u8(0).u8(3);
    let mut dark = Writer::default();
    dark.u8(0).u8(2).u8(0).u8(2).u8(1).u8(10).u8(0);
    receive(&mut dark, at("fenced"));
    // The first attempt to open queue pairs fails. The next step of the clock exceeds the limit on
    // the time without any rail.
    dark.u8(7).u8(0).u8(3).u8(3);
    dark.u8(7).u8(0).u8(3);
    let mut cut_off = Writer::default();
    cut_off.u8(0).u8(8).u8(0).u8(10).u8(0);
    receive(&mut cut_off, at("fenced"));
    cut_off.u8(9).u8(0).u8(12).u8(1);
    let mut removed = Writer::default();
    removed.u8(0).u8(8).u8(0).u8(9).u8(0).u8(10).u8(0);
    receive(&mut removed, at("fenced"));
    let mut closed = Writer::default();
    closed.u8(1 + 2);
    receive(&mut closed, at("join"));
    closed.u8(0).u8(11).u8(0);
    receive(&mut closed, at("bye"));
    closed.u8(5).u8(0);
    vec![
        ("sender", sender.into_bytes()),
        ("receiver", receiver.into_bytes()),
        ("dark", dark.into_bytes()),
        ("cut_off", cut_off.into_bytes()),
        ("removed", removed.into_bytes()),
        ("closed", closed.into_bytes()),
    ]
}
