//! Memory barriers between this processor and the devices or GPUs that share its memory.

/// Orders loads: loads after this call see memory at least as new as loads before it.
///
/// A GPU writes a message, then a flag. NCCL loads the flag with a plain load and calls `isend`,
/// which copies a small message into its work request with loads of this processor. Arm may execute
/// the loads of the copy before the load of the flag, and would then send old bytes. x86 keeps
/// loads in order, so there the call is only a compiler barrier.
///
/// rdma-core uses the same barrier for memory that devices write (`udma_from_device_barrier`,
/// util/udma_barrier.h). `dmb oshld` also covers observers in the outer shareable domain;
/// `fence(Acquire)` (`dmb ishld`) covers only the inner one.
#[inline(always)]
pub fn order_loads() {
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier changes no memory, register or flag. Without `nomem`, the compiler moves no
    // memory access across it.
    unsafe {
        std::arch::asm!("dmb oshld", options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "aarch64"))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
}

/// Orders stores, also for a GPU: stores before this call (a message's bytes) become visible before
/// stores after it (the message's flag). Arm may make the flag visible first. x86 keeps stores in
/// order, so there the call is only a compiler barrier. rdma-core uses the same barrier for memory
/// that devices read (`udma_to_device_barrier`, util/udma_barrier.h).
#[inline(always)]
pub fn order_stores() {
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as in `order_loads`.
    unsafe {
        std::arch::asm!("dmb oshst", options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "aarch64"))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
}
