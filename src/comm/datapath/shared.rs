//! A data path that NCCL's thread uses and the service thread borrows, through one [`TryCell`].

use super::context::PathContext;
use super::path::{DataPath, Faults};
use super::recv::RecvPath;
use super::send::SendPath;
use super::try_cell::{TryCell, TryCellGuard, UNUSED};
use host::error::Usage;
use std::ops::{Deref, DerefMut};

/// Number of attempts to borrow a data path. A call of the data path takes about as long as a few
/// attempts, unless the kernel interrupts its thread.
const ATTEMPTS: usize = 64;

/// Reason why a data path is not borrowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotBorrowed {
    /// Another thread uses the data path. The service thread comes back in its next round.
    Busy,
    /// A thread has panicked in the data path, which is not used again.
    Broken,
}

/// A data path that the service thread can borrow from NCCL's thread.
pub trait SharedPath: Send + Sync {
    /// Borrows the data path if no other thread uses it, or will stop using it very soon. For
    /// [`Self::is_unused`], a borrow is no use of the data path, and a borrow hides the uses before
    /// it.
    ///
    /// # Errors
    /// The reason why the data path is not borrowed.
    fn borrow(&self) -> Result<PathGuard<'_>, NotBorrowed>;

    /// Returns true if NCCL has not used the data path since the last call of this method.
    fn is_unused(&self) -> bool;
}

/// A borrowed data path, given back when dropped.
pub enum PathGuard<'a> {
    /// Data path of a sender.
    Send(TryCellGuard<'a, SendPath, UNUSED>),
    /// Data path of a receiver.
    Recv(TryCellGuard<'a, RecvPath, UNUSED>),
}

impl Deref for PathGuard<'_> {
    type Target = dyn DataPath;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Send(path) => &**path,
            Self::Recv(path) => &**path,
        }
    }
}

impl DerefMut for PathGuard<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        match self {
            Self::Send(path) => &mut **path,
            Self::Recv(path) => &mut **path,
        }
    }
}

/// A data path that can be in a [`PathGuard`].
pub trait Shareable: DataPath + Sized {
    /// Wraps a borrowed data path.
    fn guarded(path: TryCellGuard<'_, Self, UNUSED>) -> PathGuard<'_>;
}

impl Shareable for SendPath {
    fn guarded(path: TryCellGuard<'_, Self, UNUSED>) -> PathGuard<'_> {
        PathGuard::Send(path)
    }
}

impl Shareable for RecvPath {
    fn guarded(path: TryCellGuard<'_, Self, UNUSED>) -> PathGuard<'_> {
        PathGuard::Recv(path)
    }
}

impl<P: Shareable> SharedPath for TryCell<P> {
    fn borrow(&self) -> Result<PathGuard<'_>, NotBorrowed> {
        for _ in 0..ATTEMPTS {
            if let Some(path) = self.visit() {
                return Ok(P::guarded(path));
            }
            if self.is_broken() {
                return Err(NotBorrowed::Broken);
            }
            std::thread::yield_now();
        }
        Err(NotBorrowed::Busy)
    }

    fn is_unused(&self) -> bool {
        TryCell::is_unused(self)
    }
}

/// Closes NCCL's side of a connection. If requests are running, cancels them by ending the
/// connection, and returns true: once the service thread has stopped the queue pairs, no NIC
/// accesses NCCL's buffers. If no request runs, the queue pairs stay in use for writes that the
/// peer still has to confirm.
///
/// # Errors
/// [`NotBorrowed::Busy`] while the service thread uses the data path: the caller tries again.
pub fn leave(path: &dyn SharedPath, context: &PathContext) -> Result<bool, NotBorrowed> {
    let mut path = match path.borrow() {
        Ok(path) => path,
        Err(NotBorrowed::Broken) => return Ok(false),
        Err(busy) => return Err(busy),
    };
    if path.holds_buffers() {
        tracing::debug!(
            "connection with {} closed while requests were running: they are cancelled",
            context.peer.name
        );
        path.end(context, Box::new(Usage::ClosedEarly.into()));
    }
    Ok(path.rails().status.is_ending())
}
