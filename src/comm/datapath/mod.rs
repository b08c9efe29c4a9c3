//! The data path of a connection: `isend`, `irecv` and `test`.
//!
//! A lane is a rail within one connection. A message is cut into shares, one for each lane that
//! carries some of its bytes. A receiver grants a receive: it writes CTS (clear-to-send) entries,
//! which name the receive's buffers, into the sender's ring.
//!
//! While messages succeed, the modules `send` and `recv` do not allocate, lock, format or make
//! system calls (`tests/quiet_data_path.rs`). Their submodules `failover` handle lost rails.
//!
//! # Two threads
//!
//! NCCL calls a connection's data path from one thread, and may call `regMr` from another. The
//! service thread, which recovers lost rails, borrows the data path through a `try_cell`. If NCCL's
//! thread finds the cell taken, the call returns "not yet" to NCCL. If the service thread finds it
//! taken, it comes back in its next round. No call of a data path waits for a device: queue pairs
//! that are lost are passed to other threads (`stopping`). After a panic no thread enters
//! the data path again: calls on the connection fail, the service thread stops serving the
//! connection, and closing it still sends BYE.
//!
//! # Visibility of bytes
//!
//! A NIC writes CTS entries into the sender's ring while the sender reads the ring. The sender
//! loads the first word of an entry with acquire, and then checks the entry's digest
//! ([`proto::wire::cts`]). Received bytes are visible once their completion was polled: the NIC
//! writes the data before the completion, and the provider orders its read of the completion before
//! later loads (`dmb oshld` on Arm).

#![deny(clippy::disallowed_types)]

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
pub mod stopping;
pub mod test_write;
pub mod try_cell;
pub mod waker;
pub mod wr_id;
