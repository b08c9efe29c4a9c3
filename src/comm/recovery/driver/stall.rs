//! Detection of requests without progress. Samples the data path, asks the peer, and reports the
//! cause to the log and the counters. With `NCCL_SPARK_STALL_ABORT_S`, a long stall fails the
//! connection. [`crate::flow::stall`] decides when to ask, what the cause is, and when to fail.

use super::Driver;
use crate::comm::datapath::lane::Role;
use crate::comm::datapath::shared::NotBorrowed;
use crate::counters::layout::stall_word;
use crate::error::{StallCause, TimedOut};
use crate::flow::stall::{Cause, Verdict};
use crate::wire::control::Progress;
use crate::wire::ids::LaneId;
use std::time::{Duration, Instant};

/// Nanoseconds between samples of the data path. A stall is thus noticed at most half a second
/// after its limit (`NCCL_SPARK_STALL_WARN_S`, `NCCL_SPARK_STALL_ABORT_S`), which is at least one
/// second.
const SAMPLE: u64 = 500_000_000;

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
            let _ = self.sample(at);
            self.show_stall(at, now);
        }
    }

    pub(super) fn reply_to_stall(&mut self, number: u32, at: u64) -> Result<(), NotBorrowed> {
        let progress = self.sample(at)?;
        self.recovery.reply_to_stall(number, self.stall.watch.idle(at) / 1_000_000, progress);
        Ok(())
    }

    pub(super) fn receive_stall_reply(&mut self, number: u32, idle_ms: u64, progress: &Progress, at: u64) {
        let _ = self.sample(at);
        self.stall.watch.answered(number, idle_ms, progress, at);
    }

    /// Samples the data path, and asks the peer for its progress if that is due.
    ///
    /// # Errors
    /// The reason why the data path was not borrowed. The next round tries again, unless a thread
    /// has panicked in it.
    fn sample(&mut self, at: u64) -> Result<Progress, NotBorrowed> {
        let progress = self.on_path(|path, _| path.progress());
        if progress != Err(NotBorrowed::Busy) {
            self.stall.next_sample = at + SAMPLE;
        }
        let progress = progress?;
        if let Some(number) = self.stall.watch.sample(progress, at) {
            self.recovery.ask_about_stall(number);
        }
        Ok(progress)
    }

    fn show_no_stall(&mut self) {
        self.stall.log.ended();
        self.show_in_counters(0);
    }

    fn show_stall(&mut self, at: u64, now: Instant) {
        let Some(verdict) = self.stall.watch.verdict().copied() else { return self.show_no_stall() };
        let (waited, why) = (Duration::from_nanos(self.stall.watch.waited(at)), self.stall_cause(&verdict, at));
        self.show_in_counters(stall_word(verdict.cause as u8, waited.as_secs()));
        if let Some(limit) = self.process.config.recovery.stall_abort_s.filter(|_| self.stall.watch.must_abort(at)) {
            let peer = self.context.peer.name.clone();
            return self.give_up(TimedOut::Stalled { peer, waited, limit, why }.into());
        }
        let since = now.checked_sub(waited).unwrap_or(now);
        self.stall.log.stalled(verdict.cause, why, since, now);
    }

    fn show_in_counters(&self, word: u64) {
        if let Some(first) = self.rails.first() {
            first.outages.stalled(word);
        }
    }

    fn stall_cause(&self, Verdict { cause, lanes, since }: &Verdict, at: u64) -> StallCause {
        let rail = |lane: LaneId| {
            let managed = &self.rails[lane.index()];
            format!("{} (peer rail {})", managed.rail.name(), managed.peer_rail)
        };
        let rails = || self.lanes().filter(|lane| lanes & lane.bit() != 0).map(rail).collect::<Vec<_>>().join(", ");
        let idle = Duration::from_nanos(at.saturating_sub(*since));
        match (cause, self.role) {
            (Cause::NotPosted, Role::Sender) => StallCause::NoReceive { idle },
            (Cause::NotPosted, Role::Receiver) => StallCause::NoSend { idle },
            (Cause::NotTested, _) => StallCause::NotTested { idle },
            (Cause::HeldBack, _) => StallCause::HeldBack,
            (Cause::NotGranted, Role::Sender) => StallCause::NoGrantHere,
            (Cause::NotGranted, Role::Receiver) => StallCause::NoGrantThere,
            (Cause::NotArrived, _) => StallCause::NotArrived,
            (Cause::NotAcknowledged, Role::Sender) => StallCause::SendNotAcknowledged { rails: rails() },
            (Cause::NotAcknowledged, Role::Receiver) => StallCause::ReceiveNotAcknowledged { rails: rails() },
            (Cause::NoAnswer, _) => StallCause::NoAnswer { silent: idle, unacknowledged: rails() },
        }
    }
}
