//! The plugin's sources that two threads use, with loom's atomics, cells, locks and threads.
//!
//! The files are the shipped ones, unchanged. In this workspace the names `std` and `nix` stand for
//! the crates in the folders `std/` and `nix/`, which use loom.
//! `comm` replaces the other parts that the service thread uses (a peer's channel, a recovery
//! driver, devices). `tests/` has the models, one file for each shared structure.

extern crate loom_std as std;

#[path = "../../../src/clock.rs"]
pub mod clock;
pub mod comm;
