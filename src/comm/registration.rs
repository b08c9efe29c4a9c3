//! Memory registered on every rail, shared between the connections that use it.
//!
//! NCCL registers the same buffers once for each connection. Registering is slow and pins memory, so one buffer is
//! registered once and counted. The lock here is on the path of `regMr` and `deregMr` alone: a send reads its keys
//! from the registration it was handed.

use super::rail::Rail;
use crate::error::{Error, Result};
use crate::verbs::{Access, HostMemory, Mr, Readable};
use crate::wire::cts::PackedKeys;
use crate::wire::{MAX_OFFERED_RAILS, MAX_RAILS};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Memory registered on every rail of this host.
pub struct Registration {
    /// Its number among this process's, by which [`Registrations::find`] finds it.
    pub id: u32,
    start: usize,
    end: usize,
    keys: Vec<Keys>,
    /// The remote keys of the first rails, as an entry has them.
    strict: PackedKeys,
    relaxed: PackedKeys,
    /// What the keys stand for; deregistered when the last user is gone.
    regions: Vec<Mr>,
}

/// One rail's keys of a registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keys {
    /// For reading it on this host.
    pub lkey: u32,
    /// For a peer that writes bulk data, whose completion is what the caller waits for.
    pub relaxed_rkey: u32,
    /// For a peer that writes data whose bytes the caller looks at while they arrive.
    pub strict_rkey: u32,
}

impl Registration {
    /// Whether `bytes` at `addr` lie within it; no bytes lie anywhere.
    #[inline(always)]
    pub fn covers(&self, addr: u64, bytes: usize) -> bool {
        // An address below the start wraps around to an offset beyond every end.
        let (offset, room) = ((addr as usize).wrapping_sub(self.start), self.end - self.start);
        offset <= room && bytes <= room - offset || bytes == 0
    }

    /// Some of it, for this process to read; `None` outside of it.
    #[inline(always)]
    pub fn readable(&self, addr: u64, bytes: u32) -> Option<Readable<'_>> {
        self.regions.first()?.readable(addr, bytes)
    }

    /// The remote keys of this host's first [`MAX_RAILS`] rails, in their order.
    #[inline(always)]
    pub fn packed_keys(&self, strict: bool) -> &PackedKeys {
        if strict { &self.strict } else { &self.relaxed }
    }

    /// The keys on this host's rail `rail`.
    #[inline(always)]
    pub fn keys(&self, rail: usize) -> Option<&Keys> {
        self.keys.get(rail)
    }

    /// The registered range, for messages.
    pub fn range(&self) -> std::ops::Range<usize> {
        self.start..self.end
    }
}

/// The registrations that are in use.
#[derive(Default)]
pub struct Registrations {
    list: Mutex<Vec<Weak<Registration>>>,
    made: AtomicU32,
}

impl Registrations {
    /// Registers memory on all `rails`, or shares a registration of the same pages. (Not one that merely contains them: it would
    /// outlive its own owner's deregistration, and pages mapped anew behind it.)
    ///
    /// # Errors
    /// [`Error::Argument`] for an empty or impossible range; [`Error::Os`] when a device refuses.
    pub fn register(&self, rails: &[Arc<Rail>], memory: HostMemory) -> Result<Arc<Registration>> {
        let (addr, len) = (memory.addr(), memory.len());
        let memory = memory.pages().ok_or_else(|| {
            Error::Argument(format!("regMr of {len} bytes at {addr:#x}: an empty or impossible range"))
        })?;
        let (start, end) = (memory.addr(), memory.addr() + memory.len());
        // A panic while the lock is held leaves the list as it was or one entry longer: both are usable.
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.retain(|known| known.strong_count() > 0);
        let known = list.iter().filter_map(Weak::upgrade).find(|known| known.start == start && known.end == end);
        if let Some(known) = known {
            return Ok(known);
        }
        let registration = Arc::new(register_everywhere(rails, memory, self.made.fetch_add(1, Ordering::Relaxed))?);
        list.push(Arc::downgrade(&registration));
        Ok(registration)
    }

    /// A registration in use, by its number.
    pub fn find(&self, id: u32) -> Option<Arc<Registration>> {
        let list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.iter().filter_map(Weak::upgrade).find(|known| known.id == id)
    }

    /// How many registrations are in use.
    pub fn in_use(&self) -> usize {
        let list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.iter().filter(|known| known.strong_count() > 0).count()
    }
}

fn register_everywhere(rails: &[Arc<Rail>], memory: HostMemory, id: u32) -> Result<Registration> {
    let (mut keys, mut regions) = (Vec::with_capacity(rails.len()), Vec::with_capacity(2 * rails.len()));
    for rail in rails.iter().take(MAX_OFFERED_RAILS) {
        let strict = Mr::register(&rail.pd, memory, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        let mut rail_keys = Keys { lkey: strict.lkey(), relaxed_rkey: strict.rkey(), strict_rkey: strict.rkey() };
        regions.push(strict);
        if rail.relaxed_ordering {
            let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::RELAXED_ORDERING;
            let relaxed = Mr::register(&rail.pd, memory, access)?;
            rail_keys.relaxed_rkey = relaxed.rkey();
            rail_keys.lkey = relaxed.lkey();
            regions.push(relaxed);
        }
        keys.push(rail_keys);
    }
    let (start, end) = (memory.addr(), memory.addr() + memory.len());
    let strict = pack(keys.iter().map(|keys| keys.strict_rkey));
    let relaxed = pack(keys.iter().map(|keys| keys.relaxed_rkey));
    Ok(Registration { id, start, end, keys, strict, relaxed, regions })
}

/// Keys by rail as an entry has them.
#[inline]
pub fn pack(keys: impl Iterator<Item = u32>) -> PackedKeys {
    let mut packed = PackedKeys::default();
    for (rail, key) in keys.take(MAX_RAILS).enumerate() {
        packed[rail / 2] |= u64::from(key) << (rail % 2 * 32);
    }
    packed
}
