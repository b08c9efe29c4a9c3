//! The model that the search explores: two ends, their queue pairs, and the writes and frames in
//! transit. Side 0 is the sender and the connecting side. Side 1 is the receiver.
//!
//! An attempt to reconnect a lost rail connects new queue pairs of both sides. From then on, the
//! queue pairs of both sides have the same generation: a number that [`World`] counts up. A mishap
//! is an event that [`Budget`] lets happen only a few times: a fault, an early deadline, a close.

mod actions;
mod events;
mod messages;
mod time;

use super::super::{Action, Frame, Limits, Recovery, Role, SECOND, STEADY, State};
use crate::wire::control::ControlFrame;
use crate::wire::ids::LaneId;
use messages::Messages;

const RAILS: usize = 2;
const MESSAGES: usize = 2;
/// Size of a message in bytes. A message that is cut sends one byte on each rail.
const BYTES: u64 = RAILS as u64;
const LIMITS: Limits = Limits {
    loss: 30 * SECOND,
    probe: 5 * SECOND,
    first_rail: 120 * SECOND,
};
/// Largest number of frames in transit in one direction. If a side sends one more frame, this frame
/// replaces the newest frame in transit. In a real mailbox too, each frame overwrites the frame
/// before it.
const FRAMES: usize = 2;
/// Generation of new queue pairs that are not connected.
const UNCONNECTED: u32 = u32::MAX;

/// The number of mishaps of each kind that may still happen.
#[derive(Debug, Clone, Copy, Default, Hash)]
pub struct Budget {
    pub losses: u8,
    /// A device is removed. It has new keys when it returns.
    pub removals: u8,
    /// Number of rails that the connection begins without.
    pub missing: u8,
    /// Lost frames.
    pub frames: u8,
    /// Breaks of the bootstrap's TCP connection.
    pub tcp: u8,
    pub overtakes: u8,
    /// A port of the sender goes down, and comes up later.
    pub restarts: u8,
    /// A deadline passes although other events are possible.
    pub early: u8,
    /// Queue pairs cannot be created or connected.
    pub failures: u8,
    /// A thread that creates or connects queue pairs hangs. It returns after its attempt was given
    /// up, or after its side no longer recovers rails.
    pub hangs: u8,
    /// A limit of the connection passes although other events are possible.
    pub limits: u8,
    /// A side closes the connection. The peer's close that follows needs no budget.
    pub closes: u8,
    /// A message is cut into a share for each rail.
    pub cuts: u8,
}

impl Budget {
    /// Takes an event off the budget, if it is a mishap. An event that follows from an earlier
    /// mishap may happen even if its budget is used up.
    fn spend(&mut self, event: Event) {
        let left = match event {
            Event::Lose { .. } => &mut self.losses,
            Event::Remove { .. } => &mut self.removals,
            Event::DropFrame { .. } => &mut self.frames,
            Event::BreakTcp => &mut self.tcp,
            Event::ReceiveFrame { at: 1.., .. } => &mut self.overtakes,
            Event::PortDown(_) => &mut self.restarts,
            Event::Wait | Event::Expire(_) => &mut self.early,
            Event::FailNext => &mut self.failures,
            Event::HangNext => &mut self.hangs,
            Event::Limit { .. } => &mut self.limits,
            Event::Close { .. } => &mut self.closes,
            Event::PostCut => &mut self.cuts,
            _ => return,
        };
        *left = left.saturating_sub(1);
    }
}

#[derive(Debug, Clone, Copy)]
pub enum Event {
    Grant(LaneId),
    LandGrant(usize),
    Post(LaneId),
    PostCut,
    Land(usize),
    Confirm(usize),
    /// A data path detects a lost rail, and no longer uses it. [`Event::Report`] informs recovery
    /// later.
    Lose {
        side: usize,
        lane: LaneId,
    },
    /// The same, because the device is being removed.
    Remove {
        side: usize,
        lane: LaneId,
    },
    /// The queue pairs of a lost rail stop: a thread has stopped them, or their device has left the
    /// bus.
    Stop {
        side: usize,
        lane: LaneId,
    },
    /// The service thread reads the losses in the data path's status.
    Report {
        side: usize,
    },
    PortDown(LaneId),
    PortUp(LaneId),
    ReceiveFrame {
        side: usize,
        at: usize,
    },
    DropFrame {
        side: usize,
    },
    Probe(LaneId),
    FailNext,
    HangNext,
    Return {
        side: usize,
        lane: LaneId,
    },
    /// The next deadline passes, because no other event is possible.
    Tick,
    /// The next deadline passes while a device is cut off, TCP is broken or a thread hangs.
    Wait,
    /// TCP breaks, and the frames in transit are lost.
    BreakTcp,
    /// A side detects that TCP is broken: closed by the other end (`is_closed`), or timed out.
    FindTcp {
        side: usize,
        is_closed: bool,
    },
    /// The sender dials, and the receiver accepts the new TCP connection.
    Dial,
    Limit {
        side: usize,
    },
    /// A side closes the connection. If a send of this side is running, or a receive of this side
    /// waits for bytes, the side's data path ends, which cancels them. Otherwise the close leaves
    /// the side's queue pairs in use.
    Close {
        side: usize,
    },
    /// A side that has closed destroys what remains of the connection.
    Leave {
        side: usize,
    },
    /// A deadline of one of the sender's rails passes although other events are possible.
    Expire(LaneId),
}

/// The two ends. The receiver has `N` slots.
#[derive(Debug, Clone)]
pub struct World<const N: usize> {
    now: u64,
    budget: Budget,
    ends: [Recovery; 2],
    frames: [Vec<ControlFrame>; 2],
    /// Generation of the queue pairs in use, by side and lane.
    used: [[Option<u32>; RAILS]; 2],
    /// Lost queue pairs that have not stopped, by side and lane.
    lost: [[Option<Lost>; RAILS]; 2],
    /// By side and lane: true if the data path's status has a loss that is not reported yet.
    losses: [[bool; RAILS]; 2],
    /// Generation of new queue pairs that are not used yet, by side and lane. The sender's queue
    /// pairs may be [`UNCONNECTED`]. The receiver's queue pairs come into use when the sender's
    /// control message LIVE arrives: the test writes have succeeded.
    new: [[Option<u32>; RAILS]; 2],
    /// Number of the sender's requests to reconnect each rail. Each request has new queue pairs of
    /// the sender.
    requests: [u32; RAILS],
    /// For each rail, the number (as counted in `requests`) of the request that the receiver has
    /// answered last. The receiver's new queue pairs are connected to the sender's queue pairs of
    /// this request. Test writes work only if this is the newest request, because each request has
    /// other queue pair numbers and packet numbers.
    answered: [u32; RAILS],
    /// Last generation of each rail whose test writes were confirmed.
    probed: [u32; RAILS],
    fails_next: bool,
    hangs_next: bool,
    /// Threads that hang, by side and lane. Each has the action that it executes, or `None` once
    /// its attempt was given up.
    hung: [[Option<Option<Action>>; RAILS]; 2],
    /// Last generation of each rail that the sender has used.
    activated: [u32; RAILS],
    next_generation: u32,
    is_port_up: [bool; RAILS],
    messages: Messages<N>,
    tcp_carries: bool,
    /// By side: false once the side has detected that TCP is broken.
    tcp_is_open: [bool; 2],
    /// True if the initial budget allows lost frames. Real TCP itself sends lost data again, which
    /// the model's TCP does not. In place of that, if this is true and TCP works, each frame that
    /// recovery repeats arrives, even if no rail carries it.
    is_lossy: bool,
    was_up: [bool; 2],
    /// True once a limit has passed. Both ends may give up after that.
    is_late: bool,
    closing: [Closing; 2],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Lost {
    generation: u32,
    /// True if the device is being removed.
    is_removed: bool,
}

#[derive(Debug, Clone, Copy, Default, Hash)]
struct Closing {
    /// True once the data path has ended and its queue pairs are destroyed.
    path_ended: bool,
    has_closed: bool,
    /// True once this side has seen that the peer has closed or ended.
    peer_is_away: bool,
    has_left: bool,
}

impl<const N: usize> World<N> {
    pub fn new(budget: Budget) -> Self {
        let missing: Vec<_> = lanes().skip(RAILS - usize::from(budget.missing)).collect();
        let mut used = [[Some(0); RAILS]; 2];
        let mut end = |role| {
            let mut end = Recovery::new(role, LIMITS, RAILS);
            end.mark_missing_at_start(
                &missing
                    .iter()
                    .copied()
                    .map(super::missing)
                    .collect::<Vec<_>>(),
            );
            missing
                .iter()
                .for_each(|lane| used[role as usize][lane.index()] = None);
            end
        };
        let ends = [end(Role::Sender), end(Role::Receiver)];
        let mut world = Self {
            // Late enough for the rails, up since time 0, to count as steady.
            now: 2 * STEADY,
            budget,
            ends,
            frames: Default::default(),
            used,
            lost: Default::default(),
            losses: Default::default(),
            new: Default::default(),
            requests: [0; RAILS],
            answered: [0; RAILS],
            probed: [0; RAILS],
            fails_next: false,
            hangs_next: false,
            hung: Default::default(),
            activated: [0; RAILS],
            next_generation: 1,
            is_port_up: [true; RAILS],
            messages: Messages::new(),
            tcp_carries: true,
            tcp_is_open: [true; 2],
            is_lossy: budget.frames > 0,
            was_up: [missing.len() < RAILS; 2],
            is_late: false,
            closing: Default::default(),
        };
        world.grant_at_first();
        world
    }

    pub fn is_done(&self) -> bool {
        if self
            .closing
            .iter()
            .any(|end| end.has_closed || end.path_ended)
        {
            return self.closing.iter().all(|end| end.has_left);
        }
        self.ends.iter().all(Recovery::is_whole)
            && self.losses == [[false; RAILS]; 2]
            && self.new == [[None; RAILS]; 2]
            && self.messages.delivered == [true; MESSAGES]
            && self.messages.confirmed == [true; MESSAGES]
    }

    /// Executes an event. The error describes the promise that the event breaks.
    pub fn happen(&mut self, event: Event) -> Result<(), String> {
        let now = self.now;
        self.budget.spend(event);
        match event {
            Event::Grant(lane) => self.grant(lane)?,
            Event::LandGrant(at) => self.land_grant(at),
            Event::Post(lane) => self.post(Some(lane))?,
            Event::PostCut => self.post(None)?,
            Event::Land(at) => self.land(at)?,
            Event::Confirm(at) => self.confirm(at)?,
            Event::Lose { side, lane } => {
                self.set_aside(side, lane, false);
                self.losses[side][lane.index()] = true;
            }
            Event::Remove { side, lane } => {
                self.set_aside(side, lane, true);
                self.losses[side][lane.index()] = true;
            }
            Event::Stop { side, lane } => {
                let stopped = self.lost[side][lane.index()].take();
                self.take_in(side, lane)?;
                if side == 1 && stopped.is_some_and(|stopped| stopped.is_removed) {
                    self.messages.reopen(lane);
                }
            }
            Event::Report { side } => self.report(side)?,
            Event::Limit { side } => return self.reach_limit(side),
            Event::Close { side } => self.close(side)?,
            Event::Leave { side } => self.leave(side),
            Event::BreakTcp => (self.tcp_carries, self.frames) = Default::default(),
            Event::FindTcp { side, is_closed } => {
                self.tcp_is_open[side] = false;
                if is_closed {
                    self.ends[side].bootstrap_closed(now);
                }
            }
            Event::Dial => {
                (self.tcp_carries, self.tcp_is_open) = (true, [true; 2]);
                self.ends.iter_mut().for_each(Recovery::bootstrap_opened);
            }
            Event::PortDown(lane) => {
                self.is_port_up[lane.index()] = false;
                self.ends[0].rail_down(lane, "port", now);
            }
            Event::PortUp(lane) => {
                self.is_port_up[lane.index()] = true;
                self.ends[0].port_up(lane, now);
            }
            Event::ReceiveFrame { side, at } => {
                let frame = self.frames[side].remove(at);
                let begun = self.messages.begun_sends(side);
                self.ends[side].receive_frame(&frame, begun, now);
            }
            Event::DropFrame { side } => _ = self.frames[side].remove(0),
            Event::Probe(lane) => self.probe(lane),
            Event::FailNext => self.fails_next = true,
            Event::HangNext => self.hangs_next = true,
            Event::Return { side, lane } => {
                if let Some(Some(step)) = self.hung[side][lane.index()].take() {
                    self.execute(side, step)?;
                }
            }
            Event::Tick | Event::Wait => self.now = self.next_deadline().unwrap_or(now).max(now),
            Event::Expire(lane) => self.now = self.rail_deadline(lane).unwrap_or(now).max(now),
        }
        self.settle()
    }

    /// Lets a limit of a side pass. The side's connection must fail.
    fn reach_limit(&mut self, side: usize) -> Result<(), String> {
        self.is_late = true;
        self.now = self.limit(side).unwrap_or(self.now).max(self.now);
        self.settle()?;
        match self.closing[side].path_ended {
            true => Ok(()),
            false => Err(format!("side {side} has not failed at one of its limits")),
        }
    }

    /// Executes the actions of both ends, and sends their frames.
    fn settle(&mut self) -> Result<(), String> {
        for side in 0..2 {
            if self.closing[side].has_left {
                continue;
            }
            if !self.tcp_is_open[side] {
                self.ends[side].bootstrap_away(false, self.now);
            }
            self.act(side)?;
            // In each round, the driver also checks whether lost queue pairs have stopped.
            for lane in lanes() {
                if matches!(
                    self.ends[side].rails[lane.index()].state,
                    State::Fencing { .. }
                ) {
                    self.fence(side, lane);
                }
            }
            self.ends[side].tick(self.now);
            self.act(side)?;
            // The data path's `poll` does the same.
            match side {
                0 if self.messages.has_lost_shares() => self.resend_shares()?,
                1 => self.repeat_grants()?,
                _ => {}
            }
            self.compare(side)?;
            let (frame, arrives) = match self.ends[side].poll_frame(self.now) {
                Some(Frame::First(frame)) if self.tcp_is_open[side] => (frame, self.tcp_carries),
                Some(Frame::First(frame)) => (frame, self.rail_carries(side)),
                Some(Frame::Repeated(frame)) => (frame, self.repeats_arrive(side)),
                None => continue,
            };
            if !arrives || self.closing[1 - side].has_left {
                continue;
            }
            let frames = &mut self.frames[1 - side];
            frames.truncate(FRAMES - 1);
            frames.push(frame);
        }
        self.forget_grants();
        Ok(())
    }
}

fn lanes() -> impl Iterator<Item = LaneId> {
    LaneId::all(RAILS)
}
