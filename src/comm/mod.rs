//! Connections: joins the pure state of `flow` with the queue pairs of `verbs`.
//!
//! Set-up and data path are in separate files. `listen` and `connect` make connections over a TCP `channel`;
//! `send` and `recv` are their data paths: no allocation, lock, system call or formatting while messages go well.
//! `registration` and `service` have locks, and are never reached from a data path while its rails carry. `service`'s thread
//! watches over each connection with a `warden`, which deals with lost rails; `half` is what it asks of a data path. `events` writes
//! one log line for what meets many connections.

pub mod board;
pub mod channel;
pub mod clock;
pub mod connect;
pub mod events;
pub mod half;
pub mod handshake;
pub mod health;
pub mod lane;
pub mod listen;
pub mod network;
pub mod owner;
pub mod pairing;
pub mod patience;
pub mod peer;
pub mod rail;
pub mod recv;
pub mod registration;
pub mod reputation;
pub mod send;
pub mod service;
pub mod shortage;
pub mod trouble;
pub mod unreached;
pub mod ward;
pub mod warden;
pub mod work;

pub use crate::verbs::HostMemory;
pub use listen::ListenComm;
pub use rail::{Rail, RailInfo};
pub use recv::{RecvComm, RecvPart};
pub use registration::Registration;
pub use send::SendComm;

use crate::config::Config;
use crate::error::Result;
use connect::Connecting;
use events::{Outages, Said};
use registration::Registrations;
use service::Service;
use shortage::Shortage;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use unreached::Unreached;

/// Request numbers of sends are below this.
pub const SEND_REQUESTS: usize = crate::flow::sends::REQUESTS;
/// Request numbers of receives are below this.
pub const RECV_REQUESTS: usize = crate::wire::SLOTS;

/// What all connections of this process share.
pub struct Host {
    /// The settings.
    pub config: Config,
    /// The rails in use.
    pub rails: Vec<Arc<Rail>>,
    /// Host name and process, for messages.
    pub name: String,
    /// By what this host's tuner decides, as a number ([`crate::tuner::Policy::hash`]); 0 where it leaves all to NCCL.
    pub tuner_hash: u64,
    registrations: Registrations,
    /// Back-off for unreachable paths.
    pub unreached: Unreached,
    /// The outages of rails, each with one line in the log.
    pub outages: Arc<Outages>,
    /// What was said of peers.
    pub said: Said,
    /// Watches over the connections.
    pub service: Service,
    shortage: Shortage,
    connecting: Mutex<HashMap<u64, Connecting>>,
    tickets: AtomicU64,
    open: AtomicU64,
}

impl Host {
    /// Takes rails into use.
    pub fn new(config: Config, rails: Vec<Arc<Rail>>, tuner_hash: u64) -> Self {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_else(|_| "host".to_owned());
        let name = format!("{}:{}", host.trim(), std::process::id());
        let (registrations, unreached, outages, said) = Default::default();
        let (service, shortage, connecting, tickets, open) = Default::default();
        Self {
            config,
            rails,
            name,
            tuner_hash,
            registrations,
            unreached,
            outages,
            said,
            service,
            shortage,
            connecting,
            tickets,
            open,
        }
    }

    /// Registers memory on every rail, for all connections.
    ///
    /// # Errors
    /// As [`registration::Registrations::register`].
    pub fn register(&self, memory: HostMemory) -> Result<Arc<Registration>> {
        self.registrations.register(&self.rails, memory)
    }

    /// How many registrations are in use.
    pub fn registrations_in_use(&self) -> usize {
        self.registrations.in_use()
    }

    fn opened(&self, peer: &str) {
        self.said.opened(peer);
        self.open.fetch_add(1, Ordering::Relaxed);
    }

    /// One connection less; after the last one, what the rails have carried.
    fn closed(&self, peer: &str) {
        tracing::debug!("connection with {peer} closed");
        self.said.closed(peer);
        if self.open.fetch_sub(1, Ordering::Relaxed) == 1 {
            crate::telemetry::end_of_job(self.rails.iter().map(|rail| (rail.name(), rail.totals())));
        }
    }

    /// Takes a half-made connection out of the table, and those with it whose time is up: after an abort NCCL does
    /// not come back for them.
    fn take_connecting(&self, ticket: u64) -> Option<Connecting> {
        let mut table = self.connecting.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = table.remove(&ticket);
        let (now, limit) = (Instant::now(), self.config.connect_timeout);
        table.retain(|_, other| now.duration_since(other.started()) < 2 * limit);
        taken
    }

    fn keep_connecting(&self, ticket: u64, connecting: Connecting) {
        let mut table = self.connecting.lock().unwrap_or_else(PoisonError::into_inner);
        table.insert(ticket, connecting);
    }

    fn new_ticket(&self) -> u64 {
        self.tickets.fetch_add(1, Ordering::Relaxed) + 1
    }
}
