//! Kinds of memory that a job can hand to the plugin.

use crate::net::Pointer;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// Pageable memory of the allocator (`malloc`).
    Malloc,
    /// Memory that CUDA pins, portable and mapped (`cudaHostAlloc`).
    HostAlloc,
    /// Memory of the allocator that CUDA pins afterwards (`cudaHostRegister`).
    HostRegister,
    /// Memory that CPU and GPU share; it moves to the one that uses it (`cudaMallocManaged`).
    Managed,
    /// Memory of the GPU (`cudaMalloc`), registered as if it were the host's.
    Device,
    /// Memory of the GPU, registered as CUDA memory.
    DeviceAsCuda,
}

impl Kind {
    pub const ALL: [Self; 6] =
        [Self::Malloc, Self::HostAlloc, Self::HostRegister, Self::Managed, Self::Device, Self::DeviceAsCuda];

    pub fn name(self) -> &'static str {
        match self {
            Self::Malloc => "malloc",
            Self::HostAlloc => "cudaHostAlloc",
            Self::HostRegister => "cudaHostRegister",
            Self::Managed => "cudaMallocManaged",
            Self::Device => "cudaMalloc",
            Self::DeviceAsCuda => "cudaMalloc, as CUDA",
        }
    }

    /// Returns true for the kinds of NCCL's own buffers, without which NCCL cannot work.
    pub fn must_register(self) -> bool {
        matches!(self, Self::Malloc | Self::HostAlloc | Self::HostRegister)
    }

    pub fn pointer(self) -> Pointer {
        match self {
            Self::DeviceAsCuda => Pointer::Cuda,
            _ => Pointer::Host,
        }
    }
}
