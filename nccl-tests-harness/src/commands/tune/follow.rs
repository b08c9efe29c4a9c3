//! Followers: the processes above rank 0 that a launcher started. A follower starts a rank for each
//! run. At the end, one follower on each machine except rank 0's writes the settings there. Rank 0
//! sends orders to each follower over a TCP connection.

use super::judge::Candidate;
use super::options::Tune;
use crate::commands::collectives::lead::{self, Plan};
use crate::output;
use crate::ranks::control::{self, Sender};
use crate::ranks::launch::World;
use crate::ranks::placement;
use crate::ranks::rendezvous::{self, Meeting, Rendezvous, Welcome};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::path::Path;

#[derive(Debug, Clone, Serialize, Deserialize)]
enum Order {
    Run {
        number: u32,
        candidate: Option<Candidate>,
    },
    Keep {
        chosen: Option<Candidate>,
        remark: String,
    },
    End,
}

/// Rank 0's connections to the followers.
#[derive(Default)]
pub struct Followers(Vec<Follower>);

struct Follower {
    line: Sender,
    /// True if this follower writes the settings on its machine. This is so for one follower on
    /// each machine except rank 0's.
    writes: bool,
}

impl Followers {
    /// Waits for all followers to connect.
    ///
    /// # Errors
    /// Some followers do not connect in time.
    pub fn gather(meeting: Meeting) -> Result<Self> {
        let mut seen = vec![placement::machine()?];
        let mut followers = Vec::new();
        for guest in Rendezvous::open(meeting)?.gather(|_| Ok(Welcome::default()))? {
            let (line, _) = control::split(guest.line)?;
            followers.push(Follower {
                line,
                writes: !seen.contains(&guest.hello.machine),
            });
            seen.push(guest.hello.machine);
        }
        Ok(Self(followers))
    }

    pub fn run(&self, number: u32, candidate: Option<Candidate>) -> Result<()> {
        self.0
            .iter()
            .try_for_each(|follower| follower.line.send(&Order::Run { number, candidate }))
    }

    /// Makes one follower on each machine except this one write the settings, and ends all
    /// followers.
    pub fn keep(&self, chosen: Option<Candidate>, remark: &str) -> Result<()> {
        for follower in self.0.iter().filter(|follower| follower.writes) {
            follower.line.send(&Order::Keep {
                chosen,
                remark: remark.to_owned(),
            })?;
        }
        self.end()
    }

    pub fn end(&self) -> Result<()> {
        self.0
            .iter()
            .try_for_each(|follower| follower.line.send(&Order::End))
    }
}

/// Returns `world` and `meeting` for one run, with the run's own job name.
pub fn of_run(world: &World, meeting: &Meeting, number: u32) -> (World, Meeting) {
    let job = format!("{}, run {number}", world.job);
    (
        World {
            job: job.clone(),
            ..world.clone()
        },
        Meeting {
            job,
            ..meeting.clone()
        },
    )
}

/// Follows the orders of rank 0 until the end.
///
/// # Errors
/// Rank 0 closes the connection, a rank cannot be started, or the settings cannot be written on
/// this machine.
pub fn follow(tune: &Tune, world: &World, meeting: &Meeting, program: &Path) -> Result<()> {
    let (line, _) = rendezvous::join(meeting, &placement::hello(world)?)
        .with_context(|| format!("rank {}", world.rank))?;
    let (_line, mut orders) = control::split(line)?;
    while let Some(order) = orders.receive()? {
        match order {
            Order::Run { number, candidate } => {
                let (world, meeting) = of_run(world, meeting, number);
                // The command is dropped at the end of this statement. Its copy of the rank's
                // socket would otherwise keep the connection open after the rank has ended.
                let plan = Plan {
                    rank_env: tune.rank_env(candidate),
                    ..tune.plan.clone()
                };
                let rank = lead::rank_command(&plan, &world, &meeting, program)?.spawn();
                // The exit status is ignored: rank 0 gets the reason from the rank itself.
                rank.and_then(|mut rank| rank.wait())
                    .context("start the rank")?;
            }
            Order::Keep { chosen, remark } => {
                let who = format!("rank {} on {}", world.rank, placement::local_host_name());
                // A line break would end the comment, and the rest would be a setting.
                for line in tune
                    .write(chosen, &output::plain(&remark))
                    .context(who.clone())?
                {
                    println!("# {who}: {line}");
                }
            }
            Order::End => return Ok(()),
        }
    }
    bail!("rank {}: rank 0 closed the connection", world.rank)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;
    use std::time::Duration;

    /// Rank 0 makes the follower write the settings, as if the follower ran on another machine.
    #[test]
    fn a_follower_writes_the_settings_that_rank_0_chose() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("spark.conf");
        let cli = Cli::try_parse_from(["nccl-spark", "tune", "--output", output.to_str().unwrap()]);
        let Command::Tune(options) = cli.unwrap().command else {
            panic!("another command")
        };
        let tune = options
            .checked(Path::new("/nowhere/nccl-spark"), None, |_| None)
            .unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let job = "test".to_owned();
        let timeout = Duration::from_secs(20);
        let trust = placement::trust(None, false);
        let meeting = Meeting {
            host: "127.0.0.1".into(),
            port,
            job: job.clone(),
            ranks: 2,
            trust,
            timeout,
        };
        let launcher = crate::ranks::launch::Launcher::OpenMpi;
        let world = World {
            launcher,
            rank: 1,
            ranks: 2,
            job,
            place: None,
            token: None,
        };
        let leading = std::thread::spawn({
            let meeting = meeting.clone();
            move || {
                let mut followers = Followers::gather(meeting).unwrap();
                assert!(
                    !followers.0[0].writes,
                    "this machine has the file of rank 0"
                );
                followers.0[0].writes = true;
                followers
                    .keep(
                        Some(Candidate {
                            qps: 4,
                            min_share_bytes: 8192,
                        }),
                        "+10 %",
                    )
                    .unwrap();
            }
        });
        follow(&tune, &world, &meeting, Path::new("/nowhere/nccl-spark")).unwrap();
        leading.join().unwrap();
        let text = std::fs::read_to_string(&output).unwrap();
        assert_eq!(
            text,
            "# nccl-spark tune: +10 %\nNCCL_IB_QPS_PER_CONNECTION=4\nNCCL_SPARK_MIN_SHARE_BYTES=8192\n"
        );
        // Each run has its own name, different from that of the followers' meeting.
        let jobs = [1, 2].map(|number| of_run(&world, &meeting, number).1.job);
        assert!(
            jobs[0] != jobs[1] && !jobs.contains(&meeting.job),
            "{jobs:?}"
        );
    }
}
