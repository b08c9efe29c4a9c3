//! `spark-lab bench`: measures a plugin with single messages between two ranks, in turns with
//! another plugin if there is one.
//!
//! Each library has a pair of rank processes (`pair`). The pair that is not measured waits on the
//! socket to the command. Each round has new processes. `scenario` and `slowdown` measure round by
//! round, `figures` sums the rounds up and compares them, `show`, `report` and `charts` show the
//! results.

pub mod charts;
pub mod figures;
pub mod options;
pub mod plan;
pub mod report;
pub mod scenario;
pub mod show;
pub mod slowdown;

use crate::pair::rank::Pair;
use crate::pair::side::{About, Side, Turn};
use anyhow::{Context, Result, bail};
use figures::Point;
use nccl_tests_harness::fabric::limit::{self, Limit};
use nccl_tests_harness::fabric::{self, Fabric, Kind};
use nccl_tests_harness::output::numbers::{count, significant, size};
use nccl_tests_harness::output::plot;
use nccl_tests_harness::output::report as told;
use nccl_tests_harness::output::watch::Watch;
use nccl_tests_harness::ranks::device::Network;
use nccl_tests_harness::ranks::job::Seat;
use nccl_tests_harness::ranks::launch::World;
use nccl_tests_harness::ranks::rendezvous::Meeting;
use nccl_tests_harness::ranks::seats;
use nix::sys::signal;
use nix::unistd::Pid;
use plan::{Plan, RANKS, Scenario, Settings};
use report::Report;
use show::PointTable;
use slowdown::Course;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The part of its rate that a slowed rail has.
const SLOWED: f64 = 0.25;
/// Interval at which a user's command is polled.
const LOOK: Duration = Duration::from_millis(1);

/// Measures with ranks of `program`, the tables on standard output, or on standard error where the JSON goes to standard
/// output. True when all data was right. A process that a launcher started as rank 1 becomes that rank.
///
/// # Errors
/// A rank that fails or hangs, or an output that cannot be written.
pub fn run(plan: &Plan, program: &Path) -> Result<bool> {
    if let Some((world, meeting)) = plan.launched.as_ref().filter(|(world, _)| world.rank > 0) {
        return become_ranks(plan, world, meeting, program).map(|()| true);
    }
    plan.plot.as_deref().map(plot::prepare).transpose()?;
    told::of_run(plan.json.as_ref(), Report::new(plan), |out, report| lead(plan, program, out, report))
}

/// A launched process is the rank of each library: the last one itself, the others as its child processes.
fn become_ranks(plan: &Plan, world: &World, meeting: &Meeting, program: &Path) -> Result<()> {
    let libraries = plan.libraries();
    for (number, (_, library, _)) in libraries.iter().enumerate() {
        let meeting = meeting_of(meeting, number)?;
        let mut rank = seats::rank_command::<Pair>(world, &meeting, library, &plan.environment(number), program)?;
        if number + 1 == libraries.len() {
            return seats::become_rank(rank);
        }
        rank.spawn().with_context(|| format!("start {}", program.display()))?;
    }
    Ok(())
}

/// The ranks of the second library meet at the port after that of the first.
fn meeting_of(meeting: &Meeting, number: usize) -> Result<Meeting> {
    let port = u16::try_from(number).ok().and_then(|number| meeting.port.checked_add(number));
    let port = port.context("the rendezvous needs a port after it for the other library: below 65535")?;
    Ok(Meeting { port, ..meeting.clone() })
}

fn lead(plan: &Plan, program: &Path, out: impl Write, report: &mut Report) -> Result<bool> {
    let fabric = fabric::set_up(&plan.fabric, RANKS, plan.verbs_library.as_deref())?;
    let scenarios = plan.scenarios(fabric.kind)?;
    report.fabric = if fabric.kind == Kind::Soft { "soft" } else { "verbs" };
    report.fabric_text.clone_from(&fabric.about);
    let watch = Watch::start("scenarios", || scenarios.len() as u64);
    let mut out = watch.over(out);
    let mut sides = start(plan, program, &fabric, &watch)?;
    let (limits, limit_text) = limits(plan, &fabric, &sides);
    (report.limit_gb_s, report.limit_text) = (limits[0].gb_s(), limit_text.clone());
    introduce(plan, &fabric, &sides, &limit_text, &mut out)?;
    let mut right = true;
    let outcome = scenarios.iter().try_for_each(|scenario| {
        right &= measure(*scenario, plan, &fabric, &mut sides, limits, &mut out, report)?;
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

/// The limits with all rails at full rate and with one rail slowed, and where the first comes from.
fn limits(plan: &Plan, fabric: &Fabric, sides: &[Side]) -> ([Limit; 2], String) {
    let slowed: Vec<(String, f64)> = fabric.first_rail().map(|rail| (rail.to_owned(), SLOWED)).into_iter().collect();
    let (whole, source) = match fabric.wiring(&[]) {
        Some(wiring) => (wiring.limit(), "the profile's links and cables".to_owned()),
        None => limit_of_ports(sides),
    };
    let given = |limit: Limit| Limit { payload_mbps: plan.limit_mbps.or(limit.payload_mbps), ..limit };
    let slow = match fabric.wiring(&slowed) {
        Some(wiring) => given(wiring.limit()),
        // The user's command slows the rail, by a factor that is not known here.
        None => Limit::default(),
    };
    let source = if plan.limit_mbps.is_some() { "--limit-mbps".to_owned() } else { source };
    let text = match given(whole).gb_s() {
        Some(gb_s) => format!("{} GB/s of payload, headers not counted ({source})", significant(gb_s)),
        None => "none known".to_owned(),
    };
    ([given(whole), slow], text)
}

/// The payload limit of this machine's ports and PCIe links, where those are what the plugin reports, or else of the speed that
/// it reports.
fn limit_of_ports(sides: &[Side]) -> (Limit, String) {
    let network = sides.first().and_then(|side| side.about.networks.first());
    let Some(speed_mbps) = network.map(|network| network.speed_mbps).filter(|mbps| *mbps > 0) else {
        return (Limit::default(), String::new());
    };
    // A machine that cannot be surveyed has the plugin's word alone.
    let survey = nccl_net_spark::plugin::survey().ok();
    let survey = survey.filter(|survey| i64::from(survey.speed_mbps) == i64::from(speed_mbps));
    let (payload_mbps, source) = match survey {
        Some(survey) => (f64::from(survey.payload().mbps), "ports and PCIe links of this machine".to_owned()),
        None => (limit::payload_of_port(f64::from(speed_mbps)), format!("from {speed_mbps} Mb/s with headers")),
    };
    (Limit { payload_mbps: Some(payload_mbps), latency_us: 0.0 }, source)
}

fn measure(
    scenario: Scenario,
    plan: &Plan,
    fabric: &Fabric,
    sides: &mut [Side],
    limits: [Limit; 2],
    out: &mut impl Write,
    report: &mut Report,
) -> Result<bool> {
    let names: Vec<&'static str> = sides.iter().map(|side| side.about.name).collect();
    let title = describe(scenario, plan, fabric);
    let mut table = PointTable::start(out, &title, scenario.places(), scenario.metrics(), &names)?;
    let mut points: Vec<Point> = Vec::new();
    let mut first_wrong: Vec<String> = Vec::new();
    let mut tell = |point: Point, wrong: Vec<String>| {
        table.row(&point)?;
        wrong.iter().try_for_each(|line| table.remark(line))?;
        points.push(point);
        first_wrong.extend(wrong);
        Ok(())
    };
    let mut courses: Vec<Course> = Vec::new();
    let [whole, slowed] = limits;
    let outcome = match scenario {
        Scenario::Bandwidth => scenario::bandwidth(plan, sides, whole, &mut tell),
        Scenario::Latency => scenario::latency(plan, sides, whole, &mut tell),
        Scenario::Rate => scenario::rate(plan, sides, whole, &mut tell),
        Scenario::Connections => scenario::connections(plan, sides, whole, &mut tell),
        Scenario::Unequal => unequal(plan, fabric, sides, limits, &mut tell),
        Scenario::Slowdown => {
            let mut turn = |what: Turn| turn(plan, fabric, what);
            let run = slowdown::run(plan, sides, [whole, slowed], &mut turn, &mut tell);
            run.map(|run| courses = run)
        }
    };
    let right = points.iter().flat_map(|point| point.wrong.iter().flatten()).all(|wrong| *wrong == 0);
    if let Some(folder) = &plan.plot {
        let label = plan.label.as_ref().map(|label| format!("{label}: ")).unwrap_or_default();
        let (title, caption) = (format!("{label}{title}"), caption(plan, fabric, sides));
        let subject =
            charts::Subject { title: &title, caption: &caption, rounds: plan.settings.rounds, names: &names, limits };
        charts::write(folder, scenario, &subject, &points, &courses)?;
    }
    report.add(scenario, &names, &points, first_wrong, courses);
    outcome?;
    Ok(right)
}

fn unequal(
    plan: &Plan,
    fabric: &Fabric,
    sides: &mut [Side],
    [whole, slowed]: [Limit; 2],
    tell: &mut scenario::Tell<'_>,
) -> Result<()> {
    let Some(rail) = fabric.first_rail() else { return scenario::bandwidth(plan, sides, whole, tell) };
    fabric.slow(rail, SLOWED)?;
    scenario::bandwidth(plan, sides, slowed, tell)?;
    fabric.slow(rail, 1.0)
}

/// Slows a rail or restores it: by the user's command, else on the software fabric.
fn turn(plan: &Plan, fabric: &Fabric, what: Turn) -> Result<()> {
    match (&plan.settings.turns, fabric.first_rail()) {
        (Some([fall, _]), _) if what == Turn::Fall => shell("--fall", fall, plan.timeout),
        (Some([_, back]), _) => shell("--return", back, plan.timeout),
        (None, Some(rail)) => fabric.slow(rail, if what == Turn::Fall { SLOWED } else { 1.0 }),
        (None, None) => bail!("no rail to slow"),
    }
}

fn shell(option: &str, command: &str, timeout: Duration) -> Result<()> {
    let mut process = Command::new("sh");
    // A process group of its own, which can be killed as a whole.
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

/// The title of a scenario's table and chart.
fn describe(scenario: Scenario, plan: &Plan, fabric: &Fabric) -> String {
    let Settings { in_flight, channels, .. } = &plan.settings;
    let streams = format!("{}, {} in flight", count(*channels, "connection"), count(*in_flight, "message"));
    let rail = fabric.first_rail().unwrap_or("a rail");
    match scenario {
        Scenario::Bandwidth => format!("bandwidth: {streams} on each"),
        Scenario::Latency => "latency: half a round trip, one message at a time".to_owned(),
        Scenario::Rate => format!("rate: small messages per second; {streams} on each"),
        Scenario::Connections => {
            let bytes = size(plan.settings.connection_bytes);
            format!("connections: messages of {bytes}, {in_flight} in flight on each connection")
        }
        Scenario::Unequal if fabric.kind == Kind::Soft => {
            format!("unequal: bandwidth with rail {rail} at {SLOWED} of its rate; {streams}")
        }
        Scenario::Unequal => format!("unequal: bandwidth over the rails as they are; {streams}"),
        Scenario::Slowdown => {
            let bytes = size(plan.settings.flow_bytes);
            let what = match plan.settings.turns {
                Some(_) => "a rail is slowed and restored by --fall and --return".to_owned(),
                None => format!("rail {rail} is slowed to {SLOWED} of its rate and restored"),
            };
            format!("slowdown: {what}; messages of {bytes}")
        }
    }
}

/// Source of a chart's figures: the fabric or the device, and the rates.
fn caption(plan: &Plan, fabric: &Fabric, sides: &[Side]) -> String {
    let device = sides.first().and_then(|side| Some(side.about.networks.first()?.device.clone())).unwrap_or_default();
    match fabric.kind {
        Kind::Soft if plan.fabric.scale == 1.0 => {
            format!("software fabric, profile {}, full rate", plan.fabric.profile)
        }
        Kind::Soft => format!("software fabric, profile {}, rates x {}", plan.fabric.profile, plan.fabric.scale),
        Kind::Verbs => match &plan.verbs_library {
            Some(library) => format!("device {device} of NCCL_IBVERBS_LIB={library}"),
            None => format!("RDMA device {device}"),
        },
    }
}

fn introduce(plan: &Plan, fabric: &Fabric, sides: &[Side], limit: &str, out: &mut impl Write) -> Result<()> {
    writeln!(out, "# spark-lab {}: messages over host memory from rank 0 to rank 1", env!("CARGO_PKG_VERSION"))?;
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
    writeln!(out, "# limit: {limit}")?;
    let rounds = count(plan.settings.rounds as usize, "round");
    let seconds = plan.settings.seconds;
    let renewed = if plan.launched.is_some() { "over new connections" } else { "in new processes" };
    writeln!(out, "# medians of {rounds}, each a run of about {seconds} s {renewed} (longer if unsteady)")?;
    if sides.len() == 2 {
        writeln!(out, "# ratio: ours / theirs; ~: the ranges of the rounds overlap, which is no difference")?;
    }
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
