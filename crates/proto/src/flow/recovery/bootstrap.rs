//! The bootstrap's TCP connection, which set up the RDMA connection and then carries control
//! messages. This file decides what follows when the peer closes it, and when another TCP
//! connection is needed.

use super::{LogEntry, Peer, Recovery, SECOND, STEP};
use crate::flow::redial::Need;
use crate::wire::control::ControlMessage;

/// Time limit for a sign of life from a peer whose TCP was closed: a confirmation over a rail or
/// over a new TCP connection.
pub(super) const SIGN_OF_LIFE: u64 = 2 * SECOND;
/// While no rail is up, another TCP connection is dialled if a frame is unacknowledged for longer
/// than this. A TCP connection that lost packets during an outage retries at growing intervals (RFC
/// 6298, 5.5). A TCP connection that the peer has given up stays silent.
const UNCONFIRMED_LIMIT: u64 = 2 * SECOND;

/// Interval between two ARE YOU THERE while there is no TCP. Similar to the keepalive interval of
/// TCP sockets (15 s).
pub(super) const ASK_INTERVAL: u64 = 10 * SECOND;

impl Recovery {
    /// Reports that the peer closed TCP without a BYE. Its process has ended, or its kernel timed
    /// out. So this side sends ARE YOU THERE, over the rails and over a new TCP connection.
    pub fn bootstrap_closed(&mut self, now: u64) {
        if self.peer == Peer::Here {
            let question = self.link.queue(ControlMessage::AreYouThere);
            self.peer = Peer::Suspected {
                since: now,
                question,
            };
        }
    }

    /// Reports a new TCP connection. Sends the current frame again, because the old TCP connection
    /// may have lost it.
    pub fn bootstrap_opened(&mut self) {
        (self.unconfirmed, self.asked_at) = (None, None);
        self.link.send_again();
    }

    /// Reports that there is no TCP. Then no kernel reports the end of the peer's process, and two
    /// sides that wait for each other post nothing that could fail. So this side sends ARE YOU
    /// THERE over the rails: immediately, at intervals, and after a failed attempt to dial
    /// (`is_unreachable`).
    ///
    /// A missing answer proves nothing, because the peer may be busy for long. But if the peer's
    /// NIC does not acknowledge the writes, they fail and the rails are lost. Without rails, the
    /// connection's time limit runs.
    pub fn bootstrap_away(&mut self, is_unreachable: bool, now: u64) {
        let is_due = is_unreachable
            || self
                .asked_at
                .is_none_or(|asked| now.saturating_sub(asked) >= ASK_INTERVAL);
        if is_due && self.recovers() && !self.link.is_waiting() && self.rails_up().next().is_some()
        {
            self.asked_at = Some(now);
            self.link.queue(ControlMessage::AreYouThere);
        }
    }

    /// Returns the need for a new TCP connection. `is_open` is false if there is no TCP connection.
    pub fn bootstrap_need(&self, is_open: bool, now: u64) -> Need {
        let has_no_rail = self.rails_up().next().is_none();
        // Urgent even with rails up: they may already be lost, or too slow for `SIGN_OF_LIFE`.
        let is_suspected = self.suspects_peer();
        // Before the first rail, the peer may answer late: its kernel needs a second for each
        // address that it cannot resolve.
        let unconfirmed_limit = if self.was_up() {
            UNCONFIRMED_LIMIT
        } else {
            STEP
        };
        let is_unconfirmed = self
            .unconfirmed
            .is_some_and(|(_, since)| now.saturating_sub(since) > unconfirmed_limit);
        let has_news = self
            .failed_message
            .is_some_and(|number| !self.link.is_confirmed(number));
        match is_open {
            false if has_news && self.peer.is_open() => Need::NotUrgent,
            _ if !self.recovers() => Need::No,
            false if has_no_rail || is_suspected => Need::Urgent,
            false => Need::NotUrgent,
            true if has_no_rail && is_unconfirmed && self.link.is_waiting() => Need::Urgent,
            true => Need::No,
        }
    }

    pub(super) fn note_unconfirmed(&mut self, now: u64) {
        let under_way = self.link.under_way();
        if self.unconfirmed.map(|(number, _)| number) != under_way {
            self.unconfirmed = under_way.map(|number| (number, now));
        }
    }

    pub(super) fn look_for_a_sign_of_life(&mut self, now: u64) {
        let Peer::Suspected { since, question } = self.peer else {
            return;
        };
        if self.link.is_confirmed(question) {
            self.peer = Peer::Here;
            self.log(LogEntry::PeerAnswers);
        } else if now.saturating_sub(since) > SIGN_OF_LIFE {
            self.peer_gone();
        }
    }
}
