//! ABI v12: NCCL 2.30. Here a device may be merged from eight others, and tells its rail and plane.

use super::calls::{self, Class};
use super::types::{
    CommConfig, DebugLogger, NetAttr, NetDeviceHandle, ProfilerCallback, PropertiesV12, VDeviceProps, functions,
};
use crate::error::NcclResult;
use crate::plugin;
use std::ffi::{c_char, c_int, c_void};

/// `ncclNet_v12_t`.
#[derive(Debug)]
#[repr(C)]
pub struct NetV12 {
    /// The network's name.
    pub name: *const c_char,
    /// Starts the plugin, once for each communicator.
    pub init: Option<
        unsafe extern "C" fn(
            context: *mut *mut c_void,
            comm_id: u64,
            config: *const CommConfig,
            log: Option<DebugLogger>,
            profiler: Option<ProfilerCallback>,
        ) -> NcclResult,
    >,
    /// See [`functions::Devices`].
    pub devices: Option<functions::Devices>,
    /// Describes a device.
    pub get_properties: Option<unsafe extern "C" fn(dev: c_int, properties: *mut PropertiesV12) -> NcclResult>,
    /// Makes a listening comm and the handle by which a peer finds it.
    pub listen: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            dev: c_int,
            handle: *mut c_void,
            listen_comm: *mut *mut c_void,
        ) -> NcclResult,
    >,
    /// Connects to a handle, or leaves `*send_comm` NULL.
    pub connect: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
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
            size: usize,
            tag: c_int,
            mhandle: *mut c_void,
            profiler_handle: *mut c_void,
            request: *mut *mut c_void,
        ) -> NcclResult,
    >,
    /// Starts a receive of `n` parts, or leaves `*request` NULL.
    pub irecv: Option<
        unsafe extern "C" fn(
            recv_comm: *mut c_void,
            n: c_int,
            data: *mut *mut c_void,
            sizes: *mut usize,
            tags: *mut c_int,
            mhandles: *mut *mut c_void,
            profiler_handles: *mut *mut c_void,
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
    /// NULL: the one device is merged already.
    pub make_v_device: Option<unsafe extern "C" fn(dev: *mut c_int, of: *const VDeviceProps<8>) -> NcclResult>,
    /// Ends what `init` began.
    pub finalize: Option<functions::Finalize>,
    /// NULL: the plugin does not need to know.
    pub set_net_attr: Option<unsafe extern "C" fn(context: *mut c_void, attributes: *const NetAttr) -> NcclResult>,
}

// SAFETY: the table never changes, and its one pointer is to a constant string.
unsafe impl Sync for NetV12 {}

/// What NCCL looks up by name.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclNetPlugin_v12: NetV12 = NetV12 {
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
    isend: Some(calls::isend),
    irecv: Some(calls::irecv),
    iflush: Some(calls::iflush),
    test: Some(calls::test),
    close_send: Some(calls::close_send),
    close_recv: Some(calls::close_recv),
    close_listen: Some(calls::close_listen),
    get_device_mr: None,
    irecv_consumed: None,
    make_v_device: None,
    finalize: Some(calls::finalize),
    set_net_attr: None,
};

unsafe extern "C" fn init(
    context: *mut *mut c_void,
    comm_id: u64,
    config: *const CommConfig,
    log: Option<DebugLogger>,
    _profiler: Option<ProfilerCallback>,
) -> NcclResult {
    // SAFETY: NCCL passes what this version of the interface says, and `calls` asks for nothing more.
    unsafe { calls::init_context(context, comm_id, config, log) }
}

unsafe extern "C" fn get_properties(dev: c_int, properties: *mut PropertiesV12) -> NcclResult {
    // SAFETY: NCCL passes what this version of the interface says, and `calls` asks for nothing more.
    unsafe { calls::get_properties(dev, properties, |newest| newest) }
}

unsafe extern "C" fn listen(
    _context: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    listen_comm: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL passes what this version of the interface says, and `calls` asks for nothing more.
    unsafe { calls::listen(dev, handle, listen_comm) }
}

unsafe extern "C" fn connect(
    context: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
    _device_comm: *mut *mut NetDeviceHandle,
) -> NcclResult {
    // SAFETY: NCCL passes what this version of the interface says, and `calls` asks for nothing more.
    unsafe { calls::connect(dev, handle, Class::Context(context), send_comm) }
}
