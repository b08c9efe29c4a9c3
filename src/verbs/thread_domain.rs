//! Thread domains: a QP that only one thread uses at a time needs none of the provider's own locks.

use std::ptr::NonNull;
use std::sync::Arc;

use super::context::{Pd, extended_operation, note_failure};
use super::library::Pointer;
use verbs_sys::*;

/// A protection domain that says "one thread at a time" to the provider (mlx5: no spinlock around the queues, and a
/// doorbell page of its own). It is for one QP, because then `&mut Qp` is what keeps the promise.
pub(super) struct ThreadDomain {
    /// A protection domain on top of `pd`; memory registered in `pd` is usable through it.
    pub(super) raw: NonNull<ibv_pd>,
    thread: NonNull<ibv_td>,
    dealloc_td: unsafe extern "C" fn(*mut ibv_td) -> i32,
    pd: Arc<Pd>,
}

// SAFETY: see `Context`.
unsafe impl Send for ThreadDomain {}
// SAFETY: see `Context`.
unsafe impl Sync for ThreadDomain {}

impl ThreadDomain {
    /// `None` where the provider has no such thing, or has run out of them; a plain domain does the same more slowly.
    pub(super) fn new(pd: &Arc<Pd>) -> Option<Self> {
        let context = pd.context();
        let alloc_td = extended_operation!(context, alloc_td)?;
        let dealloc_td = extended_operation!(context, dealloc_td)?;
        let alloc_parent_domain = extended_operation!(context, alloc_parent_domain)?;
        let mut attributes = ibv_td_init_attr { comp_mask: 0 };
        // SAFETY: the context is open, and the struct lives for the call.
        let thread = NonNull::new(unsafe { alloc_td(context.raw.as_ptr(), &raw mut attributes) })?;
        let mut attributes = ibv_parent_domain_init_attr {
            pd: pd.raw.as_ptr(),
            td: thread.as_ptr(),
            comp_mask: 0,
            alloc: None,
            free: None,
            pd_context: std::ptr::null_mut(),
        };
        // SAFETY: as above; both domains are alive.
        let Some(raw) = NonNull::new(unsafe { alloc_parent_domain(context.raw.as_ptr(), &raw mut attributes) }) else {
            // SAFETY: allocated just above, and used by nothing.
            let status = unsafe { dealloc_td(thread.as_ptr()) };
            note_failure("ibv_dealloc_td", context.name(), status);
            return None;
        };
        Some(Self { raw, thread, dealloc_td, pd: Arc::clone(pd) })
    }
}

impl Drop for ThreadDomain {
    fn drop(&mut self) {
        let context = self.pd.context();
        let dealloc_pd: Pointer<fn_ibv_dealloc_pd> = context.library.dealloc_pd;
        // SAFETY: made by us; the QP in it is destroyed. The parent goes first: it holds a reference on the thread domain.
        let (parent, thread) = unsafe { (dealloc_pd(self.raw.as_ptr()), (self.dealloc_td)(self.thread.as_ptr())) };
        note_failure("ibv_dealloc_pd of a parent domain", context.name(), parent);
        note_failure("ibv_dealloc_td", context.name(), thread);
    }
}
