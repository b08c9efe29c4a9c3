//! The module of `crates/host` that the models use, unchanged. The name `std` stands for the crate
//! in the folder `../std`, which uses loom.

extern crate loom_std as std;

#[path = "../../../../crates/host/src/error/mod.rs"]
pub mod error;
