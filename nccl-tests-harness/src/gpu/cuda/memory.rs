//! Allocates memory of every kind through CUDA's driver.

use super::driver::{Address, Context};
use crate::gpu::kind::Kind;
use crate::net::{Heap, Memory};
use anyhow::{Context as _, Result};
use std::ffi::{c_uint, c_void};
use std::ptr::{self, NonNull};
use std::rc::Rc;

/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`: pinned for all GPUs, and mapped into
/// their address spaces. `cuMemHostRegister` uses the same numbers for these flags.
const PORTABLE_MAPPED: c_uint = 1 | 2;
/// `CU_MEM_ATTACH_GLOBAL`: any GPU may use the memory.
const ATTACH_GLOBAL: c_uint = 1;

pub(super) struct Allocation {
    kind: Kind,
    start: NonNull<c_void>,
    bytes: usize,
    /// Memory of the system's allocator, for the kinds `Malloc` and `HostRegister`. This memory is
    /// freed after `drop` has unregistered it.
    heap: Option<Heap>,
    context: Rc<Context>,
}

impl Allocation {
    pub(super) fn new(context: &Rc<Context>, kind: Kind, bytes: usize) -> Result<Self> {
        let functions = context.functions()?;
        let (mut address, mut start, mut heap): (Address, _, _) = (0, ptr::null_mut(), None);
        if matches!(kind, Kind::Malloc | Kind::HostRegister) {
            start = heap.insert(Heap::new(bytes)?).start().as_ptr();
        }
        // SAFETY: `address` and `start` are valid for writes during the calls. The heap's memory is
        // alone on its pages, and lives until `drop` has unregistered it.
        let (call, code) = unsafe {
            match kind {
                Kind::Malloc => ("malloc", 0),
                Kind::HostAlloc => (
                    "cuMemHostAlloc",
                    (functions.host_alloc)(&mut start, bytes, PORTABLE_MAPPED),
                ),
                Kind::HostRegister => (
                    "cuMemHostRegister",
                    (functions.host_register)(start, bytes, PORTABLE_MAPPED),
                ),
                Kind::Managed => (
                    "cuMemAllocManaged",
                    (functions.alloc_managed)(&mut address, bytes, ATTACH_GLOBAL),
                ),
                Kind::Device | Kind::DeviceAsCuda => {
                    ("cuMemAlloc", (functions.alloc)(&mut address, bytes))
                }
            }
        };
        context
            .check(call, code)
            .with_context(|| format!("allocate {bytes} bytes"))?;
        if start.is_null() {
            start = ptr::with_exposed_provenance_mut(usize::try_from(address)?);
        }
        let start = NonNull::new(start).with_context(|| format!("{call} returned no address"))?;
        if matches!(kind, Kind::HostAlloc | Kind::Managed) {
            // SAFETY: just allocated with that length. Memory of cuMemHostAlloc belongs to this
            // process. The CPU may use managed memory while no kernel runs, and none runs here.
            // From here on the bytes are initialised.
            unsafe { start.as_ptr().cast::<u8>().write_bytes(0, bytes) };
        }
        Ok(Self {
            kind,
            start,
            bytes,
            heap,
            context: Rc::clone(context),
        })
    }

    pub(super) fn address(&self) -> Address {
        self.start.as_ptr().addr() as Address
    }
}

// SAFETY: the allocation has this length, no other code has a pointer to it, and it is freed on
// drop. Host memory lies in this process. Device memory also has its own addresses in this process
// (CUDA's unified addressing, which every 64-bit Linux has). `new` or the heap initialises host
// memory. The CPU may use managed memory while no kernel runs. Kernels run only in `Gpu::run`, and
// in the litmus test, which has no managed memory.
unsafe impl Memory for Allocation {
    fn start(&self) -> NonNull<c_void> {
        self.start
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn is_host(&self) -> bool {
        !matches!(self.kind, Kind::Device | Kind::DeviceAsCuda)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let context = &self.context;
        let start = self.start.as_ptr();
        let address = self.address();
        match self.kind {
            Kind::Malloc => {}
            Kind::HostAlloc => {
                // SAFETY: allocated by `new` and freed once. Registrations and requests held the
                // buffer and have ended, and no kernel runs.
                context.give_back("cuMemFreeHost", |functions| unsafe {
                    (functions.host_free)(start)
                });
            }
            Kind::HostRegister => {
                // SAFETY: as above; registered by `new`, and the heap lives until after this call.
                context.give_back("cuMemHostUnregister", |functions| unsafe {
                    (functions.host_unregister)(start)
                });
            }
            Kind::Managed | Kind::Device | Kind::DeviceAsCuda => {
                // SAFETY: as for `HostAlloc`.
                context.give_back("cuMemFree", |functions| unsafe {
                    (functions.free)(address)
                });
            }
        }
        drop(self.heap.take());
    }
}
