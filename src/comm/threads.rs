//! The plugin's own threads.

use nix::sched::{sched_getaffinity, sched_setaffinity};
use nix::sys::signal::SigSet;
use nix::unistd::Pid;
use std::io;
use std::sync::mpsc::sync_channel;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Builder;

/// Starts a thread that blocks all signals and may run on all processors of the process, even if
/// the caller is pinned.
///
/// NCCL makes connections on its proxy threads. `NCCL_PROXY_CPUSET` can pin them to one core, where
/// NCCL's progress thread spins. A new thread with the caller's CPU mask would have to wait for the
/// progress thread. So this function uses the main thread's mask, which shows the processors of the
/// process: a launcher sets this mask before the process starts, and NCCL pins only its own
/// threads.
pub fn spawn(name: &'static str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let start = move || {
        if let Err(error) = SigSet::all().thread_block() {
            tracing::debug!("cannot block signals on the thread {name}: {error}");
        }
        let mask = sched_getaffinity(Pid::this());
        if let Err(error) = mask.and_then(|mask| sched_setaffinity(Pid::from_raw(0), &mask)) {
            tracing::debug!("the thread {name} keeps its caller's processors: {error}");
        }
        body();
    };
    Builder::new().name(name.to_owned()).spawn(start).map(drop)
}

/// Locks a mutex, even if a thread has panicked while it held the lock. Only for mutexes whose
/// value is intact after such a panic.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Work that [`detach`] runs on a new thread.
pub type Work = Box<dyn FnOnce() + Send>;

static REPLACEMENT: OnceLock<fn(&'static str, Work)> = OnceLock::new();

/// Makes [`detach`] pass all later work to `run`, with the thread's name, instead of starting
/// threads. A simulation uses this, because its runs must repeat exactly. `run` does the work
/// immediately, or later to simulate a thread that hangs. Calls after the first have no effect.
pub fn replace(run: fn(&'static str, Work)) {
    REPLACEMENT.get_or_init(|| run);
}

/// Runs `work` on a new thread, or on the calling thread if no thread can be started. The work may
/// block, so every wait for the thread needs a timeout.
pub fn detach(name: &'static str, work: impl FnOnce() + Send + 'static) {
    if let Some(run) = REPLACEMENT.get() {
        return run(name, Box::new(work));
    }
    // Send the work only after the thread has started, because a failed spawn drops its closure.
    let (hand, task) = sync_channel(1);
    let take = move || {
        if let Ok(work) = task.recv() {
            let work: Work = work;
            work();
        }
    };
    match spawn(name, take) {
        Ok(()) => drop(hand.send(Box::new(work))),
        Err(error) => {
            tracing::debug!(
                "cannot start thread {name} ({error}): the calling thread does the work and may block"
            );
            work();
        }
    }
}
