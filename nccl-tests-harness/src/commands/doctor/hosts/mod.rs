//! `nccl-spark doctor --hosts a,b,c,d`: which hosts have rails in common, and the order of ranks in which no neighbours lack a cable.
//!
//! Each host is asked by ssh what `nccl-spark rails --json -` says there; this host answers for itself. Nothing is measured: addresses
//! and subnets alone are compared (`order`), by the plugin's own rule for pairs.

mod order;

use super::rail::RailSheet;
use super::ssh::{ANSWER, Remote, Ssh};
use crate::commands::rails::{LinkJson, RailJson};
use crate::output::numbers::count;
use crate::output::plain;
use crate::output::report::{self, Target};
use crate::ranks::seats;
use anyhow::{Context, Result, bail};
use order::Reach;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

pub use order::MOST;

/// The hosts, as JSON has them.
#[derive(Debug, Default, Serialize)]
pub struct Found {
    hosts: Vec<HostJson>,
    /// Names in the order of ranks; null where there is none without a missing cable.
    order: Option<Vec<String>>,
    /// Hosts that have no rail in common.
    apart: Vec<[String; 2]>,
}

#[derive(Debug, Serialize)]
struct HostJson {
    name: String,
    /// Names of its rails.
    rails: Vec<String>,
    /// How many pairs of rails it has with each host.
    pairs: Vec<usize>,
}

/// Asks all hosts until `end` at the latest, and prints what they have in common. False where no order of ranks has a cable between all neighbours.
///
/// # Errors
/// When a host does not answer, or the output cannot be written.
pub fn run(names: &[String], ssh: &Ssh, program: &Path, end: Instant, json: Option<Target>) -> Result<bool> {
    report::of_run(json.as_ref(), Found::default(), |mut out, found| {
        let rails = ask(names, ssh, program, end)?;
        let reach = Reach::of(&rails.iter().map(Vec::as_slice).collect::<Vec<_>>());
        *found = Found::of(names, &rails, &reach);
        write!(out, "{}", text(found))?;
        out.flush()?;
        Ok(found.order.is_some())
    })
}

fn ask(names: &[String], ssh: &Ssh, program: &Path, end: Instant) -> Result<Vec<Vec<RailSheet>>> {
    let own = seats::host();
    let short = |name: &str| name.rsplit('@').next().and_then(|host| host.split('.').next()).unwrap_or(name).to_owned();
    let end = end.min(Instant::now() + ANSWER);
    // All at once, then each answer in turn.
    let asked: Vec<(&String, Option<Remote>)> = names
        .iter()
        .map(|name| {
            let is_here = name == "localhost" || short(name) == short(&own);
            let remote = (!is_here).then(|| ssh.start(name, &["rails", "--json", "-"])).transpose()?;
            Ok((name, remote))
        })
        .collect::<Result<_>>()?;
    asked
        .into_iter()
        .map(|(name, remote)| {
            let text = match remote {
                Some(remote) => all_of(remote, end)?,
                None => here(program)?,
            };
            parse(&text).with_context(|| format!("{name}: what `nccl-spark rails --json -` printed there"))
        })
        .collect()
}

/// The answer of this host, by a process of its own.
fn here(program: &Path) -> Result<String> {
    let mut command = Command::new(program);
    command.args(["rails", "--json", "-"]).stdin(Stdio::null()).stderr(Stdio::null());
    let output = command.output().with_context(|| format!("start {}", program.display()))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn all_of(mut remote: Remote, end: Instant) -> Result<String> {
    const MOST_BYTES: usize = 1 << 20;
    let mut text = String::new();
    while let Some(line) = remote.line(end)? {
        text += &line;
        text.push('\n');
        if text.len() > MOST_BYTES {
            bail!("more than {MOST_BYTES} bytes came");
        }
    }
    // Without a rail the exit status is 1, and the answer is there.
    if text.trim().is_empty() { Err(remote.ended()) } else { Ok(text) }
}

/// The output of `nccl-spark rails --json`, as much of it as is needed.
#[derive(Debug, Deserialize)]
struct Rails {
    error: Option<String>,
    rails: Vec<RailJson>,
    pcie_links: Vec<LinkJson>,
}

/// Reads the JSON in a host's output, before which its login may have printed something.
fn parse(text: &str) -> Result<Vec<RailSheet>> {
    /// The plugin takes fewer.
    const MOST_RAILS: usize = 32;
    let start = text.find("{\n").context("it has no JSON")?;
    let found: Rails = serde_json::from_str(&text[start..]).context("it is not the JSON of this version")?;
    if let Some(error) = found.error {
        bail!("{}", plain(&error));
    }
    if found.rails.len() > MOST_RAILS {
        bail!("it has {} rails, and {MOST_RAILS} at most are taken", found.rails.len());
    }
    Ok(RailSheet::all(&found.rails, &found.pcie_links))
}

impl Found {
    fn of(names: &[String], rails: &[Vec<RailSheet>], reach: &Reach) -> Self {
        let all = 0..names.len();
        let hosts = all.clone().map(|at| HostJson {
            name: names[at].clone(),
            rails: rails[at].iter().map(|rail| rail.name.clone()).collect(),
            pairs: all.clone().map(|other| reach.rails(at, other)).collect(),
        });
        Self {
            hosts: hosts.collect(),
            order: reach.order().map(|order| order.into_iter().map(|at| names[at].clone()).collect()),
            apart: reach.apart().into_iter().map(|(one, other)| [names[one].clone(), names[other].clone()]).collect(),
        }
    }
}

/// A table of what each two have, then the order.
fn text(found: &Found) -> String {
    let wide = found.hosts.iter().map(|host| host.name.len()).max().unwrap_or(0).max(5);
    let mut page = String::new();
    let heads = found.hosts.iter().map(|host| format!(" {:>wide$}", host.name)).collect::<String>();
    // Writing to a String cannot fail.
    let _ = writeln!(page, "{:wide$}{heads}", "rails");
    for (at, host) in found.hosts.iter().enumerate() {
        let cell = |(to, pairs): (usize, &usize)| match *pairs {
            _ if to == at => format!(" {:>wide$}", "-"),
            0 => format!(" {:>wide$}", "none"),
            pairs => format!(" {pairs:>wide$}"),
        };
        let _ = writeln!(page, "{:<wide$}{}", host.name, host.pairs.iter().enumerate().map(cell).collect::<String>());
    }
    for host in found.hosts.iter().filter(|host| host.rails.is_empty()) {
        let _ = writeln!(page, "{} has no rail: nccl-spark doctor there says why", host.name);
    }
    match &found.order {
        Some(order) => {
            let _ = writeln!(page, "\nRanks in this order: {}", order.join(","));
            if order.len() > 1 {
                let ring: Vec<&str> = order.iter().chain(order.first()).map(String::as_str).collect();
                let _ = writeln!(page, "  {}", ring.join(" -- "));
            }
        }
        None => {
            let _ =
                writeln!(page, "\nNo order of ranks has a cable between all neighbours, the last and the first too.");
        }
    }
    if !found.apart.is_empty() {
        let pairs = found.apart.iter().map(|[one, other]| format!("{one} and {other}")).collect::<Vec<_>>().join("; ");
        let _ = writeln!(page, "Without a rail in common ({}): {pairs}", count(found.apart.len(), "pair"));
        let _ = writeln!(
            page,
            "  NCCL_ALGO=Ring in this order keeps collectives off them; NCCL_SPARK_RING_TCP=1 on every host connects them by TCP."
        );
    }
    page
}

#[cfg(test)]
mod tests;
