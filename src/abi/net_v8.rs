//! ABI v8: NCCL 2.20 to 2.23. Here sizes are `int`, and no receive is optional.

use super::calls::{self, Class, Optional, Parts};
use super::types::{DebugLogger, NetDeviceHandle, PropertiesV8, PropertiesV9, PropertiesV11, functions};
use crate::error::NcclResult;
use crate::plugin;
use std::ffi::{c_char, c_int, c_void};

/// `ncclNet_v8_t`.
#[derive(Debug)]
#[repr(C)]
pub struct NetV8 {
    /// The network's name.
    pub name: *const c_char,
    /// Starts the plugin.
    pub init: Option<unsafe extern "C" fn(log: Option<DebugLogger>) -> NcclResult>,
    /// See [`functions::Devices`].
    pub devices: Option<functions::Devices>,
    /// Describes a device.
    pub get_properties: Option<unsafe extern "C" fn(dev: c_int, properties: *mut PropertiesV8) -> NcclResult>,
    /// Makes a listening comm and the handle by which a peer finds it.
    pub listen:
        Option<unsafe extern "C" fn(dev: c_int, handle: *mut c_void, listen_comm: *mut *mut c_void) -> NcclResult>,
    /// Connects to a handle, or leaves `*send_comm` NULL.
    pub connect: Option<
        unsafe extern "C" fn(
            dev: c_int,
            handle: *mut c_void,
            send_comm: *mut *mut c_void,
            device_comm: *mut *mut NetDeviceHandle,
        ) -> NcclResult,
    >,
    /// See [`functions::Accept`].
    pub accept: Option<functions::Accept>,
    /// See [`functions::RegMr`].
    pub reg_mr: Option<functions::RegMr>,
    /// NULL: only host memory is registered.
    pub reg_mr_dma_buf: Option<functions::RegMrDmaBuf>,
    /// See [`functions::DeregMr`].
    pub dereg_mr: Option<functions::DeregMr>,
    /// Starts a send, or leaves `*request` NULL.
    pub isend: Option<
        unsafe extern "C" fn(
            send_comm: *mut c_void,
            data: *mut c_void,
            size: c_int,
            tag: c_int,
            mhandle: *mut c_void,
            request: *mut *mut c_void,
        ) -> NcclResult,
    >,
    /// Starts a receive of `n` parts, or leaves `*request` NULL.
    pub irecv: Option<
        unsafe extern "C" fn(
            recv_comm: *mut c_void,
            n: c_int,
            data: *mut *mut c_void,
            sizes: *mut c_int,
            tags: *mut c_int,
            mhandles: *mut *mut c_void,
            request: *mut *mut c_void,
        ) -> NcclResult,
    >,
    /// See [`functions::Iflush`].
    pub iflush: Option<functions::Iflush>,
    /// See [`functions::Test`].
    pub test: Option<functions::Test>,
    /// See [`functions::Close`].
    pub close_send: Option<functions::Close>,
    /// See [`functions::Close`].
    pub close_recv: Option<functions::Close>,
    /// See [`functions::Close`].
    pub close_listen: Option<functions::Close>,
    /// NULL: no code on the GPU.
    pub get_device_mr: Option<functions::GetDeviceMr>,
    /// NULL: no code on the GPU.
    pub irecv_consumed: Option<functions::IrecvConsumed>,
}

// SAFETY: the table never changes, and its one pointer is to a constant string.
unsafe impl Sync for NetV8 {}

/// What NCCL looks up by name.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclNetPlugin_v8: NetV8 = NetV8 {
    name: plugin::NETWORK_NAME.as_ptr(),
    init: Some(init),
    devices: Some(calls::devices),
    get_properties: Some(get_properties),
    listen: Some(listen),
    connect: Some(connect),
    accept: Some(calls::accept),
    reg_mr: Some(calls::reg_mr),
    reg_mr_dma_buf: None,
    dereg_mr: Some(calls::dereg_mr),
    isend: Some(isend),
    irecv: Some(irecv),
    iflush: Some(calls::iflush),
    test: Some(calls::test),
    close_send: Some(calls::close_send),
    close_recv: Some(calls::close_recv),
    close_listen: Some(calls::close_listen),
    get_device_mr: None,
    irecv_consumed: None,
};

unsafe extern "C" fn init(log: Option<DebugLogger>) -> NcclResult {
    // SAFETY: NCCL passes what this version of the interface says, and `calls` asks for nothing more.
    unsafe { calls::init(log) }
}

unsafe extern "C" fn get_properties(dev: c_int, properties: *mut PropertiesV8) -> NcclResult {
    // SAFETY: NCCL passes what this version of the interface says, and `calls` asks for nothing more.
    unsafe {
        calls::get_properties(dev, properties, |newest| {
            PropertiesV8::from(PropertiesV9::from(PropertiesV11::from(newest)))
        })
    }
}

unsafe extern "C" fn listen(dev: c_int, handle: *mut c_void, listen_comm: *mut *mut c_void) -> NcclResult {
    // SAFETY: NCCL passes what this version of the interface says, and `calls` asks for nothing more.
    unsafe { calls::listen(dev, handle, listen_comm) }
}

unsafe extern "C" fn connect(
    dev: c_int,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
    _device_comm: *mut *mut NetDeviceHandle,
) -> NcclResult {
    // SAFETY: NCCL passes what this version of the interface says, and `calls` asks for nothing more.
    unsafe { calls::connect(dev, handle, Class::Unchosen, send_comm) }
}

unsafe extern "C" fn isend(
    send_comm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    tag: c_int,
    mhandle: *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL passes what this version of the interface says, and `calls` asks for nothing more.
    unsafe { calls::isend_of(send_comm, data, size, tag, mhandle, request) }
}

unsafe extern "C" fn irecv(
    recv_comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    tags: *mut c_int,
    mhandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL passes what this version of the interface says, and `calls` asks for nothing more.
    unsafe { calls::irecv_of(recv_comm, Parts { n, data, sizes, tags, mhandles }, Optional::Never, request) }
}
