//! Everything that travels between the two ends of a connection, as pure encodings.
//!
//! Bytes in, values out. No I/O, no clock, no `unsafe`. The bytes come from a peer, or from a
//! client that has not shown its token. So every field is checked before it becomes a value, and no
//! allocation is sized by a number that was read from them.
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

/// Protocol version of everything in this module. Two ends with different versions refuse each
/// other with a clear error.
pub const PROTOCOL_VERSION: u16 = 9;

/// Maximum number of receives in flight on one connection (`NCCL_NET_MAX_REQUESTS` in NCCL's
/// `nccl_net.h`).
pub const SLOTS: usize = 32;

/// Maximum number of sub-receives in one grouped receive, the same as in NCCL's own transport
/// (`NCCL_NET_IB_MAX_RECVS`).
pub const PARTS: usize = 8;

/// Maximum number of rails in one connection, limited by the remote keys that fit into a CTS entry.
pub const MAX_RAILS: usize = 8;

/// Rails that one host may list in a handshake.
pub const MAX_OFFERED_RAILS: usize = 32;
