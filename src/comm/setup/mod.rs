//! Connection set-up. `listen` is the accepting side, behind `admission`; `connect` is the
//! connecting side.
//!
//! Both sides `negotiate` over a TCP channel and `join` their queue pairs. `finish` hands the
//! connection to the service thread, and keeps it from NCCL until it has a rail. `streams` connects
//! hosts that have no rail in common over TCP, if the settings allow this. `pending` keeps the
//! state between two calls, and gives up connections that NCCL no longer asks for.
//!
//! # The handshake
//!
//! NCCL passes a handle (address, random token) from `listen` to `connect`. A call never waits: it
//! keeps the state of the handshake and returns, so one thread can drive both ends.
//!
//! 1. HELLO, from the connecting side: the token; its rails with addresses, speed, MTU and cable;
//!    the priority of its packets, which both sides' queue pairs use; the hash of its tuner.
//! 2. OFFER, from the accepting side: the pairs of rails ([`proto::flow::pairing`]), with its new
//!    queue pairs.
//! 3. READY: the connecting side's own queue pairs, already connected, and the keys of its mailbox.
//! 4. GO: the pairs that carry data, the keys of the accepting side's mailbox, and the port and
//!    token for a later REDIAL.
//!
//! Before GO the accepting side connects its queue pairs and tests each one
//! ([`test_write`](crate::comm::datapath::test_write)). A pair carries data if its test packets are
//! acknowledged within `NCCL_SPARK_PROBE_TIMEOUT_MS`. After GO, both sides exchange control
//! frames. A side that refuses the connection sends the reason as text. If no pair can be formed,
//! the accepting side may answer HELLO with STREAMS ([`crate::comm::streams`]).
//!
//! Every pair of the OFFER is a lane of the connection. The handshake is the first attempt to bring
//! up each pair, and recovery makes all later attempts. A pair that does not carry data yet begins
//! as a lost rail (`Recovery::mark_missing_at_start`, `Lane::without_queues`), with a log line that
//! gives the reason. So that such pairs can be formed, HELLO and OFFER also name rails that cannot
//! be used now, with the addresses that these rails had before (`Rail::last_snapshot`), or with a
//! placeholder for a port that had no link or address when the plugin was loaded
//! (`Rail::announce`). Such rails are paired after the usable ones.
//!
//! If no pair carries data at GO, `finish` keeps the connection until a pair carries data or
//! `NCCL_SPARK_CONNECT_TIMEOUT_S` has passed. The accepting side refuses the connection only if
//! every pair failed, and each is late (`Pair::is_late`) or failed permanently
//! (`NotYet::is_temporary`, `Error::is_temporary`).
//!
//! An unauthenticated connection may send one message within ten seconds. No number in it
//! determines the size of an allocation ([`unauthenticated`](crate::comm::unauthenticated)).
//! If file descriptors run out, unauthenticated connections are dropped. A peer that has sent the
//! token is answered once enough descriptors are free ([`descriptors`](crate::comm::descriptors)).

pub mod admission;
pub mod connect;
pub mod finish;
pub mod join;
pub mod listen;
pub mod negotiate;
pub mod pending;
pub mod streams;

use super::descriptors::DescriptorWarning;
use super::process::Process;
use super::recovery::service::Service;
use std::sync::Arc;

/// State that connection set-up needs.
pub struct Setup {
    /// Shared state of all connections of the process.
    pub process: Arc<Process>,
    /// The service thread, which watches the connections.
    pub service: Arc<Service>,
    /// Warning about a shortage of file descriptors, logged once.
    pub descriptors: Arc<DescriptorWarning>,
}

impl Setup {
    /// Creates the set-up for connections of this process.
    pub fn new(process: Arc<Process>) -> Self {
        let service = Arc::new(Service::new(Arc::clone(&process)));
        Self {
            process,
            service,
            descriptors: Default::default(),
        }
    }
}
