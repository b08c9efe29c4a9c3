//! The C boundary: the tables of function pointers that NCCL looks up. This module decides nothing.
//!
//! - [`types`]: NCCL's network interface, all versions. The command line and `tests/cost` use it.
//! - `net_tables`: the exported table of each interface version.
//! - `calls`: the functions to which all these tables point. `by_streams`: their variants for
//!   connections over TCP streams. `arguments`: argument checks. `properties`: the description of a
//!   device.
//! - `tuner_types`, `tuner_tables`, `tuner_calls`, `tuner_handles`: the same for NCCL's tuner
//!   interface.
//! - `handles`: every conversion between NCCL's pointers and the plugin's objects, except those of
//!   the tuner.
//! - `guard`: stops panics before they reach NCCL, logs errors and turns them into NCCL's codes.
//! - `nccl_version`: the version of the calling NCCL. [`logger`]: passes `tracing` events to NCCL.
#![allow(unsafe_code)]

mod arguments;
mod by_streams;
mod calls;
mod guard;
mod handles;
pub mod logger;
mod nccl_version;
mod net_tables;
mod properties;
mod tuner_calls;
mod tuner_handles;
mod tuner_tables;
mod tuner_types;
pub mod types;

pub use net_tables::*;
pub use tuner_tables::*;
pub use tuner_types::*;
