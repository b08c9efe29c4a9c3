//! Memory registered on every rail whose device is in use, shared between the connections that use
//! it.
//!
//! NCCL registers the same buffers once for each connection. Registering is slow and pins memory,
//! so the plugin registers each buffer once and counts its users. Memory for sends has one
//! registration on each rail, which gives peers no access. Memory for receives has one registration
//! with strict PCIe ordering on each rail. On the rails that may use relaxed PCIe ordering, this
//! memory has a second registration with that ordering.
//!
//! A request reads its keys from its registration without a lock. The lock of [`Registrations`] is
//! for registering, and for recovery after the loss or return of a rail, which looks up a
//! registration by its number. While recovery waits for the lock, NCCL's thread cannot use the data
//! path. Registering gigabytes takes seconds, so no thread registers or deregisters memory under
//! the lock.
//!
//! Memory is registered with NCCL's byte bounds, which the NIC enforces. Bounds rounded to pages
//! would let a peer access neighbouring memory on the heap.

use super::Rail;
use super::calls::{DeviceCalls, SlowCall};
use crate::comm::threads::lock;
use host::error::{Argument, Error, Result};
use proto::device::Presence;
use proto::wire::cts::PackedKeys;
use proto::wire::ids::RailId;
use proto::wire::{MAX_OFFERED_RAILS, MAX_RAILS};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use verbs::{Access, HostMemory, Mr, Pd, Readable};

/// Memory registered on every rail of this host.
pub struct Registration {
    /// Number of the registration in this process, for [`Registrations::find`].
    pub id: u32,
    memory: HostMemory,
    purpose: Purpose,
    /// Number of bytes that peers may write to: all or none.
    writable_bytes: usize,
    keys: Vec<RailKeys>,
    /// The `strict_rkey` of each of the first [`MAX_RAILS`] rails, packed as in a CTS entry.
    strict_rkeys: [AtomicU64; PACKED],
    /// The `relaxed_rkey` of each of the same rails, packed in the same way.
    relaxed_rkeys: [AtomicU64; PACKED],
    /// Memory regions of the keys, by rail. Locked while memory is registered with devices.
    regions: Mutex<Vec<Option<Regions>>>,
    /// Locked while this memory is registered with returned devices. Deregistering waits for this
    /// lock.
    renewal: Arc<Mutex<()>>,
}

/// Number of words in [`PackedKeys`].
const PACKED: usize = MAX_RAILS / 2;

/// Keys on one rail. They change when the rail's device returns. The new keys are stored before the
/// rail is used again. The ownership word of a data path (`TryCell`) makes the change visible to
/// the threads that use the data path, so all accesses are relaxed.
#[derive(Default)]
struct RailKeys {
    lkey: AtomicU32,
    relaxed_rkey: AtomicU32,
    strict_rkey: AtomicU32,
}

struct Regions {
    /// Generation of the device that the regions belong to.
    generation: u32,
    first: Mr,
    relaxed: Option<Mr>,
    calls: Arc<DeviceCalls>,
    /// Set while the registrations are being ended. Dropped after them.
    ending: Option<SlowCall>,
}

/// Purpose of a registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// This host's NICs read the memory.
    Send,
    /// Peers write to the memory, and this host's NICs read it too.
    Receive,
}

/// Keys of a registration on one rail. Both remote keys are 0 if the registration is only for
/// sends. Without relaxed ordering on the rail, both are the same key.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Keys {
    /// Key for reads by this host's NIC.
    pub lkey: u32,
    /// Key for a peer's writes of bulk data, which NCCL reads only after the receive is done.
    pub relaxed_rkey: u32,
    /// Key for a peer's writes of data that NCCL polls while the data arrives.
    pub strict_rkey: u32,
}

impl Registration {
    fn new(id: u32, memory: HostMemory, purpose: Purpose, rails: usize) -> Self {
        let keys = std::iter::repeat_with(RailKeys::default)
            .take(rails)
            .collect();
        let regions = Mutex::new(std::iter::repeat_with(|| None).take(rails).collect());
        let (strict_rkeys, relaxed_rkeys, renewal) = Default::default();
        let writable_bytes = if purpose == Purpose::Receive {
            memory.len()
        } else {
            0
        };
        Self {
            id,
            memory,
            purpose,
            writable_bytes,
            keys,
            strict_rkeys,
            relaxed_rkeys,
            regions,
            renewal,
        }
    }

    /// Returns true if the `bytes` bytes at `addr` lie within the registration, or if `bytes` is 0.
    #[inline(always)]
    pub fn covers(&self, addr: u64, bytes: usize) -> bool {
        // An address below the start wraps around to an offset above every length.
        let offset = (addr as usize).wrapping_sub(self.memory.addr());
        let room = self.memory.len();
        offset <= room && bytes <= room - offset || bytes == 0
    }

    /// Returns true if a peer may write to the `bytes` bytes at `addr`, or if `bytes` is 0.
    #[inline(always)]
    pub fn allows_write(&self, addr: u64, bytes: usize) -> bool {
        let offset = (addr as usize).wrapping_sub(self.memory.addr());
        let room = self.writable_bytes;
        offset <= room && bytes <= room - offset || bytes == 0
    }

    /// Returns true if a peer may write to the memory.
    #[inline(always)]
    pub fn is_for_receives(&self) -> bool {
        self.purpose == Purpose::Receive
    }

    /// Returns a range that this process may read. `None` if it is not inside the registration.
    #[inline(always)]
    pub fn readable(&self, addr: u64, bytes: u32) -> Option<Readable<'_>> {
        self.memory.readable(addr, bytes)
    }

    /// Returns a range that may be read until deregistration. `None` if it is not inside the
    /// registration.
    pub fn source(&self, addr: u64, bytes: usize) -> Option<HostMemory> {
        self.memory.part(addr, bytes)
    }

    /// Returns a range that may be written until deregistration. `None` if
    /// [`Self::allows_write`] is false for the range.
    pub fn target(&self, addr: u64, bytes: usize) -> Option<HostMemory> {
        self.memory
            .part(addr, bytes)
            .filter(|_| self.allows_write(addr, bytes))
    }

    /// Returns the remote keys of this host's first [`MAX_RAILS`] rails, in order: each rail's
    /// `strict_rkey` if `strict` is true, otherwise its `relaxed_rkey`.
    #[inline(always)]
    pub fn packed_keys(&self, strict: bool) -> PackedKeys {
        let words = if strict {
            &self.strict_rkeys
        } else {
            &self.relaxed_rkeys
        };
        std::array::from_fn(|word| words[word].load(Ordering::Relaxed))
    }

    /// Returns the keys on a rail of this host.
    #[inline(always)]
    pub fn keys(&self, rail: RailId) -> Option<Keys> {
        let keys = self.keys.get(rail.index())?;
        Some(Keys {
            lkey: keys.lkey.load(Ordering::Relaxed),
            relaxed_rkey: keys.relaxed_rkey.load(Ordering::Relaxed),
            strict_rkey: keys.strict_rkey.load(Ordering::Relaxed),
        })
    }

    /// Returns the registered range, for messages.
    pub fn range(&self) -> Range<usize> {
        self.memory.addr()..self.memory.addr() + self.memory.len()
    }

    /// Drops this reference. Then waits for a running [`Registrations::renew`], which holds a
    /// temporary reference, so that afterwards only users hold references.
    pub fn release(self: Arc<Self>) {
        let renewal = Arc::clone(&self.renewal);
        drop(self);
        drop(lock(&renewal));
    }

    /// Registers the memory with each present rail device that does not have it yet.
    fn complete(&self, rails: &[Arc<Rail>]) -> Result<()> {
        let mut regions = self.regions();
        for (rail, place) in rails.iter().zip(regions.iter_mut()) {
            match self.register_with(rail, place) {
                // The device gets its memory with its next attempt to come into use.
                Err(error) if rail.device.opened().is_err() => {
                    tracing::debug!("rail {}: {error}", rail.name());
                    rail.device.registration_failed();
                }
                made => made?,
            }
        }
        self.store_keys(&regions);
        Ok(())
    }

    /// Registers the memory with a rail's device, if the device is present and does not have it
    /// yet.
    fn register_with(&self, rail: &Rail, place: &mut Option<Regions>) -> Result<()> {
        let Some((pd, generation)) = rail.device.for_memory() else {
            return Ok(());
        };
        if place
            .as_ref()
            .is_some_and(|regions| regions.generation == generation)
        {
            return Ok(());
        }
        let _call = rail.device.calls.begin_slow("regMr");
        let register = || match self.purpose {
            Purpose::Send => register_to_send(rail, &pd, self.memory),
            Purpose::Receive => register_to_receive(rail, &pd, self.memory),
        };
        let (first, relaxed) = match register() {
            Err(error) if rail.device.record_error(&error, generation) => {
                if rail.device.query_presence(rail.info.port) != Presence::Here {
                    // The rail is not used until its device returns, so it needs no key yet.
                    return Ok(());
                }
                // The device is present, and no later step registers the memory: try again.
                register()?
            }
            made => made?,
        };
        *place = Some(Regions {
            generation,
            first,
            relaxed,
            calls: Arc::clone(&rail.device.calls),
            ending: None,
        });
        Ok(())
    }

    fn store_keys(&self, regions: &[Option<Regions>]) {
        let keys: Vec<Keys> = regions
            .iter()
            .map(|regions| {
                regions
                    .as_ref()
                    .map_or(Keys::default(), |it| it.keys(self.purpose))
            })
            .collect();
        for (place, keys) in self.keys.iter().zip(&keys) {
            place.lkey.store(keys.lkey, Ordering::Relaxed);
            place
                .relaxed_rkey
                .store(keys.relaxed_rkey, Ordering::Relaxed);
            place.strict_rkey.store(keys.strict_rkey, Ordering::Relaxed);
        }
        let store = |places: &[AtomicU64; PACKED], keys: PackedKeys| {
            for (place, word) in places.iter().zip(keys) {
                place.store(word, Ordering::Relaxed);
            }
        };
        store(
            &self.strict_rkeys,
            pack(keys.iter().map(|keys| keys.strict_rkey)),
        );
        store(
            &self.relaxed_rkeys,
            pack(keys.iter().map(|keys| keys.relaxed_rkey)),
        );
    }

    fn regions(&self) -> MutexGuard<'_, Vec<Option<Regions>>> {
        // A panic under the lock leaves some rails without a registration, which is a valid state.
        lock(&self.regions)
    }
}

impl Regions {
    fn keys(&self, purpose: Purpose) -> Keys {
        let Self { first, relaxed, .. } = self;
        match purpose {
            Purpose::Send => Keys {
                lkey: first.lkey(),
                relaxed_rkey: 0,
                strict_rkey: 0,
            },
            Purpose::Receive => {
                let bulk = relaxed.as_ref().unwrap_or(first);
                Keys {
                    lkey: bulk.lkey(),
                    relaxed_rkey: bulk.rkey(),
                    strict_rkey: first.rkey(),
                }
            }
        }
    }
}

impl Drop for Regions {
    fn drop(&mut self) {
        self.ending = Some(self.calls.begin_slow("deregMr"));
    }
}

/// All registrations in use.
#[derive(Default)]
pub struct Registrations {
    list: Mutex<Vec<CacheEntry>>,
    made: AtomicU32,
}

/// A registration, with copies of the fields that a search compares. So a search takes no reference
/// to registrations that do not match. If it did and then dropped the last reference, it would
/// deregister under the lock.
struct CacheEntry {
    id: u32,
    range: Range<usize>,
    purpose: Purpose,
    held: Weak<Registration>,
    renewal: Arc<Mutex<()>>,
}

impl Registrations {
    /// Registers memory on those of `rails` whose devices are in use, or returns an existing
    /// registration of exactly the same bytes. Memory for sends may share a registration for
    /// receives. The registration of a larger range is not shared. If it were, it would outlive its
    /// owner's deregistration, and would keep old pages if the range is mapped again.
    ///
    /// # Errors
    /// [`Error::Argument`] for an empty or impossible range; [`Error::Os`] if a device refuses.
    pub fn register(
        &self,
        rails: &[Arc<Rail>],
        memory: HostMemory,
        purpose: Purpose,
    ) -> Result<Arc<Registration>> {
        let addr = memory.addr();
        let bytes = memory.len();
        let range = memory.range().ok_or(Argument::Range { addr, bytes })?;
        let rails = &rails[..rails.len().min(MAX_OFFERED_RAILS)];
        let registration = self.share(range, purpose, |id| {
            let made = Registration::new(id, memory, purpose, rails.len());
            made.complete(rails).map(|()| made)
        })?;
        // A device may have returned, and `renew` may have run before this registration was listed.
        registration.complete(rails)?;
        Ok(registration)
    }

    /// Registers all memory in use with the device of `rail`, which comes into use.
    ///
    /// # Errors
    /// The error of the first registration that the device refuses.
    pub fn renew(&self, rail: &Rail) -> Result<()> {
        self.each_place(rail, |registration, place| {
            registration.register_with(rail, place)
        })
    }

    /// Deregisters all memory from the device of `rail`, which no queue pair has ever used.
    pub fn deregister(&self, rail: &Rail) {
        // Nothing fails here.
        let _ = self.each_place(rail, |_, place| {
            *place = None;
            Ok(())
        });
    }

    /// Changes each registration's place for a rail.
    fn each_place(
        &self,
        rail: &Rail,
        mut change: impl FnMut(&Registration, &mut Option<Regions>) -> Result<()>,
    ) -> Result<()> {
        let known: Vec<_> = self
            .lock()
            .iter()
            .map(|it| (Weak::clone(&it.held), Arc::clone(&it.renewal)))
            .collect();
        for (held, renewal) in known {
            let _renewal = lock(&renewal);
            let Some(registration) = held.upgrade() else {
                continue;
            };
            let mut regions = registration.regions();
            if let Some(place) = regions.get_mut(rail.id.index()) {
                change(&registration, place)?;
            }
            registration.store_keys(&regions);
        }
        Ok(())
    }

    fn share(
        &self,
        range: Range<usize>,
        purpose: Purpose,
        make: impl FnOnce(u32) -> Result<Registration>,
    ) -> Result<Arc<Registration>> {
        if let Some(known) = self
            .lock()
            .iter()
            .find_map(|known| known.of(&range, purpose))
        {
            return Ok(known);
        }
        let made = Arc::new(make(self.made.fetch_add(1, Ordering::Relaxed))?);
        let mut list = self.lock();
        let first = list.iter().find_map(|known| known.of(&range, purpose));
        if first.is_none() {
            list.retain(|known| known.held.strong_count() > 0);
            let held = Arc::downgrade(&made);
            let renewal = Arc::clone(&made.renewal);
            list.push(CacheEntry {
                id: made.id,
                range,
                purpose,
                held,
                renewal,
            });
        }
        drop(list);
        // If another thread registered the same bytes meanwhile, its registration is shared.
        Ok(first.unwrap_or(made))
    }

    /// Returns a registration in use, by its number.
    pub fn find(&self, id: u32) -> Option<Arc<Registration>> {
        self.lock()
            .iter()
            .find(|known| known.id == id)?
            .held
            .upgrade()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<CacheEntry>> {
        // A panic under the lock leaves the list unchanged or one entry longer, both valid.
        lock(&self.list)
    }

    /// Returns the number of registrations in use.
    pub fn in_use(&self) -> usize {
        self.lock()
            .iter()
            .filter(|known| known.held.strong_count() > 0)
            .count()
    }
}

impl CacheEntry {
    /// Returns the registration if it is in use for this range and can serve this purpose.
    fn of(&self, range: &Range<usize>, purpose: Purpose) -> Option<Arc<Registration>> {
        let serves = self.purpose == Purpose::Receive || purpose == Purpose::Send;
        if self.range == *range && serves {
            self.held.upgrade()
        } else {
            None
        }
    }
}

/// Registers memory for sends with local read access only, which every registration grants.
///
/// NCCL's own transport always requests local write access too. So some driver may never have been
/// tested with a registration without it. If the device refuses, this function adds local write
/// access. Peers never get any access.
fn register_to_send(rail: &Rail, pd: &Arc<Pd>, memory: HostMemory) -> Result<(Mr, Option<Mr>)> {
    let access = if rail.relaxed_ordering {
        Access::RELAXED_ORDERING
    } else {
        Access::empty()
    };
    match Mr::register(pd, memory, access) {
        Err(Error::Os {
            call,
            errno: errno @ (libc::EFAULT | libc::EINVAL | libc::EPERM),
        }) => {
            let made = Mr::register(pd, memory, access | Access::LOCAL_WRITE)?;
            if !rail.needed_local_write.swap(true, Ordering::Relaxed) {
                let name = rail.name();
                let why = Error::Os { call, errno };
                tracing::info!(
                    "rail {name}: sends are registered with LOCAL_WRITE, because without it: {why}"
                );
            }
            Ok((made, None))
        }
        made => Ok((made?, None)),
    }
}

fn register_to_receive(rail: &Rail, pd: &Arc<Pd>, memory: HostMemory) -> Result<(Mr, Option<Mr>)> {
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let strict = Mr::register(pd, memory, access)?;
    if !rail.relaxed_ordering {
        return Ok((strict, None));
    }
    let relaxed = Mr::register(pd, memory, access | Access::RELAXED_ORDERING)?;
    Ok((strict, Some(relaxed)))
}

/// Packs the keys, one for each rail, in the form of a CTS entry. Only the first [`MAX_RAILS`] keys
/// are packed.
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
    use host::error::Missing;

    #[allow(unsafe_code)]
    fn registration(id: u32, range: &Range<usize>) -> Registration {
        // SAFETY: these tests neither read nor register the memory.
        let memory = unsafe { HostMemory::from_caller(range.start, range.len()) };
        Registration::new(id, memory, Purpose::Receive, 0)
    }

    #[test]
    fn others_look_registrations_up_while_one_is_made() {
        let all = Registrations::default();
        let known = all
            .share(0x1000..0x2000, Purpose::Receive, |id| {
                Ok(registration(id, &(0x1000..0x2000)))
            })
            .unwrap();
        let made = all.share(0x4000..0x8000, Purpose::Receive, |id| {
            assert!(
                all.list.try_lock().is_ok(),
                "a send that finds another lane would wait for this"
            );
            assert_eq!(all.find(known.id).unwrap().id, known.id);
            Ok(registration(id, &(0x4000..0x8000)))
        });
        assert_eq!(made.unwrap().range(), 0x4000..0x8000);
        assert!(
            all.share(0x4000..0x8000, Purpose::Receive, |_| Err(
                Missing::RelaxedOrdering.into()
            ))
            .is_err()
        );
        assert_eq!(all.in_use(), 1);
    }

    #[test]
    fn of_two_simultaneous_registrations_the_first_is_shared() {
        let all = Registrations::default();
        let range = 0x1000..0x2000;
        let mut first = None;
        let second = all.share(range.clone(), Purpose::Receive, |id| {
            let other = all.share(range.clone(), Purpose::Receive, |id| {
                Ok(registration(id, &range))
            });
            first = Some(other.unwrap());
            Ok(registration(id, &range))
        });
        let first = first.unwrap();
        let second = second.unwrap();
        assert!(
            Arc::ptr_eq(&first, &second) && Arc::strong_count(&first) == 2 && all.in_use() == 1
        );
        let third = all
            .share(range.clone(), Purpose::Receive, |_| {
                Err(Missing::RelaxedOrdering.into())
            })
            .unwrap();
        assert!(Arc::ptr_eq(&first, &third));
        drop((first, second, third));
        assert_eq!(
            (all.in_use(), all.find(0).is_none(), all.find(1).is_none()),
            (0, true, true)
        );
    }

    #[test]
    fn a_send_may_share_a_receives_registration_but_not_the_reverse() {
        let all = Registrations::default();
        let range = 0x1000..0x2000;
        let make = |id| Ok(registration(id, &range));
        let sent = all.share(range.clone(), Purpose::Send, make).unwrap();
        let received = all.share(range.clone(), Purpose::Receive, make).unwrap();
        assert!(
            !Arc::ptr_eq(&sent, &received),
            "peers may not write to memory for sends"
        );
        drop(sent);
        let again = all.share(range.clone(), Purpose::Send, |_| {
            Err(Missing::RelaxedOrdering.into())
        });
        assert!(Arc::ptr_eq(&again.unwrap(), &received));
    }
}
