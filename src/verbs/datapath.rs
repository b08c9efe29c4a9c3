//! What is called for every message: posting writes and receives, and polling. Nothing here allocates or formats, save
//! where a call has failed.

use std::ptr::null_mut;

use super::barrier::order_loads;
use super::cq::{Completion, CompletionBuffer, Cq};
use super::memory::Readable;
use super::qp::{Prepared, Qp};
use crate::error::{Error, Quick};
use verbs_sys::*;

/// Memory of the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Remote {
    /// Its address there.
    pub addr: u64,
    /// The peer's key for it.
    pub rkey: u32,
}

/// An RDMA write from registered memory.
#[derive(Debug, Clone, Copy)]
pub struct Write {
    /// Where the bytes are.
    pub local_addr: u64,
    /// How many; with 0 the address and key are not looked at.
    pub bytes: u32,
    /// The key of the registration that they are in.
    pub lkey: u32,
    /// Where they go.
    pub remote: Remote,
    /// A word that the peer gets with a completion, once the bytes are there.
    pub immediate: Option<u32>,
    /// Comes back in the completion.
    pub wr_id: u64,
    /// Whether success makes a completion. Failure always does.
    pub signaled: bool,
}

impl Qp {
    /// Posts a write. The bytes are read some time before its completion, or that of a later one on this QP.
    ///
    /// # Errors
    /// [`Error::Os`] when the QP does not take it: `ENOMEM` for a full queue, others for a QP in the wrong state.
    #[inline(always)]
    pub fn write(&mut self, write: &Write) -> Quick<()> {
        self.post_write(write, 0)
    }

    /// Posts a write whose bytes are copied into the work request: `bytes` is free again when this returns. They are read after
    /// whatever the caller has read before, such as the flag by which a GPU says that they are there.
    ///
    /// # Errors
    /// [`Error::Argument`] when there are more bytes than [`Qp::inline_bytes`]; else as [`Qp::write`].
    #[inline(always)]
    pub fn write_inline(
        &mut self,
        bytes: Readable<'_>,
        remote: Remote,
        immediate: Option<u32>,
        wr_id: u64,
        signaled: bool,
    ) -> Quick<()> {
        if bytes.bytes > self.inline_bytes() {
            return Err(self.too_long_for_inline(bytes.bytes));
        }
        let (local_addr, bytes) = (bytes.addr, bytes.bytes);
        // The provider copies with loads of this processor.
        order_loads();
        self.post_write(&Write { local_addr, bytes, lkey: 0, remote, immediate, wr_id, signaled }, IBV_SEND_INLINE)
    }

    /// Posts `count` receives without memory, for as many writes with immediate data; each completes with `wr_id`.
    ///
    /// # Errors
    /// [`Error::Argument`] when `count` is over what the queue was made for, [`Error::Os`] when the QP does not take them
    /// (some may then be posted).
    #[inline(always)]
    pub fn post_receives(&mut self, count: u32, wr_id: u64) -> Quick<()> {
        let count = count as usize;
        if count > self.receives.len() {
            return Err(self.too_many_receives(count));
        }
        if count == 0 {
            return Ok(());
        }
        let first = self.receives.as_mut_ptr();
        for index in 0..count {
            // SAFETY: `index` is within the array, and `index + 1` at most one past it.
            unsafe {
                let next = if index + 1 < count { first.add(index + 1) } else { null_mut() };
                let request = first.add(index);
                (*request).wr_id = wr_id;
                (*request).next = next;
            }
        }
        let mut refused = null_mut();
        // SAFETY: the QP is alive, and the chain ends within the array. The provider copies what it needs of it.
        let status = unsafe { (self.operations.post_recv)(self.raw.as_ptr(), first, &raw mut refused) };
        if status != 0 {
            return Err(self.refused("cannot post receives", status));
        }
        Ok(())
    }

    #[inline(always)]
    fn post_write(&mut self, write: &Write, flags: ibv_send_flags) -> Quick<()> {
        let Write { local_addr, bytes, lkey, remote, immediate, wr_id, signaled } = *write;
        let flags = flags | if signaled { IBV_SEND_SIGNALED } else { 0 };
        // Only what differs from one write to the next is written; the rest was when the QP was made.
        let Prepared { request, segment } = &mut *self.prepared;
        *segment = ibv_sge { addr: local_addr, length: bytes, lkey };
        request.wr_id = wr_id;
        request.num_sge = i32::from(bytes != 0);
        request.send_flags = flags;
        request.opcode = IBV_WR_RDMA_WRITE;
        if let Some(immediate) = immediate {
            request.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
            request.__bindgen_anon_1.imm_data = immediate.to_be();
        }
        request.wr.rdma = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: remote.addr, rkey: remote.rkey };
        request.sg_list = segment;
        let mut refused = null_mut();
        // SAFETY: the QP is alive; the request and its segment live as long as the QP, and the provider copies them. The NIC
        // reads only memory that a registration covers; inline, the provider reads what is readable for the call.
        let status = unsafe { (self.operations.post_send)(self.raw.as_ptr(), request, &raw mut refused) };
        if status != 0 {
            return Err(self.refused("cannot post a write", status));
        }
        Ok(())
    }

    #[cold]
    fn refused(&self, what: &str, status: i32) -> Box<Error> {
        // The provider returns the errno; a few old ones return -1 and set it.
        let errno = if status > 0 { status } else { std::io::Error::last_os_error().raw_os_error().unwrap_or(0) };
        Box::new(Error::Os { what: format!("{what} on QP {} of {}", self.number(), self.device()), errno })
    }

    #[cold]
    fn too_long_for_inline(&self, bytes: u32) -> Box<Error> {
        Box::new(Error::Argument(format!("{bytes} inline bytes on a QP that takes {}", self.inline_bytes())))
    }

    #[cold]
    fn too_many_receives(&self, count: usize) -> Box<Error> {
        Box::new(Error::Argument(format!("{count} receives on a QP that holds {}", self.receives.len())))
    }
}

impl Cq {
    /// What has completed since the last poll, oldest first, at most as many as the buffer holds.
    ///
    /// # Errors
    /// [`Error::Os`] when the queue is broken.
    #[inline(always)]
    pub fn poll<'a>(&mut self, buffer: &'a mut CompletionBuffer) -> Quick<&'a [Completion]> {
        let first: *mut ibv_wc = buffer.0.as_mut_ptr().cast();
        // SAFETY: the queue is alive; `Completion` is `ibv_wc`, of which the buffer has as many as said.
        let found = unsafe { (self.poll_cq)(self.queue.raw.as_ptr(), CompletionBuffer::CAPACITY as i32, first) };
        match usize::try_from(found) {
            Ok(found) => Ok(&buffer.0[..found.min(CompletionBuffer::CAPACITY)]),
            Err(_) => Err(self.broken()),
        }
    }

    #[cold]
    fn broken(&self) -> Box<Error> {
        Box::new(Error::last_os(format!("cannot poll a CQ of {}", self.queue.context.name())))
    }
}
