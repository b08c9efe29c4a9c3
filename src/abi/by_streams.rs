//! Variants of the functions in `calls` for connections over TCP streams. A function in `calls`
//! checks for a rail comm in any case, and forwards calls on other comms to this file. So TCP
//! streams add no cost to rails. The functions here refuse a comm that is not a stream comm either.

use super::arguments::{Length, Parts, check_data, count_of, irecv_group, write_size};
use super::guard::{Health, Scope};
use super::handles::{self, CommHandle, Out, RailComm};
use crate::comm::{HostMemory, Registration, StreamRecvComm, StreamSendComm};
use host::error::{Quick, Result};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// A send or receive comm over rails or streams, for calls outside the data path.
pub(super) enum AnyComm<'a> {
    Rails(RailComm<'a>),
    Send(&'a CommHandle<StreamSendComm>),
    Recv(&'a CommHandle<StreamRecvComm>),
}

impl<'a> AnyComm<'a> {
    /// As [`CommHandle::enter`], with the same errors, for comms over rails and over streams.
    ///
    /// # Safety
    /// As [`CommHandle::enter`].
    pub(super) unsafe fn enter(
        raw: *mut c_void,
        name: &'static str,
        scope: &Scope<'a>,
    ) -> Quick<Self> {
        // SAFETY: the caller upholds the same contract.
        let comm = unsafe { Self::from_raw(raw, name) }?;
        scope.enter_comm(comm.health())?;
        Ok(comm)
    }

    /// As [`RailComm::from_raw`], with the same errors, for comms over rails and over streams.
    ///
    /// # Safety
    /// As [`RailComm::from_raw`].
    pub(super) unsafe fn from_raw(raw: *mut c_void, name: &'static str) -> Quick<Self> {
        // SAFETY: the caller upholds the same contract, so the references stay valid for `'a`.
        unsafe {
            if handles::is_comm::<StreamSendComm>(raw) {
                CommHandle::from_raw(raw, name).map(|send| Self::Send(send.as_ref()))
            } else if handles::is_comm::<StreamRecvComm>(raw) {
                CommHandle::from_raw(raw, name).map(|recv| Self::Recv(recv.as_ref()))
            } else {
                RailComm::from_raw(raw, name).map(Self::Rails)
            }
        }
    }

    pub(super) fn health(&self) -> &'a Health {
        match self {
            Self::Rails(comm) => comm.health(),
            Self::Send(send) => send.health(),
            Self::Recv(recv) => recv.health(),
        }
    }

    pub(super) fn register(&self, memory: HostMemory) -> Result<Arc<Registration>> {
        match self {
            Self::Rails(RailComm::Send(send)) => send.comm().register(memory),
            Self::Rails(RailComm::Recv(recv)) => recv.comm().register(memory),
            Self::Send(send) => send.comm().register(memory),
            Self::Recv(recv) => recv.comm().register(memory),
        }
    }
}

/// # Safety
/// As `calls::isend_of`.
#[cold]
#[inline(never)]
pub(super) unsafe fn isend(
    comm: *mut c_void,
    data: *mut c_void,
    bytes: usize,
    tag: c_int,
    mhandle: *mut c_void,
    request: Out<*mut c_void>,
    scope: &Scope<'_>,
) -> Quick<()> {
    // SAFETY: NCCL does not close a comm during a call on it.
    let endpoint = unsafe { CommHandle::<StreamSendComm>::enter(comm, "sendComm", scope) }?;
    check_data(data, bytes)?;
    // SAFETY: guaranteed by the caller.
    let memory = unsafe { handles::memory(mhandle, "mhandle") }?;
    if let Some(number) = endpoint
        .comm()
        .isend(data.addr() as u64, bytes, tag, memory)?
    {
        request.set(endpoint.request(number)?);
    }
    Ok(())
}

/// # Safety
/// As `calls::irecv_of`.
#[cold]
#[inline(never)]
pub(super) unsafe fn irecv<L: Length>(
    comm: *mut c_void,
    parts: Parts<L>,
    optional: bool,
    request: Out<*mut c_void>,
    scope: &Scope<'_>,
) -> Quick<()> {
    // SAFETY: NCCL does not close a comm during a call on it.
    let endpoint = unsafe { CommHandle::<StreamRecvComm>::enter(comm, "recvComm", scope) }?;
    let count = count_of(parts.n)?;
    // SAFETY: guaranteed by the caller.
    let number =
        unsafe { irecv_group(parts, count, |parts| endpoint.comm().irecv(parts, optional)) }?;
    if let Some(number) = number {
        request.set(endpoint.request(number)?);
    }
    Ok(())
}

/// # Safety
/// As `calls::test`.
#[cold]
#[inline(never)]
pub(super) unsafe fn test(
    request: *mut c_void,
    done: Out<c_int>,
    sizes: *mut c_int,
    scope: &Scope<'_>,
) -> Quick<()> {
    // SAFETY: guaranteed by the caller.
    let tell = |part, bytes| unsafe { write_size(sizes, part, bytes) };
    // SAFETY: guaranteed by the caller.
    let is_done = unsafe {
        if handles::is_request::<StreamRecvComm>(request) {
            let (recv, number) = handles::of_request::<StreamRecvComm>(request, "request", scope)?;
            recv.test(number, tell)?
        } else {
            let (send, number) = handles::of_request::<StreamSendComm>(request, "request", scope)?;
            send.test(number)?
                .inspect(|bytes| tell(0, *bytes))
                .is_some()
        }
    };
    if is_done {
        done.set(1);
    }
    Ok(())
}
