//! NCCL's C interfaces for plugins, as Rust declares them.
//!
//! - [`net`]: the network interface, all versions.
//! - [`tuner`]: the tuner interface, all versions.
//!
//! The plugin exports tables of these types. The command line, `tests/cost` and the tests call
//! libraries through such tables. Sizes, offsets and function types are those of NCCL's headers on
//! x86-64 and aarch64, checked by `tests/abi_layout.rs`. Fields have the names of NCCL's headers,
//! in snake case. The number at the end of a type's name is the first interface version that has
//! the type.

#![forbid(unsafe_code)]

pub mod net;
pub mod tuner;

use std::ffi::{c_char, c_int, c_ulong};
use std::fmt;

/// `ncclResult_t`. Not a Rust enum: another plugin may return any number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct NcclResult(pub c_int);

impl NcclResult {
    /// Success.
    pub const SUCCESS: Self = Self(0);
    /// A system call or an external library failed.
    pub const SYSTEM_ERROR: Self = Self(2);
    /// A defect in the plugin.
    pub const INTERNAL_ERROR: Self = Self(3);
    /// An argument's value is not allowed.
    pub const INVALID_ARGUMENT: Self = Self(4);
    /// The call is not allowed now, or the job is configured wrongly.
    pub const INVALID_USAGE: Self = Self(5);
    /// The peer or the network failed.
    pub const REMOTE_ERROR: Self = Self(6);
}

impl fmt::Display for NcclResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.0 {
            0 => "ncclSuccess",
            1 => "ncclUnhandledCudaError",
            2 => "ncclSystemError",
            3 => "ncclInternalError",
            4 => "ncclInvalidArgument",
            5 => "ncclInvalidUsage",
            6 => "ncclRemoteError",
            7 => "ncclInProgress",
            _ => "unknown",
        };
        write!(f, "{name} ({})", self.0)
    }
}

/// `ncclDebugLogger_t`: level, subsystem flags, file, line, printf format and its arguments.
pub type DebugLogger = unsafe extern "C" fn(
    c_int,
    c_ulong,
    file: *const c_char,
    line: c_int,
    format: *const c_char,
    ...
);
