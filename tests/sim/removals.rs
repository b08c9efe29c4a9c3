//! Functions that fail, leave the bus and return while a run goes on, and what the two hosts notice of it.

use super::Dice;
use super::fabric::{Fabric, RAILS};
use nccl_net_spark::comm::Rail;
use nccl_net_spark::comm::rail::device::Presence;
use nccl_net_spark::comm::recovery::driver::PortChange;
use softverbs::hotplug::Phase;
use std::sync::Arc;
use std::time::Instant;

/// The functions of a run.
pub struct Removals {
    left: u64,
    /// Whether any was lost.
    is_used: bool,
    /// What is to come: when, of which rail.
    plan: Vec<(u64, usize, Step)>,
    /// By side and rail: which of the functions of its name was opened last.
    opened: [[u32; RAILS]; 2],
    /// By side and rail: whether the event by which a function said that it has failed was not read yet.
    unread: [[bool; RAILS]; 2],
    /// How seldom each side looks.
    seldom: [u64; 2],
}

enum Step {
    To(Phase),
    /// In sysfs.
    Show(bool),
    /// The port, which was down when programs were cut off, comes up: what was on its way lands now.
    PortUp,
}

impl Step {
    fn take(&self, fabric: &Fabric, rail: usize) {
        match self {
            Self::To(phase) => fabric.move_to(rail, *phase),
            Self::Show(is_there) => fabric.show(rail, *is_there),
            Self::PortUp => fabric.set(rail, true),
        }
    }
}

impl Removals {
    /// So many are to come. All functions are on the bus.
    pub fn new(left: u64, fabric: &Fabric, dice: &mut Dice) -> Self {
        let opened = std::array::from_fn(|rail| fabric.presence(rail).generation);
        let seldom = [0, 1].map(|_| if dice.one_in(2) { 4 } else { 64 });
        Self { left, is_used: false, plan: Vec::new(), opened: [opened; 2], unread: Default::default(), seldom }
    }

    /// Does what is due, and now and then lets a rail's function fail or cuts it off; whether it did.
    pub fn go_on(&mut self, fabric: &Fabric, dice: &mut Dice, rail: usize) -> bool {
        let now_ns = fabric.now_ns();
        self.plan.sort_by_key(|(due_ns, ..)| *due_ns);
        for (_, rail, step) in self.plan.extract_if(.., |(due_ns, ..)| *due_ns <= now_ns) {
            step.take(fabric, rail);
        }
        let is_to_go = self.left > 0 && dice.one_in(32) && fabric.presence(rail).phase == Phase::Here;
        if is_to_go {
            (self.left, self.is_used) = (self.left - 1, true);
            let has_failed = dice.one_in(2);
            self.unread.iter_mut().for_each(|unread| unread[rail] = has_failed);
            fabric.move_to(rail, if has_failed { Phase::Failed } else { Phase::Cut });
            let cut_ns = if has_failed { now_ns + dice.below(5_000_000) } else { now_ns };
            let most_ns = if dice.one_in(2) { 2_000_000 } else { 20_000_000 };
            let gone_ns = cut_ns + dice.below(most_ns);
            let keyless_ns = cut_ns + dice.below(gone_ns - cut_ns + 1);
            let hidden_ns = gone_ns + dice.below(1_000_000);
            let most_ns = if dice.one_in(2) { 1_000_000 } else { 100_000_000 };
            let back_ns = hidden_ns + 1 + dice.below(most_ns);
            if dice.one_in(2) {
                fabric.set(rail, false);
                self.plan.push((now_ns + dice.below(gone_ns - now_ns + 1), rail, Step::PortUp));
            }
            let steps = [
                (cut_ns, Step::To(Phase::Cut)),
                (keyless_ns, Step::To(Phase::Keyless)),
                (gone_ns, Step::To(Phase::Gone)),
                (hidden_ns, Step::Show(false)),
                (back_ns, Step::Show(true)),
                (back_ns, Step::To(Phase::Here)),
            ];
            self.plan.extend(steps.map(|(due_ns, step)| (due_ns, rail, step)));
        }
        is_to_go
    }

    /// All are on the bus again, and no more go.
    pub fn end(&mut self, fabric: &Fabric) {
        self.left = 0;
        self.plan.sort_by_key(|(due_ns, ..)| *due_ns);
        for (_, rail, step) in self.plan.drain(..) {
            step.take(fabric, rail);
        }
    }

    /// Whether both sides have opened the functions that are there now.
    pub fn are_over(&self, fabric: &Fabric) -> bool {
        (0..RAILS).all(|at| self.opened.iter().all(|opened| opened[at] == fabric.presence(at).generation))
    }

    /// What a side's service thread would notice, sooner or later.
    pub fn notice(
        &mut self,
        fabric: &Fabric,
        dice: &mut Dice,
        side: usize,
        now: Instant,
    ) -> Vec<(Arc<Rail>, PortChange)> {
        let (process, mut changes) = (fabric.hosts[side].process(), Vec::new());
        if !self.is_used || !dice.one_in(self.seldom[side]) {
            return changes;
        }
        for (at, rail) in process.rails.iter().enumerate() {
            let was_there = rail.device.presence() == Presence::Here;
            // Of the function's failure, of which both are told, and which may be read late.
            if self.unread[side][at] && dice.one_in(2) {
                self.unread[side][at] = false;
                rail.device.fatal();
            }
            if rail.device.look(rail.info.port) == Presence::Here {
                continue;
            }
            // The kernel's event. (What counts is the entry in sysfs.)
            let there = fabric.presence(at);
            let is_gone = there.phase == Phase::Gone || there.generation != self.opened[side][at];
            if is_gone && dice.one_in(2) {
                rail.device.fatal();
                rail.device.look(rail.info.port);
            }
            if was_there {
                changes.push((Arc::clone(rail), PortChange::Removed));
            }
        }
        for rail in process.look_for_returned(now) {
            self.opened[side][rail.id.index()] = fabric.presence(rail.id.index()).generation;
            changes.push((rail, PortChange::Up));
        }
        changes
    }
}
