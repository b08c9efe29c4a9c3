//! Connections in which no rail has worked yet: their warnings, and their failure if no rail comes
//! up in time.

use super::Driver;
use crate::comm::datapath::shared::NotBorrowed;
use crate::comm::log::once::Subject;
use crate::comm::recovery::attempt::ManagedRail;
use host::error::{Error, Network, PeerGone};
use std::time::Duration;

/// Time without a rail until the first warning.
const FIRST_WARNING: Duration = Duration::from_secs(5);
/// Interval between two warnings.
const NEXT_WARNING: Duration = Duration::from_secs(15);

impl Driver {
    /// Warns, once for all connections with the peer, while a new connection has had no rail.
    pub(super) fn warn_of_no_rail(&mut self, at: u64) {
        let Some(waited) = self
            .recovery
            .waits_for_first_rail(at)
            .map(Duration::from_nanos)
        else {
            return;
        };
        let due = FIRST_WARNING + NEXT_WARNING * self.warnings;
        if waited < due {
            return;
        }
        self.warnings += 1;
        let seconds = due.as_secs();
        let peer = &self.context.peer.name;
        if self.process.log.is_first(peer, Subject::NoRailYet(seconds)) {
            let tries = self.tries_text();
            let limit = self.process.config.setup.connect_timeout.as_secs();
            tracing::warn!(
                "no rail to {peer} works after {seconds} s, still trying until NCCL_SPARK_CONNECT_TIMEOUT_S={limit}: {tries}"
            );
        }
    }

    /// Returns the pairs of rails, then their failed attempts. The names come first because NCCL
    /// cuts a log line at 1024 characters (`ncclDebugLog` in debug.cc).
    fn tries_text(&self) -> String {
        let names: Vec<String> = self.rails.iter().map(ManagedRail::name).collect();
        let tries: Vec<String> = self
            .lanes()
            .zip(&self.rails)
            .map(|(lane, managed)| managed.tries_text(self.recovery.attempts(lane).failed()))
            .collect();
        format!("{}; {}", names.join(", "), tries.join(", "))
    }

    pub(super) fn no_first_rail(&self) -> Error {
        let peer = self.context.peer.name.clone();
        let limit = self.process.config.setup.connect_timeout.as_secs();
        Network::NoFirstRail {
            peer,
            limit,
            tries: self.tries_text(),
        }
        .into()
    }

    /// Handles a peer that leaves. Fails the connection if no rail has worked yet.
    ///
    /// # Errors
    /// [`NotBorrowed::Busy`] if the data path has not been given the reason yet.
    pub(super) fn ends_without_rail(&mut self) -> Result<(), NotBorrowed> {
        if !self.recovery.was_up() && !self.recovery.has_failed() {
            let peer = self.context.peer.name.clone();
            let rails = self.tries_text();
            self.give_up(PeerGone::Left { peer, rails }.into());
        }
        if self.waiting.error.is_some() {
            Err(NotBorrowed::Busy)
        } else {
            Ok(())
        }
    }
}
