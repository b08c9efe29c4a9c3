//! In place of the plugin's `comm/recovery/devices.rs`: no model has a device.

use crate::comm::rail::{Process, Rail};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

/// No devices.
#[derive(Default)]
pub struct Devices;

/// News of a device.
pub enum News {
    /// Of a port.
    Port(Arc<Rail>, super::driver::PortChange),
    /// Of a completion queue.
    CompletionsLost(usize),
}

impl Devices {
    /// None.
    pub fn round(&mut self, _: &Arc<Process>, _: Instant) -> Vec<News> {
        Vec::new()
    }

    /// Nothing is asked.
    pub fn is_busy(&self) -> bool {
        false
    }

    /// None.
    pub fn event_sources(&self) -> Vec<Arc<Source>> {
        Vec::new()
    }
}

/// A device's protection domain, and its context.
pub struct Source;

impl Source {
    /// Itself.
    pub fn context(&self) -> &Self {
        self
    }

    /// None.
    pub fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
