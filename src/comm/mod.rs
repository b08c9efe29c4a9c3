//! Connections: combines the I/O-free state of `flow` with the queue pairs of `verbs`.
//!
//! Each module imports only from those after it (`tests/house_rules/rooms.toml`): `host`, `setup`,
//! `endpoint`, `recovery`, `process`, `streams`, `datapath`, `rail`, `unauthenticated`, then
//! `channel`, `descriptors` and `log`, then `threads`.

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
