//! The plugin's own threads.

use nix::sched::{sched_getaffinity, sched_setaffinity};
use nix::sys::signal::SigSet;
use nix::unistd::Pid;
use std::io;
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
