//! The C types that the ABI versions share.
//!
//! Sizes and offsets are those of NCCL's headers on x86-64 and aarch64 alike; `tests/abi_layout.rs` compares them.
//! A field is called as in NCCL's header, in snake case.

use crate::error::NcclResult;
use crate::plugin;
use crate::tuner::{ALGORITHMS, PROTOCOLS};
use std::ffi::{c_char, c_int, c_ulong, c_void};
use std::ptr;

/// Bytes of a connection handle (`NCCL_NET_HANDLE_MAXSIZE`).
pub const HANDLE_BYTES: usize = 128;
/// The most sub-receives of one grouped receive that this plugin takes; `maxRecvs` never says more.
pub const MAX_RECVS: usize = 8;
/// A pointer into host memory (`NCCL_PTR_HOST`), the only kind that this plugin announces.
pub const PTR_HOST: c_int = 1;
/// A pointer into CUDA device memory (`NCCL_PTR_CUDA`).
pub const PTR_CUDA: c_int = 2;
/// The host drives the network (`NCCL_NET_DEVICE_HOST`).
pub const NET_DEVICE_HOST: c_int = 0;
/// There is no code on the GPU (`NCCL_NET_DEVICE_INVALID_VERSION`).
pub const NET_DEVICE_INVALID_VERSION: c_int = 0;
/// What `*request` holds on entry to `irecv`, from v9 on, when NCCL does not need the completion
/// (`NCCL_NET_OPTIONAL_RECV_COMPLETION`).
pub const OPTIONAL_RECV_COMPLETION: usize = 1;
/// An id or a traffic class that nobody chose (`NCCL_NET_ID_UNDEF`, `NCCL_NET_TRAFFIC_CLASS_UNDEF`).
pub const UNDEFINED: i32 = -1;

/// `ncclDebugLogger_t`: level, subsystem flags, file, line, printf format, its arguments.
pub type DebugLogger =
    unsafe extern "C" fn(c_int, c_ulong, file: *const c_char, line: c_int, format: *const c_char, ...);

/// `ncclProfilerCallback_t`. This plugin reports nothing to NCCL's profiler and never calls it.
pub type ProfilerCallback = unsafe extern "C" fn(
    event_handle: *mut *mut c_void,
    kind: c_int,
    parent_handle: *mut c_void,
    plugin_id: i64,
    extra: *mut c_void,
) -> NcclResult;

/// `ncclNetDeviceHandle_t`: a network that a GPU kernel drives. Never filled in here.
#[derive(Debug)]
#[repr(C)]
pub struct NetDeviceHandle {
    /// 0, the host drives the network (`NCCL_NET_DEVICE_HOST`).
    pub net_device_type: c_int,
    /// Version of the device code.
    pub net_device_version: c_int,
    /// The device's object.
    pub handle: *mut c_void,
    /// Bytes of that object.
    pub size: usize,
    /// Whether the proxy thread still has to make progress.
    pub needs_proxy_progress: c_int,
}

/// `ncclNetVDeviceProps`: the devices that one device is merged from, as NCCL counts them.
#[derive(Debug)]
#[repr(C)]
pub struct VDeviceProps<const N: usize> {
    /// How many entries of `devs` count.
    pub ndevs: c_int,
    /// Device numbers.
    pub devs: [c_int; N],
}

/// `ncclNetCommConfig`, since v10.
#[derive(Debug)]
#[repr(C)]
pub struct CommConfig {
    /// The RoCE traffic class, 0 to 255, or [`UNDEFINED`].
    pub traffic_class: c_int,
}

/// `ncclNetCommAttr`, since v11: what NCCL expects of one direction.
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

/// `ncclNetAttr`, since v11: what NCCL is about to do. This plugin does not ask for it.
#[derive(Debug)]
#[repr(C)]
pub struct NetAttr {
    /// Of the sending side.
    pub send_comm_attr: CommAttr,
    /// Of the receiving side.
    pub recv_comm_attr: CommAttr,
    /// The collective.
    pub op: u32,
    /// The algorithm.
    pub algo: u32,
    /// The protocol.
    pub proto: u32,
}

/// `ncclNetProperties_v8_t`.
#[derive(Debug)]
#[repr(C)]
pub struct PropertiesV8 {
    /// Name of the device, in logs.
    pub name: *const c_char,
    /// Path of its PCI function below `/sys`, or NULL.
    pub pci_path: *const c_char,
    /// An identity that is the same for all functions of one adapter.
    pub guid: u64,
    /// Which pointers it takes: [`PTR_HOST`], [`PTR_CUDA`] or both.
    pub ptr_support: c_int,
    /// 1: a registration holds for every comm of the device.
    pub reg_is_global: c_int,
    /// Speed in Mb/s.
    pub speed: c_int,
    /// Port number, from 1.
    pub port: c_int,
    /// Latency in microseconds.
    pub latency: f32,
    /// How many comms may exist.
    pub max_comms: c_int,
    /// How many sub-receives one grouped receive may have.
    pub max_recvs: c_int,
    /// 0: the host drives the network.
    pub net_device_type: c_int,
    /// Version of the code on the GPU, 0 for none.
    pub net_device_version: c_int,
}

/// `ncclNetProperties_v9_t` and `_v10_t`.
#[derive(Debug)]
#[repr(C)]
pub struct PropertiesV9 {
    /// Name of the device, in logs.
    pub name: *const c_char,
    /// Path of its PCI function below `/sys`, or NULL.
    pub pci_path: *const c_char,
    /// An identity that is the same for all functions of one adapter.
    pub guid: u64,
    /// Which pointers it takes: [`PTR_HOST`], [`PTR_CUDA`] or both.
    pub ptr_support: c_int,
    /// 1: a registration holds for every comm of the device.
    pub reg_is_global: c_int,
    /// 1: flush after every receive even where NCCL sees no need.
    pub force_flush: c_int,
    /// Speed in Mb/s.
    pub speed: c_int,
    /// Port number, from 1.
    pub port: c_int,
    /// Latency in microseconds.
    pub latency: f32,
    /// How many comms may exist.
    pub max_comms: c_int,
    /// How many sub-receives one grouped receive may have.
    pub max_recvs: c_int,
    /// 0: the host drives the network.
    pub net_device_type: c_int,
    /// Version of the code on the GPU, 0 for none.
    pub net_device_version: c_int,
    /// What the device is merged from.
    pub v_props: VDeviceProps<4>,
    /// The largest message between two ranks, in bytes.
    pub max_p2p_bytes: usize,
    /// The largest message of a collective network, in bytes.
    pub max_coll_bytes: usize,
}

/// `ncclNetProperties_v11_t`.
#[derive(Debug)]
#[repr(C)]
pub struct PropertiesV11 {
    /// Name of the device, in logs.
    pub name: *const c_char,
    /// Path of its PCI function below `/sys`, or NULL.
    pub pci_path: *const c_char,
    /// An identity that is the same for all functions of one adapter.
    pub guid: u64,
    /// Which pointers it takes: [`PTR_HOST`], [`PTR_CUDA`] or both.
    pub ptr_support: c_int,
    /// 1: a registration holds for every comm of the device.
    pub reg_is_global: c_int,
    /// 1: flush after every receive even where NCCL sees no need.
    pub force_flush: c_int,
    /// Speed in Mb/s.
    pub speed: c_int,
    /// Port number, from 1.
    pub port: c_int,
    /// Latency in microseconds.
    pub latency: f32,
    /// How many comms may exist.
    pub max_comms: c_int,
    /// How many sub-receives one grouped receive may have.
    pub max_recvs: c_int,
    /// 0: the host drives the network.
    pub net_device_type: c_int,
    /// Version of the code on the GPU, 0 for none.
    pub net_device_version: c_int,
    /// What the device is merged from.
    pub v_props: VDeviceProps<4>,
    /// The largest message between two ranks, in bytes.
    pub max_p2p_bytes: usize,
    /// The largest message of a collective network, in bytes.
    pub max_coll_bytes: usize,
    /// How many requests one multi-request may hold.
    pub max_multi_request_size: c_int,
}

/// `ncclNetProperties_v12_t`.
#[derive(Debug)]
#[repr(C)]
pub struct PropertiesV12 {
    /// Name of the device, in logs.
    pub name: *const c_char,
    /// Path of its PCI function below `/sys`, or NULL.
    pub pci_path: *const c_char,
    /// An identity that is the same for all functions of one adapter.
    pub guid: u64,
    /// Which pointers it takes: [`PTR_HOST`], [`PTR_CUDA`] or both.
    pub ptr_support: c_int,
    /// 1: a registration holds for every comm of the device.
    pub reg_is_global: c_int,
    /// 1: flush after every receive even where NCCL sees no need.
    pub force_flush: c_int,
    /// Speed in Mb/s.
    pub speed: c_int,
    /// Port number, from 1.
    pub port: c_int,
    /// Latency in microseconds.
    pub latency: f32,
    /// How many comms may exist.
    pub max_comms: c_int,
    /// How many sub-receives one grouped receive may have.
    pub max_recvs: c_int,
    /// 0: the host drives the network.
    pub net_device_type: c_int,
    /// Version of the code on the GPU, 0 for none.
    pub net_device_version: c_int,
    /// What the device is merged from.
    pub v_props: VDeviceProps<8>,
    /// The largest message between two ranks, in bytes.
    pub max_p2p_bytes: usize,
    /// The largest message of a collective network, in bytes.
    pub max_coll_bytes: usize,
    /// How many requests one multi-request may hold.
    pub max_multi_request_size: c_int,
    /// Which rail the device is on, or [`UNDEFINED`].
    pub rail_id: i16,
    /// Which plane the device is on, or [`UNDEFINED`].
    pub plane_id: i16,
}

impl PropertiesV12 {
    /// What NCCL is told about device `dev`; the older shapes leave out what they have no room for.
    ///
    /// `pciPath` is NULL: with the path of one function NCCL would take the merged device for that function's x4 link.
    /// Pointers are host pointers, because the GPU of this machine neither reads nor writes through the network; so a flush
    /// is never needed. Memory is registered with the device and not with a comm.
    pub(super) fn new(dev: c_int, of: &plugin::Properties) -> Self {
        Self {
            name: of.name.as_ptr(),
            pci_path: ptr::null(),
            guid: of.guid,
            ptr_support: PTR_HOST,
            reg_is_global: 1,
            force_flush: 0,
            speed: of.speed_mbps,
            port: 1,
            latency: of.latency_us,
            max_comms: of.max_comms,
            max_recvs: of.max_recvs,
            net_device_type: NET_DEVICE_HOST,
            net_device_version: NET_DEVICE_INVALID_VERSION,
            v_props: VDeviceProps { ndevs: 1, devs: [dev, 0, 0, 0, 0, 0, 0, 0] },
            max_p2p_bytes: of.max_p2p_bytes,
            max_coll_bytes: of.max_coll_bytes,
            max_multi_request_size: 1,
            rail_id: UNDEFINED as i16,
            plane_id: UNDEFINED as i16,
        }
    }
}

impl From<PropertiesV12> for PropertiesV11 {
    fn from(newer: PropertiesV12) -> Self {
        let [d0, d1, d2, d3, ..] = newer.v_props.devs;
        Self {
            name: newer.name,
            pci_path: newer.pci_path,
            guid: newer.guid,
            ptr_support: newer.ptr_support,
            reg_is_global: newer.reg_is_global,
            force_flush: newer.force_flush,
            speed: newer.speed,
            port: newer.port,
            latency: newer.latency,
            max_comms: newer.max_comms,
            max_recvs: newer.max_recvs,
            net_device_type: newer.net_device_type,
            net_device_version: newer.net_device_version,
            max_p2p_bytes: newer.max_p2p_bytes,
            max_coll_bytes: newer.max_coll_bytes,
            max_multi_request_size: newer.max_multi_request_size,
            v_props: VDeviceProps { ndevs: newer.v_props.ndevs, devs: [d0, d1, d2, d3] },
        }
    }
}

impl From<PropertiesV11> for PropertiesV9 {
    fn from(newer: PropertiesV11) -> Self {
        Self {
            name: newer.name,
            pci_path: newer.pci_path,
            guid: newer.guid,
            ptr_support: newer.ptr_support,
            reg_is_global: newer.reg_is_global,
            force_flush: newer.force_flush,
            speed: newer.speed,
            port: newer.port,
            latency: newer.latency,
            max_comms: newer.max_comms,
            max_recvs: newer.max_recvs,
            net_device_type: newer.net_device_type,
            net_device_version: newer.net_device_version,
            v_props: newer.v_props,
            max_p2p_bytes: newer.max_p2p_bytes,
            max_coll_bytes: newer.max_coll_bytes,
        }
    }
}

impl From<PropertiesV9> for PropertiesV8 {
    fn from(newer: PropertiesV9) -> Self {
        Self {
            name: newer.name,
            pci_path: newer.pci_path,
            guid: newer.guid,
            ptr_support: newer.ptr_support,
            reg_is_global: newer.reg_is_global,
            speed: newer.speed,
            port: newer.port,
            latency: newer.latency,
            max_comms: newer.max_comms,
            max_recvs: newer.max_recvs,
            net_device_type: newer.net_device_type,
            net_device_version: newer.net_device_version,
        }
    }
}

/// `ncclNvlDomainInfo_v5_t` and `_v6_t`: the NVLink domains of a communicator. A Spark has none; the tuner does not read it.
#[derive(Debug)]
#[repr(C)]
pub struct NvlDomainInfo {
    /// How many there are.
    pub n_nvl_domains: c_int,
    /// Ranks of the smallest one.
    pub min_ranks_per_nvl_domain: c_int,
    /// Ranks of the largest one.
    pub max_ranks_per_nvl_domain: c_int,
}

/// `ncclTunerConstants_v5_t` and `_v6_t`: what NCCL's cost model computes with. The tuner changes costs, not the model.
#[derive(Debug)]
#[repr(C)]
pub struct TunerConstants {
    /// By algorithm and protocol, in microseconds.
    pub base_latencies: [[f64; PROTOCOLS]; ALGORITHMS],
    /// By link, algorithm and protocol, in microseconds.
    pub hw_latencies: [[[f64; PROTOCOLS]; ALGORITHMS]; 3],
    /// By GPU generation and number of nodes, in GB/s, as those below.
    pub ll_max_bws: [[f64; 3]; 4],
    /// LL128 over a ring, for each channel.
    pub per_ch_max_ring_ll128_bws: [[f64; 3]; 4],
    /// LL128 over trees.
    pub per_ch_max_tree_ll128_bws: [[f64; 3]; 4],
    /// Simple over trees.
    pub per_ch_max_tree_bws: [[f64; 3]; 4],
    /// Trees above NVLink SHARP.
    pub per_ch_max_nvls_tree_bws: [[f64; 3]; 4],
}

/// Function types that all versions share, in the order of the tables.
pub mod functions {
    use super::{DebugLogger, NcclResult, NetDeviceHandle, NvlDomainInfo, TunerConstants};
    use std::ffi::{c_int, c_void};

    /// `devices`: how many devices there are.
    pub type Devices = unsafe extern "C" fn(ndev: *mut c_int) -> NcclResult;
    /// `accept`: finishes a connection, or leaves `*recv_comm` NULL.
    pub type Accept = unsafe extern "C" fn(
        listen_comm: *mut c_void,
        recv_comm: *mut *mut c_void,
        device_comm: *mut *mut NetDeviceHandle,
    ) -> NcclResult;
    /// `regMr`: registers memory with a comm's device.
    pub type RegMr = unsafe extern "C" fn(
        comm: *mut c_void,
        data: *mut c_void,
        size: usize,
        kind: c_int,
        mhandle: *mut *mut c_void,
    ) -> NcclResult;
    /// `regMrDmaBuf`: registers memory that a file descriptor names.
    pub type RegMrDmaBuf = unsafe extern "C" fn(
        comm: *mut c_void,
        data: *mut c_void,
        size: usize,
        kind: c_int,
        offset: u64,
        fd: c_int,
        mhandle: *mut *mut c_void,
    ) -> NcclResult;
    /// `deregMr`: gives a registration back.
    pub type DeregMr = unsafe extern "C" fn(comm: *mut c_void, mhandle: *mut c_void) -> NcclResult;
    /// `iflush`: makes received data visible to the GPU.
    pub type Iflush = unsafe extern "C" fn(
        recv_comm: *mut c_void,
        n: c_int,
        data: *mut *mut c_void,
        sizes: *mut c_int,
        mhandles: *mut *mut c_void,
        request: *mut *mut c_void,
    ) -> NcclResult;
    /// `test`: whether a request is complete, and the bytes of each part.
    pub type Test = unsafe extern "C" fn(request: *mut c_void, done: *mut c_int, sizes: *mut c_int) -> NcclResult;
    /// `closeSend`, `closeRecv`, `closeListen`.
    pub type Close = unsafe extern "C" fn(comm: *mut c_void) -> NcclResult;
    /// `getDeviceMr`: a registration in a form for the GPU.
    pub type GetDeviceMr =
        unsafe extern "C" fn(comm: *mut c_void, mhandle: *mut c_void, device_mhandle: *mut *mut c_void) -> NcclResult;
    /// `irecvConsumed`: the GPU is done with a receive.
    pub type IrecvConsumed = unsafe extern "C" fn(recv_comm: *mut c_void, n: c_int, request: *mut c_void) -> NcclResult;
    /// `finalize`, since v11.
    pub type Finalize = unsafe extern "C" fn(context: *mut c_void) -> NcclResult;

    /// A tuner's `init`, since v5: makes a context for one communicator.
    pub type TunerInit = unsafe extern "C" fn(
        context: *mut *mut c_void,
        comm_id: u64,
        ranks: usize,
        nodes: usize,
        log: Option<DebugLogger>,
        nvl_domain_info: *mut NvlDomainInfo,
        constants: *mut TunerConstants,
    ) -> NcclResult;
    /// A tuner's `getCollInfo`: changes what NCCL takes a collective's algorithms and protocols to cost, and the number of channels.
    pub type GetCollInfo = unsafe extern "C" fn(
        context: *mut c_void,
        coll_type: c_int,
        bytes: usize,
        num_pipe_ops: c_int,
        coll_cost_table: *mut *mut f32,
        num_algo: c_int,
        num_proto: c_int,
        reg_buff: c_int,
        channels: *mut c_int,
    ) -> NcclResult;
    /// A tuner's `finalize`, in v4 `destroy`: gives the context back.
    pub type TunerFinalize = unsafe extern "C" fn(context: *mut c_void) -> NcclResult;
    /// A tuner's `getChunkSize`, since v6.
    pub type GetChunkSize = unsafe extern "C" fn(
        context: *mut c_void,
        coll_type: c_int,
        bytes: usize,
        algo: c_int,
        proto: c_int,
        channels: c_int,
        chunk_size: *mut usize,
    ) -> NcclResult;
}
