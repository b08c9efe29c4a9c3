//! Tuner ABI v5: NCCL 2.28 and 2.29. Here `init` names the communicator, and `destroy` is called `finalize`.

use super::tuner_calls;
use super::types::functions;
use crate::plugin;
use std::ffi::c_char;

/// `ncclTuner_v5_t`.
#[derive(Debug)]
#[repr(C)]
pub struct TunerV5 {
    /// The tuner's name.
    pub name: *const c_char,
    /// See [`functions::TunerInit`].
    pub init: Option<functions::TunerInit>,
    /// See [`functions::GetCollInfo`].
    pub get_coll_info: Option<functions::GetCollInfo>,
    /// See [`functions::TunerFinalize`].
    pub finalize: Option<functions::TunerFinalize>,
}

// SAFETY: the table never changes, and its one pointer is to a constant string.
unsafe impl Sync for TunerV5 {}

/// What NCCL looks up by name.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclTunerPlugin_v5: TunerV5 = TunerV5 {
    name: plugin::NETWORK_NAME.as_ptr(),
    init: Some(tuner_calls::init_named),
    get_coll_info: Some(tuner_calls::get_coll_info),
    finalize: Some(tuner_calls::finalize),
};
