//! Kinds of memory that a job can hand to the plugin.

use crate::net::Pointer;
use serde::{Deserialize, Serialize};

/// A kind of memory, and how it is registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// The allocator's, pageable (`malloc`).
    Malloc,
    /// Pinned by CUDA (`cudaHostAlloc`), portable and mapped.
    HostAlloc,
    /// The allocator's, pinned by CUDA afterwards (`cudaHostRegister`).
    HostRegister,
    /// Shared by processor and GPU, moved on use (`cudaMallocManaged`).
    Managed,
    /// The GPU's own (`cudaMalloc`), registered as if it were the host's.
    Device,
    /// The GPU's own, registered as CUDA memory.
    DeviceAsCuda,
}

impl Kind {
    /// All kinds, in the order of the table.
    pub const ALL: [Self; 6] =
        [Self::Malloc, Self::HostAlloc, Self::HostRegister, Self::Managed, Self::Device, Self::DeviceAsCuda];

    /// Name of the allocating function, as in CUDA's runtime.
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

    /// True for the kinds of NCCL's buffers, which NCCL needs.
    pub fn must_register(self) -> bool {
        matches!(self, Self::Malloc | Self::HostAlloc | Self::HostRegister)
    }

    /// The pointer type for regMr.
    pub fn pointer(self) -> Pointer {
        match self {
            Self::DeviceAsCuda => Pointer::Cuda,
            _ => Pointer::Host,
        }
    }
}
