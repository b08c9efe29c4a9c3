//! Protection domains, thread domains, and memory regions.

use super::guard;
use super::handles::{self, MrHandle, PdHandle, TdHandle, Users};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use verbs_sys::*;

/// Access flags that a registration may have. The core enforces the first three. The next two allow
/// atomics and memory windows, which the core does not have. The last one is about huge pages, and
/// has no effect here.
const GRANTABLE: u32 = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_ATOMIC
    | IBV_ACCESS_MW_BIND
    | IBV_ACCESS_HUGETLB;

/// # Safety
/// `context` must be open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    guard::pointer(|| {
        // SAFETY: the caller's promise.
        let handle = unsafe { handles::context(context) }?;
        // The numbers of domains count from 1. Number 0 is for programs that call the core
        // directly, without this function.
        static DOMAINS: AtomicU32 = AtomicU32::new(1);
        let c = ibv_pd {
            context,
            handle: DOMAINS.fetch_add(1, Ordering::Relaxed),
        };
        let holds = vec![handle.users.hold()];
        Ok(handles::into_raw(PdHandle {
            c,
            device: handle.device,
            users: Users::default(),
            holds,
        }))
    })
}

/// Fails with `EBUSY` while an object is in the domain.
///
/// # Safety
/// `pd` must come from [`ibv_alloc_pd`] or [`alloc_parent_domain`], and must not be used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    guard::status(|| {
        // SAFETY: the caller's promise.
        let handle = unsafe { handles::pd(pd) }?;
        handle.users.check_unused()?;
        // SAFETY: a context stays open while it has objects.
        let answer = unsafe { handles::destroyed(handle.c.context) };
        // SAFETY: made by `into_raw`, and no object uses it.
        unsafe { handles::free::<PdHandle, _>(pd) };
        answer
    })
}

/// Makes a thread domain, in which a program promises to use objects from one thread at a time. The
/// promise changes nothing here.
///
/// # Safety
/// `context` must be open. `attributes` must be null or readable.
pub(super) unsafe extern "C" fn alloc_td(
    context: *mut ibv_context,
    attributes: *mut ibv_td_init_attr,
) -> *mut ibv_td {
    guard::pointer(|| {
        // SAFETY: the caller's promise.
        let (handle, attributes) = unsafe { (handles::context(context)?, attributes.as_ref()) };
        if attributes.ok_or(libc::EINVAL)?.comp_mask != 0 {
            return Err(libc::EOPNOTSUPP);
        }
        Ok(handles::into_raw(TdHandle {
            c: ibv_td { context },
            users: Users::default(),
            hold: handle.users.hold(),
        }))
    })
}

/// # Safety
/// `td` must come from [`alloc_td`], and must not be used again.
pub(super) unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    guard::status(|| {
        // SAFETY: the caller's promise.
        unsafe { handles::td(td) }?.users.check_unused()?;
        // SAFETY: made by `into_raw`, and no object uses it.
        unsafe { handles::free::<TdHandle, _>(td) };
        Ok(())
    })
}

/// Makes a protection domain on top of another one. A program may pass an allocator of its own,
/// which is ignored, because this library would not allocate anything with it.
///
/// # Safety
/// `context` must be open. `attributes` must be null or readable, and the domains in it must be
/// alive.
pub(super) unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attributes: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    guard::pointer(|| {
        // SAFETY: the caller's promise.
        let (handle, attributes) = unsafe { (handles::context(context)?, attributes.as_ref()) };
        let attributes = attributes.ok_or(libc::EINVAL)?;
        // SAFETY: the caller's promise.
        let parent = unsafe { handles::pd(attributes.pd) }?;
        let mut holds = vec![handle.users.hold(), parent.users.hold()];
        if !attributes.td.is_null() {
            // SAFETY: the caller's promise.
            holds.push(unsafe { handles::td(attributes.td) }?.users.hold());
        }
        // The new domain has the number of the domain below it. So its queue pairs may use the keys
        // of that domain.
        let c = ibv_pd {
            context,
            handle: parent.c.handle,
        };
        Ok(handles::into_raw(PdHandle {
            c,
            device: handle.device,
            users: Users::default(),
            holds,
        }))
    })
}

/// # Safety
/// `pd` must be alive. The memory must stay mapped until [`ibv_dereg_mr`]. Until then, the caller
/// must expect that peers read and write the memory as `access` allows.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the caller's promise.
    unsafe { ibv_reg_mr_iova2(pd, addr, length, addr as u64, access as c_uint) }
}

/// # Safety
/// The same as for [`ibv_reg_mr`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the caller's promise.
    unsafe { ibv_reg_mr_iova2(pd, addr, length, iova, access as c_uint) }
}

/// Registers memory. Ignores the access flags that `verbs.h` calls optional, such as relaxed
/// ordering.
///
/// # Safety
/// The same as for [`ibv_reg_mr`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    guard::pointer(|| {
        // SAFETY: the caller's promise.
        let handle = unsafe { handles::pd(pd) }?;
        // SAFETY: a context stays open while it has objects.
        unsafe { handles::context(handle.c.context) }?;
        let access = access & !ACCESS_OPTIONAL_RANGE;
        if access & !GRANTABLE != 0 || iova != addr as u64 {
            return Err(libc::EOPNOTSUPP);
        }
        let remote_change = access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC) != 0;
        if length == 0 || (remote_change && access & IBV_ACCESS_LOCAL_WRITE == 0) {
            return Err(libc::EINVAL);
        }
        let device = handle.device;
        // SAFETY: the caller's promise about the memory.
        let key = unsafe {
            device.node.register(
                (device.index, handle.c.handle),
                addr as usize,
                length,
                access,
            )
        }?;
        let c = ibv_mr {
            context: handle.c.context,
            pd,
            addr,
            length,
            handle: key,
            lkey: key,
            rkey: key,
        };
        Ok(handles::into_raw(MrHandle {
            c,
            device,
            hold: handle.users.hold(),
        }))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_dmabuf_mr(
    _pd: *mut ibv_pd,
    _offset: u64,
    _length: usize,
    _iova: u64,
    _descriptor: c_int,
    _access: c_int,
) -> *mut ibv_mr {
    guard::pointer(|| Err(libc::EOPNOTSUPP))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_rereg_mr(
    _mr: *mut ibv_mr,
    _flags: c_int,
    _pd: *mut ibv_pd,
    _addr: *mut c_void,
    _length: usize,
    _access: c_int,
) -> c_int {
    const OLD_REGION_IS_VALID: c_int = -1;
    guard::zero_or_minus_one(|| Err(libc::EOPNOTSUPP)).min(OLD_REGION_IS_VALID)
}

/// After this returns, no request of a peer reads or writes the region.
///
/// # Safety
/// `mr` must come from a registration, and must not be used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    guard::status(|| {
        // SAFETY: the caller's promise.
        let handle = unsafe { handles::mr(mr) }?;
        handle
            .device
            .node
            .deregister(handle.device.index, handle.c.lkey)?;
        // SAFETY: a context stays open while it has objects.
        let answer = unsafe { handles::destroyed(handle.c.context) };
        // SAFETY: made by `into_raw`, and no object uses it.
        unsafe { handles::free::<MrHandle, _>(mr) };
        answer
    })
}

/// Does nothing: the fabric addresses memory by process and virtual address, so it still finds the
/// parent's pages after a fork.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_fork_init() -> c_int {
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_is_fork_initialized() -> ibv_fork_status {
    IBV_FORK_UNNEEDED
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dontfork_range(_base: *mut c_void, _bytes: usize) -> c_int {
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dofork_range(_base: *mut c_void, _bytes: usize) -> c_int {
    0
}
