//! NCCL's interface for tuner plugins, `ncclTuner_v4_t` to `ncclTuner_v7_t`.

use crate::{DebugLogger, NcclResult};
use proto::tuner::{ALGORITHMS, PROTOCOLS};
use std::ffi::{c_char, c_int, c_void};

/// `ncclTuner_v4_t`, and the start of every later version.
#[derive(Debug)]
#[repr(C)]
pub struct TunerInterface<Init, More> {
    /// The tuner's name.
    pub name: *const c_char,
    /// Makes a context for one communicator.
    pub init: Option<Init>,
    /// Changes NCCL's cost table (algorithms by protocols) and number of channels for one
    /// collective.
    pub get_coll_info: Option<GetCollInfo>,
    /// Frees the context; v4 calls it `destroy`.
    pub finalize: Option<TunerFinalize>,
    /// Fields that later versions add.
    pub more: More,
}

/// `ncclTuner_v4_t`, NCCL 2.24 to 2.27.
pub type TunerV4 = TunerInterface<TunerInitV4, ()>;
/// `ncclTuner_v5_t`, NCCL 2.28 and 2.29: `init` also gets the communicator's id.
pub type TunerV5 = TunerInterface<TunerInitV5<4>, ()>;
/// `ncclTuner_v6_t`, NCCL 2.30 to 2.32.5: adds `getChunkSize`.
pub type TunerV6 = TunerInterface<TunerInitV5<4>, TunerMoreV6>;
/// `ncclTuner_v7_t`, NCCL 2.32.6: the constants of `init` are for five compute capabilities.
pub type TunerV7 = TunerInterface<TunerInitV5<5>, TunerMoreV6>;

/// The end of `ncclTuner_v6_t` and `ncclTuner_v7_t`.
#[derive(Debug)]
#[repr(C)]
pub struct TunerMoreV6 {
    /// Chooses a chunk size. If NULL, as in this plugin, NCCL uses its own chunk size
    /// (`calcCollChunking`, enqueue.cc).
    pub get_chunk_size: Option<GetChunkSize>,
}

/// A tuner's `init` in v4.
pub type TunerInitV4 = unsafe extern "C" fn(
    ranks: usize,
    nodes: usize,
    log: Option<DebugLogger>,
    context: *mut *mut c_void,
) -> NcclResult;
/// A tuner's `init` since v5. `comm_id` identifies the communicator.
pub type TunerInitV5<const COMPUTE_CAPABILITIES: usize> = unsafe extern "C" fn(
    context: *mut *mut c_void,
    comm_id: u64,
    ranks: usize,
    nodes: usize,
    log: Option<DebugLogger>,
    nvl_domain_info: *mut NvlDomainInfo,
    constants: *mut TunerConstants<COMPUTE_CAPABILITIES>,
) -> NcclResult;
/// A tuner's `getCollInfo`.
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
/// A tuner's `finalize`, in v4 `destroy`.
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

/// `ncclNvlDomainInfo_v5_t` to `_v7_t`: NVLink domains. A Spark has none, so the tuner ignores
/// these numbers.
#[derive(Debug)]
#[repr(C)]
pub struct NvlDomainInfo {
    /// Number of domains.
    pub n_nvl_domains: c_int,
    /// Ranks in the smallest domain.
    pub min_ranks_per_nvl_domain: c_int,
    /// Ranks in the largest domain.
    pub max_ranks_per_nvl_domain: c_int,
}

/// Constants of NCCL's cost model: `ncclTunerConstants_v5_t` and `_v6_t` for 4 compute
/// capabilities, `_v7_t` for 5. The tuner neither reads nor changes them.
#[derive(Debug)]
#[repr(C)]
pub struct TunerConstants<const COMPUTE_CAPABILITIES: usize> {
    /// Base latency of each algorithm and protocol, in microseconds.
    pub base_latencies: [[f64; PROTOCOLS]; ALGORITHMS],
    /// Hardware latency of each kind of link, algorithm and protocol, in microseconds.
    pub hw_latencies: [[[f64; PROTOCOLS]; ALGORITHMS]; 3],
    /// Highest bandwidth of protocol LL. This field and the fields below are in GB/s. Their first
    /// index is for the GPU generation, their second index for the number of nodes.
    pub ll_max_bws: [[f64; 3]; COMPUTE_CAPABILITIES],
    /// Highest bandwidth of LL128 over a ring, per channel.
    pub per_ch_max_ring_ll128_bws: [[f64; 3]; COMPUTE_CAPABILITIES],
    /// Highest bandwidth of LL128 over trees, per channel.
    pub per_ch_max_tree_ll128_bws: [[f64; 3]; COMPUTE_CAPABILITIES],
    /// Highest bandwidth of Simple over trees, per channel.
    pub per_ch_max_tree_bws: [[f64; 3]; COMPUTE_CAPABILITIES],
    /// Highest bandwidth of NVLS Tree (NVLink SHARP within a node, trees between nodes), per
    /// channel.
    pub per_ch_max_nvls_tree_bws: [[f64; 3]; COMPUTE_CAPABILITIES],
}
