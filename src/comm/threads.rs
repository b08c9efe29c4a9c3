//! The plugin's own threads.

use nix::sched::{sched_getaffinity, sched_setaffinity};
use nix::sys::signal::SigSet;
use nix::unistd::Pid;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread::Builder;

/// Starts a thread that takes none of the application's signals, and that may run on the processors that the
/// process may run on, whatever the caller is pinned to.
///
/// NCCL makes connections on its proxy threads. `NCCL_PROXY_CPUSET` can pin these to one core, on which NCCL's
/// progress thread spins: a thread with the caller's mask would wait for it. The process's mask is its main
/// thread's: a launcher binds the process before it starts, and NCCL pins its own threads only.
///
/// # Errors
/// The reason why there is no thread.
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

/// True after [`work_in_place`].
static IN_PLACE: AtomicBool = AtomicBool::new(false);

/// Lets [`detach`] do all later work of this process itself. For a simulation, whose runs must repeat exactly, and whose
/// devices always answer.
pub fn work_in_place() {
    IN_PLACE.store(true, Ordering::Relaxed);
}

/// Does `work` on a thread of its own, or here if no thread can be started. The work may block, so nobody waits for the
/// thread without a limit.
pub fn detach(name: &'static str, work: impl FnOnce() + Send + 'static) {
    // Relaxed: it is set before there is any work.
    if IN_PLACE.load(Ordering::Relaxed) {
        return work();
    }
    // The work is handed over to a thread that is there: a failed start would drop it.
    let (hand, task) = sync_channel(1);
    let take = move || {
        if let Ok(work) = task.recv() {
            let work: Box<dyn FnOnce() + Send> = work;
            work();
        }
    };
    match spawn(name, take) {
        Ok(()) => drop(hand.send(Box::new(work))),
        Err(error) => {
            tracing::debug!("no thread {name}, so its work is done by its caller and may block: {error}");
            work();
        }
    }
}
