//! Replaces the plugin's `comm/recovery/devices.rs`: no model has a device.

use crate::comm::process::Process;
use crate::comm::rail::Rail;
use proto::time::Instant;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// An empty list of devices.
#[derive(Default)]
pub struct Devices;

/// A change of a device.
pub enum DeviceChange {
    /// A change of a port.
    Port(Arc<Rail>, super::driver::PortChange),
    /// The failure of a completion queue.
    CompletionsLost(usize),
}

impl Devices {
    /// Returns no changes.
    pub fn round(&mut self, _: &Arc<Process>, _: Instant) -> Vec<DeviceChange> {
        Vec::new()
    }

    /// Returns false, because no query is under way.
    pub fn is_busy(&self) -> bool {
        false
    }

    /// Returns no event sources.
    pub fn event_sources(&self) -> Vec<Arc<Source>> {
        Vec::new()
    }
}

/// Stands for a device's protection domain, and also for the device's context. No model has one.
pub struct Source;

impl Source {
    /// Returns itself.
    pub fn context(&self) -> &Self {
        self
    }

    /// Returns no descriptor.
    pub fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
