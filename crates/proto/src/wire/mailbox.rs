//! The mailbox: the part of each end's memory that the other end writes to by RDMA.
//!
//! Both ends use the same layout. First comes the ring of CTS (clear-to-send) entries. The receiver
//! of the data writes the ring in the sender's mailbox. At the same place in its own mailbox, the
//! receiver has a copy of that ring. After the ring come a page for test writes (they show whether
//! a new lane works), the inbox for the peer's control frames, and the outbox with this end's last
//! control frame.

use super::control::FRAME_WORDS;
use super::cts::RING_WORDS;

/// Size of the whole mailbox in bytes.
pub const MAILBOX_BYTES: usize = OUTBOX_AT + FRAME_WORDS * 8;
/// Offset of the page for test writes, after the ring. All offsets are in bytes.
pub const PROBE_AT: usize = RING_WORDS * 8;
/// Size of the page for test writes in bytes: the largest path MTU.
pub const PROBE_BYTES: usize = 4096;
/// Offset of the inbox, where the peer's control frames arrive.
pub const INBOX_AT: usize = PROBE_AT + PROBE_BYTES;
/// Offset of the outbox, from which this end's NICs read this end's last control frame.
pub const OUTBOX_AT: usize = INBOX_AT + FRAME_WORDS * 8;
