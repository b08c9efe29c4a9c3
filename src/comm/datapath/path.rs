//! Calls of recovery on a data path when rails are lost or return, and reactions to faults.

use super::context::PathContext;
use super::fault::{Fault, OVERRUN};
use super::lane::{Lane, LaneWrite, Role, lanes_text};
use super::peer::PeerState;
use super::rails::Rails;
use super::status::{Doubt, Fenced, Loss, STRIKES};
use crate::error::{Error, Network, OnRail, Quick, Result, Violation};
use crate::wire::control::{Progress, Received};
use crate::wire::cts::Epoch;
use crate::wire::ids::LaneId;

/// A data path of either direction.
pub trait DataPath: Send {
    /// Returns the lanes, striping and status.
    fn rails(&mut self) -> &mut Rails;

    /// Returns the numbers of the oldest running message and of the next one to begin.
    fn message_range(&self) -> (u64, u64);

    /// Stops the queue pairs of a lost rail, processes their completions, and closes the lane. If
    /// the device cannot be stopped yet, only ends the use of the lane.
    fn lose(&mut self, context: &PathContext, lane: LaneId) -> Fenced;

    /// Returns the progress of all requests, for the detection of stalls.
    fn progress(&self) -> Progress;

    /// Returns the receives that have arrived; empty for a sender.
    fn received(&self) -> Received;

    /// Resends a lost lane's missing shares, or repeats its grants, over other lanes. Called after
    /// both ends have stopped the lane. `received` lists the shares that have arrived at the peer.
    ///
    /// # Errors
    /// [`Error::Usage`] if memory that is still needed was deregistered.
    fn recover(&mut self, context: &PathContext, lane: LaneId, received: &Received) -> Result<()>;

    /// Uses a closed lane again, with new queue pairs. If the connection has failed, destroys them
    /// and returns false.
    fn regain(&mut self, context: &PathContext, lane: LaneId, new: Lane) -> Result<bool>;

    /// Returns the first epoch (generation of a receiver's keys) whose CTS entries have valid keys
    /// for a lane. With `has_new_keys` (the lane's device has returned), a receiver begins a new
    /// epoch and repeats all grants.
    fn epoch_of(&mut self, context: &PathContext, lane: LaneId, has_new_keys: bool) -> Result<Epoch>;

    /// Stores a lane's first epoch with valid keys, from the receiver's answer. A receiver ignores
    /// it.
    fn learn_epoch(&mut self, lane: LaneId, epoch: Epoch);

    /// Processes completions while NCCL's thread may be asleep. Returns true if there were any.
    ///
    /// # Errors
    /// The reason why the connection has failed.
    fn poll(&mut self, context: &PathContext) -> Result<bool>;

    /// Returns true if [`DataPath::poll`] has shares or grants to send again on an open lane.
    fn has_repeats(&mut self) -> bool;

    /// Returns the number of complete receives before the first incomplete one; 0 for a sender.
    fn delivered(&self) -> u64;

    /// Forgets all requests, after the connection has failed and its queue pairs are destroyed.
    fn ended(&mut self) {}

    /// Returns true while requests run, whose buffers a NIC may read or write.
    fn holds_buffers(&self) -> bool;
}

/// Reactions of a data path to faults. A fault costs a rail or the connection.
pub trait Faults {
    /// Reacts to a fault on a lane.
    ///
    /// # Errors
    /// The reason why the connection has failed.
    fn fault(&mut self, context: &PathContext, lane: LaneId, fault: Fault) -> Quick<()>;

    /// Reacts to an error of completion queue `cq`, whose completions are lost. Does nothing if no
    /// lane uses the queue.
    fn lose_completions(&mut self, context: &PathContext, cq: usize) -> Quick<()>;

    /// Stops the use of a rail, records the loss, and wakes the service thread.
    fn lose_rail(&mut self, context: &PathContext, lane: LaneId, why: String);

    /// Ends the connection ([`Rails::end`]). Returns the first error.
    fn end(&mut self, error: Box<Error>) -> Box<Error>;

    /// Posts a write on a lane's first queue pair, if the lane is open and the queue pair has room.
    fn post(&mut self, context: &PathContext, lane: LaneId, write: &LaneWrite);
}

impl<P: DataPath + ?Sized> Faults for P {
    #[cold]
    fn fault(&mut self, context: &PathContext, lane: LaneId, fault: Fault) -> Quick<()> {
        if let PeerState::Closed { .. } = context.peer.presence() {
            // A closed peer destroys its queue pairs, so writes to it fail. Its BYE confirms the
            // receives that have arrived. The peer does not need the others.
            if let Fault::Device(_) = fault {
                self.rails().close_lane(lane);
            }
            return Ok(());
        }
        match fault {
            Fault::Rail(why) | Fault::Device(why) => self.lose_rail(context, lane, why),
            Fault::SuspectRequest(why) => return lose_suspect(self, context, lane, why, Doubt::Request),
            Fault::KeyRefused(why) => return lose_suspect(self, context, lane, why, Doubt::Key),
            Fault::Fatal(why) => {
                let failed = failed_on(self.rails(), context, lane, why);
                return Err(self.end(Box::new(Network::OnRail(failed).into())));
            }
            Fault::Violation(why) => {
                let failed = failed_on(self.rails(), context, lane, why.to_string());
                return Err(self.end(Box::new(Violation::OnRail(failed).into())));
            }
        }
        Ok(())
    }

    #[cold]
    fn lose_completions(&mut self, context: &PathContext, cq: usize) -> Quick<()> {
        let Rails { role, lanes, .. } = self.rails();
        let Some(lane) = LaneId::all(lanes.len()).find(|lane| lanes[lane.index()].has_cq(cq)) else {
            return Ok(());
        };
        let fault = match role {
            // The receiver reports which shares have arrived.
            Role::Sender => Fault::Rail(OVERRUN.to_owned()),
            // The sender has the acknowledgement of bytes whose completions are lost here, so it
            // does not resend them.
            Role::Receiver => Fault::Fatal(OVERRUN.to_owned()),
        };
        self.fault(context, lane, fault)
    }

    #[cold]
    fn lose_rail(&mut self, context: &PathContext, lane: LaneId, why: String) {
        if self.rails().lanes[lane.index()].is_open() {
            let fenced = self.lose(context, lane);
            self.rails().status.record_loss(Loss { lane, why, fenced });
            context.waker.wake();
        }
    }

    #[cold]
    fn end(&mut self, error: Box<Error>) -> Box<Error> {
        let first = self.rails().end(error);
        self.ended();
        first
    }

    fn post(&mut self, context: &PathContext, lane: LaneId, write: &LaneWrite) {
        if let Some(slot) = self.rails().lanes[lane.index()].slot(0)
            && let Err(error) = slot.write(write, None)
        {
            self.lose_rail(context, lane, error.to_string());
        }
    }
}

/// Reacts to a lost rail if the request may be the cause. Too many such losses while one message
/// runs end the connection.
#[cold]
fn lose_suspect<P: DataPath + ?Sized>(
    path: &mut P,
    context: &PathContext,
    lane: LaneId,
    why: String,
    doubt: Doubt,
) -> Quick<()> {
    let (oldest, next) = path.message_range();
    let Rails { role, lanes, status, .. } = path.rails();
    let most = match (doubt, role) {
        // The key may be wrong: the peer's application may have deregistered the buffer. A valid
        // key is refused at most once on each lane, while its device is being removed.
        (Doubt::Key, Role::Sender) => lanes.len() as u8,
        // A receiver uses only the key of the peer's ring, which does not depend on an application.
        // The peer's device may be removed and return many times while one message waits.
        (Doubt::Key, Role::Receiver) | (Doubt::Request, _) => STRIKES,
    };
    if status.is_struck_out(doubt, oldest, next, most) {
        return path.fault(
            context,
            lane,
            Fault::Fatal(format!("{why}; the same request already failed on other rails")),
        );
    }
    path.lose_rail(context, lane, why);
    Ok(())
}

#[cold]
fn failed_on(Rails { lanes, .. }: &Rails, context: &PathContext, lane: LaneId, why: String) -> Box<OnRail> {
    let Lane { rail, peer_rail, .. } = &lanes[lane.index()];
    let (peer, peer_rail) = (context.peer.name.clone(), peer_rail.clone());
    Box::new(OnRail { rail: rail.name(), peer, why, peer_rail, lanes: lanes_text(lanes) })
}
