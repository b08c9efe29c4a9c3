//! Safe owners of the objects of CUDA's driver. In `gpu`, only this folder contains `unsafe`.
//!
//! `driver` has the driver's functions and contexts, `memory` the allocations, `lines` the kernels
//! of the litmus test. This file runs the kernels that fill memory with a pattern and check it.
//! Everything lives on one thread (`Rc`), and each call makes its GPU's context current, because
//! two GPUs may be in use.

mod driver;
pub mod lines;
mod memory;

pub use driver::{Driver, GpuInfo};

use super::kind::Kind;
use super::pattern::{Pattern, Wrong, span};
use crate::net::{Buffer, Heap};
use anyhow::{Context as _, Result};
use driver::{Address, Context, Functions, Object, arguments};
use memory::Allocation;
use std::ffi::{CString, c_uint, c_void};
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::rc::Rc;

/// Kernels as PTX, for any GPU that CUDA 13 supports. The driver translates them.
const KERNELS: &str = include_str!("../kernels.ptx");
const BLOCKS: c_uint = 128;
const THREADS: c_uint = 256;

pub(crate) struct Gpu {
    // The fields are freed in this order.
    tally: Allocation,
    module: Module,
    context: Rc<Context>,
    about: GpuInfo,
}

pub(crate) struct Block {
    buffer: Rc<Buffer>,
    /// True if the block's address may be different for a GPU.
    is_mapped: bool,
}

struct Module {
    raw: Object,
    fill: Object,
    check: Object,
    litmus_store: Object,
    litmus_load: Object,
    context: Rc<Context>,
}

impl Module {
    fn load(context: &Rc<Context>) -> Result<Self> {
        let text = CString::new(KERNELS)?;
        let null = ptr::null_mut();
        let context_of = Rc::clone(context);
        let mut module = Self {
            raw: null,
            fill: null,
            check: null,
            litmus_store: null,
            litmus_load: null,
            context: context_of,
        };
        // SAFETY: `raw` is valid for writes during the call; the text is PTX and ends with NUL.
        context.call("cuModuleLoadData", |functions| unsafe {
            (functions.module_load)(&mut module.raw, text.as_ptr().cast())
        })?;
        for (name, function) in [
            (c"nccl_spark_fill", &mut module.fill),
            (c"nccl_spark_check", &mut module.check),
            (c"nccl_spark_litmus_store", &mut module.litmus_store),
            (c"nccl_spark_litmus_load", &mut module.litmus_load),
        ] {
            // SAFETY: the module was just loaded; `function` is valid for writes during the call.
            context.call("cuModuleGetFunction", |functions| unsafe {
                (functions.module_function)(function, module.raw, name.as_ptr())
            })?;
        }
        Ok(module)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.raw.is_null() {
            return;
        }
        // SAFETY: loaded by `load` and unloaded once. No kernel of the module runs: `Gpu::run`
        // waits for its kernel, and `Lines` holds the GPU until its own drop has waited for the
        // kernels.
        self.context
            .give_back("cuModuleUnload", |functions| unsafe {
                (functions.module_unload)(self.raw)
            });
    }
}

impl Gpu {
    /// Opens a GPU. Fails when there is no such GPU, or the driver refuses a call.
    pub fn open(driver: &Rc<Driver>, number: u32) -> Result<Self> {
        let device = driver.device(number)?;
        let open = || {
            let about = driver.about(number, device)?;
            let context = Context::retain(driver, device)?;
            let module = Module::load(&context)?;
            let tally = Allocation::new(&context, Kind::Device, size_of::<[u32; 2]>())?;
            anyhow::Ok(Self {
                tally,
                module,
                context,
                about,
            })
        };
        open().with_context(|| format!("open GPU {number}"))
    }

    pub fn about(&self) -> &GpuInfo {
        &self.about
    }

    pub fn name(&self) -> String {
        format!("GPU {}", self.about.number)
    }

    pub(crate) fn free_bytes(&self) -> Result<usize> {
        let mut free = 0;
        let mut total = 0;
        // SAFETY: both are valid for writes during the call.
        self.context.call("cuMemGetInfo", |functions| unsafe {
            (functions.memory_info)(&mut free, &mut total)
        })?;
        Ok(free)
    }

    /// Allocates `bytes` (1 or more).
    pub(crate) fn allocate(&self, kind: Kind, bytes: usize) -> Result<Block> {
        let buffer = Buffer::of(Allocation::new(&self.context, kind, bytes)?);
        Ok(Block {
            buffer,
            is_mapped: matches!(kind, Kind::HostAlloc | Kind::HostRegister),
        })
    }

    /// Writes `pattern` into a range of `block`: byte i of the block gets byte i of the pattern.
    /// Fails while requests use the block, and on errors of the driver, for example for memory that
    /// this GPU cannot access.
    pub fn fill(&self, block: &Block, range: Range<usize>, pattern: Pattern) -> Result<()> {
        self.run(self.module.fill, block, range, pattern)
    }

    pub fn check(&self, block: &Block, range: Range<usize>, pattern: Pattern) -> Result<Wrong> {
        let mut tally = [0, u32::MAX];
        let place = self.tally.address();
        let bytes = size_of_val(&tally);
        // SAFETY: the tally has room for these bytes; both sides live until the call returns.
        let copy_in = |functions: &Functions| unsafe {
            (functions.copy_in)(place, tally.as_ptr().cast(), bytes)
        };
        self.context.call("cuMemcpyHtoD", copy_in)?;
        self.run(self.module.check, block, range, pattern)?;
        // SAFETY: as above, in the other direction.
        let copy_out = |functions: &Functions| unsafe {
            (functions.copy_out)(tally.as_mut_ptr().cast(), place, bytes)
        };
        self.context.call("cuMemcpyDtoH", copy_out)?;
        let [count, first] = tally;
        Ok(Wrong {
            count,
            first: (count > 0).then_some(first),
        })
    }

    fn run(
        &self,
        kernel: Object,
        block: &Block,
        range: Range<usize>,
        pattern: Pattern,
    ) -> Result<()> {
        let (mut first, mut count) = span(&range, block.buffer.bytes())?;
        let mut seed = pattern.seed;
        let mut flip = u32::from(pattern.flip);
        let mut tally = self.tally.address();
        block.buffer.alone(|start| {
            let mut memory = self.address(block, start)? + range.start as u64;
            let mut arguments = arguments![memory, first, count, seed, flip, tally];
            let none = ptr::null_mut();
            let arguments = arguments.as_mut_ptr();
            // SAFETY: the arguments are those of both kernels, in their order and sizes (`fill`
            // does not take the last one), and are read during the call. A kernel touches the
            // tally, and `count` bytes at `memory`, which lie in the block. Nothing else uses the
            // tally or the block until `alone` returns, which is after the kernel's end. If this
            // GPU cannot access the memory, its context gets an error and then runs nothing more.
            self.context.call("cuLaunchKernel", |functions| unsafe {
                (functions.launch)(
                    kernel,
                    BLOCKS,
                    1,
                    1,
                    THREADS,
                    1,
                    1,
                    0,
                    none,
                    arguments,
                    ptr::null_mut(),
                )
            })?;
            // SAFETY: this context is current, and only the launch above is left to wait for.
            self.context
                .call("cuCtxSynchronize, after a kernel,", |functions| unsafe {
                    (functions.synchronize)()
                })
        })
    }

    /// Returns this GPU's address of a block, which differs from `start` only for mapped memory.
    fn address(&self, block: &Block, start: NonNull<c_void>) -> Result<Address> {
        if !block.is_mapped {
            return Ok(start.as_ptr().addr() as Address);
        }
        let mut address = 0;
        // SAFETY: CUDA has pinned the memory; `address` is valid for writes during the call.
        let call = |functions: &Functions| unsafe {
            (functions.host_device_address)(&mut address, start.as_ptr(), 0)
        };
        self.context.call("cuMemHostGetDevicePointer", call)?;
        Ok(address)
    }
}

impl Block {
    pub(crate) fn pageable(bytes: usize) -> Result<Self> {
        Ok(Self {
            buffer: Buffer::of(Heap::new(bytes)?),
            is_mapped: false,
        })
    }

    pub fn buffer(&self) -> &Rc<Buffer> {
        &self.buffer
    }
}
