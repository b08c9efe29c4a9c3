//! Creation and state changes of queue pairs.

use super::guard;
use super::handles::{self, EventCounter, QpHandle};
use super::rounding::rounded_up;
use super::transition::{self, Bounds};
use crate::fabric::lock;
use crate::gid_table;
use crate::queue_pair::{Caps, Change, PathToPeer, QueuePair, State};
use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use verbs_sys::*;

/// Makes a queue pair. Supports only reliable connections, without a shared receive queue. Writes
/// the queues' real sizes to `wanted.cap`; they may be larger than the sizes that the program asked
/// for.
///
/// # Safety
/// `pd` and the queues in `wanted` must be alive, and `wanted` readable and writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_qp(
    pd: *mut ibv_pd,
    wanted: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    guard::pointer(|| {
        // SAFETY: the caller's promise.
        let (domain, wanted) = unsafe { (handles::pd(pd)?, wanted.as_mut().ok_or(libc::EINVAL)?) };
        // SAFETY: the caller's promise.
        let (send_cq, recv_cq) =
            unsafe { (handles::cq(wanted.send_cq)?, handles::cq(wanted.recv_cq)?) };
        if wanted.qp_type != IBV_QPT_RC || !wanted.srq.is_null() {
            return Err(libc::EOPNOTSUPP);
        }
        let device = domain.device;
        device.await_firmware();
        let caps = |cap: &ibv_qp_cap| Caps {
            send_requests: cap.max_send_wr,
            receive_requests: cap.max_recv_wr,
            sges: cap.max_send_sge.max(cap.max_recv_sge),
            inline_bytes: cap.max_inline_data,
            signal_all: wanted.sq_sig_all != 0,
        };
        caps(&wanted.cap).check()?;
        let got = rounded_up(wanted.cap);
        let caps = caps(&got);
        let core = QueuePair::new(
            &device.node,
            device.index,
            domain.c.handle,
            &send_cq.core,
            &recv_cq.core,
            caps,
        )?;
        // SAFETY: integers, pointers and pthread objects, for which zero is a value.
        let mut c: ibv_qp = unsafe { std::mem::zeroed() };
        (c.context, c.qp_context, c.pd) = (domain.c.context, wanted.qp_context, pd);
        (c.send_cq, c.recv_cq, c.qp_type) = (wanted.send_cq, wanted.recv_cq, wanted.qp_type);
        (c.qp_num, c.handle, c.state) = (core.number(), core.number(), IBV_QPS_RESET);
        let events = EventCounter::new();
        let number = core.number();
        let object = QpHandle {
            c: UnsafeCell::new(c),
            core,
            device,
            events: Arc::clone(&events),
            attributes: Mutex::new(reset_attributes(got)),
            signal_all: caps.signal_all,
            holds: vec![
                domain.users.hold(),
                send_cq.users.hold(),
                recv_cq.users.hold(),
            ],
        };
        let given: *mut ibv_qp = handles::into_raw(object);
        events
            .address
            .store(given.expose_provenance(), Ordering::Release);
        lock(&device.qps).insert(number, events);
        wanted.cap = got;
        Ok(given)
    })
}

/// # Safety
/// `qp` must be alive, and `given` readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_qp(
    qp: *mut ibv_qp,
    given: *mut ibv_qp_attr,
    mask: c_int,
) -> c_int {
    guard::status(|| {
        // SAFETY: the caller's promise.
        let (handle, given) = unsafe { (handles::qp(qp)?, given.as_ref().ok_or(libc::EINVAL)?) };
        handle.device.await_firmware();
        let mut attributes = lock(&handle.attributes);
        let after = modified(handle, &attributes, given, mask as u32)?;
        *attributes = after;
        // SAFETY: the lock is held, so only one thread writes the state.
        unsafe { (*handle.c.get()).state = handle.core.state() as ibv_qp_state };
        Ok(())
    })
}

/// # Safety
/// `qp` must be alive, and both structs must be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_qp(
    qp: *mut ibv_qp,
    found: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    guard::status(|| {
        // SAFETY: the caller's promise.
        let handle = unsafe { handles::qp(qp) }?;
        let attributes = lock(&handle.attributes);
        let mut now = *attributes;
        now.qp_state = handle.core.state() as ibv_qp_state;
        now.cur_qp_state = now.qp_state;
        let c = handle.c.get();
        // SAFETY: the lock is held, so only one thread writes the state; the other members do not
        // change.
        let (qp_context, send_cq, recv_cq) = unsafe {
            (*c).state = now.qp_state;
            ((*c).qp_context, (*c).send_cq, (*c).recv_cq)
        };
        let made = ibv_qp_init_attr {
            qp_context,
            send_cq,
            recv_cq,
            srq: std::ptr::null_mut(),
            cap: now.cap,
            qp_type: IBV_QPT_RC,
            sq_sig_all: c_int::from(handle.signal_all),
        };
        // SAFETY: writable, by the caller's promise.
        unsafe {
            found.write(now);
            init.write(made);
        }
        Ok(())
    })
}

/// Returns 0, which promises no order. The fabric nevertheless stores bytes in the order in which a
/// NIC stores them, for programs that rely on that order without a promise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_qp_data_in_order(
    _qp: *mut ibv_qp,
    _operation: ibv_wr_opcode,
    _flags: u32,
) -> c_int {
    0
}

/// Waits until the program has acknowledged the queue pair's events.
///
/// # Safety
/// `qp` must come from [`ibv_create_qp`], and must not be used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    guard::status(|| {
        // SAFETY: the caller's promise.
        let handle = unsafe { handles::qp(qp) }?;
        lock(&handle.device.qps).remove(&handle.core.number());
        handle.core.destroy_or_defer();
        handle.events.wait_for_acknowledgements();
        // SAFETY: the queue pair is alive, and its context stays open while it has objects.
        let answer = unsafe { handles::destroyed((*qp).context) };
        // SAFETY: made by `into_raw`, and no object uses it.
        unsafe { handles::free::<QpHandle, _>(qp) };
        answer
    })
}

fn modified(
    handle: &QpHandle,
    before: &ibv_qp_attr,
    given: &ibv_qp_attr,
    mask: u32,
) -> Result<ibv_qp_attr, i32> {
    let from = handle.core.state() as ibv_qp_state;
    if mask & IBV_QP_CUR_STATE != 0 && given.cur_qp_state != from {
        return Err(libc::EINVAL);
    }
    let to = if mask & IBV_QP_STATE != 0 {
        given.qp_state
    } else {
        from
    };
    transition::permitted(from, to, mask)?;
    let device = handle.device.core();
    transition::in_range(
        given,
        mask,
        Bounds {
            gids: gid_table::ENTRIES,
            mtu_bytes: device.mtu_bytes,
        },
    )?;
    let after = transition::merged(before, given, mask);
    let access_changes = after.qp_access_flags != before.qp_access_flags;
    match (from, to) {
        (_, IBV_QPS_RESET) => {
            handle.core.change(Change::Reset)?;
            return Ok(reset_attributes(before.cap));
        }
        (_, IBV_QPS_ERR) => handle.core.change(Change::Error)?,
        (_, IBV_QPS_INIT) => handle.core.change(initial(&after))?,
        (_, IBV_QPS_RTR) => {
            if access_changes {
                handle.core.change(initial(&after))?;
            }
            handle.core.change(ready_to_receive(&after)?)?;
            let traffic_class = after.ah_attr.grh.traffic_class;
            let service_level = after.ah_attr.sl;
            handle.core.memory().priority.store(
                u32::from_le_bytes([traffic_class, service_level, 0, 0]),
                Ordering::Relaxed,
            );
        }
        // From ready-to-receive on, this library cannot change the access flags or the RNR timer.
        _ if access_changes || after.min_rnr_timer != before.min_rnr_timer => {
            return Err(libc::EOPNOTSUPP);
        }
        (IBV_QPS_RTR, IBV_QPS_RTS) => handle.core.change(Change::ReadyToSend {
            timeout: after.timeout,
            retry_count: after.retry_cnt,
            rnr_retry: after.rnr_retry,
            send_psn: after.sq_psn,
        })?,
        _ => {}
    }
    Ok(after)
}

fn initial(attributes: &ibv_qp_attr) -> Change {
    Change::Init {
        access: attributes.qp_access_flags,
        port: attributes.port_num,
    }
}

fn ready_to_receive(attributes: &ibv_qp_attr) -> Result<Change, i32> {
    Ok(Change::ReadyToReceive(PathToPeer {
        mtu_bytes: transition::mtu_bytes(attributes.path_mtu).ok_or(libc::EINVAL)?,
        remote_qp: attributes.dest_qp_num,
        receive_psn: attributes.rq_psn,
        // SAFETY: both members of the union are the same sixteen bytes.
        remote_gid: unsafe { attributes.ah_attr.grh.dgid.raw },
        own_gid_index: attributes.ah_attr.grh.sgid_index,
        min_rnr_timer: attributes.min_rnr_timer,
    }))
}

fn reset_attributes(cap: ibv_qp_cap) -> ibv_qp_attr {
    // SAFETY: integers and unions of integers, for which zero is a value.
    let mut attributes: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attributes.cap = cap;
    attributes
}

const _: () = {
    assert!(State::Reset as u32 == IBV_QPS_RESET && State::Init as u32 == IBV_QPS_INIT);
    assert!(
        State::ReadyToReceive as u32 == IBV_QPS_RTR && State::ReadyToSend as u32 == IBV_QPS_RTS
    );
    assert!(State::Error as u32 == IBV_QPS_ERR);
};
