//! Threads that connect queue pairs. They work in place, or hang until the simulation frees them.

use nccl_net_spark::comm::threads::{self, Work};
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Default)]
struct Threads {
    /// Number of threads that will still do their work before one hangs. `None` if no thread is to
    /// hang.
    until_one_hangs: Option<usize>,
    hung: Vec<Work>,
    /// Number of threads that have hung so far.
    total: usize,
}

static THREADS: Mutex<Threads> = Mutex::new(Threads { until_one_hangs: None, hung: Vec::new(), total: 0 });

fn lock() -> MutexGuard<'static, Threads> {
    THREADS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes this process work without real threads, so that each run repeats exactly.
pub fn replace() {
    threads::replace(|name, work| {
        let mut threads = lock();
        if name == "spark-connect" {
            threads.until_one_hangs = match threads.until_one_hangs {
                Some(0) => {
                    threads.until_one_hangs = None;
                    threads.hung.push(work);
                    threads.total += 1;
                    return;
                }
                others => others.map(|others| others - 1),
            };
        }
        drop(threads);
        work();
    });
}

/// Lets one thread hang, after `others` more threads have worked.
pub fn hang_after(others: usize) {
    lock().until_one_hangs = Some(others);
}

pub fn hang_no_more() {
    lock().until_one_hangs = None;
}

pub fn hung() -> usize {
    lock().hung.len()
}

pub fn total() -> usize {
    lock().total
}

pub fn let_return() {
    let hung = std::mem::take(&mut lock().hung);
    hung.into_iter().for_each(|work| work());
}
