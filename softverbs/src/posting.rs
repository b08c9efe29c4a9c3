//! Posting sends: checks a request, writes it to shared memory, and rings the peer's doorbell.

use crate::engine;
use crate::fabric::lock;
use crate::os::memory;
use crate::os::shm::{INLINE_BYTES, RailMemory, SEND_SLOTS, Slot};
use crate::queue_pair::{QueuePair, Sent, State};
use crate::status;
use crate::work_request::{Operation, SendRequest, Sge};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl QueuePair {
    /// Posts a send.
    ///
    /// # Errors
    /// `EINVAL` if the queue pair's state does not allow sends, or if the inline bytes do not fit
    /// the request's operation or size. `ENOMEM` if the queue is full, as an injected fault, or for
    /// more scatter/gather entries or inline bytes than the queue pair accepts (`_mlx5_post_send`
    /// and `set_data_inl_seg` in rdma-core's providers/mlx5/qp.c).
    pub fn post_send(self: &Arc<Self>, request: &SendRequest<'_>) -> Result<(), i32> {
        let mut local = lock(&self.local);
        let bytes: u64 = request.sges.iter().map(|sge| u64::from(sge.bytes)).sum();
        let wrong_inline = request.inline.is_some_and(|carried| {
            carried.len() as u64 != bytes || request.operation == Operation::Read
        });
        if wrong_inline || !matches!(local.state, State::ReadyToSend | State::Error) {
            return Err(libc::EINVAL);
        }
        let is_long = request.inline.is_some() && bytes > u64::from(self.caps().inline_bytes);
        if is_long || request.sges.len() > self.caps().sges as usize {
            return Err(libc::ENOMEM);
        }
        let memory = self.memory();
        let posted = memory.posted.load(Ordering::Relaxed);
        if posted - local.freed >= u64::from(self.caps().send_requests) {
            return Err(libc::ENOMEM);
        }
        if RailMemory::is_due(&self.rail().failing_posts) {
            return Err(libc::ENOMEM);
        }
        let now = self.node.memory.now_ns();
        let slot = memory.slot(posted);
        let status = if self.keys_allow(request) {
            0
        } else {
            status::LOCAL_PROTECTION
        };
        let inline_bytes = if status == 0 {
            self.copy_inline(slot, request, bytes)
        } else {
            0
        };
        request.write(slot, bytes, inline_bytes, now);
        slot.status.store(u64::from(status), Ordering::Relaxed);
        let signaled = request.signaled || self.caps().signal_all;
        local.sent[posted as usize % SEND_SLOTS] = Sent {
            wr_id: request.wr_id,
            opcode: request.operation.opcode(),
            signaled,
            bytes: bytes as u32,
        };
        memory.posted.store(posted + 1, Ordering::Release);
        let remote = local.remote;
        drop(local);
        self.expect_ends();
        if let Some(remote) = remote
            && self
                .node
                .qp_memory(remote.slot)
                .number
                .load(Ordering::Acquire)
                == remote.number
        {
            engine::ring(self.node.memory, remote.slot, now);
        }
        Ok(())
    }

    fn keys_allow(&self, request: &SendRequest<'_>) -> bool {
        let access = if request.operation == Operation::Read {
            status::LOCAL_WRITE
        } else {
            0
        };
        let allowed = |sge: &Sge| {
            sge.bytes == 0 || self.allows(sge.lkey, sge.addr, u64::from(sge.bytes), access)
        };
        request.inline.is_some() || request.sges.iter().all(allowed)
    }

    /// Copies the bytes of a small write or send into its slot in shared memory, so that the peer
    /// needs no system call to read them. Returns the number of bytes copied: 0 for other requests.
    fn copy_inline(&self, slot: &Slot, request: &SendRequest<'_>, bytes: u64) -> usize {
        if bytes == 0 || bytes > INLINE_BYTES as u64 || request.operation == Operation::Read {
            return 0;
        }
        let mut carried = [0u8; INLINE_BYTES];
        match request.inline {
            Some(inline) => carried[..inline.len()].copy_from_slice(inline),
            None => {
                let mut at = 0;
                for sge in request.sges {
                    let end = at + sge.bytes as usize;
                    memory::take_registered(sge.addr, &mut carried[at..end]);
                    at = end;
                }
            }
        }
        let bytes = bytes as usize;
        for (cell, word) in slot
            .inline
            .iter()
            .zip(carried.chunks_exact(8))
            .take(bytes.div_ceil(8))
        {
            let word: [u8; 8] = word.try_into().unwrap_or_default();
            cell.store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
        bytes
    }
}
