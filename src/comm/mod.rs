//! Connections: joins the pure state of `flow` with the queue pairs of `verbs`.
//!
//! Each room imports from those below it, never from above:
//!
//! | room | what it is |
//! |---|---|
//! | `host` | the network of this host, as NCCL's calls see it |
//! | `setup` | makes connections: the handshake of both sides, over a TCP `channel` |
//! | `endpoint` | one end of a connection, as NCCL's calls see it |
//! | `recovery` | the service thread, and the driver that executes the actions of `flow::recovery` |
//! | `process` | what all connections of this process share, and what the kernel is asked for while there are any |
//! | `streams` | connections by TCP, for peers that no cable joins |
//! | `datapath` | `isend`, `irecv` and `test`: no allocation, lock, system call or formatting while messages go well |
//! | `rail` | a rail of this host: its memory registrations, the quality of its paths, back-off where a path is dead |
//! | `unauthenticated` | the connections at a TCP port that have not shown a token |
//! | `channel`, `log`, `descriptors` | the bootstrap's TCP connection; one line for an event that affects many connections; out of file descriptors |
//! | `threads` | starts the plugin's own threads |

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
