//! The guard around every function that NCCL calls. No panic crosses into NCCL. Each error is
//! logged once and becomes an NCCL result code. A call in a forked child is refused before it
//! touches state; of these refusals, only the child's first is logged.

use super::logger;
use crate::plugin;
use host::error::{Error, Internal, Missing, Quick, panic_text};
use nccl_abi::NcclResult;
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

/// Runs the body of a function that NCCL calls; `name` is the function's name in the log. Logs an
/// error as one warning. If the body panics, logs the panic, returns ncclInternalError, and marks
/// the comm that the body had entered, and no other comm, as broken.
#[inline(always)]
pub(super) fn call<'a>(
    name: &'static str,
    body: impl FnOnce(&Scope<'a>) -> Quick<()>,
) -> NcclResult {
    let scope = Scope {
        health: Cell::new(None),
    };
    // Unwind safe: if a panic left a comm half-changed, neither a later call nor the service thread
    // enters that comm (`comm/datapath/try_cell.rs`).
    match catch_unwind(AssertUnwindSafe(|| body(&scope))) {
        Ok(Ok(())) => NcclResult::SUCCESS,
        Ok(Err(error)) => refused(name, &error),
        Err(payload) => panicked(name, scope.health.get(), payload),
    }
}

/// One call in progress. The call's body first clears the output arguments. Then the body must call
/// [`Scope::enter`] or [`Scope::enter_comm`], before it touches any other state.
pub(super) struct Scope<'a> {
    health: Cell<Option<&'a Health>>,
}

impl<'a> Scope<'a> {
    /// Admits a call that belongs to no comm.
    ///
    /// # Errors
    /// [`Error::Missing`] in a forked child.
    #[inline(always)]
    pub(super) fn enter(&self) -> Quick<()> {
        if plugin::forked() {
            Err(in_forked_child())
        } else {
            Ok(())
        }
    }

    /// Admits a call on the comm that `health` belongs to. A later panic in the call marks that
    /// comm as broken.
    ///
    /// # Errors
    /// [`Error::Missing`] in a forked child, [`Error::Internal`] if the comm is broken.
    #[inline(always)]
    pub(super) fn enter_comm(&self, health: &'a Health) -> Quick<()> {
        self.enter()?;
        if health.is_broken() {
            return Err(out_of_use());
        }
        self.health.set(Some(health));
        Ok(())
    }
}

/// Health of a comm. A comm is broken once a panic has interrupted a call on it.
#[derive(Debug, Default)]
pub(super) struct Health {
    broken: AtomicBool,
}

impl Health {
    #[inline(always)]
    pub(super) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    fn break_down(&self) {
        self.broken.store(true, Ordering::Release);
    }
}

#[cold]
fn in_forked_child() -> Box<Error> {
    Box::new(Missing::Forked.into())
}

#[cold]
fn out_of_use() -> Box<Error> {
    Box::new(Internal::CallPanicked.into())
}

#[cold]
#[inline(never)]
fn refused(name: &'static str, error: &Error) -> NcclResult {
    // Formatting and logging an error may panic too.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // After a fork, NCCL's logger may stay locked by a thread that exists only in the parent.
        if plugin::forked() {
            logger::warn_once_after_fork(name, error)
        } else {
            tracing::warn!("{name}: {error}")
        }
    }));
    result_of(error)
}

fn result_of(error: &Error) -> NcclResult {
    match error {
        Error::Setting { .. } | Error::Usage(_) => NcclResult::INVALID_USAGE,
        Error::Missing(_) | Error::Os { .. } => NcclResult::SYSTEM_ERROR,
        Error::Argument(_) => NcclResult::INVALID_ARGUMENT,
        Error::Network(_) | Error::PeerGone(_) | Error::Protocol(_) | Error::TimedOut(_) => {
            NcclResult::REMOTE_ERROR
        }
        Error::Internal(_) => NcclResult::INTERNAL_ERROR,
    }
}

#[cold]
#[inline(never)]
fn panicked(
    name: &'static str,
    health: Option<&Health>,
    payload: Box<dyn Any + Send>,
) -> NcclResult {
    if let Some(health) = health {
        health.break_down();
    }
    let fault = Internal::Panic(panic_text(&*payload).to_owned()).into();
    let result = refused(name, &fault);
    // The payload's destructor is unknown code, which could panic outside the guard.
    std::mem::forget(payload);
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::error::{
        Argument, Call, Network, PeerGone, SettingFault, TimedOut, Usage, Violation,
    };
    use std::time::Duration;

    #[test]
    fn a_panic_breaks_its_own_comm_and_no_other() {
        let one = Health::default();
        let other = Health::default();
        let on = |health| call("test", |scope| scope.enter_comm(health));
        assert_eq!(
            (on(&one), on(&other)),
            (NcclResult::SUCCESS, NcclResult::SUCCESS)
        );
        let broke = call("test", |scope| {
            scope.enter_comm(&one)?;
            panic!("on purpose: {}", 1 + 1)
        });
        assert_eq!(broke, NcclResult::INTERNAL_ERROR);
        assert_eq!(
            (on(&one), on(&other)),
            (NcclResult::INTERNAL_ERROR, NcclResult::SUCCESS)
        );
    }

    #[test]
    fn a_panic_before_any_comm_is_entered_breaks_none() {
        let health = Health::default();
        assert_eq!(
            call("test", |_| panic!("on purpose")),
            NcclResult::INTERNAL_ERROR
        );
        assert_eq!(
            call("test", |scope| scope.enter_comm(&health)),
            NcclResult::SUCCESS
        );
    }

    #[test]
    fn a_payload_that_panics_when_dropped_stays_inside() {
        struct Grenade;
        impl Drop for Grenade {
            fn drop(&mut self) {
                panic!("on purpose, again");
            }
        }
        assert_eq!(
            call("test", |_| std::panic::panic_any(Grenade)),
            NcclResult::INTERNAL_ERROR
        );
    }

    #[test]
    fn an_error_keeps_its_code_and_breaks_nothing() {
        let health = Health::default();
        let refused = call("test", |scope| {
            scope.enter_comm(&health)?;
            Err(Box::new(
                PeerGone::Closed {
                    peer: String::new(),
                }
                .into(),
            ))
        });
        assert_eq!(refused, NcclResult::REMOTE_ERROR);
        assert!(!health.is_broken());
    }

    #[test]
    fn every_kind_of_error_has_its_nccl_code() {
        let setting = Error::Setting {
            name: String::new(),
            value: String::new(),
            fault: SettingFault::NotALine,
        };
        let peer = String::new;
        let expected: [(Error, NcclResult); 9] = [
            (setting, NcclResult::INVALID_USAGE),
            (Usage::Closed.into(), NcclResult::INVALID_USAGE),
            (
                Error::Os {
                    call: Call::Bootstrap,
                    errno: libc::ENOMEM,
                },
                NcclResult::SYSTEM_ERROR,
            ),
            (Missing::Gid.into(), NcclResult::SYSTEM_ERROR),
            (Argument::Context.into(), NcclResult::INVALID_ARGUMENT),
            (Network::SetupEnded.into(), NcclResult::REMOTE_ERROR),
            (
                PeerGone::Closed { peer: peer() }.into(),
                NcclResult::REMOTE_ERROR,
            ),
            (
                Violation::NoPairs { peer: peer() }.into(),
                NcclResult::REMOTE_ERROR,
            ),
            (
                TimedOut::Setup {
                    what: peer(),
                    waited: Duration::ZERO,
                    limit: 1,
                }
                .into(),
                NcclResult::REMOTE_ERROR,
            ),
        ];
        for (error, code) in expected {
            assert_eq!(result_of(&error), code, "{error:?}");
        }
        assert_eq!(
            result_of(&Error::from(Internal::NoStage)),
            NcclResult::INTERNAL_ERROR
        );
    }
}
