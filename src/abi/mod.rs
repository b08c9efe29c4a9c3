//! C inward: the tables that NCCL looks up, and nothing that decides anything.
//!
//! - `net_v8` .. `net_v12`: one table for each ABI version, all exported at once; NCCL takes the newest that it knows.
//!   These files only reshape arguments.
//! - `calls`: the functions behind the tables, once for all versions.
//! - `tuner_v4` .. `tuner_v6` and `tuner_calls`: the same for NCCL's tuner, which is another plugin interface in the same library.
//! - [`types`]: the C types that the versions share.
//! - `handles`: every conversion between NCCL's pointers and our objects; `tuner_handles`: the tuner's.
//! - `guard`: what stands around every exported function, so that no panic reaches NCCL.
//! - [`logger`]: NCCL's logger as a `tracing` subscriber.
#![allow(unsafe_code)]

mod calls;
mod guard;
mod handles;
pub mod logger;
mod nccl_version;
mod net_v10;
mod net_v11;
mod net_v12;
mod net_v8;
mod net_v9;
mod tuner_calls;
mod tuner_handles;
mod tuner_v4;
mod tuner_v5;
mod tuner_v6;
pub mod types;

pub use net_v8::{NetV8, ncclNetPlugin_v8};
pub use net_v9::{NetV9, ncclNetPlugin_v9};
pub use net_v10::{NetV10, ncclNetPlugin_v10};
pub use net_v11::{NetV11, ncclNetPlugin_v11};
pub use net_v12::{NetV12, ncclNetPlugin_v12};
pub use tuner_v4::{TunerV4, ncclTunerPlugin_v4};
pub use tuner_v5::{TunerV5, ncclTunerPlugin_v5};
pub use tuner_v6::{TunerV6, ncclTunerPlugin_v6};
