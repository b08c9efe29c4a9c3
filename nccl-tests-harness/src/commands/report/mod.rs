//! `nccl-spark report`: what this machine has and does, in one file that its owner can post.
//!
//! `options` is the command line, `parts` what is gathered and by which commands, `run` starts them, `known` reads what tells whose
//! machine it is, `scrub` leaves that out, `file` is how the report reads.
//!
//! Promises: a part that fails, hangs or cannot be run is named in the file, and the report goes on; no process of a part outlives it; no
//! file is overwritten; nothing is written in which the last look (`scrub/check.rs`) still finds something known.

mod file;
mod known;
/// The doctor's own code, which is private there: how NCCL's files are found and read.
#[path = "../doctor/environment/source.rs"]
#[allow(dead_code, clippy::duplicate_mod)]
mod nccls_files;
mod options;
mod parts;
mod run;
mod scrub;
mod versions;

pub use options::Options;

use crate::commands::doctor::place::Place;
use crate::{interrupt, output};
use anyhow::{Context, Result, bail};
use options::Target;
use parts::{Order, Part};
use run::{Done, Fate};
use scrub::Scrubber;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

/// How long the file may take to be scrubbed and written once the report was interrupted.
const WRITE: Duration = Duration::from_secs(60);

impl Options {
    /// Gathers and writes, or prints what it would do. `program` is this program's file, `variables` the environment.
    ///
    /// # Errors
    /// A mistake on the command line, or a report that cannot be written.
    pub fn run(self, program: &Path, variables: &[(String, String)]) -> Result<()> {
        let folder = tempfile::tempdir().context("make a folder for the parts' results")?;
        interrupt::remove_at_exit(folder.path());
        let plan = self.plan(program, folder.path(), variables)?;
        let place = Place::new(&plan.root);
        if plan.dry_run {
            write!(output::standard(), "{}", file::dry_run(&plan.parts, folder.path()))?;
            return Ok(());
        }
        let target = plan.target.open()?;
        interrupt::leave_the_end_to_the_main_thread(WRITE);
        let mut done: Vec<Done> = Vec::new();
        for (at, part) in plan.parts.iter().enumerate() {
            let result = one(part, &place, program, (at + 1, plan.parts.len()));
            done.push(result);
        }
        let known = known::known(&place, &plan.hosts, variables);
        let was_interrupted = interrupt::status().is_some();
        let text = file::text(&plan.parts, &done, folder.path(), plan.keep, was_interrupted);
        let mut scrubber = Scrubber::new(known, plan.keep);
        let text = scrubber.scrub(&text);
        let survivors = scrubber.survivors(&text);
        if !survivors.is_empty() {
            bail!(
                "the report is not written: {} of this machine is still in it after all was left out that is known; --skip the part that \
                 has it (each part's output: run its command, as --dry-run lists them)",
                survivors.join(", ")
            );
        }
        conclude(target, &text, &done, was_interrupted)?;
        interrupt::keep_at_exit(folder.path());
        Ok(())
    }
}

/// Runs a part, and says so.
fn one(part: &Part, place: &Place, program: &Path, (at, count): (usize, usize)) -> Done {
    let say = |text: String| {
        // Nobody reads it when this fails; the file is what counts.
        let _ = writeln!(output::error(), "# report: {at}/{count} {}: {text}", part.title);
    };
    if interrupt::status().is_some() {
        return Done::not_run("the report was interrupted before".to_owned());
    }
    if let Order::Not(why) = &part.order {
        say(format!("not run: {why}"));
        return Done::not_run(why.clone());
    }
    say(format!("at most {} s", part.limit.as_secs()));
    let done = match &part.order {
        Order::Versions => run::versions(|| versions::text(place, program)),
        Order::Run { program, arguments, .. } => run::run(program, arguments, part.limit),
        Order::Not(why) => Done::not_run(why.clone()),
    };
    if !matches!(done.fate, Fate::Good) {
        say(done.reason());
    }
    done
}

fn conclude(target: Target, text: &str, done: &[Done], was_interrupted: bool) -> Result<()> {
    let place = target.write(text)?;
    let without = done.iter().filter(|one| !matches!(one.fate, Fate::Good)).count();
    let mut err = output::error();
    let how = if was_interrupted { "interrupted; what there is was written" } else { "written" };
    let place = place.map_or("to standard output".to_owned(), |path| format!("to {}", path.display()));
    writeln!(err, "# report: {how} {place}: {} parts, {without} of them failed or not run", done.len())?;
    writeln!(err, "# Look it through before you post it.")?;
    Ok(())
}
