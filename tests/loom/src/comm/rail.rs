//! In place of the plugin's `comm/rail.rs`: what the service thread asks of one. No model has any.

use self::device::Presence;
use crate::error::Result;
use crate::verbs::AsyncEvent;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

/// A rail; no model has one.
pub struct Rail {
    /// What it is.
    pub info: RailInfo,
    /// Its device.
    pub device: Device,
}

/// What it is.
pub struct RailInfo {
    /// Its device.
    pub device: String,
    /// Its port.
    pub port: u8,
}

/// A device that says nothing.
pub struct Device;

impl Rail {
    /// Whether its port is up.
    pub fn is_up(&self) -> bool {
        true
    }
}

impl Device {
    /// Itself.
    pub fn source_of_events(&self) -> Option<Arc<Events>> {
        None
    }

    /// It is there.
    pub fn presence(&self) -> Presence {
        Presence::Here
    }

    /// It is there.
    pub fn glance(&self, _: u8, _: Instant) -> Presence {
        Presence::Here
    }

    /// It is there.
    pub fn fatal(&self, _: u8) -> Presence {
        Presence::Here
    }
}

/// What a device says.
pub struct Events;

impl Events {
    /// Itself.
    pub fn context(&self) -> &Self {
        self
    }

    /// None.
    pub fn async_event(&self) -> Result<Option<AsyncEvent>> {
        Ok(None)
    }

    /// None.
    pub fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// How far a device is gone.
pub mod device {
    /// No model has one that is.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Presence {
        /// It is there.
        Here,
    }
}
