//! Queue pairs: creation and state transitions. Posting is in `datapath.rs`.

use std::ptr::NonNull;
use std::sync::Arc;

use super::context::{Operations, Pd, note_failure};
use super::cq::{Cq, RawCq};
use super::library::Pointer;
use super::thread_domain::{ThreadDomain, tell_doorbells};
use host::config::QpConfig;
use host::error::{Argument, Call, Error, Result};
use verbs_sys::*;

/// A reliably connected queue pair.
pub struct Qp {
    pub(super) raw: NonNull<ibv_qp>,
    number: u32,
    inline_bytes: u32,
    pub(super) operations: Operations,
    /// Work request that `post_write` fills in.
    pub(super) prepared: Box<Prepared>,
    /// Work requests that `post_receives` fills in, one for each receive that fits into the queue.
    pub(super) receives: Vec<ibv_recv_wr>,
    pd: Arc<Pd>,
    // Fields drop in this order, after the QP itself.
    _thread_domain: Option<ThreadDomain>,
    _queue: Arc<RawCq>,
}

pub(super) struct Prepared {
    pub(super) request: ibv_send_wr,
    pub(super) segment: ibv_sge,
}

// SAFETY: the library's objects may move between threads. The pointers in `receives` and `prepared`
// are written and used only within one call that holds `&mut self`.
unsafe impl Send for Qp {}
// SAFETY: methods with `&self` only read plain fields.
unsafe impl Sync for Qp {}

/// Required capacities of a QP.
#[derive(Debug, Clone, Copy)]
pub struct QpCaps {
    /// Largest number of writes in flight.
    pub send_requests: u32,
    /// Largest number of posted receives.
    pub receive_requests: u32,
    /// Longest inline write in bytes. A device may allow less: [`Qp::inline_bytes`].
    pub inline_bytes: u32,
}

/// The path to the peer's QP.
#[derive(Debug, Clone)]
pub struct Path {
    /// Port on this side, from 1.
    pub port: u8,
    /// Path MTU that both sides support: 256, 512, 1024, 2048 or 4096.
    pub mtu_bytes: u32,
    /// Number of the peer's QP.
    pub remote_qp: u32,
    /// Sequence number (24 bits) of the peer's first packet.
    pub receive_psn: u32,
    /// Index of this side's address in its GID table. [`Qp::ready_to_receive`] refuses an index
    /// above 255, which does not fit the library's field.
    pub gid_index: u16,
    /// Address of the peer.
    pub remote_gid: [u8; 16],
    /// Traffic class of RoCE's IP header (DSCP and ECN bits).
    pub traffic_class: u8,
    /// Service level; its lower 3 bits are the priority in RoCE's VLAN tag.
    pub service_level: u8,
    /// Flow label (20 bits) of the global route header. It determines RoCE v2's UDP source port
    /// (`rdma_flow_label_to_udp_sport` in Linux' `include/rdma/ib_verbs.h`). Switches use that port
    /// to choose among several paths. If the label is 0, the driver computes one from the two QP
    /// numbers, so that each QP gets its own (`rdma_calc_flow_label`, called by
    /// `rdma_get_udp_sport`; since Linux 5.8 in mlx5, 5.17 in soft-RoCE).
    pub flow_label: u32,
}

/// Least time that the sender waits before a retry if the receiver is not ready, that is, has no
/// receive posted: 0.64 ms (value 12 in the InfiniBand specification).
const MIN_RNR_TIMER: u8 = 12;
/// Number of retries if the receiver is not ready: no limit (value 7). Flow control keeps receivers
/// ready, except for shares that are resent on another rail (`flow::recovery`). For these shares,
/// waiting is better than a failed QP.
const RNR_RETRY_FOREVER: u8 = 7;
/// Limit of RDMA reads and atomics in flight. The plugin posts none, but providers require a limit
/// of at least one.
const MAX_READS: u8 = 1;
/// Hop limit, as in NCCL's transport: a routed path needs more than 1. For RoCE v2 the kernel
/// replaces it by the route's own limit (`ib_resolve_unicast_gid_dmac` in
/// `drivers/infiniband/core/verbs.c`).
const HOP_LIMIT: u8 = 255;

impl Qp {
    /// Creates a QP in `pd`. Its send queue and its receive queue both complete to `cq`. The inline
    /// size is the requested one, or less if the device has less room, but never more.
    pub fn new(pd: &Arc<Pd>, cq: &Cq, caps: QpCaps) -> Result<Self> {
        let context = pd.context();
        let create_qp = context.library.create_qp;
        let in_thread_domain = ThreadDomain::new(pd).and_then(|domain| {
            let created =
                create(create_qp, domain.raw, cq, caps).map_err(|error| error.to_string())?;
            Ok((created, domain))
        });
        let ((raw, inline_bytes), thread_domain) = match in_thread_domain {
            Ok((created, domain)) => (created, Ok(domain)),
            Err(why) => (create(create_qp, pd.raw, cq, caps)?, Err(why)),
        };
        tell_doorbells(context, &thread_domain);
        // SAFETY: the QP was just made, and its number does not change.
        let number = unsafe { (*raw.as_ptr()).qp_num };
        let empty = ibv_recv_wr {
            wr_id: 0,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 0,
        };
        let no_segment = ibv_sge {
            addr: 0,
            length: 0,
            lkey: 0,
        };
        let prepared = Prepared {
            // SAFETY: integers, pointers and unions of them; all zero is a valid value.
            request: unsafe { std::mem::zeroed() },
            segment: no_segment,
        };
        Ok(Self {
            raw,
            number,
            inline_bytes,
            operations: context.operations,
            prepared: Box::new(prepared),
            receives: vec![empty; caps.receive_requests as usize],
            pd: Arc::clone(pd),
            _thread_domain: thread_domain.ok(),
            _queue: Arc::clone(&cq.queue),
        })
    }

    /// Returns the QP's number, for the peer.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the length limit of [`Qp::write_inline`].
    #[inline(always)]
    pub fn inline_bytes(&self) -> u32 {
        self.inline_bytes
    }

    /// Moves the QP from RESET to INIT: binds it to a port and allows the peer to write.
    pub fn init(&mut self, port: u8) -> Result<()> {
        let mut attributes = attributes(IBV_QPS_INIT);
        attributes.port_num = port;
        attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
        self.modify(
            "INIT",
            attributes,
            IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
        )
    }

    /// Moves the QP from INIT to RTR: connects it to the peer's QP. The QP can now receive.
    ///
    /// # Errors
    /// [`Error::Argument`] for an invalid MTU or GID index, [`Error::Os`] if the device refuses,
    /// for example without a path to the peer's address.
    pub fn ready_to_receive(&mut self, path: &Path) -> Result<()> {
        let mut attributes = attributes(IBV_QPS_RTR);
        attributes.path_mtu = mtu(path.mtu_bytes)?;
        attributes.dest_qp_num = path.remote_qp;
        attributes.rq_psn = path.receive_psn;
        attributes.max_dest_rd_atomic = MAX_READS;
        attributes.min_rnr_timer = MIN_RNR_TIMER;
        attributes.ah_attr.is_global = 1;
        attributes.ah_attr.port_num = path.port;
        attributes.ah_attr.sl = path.service_level;
        attributes.ah_attr.grh.dgid = ibv_gid {
            raw: path.remote_gid,
        };
        attributes.ah_attr.grh.sgid_index =
            u8::try_from(path.gid_index).map_err(|_| Argument::GidIndex(path.gid_index))?;
        attributes.ah_attr.grh.hop_limit = HOP_LIMIT;
        attributes.ah_attr.grh.traffic_class = path.traffic_class;
        attributes.ah_attr.grh.flow_label = path.flow_label;
        let mask = IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        self.modify("RTR", attributes, mask)
    }

    /// Moves the QP from RTR to RTS, for sending. Its first packet has number `send_psn` (24 bits).
    ///
    /// # Errors
    /// [`Error::Argument`] for a timeout or retry count out of range, [`Error::Os`] if the device
    /// refuses.
    pub fn ready_to_send(&mut self, config: QpConfig, send_psn: u32) -> Result<()> {
        let QpConfig {
            timeout,
            retry_count,
            ..
        } = config;
        if timeout > 31 || retry_count > 7 {
            return Err(Argument::Timing {
                timeout,
                retry_count,
            }
            .into());
        }
        let mut attributes = attributes(IBV_QPS_RTS);
        attributes.timeout = timeout;
        attributes.retry_cnt = retry_count;
        attributes.rnr_retry = RNR_RETRY_FOREVER;
        attributes.sq_psn = send_psn;
        attributes.max_rd_atomic = MAX_READS;
        let mask = IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify("RTS", attributes, mask)
    }

    /// Moves the QP to ERR: traffic stops, and posted requests complete as flushed.
    pub fn fail(&mut self) -> Result<()> {
        self.modify("ERR", attributes(IBV_QPS_ERR), 0)
    }

    pub(super) fn device(&self) -> &str {
        self.pd.context().name()
    }

    fn modify(
        &mut self,
        state: &'static str,
        mut attributes: ibv_qp_attr,
        mask: ibv_qp_attr_mask,
    ) -> Result<()> {
        let mask = (IBV_QP_STATE | mask).cast_signed();
        // SAFETY: the QP is alive, and the struct lives for the call.
        let status = unsafe {
            (self.pd.context().library.modify_qp)(self.raw.as_ptr(), &raw mut attributes, mask)
        };
        match status {
            0 => Ok(()),
            errno => {
                let call = Call::ModifyQp {
                    device: self.device().to_owned(),
                    qp: self.number,
                    state,
                };
                Err(Error::Os { call, errno })
            }
        }
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        let context = self.pd.context();
        // SAFETY: created by this type, and destroyed once.
        let status = unsafe { (context.library.destroy_qp)(self.raw.as_ptr()) };
        note_failure("ibv_destroy_qp", context.name(), status);
    }
}

/// Creates a QP with the requested inline size, halved until the device accepts it. Returns the QP
/// and its inline size.
fn create(
    create_qp: Pointer<fn_ibv_create_qp>,
    pd: NonNull<ibv_pd>,
    cq: &Cq,
    caps: QpCaps,
) -> Result<(NonNull<ibv_qp>, u32)> {
    let mut inline_bytes = caps.inline_bytes;
    loop {
        let queue = cq.queue.raw.as_ptr();
        let mut attributes = ibv_qp_init_attr {
            qp_context: std::ptr::null_mut(),
            send_cq: queue,
            recv_cq: queue,
            srq: std::ptr::null_mut(),
            cap: ibv_qp_cap {
                max_send_wr: caps.send_requests,
                max_recv_wr: caps.receive_requests,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: inline_bytes,
            },
            qp_type: IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: the domain and the queue are alive, and the struct lives for the call.
        if let Some(raw) = NonNull::new(unsafe { create_qp(pd.as_ptr(), &raw mut attributes) }) {
            // mlx5 rounds up (188 for 128: `mlx5_calc_sq_size` in rdma-core's
            // providers/mlx5/verbs.c). The choice of inline sends must not depend on the rounding.
            return Ok((raw, attributes.cap.max_inline_data.min(inline_bytes)));
        }
        if inline_bytes == 0 {
            let error = std::io::Error::last_os_error();
            let hint = super::memory::memory_hint(error.raw_os_error().unwrap_or(0));
            let QpCaps {
                send_requests: sends,
                receive_requests: receives,
                ..
            } = caps;
            let device = cq.queue.context.name().to_owned();
            return Err(Error::os(
                Call::CreateQp {
                    device,
                    sends,
                    receives,
                    hint,
                },
                &error,
            ));
        }
        inline_bytes /= 2;
    }
}

fn attributes(state: ibv_qp_state) -> ibv_qp_attr {
    // SAFETY: integers and a union of integers; all zero is a valid value.
    let mut attributes: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attributes.qp_state = state;
    attributes
}

fn mtu(bytes: u32) -> Result<ibv_mtu> {
    match bytes {
        256 => Ok(IBV_MTU_256),
        512 => Ok(IBV_MTU_512),
        1024 => Ok(IBV_MTU_1024),
        2048 => Ok(IBV_MTU_2048),
        4096 => Ok(IBV_MTU_4096),
        _ => Err(Argument::PathMtu(bytes).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_path_mtus_that_exist_are_taken() {
        for (bytes, value) in [(256, 1), (512, 2), (1024, 3), (2048, 4), (4096, 5)] {
            assert!(matches!(mtu(bytes), Ok(got) if got == value), "{bytes}");
        }
        for bytes in [0, 1500, 4200, 8192] {
            assert!(matches!(mtu(bytes), Err(Error::Argument(_))), "{bytes}");
        }
    }
}
