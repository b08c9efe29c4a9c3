//! The version of the NCCL that called the plugin. The address of NCCL's logger function identifies
//! the library, and the library reports its version.

use nccl_abi::DebugLogger;
use std::ffi::{CStr, c_int, c_void};
use std::mem;

/// Returns the version of the NCCL to which `logger` belongs, as `NCCL_VERSION_CODE`: 22809 is
/// 2.28.9 (since 2.9). Returns `None` if the logger is not NCCL's (as in a test), or if NCCL is
/// linked into a program that does not export NCCL's symbols.
pub(super) fn code_of(logger: Option<DebugLogger>) -> Option<c_int> {
    let code = logger? as *const c_void;
    // SAFETY: all zero is a valid `Dl_info`, whose members are pointers.
    let mut info: libc::Dl_info = unsafe { mem::zeroed() };
    // SAFETY: `code` is only compared with addresses of loaded libraries, and `info` is a local.
    if unsafe { libc::dladdr(code, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: `dli_fname` is the loader's own path of a loaded library. With RTLD_NOLOAD, dlopen
    // loads nothing and runs no code of it. The handle is never closed. So NCCL is never unloaded,
    // which changes nothing, because NCCL outlives the plugin.
    let library = unsafe { libc::dlopen(info.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if library.is_null() {
        return None;
    }
    const NAME: &CStr = c"ncclGetVersion";
    // SAFETY: `library` is an open handle.
    let symbol = unsafe { libc::dlsym(library, NAME.as_ptr()) };
    if symbol.is_null() {
        return None;
    }
    // SAFETY: nccl.h has `ncclResult_t ncclGetVersion(int* version)`, and ncclResult_t is an int.
    let get_version: unsafe extern "C" fn(*mut c_int) -> c_int = unsafe { mem::transmute(symbol) };
    let mut number: c_int = 0;
    // SAFETY: the pointer is to a live int, which the call writes.
    let status = unsafe { get_version(&raw mut number) };
    (status == 0).then_some(number)
}

/// Formats a version, such as `2.28.9`.
pub(super) fn text(code: c_int) -> String {
    format!("{}.{}.{}", code / 10_000, code / 100 % 100, code % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_number_is_printed_as_text() {
        assert_eq!(
            (text(22809), text(23207)),
            ("2.28.9".to_owned(), "2.32.7".to_owned())
        );
        assert_eq!(code_of(None), None);
    }
}
