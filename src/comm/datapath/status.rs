//! Data-path status: which rails it has found lost, which are under test, and whether the connection has failed.

use super::lane::Lane;
use crate::error::{Error, Quick};
use crate::wire::ids::LaneId;

/// Requests that a rail may be lost over, perhaps by their own fault, before one of them is taken to be wrong: twice as many as the
/// rails of a Spark, which may have an accident at the same time.
pub const STRIKES: u8 = 8;

/// Whether the NIC leaves the connection's memory alone, as far as a lost lane is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fenced {
    /// It does.
    Now,
    /// It was cut off, and may still read and write: to be asked again.
    NotYet,
}

/// What a rail was lost over that may be the request's fault, and not the rail's. Each is counted by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doubt {
    /// The request.
    Request,
    /// Its key of the peer's memory.
    Key,
}

/// A rail that a data path found lost.
#[derive(Debug, Clone)]
pub struct Loss {
    /// Its lane.
    pub lane: LaneId,
    /// How that showed.
    pub why: String,
    /// Whether its NIC leaves memory alone.
    pub fenced: Fenced,
}

/// Data-path status.
#[derive(Default)]
pub struct Status {
    losses: Vec<Loss>,
    /// Queue pairs that the peer tries, and the lane that they are for. What it writes by them lands in this connection's buffers
    /// before it is heard that they carry: so they go when it fails.
    on_trial: Vec<(LaneId, Lane)>,
    strikes: [Strikes; 2],
    failed: Option<Box<Error>>,
}

/// Rails that were lost over what may have been the request's fault ([`crate::verbs::Blame::Either`]).
///
/// A request that no rail can carry goes round: each rail that it is posted on is lost, and returns. Such a request never ends,
/// and so what counts is how often this happens while nothing that ran at the first time has ended.
#[derive(Debug, Default)]
pub struct Strikes {
    count: u8,
    /// The message that was to begin next at the first of them.
    since: u64,
}

impl Strikes {
    /// One more, while the oldest message that runs is number `oldest` and the one to begin next is number `next`. Whether
    /// that is more than `most`.
    #[cold]
    pub fn another(&mut self, oldest: u64, next: u64, most: u8) -> bool {
        if self.count == 0 || oldest >= self.since {
            *self = Self { count: 0, since: next };
        }
        self.count += 1;
        self.count > most
    }
}

impl Status {
    /// Whether the connection works.
    ///
    /// # Errors
    /// Why it has failed.
    #[inline(always)]
    pub fn check(&self) -> Quick<()> {
        match &self.failed {
            None => Ok(()),
            Some(failed) => Err(failed.clone()),
        }
    }

    /// Whether the connection has failed. Its caller has been told then, or will be, and may use its buffers for something else.
    #[inline(always)]
    pub fn has_failed(&self) -> bool {
        self.failed.is_some()
    }

    /// The connection has failed; the error that its caller is told from here on, which is the first. The lanes are closed, by
    /// [`super::path::DataPath::end`].
    #[cold]
    pub fn fail(&mut self, error: impl Into<Box<Error>>) -> Box<Error> {
        self.on_trial.clear();
        self.failed.get_or_insert_with(|| error.into()).clone()
    }

    /// Keeps queue pairs that the peer is going to try, unless the connection has failed; whether it does.
    #[cold]
    pub fn keep(&mut self, lane: LaneId, new: Lane) -> bool {
        if !self.has_failed() {
            self.on_trial.push((lane, new));
        }
        !self.has_failed()
    }

    /// The queue pairs on trial for a lane: the trial is over.
    #[cold]
    pub fn take(&mut self, lane: LaneId) -> Option<Lane> {
        let at = self.on_trial.iter().position(|(of, _)| *of == lane)?;
        Some(self.on_trial.swap_remove(at).1)
    }

    /// A rail was found lost, perhaps over what was asked of it; see [`Strikes::another`].
    #[cold]
    pub fn is_struck_out(&mut self, doubt: Doubt, oldest: u64, next: u64, most: u8) -> bool {
        self.strikes[doubt as usize].another(oldest, next, most)
    }

    /// The keys that were refused are explained, and were no request's fault.
    #[cold]
    pub fn forgive(&mut self) {
        self.strikes[Doubt::Key as usize] = Strikes::default();
    }

    /// A rail was found lost.
    #[cold]
    pub fn lost(&mut self, loss: Loss) {
        self.losses.push(loss);
    }

    /// Forgets the losses of a lane that is about to carry again. The peer reported them first, so the
    /// lane was fenced without them. Reported now they would take the new queue pairs for stopped.
    #[cold]
    pub fn regained(&mut self, lane: LaneId) {
        self.losses.retain(|loss| loss.lane != lane);
    }

    /// Takes the losses since the last call.
    pub fn take_losses(&mut self) -> Vec<Loss> {
        std::mem::take(&mut self.losses)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::ids::lane;

    #[test]
    fn rails_lost_over_one_message_are_counted_until_it_ends() {
        let mut strikes = Strikes::default();
        for _ in 0..STRIKES {
            assert!(!strikes.another(7, 20, STRIKES));
        }
        assert!(strikes.another(7, 30, STRIKES), "message 7 has taken them all with it");
        let mut strikes = Strikes::default();
        for round in 0..100 {
            assert!(!strikes.another(10 * round, 10 * round + 10, STRIKES), "what ran at the last one has ended");
        }
    }

    #[test]
    fn refused_requests_and_refused_keys_are_counted_apart_and_keys_are_forgiven() {
        let mut status = Status::default();
        let lost_over = |status: &mut Status, doubt| status.is_struck_out(doubt, 7, 20, 2);
        for doubt in [Doubt::Request, Doubt::Key] {
            assert!(!lost_over(&mut status, doubt) && !lost_over(&mut status, doubt));
        }
        status.forgive();
        assert!(!lost_over(&mut status, Doubt::Key) && lost_over(&mut status, Doubt::Request));
    }

    #[test]
    fn a_lane_that_carries_again_has_no_loss_left() {
        let mut status = Status::default();
        for at in [0, 1] {
            status.lost(Loss { lane: lane(at), why: String::new(), fenced: Fenced::Now });
        }
        status.regained(lane(0));
        let losses: Vec<_> = status.take_losses().into_iter().map(|loss| loss.lane).collect();
        assert_eq!(losses, [lane(1)]);
    }

    #[test]
    fn the_first_error_stays() {
        let mut status = Status::default();
        assert!(status.check().is_ok() && !status.has_failed());
        let first = Error::Network("the first".to_owned());
        assert_eq!(status.fail(first).to_string(), status.fail(Error::Usage("another".to_owned())).to_string());
        assert!(status.has_failed() && status.check().is_err());
    }
}
