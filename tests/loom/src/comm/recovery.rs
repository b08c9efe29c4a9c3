//! The service thread, and replacements for the parts that it drives.

#[path = "devices.rs"]
pub mod devices;
#[path = "driver.rs"]
pub mod driver;
#[path = "redial.rs"]
pub mod redial;
#[path = "../../../../src/comm/recovery/service.rs"]
pub mod service;
#[path = "tcp.rs"]
pub mod tcp;
