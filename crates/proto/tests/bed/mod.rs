//! Two processes with several connections each, their devices, and the wires between them, in
//! virtual time. The bed does the plugin's part of recovery by the simplest means: calls into a
//! device take a random time, and return once the device answers.
//!
//! There is no data. A connection only watches the wire of each rail in use, and reports the rail
//! lost when the wire has carried nothing for some time, as a NIC does.

pub mod nic;

use nic::{Nic, Phase, source};
use proto::backoff::{Connected, KnownPaths, PathId};
use proto::device::{Device, PortChange, Presence, Return, Returned, Step};
use proto::flow::recovery::{Action, Cause, Frame, Limits, Recovery, Role, State};
use proto::flow::redial::Need;
use proto::time::Instant;
use proto::wire::control::{ControlFrame, JoinAnswer, Received};
use proto::wire::cts::Epoch;
use proto::wire::fields::{Attachment, LaneEnd, QpEnd, RailAdvert};
use proto::wire::ids::{LaneId, RailId};
use std::collections::VecDeque;
use std::time::Duration;

/// Rails of each process, and lanes of each connection.
pub const RAILS: usize = 2;

const SECOND: u64 = 1_000_000_000;
const MILLISECOND: u64 = 1_000_000;
/// Long enough that no storm makes a connection fail.
const LIMITS: Limits = Limits {
    loss: 1000 * SECOND,
    probe: 5 * SECOND,
    first_rail: 1000 * SECOND,
};

/// Repeatable random numbers (SplitMix64).
pub struct Dice(pub u64);

impl Dice {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }
}

pub struct Bed {
    pub dice: Dice,
    pub now: u64,
    /// Time after which a NIC reports a silent wire, in nanoseconds.
    silence: u64,
    pub processes: [Process; 2],
    connections: Vec<Connection>,
    next_qp: u32,
    flights: Vec<Flight>,
}

pub struct Process {
    pub rails: Vec<ProcessRail>,
    paths: KnownPaths<&'static str>,
}

pub struct ProcessRail {
    pub nic: Nic,
    device: Device<u32>,
    /// The end of the question under way, and its handle.
    question: Option<(u64, u32)>,
    returning: Option<(u64, Return)>,
    /// Devices in which a call of a given-up attempt hangs.
    hanging: Vec<u32>,
}

struct Connection {
    ends: [End; 2],
    has_tcp: bool,
    /// Number of the TCP connection, so that frames of an earlier one are lost.
    tcp: u32,
    redial_at: Option<u64>,
}

struct End {
    process: usize,
    recovery: Recovery,
    lanes: Vec<Lane>,
}

#[derive(Default)]
struct Lane {
    used: Option<Qp>,
    new: Option<Qp>,
    job: Option<Job>,
    /// End of the call that stops the lost queue pairs.
    fence: Option<u64>,
    /// The test of the new queue pairs ends then, and the trial of their path.
    test: Option<u64>,
    trial: Option<u64>,
    /// Causes of the last changes, for messages.
    causes: VecDeque<String>,
    /// Time since which the wire carries nothing.
    dark_since: Option<u64>,
}

#[derive(Clone, Copy)]
struct Qp {
    number: u32,
    /// The device, for the NIC and for the machine.
    handle: u32,
    generation: u32,
    /// Number of the peer's queue pair, once connected.
    peer: Option<u32>,
    /// Index of its address, once connected.
    gid_index: Option<u16>,
}

/// Call into a device for an attempt, until `ends_at` at least.
struct Job {
    ends_at: u64,
    handle: u32,
    generation: u32,
    kind: JobKind,
}

enum JobKind {
    Open,
    Answer(u32),
    Connect(u32),
}

/// A control frame on its way.
struct Flight {
    lands_at: u64,
    connection: usize,
    to: usize,
    frame: ControlFrame,
    /// The TCP connection, or the lane.
    by: Result<u32, LaneId>,
}

impl Bed {
    pub fn new(seed: u64, connections: usize, silence_ms: u64) -> Self {
        let end = |process, role| End {
            process,
            recovery: Recovery::new(role, LIMITS, RAILS),
            lanes: (0..RAILS).map(|_| Lane::default()).collect(),
        };
        let mut bed = Self {
            dice: Dice(seed),
            now: SECOND,
            silence: silence_ms * MILLISECOND,
            processes: std::array::from_fn(|_| Process::new()),
            connections: (0..connections)
                .map(|at| Connection {
                    // Every second connection goes the other way.
                    ends: [end(at % 2, Role::Sender), end(1 - at % 2, Role::Receiver)],
                    has_tcp: true,
                    tcp: 0,
                    redial_at: None,
                })
                .collect(),
            next_qp: 1,
            flights: Vec::new(),
        };
        for connection in &mut bed.connections {
            for lane in 0..RAILS {
                let numbers = [bed.next_qp, bed.next_qp + 1];
                bed.next_qp += 2;
                for side in [0, 1] {
                    connection.ends[side].lanes[lane].used = Some(Qp {
                        number: numbers[side],
                        handle: 0,
                        generation: 0,
                        peer: Some(numbers[1 - side]),
                        gid_index: Some(0),
                    });
                }
            }
        }
        bed
    }

    /// Breaks the TCP connections of all connections.
    pub fn break_tcp(&mut self) {
        for connection in &mut self.connections {
            connection.has_tcp = false;
            connection.tcp += 1;
        }
    }

    /// Lets time pass, in rounds of up to 20 ms. Panics if a connection fails.
    pub fn pass(&mut self, ms: u64) {
        let until = self.now + ms * MILLISECOND;
        while self.now < until {
            self.now += (1 + self.dice.below(20)) * MILLISECOND;
            self.land();
            for process in 0..2 {
                self.serve_devices(process);
            }
            for connection in 0..self.connections.len() {
                self.serve_tcp(connection);
                for side in [0, 1] {
                    self.serve(connection, side);
                }
            }
        }
    }

    /// Returns the reasons why the connections are not as at the start.
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        for rail in self.processes.iter().flat_map(|process| &process.rails) {
            if rail.device.opened().is_err() {
                faults.push(format!("{:?}, {:?}", rail.nic, rail.device));
            }
        }
        for (at, connection) in self.connections.iter().enumerate() {
            for (side, end) in connection.ends.iter().enumerate() {
                for lane in LaneId::all(RAILS) {
                    let state = end.recovery.state(lane).unwrap();
                    if !matches!(state, State::Up { .. }) || !self.carries(at, side, lane) {
                        let causes = &end.lanes[lane.index()].causes;
                        faults.push(format!(
                            "connection {at}, side {side}, lane {lane}: {state:?}, {causes:?}"
                        ));
                    }
                }
                if !end.recovery.is_whole() {
                    faults.push(format!(
                        "connection {at}, side {side}: a message is not confirmed"
                    ));
                }
            }
        }
        faults
    }

    fn time(&self) -> Instant {
        Instant::from_nanos(self.now)
    }

    fn soon(&mut self) -> u64 {
        self.now + (1 + self.dice.below(30)) * MILLISECOND
    }

    /// Does one process's round for its devices, and tells its connections.
    fn serve_devices(&mut self, process: usize) {
        let now = self.time();
        for at in 0..RAILS {
            let (question_end, return_end) = (self.soon(), self.soon());
            let rail = &mut self.processes[process].rails[at];
            rail.work(self.now, self.dice.below(8) > 0);
            let mut changes = Vec::new();
            while let Some(step) = rail.device.poll(rail.nic.entry(), now) {
                match step {
                    Step::WarnStuck(_) => {}
                    Step::Tell(change) => changes.push(change),
                    Step::AskPort(handle) => {
                        rail.question = Some((question_end, handle));
                    }
                    Step::Return(how) => rail.returning = Some((return_end, how)),
                }
            }
            for change in changes {
                self.tell(process, at, change);
            }
        }
    }

    fn tell(&mut self, process: usize, rail: usize, change: PortChange) {
        let now = self.now;
        let lane = LaneId::new(rail).unwrap();
        if change == PortChange::Up {
            self.processes[process]
                .paths
                .forget(RailId::new(rail).unwrap());
        }
        let ends = self
            .connections
            .iter_mut()
            .flat_map(|connection| &mut connection.ends)
            .filter(|end| end.process == process);
        for end in ends {
            match change {
                PortChange::Up => end.recovery.port_up(lane, now),
                PortChange::Down => end.recovery.rail_down(lane, "port down", now),
                PortChange::Removed => end.recovery.rail_down(lane, "device removed", now),
            }
        }
    }

    fn serve_tcp(&mut self, at: usize) {
        let now = self.now;
        let redial_at = now + 250 * MILLISECOND;
        let connection = &mut self.connections[at];
        if connection.has_tcp {
            return;
        }
        for end in &mut connection.ends {
            end.recovery.bootstrap_away(false, now);
        }
        let need = connection.ends[0].recovery.bootstrap_need(false, now);
        match connection.redial_at {
            Some(when) if now >= when => {
                connection.redial_at = None;
                connection.has_tcp = true;
                for end in &mut connection.ends {
                    end.recovery.bootstrap_opened();
                }
            }
            None if need != Need::No => connection.redial_at = Some(redial_at),
            _ => {}
        }
    }

    fn land(&mut self) {
        let now = self.now;
        let (landing, flying) = std::mem::take(&mut self.flights)
            .into_iter()
            .partition(|flight| flight.lands_at <= now);
        self.flights = flying;
        let landing: Vec<Flight> = landing;
        for flight in landing {
            let connection = &self.connections[flight.connection];
            let arrives = match flight.by {
                Ok(tcp) => connection.has_tcp && connection.tcp == tcp,
                Err(lane) => self.carries(flight.connection, 1 - flight.to, lane),
            };
            if arrives {
                let end = &mut self.connections[flight.connection].ends[flight.to];
                end.recovery.receive_frame(&flight.frame, 0, now);
            }
        }
    }

    /// Returns true if the queue pairs in use on a lane carry data from a side to its peer.
    fn carries(&self, connection: usize, side: usize, lane: LaneId) -> bool {
        let qp = self.lane(connection, side, lane).used;
        qp.is_some_and(|qp| self.is_acknowledged(connection, side, lane, qp))
    }

    /// Returns true if the peer's NIC acknowledges what a queue pair sends.
    fn is_acknowledged(&self, connection: usize, side: usize, lane: LaneId, qp: Qp) -> bool {
        let theirs = self.lane(connection, 1 - side, lane);
        let peer = [theirs.used, theirs.new]
            .into_iter()
            .flatten()
            .find(|theirs| qp.peer == Some(theirs.number) && theirs.peer == Some(qp.number));
        peer.is_some_and(|peer| {
            [(side, qp), (1 - side, peer)]
                .into_iter()
                .all(|(side, qp)| {
                    let nic = self.nic(connection, side, lane);
                    let has_address = qp.gid_index.is_some() && qp.gid_index == nic.gid_index;
                    nic.is_port_active && has_address && nic.outcome(qp.handle).is_ok()
                })
        })
    }

    fn lane(&self, connection: usize, side: usize, lane: LaneId) -> &Lane {
        &self.connections[connection].ends[side].lanes[lane.index()]
    }

    fn rail(&mut self, connection: usize, side: usize, lane: LaneId) -> &mut ProcessRail {
        let process = self.connections[connection].ends[side].process;
        &mut self.processes[process].rails[lane.index()]
    }

    fn nic(&self, connection: usize, side: usize, lane: LaneId) -> &Nic {
        let process = self.connections[connection].ends[side].process;
        &self.processes[process].rails[lane.index()].nic
    }

    /// Does one round of one end of a connection.
    fn serve(&mut self, connection: usize, side: usize) {
        for lane in LaneId::all(RAILS) {
            self.watch(connection, side, lane);
        }
        self.act(connection, side);
        for lane in LaneId::all(RAILS) {
            self.work_on_fence(connection, side, lane);
            self.work_on_job(connection, side, lane);
            self.work_on_test(connection, side, lane);
        }
        self.act(connection, side);
        let now = self.now;
        self.connections[connection].ends[side].recovery.tick(now);
        self.act(connection, side);
        self.send(connection, side);
    }

    /// Reports a lane whose device is away, whose address is gone, or whose wire is silent.
    fn watch(&mut self, connection: usize, side: usize, lane: LaneId) {
        let is_dark = !self.carries(connection, side, lane);
        let (now, silence) = (self.now, self.silence);
        let used = self.lane(connection, side, lane).used;
        let has_now = self.nic(connection, side, lane).gid_index;
        let device = &self.rail(connection, side, lane).device;
        let is_away = used.is_some_and(|qp| device.presence_of(qp.generation) != Presence::Here);
        let gid_index = used.and_then(|qp| qp.gid_index);
        let is_gid_gone = gid_index.is_some_and(|index| !device.has_gid(&source(index)));
        let end = &mut self.connections[connection].ends[side];
        let known = &mut end.lanes[lane.index()];
        let is_up = matches!(end.recovery.state(lane), Some(State::Up { .. }));
        if !is_up || !is_dark {
            known.dark_since = None;
        }
        if is_away {
            end.recovery.rail_down(lane, "device away", now);
        } else if is_gid_gone {
            assert_ne!(gid_index, has_now, "lost although the address is there");
            end.recovery.rail_down(lane, "address gone", now);
        } else if is_up && is_dark {
            let since = *known.dark_since.get_or_insert(now);
            if now - since >= silence {
                end.recovery.rail_down(lane, "not acknowledged", now);
            }
        }
    }

    fn act(&mut self, connection: usize, side: usize) {
        while let Some(action) = self.connections[connection].ends[side]
            .recovery
            .poll_action()
        {
            self.execute(connection, side, action);
        }
    }

    fn execute(&mut self, connection: usize, side: usize, action: Action) {
        let (now, soon) = (self.now, self.soon());
        match action {
            Action::Fence(lane) => {
                self.connections[connection].ends[side].lanes[lane.index()].fence = Some(soon);
            }
            Action::Resend(lane, _) => self.check_stopped(connection, lane),
            Action::OpenQps(lane) => {
                if let Err(why) = self.begin(connection, side, lane, JobKind::Open) {
                    let end = &mut self.connections[connection].ends[side];
                    end.recovery.opened(lane, Err(Cause::Failed(why)), now);
                }
            }
            Action::AnswerQps(lane, _, theirs) => {
                let kind = JobKind::Answer(theirs.qps[0].number);
                if let Err(why) = self.begin(connection, side, lane, kind) {
                    let end = &mut self.connections[connection].ends[side];
                    end.recovery.answered(lane, Err(Cause::Failed(why)), now);
                }
            }
            Action::ConnectQps(lane, answer) => {
                let kind = JobKind::Connect(answer.end.qps[0].number);
                if let Err(why) = self.begin(connection, side, lane, kind) {
                    let end = &mut self.connections[connection].ends[side];
                    end.recovery.connected(lane, Err(Cause::Failed(why)), now);
                }
            }
            Action::Activate(lane) => self.activate(connection, side, lane),
            Action::DropQps(lane) => self.drop_qps(connection, side, lane),
            Action::Fail(failure) => panic!("connection {connection}, side {side}: {failure:?}"),
            Action::PeerGone | Action::PeerClosed(_) => {
                panic!("connection {connection}, side {side}: {action:?}")
            }
            Action::StallQuery(_) | Action::StallReply(_) => {}
            Action::Changed(changed) => {
                let lane = changed.lane.index();
                let causes = &mut self.connections[connection].ends[side].lanes[lane].causes;
                causes.push_back(format!(
                    "{:?} at {}",
                    changed.cause,
                    changed.at / MILLISECOND
                ));
                if causes.len() > 6 {
                    causes.pop_front();
                }
            }
            Action::Log(_) => {}
        }
    }

    /// Checks that nothing that was posted on a lane's lost queue pairs can arrive.
    fn check_stopped(&self, connection: usize, lane: LaneId) {
        for side in [0, 1] {
            let state = self.connections[connection].ends[side].recovery.state(lane);
            assert!(
                self.lane(connection, side, lane).used.is_none(),
                "connection {connection}, lane {lane}: resent while side {side} is {state:?}"
            );
        }
    }

    /// Begins a call of an attempt.
    fn begin(
        &mut self,
        connection: usize,
        side: usize,
        lane: LaneId,
        kind: JobKind,
    ) -> Result<(), String> {
        let ends_at = self.soon();
        let now = self.time();
        let process = self.connections[connection].ends[side].process;
        let path = self.path(connection, side, lane);
        let limit = Duration::from_secs(6);
        let refused = |why| format!("{why:?}");
        let paths = &mut self.processes[process].paths;
        let trial = match kind {
            JobKind::Open => paths.is_due(path, now).map(|()| None),
            JobKind::Answer(_) | JobKind::Connect(_) => paths.retry(path, limit, now),
        }
        .map_err(refused)?;
        let rail = &self.processes[process].rails[lane.index()];
        let (handle, generation) = rail.device.opened().map_err(|why| format!("{why:?}"))?;
        if !rail.hanging.is_empty() {
            if let Some(trial) = trial {
                self.processes[process].paths.end_trial(trial);
            }
            return Err("a call hangs".to_owned());
        }
        let lane = &mut self.connections[connection].ends[side].lanes[lane.index()];
        lane.trial = trial.or(lane.trial);
        lane.job = Some(Job {
            ends_at,
            handle,
            generation,
            kind,
        });
        Ok(())
    }

    fn path(&self, connection: usize, side: usize, lane: LaneId) -> PathId {
        let peer = self.connections[connection].ends[1 - side].process as u8;
        PathId {
            rail: RailId::new(lane.index()).unwrap(),
            peer_gid: [peer + 1; 16],
        }
    }

    fn end_trial(&mut self, connection: usize, side: usize, lane: LaneId) {
        let process = self.connections[connection].ends[side].process;
        let lane = &mut self.connections[connection].ends[side].lanes[lane.index()];
        if let Some(trial) = lane.trial.take() {
            self.processes[process].paths.end_trial(trial);
        }
    }

    fn work_on_job(&mut self, connection: usize, side: usize, lane: LaneId) {
        let (now, at) = (self.now, lane.index());
        let Some(job) = self.connections[connection].ends[side].lanes[at].job.take() else {
            return;
        };
        let rail = self.rail(connection, side, lane);
        let outcome = rail.nic.outcome(job.handle);
        if now < job.ends_at || rail.nic.is_silent && outcome.is_ok() {
            self.connections[connection].ends[side].lanes[at].job = Some(job);
            return;
        }
        let gid_index = rail.nic.gid_index;
        match outcome {
            Ok(()) => rail.device.gids_read(rail.nic.gids()),
            Err(error) => {
                rail.device.call_failed(error, job.generation);
                self.end_trial(connection, side, lane);
            }
        }
        let outcome = outcome.map_err(|error| format!("{error:?}"));
        let outcome = outcome.and_then(|()| gid_index.map(|_| ()).ok_or("no address".to_owned()));
        let number = self.next_qp;
        self.next_qp += 1;
        let test_ends = self.soon();
        let (handle, generation) = (job.handle, job.generation);
        let end = &mut self.connections[connection].ends[side];
        let known = &mut end.lanes[at];
        let mut make = |peer| {
            known.new = Some(Qp {
                number,
                handle,
                generation,
                peer,
                gid_index: peer.and(gid_index),
            });
        };
        match job.kind {
            JobKind::Open => {
                let outcome = outcome.map(|()| {
                    make(None);
                    (advert(), lane_end(number))
                });
                end.recovery
                    .opened(lane, outcome.map_err(Cause::Failed), now);
            }
            JobKind::Answer(peer) => {
                let outcome = outcome.map(|()| {
                    make(Some(peer));
                    answer(number)
                });
                end.recovery
                    .answered(lane, outcome.map_err(Cause::Failed), now);
            }
            JobKind::Connect(peer) => {
                let outcome = outcome.and_then(|()| match &mut known.new {
                    Some(new) => {
                        (new.peer, new.gid_index) = (Some(peer), gid_index);
                        known.test = Some(test_ends);
                        Ok(())
                    }
                    None => Err("no queue pairs".to_owned()),
                });
                end.recovery
                    .connected(lane, outcome.map_err(Cause::Failed), now);
            }
        }
    }

    fn work_on_test(&mut self, connection: usize, side: usize, lane: LaneId) {
        let (now, at) = (self.now, lane.index());
        let known = self.lane(connection, side, lane);
        let (Some(ends_at), Some(qp)) = (known.test, known.new) else {
            return;
        };
        let passes = self.is_acknowledged(connection, side, lane, qp);
        let is_late = now >= ends_at + self.silence;
        if now < ends_at || !passes && !is_late {
            return;
        }
        let (path, time) = (self.path(connection, side, lane), self.time());
        let end = &mut self.connections[connection].ends[side];
        let paths = &mut self.processes[end.process].paths;
        end.lanes[at].test = None;
        let outcome = if passes {
            paths.connected(path, Connected::Resolved, time);
            paths.carried(path, time);
            Ok(())
        } else {
            paths.silent(path, "silent", time);
            Err("the test is not acknowledged".to_owned())
        };
        end.recovery
            .probed(lane, outcome.map_err(Cause::Failed), now);
        self.end_trial(connection, side, lane);
    }

    fn activate(&mut self, connection: usize, side: usize, lane: LaneId) {
        let (now, time, path) = (self.now, self.time(), self.path(connection, side, lane));
        let end = &mut self.connections[connection].ends[side];
        let known = &mut end.lanes[lane.index()];
        assert!(known.used.is_none(), "lane {lane} gets queue pairs twice");
        known.used = known.new.take();
        let outcome = known.used.map(|_| ()).ok_or("no queue pairs".to_owned());
        if outcome.is_ok() {
            self.processes[end.process].paths.carried(path, time);
        }
        end.recovery
            .activated(lane, outcome.map_err(Cause::Failed), now);
        self.rail(connection, side, lane).device.ask_soon();
        self.end_trial(connection, side, lane);
    }

    fn drop_qps(&mut self, connection: usize, side: usize, lane: LaneId) {
        let known = &mut self.connections[connection].ends[side].lanes[lane.index()];
        known.new = None;
        known.test = None;
        if let Some(job) = known.job.take() {
            self.rail(connection, side, lane).hanging.push(job.handle);
        }
        self.end_trial(connection, side, lane);
    }

    /// Stops a lost rail's queue pairs, unless the device hangs or its state is not known.
    fn work_on_fence(&mut self, connection: usize, side: usize, lane: LaneId) {
        let (now, at) = (self.now, lane.index());
        let known = self.lane(connection, side, lane);
        if known.fence.is_none_or(|ends_at| now < ends_at) {
            return;
        }
        if let Some(qp) = known.used {
            let rail = self.rail(connection, side, lane);
            match rail.device.presence_of(qp.generation) {
                Presence::CutOff => return,
                Presence::Here => match rail.nic.outcome(qp.handle) {
                    Ok(()) if rail.nic.is_silent => return,
                    Ok(()) => {}
                    Err(error) => return rail.device.call_failed(error, qp.generation),
                },
                Presence::Gone => assert!(
                    !rail.nic.may_access_memory(qp.handle),
                    "a device is reported as gone, but its NIC may still write"
                ),
            }
        }
        let end = &mut self.connections[connection].ends[side];
        end.lanes[at].fence = None;
        end.lanes[at].used = None;
        end.recovery.fenced(lane, Received::default(), now);
    }

    fn send(&mut self, connection: usize, side: usize) {
        let (now, lands_at) = (self.now, self.soon());
        let state = &mut self.connections[connection];
        let (has_tcp, tcp) = (state.has_tcp, state.tcp);
        let recovery = &mut state.ends[side].recovery;
        let (frame, by_tcp) = match recovery.poll_frame(now) {
            None => return,
            Some(Frame::First(frame)) => (frame, has_tcp),
            Some(Frame::Repeated(frame)) => (frame, false),
        };
        let lanes: Vec<LaneId> = recovery.rails_up().collect();
        let flight = |by| Flight {
            // Frames do not overtake each other.
            lands_at: if by == Ok(tcp) {
                now + MILLISECOND
            } else {
                lands_at
            },
            connection,
            to: 1 - side,
            frame: frame.clone(),
            by,
        };
        if by_tcp {
            self.flights.push(flight(Ok(tcp)));
        } else {
            self.flights
                .extend(lanes.into_iter().map(|lane| flight(Err(lane))));
        }
    }
}

impl Process {
    fn new() -> Self {
        Self {
            rails: (0..RAILS).map(|_| ProcessRail::new()).collect(),
            paths: KnownPaths::default(),
        }
    }
}

impl ProcessRail {
    fn new() -> Self {
        Self {
            nic: Nic::new(),
            device: Device::new(0, Some(0)),
            question: None,
            returning: None,
            hanging: Vec::new(),
        }
    }

    /// Reads events, and ends the calls whose time has come. `registers` is false if the memory of
    /// a returned device cannot be registered.
    fn work(&mut self, now: u64, registers: bool) {
        while let Some(event) = self.nic.take_event(self.device.source_of_events()) {
            self.device.event(event);
        }
        let nic = &self.nic;
        self.hanging
            .retain(|handle| nic.is_silent && nic.outcome(*handle).is_ok());
        if let Some((ends_at, handle)) = self.question
            && now >= ends_at
        {
            let outcome = nic.outcome(handle);
            if !nic.is_silent || outcome.is_err() {
                self.question = None;
                let entry = nic.entry();
                self.device.answered(outcome.map_err(Some), entry);
                self.device
                    .port_answered(outcome.is_ok().then(|| nic.port_answer()));
            }
        }
        if let Some((ends_at, how)) = self.returning
            && now >= ends_at
        {
            self.returning = None;
            let found = match (how, nic.present) {
                (Return::Resume | Return::FirstUse, _) => true,
                (Return::Reopen, Some((generation, Phase::Works))) => {
                    self.device.reopened(generation, nic.entry());
                    true
                }
                (Return::Reopen, _) => false,
            };
            self.device.end_return(match (found, registers) {
                (false, _) => Returned::NotFound,
                (true, false) => Returned::NotRegistered,
                (true, true) => Returned::Registered,
            });
        }
    }
}

fn advert() -> RailAdvert {
    RailAdvert {
        name: "a".into(),
        phys_port: "p0".into(),
        attachment: Attachment {
            link: 0,
            link_mbps: 1,
            cable: 0,
            port_mbps: 1,
        },
        speed_mbps: 1,
        mtu_bytes: 1024,
        addresses: Vec::new(),
        is_usable: true,
    }
}

fn lane_end(number: u32) -> LaneEnd {
    LaneEnd {
        qps: vec![QpEnd { number, psn: 1 }],
        mailbox_rkey: 7,
    }
}

fn answer(number: u32) -> JoinAnswer {
    JoinAnswer {
        connector_gid: [1; 16],
        acceptor_gid: [2; 16],
        mtu_bytes: 1024,
        end: lane_end(number),
        epoch: Epoch::default(),
    }
}
