//! A rail's device: on the bus, cut off, or gone.
//!
//! Linux takes a device away in two steps. First it cuts programs off: verbs answer `EIO`, while the NIC may still read and write
//! memory. Then it destroys what programs had made, and the NIC is still. Only that says that no buffer is touched any more, and it
//! shows in two ways: as an event `IBV_EVENT_DEVICE_FATAL` that comes after the first `EIO` (a provider may raise one earlier, for an
//! error of the device: mlx5 on `MLX5_DEV_EVENT_SYS_ERROR`), and as the device's disappearance from `/sys/class/infiniband`, which comes
//! last (`__ib_unregister_device` in Linux's drivers/infiniband/core/device.c).

use crate::error::{Error, Result};
use crate::verbs::{Library, Pd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The device of a rail, and what becomes of it. Not for the data path: it locks, and asks the kernel.
pub struct RailDevice {
    name: String,
    /// Where sysfs has it.
    entry: PathBuf,
    library: &'static Library,
    state: Mutex<State>,
    looked_for: Mutex<Option<Instant>>,
}

enum State {
    Here(Opening),
    /// Kept for the event that says that it is gone.
    CutOff(Opening),
    /// Which opening was the last.
    Gone(u32),
    /// It was opened again, and gets its registrations.
    Returning(Opening),
}

/// A device, opened.
#[derive(Clone)]
struct Opening {
    pd: Arc<Pd>,
    /// Counts openings.
    number: u32,
    /// The inode of its entry in sysfs; none where it had none.
    entry: Option<u64>,
}

/// How far a device is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// It is on the bus, as far as is known.
    Here,
    /// The kernel answers no calls about it. It may still read and write memory.
    CutOff,
    /// It reads and writes no memory any more.
    Gone,
}

/// How often a device that is gone is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(500);

impl RailDevice {
    /// An opened device; `entry` is where sysfs would have it.
    pub fn new(pd: Arc<Pd>, entry: PathBuf) -> Self {
        let name = pd.context().name().to_owned();
        let (library, looked_for) = (pd.context().library(), Mutex::default());
        let opening = Opening { pd, number: 0, entry: inode(&entry) };
        Self { name, entry, library, state: Mutex::new(State::Here(opening)), looked_for }
    }

    /// Its protection domain.
    ///
    /// # Errors
    /// [`Error::Missing`] while it is not on the bus.
    pub fn pd(&self) -> Result<Arc<Pd>> {
        self.opened().map(|(pd, _)| pd)
    }

    /// Its protection domain, and which opening of the device it is of.
    ///
    /// # Errors
    /// [`Error::Missing`] while it is not on the bus.
    pub fn opened(&self) -> Result<(Arc<Pd>, u32)> {
        match &*self.lock() {
            State::Here(Opening { pd, number, .. }) => Ok((Arc::clone(pd), *number)),
            _ => Err(Error::Missing(format!("device {} was removed", self.name))),
        }
    }

    /// As [`RailDevice::opened`], for registrations, which a device that returns gets first.
    pub fn for_memory(&self) -> Option<(Arc<Pd>, u32)> {
        match &*self.lock() {
            State::Here(Opening { pd, number, .. }) | State::Returning(Opening { pd, number, .. }) => {
                Some((Arc::clone(pd), *number))
            }
            State::CutOff(_) | State::Gone(_) => None,
        }
    }

    /// Its protection domain, for its events: until it is gone.
    pub fn source_of_events(&self) -> Option<Arc<Pd>> {
        match &*self.lock() {
            State::Here(opening) | State::CutOff(opening) => Some(Arc::clone(&opening.pd)),
            State::Gone(_) | State::Returning(_) => None,
        }
    }

    /// How far it is gone, as far as is known.
    pub fn presence(&self) -> Presence {
        self.lock().presence()
    }

    /// How far the device of an opening is gone: one that has returned is another one.
    pub fn presence_of(&self, opening: u32) -> Presence {
        let state = self.lock();
        if state.number() == opening { state.presence() } else { Presence::Gone }
    }

    /// The kernel has answered a call about what was made with an opening with this error. Whether that says that the device is cut off,
    /// or gone.
    pub fn heard(&self, error: &Error, opening: u32) -> bool {
        if !error.is_removal() {
            return false;
        }
        let mut state = self.lock();
        match &*state {
            _ if state.number() != opening => {}
            State::Here(opening) => *state = State::CutOff(opening.clone()),
            // Nothing was made on it but registrations that no peer knows of.
            State::Returning(opening) => *state = State::Gone(opening.number),
            State::CutOff(_) | State::Gone(_) => {}
        }
        true
    }

    /// Asks the kernel whether it is there, and sysfs where it is cut off. How far it is gone.
    pub fn look(&self, port: u8) -> Presence {
        if let Ok((pd, opening)) = self.opened()
            && let Err(error) = pd.context().port(port)
        {
            self.heard(&error, opening);
        }
        let mut state = self.lock();
        if let State::CutOff(Opening { number, entry: Some(entry), .. }) = *state
            // A device of the same name that is there again has another entry.
            && inode(&self.entry) != Some(entry)
        {
            *state = State::Gone(number);
        }
        state.presence()
    }

    /// It has raised `IBV_EVENT_DEVICE_FATAL`. How far it is gone.
    pub fn fatal(&self, port: u8) -> Presence {
        let mut state = self.lock();
        if let State::CutOff(Opening { number, .. }) = *state {
            *state = State::Gone(number);
            return Presence::Gone;
        }
        drop(state);
        self.look(port)
    }

    /// Opens a device of the same name, if it is gone and there is one again; not more often than now and then. `register` is for what is
    /// to be registered there before it is used. Whether it is back.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn look_for_return(&self, now: Instant, register: impl FnOnce() -> Result<()>) -> Result<bool> {
        let State::Gone(last) = *self.lock() else { return Ok(false) };
        let mut looked_for = self.looked_for.lock().unwrap_or_else(PoisonError::into_inner);
        if looked_for.is_some_and(|last| now.saturating_duration_since(last) < LOOK_EVERY) {
            return Ok(false);
        }
        *looked_for = Some(now);
        let devices = self.library.devices()?;
        let Some(device) = devices.iter().find(|device| device.name() == self.name) else { return Ok(false) };
        let opening = Opening { pd: Pd::new(&device.open()?)?, number: last + 1, entry: inode(&self.entry) };
        *self.lock() = State::Returning(opening.clone());
        let registered = register();
        let mut state = self.lock();
        if !matches!(*state, State::Returning(_)) {
            return Ok(false);
        }
        *state = if registered.is_ok() { State::Here(opening) } else { State::Gone(opening.number) };
        registered.map(|()| true)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic in a holder leaves a state, whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn number(&self) -> u32 {
        match self {
            Self::Here(opening) | Self::CutOff(opening) | Self::Returning(opening) => opening.number,
            Self::Gone(last) => *last,
        }
    }

    fn presence(&self) -> Presence {
        match self {
            Self::Here(_) => Presence::Here,
            Self::CutOff(_) => Presence::CutOff,
            Self::Gone(_) | Self::Returning(_) => Presence::Gone,
        }
    }
}

/// Of the entry itself, which is a link.
fn inode(entry: &Path) -> Option<u64> {
    entry.symlink_metadata().ok().map(|found| found.ino())
}
