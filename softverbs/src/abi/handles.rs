//! The objects behind C's pointers, and every conversion between the two.
//!
//! An object begins with the struct that `verbs.h` shows, so a pointer to the struct is also a
//! pointer to the object. A context is the exception: its object begins with a `verbs_context`,
//! whose last member is the `ibv_context` that programs see.

use crate::completion_queue::CompletionQueue;
use crate::fabric::{Node, lock};
use crate::queue_pair::QueuePair;
use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::mem::offset_of;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use verbs_sys::*;

/// A device. Lives as long as the process.
#[repr(C)]
pub(super) struct DeviceHandle {
    pub(super) c: ibv_device,
    /// Room for the fields of a real `verbs_device` behind `ibv_device`: provider libraries look
    /// there to identify a device's provider.
    pub(super) provider: [usize; 16],
    pub(super) node: Arc<Node>,
    pub(super) index: usize,
    /// For each queue pair of this device, by its number: the events about it.
    pub(super) qps: Mutex<HashMap<u32, Arc<EventCounter>>>,
    /// For each completion queue of this device, by its number: the events about it.
    pub(super) cqs: Mutex<HashMap<u32, Arc<EventCounter>>>,
}

#[repr(C)]
pub(super) struct ContextHandle {
    pub(super) c: UnsafeCell<verbs_context>,
    pub(super) device: &'static DeviceHandle,
    pub(super) generation: u32,
    pub(super) users: Users,
}

/// A protection domain or a parent domain.
#[repr(C)]
pub(super) struct PdHandle {
    pub(super) c: ibv_pd,
    pub(super) device: &'static DeviceHandle,
    pub(super) users: Users,
    pub(super) holds: Vec<Hold>,
}

#[repr(C)]
pub(super) struct TdHandle {
    pub(super) c: ibv_td,
    pub(super) users: Users,
    pub(super) hold: Hold,
}

#[repr(C)]
pub(super) struct MrHandle {
    pub(super) c: ibv_mr,
    pub(super) device: &'static DeviceHandle,
    pub(super) hold: Hold,
}

#[repr(C)]
pub(super) struct ChannelHandle {
    pub(super) c: ibv_comp_channel,
    pub(super) queues: Mutex<HashMap<u64, Arc<EventCounter>>>,
    pub(super) users: Users,
    pub(super) hold: Hold,
}

#[repr(C)]
pub(super) struct CqHandle {
    pub(super) c: ibv_cq,
    pub(super) core: Arc<CompletionQueue>,
    pub(super) device: &'static DeviceHandle,
    pub(super) events: Arc<EventCounter>,
    pub(super) users: Users,
    pub(super) holds: Vec<Hold>,
}

#[repr(C)]
pub(super) struct QpHandle {
    pub(super) c: UnsafeCell<ibv_qp>,
    pub(super) core: Arc<QueuePair>,
    pub(super) device: &'static DeviceHandle,
    pub(super) events: Arc<EventCounter>,
    /// The attributes that creation and `ibv_modify_qp` have set.
    pub(super) attributes: Mutex<ibv_qp_attr>,
    pub(super) signal_all: bool,
    pub(super) holds: Vec<Hold>,
}

/// Number of other objects that use this object; each of them has a [`Hold`]. An object with users
/// cannot be destroyed.
#[derive(Default)]
pub(super) struct Users(Arc<AtomicUsize>);

impl Users {
    pub(super) fn hold(&self) -> Hold {
        self.0.fetch_add(1, Ordering::Relaxed);
        Hold(Arc::clone(&self.0))
    }

    pub(super) fn check_unused(&self) -> Result<(), i32> {
        if self.0.load(Ordering::Acquire) == 0 {
            Ok(())
        } else {
            Err(libc::EBUSY)
        }
    }
}

pub(super) struct Hold(Arc<AtomicUsize>);

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// A C object that has events: its address, and the number of its events that the program has got
/// and not yet acknowledged. Destroying the object waits until that number is 0.
pub(super) struct EventCounter {
    /// Address of the C object; 0 until the object is at its final address.
    pub(super) address: AtomicUsize,
    unacknowledged: Mutex<u64>,
    acknowledged: Condvar,
}

impl EventCounter {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            address: AtomicUsize::new(0),
            unacknowledged: Mutex::new(0),
            acknowledged: Condvar::new(),
        })
    }

    pub(super) fn count_event(&self) {
        *lock(&self.unacknowledged) += 1;
    }

    pub(super) fn acknowledge(&self, events: u64) {
        let mut count = lock(&self.unacknowledged);
        *count = count.saturating_sub(events);
        self.acknowledged.notify_all();
    }

    pub(super) fn wait_for_acknowledgements(&self) {
        let mut count = lock(&self.unacknowledged);
        while *count > 0 {
            count = self
                .acknowledged
                .wait(count)
                .unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }
}

/// Returns the object behind a pointer, for the duration of a call.
///
/// # Safety
/// `pointer` is null, or an `$object` of this library that lives until the call returns.
macro_rules! behind {
    ($name:ident, $c:ty, $object:ty) => {
        pub(super) unsafe fn $name<'a>(pointer: *mut $c) -> Result<&'a $object, i32> {
            // SAFETY: the caller's promise; the object begins with the C struct.
            unsafe { pointer.cast::<$object>().as_ref() }.ok_or(libc::EINVAL)
        }
    };
}
behind!(device, ibv_device, DeviceHandle);
behind!(pd, ibv_pd, PdHandle);
behind!(td, ibv_td, TdHandle);
behind!(mr, ibv_mr, MrHandle);
behind!(channel, ibv_comp_channel, ChannelHandle);
behind!(cq, ibv_cq, CqHandle);
behind!(qp, ibv_qp, QpHandle);

/// Returns the object behind a context, for a call that a kernel would pass to the device. Fails
/// with `EIO` if programs are cut off from the device, with `ENOLINK` if its firmware has failed.
///
/// # Safety
/// The same as for the functions above.
pub(super) unsafe fn context<'a>(pointer: *mut ibv_context) -> Result<&'a ContextHandle, i32> {
    // SAFETY: the caller's promise.
    let handle = unsafe { any_context(pointer) }?;
    handle.device.await_firmware();
    handle
        .device
        .node
        .presence(handle.device.index)
        .check_generation(handle.generation)
        .map(|()| handle)
}

/// Returns what a kernel would report for destroying an object of a context: `EIO` if programs are
/// cut off from the device, otherwise success.
///
/// # Safety
/// The same as for the functions above.
pub(super) unsafe fn destroyed(pointer: *mut ibv_context) -> Result<(), i32> {
    // SAFETY: the caller's promise.
    let handle = unsafe { any_context(pointer) }?;
    handle.device.await_firmware();
    handle
        .device
        .node
        .presence(handle.device.index)
        .end(handle.generation)
}

/// Returns the object behind a context, even if the device has failed or was removed.
///
/// # Safety
/// The same as for the functions above.
pub(super) unsafe fn any_context<'a>(pointer: *mut ibv_context) -> Result<&'a ContextHandle, i32> {
    if pointer.is_null() {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller's promise; `context` is the last member of the object's first struct.
    Ok(unsafe {
        &*pointer
            .byte_sub(offset_of!(verbs_context, context))
            .cast::<ContextHandle>()
    })
}

pub(super) fn into_raw<Object, C>(object: Object) -> *mut C {
    Box::into_raw(Box::new(object)).cast()
}

/// Returns C's pointer to an object that C or this library owns. The pointer is made from the whole
/// object, not from its first field: by Rust's rules, a pointer made from a field may be used for
/// that field only.
pub(super) fn pointer<Object, C>(object: &Object) -> *mut C {
    std::ptr::from_ref(object).cast_mut().cast()
}

/// Takes an object back from C, and drops it.
///
/// # Safety
/// `pointer` must come from [`into_raw`] of the same types, and must not be used again.
pub(super) unsafe fn free<Object, C>(pointer: *mut C) {
    // SAFETY: the caller's promise.
    drop(unsafe { Box::from_raw(pointer.cast::<Object>()) });
}
