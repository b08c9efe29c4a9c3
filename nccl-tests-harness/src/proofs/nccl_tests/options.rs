//! The command line of `nccl-spark nccl-tests`, checked before anything starts.

use super::gpus::missing_gpu;
use crate::output::report::{JsonOption, Target};
use crate::scene::network::Network;
use crate::scene::{SceneOptions, Setting};
use crate::usage::{Suggesting, wrong};
use anyhow::{Result, bail};
use clap::Args;
use clap::builder::PossibleValue;
use std::path::{Path, PathBuf};

/// Options of nccl-tests.
#[derive(Debug, Args)]
pub struct Options {
    /// Program to run, as in all_gather or all_gather_perf.
    #[arg(value_name = "TEST", default_value = "all_gather", value_parser = Suggesting::new(tests()), hide_possible_values = true)]
    test: String,
    /// Arguments for the program, after --, as in -- -b 8 -e 128M -f 2 [default: -b 8 -e 128M -f 4].
    #[arg(value_name = "ARGUMENT", last = true)]
    arguments: Vec<String>,
    /// Folder with the programs of your build of nccl-tests, or with build/ in it [default: PATH].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Number of ranks to start on this machine, with mpirun; to NCCL each is a host of its own.
    #[arg(short, long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=16))]
    ranks: u16,
    /// Runs across hosts: arguments for mpirun, as in "-np 2 -H spark-1,spark-2". The program, nccl-spark and the plugin must have
    /// the same paths on all hosts.
    #[arg(long, value_name = "ARGUMENTS", conflicts_with = "ranks", allow_hyphen_values = true)]
    mpirun: Option<String>,
    /// Networks to measure in turns, as in spark,ib,socket; the others are compared with the first. spark-untuned is this plugin with
    /// NCCL_SPARK_TUNER=off; with spark it is measured twice in each round, to show the noise.
    #[arg(long, value_name = "NETWORK,...", value_enum, value_delimiter = ',')]
    compare: Vec<Network>,
    /// Runs per network with --compare, of which the table shows the median; each round starts with another network.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000), requires = "compare")]
    rounds: u32,
    /// With --as-spark: measures even if NCCL chooses fewer than 16 collective channels over this plugin, which it does not do on
    /// a Spark.
    #[arg(long, requires = "as_spark")]
    allow_few_channels: bool,
    #[command(flatten)]
    json: JsonOption,
    /// Draws charts of busbw, as SVG and PNG, into the folder DIR.
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    scene: SceneOptions,
}

/// What to run.
#[derive(Debug)]
pub struct Plan {
    /// The program's file.
    pub program: PathBuf,
    /// What it is told.
    pub arguments: Vec<String>,
    /// Where the ranks are.
    pub place: Place,
    /// In turns; one or more, none twice.
    pub networks: Vec<Network>,
    /// Runs over each.
    pub rounds: u32,
    /// Whether NCCL may choose fewer channels than on a Spark, where it is given a Spark's graph.
    pub allow_few_channels: bool,
    /// What NCCL is run in.
    pub setting: Setting,
    /// The place of the JSON.
    pub json: Option<Target>,
    /// Where pictures go.
    pub plot: Option<PathBuf>,
}

impl Plan {
    /// Whether a run over this plugin counts only where NCCL chose as many channels as on a Spark.
    pub fn needs_spark_channels(&self) -> bool {
        self.setting.as_spark && !self.allow_few_channels
    }
}

/// Where the ranks are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// So many on this machine.
    Here(usize),
    /// Where mpirun puts them by these arguments.
    Hosts(Vec<String>),
}

impl Place {
    /// What `--ranks` and `--mpirun` say.
    ///
    /// # Errors
    /// When the ranks may be on other machines, and `setting` needs them here.
    pub fn new(ranks: u16, mpirun: Option<String>, setting: &Setting) -> Result<Self, clap::Error> {
        match mpirun {
            Some(_) if setting.is_local() => {
                Err(wrong("--abi and --as-spark are for ranks of this machine: not with --mpirun"))
            }
            Some(text) => Ok(Self::Hosts(text.split_whitespace().map(str::to_owned).collect())),
            None => Ok(Self::Here(usize::from(ranks))),
        }
    }

    /// How many ranks are on this machine, as far as that is known.
    pub fn ranks_here(&self) -> usize {
        match self {
            Self::Here(ranks) => *ranks,
            Self::Hosts(_) => 1,
        }
    }
}

impl Options {
    /// What to run; `program` is this program's file, `path` the environment's PATH.
    ///
    /// # Errors
    /// When options contradict each other, or nccl-tests is not there.
    pub fn plan(self, program: &Path, path: Option<&str>) -> Result<Plan> {
        let mut networks = self.compare;
        if networks.is_empty() {
            networks.push(Network::Spark);
        }
        for (number, network) in networks.iter().enumerate() {
            if networks[..number].contains(network) {
                return Err(wrong(format!("--compare names {} twice", network.name())))?;
            }
        }
        let setting = self.scene.setting(program)?;
        let place = Place::new(self.ranks, self.mpirun, &setting)?;
        let mut arguments = self.arguments;
        if arguments.is_empty() {
            arguments = ["-b", "8", "-e", "128M", "-f", "4"].map(str::to_owned).to_vec();
        }
        Ok(Plan {
            program: find(&self.test, self.dir.as_deref(), path)?,
            arguments,
            place,
            rounds: if networks.len() > 1 { self.rounds } else { 1 },
            networks,
            allow_few_channels: self.allow_few_channels,
            setting,
            json: self.json.target,
            plot: self.plot,
        })
    }
}

/// The programs of nccl-tests. Others are run too.
fn tests() -> Vec<PossibleValue> {
    let names = "all_gather all_reduce alltoall broadcast gather hypercube reduce reduce_scatter scatter sendrecv";
    let named = |name: &'static str| {
        let other = name.replace('_', "-");
        PossibleValue::new(name).aliases([format!("{name}_perf"), format!("{other}-perf"), other])
    };
    names.split(' ').map(named).collect()
}

/// The program's file: `all_gather`, `all-gather` and `all_gather_perf` are the same.
pub fn find(test: &str, folder: Option<&Path>, path: Option<&str>) -> Result<PathBuf> {
    let name = test.replace('-', "_");
    let name = if name.ends_with("_perf") { name } else { format!("{name}_perf") };
    let folders: Vec<PathBuf> = match folder {
        Some(folder) => vec![folder.to_owned(), folder.join("build")],
        None => path.unwrap_or_default().split(':').map(PathBuf::from).collect(),
    };
    if let Some(found) = folders.iter().map(|folder| folder.join(&name)).find(|file| file.is_file()) {
        return Ok(found.canonicalize()?);
    }
    let places = match folder {
        Some(folder) => format!("in {} or its build/", folder.display()),
        None => "in PATH; --dir names the folder of your build".to_owned(),
    };
    bail!(
        "no {name} {places} (https://github.com/NVIDIA/nccl-tests, built with make MPI=1 MPI_HOME=... CUDA_HOME=...){}",
        missing_gpu().map(|text| format!("; also, {text}")).unwrap_or_default()
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
        line.options.plan(Path::new("/nowhere/nccl-spark"), Some("/no/path"))
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
            assert_eq!(plan.program, file.canonicalize().unwrap());
            assert_eq!((plan.place, plan.networks, plan.rounds), (Place::Here(2), vec![Network::Spark], 1));
        }
        let text = plan(&["alltoall", "--dir", dir]).unwrap_err().to_string();
        assert!(text.contains("no alltoall_perf in") && text.contains("MPI=1"), "{text}");
        assert!(plan(&[]).unwrap_err().to_string().contains("in PATH"));
    }

    #[test]
    fn what_follows_two_dashes_is_the_programs() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("all_gather_perf"), "").unwrap();
        let dir = folder.path().to_str().unwrap();
        let told =
            plan(&["--dir", dir, "--compare", "spark,socket", "--mpirun", "-np 2 -H a,b", "--", "-b", "8"]).unwrap();
        assert_eq!((told.arguments, told.rounds), (vec!["-b".to_owned(), "8".to_owned()], 5));
        assert_eq!(told.place, Place::Hosts(["-np", "2", "-H", "a,b"].map(str::to_owned).to_vec()));
        assert_eq!(told.networks, [Network::Spark, Network::Socket]);
        let tuner = plan(&["--dir", dir, "--compare", "spark,spark-untuned"]).unwrap();
        assert_eq!(tuner.networks, [Network::Spark, Network::SparkUntuned]);
        let few = plan(&["--dir", dir, "--allow-few-channels"]).unwrap_err().to_string();
        assert!(few.contains("--as-spark"), "{few}");
        assert!(plan(&["--dir", dir, "--compare", "ib,ib"]).unwrap_err().to_string().contains("ib twice"));
    }
}
