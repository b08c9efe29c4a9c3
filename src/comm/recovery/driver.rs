//! Recovery driver of one connection: executes the decisions of [`crate::flow::recovery`].
//!
//! The driver passes events to recovery, and executes the actions that recovery requests. It stops
//! queue pairs, creates, connects and tests new ones, and sends control frames. On the connecting
//! side, the driver owns new queue pairs until they are in use.
//!
//! The driver runs on the service thread, which borrows the data path for short times
//! ([`DataPath`]). Calls that may block run on threads of their own (`reconnect`).

mod failure;
mod first_rail;
mod reconnect;
mod stall;

use super::attempt::ManagedRail;
use super::stall::Stall;
use crate::comm::datapath::context::PathContext;
use crate::comm::datapath::fault::broken;
use crate::comm::datapath::lane::Role;
use crate::comm::datapath::mailbox::Mailboxes;
use crate::comm::datapath::path::{DataPath, Faults};
use crate::comm::datapath::peer::Peer;
use crate::comm::datapath::shared::SharedPath;
use crate::comm::datapath::status::{Fenced, Loss};
use crate::comm::log::once::Subject;
use crate::comm::log::outages::ConnectionOutages;
use crate::comm::log::tcp;
use crate::comm::process::Process;
use crate::comm::rail::Rail;
use crate::counters::nanos;
use crate::flow::recovery::{Action, Cause, Changed, Frame, Limits, LogEntry, Recovery, State};
use crate::flow::redial::Need;
use crate::wire::control::{ControlFrame, Received};
use crate::wire::fields::Priority;
use crate::wire::ids::LaneId;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Largest number of polls of the data path in [`Driver::close`]. Fewer polls are enough to process
/// every receive that has arrived.
const MOST_ROUNDS: usize = 256;
const FRAMES: usize = 4;

/// Change of a port of this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortChange {
    /// The port came up.
    Up,
    /// The port went down.
    Down,
    /// The port's device is no longer on the bus, or does not answer.
    Removed,
}

/// Terms of a new connection.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// Role of this end.
    pub role: Role,
    /// Priority of the connection's packets.
    pub priority: Priority,
    /// Time limit for the connection to get its first rail.
    pub first_rail_timeout: Duration,
}

/// Recovery state of one connection.
pub struct Driver {
    process: Arc<Process>,
    context: Arc<PathContext>,
    path: Arc<dyn SharedPath>,
    role: Role,
    priority: Priority,
    mailboxes: Mailboxes,
    rails: Vec<ManagedRail>,
    recovery: Recovery,
    /// Zero of recovery's clock: the time of the first event.
    origin: Option<Instant>,
    /// Contributes this connection to the process's log lines about rail outages.
    outages: ConnectionOutages,
    /// Contributes this connection to the process's log lines about lost TCP.
    tcp: tcp::ConnectionTcpOutages,
    stall: Stall,
    /// True while the data path has shares or grants to repeat. Set by [`Driver::on_path`].
    has_repeats: bool,
    warnings: u32,
    /// Approximate time of NCCL's last call on the data path, on recovery's clock: the time of the
    /// last round that found a call since the round before. If NCCL stops calling before the first
    /// rail is up, the connection counts as abandoned.
    asked_at: u64,
}

impl Driver {
    /// Starts to watch a new connection. A rail without queue pairs (`generation` is `None`) begins
    /// as a lost rail. If all rails begin so, the connection fails unless one of them comes into
    /// use within `first_rail_timeout`.
    pub fn new(
        process: Arc<Process>,
        context: Arc<PathContext>,
        path: Arc<dyn SharedPath>,
        Terms { role, priority, first_rail_timeout }: Terms,
        mailboxes: Mailboxes,
        mut rails: Vec<ManagedRail>,
    ) -> Self {
        let names = rails.iter().map(|managed| (managed.rail.name(), managed.peer_rail.clone()));
        let config = &process.config.recovery;
        let mut outages = ConnectionOutages::new(&process.outages, &context.peer.name, config.loss_timeout, names);
        let (loss, probe) = (nanos(config.loss_timeout), nanos(config.probe_timeout));
        let limits = Limits { loss, probe, first_rail: nanos(first_rail_timeout) };
        let mut recovery = Recovery::new(role, limits, rails.len());
        let now = Instant::now();
        let missing: Vec<_> =
            LaneId::all(rails.len()).filter(|lane| rails[lane.index()].generation.is_none()).collect();
        recovery.mark_missing_at_start(&missing);
        for lane in missing {
            outages.begins_without(lane, now);
            rails[lane.index()].outages.lost(now);
        }
        let tcp = tcp::ConnectionTcpOutages::new(&process.tcp_outages, &context.peer.name);
        let stall = Stall::new(&process, &context.peer.name);
        let (origin, has_repeats, warnings, asked_at) = Default::default();
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
            stall,
            has_repeats,
            warnings,
            asked_at,
        }
    }

    /// Returns the peer at the other end.
    pub fn peer(&self) -> &Arc<Peer> {
        &self.context.peer
    }

    /// Returns true if no rail is lost and no control message is unacknowledged.
    pub fn is_whole(&self) -> bool {
        self.recovery.is_whole()
    }

    /// Returns true while work is in progress that needs frequent rounds.
    pub fn is_busy(&self) -> bool {
        self.has_repeats || self.recovery.is_busy()
    }

    /// Returns the next time at which this end has work even if nothing else happens.
    pub fn next_due(&self) -> Option<Instant> {
        Some(self.origin? + Duration::from_nanos(self.recovery.poll_timeout()?))
    }

    /// Returns true if a control message to the peer is not acknowledged yet.
    pub fn is_waiting(&self) -> bool {
        self.recovery.is_waiting()
    }

    /// Returns true if a rail is in use, as far as this end can tell.
    pub fn has_rail(&self) -> bool {
        self.recovery.rails_up().next().is_some()
    }

    /// Returns the rails and their states, for messages.
    pub fn text(&self) -> String {
        let text = |(lane, managed): (LaneId, &ManagedRail)| managed.text(self.recovery.state(lane));
        self.lanes().zip(&self.rails).map(text).collect::<Vec<_>>().join(", ")
    }

    /// Processes all arrivals, then sends BYE, the last control message.
    pub fn close(&mut self) {
        self.stop_stall_watch();
        // Receives that have arrived count as delivered, even if NCCL has not tested them.
        for _ in 0..MOST_ROUNDS {
            if !self.take_losses(Instant::now()) {
                break;
            }
        }
        let delivered = self.on_path(|path, _| path.delivered()).unwrap_or(0);
        if !self.recovery.was_up() {
            // NCCL no longer needs the connection, so recovery stops trying its rails.
            self.recovery.fail();
        }
        self.recovery.close(delivered);
    }

    /// Handles a port of this host that went down or came back, or whose device was removed.
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
                PortChange::Down => self.recovery.rail_down(lane, "local port down", at),
                PortChange::Removed => self.recovery.rail_down(lane, rail.device.absence_reason(), at),
            }
        }
        self.act(now);
    }

    /// Handles the peer's close of the bootstrap TCP connection. A BYE may have arrived before the
    /// close.
    pub fn tcp_closed_by_peer(&mut self, now: Instant) {
        let at = self.clock(now);
        if self.recovery.recovers() {
            self.tcp.lost("bootstrap connection closed by its other end", now);
        }
        self.recovery.bootstrap_closed(at);
    }

    /// Handles the failure of TCP. The rails may still work, and can carry control messages too.
    pub fn tcp_failed(&mut self, why: &str, now: Instant) {
        self.tcp.lost(why, now);
    }

    /// Returns the need for a new TCP connection. `is_open` is false if the old one was given up.
    pub fn tcp_need(&mut self, is_open: bool, now: Instant) -> Need {
        let at = self.clock(now);
        self.recovery.bootstrap_need(is_open, at)
    }

    /// Handles a round without TCP. Sends ARE YOU THERE over the rails, if one is due or an attempt
    /// to dial has failed (`is_unreachable`).
    pub fn tcp_missing(&mut self, is_unreachable: bool, now: Instant) {
        let at = self.clock(now);
        self.recovery.bootstrap_away(is_unreachable, at);
    }

    /// Handles a new TCP connection. The next [`Driver::poll`] repeats unacknowledged messages.
    pub fn tcp_opened(&mut self) {
        self.recovery.bootstrap_opened();
    }

    /// Records that the peer uses the new TCP connection.
    pub fn tcp_confirmed(&mut self, now: Instant) {
        self.tcp.returned(now);
    }

    /// Handles bytes on TCP that form no message: fails the connection and counts the peer as gone.
    pub fn tcp_malformed(&mut self, why: &dyn std::fmt::Display, now: Instant) {
        self.recovery.breach(why.to_string());
        self.recovery.peer_gone();
        self.act(now);
    }

    /// Handles an error of a completion queue of this process. A connection that uses the queue
    /// loses a rail or fails.
    pub fn completions_lost(&mut self, cq: usize, now: Instant) {
        // `take_losses` handles an error that ends the connection.
        self.on_path(|path, context| _ = path.lose_completions(context, cq));
        self.take_losses(now);
    }

    /// Does one round of work. A new control frame goes to `send`, which sends it over TCP, or
    /// returns false if TCP cannot take it. In that case the driver writes the frame into the
    /// peer's mailbox over the rails. Repeated frames always go into the mailbox.
    ///
    /// Polls the data path for arrivals and losses, unless NCCL has used it since the last round:
    /// NCCL's own calls wake the service thread when they find a lost rail. Polls the data path in
    /// any case if `has_news` is true or work is in progress.
    pub fn poll(&mut self, now: Instant, has_news: bool, send: &mut dyn FnMut(ControlFrame) -> bool) {
        for _ in 0..FRAMES {
            let Some(frame) = self.mailboxes.take_frame() else { break };
            self.receive_frame(&frame, now);
            if frame.awaits_confirmation {
                // The frame came over a working rail, so the answer uses the rails too.
                self.write_to_mailboxes(&self.recovery.frame());
            }
        }
        let is_unused = self.path.is_unused();
        if is_unused || has_news || self.is_busy() {
            self.take_losses(now);
        }
        let at = self.clock(now);
        self.poll_devices(at);
        self.watch_progress(is_unused, at, now);
        self.act(now);
        self.retry_fences(at);
        self.poll_attempts(now, at);
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
                    self.write_to_mailboxes(&self.recovery.frame());
                }
            }
            Some(Frame::Repeated(frame)) => self.write_to_mailboxes(&frame),
            None => {}
        }
    }

    /// Handles a control frame from the peer.
    pub fn receive_frame(&mut self, frame: &ControlFrame, now: Instant) {
        // Number of sends that have begun. The peer cannot have received more, so recovery rejects
        // larger claims. A receiver begins no sends. A frame that awaits no confirmation contains
        // no control message and so claims nothing: it only acknowledges. For such a frame, the
        // limit is off (`u64::MAX`). The limit is also off after a panic of the data path: the path
        // is not used again, so any claim is harmless.
        let mut begun = if self.role == Role::Sender { u64::MAX } else { 0 };
        if self.role == Role::Sender
            && frame.awaits_confirmation
            && let Some((_, next)) = self.on_path(|path, _| path.message_range())
        {
            begun = next;
        }
        let at = self.clock(now);
        self.recovery.receive_frame(frame, begun, at);
        self.act(now);
    }

    fn write_to_mailboxes(&mut self, frame: &ControlFrame) {
        let (bytes, mailboxes) = (self.mailboxes.put_frame(frame), self.mailboxes.clone());
        let up: Vec<_> = self.recovery.rails_up().collect();
        self.on_path(|path, context| {
            for lane in up {
                let write = mailboxes.frame_write(path.rails().lanes[lane.index()].mailbox_keys(), bytes);
                path.post(context, lane, &write);
            }
        });
    }

    /// Processes arrivals and losses on the data path. Returns true if anything arrived.
    fn take_losses(&mut self, now: Instant) -> bool {
        let found = self.on_path(|path, context| {
            let found = path.poll(context);
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
                    let away = self.rails[lane.index()].rail.device.absence_reason();
                    self.recovery.rail_down(lane, &format!("{away}: {why}"), at);
                }
            }
        }
        self.act(now);
        moved
    }

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
                Action::AnswerQps(lane, rail, end) => {
                    if let Err(why) = self.answer_qps(lane, rail, end, now) {
                        self.recovery.answered(lane, Err(why), at);
                    }
                }
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
                    // Called before `said_bye`, so that NCCL's thread sees the reason first.
                    self.ends_without_rail();
                    self.context.peer.said_bye(delivered);
                }
                Action::PeerGone => {
                    self.ends_without_rail();
                    self.context.peer.vanished();
                }
                Action::Fail(failure) => self.fail(&failure),
                Action::StallQuery(question) => self.reply_to_stall(&question, at, now),
                Action::StallReply(answer) => self.receive_stall_reply(&answer, at),
                Action::Changed(changed) => self.changed(*changed, now),
                Action::Log(entry) => self.log(&entry),
            }
        }
    }

    /// Stops a rail. If the rail's device has failed, is stuck or was cut off, the rail cannot be
    /// stopped yet, and [`Driver::retry_fences`] repeats the call.
    fn fence(&mut self, lane: LaneId, at: u64) {
        let fenced = self.on_path(|path, context| match path.lose(context, lane) {
            Fenced::Now => Some(path.received()),
            Fenced::NotYet => None,
        });
        // After a panic the data path has stopped nothing, so the peer gets no FENCED.
        if let Some(received) = fenced.flatten() {
            self.recovery.fenced(lane, received, at);
        }
    }

    /// Detects devices that were removed, and perhaps have returned, without an event.
    fn poll_devices(&mut self, at: u64) {
        for (lane, managed) in self.lanes().zip(&self.rails).filter(|(_, managed)| managed.is_away()) {
            self.recovery.rail_down(lane, managed.rail.device.absence_reason(), at);
        }
    }

    /// Tries again to fence the rails that could not be stopped. This succeeds once the rail's
    /// device is removed or answers again.
    fn retry_fences(&mut self, at: u64) {
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

    /// Starts to use a rail's new queue pairs.
    fn activate(&mut self, lane: LaneId, now: Instant) -> std::result::Result<(), String> {
        let has_failed = || "the connection has failed".to_owned();
        // A failed data path has destroyed its new queue pairs.
        let new = self.take_new(lane).ok_or_else(has_failed)?;
        let generation = new.generation();
        match self.on_path(|path, context| path.regain(context, lane, new)) {
            Some(Ok(true)) => {}
            Some(Ok(false)) | None => return Err(has_failed()),
            Some(Err(error)) => {
                self.give_up(error);
                return Err(has_failed());
            }
        }
        let managed = &mut self.rails[lane.index()];
        (managed.generation, managed.answers) = (Some(generation), 0);
        managed.failed_attempts.clear();
        if let Some(choice) = managed.last_paths[0] {
            // On the accepting side, the peer's LIVE has shown that the path works.
            self.process.backoff.carried(managed.path(choice), now);
        }
        Ok(())
    }

    /// Logs and counts a change of a rail's state. No other function does.
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
                let grown = self.process.losses.grown(Some(&self.rails[lane.index()].rail.info.device));
                self.outages.lost(lane, &cause.to_string(), &(next + &grown), now);
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
        // The port may have gone down during the test. Recovery ignored that event, because the
        // rail was not in use yet. So the port is queried again.
        managed.rail.device.ask_soon();
        if managed.is_away() {
            let why = managed.rail.device.absence_reason();
            self.recovery.rail_down(lane, why, at);
        } else {
            let path_mtu_bytes = managed.last_paths[0].map_or(0, |choice| choice.mtu_bytes);
            managed.outages.recovered(path_mtu_bytes, now);
            self.outages.recovered(lane, now);
        }
    }

    fn log(&self, entry: &LogEntry) {
        let peer = &self.context.peer.name;
        match entry {
            LogEntry::MessageReceived(message) => tracing::debug!("{peer} sent {message:?}"),
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

    /// Borrows the data path. Returns `None` after a panic in it.
    fn on_path<T>(&mut self, work: impl FnOnce(&mut dyn DataPath, &PathContext) -> T) -> Option<T> {
        let done = self.path.borrow().map(|mut path| {
            let done = work(&mut *path, &self.context);
            (done, path.has_repeats())
        });
        self.has_repeats = done.as_ref().is_some_and(|(_, has_repeats)| *has_repeats);
        done.map(|(done, _)| done)
    }

    fn lanes(&self) -> impl Iterator<Item = LaneId> + use<> {
        LaneId::all(self.rails.len())
    }

    fn clock(&mut self, now: Instant) -> u64 {
        nanos(now.saturating_duration_since(*self.origin.get_or_insert(now)))
    }
}
