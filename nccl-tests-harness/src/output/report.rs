//! Results as JSON, for programs: where they go, and how every report of a run ends.

use crate::output;
use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Where it goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// Standard output, which then has nothing else on it.
    Output,
    /// A file.
    File(PathBuf),
}

/// The end of every report of a run.
#[derive(Serialize)]
struct Ended<'a, R> {
    #[serde(flatten)]
    report: &'a R,
    /// Whether the run finished and all data was right.
    ok: bool,
    /// Why it did not finish.
    error: Option<String>,
}

impl From<PathBuf> for Target {
    /// As `--json` has it.
    fn from(path: PathBuf) -> Self {
        if path == Path::new("-") { Self::Output } else { Self::File(path) }
    }
}

/// Where tables go: standard output, or standard error where the JSON goes to standard output.
pub fn beside(json: Option<&Target>) -> Box<dyn Write> {
    match json {
        Some(Target::Output) => Box::new(output::error()),
        _ => Box::new(output::standard()),
    }
}

/// Lets `lead` do the run, print [`beside`] the JSON and fill in `report`, and writes that to `json` with how the run ended.
///
/// # Errors
/// Those of `lead`, or when the report cannot be written.
pub fn of_run<R: Serialize>(
    json: Option<&Target>,
    mut report: R,
    lead: impl FnOnce(Box<dyn Write>, &mut R) -> Result<bool>,
) -> Result<bool> {
    let file = json.map(open).transpose()?;
    let outcome = lead(beside(json), &mut report);
    if let Some(file) = file {
        let ok = matches!(outcome, Ok(true));
        let error = outcome.as_ref().err().map(|error| format!("{error:#}"));
        write(&Ended { report: &report, ok, error }, file)?;
    }
    outcome
}

/// Opens the file before the run, so that an unusable one is an error then and not after it.
pub fn open(target: &Target) -> Result<Box<dyn Write>> {
    match target {
        Target::Output => Ok(Box::new(output::standard())),
        Target::File(path) => {
            let file = File::create(path).with_context(|| format!("--json {}", path.display()))?;
            Ok(Box::new(file))
        }
    }
}

/// Writes a report into a file, if there is one.
pub fn write_file(report: &Value, file: Option<&Path>) -> Result<()> {
    let Some(path) = file else { return Ok(()) };
    let text = serde_json::to_string_pretty(report)? + "\n";
    fs::write(path, text).with_context(|| format!("--json {}", path.display()))
}

/// Writes a report to what [`open`] opened.
pub fn write(report: &impl Serialize, mut out: impl Write) -> Result<()> {
    serde_json::to_writer_pretty(&mut out, report).context("write the report")?;
    writeln!(out).context("write the report")?;
    out.flush().context("write the report")
}
