//! The device of a rail, and its states: present, stuck, failed, cut off, gone, or on its way back
//! into use.
//!
//! # Removal
//!
//! Linux removes a device in two steps. First it cuts programs off: verbs return `EIO`, while the
//! NIC may still access memory. Then it destroys the programs' objects, which ends the access. The
//! second step ends when the device's entry leaves `/sys/class/infiniband`
//! (`__ib_unregister_device` in Linux's drivers/infiniband/core/device.c). So only an entry that is
//! missing, or that belongs to a new device, proves that the old device no longer accesses memory.
//!
//! Linux raises `IBV_EVENT_DEVICE_FATAL` shortly before the entry leaves
//! (`uverbs_async_event_destroy_uobj` in uverbs_std_types_async_fd.c). mlx5 raises the same event
//! also when its firmware fails (`MLX5_DEV_EVENT_SYS_ERROR`). A program that reads this event late
//! may find the device cut off but not yet removed. So the plugin accepts the event as proof of the
//! removal only for a device that was cut off and had no entry when it was opened, because nothing
//! else shows the removal of such a device.
//!
//! A device whose firmware has failed keeps its entry. For such a device, the kernel returns
//! `ENOLINK`, or reports success for calls that stop or destroy queue pairs, without asking the
//! firmware. Neither proves that the NIC has stopped. The kernel then removes the device, so the
//! plugin waits for the removal.
//!
//! # Questions
//!
//! A question is a port query or a read of the GID table. It is a command to the firmware, and may
//! take minutes, for example while the kernel recovers from a PCIe error. So each question runs on
//! its own thread, `spark-device`, and a device gets one question at a time. After 3 s without an
//! answer, the device is stuck, and a WARN names it. Until the device answers, it gets no further
//! question, no new queue pair and no new registration. Its rails count as lost, and its queue
//! pairs are set aside, as for a device that was cut off.
//!
//! [`RailDevice::ask`] does not wait: the service thread reads the answer in a later round.
//! [`RailDevice::query`] waits up to 3 s for the answer. If an earlier question has no answer yet,
//! it first waits for that answer, until 3 s after the earlier question was asked. So it does not
//! wait for a stuck device.
//!
//! # Calls of attempts
//!
//! An attempt to reconnect a rail creates and connects queue pairs on its own thread. These calls
//! may hang too, even while the device answers questions. The attempt is then given up. Until the
//! hanging call returns, [`DeviceCalls::begin`] refuses all further calls on this device, from
//! the attempts of every connection.
//!
//! # Destruction
//!
//! The calls that destroy queue pairs may hang as well. A thread of the device makes them
//! ([`DeviceCalls::discard`]). If one hangs, `begin` refuses further calls of attempts.
//!
//! # Memory
//!
//! NCCL's calls that register and deregister memory wait for the device: after `deregMr` the caller
//! may reuse the memory. If a call takes 3 s, a WARN names the device
//! ([`DeviceCalls::begin_slow`]).
//!
//! # Return
//!
//! A device that returns is a new device with the same name and other keys.
//! [`RailDevice::look_for_return`] opens it and registers all memory in use with it
//! ([`Registrations::renew`](super::registration::Registrations::renew)). Only then does
//! [`RailDevice::opened`] return it, so that lanes can be created on it. `look_for_return` may miss
//! memory that another thread is registering at the same time. So a registration checks for
//! returned devices again at its end.
//!
//! Each opening of the device has a number, the device generation. A queue pair or key of an
//! earlier opening belongs to a removed device, even if the new device is present.

use super::calls::{DeviceCalls, PATIENCE};
use crate::clock;
use crate::comm::threads::{self, lock};
use host::error::{Error, Missing, Result};
use host::port::PortInfo;
use proto::time::Instant;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use verbs::{Context, Library, Pd};

/// The device of a rail. The fast path does not use it: its methods lock, and some call the kernel.
pub struct RailDevice {
    name: String,
    /// The device's entry in sysfs.
    entry: PathBuf,
    library: &'static Library,
    state: Mutex<DeviceState>,
    /// Number of kernel errors that report the device as removed or failed.
    removal_errors: AtomicU64,
    questions: Questions,
    /// Calls into the device that may hang.
    pub calls: Arc<DeviceCalls>,
    /// Time of the service thread's last question.
    asked: Mutex<Option<Instant>>,
    /// Time of the last search for a returned device, and number of consecutive failures to bring
    /// a device back into use.
    looked_for: Mutex<(Option<Instant>, u32)>,
}

enum DeviceState {
    Here(Opening),
    /// A question had no answer for [`PATIENCE`]. The device may still access memory.
    Stuck(Opening),
    /// The device answers again, but lacks registrations made in the meantime.
    Resuming(Opening),
    /// The firmware has failed, and the kernel answers in its place.
    Failed(Opening),
    /// The kernel has cut programs off. The device stays open, so that its last event can be read.
    CutOff(Opening),
    /// Removed. Holds the generation of the removed device.
    Gone(u32),
    /// Opened again. Memory is being registered with it.
    Returning(Opening),
}

#[derive(Clone)]
struct Opening {
    pd: Arc<Pd>,
    generation: u32,
    /// Inode of the device's entry in sysfs, if it had one.
    entry: Option<u64>,
}

/// State of the device when a question was asked.
#[derive(Clone, Copy)]
struct DeviceQuery {
    generation: u32,
    removal_errors: u64,
}

/// Presence of a device on the bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DevicePresence {
    /// The device is on the bus, according to its last answer.
    Here,
    /// The device itself does not answer. It may still access memory.
    CutOff,
    /// The device no longer accesses memory.
    Gone,
}

/// Interval between searches for a removed device that has returned.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Largest number of doublings of [`LOOK_EVERY`] (to 32 s). Each failure to use a returned device
/// doubles the interval, because an attempt registers all memory.
const DOUBLED_AT_MOST: u32 = 6;
/// Interval between questions to a present device. Not shorter, because each question is a command
/// to the device's firmware.
const ASK_EVERY: Duration = Duration::from_secs(1);

impl RailDevice {
    /// Wraps an opened device. `entry` is the path of its entry in sysfs, which need not exist.
    pub fn new(pd: Arc<Pd>, entry: PathBuf) -> Self {
        let name = pd.context().name().to_owned();
        let library = pd.context().library();
        let calls = DeviceCalls::new(&name);
        let (removal_errors, questions, asked, looked_for) = Default::default();
        let opening = Opening {
            pd,
            generation: 0,
            entry: inode(&entry),
        };
        let state = Mutex::new(DeviceState::Here(opening));
        Self {
            name,
            entry,
            library,
            state,
            removal_errors,
            questions,
            calls,
            asked,
            looked_for,
        }
    }

    /// Returns the protection domain.
    pub fn pd(&self) -> Result<Arc<Pd>> {
        self.opened().map(|(pd, _)| pd)
    }

    /// Returns the protection domain and the device generation.
    ///
    /// # Errors
    /// [`Error::Missing`] while the device is not in use: it was removed, has failed, or is silent.
    pub fn opened(&self) -> Result<(Arc<Pd>, u32)> {
        if let DeviceState::Here(Opening { pd, generation, .. }) = &*self.lock() {
            return Ok((Arc::clone(pd), *generation));
        }
        Err(self.missing())
    }

    /// Returns the reason why the device cannot be used.
    pub fn absence_reason(&self) -> &'static str {
        match &*self.lock() {
            DeviceState::Stuck(_) | DeviceState::Resuming(_) => "its device does not answer",
            _ => "its device was removed",
        }
    }

    fn missing(&self) -> Error {
        let missing = match &*self.lock() {
            DeviceState::Stuck(_) | DeviceState::Resuming(_) => Missing::Silent,
            _ => Missing::Removed,
        };
        missing(self.name.clone()).into()
    }

    /// Returns the same as [`RailDevice::opened`], but also for a device that has returned or
    /// answers again and is not in use yet. Memory is registered with such a device before its use.
    pub fn for_memory(&self) -> Option<(Arc<Pd>, u32)> {
        match &*self.lock() {
            DeviceState::Here(it) | DeviceState::Resuming(it) | DeviceState::Returning(it) => {
                Some((Arc::clone(&it.pd), it.generation))
            }
            DeviceState::Stuck(_)
            | DeviceState::Failed(_)
            | DeviceState::CutOff(_)
            | DeviceState::Gone(_) => None,
        }
    }

    /// Returns the protection domain as a source of events, or `None` once the device is removed.
    pub fn source_of_events(&self) -> Option<Arc<Pd>> {
        match &*self.lock() {
            DeviceState::Gone(_) | DeviceState::Returning(_) => None,
            DeviceState::Here(it)
            | DeviceState::Stuck(it)
            | DeviceState::Resuming(it)
            | DeviceState::Failed(it)
            | DeviceState::CutOff(it) => Some(Arc::clone(&it.pd)),
        }
    }

    /// Returns the presence according to the last answer, without a new question.
    pub fn presence(&self) -> DevicePresence {
        self.lock().presence()
    }

    /// Returns the presence of one device generation. A generation is gone if there is a later one.
    pub fn presence_of(&self, generation: u32) -> DevicePresence {
        let state = self.lock();
        if state.generation() == generation {
            state.presence()
        } else {
            DevicePresence::Gone
        }
    }

    /// Returns true if the device has not answered for [`PATIENCE`].
    pub fn is_stuck(&self) -> bool {
        matches!(&*self.lock(), DeviceState::Stuck(_))
    }

    /// Records the error of a call on a queue pair or other object that belongs to the device
    /// generation `generation`. Returns true if the error means that the device has failed, was cut
    /// off or is removed.
    pub fn record_error(&self, error: &Error, generation: u32) -> bool {
        if !error.is_removal() && !error.is_failed_device() {
            return false;
        }
        let mut state = self.lock();
        self.removal_errors.fetch_add(1, Ordering::Relaxed);
        match &*state {
            _ if state.generation() != generation => {}
            DeviceState::Here(it) | DeviceState::Stuck(it) | DeviceState::Resuming(it)
                if error.is_failed_device() =>
            {
                *state = DeviceState::Failed(it.clone());
            }
            DeviceState::Here(it)
            | DeviceState::Stuck(it)
            | DeviceState::Resuming(it)
            | DeviceState::Failed(it)
                if error.is_removal() =>
            {
                *state = DeviceState::CutOff(it.clone());
            }
            // No peer knows the device's keys yet, so nothing can access memory through it.
            DeviceState::Returning(opening) => *state = DeviceState::Gone(opening.generation),
            _ => {}
        }
        true
    }

    /// Returns true if the service thread should question the device: once a second, or immediately
    /// if its sysfs entry changed or the device has failed or was cut off.
    pub fn is_due(&self, now: Instant) -> bool {
        let is_as_before = match &*self.lock() {
            DeviceState::Here(Opening { entry, .. })
            | DeviceState::Resuming(Opening { entry, .. }) => *entry == inode(&self.entry),
            DeviceState::Stuck(_) => true,
            DeviceState::Gone(_) | DeviceState::Returning(_) => return false,
            DeviceState::Failed(_) | DeviceState::CutOff(_) => false,
        };
        let asked = lock(&self.asked);
        !is_as_before || asked.is_none_or(|last| now.saturating_duration_since(last) >= ASK_EVERY)
    }

    /// Lets the service thread question the device in its next round.
    pub fn ask_soon(&self) {
        *lock(&self.asked) = None;
    }

    fn asked(&self, now: Instant) {
        *lock(&self.asked) = Some(now);
    }

    /// Queries a port as [`Self::query`] does, and returns the resulting presence.
    pub fn query_presence(self: &Arc<Self>, port: u8) -> DevicePresence {
        // Only the change of state is of interest.
        drop(self.query(move |context| context.port(port)));
        self.presence()
    }

    /// Returns the protection domain to use for a question, and a note of the device's present
    /// state. `None` for a removed device.
    fn to_be_asked(&self) -> Option<(Arc<Pd>, DeviceQuery)> {
        match &*self.lock() {
            DeviceState::Here(it)
            | DeviceState::Stuck(it)
            | DeviceState::Resuming(it)
            | DeviceState::Failed(it)
            | DeviceState::CutOff(it) => {
                // Relaxed: the counter is changed and read only under the lock of the state.
                let removal_errors = self.removal_errors.load(Ordering::Relaxed);
                Some((
                    Arc::clone(&it.pd),
                    DeviceQuery {
                        generation: it.generation,
                        removal_errors,
                    },
                ))
            }
            DeviceState::Gone(_) | DeviceState::Returning(_) => None,
        }
    }

    /// Processes the answer to a question; `error` is `None` for success.
    fn conclude(&self, error: Option<&Error>, asked: DeviceQuery) {
        if let Some(error) = error {
            self.record_error(error, asked.generation);
        }
        let mut state = self.lock();
        match &*state {
            // The entry is missing, or belongs to a new device of the same name.
            DeviceState::CutOff(Opening {
                generation,
                entry: Some(entry),
                ..
            }) if inode(&self.entry) != Some(*entry) => {
                *state = DeviceState::Gone(*generation);
            }
            // A device that has really failed or was cut off never answers. So an answer shows that
            // the error before the question concerned only one command. An error after the question
            // was asked may have come after the answer, so then the answer shows nothing.
            DeviceState::Stuck(it) | DeviceState::Failed(it) | DeviceState::CutOff(it)
                if error.is_none()
                    && it.generation == asked.generation
                    && self.removal_errors.load(Ordering::Relaxed) == asked.removal_errors =>
            {
                *state = DeviceState::Resuming(it.clone());
            }
            _ => {}
        }
    }

    /// Processes an `IBV_EVENT_DEVICE_FATAL` of the device.
    pub fn fatal(&self) {
        let mut state = self.lock();
        // For a device without an entry in sysfs, this event is the only proof of the removal.
        if let DeviceState::CutOff(Opening {
            generation,
            entry: None,
            ..
        }) = *state
        {
            *state = DeviceState::Gone(generation);
        }
    }

    /// Returns true if [`RailDevice::look_for_return`] would do something now.
    pub fn is_return_due(&self, now: Instant) -> bool {
        let is_gone = match &*self.lock() {
            DeviceState::Gone(_) => true,
            DeviceState::Resuming(_) => false,
            _ => return false,
        };
        // Locked while another thread is in `look_for_return`.
        self.looked_for
            .try_lock()
            .is_ok_and(|looked_for| is_time(*looked_for, is_gone, now))
    }

    /// Opens a new device of the same name if this one was removed, or resumes this one if it
    /// answers again. Does nothing if the last attempt was too recent. `register` registers memory
    /// with the device before its use. Returns true if the device is back.
    pub fn look_for_return(
        &self,
        now: Instant,
        register: impl FnOnce() -> Result<()>,
    ) -> Result<bool> {
        // Locked to the end, so that only one thread opens the device.
        let Ok(mut looked_for) = self.looked_for.try_lock() else {
            return Ok(false);
        };
        let (resuming, last) = match &*self.lock() {
            DeviceState::Gone(last) => (None, *last),
            DeviceState::Resuming(it) => (Some(it.clone()), it.generation),
            _ => return Ok(false),
        };
        if !is_time(*looked_for, resuming.is_none(), now) {
            return Ok(false);
        }
        let failures = looked_for.1;
        *looked_for = (Some(now), failures);
        let opening = match resuming {
            Some(opening) => Some(opening),
            None => self.reopen(last)?,
        };
        let Some(opening) = opening else {
            return Ok(false);
        };
        let registered = register();
        let mut state = self.lock();
        match &*state {
            DeviceState::Returning(it) | DeviceState::Resuming(it)
                if it.generation == opening.generation => {}
            _ => return Ok(false),
        }
        if let Err(error) = registered {
            looked_for.1 = failures + 1;
            if matches!(*state, DeviceState::Returning(_)) {
                *state = DeviceState::Gone(opening.generation);
            }
            return Err(error);
        }
        looked_for.1 = 0;
        *state = DeviceState::Here(opening);
        Ok(true)
    }

    /// Opens the device that now has the removed device's name, if there is one.
    fn reopen(&self, last: u32) -> Result<Option<Opening>> {
        let devices = self.library.devices()?;
        let Some(device) = devices.iter().find(|device| device.name() == self.name) else {
            return Ok(None);
        };
        let opening = Opening {
            pd: Pd::new(&device.open()?)?,
            generation: last + 1,
            entry: inode(&self.entry),
        };
        *self.lock() = DeviceState::Returning(opening.clone());
        Ok(Some(opening))
    }

    fn lock(&self) -> MutexGuard<'_, DeviceState> {
        // No holder panics with the state half-changed.
        lock(&self.state)
    }
}

#[derive(Default)]
struct Questions {
    /// Time of the question that is not answered yet, if there is one.
    since: Mutex<Option<Instant>>,
    answered: Condvar,
}

impl Questions {
    fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        // No holder panics with the value half-changed.
        lock(&self.since)
    }
}

impl RailDevice {
    /// Queries a port without waiting. `None` for a removed device, and while a question runs.
    pub fn ask(self: &Arc<Self>, port: u8, now: Instant) -> Option<Receiver<Result<PortInfo>>> {
        let since = self.questions.lock();
        if since.is_some() {
            return None;
        }
        self.asked(now);
        self.ask_on_thread(since, now, move |context| context.port(port))
    }

    /// Asks the device a question and waits for the answer.
    ///
    /// # Errors
    /// [`Error::Missing`] for a device that was removed or is silent, or the question's own error.
    pub fn query<T: Send + 'static>(
        self: &Arc<Self>,
        question: impl FnOnce(&Context) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let mut since = self.questions.lock();
        while let Some(asked_at) = *since {
            let left = PATIENCE.saturating_sub(clock::elapsed(asked_at));
            if left.is_zero() {
                drop(since);
                self.check_patience(clock::now());
                return Err(self.missing());
            }
            let waited = self.questions.answered.wait_timeout(since, left);
            (since, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
        let answer = self
            .ask_on_thread(since, clock::now(), question)
            .ok_or_else(|| self.missing())?;
        match answer.recv_timeout(PATIENCE) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                self.check_patience(clock::now());
                Err(self.missing())
            }
        }
    }

    /// Marks the device as stuck if its question has had no answer for `PATIENCE`. Logs a WARN
    /// about each call of [`DeviceCalls::begin_slow`] that has lasted as long.
    pub fn check_patience(&self, now: Instant) {
        self.calls.warn_of_slow(now);
        let since = self.questions.lock();
        let waited = since
            .map(|asked_at| now.saturating_duration_since(asked_at))
            .filter(|waited| *waited >= PATIENCE);
        let Some(waited) = waited else { return };
        let mut state = self.lock();
        let (DeviceState::Here(opening) | DeviceState::Resuming(opening)) = &*state else {
            return;
        };
        *state = DeviceState::Stuck(opening.clone());
        drop(state);
        tracing::warn!(
            "device {} has not answered for {:.0} s: its rails count as lost until it answers; see dmesg",
            self.name,
            waited.as_secs_f64()
        );
    }

    /// Asks a question on a new thread. Returns `None` for a removed device.
    fn ask_on_thread<T: Send + 'static>(
        self: &Arc<Self>,
        mut since: MutexGuard<'_, Option<Instant>>,
        now: Instant,
        question: impl FnOnce(&Context) -> Result<T> + Send + 'static,
    ) -> Option<Receiver<Result<T>>> {
        let (pd, asked) = self.to_be_asked()?;
        *since = Some(now);
        drop(since);
        let (tell, answer) = sync_channel(1);
        let device = Arc::clone(self);
        threads::detach("spark-device", move || {
            let found = question(pd.context());
            let mut since = device.questions.lock();
            device.conclude(found.as_ref().err(), asked);
            *since = None;
            drop(since);
            device.questions.answered.notify_all();
            // `conclude` has updated the state, so nothing is lost if the asker no longer waits.
            drop(tell.send(found));
        });
        Some(answer)
    }
}

impl DeviceState {
    fn generation(&self) -> u32 {
        match self {
            Self::Here(it)
            | Self::Stuck(it)
            | Self::Resuming(it)
            | Self::Failed(it)
            | Self::CutOff(it)
            | Self::Returning(it) => it.generation,
            Self::Gone(last) => *last,
        }
    }

    fn presence(&self) -> DevicePresence {
        match self {
            Self::Here(_) | Self::Resuming(_) => DevicePresence::Here,
            Self::Stuck(_) | Self::Failed(_) | Self::CutOff(_) => DevicePresence::CutOff,
            Self::Gone(_) | Self::Returning(_) => DevicePresence::Gone,
        }
    }
}

/// Returns true if the next attempt is due: to find a removed device (`is_gone`), or to resume a
/// device that answers again. `last` and `failures` are the elements of `looked_for`.
fn is_time((last, failures): (Option<Instant>, u32), is_gone: bool, now: Instant) -> bool {
    let pause = LOOK_EVERY * (1 << failures.min(DOUBLED_AT_MOST));
    // A device that answers again is used without a pause, unless the last attempt failed.
    let needs_pause = is_gone || failures > 0;
    !(needs_pause && last.is_some_and(|then| now.saturating_duration_since(then) < pause))
}

/// Returns the inode of the entry itself, which is a symbolic link.
fn inode(entry: &Path) -> Option<u64> {
    entry.symlink_metadata().ok().map(|found| found.ino())
}
