//! `nccl-spark tune collectives`: learns the table of the plugin's tuner with the user's own build
//! of nccl-tests, between the ranks that will use the table.
//!
//! A candidate is an algorithm, a protocol and a number of channels. To measure a candidate, the
//! plugin's tuner gets a table whose one row forces the candidate. Jobs later use the learned table
//! in the same way. To measure NCCL's choice, the tuner is off. Each round measures NCCL's choice
//! and every candidate once, so that a change of the machine's speed affects all of them.
//!
//! Promises:
//! - A row covers only measured sizes, and the sizes around each of them up to the middle between
//!   neighbours (`rows::rows`).
//! - At the measured sizes, every round with the row was faster than every round of NCCL's choice.
//!   (From five rounds on, one in five is left out as an outlier: of the rounds with the row the
//!   slowest, of the rounds of NCCL's choice the fastest.) This is measured twice: with the row's
//!   choice forced, and with the whole table.
//! - `--groups` lists sizes of groups, as numbers of collectives. Neither the row's choice nor the
//!   whole table makes groups of these sizes slower by more than noise.
//! - A run counts only if its data is right, and NCCL's log says that every channel used the
//!   plugin. A failed run is repeated once.

mod measure;
pub mod options;
mod rows;
mod show;
mod sweep;
mod verdict;
pub mod write;

use crate::date;
use crate::output;
use crate::output::report::Sink;
use crate::output::watch::Watch;
use anyhow::{Context, Result, ensure};
use measure::{Facts, Runner, Times};
use options::Plan;
use proto::tuner::shipped::{self, Evidence};
use proto::tuner::table::{Choice, Collective, Row, Table};
use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;
use sweep::{Confirmation, Confirmed, Outcome, Sweep};
use verdict::{Dropped, Finding, Measured, Record, is_of_size};

/// Number of rounds in which the whole table and NCCL's choice are measured again. If both are
/// equally fast, the table's rounds count as faster by chance 26 times in 252, because
/// `verdict::compare` leaves out one outlier on each side. In addition, a row needs the minimum
/// gain (`--gain`) in the median.
const FINAL_ROUNDS: u32 = 5;
/// Number of rounds in which groups are measured with the whole table and with NCCL's choice.
const GROUP_ROUNDS: u32 = 3;

/// Runs the command: measures the candidates, confirms the winners, and writes the settings files.
///
/// # Errors
/// NCCL's own choice cannot be measured, the hosts differ, or a settings file cannot be written.
pub fn run(
    plan: Plan,
    own_program: &Path,
    lookup: &dyn Fn(&str) -> Option<String>,
    out: &mut impl Write,
) -> Result<()> {
    let sink = plan.json.as_ref().map(Sink::open).transpose()?;
    let max_runs = max_runs(&plan);
    let watch = Watch::start("runs", || max_runs);
    let mut out = watch.over(out);
    let out = &mut out;
    introduce(&plan, max_runs, out)?;
    let runner = Runner::new(&plan, own_program, lookup)?;
    writeln!(out, "# fabric: {}", runner.fabric())?;
    let mut bench = Bench {
        plan: &plan,
        runner,
        max_runs,
        watch,
        started: Instant::now(),
    };
    let mut sweeps = Vec::new();
    for (collective, program) in &plan.collectives {
        let sweep = bench.sweep(*collective, program, out)?;
        show::sweep(&sweep, out)?;
        sweeps.push(sweep);
    }
    bench.confirm(&mut sweeps, out)?;
    bench.watch.end();
    let fabric = bench.runner.fabric();
    let facts = bench.facts()?;
    let learned: Vec<Row> = sweeps
        .iter()
        .flat_map(|sweep| sweep.confirmed(facts.ranks))
        .collect();
    let measured: Vec<Collective> = sweeps.iter().map(|sweep| sweep.collective).collect();
    let kept = rows::kept(
        plan.before.as_ref(),
        &facts.fingerprint,
        &measured,
        facts.ranks,
    );
    let learned_rows = learned.len();
    let kept_rows = kept.len();
    let rows = [learned, kept].concat();
    let table = match rows.is_empty() {
        true => None,
        false => {
            Some(Table::new(Some(facts.fingerprint.clone()), rows).map_err(anyhow::Error::msg)?)
        }
    };
    let outcome = Outcome {
        fabric,
        facts: &facts,
        sweeps: &sweeps,
        learned_rows,
        kept_rows,
        table: table.as_ref(),
    };
    sink.map_or(Ok(()), |sink| sink.write(&show::json(&plan, &outcome)))?;
    conclude(&plan, own_program, &outcome, out)
}

fn introduce(plan: &Plan, max_runs: u64, out: &mut impl Write) -> Result<()> {
    writeln!(
        out,
        "# nccl-spark {}: tune collectives",
        env!("CARGO_PKG_VERSION")
    )?;
    writeln!(out, "# each run: {}", plan.arguments.join(" "))?;
    let counts = plan
        .collectives
        .iter()
        .map(|(collective, _)| plan.candidates_of(*collective).count());
    let count = counts.max().unwrap_or(0);
    let rounds = plan.rounds;
    writeln!(
        out,
        "# measuring NCCL's choice and up to {count} candidate(s) in turn, rounds: {rounds}; at most {max_runs} runs in all"
    )?;
    for note in &plan.notes {
        writeln!(out, "# {note}")?;
    }
    for (row, evidence) in shipped::rows_with_evidence() {
        let mark = match evidence {
            Evidence::Pair => "",
            Evidence::Twin => " (no figures of a Spark)",
        };
        writeln!(out, "# the plugin ships: {row}{mark}")?;
    }
    Ok(out.flush()?)
}

/// Returns the greatest number of runs. It is reached if no candidate is dropped, every candidate
/// is also measured in groups, and every collective has rows to confirm. Repetitions of failed runs
/// are not counted.
fn max_runs(plan: &Plan) -> u64 {
    let groups = plan.groups.len() as u64;
    let finals = 2 * (u64::from(FINAL_ROUNDS) + u64::from(GROUP_ROUNDS) * groups);
    let each = |(collective, _): &(Collective, PathBuf)| {
        (plan.candidates_of(*collective).count() as u64 + 1) * u64::from(plan.rounds) * (1 + groups)
            + finals
    };
    plan.collectives.iter().map(each).sum()
}

fn conclude(
    plan: &Plan,
    own_program: &Path,
    outcome: &Outcome<'_>,
    out: &mut impl Write,
) -> Result<()> {
    let &Outcome {
        facts,
        learned_rows,
        kept_rows,
        table,
        ..
    } = outcome;
    writeln!(out, "#")?;
    if learned_rows == 0 {
        writeln!(
            out,
            "# nothing is clearly better than NCCL's choice: this run writes no rows"
        )?;
    }
    if table.is_none() {
        without_table(out)?;
    }
    if kept_rows > 0 {
        writeln!(
            out,
            "# older rows kept (for other collectives or other numbers of ranks): {kept_rows}"
        )?;
    }
    if let Some(table) = table {
        writeln!(out, "# the table, rows: {}\n{table}", table.rows().len())?;
    }
    if plan.dry_run {
        writeln!(out, "# no settings file is written (--dry-run)")?;
        return Ok(out.flush()?);
    }
    let remark = show::remark(outcome, &date::today());
    write::everywhere(plan, own_program, table, &remark, out)?;
    if table.is_some() && !facts.fingerprint.gpu.contains("GB10") {
        writeln!(
            out,
            "# this GPU is not a GB10: the tuner uses the table only with NCCL_SPARK_TUNER=on"
        )?;
    }
    Ok(out.flush()?)
}

fn without_table(out: &mut impl Write) -> Result<()> {
    writeln!(
        out,
        "# this run learned no table; on a GB10 the tuner still uses the rows that the plugin ships"
    )?;
    writeln!(
        out,
        "# to let NCCL choose at every size, set NCCL_SPARK_TUNER=off on every host"
    )?;
    Ok(())
}

struct Run<'a> {
    collective: Collective,
    program: &'a Path,
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

struct Bench<'a> {
    plan: &'a Plan,
    runner: Runner<'a>,
    max_runs: u64,
    watch: Watch,
    started: Instant,
}

impl<'a> Bench<'a> {
    /// Measures NCCL's choice and all candidates with single collectives. If some candidates are
    /// clearly better than NCCL's choice at some size, then measures these and NCCL's choice with
    /// groups of collectives.
    fn sweep(
        &mut self,
        collective: Collective,
        program: &'a Path,
        out: &mut impl Write,
    ) -> Result<Sweep<'a>> {
        let &Plan { rounds, gain, .. } = self.plan;
        let mut single = Measured::new(self.plan.candidates_of(collective).map(Some));
        self.measure(
            &Run {
                collective,
                program,
                members: 1,
            },
            &mut single,
            rounds,
            None,
            out,
        )?;
        let winners = single.winners(gain);
        let mut groups = Vec::new();
        for &members in self.plan.groups.iter().filter(|_| !winners.is_empty()) {
            let mut group = Measured {
                members,
                ..Measured::new(winners.iter().copied().map(Some))
            };
            self.measure(
                &Run {
                    collective,
                    program,
                    members,
                },
                &mut group,
                rounds,
                None,
                out,
            )?;
            groups.push(group);
        }
        let judged = verdict::judge(&single, &groups, gain);
        Ok(Sweep {
            collective,
            program,
            single,
            groups,
            judged,
            confirmation: None,
        })
    }

    /// Measures NCCL's choice and the candidates in turn. Which of them is measured first changes
    /// from round to round. If `table` is given, all candidates run with it. Otherwise each
    /// candidate runs with a table that forces its choice, and candidates that are too slow at
    /// every size are dropped after the first round.
    fn measure(
        &mut self,
        run: &Run<'_>,
        measured: &mut Measured,
        rounds: u32,
        table: Option<&Table>,
        out: &mut impl Write,
    ) -> Result<()> {
        let Measured {
            nccl, candidates, ..
        } = measured;
        for round in 0..rounds as usize {
            let running: Vec<usize> = (0..candidates.len())
                .filter(|&at| candidates[at].dropped.is_none())
                .collect();
            let count = running.len() + 1;
            let suffix = if table.is_some() {
                " with the whole table"
            } else {
                ""
            };
            say(
                out,
                &format!(
                    "{run}{suffix}: round {} of {rounds}, runs: {count}",
                    round + 1
                ),
            )?;
            // NCCL's choice has the last index. The first round begins with NCCL's choice, because
            // that run reports the hosts and the sizes, which the forced tables need.
            let first = count - 1 + round * (count / rounds as usize).max(1);
            for at in (0..count).map(|step| (first + step) % count) {
                let Some(&index) = running.get(at) else {
                    self.add(run, nccl, None, out)?;
                    continue;
                };
                let table = match table {
                    Some(table) => table.clone(),
                    None => self.forced(run, nccl, candidates[index].choice)?,
                };
                self.add(run, &mut candidates[index], Some(&table), out)?;
            }
            if round == 0 && table.is_none() {
                verdict::prune(nccl, candidates);
            }
        }
        Ok(())
    }

    /// Makes a table that forces `choice` at all sizes of the sweep. NCCL asks the tuner once for a
    /// group, with the sum of the group's bytes, so each size is multiplied by the number of
    /// collectives in the group.
    fn forced(&self, run: &Run<'_>, nccl: &Record, choice: Option<Choice>) -> Result<Table> {
        let sum = |bytes: u64| (bytes * u64::from(run.members), choice);
        let sizes = verdict::sizes(nccl)
            .into_iter()
            .map(sum)
            .collect::<Vec<_>>();
        Table::new(
            None,
            rows::rows(run.collective, self.facts()?.ranks, &sizes),
        )
        .map_err(anyhow::Error::msg)
    }

    /// Compares the table of all winners with NCCL's choice, and adds the results to `sweeps`.
    fn confirm(&mut self, sweeps: &mut [Sweep<'a>], out: &mut impl Write) -> Result<()> {
        let ranks = self.facts()?.ranks;
        let gain = self.plan.gain;
        let rows: Vec<Row> = sweeps
            .iter()
            .flat_map(|sweep| sweep.proposed(ranks))
            .collect();
        let table = Table::new(None, rows).map_err(anyhow::Error::msg)?;
        for sweep in sweeps.iter_mut() {
            let proposed = sweep.proposed(ranks);
            if proposed.is_empty() {
                continue;
            }
            let [nccl, mut table_record] = self.compare(sweep, 1, &table, FINAL_ROUNDS, out)?;
            if table_record.dropped.is_some() {
                table_record.rounds.clear();
            }
            let lines = verdict::sizes(&nccl).into_iter().map(|bytes| {
                let holds = |row: &&Row| (row.from_bytes..=row.to_bytes).contains(&bytes);
                let row = proposed.iter().find(holds).map(|row| row.choice);
                let without = nccl.times(bytes);
                let with = table_record.times(bytes);
                let row = row.map(|choice| (choice, verdict::compare(&without, &with, gain)));
                Confirmed {
                    bytes,
                    row,
                    differs: verdict::differ(&without, &with, gain),
                }
            });
            let mut lines: Vec<Confirmed> = lines.collect();
            for &members in &self.plan.groups {
                self.check_groups(sweep, members, &table, &mut lines, out)?;
            }
            sweep.confirmation = Some(Confirmation {
                sizes: lines,
                nccl,
                table: table_record,
            });
            show::confirmation(sweep, out)?;
        }
        Ok(())
    }

    /// Marks rows that make groups of `members` collectives clearly slower. Such rows are not
    /// written.
    fn check_groups(
        &mut self,
        sweep: &Sweep<'_>,
        members: u32,
        table: &Table,
        lines: &mut [Confirmed],
        out: &mut impl Write,
    ) -> Result<()> {
        let [nccl, table_record] = self.compare(sweep, members, table, GROUP_ROUNDS, out)?;
        if let Some(Dropped::Failed(reason)) = table_record.dropped {
            let collective = sweep.collective;
            return Err(
                anyhow::Error::msg(reason).context(format!("{collective} in groups of {members}"))
            );
        }
        for each in verdict::sizes(&nccl) {
            let has_row = |line: &&mut Confirmed| {
                line.choice().is_some() && is_of_size(line.bytes, each, members)
            };
            if let Some(Confirmed {
                row: Some((_, finding)),
                ..
            }) = lines.iter_mut().find(has_row)
                && verdict::is_clearly_slower(&nccl.times(each), &table_record.times(each))
            {
                *finding = Finding::SlowInGroups;
            }
        }
        Ok(())
    }

    /// Measures NCCL's choice and the table, and returns their records in this order. In every
    /// second round, the table is measured first.
    fn compare(
        &mut self,
        sweep: &Sweep<'_>,
        members: u32,
        table: &Table,
        rounds: u32,
        out: &mut impl Write,
    ) -> Result<[Record; 2]> {
        let mut measured = Measured {
            members,
            ..Measured::new([None])
        };
        let run = Run {
            collective: sweep.collective,
            program: sweep.program,
            members,
        };
        self.measure(&run, &mut measured, rounds, Some(table), out)?;
        let Measured {
            nccl,
            mut candidates,
            ..
        } = measured;
        Ok([
            nccl,
            candidates.pop().context("the table was not measured")?,
        ])
    }

    /// Makes one more run for a record that is not dropped. A failed run is repeated once: ranks on
    /// other hosts write to the same output, so a line that splits another can make a good run
    /// unreadable. If the repetition fails too, a candidate is dropped, but for NCCL's own choice
    /// this is an error.
    fn add(
        &mut self,
        run: &Run<'_>,
        record: &mut Record,
        table: Option<&Table>,
        out: &mut impl Write,
    ) -> Result<()> {
        if record.dropped.is_some() {
            return Ok(());
        }
        let what = match (record.choice, table) {
            (Some(choice), _) => format!("{run} with {choice}"),
            (None, Some(_)) => format!("{run} with the whole table"),
            (None, None) => format!("{run} with NCCL's choice"),
        };
        let is_first = self.runner.facts.is_none();
        self.watch.doing(&what);
        let mut attempt = || same_sizes(record, self.runner.run(run.program, table, run.members)?);
        let mut measured = attempt();
        if let Err(error) = &measured
            && !output::is_output_closed(error)
        {
            let reason = format!("{error:#}");
            let reason = reason.lines().next().unwrap_or_default();
            say(
                out,
                &format!("{what}: a run failed and is repeated once: {reason}"),
            )?;
            measured = attempt();
        }
        self.watch.step();
        match measured {
            Ok(times) => record.rounds.push(times),
            Err(error) if table.is_some() && !output::is_output_closed(&error) => {
                record.dropped = Some(Dropped::Failed(format!("{error:#}")));
            }
            Err(error) => return Err(error.context(what)),
        }
        if is_first {
            let facts = self.facts()?;
            let minutes = self.started.elapsed().as_secs_f64() * self.max_runs as f64 / 60.0;
            say(out, &facts.used)?;
            say(
                out,
                &format!("hosts: {}, ranks: {}", facts.fingerprint, facts.ranks),
            )?;
            say(
                out,
                &format!(
                    "at most about {} min, estimated from the first run",
                    minutes.ceil()
                ),
            )?;
        }
        Ok(())
    }

    fn facts(&self) -> Result<Facts> {
        self.runner.facts.clone().context("nothing was measured")
    }
}

fn say(out: &mut impl Write, text: &str) -> Result<()> {
    writeln!(out, "# {text}")?;
    Ok(out.flush()?)
}

/// Returns `times`. Fails if their sizes differ from those of an earlier run, because the output of
/// nccl-tests is then incomplete.
fn same_sizes(record: &Record, times: Times) -> Result<Times> {
    if let Some(earlier) = record.rounds.first() {
        ensure!(
            earlier.keys().eq(times.keys()),
            "nccl-tests printed other sizes than in an earlier run (output incomplete?)"
        );
    }
    Ok(times)
}
