//! `nccl-spark doctor`: what is wrong with this machine or with a job, the worst first, each with the command that cures it.
//!
//! `place` is where it looks: one root, so that a folder can stand for a machine. `look` reads and judges nothing; `judge` and
//! `environment` judge and read nothing. What is new goes into the facts of `look` if it has to be read, and then into one judge; `tests`
//! plants each fault on healthy machines, one at a time.
//!
//! `options` is the command line. `peer` examines another host together with this one, `hosts`
//! compares the subnets of several; both get there by `ssh` and pair rails by `rail`. `together`
//! has the results for two hosts.
//!
//! `id` has all kinds of findings. Ids keep their meaning, and `--json`'s `schema` grows when a field changes its own: scripts rely on both.

mod answer;
mod environment;
mod finding;
mod hosts;
mod id;
mod judge;
pub mod look;
mod options;
mod peer;
mod picture;
pub mod place;
mod rail;
mod show;
pub mod ssh;
#[cfg(test)]
mod tests;
mod together;

pub use answer::{Answer, Asked, answer};
pub use finding::Verdict;
pub use id::ALL as FINDINGS;
pub use options::Options;

use crate::output::report::{self, Sink, Target};
use crate::usage::wrong;
use anyhow::{Context, Result};
use options::Task;
use place::Place;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// How a doctor ended that did what it was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It has judged.
    Judged(Verdict),
    /// It was a partner, and has served.
    Served,
}

impl Options {
    /// Looks, prints what was found, and says what it amounts to. `program` is this program's file, `variables` the environment.
    ///
    /// # Errors
    /// A mistake on the command line, another host that cannot be examined, or when the output cannot be written.
    pub fn run(self, program: &Path, variables: Vec<(String, String)>) -> Result<Ended> {
        let end = Instant::now() + self.limit();
        let value = |name: &str| variables.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
        let task = self.task(|name| value(name).filter(|value| !value.is_empty()))?;
        let target = self.json.target.clone();
        if let Task::Hosts { names, ssh } = &task {
            let has_order = hosts::run(names, ssh, program, end, target)?;
            return Ok(Ended::Judged(if has_order { Verdict::Good } else { Verdict::Impaired }));
        }
        let sink = target.as_ref().map(Sink::open).transpose()?;
        let place = Place::new(self.root.clone().unwrap_or_else(|| PathBuf::from("/")));
        let ssh_connection = value("SSH_CONNECTION");
        let asked = Asked {
            is_env_alone: self.env,
            pid: self.pid,
            python: self.python,
            program: self.program,
            own_program: program.to_owned(),
            variables,
        };
        let (mut answer, seen) = answer::answer(&place, asked).map_err(wrong)?;
        let host = |answer: &Answer| {
            let seen = seen.as_ref().context("this host was not looked at")?;
            peer::Host::new(&place, answer, seen, program)
        };
        match &task {
            Task::Alone | Task::Hosts { .. } => {}
            Task::Peer(peer) => peer::examine(peer, &host(&answer)?, &mut answer, program, end)?,
            Task::Partner { interface, is_attached } => {
                let address = peer::address(interface.as_deref(), ssh_connection.as_deref())?;
                if *is_attached {
                    peer::end_with_input();
                }
                return peer::serve(&host(&answer)?, address, program, end).map(|()| Ended::Served);
            }
        }
        show(&answer, self.env, target.as_ref(), sink)?;
        Ok(Ended::Judged(answer.verdict))
    }
}

fn show(answer: &Answer, is_env_alone: bool, target: Option<&Target>, sink: Option<Sink>) -> Result<()> {
    show::show(answer, is_env_alone, report::beside(target))?;
    sink.map_or(Ok(()), |sink| sink.write(answer))
}
