//! Memory registered on every rail, shared between the connections that use it.
//!
//! NCCL registers the same buffers once for each connection. Registering is slow and pins memory, so one buffer is
//! registered once and counted. What is only sent takes one registration on each rail, which no peer may write to; what is received
//! takes a second one where a device can relax PCIe's order. A send reads its keys from the registration it was handed; the lock here is for those who register,
//! and for a send that finds another lane when a rail is lost. That one has the data path meanwhile, so nobody registers or
//! deregisters under the lock: gigabytes take seconds.

use super::Rail;
use crate::error::{Error, Result};
use crate::verbs::{Access, HostMemory, Mr, Readable};
use crate::wire::cts::PackedKeys;
use crate::wire::ids::RailId;
use crate::wire::{MAX_OFFERED_RAILS, MAX_RAILS};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Memory registered on every rail of this host.
pub struct Registration {
    /// Its number among this process's, by which [`Registrations::find`] finds it.
    pub id: u32,
    start: usize,
    end: usize,
    /// The end of what peers may write to: `start` where that is nothing.
    writable_end: usize,
    keys: Vec<Keys>,
    /// The remote keys of the first rails, as an entry has them.
    strict: PackedKeys,
    relaxed: PackedKeys,
    /// What the keys stand for; deregistered when the last user is gone.
    regions: Vec<Mr>,
}

/// What memory is registered for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// To be read by this host's NICs.
    Send,
    /// To be written to by a peer, and read as well.
    Receive,
}

/// One rail's keys of a registration. The remote ones are 0 where the memory is registered for sends alone.
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

    /// Whether a peer may write to `bytes` at `addr`; to no bytes, anywhere.
    #[inline(always)]
    pub fn takes(&self, addr: u64, bytes: usize) -> bool {
        let (offset, room) = ((addr as usize).wrapping_sub(self.start), self.writable_end - self.start);
        offset <= room && bytes <= room - offset || bytes == 0
    }

    /// Whether a peer may write to it.
    pub fn is_for_receives(&self) -> bool {
        self.writable_end > self.start
    }

    /// How often the kernel has pinned it, and counts it against the limit of locked memory.
    pub fn pins(&self) -> usize {
        self.regions.len()
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

    /// The keys on a rail of this host.
    #[inline(always)]
    pub fn keys(&self, rail: RailId) -> Option<&Keys> {
        self.keys.get(rail.index())
    }

    /// The registered range, for messages.
    pub fn range(&self) -> std::ops::Range<usize> {
        self.start..self.end
    }
}

/// The registrations that are in use.
#[derive(Default)]
pub struct Registrations {
    list: Mutex<Vec<Known>>,
    made: AtomicU32,
}

/// A registration, with what it is looked up by: nobody else's is held under the lock, where it could turn out to be the last hold.
struct Known {
    id: u32,
    range: Range<usize>,
    purpose: Purpose,
    held: Weak<Registration>,
}

impl Registrations {
    /// Registers memory on all `rails`, or shares a registration of the same bytes; a send may share that of receives. (Not one that merely contains them: it would
    /// outlive its own owner's deregistration, and pages mapped anew behind it.) A registration ends where the memory does: the
    /// NIC refuses a peer's access to the bytes beside it.
    ///
    /// # Errors
    /// [`Error::Argument`] for an empty or impossible range; [`Error::Os`] when a device refuses.
    pub fn register(&self, rails: &[Arc<Rail>], memory: HostMemory, purpose: Purpose) -> Result<Arc<Registration>> {
        let (addr, len) = (memory.addr(), memory.len());
        let range = memory.range().ok_or_else(|| {
            Error::Argument(format!("cannot register {len} bytes at {addr:#x}: the range is empty or wraps around"))
        })?;
        self.share(range, purpose, |id| register_everywhere(rails, memory, purpose, id))
    }

    fn share(
        &self,
        range: Range<usize>,
        purpose: Purpose,
        make: impl FnOnce(u32) -> Result<Registration>,
    ) -> Result<Arc<Registration>> {
        if let Some(known) = self.lock().iter().find_map(|known| known.of(&range, purpose)) {
            return Ok(known);
        }
        let made = Arc::new(make(self.made.fetch_add(1, Ordering::Relaxed))?);
        let mut list = self.lock();
        let first = list.iter().find_map(|known| known.of(&range, purpose));
        if first.is_none() {
            list.retain(|known| known.held.strong_count() > 0);
            list.push(Known { id: made.id, range, purpose, held: Arc::downgrade(&made) });
        }
        drop(list);
        // Another thread that registered the same meanwhile was first: this one is deregistered again.
        Ok(first.unwrap_or(made))
    }

    /// A registration in use, by its number.
    pub fn find(&self, id: u32) -> Option<Arc<Registration>> {
        self.lock().iter().find(|known| known.id == id)?.held.upgrade()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Known>> {
        // A panic while the lock is held leaves the list as it was or one entry longer: both are usable.
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many registrations are in use.
    pub fn in_use(&self) -> usize {
        self.lock().iter().filter(|known| known.held.strong_count() > 0).count()
    }
}

impl Known {
    /// It, if it is of this range, serves this purpose and is in use.
    fn of(&self, range: &Range<usize>, purpose: Purpose) -> Option<Arc<Registration>> {
        let serves = self.purpose == Purpose::Receive || purpose == Purpose::Send;
        if self.range == *range && serves { self.held.upgrade() } else { None }
    }
}

fn register_everywhere(rails: &[Arc<Rail>], memory: HostMemory, purpose: Purpose, id: u32) -> Result<Registration> {
    let (mut keys, mut regions) = (Vec::with_capacity(rails.len()), Vec::with_capacity(2 * rails.len()));
    for rail in rails.iter().take(MAX_OFFERED_RAILS) {
        keys.push(match purpose {
            Purpose::Send => register_to_send(rail, memory, &mut regions)?,
            Purpose::Receive => register_to_receive(rail, memory, &mut regions)?,
        });
    }
    let (start, end) = (memory.addr(), memory.addr() + memory.len());
    let writable_end = if purpose == Purpose::Receive { end } else { start };
    let strict = pack(keys.iter().map(|keys| keys.strict_rkey));
    let relaxed = pack(keys.iter().map(|keys| keys.relaxed_rkey));
    Ok(Registration { id, start, end, writable_end, keys, strict, relaxed, regions })
}

/// Every registration lets its own NIC read; more is not needed to send.
fn register_to_send(rail: &Rail, memory: HostMemory, regions: &mut Vec<Mr>) -> Result<Keys> {
    let access = if rail.relaxed_ordering { Access::RELAXED_ORDERING } else { Access::empty() };
    let read = Mr::register(&rail.pd, memory, access)?;
    let keys = Keys { lkey: read.lkey(), relaxed_rkey: 0, strict_rkey: 0 };
    regions.push(read);
    Ok(keys)
}

fn register_to_receive(rail: &Rail, memory: HostMemory, regions: &mut Vec<Mr>) -> Result<Keys> {
    let strict = Mr::register(&rail.pd, memory, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    let mut keys = Keys { lkey: strict.lkey(), relaxed_rkey: strict.rkey(), strict_rkey: strict.rkey() };
    regions.push(strict);
    if rail.relaxed_ordering {
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::RELAXED_ORDERING;
        let relaxed = Mr::register(&rail.pd, memory, access)?;
        (keys.relaxed_rkey, keys.lkey) = (relaxed.rkey(), relaxed.lkey());
        regions.push(relaxed);
    }
    Ok(keys)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Of no rail.
    fn registration(id: u32, range: &Range<usize>) -> Registration {
        let (keys, strict, relaxed, regions) = Default::default();
        let Range { start, end } = *range;
        Registration { id, start, end, writable_end: end, keys, strict, relaxed, regions }
    }

    #[test]
    fn others_look_registrations_up_while_one_is_made() {
        let all = Registrations::default();
        let known = all.share(0x1000..0x2000, Purpose::Receive, |id| Ok(registration(id, &(0x1000..0x2000)))).unwrap();
        let made = all.share(0x4000..0x8000, Purpose::Receive, |id| {
            assert!(all.list.try_lock().is_ok(), "a send that finds another lane would wait for this");
            assert_eq!(all.find(known.id).unwrap().id, known.id);
            Ok(registration(id, &(0x4000..0x8000)))
        });
        assert_eq!(made.unwrap().range(), 0x4000..0x8000);
        assert!(all.share(0x4000..0x8000, Purpose::Receive, |_| Err(Error::Missing("on purpose".to_owned()))).is_err());
        assert_eq!(all.in_use(), 1);
    }

    #[test]
    fn of_two_that_register_the_same_at_a_time_the_first_is_shared() {
        let all = Registrations::default();
        let range = 0x1000..0x2000;
        let mut first = None;
        let second = all.share(range.clone(), Purpose::Receive, |id| {
            let other = all.share(range.clone(), Purpose::Receive, |id| Ok(registration(id, &range)));
            first = Some(other.unwrap());
            Ok(registration(id, &range))
        });
        let (first, second) = (first.unwrap(), second.unwrap());
        assert!(Arc::ptr_eq(&first, &second) && Arc::strong_count(&first) == 2 && all.in_use() == 1);
        let third =
            all.share(range.clone(), Purpose::Receive, |_| Err(Error::Missing("it is registered".to_owned()))).unwrap();
        assert!(Arc::ptr_eq(&first, &third));
        drop((first, second, third));
        assert_eq!((all.in_use(), all.find(0).is_none(), all.find(1).is_none()), (0, true, true));
    }

    #[test]
    fn a_send_shares_what_receives_have_and_not_the_other_way_round() {
        let (all, range) = (Registrations::default(), 0x1000..0x2000);
        let make = |id| Ok(registration(id, &range));
        let sent = all.share(range.clone(), Purpose::Send, make).unwrap();
        let received = all.share(range.clone(), Purpose::Receive, make).unwrap();
        assert!(!Arc::ptr_eq(&sent, &received), "nobody may write to what is registered for sends");
        drop(sent);
        let again = all.share(range.clone(), Purpose::Send, |_| Err(Error::Missing("it is registered".to_owned())));
        assert!(Arc::ptr_eq(&again.unwrap(), &received));
    }
}
