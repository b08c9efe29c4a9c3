//! The mailbox: the part of each end's memory that the other end writes to by RDMA.
//!
//! Both ends use the same layout. The CTS ring is in the sender's memory and written by the
//! receiver, which keeps its own copy at the same place. After the ring come a page for test
//! writes, the inbox for the peer's control frames, and the outbox with this end's last control
//! frame.

use super::control::FRAME_WORDS;
use super::cts::RING_WORDS;

/// Bytes of the whole mailbox.
pub const MAILBOX_BYTES: usize = OUTBOX_AT + FRAME_WORDS * 8;
/// Offset of the page for test writes, after the ring.
pub const PROBE_AT: usize = RING_WORDS * 8;
/// Size of the page for test writes: the largest path MTU.
pub const PROBE_BYTES: usize = 4096;
/// Offset of the inbox, where the peer's control frames arrive.
pub const INBOX_AT: usize = PROBE_AT + PROBE_BYTES;
/// Offset of the outbox, where a NIC reads this side's last control frame.
pub const OUTBOX_AT: usize = INBOX_AT + FRAME_WORDS * 8;
