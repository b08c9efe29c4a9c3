//! The plugin's sources where two threads meet, with loom in place of the standard library's atomics, cells, locks and threads.
//!
//! The files are the shipped ones, unchanged: `std` is the name of another crate here, and so is `nix`. What the service thread
//! works on (a peer's channel, a recovery driver, devices) is replaced in `comm`. The models are in `tests/`, a file for each place.

extern crate loom_std as std;

pub mod comm;

#[path = "../../../src/error.rs"]
pub mod error;
#[path = "../../../src/flow/mod.rs"]
pub mod flow;
#[path = "../../../src/wire/mod.rs"]
pub mod wire;
