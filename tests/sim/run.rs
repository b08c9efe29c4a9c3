//! One run of the simulation. Dice, which are seeded random numbers, draw its events.

mod ending;

use super::fabric::{Fabric, Pair, RAILS, Start};
use super::model::Model;
use super::removals::Removals;
use super::tcp::Tcp;
use super::{Dice, busy};
use nccl_net_spark::comm::RecvPart;
use nccl_net_spark::comm::datapath::peer::PeerState;
use nccl_net_spark::comm::datapath::shared::SharedPath;
use proto::device::PortChange;
use proto::time::Instant;

/// Virtual time after which a wait counts as a hang.
const PATIENCE_NS: u64 = 60_000_000_000;

/// Time for which a rail is kept up after TCP was closed. A side may notice the close up to a
/// second later, and from then on needs an answer within two seconds.
const HELD_NS: u64 = 3_500_000_000;

pub struct Run<'f> {
    fabric: &'f mut Fabric,
    seed: u64,
    dice: Dice,
    rails: usize,
    pair: Pair,
    model: Model,
    /// Total number of receives (groups of one or more parts) to be granted.
    goal: usize,
    /// The bootstrap's TCP. If it breaks permanently, rail 0 stays up.
    tcp: Tcp,
    /// Port events: time, side, rail, and true for up.
    events: Vec<(u64, usize, usize, bool)>,
    pulls_left: u64,
    /// Number of refusals that may still be injected. A connection tolerates all of them during one
    /// message.
    refusals_left: u64,
    failures_left: u64,
    ending: Ending,
    silences_left: u64,
    /// Dice for events that were added to the simulation later. They leave the draws of `dice` as
    /// they were, so a seed that found a bug earlier still gives the same run.
    later_dice: Dice,
    removals: Removals,
    /// A rail that must stay up, and the time in nanoseconds until which it must. Without such a
    /// rail the run would fail: after TCP was closed, a peer that no rail reaches is considered
    /// dead after two seconds.
    held: Option<(usize, u64)>,
    tally: Tally,
}

enum Ending {
    /// All messages arrive.
    Whole,
    /// After `after` groups, one side's connection fails, or is closed in the middle of a message.
    BrokenOff { after: usize },
    /// Ends like `BrokenOff`, but not before a rail is under test.
    BrokenOffOnTrial { after: usize },
    /// The receiver's data path fails when the sender uses a rail that the receiver still tests.
    BrokenOffInUse { after: usize },
}

#[derive(Default)]
pub struct Tally {
    pub losses: u64,
    pub messages: u64,
}

impl Ending {
    /// Draws the ending of a run with `goal` groups.
    fn draw(goal: usize, dice: &mut Dice) -> Self {
        let after = 1 + dice.below(goal as u64) as usize;
        match dice.below(12) {
            0 => Self::BrokenOff { after },
            1..=2 => Self::BrokenOffOnTrial { after },
            3 => Self::BrokenOffInUse { after },
            _ => Self::Whole,
        }
    }

    /// Draws how many functions are lost. Only runs that complete lose any: a side that closes
    /// while a function is cut off cannot know whether its NIC is idle.
    fn draw_removals(&self, dice: &mut Dice) -> u64 {
        if matches!(self, Self::Whole) && dice.one_in(3) {
            dice.below(6)
        } else {
            0
        }
    }
}

impl<'f> Run<'f> {
    /// Draws a run. The order of the draws must stay: otherwise a seed that found a bug gives
    /// another run.
    pub fn new(fabric: &'f mut Fabric, seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        reset(fabric);
        busy::begin(seed);
        let rails = 1 + dice.below(RAILS as u64) as usize;
        let queue_count = 1 + dice.below(2) as usize;
        let breaks_ns =
            (rails > 1 && dice.one_in(3)).then(|| fabric.now_ns() + dice.below(2_000_000));
        let tcp = Tcp::new(breaks_ns, fabric.now_ns(), seed);
        let not_yet = draw_missing_lanes(seed, rails, &tcp);
        let start = Start {
            not_yet,
            ..Start::default()
        };
        let pair = fabric.connect_as(rails, queue_count, start);
        fabric.give_path_faults(not_yet, &mut Dice::new(seed ^ 0xfa17));
        let goal = 4 + dice.below(60) as usize;
        let pulls_left = dice.below(8);
        let refusals_left = dice.below(5);
        let failures_left = dice.below(5);
        let silences_left = dice.below(3);
        // Separate dice, so that this draw does not change the others.
        let mut later_dice = Dice::new(!seed);
        let ending = Ending::draw(goal, &mut later_dice);
        let removal_count = ending.draw_removals(&mut later_dice);
        let removals = Removals::new(removal_count, seed, fabric, &mut later_dice);
        Self {
            fabric,
            seed,
            dice,
            rails,
            pair,
            model: Model::default(),
            goal,
            tcp,
            events: Vec::new(),
            pulls_left,
            refusals_left,
            failures_left,
            ending,
            silences_left,
            later_dice,
            removals,
            held: None,
            tally: Tally::default(),
        }
    }

    pub fn play(mut self) -> Tally {
        let before = self.fabric.queue_pairs() + self.pair.missing_queue_pairs;
        let limit = self.fabric.now_ns() + PATIENCE_NS;
        // NCCL gets the connection once its first rail is up.
        while !self.pair.drivers.iter().all(|driver| driver.has_rail()) {
            self.watch();
            self.fabric.pass(5_000_000);
            assert!(
                self.fabric.now_ns() < limit,
                "no rail comes up: {}",
                self.state()
            );
        }
        let limit = self.fabric.now_ns() + PATIENCE_NS;
        while self.model.groups.len() < self.goal || !self.model.is_done() {
            if self.is_to_break_off() {
                return self.break_off();
            }
            self.step();
            self.wait(limit, "the messages");
        }
        self.model.check_that_all_is_over();
        self.model.check_what_was_handed_back(&self.fabric.to);
        // From here on no faults are injected, and the rails must come back by themselves. A
        // pending fault would cost a rail later, when the run no longer waits for a return.
        self.pulls_left = 0;
        self.refusals_left = 0;
        self.failures_left = 0;
        self.silences_left = 0;
        (0..self.rails).for_each(|rail| mend(self.fabric, rail));
        self.removals.end(self.fabric);
        let limit = self.fabric.now_ns() + PATIENCE_NS;
        // Also checks the number of queue pairs, because a driver counts rails with failed posts as
        // up until it runs.
        while !self.removals.all_reopened(self.fabric)
            || self.fabric.queue_pairs() != before
            || !self.pair.drivers.iter().all(|driver| driver.is_whole())
        {
            self.watch();
            self.fabric.pass(5_000_000);
            assert!(self.fabric.now_ns() < limit, "a rail does not come back");
        }
        self.use_all_again();
        self.close_both();
        self.model.check_that_all_is_over();
        self.model.check_what_was_handed_back(&self.fabric.to);
        assert_eq!(
            self.fabric.queue_pairs(),
            before,
            "the number of queue pairs has changed"
        );
        self.tally.messages = self
            .model
            .groups
            .iter()
            .map(|group| group.parts.len() as u64)
            .sum();
        self.tally
    }

    /// Lets time pass: mostly very little, sometimes as much as a time-out takes, and in rare cases
    /// as much as a rail needs to return.
    fn wait(&mut self, limit: u64, what: &str) {
        let limit_ns = match self.dice.below(64) {
            0 => 200_000_000,
            1..=3 => 3_000_000,
            4..=24 => 20_000,
            _ => 500,
        };
        let ns = self.dice.below(limit_ns);
        self.fabric.pass(ns);
        assert!(
            self.fabric.now_ns() < limit,
            "timed out while waiting for {what}: {}",
            self.state()
        );
    }

    fn state(&self) -> String {
        let up: Vec<bool> = (0..self.rails)
            .map(|rail| self.fabric.is_up(rail))
            .collect();
        let open = |(at, group): (usize, &super::model::Group)| {
            let parts: Vec<_> = group
                .parts
                .iter()
                .map(|part| (part.bytes, part.send, part.is_sent))
                .collect();
            let is_over = group.is_reported && parts.iter().all(|(_, _, is_sent)| *is_sent);
            (!is_over).then(|| {
                format!(
                    "{at} (reported {}, optional {}): {parts:?}",
                    group.is_reported, group.optional
                )
            })
        };
        let open: Vec<String> = self
            .model
            .groups
            .iter()
            .enumerate()
            .filter_map(open)
            .collect();
        let drivers: Vec<String> = self
            .pair
            .drivers
            .iter()
            .map(|driver| driver.text())
            .collect();
        let there: Vec<_> = (0..self.rails)
            .map(|rail| self.fabric.presence(rail))
            .collect();
        let known: Vec<Vec<_>> = self
            .fabric
            .hosts
            .iter()
            .map(|host| {
                host.process()
                    .rails
                    .iter()
                    .map(|rail| rail.device.presence())
                    .collect()
            })
            .collect();
        format!(
            "{} of {} groups; rails up {up:?}; functions {there:?}, as the hosts know them {known:?}; drivers {drivers:?}; open {open:?}",
            self.model.groups.len(),
            self.goal
        )
    }

    fn step(&mut self) {
        match self.dice.below(20) {
            0..=3 => self.grant(),
            4..=8 => self.send(),
            9..=11 => self.test_send(),
            12..=14 => self.test_receive(),
            15..=17 => self.watch(),
            _ => self.pull_or_plug(),
        }
    }

    fn grant(&mut self) {
        if self.model.groups.len() >= self.goal {
            return;
        }
        let Some(parts) = self.model.draw(&mut self.dice) else {
            self.goal = self.model.groups.len();
            return;
        };
        let optional = parts.len() == 1 && self.dice.one_in(4);
        for part in &parts {
            Model::blank(&mut self.fabric.to, part);
        }
        let base = self.fabric.to.as_ptr() as u64;
        let wanted: Vec<RecvPart<'_>> = parts
            .iter()
            .enumerate()
            .map(|(tag, part)| RecvPart {
                addr: base + part.at as u64,
                bytes: part.room,
                tag: tag as i32,
                memory: &self.fabric.into,
            })
            .collect();
        let granted =
            self.pair
                .recv
                .enter()
                .unwrap()
                .irecv(&self.pair.contexts[1], &wanted, optional);
        if let Some(receive) = granted.expect("a receive is granted") {
            self.model.granted(receive, parts, optional);
        }
    }

    fn send(&mut self) {
        let Some(group) = self.model.next_to_send() else {
            return;
        };
        let waiting: Vec<usize> = (0..group.parts.len())
            .filter(|at| group.parts[*at].send.is_none())
            .collect();
        let tag = waiting[self.dice.below(waiting.len() as u64) as usize];
        let part = &mut group.parts[tag];
        Model::fill(&mut self.fabric.from, self.seed, part);
        let addr = self.fabric.from.as_ptr() as u64 + part.at as u64;
        let mut path = self.pair.send.enter().unwrap();
        let sent = path.isend(
            &self.pair.contexts[0],
            addr,
            part.bytes,
            tag as i32,
            &self.fabric.out,
        );
        part.send = sent.expect("a send begins");
    }

    fn test_send(&mut self) {
        let running: Vec<(usize, usize)> = self
            .model
            .groups
            .iter()
            .enumerate()
            .flat_map(|(at, group)| (0..group.parts.len()).map(move |tag| (at, tag)))
            .filter(|(at, tag)| {
                let part = &self.model.groups[*at].parts[*tag];
                part.send.is_some() && !part.is_sent
            })
            .collect();
        let Some((at, tag)) = running
            .get(self.dice.below(running.len() as u64) as usize)
            .copied()
        else {
            return;
        };
        let part = &mut self.model.groups[at].parts[tag];
        let request = part.send.unwrap();
        let sent_bytes = self
            .pair
            .send
            .enter()
            .unwrap()
            .test(&self.pair.contexts[0], request)
            .expect("testing a send succeeds");
        if let Some(bytes) = sent_bytes {
            assert_eq!(bytes, part.bytes as u64);
            part.is_sent = true;
        }
        self.model.hand_back(at, self.seed, &mut self.fabric.to);
    }

    fn test_receive(&mut self) {
        let open: Vec<usize> = (0..self.model.groups.len())
            .filter(|at| !self.model.groups[*at].is_reported)
            .collect();
        let Some(at) = open
            .get(self.dice.below(open.len() as u64) as usize)
            .copied()
        else {
            return;
        };
        let group = &mut self.model.groups[at];
        let tell = |part: usize, bytes: u64| {
            let right = if group.optional {
                group.parts[part].room
            } else {
                group.parts[part].bytes
            };
            // An optional receive reports the size of the buffer, or the size of the message if the
            // message has arrived.
            assert!(
                bytes == right as u64 || group.optional && bytes == group.parts[part].bytes as u64
            );
        };
        let mut path = self.pair.recv.enter().unwrap();
        group.is_reported = path
            .test(&self.pair.contexts[1], group.receive, tell)
            .expect("testing a receive succeeds");
        drop(path);
        self.model.hand_back(at, self.seed, &mut self.fabric.to);
    }

    /// Runs both drivers in random order, or only one of them. Delivers due control frames and
    /// events.
    fn watch(&mut self) {
        let now_ns = self.fabric.now_ns();
        let now = self.fabric.now();
        self.lose_functions(now);
        self.close_tcp();
        let first = self.dice.below(2) as usize;
        let sides = if self.dice.one_in(3) { 1 } else { 2 };
        for side in [first, 1 - first].into_iter().take(sides) {
            self.fabric.hosts[side].process().tick(now);
            self.tcp.poll(
                side,
                &mut self.pair.drivers[side],
                now_ns,
                now,
                &mut self.dice,
            );
            let due: Vec<usize> = (0..self.events.len())
                .filter(|at| self.events[*at].1 == side && self.events[*at].0 <= now_ns)
                .collect();
            for at in due.into_iter().rev() {
                let (_, _, rail, is_up) = self.events.swap_remove(at);
                if self.fabric.is_up(rail) == is_up {
                    let rail = self.fabric.hosts[side].process().rails[rail].clone();
                    let change = if is_up {
                        PortChange::Up
                    } else {
                        PortChange::Down
                    };
                    self.pair.drivers[side].port_changed(&rail, change, now);
                }
            }
            let has_news = self.pair.wakers[side].take() || self.dice.one_in(16);
            let tcp = &mut self.tcp;
            let dice = &mut self.dice;
            self.pair.drivers[side].poll(now, has_news, &mut |frame| {
                tcp.send(side, frame, now_ns, dice)
            });
        }
    }

    fn close_tcp(&mut self) {
        let now_ns = self.fabric.now_ns();
        let is_over = self.held.is_none_or(|(_, until_ns)| until_ns <= now_ns);
        if is_over
            && let Some(rail) = (0..self.rails).find(|rail| self.is_usable(*rail))
            && self.tcp.maybe_close(now_ns)
        {
            self.held = Some((rail, now_ns + HELD_NS));
        }
    }

    /// True if a rail is up on both sides, and no pending fault would cost the rail.
    fn is_usable(&self, rail: usize) -> bool {
        let is_open = |path: &dyn SharedPath| {
            path.borrow().is_ok_and(|mut path| {
                let lane = &path.rails().lanes[rail];
                lane.is_open()
                    && !lane
                        .ends()
                        .iter()
                        .any(|end| self.fabric.is_in_error(end.number))
            })
        };
        self.fabric.is_quiet(rail)
            && self.removals.all_reopened(self.fabric)
            && is_open(&*self.pair.send)
            && is_open(&*self.pair.recv)
    }

    fn must_hold(&self, rail: usize) -> bool {
        let is_held =
            |(held, until_ns): (usize, u64)| held == rail && self.fabric.now_ns() < until_ns;
        rail == 0 && self.tcp.breaks_permanently() || self.held.is_some_and(is_held)
    }

    fn lose_functions(&mut self, now: Instant) {
        let rail = self.later_dice.below(self.rails as u64) as usize;
        let must_hold = self.must_hold(rail);
        self.tally.losses +=
            u64::from(!must_hold && self.removals.step(self.fabric, &mut self.later_dice, rail));
        for side in [0, 1] {
            for (rail, change) in self
                .removals
                .notice(self.fabric, &mut self.later_dice, side, now)
            {
                self.pair.drivers[side].port_changed(&rail, change, now);
            }
        }
    }

    fn pull_or_plug(&mut self) {
        let rail = self.dice.below(self.rails as u64) as usize;
        let must_hold = self.must_hold(rail);
        if self.refusals_left > 0 && !must_hold && self.dice.one_in(4) {
            self.refusals_left -= 1;
            self.fabric.refuse(rail, 1);
        }
        if self.failures_left > 0 && !must_hold && self.dice.one_in(4) {
            self.failures_left -= 1;
            self.fabric.fail_posts(rail, 1);
            self.fabric
                .fail_to_register(self.dice.below(2) as usize, rail);
        }
        if self.silences_left > 0 && self.dice.one_in(4) {
            self.silences_left -= 1;
            self.fabric.silence(rail, 1 + self.dice.below(2) as u32);
        }
        let is_up = self.fabric.is_up(rail);
        if is_up {
            if self.pulls_left == 0 || must_hold {
                return;
            }
            self.pulls_left -= 1;
            self.tally.losses += 1;
        }
        self.fabric.set(rail, !is_up);
        for side in [0, 1] {
            if self.dice.one_in(2) {
                self.events.push((
                    self.fabric.now_ns() + self.dice.below(2_000_000),
                    side,
                    rail,
                    !is_up,
                ));
            }
        }
    }

    fn use_all_again(&mut self) {
        self.goal += 40;
        let limit = self.fabric.now_ns() + PATIENCE_NS;
        while self.model.groups.len() < self.goal || !self.model.is_done() {
            self.step();
            self.wait(limit, "messages after the last loss");
        }
    }

    fn is_to_break_off(&mut self) -> bool {
        let has = self.model.groups.len();
        match self.ending {
            Ending::Whole => false,
            Ending::BrokenOff { after } => has >= after,
            Ending::BrokenOffOnTrial { after } => {
                has >= after
                    && self.pair.drivers[1].text().contains("under test")
                    && self.dice.one_in(4)
            }
            Ending::BrokenOffInUse { after } => {
                let [sender, receiver] = [0, 1].map(|side: usize| self.pair.drivers[side].text());
                has >= after
                    && receiver.contains("under test")
                    && !sender.contains("under test")
                    && !sender.contains("reconnecting")
                    && sender.contains("up")
            }
        }
    }

    /// Closes one side of the connection.
    fn close(&mut self, side: usize) {
        let now_ns = self.fabric.now_ns();
        let now = self.fabric.now();
        // Separate dice, so that this draw does not change the others.
        let tcp = &mut self.tcp;
        let mut dice = Dice::new(self.seed ^ 0xb1e);
        while !self.pair.drivers[side].close(now, now, &mut |frame| {
            tcp.send(side, frame, now_ns, &mut dice)
        }) {}
    }

    /// Closes both sides. Each side learns that the other has closed. The sender also learns how
    /// many groups were delivered.
    fn close_both(&mut self) {
        let first = self.dice.below(2) as usize;
        let limit = self.fabric.now_ns() + PATIENCE_NS;
        for side in [first, 1 - first] {
            self.close(side);
            while self.pair.contexts[1 - side].peer.presence() == PeerState::Here {
                self.watch();
                self.fabric.pass(1_000_000);
                assert!(
                    self.fabric.now_ns() < limit,
                    "side {side} closes and the other side does not notice"
                );
            }
        }
        // No caller waits for an optional receive, so such a receive may still be incomplete. Only
        // the receives before the first optional one were certainly delivered.
        let groups = &self.model.groups;
        let waited_for = groups
            .iter()
            .position(|group| group.optional)
            .unwrap_or(groups.len()) as u64;
        let presence = self.pair.contexts[0].peer.presence();
        let all = groups.len() as u64;
        assert!(
            matches!(presence, PeerState::Closed { delivered } if (waited_for..=all).contains(&delivered)),
            "{presence:?} of {all}"
        );
    }
}

/// Ends all faults of the previous run.
fn reset(fabric: &mut Fabric) {
    // Lets the packets of the previous run drain.
    fabric.pass(1_000_000_000);
    (0..RAILS).for_each(|rail| mend(fabric, rail));
    fabric.forget_path_faults();
    fabric.forget_silence();
    fabric.plug_all();
}

/// Brings a rail's port up, and takes back injected faults that have not struck yet.
fn mend(fabric: &Fabric, rail: usize) {
    fabric.set(rail, true);
    fabric.refuse(rail, 0);
    fabric.fail_posts(rail, 0);
    fabric.silence(rail, 0);
}

/// Draws the bit mask of lanes that have no queue pairs when the connection begins.
fn draw_missing_lanes(seed: u64, rails: usize, tcp: &Tcp) -> u8 {
    let mask = match Dice::new(seed ^ 0x5eed).below(4) {
        0 => Dice::new(seed ^ 0xfeed).below(1 << rails) as u8,
        _ => 0,
    };
    // If TCP breaks permanently, rail 0 has to carry the control frames.
    if tcp.breaks_permanently() {
        mask & !1
    } else {
        mask
    }
}
