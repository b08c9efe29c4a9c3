//! `nccl-spark doctor`: the faults of this machine or of a job, worst first, each with its cure.
//!
//! `place` is a root folder, so a folder with copied files can replace a machine. `look` reads
//! facts without judging. `judge` and `environment` judge facts without reading. A new check reads
//! its fact in `look` and makes its finding in one judge. `tests` injects single faults.
//!
//! `options` is the command line. `peer` examines another host together with this one, and `hosts`
//! compares the subnets of several. `together` has results for two hosts.
//!
//! `id` lists all kinds of findings. Scripts rely on ids and on `--json`: an id keeps its meaning,
//! and `schema` increases when a field changes its meaning.

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

pub use answer::{Asked, answer};
pub use finding::Verdict;
pub use id::ALL as FINDINGS;
pub use options::Options;

use crate::output::report::{self, Sink};
use crate::usage::wrong;
use anyhow::{Context, Result};
use place::Place;
use std::path::{Path, PathBuf};
use std::time::Instant;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    Judged(Verdict),
    Served,
}

impl Options {
    /// Examines, and prints the results.
    ///
    /// # Errors
    /// A mistake on the command line, a failure to examine another host, or unwritable output.
    pub fn run(self, program: &Path, variables: Vec<(String, String)>) -> Result<Ended> {
        let end = Instant::now() + self.limit();
        let value = |name: &str| variables.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
        let (peer, ssh) = self.checked(|name| value(name).filter(|value| !value.is_empty()))?;
        let target = self.json.target;
        if !self.hosts.is_empty() {
            let has_order = hosts::run(&self.hosts, &ssh, end, target)?;
            return Ok(Ended::Judged(if has_order { Verdict::Good } else { Verdict::Impaired }));
        }
        let sink = target.as_ref().map(Sink::open).transpose()?;
        let place = Place::new(self.root.unwrap_or_else(|| PathBuf::from("/")));
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
        if self.partner || peer.is_some() {
            let seen = seen.context("this host was not looked at")?;
            let host = peer::Host::new(&place, &answer, &seen, program)?;
            if let Some(peer) = &peer {
                peer::examine(peer, &host, &mut answer, program, end)?;
            } else {
                let address = peer::address(self.interface.as_deref(), ssh_connection.as_deref())?;
                if self.attached {
                    peer::end_with_input();
                }
                return peer::serve(&host, address, program, end).map(|()| Ended::Served);
            }
        }
        show::show(&answer, self.env, report::beside(target.as_ref()))?;
        sink.map_or(Ok(()), |sink| sink.write(&answer))?;
        Ok(Ended::Judged(answer.verdict))
    }
}
