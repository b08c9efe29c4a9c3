//! Makes connections: `listen` is the accepting side, behind `admission`; `connect` the connecting side. Both `negotiate` over a TCP
//! channel, `join` their queue pairs, and `finish` what has come up.

pub mod admission;
pub mod connect;
pub mod descriptors;
pub mod finish;
pub mod join;
pub mod listen;
pub mod negotiate;

use super::process::Process;
use super::recovery::service::Service;
use descriptors::DescriptorWarning;
use std::sync::Arc;

/// What it takes to make a connection.
pub struct Setup {
    /// What all connections share.
    pub process: Arc<Process>,
    /// Watches over the connections that are made.
    pub service: Arc<Service>,
    /// Whether the user knows that descriptors are short.
    pub descriptors: DescriptorWarning,
}

impl Setup {
    /// For connections of this process.
    pub fn new(process: Arc<Process>) -> Self {
        let (service, descriptors) = Default::default();
        Self { process, service, descriptors }
    }
}
