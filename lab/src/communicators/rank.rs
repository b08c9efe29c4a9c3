//! One rank of a scenario: a process that uses NCCL as any program does.

use super::health::Health;
use super::judge::Report;
use super::nccl::{Communicator, ID_BYTES, Id, Nccl};
use super::options::Scenario;
use super::returns::Mark;
use anyhow::{Context, Result, anyhow, bail, ensure};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use nccl_tests_harness::gpu::Driver;
use nix::sys::signal::{self, Signal};
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest wait for rank 0's communicator id, and for the error after another rank's death. Also
/// the longest time that two all-reduces may take while devices leave and return.
const PATIENCE: Duration = Duration::from_secs(120);
/// Number of floats of a message that is not split over the rails.
const SMALL: usize = 2 << 10;
/// Number of floats of a message that is split over the rails.
const LARGE: usize = 1 << 20;
/// All-reduces that keep the network busy for seconds: the number of floats of each (256 MiB), and
/// the number of all-reduces.
const LONG_RUN: (usize, usize) = (64 << 20, 64);
/// Time from the start of [`LONG_RUN`] to the first abort, or to a rank's death. By then the first
/// all-reduce has long begun, and the last is far from its end.
const ABORT_DELAY: Duration = Duration::from_millis(100);

/// The arguments of the hidden command.
#[derive(Debug, clap::Args)]
pub struct Task {
    #[arg(value_enum)]
    scenario: Scenario,
    #[arg(long)]
    rank: usize,
    #[arg(long)]
    ranks: usize,
    /// Communicators that again makes.
    #[arg(long)]
    count: u32,
    /// The folder for the ids that ranks leave for each other, and for their reports.
    #[arg(long)]
    folder: PathBuf,
}

impl Task {
    /// Runs the scenario and writes the report to [`report_file`], not to standard output. Standard
    /// output has NCCL's log, whose lines may be cut.
    pub fn run(self) -> Result<()> {
        let file = report_file(&self.folder, self.scenario, self.rank);
        let mut rank = Rank::new(self)?;
        let words = rank.play()?;
        let Rank {
            checked,
            wrong,
            held,
            ..
        } = rank;
        let report = serde_json::to_string(&Report {
            checked,
            wrong,
            words,
            held,
        })?;
        fs::write(&file, report).with_context(|| format!("write {}", file.display()))
    }
}

pub fn report_file(folder: &Path, scenario: Scenario, rank: usize) -> PathBuf {
    folder.join(format!("report-{}-{rank}.json", scenario.name()))
}

/// Loads the GPU driver and NCCL, which every scenario needs. The error says which is missing.
pub fn check_machine() -> Result<Rc<Nccl>> {
    Driver::load()
        .map_err(|why| anyhow!("communicators needs an NVIDIA GPU and its driver: {why}"))?;
    Nccl::load().context(
        "communicators needs NCCL: install libnccl2, or name its folder in LD_LIBRARY_PATH",
    )
}

struct Rank {
    task: Task,
    nccl: Rc<Nccl>,
    gpu: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    ids: u32,
    /// Number of checks so far, which is the salt of the next check's values. Checks in which this
    /// rank takes no part count too, so that all ranks use the same salts.
    steps: u32,
    checked: u64,
    wrong: u64,
    held: Option<(Health, Health, u32)>,
}

impl Rank {
    fn new(task: Task) -> Result<Self> {
        let nccl = check_machine()?;
        let gpus = CudaContext::device_count().map_err(|error| anyhow!("count GPUs: {error}"))?;
        // If there are fewer GPUs than ranks, several ranks share a GPU.
        let gpu = CudaContext::new(task.rank % gpus.max(1) as usize)
            .map_err(|error| anyhow!("open a GPU: {error}"))?;
        let stream = gpu.new_stream()?;
        Ok(Self {
            task,
            nccl,
            gpu,
            stream,
            ids: 0,
            steps: 0,
            checked: 0,
            wrong: 0,
            held: None,
        })
    }

    fn play(&mut self) -> Result<String> {
        match self.task.scenario {
            Scenario::Several => self.several(),
            Scenario::Split => self.split(),
            Scenario::Again => self.again(),
            Scenario::Abort => self.abort(),
            Scenario::Lost => self.lost(),
            Scenario::Mixed => self.mixed(),
            Scenario::Returns => self.returns(),
        }
    }

    fn several(&mut self) -> Result<String> {
        const COMMUNICATORS: usize = 8;
        const ROUNDS: u32 = 4;
        let communicators = (0..COMMUNICATORS)
            .map(|_| self.join())
            .collect::<Result<Vec<_>>>()?;
        let streams = (0..COMMUNICATORS)
            .map(|_| Ok(self.gpu.new_stream()?))
            .collect::<Result<Vec<_>>>()?;
        for round in 0..ROUNDS {
            let mut sums = Vec::new();
            // All ranks start the all-reduces in the same order, as NCCL demands of several
            // communicators on one GPU.
            for (number, (communicator, stream)) in communicators.iter().zip(&streams).enumerate() {
                let salt = round * 100 + number as u32;
                sums.push((
                    salt,
                    self.start(communicator, self.task.rank, LARGE, salt, stream)?,
                ));
            }
            for ((salt, sum), stream) in sums.into_iter().zip(&streams) {
                self.compare(&sum, self.task.ranks, salt, stream)?;
            }
        }
        communicators
            .into_iter()
            .try_for_each(Communicator::destroy)?;
        Ok(format!(
            "{COMMUNICATORS} communicators at the same time, {ROUNDS} rounds"
        ))
    }

    fn split(&mut self) -> Result<String> {
        let Task { rank, ranks, .. } = self.task;
        let world = self.join()?;
        self.check(&world, rank, ranks, LARGE)?;
        // Pairs of ranks, each in reverse order. If the number of ranks is odd, the last is alone.
        let pair = rank / 2;
        let first = rank / 2 * 2;
        let size = (ranks - first).min(2);
        let reversed = world
            .split(Some(pair as u16), ranks - rank)?
            .context("a colour gave no communicator")?;
        self.check(&reversed, size - 1 - (rank - first), size, LARGE)?;
        self.check(&world, rank, ranks, SMALL)?;
        reversed.destroy()?;
        self.check(&world, rank, ranks, SMALL)?;
        let alone = world
            .split(Some(rank as u16), 0)?
            .context("a colour gave no communicator")?;
        self.check(&alone, 0, 1, SMALL)?;
        alone.destroy()?;
        let rest = world.split((rank > 0).then_some(0), rank)?;
        ensure!(
            rest.is_some() == (rank > 0),
            "no colour gave a communicator"
        );
        match rest {
            Some(rest) => {
                self.check(&rest, rank - 1, ranks - 1, LARGE)?;
                rest.destroy()?;
            }
            None => self.steps += 1,
        }
        // A child that outlives its parent.
        let child = world
            .split(Some(0), rank)?
            .context("a colour gave no communicator")?;
        world.destroy()?;
        self.check(&child, rank, ranks, LARGE)?;
        child.destroy()?;
        Ok("pairs in reverse order, each rank alone, all but one rank, a child that outlives its parent".to_owned())
    }

    fn again(&mut self) -> Result<String> {
        let Task {
            rank, ranks, count, ..
        } = self.task;
        let warm = count / 10;
        let mut before = None;
        for number in 0..count {
            if number == warm {
                before = Some(Health::now()?);
            }
            let communicator = self.join()?;
            self.check(&communicator, rank, ranks, SMALL)?;
            communicator.destroy()?;
        }
        let before = before.context("no communicator was created")?;
        self.held = Some((before, Health::now()?, count - warm));
        Ok(String::new())
    }

    fn abort(&mut self) -> Result<String> {
        const ROUNDS: u32 = 3;
        let Task { rank, ranks, .. } = self.task;
        let mut longest = Duration::ZERO;
        for _ in 0..ROUNDS {
            let communicator = self.join()?;
            self.check(&communicator, rank, ranks, LARGE)?;
            let stream = self.occupy(&communicator)?;
            // The ranks abort at different moments: when the later ranks abort, their peers are
            // gone.
            std::thread::sleep(ABORT_DELAY * (rank as u32 + 1));
            self.ensure_busy(&stream)?;
            let start = Instant::now();
            communicator.abort()?;
            longest = longest.max(start.elapsed());
            stream.synchronize().context("wait for what was aborted")?;
            let communicator = self.join()?;
            self.check(&communicator, rank, ranks, LARGE)?;
            communicator.destroy()?;
        }
        Ok(format!(
            "{ROUNDS} aborted while in use, which took up to {:.0} ms, and created again",
            longest.as_secs_f64() * 1e3
        ))
    }

    fn lost(&mut self) -> Result<String> {
        let Task { rank, ranks, .. } = self.task;
        let communicator = self.join()?;
        self.check(&communicator, rank, ranks, LARGE)?;
        let stream = self.occupy(&communicator)?;
        std::thread::sleep(ABORT_DELAY);
        self.ensure_busy(&stream)?;
        if rank + 1 == ranks {
            signal::raise(Signal::SIGKILL).context("end this process")?;
        }
        let start = Instant::now();
        let told = loop {
            if let Err(error) = communicator.health() {
                break error;
            }
            ensure!(
                start.elapsed() < PATIENCE,
                "no error within {} s after a rank was killed",
                PATIENCE.as_secs()
            );
            std::thread::sleep(Duration::from_millis(5));
        };
        let told_after = start.elapsed();
        communicator.abort()?;
        stream.synchronize().context("wait for what was aborted")?;
        Ok(format!(
            "rank {rank} got the error after {:.1} s: {told:#}",
            told_after.as_secs_f64()
        ))
    }

    fn mixed(&mut self) -> Result<String> {
        let communicator = self.join()?;
        self.check(&communicator, self.task.rank, self.task.ranks, SMALL)?;
        bail!("communication over two networks succeeded, and should have failed")
    }

    fn returns(&mut self) -> Result<String> {
        let Task {
            rank,
            ranks,
            folder,
            ..
        } = &self.task;
        let rank = *rank;
        let ranks = *ranks;
        let folder = folder.clone();
        let first = self.join()?;
        let mut longest = Duration::ZERO;
        // Only rank 0 looks for the mark `Returned`, and tells the others by an all-reduce, because
        // all ranks have to stop after the same all-reduce.
        loop {
            let start = Instant::now();
            self.check(&first, rank, ranks, LARGE)?;
            if rank == 0 && !Mark::InUse.is_set(&folder) {
                Mark::InUse.set(&folder)?;
            }
            let is_over = self.any(&first, rank == 0 && Mark::Returned.is_set(&folder))?;
            longest = longest.max(start.elapsed());
            if is_over {
                break;
            }
            ensure!(!Mark::GaveUp.is_set(&folder), "told to end");
            ensure!(
                start.elapsed() < PATIENCE,
                "two all-reduces took over {} s",
                PATIENCE.as_secs()
            );
        }
        let second = self.join()?;
        self.check(&second, rank, ranks, LARGE)?;
        self.any(&second, false)?;
        if rank == 0 {
            Mark::SecondInUse.set(&folder)?;
        }
        ensure!(
            Mark::Counted.wait(&folder, || Mark::GaveUp.is_set(&folder))?,
            "told to end"
        );
        for communicator in [first, second] {
            self.check(&communicator, rank, ranks, LARGE)?;
            communicator.destroy()?;
        }
        Ok(format!(
            "an all-reduce of {} MiB and one of 4 bytes took at most {:.0} ms together",
            LARGE >> 18,
            longest.as_secs_f64() * 1e3
        ))
    }

    fn join(&mut self) -> Result<Communicator> {
        let id = self.next_id()?;
        self.nccl.join(&id, self.task.rank, self.task.ranks)
    }

    /// Returns the next id. Rank 0 makes it, and shares it through the folder.
    fn next_id(&mut self) -> Result<Id> {
        let file = self
            .task
            .folder
            .join(format!("id-{}-{}", self.task.scenario.name(), self.ids));
        self.ids += 1;
        if self.task.rank == 0 {
            let id = self.nccl.unique_id()?;
            let unfinished = file.with_extension("new");
            fs::write(&unfinished, id.bytes())
                .and_then(|()| fs::rename(&unfinished, &file))
                .context("write the communicator's id for the other ranks")?;
            return Ok(id);
        }
        let start = Instant::now();
        loop {
            if let Ok(bytes) = fs::read(&file) {
                let bytes: [u8; ID_BYTES] = bytes
                    .try_into()
                    .map_err(|_| anyhow!("{} is damaged", file.display()))?;
                return Ok(Id::from_bytes(bytes));
            }
            ensure!(
                start.elapsed() < PATIENCE,
                "no communicator id from rank 0 within {} s",
                PATIENCE.as_secs()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Runs an all-reduce and checks every value. `index` is this rank's place among `size` ranks.
    fn check(
        &mut self,
        communicator: &Communicator,
        index: usize,
        size: usize,
        count: usize,
    ) -> Result<()> {
        let stream = Arc::clone(&self.stream);
        let salt = self.steps;
        self.steps += 1;
        let sum = self.start(communicator, index, count, salt, &stream)?;
        self.compare(&sum, size, salt, &stream)?;
        communicator.health()
    }

    /// Returns true on all ranks if `is_so` is true on any of them. Uses an all-reduce.
    fn any(&self, communicator: &Communicator, is_so: bool) -> Result<bool> {
        let own = self.stream.clone_htod(&[f32::from(u8::from(is_so))])?;
        let mut sum = self.stream.alloc_zeros::<f32>(1)?;
        communicator.all_reduce(&own, &mut sum, &self.stream)?;
        let sum = self.stream.clone_dtoh(&sum)?;
        self.stream.synchronize()?;
        Ok(sum.iter().any(|count| *count > 0.0))
    }

    fn start(
        &self,
        communicator: &Communicator,
        index: usize,
        count: usize,
        salt: u32,
        stream: &Arc<CudaStream>,
    ) -> Result<CudaSlice<f32>> {
        let own: Vec<f32> = (0..count)
            .map(|at| value(at, salt) + index as f32)
            .collect();
        let own = stream.clone_htod(&own)?;
        let mut sum = stream.alloc_zeros::<f32>(count)?;
        communicator.all_reduce(&own, &mut sum, stream)?;
        Ok(sum)
    }

    fn compare(
        &mut self,
        sum: &CudaSlice<f32>,
        size: usize,
        salt: u32,
        stream: &Arc<CudaStream>,
    ) -> Result<()> {
        let sum = stream.clone_dtoh(sum)?;
        stream.synchronize()?;
        let expected = |at: usize| value(at, salt) * size as f32 + (size * (size - 1) / 2) as f32;
        self.wrong += sum
            .iter()
            .enumerate()
            .filter(|(at, sum)| **sum != expected(*at))
            .count() as u64;
        self.checked += 1;
        Ok(())
    }

    /// Starts more all-reduces than the network can complete before the scenario's fault.
    fn occupy(&self, communicator: &Communicator) -> Result<Arc<CudaStream>> {
        let (count, times) = LONG_RUN;
        let stream = self.gpu.new_stream()?;
        let from = stream.alloc_zeros::<f32>(count)?;
        let mut into = stream.alloc_zeros::<f32>(count)?;
        for _ in 0..times {
            communicator.all_reduce(&from, &mut into, &stream)?;
        }
        Ok(stream)
    }

    fn ensure_busy(&self, stream: &Arc<CudaStream>) -> Result<()> {
        let end = stream.record_event(None)?;
        ensure!(
            !end.is_complete(),
            "the all-reduces were done before the fault could be injected"
        );
        Ok(())
    }
}

/// Returns a small whole number. Sums of such numbers over ranks are exact.
fn value(at: usize, salt: u32) -> f32 {
    ((at as u32)
        .wrapping_mul(2_654_435_761)
        .wrapping_add(salt.wrapping_mul(40_503))
        >> 22) as f32
}
