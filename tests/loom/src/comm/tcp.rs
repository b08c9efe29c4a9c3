//! In place of the plugin's `comm/recovery/tcp.rs`: a TCP connection by which nothing comes, and which looks whether its listener is open.

use super::driver::Driver;
use crate::comm::channel::Channel;
use crate::wire::control::ControlFrame;
use crate::wire::message::Redial;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// How a connection gets another TCP connection.
pub enum Redialling {
    /// At a listener, which says whether it is open.
    Awaits(Arc<AtomicBool>),
    /// Not at all.
    Never,
}

/// A TCP connection by which nothing comes.
pub struct Tcp(Redialling);

impl Tcp {
    /// As in the plugin.
    pub fn new(_: Channel, redialling: Redialling) -> Self {
        Self(redialling)
    }

    /// It never fails.
    pub fn is_open(&self) -> bool {
        true
    }

    /// As in the plugin.
    pub fn is_awaited(&self) -> bool {
        matches!(self.0, Redialling::Awaits(_))
    }

    /// Nothing to wait for.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        std::iter::empty()
    }

    /// Takes it.
    pub fn send(&mut self, _: ControlFrame) -> bool {
        true
    }

    /// The peer could dial now.
    pub fn tend(&mut self, _: &mut Driver, _: Instant) {
        if let Redialling::Awaits(is_open) = &self.0 {
            assert!(is_open.load(Ordering::Acquire), "the listener is closed while a connection needs it");
        }
    }

    /// Nobody dials.
    pub fn expects(&self, _: &Redial, _: &Driver) -> bool {
        false
    }

    /// As above.
    pub fn replace(&mut self, _: Channel, _: &Redial, _: &mut Driver) {}
}
