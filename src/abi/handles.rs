//! All conversions between NCCL's pointers and the plugin's objects, except the tuner's
//! (`tuner_handles`) and the communicators' contexts (`contexts`).
//!
//! | NCCL's pointer | is | made by | taken back by |
//! |---|---|---|---|
//! | listen, send, receive comm | `Box<CommHandle<C>>` | [`CommHandle::into_raw`] | [`close`] |
//! | request | part of its [`CommHandle`] | [`CommHandle::request`] | never: lives with the comm |
//! | mhandle | `Arc<Registration>` | [`memory_into_raw`] | [`drop_memory`] |
//!
//! Comms and requests begin with a mark of their type, so a pointer of the wrong type is refused
//! with a clear error. A pointer that the plugin never returned, or whose object was freed, cannot
//! be recognised reliably. NCCL must not pass such a pointer.
//!
//! Comms over rails and comms over TCP streams have different marks. A function in `calls` must
//! check the mark in any case. If the mark is not that of a rail comm, the function forwards the
//! call to `by_streams`. So TCP streams add no cost to rails.

use super::guard::{Health, Scope};
use crate::comm::{
    ListenComm, RECV_REQUESTS, RailRecvComm, RailSendComm, RecvComm, Registration, SEND_REQUESTS,
    SendComm, StreamRecvComm, StreamSendComm,
};
use host::error::{Argument, Error, Internal, Quick};
use nccl_abi::net::HANDLE_BYTES;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

/// An output argument: a pointer into NCCL's memory.
pub(super) struct Out<T>(NonNull<T>);

impl<T> Out<T> {
    /// # Errors
    /// [`Error::Argument`] if NULL.
    ///
    /// # Safety
    /// `place` is NULL, or stays writable until NCCL's call returns. The caller must drop the
    /// returned [`Out`] before that.
    #[inline(always)]
    pub(super) unsafe fn new(place: *mut T, name: &'static str) -> Quick<Self> {
        non_null(place, name).map(Self)
    }

    /// As [`Out::new`], with the same errors. Also writes `empty`, so that the argument has a
    /// defined value even if the call fails.
    ///
    /// # Safety
    /// As [`Out::new`].
    #[inline(always)]
    pub(super) unsafe fn cleared(place: *mut T, name: &'static str, empty: T) -> Quick<Self> {
        // SAFETY: the caller upholds the same contract.
        let out = unsafe { Self::new(place, name) }?;
        out.set(empty);
        Ok(out)
    }

    #[inline(always)]
    pub(super) fn set(&self, value: T) {
        // SAFETY: by the constructors' contract, the place is writable while `self` exists.
        unsafe { self.0.write(value) }
    }
}

/// First word of a comm, request or tuner context; identifies the object's type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Mark(u64);

const LISTEN: Mark = Mark(u64::from_be_bytes(*b"SpkListn"));
const SEND: Mark = Mark(u64::from_be_bytes(*b"SpkSend "));
const RECV: Mark = Mark(u64::from_be_bytes(*b"SpkRecv "));
const SEND_REQUEST_MARK: Mark = Mark(u64::from_be_bytes(*b"SpkReqSd"));
const RECV_REQUEST_MARK: Mark = Mark(u64::from_be_bytes(*b"SpkReqRv"));
const STREAM_SEND: Mark = Mark(u64::from_be_bytes(*b"SpkStrSd"));
const STREAM_RECV: Mark = Mark(u64::from_be_bytes(*b"SpkStrRv"));
const STREAM_SEND_REQUEST_MARK: Mark = Mark(u64::from_be_bytes(*b"SpkSReqS"));
const STREAM_RECV_REQUEST_MARK: Mark = Mark(u64::from_be_bytes(*b"SpkSReqR"));
pub(super) const TUNER: Mark = Mark(u64::from_be_bytes(*b"SpkTuner"));

/// A comm. It is `Sync`, because NCCL may register memory with a comm on one thread while another
/// thread sends on that comm.
pub(super) trait Comm: Send + Sync + Sized {
    const MARK: Mark;
    const REQUEST_MARK: Mark;
    const REQUESTS: usize;
}

impl Comm for ListenComm {
    const MARK: Mark = LISTEN;
    const REQUEST_MARK: Mark = LISTEN;
    const REQUESTS: usize = 0;
}

impl Comm for RailSendComm {
    const MARK: Mark = SEND;
    const REQUEST_MARK: Mark = SEND_REQUEST_MARK;
    const REQUESTS: usize = SEND_REQUESTS;
}

impl Comm for RailRecvComm {
    const MARK: Mark = RECV;
    const REQUEST_MARK: Mark = RECV_REQUEST_MARK;
    const REQUESTS: usize = RECV_REQUESTS;
}

impl Comm for StreamSendComm {
    const MARK: Mark = STREAM_SEND;
    const REQUEST_MARK: Mark = STREAM_SEND_REQUEST_MARK;
    const REQUESTS: usize = SEND_REQUESTS;
}

impl Comm for StreamRecvComm {
    const MARK: Mark = STREAM_RECV;
    const REQUEST_MARK: Mark = STREAM_RECV_REQUEST_MARK;
    const REQUESTS: usize = RECV_REQUESTS;
}

pub(super) fn send_into_raw(comm: SendComm) -> *mut c_void {
    match comm {
        SendComm::Rails(comm) => CommHandle::into_raw(*comm),
        SendComm::Streams(comm) => CommHandle::into_raw(*comm),
    }
}

pub(super) fn recv_into_raw(comm: RecvComm) -> *mut c_void {
    match comm {
        RecvComm::Rails(comm) => CommHandle::into_raw(*comm),
        RecvComm::Streams(comm) => CommHandle::into_raw(*comm),
    }
}

#[repr(C)]
pub(super) struct CommHandle<C> {
    // The first field for every `C`: `mark_of` reads the mark before the type `C` is known.
    mark: Mark,
    health: Health,
    requests: Box<[RequestHandle]>,
    comm: C,
}

/// The object behind one of NCCL's request pointers. It neither moves nor changes while its comm
/// lives.
#[repr(C)]
pub(super) struct RequestHandle {
    mark: Mark,
    number: u16,
    endpoint: NonNull<c_void>,
}

impl<C: Comm> CommHandle<C> {
    pub(super) fn into_raw(comm: C) -> *mut c_void {
        let endpoint = Box::new(Self {
            mark: C::MARK,
            health: Health::default(),
            requests: Box::default(),
            comm,
        });
        let raw = NonNull::from(Box::leak(endpoint));
        let request = |number| RequestHandle {
            mark: C::REQUEST_MARK,
            number: number as u16,
            endpoint: raw.cast(),
        };
        // SAFETY: the box was just leaked, and this function has the only pointer to it.
        unsafe { (*raw.as_ptr()).requests = (0..C::REQUESTS).map(request).collect() };
        raw.as_ptr().cast()
    }

    /// Returns the comm behind one of NCCL's pointers and enters it into the call's scope.
    ///
    /// # Errors
    /// [`Error::Argument`] if NULL or of another type; the errors of [`Scope::enter_comm`].
    ///
    /// # Safety
    /// `raw` is NULL, or came from this file and was not closed. The comm stays open for `'a`.
    #[inline(always)]
    pub(super) unsafe fn enter<'a>(
        raw: *mut c_void,
        name: &'static str,
        scope: &Scope<'a>,
    ) -> Quick<&'a Self> {
        // SAFETY: the caller upholds the same contract.
        let endpoint = unsafe { Self::from_raw(raw, name)?.as_ref() };
        scope.enter_comm(&endpoint.health)?;
        Ok(endpoint)
    }

    /// # Safety
    /// `raw` is NULL, or came from this file and was not closed.
    #[inline(always)]
    pub(super) unsafe fn from_raw(raw: *mut c_void, name: &'static str) -> Quick<NonNull<Self>> {
        // SAFETY: the caller upholds the same contract.
        match unsafe { mark_of(raw, name) }? {
            mark if mark == C::MARK => non_null(raw.cast::<Self>(), name),
            other => Err(of_another_kind(name, other, C::MARK)),
        }
    }

    #[inline(always)]
    pub(super) fn comm(&self) -> &C {
        &self.comm
    }

    pub(super) fn health(&self) -> &Health {
        &self.health
    }

    /// Returns the pointer that identifies request `number` to NCCL.
    ///
    /// # Errors
    /// [`Error::Internal`] if the number is not below [`Comm::REQUESTS`].
    #[inline(always)]
    pub(super) fn request(&self, number: u16) -> Quick<*mut c_void> {
        match self.requests.get(usize::from(number)) {
            Some(request) => Ok(std::ptr::from_ref(request).cast_mut().cast()),
            None => Err(no_such_request(number, self.requests.len())),
        }
    }
}

/// # Safety
/// `raw` is NULL or came from this file and was not closed.
#[inline(always)]
pub(super) unsafe fn is_comm<C: Comm>(raw: *mut c_void) -> bool {
    // SAFETY: the caller upholds the same contract.
    !raw.is_null()
        && raw.cast::<Mark>().is_aligned()
        && unsafe { raw.cast::<Mark>().read() } == C::MARK
}

/// # Safety
/// `raw` is NULL or came from [`CommHandle::request`], and its comm is open.
#[inline(always)]
pub(super) unsafe fn is_request<C: Comm>(raw: *mut c_void) -> bool {
    // SAFETY: the caller upholds the same contract.
    !raw.is_null()
        && raw.cast::<Mark>().is_aligned()
        && unsafe { raw.cast::<Mark>().read() } == C::REQUEST_MARK
}

/// Returns the comm (of type `C`) and the number of a request, and enters the comm into the call's
/// scope. Errors as [`CommHandle::enter`].
///
/// # Safety
/// As [`is_request`]; in addition, the comm stays open for `'a`.
pub(super) unsafe fn of_request<'a, C: Comm>(
    raw: *mut c_void,
    name: &'static str,
    scope: &Scope<'a>,
) -> Quick<(&'a C, u16)> {
    // SAFETY: the caller upholds the same contract.
    match unsafe { mark_of(raw, name) }? {
        mark if mark == C::REQUEST_MARK => {}
        other => return Err(of_another_kind(name, other, C::REQUEST_MARK)),
    }
    // SAFETY: the mark identifies a request of a comm of type `C`. A request lives as long as its
    // comm.
    let (request, comm) = unsafe {
        let request = &*raw.cast::<RequestHandle>();
        (request, request.endpoint.cast::<CommHandle<C>>().as_ref())
    };
    scope.enter_comm(&comm.health)?;
    Ok((&comm.comm, request.number))
}

/// Takes a comm back from NCCL. First calls `disconnect`, which tells the peer that the connection
/// ends, also if the comm is broken: otherwise the peer would wait. Then frees the comm. A broken
/// comm is leaked instead, because a drop would touch state that a panic may have left
/// half-changed.
///
/// # Errors
/// [`Error::Argument`] if the pointer is of another type, [`Error::Missing`] in a forked child.
///
/// # Safety
/// `raw` is NULL or came from this file and was not closed; no thread uses the comm or its requests
/// later.
pub(super) unsafe fn close<C: Comm>(
    raw: *mut c_void,
    name: &'static str,
    scope: &Scope<'_>,
    disconnect: fn(&C),
) -> Quick<()> {
    scope.enter()?;
    // NCCL closes a NULL comm after a failed connect (seen with 2.28.3). NCCL's own networks accept
    // NULL.
    if raw.is_null() {
        return Ok(());
    }
    // SAFETY: the caller upholds the same contract.
    let endpoint = unsafe { CommHandle::<C>::from_raw(raw, name) }?;
    // SAFETY: as above; the comm is still open.
    let open = unsafe { endpoint.as_ref() };
    let is_broken = open.health.is_broken();
    disconnect(&open.comm);
    if is_broken {
        tracing::warn!(
            "{} leaked after a panic: its memory stays in use until the process ends",
            kind_name(C::MARK)
        );
        return Ok(());
    }
    // SAFETY: `into_raw` leaked this box, and NCCL does not use the comm after closing it.
    drop(unsafe { Box::from_raw(endpoint.as_ptr()) });
    Ok(())
}

/// A send or receive comm over rails. `by_streams::AnyComm` also has the comms over TCP streams.
pub(super) enum RailComm<'a> {
    Send(&'a CommHandle<RailSendComm>),
    Recv(&'a CommHandle<RailRecvComm>),
}

impl<'a> RailComm<'a> {
    /// Returns a request's comm and the request's number, and enters the comm into the call's
    /// scope. Errors as [`CommHandle::enter`].
    ///
    /// # Safety
    /// `raw` is NULL or came from [`CommHandle::request`], and the comm stays open for `'a`.
    #[inline(always)]
    pub(super) unsafe fn of_request(
        raw: *mut c_void,
        name: &'static str,
        scope: &Scope<'a>,
    ) -> Quick<(Self, u16)> {
        // SAFETY: by the caller, `raw` is NULL or an object of this plugin; all begin with a mark.
        let mark = unsafe { mark_of(raw, name) }?;
        if mark != SEND_REQUEST_MARK && mark != RECV_REQUEST_MARK {
            return Err(of_another_kind(name, mark, SEND_REQUEST_MARK));
        }
        // SAFETY: the mark identifies a request, which lives as long as its comm.
        let request = unsafe { &*raw.cast::<RequestHandle>() };
        // SAFETY: a request's comm is open while the request is used; the mark identifies its type.
        let comm = unsafe {
            match mark {
                SEND_REQUEST_MARK => Self::Send(request.endpoint.cast().as_ref()),
                _ => Self::Recv(request.endpoint.cast().as_ref()),
            }
        };
        scope.enter_comm(comm.health())?;
        Ok((comm, request.number))
    }

    /// Returns the comm without entering it, for calls that must also work on a broken comm.
    ///
    /// # Errors
    /// [`Error::Argument`] if NULL or of another type.
    ///
    /// # Safety
    /// `raw` is NULL, or came from this file and was not closed. The comm stays open for `'a`.
    pub(super) unsafe fn from_raw(raw: *mut c_void, name: &'static str) -> Quick<Self> {
        // SAFETY: the caller upholds the same contract, which covers the lifetime of the
        // references.
        unsafe {
            if mark_of(raw, name)? == SEND {
                CommHandle::from_raw(raw, name).map(|send| Self::Send(send.as_ref()))
            } else {
                CommHandle::from_raw(raw, name).map(|recv| Self::Recv(recv.as_ref()))
            }
        }
    }

    pub(super) fn health(&self) -> &'a Health {
        match self {
            Self::Send(send) => &send.health,
            Self::Recv(recv) => &recv.health,
        }
    }
}

pub(super) fn memory_into_raw(memory: Arc<Registration>) -> *mut c_void {
    Arc::into_raw(memory).cast_mut().cast()
}

/// # Errors
/// [`Error::Argument`] if NULL.
///
/// # Safety
/// `raw` is NULL, or came from [`memory_into_raw`] and is not given back before `'a` ends.
#[inline(always)]
pub(super) unsafe fn memory<'a>(raw: *mut c_void, name: &'static str) -> Quick<&'a Registration> {
    // SAFETY: the caller upholds the same contract.
    non_null(raw.cast::<Registration>(), name).map(|memory| unsafe { memory.as_ref() })
}

/// # Safety
/// `raw` came from [`memory_into_raw`], and NCCL does not use it again.
pub(super) unsafe fn drop_memory(raw: NonNull<c_void>) {
    // SAFETY: `memory_into_raw` gave one reference count to NCCL, and NCCL gives it back here.
    unsafe { Arc::from_raw(raw.as_ptr().cast::<Registration>()) }.release();
}

/// Returns the bytes of a connection handle. NCCL keeps these bytes between calls of `connect`, so
/// the plugin stores the state of the connection attempt in them.
///
/// # Errors
/// [`Error::Argument`] if NULL.
///
/// # Safety
/// `raw` is NULL or has [`HANDLE_BYTES`] bytes that nothing else accesses during `'a`.
pub(super) unsafe fn handle<'a>(
    raw: *mut c_void,
    name: &'static str,
) -> Quick<&'a mut [u8; HANDLE_BYTES]> {
    // SAFETY: the caller upholds the same contract; bytes need no alignment.
    non_null(raw.cast::<[u8; HANDLE_BYTES]>(), name).map(|mut bytes| unsafe { bytes.as_mut() })
}

/// # Errors
/// [`Error::Argument`] if NULL.
///
/// # Safety
/// `raw` is NULL or has `n` elements that are not written during `'a`.
#[inline(always)]
pub(super) unsafe fn array<'a, T>(raw: *const T, n: usize, name: &'static str) -> Quick<&'a [T]> {
    // SAFETY: the caller upholds the same contract.
    non_null(raw.cast_mut(), name)
        .map(|first| unsafe { std::slice::from_raw_parts(first.as_ptr(), n) })
}

/// # Safety
/// `raw` is NULL or points to an object of this plugin that begins with a mark.
#[inline(always)]
pub(super) unsafe fn mark_of(raw: *mut c_void, name: &'static str) -> Quick<Mark> {
    let mark = non_null(raw.cast::<Mark>(), name)?;
    if !mark.is_aligned() {
        return Err(not_ours(name));
    }
    // SAFETY: not NULL (checked above), so by the caller's guarantee it points to a mark.
    Ok(unsafe { mark.read() })
}

fn kind_name(mark: Mark) -> &'static str {
    match mark {
        LISTEN => "a listen comm",
        SEND | STREAM_SEND => "a send comm",
        RECV | STREAM_RECV => "a receive comm",
        SEND_REQUEST_MARK
        | RECV_REQUEST_MARK
        | STREAM_SEND_REQUEST_MARK
        | STREAM_RECV_REQUEST_MARK => "a request",
        TUNER => "a tuner context",
        _ => "an unknown object",
    }
}

#[inline(always)]
pub(super) fn non_null<T>(raw: *mut T, name: &'static str) -> Quick<NonNull<T>> {
    NonNull::new(raw).ok_or_else(|| null(name))
}

#[cold]
#[inline(never)]
fn null(name: &'static str) -> Box<Error> {
    Box::new(Argument::Null(name).into())
}

#[cold]
#[inline(never)]
fn not_ours(name: &'static str) -> Box<Error> {
    Box::new(Argument::NotOurs(name).into())
}

#[cold]
#[inline(never)]
pub(super) fn of_another_kind(name: &'static str, found: Mark, wanted: Mark) -> Box<Error> {
    Box::new(
        Argument::Kind {
            name,
            found: kind_name(found),
            wanted: kind_name(wanted),
        }
        .into(),
    )
}

#[cold]
#[inline(never)]
fn no_such_request(number: u16, count: usize) -> Box<Error> {
    Box::new(Internal::Request { number, count }.into())
}

#[cfg(test)]
mod tests;
