//! Completion queues. Polling is in `datapath.rs`.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::context::{Context, note_failure};
use host::error::{Call, Error, Result};
use verbs_sys::*;

/// A completion queue. Several QPs may share one.
///
/// The plugin does not create it as single-threaded (`IBV_CREATE_CQ_ATTR_SINGLE_THREADED`): mlx5
/// honours the flag only for `ibv_start_poll`, not for `ibv_poll_cq`. The queue's lock also makes
/// it safe to destroy a QP on one thread while another thread polls.
pub struct Cq {
    pub(super) queue: Arc<RawCq>,
    pub(super) poll_cq: unsafe extern "C" fn(*mut ibv_cq, i32, *mut ibv_wc) -> i32,
}

/// The queue itself. It lives until its `Cq` and every QP on it are dropped.
pub(super) struct RawCq {
    pub(super) raw: NonNull<ibv_cq>,
    pub(super) context: Arc<Context>,
    /// Number of the queue, unique in this process.
    number: usize,
}

// SAFETY: see `Context`; polling takes `&mut` of the one `Cq`.
unsafe impl Send for RawCq {}
// SAFETY: as above.
unsafe impl Sync for RawCq {}

impl Cq {
    /// Creates a queue with room for at least `entries` completions.
    ///
    /// # Errors
    /// [`Error::Os`] if the device refuses, for example because `entries` exceeds its limit.
    pub fn new(context: &Arc<Context>, entries: u32) -> Result<Self> {
        static COUNT: AtomicUsize = AtomicUsize::new(1);
        let count = i32::try_from(entries).unwrap_or(i32::MAX);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let data = std::ptr::without_provenance_mut(number);
        let no_channel = std::ptr::null_mut();
        // SAFETY: the context is open. The user data is never dereferenced. No channel, no events.
        let raw = unsafe {
            (context.library.create_cq)(context.raw.as_ptr(), count, data, no_channel, 0)
        };
        let raw = NonNull::new(raw).ok_or_else(|| {
            let error = std::io::Error::last_os_error();
            let hint = super::memory::memory_hint(error.raw_os_error().unwrap_or(0));
            Error::os(
                Call::CreateCq {
                    device: context.name().to_owned(),
                    entries,
                    hint,
                },
                &error,
            )
        })?;
        let queue = Arc::new(RawCq {
            raw,
            context: Arc::clone(context),
            number,
        });
        Ok(Self {
            queue,
            poll_cq: context.operations.poll_cq,
        })
    }

    /// Returns the queue's number, which [`super::AsyncEvent::cq`] refers to.
    pub fn number(&self) -> usize {
        self.queue.number
    }
}

impl Drop for RawCq {
    fn drop(&mut self) {
        // SAFETY: created by this type; every QP on it held an `Arc` of this and has been dropped.
        let status = unsafe { (self.context.library.destroy_cq)(self.raw.as_ptr()) };
        note_failure("ibv_destroy_cq", self.context.name(), status);
    }
}

/// Reusable buffer for the results of [`Cq::poll`].
pub struct CompletionBuffer(pub(super) [Completion; Self::CAPACITY]);

impl CompletionBuffer {
    /// Largest number of completions that one poll returns.
    pub const CAPACITY: usize = 16;

    /// Creates an empty buffer.
    pub fn new() -> Self {
        // SAFETY: integers and a union of integers; all zero is a valid value.
        Self(unsafe { std::mem::zeroed() })
    }
}

impl Default for CompletionBuffer {
    fn default() -> Self {
        Self::new()
    }
}

/// A completed or failed work request; if failed, only `wr_id`, `status`, `vendor_error` and
/// `qp_num` are defined.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Completion(ibv_wc);

/// Likely cause of a failed work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    /// The path, or an earlier failure of the QP.
    Path,
    /// The request: a length or address that is not allowed on any QP.
    Request,
    /// A key that is wrong, or whose device is being removed. When Linux removes a device, it
    /// destroys a program's objects newest first (`__uverbs_cleanup_ufile` in
    /// drivers/infiniband/core/rdma_core.c). Buffers are registered after the QPs are created, so
    /// their keys become invalid while the QPs still work.
    Key,
    /// The path or the request. A responder reports "invalid request" also for a packet that is out
    /// of order or has the wrong length within a message (`check_op_seq` and `check_rkey` in
    /// Linux's rxe_resp.c). Soft-RoCE does so occasionally when rails are pulled under load.
    Either,
}

impl Completion {
    /// Returns the id that the work request was posted with.
    #[inline]
    pub fn wr_id(&self) -> u64 {
        self.0.wr_id
    }

    /// Returns the status (`enum ibv_wc_status`): 0 for success.
    #[inline]
    pub fn status(&self) -> u32 {
        self.0.status
    }

    /// Returns the status as text.
    pub fn status_text(&self) -> &'static str {
        status_text(self.0.status)
    }

    /// Returns true if no acknowledgement came: packets or acknowledgements were lost.
    pub fn is_unacknowledged(&self) -> bool {
        self.0.status == IBV_WC_RETRY_EXC_ERR
    }

    /// Returns the likely cause of a failure. Meaningless for success.
    pub fn blame(&self) -> Blame {
        match self.0.status {
            IBV_WC_LOC_LEN_ERR | IBV_WC_MW_BIND_ERR | IBV_WC_LOC_ACCESS_ERR => Blame::Request,
            IBV_WC_LOC_PROT_ERR | IBV_WC_REM_ACCESS_ERR => Blame::Key,
            IBV_WC_LOC_QP_OP_ERR | IBV_WC_REM_INV_REQ_ERR | IBV_WC_REM_OP_ERR => Blame::Either,
            _ => Blame::Path,
        }
    }

    /// Returns true for a write with immediate data from the peer.
    #[inline]
    pub fn is_receive_immediate(&self) -> bool {
        self.0.opcode == IBV_WC_RECV_RDMA_WITH_IMM
    }

    /// For a completed receive: returns the number of bytes that the peer wrote.
    #[inline]
    pub fn bytes(&self) -> u32 {
        self.0.byte_len
    }

    /// Returns the immediate data as the peer passed it to its write.
    #[inline]
    pub fn immediate(&self) -> u32 {
        // SAFETY: both members of the union are 32 plain bits.
        u32::from_be(unsafe { self.0.__bindgen_anon_1.imm_data })
    }

    /// Returns the number of the QP that the work request was posted to.
    #[inline]
    pub fn qp_num(&self) -> u32 {
        self.0.qp_num
    }

    /// Returns the vendor's error code.
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
    fn every_status_has_its_own_text() {
        let words: std::collections::HashSet<_> =
            (0..=IBV_WC_TM_RNDV_INCOMPLETE).map(status_text).collect();
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
