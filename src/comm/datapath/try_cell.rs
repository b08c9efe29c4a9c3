//! Cell whose value one thread at a time can use, without waiting. Holds a connection's data path.
//!
//! NCCL's thread uses the data path. The service thread needs the data path too, to answer a peer
//! while NCCL's thread may sleep. They share it through one atomic byte, the word. A use costs one
//! uncontended swap.
//!
//! The cell never waits for the word. If NCCL's thread finds it taken, the call returns "no request
//! yet" or "not done yet", which NCCL's interface allows for every call of a data path. If the
//! service thread finds it taken, it yields and tries again a few times. Then its next round tries
//! again.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU8, Ordering};

/// Cell whose value one thread at a time can use.
#[derive(Debug)]
pub struct TryCell<T> {
    word: AtomicU8,
    value: UnsafeCell<T>,
}

/// Free, and not used since the last [`TryCell::is_unused`] call.
pub const UNUSED: u8 = 0;
/// Free, and used since the last [`TryCell::is_unused`] call.
pub const USED: u8 = 1;
/// Held by a thread. A thread can enter only if the word is below this value: one comparison also
/// excludes [`BROKEN`].
const TAKEN: u8 = 2;
/// A holder panicked. The value may be half-changed, and is never used again.
const BROKEN: u8 = 3;

// SAFETY: the value is reached only through a `TryCellGuard`. At most one exists at a time: `take`
// acquires the word with a swap, and the guard gives it back once. So sharing a `TryCell` only
// moves the use of `T` between threads, which `T: Send` allows.
unsafe impl<T: Send> Sync for TryCell<T> {}

/// Exclusive access to the value. A drop sets the word to `AFTER` ([`USED`] or [`UNUSED`]).
///
/// `PhantomData` makes the guard `Send` and `Sync` exactly where `&mut T` is, because threads that
/// share the guard share the value. Without it, the [`TryCell`] reference would make the guard
/// `Sync` for every `T: Send`, and safe code could race on a `Cell` inside. `MutexGuard` once had
/// this bug (rust-lang/rust 41622).
#[derive(Debug)]
pub struct TryCellGuard<'a, T, const AFTER: u8 = USED>(&'a TryCell<T>, PhantomData<&'a mut T>);

impl<T> TryCell<T> {
    /// Wraps a value.
    pub fn new(value: T) -> Self {
        Self {
            word: AtomicU8::new(UNUSED),
            value: UnsafeCell::new(value),
        }
    }

    /// Takes the value. Returns `None` if another thread holds it or a holder panicked.
    #[inline(always)]
    pub fn enter(&self) -> Option<TryCellGuard<'_, T>> {
        self.take()
    }

    /// Takes the value as [`TryCell::enter`] does. The next [`TryCell::is_unused`] call ignores
    /// this use, and also every earlier use.
    pub fn visit(&self) -> Option<TryCellGuard<'_, T, UNUSED>> {
        self.take()
    }

    #[inline(always)]
    fn take<const AFTER: u8>(&self) -> Option<TryCellGuard<'_, T, AFTER>> {
        // Acquire pairs with the release in `give_back`: the last holder's writes are visible.
        match self.word.swap(TAKEN, Ordering::Acquire) {
            found @ TAKEN.. => {
                self.keep_out(found);
                None
            }
            _ => Some(TryCellGuard(self, PhantomData)),
        }
    }

    #[cold]
    fn keep_out(&self, found: u8) {
        if found == BROKEN {
            // Restore the word. Since the swap, every other thread has found it taken and stayed
            // out.
            self.word.store(BROKEN, Ordering::Relaxed);
        }
    }

    /// Returns true if the value was not used since the last call of this method, or if a holder
    /// panicked. Returns false while a thread holds the value.
    pub fn is_unused(&self) -> bool {
        // Relaxed: the result is only a hint; a caller that acts on it enters the cell.
        let found = self
            .word
            .compare_exchange(USED, UNUSED, Ordering::Relaxed, Ordering::Relaxed);
        matches!(found, Err(UNUSED | BROKEN))
    }

    /// Returns true if a holder panicked; briefly false while another thread tries to enter.
    #[cold]
    pub fn is_broken(&self) -> bool {
        // Relaxed: a broken cell stays broken, and no other read depends on this one.
        self.word.load(Ordering::Relaxed) == BROKEN
    }
}

impl<T, const AFTER: u8> TryCellGuard<'_, T, AFTER> {
    /// Gives the value back like a drop, but without the check for a panic, to save instructions.
    #[inline(always)]
    pub fn leave(self) {
        self.give_back(AFTER);
        std::mem::forget(self);
    }

    #[inline(always)]
    fn give_back(&self, word: u8) {
        // Release: the next holder's acquire makes everything visible that this holder wrote.
        self.0.word.store(word, Ordering::Release);
    }
}

impl<T, const AFTER: u8> Deref for TryCellGuard<'_, T, AFTER> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: this is the only `TryCellGuard`, since a swap took the word and the guard's drop
        // gives it back. `&self` borrows the guard, so `deref_mut` gives out no exclusive reference
        // to the value while the returned reference lives.
        unsafe { &*self.0.value.get() }
    }
}

impl<T, const AFTER: u8> DerefMut for TryCellGuard<'_, T, AFTER> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`. `&mut self` also makes this the only reference through this guard.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T, const AFTER: u8> Drop for TryCellGuard<'_, T, AFTER> {
    fn drop(&mut self) {
        self.give_back(if std::thread::panicking() {
            BROKEN
        } else {
            AFTER
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fails to compile if a guard is `Sync` but its value is not: `_` would be ambiguous.
    const _: () = {
        trait AmbiguousIfSync<A> {
            const HOLDS: () = ();
        }
        impl<T: ?Sized> AmbiguousIfSync<()> for T {}
        struct WhereSync;
        impl<T: ?Sized + Sync> AmbiguousIfSync<WhereSync> for T {}
        <TryCellGuard<'static, std::cell::Cell<u64>> as AmbiguousIfSync<_>>::HOLDS
    };

    #[test]
    fn a_shareable_value_is_shared() {
        let owner = TryCell::new(7_u64);
        let held = owner.enter().unwrap();
        let seen = std::thread::scope(|scope| scope.spawn(|| *held).join().unwrap());
        assert_eq!(seen, 7);
    }

    #[test]
    fn users_are_exclusive_and_no_update_is_lost() {
        let owner = TryCell::new(0u64);
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

    #[test]
    fn a_read_only_visitor_does_not_count_as_a_user() {
        let owner = TryCell::new(0u64);
        owner.enter().unwrap().leave();
        assert!(!owner.is_unused() && owner.is_unused());
        owner.visit().unwrap().leave();
        assert!(owner.is_unused());
    }

    #[test]
    fn a_comm_that_panicked_is_not_entered_again() {
        let owner = TryCell::new(0u64);
        let broke = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _held = owner.enter().unwrap();
            panic!("on purpose");
        }));
        assert!(broke.is_err() && owner.is_broken() && owner.is_unused());
        assert!(owner.enter().is_none() && owner.enter().is_none() && owner.is_broken());
    }
}
