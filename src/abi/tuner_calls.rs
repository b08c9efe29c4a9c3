//! The functions to which the tables of `tuner_tables` point, shared by all versions of NCCL's
//! tuner interface.
//!
//! They always return success, because a tuner's error makes NCCL fail the communicator or the
//! collective (`ncclCommInitRankFunc`, `getAlgoInfo`). Errors are logged, and NCCL then chooses for
//! itself. A NULL context means that NCCL makes every choice for the communicator.

use super::guard::{self, Scope};
use super::handles::Out;
use super::logger;
use super::tuner_handles;
use crate::plugin;
use host::error::{Argument, Error, Quick};
use nccl_abi::tuner::{NvlDomainInfo, TunerConstants};
use nccl_abi::{DebugLogger, NcclResult};
use proto::tuner::{ALGORITHMS, Costs, PROTOCOLS, Tuner};
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

/// As [`init`], with the arguments of v5 and later.
///
/// # Safety
/// As [`init`]. Nothing is read through the last two pointers.
pub(super) unsafe extern "C" fn init_named<const COMPUTE_CAPABILITIES: usize>(
    context: *mut *mut c_void,
    comm_id: u64,
    ranks: usize,
    nodes: usize,
    log: Option<DebugLogger>,
    _nvl_domain_info: *mut NvlDomainInfo,
    _constants: *mut TunerConstants<COMPUTE_CAPABILITIES>,
) -> NcclResult {
    // SAFETY: the caller upholds the same contract.
    unsafe { init(context, Some(comm_id), ranks, nodes, log) }
}

/// Makes a context for one communicator; NULL means that NCCL makes every choice. `comm_id` is
/// `None` in v4, which does not pass it.
///
/// # Safety
/// `context` is NULL or writable. `log` is NULL or NCCL's logger, which any thread may call until
/// the process ends.
pub(super) unsafe fn init(
    context: *mut *mut c_void,
    comm_id: Option<u64>,
    ranks: usize,
    nodes: usize,
    log: Option<DebugLogger>,
) -> NcclResult {
    call("tuner init", |scope| {
        // SAFETY: guaranteed by the caller.
        let context = unsafe { Out::cleared(context, "context", ptr::null_mut()) };
        scope.enter()?;
        // The network's `init` installs NCCL's logger. If NCCL does not load this plugin's network,
        // the tuner's log lines would be lost without this call.
        logger::install_unless_given(log);
        let context = context?;
        if let Some(tuner) = tuner_for(comm_id, ranks, nodes) {
            context.set(tuner_handles::into_raw(tuner));
        }
        Ok(())
    })
}

fn tuner_for(comm_id: Option<u64>, ranks: usize, nodes: usize) -> Option<Tuner> {
    let tuner = plugin::tuner(comm_id, ranks, nodes);
    match &tuner {
        Tuner::Acting(acting) => {
            tracing::info!(
                "tuner: in use for a communicator of {}",
                counted(ranks, "rank")
            );
            if acting.is_ring_only() {
                tracing::info!(
                    "tuner: offers NCCL only Ring, which connects only neighbours (NCCL_SPARK_RING_TCP)"
                );
            }
            Some(tuner)
        }
        Tuner::Inert { reason } => {
            let ranks = counted(ranks, "rank");
            let nodes = counted(nodes, "node");
            tracing::info!("tuner: not used for a communicator of {ranks} on {nodes}: {reason}");
            None
        }
    }
}

fn counted(number: usize, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {noun}{plural}")
}

/// Changes NCCL's costs for a collective as the tuner decides ([`Tuner::decide`]). Changes the
/// number of channels only if a row of the tuner's table matches the collective.
///
/// # Safety
/// `context` is NULL, or came from [`init`] and was not given back. `coll_cost_table` is NULL or
/// points to `num_algo` times `num_proto` contiguous `float`; `channels` is NULL or writable.
/// Nothing else uses the table or `channels` during the call.
pub(super) unsafe extern "C" fn get_coll_info(
    context: *mut c_void,
    coll_type: c_int,
    bytes: usize,
    num_pipe_ops: c_int,
    coll_cost_table: *mut *mut f32,
    num_algo: c_int,
    num_proto: c_int,
    _reg_buff: c_int,
    channels: *mut c_int,
) -> NcclResult {
    static IS_FOREIGN_LOGGED: AtomicBool = AtomicBool::new(false);
    static IS_SHAPE_LOGGED: AtomicBool = AtomicBool::new(false);
    static IS_NULL_LOGGED: AtomicBool = AtomicBool::new(false);
    if context.is_null() {
        return NcclResult::SUCCESS;
    }
    call("tuner getCollInfo", |scope| {
        scope.enter()?;
        // SAFETY: NCCL does not finalize a context during a call on it.
        let tuner = match unsafe { tuner_handles::tuner(context) } {
            Ok(Some(tuner)) => tuner,
            Ok(None) => return Ok(()),
            Err(error) => return once(&IS_FOREIGN_LOGGED, || error),
        };
        if (num_algo, num_proto) != (ALGORITHMS as c_int, PROTOCOLS as c_int) {
            return once(&IS_SHAPE_LOGGED, || other_shape(num_algo, num_proto));
        }
        // SAFETY: guaranteed by the caller; the table has the shape of `Costs`, as checked above.
        let costs = unsafe { tuner_handles::costs(coll_cost_table, "collCostTable") };
        // SAFETY: guaranteed by the caller.
        let channels = unsafe { Out::new(channels, "nChannels") };
        match (costs, channels) {
            (Ok(costs), Ok(channels)) => {
                if let Some(decided) = apply(tuner, coll_type, bytes as u64, num_pipe_ops, costs) {
                    channels.set(decided);
                }
                Ok(())
            }
            (Err(error), _) | (_, Err(error)) => once(&IS_NULL_LOGGED, || error),
        }
    })
}

/// Lets the tuner decide, and writes only the changed costs to NCCL's table. Returns the number of
/// channels if the tuner chose one.
fn apply(
    tuner: &Tuner,
    collective: c_int,
    bytes: u64,
    num_pipe_ops: c_int,
    costs: &mut Costs,
) -> Option<c_int> {
    // A copy, so that a panic half-way leaves NCCL's table unchanged.
    let mut changed = *costs;
    let channels = tuner.decide(collective, bytes, num_pipe_ops, &mut changed);
    for (cost, new) in costs.iter_mut().zip(changed) {
        if cost.to_bits() != new.to_bits() {
            *cost = new;
        }
    }
    channels.and_then(|channels| c_int::try_from(channels).ok())
}

/// Returns the error on the first call and success afterwards, so that the log has one line.
#[cold]
#[inline(never)]
fn once(is_logged: &AtomicBool, error: impl FnOnce() -> Box<Error>) -> Quick<()> {
    // Relaxed: the flag decides only whether a line is logged, and orders nothing else.
    if is_logged.swap(true, Ordering::Relaxed) {
        Ok(())
    } else {
        Err(error())
    }
}

fn other_shape(num_algo: c_int, num_proto: c_int) -> Box<Error> {
    let algorithms = ALGORITHMS;
    let protocols = PROTOCOLS;
    Box::new(
        Argument::CostTable {
            num_algo,
            num_proto,
            algorithms,
            protocols,
        }
        .into(),
    )
}

/// # Safety
/// `context` is NULL, or came from [`init`] and was not given back; no later call uses it.
pub(super) unsafe extern "C" fn finalize(context: *mut c_void) -> NcclResult {
    call("tuner finalize", |scope| {
        scope.enter()?;
        // SAFETY: guaranteed by the caller.
        unsafe { tuner_handles::take_back(context) }
    })
}

/// Runs the body of a tuner function. The guard logs errors and panics; NCCL always gets success.
#[inline(always)]
fn call<'a>(name: &'static str, body: impl FnOnce(&Scope<'a>) -> Quick<()>) -> NcclResult {
    guard::call(name, body);
    NcclResult::SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::error::Usage;
    use proto::tuner::table::Fingerprint;
    use proto::tuner::{Mode, Policy, TunerConfig};

    const UNTOUCHED: c_int = 77;
    const ALL_REDUCE: c_int = 4;
    /// Index in [`Costs`] of algorithm Ring with protocol LL.
    const CHOSEN: usize = PROTOCOLS;

    fn acting() -> *mut c_void {
        let host = Fingerprint::new("test", "test", "test");
        let table = Some("for=*;all_reduce@2:1000-1999=ring/ll/2".parse().unwrap());
        let config = TunerConfig {
            mode: Mode::On,
            table,
            ll128: true,
            network: None,
            tuner_plugin: None,
        };
        let (policy, _) = Policy::new(config, false, &host);
        let tuner = policy.tuner(2, 2, true);
        assert!(matches!(tuner, Tuner::Acting(_)));
        tuner_handles::into_raw(tuner)
    }

    fn asked(
        context: *mut c_void,
        bytes: usize,
        mut costs: Costs,
        shape: (c_int, c_int),
    ) -> (Costs, c_int) {
        let mut channels = UNTOUCHED;
        let table = costs.as_mut_ptr().cast();
        // SAFETY: the tests pass a context that was not given back. The table is a whole `Costs`.
        // The function reads nothing through a table if `shape` is not the shape of `Costs`.
        let result = unsafe {
            get_coll_info(
                context,
                ALL_REDUCE,
                bytes,
                1,
                table,
                shape.0,
                shape.1,
                0,
                &raw mut channels,
            )
        };
        assert_eq!(result, NcclResult::SUCCESS);
        (costs, channels)
    }

    const SHAPE: (c_int, c_int) = (ALGORITHMS as c_int, PROTOCOLS as c_int);

    #[test]
    fn only_the_chosen_entry_and_the_channels_change() {
        let context = acting();
        let costs: Costs = std::array::from_fn(|at| 1.0 + at as f32);
        let mut expected = costs;
        expected[CHOSEN] = 0.0;
        assert_eq!(asked(context, 1500, costs, SHAPE), (expected, 2));
        assert_eq!(asked(context, 999, costs, SHAPE), (costs, UNTOUCHED));
        for other in [
            (ALGORITHMS as c_int + 1, SHAPE.1),
            (SHAPE.0, 2),
            (0, 0),
            (SHAPE.1, SHAPE.0),
            (-7, -3),
        ] {
            assert_eq!(
                asked(context, 1500, costs, other),
                (costs, UNTOUCHED),
                "{other:?}"
            );
        }
        let mut disabled = costs;
        disabled[CHOSEN] = -1.0;
        assert_eq!(asked(context, 1500, disabled, SHAPE), (disabled, UNTOUCHED));
        // SAFETY: the context is given back once.
        assert_eq!(unsafe { finalize(context) }, NcclResult::SUCCESS);
    }

    #[test]
    fn a_null_pointer_is_refused_or_ignored_as_documented() {
        let context = acting();
        let (mut costs, mut channels): (Costs, _) = ([1.0; ALGORITHMS * PROTOCOLS], UNTOUCHED);
        let table = costs.as_mut_ptr().cast();
        let place = &raw mut channels;
        let null = ptr::null_mut();
        for (context, table, place) in [
            (context, ptr::null_mut(), place),
            (context, table, ptr::null_mut()),
            (null, table, place),
        ] {
            // SAFETY: NULL is allowed everywhere.
            let result = unsafe {
                get_coll_info(
                    context, ALL_REDUCE, 1500, 1, table, SHAPE.0, SHAPE.1, 0, place,
                )
            };
            assert_eq!(result, NcclResult::SUCCESS);
        }
        assert_eq!(
            (costs, channels),
            ([1.0; ALGORITHMS * PROTOCOLS], UNTOUCHED)
        );
        // SAFETY: NULL is allowed, and the context is given back once.
        unsafe {
            assert_eq!(init(ptr::null_mut(), None, 2, 2, None), NcclResult::SUCCESS);
            assert_eq!(finalize(null), NcclResult::SUCCESS);
            assert_eq!(finalize(context), NcclResult::SUCCESS);
        }
    }

    #[test]
    fn panics_and_errors_are_reported_as_success_where_nccl_requires_it() {
        assert_eq!(call("test", |_| panic!("on purpose")), NcclResult::SUCCESS);
        assert_eq!(
            call("test", |_| Err(Box::new(Usage::Closed.into()))),
            NcclResult::SUCCESS
        );
    }

    #[test]
    fn a_repeated_error_is_logged_once() {
        let is_logged = AtomicBool::new(false);
        let error = once(&is_logged, || other_shape(8, 3))
            .unwrap_err()
            .to_string();
        assert!(error.contains("8 algorithms and 3 protocols"), "{error}");
        assert!(once(&is_logged, || unreachable!()).is_ok());
    }
}
