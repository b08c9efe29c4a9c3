//! `nccl-spark tune collectives`: learns the tuner's table with the user's own build of nccl-tests, between the ranks that will use
//! it.
//!
//! A candidate is forced by the mechanism that is used later: the plugin's tuner with a table of one row. NCCL's choice is a run with
//! the tuner off. Each round measures all of them once, so that a change of the machine affects all.
//!
//! Promises: a row is written only for sizes at which it was measured, and only if every round with it was faster than every round of
//! NCCL's choice (of five rounds, one outlier of each is allowed), twice: alone, and again with the whole table; and, where the user
//! names groups, only if neither it nor the whole table makes those slower. A run counts only if data is right and NCCL's log says that every
//! channel went over the plugin. A run that fails is repeated once.

mod measure;
pub mod options;
mod rows;
mod show;
mod sweep;
mod verdict;
pub mod write;

use crate::commands::nccl_tests::run::ChannelsUnlikeSpark;
use crate::date;
use crate::output;
use crate::output::report::Sink;
use crate::output::watch::Watch;
use anyhow::{Context, Result, ensure};
use measure::{Facts, Runner, Times};
use nccl_net_spark::tuner::table::{Choice, Collective, Row, Table};
use options::Plan;
use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;
use sweep::{Confirmation, Confirmed, Outcome, Sweep};
use verdict::{Dropped, Finding, Measured, Record, is_of_size};

/// Rounds in which the whole table and NCCL's choice are measured again: with five each, all of one are below all of the other by
/// chance once in 252 times.
const FINAL_ROUNDS: usize = 5;
/// Rounds in which groups are measured with the table and without.
const GROUP_ROUNDS: usize = 3;

/// Tunes. `own` is this program's file, `lookup` gives the value of an environment variable.
///
/// # Errors
/// When NCCL's own choice cannot be measured, the hosts differ, or a settings file cannot be written.
pub fn run(plan: Plan, own: &Path, lookup: &dyn Fn(&str) -> Option<String>, out: &mut impl Write) -> Result<()> {
    let sink = plan.json.as_ref().map(Sink::open).transpose()?;
    let most = most_runs(&plan);
    let watch = Watch::start("runs", || most);
    let mut out = watch.over(out);
    let out = &mut out;
    introduce(&plan, out)?;
    let with_candidates =
        |(collective, program): &(Collective, PathBuf)| (*collective, program.clone(), plan.candidates_of(*collective));
    let collectives: Vec<_> = plan.collectives.iter().map(with_candidates).collect();
    let (rounds, gain, groups) = (plan.rounds, plan.gain, plan.groups.clone());
    let runner = Runner::new(&plan, own, lookup)?;
    writeln!(out, "# fabric: {}", runner.fabric())?;
    let mut bench = Bench { runner, gain, groups, most, watch, started: Instant::now() };
    let mut sweeps = Vec::new();
    for (collective, program, candidates) in collectives {
        let sweep = bench.sweep(collective, program, &candidates, rounds, out)?;
        show::sweep(&sweep, out)?;
        sweeps.push(sweep);
    }
    bench.confirm(&mut sweeps, out)?;
    bench.watch.end();
    let (fabric, facts) = (bench.runner.fabric().to_owned(), bench.facts()?);
    let learned: Vec<Row> = sweeps.iter().flat_map(|sweep| sweep.confirmed(facts.ranks)).collect();
    let measured: Vec<Collective> = sweeps.iter().map(|sweep| sweep.collective).collect();
    let kept = rows::kept(plan.before.as_ref(), &facts.fingerprint, &measured, facts.ranks);
    let outcome = Outcome { facts: &facts, sweeps: &sweeps, learned: learned.len(), kept: kept.len() };
    let rows = [learned, kept].concat();
    let table = match rows.is_empty() {
        true => None,
        false => Some(Table::new(Some(facts.fingerprint.clone()), rows).map_err(anyhow::Error::msg)?),
    };
    sink.map_or(Ok(()), |sink| sink.write(&show::json(&plan, &fabric, &facts, &sweeps, table.as_ref())))?;
    conclude(&plan, own, &outcome, table.as_ref(), out)
}

fn introduce(plan: &Plan, out: &mut impl Write) -> Result<()> {
    writeln!(out, "# nccl-spark {}: tune collectives", env!("CARGO_PKG_VERSION"))?;
    writeln!(out, "# each run: {}", plan.arguments.join(" "))?;
    let counts = plan.collectives.iter().map(|(collective, _)| plan.candidates_of(*collective).len());
    let (count, rounds) = (counts.max().unwrap_or(0), plan.rounds);
    writeln!(
        out,
        "# NCCL's choice and up to {count} candidate(s) in turns, rounds: {rounds}; at most {} runs in all",
        most_runs(plan)
    )?;
    for note in &plan.notes {
        writeln!(out, "# {note}")?;
    }
    Ok(out.flush()?)
}

/// The number of runs if no candidate is dropped, every collective is confirmed and no run fails.
fn most_runs(plan: &Plan) -> u64 {
    let finals = 2 * (FINAL_ROUNDS + GROUP_ROUNDS * plan.groups.len());
    let each = |(collective, _): &(Collective, PathBuf)| {
        (plan.candidates_of(*collective).len() + 1) * plan.rounds as usize * (1 + plan.groups.len()) + finals
    };
    plan.collectives.iter().map(each).sum::<usize>() as u64
}

/// Writes the table, and reports what is in effect from then on.
fn conclude(plan: &Plan, own: &Path, outcome: &Outcome<'_>, table: Option<&Table>, out: &mut impl Write) -> Result<()> {
    writeln!(out, "#")?;
    if outcome.learned == 0 {
        writeln!(out, "# nothing is clearly better than NCCL's choice: this run writes no rows")?;
    }
    if table.is_none() {
        without_table(out)?;
    }
    if outcome.kept > 0 {
        writeln!(out, "# older rows kept, of other collectives or numbers of ranks: {}", outcome.kept)?;
    }
    if let Some(table) = table {
        writeln!(out, "# the table, rows: {}\n{table}", table.rows().len())?;
    }
    if plan.dry_run {
        writeln!(out, "# no settings file is written (--dry-run)")?;
        return Ok(out.flush()?);
    }
    let remark = show::remark(outcome, &date::today());
    write::everywhere(plan, own, table, &remark, out)?;
    if table.is_some() && !outcome.facts.fingerprint.gpu.contains("GB10") {
        writeln!(out, "# this GPU is not a GB10: the tuner uses the table only with NCCL_SPARK_TUNER=on")?;
    }
    Ok(out.flush()?)
}

/// What the tuner does where there is no learned table: not nothing.
fn without_table(out: &mut impl Write) -> Result<()> {
    writeln!(out, "# no table is learned, but on a GB10 the tuner stays in use, with the rows that the plugin ships:")?;
    writeln!(out, "# for NCCL's own choice at every size set NCCL_SPARK_TUNER=off on every host")?;
    Ok(())
}

/// What is run.
struct Run<'a> {
    collective: Collective,
    program: &'a Path,
    /// Collectives in a group.
    members: u32,
}

impl fmt::Display for Run<'_> {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.members {
            1 => write!(to, "{}", self.collective),
            members => write!(to, "{} in groups of {members}", self.collective),
        }
    }
}

/// Makes runs.
struct Bench<'a> {
    runner: Runner<'a>,
    gain: f64,
    /// Members of the groups that rows must not make slower.
    groups: Vec<u32>,
    /// Runs at most.
    most: u64,
    watch: Watch,
    started: Instant,
}

impl<'a> Bench<'a> {
    /// NCCL's choice and all candidates of one collective; each round begins with another one.
    fn sweep(
        &mut self,
        collective: Collective,
        program: PathBuf,
        candidates: &[Choice],
        rounds: u32,
        out: &mut impl Write,
    ) -> Result<Sweep> {
        let mut alone = Measured::new(1, candidates.iter().copied());
        self.measure(collective, &program, &mut alone, rounds, out)?;
        let winners = alone.winners(self.gain);
        let mut groups = Vec::new();
        for members in self.groups.clone().into_iter().filter(|_| !winners.is_empty()) {
            let mut group = Measured::new(members, winners.iter().copied());
            self.measure(collective, &program, &mut group, rounds, out)?;
            groups.push(group);
        }
        let judged = verdict::judge(&alone, &groups, self.gain);
        Ok(Sweep { collective, program, alone, groups, judged, again: None })
    }

    /// NCCL's choice and the candidates in turns; each round begins with another one.
    fn measure(
        &mut self,
        collective: Collective,
        program: &Path,
        measured: &mut Measured,
        rounds: u32,
        out: &mut impl Write,
    ) -> Result<()> {
        let Measured { members, nccl, candidates } = measured;
        let what = Run { collective, program, members: *members };
        for round in 0..rounds as usize {
            let running: Vec<usize> = (0..candidates.len()).filter(|&at| candidates[at].dropped.is_none()).collect();
            say(out, &format!("{what}: round {} of {rounds}, runs: {}", round + 1, running.len() + 1))?;
            // NCCL's choice is the last of the circle; the first round begins with it, because it says what the hosts are.
            let count = running.len() + 1;
            let first = (count - 1 + round * count / rounds as usize) % count;
            for at in (0..count).map(|step| (first + step) % count) {
                match running.get(at) {
                    None => self.add(&what, nccl, None, out)?,
                    Some(&index) => {
                        let table = self.forced(&what, nccl, candidates[index].choice)?;
                        self.add(&what, &mut candidates[index], Some(&table), out)?;
                    }
                }
            }
            if round == 0 {
                verdict::prune(nccl, candidates);
            }
        }
        Ok(())
    }

    /// A table that makes `choice` for all sums of the sweep.
    fn forced(&self, what: &Run<'_>, nccl: &Record, choice: Option<Choice>) -> Result<Table> {
        let sum = |bytes: u64| (bytes * u64::from(what.members), choice);
        let sizes = verdict::sizes(nccl).into_iter().map(sum).collect::<Vec<_>>();
        Table::new(None, rows::rows(what.collective, self.facts()?.ranks, &sizes)).map_err(anyhow::Error::msg)
    }

    /// The table of all winners against NCCL's choice, in turns; each is first in every other round.
    fn confirm(&mut self, sweeps: &mut [Sweep], out: &mut impl Write) -> Result<()> {
        let ranks = self.facts()?.ranks;
        let rows: Vec<Row> = sweeps.iter().flat_map(|sweep| sweep.proposed(ranks)).collect();
        let table = Table::new(None, rows).map_err(anyhow::Error::msg)?;
        for sweep in sweeps.iter_mut() {
            let proposed = sweep.proposed(ranks);
            if proposed.is_empty() {
                continue;
            }
            let collective = sweep.collective;
            say(out, &format!("{collective}: the whole table against NCCL's choice: {FINAL_ROUNDS} rounds"))?;
            let what = Run { collective, program: &sweep.program, members: 1 };
            let [nccl, mut with] = self.in_turns(&what, &table, FINAL_ROUNDS, out)?;
            if with.dropped.is_some() {
                with.rounds.clear();
            }
            let lines = verdict::sizes(&nccl).into_iter().map(|bytes| {
                let holds = |row: &&Row| (row.from_bytes..=row.to_bytes).contains(&bytes);
                let row = proposed.iter().find(holds).map(|row| row.choice);
                let (without, with) = (nccl.times(bytes), with.times(bytes));
                let row = row.map(|choice| (choice, verdict::compare(&without, &with, self.gain)));
                Confirmed { bytes, row, differs: verdict::differ(&without, &with, self.gain) }
            });
            let mut lines: Vec<Confirmed> = lines.collect();
            for members in self.groups.clone() {
                self.check_groups(sweep, members, &table, &mut lines, out)?;
            }
            sweep.again = Some(Confirmation { lines, nccl, table: with });
            show::confirmation(sweep, out)?;
        }
        Ok(())
    }

    /// Removes rows with which groups of `members` collectives are slower.
    fn check_groups(
        &mut self,
        sweep: &Sweep,
        members: u32,
        table: &Table,
        lines: &mut [Confirmed],
        out: &mut impl Write,
    ) -> Result<()> {
        let what = Run { collective: sweep.collective, program: &sweep.program, members };
        say(out, &format!("{what}: {GROUP_ROUNDS} rounds"))?;
        let [nccl, with] = self.in_turns(&what, table, GROUP_ROUNDS, out)?;
        if let Some(Dropped::Failed(reason)) = with.dropped {
            return Err(anyhow::Error::msg(reason).context(what.to_string()));
        }
        for each in verdict::sizes(&nccl) {
            let is_acting = |line: &&mut Confirmed| line.choice().is_some() && is_of_size(line.bytes, each, members);
            if let Some(Confirmed { row: Some((_, finding)), .. }) = lines.iter_mut().find(is_acting)
                && verdict::is_clearly_slower(&nccl.times(each), &with.times(each))
            {
                *finding = Finding::SlowInGroups;
            }
        }
        Ok(())
    }

    /// NCCL's choice and the table, each first in every other round.
    fn in_turns(&mut self, what: &Run<'_>, table: &Table, rounds: usize, out: &mut impl Write) -> Result<[Record; 2]> {
        let mut records = [Record::new(None), Record::new(None)];
        for round in 0..rounds {
            for at in [round % 2, (round + 1) % 2] {
                self.add(what, &mut records[at], (at == 1).then_some(table), out)?;
            }
        }
        Ok(records)
    }

    /// One more run for a record that is not dropped. A candidate that fails is dropped; NCCL's own choice must not fail.
    fn add(&mut self, what: &Run<'_>, record: &mut Record, table: Option<&Table>, out: &mut impl Write) -> Result<()> {
        if record.dropped.is_some() {
            return Ok(());
        }
        let who = match (record.choice, table) {
            (Some(choice), _) => choice.to_string(),
            (None, Some(_)) => "the whole table".to_owned(),
            (None, None) => "NCCL's choice".to_owned(),
        };
        let is_first = self.runner.facts.is_none();
        let run = |runner: &mut Runner<'a>| {
            let times = runner.run_grouped(what.program, table, what.members);
            times.and_then(|times| same_sizes(record, times))
        };
        let measured = self.run(&format!("{what} with {who}"), out, run);
        match measured {
            Ok(times) => record.rounds.push(times),
            Err(error) if table.is_some() && !output::is_unread(&error) && !error.is::<ChannelsUnlikeSpark>() => {
                record.dropped = Some(Dropped::Failed(format!("{error:#}")));
            }
            Err(error) => return Err(error.context(format!("{what} with {who}"))),
        }
        if is_first {
            let facts = self.facts()?;
            let minutes = self.started.elapsed().as_secs_f64() * self.most as f64 / 60.0;
            say(out, &facts.used)?;
            say(out, &format!("hosts: {}, ranks: {}", facts.fingerprint, facts.ranks))?;
            say(out, &format!("at most about {} min, estimated from the first run", minutes.ceil()))?;
        }
        Ok(())
    }

    /// A run, repeated once if it fails: ranks on other hosts write into the same output, and a line that cuts another can make a
    /// good run unreadable.
    fn run(
        &mut self,
        what: &str,
        out: &mut impl Write,
        mut run: impl FnMut(&mut Runner<'a>) -> Result<Times>,
    ) -> Result<Times> {
        self.watch.doing(what);
        let mut measured = run(&mut self.runner);
        if let Err(error) = &measured
            && !output::is_unread(error)
        {
            let reason = format!("{error:#}");
            let reason = reason.lines().next().unwrap_or_default();
            say(out, &format!("{what}: a run failed and is repeated once: {reason}"))?;
            measured = run(&mut self.runner);
        }
        self.watch.step();
        measured
    }

    fn facts(&self) -> Result<Facts> {
        self.runner.facts.clone().context("nothing was measured")
    }
}

/// Prints a remark.
fn say(out: &mut impl Write, text: &str) -> Result<()> {
    writeln!(out, "# {text}")?;
    Ok(out.flush()?)
}

/// Fails where the table has other sizes than an earlier one: then it was not read completely.
fn same_sizes(record: &Record, times: Times) -> Result<Times> {
    if let Some(earlier) = record.rounds.first() {
        ensure!(earlier.keys().eq(times.keys()), "the table has other sizes than in an earlier run");
    }
    Ok(times)
}
