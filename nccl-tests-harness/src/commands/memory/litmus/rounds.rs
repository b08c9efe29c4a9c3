//! The process that runs the test: one round after another until the time is up.

use super::sides::{Side, Task, Worker, lines, wait};
use super::{Found, Order};
use crate::commands::memory::ends::{Actor, End, Ends, Step, TAG, Wire};
use crate::gpu::lines::{LINE_BYTES, Round, Tally};
use crate::gpu::{self, Lines};
use crate::net::Words;
use crate::ranks::activity;
use anyhow::{Context as _, Result, bail, ensure};
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

/// The lines of the messages, in turns: one, a warp's four, its sixteen in NCCL, some that fill no group, 32 and 128 KiB, and
/// a step of NCCL's LL128 buffer (614,400 bytes).
const LINES: [u32; 7] = [1, 4, 16, 63, 256, 1024, MAX_LINES];
const MAX_LINES: u32 = 4800;
/// How long the writer's warps sleep after each group, in turns: the processor sees lines come when the writer is not ahead of it.
const PAUSES_NS: [u32; 3] = [0, 1000, 8000];
/// Messages take their places in turns, as in NCCL's buffers (`NCCL_STEPS`).
const PLACES: u32 = 8;
/// How long a planted line stays torn.
const PLANT_NS: u32 = 1_000_000;
/// How long stored lines may take until the processor sees them.
const STORED: Duration = Duration::from_secs(5);

/// What each side's buffer takes.
pub const BUFFER_BYTES: usize = PLACES as usize * MAX_LINES as usize * LINE_BYTES;

/// Runs it. After an error nothing may be closed: what was started may still use the memory.
///
/// # Errors
/// The plugin's, the driver's, or when stored lines are not seen.
pub fn run(ends: &Ends, wire: &Wire, order: &Order) -> Result<Found> {
    for end in [&ends.from, &ends.into] {
        if let Actor::Gpu(gpu) = &end.actor {
            activity::stage(format!("LL128: trying the kernels of {}", gpu.name()));
            gpu::prove_lines(gpu)?;
        }
    }
    let (from, into) = (Words::share(ends.from.block.buffer())?, Words::share(ends.into.block.buffer())?);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let sides = side(scope, &ends.from, &from, &stop).and_then(|writer| {
            let reader = side(scope, &ends.into, &into, &stop)?;
            Ok((writer, reader))
        });
        let outcome = sides.and_then(|(mut writer, mut reader)| {
            let rounds = Rounds { ends, wire, words: from.all(), writer: &mut writer, reader: &mut reader };
            rounds.run(order)
        });
        // Threads that still wait for lines end now; a kernel ends by itself, and its owner waits for that.
        stop.store(true, Relaxed);
        outcome
    })
}

fn side<'scope>(
    scope: &'scope Scope<'scope, '_>,
    end: &End,
    words: &'scope Rc<Words>,
    stop: &'scope AtomicBool,
) -> Result<Side> {
    match &end.actor {
        Actor::Gpu(gpu) => Ok(Side::Gpu(Lines::new(gpu, &end.block, words)?)),
        Actor::Processor => Ok(Side::Processor(Worker::spawn(scope, words.all(), stop))),
    }
}

struct Rounds<'a> {
    ends: &'a Ends,
    wire: &'a Wire,
    /// The sender's buffer.
    words: &'a [AtomicU64],
    writer: &'a mut Side,
    reader: &'a mut Side,
}

impl Rounds<'_> {
    fn run(mut self, order: &Order) -> Result<Found> {
        let Ends { from, into } = self.ends;
        let (written_by, read_by) = (from.name(), into.name());
        activity::stage(format!("LL128: lines by {written_by}, read by {read_by}"));
        let (start, limit) = (Instant::now(), Duration::from_secs(order.seconds));
        let (mut processor, mut reader, mut messages) = (Tally::default(), Tally::default(), 0);
        while start.elapsed() < limit && reader.missing == 0 {
            let round = round(messages, order.planted).context("more rounds than sequence numbers")?;
            self.round(&round, &mut processor).with_context(|| format!("message {messages}, {round:?}"))?;
            reader = self.reader.tally()?;
            messages += 1;
            activity::tick();
        }
        let seconds = start.elapsed().as_secs_f64();
        Ok(Found {
            written_by,
            read_by,
            stand_in: [from, into].iter().any(|end| matches!(end.actor, Actor::Processor)),
            seconds,
            messages,
            sizes_bytes: LINES.iter().map(|lines| *lines as usize * LINE_BYTES).collect(),
            missing: reader.missing,
            reads: Found::reads(&processor, &reader, seconds),
        })
    }

    /// One message: stored, read by the processor, sent, loaded.
    fn round(&mut self, round: &Round, processor: &mut Tally) -> Result<()> {
        let (offset, bytes) = (round.first as usize * LINE_BYTES, round.lines as usize * LINE_BYTES);
        let Wire { from, into, send, recv } = self.wire;
        let mut receiving = Step::Asking;
        while matches!(receiving, Step::Asking) {
            receiving.advance(|| recv.irecv_optional(into, offset, bytes, TAG)).context("receive")?;
            thread::yield_now();
        }
        // The reader first: it is to watch while the lines come.
        self.reader.start(Task::Load, round)?;
        self.writer.start(Task::Store, round)?;
        self.read(round, processor)?;
        // As NCCL's proxy: once all flags are there, whatever the data is.
        let mut sending = Step::Asking;
        loop {
            let sent = sending.advance(|| send.isend(from, offset, bytes, TAG)).context("send")?;
            let received = receiving.advance(|| bail!("the receive was posted before")).context("receive")?;
            if let (Some(sent), Some(_)) = (sent, received) {
                ensure!(sent == bytes, "{sent} of {bytes} bytes were sent");
                break;
            }
            thread::yield_now();
        }
        while !(self.writer.is_done()? && self.reader.is_done()?) {
            thread::yield_now();
        }
        Ok(())
    }

    /// Polls the flags as NCCL's proxy does before it sends (`sendProxyProgress` in src/transport/net.cc: the last word of each
    /// line), and looks at each line when its flag is there.
    fn read(&self, round: &Round, processor: &mut Tally) -> Result<()> {
        let until = Instant::now() + STORED;
        for (number, line) in lines(self.words, round) {
            let Some(pieces) = wait(line, round.sequence, number, || Instant::now() > until) else {
                bail!("the CPU did not see a flag that {} stored within {} s", self.ends.from.name(), STORED.as_secs());
            };
            processor.add(pieces, 0);
        }
        Ok(())
    }
}

/// The round of a number; none once the flags would repeat.
fn round(number: u64, planted: bool) -> Option<Round> {
    let sequence = u32::try_from(number + 1).ok()?;
    let index = (number % (LINES.len() * PAUSES_NS.len()) as u64) as usize;
    Some(Round {
        first: (number % u64::from(PLACES)) as u32 * MAX_LINES,
        lines: LINES[index % LINES.len()],
        sequence,
        pause_ns: PAUSES_NS[index / LINES.len()],
        delay_ns: if planted { PLANT_NS } else { 0 },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::Block;
    use crate::gpu::lines::{WORDS, word};

    #[test]
    fn rounds_take_all_sizes_at_all_paces_and_stay_in_the_buffer() {
        let rounds: Vec<_> = (0..420).map(|number| round(number, false).unwrap()).collect();
        for lines in LINES {
            for pause_ns in PAUSES_NS {
                let of: Vec<_> =
                    rounds.iter().filter(|round| (round.lines, round.pause_ns) == (lines, pause_ns)).collect();
                assert_eq!(of.len(), 20, "{lines} {pause_ns}");
            }
        }
        for (number, round) in rounds.iter().enumerate() {
            assert_eq!((round.sequence, round.delay_ns), (number as u32 + 1, 0));
            assert!((round.first + round.lines) as usize * LINE_BYTES <= BUFFER_BYTES, "{round:?}");
        }
        assert_eq!(round(3, true).unwrap().delay_ns, PLANT_NS);
        assert!(round(u64::from(u32::MAX) - 1, false).is_some() && round(u64::from(u32::MAX), false).is_none());
    }

    /// Two threads of the processor on one buffer, without a network.
    fn on_one_buffer(round: &Round, load: bool) -> Tally {
        let block = Block::pageable(BUFFER_BYTES).unwrap();
        let words = Words::share(block.buffer()).unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let [mut writer, mut reader] = [0; 2].map(|_| Side::Processor(Worker::spawn(scope, words.all(), &stop)));
            if load {
                reader.start(Task::Load, round).unwrap();
                assert!(reader.start(Task::Load, round).is_err(), "one task at a time");
            }
            writer.start(Task::Store, round).unwrap();
            while !(writer.is_done().unwrap() && reader.is_done().unwrap()) {
                thread::yield_now();
            }
            for (number, line) in lines(words.all(), round) {
                assert!((0..WORDS).all(|at| line[at].load(Relaxed) == word(round.sequence, number, at)), "{number}");
            }
            let end = (round.first + round.lines) as usize * WORDS;
            assert!(words.all()[end..].iter().all(|word| word.load(Relaxed) == 0), "beyond the round's lines");
            assert!(words.all()[..round.first as usize * WORDS].iter().all(|word| word.load(Relaxed) == 0));
            reader.tally().unwrap()
        })
    }

    #[test]
    fn a_thread_reads_what_another_stores_and_finds_planted_lines() {
        let round = round(3, false).unwrap();
        assert_eq!((round.lines, round.first), (63, 3 * MAX_LINES));
        assert_eq!(on_one_buffer(&round, true), Tally { lines: 63, ..Tally::default() });
        assert_eq!(on_one_buffer(&round, false), Tally::default());
        // On a busy machine the reader may not run while a line is torn: then once more.
        let mut found = (0..500).map(|_| on_one_buffer(&Round { delay_ns: PLANT_NS, ..round }, true));
        assert!(found.any(|found| found.lines == 63 && found.torn > 0 && found.pieces != 0), "no torn line was seen");
    }

    #[test]
    fn a_reader_that_is_stopped_tells_what_did_not_come() {
        let block = Block::pageable(BUFFER_BYTES).unwrap();
        let words = Words::share(block.buffer()).unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let mut reader = Side::Processor(Worker::spawn(scope, words.all(), &stop));
            reader.start(Task::Load, &round(0, false).unwrap()).unwrap();
            thread::sleep(Duration::from_millis(5));
            assert!(!reader.is_done().unwrap());
            stop.store(true, Relaxed);
            while !reader.is_done().unwrap() {
                thread::yield_now();
            }
            assert_eq!(reader.tally().unwrap(), Tally { missing: 1, ..Tally::default() });
        });
    }
}
