//! The watch over one connection's rails: what is done, with the peer, when one is lost and when it returns.
//!
//! Fence first, then resend. The side that sees a loss stops its queue pairs there and says so; the other stops its own
//! and answers; each then knows that nothing comes in any more by the old ones. The receiver's word tells what it has: the
//! sender posts what is missing on other rails, the receiver grants once more what may not have been heard.
//!
//! A lost rail returns with new queue pairs, packet numbers and addresses looked up afresh: the sending side asks now and
//! then, and tries the new queue pairs with a packet before either side uses them.
//!
//! All this is the service thread's. Of the data path it borrows moments ([`super::half::Half`]); what can take longer (opening and
//! connecting queue pairs: `renewal`) is done while the data path goes on.

mod renewal;

use super::board::Board;
use super::events::{Member, Subject};
use super::half::{Ends, Loss, Shared};
use super::lane::{Lane, Role, Route};
use super::peer::Presence;
use super::rail::Rail;
use super::trouble::{broken, broken_protocol};
use super::ward::{Asked, Phase, Ward, look_at_trial};
use crate::error::Error;
use crate::flow::dialogue::Dialogue;
use crate::wire::control::{Letter, Notice, Received};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A rail that has carried for so long begins anew with its attempts.
const STEADY: Duration = Duration::from_secs(10);
/// How long the peer may take to answer for new queue pairs: it may have to wait for the kernel to find a neighbour.
const ANSWER: Duration = Duration::from_secs(10);
/// How long a peer whose TCP was closed may take to show by a rail that it is there.
const SIGN_OF_LIFE: Duration = Duration::from_secs(2);
/// How often a path that closes is looked at for what has come: more often than all its receives could ask for.
const MOST_ROUNDS: usize = 256;
/// Letters that are taken in at a time.
const LETTERS: usize = 4;
/// Notices that wait to be heard, from which on no rail is asked for any more; and, as a peer is heard that hears nothing, the most.
const CROWDED: usize = 32;
const MOST_UNHEARD: usize = 4 * CROWDED;
/// How long a letter may be unheard before it is sent once more, by every way there is.
const REPEAT: Duration = Duration::from_millis(50);

/// One connection's rails, and the control messages about them.
pub struct Warden {
    ends: Arc<Ends>,
    half: Arc<dyn Shared>,
    role: Role,
    traffic_class: Option<u8>,
    board: Board,
    wards: Vec<Ward>,
    /// For one log line an outage.
    outages: Member,
    dialogue: Dialogue,
    /// When the letter under way was last sent.
    sent: Instant,
    /// Since when no rail is left.
    dark_since: Option<Instant>,
    /// Since when the peer is asked for a sign of life.
    suspect_since: Option<Instant>,
    /// Whether the data path has something left to do about a loss.
    is_owing: bool,
    has_given_up: bool,
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
        let (dialogue, sent) = (Dialogue::default(), Instant::now());
        let rails = wards.iter().map(|ward| (ward.rail.name(), ward.peer_rail.clone()));
        let loss_timeout = ends.host.config.loss_timeout;
        let outages = Member::new(&ends.host.outages, &ends.peer.name, loss_timeout, rails);
        let (dark_since, suspect_since, is_owing, has_given_up) = Default::default();
        Self {
            ends,
            half,
            role,
            traffic_class,
            board,
            wards,
            outages,
            dialogue,
            sent,
            dark_since,
            suspect_since,
            is_owing,
            has_given_up,
        }
    }

    /// The two ends.
    pub fn ends(&self) -> &Ends {
        &self.ends
    }

    /// Whether all is as it should be: nothing lost, nothing unheard.
    pub fn is_whole(&self) -> bool {
        !self.dialogue.is_waiting() && self.wards.iter().all(|ward| matches!(ward.phase, Phase::Live))
    }

    /// Whether something is under way that is worth looking after often.
    pub fn is_busy(&self) -> bool {
        let under_way = |ward: &Ward| !matches!(ward.phase, Phase::Live | Phase::Down { .. });
        self.is_owing
            || self.dialogue.is_waiting()
            || !self.has_given_up && self.ends.peer.presence() == Presence::Here && self.wards.iter().any(under_way)
    }

    /// Whether something that was said has not been heard.
    pub fn is_waiting(&self) -> bool {
        self.dialogue.is_waiting()
    }

    /// The rails and where they stand, for messages.
    pub fn text(&self) -> String {
        self.wards.iter().map(Ward::text).collect::<Vec<_>>().join(", ")
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
        self.dialogue.say(Notice::Bye { delivered });
    }

    /// A port of this host went down or came back.
    pub fn port_changed(&mut self, rail: &Rail, is_up: bool, now: Instant) {
        for lane in 0..self.wards.len() {
            let ward = &mut self.wards[lane];
            if ward.rail.index != rail.index {
                continue;
            }
            if is_up {
                self.ends.host.unreached.forget(rail);
                ward.tries = 0;
            }
            match (&mut ward.phase, is_up) {
                (Phase::Down { retry }, true) => *retry = now,
                (Phase::Live, false) => self.lose(lane, "local port down", now),
                _ => {}
            }
        }
    }

    /// The peer's end of the bootstrap's TCP was closed without a BYE: its process is gone, or its kernel knows nothing more of a
    /// connection that had timed out there. Its rails tell.
    pub fn suspect(&mut self, now: Instant) {
        if self.ends.peer.presence() == Presence::Here && self.suspect_since.is_none() {
            self.suspect_since = Some(now);
            self.dialogue.say(Notice::AreYouThere);
        }
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

    fn look_for_a_sign_of_life(&mut self, now: Instant) {
        let Some(since) = self.suspect_since else { return };
        if !self.dialogue.is_waiting() {
            self.suspect_since = None;
            let peer = &self.ends.peer.name;
            if self.ends.host.said.is_first(peer, Subject::Answered) {
                tracing::info!("{peer} answers over the rails; connections continue without the bootstrap's TCP");
            }
        } else if now.duration_since(since) > SIGN_OF_LIFE
            || self.lanes_in(|phase| matches!(phase, Phase::Live)).next().is_none()
        {
            self.ends.peer.vanished();
        }
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
                self.mail(&self.dialogue.letter());
            }
        }
        if self.half.is_unused() || has_news || self.is_busy() {
            self.take_losses(now);
        }
        self.look_for_a_sign_of_life(now);
        if self.ends.peer.presence() == Presence::Here && !self.has_given_up {
            for lane in 0..self.wards.len() {
                self.bring_back(lane, now);
            }
            self.watch_the_dark(now);
        }
        if self.ends.peer.presence() != Presence::Here || self.has_given_up {
            self.outages.ended();
        }
        if self.ends.peer.presence() == Presence::Gone {
            // Nobody reads. (A NIC may take letters in all the same, which must not pass for a sign that something moves.)
            return;
        }
        if let Some(letter) = self.dialogue.news() {
            self.sent = now;
            if !send(letter) {
                self.mail(&self.dialogue.letter());
            }
        } else if self.dialogue.is_waiting() && now.duration_since(self.sent) >= REPEAT {
            self.sent = now;
            self.mail(&self.dialogue.letter());
        }
    }

    /// A letter came in.
    pub fn hear(&mut self, letter: &Letter, now: Instant) {
        match self.dialogue.hear(letter) {
            Ok(None) => {}
            Ok(Some(notice)) => self.heed(notice, now),
            Err(malformed) => {
                tracing::warn!("{} sent a malformed control message, ignored: {malformed}", self.ends.peer.name)
            }
        }
    }

    /// Writes a letter into the peer's mailbox, by every rail that carries.
    fn mail(&mut self, letter: &Letter) {
        let bytes = self.board.put_letter(letter);
        let (ends, board) = (&self.ends, &self.board);
        let live: Vec<usize> = self.lanes_in(|phase| matches!(phase, Phase::Live)).collect();
        self.half.borrow(&mut |half| {
            for lane in &live {
                half.post(ends, *lane, &board.letter_write(*lane, bytes));
            }
        });
    }

    fn lanes_in(&self, wanted: impl Fn(&Phase) -> bool) -> impl Iterator<Item = usize> {
        (0..self.wards.len()).filter(move |lane| wanted(&self.wards[*lane].phase))
    }

    /// What the data path found lost, and what it finds when it is looked after; whether something had come.
    fn take_losses(&mut self, now: Instant) -> bool {
        // A broken half is not lent.
        let (ends, mut losses, mut found) = (Arc::clone(&self.ends), Vec::new(), Err(broken()));
        let (mut owing, mut failed) = (false, false);
        self.half.borrow(&mut |half| {
            found = half.tend(&ends);
            losses = half.health().take_losses();
            owing = half.is_owing();
            failed = half.health().has_failed();
        });
        self.is_owing = owing;
        self.has_given_up |= failed;
        let moved = match found {
            Ok(moved) => moved,
            Err(error) => {
                self.give_up(error);
                false
            }
        };
        for Loss { lane, why } in losses {
            tracing::debug!("lane {lane} of the connection with {} failed: {why}", ends.peer.name);
            // Else it was heard of by another way meanwhile.
            if matches!(self.wards[lane].phase, Phase::Live) {
                self.fenced(lane, &why, now);
            }
        }
        moved
    }

    /// This side sees a rail lost.
    fn lose(&mut self, lane: usize, why: &str, now: Instant) {
        let ends = Arc::clone(&self.ends);
        self.half.borrow(&mut |half| half.lose(&ends, lane));
        self.fenced(lane, why, now);
    }

    /// This side has stopped a rail that carried: says so.
    fn fenced(&mut self, lane: usize, why: &str, now: Instant) {
        let ward = &mut self.wards[lane];
        ward.phase = Phase::Fenced(now);
        ward.tries = if now.saturating_duration_since(ward.carries_since) > STEADY { 0 } else { ward.tries + 1 };
        let next = match self.role {
            Role::Sender => format!("retrying in {:.1} s", self.wards[lane].pause().as_secs_f64()),
            Role::Receiver => "the peer retries".to_owned(),
        };
        if self.ends.peer.is_here() && !self.has_given_up {
            self.outages.lost(lane, why, &next, now);
        }
        self.say_fenced(lane);
    }

    fn say_fenced(&mut self, lane: usize) {
        let mut received = Received::default();
        self.half.borrow(&mut |half| received = half.received());
        self.dialogue.say(Notice::Fenced { lane: lane as u8, received });
    }

    /// Does what a notice asks for.
    fn heed(&mut self, notice: Notice, now: Instant) {
        tracing::debug!("{} sent {notice:?}", self.ends.peer.name);
        if let Err(why) = self.check(&notice) {
            return self.breach(&why);
        }
        let lane = match &notice {
            Notice::Bye { delivered } => return self.ends.peer.said_bye(*delivered),
            Notice::AreYouThere => return,
            Notice::Fenced { lane, .. }
            | Notice::Join { lane, .. }
            | Notice::Joined { lane, .. }
            | Notice::NotNow { lane, .. }
            | Notice::Live { lane } => usize::from(*lane),
        };
        let Some(ward) = self.wards.get_mut(lane) else {
            tracing::warn!(
                "{} sent a control message for rail {lane} of {}: ignored",
                self.ends.peer.name,
                self.wards.len()
            );
            return;
        };
        let down = ward.down(now);
        let before = std::mem::replace(&mut ward.phase, down);
        match (notice, before) {
            (Notice::Fenced { received, .. }, Phase::Live) => {
                self.lose(lane, "the peer reports it lost", now);
                self.recover(lane, &received, now);
            }
            (Notice::Fenced { received, .. }, Phase::Fenced(_)) => self.recover(lane, &received, now),
            (Notice::Join { rail, qps, .. }, Phase::Down { .. }) => self.answer(lane, &rail, &qps, now),
            // It came too late.
            (Notice::Joined { .. }, Phase::Down { .. }) => self.not_now(lane, "the answer came too late"),
            (Notice::Joined { connector_gid, acceptor_gid, mtu_bytes, qps, .. }, Phase::Asking(asked, _)) => {
                let Asked { lane: new, look } = *asked;
                let route = Route {
                    look: &look,
                    gid: connector_gid,
                    peer_gid: acceptor_gid,
                    mtu_bytes,
                    ends: &qps,
                    traffic_class: self.traffic_class,
                };
                match self.try_out(lane, new, &route, now) {
                    Ok(new) => {
                        let until = now + self.ends.host.config.probe_timeout;
                        self.wards[lane].phase = Phase::Trying(Box::new(new), until);
                    }
                    Err(error) => self.not_now(lane, &error.to_string()),
                }
            }
            (Notice::NotNow { why, .. }, Phase::Asking(..)) => self.tell_not_now(lane, &why),
            (Notice::NotNow { why, .. }, Phase::Answered) => {
                drop(self.on_trial(lane));
                self.tell_not_now(lane, &why);
            }
            (Notice::Live { .. }, Phase::Answered) => {
                if let Some(new) = self.on_trial(lane) {
                    self.carry_on(lane, new, now);
                }
            }
            (other, phase) => {
                tracing::debug!("{} sent {other:?} out of turn", self.ends.peer.name);
                self.wards[lane].phase = phase;
            }
        }
    }

    /// Looks at what a notice says before anything is done about it: whether it is for this side to hear, and possible.
    fn check(&self, notice: &Notice) -> std::result::Result<(), String> {
        if self.dialogue.backlog() > MOST_UNHEARD {
            return Err("peer sends control frames but does not acknowledge ours".to_owned());
        }
        // How many receives have begun to be sent; to a receiver nothing can be said of any.
        let begun = || {
            // Of a broken half nothing is known, and nothing that is said can hurt it.
            let mut begun = u64::MAX;
            self.half.borrow(&mut |half| (_, begun) = half.span());
            if self.role == Role::Sender { begun } else { 0 }
        };
        match (notice, self.role) {
            (Notice::Join { .. } | Notice::Live { .. }, Role::Sender) | (Notice::Joined { .. }, Role::Receiver) => {
                Err("message invalid for this role".to_owned())
            }
            (Notice::Fenced { received, .. }, Role::Sender) => {
                let (granted, open, begun) = (received.granted, received.open.len(), begun());
                let what = || {
                    format!(
                        "it claims {granted} granted receives, {open} of them open, but only {begun} sends were started"
                    )
                };
                if received.is_possible(begun) { Ok(()) } else { Err(what()) }
            }
            (Notice::Bye { delivered }, _) => {
                let (begun, has) = (begun(), *delivered);
                let what = || format!("it claims {has} delivered messages, but only {begun} sends were started");
                if has <= begun { Ok(()) } else { Err(what()) }
            }
            _ => Ok(()),
        }
    }

    /// The peer says what it must not: the connection has failed.
    pub fn breach(&mut self, what: &dyn std::fmt::Display) {
        let error = broken_protocol(&self.ends.peer, what);
        self.give_up(error);
    }

    /// Both sides have stopped a rail.
    fn recover(&mut self, lane: usize, received: &Received, now: Instant) {
        let ends = Arc::clone(&self.ends);
        let (mut recovered, mut owing) = (Ok(()), false);
        self.half.borrow(&mut |half| {
            recovered = half.recover(&ends, lane, received);
            owing = half.is_owing();
        });
        self.is_owing = owing;
        self.wards[lane].phase = self.wards[lane].down(now);
        if let Err(error) = recovered {
            self.give_up(error);
        }
    }

    /// Sending side: asks for a lost rail, or looks how its trial goes.
    fn bring_back(&mut self, lane: usize, now: Instant) {
        if self.role != Role::Sender {
            return;
        }
        match &mut self.wards[lane].phase {
            Phase::Down { retry } if now >= *retry && self.dialogue.backlog() < CROWDED => {
                let ward = &mut self.wards[lane];
                ward.tries += 1;
                ward.phase = ward.down(now);
                match self.ask(lane) {
                    Ok(asked) => self.wards[lane].phase = Phase::Asking(Box::new(asked), now + ANSWER),
                    Err(why) => self.tell_not_now(lane, &why.to_string()),
                }
            }
            Phase::Asking(_, until) if now >= *until => {
                self.end_trial(lane, now, "the peer did not answer the reconnect request in time")
            }
            Phase::Trying(new, until) => {
                let late = now >= *until;
                match look_at_trial(new) {
                    Ok(true) => self.finish_trial(lane, now),
                    Ok(false) if !late => {}
                    Ok(false) => self.end_trial(lane, now, "test write not acknowledged in time"),
                    Err(why) => self.end_trial(lane, now, &why),
                }
            }
            _ => {}
        }
    }

    fn end_trial(&mut self, lane: usize, now: Instant, why: &str) {
        self.wards[lane].phase = self.wards[lane].down(now);
        self.not_now(lane, why);
    }

    fn finish_trial(&mut self, lane: usize, now: Instant) {
        let down = self.wards[lane].down(now);
        if let Phase::Trying(new, _) = std::mem::replace(&mut self.wards[lane].phase, down) {
            self.dialogue.say(Notice::Live { lane: lane as u8 });
            self.carry_on(lane, *new, now);
        }
    }

    /// The rail is used from here on, with these queue pairs.
    fn carry_on(&mut self, lane: usize, new: Lane, now: Instant) {
        let mut new = Some(new);
        self.wards[lane].carries_since = now;
        self.wards[lane].phase = Phase::Live;
        let ends = Arc::clone(&self.ends);
        let mut regained = Ok(());
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
            self.lose(lane, "local port down while the rail was tested", now);
        }
    }

    /// The rail cannot return now: the peer is told.
    fn not_now(&mut self, lane: usize, why: &str) {
        self.tell_not_now(lane, why);
        self.dialogue.say(Notice::NotNow { lane: lane as u8, why: why.to_owned() });
    }

    fn tell_not_now(&self, lane: usize, why: &str) {
        let (rail, peer) = (self.wards[lane].rail.name(), &self.ends.peer.name);
        tracing::debug!("rail {rail} to {peer} not recovered yet: {why}");
    }

    /// No rail is left for too long, or the peer does not answer for one: the connection has failed.
    fn watch_the_dark(&mut self, now: Instant) {
        let limit = self.ends.host.config.loss_timeout;
        let is_dark = !self.wards.iter().any(|ward| matches!(ward.phase, Phase::Live));
        let silent =
            |ward: &&Ward| matches!(ward.phase, Phase::Fenced(since) if now.saturating_duration_since(since) > limit);
        if !is_dark && let Some(ward) = self.wards.iter().find(silent) {
            let (rail, peer, limit) = (ward.rail.name(), &self.ends.peer.name, limit.as_secs());
            let why = format!(
                "{peer} did not acknowledge the loss of rail {rail} within NCCL_SPARK_LOSS_TIMEOUT_S={limit}: {}",
                self.text()
            );
            self.give_up(Error::Remote(why));
            return;
        }
        if !is_dark {
            self.dark_since = None;
            return;
        }
        let since = *self.dark_since.get_or_insert(now);
        let waited = now.duration_since(since);
        if waited < limit {
            return;
        }
        let error = Error::Remote(format!(
            "no usable rail to {} for {waited:.0?} (NCCL_SPARK_LOSS_TIMEOUT_S={}): {}",
            self.ends.peer.name,
            limit.as_secs(),
            self.text(),
        ));
        self.give_up(error);
    }

    /// The connection has failed: the data path tells its caller when it is asked next.
    pub fn give_up(&mut self, error: Error) {
        if !std::mem::replace(&mut self.has_given_up, true) {
            self.outages.ended();
            // The call that meets it next writes the warning.
            if self.ends.host.said.is_first(&self.ends.peer.name, Subject::Failed) {
                tracing::info!("{error}");
            } else {
                tracing::debug!("{error}");
            }
        }
        self.half.borrow(&mut |half| _ = half.end(Box::new(error.clone())));
    }
}
