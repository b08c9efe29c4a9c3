//! The C surface of a soft-RoCE device, where it differs from mlx5's in `c_surface`.
#![allow(unsafe_code)]

#[allow(dead_code)]
#[path = "../c_surface/library.rs"]
mod library;

use library::*;
use softverbs::nic::Nic;
use std::ffi::c_int;
use std::ptr::null_mut;
use verbs_sys::*;

const NIC: Nic = Nic::SoftRoce;

#[test]
fn queue_sizes_are_rounded_up_as_soft_roce_does() {
    let context = open_device(0);
    let (a, b) = connected(context, null_mut());
    let (mut now, mut init): (ibv_qp_attr, ibv_qp_init_attr) = (zeroed(), zeroed());
    assert_eq!(
        call!(ibv_query_qp(
            a.qp,
            &raw mut now,
            IBV_QP_CAP as c_int,
            &raw mut init
        )),
        0
    );
    let cap = init.cap;
    assert_eq!(
        (cap.max_send_wr, cap.max_recv_wr, cap.max_inline_data),
        (31, 31, 64),
        "16, 16 and 64 were asked"
    );
    assert_eq!(
        (cap.max_send_sge, cap.max_recv_sge),
        (4, 2),
        "2 and 2 were asked, and 64 bytes have room for 4"
    );
    assert_eq!(
        (a.post_pieces(4, 0, &b), a.post_pieces(5, 0, &b)),
        (0, libc::EINVAL)
    );
    let inline = |bytes| {
        a.post(
            IBV_WR_RDMA_WRITE,
            IBV_SEND_INLINE,
            a.piece(0, bytes),
            &b,
            0,
            1,
        )
    };
    assert_eq!(
        (inline(64), inline(65), inline(300)),
        (0, libc::EINVAL, libc::EINVAL)
    );
    a.end();
    b.end();
    assert_eq!(call!(ibv_close_device(context)), 0);
}

#[test]
fn a_port_announces_smaller_messages_and_a_context_has_no_thread_domains() {
    let context = open_device(0);
    let mut port: ibv_port_attr = zeroed();
    assert_eq!(call!(ibv_query_port(context, 1, (&raw mut port).cast())), 0);
    assert_eq!(port.max_msg_sz, 8 << 20);
    // SAFETY: the context is open, and the end of a `verbs_context`, which `c_surface` checks.
    let extended = unsafe {
        &*context
            .byte_sub(std::mem::offset_of!(verbs_context, context))
            .cast::<verbs_context>()
    };
    assert!(extended.query_port.is_some());
    assert!(
        extended.alloc_td.is_none()
            && extended.dealloc_td.is_none()
            && extended.alloc_parent_domain.is_none()
    );
    assert_eq!(call!(ibv_close_device(context)), 0);
}
