//! New queue pairs for a rail that returns.
//!
//! The connecting side creates queue pairs and describes them in a request (JOIN). The accepting
//! side creates its own, connects them to the connecting side's, and describes them in its answer
//! (JOINED). The connecting side then connects its queue pairs to the accepting side's, and tests
//! them.
//!
//! Each step may block: a device's firmware may not answer, and the kernel may take a second to
//! resolve an address. So a thread runs each step (a [`Job`]), and the driver takes the result
//! later. If the attempt has ended by then, the result is dropped with its queue pairs. While a
//! thread hangs in a device, no other step starts on that device.

use super::Driver;
use crate::comm::datapath::lane::{Lane, Role, Route};
use crate::comm::datapath::shared::NotBorrowed;
use crate::comm::datapath::test_write::{LaneTest, TestResult};
use crate::comm::process::Process;
use crate::comm::rail::backoff::Trial;
use crate::comm::rail::{Rail, RailSnapshot};
use crate::comm::recovery::attempt::{Attempt, Done, NewQueuePairs, Worker};
use crate::comm::threads;
use host::error::{Error, Internal, Missing, Result};
use host::interfaces;
use proto::backoff::{PathId, SEARCH};
use proto::flow::pairing::{self, Pair};
use proto::flow::recovery::{Cause, PathChoice};
use proto::time::Instant;
use proto::wire::control::JoinAnswer;
use proto::wire::cts::Epoch;
use proto::wire::fields::{LaneEnd, Priority, RailAdvert};
use proto::wire::ids::LaneId;
use std::sync::Arc;
use std::sync::mpsc::{TryRecvError, sync_channel};
use verbs::{CompletionBuffer, Region};

struct Job {
    process: Arc<Process>,
    rail: Arc<Rail>,
    peer_rail: String,
    role: Role,
    priority: Priority,
    queue_count: usize,
    region: Arc<Region>,
    /// Path MTU limit in bytes: the smallest one known for the paths of the last two attempts.
    /// `None` if neither path is known to lose large packets.
    largest_mtu: Option<u32>,
}

impl Driver {
    /// Starts to create the connecting side's queue pairs. The error is the reason why the attempt
    /// cannot start now.
    pub(super) fn open_qps(
        &mut self,
        lane: LaneId,
        now: Instant,
    ) -> std::result::Result<(), Cause> {
        // Checked before the queue pairs exist: back-off could later forbid to connect them.
        self.is_due(lane, now)
            .map_err(|error| Cause::Deferred(error.to_string()))?;
        self.start(lane, now, |job| Done::Opened(job.ask().map(Box::new)))
    }

    /// Starts to create the accepting side's queue pairs and to connect them to the peer's queue
    /// pairs. The error is the reason why the attempt has failed.
    pub(super) fn answer_qps(
        &mut self,
        lane: LaneId,
        theirs: Box<RailAdvert>,
        end: LaneEnd,
        now: Instant,
    ) -> std::result::Result<(), Cause> {
        let answers = self.recovery.attempts(lane).answers();
        self.start(lane, now, move |job| {
            job.answer(&theirs, &end, answers, now)
        })
    }

    /// Starts to connect the connecting side's queue pairs to the peer's queue pairs. The error is
    /// the reason why the attempt has failed.
    pub(super) fn connect_qps(
        &mut self,
        lane: LaneId,
        answer: JoinAnswer,
        now: Instant,
    ) -> std::result::Result<(), Cause> {
        let Some(Attempt::Requested(asked)) = self.rails[lane.index()].attempt.take() else {
            return Err(Cause::Failed(
                "this attempt has no queue pairs to connect".to_owned(),
            ));
        };
        let choice = PathChoice {
            peer_gid: answer.acceptor_gid,
            mtu_bytes: answer.mtu_bytes,
        };
        self.recovery.path_chosen(lane, choice);
        let path = self.rails[lane.index()].path(choice);
        let trial = begin_trial(&self.process, path, now).map_err(failed)?;
        self.start(lane, now, move |job| {
            let (lane, outcome) = job.connect(*asked, &answer);
            Done::Connected {
                lane: Box::new(lane),
                choice,
                trial,
                outcome,
            }
        })
    }

    pub(super) fn poll_attempts(&mut self, now: Instant, now_ns: u64) {
        let mut buffer = CompletionBuffer::new();
        for lane in self.lanes() {
            self.take_result(lane, now, now_ns);
            self.hand_to_data_path(lane, now_ns);
            self.poll_test(lane, &mut buffer, now, now_ns);
        }
    }

    /// Starts a thread for a step of an attempt. Fails while another thread hangs in the rail's
    /// device.
    fn start(
        &mut self,
        lane: LaneId,
        now: Instant,
        step: impl FnOnce(&Job) -> Done + Send + 'static,
    ) -> std::result::Result<(), Cause> {
        let managed = &self.rails[lane.index()];
        let call = managed.rail.device.calls.begin(now).map_err(failed)?;
        let last_paths = self.recovery.attempts(lane).last_paths();
        let known = last_paths
            .into_iter()
            .flatten()
            .map(|choice| managed.path(choice));
        let job = Job {
            process: Arc::clone(&self.process),
            rail: Arc::clone(&managed.rail),
            peer_rail: managed.peer_rail.clone(),
            role: self.role,
            priority: self.priority,
            queue_count: managed.queue_count,
            region: Arc::clone(&self.mailboxes.region),
            largest_mtu: known
                .filter_map(|path| self.process.backoff.largest_mtu(path))
                .min(),
        };
        let (result_sender, result) = sync_channel(1);
        let worker = Worker::new(result, &managed.rail.device.calls, &call);
        self.rails[lane.index()].attempt = Some(Attempt::Working(worker));
        threads::detach("spark-connect", move || {
            // If the attempt was abandoned, `send` returns the result, and dropping it destroys the
            // queue pairs. The destruction may hang too, so `call` ends after it.
            drop(result_sender.send(step(&job)));
            drop(call);
        });
        // If no thread could be started, the step has run in `detach`, and its result is ready.
        let now_ns = self.clock(now);
        self.take_result(lane, now, now_ns);
        self.hand_to_data_path(lane, now_ns);
        Ok(())
    }

    fn take_result(&mut self, lane: LaneId, now: Instant, now_ns: u64) {
        let Some(Attempt::Working(worker)) = &mut self.rails[lane.index()].attempt else {
            return;
        };
        match worker.take() {
            Ok(done) => self.finish(lane, done, now, now_ns),
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => {
                self.give_up(Internal::WorkerPanic.into());
            }
        }
    }

    fn finish(&mut self, lane: LaneId, done: Done, now: Instant, now_ns: u64) {
        let managed = &mut self.rails[lane.index()];
        managed.attempt = None;
        match done {
            Done::Opened(opened) => {
                let outcome = opened.map_err(failed).map(|asked| {
                    let advert = asked.advert.clone();
                    let end = asked.lane.end();
                    managed.attempt = Some(Attempt::Requested(asked));
                    (advert, end)
                });
                self.recovery.opened(lane, outcome, now_ns);
            }
            Done::Deferred { choice, why } => {
                self.recovery.path_chosen(lane, choice);
                self.recovery
                    .answered(lane, Err(Cause::Deferred(why)), now_ns);
            }
            // `_trial`, the right to test the path, is dropped at the end of this arm. By then the
            // result is in `backoff`, where other connections see it.
            Done::Answered {
                choice,
                trial: _trial,
                outcome,
            } => {
                if let Some(choice) = choice {
                    self.recovery.path_chosen(lane, choice);
                    self.process.backoff.connected(
                        managed.path(choice),
                        outcome.as_ref().err(),
                        now,
                    );
                }
                match outcome {
                    Ok(new) => managed.attempt = Some(Attempt::Answered(new)),
                    Err(error) => self.recovery.answered(lane, Err(failed(error)), now_ns),
                }
            }
            Done::Connected {
                lane: new,
                choice,
                trial,
                outcome,
            } => {
                let path = managed.path(choice);
                self.process
                    .backoff
                    .connected(path, outcome.as_ref().err(), now);
                let limit = self.process.config.recovery.probe_timeout;
                let mailboxes = &self.mailboxes;
                let test = outcome.and_then(|()| {
                    LaneTest::start(*new, path, mailboxes, choice.mtu_bytes, limit, trial, now)
                });
                let outcome = test.map_err(failed);
                let outcome =
                    outcome.map(|test| managed.attempt = Some(Attempt::Testing(Box::new(test))));
                self.recovery.connected(lane, outcome, now_ns);
            }
        }
    }

    /// Gives the accepting side's new queue pairs to the data path, and the answer to recovery,
    /// with the epoch (the generation of the keys in CTS entries). If the data path is busy, the
    /// next round tries again.
    fn hand_to_data_path(&mut self, lane: LaneId, now_ns: u64) {
        let managed = &mut self.rails[lane.index()];
        let Some(Attempt::Answered(new)) = managed
            .attempt
            .take_if(|attempt| matches!(attempt, Attempt::Answered(_)))
        else {
            return;
        };
        let generation = new.0.generation();
        let has_new_keys = managed.cts_generation != Some(generation);
        let mut new = Some(new);
        let kept = self.on_path(|data_path, context| {
            let epoch = data_path.epoch_of(context, lane, has_new_keys)?;
            let Some((queue_pairs, answer)) = new.take().map(|new| *new) else {
                return Ok(None);
            };
            let is_kept = data_path.rails().status.keep(lane, queue_pairs);
            Ok(is_kept.then_some(JoinAnswer { epoch, ..answer }))
        });
        let managed = &mut self.rails[lane.index()];
        let outcome = match kept {
            Err(NotBorrowed::Busy) => return managed.attempt = new.map(Attempt::Answered),
            Ok(Ok(Some(answer))) => {
                managed.cts_generation = Some(generation);
                Ok(answer)
            }
            Ok(Err(error)) => {
                self.give_up(error);
                Err(Cause::ConnectionEnds)
            }
            Ok(Ok(None)) | Err(NotBorrowed::Broken) => Err(Cause::ConnectionEnds),
        };
        self.recovery.answered(lane, outcome, now_ns);
    }

    fn poll_test(
        &mut self,
        lane: LaneId,
        buffer: &mut CompletionBuffer,
        now: Instant,
        now_ns: u64,
    ) {
        let process = &self.process;
        let peer = &self.context.peer.name;
        let managed = &mut self.rails[lane.index()];
        let Some(Attempt::Testing(test)) = &mut managed.attempt else {
            return;
        };
        let outcome = match test.step(&self.mailboxes, &process.backoff, buffer, now) {
            TestResult::UnderWay => return,
            TestResult::Passed => Ok(()),
            TestResult::SmallMtu(why) => {
                let rail = (managed.rail.id, managed.rail.name());
                process.log.warn_of_small_packets(
                    peer,
                    (rail.0, &rail.1),
                    &managed.peer_rail,
                    &why,
                );
                Err(why)
            }
            TestResult::Silent(why) | TestResult::Failed(why) => Err(why),
        };
        self.recovery
            .probed(lane, outcome.map_err(Cause::Failed), now_ns);
    }

    /// Checks that at least one of the last two paths may be tested now. One is enough, because the
    /// accepting side may choose either. The check passes until two attempts have chosen a path.
    /// The error is the reason why the newest path may not be tested.
    fn is_due(&self, lane: LaneId, now: Instant) -> Result<()> {
        let managed = &self.rails[lane.index()];
        let [Some(newest), Some(before)] = self.recovery.attempts(lane).last_paths() else {
            return Ok(());
        };
        let is_due = |choice| self.process.backoff.is_due(managed.path(choice), now);
        is_due(newest).or_else(|why| is_due(before).map_err(|_| why))
    }
}

impl Job {
    fn ask(&self) -> Result<NewQueuePairs> {
        let (snapshot, mut advert) = self.snapshot()?;
        // The accepting side will choose the address, so the path is not known yet. The MTU limit
        // goes into the advert: the accepting side uses the smaller path MTU of the two ends.
        advert.mtu_bytes = self
            .largest_mtu
            .map_or(advert.mtu_bytes, |largest| largest.min(advert.mtu_bytes));
        Ok(NewQueuePairs {
            lane: self.open()?,
            snapshot,
            advert,
        })
    }

    /// Creates queue pairs connected to the peer's, unless back-off forbids an attempt on the path.
    fn answer(&self, theirs: &RailAdvert, end: &LaneEnd, answers: u32, now: Instant) -> Done {
        let (snapshot, pair) = match self.pair(theirs, answers) {
            Ok(found) => found,
            Err(error) => {
                return Done::Answered {
                    choice: None,
                    trial: None,
                    outcome: Err(error),
                };
            }
        };
        let path = PathId {
            rail: self.rail.id,
            peer_gid: pair.connector_gid,
        };
        let backoff = &self.process.backoff;
        let mtu_bytes = backoff
            .largest_mtu(path)
            .map_or(pair.mtu_bytes, |largest| largest.min(pair.mtu_bytes));
        let choice = PathChoice {
            peer_gid: pair.connector_gid,
            mtu_bytes,
        };
        let trial = match begin_trial(&self.process, path, now) {
            Ok(trial) => trial,
            Err(error) => {
                return Done::Deferred {
                    choice,
                    why: error.to_string(),
                };
            }
        };
        let route = Route {
            snapshot: &snapshot,
            gid: pair.acceptor_gid,
            peer_gid: choice.peer_gid,
            mtu_bytes,
            ends: &end.qps,
            priority: self.priority,
        };
        let joined = self.open().and_then(|mut new| {
            new.peer_mailbox_rkey = end.mailbox_rkey;
            new.connect(self.role, self.process.config.qp, &route)?;
            Ok(new)
        });
        let outcome = joined.map(|new| {
            let Pair {
                connector_gid,
                acceptor_gid,
                ..
            } = pair;
            let answer = JoinAnswer {
                connector_gid,
                acceptor_gid,
                mtu_bytes,
                end: new.end(),
                epoch: Epoch::default(),
            };
            Box::new((new, answer))
        });
        Done::Answered {
            choice: Some(choice),
            trial,
            outcome,
        }
    }

    fn connect(
        &self,
        NewQueuePairs {
            mut lane, snapshot, ..
        }: NewQueuePairs,
        answer: &JoinAnswer,
    ) -> (Lane, Result<()>) {
        let route = Route {
            snapshot: &snapshot,
            gid: answer.connector_gid,
            peer_gid: answer.acceptor_gid,
            mtu_bytes: answer.mtu_bytes,
            ends: &answer.end.qps,
            priority: self.priority,
        };
        lane.peer_mailbox_rkey = answer.end.mailbox_rkey;
        let outcome = lane.connect(self.role, self.process.config.qp, &route);
        (lane, outcome)
    }

    fn pair(&self, theirs: &RailAdvert, answers: u32) -> Result<(RailSnapshot, Pair)> {
        let (snapshot, ours) = self.snapshot()?;
        let routes = self.process.routes(
            std::slice::from_ref(theirs),
            std::slice::from_ref(&ours),
            |_| &snapshot,
        );
        let pair = pairing::pair_again(theirs, &ours, &routes, answers).ok_or_else(|| {
            let theirs = pairing::describe(std::slice::from_ref(theirs));
            let ours = pairing::describe(&[ours]);
            Missing::Subnet { ours, theirs }
        })?;
        Ok((snapshot, pair))
    }

    fn snapshot(&self) -> Result<(RailSnapshot, RailAdvert)> {
        let snapshot = self.rail.snapshot(&interfaces::all()?)?;
        let advert = self.rail.advert(&snapshot);
        Ok((snapshot, advert))
    }

    fn open(&self) -> Result<Lane> {
        let mut new = Lane::open(&self.rail, self.role, self.queue_count)?;
        new.peer_rail.clone_from(&self.peer_rail);
        new.register_mailbox(&self.region)?;
        Ok(new)
    }
}

fn failed(error: Error) -> Cause {
    Cause::Failed(error.to_string())
}

/// Checks that back-off permits an attempt on a path. If the path was dead until now, returns the
/// right to test the path on behalf of all connections.
fn begin_trial(process: &Process, path: PathId, now: Instant) -> Result<Option<Trial>> {
    process
        .backoff
        .retry(path, SEARCH + process.config.recovery.probe_timeout, now)
}
