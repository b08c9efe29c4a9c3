//! A fence: the queue pairs of a lost rail are stopped, and the data path processes their
//! completions.
//!
//! The calls that stop and destroy queue pairs may hang in the device's firmware. So a thread makes
//! them, and the driver takes the result in a later round. A device that was cut off, has failed or
//! does not answer cannot be stopped. The fence then waits until the device answers again or was
//! removed, and tries again.
//!
//! The queue pairs of a failed connection write a last control frame first, which tells the peer of
//! the failure. The fence waits for its acknowledgement, for a short time.

use crate::comm::datapath::lane::Role;
use crate::comm::datapath::stopping::{LostQueues, Stopped};
use crate::comm::datapath::waker::Waker;
use crate::comm::threads;
use host::error::{Error, Internal, Network};
use proto::time::Instant;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::Duration;
use verbs::Completion;

/// Fence of one rail of a connection.
pub struct Fence {
    role: Role,
    waker: Arc<dyn Waker>,
    /// Name of the rail, for messages.
    rail: String,
    progress: Progress,
}

/// Time in which the last control frame must be acknowledged. The data path's writes go before it:
/// at most some 100 MB, which take 10 ms at 100 Gb/s.
const LAST_WRITE_LIMIT: Duration = Duration::from_millis(50);

enum Progress {
    /// The last control frame is on its way, until this time at most.
    Writing(Box<LostQueues>, Instant),
    /// A thread stops the queue pairs.
    Stopping(Receiver<Stopped>),
    /// The device cannot be stopped now.
    Waiting(Box<LostQueues>),
    /// The queue pairs are destroyed. The data path has not processed their completions yet.
    Stopped(Vec<Completion>),
}

impl Fence {
    /// Starts a thread that stops the queue pairs, once they have written their last control frame.
    /// At its end the thread calls `waker`.
    pub fn start(
        mut queues: Box<LostQueues>,
        role: Role,
        waker: &Arc<dyn Waker>,
        now: Instant,
    ) -> Self {
        let rail = queues.name();
        let progress = if queues.is_writing() {
            Progress::Writing(queues, now + LAST_WRITE_LIMIT)
        } else {
            stop(queues, role, waker)
        };
        Self {
            role,
            waker: Arc::clone(waker),
            rail,
            progress,
        }
    }

    /// Returns true while a thread runs or a frame is on its way, so that the result should arrive
    /// soon.
    pub fn is_under_way(&self) -> bool {
        !matches!(self.progress, Progress::Waiting(_))
    }

    /// Returns true if the queue pairs wait for a device that counts as stuck.
    pub fn is_stuck(&self) -> bool {
        matches!(&self.progress, Progress::Waiting(queues) if queues.is_stuck())
    }

    /// Returns the name of the rail, for messages.
    pub fn rail(&self) -> &str {
        &self.rail
    }

    /// Does one round. Returns true once the queue pairs have stopped and are destroyed.
    ///
    /// # Errors
    /// The reason why the connection fails. The queue pairs are destroyed.
    pub fn poll(&mut self, peer: &str, now: Instant) -> Result<bool, Error> {
        if let Progress::Waiting(queues) = &self.progress
            && !queues.may_stop()
        {
            return Ok(false);
        }
        self.progress = match std::mem::replace(&mut self.progress, Progress::Stopped(Vec::new())) {
            Progress::Stopping(result) => match result.try_recv() {
                Ok(Stopped::Done(completions)) => Progress::Stopped(completions),
                Ok(Stopped::NotYet(queues)) => Progress::Waiting(queues),
                Ok(Stopped::NotFlushed) => {
                    return Err(Network::NotFlushed {
                        rail: self.rail.clone(),
                        peer: peer.to_owned(),
                    }
                    .into());
                }
                Err(TryRecvError::Empty) => Progress::Stopping(result),
                Err(TryRecvError::Disconnected) => return Err(Internal::WorkerPanic.into()),
            },
            Progress::Writing(mut queues, until) => {
                if now < until && queues.is_writing() {
                    Progress::Writing(queues, until)
                } else {
                    stop(queues, self.role, &self.waker)
                }
            }
            Progress::Waiting(queues) => stop(queues, self.role, &self.waker),
            Progress::Stopped(completions) => Progress::Stopped(completions),
        };
        Ok(matches!(self.progress, Progress::Stopped(_)))
    }

    /// Takes the completions of the stopped queue pairs.
    pub fn take_completions(&mut self) -> Vec<Completion> {
        match &mut self.progress {
            Progress::Stopped(completions) => std::mem::take(completions),
            Progress::Writing(..) | Progress::Stopping(_) | Progress::Waiting(_) => Vec::new(),
        }
    }
}

fn stop(queues: Box<LostQueues>, role: Role, waker: &Arc<dyn Waker>) -> Progress {
    let (result_sender, result) = sync_channel(1);
    let waker = Arc::clone(waker);
    threads::detach("spark-fence", move || {
        // Fails if the connection has ended.
        drop(result_sender.send(queues.stop(role)));
        waker.wake();
    });
    Progress::Stopping(result)
}
