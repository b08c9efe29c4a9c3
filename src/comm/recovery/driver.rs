//! Recovery driver of one connection: executes the decisions of [`proto::flow::recovery`].
//!
//! The driver passes events to recovery, and executes the actions that recovery requests. It stops
//! queue pairs, creates, connects and tests new ones, and sends control frames. On the connecting
//! side, the driver owns new queue pairs until they are in use.
//!
//! The driver runs on the service thread, which borrows the data path for short times
//! ([`DataPath`]). If NCCL's thread uses the data path, the driver does not wait: its next
//! round tries the same work again. Calls that may block run on threads of their own
//! (`fencing`, `reconnect`).

mod changes;
mod failure;
mod fencing;
mod first_rail;
mod reconnect;
mod stall;

pub use fencing::END_LIMIT;

use super::attempt::{Attempt, ManagedRail};
use super::fence::Fence;
use super::stall::Stall;
use crate::clock;
use crate::comm::datapath::context::PathContext;
use crate::comm::datapath::fault::broken;
use crate::comm::datapath::lane::Role;
use crate::comm::datapath::mailbox::Mailboxes;
use crate::comm::datapath::path::{DataPath, Faults};
use crate::comm::datapath::peer::Peer;
use crate::comm::datapath::shared::{NotBorrowed, SharedPath};
use crate::comm::datapath::status::Loss;
use crate::comm::log::outages::ConnectionOutages;
use crate::comm::log::tcp;
use crate::comm::process::Process;
use crate::comm::rail::Rail;
use host::counters::nanos;
use host::error::Error;
use proto::device::PortChange;
use proto::flow::recovery::{Action, Cause, Frame, Limits, Missing, Recovery};
use proto::flow::redial::Need;
use proto::time::Instant;
use proto::wire::control::ControlFrame;
use proto::wire::fields::Priority;
use proto::wire::ids::LaneId;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Largest number of polls of the data path in [`Driver::close`]. Fewer polls are enough to process
/// every receive that has arrived.
const MOST_ROUNDS: usize = 256;
const FRAMES: usize = 4;

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
    /// Fences of new queue pairs that are not used: their attempt or the connection has ended.
    unused_fences: Vec<Fence>,
    /// Time since which a failed connection waits until its queue pairs have stopped.
    ending_since: Option<Instant>,
    /// Work that waits for the data path.
    waiting: Waiting,
    /// True while the data path has shares or grants to repeat. Set by [`Driver::on_path`].
    has_repeats: bool,
    warnings: u32,
}

/// Work that waits because NCCL's thread used the data path.
#[derive(Default)]
struct Waiting {
    /// True if the data path could not be borrowed since the last round began.
    was_busy: bool,
    /// Action of recovery. Later actions wait too.
    action: Option<Action>,
    /// Control frames from the peer.
    frames: VecDeque<ControlFrame>,
    /// Numbers of completion queues that are in error.
    lost_cqs: Vec<usize>,
    /// Error that ends the connection.
    error: Option<Error>,
}

impl Driver {
    /// Starts to watch a new connection. The rails of `missing` have no queue pairs, and begin as
    /// lost rails. If all rails begin so, the connection fails unless one of them comes into use
    /// within `first_rail_timeout`.
    pub fn new(
        process: Arc<Process>,
        context: Arc<PathContext>,
        path: Arc<dyn SharedPath>,
        Terms {
            role,
            priority,
            first_rail_timeout,
        }: Terms,
        mailboxes: Mailboxes,
        mut rails: Vec<ManagedRail>,
        missing: &[Missing],
    ) -> Self {
        let names = rails
            .iter()
            .map(|managed| (managed.rail.name(), managed.peer_rail.clone()));
        let config = &process.config.recovery;
        let mut outages = ConnectionOutages::new(
            &process.outages,
            &context.peer.name,
            config.loss_timeout,
            names,
        );
        let loss = nanos(config.loss_timeout);
        let probe = nanos(config.probe_timeout);
        let limits = Limits {
            loss,
            probe,
            first_rail: nanos(first_rail_timeout),
        };
        let mut recovery = Recovery::new(role, limits, rails.len());
        let now = clock::now();
        recovery.mark_missing_at_start(missing);
        for Missing { lane, is_late, .. } in missing {
            outages.begins_without(*lane, *is_late, now);
            let counted = &mut rails[lane.index()].outages;
            if *is_late {
                counted.begins_late();
            } else {
                counted.lost(now);
            }
        }
        let tcp = tcp::ConnectionTcpOutages::new(&process.tcp_outages, &context.peer.name);
        let stall = Stall::new(&process, &context.peer.name);
        let (unused_fences, ending_since, waiting) = Default::default();
        let (origin, has_repeats, warnings) = Default::default();
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
            unused_fences,
            ending_since,
            waiting,
            has_repeats,
            warnings,
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
        self.has_repeats || self.waiting.was_busy || self.is_stopping() || self.recovery.is_busy()
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
        let text =
            |(lane, managed): (LaneId, &ManagedRail)| managed.text(self.recovery.state(lane));
        self.lanes()
            .zip(&self.rails)
            .map(text)
            .collect::<Vec<_>>()
            .join(", ")
    }

    /// Processes all arrivals, then sends BYE, the last control message. `send` is the same as for
    /// [`Driver::poll`]. Returns false, and sends nothing, if the data path is busy, or if arrivals
    /// are still in the completion queue of a rail that is being stopped (until `fences_until`, as
    /// its device may hang): the caller calls again later.
    pub fn close(
        &mut self,
        now: Instant,
        fences_until: Instant,
        send: &mut dyn FnMut(ControlFrame) -> bool,
    ) -> bool {
        self.stop_stall_watch();
        // Receives that have arrived count as delivered, even if NCCL has not tested them.
        for _ in 0..MOST_ROUNDS {
            match self.take_losses(now) {
                Ok(true) => {}
                Ok(false) | Err(NotBorrowed::Broken) => break,
                Err(NotBorrowed::Busy) => return false,
            }
        }
        self.poll_fences(now);
        if self.role == Role::Receiver && self.is_fencing() && now < fences_until {
            return false;
        }
        let delivered = match self.on_path(|path, _| path.delivered()) {
            Ok(delivered) => delivered,
            Err(NotBorrowed::Broken) => 0,
            Err(NotBorrowed::Busy) => return false,
        };
        if !self.recovery.was_up() {
            // NCCL no longer needs the connection, so recovery stops trying its rails.
            self.recovery.fail();
            self.act(now);
        }
        if self.waiting.action.is_some() {
            // Recovery's earlier decisions come before BYE, as before every frame.
            return false;
        }
        self.recovery.close(delivered);
        let at = self.clock(now);
        if !self.recovery.last_frames(at).into_iter().all(send) {
            self.write_to_mailboxes(&self.recovery.frame());
        }
        true
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
                PortChange::Removed => {
                    // Receives granted during the absence carry old keys or none.
                    self.rails[lane.index()].cts_generation = None;
                    self.recovery
                        .rail_down(lane, rail.device.absence_reason(), at)
                }
            }
        }
        self.act(now);
    }

    /// Handles the peer's close of the bootstrap TCP connection. A BYE may have arrived before the
    /// close.
    pub fn tcp_closed_by_peer(&mut self, now: Instant) {
        let at = self.clock(now);
        if self.recovery.recovers() {
            self.tcp
                .lost("bootstrap connection closed by its other end", now);
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
        self.waiting.lost_cqs.push(cq);
        let _ = self.take_losses(now);
    }

    /// Does one round of work. A new control frame goes to `send`, which sends it over TCP, or
    /// returns false if TCP cannot take it. In that case the driver writes the frame into the
    /// peer's mailbox over the rails. Repeated frames always go into the mailbox.
    ///
    /// Polls the data path for arrivals and losses, unless NCCL has used it since the last round:
    /// NCCL's own calls wake the service thread when they find a lost rail. Polls the data path in
    /// any case if `has_news` is true or work is in progress.
    pub fn poll(
        &mut self,
        now: Instant,
        has_news: bool,
        send: &mut dyn FnMut(ControlFrame) -> bool,
    ) {
        // A wake-up that found the data path busy has had no effect yet.
        let was_busy = std::mem::take(&mut self.waiting.was_busy);
        for frame in std::mem::take(&mut self.waiting.frames) {
            self.receive_frame(&frame, now);
        }
        for _ in 0..FRAMES {
            let Some(frame) = self.mailboxes.take_frame() else {
                break;
            };
            self.receive_frame(&frame, now);
            if frame.awaits_confirmation {
                // The frame came over a working rail, so the answer uses the rails too.
                self.write_to_mailboxes(&self.recovery.frame());
            }
        }
        let is_unused = self.path.is_unused();
        if is_unused || has_news || was_busy || self.is_busy() {
            let _ = self.take_losses(now);
        }
        let at = self.clock(now);
        self.poll_devices(at);
        self.watch_progress(is_unused, at, now);
        self.act(now);
        self.poll_fences(now);
        self.poll_attempts(now, at);
        self.act(now);
        self.recovery.tick(at);
        self.act(now);
        self.warn_of_no_rail(at);
        if !self.recovery.recovers() {
            self.outages.ended();
            self.tcp.ended();
        }
        self.show_failure();
        self.end_when_stopped(now);
        if self.waiting.action.is_some() {
            return;
        }
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
        let Some(begun) = self.begun_sends(frame) else {
            return self.waiting.frames.push_back(frame.clone());
        };
        let at = self.clock(now);
        self.recovery.receive_frame(frame, begun, at);
        self.act(now);
    }

    /// Returns the number of sends that have begun. The peer cannot have received more, so recovery
    /// rejects larger claims. Returns `None` while the data path is busy, and while earlier frames
    /// wait.
    fn begun_sends(&mut self, frame: &ControlFrame) -> Option<u64> {
        if !self.waiting.frames.is_empty() {
            return None;
        }
        // A receiver begins no sends.
        if self.role == Role::Receiver {
            return Some(0);
        }
        // A frame that awaits no confirmation has no control message, and so claims nothing.
        if !frame.awaits_confirmation {
            return Some(u64::MAX);
        }
        match self.on_path(|path, _| path.message_range()) {
            Ok((_, next)) => Some(next),
            // The path is not used again, so any claim is harmless.
            Err(NotBorrowed::Broken) => Some(u64::MAX),
            Err(NotBorrowed::Busy) => None,
        }
    }

    fn write_to_mailboxes(&mut self, frame: &ControlFrame) {
        let bytes = self.mailboxes.put_frame(frame);
        let mailboxes = self.mailboxes.clone();
        let up: Vec<_> = self.recovery.rails_up().collect();
        // A frame that is not written now is repeated later.
        let _ = self.on_path(|path, context| {
            for lane in up {
                let write =
                    mailboxes.frame_write(path.rails().lanes[lane.index()].mailbox_keys(), bytes);
                path.post(context, lane, &write);
            }
        });
    }

    /// Processes arrivals and losses on the data path. Starts to stop the lost queue pairs. Returns
    /// true if anything arrived.
    ///
    /// # Errors
    /// The reason why the data path was not borrowed.
    fn take_losses(&mut self, now: Instant) -> Result<bool, NotBorrowed> {
        let lost_cqs = std::mem::take(&mut self.waiting.lost_cqs);
        let found = self.on_path(|path, context| {
            // The status has an error that ends the connection.
            lost_cqs
                .iter()
                .for_each(|cq| _ = path.lose_completions(context, *cq));
            let found = path.poll(context);
            let rails = path.rails();
            (
                found,
                rails.status.take_losses(),
                rails.take_lost(),
                rails.status.failure().cloned(),
            )
        });
        let (found, losses, lost, failure) = match found {
            Ok(found) => found,
            Err(NotBorrowed::Busy) => {
                self.waiting.lost_cqs = lost_cqs;
                return Err(NotBorrowed::Busy);
            }
            Err(NotBorrowed::Broken) => {
                self.give_up(broken());
                self.act(now);
                return Err(NotBorrowed::Broken);
            }
        };
        if let Some(error) = failure {
            self.recovery.fail();
            self.report_failure(&error);
        }
        self.start_fences(lost, now);
        let moved = match found {
            Ok(moved) => moved,
            Err(error) => {
                self.give_up(error);
                false
            }
        };
        let at = self.clock(now);
        for Loss { lane, why } in losses {
            tracing::debug!(
                "lane {lane} of the connection with {} failed: {why}",
                self.context.peer.name
            );
            let why = match self.rails[lane.index()].known_loss() {
                Some(loss) => format!("{loss}: {why}"),
                None => why,
            };
            self.recovery.rail_down(lane, &why, at);
        }
        self.act(now);
        Ok(moved)
    }

    /// Executes recovery's actions in order. If an action needs the data path while it is busy, the
    /// action and all later ones wait for the next round.
    fn act(&mut self, now: Instant) {
        while let Some(action) = self
            .waiting
            .action
            .take()
            .or_else(|| self.recovery.poll_action())
        {
            if self.execute(&action, now) == Err(NotBorrowed::Busy) {
                self.waiting.action = Some(action);
                return;
            }
        }
    }

    /// Executes an action. The error means that the data path was not borrowed, and that the action
    /// had no effect.
    fn execute(&mut self, action: &Action, now: Instant) -> Result<(), NotBorrowed> {
        let at = self.clock(now);
        match action {
            Action::Fence(lane) => self.poll_fence(*lane, now),
            Action::Resend(lane, received) => {
                if let Err(error) =
                    self.on_path(|path, context| path.recover(context, *lane, received))?
                {
                    self.give_up(error);
                }
            }
            Action::OpenQps(lane) => {
                if let Err(cause) = self.open_qps(*lane, now) {
                    self.recovery.opened(*lane, Err(cause), at);
                }
            }
            Action::AnswerQps(lane, rail, end) => {
                if let Err(cause) = self.answer_qps(*lane, rail.clone(), end.clone(), now) {
                    self.recovery.answered(*lane, Err(cause), at);
                }
            }
            Action::ConnectQps(lane, answer) => {
                if self.on_path(|path, _| path.learn_epoch(*lane, answer.epoch))
                    == Err(NotBorrowed::Busy)
                {
                    return Err(NotBorrowed::Busy);
                }
                if let Err(cause) = self.connect_qps(*lane, answer.clone(), now) {
                    self.recovery.connected(*lane, Err(cause), at);
                }
            }
            Action::Activate(lane) => {
                let outcome = self.activate(*lane, now)?;
                self.recovery.activated(*lane, outcome, at);
            }
            Action::DropQps(lane) => return self.drop_qps(*lane, now),
            Action::PeerClosed(delivered) => {
                // Called before `said_bye`, so that NCCL's thread sees the reason first.
                self.ends_without_rail()?;
                self.context.peer.said_bye(*delivered);
            }
            Action::PeerGone => {
                self.ends_without_rail()?;
                self.context.peer.vanished();
            }
            Action::Fail(failure) => self.fail(failure),
            Action::StallQuery(question) => return self.reply_to_stall(question, at, now),
            Action::StallReply(answer) => return self.receive_stall_reply(answer, at),
            Action::Changed(changed) => self.changed(changed, now),
            Action::Log(entry) => self.log(entry),
        }
        Ok(())
    }

    /// Detects devices that were removed, and perhaps have returned, without an event. Detects
    /// addresses that have left the GID table.
    fn poll_devices(&mut self, at: u64) {
        for (lane, managed) in self.lanes().zip(&self.rails) {
            if let Some(why) = managed.known_loss() {
                self.recovery.rail_down(lane, &why, at);
            }
        }
    }

    /// Starts to use a rail's new queue pairs. The outer error means that the data path was not
    /// borrowed, and that nothing has changed.
    fn activate(
        &mut self,
        lane: LaneId,
        now: Instant,
    ) -> Result<std::result::Result<(), Cause>, NotBorrowed> {
        let mut new = self.rails[lane.index()].attempt.take();
        let outcome = self.on_path(|path, context| {
            // A failed data path stops its new queue pairs.
            if path.rails().status.has_failed() {
                return Ok(None);
            }
            let tested = match new.take() {
                Some(Attempt::Testing(test)) => Some(test.lane),
                _ => path.rails().status.take(lane),
            };
            let Some(tested) = tested else {
                return Ok(None);
            };
            let new = (tested.generation(), tested.source());
            path.regain(context, lane, tested)
                .map(|is_used| is_used.then_some(new))
        });
        let managed = &mut self.rails[lane.index()];
        let (generation, source) = match outcome {
            Err(NotBorrowed::Busy) => {
                managed.attempt = new;
                return Err(NotBorrowed::Busy);
            }
            Ok(Ok(Some(new))) => new,
            Ok(Ok(None)) | Err(NotBorrowed::Broken) => return Ok(Err(Cause::ConnectionEnds)),
            Ok(Err(error)) => {
                self.give_up(error);
                return Ok(Err(Cause::ConnectionEnds));
            }
        };
        (managed.generation, managed.source) = (Some(generation), source);
        let [newest, _] = self.recovery.attempts(lane).last_paths();
        if let Some(choice) = newest {
            // On the accepting side, the peer's LIVE has shown that the path works.
            self.process.backoff.carried(managed.path(choice), now);
        }
        Ok(Ok(()))
    }

    /// Borrows the data path.
    ///
    /// # Errors
    /// The reason why the data path was not borrowed.
    fn on_path<T>(
        &mut self,
        work: impl FnOnce(&mut dyn DataPath, &PathContext) -> T,
    ) -> Result<T, NotBorrowed> {
        match self.path.borrow() {
            Ok(mut path) => {
                let done = work(&mut *path, &self.context);
                self.has_repeats = path.has_repeats();
                Ok(done)
            }
            Err(why) => {
                (self.has_repeats, self.waiting.was_busy) = (false, why == NotBorrowed::Busy);
                Err(why)
            }
        }
    }

    fn lanes(&self) -> impl Iterator<Item = LaneId> + use<> {
        LaneId::all(self.rails.len())
    }

    fn clock(&mut self, now: Instant) -> u64 {
        nanos(now.saturating_duration_since(*self.origin.get_or_insert(now)))
    }
}
