//! Connection set-up. `listen` is the accepting side, behind `admission`; `connect` is the connecting side.
//!
//! Both sides `negotiate` over a TCP channel and `join` their queue pairs. `finish` hands the connection to
//! the service thread, and holds it back from NCCL until it has a rail. `streams` connects hosts that no rail
//! joins, where TCP is allowed.

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

/// Everything that connection set-up needs.
pub struct Setup {
    /// State that all connections of the process share.
    pub process: Arc<Process>,
    /// The service thread, which watches over the connections.
    pub service: Arc<Service>,
    /// The warning about short descriptors, which is logged once.
    pub descriptors: Arc<DescriptorWarning>,
}

impl Setup {
    /// Set-up for connections of this process.
    pub fn new(process: Arc<Process>) -> Self {
        let (service, descriptors) = Default::default();
        Self { process, service, descriptors }
    }
}
