//! In place of the plugin's `comm/rail.rs`: what the service thread asks of one. No model has any.

use crate::error::Result;
use crate::verbs::AsyncEvent;
use std::os::fd::BorrowedFd;

/// A rail; no model has one.
pub struct Rail {
    /// What it is.
    pub info: RailInfo,
    /// Its device.
    pub pd: Device,
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
