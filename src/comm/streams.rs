//! Connections between hosts that no cable joins, over TCP streams on the bootstrap's network.
//!
//! Four Sparks in a ring have no cable on the diagonal, and NCCL also connects hosts that are not
//! neighbours (Tree, point-to-point). `NCCL_SPARK_RING_TCP=1` allows these connections. Without
//! this setting such a connection fails, and the error names both sides' rails and the setting: two
//! hosts with mistyped addresses must not run at a tenth of the speed unnoticed.
//!
//! - Streams never replace rails. The accepting side decides once, in the handshake. It chooses
//!   streams only if no pair of rails can be formed, not even of unusable rails
//!   ([`proto::flow::pairing`]), and the addresses of all rails of both hosts are known. A
//!   connection whose pairs do not carry data, or that loses all its rails, fails and does not
//!   change to streams.
//! - Both hosts must have the same value of the setting, because the tuners depend on it. HELLO,
//!   the first message of the handshake, contains the value. The accepting side refuses a peer with
//!   another value, even if rails can be paired.
//! - With the setting, in communicators of more than two nodes, the tuner makes every algorithm but
//!   Ring a last resort, because Ring connects only neighbours.
//!
//! # A message
//!
//! `irecv` sends one grant for each buffer of the receive (a part), on stream 0. A grant has the
//! receive's sequence number, the part, its buffer size and its tag. The sender puts the grant into
//! a ring of CTS entries in its own memory, so sends are matched in the same way as over rails. The
//! message is sent in chunks. Before each chunk comes a frame with the receive's sequence number,
//! the part, the chunk's offset and size, and the message's size. A small message is one chunk, on
//! the stream used last. The chunks of a large message use all free streams in turn. The receiver
//! reads large chunks directly into its buffer.
//!
//! A send is done when the kernel has accepted its bytes, because NCCL may then reuse the buffer. A
//! receive is done when all its bytes are in its buffer.
//!
//! NCCL's protocols LL and LL128 read flags among the bytes while the bytes arrive. NCCL marks
//! their receives as optional. The plugin reads their bytes into its own buffer first. It then
//! stores whole words, and the last word of each 128-byte line after the line's other words
//! (`caller_memory`). If the kernel copied the bytes to their destination, neither whole words nor
//! this order would be guaranteed.
//!
//! # Files
//!
//! `send` and `recv` run only within NCCL's `isend`, `irecv` and `test`: sockets do not block,
//! there is no thread, and nothing is allocated or locked while messages succeed.
//! [`proto::flow::streams`] keeps the state of messages and checks every frame,
//! [`proto::wire::stream`] encodes the frames, and `comm::setup::streams` makes the connection.
//!
//! # The end
//!
//! Each stream ends with the frame BYE. A failed connection drops its streams without BYE, so that
//! its peer fails too. Bytes of a failed stream are not resent on another stream, because TCP
//! itself has already tried. Keep-alive, or 60 s without an acknowledgement, reveals a peer whose
//! host has died.

#![deny(clippy::disallowed_types)]

pub mod caller_memory;
pub mod context;
pub mod farewell;
pub mod recv;
pub mod send;
pub mod sockets;
