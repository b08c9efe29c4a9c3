//! The tables that NCCL looks up by name, one for each version of the network interface. NCCL uses
//! the newest version that it knows. The functions in this file adapt a version's arguments to
//! those of `calls`. The number at the end of a function's name is the first version in which NCCL
//! calls that function with these arguments.

use super::Exported;
use super::arguments::Parts;
use super::calls::{self, Class, OptionalMark};
use super::properties::FromDevice;
use crate::plugin;
use nccl_abi::net::*;
use nccl_abi::{DebugLogger, NcclResult};
use std::ffi::{c_int, c_void};
use std::ptr;

/// The table of interface v8.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclNetPlugin_v8: Exported<NetV8> =
    table(init_v8, calls::listen, connect_v8, isend_v8, irecv_v8, ());

/// The table of interface v9.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclNetPlugin_v9: Exported<NetV9> = table(
    calls::init,
    calls::listen,
    connect_v8,
    isend_v9,
    irecv_v9,
    MORE_V9,
);

/// The table of interface v10.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclNetPlugin_v10: Exported<NetV10> = table(
    init_v10,
    calls::listen,
    connect_v10,
    calls::isend,
    calls::irecv,
    MORE_V9,
);

/// The table of interface v11.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclNetPlugin_v11: Exported<NetV11> = table(
    calls::init_context,
    calls::listen_for,
    connect_v11,
    calls::isend,
    calls::irecv,
    more_v11(),
);

/// The table of interface v12.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclNetPlugin_v12: Exported<NetV12> = table(
    calls::init_context,
    calls::listen_for,
    connect_v11,
    calls::isend,
    calls::irecv,
    more_v11(),
);

// `make_v_device` is NULL, here and in `more_v11`: the plugin's one device already merges all
// rails, so NCCL has nothing to merge.
const MORE_V9: MoreV9 = MoreV9 {
    make_v_device: None,
};

const fn more_v11<const N: usize>() -> MoreV11<N> {
    MoreV11 {
        make_v_device: None,
        finalize: Some(calls::finalize),
        set_net_attr: Some(calls::set_net_attr),
    }
}

const fn table<Init, Properties: FromDevice, Listen, Connect, Isend, Irecv, More>(
    init: Init,
    listen: Listen,
    connect: Connect,
    isend: Isend,
    irecv: Irecv,
    more: More,
) -> Exported<Net<Init, Properties, Listen, Connect, Isend, Irecv, More>> {
    Exported(Net {
        name: plugin::NETWORK_NAME.as_ptr(),
        init: Some(init),
        devices: Some(calls::devices),
        get_properties: Some(calls::get_properties::<Properties>),
        listen: Some(listen),
        connect: Some(connect),
        accept: Some(calls::accept),
        reg_mr: Some(calls::reg_mr),
        // Only host memory is registered.
        reg_mr_dma_buf: None,
        dereg_mr: Some(calls::dereg_mr),
        isend: Some(isend),
        irecv: Some(irecv),
        iflush: Some(calls::iflush),
        test: Some(calls::test),
        close_send: Some(calls::close_send),
        close_recv: Some(calls::close_recv),
        close_listen: Some(calls::close_listen),
        // No network code runs on the GPU.
        get_device_mr: None,
        irecv_consumed: None,
        more,
    })
}

unsafe extern "C" fn init_v8(log: Option<DebugLogger>) -> NcclResult {
    calls::init_of(log, OptionalMark::Never)
}

unsafe extern "C" fn init_v10(
    log: Option<DebugLogger>,
    _profiler: Option<ProfilerCallback>,
) -> NcclResult {
    // SAFETY: NCCL passes the arguments that this version declares; `calls` requires nothing more.
    unsafe { calls::init(log) }
}

unsafe extern "C" fn connect_v8(
    dev: c_int,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
    _device_comm: *mut *mut NetDeviceHandle,
) -> NcclResult {
    // SAFETY: as in `init_v10`.
    unsafe { calls::connect(dev, handle, Class::NotPassed, send_comm) }
}

unsafe extern "C" fn connect_v10(
    dev: c_int,
    config: *const CommConfig,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
    _device_comm: *mut *mut NetDeviceHandle,
) -> NcclResult {
    // SAFETY: as in `init_v10`.
    unsafe { calls::connect(dev, handle, Class::Config(config), send_comm) }
}

unsafe extern "C" fn connect_v11(
    context: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
    _device_comm: *mut *mut NetDeviceHandle,
) -> NcclResult {
    // SAFETY: as in `init_v10`.
    unsafe { calls::connect(dev, handle, Class::Context(context), send_comm) }
}

unsafe extern "C" fn isend_v8(
    send_comm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    tag: c_int,
    mhandle: *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: as in `init_v10`.
    unsafe { calls::isend_of(send_comm, data, size, tag, mhandle, request) }
}

unsafe extern "C" fn isend_v9(
    send_comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    mhandle: *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: as in `init_v10`.
    unsafe {
        calls::isend(
            send_comm,
            data,
            size,
            tag,
            mhandle,
            ptr::null_mut(),
            request,
        )
    }
}

unsafe extern "C" fn irecv_v8(
    recv_comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    tags: *mut c_int,
    mhandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: as in `init_v10`.
    unsafe {
        calls::irecv_of(
            recv_comm,
            Parts {
                n,
                data,
                sizes,
                tags,
                mhandles,
            },
            OptionalMark::Never,
            request,
        )
    }
}

unsafe extern "C" fn irecv_v9(
    recv_comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut usize,
    tags: *mut c_int,
    mhandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: as in `init_v10`.
    unsafe {
        calls::irecv(
            recv_comm,
            n,
            data,
            sizes,
            tags,
            mhandles,
            ptr::null_mut(),
            request,
        )
    }
}
