//! `spark-lab bench`: measures a plugin with single messages between two ranks, in turns with
//! another plugin if there is one.
//!
//! Each library has a pair of rank processes (`pair`), with new processes in each round. While one
//! pair is measured, the other waits for orders on its socket. `scenario` and `slowdown` measure
//! round by round, `figures` sums the rounds up and compares them, `show` prints the results.

pub mod figures;
pub mod options;
pub mod scenario;
pub mod show;
pub mod slowdown;

use crate::pair::side::{About, LaunchConfig, Side};
use anyhow::{Context, Result, bail, ensure};
use figures::Point;
use nccl_tests_harness::fabric::limit::{self, Limit};
use nccl_tests_harness::fabric::{self, Fabric, Kind};
use nccl_tests_harness::lines;
use nccl_tests_harness::output::numbers::{count, significant, size};
use nccl_tests_harness::output::report;
use nccl_tests_harness::output::watch::Watch;
use nccl_tests_harness::ranks::device::Network;
use options::{CONNECTION_BYTES, Plan, RANKS, Scenario, Settings};
use serde::Serialize;
use show::PointTable;
use slowdown::Course;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Fraction of its rate that a slowed rail has.
const SLOWED: f64 = 0.25;

/// A measurement as JSON. Every number has its unit in its name.
#[derive(Debug, Default, Serialize)]
struct Report<'a> {
    command: &'static str,
    version: &'static str,
    settings: Option<&'a Settings>,
    /// `soft` or `verbs`.
    fabric: &'static str,
    fabric_text: String,
    /// Payload that all rails together can carry in one direction; null if unknown.
    limit_gb_s: Option<f64>,
    limit_text: String,
    sides: Vec<About>,
    scenarios: Vec<Measured>,
}

#[derive(Debug, Serialize)]
struct Measured {
    name: Scenario,
    /// One for each size, number of connections, or phase.
    points: Vec<Point>,
    /// In scenario slowdown, the bandwidth of each run, window by window.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    courses: Vec<Course>,
}

/// Measures with ranks of `program`. The tables go to standard output, or to standard error if the
/// JSON goes to standard output. Returns true if all data was right.
pub fn run(plan: &Plan, program: &Path) -> Result<bool> {
    let version = env!("CARGO_PKG_VERSION");
    let report = Report { command: "bench", version, settings: Some(&plan.settings), ..Report::default() };
    report::of_run(plan.json.as_ref(), report, |out, report| lead(plan, program, out, report))
}

fn lead(plan: &Plan, program: &Path, out: impl Write, report: &mut Report<'_>) -> Result<bool> {
    let fabric = fabric::set_up(&plan.fabric, RANKS, plan.verbs_library.as_deref())?;
    let scenarios = plan.scenarios(fabric.kind)?;
    report.fabric = if fabric.kind == Kind::Soft { "soft" } else { "verbs" };
    report.fabric_text.clone_from(&fabric.about);
    let watch = Watch::start("scenarios", || scenarios.len() as u64);
    let mut out = watch.over(out);
    let mut sides = Vec::new();
    for (name, library) in &plan.libraries {
        let (rank_env, timeout, watch) = (plan.settings.environment(name), plan.timeout, watch.clone());
        let start = LaunchConfig { program, fabric: &fabric, rank_env, timeout, watch };
        sides.push(Side::start(name, library.clone(), plan.settings.abi, start)?);
    }
    let (limits, limit_text) = limits(plan, &fabric, &sides);
    introduce(plan, &fabric, &sides, &limit_text, &mut out)?;
    (report.limit_gb_s, report.limit_text) = (limits[0].gb_s(), limit_text);
    let outcome = scenarios.into_iter().try_for_each(|scenario| {
        measure(scenario, plan, &fabric, &mut sides, limits, &mut out, report)?;
        watch.step();
        anyhow::Ok(())
    });
    watch.end();
    report.sides = sides.iter().map(|side| side.about.clone()).collect();
    outcome?;
    for About { name, networks, connections, .. } in &report.sides {
        for (rank, (network, said)) in networks.iter().zip(connections).enumerate() {
            for line in network.rails.iter().chain(said) {
                writeln!(out, "# {name}: rank {rank}: {line}")?;
            }
        }
    }
    out.flush()?;
    sides.into_iter().try_for_each(Side::finish)?;
    let mut points = report.scenarios.iter().flat_map(|scenario| &scenario.points);
    Ok(points.all(|point| point.wrong.iter().flatten().all(|wrong| wrong.bytes == 0)))
}

/// Returns two limits, the first with all rails at full rate, the second with one rail slowed. Also
/// returns the first limit in words.
fn limits(plan: &Plan, fabric: &Fabric, sides: &[Side<'_>]) -> ([Limit; 2], String) {
    let slowed: Vec<(String, f64)> = fabric.rails().take(1).map(|rail| (rail.to_owned(), SLOWED)).collect();
    let whole = fabric.limit(&[]).map(|limit| (limit, "the profile's links and cables".to_owned()));
    let (whole, source) = whole.unwrap_or_else(|| limit_of_ports(sides));
    let wanted = plan.settings.limit_mbps;
    let given = |limit: Limit| Limit { payload_mbps: wanted.or(limit.payload_mbps), ..limit };
    // Unknown on verbs: there the user's command slows the rail by a factor that is not known here.
    let slow = fabric.limit(&slowed).map(given).unwrap_or_default();
    let source = if wanted.is_some() { "--limit-mbps".to_owned() } else { source };
    let text = match given(whole).gb_s() {
        Some(gb_s) => format!("{} GB/s of payload, headers not counted ({source})", significant(gb_s)),
        None => "none known".to_owned(),
    };
    ([given(whole), slow], text)
}

/// If the plugin reports the speed that a survey of this machine finds, returns the payload limit
/// of the machine's ports and PCIe links. Otherwise returns the payload limit of a port with the
/// speed that the plugin reports.
fn limit_of_ports(sides: &[Side<'_>]) -> (Limit, String) {
    let network = sides.first().and_then(|side| side.about.networks.first());
    let Some(speed_mbps) = network.map(|network| network.speed_mbps).filter(|mbps| *mbps > 0) else {
        return (Limit::default(), String::new());
    };
    // Without a survey, only the plugin's speed is known.
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
    sides: &mut [Side<'_>],
    limits: [Limit; 2],
    out: &mut impl Write,
    report: &mut Report<'_>,
) -> Result<()> {
    let names: Vec<&'static str> = sides.iter().map(|side| side.about.name).collect();
    let mut table = PointTable::start(out, &describe(scenario, plan, fabric), scenario, &names)?;
    let (mut points, mut courses) = (Vec::new(), Vec::new());
    let mut tell = |point: Point| {
        table.row(&point)?;
        points.push(point);
        Ok(())
    };
    let [whole, slowed] = limits;
    let outcome = match (scenario, fabric.rails().next()) {
        (Scenario::Connections, _) => scenario::connections(plan, sides, whole, &mut tell),
        (Scenario::Unequal, Some(rail)) => fabric
            .slow(rail, SLOWED)
            .and_then(|()| scenario::by_size(plan, scenario, sides, slowed, &mut tell))
            .and_then(|()| fabric.slow(rail, 1.0)),
        (Scenario::Slowdown, _) => {
            let mut slow = |is_slow: bool| slow(plan, fabric, is_slow);
            slowdown::run(plan, sides, limits, &mut slow, &mut tell).map(|run| courses = run)
        }
        _ => scenario::by_size(plan, scenario, sides, whole, &mut tell),
    };
    report.scenarios.push(Measured { name: scenario, points, courses });
    outcome
}

/// Slows or restores a rail, by the user's command or else on the software fabric.
fn slow(plan: &Plan, fabric: &Fabric, is_slow: bool) -> Result<()> {
    let Settings { fall, restore, .. } = &plan.settings;
    let (option, command) = if is_slow { ("--fall", fall) } else { ("--return", restore) };
    match (command, fabric.rails().next()) {
        (Some(command), _) => shell(option, command, plan.timeout),
        (None, Some(rail)) => fabric.slow(rail, if is_slow { SLOWED } else { 1.0 }),
        (None, None) => bail!("no rail to slow"),
    }
}

fn shell(option: &str, command: &str, timeout: Duration) -> Result<()> {
    let mut process = Command::new("sh");
    process.args(["-c", command]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = [process.spawn().with_context(|| format!("{option} {command:?}"))?];
    let on_line = |_, line: &str| Ok(writeln!(std::io::stderr(), "{line}")?);
    match lines::follow(&mut process, Vec::new(), timeout, on_line)? {
        Some(statuses) => {
            ensure!(statuses[0].success(), "{option} {command:?} failed: {}", statuses[0]);
            Ok(())
        }
        None => bail!("{option} {command:?} did not end in {} s (--timeout)", timeout.as_secs()),
    }
}

fn describe(scenario: Scenario, plan: &Plan, fabric: &Fabric) -> String {
    let Settings { in_flight, slowdown_bytes, fall, .. } = &plan.settings;
    let connections = count(plan.settings.channels(), "connection");
    let streams = format!("{connections}, {} in flight on each", count(*in_flight, "message"));
    match (scenario, fabric.rails().next()) {
        (Scenario::Bandwidth, _) => format!("bandwidth: {streams}"),
        (Scenario::Latency, _) => "latency: half a round trip, one message at a time".to_owned(),
        (Scenario::Rate, _) => format!("rate: small messages per second; {streams}"),
        (Scenario::Connections, _) => {
            format!("connections: messages of {}, {in_flight} in flight on each connection", size(CONNECTION_BYTES))
        }
        (Scenario::Unequal, Some(rail)) => {
            format!("unequal: bandwidth with rail {rail} at {SLOWED} of its rate; {streams}")
        }
        (Scenario::Unequal, None) => format!("unequal: bandwidth over the rails as they are; {streams}"),
        (Scenario::Slowdown, Some(rail)) if fall.is_none() => {
            let bytes = size(*slowdown_bytes);
            format!("slowdown: rail {rail} is slowed to {SLOWED} of its rate and restored; messages of {bytes}")
        }
        (Scenario::Slowdown, _) => {
            let bytes = size(*slowdown_bytes);
            format!("slowdown: a rail is slowed and restored by --fall and --return; messages of {bytes}")
        }
    }
}

fn introduce(plan: &Plan, fabric: &Fabric, sides: &[Side<'_>], limit: &str, out: &mut impl Write) -> Result<()> {
    writeln!(out, "# spark-lab {}: messages over host memory from rank 0 to rank 1", env!("CARGO_PKG_VERSION"))?;
    writeln!(out, "# fabric: {}", fabric.about)?;
    for side in sides {
        let About { name, library, abi, networks, pids, .. } = &side.about;
        let (library, abi) = (library.display(), abi.unwrap_or_default());
        for (rank, (network, who)) in networks.iter().zip(pids).enumerate() {
            let Network { name: network, device, speed_mbps, .. } = network;
            writeln!(
                out,
                "# {name}: rank {rank} {who} {library}: network {network} (v{abi}), device {device}, {speed_mbps} Mb/s"
            )?;
        }
    }
    writeln!(out, "# limit: {limit}")?;
    let (rounds, seconds) = (count(plan.settings.rounds as usize, "round"), plan.settings.seconds);
    writeln!(out, "# medians of {rounds}, each a run of about {seconds} s in new processes (longer if unsteady)")?;
    if sides.len() == 2 {
        writeln!(out, "# ratio: ours / theirs; ~: the ranges of the rounds overlap, which is no difference")?;
    }
    Ok(out.flush()?)
}
