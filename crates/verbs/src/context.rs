//! Opened devices and their protection domains.

use std::mem::{offset_of, size_of};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::library::{Device, Library, Pointer};
use host::error::{Call, Error, Missing, Result};
use verbs_sys::*;

/// An opened device, closed when the last object on it is dropped.
pub struct Context {
    pub(super) library: &'static Library,
    pub(super) raw: NonNull<ibv_context>,
    name: String,
    limits: DeviceLimits,
    ports: u8,
    /// Copied when the context is opened; the library never changes them later.
    pub(super) operations: Operations,
    /// Two flags for log lines. Index 0: it was logged that a QP has no thread domain. Index 1: it
    /// was logged that a QP has one.
    pub(super) told_of_doorbells: [AtomicBool; 2],
}

/// Limits of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Largest number of work requests on one work queue of a QP.
    pub max_qp_wr: u32,
    /// Largest number of entries of one CQ.
    pub max_cqe: u32,
    /// Largest number of QPs.
    pub max_qp: u32,
}

/// The provider's data-path functions, which verbs.h calls through the context.
#[derive(Clone, Copy)]
pub(super) struct Operations {
    pub(super) poll_cq: unsafe extern "C" fn(*mut ibv_cq, i32, *mut ibv_wc) -> i32,
    pub(super) post_send:
        unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> i32,
    pub(super) post_recv:
        unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> i32,
}

// SAFETY: libibverbs' objects may be used from every thread, and so may an opened context and all
// objects made from it. Operations that need one thread at a time (post, poll) take `&mut`.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Device {
    /// Opens the device and queries its limits.
    ///
    /// # Errors
    /// [`Error::Os`] if it cannot be opened or queried, [`Error::Missing`] if its provider lacks a
    /// function.
    pub fn open(&self) -> Result<Arc<Context>> {
        // SAFETY: the device belongs to the list that `self` keeps alive.
        unsafe { Context::open(self.library(), self.raw, self.name()) }
    }
}

fn cannot_open(name: &str, error: &std::io::Error) -> Error {
    let device = name.to_owned();
    let call = match error.raw_os_error() {
        // The kernel's error if the control group's device rules exclude the device.
        Some(libc::EPERM) => Call::OpenExcluded { device },
        _ => Call::Open { device },
    };
    Error::os(call, error)
}

impl Context {
    /// # Safety
    /// `device` is a device of `library` whose list is alive.
    pub(super) unsafe fn open(
        library: &'static Library,
        device: *mut ibv_device,
        name: &str,
    ) -> Result<Arc<Self>> {
        // SAFETY: guaranteed by the caller.
        let Some(raw) = NonNull::new(unsafe { (library.open_device)(device) }) else {
            return Err(cannot_open(name, &std::io::Error::last_os_error()));
        };
        let close = CloseOnError {
            close: library.close_device,
            raw,
        };
        // SAFETY: a struct of integers; all zero is a valid value.
        let mut attributes: ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open, and the struct is a local.
        let status = unsafe { (library.query_device)(raw.as_ptr(), &raw mut attributes) };
        if status != 0 {
            return Err(Error::Os {
                call: Call::Query {
                    device: name.to_owned(),
                },
                errno: status,
            });
        }
        let context = Self {
            library,
            raw,
            name: name.to_owned(),
            limits: DeviceLimits {
                max_qp_wr: count(attributes.max_qp_wr),
                max_cqe: count(attributes.max_cqe),
                max_qp: count(attributes.max_qp),
            },
            ports: attributes.phys_port_cnt,
            // SAFETY: the context is open.
            operations: unsafe { operations(raw, name) }?,
            told_of_doorbells: Default::default(),
        };
        std::mem::forget(close);
        context.make_events_nonblocking()?;
        Ok(Arc::new(context))
    }

    /// Returns the library that opened the device.
    pub fn library(&self) -> &'static Library {
        self.library
    }

    /// Returns the kernel's name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the device's limits.
    pub fn limits(&self) -> &DeviceLimits {
        &self.limits
    }

    /// Returns the number of ports; they are numbered from 1.
    pub fn ports(&self) -> u8 {
        self.ports
    }

    /// Returns the extended context around this one, if it exists and has the member at `offset`
    /// (`verbs_get_ctx_op` in verbs.h). The struct grows at its front, and its field `sz` is its
    /// size in the library.
    pub(super) fn extended(&self, offset: usize) -> Option<NonNull<verbs_context>> {
        const EXTENDED: usize = usize::MAX;
        // SAFETY: the context is open.
        if unsafe { (*self.raw.as_ptr()).abi_compat } as usize != EXTENDED {
            return None;
        }
        // SAFETY: the marker means that the context is the last member of a `verbs_context`.
        let extended = unsafe { self.raw.byte_sub(offset_of!(verbs_context, context)) }
            .cast::<verbs_context>();
        // SAFETY: every version has `sz` right before the context; old ones lack earlier members.
        let bytes = unsafe { (&raw const (*extended.as_ptr()).sz).read() };
        (bytes >= size_of::<verbs_context>() - offset).then_some(extended)
    }
}

/// Evaluates to function `$member` of the extended context; `None` if it is missing or null.
macro_rules! extended_operation {
    ($context:expr, $member:ident) => {
        $context.extended(std::mem::offset_of!(verbs_context, $member)).and_then(|extended| {
            // SAFETY: the library's struct includes this member and lives as long as the context.
            unsafe { (&raw const (*extended.as_ptr()).$member).read() }
        })
    };
}
pub(super) use extended_operation;

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: opened by this type; all objects on it held an `Arc` of this and were dropped.
        let status = unsafe { (self.library.close_device)(self.raw.as_ptr()) };
        note_failure("ibv_close_device", &self.name, status);
    }
}

/// A protection domain. Only memory and QPs of the same domain can be used together.
pub struct Pd {
    pub(super) raw: NonNull<ibv_pd>,
    context: Arc<Context>,
}

// SAFETY: see `Context`.
unsafe impl Send for Pd {}
// SAFETY: see `Context`.
unsafe impl Sync for Pd {}

impl Pd {
    /// Allocates a domain on `context`.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>> {
        // SAFETY: the context is open.
        let raw = NonNull::new(unsafe { (context.library.alloc_pd)(context.raw.as_ptr()) })
            .ok_or_else(|| {
                Error::last_os(Call::AllocatePd {
                    device: context.name.clone(),
                })
            })?;
        Ok(Arc::new(Self {
            raw,
            context: Arc::clone(context),
        }))
    }

    /// Returns the domain's device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: allocated by this type; its MRs and QPs held an `Arc` of this and were dropped.
        let status = unsafe { (self.context.library.dealloc_pd)(self.raw.as_ptr()) };
        note_failure("ibv_dealloc_pd", self.context.name(), status);
    }
}

/// Logs the failure of a destructor, which cannot return an error. The object leaks kernel memory
/// until the process ends.
pub(super) fn note_failure(call: &str, device: &str, status: i32) {
    if status != 0 {
        tracing::debug!("{call} on {device} failed with errno {status}");
    }
}

struct CloseOnError {
    close: Pointer<fn_ibv_close_device>,
    raw: NonNull<ibv_context>,
}

impl Drop for CloseOnError {
    fn drop(&mut self) {
        // SAFETY: opened just before, with no objects on it.
        unsafe { (self.close)(self.raw.as_ptr()) };
    }
}

/// # Safety
/// `context` is open.
unsafe fn operations(context: NonNull<ibv_context>, name: &str) -> Result<Operations> {
    // SAFETY: guaranteed by the caller.
    let found = unsafe {
        let table = &raw const (*context.as_ptr()).ops;
        ((*table).poll_cq, (*table).post_send, (*table).post_recv)
    };
    match found {
        (Some(poll_cq), Some(post_send), Some(post_recv)) => Ok(Operations {
            poll_cq,
            post_send,
            post_recv,
        }),
        _ => Err(Missing::Operations(name.to_owned()).into()),
    }
}

/// Converts a count of the library, which is signed but never negative.
fn count(value: i32) -> u32 {
    u32::try_from(value).unwrap_or(0)
}
