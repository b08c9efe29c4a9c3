//! What a report has in it: the parts, the command of each, how long it may take, and why one cannot be run.

use clap::ValueEnum;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A part by its name on the command line. Several parts can have one name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Name {
    Versions,
    Doctor,
    Rails,
    Settings,
    Hosts,
    Peer,
    Memory,
    Bench,
    NcclTests,
    Tune,
}

/// One part.
pub(super) struct Part {
    pub(super) name: Name,
    /// Its heading: the name, and what tells it from others of its name.
    pub(super) title: String,
    pub(super) order: Order,
    pub(super) limit: Duration,
}

/// How a part comes about.
pub(super) enum Order {
    /// Files are read.
    Versions,
    /// A program runs, and leaves its results as JSON.
    Run { program: PathBuf, arguments: Vec<String>, json: Option<PathBuf> },
    /// It cannot be run, for this reason.
    Not(String),
}

/// What decides about the parts.
pub(super) struct Asked {
    /// This program's file.
    pub(super) program: PathBuf,
    /// Where the parts leave their results.
    pub(super) folder: PathBuf,
    /// A machine's files, if not this one's.
    pub(super) root: Option<PathBuf>,
    pub(super) has_gpu: bool,
    pub(super) mpirun: Option<PathBuf>,
    pub(super) nccl_tests: Option<PathBuf>,
    /// This one first; none, or two or more.
    pub(super) hosts: Vec<String>,
    /// How the doctor calls ssh.
    pub(super) ssh: String,
}

/// Seconds of the litmus test of LL128.
const LITMUS_S: u32 = 20;
/// Where the ranks of bench meet between hosts, on the first of them.
const MEETING_PORT: u16 = 29_501;

impl Name {
    /// As it is written.
    pub(super) fn word(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// The doctor ends by itself after 300 s; nccl-tests gives each of its runs 600 s; a sweep takes about 15 minutes.
    fn limit(self) -> Duration {
        Duration::from_secs(match self {
            Self::Versions | Self::Settings => 30,
            Self::Rails => 60,
            Self::Doctor | Self::Hosts => 120,
            Self::Memory | Self::Bench => 300,
            Self::Peer => 330,
            Self::NcclTests => 1_800,
            Self::Tune => 3_600,
        })
    }
}

/// All parts, in the order in which they run.
pub(super) fn all(asked: &Asked) -> Vec<Part> {
    let mut parts = Parts { asked, parts: Vec::new() };
    parts.add(Name::Versions, "", Order::Versions);
    let root = asked.root.as_ref().map(|root| ["--root".to_owned(), root.display().to_string()]);
    let root: Vec<String> = root.into_iter().flatten().collect();
    parts.run(Name::Doctor, "", root, true);
    parts.run(Name::Rails, "", Vec::new(), true);
    parts.run(Name::Settings, "", Vec::new(), false);
    between_hosts(&mut parts);
    let litmus = ["--litmus".to_owned(), LITMUS_S.to_string()];
    match asked.has_gpu {
        true => parts.run(Name::Memory, "", litmus.into(), true),
        false => parts.add(Name::Memory, "", not(NO_GPU)),
    }
    bench(&mut parts);
    with_nccl(&mut parts);
    parts.parts
}

const NO_GPU: &str = "no GPU: no /dev/nvidia0";
const NO_HOSTS: &str = "--hosts was not given";
const NO_MPIRUN: &str = "no mpirun in PATH (Debian's openmpi-bin)";

fn not(why: &str) -> Order {
    Order::Not(why.to_owned())
}

struct Parts<'a> {
    asked: &'a Asked,
    parts: Vec<Part>,
}

impl Parts<'_> {
    fn add(&mut self, name: Name, what: &str, order: Order) {
        let title = if what.is_empty() { name.word() } else { format!("{} {what}", name.word()) };
        self.parts.push(Part { name, title, order, limit: name.limit() });
    }

    /// One of this program's commands, of the part's name.
    fn run(&mut self, name: Name, what: &str, arguments: Vec<String>, has_json: bool) {
        self.start(name, what, self.asked.program.clone(), [vec![name.word()], arguments].concat(), has_json, &[]);
    }

    /// `last` comes after the option for the JSON.
    fn start(
        &mut self,
        name: Name,
        what: &str,
        program: PathBuf,
        mut arguments: Vec<String>,
        has_json: bool,
        last: &[&str],
    ) {
        let number = self.parts.len() + 1;
        let json = has_json.then(|| self.asked.folder.join(format!("{number}-{}.json", name.word())));
        arguments.extend(json.iter().flat_map(|path| ["--json".to_owned(), path.display().to_string()]));
        arguments.extend(last.iter().map(|one| (*one).to_owned()));
        self.add(name, what, Order::Run { program, arguments, json });
    }
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

/// Which hosts have a cable in common, and what each of the others and this one find together.
fn between_hosts(parts: &mut Parts) {
    let asked = parts.asked;
    let [_, others @ ..] = &asked.hosts[..] else {
        parts.add(Name::Hosts, "", not(NO_HOSTS));
        return parts.add(Name::Peer, "", not(NO_HOSTS));
    };
    let ssh = ["--ssh".to_owned(), asked.ssh.clone()];
    let doctor = |option: &str, value: &str| {
        [vec!["doctor".to_owned(), option.to_owned(), value.to_owned()], ssh.to_vec()].concat()
    };
    parts.start(Name::Hosts, "", asked.program.clone(), doctor("--hosts", &asked.hosts.join(",")), true, &[]);
    for other in others {
        parts.start(Name::Peer, other, asked.program.clone(), doctor("--peer", other), true, &[]);
    }
}

/// Two ranks here, or one on each of the first two hosts.
fn bench(parts: &mut Parts) {
    let asked = parts.asked;
    let [first, second, ..] = &asked.hosts[..] else {
        return parts.run(
            Name::Bench,
            "on this machine",
            words("bandwidth latency --rounds 2 --seconds 0.3 -r 2"),
            true,
        );
    };
    let Some(mpirun) = &asked.mpirun else {
        return parts.add(Name::Bench, "between hosts", not(NO_MPIRUN));
    };
    let first_name = first.rsplit('@').next().unwrap_or(first);
    let mut arguments = words(&format!("-np 2 -H {first},{second} --map-by node --bind-to none"));
    arguments.push(asked.program.display().to_string());
    arguments.extend(words("bench bandwidth latency rate --rounds 3 --rendezvous"));
    arguments.push(format!("{first_name}:{MEETING_PORT}"));
    parts.start(Name::Bench, "between hosts", mpirun.clone(), arguments, true, &[]);
}

/// What needs NCCL, GPUs and the owner's build of nccl-tests.
fn with_nccl(parts: &mut Parts) {
    let asked = parts.asked;
    let missing = match &asked.nccl_tests {
        None => Some("--nccl-tests DIR was not given"),
        Some(_) if !asked.has_gpu => Some(NO_GPU),
        Some(_) if asked.mpirun.is_none() => Some(NO_MPIRUN),
        Some(_) => None,
    };
    if let Some(why) = missing {
        parts.add(Name::NcclTests, "", not(why));
        return parts.add(Name::Tune, "collectives", not(why));
    }
    let folder = asked.nccl_tests.as_ref().map_or_else(String::new, |path| path.display().to_string());
    let hosts = match &asked.hosts[..] {
        [] => Vec::new(),
        hosts => {
            let ranks = format!("-np {} -H {} --map-by node --bind-to none", hosts.len(), hosts.join(","));
            vec!["--mpirun".to_owned(), ranks]
        }
    };
    let dir = vec!["--dir".to_owned(), folder];
    for test in ["all_reduce", "all_gather"] {
        let first = [words(&format!("{test} --compare spark,ib --rounds 3")), dir.clone(), hosts.clone()].concat();
        let arguments = [vec![Name::NcclTests.word()], first].concat();
        let last = ["--", "-b", "8", "-e", "128M", "-f", "4"];
        parts.start(Name::NcclTests, test, asked.program.clone(), arguments, true, &last);
    }
    let arguments = [words("collectives --dry-run"), dir, hosts].concat();
    parts.run(Name::Tune, "collectives", arguments, true);
}

/// A program in the folders of PATH.
pub(super) fn in_path(name: &str, path: Option<&str>) -> Option<PathBuf> {
    let folders = path.unwrap_or_default().split(':').filter(|folder| !folder.is_empty());
    folders.map(|folder| Path::new(folder).join(name)).find(|file| file.is_file())
}
