//! NCCL's interface for network plugins, `ncclNet_v8_t` to `ncclNet_v12_t`.

use crate::NcclResult;
use functions::*;
use std::ffi::{c_char, c_int, c_void};
use std::ops::RangeInclusive;

/// Versions of the network interface, from NCCL 2.20 (8) to 2.30 (12).
pub const NET_VERSIONS: RangeInclusive<u32> = 8..=12;

/// Bytes of a connection handle (`NCCL_NET_HANDLE_MAXSIZE`).
pub const HANDLE_BYTES: usize = 128;
/// Largest number of sub-receives in a grouped receive; upper bound of the advertised `maxRecvs`.
pub const MAX_RECVS: usize = 8;
/// A pointer into host memory (`NCCL_PTR_HOST`), the only kind that this plugin supports.
pub const PTR_HOST: c_int = 1;
/// A pointer into CUDA device memory (`NCCL_PTR_CUDA`).
pub const PTR_CUDA: c_int = 2;
/// Value of `net_device_type`: the host drives the network (`NCCL_NET_DEVICE_HOST`).
pub const NET_DEVICE_HOST: c_int = 0;
/// Value of `net_device_version`: no network code runs on the GPU
/// (`NCCL_NET_DEVICE_INVALID_VERSION`).
pub const NET_DEVICE_INVALID_VERSION: c_int = 0;
/// Value of `*request` on entry to `irecv` if NCCL does not need the receive's completion. Since v9
/// (`NCCL_NET_OPTIONAL_RECV_COMPLETION`).
pub const OPTIONAL_RECV_COMPLETION: usize = 1;
/// An id or traffic class that was not set (`NCCL_NET_ID_UNDEF`, `NCCL_NET_TRAFFIC_CLASS_UNDEF`).
pub const UNDEFINED: i32 = -1;

/// `ncclProfilerCallback_t`. This plugin reports nothing to NCCL's profiler and never calls it.
pub type ProfilerCallback = unsafe extern "C" fn(
    event_handle: *mut *mut c_void,
    kind: c_int,
    parent_handle: *mut c_void,
    plugin_id: i64,
    extra: *mut c_void,
) -> NcclResult;

/// `ncclNetDeviceHandle_t`: describes a network that GPU kernels drive. The plugin never fills in
/// such a description.
#[derive(Debug)]
#[repr(C)]
pub struct NetDeviceHandle {
    /// The side that drives the network; 0 for the host ([`NET_DEVICE_HOST`]).
    pub net_device_type: c_int,
    /// Version of the network code on the GPU.
    pub net_device_version: c_int,
    /// Object for the network code on the GPU.
    pub handle: *mut c_void,
    /// Size of that object in bytes.
    pub size: usize,
    /// Nonzero if NCCL's proxy thread must still make progress.
    pub needs_proxy_progress: c_int,
}

/// `ncclNetVDeviceProps`: lists the devices that form a merged device.
#[derive(Debug)]
#[repr(C)]
pub struct VDeviceProps<const N: usize> {
    /// Number of entries used in `devs`.
    pub ndevs: c_int,
    /// NCCL's numbers of the devices.
    pub devs: [c_int; N],
}

/// `ncclNetCommConfig`, since v10.
#[derive(Debug)]
#[repr(C)]
pub struct CommConfig {
    /// The RoCE traffic class, 0 to 255, or [`UNDEFINED`].
    pub traffic_class: c_int,
}

/// `ncclNetCommAttr`, since v11: the peers and flows that NCCL expects in one direction.
#[derive(Debug)]
#[repr(C)]
pub struct CommAttr {
    /// The most peers at a time.
    pub max_concurrent_peers: i32,
    /// The fewest peers at a time.
    pub min_concurrent_peers: i32,
    /// The most flows to one peer.
    pub max_flows_per_peer: i32,
    /// The fewest flows to one peer.
    pub min_flows_per_peer: i32,
}

/// `ncclNetAttr`, since v11: announces NCCL's next operations. `op`, `algo` and `proto` are bit
/// masks.
#[derive(Debug)]
#[repr(C)]
pub struct NetAttr {
    /// Attributes of the sending side.
    pub send_comm_attr: CommAttr,
    /// Attributes of the receiving side.
    pub recv_comm_attr: CommAttr,
    /// The collective.
    pub op: u32,
    /// The algorithm.
    pub algo: u32,
    /// The protocol.
    pub proto: u32,
}

/// `ncclNetProperties`. `Flush` is the type of `force_flush`: `()` in v8, which lacks that field.
/// `More` has the fields at the end, which later versions add.
#[derive(Debug)]
#[repr(C)]
pub struct Properties<Flush, More> {
    /// Name of the device in logs.
    pub name: *const c_char,
    /// Path of the device's PCI function below `/sys`, or NULL.
    pub pci_path: *const c_char,
    /// Identity shared by all functions of one adapter.
    pub guid: u64,
    /// Supported memory: [`PTR_HOST`], [`PTR_CUDA`] or both.
    pub ptr_support: c_int,
    /// 1 if a registration is valid for every comm of the device.
    pub reg_is_global: c_int,
    /// 1 makes NCCL flush after every receive, even where NCCL sees no need.
    pub force_flush: Flush,
    /// Speed in Mb/s.
    pub speed: c_int,
    /// Port number, from 1.
    pub port: c_int,
    /// Latency in microseconds.
    pub latency: f32,
    /// Largest number of comms.
    pub max_comms: c_int,
    /// Largest number of sub-receives in one grouped receive.
    pub max_recvs: c_int,
    /// The side that drives the network; 0 for the host ([`NET_DEVICE_HOST`]).
    pub net_device_type: c_int,
    /// Version of the network code on the GPU; 0 if there is none ([`NET_DEVICE_INVALID_VERSION`]).
    pub net_device_version: c_int,
    /// Fields that later versions add.
    pub more: More,
}

/// `ncclNetProperties_v8_t`.
pub type PropertiesV8 = Properties<(), ()>;
/// `ncclNetProperties_v9_t` and `_v10_t`.
pub type PropertiesV9 = Properties<c_int, MorePropertiesV9>;
/// `ncclNetProperties_v11_t`.
pub type PropertiesV11 = Properties<c_int, MorePropertiesV11>;
/// `ncclNetProperties_v12_t`.
pub type PropertiesV12 = Properties<c_int, MorePropertiesV12>;

/// Properties of the newest version. Memory for them has room for the properties of each version.
pub type NewestProperties = PropertiesV12;

/// The end of `ncclNetProperties_v9_t` and `_v10_t`.
#[derive(Debug)]
#[repr(C)]
pub struct MorePropertiesV9 {
    /// The devices that this device is merged from.
    pub v_props: VDeviceProps<4>,
    /// The largest message between two ranks, in bytes.
    pub max_p2p_bytes: usize,
    /// The largest message of a collective network, in bytes.
    pub max_coll_bytes: usize,
}

/// The end of `ncclNetProperties_v11_t`.
#[derive(Debug)]
#[repr(C)]
pub struct MorePropertiesV11 {
    /// The devices that this device is merged from.
    pub v_props: VDeviceProps<4>,
    /// The largest message between two ranks, in bytes.
    pub max_p2p_bytes: usize,
    /// The largest message of a collective network, in bytes.
    pub max_coll_bytes: usize,
    /// Largest number of requests in one multi-request.
    pub max_multi_request_size: c_int,
}

/// The end of `ncclNetProperties_v12_t`.
#[derive(Debug)]
#[repr(C)]
pub struct MorePropertiesV12 {
    /// The devices that this device is merged from.
    pub v_props: VDeviceProps<8>,
    /// The largest message between two ranks, in bytes.
    pub max_p2p_bytes: usize,
    /// The largest message of a collective network, in bytes.
    pub max_coll_bytes: usize,
    /// Largest number of requests in one multi-request.
    pub max_multi_request_size: c_int,
    /// The device's rail, or [`UNDEFINED`].
    pub rail_id: i16,
    /// The device's plane, or [`UNDEFINED`].
    pub plane_id: i16,
}

/// `ncclNet_v8_t`, and the start of every later version. Versions differ in the arguments of five
/// functions, in the properties, and in the fields at the end.
#[derive(Debug)]
#[repr(C)]
pub struct Net<Init, Properties, Listen, Connect, Isend, Irecv, More> {
    /// The network's name.
    pub name: *const c_char,
    /// Starts the plugin; since v11 called once for each communicator.
    pub init: Option<Init>,
    /// Returns the number of devices.
    pub devices: Option<Devices>,
    /// Describes a device.
    pub get_properties: Option<GetProperties<Properties>>,
    /// Makes a listening comm and the handle that a peer connects to.
    pub listen: Option<Listen>,
    /// Connects to a handle. Leaves `*send_comm` NULL until the connection is ready.
    pub connect: Option<Connect>,
    /// Accepts a connection. Leaves `*recv_comm` NULL until the connection is ready.
    pub accept: Option<Accept>,
    /// Registers memory with a comm's device.
    pub reg_mr: Option<RegMr>,
    /// Registers the memory behind a DMA-BUF file descriptor.
    pub reg_mr_dma_buf: Option<RegMrDmaBuf>,
    /// Deregisters memory.
    pub dereg_mr: Option<DeregMr>,
    /// Starts a send. Leaves `*request` NULL if the send cannot start yet.
    pub isend: Option<Isend>,
    /// Starts a receive of `n` parts. Leaves `*request` NULL if the receive cannot start yet.
    pub irecv: Option<Irecv>,
    /// Makes received data visible to the GPU.
    pub iflush: Option<Iflush>,
    /// Reports whether a request is complete, and returns the size of each part in bytes.
    pub test: Option<Test>,
    /// Closes a send comm.
    pub close_send: Option<Close>,
    /// Closes a receive comm.
    pub close_recv: Option<Close>,
    /// Closes a listening comm.
    pub close_listen: Option<Close>,
    /// Returns a registration in a form for the GPU.
    pub get_device_mr: Option<GetDeviceMr>,
    /// Reports that the GPU has consumed a receive.
    pub irecv_consumed: Option<IrecvConsumed>,
    /// Fields that later versions add.
    pub more: More,
}

/// `ncclNet_v8_t`, NCCL 2.20 to 2.23: sizes are `int`, and receives cannot be optional.
pub type NetV8 = Net<InitV8, PropertiesV8, ListenV8, ConnectV8, IsendV8, IrecvV8, ()>;
/// `ncclNet_v9_t`, NCCL 2.24 and 2.25: `size_t` sizes, optional receives, `makeVDevice`.
pub type NetV9 = Net<InitV8, PropertiesV9, ListenV8, ConnectV8, IsendV9, IrecvV9, MoreV9>;
/// `ncclNet_v10_t`, NCCL 2.26 and 2.27: `connect` gets a configuration, valid only during the call;
/// `init`, `isend` and `irecv` get profiler arguments.
pub type NetV10 = Net<InitV10, PropertiesV9, ListenV8, ConnectV10, IsendV10, IrecvV10, MoreV9>;
/// `ncclNet_v11_t`, NCCL 2.28 and 2.29: NCCL calls `init` for each communicator, and `init` makes a
/// context; `finalize` and `setNetAttr` are new. Later versions differ in the properties, and add
/// fields at the end. So a caller may read their tables as this type, if it passes memory for
/// [`NewestProperties`].
pub type NetV11 =
    Net<InitV11, PropertiesV11, ListenV11, ConnectV11, IsendV10, IrecvV10, MoreV11<4>>;
/// `ncclNet_v12_t`, NCCL 2.30: a device can be merged from up to eight devices, and the properties
/// name the device's rail and plane.
pub type NetV12 =
    Net<InitV11, PropertiesV12, ListenV11, ConnectV11, IsendV10, IrecvV10, MoreV11<8>>;

/// The end of `ncclNet_v9_t` and `_v10_t`.
#[derive(Debug)]
#[repr(C)]
pub struct MoreV9 {
    /// Merges devices.
    pub make_v_device: Option<MakeVDevice<4>>,
}

/// The end of `ncclNet_v11_t` and `_v12_t`. A device can be merged from up to `N` devices.
#[derive(Debug)]
#[repr(C)]
pub struct MoreV11<const N: usize> {
    /// Merges devices.
    pub make_v_device: Option<MakeVDevice<N>>,
    /// Undoes one call of `init`.
    pub finalize: Option<Finalize>,
    /// Announces NCCL's next operations.
    pub set_net_attr: Option<SetNetAttr>,
}

/// Types of the tables' functions, in the order of the tables.
pub mod functions {
    use super::{CommConfig, NetAttr, NetDeviceHandle, ProfilerCallback, VDeviceProps};
    use crate::{DebugLogger, NcclResult};
    use std::ffi::{c_int, c_void};

    /// `init`.
    pub type InitV8 = unsafe extern "C" fn(log: Option<DebugLogger>) -> NcclResult;
    /// `init` with a profiler callback.
    pub type InitV10 = unsafe extern "C" fn(
        log: Option<DebugLogger>,
        profiler: Option<ProfilerCallback>,
    ) -> NcclResult;
    /// `init` for one communicator.
    pub type InitV11 = unsafe extern "C" fn(
        context: *mut *mut c_void,
        comm_id: u64,
        config: *const CommConfig,
        log: Option<DebugLogger>,
        profiler: Option<ProfilerCallback>,
    ) -> NcclResult;
    /// `devices`.
    pub type Devices = unsafe extern "C" fn(ndev: *mut c_int) -> NcclResult;
    /// `getProperties` for a version's properties.
    pub type GetProperties<Properties> =
        unsafe extern "C" fn(dev: c_int, properties: *mut Properties) -> NcclResult;
    /// `listen`.
    pub type ListenV8 = unsafe extern "C" fn(
        dev: c_int,
        handle: *mut c_void,
        listen_comm: *mut *mut c_void,
    ) -> NcclResult;
    /// `listen` for one communicator.
    pub type ListenV11 = unsafe extern "C" fn(
        context: *mut c_void,
        dev: c_int,
        handle: *mut c_void,
        listen_comm: *mut *mut c_void,
    ) -> NcclResult;
    /// `connect`.
    pub type ConnectV8 = unsafe extern "C" fn(
        dev: c_int,
        handle: *mut c_void,
        send_comm: *mut *mut c_void,
        device_comm: *mut *mut NetDeviceHandle,
    ) -> NcclResult;
    /// `connect` with a configuration.
    pub type ConnectV10 = unsafe extern "C" fn(
        dev: c_int,
        config: *const CommConfig,
        handle: *mut c_void,
        send_comm: *mut *mut c_void,
        device_comm: *mut *mut NetDeviceHandle,
    ) -> NcclResult;
    /// `connect` for one communicator.
    pub type ConnectV11 = unsafe extern "C" fn(
        context: *mut c_void,
        dev: c_int,
        handle: *mut c_void,
        send_comm: *mut *mut c_void,
        device_comm: *mut *mut NetDeviceHandle,
    ) -> NcclResult;
    /// `accept`.
    pub type Accept = unsafe extern "C" fn(
        listen_comm: *mut c_void,
        recv_comm: *mut *mut c_void,
        device_comm: *mut *mut NetDeviceHandle,
    ) -> NcclResult;
    /// `regMr`.
    pub type RegMr = unsafe extern "C" fn(
        comm: *mut c_void,
        data: *mut c_void,
        size: usize,
        kind: c_int,
        mhandle: *mut *mut c_void,
    ) -> NcclResult;
    /// `regMrDmaBuf`.
    pub type RegMrDmaBuf = unsafe extern "C" fn(
        comm: *mut c_void,
        data: *mut c_void,
        size: usize,
        kind: c_int,
        offset: u64,
        fd: c_int,
        mhandle: *mut *mut c_void,
    ) -> NcclResult;
    /// `deregMr`.
    pub type DeregMr = unsafe extern "C" fn(comm: *mut c_void, mhandle: *mut c_void) -> NcclResult;
    /// `isend` with a length of type `Size`.
    pub type Isend<Size> = unsafe extern "C" fn(
        send_comm: *mut c_void,
        data: *mut c_void,
        size: Size,
        tag: c_int,
        mhandle: *mut c_void,
        request: *mut *mut c_void,
    ) -> NcclResult;
    /// `isend`.
    pub type IsendV8 = Isend<c_int>;
    /// `isend` with a `size_t`.
    pub type IsendV9 = Isend<usize>;
    /// `isend` with a profiler handle.
    pub type IsendV10 = unsafe extern "C" fn(
        send_comm: *mut c_void,
        data: *mut c_void,
        size: usize,
        tag: c_int,
        mhandle: *mut c_void,
        profiler_handle: *mut c_void,
        request: *mut *mut c_void,
    ) -> NcclResult;
    /// `irecv` with lengths of type `Size`.
    pub type Irecv<Size> = unsafe extern "C" fn(
        recv_comm: *mut c_void,
        n: c_int,
        data: *mut *mut c_void,
        sizes: *mut Size,
        tags: *mut c_int,
        mhandles: *mut *mut c_void,
        request: *mut *mut c_void,
    ) -> NcclResult;
    /// `irecv`.
    pub type IrecvV8 = Irecv<c_int>;
    /// `irecv` with `size_t`.
    pub type IrecvV9 = Irecv<usize>;
    /// `irecv` with profiler handles.
    pub type IrecvV10 = unsafe extern "C" fn(
        recv_comm: *mut c_void,
        n: c_int,
        data: *mut *mut c_void,
        sizes: *mut usize,
        tags: *mut c_int,
        mhandles: *mut *mut c_void,
        profiler_handles: *mut *mut c_void,
        request: *mut *mut c_void,
    ) -> NcclResult;
    /// `iflush`.
    pub type Iflush = unsafe extern "C" fn(
        recv_comm: *mut c_void,
        n: c_int,
        data: *mut *mut c_void,
        sizes: *mut c_int,
        mhandles: *mut *mut c_void,
        request: *mut *mut c_void,
    ) -> NcclResult;
    /// `test`.
    pub type Test = unsafe extern "C" fn(
        request: *mut c_void,
        done: *mut c_int,
        sizes: *mut c_int,
    ) -> NcclResult;
    /// `closeSend`, `closeRecv`, `closeListen`.
    pub type Close = unsafe extern "C" fn(comm: *mut c_void) -> NcclResult;
    /// `getDeviceMr`.
    pub type GetDeviceMr = unsafe extern "C" fn(
        comm: *mut c_void,
        mhandle: *mut c_void,
        device_mhandle: *mut *mut c_void,
    ) -> NcclResult;
    /// `irecvConsumed`.
    pub type IrecvConsumed =
        unsafe extern "C" fn(recv_comm: *mut c_void, n: c_int, request: *mut c_void) -> NcclResult;
    /// `makeVDevice`, since v9.
    pub type MakeVDevice<const N: usize> =
        unsafe extern "C" fn(dev: *mut c_int, of: *const VDeviceProps<N>) -> NcclResult;
    /// `finalize`, since v11.
    pub type Finalize = unsafe extern "C" fn(context: *mut c_void) -> NcclResult;
    /// `setNetAttr`, since v11.
    pub type SetNetAttr =
        unsafe extern "C" fn(context: *mut c_void, attributes: *const NetAttr) -> NcclResult;
}
