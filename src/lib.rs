//! NCCL network plugin for DGX Spark: all RoCE rails of a host as one device, over libibverbs.
//!
//! NCCL loads the library, looks up `ncclNetPlugin_v..` and `ncclTunerPlugin_v..`, and calls the
//! functions in these tables. ARCHITECTURE.md has the crates, the rules, the life of a message, and
//! the decisions with their reasons. [`proto::flow::recovery`] describes the life of a lost rail.
//!
//! - [`abi`]: the C boundary to NCCL. One table of functions for each version of NCCL's interface,
//!   all backed by one set of functions. One file converts every pointer from NCCL, and no panic
//!   leaves the library.
//! - [`clock`]: the only reader of the time.
//! - [`plugin`]: state of the process. NCCL may call `init` several times. Each call reads the
//!   settings and opens the devices and rails, unless an earlier call has succeeded. It also
//!   determines the properties that NCCL sees.
//! - [`comm`]: connections. Set-up over TCP, the data path (`isend`, `irecv`, `test`), and the
//!   service thread, which recovers lost rails. Combines [`proto`] and [`verbs`].

#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods
)]

pub mod abi;
pub mod clock;
pub mod comm;
pub mod plugin;
