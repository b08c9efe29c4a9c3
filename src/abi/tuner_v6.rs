//! Tuner ABI v6: NCCL 2.30. Here `getChunkSize` is new.

use super::tuner_calls;
use super::types::functions;
use crate::plugin;
use std::ffi::c_char;

/// `ncclTuner_v6_t`.
#[derive(Debug)]
#[repr(C)]
pub struct TunerV6 {
    /// The tuner's name.
    pub name: *const c_char,
    /// See [`functions::TunerInit`].
    pub init: Option<functions::TunerInit>,
    /// See [`functions::GetCollInfo`].
    pub get_coll_info: Option<functions::GetCollInfo>,
    /// See [`functions::TunerFinalize`].
    pub finalize: Option<functions::TunerFinalize>,
    /// NULL: NCCL's own chunk size is used (`calcCollChunking`, enqueue.cc).
    pub get_chunk_size: Option<functions::GetChunkSize>,
}

// SAFETY: the table never changes, and its one pointer is to a constant string.
unsafe impl Sync for TunerV6 {}

/// What NCCL looks up by name.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclTunerPlugin_v6: TunerV6 = TunerV6 {
    name: plugin::NETWORK_NAME.as_ptr(),
    init: Some(tuner_calls::init_named),
    get_coll_info: Some(tuner_calls::get_coll_info),
    finalize: Some(tuner_calls::finalize),
    get_chunk_size: None,
};
