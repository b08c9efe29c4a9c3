//! GPUs that write and check memory of every kind, through CUDA's driver without CUDA's toolkit.
//!
//! If the machine has no libcuda or no GPU, [`Driver::load`] returns the reason as text, for a
//! command to report as its result. Errors of the driver name the driver's call. The GPU's work is
//! done when a call returns, except for the kernels of `Lines`. Memory is freed before its context
//! is released. This module does not use the plugin. Its memory becomes a `net::Buffer`, which
//! callers register with the plugin. Only one of GPU, CPU and network uses a buffer at a time,
//! unless the buffer is shared as `net::Words`.

#[allow(unsafe_code)]
mod cuda;
mod kind;
pub(crate) mod lines;
mod pattern;

pub use cuda::Driver;
pub(crate) use cuda::lines::Lines;
pub(crate) use cuda::{Block, Gpu, GpuInfo};
pub(crate) use kind::Kind;
pub(crate) use pattern::{Pattern, Wrong};

use crate::net::Words;
use anyhow::{Result, ensure};
use lines::{FLAG, Round, Tally, WORDS, word};
use std::rc::Rc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Duration;

/// Checks that this GPU writes the bytes that the CPU computes, and that the GPU counts the bytes
/// that the CPU changes. A check that never finds anything would pass with any network.
pub(crate) fn self_check(gpu: &Gpu) -> Result<()> {
    const BYTES: usize = 70_001;
    const MARGIN: usize = 64;
    const CHANGED: [usize; 3] = [77, 4096, BYTES - 1];
    let pattern = Pattern {
        seed: 0x1234_5678,
        flip: 0x5a,
    };
    let name = gpu.name();
    let block = gpu.allocate(Kind::HostAlloc, BYTES + MARGIN)?;
    gpu.fill(&block, 0..BYTES, pattern)?;
    let unlike = block.buffer().with_bytes(|bytes| {
        let beyond = bytes[BYTES..].iter().filter(|byte| **byte != 0).count();
        (pattern.compare(0, &bytes[..BYTES]), beyond)
    })?;
    ensure!(
        unlike == (Wrong::default(), 0),
        "{name} and the CPU wrote different patterns: {unlike:?}"
    );
    let wrong = gpu.check(&block, 0..BYTES, pattern)?;
    ensure!(
        wrong == Wrong::default(),
        "{name} reports errors in its own pattern: {wrong:?}"
    );
    block
        .buffer()
        .with_bytes(|bytes| CHANGED.iter().for_each(|at| bytes[*at] ^= 1))?;
    let wrong = gpu.check(&block, 3..BYTES, pattern)?;
    let expected = Wrong {
        count: CHANGED.len() as u32,
        first: u32::try_from(CHANGED[0]).ok(),
    };
    ensure!(
        wrong == expected,
        "{name} counts {wrong:?}, but {expected:?} was changed"
    );
    Ok(())
}

/// Checks the kernels of the litmus test: they store all words of a line and no others, and count a
/// line with an old word and a line that does not arrive. Also makes the driver load both kernels
/// one after the other. Otherwise the first launch of a kernel may load it, and wait for all
/// running kernels. In the test, the loading kernel runs until the storing kernel has stored its
/// lines, so the two would wait for each other.
pub(crate) fn self_check_lines(gpu: &Rc<Gpu>) -> Result<()> {
    let block = gpu.allocate(Kind::HostAlloc, 200 * lines::LINE_BYTES)?;
    let words = Words::share(block.buffer())?;
    let check = LinesCheck {
        name: gpu.name(),
        kernels: Lines::new(gpu, &block, &words)?,
        words: &words,
    };
    check.check_store(&FIRST_ROUND)?;
    check.check_store(&Round {
        delay_ns: 1000,
        ..SECOND_ROUND
    })?;
    check.check_load()
}

/// The round starts inside the buffer. Its number of lines is not a multiple of four, the number
/// that a warp processes at a time.
const FIRST_ROUND: Round = Round {
    first: 5,
    lines: 133,
    sequence: 9,
    pause_ns: 1,
    delay_ns: 0,
};
const SECOND_ROUND: Round = Round {
    sequence: 10,
    ..FIRST_ROUND
};

/// The check of the litmus test's kernels, over words that the GPU and the CPU share.
struct LinesCheck<'a> {
    name: String,
    kernels: Lines,
    words: &'a Words,
}

impl LinesCheck<'_> {
    /// Lets the GPU store the lines of a round, and checks every word of the buffer.
    fn check_store(&self, round: &Round) -> Result<()> {
        self.kernels.store(round)?;
        self.wait()?;
        for (at, stored) in self.words.all().iter().enumerate() {
            let line = (at / WORDS) as u32;
            let index = at % WORDS;
            let is_inside = (round.first..round.first + round.lines).contains(&line);
            let stored = stored.load(SeqCst);
            let expected = if is_inside {
                word(round.sequence, line, index)
            } else {
                0
            };
            ensure!(
                stored == expected,
                "{} stores {stored:#x} as word {index} of line {line} instead of {expected:#x}",
                self.name
            );
        }
        Ok(())
    }

    /// Lets the GPU load the lines of the second round: without a fault, then with a torn line,
    /// then also without the flag of a line. A word that was changed for one load is still changed
    /// in the next load, and the tally adds up all loads.
    fn check_load(&self) -> Result<()> {
        let whole = Tally {
            lines: 133,
            ..Tally::default()
        };
        self.expect_tally(whole)?;
        let torn = Tally {
            lines: 266,
            torn: 1,
            torn_again: 1,
            missing: 0,
            pieces: 1 << 3,
            pieces_again: 1 << 3,
        };
        self.make_old(12, 6);
        self.expect_tally(torn)?;
        let missing = Tally {
            lines: 398,
            torn: 2,
            torn_again: 2,
            missing: 1,
            ..torn
        };
        self.make_old(20, FLAG);
        self.expect_tally(missing)
    }

    /// Gives a word the value that it had in the first round.
    fn make_old(&self, line: u32, index: usize) {
        let old = word(FIRST_ROUND.sequence, line, index);
        self.words.all()[line as usize * WORDS + index].store(old, Relaxed);
    }

    fn expect_tally(&self, expected: Tally) -> Result<()> {
        self.kernels
            .load(&SECOND_ROUND, Duration::from_millis(100))?;
        self.wait()?;
        let found = self.kernels.tally()?;
        ensure!(
            found == expected,
            "{} counts {found:?} instead of {expected:?}",
            self.name
        );
        Ok(())
    }

    fn wait(&self) -> Result<()> {
        while !self.kernels.is_idle()? {
            std::thread::yield_now();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With a GPU, runs the kernels. Without a GPU, checks the reason.
    #[test]
    fn every_gpu_is_tested_and_every_kind_of_memory_is_freed() {
        let driver = match Driver::load() {
            Ok(driver) => driver,
            Err(reason) => {
                return assert!(!reason.is_empty() && !reason.contains('\n'), "{reason}");
            }
        };
        assert!(
            Gpu::open(&driver, 4096)
                .map(|_| ())
                .unwrap_err()
                .to_string()
                .contains("GPU 4096 not found")
        );
        let gpu = Rc::new(Gpu::open(&driver, 0).unwrap());
        self_check(&gpu).unwrap();
        self_check_lines(&gpu).unwrap();
        for kind in Kind::ALL {
            let about = gpu.about();
            let is_absent = match kind {
                Kind::Malloc => !about.pageable_memory_access,
                Kind::Managed => !about.managed_memory,
                _ => false,
            };
            if is_absent {
                continue;
            }
            let block = gpu.allocate(kind, 5001).unwrap();
            let pattern = Pattern { seed: 9, flip: 0 };
            gpu.fill(&block, 0..5001, pattern).unwrap();
            assert_eq!(
                gpu.check(&block, 0..5001, pattern).unwrap(),
                Wrong::default(),
                "{kind:?}"
            );
            let other = Pattern {
                seed: 9,
                flip: 0xff,
            };
            assert_eq!(
                gpu.check(&block, 1..5001, other).unwrap(),
                Wrong {
                    count: 5000,
                    first: Some(1)
                },
                "{kind:?}"
            );
            let is_host = !matches!(kind, Kind::Device | Kind::DeviceAsCuda);
            assert_eq!(
                block.buffer().with_bytes(|_| ()).is_ok(),
                is_host,
                "{kind:?}"
            );
        }
    }
}
