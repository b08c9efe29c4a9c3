//! Ends of connections, with the calls that NCCL makes on them: `register`, `isend`, `irecv`,
//! `test` and `close`. If a connection uses rails, NCCL's thread shares its data path with the
//! service thread, which recovers lost rails.

#![deny(clippy::disallowed_types)]

use super::datapath::context::PathContext;
use super::datapath::fault::not_entered;
use super::datapath::recv::{RecvPart, RecvPath};
use super::datapath::send::SendPath;
use super::datapath::shared::{NotBorrowed, Shareable, SharedPath, leave};
use super::datapath::try_cell::TryCell;
use super::operation::CurrentOperation;
use super::process::Process;
use super::rail::registration::{Purpose, Registration};
use super::recovery::driver::END_LIMIT;
use super::recovery::service::{Service, Watch};
use super::streams::context::StreamContext;
use super::streams::farewell::{FinalBytes, StreamClose};
use super::streams::recv::StreamRecvPath;
use super::streams::send::StreamSendPath;
use crate::clock;
use host::counters::CountedConnection;
use host::error::{Quick, Result};
use proto::time::Instant;
use std::sync::Arc;
use std::time::Duration;
use verbs::HostMemory;

/// One end of a connection, with the data path of one direction. NCCL calls `isend`, `irecv` and
/// `test` from one thread at a time, and `register` from any thread.
pub struct Endpoint<P> {
    pub(super) context: Arc<PathContext>,
    pub(super) process: Arc<Process>,
    pub(super) service: Arc<Service>,
    pub(super) watch: Watch,
    pub(super) path: Arc<TryCell<P>>,
    pub(super) counted: CountedConnection,
}

/// A send connection over rails.
pub type RailSendComm = Endpoint<SendPath>;
/// A receive connection over rails.
pub type RailRecvComm = Endpoint<RecvPath>;

/// One end of a connection over TCP streams, for a peer that no rail reaches.
pub struct StreamEndpoint<P> {
    pub(super) context: StreamContext,
    pub(super) process: Arc<Process>,
    pub(super) service: Arc<Service>,
    /// Used by one thread only. The cell prevents use of the data path after a panic.
    pub(super) path: TryCell<P>,
}

/// A send connection over TCP streams.
pub type StreamSendComm = StreamEndpoint<StreamSendPath>;
/// A receive connection over TCP streams.
pub type StreamRecvComm = StreamEndpoint<StreamRecvPath>;

/// A send connection.
pub enum SendComm {
    /// Over rails.
    Rails(Box<RailSendComm>),
    /// Over TCP streams.
    Streams(Box<StreamSendComm>),
}

/// A receive connection.
pub enum RecvComm {
    /// Over rails.
    Rails(Box<RailRecvComm>),
    /// Over TCP streams.
    Streams(Box<StreamRecvComm>),
}

impl SendComm {
    /// Names NCCL's operation on the communicator in messages about this connection.
    pub fn belongs_to(&self, operation: &'static CurrentOperation) {
        if let Self::Rails(comm) = self {
            comm.context.operation.get_or_init(|| operation);
        }
    }
}

impl RecvComm {
    /// As [`SendComm::belongs_to`].
    pub fn belongs_to(&self, operation: &'static CurrentOperation) {
        if let Self::Rails(comm) = self {
            comm.context.operation.get_or_init(|| operation);
        }
    }
}

/// Interval between the checks of [`Endpoint::close`].
const CHECK_INTERVAL: Duration = Duration::from_millis(1);
/// Limit for the wait in [`Endpoint::close`]: the driver's own limit, which writes a WARN, and some
/// rounds of the service thread.
const CLOSE_LIMIT: Duration = END_LIMIT.saturating_add(Duration::from_secs(1));

impl<P: Shareable> Endpoint<P> {
    /// Closes the connection, and sends BYE to a peer that still exists ([`Service::close`]). Does
    /// not enter a data path in which a thread has panicked. The caller must make this call once,
    /// as the last call.
    ///
    /// If requests are running, waits until the service thread has stopped the queue pairs, because
    /// the caller may reuse the buffers of these requests after this call.
    pub fn close(&self) {
        let until = clock::now() + CLOSE_LIMIT;
        let is_cancelled =
            wait_until(until, || leave(&*self.path, &self.context).ok()).unwrap_or_default();
        self.close_unused();
        if is_cancelled {
            let has_ended = || match self.path.borrow() {
                Ok(mut path) => (!path.rails().status.is_ending()).then_some(()),
                Err(NotBorrowed::Broken) => Some(()),
                Err(NotBorrowed::Busy) => None,
            };
            wait_until(until, has_ended);
        }
    }

    /// Closes a connection that NCCL has not got, and on which no request runs. Does not wait for
    /// queue pairs, because the service thread closes abandoned connections with this call.
    pub fn close_unused(&self) {
        self.counted.end();
        self.service.close(&self.watch);
        // This call may wait for the ports' counters, so the peer gets BYE before.
        self.process.closed(&self.context.peer.name);
    }
}

/// Calls `step` until it has a result. Returns `None` after `until`.
fn wait_until<T>(until: Instant, mut step: impl FnMut() -> Option<T>) -> Option<T> {
    loop {
        let done = step();
        if done.is_some() || clock::now() > until {
            return done;
        }
        std::thread::sleep(CHECK_INTERVAL);
    }
}

impl RailSendComm {
    /// Registers memory on every rail, for sends.
    pub fn register(&self, memory: HostMemory) -> Result<Arc<Registration>> {
        self.process.register(memory, Purpose::Send)
    }

    /// Calls [`SendPath::isend`]. Returns `None` while the service thread uses the data path.
    #[inline(always)]
    pub fn isend(
        &self,
        addr: u64,
        bytes: usize,
        tag: i32,
        memory: &Registration,
    ) -> Quick<Option<u16>> {
        let Some(mut path) = self.path.enter() else {
            return not_entered(&self.path).map(|()| None);
        };
        let done = path.isend(&self.context, addr, bytes, tag, memory);
        path.leave();
        done
    }

    /// Calls [`SendPath::test`]. Returns `None` while the service thread uses the data path.
    #[inline(always)]
    pub fn test(&self, request: u16) -> Quick<Option<u64>> {
        let Some(mut path) = self.path.enter() else {
            return not_entered(&self.path).map(|()| None);
        };
        let done = path.test(&self.context, request);
        path.leave();
        done
    }
}

impl RailRecvComm {
    /// Registers memory on every rail, for receives.
    pub fn register(&self, memory: HostMemory) -> Result<Arc<Registration>> {
        self.process.register(memory, Purpose::Receive)
    }

    /// Calls [`RecvPath::irecv`]. Returns `None` while the service thread uses the data path.
    #[inline(always)]
    pub fn irecv(&self, parts: &[RecvPart<'_>], optional: bool) -> Quick<Option<u16>> {
        let Some(mut path) = self.path.enter() else {
            return not_entered(&self.path).map(|()| None);
        };
        let done = path.irecv(&self.context, parts, optional);
        path.leave();
        done
    }

    /// Calls [`RecvPath::test`]. Returns false while the service thread uses the data path.
    #[inline(always)]
    pub fn test(&self, request: u16, report: impl FnMut(usize, u64)) -> Quick<bool> {
        let Some(mut path) = self.path.enter() else {
            return not_entered(&self.path).map(|()| false);
        };
        let done = path.test(&self.context, request, report);
        path.leave();
        done
    }
}

impl<P: FinalBytes> StreamEndpoint<P> {
    /// Closes the connection. Like [`Endpoint::close`], this must be the last call. The service
    /// thread sends the last bytes of each stream. If sends are running or this side has failed,
    /// the streams are cut instead, so that the peer fails too.
    pub fn close(&self) {
        let StreamContext { sockets, .. } = &self.context;
        let final_bytes = self.path.enter().and_then(|mut path| {
            let final_bytes = path.final_bytes();
            path.leave();
            final_bytes
        });
        match final_bytes {
            Some(final_bytes) => {
                let mut farewell = StreamClose::new(Arc::clone(sockets), final_bytes, clock::now());
                // Most closes finish in the first call, which this thread makes: it sends the last
                // bytes and reads the unread ones even if this process ends directly afterwards.
                if let Err(error) = self.service.repeat(move |now| farewell.poll(now)) {
                    tracing::warn!("could not notify peer of closed connection: {error}");
                }
            }
            None => sockets.cut(),
        }
        // This call may wait for the ports' counters, so the peer gets the last bytes before.
        self.process.closed(&sockets.tcp.peer);
    }
}

impl StreamSendComm {
    /// Records memory for sends. Sockets need no registration with a device.
    pub fn register(&self, memory: HostMemory) -> Result<Arc<Registration>> {
        self.process.register_for_streams(memory, Purpose::Send)
    }

    /// Calls [`StreamSendPath::isend`].
    pub fn isend(
        &self,
        addr: u64,
        bytes: usize,
        tag: i32,
        memory: &Registration,
    ) -> Quick<Option<u16>> {
        let Some(mut path) = self.path.enter() else {
            return not_entered(&self.path).map(|()| None);
        };
        let done = path.isend(&self.context, addr, bytes, tag, memory);
        path.leave();
        done
    }

    /// Calls [`StreamSendPath::test`].
    pub fn test(&self, request: u16) -> Quick<Option<u64>> {
        let Some(mut path) = self.path.enter() else {
            return not_entered(&self.path).map(|()| None);
        };
        let done = path.test(&self.context, request);
        path.leave();
        done
    }
}

impl StreamRecvComm {
    /// Records memory for receives. Sockets need no registration with a device.
    pub fn register(&self, memory: HostMemory) -> Result<Arc<Registration>> {
        self.process.register_for_streams(memory, Purpose::Receive)
    }

    /// Calls [`StreamRecvPath::irecv`].
    pub fn irecv(&self, parts: &[RecvPart<'_>], optional: bool) -> Quick<Option<u16>> {
        let Some(mut path) = self.path.enter() else {
            return not_entered(&self.path).map(|()| None);
        };
        let done = path.irecv(&self.context, parts, optional);
        path.leave();
        done
    }

    /// Calls [`StreamRecvPath::test`].
    pub fn test(&self, request: u16, report: impl FnMut(usize, u64)) -> Quick<bool> {
        let Some(mut path) = self.path.enter() else {
            return not_entered(&self.path).map(|()| false);
        };
        let done = path.test(&self.context, request, report);
        path.leave();
        done
    }
}
