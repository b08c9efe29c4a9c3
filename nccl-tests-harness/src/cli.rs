//! The command line: what may be said, checked before anything starts. Commands own their options.

mod examples;

use crate::bench::options::Bench;
use crate::communicators;
use crate::fabric::{self, Kind, Wish};
use crate::install;
use crate::job::RankEnv;
use crate::job_environment;
use crate::machine;
use crate::manual;
use crate::memory;
use crate::nccl_tests;
use crate::places;
use crate::run_options::Run;
use crate::tune;
use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand};
use softverbs::profile::Profile;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Tests, measures, tunes and installs the NCCL network plugin for DGX Spark.
#[derive(Debug, Parser)]
#[command(name = "nccl-spark", version = env!("PROGRAM_VERSION"), infer_subcommands = false, after_help = examples::ALL)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// Prints results and errors only: no progress, no lines that start with #.
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Shows the plugin's log as NCCL_DEBUG=INFO does; -vv as NCCL_DEBUG=TRACE.
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// What the program can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Times and checks an all-gather over host memory, in place.
    ///
    /// The size is what every rank ends with; each rank contributes size / ranks, rounded down to whole bytes. busbw =
    /// algbw x (ranks - 1) / ranks.
    #[command(alias = "all_gather", after_help = examples::ALL_GATHER)]
    AllGather(Run),
    /// Times and checks an all-reduce over host memory, out of place.
    ///
    /// The CPU adds up bytes, which wrap around. The size is what each rank contributes. busbw = algbw x 2 (ranks - 1) / ranks.
    #[command(alias = "all_reduce", after_help = examples::ALL_REDUCE)]
    AllReduce(Run),
    /// Times and checks a reduce-scatter over host memory, out of place.
    ///
    /// The CPU adds up bytes, which wrap around. The size is what each rank contributes; each ends with size / ranks, rounded down to
    /// whole bytes. busbw = algbw x (ranks - 1) / ranks.
    #[command(alias = "reduce_scatter", after_help = examples::REDUCE_SCATTER)]
    ReduceScatter(Run),
    /// Times and checks a broadcast from rank 0, in place.
    ///
    /// The size is what every rank ends with. busbw = algbw.
    #[command(after_help = examples::BROADCAST)]
    Broadcast(Run),
    /// Times and checks an all-to-all: every rank sends a part to every rank, out of place.
    ///
    /// The size is what each rank sends in all; each part is size / ranks, rounded down to whole bytes. busbw = algbw x
    /// (ranks - 1) / ranks.
    #[command(name = "alltoall", aliases = ["all-to-all", "all_to_all"], after_help = examples::ALL_TO_ALL)]
    AllToAll(Run),
    /// Times and checks a ring: every rank sends to the next one and receives from the one before, out of place.
    ///
    /// The size is what each rank sends. busbw = algbw.
    #[command(name = "sendrecv", aliases = ["send-recv", "send_recv"], after_help = examples::SEND_RECV)]
    SendRecv(Run),
    /// Measures bandwidth, latency and message rate between two ranks, and against another plugin.
    ///
    /// Rank 0 sends to rank 1 (latency: ping-pong). One thread per rank posts messages and tests the oldest of each connection, as
    /// NCCL's proxy thread does. Every byte is checked once for each size, outside the timed part.
    #[command(after_help = examples::BENCH)]
    Bench(Box<Bench>),
    /// Finds the fastest settings for these machines and writes them to the settings file.
    ///
    /// Measures numbers of queue pairs and smallest shares in turns, then the best of them in turns with the defaults. Writes them only
    /// if their slowest round is faster than the fastest round of the defaults.
    #[command(after_help = examples::TUNE)]
    Tune(Box<tune::Options>),
    /// Writes a tuner's table into this machine's settings file.
    #[command(name = "tune-collectives-write", hide = true)]
    TuneCollectivesWrite(tune::collectives::write::Task),
    /// Runs your own build of nccl-tests over this plugin, or in turns over it and NCCL's own networks.
    ///
    /// Sets the environment and prints it, reads the program's table and NCCL's log, and fails if NCCL used another network than the one
    /// asked for. To NCCL each rank on this machine is a host of its own.
    #[command(name = "nccl-tests", alias = "nccl_tests", after_help = examples::NCCL_TESTS)]
    NcclTests(Box<nccl_tests::options::Options>),
    /// Becomes a rank of nccl-tests.
    #[command(name = "nccl-tests-rank", hide = true)]
    NcclTestsRank(nccl_tests::ranks::Rank),
    /// Stress-tests communicator lifecycle: many at once, split, re-created, aborted, and with a rank that dies.
    ///
    /// Each rank is a process that uses NCCL on a GPU; ranks may share a GPU. Every value is checked, NCCL's log must show the plugin,
    /// and memory, descriptors and threads of a process must not grow.
    #[command(after_help = examples::COMMUNICATORS)]
    Communicators(Box<communicators::options::Options>),
    /// Becomes a rank of communicators.
    #[command(name = "communicators-rank", hide = true)]
    CommunicatorsRank(communicators::rank::Task),
    /// Shows which kinds of memory the plugin can send from and receive into: malloc, CUDA pinned, managed, GPU.
    ///
    /// A GPU kernel writes a pattern, the plugin moves it into memory of the same kind, another kernel counts wrong bytes. Without a GPU
    /// the CPU does this with malloc alone. --litmus also tests whether NCCL's LL128 protocol is safe on this machine.
    #[command(after_help = examples::MEMORY)]
    Memory(Box<memory::options::Options>),
    /// Injects faults into the software fabric while a job runs over it, and shows what runs.
    #[command(after_help = examples::FABRIC)]
    Fabric(fabric::command::Options),
    /// Shows which RoCE ports of this machine would be merged, the expected rate, and why the others are not used.
    ///
    /// Exit status: 0 at least one rail is usable, 1 none is or the machine cannot be examined, 2 the command line is wrong.
    #[command(after_help = examples::RAILS)]
    Rails(machine::Options),
    /// Lists the plugin's settings: name, default, meaning, current value.
    #[command(after_help = examples::SETTINGS)]
    Settings,
    /// Prints the environment variables that make a job use the plugin, for a shell, docker or Ray.
    ///
    /// Set them for a job, not in a login script: with NCCL_NET=Spark, NCCL fails where no rail exists.
    #[command(after_help = examples::ENV)]
    Env(job_environment::Options),
    /// Installs this program, the plugin, the software fabric, shell completions and manual pages.
    ///
    /// Files that install did not put there are neither replaced nor removed. DIR/lib/nccl-spark/manifest lists what is installed.
    #[command(after_help = examples::INSTALL)]
    Install(install::Install),
    /// Removes what install installed; files that were changed since are kept.
    #[command(after_help = examples::UNINSTALL)]
    Uninstall(install::Uninstall),
    /// Prints completions for a shell.
    #[command(after_help = examples::COMPLETIONS)]
    Completions(manual::Completions),
    /// Prints the manual page.
    #[command(name = "man", hide = true)]
    Manual(manual::Manual),
    /// One rank of a run; started by the other commands, with the control connection to them as standard input.
    #[command(hide = true)]
    Rank {
        /// Its number, for whoever lists processes.
        number: usize,
        /// The plugin's library on this machine.
        #[arg(long)]
        plugin: Option<PathBuf>,
        /// Started by a launcher.
        #[arg(long)]
        launched: bool,
    },
}

/// What the messages travel over.
#[derive(Debug, Args)]
#[command(next_help_heading = "Fabric")]
pub struct FabricOptions {
    /// Network to use: RDMA devices or the software fabric [default: verbs, or soft where there is no RDMA device].
    #[arg(long, value_name = "KIND", value_enum)]
    fabric: Option<Kind>,
    /// Rails of the software fabric: a built-in profile (spark-1cable, spark-2cable, unpaced) or a file [default:
    /// spark-1cable].
    #[arg(long, value_name = "NAME|FILE", value_parser = ProfileParser, hide_possible_values = true)]
    profile: Option<String>,
    /// Factor on all rates of the profile.
    #[arg(long, value_name = "F", value_parser = parse_scale)]
    scale: Option<f64>,
    /// Limits a rail of the software fabric to a part of its rate, on every rank, as in rocep1s0f0=0.25; may be given more
    /// than once.
    #[arg(long, value_name = "RAIL=FACTOR", value_parser = parse_slow_rail)]
    slow_rail: Vec<(String, f64)>,
    /// Software fabric's library [default: the one installed with or built beside this program].
    #[arg(long, value_name = "PATH")]
    softverbs: Option<PathBuf>,
    /// Name of the software fabric, for `nccl-spark fabric` [default: nccl-spark-PID].
    #[arg(long, value_name = "NAME", value_parser = parse_fabric_name)]
    fabric_name: Option<String>,
}

impl FabricOptions {
    /// What is said of the software fabric asks for it.
    ///
    /// # Errors
    /// When options contradict each other.
    pub fn wish(self, program: &Path) -> Result<Wish, clap::Error> {
        let given = [
            ("--profile", self.profile.is_some()),
            ("--scale", self.scale.is_some()),
            ("--slow-rail", !self.slow_rail.is_empty()),
            ("--softverbs", self.softverbs.is_some()),
            ("--fabric-name", self.fabric_name.is_some()),
        ];
        let first = given.iter().find(|(_, given)| *given).map(|(name, _)| *name);
        let kind = match (self.fabric, first) {
            (Some(Kind::Verbs), Some(name)) => {
                return Err(wrong(format!("{name} is for the software fabric: not with --fabric verbs")));
            }
            (None, Some(_)) => Some(Kind::Soft),
            (kind, _) => kind,
        };
        Ok(Wish {
            kind,
            profile: self.profile.unwrap_or_else(|| "spark-1cable".to_owned()),
            scale: self.scale.unwrap_or(1.0),
            slow_rails: self.slow_rail,
            library: self.softverbs.unwrap_or_else(|| places::fabric(program)),
            name: self.fabric_name,
        })
    }
}

/// Takes any text: the built-in names are there for completions.
#[derive(Debug, Clone)]
struct ProfileParser;

impl TypedValueParser for ProfileParser {
    type Value = String;

    fn parse_ref(
        &self,
        command: &clap::Command,
        option: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        StringValueParser::new().parse_ref(command, option, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(Profile::names().into_iter().map(PossibleValue::new)))
    }
}

/// A mistake on the command line.
pub fn wrong(text: impl std::fmt::Display) -> clap::Error {
    Cli::command().error(ErrorKind::ValueValidation, text)
}

/// The plugin's library: `given`, or the one that belongs to `program`, or wherever the loader finds it.
///
/// # Errors
/// When the one given is not there.
pub fn library(given: Option<PathBuf>, program: &Path) -> Result<PathBuf, clap::Error> {
    match given {
        Some(path) => existing("--plugin", &path),
        None => Ok(places::plugin(program).unwrap_or_else(|| "libnccl-net-spark.so".into())),
    }
}

/// The whole path of a library that `option` names: without a slash it would be looked for in the loader's directories
/// instead of here.
///
/// # Errors
/// When it is not there.
pub fn existing(option: &str, path: &Path) -> Result<PathBuf, clap::Error> {
    path.canonicalize().map_err(|error| wrong(format!("{option} {}: {error}", path.display())))
}

/// `RANK:NAME=VALUE`.
///
/// # Errors
/// What is allowed.
pub fn parse_rank_env(text: &str) -> Result<RankEnv, String> {
    let parts = text.split_once(':').and_then(|(rank, variable)| Some((rank.parse().ok()?, variable.split_once('=')?)));
    match parts {
        Some((rank, (name, value))) if !name.is_empty() && !text.contains('\0') => {
            Ok(RankEnv { rank, name: name.to_owned(), value: value.to_owned() })
        }
        _ => Err("RANK:NAME=VALUE, as in 0:NCCL_IB_HCA==mlx5_0".to_owned()),
    }
}

/// `HOST:PORT`.
///
/// # Errors
/// What is allowed.
pub fn parse_place(text: &str) -> Result<(String, u16), String> {
    let parts =
        text.rsplit_once(':').and_then(|(host, port)| Some((host.trim_matches(['[', ']']), port.parse().ok()?)));
    match parts {
        Some((host, port)) if !host.is_empty() && port > 0 => Ok((host.to_owned(), port)),
        _ => Err("HOST:PORT, as in spark-1:29501".to_owned()),
    }
}

fn parse_scale(text: &str) -> Result<f64, String> {
    let scale = text.parse::<f64>().ok().filter(|scale| scale.is_finite() && *scale > 0.0);
    scale.ok_or_else(|| "a number above 0".to_owned())
}

/// A part of a rail's rate.
///
/// # Errors
/// What is allowed.
pub fn parse_factor(text: &str) -> Result<f64, String> {
    let factor = text.parse::<f64>().ok().filter(|factor| *factor > 0.0 && *factor <= 1.0);
    factor.ok_or_else(|| "must be above 0, up to 1".to_owned())
}

fn parse_slow_rail(text: &str) -> Result<(String, f64), String> {
    match text.split_once('=') {
        Some((rail, factor)) if !rail.is_empty() => Ok((rail.to_owned(), parse_factor(factor)?)),
        _ => Err("RAIL=FACTOR, as in rocep1s0f0=0.25".to_owned()),
    }
}

/// The name of a software fabric.
///
/// # Errors
/// What is allowed.
pub fn parse_fabric_name(text: &str) -> Result<String, String> {
    let plain = text.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c));
    match plain && (1..=64).contains(&text.len()) {
        true => Ok(text.to_owned()),
        false => Err("must be at most 64 letters, digits, - and _".to_owned()),
    }
}

/// What is wrong with a command line, in one line.
pub fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines =
        text.lines().map(str::trim).take_while(|line| !line.starts_with("For more") && !line.starts_with("Usage:"));
    let lines = lines.filter(|line| !line.is_empty()).map(plain);
    lines.collect::<Vec<_>>().join(" ").trim_start_matches("error: ").to_owned()
}

/// A line of clap's with what is allowed said plainly: "0 is not in 1..=4294967295" becomes "must be at least 1".
fn plain(line: &str) -> String {
    let range = line.rsplit_once(": ").and_then(|(before, reason)| {
        let (value, range) = reason.split_once(" is not in ")?;
        let (least, most) = range.split_once("..=")?;
        Some((before, value.parse::<i128>().ok()?, least.parse::<i128>().ok()?, most.parse::<i128>().ok()?))
    });
    if let Some((before, value, least, most)) = range {
        // Options without a greatest value of their own have that of their type.
        let is_open = most >= i128::from(u32::MAX);
        return match () {
            () if least == most => format!("{before}: must be {least}"),
            () if is_open && value < least => format!("{before}: must be at least {least}"),
            () if is_open => format!("{before}: must be at most {most}"),
            () => format!("{before}: must be {least} to {most}"),
        };
    }
    let too_large = "number too large to fit in target type";
    line.replace("invalid digit found in string", "must be a whole number").replace(too_large, "too large a number")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mistake(arguments: &str) -> String {
        one_line(&Cli::try_parse_from(arguments.split_whitespace()).unwrap_err())
    }

    /// As a shell takes a line apart, up to a comment or a redirection.
    fn words(line: &str) -> Vec<String> {
        let mut words = vec![String::new()];
        let mut quote = None;
        for c in line.chars() {
            match c {
                '\'' | '"' if quote.is_none() => quote = Some(c),
                c if quote == Some(c) => quote = None,
                '#' | '>' if quote.is_none() && words.last().is_some_and(String::is_empty) => break,
                ' ' if quote.is_none() => words.push(String::new()),
                c => words.last_mut().unwrap().push(c),
            }
        }
        words.retain(|word| !word.is_empty());
        words
    }

    /// What clap checks of the definitions by itself: names that are given twice, for one.
    #[test]
    fn the_definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn collectives_have_nccl_tests_names_too() {
        for name in ["all_gather", "all_reduce", "reduce_scatter", "all-gather", "alltoall", "sendrecv"] {
            assert!(Cli::try_parse_from(["nccl-spark", name, "-b", "8"]).is_ok(), "{name}");
        }
    }

    #[test]
    fn numbers_out_of_range_are_told_what_they_must_be() {
        for (arguments, allowed) in [
            ("nccl-spark all-gather -n 0", "invalid value '0' for '--iters <N>': must be at least 1"),
            ("nccl-spark all-gather -n 4294967296", "must be at most 4294967295"),
            ("nccl-spark all-gather -f 0", "'--stepfactor <N>': must be at least 1"),
            ("nccl-spark all-gather -r 1", "must be 2 to 256"),
            ("nccl-spark all-gather -T 86401", "must be 1 to 86400"),
            ("nccl-spark all-gather -n 1x", "'--iters <N>': must be a whole number"),
            ("nccl-spark bench -f 1", "must be at least 2"),
            ("nccl-spark bench -r 3", "must be 2"),
            ("nccl-spark tune collectives -n 0", "must be at least 1"),
        ] {
            let text = mistake(arguments);
            assert!(text.ends_with(allowed), "{arguments}: {text}");
        }
    }

    #[test]
    fn every_command_has_examples_that_are_right() {
        let command = Cli::command();
        for command in command.get_subcommands().filter(|command| !command.is_hide_set()) {
            let (name, examples) = (command.get_name(), command.get_after_help().map(ToString::to_string));
            let examples = examples.unwrap_or_else(|| panic!("{name} has no examples"));
            let joined = examples.replace("\\\n", "");
            let lines: Vec<&str> = joined.lines().filter(|line| line.starts_with("  ")).collect();
            assert!(!lines.is_empty(), "{name}: {examples}");
            assert!(examples.lines().all(|line| line.len() < 80), "{name}: {examples}");
            for line in lines {
                // What a shell would put into another command.
                let line =
                    line.split_once("$(").and_then(|(_, rest)| rest.split_once(')')).map_or(line, |(inner, _)| inner);
                let words = words(line);
                let command = words.iter().skip_while(|word| *word != "nccl-spark" && !word.ends_with("/nccl-spark"));
                let command: Vec<&String> = command.collect();
                assert_eq!(command.get(1).map(|word| word.as_str()), Some(name), "{line}");
                if let Err(error) = Cli::try_parse_from(&command) {
                    panic!("{line}: {error}");
                }
            }
        }
    }
}
