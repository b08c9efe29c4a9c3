//! Threads that connect or stop queue pairs. They work in place, or hang until the simulation frees
//! them.

use nccl_net_spark::comm::threads::{self, Work};
use std::sync::{Mutex, MutexGuard, PoisonError};

struct Threads {
    connecting: Kind,
    fencing: Kind,
    /// Number of threads that have hung so far.
    total: usize,
}

/// Threads of one kind.
struct Kind {
    /// Number of threads that will still do their work before one hangs. `None` if no thread is to
    /// hang.
    until_one_hangs: Option<usize>,
    hung: Vec<Work>,
}

impl Kind {
    const NONE: Self = Self {
        until_one_hangs: None,
        hung: Vec::new(),
    };

    /// Keeps the work if this thread is the one that hangs. Otherwise returns the work.
    fn hangs(&mut self, work: Work) -> Option<Work> {
        match self.until_one_hangs {
            Some(0) => {
                self.until_one_hangs = None;
                self.hung.push(work);
                return None;
            }
            others => self.until_one_hangs = others.map(|others| others - 1),
        }
        Some(work)
    }
}

static THREADS: Mutex<Threads> = Mutex::new(Threads {
    connecting: Kind::NONE,
    fencing: Kind::NONE,
    total: 0,
});

fn lock() -> MutexGuard<'static, Threads> {
    THREADS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes this process work without real threads, so that each run repeats exactly.
pub fn replace() {
    threads::replace(|name, work| {
        let mut threads = lock();
        let work = match name {
            "spark-connect" => threads.connecting.hangs(work),
            "spark-fence" => threads.fencing.hangs(work),
            _ => Some(work),
        };
        threads.total += usize::from(work.is_none());
        drop(threads);
        if let Some(work) = work {
            work();
        }
    });
}

/// Lets a thread that connects queue pairs hang: the first after `others` more of its kind.
pub fn hang_after(others: usize) {
    lock().connecting.until_one_hangs = Some(others);
}

/// Lets a thread that stops queue pairs hang: the first after `others` more of its kind.
pub fn hang_fence_after(others: usize) {
    lock().fencing.until_one_hangs = Some(others);
}

pub fn hang_no_more() {
    let mut threads = lock();
    threads.connecting.until_one_hangs = None;
    threads.fencing.until_one_hangs = None;
}

pub fn hung() -> usize {
    lock().connecting.hung.len()
}

/// Returns the number of threads that stop queue pairs and hang. A NIC may still use these pairs.
pub fn hung_fences() -> usize {
    lock().fencing.hung.len()
}

pub fn total() -> usize {
    lock().total
}

pub fn let_return() {
    let_connects_return();
    let_fences_return();
}

pub fn let_fences_return() {
    let hung = std::mem::take(&mut lock().fencing.hung);
    hung.into_iter().for_each(|work| work());
}

pub fn let_connects_return() {
    let hung = std::mem::take(&mut lock().connecting.hung);
    hung.into_iter().for_each(|work| work());
}
