//! One end of a connection, as NCCL's calls see it: its data path, and the way to close it.

use super::datapath::context::PathContext;
use super::datapath::fault::not_entered;
use super::datapath::path::{DataPath, leave};
use super::datapath::recv::{RecvPart, RecvPath};
use super::datapath::send::SendPath;
use super::datapath::try_cell::TryCell;
use super::process::Process;
use super::rail::registration::{Purpose, Registration};
use super::recovery::service::{Service, WatchId};
use crate::error::{Quick, Result};
use crate::verbs::HostMemory;
use std::sync::Arc;

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
}

/// A connection that sends.
pub type SendComm = Endpoint<SendPath>;
/// A connection that receives.
pub type RecvComm = Endpoint<RecvPath>;

impl<P: DataPath> Endpoint<P> {
    /// Closes the connection, and sends BYE to the peer, which need not be there. A data path that a panic went through is not
    /// touched. To be called once, as the last.
    pub fn close(&self) {
        leave(&*self.path, &self.context.peer);
        self.process.closed(&self.context.peer.name);
        self.service.close(self.watch);
    }
}

impl SendComm {
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

impl RecvComm {
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
