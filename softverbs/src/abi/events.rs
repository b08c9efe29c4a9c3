//! Asynchronous events.

use super::guard;
use super::handles::{self, DeviceHandle, EventCounter};
use crate::fabric::{Event, EventObject, lock};
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use verbs_sys::*;

/// Takes an event of the context's device, and waits until there is one, unless the context's
/// `async_fd` is non-blocking. All contexts of a device share its events: each event goes to one
/// caller only.
///
/// # Safety
/// `context` must be open, and `event` must be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_async_event(
    context: *mut ibv_context,
    event: *mut ibv_async_event,
) -> c_int {
    guard::zero_or_minus_one(|| {
        // SAFETY: the caller's promise.
        let device = unsafe { handles::any_context(context) }?.device;
        loop {
            if !device.node.take_event_announcement(device.index) {
                return Err(guard::errno());
            }
            if let Some(found) = device
                .node
                .next_event(device.index)
                .and_then(|found| described(device, found))
            {
                // SAFETY: writable, by the caller's promise.
                unsafe { event.write(found) };
                return Ok(());
            }
        }
    })
}

/// # Safety
/// `event` must come from [`ibv_get_async_event`], and must be acknowledged only once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: the caller's promise.
    let Some(event) = (unsafe { event.as_ref() }) else {
        return;
    };
    let events = if is_about_qp(event.event_type) {
        // SAFETY: these kinds have a queue pair, which lives until the event is acknowledged.
        unsafe { handles::qp(event.element.qp) }.map(|qp| &qp.events)
    } else if event.event_type == IBV_EVENT_CQ_ERR {
        // SAFETY: this kind has a completion queue, which lives until the event is acknowledged.
        unsafe { handles::cq(event.element.cq) }.map(|cq| &cq.events)
    } else {
        return;
    };
    if let Ok(events) = events {
        events.acknowledge(1);
    }
}

/// Converts an event to its form in `verbs.h`. Returns `None` if the event's queue pair or
/// completion queue was destroyed.
fn described(device: &DeviceHandle, event: Event) -> Option<ibv_async_event> {
    const PORT: c_int = 1;
    let element = match event.about {
        EventObject::QueuePair(number) => ibv_async_event__bindgen_ty_1 {
            qp: std::ptr::with_exposed_provenance_mut(count_event(&device.qps, number)?),
        },
        EventObject::CompletionQueue(number) => ibv_async_event__bindgen_ty_1 {
            cq: std::ptr::with_exposed_provenance_mut(count_event(&device.cqs, number)?),
        },
        EventObject::Device | EventObject::Port => ibv_async_event__bindgen_ty_1 { port_num: PORT },
    };
    Some(ibv_async_event {
        element,
        event_type: event.kind,
    })
}

/// Counts an event about a live object, and returns the object's address. Destroying the object
/// removes it from the table under this lock, and then waits until the counted events are
/// acknowledged.
fn count_event(table: &Mutex<HashMap<u32, Arc<EventCounter>>>, number: u32) -> Option<usize> {
    let table = lock(table);
    let events = table.get(&number)?;
    events.count_event();
    Some(events.address.load(Ordering::Acquire))
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
