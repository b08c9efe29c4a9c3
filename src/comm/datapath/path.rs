//! What recovery asks of a data path when a rail is lost or returns.
//!
//! A data path belongs to NCCL's thread; the service thread borrows it through the same [`TryCell`], for moments.

use super::context::PathContext;
use super::fault::Fault;
use super::lane::{Lane, LaneWrite, lanes_text};
use super::peer::{Peer, Presence};
use super::status::{Doubt, Fenced, Loss, STRIKES, Status};
use super::try_cell::{TryCell, TryCellGuard, UNUSED};
use crate::error::{Error, Quick, Result};
use crate::flow::striping::Striping;
use crate::wire::control::Received;
use crate::wire::cts::Epoch;
use crate::wire::ids::LaneId;
use std::ops::{Deref, DerefMut};

/// A data path, of either direction, when a rail is lost or returns: what it does for itself, and for recovery.
pub trait DataPath: Send {
    /// Its status. The lanes of the losses there are closed.
    fn status(&mut self) -> &mut Status;

    /// Its lanes.
    fn lanes(&mut self) -> &mut [Lane];

    /// What goes by which of them.
    fn striping(&mut self) -> &mut Striping;

    /// The number of the oldest message that runs, and of the one to begin next.
    fn span(&self) -> (u64, u64);

    /// A rail is lost: stops its queue pairs, takes in what has come, and closes the lane. Nothing goes by the lane from here on, even
    /// where its device does not stop yet.
    fn lose(&mut self, context: &PathContext, lane: LaneId) -> Fenced;

    /// What has come to a receiver; of a sender, nothing.
    fn received(&self) -> Received;

    /// Both ends have stopped a lane, and the peer had received this: what is missing goes by other lanes.
    ///
    /// # Errors
    /// [`Error::Usage`] when memory that is still needed was deregistered.
    fn recover(&mut self, context: &PathContext, lane: LaneId, received: &Received) -> Result<()>;

    /// A closed lane carries again, with new queue pairs: from here on it is used. Whether it is: a connection that has failed takes
    /// nothing, and `new` goes.
    ///
    /// # Errors
    /// As [`DataPath::recover`].
    fn regain(&mut self, context: &PathContext, lane: LaneId, new: Lane) -> Result<bool>;

    /// A receiver's memory has other keys on a lane, whose device has returned: what is granted is granted once more. From which epoch
    /// on clear-to-sends have keys of use there.
    ///
    /// # Errors
    /// [`Error::Usage`] when memory that is still needed was deregistered.
    fn renew(&mut self, context: &PathContext, lane: LaneId) -> Result<Epoch>;

    /// From which epoch on a receiver's clear-to-sends have keys of use on a lane.
    fn epoch(&self, lane: LaneId) -> Epoch;

    /// The same, as a sender has heard it.
    fn take_epoch(&mut self, lane: LaneId, epoch: Epoch);

    /// Looks at what nobody may be looking at: NCCL's thread sleeps when it waits for nothing. Whether something had come.
    ///
    /// # Errors
    /// Why the connection has failed.
    fn tend(&mut self, context: &PathContext) -> Result<bool>;

    /// Whether something that a loss has left undone waits for room on a rail, and for [`DataPath::tend`].
    fn is_owing(&mut self) -> bool;

    /// How many receives, from the first on, have all their bytes; 0 of a sender.
    fn delivered(&self) -> u64;

    /// The connection has failed, and its queue pairs are gone.
    fn ended(&mut self) {}

    /// Whether its caller has buffers here that a NIC may still read or write, and has not been told that they are its own again.
    fn holds_buffers(&self) -> bool;

    /// Something failed on a rail: the rail is lost, or the connection.
    ///
    /// # Errors
    /// Why the connection has failed.
    #[cold]
    fn fault(&mut self, context: &PathContext, lane: LaneId, fault: Fault) -> Quick<()> {
        if let Presence::Closed { .. } = context.peer.presence() {
            // A peer that has closed takes its queue pairs away: what it had received it has said, and what it did not need fails.
            if let Fault::Device(_) = fault {
                self.lanes()[lane.index()].close();
                self.striping().lose(lane);
            }
            return Ok(());
        }
        match fault {
            Fault::Rail(why) | Fault::Device(why) => self.lose_by(context, lane, why),
            Fault::Doubtful(why) => return self.doubt(context, lane, why, Doubt::Request),
            Fault::Denied(why) => return self.doubt(context, lane, why, Doubt::Key),
            Fault::Fatal(why) => {
                let text = self.failed_on(context, lane, &why);
                return Err(self.end(Error::Network(text).into()));
            }
            Fault::Violation(why) => {
                let text = self.failed_on(context, lane, &why);
                return Err(self.end(Error::Protocol(text).into()));
            }
        }
        Ok(())
    }

    /// A completion queue is in error: what it held, and what comes of its queue pairs, is lost. A lane that is not on it is not met.
    ///
    /// # Errors
    /// Why the connection has failed.
    #[cold]
    fn lose_completions(&mut self, context: &PathContext, cq: usize) -> Quick<()> {
        let Some(lane) = LaneId::all(self.lanes().len()).find(|lane| self.lanes()[lane.index()].is_on(cq)) else {
            return Ok(());
        };
        self.fault(context, lane, self.without_completions())
    }

    /// How many rails a refused key may cost over one message until it counts as wrong, and not as that of a device that goes.
    fn most_denials(&self) -> u8;

    /// What it means that the completions of a lane are lost.
    fn without_completions(&self) -> Fault;

    /// A rail is lost, and perhaps by the fault of what was asked of it, which over one message must not happen too often.
    #[cold]
    fn doubt(&mut self, context: &PathContext, lane: LaneId, why: String, doubt: Doubt) -> Quick<()> {
        let most = match doubt {
            Doubt::Request => STRIKES,
            Doubt::Key => self.most_denials(),
        };
        let (oldest, next) = self.span();
        if self.status().is_struck_out(doubt, oldest, next, most) {
            return self.fault(context, lane, Fault::Fatal(format!("{why}; other rails failed on it before")));
        }
        self.lose_by(context, lane, why);
        Ok(())
    }

    /// The text of an error that ends the connection, and showed on a lane.
    #[cold]
    fn failed_on(&mut self, context: &PathContext, lane: LaneId, why: &str) -> String {
        let lanes = self.lanes();
        let Lane { rail, peer_rail: there, .. } = &lanes[lane.index()];
        let (here, peer, all) = (rail.name(), &context.peer.name, lanes_text(lanes));
        format!("rail {here} to {peer} failed: {why} (peer rail {there}); {all}")
    }

    /// The connection has failed: its queue pairs are taken away before its caller hears of it, who may use its buffers for
    /// something else from then on. What the caller is told, which is the first error.
    #[cold]
    fn end(&mut self, error: Box<Error>) -> Box<Error> {
        self.lanes().iter_mut().for_each(|lane| _ = lane.stop());
        self.lanes().iter_mut().for_each(Lane::close);
        self.ended();
        self.status().fail(error)
    }

    /// The data path finds a rail lost, and tells the service thread.
    #[cold]
    fn lose_by(&mut self, context: &PathContext, lane: LaneId, why: String) {
        if self.lanes()[lane.index()].is_open() {
            let fenced = self.lose(context, lane);
            self.status().lost(Loss { lane, why, fenced });
            context.waker.wake();
        }
    }

    /// Posts a write on the first queue pair of a lane, if it is open and has room.
    fn post(&mut self, context: &PathContext, lane: LaneId, write: &LaneWrite) {
        if let Some(slot) = self.lanes()[lane.index()].slot(0)
            && let Err(error) = slot.write(write, None)
        {
            self.lose_by(context, lane, error.to_string());
        }
    }
}

/// The caller closes its connection. What it still waits for ends here, so that no NIC touches its buffers afterwards; else the queue
/// pairs stay for what the peer has to confirm.
pub fn leave(path: &dyn SharedPath, peer: &Peer) {
    let Some(mut path) = path.borrow() else { return };
    if path.holds_buffers() {
        tracing::debug!("connection with {} closed while requests were running: they are cancelled", peer.name);
        path.end(Box::new(Error::Usage("connection closed while requests were running".to_owned())));
    }
}

/// A data path that the service thread can borrow from the thread that uses it.
pub trait SharedPath: Send + Sync {
    /// Borrows the data path as soon as its user lets go of it: a call on it takes microseconds and waits for nothing. That does not
    /// count as a use. `None` after a panic went through a user: the data path is not used again.
    fn borrow(&self) -> Option<PathGuard<'_>>;

    /// Whether nobody has used the data path since this was last asked.
    fn is_unused(&self) -> bool;
}

/// A borrowed data path; given back when dropped.
pub struct PathGuard<'a>(Box<dyn Borrowed<'a> + 'a>);

/// A [`TryCellGuard`] of either direction's data path.
trait Borrowed<'a> {
    fn path(&self) -> &(dyn DataPath + 'a);
    fn path_mut(&mut self) -> &mut (dyn DataPath + 'a);
}

impl<'a, P: DataPath + 'a> Borrowed<'a> for TryCellGuard<'a, P, UNUSED> {
    fn path(&self) -> &(dyn DataPath + 'a) {
        &**self
    }

    fn path_mut(&mut self) -> &mut (dyn DataPath + 'a) {
        &mut **self
    }
}

impl<'a> Deref for PathGuard<'a> {
    type Target = dyn DataPath + 'a;

    fn deref(&self) -> &Self::Target {
        self.0.path()
    }
}

impl DerefMut for PathGuard<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        self.0.path_mut()
    }
}

impl<P: DataPath> SharedPath for TryCell<P> {
    fn borrow(&self) -> Option<PathGuard<'_>> {
        loop {
            if let Some(path) = self.visit() {
                return Some(PathGuard(Box::new(path)));
            }
            if self.is_broken() {
                return None;
            }
            std::thread::yield_now();
        }
    }

    fn is_unused(&self) -> bool {
        TryCell::is_unused(self)
    }
}
