//! The libibverbs boundary: safe types that own libibverbs' objects.
//!
//! The library is loaded at run time ([`Library::load`]). On a host without the library, the plugin
//! then gives a clear error. NCCL would silently ignore a plugin linked against it. Each object
//! keeps the objects that it depends on alive: a [`Qp`] the queue of its [`Cq`] and its [`Pd`], a
//! [`Pd`] its [`Context`]. So objects may be dropped in any order.
//!
//! Objects may move between threads. One thread at a time uses a [`Qp`] or [`Cq`], which `&mut
//! self` enforces. Operations for each message (`datapath.rs`) neither allocate nor format.
//!
//! [`OpenPorts`] passes the ports that libibverbs reports to the survey of [`host::rails`].
#![allow(unsafe_code)]
#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods
)]

mod barrier;
mod context;
mod cq;
mod datapath;
mod event;
#[cfg(test)]
mod fake;
mod fork;
mod library;
mod memory;
mod port;
mod qp;
mod survey;
mod thread_domain;

pub use barrier::{order_loads, order_stores};
pub use context::{Context, DeviceLimits, Pd};
pub use cq::{Blame, Completion, CompletionBuffer, Cq};
pub use datapath::{Remote, Write};
pub use event::AsyncEvent;
pub use fork::{OwnSocket, forked, watch_for_fork};
pub use library::{Device, Library};
pub use memory::{Access, HostMemory, Mr, Readable, Region};
pub use qp::{Path, Qp, QpCaps};
pub use survey::{OpenPorts, survey};
