//! The calls that recovery makes on a data path when rails are lost or return, and the data path's
//! reactions to faults.
//!
//! A share is the part of a message that one lane carries. A grant is the set of CTS
//! (clear-to-send) entries of one receive, which the receiver writes into the sender's memory.

use super::context::PathContext;
use super::fault::{Fault, OVERRUN};
use super::lane::{Lane, LaneWrite, Role, lanes_text};
use super::peer::PeerState;
use super::rails::Rails;
use super::status::{Doubt, Loss, STRIKES};
use host::error::{Error, Network, OnRail, Quick, Result, Violation};
use proto::wire::control::{Progress, Received};
use proto::wire::cts::Epoch;
use proto::wire::ids::LaneId;
use verbs::Completion;

/// A data path of either direction.
pub trait DataPath: Send {
    /// Returns the lanes, striping and status.
    fn rails(&mut self) -> &mut Rails;

    /// Returns the number of the oldest running message, and the number of the next message to
    /// begin.
    fn message_range(&self) -> (u64, u64);

    /// Processes the completions of a lost rail's queue pairs, which have stopped.
    fn stopped(&mut self, context: &PathContext, lane: LaneId, completions: &[Completion]);

    /// Returns the progress of all requests, for the detection of stalls.
    fn progress(&self) -> Progress;

    /// Returns the receives that still wait for data, with their shares that have arrived. The
    /// list of a sender is empty.
    fn received(&self) -> Received;

    /// Over other lanes, a sender resends a lost lane's missing shares, and a receiver repeats the
    /// lane's grants. Called after both ends have stopped the lane. `received` lists the shares
    /// that have arrived at the peer; a receiver ignores the list.
    ///
    /// # Errors
    /// [`Error::Usage`] if memory that a share must be resent from was deregistered.
    fn recover(&mut self, context: &PathContext, lane: LaneId, received: &Received) -> Result<()>;

    /// Uses a lost lane again, with the queue pairs of `new`. If the connection has failed,
    /// destroys these queue pairs and returns false.
    fn regain(&mut self, context: &PathContext, lane: LaneId, new: Lane) -> Result<bool>;

    /// Returns the first epoch (generation of a receiver's keys) whose CTS entries have valid keys
    /// for a lane. `has_new_keys` means that the lane's device has returned with new keys. A
    /// receiver then first begins a new epoch, and repeats the grants of all receives that wait for
    /// data.
    fn epoch_of(
        &mut self,
        context: &PathContext,
        lane: LaneId,
        has_new_keys: bool,
    ) -> Result<Epoch>;

    /// Stores a lane's first epoch with valid keys, as the peer's answer names it. Only a sender
    /// needs the epoch; a receiver does nothing.
    fn learn_epoch(&mut self, lane: LaneId, epoch: Epoch);

    /// Processes completions while NCCL's thread may be asleep, and sends what
    /// [`DataPath::has_repeats`] reports. Returns true if there were completions. Does nothing if
    /// the connection has already failed.
    ///
    /// # Errors
    /// The reason why the connection fails in this call.
    fn poll(&mut self, context: &PathContext) -> Result<bool>;

    /// Returns true if shares or grants must be sent again and at least one lane is open, so that
    /// [`DataPath::poll`] can try to send them.
    fn has_repeats(&mut self) -> bool;

    /// Returns the number of complete receives before the first incomplete one; 0 for a sender.
    fn delivered(&self) -> u64;

    /// Returns true while a NIC may read or write the buffer of a running send, or of a receive
    /// that waits for data. Optional receives do not count.
    fn holds_buffers(&self) -> bool;
}

/// Reactions of a data path to faults. A fault loses a rail or fails the connection, unless the
/// peer has closed the connection.
pub trait Faults {
    /// Reacts to a fault on a lane.
    ///
    /// # Errors
    /// The reason why the connection has failed.
    fn fault(&mut self, context: &PathContext, lane: LaneId, fault: Fault) -> Quick<()>;

    /// Reacts to an error of the completion queue with number `cq`, whose completions are lost.
    /// Does nothing if no lane uses the queue.
    fn lose_completions(&mut self, context: &PathContext, cq: usize) -> Quick<()>;

    /// Ends the use of a rail, records the loss, and wakes the service thread, which stops the
    /// rail's queue pairs. Calls no device.
    fn lose_rail(&mut self, context: &PathContext, lane: LaneId, why: String);

    /// Ends the connection ([`Rails::end`]), and wakes the service thread, which stops the queue
    /// pairs. NCCL gets the first error from a later call.
    fn end(&mut self, context: &PathContext, error: Box<Error>);

    /// Posts a write on a lane's first queue pair, if the lane is open and the queue pair has room.
    fn post(&mut self, context: &PathContext, lane: LaneId, write: &LaneWrite);
}

impl<P: DataPath + ?Sized> Faults for P {
    #[cold]
    fn fault(&mut self, context: &PathContext, lane: LaneId, fault: Fault) -> Quick<()> {
        if let PeerState::Closed { .. } = context.peer.presence() {
            // A closed peer destroys its queue pairs, so writes to it fail. Its BYE confirms the
            // receives that have all their bytes. The peer does not need the other messages, so the
            // failed writes are no fault.
            if let Fault::Device(_) = fault {
                self.rails().set_aside(lane);
            }
            return Ok(());
        }
        match fault {
            Fault::Rail(why) | Fault::Device(why) => self.lose_rail(context, lane, why),
            Fault::SuspectRequest(why) => {
                return lose_suspect(self, context, lane, why, Doubt::Request);
            }
            Fault::KeyRefused(why) => return lose_suspect(self, context, lane, why, Doubt::Key),
            Fault::Fatal(why) => {
                let failed = failed_on(self.rails(), context, lane, why);
                self.end(context, Box::new(Network::OnRail(failed).into()));
            }
            Fault::Violation(why) => {
                let failed = failed_on(self.rails(), context, lane, why.to_string());
                self.end(context, Box::new(Violation::OnRail(failed).into()));
            }
        }
        Ok(())
    }

    #[cold]
    fn lose_completions(&mut self, context: &PathContext, cq: usize) -> Quick<()> {
        let Rails { role, lanes, .. } = self.rails();
        let Some(lane) = LaneId::all(lanes.len()).find(|lane| lanes[lane.index()].has_cq(cq))
        else {
            return Ok(());
        };
        let fault = match role {
            // The lost completions are confirmations. The receiver's report of the shares that have
            // arrived replaces them.
            Role::Sender => Fault::Rail(OVERRUN.to_owned()),
            // The lost completions were the only sign here that bytes have arrived. The sender has
            // seen these bytes acknowledged, so it does not resend them.
            Role::Receiver => Fault::Fatal(OVERRUN.to_owned()),
        };
        self.fault(context, lane, fault)
    }

    #[cold]
    fn lose_rail(&mut self, context: &PathContext, lane: LaneId, why: String) {
        if self.rails().lanes[lane.index()].is_open() {
            self.rails().set_aside(lane);
            self.rails().status.record_loss(Loss { lane, why });
            context.waker.wake();
        }
    }

    #[cold]
    fn end(&mut self, context: &PathContext, error: Box<Error>) {
        self.rails().end(error);
        context.waker.wake();
    }

    fn post(&mut self, context: &PathContext, lane: LaneId, write: &LaneWrite) {
        if let Some(slot) = self.rails().lanes[lane.index()].slot(0)
            && let Err(error) = slot.write(write, None)
        {
            self.lose_rail(context, lane, error.to_string());
        }
    }
}

/// Reacts to a failed request that may itself be the cause of its failure: loses the rail. After
/// too many such losses while one message runs, ends the connection.
#[cold]
fn lose_suspect<P: DataPath + ?Sized>(
    path: &mut P,
    context: &PathContext,
    lane: LaneId,
    why: String,
    doubt: Doubt,
) -> Quick<()> {
    let (oldest, next) = path.message_range();
    let Rails {
        role,
        lanes,
        status,
        ..
    } = path.rails();
    let most = match (doubt, role) {
        // The key may be wrong: the peer's application may have deregistered the buffer. A valid
        // key is refused at most once on each lane, while the lane's device is being removed.
        (Doubt::Key, Role::Sender) => lanes.len() as u8,
        // A receiver uses only the key of the peer's ring, which does not depend on an application.
        // The peer's device may be removed and return many times while one message waits.
        (Doubt::Key, Role::Receiver) | (Doubt::Request, _) => STRIKES,
    };
    if status.is_struck_out(doubt, oldest, next, most) {
        return path.fault(
            context,
            lane,
            Fault::Fatal(format!(
                "{why}; the same request already failed on other rails"
            )),
        );
    }
    path.lose_rail(context, lane, why);
    Ok(())
}

#[cold]
fn failed_on(
    Rails { lanes, .. }: &Rails,
    context: &PathContext,
    lane: LaneId,
    why: String,
) -> Box<OnRail> {
    let Lane {
        rail, peer_rail, ..
    } = &lanes[lane.index()];
    let peer = context.peer.name.clone();
    let peer_rail = peer_rail.clone();
    Box::new(OnRail {
        rail: rail.name(),
        peer,
        why,
        peer_rail,
        lanes: lanes_text(lanes),
    })
}
