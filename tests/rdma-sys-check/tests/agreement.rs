//! This project's bindings of libibverbs agree with those of `rdma-sys` in the size, the alignment
//! and the offsets of every used struct, and in the constants. In `rdma-sys`, structs with unions
//! were written by hand.

use std::mem::{align_of, offset_of, size_of};

use rdma_sys as theirs;
use verbs_sys as ours;

/// `our_struct as their_struct { field, our_field = their_field }`. Equal names are given once. If
/// a field of our struct is missing from the list, the test does not compile.
macro_rules! layouts {
    ($($ours:ident $(as $theirs:ident)? { $($field:ident $(= $their_field:ident)?),* $(,)? })*) => {
        $(
            #[allow(non_snake_case)]
            mod $ours {
                use super::*;

                #[test]
                fn agrees() {
                    type Ours = ours::$ours;
                    type Theirs = name!(theirs, $ours $($theirs)?);
                    assert_eq!(size_of::<Ours>(), size_of::<Theirs>(), "size");
                    assert_eq!(align_of::<Ours>(), align_of::<Theirs>(), "alignment");
                    $({
                        let theirs = offset!(Theirs, $field $($their_field)?);
                        assert_eq!(offset_of!(Ours, $field), theirs, stringify!($field));
                    })*
                }

                #[allow(dead_code)]
                fn every_field_is_named(value: ours::$ours) {
                    let ours::$ours { $($field: _),* } = value;
                }
            }
        )*
    };
}

macro_rules! name {
    ($module:ident, $ours:ident) => {
        $module::$ours
    };
    ($module:ident, $ours:ident $theirs:ident) => {
        $module::$theirs
    };
}

macro_rules! offset {
    ($type:ty, $ours:ident) => {
        offset_of!($type, $ours)
    };
    ($type:ty, $ours:ident $theirs:ident) => {
        offset_of!($type, $theirs)
    };
}

layouts! {
    ibv_gid__bindgen_ty_1 as ibv_gid_global_t { subnet_prefix, interface_id }
    ibv_gid_entry { gid, gid_index, port_num, gid_type, ndev_ifindex }
    ibv_device_attr {
        fw_ver, node_guid, sys_image_guid, max_mr_size, page_size_cap, vendor_id, vendor_part_id, hw_ver, max_qp,
        max_qp_wr, device_cap_flags, max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom,
        max_ee_rd_atom, max_res_rd_atom, max_qp_init_rd_atom, max_ee_init_rd_atom, atomic_cap, max_ee, max_rdd,
        max_mw, max_raw_ipv6_qp, max_raw_ethy_qp, max_mcast_grp, max_mcast_qp_attach, max_total_mcast_qp_attach,
        max_ah, max_fmr, max_map_per_fmr, max_srq, max_srq_wr, max_srq_sge, max_pkeys, local_ca_ack_delay,
        phys_port_cnt,
    }
    ibv_port_attr {
        state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr,
        pkey_tbl_len, lid, sm_lid, lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width,
        active_speed, phys_state, link_layer, flags, port_cap_flags2,
    }
    ibv_async_event { element, event_type }
    ibv_wc {
        wr_id, status, opcode, vendor_err, byte_len, __bindgen_anon_1 = imm_data_invalidated_rkey_union, qp_num,
        src_qp, wc_flags, pkey_index, slid, sl, dlid_path_bits,
    }
    ibv_mw_bind_info { mr, addr, length, mw_access_flags }
    ibv_pd { context, handle }
    ibv_td_init_attr { comp_mask }
    ibv_td { context }
    ibv_mr { context, pd, addr, length, handle, lkey, rkey }
    ibv_ece { vendor_id, options, comp_mask }
    ibv_comp_channel { context, fd, refcnt }
    ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class }
    ibv_ah_attr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num }
    ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
    ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
    ibv_qp_attr {
        qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num, qp_access_flags, cap,
        ah_attr, alt_ah_attr, pkey_index, alt_pkey_index, en_sqd_async_notify, sq_draining, max_rd_atomic,
        max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout,
        rate_limit,
    }
    ibv_sge { addr, length, lkey }
    ibv_send_wr {
        wr_id, next, sg_list, num_sge, opcode, send_flags, __bindgen_anon_1 = imm_data_invalidated_rkey_union, wr,
        qp_type, __bindgen_anon_2 = bind_mw_tso_union,
    }
    ibv_send_wr__bindgen_ty_2__bindgen_ty_1 as rdma_t { remote_addr, rkey }
    ibv_send_wr__bindgen_ty_2__bindgen_ty_2 as atomic_t { remote_addr, compare_add, swap, rkey }
    ibv_send_wr__bindgen_ty_2__bindgen_ty_3 as ud_t { ah, remote_qpn, remote_qkey }
    ibv_send_wr__bindgen_ty_3__bindgen_ty_1 as xrc_t { remote_srqn }
    ibv_send_wr__bindgen_ty_4__bindgen_ty_1 as bind_mw_t { mw, rkey, bind_info }
    ibv_send_wr__bindgen_ty_4__bindgen_ty_2 as tso_t { hdr, hdr_sz, mss }
    ibv_recv_wr { wr_id, next, sg_list, num_sge }
    ibv_qp {
        context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type, mutex, cond, events_completed,
    }
    ibv_cq { context, channel, cq_context, handle, cqe, mutex, cond, comp_events_completed, async_events_completed }
    _ibv_device_ops { _dummy1, _dummy2 }
    ibv_device { _ops, node_type, transport_type, name, dev_name, dev_path, ibdev_path }
    ibv_context_ops {
        _compat_query_device, _compat_query_port, _compat_alloc_pd, _compat_dealloc_pd, _compat_reg_mr,
        _compat_rereg_mr, _compat_dereg_mr, alloc_mw, bind_mw, dealloc_mw, _compat_create_cq, poll_cq, req_notify_cq,
        _compat_cq_event, _compat_resize_cq, _compat_destroy_cq, _compat_create_srq, _compat_modify_srq,
        _compat_query_srq, _compat_destroy_srq, post_srq_recv, _compat_create_qp, _compat_query_qp, _compat_modify_qp,
        _compat_destroy_qp, post_send, post_recv, _compat_create_ah, _compat_destroy_ah, _compat_attach_mcast,
        _compat_detach_mcast, _compat_async_event,
    }
    ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat }
    ibv_parent_domain_init_attr { pd, td, comp_mask, alloc, free, pd_context }
    verbs_context {
        query_port, advise_mr, alloc_null_mr, read_counters, attach_counters_point_flow, create_counters,
        destroy_counters, reg_dm_mr, alloc_dm, free_dm, modify_flow_action_esp, destroy_flow_action,
        create_flow_action_esp, modify_qp_rate_limit, alloc_parent_domain, dealloc_td, alloc_td, modify_cq,
        post_srq_ops, destroy_rwq_ind_table, create_rwq_ind_table, destroy_wq, modify_wq, create_wq, query_rt_values,
        create_cq_ex, priv_, query_device_ex, ibv_destroy_flow, ABI_placeholder2, ibv_create_flow, ABI_placeholder1,
        open_qp, create_qp_ex, get_srq_num, create_srq_ex, open_xrcd, close_xrcd, _ABI_placeholder3, sz, context,
    }
}

#[test]
fn unions_agree() {
    assert_eq!(size_of::<ours::ibv_gid>(), size_of::<theirs::ibv_gid>());
    assert_eq!(align_of::<ours::ibv_gid>(), align_of::<theirs::ibv_gid>());
    assert_eq!(
        size_of::<ours::ibv_send_wr__bindgen_ty_2>(),
        size_of::<theirs::wr_t>()
    );
    assert_eq!(
        size_of::<ours::ibv_send_wr__bindgen_ty_3>(),
        size_of::<theirs::qp_type_t>()
    );
    assert_eq!(
        size_of::<ours::ibv_send_wr__bindgen_ty_4>(),
        size_of::<theirs::bind_mw_tso_union_t>()
    );
    assert_eq!(
        size_of::<ours::ibv_wc__bindgen_ty_1>(),
        size_of::<theirs::imm_data_invalidated_rkey_union_t>()
    );
    assert_eq!(
        size_of::<ours::ibv_async_event__bindgen_ty_1>(),
        size_of::<theirs::ibv_async_event_element_t>()
    );
}

/// Makes a test for each enum. `rdma-sys` represents enums in three ways.
macro_rules! constants {
    ($($name:ident $way:ident { $($constant:ident),* $(,)? })*) => {
        $(
            #[test]
            #[allow(non_snake_case)]
            fn $name() {
                $(
                    let theirs = their_constant!($way, $name, $constant);
                    assert_eq!(i64::from(ours::$constant), theirs, stringify!($constant));
                )*
            }
        )*
    };
}

macro_rules! their_constant {
    (module, $name:ident, $constant:ident) => {
        i64::from(theirs::$name::$constant)
    };
    (flags, $name:ident, $constant:ident) => {
        i64::from(theirs::$name::$constant.0)
    };
    (constant, $name:ident, $constant:ident) => {
        i64::from(theirs::$constant)
    };
    (enumeration, $name:ident, $constant:ident) => {
        theirs::$name::$constant as i64
    };
}

mod constants {
    use super::*;

    constants! {
        ib_uverbs_advise_mr_advice module {
            IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH, IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE,
            IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT,
        }
        ibv_node_type module {
            IBV_NODE_UNKNOWN, IBV_NODE_CA, IBV_NODE_SWITCH, IBV_NODE_ROUTER, IBV_NODE_RNIC, IBV_NODE_USNIC,
            IBV_NODE_USNIC_UDP, IBV_NODE_UNSPECIFIED,
        }
        ibv_transport_type module {
            IBV_TRANSPORT_UNKNOWN, IBV_TRANSPORT_IB, IBV_TRANSPORT_IWARP, IBV_TRANSPORT_USNIC, IBV_TRANSPORT_USNIC_UDP,
            IBV_TRANSPORT_UNSPECIFIED,
        }
        ibv_atomic_cap module {
            IBV_ATOMIC_NONE, IBV_ATOMIC_HCA, IBV_ATOMIC_GLOB,
        }
        ibv_mtu module {
            IBV_MTU_256, IBV_MTU_512, IBV_MTU_1024, IBV_MTU_2048, IBV_MTU_4096,
        }
        ibv_port_state module {
            IBV_PORT_NOP, IBV_PORT_DOWN, IBV_PORT_INIT, IBV_PORT_ARMED, IBV_PORT_ACTIVE, IBV_PORT_ACTIVE_DEFER,
        }
        ibv_wc_status module {
            IBV_WC_SUCCESS, IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_QP_OP_ERR, IBV_WC_LOC_EEC_OP_ERR, IBV_WC_LOC_PROT_ERR,
            IBV_WC_WR_FLUSH_ERR, IBV_WC_MW_BIND_ERR, IBV_WC_BAD_RESP_ERR, IBV_WC_LOC_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR,
            IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR,
            IBV_WC_LOC_RDD_VIOL_ERR, IBV_WC_REM_INV_RD_REQ_ERR, IBV_WC_REM_ABORT_ERR, IBV_WC_INV_EECN_ERR,
            IBV_WC_INV_EEC_STATE_ERR, IBV_WC_FATAL_ERR, IBV_WC_RESP_TIMEOUT_ERR, IBV_WC_GENERAL_ERR, IBV_WC_TM_ERR,
            IBV_WC_TM_RNDV_INCOMPLETE,
        }
        ibv_wc_opcode module {
            IBV_WC_SEND, IBV_WC_RDMA_WRITE, IBV_WC_RDMA_READ, IBV_WC_COMP_SWAP, IBV_WC_FETCH_ADD, IBV_WC_BIND_MW,
            IBV_WC_LOCAL_INV, IBV_WC_TSO, IBV_WC_ATOMIC_WRITE, IBV_WC_RECV, IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_TM_ADD,
            IBV_WC_TM_DEL, IBV_WC_TM_SYNC, IBV_WC_TM_RECV, IBV_WC_TM_NO_TAG, IBV_WC_DRIVER1, IBV_WC_DRIVER2,
            IBV_WC_DRIVER3,
        }
        ibv_mw_type module {
            IBV_MW_TYPE_1, IBV_MW_TYPE_2,
        }
        ibv_qp_type module {
            IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD, IBV_QPT_RAW_PACKET, IBV_QPT_XRC_SEND, IBV_QPT_XRC_RECV, IBV_QPT_DRIVER,
        }
        ibv_qp_state module {
            IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD, IBV_QPS_SQE, IBV_QPS_ERR, IBV_QPS_UNKNOWN,
        }
        ibv_mig_state module {
            IBV_MIG_MIGRATED, IBV_MIG_REARM, IBV_MIG_ARMED,
        }
        ibv_wr_opcode module {
            IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_READ,
            IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_LOCAL_INV, IBV_WR_BIND_MW,
            IBV_WR_SEND_WITH_INV, IBV_WR_TSO, IBV_WR_DRIVER1, IBV_WR_ATOMIC_WRITE,
        }
        ibv_fork_status constant {
            IBV_FORK_DISABLED, IBV_FORK_ENABLED, IBV_FORK_UNNEEDED,
        }
        ibv_port_cap_flags flags {
            IBV_PORT_SM, IBV_PORT_NOTICE_SUP, IBV_PORT_TRAP_SUP, IBV_PORT_OPT_IPD_SUP, IBV_PORT_AUTO_MIGR_SUP,
            IBV_PORT_SL_MAP_SUP, IBV_PORT_MKEY_NVRAM, IBV_PORT_PKEY_NVRAM, IBV_PORT_LED_INFO_SUP,
            IBV_PORT_SYS_IMAGE_GUID_SUP, IBV_PORT_PKEY_SW_EXT_PORT_TRAP_SUP, IBV_PORT_EXTENDED_SPEEDS_SUP,
            IBV_PORT_CAP_MASK2_SUP, IBV_PORT_CM_SUP, IBV_PORT_SNMP_TUNNEL_SUP, IBV_PORT_REINIT_SUP,
            IBV_PORT_DEVICE_MGMT_SUP, IBV_PORT_VENDOR_CLASS_SUP, IBV_PORT_DR_NOTICE_SUP,
            IBV_PORT_CAP_MASK_NOTICE_SUP, IBV_PORT_BOOT_MGMT_SUP, IBV_PORT_LINK_LATENCY_SUP,
            IBV_PORT_CLIENT_REG_SUP, IBV_PORT_IP_BASED_GIDS,
        }
        ibv_wc_flags flags {
            IBV_WC_GRH, IBV_WC_WITH_IMM, IBV_WC_IP_CSUM_OK, IBV_WC_WITH_INV, IBV_WC_TM_SYNC_REQ, IBV_WC_TM_MATCH,
            IBV_WC_TM_DATA_VALID,
        }
        ibv_access_flags flags {
            IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_ATOMIC,
            IBV_ACCESS_MW_BIND, IBV_ACCESS_ZERO_BASED, IBV_ACCESS_ON_DEMAND, IBV_ACCESS_HUGETLB,
            IBV_ACCESS_RELAXED_ORDERING,
        }
        ibv_qp_attr_mask flags {
            IBV_QP_STATE, IBV_QP_CUR_STATE, IBV_QP_EN_SQD_ASYNC_NOTIFY, IBV_QP_ACCESS_FLAGS, IBV_QP_PKEY_INDEX,
            IBV_QP_PORT, IBV_QP_QKEY, IBV_QP_AV, IBV_QP_PATH_MTU, IBV_QP_TIMEOUT, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY,
            IBV_QP_RQ_PSN, IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_ALT_PATH, IBV_QP_MIN_RNR_TIMER, IBV_QP_SQ_PSN,
            IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_PATH_MIG_STATE, IBV_QP_CAP, IBV_QP_DEST_QPN, IBV_QP_RATE_LIMIT,
        }
        ibv_send_flags flags {
            IBV_SEND_FENCE, IBV_SEND_SIGNALED, IBV_SEND_SOLICITED, IBV_SEND_INLINE, IBV_SEND_IP_CSUM,
        }
        ibv_gid_type constant {
            IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2,
        }
        ibv_event_type enumeration {
            IBV_EVENT_CQ_ERR, IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_QP_ACCESS_ERR, IBV_EVENT_COMM_EST,
            IBV_EVENT_SQ_DRAINED, IBV_EVENT_PATH_MIG, IBV_EVENT_PATH_MIG_ERR, IBV_EVENT_DEVICE_FATAL,
            IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR, IBV_EVENT_LID_CHANGE, IBV_EVENT_PKEY_CHANGE, IBV_EVENT_SM_CHANGE,
            IBV_EVENT_SRQ_ERR, IBV_EVENT_SRQ_LIMIT_REACHED, IBV_EVENT_QP_LAST_WQE_REACHED, IBV_EVENT_CLIENT_REREGISTER,
            IBV_EVENT_GID_CHANGE, IBV_EVENT_WQ_FATAL,
        }
    }
}
