//! The network of this host: listening and connecting.

use super::endpoint::SendComm;
use super::process::{Process, TunerIdentity};
use super::rail::Rail;
use super::setup::connect::PendingConnections;
use super::setup::listen::ListenComm;
use super::setup::negotiate::LocalRails;
use super::setup::{self, Setup};
use host::config::Config;
use host::error::Result;
use proto::wire::handle::HANDLE_BYTES;
use std::sync::Arc;

/// The open rails of this host, and its connections.
pub struct Host {
    setup: Arc<Setup>,
    pending: PendingConnections,
}

impl Host {
    /// Creates the network over open rails.
    pub fn new(config: Config, rails: Vec<Arc<Rail>>, tuner: TunerIdentity) -> Self {
        let process = Arc::new(Process::new(config, rails, tuner));
        // Each rail stores its addresses in this query. If a rail cannot be used later, new
        // connections still pair it by the stored addresses, so that recovery can add the rail when
        // it returns.
        if let Err(error) = LocalRails::query(&process) {
            tracing::debug!("cannot query the rails at start: {error}");
        }
        Self {
            setup: Arc::new(Setup::new(process)),
            pending: PendingConnections::default(),
        }
    }

    /// Opens a listener on the interface that the settings choose. Also returns its handle.
    pub fn listen(&self) -> Result<(ListenComm, [u8; HANDLE_BYTES])> {
        setup::listen::listen(&self.setup)
    }

    /// Begins or continues to connect to the listener that made `handle`. Returns `None` until the
    /// connection is ready.
    pub fn connect(
        &self,
        handle: &mut [u8; HANDLE_BYTES],
        traffic_class: Option<u8>,
    ) -> Result<Option<SendComm>> {
        self.pending.connect(&self.setup, handle, traffic_class)
    }

    /// Returns the connections that NCCL connects and that are not finished.
    pub fn pending(&self) -> &PendingConnections {
        &self.pending
    }

    /// Returns the state that connection set-up needs.
    pub fn setup(&self) -> &Arc<Setup> {
        &self.setup
    }

    /// Returns the state that all connections share.
    pub fn process(&self) -> &Arc<Process> {
        &self.setup.process
    }
}
