//! `nccl-spark report`: the facts of this machine, as JSON in one file that its owner can post.
//!
//! `facts` lists every field of the file, and `names` every form of text in it. `machine` reads
//! this machine. `parts` has the commands that measure, `run` starts them, `options` is the command
//! line.
//!
//! Text that comes from the machine is in the file only if it has one of the forms of
//! [`names::Name`] or [`names::Digest`]. If a part fails, hangs or cannot run, the file says so,
//! and the report continues. A part's processes end with the part, except processes that have left
//! its process group. No file is overwritten.

mod facts;
mod machine;
mod names;
mod options;
mod parts;
mod run;
#[cfg(test)]
mod tests;

pub use options::Options;

use crate::commands::doctor::place::Place;
use crate::output::plain;
use crate::{date, interrupt, output};
use anyhow::{Context, Result, anyhow};
use facts::Facts;
use names::Name;
use parts::{Order, State, Step};
use run::Ended;
use serde::Serialize;
use std::io::Write;
use std::path::Path;
use std::time::Duration;
use tempfile::NamedTempFile;

/// Time that the main thread has to write the file after an interrupt.
const WRITE: Duration = Duration::from_secs(60);

/// Content of the file. `schema` increases when a field is removed or changes its meaning.
#[derive(Serialize)]
struct Report {
    schema: u32,
    program: &'static str,
    date: Name,
    interrupted: bool,
    parts: Vec<PartReport>,
}

#[derive(Serialize)]
struct PartReport {
    #[serde(flatten)]
    step: Step,
    #[serde(flatten)]
    ended: Ended,
    /// Null if the part did not run, or left no result.
    facts: Option<Facts>,
}

impl Options {
    /// Writes the report, or prints the steps on a dry run. `program` is this program's file. Fails
    /// on a mistake on the command line, or when the report cannot be written.
    pub fn run(self, program: &Path, variables: &[(String, String)]) -> Result<()> {
        let folder = tempfile::tempdir().context("make a folder for the parts' results")?;
        interrupt::remove_at_exit(folder.path());
        let plan = self.plan(program, folder.path(), variables)?;
        if plan.dry_run {
            let mut out = output::standard();
            plan.steps
                .iter()
                .try_for_each(|step| writeln!(out, "{}: {}", step.title(), intention(step)))?;
            return Ok(());
        }
        let file = options::create_file(&plan.file)?;
        interrupt::leave_the_end_to_the_main_thread(WRITE);
        let place = Place::new(&plan.root);
        let count = plan.steps.len();
        let take = |(at, step): (usize, Step)| {
            part(
                step,
                &place,
                program,
                variables,
                &format!("{}/{count}", at + 1),
            )
        };
        let parts: Vec<PartReport> = plan.steps.into_iter().enumerate().map(take).collect();
        let report = Report {
            schema: 1,
            program: env!("PROGRAM_VERSION"),
            date: Name::new(&date::today()),
            interrupted: interrupt::status().is_some(),
            parts,
        };
        conclude(file, &plan.file, &report)?;
        interrupt::keep_at_exit(folder.path());
        Ok(())
    }
}

/// Describes a step: its command and limit, or the reason why it does not run.
fn intention(step: &Step) -> String {
    let seconds = step.limit.as_secs();
    match &step.order {
        Err(state) => state.text().to_owned(),
        Ok(Order::Read) => format!("at most {seconds} s: reads files, and asks the drivers"),
        Ok(Order::Run {
            program, arguments, ..
        }) => {
            format!(
                "at most {seconds} s: {} {}",
                program.display(),
                arguments.join(" ")
            )
        }
    }
}

fn part(
    step: Step,
    place: &Place,
    program: &Path,
    variables: &[(String, String)],
    at: &str,
) -> PartReport {
    let say = |text: &str| {
        // Progress is optional: a closed terminal must not end the report.
        let _ = writeln!(
            output::error(),
            "# report: {at} {}: {}",
            step.title(),
            plain(text)
        );
    };
    let not_run = |state| {
        (
            Ended::new(state, Duration::ZERO),
            Err(anyhow!(state.text())),
        )
    };
    say(&intention(&step));
    let (ended, json) = match &step.order {
        _ if interrupt::status().is_some() => not_run(State::Interrupted),
        Err(state) => not_run(*state),
        Ok(Order::Read) => {
            let place = place.clone();
            let program = program.to_owned();
            let variables = variables.to_vec();
            run::read(
                move || machine::read(&place, &program, variables),
                step.limit,
            )
        }
        Ok(Order::Run {
            program,
            arguments,
            json,
        }) => run::run(program, arguments, json, step.limit),
    };
    let facts =
        json.and_then(|json| Facts::read(step.part, json).context("unexpected form of its JSON"));
    if let (Err(error), Ok(_)) = (&facts, &step.order) {
        say(&format!("no facts: {}: {error:#}", ended.state.text()));
    }
    PartReport {
        step,
        ended,
        facts: facts.ok(),
    }
}

fn conclude(file: Option<NamedTempFile>, path: &Path, report: &Report) -> Result<()> {
    let place = if file.is_some() {
        path.display().to_string()
    } else {
        "standard output".to_owned()
    };
    options::write(
        &(serde_json::to_string_pretty(report).context("make the JSON")? + "\n"),
        file,
        path,
    )?;
    let without = report
        .parts
        .iter()
        .filter(|part| part.facts.is_none())
        .count();
    let how = if report.interrupted {
        "interrupted; what there is was written"
    } else {
        "written"
    };
    writeln!(
        output::error(),
        "# report: {how} to {place}: {} parts, {without} of them without facts\n\
         # It has numbers, versions and names of devices, and no text of yours. Look it through before you post it.",
        report.parts.len()
    )?;
    Ok(())
}
