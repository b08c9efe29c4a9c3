//! Asynchronous events.

use super::guard;
use super::handles::{self, DeviceHandle};
use crate::fabric::{Event, lock};
use std::ffi::c_int;
use std::sync::atomic::Ordering;
use verbs_sys::*;

/// `ibv_get_async_event`: waits, unless the context's `async_fd` was made non-blocking. The events of a device go to whoever
/// asks first, where it is open more than once.
///
/// # Safety
/// `context` is open, and `event` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    guard::zero_or_minus_one(|| {
        // SAFETY: the caller's promise.
        let device = unsafe { handles::any_context(context) }?.device;
        loop {
            if !device.node.take_event_announcement(device.index) {
                return Err(guard::errno());
            }
            if let Some(found) = device.node.next_event(device.index).and_then(|found| described(device, found)) {
                // SAFETY: writable, by the caller's promise.
                unsafe { event.write(found) };
                return Ok(());
            }
        }
    })
}

/// `ibv_ack_async_event`.
///
/// # Safety
/// `event` came from [`ibv_get_async_event`], and is acknowledged once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: the caller's promise.
    let Some(event) = (unsafe { event.as_ref() }) else { return };
    if !is_about_qp(event.event_type) {
        return;
    }
    // SAFETY: for these kinds the union has a queue pair, which is not destroyed before it is acknowledged.
    if let Ok(qp) = unsafe { handles::qp(event.element.qp) } {
        qp.subject.acknowledge(1);
    }
}

/// None for an event about a queue pair that is gone.
fn described(device: &DeviceHandle, event: Event) -> Option<ibv_async_event> {
    let element = if is_about_qp(event.kind) {
        // Destroying a queue pair takes it out of the table under this lock, and then waits for what was counted here.
        let qps = lock(&device.qps);
        let subject = qps.get(&event.qp?)?;
        subject.got();
        let address = subject.address.load(Ordering::Acquire);
        ibv_async_event__bindgen_ty_1 { qp: std::ptr::with_exposed_provenance_mut(address) }
    } else {
        ibv_async_event__bindgen_ty_1 { port_num: c_int::from(event.port) }
    };
    Some(ibv_async_event { element, event_type: event.kind })
}

fn is_about_qp(kind: ibv_event_type) -> bool {
    matches!(
        kind,
        IBV_EVENT_QP_FATAL
            | IBV_EVENT_QP_REQ_ERR
            | IBV_EVENT_QP_ACCESS_ERR
            | IBV_EVENT_COMM_EST
            | IBV_EVENT_SQ_DRAINED
            | IBV_EVENT_PATH_MIG
            | IBV_EVENT_PATH_MIG_ERR
            | IBV_EVENT_QP_LAST_WQE_REACHED
    )
}
