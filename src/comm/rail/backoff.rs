//! Findings about paths ([`proto::backoff`]), behind a lock: all connections of the process share
//! them. This module maps errors to findings and findings to texts. Only set-up and the service
//! thread use it.

use super::Rail;
use crate::comm::threads::lock;
use host::error::{Error, Network, Result};
use proto::backoff::{self, Connected, KnownPaths, PathId, Refusal, Requirement};
use proto::time::Instant;
use std::sync::{Arc, Mutex};
use std::time::Duration;

type Shared = Arc<Mutex<KnownPaths<String>>>;

/// Findings about paths.
#[derive(Debug, Default)]
pub struct Backoff(Shared);

/// Right of one connection to try a path while the others wait. It ends on drop.
#[derive(Debug)]
pub struct Trial {
    known: Shared,
    id: PathId,
    number: u64,
}

/// Advice for a new connection about a path.
#[derive(Debug)]
pub enum Advice {
    /// Use the path.
    Use,
    /// Try the path, on behalf of all connections.
    Try(Trial),
    /// Ask again later, because another connection tries the path.
    Wait,
    /// Leave the path out for now, for this reason. Recovery tries the path later.
    LeaveOut(String),
}

impl Backoff {
    /// Advises a new connection with path MTU `mtu_bytes` about a path. A trial ends after `limit`.
    pub fn ask(
        &self,
        id: PathId,
        need: Requirement,
        mtu_bytes: u32,
        limit: Duration,
        now: Instant,
    ) -> Advice {
        let advice = lock(&self.0).ask(id, need, mtu_bytes, limit, now);
        match advice {
            backoff::Advice::Use => Advice::Use,
            backoff::Advice::Try(number) => Advice::Try(self.trial(id, number)),
            backoff::Advice::Wait => Advice::Wait,
            backoff::Advice::LeaveOut(refusal) => Advice::LeaveOut(text(refusal)),
        }
    }

    /// Returns the reason why a path is dead, during the pause in which it is not used. Returns
    /// `None` at other times.
    pub fn dead(&self, id: PathId, now: Instant) -> Option<String> {
        lock(&self.0).dead(id, now).map(text)
    }

    /// Checks that an attempt to reconnect a lost rail may use this path now.
    ///
    /// # Errors
    /// [`Error::Network`] with the reason against it; for a dead path, also the time until the next
    /// attempt.
    pub fn is_due(&self, id: PathId, now: Instant) -> Result<()> {
        Ok(lock(&self.0).is_due(id, now).map_err(error)?)
    }

    /// Checks a path as [`Self::is_due`] does. If the path was dead, returns the right to try it on
    /// behalf of all connections.
    pub fn retry(&self, id: PathId, limit: Duration, now: Instant) -> Result<Option<Trial>> {
        let number = lock(&self.0).retry(id, limit, now).map_err(error)?;
        Ok(number.map(|number| self.trial(id, number)))
    }

    /// Records that queue pairs were connected over a path, or failed to connect with `error`. Only
    /// an error that shows an unresolved address counts against the path.
    pub fn connected(&self, id: PathId, error: Option<&Error>, now: Instant) {
        lock(&self.0).connected(id, result(error), now);
    }

    /// Records that a test write was acknowledged.
    pub fn carried(&self, id: PathId, now: Instant) {
        lock(&self.0).carried(id, now);
    }

    /// Records that a test write was not acknowledged. `why` is for messages.
    pub fn silent(&self, id: PathId, why: &str, now: Instant) {
        lock(&self.0).silent(id, why.to_owned(), now);
    }

    /// Records that packets above `bytes` get lost on a path, and smaller ones arrive.
    pub fn set_largest_mtu(&self, id: PathId, bytes: u32, now: Instant) {
        lock(&self.0).set_largest_mtu(id, bytes, now);
    }

    /// Returns a path's largest path MTU in bytes; `None` if larger packets were not lost.
    pub fn largest_mtu(&self, id: PathId) -> Option<u32> {
        lock(&self.0).largest_mtu(id)
    }

    /// Forgets the findings about a rail's paths, because the rail's port has come up or its device
    /// has returned.
    pub fn forget(&self, rail: &Rail) {
        lock(&self.0).forget(rail.id);
    }

    fn trial(&self, id: PathId, number: u64) -> Trial {
        Trial {
            known: Arc::clone(&self.0),
            id,
            number,
        }
    }
}

impl Trial {
    /// Records a result as [`Backoff::connected`] does, unless the trial has ended already.
    pub fn connected(&self, error: Option<&Error>, now: Instant) {
        lock(&self.known).tried(self.id, self.number, result(error), now);
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        lock(&self.known).end_trial(self.number);
    }
}

/// Converts the result of connecting queue pairs to a finding. `ETIMEDOUT` is the
/// kernel's error after its search for the address. `EHOSTUNREACH` is the neighbour table's error
/// for the same failure. Other failures return immediately, and the path is not their cause.
fn result(error: Option<&Error>) -> Connected<String> {
    match error {
        None => Connected::Resolved,
        Some(
            error @ Error::Os {
                errno: libc::ETIMEDOUT | libc::EHOSTUNREACH,
                ..
            },
        ) => Connected::Unresolved(error.to_string()),
        Some(_) => Connected::Failed,
    }
}

fn text(refusal: Refusal<String>) -> String {
    match refusal {
        Refusal::LosesAbove(bytes) => format!("packets above {bytes} bytes are lost on this path"),
        Refusal::Dead { why, left } => format!("{why}; next attempt in {left:.0?}"),
        Refusal::OnTrial => Network::PathOnTrial.to_string(),
    }
}

fn error(refusal: Refusal<String>) -> Network {
    match refusal {
        Refusal::OnTrial => Network::PathOnTrial,
        refusal => Network::DeadPath(text(refusal)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::error::Call;
    use proto::wire::ids::RailId;

    #[test]
    fn only_an_unresolved_address_counts_against_a_path() {
        let backoff = Backoff::default();
        let path = PathId {
            rail: RailId::new(0).unwrap(),
            peer_gid: [7; 16],
        };
        let failed = |errno| Error::Os {
            call: Call::ModifyQp {
                device: "mlx5_0".to_owned(),
                qp: 5,
                state: "RTR",
            },
            errno,
        };
        let now = Instant::default();
        backoff.connected(path, Some(&failed(libc::EINVAL)), now);
        assert!(backoff.is_due(path, now).is_ok());
        backoff.connected(path, Some(&failed(libc::ETIMEDOUT)), now);
        assert_eq!(
            backoff.is_due(path, now).unwrap_err().to_string(),
            "cannot move QP 5 of mlx5_0 to RTR: Connection timed out (os error 110); next attempt in 2s"
        );
        let later = now + Duration::from_secs(2);
        let limit = Duration::from_secs(4);
        let trial = backoff.retry(path, limit, later).unwrap();
        assert!(trial.is_some());
        assert_eq!(
            backoff.retry(path, limit, later).unwrap_err().to_string(),
            "another connection tests this path"
        );
        drop(trial);
        assert!(backoff.retry(path, limit, later).is_ok());
    }
}
