//! One interface to connections over rails and over TCP streams.

use host::error::{Quick, Result};
use nccl_net_spark::comm::{HostMemory, RecvComm, RecvPart, Registration, SendComm};
use std::sync::Arc;

pub trait Sending {
    fn register(&self, memory: HostMemory) -> Result<Arc<Registration>>;
    fn isend(&self, addr: u64, bytes: usize, tag: i32, memory: &Registration)
    -> Quick<Option<u16>>;
    fn test(&self, request: u16) -> Quick<Option<u64>>;
    fn close(&self);
}

pub trait Receiving {
    fn register(&self, memory: HostMemory) -> Result<Arc<Registration>>;
    fn irecv(&self, parts: &[RecvPart<'_>], optional: bool) -> Quick<Option<u16>>;
    fn test(&self, request: u16, tell: impl FnMut(usize, u64)) -> Quick<bool>;
    fn close(&self);
}

impl Sending for SendComm {
    fn register(&self, memory: HostMemory) -> Result<Arc<Registration>> {
        match self {
            Self::Rails(comm) => comm.register(memory),
            Self::Streams(comm) => comm.register(memory),
        }
    }

    fn isend(
        &self,
        addr: u64,
        bytes: usize,
        tag: i32,
        memory: &Registration,
    ) -> Quick<Option<u16>> {
        match self {
            Self::Rails(comm) => comm.isend(addr, bytes, tag, memory),
            Self::Streams(comm) => comm.isend(addr, bytes, tag, memory),
        }
    }

    fn test(&self, request: u16) -> Quick<Option<u64>> {
        match self {
            Self::Rails(comm) => comm.test(request),
            Self::Streams(comm) => comm.test(request),
        }
    }

    fn close(&self) {
        match self {
            Self::Rails(comm) => comm.close(),
            Self::Streams(comm) => comm.close(),
        }
    }
}

impl Receiving for RecvComm {
    fn register(&self, memory: HostMemory) -> Result<Arc<Registration>> {
        match self {
            Self::Rails(comm) => comm.register(memory),
            Self::Streams(comm) => comm.register(memory),
        }
    }

    fn irecv(&self, parts: &[RecvPart<'_>], optional: bool) -> Quick<Option<u16>> {
        match self {
            Self::Rails(comm) => comm.irecv(parts, optional),
            Self::Streams(comm) => comm.irecv(parts, optional),
        }
    }

    fn test(&self, request: u16, tell: impl FnMut(usize, u64)) -> Quick<bool> {
        match self {
            Self::Rails(comm) => comm.test(request, tell),
            Self::Streams(comm) => comm.test(request, tell),
        }
    }

    fn close(&self) {
        match self {
            Self::Rails(comm) => comm.close(),
            Self::Streams(comm) => comm.close(),
        }
    }
}
