//! Connections: combines the I/O-free state of `flow` with the queue pairs of `verbs`.
//!
//! Each room imports only from those below it:
//!
//! | room | content |
//! |---|---|
//! | `host` | the network of this host, as NCCL uses it |
//! | `setup` | makes connections: the handshake of both sides, over a TCP `channel` |
//! | `endpoint` | one end of a connection, as NCCL uses it |
//! | `recovery` | the service thread, and the driver for the actions of `flow::recovery` |
//! | `process` | state shared by all connections, and the CPU latency request while there are any |
//! | `streams` | connections by TCP, for peers that no cable joins |
//! | `datapath` | `isend`, `irecv` and `test` |
//! | `rail` | a rail of this host: registrations, quality of its paths, back-off for dead paths |
//! | `unauthenticated` | connections at a TCP port that have not sent a token |
//! | `channel` | the bootstrap's TCP connection |
//! | `log` | one line for an event that affects many connections |
//! | `descriptors` | shortage of file descriptors |
//! | `threads` | starts the plugin's own threads |
//!
//! While messages run normally, `datapath` does not allocate, lock, format or make system calls.

pub mod channel;
pub mod datapath;
pub mod descriptors;
pub mod endpoint;
pub mod host;
pub mod log;
pub mod process;
pub mod rail;
pub mod recovery;
pub mod setup;
pub mod streams;
pub mod threads;
pub mod unauthenticated;

pub use crate::verbs::HostMemory;
pub use datapath::recv::RecvPart;
pub use endpoint::{RailRecvComm, RailSendComm, RecvComm, SendComm, StreamRecvComm, StreamSendComm};
pub use host::Host;
pub use rail::registration::{Purpose, Registration};
pub use rail::{Rail, RailInfo};
pub use setup::listen::ListenComm;

/// Request numbers of sends are below this.
pub const SEND_REQUESTS: usize = crate::flow::sends::REQUESTS;
/// Request numbers of receives are below this.
pub const RECV_REQUESTS: usize = crate::wire::SLOTS;
