//! Makes connections: `listen` is the accepting side, behind `admission`; `connect` the connecting side. Both `negotiate` over a TCP
//! channel, `join` their queue pairs, and `finish` what has come up. `streams` is what both do where no
//! rail reaches the peer and TCP is allowed.

pub mod admission;
pub mod connect;
pub mod finish;
pub mod join;
pub mod listen;
pub mod negotiate;
pub mod streams;

use super::descriptors::DescriptorWarning;
use super::process::Process;
use super::recovery::service::Service;
use std::sync::Arc;

/// What it takes to make a connection.
pub struct Setup {
    /// What all connections share.
    pub process: Arc<Process>,
    /// Watches over the connections that are made.
    pub service: Arc<Service>,
    /// Whether the user knows that descriptors are short.
    pub descriptors: Arc<DescriptorWarning>,
}

impl Setup {
    /// For connections of this process.
    pub fn new(process: Arc<Process>) -> Self {
        let (service, descriptors) = Default::default();
        Self { process, service, descriptors }
    }
}
