//! One value, one user at a time: the ownership word of a connection's data path.
//!
//! NCCL drives the data path of one connection from one thread, and a thread of ours may have to answer a peer while
//! NCCL's sleeps. They share the path through one word: an uncontended swap at entry is all that the fast path pays.
//! There is no waiting: who finds the word taken does something else and comes again, which NCCL's interface allows
//! everywhere on the data path (no request yet, not done yet).
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU8, Ordering};

/// Holds a value that one thread at a time may use.
#[derive(Debug)]
pub struct Owner<T> {
    word: AtomicU8,
    value: UnsafeCell<T>,
}

/// Nobody holds the value, and nobody has since [`Owner::is_unused`] was last asked.
const UNUSED: u8 = 0;
/// Somebody holds it.
const TAKEN: u8 = 1;
/// Nobody does any more.
const USED: u8 = 2;

// SAFETY: the value is reached only through `Held`, of which there is at most one at a time (`enter` takes the word
// with a swap and `Held`'s drop gives it back), so sharing an `Owner` only ever moves the use of `T` between threads.
unsafe impl<T: Send> Sync for Owner<T> {}

/// The right to use the value; given back when dropped.
#[derive(Debug)]
pub struct Held<'a, T>(&'a Owner<T>);

impl<T> Owner<T> {
    /// Wraps a value.
    pub fn new(value: T) -> Self {
        Self { word: AtomicU8::new(UNUSED), value: UnsafeCell::new(value) }
    }

    /// Takes the value, unless another thread holds it.
    #[inline(always)]
    pub fn enter(&self) -> Option<Held<'_, T>> {
        // Acquire: what the last holder wrote is seen here. Pairs with the release in `Held::drop`.
        if self.word.swap(TAKEN, Ordering::Acquire) == TAKEN { None } else { Some(Held(self)) }
    }

    /// Whether nobody has held the value since this was last asked.
    pub fn is_unused(&self) -> bool {
        // Relaxed: only a hint; whoever acts on it enters.
        self.word.compare_exchange(USED, UNUSED, Ordering::Relaxed, Ordering::Relaxed) == Err(UNUSED)
    }
}

impl<T> Deref for Held<'_, T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: this is the only `Held` (the word was taken by a swap and is given back when this is dropped), so
        // no exclusive reference to the value exists elsewhere while this shared one lives.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for Held<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; `&mut self` makes it the only reference from this `Held` too.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for Held<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        // Release: what this holder wrote is seen by the next one's acquire.
        self.0.word.store(USED, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_user_at_a_time_and_no_update_lost() {
        let owner = Owner::new(0u64);
        let first = owner.enter().unwrap();
        assert!(owner.enter().is_none());
        assert!(!owner.is_unused());
        drop(first);
        assert!(!owner.is_unused() && owner.is_unused());
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut done = 0;
                    while done < 10_000 {
                        match owner.enter() {
                            Some(mut value) => {
                                *value += 1;
                                done += 1;
                            }
                            None => std::hint::spin_loop(),
                        }
                    }
                });
            }
        });
        assert_eq!(*owner.enter().unwrap(), 40_000);
    }
}
