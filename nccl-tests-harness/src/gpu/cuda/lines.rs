//! The kernels of the litmus test (`crate::gpu::lines`). They run on their own stream while the CPU
//! and the network use the same memory.

use super::driver::{Address, Functions, Object, arguments};
use super::memory::Allocation;
use super::{Block, Gpu};
use crate::gpu::kind::Kind;
use crate::gpu::lines::{LINE_BYTES, Round, Tally};
use crate::net::Words;
use anyhow::{Result, bail, ensure};
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::rc::Rc;
use std::time::Duration;

/// Threads of a block: NCCL's maximum for LL128 (`NCCL_LL128_MAX_NTHREADS`), whole warps of 32.
const THREADS: c_uint = 640;
/// Number of blocks of the kernel that stores lines: one, like a channel of NCCL.
const STORE_BLOCKS: c_uint = 1;
/// Number of blocks of the kernel that loads lines. Several blocks watch more lines at a time.
const LOAD_BLOCKS: c_uint = 4;
/// Maximum number of times that a warp loads a group of four lines. Unlike the time limit, this
/// bound needs no clock.
const SPINS: u32 = 50_000_000;
/// `CU_STREAM_NON_BLOCKING`: the stream does not wait for other streams.
const NON_BLOCKING: c_uint = 1;
/// `CUDA_ERROR_NOT_READY`: the stream's kernel still runs.
const NOT_READY: c_int = 600;

const _: () = assert!(
    THREADS.is_multiple_of(32),
    "a warp has all its lanes, or its votes would not end"
);

pub struct Lines {
    stream: Object,
    tally: Allocation,
    memory: Address,
    words: Rc<Words>,
    gpu: Rc<Gpu>,
}

impl Lines {
    /// Lets `gpu` use `words`. Fails if `words` are not those of `block`.
    pub fn new(gpu: &Rc<Gpu>, block: &Block, words: &Rc<Words>) -> Result<Self> {
        ensure!(
            words.are_of(block.buffer()),
            "the words are of another buffer"
        );
        let tally = Allocation::new(&gpu.context, Kind::Device, size_of::<[u64; 6]>())?;
        let memory = gpu.address(block, words.start())?;
        let gpu = Rc::clone(gpu);
        let words = Rc::clone(words);
        let mut lines = Self {
            stream: ptr::null_mut(),
            tally,
            memory,
            words,
            gpu,
        };
        let zeroes = [0_u64; 6];
        let place = lines.tally.address();
        let bytes = size_of_val(&zeroes);
        // SAFETY: the tally has room for these bytes; both sides live until the call returns.
        let copy_in = |functions: &Functions| unsafe {
            (functions.copy_in)(place, zeroes.as_ptr().cast(), bytes)
        };
        lines.gpu.context.call("cuMemcpyHtoD", copy_in)?;
        // SAFETY: `stream` is valid for writes during the call.
        let create = |functions: &Functions| unsafe {
            (functions.stream_create)(&mut lines.stream, NON_BLOCKING)
        };
        lines.gpu.context.call("cuStreamCreate", create)?;
        Ok(lines)
    }

    pub fn name(&self) -> String {
        self.gpu.name()
    }

    /// Starts the kernel that stores the lines of a round. Fails for lines outside of the buffer,
    /// and while a kernel runs.
    pub fn store(&self, round: &Round) -> Result<()> {
        let Round {
            mut first,
            mut lines,
            mut sequence,
            mut pause_ns,
            mut delay_ns,
        } = *round;
        let mut memory = self.place(round)?;
        let mut arguments = arguments![memory, first, lines, sequence, pause_ns, delay_ns];
        self.launch(self.gpu.module.litmus_store, STORE_BLOCKS, &mut arguments)
    }

    /// Starts the kernel that waits for the lines of a round and checks them. A warp waits at most
    /// `wait` for each group of four lines. Fails as [`Lines::store`] does.
    pub fn load(&self, round: &Round, wait: Duration) -> Result<()> {
        let Round {
            mut first,
            mut lines,
            mut sequence,
            ..
        } = *round;
        let mut memory = self.place(round)?;
        let mut spins = SPINS;
        let mut limit_ns = wait.as_nanos() as u64;
        let mut tally = self.tally.address();
        let mut arguments = arguments![memory, first, lines, sequence, spins, limit_ns, tally];
        self.launch(self.gpu.module.litmus_load, LOAD_BLOCKS, &mut arguments)
    }

    /// Returns true when the last kernel has ended. Fails on errors of the driver and the kernel.
    pub fn is_idle(&self) -> Result<bool> {
        // SAFETY: the stream was created by `new` and is destroyed on drop.
        let code = unsafe { (self.gpu.context.functions()?.stream_query)(self.stream) };
        if code == NOT_READY {
            return Ok(false);
        }
        self.gpu
            .context
            .check("cuStreamQuery, after a kernel,", code)
            .map(|()| true)
    }

    /// Returns the counts of all rounds that were loaded so far. Fails while a kernel runs.
    pub fn tally(&self) -> Result<Tally> {
        ensure!(self.is_idle()?, "{} is still loading", self.name());
        let mut found = [0_u64; 6];
        let to = found.as_mut_ptr().cast();
        let bytes = size_of_val(&found);
        // SAFETY: as in `new`, but from the tally to `found`; no kernel runs.
        let copy_out = |functions: &Functions| unsafe {
            (functions.copy_out)(to, self.tally.address(), bytes)
        };
        self.gpu.context.call("cuMemcpyDtoH", copy_out)?;
        let [lines, torn, torn_again, missing, pieces, pieces_again] = found;
        Ok(Tally {
            lines,
            torn,
            torn_again,
            missing,
            pieces,
            pieces_again,
        })
    }

    fn place(&self, round: &Round) -> Result<Address> {
        let end = (round.first as usize + round.lines as usize) * LINE_BYTES;
        ensure!(
            end <= self.words.bytes(),
            "{round:?} lies outside of a buffer of {} bytes",
            self.words.bytes()
        );
        Ok(self.memory + u64::from(round.first) * LINE_BYTES as u64)
    }

    fn launch(&self, kernel: Object, blocks: c_uint, arguments: &mut [*mut c_void]) -> Result<()> {
        if !self.is_idle()? {
            bail!("{} has not finished the round before", self.name());
        }
        let arguments = arguments.as_mut_ptr();
        // SAFETY: the arguments are the kernel's, in their order and sizes, and are read during the
        // call. The kernel touches the tally, and lines that lie in the buffer. The buffer lives
        // until `self` is dropped, and the drop waits for the kernel. `Words` ensures that there is
        // no plain reference into the buffer, and that the CPU uses atomics. The kernel ends,
        // because its loads and its sleeps are bounded.
        self.gpu.context.call("cuLaunchKernel", |functions| unsafe {
            (functions.launch)(
                kernel,
                blocks,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                self.stream,
                arguments,
                ptr::null_mut(),
            )
        })
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        if self.stream.is_null() {
            return;
        }
        let context = &self.gpu.context;
        // SAFETY: created by `new`; the kernel on it ends (see `launch`).
        context.give_back("cuStreamSynchronize", |functions| unsafe {
            (functions.stream_synchronize)(self.stream)
        });
        // SAFETY: destroyed once, with no kernel running.
        context.give_back("cuStreamDestroy", |functions| unsafe {
            (functions.stream_destroy)(self.stream)
        });
    }
}
