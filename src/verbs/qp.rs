//! Queue pairs: making them, and taking them through their states. Posting is in `datapath.rs`.

use std::ptr::NonNull;
use std::sync::Arc;

use super::context::{Operations, Pd, note_failure};
use super::cq::{Cq, Queue};
use super::library::Pointer;
use super::thread_domain::{ThreadDomain, tell_doorbells};
use crate::error::{Error, Result};
use verbs_sys::*;

/// A reliably connected queue pair.
pub struct Qp {
    pub(super) raw: NonNull<ibv_qp>,
    number: u32,
    inline_bytes: u32,
    pub(super) operations: Operations,
    /// The work request for a write, for `write` to fill in.
    pub(super) prepared: Box<Prepared>,
    /// Work requests for `post_receives` to fill in, as many as the queue holds.
    pub(super) receives: Vec<ibv_recv_wr>,
    pd: Arc<Pd>,
    // Fields drop in this order, after the QP itself.
    _thread_domain: Option<ThreadDomain>,
    _queue: Arc<Queue>,
}

/// A work request with its one segment.
pub(super) struct Prepared {
    pub(super) request: ibv_send_wr,
    pub(super) segment: ibv_sge,
}

// SAFETY: the library's objects may move between threads; the pointers in `receives` and `prepared` are only written and used within one
// call that holds `&mut self`.
unsafe impl Send for Qp {}
// SAFETY: what takes `&self` only reads plain fields.
unsafe impl Sync for Qp {}

/// What a QP must hold.
#[derive(Debug, Clone, Copy)]
pub struct QpCaps {
    /// Writes that are posted and not completed.
    pub send_requests: u32,
    /// Receives that are posted and not completed.
    pub receive_requests: u32,
    /// The longest write whose bytes travel in the work request itself. A device may give less: [`Qp::inline_bytes`].
    pub inline_bytes: u32,
}

/// The path to the peer's QP.
#[derive(Debug, Clone)]
pub struct Path {
    /// The port on this side, from 1.
    pub port: u8,
    /// The path MTU that both sides can carry: 256, 512, 1024, 2048 or 4096.
    pub mtu_bytes: u32,
    /// The number of the peer's QP.
    pub remote_qp: u32,
    /// The sequence number (24 bits) that the peer's first packet has.
    pub receive_psn: u32,
    /// The place of this side's address in its port's table; 0 to 255, which is all that the library's struct holds.
    pub gid_index: u16,
    /// The peer's address.
    pub remote_gid: [u8; 16],
    /// The traffic class of RoCE's IP header (DSCP and ECN).
    pub traffic_class: u8,
    /// The service level; its lower 3 bits are the priority of RoCE's VLAN tag.
    pub service_level: u8,
}

/// How a QP sends.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// The wait for an acknowledgement is 4.096 us x 2^timeout; 0 (for ever) to 31.
    pub timeout: u8,
    /// How often a packet is sent again before the QP fails; 0 to 7.
    pub retry_count: u8,
    /// The sequence number (24 bits) of the first packet.
    pub send_psn: u32,
}

/// Receiver-not-ready: wait 0.64 ms (`enum` of the InfiniBand specification, 12), and try again
/// without end (7). Flow control avoids it, except for shares that are sent again by another rail
/// (`flow::recovery`). There waiting is better than a broken QP.
const MIN_RNR_TIMER: u8 = 12;
const RNR_RETRY_FOREVER: u8 = 7;
/// Reads and atomics in flight; the plugin posts none, and providers want at least one.
const MAX_READS: u8 = 1;
const HOP_LIMIT: u8 = 255;

impl Qp {
    /// A new QP in `pd`; its completions, of both queues, go to `cq`. Where the device has less room for inline data than
    /// asked, it gets less, and never more.
    ///
    /// # Errors
    /// [`Error::Os`] when the device refuses.
    pub fn new(pd: &Arc<Pd>, cq: &Cq, caps: QpCaps) -> Result<Self> {
        let context = pd.context();
        let create_qp = context.library.create_qp;
        let in_thread_domain = ThreadDomain::new(pd).and_then(|domain| {
            let created = create(create_qp, domain.raw, cq, caps).map_err(|error| error.to_string())?;
            Ok((created, domain))
        });
        let ((raw, inline_bytes), thread_domain) = match in_thread_domain {
            Ok((created, domain)) => (created, Ok(domain)),
            Err(why) => (create(create_qp, pd.raw, cq, caps)?, Err(why)),
        };
        tell_doorbells(context, &thread_domain);
        // SAFETY: the QP was just made, and its number does not change.
        let number = unsafe { (*raw.as_ptr()).qp_num };
        let empty = ibv_recv_wr { wr_id: 0, next: std::ptr::null_mut(), sg_list: std::ptr::null_mut(), num_sge: 0 };
        let no_segment = ibv_sge { addr: 0, length: 0, lkey: 0 };
        Ok(Self {
            raw,
            number,
            inline_bytes,
            operations: context.operations,
            // SAFETY: integers, pointers and unions of them, for which zero is a value.
            prepared: Box::new(Prepared { request: unsafe { std::mem::zeroed() }, segment: no_segment }),
            receives: vec![empty; caps.receive_requests as usize],
            pd: Arc::clone(pd),
            _thread_domain: thread_domain.ok(),
            _queue: Arc::clone(&cq.queue),
        })
    }

    /// The QP's number, which the peer needs.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The longest write that [`Qp::write_inline`] takes.
    #[inline(always)]
    pub fn inline_bytes(&self) -> u32 {
        self.inline_bytes
    }

    /// RESET to INIT: binds the QP to a port, and lets the peer write.
    ///
    /// # Errors
    /// [`Error::Os`] when the device refuses.
    pub fn init(&mut self, port: u8) -> Result<()> {
        let mut attributes = attributes(IBV_QPS_INIT);
        attributes.port_num = port;
        attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
        self.modify("INIT", attributes, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)
    }

    /// INIT to RTR: connects to the peer's QP. From here on the QP receives.
    ///
    /// # Errors
    /// [`Error::Argument`] for an MTU or GID index that cannot be, [`Error::Os`] when the device refuses, for example
    /// because it finds no path to the peer's address.
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
        attributes.ah_attr.grh.dgid = ibv_gid { raw: path.remote_gid };
        attributes.ah_attr.grh.sgid_index = u8::try_from(path.gid_index)
            .map_err(|_| Error::Argument(format!("GID index {} is above 255", path.gid_index)))?;
        attributes.ah_attr.grh.hop_limit = HOP_LIMIT;
        attributes.ah_attr.grh.traffic_class = path.traffic_class;
        let mask = IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        self.modify("RTR", attributes, mask)
    }

    /// RTR to RTS: from here on the QP also sends.
    ///
    /// # Errors
    /// [`Error::Argument`] for a time-out or retry count out of range, [`Error::Os`] when the device refuses.
    pub fn ready_to_send(&mut self, timing: &Timing) -> Result<()> {
        if timing.timeout > 31 || timing.retry_count > 7 {
            return Err(Error::Argument(format!("{timing:?}: the timeout must be 0 to 31 and the retry count 0 to 7")));
        }
        let mut attributes = attributes(IBV_QPS_RTS);
        attributes.timeout = timing.timeout;
        attributes.retry_cnt = timing.retry_count;
        attributes.rnr_retry = RNR_RETRY_FOREVER;
        attributes.sq_psn = timing.send_psn;
        attributes.max_rd_atomic = MAX_READS;
        let mask = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify("RTS", attributes, mask)
    }

    /// To ERR: nothing more is sent or taken, and what is posted completes as flushed.
    ///
    /// # Errors
    /// [`Error::Os`] when the device refuses.
    pub fn fail(&mut self) -> Result<()> {
        self.modify("ERR", attributes(IBV_QPS_ERR), 0)
    }

    /// The device's name, for error texts.
    pub(super) fn device(&self) -> &str {
        self.pd.context().name()
    }

    fn modify(&mut self, state: &str, mut attributes: ibv_qp_attr, mask: ibv_qp_attr_mask) -> Result<()> {
        let mask = (IBV_QP_STATE | mask).cast_signed();
        // SAFETY: the QP is alive, and the struct lives for the call.
        let status = unsafe { (self.pd.context().library.modify_qp)(self.raw.as_ptr(), &raw mut attributes, mask) };
        match status {
            0 => Ok(()),
            errno => Err(Error::Os {
                what: format!("cannot move QP {} of {} to {state}", self.number, self.device()),
                errno,
            }),
        }
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        let context = self.pd.context();
        // SAFETY: created by us, and destroyed this once.
        let status = unsafe { (context.library.destroy_qp)(self.raw.as_ptr()) };
        note_failure("ibv_destroy_qp", context.name(), status);
    }
}

/// A QP and the inline size that it may use: the size asked for, or the largest of its halves that the device takes.
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
            // mlx5 rounds up (asked for 128 bytes it gives 188: `mlx5_calc_sq_size` in rdma-core's providers/mlx5/verbs.c). What
            // travels inline is not to depend on that.
            return Ok((raw, attributes.cap.max_inline_data.min(inline_bytes)));
        }
        if inline_bytes == 0 {
            let error = std::io::Error::last_os_error();
            let hint = super::memory::memory_hint(error.raw_os_error().unwrap_or(0));
            let QpCaps { send_requests, receive_requests, .. } = caps;
            let device = cq.queue.context.name();
            let what = format!("cannot create a QP of {send_requests} + {receive_requests} requests on {device}{hint}");
            return Err(Error::os(what, &error));
        }
        inline_bytes /= 2;
    }
}

fn attributes(state: ibv_qp_state) -> ibv_qp_attr {
    // SAFETY: integers and a union of integers, for which zero is a value.
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
        _ => Err(Error::Argument(format!("path MTU {bytes} is not 256, 512, 1024, 2048 or 4096"))),
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
