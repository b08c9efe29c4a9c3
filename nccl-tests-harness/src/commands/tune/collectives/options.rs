//! The command line of `nccl-spark tune collectives`, checked before anything starts.

use crate::commands::nccl_tests::options as tests;
use crate::commands::tune::keep;
use crate::output::report::{JsonOption, Target};
use crate::scene::SceneOptions;
use crate::sizes;
use crate::unique::unique;
use crate::usage::wrong;
use anyhow::Result;
use clap::Args;
use host::config::Settings;
use proto::tuner::table::{Algorithm, Choice, Collective, Protocol, Table};
use std::path::{Path, PathBuf};

/// Options of tune collectives.
#[derive(Debug, Args)]
#[command(mut_arg("timeout", |arg| arg.default_value("120")))]
pub struct Options {
    /// Folder of your nccl-tests programs, or of a build/ that has them [default: PATH].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Number of ranks to start on this machine with mpirun; to NCCL each looks like a host of its
    /// own.
    #[arg(short, long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(2..=16))]
    ranks: u16,
    /// Arguments for mpirun, to run across hosts, as in "-np 2 -H spark1,spark2". The nccl-tests
    /// programs, this program and the plugin must have the same paths on all hosts.
    #[arg(
        long,
        value_name = "ARGUMENTS",
        conflicts_with = "ranks",
        allow_hyphen_values = true
    )]
    mpirun: Option<String>,
    /// Collectives to tune: all_reduce, all_gather, reduce_scatter, broadcast, reduce.
    #[arg(
        long,
        value_name = "COLLECTIVE,...",
        value_delimiter = ',',
        default_value = "all_reduce,all_gather,reduce_scatter,broadcast"
    )]
    collectives: Vec<Collective>,
    /// Smallest size, in bytes or with K, M or G; each next size is twice as large.
    #[arg(short = 'b', long = "minbytes", value_name = "SIZE", default_value = "8K", value_parser = sizes::parse)]
    min_bytes: usize,
    /// Largest size.
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", default_value = "8M", value_parser = sizes::parse)]
    max_bytes: usize,
    /// Algorithms to try: ring, and tree for all_reduce, the only one of these collectives that
    /// NCCL runs over trees.
    #[arg(
        long,
        value_name = "ALGORITHM,...",
        value_delimiter = ',',
        default_value = "ring"
    )]
    algorithms: Vec<Algorithm>,
    /// Protocols to try.
    #[arg(
        long,
        value_name = "PROTOCOL,...",
        value_delimiter = ',',
        default_value = "ll,ll128,simple"
    )]
    protocols: Vec<Protocol>,
    /// Numbers of channels to try; NCCL uses no more than the communicator has.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,2,3,4,8,16",
          value_parser = clap::value_parser!(u32).range(1..=64))]
    channels: Vec<u32>,
    /// Timed iterations of each size.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    iterations: u32,
    /// Iterations of each size before the timed ones.
    #[arg(short = 'w', long, value_name = "N", default_value_t = 5)]
    warmup: u32,
    /// Number of rounds; each measures NCCL's choice and all candidates once.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Smallest gain over NCCL's choice with which a candidate gets a row in the table: 1.05 is 5 %
    /// faster.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.05, value_parser = parse_gain)]
    gain: f64,
    /// Sizes of the groups (ncclGroupStart) that your program uses: 4,16 for groups of 4 and of 16
    /// collectives. Candidates are measured in such groups too, and one that is slower there than
    /// NCCL's choice gets no row. NCCL asks the tuner once per group, with the sum of the bytes.
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(2..=64))]
    groups: Vec<u32>,
    /// The settings file to write on each machine [default: the one that NCCL_SPARK_SETTINGS_FILE
    /// names, else /etc/nccl-spark.conf for root and ~/.nccl-spark.conf for other users].
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Measure, but write no settings file.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    json: JsonOption,
    #[command(flatten)]
    scene: SceneOptions,
}

#[derive(Debug)]
pub struct Plan {
    pub conditions: tests::Conditions,
    pub arguments: Vec<String>,
    /// Smallest and largest size in bytes.
    pub sizes: (usize, usize),
    /// The collectives with their programs: one or more, without duplicates.
    pub collectives: Vec<(Collective, PathBuf)>,
    /// All candidates, sorted by number of channels. [`Plan::candidates_of`] returns the candidates
    /// for one collective.
    candidates: Vec<Choice>,
    pub rounds: u32,
    /// A row is written only if its choice is at least this many times as fast as NCCL's choice.
    pub gain: f64,
    /// Groups to measure, each given as its number of collectives. Rows must not make such groups
    /// slower.
    pub groups: Vec<u32>,
    /// The settings file that `--output` or `NCCL_SPARK_SETTINGS_FILE` names. `None` means each
    /// host's default file.
    pub output: Option<PathBuf>,
    /// The settings file on this machine.
    pub file: PathBuf,
    /// The table that `file` has before the run.
    pub before: Option<Table>,
    pub dry_run: bool,
    pub json: Option<Target>,
    pub notes: Vec<String>,
}

impl Options {
    /// Checks the options.
    ///
    /// # Errors
    /// Options contradict each other, nccl-tests lacks a program, or the settings file is invalid.
    pub fn plan(self, program: &Path, lookup: &dyn Fn(&str) -> Option<String>) -> Result<Plan> {
        if let Some(other) = lookup("NCCL_TUNER_PLUGIN") {
            return Err(wrong(format!(
                "NCCL_TUNER_PLUGIN={other}: NCCL would ask that tuner and not this plugin's; unset it"
            )))?;
        }
        if self.min_bytes == 0 || self.min_bytes > self.max_bytes {
            return Err(wrong(format!(
                "--minbytes {}: must be 1 to --maxbytes {}",
                self.min_bytes, self.max_bytes
            )))?;
        }
        let arguments = self.arguments();
        let named = lookup(keep::SETTINGS_FILE);
        let output = self.output.or_else(|| named.clone().map(PathBuf::from));
        let file = keep::place(output.clone(), None)?;
        let before = if file.exists() {
            keep::check(&file)?.tuner.table
        } else {
            None
        };
        let settings = keep::settings(named.as_deref())?;
        let (protocols, notes) = protocols(self.protocols, &settings, lookup)?;
        let algorithms = unique(self.algorithms);
        let candidates = candidates(&algorithms, &protocols, &unique(self.channels));
        let collectives = unique(self.collectives);
        check_algorithms(&algorithms, &collectives)?;
        let setting = self.scene.setting(program)?;
        let place = tests::Place::new(self.ranks, self.mpirun);
        Ok(Plan {
            conditions: tests::Conditions { place, setting },
            arguments,
            sizes: (self.min_bytes, self.max_bytes),
            collectives: with_programs(&collectives, self.dir.as_deref(), lookup)?,
            candidates,
            rounds: self.rounds,
            gain: self.gain,
            groups: unique(self.groups),
            output,
            file,
            before,
            dry_run: self.dry_run,
            json: self.json.target,
            notes,
        })
    }

    /// Returns the arguments of the nccl-tests programs.
    fn arguments(&self) -> Vec<String> {
        [
            ("-b", self.min_bytes),
            ("-e", self.max_bytes),
            ("-f", 2),
            ("-n", self.iterations as usize),
            ("-w", self.warmup as usize),
            ("-c", 1),
        ]
        .into_iter()
        .flat_map(|(name, number)| [name.to_owned(), number.to_string()])
        .collect()
    }
}

/// Checks that each collective has an algorithm: NCCL runs only all_reduce over trees.
fn check_algorithms(algorithms: &[Algorithm], collectives: &[Collective]) -> Result<()> {
    if algorithms != [Algorithm::Tree] {
        return Ok(());
    }
    let other = collectives
        .iter()
        .find(|collective| **collective != Collective::AllReduce);
    if let Some(other) = other {
        Err(wrong(format!(
            "--algorithms tree: NCCL runs {other} over rings only; add ring, or leave it out of --collectives"
        )))?;
    }
    Ok(())
}

/// Finds the nccl-tests program of each collective, in `folder` or in `PATH`.
fn with_programs(
    collectives: &[Collective],
    folder: Option<&Path>,
    lookup: &dyn Fn(&str) -> Option<String>,
) -> Result<Vec<(Collective, PathBuf)>> {
    let path = lookup("PATH");
    collectives
        .iter()
        .map(|collective| {
            let program = tests::find(&collective.to_string(), folder, path.as_deref())?;
            Ok((*collective, program))
        })
        .collect()
}

impl Plan {
    /// Returns the candidates for a collective. Trees are only for all_reduce, as in NCCL
    /// (`ncclTopoTuneModel`, tuning.cc).
    pub fn candidates_of(&self, collective: Collective) -> impl Iterator<Item = Choice> {
        self.candidates.iter().copied().filter(move |choice| {
            choice.algorithm != Algorithm::Tree || collective == Collective::AllReduce
        })
    }
}

fn candidates(algorithms: &[Algorithm], protocols: &[Protocol], channels: &[u32]) -> Vec<Choice> {
    let pairs = channels.iter().flat_map(|&channels| {
        algorithms
            .iter()
            .map(move |&algorithm| (channels, algorithm))
    });
    let choice = |(channels, algorithm)| {
        protocols.iter().map(move |&protocol| Choice {
            algorithm,
            protocol,
            channels,
        })
    };
    pairs.flat_map(choice).collect()
}

fn protocols(
    wanted: Vec<Protocol>,
    settings: &Settings,
    lookup: &dyn Fn(&str) -> Option<String>,
) -> Result<(Vec<Protocol>, Vec<String>)> {
    let mut protocols = unique(wanted);
    let mut notes = Vec::new();
    let is_ll128_off = settings
        .in_effect()
        .iter()
        .any(|held| held.row.name == "NCCL_SPARK_LL128" && held.value == "0");
    if is_ll128_off && protocols.contains(&Protocol::Ll128) {
        protocols.retain(|protocol| *protocol != Protocol::Ll128);
        notes.push("LL128 is not tried: NCCL_SPARK_LL128=0".to_owned());
    }
    if protocols.contains(&Protocol::Ll128) {
        notes.push(
            "LL128 is tried too: check with nccl-spark memory --litmus 60 on each machine that it is safe".to_owned(),
        );
    }
    if protocols.is_empty() {
        Err(wrong(
            "--protocols: NCCL_SPARK_LL128=0 excludes ll128, and nothing else is given",
        ))?;
    }
    for name in ["NCCL_ALGO", "NCCL_PROTO"] {
        if let Some(value) = lookup(name) {
            notes.push(format!("{name}={value} is set: NCCL does not use what it excludes, even if the table has it"));
        }
    }
    Ok((protocols, notes))
}

fn parse_gain(text: &str) -> Result<f64, String> {
    let gain = text
        .parse::<f64>()
        .ok()
        .filter(|gain| (1.0..=100.0).contains(gain));
    gain.ok_or_else(|| "must be 1 to 100".to_owned())
}

#[cfg(test)]
mod unit {
    use super::*;
    use crate::cli::{Cli, Command};
    use crate::commands::tune::options::What;
    use clap::Parser;

    fn plan(arguments: &str, environment: &[(&str, &str)]) -> Result<Plan> {
        let folder = tempfile::tempdir().unwrap();
        for name in [
            "all_reduce",
            "all_gather",
            "reduce_scatter",
            "broadcast",
            "reduce",
        ] {
            std::fs::write(folder.path().join(format!("{name}_perf")), "").unwrap();
        }
        let line = format!(
            "nccl-spark tune collectives --dry-run --dir {} {arguments}",
            folder.path().display()
        );
        let cli = Cli::try_parse_from(line.split_whitespace())?;
        let Command::Tune(options) = cli.command else {
            panic!("another command")
        };
        let Some(What::Collectives(options)) = options.what else {
            panic!("plain tune")
        };
        let lookup = |wanted: &str| {
            environment
                .iter()
                .find(|(name, _)| *name == wanted)
                .map(|(_, value)| (*value).to_owned())
        };
        options.plan(Path::new("/nowhere/nccl-spark"), &lookup)
    }

    #[test]
    fn the_defaults_are_four_collectives_with_eighteen_candidates() {
        let plan = plan("", &[("HOME", "/nowhere")]).unwrap();
        assert_eq!(
            (plan.collectives.len(), plan.candidates.len(), plan.rounds),
            (4, 18, 3)
        );
        assert_eq!(
            plan.candidates[..2]
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>(),
            ["ring/ll/1", "ring/ll128/1"]
        );
        assert_eq!(
            plan.arguments.join(" "),
            "-b 8192 -e 8388608 -f 2 -n 50 -w 5 -c 1"
        );
        assert_eq!(plan.conditions.place, tests::Place::Here(2));
        assert_eq!(plan.conditions.setting.timeout.as_secs(), 120);
        assert!(
            plan.collectives[0].1.ends_with("all_reduce_perf"),
            "{plan:?}"
        );
    }

    #[test]
    fn lists_are_given_once_and_hosts_go_to_mpirun() {
        let plan = plan(
            "--collectives reduce,reduce --protocols simple --channels 2,2,4 --mpirun=-np",
            &[],
        )
        .unwrap();
        assert_eq!(
            (
                plan.collectives.len(),
                plan.candidates_of(Collective::Reduce).count()
            ),
            (1, 2)
        );
        assert_eq!(
            plan.conditions.place,
            tests::Place::Hosts(vec!["-np".to_owned()])
        );
    }

    #[test]
    fn trees_are_tried_for_all_reduce_alone() {
        let plan = plan(
            "--collectives all_reduce,all_gather --algorithms tree,ring --protocols ll --channels 2,4",
            &[],
        );
        let plan = plan.unwrap();
        let candidates = |collective| {
            plan.candidates_of(collective)
                .map(|choice| choice.to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(
            candidates(Collective::AllReduce),
            ["tree/ll/2", "ring/ll/2", "tree/ll/4", "ring/ll/4"]
        );
        assert_eq!(
            candidates(Collective::AllGather),
            ["ring/ll/2", "ring/ll/4"]
        );
    }

    #[test]
    fn a_settings_file_named_by_a_variable_applies_to_all_hosts() {
        let plan_with_variable = |arguments: &str| {
            plan(
                arguments,
                &[("NCCL_SPARK_SETTINGS_FILE", "/no/where/a.conf")],
            )
            .unwrap()
        };
        let by_variable = plan_with_variable("--mpirun=-np");
        let by_option = plan_with_variable("--mpirun=-np --output /b.conf");
        let file = |path: &str| (Some(PathBuf::from(path)), PathBuf::from(path));
        assert_eq!(
            (by_variable.output, by_variable.file),
            file("/no/where/a.conf")
        );
        assert_eq!((by_option.output, by_option.file), file("/b.conf"));
        assert_eq!(
            plan("--mpirun=-np", &[("HOME", "/nowhere")])
                .unwrap()
                .output,
            None
        );
    }

    #[test]
    fn mistakes_are_named() {
        for (arguments, environment, words) in [
            ("--protocols ll129", &[][..], "not one of ll, ll128, simple"),
            ("--collectives alltoall", &[], "not one of broadcast"),
            (
                "--algorithms tree --collectives all_gather",
                &[],
                "all_gather",
            ),
            ("--algorithms chain", &[], "not one of tree, ring"),
            ("--gain 0.9", &[], "1 to 100"),
            ("--channels 65", &[], "1..=64"),
            ("-b 2M -e 1M", &[], "--minbytes"),
            ("-r 1", &[], "2..=16"),
            (
                "",
                &[("NCCL_TUNER_PLUGIN", "other")],
                "would ask that tuner",
            ),
        ] {
            let text = plan(arguments, environment).unwrap_err().to_string();
            assert!(text.contains(words), "{arguments}: {text}");
        }
        assert!(Cli::try_parse_from(["nccl-spark", "tune", "--qps", "1", "collectives"]).is_err());
    }

    #[test]
    fn excluded_candidates_are_not_tried() {
        let settings = |ll128: &str| {
            Settings::gather(&[("NCCL_SPARK_LL128".into(), ll128.into())], &[]).unwrap()
        };
        let all = || vec![Protocol::Ll, Protocol::Ll128];
        let (left, notes) = protocols(all(), &settings("0"), &|_| None).unwrap();
        assert_eq!((left, notes.len()), (vec![Protocol::Ll], 1));
        let proto = |name: &str| (name == "NCCL_PROTO").then(|| "^LL".to_owned());
        let (left, notes) = protocols(all(), &settings("1"), &proto).unwrap();
        assert!(left == all() && notes.len() == 2, "{notes:?}");
        assert!(
            notes[0].contains("--litmus") && notes[1].contains("NCCL_PROTO=^LL is set"),
            "{notes:?}"
        );
        assert!(protocols(vec![Protocol::Ll128], &settings("0"), &|_| None).is_err());
    }
}
