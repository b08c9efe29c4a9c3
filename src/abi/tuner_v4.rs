//! Tuner ABI v4: NCCL 2.24 to 2.27. Here `init` does not name the communicator.

use super::tuner_calls;
use super::types::{DebugLogger, functions};
use crate::error::NcclResult;
use crate::plugin;
use std::ffi::{c_char, c_void};

/// `ncclTuner_v4_t`.
#[derive(Debug)]
#[repr(C)]
pub struct TunerV4 {
    /// The tuner's name.
    pub name: *const c_char,
    /// Makes a context for one communicator.
    pub init: Option<
        unsafe extern "C" fn(
            ranks: usize,
            nodes: usize,
            log: Option<DebugLogger>,
            context: *mut *mut c_void,
        ) -> NcclResult,
    >,
    /// See [`functions::GetCollInfo`].
    pub get_coll_info: Option<functions::GetCollInfo>,
    /// See [`functions::TunerFinalize`].
    pub destroy: Option<functions::TunerFinalize>,
}

// SAFETY: the table never changes, and its one pointer is to a constant string.
unsafe impl Sync for TunerV4 {}

/// What NCCL looks up by name.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclTunerPlugin_v4: TunerV4 = TunerV4 {
    name: plugin::NETWORK_NAME.as_ptr(),
    init: Some(init),
    get_coll_info: Some(tuner_calls::get_coll_info),
    destroy: Some(tuner_calls::finalize),
};

unsafe extern "C" fn init(
    ranks: usize,
    nodes: usize,
    log: Option<DebugLogger>,
    context: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL passes what this version of the interface says, and `tuner_calls` asks for nothing more.
    unsafe { tuner_calls::init(context, None, ranks, nodes, log) }
}
