//! One value, one user at a time: the ownership word of a connection's data path.
//!
//! NCCL drives the data path of one connection from one thread, and a thread of ours may have to answer a peer while
//! NCCL's sleeps. They share the path through one word: an uncontended swap at entry is all that the fast path pays.
//! There is no waiting: who finds the word taken does something else and comes again, which NCCL's interface allows
//! everywhere on the data path (no request yet, not done yet).
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU8, Ordering};

/// Holds a value that one thread at a time may use.
#[derive(Debug)]
pub struct TryCell<T> {
    word: AtomicU8,
    value: UnsafeCell<T>,
}

/// Nobody holds the value, and nobody has used it since [`TryCell::is_unused`] was last asked.
pub const UNUSED: u8 = 0;
/// Nobody does any more.
pub const USED: u8 = 1;
/// Somebody holds it. From here on nobody can take it: one comparison tells.
const TAKEN: u8 = 2;
/// A panic went through the one who held it: it may be half-changed, and nobody holds it again.
const BROKEN: u8 = 3;

// SAFETY: the value is reached only through `TryCellGuard`, of which there is at most one at a time (`enter` takes the word
// with a swap and `TryCellGuard` gives it back once), so sharing a `TryCell` only ever moves the use of `T` between threads.
unsafe impl<T: Send> Sync for TryCell<T> {}

/// The right to use the value; given back when dropped, and `AFTER` ([`USED`] or [`UNUSED`]) is what the word says then.
///
/// It is `Send` and `Sync` exactly where `&mut T` is: two threads that share it share the value. Made of the [`TryCell`] alone it would
/// be `Sync` for every `T: Send`, and safe code could race on a `Cell` in the value (rust-lang/rust 41622 was that hole in
/// `MutexGuard`).
#[derive(Debug)]
pub struct TryCellGuard<'a, T, const AFTER: u8 = USED>(&'a TryCell<T>, PhantomData<&'a mut T>);

impl<T> TryCell<T> {
    /// Wraps a value.
    pub fn new(value: T) -> Self {
        Self { word: AtomicU8::new(UNUSED), value: UnsafeCell::new(value) }
    }

    /// Takes the value, unless another thread holds it or it is broken.
    #[inline(always)]
    pub fn enter(&self) -> Option<TryCellGuard<'_, T>> {
        self.take()
    }

    /// As [`TryCell::enter`], and does not count as a use of the value.
    pub fn visit(&self) -> Option<TryCellGuard<'_, T, UNUSED>> {
        self.take()
    }

    #[inline(always)]
    fn take<const AFTER: u8>(&self) -> Option<TryCellGuard<'_, T, AFTER>> {
        // Acquire: what the last holder wrote is seen here. Pairs with the release in `TryCellGuard::give_back`.
        match self.word.swap(TAKEN, Ordering::Acquire) {
            found @ TAKEN.. => {
                self.stay_out(found);
                None
            }
            _ => Some(TryCellGuard(self, PhantomData)),
        }
    }

    #[cold]
    fn stay_out(&self, found: u8) {
        if found == BROKEN {
            // Nobody else came in or left meanwhile: they found it taken.
            self.word.store(BROKEN, Ordering::Relaxed);
        }
    }

    /// Whether nobody has used the value since this was last asked. Nobody uses a broken one.
    pub fn is_unused(&self) -> bool {
        // Relaxed: only a hint; whoever acts on it enters.
        let found = self.word.compare_exchange(USED, UNUSED, Ordering::Relaxed, Ordering::Relaxed);
        matches!(found, Err(UNUSED | BROKEN))
    }

    /// Whether a panic went through the one who held the value: nobody enters again. (For as long as it takes somebody to find that
    /// out, it may look taken.)
    #[cold]
    pub fn is_broken(&self) -> bool {
        // Relaxed: it stays so, and nothing is read on the strength of it.
        self.word.load(Ordering::Relaxed) == BROKEN
    }
}

impl<T, const AFTER: u8> TryCellGuard<'_, T, AFTER> {
    /// Gives the value back. As its drop, without the question whether a panic goes through here: for where each instruction counts.
    #[inline(always)]
    pub fn leave(self) {
        self.give_back(AFTER);
        std::mem::forget(self);
    }

    #[inline(always)]
    fn give_back(&self, word: u8) {
        // Release: what this holder wrote is seen by the next one's acquire.
        self.0.word.store(word, Ordering::Release);
    }
}

impl<T, const AFTER: u8> Deref for TryCellGuard<'_, T, AFTER> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: this is the only `TryCellGuard` (the word was taken by a swap and is given back when this is dropped), so
        // no exclusive reference to the value exists elsewhere while this shared one lives.
        unsafe { &*self.0.value.get() }
    }
}

impl<T, const AFTER: u8> DerefMut for TryCellGuard<'_, T, AFTER> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; `&mut self` makes it the only reference from this `TryCellGuard` too.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T, const AFTER: u8> Drop for TryCellGuard<'_, T, AFTER> {
    fn drop(&mut self) {
        self.give_back(if std::thread::panicking() { BROKEN } else { AFTER });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compiles only while sharing a [`TryCellGuard`] means sharing its value: `TryCellGuard` of what is not `Sync` would implement both of these
    /// traits otherwise, and `_` in `AmbiguousIfSync<_>` could be either.
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
    fn a_value_that_can_be_shared_is_shared_by_who_holds_it() {
        let owner = TryCell::new(7_u64);
        let held = owner.enter().unwrap();
        let seen = std::thread::scope(|scope| scope.spawn(|| *held).join().unwrap());
        assert_eq!(seen, 7);
    }

    #[test]
    fn one_user_at_a_time_and_no_update_lost() {
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
    fn who_only_looks_does_not_count_as_a_user() {
        let owner = TryCell::new(0u64);
        owner.enter().unwrap().leave();
        assert!(!owner.is_unused() && owner.is_unused());
        owner.visit().unwrap().leave();
        assert!(owner.is_unused());
    }

    #[test]
    fn what_a_panic_went_through_is_not_entered_again() {
        let owner = TryCell::new(0u64);
        let broke = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _held = owner.enter().unwrap();
            panic!("on purpose");
        }));
        assert!(broke.is_err() && owner.is_broken() && owner.is_unused());
        assert!(owner.enter().is_none() && owner.enter().is_none() && owner.is_broken());
    }
}
