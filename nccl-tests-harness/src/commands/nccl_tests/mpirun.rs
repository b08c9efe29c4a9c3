//! Starts the ranks of a program of nccl-tests: runs mpirun, and prepares the process of each rank
//! before it becomes the program.
//!
//! mpirun copies the output of the ranks in blocks that can end inside a line, so lines of
//! different ranks mix. If all ranks are on this machine, each rank except rank 0 therefore prints
//! into its own named pipe. Rank 0, which prints the table, prints through mpirun.

use super::gpus::{gpus, missing_gpu};
use super::options::{Call, Place};
use crate::fabric::{Fabric, Kind};
use crate::lines::{self, NamedPipe};
use crate::ranks::job;
use anyhow::{Context, Result, bail, ensure};
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use tempfile::TempDir;

/// The arguments of the hidden command.
#[derive(Debug, clap::Args)]
pub struct Rank {
    /// Makes each rank a host of its own to NCCL, with a name from this text.
    #[arg(long)]
    hosts: Option<String>,
    /// Makes each rank a node of the software fabric.
    #[arg(long)]
    nodes: bool,
    /// The folder of named pipes. Each rank but the first prints into the pipe with its number.
    #[arg(long)]
    pipes: Option<PathBuf>,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

impl Rank {
    /// Replaces this process by the program; returns only if that fails. `lookup` returns an
    /// environment variable.
    pub fn run(self, rank: usize, lookup: impl Fn(&str) -> Option<String>) -> Result<()> {
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]);
        if let Some(hosts) = self.hosts {
            command.env("NCCL_HOSTID", format!("{hosts}-{rank}"));
            if lookup("NCCL_TESTS_DEVICE").is_none() {
                // With fewer GPUs than ranks, ranks share GPUs.
                command.env("NCCL_TESTS_DEVICE", (rank % gpus().max(1)).to_string());
            }
        }
        if self.nodes {
            command.env("SOFTVERBS_NODE", rank.to_string());
            if let Some(shared) = lookup("NCCL_SPARK_SYSFS") {
                command.env(
                    "NCCL_SPARK_SYSFS",
                    softverbs::control::sysfs_of_node(&shared, rank),
                );
            }
        }
        if let Some(folder) = self.pipes.filter(|_| rank > 0) {
            let path = pipe_path(&folder, rank);
            let pipe = File::options()
                .write(true)
                .open(&path)
                .with_context(|| format!("open {}", path.display()))?;
            command.stdout(pipe);
        }
        Err(command.exec()).with_context(|| format!("start {}", self.command[0].display()))
    }
}

fn pipe_path(folder: &Path, rank: usize) -> PathBuf {
    folder.join(rank.to_string())
}

/// Runs the program once. `on_line` gets every printed line. Returns `None` if the run exceeded its
/// time limit and was stopped.
pub fn run(
    call: &Call<'_>,
    fabric: &Fabric,
    environment: &[(String, String)],
    own: &Path,
    mut on_line: impl FnMut(&str) -> Result<()>,
) -> Result<Option<ExitStatus>> {
    let (pipes, folder) = pipes(&call.conditions.place)?;
    let mut command = command(call, fabric, environment, own, folder.as_ref())?;
    command.envs(environment.iter().map(|(name, value)| (name, value)));
    // With this variable, NCCL would write its log to a file instead of standard output.
    command.env_remove("NCCL_DEBUG_FILE");
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = [command
        .spawn()
        .with_context(|| format!("start {program}"))?];
    let ends = lines::follow(
        &mut child,
        pipes,
        call.conditions.setting.timeout,
        |_, line| on_line(line),
    )?;
    Ok(ends.map(|ends| ends[0]))
}

/// If mpirun starts several ranks on this machine, makes a pipe for each except rank 0, and a
/// folder for the pipes. Otherwise makes nothing.
fn pipes(place: &Place) -> Result<(Vec<NamedPipe>, Option<TempDir>)> {
    let Place::Here(ranks @ 2..) = *place else {
        return Ok((Vec::new(), None));
    };
    let folder = tempfile::tempdir().context("make a folder for the ranks' pipes")?;
    let pipes = (1..ranks)
        .map(|rank| NamedPipe::make(&pipe_path(folder.path(), rank)))
        .collect::<Result<_>>()?;
    Ok((pipes, Some(folder)))
}

fn command(
    call: &Call<'_>,
    fabric: &Fabric,
    environment: &[(String, String)],
    own: &Path,
    pipes: Option<&TempDir>,
) -> Result<Command> {
    let mut rank: Vec<OsString> = vec![own.into(), "nccl-tests-rank".into()];
    let mut command = Command::new("mpirun");
    command
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    // By default mpirun binds each rank, with all its threads, to one processor.
    command.args(["--bind-to", "none"]);
    match &call.conditions.place {
        Place::Here(1) => command = Command::new(own),
        Place::Here(ranks) => {
            ensure!(
                is_built_with_mpi(call.program)?,
                "{} was built without MPI, which {ranks} ranks need: build it with make MPI=1 MPI_HOME=...",
                call.program.display()
            );
            command.args(["--oversubscribe", "-np", &ranks.to_string()]);
        }
        Place::Hosts(arguments) => {
            ensure!(
                fabric.kind == Kind::Verbs,
                "the software fabric works within one machine only: not with --mpirun"
            );
            command.args(arguments);
            for (name, _) in environment {
                command.args(["-x", name]);
            }
        }
    }
    if let Place::Here(ranks) = call.conditions.place {
        rank.extend([
            "--hosts".into(),
            format!("nccl-spark-{}", std::process::id()).into(),
        ]);
        if fabric.kind == Kind::Soft {
            rank.push("--nodes".into());
        }
        if let Some(folder) = pipes {
            rank.extend(["--pipes".into(), folder.path().into()]);
        }
        if ranks == 1 {
            rank.remove(0);
        }
    }
    rank.extend(["--".into(), call.program.into()]);
    command.args(rank).args(call.arguments);
    Ok(command)
}

/// Returns true if a program was built with MPI. Such a program contains the name of MPI's library.
fn is_built_with_mpi(program: &Path) -> Result<bool> {
    let bytes = fs::read(program).with_context(|| format!("read {}", program.display()))?;
    Ok(bytes.windows(6).any(|word| word == b"libmpi"))
}

/// Checks that a run succeeded. The error has NCCL's complaints. If there are none, it says that a
/// GPU is missing, or else has the last line.
pub fn check(
    end: Option<ExitStatus>,
    call: &Call<'_>,
    complaints: Option<String>,
    last: &str,
) -> Result<()> {
    if end.is_some_and(|end| end.success()) {
        return Ok(());
    }
    let reason = match (complaints, missing_gpu()) {
        (Some(text), _) => format!("NCCL says: {text}"),
        (None, Some(text)) => text.to_owned(),
        (None, None) => format!("its last line: {last}"),
    };
    let name = call
        .program
        .file_name()
        .unwrap_or_default()
        .to_string_lossy();
    match end {
        Some(end) => bail!("{name} {}; {reason}", job::ended(end)),
        None => {
            bail!(
                "{name} was stopped after {} s (--timeout); {reason}",
                call.conditions.setting.timeout.as_secs()
            )
        }
    }
}
