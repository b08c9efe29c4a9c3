//! Operations for each message. They allocate and format only after a failed call.

use std::ptr::null_mut;

use super::barrier::order_loads;
use super::cq::{Completion, CompletionBuffer, Cq};
use super::memory::Readable;
use super::qp::{Prepared, Qp};
use host::error::{Argument, Call, Error, Quick};
use verbs_sys::*;

/// An address in the peer's memory, with its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Remote {
    /// Address in the peer.
    pub addr: u64,
    /// The peer's key for the memory.
    pub rkey: u32,
}

/// An RDMA write from registered memory.
#[derive(Debug, Clone, Copy)]
pub struct Write {
    /// Address of the bytes.
    pub local_addr: u64,
    /// Number of bytes. If it is 0, `local_addr` and `lkey` are ignored.
    pub bytes: u32,
    /// Key of the registration that contains the bytes.
    pub lkey: u32,
    /// Destination.
    pub remote: Remote,
    /// 32 bits that the peer receives in a completion once the bytes have arrived.
    pub immediate: Option<u32>,
    /// Identifier returned in the completion.
    pub wr_id: u64,
    /// True to get a completion on success. A failure always produces one.
    pub signaled: bool,
}

impl Qp {
    /// Posts a write. The NIC may read the bytes until this or a later write on the QP completes.
    ///
    /// # Errors
    /// [`Error::Os`] if the QP refuses it: `ENOMEM` for a full queue, other codes for a QP in the
    /// wrong state.
    #[inline(always)]
    pub fn write(&mut self, write: &Write) -> Quick<()> {
        self.post_write(write, 0)
    }

    /// Posts a write whose bytes are copied into the work request, so `bytes` is free on return.
    /// The copy follows all earlier reads of the caller, such as the read of a flag by which a GPU
    /// announces the bytes.
    ///
    /// # Errors
    /// [`Error::Argument`] for more bytes than [`Qp::inline_bytes`]; otherwise as [`Qp::write`].
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
        let local_addr = bytes.addr;
        let bytes = bytes.bytes;
        // The provider copies the bytes with loads of this processor.
        order_loads();
        self.post_write(
            &Write {
                local_addr,
                bytes,
                lkey: 0,
                remote,
                immediate,
                wr_id,
                signaled,
            },
            IBV_SEND_INLINE,
        )
    }

    /// Posts `count` receives, all with identifier `wr_id`. They have no memory, because they only
    /// receive immediate data of the peer's writes.
    ///
    /// # Errors
    /// [`Error::Argument`] if `count` exceeds the queue's size. [`Error::Os`] if the QP refuses a
    /// receive; the receives before that one may then be posted.
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
                let next = if index + 1 < count {
                    first.add(index + 1)
                } else {
                    null_mut()
                };
                let request = first.add(index);
                (*request).wr_id = wr_id;
                (*request).next = next;
            }
        }
        let mut refused = null_mut();
        // SAFETY: the QP is alive, the chain ends in the array, and the provider copies requests.
        let status =
            unsafe { (self.operations.post_recv)(self.raw.as_ptr(), first, &raw mut refused) };
        if status != 0 {
            return Err(self.refused(|device, qp| Call::PostReceives { device, qp }, status));
        }
        Ok(())
    }

    #[inline(always)]
    fn post_write(&mut self, write: &Write, flags: ibv_send_flags) -> Quick<()> {
        let Write {
            local_addr,
            bytes,
            lkey,
            remote,
            immediate,
            wr_id,
            signaled,
        } = *write;
        let flags = flags | if signaled { IBV_SEND_SIGNALED } else { 0 };
        // Set only the fields that differ between writes. `Qp::new` has set the others.
        let Prepared { request, segment } = &mut *self.prepared;
        *segment = ibv_sge {
            addr: local_addr,
            length: bytes,
            lkey,
        };
        request.wr_id = wr_id;
        request.num_sge = i32::from(bytes != 0);
        request.send_flags = flags;
        request.opcode = IBV_WR_RDMA_WRITE;
        if let Some(immediate) = immediate {
            request.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
            request.__bindgen_anon_1.imm_data = immediate.to_be();
        }
        request.wr.rdma = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 {
            remote_addr: remote.addr,
            rkey: remote.rkey,
        };
        request.sg_list = segment;
        let mut refused = null_mut();
        // SAFETY: the QP is alive. The request and its segment live as long as the QP, and the
        // provider copies them. The NIC reads only registered memory; inline, the provider reads
        // memory that is readable during the call.
        let status =
            unsafe { (self.operations.post_send)(self.raw.as_ptr(), request, &raw mut refused) };
        if status != 0 {
            return Err(self.refused(|device, qp| Call::PostWrite { device, qp }, status));
        }
        Ok(())
    }

    #[cold]
    fn refused(&self, call: impl FnOnce(String, u32) -> Call, status: i32) -> Box<Error> {
        // The provider returns the errno; a few old providers return -1 and set errno.
        let errno = if status > 0 {
            status
        } else {
            std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
        };
        Box::new(Error::Os {
            call: call(self.device().to_owned(), self.number()),
            errno,
        })
    }

    #[cold]
    fn too_long_for_inline(&self, bytes: u32) -> Box<Error> {
        Box::new(
            Argument::Inline {
                bytes,
                most: self.inline_bytes(),
            }
            .into(),
        )
    }

    #[cold]
    fn too_many_receives(&self, count: usize) -> Box<Error> {
        Box::new(
            Argument::Receives {
                count,
                most: self.receives.len(),
            }
            .into(),
        )
    }
}

impl Cq {
    /// Returns the oldest completions that no poll has returned yet, at most as many as fit the
    /// buffer.
    ///
    /// # Errors
    /// [`Error::Os`] if the queue has failed.
    #[inline(always)]
    pub fn poll<'a>(&mut self, buffer: &'a mut CompletionBuffer) -> Quick<&'a [Completion]> {
        let first: *mut ibv_wc = buffer.0.as_mut_ptr().cast();
        // SAFETY: the queue is alive. The buffer has CAPACITY `Completion`s, laid out as `ibv_wc`.
        let found = unsafe {
            (self.poll_cq)(
                self.queue.raw.as_ptr(),
                CompletionBuffer::CAPACITY as i32,
                first,
            )
        };
        match usize::try_from(found) {
            Ok(found) => Ok(&buffer.0[..found.min(CompletionBuffer::CAPACITY)]),
            Err(_) => Err(self.broken()),
        }
    }

    #[cold]
    fn broken(&self) -> Box<Error> {
        Box::new(Error::last_os(Call::Poll {
            device: self.queue.context.name().to_owned(),
        }))
    }
}
