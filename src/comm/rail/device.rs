//! A rail's device: on the bus, failed, cut off, or gone.
//!
//! Linux takes a device away in two steps. First it cuts programs off: verbs answer `EIO`, while the NIC may still read and write
//! memory. Then it destroys what programs had made, and the NIC is still. Only that says that no buffer is touched any more, and it
//! shows as the device's disappearance from `/sys/class/infiniband`, which comes last (`__ib_unregister_device` in Linux's
//! drivers/infiniband/core/device.c). Linux raises an event `IBV_EVENT_DEVICE_FATAL` a moment before that
//! (`uverbs_async_event_destroy_uobj` in uverbs_std_types_async_fd.c), and mlx5 raises another one earlier, when its firmware fails
//! (`MLX5_DEV_EVENT_SYS_ERROR`), which may be read at any time later. The two look alike, so the event counts only where sysfs does not
//! show the device at all.
//!
//! A device whose firmware has failed is registered still: the kernel answers `ENOLINK` for it, or takes queue pairs to error and destroys
//! them without it. Nothing that it says proves the device still. So it is waited for as one that is cut off, which it is next.

use crate::error::{Error, Result};
use crate::verbs::{Library, Pd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The device of a rail, and what becomes of it. Not for the data path: it locks, and asks the kernel.
pub struct RailDevice {
    name: String,
    /// Where sysfs has it.
    entry: PathBuf,
    library: &'static Library,
    state: Mutex<State>,
    /// How often the kernel has answered that it is gone or has failed.
    doubts: AtomicU64,
    /// When it was last asked.
    asked: Mutex<Option<Instant>>,
    /// When it was last looked for, and how often it could not be used since it was there again.
    looked_for: Mutex<(Option<Instant>, u32)>,
}

enum State {
    Here(Opening),
    /// The kernel answers for it.
    Failed(Opening),
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
    /// The kernel answers no calls about it, or answers in its place. It may still read and write memory.
    CutOff,
    /// It reads and writes no memory any more.
    Gone,
}

/// How often a device that is gone is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Each time that it was there and could not be used doubles that, up to half a minute: all memory is registered each time.
const DOUBLED_AT_MOST: u32 = 6;
/// How often a device that should be there is asked: the kernel may have to ask its firmware.
const ASK_EVERY: Duration = Duration::from_secs(1);

impl RailDevice {
    /// An opened device; `entry` is where sysfs would have it.
    pub fn new(pd: Arc<Pd>, entry: PathBuf) -> Self {
        let name = pd.context().name().to_owned();
        let library = pd.context().library();
        let (doubts, asked, looked_for) = Default::default();
        let opening = Opening { pd, number: 0, entry: inode(&entry) };
        Self { name, entry, library, state: Mutex::new(State::Here(opening)), doubts, asked, looked_for }
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
            State::Failed(_) | State::CutOff(_) | State::Gone(_) => None,
        }
    }

    /// Its protection domain, for its events: until it is gone.
    pub fn source_of_events(&self) -> Option<Arc<Pd>> {
        match &*self.lock() {
            State::Here(opening) | State::Failed(opening) | State::CutOff(opening) => Some(Arc::clone(&opening.pd)),
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

    /// The kernel has answered a call about what was made with an opening with this error. Whether that says that the device has failed,
    /// is cut off, or is gone.
    pub fn heard(&self, error: &Error, opening: u32) -> bool {
        if !error.is_removal() && !error.is_failed_device() {
            return false;
        }
        let mut state = self.lock();
        self.doubts.fetch_add(1, Ordering::Relaxed);
        match &*state {
            _ if state.number() != opening => {}
            State::Here(opening) if error.is_failed_device() => *state = State::Failed(opening.clone()),
            State::Here(opening) | State::Failed(opening) if error.is_removal() => {
                *state = State::CutOff(opening.clone());
            }
            // Nothing was made on it but registrations that no peer knows of.
            State::Returning(opening) => *state = State::Gone(opening.number),
            State::Here(_) | State::Failed(_) | State::CutOff(_) | State::Gone(_) => {}
        }
        true
    }

    /// Looks at its entry in sysfs, and asks the kernel whether it is there: where that is not known, and once a second. How far it is gone.
    pub fn glance(&self, port: u8, now: Instant) -> Presence {
        let is_as_before = match &*self.lock() {
            State::Here(Opening { entry, .. }) => *entry == inode(&self.entry),
            _ => false,
        };
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        if is_as_before && asked.is_some_and(|last| now.saturating_duration_since(last) < ASK_EVERY) {
            return Presence::Here;
        }
        *asked = Some(now);
        drop(asked);
        self.look(port)
    }

    /// Asks the kernel whether it is there, and sysfs where it is cut off. How far it is gone.
    pub fn look(&self, port: u8) -> Presence {
        let (pd, opening, doubts) = match &*self.lock() {
            State::Here(opening) | State::Failed(opening) | State::CutOff(opening) => {
                // Relaxed: counted and read under the lock.
                (Arc::clone(&opening.pd), opening.number, self.doubts.load(Ordering::Relaxed))
            }
            State::Gone(_) | State::Returning(_) => return Presence::Gone,
        };
        let answer = pd.context().port(port);
        if let Err(error) = &answer {
            self.heard(error, opening);
        }
        let mut state = self.lock();
        match &*state {
            // A device of the same name that is there again has another entry.
            State::CutOff(Opening { number, entry: Some(entry), .. }) if inode(&self.entry) != Some(*entry) => {
                *state = State::Gone(*number);
            }
            // What has failed or is cut off stays so. One that answers was not: its firmware had refused something. An answer from before somebody
            // heard otherwise says nothing.
            State::Failed(it) | State::CutOff(it)
                if answer.is_ok() && it.number == opening && self.doubts.load(Ordering::Relaxed) == doubts =>
            {
                *state = State::Here(it.clone());
            }
            _ => {}
        }
        state.presence()
    }

    /// It has raised `IBV_EVENT_DEVICE_FATAL`. How far it is gone.
    pub fn fatal(&self, port: u8) -> Presence {
        let mut state = self.lock();
        // Without an entry in sysfs there is nothing better to go by.
        if let State::CutOff(Opening { number, entry: None, .. }) = *state {
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
        // Held to the end: one thread opens it.
        let Ok(mut looked_for) = self.looked_for.try_lock() else { return Ok(false) };
        let State::Gone(last) = *self.lock() else { return Ok(false) };
        let (looked_at, failures) = *looked_for;
        let pause = LOOK_EVERY * (1 << failures.min(DOUBLED_AT_MOST));
        if looked_at.is_some_and(|then| now.saturating_duration_since(then) < pause) {
            return Ok(false);
        }
        *looked_for = (Some(now), failures);
        let devices = self.library.devices()?;
        let Some(device) = devices.iter().find(|device| device.name() == self.name) else { return Ok(false) };
        let opening = Opening { pd: Pd::new(&device.open()?)?, number: last + 1, entry: inode(&self.entry) };
        *self.lock() = State::Returning(opening.clone());
        let registered = register();
        let mut state = self.lock();
        if !matches!(*state, State::Returning(_)) {
            return Ok(false);
        }
        if let Err(error) = registered {
            looked_for.1 = failures + 1;
            *state = State::Gone(opening.number);
            return Err(error);
        }
        looked_for.1 = 0;
        *state = State::Here(opening);
        Ok(true)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic in a holder leaves a state, whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn number(&self) -> u32 {
        match self {
            Self::Here(opening) | Self::Failed(opening) | Self::CutOff(opening) | Self::Returning(opening) => {
                opening.number
            }
            Self::Gone(last) => *last,
        }
    }

    fn presence(&self) -> Presence {
        match self {
            Self::Here(_) => Presence::Here,
            Self::Failed(_) | Self::CutOff(_) => Presence::CutOff,
            Self::Gone(_) | Self::Returning(_) => Presence::Gone,
        }
    }
}

/// Of the entry itself, which is a link.
fn inode(entry: &Path) -> Option<u64> {
    entry.symlink_metadata().ok().map(|found| found.ino())
}
