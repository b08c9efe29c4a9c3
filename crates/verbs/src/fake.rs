//! A fake library and provider, to test what soft-RoCE cannot show: older versions of libibverbs,
//! and thread domains as mlx5 has them.

#[path = "../../../tests/common/captured_log.rs"]
#[allow(dead_code, reason = "integration tests use the rest")]
mod captured_log;

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

use super::context::{Context, Pd};
use super::library::Library;
use super::{Cq, Path, Qp, QpCaps};
use host::config::QpConfig;
use host::error::Error;
use host::port::{GidEntry, GidKind, PortState};
use verbs_sys::*;

thread_local! {
    /// Calls that create or destroy objects, in order.
    static CALLS: RefCell<Vec<&'static str>> = const { RefCell::new(Vec::new()) };
    /// Flow label, hop limit and traffic class in the last call of `modify_qp`.
    static ROUTE_HEADER: Cell<(u32, u8, u8)> = const { Cell::new((0, 0, 0)) };
}

struct Offers {
    /// True if a `verbs_context` surrounds the context (`abi_compat`).
    extended: bool,
    /// Size that the library reports for its `verbs_context`, minus the size in our bindings.
    grown_by: isize,
    gid_table: bool,
    thread_domains: bool,
}

const ALL: Offers = Offers {
    extended: true,
    grown_by: 0,
    gid_table: true,
    thread_domains: true,
};

#[test]
fn a_thread_domain_is_freed_after_its_qp() {
    assert_eq!(
        calls_of_a_qp(ALL),
        [
            "alloc_pd",
            "create_cq",
            "alloc_td",
            "alloc_parent_domain",
            "create_qp in the parent domain",
            "destroy_qp",
            "dealloc the parent domain",
            "dealloc_td",
            "dealloc_pd",
            "destroy_cq",
            "close_device",
        ]
    );
}

#[test]
fn without_thread_domains_a_plain_protection_domain_is_used() {
    let plain = [
        "alloc_pd",
        "create_cq",
        "create_qp",
        "destroy_qp",
        "dealloc_pd",
        "destroy_cq",
        "close_device",
    ];
    assert_eq!(
        calls_of_a_qp(Offers {
            thread_domains: false,
            ..ALL
        }),
        plain
    );
    assert_eq!(
        calls_of_a_qp(Offers {
            extended: false,
            ..ALL
        }),
        plain
    );
    // The struct grows at its front. So a library whose struct is this much shorter lacks the
    // functions for thread domains.
    let up_to_its_functions = -(std::mem::offset_of!(verbs_context, alloc_td) as isize) - 8;
    assert_eq!(
        calls_of_a_qp(Offers {
            grown_by: up_to_its_functions,
            ..ALL
        }),
        plain
    );
}

#[test]
fn each_device_logs_once_if_its_queue_pairs_have_thread_domains() {
    for (thread_domains, words) in [
        (
            true,
            "fake0: queue pairs have thread domains: no locks, and with BlueFlame a write-combined doorbell each",
        ),
        (
            false,
            "fake0: queue pairs have no thread domains (its provider has none): they take locks and share doorbells",
        ),
    ] {
        let log = captured_log::CapturedLog::default();
        let _queue_pairs = log.capture(|| {
            let context = fake(Offers {
                thread_domains,
                ..ALL
            });
            let pd = Pd::new(&context).expect("a domain");
            let cq = Cq::new(&context, 16).expect("a CQ");
            let caps = QpCaps {
                send_requests: 4,
                receive_requests: 4,
                inline_bytes: 0,
            };
            [0, 1].map(|_| Qp::new(&pd, &cq, caps).expect("a QP"))
        });
        let said: Vec<String> = log.take().into_iter().map(|(_, text)| text).collect();
        assert!(said.len() == 1 && said[0].starts_with(words), "{said:?}");
    }
}

#[test]
fn a_port_is_queried_with_the_newest_available_function() {
    let newest = fake(ALL).port(1).expect("a port");
    assert_eq!(
        (newest.state, newest.speed_mbps),
        (PortState::Active, 800_000),
        "4 lanes of the extended speed"
    );
    let newer_library = fake(Offers {
        grown_by: 48,
        ..ALL
    })
    .port(1)
    .expect("a port");
    assert_eq!(newer_library.speed_mbps, 800_000);
    for old in [
        Offers {
            extended: false,
            ..ALL
        },
        Offers {
            grown_by: -8,
            ..ALL
        },
    ] {
        let port = fake(old).port(1).expect("a port");
        assert_eq!(
            (port.state, port.speed_mbps),
            (PortState::Down, 200_000),
            "4 lanes of the old speed"
        );
    }
    assert!(matches!(
        fake(ALL).port(3),
        Err(Error::Os {
            errno: libc::EINVAL,
            ..
        })
    ));
}

#[test]
fn the_gid_table_is_read_whole_or_entry_by_entry() {
    let entry = |index| GidEntry {
        index,
        gid: [index as u8; 16],
        kind: GidKind::RoceV2,
        ifindex: 4,
    };
    assert_eq!(
        fake(ALL).gid_table(1).expect("a table"),
        [entry(1), entry(3)]
    );
    assert_eq!(
        fake(Offers {
            gid_table: false,
            ..ALL
        })
        .gid_table(1)
        .expect("a table"),
        [entry(1), entry(3)]
    );
}

#[test]
fn a_device_without_room_for_inline_data_still_makes_a_qp() {
    let context = fake(ALL);
    let pd = Pd::new(&context).expect("a domain");
    let cq = Cq::new(&context, 16).expect("a CQ");
    let caps = QpCaps {
        send_requests: 4,
        receive_requests: 4,
        inline_bytes: 1000,
    };
    let mut qp = Qp::new(&pd, &cq, caps).expect("a QP");
    assert_eq!(
        qp.inline_bytes(),
        125,
        "1000, 500 and 250 are refused, and more than was asked for is not used"
    );
    let path = Path {
        port: 1,
        mtu_bytes: 4096,
        remote_qp: 9,
        receive_psn: 0,
        gid_index: 256,
        remote_gid: [1; 16],
        traffic_class: 0,
        service_level: 0,
        flow_label: 0,
    };
    assert!(
        matches!(qp.ready_to_receive(&path), Err(Error::Argument(_))),
        "the index does not fit the struct"
    );
    qp.ready_to_receive(&Path {
        gid_index: 3,
        flow_label: 16_383,
        traffic_class: 106,
        ..path
    })
    .expect("it connects");
    assert_eq!(
        ROUTE_HEADER.get(),
        (16_383, 255, 106),
        "a routed path needs more than one hop"
    );
    for (timeout, retry_count) in [(32, 7), (31, 8)] {
        let config = QpConfig {
            timeout,
            retry_count,
            flow_label: 0,
        };
        let refused = qp.ready_to_send(config, 0);
        assert!(matches!(refused, Err(Error::Argument(_))), "{config:?}");
    }
    let too_much = QpCaps {
        send_requests: 5,
        ..caps
    };
    assert!(matches!(
        Qp::new(&pd, &cq, too_much),
        Err(Error::Os {
            errno: libc::EINVAL,
            ..
        })
    ));
}

fn calls_of_a_qp(offers: Offers) -> Vec<&'static str> {
    CALLS.take();
    let context = fake(offers);
    let pd = Pd::new(&context).expect("a domain");
    let cq = Cq::new(&context, 16).expect("a CQ");
    let qp = Qp::new(
        &pd,
        &cq,
        QpCaps {
            send_requests: 4,
            receive_requests: 4,
            inline_bytes: 0,
        },
    )
    .expect("a QP");
    // The owners of the other objects are dropped first, but the QP keeps the objects alive.
    drop((context, pd, cq));
    drop(qp);
    CALLS.take()
}

/// Returns an opened context. The fake library is leaked, and so is the `verbs_context`, which a
/// real library would free.
fn fake(offers: Offers) -> Arc<Context> {
    // SAFETY: integers, pointers and pthread objects that are not used; all zero is a valid value.
    let mut around: Box<verbs_context> = Box::new(unsafe { std::mem::zeroed() });
    around.sz = size_of::<verbs_context>().wrapping_add_signed(offers.grown_by);
    around.query_port = Some(query_port);
    if offers.thread_domains {
        around.alloc_td = Some(alloc_td);
        around.dealloc_td = Some(dealloc_td);
        around.alloc_parent_domain = Some(alloc_parent_domain);
    }
    around.context.abi_compat = if offers.extended {
        usize::MAX as *mut c_void
    } else {
        null_mut()
    };
    around.context.async_fd = -1;
    around.context.ops.poll_cq = Some(poll_cq);
    around.context.ops.post_send = Some(post_send);
    around.context.ops.post_recv = Some(post_recv);
    let around = Box::into_raw(around);
    let library = Box::leak(Box::new(Library {
        path: "fake".to_owned(),
        get_device_list,
        free_device_list,
        get_device_name,
        get_device_guid,
        open_device,
        close_device,
        query_device,
        query_port: old_query_port,
        query_gid_ex: Some(query_gid_ex),
        query_gid_table: if offers.gid_table {
            Some(query_gid_table)
        } else {
            None
        },
        get_async_event,
        ack_async_event,
        alloc_pd,
        dealloc_pd,
        reg_mr,
        reg_mr_iova2: None,
        dereg_mr,
        create_cq,
        destroy_cq,
        create_qp,
        modify_qp,
        destroy_qp,
    }));
    // SAFETY: the fake `open_device` casts a device to its context; here both are the context.
    unsafe { Context::open(library, (&raw mut (*around).context).cast(), "fake0") }
        .expect("it opens")
}

fn call(name: &'static str) {
    CALLS.with_borrow_mut(|calls| calls.push(name));
}

/// Returns a pointer for an object that neither the plugin nor the fake library dereferences.
fn handle<T>() -> *mut T {
    std::ptr::without_provenance_mut(0x1000)
}

fn refuse<T>() -> *mut T {
    // SAFETY: the thread's own errno.
    unsafe { *libc::__errno_location() = libc::EINVAL };
    null_mut()
}

unsafe extern "C" fn open_device(device: *mut ibv_device) -> *mut ibv_context {
    device.cast()
}

unsafe extern "C" fn close_device(_: *mut ibv_context) -> i32 {
    call("close_device");
    0
}

unsafe extern "C" fn query_device(_: *mut ibv_context, attributes: *mut ibv_device_attr) -> i32 {
    // SAFETY: the caller's struct.
    unsafe { (*attributes).phys_port_cnt = 2 };
    0
}

unsafe extern "C" fn old_query_port(
    _: *mut ibv_context,
    _: u8,
    attributes: *mut _compat_ibv_port_attr,
) -> i32 {
    let attributes: *mut ibv_port_attr = attributes.cast();
    // SAFETY: these members are in the old struct too.
    unsafe {
        (*attributes).state = IBV_PORT_DOWN;
        (*attributes).gid_tbl_len = 4;
        (*attributes).active_width = 2;
        (*attributes).active_speed = 64;
    }
    0
}

unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    to: *mut ibv_port_attr,
    bytes: usize,
) -> i32 {
    const EXTENDED_SPEED_AT: usize = size_of::<ibv_port_attr>();
    assert!(bytes >= EXTENDED_SPEED_AT + 4);
    if port > 2 {
        return libc::EINVAL;
    }
    // SAFETY: the caller's struct, of at least `bytes` bytes.
    unsafe {
        old_query_port(context, port, to.cast());
        (*to).state = IBV_PORT_ACTIVE;
        to.byte_add(EXTENDED_SPEED_AT).cast::<u32>().write(256);
    }
    0
}

fn gid_entry(port_num: u32, gid_index: u32) -> ibv_gid_entry {
    let gid = ibv_gid {
        raw: [gid_index as u8; 16],
    };
    ibv_gid_entry {
        gid,
        gid_index,
        port_num,
        gid_type: IBV_GID_TYPE_ROCE_V2,
        ndev_ifindex: 4,
    }
}

unsafe extern "C" fn query_gid_table(
    _: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    room: usize,
    _: u32,
    bytes: usize,
) -> isize {
    assert_eq!(
        (room, bytes),
        (8, size_of::<ibv_gid_entry>()),
        "4 for each of the 2 ports"
    );
    for (place, entry) in [gid_entry(1, 1), gid_entry(2, 2), gid_entry(1, 3)]
        .into_iter()
        .enumerate()
    {
        // SAFETY: there is room for 8.
        unsafe { entries.add(place).write(entry) };
    }
    3
}

unsafe extern "C" fn query_gid_ex(
    _: *mut ibv_context,
    port: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    _: u32,
    _: usize,
) -> i32 {
    if index.is_multiple_of(2) {
        return libc::ENODATA;
    }
    // SAFETY: the caller's struct.
    unsafe { entry.write(gid_entry(port, index)) };
    0
}

unsafe extern "C" fn alloc_pd(_: *mut ibv_context) -> *mut ibv_pd {
    call("alloc_pd");
    handle()
}

unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> i32 {
    call(if pd == parent_domain() {
        "dealloc the parent domain"
    } else {
        "dealloc_pd"
    });
    0
}

fn parent_domain() -> *mut ibv_pd {
    std::ptr::without_provenance_mut(0x2000)
}

unsafe extern "C" fn alloc_td(_: *mut ibv_context, _: *mut ibv_td_init_attr) -> *mut ibv_td {
    call("alloc_td");
    handle()
}

unsafe extern "C" fn dealloc_td(_: *mut ibv_td) -> i32 {
    call("dealloc_td");
    0
}

unsafe extern "C" fn alloc_parent_domain(
    _: *mut ibv_context,
    with: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    // SAFETY: the caller's struct.
    let (pd, td) = unsafe { ((*with).pd, (*with).td) };
    assert_eq!(
        (pd, td),
        (handle(), handle()),
        "the domain and the thread domain that were made"
    );
    call("alloc_parent_domain");
    parent_domain()
}

unsafe extern "C" fn create_cq(
    _: *mut ibv_context,
    _: i32,
    _: *mut c_void,
    _: *mut ibv_comp_channel,
    _: i32,
) -> *mut ibv_cq {
    call("create_cq");
    handle()
}

unsafe extern "C" fn destroy_cq(_: *mut ibv_cq) -> i32 {
    call("destroy_cq");
    0
}

unsafe extern "C" fn create_qp(pd: *mut ibv_pd, with: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the caller's struct.
    let ibv_qp_cap {
        max_send_wr,
        max_inline_data,
        ..
    } = unsafe { (*with).cap };
    if max_send_wr > 4 || max_inline_data > 200 {
        return refuse();
    }
    call(if pd == parent_domain() {
        "create_qp in the parent domain"
    } else {
        "create_qp"
    });
    // Rounded up, as in mlx5.
    // SAFETY: the caller's struct.
    unsafe { (*with).cap.max_inline_data = max_inline_data + 60 };
    // SAFETY: integers, pointers and pthread objects that are not used; all zero is a valid value.
    Box::into_raw(Box::new(unsafe { std::mem::zeroed() }))
}

unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> i32 {
    // SAFETY: made by `create_qp`, and destroyed once.
    drop(unsafe { Box::from_raw(qp) });
    call("destroy_qp");
    0
}

// Functions that these tests do not call, except for `modify_qp`.

unsafe extern "C" fn get_device_list(_: *mut i32) -> *mut *mut ibv_device {
    refuse()
}

unsafe extern "C" fn free_device_list(_: *mut *mut ibv_device) {}

unsafe extern "C" fn get_device_name(_: *mut ibv_device) -> *const std::ffi::c_char {
    std::ptr::null()
}

unsafe extern "C" fn get_device_guid(_: *mut ibv_device) -> u64 {
    0
}

unsafe extern "C" fn get_async_event(_: *mut ibv_context, _: *mut ibv_async_event) -> i32 {
    -1
}

unsafe extern "C" fn ack_async_event(_: *mut ibv_async_event) {}

unsafe extern "C" fn reg_mr(_: *mut ibv_pd, _: *mut c_void, _: usize, _: i32) -> *mut ibv_mr {
    refuse()
}

unsafe extern "C" fn dereg_mr(_: *mut ibv_mr) -> i32 {
    0
}

unsafe extern "C" fn modify_qp(_: *mut ibv_qp, attributes: *mut ibv_qp_attr, _: i32) -> i32 {
    // SAFETY: the plugin's own struct, for the time of the call.
    let header = unsafe { (*attributes).ah_attr.grh };
    ROUTE_HEADER.set((header.flow_label, header.hop_limit, header.traffic_class));
    0
}

unsafe extern "C" fn poll_cq(_: *mut ibv_cq, _: i32, _: *mut ibv_wc) -> i32 {
    0
}

unsafe extern "C" fn post_send(
    _: *mut ibv_qp,
    _: *mut ibv_send_wr,
    _: *mut *mut ibv_send_wr,
) -> i32 {
    0
}

unsafe extern "C" fn post_recv(
    _: *mut ibv_qp,
    _: *mut ibv_recv_wr,
    _: *mut *mut ibv_recv_wr,
) -> i32 {
    0
}
