//! The device that the fabric's rails behave as: mlx5 (a ConnectX) or Linux' soft-RoCE. Each
//! process chooses it for its own devices (`settings`).
//!
//! Each method is one difference, with the sources of both behaviours: "rxe" is
//! drivers/infiniband/sw/rxe in Linux and providers/rxe in rdma-core, "mlx5" is
//! drivers/infiniband/hw/mlx5 and providers/mlx5. Two more differences are elsewhere: the sizes of
//! queues (`abi/rounding.rs`) and the overflow of a completion queue ([`crate::completion_queue`]).
//!
//! Everything else is common, because both sources agree or one of them leaves it open:
//!
//! - Protection domains, access flags and bounds are checked (`lookup_mr` and `mr_check_range` in
//!   rxe's rxe_mr.c).
//! - `ibv_modify_qp` waits a second for an address that does not resolve: the kernel resolves it
//!   before it calls a driver (`_ib_modify_qp` calls `ib_resolve_eth_dmac` in
//!   drivers/infiniband/core/verbs.c, for every RoCE port).
//! - Completion queues are rounded up in the same way (`rxe_queue_init` in rxe's rxe_queue.c,
//!   `create_cq` in mlx5's verbs.c).
//! - With an RNR retry count of 7, retries to a peer without a posted receive never end. A queue
//!   pair that fails flushes its remaining requests.
//! - A function that is unplugged or resets leaves as under mlx5 ([`crate::hotplug`]): rxe has no
//!   firmware that could fail.

use verbs_sys::{
    IBV_EVENT_QP_ACCESS_ERR, IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_PROT_ERR, IBV_WC_LOC_QP_OP_ERR,
    IBV_WC_REM_INV_REQ_ERR, ibv_event_type, ibv_wc_status,
};

/// The device that rails behave as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Nic {
    /// A ConnectX under mlx5, the strict device.
    #[default]
    Mlx5,
    /// Linux' soft-RoCE, the lenient device.
    SoftRoce,
}

impl Nic {
    /// Every kind of device.
    pub const ALL: [Self; 2] = [Self::Mlx5, Self::SoftRoce];

    /// The name that `--nic` and `SOFTVERBS_NIC` accept.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mlx5 => "mlx5",
            Self::SoftRoce => "soft-roce",
        }
    }

    /// Finds the device with this name. The error lists the allowed names.
    pub fn parse(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|nic| nic.name() == name);
        found.ok_or_else(|| format!("must be {}", Self::ALL.map(Self::name).join(" or ")))
    }

    /// Size of the largest message that a port accepts. rxe: `RXE_PORT_MAX_MSG_SZ` in rxe_param.h.
    /// mlx5: 2^`log_max_msg` (`mlx5_query_port_roce` in main.c); ConnectX devices report a
    /// `log_max_msg` of 30.
    pub(crate) fn largest_message_bytes(self) -> u32 {
        match self {
            Self::Mlx5 => 1 << 30,
            Self::SoftRoce => 8 << 20,
        }
    }

    /// True if a request without a completion keeps its send queue entry until a later request has
    /// a completion. mlx5 moves its queue's tail by completions alone (`handle_good_req` and
    /// `wq->tail` in cq.c). rxe frees each entry when the request is acknowledged, even if the
    /// program does not poll (`do_complete` in rxe_comp.c).
    pub(crate) fn frees_by_completions(self) -> bool {
        match self {
            Self::Mlx5 => true,
            Self::SoftRoce => false,
        }
    }

    /// Time from a queue pair's first try to its failure without an answer; 0: it never fails. It
    /// tries once, and then `retry_count` times more, 4.096 us x 2^`timeout` apart. A `timeout` of
    /// 0 means that it waits for ever. rxe retries for ever if `retry_count` is 7
    /// (`COMPST_ERROR_RETRY` in `rxe_completer`, rxe_comp.c). mlx5 hands the number to the device
    /// unchanged (`__mlx5_ib_modify_qp` in qp.c). In the InfiniBand specification, 7 has a special
    /// meaning only for the RNR retry count: the retries while the peer has no receive.
    pub(crate) fn patience_ns(self, timeout: u8, retry_count: u8) -> u64 {
        match (self, timeout, retry_count) {
            (_, 0, _) | (Self::SoftRoce, _, 7) => 0,
            _ => (4096 << timeout.min(31)) * (u64::from(retry_count) + 1),
        }
    }

    /// Event of a queue pair that goes to error because it refused a request of the peer, for
    /// example a write with a key that does not allow it. mlx5: `mlx5_ib_qp_event` in qp.c. rxe
    /// makes no event, but moves the queue pair to error (`RESPST_ERR_RKEY_VIOLATION`,
    /// `RESPST_ERROR` in rxe_resp.c).
    pub(crate) fn refusal_event(self) -> Option<ibv_event_type> {
        match self {
            Self::Mlx5 => Some(IBV_EVENT_QP_ACCESS_ERR),
            Self::SoftRoce => None,
        }
    }

    /// Status of a write, send or receive whose local key does not allow the use of its local
    /// memory. mlx5: a local protection error, by the InfiniBand specification (volume 1,
    /// completion return status; `mlx5_handle_error_cqe` in cq.c). rxe looks the key up when it
    /// makes or accepts a packet, and reports a local QP operation error (`copy_data` in rxe_mr.c,
    /// `rxe_requester` in rxe_req.c, `RESPST_ERR_MALFORMED_WQE` in rxe_resp.c). A read ends with a
    /// protection error on both (`do_read` in rxe_comp.c).
    pub(crate) fn own_memory_refused(self) -> ibv_wc_status {
        match self {
            Self::Mlx5 => IBV_WC_LOC_PROT_ERR,
            Self::SoftRoce => IBV_WC_LOC_QP_OP_ERR,
        }
    }

    /// Status of a receive that is too short for the peer's send. mlx5: a local length error, by
    /// the InfiniBand specification (volume 1, completion return status). rxe: the status that the
    /// sender gets too, a remote invalid request error (`RESPST_ERR_LENGTH` in rxe_resp.c).
    pub(crate) fn receive_too_short(self) -> ibv_wc_status {
        match self {
            Self::Mlx5 => IBV_WC_LOC_LEN_ERR,
            Self::SoftRoce => IBV_WC_REM_INV_REQ_ERR,
        }
    }

    /// The `errno` for a send with more scatter/gather entries, or more inline bytes, than its
    /// queue pair accepts. mlx5: `_mlx5_post_send` and `set_data_inl_seg` in qp.c. rxe:
    /// `validate_send_wr` in rxe.c.
    pub(crate) fn too_large_to_post(self) -> i32 {
        match self {
            Self::Mlx5 => libc::ENOMEM,
            Self::SoftRoce => libc::EINVAL,
        }
    }

    /// True if programs can make thread domains and parent domains: `mlx5_ctx_common_ops` in mlx5.c
    /// has the functions, `rxe_ctx_ops` in rxe.c does not.
    pub(crate) fn has_thread_domains(self) -> bool {
        match self {
            Self::Mlx5 => true,
            Self::SoftRoce => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nic_names_parse_and_others_are_refused() {
        assert_eq!(Nic::default(), Nic::Mlx5);
        for nic in Nic::ALL {
            assert_eq!(Nic::parse(nic.name()), Ok(nic));
        }
        for wrong in ["", "mlx", "MLX5", "rxe", "soft_roce"] {
            assert_eq!(
                Nic::parse(wrong),
                Err("must be mlx5 or soft-roce".to_owned()),
                "{wrong}"
            );
        }
    }
}
