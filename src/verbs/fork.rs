//! Whether this process is a forked child of one that used the network.
//!
//! An RDMA connection does not survive fork: the child shares the parent's queue memory and doorbells, and has none of
//! its threads. Comparing process ids would cost a system call for every message; a handler that runs in the child
//! costs one load. (A child made by a raw `clone` is not seen. Nothing that loads NCCL is known to make one.)

use crate::error::{Error, Result};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

static FORKED: AtomicBool = AtomicBool::new(false);

/// Begins to watch for forks; later calls do nothing.
///
/// # Errors
/// [`Error::Os`] when the C library has no memory for the handler.
pub fn watch_for_fork() -> Result<()> {
    static ONCE: Once = Once::new();
    let mut errno = 0;
    // SAFETY: the handler only stores to an atomic, which is allowed in a child of a threaded process. It stays mapped
    // for the life of the process: the library is linked with `-z nodelete`.
    ONCE.call_once(|| errno = unsafe { libc::pthread_atfork(None, None, Some(in_child)) });
    if errno == 0 {
        Ok(())
    } else {
        Err(Error::Os { what: "cannot watch for fork() (pthread_atfork)".to_owned(), errno })
    }
}

extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
}

/// Whether this is a child, forked after [`watch_for_fork`].
#[inline]
pub fn forked() -> bool {
    // Relaxed: the child has one thread, the one that stored it.
    FORKED.load(Ordering::Relaxed)
}
