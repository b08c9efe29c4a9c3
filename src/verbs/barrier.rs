//! The order of this processor's loads of memory that a device or a GPU writes, and of its stores to memory that one reads.

/// Loads behind this call see memory no older than loads before it saw.
///
/// A GPU writes a message, then a flag. NCCL loads the flag with a plain load and calls `isend`, and a small message is copied into its
/// work request by loads of this processor. Arm may satisfy those first, and send bytes from before the flag. x86 keeps loads in
/// order, so there it only holds the compiler back.
///
/// The barrier is the one that rdma-core has for memory that devices write (`udma_from_device_barrier`, util/udma_barrier.h):
/// `dmb oshld` orders against observers of the outer shareable domain too, where `fence(Acquire)` (`dmb ishld`) stops at the inner one.
#[inline(always)]
pub fn order_loads() {
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier touches no memory, register or flag. It is not declared `nomem`, so the compiler moves no access across it.
    unsafe {
        std::arch::asm!("dmb oshld", options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "aarch64"))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
}

/// Stores behind this call are seen after stores before it, by a GPU too: those before it are a message's bytes, the one behind it is their
/// flag. Arm may show the flag first; x86 keeps stores in order, so there it only holds the compiler back.
///
/// The barrier is rdma-core's for memory that devices read (`udma_to_device_barrier`, util/udma_barrier.h).
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
