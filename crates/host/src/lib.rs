//! The host of `nccl-net-spark`: settings, RDMA ports and rails, network interfaces, counters.
//!
//! - [`config`]: every setting, in one table. The only reader of the environment and of settings
//!   files.
//! - [`rails`], [`port`], [`interfaces`]: the survey of this host. It selects the ports that become
//!   rails, and determines which rails share a PCIe link or a cable, and the rails' combined
//!   bandwidth. It reads sysfs and asks the kernel, but opens no RDMA device: its caller passes the
//!   ports as plain data.
//! - [`nic`]: facts of each model of NIC.
//! - [`counters`]: the work of each rail of each connection, in memory that other processes may
//!   read, and the counters of a NIC's port.
//! - [`error`]: the one error type of the plugin.
//!
//! This crate opens no connection and knows no connection's state. The plugin, the command line and
//! the tests use it.

#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods
)]

pub mod config;
pub mod counters;
pub mod error;
pub mod interfaces;
pub mod nic;
pub mod port;
pub mod rails;
