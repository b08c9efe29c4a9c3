//! Encodings of all data between the two ends of a connection, without I/O, clock or `unsafe`.
//!
//! The bytes come from a peer, or from a stranger who does not know the connection's token. So
//! every field is checked when it is read. No allocation is larger than a fixed limit, whatever
//! lengths the bytes contain.
//!
//! - Set-up: `handle` (the connection handle that NCCL passes on), `message` (the handshake),
//!   `fields` (fields that several messages have), `codec` (readers and writers of fields).
//! - Messages: `cts` (clear-to-send entries, which grant receives), `immediate` (the 32 bits of
//!   immediate data in a share's last write), `stream` (frames over TCP).
//! - Running connections: `control` (control frames and messages), `mailbox` (memory of one end
//!   that the other end writes by RDMA), `operation` (NCCL's operation, for messages).
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
pub mod operation;
pub mod stream;

/// Protocol version of this module. Two ends with different versions refuse each other.
pub const PROTOCOL_VERSION: u16 = 11;

/// Maximum number of receives in flight on a connection (NCCL's `NCCL_NET_MAX_REQUESTS`).
pub const SLOTS: usize = 32;

/// Maximum number of parts (sub-receives) of a grouped receive, as in NCCL
/// (`NCCL_NET_IB_MAX_RECVS`).
pub const PARTS: usize = 8;

/// Maximum number of rails in one connection. A CTS entry has no room for the keys of more rails.
pub const MAX_RAILS: usize = 8;

/// Maximum number of rails that one host may list in a handshake.
pub const MAX_OFFERED_RAILS: usize = 32;
