//! A software RDMA fabric between the processes of one machine.
//!
//! This package builds `softverbs-ibverbs`, a library that replaces `libibverbs.so.1`: programs
//! that use verbs run on it without RDMA hardware, kernel support or root. It has
//! reliable-connected queue pairs, writes with and without immediate data, sends and reads, with
//! the states, keys, protection domains, bounds and errors of the verbs specification.
//!
//! A *rail* is a simulated RoCE device: one PCI function with one port. Rails behave as mlx5's
//! devices do. Queue sizes are rounded up. A request without a completion occupies the send queue
//! until a later request has a completion. Completion queues overrun ([`completion_queue`]).
//! A rail's PCI function can fail, leave the bus and come back ([`hotplug`]).
//!
//! # Mechanism
//!
//! The processes of a *fabric* all map the same file ([`os::shm`]), which contains the send queue
//! of each queue pair. An *engine* ([`engine`]) of the process that owns the *target* queue pair
//! takes work requests out of the sender's queue, reads the sender's memory (`process_vm_readv`),
//! and stores the bytes into its own memory (`os::memory`). For an RDMA read, it copies bytes of
//! its own memory to the sender's (`process_vm_writev`). The engine runs in a thread of its own
//! (`threads`), so that a write arrives while the target's program computes. It also runs inside
//! `ibv_poll_cq`, so that a process that polls needs no context switch.
//!
//! # Layers
//!
//! From the bottom, each using those before it: `counters`, `gid_table`, `pacing`, `path`,
//! `status`, `wiring`, `own_folder`, `settings`, `profile`, `os`; `work_request`, `folder`,
//! `regions`; `hotplug`; `control`, `engine`; `fabric`; `threads`, `completion_queue`;
//! `queue_pair`; `posting`, `serve`; `abi`. A lower layer calls a queue pair through a trait that
//! the lower layer defines: an engine serves a `Serve`, a completion queue collects from a
//! `SendQueue`. Three modules are out of order. The registration of memory is `unsafe`, so it is in
//! `os`, although it uses `fabric`. `settings` and `own_folder` use `os`, which has the user's id.
//!
//! # Rules for changes
//!
//! - The target's process itself stores the bytes of a write or a send, in 8-byte stores that are
//!   ordered: the last 8 of each aligned 128 bytes become visible after the rest. NCCL's protocols
//!   LL and LL128 expect this order of a NIC, and `process_vm_writev` does not promise it.
//! - A completion becomes visible only after the bytes of its request.
//! - A rail, the PCIe link it shares and its cable are resources with a rate ([`profile`],
//!   `pacing`). The time at which a resource carries a piece of a message (at most 64 KiB) is
//!   computed: the piece begins when its message is posted and its resources are free. An engine
//!   that processes the piece later still computes with that earlier time. The piece completes once
//!   its resources have carried it. So a late engine costs no bandwidth, and rails that a program
//!   uses together reach the sum of their rates even on a busy machine.
//! - A request of 512 bytes or less waits for at most one packet of other queue pairs.
//! - Everything in shared memory is an atomic, and every value is bounded or checked before its
//!   use, because another process may have written it.
//! - The model of time (`pacing`) gets the time from its caller, so tests can set a virtual clock
//!   (`tests/core.rs`).
//! - Where devices differ, rails do what mlx5 does, and a comment names the source in Linux
//!   (drivers/infiniband/hw/mlx5) or rdma-core (providers/mlx5). `tests/mlx5.rs` tests this.
//!
//! # Machines and cables
//!
//! The machines of a fabric are alike. Without `wire` lines in the profile, each rail reaches the
//! rail of the same name on every other machine. With `wire` lines, each cable joins two physical
//! ports ([`wiring::Port`]). Several rails may share a physical port, as the two functions of a
//! ConnectX-7 port do. All rails of a physical port reach all rails at the other end of its cable,
//! whatever their names ([`profile::Profile::reaches`]). So a queue pair's peer is identified by
//! machine and device (`fabric::RailOf`), and a message uses resources of both ends
//! (`Node::resources_between`). The address of a rail without a cable does not answer
//! (`Node::look_up`).

#![deny(clippy::disallowed_methods)]

pub mod abi;
pub mod completion_queue;
pub mod control;
pub mod counters;
pub mod engine;
pub mod fabric;
mod folder;
pub mod gid_table;
pub mod hotplug;
pub mod os;
pub mod own_folder;
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
