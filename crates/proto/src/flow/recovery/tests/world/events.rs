//! Events that are possible in a state.

use super::super::super::{Peer, State};
use super::messages::GrantWrite;
use super::{Event, RAILS, World, lanes};
use crate::flow::redial::Need;
use crate::wire::ids::LaneId;

impl<const N: usize> World<N> {
    pub fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        self.message_events(&mut events);
        for side in 0..2 {
            events.extend(
                (!self.frames[side].is_empty()).then_some(Event::ReceiveFrame { side, at: 0 }),
            );
            events.extend(
                self.losses[side]
                    .contains(&true)
                    .then_some(Event::Report { side }),
            );
            for lane in lanes().filter(|lane| self.may_stop(side, *lane)) {
                events.push(Event::Stop { side, lane });
            }
            for lane in lanes().filter(|lane| self.may_return(side, *lane)) {
                events.push(Event::Return { side, lane });
            }
        }
        for lane in lanes() {
            let is_probing = matches!(
                self.ends[0].rails[lane.index()].state,
                State::Probing { .. }
            );
            events.extend((is_probing && !self.closing[0].has_left).then_some(Event::Probe(lane)));
            events.extend((!self.is_port_up[lane.index()]).then_some(Event::PortUp(lane)));
        }
        self.closing_events(&mut events);
        let is_calm = events.is_empty();
        self.mishaps(&mut events);
        if is_calm && self.next_deadline().is_some() {
            events.push(Event::Tick);
        }
        events
    }

    fn message_events(&self, events: &mut Vec<Event>) {
        let is_open = |side: usize| {
            let end = self.closing[side];
            !end.has_closed && !end.peer_is_away && !end.path_ended
        };
        if is_open(1) && self.messages.may_grant() {
            events.extend(
                lanes()
                    .filter(|lane| self.used[1][lane.index()].is_some())
                    .map(Event::Grant),
            );
        }
        for (at, grant) in self.messages.grants.iter().enumerate() {
            // Writes on one queue pair land in the order of their posts.
            let is_next = |before: &GrantWrite| {
                (before.lane, before.generation) != (grant.lane, grant.generation)
            };
            if self.messages.grants[..at].iter().all(is_next)
                && self.has_qps(0, grant.lane, grant.generation)
            {
                events.push(Event::LandGrant(at));
            }
        }
        let open = self.open_lanes(0);
        if is_open(0) && open != 0 {
            let usable = self.messages.lanes_to_send(open);
            events.extend(
                lanes()
                    .filter(|lane| usable & lane.bit() != 0)
                    .map(Event::Post),
            );
            let may_cut = self.budget.cuts > 0 && usable.count_ones() as usize == RAILS;
            events.extend(may_cut.then_some(Event::PostCut));
        }
        for (at, write) in self.messages.shares.iter().enumerate() {
            if !write.has_landed && self.has_qps(1, write.lane, write.generation) {
                events.push(Event::Land(at));
            }
            if write.has_landed && self.used[0][write.lane.index()] == Some(write.generation) {
                events.push(Event::Confirm(at));
            }
        }
    }

    fn closing_events(&self, events: &mut Vec<Event>) {
        for side in (0..2).filter(|side| !self.closing[*side].has_left) {
            let here = self.closing[side];
            let there = self.closing[1 - side];
            let must_close = (here.peer_is_away || here.path_ended) && !here.has_closed;
            events.extend(must_close.then_some(Event::Close { side }));
            // If the peer has left, a side detects that TCP is broken only after it has read all of
            // the peer's frames.
            let has_read = self.frames[side].is_empty() || !there.has_left;
            if !self.tcp_carries && self.tcp_is_open[side] && has_read {
                events.extend([true, false].map(|is_closed| Event::FindTcp { side, is_closed }));
            }
            let is_alone = self.is_alone(side);
            if is_alone && (there.path_ended || there.has_left) && !here.peer_is_away {
                let used = lanes().filter(|lane| self.used[side][lane.index()].is_some());
                events.extend(used.map(|lane| Event::Lose { side, lane }));
                events.extend(self.limit(side).map(|_| Event::Limit { side }));
            }
            // The same as `Watched::is_over` in `comm::recovery::service`, except that without a
            // BYE the service waits for a limited time.
            let is_silent =
                !self.ends[side].is_waiting() || there.has_left || !self.tcp_is_open[side];
            let says_nothing = is_alone || self.ends[side].peer == Peer::Gone;
            let is_over = here.peer_is_away && is_silent || says_nothing;
            events.extend((here.has_closed && is_over).then_some(Event::Leave { side }));
        }
        events.extend(self.may_dial().then_some(Event::Dial));
    }

    /// Returns true if lost queue pairs may stop now. A removed device stops by itself. Otherwise
    /// the driver has them stopped once it has read the loss.
    fn may_stop(&self, side: usize, lane: LaneId) -> bool {
        let is_fencing = matches!(
            self.ends[side].rails[lane.index()].state,
            State::Fencing { .. }
        );
        self.lost[side][lane.index()].is_some_and(|lost| lost.is_removed || is_fencing)
    }

    fn may_return(&self, side: usize, lane: LaneId) -> bool {
        match &self.hung[side][lane.index()] {
            None => false,
            Some(step) => step.is_none() || !self.ends[side].recovers(),
        }
    }

    fn may_dial(&self) -> bool {
        let is_needed = self.ends[0].bootstrap_need(false, self.now) != Need::No;
        let is_taken = !self.closing[1].has_left && self.ends[1].peer != Peer::Gone;
        !self.tcp_is_open[0] && !self.closing[0].has_left && is_needed && is_taken
    }

    /// Returns true if a side has detected that TCP is broken, and the sender will not dial.
    fn is_alone(&self, side: usize) -> bool {
        !self.tcp_carries && !self.tcp_is_open[side] && !self.tcp_is_open[0] && !self.may_dial()
    }

    fn mishaps(&self, events: &mut Vec<Event>) {
        for side in 0..2 {
            if self.budget.overtakes > 0 && self.frames[side].len() > 1 {
                events.push(Event::ReceiveFrame { side, at: 1 });
            }
            if self.budget.frames > 0 && !self.frames[side].is_empty() {
                events.push(Event::DropFrame { side });
            }
            let may_close = self.budget.closes > 0
                && !self.closing[side].has_closed
                && !self.closing[side].peer_is_away;
            events.extend(may_close.then_some(Event::Close { side }));
            let may_be_late = self.budget.limits > 0 && self.limit(side).is_some();
            events.extend(may_be_late.then_some(Event::Limit { side }));
            // After the peer has closed, failed writes lose no rail.
            let may_lose = |lane: &LaneId| {
                self.used[side][lane.index()].is_some() && !self.closing[side].peer_is_away
            };
            for lane in lanes().filter(may_lose) {
                events.extend((self.budget.losses > 0).then_some(Event::Lose { side, lane }));
                events.extend((self.budget.removals > 0).then_some(Event::Remove { side, lane }));
            }
        }
        let may_restart = self.budget.restarts > 0 && !self.closing[0].has_left;
        for lane in lanes().filter(|lane| may_restart && self.is_port_up[lane.index()]) {
            events.push(Event::PortDown(lane));
        }
        if self.budget.failures > 0 && !self.fails_next {
            events.push(Event::FailNext);
        }
        if self.budget.hangs > 0 && !self.hangs_next {
            events.push(Event::HangNext);
        }
        // A deadline beyond a limit does not pass early, because limits have their own budget.
        let limit = (0..2)
            .filter_map(|side| self.limit(side))
            .min()
            .unwrap_or(u64::MAX);
        let may_pass = |at: Option<u64>| self.budget.early > 0 && at.is_some_and(|at| at < limit);
        for lane in lanes().filter(|lane| may_pass(self.rail_deadline(*lane))) {
            events.push(Event::Expire(lane));
        }
        let hangs = (0..2).any(|side| lanes().any(|lane| self.may_return(side, lane)));
        let waits = !self.tcp_carries || hangs || self.lost != [[None; RAILS]; 2];
        events.extend((waits && may_pass(self.next_deadline())).then_some(Event::Wait));
        events.extend((self.budget.tcp > 0 && self.tcp_carries).then_some(Event::BreakTcp));
    }

    /// Returns true if a frame that a side repeats reaches the peer.
    pub(super) fn repeats_arrive(&self, side: usize) -> bool {
        self.rail_carries(side) || self.is_lossy && self.tcp_carries
    }

    /// Returns true if a side can write into the peer's mailbox over a rail.
    pub(super) fn rail_carries(&self, side: usize) -> bool {
        let there = [self.used[1 - side], self.new[1 - side]];
        let is_there = |lane: LaneId| {
            there
                .iter()
                .any(|at| at[lane.index()] == self.used[side][lane.index()])
        };
        lanes().any(|lane| self.used[side][lane.index()].is_some() && is_there(lane))
    }
}
