//! The command line of `spark-lab bench`, checked before anything starts.

use super::plan::{Plan, RANKS, Scenario, Settings};
use clap::Args;
use nccl_tests_harness::abi;
use nccl_tests_harness::fabric::options::FabricOptions;
use nccl_tests_harness::output::report::JsonOption;
use nccl_tests_harness::places;
use nccl_tests_harness::ranks::job::RankEnv;
use nccl_tests_harness::ranks::launch::World;
use nccl_tests_harness::ranks::rendezvous;
use nccl_tests_harness::ranks::seats;
use nccl_tests_harness::sizes;
use nccl_tests_harness::usage::wrong;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Options of bench.
#[derive(Debug, Args)]
pub struct Bench {
    /// Scenarios to measure [default: all that the fabric allows].
    #[arg(value_name = "SCENARIO", value_enum)]
    scenarios: Vec<Scenario>,
    /// Another network plugin (v8 to v12), measured in turns with this one in the same run.
    #[arg(long, value_name = "LIBRARY")]
    against: Option<PathBuf>,
    /// Environment variable for the other library's ranks only; may be given more than once.
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_env, requires = "against")]
    against_env: Vec<(String, String)>,
    /// Number of rounds; the median counts [default: 5 with --against, else 3].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// About how long one run of a round takes; up to four times as long where pilot runs are unsteady. slowdown takes nine times
    /// as long.
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = parse_seconds)]
    seconds: f64,
    /// Smallest size of bandwidth, latency and unequal [default: 4K, for latency 8].
    #[arg(short = 'b', long = "minbytes", value_name = "SIZE", value_parser = sizes::parse)]
    min_bytes: Option<usize>,
    /// Largest size of these [default: 16M, for latency 1M].
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", value_parser = sizes::parse)]
    max_bytes: Option<usize>,
    /// Factor from one size to the next [default: 4, for latency 8].
    #[arg(short = 'f', long = "stepfactor", value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    step_factor: Option<u32>,
    /// Messages in flight on each connection; NCCL uses 8 at most.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=32))]
    inflight: u16,
    /// Microseconds that a rank sleeps when nothing moved; 0: it yields and polls again, as NCCL does. For slow networks that use
    /// the same CPU cores, as soft-RoCE does.
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    rest_us: u32,
    /// Number of connections of bandwidth, rate, unequal and slowdown.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    channels: u16,
    /// Largest number of connections in connections, which doubles from 1.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=256))]
    max_connections: u16,
    /// Size of the messages in connections.
    #[arg(long, value_name = "SIZE", default_value = "64K", value_parser = sizes::parse)]
    connection_bytes: usize,
    /// Size of the messages in slowdown.
    #[arg(long, value_name = "SIZE", default_value = "1M", value_parser = sizes::parse)]
    slowdown_bytes: usize,
    /// Limit of all rails together, in Mb/s of payload [default: from the profile, or from this machine's ports and PCIe links].
    #[arg(long, value_name = "MBPS", value_parser = parse_seconds)]
    limit_mbps: Option<f64>,
    /// Shell command that slows a rail in slowdown [default: the software fabric slows its first rail to a quarter].
    #[arg(long, value_name = "COMMAND", requires = "restore")]
    fall: Option<String>,
    /// Shell command that restores the rail.
    #[arg(long = "return", value_name = "COMMAND", requires = "fall")]
    restore: Option<String>,
    /// A name for the results.
    #[arg(long, value_name = "TEXT")]
    label: Option<String>,
    /// Start both ranks on this machine, even under a launcher; must be 2.
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(2..=2))]
    ranks: Option<u16>,
    /// Seconds without progress after which the run counts as hung.
    #[arg(short = 'T', long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86400))]
    timeout: u64,
    /// The plugin's library [default: libnccl_net_spark.so beside this program, else libnccl-net-spark.so on the loader's path].
    #[arg(long, value_name = "PATH")]
    plugin: Option<PathBuf>,
    /// Version of the plugin interface to use [default: the newest that the plugin has].
    #[arg(long, value_name = "N", value_parser = abi::version_parser())]
    abi: Option<u32>,
    /// Version of the plugin interface to use with the other library.
    #[arg(long, value_name = "N", value_parser = abi::version_parser(), requires = "against")]
    against_abi: Option<u32>,
    /// Environment variable for one rank, with both libraries; may be given more than once.
    #[arg(long, value_name = "RANK:NAME=VALUE", value_parser = RankEnv::parse)]
    rank_env: Vec<RankEnv>,
    #[command(flatten)]
    json: JsonOption,
    /// Draws the results as SVG charts into the folder DIR.
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
    /// Where ranks started by a launcher meet rank 0; --against also uses the next port [default: from the launcher; with torchrun
    /// the port after MASTER_PORT].
    #[arg(long, value_name = "HOST:PORT", value_parser = rendezvous::parse_place)]
    rendezvous: Option<(String, u16)>,
    #[command(flatten)]
    fabric: FabricOptions,
}

impl Bench {
    /// Whether both ranks are started here even under a launcher.
    pub fn is_local(&self) -> bool {
        self.ranks.is_some()
    }

    /// What to run; `verbs_library` is what the user's environment names.
    ///
    /// # Errors
    /// When options contradict each other.
    pub fn plan(self, program: &Path, world: Option<World>, verbs_library: Option<String>) -> anyhow::Result<Plan> {
        let timeout = Duration::from_secs(self.timeout);
        let launched = match world {
            Some(World { ranks, .. }) if ranks != RANKS => {
                return Err(wrong(format!(
                    "bench has 2 ranks, but the launcher started {ranks}; -r 2 starts both ranks here"
                )))?;
            }
            Some(world) => {
                let meeting = seats::meeting(&world, self.rendezvous, timeout)?;
                Some((world, meeting))
            }
            None if self.rendezvous.is_some() => {
                return Err(wrong("--rendezvous is only for ranks started by a launcher, but these are started here"))?;
            }
            None => None,
        };
        let rounds = if self.against.is_some() { 5 } else { 3 };
        let settings = Settings {
            rounds: self.rounds.unwrap_or(rounds),
            seconds: self.seconds,
            rest_us: self.rest_us,
            in_flight: usize::from(self.inflight),
            channels: usize::from(self.channels),
            connection_bytes: self.connection_bytes,
            flow_bytes: self.slowdown_bytes,
            turns: self.fall.zip(self.restore).map(|(fall, back)| [fall, back]),
            rank_env: self.rank_env,
        };
        let plan = Plan {
            settings,
            scenarios: self.scenarios,
            plugin: places::library(self.plugin, program)?,
            abi: self.abi,
            against: self.against.map(|path| places::existing("--against", &path)).transpose()?,
            against_abi: self.against_abi,
            against_env: self.against_env,
            min_bytes: self.min_bytes,
            max_bytes: self.max_bytes,
            step_factor: self.step_factor.map(|factor| factor as usize),
            max_connections: usize::from(self.max_connections),
            limit_mbps: self.limit_mbps,
            label: self.label,
            timeout,
            fabric: self.fabric.wish(program)?,
            verbs_library,
            json: self.json.target,
            plot: self.plot,
            launched,
        };
        check(&plan)?;
        Ok(plan)
    }
}

fn check(plan: &Plan) -> Result<(), clap::Error> {
    let sizes =
        [("--connection-bytes", plan.settings.connection_bytes), ("--slowdown-bytes", plan.settings.flow_bytes)];
    let sizes = sizes.into_iter().chain(plan.min_bytes.map(|bytes| ("--minbytes", bytes)));
    if let Some((option, _)) = sizes.into_iter().find(|(_, bytes)| *bytes == 0) {
        return Err(wrong(format!("{option} 0: a message must have at least 1 byte")));
    }
    if let (Some(least), Some(most)) = (plan.min_bytes, plan.max_bytes)
        && least > most
    {
        return Err(wrong(format!("--minbytes {least} is larger than --maxbytes {most}")));
    }
    if plan.max_bytes == Some(0) {
        return Err(wrong("--maxbytes 0: a message must have at least 1 byte"));
    }
    if let Some(env) = plan.settings.rank_env.iter().find(|env| env.rank >= RANKS) {
        return Err(wrong(format!("--rank-env {}:{}: the ranks are 0 and 1", env.rank, env.name)));
    }
    Ok(())
}

fn parse_env(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() && !text.contains('\0') => Ok((name.to_owned(), value.to_owned())),
        _ => Err("NAME=VALUE, as in NCCL_IB_GID_INDEX=1".to_owned()),
    }
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite() && *number > 0.0 && *number <= 1e9);
    number.ok_or_else(|| "a number above 0, up to 10^9".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cli, Command};
    use clap::Parser;
    use nccl_tests_harness::output::report::Target;
    use nccl_tests_harness::program;
    use nccl_tests_harness::ranks::launch::Launcher;
    use nccl_tests_harness::usage::one_line;

    fn plan(arguments: &[&str]) -> Result<Plan, String> {
        plan_in(arguments, None)
    }

    fn plan_in(arguments: &[&str], world: Option<World>) -> Result<Plan, String> {
        let cli = Cli::try_parse_from([&["spark-lab", "bench"], arguments].concat());
        let Command::Bench(options) = cli.map_err(|error| one_line(&error))?.command else { panic!("another command") };
        let plan = options.plan(Path::new("/nowhere/spark-lab"), world, None);
        plan.map_err(|error| error.downcast_ref().map_or_else(|| error.to_string(), one_line))
    }

    #[test]
    fn the_defaults_are_all_scenarios_with_three_rounds_or_five_against_another() {
        let alone = plan(&[]).unwrap();
        assert_eq!(
            (alone.settings.rounds, alone.settings.in_flight, alone.scenarios.len(), alone.settings.seconds),
            (3, 8, 0, 1.0)
        );
        assert_eq!(alone.sizes(Scenario::Bandwidth), [4096, 16384, 65536, 262_144, 1 << 20, 4 << 20, 16 << 20]);
        assert_eq!(alone.sizes(Scenario::Latency), [8, 64, 512, 4096, 32768, 262_144, 1 << 20]);
        let against = plan(&["--against", "/proc/self/exe", "latency", "rate"]).unwrap();
        assert_eq!((against.settings.rounds, against.scenarios), (5, vec![Scenario::Latency, Scenario::Rate]));
        let sizes = plan(&["-b", "8", "-e", "100", "-f", "2"]).unwrap().sizes(Scenario::Unequal);
        assert_eq!(sizes, [8, 16, 32, 64, 100]);
        assert_eq!(plan(&["-e", "4"]).unwrap().sizes(Scenario::Bandwidth), [4]);
        assert_eq!(plan(&["-b", "2M"]).unwrap().sizes(Scenario::Latency), [2 << 20]);
    }

    #[test]
    fn environments_are_told_apart_and_that_of_the_other_library_comes_last() {
        let arguments = ["--against", "/proc/self/exe", "--against-env", "A=b=c", "--rank-env", "1:A=x"];
        let plan = plan(&arguments).unwrap();
        let env = |rank, value: &str| RankEnv { rank, name: "A".into(), value: value.into() };
        assert_eq!(plan.environment(0), [env(1, "x")]);
        assert_eq!(plan.environment(1), [env(1, "x"), env(0, "b=c"), env(1, "b=c")]);
    }

    #[test]
    fn mistakes_name_the_option_and_what_is_allowed_in_one_line() {
        for (arguments, option, allowed) in [
            (&["speed"][..], "speed", "bandwidth, latency, rate, connections, unequal, slowdown"),
            (&["--rounds", "0"], "--rounds", "must be 1 to 1000"),
            (&["--seconds", "0"], "--seconds", "above 0"),
            (&["--seconds", "nan"], "--seconds", "above 0"),
            (&["-b", "1M", "-e", "1K"], "--minbytes", "--maxbytes"),
            (&["-e", "0"], "--maxbytes 0", "1 byte"),
            (&["-b", "0"], "--minbytes 0", "1 byte"),
            (&["-f", "1"], "--stepfactor", "at least 2"),
            (&["--slowdown-bytes", "0"], "--slowdown-bytes 0", "1 byte"),
            (&["--inflight", "33"], "--inflight", "must be 1 to 32"),
            (&["--channels", "65"], "--channels", "must be 1 to 64"),
            (&["--abi", "7"], "--abi", "must be 8 to 12"),
            (&["--against-abi", "9"], "--against", "required"),
            (&["--against-env", "A=b"], "--against", "required"),
            (&["--against", "/no/such.so"], "--against /no/such.so", "No such file"),
            (&["--fall", "true"], "--return", "required"),
            (&["--rank-env", "2:A=b"], "--rank-env", "0 and 1"),
            (&["--ranks", "3"], "--ranks", "must be 2"),
            (&["--rendezvous", "a:1"], "--rendezvous", "launcher"),
        ] {
            let text = plan(arguments).unwrap_err();
            assert!(text.contains(option) && text.contains(allowed), "{arguments:?}: {text}");
            assert!(!text.contains('\n'), "{text}");
        }
    }

    /// clap alone would take the scenario for the file.
    #[test]
    fn a_scenario_after_json_is_no_file() {
        for (words, target, scenarios) in [
            (&["--json", "latency"][..], Target::Output, &[Scenario::Latency][..]),
            (&["bandwidth", "--json", "rate"], Target::Output, &[Scenario::Bandwidth, Scenario::Rate]),
            (&["--json", "out", "latency"], Target::File("out".into()), &[Scenario::Latency]),
            (&["--json=latency", "rate"], Target::File("latency".into()), &[Scenario::Rate]),
        ] {
            let words = [&["spark-lab", "bench"], words].concat();
            let cli = program::read::<Cli>(words.into_iter().map(Into::into)).unwrap();
            let Command::Bench(options) = cli.command else { panic!("another command") };
            let plan = options.plan(Path::new("/nowhere/spark-lab"), None, None).unwrap();
            assert_eq!((plan.json, &plan.scenarios[..]), (Some(target), scenarios));
        }
    }

    #[test]
    fn a_launcher_starts_two_ranks_and_no_more() {
        let world = |ranks| World {
            launcher: Launcher::OpenMpi,
            rank: 0,
            ranks,
            job: "j".into(),
            place: Some(("a".to_owned(), 7)),
        };
        assert_eq!(plan_in(&[], Some(world(2))).unwrap().launched.unwrap().1.port, 7);
        let error = plan_in(&[], Some(world(4))).unwrap_err();
        assert!(error.contains("2 ranks") && error.contains("started 4"), "{error}");
    }
}
