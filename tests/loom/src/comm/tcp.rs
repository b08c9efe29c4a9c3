//! Replaces the plugin's `comm/recovery/tcp.rs`: a TCP connection that checks its listener.

use super::driver::Driver;
use crate::comm::channel::Channel;
use proto::time::Instant;
use proto::wire::control::ControlFrame;
use proto::wire::message::Redial;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The source from which a plugin connection gets its next TCP connection.
pub enum Redialling {
    /// A listener that the peer dials. The flag is true while the listener is open.
    Awaits(Arc<AtomicBool>),
    /// There is no source, so a lost TCP connection is not replaced.
    Never,
}

/// A TCP connection on which nothing arrives.
pub struct Tcp(Redialling);

impl Tcp {
    /// Creates a TCP connection. The channel is ignored.
    pub fn new(_: Channel, redialling: Redialling) -> Self {
        Self(redialling)
    }

    /// Returns true, because the TCP connection never fails.
    pub fn is_open(&self) -> bool {
        true
    }

    /// True if the peer may dial again.
    pub fn is_awaited(&self) -> bool {
        matches!(self.0, Redialling::Awaits(_))
    }

    /// Returns no sockets, because nothing arrives.
    pub fn sockets(&self) -> impl Iterator<Item = UnixStream> {
        std::iter::empty()
    }

    /// Accepts a frame, and discards it.
    pub fn send(&mut self, _: ControlFrame) -> bool {
        true
    }

    /// Checks that the listener is open, if there is one, so that the peer could dial now.
    pub fn poll(&mut self, _: &mut Driver, _: Instant) {
        if let Redialling::Awaits(is_open) = &self.0 {
            assert!(
                is_open.load(Ordering::Acquire),
                "the listener is closed while a connection needs it"
            );
        }
    }

    /// Returns false, because no peer dials.
    pub fn expects(&self, _: &Redial, _: &Driver) -> bool {
        false
    }

    /// Does nothing, because no peer dials.
    pub fn replace(&mut self, _: Channel, _: &Redial, _: &mut Driver) {}
}
