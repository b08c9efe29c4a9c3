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
    /// Memory that CPU and GPU share (`cudaMallocManaged`). Its pages move to the side that uses
    /// them.
    Managed,
    /// Memory of the GPU (`cudaMalloc`), registered with the plugin as if it were host memory.
    Device,
    /// Memory of the GPU (`cudaMalloc`), registered with the plugin as CUDA memory.
    DeviceAsCuda,
}

impl Kind {
    pub const ALL: [Self; 6] = [
        Self::Malloc,
        Self::HostAlloc,
        Self::HostRegister,
        Self::Managed,
        Self::Device,
        Self::DeviceAsCuda,
    ];

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

    /// Returns true for the kinds of memory that NCCL's own buffers have. NCCL cannot work with a
    /// plugin that fails to register these kinds.
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
