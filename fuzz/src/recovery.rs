//! Recovery: any messages in any order, between events of this side's ports, data path and clock.
//!
//! The first byte selects the side of the connection; a tape of events follows. The model is the
//! order of actions that `flow::recovery` promises, for each rail.

use crate::control::messages;
use crate::tape::Tape;
use crate::target::Seeds;
use nccl_net_spark::flow::recovery::{Action, Answer, Cause, Limits, Recovery, Role, State};
use nccl_net_spark::wire::codec::Writer;
use nccl_net_spark::wire::control::{ControlFrame, ControlMessage, Received};
use nccl_net_spark::wire::cts::Epoch;
use nccl_net_spark::wire::fields::{LaneEnd, QpEnd, RailAdvert};
use nccl_net_spark::wire::ids::LaneId;

const RAILS: usize = 2;
const SECOND: u64 = 1_000_000_000;
const LIMITS: Limits = Limits { loss: 30 * SECOND, probe: 5 * SECOND, first_rail: 120 * SECOND };

/// State of a rail in the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rail {
    /// The rail's queue pairs are in use.
    Used,
    /// They are destroyed. `by_peer` is true once the peer has stopped its own too.
    Stopped { by_peer: bool },
    /// New ones are made, and requested from the peer.
    New,
    /// New ones are connected.
    Connected,
}

struct Caller {
    recovery: Recovery,
    role: Role,
    rails: [Rail; RAILS],
    /// The last message that arrived.
    heard: Option<ControlMessage>,
    failed: u32,
    /// True once recovery has reported that the connection failed, or that the peer has left.
    /// Actions from before are still executed in their order.
    has_ended: bool,
    now: u64,
}

/// Reads a tape of events.
pub fn check(data: &[u8]) -> bool {
    let mut tape = Tape::new(data);
    let role = if tape.step().is_some_and(|step| step % 2 == 0) { Role::Sender } else { Role::Receiver };
    let recovery = Recovery::new(role, LIMITS, RAILS);
    let mut caller =
        Caller { recovery, role, rails: [Rail::Used; RAILS], heard: None, failed: 0, has_ended: false, now: 0 };
    let known = messages();
    let mut number = 0;
    while let Some(step) = tape.step() {
        let lane = tape.lane(RAILS);
        match step % 8 {
            0 | 1 => {
                let (_, message) = &known[tape.below(known.len())];
                number += 1;
                caller.hear(number, &on_rail(message.clone(), lane), tape.u64() % 64);
            }
            2 => caller.lose(lane),
            3 => caller.recovery.port_up(lane, caller.now),
            4 => caller.recovery.port_down(lane, "port", caller.now),
            5 if lane.index() == RAILS - 1 => caller.recovery.bootstrap_opened(),
            5 => caller.recovery.bootstrap_closed(caller.now),
            6 => caller.probed(lane, tape.below(2) == 0),
            _ => caller.now += [SECOND / 100, SECOND / 2, 3 * SECOND, 20 * SECOND][tape.below(4)],
        }
        caller.recovery.tick(caller.now);
        caller.act(&mut tape);
        while caller.recovery.poll_frame(caller.now).is_some() {}
    }
    number > 0
}

/// The control message, changed to this rail; a BYE gets a possible count.
fn on_rail(mut message: ControlMessage, at: LaneId) -> ControlMessage {
    match &mut message {
        ControlMessage::Fenced { lane, .. }
        | ControlMessage::Join { lane, .. }
        | ControlMessage::Joined { lane, .. }
        | ControlMessage::NotNow { lane, .. }
        | ControlMessage::Live { lane } => *lane = at,
        ControlMessage::Bye { delivered } => *delivered = 0,
        ControlMessage::AreYouThere => {}
    }
    message
}

impl Caller {
    fn hear(&mut self, number: u64, message: &ControlMessage, begun: u64) {
        self.heard = Some(message.clone());
        // The frame confirms all of this side's messages, so none pile up.
        let heard = self.recovery.frame().number;
        let frame = ControlFrame { number, heard, asks: true, message: message.encode() };
        self.recovery.heard(&frame, begun, self.now);
    }

    fn lose(&mut self, lane: LaneId) {
        if self.rails[lane.index()] == Rail::Used {
            self.rails[lane.index()] = Rail::Stopped { by_peer: false };
            self.recovery.lost(lane, "loss", Received::default(), self.now);
        }
    }

    fn probed(&mut self, lane: LaneId, is_good: bool) {
        let outcome = if is_good { Ok(()) } else { Err("no answer".to_owned()) };
        self.recovery.probed(lane, outcome, self.now);
    }

    fn act(&mut self, tape: &mut Tape<'_>) {
        while let Some(action) = self.recovery.poll_action() {
            match action {
                Action::Fence(lane) => {
                    assert_eq!(self.rails[lane.index()], Rail::Used, "only a rail in use is fenced");
                    self.rails[lane.index()] = Rail::Stopped { by_peer: false };
                    self.recovery.fenced(lane, Received::default(), self.now);
                }
                Action::Resend(lane, received) => {
                    assert_eq!(
                        self.rails[lane.index()],
                        Rail::Stopped { by_peer: false },
                        "fenced here, and not resent before"
                    );
                    let Some(ControlMessage::Fenced { lane: of, received: theirs }) = &self.heard else {
                        panic!("nothing is resent before the peer says FENCED")
                    };
                    assert_eq!((*of, theirs), (lane, &received));
                    self.rails[lane.index()] = Rail::Stopped { by_peer: true };
                }
                Action::OpenQps(lane) => self.open(lane, tape.below(4) == 3),
                Action::AnswerQps(lane, ..) => self.answer(lane, tape.below(4) == 3),
                Action::ConnectQps(lane, _) => {
                    let failed = tape.below(4) == 3;
                    assert!(!self.has_ended, "a connection that has ended connects nothing");
                    assert_eq!((self.role, self.rails[lane.index()]), (Role::Sender, Rail::New));
                    if !failed {
                        self.rails[lane.index()] = Rail::Connected;
                    } else {
                        self.rails[lane.index()] = Rail::Stopped { by_peer: true };
                    }
                    self.recovery.connected(lane, if failed { Err("no way".to_owned()) } else { Ok(()) }, self.now);
                }
                Action::Activate(lane) => {
                    assert!(!self.has_ended, "a connection that has ended uses no further rail");
                    assert_eq!(self.rails[lane.index()], Rail::Connected, "only a connected rail is used");
                    let says_live = matches!(self.heard, Some(ControlMessage::Live { lane: of }) if of == lane);
                    assert!(self.role == Role::Sender || says_live, "not before LIVE");
                    self.rails[lane.index()] = Rail::Used;
                }
                Action::DropQps(lane) => {
                    assert!(matches!(self.rails[lane.index()], Rail::New | Rail::Connected));
                    self.rails[lane.index()] = Rail::Stopped { by_peer: true };
                }
                Action::Fail(cause) => {
                    self.failed += 1;
                    self.has_ended = true;
                    assert!(self.recovery.has_failed() && !self.recovery.recovers());
                    assert!(self.failed == 1 || matches!(cause, Cause::Protocol(_)), "{cause:?}");
                }
                Action::PeerClosed(_) | Action::PeerGone => {
                    assert!(!self.recovery.recovers());
                    self.has_ended = true;
                }
                Action::Log(_) => {}
            }
        }
        self.compare();
    }

    fn open(&mut self, lane: LaneId, failed: bool) {
        assert_eq!((self.role, self.rails[lane.index()]), (Role::Sender, Rail::Stopped { by_peer: true }));
        assert!(!self.has_ended, "a connection that has ended asks for no rail");
        let outcome = if failed { Err("port down".to_owned()) } else { Ok((advert(), end(1))) };
        if !failed {
            self.rails[lane.index()] = Rail::New;
        }
        self.recovery.opened(lane, outcome, self.now);
    }

    fn answer(&mut self, lane: LaneId, failed: bool) {
        assert_eq!((self.role, self.rails[lane.index()]), (Role::Receiver, Rail::Stopped { by_peer: true }));
        let answer = Answer {
            connector_gid: [1; 16],
            acceptor_gid: [2; 16],
            mtu_bytes: 1024,
            end: end(2),
            epoch: Epoch::default(),
        };
        if !failed {
            self.rails[lane.index()] = Rail::Connected;
        }
        self.recovery.answered(lane, if failed { Err("no way".to_owned()) } else { Ok(answer) }, self.now);
    }

    /// Compares recovery's states of the rails with the caller's, once no action is left.
    fn compare(&self) {
        for (lane, rail) in LaneId::all(RAILS).zip(&self.rails) {
            let expected = match self.recovery.state(lane).expect("the rail is there") {
                State::Up { .. } => Rail::Used,
                State::Fenced { .. } => Rail::Stopped { by_peer: false },
                State::Down { .. } => Rail::Stopped { by_peer: true },
                State::Fencing { .. } | State::Opening | State::Connecting | State::Answering => {
                    panic!("rail {lane} waits for an action that is done")
                }
                State::Requested { .. } => Rail::New,
                State::Probing { .. } | State::AwaitingLive => Rail::Connected,
            };
            assert_eq!(*rail, expected, "rail {lane}");
        }
    }
}

fn end(number: u32) -> LaneEnd {
    LaneEnd { qps: vec![QpEnd { number, psn: number }], mailbox_rkey: 0 }
}

fn advert() -> RailAdvert {
    let (_, message) =
        messages().into_iter().find(|(_, message)| matches!(message, ControlMessage::Join { .. })).expect("a JOIN");
    match message {
        ControlMessage::Join { rail, .. } => rail,
        other => unreachable!("{other:?}"),
    }
}

/// A rail that is lost and returns, on either side; and a connection that fails while it asks for a
/// rail.
pub fn seeds() -> Seeds {
    let at =
        |name: &str| messages().iter().position(|(of, _)| of.contains(name)).expect("a message of that name") as u8;
    let hear = |w: &mut Writer, which: u8| {
        w.u8(0).u8(0).u8(which).u64(40);
    };
    let mut sender = Writer::default();
    sender.u8(0).u8(2).u8(0);
    hear(&mut sender, at("fenced"));
    sender.u8(7).u8(0).u8(2);
    sender.u8(0);
    hear(&mut sender, at("joined"));
    sender.u8(0).u8(6).u8(0).u8(0).u8(7).u8(0).u8(0);
    let mut receiver = Writer::default();
    receiver.u8(1);
    hear(&mut receiver, at("fenced"));
    hear(&mut receiver, at("join"));
    receiver.u8(0);
    hear(&mut receiver, at("live"));
    receiver.u8(4).u8(0).u8(5).u8(0).u8(7).u8(0).u8(3);
    let mut dark = Writer::default();
    dark.u8(0).u8(2).u8(0).u8(2).u8(1);
    hear(&mut dark, at("fenced"));
    // The first attempt finds no path. When the second is due, no rail has been up for too long.
    dark.u8(7).u8(0).u8(3).u8(3);
    dark.u8(7).u8(0).u8(3);
    vec![("sender", sender.into_bytes()), ("receiver", receiver.into_bytes()), ("dark", dark.into_bytes())]
}
