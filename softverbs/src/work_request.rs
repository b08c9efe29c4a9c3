//! Work requests: in the form in which a program posts them, and in their form in shared memory.

use crate::os::memory::Piece;
use crate::os::shm::{INLINE_BYTES, MAX_SGES, Slot};
use std::sync::atomic::Ordering;
use verbs_sys::{IBV_WC_RDMA_READ, IBV_WC_RDMA_WRITE, IBV_WC_SEND};

/// A piece of registered memory: `ibv_sge`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sge {
    /// First address.
    pub addr: u64,
    /// Length in bytes.
    pub bytes: u32,
    /// Local key.
    pub lkey: u32,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Receive {
    pub(crate) wr_id: u64,
    pub(crate) sges: [Sge; MAX_SGES],
    pub(crate) count: usize,
}

/// A send request.
#[derive(Debug, Clone, Copy)]
pub struct SendRequest<'a> {
    /// The number by which the program identifies the request.
    pub wr_id: u64,
    /// The operation.
    pub operation: Operation,
    /// True if the request makes a completion.
    pub signaled: bool,
    /// The bytes of an inline request. Of its `sges`, only the sizes are then used.
    pub inline: Option<&'a [u8]>,
    /// True if the request wakes a peer that waits for solicited completions.
    pub solicited: bool,
    /// Immediate data, in the byte order of the sender's memory.
    pub imm: Option<u32>,
    /// Scatter/gather entries of local memory.
    pub sges: &'a [Sge],
    /// Remote address to write or read.
    pub remote_addr: u64,
    /// Remote key for `remote_addr`.
    pub rkey: u32,
}

/// Operation of a send request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Operation {
    /// Writes into the peer's memory.
    Write = 0,
    /// Fills one of the peer's receives.
    Send = 1,
    /// Reads the peer's memory.
    Read = 2,
}

impl Operation {
    pub(crate) fn opcode(self) -> u32 {
        match self {
            Operation::Send => IBV_WC_SEND,
            Operation::Write => IBV_WC_RDMA_WRITE,
            Operation::Read => IBV_WC_RDMA_READ,
        }
    }
}

/// The packed first word of a work request in shared memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head {
    pub(crate) operation: u8,
    pub(crate) has_imm: bool,
    pub(crate) solicited: bool,
    pub(crate) sges: usize,
    pub(crate) inline_bytes: usize,
}

impl Head {
    fn pack(self) -> u64 {
        u64::from(self.operation)
            | u64::from(self.has_imm) << 8
            | u64::from(self.solicited) << 9
            | (self.sges as u64) << 16
            | (self.inline_bytes as u64) << 32
    }

    /// Bounds the counts, because another process wrote the word.
    fn unpack(word: u64) -> Self {
        Self {
            operation: word as u8,
            has_imm: word & 1 << 8 != 0,
            solicited: word & 1 << 9 != 0,
            sges: ((word >> 16) as u16 as usize).min(MAX_SGES),
            inline_bytes: ((word >> 32) as usize).min(INLINE_BYTES),
        }
    }
}

impl SendRequest<'_> {
    /// Writes the request into shared memory, without its inline bytes and its status.
    pub(crate) fn write(&self, slot: &Slot, bytes: u64, inline_bytes: usize, now_ns: u64) {
        let head = Head {
            operation: self.operation as u8,
            has_imm: self.imm.is_some(),
            solicited: self.solicited,
            sges: self.sges.len(),
            inline_bytes,
        };
        slot.head.store(head.pack(), Ordering::Relaxed);
        slot.imm_rkey.store(
            u64::from(self.imm.unwrap_or(0)) | u64::from(self.rkey) << 32,
            Ordering::Relaxed,
        );
        slot.remote_addr.store(self.remote_addr, Ordering::Relaxed);
        slot.bytes.store(bytes, Ordering::Relaxed);
        slot.posted_ns.store(now_ns, Ordering::Relaxed);
        for (place, sge) in slot.sges.iter().zip(self.sges) {
            place[0].store(sge.addr, Ordering::Relaxed);
            place[1].store(u64::from(sge.bytes), Ordering::Relaxed);
        }
    }
}

/// A peer's send request, as read from shared memory. Only the two counts in `head` have been
/// bounded. All other fields have whatever value the peer wrote.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    pub(crate) head: Head,
    pub(crate) imm: u32,
    pub(crate) rkey: u32,
    pub(crate) remote_addr: u64,
    pub(crate) bytes: u64,
    pub(crate) posted_ns: u64,
    pub(crate) status: u32,
    pub(crate) pieces: [Piece; MAX_SGES],
}

impl Request {
    pub(crate) fn read(slot: &Slot) -> Self {
        let head = Head::unpack(slot.head.load(Ordering::Relaxed));
        let imm_rkey = slot.imm_rkey.load(Ordering::Relaxed);
        let mut pieces = [(0, 0); MAX_SGES];
        for (piece, cells) in pieces.iter_mut().zip(&slot.sges).take(head.sges) {
            *piece = (
                cells[0].load(Ordering::Relaxed),
                cells[1].load(Ordering::Relaxed),
            );
        }
        Self {
            head,
            imm: imm_rkey as u32,
            rkey: (imm_rkey >> 32) as u32,
            remote_addr: slot.remote_addr.load(Ordering::Relaxed),
            bytes: slot.bytes.load(Ordering::Relaxed),
            posted_ns: slot.posted_ns.load(Ordering::Relaxed),
            status: slot.status.load(Ordering::Relaxed) as u32,
            pieces,
        }
    }

    pub(crate) fn is_read(&self) -> bool {
        self.head.operation == Operation::Read as u8
    }

    pub(crate) fn needs_receive(&self) -> bool {
        self.head.operation == Operation::Send as u8 || self.head.has_imm
    }
}
