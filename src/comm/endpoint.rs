//! One end of a connection, as NCCL's calls see it: its data path, and the way to close it.

#![deny(clippy::disallowed_types)]

use super::datapath::context::PathContext;
use super::datapath::fault::not_entered;
use super::datapath::path::{DataPath, leave};
use super::datapath::recv::{RecvPart, RecvPath};
use super::datapath::send::SendPath;
use super::datapath::try_cell::TryCell;
use super::process::Process;
use super::rail::registration::{Purpose, Registration};
use super::recovery::service::{Service, WatchId};
use super::streams::context::StreamContext;
use super::streams::farewell::{Farewell, Last};
use super::streams::recv::StreamRecvPath;
use super::streams::send::StreamSendPath;
use crate::counters::CountedConnection;
use crate::error::{Quick, Result};
use crate::verbs::HostMemory;
use std::sync::Arc;
use std::time::Instant;

/// One end of a connection with a data path of either direction. The calls of the data path come from one thread at a time;
/// `register` from any.
pub struct Endpoint<P> {
    /// What the data path works with.
    pub(super) context: Arc<PathContext>,
    /// What this process's connections share.
    pub(super) process: Arc<Process>,
    /// Watches over the connection.
    pub(super) service: Arc<Service>,
    /// The connection's number there.
    pub(super) watch: WatchId,
    /// The data path; the service thread shares it.
    pub(super) path: Arc<TryCell<P>>,
    /// The records of its lanes.
    pub(super) counted: CountedConnection,
}

/// A connection that sends, over rails.
pub type RailSendComm = Endpoint<SendPath>;
/// A connection that receives, over rails.
pub type RailRecvComm = Endpoint<RecvPath>;

/// One end of a connection over TCP streams, for a peer that no rail reaches. Called as [`Endpoint`] is.
pub struct StreamEndpoint<P> {
    /// What the data path works with.
    pub(super) context: StreamContext,
    /// What this process's connections share.
    pub(super) process: Arc<Process>,
    /// Has the streams when the connection is closed.
    pub(super) service: Arc<Service>,
    /// The data path, which nobody shares: the cell keeps what a panic went through from being used again.
    pub(super) path: TryCell<P>,
}

/// A connection that sends, over TCP streams.
pub type StreamSendComm = StreamEndpoint<StreamSendPath>;
/// A connection that receives, over TCP streams.
pub type StreamRecvComm = StreamEndpoint<StreamRecvPath>;

/// A connection that sends.
pub enum SendComm {
    /// Over rails.
    Rails(Box<RailSendComm>),
    /// Over TCP streams.
    Streams(Box<StreamSendComm>),
}

/// A connection that receives.
pub enum RecvComm {
    /// Over rails.
    Rails(Box<RailRecvComm>),
    /// Over TCP streams.
    Streams(Box<StreamRecvComm>),
}

impl<P: DataPath> Endpoint<P> {
    /// Closes the connection, and sends BYE to the peer, which need not be there. A data path that a panic went through is not
    /// touched. To be called once, as the last.
    pub fn close(&self) {
        leave(&*self.path, &self.context.peer);
        self.counted.end();
        self.process.closed(&self.context.peer.name);
        self.service.close(self.watch);
    }
}

impl RailSendComm {
    /// Registers memory on every rail, to send it.
    ///
    /// # Errors
    /// As [`super::rail::registration::Registrations::register`].
    pub fn register(&self, memory: HostMemory) -> Result<Arc<Registration>> {
        self.process.register(memory, Purpose::Send)
    }

    /// As [`SendPath::isend`]. The answer is "not yet" while the service thread has the data path.
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub fn isend(&self, addr: u64, bytes: usize, tag: i32, memory: &Registration) -> Quick<Option<u16>> {
        let Some(mut path) = self.path.enter() else { return not_entered(&self.path).map(|()| None) };
        let done = path.isend(&self.context, addr, bytes, tag, memory);
        path.leave();
        done
    }

    /// As [`SendPath::test`]. The answer is "not yet" while the service thread has the data path.
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub fn test(&self, request: u16) -> Quick<Option<u64>> {
        let Some(mut path) = self.path.enter() else { return not_entered(&self.path).map(|()| None) };
        let done = path.test(&self.context, request);
        path.leave();
        done
    }
}

impl RailRecvComm {
    /// Registers memory on every rail, to receive into it.
    ///
    /// # Errors
    /// As [`super::rail::registration::Registrations::register`].
    pub fn register(&self, memory: HostMemory) -> Result<Arc<Registration>> {
        self.process.register(memory, Purpose::Receive)
    }

    /// As [`RecvPath::irecv`]. The answer is "not yet" while the service thread has the data path.
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub fn irecv(&self, parts: &[RecvPart<'_>], optional: bool) -> Quick<Option<u16>> {
        let Some(mut path) = self.path.enter() else { return not_entered(&self.path).map(|()| None) };
        let done = path.irecv(&self.context, parts, optional);
        path.leave();
        done
    }

    /// As [`RecvPath::test`]. The answer is "not yet" while the service thread has the data path.
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub fn test(&self, request: u16, tell: impl FnMut(usize, u64)) -> Quick<bool> {
        let Some(mut path) = self.path.enter() else { return not_entered(&self.path).map(|()| false) };
        let done = path.test(&self.context, request, tell);
        path.leave();
        done
    }
}

impl<P: Last> StreamEndpoint<P> {
    /// As [`Endpoint::close`].
    pub fn close(&self) {
        let StreamContext { sockets, .. } = &self.context;
        let words = self.path.enter().and_then(|mut path| {
            let words = path.last_words();
            path.leave();
            words
        });
        self.process.closed(&sockets.peer);
        match words {
            Some(words) => self.service.part(Farewell::new(Arc::clone(sockets), words, Instant::now())),
            None => sockets.cut(),
        }
    }
}

impl StreamSendComm {
    /// Takes note of memory, to send it: no device has to know it.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::error::Error::Argument) for an empty or impossible range.
    pub fn register(&self, memory: HostMemory) -> Result<Arc<Registration>> {
        self.process.register_for_streams(memory, Purpose::Send)
    }

    /// As [`StreamSendPath::isend`].
    ///
    /// # Errors
    /// As there.
    pub fn isend(&self, addr: u64, bytes: usize, tag: i32, memory: &Registration) -> Quick<Option<u16>> {
        let Some(mut path) = self.path.enter() else { return not_entered(&self.path).map(|()| None) };
        let done = path.isend(&self.context, addr, bytes, tag, memory);
        path.leave();
        done
    }

    /// As [`StreamSendPath::test`].
    ///
    /// # Errors
    /// As there.
    pub fn test(&self, request: u16) -> Quick<Option<u64>> {
        let Some(mut path) = self.path.enter() else { return not_entered(&self.path).map(|()| None) };
        let done = path.test(&self.context, request);
        path.leave();
        done
    }
}

impl StreamRecvComm {
    /// Takes note of memory, to receive into it: no device has to know it.
    ///
    /// # Errors
    /// As [`StreamSendComm::register`].
    pub fn register(&self, memory: HostMemory) -> Result<Arc<Registration>> {
        self.process.register_for_streams(memory, Purpose::Receive)
    }

    /// As [`StreamRecvPath::irecv`].
    ///
    /// # Errors
    /// As there.
    pub fn irecv(&self, parts: &[RecvPart<'_>], optional: bool) -> Quick<Option<u16>> {
        let Some(mut path) = self.path.enter() else { return not_entered(&self.path).map(|()| None) };
        let done = path.irecv(&self.context, parts, optional);
        path.leave();
        done
    }

    /// As [`StreamRecvPath::test`].
    ///
    /// # Errors
    /// As there.
    pub fn test(&self, request: u16, tell: impl FnMut(usize, u64)) -> Quick<bool> {
        let Some(mut path) = self.path.enter() else { return not_entered(&self.path).map(|()| false) };
        let done = path.test(&self.context, request, tell);
        path.leave();
        done
    }
}
