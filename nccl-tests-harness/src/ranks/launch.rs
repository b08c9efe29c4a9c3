//! Finds out from the environment whether a launcher (mpirun, torchrun, srun) started this process,
//! and as which rank of which job.

use crate::ranks::token::Token;
use anyhow::{Context, Result, anyhow, bail, ensure};

/// Place of this process among the ranks of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct World {
    /// The program that started the rank.
    pub launcher: Launcher,
    /// This process's rank.
    pub rank: usize,
    /// Number of ranks (2 or more).
    pub ranks: usize,
    /// Name of the job, the same for all of its ranks; unique as far as the launcher allows.
    pub job: String,
    /// Host and port where rank 0 listens, if the environment tells the host. Only torchrun passes
    /// a port. For other launchers the port is derived from `job`.
    pub place: Option<(String, u16)>,
    /// Secret of the job, if its ranks have one: the user's ([`TOKEN_VARIABLE`]), else mpirun's.
    pub token: Option<Token>,
}

/// A program that starts ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launcher {
    /// Open MPI's mpirun.
    OpenMpi,
    /// PyTorch's torchrun.
    Torchrun,
    /// A launcher with PMI, such as MPICH's.
    Pmi,
    /// Slurm's srun.
    Slurm,
    /// A launcher with PMIx alone.
    Pmix,
}

/// The range of the ports that are derived from jobs' names. The range lies below Linux's range of
/// ports for outgoing connections, which begins at 32768.
const DERIVED_PORTS: std::ops::Range<u16> = 20000..32000;

/// Variable with the job's token, which the user passes to all ranks.
pub const TOKEN_VARIABLE: &str = "SPARK_JOB_TOKEN";
/// Variable in which Open MPI's mpirun gives all ranks a random number for this job, two times 16
/// hexadecimal digits. mpirun reads the number from /dev/urandom and sends it only with the ranks'
/// environment (orte/util/pre_condition_transports.c).
const MPIRUN_KEY: &str = "OMPI_MCA_orte_precondition_transports";

/// Returns this process's place in a launcher's job, or `None` without a launcher or with one rank.
/// `lookup` returns an environment variable. `parent` is the PID of this process's parent, which
/// distinguishes the jobs of one machine if the launcher does not name jobs. Fails when variables
/// are missing, are not numbers, or contradict each other.
pub(crate) fn detect(
    lookup: impl Fn(&str) -> Option<String>,
    parent: u32,
) -> Result<Option<World>> {
    let lookup = |name: &str| lookup(name).filter(|value| !value.is_empty());
    // mpirun and torchrun may themselves run inside a Slurm job, so they come first.
    let candidates = [
        (
            Launcher::OpenMpi,
            "OMPI_COMM_WORLD_RANK",
            &["OMPI_COMM_WORLD_SIZE"][..],
        ),
        (Launcher::Torchrun, "RANK", &["WORLD_SIZE"]),
        (Launcher::Pmi, "PMI_RANK", &["PMI_SIZE"]),
        (
            Launcher::Slurm,
            "SLURM_PROCID",
            &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        ),
        (
            Launcher::Pmix,
            "PMIX_RANK",
            &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        ),
    ];
    for (launcher, rank_name, size_names) in candidates {
        let Some(rank) = lookup(rank_name) else {
            continue;
        };
        // RANK alone is no sign of torchrun, because many scripts have a variable of that name.
        if launcher == Launcher::Torchrun
            && (lookup("WORLD_SIZE").is_none() || lookup("MASTER_ADDR").is_none())
        {
            continue;
        }
        let size = size_names
            .iter()
            .find_map(|name| Some((*name, lookup(name)?)));
        let Some((size_name, size)) = size else {
            bail!(
                "{rank_name} is set and {} is not: the launcher did not pass the number of ranks",
                size_names[0]
            );
        };
        let rank = number(rank_name, &rank)?;
        let ranks = number(size_name, &size)?;
        if ranks == 1 {
            return Ok(None);
        }
        ensure!(
            rank < ranks,
            "{rank_name}={rank} and {size_name}={ranks} contradict each other"
        );
        let job = job(launcher, &lookup).unwrap_or_else(|| format!("parent {parent}"));
        let place = place(launcher, &lookup, ranks, &job)?;
        let token = token(launcher, &lookup)?;
        return Ok(Some(World {
            launcher,
            rank,
            ranks,
            job,
            place,
            token,
        }));
    }
    Ok(None)
}

fn number(name: &str, value: &str) -> Result<usize> {
    value
        .parse()
        .ok()
        .with_context(|| format!("{name}={value:?} is not a number"))
}

fn job(launcher: Launcher, lookup: &impl Fn(&str) -> Option<String>) -> Option<String> {
    let slurm = || {
        let step = lookup("SLURM_STEP_ID")
            .or_else(|| lookup("SLURM_STEPID"))
            .unwrap_or_default();
        Some(format!(
            "slurm {}.{step}",
            lookup("SLURM_JOB_ID").or_else(|| lookup("SLURM_JOBID"))?
        ))
    };
    match launcher {
        Launcher::OpenMpi => lookup("PMIX_NAMESPACE")
            .or_else(|| lookup("OMPI_MCA_ess_base_jobid"))
            .map(|job| format!("mpirun {job}")),
        Launcher::Torchrun => {
            let parts = [
                "TORCHELASTIC_RUN_ID",
                "TORCHELASTIC_RESTART_COUNT",
                "MASTER_ADDR",
                "MASTER_PORT",
            ];
            Some(format!(
                "torchrun {}",
                parts.map(|name| lookup(name).unwrap_or_default()).join(" ")
            ))
        }
        Launcher::Pmi => slurm().or_else(|| lookup("PMI_JOBID").map(|job| format!("pmi {job}"))),
        Launcher::Slurm => slurm(),
        Launcher::Pmix => lookup("PMIX_NAMESPACE")
            .map(|job| format!("pmix {job}"))
            .or_else(slurm),
    }
}

/// Returns the job's token. Slurm and torchrun have none: their job numbers are no secrets.
fn token(launcher: Launcher, lookup: &impl Fn(&str) -> Option<String>) -> Result<Option<Token>> {
    if let Some(text) = lookup(TOKEN_VARIABLE) {
        return Token::parse(&text)
            .map(Some)
            .map_err(|form| anyhow!("{TOKEN_VARIABLE}: {form}"));
    }
    let key = lookup(MPIRUN_KEY).filter(|_| launcher == Launcher::OpenMpi);
    Ok(key.and_then(|key| random_key(&key)))
}

/// Returns mpirun's number as a token, or `None` if the number is not random: without /dev/urandom,
/// and under Slurm, it is made of the time or the job's number, and half of each part is zero.
fn random_key(key: &str) -> Option<Token> {
    const ZEROS: &str = "00000000";
    let (first, second) = key.split_once('-')?;
    let is_random =
        |part: &str| part.len() == 16 && !part.starts_with(ZEROS) && !part.ends_with(ZEROS);
    if !is_random(first) || !is_random(second) {
        return None;
    }
    Token::parse(&format!("{first}{second}")).ok()
}

/// Returns the host and port where rank 0 listens. The caller uses them only if the command line
/// has no `--rendezvous`. Returns `None` if the environment does not tell the host.
fn place(
    launcher: Launcher,
    lookup: &impl Fn(&str) -> Option<String>,
    ranks: usize,
    job: &str,
) -> Result<Option<(String, u16)>> {
    if launcher == Launcher::Torchrun {
        // torchrun's own store uses MASTER_PORT, so rank 0 takes the next port.
        let Some(host) = lookup("MASTER_ADDR") else {
            return Ok(None);
        };
        let Some(port) = lookup("MASTER_PORT") else {
            return Ok(None);
        };
        let next = port
            .parse::<u16>()
            .ok()
            .and_then(|port| port.checked_add(1));
        return Ok(Some((
            host,
            next.with_context(|| format!("MASTER_PORT={port:?} is not a port below 65535"))?,
        )));
    }
    let here = ["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"]
        .iter()
        .find_map(|name| lookup(name));
    let one_node = lookup("SLURM_STEP_NUM_NODES")
        .or_else(|| lookup("SLURM_NNODES"))
        .is_some_and(|nodes| nodes == "1");
    let from_slurm = matches!(launcher, Launcher::Slurm | Launcher::Pmi | Launcher::Pmix);
    let host = if here.is_some_and(|here| here == ranks.to_string()) || from_slurm && one_node {
        Some("127.0.0.1".to_owned())
    } else if from_slurm {
        let nodes = lookup("SLURM_STEP_NODELIST").or_else(|| lookup("SLURM_JOB_NODELIST"));
        nodes
            .or_else(|| lookup("SLURM_NODELIST"))
            .and_then(|nodes| first_host(&nodes))
    } else {
        None
    };
    Ok(host.map(|host| (host, derived_port(job))))
}

/// Returns the first host of Slurm's node list: `spark-03` of `spark-[03-05,9],other`.
fn first_host(nodes: &str) -> Option<String> {
    let mut name = String::new();
    let mut rest = nodes.trim();
    while let Some(at) = rest.find(['[', ',']) {
        name += &rest[..at];
        if rest[at..].starts_with(',') {
            rest = "";
            break;
        }
        let (numbers, behind) = rest[at + 1..].split_once(']')?;
        name += numbers.split(['-', ',']).next()?;
        rest = behind;
    }
    name += rest;
    Some(name).filter(|name| !name.is_empty())
}

/// Returns a port that is the same on all ranks of a job (FNV-1a over the job's name).
fn derived_port(job: &str) -> u16 {
    let hash = job.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    DERIVED_PORTS.start + (hash % u32::from(DERIVED_PORTS.end - DERIVED_PORTS.start)) as u16
}

impl std::fmt::Display for Launcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::OpenMpi => "mpirun",
            Self::Torchrun => "torchrun",
            Self::Pmi => "a PMI launcher",
            Self::Slurm => "srun",
            Self::Pmix => "a PMIx launcher",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world_in(environment: &str) -> Result<Option<World>> {
        let variables: Vec<_> = environment
            .split_whitespace()
            .map(|pair| pair.split_once('=').unwrap())
            .collect();
        detect(
            |name| Some(variables.iter().find(|(key, _)| *key == name)?.1.to_owned()),
            77,
        )
    }

    #[track_caller]
    fn world(environment: &str) -> World {
        world_in(environment).unwrap().unwrap()
    }

    /// The variables are those that Open MPI 4.1 was observed to set.
    #[test]
    fn mpirun_on_one_machine_needs_no_address_and_across_machines_one_from_the_user() {
        let here =
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 PMIX_NAMESPACE=606994433 PMIX_RANK=1";
        let one = world(&format!("{here} OMPI_COMM_WORLD_LOCAL_SIZE=2"));
        assert_eq!(
            (one.launcher, one.rank, one.ranks, one.job.as_str()),
            (Launcher::OpenMpi, 1, 2, "mpirun 606994433")
        );
        let (host, port) = one.place.unwrap();
        assert!(
            host == "127.0.0.1" && DERIVED_PORTS.contains(&port),
            "{host}:{port}"
        );
        assert_eq!(
            world(&format!("{here} OMPI_COMM_WORLD_LOCAL_SIZE=1")).place,
            None
        );
        let other = world(
            &format!("{here}1 OMPI_COMM_WORLD_LOCAL_SIZE=2").replace("606994433", "606994434"),
        );
        assert_ne!(other.place.unwrap().1, port);
        // Inside a Slurm job, srun's variables count mpirun's daemons, not mpirun's ranks.
        assert_eq!(
            world(&format!("SLURM_PROCID=0 SLURM_NTASKS=9 {here}")).ranks,
            2
        );
    }

    #[test]
    fn torchrun_gives_the_address_and_the_next_port_is_used() {
        let world = world(
            "RANK=2 WORLD_SIZE=4 LOCAL_RANK=0 MASTER_ADDR=spark-1 MASTER_PORT=29500 SLURM_PROCID=0",
        );
        assert_eq!(
            (world.launcher, world.rank, world.ranks),
            (Launcher::Torchrun, 2, 4)
        );
        assert_eq!(world.place, Some(("spark-1".to_owned(), 29501)));
        assert!(world_in("RANK=2 WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=65535").is_err());
    }

    #[test]
    fn srun_names_its_first_host() {
        let job = "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_ID=12 SLURM_STEP_ID=3";
        let two = world(&format!(
            "{job} SLURM_NNODES=2 SLURM_JOB_NODELIST=spark-[03-04]"
        ));
        assert_eq!(
            (two.launcher, two.rank, two.ranks, two.job.as_str()),
            (Launcher::Slurm, 1, 2, "slurm 12.3")
        );
        assert_eq!(two.place.unwrap().0, "spark-03");
        let one = world(&format!("{job} SLURM_NNODES=1 SLURM_JOB_NODELIST=spark-03"));
        assert_eq!(one.place.unwrap().0, "127.0.0.1");
        assert_eq!(
            world(&format!("PMIX_RANK=1 PMIX_NAMESPACE=x {job}")).launcher,
            Launcher::Slurm
        );
        assert_eq!(
            world("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALNRANKS=2").job,
            "parent 77"
        );
    }

    #[test]
    fn node_lists_are_read_up_to_the_first_host() {
        for (list, first) in [
            ("a", "a"),
            ("a,b", "a"),
            ("spark-[03-05,9],other", "spark-03"),
            ("n[7,9]", "n7"),
            ("r[1-2]n[4-5]-x", "r1n4-x"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(first));
        }
        assert_eq!((first_host(""), first_host("a[1")), (None, None));
    }

    #[test]
    fn a_single_rank_without_a_launcher_needs_no_rendezvous() {
        for environment in [
            "",
            "RANK=0",
            "RANK=0 WORLD_SIZE=2",
            "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1",
            "OMPI_COMM_WORLD_RANK=",
        ] {
            assert_eq!(world_in(environment).unwrap(), None, "{environment}");
        }
    }

    #[test]
    fn the_users_token_comes_before_mpiruns_and_guessable_keys_are_none() {
        let mpirun = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2";
        let key = |launcher: &str, key: &str| {
            let token = world(&format!(
                "{launcher} OMPI_MCA_orte_precondition_transports={key}"
            ))
            .token;
            token.map(|token| token.text().to_owned())
        };
        let random = "cd1a4a10892376fa-0bbf214792cd2491";
        assert_eq!(key(mpirun, random), Some(random.replace('-', "")));
        for guessable in [
            "017569a900000000-017569a900000000",
            "00000000017569a9-0bbf214792cd2491",
            "1-2",
            "x",
        ] {
            assert_eq!(key(mpirun, guessable), None, "{guessable}");
        }
        assert_eq!(
            key("SLURM_PROCID=1 SLURM_NTASKS=2", random),
            None,
            "srun passes on what the user's shell has"
        );
        let own = "0123456789abcdef0123456789abcdef";
        assert_eq!(
            key(&format!("{mpirun} SPARK_JOB_TOKEN={own}"), random),
            Some(own.to_owned())
        );
        let error = world_in(&format!("{mpirun} SPARK_JOB_TOKEN=secret"))
            .unwrap_err()
            .to_string();
        assert_eq!(error, "SPARK_JOB_TOKEN: a token has 32 hexadecimal digits");
    }

    #[test]
    fn contradictions_name_the_variable() {
        for (environment, named) in [
            (
                "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=2",
                "OMPI_COMM_WORLD_RANK=2",
            ),
            ("OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE"),
            ("PMIX_RANK=0", "SLURM_STEP_NUM_TASKS"),
            ("SLURM_PROCID=x SLURM_NTASKS=2", "SLURM_PROCID=\"x\""),
        ] {
            let error = world_in(environment).unwrap_err().to_string();
            assert!(error.contains(named), "{environment}: {error}");
        }
    }
}
