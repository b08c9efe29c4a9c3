//! Changes of a rail's state: their log lines and counters, and recovery's other log entries.

use super::Driver;
use crate::comm::log::once::Subject;
use proto::flow::recovery::{Cause, Changed, LogEntry, Role, State};
use proto::time::Instant;
use proto::wire::ids::LaneId;
use std::sync::Arc;
use std::time::Duration;

impl Driver {
    /// Returns a number that changes when this connection's lanes carry data.
    pub fn work(&self) -> u64 {
        self.rails
            .iter()
            .map(|rail| rail.outages.writes())
            .fold(0, u64::wrapping_add)
    }

    /// Logs and counts a change of a rail's state. No other function does.
    pub(super) fn changed(
        &mut self,
        Changed {
            lane,
            from,
            to,
            cause,
            at,
        }: &Changed,
        now: Instant,
    ) {
        let lane = *lane;
        let at = *at;
        let peer = Arc::clone(&self.context.peer);
        let name = self.rails[lane.index()].rail.name();
        tracing::trace!(
            "rail {name} to {}: {from:?}, then {to:?}, {cause}",
            peer.name
        );
        match (to, cause) {
            (State::Fencing { .. }, _) if self.recovery.recovers() => {
                let next = match self.role {
                    Role::Sender => {
                        format!(
                            "retrying in {:.1} s",
                            Duration::from_nanos(self.recovery.pause(lane)).as_secs_f64()
                        )
                    }
                    Role::Receiver => "the peer retries".to_owned(),
                };
                let grown = self
                    .process
                    .losses
                    .grown(Some(&self.rails[lane.index()].rail.info.device));
                let why = cause.to_string();
                if self.recovery.suspects_peer() {
                    self.outages.hold_back(lane, why, next + &grown, now);
                } else {
                    self.outages.lost(lane, &why, &(next + &grown), now);
                }
                self.rails[lane.index()].outages.lost(now);
            }
            (State::Up { .. }, _) => self.returned(lane, now, at),
            (State::Down { .. }, Cause::StoppedByBoth) => {}
            (State::Down { .. }, why) => {
                tracing::debug!("rail {name} to {} not recovered yet: {why}", peer.name);
            }
            _ => {}
        }
    }

    fn returned(&mut self, lane: LaneId, now: Instant, at: u64) {
        let managed = &mut self.rails[lane.index()];
        // The port may have gone down during the test. Recovery ignored that event, because the
        // rail was not in use yet. So the port is queried again.
        managed.rail.device.ask_soon();
        if let Some(why) = managed.known_loss() {
            self.recovery.rail_down(lane, &why, at);
        } else {
            let [newest, _] = self.recovery.attempts(lane).last_paths();
            let path_mtu_bytes = newest.map_or(0, |choice| choice.mtu_bytes);
            managed.outages.recovered(path_mtu_bytes, now);
            self.outages.recovered(lane, now);
        }
    }

    pub(super) fn log(&mut self, entry: &LogEntry) {
        let peer = &self.context.peer.name;
        match entry {
            LogEntry::MessageReceived(message) => tracing::debug!("{peer} sent {message:?}"),
            LogEntry::Malformed(why) => {
                tracing::warn!("{peer} sent a malformed control message, ignored: {why}")
            }
            LogEntry::NoSuchRail(lane) => {
                let count = self.rails.len();
                tracing::warn!("{peer} sent a control message for rail {lane} of {count}: ignored");
            }
            LogEntry::OutOfTurn(lane) => {
                tracing::debug!("{peer} sent a control message out of turn for rail {lane}")
            }
            LogEntry::PeerAnswers => {
                self.outages.peer_answers();
                if self.process.log.is_first(peer, Subject::Answered) {
                    tracing::info!("{peer} answers after its TCP was closed; connections continue");
                }
            }
        }
    }
}
