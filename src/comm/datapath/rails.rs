//! The lanes of one connection and the striping over them, which are always changed together.

use super::lane::{Lane, Role};
use super::status::Status;
use super::stopping::LostQueues;
use host::error::Error;
use proto::flow::striping::Striping;
use proto::wire::ids::LaneId;

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
        Self {
            role,
            lanes,
            striping,
            status: Status::default(),
        }
    }

    /// Returns the bit set of the open lanes ([`LaneId::bit`]).
    pub fn open_lanes(&self) -> u8 {
        let is_open = |lane: &LaneId| self.lanes[lane.index()].is_open();
        LaneId::all(self.lanes.len())
            .filter(is_open)
            .fold(0, |set, lane| set | lane.bit())
    }

    /// Ends the use of a lane, without a call into its device ([`Lane::set_aside`]).
    #[cold]
    pub fn set_aside(&mut self, lane: LaneId) {
        self.lanes[lane.index()].set_aside();
        self.striping.lose(lane);
    }

    /// Forgets what a lost lane had to send, and its measured pace. Called after the completions of
    /// its stopped queue pairs were processed, because they update both.
    #[cold]
    pub fn settle(&mut self, lane: LaneId) {
        self.lanes[lane.index()].drop_backlog();
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

    /// Ends the connection: ends the use of all lanes, and stores the error. The service thread
    /// then stops the queue pairs, and calls [`Status::stopped`]: only after this NCCL gets the
    /// error, because it may then reuse its buffers.
    #[cold]
    pub fn end(&mut self, error: Box<Error>) {
        LaneId::all(self.lanes.len()).for_each(|lane| self.set_aside(lane));
        self.status.end(error);
    }

    /// Takes all queue pairs that are no longer used but have not stopped: of lost lanes, and after
    /// the end of the connection also those that the peer was testing.
    #[cold]
    pub fn take_lost(&mut self) -> Vec<(Option<LaneId>, Box<LostQueues>)> {
        let lanes = LaneId::all(self.lanes.len()).zip(&mut self.lanes);
        let lost = lanes.filter_map(|(id, lane)| Some((Some(id), lane.take_lost()?)));
        let untested = if self.status.has_failed() {
            self.status.take_all()
        } else {
            Vec::new()
        };
        lost.chain(
            untested
                .into_iter()
                .filter_map(|lane| Some((None, lane.into_lost()?))),
        )
        .collect()
    }
}
