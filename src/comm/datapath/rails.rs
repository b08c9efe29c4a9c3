//! The lanes of one connection and the striping over them, which are always changed together.

use super::lane::{Lane, Role};
use super::status::Status;
use crate::error::Error;
use crate::flow::striping::Striping;
use crate::wire::ids::LaneId;

/// The lanes of one connection, with their striping and status.
pub struct Rails {
    /// Role of this side: sender or receiver.
    pub role: Role,
    /// Lanes, by [`LaneId`].
    pub lanes: Vec<Lane>,
    /// Division of messages over the lanes.
    pub striping: Striping,
    /// Losses that recovery must handle, queue pairs under test, and the error that ended the
    /// connection.
    pub status: Status,
}

impl Rails {
    /// Creates the rails of a new connection.
    pub fn new(role: Role, lanes: Vec<Lane>, striping: Striping) -> Self {
        Self { role, lanes, striping, status: Status::default() }
    }

    /// Returns the bit set of the open lanes ([`LaneId::bit`]).
    pub fn open_lanes(&self) -> u8 {
        let is_open = |lane: &LaneId| self.lanes[lane.index()].is_open();
        LaneId::all(self.lanes.len()).filter(is_open).fold(0, |set, lane| set | lane.bit())
    }

    /// Closes a lane, and forgets the lane's measured pace. The caller must already have processed
    /// the lane's completions, because they update the pace.
    #[cold]
    pub fn close_lane(&mut self, lane: LaneId) {
        self.lanes[lane.index()].close();
        self.striping.lose(lane);
    }

    /// Uses a closed lane again, with the queue pairs of `new`. If the connection has failed,
    /// destroys these queue pairs and returns false.
    #[cold]
    pub fn regain(&mut self, lane: LaneId, new: Lane) -> bool {
        if self.status.has_failed() {
            return false;
        }
        self.status.drop_stale_losses(lane);
        self.lanes[lane.index()].take_over(new);
        self.striping.regain(lane);
        true
    }

    /// Ends the connection and returns its first error. Destroys the queue pairs first, because the
    /// caller may reuse its buffers once it has the error.
    #[cold]
    pub fn end(&mut self, error: Box<Error>) -> Box<Error> {
        self.lanes.iter_mut().for_each(|lane| _ = lane.stop());
        self.lanes.iter_mut().for_each(Lane::close);
        self.status.fail(error)
    }
}
