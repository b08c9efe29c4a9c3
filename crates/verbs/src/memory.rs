//! Memory that the NIC reads and writes: registrations, and regions that the plugin allocates.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::context::{Pd, note_failure};
use host::config::locked;
use host::error::{Argument, Call, Error, Internal, Missing, Result};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use verbs_sys::*;

bitflags::bitflags! {
    /// Permitted uses of registered memory (`enum ibv_access_flags`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Access: u32 {
        /// This NIC may write the memory.
        const LOCAL_WRITE = IBV_ACCESS_LOCAL_WRITE;
        /// The peer may write the memory; needs `LOCAL_WRITE`.
        const REMOTE_WRITE = IBV_ACCESS_REMOTE_WRITE;
        /// The peer may read the memory.
        const REMOTE_READ = IBV_ACCESS_REMOTE_READ;
        /// Writes may overtake each other on PCIe. A device may ignore this flag. Registering fails
        /// if the library lacks it.
        const RELAXED_ORDERING = IBV_ACCESS_RELAXED_ORDERING;
    }
}

/// Memory that NCCL, the caller of the C interface, keeps valid until it deregisters the memory.
#[derive(Clone, Copy, Debug)]
pub struct HostMemory {
    addr: usize,
    len: usize,
}

impl HostMemory {
    /// Describes `len` bytes at `addr`.
    ///
    /// # Safety
    /// While this, a copy of it or an [`Mr`] of it is in use, the memory stays mapped, and no code
    /// in this process relies on its content staying unchanged while a peer may write it.
    pub unsafe fn from_caller(addr: usize, len: usize) -> Self {
        Self { addr, len }
    }

    /// Returns the start address.
    pub fn addr(&self) -> usize {
        self.addr
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns a range of the memory for this process to read; `None` if the range is not inside.
    #[inline(always)]
    pub fn readable(&self, addr: u64, bytes: u32) -> Option<Readable<'_>> {
        let offset = (addr as usize).checked_sub(self.addr)?;
        let inside = offset.checked_add(bytes as usize)? <= self.len;
        // Mapped while in use: guaranteed by `from_caller`'s contract.
        inside.then_some(Readable {
            addr,
            bytes,
            memory: PhantomData,
        })
    }

    /// Returns a part of the memory, which is valid for as long as the memory; `None` if it is not
    /// inside. An empty part may be anywhere.
    pub fn part(&self, addr: u64, bytes: usize) -> Option<Self> {
        let addr = usize::try_from(addr).ok()?;
        let inside = addr
            .checked_sub(self.addr)
            .and_then(|offset| offset.checked_add(bytes));
        let is_inside = bytes == 0 || inside.is_some_and(|end| end <= self.len);
        is_inside.then_some(Self { addr, len: bytes })
    }

    /// Returns the memory without its first `bytes` bytes. The result is empty if the memory is not
    /// longer than that.
    pub fn without_first(&self, bytes: usize) -> Self {
        let bytes = bytes.min(self.len);
        Self {
            addr: self.addr + bytes,
            len: self.len - bytes,
        }
    }

    /// Returns the first `bytes` bytes, or the whole memory if it is shorter.
    pub fn first(&self, bytes: usize) -> Self {
        Self {
            addr: self.addr,
            len: bytes.min(self.len),
        }
    }

    /// Returns an empty range of memory.
    pub const fn none() -> Self {
        Self { addr: 0, len: 0 }
    }

    /// Returns the address range. `None` if the memory is empty, starts at address 0, or ends past
    /// the address space.
    pub fn range(&self) -> Option<Range<usize>> {
        let end = self.addr.checked_add(self.len)?;
        (self.len > 0 && self.addr > 0).then_some(self.addr..end)
    }
}

/// Bytes that this process can read now, though a peer or GPU may be writing them. Used by work
/// requests that copy the bytes into themselves (inline).
#[derive(Clone, Copy, Debug)]
pub struct Readable<'a> {
    pub(super) addr: u64,
    pub(super) bytes: u32,
    memory: PhantomData<&'a ()>,
}

impl<'a> From<&'a [u8]> for Readable<'a> {
    #[inline]
    fn from(bytes: &'a [u8]) -> Self {
        // A slice too long for the field is too long for a work request, and posting it fails.
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        Self {
            addr: bytes.as_ptr() as u64,
            bytes: length,
            memory: PhantomData,
        }
    }
}

impl<'a> From<&'a [AtomicU64; 8]> for Readable<'a> {
    #[inline(always)]
    fn from(words: &'a [AtomicU64; 8]) -> Self {
        Self {
            addr: words.as_ptr() as u64,
            bytes: size_of_val(words) as u32,
            memory: PhantomData,
        }
    }
}

/// A registration of memory with a device. It ends on drop.
pub struct Mr {
    raw: NonNull<ibv_mr>,
    lkey: u32,
    rkey: u32,
    pd: Arc<Pd>,
    /// Keeps the plugin's own region mapped until the registration has ended.
    _region: Option<Arc<Region>>,
}

// SAFETY: a registration does not change after it was made, and may be ended from any thread.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

impl Mr {
    /// Registers `memory` for the uses in `access`.
    ///
    /// # Errors
    /// [`Error::Os`] with the address, length and device. For `ENOMEM`, the text also has the limit
    /// of locked memory, which is the usual cause. [`Error::Missing`] if `access` has relaxed
    /// ordering and the library lacks it.
    pub fn register(pd: &Arc<Pd>, memory: HostMemory, access: Access) -> Result<Self> {
        Self::register_with(pd, memory, access, None)
    }

    /// Returns the key for work requests of this side.
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// Returns the key for work requests of the peer.
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    fn register_with(
        pd: &Arc<Pd>,
        memory: HostMemory,
        access: Access,
        region: Option<Arc<Region>>,
    ) -> Result<Self> {
        let library = pd.context().library;
        if access.contains(Access::RELAXED_ORDERING) && library.reg_mr_iova2.is_none() {
            // `ibv_reg_mr` would silently drop the flag.
            return Err(Missing::RelaxedOrdering.into());
        }
        let addr = memory.addr as *mut c_void;
        let raw = match library.reg_mr_iova2 {
            Some(reg_mr_iova2) if access.contains(Access::RELAXED_ORDERING) => {
                // SAFETY: the domain is alive. The memory is valid by `HostMemory`'s contract, and
                // the kernel checks it.
                unsafe {
                    reg_mr_iova2(
                        pd.raw.as_ptr(),
                        addr,
                        memory.len,
                        memory.addr as u64,
                        access.bits(),
                    )
                }
            }
            _ => {
                let access = (access - Access::RELAXED_ORDERING).bits();
                // SAFETY: as above.
                unsafe { (library.reg_mr)(pd.raw.as_ptr(), addr, memory.len, access.cast_signed()) }
            }
        };
        let raw = NonNull::new(raw).ok_or_else(|| {
            let error = std::io::Error::last_os_error();
            let HostMemory { addr, len: bytes } = memory;
            let hint = memory_hint(error.raw_os_error().unwrap_or(0));
            Error::os(
                Call::Register {
                    device: pd.context().name().to_owned(),
                    addr,
                    bytes,
                    hint,
                },
                &error,
            )
        })?;
        // SAFETY: the registration is alive, and its keys are never written.
        let (lkey, rkey) = unsafe { ((*raw.as_ptr()).lkey, (*raw.as_ptr()).rkey) };
        Ok(Self {
            raw,
            lkey,
            rkey,
            pd: Arc::clone(pd),
            _region: region,
        })
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        let context = self.pd.context();
        // SAFETY: registered by this type, and ended once.
        let status = unsafe { (context.library.dereg_mr)(self.raw.as_ptr()) };
        note_failure("ibv_dereg_mr", context.name(), status);
    }
}

/// Page-aligned, zeroed memory allocated by the plugin, which a peer's NIC may write.
pub struct Region {
    start: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: the memory is accessed only as atomics, and unmapped once.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Allocates `bytes` (at least 1), rounded up to 8-byte words.
    ///
    /// # Errors
    /// [`Error::Argument`] for 0 bytes, [`Error::Os`] if there is no memory.
    pub fn new(bytes: usize) -> Result<Arc<Self>> {
        let words = bytes.div_ceil(size_of::<AtomicU64>());
        if words == 0 {
            return Err(Argument::EmptyRegion.into());
        }
        let length = words * size_of::<AtomicU64>();
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(Error::last_os(Call::Map(length)));
        }
        // The advice leaves the mapping out of a forked child. Without it, kernels before 5.12 give
        // this process a new page on its next write after a fork, while the NIC keeps writing the
        // old page. Later kernels copy pinned pages for the child instead. So a failed call is
        // harmless there, and its status is not checked.
        // SAFETY: the mapping was just made, and the advice changes only what a child inherits.
        unsafe { libc::madvise(start, length, libc::MADV_DONTFORK) };
        let start = NonNull::new(start.cast()).ok_or(Internal::MappedAtZero)?;
        Ok(Arc::new(Self { start, words }))
    }

    /// Registers the whole region. The registration keeps the region alive.
    pub fn register(self: &Arc<Self>, pd: &Arc<Pd>, access: Access) -> Result<Mr> {
        let memory = HostMemory {
            addr: self.start.as_ptr() as usize,
            len: self.words * size_of::<AtomicU64>(),
        };
        Mr::register_with(pd, memory, access, Some(Arc::clone(self)))
    }

    /// Returns the start address of the region.
    pub fn addr(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// Returns the region's content, as atomics because a peer's NIC may write it at any time.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: mapped, zeroed, aligned, with this many words, and accessed only as atomics.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.words) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped here with this length; its registrations held an `Arc` and have ended.
        unsafe {
            libc::munmap(
                self.start.as_ptr().cast(),
                self.words * size_of::<AtomicU64>(),
            )
        };
    }
}

/// Suggests a remedy for `errno` of a call that pins memory; empty if there is none.
pub(super) fn memory_hint(errno: i32) -> String {
    // Without CAP_IPC_LOCK, a limit of 0 gives EPERM (`can_do_mlock` in Linux's mm/mlock.c).
    if ![libc::ENOMEM, libc::EPERM].contains(&errno) {
        return String::new();
    }
    let limit = locked_memory_limit();
    if errno == libc::EPERM && limit != Some(0) {
        return String::new();
    }
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    hint(limit, &meminfo)
}

fn hint(limit_bytes: Option<u64>, meminfo: &str) -> String {
    let mut hint = match limit_bytes {
        Some(bytes) => format!(
            " (locked-memory limit is {} KiB, and NCCL's buffers need {} MB on each rail: raise it with ulimit -l unlimited, or give the \
             process CAP_IPC_LOCK; in a container: docker run --ulimit memlock=-1",
            bytes / 1024,
            locked::locked_bytes(1, locked::CHANNELS[0]) / 1_000_000
        ),
        None => {
            " (locked memory is not limited: the device or the kernel has run out of something else"
                .to_owned()
        }
    };
    let cma = |name| field_kib(meminfo, name).unwrap_or(0);
    if cma("CmaTotal:") == 0 && cma("CmaFree:") > 0 {
        hint.push_str(
            "; this kernel has a CMA bug that makes pinning fail (/proc/meminfo has CmaFree but no CmaTotal): boot with kho=off, \
             or use kernel 6.17",
        );
    }
    hint.push(')');
    hint
}

/// Returns the limit in bytes; `None` if there is no limit or it cannot be read.
fn locked_memory_limit() -> Option<u64> {
    getrlimit(Resource::RLIMIT_MEMLOCK)
        .ok()
        .map(|(limit, _)| limit)
        .filter(|limit| *limit != RLIM_INFINITY)
}

fn field_kib(meminfo: &str, name: &str) -> Option<u64> {
    meminfo.lines().find_map(|line| {
        line.strip_prefix(name)?
            .trim()
            .trim_end_matches(" kB")
            .parse()
            .ok()
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn a_region_is_zeroed_page_aligned_and_large_enough() {
        let region = Region::new(4097).expect("a page and a bit");
        assert_eq!(region.addr() % 4096, 0);
        assert_eq!(region.words().len(), 513);
        assert!(
            region
                .words()
                .iter()
                .all(|word| word.load(Ordering::Relaxed) == 0)
        );
        region.words()[512].store(7, Ordering::Release);
        assert_eq!(region.words()[512].load(Ordering::Acquire), 7);
        assert!(matches!(Region::new(0), Err(Error::Argument(_))));
    }

    #[test]
    fn short_memory_gets_the_cure_and_other_errors_get_none() {
        assert_eq!(memory_hint(libc::EFAULT), "");
        assert!(memory_hint(libc::ENOMEM).starts_with(" (locked"));
        let limited = hint(Some(8 << 20), "");
        assert!(
            limited.contains("is 8192 KiB") && limited.ends_with("docker run --ulimit memlock=-1)"),
            "{limited}"
        );
        assert!(
            limited.contains("need 520 MB on each rail") && limited.contains("CAP_IPC_LOCK"),
            "{limited}"
        );
        let unlimited = hint(None, "");
        assert!(
            unlimited.contains("is not limited") && !unlimited.contains("ulimit"),
            "{unlimited}"
        );
    }

    #[test]
    fn the_kernels_cma_fault_is_recognised() {
        let healthy = "CmaTotal:         262144 kB\nCmaFree:          100000 kB\n";
        let without_cma = "CmaTotal:              0 kB\nCmaFree:               0 kB\n";
        let faulty = "MemFree: 1 kB\nCmaTotal:              0 kB\nCmaFree:          131072 kB\n";
        assert!(!hint(None, healthy).contains("kho=off"));
        assert!(!hint(None, without_cma).contains("kho=off"));
        assert!(hint(None, faulty).contains("kho=off"));
    }

    #[test]
    fn access_flags_match_the_library() {
        assert_eq!((Access::LOCAL_WRITE | Access::REMOTE_WRITE).bits(), 3);
        assert_eq!(Access::RELAXED_ORDERING.bits(), 1 << 20);
    }
}
