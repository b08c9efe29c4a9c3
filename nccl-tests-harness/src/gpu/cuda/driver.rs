//! The functions of CUDA's driver, and the contexts of GPUs.
//!
//! Functions are looked up by name, because an older driver may lack one. Results are read as plain
//! numbers, because a newer driver may return a code that cudarc's enumeration does not have. The
//! plugin's `rails/cuda.rs` does the same.

use crate::ranks::log;
use anyhow::{Context as _, Result, bail};
use cudarc::driver::sys::{self, CUdevice_attribute};
use serde::{Deserialize, Serialize};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::rc::Rc;

/// An address in a GPU's memory (`CUdeviceptr`).
pub(super) type Address = u64;
pub(super) type Object = *mut c_void;

/// Declares the driver's functions that are used, with their types in cuda.h. `CUresult` and
/// `CUdevice_attribute` are C enumerations, so they are `c_int` here.
macro_rules! functions {
    ($($field:ident $symbol:literal ($($argument:ty),*);)*) => {
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Functions {
            fn load() -> Result<Self, String> {
                if !Driver::is_there() {
                    return Err("libcuda not found".to_owned());
                }
                // SAFETY: as in `is_there`. The library was just found, so `culib` does not panic.
                // The library stays loaded.
                let library = unsafe { sys::culib() };
                let missing = |error| format!("libcuda: {error}");
                // SAFETY: the types are those that cuda.h gives these symbols.
                unsafe {
                    Ok(Self { $($field: *library.get(concat!($symbol, "\0").as_bytes()).map_err(missing)?,)* })
                }
            }
        }
    };
}

functions! {
    init "cuInit" (c_uint);
    error_name "cuGetErrorName" (c_int, *mut *const c_char);
    device_count "cuDeviceGetCount" (*mut c_int);
    device_get "cuDeviceGet" (*mut c_int, c_int);
    device_name "cuDeviceGetName" (*mut c_char, c_int, c_int);
    device_attribute "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
    context_retain "cuDevicePrimaryCtxRetain" (*mut Object, c_int);
    context_release "cuDevicePrimaryCtxRelease_v2" (c_int);
    context_set "cuCtxSetCurrent" (Object);
    synchronize "cuCtxSynchronize" ();
    module_load "cuModuleLoadData" (*mut Object, *const c_void);
    module_function "cuModuleGetFunction" (*mut Object, Object, *const c_char);
    module_unload "cuModuleUnload" (Object);
    launch "cuLaunchKernel" (
        Object, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Object, *mut *mut c_void, *mut *mut c_void
    );
    stream_create "cuStreamCreate" (*mut Object, c_uint);
    stream_query "cuStreamQuery" (Object);
    stream_synchronize "cuStreamSynchronize" (Object);
    stream_destroy "cuStreamDestroy_v2" (Object);
    memory_info "cuMemGetInfo_v2" (*mut usize, *mut usize);
    alloc "cuMemAlloc_v2" (*mut Address, usize);
    alloc_managed "cuMemAllocManaged" (*mut Address, usize, c_uint);
    free "cuMemFree_v2" (Address);
    host_alloc "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
    host_free "cuMemFreeHost" (*mut c_void);
    host_register "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    host_unregister "cuMemHostUnregister" (*mut c_void);
    host_device_address "cuMemHostGetDevicePointer_v2" (*mut Address, *mut c_void, c_uint);
    copy_in "cuMemcpyHtoD_v2" (Address, *const c_void, usize);
    copy_out "cuMemcpyDtoH_v2" (*mut c_void, Address, usize);
}

/// CUDA's driver, initialised, with at least one GPU.
pub struct Driver {
    functions: Functions,
    gpus: c_int,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuInfo {
    /// Number of the GPU in CUDA's order, from 0 on.
    pub number: u32,
    pub name: String,
    /// True if the GPU shares its memory with the CPU (`CU_DEVICE_ATTRIBUTE_INTEGRATED`).
    pub integrated: bool,
    /// True if the GPU can access memory of `malloc`
    /// (`CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS`).
    pub pageable_memory_access: bool,
    /// True if the GPU has managed memory (`CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY`).
    pub managed_memory: bool,
    /// True if the CPU may use managed memory while the GPU works
    /// (`CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS`).
    pub concurrent_managed_access: bool,
}

/// Makes the array of a kernel's arguments: the addresses of the given variables.
macro_rules! arguments {
    ($($variable:ident),*) => { [$((&raw mut $variable).cast::<std::ffi::c_void>()),*] };
}
pub(super) use arguments;

pub(super) struct Context {
    driver: Rc<Driver>,
    device: c_int,
    raw: Object,
}

impl Driver {
    /// Returns true if this machine has libcuda. Without libcuda, cudarc panics.
    pub(crate) fn is_there() -> bool {
        // SAFETY: loads and unloads libcuda. Its initialisers are made to run in any process.
        unsafe { sys::is_culib_present() }
    }

    /// Loads libcuda and finds its GPUs.
    ///
    /// # Errors
    /// The reason why there is no GPU, in one line.
    pub fn load() -> Result<Rc<Self>, String> {
        let mut driver = Self {
            functions: Functions::load()?,
            gpus: 0,
        };
        // SAFETY: `cuInit` may be called repeatedly, at any time and from any thread. Its flags
        // must be 0.
        let code = unsafe { (driver.functions.init)(0) };
        driver
            .check("cuInit", code)
            .map_err(|error| error.to_string())?;
        // SAFETY: the pointer is to a live int, which the call writes.
        let code = unsafe { (driver.functions.device_count)(&mut driver.gpus) };
        driver
            .check("cuDeviceGetCount", code)
            .map_err(|error| error.to_string())?;
        if driver.gpus < 1 {
            return Err("CUDA found no GPU".to_owned());
        }
        Ok(Rc::new(driver))
    }

    fn check(&self, call: &str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let mut name = ptr::null();
        // SAFETY: the call writes the address of a constant string, or NULL for an unknown code.
        let known = unsafe { (self.functions.error_name)(code, &mut name) };
        if known != 0 || name.is_null() {
            bail!("{call} returned CUresult {code}");
        }
        // SAFETY: not NULL, so this is a constant string of the driver, which ends with NUL.
        let name = unsafe { CStr::from_ptr(name) };
        bail!("{call} returned {}", name.to_string_lossy())
    }

    pub(super) fn device(&self, number: u32) -> Result<c_int> {
        let ordinal = c_int::try_from(number)
            .ok()
            .filter(|ordinal| *ordinal < self.gpus);
        let ordinal = ordinal.with_context(|| {
            format!(
                "GPU {number} not found: CUDA has {}, numbered from 0",
                self.gpus
            )
        })?;
        let mut device = 0;
        // SAFETY: the pointer is to a live int, which the call writes.
        let code = unsafe { (self.functions.device_get)(&mut device, ordinal) };
        self.check("cuDeviceGet", code)?;
        Ok(device)
    }

    pub(super) fn about(&self, number: u32, device: c_int) -> Result<GpuInfo> {
        const ROOM: usize = 256;
        let mut name = [0_u8; ROOM];
        // SAFETY: the call writes at most `ROOM` bytes, the last of which is NUL.
        let code = unsafe {
            (self.functions.device_name)(name.as_mut_ptr().cast(), ROOM as c_int, device)
        };
        self.check("cuDeviceGetName", code)?;
        let name = CStr::from_bytes_until_nul(&name)
            .context("cuDeviceGetName returned a name without an end")?;
        let ask = |attribute: CUdevice_attribute| {
            let mut value = 0;
            // SAFETY: the call writes a live int; `device` is from cuDeviceGet.
            let code = unsafe {
                (self.functions.device_attribute)(&mut value, attribute as c_int, device)
            };
            self.check("cuDeviceGetAttribute", code)
                .with_context(|| format!("{attribute:?}"))?;
            anyhow::Ok(value != 0)
        };
        Ok(GpuInfo {
            number,
            name: name.to_string_lossy().into_owned(),
            integrated: ask(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)?,
            pageable_memory_access: ask(
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
            )?,
            managed_memory: ask(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY)?,
            concurrent_managed_access: ask(
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
            )?,
        })
    }
}

impl Context {
    pub(super) fn retain(driver: &Rc<Driver>, device: c_int) -> Result<Rc<Self>> {
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is valid for writes during the call; `device` is from cuDeviceGet.
        let code = unsafe { (driver.functions.context_retain)(&mut raw, device) };
        driver.check("cuDevicePrimaryCtxRetain", code)?;
        Ok(Rc::new(Self {
            driver: Rc::clone(driver),
            device,
            raw,
        }))
    }

    /// Makes this context current on this thread, and returns the driver's functions.
    pub(super) fn functions(&self) -> Result<&Functions> {
        // SAFETY: the context is retained until `self` is dropped.
        let code = unsafe { (self.driver.functions.context_set)(self.raw) };
        self.driver.check("cuCtxSetCurrent", code)?;
        Ok(&self.driver.functions)
    }

    pub(super) fn check(&self, call: &str, code: c_int) -> Result<()> {
        self.driver.check(call, code)
    }

    /// Makes this context current, and lets `work` call the driver's function `name`. The name is
    /// only for errors.
    pub(super) fn call(&self, name: &str, work: impl FnOnce(&Functions) -> c_int) -> Result<()> {
        self.functions()
            .and_then(|functions| self.check(name, work(functions)))
    }

    /// Calls a function that frees an object. For use in `drop`, where an error can only be logged.
    pub(super) fn give_back(&self, name: &str, work: impl FnOnce(&Functions) -> c_int) {
        if let Err(error) = self.call(name, work) {
            log::record(2, &format!("{error:#}"));
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: `retain` retained the context once. Every object made in the context held `self`
        // and has been dropped.
        let code = unsafe { (self.driver.functions.context_release)(self.device) };
        if let Err(error) = self.check("cuDevicePrimaryCtxRelease", code) {
            log::record(2, &format!("{error:#}"));
        }
    }
}
