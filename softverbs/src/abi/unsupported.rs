//! Functions that the device does not support: shared receive queues, address handles and multicast
//! (there are no datagrams), import of other processes' objects, enhanced connection establishment.
//! Each fails with `EOPNOTSUPP`, as the verbs specification requires. Only the `ibv_unimport_*`
//! functions cannot report an error; they do nothing.

use super::guard;
use std::ffi::c_int;
use verbs_sys::*;

macro_rules! no_object {
    ($($name:ident($($argument:ident: $type:ty),*) -> $object:ty;)*) => {$(
        #[doc = concat!("`", stringify!($name), "`: not supported.")]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> *mut $object {
            guard::pointer(|| Err(libc::EOPNOTSUPP))
        }
    )*};
}

macro_rules! no_effect {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {$(
        #[doc = concat!("`", stringify!($name), "`: not supported.")]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
            libc::EOPNOTSUPP
        }
    )*};
}

/// Functions that would release an imported object. No such object can exist.
macro_rules! no_return {
    ($($name:ident($argument:ident: $type:ty);)*) => {$(
        #[doc = concat!("`", stringify!($name), "`: does nothing: no such object can exist.")]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($argument: $type) {}
    )*};
}

no_object! {
    ibv_import_device(_descriptor: c_int) -> ibv_context;
    ibv_import_pd(_context: *mut ibv_context, _handle: u32) -> ibv_pd;
    ibv_import_mr(_pd: *mut ibv_pd, _handle: u32) -> ibv_mr;
    ibv_import_dm(_context: *mut ibv_context, _handle: u32) -> ibv_dm;
    ibv_create_srq(_pd: *mut ibv_pd, _attributes: *mut ibv_srq_init_attr) -> ibv_srq;
    ibv_qp_to_qp_ex(_qp: *mut ibv_qp) -> ibv_qp_ex;
    ibv_create_ah(_pd: *mut ibv_pd, _attributes: *mut ibv_ah_attr) -> ibv_ah;
    ibv_create_ah_from_wc(_pd: *mut ibv_pd, _wc: *mut ibv_wc, _grh: *mut ibv_grh, _port: u8) -> ibv_ah;
}

no_effect! {
    ibv_modify_srq(_srq: *mut ibv_srq, _attributes: *mut ibv_srq_attr, _mask: c_int);
    ibv_query_srq(_srq: *mut ibv_srq, _attributes: *mut ibv_srq_attr);
    ibv_destroy_srq(_srq: *mut ibv_srq);
    ibv_query_ece(_qp: *mut ibv_qp, _ece: *mut ibv_ece);
    ibv_set_ece(_qp: *mut ibv_qp, _ece: *mut ibv_ece);
    ibv_destroy_ah(_ah: *mut ibv_ah);
    ibv_init_ah_from_wc(
        _context: *mut ibv_context, _port: u8, _wc: *mut ibv_wc, _grh: *mut ibv_grh, _attributes: *mut ibv_ah_attr
    );
    ibv_attach_mcast(_qp: *mut ibv_qp, _gid: *const ibv_gid, _lid: u16);
    ibv_detach_mcast(_qp: *mut ibv_qp, _gid: *const ibv_gid, _lid: u16);
    ibv_resolve_eth_l2_from_gid(
        _context: *mut ibv_context, _attributes: *mut ibv_ah_attr, _mac: *mut u8, _vlan: *mut u16
    );
}

no_return! {
    ibv_unimport_pd(_pd: *mut ibv_pd);
    ibv_unimport_mr(_mr: *mut ibv_mr);
    ibv_unimport_dm(_dm: *mut ibv_dm);
}
