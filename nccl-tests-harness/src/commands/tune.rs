//! `nccl-spark tune`: measures several settings, and writes the best into a settings file.
//!
//! A candidate is a pair of settings: the number of queue pairs per rail, and the smallest part of
//! a message that gets its own rail. The defaults are measured beside the candidates.
//!
//! Each measurement is a run of its own (`crate::commands::collectives::lead`): the ranks start
//! with the settings in their environment, connect, and time an all-gather of each size. Each round
//! measures all settings once, so that a change of the machine's speed affects all of them.

pub mod collectives;
mod follow;
mod judge;
mod keep;
pub mod options;
mod show;

use crate::commands::collectives::lead::{self, Plan};
use crate::commands::collectives::messages::RunParameters;
use crate::commands::collectives::report::Report;
use crate::output::report::{self, Sink};
use crate::output::watch::Watch;
use crate::ranks::launch::World;
use anyhow::{Context, Result, ensure};
use follow::Followers;
use judge::{Candidate, Record};
use options::{FINAL_ROUNDS, Options, Tune};
use show::TuneReport;
use std::io::Write;
use std::path::Path;

/// Tunes. If a launcher started this process as a rank above 0, follows the orders of rank 0
/// instead. Returns true.
///
/// # Errors
/// The defaults cannot be measured, no candidate works, the proposed settings fail when they are
/// measured again, or a file cannot be written.
pub fn run(
    options: Options,
    program: &Path,
    world: Option<World>,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<bool> {
    let tune = options.checked(program, world, variable)?;
    if let Some((world, meeting)) = tune
        .plan
        .launched
        .as_ref()
        .filter(|(world, _)| world.rank > 0)
    {
        return follow::follow(&tune, world, meeting, program).map(|()| true);
    }
    let sink = tune.plan.json.as_ref().map(Sink::open).transpose()?;
    let report = self::tune(&tune, program, &mut report::beside(tune.plan.json.as_ref()))?;
    sink.map_or(Ok(()), |sink| sink.write(&report))
        .map(|()| true)
}

fn tune(tune: &Tune, program: &Path, out: &mut impl Write) -> Result<TuneReport> {
    let followers = match &tune.plan.launched {
        Some((_, meeting)) => Followers::gather(meeting.clone())?,
        None => Followers::default(),
    };
    let watch = Watch::start("runs", || tune.runs());
    let mut out = watch.over(out);
    let out = &mut out;
    let RunParameters {
        ranks, channels, ..
    } = tune.plan.terms;
    let sizes_bytes = tune.plan.sizes().collect();
    let mut report = TuneReport {
        version: env!("CARGO_PKG_VERSION"),
        ranks,
        channels,
        sizes_bytes,
        ..TuneReport::default()
    };
    let fabric_text = String::new();
    let mut bench = Bench {
        tune,
        program,
        followers: &followers,
        runs: 0,
        fabric_text,
        watch: watch.clone(),
    };
    show::introduction(tune, out)?;
    let candidates = tune.candidates.iter().copied().map(Some);
    let mut tried = bench.measure([None].into_iter().chain(candidates), tune.rounds, out)?;
    report.defaults = tried.remove(0);
    report.tried = tried;
    report.fabric_text.clone_from(&bench.fabric_text);
    show::table(&report, out)?;
    let proposed = judge::propose(&report.defaults, &report.tried, tune.default_share_bytes);
    let proposed = proposed
        .and_then(|record| record.candidate)
        .context("no settings but the defaults work")?;
    report.proposed = Some(proposed);
    writeln!(out, "# the best settings again, in turns with the defaults")?;
    let mut again = bench.measure([None, Some(proposed)].into_iter(), FINAL_ROUNDS, out)?;
    watch.end();
    let defaults = again.remove(0);
    let again = again.remove(0);
    ensure!(
        again.failed.is_none(),
        "the proposed settings fail: {}",
        again.failed.unwrap_or_default()
    );
    let verdict = judge::judge(&defaults, &again);
    report.chosen = (verdict.holds || tune.write_best).then_some(proposed);
    show::verdict(&report, proposed, &verdict, out)?;
    let remark = show::remark(&report, &verdict);
    report.verdict = Some(verdict);
    if tune.dry_run {
        writeln!(out, "# no file is written (--dry-run)")?;
        followers.end()?;
        return Ok(report);
    }
    for line in tune.write(report.chosen, &remark)? {
        writeln!(out, "# {line}")?;
    }
    out.flush()?;
    followers.keep(report.chosen, &remark)?;
    report.written = report.chosen.map(|_| tune.output.clone());
    Ok(report)
}

struct Bench<'a> {
    tune: &'a Tune,
    program: &'a Path,
    followers: &'a Followers,
    runs: u32,
    fabric_text: String,
    watch: Watch,
}

impl Bench<'_> {
    /// Measures the candidates (`None`: the defaults) in turn. Each round begins with a different
    /// candidate than the round before.
    fn measure(
        &mut self,
        candidates: impl Iterator<Item = Option<Candidate>>,
        rounds: u32,
        out: &mut impl Write,
    ) -> Result<Vec<Record>> {
        let mut records: Vec<Record> = candidates
            .map(|candidate| Record {
                candidate,
                ..Record::default()
            })
            .collect();
        let count = records.len();
        let stride = (count / rounds as usize).max(1);
        for round in 0..rounds as usize {
            writeln!(out, "# round {} of {rounds}: {count} settings", round + 1)?;
            out.flush()?;
            for at in 0..count {
                self.add(&mut records[(round * stride + at) % count])?;
            }
        }
        Ok(records)
    }

    /// Makes one more run for a record that has not failed. If the run of a candidate fails, the
    /// record keeps the reason. If the run of the defaults fails, returns an error.
    fn add(&mut self, record: &mut Record) -> Result<()> {
        if record.failed.is_some() {
            return Ok(());
        }
        let measured = self.run(record.candidate);
        self.watch.step();
        match measured {
            Ok(round) => record.rounds.push(round),
            Err(error) if record.candidate.is_some() => record.failed = Some(format!("{error:#}")),
            Err(error) => return Err(error.context("with the defaults")),
        }
        Ok(())
    }

    /// Measures once. Returns the bus bandwidth in GB/s by size.
    fn run(&mut self, candidate: Option<Candidate>) -> Result<Vec<f64>> {
        self.runs += 1;
        let mut plan = Plan {
            rank_env: self.tune.rank_env(candidate),
            ..self.tune.plan.clone()
        };
        if let Some((world, meeting)) = &mut plan.launched {
            (*world, *meeting) = follow::of_run(world, meeting, self.runs);
            self.followers.run(self.runs, candidate)?;
        }
        let mut report = Report::new(plan.terms);
        let right = lead::lead(
            &plan,
            self.program,
            &self.watch.part(),
            std::io::sink(),
            &mut report,
        )?;
        let wrong = report.rows.iter().flat_map(|row| &row.first_wrong).next();
        ensure!(
            right,
            "data is wrong: {}",
            wrong.map_or("no rank described it", String::as_str)
        );
        self.fabric_text = report.fabric_text;
        Ok(report
            .rows
            .iter()
            .map(|size| size.row.bandwidth.busbw)
            .collect())
    }
}
