//! Who stores lines and who loads them: a GPU's kernel, or a thread of the processor in its place.

use crate::gpu::Lines;
use crate::gpu::lines::{FLAG, LINE_BYTES, Round, Tally, WORDS, look, old_pieces, word};
use anyhow::{Context as _, Result, bail};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::{AtomicBool, fence};
use std::sync::mpsc::{self, TryRecvError};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

/// How long the reader waits for a line before it gives up.
const WAIT: Duration = Duration::from_secs(20);
/// Loads of a flag between two looks at the clock.
pub const SPINS: u32 = 1024;
/// How many groups of four lines a GPU's kernel stores at the same time, and a thread one after another.
const WARPS: u32 = 20;

/// What a side does in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Task {
    /// It stores the lines.
    Store,
    /// It waits for the lines and looks at them.
    Load,
}

/// Who does it.
pub enum Side {
    /// A GPU.
    Gpu(Lines),
    /// The processor.
    Processor(Worker),
}

/// A thread that does what a GPU's kernel would.
pub struct Worker {
    rounds: mpsc::Sender<(Task, Round)>,
    results: mpsc::Receiver<Tally>,
    is_busy: bool,
    sum: Tally,
}

impl Side {
    /// Starts a task.
    ///
    /// # Errors
    /// The driver's, or while the task before is not done.
    pub fn start(&mut self, task: Task, round: &Round) -> Result<()> {
        match (self, task) {
            (Self::Gpu(lines), Task::Store) => lines.store(round),
            (Self::Gpu(lines), Task::Load) => lines.load(round, WAIT),
            (Self::Processor(worker), task) => worker.start(task, round),
        }
    }

    /// Returns true when the task is done.
    pub fn is_done(&mut self) -> Result<bool> {
        match self {
            Self::Gpu(lines) => lines.is_idle(),
            Self::Processor(worker) => worker.is_done(),
        }
    }

    /// Returns the sum over all rounds. No round may be under way.
    pub fn tally(&self) -> Result<Tally> {
        match self {
            Self::Gpu(lines) => lines.tally(),
            Self::Processor(worker) => Ok(worker.sum),
        }
    }
}

impl Worker {
    /// A thread that uses `words` until this is dropped; `stop` ends its waiting.
    pub fn spawn<'scope>(
        scope: &'scope Scope<'scope, '_>,
        words: &'scope [AtomicU64],
        stop: &'scope AtomicBool,
    ) -> Self {
        let (rounds, orders) = mpsc::channel();
        let (results_in, results) = mpsc::channel();
        scope.spawn(move || {
            for (task, round) in orders {
                let found = match task {
                    Task::Store => store(words, &round),
                    Task::Load => load(words, &round, stop),
                };
                if results_in.send(found).is_err() {
                    return;
                }
            }
        });
        Self { rounds, results, is_busy: false, sum: Tally::default() }
    }

    fn start(&mut self, task: Task, round: &Round) -> Result<()> {
        if !self.is_done()? {
            bail!("the thread has not ended the round before");
        }
        self.is_busy = true;
        self.rounds.send((task, *round)).ok().context("the thread is gone")
    }

    fn is_done(&mut self) -> Result<bool> {
        if self.is_busy {
            match self.results.try_recv() {
                Ok(found) => self.sum.merge(found),
                Err(TryRecvError::Empty) => return Ok(false),
                Err(TryRecvError::Disconnected) => bail!("the thread is gone"),
            }
            self.is_busy = false;
        }
        Ok(true)
    }
}

/// The round's lines, each with its number.
pub fn lines<'a>(words: &'a [AtomicU64], round: &Round) -> impl Iterator<Item = (u32, &'a [AtomicU64; WORDS])> {
    let (all, _) = words.as_chunks::<WORDS>();
    (round.first..).zip(all.iter().skip(round.first as usize).take(round.lines as usize))
}

/// Stores lines, the flag of each last; a planted round stores all flags first.
fn store(words: &[AtomicU64], round: &Round) -> Tally {
    let data = |number, line: &[AtomicU64; WORDS]| {
        (0..FLAG).for_each(|index| line[index].store(word(round.sequence, number, index), Relaxed));
    };
    let flag = |line: &[AtomicU64; WORDS]| line[FLAG].store(u64::from(round.sequence), Release);
    if round.delay_ns > 0 {
        lines(words, round).for_each(|(_, line)| flag(line));
        thread::sleep(Duration::from_nanos(round.delay_ns.into()));
        lines(words, round).for_each(|(number, line)| data(number, line));
        fence(Release);
        return Tally::default();
    }
    let pause = Duration::from_nanos((round.pause_ns / WARPS).into());
    for (number, line) in lines(words, round) {
        data(number, line);
        flag(line);
        if number % 4 == 3 && !pause.is_zero() {
            let until = Instant::now() + pause;
            while Instant::now() < until {
                std::hint::spin_loop();
            }
        }
    }
    Tally::default()
}

/// Waits for each line, and looks at it twice.
fn load(words: &[AtomicU64], round: &Round, stop: &AtomicBool) -> Tally {
    let (mut found, until) = (Tally::default(), Instant::now() + WAIT);
    for (number, line) in lines(words, round) {
        let seen = wait(line, round.sequence, number, || stop.load(Relaxed) || Instant::now() > until);
        let Some(pieces) = seen else {
            found.missing += 1;
            return found;
        };
        found.add(pieces, old_pieces(line, round.sequence, number));
    }
    found
}

/// Polls a line until its flag is there: which of its pieces are old then. None when `give_up` says so first.
pub fn wait(line: &[AtomicU64; WORDS], sequence: u32, number: u32, mut give_up: impl FnMut() -> bool) -> Option<u8> {
    loop {
        for _ in 0..SPINS {
            if let Some(pieces) = look(line, sequence, number) {
                return Some(pieces);
            }
            std::hint::spin_loop();
        }
        if give_up() {
            return None;
        }
        thread::yield_now();
    }
}

const _: () = assert!(LINE_BYTES == WORDS * 8, "a line is made of whole words");
