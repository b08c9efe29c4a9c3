//! Results as JSON, for programs: the option that asks for them, where they go, and how every
//! report of a run ends.

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

/// The place of the JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// Standard output, which then has nothing else on it.
    Output,
    /// A file.
    File(PathBuf),
}

/// A target that was found usable.
pub(crate) enum Sink {
    /// Standard output.
    Output,
    /// A file that was there before. It keeps its content until a report is written.
    Existing(File, PathBuf),
    /// A file that is made when a report is written.
    New(PathBuf),
}

/// The end of every report of a run.
#[derive(Serialize)]
struct Ended<'a, R> {
    #[serde(flatten)]
    report: &'a R,
    /// True when the run finished and all data was right.
    ok: bool,
    /// The error that ended the run.
    error: Option<String>,
}

impl From<PathBuf> for Target {
    /// Takes `-` for standard output.
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

/// Lets `lead` do the run, print [`beside`] the JSON and fill in `report`. Writes the report to
/// `json`, with the end of the run.
///
/// # Errors
/// Errors of `lead`, or a report that cannot be written.
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
        sink.write(&Ended { report: &report, ok, error })?;
    }
    outcome
}

impl Sink {
    /// Finds out before the run whether a report can be written. Leaves no file behind: a run may
    /// end without a report.
    ///
    /// # Errors
    /// When the file cannot be written, which is a mistake on the command line.
    pub fn open(target: &Target) -> Result<Self, clap::Error> {
        let Target::File(path) = target else { return Ok(Self::Output) };
        let file = match OpenOptions::new().write(true).open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                File::create_new(path).and_then(|_| fs::remove_file(path)).map(|()| Self::New(path.clone()))
            }
            other => other.map(|file| Self::Existing(file, path.clone())),
        };
        file.map_err(|error| wrong(format!("--json {}: {error}", path.display())))
    }

    /// Writes a report.
    ///
    /// # Errors
    /// When it cannot be written. A new file does not stay behind in part.
    pub fn write(self, report: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string_pretty(report).context("make the JSON")? + "\n";
        let (outcome, path) = match self {
            Self::Output => {
                let mut out = output::standard();
                return Ok(out.write_all(text.as_bytes()).and_then(|()| out.flush())?);
            }
            Self::Existing(mut file, path) => {
                // A pipe has no length.
                let is_regular = file.metadata().map(|metadata| metadata.is_file());
                let cut = is_regular.and_then(|is_regular| if is_regular { file.set_len(0) } else { Ok(()) });
                (cut.and_then(|()| file.write_all(text.as_bytes())), path)
            }
            Self::New(path) => {
                let outcome = fs::write(&path, text);
                if outcome.is_err() {
                    // The error that follows is the one that matters.
                    let _ = fs::remove_file(&path);
                }
                (outcome, path)
            }
        };
        outcome.with_context(|| format!("--json {}", path.display()))
    }
}
