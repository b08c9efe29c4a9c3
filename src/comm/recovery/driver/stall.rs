//! Detection of requests without progress. Samples the data path, asks the peer, and reports the
//! cause to the log and the counters. The connection fails if acknowledged data is lost, and with
//! `NCCL_SPARK_STALL_ABORT_S` after a long stall. [`proto::flow::stall`] decides when to ask, what
//! the cause is, and when to fail.

use super::{Driver, MOST_ROUNDS};
use crate::comm::datapath::lane::Role;
use crate::comm::datapath::shared::NotBorrowed;
use host::counters::layout::stall_word;
use host::error::{Error, Internal, StallCause, TimedOut};
use proto::flow::stall::{Cause, Verdict};
use proto::time::Instant;
use proto::wire::control::{Progress, StallReport};
use proto::wire::ids::LaneId;
use proto::wire::operation::Operation;
use std::time::Duration;

/// Nanoseconds between samples of the data path. A stall is thus noticed at most half a second
/// after its limit (`NCCL_SPARK_STALL_WARN_S`, `NCCL_SPARK_STALL_ABORT_S`), which is at least one
/// second.
const SAMPLE: u64 = 500_000_000;
/// Number of consecutive polls of the data path that must find nothing. A device may show a
/// completion a moment late.
const EMPTY_POLLS: usize = 8;

impl Driver {
    pub(super) fn stop_stall_watch(&mut self) {
        self.stall.is_closed = true;
        self.show_no_stall();
    }

    /// Does one round. `is_unused` is false if NCCL has used the data path since the last round.
    pub(super) fn watch_progress(&mut self, is_unused: bool, at: u64, now: Instant) {
        if !is_unused {
            self.stall.watch.called(at);
        }
        // Until the first rail is up, `warn_of_no_rail` warns in place of the stall watch.
        if self.stall.is_closed || !self.recovery.recovers() || !self.recovery.was_up() {
            self.show_no_stall();
        } else if at >= self.stall.next_sample {
            // A connection that makes progress leaves its completions to NCCL's thread.
            let is_complete = self.stall.watch.waited(at) >= SAMPLE;
            let _ = self.sample(is_complete, at);
            self.show_stall(at, now);
        }
    }

    pub(super) fn reply_to_stall(
        &mut self,
        question: &StallReport,
        at: u64,
        now: Instant,
    ) -> Result<(), NotBorrowed> {
        self.sample(true, at)?;
        self.stall.peer_operation = question.operation;
        if let Some(verdict) = self.stall.watch.peer_asked(question, at) {
            let why = match verdict.cause {
                Cause::NotPosted | Cause::NotTested => StallCause::NotSentHere {
                    number: self.next_message(),
                    here: self.operation(),
                    there: question.operation,
                },
                _ => self.stall_cause(&verdict, at),
            };
            let idle = Duration::from_millis(question.idle_ms);
            self.stall
                .log
                .peer_waits(verdict.cause, why, now - idle, now);
        }
        if let Some(answer) = self.stall.watch.report(question.number, at) {
            let operation = self.operation();
            self.recovery.reply_to_stall(StallReport {
                operation,
                ..answer
            });
        }
        Ok(())
    }

    pub(super) fn receive_stall_reply(
        &mut self,
        answer: &StallReport,
        at: u64,
    ) -> Result<(), NotBorrowed> {
        self.sample(true, at)?;
        self.stall.peer_operation = answer.operation;
        self.stall.watch.answered(answer, at);
        Ok(())
    }

    /// Samples the data path, and asks the peer for its state if that is due. With `is_complete`,
    /// first processes everything that has arrived.
    ///
    /// # Errors
    /// The reason why the data path was not borrowed. The next round tries again, unless a thread
    /// has panicked in it.
    fn sample(&mut self, is_complete: bool, at: u64) -> Result<(), NotBorrowed> {
        let sampled = if is_complete {
            self.complete_progress()
        } else {
            self.progress()
        };
        if !matches!(sampled, Err(NotBorrowed::Busy)) {
            self.stall.next_sample = at + SAMPLE;
        }
        let (progress, rail_changes) = sampled?;
        if let Some(question) = self.stall.watch.sample(progress, rail_changes, at) {
            let operation = self.operation();
            self.recovery.ask_about_stall(StallReport {
                operation,
                ..question
            });
        }
        Ok(())
    }

    /// Returns NCCL's operation on the communicator, if NCCL announces operations.
    fn operation(&self) -> Option<Operation> {
        self.context.operation.get()?.get()
    }

    /// Returns the number of the next message, from 1, that this side has not sent or received.
    fn next_message(&self) -> u64 {
        match self.stall.watch.progress() {
            Some(Progress::Sender { begun, .. }) => begun + 1,
            Some(Progress::Receiver { delivered, .. }) => delivered + 1,
            None => 1,
        }
    }

    fn progress(&mut self) -> Result<(Progress, Option<u32>), NotBorrowed> {
        self.on_path(|path, _| (path.progress(), None))
    }

    /// Polls all completion queues until they are empty. Returns the progress, and the number of
    /// changes of rails ([`StallReport::rail_changes`]).
    ///
    /// # Errors
    /// The reason why the data path was not borrowed.
    fn complete_progress(&mut self) -> Result<(Progress, Option<u32>), NotBorrowed> {
        let polled = self.on_path(|path, context| {
            let mut empty = 0;
            for _ in 0..MOST_ROUNDS {
                empty = if path.poll(context)? { 0 } else { empty + 1 };
                if empty == EMPTY_POLLS {
                    break;
                }
            }
            Ok::<_, Error>((
                path.progress(),
                empty == EMPTY_POLLS,
                path.rails().open_lanes(),
            ))
        })?;
        match polled {
            Ok((progress, is_empty, open)) => {
                // They differ if the data path has lost a rail and recovery does not know yet.
                let knows_all = self
                    .recovery
                    .rails_up()
                    .fold(0, |set, lane| set | lane.bit())
                    == open;
                Ok((
                    progress,
                    self.recovery
                        .settled_changes()
                        .filter(|_| is_empty && knows_all),
                ))
            }
            Err(error) => {
                self.give_up(error);
                self.progress()
            }
        }
    }

    fn show_no_stall(&mut self) {
        self.stall.log.ended();
        self.show_in_counters(0);
    }

    fn show_stall(&mut self, at: u64, now: Instant) {
        if self
            .stall
            .watch
            .has_lost_data(self.recovery.is_waiting(), at)
        {
            return self.fail_with_lost_data(now);
        }
        let Some(verdict) = self.stall.watch.verdict(at).copied() else {
            return self.show_no_stall();
        };
        let waited = Duration::from_nanos(self.stall.watch.waited(at));
        let why = self.stall_cause(&verdict, at);
        self.show_in_counters(stall_word(verdict.cause as u8, waited.as_secs()));
        if let Some(limit) = self
            .process
            .config
            .recovery
            .stall_abort_s
            .filter(|_| self.stall.watch.must_abort(at))
        {
            let peer = self.context.peer.name.clone();
            let why = self.stall.log.explained(why, now);
            return self.give_up(
                TimedOut::Stalled {
                    peer,
                    waited,
                    limit,
                    why,
                }
                .into(),
            );
        }
        let since = now - waited;
        let operation = self.operation();
        self.stall
            .log
            .stalled(verdict.cause, why, operation, since, now);
    }

    fn fail_with_lost_data(&mut self, now: Instant) {
        let peer = self.context.peer.name.clone();
        let rails = self.text();
        let error = match self.role {
            Role::Sender => {
                // The peer's program may wait for the data, and other connections for the program.
                self.stall.log.peer_waits_until_the_end(
                    Cause::NotArrived,
                    StallCause::NotArrivedThere,
                    now,
                );
                Internal::NotArrivedThere { peer, rails }
            }
            Role::Receiver => Internal::NotArrivedHere { peer, rails },
        };
        self.give_up(error.into());
    }

    fn show_in_counters(&self, word: u64) {
        if let Some(first) = self.rails.first() {
            first.outages.stalled(word);
        }
    }

    fn stall_cause(
        &self,
        Verdict {
            cause,
            lanes,
            since,
        }: &Verdict,
        at: u64,
    ) -> StallCause {
        let rail = |lane: LaneId| {
            let managed = &self.rails[lane.index()];
            format!("{} (peer rail {})", managed.rail.name(), managed.peer_rail)
        };
        let rails = || {
            self.lanes()
                .filter(|lane| lanes & lane.bit() != 0)
                .map(rail)
                .collect::<Vec<_>>()
                .join(", ")
        };
        let idle = Duration::from_nanos(at.saturating_sub(*since));
        match (cause, self.role) {
            (Cause::NotPosted, Role::Sender) => StallCause::NoReceive {
                idle,
                number: self.next_message(),
                there: self.stall.peer_operation,
            },
            (Cause::NotPosted, Role::Receiver) => StallCause::NoSend {
                idle,
                number: self.next_message(),
                there: self.stall.peer_operation,
            },
            (Cause::NotTested, _) => StallCause::NotTested { idle },
            (Cause::HeldBack, _) => StallCause::HeldBack,
            (Cause::NotGranted, Role::Sender) => StallCause::NoGrantHere,
            (Cause::NotGranted, Role::Receiver) => StallCause::NoGrantThere,
            (Cause::NotArrived, Role::Sender) => StallCause::NotArrivedThere,
            (Cause::NotArrived, Role::Receiver) => StallCause::NotArrivedHere,
            (Cause::NotAcknowledged, Role::Sender) => {
                StallCause::SendNotAcknowledged { rails: rails() }
            }
            (Cause::NotAcknowledged, Role::Receiver) => {
                StallCause::ReceiveNotAcknowledged { rails: rails() }
            }
            (Cause::NoAnswer, _) => StallCause::NoAnswer {
                silent: idle,
                unacknowledged: rails(),
            },
        }
    }
}
