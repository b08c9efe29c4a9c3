//! The bound on what a process has in flight for reading: the bytes of its sends that have begun and are not done, over all connections.
//!
//! [`Bound`] is the one number that all connections share; each has a [`Hold`], which is its part of that number. A send takes its
//! bytes before it begins ([`Hold::take`]) and gives them back when it is done ([`Hold::give`]). Where a rail is lost in between, the
//! send keeps them: it goes once more without asking. What a connection still holds when it fails ([`Hold::give_all`]) or is
//! dropped goes back at once, so a send that nobody finishes any more holds nothing. Nobody gives back more than it took.
//!
//! A send counts with at most the bound: one that is larger begins when nothing else is in flight, and while it runs nothing else begins.
//! An empty one counts nothing. Nobody waits here, and those who were refused have no order: who asks at the right moment begins.
//!
//! Where no bound is set there is neither a `Bound` nor a `Hold`, and the data path asks nobody.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What all sends of a process may have in flight together, and what they have.
#[derive(Debug)]
pub struct Bound {
    most_bytes: u64,
    taken_bytes: AtomicU64,
}

/// A connection's part of what is in flight. Dropped, it gives all back.
#[derive(Debug)]
pub struct Hold {
    bound: Arc<Bound>,
    bytes: u64,
}

impl Bound {
    /// A bound of `most_bytes`, at least 1, of which nothing is taken.
    pub fn new(most_bytes: u64) -> Self {
        Self { most_bytes: most_bytes.max(1), taken_bytes: AtomicU64::new(0) }
    }

    /// The bound.
    pub fn most_bytes(&self) -> u64 {
        self.most_bytes
    }

    /// What is in flight, never more than the bound; a send that is larger counts with the bound. From any thread.
    pub fn taken_bytes(&self) -> u64 {
        // Relaxed: see `take`.
        self.taken_bytes.load(Ordering::Relaxed)
    }

    #[inline(always)]
    fn charge(&self, bytes: u64) -> u64 {
        bytes.min(self.most_bytes)
    }

    /// Relaxed, here and in `give`: nothing is published by this number, and nobody reads memory on the strength of it. It
    /// is never above the bound because all changes of one atomic have one order, and each is made to the value before it. A send's
    /// write is posted after its `take` and because of it, and its bytes are given back after its completion was polled and
    /// because of that: a store that depends on a load does not become visible before it, on no processor that this runs on.
    fn take(&self, charge: u64) -> bool {
        let fits = |taken: u64| taken.checked_add(charge).filter(|sum| *sum <= self.most_bytes);
        self.taken_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }

    #[inline(always)]
    fn give(&self, charge: u64) {
        self.taken_bytes.fetch_sub(charge, Ordering::Relaxed);
    }
}

impl Hold {
    /// A connection that has nothing in flight.
    pub fn new(bound: Arc<Bound>) -> Self {
        Self { bound, bytes: 0 }
    }

    /// A send of `bytes` is to begin; whether it may. From then on it counts.
    #[must_use]
    pub fn take(&mut self, bytes: u64) -> bool {
        let charge = self.bound.charge(bytes);
        let may_begin = charge == 0 || self.bound.take(charge);
        if may_begin {
            self.bytes += charge;
        }
        may_begin
    }

    /// A send of `bytes` that had taken them is done, or did not begin after all. After [`Hold::give_all`] nothing is left to give.
    #[inline(always)]
    pub fn give(&mut self, bytes: u64) {
        let charge = self.bound.charge(bytes).min(self.bytes);
        self.bytes -= charge;
        self.bound.give(charge);
    }

    /// The connection has failed: nothing of it is in flight any more.
    #[cold]
    pub fn give_all(&mut self) {
        self.bound.give(std::mem::take(&mut self.bytes));
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.give_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_send_larger_than_the_bound_goes_alone_and_an_empty_one_always() {
        let bound = Arc::new(Bound::new(100));
        let [mut one, mut other] = [0, 1].map(|_| Hold::new(Arc::clone(&bound)));
        assert!(one.take(60) && !other.take(41) && !other.take(1000) && other.take(40) && other.take(0));
        assert!(!one.take(1) && one.take(0));
        one.give(60);
        assert!(!one.take(1000), "40 are in flight");
        other.give(40);
        assert!(one.take(1000) && !other.take(1) && other.take(0));
        assert_eq!(bound.taken_bytes(), 100);
        one.give(1000);
        assert_eq!((bound.taken_bytes(), bound.most_bytes()), (0, 100));
    }

    #[test]
    fn what_a_connection_holds_at_its_end_goes_back_once() {
        let bound = Arc::new(Bound::new(100));
        let [mut failed, mut dropped] = [0, 1].map(|_| Hold::new(Arc::clone(&bound)));
        assert!(failed.take(30) && failed.take(20) && dropped.take(50));
        failed.give_all();
        assert_eq!(bound.taken_bytes(), 50);
        // What is confirmed late gives nothing back a second time.
        failed.give(30);
        failed.give_all();
        drop(failed);
        assert_eq!(bound.taken_bytes(), 50);
        drop(dropped);
        assert_eq!(bound.taken_bytes(), 0);
    }

    #[test]
    fn many_threads_together_never_have_more_in_flight_than_the_bound() {
        let (bound, seen) = (Arc::new(Bound::new(1000)), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let (mut hold, seen) = (Hold::new(Arc::clone(&bound)), &seen);
                scope.spawn(move || {
                    for turn in 0..20_000 {
                        let bytes = 1 + (turn * 7919 + thread * 104_729) % 600;
                        if hold.take(bytes) {
                            // A count of its own, which is below what was taken at every moment.
                            assert!(seen.fetch_add(bytes, Ordering::SeqCst) + bytes <= 1000);
                            seen.fetch_sub(bytes, Ordering::SeqCst);
                            hold.give(bytes);
                        }
                    }
                });
            }
        });
        assert_eq!(bound.taken_bytes(), 0);
    }

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Take(u64),
        /// The running send at this place is done.
        Give(usize),
        Fail,
        Drop,
    }

    fn step() -> impl Strategy<Value = (usize, Step)> {
        let step = prop_oneof![
            8 => (0..300_u64).prop_map(Step::Take),
            6 => (0..64_usize).prop_map(Step::Give),
            1 => Just(Step::Fail),
            1 => Just(Step::Drop),
        ];
        (0..3_usize, step)
    }

    proptest! {
        #[test]
        fn the_number_is_what_runs_and_never_above_the_bound(most in 1..200_u64, steps in prop::collection::vec(step(), 0..200)) {
            let bound = Arc::new(Bound::new(most));
            let mut holds: Vec<Hold> = (0..3).map(|_| Hold::new(Arc::clone(&bound))).collect();
            let mut running: [Vec<u64>; 3] = Default::default();
            for (at, step) in steps {
                let before: u64 = running.iter().flatten().map(|bytes| bytes.min(&most)).sum();
                match step {
                    Step::Take(bytes) => {
                        let may_begin = holds[at].take(bytes);
                        prop_assert_eq!(may_begin, before + bytes.min(most) <= most);
                        if may_begin {
                            running[at].push(bytes);
                        }
                    }
                    Step::Give(place) if !running[at].is_empty() => {
                        let place = place % running[at].len();
                        holds[at].give(running[at].swap_remove(place));
                    }
                    Step::Give(_) => {}
                    Step::Fail => {
                        holds[at].give_all();
                        // Those that are confirmed after all say so.
                        running[at].drain(..).for_each(|bytes| holds[at].give(bytes));
                    }
                    Step::Drop => {
                        holds[at] = Hold::new(Arc::clone(&bound));
                        running[at].clear();
                    }
                }
                let runs: u64 = running.iter().flatten().map(|bytes| bytes.min(&most)).sum();
                prop_assert_eq!(bound.taken_bytes(), runs);
                prop_assert!(runs <= most);
            }
            drop(holds);
            prop_assert_eq!(bound.taken_bytes(), 0);
        }
    }
}
