//! How a data path wakes the service thread.

/// Wakes the service thread: a data path has found a rail lost.
pub trait Waker: Send + Sync {
    /// Returns at once. Any thread may call it, at any time.
    fn wake(&self);
}
