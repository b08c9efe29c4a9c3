//! Memory that this process has registered, by key.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{PoisonError, RwLock};

#[derive(Debug, Default)]
pub(crate) struct Regions(RwLock<Vec<Option<Region>>>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Region {
    /// The key, which is both the local and the remote key.
    pub(crate) key: u32,
    pub(crate) device: usize,
    pub(crate) domain: u32,
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
    pub(crate) access: u32,
}

impl Regions {
    /// Adds a region and returns its new key; `None` if there are 2^18 regions already. The key's
    /// lower 14 bits are a counter, so that keys are not reused soon. The other bits are the
    /// region's index.
    pub(crate) fn add(&self, region: Region) -> Option<u32> {
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let place = match all.iter().position(Option::is_none) {
            Some(place) => place,
            None if all.len() < 1 << 18 => {
                all.push(None);
                all.len() - 1
            }
            None => return None,
        };
        static COUNT: AtomicU32 = AtomicU32::new(1);
        let key = (place as u32) << 14 | (COUNT.fetch_add(1, Ordering::Relaxed) & 0x3fff);
        all[place] = Some(Region { key, ..region });
        Some(key)
    }

    pub(crate) fn remove(&self, key: u32) -> bool {
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        match all.get_mut((key >> 14) as usize) {
            Some(place) if place.is_some_and(|region| region.key == key) => place.take().is_some(),
            _ => false,
        }
    }

    /// True if the key is of this device and protection domain, covers the bytes, and allows every
    /// kind of access in `access`.
    pub(crate) fn allows(
        &self,
        key: u32,
        (device, domain): (usize, u32),
        addr: u64,
        bytes: u64,
        access: u32,
    ) -> bool {
        let all = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let found = all
            .get((key >> 14) as usize)
            .copied()
            .flatten()
            .filter(|r| r.key == key && (r.device, r.domain) == (device, domain));
        found.is_some_and(|region| {
            let end = addr.checked_add(bytes);
            region.access & access == access
                && addr >= region.addr
                && end.is_some_and(|end| end <= region.addr + region.bytes)
        })
    }
}
