//! The plugin's `comm`, as far as it is modelled: three of its files, and stand-ins for what the service thread works on.

pub mod channel;
pub mod rail;
pub mod warden;

#[path = "../../../../src/comm/owner.rs"]
pub mod owner;
#[path = "../../../../src/comm/peer.rs"]
pub mod peer;
#[path = "../../../../src/comm/service.rs"]
pub mod service;
