//! Completion queues. Polling is in `datapath.rs`.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::context::{Context, note_failure};
use crate::error::{Error, Result};
use verbs_sys::*;

/// A completion queue; completions of several QPs may go to one.
///
/// It is not created as single-threaded (`IBV_CREATE_CQ_ATTR_SINGLE_THREADED`): mlx5 heeds that only when polled through
/// `ibv_start_poll`, not through `ibv_poll_cq`; and its lock is what makes destroying a QP on one thread right while
/// another polls.
pub struct Cq {
    pub(super) queue: Arc<Queue>,
    pub(super) poll_cq: unsafe extern "C" fn(*mut ibv_cq, i32, *mut ibv_wc) -> i32,
}

/// The queue itself, which lives until its `Cq` and every QP on it are gone.
pub(super) struct Queue {
    pub(super) raw: NonNull<ibv_cq>,
    pub(super) context: Arc<Context>,
    /// Its number in this process, which no other queue gets.
    number: usize,
}

// SAFETY: see `Context`; polling takes `&mut` of the one `Cq`.
unsafe impl Send for Queue {}
// SAFETY: as above.
unsafe impl Sync for Queue {}

impl Cq {
    /// A queue with room for at least `entries` completions.
    ///
    /// # Errors
    /// [`Error::Os`] when the device refuses, for example because `entries` is over its limit.
    pub fn new(context: &Arc<Context>, entries: u32) -> Result<Self> {
        static COUNT: AtomicUsize = AtomicUsize::new(1);
        let count = i32::try_from(entries).unwrap_or(i32::MAX);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let (data, no_channel) = (std::ptr::without_provenance_mut(number), std::ptr::null_mut());
        // SAFETY: the context is open; the data is a number, which nobody follows; without a channel, no events of completions.
        let raw = unsafe { (context.library.create_cq)(context.raw.as_ptr(), count, data, no_channel, 0) };
        let raw = NonNull::new(raw).ok_or_else(|| {
            let error = std::io::Error::last_os_error();
            let hint = super::memory::memory_hint(error.raw_os_error().unwrap_or(0));
            Error::os(format!("cannot create a CQ of {entries} entries on {}{hint}", context.name()), &error)
        })?;
        let queue = Arc::new(Queue { raw, context: Arc::clone(context), number });
        Ok(Self { queue, poll_cq: context.operations.poll_cq })
    }

    /// Its number, by which [`super::AsyncEvent::cq`] names it.
    pub fn number(&self) -> usize {
        self.queue.number
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: created by us; every QP on it held an `Arc` of this and is gone.
        let status = unsafe { (self.context.library.destroy_cq)(self.raw.as_ptr()) };
        note_failure("ibv_destroy_cq", self.context.name(), status);
    }
}

/// Where [`Cq::poll`] puts what it found; made once and used again.
pub struct CompletionBuffer(pub(super) [Completion; Self::CAPACITY]);

impl CompletionBuffer {
    /// How many completions one poll takes at most.
    pub const CAPACITY: usize = 16;

    /// An empty buffer.
    pub fn new() -> Self {
        // SAFETY: integers and a union of integers, for which zero is a value.
        Self(unsafe { std::mem::zeroed() })
    }
}

impl Default for CompletionBuffer {
    fn default() -> Self {
        Self::new()
    }
}

/// A work request that is done, or failed. Of a failed one, only `wr_id`, `status`, `vendor_error` and `qp_num` mean
/// anything.
#[repr(transparent)]
pub struct Completion(ibv_wc);

/// What a failed work request blames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    /// The path, or that the QP had failed before.
    Path,
    /// What was asked for: a length or address that is not allowed, on any QP.
    Request,
    /// A key: it is wrong, or it is that of a device that is being taken away. Linux destroys what a program has made there newest first,
    /// and so the registrations of buffers before the QPs (`__uverbs_cleanup_ufile` in drivers/infiniband/core/rdma_core.c).
    Key,
    /// One or the other. "Invalid request" is also what a responder says of a packet out of its turn or of the wrong length within a
    /// message (`check_op_seq` and `check_rkey` in Linux's rxe_resp.c), and soft-RoCE comes to that now and then where rails are pulled
    /// under load.
    Either,
}

impl Completion {
    /// What the work request was posted with.
    #[inline]
    pub fn wr_id(&self) -> u64 {
        self.0.wr_id
    }

    /// `enum ibv_wc_status`: 0 when it succeeded.
    #[inline]
    pub fn status(&self) -> u32 {
        self.0.status
    }

    /// The status in words.
    pub fn status_text(&self) -> &'static str {
        status_text(self.0.status)
    }

    /// Whether the peer acknowledged nothing: what was sent, or its answer, got lost on the way.
    pub fn is_unacknowledged(&self) -> bool {
        self.0.status == IBV_WC_RETRY_EXC_ERR
    }

    /// What its status blames; of no use for one that succeeded.
    pub fn blame(&self) -> Blame {
        match self.0.status {
            IBV_WC_LOC_LEN_ERR | IBV_WC_MW_BIND_ERR | IBV_WC_LOC_ACCESS_ERR => Blame::Request,
            IBV_WC_LOC_PROT_ERR | IBV_WC_REM_ACCESS_ERR => Blame::Key,
            IBV_WC_LOC_QP_OP_ERR | IBV_WC_REM_INV_REQ_ERR | IBV_WC_REM_OP_ERR => Blame::Either,
            _ => Blame::Path,
        }
    }

    /// Whether it is a write with immediate data that came from the peer.
    #[inline]
    pub fn is_receive_immediate(&self) -> bool {
        self.0.opcode == IBV_WC_RECV_RDMA_WITH_IMM
    }

    /// How many bytes the peer wrote, for a receive.
    #[inline]
    pub fn bytes(&self) -> u32 {
        self.0.byte_len
    }

    /// The immediate data, as the peer passed it to its write.
    #[inline]
    pub fn immediate(&self) -> u32 {
        // SAFETY: both members of the union are 32 plain bits.
        u32::from_be(unsafe { self.0.__bindgen_anon_1.imm_data })
    }

    /// The number of the QP it was posted to.
    #[inline]
    pub fn qp_num(&self) -> u32 {
        self.0.qp_num
    }

    /// The vendor's own code for the error.
    pub fn vendor_error(&self) -> u32 {
        self.0.vendor_err
    }
}

fn status_text(status: ibv_wc_status) -> &'static str {
    match status {
        IBV_WC_SUCCESS => "success",
        IBV_WC_LOC_LEN_ERR => "local length error",
        IBV_WC_LOC_QP_OP_ERR => "local QP operation error",
        IBV_WC_LOC_EEC_OP_ERR => "local EE context operation error",
        IBV_WC_LOC_PROT_ERR => "local protection error",
        IBV_WC_WR_FLUSH_ERR => "flushed: the QP was already in error",
        IBV_WC_MW_BIND_ERR => "memory window bind error",
        IBV_WC_BAD_RESP_ERR => "bad response from the peer",
        IBV_WC_LOC_ACCESS_ERR => "local access error",
        IBV_WC_REM_INV_REQ_ERR => "peer rejected the request",
        IBV_WC_REM_ACCESS_ERR => "peer denied access to its memory, or its process has just ended",
        IBV_WC_REM_OP_ERR => "peer could not complete the request",
        IBV_WC_RETRY_EXC_ERR => "no acknowledgement from the peer after all retries",
        IBV_WC_RNR_RETRY_EXC_ERR => "peer had no receive posted after all retries",
        IBV_WC_LOC_RDD_VIOL_ERR => "local RDD violation",
        IBV_WC_REM_INV_RD_REQ_ERR => "invalid RD request",
        IBV_WC_REM_ABORT_ERR => "aborted by the peer",
        IBV_WC_INV_EECN_ERR => "invalid EE context number",
        IBV_WC_INV_EEC_STATE_ERR => "invalid EE context state",
        IBV_WC_FATAL_ERR => "fatal error",
        IBV_WC_RESP_TIMEOUT_ERR => "response timeout",
        IBV_WC_GENERAL_ERR => "general error",
        IBV_WC_TM_ERR => "tag matching error",
        IBV_WC_TM_RNDV_INCOMPLETE => "tag matching rendezvous incomplete",
        _ => "unknown status",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_words_of_its_own() {
        let words: std::collections::HashSet<_> = (0..=IBV_WC_TM_RNDV_INCOMPLETE).map(status_text).collect();
        assert_eq!(words.len(), 24);
        assert!(!words.contains("unknown status"));
        assert_eq!(status_text(99), "unknown status");
    }

    #[test]
    fn an_immediate_is_read_in_network_order() {
        let CompletionBuffer([mut completion, ..]) = CompletionBuffer::new();
        completion.0.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
        completion.0.__bindgen_anon_1.imm_data = u32::from_ne_bytes([1, 2, 3, 4]);
        assert!(completion.is_receive_immediate());
        assert_eq!(completion.immediate(), 0x0102_0304);
    }
}
