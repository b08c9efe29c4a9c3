//! The watch over one connection's rails: executes what recovery decides.
//!
//! What is done when a rail is lost and when it returns is decided by [`crate::flow::recovery`]. This tells it what the data path,
//! the ports, the peer and the clock say, and does what it asks for: it stops queue pairs, makes, connects and tries new ones, and sends
//! control frames. It owns the queue pairs of the connecting side that are being made and tried.
//!
//! All this is the service thread's. Of the data path it borrows moments ([`super::half::Half`]); what can take longer (opening and
//! connecting queue pairs: `renewal`) is done while the data path goes on.

mod renewal;

use super::board::Board;
use super::events::{Member, Subject};
use super::half::{Ends, Loss, Shared};
use super::lane::Role;
use super::rail::Rail;
use super::trouble::{broken, broken_protocol};
use super::ward::{Attempt, Ward};
use crate::error::Error;
use crate::flow::recovery::{Action, Cause, Frame, Limits, News, Recovery};
use crate::wire::control::{Letter, Received};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a path that closes is looked at for what has come: more often than all its receives could ask for.
const MOST_ROUNDS: usize = 256;
/// Letters that are taken in at a time.
const LETTERS: usize = 4;

/// One connection's rails, and the control messages about them.
pub struct Warden {
    ends: Arc<Ends>,
    half: Arc<dyn Shared>,
    role: Role,
    traffic_class: Option<u8>,
    board: Board,
    wards: Vec<Ward>,
    recovery: Recovery,
    /// What recovery's clock counts from: the first time that was told.
    origin: Option<Instant>,
    /// For one log line an outage.
    outages: Member,
    /// Whether the data path has something left to do about a loss.
    is_owing: bool,
}

impl Warden {
    /// Watches over the rails of a connection that has just come up.
    pub fn new(
        ends: Arc<Ends>,
        half: Arc<dyn Shared>,
        role: Role,
        traffic_class: Option<u8>,
        board: Board,
        wards: Vec<Ward>,
    ) -> Self {
        let rails = wards.iter().map(|ward| (ward.rail.name(), ward.peer_rail.clone()));
        let config = &ends.host.config;
        let outages = Member::new(&ends.host.outages, &ends.peer.name, config.loss_timeout, rails);
        let limits = Limits { loss: nanos(config.loss_timeout), probe: nanos(config.probe_timeout) };
        let recovery = Recovery::new(role, limits, wards.len());
        let (origin, is_owing) = Default::default();
        Self { ends, half, role, traffic_class, board, wards, recovery, origin, outages, is_owing }
    }

    /// The two ends.
    pub fn ends(&self) -> &Ends {
        &self.ends
    }

    /// Whether all is as it should be: nothing lost, nothing unheard.
    pub fn is_whole(&self) -> bool {
        self.recovery.is_whole()
    }

    /// Whether something is under way that is worth looking after often.
    pub fn is_busy(&self) -> bool {
        self.is_owing || self.recovery.is_busy()
    }

    /// Whether something that was said has not been heard.
    pub fn is_waiting(&self) -> bool {
        self.recovery.is_waiting()
    }

    /// The rails and where they stand, for messages.
    pub fn text(&self) -> String {
        let text = |(lane, ward): (usize, &Ward)| ward.text(self.recovery.state(lane));
        self.wards.iter().enumerate().map(text).collect::<Vec<_>>().join(", ")
    }

    /// Says BYE.
    pub fn close(&mut self) {
        // What has come and nobody asked after counts too.
        for _ in 0..MOST_ROUNDS {
            if !self.take_losses(Instant::now()) {
                break;
            }
        }
        let mut delivered = 0;
        self.half.borrow(&mut |half| delivered = half.delivered());
        self.recovery.close(delivered);
    }

    /// A port of this host went down or came back.
    pub fn port_changed(&mut self, rail: &Rail, is_up: bool, now: Instant) {
        let at = self.clock(now);
        for lane in 0..self.wards.len() {
            if self.wards[lane].rail.index != rail.index {
                continue;
            }
            if is_up {
                self.ends.host.unreached.forget(rail);
                self.recovery.port_up(lane, at);
            } else {
                self.recovery.port_down(lane, "local port down", at);
            }
        }
        self.act(now);
    }

    /// The peer's end of the bootstrap's TCP was closed without a BYE.
    pub fn suspect(&mut self, now: Instant) {
        let at = self.clock(now);
        self.recovery.bootstrap_closed(at);
    }

    /// The bootstrap's TCP has failed. The rails may work all the same, and they carry control messages too.
    pub fn lost_channel(&mut self, why: &str) {
        let peer = &self.ends.peer.name;
        if self.ends.host.said.is_first(peer, Subject::NoChannel) {
            tracing::info!("{why}; connections with {peer} continue over the rails");
        } else {
            tracing::debug!("{why}");
        }
    }

    /// What comes by the bootstrap's TCP is no message: the connection has failed, and nothing more is heard of the peer.
    pub fn broken_channel(&mut self, why: &dyn std::fmt::Display, now: Instant) {
        self.recovery.breach(why.to_string());
        self.recovery.peer_gone();
        self.act(now);
    }

    /// Goes on as far as it can. Letters for the peer's mailbox are written here; those for the channel are handed to `send`, which
    /// says whether there is one. A data path that is in use is left alone, unless `has_news`: it looks after itself, and says so when
    /// it finds a rail lost.
    pub fn tend(&mut self, now: Instant, has_news: bool, send: &mut dyn FnMut(Letter) -> bool) {
        for _ in 0..LETTERS {
            let Some(letter) = self.board.take_letter() else { break };
            self.hear(&letter, now);
            if letter.asks {
                // The way that it came by carries: the answer goes back by it too. (To what asks nothing there is none.)
                self.mail(&self.recovery.frame());
            }
        }
        if self.half.is_unused() || has_news || self.is_busy() {
            self.take_losses(now);
        }
        let at = self.clock(now);
        self.look_at_trials(at);
        // A rail whose port is down again does not count as one that was there for a moment.
        self.act(now);
        self.recovery.tick(at);
        self.act(now);
        if !self.recovery.recovers() {
            self.outages.ended();
        }
        match self.recovery.poll_frame(at) {
            Some(Frame::First(letter)) => {
                let by_tcp = send(letter);
                if !by_tcp {
                    self.mail(&self.recovery.frame());
                }
            }
            Some(Frame::Repeated(letter)) => self.mail(&letter),
            None => {}
        }
    }

    /// A letter came in.
    pub fn hear(&mut self, letter: &Letter, now: Instant) {
        // How many receives have begun to be sent; to a receiver nothing can be said of any. Of a broken half nothing is known, and
        // nothing that is said can hurt it.
        let mut begun = if self.role == Role::Sender { u64::MAX } else { 0 };
        if self.role == Role::Sender && letter.asks {
            self.half.borrow(&mut |half| (_, begun) = half.span());
        }
        let at = self.clock(now);
        self.recovery.heard(letter, begun, at);
        self.act(now);
    }

    /// Writes a letter into the peer's mailbox, by every rail that carries.
    fn mail(&mut self, letter: &Letter) {
        let bytes = self.board.put_letter(letter);
        let (ends, board) = (&self.ends, &self.board);
        let up: Vec<usize> = self.recovery.rails_up().collect();
        self.half.borrow(&mut |half| {
            for lane in &up {
                half.post(ends, *lane, &board.letter_write(*lane, bytes));
            }
        });
    }

    /// What the data path found lost, and what it finds when it is looked after; whether something had come.
    fn take_losses(&mut self, now: Instant) -> bool {
        // A broken half is not lent.
        let (ends, mut losses, mut found) = (Arc::clone(&self.ends), Vec::new(), Err(broken()));
        let (mut owing, mut failed, mut received) = (false, false, Received::default());
        self.half.borrow(&mut |half| {
            found = half.tend(&ends);
            losses = half.health().take_losses();
            owing = half.is_owing();
            failed = half.health().has_failed();
            if !losses.is_empty() {
                received = half.received();
            }
        });
        self.is_owing = owing;
        if failed {
            self.recovery.fail();
        }
        let moved = match found {
            Ok(moved) => moved,
            Err(error) => {
                self.give_up(error);
                false
            }
        };
        let at = self.clock(now);
        for Loss { lane, why } in losses {
            tracing::debug!("lane {lane} of the connection with {} failed: {why}", ends.peer.name);
            self.recovery.lost(lane, &why, received.clone(), at);
        }
        self.act(now);
        moved
    }

    /// Whether the trials of new queue pairs are over.
    fn look_at_trials(&mut self, at: u64) {
        for (lane, ward) in self.wards.iter_mut().enumerate() {
            if let Some(Attempt::Trying(new)) = &mut ward.attempt
                && let Some(outcome) = renewal::look_at_trial(new)
            {
                self.recovery.probed(lane, outcome, at);
            }
        }
    }

    /// Does what recovery asks for.
    fn act(&mut self, now: Instant) {
        let at = self.clock(now);
        while let Some(action) = self.recovery.poll_action() {
            match action {
                Action::Fence(lane) => self.fence(lane, at),
                Action::Resend(lane, received) => self.resend(lane, &received),
                Action::OpenQps(lane) => {
                    let outcome = self.open_qps(lane);
                    self.recovery.opened(lane, outcome, at);
                }
                Action::AnswerQps(lane, rail, qps) => {
                    let outcome = self.answer_qps(lane, &rail, &qps, now);
                    self.recovery.answered(lane, outcome, at);
                }
                Action::ConnectQps(lane, answer) => {
                    let outcome = self.connect_qps(lane, &answer, now);
                    self.recovery.connected(lane, outcome, at);
                }
                Action::Activate(lane) => self.activate(lane, now),
                Action::DropQps(lane) => drop(self.take_new(lane)),
                Action::PeerClosed(delivered) => self.ends.peer.said_bye(delivered),
                Action::PeerGone => self.ends.peer.vanished(),
                Action::Fail(cause) => self.fail(&cause),
                Action::Tell(news) => self.log(&news, now),
            }
        }
    }

    fn fence(&mut self, lane: usize, at: u64) {
        let (ends, mut received) = (Arc::clone(&self.ends), Received::default());
        self.half.borrow(&mut |half| {
            half.lose(&ends, lane);
            received = half.received();
        });
        self.recovery.fenced(lane, received, at);
    }

    fn resend(&mut self, lane: usize, received: &Received) {
        let ends = Arc::clone(&self.ends);
        let (mut recovered, mut owing) = (Ok(()), false);
        self.half.borrow(&mut |half| {
            recovered = half.recover(&ends, lane, received);
            owing = half.is_owing();
        });
        self.is_owing = owing;
        if let Err(error) = recovered {
            self.give_up(error);
        }
    }

    /// The rail is used from here on, with the new queue pairs.
    fn activate(&mut self, lane: usize, now: Instant) {
        let Some(new) = self.take_new(lane) else {
            let at = self.clock(now);
            return self.recovery.not_activated(lane, at);
        };
        let (mut new, ends, mut regained) = (Some(new), Arc::clone(&self.ends), Ok(()));
        self.half.borrow(&mut |half| {
            if let Some(new) = new.take() {
                regained = half.regain(&ends, lane, new);
            }
        });
        if let Err(error) = regained {
            self.give_up(error);
        }
        if self.wards[lane].rail.is_up() {
            self.outages.recovered(lane, now);
        } else {
            let at = self.clock(now);
            self.recovery.port_down(lane, "local port down while the rail was tested", at);
        }
    }

    fn log(&mut self, news: &News, now: Instant) {
        let peer = &self.ends.peer.name;
        match news {
            News::Heard(notice) => tracing::debug!("{peer} sent {notice:?}"),
            News::Malformed(why) => tracing::warn!("{peer} sent a malformed control message, ignored: {why}"),
            News::NoSuchRail(lane) => {
                let count = self.wards.len();
                tracing::warn!("{peer} sent a control message for rail {lane} of {count}: ignored");
            }
            News::OutOfTurn(lane) => tracing::debug!("{peer} sent a control message out of turn for rail {lane}"),
            News::Lost { lane, why, retry } => {
                let next = match self.role {
                    Role::Sender => format!("retrying in {:.1} s", Duration::from_nanos(*retry).as_secs_f64()),
                    Role::Receiver => "the peer retries".to_owned(),
                };
                if self.recovery.recovers() {
                    self.outages.lost(*lane, why, &next, now);
                }
            }
            News::NotYet(lane, why) => {
                let rail = self.wards[*lane].rail.name();
                tracing::debug!("rail {rail} to {peer} not recovered yet: {why}");
            }
            News::PeerAnswers => {
                if self.ends.host.said.is_first(peer, Subject::Answered) {
                    tracing::info!("{peer} answers over the rails; connections continue without the bootstrap's TCP");
                }
            }
        }
    }

    /// Recovery has given the connection up.
    fn fail(&mut self, cause: &Cause) {
        let (peer, limit) = (&self.ends.peer.name, self.ends.host.config.loss_timeout.as_secs());
        let error = match cause {
            Cause::Protocol(why) => broken_protocol(&self.ends.peer, why),
            Cause::NotAcknowledged(lane) => Error::Remote(format!(
                "{peer} did not acknowledge the loss of rail {} within NCCL_SPARK_LOSS_TIMEOUT_S={limit}: {}",
                self.wards[*lane].rail.name(),
                self.text()
            )),
            Cause::NoRail(waited) => Error::Remote(format!(
                "no usable rail to {peer} for {:.0?} (NCCL_SPARK_LOSS_TIMEOUT_S={limit}): {}",
                Duration::from_nanos(*waited),
                self.text()
            )),
        };
        self.end(error);
    }

    /// The connection has failed: the data path tells its caller when it is asked next.
    pub fn give_up(&mut self, error: Error) {
        if self.recovery.has_failed() {
            self.half.borrow(&mut |half| _ = half.end(Box::new(error.clone())));
        } else {
            self.recovery.fail();
            self.end(error);
        }
    }

    fn end(&mut self, error: Error) {
        self.outages.ended();
        // The call that meets it next writes the warning.
        if self.ends.host.said.is_first(&self.ends.peer.name, Subject::Failed) {
            tracing::info!("{error}");
        } else {
            tracing::debug!("{error}");
        }
        self.half.borrow(&mut |half| _ = half.end(Box::new(error.clone())));
    }

    /// The time as recovery counts it.
    fn clock(&mut self, now: Instant) -> u64 {
        nanos(now.saturating_duration_since(*self.origin.get_or_insert(now)))
    }
}

/// Enough for 584 years.
fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
