//! A run as JSON, for programs.

use crate::collective_table::Row;
use crate::device::Network;
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

/// A run of a collective. Sizes are in bytes, times in microseconds, bandwidths in GB/s (10^9 bytes a second).
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// This program's version.
    pub version: &'static str,
    /// The collective's name.
    pub collective: &'static str,
    /// How many ranks there are.
    pub ranks: usize,
    /// Connections from each rank to each that it sends to.
    pub channels: usize,
    /// The type of an element.
    pub element: &'static str,
    /// The operation on elements.
    pub operation: &'static str,
    /// The root of a broadcast; -1 elsewhere.
    pub root: i32,
    /// Whether the send buffer is the receive buffer.
    pub in_place: bool,
    /// Iterations before the timed ones.
    pub warmup_iters: u32,
    /// Timed iterations.
    pub iters: u32,
    /// Checked iterations after the timed ones.
    pub check_iters: u32,
    /// The fabric: `soft` or `verbs`.
    pub fabric: &'static str,
    /// The same in words.
    pub fabric_text: String,
    /// The network as NCCL would see it, by rank.
    pub networks: Vec<Network>,
    /// What the plugin logged about its connections, by rank.
    pub connections: Vec<Vec<String>>,
    /// One for each size.
    pub rows: Vec<Measured>,
    /// The mean of all sizes.
    pub average_busbw_gb_s: Option<f64>,
}

/// One size.
#[derive(Debug, Serialize)]
pub struct Measured {
    /// Its row of the table.
    #[serde(flatten)]
    pub row: Row,
    /// A description of the first wrong byte of each rank that has one.
    pub first_wrong: Vec<String>,
}

impl Report {
    /// Adds a size.
    pub fn add(&mut self, row: Row, first_wrong: Vec<String>) {
        self.rows.push(Measured { row, first_wrong });
        let sum: f64 = self.rows.iter().map(|size| size.row.bandwidth.busbw).sum();
        self.average_busbw_gb_s = Some(sum / self.rows.len() as f64);
    }
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
