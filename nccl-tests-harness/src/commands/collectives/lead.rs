//! The command's side of a run: starts the ranks, orders them to measure each size, and prints the
//! table.

use super::messages::{Answer, Measurement, Order, RunParameters, Setup};
use super::rank::Collectives;
use super::report::Report;
use super::table::{CollectiveTable, Row};
use crate::fabric::{self, Fabric, FabricRequest, Kind};
use crate::output::report::{self, Target};
use crate::output::watch::Watch;
use crate::ranks::control::answer;
use crate::ranks::device::Network;
use crate::ranks::job::{Job, RankEnv};
use crate::ranks::launch::World;
use crate::ranks::placement::{self, Libraries};
use crate::ranks::rendezvous::Meeting;
use crate::sizes::{self, Step};
use anyhow::Result;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

#[derive(Debug, Clone)]
pub struct Plan {
    pub terms: RunParameters,
    pub plugin: PathBuf,
    /// First size in bytes. With this size, each rank's part must have at least one byte; the
    /// module `options` checks this.
    pub min_bytes: usize,
    pub max_bytes: usize,
    pub step: Step,
    /// Time without progress after which the run fails.
    pub timeout: Duration,
    pub rank_env: Vec<RankEnv>,
    pub fabric: FabricRequest,
    /// Value of `NCCL_IBVERBS_LIB` in the user's environment, which names a verbs library.
    pub verbs_library: Option<String>,
    pub shows_percentiles: bool,
    pub json: Option<Target>,
    /// Set if a launcher started this process as a rank: the launcher's job, and the address where
    /// the job's ranks meet.
    pub launched: Option<(World, Meeting)>,
}

impl Plan {
    pub fn sizes(&self) -> impl Iterator<Item = usize> {
        sizes::sweep(self.min_bytes, self.max_bytes, self.step)
    }
}

/// Runs a collective; each rank is a process of `program`. Returns true if all data was right. The
/// table goes to standard output, or to standard error if the JSON goes to standard output. If a
/// launcher started this process as a rank above 0, this process becomes that rank. Fails when a
/// rank fails or hangs, or a write fails.
pub fn run(plan: &Plan, program: &Path) -> Result<bool> {
    if let Some((world, meeting)) = plan.launched.as_ref().filter(|(world, _)| world.rank > 0) {
        return placement::become_rank(rank_command(plan, world, meeting, program)?);
    }
    let watch = Watch::start("sizes", || plan.sizes().count() as u64);
    report::of_run(
        plan.json.as_ref(),
        Report::new(plan.terms),
        |out, report| lead(plan, program, &watch, out, report),
    )
}

/// Connects to rank 0. Returns the command that runs this process's rank. Fails when rank 0 is not
/// found, is not trusted, or refuses the rank.
pub fn rank_command(
    plan: &Plan,
    world: &World,
    meeting: &Meeting,
    program: &Path,
) -> Result<Command> {
    let libraries = Libraries {
        plugin: &plan.plugin,
        fabric: &plan.fabric.library,
    };
    placement::rank_command::<Collectives>(world, meeting, libraries, &plan.rank_env, program)
}

/// Starts the ranks, or waits for the ranks that a launcher started. Then measures all sizes.
/// Writes the table to `out` and the figures to `report`. Returns true if all data was right.
pub fn lead(
    plan: &Plan,
    program: &Path,
    watch: &Watch,
    out: impl Write,
    report: &mut Report,
) -> Result<bool> {
    let mut out = watch.over(out);
    let fabric = fabric::set_up(
        &plan.fabric,
        plan.terms.ranks,
        plan.verbs_library.as_deref(),
    )?;
    report.fabric = if fabric.kind == Kind::Soft {
        "soft"
    } else {
        "verbs"
    };
    report.fabric_text.clone_from(&fabric.about);
    introduce(plan, &fabric, &mut out)?;
    let places = match &plan.launched {
        Some((_, meeting)) => placement::with_guests(meeting.clone(), &fabric, &plan.rank_env)?,
        None => placement::all_here(plan.terms.ranks, &fabric, &plan.rank_env),
    };
    let mut job = Job::start(program, places, plan.timeout, watch.clone())?;
    let outcome = connect(plan, &mut job, report).and_then(|()| {
        list_ranks(&job, report, &mut out)?;
        let mut table = CollectiveTable::start(out, plan.terms.collective, plan.shows_percentiles)?;
        for size_bytes in plan.sizes() {
            measure(plan.terms, size_bytes, &mut job, &mut table, report)?;
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

fn connect(plan: &Plan, job: &mut Job<Collectives>, report: &mut Report) -> Result<()> {
    let RunParameters {
        collective,
        ranks,
        channels,
        ..
    } = plan.terms;
    let setup = |rank| Setup {
        rank,
        plugin: plan.plugin.clone(),
        job: u64::from(std::process::id()),
        max_count: collective.count(plan.max_bytes, ranks),
        terms: plan.terms,
    };
    let listening = job.order_all(
        |rank| Order::Setup(setup(rank)),
        answer!(Answer::Listening { network, handles } => (network, handles)),
    )?;
    let (networks, handles): (Vec<Network>, Vec<Vec<Vec<u8>>>) = listening.into_iter().unzip();
    report.networks = networks;
    // If a rank gave too few handles, some are missing here. A rank that needs a missing handle
    // reports that it got too few.
    let handles_for = |rank: usize| {
        let links = collective
            .links(rank, ranks, channels)
            .into_iter()
            .enumerate();
        links
            .filter_map(|(index, link)| handles[link.to].get(index).cloned())
            .collect()
    };
    report.connections = job.order_all(
        |rank| Order::Connect {
            handles: handles_for(rank),
        },
        answer!(Answer::Connected { lines } => lines),
    )?;
    Ok(())
}

fn list_ranks(job: &Job<Collectives>, report: &Report, out: &mut impl Write) -> Result<()> {
    for (rank, (who, network)) in job.whereabouts().zip(&report.networks).enumerate() {
        writeln!(
            out,
            "#  Rank {rank:>2} {who} network {} device {}",
            network.name, network.device
        )?;
    }
    Ok(())
}

fn measure(
    terms: RunParameters,
    size_bytes: usize,
    job: &mut Job<Collectives>,
    table: &mut CollectiveTable<impl Write>,
    report: &mut Report,
) -> Result<()> {
    let count = terms.collective.count(size_bytes, terms.ranks);
    job.order_all(|_| Order::Prepare { count }, answer!(Answer::Ready => ()))?;
    let measured = job.order_all(
        |_| Order::Go,
        answer!(Answer::Measured(measurement) => measurement),
    )?;
    let row = row(terms, count, &measured);
    let wrong = measured
        .iter()
        .enumerate()
        .filter_map(|(rank, one)| Some((rank, one.first_wrong.as_ref()?)));
    let wrong: Vec<String> = wrong
        .map(|(rank, wrong)| format!("rank {rank}: {wrong}"))
        .collect();
    table.row(&row)?;
    wrong.iter().try_for_each(|line| table.remark(line))?;
    report.add(row, wrong);
    Ok(())
}

fn introduce(plan: &Plan, fabric: &Fabric, out: &mut impl Write) -> Result<()> {
    let Plan {
        min_bytes,
        max_bytes,
        ..
    } = plan;
    let RunParameters {
        collective,
        ranks,
        channels,
        warmup_iters,
        iters,
        check_iters,
    } = plan.terms;
    let (step, unit) = match plan.step {
        Step::Factor(factor) => (factor, "factor"),
        Step::Bytes(bytes) => (bytes, "bytes"),
    };
    writeln!(
        out,
        "# nccl-spark {}: {} over host memory",
        env!("CARGO_PKG_VERSION"),
        collective.name()
    )?;
    writeln!(
        out,
        "# nRanks {ranks} nChannels {channels} minBytes {min_bytes} maxBytes {max_bytes} step: {step}({unit}) \
         warmup iters: {warmup_iters} iters: {iters} validation: {check_iters}"
    )?;
    writeln!(out, "# fabric: {}", fabric.about)?;
    writeln!(out, "#")?;
    match &plan.launched {
        Some((World { launcher, .. }, Meeting { host, port, .. })) => {
            writeln!(
                out,
                "# Using ranks that {launcher} started, which meet at {host}:{port}"
            )?;
        }
        None => writeln!(out, "# Using ranks on this machine")?,
    }
    Ok(out.flush()?)
}

/// Returns a row of the table. As in nccl-tests, the row has the mean of the ranks' times and the
/// sum of their wrong elements. For each percentile and for the longest pause, the row has the
/// largest value of any rank.
fn row(terms: RunParameters, count: usize, measured: &[Measurement]) -> Row {
    let mean = measured.iter().map(|one| one.seconds).sum::<f64>() / measured.len() as f64;
    let seconds = mean / f64::from(terms.iters);
    let longest_us = |value: fn(&Measurement) -> f64| {
        measured
            .iter()
            .map(|one| value(one) * 1e6)
            .fold(0.0, f64::max)
    };
    Row {
        size_bytes: terms.collective.size_bytes(count, terms.ranks),
        count,
        time_us: seconds * 1e6,
        bandwidth: terms.collective.bandwidth(count, terms.ranks, seconds),
        time_p50_us: longest_us(|one| one.p50_s),
        time_p99_us: longest_us(|one| one.p99_s),
        longest_pause_us: longest_us(|one| one.longest_pause_s),
        wrong: measured.iter().map(|one| one.wrong).sum(),
    }
}

/// Describes the network as NCCL would see it (once if all ranks see the same), then the
/// connections of each rank. `scale` is the factor on the rates of the software fabric.
fn describe(networks: &[Network], connections: &[Vec<String>], scale: f64) -> Vec<String> {
    let slowed = if scale < 1.0 {
        format!(" (unscaled: --scale {scale} slows the fabric alone)")
    } else {
        String::new()
    };
    let same = networks.iter().all(|network| network == &networks[0]);
    let shown = if same { &networks[..1] } else { networks };
    let mut lines = Vec::new();
    for (rank, network) in shown.iter().enumerate() {
        let who = if same {
            "every rank".to_owned()
        } else {
            format!("rank {rank}")
        };
        let Network {
            name,
            device,
            devices,
            speed_mbps,
            ..
        } = network;
        lines.push(format!(
            "On {who} NCCL would see network {name}, device {device} (1 of {devices}), {speed_mbps} Mb/s{slowed}"
        ));
        lines.extend(network.rails.iter().map(|line| format!("{who}: {line}")));
    }
    for (rank, rank_lines) in connections.iter().enumerate() {
        lines.extend(rank_lines.iter().map(|line| format!("rank {rank}: {line}")));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::collectives::Collective;

    fn measurement(seconds: f64, wrong: Option<u64>) -> Measurement {
        let p50_s = seconds / 20.0;
        let p99_s = seconds / 5.0;
        let longest_pause_s = seconds / 2.0;
        Measurement {
            seconds,
            p50_s,
            p99_s,
            longest_pause_s,
            wrong,
            first_wrong: None,
        }
    }

    const TERMS: RunParameters = RunParameters {
        collective: Collective::AllGather,
        ranks: 2,
        channels: 1,
        warmup_iters: 0,
        iters: 10,
        check_iters: 1,
    };

    /// Computed by hand: the ranks take 1 ms and 3 ms for 10 iterations, so the mean time of an
    /// iteration is 200 us. 2 x 4 MB in 200 us are 40 GB/s. The slower rank's median is 150 us, its
    /// 99th percentile 600 us.
    #[test]
    fn a_row_averages_times_and_adds_up_wrong_bytes() {
        let row = row(
            TERMS,
            4_000_000,
            &[measurement(1e-3, Some(3)), measurement(3e-3, Some(4))],
        );
        assert_eq!(
            (row.size_bytes, row.count, row.wrong),
            (8_000_000, 4_000_000, Some(7))
        );
        assert!(
            (row.time_us - 200.0).abs() < 1e-9 && (row.longest_pause_us - 1500.0).abs() < 1e-9,
            "{row:?}"
        );
        assert!(
            (row.time_p50_us - 150.0).abs() < 1e-9 && (row.time_p99_us - 600.0).abs() < 1e-9,
            "{row:?}"
        );
        assert!(
            (row.bandwidth.algbw - 40.0).abs() < 1e-9 && (row.bandwidth.busbw - 20.0).abs() < 1e-9,
            "{row:?}"
        );
    }

    #[test]
    fn unchecked_data_is_not_zero_wrong() {
        assert_eq!(
            row(
                TERMS,
                4,
                &[measurement(1e-3, None), measurement(1e-3, None)]
            )
            .wrong,
            None
        );
    }

    #[test]
    fn ranks_with_different_devices_are_distinguished() {
        let network = |device: &str| Network {
            name: "Spark".into(),
            device: device.into(),
            devices: 1,
            speed_mbps: 200_000,
            rails: vec!["4 rails".into()],
        };
        assert_eq!(describe(&[network("a"), network("a")], &[], 1.0).len(), 2);
        let lines = describe(&[network("a"), network("b")], &[], 0.5);
        assert!(
            lines[0].ends_with("200000 Mb/s (unscaled: --scale 0.5 slows the fabric alone)"),
            "{lines:?}"
        );
        let connected = describe(
            &[network("a"), network("a")],
            &[vec!["x".into()], vec!["y".into()]],
            1.0,
        );
        assert_eq!(connected[2..], ["rank 0: x", "rank 1: y"]);
        assert!(
            lines.len() == 4 && lines[2].contains("On rank 1") && lines[2].contains("device b"),
            "{lines:?}"
        );
    }
}
