//! Executes recovery's actions, and checks recovery's promises.

use super::super::super::{Action, Cause, Failure, State};
use super::super::advert;
use super::{Lost, RAILS, UNCONNECTED, World};
use crate::wire::control::JoinAnswer;
use crate::wire::fields::{LaneEnd, QpEnd};
use crate::wire::ids::LaneId;

impl<const N: usize> World<N> {
    pub(super) fn act(&mut self, side: usize) -> Result<(), String> {
        while let Some(action) = self.ends[side].poll_action() {
            self.execute(side, action)?;
        }
        Ok(())
    }

    pub(super) fn execute(&mut self, side: usize, action: Action) -> Result<(), String> {
        if self.hangs(side, &action) {
            return Ok(());
        }
        match action {
            Action::Fence(lane) => self.fence(side, lane),
            Action::Resend(lane, received) => self.resend(side, lane, &received)?,
            Action::OpenQps(lane) => self.open_qps(lane)?,
            Action::AnswerQps(lane, _, theirs) => self.answer_qps(lane, &theirs)?,
            Action::ConnectQps(lane, answer) => self.connect_qps(lane, &answer)?,
            Action::Activate(lane) => self.activate(side, lane)?,
            Action::DropQps(lane) => {
                self.new[side][lane.index()] = None;
                self.hung[side][lane.index()] = self.hung[side][lane.index()].take().map(|_| None);
                if side == 1 {
                    self.messages.drop_unseen(Some(lane));
                }
            }
            Action::Fail(failure) => self.fail(side, &failure)?,
            Action::PeerClosed(delivered) => self.peer_closed(side, delivered)?,
            Action::PeerGone => {
                if !self.may_give_up(side) {
                    return Err(format!("side {side} takes the peer for gone"));
                }
                self.closing[side].peer_is_away = true;
                self.end_path(side);
            }
            // The model has no questions about stalls: they change no rail.
            Action::StallQuery(_) | Action::StallReply { .. } => {}
            Action::Changed(_) | Action::Log(_) => {}
        }
        Ok(())
    }

    fn open_qps(&mut self, lane: LaneId) -> Result<(), String> {
        self.make(0, lane, UNCONNECTED)?;
        self.requests[lane.index()] += 1;
        let outcome = match self.is_port_up[lane.index()] && !self.fails(0, lane) {
            true => Ok((advert(), end(self.requests[lane.index()]))),
            false => {
                self.new[0][lane.index()] = None;
                Err(Cause::Failed("port down".to_owned()))
            }
        };
        self.ends[0].opened(lane, outcome, self.now);
        Ok(())
    }

    fn answer_qps(&mut self, lane: LaneId, theirs: &LaneEnd) -> Result<(), String> {
        if self.fails(1, lane) {
            self.ends[1].answered(lane, Err(Cause::Failed("unreachable".to_owned())), self.now);
            return Ok(());
        }
        self.answered[lane.index()] = theirs.qps[0].number;
        let generation = self.next_generation;
        self.next_generation += 1;
        self.make(1, lane, generation)?;
        let answer = JoinAnswer {
            connector_gid: [1; 16],
            acceptor_gid: [2; 16],
            mtu_bytes: 1024,
            end: end(generation),
            epoch: self.answer_with_keys(lane)?,
        };
        self.ends[1].answered(lane, Ok(answer), self.now);
        Ok(())
    }

    fn connect_qps(&mut self, lane: LaneId, answer: &JoinAnswer) -> Result<(), String> {
        if self.new[0][lane.index()] != Some(UNCONNECTED) {
            return Err(format!("rail {lane} has no queue pairs to connect"));
        }
        if self.answered[lane.index()] != self.requests[lane.index()] {
            return Err(format!(
                "rail {lane} is connected to queue pairs for an earlier request"
            ));
        }
        self.messages.learn_epoch(lane, answer.epoch);
        let outcome = if self.fails(0, lane) {
            self.new[0][lane.index()] = None;
            Err(Cause::Failed("unreachable".to_owned()))
        } else {
            self.new[0][lane.index()] = Some(answer.end.qps[0].number);
            Ok(())
        };
        self.ends[0].connected(lane, outcome, self.now);
        Ok(())
    }

    /// Returns true if the action is a step of an attempt, and the thread that executes it begins
    /// to hang (`Event::HangNext`).
    fn hangs(&mut self, side: usize, action: &Action) -> bool {
        let (Action::OpenQps(lane) | Action::AnswerQps(lane, ..) | Action::ConnectQps(lane, _)) =
            action
        else {
            return false;
        };
        let thread = &mut self.hung[side][lane.index()];
        let hangs = thread.is_none() && std::mem::take(&mut self.hangs_next);
        if hangs {
            *thread = Some(Some(action.clone()));
        }
        hangs
    }

    /// Returns true if a step of an attempt fails: after `Event::FailNext`, or while the thread of
    /// an earlier attempt hangs, as in `DeviceCalls::begin`.
    fn fails(&mut self, side: usize, lane: LaneId) -> bool {
        self.hung[side][lane.index()].is_some() || std::mem::take(&mut self.fails_next)
    }

    /// Compares recovery's view of a side's rails with the actual queue pairs.
    pub(super) fn compare(&self, side: usize) -> Result<(), String> {
        // A thread that hangs keeps its queue pairs until it returns.
        let is_kept = |(new, thread): (&Option<u32>, &Option<_>)| new.is_some() && thread.is_none();
        if !self.ends[side].recovers() && self.new[side].iter().zip(&self.hung[side]).any(is_kept) {
            return Err(format!(
                "side {side} no longer recovers rails, and keeps new queue pairs"
            ));
        }
        if self.ends[side].recovers() && self.closing[side].peer_is_away {
            return Err(format!(
                "side {side} recovers rails although its peer has closed"
            ));
        }
        if self.closing[side].path_ended {
            return Ok(());
        }
        for (lane, rail) in LaneId::all(RAILS).zip(&self.ends[side].rails) {
            let is_up = matches!(rail.state, State::Up { .. });
            let is_used = self.used[side][lane.index()].is_some();
            if is_used && !is_up || is_up && !is_used && !self.losses[side][lane.index()] {
                return Err(format!(
                    "rail {lane} of side {side} is in use: {is_used}, counts as up: {is_up}"
                ));
            }
        }
        Ok(())
    }

    /// Ends the use of a rail's queue pairs. They continue until `Event::Stop`.
    pub(super) fn set_aside(&mut self, side: usize, lane: LaneId, is_removed: bool) {
        if let Some(generation) = self.used[side][lane.index()].take() {
            self.lost[side][lane.index()] = Some(Lost {
                generation,
                is_removed,
            });
        }
    }

    /// Ends the use of a rail, and tells recovery once its queue pairs have stopped: until then
    /// `settle` calls this again.
    pub(super) fn fence(&mut self, side: usize, lane: LaneId) {
        self.set_aside(side, lane, false);
        if self.lost[side][lane.index()].is_none() {
            let received = self.messages.received(side);
            self.ends[side].fenced(lane, received, self.now);
        }
    }

    pub(super) fn report(&mut self, side: usize) -> Result<(), String> {
        for (lane, is_lost) in LaneId::all(RAILS).zip(std::mem::take(&mut self.losses[side])) {
            if !is_lost {
                continue;
            }
            if self.used[side][lane.index()].is_some() {
                return Err(format!(
                    "side {side} reports rail {lane} as lost while it carries"
                ));
            }
            self.ends[side].rail_down(lane, "loss", self.now);
        }
        Ok(())
    }

    /// Does the same as `comm::datapath::shared::leave` and `Driver::close`.
    pub(super) fn close(&mut self, side: usize) -> Result<(), String> {
        if self.messages.is_running(side) {
            self.end_path(side);
            self.ends[side].fail();
        }
        self.report(side)?;
        self.act(side)?;
        if !self.ends[side].was_up() {
            self.ends[side].fail();
        }
        self.ends[side].close(self.messages.delivered(side));
        self.closing[side].has_closed = true;
        Ok(())
    }

    fn may_give_up(&self, side: usize) -> bool {
        let there = self.closing[1 - side];
        self.is_late || there.path_ended || there.has_left
    }

    /// Ends the data path because recovery gives up. Checks that the reason is true.
    fn fail(&mut self, side: usize, failure: &Failure) -> Result<(), String> {
        let used = &self.used[side];
        let lost = &self.lost[side];
        let is_true = self.may_give_up(side)
            && !self.closing[side].path_ended
            && match failure {
                Failure::NoFirstRail => *used == [None; RAILS] && !self.was_up[side],
                Failure::NoRail(_) => *used == [None; RAILS] && self.was_up[side],
                Failure::NotAcknowledged(lane) => {
                    used[lane.index()].is_none() && lost[lane.index()].is_none()
                }
                Failure::NotStopped(lane) => lost[lane.index()].is_some(),
                Failure::Protocol(_) => false,
                Failure::AtPeer(_) => self.closing[1 - side].path_ended,
            };
        if !is_true {
            return Err(format!("side {side} gives up: {failure:?}"));
        }
        self.end_path(side);
        // As the driver does: the peer finds out by itself that there is no rail.
        if !matches!(failure, Failure::NoFirstRail | Failure::NoRail(_)) {
            self.ends[side].report_failure("a limit".to_owned());
        }
        Ok(())
    }

    pub(super) fn leave(&mut self, side: usize) {
        self.closing[side].has_left = true;
        (self.used[side], self.new[side]) = Default::default();
        (self.lost[side], self.losses[side], self.hung[side]) = Default::default();
        self.frames[side].clear();
        self.tcp_carries = false;
        self.tcp_is_open[side] = false;
    }

    fn end_path(&mut self, side: usize) {
        self.closing[side].path_ended = true;
        self.used[side] = [None; RAILS];
        // The caller gets the error once the queue pairs have stopped, or after a limit.
        self.lost[side] = self.lost[side].map(|lost| lost.filter(|lost| lost.is_removed));
        if side == 1 {
            self.new[side] = [None; RAILS];
            self.messages.drop_unseen(None);
        }
    }

    fn peer_closed(&mut self, side: usize, delivered: u64) -> Result<(), String> {
        let has = if side == 0 {
            self.messages.first_undelivered()
        } else {
            0
        };
        if !self.closing[1 - side].has_closed || delivered != has {
            return Err(format!(
                "side {side} receives BYE with {delivered} receives delivered"
            ));
        }
        self.closing[side].peer_is_away = true;
        if side == 0 {
            self.messages.bye(delivered)
        } else {
            Ok(())
        }
    }

    fn activate(&mut self, side: usize, lane: LaneId) -> Result<(), String> {
        if self.closing[side].path_ended {
            return Err(format!(
                "side {side} activates rail {lane} after its data path has ended"
            ));
        }
        let Some(generation) = self.new[side][lane.index()].take() else {
            return Err(format!(
                "side {side} activates rail {lane} without queue pairs"
            ));
        };
        if side == 0 && self.probed[lane.index()] != generation {
            return Err(format!(
                "the sender uses new queue pairs of rail {lane} without a test write"
            ));
        }
        if side == 1 && self.activated[lane.index()] != generation {
            return Err(format!(
                "the receiver uses new queue pairs of rail {lane} before the sender does"
            ));
        }
        self.used[side][lane.index()] = Some(generation);
        self.was_up[side] = true;
        // `Status::drop_stale_losses` does the same.
        self.losses[side][lane.index()] = false;
        self.ends[side].activated(lane, Ok(()), self.now);
        if side == 0 {
            self.activated[lane.index()] = generation;
            if !self.is_port_up[lane.index()] {
                self.ends[0].rail_down(lane, "port", self.now);
            }
        }
        match side {
            0 => self.resend_shares(),
            _ => self.repeat_grants().and_then(|()| self.take_in(side, lane)),
        }
    }

    fn make(&mut self, side: usize, lane: LaneId, generation: u32) -> Result<(), String> {
        if self.may_write(side, lane) {
            return Err(format!(
                "side {side} makes queue pairs for rail {lane} before the old ones have stopped"
            ));
        }
        match self.new[side][lane.index()].replace(generation) {
            None => Ok(()),
            Some(_) => Err(format!(
                "side {side} makes queue pairs for rail {lane} beside others"
            )),
        }
    }

    /// Reports the result of the test writes to the sender. They succeed if the receiver has queue
    /// pairs for them (in use or not), the sender's port is up, and the receiver's queue pairs are
    /// connected to the sender's newest request.
    pub(super) fn probe(&mut self, lane: LaneId) {
        let generation = self.new[0][lane.index()];
        let is_there = generation.is_some_and(|generation| self.has_qps(1, lane, generation))
            && self.is_port_up[lane.index()]
            && self.answered[lane.index()] == self.requests[lane.index()];
        if is_there {
            self.probed[lane.index()] = generation.unwrap_or_default();
        }
        self.ends[0].probed(
            lane,
            if is_there {
                Ok(())
            } else {
                Err(Cause::Failed("no answer".to_owned()))
            },
            self.now,
        );
    }

    /// Returns true while a side has queue pairs of this generation, so that writes on them can
    /// land.
    pub(super) fn has_qps(&self, side: usize, lane: LaneId, generation: u32) -> bool {
        let lost = self.lost[side][lane.index()].map(|lost| lost.generation);
        [
            self.used[side][lane.index()],
            self.new[side][lane.index()],
            lost,
        ]
        .contains(&Some(generation))
    }

    /// Returns true while a side's NIC may send on a rail: its queue pairs are in use, or are lost
    /// and have not stopped.
    pub(super) fn may_write(&self, side: usize, lane: LaneId) -> bool {
        self.used[side][lane.index()].is_some() || self.lost[side][lane.index()].is_some()
    }
}

fn end(number: u32) -> LaneEnd {
    LaneEnd {
        qps: vec![QpEnd { number, psn: 1 }],
        mailbox_rkey: 0,
    }
}
