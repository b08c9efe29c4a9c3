//! Safe owners of NCCL's communicators, over the part of its C interface (nccl.h) that makes, uses
//! and ends them.
//!
//! libnccl is loaded by its soname. Results are plain numbers, because a newer NCCL may return
//! results that this program does not know. cudarc's NCCL module is not used: it does not look for
//! `libnccl.so.2`, and cannot split or destroy communicators.

use anyhow::{Context as _, Result, bail, ensure};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};
use std::rc::Rc;

/// `NCCL_UNIQUE_ID_BYTES`.
pub const ID_BYTES: usize = 128;
/// `ncclFloat32` of nccl.h.
const FLOAT32: c_int = 7;
/// `ncclSum` of nccl.h.
const SUM: c_int = 0;
/// `ncclInProgress`: no error yet, from a non-blocking communicator.
const IN_PROGRESS: c_int = 7;

type Code = c_int;
type Raw = *mut c_void;

/// `ncclUniqueId`, by which ranks find each other.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Id {
    internal: [u8; ID_BYTES],
}

pub struct Nccl {
    get_unique_id: unsafe extern "C" fn(*mut Id) -> Code,
    init_rank: unsafe extern "C" fn(*mut Raw, c_int, Id, c_int) -> Code,
    split: unsafe extern "C" fn(Raw, c_int, c_int, *mut Raw, *mut c_void) -> Code,
    all_reduce: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        Raw,
        *mut c_void,
    ) -> Code,
    async_error: unsafe extern "C" fn(Raw, *mut c_int) -> Code,
    abort: unsafe extern "C" fn(Raw) -> Code,
    destroy: unsafe extern "C" fn(Raw) -> Code,
    error_string: unsafe extern "C" fn(Code) -> *const c_char,
    last_error: unsafe extern "C" fn(Raw) -> *const c_char,
    /// Never unloaded, because NCCL's threads may outlive the last communicator.
    _library: ManuallyDrop<Library>,
}

/// A communicator, aborted when dropped.
pub struct Communicator {
    nccl: Rc<Nccl>,
    /// NCCL's communicator. It is alive as long as this owner, which `destroy` and `abort` consume.
    raw: NonNull<c_void>,
}

impl Id {
    pub fn from_bytes(internal: [u8; ID_BYTES]) -> Self {
        Self { internal }
    }

    pub fn bytes(&self) -> &[u8; ID_BYTES] {
        &self.internal
    }
}

impl Nccl {
    /// Loads `libnccl.so.2`. Fails if it is missing or cannot split communicators (before 2.18).
    pub fn load() -> Result<Rc<Self>> {
        // SAFETY: runs the initialisers of NCCL, which are made to be run in any process.
        let library = unsafe { Library::open(Some("libnccl.so.2"), RTLD_NOW | RTLD_LOCAL) }
            .context("load libnccl.so.2")?;
        // SAFETY: the types are those of nccl.h for these names; enums are passed as int,
        // ncclComm_t and cudaStream_t are pointers.
        let nccl = unsafe {
            Self {
                get_unique_id: *library.get(b"ncclGetUniqueId\0")?,
                init_rank: *library.get(b"ncclCommInitRank\0")?,
                split: *library.get(b"ncclCommSplit\0")?,
                all_reduce: *library.get(b"ncclAllReduce\0")?,
                async_error: *library.get(b"ncclCommGetAsyncError\0")?,
                abort: *library.get(b"ncclCommAbort\0")?,
                destroy: *library.get(b"ncclCommDestroy\0")?,
                error_string: *library.get(b"ncclGetErrorString\0")?,
                last_error: *library.get(b"ncclGetLastError\0")?,
                _library: ManuallyDrop::new(library),
            }
        };
        Ok(Rc::new(nccl))
    }

    pub fn unique_id(&self) -> Result<Id> {
        let mut id = Id {
            internal: [0; ID_BYTES],
        };
        // SAFETY: `id` is valid for writes for the length of the call.
        let code = unsafe { (self.get_unique_id)(&mut id) };
        self.check("ncclGetUniqueId", code)?;
        Ok(id)
    }

    /// Joins a new communicator of `ranks` ranks as rank number `rank`, on CUDA's current device.
    /// Returns only after all ranks have called `join`.
    pub fn join(self: &Rc<Self>, id: &Id, rank: usize, ranks: usize) -> Result<Communicator> {
        let mut raw = ptr::null_mut();
        let rank = c_int::try_from(rank)?;
        let ranks = c_int::try_from(ranks)?;
        // SAFETY: `raw` is valid for writes for the length of the call; the id is passed by value.
        let code = unsafe { (self.init_rank)(&mut raw, ranks, *id, rank) };
        self.check("ncclCommInitRank", code)?;
        let raw = NonNull::new(raw).context("ncclCommInitRank gave no communicator")?;
        Ok(Communicator {
            nccl: Rc::clone(self),
            raw,
        })
    }

    fn check(&self, call: &str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: `ncclGetErrorString` returns a constant string for any number.
        let what = text(unsafe { (self.error_string)(code) });
        // SAFETY: the communicator may be NULL: the string is the process's last error (nccl.h).
        let detail = text(unsafe { (self.last_error)(ptr::null_mut()) });
        bail!("{call}: {what} ({code}): {}", detail.trim())
    }
}

impl Communicator {
    /// Makes a communicator of the ranks with the same `colour`, in order of their `key`. Returns
    /// `None` without a colour. Returns only after all ranks have called `split`.
    pub fn split(&self, colour: Option<u16>, key: usize) -> Result<Option<Self>> {
        // NCCL_SPLIT_NOCOLOR is -1.
        let number = colour.map_or(-1, c_int::from);
        let key = c_int::try_from(key)?;
        let mut raw = ptr::null_mut();
        // SAFETY: the communicator is alive; `raw` is valid for writes for the length of the call;
        // a NULL configuration means the parent's.
        let code =
            unsafe { (self.nccl.split)(self.raw.as_ptr(), number, key, &mut raw, ptr::null_mut()) };
        self.nccl.check("ncclCommSplit", code)?;
        Ok(NonNull::new(raw).map(|raw| Self {
            nccl: Rc::clone(&self.nccl),
            raw,
        }))
    }

    /// Starts to sum up `from` of all ranks into `into`, in the order of `stream`. Fails with
    /// NCCL's error, or if the buffers' lengths differ.
    pub fn all_reduce(
        &self,
        from: &CudaSlice<f32>,
        into: &mut CudaSlice<f32>,
        stream: &CudaStream,
    ) -> Result<()> {
        let count = from.len();
        ensure!(count == into.len(), "{count} elements into {}", into.len());
        let (from, _read) = from.device_ptr(stream);
        let (into, _written) = into.device_ptr_mut(stream);
        // SAFETY: both buffers are device memory of `count` floats. NCCL's kernel runs in the order
        // of `stream`. The two guards are dropped after the kernel was queued, and then record in
        // `stream` that the buffers are in use up to that point. cudarc frees or reuses neither
        // buffer before `stream` gets there. No group is open (this type has no way to open one),
        // so the kernel is queued when the call returns.
        let code = unsafe {
            let stream = stream.cu_stream().cast();
            (self.nccl.all_reduce)(
                from as *const c_void,
                into as *mut c_void,
                count,
                FLOAT32,
                SUM,
                self.raw.as_ptr(),
                stream,
            )
        };
        self.nccl.check("ncclAllReduce", code)
    }

    /// Returns the communicator's asynchronous error, if any.
    pub fn health(&self) -> Result<()> {
        let mut code = 0;
        // SAFETY: the communicator is alive, `code` is valid for writes for the length of the call.
        let asked = unsafe { (self.nccl.async_error)(self.raw.as_ptr(), &mut code) };
        self.nccl.check("ncclCommGetAsyncError", asked)?;
        if code == IN_PROGRESS {
            Ok(())
        } else {
            self.nccl.check("the communicator", code)
        }
    }

    /// Ends the communicator after all started operations. All ranks must call it.
    pub fn destroy(self) -> Result<()> {
        // SAFETY: alive until here, and not used after this: `end` took the owner.
        self.end("ncclCommDestroy", |nccl, raw| unsafe {
            (nccl.destroy)(raw)
        })
    }

    /// Ends the communicator during started operations.
    pub fn abort(self) -> Result<()> {
        // SAFETY: as in `destroy`.
        self.end("ncclCommAbort", |nccl, raw| unsafe { (nccl.abort)(raw) })
    }

    /// Ends the communicator by `work` instead of by `drop`. `call` is the name of NCCL's function
    /// in an error.
    fn end(self, call: &str, work: impl FnOnce(&Nccl, Raw) -> Code) -> Result<()> {
        let this = ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped, so the field is taken once.
        let nccl = unsafe { ptr::read(&this.nccl) };
        nccl.check(call, work(&nccl, this.raw.as_ptr()))
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // SAFETY: alive until here: `destroy` and `abort` take the owner without dropping it. The
        // result is ignored; callers that need it call `abort`.
        unsafe { (self.nccl.abort)(self.raw.as_ptr()) };
    }
}

fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: NCCL's strings end with NUL. The two strings that are passed here (an error's
    // description and the last error) live at least until the next error of this thread.
    unsafe { CStr::from_ptr(string) }
        .to_string_lossy()
        .into_owned()
}
