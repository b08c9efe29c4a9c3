//! The list of devices, and opening them.

use super::handles::{self, ContextHandle, DeviceHandle, Users};
use super::{attributes, completions, guard, memory, posting};
use crate::fabric::{Device, Node};
use crate::hotplug::Phase;
use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int};
use std::mem::{offset_of, size_of};
use std::sync::{Arc, Mutex, OnceLock};
use verbs_sys::*;

/// Lists this machine's devices, except those whose removal has begun ([`Phase`]). The first call
/// joins the fabric.
///
/// # Safety
/// `count` must be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    guard::pointer(|| {
        let there = devices()?.iter().filter(|device| {
            let phase = device.node.presence(device.index).phase;
            // A device with failed firmware is still registered with the kernel, so it is listed.
            matches!(phase, Phase::Here | Phase::Failed)
        });
        let list: Box<[*mut ibv_device]> = there
            .map(handles::pointer)
            .chain([std::ptr::null_mut()])
            .collect();
        // SAFETY: null or writable, by the caller's promise.
        if let Some(count) = unsafe { count.as_mut() } {
            *count = c_int::try_from(list.len() - 1).unwrap_or(c_int::MAX);
        }
        Ok(Box::into_raw(list).cast())
    })
}

/// # Safety
/// `list` must be null or come from [`ibv_get_device_list`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    if list.is_null() {
        return;
    }
    let mut entries = 1;
    // SAFETY: the list ends with a null pointer.
    while !unsafe { *list.add(entries - 1) }.is_null() {
        entries += 1;
    }
    // SAFETY: made as a boxed slice with this many entries.
    drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, entries)) });
}

/// # Safety
/// `device` must come from the list.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { handles::device(device) }.map_or(std::ptr::null(), |device| device.c.name.as_ptr())
}

/// # Safety
/// `device` must come from the list.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_guid(device: *mut ibv_device) -> __be64 {
    // SAFETY: the caller's promise.
    unsafe { handles::device(device) }.map_or(0, |device| device.core().guid.to_be())
}

/// # Safety
/// `device` must come from the list.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_index(device: *mut ibv_device) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { handles::device(device) }
        .map_or(-1, |device| c_int::try_from(device.index).unwrap_or(-1))
}

/// # Safety
/// `device` must come from the list.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    guard::pointer(|| {
        // SAFETY: the caller's promise.
        let handle = unsafe { handles::device(device) }?;
        // The kernel gives the same error for a device that a container's device rules leave out
        // (`devcgroup_check_permission`).
        if handle.node.forbids(handle.index) {
            return Err(libc::EPERM);
        }
        handle.await_firmware();
        let presence = handle.node.presence(handle.index);
        let generation = presence.generation;
        presence.check_generation(generation)?;
        // SAFETY: pointers and integers, for which zero is a value.
        let mut c: verbs_context = unsafe { std::mem::zeroed() };
        c.query_port = Some(attributes::query_port);
        c.alloc_td = Some(memory::alloc_td);
        c.dealloc_td = Some(memory::dealloc_td);
        c.alloc_parent_domain = Some(memory::alloc_parent_domain);
        c.sz = size_of::<verbs_context>();
        c.context.device = device;
        c.context.ops._compat_query_device = Some(attributes::ibv_query_device);
        c.context.ops._compat_query_port = Some(attributes::ibv_query_port);
        c.context.ops.poll_cq = Some(completions::poll_cq);
        c.context.ops.req_notify_cq = Some(completions::req_notify_cq);
        c.context.ops.post_send = Some(posting::post_send);
        c.context.ops.post_recv = Some(posting::post_recv);
        c.context.cmd_fd = -1;
        c.context.async_fd = handle.node.event_fd(handle.index);
        c.context.num_comp_vectors = 1;
        // Marks a context that is part of a `verbs_context` (`__VERBS_ABI_IS_EXTENDED`).
        c.context.abi_compat = std::ptr::without_provenance_mut(usize::MAX);
        let object = ContextHandle {
            c: UnsafeCell::new(c),
            device: handle,
            generation,
            users: Users::default(),
        };
        let object: *mut u8 = handles::into_raw(object);
        // SAFETY: the context is inside the object just made.
        Ok(unsafe { object.byte_add(offset_of!(verbs_context, context)) }.cast())
    })
}

/// # Safety
/// `context` must come from [`ibv_open_device`], and must not be used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    guard::zero_or_minus_one(|| {
        // SAFETY: the caller's promise.
        let handle = unsafe { handles::any_context(context) }?;
        if handle.users.check_unused().is_err() {
            // Objects of this context still point to it, so it is not freed. (A kernel would
            // destroy those objects.)
            return Ok(());
        }
        // SAFETY: `ibv_open_device` made this pointer, at this offset in an object that has no
        // users left.
        unsafe {
            handles::free::<ContextHandle, _>(context.byte_sub(offset_of!(verbs_context, context)))
        };
        Ok(())
    })
}

impl DeviceHandle {
    pub(super) fn core(&self) -> &Device {
        &self.node.devices()[self.index]
    }

    pub(super) fn await_firmware(&self) {
        self.node.rail(self.index).await_firmware();
    }

    fn new(node: &Arc<Node>, index: usize) -> Self {
        let device = &node.devices()[index];
        // SAFETY: integers and pointers to functions, for which zero is a value.
        let mut c: ibv_device = unsafe { std::mem::zeroed() };
        c.node_type = IBV_NODE_CA;
        c.transport_type = IBV_TRANSPORT_IB;
        copy_text(&mut c.name, &device.name);
        copy_text(&mut c.dev_name, &format!("uverbs{index}"));
        copy_text(
            &mut c.dev_path,
            &format!("/sys/class/infiniband_verbs/uverbs{index}"),
        );
        copy_text(
            &mut c.ibdev_path,
            &format!("/sys/class/infiniband/{}", device.name),
        );
        Self {
            c,
            provider: [0; 16],
            node: Arc::clone(node),
            index,
            qps: Mutex::default(),
            cqs: Mutex::default(),
        }
    }
}

/// Returns the devices; the first call makes them. An error is also printed to stderr, because
/// `errno` has no room for the reason.
fn devices() -> Result<&'static [DeviceHandle], i32> {
    static DEVICES: OnceLock<Result<Vec<DeviceHandle>, i32>> = OnceLock::new();
    let devices = DEVICES.get_or_init(|| match Node::join() {
        Ok(node) => Ok((0..node.devices().len())
            .map(|index| DeviceHandle::new(&node, index))
            .collect()),
        Err(reason) => {
            eprintln!("softverbs: {reason}");
            Err(libc::ENODEV)
        }
    });
    devices.as_deref().map_err(|errno| *errno)
}

/// Copies text into a zeroed array, whose last byte stays zero.
fn copy_text(to: &mut [c_char], text: &str) {
    let room = to.len() - 1;
    for (place, byte) in to[..room].iter_mut().zip(text.bytes()) {
        *place = byte as c_char;
    }
}
