//! The part of recovery that depends on the time: when attempts start, when frames are repeated,
//! and what happens when a limit passes.

use super::bootstrap::SIGN_OF_LIFE;
use super::{
    Action, CROWDED, Cause, Failure, MAX_DOUBLINGS, MAX_DOUBLINGS_NEVER_UP, Peer, REPEAT_AFTER_NS,
    RETRY_PAUSE_NS, Rail, Recovery, Role, STEP, State,
};
use crate::wire::ids::LaneId;

impl Recovery {
    /// Reports the time. Starts attempts that are due, and enforces the limits.
    pub fn tick(&mut self, now: u64) {
        self.look_for_a_sign_of_life(now);
        if !self.recovers() {
            return;
        }
        if self.role == Role::Sender {
            self.lanes().for_each(|lane| self.bring_back(lane, now));
        }
        self.enforce_limits(now);
    }

    /// Returns the time at which [`Recovery::tick`] or [`Recovery::poll_frame`] next has work.
    pub fn poll_timeout(&self) -> Option<u64> {
        let attempts = self
            .rails
            .iter()
            .filter(|_| self.may_start_attempts())
            .filter_map(Rail::timeout);
        attempts
            .chain(self.repeat_timeout())
            .chain(self.limit())
            .min()
    }

    /// Returns true if this side may start attempts now.
    pub(super) fn may_start_attempts(&self) -> bool {
        self.role == Role::Sender && self.recovers() && self.link.backlog() < CROWDED
    }

    pub(super) fn repeat_timeout(&self) -> Option<u64> {
        (self.peer != Peer::Gone && self.link.is_waiting())
            .then_some(self.sent_at + REPEAT_AFTER_NS)
    }

    /// Returns the time at which this side gives up if nothing changes.
    pub(super) fn limit(&self) -> Option<u64> {
        let of_rail = |rail: &Rail| match rail.state {
            State::Fencing { since, .. } | State::Fenced { since } => {
                Some(since + self.limits.loss + 1)
            }
            _ => None,
        };
        let limit = match self.rails_up().next() {
            Some(_) => self.rails.iter().filter_map(of_rail).min(),
            None if self.was_up() => self.no_rail_since.map(|since| since + self.limits.loss),
            None => self
                .no_rail_since
                .map(|since| since + self.limits.first_rail),
        };
        let sign_of_life = match self.peer {
            Peer::Suspected { since, .. } => Some(since + SIGN_OF_LIFE + 1),
            _ => None,
        };
        limit
            .filter(|_| self.recovers())
            .into_iter()
            .chain(sign_of_life)
            .min()
    }

    /// Starts an attempt of the connecting side, or ends an attempt that takes too long.
    fn bring_back(&mut self, lane: LaneId, now: u64) {
        match self.rails[lane.index()].state {
            State::Down { retry_at } if now >= retry_at && self.link.backlog() < CROWDED => {
                self.transition(lane, State::Opening { until: now + STEP }, Cause::Due, now);
                self.actions.push_back(Action::OpenQps(lane));
            }
            State::Opening { until } if now >= until => {
                self.actions.push_back(Action::DropQps(lane));
                self.set_down(lane, Cause::NoReturn, now);
            }
            State::Connecting { until } if now >= until => {
                self.end_attempt(lane, Cause::NoReturn, now)
            }
            State::Requested { until } if now >= until => {
                self.end_attempt(lane, Cause::NoAnswer, now)
            }
            State::Probing { until } if now >= until => {
                self.end_attempt(lane, Cause::NotConfirmed, now)
            }
            _ => {}
        }
    }

    /// Fails the connection if it has no rail for too long, or if a fence of either side takes too
    /// long.
    fn enforce_limits(&mut self, now: u64) {
        if self.rails_up().next().is_some() {
            self.no_rail_since = None;
            let is_late = |since: u64| now.saturating_sub(since) > self.limits.loss;
            let late = self
                .lanes()
                .zip(&self.rails)
                .find_map(|(lane, rail)| match rail.state {
                    State::Fenced { since } if is_late(since) => {
                        Some(Failure::NotAcknowledged(lane))
                    }
                    State::Fencing { since, .. } if is_late(since) => {
                        Some(Failure::NotStopped(lane))
                    }
                    _ => None,
                });
            if let Some(failure) = late {
                self.give_up(failure);
            }
            return;
        }
        let waited = now.saturating_sub(*self.no_rail_since.get_or_insert(now));
        if !self.was_up() {
            if waited >= self.limits.first_rail {
                self.give_up(Failure::NoFirstRail);
            }
        } else if waited >= self.limits.loss {
            self.give_up(Failure::NoRail(waited));
        }
    }

    /// Returns the pause before the next attempt on a rail, in nanoseconds.
    pub fn pause(&self, lane: LaneId) -> u64 {
        let rail = &self.rails[lane.index()];
        RETRY_PAUSE_NS
            << match rail.was_up {
                true => rail.setbacks.min(MAX_DOUBLINGS),
                false if self.was_up() => rail.setbacks.min(MAX_DOUBLINGS_NEVER_UP),
                // The application waits for the first rail, so the handshake, which counts as an
                // attempt, does not double the pause.
                false => rail.setbacks.saturating_sub(1).min(MAX_DOUBLINGS),
            }
    }
}

impl Rail {
    /// Returns true while the rail is being fenced or reconnected.
    pub(super) fn is_changing(&self) -> bool {
        !matches!(self.state, State::Up { .. } | State::Down { .. })
    }

    /// Returns the time at which the rail's current wait ends. Only the connecting side acts on it.
    pub(super) fn timeout(&self) -> Option<u64> {
        match self.state {
            State::Down { retry_at: at }
            | State::Opening { until: at }
            | State::Requested { until: at }
            | State::Connecting { until: at }
            | State::Probing { until: at } => Some(at),
            _ => None,
        }
    }
}
