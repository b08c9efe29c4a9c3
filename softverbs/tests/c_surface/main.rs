//! Tests of the built library. As NCCL does, they load it by its path and look its functions up by
//! name and version.
#![allow(unsafe_code)]

mod library;

use library::*;
use softverbs::control::{Action, control};
use std::ffi::{CStr, c_int};
use std::ptr::null_mut;
use verbs_sys::*;

#[test]
fn each_function_has_the_version_that_rdma_core_gives_it() {
    let real = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
    ]
    .map(|folder| open(&format!("{folder}/libibverbs.so.1")))
    .into_iter()
    .find(|library| !library.is_null());
    if real.is_none() {
        eprintln!(
            "the versions were not compared with rdma-core's: libibverbs.so.1 is not installed"
        );
    }
    let mut version = "";
    let mut functions = 0;
    let mut compared = 0;
    for line in include_str!("../../ibverbs.map").lines() {
        if let Some(begun) = line.strip_suffix(" {") {
            version = begun;
        } else if let Some(name) = line
            .trim()
            .strip_suffix(';')
            .filter(|name| name.contains("ibv_"))
        {
            assert!(
                !look_up(handle(), name, version).is_null(),
                "{name} in {version}"
            );
            // Not compared: private symbols, whose versions change with each release, and functions
            // that an old rdma-core lacks.
            if let Some(real) = real.filter(|real| !version.contains("PRIVATE") && has(*real, name))
            {
                assert!(
                    !look_up(real, name, version).is_null(),
                    "rdma-core has {name} in another version than {version}"
                );
                compared += 1;
            }
            functions += 1;
        }
    }
    assert!(
        functions > 60 && (real.is_none() || compared > 50),
        "{compared} of {functions}"
    );
}

const GID_TABLE_ENTRIES: c_int = 16;

#[test]
fn devices_and_ports_report_their_attributes() {
    let mut count: c_int = 0;
    let list = call!(ibv_get_device_list(&raw mut count));
    assert_eq!(count, 2);
    // SAFETY: the list has two devices and a null pointer.
    let (first, after) = unsafe { (*list, *list.add(2)) };
    let name = call!(ibv_get_device_name(first));
    // SAFETY: a C string inside the device.
    let name = unsafe { CStr::from_ptr(name) };
    assert_eq!((name, after), (c"rocep1s0f0", null_mut()));
    call!(ibv_free_device_list(list));

    let context = open_device(0);
    let mut device: ibv_device_attr = zeroed();
    assert_eq!(call!(ibv_query_device(context, &raw mut device)), 0);
    assert_eq!(
        (device.phys_port_cnt, device.atomic_cap),
        (1, IBV_ATOMIC_NONE)
    );
    let mut port: ibv_port_attr = zeroed();
    port.port_cap_flags2 = 0x5555;
    assert_eq!(call!(ibv_query_port(context, 1, (&raw mut port).cast())), 0);
    assert_eq!(
        (port.state, port.link_layer, port.active_mtu),
        (IBV_PORT_ACTIVE, LINK_LAYER_ETHERNET, IBV_MTU_4096)
    );
    assert_eq!(
        (port.max_msg_sz, port.gid_tbl_len),
        (1 << 30, GID_TABLE_ENTRIES)
    );
    assert_eq!(
        port.port_cap_flags2, 0x5555,
        "the exported function writes the old struct, and no more"
    );
    assert_eq!(
        call!(ibv_query_port(context, 2, (&raw mut port).cast())),
        libc::EINVAL
    );
    let mut speed = 0;
    assert_eq!(
        call!(
            "IBVERBS_1.16",
            ibv_query_port_speed(context, 1, &raw mut speed)
        ),
        0
    );
    assert!(speed >= 1000, "{speed}");
    assert_eq!(call!(ibv_close_device(context)), 0);
}

#[test]
fn the_gid_table_has_addresses_and_empty_entries() {
    let context = open_device(0);
    let mut entries: [ibv_gid_entry; 4] = zeroed();
    let bytes = size_of::<ibv_gid_entry>();
    let table = call!(
        "IBVERBS_1.11",
        _ibv_query_gid_table(context, entries.as_mut_ptr(), 4, 0, bytes)
    );
    assert!(table == 2);
    let empty = 2;
    let mut entry: ibv_gid_entry = zeroed();
    assert_eq!(
        call!(
            "IBVERBS_1.11",
            _ibv_query_gid_ex(context, 1, empty, &raw mut entry, 0, bytes)
        ),
        libc::ENODATA
    );
    assert_eq!(
        (entries[1].gid_index, entries[1].gid_type),
        (1, IBV_GID_TYPE_ROCE_V2)
    );
    let mut gid: ibv_gid = zeroed();
    assert_eq!(call!(ibv_query_gid(context, 1, 1, &raw mut gid)), 0);
    // SAFETY: both members of the union are the same bytes.
    let (own, entry) = unsafe { (gid.raw, entries[1].gid.raw) };
    assert_eq!((own, &own[10..12]), (entry, &[0xff, 0xff][..]));
    assert_eq!(
        call!(ibv_query_gid(context, 1, empty as i32, &raw mut gid)),
        0
    );
    // SAFETY: both members of the union are the same bytes.
    assert_eq!(unsafe { gid.raw }, [0; 16]);
    assert_eq!(
        call!(ibv_query_gid(context, 1, GID_TABLE_ENTRIES, &raw mut gid)),
        -1
    );
    assert_eq!(call!(ibv_close_device(context)), 0);
}

#[test]
fn the_extended_context_has_the_port_query_and_thread_domains() {
    let context = open_device(0);
    // SAFETY: the context is open.
    assert_eq!(unsafe { (*context).abi_compat } as usize, usize::MAX);
    // SAFETY: `abi_compat` marks an extended context.
    let extended = unsafe {
        &*context
            .byte_sub(std::mem::offset_of!(verbs_context, context))
            .cast::<verbs_context>()
    };
    assert_eq!(extended.sz, size_of::<verbs_context>());
    let mut newer = [0xffu8; size_of::<ibv_port_attr>() + 16];
    let query_port = extended.query_port.unwrap();
    // SAFETY: the context is open, and `newer` has the given length.
    let status = unsafe { query_port(context, 1, newer.as_mut_ptr().cast(), newer.len()) };
    assert_eq!(status, 0);
    assert_eq!(
        newer[size_of::<ibv_port_attr>()..],
        [0; 16],
        "fields of a newer header than this library's are zero"
    );

    let pd = call!(ibv_alloc_pd(context));
    let mut thread = ibv_td_init_attr { comp_mask: 0 };
    // SAFETY: the context is open.
    let td = unsafe { extended.alloc_td.unwrap()(context, &raw mut thread) };
    let mut parent: ibv_parent_domain_init_attr = zeroed();
    (parent.pd, parent.td) = (pd, td);
    // SAFETY: the context is open, and the domains are alive.
    let parent = unsafe { extended.alloc_parent_domain.unwrap()(context, &raw mut parent) };
    assert!(!td.is_null() && !parent.is_null());
    // SAFETY: the domain is alive.
    let dealloc_td = || unsafe { extended.dealloc_td.unwrap()(td) };
    assert_eq!(
        (dealloc_td(), call!(ibv_dealloc_pd(pd))),
        (libc::EBUSY, libc::EBUSY)
    );
    assert_eq!((call!(ibv_dealloc_pd(parent)), dealloc_td()), (0, 0));
    assert_eq!(call!(ibv_dealloc_pd(pd)), 0);
    assert_eq!(call!(ibv_close_device(context)), 0);
}

#[test]
fn a_write_with_immediate_uses_up_a_receive_but_not_its_memory() {
    let context = open_device(0);
    let (mut a, b) = connected(context, null_mut());
    a.memory[..16].copy_from_slice(b"sixteen letters.");
    assert_eq!(b.post_receive(b.piece(0, 0), 70), 0);
    assert_eq!(
        a.post(
            IBV_WR_RDMA_WRITE_WITH_IMM,
            IBV_SEND_SIGNALED,
            a.piece(0, 16),
            &b,
            100,
            1
        ),
        0
    );
    let sent = a.completion();
    let received = b.completion();
    assert_eq!(
        (sent.wr_id, sent.status, sent.opcode, sent.qp_num),
        (1, 0, IBV_WC_RDMA_WRITE, a.number())
    );
    assert_eq!(
        (received.wr_id, received.status, received.opcode),
        (70, 0, IBV_WC_RECV_RDMA_WITH_IMM)
    );
    assert_eq!(
        (received.byte_len, received.wc_flags, received.qp_num),
        (16, IBV_WC_WITH_IMM, b.number())
    );
    // SAFETY: integers.
    let immediate = unsafe { received.__bindgen_anon_1.imm_data };
    assert_eq!(immediate, 0x0102_0304, "the sender's bytes");
    assert_eq!(&b.memory[100..116], b"sixteen letters.");
    a.end();
    b.end();
    assert_eq!(call!(ibv_close_device(context)), 0);
}

#[test]
fn an_inline_send_is_read_during_the_call_and_needs_no_key() {
    let context = open_device(0);
    let (a, b) = connected(context, null_mut());
    assert_eq!(b.post_receive(b.piece(200, 64), 71), 0);
    let mut loose = *b"inline";
    let piece = ibv_sge {
        addr: loose.as_mut_ptr().expose_provenance() as u64,
        length: 6,
        lkey: 0,
    };
    assert_eq!(
        a.post(
            IBV_WR_SEND,
            IBV_SEND_SIGNALED | IBV_SEND_INLINE,
            piece,
            &b,
            0,
            2
        ),
        0
    );
    loose.fill(0);
    assert_eq!(
        (a.completion().opcode, b.completion().byte_len),
        (IBV_WC_SEND, 6)
    );
    assert_eq!(&b.memory[200..206], b"inline");
    a.end();
    b.end();
    assert_eq!(call!(ibv_close_device(context)), 0);
}

#[test]
fn a_read_fetches_the_peers_bytes() {
    let context = open_device(0);
    let (a, mut b) = connected(context, null_mut());
    b.memory[100..116].copy_from_slice(b"sixteen letters.");
    assert_eq!(
        a.post(
            IBV_WR_RDMA_READ,
            IBV_SEND_SIGNALED,
            a.piece(300, 16),
            &b,
            100,
            3
        ),
        0
    );
    let read = a.completion();
    assert_eq!(
        (read.wr_id, read.status, read.opcode),
        (3, 0, IBV_WC_RDMA_READ)
    );
    assert_eq!(&a.memory[300..316], b"sixteen letters.");
    a.end();
    b.end();
    assert_eq!(call!(ibv_close_device(context)), 0);
}

#[test]
fn an_unsignaled_write_makes_no_completion() {
    let context = open_device(0);
    let (mut a, b) = connected(context, null_mut());
    a.memory[..8].copy_from_slice(b"sixteen ");
    assert_eq!(a.post(IBV_WR_RDMA_WRITE, 0, a.piece(0, 8), &b, 500, 4), 0);
    assert_eq!(
        a.post(
            IBV_WR_RDMA_WRITE,
            IBV_SEND_SIGNALED,
            a.piece(0, 8),
            &b,
            508,
            5
        ),
        0
    );
    assert_eq!(a.completion().wr_id, 5, "the write after it");
    assert_eq!(&b.memory[500..516], b"sixteen sixteen ");
    a.end();
    b.end();
    assert_eq!(call!(ibv_close_device(context)), 0);
}

#[test]
fn states_are_reported_and_wrong_transitions_refused() {
    let context = open_device(0);
    let a = End::new(context, null_mut());
    let b = End::new(context, null_mut());
    assert_eq!(a.to_rtr(&b), libc::EINVAL, "reset to RTR");
    assert_eq!(
        a.post(IBV_WR_RDMA_WRITE, 0, a.piece(0, 8), &b, 0, 1),
        libc::EINVAL,
        "posting in reset"
    );
    assert_eq!(a.to_init(), 0);
    let mut lacking: ibv_qp_attr = zeroed();
    lacking.qp_state = IBV_QPS_RTR;
    assert_eq!(
        a.modify(lacking, IBV_QP_STATE | IBV_QP_DEST_QPN),
        libc::EINVAL
    );
    assert_eq!((a.to_rtr(&b), a.to_rts()), (0, 0));

    let (mut now, mut init): (ibv_qp_attr, ibv_qp_init_attr) = (zeroed(), zeroed());
    assert_eq!(
        call!(ibv_query_qp(
            a.qp,
            &raw mut now,
            IBV_QP_STATE as c_int,
            &raw mut init
        )),
        0
    );
    assert_eq!(
        (now.qp_state, now.dest_qp_num, now.timeout, now.path_mtu),
        (IBV_QPS_RTS, b.number(), 18, IBV_MTU_1024)
    );
    assert_eq!((init.qp_type, init.send_cq), (IBV_QPT_RC, a.cq));
    let cap = init.cap;
    assert_eq!(
        (cap.max_send_wr, cap.max_recv_wr, cap.max_inline_data),
        (25, 16, 124),
        "more than asked, as on mlx5"
    );
    // SAFETY: the queue pair is alive.
    assert_eq!(unsafe { (*a.qp).state }, IBV_QPS_RTS);

    let mut error: ibv_qp_attr = zeroed();
    error.qp_state = IBV_QPS_ERR;
    assert_eq!(a.post_receive(a.piece(0, 8), 90), 0);
    assert_eq!(a.modify(error, IBV_QP_STATE), 0);
    assert_eq!(
        (a.completion().status, a.to_rts()),
        (IBV_WC_WR_FLUSH_ERR, libc::EINVAL)
    );
    a.end();
    b.end();
    assert_eq!(call!(ibv_close_device(context)), 0);
}

#[test]
fn impossible_values_are_refused_and_objects_in_use_remain() {
    let context = open_device(0);
    let (a, b) = connected(context, null_mut());
    assert_eq!(
        (call!(ibv_destroy_cq(a.cq)), call!(ibv_dealloc_pd(a.pd))),
        (libc::EBUSY, libc::EBUSY)
    );
    let mut datagrams = End::attributes(a.cq);
    datagrams.qp_type = IBV_QPT_UD;
    assert!(call!(ibv_create_qp(a.pd, &raw mut datagrams)).is_null());
    assert_eq!(errno(), libc::EOPNOTSUPP);
    assert!(call!(ibv_create_srq(a.pd, null_mut())).is_null());
    assert!(call!("IBVERBS_1.12", ibv_reg_dmabuf_mr(a.pd, 0, 4096, 0, -1, 1)).is_null());
    assert_eq!(errno(), libc::EOPNOTSUPP);
    let mut ece: ibv_ece = zeroed();
    assert_eq!(
        call!("IBVERBS_1.10", ibv_query_ece(a.qp, &raw mut ece)),
        libc::EOPNOTSUPP
    );
    let remote_only = IBV_ACCESS_REMOTE_WRITE as c_int;
    assert!(
        call!(ibv_reg_mr(
            a.pd,
            a.memory.as_ptr().cast_mut().cast(),
            4096,
            remote_only
        ))
        .is_null()
    );
    assert_eq!(errno(), libc::EINVAL);

    // More scatter/gather entries, and more inline bytes, than a request may have.
    assert_eq!(
        (a.post_pieces(5, 0, &b), a.post_pieces(3, 0, &b)),
        (libc::ENOMEM, libc::ENOMEM)
    );
    assert_eq!(
        a.post(
            IBV_WR_RDMA_WRITE,
            IBV_SEND_INLINE,
            a.piece(0, 300),
            &b,
            0,
            1
        ),
        libc::ENOMEM
    );

    // If a request of a chain is invalid, the requests before it are posted, and `bad` points to
    // the invalid request.
    let mut piece = a.piece(0, 8);
    let (mut good, mut atomic): (ibv_send_wr, ibv_send_wr) = (zeroed(), zeroed());
    (good.wr_id, good.opcode, good.send_flags) = (1, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED);
    (good.sg_list, good.num_sge, good.next) = (&raw mut piece, 1, &raw mut atomic);
    // SAFETY: the region is alive.
    let rkey = unsafe { (*b.mr).rkey };
    let remote_addr = b.memory.as_ptr().expose_provenance() as u64;
    good.wr.rdma = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr, rkey };
    atomic.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
    let at_fault = &raw mut atomic;
    assert_eq!(a.post_chain(&mut good), (libc::EOPNOTSUPP, at_fault));
    assert_eq!((a.completion().wr_id, a.completion_count()), (1, 0));
    a.end();
    b.end();
    assert_eq!(call!(ibv_close_device(context)), 0);
}

impl End {
    fn completion_count(&self) -> c_int {
        let mut completions: [ibv_wc; 4] = zeroed();
        // SAFETY: the context is open, the queue alive, and there is room for four.
        unsafe { (*self.context).ops.poll_cq.unwrap()(self.cq, 4, completions.as_mut_ptr()) }
    }
}

#[test]
fn a_channel_announces_a_queue_once_for_each_request() {
    let context = open_device(0);
    let channel = call!("IBVERBS_1.0", ibv_create_comp_channel(context));
    let (a, b) = connected(context, channel);
    // SAFETY: the channel is alive, and its descriptor open.
    let fd = unsafe { (*channel).fd };
    // SAFETY: as above.
    let status = unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) };
    assert_eq!(status, 0);
    let mut queue = null_mut();
    let mut data = null_mut();
    let mut next = || {
        (
            call!(ibv_get_cq_event(channel, &raw mut queue, &raw mut data)),
            queue,
        )
    };
    assert_eq!(next().0, -1, "nothing was asked for");
    assert_eq!(errno(), libc::EAGAIN);

    // SAFETY: the context is open, and the queue alive.
    assert_eq!(unsafe { (*context).ops.req_notify_cq.unwrap()(b.cq, 0) }, 0);
    for wr_id in [80, 81] {
        assert_eq!(b.post_receive(b.piece(0, 64), wr_id), 0);
        assert_eq!(
            a.post(IBV_WR_SEND, IBV_SEND_SIGNALED, a.piece(0, 8), &b, 0, wr_id),
            0
        );
        a.completion();
    }
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one entry. The descriptor becomes readable, or the test hangs.
    assert_eq!(unsafe { libc::poll(&raw mut poll, 1, -1) }, 1);
    assert_eq!(next(), (0, b.cq));
    assert_eq!((b.completion().wr_id, b.completion().wr_id), (80, 81));
    assert_eq!(next().0, -1, "announced once");
    assert_eq!(
        call!("IBVERBS_1.0", ibv_destroy_comp_channel(channel)),
        libc::EBUSY
    );
    call!(ibv_ack_cq_events(b.cq, 1));
    a.end();
    b.end();
    assert_eq!(call!("IBVERBS_1.0", ibv_destroy_comp_channel(channel)), 0);
    assert_eq!(call!(ibv_close_device(context)), 0);
}

/// One test for all events, on its own device, because events belong to the device.
#[test]
fn events_name_the_queue_pair_and_the_port() {
    let context = open_device(1);
    let (a, b) = connected(context, null_mut());
    // SAFETY: the context is open.
    let fd = unsafe { (*context).async_fd };
    let next = || {
        let mut poll = libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one entry. The descriptor becomes readable, or the test hangs.
        assert_eq!(unsafe { libc::poll(&raw mut poll, 1, -1) }, 1);
        let mut event: ibv_async_event = zeroed();
        assert_eq!(call!(ibv_get_async_event(context, &raw mut event)), 0);
        event
    };
    // A write beyond the region's end: the peer refuses it, and both sides get an error.
    assert_eq!(
        a.post(
            IBV_WR_RDMA_WRITE,
            IBV_SEND_SIGNALED,
            a.piece(0, 8),
            &b,
            4092,
            1
        ),
        0
    );
    assert_eq!(a.completion().status, IBV_WC_REM_ACCESS_ERR);
    let mut event = next();
    assert_eq!(event.event_type, IBV_EVENT_QP_ACCESS_ERR);
    // SAFETY: events of this kind have a queue pair.
    assert_eq!(unsafe { event.element.qp }, b.qp);
    call!(ibv_ack_async_event(&raw mut event));

    let mut port: ibv_port_attr = zeroed();
    for (action, kind, state) in [
        (Action::Down, IBV_EVENT_PORT_ERR, IBV_PORT_DOWN),
        (Action::Up, IBV_EVENT_PORT_ACTIVE, IBV_PORT_ACTIVE),
    ] {
        control(&dir(), FABRIC, Some(0), "roceP2p1s0f0", action).unwrap();
        let mut event = next();
        assert_eq!(event.event_type, kind);
        // SAFETY: events of this kind have a port.
        assert_eq!(unsafe { event.element.port_num }, 1);
        call!(ibv_ack_async_event(&raw mut event));
        assert_eq!(call!(ibv_query_port(context, 1, (&raw mut port).cast())), 0);
        assert_eq!(port.state, state);
    }
    a.end();
    b.end();
    assert_eq!(call!(ibv_close_device(context)), 0);
}
