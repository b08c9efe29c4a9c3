//! The command line of `nccl-spark tune`, checked before anything starts.

use super::collectives;
use super::judge::Candidate;
use super::keep;
use crate::commands::collectives::Collective;
use crate::commands::collectives::lead::Plan;
use crate::commands::collectives::options::Run;
use crate::ranks::job::RankEnv;
use crate::ranks::launch::World;
use crate::sizes;
use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use host::config::{Settings, Source};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// Options of tune: those of a run, whose sizes and channels have defaults of their own here, and
/// the settings to try.
///
/// With two ranks and two channels, the sizes make messages of 64 KiB to 1 MiB, NCCL's largest, of
/// which up to four are in flight.
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
    /// Smallest parts into which a message is split over rails, to try
    /// (NCCL_SPARK_MIN_SHARE_BYTES).
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', default_value = "8K,16K,32K,64K,128K", help_heading = "Tuning",
          value_parser = parse_share)]
    min_share: Vec<u64>,
    /// Number of rounds; each measures all settings once.
    #[arg(long, value_name = "N", default_value_t = 3, help_heading = "Tuning",
          value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// The settings file to write [default: the one that NCCL_SPARK_SETTINGS_FILE names, else
    /// /etc/nccl-spark.conf for root and ~/.nccl-spark.conf for other users].
    #[arg(long, value_name = "FILE", help_heading = "Tuning")]
    output: Option<PathBuf>,
    /// Measure, but write no file.
    #[arg(long, help_heading = "Tuning")]
    dry_run: bool,
    /// Write the best settings even if they are not clearly better than the defaults.
    #[arg(long, help_heading = "Tuning")]
    write_best: bool,
}

/// Other subjects of tuning.
#[derive(Debug, Subcommand)]
pub enum What {
    /// Measure with your own build of nccl-tests which protocol and how many channels are fastest
    /// for a collective at each size, and write that table for the plugin's tuner.
    ///
    /// Runs nccl-tests with NCCL's own choice and with each (protocol, channels) in turns. A size
    /// gets a row in the table only if its slowest round is faster than the fastest of NCCL's
    /// choice (of five rounds or more, one of each side may be an outlier). The whole table is then
    /// measured against NCCL's choice again, and rows that are not confirmed are removed.
    Collectives(Box<collectives::options::Options>),
}

pub struct Tune {
    pub plan: Plan,
    pub candidates: Vec<Candidate>,
    /// Number of rounds (1 or more).
    pub rounds: u32,
    pub output: PathBuf,
    pub dry_run: bool,
    pub write_best: bool,
    /// A file in memory with this machine's settings that are not tuned. The ranks read it instead
    /// of the machine's settings files.
    pub others: File,
    /// Default of the smallest part of a message that gets its own rail.
    pub default_share_bytes: u64,
}

/// Number of rounds in which the proposed settings and the defaults are measured again. With five
/// rounds each, all rounds of the proposed settings are above all rounds of the defaults by chance
/// once in 252 times.
pub const FINAL_ROUNDS: u32 = 5;

impl Options {
    /// Checks the options.
    ///
    /// # Errors
    /// Options contradict each other, or the settings file cannot be used.
    pub fn checked(
        self,
        program: &Path,
        world: Option<World>,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Tune> {
        let named = variable(keep::SETTINGS_FILE);
        let settings = keep::settings(named.as_deref())?;
        let output = keep::place(self.output, named)?;
        if !self.dry_run && output.exists() {
            keep::check(&output)?;
        }
        let pairs = self
            .min_share
            .iter()
            .flat_map(|&share| self.qps.iter().map(move |&qps| (qps, share)));
        let default_share = settings
            .in_effect()
            .iter()
            .find(|held| held.row.name == keep::MIN_SHARE);
        Ok(Tune {
            plan: self.run.plan(
                Collective::AllGather,
                program,
                world,
                variable("NCCL_IBVERBS_LIB"),
            )?,
            candidates: pairs
                .map(|(qps, min_share_bytes)| Candidate {
                    qps,
                    min_share_bytes,
                })
                .collect(),
            rounds: self.rounds,
            output,
            dry_run: self.dry_run,
            write_best: self.write_best,
            others: others(&settings)?,
            default_share_bytes: default_share
                .and_then(|held| held.row.default.parse().ok())
                .unwrap_or(1),
        })
    }
}

/// Makes a file in memory with the settings of this machine's files, except those that are tuned.
fn others(settings: &Settings) -> Result<File> {
    let descriptor = memfd_create("nccl-spark-settings", MFdFlags::MFD_CLOEXEC)
        .context("make a file in memory")?;
    let mut file = File::from(descriptor);
    for held in settings.in_effect() {
        let tuned = [keep::QPS, keep::MIN_SHARE].contains(&held.row.name);
        if let (Source::File { .. }, false) = (&held.source, tuned) {
            writeln!(file, "{}={}", held.row.name, held.value).context("write a file in memory")?;
        }
    }
    Ok(file)
}

impl Tune {
    pub fn runs(&self) -> u64 {
        (self.candidates.len() as u64 + 1) * u64::from(self.rounds) + 2 * u64::from(FINAL_ROUNDS)
    }

    /// Writes the chosen settings into this machine's file. If `chosen` is `None`, removes both
    /// settings from the file. Returns lines for the user.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn write(&self, chosen: Option<Candidate>, remark: &str) -> Result<Vec<String>> {
        let pairs = chosen.map(Candidate::pairs).unwrap_or_default();
        keep::write_settings(&self.output, &keep::SHARES, &pairs, remark)
    }

    /// Returns the environment of all ranks: the candidate's settings (`None`: the defaults), and
    /// the file with the other settings. For the defaults, both variables are empty, because the
    /// plugin treats an empty variable as unset.
    pub fn rank_env(&self, candidate: Option<Candidate>) -> Vec<RankEnv> {
        let others = format!(
            "/proc/{}/fd/{}",
            std::process::id(),
            self.others.as_raw_fd()
        );
        let mut pairs = vec![(keep::SETTINGS_FILE, others)];
        match candidate {
            Some(candidate) => pairs.extend(candidate.pairs()),
            None => pairs.extend([keep::QPS, keep::MIN_SHARE].map(|name| (name, String::new()))),
        }
        let env = |rank| {
            let pair_env = move |(name, value): &(&str, String)| RankEnv {
                rank,
                name: (*name).to_owned(),
                value: value.clone(),
            };
            pairs.iter().map(pair_env)
        };
        self.plan
            .rank_env
            .iter()
            .cloned()
            .chain((0..self.plan.terms.ranks).flat_map(env))
            .collect()
    }
}

fn parse_share(text: &str) -> Result<u64, String> {
    // The setting itself has this range.
    let share = sizes::parse(text)? as u64;
    (128..=1 << 30)
        .contains(&share)
        .then_some(share)
        .ok_or_else(|| "128 to 1G".to_owned())
}
