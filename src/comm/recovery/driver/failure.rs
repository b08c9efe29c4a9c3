//! The end of a connection that cannot continue: its error, its log line and its counters.

use super::Driver;
use crate::comm::datapath::fault::broken_protocol;
use crate::comm::datapath::path::Faults;
use crate::comm::datapath::shared::NotBorrowed;
use crate::comm::log::once::Subject;
use host::error::{Error, Internal, Network, PeerGone, TimedOut, Usage};
use proto::flow::recovery::Failure;
use proto::wire::ids::LaneId;
use std::time::Duration;

impl Driver {
    pub(super) fn fail(&mut self, failure: &Failure) {
        let peer = self.context.peer.name.clone();
        let limit = self.process.config.recovery.loss_timeout.as_secs();
        let rail = |lane: &LaneId| self.rails[lane.index()].rail.name();
        let rails = self.text();
        let error = match failure {
            Failure::Protocol(why) => broken_protocol(&peer, why).into(),
            Failure::AtPeer(why) => PeerGone::Failed {
                peer,
                why: why.clone(),
            }
            .into(),
            Failure::NotStopped(lane) => TimedOut::NotStopped {
                rail: rail(lane),
                peer,
                limit,
                rails,
            }
            .into(),
            Failure::NotAcknowledged(lane) => TimedOut::NotAcknowledged {
                rail: rail(lane),
                peer,
                limit,
                rails,
            }
            .into(),
            Failure::NoFirstRail => self.no_first_rail(),
            Failure::NoRail(waited) => Network::NoRailLeft {
                peer,
                waited: Duration::from_nanos(*waited),
                limit,
                rails,
            }
            .into(),
        };
        self.end(error);
    }

    /// Ends the connection. Calls of NCCL return the error once the queue pairs have stopped.
    pub fn give_up(&mut self, error: Error) {
        if self.recovery.has_failed() {
            self.end_path(error);
        } else {
            self.recovery.fail();
            self.end(error);
        }
    }

    pub(super) fn show_failure(&self) {
        if self.recovery.has_failed() {
            self.rails
                .iter()
                .for_each(|managed| managed.outages.failed());
        }
    }

    pub(super) fn end(&mut self, error: Error) {
        self.report_failure(&error);
        self.show_failure();
        self.outages.ended();
        self.tcp.ended();
        // The NCCL call that returns the error logs it as a warning. But with this error no request
        // of this side waits, so perhaps no such call follows.
        if let Error::Internal(Internal::NotArrivedThere { .. }) = error {
            tracing::warn!("{error}");
        } else if self
            .process
            .log
            .is_first(&self.context.peer.name, Subject::Failed)
        {
            tracing::info!("{error}");
        } else {
            tracing::debug!("{error}");
        }
        self.end_path(error);
    }

    /// Sends the reason of the connection's failure to the peer, unless the peer finds the same
    /// failure with its own, more exact reason.
    pub(super) fn report_failure(&mut self, error: &Error) {
        let is_found_by_both = matches!(
            error,
            Error::Network(Network::NoRailLeft { .. } | Network::NoFirstRail { .. })
                // Its goodbye tells the peer, and which messages have arrived.
                | Error::Usage(Usage::ClosedEarly)
                | Error::Internal(
                    Internal::NotArrivedThere { .. } | Internal::NotArrivedHere { .. }
                )
        );
        if !is_found_by_both {
            self.recovery.report_failure(error.to_string());
        }
    }

    fn end_path(&mut self, error: Error) {
        if self.on_path(|path, context| path.end(context, Box::new(error.clone())))
            == Err(NotBorrowed::Busy)
        {
            self.waiting.error.get_or_insert(error);
        }
    }
}
