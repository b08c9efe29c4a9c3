//! Registering this process's memory.

use crate::fabric::{Node, lock};
use crate::os::shm::RailMemory;
use crate::regions::Region;
use crate::status::LOCAL_WRITE;
use std::sync::atomic::Ordering;

impl Node {
    /// Registers memory in a protection domain of a device. Returns its key.
    ///
    /// # Safety
    /// The memory must stay mapped until deregistration. Until then the program must expect that
    /// peers read the memory and, if `access` allows it, write it.
    ///
    /// # Errors
    /// `EINVAL` for a range that exceeds the address space, or for an unknown device. `EFAULT` for
    /// memory that cannot be read, or for a registration without local write access while the
    /// rail's `needs_local_write` is set. `ENOMEM` for too many registrations, or as an injected
    /// fault.
    pub unsafe fn register(
        &self,
        (device, domain): (usize, u32),
        addr: usize,
        len: usize,
        access: u32,
    ) -> Result<u32, i32> {
        if addr.checked_add(len).is_none() || device >= self.devices().len() {
            return Err(libc::EINVAL);
        }
        if len > 0 && !crate::os::process::readable(addr, len) {
            return Err(libc::EFAULT);
        }
        let rail = self.rail(device);
        if RailMemory::is_due(&rail.failing_registrations) {
            return Err(libc::ENOMEM);
        }
        if access & LOCAL_WRITE == 0 && rail.needs_local_write.load(Ordering::Relaxed) != 0 {
            return Err(libc::EFAULT);
        }
        let region = Region {
            key: 0,
            device,
            domain,
            addr: addr as u64,
            bytes: len as u64,
            access,
        };
        let key = self.regions.add(region).ok_or(libc::ENOMEM)?;
        self.process().registrations.fetch_add(1, Ordering::Relaxed);
        Ok(key)
    }

    /// Ends a registration. After this, no request of a peer reads or writes the memory. Sends,
    /// writes and reads that this process has posted earlier still use it. Fails with `EINVAL` for
    /// an unknown key.
    pub fn deregister(&self, device: usize, key: u32) -> Result<(), i32> {
        // The engine checks keys and moves bytes under this lock.
        let _fence = lock(self.engine(device));
        if !self.regions.remove(key) {
            return Err(libc::EINVAL);
        }
        self.process().registrations.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }
}
