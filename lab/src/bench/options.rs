//! The scenarios and the command line of `spark-lab bench`, checked before anything starts.

use super::figures::Metric;
use crate::pair::messages::Layout;
use clap::builder::{ArgPredicate, RangedU64ValueParser};
use clap::{Args, ValueEnum};
use nccl_tests_harness::abi;
use nccl_tests_harness::fabric::options::FabricOptions;
use nccl_tests_harness::fabric::{FabricRequest, Kind};
use nccl_tests_harness::output::report::{JsonOption, Target};
use nccl_tests_harness::places::{self, PluginOption};
use nccl_tests_harness::ranks::job::RankEnv;
use nccl_tests_harness::sizes::{self, Step};
use nccl_tests_harness::usage::wrong;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Number of ranks of each library: rank 0 sends, rank 1 receives.
pub const RANKS: usize = 2;
pub const CONNECTION_BYTES: usize = 64 << 10;
/// Largest number of connections of scenario connections, unless `--channels` is given.
const MAX_CONNECTIONS: usize = 64;

/// A scenario. Scenarios run in this order. Connections come first, because memory that other
/// scenarios leave behind would be counted as memory of the connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scenario {
    /// 1, 2, 4 and more connections together, with messages of 64 KiB.
    Connections,
    /// Payload per second, by message size.
    Bandwidth,
    /// Half a round trip, by message size.
    Latency,
    /// Small messages per second.
    Rate,
    /// Bandwidth with one rail at a quarter of its rate (software fabric; on verbs the rails as
    /// they are).
    Unequal,
    /// A stream during which one rail is slowed to a quarter of its rate and restored.
    Slowdown,
}

/// Options of bench.
#[derive(Debug, Args)]
pub struct Bench {
    /// Scenarios to measure [default: all that the fabric allows].
    #[arg(value_name = "SCENARIO", value_enum)]
    scenarios: Vec<Scenario>,
    /// Another network plugin (v8 to v12), measured in turns with this one in the same run.
    #[arg(long, value_name = "LIBRARY")]
    against: Option<PathBuf>,
    #[command(flatten)]
    settings: Settings,
    /// Seconds without progress after which the run counts as hung.
    #[arg(short = 'T', long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86400))]
    timeout: u64,
    #[command(flatten)]
    plugin: PluginOption,
    #[command(flatten)]
    json: JsonOption,
    #[command(flatten)]
    fabric: FabricOptions,
}

/// The options that decide how the scenarios measure. The JSON shows them.
#[derive(Debug, Clone, Args, Serialize)]
pub struct Settings {
    /// Environment variable for the other library's ranks only; may be given more than once.
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_env, requires = "against")]
    against_env: Vec<(String, String)>,
    /// Number of rounds; the median counts [default: 5 with --against, else 3].
    #[arg(long, value_name = "N", default_value = "3", default_value_if("against", ArgPredicate::IsPresent, "5"),
          hide_default_value = true, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// About how long one run of a round takes; up to four times as long where pilot runs are
    /// unsteady. slowdown takes nine times as long.
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = parse_positive)]
    pub seconds: f64,
    /// Smallest size of bandwidth, latency and unequal [default: 4K, for latency 8].
    #[arg(short = 'b', long = "minbytes", value_name = "SIZE", value_parser = parse_size)]
    min_bytes: Option<usize>,
    /// Largest size of these [default: 16M, for latency 1M].
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", value_parser = parse_size)]
    max_bytes: Option<usize>,
    /// Factor from one size to the next [default: 4, for latency 8].
    #[arg(short = 'f', long = "stepfactor", value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(2..=u64::from(u32::MAX)))]
    step_factor: Option<usize>,
    /// Messages in flight on each connection; NCCL uses 8 at most.
    #[arg(long = "inflight", value_name = "N", default_value_t = 8, value_parser = RangedU64ValueParser::<usize>::new().range(1..=32))]
    pub in_flight: usize,
    /// Microseconds that a rank sleeps when nothing moved; 0: it yields and polls again, as NCCL
    /// does. For slow networks that use the same CPU cores, as soft-RoCE does.
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    rest_us: u32,
    /// Number of connections; of scenario connections the largest number, which it reaches by
    /// doubling from 1 [default: 1, for connections 64].
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..=64))]
    channels: Option<usize>,
    /// Size of the messages in slowdown.
    #[arg(long, value_name = "SIZE", default_value = "1M", value_parser = parse_size)]
    pub slowdown_bytes: usize,
    /// Limit of all rails together, in Mb/s of payload [default: from the profile, or from this
    /// machine's ports and PCIe links].
    #[arg(long, value_name = "MBPS", value_parser = parse_positive)]
    pub limit_mbps: Option<f64>,
    /// Shell command that slows a rail in slowdown [default: the software fabric slows its first
    /// rail to a quarter].
    #[arg(long, value_name = "COMMAND", requires = "restore")]
    pub fall: Option<String>,
    /// Shell command that restores the rail.
    #[arg(long = "return", value_name = "COMMAND", requires = "fall")]
    pub restore: Option<String>,
    /// Version of the plugin interface to use [default: the newest that a plugin has].
    #[arg(long, value_name = "N", value_parser = abi::version_parser())]
    pub abi: Option<u32>,
    /// Environment variable for one rank, with both libraries; may be given more than once.
    #[arg(long, value_name = "RANK:NAME=VALUE", value_parser = RankEnv::parse)]
    rank_env: Vec<RankEnv>,
}

#[derive(Debug)]
pub struct Plan {
    /// The scenarios that the user names. If empty, all that the fabric allows are measured.
    pub scenarios: Vec<Scenario>,
    pub settings: Settings,
    /// Names and files: `ours`, then `theirs` if there is another library.
    pub libraries: Vec<(&'static str, PathBuf)>,
    /// Time without progress after which the run counts as hung.
    pub timeout: Duration,
    pub fabric: FabricRequest,
    pub verbs_library: Option<String>,
    pub json: Option<Target>,
}

impl Bench {
    /// Checks the options. `verbs_library` is from the user's environment. Fails if options
    /// contradict each other or a library is missing.
    pub fn plan(self, program: &Path, verbs_library: Option<String>) -> Result<Plan, clap::Error> {
        let Settings { min_bytes, max_bytes, rank_env, .. } = &self.settings;
        if let (Some(least), Some(most)) = (min_bytes, max_bytes)
            && least > most
        {
            return Err(wrong(format!("--minbytes {least} is larger than --maxbytes {most}")));
        }
        if let Some(env) = rank_env.iter().find(|env| env.rank >= RANKS) {
            return Err(wrong(format!("--rank-env {}:{}: the ranks are 0 and 1", env.rank, env.name)));
        }
        let mut libraries = vec![("ours", self.plugin.library(program)?)];
        if let Some(path) = self.against {
            libraries.push(("theirs", places::existing("--against", &path)?));
        }
        Ok(Plan {
            scenarios: self.scenarios,
            settings: self.settings,
            libraries,
            timeout: Duration::from_secs(self.timeout),
            fabric: self.fabric.request(program)?,
            verbs_library,
            json: self.json.target,
        })
    }
}

impl Settings {
    pub fn layout(&self, bytes: usize) -> Layout {
        Layout { bytes, in_flight: self.in_flight, rest_us: self.rest_us }
    }

    pub fn channels(&self) -> usize {
        self.channels.unwrap_or(1)
    }

    pub fn connections(&self) -> Vec<usize> {
        sizes::sweep(1, self.channels.unwrap_or(MAX_CONNECTIONS), Step::Factor(2)).collect()
    }

    /// Returns the sizes of a scenario, in bytes.
    pub fn sizes(&self, scenario: Scenario) -> Vec<usize> {
        let (least, most, factor) = match scenario {
            Scenario::Latency => (8, 1 << 20, 8),
            Scenario::Rate => return vec![8, 512, 4096],
            _ => (4 << 10, 16 << 20, 4),
        };
        // If only one bound is given, the other bound keeps its default unless the two contradict
        // each other.
        let (least, most) = match (self.min_bytes, self.max_bytes) {
            (Some(least), Some(most)) => (least, most),
            (Some(given), None) => (given, most.max(given)),
            (None, Some(given)) => (least.min(given), given),
            (None, None) => (least, most),
        };
        let mut sizes: Vec<_> = sizes::sweep(least, most, Step::Factor(self.step_factor.unwrap_or(factor))).collect();
        // The largest size is measured even if the steps miss it.
        if sizes.last().is_some_and(|last| *last < most) {
            sizes.push(most);
        }
        sizes
    }

    /// Returns the environment of the ranks of library `name`. The last value of a variable counts.
    pub fn environment(&self, name: &str) -> Vec<RankEnv> {
        let own = if name == "theirs" { self.against_env.as_slice() } else { &[] };
        let of = |rank| own.iter().map(move |(name, value)| RankEnv { rank, name: name.clone(), value: value.clone() });
        self.rank_env.iter().cloned().chain((0..RANKS).flat_map(of)).collect()
    }
}

impl Scenario {
    /// Returns the metrics at each place. The scenario's limit is for the first metric.
    pub fn metrics(self) -> &'static [Metric] {
        match self {
            Self::Bandwidth | Self::Unequal | Self::Slowdown => &[Metric::Bandwidth],
            Self::Latency => &[Metric::P50, Metric::P99, Metric::Least],
            Self::Rate => &[Metric::Rate],
            Self::Connections => &[Metric::Bandwidth, Metric::Connect, Metric::SenderMemory, Metric::ReceiverMemory],
        }
    }
}

impl Plan {
    /// Returns the scenarios to measure on a fabric of `kind`. Fails if a chosen scenario lacks the
    /// options that it needs there.
    pub fn scenarios(&self, kind: Kind) -> Result<Vec<Scenario>, clap::Error> {
        let can_slow = kind == Kind::Soft || self.settings.fall.is_some();
        if self.scenarios.contains(&Scenario::Slowdown) && !can_slow {
            return Err(wrong(
                "slowdown on verbs needs --fall COMMAND and --return COMMAND, which slow a rail and restore it",
            ));
        }
        let is_possible = |scenario: &Scenario| match scenario {
            Scenario::Unequal => kind == Kind::Soft,
            Scenario::Slowdown => can_slow,
            _ => true,
        };
        Ok(match self.scenarios.is_empty() {
            true => Scenario::value_variants().iter().copied().filter(is_possible).collect(),
            false => self.scenarios.clone(),
        })
    }
}

fn parse_env(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() && !text.contains('\0') => Ok((name.to_owned(), value.to_owned())),
        _ => Err("NAME=VALUE, as in NCCL_IB_GID_INDEX=1".to_owned()),
    }
}

fn parse_positive(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite() && *number > 0.0 && *number <= 1e9);
    number.ok_or_else(|| "a number above 0, up to 10^9".to_owned())
}

fn parse_size(text: &str) -> Result<usize, String> {
    match sizes::parse(text)? {
        0 => Err("a message must have at least 1 byte".to_owned()),
        bytes => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cli, Command};
    use clap::Parser;
    use nccl_tests_harness::program;
    use nccl_tests_harness::usage::one_line;

    fn plan(arguments: &[&str]) -> Result<Plan, String> {
        let cli = Cli::try_parse_from([&["spark-lab", "bench"], arguments].concat());
        let Command::Bench(options) = cli.map_err(|error| one_line(&error))?.command else { panic!("another command") };
        options.plan(Path::new("/nowhere/spark-lab"), None).map_err(|error| one_line(&error))
    }

    #[test]
    fn the_defaults_are_all_scenarios_with_three_rounds_or_five_against_another() {
        let alone = plan(&[]).unwrap();
        let Settings { rounds, in_flight, seconds, .. } = alone.settings;
        assert_eq!((rounds, in_flight, alone.scenarios.len(), seconds), (3, 8, 0, 1.0));
        let sizes = |scenario| alone.settings.sizes(scenario);
        assert_eq!(sizes(Scenario::Bandwidth), [4096, 16384, 65536, 262_144, 1 << 20, 4 << 20, 16 << 20]);
        assert_eq!(sizes(Scenario::Latency), [8, 64, 512, 4096, 32768, 262_144, 1 << 20]);
        assert_eq!((alone.settings.channels(), alone.settings.connections()), (1, vec![1, 2, 4, 8, 16, 32, 64]));
        let against = plan(&["--against", "/proc/self/exe", "latency", "rate", "--channels", "3"]).unwrap();
        assert_eq!((against.settings.rounds, against.scenarios), (5, vec![Scenario::Latency, Scenario::Rate]));
        assert_eq!((against.settings.channels(), against.settings.connections()), (3, vec![1, 2]));
        let sizes = |arguments: &[&str], scenario| plan(arguments).unwrap().settings.sizes(scenario);
        assert_eq!(sizes(&["-b", "8", "-e", "100", "-f", "2"], Scenario::Unequal), [8, 16, 32, 64, 100]);
        assert_eq!(sizes(&["-e", "4"], Scenario::Bandwidth), [4]);
        assert_eq!(sizes(&["-b", "2M"], Scenario::Latency), [2 << 20]);
        assert_eq!(plan(&["--rounds", "2", "--against", "/proc/self/exe"]).unwrap().settings.rounds, 2);
    }

    #[test]
    fn environments_are_distinguished_and_the_other_librarys_is_last() {
        let arguments = ["--against", "/proc/self/exe", "--against-env", "A=b=c", "--rank-env", "1:A=x"];
        let settings = plan(&arguments).unwrap().settings;
        let env = |rank, value: &str| RankEnv { rank, name: "A".into(), value: value.into() };
        assert_eq!(settings.environment("ours"), [env(1, "x")]);
        assert_eq!(settings.environment("theirs"), [env(1, "x"), env(0, "b=c"), env(1, "b=c")]);
    }

    #[test]
    fn mistakes_name_the_option_and_what_is_allowed_in_one_line() {
        for (arguments, option, allowed) in [
            (&["speed"][..], "speed", "connections, bandwidth, latency, rate, unequal, slowdown"),
            (&["--rounds", "0"], "--rounds", "must be 1 to 1000"),
            (&["--seconds", "0"], "--seconds", "above 0"),
            (&["--seconds", "nan"], "--seconds", "above 0"),
            (&["-b", "1M", "-e", "1K"], "--minbytes", "--maxbytes"),
            (&["-e", "0"], "--maxbytes", "1 byte"),
            (&["-b", "0"], "--minbytes", "1 byte"),
            (&["-f", "1"], "--stepfactor", "at least 2"),
            (&["--slowdown-bytes", "0"], "--slowdown-bytes", "1 byte"),
            (&["--inflight", "33"], "--inflight", "must be 1 to 32"),
            (&["--channels", "65"], "--channels", "must be 1 to 64"),
            (&["--abi", "7"], "--abi", "must be 8 to 12"),
            (&["--against-env", "A=b"], "--against", "required"),
            (&["--against", "/no/such.so"], "--against /no/such.so", "No such file"),
            (&["--fall", "true"], "--return", "required"),
            (&["--rank-env", "2:A=b"], "--rank-env", "0 and 1"),
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
            let cli = program::parse::<Cli>(words.into_iter().map(Into::into)).unwrap();
            let Command::Bench(options) = cli.command else { panic!("another command") };
            let plan = options.plan(Path::new("/nowhere/spark-lab"), None).unwrap();
            assert_eq!((plan.json, &plan.scenarios[..]), (Some(target), scenarios));
        }
    }
}
