//! Data paths that are sometimes busy: NCCL's thread uses them when the service thread wants to.

use super::Dice;
use nccl_net_spark::comm::datapath::shared::{NotBorrowed, PathGuard, Shareable, SharedPath};
use nccl_net_spark::comm::datapath::try_cell::TryCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A data path as the driver sees it.
pub struct Busy<P>(pub Arc<TryCell<P>>);

/// Dice, and the average number of borrows from one busy path to the next. `None`: no path is busy.
static BUSY: Mutex<Option<(Dice, u64)>> = Mutex::new(None);

fn lock() -> MutexGuard<'static, Option<(Dice, u64)>> {
    BUSY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes paths busy in every third run. Has dice of its own, so that other dice draw the same for a
/// seed as before.
pub fn begin(seed: u64) {
    let mut dice = Dice::new(seed ^ 0xb05e);
    let busy = dice.one_in(3).then(|| 2 + dice.below(6));
    *lock() = busy.map(|interval| (dice, interval));
}

impl<P: Shareable> SharedPath for Busy<P> {
    fn borrow(&self) -> Result<PathGuard<'_>, NotBorrowed> {
        let is_busy = lock()
            .as_mut()
            .is_some_and(|(dice, interval)| dice.one_in(*interval));
        if is_busy {
            Err(NotBorrowed::Busy)
        } else {
            SharedPath::borrow(&*self.0)
        }
    }

    fn is_unused(&self) -> bool {
        self.0.is_unused()
    }
}
