//! The device of a rail: executes what its state machine ([`proto::device`]) decides.
//!
//! Each question to the device runs on its own thread, `spark-device`, because it may take minutes.
//! [`RailDevice::query`] waits up to 3 s for the answer. If an earlier question has no answer yet,
//! it first waits for that answer, until 3 s after the earlier question was asked. So it does not
//! wait for a stuck device. The service thread does not wait at all: the thread that asks reports
//! the port's state to the machine, and a later round reads it.
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
//! [`RailDevice::bring_back`] opens a returned device and registers all memory in use with it
//! ([`Registrations::renew`](super::registration::Registrations::renew)). It may miss memory that
//! another thread is registering at the same time. So a registration checks for returned devices
//! again at its end.

use super::calls::DeviceCalls;
use crate::clock;
use crate::comm::threads::{self, lock};
use host::error::{Error, Missing, Result};
use host::port::{GidEntry, GidKind, PortState};
use proto::device::{
    Absence, Device, DeviceError, Event, PATIENCE, PortAnswer, PortChange, Presence, Return,
    Returned, SourceGid, Step,
};
use proto::time::Instant;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
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
    machine: Mutex<Device<Arc<Pd>>>,
    /// Signalled at the end of each question.
    answered: Condvar,
    /// Calls into the device that may hang.
    pub calls: Arc<DeviceCalls>,
}

impl RailDevice {
    /// Wraps an opened device. `entry` is the path of its entry in sysfs, which need not exist.
    pub fn new(pd: Arc<Pd>, entry: PathBuf) -> Self {
        let name = pd.context().name().to_owned();
        let library = pd.context().library();
        let calls = DeviceCalls::new(&name);
        let machine = Mutex::new(Device::new(pd, inode(&entry)));
        Self {
            name,
            entry,
            library,
            machine,
            answered: Condvar::new(),
            calls,
        }
    }

    /// Returns the protection domain.
    pub fn pd(&self) -> Result<Arc<Pd>> {
        self.opened().map(|(pd, _)| pd)
    }

    /// Returns the protection domain and the device generation.
    ///
    /// # Errors
    /// [`Error::Missing`] while the device is not in use: it was removed, has failed, is silent, or
    /// is idle.
    pub fn opened(&self) -> Result<(Arc<Pd>, u32)> {
        let opened = self.lock().opened();
        opened.map_err(|absence| self.missing(absence))
    }

    /// Returns the reason why the device cannot be used.
    pub fn absence_reason(&self) -> &'static str {
        match self.lock().absence() {
            Absence::Silent => "its device does not answer",
            Absence::Removed => "its device was removed",
            Absence::Idle => "memory is not registered with its device",
        }
    }

    fn missing(&self, absence: Absence) -> Error {
        let missing = match absence {
            Absence::Silent => Missing::Silent,
            Absence::Removed => Missing::Removed,
            Absence::Idle => Missing::Idle,
        };
        missing(self.name.clone()).into()
    }

    /// Like [`RailDevice::opened`], also for a device that has returned, answers again, or is idle
    /// with an attempt under way. Memory is registered with such a device before its use.
    pub fn for_memory(&self) -> Option<(Arc<Pd>, u32)> {
        self.lock().for_memory()
    }

    /// Returns the protection domain as a source of events, or `None` once the device is removed.
    pub fn source_of_events(&self) -> Option<Arc<Pd>> {
        self.lock().source_of_events()
    }

    /// Returns the presence according to the last answer, without a new question.
    pub fn presence(&self) -> Presence {
        self.lock().presence()
    }

    /// Returns the presence of one device generation. A generation is gone if there is a later one.
    pub fn presence_of(&self, generation: u32) -> Presence {
        self.lock().presence_of(generation)
    }

    /// Returns true if the device has not answered for [`PATIENCE`].
    pub fn is_stuck(&self) -> bool {
        self.lock().is_stuck()
    }

    /// Returns true while a present device has not answered the service thread.
    pub fn is_asked(&self) -> bool {
        self.lock().is_asked()
    }

    /// Records the error of a call on a queue pair or other object that belongs to the device
    /// generation `generation`. Returns true if the error means that the device has failed, was cut
    /// off or is removed.
    pub fn record_error(&self, error: &Error, generation: u32) -> bool {
        let of_device = device_error(error);
        if let Some(error) = of_device {
            self.lock().call_failed(error, generation);
        }
        of_device.is_some()
    }

    /// Processes an asynchronous event of the device or its port.
    pub fn event(&self, event: Event) {
        self.lock().event(event);
    }

    /// Lets the service thread question the device in its next round.
    pub fn ask_soon(&self) {
        self.lock().ask_soon();
    }

    /// Does the service thread's round: warns of a silent device, queries port `port` if that is
    /// due, and calls `tell` or `bring_back` for the machine's other steps.
    pub fn round(
        self: &Arc<Self>,
        port: u8,
        now: Instant,
        mut tell: impl FnMut(PortChange),
        mut bring_back: impl FnMut(Return),
    ) {
        self.calls.warn_of_slow(now);
        let entry = inode(&self.entry);
        loop {
            let step = self.lock().poll(entry, now);
            match step {
                None => return,
                Some(Step::WarnStuck(waited)) => self.warn_stuck(waited),
                Some(Step::Tell(change)) => tell(change),
                Some(Step::Return(how)) => bring_back(how),
                Some(Step::AskPort(pd)) => {
                    // The answer goes to the machine.
                    drop(self.ask_on_thread(
                        pd,
                        move |context| Ok((context.port(port)?, context.gid_table(port)?)),
                        |machine, answer| {
                            let answer = answer.as_ref().ok();
                            machine.port_answered(answer.map(|(port, table)| PortAnswer {
                                is_active: port.state == PortState::Active,
                                gids: gids(table),
                            }));
                        },
                    ));
                }
            }
        }
    }

    /// Forgets what happened to the port while no service thread ran.
    pub fn watch_anew(&self) {
        self.lock().watch_anew();
    }

    /// Begins to bring the device back into use, if that is due. The caller then calls
    /// [`Self::bring_back`].
    pub fn begin_return(&self, now: Instant) -> Option<Return> {
        self.lock().begin_return(now)
    }

    /// Keeps the device, which was just opened, without memory until [`Self::require_memory`].
    pub fn keep_idle(&self) {
        self.lock().keep_idle();
    }

    /// Lets the service thread register all memory with an idle device, in its next round.
    ///
    /// # Errors
    /// [`Error::Missing`] if the device is idle.
    pub fn require_memory(&self) -> Result<()> {
        if self.lock().use_soon() {
            return Err(self.missing(Absence::Idle));
        }
        Ok(())
    }

    /// Records that memory could not be registered with this device, which is not in use.
    pub fn registration_failed(&self) {
        self.lock().registration_failed();
    }

    /// Opens a new device of the same name if this one was removed. Then registers memory with the
    /// device, by `register`, unless it stays idle. Returns true if the device is back in use.
    pub fn bring_back(&self, how: Return, register: impl FnOnce() -> Result<()>) -> Result<bool> {
        let opened = match how {
            Return::Reopen => self.reopen(),
            Return::Resume | Return::FirstUse => Ok(self.lock().for_memory().map(|(pd, _)| pd)),
        };
        let takes_memory = |found: &Option<_>| found.is_some() && self.for_memory().is_some();
        let found = opened.as_ref().map(takes_memory).map_err(Error::clone);
        let (returned, outcome) = match found {
            Ok(true) => match register() {
                Ok(()) => (Returned::Registered, Ok(())),
                Err(error) => (Returned::NotRegistered, Err(error)),
            },
            Ok(false) => (Returned::NotFound, Ok(())),
            Err(error) => (Returned::NotFound, Err(error)),
        };
        let is_back = self.lock().end_return(returned);
        // `opened` outlives the lock: to destroy the last protection domain is a command to the
        // device, which may hang.
        drop(opened);
        outcome.map(|()| is_back)
    }

    /// Opens the device that now has the removed device's name, if there is one.
    fn reopen(&self) -> Result<Option<Arc<Pd>>> {
        let devices = self.library.devices()?;
        let Some(device) = devices.iter().find(|device| device.name() == self.name) else {
            return Ok(None);
        };
        let pd = Pd::new(&device.open()?)?;
        self.lock().reopened(Arc::clone(&pd), inode(&self.entry));
        Ok(Some(pd))
    }

    /// Queries a port as [`Self::query`] does, and returns the resulting presence.
    pub fn query_presence(self: &Arc<Self>, port: u8) -> Presence {
        // Only the change of state is of interest.
        drop(self.query(move |context| context.port(port)));
        self.presence()
    }

    /// Reads the GID table of port `port`, as [`Self::query`] does, and reports it to the machine,
    /// which compares queue pairs with the last table ([`Self::has_gid`]).
    ///
    /// # Errors
    /// Those of [`Self::query`].
    pub fn gid_table(self: &Arc<Self>, port: u8) -> Result<Vec<GidEntry>> {
        self.query_and_report(
            move |context| context.gid_table(port),
            |machine, table| {
                if let Ok(table) = table {
                    machine.gids_read(gids(table));
                }
            },
        )
    }

    /// Returns true unless the last read of the GID table shows that the port no longer has this
    /// address at this index.
    pub fn has_gid(&self, gid: &SourceGid) -> bool {
        self.lock().has_gid(gid)
    }

    /// Asks the device a question and waits for the answer.
    ///
    /// # Errors
    /// [`Error::Missing`] for a device that was removed or is silent, or the question's own error.
    pub fn query<T: Send + 'static>(
        self: &Arc<Self>,
        question: impl FnOnce(&Context) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.query_and_report(question, |_, _| {})
    }

    fn query_and_report<T: Send + 'static>(
        self: &Arc<Self>,
        question: impl FnOnce(&Context) -> Result<T> + Send + 'static,
        report: impl FnOnce(&mut Device<Arc<Pd>>, &Result<T>) + Send + 'static,
    ) -> Result<T> {
        let mut machine = self.lock();
        let pd = loop {
            if let Some(pd) = machine.ask(clock::now()) {
                break pd;
            }
            let Some(asked_at) = machine.asked_at() else {
                return Err(self.missing(machine.absence()));
            };
            let left = PATIENCE.saturating_sub(clock::elapsed(asked_at));
            if left.is_zero() {
                drop(machine);
                return Err(self.give_up_waiting());
            }
            let waited = self.answered.wait_timeout(machine, left);
            (machine, _) = waited.unwrap_or_else(PoisonError::into_inner);
        };
        drop(machine);
        let answer = self.ask_on_thread(pd, question, report);
        match answer.recv_timeout(PATIENCE) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                Err(self.give_up_waiting())
            }
        }
    }

    fn give_up_waiting(&self) -> Error {
        let stuck = self.lock().check_patience(clock::now());
        if let Some(waited) = stuck {
            self.warn_stuck(waited);
        }
        let absence = self.lock().absence();
        self.missing(absence)
    }

    fn warn_stuck(&self, waited: Duration) {
        tracing::warn!(
            "device {} has not answered for {:.0} s: its rails count as lost until it answers; see dmesg",
            self.name,
            waited.as_secs_f64()
        );
    }

    /// Asks a question on a new thread. At its end, reports the answer to the machine, also by
    /// `report`.
    fn ask_on_thread<T: Send + 'static>(
        self: &Arc<Self>,
        pd: Arc<Pd>,
        question: impl FnOnce(&Context) -> Result<T> + Send + 'static,
        report: impl FnOnce(&mut Device<Arc<Pd>>, &Result<T>) + Send + 'static,
    ) -> Receiver<Result<T>> {
        let (tell, answer) = sync_channel(1);
        let device = Arc::clone(self);
        threads::detach("spark-device", move || {
            let found = question(pd.context());
            let outcome = found.as_ref().map(drop).map_err(device_error);
            let mut machine = device.lock();
            // Read now: the entry may prove the removal of the present device.
            let entry = inode(&device.entry);
            machine.answered(outcome, entry);
            report(&mut machine, &found);
            drop(machine);
            device.answered.notify_all();
            // The machine has the result, so nothing is lost if the asker no longer waits.
            drop(tell.send(found));
        });
        answer
    }

    fn lock(&self) -> MutexGuard<'_, Device<Arc<Pd>>> {
        // No holder panics with the machine half-changed.
        lock(&self.machine)
    }
}

fn device_error(error: &Error) -> Option<DeviceError> {
    if error.is_removal() {
        Some(DeviceError::CutOff)
    } else {
        error.is_failed_device().then_some(DeviceError::Failed)
    }
}

/// Returns the entries of a GID table that queue pairs use as source addresses.
fn gids(table: &[GidEntry]) -> Vec<SourceGid> {
    let roce_v2 = table.iter().filter(|entry| entry.kind == GidKind::RoceV2);
    roce_v2
        .map(|entry| SourceGid {
            gid: entry.gid,
            gid_index: entry.index,
        })
        .collect()
}

/// Returns the inode of the entry itself, which is a symbolic link.
fn inode(entry: &std::path::Path) -> Option<u64> {
    entry.symlink_metadata().ok().map(|found| found.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_the_index_of_its_roce_v2_entry() {
        let mapped = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 168, 100, 1];
        let entry = |index, kind| GidEntry {
            index,
            gid: mapped,
            kind,
            ifindex: 2,
        };
        let table = [entry(2, GidKind::RoceV1), entry(5, GidKind::RoceV2)];
        let expected = SourceGid {
            gid: mapped,
            gid_index: 5,
        };
        assert_eq!(gids(&table), [expected]);
        assert_eq!(gids(&table[..1]), [], "only RoCE v1 is left");
    }
}
