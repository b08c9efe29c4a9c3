//! PCI functions that fail, leave the bus and return during a run, or hang in a call.

use super::fabric::{Fabric, RAILS};
use super::{Dice, threads};
use nccl_net_spark::comm::Rail;
use proto::device::{Event, PortChange, Presence};
use proto::time::Instant;
use softverbs::hotplug::Phase;
use std::sync::Arc;

pub struct Removals {
    left: u64,
    is_used: bool,
    /// Future steps, each with its time in nanoseconds and its rail.
    plan: Vec<(u64, usize, Step)>,
    /// By side and rail: generation of the function that the side has opened.
    opened: [[u32; RAILS]; 2],
    /// By side and rail: true while the event of a failed function has not been read.
    unread: [[bool; RAILS]; 2],
    /// By side: the number of rounds, on average, from one look for changes to the next. The rounds
    /// with a look are random.
    check_interval: [u64; 2],
    hangs: Hangs,
}

/// Calls that hang while they make, connect or stop queue pairs.
struct Hangs {
    /// Separate dice. Hangs were added to the simulation later, and must not change what other dice
    /// draw for a seed.
    dice: Dice,
    left: u64,
    /// Time at which the calls that hang return.
    until_ns: u64,
    /// Dice for calls that hang while they stop queue pairs, also separate.
    fence_dice: Dice,
    fences_left: u64,
    fences_until_ns: u64,
}

impl Hangs {
    /// Draws the hangs of a run: none in most runs, because each may take many steps.
    fn new(seed: u64) -> Self {
        threads::hang_no_more();
        threads::let_return();
        let mut dice = Dice::new(seed ^ 0xca11);
        let left = if dice.one_in(24) {
            1 + dice.below(2)
        } else {
            0
        };
        let mut fence_dice = Dice::new(seed ^ 0xfe9ce);
        let fences_left = if fence_dice.one_in(3) {
            1 + fence_dice.below(4)
        } else {
            0
        };
        Self {
            dice,
            left,
            until_ns: 0,
            fence_dice,
            fences_left,
            fences_until_ns: 0,
        }
    }

    fn step(&mut self, now_ns: u64) {
        if self.left > 0 && self.dice.one_in(16) {
            self.left -= 1;
            threads::hang_after(self.dice.below(4) as usize);
            // Recovery gives an attempt up if one of its steps takes 10 s. The call returns before
            // or after that.
            self.until_ns = now_ns + [1_000_000_000, 15_000_000_000][self.dice.below(2) as usize];
        }
        if now_ns >= self.until_ns {
            threads::let_connects_return();
        }
        if self.fences_left > 0 && self.fence_dice.one_in(16) {
            self.fences_left -= 1;
            threads::hang_fence_after(self.fence_dice.below(3) as usize);
            // Shorter than the time in which the queue pairs of a failed connection must stop.
            self.fences_until_ns =
                now_ns + [1_000_000, 30_000_000, 1_000_000_000][self.fence_dice.below(3) as usize];
        }
        if now_ns >= self.fences_until_ns {
            threads::let_fences_return();
        }
    }
}

enum Step {
    To(Phase),
    Show(bool),
    /// The port comes up. It went down when the function failed or was cut off. Delayed packets
    /// arrive now.
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
    /// Begins a run with up to `left` removals, possibly several of one function. The caller must
    /// have put all functions on the bus ([`Fabric::plug_all`]).
    pub fn new(left: u64, seed: u64, fabric: &Fabric, dice: &mut Dice) -> Self {
        let opened = std::array::from_fn(|rail| fabric.presence(rail).generation);
        let check_interval = [0, 1].map(|_| if dice.one_in(2) { 4 } else { 64 });
        Self {
            left,
            is_used: false,
            plan: Vec::new(),
            opened: [opened; 2],
            unread: Default::default(),
            check_interval,
            hangs: Hangs::new(seed),
        }
    }

    /// Executes the steps that are due. Sometimes also makes the rail's function fail, or cuts it
    /// off, and then returns true.
    pub fn step(&mut self, fabric: &Fabric, dice: &mut Dice, rail: usize) -> bool {
        let now_ns = fabric.now_ns();
        self.hangs.step(now_ns);
        self.plan.sort_by_key(|(due_ns, ..)| *due_ns);
        for (_, rail, step) in self.plan.extract_if(.., |(due_ns, ..)| *due_ns <= now_ns) {
            step.take(fabric, rail);
        }
        let is_to_go =
            self.left > 0 && dice.one_in(32) && fabric.presence(rail).phase == Phase::Here;
        if is_to_go {
            self.left -= 1;
            self.is_used = true;
            let has_failed = dice.one_in(2);
            self.unread
                .iter_mut()
                .for_each(|unread| unread[rail] = has_failed);
            fabric.move_to(
                rail,
                if has_failed {
                    Phase::Failed
                } else {
                    Phase::Cut
                },
            );
            let cut_ns = if has_failed {
                now_ns + dice.below(5_000_000)
            } else {
                now_ns
            };
            let limit_ns = if dice.one_in(2) {
                2_000_000
            } else {
                20_000_000
            };
            let gone_ns = cut_ns + dice.below(limit_ns);
            let keyless_ns = cut_ns + dice.below(gone_ns - cut_ns + 1);
            let hidden_ns = gone_ns + dice.below(1_000_000);
            let limit_ns = if dice.one_in(2) {
                1_000_000
            } else {
                100_000_000
            };
            let back_ns = hidden_ns + 1 + dice.below(limit_ns);
            if dice.one_in(2) {
                fabric.set(rail, false);
                self.plan.push((
                    now_ns + dice.below(gone_ns - now_ns + 1),
                    rail,
                    Step::PortUp,
                ));
            }
            let steps = [
                (cut_ns, Step::To(Phase::Cut)),
                (keyless_ns, Step::To(Phase::Keyless)),
                (gone_ns, Step::To(Phase::Gone)),
                (hidden_ns, Step::Show(false)),
                (back_ns, Step::Show(true)),
                (back_ns, Step::To(Phase::Here)),
            ];
            self.plan
                .extend(steps.map(|(due_ns, step)| (due_ns, rail, step)));
        }
        is_to_go
    }

    /// Puts every function back on the bus permanently. Hanging calls return at their planned time.
    pub fn end(&mut self, fabric: &Fabric) {
        self.left = 0;
        self.hangs.left = 0;
        self.hangs.fences_left = 0;
        threads::hang_no_more();
        self.plan.sort_by_key(|(due_ns, ..)| *due_ns);
        for (_, rail, step) in self.plan.drain(..) {
            step.take(fabric, rail);
        }
    }

    /// True if both sides have opened every function anew since its last removal.
    pub fn all_reopened(&self, fabric: &Fabric) -> bool {
        (0..RAILS).all(|at| {
            self.opened
                .iter()
                .all(|opened| opened[at] == fabric.presence(at).generation)
        })
    }

    /// Returns the changes that a side's service thread notices this time.
    pub fn notice(
        &mut self,
        fabric: &Fabric,
        dice: &mut Dice,
        side: usize,
        now: Instant,
    ) -> Vec<(Arc<Rail>, PortChange)> {
        let process = fabric.hosts[side].process();
        let mut changes = Vec::new();
        if !self.is_used || !dice.one_in(self.check_interval[side]) {
            return changes;
        }
        for (at, rail) in process.rails.iter().enumerate() {
            let was_there = rail.device.presence() == Presence::Here;
            // The event of the function's failure. Both sides get it, possibly late.
            if self.unread[side][at] && dice.one_in(2) {
                self.unread[side][at] = false;
                rail.device.event(Event::DeviceFatal);
            }
            if rail.device.query_presence(rail.info.port) == Presence::Here {
                continue;
            }
            // The kernel's event of the removal. (The plugin decides by the entry in sysfs.)
            let there = fabric.presence(at);
            let is_gone = there.phase == Phase::Gone || there.generation != self.opened[side][at];
            if is_gone && dice.one_in(2) {
                rail.device.event(Event::DeviceFatal);
                rail.device.query_presence(rail.info.port);
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
