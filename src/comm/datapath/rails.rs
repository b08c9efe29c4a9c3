//! The rails of one connection, in its data path: lanes with the division of messages over them,
//! queue pairs on trial, losses for recovery, and the error that ended the connection.
//!
//! A lane that closes or carries again does so together with its part of the striping, here.

use super::lane::{Lane, Role};
use super::status::Status;
use crate::error::Error;
use crate::flow::striping::Striping;
use crate::wire::ids::LaneId;

/// The rails of one connection.
pub struct Rails {
    /// Side of the connection.
    pub role: Role,
    /// Its lanes, by [`LaneId`].
    pub lanes: Vec<Lane>,
    /// Division of messages over the lanes.
    pub striping: Striping,
    /// Losses, queue pairs on trial, and the error of a connection that has failed.
    pub status: Status,
}

impl Rails {
    /// The rails of a new connection.
    pub fn new(role: Role, lanes: Vec<Lane>, striping: Striping) -> Self {
        Self { role, lanes, striping, status: Status::default() }
    }

    /// Returns the set of open lanes, with a bit for each.
    pub fn open_lanes(&self) -> u8 {
        let is_open = |lane: &LaneId| self.lanes[lane.index()].is_open();
        LaneId::all(self.lanes.len()).filter(is_open).fold(0, |set, lane| set | lane.bit())
    }

    /// Closes a lane whose completions were taken in. They would count as the rail's pace, so the
    /// striping loses it afterwards.
    #[cold]
    pub fn close_lane(&mut self, lane: LaneId) {
        self.lanes[lane.index()].close();
        self.striping.lose(lane);
    }

    /// Uses a closed lane again, with new queue pairs. Returns false if the connection has failed;
    /// the queue pairs are destroyed then.
    #[cold]
    pub fn regain(&mut self, lane: LaneId, new: Lane) -> bool {
        if self.status.has_failed() {
            return false;
        }
        self.status.regained(lane);
        self.lanes[lane.index()].take_over(new);
        self.striping.regain(lane);
        true
    }

    /// Ends the connection: destroys its queue pairs before its caller hears of the error, because
    /// the caller may use its buffers for something else from then on. Returns the first error.
    #[cold]
    pub fn end(&mut self, error: Box<Error>) -> Box<Error> {
        self.lanes.iter_mut().for_each(|lane| _ = lane.stop());
        self.lanes.iter_mut().for_each(Lane::close);
        self.status.fail(error)
    }
}
