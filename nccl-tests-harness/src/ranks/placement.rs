//! Decides where a run's ranks are. Either all are child processes of this process, or a launcher
//! has started a process for each rank.

use crate::fabric::{Fabric, Kind};
use crate::output;
use crate::ranks::control::Work;
use crate::ranks::greeting::Trust;
use crate::ranks::job::{RankEnv, RankPlace};
use crate::ranks::launch::World;
use crate::ranks::rendezvous::{self, Hello, Meeting, Rendezvous, Welcome};
use crate::ranks::token::Token;
use anyhow::{Context, Result, bail, ensure};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Time that ranks wait for each other to connect, unless a run's time limit is shorter.
const MEETING: Duration = Duration::from_secs(60);

/// Returns where and how a launcher's ranks meet. Rank 0 listens at `given` (host and port), else
/// at the place that the launcher's environment tells ([`World::place`]).
///
/// # Errors
/// Fails when neither is known.
pub fn meeting(
    world: &World,
    given: Option<(String, u16)>,
    without_token: bool,
    timeout: Duration,
) -> Result<Meeting> {
    let Some((host, port)) = given.or_else(|| world.place.clone()) else {
        bail!(
            "{} started ranks on several machines and does not say where rank 0 is: add --rendezvous HOST:PORT with the \
             host of rank 0 and a free port on it",
            world.launcher
        );
    };
    let trust = trust(world.token.clone(), without_token);
    Ok(Meeting {
        host,
        port,
        job: world.job.clone(),
        ranks: world.ranks,
        trust,
        timeout: timeout.min(MEETING),
    })
}

/// Conditions on which ranks trust each other.
pub(crate) fn trust(token: Option<Token>, without_token: bool) -> Trust {
    Trust {
        token,
        trusts_anybody: without_token,
        mismatch: "the other side has another token, or none: SPARK_JOB_TOKEN must be the same on all ranks",
        cure: "export SPARK_JOB_TOKEN=$(openssl rand -hex 16) and pass it to all ranks (mpirun -x SPARK_JOB_TOKEN), or, \
               on a network without strangers, add --rendezvous HOST:PORT --without-token",
    }
}

/// Places all ranks in child processes.
pub fn all_here(ranks: usize, fabric: &Fabric, rank_env: &[RankEnv]) -> Vec<RankPlace> {
    (0..ranks)
        .map(|rank| RankPlace::Here(environment(fabric.environment(rank), rank, rank_env)))
        .collect()
}

/// Places rank 0 in a child process, and waits for the other ranks to connect.
///
/// # Errors
/// Fails when a rank does not connect in time, or cannot take part.
pub fn with_guests(
    meeting: Meeting,
    fabric: &Fabric,
    rank_env: &[RankEnv],
) -> Result<Vec<RankPlace>> {
    let here = machine()?;
    let guests = Rendezvous::open(meeting)?.gather(|hello: &Hello| {
        ensure!(
            fabric.kind == Kind::Verbs || hello.machine == here,
            "rank {} is on another machine ({}): the software fabric connects processes of one machine only; use RDMA \
             devices with --fabric verbs",
            hello.rank,
            hello.host
        );
        Ok(Welcome { soft: fabric.place(hello.rank) })
    })?;
    let mut places = vec![RankPlace::Here(environment(
        fabric.environment(0),
        0,
        rank_env,
    ))];
    places.extend(guests.into_iter().map(RankPlace::Guest));
    Ok(places)
}

/// Libraries that a rank loads, found on its own machine by its own command line.
#[derive(Debug, Clone, Copy)]
pub struct Libraries<'a> {
    /// The plugin.
    pub plugin: &'a Path,
    /// The software fabric.
    pub fabric: &'a Path,
}

/// Connects to rank 0. Returns the command that runs this process's rank, with the connection as
/// its standard input.
///
/// # Errors
/// Fails when rank 0 is not found, or refuses the rank.
pub fn rank_command<W: Work>(
    world: &World,
    meeting: &Meeting,
    libraries: Libraries<'_>,
    rank_env: &[RankEnv],
    program: &Path,
) -> Result<Command> {
    let joined = rendezvous::join(meeting, &hello(world)?);
    let (line, Welcome { soft }) = joined.with_context(|| format!("rank {}", world.rank))?;
    let wanted = match &soft {
        Some(place) => place.environment_for_guest(world.rank, libraries.fabric)?,
        None => Vec::new(),
    };
    let mut command = Command::new(program);
    command
        .args([
            W::COMMAND,
            &world.rank.to_string(),
            "--launched",
            "--plugin",
        ])
        .arg(libraries.plugin);
    command.stdin(Stdio::from(OwnedFd::from(line)));
    command.stdout(Stdio::from(std::io::stderr()));
    command.envs(environment(wanted, world.rank, rank_env));
    Ok(command)
}

pub(crate) fn hello(world: &World) -> Result<Hello> {
    Ok(Hello {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        job: world.job.clone(),
        rank: world.rank,
        ranks: world.ranks,
        pid: std::process::id(),
        host: local_host_name(),
        machine: machine()?,
    })
}

/// Replaces this process by `command`, the command of a rank. The rank ends when its control
/// connection closes.
///
/// # Errors
/// Always fails if it returns, because a process that was replaced does not return.
pub fn become_rank<T>(mut command: Command) -> Result<T> {
    let error = command.exec();
    Err(error).with_context(|| format!("start {}", command.get_program().display()))
}

fn environment(
    mut base: Vec<(String, String)>,
    rank: usize,
    rank_env: &[RankEnv],
) -> Vec<(String, String)> {
    base.extend(output::nccl_debug().map(|level| ("NCCL_DEBUG".to_owned(), level.to_owned())));
    base.extend(
        rank_env
            .iter()
            .filter(|env| env.rank == rank)
            .map(|env| (env.name.clone(), env.value.clone())),
    );
    base
}

/// Returns the machine's name.
pub fn local_host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname");
    name.map_or_else(
        |_| "an unknown machine".to_owned(),
        |name| name.trim().to_owned(),
    )
}

/// Returns the kernel's boot id, which identifies the machine.
pub fn machine() -> Result<String> {
    const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
    let id = std::fs::read_to_string(BOOT_ID).with_context(|| format!("read {BOOT_ID}"))?;
    Ok(id.trim().to_owned())
}
