//! Thread domains. A QP used by one thread at a time does not need the provider's locks.
//!
//! A thread domain also determines the doorbell, the register by which the processor tells the NIC
//! of new work requests. mlx5 gives each thread domain its own BlueFlame register, in a page that
//! the kernel maps for write combining. If the kernel has found that the machine cannot combine
//! writes, the kernel refuses the page, and mlx5 then refuses the thread domain (`mlx5_alloc_td` in
//! rdma-core's providers/mlx5/verbs.c, `MLX5_IB_METHOD_UAR_OBJ_ALLOC` in Linux's
//! drivers/infiniband/hw/mlx5/main.c). A device without BlueFlame gets a thread domain with a plain
//! doorbell; libibverbs does not show the difference.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::context::{Context, Pd, extended_operation, note_failure};
use super::library::Pointer;
use verbs_sys::*;

/// A protection domain that promises the provider one thread at a time (mlx5: no spinlock around
/// the queues, a separate doorbell register). Each QP has its own domain, and `&mut Qp` keeps the
/// promise.
pub(super) struct ThreadDomain {
    /// Parent domain over `pd`. QPs in the parent domain can use memory registered in `pd`.
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
    /// Creates a thread domain in `pd`. A QP in `pd` itself works too, but more slowly.
    ///
    /// # Errors
    /// The reason as text: the provider has no thread domains, or refused one.
    pub(super) fn new(pd: &Arc<Pd>) -> Result<Self, String> {
        let context = pd.context();
        let none = || "its provider has none".to_owned();
        let alloc_td = extended_operation!(context, alloc_td).ok_or_else(none)?;
        let dealloc_td = extended_operation!(context, dealloc_td).ok_or_else(none)?;
        let alloc_parent_domain =
            extended_operation!(context, alloc_parent_domain).ok_or_else(none)?;
        let refused = || std::io::Error::last_os_error().to_string();
        let mut attributes = ibv_td_init_attr { comp_mask: 0 };
        // SAFETY: the context is open, and the struct lives for the call.
        let thread = NonNull::new(unsafe { alloc_td(context.raw.as_ptr(), &raw mut attributes) })
            .ok_or_else(refused)?;
        let mut attributes = ibv_parent_domain_init_attr {
            pd: pd.raw.as_ptr(),
            td: thread.as_ptr(),
            comp_mask: 0,
            alloc: None,
            free: None,
            pd_context: std::ptr::null_mut(),
        };
        // SAFETY: the context is open, the struct lives for the call, and both domains are alive.
        let Some(raw) =
            NonNull::new(unsafe { alloc_parent_domain(context.raw.as_ptr(), &raw mut attributes) })
        else {
            let why = refused();
            // SAFETY: allocated just above, and unused.
            let status = unsafe { dealloc_td(thread.as_ptr()) };
            note_failure("ibv_dealloc_td", context.name(), status);
            return Err(why);
        };
        Ok(Self {
            raw,
            thread,
            dealloc_td,
            pd: Arc::clone(pd),
        })
    }
}

/// Logs that QPs have thread domains, or that they lack them. Each of the two lines appears at most
/// once for an opened device.
pub(super) fn tell_doorbells(context: &Context, domain: &Result<ThreadDomain, String>) {
    // Relaxed: the flag decides only whether a line is logged, and orders nothing else.
    if context.told_of_doorbells[usize::from(domain.is_ok())].swap(true, Ordering::Relaxed) {
        return;
    }
    let name = context.name();
    match domain {
        Ok(_) => tracing::info!(
            "{name}: queue pairs have thread domains: no locks, and with BlueFlame a write-combined doorbell each"
        ),
        Err(why) => tracing::info!(
            "{name}: queue pairs have no thread domains ({why}): they take locks and share doorbells; mlx5 has none where \
             the kernel finds no write combining"
        ),
    }
}

impl Drop for ThreadDomain {
    fn drop(&mut self) {
        let context = self.pd.context();
        let dealloc_pd: Pointer<fn_ibv_dealloc_pd> = context.library.dealloc_pd;
        // SAFETY: allocated by this type, and the QP in it is destroyed. The parent domain is freed
        // first, because it refers to the thread domain.
        let (parent, thread) = unsafe {
            (
                dealloc_pd(self.raw.as_ptr()),
                (self.dealloc_td)(self.thread.as_ptr()),
            )
        };
        note_failure("ibv_dealloc_pd of a parent domain", context.name(), parent);
        note_failure("ibv_dealloc_td", context.name(), thread);
    }
}
