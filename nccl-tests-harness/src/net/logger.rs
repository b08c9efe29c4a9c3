//! NCCL's logger for the plugin, and C strings.

use crate::ranks::log;
use nccl_abi::DebugLogger;
use std::ffi::{CStr, c_char, c_int, c_ulong};

type FixedLogger =
    extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, *const c_char);

pub(super) fn logger() -> DebugLogger {
    // SAFETY: NCCL's logger is variadic after `fmt`, and Rust cannot define such a function.
    // Plugins for NCCL call the logger with "%s" and one string. A caller may pass nothing or other
    // types, but then `fmt` is not "%s" and `on_log` does not read `arg`. On both supported
    // machines, a pointer is in the same register as first variadic argument and as sixth fixed
    // argument: in r9 with System V x86-64 (a function that is not variadic ignores the count of
    // vector registers in al), and in x5 with AAPCS64 on Linux.
    unsafe { std::mem::transmute::<FixedLogger, DebugLogger>(on_log) }
}

extern "C" fn on_log(
    level: c_int,
    _flags: c_ulong,
    _file: *const c_char,
    _line: c_int,
    fmt: *const c_char,
    arg: *const c_char,
) {
    let format = text(fmt);
    match format.as_str() {
        "%s" => log::record(level, &text(arg)),
        other => log::record(level, other),
    }
}

/// Copies a C string. Returns an empty string for NULL.
pub(super) fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: not NULL. By the plugin interface, it ends with NUL and lives during the call.
    unsafe { CStr::from_ptr(string) }
        .to_string_lossy()
        .into_owned()
}
