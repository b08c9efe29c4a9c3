//! The parts of a report. Each has a command and a time limit, or the reason why it cannot run.

use clap::ValueEnum;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A part by its name on the command line. Several steps can belong to one part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Part {
    /// Findings, versions, rails, counters, settings.
    Machine,
    /// Pairs of rails between all hosts.
    Hosts,
    /// Findings and measurements together with another host.
    Peer,
    /// Kinds of memory, and the litmus test.
    Memory,
    /// A collective between two ranks of this program.
    AllGather,
    /// The owner's build of nccl-tests.
    NcclTests,
    /// The tuner's sweep.
    Tune,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum State {
    /// The part ended by itself, with any exit status.
    Ended,
    OutOfTime,
    Interrupted,
    NotStarted,
    NoGpu,
    NoHosts,
    NoMpirun,
    NoNcclTests,
}

#[derive(Serialize)]
pub(super) struct Step {
    pub(super) part: Part,
    /// For `Part::Peer`, the index of the other host in `--hosts`.
    pub(super) peer: Option<usize>,
    pub(super) test: Option<&'static str>,
    #[serde(skip)]
    pub(super) order: Result<Order, State>,
    #[serde(skip)]
    pub(super) limit: Duration,
}

pub(super) enum Order {
    Read,
    /// Runs a program that writes its results to the file `json`.
    Run {
        program: PathBuf,
        arguments: Vec<String>,
        json: PathBuf,
    },
}

pub(super) struct Request {
    pub(super) program: PathBuf,
    pub(super) folder: PathBuf,
    pub(super) has_gpu: bool,
    pub(super) mpirun: Option<PathBuf>,
    pub(super) nccl_tests: Option<PathBuf>,
    /// The hosts of `--hosts`, this host first. Empty, or at least two.
    pub(super) hosts: Vec<String>,
    pub(super) ssh: String,
}

/// Rendezvous port on the first host, for the ranks of a collective between hosts.
const MEETING_PORT: u16 = 29_501;
const BY_HOST: &str = "--map-by node --bind-to none";

impl Part {
    pub(super) fn word(self) -> String {
        self.to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Returns the time limit of a step. For a peer, it is above the doctor's own limit of 300 s.
    /// `nccl-tests` limits each of its runs to 600 s. The tuner's sweep takes about 15 minutes.
    fn limit(self) -> Duration {
        Duration::from_secs(match self {
            Self::Machine | Self::Hosts => 120,
            Self::Memory | Self::AllGather => 300,
            Self::Peer => 330,
            Self::NcclTests => 1_800,
            Self::Tune => 3_600,
        })
    }
}

impl State {
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Ended => "ended",
            Self::OutOfTime => "ended at its time limit",
            Self::Interrupted => "interrupted",
            Self::NotStarted => "cannot be started",
            Self::NoGpu => "not run: no GPU (no /dev/nvidia0)",
            Self::NoHosts => "not run: --hosts was not given",
            Self::NoMpirun => "not run: no mpirun in PATH (Debian's openmpi-bin)",
            Self::NoNcclTests => "not run: --nccl-tests DIR was not given",
        }
    }
}

impl Step {
    fn new(part: Part, order: Result<Order, State>) -> Self {
        Self {
            part,
            peer: None,
            test: None,
            order,
            limit: part.limit(),
        }
    }

    pub(super) fn title(&self) -> String {
        let words = [
            Some(self.part.word()),
            self.peer.map(|number| number.to_string()),
            self.test.map(str::to_owned),
        ];
        words.into_iter().flatten().collect::<Vec<_>>().join(" ")
    }
}

pub(super) fn all(request: &Request) -> Vec<Step> {
    let memory = request
        .has_gpu
        .then(|| own(request, "memory --litmus 20", &[]))
        .ok_or(State::NoGpu);
    let mut steps = vec![Step::new(Part::Machine, Ok(Order::Read))];
    steps.extend(between_hosts(request));
    steps.extend([
        Step::new(Part::Memory, memory),
        Step::new(Part::AllGather, all_gather(request)),
    ]);
    steps.extend(with_nccl(request));
    for (at, step) in steps.iter_mut().enumerate() {
        if let Ok(Order::Run {
            arguments, json, ..
        }) = &mut step.order
        {
            *json = request
                .folder
                .join(format!("{}-{}.json", at + 1, step.part.word()));
            // Words after `--` are arguments of another program.
            let end = arguments
                .iter()
                .position(|word| word == "--")
                .unwrap_or(arguments.len());
            arguments.splice(end..end, ["--json".to_owned(), json.display().to_string()]);
        }
    }
    steps
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

fn run(program: &Path, arguments: Vec<String>) -> Order {
    Order::Run {
        program: program.to_owned(),
        arguments,
        json: PathBuf::new(),
    }
}

/// Makes an order to run a command of this program. `command` is split at blanks. `options` are
/// whole arguments, which may have blanks.
fn own(request: &Request, command: &str, options: &[&str]) -> Order {
    run(
        &request.program,
        [
            words(command),
            options.iter().map(|one| (*one).to_owned()).collect(),
        ]
        .concat(),
    )
}

fn between_hosts(request: &Request) -> Vec<Step> {
    let [_, others @ ..] = &request.hosts[..] else {
        return [Part::Hosts, Part::Peer]
            .map(|part| Step::new(part, Err(State::NoHosts)))
            .into();
    };
    let doctor = |option: &str, value: &str| {
        Ok(own(
            request,
            "doctor",
            &[option, value, "--ssh", &request.ssh],
        ))
    };
    let peer = |(at, host): (usize, &String)| Step {
        peer: Some(at + 1),
        ..Step::new(Part::Peer, doctor("--peer", host))
    };
    let hosts = Step::new(Part::Hosts, doctor("--hosts", &request.hosts.join(",")));
    [hosts]
        .into_iter()
        .chain(others.iter().enumerate().map(peer))
        .collect()
}

/// Makes the order for all-gather: two ranks on this host, or one on each of the first two hosts.
fn all_gather(request: &Request) -> Result<Order, State> {
    const SIZES: &str = "all-gather -b 8 -e 32M -f 4";
    let [first, second, ..] = &request.hosts[..] else {
        return Ok(own(request, SIZES, &["-r", "2"]));
    };
    let mpirun = request.mpirun.as_ref().ok_or(State::NoMpirun)?;
    let mut arguments = words(&format!("-np 2 -H {first},{second} {BY_HOST}"));
    arguments.push(request.program.display().to_string());
    let first = first.rsplit('@').next().unwrap_or(first);
    arguments.extend(words(&format!(
        "{SIZES} --rendezvous {first}:{MEETING_PORT}"
    )));
    Ok(run(mpirun, arguments))
}

fn with_nccl(request: &Request) -> [Step; 3] {
    let folder = match &request.nccl_tests {
        None => Err(State::NoNcclTests),
        Some(_) if !request.has_gpu => Err(State::NoGpu),
        Some(_) if request.mpirun.is_none() => Err(State::NoMpirun),
        Some(folder) => Ok(folder.display().to_string()),
    };
    let ranks = format!(
        "-np {} -H {} {BY_HOST}",
        request.hosts.len(),
        request.hosts.join(",")
    );
    let order = |command: &str, last: &str| {
        let folder = folder.as_ref().map_err(|reason| *reason)?;
        let hosts = if request.hosts.is_empty() {
            vec![]
        } else {
            vec!["--mpirun", &ranks]
        };
        let options = [
            vec!["--dir", folder],
            hosts,
            last.split_whitespace().collect(),
        ]
        .concat();
        Ok(own(request, command, &options))
    };
    let test = |test| {
        let command = format!("nccl-tests {test} --compare spark,ib --rounds 3");
        Step {
            test: Some(test),
            ..Step::new(Part::NcclTests, order(&command, "-- -b 8 -e 128M -f 4"))
        }
    };
    [
        test("all_reduce"),
        test("all_gather"),
        Step::new(Part::Tune, order("tune collectives --dry-run", "")),
    ]
}
