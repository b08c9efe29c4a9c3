//! The data path of a connection: `isend`, `irecv` and `test`.
//!
//! `send` and `recv` allocate nothing, take no lock, make no system call and format nothing while
//! messages succeed (`tests/quiet_data_path.rs`). The module `failover` in each handles lost rails.
//!
//! - `lane`: one rail of the connection, with its queue pairs; `wr_id`: layout of work request
//!   numbers.
//! - `path`: interface between a data path and recovery; `shared`: data path shared by two threads,
//!   through a `try_cell`; `rails`: lanes, striping and status of a data path.
//! - `mailbox`: memory that the peer writes; `test_write`: test of new queue pairs.
//! - `status`, `fault`, `stall`: errors, and requests without progress.
//! - `parts`, `context`: input from set-up; `peer`: state of the other end; `load`: traffic of
//!   other connections; `clock`; `waker`: wakes the service thread.
//!
//! # Two threads
//!
//! NCCL drives a connection's data path from one thread; `regMr` may come from another. A thread
//! that finds the `try_cell` taken reports "not yet" to NCCL. After a panic the data path is never
//! entered again: calls on the connection fail, the service thread gives it up, and closing it
//! still sends BYE.
//!
//! # Visibility of bytes
//!
//! A NIC writes the ring of CTS entries while the sender reads it. The first word of an entry is
//! loaded with acquire, and then the entry's digest decides ([`crate::wire::cts`]). Received bytes
//! are visible once their completion was polled: the NIC writes a completion after its data, and
//! the provider orders its read of the completion before later loads (`dmb oshld` on Arm).

#![deny(clippy::disallowed_types)]

pub mod clock;
pub mod context;
pub mod fault;
pub mod lane;
pub mod load;
pub mod mailbox;
pub mod parts;
pub mod path;
pub mod peer;
pub mod rails;
pub mod recv;
pub mod send;
pub mod shared;
pub mod stall;
pub mod status;
pub mod test_write;
pub mod try_cell;
pub mod waker;
pub mod wr_id;
