//! NCCL network plugin for DGX Spark: all RoCE rails of a host as one device, over libibverbs.
//!
//! NCCL loads the library, looks up `ncclNetPlugin_v8` .. `_v12` and `ncclTunerPlugin_v4` .. `_v7`,
//! and calls what it finds there. This page is the overview; ARCHITECTURE.md has the rules, the life
//! of a message, and the decisions with their reasons. [`flow::recovery`] has the life of a lost
//! rail.
//!
//! # C inward: [`abi`]
//! One table of functions for each version of NCCL's interface, reshaped to one set of calls. Every pointer from NCCL is converted in
//! one file, and no panic leaves the library.
//!
//! # The process: [`plugin`], [`config`]
//! The first `init` reads the settings, opens the devices and takes the rails into use; later ones count. What NCCL is told about the
//! one device is decided here.
//!
//! # The host: [`rails`], [`interfaces`]
//! Which ports become rails, which of them share a PCIe link or a cable, and what they carry together. Plain data in, plain data out.
//!
//! # Connections: [`comm`]
//! Set-up over TCP, the data path (`isend`, `irecv`, `test`), and the service thread that watches over lost rails. Joins the next two.
//!
//! # State: [`flow`], [`wire`]
//! Pure: which receives are granted, which sends run, which rail carries what, where each rail of a connection stands between loss and
//! return; and how everything that goes to a peer is encoded and checked. No I/O, no clock, no lock, no `unsafe`.
//!
//! # For readers outside: [`counters`]
//! What each rail of each connection does, in memory that other processes may read.
//!
//! # C outward: [`verbs`]
//! libibverbs, loaded at run time, behind owners that keep its rules (what must outlive what, which thread may call).
//!
//! # The tuner: [`tuner`]
//! Which algorithm, protocol and channels NCCL takes for a collective, from a table. Pure as well.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::disallowed_methods)]

pub mod abi;
pub mod comm;
pub mod config;
pub mod counters;
pub mod error;
pub mod flow;
pub mod interfaces;
pub mod plugin;
pub mod rails;
pub mod tuner;
pub mod verbs;
pub mod wire;
