//! The data path of a connection: `isend`, `irecv` and `test`.
//!
//! `send` and `recv` allocate nothing, take no lock, make no system call and format nothing while messages go well; `failover` beside
//! each is what it does when a rail is lost. `path` is what recovery asks of a data path, through the `try_cell` that both threads
//! share. A `lane` is the connection's part of a rail.

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
pub mod recv;
pub mod send;
pub mod stall;
pub mod status;
pub mod test_write;
pub mod try_cell;
pub mod waker;
pub mod wr_id;
