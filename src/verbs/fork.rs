//! Detects that this process is the forked child of a process that used the network.
//!
//! An RDMA connection does not survive fork: the child shares the parent's queue memory and
//! doorbells, but has none of the parent's threads. A fork handler sets a flag, so the check costs
//! one load for each message. Comparing process ids would cost a system call. A child of a raw
//! `clone` is not detected. No program that loads NCCL is known to make one.

use crate::error::{Call, Error, Result};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

static FORKED: AtomicBool = AtomicBool::new(false);

/// Starts to watch for forks. Later calls do nothing.
///
/// # Errors
/// [`Error::Os`] if the C library has no memory for the handler.
pub fn watch_for_fork() -> Result<()> {
    static ONCE: Once = Once::new();
    let mut errno = 0;
    // SAFETY: the handler only stores to an atomic, which is allowed in a child of a threaded
    // process. It stays mapped until the process ends: the library is linked with `-z nodelete`.
    ONCE.call_once(|| errno = unsafe { libc::pthread_atfork(None, None, Some(in_child)) });
    if errno == 0 { Ok(()) } else { Err(Error::Os { call: Call::WatchFork, errno }) }
}

extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
}

/// Returns true in a child that was forked after [`watch_for_fork`].
#[inline]
pub fn forked() -> bool {
    // Relaxed: the child begins with one thread, which stores the flag before it starts any other.
    FORKED.load(Ordering::Relaxed)
}
