//! Where the ranks of a run are: all started here, or each by a launcher.

use crate::fabric::{Fabric, Kind};
use crate::job::{RankEnv, Seat};
use crate::launch::World;
use crate::rendezvous::{self, Door, Hello, Meeting};
use anyhow::{Context, Result, bail, ensure};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// How long ranks wait for each other, unless a run's time limit is shorter.
const MEETING: Duration = Duration::from_secs(60);

/// The meeting of a launcher's ranks at `given` (host and port), else where the launcher lets them.
///
/// # Errors
/// When neither says where.
pub fn meeting(world: &World, given: Option<(String, u16)>, timeout: Duration) -> Result<Meeting> {
    let Some((host, port)) = given.or_else(|| world.place.clone()) else {
        bail!(
            "{} started ranks on several machines, and does not say where rank 0 is: add --rendezvous HOST:PORT, a \
             free port of the machine of rank 0",
            world.launcher
        );
    };
    Ok(Meeting { host, port, job: world.job.clone(), ranks: world.ranks, timeout: timeout.min(MEETING) })
}

/// All ranks as processes of this one.
pub fn all_here(ranks: usize, fabric: &Fabric, rank_env: &[RankEnv]) -> Vec<Seat> {
    (0..ranks).map(|rank| Seat::Here(environment(fabric.environment(rank), rank, rank_env))).collect()
}

/// Rank 0 as a process of this one, the others as they come.
///
/// # Errors
/// When they do not all come, or cannot take part.
pub fn with_guests(meeting: Meeting, fabric: &Fabric, rank_env: &[RankEnv]) -> Result<Vec<Seat>> {
    let here = machine()?;
    let guests = Door::open(meeting)?.gather(|hello: &Hello| {
        ensure!(
            fabric.kind == Kind::Verbs || hello.machine == here,
            "rank {} is on another machine ({}): the software fabric joins processes of one machine; --fabric verbs \
             uses RDMA devices",
            hello.rank,
            hello.host
        );
        Ok(fabric.environment(hello.rank))
    })?;
    let mut seats = vec![Seat::Here(environment(fabric.environment(0), 0, rank_env))];
    seats.extend(guests.into_iter().map(Seat::Guest));
    Ok(seats)
}

/// Becomes the rank that the launcher meant this process to be; comes back only with an error.
///
/// # Errors
/// When rank 0 is not found, or does not want it.
pub fn become_rank(
    world: &World,
    meeting: &Meeting,
    plugin: &Path,
    rank_env: &[RankEnv],
    program: &Path,
) -> Result<()> {
    become_or_start(rank_command(world, meeting, plugin, rank_env, program)?, true)
}

/// Goes to the meeting as the rank that the launcher meant this process to be: the command that is that rank.
///
/// # Errors
/// When rank 0 is not found, or does not want it.
pub fn rank_command(
    world: &World,
    meeting: &Meeting,
    plugin: &Path,
    rank_env: &[RankEnv],
    program: &Path,
) -> Result<Command> {
    let joined = rendezvous::join(meeting, &hello(world)?);
    let (line, wanted) = joined.with_context(|| format!("rank {}", world.rank))?;
    let mut command = Command::new(program);
    command.args(["rank", &world.rank.to_string(), "--launched", "--plugin"]).arg(plugin);
    command.stdin(Stdio::from(OwnedFd::from(line)));
    command.stdout(Stdio::from(std::io::stderr()));
    command.envs(environment(wanted, world.rank, rank_env));
    Ok(command)
}

/// What this process says of itself to rank 0.
///
/// # Errors
/// When the machine has nothing that tells it from others.
pub fn hello(world: &World) -> Result<Hello> {
    Ok(Hello {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        job: world.job.clone(),
        rank: world.rank,
        ranks: world.ranks,
        pid: std::process::id(),
        host: host(),
        machine: machine()?,
    })
}

/// Lets this process become the command, or starts it beside this one. It ends when its line does.
///
/// # Errors
/// When that does not work.
pub fn become_or_start(mut command: Command, become_it: bool) -> Result<()> {
    let program = command.get_program().to_owned();
    let started = match become_it {
        true => Err(command.exec()),
        false => command.spawn().map(|_| ()),
    };
    started.with_context(|| format!("start {}", program.display()))
}

fn environment(mut base: Vec<(String, String)>, rank: usize, rank_env: &[RankEnv]) -> Vec<(String, String)> {
    base.extend(rank_env.iter().filter(|env| env.rank == rank).map(|env| (env.name.clone(), env.value.clone())));
    base
}

/// The machine's name, for people.
pub fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname");
    name.map_or_else(|_| "an unknown machine".to_owned(), |name| name.trim().to_owned())
}

/// What tells this machine from others while it runs.
///
/// # Errors
/// When the kernel does not tell.
pub fn machine() -> Result<String> {
    const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
    let id = std::fs::read_to_string(BOOT_ID).with_context(|| format!("read {BOOT_ID}"))?;
    Ok(id.trim().to_owned())
}
