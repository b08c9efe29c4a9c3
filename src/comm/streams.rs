//! Connections between hosts that no cable joins, over TCP streams on the bootstrap's network.
//!
//! Four Sparks in a ring have no cable on the diagonal, and NCCL connects more than neighbours
//! (Tree, point-to-point). `NCCL_SPARK_RING_TCP=1` allows these connections. Without it such a
//! connection fails, and the error names both sides' rails and the setting: two hosts with mistyped
//! addresses must not run at a tenth of the speed unnoticed.
//!
//! - Streams never replace rails. The accepting side chooses streams once, and only if no pair of
//!   rails can be formed, usable or not ([`crate::flow::pairing`]), and no rail of either host has
//!   an unknown address. A connection fails if its possible pairs do not carry, or if it loses all
//!   its rails: streams never step in.
//! - Both hosts have the setting, or neither. HELLO carries it, and the accepting side refuses a
//!   peer that differs, whatever rails there are: the tuners depend on it.
//! - With the setting, the tuner makes every algorithm but Ring a last resort in communicators of
//!   more than two nodes: Ring connects only neighbours.
//!
//! # A message
//!
//! `irecv` sends a grant (sequence number, part, room, tag) on stream 0. The sender puts it into a
//! ring of CTS entries in its own memory, so sends are matched as over rails. The message is sent
//! in chunks, each behind a frame with its receive, its place and the message's size. A small
//! message is one chunk, on the stream used last. The chunks of a large message use all streams in
//! turn: each goes to the first stream that accepts it. Chunks are read straight into the
//! receiver's buffer.
//!
//! A send is done when the kernel has its bytes: NCCL needs no more to reuse the buffer. A receive
//! is done when all its bytes are in its buffer.
//!
//! NCCL's LL and LL128 read flags among the bytes while these arrive. The bytes of an optional
//! receive are read into a buffer of the plugin, and stored as whole words, the last word of each
//! 128-byte line after the others (`caller_memory`). The kernel's copy guarantees neither.
//!
//! # Files
//!
//! `send` and `recv` run only within NCCL's `isend`, `irecv` and `test`: sockets do not block,
//! there is no thread, and nothing is allocated or locked while messages succeed.
//! [`crate::flow::streams`] keeps the state of messages and checks every frame,
//! [`crate::wire::stream`] has the frames, `comm::setup::streams` makes the connection.
//!
//! # The end
//!
//! Each stream ends with BYE. A failed connection drops its streams without BYE, so that its peer
//! fails too. Nothing is sent again, and no other stream takes over: TCP has tried already. A peer
//! whose host has died is found by keep-alive, or when bytes stay unacknowledged for 60 s.

#![deny(clippy::disallowed_types)]

pub mod caller_memory;
pub mod context;
pub mod farewell;
pub mod recv;
pub mod send;
pub mod sockets;
