//! The interface as whoever loads a plugin has to see it.
//!
//! The shape is that of [`nccl_net_spark::abi::NetV11`], and a test compares the two. But results are integers here: what
//! a library returns is not known to be one of the values that our own one returns, and no other value may become a Rust
//! enum.

use nccl_net_spark::abi::types::{CommConfig, DebugLogger, NetDeviceHandle, PropertiesV11};
use std::ffi::{c_char, c_int, c_void};

/// `ncclResult_t`.
pub type Code = c_int;
type Pointer = *mut c_void;

/// `ncclNet_v11_t`, with the field names of NCCL's header.
#[repr(C)]
#[allow(non_snake_case)]
pub struct Net {
    pub name: *const c_char,
    pub init: Option<unsafe extern "C" fn(*mut Pointer, u64, *const CommConfig, Option<DebugLogger>, Pointer) -> Code>,
    pub devices: Option<unsafe extern "C" fn(*mut c_int) -> Code>,
    pub getProperties: Option<unsafe extern "C" fn(c_int, *mut PropertiesV11) -> Code>,
    pub listen: Option<unsafe extern "C" fn(Pointer, c_int, Pointer, *mut Pointer) -> Code>,
    pub connect: Option<unsafe extern "C" fn(Pointer, c_int, Pointer, *mut Pointer, *mut *mut NetDeviceHandle) -> Code>,
    pub accept: Option<unsafe extern "C" fn(Pointer, *mut Pointer, *mut *mut NetDeviceHandle) -> Code>,
    pub regMr: Option<unsafe extern "C" fn(Pointer, Pointer, usize, c_int, *mut Pointer) -> Code>,
    pub regMrDmaBuf: Option<unsafe extern "C" fn(Pointer, Pointer, usize, c_int, u64, c_int, *mut Pointer) -> Code>,
    pub deregMr: Option<unsafe extern "C" fn(Pointer, Pointer) -> Code>,
    pub isend: Option<unsafe extern "C" fn(Pointer, Pointer, usize, c_int, Pointer, Pointer, *mut Pointer) -> Code>,
    pub irecv: Option<
        unsafe extern "C" fn(
            Pointer,
            c_int,
            *mut Pointer,
            *mut usize,
            *mut c_int,
            *mut Pointer,
            *mut Pointer,
            *mut Pointer,
        ) -> Code,
    >,
    pub iflush:
        Option<unsafe extern "C" fn(Pointer, c_int, *mut Pointer, *mut c_int, *mut Pointer, *mut Pointer) -> Code>,
    pub test: Option<unsafe extern "C" fn(Pointer, *mut c_int, *mut c_int) -> Code>,
    pub closeSend: Option<unsafe extern "C" fn(Pointer) -> Code>,
    pub closeRecv: Option<unsafe extern "C" fn(Pointer) -> Code>,
    pub closeListen: Option<unsafe extern "C" fn(Pointer) -> Code>,
    pub getDeviceMr: Option<unsafe extern "C" fn(Pointer, Pointer, *mut Pointer) -> Code>,
    pub irecvConsumed: Option<unsafe extern "C" fn(Pointer, c_int, Pointer) -> Code>,
    pub makeVDevice: Option<unsafe extern "C" fn(*mut c_int, Pointer) -> Code>,
    pub finalize: Option<unsafe extern "C" fn(Pointer) -> Code>,
    pub setNetAttr: Option<unsafe extern "C" fn(Pointer, Pointer) -> Code>,
}

#[cfg(test)]
mod tests {
    use super::Net;
    use nccl_net_spark::abi::NetV11;
    use std::mem::{offset_of, size_of};

    macro_rules! same_place {
        ($($ours:ident $plugins:ident)*) => {
            $(assert_eq!(offset_of!(Net, $ours), offset_of!(NetV11, $plugins), stringify!($ours));)*
        };
    }

    #[test]
    fn the_table_has_the_plugins_shape() {
        same_place! {
            name name
            init init
            devices devices
            getProperties get_properties
            listen listen
            connect connect
            accept accept
            regMr reg_mr
            regMrDmaBuf reg_mr_dma_buf
            deregMr dereg_mr
            isend isend
            irecv irecv
            iflush iflush
            test test
            closeSend close_send
            closeRecv close_recv
            closeListen close_listen
            getDeviceMr get_device_mr
            irecvConsumed irecv_consumed
            makeVDevice make_v_device
            finalize finalize
            setNetAttr set_net_attr
        }
        assert_eq!(size_of::<Net>(), size_of::<NetV11>());
    }
}
