//! Replaces the plugin's `comm/recovery/redial.rs`: a listener that no peer dials.

use super::tcp::Redialling;
use crate::comm::channel::Channel;
use proto::time::Instant;
use proto::wire::message::Redial;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The access to the listener that the code for connection set-up has.
#[derive(Default)]
pub struct RedialHandle {
    at: Option<Arc<AtomicBool>>,
    opened: Option<RedialListener>,
}

/// The listener itself, which the service thread owns. It is open until it is dropped.
pub struct RedialListener(Arc<AtomicBool>);

impl RedialHandle {
    /// Opens the listener unless it is open already. Returns a [`Redialling`] for this listener.
    pub fn prepare_redial(&mut self) -> Redialling {
        let is_open = self.at.get_or_insert_with(|| {
            let is_open = Arc::new(AtomicBool::new(true));
            self.opened = Some(RedialListener(Arc::clone(&is_open)));
            is_open
        });
        Redialling::Awaits(Arc::clone(is_open))
    }

    /// Takes the listener if it was opened since the last call.
    pub fn take_opened(&mut self) -> Option<RedialListener> {
        self.opened.take()
    }

    /// Closes the listener.
    pub fn close(&mut self) {
        (self.at, self.opened) = (None, None);
    }
}

impl RedialListener {
    /// Returns no connections, because no peer dials.
    pub fn poll(&mut self, _: impl Fn(&Redial) -> bool, _: Instant) -> Vec<(Channel, Redial)> {
        Vec::new()
    }
}

impl Drop for RedialListener {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.0.store(false, Ordering::Release);
        }
    }
}
