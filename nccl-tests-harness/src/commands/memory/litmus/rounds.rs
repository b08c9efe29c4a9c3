//! The process that runs the litmus test: one message per round, until the time is up.

use super::{Found, Order};
use crate::commands::memory::ends::{End, Ends, MemoryUser, Step, TAG, Wire};
use crate::gpu::lines::{LINE_BYTES, Round, Tally, WORDS, read_line};
use crate::gpu::{self, Lines};
use crate::net::Words;
use crate::ranks::activity;
use anyhow::{Context as _, Result, bail, ensure};
use std::rc::Rc;
use std::sync::atomic::AtomicU64;
use std::thread;
use std::time::{Duration, Instant};

/// Sizes of the messages in lines, used in turn. A warp stores a group of 4 lines at a time; a warp
/// of NCCL stores 16. 63 is not a multiple of 4. 256 lines are 32 KiB, and 1024 lines are 128 KiB.
/// The largest size is one step of NCCL's LL128 buffer (614,400 bytes).
const LINES: [u32; 7] = [1, 4, 16, 63, 256, 1024, MAX_LINES];
const MAX_LINES: u32 = 4800;
/// Durations of the sleep of the writer's warps after each group of lines, used in turn. With a
/// slow writer, the CPU polls a line before the line is stored, and so sees it arrive.
const PAUSES_NS: [u32; 3] = [0, 1000, 8000];
/// Number of places in the buffer that messages use in turn, as in NCCL's buffers (`NCCL_STEPS`).
const PLACES: u32 = 8;
/// Time that a planted torn line stays torn.
const TEAR_NS: u32 = 1_000_000;
/// Time limit for the reading GPU to see each group of 4 lines.
const WAIT: Duration = Duration::from_secs(20);
/// Number of loads of a flag between two checks of the clock.
const SPINS: u32 = 1024;
/// Time limit for the CPU to see all stored lines of a message.
const VISIBLE_TIMEOUT: Duration = Duration::from_secs(5);

pub const BUFFER_BYTES: usize = PLACES as usize * MAX_LINES as usize * LINE_BYTES;

/// Runs the test. After an error or with missing lines, the caller must close nothing: unfinished
/// work may still use the memory.
///
/// # Errors
/// An end has no GPU, the plugin or the driver fails, or the CPU does not see stored lines in time.
pub fn run(ends: &Ends, wire: &Wire, order: &Order) -> Result<Found> {
    let from = Words::share(ends.from.block.buffer())?;
    let into = Words::share(ends.into.block.buffer())?;
    let writer = kernels(&ends.from, &from)?;
    let reader = kernels(&ends.into, &into)?;
    Rounds {
        wire,
        words: from.all(),
        writer,
        reader,
    }
    .run(order)
}

/// Tests the kernels of the end's GPU and returns them, set up for the end's buffer.
fn kernels(end: &End, words: &Rc<Words>) -> Result<Lines> {
    let MemoryUser::Gpu(gpu) = &end.user else {
        bail!("LL128 lines need a GPU at both ends")
    };
    activity::stage(format!("LL128: trying the kernels of {}", gpu.name()));
    gpu::self_check_lines(gpu)?;
    Lines::new(gpu, &end.block, words)
}

struct Rounds<'a> {
    wire: &'a Wire,
    words: &'a [AtomicU64],
    writer: Lines,
    reader: Lines,
}

impl Rounds<'_> {
    fn run(self, order: &Order) -> Result<Found> {
        let written_by = self.writer.name();
        let read_by = self.reader.name();
        activity::stage(format!("LL128: lines by {written_by}, read by {read_by}"));
        let start = Instant::now();
        let limit = Duration::from_secs(order.seconds);
        let mut processor = Tally::default();
        let mut reader = Tally::default();
        let mut messages = 0;
        while start.elapsed() < limit && reader.missing == 0 {
            let round = round(messages, order.planted)
                .context("all 2^32 - 1 sequence numbers are used up")?;
            self.round(&round, &mut processor)
                .with_context(|| format!("message {messages}, {round:?}"))?;
            reader = self.reader.tally()?;
            messages += 1;
            activity::tick();
        }
        let seconds = start.elapsed().as_secs_f64();
        Ok(Found {
            written_by,
            read_by,
            seconds,
            messages,
            sizes_bytes: LINES
                .iter()
                .map(|lines| *lines as usize * LINE_BYTES)
                .collect(),
            missing: reader.missing,
            reads: Found::reads(&processor, &reader, seconds),
        })
    }

    /// Moves one message: the writer stores it, the CPU reads it, the plugin sends it, and the
    /// reader loads it.
    fn round(&self, round: &Round, processor: &mut Tally) -> Result<()> {
        let offset = round.first as usize * LINE_BYTES;
        let bytes = round.lines as usize * LINE_BYTES;
        let Wire {
            from,
            into,
            send,
            recv,
        } = self.wire;
        let mut receiving = Step::NotPosted;
        while matches!(receiving, Step::NotPosted) {
            receiving
                .advance(|| recv.irecv_optional(into, offset, bytes, TAG))
                .context("receive")?;
            thread::yield_now();
        }
        // The reader's kernel starts first, so that it polls while the lines arrive.
        self.reader.load(round, WAIT)?;
        self.writer.store(round)?;
        self.read(round, processor)?;
        // As NCCL's proxy does, the CPU sends when it has seen all flags, even if some data is old.
        let mut sending = Step::NotPosted;
        loop {
            let sent = sending
                .advance(|| send.isend(from, offset, bytes, TAG))
                .context("send")?;
            let received = receiving
                .advance(|| bail!("the receive was posted before"))
                .context("receive")?;
            if let (Some(sent), Some(_)) = (sent, received) {
                ensure!(sent == bytes, "{sent} of {bytes} bytes were sent");
                break;
            }
            thread::yield_now();
        }
        while !(self.writer.is_idle()? && self.reader.is_idle()?) {
            thread::yield_now();
        }
        Ok(())
    }

    /// Polls the last word of each line, its flag, as NCCL's proxy does before it sends
    /// (`sendProxyProgress` in src/transport/net.cc). Checks each line when the flag is new.
    fn read(&self, round: &Round, processor: &mut Tally) -> Result<()> {
        let until = Instant::now() + VISIBLE_TIMEOUT;
        for (number, line) in lines(self.words, round) {
            let Some(pieces) = wait(line, round.sequence, number, || Instant::now() > until) else {
                bail!(
                    "{} stored a flag that the CPU did not see within {} s",
                    self.writer.name(),
                    VISIBLE_TIMEOUT.as_secs()
                );
            };
            processor.add(pieces, 0);
        }
        Ok(())
    }
}

fn lines<'a>(
    words: &'a [AtomicU64],
    round: &Round,
) -> impl Iterator<Item = (u32, &'a [AtomicU64; WORDS])> {
    let (all, _) = words.as_chunks::<WORDS>();
    (round.first..).zip(
        all.iter()
            .skip(round.first as usize)
            .take(round.lines as usize),
    )
}

/// Polls a line until its flag is new. Returns a bit for each 16-byte piece that is still old at
/// that time, or `None` if `give_up` returns true first.
fn wait(
    line: &[AtomicU64; WORDS],
    sequence: u32,
    number: u32,
    mut give_up: impl FnMut() -> bool,
) -> Option<u8> {
    loop {
        for _ in 0..SPINS {
            if let Some(pieces) = read_line(line, sequence, number) {
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

/// Returns the round with this number, or `None` if the round would reuse the flags of an earlier
/// one.
fn round(number: u64, planted: bool) -> Option<Round> {
    let sequence = u32::try_from(number + 1).ok()?;
    let index = (number % (LINES.len() * PAUSES_NS.len()) as u64) as usize;
    Some(Round {
        first: (number % u64::from(PLACES)) as u32 * MAX_LINES,
        lines: LINES[index % LINES.len()],
        sequence,
        pause_ns: PAUSES_NS[index / LINES.len()],
        delay_ns: if planted { TEAR_NS } else { 0 },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::Block;
    use crate::gpu::lines::word;
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn rounds_cover_each_size_with_each_pause_within_the_buffer() {
        let rounds: Vec<_> = (0..420)
            .map(|number| round(number, false).unwrap())
            .collect();
        for lines in LINES {
            for pause_ns in PAUSES_NS {
                let alike: Vec<_> = rounds
                    .iter()
                    .filter(|round| (round.lines, round.pause_ns) == (lines, pause_ns))
                    .collect();
                assert_eq!(alike.len(), 20, "{lines} {pause_ns}");
            }
        }
        for (number, round) in rounds.iter().enumerate() {
            assert_eq!((round.sequence, round.delay_ns), (number as u32 + 1, 0));
            assert!(
                (round.first + round.lines) as usize * LINE_BYTES <= BUFFER_BYTES,
                "{round:?}"
            );
        }
        assert_eq!(round(3, true).unwrap().delay_ns, TEAR_NS);
        assert!(
            round(u64::from(u32::MAX) - 1, false).is_some()
                && round(u64::from(u32::MAX), false).is_none()
        );
    }

    #[test]
    fn the_lines_of_a_round_are_polled_for_their_flags() {
        let block = Block::pageable(BUFFER_BYTES).unwrap();
        let words = Words::share(block.buffer()).unwrap();
        let round = round(3, false).unwrap();
        assert_eq!((round.lines, round.first), (63, 3 * MAX_LINES));
        let all: Vec<_> = lines(words.all(), &round).collect();
        assert_eq!(
            (all.len(), all[0].0, all[62].0),
            (63, round.first, round.first + 62)
        );
        let (number, line) = all[1];
        assert_eq!(wait(line, round.sequence, number, || true), None);
        line[WORDS - 1].store(word(round.sequence, number, WORDS - 1), Relaxed);
        assert_eq!(
            wait(line, round.sequence, number, || true),
            Some(0xff),
            "all pieces but the flag are old"
        );
    }
}
