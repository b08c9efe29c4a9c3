//! Connections: combines the I/O-free state of [`proto::flow`] with the queue pairs of [`verbs`].
//!
//! The modules form layers, from top to bottom: `host`, `setup`, `endpoint`, `recovery`, `process`,
//! `streams`, `datapath`, `rail`, `unauthenticated`, then one layer of `channel`, `descriptors` and
//! `log`, then `threads`. A module imports only from its own layer and from lower layers.

pub mod channel;
pub mod datapath;
pub mod descriptors;
pub mod endpoint;
pub mod host;
pub mod log;
pub mod operation;
pub mod process;
pub mod rail;
pub mod recovery;
pub mod setup;
pub mod streams;
#[cfg(test)]
#[path = "../../tests/common/tcp_pair.rs"]
mod tcp_pair;
pub mod threads;
pub mod unauthenticated;

pub use self::host::Host;
pub use datapath::recv::RecvPart;
pub use endpoint::{
    RailRecvComm, RailSendComm, RecvComm, SendComm, StreamRecvComm, StreamSendComm,
};
pub use operation::CurrentOperation;
pub use rail::registration::{Purpose, Registration};
pub use rail::{Rail, RailInfo};
pub use setup::listen::ListenComm;
pub use verbs::HostMemory;

/// Exclusive upper bound of the request numbers of sends.
pub const SEND_REQUESTS: usize = proto::flow::sends::REQUESTS;
/// Exclusive upper bound of the request numbers of receives.
pub const RECV_REQUESTS: usize = proto::wire::SLOTS;
