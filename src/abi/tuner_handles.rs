//! Conversions between NCCL's pointers and the tuner's objects.
//!
//! | NCCL's pointer | is | made by | taken back by |
//! |---|---|---|---|
//! | context | `Box<TunerContext>`, or NULL if NCCL chooses | [`into_raw`] | [`take_back`] |
//! | collCostTable | contiguous `float[numAlgo][numProto]`, despite its declared type | NCCL | |
//!
//! A context begins with a mark, as a comm does (`handles`).

use super::handles::{Mark, TUNER, mark_of, non_null, of_another_kind};
use host::error::Quick;
use proto::tuner::{Costs, Tuner};
use std::ffi::c_void;
use std::ptr::NonNull;

#[repr(C)]
struct TunerContext {
    // The first field: `mark_of` reads the mark before the object's type is known.
    mark: Mark,
    tuner: Tuner,
}

pub(super) fn into_raw(tuner: Tuner) -> *mut c_void {
    Box::into_raw(Box::new(TunerContext { mark: TUNER, tuner })).cast()
}

/// Returns the tuner behind one of NCCL's pointers; `None` for NULL.
///
/// # Errors
/// [`Error::Argument`](host::error::Error::Argument) if `raw` is another object.
///
/// # Safety
/// `raw` is NULL, or came from [`into_raw`] and is not taken back before `'a` ends.
#[inline(always)]
pub(super) unsafe fn tuner<'a>(raw: *mut c_void) -> Quick<Option<&'a Tuner>> {
    if raw.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller upholds the same contract, which covers the lifetime of the reference.
    // Several of NCCL's threads may use a tuner at a time, because it is `Sync` (checked below).
    unsafe { from_raw(raw).map(|context| Some(&context.as_ref().tuner)) }
}

/// Takes a tuner back from NCCL; accepts NULL. Errors as [`tuner`].
///
/// # Safety
/// `raw` is NULL, or came from [`into_raw`] and was not taken back; no thread uses `raw` again.
pub(super) unsafe fn take_back(raw: *mut c_void) -> Quick<()> {
    if raw.is_null() {
        return Ok(());
    }
    // SAFETY: guaranteed by the caller; `into_raw` leaked this box.
    drop(unsafe { Box::from_raw(from_raw(raw)?.as_ptr()) });
    Ok(())
}

/// # Safety
/// `raw` points to an object of this plugin that begins with a mark.
#[inline(always)]
unsafe fn from_raw(raw: *mut c_void) -> Quick<NonNull<TunerContext>> {
    const NAME: &str = "context";
    // SAFETY: the caller upholds the same contract.
    match unsafe { mark_of(raw, NAME) }? {
        TUNER => non_null(raw.cast(), NAME),
        other => Err(of_another_kind(NAME, other, TUNER)),
    }
}

/// # Errors
/// [`Error::Argument`](host::error::Error::Argument) if NULL.
///
/// # Safety
/// `raw` is NULL, or points to as many contiguous costs as [`Costs`] has. Nothing else uses these
/// costs during `'a`.
#[inline(always)]
pub(super) unsafe fn costs<'a>(raw: *mut *mut f32, name: &'static str) -> Quick<&'a mut Costs> {
    // SAFETY: guaranteed by the caller.
    non_null(raw.cast::<Costs>(), name).map(|mut costs| unsafe { costs.as_mut() })
}

const _: () = {
    const fn shared_by_threads<T: Send + Sync>() {}
    shared_by_threads::<Tuner>();
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::handles::RailComm;
    use std::ptr;

    fn a_tuner() -> Tuner {
        Tuner::Inert {
            reason: "on purpose".to_owned(),
        }
    }

    #[test]
    fn a_context_yields_its_tuner_and_null_yields_none() {
        let raw = into_raw(a_tuner());
        // SAFETY: NULL, and a context that is taken back once.
        unsafe {
            assert!(tuner(ptr::null_mut()).unwrap().is_none());
            assert!(
                matches!(tuner(raw).unwrap(), Some(Tuner::Inert { reason }) if reason == "on purpose")
            );
            take_back(raw).unwrap();
            take_back(ptr::null_mut()).unwrap();
        }
    }

    #[test]
    fn a_pointer_to_something_else_is_refused_with_an_error() {
        let mut stray = [0_u64; 8];
        let stray = stray.as_mut_ptr().cast::<c_void>();
        let words = |result: Quick<()>| result.unwrap_err().to_string();
        let raw = into_raw(a_tuner());
        // SAFETY: the array has room for a mark, also from its second byte on; the context is taken
        // back once.
        unsafe {
            assert_eq!(
                words(take_back(stray)),
                "context is an unknown object; it must be a tuner context"
            );
            assert_eq!(
                words(tuner(stray.byte_add(1)).map(|_| ())),
                "context is not a pointer that this plugin returned"
            );
            let no_comm = RailComm::from_raw(raw, "comm").map(|_| ());
            assert_eq!(
                words(no_comm),
                "comm is a tuner context; it must be a receive comm"
            );
            take_back(raw).unwrap();
        }
    }
}
