//! The command line: what may be said, checked before anything starts.

use crate::bench::Plan;
use crate::collective::Collective;
use crate::job::RankEnv;
use crate::sizes::{self, Step};
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The NCCL network plugin for DGX Spark from the command line: collectives through the plugin without a GPU, what this
/// machine has, installation.
#[derive(Debug, Parser)]
#[command(name = "nccl-spark", version, infer_subcommands = false)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What the program can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Times and checks an all-gather over host memory, in place.
    ///
    /// The size is what every rank ends with; each rank contributes size / ranks, rounded down to whole bytes. busbw =
    /// algbw x (ranks - 1) / ranks.
    AllGather(Run),
    /// Times and checks an all-reduce: a sum of bytes that wraps around, added up by the CPU, out of place.
    ///
    /// The size is what each rank contributes. busbw = algbw x 2 (ranks - 1) / ranks.
    AllReduce(Run),
    /// Times and checks a reduce-scatter: each rank's part of such a sum, out of place.
    ///
    /// The size is what each rank contributes; each ends with size / ranks, rounded down to whole bytes. busbw = algbw x
    /// (ranks - 1) / ranks.
    ReduceScatter(Run),
    /// Times and checks a broadcast from rank 0, in place.
    ///
    /// The size is what every rank ends with. busbw = algbw.
    Broadcast(Run),
    /// Times and checks every rank sending a part to every rank, out of place.
    ///
    /// The size is what each rank sends in all; each part is size / ranks, rounded down to whole bytes. busbw = algbw x
    /// (ranks - 1) / ranks.
    #[command(name = "alltoall")]
    AllToAll(Run),
    /// Times and checks every rank sending to the next one while it receives from the one before, out of place.
    ///
    /// The size is what each rank sends. busbw = algbw.
    #[command(name = "sendrecv")]
    SendRecv(Run),
    /// Shows this machine's RoCE ports: which become rails, which do not, and why.
    Rails,
    /// Shows every setting of the plugin: name, default, meaning.
    Settings,
    /// Puts the plugin where NCCL finds it, and says how to use it.
    Install(Install),
    /// Takes away what install put there.
    Uninstall(Uninstall),
    /// One rank of a run; started by the other commands, with the line to them as standard input.
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

/// Options of a run; names and meanings are those of nccl-tests where it has them.
#[derive(Debug, Args)]
pub struct Run {
    /// How many ranks, each a process on this host.
    #[arg(short, long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(2..=256))]
    ranks: u16,
    /// Connections from each rank to each one that it sends to; a message of less than 64 KiB uses one.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    channels: u16,
    /// The first size, in bytes or with K, M or G.
    #[arg(short = 'b', long = "minbytes", value_name = "SIZE", default_value = "32M", value_parser = sizes::parse)]
    min_bytes: usize,
    /// The greatest size.
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", default_value = "32M", value_parser = sizes::parse)]
    max_bytes: usize,
    /// Bytes from one size to the next, unless there is a factor.
    #[arg(short = 'i', long = "stepbytes", value_name = "SIZE", default_value = "1M", value_parser = sizes::parse)]
    step_bytes: usize,
    /// The factor from one size to the next; 1 for steps in bytes.
    #[arg(short = 'f', long = "stepfactor", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    step_factor: u32,
    /// Timed iterations of each size.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,
    /// Iterations of each size before the timed ones.
    #[arg(short = 'w', long = "warmup_iters", alias = "warmup-iters", value_name = "N", default_value_t = 1)]
    warmup_iters: u32,
    /// Checked iterations of each size after the timed ones, every byte of them; 0 for no checks.
    #[arg(short = 'c', long = "check", value_name = "N", default_value_t = 1)]
    check_iters: u32,
    /// Seconds in which no rank gets anything done, after which the run counts as hung.
    #[arg(short = 'T', long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86400))]
    timeout: u64,
    /// The plugin's library [default: libnccl_net_spark.so beside this program, else libnccl-net-spark.so wherever the
    /// loader finds it].
    #[arg(long, value_name = "PATH")]
    plugin: Option<PathBuf>,
    /// Environment of one rank's process; may be given more than once.
    #[arg(long, value_name = "RANK:NAME=VALUE", value_parser = parse_rank_env)]
    rank_env: Vec<RankEnv>,
}

/// Options of install.
#[derive(Debug, Args)]
pub struct Install {
    /// Where to put it: the library goes into DIR/lib.
    #[arg(long, value_name = "DIR", default_value = "/usr/local")]
    pub prefix: PathBuf,
    /// The plugin's library [default: libnccl_net_spark.so beside this program].
    #[arg(long, value_name = "PATH")]
    pub plugin: Option<PathBuf>,
}

/// Options of uninstall.
#[derive(Debug, Args)]
pub struct Uninstall {
    /// Where install was told to put it.
    #[arg(long, value_name = "DIR", default_value = "/usr/local")]
    pub prefix: PathBuf,
}

impl Run {
    /// What to run; `program` is this program's file, beside which the plugin may lie.
    ///
    /// # Errors
    /// When options contradict each other.
    pub fn plan(self, collective: Collective, program: &Path) -> Result<Plan, clap::Error> {
        let ranks = usize::from(self.ranks);
        let wrong = |text: String| Err(Cli::command().error(ErrorKind::ValueValidation, text));
        if self.min_bytes > self.max_bytes {
            return wrong(format!("--minbytes {} is more than --maxbytes {}", self.min_bytes, self.max_bytes));
        }
        if collective.count(self.min_bytes, ranks) == 0 {
            let least = collective.size_bytes(1, ranks);
            return wrong(format!("--minbytes {} is too little: with {ranks} ranks {least} or more", self.min_bytes));
        }
        if self.step_factor == 1 && self.step_bytes == 0 {
            return wrong("--stepbytes 0 never comes to --maxbytes: 1 or more".to_owned());
        }
        if let Some(env) = self.rank_env.iter().find(|env| env.rank >= ranks) {
            return wrong(format!("--rank-env {}:{}: ranks are 0 to {}", env.rank, env.name, ranks - 1));
        }
        Ok(Plan {
            collective,
            ranks,
            channels: usize::from(self.channels),
            plugin: library(self.plugin, program)?,
            min_bytes: self.min_bytes,
            max_bytes: self.max_bytes,
            step: match self.step_factor {
                1 => Step::Bytes(self.step_bytes),
                factor => Step::Factor(factor as usize),
            },
            warmup_iters: self.warmup_iters,
            iters: self.iters,
            check_iters: self.check_iters,
            timeout: Duration::from_secs(self.timeout),
            rank_env: self.rank_env,
        })
    }
}

/// The library as cargo names it, beside `program`.
pub fn beside(program: &Path) -> PathBuf {
    program.with_file_name("libnccl_net_spark.so")
}

fn library(given: Option<PathBuf>, program: &Path) -> Result<PathBuf, clap::Error> {
    match given {
        // A path without a slash would be looked for in the loader's directories instead of here.
        Some(path) => path.canonicalize().map_err(|error| {
            Cli::command().error(ErrorKind::ValueValidation, format!("--plugin {}: {error}", path.display()))
        }),
        None => Ok(Some(beside(program)).filter(|path| path.exists()).unwrap_or_else(|| "libnccl-net-spark.so".into())),
    }
}

fn parse_rank_env(text: &str) -> Result<RankEnv, String> {
    let parts = text.split_once(':').and_then(|(rank, variable)| Some((rank.parse().ok()?, variable.split_once('=')?)));
    match parts {
        Some((rank, (name, value))) if !name.is_empty() && !text.contains('\0') => {
            Ok(RankEnv { rank, name: name.to_owned(), value: value.to_owned() })
        }
        _ => Err("RANK:NAME=VALUE, as in 0:NCCL_IB_HCA==mlx5_0".to_owned()),
    }
}

/// What is wrong with a command line, in one line.
pub fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines =
        text.lines().map(str::trim).take_while(|line| !line.starts_with("For more") && !line.starts_with("Usage:"));
    lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ").trim_start_matches("error: ").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(arguments: &[&str]) -> Result<Plan, String> {
        let cli = Cli::try_parse_from([&["nccl-spark", "all-gather"], arguments].concat());
        let Command::AllGather(run) = cli.map_err(|error| one_line(&error))?.command else { panic!("another command") };
        run.plan(Collective::AllGather, Path::new("/nowhere/nccl-spark")).map_err(|error| one_line(&error))
    }

    #[test]
    fn options_of_nccl_tests_are_understood() {
        let plan = plan(&["-b", "8", "-e", "16M", "-f", "4", "-n", "5", "-w", "2", "-c", "3", "-r", "4"]).unwrap();
        assert_eq!((plan.min_bytes, plan.max_bytes, plan.step), (8, 16 << 20, Step::Factor(4)));
        assert_eq!((plan.iters, plan.warmup_iters, plan.check_iters, plan.ranks), (5, 2, 3, 4));
        assert_eq!(plan.plugin, Path::new("libnccl-net-spark.so"));
    }

    #[test]
    fn what_is_left_out_is_as_in_nccl_tests() {
        let plan = plan(&[]).unwrap();
        assert_eq!((plan.min_bytes, plan.max_bytes, plan.step), (32 << 20, 32 << 20, Step::Bytes(1 << 20)));
        assert_eq!((plan.iters, plan.warmup_iters, plan.check_iters, plan.ranks), (20, 1, 1, 2));
    }

    #[test]
    fn rank_env_keeps_equal_signs_and_colons_of_the_value() {
        let plan = plan(&["--rank-env", "1:NCCL_IB_HCA==b0:1,b1", "--rank-env", "0:A="]).unwrap();
        let env = |rank, name: &str, value: &str| RankEnv { rank, name: name.into(), value: value.into() };
        assert_eq!(plan.rank_env, [env(1, "NCCL_IB_HCA", "=b0:1,b1"), env(0, "A", "")]);
    }

    #[test]
    fn mistakes_name_the_option_and_what_is_allowed_in_one_line() {
        for (arguments, option, allowed) in [
            (&["-r", "1"][..], "--ranks", "2..=256"),
            (&["-r", "x"], "--ranks", "digit"),
            (&["-b", "8Q"], "--minbytes", "K, M or G"),
            (&["-b", "64M"], "--minbytes", "--maxbytes 33554432"),
            (&["-b", "1", "-e", "8"], "--minbytes", "2 or more"),
            (&["-i", "0"], "--stepbytes", "1 or more"),
            (&["-n", "0"], "--iters", "1.."),
            (&["--channels", "0"], "--channels", "1..=64"),
            (&["--timeout", "0"], "--timeout", "1..=86400"),
            (&["--rank-env", "2:A=b"], "--rank-env", "0 to 1"),
            (&["--rank-env", "A=b"], "--rank-env", "RANK:NAME=VALUE"),
            (&["--plugin", "/no/such.so"], "--plugin", "No such file"),
            (&["--rnaks", "2"], "--rnaks", "--ranks"),
        ] {
            let text = plan(arguments).unwrap_err();
            assert!(text.contains(option) && text.contains(allowed), "{arguments:?}: {text}");
            assert!(!text.contains('\n'), "{text}");
        }
    }
}
