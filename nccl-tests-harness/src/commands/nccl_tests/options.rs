//! The command line of `nccl-spark nccl-tests`, checked before anything starts.

use super::gpus::missing_gpu;
use crate::output::report::{JsonOption, Target};
use crate::scene::network::Network;
use crate::scene::{SceneOptions, Setting};
use crate::sizes;
use crate::usage::{Suggesting, wrong};
use anyhow::{Result, bail};
use clap::Args;
use clap::builder::PossibleValue;
use std::path::{Path, PathBuf};

/// Options of nccl-tests.
#[derive(Debug, Args)]
pub struct Options {
    /// Programs to run one after another, as in all_gather or all_gather_perf.
    #[arg(value_name = "TEST", default_value = "all_gather", value_parser = Suggesting::new(tests()), hide_possible_values = true)]
    tests: Vec<String>,
    /// Arguments for the program, after --, as in -- -b 8 -e 128M -f 2 [default: -b 8 -e 128M -f
    /// 4].
    #[arg(value_name = "ARGUMENT", last = true)]
    arguments: Vec<String>,
    /// Sizes to measure, as in 8K-16M,24K-24M: each range starts at its first size and doubles up
    /// to the second one. One table shows all of them.
    #[arg(long, value_name = "FROM-TO,...", value_delimiter = ',', value_parser = parse_sweep)]
    sizes: Vec<Sweep>,
    /// Folder with the programs of your build of nccl-tests, or with build/ in it [default: PATH].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Number of ranks to start on this machine, with mpirun; to NCCL each is a host of its own.
    #[arg(short, long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=16))]
    ranks: u16,
    /// Runs across hosts: arguments for mpirun, as in "-np 2 -H spark-1,spark-2". The program,
    /// nccl-spark and the plugin must have the same paths on all hosts.
    #[arg(
        long,
        value_name = "ARGUMENTS",
        conflicts_with = "ranks",
        allow_hyphen_values = true
    )]
    mpirun: Option<String>,
    /// Networks to measure in turns, as in spark,ib,socket; the others are compared with the first.
    /// spark-untuned is this plugin with NCCL_SPARK_TUNER=off; with spark it is measured twice in
    /// each round, to show the noise.
    #[arg(long, value_name = "NETWORK,...", value_enum, value_delimiter = ',')]
    compare: Vec<Network>,
    /// Runs per network with --compare; the table shows their median. Each round starts with
    /// another network.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000), requires = "compare")]
    rounds: u32,
    #[command(flatten)]
    json: JsonOption,
    /// Draws charts of busbw as SVG into the folder DIR.
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    scene: SceneOptions,
}

/// A range of sizes in bytes, each twice as large as the one before.
#[derive(Debug, Clone, Copy)]
struct Sweep {
    from: usize,
    to: usize,
}

#[derive(Debug)]
pub struct Plan {
    /// Files of the programs: one or more, measured one after another.
    pub programs: Vec<PathBuf>,
    /// Arguments of each run of a program: one or more runs, whose rows form one table.
    pub arguments: Vec<Vec<String>>,
    /// Networks to measure in turns: one or more, none twice.
    pub networks: Vec<Network>,
    /// Number of rounds. A round measures each network once, and `spark-untuned` a second time if
    /// `spark` is measured too.
    pub rounds: u32,
    pub conditions: Conditions,
    pub json: Option<Target>,
    pub plot: Option<PathBuf>,
}

#[derive(Debug)]
pub struct Conditions {
    pub place: Place,
    pub setting: Setting,
}

pub struct Call<'a> {
    pub program: &'a Path,
    pub arguments: &'a [String],
    pub conditions: &'a Conditions,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// This machine, with this number of ranks.
    Here(usize),
    /// Arguments for mpirun, which starts the ranks on hosts.
    Hosts(Vec<String>),
}

impl Place {
    pub fn new(ranks: u16, mpirun: Option<String>) -> Self {
        match mpirun {
            Some(text) => Self::Hosts(text.split_whitespace().map(str::to_owned).collect()),
            None => Self::Here(usize::from(ranks)),
        }
    }

    /// Returns the number of ranks on this machine; 1 if it is not known.
    pub fn ranks_here(&self) -> usize {
        match self {
            Self::Here(ranks) => *ranks,
            Self::Hosts(_) => 1,
        }
    }
}

impl Options {
    /// Returns the plan for these options. `program` is this program's file, `path` the variable
    /// PATH. Fails when options contradict each other, or nccl-tests is not found.
    pub fn plan(self, program: &Path, path: Option<&str>) -> Result<Plan> {
        let mut networks = self.compare;
        if networks.is_empty() {
            networks.push(Network::Spark);
        }
        if let Some(network) = repeated(&networks) {
            return Err(wrong(format!("--compare names {} twice", network.name())))?;
        }
        let setting = self.scene.setting(program)?;
        let programs: Vec<PathBuf> = self
            .tests
            .iter()
            .map(|test| find(test, self.dir.as_deref(), path))
            .collect::<Result<_>>()?;
        if let Some(program) = repeated(&programs) {
            return Err(wrong(format!("{} is named twice", program.display())))?;
        }
        Ok(Plan {
            programs,
            arguments: arguments(&self.sizes, self.arguments)?,
            rounds: if networks.len() > 1 { self.rounds } else { 1 },
            networks,
            conditions: Conditions {
                place: Place::new(self.ranks, self.mpirun),
                setting,
            },
            json: self.json.target,
            plot: self.plot,
        })
    }
}

fn repeated<T: PartialEq>(values: &[T]) -> Option<&T> {
    values
        .iter()
        .enumerate()
        .find_map(|(at, value)| values[..at].contains(value).then_some(value))
}

/// Returns the arguments of each run. Fails if both `--sizes` and the other arguments name sizes.
fn arguments(sweeps: &[Sweep], given: Vec<String>) -> Result<Vec<Vec<String>>> {
    if sweeps.is_empty() {
        let default = || {
            ["-b", "8", "-e", "128M", "-f", "4"]
                .map(str::to_owned)
                .to_vec()
        };
        return Ok(vec![if given.is_empty() { default() } else { given }]);
    }
    let of_sizes = |argument: &&String| {
        [
            "-b",
            "-e",
            "-f",
            "-i",
            "--minbytes",
            "--maxbytes",
            "--stepfactor",
            "--stepbytes",
        ]
        .iter()
        .any(|name| argument.starts_with(name))
    };
    if let Some(argument) = given.iter().find(of_sizes) {
        Err(wrong(format!(
            "{argument}: --sizes names the sizes already"
        )))?;
    }
    let with_sizes = |sweep: &Sweep| {
        let sizes = [("-b", sweep.from), ("-e", sweep.to), ("-f", 2)];
        let sizes = sizes
            .into_iter()
            .flat_map(|(name, number)| [name.to_owned(), number.to_string()]);
        sizes.chain(given.iter().cloned()).collect()
    };
    Ok(sweeps.iter().map(with_sizes).collect())
}

fn parse_sweep(text: &str) -> Result<Sweep, String> {
    let (from, to) = text
        .split_once('-')
        .ok_or("must be FROM-TO, as in 8K-16M")?;
    let from = sizes::parse(from)?;
    let to = sizes::parse(to)?;
    match 1 <= from && from <= to {
        true => Ok(Sweep { from, to }),
        false => Err(format!(
            "must begin with 1 byte or more and not end below its begin: {from}-{to}"
        )),
    }
}

/// Returns the programs of nccl-tests for completions. Other programs can be run too.
fn tests() -> Vec<PossibleValue> {
    let names = "all_gather all_reduce alltoall broadcast gather hypercube reduce reduce_scatter scatter sendrecv";
    let named = |name: &'static str| {
        let other = name.replace('_', "-");
        PossibleValue::new(name).aliases([format!("{name}_perf"), format!("{other}-perf"), other])
    };
    names.split(' ').map(named).collect()
}

/// Returns the program's file. `all_gather`, `all-gather` and `all_gather_perf` name the same
/// program.
pub fn find(test: &str, folder: Option<&Path>, path: Option<&str>) -> Result<PathBuf> {
    let name = test.replace('-', "_");
    let name = if name.ends_with("_perf") {
        name
    } else {
        format!("{name}_perf")
    };
    let folders: Vec<PathBuf> = match folder {
        Some(folder) => vec![folder.to_owned(), folder.join("build")],
        None => path
            .unwrap_or_default()
            .split(':')
            .map(PathBuf::from)
            .collect(),
    };
    if let Some(found) = folders
        .iter()
        .map(|folder| folder.join(&name))
        .find(|file| file.is_file())
    {
        return Ok(found.canonicalize()?);
    }
    let places = match folder {
        Some(folder) => format!("in {} or its build/", folder.display()),
        None => "in PATH; --dir names the folder of your build".to_owned(),
    };
    bail!(
        "no {name} {places} (https://github.com/NVIDIA/nccl-tests, built with make MPI=1 MPI_HOME=... CUDA_HOME=...){}",
        missing_gpu()
            .map(|text| format!("; also, {text}"))
            .unwrap_or_default()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn plan(arguments: &[&str]) -> Result<Plan> {
        let line = Line::try_parse_from(["nccl-tests"].iter().chain(arguments))?;
        line.options
            .plan(Path::new("/nowhere/nccl-spark"), Some("/no/path"))
    }

    #[test]
    fn the_program_is_found_by_any_of_its_names() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("build")).unwrap();
        let file = folder.path().join("build/all_reduce_perf");
        std::fs::write(&file, "").unwrap();
        let dir = folder.path().to_str().unwrap();
        for name in ["all_reduce", "all-reduce", "all_reduce_perf"] {
            let plan = plan(&[name, "--dir", dir]).unwrap();
            assert_eq!(plan.programs, [file.canonicalize().unwrap()]);
            assert_eq!(
                (plan.conditions.place, plan.networks, plan.rounds),
                (Place::Here(2), vec![Network::Spark], 1)
            );
        }
        let text = plan(&["alltoall", "--dir", dir]).unwrap_err().to_string();
        assert!(
            text.contains("no alltoall_perf in") && text.contains("MPI=1"),
            "{text}"
        );
        assert!(plan(&[]).unwrap_err().to_string().contains("in PATH"));
    }

    #[test]
    fn arguments_after_two_dashes_are_the_programs() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("all_gather_perf"), "").unwrap();
        let dir = folder.path().to_str().unwrap();
        let over_hosts = plan(&[
            "--dir",
            dir,
            "--compare",
            "spark,socket",
            "--mpirun",
            "-np 2 -H a,b",
            "--",
            "-b",
            "8",
        ])
        .unwrap();
        assert_eq!(
            (over_hosts.arguments, over_hosts.rounds),
            (vec![vec!["-b".to_owned(), "8".to_owned()]], 5)
        );
        assert_eq!(
            over_hosts.conditions.place,
            Place::Hosts(["-np", "2", "-H", "a,b"].map(str::to_owned).to_vec())
        );
        assert_eq!(over_hosts.networks, [Network::Spark, Network::Socket]);
        let tuner = plan(&["--dir", dir, "--compare", "spark,spark-untuned"]).unwrap();
        assert_eq!(tuner.networks, [Network::Spark, Network::SparkUntuned]);
        let twice = plan(&["all_gather", "all-gather", "--dir", dir])
            .unwrap_err()
            .to_string();
        assert!(twice.contains("all_gather_perf is named twice"), "{twice}");
        assert!(
            plan(&["--dir", dir, "--compare", "ib,ib"])
                .unwrap_err()
                .to_string()
                .contains("ib twice")
        );
    }

    #[test]
    fn each_range_of_sizes_is_a_run_with_the_other_arguments() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("all_gather_perf"), "").unwrap();
        let dir = folder.path().to_str().unwrap();
        let plan_sweeps =
            |more: &[&str]| plan(&[&["--dir", dir, "--sizes", "8K-16M,24K-24M"], more].concat());
        let runs = plan_sweeps(&["--", "-n", "50"]).unwrap().arguments;
        let lines: Vec<String> = runs.iter().map(|run| run.join(" ")).collect();
        assert_eq!(
            lines,
            [
                "-b 8192 -e 16777216 -f 2 -n 50",
                "-b 24576 -e 25165824 -f 2 -n 50"
            ]
        );
        let both = plan_sweeps(&["--", "-b", "8"]).unwrap_err().to_string();
        assert!(
            both.contains("-b: --sizes names the sizes already"),
            "{both}"
        );
        for wrong in ["8K", "0-8", "16-8", "8-x"] {
            assert!(plan(&["--dir", dir, "--sizes", wrong]).is_err(), "{wrong}");
        }
    }
}
