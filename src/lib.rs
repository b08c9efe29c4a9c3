//! NCCL network plugin for DGX Spark: all RoCE rails of a host as one device, over libibverbs.
//!
//! NCCL loads the library, looks up `ncclNetPlugin_v8` .. `_v12` and `ncclTunerPlugin_v4` .. `_v7`,
//! and calls the functions in these tables. ARCHITECTURE.md has the rules, the life of a message,
//! and the decisions with their reasons. [`flow::recovery`] describes the life of a lost rail.
//!
//! - [`abi`]: the C boundary to NCCL. One table of functions for each version of NCCL's interface,
//!   all backed by one set of functions. One file converts every pointer from NCCL, and no panic
//!   leaves the library.
//! - [`plugin`], [`config`]: state and settings of the process. NCCL may call `init` several times.
//!   Each call reads the settings and opens the devices and rails, unless an earlier call has
//!   succeeded. `plugin` also determines the properties that NCCL sees.
//! - [`rails`], [`interfaces`]: the host. They select the ports that become rails, and determine
//!   which rails share a PCIe link or a cable, and the rails' combined bandwidth. They read the
//!   system, but open no RDMA device: `plugin` passes them the ports as plain data.
//! - [`comm`]: connections. Set-up over TCP, the data path (`isend`, `irecv`, `test`), and the
//!   service thread, which recovers lost rails. Combines [`flow`], [`wire`] and [`verbs`].
//! - [`flow`], [`wire`]: decisions and encodings, without I/O, clock, lock or `unsafe`. [`flow`]
//!   decides which receives are granted, which sends run, and which bytes each rail carries. It
//!   tracks each rail from loss to return. [`wire`] encodes and checks all data exchanged with a
//!   peer.
//! - [`counters`]: the work of each rail of each connection, in memory that other processes may
//!   read.
//! - [`verbs`]: libibverbs, loaded at run time, behind types that enforce its rules about lifetimes
//!   and threads.
//! - [`tuner`]: chooses the algorithm, protocol and channels of NCCL's collectives from a table,
//!   without I/O.

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
