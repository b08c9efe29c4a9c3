//! The command line of `nccl-spark report`, checked before anything starts.

use super::parts::{self, Asked, Name, Part};
use super::scrub::Keep;
use crate::commands::doctor::place::Place;
use crate::commands::doctor::ssh;
use crate::commands::nccl_tests::gpus::is_gpu;
use crate::date;
use crate::output::{STANDARD_OUTPUT, replacement};
use crate::usage::wrong;
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::NamedTempFile;

/// Options of report.
#[derive(Debug, Args)]
pub struct Options {
    /// File to write, which must not be there yet; - for standard output [default: nccl-spark-report-DATE.md here]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Folder of your nccl-tests programs, or of a build/ that has them: also runs nccl-tests over the plugin and NCCL's own transport in
    /// turns, and the tuner's sweep. Needs a GPU.
    #[arg(long, value_name = "DIR")]
    nccl_tests: Option<PathBuf>,
    /// Hosts that ssh reaches, this one first: also examines each of the others together with this one, and measures between them.
    #[arg(long, value_name = "A,B,...", value_delimiter = ',')]
    hosts: Vec<String>,
    /// Command that runs a program on another host, for the doctor, as in "ssh -p 2222".
    #[arg(long, value_name = "COMMAND", default_value = "ssh", requires = "hosts")]
    ssh: String,
    /// Runs these parts alone.
    #[arg(long, value_name = "PART,...", value_enum, value_delimiter = ',')]
    only: Vec<Name>,
    /// Leaves these parts out.
    #[arg(long, value_name = "PART,...", value_enum, value_delimiter = ',')]
    skip: Vec<Name>,
    /// Seconds that each part may take, or one part, as in tune=7200; may be given more than once.
    #[arg(long, value_name = "[PART=]SECONDS", value_parser = parse_limit)]
    part_limit: Vec<(Option<Name>, u64)>,
    /// Writes names of hosts and users, and e-mail addresses, as they are.
    #[arg(long)]
    keep_names: bool,
    /// Writes IP and hardware addresses, GIDs and GUIDs as they are.
    #[arg(long)]
    keep_addresses: bool,
    /// Writes serial numbers as they are.
    #[arg(long)]
    keep_serials: bool,
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

/// What to do.
pub(super) struct Plan {
    pub(super) parts: Vec<Part>,
    pub(super) target: Wanted,
    pub(super) hosts: Vec<String>,
    pub(super) keep: Keep,
    pub(super) dry_run: bool,
    pub(super) root: PathBuf,
}

/// Where the report is to go.
pub(super) struct Wanted(Option<PathBuf>);

/// Where it goes: made before anything runs, so that an unusable place is an error then and not after an hour.
pub(super) enum Target {
    Output,
    /// The file under another name, beside its place.
    File(NamedTempFile, PathBuf),
}

const MOST_LIMIT_S: u64 = 86_400;
/// As many as the doctor takes.
const MOST_HOSTS: usize = 16;

fn parse_limit(text: &str) -> Result<(Option<Name>, u64), String> {
    let allowed = format!("must be SECONDS or PART=SECONDS, seconds from 1 to {MOST_LIMIT_S}");
    let (part, seconds) = match text.split_once('=') {
        Some((part, seconds)) => {
            let names: Vec<String> = Name::value_variants().iter().map(|name| name.word()).collect();
            let part = Name::from_str(part, false).map_err(|_| format!("{allowed}; parts: {}", names.join(", ")))?;
            (Some(part), seconds)
        }
        None => (None, text),
    };
    let seconds = seconds.parse().ok().filter(|seconds| (1..=MOST_LIMIT_S).contains(seconds)).ok_or(allowed)?;
    Ok((part, seconds))
}

impl Options {
    /// Whether processes are started that must not outlive this one.
    pub fn starts_processes(&self) -> bool {
        !self.dry_run
    }

    /// What to do; the parts' results go below `folder`.
    ///
    /// # Errors
    /// A mistake on the command line.
    pub(super) fn plan(self, program: &Path, folder: &Path, variables: &[(String, String)]) -> Result<Plan> {
        for (at, host) in self.hosts.iter().enumerate() {
            ssh::check_host(host).map_err(|allowed| wrong(format!("--hosts: {allowed}")))?;
            if self.hosts[..at].contains(host) {
                return Err(wrong(format!("--hosts: {host} is named twice")))?;
            }
        }
        if self.hosts.len() == 1 || self.hosts.len() > MOST_HOSTS {
            return Err(wrong(format!(
                "--hosts: {} hosts; must be 2 to {MOST_HOSTS}, this one first",
                self.hosts.len()
            )))?;
        }
        if self.ssh.split_whitespace().next().is_none() {
            return Err(wrong("--ssh: a command, as in \"ssh -p 22\""))?;
        }
        let nccl_tests = match &self.nccl_tests {
            None => None,
            Some(path) => {
                let whole = path.canonicalize().ok().filter(|path| path.is_dir());
                Some(whole.ok_or_else(|| wrong(format!("--nccl-tests {}: must be a folder", path.display())))?)
            }
        };
        let program = self.with_program.clone().unwrap_or_else(|| program.to_owned());
        let path = variables.iter().find(|(name, _)| name == "PATH").map(|(_, value)| value.clone());
        let place = Place::new(&self.root);
        let has_gpu = place.names("/dev").iter().any(|name| is_gpu(name));
        let asked = Asked {
            program,
            folder: folder.to_owned(),
            root: Some(self.root.clone()).filter(|root| root != Path::new("/")),
            has_gpu,
            mpirun: parts::in_path("mpirun", path.as_deref()),
            nccl_tests,
            hosts: self.hosts.clone(),
            ssh: self.ssh.clone(),
        };
        let is_wanted = |name: Name| (self.only.is_empty() || self.only.contains(&name)) && !self.skip.contains(&name);
        let mut parts = parts::all(&asked);
        parts.retain(|part| is_wanted(part.name));
        if parts.is_empty() {
            return Err(wrong("--only and --skip leave no part"))?;
        }
        for part in &mut parts {
            // The last one counts; that of one part before that of all.
            let of_all = self.part_limit.iter().rev().find(|(name, _)| name.is_none());
            let own = self.part_limit.iter().rev().find(|(name, _)| *name == Some(part.name));
            if let Some((_, seconds)) = own.or(of_all) {
                part.limit = Duration::from_secs(*seconds);
            }
        }
        let file = self.output.unwrap_or_else(|| format!("nccl-spark-report-{}.md", date::today()).into());
        Ok(Plan {
            parts,
            target: Wanted(Some(file).filter(|file| file != Path::new("-"))),
            hosts: self.hosts,
            keep: Keep { names: self.keep_names, addresses: self.keep_addresses, serials: self.keep_serials },
            dry_run: self.dry_run,
            root: self.root,
        })
    }
}

impl Wanted {
    /// Takes the place.
    ///
    /// # Errors
    /// When there is something already, or nothing can be written there.
    pub(super) fn open(self) -> Result<Target> {
        let Some(path) = self.0 else { return Ok(Target::Output) };
        if path.symlink_metadata().is_ok() {
            bail!("{} is there already and is not overwritten: name another file with --output", path.display());
        }
        let file = replacement::beside(&path).with_context(|| format!("--output {}", path.display()))?;
        Ok(Target::File(file, path))
    }
}

impl Target {
    /// Writes the report; returns its file.
    ///
    /// # Errors
    /// When it cannot be written, or its file has come into being meanwhile.
    pub(super) fn write(self, text: &str) -> Result<Option<PathBuf>> {
        match self {
            Self::Output => {
                let mut out = std::io::stdout();
                // Not `output::standard`: with --quiet it would leave out lines that start with #.
                out.write_all(text.as_bytes()).and_then(|()| out.flush()).context(STANDARD_OUTPUT)?;
                Ok(None)
            }
            Self::File(mut file, path) => {
                // All may read it: a report is made to be shared.
                let filled = replacement::fill(&mut file, text).and_then(|()| file.as_file().sync_all());
                filled.with_context(|| format!("write {}", path.display()))?;
                let kept = file.persist_noclobber(&path).map_err(|error| error.error);
                kept.with_context(|| format!("write {}", path.display()))?;
                Ok(Some(path))
            }
        }
    }
}
