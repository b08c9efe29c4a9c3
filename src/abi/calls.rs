//! The functions that NCCL calls through its tables of function pointers. All versions of NCCL's
//! network interface share these functions; `net_tables` adapts the arguments. Each function clears
//! the output arguments that return a pointer, a count or a flag. Then it enters the call's scope
//! ([`guard`]), checks every pointer, and calls its safe counterpart in `plugin` or `comm`. A comm
//! is NCCL's object for a listener or for one end of a connection.

use super::arguments::{Length, Parts, check_data, count_of, irecv_group, part, write_size};
use super::by_streams::{self, AnyComm};
use super::contexts;
use super::guard;
use super::handles::{self, CommHandle, Out, RailComm};
use super::logger;
use super::nccl_version;
use super::properties::FromDevice;
use crate::comm::{
    HostMemory, ListenComm, RailRecvComm, RailSendComm, StreamRecvComm, StreamSendComm,
};
use crate::plugin;
use host::error::{Argument, Result, Usage};
use nccl_abi::net::*;
use nccl_abi::{DebugLogger, NcclResult};
use proto::wire::operation::Operation;
use std::ffi::{c_int, c_void};
use std::ptr;

/// Starts the plugin (v8 to v10).
///
/// # Safety
/// `log` is NULL or NCCL's logger, which any thread may call until the process ends.
pub(super) unsafe extern "C" fn init(log: Option<DebugLogger>) -> NcclResult {
    init_of(log, OptionalMark::IfAsked)
}

/// Starts the plugin for an interface version that marks optional receives as `optional` says.
pub(super) fn init_of(log: Option<DebugLogger>, optional: OptionalMark) -> NcclResult {
    guard::call("init", |scope| {
        scope.enter()?;
        Ok(start(log, None, optional)?)
    })
}

/// Starts the plugin for one communicator (since v11).
///
/// # Safety
/// As [`init`]; `context` is NULL or writable, `config` is NULL or readable.
pub(super) unsafe extern "C" fn init_context(
    context: *mut *mut c_void,
    comm_id: u64,
    config: *const CommConfig,
    log: Option<DebugLogger>,
    _profiler: Option<ProfilerCallback>,
) -> NcclResult {
    guard::call("init", |scope| {
        // SAFETY: guaranteed by the caller.
        let context = unsafe { Out::cleared(context, "ctx", ptr::null_mut()) }?;
        scope.enter()?;
        start(log, Some(comm_id), OptionalMark::IfAsked)?;
        // SAFETY: guaranteed by the caller.
        context.set(contexts::context_for(unsafe { traffic_class_of(config) }));
        Ok(())
    })
}

fn start(log: Option<DebugLogger>, comm_id: Option<u64>, optional: OptionalMark) -> Result<()> {
    logger::install(log);
    let marks_optional = optional == OptionalMark::IfAsked;
    let started = plugin::init(comm_id, marks_optional, || {
        nccl_version::code_of(log).map(nccl_version::text)
    });
    logger::set_trace(plugin::wants_trace());
    started
}

/// # Safety
/// `config` is NULL or readable.
unsafe fn traffic_class_of(config: *const CommConfig) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { config.as_ref() }.map_or(UNDEFINED, |config| config.traffic_class)
}

/// Undoes one call of `init`. NCCL may call `finalize` after a failed `init` too. Ignores the
/// context, which may be NULL or the context of another communicator.
pub(super) unsafe extern "C" fn finalize(_context: *mut c_void) -> NcclResult {
    guard::call("finalize", |scope| {
        scope.enter()?;
        plugin::finalize();
        Ok(())
    })
}

/// # Safety
/// `ndev` is NULL or writable.
pub(super) unsafe extern "C" fn devices(ndev: *mut c_int) -> NcclResult {
    guard::call("devices", |scope| {
        // SAFETY: guaranteed by the caller.
        let ndev = unsafe { Out::cleared(ndev, "ndev", 0) }?;
        scope.enter()?;
        ndev.set(plugin::devices()?);
        Ok(())
    })
}

/// Records the operation that NCCL is about to do on a communicator (since v11). NCCL calls this
/// whenever the operation changes, on two threads: before it connects, and while it transfers.
///
/// # Safety
/// `attributes` is NULL or readable.
pub(super) unsafe extern "C" fn set_net_attr(
    context: *mut c_void,
    attributes: *const NetAttr,
) -> NcclResult {
    guard::call("setNetAttr", |scope| {
        // SAFETY: guaranteed by the caller.
        let [attributes] = unsafe { handles::array(attributes, 1, "netAttr") }? else {
            return Ok(());
        };
        scope.enter()?;
        let operation = Operation::of_bits(attributes.op, attributes.algo, attributes.proto);
        if let (Some(current), Some(_)) = (contexts::operation(context)?, operation) {
            current.set(operation);
        }
        Ok(())
    })
}

/// # Safety
/// `properties` is NULL or writable.
pub(super) unsafe extern "C" fn get_properties<P: FromDevice>(
    dev: c_int,
    properties: *mut P,
) -> NcclResult {
    guard::call("getProperties", |scope| {
        // SAFETY: guaranteed by the caller.
        let place = unsafe { Out::new(properties, "props") }?;
        scope.enter()?;
        place.set(P::new(dev, plugin::properties(dev)?));
        Ok(())
    })
}

/// Opens a listener, without a communicator (up to v10).
///
/// # Safety
/// `handle` is NULL or has [`HANDLE_BYTES`] bytes; `listen_comm` is NULL or writable.
pub(super) unsafe extern "C" fn listen(
    dev: c_int,
    handle: *mut c_void,
    listen_comm: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: guaranteed by the caller.
    unsafe { listen_for(ptr::null_mut(), dev, handle, listen_comm) }
}

/// Opens a listener for the communicator of `context`, which may be NULL.
///
/// # Safety
/// As [`listen`].
pub(super) unsafe extern "C" fn listen_for(
    context: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    listen_comm: *mut *mut c_void,
) -> NcclResult {
    guard::call("listen", |scope| {
        // SAFETY: guaranteed by the caller.
        let listen_comm = unsafe { Out::cleared(listen_comm, "listenComm", ptr::null_mut()) }?;
        // SAFETY: guaranteed by the caller; bytes need no alignment.
        let place = unsafe { Out::new(handle.cast::<[u8; HANDLE_BYTES]>(), "handle") }?;
        scope.enter()?;
        let operation = contexts::operation(context)?;
        let (comm, handle) = plugin::listen(dev)?;
        if let Some(operation) = operation {
            comm.belongs_to(operation);
        }
        place.set(handle);
        listen_comm.set(CommHandle::into_raw(comm));
        Ok(())
    })
}

/// Traffic class of a connection, in the form in which the interface version passes it.
pub(super) enum Class {
    /// The interface has no argument for a class (v8 and v9).
    NotPassed,
    /// The communicator's configuration; may be NULL (v10).
    Config(*const CommConfig),
    /// The communicator's context; may be NULL (since v11).
    Context(*mut c_void),
}

/// # Safety
/// `handle` is NULL or has [`HANDLE_BYTES`] bytes, `send_comm` is NULL or writable, a
/// [`Class::Config`] is NULL or readable.
pub(super) unsafe fn connect(
    dev: c_int,
    handle: *mut c_void,
    class: Class,
    send_comm: *mut *mut c_void,
) -> NcclResult {
    guard::call("connect", |scope| {
        // SAFETY: guaranteed by the caller.
        let send_comm = unsafe { Out::cleared(send_comm, "sendComm", ptr::null_mut()) }?;
        // SAFETY: guaranteed by the caller; NCCL gives one handle to one thread.
        let handle = unsafe { handles::handle(handle, "handle") }?;
        scope.enter()?;
        let operation = match class {
            Class::Context(context) => contexts::operation(context)?,
            Class::NotPassed | Class::Config(_) => None,
        };
        let class = match class {
            Class::NotPassed => None,
            // SAFETY: guaranteed by the caller.
            Class::Config(config) => contexts::class_of(unsafe { traffic_class_of(config) })?,
            Class::Context(context) => contexts::class(context)?,
        };
        if let Some(comm) = plugin::connect(dev, handle, class)? {
            if let Some(operation) = operation {
                comm.belongs_to(operation);
            }
            send_comm.set(handles::send_into_raw(comm));
        }
        Ok(())
    })
}

/// # Safety
/// `listen_comm` is NULL or an open comm; `recv_comm` is NULL or writable.
pub(super) unsafe extern "C" fn accept(
    listen_comm: *mut c_void,
    recv_comm: *mut *mut c_void,
    _device_comm: *mut *mut NetDeviceHandle,
) -> NcclResult {
    guard::call("accept", |scope| {
        // SAFETY: guaranteed by the caller.
        let recv_comm = unsafe { Out::cleared(recv_comm, "recvComm", ptr::null_mut()) }?;
        // SAFETY: NCCL does not close a comm during a call on it.
        let listener =
            unsafe { CommHandle::<ListenComm>::enter(listen_comm, "listenComm", scope) }?;
        if let Some(comm) = listener.comm().accept()? {
            recv_comm.set(handles::recv_into_raw(comm));
        }
        Ok(())
    })
}

/// # Safety
/// `comm` is NULL or open, `mhandle` is NULL or writable; the memory stays mapped until `deregMr`.
pub(super) unsafe extern "C" fn reg_mr(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    mhandle: *mut *mut c_void,
) -> NcclResult {
    guard::call("regMr", |scope| {
        // SAFETY: guaranteed by the caller.
        let mhandle = unsafe { Out::cleared(mhandle, "mhandle", ptr::null_mut()) }?;
        // SAFETY: NCCL does not close a comm during a call on it.
        let any_comm = unsafe { AnyComm::enter(comm, "comm", scope) }?;
        host_pointer(kind)?;
        if data.is_null() || data.addr().checked_add(size).is_none() {
            return Err(Box::new(
                Argument::Data {
                    addr: data.addr(),
                    bytes: size,
                }
                .into(),
            ));
        }
        // SAFETY: NCCL keeps registered memory mapped until `deregMr`.
        let memory = unsafe { HostMemory::from_caller(data.addr(), size) };
        mhandle.set(handles::memory_into_raw(any_comm.register(memory)?));
        Ok(())
    })
}

fn host_pointer(kind: c_int) -> Result<()> {
    match kind {
        PTR_HOST => Ok(()),
        PTR_CUDA => Err(Usage::CudaMemory.into()),
        kind => Err(Argument::MemoryType {
            kind,
            host: PTR_HOST,
        }
        .into()),
    }
}

/// Deregisters memory. NCCL passes a NULL `mhandle` after a failed registration.
///
/// # Safety
/// `comm` is NULL or open; `mhandle` is NULL, or came from [`reg_mr`] and was not given back.
pub(super) unsafe extern "C" fn dereg_mr(comm: *mut c_void, mhandle: *mut c_void) -> NcclResult {
    guard::call("deregMr", |scope| {
        scope.enter()?;
        // SAFETY: NCCL does not close a comm during a call on it.
        let any_comm = unsafe { AnyComm::from_raw(comm, "comm") }?;
        // The registrations of a broken comm are leaked. NCCL deregisters all memory before it
        // closes the comm. An error here would keep NCCL from closing the comm, so the result is
        // success.
        if any_comm.health().is_broken() {
            return Ok(());
        }
        scope.enter_comm(any_comm.health())?;
        if let Some(memory) = ptr::NonNull::new(mhandle) {
            // SAFETY: guaranteed by the caller; NCCL does not use the mhandle after this call.
            unsafe { handles::drop_memory(memory) };
        }
        Ok(())
    })
}

/// `isend` as declared since v10; ignores the profiler handle.
///
/// # Safety
/// As [`isend_of`].
pub(super) unsafe extern "C" fn isend(
    send_comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    mhandle: *mut c_void,
    _profiler_handle: *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: the caller upholds the same contract.
    unsafe { isend_of(send_comm, data, size, tag, mhandle, request) }
}

/// Starts a send. The length is an `int` in v8 and a `size_t` since v9. The compiler always inlines
/// this function and the guard: into the entry point of v8, and into [`isend`].
///
/// # Safety
/// `send_comm` is NULL or open, `mhandle` is NULL or registered with it, `request` is NULL or
/// writable; the data does not change until the request is complete.
#[inline(always)]
pub(super) unsafe fn isend_of<L: Length>(
    send_comm: *mut c_void,
    data: *mut c_void,
    size: L,
    tag: c_int,
    mhandle: *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    guard::call("isend", |scope| {
        // SAFETY: guaranteed by the caller.
        let request = unsafe { Out::cleared(request, "request", ptr::null_mut()) }?;
        let bytes = size.bytes()?;
        // SAFETY: guaranteed by the caller.
        if !unsafe { handles::is_comm::<RailSendComm>(send_comm) } {
            // SAFETY: as above.
            return unsafe {
                by_streams::isend(send_comm, data, bytes, tag, mhandle, request, scope)
            };
        }
        // SAFETY: NCCL does not close a comm during a call on it.
        let endpoint = unsafe { CommHandle::<RailSendComm>::enter(send_comm, "sendComm", scope) }?;
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
    })
}

/// Says how an interface version marks a receive as optional. NCCL does not need the completion of
/// an optional receive.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum OptionalMark {
    /// No receive is optional, and `*request` may be uninitialised on entry (v8).
    Never,
    /// A receive is optional if `*request` is [`OPTIONAL_RECV_COMPLETION`] on entry (since v9).
    IfAsked,
}

impl OptionalMark {
    /// # Safety
    /// With [`OptionalMark::IfAsked`], `request` is NULL or `*request` is initialised. With
    /// [`OptionalMark::Never`], `*request` is not read.
    #[inline(always)]
    unsafe fn is_asked(self, request: *mut *mut c_void) -> bool {
        // SAFETY: guaranteed by the caller.
        let on_entry = || unsafe { request.as_ref() };
        self == Self::IfAsked
            && on_entry().is_some_and(|word| word.addr() == OPTIONAL_RECV_COMPLETION)
    }
}

/// `irecv` as declared since v10; ignores the profiler handles.
///
/// # Safety
/// As [`irecv_of`].
pub(super) unsafe extern "C" fn irecv(
    recv_comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut usize,
    tags: *mut c_int,
    mhandles: *mut *mut c_void,
    _profiler_handles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: the caller upholds the same contract.
    unsafe {
        irecv_of(
            recv_comm,
            Parts {
                n,
                data,
                sizes,
                tags,
                mhandles,
            },
            OptionalMark::IfAsked,
            request,
        )
    }
}

/// Starts a receive. Inlined like [`isend_of`].
///
/// # Safety
/// `recv_comm` is NULL or open; `request` is NULL or writable. With [`OptionalMark::IfAsked`],
/// `*request` is also initialised. The arrays are NULL or have `n` elements; each mhandle is NULL
/// or registered with the comm. Nothing else uses the buffers until the request is complete.
#[inline(always)]
pub(super) unsafe fn irecv_of<L: Length>(
    recv_comm: *mut c_void,
    parts: Parts<L>,
    optional: OptionalMark,
    request: *mut *mut c_void,
) -> NcclResult {
    let Parts {
        n,
        data,
        sizes,
        tags,
        mhandles,
    } = parts;
    guard::call("irecv", |scope| {
        // SAFETY: guaranteed by the caller.
        let optional = unsafe { optional.is_asked(request) };
        // SAFETY: guaranteed by the caller.
        let request = unsafe { Out::cleared(request, "request", ptr::null_mut()) }?;
        // SAFETY: guaranteed by the caller.
        if !unsafe { handles::is_comm::<RailRecvComm>(recv_comm) } {
            let parts = Parts {
                n,
                data,
                sizes,
                tags,
                mhandles,
            };
            // SAFETY: as above.
            return unsafe { by_streams::irecv(recv_comm, parts, optional, request, scope) };
        }
        // SAFETY: NCCL does not close a comm during a call on it.
        let endpoint = unsafe { CommHandle::<RailRecvComm>::enter(recv_comm, "recvComm", scope) }?;
        let count = count_of(n)?;
        let number = if count == 1 {
            // One part, the common case, does not need the array of eight parts of a group.
            // SAFETY: the caller guarantees that each array has one element.
            let (data, sizes, tags, mhandles) = unsafe {
                Parts {
                    n,
                    data,
                    sizes,
                    tags,
                    mhandles,
                }
                .first(1)
            }?;
            // SAFETY: guaranteed by the caller.
            let part = unsafe { part(data[0], sizes[0], tags[0], mhandles[0]) }?;
            endpoint.comm().irecv(&[part], optional)?
        } else {
            let parts = Parts {
                n,
                data,
                sizes,
                tags,
                mhandles,
            };
            // SAFETY: guaranteed by the caller.
            unsafe { irecv_group(parts, count, |parts| endpoint.comm().irecv(parts, optional)) }?
        };
        if let Some(number) = number {
            request.set(endpoint.request(number)?);
        }
        Ok(())
    })
}

/// Only checks its arguments: received data is in host memory, and needs no flush once its request
/// is complete.
///
/// # Safety
/// `recv_comm` is NULL or open, `request` is NULL or writable.
pub(super) unsafe extern "C" fn iflush(
    recv_comm: *mut c_void,
    n: c_int,
    _data: *mut *mut c_void,
    _sizes: *mut c_int,
    _mhandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    guard::call("iflush", |scope| {
        // `*request` stays NULL, which tells NCCL not to wait.
        // SAFETY: guaranteed by the caller.
        unsafe { Out::cleared(request, "request", ptr::null_mut()) }?;
        // SAFETY: NCCL does not close a comm during a call on it.
        unsafe { AnyComm::enter(recv_comm, "recvComm", scope) }?;
        count_of(n).map(|_| ())
    })
}

/// # Safety
/// `request` is NULL or came from `isend` or `irecv` of an open comm. `done` is NULL or writable.
/// `sizes` is NULL or writable: one element for a send, one for each part of a receive.
pub(super) unsafe extern "C" fn test(
    request: *mut c_void,
    done: *mut c_int,
    sizes: *mut c_int,
) -> NcclResult {
    guard::call("test", |scope| {
        // SAFETY: guaranteed by the caller.
        let done = unsafe { Out::cleared(done, "done", 0) }?;
        // SAFETY: guaranteed by the caller.
        let is_over_rails = unsafe {
            handles::is_request::<RailSendComm>(request)
                || handles::is_request::<RailRecvComm>(request)
        };
        if !is_over_rails {
            // SAFETY: guaranteed by the caller.
            return unsafe { by_streams::test(request, done, sizes, scope) };
        }
        // SAFETY: guaranteed by the caller.
        let tell = |part, bytes| unsafe { write_size(sizes, part, bytes) };
        // SAFETY: guaranteed by the caller.
        let finished = match unsafe { RailComm::of_request(request, "request", scope) }? {
            (RailComm::Send(send), number) => match send.comm().test(number)? {
                Some(bytes) => {
                    tell(0, bytes);
                    true
                }
                None => false,
            },
            (RailComm::Recv(recv), number) => recv.comm().test(number, tell)?,
        };
        if finished {
            done.set(1);
        }
        Ok(())
    })
}

/// # Safety
/// `comm` is NULL or an open comm, and NCCL does not use the comm again.
pub(super) unsafe extern "C" fn close_send(comm: *mut c_void) -> NcclResult {
    // SAFETY: guaranteed by the caller.
    guard::call("closeSend", |scope| unsafe {
        match handles::is_comm::<StreamSendComm>(comm) {
            false => handles::close(comm, "sendComm", scope, RailSendComm::close),
            true => handles::close(comm, "sendComm", scope, StreamSendComm::close),
        }
    })
}

/// # Safety
/// As [`close_send`].
pub(super) unsafe extern "C" fn close_recv(comm: *mut c_void) -> NcclResult {
    // SAFETY: guaranteed by the caller.
    guard::call("closeRecv", |scope| unsafe {
        match handles::is_comm::<StreamRecvComm>(comm) {
            false => handles::close(comm, "recvComm", scope, RailRecvComm::close),
            true => handles::close(comm, "recvComm", scope, StreamRecvComm::close),
        }
    })
}

/// # Safety
/// As [`close_send`].
pub(super) unsafe extern "C" fn close_listen(comm: *mut c_void) -> NcclResult {
    // SAFETY: guaranteed by the caller.
    guard::call("closeListen", |scope| unsafe {
        handles::close(comm, "listenComm", scope, |_: &ListenComm| ())
    })
}
