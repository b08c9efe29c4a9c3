//! In place of the plugin's `verbs`: what the service thread knows of them.

/// An event of a device; there is no device.
pub struct AsyncEvent {
    /// Which.
    pub kind: u32,
    /// Of which port.
    pub port: Option<u8>,
    /// Of which completion queue.
    pub cq: Option<usize>,
}

impl AsyncEvent {
    /// The device is gone.
    pub const DEVICE_FATAL: u32 = 1;
    /// A port went down.
    pub const PORT_ERROR: u32 = 2;
    /// A port came up.
    pub const PORT_ACTIVE: u32 = 3;
    /// Addresses changed.
    pub const GID_CHANGE: u32 = 4;

    /// In words.
    pub fn text(&self) -> &'static str {
        "an event"
    }
}
