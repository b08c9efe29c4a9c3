//! Fences of lost rails, and the end of a failed connection, which waits until all its queue pairs
//! have stopped.

use super::Driver;
use crate::comm::datapath::lane::{Lane, Role};
use crate::comm::datapath::path::Faults;
use crate::comm::datapath::shared::NotBorrowed;
use crate::comm::datapath::stopping::LostQueues;
use crate::comm::recovery::attempt::Attempt;
use crate::comm::recovery::fence::Fence;
use proto::device::PATIENCE;
use proto::flow::recovery::State;
use proto::time::Instant;
use proto::wire::ids::LaneId;
use std::sync::Arc;
use std::time::Duration;

/// Time in which the queue pairs of a failed connection must stop. Then NCCL gets the error, even
/// if a NIC may still read and write the connection's buffers. As long as a device may be silent
/// before it counts as stuck.
pub const END_LIMIT: Duration = PATIENCE;

impl Driver {
    /// Starts a thread for the queue pairs of each lane. Queue pairs without a lane were under
    /// test. The queue pairs of a failed connection carry FAILED first.
    pub(super) fn start_fences(
        &mut self,
        lost: Vec<(Option<LaneId>, Box<LostQueues>)>,
        now: Instant,
    ) {
        if lost.is_empty() {
            return;
        }
        let waker = &self.context.waker;
        let mailboxes = &self.mailboxes;
        let frame = self.recovery.last_words();
        let frame_bytes = frame.map(|frame| mailboxes.put_frame(&frame));
        for (lane, mut queues) in lost {
            if let (Some(_), Some(bytes)) = (lane, frame_bytes) {
                queues.write_last_frame(|keys| mailboxes.frame_write(keys, bytes));
            }
            match lane {
                Some(lane) => {
                    self.rails[lane.index()].fence =
                        Some(Fence::start(queues, self.role, waker, now))
                }
                // No arrival on these queue pairs counts, so the fence awaits none: as a sender's.
                None => self
                    .unused_fences
                    .push(Fence::start(queues, Role::Sender, waker, now)),
            }
        }
    }

    pub(super) fn poll_fences(&mut self, now: Instant) {
        for lane in self.lanes() {
            self.poll_fence(lane, now);
        }
        let peer = Arc::clone(&self.context.peer);
        let mut failure = None;
        self.unused_fences
            .retain_mut(|fence| match fence.poll(&peer.name, now) {
                Ok(is_over) => !is_over,
                Err(error) => {
                    failure = Some(error);
                    false
                }
            });
        if let Some(error) = failure {
            self.give_up(error);
        }
    }

    /// Starts the fence of a rail, or takes its result. Once the data path has processed the
    /// completions of the stopped queue pairs, informs recovery. If the data path is busy, or if
    /// the queue pairs have not stopped, the next round calls again.
    pub(super) fn poll_fence(&mut self, lane: LaneId, now: Instant) {
        let is_fencing = matches!(self.recovery.state(lane), Some(State::Fencing { .. }));
        if is_fencing
            && self.rails[lane.index()].fence.is_none()
            && self.start_fence(lane, now).is_err()
        {
            // After a panic the data path has stopped nothing, so the peer gets no FENCED.
            return;
        }
        let stopped = self.rails[lane.index()]
            .fence
            .as_mut()
            .map(|fence| fence.poll(&self.context.peer.name, now));
        match stopped {
            Some(Ok(false)) => return,
            Some(Err(error)) => {
                self.rails[lane.index()].fence = None;
                return self.give_up(error);
            }
            None if !is_fencing => return,
            None | Some(Ok(true)) => {}
        }
        let mut fence = self.rails[lane.index()].fence.take();
        let received = self.on_path(|path, context| {
            if let Some(fence) = &mut fence {
                path.stopped(context, lane, &fence.take_completions());
            }
            path.received()
        });
        match received {
            Ok(received) => {
                let at = self.clock(now);
                self.recovery.fenced(lane, received, at);
            }
            Err(NotBorrowed::Busy) => self.rails[lane.index()].fence = fence,
            Err(NotBorrowed::Broken) => {}
        }
    }

    fn start_fence(&mut self, lane: LaneId, now: Instant) -> Result<(), NotBorrowed> {
        let lost = self.on_path(|path, _| {
            path.rails().set_aside(lane);
            path.rails().take_lost()
        })?;
        self.start_fences(lost, now);
        Ok(())
    }

    /// Stops new queue pairs that are not used. The peer may write over them.
    pub(super) fn drop_qps(&mut self, lane: LaneId, now: Instant) -> Result<(), NotBorrowed> {
        let new = match self.rails[lane.index()].attempt.take() {
            // The thread that works on them destroys them.
            Some(Attempt::Working(_)) => None,
            Some(Attempt::Requested(asked)) => Some(asked.lane),
            Some(Attempt::Answered(new)) => Some(new.0),
            Some(Attempt::Testing(test)) => Some(test.lane),
            None => match self.on_path(|path, _| path.rails().status.take(lane)) {
                Err(NotBorrowed::Busy) => return Err(NotBorrowed::Busy),
                taken => taken.unwrap_or_default(),
            },
        };
        let lost = new.and_then(Lane::into_lost);
        let lost = lost.into_iter().map(|queues| (None, queues)).collect();
        self.start_fences(lost, now);
        Ok(())
    }

    /// Returns true while a thread stops queue pairs, or a failed connection waits for that.
    pub(super) fn is_stopping(&self) -> bool {
        self.is_ending() || self.is_fencing() || self.unused_fences.iter().any(Fence::is_under_way)
    }

    /// Returns true while a thread stops the queue pairs of a lost rail.
    pub(super) fn is_fencing(&self) -> bool {
        self.rails
            .iter()
            .filter_map(|managed| managed.fence.as_ref())
            .any(Fence::is_under_way)
    }

    /// Returns true while a failed connection waits until its queue pairs have stopped.
    pub fn is_ending(&self) -> bool {
        self.ending_since.is_some() || self.waiting.error.is_some()
    }

    /// Ends a failed connection: once all its queue pairs have stopped, NCCL gets the error.
    pub fn end_when_stopped(&mut self, now: Instant) {
        if !self.recovery.has_failed() {
            return;
        }
        let error = self.waiting.error.take();
        let lost = self.on_path(|path, context| {
            if let Some(error) = &error {
                path.end(context, Box::new(error.clone()));
            }
            (path.rails().take_lost(), path.rails().status.is_ending())
        });
        let (lost, is_ending) = match lost {
            Ok(lost) => lost,
            Err(NotBorrowed::Busy) => return self.waiting.error = error,
            // No call enters the data path again.
            Err(NotBorrowed::Broken) => (Vec::new(), false),
        };
        if !is_ending {
            return self.ending_since = None;
        }
        self.start_fences(lost, now);
        self.poll_fences(now);
        let since = *self.ending_since.get_or_insert(now);
        let fences = || {
            self.rails
                .iter()
                .filter_map(|managed| managed.fence.as_ref())
                .chain(&self.unused_fences)
        };
        // A device that counts as stuck has been silent for `END_LIMIT` already.
        let may_stop = fences().any(|fence| !fence.is_stuck());
        if may_stop && now.saturating_duration_since(since) < END_LIMIT {
            return;
        }
        let running = fences().map(Fence::rail).collect::<Vec<_>>().join(", ");
        let ended = self.on_path(|path, context| {
            if !running.is_empty() {
                tracing::warn!(
                    "the connection with {} has failed, and {running} has not stopped for {:.0} s: its NIC may still write to the connection's buffers; see dmesg",
                    context.peer.name,
                    END_LIMIT.as_secs_f64()
                );
            }
            path.rails().status.stopped();
        });
        if ended != Err(NotBorrowed::Busy) {
            self.ending_since = None;
        }
    }
}
