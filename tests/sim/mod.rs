//! The simulation's parts.
#![allow(
    dead_code,
    reason = "each test program uses only a part of this module"
)]

pub mod busy;
pub mod ends;
pub mod fabric;
pub mod liar;
pub mod model;
pub mod removals;
pub mod run;
pub mod tcp;
pub mod threads;
pub mod waker;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks the process's fabric, which the first test makes. A process has one fabric and one virtual
/// clock, so the tests run one at a time.
pub fn lock_fabric() -> MutexGuard<'static, Option<fabric::Fabric>> {
    static FABRIC: Mutex<Option<fabric::Fabric>> = Mutex::new(None);
    FABRIC.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Pseudo-random numbers that depend only on a seed (splitmix64).
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ 0x5eed)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let state = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let state = (state ^ state >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (state ^ state >> 31) % limit.max(1)
    }

    /// Returns true with probability `1 / times`.
    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}
