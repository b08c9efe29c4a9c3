//! Status of a data path: lost rails, queue pairs under test, and the connection's failure.

use super::lane::Lane;
use host::error::{Error, Quick};
use proto::wire::ids::LaneId;

/// Number of losses that are blamed on the rails, although a request may have caused the losses.
/// The next loss is blamed on the request. A Spark has four rails, and all of them may fail
/// together. The number allows for two such failures.
pub const STRIKES: u8 = 8;

/// What may have caused the loss of a rail, other than the rail. The losses of each kind are
/// counted separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doubt {
    /// The work request as a whole.
    Request,
    /// The key of the peer's memory (rkey) that the request uses.
    Key,
}

/// A rail that a data path found lost.
#[derive(Debug, Clone)]
pub struct Loss {
    /// Lane of the rail.
    pub lane: LaneId,
    /// Text of the failure.
    pub why: String,
}

/// Status of a data path.
#[derive(Default)]
pub struct Status {
    losses: Vec<Loss>,
    /// New queue pairs that the peer is testing. The peer may use them to write into this
    /// connection's buffers before its message LIVE, the end of the test, arrives here. So they are
    /// stopped when the connection fails.
    untested_lanes: Vec<(LaneId, Lane)>,
    strikes: [Strikes; 2],
    /// Error that ends the connection, while its queue pairs are being stopped.
    ending: Option<Box<Error>>,
    /// Error of every call.
    failed: Option<Box<Error>>,
}

/// Count of the losses of one kind of [`Doubt`]: losses that a wrong request may have caused
/// ([`verbs::Blame::Either`]), or losses that a wrong key may have caused
/// ([`verbs::Blame::Key`]).
///
/// A request that no rail can carry takes down each rail that it is posted on. Rails recover, so
/// the request would be retried forever without this count. The count starts again once all
/// messages that were running at the first loss have ended.
#[derive(Debug, Default)]
pub struct Strikes {
    count: u8,
    /// Number of the next message to begin, taken at the first loss.
    since: u64,
}

impl Strikes {
    /// Counts a loss, and returns true if the count is above `most`. `oldest` is the number of the
    /// oldest running message, and `next` is the number of the next message to begin.
    #[cold]
    pub fn count_loss(&mut self, oldest: u64, next: u64, most: u8) -> bool {
        if self.count == 0 || oldest >= self.since {
            *self = Self {
                count: 0,
                since: next,
            };
        }
        self.count += 1;
        self.count > most
    }
}

impl Status {
    /// Returns the failure as an error if the connection has failed and its queue pairs have
    /// stopped.
    #[inline(always)]
    pub fn check(&self) -> Quick<()> {
        match &self.failed {
            None => Ok(()),
            Some(failed) => Err(failed.clone()),
        }
    }

    /// Returns true if the connection has failed. NCCL gets the error from a later call, once the
    /// queue pairs have stopped.
    pub fn has_failed(&self) -> bool {
        self.ending.is_some() || self.failed.is_some()
    }

    /// Returns true if the connection has failed, and its queue pairs have not stopped yet.
    pub fn is_ending(&self) -> bool {
        self.ending.is_some()
    }

    /// Returns the error of a failed connection.
    pub fn failure(&self) -> Option<&Error> {
        self.ending.as_deref().or(self.failed.as_deref())
    }

    /// Marks the connection as failed. [`super::rails::Rails::end`] ends the use of its lanes. The
    /// first error counts.
    #[cold]
    pub fn end(&mut self, error: Box<Error>) {
        if !self.has_failed() {
            self.ending = Some(error);
        }
    }

    /// Records that the queue pairs of a failed connection have stopped. From now on every call
    /// returns the error.
    #[cold]
    pub fn stopped(&mut self) {
        self.failed = self.failed.take().or_else(|| self.ending.take());
    }

    /// Stores queue pairs that the peer will test. If the connection has failed, destroys the queue
    /// pairs and returns false.
    #[cold]
    pub fn keep(&mut self, lane: LaneId, new: Lane) -> bool {
        if !self.has_failed() {
            self.untested_lanes.push((lane, new));
        }
        !self.has_failed()
    }

    /// Takes all queue pairs that the peer is testing.
    #[cold]
    pub fn take_all(&mut self) -> Vec<Lane> {
        std::mem::take(&mut self.untested_lanes)
            .into_iter()
            .map(|(_, lane)| lane)
            .collect()
    }

    /// Takes a lane's queue pairs when their test has ended.
    #[cold]
    pub fn take(&mut self, lane: LaneId) -> Option<Lane> {
        let at = self.untested_lanes.iter().position(|(of, _)| *of == lane)?;
        Some(self.untested_lanes.swap_remove(at).1)
    }

    /// Counts a loss that a wrong request or key may have caused; see [`Strikes::count_loss`].
    #[cold]
    pub fn is_struck_out(&mut self, doubt: Doubt, oldest: u64, next: u64, most: u8) -> bool {
        self.strikes[doubt as usize].count_loss(oldest, next, most)
    }

    /// Clears the count of losses by refused keys. Called when the peer has sent new keys: only its
    /// old keys were refused, so the requests did not cause the losses.
    #[cold]
    pub fn reset_key_losses(&mut self) {
        self.strikes[Doubt::Key as usize] = Strikes::default();
    }

    /// Stores a loss for the service thread.
    #[cold]
    pub fn record_loss(&mut self, loss: Loss) {
        self.losses.push(loss);
    }

    /// Drops a lane's stored losses before the lane carries data again. They concern the lane's old
    /// queue pairs, which were already fenced because the peer reported the loss first. Recovery
    /// would mistake a stored loss for a loss of the new queue pairs, and would take the new queue
    /// pairs for stopped ones.
    #[cold]
    pub fn drop_stale_losses(&mut self, lane: LaneId) {
        self.losses.retain(|loss| loss.lane != lane);
    }

    /// Takes the losses found since the last call.
    pub fn take_losses(&mut self) -> Vec<Loss> {
        std::mem::take(&mut self.losses)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::error::{Network, Usage};
    use proto::wire::ids::LaneId;

    fn lane(number: usize) -> LaneId {
        LaneId::new(number).unwrap()
    }

    #[test]
    fn rails_lost_over_one_message_are_counted_until_it_ends() {
        let mut strikes = Strikes::default();
        for _ in 0..STRIKES {
            assert!(!strikes.count_loss(7, 20, STRIKES));
        }
        assert!(
            strikes.count_loss(7, 30, STRIKES),
            "too many rails were lost while message 7 ran"
        );
        let mut strikes = Strikes::default();
        for round in 0..100 {
            assert!(
                !strikes.count_loss(10 * round, 10 * round + 10, STRIKES),
                "loss {round} starts a new count: the messages of the last loss have ended"
            );
        }
    }

    #[test]
    fn losses_by_requests_and_by_keys_have_separate_counts_and_new_keys_clear_theirs() {
        let mut status = Status::default();
        let lost_over = |status: &mut Status, doubt| status.is_struck_out(doubt, 7, 20, 2);
        for doubt in [Doubt::Request, Doubt::Key] {
            assert!(!lost_over(&mut status, doubt) && !lost_over(&mut status, doubt));
        }
        status.reset_key_losses();
        assert!(!lost_over(&mut status, Doubt::Key) && lost_over(&mut status, Doubt::Request));
    }

    #[test]
    fn a_lane_that_carries_again_has_no_loss_left() {
        let mut status = Status::default();
        for at in [0, 1] {
            status.record_loss(Loss {
                lane: lane(at),
                why: String::new(),
            });
        }
        status.drop_stale_losses(lane(0));
        let losses: Vec<_> = status
            .take_losses()
            .into_iter()
            .map(|loss| loss.lane)
            .collect();
        assert_eq!(losses, [lane(1)]);
    }

    #[test]
    fn the_first_error_is_kept_and_returned_once_the_queue_pairs_have_stopped() {
        let mut status = Status::default();
        assert!(status.check().is_ok() && !status.has_failed());
        let first = Error::from(Network::SetupEnded);
        let another = Error::from(Usage::Closed);
        status.end(first.clone().into());
        assert!(
            status.has_failed() && status.is_ending() && status.check().is_ok(),
            "queue pairs may run"
        );
        status.end(another.clone().into());
        status.stopped();
        assert!(status.has_failed() && !status.is_ending());
        status.end(another.into());
        status.stopped();
        assert_eq!(status.check(), Err(first.into()));
    }
}
