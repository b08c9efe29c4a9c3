//! Recovery: the rails of one connection, from the loss of one to its return.
//!
//! A state machine without I/O, locks and a clock: its caller (`comm::recovery::driver`) tells it what happened and what time it is, and
//! executes the [`Action`]s that it asks for, in their order. Two of them can be run against each other without a queue pair
//! (`recovery/tests/search.rs` does, through every order of the events that its budget allows).
//!
//! What it promises, for each rail:
//! - A rail is fenced before anything else is done about its loss: [`Action::Fence`] comes first, then the peer is told.
//! - [`Action::Resend`] comes only after the peer's FENCED: nothing that was posted there can land any more.
//! - The connecting side uses new queue pairs once its trial writes were confirmed, and says LIVE; the accepting side once it has
//!   heard LIVE.
//! - A connection may begin without any rail, and has one within [`Limits::first_rail`] or fails.
//! - Every state but [`State::Up`] and [`State::Down`] has a limit, here or at the peer.
//!
//! Each method that takes a time takes nanoseconds of one clock; if time goes backwards, none has passed.
#![doc = ""]
#![doc = include_str!("recovery/README.md")]

mod action;
mod bootstrap;
mod state;
#[cfg(test)]
mod tests;

pub use action::{Action, Answer, Cause, Frame, LogEntry};
pub use state::{Limits, Role, State};

use super::control_link::ControlLink;
use crate::wire::control::{ControlFrame, ControlMessage, Received};
use crate::wire::fields::{LaneEnd, RailAdvert};
use crate::wire::ids::LaneId;
use std::collections::VecDeque;

const MILLISECOND: u64 = 1_000_000;
const SECOND: u64 = 1000 * MILLISECOND;

/// How soon the connecting side asks whether a lost rail works again. (At once when a port comes up.) Each loss soon after a
/// recovery, and each attempt in vain, doubles it.
const RETRY: u64 = 500 * MILLISECOND;
/// At most so many times.
const DOUBLED_AT_MOST: u32 = 2;
/// And for a rail that the connection has never had: half a minute. What keeps it away (a wrong VLAN, an address that no route leads to) is
/// not over in a moment, and every connection asks.
const DOUBLED_AT_MOST_BEFORE: u32 = 6;
/// A rail that has worked for so long begins anew with its attempts.
const STEADY: u64 = 10 * SECOND;
/// How long the peer may take to answer for new queue pairs: it may have to wait for the kernel to find a neighbour.
const ANSWER: u64 = 10 * SECOND;
/// How long a frame may be unheard before it is sent once more, by every rail.
const REPEAT: u64 = 50 * MILLISECOND;
/// With this many messages queued, no new attempt is started.
const CROWDED: usize = 32;
/// With this many, a peer that goes on talking breaks the protocol: it acknowledges nothing.
const MOST_UNHEARD: usize = 4 * CROWDED;

/// The rails of one connection, and what its two ends say about them.
#[derive(Debug, Clone)]
pub struct Recovery {
    role: Role,
    limits: Limits,
    rails: Vec<Rail>,
    peer: Peer,
    has_failed: bool,
    link: ControlLink,
    /// When the frame under way was last sent.
    sent_at: u64,
    /// The number of the frame under way, and since when it is.
    unheard: Option<(u64, u64)>,
    /// When the peer was last asked over the rails because there is no TCP.
    asked_at: Option<u64>,
    /// Since when no rail is up.
    dark_since: Option<u64>,
    actions: VecDeque<Action>,
}

#[derive(Debug, Clone)]
struct Rail {
    state: State,
    /// Losses and attempts in vain since it last worked for long.
    attempts: u32,
    /// The last request for new queue pairs that was made or heard.
    request: u8,
    /// Whether the connection has ever had it.
    has_carried: bool,
}

/// What is known of the peer's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Peer {
    Here,
    /// Its end of the TCP connection was closed without a BYE. It is asked since then.
    Suspected(u64),
    Closed,
    Gone,
}

impl Recovery {
    /// A connection that has just come up, over so many rails.
    pub fn new(role: Role, limits: Limits, rails: usize) -> Self {
        let rail = Rail { state: State::Up { since: 0 }, attempts: 0, request: 0, has_carried: true };
        Self {
            role,
            limits,
            rails: vec![rail; rails],
            peer: Peer::Here,
            has_failed: false,
            link: ControlLink::default(),
            sent_at: 0,
            unheard: None,
            asked_at: None,
            dark_since: None,
            actions: VecDeque::new(),
        }
    }

    /// A rail did not carry when the connection came up: nothing was posted there, and the connecting side asks for it now and then.
    pub fn begins_without(&mut self, lane: LaneId) {
        if let Some(rail) = self.rails.get_mut(lane.index()) {
            (rail.attempts, rail.has_carried) = (1, false);
            self.set_down(lane, 0);
        }
    }

    /// How long the connection has been without its first rail, in nanoseconds; none once a rail has carried.
    pub fn waits_for_first_rail(&self, now: u64) -> Option<u64> {
        let waited = now.saturating_sub(self.dark_since.unwrap_or(now));
        (self.recovers() && !self.has_carried()).then_some(waited)
    }

    /// The next thing to do. Whatever it calls for is told before the next one is asked for.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// The frame to send now. Asked for when there is no action left.
    pub fn poll_frame(&mut self, now: u64) -> Option<Frame> {
        if self.peer == Peer::Gone {
            // Nobody reads. (A NIC may take frames in all the same, which must not pass for a sign that something moves.)
            return None;
        }
        self.note_unheard(now);
        if let Some(frame) = self.link.news() {
            self.sent_at = now;
            return Some(Frame::First(frame));
        }
        let is_late = self.link.is_waiting() && now.saturating_sub(self.sent_at) >= REPEAT;
        is_late.then(|| {
            self.sent_at = now;
            Frame::Repeated(self.link.frame())
        })
    }

    /// The frame as it is now: for a peer that has just asked, by the path that it asked by.
    pub fn frame(&self) -> ControlFrame {
        self.link.frame()
    }

    /// Where a rail stands.
    pub fn state(&self, lane: LaneId) -> Option<&State> {
        self.rails.get(lane.index()).map(|rail| &rail.state)
    }

    /// The rails that are in use.
    pub fn rails_up(&self) -> impl Iterator<Item = LaneId> {
        let is_up = |(lane, rail): (LaneId, &Rail)| matches!(rail.state, State::Up { .. }).then_some(lane);
        self.lanes().zip(&self.rails).filter_map(is_up)
    }

    /// Whether all is as it should be: every rail up, nothing unheard.
    pub fn is_whole(&self) -> bool {
        !self.link.is_waiting() && self.rails_up().count() == self.rails.len()
    }

    /// Whether something that was said has not been heard.
    pub fn is_waiting(&self) -> bool {
        self.link.is_waiting()
    }

    /// Whether something is under way that is worth looking after often.
    pub fn is_busy(&self) -> bool {
        let is_under_way = |rail: &Rail| !matches!(rail.state, State::Up { .. } | State::Down { .. });
        self.link.is_waiting() || self.recovers() && self.rails.iter().any(is_under_way)
    }

    /// Whether lost rails are brought back: the peer is there, and the connection works.
    pub fn recovers(&self) -> bool {
        matches!(self.peer, Peer::Here | Peer::Suspected(_)) && !self.has_failed
    }

    /// Whether the connection has failed.
    pub fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// The connection has failed, by the caller's word.
    pub fn fail(&mut self) {
        if !std::mem::replace(&mut self.has_failed, true) {
            self.stop_attempts();
        }
    }

    /// This side closes: says BYE.
    pub fn close(&mut self, delivered: u64) {
        self.link.say(ControlMessage::Bye { delivered });
    }

    /// The data path has found a rail lost, and has fenced it by itself.
    pub fn lost(&mut self, lane: LaneId, why: &str, received: Received, now: u64) {
        // Else it was heard of by another path meanwhile.
        if let Some(rail) = self.rails.get_mut(lane.index())
            && let State::Up { since } = rail.state
        {
            rail.count_loss(since, now);
            rail.state = State::Fencing { since: now, why: why.to_owned(), peer_has: None };
            self.fenced(lane, received, now);
        }
    }

    /// [`Action::Fence`] is done. `received` is what a receiver has; of a sender, nothing.
    pub fn fenced(&mut self, lane: LaneId, received: Received, now: u64) {
        let Some(rail) = self.rails.get_mut(lane.index()) else { return };
        let State::Fencing { why, peer_has, .. } = &mut rail.state else { return };
        let (why, peer_has) = (std::mem::take(why), peer_has.take());
        rail.state = State::Fenced { since: now };
        let retry = self.pause(lane);
        self.log(LogEntry::Lost { lane, why, retry });
        self.link.say(ControlMessage::Fenced { lane, received });
        if let Some(peer_has) = peer_has {
            self.resend(lane, peer_has, now);
        }
    }

    /// A port of this host came up.
    pub fn port_up(&mut self, lane: LaneId, now: u64) {
        let Some(rail) = self.rails.get_mut(lane.index()) else { return };
        rail.attempts = 0;
        if let State::Down { retry_at } = &mut rail.state {
            *retry_at = now;
        }
    }

    /// A port of this host went down.
    pub fn port_down(&mut self, lane: LaneId, why: &str, now: u64) {
        self.fence(lane, why, None, now);
    }

    /// The peer is gone, by the caller's word.
    pub fn peer_gone(&mut self) {
        if matches!(self.peer, Peer::Here | Peer::Suspected(_)) {
            self.peer = Peer::Gone;
            self.actions.push_back(Action::PeerGone);
            self.stop_attempts();
        }
    }

    /// The peer says what it must not: the connection has failed.
    pub fn breach(&mut self, why: String) {
        self.give_up(Cause::Protocol(why));
    }

    /// A frame came in. `begun` is how many sends have begun to the peer's receives; 0 of a receiver.
    pub fn heard(&mut self, frame: &ControlFrame, begun: u64, now: u64) {
        match self.link.hear(frame) {
            Ok(None) => {}
            Ok(Some(message)) => self.handle(message, begun, now),
            Err(malformed) => self.log(LogEntry::Malformed(malformed.to_string())),
        }
    }

    /// [`Action::OpenQps`] is done: the rail as it is now and the new queue pairs, or why there are none.
    pub fn opened(&mut self, lane: LaneId, outcome: Result<(RailAdvert, LaneEnd), String>, now: u64) {
        let recovers = self.recovers();
        let Some(rail) = self.rail_in(lane, &State::Opening) else { return };
        match outcome {
            Ok(_) if !recovers => {
                self.set_down(lane, now);
                self.actions.push_back(Action::DropQps(lane));
            }
            Ok((advert, end)) => {
                rail.state = State::Requested { until: now + ANSWER };
                rail.request = rail.request.wrapping_add(1);
                let attempt = rail.request;
                self.link.say(ControlMessage::Join { lane, attempt, rail: advert, end });
            }
            // The peer has heard of nothing yet.
            Err(why) => {
                self.set_down(lane, now);
                self.log(LogEntry::NotYet(lane, why));
            }
        }
    }

    /// [`Action::ConnectQps`] is done, or why not.
    pub fn connected(&mut self, lane: LaneId, outcome: Result<(), String>, now: u64) {
        let (probe, recovers) = (self.limits.probe, self.recovers());
        let Some(rail) = self.rail_in(lane, &State::Connecting) else { return };
        match outcome {
            Ok(()) if !recovers => self.end_attempt(lane, "the connection ends".to_owned(), now),
            Ok(()) => rail.state = State::Probing { until: now + probe },
            Err(why) => self.not_now(lane, why, now),
        }
    }

    /// [`Action::Activate`] found no queue pairs: the data path has failed, and they went with it.
    pub fn not_activated(&mut self, lane: LaneId, now: u64) {
        if let Some(rail) = self.rails.get_mut(lane.index())
            && matches!(rail.state, State::Up { .. })
        {
            self.set_down(lane, now);
        }
    }

    /// The trial writes were all confirmed, or one has failed.
    pub fn probed(&mut self, lane: LaneId, outcome: Result<(), String>, now: u64) {
        let Some(rail) = self.rails.get_mut(lane.index()).filter(|rail| matches!(rail.state, State::Probing { .. }))
        else {
            return;
        };
        match outcome {
            Ok(()) => {
                (rail.state, rail.has_carried) = (State::Up { since: now }, true);
                self.dark_since = None;
                self.link.say(ControlMessage::Live { lane });
                self.actions.push_back(Action::Activate(lane));
            }
            Err(why) => self.end_attempt(lane, why, now),
        }
    }

    /// [`Action::AnswerQps`] is done, or why not.
    pub fn answered(&mut self, lane: LaneId, outcome: Result<Answer, String>, now: u64) {
        let recovers = self.recovers();
        let Some(rail) = self.rail_in(lane, &State::Answering) else { return };
        match outcome {
            Ok(_) if !recovers => self.end_attempt(lane, "the connection ends".to_owned(), now),
            Ok(Answer { connector_gid, acceptor_gid, mtu_bytes, end, epoch }) => {
                rail.state = State::AwaitingLive;
                let attempt = rail.request;
                self.link.say(ControlMessage::Joined {
                    lane,
                    attempt,
                    connector_gid,
                    acceptor_gid,
                    mtu_bytes,
                    end,
                    epoch,
                });
            }
            Err(why) => self.not_now(lane, why, now),
        }
    }

    /// Time has passed.
    pub fn tick(&mut self, now: u64) {
        self.look_for_a_sign_of_life(now);
        if !self.recovers() {
            return;
        }
        if self.role == Role::Sender {
            self.lanes().for_each(|lane| self.bring_back(lane, now));
        }
        self.watch_the_dark(now);
    }

    /// Does what a message asks for.
    fn handle(&mut self, message: ControlMessage, begun: u64, now: u64) {
        self.log(LogEntry::Heard(Box::new(message.clone())));
        if let Err(why) = self.check(&message, begun) {
            return self.breach(why);
        }
        let lane = match &message {
            ControlMessage::Bye { delivered } => return self.peer_closed(*delivered),
            ControlMessage::AreYouThere => return,
            ControlMessage::Fenced { lane, .. }
            | ControlMessage::Join { lane, .. }
            | ControlMessage::Joined { lane, .. }
            | ControlMessage::NotNow { lane, .. }
            | ControlMessage::Live { lane } => *lane,
        };
        let recovers = self.recovers();
        let Some(rail) = self.rails.get_mut(lane.index()) else { return self.log(LogEntry::NoSuchRail(lane)) };
        match (message, &mut rail.state) {
            (ControlMessage::Fenced { received, .. }, State::Fencing { peer_has: peer_has @ None, .. }) => {
                *peer_has = Some(received);
            }
            (ControlMessage::Fenced { received, .. }, State::Up { .. }) => {
                self.fence(lane, "the peer reports it lost", Some(received), now);
            }
            (ControlMessage::Fenced { received, .. }, State::Fenced { .. }) => self.resend(lane, received, now),
            (ControlMessage::Join { attempt, .. }, State::Down { .. }) if !recovers => {
                rail.request = attempt;
                self.not_now(lane, "the connection ends".to_owned(), now);
            }
            (ControlMessage::Join { attempt, rail: theirs, end, .. }, State::Down { .. }) => {
                rail.request = attempt;
                rail.state = State::Answering;
                self.actions.push_back(Action::AnswerQps(lane, Box::new(theirs), end));
            }
            (
                ControlMessage::Joined { attempt, connector_gid, acceptor_gid, mtu_bytes, end, epoch, .. },
                State::Requested { .. },
            ) if attempt == rail.request => {
                rail.state = State::Connecting;
                let answer = Answer { connector_gid, acceptor_gid, mtu_bytes, end, epoch };
                self.actions.push_back(Action::ConnectQps(lane, answer));
            }
            (
                ControlMessage::NotNow { attempt, why, .. },
                State::Requested { .. }
                | State::Connecting
                | State::Probing { .. }
                | State::Answering
                | State::AwaitingLive,
            ) if attempt == rail.request => {
                self.set_down(lane, now);
                self.actions.push_back(Action::DropQps(lane));
                self.log(LogEntry::NotYet(lane, why));
            }
            (ControlMessage::Live { .. }, State::AwaitingLive) => {
                (rail.state, rail.has_carried) = (State::Up { since: now }, true);
                self.dark_since = None;
                self.actions.push_back(Action::Activate(lane));
            }
            _ => self.log(LogEntry::OutOfTurn(lane)),
        }
    }

    /// Looks at what a message says before anything is done about it: whether it is for this side to hear, and possible.
    fn check(&self, message: &ControlMessage, begun: u64) -> Result<(), String> {
        if self.link.backlog() > MOST_UNHEARD {
            return Err("peer sends control frames but does not acknowledge ours".to_owned());
        }
        match (message, self.role) {
            (ControlMessage::Join { .. } | ControlMessage::Live { .. }, Role::Sender)
            | (ControlMessage::Joined { .. }, Role::Receiver) => Err("message invalid for this role".to_owned()),
            (ControlMessage::Fenced { received, .. }, Role::Sender) if !received.is_possible(begun) => {
                let (granted, open) = (received.granted, received.open.len());
                Err(format!(
                    "it claims {granted} granted receives, {open} of them open, but only {begun} sends were started"
                ))
            }
            (ControlMessage::Bye { delivered }, _) if *delivered > begun => {
                Err(format!("it claims {delivered} delivered messages, but only {begun} sends were started"))
            }
            _ => Ok(()),
        }
    }

    fn peer_closed(&mut self, delivered: u64) {
        self.peer = Peer::Closed;
        self.actions.push_back(Action::PeerClosed(delivered));
        self.stop_attempts();
    }

    /// A rail that is up is to be stopped.
    fn fence(&mut self, lane: LaneId, why: &str, peer_has: Option<Received>, now: u64) {
        if let Some(rail) = self.rails.get_mut(lane.index())
            && let State::Up { since } = rail.state
        {
            rail.count_loss(since, now);
            rail.state = State::Fencing { since: now, why: why.to_owned(), peer_has };
            self.actions.push_back(Action::Fence(lane));
        }
    }

    /// Both sides have stopped a rail.
    fn resend(&mut self, lane: LaneId, received: Received, now: u64) {
        self.set_down(lane, now);
        self.actions.push_back(Action::Resend(lane, received));
    }

    /// Connecting side: asks for a lost rail, or ends an attempt that takes too long.
    fn bring_back(&mut self, lane: LaneId, now: u64) {
        let rail = &mut self.rails[lane.index()];
        match rail.state {
            State::Down { retry_at } if now >= retry_at && self.link.backlog() < CROWDED => {
                rail.attempts += 1;
                rail.state = State::Opening;
                self.actions.push_back(Action::OpenQps(lane));
            }
            State::Requested { until } if now >= until => {
                self.end_attempt(lane, "the peer did not answer the reconnect request in time".to_owned(), now);
            }
            State::Probing { until } if now >= until => {
                self.end_attempt(lane, "test write not acknowledged in time".to_owned(), now);
            }
            _ => {}
        }
    }

    fn end_attempt(&mut self, lane: LaneId, why: String, now: u64) {
        self.actions.push_back(Action::DropQps(lane));
        self.not_now(lane, why, now);
    }

    /// The rail cannot return now: the peer is told.
    fn not_now(&mut self, lane: LaneId, why: String, now: u64) {
        self.set_down(lane, now);
        let attempt = self.rails[lane.index()].request;
        self.link.say(ControlMessage::NotNow { lane, attempt, why: why.clone() });
        self.log(LogEntry::NotYet(lane, why));
    }

    /// No rail is left for too long, or the peer does not answer for one: the connection has failed.
    fn watch_the_dark(&mut self, now: u64) {
        if self.rails_up().next().is_some() {
            self.dark_since = None;
            let is_late = |since: u64| now.saturating_sub(since) > self.limits.loss;
            let late = self.lanes().zip(&self.rails).find_map(|(lane, rail)| match rail.state {
                State::Fenced { since } if is_late(since) => Some(Cause::NotAcknowledged(lane)),
                State::Fencing { since, .. } if is_late(since) => Some(Cause::NotStopped(lane)),
                _ => None,
            });
            if let Some(cause) = late {
                self.give_up(cause);
            }
            return;
        }
        let waited = now.saturating_sub(*self.dark_since.get_or_insert(now));
        if !self.has_carried() {
            if waited >= self.limits.first_rail {
                self.give_up(Cause::NoFirstRail);
            }
        } else if waited >= self.limits.loss {
            self.give_up(Cause::NoRail(waited));
        }
    }

    fn give_up(&mut self, cause: Cause) {
        if !std::mem::replace(&mut self.has_failed, true) {
            self.actions.push_back(Action::Fail(cause));
            self.stop_attempts();
        }
    }

    /// No rail is brought back any more: what is made for that goes, and a peer that is there is told.
    fn stop_attempts(&mut self) {
        for lane in self.lanes() {
            match self.rails[lane.index()].state {
                State::Requested { .. } | State::Probing { .. } | State::AwaitingLive => {
                    self.end_attempt(lane, "the connection ends".to_owned(), 0);
                }
                _ => {}
            }
        }
    }

    /// True once a rail has carried.
    pub fn has_carried(&self) -> bool {
        self.rails.iter().any(|rail| rail.has_carried)
    }

    /// How long to wait before the next attempt on a rail.
    fn pause(&self, lane: LaneId) -> u64 {
        let rail = &self.rails[lane.index()];
        RETRY
            << match rail.has_carried {
                true => rail.attempts.min(DOUBLED_AT_MOST),
                false if self.has_carried() => rail.attempts.min(DOUBLED_AT_MOST_BEFORE),
                // The caller waits for the first rail. The handshake was the first attempt.
                false => rail.attempts.saturating_sub(1).min(DOUBLED_AT_MOST),
            }
    }

    /// Both sides have stopped a rail, or an attempt has failed.
    fn set_down(&mut self, lane: LaneId, now: u64) {
        self.rails[lane.index()].state = State::Down { retry_at: now + self.pause(lane) };
    }

    fn log(&mut self, entry: LogEntry) {
        self.actions.push_back(Action::Log(entry));
    }

    fn lanes(&self) -> impl Iterator<Item = LaneId> + use<> {
        LaneId::all(self.rails.len())
    }

    fn rail_in(&mut self, lane: LaneId, state: &State) -> Option<&mut Rail> {
        self.rails.get_mut(lane.index()).filter(|rail| rail.state == *state)
    }
}

impl Rail {
    fn count_loss(&mut self, since: u64, now: u64) {
        self.attempts = if now.saturating_sub(since) > STEADY { 0 } else { self.attempts + 1 };
    }
}
