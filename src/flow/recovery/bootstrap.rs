//! What the bootstrap's TCP connection says of the peer, and when another one is wanted.

use super::{ANSWER, LogEntry, Peer, Recovery, SECOND};
use crate::flow::redial::Need;
use crate::wire::control::ControlMessage;

/// How long a peer whose TCP was closed may take to show that it is there: by a rail, or by a new TCP connection.
pub(super) const SIGN_OF_LIFE: u64 = 2 * SECOND;
/// How long a frame may be unheard, while TCP alone carries frames, before another TCP connection is dialled: one that lost packets while the
/// network was away waits longer and longer before it tries again (RFC 6298, 5.5), and one that the peer has given up does so in silence.
const DOUBT: u64 = 2 * SECOND;

/// How often the peer is asked whether it is there while there is no TCP: the kernel asks by TCP about as often (15 s).
pub(super) const ASK: u64 = 10 * SECOND;

impl Recovery {
    /// The peer's end of the bootstrap's TCP was closed without a BYE: its process is gone, or its kernel knows nothing more of a
    /// connection that had timed out there. It is asked, over its rails and by a new TCP connection.
    pub fn bootstrap_closed(&mut self, now: u64) {
        if self.peer == Peer::Here {
            self.peer = Peer::Suspected(now);
            self.link.say(ControlMessage::AreYouThere);
        }
    }

    /// There is a new TCP connection: the frame of now is sent by it, because what went by the one before may be lost.
    pub fn bootstrap_opened(&mut self) {
        (self.unheard, self.asked_at) = (None, None);
        self.link.send_again();
    }

    /// There is no TCP. Nobody says when the peer's process ends, and where both ends wait for each other nothing is posted that could fail: so
    /// the peer is asked over the rails, at once, now and then, and when it could not be dialled (`is_unreachable`). No answer says nothing
    /// (it may be busy for long); but a rail is lost whose writes are not acknowledged, and without any the connection's limit runs.
    pub fn bootstrap_away(&mut self, is_unreachable: bool, now: u64) {
        let is_due = is_unreachable || self.asked_at.is_none_or(|asked| now.saturating_sub(asked) >= ASK);
        if is_due && self.recovers() && !self.link.is_waiting() && self.rails_up().next().is_some() {
            self.asked_at = Some(now);
            self.link.say(ControlMessage::AreYouThere);
        }
    }

    /// Whether another TCP connection is wanted by a connection that has one which has not failed (`is_open`), or none.
    pub fn bootstrap_need(&self, is_open: bool, now: u64) -> Need {
        let is_dark = self.rails_up().next().is_none();
        // A rail that counts as up may be lost already, or take its time to send again what it lost: the peer's time runs meanwhile.
        let is_suspected = matches!(self.peer, Peer::Suspected(_));
        // Before the first rail the peer may be slow to answer: its kernel looks for a second for each address that does not resolve.
        let doubt = if self.has_carried() { DOUBT } else { ANSWER };
        let is_unheard = self.unheard.is_some_and(|(_, since)| now.saturating_sub(since) > doubt);
        match is_open {
            _ if !self.recovers() => Need::No,
            false if is_dark || is_suspected => Need::Urgent,
            false => Need::Calm,
            true if is_dark && is_unheard && self.link.is_waiting() => Need::Urgent,
            true => Need::No,
        }
    }

    /// Notes since when the frame under way is unheard.
    pub(super) fn note_unheard(&mut self, now: u64) {
        let under_way = self.link.under_way();
        if self.unheard.map(|(number, _)| number) != under_way {
            self.unheard = under_way.map(|number| (number, now));
        }
    }

    pub(super) fn look_for_a_sign_of_life(&mut self, now: u64) {
        let Peer::Suspected(since) = self.peer else { return };
        if !self.link.is_waiting() {
            self.peer = Peer::Here;
            self.log(LogEntry::PeerAnswers);
        } else if now.saturating_sub(since) > SIGN_OF_LIFE {
            self.peer_gone();
        }
    }
}
