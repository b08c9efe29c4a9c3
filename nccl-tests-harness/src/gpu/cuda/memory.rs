//! Memory by the driver, of every kind.

use super::driver::{Address, Context};
use crate::net::{Heap, Memory};
use anyhow::{Context as _, Result};
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::{self, NonNull};
use std::rc::Rc;

/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`, the same numbers for `cuMemHostRegister`: for all GPUs, and
/// mapped into their address space.
const PORTABLE_MAPPED: c_uint = 1 | 2;
/// `CU_MEM_ATTACH_GLOBAL`: any GPU may use it.
const ATTACH_GLOBAL: c_uint = 1;

/// Memory by `cuMemAlloc` or `cuMemAllocManaged`.
pub(super) struct Unified {
    start: NonNull<c_void>,
    bytes: usize,
    is_host: bool,
    context: Rc<Context>,
}

/// Memory by `cuMemHostAlloc`.
pub(super) struct Pinned {
    start: NonNull<c_void>,
    bytes: usize,
    context: Rc<Context>,
}

/// The allocator's memory after `cuMemHostRegister`.
pub(super) struct Registered {
    heap: Heap,
    context: Rc<Context>,
}

impl Unified {
    pub(super) fn device(context: &Rc<Context>, bytes: usize) -> Result<Self> {
        let mut address = 0;
        // SAFETY: `address` is valid for writes for the length of the call.
        let code = unsafe { (context.functions()?.alloc)(&mut address, bytes) };
        Self::of(context, "cuMemAlloc", code, address, bytes, false)
    }

    pub(super) fn managed(context: &Rc<Context>, bytes: usize) -> Result<Self> {
        let mut address = 0;
        // SAFETY: `address` is valid for writes for the length of the call.
        let code = unsafe { (context.functions()?.alloc_managed)(&mut address, bytes, ATTACH_GLOBAL) };
        let managed = Self::of(context, "cuMemAllocManaged", code, address, bytes, true)?;
        // SAFETY: just allocated at that length, for the processor too while no kernel runs, and none does. From here on
        // the bytes are initialised.
        unsafe { managed.start.as_ptr().cast::<u8>().write_bytes(0, bytes) };
        Ok(managed)
    }

    fn of(
        context: &Rc<Context>,
        call: &str,
        code: c_int,
        address: Address,
        bytes: usize,
        is_host: bool,
    ) -> Result<Self> {
        context.check(call, code).with_context(|| format!("allocate {bytes} bytes"))?;
        let start = ptr::with_exposed_provenance_mut(usize::try_from(address)?);
        let start = NonNull::new(start).with_context(|| format!("{call} returned no address"))?;
        Ok(Self { start, bytes, is_host, context: Rc::clone(context) })
    }

    pub(super) fn address(&self) -> Address {
        self.start.as_ptr().addr() as Address
    }
}

// SAFETY: an allocation of its own, of that length, which nobody else knows and which ends on drop. Device memory holds its
// addresses of this process (CUDA's unified addressing, which every 64-bit Linux has). Managed memory is initialised by
// `managed`, and the processor may use it while no kernel runs, which is always so outside of `Gpu::run`.
unsafe impl Memory for Unified {
    fn start(&self) -> NonNull<c_void> {
        self.start
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn is_host(&self) -> bool {
        self.is_host
    }
}

impl Drop for Unified {
    fn drop(&mut self) {
        // SAFETY: allocated by the constructors and freed this once; registrations and requests held the buffer and are
        // gone, and no kernel runs.
        self.context.give_back("cuMemFree", |functions| unsafe { (functions.free)(self.address()) });
    }
}

impl Pinned {
    pub(super) fn new(context: &Rc<Context>, bytes: usize) -> Result<Self> {
        let mut start = ptr::null_mut();
        // SAFETY: `start` is valid for writes for the length of the call.
        let code = unsafe { (context.functions()?.host_alloc)(&mut start, bytes, PORTABLE_MAPPED) };
        context.check("cuMemHostAlloc", code).with_context(|| format!("allocate {bytes} bytes"))?;
        let start = NonNull::new(start).context("cuMemHostAlloc returned no address")?;
        // SAFETY: just allocated at that length, in this process's memory. From here on the bytes are initialised.
        unsafe { start.as_ptr().cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { start, bytes, context: Rc::clone(context) })
    }
}

// SAFETY: an allocation of its own in this process's memory, initialised by `new`, which nobody else knows and which ends
// on drop.
unsafe impl Memory for Pinned {
    fn start(&self) -> NonNull<c_void> {
        self.start
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let start = self.start.as_ptr();
        // SAFETY: allocated by `new` and freed this once; else as in `Unified`.
        self.context.give_back("cuMemFreeHost", |functions| unsafe { (functions.host_free)(start) });
    }
}

impl Registered {
    pub(super) fn new(context: &Rc<Context>, bytes: usize) -> Result<Self> {
        let heap = Heap::new(bytes)?;
        // SAFETY: the heap's memory lies alone on its pages, and stays until after it is unregistered on drop.
        let code = unsafe { (context.functions()?.host_register)(heap.start().as_ptr(), bytes, PORTABLE_MAPPED) };
        context.check("cuMemHostRegister", code).with_context(|| format!("register {bytes} bytes"))?;
        Ok(Self { heap, context: Rc::clone(context) })
    }
}

// SAFETY: as the heap's, which it owns.
unsafe impl Memory for Registered {
    fn start(&self) -> NonNull<c_void> {
        self.heap.start()
    }

    fn bytes(&self) -> usize {
        self.heap.bytes()
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let start = self.heap.start().as_ptr();
        // SAFETY: registered by `new` and unregistered this once, before the heap goes; else as in `Unified`.
        self.context.give_back("cuMemHostUnregister", |functions| unsafe { (functions.host_unregister)(start) });
    }
}
