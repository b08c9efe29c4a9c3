//! C inward: the tables that NCCL looks up, and nothing that decides anything.
//!
//! - [`types`]: NCCL's network interface as Rust declares it, all versions. Whoever calls a plugin uses the same declarations.
//! - `net_tables`: the tables, one for each ABI version, all exported at once, and what turns a version's arguments into those of `calls`.
//! - `calls`: the functions behind the tables, once for all versions; `by_streams`: what they do on connections over TCP streams;
//!   `arguments`: what both are passed, checked; `properties`: what they say about a device.
//! - `tuner_tables` and `tuner_calls`: the same for NCCL's tuner, which is another plugin interface in the same library.
//! - `handles`: every conversion between NCCL's pointers and our objects; `tuner_handles`: the tuner's.
//! - `guard`: what is around every exported function, so that no panic reaches NCCL.
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
