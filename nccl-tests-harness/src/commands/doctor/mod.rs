//! `nccl-spark doctor`: finds the faults of this machine or of a job, and prints the worst first.
//! Most findings have a cure: a command that removes the fault.
//!
//! - `look` reads facts, and judges nothing. It reads files below a root folder (`place`): `/`, or
//!   a folder with copied files of another machine.
//! - `findings` makes findings from these facts, and reads nothing. A new kind of finding is one
//!   file of it: its row, its judgement and its fault. A fact that the doctor does not read yet is
//!   added to `look`.
//! - `hosts` examines another host together with this one, and compares the subnets of several.
//! - `show` prints the results.
//!
//! `options` is the command line, and `answer` an examination. `tests` injects single faults.
//!
//! Each file that makes findings begins with their kinds; [`kinds`] collects these. Scripts rely on
//! ids and on `--json`: an id keeps its meaning, and `schema` increases when a field is removed or
//! changes its meaning.

mod answer;
mod finding;
mod findings;
pub mod hosts;
pub mod look;
mod options;
pub mod place;
mod show;
#[cfg(test)]
mod tests;

pub use answer::{Request, answer};
pub use finding::{Kind, Verdict};
pub use options::Options;

use crate::output::report::{self, Sink};
use crate::usage::wrong;
use anyhow::{Context, Result};
use place::Place;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Returns all kinds of findings, in the order of the guide's table.
pub fn kinds() -> impl Iterator<Item = &'static Kind> {
    let of_files = [
        findings::machine::KINDS,
        findings::rails::KINDS,
        findings::sockets::KINDS,
        findings::functions::KINDS,
        findings::qos::KINDS,
        findings::counters::KINDS,
        findings::silence::KINDS,
        findings::libraries::KINDS,
        findings::variables::variable::KINDS,
        findings::variables::KINDS,
        findings::variables::launchers::KINDS,
        hosts::peer::compare::KINDS,
        hosts::peer::neighbours::KINDS,
        hosts::peer::grade::KINDS,
        hosts::peer::KINDS,
    ];
    of_files.into_iter().flatten().copied()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    Judged(Verdict),
    ServedAsPartner,
}

impl Options {
    /// Examines this machine (and a peer) and prints the results, or compares hosts, or serves as
    /// the partner of another host's doctor.
    ///
    /// # Errors
    /// A mistake on the command line, a failure to examine another host, or output that cannot be
    /// written.
    pub fn run(self, program: &Path, variables: Vec<(String, String)>) -> Result<Ended> {
        let limit = self.limit();
        let end = Instant::now() + limit;
        let value = |name: &str| {
            variables
                .iter()
                .find(|(known, _)| known == name)
                .map(|(_, value)| value.clone())
        };
        let (peer, ssh) = self.checked(|name| value(name).filter(|value| !value.is_empty()))?;
        let target = self.json.target;
        if !self.hosts.is_empty() {
            let has_order = hosts::several::run(&self.hosts, &ssh, end, target)?;
            return Ok(Ended::Judged(if has_order {
                Verdict::Good
            } else {
                Verdict::Impaired
            }));
        }
        let sink = target.as_ref().map(Sink::open).transpose()?;
        let place = Place::new(self.root.unwrap_or_else(|| PathBuf::from("/")));
        let ssh_connection = value("SSH_CONNECTION");
        let request = Request {
            is_env_alone: self.env,
            pid: self.pid,
            python: self.python,
            program: self.program,
            silence_limit: self.silence.then_some(limit),
            own_program: program.to_owned(),
            variables,
        };
        let (mut answer, examined) = answer::answer(&place, request).map_err(wrong)?;
        if self.partner || peer.is_some() {
            let examined = examined.context("this host was not examined")?;
            let host = hosts::peer::Host::new(&place, &answer, &examined, program)?;
            if let Some(peer) = &peer {
                hosts::peer::examine(peer, &host, &mut answer, program, end)?;
            } else {
                let address =
                    hosts::peer::address(self.interface.as_deref(), ssh_connection.as_deref())?;
                if self.attached {
                    hosts::peer::end_with_input();
                }
                return hosts::peer::serve(&host, address, program, end)
                    .map(|()| Ended::ServedAsPartner);
            }
        }
        show::show(&answer, self.env, report::beside(target.as_ref()))?;
        sink.map_or(Ok(()), |sink| sink.write(&answer))?;
        Ok(Ended::Judged(answer.verdict))
    }
}
