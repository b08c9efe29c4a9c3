//! The queue pairs of a lost rail: they are stopped, their completions are collected, and they are
//! destroyed.
//!
//! These are commands to the device's firmware, and may not return for minutes. So no thread that
//! serves other work makes them: [`LostQueues::stop`] runs on a thread of its own
//! (`comm::recovery::fence`). If [`LostQueues`] are dropped, a thread of the device destroys them.
//!
//! The queue pairs of a failed connection still work, unless a rail's loss was the cause. Before
//! they stop, they carry one control frame, which tells the peer of the failure.

use super::lane::{LaneWrite, MailboxKeys};
use super::wr_id::{Work, WrId};
use crate::clock;
use crate::comm::rail::Rail;
use proto::device::Presence;
use proto::flow::recovery::Role;
use std::sync::Arc;
use std::time::Duration;
use verbs::{Completion, CompletionBuffer, Cq, Mr, Qp, Write};

/// Interval between checks of the device while the completions of stopped queue pairs are awaited.
/// The completions usually take microseconds. If they take longer, the device may have been cut off
/// or removed.
const FLUSH_LIMIT: Duration = Duration::from_millis(10);
/// Time in which a device that answers must return all completions of stopped queue pairs.
/// Otherwise the connection fails.
const DRAIN_LIMIT: Duration = Duration::from_secs(1);

/// Queue pairs of a lost rail, with everything that must live as long as they do. Until they have
/// stopped, their NIC may read and write the connection's memory.
pub struct LostQueues {
    rail: Arc<Rail>,
    generation: u32,
    /// `None` once they are destroyed.
    objects: Option<Objects>,
    /// Completions that were polled so far, for the data path.
    completions: Vec<Completion>,
    /// True while the last control frame is not acknowledged.
    is_writing: bool,
    /// For each queue pair: true once a receive completed as flushed. Receives complete in order,
    /// so everything that the queue pair received was polled before.
    flushed: Vec<bool>,
}

struct Objects {
    queue_pairs: Vec<Qp>,
    cq: Cq,
    /// Registration of this end's mailbox, and the keys of both mailboxes.
    mailbox: Option<(Mr, MailboxKeys)>,
}

/// Result of a request to stop queue pairs.
pub enum Stopped {
    /// The queue pairs have stopped, and are destroyed. The list has their completions since they
    /// were last polled.
    Done(Vec<Completion>),
    /// The queue pairs have not stopped: their device does not answer, has failed or was cut off.
    /// It may still read and write memory.
    NotYet(Box<LostQueues>),
    /// The device answers, but has not returned all completions of a receiver's stopped queue
    /// pairs. The queue pairs are destroyed.
    NotFlushed,
}

impl LostQueues {
    /// Wraps queue pairs that are no longer used. `generation` is the device generation that they
    /// belong to. `mailbox` is the registration of this end's mailbox, with the keys of both.
    pub fn new(
        rail: &Arc<Rail>,
        generation: u32,
        queue_pairs: Vec<Qp>,
        cq: Cq,
        mailbox: Option<(Mr, MailboxKeys)>,
    ) -> Self {
        let flushed = vec![false; queue_pairs.len()];
        let objects = Some(Objects {
            queue_pairs,
            cq,
            mailbox,
        });
        Self {
            rail: Arc::clone(rail),
            generation,
            objects,
            completions: Vec::new(),
            is_writing: false,
            flushed,
        }
    }

    /// Writes a last control frame into the peer's mailbox. Fails silently if the first queue pair
    /// is full or has failed: other rails and TCP carry the frame too.
    pub fn write_last_frame(&mut self, write: impl FnOnce(MailboxKeys) -> LaneWrite) {
        let Some(Objects {
            queue_pairs,
            mailbox: Some((_, keys)),
            ..
        }) = &mut self.objects
        else {
            return;
        };
        let write = write(*keys);
        let posted = queue_pairs.first_mut().map(|qp| {
            qp.write(&Write {
                local_addr: write.local_addr,
                bytes: write.bytes,
                lkey: write.lkey,
                remote: write.remote,
                immediate: None,
                wr_id: last_write_id().bits(),
                signaled: true,
            })
        });
        match posted {
            Some(Ok(())) => self.is_writing = true,
            Some(Err(error)) => tracing::debug!("{error}"),
            None => {}
        }
    }

    /// Polls once. Returns true while the last control frame is not acknowledged and has not
    /// failed.
    pub fn is_writing(&mut self) -> bool {
        if self.is_writing && self.poll().is_err() {
            self.is_writing = false;
        }
        self.is_writing
    }

    /// Stops the queue pairs: afterwards no bytes arrive or leave. Polls their completions: for a
    /// receiver, those of everything that arrived, because the sender does not resend bytes that it
    /// has seen acknowledged. Then destroys the queue pairs. May block for as long as the device
    /// does not answer.
    #[must_use]
    pub fn stop(mut self: Box<Self>, role: Role) -> Stopped {
        // A device that is known not to answer gets no command: the command might not return.
        let mut presence = self.query_presence();
        if presence == Presence::Here {
            self.fail();
            // Ask a second time: for a failed device, the kernel reports success without asking it.
            presence = self.query_presence();
        }
        match (presence, role) {
            (Presence::Here, Role::Receiver) => self.drain(),
            (Presence::CutOff, _) => Stopped::NotYet(self),
            // The receiver's report shows which shares have arrived, so no completion is missed.
            (Presence::Here, Role::Sender) | (Presence::Gone, _) => self.take_the_rest(),
        }
    }

    /// Returns true if another [`LostQueues::stop`] may succeed: the device answers again, or was
    /// removed. Asks the device nothing.
    pub fn may_stop(&self) -> bool {
        self.rail.device.presence_of(self.generation) != Presence::CutOff
    }

    /// Returns true if the device counts as stuck.
    pub fn is_stuck(&self) -> bool {
        self.rail.device.is_stuck()
    }

    /// Returns the name of the rail, for messages.
    pub fn name(&self) -> String {
        self.rail.name()
    }

    /// Moves the queue pairs to the error state. Their posted work requests complete as flushed.
    pub fn fail(&mut self) {
        for qp in self
            .objects
            .iter_mut()
            .flat_map(|objects| &mut objects.queue_pairs)
        {
            if let Err(error) = qp.fail() {
                // `record_error` handles a failed or removed device. After any other error, the
                // destruction of the queue pair stops it.
                tracing::debug!("{error}");
                self.rail.device.record_error(&error, self.generation);
            }
        }
    }

    /// Returns the completions that were polled so far.
    pub fn completions(&self) -> &[Completion] {
        &self.completions
    }

    fn query_presence(&self) -> Presence {
        self.rail.device.query_presence(self.rail.info.port);
        self.rail.device.presence_of(self.generation)
    }

    /// Polls until every queue pair is flushed.
    fn drain(mut self: Box<Self>) -> Stopped {
        let mut until = clock::now() + DRAIN_LIMIT;
        let mut asked = clock::now();
        let mut has_posted = false;
        while !self.flushed.iter().all(|is_flushed| *is_flushed) {
            let is_broken = match self.poll() {
                Ok(true) => continue,
                Ok(false) => false,
                Err(()) => true,
            };
            if !is_broken && !std::mem::replace(&mut has_posted, true) {
                self.post_receives();
                continue;
            }
            if !is_broken && clock::elapsed(asked) < FLUSH_LIMIT {
                std::thread::yield_now();
                continue;
            }
            let asks = clock::now();
            let is_late = clock::now() > until;
            let presence = self.query_presence();
            asked = clock::now();
            // While the device does not answer, it need not return completions either.
            until += asked.saturating_duration_since(asks);
            match presence {
                Presence::Here if is_broken || is_late && self.poll() != Ok(true) => {
                    self.objects = None;
                    return Stopped::NotFlushed;
                }
                Presence::Here => {}
                Presence::CutOff => return Stopped::NotYet(self),
                Presence::Gone => return self.take_the_rest(),
            }
        }
        self.finish()
    }

    /// Posts a receive on each queue pair that is not flushed. The peer may have used up all posted
    /// receives since the lane was last polled, and then nothing would complete as flushed.
    fn post_receives(&mut self) {
        let queue_pairs = self
            .objects
            .iter_mut()
            .flat_map(|objects| &mut objects.queue_pairs);
        for ((index, qp), _) in queue_pairs
            .enumerate()
            .zip(&self.flushed)
            .filter(|(_, is_flushed)| !**is_flushed)
        {
            if let Err(error) = qp.post_receives(1, WrId::of_receives(index as u8)) {
                // The queue is full, so it has a receive to flush.
                tracing::debug!("{error}");
            }
        }
    }

    /// Polls until there are no more completions.
    fn take_the_rest(&mut self) -> Stopped {
        while self.poll() == Ok(true) {}
        self.finish()
    }

    /// Destroys the queue pairs before the result is known: this also stops a queue pair that
    /// refused to stop.
    fn finish(&mut self) -> Stopped {
        self.objects = None;
        Stopped::Done(std::mem::take(&mut self.completions))
    }

    /// Polls once, and keeps the completions. Returns true if there were any. The error means that
    /// no more can be polled.
    #[allow(
        clippy::result_unit_err,
        reason = "the error is logged here, and its text has no other use"
    )]
    pub fn poll(&mut self) -> Result<bool, ()> {
        let Some(objects) = &mut self.objects else {
            return Ok(false);
        };
        let mut buffer = CompletionBuffer::new();
        let found = objects
            .cq
            .poll(&mut buffer)
            .map_err(|error| tracing::debug!("{error}"))?;
        for completion in found {
            let id = WrId::of(completion.wr_id());
            if id == last_write_id() {
                // The data path knows nothing of this write.
                self.is_writing = false;
                continue;
            }
            if completion.status() != 0
                && id.work() == Work::Receive
                && let Some(is_flushed) = self.flushed.get_mut(usize::from(id.queue()))
            {
                *is_flushed = true;
            }
            self.completions.push(*completion);
        }
        Ok(!found.is_empty())
    }
}

/// Returns the number of the last control frame's write. Unlike any other write, it retires no work
/// request.
fn last_write_id() -> WrId {
    WrId::new(Work::Control, 0, 0)
}

impl Drop for LostQueues {
    fn drop(&mut self) {
        if let Some(objects) = self.objects.take() {
            self.rail.device.calls.discard(objects);
        }
    }
}
