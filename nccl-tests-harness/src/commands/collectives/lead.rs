//! A run from the command's side: starts the ranks, has them measure each size, prints the table.

use super::Collective;
use super::messages::{Answer, Measurement, Order, Setup};
use super::rank::Collectives;
use super::report::Report;
use super::table::{self, CollectiveTable, Row};
use crate::fabric::{self, Fabric, Kind, Wish};
use crate::output::report::{self, Target};
use crate::output::watch::Watch;
use crate::ranks::control::answer;
use crate::ranks::device::Network;
use crate::ranks::job::{Job, RankEnv};
use crate::ranks::launch::World;
use crate::ranks::rendezvous::Meeting;
use crate::ranks::seats;
use crate::sizes::{self, Step};
use anyhow::Result;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What to run, checked.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Which collective.
    pub collective: Collective,
    /// How many ranks (2 or more).
    pub ranks: usize,
    /// Connections from each rank to each that it sends to (1 or more).
    pub channels: usize,
    /// The plugin's library.
    pub plugin: PathBuf,
    /// The first size in bytes; at least one byte for each rank's part.
    pub min_bytes: usize,
    /// The largest size in bytes.
    pub max_bytes: usize,
    /// From one size to the next.
    pub step: Step,
    /// Iterations before the timed ones.
    pub warmup_iters: u32,
    /// Timed iterations (1 or more).
    pub iters: u32,
    /// Checked iterations after the timed ones; 0: no checks.
    pub check_iters: u32,
    /// How long a run may make no progress.
    pub timeout: Duration,
    /// Environment of single ranks.
    pub rank_env: Vec<RankEnv>,
    /// The fabric asked for.
    pub fabric: Wish,
    /// The verbs library that the user's environment names.
    pub verbs_library: Option<String>,
    /// Shows the percentiles of the times in the table too.
    pub shows_percentiles: bool,
    /// Where the JSON goes.
    pub json: Option<Target>,
    /// The launcher that started this process as one of the ranks, and where those meet.
    pub launched: Option<(World, Meeting)>,
}

/// Runs it with ranks of `program`, the table on standard output, or on standard error where the JSON goes to standard
/// output. True when all data was right. A process that a launcher started as another rank than 0 becomes that rank.
///
/// # Errors
/// When a rank fails or hangs, or the output cannot be written.
pub fn run(plan: &Plan, program: &Path) -> Result<bool> {
    if let Some((world, meeting)) = plan.launched.as_ref().filter(|(world, _)| world.rank > 0) {
        let rank = seats::rank_command::<Collectives>(world, meeting, &plan.plugin, &plan.rank_env, program)?;
        return seats::become_or_start(rank, true).map(|()| true);
    }
    let sizes = || sizes::sweep(plan.min_bytes, plan.max_bytes, plan.step).count() as u64;
    let watch = Watch::start("sizes", sizes);
    report::of_run(plan.json.as_ref(), blank(plan), |out, report| lead(plan, program, &watch, out, report))
}

/// Leads one run: the table goes to `out`, the figures into `report`. True when all data was right.
pub fn lead(plan: &Plan, program: &Path, watch: &Watch, out: impl Write, report: &mut Report) -> Result<bool> {
    let mut out = watch.over(out);
    let fabric = fabric::set_up(&plan.fabric, plan.ranks, plan.verbs_library.as_deref())?;
    report.fabric = if fabric.kind == Kind::Soft { "soft" } else { "verbs" };
    report.fabric_text.clone_from(&fabric.about);
    introduce(plan, &fabric, &mut out)?;
    let seats = match &plan.launched {
        Some((_, meeting)) => seats::with_guests(meeting.clone(), &fabric, &plan.rank_env)?,
        None => seats::all_here(plan.ranks, &fabric, &plan.rank_env),
    };
    let sizes = || sizes::sweep(plan.min_bytes, plan.max_bytes, plan.step);
    let mut job = Job::start(program, seats, plan.timeout, watch.clone())?;
    let outcome = connect(plan, &mut job, report).and_then(|()| {
        list_ranks(&job, report, &mut out)?;
        let mut table = CollectiveTable::start(out, plan.collective, plan.shows_percentiles)?;
        for size_bytes in sizes() {
            measure(plan, size_bytes, &mut job, &mut table, report)?;
            watch.step();
        }
        Ok(table)
    });
    watch.end();
    let mut table = outcome?;
    job.finish()?;
    let right = table.finish()?;
    for line in describe(&report.networks, &report.connections, plan.fabric.scale) {
        table.remark(&line)?;
    }
    Ok(right)
}

/// Starts the plugin in all ranks, and connects them.
fn connect(plan: &Plan, job: &mut Job<Collectives>, report: &mut Report) -> Result<()> {
    let listening = job.ask(
        |rank| Order::Setup(setup(plan, rank)),
        answer!(Answer::Listening { network, handles } => (network, handles)),
    )?;
    let (networks, handles): (Vec<Network>, Vec<Vec<Vec<u8>>>) = listening.into_iter().unzip();
    report.networks = networks;
    report.connections = job.ask(
        |rank| Order::Connect { handles: handles_for(plan, rank, &handles) },
        answer!(Answer::Connected { lines } => lines),
    )?;
    Ok(())
}

fn list_ranks(job: &Job<Collectives>, report: &Report, out: &mut impl Write) -> Result<()> {
    for (rank, (who, network)) in job.whereabouts().zip(&report.networks).enumerate() {
        writeln!(out, "#  Rank {rank:>2} {who} network {} device {}", network.name, network.device)?;
    }
    Ok(())
}

/// One size: a row of the table.
fn measure(
    plan: &Plan,
    size_bytes: usize,
    job: &mut Job<Collectives>,
    table: &mut CollectiveTable<impl Write>,
    report: &mut Report,
) -> Result<()> {
    let count = plan.collective.count(size_bytes, plan.ranks);
    job.ask(|_| Order::Prepare { count }, |answer| matches!(answer, Answer::Ready).then_some(()))?;
    let measured = job.ask(|_| Order::Go, answer!(Answer::Measured(measurement) => measurement))?;
    let row = row(plan, count, &measured);
    let wrong = measured.iter().enumerate().filter_map(|(rank, one)| Some((rank, one.first_wrong.as_ref()?)));
    let wrong: Vec<String> = wrong.map(|(rank, wrong)| format!("rank {rank}: {wrong}")).collect();
    table.row(&row)?;
    wrong.iter().try_for_each(|line| table.remark(line))?;
    report.add(row, wrong);
    Ok(())
}

/// A report without figures.
pub fn blank(plan: &Plan) -> Report {
    Report {
        version: env!("CARGO_PKG_VERSION"),
        collective: plan.collective.name(),
        ranks: plan.ranks,
        channels: plan.channels,
        element: table::ELEMENT,
        operation: plan.collective.operation(),
        root: plan.collective.root(),
        in_place: plan.collective.in_place(),
        warmup_iters: plan.warmup_iters,
        iters: plan.iters,
        check_iters: plan.check_iters,
        ..Report::default()
    }
}

/// The handles of the ranks that each link goes to. Where a rank has given too few, they are missing, which is that rank's error.
fn handles_for(plan: &Plan, rank: usize, handles: &[Vec<Vec<u8>>]) -> Vec<Vec<u8>> {
    let links = plan.collective.links(rank, plan.ranks, plan.channels);
    links.iter().enumerate().filter_map(|(index, link)| handles[link.to].get(index).cloned()).collect()
}

fn introduce(plan: &Plan, fabric: &Fabric, out: &mut impl Write) -> Result<()> {
    let Plan { collective, ranks, channels, min_bytes, max_bytes, warmup_iters, iters, check_iters, .. } = plan;
    let (step, unit) = match plan.step {
        Step::Factor(factor) => (factor, "factor"),
        Step::Bytes(bytes) => (bytes, "bytes"),
    };
    writeln!(out, "# nccl-spark {}: {} over host memory", env!("CARGO_PKG_VERSION"), collective.name())?;
    writeln!(
        out,
        "# nRanks {ranks} nChannels {channels} minBytes {min_bytes} maxBytes {max_bytes} step: {step}({unit}) \
         warmup iters: {warmup_iters} iters: {iters} validation: {check_iters}"
    )?;
    writeln!(out, "# fabric: {}", fabric.about)?;
    writeln!(out, "#")?;
    match &plan.launched {
        Some((World { launcher, .. }, Meeting { host, port, .. })) => {
            writeln!(out, "# Using ranks that {launcher} started, which meet at {host}:{port}")?;
        }
        None => writeln!(out, "# Using ranks on this machine")?,
    }
    Ok(out.flush()?)
}

fn setup(plan: &Plan, rank: usize) -> Setup {
    Setup {
        rank,
        ranks: plan.ranks,
        collective: plan.collective,
        channels: plan.channels,
        plugin: plan.plugin.clone(),
        job: u64::from(std::process::id()),
        max_count: plan.collective.count(plan.max_bytes, plan.ranks),
        warmup_iters: plan.warmup_iters,
        iters: plan.iters,
        check_iters: plan.check_iters,
    }
}

/// As in nccl-tests, the mean of the ranks' times and the sum of their wrong elements. Other times
/// are the longest of any rank.
fn row(plan: &Plan, count: usize, measured: &[Measurement]) -> Row {
    let mean = measured.iter().map(|one| one.seconds).sum::<f64>() / measured.len() as f64;
    let seconds = mean / f64::from(plan.iters);
    let longest_us = |of: fn(&Measurement) -> f64| measured.iter().map(|one| of(one) * 1e6).fold(0.0, f64::max);
    Row {
        size_bytes: plan.collective.size_bytes(count, plan.ranks),
        count,
        time_us: seconds * 1e6,
        bandwidth: plan.collective.bandwidth(count, plan.ranks, seconds),
        time_p50_us: longest_us(|one| one.p50_s),
        time_p99_us: longest_us(|one| one.p99_s),
        longest_pause_us: longest_us(|one| one.longest_pause_s),
        wrong: measured.iter().map(|one| one.wrong).sum(),
    }
}

/// The network as NCCL would see it, once where all ranks see the same; and the connections.
fn describe(networks: &[Network], connections: &[Vec<String>], scale: f64) -> Vec<String> {
    let slowed =
        if scale < 1.0 { format!(" (unscaled: --scale {scale} slows the fabric alone)") } else { String::new() };
    let same = networks.iter().all(|network| network == &networks[0]);
    let shown = if same { &networks[..1] } else { networks };
    let mut lines = Vec::new();
    for (rank, network) in shown.iter().enumerate() {
        let who = if same { "every rank".to_owned() } else { format!("rank {rank}") };
        let Network { name, device, devices, speed_mbps, .. } = network;
        lines.push(format!(
            "On {who} NCCL would see network {name}, device {device} (1 of {devices}), {speed_mbps} Mb/s{slowed}"
        ));
        lines.extend(network.rails.iter().map(|line| format!("{who}: {line}")));
    }
    for (rank, said) in connections.iter().enumerate() {
        lines.extend(said.iter().map(|line| format!("rank {rank}: {line}")));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measurement(seconds: f64, wrong: Option<u64>) -> Measurement {
        let (p50_s, p99_s, longest_pause_s) = (seconds / 20.0, seconds / 5.0, seconds / 2.0);
        Measurement { seconds, p50_s, p99_s, longest_pause_s, wrong, first_wrong: None }
    }

    fn plan() -> Plan {
        Plan {
            collective: Collective::AllGather,
            ranks: 2,
            channels: 1,
            plugin: PathBuf::new(),
            min_bytes: 8,
            max_bytes: 8,
            step: Step::Factor(2),
            warmup_iters: 0,
            iters: 10,
            check_iters: 1,
            timeout: Duration::from_secs(1),
            rank_env: Vec::new(),
            fabric: Wish {
                kind: None,
                profile: String::new(),
                nic: Default::default(),
                scale: 1.0,
                slow_rails: Vec::new(),
                path_faults: Vec::new(),
                library: PathBuf::new(),
                name: None,
            },
            verbs_library: None,
            shows_percentiles: false,
            json: None,
            launched: None,
        }
    }

    /// Hand figures: 10 iterations in 1 ms and in 3 ms are 200 us each on average; 2 x 4 MB in that
    /// are 40 GB/s. The slower rank's median and 99th percentile are 150 and 600 us.
    #[test]
    fn a_row_averages_times_and_adds_up_wrong_bytes() {
        let row = row(&plan(), 4_000_000, &[measurement(1e-3, Some(3)), measurement(3e-3, Some(4))]);
        assert_eq!((row.size_bytes, row.count, row.wrong), (8_000_000, 4_000_000, Some(7)));
        assert!((row.time_us - 200.0).abs() < 1e-9 && (row.longest_pause_us - 1500.0).abs() < 1e-9, "{row:?}");
        assert!((row.time_p50_us - 150.0).abs() < 1e-9 && (row.time_p99_us - 600.0).abs() < 1e-9, "{row:?}");
        assert!((row.bandwidth.algbw - 40.0).abs() < 1e-9 && (row.bandwidth.busbw - 20.0).abs() < 1e-9, "{row:?}");
    }

    #[test]
    fn unchecked_data_is_not_zero_wrong() {
        assert_eq!(row(&plan(), 4, &[measurement(1e-3, None), measurement(1e-3, None)]).wrong, None);
    }

    #[test]
    fn ranks_that_see_different_devices_are_told_apart() {
        let network = |device: &str| Network {
            name: "Spark".into(),
            device: device.into(),
            devices: 1,
            speed_mbps: 200_000,
            rails: vec!["4 rails".into()],
        };
        assert_eq!(describe(&[network("a"), network("a")], &[], 1.0).len(), 2);
        let lines = describe(&[network("a"), network("b")], &[], 0.5);
        assert!(lines[0].ends_with("200000 Mb/s (unscaled: --scale 0.5 slows the fabric alone)"), "{lines:?}");
        let connected = describe(&[network("a"), network("a")], &[vec!["x".into()], vec!["y".into()]], 1.0);
        assert_eq!(connected[2..], ["rank 0: x", "rank 1: y"]);
        assert!(lines.len() == 4 && lines[2].contains("On rank 1") && lines[2].contains("device b"), "{lines:?}");
    }
}
