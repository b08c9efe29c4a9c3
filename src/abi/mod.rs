//! The C boundary: the tables that NCCL looks up. This room makes no decisions.
//!
//! - [`types`]: NCCL's network interface as Rust declares it, all versions. Callers of a plugin
//!   (the command line, `tests/cost`) use the same declarations.
//! - `net_tables`: one table for each ABI version, all of them exported. Turns the arguments of a
//!   version into those of `calls`.
//! - `calls`: the functions behind the tables, one set for all versions. `by_streams`: their
//!   variant for connections over TCP streams. `arguments`: the checks of their arguments.
//!   `properties`: the description of a device.
//! - `tuner_types`, `tuner_tables`, `tuner_calls` and `tuner_handles`: the same for NCCL's tuner,
//!   which is another plugin interface in the same library.
//! - `handles`: every conversion between NCCL's pointers and the plugin's objects.
//! - `guard`: surrounds every exported function. No panic reaches NCCL, each error is logged once,
//!   and each error becomes one of NCCL's codes.
//! - `nccl_version`: the version of the NCCL that called.
//! - [`logger`]: NCCL's logger as a `tracing` subscriber.
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
