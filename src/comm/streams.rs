//! Connections between hosts that no cable joins: their data goes by TCP streams, over the network of the bootstrap.
//!
//! `send` and `recv` are `isend`, `irecv` and `test` of such a connection. They never wait: the sockets do not block, and nothing else runs
//! for them. They allocate nothing and take no lock while messages go well; system calls are what they are made of. What is kept of messages,
//! and what a peer may say, is `flow::streams`; what travels is `wire::stream`.
//!
//! A connection that fails drops its streams without a BYE, so that its peer fails too. Nothing is sent again, and no other stream takes
//! over: TCP has tried already.

#![deny(clippy::disallowed_types)]

pub mod caller_memory;
pub mod context;
pub mod farewell;
pub mod recv;
pub mod send;
pub mod sockets;
