//! The mailbox: the piece of each end's memory that the other end writes to by RDMA.
//!
//! Both ends have one of the same shape. It holds the ring of clear-to-sends (written in the sender's memory by the
//! receiver; the receiver's own copy of what it wrote stands at the same place), a page for trial writes, the inbox for the
//! peer's control frames, and the outbox with this end's last one.

use super::control::FRAME_WORDS;
use super::cts::RING_WORDS;

/// Bytes of the whole mailbox.
pub const MAILBOX_BYTES: usize = OUTBOX_AT + FRAME_WORDS * 8;
/// Where the page for trial writes is: behind the ring.
pub const PROBE_AT: usize = RING_WORDS * 8;
/// Its size: the largest path MTU.
pub const PROBE_BYTES: usize = 4096;
/// Where the peer's control frames come in.
pub const INBOX_AT: usize = PROBE_AT + PROBE_BYTES;
/// Where this side's last control frame stands, to be read by a NIC.
pub const OUTBOX_AT: usize = INBOX_AT + FRAME_WORDS * 8;
