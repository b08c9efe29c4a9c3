//! A half of a connection, as the service thread sees it: what it asks of a data path when a rail is lost or returns.
//!
//! The data path belongs to NCCL's thread; the service thread borrows it through the same ownership word, for moments.

use super::Host;
use super::events::Direction;
use super::health::Health;
use super::lane::{Lane, LaneWrite};
use super::owner::Owner;
use super::peer::{Peer, Presence};
use super::trouble::{Failure, lanes_text};
use crate::error::{Error, Quick, Result};
use crate::flow::striping::Striping;
use crate::wire::control::Received;
use std::sync::Arc;
use std::time::Instant;

/// The two ends of a connection: what both sides' data paths ask when something is amiss.
pub struct Ends {
    /// This one.
    pub host: Arc<Host>,
    /// The other.
    pub peer: Arc<Peer>,
}

impl Ends {
    /// Whether a request that makes no progress is the first one lately, of all connections with the peer.
    #[cold]
    pub fn is_first_stall(&self, direction: Direction) -> bool {
        let window = self.host.config.stall_warn;
        self.host.said.is_first_stall(&self.peer.name, direction, window, Instant::now())
    }
}

/// A rail that a data path found lost.
#[derive(Debug, Clone)]
pub struct Loss {
    /// Its number in the connection.
    pub lane: usize,
    /// How that showed.
    pub why: String,
}

/// What a data path does when a rail is lost or returns: for itself, and for the service thread.
pub trait Half: Send {
    /// Its status. The lanes of the losses there are closed.
    fn health(&mut self) -> &mut Health;

    /// Its lanes.
    fn lanes(&mut self) -> &mut [Lane];

    /// What goes by which of them.
    fn striping(&mut self) -> &mut Striping;

    /// The number of the oldest message that runs, and of the one to begin next.
    fn span(&self) -> (u64, u64);

    /// A rail is lost: stops its queue pairs, takes in what has come, and closes the lane.
    fn lose(&mut self, ends: &Ends, lane: usize);

    /// What has come to a receiver; of a sender, nothing.
    fn received(&self) -> Received;

    /// Both ends have stopped a lane, and the other had this: what is missing goes by other lanes.
    ///
    /// # Errors
    /// [`Error::Usage`] when memory that is still needed was deregistered.
    fn recover(&mut self, ends: &Ends, lane: usize, received: &Received) -> Result<()>;

    /// A closed lane carries again, with new queue pairs: from here on it is used.
    ///
    /// # Errors
    /// As [`Half::recover`].
    fn regain(&mut self, ends: &Ends, lane: usize, new: Lane) -> Result<()>;

    /// Looks at what nobody may be looking at: NCCL's thread sleeps when it waits for nothing. Whether something had come.
    ///
    /// # Errors
    /// Why the connection has failed.
    fn tend(&mut self, ends: &Ends) -> Result<bool>;

    /// Whether something that a loss has left undone waits for room on a rail, and for [`Half::tend`].
    fn is_owing(&mut self) -> bool;

    /// How many receives, from the first on, have all their bytes; 0 of a sender.
    fn delivered(&self) -> u64;

    /// Whether its caller has buffers here that a NIC may still read or write, and has not been told that they are its own again.
    fn holds_buffers(&self) -> bool;

    /// Something failed on a rail: the rail is lost, or the connection.
    ///
    /// # Errors
    /// Why the connection has failed.
    #[cold]
    fn failure(&mut self, ends: &Ends, lane: usize, failure: Failure) -> Quick<()> {
        if let Presence::Closed { .. } = ends.peer.presence() {
            // A peer that has closed takes its queue pairs away: what it had received it has said, and what it did not need fails.
            if let Failure::Device(_) = failure {
                self.lanes()[lane].close();
                self.striping().lose(lane);
            }
            return Ok(());
        }
        match failure {
            Failure::Rail(why) | Failure::Device(why) => self.lose_by(ends, lane, why),
            Failure::Doubtful(why) => {
                let (oldest, next) = self.span();
                if self.health().is_struck_out(oldest, next) {
                    return self.failure(ends, lane, Failure::Fatal(format!("{why}; other rails failed on it before")));
                }
                self.lose_by(ends, lane, why);
            }
            Failure::Fatal(why) => {
                let lanes = self.lanes();
                let Lane { rail, peer_rail: there, .. } = &lanes[lane];
                let (here, peer, all) = (rail.name(), &ends.peer.name, lanes_text(lanes));
                let error = Error::Remote(format!("rail {here} to {peer} failed: {why} (peer rail {there}); {all}"));
                return Err(self.end(Box::new(error)));
            }
        }
        Ok(())
    }

    /// The connection has failed: its queue pairs are taken away before its caller hears of it, who may use its buffers for
    /// something else from then on. What the caller is told, which is the first error.
    #[cold]
    fn end(&mut self, error: Box<Error>) -> Box<Error> {
        self.lanes().iter_mut().for_each(Lane::stop);
        self.lanes().iter_mut().for_each(Lane::close);
        self.health().fail(error)
    }

    /// The data path finds a rail lost, and tells the service thread.
    #[cold]
    fn lose_by(&mut self, ends: &Ends, lane: usize, why: String) {
        if self.lanes()[lane].is_open() {
            self.lose(ends, lane);
            self.health().lost(Loss { lane, why });
            ends.host.service.nudge();
        }
    }

    /// Posts a write on the first queue pair of a lane, if it is open and has room.
    fn post(&mut self, ends: &Ends, lane: usize, write: &LaneWrite) {
        if let Some(slot) = self.lanes()[lane].slot(0)
            && let Err(error) = slot.write(write, None)
        {
            self.lose_by(ends, lane, error.to_string());
        }
    }
}

/// The caller closes its connection. What it still waits for ends here, so that no NIC touches its buffers afterwards; else the queue
/// pairs stay for what the peer has to confirm.
pub fn leave(half: &dyn Shared, peer: &Peer) {
    half.borrow(&mut |half| {
        if half.holds_buffers() {
            tracing::debug!("connection with {} closed while requests were running: they are cancelled", peer.name);
            half.end(Box::new(Error::Usage("connection closed while requests were running".to_owned())));
        }
        // The lanes may stay for a while, and the job's last line does not wait for them.
        half.lanes().iter_mut().for_each(Lane::report);
    });
}

/// A half that is shared with its data path's thread.
pub trait Shared: Send + Sync {
    /// Borrows the half as soon as its data path lets go of it: a call of it takes microseconds and waits for nothing. That does not
    /// count as a use. A half that a fault went through is not lent any more.
    fn borrow(&self, act: &mut dyn FnMut(&mut dyn Half));

    /// Whether nobody has used the data path since this was last asked.
    fn is_unused(&self) -> bool;
}

impl<P: Half> Shared for Owner<P> {
    fn borrow(&self, act: &mut dyn FnMut(&mut dyn Half)) {
        loop {
            if let Some(mut half) = self.enter() {
                act(&mut *half);
                return half.leave_unused();
            }
            if self.is_broken() {
                return;
            }
            std::thread::yield_now();
        }
    }

    fn is_unused(&self) -> bool {
        Owner::is_unused(self)
    }
}
