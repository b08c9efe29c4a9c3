//! `nccl-spark nccl-tests`: the user's own build of nccl-tests over this plugin, and over NCCL's networks in turns.
//!
//! Promises: the plugin's environment is set up and shown; a run counts only if NCCL's own log says that every channel went
//! over the network that was asked for; a program's table is read, never recomputed. Does not build or fetch anything.

pub mod options;
pub mod ranks;
mod show;
pub mod table;

use crate::bench::plot;
use crate::fabric::Fabric;
use crate::scene::Scene;
use crate::scene::network::Used;
use anyhow::{Result, ensure};
use options::Plan;
use show::Outcome;
use std::io::Write;
use std::path::Path;
use table::Table;

/// Runs the plan; false when data was wrong. `own` is this program's file, `lookup` gives the value of an environment
/// variable.
///
/// # Errors
/// When the first network could not be measured.
pub fn run(plan: &Plan, own: &Path, lookup: &dyn Fn(&str) -> Option<String>, out: &mut impl Write) -> Result<bool> {
    if let Some(folder) = &plan.plot {
        plot::prepare(folder)?;
    }
    let (ranks, is_here) = match &plan.place {
        options::Place::Here(ranks) => (*ranks, true),
        options::Place::Hosts(_) => (1, false),
    };
    let scene = Scene::set(&plan.setting, ranks, lookup)?;
    writeln!(
        out,
        "# nccl-spark {}: {} {}",
        env!("CARGO_PKG_VERSION"),
        plan.program.display(),
        plan.arguments.join(" ")
    )?;
    writeln!(out, "# fabric: {}", scene.fabric.about)?;
    let mut outcomes: Vec<Outcome> = plan.networks.iter().map(|network| Outcome::new(*network)).collect();
    for _ in 0..plan.rounds {
        for (number, outcome) in outcomes.iter_mut().enumerate() {
            if outcome.failure.is_some() {
                continue;
            }
            let environment = scene.environment(outcome.network, is_here, lookup)?;
            let measured = once(plan, &scene, own, &environment, outcome, out);
            match measured {
                Ok(()) => {}
                Err(error) if crate::output::is_unread(&error) => return Err(error),
                Err(error) if number == 0 => return Err(error.context(outcome.network.name())),
                Err(error) => {
                    writeln!(out, "# {}: not measured: {error:#}", outcome.network.name())?;
                    outcome.failure = Some(format!("{error:#}"));
                }
            }
        }
    }
    conclude(plan, &scene.fabric, &outcomes, out)
}

/// One run over one network.
fn once(
    plan: &Plan,
    scene: &Scene,
    own: &Path,
    environment: &[(String, String)],
    outcome: &mut Outcome,
    out: &mut impl Write,
) -> Result<()> {
    let network = outcome.network;
    let is_first = outcome.rounds.is_empty();
    if is_first {
        let shown = environment.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>();
        writeln!(out, "# {}: {}", network.name(), shown.join(" "))?;
    }
    // One network: the program's own output is what is wanted. Several: their table.
    let alone = plan.networks.len() == 1;
    let (mut table, mut used, mut last) = (Table::default(), Used::default(), String::new());
    let end = ranks::run(plan, &scene.fabric, environment, own, |line| {
        scene.log(network.name(), line)?;
        let is_log = used.note(line);
        let is_row = !is_log && table.read(line)?;
        if !is_log && !is_row && !line.trim().is_empty() {
            line.clone_into(&mut last);
        }
        if alone && !is_log {
            writeln!(out, "{line}")?;
        }
        Ok(())
    })?;
    outcome.version = outcome.version.take().or_else(|| used.version.clone());
    ranks::check(end, plan, used.complaints(), &last)?;
    ensure!(!table.rows.is_empty(), "the program printed no table; its last words: {last}");
    let words = used.judge(network, plan.setting.abi)?;
    if is_first {
        let version = outcome.version.as_deref().unwrap_or("of unknown version");
        writeln!(out, "# {}: NCCL {version} used {words}", network.name())?;
    }
    outcome.used = Some(words);
    outcome.rounds.push(table.rows);
    Ok(())
}

fn conclude(plan: &Plan, fabric: &Fabric, outcomes: &[Outcome], out: &mut impl Write) -> Result<bool> {
    if outcomes.len() > 1 {
        writeln!(
            out,
            "# medians of {} round(s) in turns, out of place; ratios by time: above 1 the first is faster",
            plan.rounds
        )?;
        show::table(out, outcomes)?;
    }
    show::json(plan, &fabric.about, outcomes)?;
    show::picture(plan, &fabric.about, outcomes)?;
    let mut right = true;
    for outcome in outcomes.iter().filter(|outcome| !outcome.rounds.is_empty()) {
        let name = outcome.network.name();
        match outcome.wrong() {
            Some(0.0) => writeln!(out, "# {name}: 0 wrong")?,
            None => writeln!(out, "# {name}: nothing was checked")?,
            Some(wrong) => {
                right = false;
                writeln!(out, "# {name}: {wrong} WRONG elements")?;
            }
        }
    }
    Ok(right)
}
