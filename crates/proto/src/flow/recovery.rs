//! Recovery of the rails of one connection, from the loss of a rail to its return.
//!
//! [`Recovery`] is a state machine. Its caller (`comm::recovery::driver`) reports events with their
//! time, and executes the [`Action`]s in order. The words in capitals are control messages.
//!
//! Promises for each rail:
//! - After set-up, `Recovery::transition` is the only function that replaces the state. It emits a
//!   [`Changed`] for the log and the counters. Two fields of a state change without `transition`:
//!   `retry_at` when a port comes up, and `peer_received` when the peer's FENCED arrives.
//! - After a loss, the queue pairs are stopped first ([`Action::Fence`]). FENCED is sent to the
//!   peer after this.
//! - [`Action::Resend`] comes after the fences of both sides. From then on, nothing that was posted
//!   before the fences can arrive.
//! - The connecting side uses new queue pairs, and sends LIVE, after its test writes are
//!   acknowledged. The accepting side uses its own new queue pairs after LIVE arrives.
//! - A connection may begin without any rail. It fails if no rail is in use within
//!   [`Limits::first_rail`].
//! - Every state except [`State::Up`], [`State::Down`] and [`State::Activating`] has a time limit
//!   on one of the sides. `Activating` ends as soon as the caller has executed
//!   [`Action::Activate`].
//!
//! All times are nanoseconds of one clock. If the clock goes backwards, no time has passed.
#![doc = ""]
#![doc = include_str!("recovery/README.md")]

mod action;
mod attempts;
mod bootstrap;
mod state;
#[cfg(test)]
mod tests;
mod time;

pub use action::{Action, Failure, Frame, LogEntry};
pub use attempts::{Attempts, FailedAttempts, Missing, PathChoice};
pub use state::{Cause, Changed, Limits, Role, State};

use super::control_link::ControlLink;
use crate::wire::control::{
    ControlFrame, ControlMessage, JoinAnswer, Progress, Received, StallReport,
};
use crate::wire::fields::{LaneEnd, RailAdvert};
use crate::wire::ids::LaneId;
use std::collections::VecDeque;

const MILLISECOND: u64 = 1_000_000;
const SECOND: u64 = 1000 * MILLISECOND;

/// Pause before the connecting side tries to reconnect a lost rail. The pause doubles with each
/// loss soon after a recovery, and with each failed attempt. It ends early if the connecting side's
/// port comes up.
const RETRY_PAUSE_NS: u64 = 500 * MILLISECOND;
/// Largest number of doublings of the pause in the usual case: a pause of 2 s.
const MAX_DOUBLINGS: u32 = 2;
/// Largest number of doublings for a rail that this connection has never used, although it has used
/// others: a pause of 32 s. Such a rail's fault (a wrong VLAN, a missing route) lasts, and every
/// connection makes attempts.
const MAX_DOUBLINGS_NEVER_UP: u32 = 6;
/// Time in use after which a rail's next loss resets its count of attempts.
const STEADY: u64 = 10 * SECOND;
/// Time limit of each step of an attempt: to create queue pairs, to answer JOIN, to connect. A step
/// may wait until the kernel has resolved a neighbour's address.
const STEP: u64 = 10 * SECOND;
/// Time after which an unacknowledged frame is sent again, over every rail.
const REPEAT_AFTER_NS: u64 = 50 * MILLISECOND;
/// While this number of control messages or more is queued, no attempt is started and no STALL
/// QUERY is sent.
const CROWDED: usize = 32;
/// If more than this number of control messages is queued when a message from the peer arrives, the
/// peer violates the protocol: it sends frames but does not acknowledge this side's frames.
const MAX_UNACKNOWLEDGED: usize = 4 * CROWDED;

/// State of one connection's rails, and the control messages about them.
#[derive(Debug, Clone)]
pub struct Recovery {
    role: Role,
    limits: Limits,
    rails: Vec<Rail>,
    peer: Peer,
    has_failed: bool,
    /// Number of FAILED, once it was queued.
    failed_message: Option<u64>,
    link: ControlLink,
    /// Time at which the last frame was sent.
    sent_at: u64,
    /// Number of the unacknowledged message, and the time at which it was first sent. After a new
    /// TCP connection, the time at which it was first sent again.
    unconfirmed: Option<(u64, u64)>,
    /// Time of the last ARE YOU THERE that was queued because there is no TCP connection.
    asked_at: Option<u64>,
    /// Time since which no rail is up.
    no_rail_since: Option<u64>,
    /// Number of times that a rail left or entered [`State::Up`].
    rail_changes: u32,
    /// Number of the last STALL QUERY or STALL REPLY queued.
    stall_message: u64,
    actions: VecDeque<Action>,
}

#[derive(Debug, Clone)]
struct Rail {
    state: State,
    /// Number of losses and failed attempts since it was last set to 0, plus 1 during an attempt.
    /// Set to 0 when the rail is lost after more than [`STEADY`] in use, and when its port comes
    /// up.
    setbacks: u32,
    /// Number of the newest JOIN. An answer to an earlier JOIN is ignored.
    join_number: u8,
    was_up: bool,
    attempts: Attempts,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Peer {
    Here,
    /// TCP was closed without a BYE, at time `since`. The peer must show that it is alive: it must
    /// acknowledge the control message with number `question`.
    Suspected {
        since: u64,
        question: u64,
    },
    /// The peer has sent FAILED.
    Failed,
    /// The peer has sent BYE.
    Closed,
    /// The peer's process has ended, or TCP delivered invalid bytes.
    Gone,
}

impl Peer {
    fn is_open(self) -> bool {
        matches!(self, Self::Here | Self::Suspected { .. })
    }
}

impl Recovery {
    /// Returns the recovery of a new connection with this number of rails, all in use.
    pub fn new(role: Role, limits: Limits, rails: usize) -> Self {
        let rail = Rail {
            state: State::Up { since: 0 },
            setbacks: 0,
            join_number: 0,
            was_up: true,
            attempts: Attempts::default(),
        };
        Self {
            role,
            limits,
            rails: vec![rail; rails],
            peer: Peer::Here,
            has_failed: false,
            failed_message: None,
            link: ControlLink::default(),
            sent_at: 0,
            unconfirmed: None,
            asked_at: None,
            no_rail_since: None,
            rail_changes: 0,
            stall_message: 0,
            actions: VecDeque::new(),
        }
    }

    /// Marks rails of a new connection as lost. The handshake counts as their first attempt. They
    /// need no fence, because nothing was posted on them.
    pub fn mark_missing_at_start(&mut self, missing: &[Missing]) {
        for Missing {
            lane, path, why, ..
        } in missing
        {
            let rail = &mut self.rails[lane.index()];
            (rail.setbacks, rail.was_up) = (1, false);
            rail.attempts.fail_in_handshake(*path, why);
        }
        // `pause` depends on `was_up` of all rails, so the loop above sets all of them first.
        for Missing { lane, .. } in missing {
            self.rails[lane.index()].state = State::Down {
                retry_at: self.pause(*lane),
            };
        }
    }

    /// Returns how long the connection has waited for its first rail. Returns `None` if a rail was
    /// ever in use, or if rails are no longer recovered.
    pub fn waits_for_first_rail(&self, now: u64) -> Option<u64> {
        let waited = now.saturating_sub(self.no_rail_since.unwrap_or(now));
        (self.recovers() && !self.was_up()).then_some(waited)
    }

    /// Returns the next action. The caller starts the actions in the order in which they come. It
    /// may report the result of an action later, after it has called this function again.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Returns the frame to send now, if any. The caller must have executed all actions before.
    pub fn poll_frame(&mut self, now: u64) -> Option<Frame> {
        if self.peer == Peer::Gone {
            // No process reads the frames, even if the peer's NIC still acknowledges them.
            return None;
        }
        self.note_unconfirmed(now);
        if let Some(frame) = self.link.next_frame() {
            self.sent_at = now;
            return Some(Frame::First(frame));
        }
        let is_late = self.link.is_waiting() && now.saturating_sub(self.sent_at) >= REPEAT_AFTER_NS;
        is_late.then(|| {
            self.sent_at = now;
            Frame::Repeated(self.link.frame())
        })
    }

    /// Returns the current frame. It also confirms the last message from the peer.
    pub fn frame(&self) -> ControlFrame {
        self.link.frame()
    }

    /// Returns the state of a rail.
    pub fn state(&self, lane: LaneId) -> Option<&State> {
        self.rails.get(lane.index()).map(|rail| &rail.state)
    }

    /// Returns the rails in use.
    pub fn rails_up(&self) -> impl Iterator<Item = LaneId> {
        let is_up =
            |(lane, rail): (LaneId, &Rail)| matches!(rail.state, State::Up { .. }).then_some(lane);
        self.lanes().zip(&self.rails).filter_map(is_up)
    }

    /// Returns true if every rail is up and every message is acknowledged.
    pub fn is_whole(&self) -> bool {
        !self.link.is_waiting() && self.rails_up().count() == self.rails.len()
    }

    /// Returns true while the peer's process may have ended: its TCP was closed without a BYE, and
    /// it has not answered yet.
    pub fn suspects_peer(&self) -> bool {
        matches!(self.peer, Peer::Suspected { .. })
    }

    /// Returns true while a message is not acknowledged.
    pub fn is_waiting(&self) -> bool {
        self.link.is_waiting()
    }

    /// Returns true while a message is not acknowledged, or a rail is being fenced or reconnected.
    /// The service thread then polls often, because no event wakes it.
    pub fn is_busy(&self) -> bool {
        self.link.is_waiting() || self.recovers() && self.rails.iter().any(Rail::is_changing)
    }

    /// Returns the number of times that a rail was lost or came back on this side. Returns `None`
    /// while a rail is being fenced or reconnected, or while the peer has not acknowledged a
    /// message other than STALL QUERY and STALL REPLY.
    pub fn settled_changes(&self) -> Option<u32> {
        let is_only_stall_message = self
            .link
            .under_way()
            .is_none_or(|number| number == self.stall_message);
        let is_settled = is_only_stall_message
            && self.link.backlog() == 0
            && !self.rails.iter().any(Rail::is_changing);
        is_settled.then_some(self.rail_changes)
    }

    /// Returns true while lost rails are recovered: the connection has not failed, and the peer has
    /// neither closed it nor gone.
    pub fn recovers(&self) -> bool {
        self.peer.is_open() && !self.has_failed
    }

    /// Returns true once the connection has failed.
    pub fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// Reports that the connection has failed.
    pub fn fail(&mut self) {
        if !std::mem::replace(&mut self.has_failed, true) {
            self.stop_attempts();
        }
    }

    /// Sends FAILED to the peer, with the reason why this side has failed. Only the first reason is
    /// sent, and none to a peer that has closed, has gone or has sent FAILED itself.
    pub fn report_failure(&mut self, why: String) {
        if self.peer.is_open() && self.failed_message.is_none() {
            self.failed_message = Some(self.link.queue(ControlMessage::Failed { why }));
        }
    }

    /// Returns the frame with FAILED, until the peer has confirmed it. The caller writes it over
    /// the rails before it stops them: afterwards only TCP carries frames.
    pub fn last_words(&mut self) -> Option<ControlFrame> {
        self.link.frame_ahead(self.failed_message?)
    }

    /// Closes this side with a BYE. `delivered` is the number of receives before the first one that
    /// waits for bytes; 0 from a sender.
    pub fn close(&mut self, delivered: u64) {
        self.link.queue(ControlMessage::Bye { delivered });
    }

    /// Returns the frames of all messages that the peer has not acknowledged, up to BYE. They must
    /// be sent in this order over TCP: this side's process may end before any acknowledgement
    /// arrives. The caller must have executed all actions before. [`Recovery::poll_frame`] repeats
    /// messages that are not acknowledged later.
    pub fn last_frames(&mut self, now: u64) -> Vec<ControlFrame> {
        if self.peer == Peer::Gone {
            return Vec::new();
        }
        self.note_unconfirmed(now);
        self.sent_at = now;
        self.link.send_ahead()
    }

    /// Asks the peer for its state, and sends it the state of this side. Sends nothing if `CROWDED`
    /// or more messages are queued: the peer does not acknowledge them.
    pub fn ask_about_stall(&mut self, question: StallReport) {
        if self.link.backlog() < CROWDED {
            self.stall_message = self.link.queue(ControlMessage::StallQuery(question));
        }
    }

    /// Answers [`Action::StallQuery`] with the state of this side.
    pub fn reply_to_stall(&mut self, answer: StallReport) {
        self.stall_message = self.link.queue(ControlMessage::StallReply(answer));
    }

    /// Reports that [`Action::Fence`] is done. `received` lists a receiver's open receives and
    /// their arrived shares. A sender passes an empty list.
    pub fn fenced(&mut self, lane: LaneId, received: Received, now: u64) {
        let Some(State::Fencing { peer_received, .. }) = self.state(lane) else {
            return;
        };
        let peer_received = peer_received.clone();
        self.transition(lane, State::Fenced { since: now }, Cause::Stopped, now);
        self.link.queue(ControlMessage::Fenced { lane, received });
        if let Some(peer_received) = peer_received {
            self.resend(lane, peer_received, now);
        }
    }

    /// Reports that the port of a rail came up. Its next attempt starts immediately.
    pub fn port_up(&mut self, lane: LaneId, now: u64) {
        let Some(rail) = self.rails.get_mut(lane.index()) else {
            return;
        };
        rail.setbacks = 0;
        if let State::Down { retry_at } = &mut rail.state {
            *retry_at = now;
        }
    }

    /// Reports the loss of a rail: the data path has found it lost, its port went down, or its
    /// device was removed or is silent. In any state but [`State::Up`], the loss is known already.
    pub fn rail_down(&mut self, lane: LaneId, why: &str, now: u64) {
        self.fence(lane, Cause::Lost(why.to_owned()), None, now);
    }

    /// Reports that the peer's process has ended, or that TCP delivered invalid bytes.
    pub fn peer_gone(&mut self) {
        if self.peer.is_open() {
            self.peer = Peer::Gone;
            self.actions.push_back(Action::PeerGone);
            self.stop_attempts();
        }
    }

    /// Fails the connection because of a protocol violation by the peer.
    pub fn breach(&mut self, why: String) {
        self.give_up(Failure::Protocol(why));
    }

    /// Reports a frame from the peer. `begun` is the number of receives for which this side has
    /// started all sends. The peer cannot have completed more receives. A receiver passes 0.
    pub fn receive_frame(&mut self, frame: &ControlFrame, begun: u64, now: u64) {
        match self.link.receive_frame(frame) {
            Ok(None) => {}
            Ok(Some(message)) => self.handle(message, begun, now),
            Err(malformed) => self.log(LogEntry::Malformed(malformed.to_string())),
        }
    }

    /// Reports the result of [`Action::OpenQps`]: the rail's description and the new queue pairs,
    /// or [`Cause::Failed`] or [`Cause::Deferred`].
    pub fn opened(
        &mut self,
        lane: LaneId,
        outcome: Result<(RailAdvert, LaneEnd), Cause>,
        now: u64,
    ) {
        if !matches!(self.state(lane), Some(State::Opening { .. })) {
            return;
        }
        match outcome {
            Ok(_) if !self.recovers() => {
                self.set_down(lane, Cause::ConnectionEnds, now);
                self.actions.push_back(Action::DropQps(lane));
            }
            Ok((advert, end)) => {
                self.transition(
                    lane,
                    State::Requested { until: now + STEP },
                    Cause::Done,
                    now,
                );
                let rail = &mut self.rails[lane.index()];
                rail.join_number = rail.join_number.wrapping_add(1);
                let attempt = rail.join_number;
                self.link.queue(ControlMessage::Join {
                    lane,
                    attempt,
                    rail: advert,
                    end,
                });
            }
            // JOIN was not sent, so the peer needs no NOT NOW.
            Err(cause) => self.set_down(lane, cause, now),
        }
    }

    /// Reports the result of [`Action::ConnectQps`].
    pub fn connected(&mut self, lane: LaneId, outcome: Result<(), Cause>, now: u64) {
        if !matches!(self.state(lane), Some(State::Connecting { .. })) {
            return;
        }
        match outcome {
            Ok(()) if !self.recovers() => self.end_attempt(lane, Cause::ConnectionEnds, now),
            Ok(()) => self.transition(
                lane,
                State::Probing {
                    until: now + self.limits.probe,
                },
                Cause::Done,
                now,
            ),
            Err(cause) => self.not_now(lane, cause, now),
        }
    }

    /// Reports the result of the test writes: all are acknowledged, or one has failed.
    pub fn probed(&mut self, lane: LaneId, outcome: Result<(), Cause>, now: u64) {
        if !matches!(self.state(lane), Some(State::Probing { .. })) {
            return;
        }
        match outcome {
            Ok(()) => self.activate(lane, now),
            Err(cause) => self.end_attempt(lane, cause, now),
        }
    }

    /// Reports the result of [`Action::Activate`].
    pub fn activated(&mut self, lane: LaneId, outcome: Result<(), Cause>, now: u64) {
        if self.state(lane) != Some(&State::Activating) {
            return;
        }
        match outcome {
            Ok(()) => {
                self.transition(lane, State::Up { since: now }, Cause::Done, now);
                if self.role == Role::Sender {
                    self.link.queue(ControlMessage::Live { lane });
                }
            }
            Err(cause) => self.not_now(lane, cause, now),
        }
    }

    /// Reports the result of [`Action::AnswerQps`], or [`Cause::Failed`] or [`Cause::Deferred`].
    pub fn answered(&mut self, lane: LaneId, outcome: Result<JoinAnswer, Cause>, now: u64) {
        if self.state(lane) != Some(&State::Answering) {
            return;
        }
        match outcome {
            Ok(_) if !self.recovers() => self.end_attempt(lane, Cause::ConnectionEnds, now),
            Ok(answer) => {
                self.transition(lane, State::AwaitingLive, Cause::Done, now);
                let attempt = self.rails[lane.index()].join_number;
                self.link.queue(ControlMessage::Joined {
                    lane,
                    attempt,
                    answer,
                });
            }
            Err(cause) => self.not_now(lane, cause, now),
        }
    }

    fn handle(&mut self, message: ControlMessage, begun: u64, now: u64) {
        self.log(LogEntry::MessageReceived(Box::new(message.clone())));
        if let Err(why) = self.check(&message, begun) {
            return self.breach(why);
        }
        match message {
            ControlMessage::Bye { delivered } => self.peer_closed(delivered),
            ControlMessage::AreYouThere => {}
            ControlMessage::Failed { why } if self.peer.is_open() => {
                self.peer = Peer::Failed;
                self.give_up(Failure::AtPeer(why));
            }
            ControlMessage::Failed { .. } => {}
            ControlMessage::StallQuery(report) => {
                self.actions.push_back(Action::StallQuery(report));
            }
            ControlMessage::StallReply(report) => {
                self.actions.push_back(Action::StallReply(report));
            }
            ControlMessage::Fenced { lane, .. }
            | ControlMessage::Join { lane, .. }
            | ControlMessage::Joined { lane, .. }
            | ControlMessage::NotNow { lane, .. }
            | ControlMessage::Live { lane } => self.handle_for_rail(lane, message, now),
        }
    }

    /// Handles a message about the rail of `lane`.
    fn handle_for_rail(&mut self, lane: LaneId, message: ControlMessage, now: u64) {
        let recovers = self.recovers();
        let Some(rail) = self.rails.get_mut(lane.index()) else {
            return self.log(LogEntry::NoSuchRail(lane));
        };
        match (message, &mut rail.state) {
            (
                ControlMessage::Fenced { received, .. },
                State::Fencing {
                    peer_received: peer_received @ None,
                    ..
                },
            ) => {
                *peer_received = Some(received);
            }
            (ControlMessage::Fenced { received, .. }, State::Up { .. }) => {
                self.fence(lane, Cause::LostByPeer, Some(received), now);
            }
            (ControlMessage::Fenced { received, .. }, State::Fenced { .. }) => {
                self.resend(lane, received, now)
            }
            (ControlMessage::Join { attempt, .. }, State::Down { .. }) if !recovers => {
                rail.join_number = attempt;
                self.not_now(lane, Cause::ConnectionEnds, now);
            }
            (
                ControlMessage::Join {
                    attempt,
                    rail: theirs,
                    end,
                    ..
                },
                State::Down { .. },
            ) => {
                rail.join_number = attempt;
                self.transition(lane, State::Answering, Cause::Done, now);
                self.actions
                    .push_back(Action::AnswerQps(lane, Box::new(theirs), end));
            }
            (
                ControlMessage::Joined {
                    attempt, answer, ..
                },
                State::Requested { .. },
            ) if attempt == rail.join_number => {
                self.transition(
                    lane,
                    State::Connecting { until: now + STEP },
                    Cause::Done,
                    now,
                );
                self.actions.push_back(Action::ConnectQps(lane, answer));
            }
            (
                ControlMessage::NotNow { attempt, why, .. },
                State::Requested { .. }
                | State::Connecting { .. }
                | State::Probing { .. }
                | State::Answering
                | State::AwaitingLive,
            ) if attempt == rail.join_number => {
                self.set_down(lane, Cause::Refused(why), now);
                self.actions.push_back(Action::DropQps(lane));
            }
            (ControlMessage::Live { .. }, State::AwaitingLive) => self.activate(lane, now),
            _ => self.log(LogEntry::OutOfTurn(lane)),
        }
    }

    fn check(&self, message: &ControlMessage, begun: u64) -> Result<(), String> {
        if self.link.backlog() > MAX_UNACKNOWLEDGED {
            return Err("peer sends control frames but does not acknowledge ours".to_owned());
        }
        match (message, self.role) {
            (ControlMessage::Join { .. }, Role::Sender) => {
                Err("the accepting side must not send JOIN".to_owned())
            }
            (ControlMessage::Live { .. }, Role::Sender) => {
                Err("the accepting side must not send LIVE".to_owned())
            }
            (ControlMessage::Joined { .. }, Role::Receiver) => {
                Err("the connecting side must not send JOINED".to_owned())
            }
            (ControlMessage::StallQuery(report) | ControlMessage::StallReply(report), role)
                if matches!(report.progress, Progress::Sender { .. }) == (role == Role::Sender) =>
            {
                Err("STALL QUERY or STALL REPLY has the progress of the wrong side".to_owned())
            }
            (ControlMessage::Fenced { received, .. }, Role::Sender)
                if !received.is_possible(begun) =>
            {
                let granted = received.granted;
                let open = received.open.len();
                Err(format!(
                    "FENCED claims {granted} granted receives, {open} of them open, but this side started only {begun} sends"
                ))
            }
            (ControlMessage::Bye { delivered }, _) if *delivered > begun => Err(format!(
                "BYE claims {delivered} delivered messages, but this side started only {begun} sends"
            )),
            _ => Ok(()),
        }
    }

    fn peer_closed(&mut self, delivered: u64) {
        self.peer = Peer::Closed;
        self.actions.push_back(Action::PeerClosed(delivered));
        self.stop_attempts();
    }

    /// Replaces a rail's state. After set-up no other function does this.
    fn transition(&mut self, lane: LaneId, to: State, cause: Cause, at: u64) {
        let is_first_rail = self.recovers() && !self.was_up();
        let rail = &mut self.rails[lane.index()];
        if matches!(rail.state, State::Up { .. }) || matches!(to, State::Up { .. }) {
            self.rail_changes = self.rail_changes.wrapping_add(1);
        }
        match (&rail.state, &to) {
            (State::Up { since }, _) if at.saturating_sub(*since) > STEADY => rail.setbacks = 0,
            (State::Up { .. }, _) | (_, State::Opening { .. }) => rail.setbacks += 1,
            (_, State::Up { .. }) => {
                (rail.was_up, self.no_rail_since) = (true, None);
                rail.setbacks = rail.setbacks.saturating_sub(1);
            }
            _ => {}
        }
        rail.attempts.state_changes(&to, &cause, is_first_rail);
        let from = std::mem::replace(&mut rail.state, to.clone());
        self.actions.push_back(Action::Changed(Box::new(Changed {
            lane,
            from,
            to,
            cause,
            at,
        })));
    }

    fn fence(&mut self, lane: LaneId, cause: Cause, peer_received: Option<Received>, now: u64) {
        if matches!(self.state(lane), Some(State::Up { .. })) {
            self.transition(
                lane,
                State::Fencing {
                    since: now,
                    peer_received,
                },
                cause,
                now,
            );
            self.actions.push_back(Action::Fence(lane));
        }
    }

    fn resend(&mut self, lane: LaneId, received: Received, now: u64) {
        self.set_down(lane, Cause::StoppedByBoth, now);
        self.actions.push_back(Action::Resend(lane, received));
    }

    fn activate(&mut self, lane: LaneId, now: u64) {
        self.transition(lane, State::Activating, Cause::Done, now);
        self.actions.push_back(Action::Activate(lane));
    }

    fn end_attempt(&mut self, lane: LaneId, cause: Cause, now: u64) {
        self.actions.push_back(Action::DropQps(lane));
        self.not_now(lane, cause, now);
    }

    fn not_now(&mut self, lane: LaneId, cause: Cause, now: u64) {
        let attempt = self.rails[lane.index()].join_number;
        let why = cause.to_string();
        self.set_down(lane, cause, now);
        self.link
            .queue(ControlMessage::NotNow { lane, attempt, why });
    }

    fn give_up(&mut self, failure: Failure) {
        if !std::mem::replace(&mut self.has_failed, true) {
            self.actions.push_back(Action::Fail(failure));
            self.stop_attempts();
        }
    }

    fn stop_attempts(&mut self) {
        for lane in self.lanes() {
            match self.rails[lane.index()].state {
                State::Requested { .. } | State::Probing { .. } | State::AwaitingLive => {
                    self.end_attempt(lane, Cause::ConnectionEnds, 0);
                }
                _ => {}
            }
        }
    }

    /// Returns true once any rail was in use.
    pub fn was_up(&self) -> bool {
        self.rails.iter().any(|rail| rail.was_up)
    }

    fn set_down(&mut self, lane: LaneId, cause: Cause, now: u64) {
        self.transition(
            lane,
            State::Down {
                retry_at: now + self.pause(lane),
            },
            cause,
            now,
        );
    }

    fn log(&mut self, entry: LogEntry) {
        self.actions.push_back(Action::Log(entry));
    }

    fn lanes(&self) -> impl Iterator<Item = LaneId> + use<> {
        LaneId::all(self.rails.len())
    }
}
