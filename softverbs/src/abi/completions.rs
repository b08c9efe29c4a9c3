//! Completion queues and channels.

use super::attributes::MAX_CQE;
use super::guard;
use super::handles::{self, ChannelHandle, CqHandle, EventCounter, Users};
use super::rounding::completions_for;
use crate::completion_queue::{Completion, CompletionQueue};
use crate::fabric::lock;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use verbs_sys::*;

/// Creates a channel. Its descriptor is an epoll of its queues' descriptors, so it is readable
/// while any of its queues has an event.
///
/// # Safety
/// `context` must be open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_comp_channel(
    context: *mut ibv_context,
) -> *mut ibv_comp_channel {
    guard::pointer(|| {
        // SAFETY: the caller's promise.
        let handle = unsafe { handles::context(context) }?;
        // SAFETY: takes no memory.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(guard::errno());
        }
        let c = ibv_comp_channel {
            context,
            fd,
            refcnt: 0,
        };
        let hold = handle.users.hold();
        Ok(handles::into_raw(ChannelHandle {
            c,
            queues: Mutex::default(),
            users: Users::default(),
            hold,
        }))
    })
}

/// Fails with `EBUSY` while the channel has queues.
///
/// # Safety
/// `channel` must come from [`ibv_create_comp_channel`], and must not be used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    guard::status(|| {
        // SAFETY: the caller's promise.
        let handle = unsafe { handles::channel(channel) }?;
        handle.users.check_unused()?;
        // SAFETY: the channel's own descriptor; then the channel itself, made by `into_raw`.
        unsafe {
            libc::close(handle.c.fd);
            handles::free::<ChannelHandle, _>(channel);
        }
        Ok(())
    })
}

/// Creates a queue. Its `cqe` is the number of completions that fit in it, which may be more than
/// `entries`.
///
/// # Safety
/// `context` must be open, and `channel` null or alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    entries: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    guard::pointer(|| {
        // SAFETY: the caller's promise.
        let handle = unsafe { handles::context(context) }?;
        if !(1..=MAX_CQE).contains(&entries) || vector != 0 {
            return Err(libc::EINVAL);
        }
        let device = handle.device;
        let entries = completions_for(entries);
        let core = CompletionQueue::new(
            &device.node,
            device.index,
            usize::try_from(entries).unwrap_or(1),
        )?;
        let events = EventCounter::new();
        let mut holds = vec![handle.users.hold()];
        let number = u64::from(core.number());
        if !channel.is_null() {
            // SAFETY: alive, by the caller's promise.
            let channel = unsafe { handles::channel(channel) }?;
            watch(channel, &core, number)?;
            lock(&channel.queues).insert(number, Arc::clone(&events));
            holds.push(channel.users.hold());
        }
        // SAFETY: integers, pointers and pthread objects, for which zero is a value.
        let mut c: ibv_cq = unsafe { std::mem::zeroed() };
        (c.context, c.channel, c.cq_context, c.cqe) = (context, channel, cq_context, entries);
        c.handle = core.number();
        let number = core.number();
        let object = CqHandle {
            c,
            core,
            device,
            events: Arc::clone(&events),
            users: Users::default(),
            holds,
        };
        let given: *mut ibv_cq = handles::into_raw(object);
        events
            .address
            .store(given.expose_provenance(), Ordering::Release);
        lock(&device.cqs).insert(number, events);
        Ok(given)
    })
}

/// Fails with `EBUSY` while queue pairs use the queue. Waits until the program has acknowledged the
/// queue's events.
///
/// # Safety
/// `cq` must come from [`ibv_create_cq`], and must not be used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    guard::status(|| {
        // SAFETY: the caller's promise.
        let handle = unsafe { handles::cq(cq) }?;
        handle.users.check_unused()?;
        if !handle.c.channel.is_null() {
            // SAFETY: the channel is alive, because this queue has a hold on it.
            let channel = unsafe { handles::channel(handle.c.channel) }?;
            lock(&channel.queues).remove(&u64::from(handle.c.handle));
            let none = std::ptr::null_mut();
            // SAFETY: both descriptors are open.
            unsafe {
                libc::epoll_ctl(
                    channel.c.fd,
                    libc::EPOLL_CTL_DEL,
                    handle.core.notify_fd(),
                    none,
                )
            };
        }
        lock(&handle.device.cqs).remove(&handle.core.number());
        handle.events.wait_for_acknowledgements();
        // SAFETY: a context stays open while it has objects.
        let answer = unsafe { handles::destroyed(handle.c.context) };
        // SAFETY: made by `into_raw`, and no object uses it.
        unsafe { handles::free::<CqHandle, _>(cq) };
        answer
    })
}

/// Takes an event of one of the channel's queues, and waits until there is one. If the channel's
/// descriptor is non-blocking, does not wait, but fails with `EAGAIN`.
///
/// # Safety
/// `channel` must be alive, and both pointers must be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    guard::zero_or_minus_one(|| {
        // SAFETY: the caller's promise.
        let channel = unsafe { handles::channel(channel) }?;
        let found = loop {
            let number = wait_for_ready_queue(channel.c.fd)?;
            // `ibv_destroy_cq` removes the queue from the table under this lock, and then waits
            // until the events counted here are acknowledged. So the queue lives at least until
            // then.
            let queues = lock(&channel.queues);
            let Some(events) = queues.get(&number) else {
                continue;
            };
            let address = events.address.load(Ordering::Acquire);
            let found: *mut ibv_cq = std::ptr::with_exposed_provenance_mut(address);
            // SAFETY: the pointer is null during the queue's creation. Later, the queue is alive as
            // long as it is in the table, and the lock keeps it there.
            let Ok(handle) = (unsafe { handles::cq(found) }) else {
                continue;
            };
            if handle.core.take_notification() {
                events.count_event();
                break handle;
            }
        };
        // SAFETY: writable, by the caller's promise.
        unsafe {
            cq.write(handles::pointer(found));
            cq_context.write(found.c.cq_context);
        }
        Ok(())
    })
}

/// # Safety
/// `cq` must be alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, events: c_uint) {
    // SAFETY: the caller's promise.
    if let Ok(handle) = unsafe { handles::cq(cq) } {
        handle.events.acknowledge(u64::from(events));
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_resize_cq(_cq: *mut ibv_cq, _entries: c_int) -> c_int {
    libc::EOPNOTSUPP
}

/// `ibv_poll_cq` of `verbs.h` calls this. Returns the number of completions, or `-errno`.
///
/// # Safety
/// `cq` must be alive, and `into` must have room for `most` completions.
pub(super) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, most: c_int, into: *mut ibv_wc) -> c_int {
    const BATCH: usize = 16;
    let taken = guard::caught(|| {
        // SAFETY: the caller's promise.
        let core = &unsafe { handles::cq(cq) }?.core;
        let most = usize::try_from(most).map_err(|_| libc::EINVAL)?;
        let mut batch = [Completion::default(); BATCH];
        let mut taken = 0;
        while taken < most {
            let room = BATCH.min(most - taken);
            let found = core.poll(&mut batch[..room])?;
            for (index, completion) in batch[..found].iter().enumerate() {
                // SAFETY: below `most`, for which the caller promises room.
                unsafe { into.add(taken + index).write(work_completion(completion)) };
            }
            taken += found;
            if found < room {
                break;
            }
        }
        Ok(taken)
    });
    match taken {
        Ok(count) => c_int::try_from(count).unwrap_or(c_int::MAX),
        Err(errno) => -errno,
    }
}

/// # Safety
/// `cq` must be alive.
pub(super) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    guard::status(|| {
        // SAFETY: the caller's promise.
        unsafe { handles::cq(cq) }?.core.arm(solicited_only != 0);
        Ok(())
    })
}

fn work_completion(completion: &Completion) -> ibv_wc {
    ibv_wc {
        wr_id: completion.wr_id,
        status: completion.status,
        opcode: completion.opcode,
        vendor_err: completion.vendor_err,
        byte_len: completion.bytes,
        __bindgen_anon_1: ibv_wc__bindgen_ty_1 {
            imm_data: completion.imm,
        },
        qp_num: completion.qp_num,
        src_qp: completion.src_qp,
        wc_flags: completion.flags,
        pkey_index: 0,
        slid: 0,
        sl: 0,
        dlid_path_bits: 0,
    }
}

/// Adds the queue's descriptor to the channel's epoll. Makes the queue's descriptor non-blocking:
/// two threads that wait for the channel may both find it readable, and the slower one must not
/// block when it reads.
fn watch(channel: &ChannelHandle, core: &CompletionQueue, number: u64) -> Result<(), i32> {
    let fd = core.notify_fd();
    let mut event = libc::epoll_event {
        events: libc::EPOLLIN as u32,
        u64: number,
    };
    // SAFETY: both descriptors are open, and the struct lives for the call.
    let failed = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        flags < 0
            || libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) < 0
            || libc::epoll_ctl(channel.c.fd, libc::EPOLL_CTL_ADD, fd, &raw mut event) < 0
    };
    if failed { Err(guard::errno()) } else { Ok(()) }
}

/// Returns the number of a queue whose descriptor is readable.
fn wait_for_ready_queue(epoll: RawFd) -> Result<u64, i32> {
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    // SAFETY: the descriptor is open, and there is room for one event.
    let found = unsafe {
        let blocks = libc::fcntl(epoll, libc::F_GETFL) & libc::O_NONBLOCK == 0;
        libc::epoll_wait(epoll, &raw mut event, 1, if blocks { -1 } else { 0 })
    };
    match found {
        0 => Err(libc::EAGAIN),
        1.. => Ok(event.u64),
        _ => Err(guard::errno()),
    }
}
