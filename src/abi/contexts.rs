//! NCCL's network contexts (`ctx`): one for each communicator, with its traffic class and its
//! present operation.
//!
//! A context is a pointer to an entry of a static table and is never freed: a communicator made by
//! a split shares its parent's context, and NCCL finalizes that context once for each of the two.
//! The first entries belong to no communicator alone: they serve those that come after the table is
//! full, one entry for each traffic class. Their messages may name another communicator's
//! operation.

use crate::comm::CurrentOperation;
use host::error::{Argument, Result, Usage};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

/// Classes 0 to 255, no class, and numbers that are out of range.
const CLASSES: usize = 258;
/// Communicators with an entry of their own. A process with 1024 communicators has started over and
/// over.
const OWN: usize = 1024;

struct Context {
    /// As NCCL passed it: [`class_of`] converts it.
    class: AtomicI32,
    operation: CurrentOperation,
}

static CONTEXTS: [Context; CLASSES + OWN] = [const {
    Context {
        class: AtomicI32::new(0),
        operation: CurrentOperation::new(),
    }
}; CLASSES + OWN];

/// Returns the context of a new communicator with the traffic class that NCCL passed. A negative
/// number means that none was chosen.
pub(super) fn context_for(traffic_class: c_int) -> *mut c_void {
    static USED: AtomicUsize = AtomicUsize::new(0);
    let shared = match class_of(traffic_class) {
        Ok(Some(class)) => usize::from(class),
        Ok(None) => CLASSES - 2,
        Err(_) => CLASSES - 1,
    };
    let own = USED.fetch_add(1, Ordering::Relaxed);
    let context = CONTEXTS
        .get(CLASSES..)
        .and_then(|all| all.get(own))
        .unwrap_or(&CONTEXTS[shared]);
    // Relaxed: NCCL passes the context on to its other threads by means of its own.
    context.class.store(traffic_class, Ordering::Relaxed);
    std::ptr::from_ref(context).cast_mut().cast()
}

/// Returns a context's traffic class, or `None` if none was chosen. A NULL context also means that
/// none was chosen.
///
/// # Errors
/// [`Error::Argument`](host::error::Error::Argument) if the pointer is not from [`context_for`],
/// [`Error::Usage`](host::error::Error::Usage) if the class was out of range.
pub(super) fn class(raw: *const c_void) -> Result<Option<u8>> {
    let Some(context) = context(raw)? else {
        return Ok(None);
    };
    class_of(context.class.load(Ordering::Relaxed))
}

/// Returns a context's present operation; `None` for a NULL context.
///
/// # Errors
/// [`Error::Argument`](host::error::Error::Argument) if the pointer is not from [`context_for`].
pub(super) fn operation(raw: *const c_void) -> Result<Option<&'static CurrentOperation>> {
    context(raw).map(|context| context.map(|context| &context.operation))
}

/// Converts the traffic class of a communicator's configuration.
///
/// # Errors
/// [`Error::Usage`](host::error::Error::Usage) if the number is out of range.
pub(super) fn class_of(traffic_class: c_int) -> Result<Option<u8>> {
    match u8::try_from(traffic_class) {
        Ok(class) => Ok(Some(class)),
        Err(_) if traffic_class < 0 => Ok(None),
        Err(_) => Err(Usage::TrafficClass.into()),
    }
}

/// Finds the entry by its address. Reads nothing through the pointer.
fn context(raw: *const c_void) -> Result<Option<&'static Context>> {
    if raw.is_null() {
        return Ok(None);
    }
    let offset = raw.addr().wrapping_sub(CONTEXTS.as_ptr().addr());
    let is_entry = offset.is_multiple_of(size_of::<Context>());
    CONTEXTS
        .get(offset / size_of::<Context>())
        .filter(|_| is_entry)
        .map(Some)
        .ok_or_else(|| Argument::Context.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::error::Error;
    use proto::wire::operation::Operation;
    use std::ptr;

    #[test]
    fn each_communicator_has_its_class_and_its_operation() {
        for (number, class_there) in [(0, Some(0)), (105, Some(105)), (255, Some(255)), (-1, None)]
        {
            let raw = context_for(number);
            assert!(!raw.is_null());
            assert_eq!(class(raw).unwrap(), class_there);
            assert_eq!(class_of(number).unwrap(), class_there);
        }
        assert!(matches!(class(context_for(256)), Err(Error::Usage(_))));
        assert!(matches!(class_of(256), Err(Error::Usage(_))));
        let [one, other] = [context_for(7), context_for(7)];
        let all_gather = Operation::of_bits(4, 2, 4);
        operation(one).unwrap().unwrap().set(all_gather);
        assert_eq!(operation(one).unwrap().unwrap().get(), all_gather);
        assert_eq!(operation(other).unwrap().unwrap().get(), None);
        // Communicators beyond the table share entries by their class.
        for _ in 0..2 * OWN {
            context_for(11);
        }
        assert_eq!(context_for(11), context_for(11));
        assert_ne!(context_for(11), context_for(12));
        assert_eq!(class(context_for(12)).unwrap(), Some(12));
    }

    #[test]
    fn null_means_nothing_chosen_and_another_pointer_is_refused() {
        assert_eq!(class(ptr::null()).unwrap(), None);
        assert!(operation(ptr::null()).unwrap().is_none());
        let stray = 7_u8;
        let inside = context_for(3).cast::<u8>().wrapping_add(1);
        for raw in [ptr::from_ref(&stray), inside.cast_const()] {
            assert!(matches!(class(raw.cast()), Err(Error::Argument(_))));
            assert!(matches!(operation(raw.cast()), Err(Error::Argument(_))));
        }
    }
}
