//! The network of this host, as NCCL's calls see it.

use super::endpoint::SendComm;
use super::process::{Process, TunerIdentity};
use super::rail::Rail;
use super::setup::connect::PendingConnections;
use super::setup::listen::ListenComm;
use super::setup::negotiate::Rails;
use super::setup::{self, Setup};
use crate::config::Config;
use crate::error::Result;
use crate::wire::handle::HANDLE_BYTES;
use std::sync::Arc;

/// The rails of this host in use, and its connections.
pub struct Host {
    setup: Arc<Setup>,
    pending: PendingConnections,
}

impl Host {
    /// Takes rails into use.
    pub fn new(config: Config, rails: Vec<Arc<Rail>>, tuner: TunerIdentity) -> Self {
        let process = Arc::new(Process::new(config, rails, tuner));
        // From here on a rail's addresses are known, so that a connection that comes up without it can have it later.
        if let Err(error) = Rails::look(&process) {
            tracing::debug!("rails not looked at yet: {error}");
        }
        Self { setup: Arc::new(Setup::new(process)), pending: PendingConnections::default() }
    }

    /// Opens a listener on the interface that the settings choose; with it, the handle for the peer.
    ///
    /// # Errors
    /// As [`setup::listen::listen`].
    pub fn listen(&self) -> Result<(ListenComm, [u8; HANDLE_BYTES])> {
        setup::listen::listen(&self.setup)
    }

    /// Goes on with the connection that `handle` asks for; `None` while it is not there.
    ///
    /// # Errors
    /// As [`PendingConnections::connect`].
    pub fn connect(&self, handle: &mut [u8; HANDLE_BYTES], traffic_class: Option<u8>) -> Result<Option<SendComm>> {
        self.pending.connect(&self.setup, handle, traffic_class)
    }

    /// What its connections share, and what makes and watches them.
    pub fn setup(&self) -> &Arc<Setup> {
        &self.setup
    }

    /// What its connections share.
    pub fn process(&self) -> &Arc<Process> {
        &self.setup.process
    }
}
