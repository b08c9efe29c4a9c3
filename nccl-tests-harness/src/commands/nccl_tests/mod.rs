//! `nccl-spark nccl-tests`: runs the user's own build of nccl-tests over this plugin, or in turns
//! over it and NCCL's own networks.
//!
//! The command sets the plugin's environment and shows it. A run counts only if NCCL's own log says
//! that every channel uses the requested network. All figures come from the program's own table.
//! The command builds and downloads nothing.

pub mod gpus;
mod log_text;
pub mod mpirun;
pub mod options;
pub mod printed_table;
pub mod run;
mod show;

use crate::fabric::Fabric;
use crate::output::plot;
use crate::output::report::Sink;
use crate::output::watch::Watch;
use crate::scene::Scene;
use crate::scene::network::{Channels, Network, Used};
use anyhow::{Result, ensure};
use options::{Call, Place, Plan};
use printed_table::Row;
use show::Outcome;
use std::io::Write;
use std::path::Path;

/// Runs the plan. Returns false if data was wrong. `own` is this program's file. Fails when the
/// first network cannot be measured, or the results cannot be written.
pub fn run(
    plan: &Plan,
    own: &Path,
    lookup: &dyn Fn(&str) -> Option<String>,
    out: &mut impl Write,
) -> Result<bool> {
    let sink = plan.json.as_ref().map(Sink::open).transpose()?;
    if let Some(folder) = &plan.plot {
        plot::prepare(folder)?;
    }
    let scene = Scene::set(
        &plan.conditions.setting,
        plan.conditions.place.ranks_here(),
        lookup,
    )?;
    let (mut all, mut reports): (Vec<(&Path, Vec<Outcome>)>, _) = (Vec::new(), Vec::new());
    for program in &plan.programs {
        let outcomes = measure(plan, program, &scene, own, lookup, out)?;
        conclude(plan, program, &scene.fabric, &outcomes, out)?;
        reports.push(show::json(plan, program, &scene.fabric.about, &outcomes));
        all.push((program, outcomes));
    }
    if all.len() > 1 {
        show::slowest(
            out,
            &all.iter()
                .map(|(program, outcomes)| (*program, &outcomes[..]))
                .collect::<Vec<_>>(),
        )?;
    }
    if let Some(sink) = sink {
        match reports.as_slice() {
            [report] => sink.write(report)?,
            reports => sink.write(&reports)?,
        }
    }
    Ok(!all
        .iter()
        .flat_map(|(_, outcomes)| outcomes)
        .any(|outcome| outcome.wrong().is_some_and(|wrong| wrong > 0.0)))
}

fn measure(
    plan: &Plan,
    program: &Path,
    scene: &Scene,
    own: &Path,
    lookup: &dyn Fn(&str) -> Option<String>,
    out: &mut impl Write,
) -> Result<Vec<Outcome>> {
    let is_here = matches!(plan.conditions.place, Place::Here(_));
    let arguments: Vec<String> = plan.arguments.iter().map(|run| run.join(" ")).collect();
    writeln!(
        out,
        "# nccl-spark {}: {} {}",
        env!("CARGO_PKG_VERSION"),
        program.display(),
        arguments.join(", then ")
    )?;
    writeln!(out, "# fabric: {}", scene.fabric.about)?;
    let mut outcomes = outcomes(&plan.networks);
    let watch = Watch::start("runs", || u64::from(plan.rounds) * outcomes.len() as u64);
    let out = &mut watch.over(out);
    // The sizes of the first table. Every later table must have the same sizes.
    let mut sizes = None;
    for round in 0..plan.rounds as usize {
        for number in turns(round, outcomes.len()) {
            let outcome = &mut outcomes[number];
            if outcome.failure.is_some() {
                continue;
            }
            let environment = scene.environment(outcome.network, is_here, lookup)?;
            let measured = once(
                plan,
                program,
                (scene, own),
                &environment,
                outcome,
                (&mut *out, &watch),
            );
            watch.step();
            match measured.and_then(|rows| keep(rows, outcome, &mut sizes)) {
                Ok(()) => {}
                Err(error) if crate::output::is_output_closed(&error) => return Err(error),
                Err(error) if number == 0 => {
                    return Err(error.context(outcome.name()));
                }
                Err(error) => {
                    writeln!(out, "# {}: not measured: {error:#}", outcome.name())?;
                    outcome.failure = Some(format!("{error:#}"));
                }
            }
        }
    }
    watch.end();
    Ok(outcomes)
}

fn outcomes(networks: &[Network]) -> Vec<Outcome> {
    let mut outcomes: Vec<Outcome> = networks
        .iter()
        .map(|network| Outcome::new(*network))
        .collect();
    if [Network::Spark, Network::SparkUntuned]
        .iter()
        .all(|network| networks.contains(network))
    {
        outcomes.push(Outcome::control());
    }
    outcomes
}

/// Returns the order of the `count` runs in a round. Each round starts with another run, so that no
/// run always has the best or the worst place.
fn turns(round: usize, count: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |step| (round + step) % count)
}

/// Measures one table over one network, with a run for each range of sizes.
fn once(
    plan: &Plan,
    program: &Path,
    (scene, own): (&Scene, &Path),
    environment: &[(String, String)],
    outcome: &mut Outcome,
    (out, watch): (&mut impl Write, &Watch),
) -> Result<Vec<Row>> {
    let network = outcome.network;
    let name = outcome.name();
    let is_first = outcome.rounds.is_empty();
    if is_first {
        let shown = environment
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect::<Vec<_>>();
        writeln!(out, "# {name}: {}", shown.join(" "))?;
    }
    // For one network, the program's own output is shown; for several networks, one table for all.
    let alone = plan.networks.len() == 1;
    let mut rows = Vec::new();
    let mut last = None;
    for arguments in &plan.arguments {
        let call = Call {
            program,
            arguments,
            conditions: &plan.conditions,
        };
        let mut used = Used::default();
        let measured = run::run(
            &call,
            scene,
            environment,
            (own, name),
            &mut used,
            |_, shown| {
                watch.doing(name);
                if let Some(text) = shown.filter(|_| alone) {
                    writeln!(out, "{}", text.trim_end())?;
                }
                Ok(())
            },
        );
        outcome.version = outcome.version.take().or_else(|| used.version.clone());
        rows.extend(measured?);
        last = Some((used.judge(network)?, used));
    }
    rows.sort_by_key(|row| row.bytes);
    let Some((words, used)) = last else {
        return Ok(rows);
    };
    if is_first {
        let version = outcome.version.as_deref().unwrap_or("of unknown version");
        writeln!(out, "# {name}: NCCL {version} used {words}")?;
        let channels = used
            .channels()
            .map_or("NCCL's log does not say which channels it chose", |c| {
                c.text.as_str()
            });
        writeln!(out, "# {name}: {channels}")?;
    }
    outcome.used = Some(words);
    outcome.channels = used.channels().map(Channels::counts);
    Ok(rows)
}

/// Adds a table to the outcome of its network. Fails if the table has other sizes than the first
/// table: all runs measure the same sizes, so one of the two tables was read incompletely.
fn keep(rows: Vec<Row>, outcome: &mut Outcome, sizes: &mut Option<Vec<u64>>) -> Result<()> {
    let found: Vec<u64> = rows.iter().map(|row| row.bytes).collect();
    let expected = sizes.get_or_insert_with(|| found.clone());
    ensure!(
        found == *expected,
        "its table has the sizes {found:?}, an earlier one {expected:?}"
    );
    outcome.rounds.push(rows);
    Ok(())
}

fn conclude(
    plan: &Plan,
    program: &Path,
    fabric: &Fabric,
    outcomes: &[Outcome],
    out: &mut impl Write,
) -> Result<()> {
    if outcomes.len() > 1 {
        writeln!(
            out,
            "# median time and busbw out of place, rounds in turns: {}",
            plan.rounds
        )?;
        let first = outcomes[0].name();
        writeln!(
            out,
            "# time ratio: the line's time / that of {first}; ~: the ranges overlap, which is no difference"
        )?;
        if outcomes.iter().any(|outcome| outcome.is_control) {
            writeln!(
                out,
                "# control: spark-untuned a second time in each round; its ratio to spark-untuned shows the noise"
            )?;
        }
        show::table(out, outcomes)?;
        show::slowest(out, &[(program, outcomes)])?;
    }
    show::picture(plan, program, &fabric.about, outcomes)?;
    for outcome in outcomes.iter().filter(|outcome| !outcome.rounds.is_empty()) {
        let name = outcome.name();
        match outcome.wrong() {
            Some(0.0) => writeln!(out, "# {name}: 0 wrong")?,
            None => writeln!(out, "# {name}: nothing was checked")?,
            Some(wrong) => writeln!(out, "# {name}: {wrong} WRONG elements")?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_candidate_is_first_in_turn() {
        let orders: Vec<Vec<usize>> = (0..4).map(|round| turns(round, 3).collect()).collect();
        assert_eq!(orders, [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]);
    }

    #[test]
    fn the_control_is_there_where_the_tuner_is_compared() {
        let names = |networks: &[Network]| {
            outcomes(networks)
                .iter()
                .map(Outcome::name)
                .collect::<Vec<_>>()
        };
        assert_eq!(names(&[Network::Spark]), ["spark"]);
        assert_eq!(
            names(&[Network::SparkUntuned, Network::Ib]),
            ["spark-untuned", "ib"]
        );
        let expected = ["spark-untuned", "ib", "spark", "control"];
        assert_eq!(
            names(&[Network::SparkUntuned, Network::Ib, Network::Spark]),
            expected
        );
    }
}
