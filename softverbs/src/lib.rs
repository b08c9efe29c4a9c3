//! A software RDMA fabric between the processes of one machine.
//!
//! The library that this package builds (`softverbs-ibverbs`) replaces `libibverbs.so.1`:
//! programs that use verbs run on it without RDMA hardware, without kernel support and without
//! root. Reliable-connected queue pairs, writes with and without immediate data, sends and reads,
//! with the verbs specification's states, keys, protection domains, bounds and errors. Where
//! devices differ, rails behave as mlx5's do: queues have the sizes that it gives, requests without
//! a completion keep their places, completion queues overrun ([`completion_queue`]), and functions
//! fail, leave the bus and return ([`hotplug`]). `SOFTVERBS_NIC=soft-roce` has them behave as
//! Linux' soft-RoCE does, which forgives more: [`nic`] lists the differences.
//!
//! # How it works
//!
//! Processes of one *fabric* map one file ([`os::shm`]). It holds each queue pair's send queue. The
//! process that owns the *target* queue pair takes work requests out of the sender's queue, reads
//! the sender's memory (`process_vm_readv`), and stores it into its own in ordered 8-byte stores,
//! the last 8 of each 128 after the rest (`os::memory`): what LL and LL128 expect of a NIC. That is
//! the work of an *engine* ([`engine`]), which runs in a thread of its own (`threads`), so that a
//! write lands while the target computes, and also inside `ibv_poll_cq`, so that a process that
//! polls pays no context switch.
//!
//! # Layers
//!
//! From the bottom, each using those before it: `nic`, `pacing`, `path`, `status`, `wiring`,
//! `settings`, `profile`, `os`; `work_request`, `folder`, `regions`; `hotplug`; `control`,
//! `engine`; `fabric`; `threads`, `completion_queue`; `queue_pair`; `posting`, `serve`; `abi`.
//! Where a lower layer has to call a queue pair, it does so by a trait of its own: an engine serves
//! a `Serve`, a completion queue collects from a `SendQueue`. Only registering memory is out of
//! order: it is `unsafe`, so it is in `os`, though it uses `fabric`.
//!
//! # Time
//!
//! A rail, the PCIe link it shares and its cable are resources with a rate ([`profile`], `pacing`).
//! A piece of a message begins when it was posted and its resources are free, and completes when
//! they have carried it; a short request waits for a packet of other queue pairs at most. The
//! engine may be late, but what it is late by is not lost to the rail, so a merged device reaches
//! the sum of its rails even on a busy machine.
//!
//! # Rules for changes
//!
//! - The target's process takes requests out of the sender's queue and stores the bytes itself, in
//!   ordered 8-byte words. LL and LL128 rely on that order. `process_vm_writev` does not promise
//!   one.
//! - A completion comes after its bytes.
//! - A message begins when it was posted and its way is free, so a late engine loses nothing.
//! - A request of 512 bytes or less waits for one packet of other queue pairs, not for their
//!   queues.
//! - Everything in shared memory is an atomic, and every value is bounded when it is read, because
//!   another process wrote it.
//! - The model does not know which clock it runs on. Tests set a virtual one (`tests/core.rs`).
//! - A difference between mlx5 and soft-RoCE is one method of [`nic::Nic`] with the sources of
//!   both, and `tests/nics.rs` shows both. The default is mlx5's way, which is the strict one. What
//!   the sources of both agree on, or one leaves open, gets no method.
//!
//! # Machines and cables
//!
//! The machines of a fabric are alike. Without `wire` lines in the profile, each rail reaches the
//! rail of its name on every other machine. With them, the rails of a port reach those of the port
//! at the other end of its cable ([`wiring`], [`profile::Profile::reaches`]), whatever their names.
//! So a queue pair's peer is a machine and a device (`fabric::RailOf`), and both share the
//! resources on the way. A rail that no cable leads to has an address that does not answer
//! (`Node::look_up`).

#![deny(clippy::disallowed_methods)]

pub mod abi;
pub mod completion_queue;
pub mod control;
pub mod engine;
pub mod fabric;
mod folder;
pub mod hotplug;
pub mod nic;
pub mod os;
mod pacing;
pub mod path;
mod posting;
pub mod profile;
pub mod queue_pair;
mod regions;
mod serve;
pub mod settings;
pub mod status;
mod threads;
pub mod wiring;
pub mod work_request;
