//! The C boundary: the tables of function pointers that NCCL looks up. This module decides nothing.
//!
//! - `net_tables`: the exported table of each version of the network interface, whose types are in
//!   `crates/nccl`.
//! - `calls`: the functions to which all these tables point. `by_streams`: their variants for
//!   connections over TCP streams. `arguments`: argument checks. `properties`: the description of a
//!   device.
//! - `tuner_tables`, `tuner_calls`, `tuner_handles`: the same for NCCL's tuner interface.
//! - `handles`: every conversion between NCCL's pointers and the plugin's objects, except those of
//!   the tuner.
//! - `guard`: stops panics before they reach NCCL, logs errors and turns them into NCCL's codes.
//! - `nccl_version`: the version of the calling NCCL. [`logger`]: passes `tracing` events to NCCL.
#![allow(unsafe_code)]

mod arguments;
mod by_streams;
mod calls;
mod contexts;
mod guard;
mod handles;
pub mod logger;
mod nccl_version;
mod net_tables;
mod properties;
mod tuner_calls;
mod tuner_handles;
mod tuner_tables;

pub use net_tables::*;
use std::ops::Deref;
pub use tuner_tables::*;

/// A table that NCCL finds in the library.
#[derive(Debug)]
#[repr(transparent)]
pub struct Exported<Table>(Table);

// SAFETY: a table is constant, and points only to constants that live as long as the library (a
// name and functions). So threads cannot race.
unsafe impl<Table> Sync for Exported<Table> {}

impl<Table> Deref for Exported<Table> {
    type Target = Table;

    fn deref(&self) -> &Table {
        &self.0
    }
}
