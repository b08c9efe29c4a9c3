//! An RDMA device of this host, from its opening to its removal and return, and the port that a
//! rail uses on it.
//!
//! [`Device`] is a state machine. Its caller (`comm::rail::device`) reports events with their time,
//! and executes the [`Step`]s. `H` is the caller's handle of an opened device; the machine only
//! keeps it and hands it out. All connections of the process share the machine of a rail.
//!
//! # Removal
//!
//! Linux removes a device in two steps. First it cuts programs off: verbs return `EIO`, while the
//! NIC may still access memory. Then it destroys the programs' objects, which ends the access. The
//! second step ends when the device's entry leaves `/sys/class/infiniband`
//! (`__ib_unregister_device` in Linux's drivers/infiniband/core/device.c). So only an entry that is
//! missing, or that belongs to a new device, proves that the old device no longer accesses memory.
//! The caller passes the entry's inode with each event that may need this proof.
//!
//! Linux raises `IBV_EVENT_DEVICE_FATAL` shortly before the entry leaves
//! (`uverbs_async_event_destroy_uobj` in uverbs_std_types_async_fd.c). mlx5 raises the same event
//! also when its firmware fails (`MLX5_DEV_EVENT_SYS_ERROR`). A program that reads this event late
//! may find the device cut off but not yet removed. So the machine accepts the event as proof of
//! the removal only for a device that was cut off and had no entry when it was opened, because
//! nothing else shows the removal of such a device.
//!
//! A device whose firmware has failed keeps its entry. For such a device, the kernel returns
//! `ENOLINK`, or reports success for calls that stop or destroy queue pairs, without asking the
//! firmware. Neither proves that the NIC has stopped. The kernel then removes the device, so the
//! machine waits for the removal.
//!
//! # Questions
//!
//! A question is a command to the firmware: a query of the port or a read of the GID table. It may
//! take minutes, for example while the kernel recovers from a PCIe error. A device gets one
//! question at a time. After [`PATIENCE`] without an answer, the device is stuck. Until it answers,
//! it gets no further question, no new queue pair and no new registration.
//!
//! An event of the port may be out of date when it is read, so it decides nothing by itself: a port
//! query that was asked after the event settles it.
//!
//! # Addresses
//!
//! When an interface loses an address, the kernel clears the NIC's entry of the GID table under
//! live queue pairs (`del_gid` in Linux's drivers/infiniband/core/cache.c), and their packets get
//! no answers. The address may return at another index, because a queue pair holds the old entry.
//! So an answer about the port contains its addresses with their indices. A queue pair whose
//! address has left its index is lost ([`Device::has_gid`]). The machine gets each table that was
//! read, in order. So it compares a queue pair with no table older than the one from which the
//! queue pair got its index.
//!
//! # Return
//!
//! A device that returns is a new device with the same name and other keys. Each opening of the
//! device has a number, the device generation. A queue pair or key of an earlier generation belongs
//! to a removed device, even if the new device is present. The caller opens the device and
//! registers all memory in use with it; only then is the device [`Presence::Here`] for new queue
//! pairs.
//!
//! # Devices without memory
//!
//! The device of a late rail is opened when the process starts, but the rail may never get a link.
//! So the device stays idle, without memory, until a connection finds the rail usable
//! ([`Device::use_soon`]). The caller then registers all memory, as for a device that returns. A
//! device that answered again and then refused memory becomes idle too. Otherwise each later
//! registration would fail.

use crate::time::Instant;
use std::time::Duration;

/// Time after which a call into a device counts as hanging. Firmware takes milliseconds, but a busy
/// host may run a thread late.
pub const PATIENCE: Duration = Duration::from_secs(3);

/// Interval between searches for a removed device that has returned.
const SEARCH_EVERY: Duration = Duration::from_millis(500);
/// Largest number of doublings of [`SEARCH_EVERY`] (to 32 s). Each failure to use a returned device
/// doubles the interval, because an attempt registers all memory.
const MAX_DOUBLINGS: u32 = 6;
/// Interval between questions to a present device. Not shorter, because each question is a command
/// to the device's firmware.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// The device and port of a rail.
#[derive(Debug)]
pub struct Device<H> {
    state: State<H>,
    /// Number of kernel errors that report the device as removed or failed.
    removal_errors: u64,
    /// The question that has no answer yet.
    question: Option<Question>,
    /// Time of the last question about the port.
    port_asked_at: Option<Instant>,
    search: Search,
    port: Port,
    /// False for the device of a late rail until it has been in use.
    was_used: bool,
}

/// State of the device. Every variant except `Gone` keeps the handle: the device stays open until
/// its last event was read.
#[derive(Debug, Clone)]
enum State<H> {
    Here(Opening<H>),
    /// A question had no answer for [`PATIENCE`]. The device may still access memory.
    Stuck(Opening<H>),
    /// The device answers again, but lacks registrations made in the meantime.
    Resuming(Opening<H>),
    /// The device lacks registrations: it was never used, or has refused some. It gets them if it
    /// is wanted.
    Idle {
        it: Opening<H>,
        is_wanted: bool,
    },
    /// The firmware has failed, and the kernel answers in its place.
    Failed(Opening<H>),
    /// The kernel has cut programs off.
    CutOff(Opening<H>),
    /// Removed. Holds the generation of the removed device.
    Gone(u32),
    /// Opened again; its memory is being registered.
    Returning(Opening<H>),
}

#[derive(Debug, Clone)]
struct Opening<H> {
    handle: H,
    generation: u32,
    /// Inode of the device's entry in sysfs, if it had one.
    entry: Option<u64>,
}

/// Searches for a returned device.
#[derive(Debug, Default)]
struct Search {
    last: Option<Instant>,
    /// Number of consecutive failures to bring a device back into use.
    failures: u32,
    attempt: Attempt,
}

/// Attempt to bring the device back into use.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Attempt {
    #[default]
    None,
    UnderWay,
    /// Under way, but the device has since fallen silent, failed or refused memory. It may lack
    /// newer registrations.
    Stale,
}

/// The port, as far as its connections know it.
#[derive(Debug, Default)]
struct Port {
    /// False once the connections know that the device is away.
    was_there: bool,
    /// Events since the last query of the port.
    events: PortEvents,
    /// Events that the query under way will settle.
    asked: Option<PortEvents>,
    /// Changes that no [`Device::poll`] has returned yet, `came_up` before `went_down`.
    came_up: bool,
    went_down: bool,
    /// The port's addresses by the last read of the GID table. `None` before the first read.
    gids: Option<Vec<SourceGid>>,
}

#[derive(Debug, Clone, Copy, Default)]
struct PortEvents {
    port_error: bool,
    device_fatal: bool,
}

/// A question that the device has not answered yet, with the state of the device when it was asked.
#[derive(Debug, Clone, Copy)]
struct Question {
    asked_at: Instant,
    generation: u32,
    removal_errors: u64,
}

/// A source address of queue pairs: a RoCE v2 entry of a port's GID table. The entry of the same
/// address for RoCE v1 has another index, and does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourceGid {
    /// The address.
    pub gid: [u8; 16],
    /// Index in the GID table.
    pub gid_index: u16,
}

/// State of a port, as the device answers it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortAnswer {
    /// True if the port is active.
    pub is_active: bool,
    /// All addresses of the port.
    pub gids: Vec<SourceGid>,
}

/// Presence of a device on the bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// The device is on the bus, according to its last answer.
    Here,
    /// The device itself does not answer. It may still access memory.
    CutOff,
    /// The device no longer accesses memory.
    Gone,
}

/// Reason why a device cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Absence {
    /// The device does not answer.
    Silent,
    /// The device was removed, was cut off, or has failed.
    Removed,
    /// The device is there, without memory.
    Idle,
}

/// Kernel error that concerns the whole device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceError {
    /// The kernel has cut programs off (`EIO`).
    CutOff,
    /// The firmware has failed (`ENOLINK`).
    Failed,
}

/// Asynchronous event of the device or its port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// `IBV_EVENT_PORT_ACTIVE`.
    PortActive,
    /// `IBV_EVENT_GID_CHANGE`.
    GidChange,
    /// `IBV_EVENT_PORT_ERR`.
    PortError,
    /// `IBV_EVENT_DEVICE_FATAL`.
    DeviceFatal,
}

/// Change of a rail's port, for the connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortChange {
    /// The port came up or has a new address, or its device is back in use.
    Up,
    /// The port went down.
    Down,
    /// The port's device is no longer on the bus, or does not answer.
    Removed,
}

/// The next thing for the caller to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step<H> {
    /// Warn that the device has not answered for this time.
    WarnStuck(Duration),
    /// Tell the connections.
    Tell(PortChange),
    /// Query the port and its GID table, on a thread that then calls [`Device::answered`] and
    /// [`Device::port_answered`].
    AskPort(H),
    /// Bring the device back into use, on a thread that then calls [`Device::end_return`].
    Return(Return),
}

/// A way to bring the device back into use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Return {
    /// Open the device that now has this name, if there is one, call [`Device::reopened`], and
    /// register all memory.
    Reopen,
    /// Register all memory with the device, which answers again or has refused it before.
    Resume,
    /// Register all memory with the device, which was never used.
    FirstUse,
}

/// Result of an attempt to bring the device back into use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Returned {
    /// There is no device of this name, it could not be opened, or it stays idle.
    NotFound,
    /// Memory could not be registered.
    NotRegistered,
    /// All memory is registered.
    Registered,
}

impl<H: Clone> Device<H> {
    /// Returns the machine of a device that was opened. `entry` is the inode of its entry in sysfs,
    /// if it has one.
    pub fn new(handle: H, entry: Option<u64>) -> Self {
        Self {
            state: State::Here(Opening {
                handle,
                generation: 0,
                entry,
            }),
            removal_errors: 0,
            question: None,
            port_asked_at: None,
            search: Search::default(),
            port: Port {
                was_there: true,
                ..Port::default()
            },
            was_used: true,
        }
    }

    /// Keeps a device that was just opened without memory until [`Device::use_soon`].
    pub fn keep_idle(&mut self) {
        if let State::Here(it) = &self.state {
            self.state = State::idle(it.clone());
            self.was_used = false;
        }
    }

    /// Lets the next [`Device::poll`] bring an idle device into use. Returns false for other
    /// devices.
    pub fn use_soon(&mut self) -> bool {
        let State::Idle { is_wanted, .. } = &mut self.state else {
            return false;
        };
        *is_wanted = true;
        true
    }

    /// Reports that memory could not be registered with a device that is not in use. An attempt
    /// under way does not bring it into use, because it may not know this memory.
    pub fn registration_failed(&mut self) {
        self.search.interrupt();
    }

    /// Returns the handle and the device generation for new queue pairs.
    ///
    /// # Errors
    /// The reason why the device is not in use.
    pub fn opened(&self) -> Result<(H, u32), Absence> {
        match &self.state {
            State::Here(it) => Ok((it.handle.clone(), it.generation)),
            _ => Err(self.absence()),
        }
    }

    /// Returns the reason why the device cannot be used, if it cannot.
    pub fn absence(&self) -> Absence {
        match &self.state {
            State::Stuck(_) | State::Resuming(_) => Absence::Silent,
            State::Idle { .. } => Absence::Idle,
            _ => Absence::Removed,
        }
    }

    /// Like [`Device::opened`], also for a device that has returned, answers again, or is idle with
    /// an attempt under way. Memory is registered with such a device before its use.
    pub fn for_memory(&self) -> Option<(H, u32)> {
        match &self.state {
            State::Here(it) | State::Resuming(it) | State::Returning(it) => {
                Some((it.handle.clone(), it.generation))
            }
            State::Idle { it, is_wanted } => {
                let has_attempt = *is_wanted && self.search.attempt == Attempt::UnderWay;
                has_attempt.then(|| (it.handle.clone(), it.generation))
            }
            State::Stuck(_) | State::Failed(_) | State::CutOff(_) | State::Gone(_) => None,
        }
    }

    /// Returns the handle as a source of events, or `None` once the device is removed.
    pub fn source_of_events(&self) -> Option<H> {
        self.in_place().map(|it| it.handle.clone())
    }

    /// Returns the presence according to the last answer.
    pub fn presence(&self) -> Presence {
        match &self.state {
            State::Here(_) | State::Resuming(_) | State::Idle { .. } => Presence::Here,
            State::Stuck(_) | State::Failed(_) | State::CutOff(_) => Presence::CutOff,
            State::Gone(_) | State::Returning(_) => Presence::Gone,
        }
    }

    /// Returns the presence of one device generation. An earlier generation is always gone.
    pub fn presence_of(&self, generation: u32) -> Presence {
        if self.generation() == generation {
            self.presence()
        } else {
            Presence::Gone
        }
    }

    /// Returns true if the device has not answered for [`PATIENCE`].
    pub fn is_stuck(&self) -> bool {
        matches!(self.state, State::Stuck(_))
    }

    /// Returns true while a present device has not answered a query of its port: the answer should
    /// arrive soon.
    pub fn is_asked(&self) -> bool {
        self.port.asked.is_some() && self.port.was_there
    }

    /// Returns the time of the question that has no answer yet.
    pub fn asked_at(&self) -> Option<Instant> {
        self.question.map(|question| question.asked_at)
    }

    /// Reports that a call on an object of the device generation `generation` returned `error`.
    pub fn call_failed(&mut self, error: DeviceError, generation: u32) {
        self.removal_errors += 1;
        if self.generation() != generation {
            return;
        }
        let next = match (&self.state, error) {
            (
                State::Here(it) | State::Stuck(it) | State::Resuming(it) | State::Idle { it, .. },
                DeviceError::Failed,
            ) => State::Failed(it.clone()),
            (
                State::Here(it)
                | State::Stuck(it)
                | State::Resuming(it)
                | State::Idle { it, .. }
                | State::Failed(it),
                DeviceError::CutOff,
            ) => State::CutOff(it.clone()),
            // No peer knows the device's keys yet, so nothing can access memory through it.
            (State::Returning(it), _) => State::Gone(it.generation),
            _ => return,
        };
        self.search.interrupt();
        self.state = next;
    }

    /// Forgets the port's events and changes, because its earlier connections have ended.
    pub fn watch_anew(&mut self) {
        self.port = Port {
            was_there: self.presence() == Presence::Here,
            ..Port::default()
        };
    }

    /// Reports an asynchronous event.
    pub fn event(&mut self, event: Event) {
        match event {
            Event::PortActive => self.port.came_up = true,
            Event::GidChange => self.ask_soon(),
            Event::PortError => self.port.events.port_error = true,
            Event::DeviceFatal => {
                self.port.events.device_fatal = true;
                if let State::CutOff(it) = &self.state
                    && it.entry.is_none()
                {
                    self.state = State::Gone(it.generation);
                }
            }
        }
    }

    /// Begins a question. Returns the handle to ask. `None` for a removed device, and while another
    /// question has no answer.
    pub fn ask(&mut self, now: Instant) -> Option<H> {
        if self.question.is_some() {
            return None;
        }
        let it = self.in_place()?;
        let question = Question {
            asked_at: now,
            generation: it.generation,
            removal_errors: self.removal_errors,
        };
        let handle = it.handle.clone();
        self.question = Some(question);
        Some(handle)
    }

    /// Reports the end of the question. `outcome` is `Ok` if the device answered, and otherwise has
    /// the error if it concerns the whole device. `entry` is the present inode of the device's
    /// entry in sysfs.
    pub fn answered(&mut self, outcome: Result<(), Option<DeviceError>>, entry: Option<u64>) {
        let Some(question) = self.question.take() else {
            return;
        };
        if let Err(Some(error)) = outcome {
            self.call_failed(error, question.generation);
        }
        let next = match &self.state {
            // The entry is missing, or belongs to a new device of the same name.
            State::CutOff(it) if it.entry.is_some() && it.entry != entry => {
                State::Gone(it.generation)
            }
            // A device that has really failed or was cut off never answers. So an answer shows that
            // the error before the question concerned only one command. An error after the question
            // was asked may have come after the answer, so then the answer shows nothing.
            State::Stuck(it) | State::Failed(it) | State::CutOff(it)
                if outcome.is_ok()
                    && it.generation == question.generation
                    && self.removal_errors == question.removal_errors =>
            {
                if self.was_used {
                    State::Resuming(it.clone())
                } else {
                    State::idle(it.clone())
                }
            }
            _ => return,
        };
        self.state = next;
    }

    /// Reports the answer to [`Step::AskPort`]; `None` if the device refused the query.
    pub fn port_answered(&mut self, answer: Option<PortAnswer>) {
        let is_active = answer.as_ref().map(|answer| answer.is_active);
        if let Some(events) = self.port.asked.take() {
            self.port.went_down |= events.show_loss(is_active);
        }
        if let Some(answer) = answer {
            self.gids_read(answer.gids);
        }
    }

    /// Reports the port's addresses, which the answer to any question contained.
    pub fn gids_read(&mut self, gids: Vec<SourceGid>) {
        if let Some(known) = &self.port.gids {
            self.port.came_up |= gids.iter().any(|gid| !known.contains(gid));
        }
        self.port.gids = Some(gids);
    }

    /// Returns true unless the last read of the GID table shows that the port no longer has this
    /// address at this index.
    pub fn has_gid(&self, gid: &SourceGid) -> bool {
        let known = self.port.gids.as_ref();
        known.is_none_or(|known| known.contains(gid))
    }

    /// Lets the next [`Device::poll`] query the port.
    pub fn ask_soon(&mut self) {
        self.port_asked_at = None;
    }

    /// Marks the device as stuck if its question has had no answer for [`PATIENCE`]. Returns the
    /// time without an answer if the device has become stuck now and was used before.
    pub fn check_patience(&mut self, now: Instant) -> Option<Duration> {
        let waited = now.saturating_duration_since(self.asked_at()?);
        let (State::Here(it) | State::Resuming(it) | State::Idle { it, .. }) = &self.state else {
            return None;
        };
        if waited < PATIENCE {
            return None;
        }
        self.search.interrupt();
        self.state = State::Stuck(it.clone());
        self.was_used.then_some(waited)
    }

    /// Returns the next step, if any. `entry` is the present inode of the device's entry in sysfs.
    /// The caller repeats the call until it returns `None`.
    pub fn poll(&mut self, entry: Option<u64>, now: Instant) -> Option<Step<H>> {
        if let Some(waited) = self.check_patience(now) {
            return Some(Step::WarnStuck(waited));
        }
        let is_there = self.presence() == Presence::Here;
        // An event of a device that was removed meanwhile shows nothing.
        if std::mem::take(&mut self.port.came_up) && is_there {
            return Some(Step::Tell(PortChange::Up));
        }
        let went = !is_there && (self.port.was_there || self.port.events.device_fatal);
        self.port.was_there = is_there;
        if went {
            self.port.events = PortEvents::default();
            self.port.went_down = false;
            return Some(Step::Tell(PortChange::Removed));
        }
        if std::mem::take(&mut self.port.went_down) {
            return Some(Step::Tell(PortChange::Down));
        }
        // One query in a round: a device that was cut off is always due, and may answer
        // immediately.
        if self.port.asked.is_none()
            && self.port_asked_at != Some(now)
            && (self.port.events.any() || self.is_question_due(entry, now))
            && let Some(handle) = self.ask(now)
        {
            self.port_asked_at = Some(now);
            self.port.asked = Some(std::mem::take(&mut self.port.events));
            return Some(Step::AskPort(handle));
        }
        self.begin_return(now).map(Step::Return)
    }

    /// Begins to bring the device into use, if that is due: it was removed, answers again, or is
    /// idle and wanted; no other attempt is under way; and the pause after the last one is over.
    /// The caller then calls [`Device::end_return`].
    pub fn begin_return(&mut self, now: Instant) -> Option<Return> {
        let how = match &self.state {
            State::Gone(_) => Return::Reopen,
            State::Resuming(_) => Return::Resume,
            State::Idle {
                is_wanted: true, ..
            } if self.was_used => Return::Resume,
            State::Idle {
                is_wanted: true, ..
            } => Return::FirstUse,
            _ => return None,
        };
        // A device that answers again is used without a pause, unless the last attempt failed.
        let needs_pause = how == Return::Reopen || self.search.failures > 0;
        let pause = SEARCH_EVERY * (1 << self.search.failures.min(MAX_DOUBLINGS));
        let is_early = self
            .search
            .last
            .is_some_and(|last| now.saturating_duration_since(last) < pause);
        if self.search.attempt != Attempt::None || needs_pause && is_early {
            return None;
        }
        self.search.last = Some(now);
        self.search.attempt = Attempt::UnderWay;
        Some(how)
    }

    /// Reports that the device of this name was opened again.
    pub fn reopened(&mut self, handle: H, entry: Option<u64>) {
        if let State::Gone(last) = self.state {
            let it = Opening {
                handle,
                generation: last + 1,
                entry,
            };
            self.state = if self.was_used {
                State::Returning(it)
            } else {
                State::idle(it)
            };
        }
    }

    /// Reports the result of an attempt that [`Device::begin_return`] began. Returns true if the
    /// device is back in use.
    pub fn end_return(&mut self, returned: Returned) -> bool {
        let is_stale = std::mem::take(&mut self.search.attempt) != Attempt::UnderWay;
        match (&self.state, returned) {
            (
                State::Returning(it)
                | State::Resuming(it)
                | State::Idle {
                    it,
                    is_wanted: true,
                },
                Returned::Registered,
            ) if !is_stale => {
                self.search.failures = 0;
                self.port.came_up = true;
                self.was_used = true;
                self.state = State::Here(it.clone());
                return true;
            }
            (State::Returning(it), Returned::Registered | Returned::NotRegistered) => {
                self.search.failures += 1;
                self.state = State::Gone(it.generation);
            }
            (
                State::Resuming(it)
                | State::Idle {
                    it,
                    is_wanted: true,
                },
                Returned::NotRegistered,
            ) => {
                self.search.failures += 1;
                self.state = State::Idle {
                    it: it.clone(),
                    is_wanted: true,
                };
            }
            _ => {}
        }
        false
    }

    /// Returns true if the port should be queried although there was no event: once a second, or
    /// immediately if the entry changed or the device has failed or was cut off.
    fn is_question_due(&self, entry: Option<u64>, now: Instant) -> bool {
        let is_as_before = match &self.state {
            State::Here(it) | State::Resuming(it) | State::Idle { it, .. } => it.entry == entry,
            State::Stuck(_) => true,
            State::Gone(_) | State::Returning(_) => return false,
            State::Failed(_) | State::CutOff(_) => false,
        };
        !is_as_before
            || self
                .port_asked_at
                .is_none_or(|last| now.saturating_duration_since(last) >= ASK_EVERY)
    }

    /// Returns the opening of a device that was not removed.
    fn in_place(&self) -> Option<&Opening<H>> {
        match &self.state {
            State::Here(it)
            | State::Stuck(it)
            | State::Resuming(it)
            | State::Idle { it, .. }
            | State::Failed(it)
            | State::CutOff(it) => Some(it),
            State::Gone(_) | State::Returning(_) => None,
        }
    }

    fn generation(&self) -> u32 {
        match &self.state {
            State::Gone(last) => *last,
            State::Here(it)
            | State::Stuck(it)
            | State::Resuming(it)
            | State::Idle { it, .. }
            | State::Failed(it)
            | State::CutOff(it)
            | State::Returning(it) => it.generation,
        }
    }
}

impl<H> State<H> {
    /// Returns the state of a device that is not wanted yet.
    fn idle(it: Opening<H>) -> Self {
        let is_wanted = false;
        Self::Idle { it, is_wanted }
    }
}

impl Search {
    /// Marks an attempt under way as stale.
    fn interrupt(&mut self) {
        if self.attempt == Attempt::UnderWay {
            self.attempt = Attempt::Stale;
        }
    }
}

impl PortEvents {
    fn any(self) -> bool {
        self.port_error || self.device_fatal
    }

    /// Returns true if the events, and a query that was sent after them, show that the rail is
    /// lost. After a refused query (`None`), the events alone decide.
    fn show_loss(self, is_active: Option<bool>) -> bool {
        // A device whose firmware has failed has lost its queue pairs, even if it works again.
        self.device_fatal || is_active.map_or(self.port_error, |is_active| !is_active)
    }
}

#[cfg(test)]
mod tests;
