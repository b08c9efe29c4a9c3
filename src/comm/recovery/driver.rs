//! The recovery driver of one connection: executes what recovery decides.
//!
//! What is done when a rail is lost and when it returns is decided by [`crate::flow::recovery`]. This tells it what the data path,
//! the ports, the peer and the clock say, and does what it asks for: it stops queue pairs, makes, connects and tries new ones, and sends
//! control frames. It owns the queue pairs of the connecting side that are being made and tried.
//!
//! All this is the service thread's. It borrows the data path for moments ([`crate::comm::datapath::path::DataPath`]). Whatever asks a device
//! or the kernel, and so may block, is done by threads of its own (`reconnect`).

mod first_rail;
mod reconnect;

use super::attempt::ManagedRail;
use crate::comm::datapath::context::PathContext;
use crate::comm::datapath::fault::{broken, broken_protocol};
use crate::comm::datapath::lane::Role;
use crate::comm::datapath::mailbox::Mailboxes;
use crate::comm::datapath::path::{DataPath, Faults};
use crate::comm::datapath::peer::Peer;
use crate::comm::datapath::shared::SharedPath;
use crate::comm::datapath::status::{Fenced, Loss};
use crate::comm::log::once::Subject;
use crate::comm::log::outages::Member;
use crate::comm::log::tcp;
use crate::comm::process::Process;
use crate::comm::rail::Rail;
use crate::counters::nanos;
use crate::error::Error;
use crate::flow::recovery::{Action, Cause, Changed, Failure, Frame, Limits, LogEntry, Recovery, State};
use crate::flow::redial::Need;
use crate::wire::control::{ControlFrame, Received};
use crate::wire::fields::Priority;
use crate::wire::ids::LaneId;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a path that closes is looked at for what has come: more often than all its receives could ask for.
const MOST_ROUNDS: usize = 256;
/// Control frames that are taken in at a time.
const FRAMES: usize = 4;

/// What became of a port of this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortChange {
    /// It came up.
    Up,
    /// It went down.
    Down,
    /// Its device is no longer on the bus, or does not answer.
    Removed,
}

/// Terms of a new connection.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// This side.
    pub role: Role,
    /// Priority of the connection's packets.
    pub priority: Priority,
    /// How long the connection may be without its first rail.
    pub first_rail: Duration,
}

/// One connection's rails, and the control messages about them.
pub struct Driver {
    process: Arc<Process>,
    context: Arc<PathContext>,
    path: Arc<dyn SharedPath>,
    role: Role,
    priority: Priority,
    mailboxes: Mailboxes,
    rails: Vec<ManagedRail>,
    recovery: Recovery,
    /// What recovery's clock counts from: the first time that was told.
    origin: Option<Instant>,
    /// For one log line an outage.
    outages: Member,
    /// For one log line of the bootstrap's TCP.
    tcp: tcp::Member,
    /// True if a loss has left work to the data path. Set by [`Driver::on_path`] alone.
    is_owing: bool,
    /// How many warnings have said that there is no rail yet.
    warnings: u32,
    /// When NCCL was last seen to ask for the connection, which has no rail yet, on recovery's clock.
    asked_at: u64,
}

impl Driver {
    /// Watches over the rails of a connection that has just come up. Rails that are not open do not carry yet. Where none does,
    /// the connection fails unless one carries in time.
    pub fn new(
        process: Arc<Process>,
        context: Arc<PathContext>,
        path: Arc<dyn SharedPath>,
        Terms { role, priority, first_rail }: Terms,
        mailboxes: Mailboxes,
        mut rails: Vec<ManagedRail>,
    ) -> Self {
        let names = rails.iter().map(|managed| (managed.rail.name(), managed.peer_rail.clone()));
        let config = &process.config;
        let mut outages = Member::new(&process.outages, &context.peer.name, config.loss_timeout, names);
        let (loss, probe) = (nanos(config.loss_timeout), nanos(config.probe_timeout));
        let limits = Limits { loss, probe, first_rail: nanos(first_rail) };
        let mut recovery = Recovery::new(role, limits, rails.len());
        let now = Instant::now();
        for (lane, managed) in LaneId::all(rails.len()).zip(&mut rails).filter(|(_, managed)| managed.opening.is_none())
        {
            recovery.begins_without(lane);
            outages.begins_without(lane, now);
            managed.outages.lost(now);
        }
        let tcp = tcp::Member::new(&process.tcp_outages, &context.peer.name);
        let (origin, is_owing, warnings, asked_at) = Default::default();
        Self {
            process,
            context,
            path,
            role,
            priority,
            mailboxes,
            rails,
            recovery,
            origin,
            outages,
            tcp,
            is_owing,
            warnings,
            asked_at,
        }
    }

    /// The other end.
    pub fn peer(&self) -> &Arc<Peer> {
        &self.context.peer
    }

    /// Whether all is as it should be: nothing lost, nothing unheard.
    pub fn is_whole(&self) -> bool {
        self.recovery.is_whole()
    }

    /// Whether something is under way that is worth looking after often.
    pub fn is_busy(&self) -> bool {
        self.is_owing || self.recovery.is_busy()
    }

    /// Returns the next time at which this end has something to do if nothing else happens.
    pub fn next_due(&self) -> Option<Instant> {
        Some(self.origin? + Duration::from_nanos(self.recovery.poll_timeout()?))
    }

    /// Whether something that was said has not been heard.
    pub fn is_waiting(&self) -> bool {
        self.recovery.is_waiting()
    }

    /// Whether a rail carries, as far as this side knows.
    pub fn has_rail(&self) -> bool {
        self.recovery.rails_up().next().is_some()
    }

    /// The rails and where they stand, for messages.
    pub fn text(&self) -> String {
        let text = |(lane, managed): (LaneId, &ManagedRail)| managed.text(self.recovery.state(lane));
        self.lanes().zip(&self.rails).map(text).collect::<Vec<_>>().join(", ")
    }

    /// Says BYE.
    pub fn close(&mut self) {
        // What has come and nobody asked after counts too.
        for _ in 0..MOST_ROUNDS {
            if !self.take_losses(Instant::now()) {
                break;
            }
        }
        let delivered = self.on_path(|path, _| path.delivered()).unwrap_or(0);
        if !self.recovery.has_carried() {
            // NCCL no longer wants the connection, so no rail is tried any longer.
            self.recovery.fail();
        }
        self.recovery.close(delivered);
    }

    /// A port of this host went down or came back, or its device was removed.
    pub fn port_changed(&mut self, rail: &Rail, change: PortChange, now: Instant) {
        let at = self.clock(now);
        for lane in self.lanes() {
            if self.rails[lane.index()].rail.id != rail.id {
                continue;
            }
            match change {
                PortChange::Up => {
                    self.process.backoff.forget(rail);
                    self.recovery.port_up(lane, at);
                }
                PortChange::Down => self.recovery.port_down(lane, "local port down", at),
                PortChange::Removed => self.recovery.port_down(lane, rail.device.why_away(), at),
            }
        }
        self.act(now);
    }

    /// The peer's end of the bootstrap's TCP was closed, without a BYE unless the peer had said it before.
    pub fn suspect(&mut self, now: Instant) {
        let at = self.clock(now);
        if self.recovery.recovers() {
            self.tcp.lost("bootstrap connection closed by its other end", now);
        }
        self.recovery.bootstrap_closed(at);
    }

    /// The bootstrap's TCP has failed. The rails may work all the same, and they carry control messages too.
    pub fn lost_channel(&mut self, why: &str, now: Instant) {
        self.tcp.lost(why, now);
    }

    /// Whether another TCP connection is wanted, where the one that there is has not failed (`is_open`), or none is there.
    pub fn channel_need(&mut self, is_open: bool, now: Instant) -> Need {
        let at = self.clock(now);
        self.recovery.bootstrap_need(is_open, at)
    }

    /// There is no TCP: the peer is asked by the rails now and then, and at once where it could not be dialled.
    pub fn channel_away(&mut self, is_unreachable: bool, now: Instant) {
        let at = self.clock(now);
        self.recovery.bootstrap_away(is_unreachable, at);
    }

    /// There is a new TCP connection: what is unheard is sent by it when this is tended next.
    pub fn channel_opened(&mut self) {
        self.recovery.bootstrap_opened();
    }

    /// The peer uses the new TCP connection too.
    pub fn channel_carries(&mut self, now: Instant) {
        self.tcp.returned(now);
    }

    /// What comes by the bootstrap's TCP is no message: the connection has failed, and nothing more is heard of the peer.
    pub fn broken_channel(&mut self, why: &dyn std::fmt::Display, now: Instant) {
        self.recovery.breach(why.to_string());
        self.recovery.peer_gone();
        self.act(now);
    }

    /// A completion queue of this process is in error: this connection is lost, or a rail of it, if it is one of its own.
    pub fn completions_lost(&mut self, cq: usize, now: Instant) {
        // An error that ends the connection is met below.
        self.on_path(|path, context| _ = path.lose_completions(context, cq));
        self.take_losses(now);
    }

    /// Goes on as far as it can. Control frames for the peer's mailbox are written here; those for the channel are handed to `send`, which
    /// says whether there is one. A data path that is in use is left alone, unless `has_news`: it looks after itself, and says so when
    /// it finds a rail lost.
    pub fn tend(&mut self, now: Instant, has_news: bool, send: &mut dyn FnMut(ControlFrame) -> bool) {
        for _ in 0..FRAMES {
            let Some(frame) = self.mailboxes.take_frame() else { break };
            self.hear(&frame, now);
            if frame.asks {
                // The path that it came by carries: the answer goes back by it too. (To what asks nothing there is none.)
                self.mail(&self.recovery.frame());
            }
        }
        let is_unused = self.path.is_unused();
        if is_unused || has_news || self.is_busy() {
            self.take_losses(now);
        }
        let at = self.clock(now);
        self.look_at_devices(at);
        self.act(now);
        self.fence_what_was_cut_off(at);
        self.look_at_attempts(now, at);
        self.act(now);
        self.recovery.tick(at);
        self.act(now);
        self.warn_of_no_rail(at);
        self.give_up_if_abandoned(is_unused, at);
        if !self.recovery.recovers() {
            self.outages.ended();
            self.tcp.ended();
        }
        self.show_failure();
        match self.recovery.poll_frame(at) {
            Some(Frame::First(frame)) => {
                let by_tcp = send(frame);
                if !by_tcp {
                    self.mail(&self.recovery.frame());
                }
            }
            Some(Frame::Repeated(frame)) => self.mail(&frame),
            None => {}
        }
    }

    /// A control frame came in.
    pub fn hear(&mut self, frame: &ControlFrame, now: Instant) {
        // How many receives have begun to be sent; to a receiver nothing can be said of any. Of a broken data path nothing is known, and
        // nothing that the peer says can hurt it.
        let mut begun = if self.role == Role::Sender { u64::MAX } else { 0 };
        if self.role == Role::Sender
            && frame.asks
            && let Some((_, next)) = self.on_path(|path, _| path.span())
        {
            begun = next;
        }
        let at = self.clock(now);
        self.recovery.heard(frame, begun, at);
        self.act(now);
    }

    /// Writes a control frame into the peer's mailbox, by every rail that carries.
    fn mail(&mut self, frame: &ControlFrame) {
        let bytes = self.mailboxes.put_frame(frame);
        let Some(mut path) = self.path.borrow() else { return };
        for lane in self.recovery.rails_up() {
            let write = self.mailboxes.frame_write(path.rails().lanes[lane.index()].mailbox_keys(), bytes);
            path.post(&self.context, lane, &write);
        }
    }

    /// What the data path found lost, and what it finds when it is looked after; whether something had come.
    fn take_losses(&mut self, now: Instant) -> bool {
        let found = self.on_path(|path, context| {
            let found = path.tend(context);
            let losses = path.rails().status.take_losses();
            let received = if losses.is_empty() { Received::default() } else { path.received() };
            (found, losses, received, path.rails().status.has_failed())
        });
        let Some((found, losses, received, has_failed)) = found else {
            self.give_up(broken());
            self.act(now);
            return false;
        };
        if has_failed {
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
        for Loss { lane, why, fenced } in losses {
            tracing::debug!("lane {lane} of the connection with {} failed: {why}", self.context.peer.name);
            match fenced {
                Fenced::Now => self.recovery.lost(lane, &why, received.clone(), at),
                Fenced::NotYet => {
                    let why = self.rails[lane.index()].rail.device.why_away();
                    self.recovery.port_down(lane, why, at);
                }
            }
        }
        self.act(now);
        moved
    }

    /// Does what recovery asks for.
    fn act(&mut self, now: Instant) {
        let at = self.clock(now);
        while let Some(action) = self.recovery.poll_action() {
            match action {
                Action::Fence(lane) => self.fence(lane, at),
                Action::Resend(lane, received) => self.resend(lane, &received),
                Action::OpenQps(lane) => {
                    if let Err(why) = self.open_qps(lane, now) {
                        self.recovery.opened(lane, Err(why), at);
                    }
                }
                Action::AnswerQps(lane, rail, end) => self.answer_qps(lane, rail, end, now),
                Action::ConnectQps(lane, answer) => {
                    if let Err(why) = self.connect_qps(lane, answer, now) {
                        self.recovery.connected(lane, Err(why), at);
                    }
                }
                Action::Activate(lane) => {
                    let outcome = self.activate(lane, now);
                    self.recovery.activated(lane, outcome, at);
                }
                Action::DropQps(lane) => drop(self.take_new(lane)),
                Action::PeerClosed(delivered) => {
                    // First: NCCL's thread must not see that the peer has left before it can see why.
                    self.ends_without_rail();
                    self.context.peer.said_bye(delivered);
                }
                Action::PeerGone => {
                    self.ends_without_rail();
                    self.context.peer.vanished();
                }
                Action::Fail(failure) => self.fail(&failure),
                Action::Changed(changed) => self.changed(*changed, now),
                Action::Log(entry) => self.log(&entry),
            }
        }
    }

    /// Stops a rail. Where its device was cut off, this is to be called again.
    fn fence(&mut self, lane: LaneId, at: u64) {
        let fenced = self.on_path(|path, context| match path.lose(context, lane) {
            Fenced::Now => Some(path.received()),
            Fenced::NotYet => None,
        });
        if let Some(received) = fenced.unwrap_or_else(|| Some(Received::default())) {
            self.recovery.fenced(lane, received, at);
        }
    }

    /// A device may have been removed, and even have returned, without a word to this connection.
    fn look_at_devices(&mut self, at: u64) {
        for (lane, managed) in self.lanes().zip(&self.rails).filter(|(_, managed)| managed.is_away()) {
            self.recovery.port_down(lane, managed.rail.device.why_away(), at);
        }
    }

    /// Asks again whether the devices that were cut off are gone.
    fn fence_what_was_cut_off(&mut self, at: u64) {
        for lane in self.lanes() {
            if matches!(self.recovery.state(lane), Some(State::Fencing { .. })) {
                self.fence(lane, at);
            }
        }
    }

    fn resend(&mut self, lane: LaneId, received: &Received) {
        if let Some(Err(error)) = self.on_path(|path, context| path.recover(context, lane, received)) {
            self.give_up(error);
        }
    }

    /// Uses a rail from here on, with the new queue pairs.
    fn activate(&mut self, lane: LaneId, now: Instant) -> std::result::Result<(), String> {
        let has_failed = || "the connection has failed".to_owned();
        // A data path that has failed destroys its new queue pairs.
        let new = self.take_new(lane).ok_or_else(has_failed)?;
        let opening = new.opening();
        match self.on_path(|path, context| path.regain(context, lane, new)) {
            Some(Ok(true)) => {}
            Some(Ok(false)) | None => return Err(has_failed()),
            Some(Err(error)) => {
                self.give_up(error);
                return Err(has_failed());
            }
        }
        let managed = &mut self.rails[lane.index()];
        (managed.opening, managed.answers) = (Some(opening), 0);
        managed.tries.clear();
        if let Some(way) = managed.ways[0] {
            // The accepting side hears of it by LIVE.
            self.process.backoff.carried(managed.path(way), now);
        }
        Ok(())
    }

    /// Logs and counts a change of a rail's state. All lines and counters of losses and recoveries
    /// come from here.
    fn changed(&mut self, Changed { lane, from, to, cause, at }: Changed, now: Instant) {
        let (peer, name) = (Arc::clone(&self.context.peer), self.rails[lane.index()].rail.name());
        tracing::trace!("rail {name} to {}: {from:?}, then {to:?}, {cause}", peer.name);
        match (&to, &cause) {
            (State::Fencing { .. }, _) if self.recovery.recovers() => {
                let next = match self.role {
                    Role::Sender => {
                        format!("retrying in {:.1} s", Duration::from_nanos(self.recovery.pause(lane)).as_secs_f64())
                    }
                    Role::Receiver => "the peer retries".to_owned(),
                };
                self.outages.lost(lane, &cause.to_string(), &next, now);
                self.rails[lane.index()].outages.lost(now);
            }
            (State::Up { .. }, _) => self.returned(lane, now, at),
            (State::Down { .. }, Cause::StoppedByBoth) => {}
            (State::Down { .. }, why) => {
                if self.recovery.waits_for_first_rail(0).is_some() {
                    self.rails[lane.index()].failed(&why.to_string());
                }
                tracing::debug!("rail {name} to {} not recovered yet: {why}", peer.name);
            }
            _ => {}
        }
    }

    fn returned(&mut self, lane: LaneId, now: Instant, at: u64) {
        let managed = &mut self.rails[lane.index()];
        // If the port went down while the rail was tested, no event says so any more.
        managed.rail.device.ask_soon();
        if managed.is_away() {
            let why = managed.rail.device.why_away();
            self.recovery.port_down(lane, why, at);
        } else {
            let path_mtu_bytes = managed.ways[0].map_or(0, |way| way.mtu_bytes);
            managed.outages.recovered(path_mtu_bytes, now);
            self.outages.recovered(lane, now);
        }
    }

    fn log(&self, entry: &LogEntry) {
        let peer = &self.context.peer.name;
        match entry {
            LogEntry::Heard(message) => tracing::debug!("{peer} sent {message:?}"),
            LogEntry::Malformed(why) => tracing::warn!("{peer} sent a malformed control message, ignored: {why}"),
            LogEntry::NoSuchRail(lane) => {
                let count = self.rails.len();
                tracing::warn!("{peer} sent a control message for rail {lane} of {count}: ignored");
            }
            LogEntry::OutOfTurn(lane) => tracing::debug!("{peer} sent a control message out of turn for rail {lane}"),
            LogEntry::PeerAnswers => {
                if self.process.log.is_first(peer, Subject::Answered) {
                    tracing::info!("{peer} answers after its TCP was closed; connections continue");
                }
            }
        }
    }

    /// Recovery has given the connection up.
    fn fail(&mut self, failure: &Failure) {
        let (peer, limit) = (&self.context.peer.name, self.process.config.loss_timeout.as_secs());
        let error = match failure {
            Failure::Protocol(why) => Error::Protocol(broken_protocol(&self.context.peer.name, why)),
            Failure::NotStopped(lane) => Error::TimedOut(format!(
                "rail {} to {peer} lost, and its device does not stop within NCCL_SPARK_LOSS_TIMEOUT_S={limit}: {}",
                self.rails[lane.index()].rail.name(),
                self.text()
            )),
            Failure::NotAcknowledged(lane) => Error::TimedOut(format!(
                "{peer} did not acknowledge the loss of rail {} within NCCL_SPARK_LOSS_TIMEOUT_S={limit}: {}",
                self.rails[lane.index()].rail.name(),
                self.text()
            )),
            Failure::NoFirstRail => self.no_first_rail(),
            Failure::NoRail(waited) => Error::Network(format!(
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
            self.end_path(error);
        } else {
            self.recovery.fail();
            self.end(error);
        }
    }

    /// Shows in the counters that the rails of a failed connection do not carry.
    fn show_failure(&self) {
        if self.recovery.has_failed() {
            self.rails.iter().for_each(|managed| managed.outages.failed());
        }
    }

    fn end(&mut self, error: Error) {
        self.show_failure();
        self.outages.ended();
        self.tcp.ended();
        // The call that meets it next writes the warning.
        if self.process.log.is_first(&self.context.peer.name, Subject::Failed) {
            tracing::info!("{error}");
        } else {
            tracing::debug!("{error}");
        }
        self.end_path(error);
    }

    fn end_path(&mut self, error: Error) {
        self.on_path(|path, _| drop(path.end(Box::new(error))));
    }

    /// Borrows the data path. Returns `None` after a panic in it.
    fn on_path<T>(&mut self, work: impl FnOnce(&mut dyn DataPath, &PathContext) -> T) -> Option<T> {
        let done = self.path.borrow().map(|mut path| {
            let done = work(&mut *path, &self.context);
            (done, path.is_owing())
        });
        self.is_owing = done.as_ref().is_some_and(|(_, is_owing)| *is_owing);
        done.map(|(done, _)| done)
    }

    fn lanes(&self) -> impl Iterator<Item = LaneId> + use<> {
        LaneId::all(self.rails.len())
    }

    /// The time as recovery counts it.
    fn clock(&mut self, now: Instant) -> u64 {
        nanos(now.saturating_duration_since(*self.origin.get_or_insert(now)))
    }
}
