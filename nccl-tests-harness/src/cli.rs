//! The command line: what may be said, checked before anything starts.

use crate::bench::options::Bench;
use crate::collective::Collective;
use crate::communicators;
use crate::fabric::{self, Kind, Wish};
use crate::job::RankEnv;
use crate::launch::World;
use crate::lead::Plan;
use crate::machine;
use crate::memory;
use crate::nccl_tests;
use crate::report::Target;
use crate::seats;
use crate::sizes::{self, Step};
use crate::tune;
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
    /// Measures bandwidth, latency, message rate and more between two ranks, and against another plugin.
    ///
    /// Rank 0 sends to rank 1 (latency: to and fro), one thread each, which posts what may be posted and tests the oldest
    /// message of each connection, as NCCL's proxy does. All bytes are checked once for each size, outside of what is timed.
    Bench(Box<Bench>),
    /// Finds out which settings are best here, and writes them into the file that the plugin reads.
    ///
    /// Tries queue pairs and shares in runs of their own, in turns; measures the best again in turns with the defaults; takes
    /// them where their lowest round is above the defaults' highest.
    Tune(Box<tune::Options>),
    /// Writes a tuner's table into this machine's settings file.
    #[command(name = "tune-collectives-write", hide = true)]
    TuneCollectivesWrite(tune::collectives::write::Task),
    /// Runs your own build of nccl-tests over this plugin, or over it and NCCL's own networks in turns.
    ///
    /// Sets up the plugin and shows how; reads the program's table and NCCL's log, and fails when NCCL used another network than
    /// the one asked for. Ranks of this machine look like hosts of their own to NCCL.
    #[command(name = "nccl-tests")]
    NcclTests(Box<nccl_tests::options::Options>),
    /// Becomes a rank of nccl-tests.
    #[command(name = "nccl-tests-rank", hide = true)]
    NcclTestsRank(nccl_tests::ranks::Rank),
    /// Runs NCCL's communicators through their life over the plugin: many at once, split, made again, aborted, left by a dead rank.
    ///
    /// Each rank is a process that uses NCCL on a GPU; ranks may share one. Every value is checked, NCCL's log says which network
    /// it used, and with again what a process holds must stay flat.
    Communicators(Box<communicators::options::Options>),
    /// Becomes a rank of communicators.
    #[command(name = "communicators-rank", hide = true)]
    CommunicatorsRank(communicators::rank::Task),
    /// Shows which kinds of memory the plugin registers and moves: malloc, pinned by CUDA, managed, a GPU's own.
    ///
    /// A kernel of a GPU writes a pattern, the plugin moves it into memory of the same kind, another kernel counts wrong bytes.
    /// Without a GPU the processor does it with malloc alone. With --litmus it also tests whether NCCL's LL128 protocol is safe
    /// here.
    Memory(Box<memory::options::Options>),
    /// Injects faults into the software fabric while a job runs over it, and shows what runs.
    Fabric(fabric::command::Options),
    /// Shows which RoCE ports of this machine would be merged, the expected rate, and why the others are not used.
    ///
    /// Exit status: 0 at least one rail is usable, 1 none is or the machine cannot be examined, 2 the command line is wrong.
    Rails(machine::Options),
    /// Shows every setting of the plugin: name, default, meaning, current value.
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
    /// Starts so many ranks, each a process on this machine [default: 2, unless mpirun, srun or torchrun started this
    /// process as a rank].
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(2..=256))]
    ranks: Option<u16>,
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
    /// Writes the run as JSON to FILE, or with - to standard output; the table goes to standard error then.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Where ranks that a launcher started find rank 0 [default: what the launcher tells; with torchrun the port after
    /// MASTER_PORT].
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_place)]
    rendezvous: Option<(String, u16)>,
    #[command(flatten)]
    fabric: FabricOptions,
}

/// What the messages travel over.
#[derive(Debug, Args)]
#[command(next_help_heading = "Fabric")]
pub struct FabricOptions {
    /// What the messages travel over [default: verbs, or soft where there is no RDMA device].
    #[arg(long, value_name = "KIND", value_enum)]
    fabric: Option<Kind>,
    /// The software fabric's rails: a built-in profile (spark-1cable, spark-2cable, unpaced) or a file [default:
    /// spark-1cable].
    #[arg(long, value_name = "NAME|FILE")]
    profile: Option<String>,
    /// A factor on all rates of the profile.
    #[arg(long, value_name = "F", value_parser = parse_scale)]
    scale: Option<f64>,
    /// A rail of the software fabric that carries only a part of its rate, on every rank, as in rocep1s0f0=0.25; may be
    /// given more than once.
    #[arg(long, value_name = "RAIL=FACTOR", value_parser = parse_slow_rail)]
    slow_rail: Vec<(String, f64)>,
    /// The software fabric's library [default: softverbs-ibverbs beside this program].
    #[arg(long, value_name = "PATH")]
    softverbs: Option<PathBuf>,
    /// What the software fabric is called, for the fabric command [default: a name of the run's own].
    #[arg(long, value_name = "NAME", value_parser = parse_fabric_name)]
    fabric_name: Option<String>,
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
    /// Whether all ranks are to be started here, whatever a launcher says.
    pub fn is_local(&self) -> bool {
        self.ranks.is_some()
    }

    /// What to run; `program` is this program's file, beside which the plugin may lie, `world` what a launcher says,
    /// `verbs_library` the one that the user's environment names.
    ///
    /// # Errors
    /// When options contradict each other.
    pub fn plan(
        self,
        collective: Collective,
        program: &Path,
        world: Option<World>,
        verbs_library: Option<String>,
    ) -> anyhow::Result<Plan> {
        let ranks = match &world {
            Some(world) => world.ranks,
            None => usize::from(self.ranks.unwrap_or(2)),
        };
        self.check(collective, ranks)?;
        if let (None, Some(_)) = (&world, &self.rendezvous) {
            return Err(wrong("--rendezvous is for ranks that a launcher starts; these are all on this machine"))?;
        }
        let timeout = Duration::from_secs(self.timeout);
        let launched = match world {
            Some(world) => {
                let meeting = seats::meeting(&world, self.rendezvous, timeout)?;
                Some((world, meeting))
            }
            None => None,
        };
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
            timeout,
            rank_env: self.rank_env,
            fabric: self.fabric.wish(program)?,
            verbs_library,
            json: self.json.map(Target::from),
            launched,
        })
    }

    fn check(&self, collective: Collective, ranks: usize) -> Result<(), clap::Error> {
        if self.min_bytes > self.max_bytes {
            return Err(wrong(format!("--minbytes {} is more than --maxbytes {}", self.min_bytes, self.max_bytes)));
        }
        if collective.count(self.min_bytes, ranks) == 0 {
            let least = collective.size_bytes(1, ranks);
            return Err(wrong(format!(
                "--minbytes {} is too little: with {ranks} ranks {least} or more",
                self.min_bytes
            )));
        }
        if self.step_factor == 1 && self.step_bytes == 0 {
            return Err(wrong("--stepbytes 0 never comes to --maxbytes: 1 or more"));
        }
        if let Some(env) = self.rank_env.iter().find(|env| env.rank >= ranks) {
            return Err(wrong(format!("--rank-env {}:{}: ranks are 0 to {}", env.rank, env.name, ranks - 1)));
        }
        Ok(())
    }
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
            library: self.softverbs.unwrap_or_else(|| program.with_file_name("softverbs-ibverbs")),
            name: self.fabric_name,
        })
    }
}

/// A mistake on the command line.
pub fn wrong(text: impl std::fmt::Display) -> clap::Error {
    Cli::command().error(ErrorKind::ValueValidation, text)
}

/// The library as cargo names it, beside `program`.
pub fn beside(program: &Path) -> PathBuf {
    program.with_file_name("libnccl_net_spark.so")
}

/// The plugin's library: `given`, or beside `program`, or wherever the loader finds it.
///
/// # Errors
/// When the one given is not there.
pub fn library(given: Option<PathBuf>, program: &Path) -> Result<PathBuf, clap::Error> {
    match given {
        Some(path) => existing("--plugin", &path),
        None => Ok(Some(beside(program)).filter(|path| path.exists()).unwrap_or_else(|| "libnccl-net-spark.so".into())),
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
    lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ").trim_start_matches("error: ").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(arguments: &[&str]) -> Result<Plan, String> {
        plan_in(arguments, None)
    }

    fn plan_in(arguments: &[&str], world: Option<World>) -> Result<Plan, String> {
        let cli = Cli::try_parse_from([&["nccl-spark", "all-gather"], arguments].concat());
        let Command::AllGather(run) = cli.map_err(|error| one_line(&error))?.command else { panic!("another command") };
        let plan = run.plan(Collective::AllGather, Path::new("/nowhere/nccl-spark"), world, None);
        plan.map_err(|error| error.downcast_ref().map_or_else(|| error.to_string(), one_line))
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
            (&["--rendezvous", "a:1"], "--rendezvous", "launcher"),
            (&["--rendezvous", "a"], "--rendezvous", "HOST:PORT"),
            (&["--fabric", "hard"], "--fabric", "soft, verbs"),
            (&["--fabric", "verbs", "--scale", "2"], "--scale", "--fabric verbs"),
            (&["--scale", "0"], "--scale", "above 0"),
            (&["--slow-rail", "a=2"], "--slow-rail", "up to 1"),
            (&["--slow-rail", "a"], "--slow-rail", "RAIL=FACTOR"),
            (&["--fabric-name", "a/b"], "--fabric-name", "letters"),
        ] {
            let text = plan(arguments).unwrap_err();
            assert!(text.contains(option) && text.contains(allowed), "{arguments:?}: {text}");
            assert!(!text.contains('\n'), "{text}");
        }
    }

    #[test]
    fn what_is_said_of_the_software_fabric_asks_for_it() {
        assert_eq!(plan(&[]).unwrap().fabric.kind, None);
        let wish = plan(&["--slow-rail", "a=0.25", "--slow-rail", "b=1", "--scale", "0.5"]).unwrap().fabric;
        assert_eq!((wish.kind, wish.scale, wish.profile.as_str()), (Some(Kind::Soft), 0.5, "spark-1cable"));
        assert_eq!(wish.slow_rails, [("a".to_owned(), 0.25), ("b".to_owned(), 1.0)]);
        assert_eq!(wish.library, Path::new("/nowhere/softverbs-ibverbs"));
    }

    #[test]
    fn a_launcher_counts_the_ranks_and_may_need_to_be_told_where() {
        let world = |place: Option<(&str, u16)>| World {
            launcher: crate::launch::Launcher::OpenMpi,
            rank: 1,
            ranks: 4,
            job: "j".into(),
            place: place.map(|(host, port)| (host.to_owned(), port)),
        };
        let (_, meeting) = plan_in(&[], Some(world(Some(("a", 7))))).unwrap().launched.unwrap();
        assert_eq!((meeting.host.as_str(), meeting.port, meeting.ranks), ("a", 7, 4));
        let given = ["--rendezvous", "[fe80::1]:9"];
        let (_, meeting) = plan_in(&given, Some(world(Some(("a", 7))))).unwrap().launched.unwrap();
        assert_eq!((meeting.host.as_str(), meeting.port), ("fe80::1", 9));
        let error = plan_in(&[], Some(world(None))).unwrap_err();
        assert!(error.contains("mpirun") && error.contains("--rendezvous HOST:PORT"), "{error}");
    }
}
