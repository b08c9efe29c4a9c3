//! The command line of `nccl-spark report`, checked before anything starts.

use super::parts::{self, Part, Request, Step};
use crate::commands::doctor::hosts::ssh::{self, Ssh};
use crate::commands::doctor::place::Place;
use crate::commands::nccl_tests::gpus::is_gpu;
use crate::date;
use crate::output::{STANDARD_OUTPUT, replacement};
use crate::places::in_path;
use crate::usage::wrong;
use anyhow::{Context, Result, bail};
use clap::Args;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::NamedTempFile;

/// Options of report.
#[derive(Debug, Args)]
pub struct Options {
    /// File to write, which must not be there yet; - for standard output [default:
    /// nccl-spark-report-DATE.json here]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Folder of your nccl-tests programs, or of a build/ that has them: also runs nccl-tests over
    /// the plugin and NCCL's own transport in turns, and the tuner's sweep. Needs a GPU.
    #[arg(long, value_name = "DIR")]
    nccl_tests: Option<PathBuf>,
    /// Hosts that ssh reaches, this one first: also examines each of the others together with this
    /// one, and measures between them.
    #[arg(long, value_name = "A,B,...", value_delimiter = ',')]
    hosts: Vec<String>,
    /// Command that runs a program on another host, for the doctor, as in "ssh -p 2222".
    #[arg(
        long,
        value_name = "COMMAND",
        default_value = "ssh",
        requires = "hosts"
    )]
    ssh: String,
    /// Runs these parts alone.
    #[arg(long, value_name = "PART,...", value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// Leaves these parts out.
    #[arg(long, value_name = "PART,...", value_enum, value_delimiter = ',')]
    skip: Vec<Part>,
    /// Seconds that each part may take [default: those that --dry-run shows]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    part_limit: Option<u64>,
    /// Lists the parts with their commands and limits, and runs none.
    #[arg(long)]
    dry_run: bool,
    /// Reports on the machine whose files were copied below DIR.
    #[arg(long, value_name = "DIR", hide = true, default_value = "/")]
    root: PathBuf,
    /// Program to run in place of this one.
    #[arg(long, value_name = "FILE", hide = true)]
    with_program: Option<PathBuf>,
}

pub(super) struct Plan {
    pub(super) steps: Vec<Step>,
    /// File for the report; - for standard output.
    pub(super) file: PathBuf,
    pub(super) dry_run: bool,
    pub(super) root: PathBuf,
}

impl Options {
    pub fn starts_processes(&self) -> bool {
        !self.dry_run
    }

    /// Returns the plan, whose parts write below `folder`. Fails on a mistake on the command line.
    pub(super) fn plan(
        self,
        program: &Path,
        folder: &Path,
        variables: &[(String, String)],
    ) -> Result<Plan> {
        if !self.hosts.is_empty() {
            ssh::check_hosts(&self.hosts)?;
        }
        // Checks --ssh before the doctor gets it.
        Ssh::new(&self.ssh, "nccl-spark").map_err(wrong)?;
        let nccl_tests = self.nccl_tests.map(|path| {
            let whole = path.canonicalize().ok().filter(|path| path.is_dir());
            whole.ok_or_else(|| wrong(format!("--nccl-tests {}: must be a folder", path.display())))
        });
        let path = variables
            .iter()
            .find(|(name, _)| name == "PATH")
            .map(|(_, value)| value.as_str());
        let request = Request {
            program: self.with_program.unwrap_or_else(|| program.to_owned()),
            folder: folder.to_owned(),
            has_gpu: Place::new(&self.root)
                .names("/dev")
                .iter()
                .any(|name| is_gpu(name)),
            mpirun: in_path("mpirun", path.unwrap_or_default(), Path::is_file),
            nccl_tests: nccl_tests.transpose()?,
            hosts: self.hosts,
            ssh: self.ssh,
        };
        let is_wanted = |part: Part| {
            (self.only.is_empty() || self.only.contains(&part)) && !self.skip.contains(&part)
        };
        let mut steps = parts::all(&request);
        steps.retain(|step| is_wanted(step.part));
        if steps.is_empty() {
            return Err(wrong("--only and --skip leave no part"))?;
        }
        if let Some(seconds) = self.part_limit {
            steps
                .iter_mut()
                .for_each(|step| step.limit = Duration::from_secs(seconds));
        }
        let file = self
            .output
            .unwrap_or_else(|| format!("nccl-spark-report-{}.json", date::today()).into());
        Ok(Plan {
            steps,
            file,
            dry_run: self.dry_run,
            root: self.root,
        })
    }
}

/// Creates the report's file under a temporary name beside `path`, or returns `None` for standard
/// output. Fails if `path` exists or its folder cannot be written, so that the user learns of it
/// before the parts run, which may take hours.
pub(super) fn create_file(path: &Path) -> Result<Option<NamedTempFile>> {
    if path == Path::new("-") {
        return Ok(None);
    }
    if path.symlink_metadata().is_ok() {
        bail!(
            "{} exists and is not overwritten: name another file with --output",
            path.display()
        );
    }
    replacement::beside(path)
        .map(Some)
        .with_context(|| format!("--output {}", path.display()))
}

/// Writes the report to `path` or standard output. Fails if `path` exists by now.
pub(super) fn write(text: &str, file: Option<NamedTempFile>, path: &Path) -> Result<()> {
    let Some(mut file) = file else {
        let mut out = std::io::stdout();
        // With --quiet, `output::standard` would leave out lines that start with #.
        return out
            .write_all(text.as_bytes())
            .and_then(|()| out.flush())
            .context(STANDARD_OUTPUT);
    };
    // The file is readable for all users, because a report is made to be shared.
    let filled = replacement::fill(&mut file, text).and_then(|()| file.as_file().sync_all());
    let kept = filled.and_then(|()| file.persist_noclobber(path).map_err(|error| error.error));
    kept.map(drop)
        .with_context(|| format!("write {}", path.display()))
}
