//! The tuner tables that NCCL looks up by name. `init_v4` adapts the arguments of v4 to those of
//! `tuner_calls`.

use super::{Exported, tuner_calls};
use crate::plugin;
use nccl_abi::tuner::{TunerInterface, TunerMoreV6, TunerV4, TunerV5, TunerV6, TunerV7};
use nccl_abi::{DebugLogger, NcclResult};
use std::ffi::c_void;

/// The table of tuner interface v4.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclTunerPlugin_v4: Exported<TunerV4> = table(init_v4, ());

/// The table of tuner interface v5.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclTunerPlugin_v5: Exported<TunerV5> = table(tuner_calls::init_named::<4>, ());

/// The table of tuner interface v6.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclTunerPlugin_v6: Exported<TunerV6> = table(
    tuner_calls::init_named::<4>,
    TunerMoreV6 {
        get_chunk_size: None,
    },
);

/// The table of tuner interface v7.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclTunerPlugin_v7: Exported<TunerV7> = table(
    tuner_calls::init_named::<5>,
    TunerMoreV6 {
        get_chunk_size: None,
    },
);

const fn table<Init, More>(init: Init, more: More) -> Exported<TunerInterface<Init, More>> {
    Exported(TunerInterface {
        name: plugin::NETWORK_NAME.as_ptr(),
        init: Some(init),
        get_coll_info: Some(tuner_calls::get_coll_info),
        finalize: Some(tuner_calls::finalize),
        more,
    })
}

unsafe extern "C" fn init_v4(
    ranks: usize,
    nodes: usize,
    log: Option<DebugLogger>,
    context: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL passes this version's arguments, and `tuner_calls` requires nothing more.
    unsafe { tuner_calls::init(context, None, ranks, nodes, log) }
}
