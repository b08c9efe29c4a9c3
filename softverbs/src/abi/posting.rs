//! The data path: the functions behind `ibv_post_send` and `ibv_post_recv` of `verbs.h`.

use super::guard;
use super::handles;
use crate::os::shm::{INLINE_BYTES, MAX_SGES};
use crate::queue_pair::QueuePair;
use crate::work_request::{Operation, SendRequest, Sge};
use std::ffi::c_int;
use std::sync::Arc;
use verbs_sys::*;

/// Posts a chain of sends. If a send cannot be posted, returns the `errno` and sets `bad` to that
/// send. The sends before it stay posted.
///
/// # Safety
/// `qp` must be alive, and the chain and its scatter/gather lists must be readable. The memory that
/// the lists name must stay registered until the request completes; for an inline request, it must
/// be readable during this call. `bad` must be null or valid for writes.
pub(super) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    first: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    let mut at = first;
    let posted = guard::caught(|| {
        // SAFETY: the caller's promise.
        let core = &unsafe { handles::qp(qp) }?.core;
        // SAFETY: null at the chain's end, else readable, by the caller's promise.
        while let Some(request) = unsafe { at.as_ref() } {
            // SAFETY: the caller's promise.
            unsafe { post_one_send(core, request) }?;
            at = request.next;
        }
        Ok(())
    });
    // SAFETY: null or writable, by the caller's promise.
    unsafe { outcome(posted, at, bad) }
}

/// Posts a chain of receives, and reports errors in the same way as [`post_send`].
///
/// # Safety
/// The same as for [`post_send`].
pub(super) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    let mut at = first;
    let posted = guard::caught(|| {
        // SAFETY: the caller's promise.
        let core = &unsafe { handles::qp(qp) }?.core;
        // SAFETY: null at the chain's end, else readable, by the caller's promise.
        while let Some(request) = unsafe { at.as_ref() } {
            // SAFETY: the caller's promise.
            let (sges, count) =
                unsafe { copy_sges(request.sg_list, request.num_sge, libc::EINVAL) }?;
            core.post_receive(request.wr_id, &sges[..count])?;
            at = request.next;
        }
        Ok(())
    });
    // SAFETY: null or writable, by the caller's promise.
    unsafe { outcome(posted, at, bad) }
}

/// # Safety
/// The same as for [`post_send`].
unsafe fn post_one_send(core: &Arc<QueuePair>, request: &ibv_send_wr) -> Result<(), i32> {
    let (operation, with_imm) = match request.opcode {
        IBV_WR_RDMA_WRITE => (Operation::Write, false),
        IBV_WR_RDMA_WRITE_WITH_IMM => (Operation::Write, true),
        IBV_WR_SEND => (Operation::Send, false),
        IBV_WR_SEND_WITH_IMM => (Operation::Send, true),
        IBV_WR_RDMA_READ => (Operation::Read, false),
        _ => return Err(libc::EOPNOTSUPP),
    };
    // SAFETY: the caller's promise.
    let (sges, count) = unsafe { copy_sges(request.sg_list, request.num_sge, libc::ENOMEM) }?;
    // SAFETY: every member of these unions is made of integers.
    let (imm, remote) = unsafe { (request.__bindgen_anon_1.imm_data, request.wr.rdma) };
    let has = |flag: u32| request.send_flags & flag != 0;
    let mut carried = [0; INLINE_BYTES];
    let inline = if has(IBV_SEND_INLINE) {
        // SAFETY: inline data may be read, by the caller's promise.
        Some(unsafe { copy_inline(&sges[..count], &mut carried) }.ok_or(libc::ENOMEM)?)
    } else {
        None
    };
    let request = SendRequest {
        wr_id: request.wr_id,
        operation,
        signaled: has(IBV_SEND_SIGNALED),
        inline,
        solicited: has(IBV_SEND_SOLICITED),
        imm: with_imm.then_some(imm),
        sges: &sges[..count],
        remote_addr: remote.remote_addr,
        rkey: remote.rkey,
    };
    core.post_send(&request)
}

/// Copies the bytes of an inline request. Returns `None` if there are more than [`INLINE_BYTES`].
///
/// # Safety
/// The memory that `sges` names must be readable.
unsafe fn copy_inline<'a>(sges: &[Sge], into: &'a mut [u8; INLINE_BYTES]) -> Option<&'a [u8]> {
    let mut at = 0;
    for sge in sges {
        let place = into.get_mut(at..at + sge.bytes as usize)?;
        // SAFETY: the caller's promise; `place` has the same length.
        unsafe {
            std::ptr::copy_nonoverlapping(sge.addr as *const u8, place.as_mut_ptr(), place.len())
        };
        at += place.len();
    }
    Some(&into[..at])
}

/// Copies a scatter/gather list, and returns the copy and its length. `too_many` is the `errno` for
/// a list with more than [`MAX_SGES`] entries.
///
/// # Safety
/// `list` must be null, or have `count` readable entries.
unsafe fn copy_sges(
    list: *mut ibv_sge,
    count: c_int,
    too_many: i32,
) -> Result<([Sge; MAX_SGES], usize), i32> {
    let count = usize::try_from(count).map_err(|_| libc::EINVAL)?;
    if count > 0 && list.is_null() {
        return Err(libc::EINVAL);
    }
    if count > MAX_SGES {
        return Err(too_many);
    }
    let sges = std::array::from_fn(|index| {
        if index >= count {
            return Sge {
                addr: 0,
                bytes: 0,
                lkey: 0,
            };
        }
        // SAFETY: `index` is below `count`, and `list` has so many entries, by the caller's
        // promise.
        let sge = unsafe { &*list.add(index) };
        Sge {
            addr: sge.addr,
            bytes: sge.length,
            lkey: sge.lkey,
        }
    });
    Ok((sges, count))
}

/// # Safety
/// `bad` must be null or valid for writes.
unsafe fn outcome<Request>(
    posted: Result<(), i32>,
    at: *mut Request,
    bad: *mut *mut Request,
) -> c_int {
    let Err(errno) = posted else { return 0 };
    // SAFETY: the caller's promise.
    if let Some(bad) = unsafe { bad.as_mut() } {
        *bad = at;
    }
    errno
}
