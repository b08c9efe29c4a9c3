//! A data path that NCCL's thread uses and the service thread borrows, through one [`TryCell`].

use super::path::{DataPath, Faults};
use super::peer::Peer;
use super::recv::RecvPath;
use super::send::SendPath;
use super::try_cell::{TryCell, TryCellGuard, UNUSED};
use crate::error::Usage;
use std::ops::{Deref, DerefMut};

/// A data path that the service thread can borrow from NCCL's thread.
pub trait SharedPath: Send + Sync {
    /// Borrows the data path as soon as no other thread uses it. The wait is short: a call of the
    /// data path takes microseconds and does not block. Returns `None` after a panic in the data
    /// path. For [`Self::is_unused`], a borrow is no use of the data path, and a borrow hides the
    /// uses before it.
    fn borrow(&self) -> Option<PathGuard<'_>>;

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
    fn borrow(&self) -> Option<PathGuard<'_>> {
        loop {
            if let Some(path) = self.visit() {
                return Some(P::guarded(path));
            }
            if self.is_broken() {
                return None;
            }
            std::thread::yield_now();
        }
    }

    fn is_unused(&self) -> bool {
        TryCell::is_unused(self)
    }
}

/// Closes NCCL's side of a connection. If requests are running, cancels them by ending the
/// connection, so that no NIC accesses NCCL's buffers afterwards. If no request runs, the queue
/// pairs stay open for writes that the peer still has to confirm.
pub fn leave(path: &dyn SharedPath, peer: &Peer) {
    let Some(mut path) = path.borrow() else { return };
    if path.holds_buffers() {
        tracing::debug!("connection with {} closed while requests were running: they are cancelled", peer.name);
        path.end(Box::new(Usage::ClosedEarly.into()));
    }
}
