//! New queue pairs for a rail that returns.
//!
//! The connecting side makes its own and asks. The accepting side makes its own, connects them and answers. Then the
//! connecting side connects its own and tests them. Each step asks the device, whose firmware may not answer, or the
//! kernel, which may look for an address for a second. So a thread of its own does it (a [`Job`]), and the driver
//! takes the result when it is there. If the attempt has ended by then, the thread drops what it made.

use super::Driver;
use crate::comm::datapath::lane::{Lane, Role, Route};
use crate::comm::datapath::test_write::{LaneTest, Tested};
use crate::comm::process::Process;
use crate::comm::rail::backoff::{PathId, SEARCH, Trial};
use crate::comm::rail::{Look, Rail};
use crate::comm::recovery::attempt::{Asked, Attempt, Done, Stage, Way};
use crate::comm::threads;
use crate::error::{Error, Result};
use crate::flow::pairing::{self, Pair};
use crate::flow::recovery::Answer;
use crate::interfaces;
use crate::verbs::{CompletionBuffer, Region};
use crate::wire::cts::Epoch;
use crate::wire::fields::{LaneEnd, Priority, RailAdvert};
use crate::wire::ids::LaneId;
use std::sync::Arc;
use std::sync::mpsc::{TryRecvError, sync_channel};
use std::time::Instant;

/// A thread's copy of what it needs for one step of an attempt.
struct Job {
    process: Arc<Process>,
    rail: Arc<Rail>,
    peer_rail: String,
    role: Role,
    priority: Priority,
    queue_count: usize,
    /// The memory of this side's mailbox.
    region: Arc<Region>,
    /// Largest path MTU in bytes of the paths that the last attempts went by, where one is known.
    largest_mtu: Option<u32>,
}

impl Driver {
    /// Begins the connecting side's new queue pairs. [`Self::look_at_attempts`] takes the result.
    ///
    /// # Errors
    /// The reason why the attempt is put off.
    pub(super) fn open_qps(&mut self, lane: LaneId, now: Instant) -> std::result::Result<(), String> {
        self.rails[lane.index()].begins_attempt();
        // Before queue pairs are made on either side that have nowhere to go.
        if let Err(error) = self.is_due(lane, now) {
            self.rails[lane.index()].stage = Stage::PutOff;
            return Err(error.to_string());
        }
        self.start(lane, now, |job| Done::Opened(job.ask().map(Box::new)));
        Ok(())
    }

    /// Begins the accepting side's new queue pairs, for those of the peer's.
    pub(super) fn answer_qps(&mut self, lane: LaneId, theirs: Box<RailAdvert>, end: LaneEnd, now: Instant) {
        let managed = &mut self.rails[lane.index()];
        managed.answers += 1;
        managed.begins_attempt();
        let answers = managed.answers;
        self.start(lane, now, move |job| job.answer(&theirs, &end, answers, now));
    }

    /// Begins to connect the connecting side's new queue pairs to those of the peer's answer.
    ///
    /// # Errors
    /// The reason why this cannot be.
    pub(super) fn connect_qps(
        &mut self,
        lane: LaneId,
        answer: Answer,
        now: Instant,
    ) -> std::result::Result<(), String> {
        let Some(Attempt::Asked(asked)) = self.rails[lane.index()].attempt.take() else {
            return Err("there are no new queue pairs".to_owned());
        };
        self.on_path(|path, _| path.take_epoch(lane, answer.epoch));
        let way = Way { peer_gid: answer.acceptor_gid, mtu_bytes: answer.mtu_bytes };
        let managed = &mut self.rails[lane.index()];
        managed.goes_by(way);
        let trial = right_to_try(&self.process, managed.path(way), now).map_err(|error| error.to_string())?;
        self.start(lane, now, move |job| {
            let (lane, outcome) = job.connect(*asked, &answer);
            Done::Connected { lane: Box::new(lane), way, trial, outcome }
        });
        Ok(())
    }

    /// Takes the results of the threads, and looks at the tests of new queue pairs.
    pub(super) fn look_at_attempts(&mut self, now: Instant, at: u64) {
        let mut buffer = CompletionBuffer::new();
        for lane in self.lanes() {
            self.take_result(lane, now, at);
            self.look_at_test(lane, &mut buffer, now, at);
        }
    }

    /// The new queue pairs of a rail, which this or the data path keeps. Those that a thread works on are its own to drop.
    pub(super) fn take_new(&mut self, lane: LaneId) -> Option<Lane> {
        match self.rails[lane.index()].attempt.take() {
            Some(Attempt::Working(_)) => None,
            Some(Attempt::Asked(asked)) => Some(asked.lane),
            Some(Attempt::Testing(test)) => Some(test.lane),
            None => self.on_path(|path, _| path.rails().status.take(lane))?,
        }
    }

    fn start(&mut self, lane: LaneId, now: Instant, step: impl FnOnce(&Job) -> Done + Send + 'static) {
        let managed = &self.rails[lane.index()];
        let known = managed.ways.iter().flatten().map(|way| managed.path(*way));
        let job = Job {
            process: Arc::clone(&self.process),
            rail: Arc::clone(&managed.rail),
            peer_rail: managed.peer_rail.clone(),
            role: self.role,
            priority: self.priority,
            queue_count: managed.queue_count,
            region: Arc::clone(&self.mailboxes.region),
            largest_mtu: known.filter_map(|path| self.process.backoff.largest_mtu(path)).min(),
        };
        let (tell, done) = sync_channel(1);
        self.rails[lane.index()].attempt = Some(Attempt::Working(done));
        // If the attempt has ended, the result is dropped here.
        threads::detach("spark-connect", move || drop(tell.send(step(&job))));
        // If no thread could be started, the step is done.
        let at = self.clock(now);
        self.take_result(lane, now, at);
    }

    fn take_result(&mut self, lane: LaneId, now: Instant, at: u64) {
        let Some(Attempt::Working(done)) = &self.rails[lane.index()].attempt else { return };
        match done.try_recv() {
            Ok(done) => self.finish(lane, done, now, at),
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => {
                self.give_up(Error::Internal("internal error in a thread that connects queue pairs".to_owned()));
            }
        }
    }

    fn finish(&mut self, lane: LaneId, done: Done, now: Instant, at: u64) {
        let managed = &mut self.rails[lane.index()];
        managed.attempt = None;
        match done {
            Done::Opened(opened) => {
                let outcome = opened.map_err(|error| error.to_string()).map(|asked| {
                    let advert = asked.advert.clone();
                    let end = asked.lane.end();
                    managed.attempt = Some(Attempt::Asked(asked));
                    (advert, end)
                });
                self.recovery.opened(lane, outcome, at);
            }
            Done::PutOff { way, why } => {
                managed.goes_by(way);
                managed.stage = Stage::PutOff;
                self.recovery.answered(lane, Err(why), at);
            }
            // The right to try the path ends here, when the others can see the result.
            Done::Answered { way, trial: _trial, outcome } => {
                if let Some(way) = way {
                    managed.goes_by(way);
                    self.process.backoff.connected(managed.path(way), outcome.as_ref().err(), now);
                }
                let outcome = outcome.map_err(|error| error.to_string()).and_then(|new| self.keep(lane, *new));
                self.recovery.answered(lane, outcome, at);
            }
            Done::Connected { lane: new, way, trial, outcome } => {
                let path = managed.path(way);
                self.process.backoff.connected(path, outcome.as_ref().err(), now);
                let (limit, mailboxes) = (self.process.config.probe_timeout, &self.mailboxes);
                let test =
                    outcome.and_then(|()| LaneTest::start(*new, path, mailboxes, way.mtu_bytes, limit, trial, now));
                let outcome = test.map_err(|error| error.to_string());
                let outcome = outcome.map(|test| managed.attempt = Some(Attempt::Testing(Box::new(test))));
                self.recovery.connected(lane, outcome, at);
            }
        }
    }

    /// Gives the accepting side's new queue pairs to the data path to keep.
    fn keep(&mut self, lane: LaneId, (new, mut answer): (Lane, Answer)) -> std::result::Result<Answer, String> {
        let has_failed = || "the connection has failed".to_owned();
        let opening = new.opening();
        let has_new_keys = self.rails[lane.index()].granted.replace(opening) != Some(opening);
        let kept = self.on_path(|path, context| {
            let epoch = path.renewed_epoch(context, lane, has_new_keys)?;
            Ok(path.rails().status.keep(lane, new).then_some(epoch))
        });
        match kept {
            Some(Ok(Some(epoch))) => {
                answer.epoch = epoch;
                Ok(answer)
            }
            Some(Err(error)) => {
                self.give_up(error);
                Err(has_failed())
            }
            Some(Ok(None)) | None => Err(has_failed()),
        }
    }

    fn look_at_test(&mut self, lane: LaneId, buffer: &mut CompletionBuffer, now: Instant, at: u64) {
        let (process, peer, managed) = (&self.process, &self.context.peer.name, &mut self.rails[lane.index()]);
        let Some(Attempt::Testing(test)) = &mut managed.attempt else { return };
        let outcome = match test.look(&self.mailboxes, &process.backoff, buffer, now) {
            Tested::UnderWay => return,
            Tested::Carries => Ok(()),
            Tested::Narrow(why) => {
                let rail = (managed.rail.id, managed.rail.name());
                process.log.warn_of_small_packets(peer, (rail.0, &rail.1), &managed.peer_rail, &why);
                Err(why)
            }
            Tested::Silent(why) | Tested::Failed(why) => Err(why),
        };
        self.recovery.probed(lane, outcome, at);
    }

    /// Whether one of the paths that the rail's attempts go by may be tried now; else why the newest may not. Of one path alone nothing is
    /// concluded: the next attempt may go by another address, which the accepting side chooses.
    fn is_due(&self, lane: LaneId, now: Instant) -> Result<()> {
        let managed = &self.rails[lane.index()];
        let [Some(newest), Some(before)] = managed.ways else { return Ok(()) };
        let is_due = |way| self.process.backoff.is_due(managed.path(way), now);
        is_due(newest).or_else(|why| is_due(before).map_err(|_| why))
    }
}

impl Job {
    /// Makes queue pairs to ask the peer with.
    fn ask(&self) -> Result<Asked> {
        let (look, mut advert) = self.look()?;
        // The accepting side chooses the address, and takes the smaller path MTU of the two sides.
        advert.mtu_bytes = self.largest_mtu.map_or(advert.mtu_bytes, |largest| largest.min(advert.mtu_bytes));
        Ok(Asked { lane: self.open()?, look, advert })
    }

    /// Makes queue pairs for those of the peer's, and connects them, unless the path rests.
    fn answer(&self, theirs: &RailAdvert, end: &LaneEnd, answers: u32, now: Instant) -> Done {
        let (look, pair) = match self.pair(theirs, answers) {
            Ok(found) => found,
            Err(error) => return Done::Answered { way: None, trial: None, outcome: Err(error) },
        };
        let path = PathId { rail: self.rail.id, peer_gid: pair.connector_gid };
        let backoff = &self.process.backoff;
        let mtu_bytes = backoff.largest_mtu(path).map_or(pair.mtu_bytes, |largest| largest.min(pair.mtu_bytes));
        let way = Way { peer_gid: pair.connector_gid, mtu_bytes };
        let trial = match right_to_try(&self.process, path, now) {
            Ok(trial) => trial,
            Err(error) => return Done::PutOff { way, why: error.to_string() },
        };
        let route = Route {
            look: &look,
            gid: pair.acceptor_gid,
            peer_gid: way.peer_gid,
            mtu_bytes,
            ends: &end.qps,
            priority: self.priority,
        };
        let joined = self.open().and_then(|mut new| {
            new.peer_mailbox_rkey = end.mailbox_rkey;
            new.connect(self.role, &self.process.config, &route)?;
            Ok(new)
        });
        let outcome = joined.map(|new| {
            let Pair { connector_gid, acceptor_gid, .. } = pair;
            let answer = Answer { connector_gid, acceptor_gid, mtu_bytes, end: new.end(), epoch: Epoch::default() };
            Box::new((new, answer))
        });
        Done::Answered { way: Some(way), trial, outcome }
    }

    /// Connects queue pairs to those of the peer's answer.
    fn connect(&self, Asked { mut lane, look, .. }: Asked, answer: &Answer) -> (Lane, Result<()>) {
        let route = Route {
            look: &look,
            gid: answer.connector_gid,
            peer_gid: answer.acceptor_gid,
            mtu_bytes: answer.mtu_bytes,
            ends: &answer.end.qps,
            priority: self.priority,
        };
        lane.peer_mailbox_rkey = answer.end.mailbox_rkey;
        let outcome = lane.connect(self.role, &self.process.config, &route);
        (lane, outcome)
    }

    /// The addresses to use with the peer's rail.
    fn pair(&self, theirs: &RailAdvert, answers: u32) -> Result<(Look, Pair)> {
        let (look, ours) = self.look()?;
        let pair = pairing::pair_again(theirs, &ours, answers).ok_or_else(|| {
            let (theirs, ours) = (pairing::describe(std::slice::from_ref(theirs)), pairing::describe(&[ours]));
            Error::Missing(format!("no shared subnet: this host has {ours}, the peer has {theirs}"))
        })?;
        Ok((look, pair))
    }

    /// The rail as it is now.
    fn look(&self) -> Result<(Look, RailAdvert)> {
        let look = self.rail.look(&self.process.config, &interfaces::all()?)?;
        let advert = self.rail.advert(&look);
        Ok((look, advert))
    }

    fn open(&self) -> Result<Lane> {
        let mut new = Lane::open(&self.rail, self.role, self.queue_count)?;
        new.peer_rail.clone_from(&self.peer_rail);
        new.register_mailbox(&self.region)?;
        Ok(new)
    }
}

/// The right to try a path for all connections, where it was dead until now.
fn right_to_try(process: &Process, path: PathId, now: Instant) -> Result<Option<Trial>> {
    process.backoff.retry(path, SEARCH + process.config.probe_timeout, now)
}
