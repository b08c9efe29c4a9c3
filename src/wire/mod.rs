//! Everything that travels between the two ends of a connection, as pure encodings without I/O,
//! clock or `unsafe`.
//!
//! The bytes come from a peer, or from a client that has not shown its token. So every field is
//! checked before it becomes a value, and no number in the bytes sizes an allocation.
//!
//! - Set-up: `handle` (NCCL's handle), `message` (the handshake), `fields` (parts of messages),
//!   `codec` (bounded readers).
//! - Messages: `cts` (clear-to-send entries), `immediate` (the 32 bits of a share's last write),
//!   `stream` (frames over TCP).
//! - Running connections: `control` (control frames and messages), `mailbox` (the memory that the
//!   peer writes).
//! - `ids`: the numbers that identify lanes, rails and slots.

#![forbid(unsafe_code)]

pub mod codec;
pub mod control;
pub mod cts;
pub mod fields;
pub mod handle;
pub mod ids;
pub mod immediate;
pub mod mailbox;
pub mod message;
pub mod stream;

/// Protocol version of this module. Two ends with different versions refuse each other.
pub const PROTOCOL_VERSION: u16 = 9;

/// Maximum number of receives in flight on a connection (NCCL's `NCCL_NET_MAX_REQUESTS`).
pub const SLOTS: usize = 32;

/// Maximum number of sub-receives in a grouped receive, as in NCCL (`NCCL_NET_IB_MAX_RECVS`).
pub const PARTS: usize = 8;

/// Maximum number of rails in one connection. More remote keys do not fit into a CTS entry.
pub const MAX_RAILS: usize = 8;

/// Rails that one host may list in a handshake.
pub const MAX_OFFERED_RAILS: usize = 32;
