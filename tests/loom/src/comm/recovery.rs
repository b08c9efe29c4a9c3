//! The service thread, and stand-ins for the devices, the recovery driver, a connection's TCP and the listener where peers dial again.

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
