//! The model that is searched: two ends, their queue pairs by generation, the writes and the frames under way.

use super::super::{
    Action, Answer, DOUBLED_AT_MOST, Frame, Limits, Peer, REPEAT, Rail, Recovery, Role, SECOND, STEADY, State,
};
use crate::wire::PARTS;
use crate::wire::control::{ControlFrame, OpenReceive, Received};
use crate::wire::cts::Epoch;
use crate::wire::fields::{Attachment, LaneEnd, QpEnd, RailAdvert};
use crate::wire::ids::LaneId;
use std::hash::{DefaultHasher, Hash, Hasher};

const RAILS: usize = 2;
const MESSAGES: usize = 2;
const LIMITS: Limits = Limits { loss: 30 * SECOND, probe: 5 * SECOND, first_rail: 120 * SECOND };
/// Frames that are under way in one direction at most; one more takes the place of the last, as in a mailbox.
const FRAMES: usize = 2;
/// The generation of new queue pairs that are not connected.
const UNCONNECTED: u32 = u32::MAX;

/// How often each mishap still happens.
#[derive(Debug, Clone, Copy, Hash)]
pub struct Budget {
    /// A data path finds a rail lost.
    pub losses: u8,
    /// A frame is lost.
    pub frames: u8,
    /// A frame overtakes another one.
    pub overtakes: u8,
    /// A port of the connecting side goes down, and comes up again.
    pub restarts: u8,
    /// A rail's deadline passes although something else is about to happen.
    pub early: u8,
    /// Queue pairs cannot be made or connected.
    pub failures: u8,
}

/// One thing that happens.
#[derive(Debug, Clone, Copy)]
pub enum Event {
    Post {
        message: usize,
        lane: LaneId,
    },
    Land(usize),
    Confirm(usize),
    Lose {
        side: usize,
        lane: LaneId,
    },
    PortDown(LaneId),
    PortUp(LaneId),
    Hear {
        side: usize,
        at: usize,
    },
    DropFrame {
        side: usize,
    },
    Probe(LaneId),
    /// The next queue pairs that are to be made or connected are not.
    FailNext,
    /// Nothing happens until a deadline passes.
    Tick,
    /// The deadline of a lane passes before anything else happens.
    Expire {
        side: usize,
        lane: LaneId,
    },
}

/// A write of a message, posted on queue pairs of a generation.
#[derive(Debug, Clone, Hash)]
struct Write {
    message: usize,
    lane: LaneId,
    generation: u32,
    has_landed: bool,
}

#[derive(Debug, Clone)]
pub struct World {
    now: u64,
    budget: Budget,
    ends: [Recovery; 2],
    /// Frames on their way to each side.
    frames: [Vec<ControlFrame>; 2],
    /// The generation of queue pairs in use, by side and lane.
    used: [[Option<u32>; RAILS]; 2],
    /// New queue pairs: of the connecting side ([`UNCONNECTED`] before it knows the peer's), of the accepting side those that wait for
    /// LIVE.
    new: [[Option<u32>; RAILS]; 2],
    /// How often the connecting side has asked for a lane, and which of these requests the accepting side's new queue pairs are for:
    /// only then do the two ends of a trial fit (queue pair numbers, packet numbers).
    requests: [u32; RAILS],
    answered: [u32; RAILS],
    /// The last generation whose trial write was confirmed.
    probed: [u32; RAILS],
    fails_next: bool,
    /// The last generation that the connecting side has used.
    activated: [u32; RAILS],
    next_generation: u32,
    is_port_up: [bool; RAILS],
    writes: Vec<Write>,
    /// Messages posted so far.
    posted: usize,
    confirmed: [bool; MESSAGES],
    delivered: [bool; MESSAGES],
    /// What has landed in queue pairs that wait for LIVE: the message and the lane.
    unseen: Vec<(usize, LaneId)>,
    /// Stranded messages that have no lane to go by.
    stranded: Vec<usize>,
}

impl World {
    pub fn new(budget: Budget) -> Self {
        let end = |role| Recovery::new(role, LIMITS, RAILS);
        Self {
            // Long enough for the rails to count as steady.
            now: 2 * STEADY,
            budget,
            ends: [end(Role::Sender), end(Role::Receiver)],
            frames: Default::default(),
            used: [[Some(0); RAILS]; 2],
            new: Default::default(),
            requests: [0; RAILS],
            answered: [0; RAILS],
            probed: [0; RAILS],
            fails_next: false,
            activated: [0; RAILS],
            next_generation: 1,
            is_port_up: [true; RAILS],
            writes: Vec::new(),
            posted: 0,
            confirmed: [false; MESSAGES],
            delivered: [false; MESSAGES],
            unseen: Vec::new(),
            stranded: Vec::new(),
        }
    }

    pub fn is_done(&self) -> bool {
        self.ends.iter().all(Recovery::is_whole)
            && self.new == [[None; RAILS]; 2]
            && self.delivered == [true; MESSAGES]
            && self.confirmed == [true; MESSAGES]
    }

    /// All that can happen now.
    pub fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        for lane in LaneId::all(RAILS).filter(|lane| self.used[0][lane.index()].is_some()) {
            if let Some(message) = self.stranded.first() {
                events.push(Event::Post { message: *message, lane });
            } else if self.posted < MESSAGES {
                events.push(Event::Post { message: self.posted, lane });
            }
        }
        for (at, write) in self.writes.iter().enumerate() {
            let there = [self.used[1][write.lane.index()], self.new[1][write.lane.index()]];
            if !write.has_landed && there.contains(&Some(write.generation)) {
                events.push(Event::Land(at));
            }
            if write.has_landed && self.used[0][write.lane.index()] == Some(write.generation) {
                events.push(Event::Confirm(at));
            }
        }
        for side in 0..2 {
            events.extend((!self.frames[side].is_empty()).then_some(Event::Hear { side, at: 0 }));
        }
        for lane in LaneId::all(RAILS) {
            events.extend(
                matches!(self.ends[0].rails[lane.index()].state, State::Probing { .. }).then_some(Event::Probe(lane)),
            );
            events.extend((!self.is_port_up[lane.index()]).then_some(Event::PortUp(lane)));
        }
        let is_calm = events.is_empty();
        self.mishaps(&mut events);
        if is_calm && self.next_deadline().is_some() {
            events.push(Event::Tick);
        }
        events
    }

    fn mishaps(&self, events: &mut Vec<Event>) {
        for side in 0..2 {
            if self.budget.overtakes > 0 && self.frames[side].len() > 1 {
                events.push(Event::Hear { side, at: 1 });
            }
            if self.budget.frames > 0 && !self.frames[side].is_empty() {
                events.push(Event::DropFrame { side });
            }
            for lane in
                LaneId::all(RAILS).filter(|lane| self.budget.losses > 0 && self.used[side][lane.index()].is_some())
            {
                events.push(Event::Lose { side, lane });
            }
        }
        for lane in LaneId::all(RAILS).filter(|lane| self.budget.restarts > 0 && self.is_port_up[lane.index()]) {
            events.push(Event::PortDown(lane));
        }
        if self.budget.failures > 0 && !self.fails_next {
            events.push(Event::FailNext);
        }
        for lane in LaneId::all(RAILS).filter(|_| self.budget.early > 0) {
            events.extend(rail_deadline(&self.ends[0].rails[lane.index()]).map(|_| Event::Expire { side: 0, lane }));
        }
    }

    fn next_deadline(&self) -> Option<u64> {
        self.ends.iter().filter_map(|end| deadline(end, self.now)).min()
    }

    /// # Errors
    /// What must not be.
    pub fn happen(&mut self, event: Event) -> Result<(), String> {
        let now = self.now;
        match event {
            Event::Post { message, lane } => self.post(message, lane),
            Event::Land(at) => {
                let Write { message, lane, generation, .. } = self.writes[at].clone();
                self.writes[at].has_landed = true;
                if self.used[1][lane.index()] == Some(generation) {
                    self.deliver(message)?;
                } else {
                    self.unseen.push((message, lane));
                }
            }
            Event::Confirm(at) => {
                let write = self.writes.remove(at);
                self.confirmed[write.message] = true;
            }
            Event::Lose { side, lane } => {
                self.budget.losses -= 1;
                self.used[side][lane.index()] = None;
                let received = self.received(side);
                self.ends[side].lost(lane, "loss", received, now);
            }
            Event::PortDown(lane) => {
                self.budget.restarts -= 1;
                self.is_port_up[lane.index()] = false;
                self.ends[0].port_down(lane, "port", now);
            }
            Event::PortUp(lane) => {
                self.is_port_up[lane.index()] = true;
                self.ends[0].port_up(lane, now);
            }
            Event::Hear { side, at } => {
                self.budget.overtakes -= u8::from(at > 0);
                let frame = self.frames[side].remove(at);
                let begun = if side == 0 { self.posted as u64 } else { 0 };
                self.ends[side].heard(&frame, begun, now);
            }
            Event::DropFrame { side } => {
                self.budget.frames -= 1;
                self.frames[side].remove(0);
            }
            Event::Probe(lane) => {
                // Its peer's queue pairs acknowledge it, in use or not.
                let there = [self.used[1][lane.index()], self.new[1][lane.index()]];
                let is_there = self.new[0][lane.index()].is_some()
                    && there.contains(&self.new[0][lane.index()])
                    && self.is_port_up[lane.index()]
                    && self.answered[lane.index()] == self.requests[lane.index()];
                if is_there {
                    self.probed[lane.index()] = self.new[0][lane.index()].unwrap_or_default();
                }
                self.ends[0].probed(lane, if is_there { Ok(()) } else { Err("no answer".to_owned()) }, now);
            }
            Event::FailNext => {
                self.budget.failures -= 1;
                self.fails_next = true;
            }
            Event::Tick => self.now = self.next_deadline().unwrap_or(now).max(now),
            Event::Expire { side, lane } => {
                self.budget.early -= 1;
                self.now = rail_deadline(&self.ends[side].rails[lane.index()]).unwrap_or(now).max(now);
            }
        }
        self.settle()
    }

    /// Executes what both ends ask for, and sends their frames.
    fn settle(&mut self) -> Result<(), String> {
        for side in 0..2 {
            self.ends[side].tick(self.now);
            while let Some(action) = self.ends[side].poll_action() {
                self.act(side, action)?;
            }
            let frame = match self.ends[side].poll_frame(self.now) {
                Some(Frame::First(frame) | Frame::Repeated(frame)) => frame,
                None => continue,
            };
            let frames = &mut self.frames[1 - side];
            frames.truncate(FRAMES - 1);
            frames.push(frame);
        }
        Ok(())
    }

    fn act(&mut self, side: usize, action: Action) -> Result<(), String> {
        let now = self.now;
        match action {
            Action::Fence(lane) => {
                self.used[side][lane.index()] = None;
                let received = self.received(side);
                self.ends[side].fenced(lane, received, now);
            }
            Action::Resend(lane, received) => self.resend(side, lane, &received)?,
            Action::OpenQps(lane) => {
                self.make(0, lane, UNCONNECTED)?;
                self.requests[lane.index()] += 1;
                let outcome = match self.is_port_up[lane.index()] && !std::mem::take(&mut self.fails_next) {
                    true => Ok((advert(), end(self.requests[lane.index()]))),
                    false => {
                        self.new[0][lane.index()] = None;
                        Err("port down".to_owned())
                    }
                };
                self.ends[0].opened(lane, outcome, now);
            }
            Action::AnswerQps(lane, ..) if std::mem::take(&mut self.fails_next) => {
                self.ends[1].answered(lane, Err("unreachable".to_owned()), now);
            }
            Action::AnswerQps(lane, _, theirs) => {
                self.answered[lane.index()] = theirs.qps[0].number;
                let generation = self.next_generation;
                self.next_generation += 1;
                self.make(1, lane, generation)?;
                let (end, epoch) = (end(generation), Epoch::default());
                let answer = Answer { connector_gid: [1; 16], acceptor_gid: [2; 16], mtu_bytes: 1024, end, epoch };
                self.ends[1].answered(lane, Ok(answer), now);
            }
            Action::ConnectQps(lane, answer) => {
                if self.new[0][lane.index()] != Some(UNCONNECTED) {
                    return Err(format!("rail {lane} has no queue pairs to connect"));
                }
                if self.answered[lane.index()] != self.requests[lane.index()] {
                    return Err(format!("rail {lane} is connected to queue pairs for an earlier request"));
                }
                let fails = std::mem::take(&mut self.fails_next);
                self.new[0][lane.index()] = (!fails).then_some(answer.end.qps[0].number);
                self.ends[0].connected(lane, if fails { Err("unreachable".to_owned()) } else { Ok(()) }, now);
            }
            Action::Activate(lane) => self.activate(side, lane)?,
            Action::DropQps(lane) => {
                self.new[side][lane.index()] = None;
                if side == 1 {
                    self.unseen.retain(|(_, at)| *at != lane);
                }
            }
            Action::Fail(cause) => return Err(format!("side {side} gives up: {cause:?}")),
            Action::PeerClosed(_) | Action::PeerGone => return Err(format!("side {side} takes the peer for gone")),
            Action::Log(_) => {}
        }
        Ok(())
    }

    fn resend(&mut self, side: usize, lane: LaneId, received: &Received) -> Result<(), String> {
        if self.used[side][lane.index()].is_some() {
            return Err(format!("side {side} resends what went by rail {lane} before it has fenced it"));
        }
        if side == 1 {
            return match self.used[0][lane.index()] {
                None => Ok(()),
                Some(_) => Err(format!("the receiver grants once more before the sender has fenced rail {lane}")),
            };
        }
        let (gone, kept) = std::mem::take(&mut self.writes).into_iter().partition(|write| write.lane == lane);
        self.writes = kept;
        for Write { message, generation, .. } in gone {
            if [self.used[1][lane.index()], self.new[1][lane.index()]].contains(&Some(generation)) {
                return Err(format!("message {message} goes once more before the peer has fenced rail {lane}"));
            }
            match received.has(message as u64, 0, 0) {
                true => self.confirmed[message] = true,
                false => self.stranded.push(message),
            }
        }
        Ok(())
    }

    fn activate(&mut self, side: usize, lane: LaneId) -> Result<(), String> {
        let Some(generation) = self.new[side][lane.index()].take() else {
            return Err(format!("side {side} activates rail {lane} without queue pairs"));
        };
        if side == 0 && self.probed[lane.index()] != generation {
            return Err(format!("the sender uses new queue pairs of rail {lane} that nothing was written on"));
        }
        if side == 1 && self.activated[lane.index()] != generation {
            return Err(format!("the receiver uses new queue pairs of rail {lane} before the sender does"));
        }
        self.used[side][lane.index()] = Some(generation);
        if side == 0 {
            self.activated[lane.index()] = generation;
            if !self.is_port_up[lane.index()] {
                self.ends[0].port_down(lane, "port", self.now);
            }
        } else {
            let (here, elsewhere): (Vec<_>, Vec<_>) =
                std::mem::take(&mut self.unseen).into_iter().partition(|(_, at)| *at == lane);
            self.unseen = elsewhere;
            for (message, _) in here {
                self.deliver(message)?;
            }
        }
        Ok(())
    }

    fn make(&mut self, side: usize, lane: LaneId, generation: u32) -> Result<(), String> {
        match self.new[side][lane.index()].replace(generation) {
            None => Ok(()),
            Some(_) => Err(format!("side {side} makes queue pairs for rail {lane} beside others")),
        }
    }

    fn post(&mut self, message: usize, lane: LaneId) {
        if self.stranded.first() == Some(&message) {
            self.stranded.remove(0);
        } else {
            self.posted += 1;
        }
        let generation = self.used[0][lane.index()].expect("the event asks for a lane in use");
        self.writes.push(Write { message, lane, generation, has_landed: false });
    }

    fn deliver(&mut self, message: usize) -> Result<(), String> {
        match std::mem::replace(&mut self.delivered[message], true) {
            false => Ok(()),
            true => Err(format!("message {message} is delivered twice")),
        }
    }

    /// What a receiver says that it has: both receives are granted from the beginning.
    fn received(&self, side: usize) -> Received {
        if side == 0 {
            return Received::default();
        }
        let open = (0..MESSAGES).filter(|message| !self.delivered[*message]);
        let open = open.map(|message| OpenReceive { sequence: message as u64, shares: [0; PARTS] }).collect();
        Received { granted: MESSAGES as u64, open }
    }

    /// The same for two states that differ only by the time that it is.
    pub fn key(&self) -> u128 {
        let key = |salt: u8| {
            let mut hasher = DefaultHasher::new();
            salt.hash(&mut hasher);
            self.ends.iter().for_each(|end| hash_end(end, self.now, &mut hasher));
            (self.budget, self.requests, self.answered, self.probed, self.fails_next).hash(&mut hasher);
            self.frames.hash(&mut hasher);
            (self.used, self.new, self.activated, self.next_generation, self.is_port_up).hash(&mut hasher);
            (&self.writes, self.posted, self.confirmed, self.delivered).hash(&mut hasher);
            (&self.unseen, &self.stranded).hash(&mut hasher);
            u128::from(hasher.finish())
        };
        key(1) << 64 | key(2)
    }
}

fn end(number: u32) -> LaneEnd {
    LaneEnd { qps: vec![QpEnd { number, psn: 1 }], mailbox_rkey: 0 }
}

fn advert() -> RailAdvert {
    RailAdvert {
        name: String::new(),
        phys_port: String::new(),
        attachment: Attachment { link: 0, link_mbps: 1, cable: 0, port_mbps: 1 },
        speed_mbps: 1,
        mtu_bytes: 1024,
        addresses: Vec::new(),
        is_usable: true,
    }
}

/// When something happens at this end if nothing else does.
fn deadline(end: &Recovery, now: u64) -> Option<u64> {
    let of_rail = |rail: &Rail| rail_deadline(rail).filter(|_| end.role == Role::Sender);
    let repeat = end.link.is_waiting().then_some(end.sent_at + REPEAT);
    end.rails.iter().filter_map(of_rail).chain(repeat).min().map(|at| at.max(now))
}

/// When a rail of the connecting side has waited long enough.
fn rail_deadline(rail: &Rail) -> Option<u64> {
    match rail.state {
        State::Down { retry_at: at } | State::Requested { until: at } | State::Probing { until: at } => Some(at),
        _ => None,
    }
}

/// An end, with its times counted from `now`.
fn hash_end(end: &Recovery, now: u64, hasher: &mut impl Hasher) {
    let age = |at: u64, most: u64| now.saturating_sub(at).min(most);
    for rail in &end.rails {
        rail.attempts.min(DOUBLED_AT_MOST + 1).hash(hasher);
        std::mem::discriminant(&rail.state).hash(hasher);
        match rail.state {
            State::Up { since } => age(since, STEADY + 1).hash(hasher),
            State::Fenced { since } => age(since, LIMITS.loss).hash(hasher),
            State::Down { retry_at: at } | State::Requested { until: at } | State::Probing { until: at } => {
                at.saturating_sub(now).hash(hasher);
            }
            _ => {}
        }
    }
    end.link.hash(hasher);
    end.link.is_waiting().then(|| age(end.sent_at, REPEAT)).hash(hasher);
    end.dark_since.map(|since| age(since, LIMITS.loss)).hash(hasher);
    assert!(end.peer == Peer::Here && end.actions.is_empty(), "the model's peers do not leave");
}
