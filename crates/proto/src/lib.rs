//! The protocol of `nccl-net-spark`: encodings and decisions, without I/O.
//!
//! - [`time`]: points in time, which the caller reads from a clock.
//! - [`wire`]: encodings of everything that goes to a peer.
//! - [`flow`]: the decisions of a connection as state machines: receives, sends, striping, pairing
//!   of rails, recovery of lost rails.
//! - [`device`]: a device of this host, from its opening to its removal and return.
//! - [`backoff`]: findings about dead paths.
//! - [`tuner`]: algorithm, protocol and channels of NCCL's collectives, from a table.
//!
//! This crate does no I/O, reads no clock and no environment, starts no thread, takes no lock and
//! contains no `unsafe`. It depends on no other crate of the workspace. Functions that need the
//! time take it as an argument. So all of it runs in virtual time in tests. `clippy.toml` of this
//! crate forbids what its dependencies do not.
//!
//! The code that runs for each message allocates nothing. The plugin calls it across crates, so it
//! is marked `#[inline]` where the count of instructions (`tests/cost`) shows a gain.

#![forbid(unsafe_code)]
#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    clippy::disallowed_types
)]

pub mod backoff;
pub mod device;
pub mod flow;
pub mod time;
pub mod tuner;
pub mod wire;
