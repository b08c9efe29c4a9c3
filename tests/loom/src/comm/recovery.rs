//! The service thread, and a stand-in for the recovery driver.

#[path = "driver.rs"]
pub mod driver;
#[path = "../../../../src/comm/recovery/service.rs"]
pub mod service;
