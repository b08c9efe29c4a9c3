//! Deadlines of the two ends, and the hash of a state.

use super::super::super::bootstrap::{ASK_INTERVAL, SIGN_OF_LIFE};
use super::super::super::{
    MAX_DOUBLINGS, MAX_DOUBLINGS_NEVER_UP, Peer, REPEAT_AFTER_NS, Rail, Recovery, STEADY, State,
};
use super::{LIMITS, World};
use crate::wire::ids::LaneId;
use std::hash::{DefaultHasher, Hash, Hasher};

impl<const N: usize> World<N> {
    pub(super) fn next_deadline(&self) -> Option<u64> {
        let sides = (0..2).filter(|side| !self.closing[*side].has_left);
        sides.filter_map(|side| self.deadline(side)).min()
    }

    /// Returns the time of an end's next action. Ignores repeated frames that would not arrive.
    fn deadline(&self, side: usize) -> Option<u64> {
        let end = &self.ends[side];
        let rails = end
            .rails
            .iter()
            .filter(|_| end.may_start_attempts())
            .filter_map(Rail::timeout);
        let repeat = end.repeat_timeout().filter(|_| self.repeats_arrive(side));
        rails.chain(repeat).min().map(|at| at.max(self.now))
    }

    pub(super) fn rail_deadline(&self, lane: LaneId) -> Option<u64> {
        self.ends[0].rails[lane.index()]
            .timeout()
            .filter(|_| !self.closing[0].has_left)
    }

    /// Returns the time at which a side gives up if nothing changes.
    pub(super) fn limit(&self, side: usize) -> Option<u64> {
        self.ends[side]
            .limit()
            .filter(|_| !self.closing[side].has_left)
    }

    /// Returns a hash of the state, in which all times are relative to `now`.
    pub fn key(&self) -> u128 {
        let key = |salt: u8| {
            let mut hasher = DefaultHasher::new();
            salt.hash(&mut hasher);
            self.ends
                .iter()
                .for_each(|end| hash_end(end, self.now, &mut hasher));
            (
                self.budget,
                self.requests,
                self.answered,
                self.probed,
                self.fails_next,
            )
                .hash(&mut hasher);
            self.frames.hash(&mut hasher);
            (
                self.used,
                self.lost,
                self.losses,
                self.new,
                self.activated,
                self.next_generation,
            )
                .hash(&mut hasher);
            self.messages.hash_state(&mut hasher);
            (self.is_port_up, self.tcp_carries, self.tcp_is_open).hash(&mut hasher);
            (self.was_up, self.is_late, self.closing).hash(&mut hasher);
            let text = |thread: &Option<Option<_>>| {
                thread
                    .as_ref()
                    .map(|step| step.as_ref().map(|it| format!("{it:?}")))
            };
            (
                self.hangs_next,
                self.hung.each_ref().map(|side| side.each_ref().map(text)),
            )
                .hash(&mut hasher);
            u128::from(hasher.finish())
        };
        key(1) << 64 | key(2)
    }
}

/// Hashes an end, with its times relative to `now`.
fn hash_end(end: &Recovery, now: u64, hasher: &mut impl Hasher) {
    let age = |at: u64, most: u64| now.saturating_sub(at).min(most);
    for rail in &end.rails {
        let doubled = if rail.was_up {
            MAX_DOUBLINGS
        } else {
            MAX_DOUBLINGS_NEVER_UP
        };
        (rail.was_up, rail.setbacks.min(doubled + 1)).hash(hasher);
        std::mem::discriminant(&rail.state).hash(hasher);
        match rail.state {
            State::Up { since } => age(since, STEADY + 1).hash(hasher),
            State::Fencing {
                since,
                ref peer_received,
                ..
            } => (age(since, LIMITS.loss), peer_received).hash(hasher),
            State::Fenced { since } => age(since, LIMITS.loss).hash(hasher),
            _ => rail.timeout().map(|at| at.saturating_sub(now)).hash(hasher),
        }
    }
    end.link.hash(hasher);
    end.link
        .is_waiting()
        .then(|| age(end.sent_at, REPEAT_AFTER_NS))
        .hash(hasher);
    end.no_rail_since
        .map(|since| age(since, LIMITS.first_rail))
        .hash(hasher);
    (end.has_failed, end.failed_message).hash(hasher);
    std::mem::discriminant(&end.peer).hash(hasher);
    if let Peer::Suspected { since, question } = end.peer {
        (age(since, SIGN_OF_LIFE + 1), question).hash(hasher);
    }
    end.asked_at.map(|at| age(at, ASK_INTERVAL)).hash(hasher);
    assert!(end.actions.is_empty(), "the actions are executed");
}
