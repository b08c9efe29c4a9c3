//! Reports: results of commands as JSON, for programs. This file has the option `--json`, the
//! destination of a report, and the fields that end every report.

use crate::output;
use crate::usage::{self, wrong};
use anyhow::{Context, Result};
use clap::Args;
use clap::builder::{PathBufValueParser, TypedValueParser};
use serde::Serialize;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// The option `--json` of every command whose result is one report.
#[derive(Debug, Clone, Default, Args)]
pub struct JsonOption {
    /// Prints the result as JSON and all else to standard error, or writes the JSON to FILE; - as
    /// FILE is standard output.
    #[arg(id = "json", long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-",
          value_parser = PathBufValueParser::new().map(Target::from))]
    pub target: Option<Target>,
}

/// Destination of the JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// Standard output, which then has nothing else on it.
    Output,
    /// A file.
    File(PathBuf),
}

pub(crate) enum Sink {
    Output,
    /// A file that existed before. It keeps its content until a report is written.
    Existing(File, PathBuf),
    /// A file that is created when a report is written.
    New(PathBuf),
}

#[derive(Serialize)]
struct Ended<'a, R> {
    #[serde(flatten)]
    report: &'a R,
    /// True if the run finished and all data was right.
    ok: bool,
    error: Option<String>,
}

impl From<PathBuf> for Target {
    fn from(path: PathBuf) -> Self {
        if path == Path::new("-") {
            Self::Output
        } else {
            Self::File(path)
        }
    }
}

/// Returns standard output for tables, or standard error if the JSON goes to standard output.
pub fn beside(json: Option<&Target>) -> Box<dyn Write> {
    match json {
        Some(Target::Output) => Box::new(output::error()),
        _ => Box::new(output::standard()),
    }
}

/// Runs `lead`, which fills in `report` and prints to the output that [`beside`] returns. Then
/// writes the report to `json`, with the outcome of the run. Returns the result of `lead`.
///
/// # Errors
/// Fails when `lead` fails, or the report cannot be written.
pub fn of_run<R: Serialize>(
    json: Option<&Target>,
    mut report: R,
    lead: impl FnOnce(Box<dyn Write>, &mut R) -> Result<bool>,
) -> Result<bool> {
    let sink = json.map(Sink::open).transpose()?;
    let outcome = lead(beside(json), &mut report);
    if let Some(sink) = sink {
        let ok = matches!(outcome, Ok(true));
        let error = outcome.as_ref().err().map(usage::text);
        sink.write(&Ended {
            report: &report,
            ok,
            error,
        })?;
    }
    outcome
}

impl Sink {
    /// Checks before the run that a report can be written. The check leaves no new file behind,
    /// because a run may end without a report. An unusable file is a mistake on the command line.
    pub fn open(target: &Target) -> Result<Self, clap::Error> {
        let Target::File(path) = target else {
            return Ok(Self::Output);
        };
        let file = match OpenOptions::new().write(true).open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => File::create_new(path)
                .and_then(|_| fs::remove_file(path))
                .map(|()| Self::New(path.clone())),
            other => other.map(|file| Self::Existing(file, path.clone())),
        };
        file.map_err(|error| wrong(format!("--json {}: {error}", path.display())))
    }

    /// Writes a report. If that fails, no part of a new file stays.
    pub fn write(self, report: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string_pretty(report).context("make the JSON")? + "\n";
        let (outcome, path) = match self {
            Self::Output => {
                let mut out = output::standard();
                return Ok(out.write_all(text.as_bytes()).and_then(|()| out.flush())?);
            }
            Self::Existing(mut file, path) => {
                // A pipe cannot be truncated.
                let is_regular = file.metadata().map(|metadata| metadata.is_file());
                let cut = is_regular
                    .and_then(|is_regular| if is_regular { file.set_len(0) } else { Ok(()) });
                (cut.and_then(|()| file.write_all(text.as_bytes())), path)
            }
            Self::New(path) => {
                let outcome = fs::write(&path, text);
                if outcome.is_err() {
                    // Only the error of the write is reported.
                    let _ = fs::remove_file(&path);
                }
                (outcome, path)
            }
        };
        outcome.with_context(|| format!("--json {}", path.display()))
    }
}
