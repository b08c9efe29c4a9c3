//! Counts a thread's allocations, so that a target can assert that no allocation depends on a
//! number from an unauthenticated client.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

thread_local! {
    /// The first number is the bytes that the thread has allocated and not freed. The second is the
    /// maximum of the first since the last call of [`peak`] began.
    static USE: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

fn record(delta: isize) {
    // The counter of an ending thread may be destroyed already.
    _ = USE.try_with(|now| {
        let (live, peak) = now.get();
        let live = live.wrapping_add(delta);
        now.set((live, peak.max(live)));
    });
}

// SAFETY: each method passes its arguments to the system's allocator, which keeps the contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        record(layout.size() as isize);
        // SAFETY: the caller keeps this method's contract, which is also the call's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        record(layout.size() as isize);
        // SAFETY: the caller keeps this method's contract, which is also the call's.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        record((bytes as isize).wrapping_sub(layout.size() as isize));
        // SAFETY: the caller keeps this method's contract, which is also the call's.
        unsafe { System.realloc(block, layout, bytes) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        record(-(layout.size() as isize));
        // SAFETY: the caller keeps this method's contract, which is also the call's.
        unsafe { System.dealloc(block, layout) }
    }
}

/// Runs `work`. Returns its result and the largest number of bytes that it had allocated at one
/// time.
pub fn peak<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = USE.with(|now| {
        let (live, _) = now.get();
        now.set((live, live));
        live
    });
    let result = work();
    let most = USE.with(|now| now.get().1);
    (result, most.wrapping_sub(before).max(0) as usize)
}

/// Runs `work`, which decodes `bytes` bytes from an unauthenticated client. Asserts that `work`
/// allocates no more than the decoded values need. The limit exceeds `bytes`, because a list's
/// items take more memory than their encodings, and a list may have room for twice its items.
pub fn bounded<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    let (result, most) = peak(work);
    assert!(
        most <= 16 * bytes + 1024,
        "decoding {bytes} bytes allocated {most} bytes"
    );
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_returns_the_largest_live_allocation() {
        let (_, none) = peak(|| 1 + 1);
        let (kept, most) = peak(|| {
            drop(Vec::<u8>::with_capacity(5000));
            let mut grown = Vec::<u8>::with_capacity(10);
            grown.reserve_exact(3000);
            grown
        });
        assert_eq!((none, most, kept.capacity()), (0, 5000, 3000));
    }

    #[test]
    #[should_panic(expected = "decoding 8 bytes allocated 2000 bytes")]
    fn excessive_allocation_is_reported() {
        drop(bounded(8, || Vec::<u8>::with_capacity(2000)));
    }
}
