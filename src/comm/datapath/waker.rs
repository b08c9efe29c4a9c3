//! Wake-up of the service thread by a data path.

/// Wakes the service thread after a data path has lost a rail.
pub trait Waker: Send + Sync {
    /// Wakes the service thread, without waiting for it. Any thread may call this at any time.
    fn wake(&self);
}
