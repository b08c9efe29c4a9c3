//! Measures a plugin with single messages between two ranks, and another plugin in turn with it.
//!
//! Each library has two rank processes of its own (`rank`, driven by `side`), all started before the first measurement;
//! those that are not measured wait on their line to the command. `scenario` and `slowdown` say what is done, round by
//! round, `figures` what becomes of it, `limit` what the wiring would let through; `table`, `report` and `plot` tell it.

pub mod figures;
pub mod limit;
pub mod options;
pub mod plot;
pub mod rank;
pub mod report;
pub mod scenario;
pub mod side;
pub mod slowdown;
pub mod table;
pub mod traffic;
pub mod words;

use crate::cli::wrong;
use crate::control::Network;
use crate::fabric::{self, Fabric, Kind, Wish};
use crate::job::{RankEnv, Seat};
use crate::launch::World;
use crate::rendezvous::Meeting;
use crate::report::{self as told, Target};
use crate::seats;
use crate::sizes::{self, Step};
use crate::watch::Watch;
use anyhow::{Context, Result, bail};
use figures::{Metric, Point};
use limit::Limit;
use nix::sys::signal;
use nix::unistd::Pid;
use report::Report;
use side::{About, Side, Turn};
use slowdown::Course;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use table::Table;

/// Two: one sends, one receives.
const RANKS: usize = 2;
/// What a slowed rail carries of its rate.
const FALLEN: f64 = 0.25;
/// How often a command of the user's is looked after.
const LOOK: Duration = Duration::from_millis(1);

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Scenario {
    /// Payload a second by size.
    Bandwidth,
    /// Half a round trip by size.
    Latency,
    /// Small messages a second.
    Rate,
    /// 1, 2, 4 and more connections at once.
    Connections,
    /// Bandwidth with one rail at a quarter of its rate (the software fabric; on verbs whatever rails there are).
    Unequal,
    /// A stream during which one rail falls to a quarter of its rate, and returns.
    Slowdown,
}

/// What to run, all of it checked already.
#[derive(Debug, Clone)]
pub struct Plan {
    /// What is asked for; none: what the fabric allows.
    pub scenarios: Vec<Scenario>,
    /// Our library.
    pub plugin: PathBuf,
    /// The version of the plugin interface to speak with it.
    pub abi: Option<u32>,
    /// The other library.
    pub against: Option<PathBuf>,
    /// The version of the plugin interface to speak with that.
    pub against_abi: Option<u32>,
    /// Environment of the other library's ranks alone.
    pub against_env: Vec<(String, String)>,
    /// Rounds (1 or more).
    pub rounds: u32,
    /// How long one measurement takes, about.
    pub seconds: f64,
    /// How long a rank rests when nothing moved, in microseconds.
    pub rest_us: u32,
    /// The first size, where the scenario's own is not wanted.
    pub min_bytes: Option<usize>,
    /// The greatest size, where the scenario's own is not wanted.
    pub max_bytes: Option<usize>,
    /// The factor from one size to the next (2 or more).
    pub step_factor: Option<usize>,
    /// Messages under way on a connection (1 to 32).
    pub in_flight: usize,
    /// Connections of a stream (1 or more).
    pub channels: usize,
    /// Size of the messages over many connections.
    pub connection_bytes: usize,
    /// The most connections at once.
    pub max_connections: usize,
    /// Size of the messages while a rail slows.
    pub flow_bytes: usize,
    /// What the rails carry together, where the user knows it better.
    pub limit_mbps: Option<f64>,
    /// Commands that let a rail fall and return.
    pub turns: Option<[String; 2]>,
    /// What the user calls the run.
    pub label: Option<String>,
    /// How long no rank may get anything done.
    pub timeout: Duration,
    /// Environment of single ranks, of both libraries.
    pub rank_env: Vec<RankEnv>,
    /// What the messages travel over.
    pub fabric: Wish,
    /// The verbs library that the user's environment names.
    pub verbs_library: Option<String>,
    /// Where the run is told as JSON.
    pub json: Option<Target>,
    /// The folder that pictures go to.
    pub plot: Option<PathBuf>,
    /// The launcher that started this process as one of the ranks, and where those meet.
    pub launched: Option<(World, Meeting)>,
}

impl Scenario {
    /// Connections come first: what the others leave in memory would be taken for theirs.
    const ALL: [Self; 6] =
        [Self::Connections, Self::Bandwidth, Self::Latency, Self::Rate, Self::Unequal, Self::Slowdown];

    /// Its name as in the command.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bandwidth => "bandwidth",
            Self::Latency => "latency",
            Self::Rate => "rate",
            Self::Connections => "connections",
            Self::Unequal => "unequal",
            Self::Slowdown => "slowdown",
        }
    }

    fn metrics(self) -> &'static [Metric] {
        match self {
            Self::Bandwidth | Self::Unequal | Self::Slowdown => &[Metric::Bandwidth],
            Self::Latency => &[Metric::P50, Metric::P99, Metric::Least],
            Self::Rate => &[Metric::Rate],
            Self::Connections => &[Metric::Bandwidth, Metric::Connect, Metric::SenderMemory, Metric::ReceiverMemory],
        }
    }
}

impl Plan {
    /// The sizes of a scenario, in bytes.
    pub fn sizes(&self, scenario: Scenario) -> Vec<usize> {
        let (least, most, factor) = match scenario {
            Scenario::Latency => (8, 1 << 20, 8),
            Scenario::Rate => return vec![8, 512, 4096],
            _ => (4 << 10, 16 << 20, 4),
        };
        // One end alone moves the other as far as it must.
        let (least, most) = match (self.min_bytes, self.max_bytes) {
            (Some(least), Some(most)) => (least, most),
            (Some(given), None) => (given, most.max(given)),
            (None, Some(given)) => (least.min(given), given),
            (None, None) => (least, most),
        };
        let mut sizes: Vec<_> = sizes::sweep(least, most, Step::Factor(self.step_factor.unwrap_or(factor))).collect();
        // The greatest is worth a look whether the steps meet it or not.
        if sizes.last().is_some_and(|last| *last < most) {
            sizes.push(most);
        }
        sizes
    }

    fn libraries(&self) -> Vec<(&'static str, &PathBuf, Option<u32>)> {
        let ours = ("ours", &self.plugin, self.abi);
        let theirs = self.against.as_ref().map(|library| ("theirs", library, self.against_abi));
        std::iter::once(ours).chain(theirs).collect()
    }

    /// Environment of the ranks of library `number`.
    fn environment(&self, number: usize) -> Vec<RankEnv> {
        let both = |(name, value): &(String, String)| {
            let env = |rank| RankEnv { rank, name: name.clone(), value: value.clone() };
            (0..RANKS).map(env).collect::<Vec<_>>()
        };
        let own: Vec<RankEnv> = if number == 1 { self.against_env.iter().flat_map(both).collect() } else { Vec::new() };
        // What comes last counts.
        self.rank_env.iter().cloned().chain(own).collect()
    }

    fn scenarios(&self, kind: Kind) -> Result<Vec<Scenario>> {
        let soft = kind == Kind::Soft;
        let all = Scenario::ALL.into_iter().filter(|scenario| match scenario {
            Scenario::Unequal => soft,
            Scenario::Slowdown => soft || self.turns.is_some(),
            _ => true,
        });
        let scenarios = if self.scenarios.is_empty() { all.collect() } else { self.scenarios.clone() };
        if scenarios.contains(&Scenario::Slowdown) && !soft && self.turns.is_none() {
            return Err(wrong(
                "slowdown on verbs needs --fall COMMAND and --return COMMAND, which slow a rail and undo it",
            ))?;
        }
        Ok(scenarios)
    }
}

/// Measures with ranks of `program`, the tables on standard output, or on standard error where the JSON goes to standard
/// output. True when all data was right. A process that a launcher meant to be rank 1 becomes that.
///
/// # Errors
/// When a rank fails or hangs, or the output cannot be written.
pub fn run(plan: &Plan, program: &Path) -> Result<bool> {
    if let Some((world, meeting)) = plan.launched.as_ref().filter(|(world, _)| world.rank > 0) {
        return become_ranks(plan, world, meeting, program).map(|()| true);
    }
    plan.plot.as_deref().map(plot::prepare).transpose()?;
    told::of_run(plan.json.as_ref(), Report::new(plan), |out, report| lead(plan, program, out, report))
}

/// A launched process is the rank of each library: all but the last are processes of it.
fn become_ranks(plan: &Plan, world: &World, meeting: &Meeting, program: &Path) -> Result<()> {
    let libraries = plan.libraries();
    for (number, (_, library, _)) in libraries.iter().enumerate() {
        let meeting = meeting_of(meeting, number)?;
        let rank = seats::rank_command(world, &meeting, library, &plan.environment(number), program)?;
        seats::become_or_start(rank, number + 1 == libraries.len())?;
    }
    Ok(())
}

/// The ranks of the second library meet at the port after that of the first.
fn meeting_of(meeting: &Meeting, number: usize) -> Result<Meeting> {
    let port = u16::try_from(number).ok().and_then(|number| meeting.port.checked_add(number));
    let port = port.context("the rendezvous needs a port after it for the other library: below 65535")?;
    Ok(Meeting { port, ..meeting.clone() })
}

fn lead(plan: &Plan, program: &Path, mut out: impl Write, report: &mut Report) -> Result<bool> {
    let fabric = fabric::set_up(&plan.fabric, RANKS, plan.verbs_library.as_deref())?;
    let scenarios = plan.scenarios(fabric.kind)?;
    report.fabric = if fabric.kind == Kind::Soft { "soft" } else { "verbs" };
    report.fabric_text.clone_from(&fabric.about);
    let watch = Watch::start(|| scenarios.len() as u64);
    let mut sides = start(plan, program, &fabric, &watch)?;
    let limits = limits(plan, &fabric, &sides);
    report.limit_gb_s = limits[0].gb_s();
    watch.aside(|| introduce(plan, &fabric, &sides, &mut out))?;
    let mut right = true;
    let outcome = scenarios.iter().try_for_each(|scenario| {
        watch.doing(scenario.name());
        right &= measure(*scenario, plan, &fabric, &mut sides, limits, &mut out, report, &watch)?;
        watch.step();
        anyhow::Ok(())
    });
    watch.end();
    report.sides = sides.iter().map(|side| report::SideReport::new(&side.about, plan)).collect();
    outcome?;
    for line in connected(&sides) {
        writeln!(out, "# {line}")?;
    }
    out.flush()?;
    sides.into_iter().try_for_each(Side::finish)?;
    Ok(right)
}

fn start(plan: &Plan, program: &Path, fabric: &Fabric, watch: &Watch) -> Result<Vec<Side>> {
    let mut sides = Vec::new();
    for (number, (name, library, abi_wanted)) in plan.libraries().into_iter().enumerate() {
        let environment = plan.environment(number);
        let seats: Vec<Seat> = match &plan.launched {
            Some((_, meeting)) => seats::with_guests(meeting_of(meeting, number)?, fabric, &environment)?,
            None => seats::all_here(RANKS, fabric, &environment),
        };
        let about = About {
            name,
            library: library.clone(),
            abi_wanted,
            abi: 0,
            networks: Vec::new(),
            whereabouts: Vec::new(),
            connections: Vec::new(),
        };
        sides.push(Side::start(program, about, seats, plan.timeout, watch.clone())?);
    }
    Ok(sides)
}

/// With all rails whole, and with the one fallen that falls.
fn limits(plan: &Plan, fabric: &Fabric, sides: &[Side]) -> [Limit; 2] {
    let fallen: Vec<(String, f64)> = fabric.first_rail().map(|rail| (rail.to_owned(), FALLEN)).into_iter().collect();
    let reported = || sides.first().and_then(|side| side.about.networks.first()).map(|network| network.speed_mbps);
    let of = |fallen: &[(String, f64)]| match fabric.wiring(fallen) {
        Some(wiring) => wiring.limit(),
        None => Limit { payload_mbps: reported().map(f64::from).filter(|mbps| *mbps > 0.0), latency_us: 0.0 },
    };
    let given = |limit: Limit| Limit { payload_mbps: plan.limit_mbps.or(limit.payload_mbps), ..limit };
    let after_fall = match fabric.kind {
        Kind::Soft => of(&fallen),
        // Only whoever slows the rail knows by how much.
        Kind::Verbs => return [given(of(&[])), Limit::default()],
    };
    [given(of(&[])), after_fall]
}

#[allow(clippy::too_many_arguments)]
fn measure(
    scenario: Scenario,
    plan: &Plan,
    fabric: &Fabric,
    sides: &mut [Side],
    limits: [Limit; 2],
    out: &mut impl Write,
    report: &mut Report,
    watch: &Watch,
) -> Result<bool> {
    let names: Vec<&'static str> = sides.iter().map(|side| side.about.name).collect();
    let (title, first) = describe(scenario, plan, fabric);
    let mut table = watch.aside(|| Table::start(out, &title, first, scenario.metrics(), &names))?;
    let mut points: Vec<Point> = Vec::new();
    let mut first_wrong: Vec<String> = Vec::new();
    let mut tell = |point: Point, wrong: Vec<String>| {
        watch.aside(|| {
            table.row(&point)?;
            wrong.iter().try_for_each(|line| table.remark(line))
        })?;
        points.push(point);
        first_wrong.extend(wrong);
        Ok(())
    };
    let mut courses: Vec<Course> = Vec::new();
    let [whole, fallen] = limits;
    let outcome = match scenario {
        Scenario::Bandwidth => scenario::bandwidth(plan, sides, whole, &mut tell),
        Scenario::Latency => scenario::latency(plan, sides, whole, &mut tell),
        Scenario::Rate => scenario::rate(plan, sides, whole, &mut tell),
        Scenario::Connections => scenario::connections(plan, sides, whole, &mut tell),
        Scenario::Unequal => unequal(plan, fabric, sides, limits, &mut tell),
        Scenario::Slowdown => {
            let mut turn = |what: Turn| turn(plan, fabric, what);
            let run = slowdown::run(plan, sides, [whole, fallen], &mut turn, &mut tell);
            run.map(|run| courses = run)
        }
    };
    let right = points.iter().flat_map(|point| point.wrong.iter().flatten()).all(|wrong| *wrong == 0);
    if let Some(folder) = &plan.plot {
        let label = plan.label.as_ref().map(|label| format!("{label}: ")).unwrap_or_default();
        let subject = plot::Subject { title: &format!("{label}{title}"), names: &names, limits };
        plot::write(folder, scenario, &subject, &points, &courses)?;
    }
    report.add(scenario, &names, &points, first_wrong, courses);
    outcome?;
    Ok(right)
}

fn unequal(
    plan: &Plan,
    fabric: &Fabric,
    sides: &mut [Side],
    [whole, fallen]: [Limit; 2],
    tell: &mut scenario::Tell<'_>,
) -> Result<()> {
    let Some(rail) = fabric.first_rail() else { return scenario::bandwidth(plan, sides, whole, tell) };
    fabric.slow(rail, FALLEN)?;
    scenario::bandwidth(plan, sides, fallen, tell)?;
    fabric.slow(rail, 1.0)
}

/// Lets a rail fall or return: by the user's command, else on the software fabric.
fn turn(plan: &Plan, fabric: &Fabric, what: Turn) -> Result<()> {
    match (&plan.turns, fabric.first_rail()) {
        (Some([fall, _]), _) if what == Turn::Fall => shell("--fall", fall, plan.timeout),
        (Some([_, back]), _) => shell("--return", back, plan.timeout),
        (None, Some(rail)) => fabric.slow(rail, if what == Turn::Fall { FALLEN } else { 1.0 }),
        (None, None) => bail!("no rail to slow"),
    }
}

fn shell(option: &str, command: &str, timeout: Duration) -> Result<()> {
    let mut process = Command::new("sh");
    // A group of its own ends as a whole.
    process.args(["-c", command]).stdin(Stdio::null()).stdout(Stdio::from(std::io::stderr())).process_group(0);
    let mut process = process.spawn().with_context(|| format!("{option} {command:?}"))?;
    let deadline = Instant::now() + timeout;
    loop {
        match process.try_wait().with_context(|| format!("{option} {command:?}"))? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => bail!("{option} {command:?} failed: {status}"),
            None if Instant::now() < deadline => std::thread::sleep(LOOK),
            None => {
                let group = i32::try_from(process.id()).map(Pid::from_raw);
                let _ = group.map(|group| signal::killpg(group, signal::Signal::SIGKILL));
                let _ = process.wait();
                bail!("{option} {command:?} did not end in {} s (--timeout)", timeout.as_secs());
            }
        }
    }
}

fn describe(scenario: Scenario, plan: &Plan, fabric: &Fabric) -> (String, &'static str) {
    let Plan { in_flight, channels, .. } = plan;
    let streams = format!("rank 0 to rank 1, {channels} connection(s), {in_flight} messages in flight on each");
    let rail = fabric.first_rail().unwrap_or("a rail");
    match scenario {
        Scenario::Bandwidth => (format!("bandwidth: {streams}"), "bytes"),
        Scenario::Latency => ("latency: half a round trip, one message at a time".to_owned(), "bytes"),
        Scenario::Rate => (format!("rate: {streams}"), "bytes"),
        Scenario::Connections => {
            let bytes = figures::size(plan.connection_bytes);
            (format!("connections: messages of {bytes}, {in_flight} in flight on each connection"), "connections")
        }
        Scenario::Unequal if fabric.kind == Kind::Soft => {
            (format!("unequal: bandwidth with {rail} at {FALLEN} of its rate; {streams}"), "bytes")
        }
        Scenario::Unequal => (format!("unequal: bandwidth over whatever rails there are; {streams}"), "bytes"),
        Scenario::Slowdown => {
            let bytes = figures::size(plan.flow_bytes);
            let what = match plan.turns {
                Some(_) => "by the commands given".to_owned(),
                None => format!("{rail} falls to {FALLEN} of its rate and returns"),
            };
            (format!("slowdown: {what}; messages of {bytes}; {streams}"), "phase")
        }
    }
}

fn introduce(plan: &Plan, fabric: &Fabric, sides: &[Side], out: &mut impl Write) -> Result<()> {
    writeln!(out, "# nccl-spark {}: messages over host memory from one rank to another", env!("CARGO_PKG_VERSION"))?;
    if let Some(label) = &plan.label {
        writeln!(out, "# label: {label}")?;
    }
    writeln!(out, "# fabric: {}", fabric.about)?;
    for side in sides {
        let About { name, library, abi, networks, whereabouts, .. } = &side.about;
        for (rank, (network, who)) in networks.iter().zip(whereabouts).enumerate() {
            let Network { name: network, device, speed_mbps, .. } = network;
            writeln!(
                out,
                "# {name}: rank {rank} {who} {}: network {network} (v{abi}), device {device}, {speed_mbps} Mb/s",
                library.display()
            )?;
        }
    }
    let ratio = if sides.len() == 2 { "; ratio: ours / theirs" } else { "" };
    writeln!(out, "# medians of {} round(s) of about {} s each{ratio}", plan.rounds, plan.seconds)?;
    Ok(out.flush()?)
}

fn connected(sides: &[Side]) -> Vec<String> {
    let mut lines = Vec::new();
    for About { name, networks, connections, .. } in sides.iter().map(|side| &side.about) {
        for (rank, (network, said)) in networks.iter().zip(connections).enumerate() {
            lines.extend(network.rails.iter().chain(said).map(|line| format!("{name}: rank {rank}: {line}")));
        }
    }
    lines
}
