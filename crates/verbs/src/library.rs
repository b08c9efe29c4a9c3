//! Loads libibverbs and its functions at run time, and lists the devices.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::Arc;

use host::error::{Call, Error, Missing, Result};
use verbs_sys::*;

/// The functions of libibverbs, looked up once. Never unloaded, because the library's providers
/// keep threads and mappings.
pub struct Library {
    pub(super) path: String,
    pub(super) get_device_list: Pointer<fn_ibv_get_device_list>,
    pub(super) free_device_list: Pointer<fn_ibv_free_device_list>,
    pub(super) get_device_name: Pointer<fn_ibv_get_device_name>,
    pub(super) get_device_guid: Pointer<fn_ibv_get_device_guid>,
    pub(super) open_device: Pointer<fn_ibv_open_device>,
    pub(super) close_device: Pointer<fn_ibv_close_device>,
    pub(super) query_device: Pointer<fn_ibv_query_device>,
    pub(super) query_port: Pointer<fn_ibv_query_port>,
    /// `None` before rdma-core 32.
    pub(super) query_gid_ex: fn__ibv_query_gid_ex,
    /// `None` before rdma-core 32.
    pub(super) query_gid_table: fn__ibv_query_gid_table,
    pub(super) get_async_event: Pointer<fn_ibv_get_async_event>,
    pub(super) ack_async_event: Pointer<fn_ibv_ack_async_event>,
    pub(super) alloc_pd: Pointer<fn_ibv_alloc_pd>,
    pub(super) dealloc_pd: Pointer<fn_ibv_dealloc_pd>,
    pub(super) reg_mr: Pointer<fn_ibv_reg_mr>,
    /// `None` before rdma-core 28. Needed for flags that a device may ignore, such as relaxed
    /// ordering.
    pub(super) reg_mr_iova2: fn_ibv_reg_mr_iova2,
    pub(super) dereg_mr: Pointer<fn_ibv_dereg_mr>,
    pub(super) create_cq: Pointer<fn_ibv_create_cq>,
    pub(super) destroy_cq: Pointer<fn_ibv_destroy_cq>,
    pub(super) create_qp: Pointer<fn_ibv_create_qp>,
    pub(super) modify_qp: Pointer<fn_ibv_modify_qp>,
    pub(super) destroy_qp: Pointer<fn_ibv_destroy_qp>,
}

/// A C function pointer that is not null; the bindings declare it as an `Option`.
pub(super) type Pointer<F> = <F as Nullable>::Pointer;

/// A C function pointer that may be null.
pub(super) trait Nullable {
    type Pointer;
}

impl<F> Nullable for Option<F> {
    type Pointer = F;
}

impl Library {
    /// Loads libibverbs and its functions. `path` is a file, or a name that the dynamic linker
    /// searches for.
    ///
    /// # Errors
    /// [`Error::Missing`] if the library or a function is missing; the text says how to install it.
    pub fn load(path: &str) -> Result<&'static Self> {
        let handle = open(path)?;
        /// Evaluates to the function, or returns an error that names it.
        macro_rules! required {
            ($function_type:ty, $name:literal) => {
                optional!($function_type, $name, c"IBVERBS_1.1").ok_or_else(|| {
                    Missing::Function {
                        path: path.to_owned(),
                        function: $name,
                    }
                })?
            };
        }
        macro_rules! optional {
            ($function_type:ty, $name:literal, $version:literal) => {{
                let symbol = look_up(handle, $name, $version);
                // SAFETY: both types are one pointer wide, and null is `None`. The type was
                // generated from the library's header for this function name and version.
                unsafe { std::mem::transmute::<*mut c_void, $function_type>(symbol) }
            }};
        }
        Ok(Box::leak(Box::new(Self {
            path: path.to_owned(),
            get_device_list: required!(fn_ibv_get_device_list, "ibv_get_device_list"),
            free_device_list: required!(fn_ibv_free_device_list, "ibv_free_device_list"),
            get_device_name: required!(fn_ibv_get_device_name, "ibv_get_device_name"),
            get_device_guid: required!(fn_ibv_get_device_guid, "ibv_get_device_guid"),
            open_device: required!(fn_ibv_open_device, "ibv_open_device"),
            close_device: required!(fn_ibv_close_device, "ibv_close_device"),
            query_device: required!(fn_ibv_query_device, "ibv_query_device"),
            query_port: required!(fn_ibv_query_port, "ibv_query_port"),
            query_gid_ex: optional!(fn__ibv_query_gid_ex, "_ibv_query_gid_ex", c"IBVERBS_1.11"),
            query_gid_table: optional!(
                fn__ibv_query_gid_table,
                "_ibv_query_gid_table",
                c"IBVERBS_1.11"
            ),
            get_async_event: required!(fn_ibv_get_async_event, "ibv_get_async_event"),
            ack_async_event: required!(fn_ibv_ack_async_event, "ibv_ack_async_event"),
            alloc_pd: required!(fn_ibv_alloc_pd, "ibv_alloc_pd"),
            dealloc_pd: required!(fn_ibv_dealloc_pd, "ibv_dealloc_pd"),
            reg_mr: required!(fn_ibv_reg_mr, "ibv_reg_mr"),
            reg_mr_iova2: optional!(fn_ibv_reg_mr_iova2, "ibv_reg_mr_iova2", c"IBVERBS_1.8"),
            dereg_mr: required!(fn_ibv_dereg_mr, "ibv_dereg_mr"),
            create_cq: required!(fn_ibv_create_cq, "ibv_create_cq"),
            destroy_cq: required!(fn_ibv_destroy_cq, "ibv_destroy_cq"),
            create_qp: required!(fn_ibv_create_qp, "ibv_create_qp"),
            modify_qp: required!(fn_ibv_modify_qp, "ibv_modify_qp"),
            destroy_qp: required!(fn_ibv_destroy_qp, "ibv_destroy_qp"),
        })))
    }

    /// Lists the RDMA devices of this host. Empty also if the kernel has no RDMA support.
    ///
    /// # Errors
    /// [`Error::Os`] if the library cannot list them for another reason.
    pub fn devices(&'static self) -> Result<Vec<Device>> {
        let mut count: c_int = 0;
        // SAFETY: `count` is a local, valid during the call.
        let first = unsafe { (self.get_device_list)(&raw mut count) };
        if first.is_null() {
            let error = std::io::Error::last_os_error();
            return match error.raw_os_error() {
                // The library's error if the kernel's verbs module is not loaded.
                Some(libc::ENOSYS) => Ok(Vec::new()),
                _ => Err(Error::os(
                    Call::ListDevices {
                        library: self.path.clone(),
                    },
                    &error,
                )),
            };
        }
        let list = Arc::new(DeviceList {
            library: self,
            first,
        });
        // SAFETY: the list has `count` entries, and lives in `list`.
        let entries =
            unsafe { std::slice::from_raw_parts(first, usize::try_from(count).unwrap_or(0)) };
        Ok(entries.iter().map(|&raw| self.device(&list, raw)).collect())
    }

    fn device(&'static self, list: &Arc<DeviceList>, raw: *mut ibv_device) -> Device {
        // SAFETY: `list` keeps the entry `raw` alive, and the entry has the name's string.
        let name = unsafe { text((self.get_device_name)(raw)) };
        // SAFETY: as above.
        let guid = u64::from_be(unsafe { (self.get_device_guid)(raw) });
        Device {
            list: Arc::clone(list),
            raw,
            name,
            guid,
        }
    }
}

/// An RDMA device of this host, not yet opened.
pub struct Device {
    list: Arc<DeviceList>,
    pub(super) raw: *mut ibv_device,
    name: String,
    guid: u64,
}

// SAFETY: a list's devices never change, and the library may be called from every thread.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// Returns the kernel's name of the device, such as `rocep1s0f0`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the device's node GUID.
    pub fn guid(&self) -> u64 {
        self.guid
    }

    pub(super) fn library(&self) -> &'static Library {
        self.list.library
    }
}

/// The library's array of devices. The devices are valid while the array exists.
struct DeviceList {
    library: &'static Library,
    first: *mut *mut ibv_device,
}

// SAFETY: the array is only read, and freed once.
unsafe impl Send for DeviceList {}
// SAFETY: as above.
unsafe impl Sync for DeviceList {}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: `first` came from `get_device_list`, and every user of it holds this list.
        unsafe { (self.library.free_device_list)(self.first) };
    }
}

fn open(path: &str) -> Result<*mut c_void> {
    let name = CString::new(path).map_err(|_| Missing::LibraryName(path.to_owned()))?;
    // SAFETY: `name` is a C string. Loading runs the library's initialisers, as the caller intends.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        // SAFETY: after a failed dlopen, the message is valid until the thread's next dl call.
        let why = unsafe { text(libc::dlerror()) };
        return Err(Missing::Library {
            path: path.to_owned(),
            why,
        }
        .into());
    }
    Ok(handle)
}

/// Looks up `name` with the bindings' symbol version, or without a version if that fails.
fn look_up(handle: *mut c_void, name: &str, version: &CStr) -> *mut c_void {
    let Ok(name) = CString::new(name) else {
        return std::ptr::null_mut();
    };
    // SAFETY: the handle is open, and both are C strings.
    let versioned = unsafe { libc::dlvsym(handle, name.as_ptr(), version.as_ptr()) };
    if !versioned.is_null() {
        return versioned;
    }
    // SAFETY: as above.
    unsafe { libc::dlsym(handle, name.as_ptr()) }
}

/// # Safety
/// `pointer` is null or a C string.
unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: not null, so a C string.
    unsafe { CStr::from_ptr(pointer) }
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named_with_the_cure() {
        let text = Library::load("libno-such-verbs.so.7")
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default();
        assert!(text.contains("libno-such-verbs.so.7"), "{text}");
        assert!(text.contains("apt install libibverbs1"), "{text}");
        assert!(text.contains("--device /dev/infiniband"), "{text}");
    }

    #[test]
    fn a_foreign_library_is_refused_by_the_function_that_it_lacks() {
        let text = Library::load("libc.so.6")
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default();
        assert!(
            text.contains("libc.so.6 has no function ibv_get_device_list"),
            "{text}"
        );
    }

    #[test]
    fn a_name_with_a_nul_is_refused() {
        assert!(matches!(Library::load("a\0b"), Err(Error::Missing(_))));
    }
}
