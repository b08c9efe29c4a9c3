//! Attempts to bring up a rail since the connection last used it.
//!
//! [`Attempts`] is part of recovery's state of a rail: it begins a new attempt and counts failed
//! ones when the rail's state changes. The caller reports one fact more,
//! [`Recovery::path_chosen`], because the sides agree on a path in the middle of an attempt.

use super::{Cause, Recovery, State};
use crate::wire::ids::LaneId;

/// Largest number of paths whose failures are kept. Few rails have more combinations of peer
/// address and path MTU.
const MAX_FAILED_PATHS: usize = 6;

/// A path to the peer's rail, as one attempt uses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathChoice {
    /// Address of the peer's rail.
    pub peer_gid: [u8; 16],
    /// Path MTU in bytes.
    pub mtu_bytes: u32,
}

/// Failed attempts on one path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedAttempts {
    /// `None` if the attempts ended before their path was chosen.
    pub path: Option<PathChoice>,
    /// Number of these attempts, at least 1.
    pub count: u32,
    /// Cause of the first failure.
    pub cause: Cause,
}

/// The attempts of one rail.
#[derive(Debug, Clone, Default)]
pub struct Attempts {
    /// Paths of the last two attempts that had one, the newest first.
    last_paths: [Option<PathChoice>; 2],
    /// True if the newest of `last_paths` belongs to the newest attempt.
    has_path: bool,
    answers: u32,
    failed: Vec<FailedAttempts>,
}

/// A rail that did not work at the end of the handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// Lane of the rail.
    pub lane: LaneId,
    /// The path that the handshake chose.
    pub path: PathChoice,
    /// The reason why the path does not work.
    pub why: String,
    /// True for a rail that has never had a link and an address
    /// ([`Pair::is_late`](crate::flow::pairing::Pair::is_late)).
    pub is_late: bool,
}

impl Attempts {
    /// Returns the paths of the last two attempts that had one, the newest first. Attempts may
    /// alternate between two paths.
    pub fn last_paths(&self) -> [Option<PathChoice>; 2] {
        self.last_paths
    }

    /// Returns the number of answers to the peer's attempts since the rail last worked, including
    /// the answer that is in preparation. A handshake without success counts as the first. Always 0
    /// or 1 on the connecting side.
    pub fn answers(&self) -> u32 {
        self.answers
    }

    /// Returns the failures for a message: the handshake's, and those of later attempts until the
    /// connection has its first rail. Forgotten when this rail comes into use.
    pub fn failed(&self) -> &[FailedAttempts] {
        &self.failed
    }

    /// Notes that the rail's state changes. `is_first_rail` is true while the connection waits for
    /// its first rail.
    pub(super) fn state_changes(&mut self, to: &State, cause: &Cause, is_first_rail: bool) {
        match (to, cause) {
            (State::Opening { .. }, _) => self.has_path = false,
            (State::Answering, _) => (self.has_path, self.answers) = (false, self.answers + 1),
            (State::Up { .. }, _) => {
                self.answers = 0;
                self.failed.clear();
            }
            // A postponed attempt has not failed.
            (State::Down { .. }, Cause::StoppedByBoth | Cause::Deferred(_)) => {}
            (State::Down { .. }, cause) if is_first_rail => self.record_failure(cause),
            _ => {}
        }
    }

    pub(super) fn fail_in_handshake(&mut self, path: PathChoice, why: &str) {
        self.choose(path);
        self.answers = 1;
        self.record_failure(&Cause::Failed(why.to_owned()));
    }

    fn choose(&mut self, path: PathChoice) {
        self.last_paths = [Some(path), self.last_paths[0]];
        self.has_path = true;
    }

    fn record_failure(&mut self, cause: &Cause) {
        let path = self.last_paths[0].filter(|_| self.has_path);
        if let Some(known) = self.failed.iter_mut().find(|known| known.path == path) {
            known.count += 1;
        } else if self.failed.len() < MAX_FAILED_PATHS {
            self.failed.push(FailedAttempts {
                path,
                count: 1,
                cause: cause.clone(),
            });
        }
    }
}

impl Recovery {
    /// Returns the attempts to bring up a rail.
    ///
    /// # Panics
    /// If the connection has no such lane.
    pub fn attempts(&self, lane: LaneId) -> &Attempts {
        &self.rails[lane.index()].attempts
    }

    /// Reports the path of the attempt that is under way. The accepting side reports it before
    /// [`Recovery::answered`], the connecting side before [`Recovery::connected`].
    ///
    /// # Panics
    /// If the connection has no such lane.
    pub fn path_chosen(&mut self, lane: LaneId, path: PathChoice) {
        self.rails[lane.index()].attempts.choose(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(mtu_bytes: u32) -> PathChoice {
        PathChoice {
            peer_gid: [7; 16],
            mtu_bytes,
        }
    }

    fn fail(attempts: &mut Attempts, why: &str) {
        let cause = Cause::Failed(why.to_owned());
        attempts.state_changes(&State::Down { retry_at: 0 }, &cause, true);
    }

    #[test]
    fn failures_are_counted_by_path_and_forgotten_in_use() {
        let mut attempts = Attempts::default();
        attempts.fail_in_handshake(path(4096), "silent");
        attempts.state_changes(&State::Answering, &Cause::Done, true);
        assert_eq!(attempts.answers(), 2);
        // No path yet: the failure does not count for the path before.
        fail(&mut attempts, "no subnet");
        attempts.state_changes(&State::Answering, &Cause::Done, true);
        attempts.choose(path(4096));
        fail(&mut attempts, "silent again");
        attempts.state_changes(&State::Answering, &Cause::Done, true);
        attempts.choose(path(1024));
        fail(&mut attempts, "silent too");
        let failed = |path, count, why: &str| FailedAttempts {
            path,
            count,
            cause: Cause::Failed(why.to_owned()),
        };
        let all = [
            failed(Some(path(4096)), 2, "silent"),
            failed(None, 1, "no subnet"),
            failed(Some(path(1024)), 1, "silent too"),
        ];
        assert_eq!(attempts.failed(), all);
        assert_eq!(
            attempts.last_paths(),
            [Some(path(1024)), Some(path(4096))],
            "{attempts:?}"
        );
        attempts.state_changes(&State::Up { since: 0 }, &Cause::Done, false);
        assert_eq!((attempts.failed(), attempts.answers()), (&[][..], 0));
        assert!(attempts.last_paths()[0].is_some());
    }

    #[test]
    fn only_failures_before_the_first_rail_are_kept() {
        let mut attempts = Attempts::default();
        let down = State::Down { retry_at: 0 };
        let refused = Cause::Refused("no".to_owned());
        attempts.state_changes(&down, &refused, false);
        attempts.state_changes(&down, &Cause::StoppedByBoth, true);
        attempts.state_changes(&down, &Cause::Deferred("later".to_owned()), true);
        assert_eq!(attempts.failed(), []);
        attempts.state_changes(&down, &refused, true);
        for mtu_bytes in 0..10 {
            attempts.choose(path(mtu_bytes));
            attempts.state_changes(&down, &refused, true);
        }
        assert_eq!(attempts.failed().len(), MAX_FAILED_PATHS);
    }
}
