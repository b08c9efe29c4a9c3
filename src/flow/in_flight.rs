//! The bound on a process's bytes in flight (`NCCL_SPARK_INFLIGHT_BYTES`). Bytes in flight are the
//! bytes of all sends, on all connections, that have begun and are not done.
//!
//! A send reserves its bytes before it begins ([`Hold::reserve`]) and releases them when it is done
//! ([`Hold::release`]). A send that is resent after a rail's loss keeps its reservation. A
//! connection that fails ([`Hold::release_all`]) or is dropped releases all its reserved bytes. No
//! connection releases more than it has reserved.
//!
//! A send larger than the bound reserves the whole bound. So it begins only when no other bytes are
//! in flight, and while it runs, only empty sends begin. An empty send reserves nothing. A send
//! that does not fit is refused, and does not block. There is no queue: when there is room, the
//! first send that tries again begins.
//!
//! If the setting is off, there is no [`Bound`] and no [`Hold`], and the data path reserves
//! nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The bound, and the counter of reserved bytes. All connections of the process share them.
#[derive(Debug)]
pub struct Bound {
    most_bytes: u64,
    reserved_bytes: AtomicU64,
}

/// One connection's reserved bytes. Dropping the `Hold` releases them.
#[derive(Debug)]
pub struct Hold {
    bound: Arc<Bound>,
    bytes: u64,
}

impl Bound {
    /// Returns a bound of `most_bytes`, with nothing reserved. A bound of 0 is raised to 1.
    pub fn new(most_bytes: u64) -> Self {
        Self { most_bytes: most_bytes.max(1), reserved_bytes: AtomicU64::new(0) }
    }

    /// Returns the bound, in bytes.
    pub fn most_bytes(&self) -> u64 {
        self.most_bytes
    }

    /// Returns the reserved bytes, at most the bound. May be called from any thread.
    pub fn reserved_bytes(&self) -> u64 {
        // Relaxed: see `reserve`.
        self.reserved_bytes.load(Ordering::Relaxed)
    }

    #[inline(always)]
    fn charge(&self, bytes: u64) -> u64 {
        bytes.min(self.most_bytes)
    }

    /// Reserves `charge` bytes if they fit.
    ///
    /// Relaxed suffices, here and in `release`, because the counter orders no access to other
    /// memory: its value tells no thread that memory is ready to read. The counter never exceeds
    /// the bound: all changes of one atomic have a single order, and each change applies to the
    /// value of the change before it.
    ///
    /// The counter includes every send that is really in flight. A send's write is posted only if
    /// `reserve` has returned true, so the stores that post it depend on the value that `reserve`
    /// loads from the counter. The bytes are released only if a poll has found the send's
    /// completion, so the store to the counter depends on the value that the poll loads. No
    /// supported processor makes a store visible to others before the load that it depends on has
    /// returned its value.
    fn reserve(&self, charge: u64) -> bool {
        let fits = |reserved: u64| reserved.checked_add(charge).filter(|sum| *sum <= self.most_bytes);
        self.reserved_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }

    #[inline(always)]
    fn release(&self, charge: u64) {
        self.reserved_bytes.fetch_sub(charge, Ordering::Relaxed);
    }
}

impl Hold {
    /// Returns the `Hold` of a connection that has nothing in flight.
    pub fn new(bound: Arc<Bound>) -> Self {
        Self { bound, bytes: 0 }
    }

    /// Reserves the bytes of a send that is about to begin. Returns false if they do not fit now.
    #[must_use]
    pub fn reserve(&mut self, bytes: u64) -> bool {
        let charge = self.bound.charge(bytes);
        let may_begin = charge == 0 || self.bound.reserve(charge);
        if may_begin {
            self.bytes += charge;
        }
        may_begin
    }

    /// Releases the bytes of a send that is done or did not begin. Has no effect after
    /// [`Hold::release_all`].
    #[inline(always)]
    pub fn release(&mut self, bytes: u64) {
        let charge = self.bound.charge(bytes).min(self.bytes);
        self.bytes -= charge;
        self.bound.release(charge);
    }

    /// Releases all reserved bytes at the connection's end: after the connection has failed and its
    /// queue pairs are closed, or when the connection is dropped.
    #[cold]
    pub fn release_all(&mut self) {
        self.bound.release(std::mem::take(&mut self.bytes));
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.release_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_send_above_the_limit_is_sent_alone_and_an_empty_one_always() {
        let bound = Arc::new(Bound::new(100));
        let [mut one, mut other] = [0, 1].map(|_| Hold::new(Arc::clone(&bound)));
        assert!(one.reserve(60) && !other.reserve(41) && !other.reserve(1000) && other.reserve(40) && other.reserve(0));
        assert!(!one.reserve(1) && one.reserve(0));
        one.release(60);
        assert!(!one.reserve(1000), "40 are in flight");
        other.release(40);
        assert!(one.reserve(1000) && !other.reserve(1) && other.reserve(0));
        assert_eq!(bound.reserved_bytes(), 100);
        one.release(1000);
        assert_eq!((bound.reserved_bytes(), bound.most_bytes()), (0, 100));
    }

    #[test]
    fn a_connections_bytes_in_flight_are_returned_once_at_its_end() {
        let bound = Arc::new(Bound::new(100));
        let [mut failed, mut dropped] = [0, 1].map(|_| Hold::new(Arc::clone(&bound)));
        assert!(failed.reserve(30) && failed.reserve(20) && dropped.reserve(50));
        failed.release_all();
        assert_eq!(bound.reserved_bytes(), 50);
        // A late confirmation releases nothing a second time.
        failed.release(30);
        failed.release_all();
        drop(failed);
        assert_eq!(bound.reserved_bytes(), 50);
        drop(dropped);
        assert_eq!(bound.reserved_bytes(), 0);
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
                        if hold.reserve(bytes) {
                            assert!(seen.fetch_add(bytes, Ordering::SeqCst) + bytes <= 1000);
                            seen.fetch_sub(bytes, Ordering::SeqCst);
                            hold.release(bytes);
                        }
                    }
                });
            }
        });
        assert_eq!(bound.reserved_bytes(), 0);
    }

    #[derive(Debug, Clone, Copy)]
    enum Use {
        Reserve(u64),
        Release(usize),
        Fail,
        Drop,
    }

    fn step() -> impl Strategy<Value = (usize, Use)> {
        let step = prop_oneof![
            8 => (0..300_u64).prop_map(Use::Reserve),
            6 => (0..64_usize).prop_map(Use::Release),
            1 => Just(Use::Fail),
            1 => Just(Use::Drop),
        ];
        (0..3_usize, step)
    }

    proptest! {
        #[test]
        fn the_count_equals_the_running_threads_and_stays_within_the_limit(most in 1..200_u64, steps in prop::collection::vec(step(), 0..200)) {
            let bound = Arc::new(Bound::new(most));
            let mut holds: Vec<Hold> = (0..3).map(|_| Hold::new(Arc::clone(&bound))).collect();
            let mut running: [Vec<u64>; 3] = Default::default();
            for (at, step) in steps {
                let before: u64 = running.iter().flatten().map(|bytes| bytes.min(&most)).sum();
                match step {
                    Use::Reserve(bytes) => {
                        let may_begin = holds[at].reserve(bytes);
                        prop_assert_eq!(may_begin, before + bytes.min(most) <= most);
                        if may_begin {
                            running[at].push(bytes);
                        }
                    }
                    Use::Release(place) if !running[at].is_empty() => {
                        let place = place % running[at].len();
                        holds[at].release(running[at].swap_remove(place));
                    }
                    Use::Release(_) => {}
                    Use::Fail => {
                        holds[at].release_all();
                        // The failed connection's sends may still be confirmed.
                        running[at].drain(..).for_each(|bytes| holds[at].release(bytes));
                    }
                    Use::Drop => {
                        holds[at] = Hold::new(Arc::clone(&bound));
                        running[at].clear();
                    }
                }
                let runs: u64 = running.iter().flatten().map(|bytes| bytes.min(&most)).sum();
                prop_assert_eq!(bound.reserved_bytes(), runs);
                prop_assert!(runs <= most);
            }
            drop(holds);
            prop_assert_eq!(bound.reserved_bytes(), 0);
        }
    }
}
