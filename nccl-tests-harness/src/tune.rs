//! `nccl-spark tune`: measures several settings, shows which are best and by how much, and writes them into a settings file.
//!
//! Every figure is a run of its own (`lead`): the ranks are started with the settings in their environment, connect, and time
//! an all-gather of each size. Each round measures all settings once, so that a change of the machine affects all of them.

pub mod collectives;
mod follow;
mod judge;
mod keep;
mod show;

use crate::collective::Collective;
use crate::job::RankEnv;
use crate::launch::World;
use crate::lead::{self, Plan};
use crate::report;
use crate::run_options::Run;
use crate::sizes;
use crate::watch::Watch;
use anyhow::{Context, Result, ensure};
use clap::{Args, Subcommand};
use follow::Followers;
use judge::{Candidate, Record, Verdict};
use nccl_net_spark::config::{Settings, Source};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::geteuid;
use serde::Serialize;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// Options of tune: those of a run, whose sizes and channels have defaults of their own here, and which settings to try.
///
/// The sizes: with two ranks and two channels, messages of 64 KiB to 1 MiB, NCCL's largest, of which up to four are under way.
#[derive(Debug, Args)]
#[command(mut_arg("min_bytes", |arg| arg.default_value("256K")), mut_arg("max_bytes", |arg| arg.default_value("16M")))]
#[command(mut_arg("step_factor", |arg| arg.default_value("4")), mut_arg("channels", |arg| arg.default_value("2")))]
#[command(mut_arg("warmup_iters", |arg| arg.default_value("5")), args_conflicts_with_subcommands = true)]
pub struct Options {
    /// Something else to tune.
    #[command(subcommand)]
    pub what: Option<What>,
    /// Options of each run.
    #[command(flatten)]
    pub run: Run,
    /// Numbers of queue pairs per rail of a connection to try (NCCL_IB_QPS_PER_CONNECTION).
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,2,4,8", help_heading = "Tuning",
          value_parser = clap::value_parser!(u8).range(1..=16))]
    qps: Vec<u8>,
    /// Smallest parts into which a message is split over rails, to try (NCCL_SPARK_MIN_SHARE_BYTES).
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', default_value = "8K,16K,32K,64K,128K", help_heading = "Tuning",
          value_parser = parse_share)]
    min_share: Vec<u64>,
    /// Number of rounds; each measures all settings once.
    #[arg(long, value_name = "N", default_value_t = 3, help_heading = "Tuning",
          value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// The settings file to write [default: the one that NCCL_SPARK_SETTINGS_FILE names, else /etc/nccl-spark.conf for root and
    /// ~/.nccl-spark.conf for other users].
    #[arg(long, value_name = "FILE", help_heading = "Tuning")]
    output: Option<PathBuf>,
    /// Measure, but write no file.
    #[arg(long, help_heading = "Tuning")]
    dry_run: bool,
    /// Write the best settings even if they are not clearly better than the defaults.
    #[arg(long, help_heading = "Tuning")]
    write_best: bool,
}

/// What else can be tuned.
#[derive(Debug, Subcommand)]
pub enum What {
    /// Measure with your own build of nccl-tests which protocol and how many channels are fastest for a collective at each size,
    /// and write that table for the plugin's tuner.
    ///
    /// Runs nccl-tests with NCCL's own choice and with each (protocol, channels) in turns. A size gets a row in the table only if its
    /// slowest round is faster than the fastest of NCCL's choice (of five rounds or more, one of each side may be an outlier). The
    /// whole table is then measured against NCCL's choice again, and rows that are not confirmed are removed.
    Collectives(Box<collectives::options::Options>),
}

/// What to tune, checked.
pub struct Tune {
    plan: Plan,
    candidates: Vec<Candidate>,
    rounds: u32,
    output: PathBuf,
    dry_run: bool,
    write_best: bool,
    /// The other settings of this machine's files; the ranks read this in place of those files.
    others: File,
    default_share_bytes: u64,
}

/// Rounds in which the proposed settings and the defaults are measured again: with five each, all of one are above all of the other
/// by chance once in 252 times.
const FINAL_ROUNDS: u32 = 5;

/// The results as JSON.
#[derive(Debug, Default, Serialize)]
pub struct Told {
    version: &'static str,
    fabric_text: String,
    ranks: usize,
    channels: usize,
    sizes_bytes: Vec<usize>,
    defaults: Record,
    tried: Vec<Record>,
    proposed: Option<Candidate>,
    verdict: Option<Verdict>,
    chosen: Option<Candidate>,
    written: Option<PathBuf>,
}

/// Tunes, or takes part as the rank that a launcher started; `variable` gives the value of an environment variable.
///
/// # Errors
/// When the defaults cannot be measured, or the file not be written.
pub fn run(
    options: Options,
    program: &Path,
    world: Option<World>,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<bool> {
    let tune = options.checked(program, world, variable)?;
    if let Some((world, meeting)) = tune.plan.launched.as_ref().filter(|(world, _)| world.rank > 0) {
        return follow::follow(&tune, world, meeting, program).map(|()| true);
    }
    let json = tune.plan.json.as_ref().map(report::open).transpose()?;
    let told = tune.tune(program, &mut report::beside(tune.plan.json.as_ref()))?;
    if let Some(json) = json {
        report::write(&told, json)?;
    }
    Ok(true)
}

impl Options {
    fn checked(self, program: &Path, world: Option<World>, variable: impl Fn(&str) -> Option<String>) -> Result<Tune> {
        let named = variable(keep::SETTINGS_FILE);
        let settings = match &named {
            // The file to be written need not exist yet.
            Some(path) if !Path::new(path).exists() => Settings::gather(&[], &[])?,
            _ => Settings::of_this_process()?,
        };
        let output = keep::place(self.output, named, geteuid().is_root())?;
        if !self.dry_run && output.exists() {
            keep::check(&output)?;
        }
        let pairs = self.min_share.iter().flat_map(|&share| self.qps.iter().map(move |&qps| (qps, share)));
        let default_share = settings.held().iter().find(|held| held.row.name == keep::MIN_SHARE);
        Ok(Tune {
            plan: self.run.plan(Collective::AllGather, program, world, variable("NCCL_IBVERBS_LIB"))?,
            candidates: pairs.map(|(qps, min_share_bytes)| Candidate { qps, min_share_bytes }).collect(),
            rounds: self.rounds,
            output,
            dry_run: self.dry_run,
            write_best: self.write_best,
            others: others(&settings)?,
            default_share_bytes: default_share.and_then(|held| held.row.default.parse().ok()).unwrap_or(1),
        })
    }
}

/// A file in memory with the settings of this machine's files, except those that are tuned.
fn others(settings: &Settings) -> Result<File> {
    let descriptor = memfd_create("nccl-spark-settings", MFdFlags::MFD_CLOEXEC).context("make a file in memory")?;
    let mut file = File::from(descriptor);
    for held in settings.held() {
        let tuned = [keep::QPS, keep::MIN_SHARE].contains(&held.row.name);
        if let (Source::File { .. }, false) = (&held.source, tuned) {
            writeln!(file, "{}={}", held.row.name, held.value).context("write a file in memory")?;
        }
    }
    Ok(file)
}

impl Tune {
    fn tune(&self, program: &Path, out: &mut impl Write) -> Result<Told> {
        let followers = match &self.plan.launched {
            Some((_, meeting)) => Followers::gather(meeting.clone())?,
            None => Followers::default(),
        };
        let watch = Watch::start("runs", || self.runs());
        let mut out = watch.over(out);
        let out = &mut out;
        let fabric_text = String::new();
        let mut bench =
            Bench { tune: self, program, followers: &followers, runs: 0, fabric_text, watch: watch.clone() };
        let Plan { ranks, channels, min_bytes, max_bytes, step, .. } = self.plan;
        let sizes_bytes = sizes::sweep(min_bytes, max_bytes, step).collect();
        let mut told = Told { version: env!("CARGO_PKG_VERSION"), ranks, channels, sizes_bytes, ..Told::default() };
        show::introduction(self, out)?;
        (told.defaults, told.tried) = bench.sweep(out)?;
        told.fabric_text.clone_from(&bench.fabric_text);
        show::table(&told, out)?;
        let proposed = judge::propose(&told.defaults, &told.tried, self.default_share_bytes);
        let proposed = proposed.and_then(|record| record.candidate).context("no settings but the defaults work")?;
        told.proposed = Some(proposed);
        let (defaults, again) = bench.again(proposed, out)?;
        watch.end();
        let verdict = judge::judge(&defaults, &again);
        told.chosen = (verdict.holds || self.write_best).then_some(proposed);
        show::verdict(&told, proposed, &verdict, out)?;
        let remark = show::remark(&told, &verdict);
        told.verdict = Some(verdict);
        if self.dry_run {
            writeln!(out, "# no file is written (--dry-run)")?;
            followers.end()?;
            return Ok(told);
        }
        let pairs = told.chosen.map(Candidate::pairs);
        for line in keep::keep(&self.output, &keep::SHARES, pairs.as_ref().map(|pairs| &pairs[..]), &remark)? {
            writeln!(out, "# {line}")?;
        }
        out.flush()?;
        followers.keep(told.chosen, &remark)?;
        told.written = told.chosen.map(|_| self.output.clone());
        Ok(told)
    }

    /// How many runs there are.
    fn runs(&self) -> u64 {
        (self.candidates.len() as u64 + 1) * u64::from(self.rounds) + 2 * u64::from(FINAL_ROUNDS)
    }

    /// The ranks' environment: other settings as on this machine, the tuned ones as the candidate has them. An empty variable
    /// counts as unset.
    fn rank_env(&self, candidate: Option<Candidate>) -> Vec<RankEnv> {
        let others = format!("/proc/{}/fd/{}", std::process::id(), self.others.as_raw_fd());
        let mut pairs = vec![(keep::SETTINGS_FILE, others)];
        match candidate {
            Some(candidate) => pairs.extend(candidate.pairs()),
            None => pairs.extend([keep::QPS, keep::MIN_SHARE].map(|name| (name, String::new()))),
        }
        let mut all = self.plan.rank_env.clone();
        for rank in 0..self.plan.ranks {
            all.extend(pairs.iter().map(|(name, value)| RankEnv {
                rank,
                name: (*name).to_owned(),
                value: value.clone(),
            }));
        }
        all
    }
}

/// Makes runs.
struct Bench<'a> {
    tune: &'a Tune,
    program: &'a Path,
    followers: &'a Followers,
    runs: u32,
    fabric_text: String,
    watch: Watch,
}

impl Bench<'_> {
    /// The defaults and all candidates, in rounds that begin at different ones.
    fn sweep(&mut self, out: &mut impl Write) -> Result<(Record, Vec<Record>)> {
        let candidates = self.tune.candidates.iter().map(|&candidate| Some(candidate));
        let blank = |candidate| Record { candidate, ..Record::default() };
        let mut records: Vec<Record> = [None].into_iter().chain(candidates).map(blank).collect();
        for round in 0..self.tune.rounds {
            writeln!(out, "# round {} of {}: {} settings", round + 1, self.tune.rounds, records.len())?;
            out.flush()?;
            let first = round as usize * records.len() / self.tune.rounds as usize;
            for at in 0..records.len() {
                let index = (first + at) % records.len();
                self.add(&mut records[index])?;
            }
        }
        let defaults = records.remove(0);
        Ok((defaults, records))
    }

    /// The defaults and the proposed settings in turns; who goes first changes.
    fn again(&mut self, proposed: Candidate, out: &mut impl Write) -> Result<(Record, Record)> {
        writeln!(out, "# the best settings again, in turns with the defaults: {FINAL_ROUNDS} rounds")?;
        out.flush()?;
        let mut records = [None, Some(proposed)].map(|candidate| Record { candidate, ..Record::default() });
        for round in 0..FINAL_ROUNDS as usize {
            for at in 0..2 {
                self.add(&mut records[(round + at) % 2])?;
            }
        }
        let [defaults, again] = records;
        ensure!(again.failed.is_none(), "the proposed settings fail: {}", again.failed.unwrap_or_default());
        Ok((defaults, again))
    }

    /// A run more for a record that has not failed. Only the defaults must not fail.
    fn add(&mut self, record: &mut Record) -> Result<()> {
        if record.failed.is_some() {
            return Ok(());
        }
        let measured = self.measure(record.candidate);
        self.watch.step();
        match measured {
            Ok(round) => record.rounds.push(round),
            Err(error) if record.candidate.is_some() => record.failed = Some(format!("{error:#}")),
            Err(error) => return Err(error.context("with the defaults")),
        }
        Ok(())
    }

    /// Bus bandwidth in GB/s by size.
    fn measure(&mut self, candidate: Option<Candidate>) -> Result<Vec<f64>> {
        self.runs += 1;
        let mut plan = Plan { rank_env: self.tune.rank_env(candidate), ..self.tune.plan.clone() };
        if let Some((world, meeting)) = &mut plan.launched {
            (*world, *meeting) = follow::of_run(world, meeting, self.runs);
            self.followers.run(self.runs, candidate)?;
        }
        let mut report = lead::blank(&plan);
        let right = lead::lead(&plan, self.program, &self.watch.part(), std::io::sink(), &mut report)?;
        let wrong = report.rows.iter().flat_map(|row| &row.first_wrong).next();
        ensure!(right, "data is wrong: {}", wrong.map_or("no rank described it", String::as_str));
        self.fabric_text = report.fabric_text;
        Ok(report.rows.iter().map(|row| row.busbw_gb_s).collect())
    }
}

fn parse_share(text: &str) -> Result<u64, String> {
    // The setting's own range.
    let share = sizes::parse(text)? as u64;
    (128..=1 << 30).contains(&share).then_some(share).ok_or_else(|| "128 to 1G".to_owned())
}
