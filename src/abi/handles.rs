//! Every conversion between NCCL's pointers and our objects.
//!
//! | NCCL's pointer | is | made by | taken back by |
//! |---|---|---|---|
//! | listen, send, receive comm | `Box<CommHandle<C>>` | [`CommHandle::into_raw`] | [`close`] |
//! | request | borrowed from its comm's [`CommHandle`] | [`CommHandle::request`] | nobody: it lives as long as the comm |
//! | mhandle | `Arc<Registration>` | [`memory_into_raw`] | [`drop_memory`] |
//! | ctx | an entry of a constant table | [`context_for`] | nobody |
//!
//! The tuner's are in `tuner_handles`.
//!
//! A send or receive comm is one of two kinds, over rails or over TCP streams, each with marks of its own. A call looks whether it has the
//! rails' kind, which it has to in any case, and else goes to `by_streams`: so what rails carry pays nothing for the other kind.
//!
//! A comm and a request begin with a mark that tells what they are, so that one passed in another's place is refused with
//! words. A pointer that was never ours, or is no longer, cannot be told apart from a good one: that much NCCL must keep.

use super::guard::{Health, Scope};
use super::types::HANDLE_BYTES;
use crate::comm::{
    ListenComm, RECV_REQUESTS, RailRecvComm, RailSendComm, RecvComm, Registration, SEND_REQUESTS, SendComm,
    StreamRecvComm, StreamSendComm,
};
use crate::error::{Error, Quick, Result};
use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

/// A place of NCCL's that a call writes its answer to.
pub(super) struct Out<T>(NonNull<T>);

impl<T> Out<T> {
    /// The place, written only when there is an answer.
    ///
    /// # Errors
    /// [`Error::Argument`] names a NULL.
    ///
    /// # Safety
    /// `place` is NULL or may be written until the call that it came with returns, and the result does not outlive that.
    #[inline(always)]
    pub(super) unsafe fn new(place: *mut T, name: &'static str) -> Quick<Self> {
        non_null(place, name).map(Self)
    }

    /// The place, holding `empty` until there is an answer.
    ///
    /// # Errors
    /// As [`Out::new`].
    ///
    /// # Safety
    /// As [`Out::new`].
    #[inline(always)]
    pub(super) unsafe fn cleared(place: *mut T, name: &'static str, empty: T) -> Quick<Self> {
        // SAFETY: the caller's promise is the one that is asked for.
        let out = unsafe { Self::new(place, name) }?;
        out.set(empty);
        Ok(out)
    }

    #[inline(always)]
    pub(super) fn set(&self, value: T) {
        // SAFETY: whoever made this promised that the place may be written for as long as this exists.
        unsafe { self.0.write(value) }
    }
}

/// What a comm, a request or a tuner context begins with, so that one is not taken for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Mark(u64);

const LISTEN: Mark = Mark(u64::from_be_bytes(*b"SpkListn"));
const SEND: Mark = Mark(u64::from_be_bytes(*b"SpkSend "));
const RECV: Mark = Mark(u64::from_be_bytes(*b"SpkRecv "));
const SENDING: Mark = Mark(u64::from_be_bytes(*b"SpkReqSd"));
const RECEIVING: Mark = Mark(u64::from_be_bytes(*b"SpkReqRv"));
const STREAM_SEND: Mark = Mark(u64::from_be_bytes(*b"SpkStrSd"));
const STREAM_RECV: Mark = Mark(u64::from_be_bytes(*b"SpkStrRv"));
const STREAM_SENDING: Mark = Mark(u64::from_be_bytes(*b"SpkSReqS"));
const STREAM_RECEIVING: Mark = Mark(u64::from_be_bytes(*b"SpkSReqR"));
/// What a tuner context begins with (`tuner_handles`).
pub(super) const TUNER: Mark = Mark(u64::from_be_bytes(*b"SpkTuner"));

/// What NCCL calls a comm. NCCL registers memory with it from one thread while another sends on it.
pub(super) trait Comm: Send + Sync + Sized {
    /// What its [`CommHandle`] begins with.
    const MARK: Mark;
    /// What its requests begin with.
    const REQUEST_MARK: Mark;
    /// How many request numbers it uses, from 0.
    const REQUESTS: usize;
}

impl Comm for ListenComm {
    const MARK: Mark = LISTEN;
    const REQUEST_MARK: Mark = LISTEN;
    const REQUESTS: usize = 0;
}

impl Comm for RailSendComm {
    const MARK: Mark = SEND;
    const REQUEST_MARK: Mark = SENDING;
    const REQUESTS: usize = SEND_REQUESTS;
}

impl Comm for RailRecvComm {
    const MARK: Mark = RECV;
    const REQUEST_MARK: Mark = RECEIVING;
    const REQUESTS: usize = RECV_REQUESTS;
}

impl Comm for StreamSendComm {
    const MARK: Mark = STREAM_SEND;
    const REQUEST_MARK: Mark = STREAM_SENDING;
    const REQUESTS: usize = SEND_REQUESTS;
}

impl Comm for StreamRecvComm {
    const MARK: Mark = STREAM_RECV;
    const REQUEST_MARK: Mark = STREAM_RECEIVING;
    const REQUESTS: usize = RECV_REQUESTS;
}

/// Gives a comm that sends to NCCL, as its kind.
pub(super) fn send_into_raw(comm: SendComm) -> *mut c_void {
    match comm {
        SendComm::Rails(comm) => CommHandle::into_raw(*comm),
        SendComm::Streams(comm) => CommHandle::into_raw(*comm),
    }
}

/// Gives a comm that receives to NCCL, as its kind.
pub(super) fn recv_into_raw(comm: RecvComm) -> *mut c_void {
    match comm {
        RecvComm::Rails(comm) => CommHandle::into_raw(*comm),
        RecvComm::Streams(comm) => CommHandle::into_raw(*comm),
    }
}

/// A comm as NCCL holds it: with its health, and with what its requests are pointers to.
#[repr(C)]
pub(super) struct CommHandle<C> {
    // First in memory, whatever the comm is: `mark_of` reads it through a pointer of unknown kind.
    mark: Mark,
    health: Health,
    requests: Box<[Request]>,
    comm: C,
}

/// What a request of NCCL's points to. It does not move or change while its comm lives.
#[repr(C)]
pub(super) struct Request {
    mark: Mark,
    number: u16,
    endpoint: NonNull<c_void>,
}

impl<C: Comm> CommHandle<C> {
    /// Gives a comm to NCCL, which hands it back to [`close`].
    pub(super) fn into_raw(comm: C) -> *mut c_void {
        let endpoint = Box::new(Self { mark: C::MARK, health: Health::default(), requests: Box::default(), comm });
        let raw = NonNull::from(Box::leak(endpoint));
        let request = |number| Request { mark: C::REQUEST_MARK, number: number as u16, endpoint: raw.cast() };
        // SAFETY: the box was leaked a moment ago and nobody else has the pointer yet.
        unsafe { (*raw.as_ptr()).requests = (0..C::REQUESTS).map(request).collect() };
        raw.as_ptr().cast()
    }

    /// The comm behind a pointer of NCCL's, entered into the call's scope.
    ///
    /// # Errors
    /// [`Error::Argument`] where the pointer is NULL or to something else; what [`Scope::enter_comm`] refuses.
    ///
    /// # Safety
    /// `raw` is NULL or came from this file and was not closed; it stays open for `'a`.
    #[inline(always)]
    pub(super) unsafe fn enter<'a>(raw: *mut c_void, name: &'static str, scope: &Scope<'a>) -> Quick<&'a Self> {
        // SAFETY: the caller's promise is the one that is asked for.
        let endpoint = unsafe { Self::from_raw(raw, name)?.as_ref() };
        scope.enter_comm(&endpoint.health)?;
        Ok(endpoint)
    }

    /// # Safety
    /// `raw` is NULL or came from this file and was not closed.
    #[inline(always)]
    pub(super) unsafe fn from_raw(raw: *mut c_void, name: &'static str) -> Quick<NonNull<Self>> {
        // SAFETY: the caller's promise is the one that is asked for.
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

    /// The pointer by which NCCL will ask for request `number`.
    ///
    /// # Errors
    /// [`Error::Internal`] where the comm gives a number that it said it would not use.
    #[inline(always)]
    pub(super) fn request(&self, number: u16) -> Quick<*mut c_void> {
        match self.requests.get(usize::from(number)) {
            Some(request) => Ok(std::ptr::from_ref(request).cast_mut().cast()),
            None => Err(no_such_request(number, self.requests.len())),
        }
    }
}

/// Whether a pointer is to a comm of this kind.
///
/// # Safety
/// `raw` is NULL or came from this file and was not closed.
#[inline(always)]
pub(super) unsafe fn is_comm<C: Comm>(raw: *mut c_void) -> bool {
    // SAFETY: the caller's promise is the one that is asked for.
    !raw.is_null() && raw.cast::<Mark>().is_aligned() && unsafe { raw.cast::<Mark>().read() } == C::MARK
}

/// Whether a pointer is to a request of a comm of this kind.
///
/// # Safety
/// `raw` is NULL or came from [`CommHandle::request`], and its comm is open.
#[inline(always)]
pub(super) unsafe fn is_request<C: Comm>(raw: *mut c_void) -> bool {
    // SAFETY: the caller's promise is the one that is asked for.
    !raw.is_null() && raw.cast::<Mark>().is_aligned() && unsafe { raw.cast::<Mark>().read() } == C::REQUEST_MARK
}

/// The comm and the number of a request that [`is_request`] of a comm of this kind, entered into the call's scope.
///
/// # Errors
/// As [`CommHandle::enter`].
///
/// # Safety
/// As [`is_request`]; the comm stays open for `'a`.
pub(super) unsafe fn of_request<'a, C: Comm>(
    raw: *mut c_void,
    name: &'static str,
    scope: &Scope<'a>,
) -> Quick<(&'a C, u16)> {
    // SAFETY: the caller's promise is the one that is asked for.
    match unsafe { mark_of(raw, name) }? {
        mark if mark == C::REQUEST_MARK => {}
        other => return Err(of_another_kind(name, other, C::REQUEST_MARK)),
    }
    // SAFETY: the mark says what it is, and it lives as long as its comm, which is of this kind.
    let (request, comm) = unsafe {
        let request = &*raw.cast::<Request>();
        (request, request.endpoint.cast::<CommHandle<C>>().as_ref())
    };
    scope.enter_comm(&comm.health)?;
    Ok((&comm.comm, request.number))
}

/// Takes a comm back from NCCL, and tells whom it is connected with by `part`. A broken one does that too, so that the peer does not
/// wait for it, and is left where it is, out of use, without touching what a panic may have left half-changed.
///
/// # Errors
/// [`Error::Argument`] where the pointer is to something else, [`Error::Missing`] in a forked child.
///
/// # Safety
/// `raw` is NULL or came from this file and was not closed; NCCL uses neither it nor its requests again, in any thread.
pub(super) unsafe fn close<C: Comm>(
    raw: *mut c_void,
    name: &'static str,
    scope: &Scope<'_>,
    part: fn(&C),
) -> Quick<()> {
    scope.enter()?;
    // What was never opened: NCCL closes that after a connect that failed (seen with 2.28.3), and its own networks let it pass.
    if raw.is_null() {
        return Ok(());
    }
    // SAFETY: the caller's promise is the one that is asked for.
    let endpoint = unsafe { CommHandle::<C>::from_raw(raw, name) }?;
    // SAFETY: as above; it is still open.
    let open = unsafe { endpoint.as_ref() };
    let is_broken = open.health.is_broken();
    part(&open.comm);
    if is_broken {
        tracing::warn!("{} leaked after a panic: its memory stays in use until the process ends", word_for(C::MARK));
        return Ok(());
    }
    // SAFETY: `into_raw` leaked this box, and NCCL gives it up by closing it.
    drop(unsafe { Box::from_raw(endpoint.as_ptr()) });
    Ok(())
}

/// A comm that takes part in a transfer over rails, whichever way. (Those over TCP streams are in `by_streams`.)
pub(super) enum Transfer<'a> {
    Send(&'a CommHandle<RailSendComm>),
    Recv(&'a CommHandle<RailRecvComm>),
}

impl<'a> Transfer<'a> {
    /// The comm and the number of a request, entered into the call's scope.
    ///
    /// # Errors
    /// As [`CommHandle::enter`].
    ///
    /// # Safety
    /// `raw` is NULL or came from [`CommHandle::request`], and the comm stays open for `'a`.
    #[inline(always)]
    pub(super) unsafe fn of_request(raw: *mut c_void, name: &'static str, scope: &Scope<'a>) -> Quick<(Self, u16)> {
        // SAFETY: the caller promises that it is a request of ours if it is not NULL; anything of ours begins with a mark.
        let mark = unsafe { mark_of(raw, name) }?;
        if mark != SENDING && mark != RECEIVING {
            return Err(of_another_kind(name, mark, SENDING));
        }
        // SAFETY: the mark says what it is, and it lives as long as its comm.
        let request = unsafe { &*raw.cast::<Request>() };
        // SAFETY: a request's comm is open for as long as the request is used, and of the kind that its mark says.
        let transfer = unsafe {
            match mark {
                SENDING => Self::Send(request.endpoint.cast().as_ref()),
                _ => Self::Recv(request.endpoint.cast().as_ref()),
            }
        };
        scope.enter_comm(transfer.health())?;
        Ok((transfer, request.number))
    }

    /// The comm, not entered: for what must get through on a broken one.
    ///
    /// # Errors
    /// [`Error::Argument`] where the pointer is NULL or to something else.
    ///
    /// # Safety
    /// `raw` is NULL or came from this file and was not closed; it stays open for `'a`.
    pub(super) unsafe fn from_raw(raw: *mut c_void, name: &'static str) -> Quick<Self> {
        // SAFETY: the caller's promise is the one that is asked for, and covers the references.
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

/// Gives a registration to NCCL, which hands it back to [`drop_memory`].
pub(super) fn memory_into_raw(memory: Arc<Registration>) -> *mut c_void {
    Arc::into_raw(memory).cast_mut().cast()
}

/// The registration behind an mhandle.
///
/// # Errors
/// [`Error::Argument`] names a NULL.
///
/// # Safety
/// `raw` is NULL or came from [`memory_into_raw`] and was not given back; it is not given back during `'a`.
#[inline(always)]
pub(super) unsafe fn memory<'a>(raw: *mut c_void, name: &'static str) -> Quick<&'a Registration> {
    // SAFETY: the caller's promise is the one that is asked for.
    non_null(raw.cast::<Registration>(), name).map(|memory| unsafe { memory.as_ref() })
}

/// Gives a registration back.
///
/// # Safety
/// `raw` came from [`memory_into_raw`], and NCCL does not use it again.
pub(super) unsafe fn drop_memory(raw: NonNull<c_void>) {
    // SAFETY: `memory_into_raw` gave NCCL this one count.
    unsafe { Arc::from_raw(raw.as_ptr().cast::<Registration>()) }.release();
}

/// The bytes of a connection handle, which NCCL keeps for us from one call of `connect` to the next.
///
/// # Errors
/// [`Error::Argument`] names a NULL.
///
/// # Safety
/// `raw` is NULL or has [`HANDLE_BYTES`] bytes that nobody else touches during `'a`.
pub(super) unsafe fn handle<'a>(raw: *mut c_void, name: &'static str) -> Quick<&'a mut [u8; HANDLE_BYTES]> {
    // SAFETY: the caller's promise is the one that is asked for; bytes need no alignment.
    non_null(raw.cast::<[u8; HANDLE_BYTES]>(), name).map(|mut bytes| unsafe { bytes.as_mut() })
}

/// The first `n` elements of an array of NCCL's.
///
/// # Errors
/// [`Error::Argument`] names a NULL.
///
/// # Safety
/// `raw` is NULL or has `n` elements that nobody writes during `'a`.
#[inline(always)]
pub(super) unsafe fn array<'a, T>(raw: *const T, n: usize, name: &'static str) -> Quick<&'a [T]> {
    // SAFETY: the caller's promise is the one that is asked for.
    non_null(raw.cast_mut(), name).map(|first| unsafe { std::slice::from_raw_parts(first.as_ptr(), n) })
}

/// What one `init` was given for its communicator. It is an entry of a constant table, so it is never freed: a communicator
/// that was split off shares its parent's, and NCCL finalizes it once for each.
///
/// An entry for each traffic class, one for none chosen, one for a number that is no traffic class.
static CONTEXTS: [u8; 258] = [0; 258];
const NONE_CHOSEN: usize = 256;
const NOT_A_CLASS: usize = 257;

/// The context that stands for a traffic class.
pub(super) fn context_for(traffic_class: c_int) -> *mut c_void {
    let index = match u8::try_from(traffic_class) {
        Ok(class) => usize::from(class),
        Err(_) if traffic_class < 0 => NONE_CHOSEN,
        Err(_) => NOT_A_CLASS,
    };
    std::ptr::from_ref(&CONTEXTS[index]).cast_mut().cast()
}

/// The traffic class that a context stands for. It is found by address: nothing is read through the pointer. NULL stands for
/// none chosen.
///
/// # Errors
/// [`Error::Argument`] where the pointer is to none of ours, [`Error::Usage`] where the number was no traffic class.
pub(super) fn context_class(raw: *const c_void) -> Result<Option<u8>> {
    if raw.is_null() {
        return Ok(None);
    }
    match raw.addr().wrapping_sub(CONTEXTS.as_ptr().addr()) {
        class @ 0..=255 => Ok(Some(class as u8)),
        NONE_CHOSEN => Ok(None),
        NOT_A_CLASS => Err(Error::Usage("trafficClass is out of range: 0 to 255, or negative for none".into())),
        _ => Err(Error::Argument("ctx is not a context that init returned".into())),
    }
}

/// The traffic class in a configuration.
///
/// # Errors
/// [`Error::Usage`] where the number is no traffic class.
pub(super) fn class_of(traffic_class: c_int) -> Result<Option<u8>> {
    context_class(context_for(traffic_class))
}

/// What a pointer of NCCL's is to.
///
/// # Safety
/// `raw` is NULL or to something of ours that begins with a mark.
#[inline(always)]
pub(super) unsafe fn mark_of(raw: *mut c_void, name: &'static str) -> Quick<Mark> {
    let mark = non_null(raw.cast::<Mark>(), name)?;
    if !mark.is_aligned() {
        return Err(not_ours(name));
    }
    // SAFETY: it is not NULL, so it is to a mark.
    Ok(unsafe { mark.read() })
}

fn word_for(mark: Mark) -> &'static str {
    match mark {
        LISTEN => "a listen comm",
        SEND | STREAM_SEND => "a send comm",
        RECV | STREAM_RECV => "a receive comm",
        SENDING | RECEIVING | STREAM_SENDING | STREAM_RECEIVING => "a request",
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
fn null(name: &str) -> Box<Error> {
    Box::new(Error::Argument(format!("{name} is NULL")))
}

#[cold]
#[inline(never)]
fn not_ours(name: &str) -> Box<Error> {
    Box::new(Error::Argument(format!("{name} is not a pointer that this plugin returned")))
}

#[cold]
#[inline(never)]
pub(super) fn of_another_kind(name: &str, found: Mark, wanted: Mark) -> Box<Error> {
    Box::new(Error::Argument(format!("{name} is {}; it must be {}", word_for(found), word_for(wanted))))
}

#[cold]
#[inline(never)]
fn no_such_request(number: u16, count: usize) -> Box<Error> {
    Box::new(Error::Internal(format!("request {number} does not exist: there are {count}")))
}

#[cfg(test)]
mod tests;
