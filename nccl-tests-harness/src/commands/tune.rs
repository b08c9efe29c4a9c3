//! `nccl-spark tune`: measures several settings, shows which are best and by how much, and writes them into a settings file.
//!
//! Every figure is a run of its own (`collectives::lead`): the ranks are started with the settings in their environment, connect, and time
//! an all-gather of each size. Each round measures all settings once, so that a change of the machine affects all of them.

pub mod collectives;
mod follow;
mod judge;
mod keep;
pub mod options;
mod show;

use crate::commands::collectives::lead::{self, Plan};
use crate::output::report::{self, Sink};
use crate::output::watch::Watch;
use crate::ranks::launch::World;
use crate::sizes;
use anyhow::{Context, Result, ensure};
use follow::Followers;
use judge::{Candidate, Record};
use options::{FINAL_ROUNDS, Options, Tune};
use show::Told;
use std::io::Write;
use std::path::Path;

/// Tunes, or takes part as the rank that a launcher started; `variable` gives the value of an environment variable.
///
/// # Errors
/// When the defaults cannot be measured, or the file not be written.
pub fn run(
    options: Options,
    program: &Path,
    world: Option<World>,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<bool> {
    let tune = options.checked(program, world, variable)?;
    if let Some((world, meeting)) = tune.plan.launched.as_ref().filter(|(world, _)| world.rank > 0) {
        return follow::follow(&tune, world, meeting, program).map(|()| true);
    }
    let sink = tune.plan.json.as_ref().map(Sink::open).transpose()?;
    let told = self::tune(&tune, program, &mut report::beside(tune.plan.json.as_ref()))?;
    sink.map_or(Ok(()), |sink| sink.write(&told)).map(|()| true)
}

fn tune(tune: &Tune, program: &Path, out: &mut impl Write) -> Result<Told> {
    let followers = match &tune.plan.launched {
        Some((_, meeting)) => Followers::gather(meeting.clone())?,
        None => Followers::default(),
    };
    let watch = Watch::start("runs", || tune.runs());
    let mut out = watch.over(out);
    let out = &mut out;
    let fabric_text = String::new();
    let mut bench = Bench { tune, program, followers: &followers, runs: 0, fabric_text, watch: watch.clone() };
    let Plan { ranks, channels, min_bytes, max_bytes, step, .. } = tune.plan;
    let sizes_bytes = sizes::sweep(min_bytes, max_bytes, step).collect();
    let mut told = Told { version: env!("CARGO_PKG_VERSION"), ranks, channels, sizes_bytes, ..Told::default() };
    show::introduction(tune, out)?;
    (told.defaults, told.tried) = bench.sweep(out)?;
    told.fabric_text.clone_from(&bench.fabric_text);
    show::table(&told, out)?;
    let proposed = judge::propose(&told.defaults, &told.tried, tune.default_share_bytes);
    let proposed = proposed.and_then(|record| record.candidate).context("no settings but the defaults work")?;
    told.proposed = Some(proposed);
    let (defaults, again) = bench.again(proposed, out)?;
    watch.end();
    let verdict = judge::judge(&defaults, &again);
    told.chosen = (verdict.holds || tune.write_best).then_some(proposed);
    show::verdict(&told, proposed, &verdict, out)?;
    let remark = show::remark(&told, &verdict);
    told.verdict = Some(verdict);
    if tune.dry_run {
        writeln!(out, "# no file is written (--dry-run)")?;
        followers.end()?;
        return Ok(told);
    }
    let pairs = told.chosen.map(Candidate::pairs).unwrap_or_default();
    for line in keep::keep(&tune.output, &keep::SHARES, &pairs, &remark)? {
        writeln!(out, "# {line}")?;
    }
    out.flush()?;
    followers.keep(told.chosen, &remark)?;
    told.written = told.chosen.map(|_| tune.output.clone());
    Ok(told)
}

/// Makes runs.
struct Bench<'a> {
    tune: &'a Tune,
    program: &'a Path,
    followers: &'a Followers,
    runs: u32,
    fabric_text: String,
    watch: Watch,
}

impl Bench<'_> {
    /// The defaults and all candidates, in rounds that begin at different ones.
    fn sweep(&mut self, out: &mut impl Write) -> Result<(Record, Vec<Record>)> {
        let candidates = self.tune.candidates.iter().map(|&candidate| Some(candidate));
        let blank = |candidate| Record { candidate, ..Record::default() };
        let mut records: Vec<Record> = [None].into_iter().chain(candidates).map(blank).collect();
        for round in 0..self.tune.rounds {
            writeln!(out, "# round {} of {}: {} settings", round + 1, self.tune.rounds, records.len())?;
            out.flush()?;
            let first = round as usize * records.len() / self.tune.rounds as usize;
            for at in 0..records.len() {
                let index = (first + at) % records.len();
                self.add(&mut records[index])?;
            }
        }
        let defaults = records.remove(0);
        Ok((defaults, records))
    }

    /// The defaults and the proposed settings in turns; who goes first changes.
    fn again(&mut self, proposed: Candidate, out: &mut impl Write) -> Result<(Record, Record)> {
        writeln!(out, "# the best settings again, in turns with the defaults: {FINAL_ROUNDS} rounds")?;
        out.flush()?;
        let mut records = [None, Some(proposed)].map(|candidate| Record { candidate, ..Record::default() });
        for round in 0..FINAL_ROUNDS as usize {
            for at in 0..2 {
                self.add(&mut records[(round + at) % 2])?;
            }
        }
        let [defaults, again] = records;
        ensure!(again.failed.is_none(), "the proposed settings fail: {}", again.failed.unwrap_or_default());
        Ok((defaults, again))
    }

    /// A run more for a record that has not failed. Only the defaults must not fail.
    fn add(&mut self, record: &mut Record) -> Result<()> {
        if record.failed.is_some() {
            return Ok(());
        }
        let measured = self.measure(record.candidate);
        self.watch.step();
        match measured {
            Ok(round) => record.rounds.push(round),
            Err(error) if record.candidate.is_some() => record.failed = Some(format!("{error:#}")),
            Err(error) => return Err(error.context("with the defaults")),
        }
        Ok(())
    }

    /// Bus bandwidth in GB/s by size.
    fn measure(&mut self, candidate: Option<Candidate>) -> Result<Vec<f64>> {
        self.runs += 1;
        let mut plan = Plan { rank_env: self.tune.rank_env(candidate), ..self.tune.plan.clone() };
        if let Some((world, meeting)) = &mut plan.launched {
            (*world, *meeting) = follow::of_run(world, meeting, self.runs);
            self.followers.run(self.runs, candidate)?;
        }
        let mut report = lead::blank(&plan);
        let right = lead::lead(&plan, self.program, &self.watch.part(), std::io::sink(), &mut report)?;
        let wrong = report.rows.iter().flat_map(|row| &row.first_wrong).next();
        ensure!(right, "data is wrong: {}", wrong.map_or("no rank described it", String::as_str));
        self.fabric_text = report.fabric_text;
        Ok(report.rows.iter().map(|size| size.row.bandwidth.busbw).collect())
    }
}
