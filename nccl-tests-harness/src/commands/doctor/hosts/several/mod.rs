//! `nccl-spark doctor --hosts a,b,c,d`: counts the rail pairs between hosts, and finds an order of
//! ranks. In this order a cable connects each rank to the next, and the last rank to the first.
//!
//! Each other host runs `nccl-spark rails --json -` over ssh. Nothing is measured: `order` only
//! compares addresses and subnets, by the plugin's own pairing rule.

mod order;

use super::rail::RailSheet;
use super::ssh::{Remote, SSH_ANSWER_TIMEOUT, Ssh};
use crate::commands::rails::{self, LinkJson, RailJson};
use crate::output::numbers::count;
use crate::output::plain;
use crate::output::report::{self, Target};
use crate::ranks::placement;
use anyhow::{Context, Result, bail};
use order::PairCounts;
use proto::wire::MAX_OFFERED_RAILS;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::time::Instant;

#[derive(Debug, Default, Serialize)]
pub struct HostsReport {
    hosts: Vec<HostJson>,
    /// Host names in the order of ranks. Null if no order has a cable between all neighbours.
    order: Option<Vec<String>>,
    /// Pairs of hosts that have no rail pair.
    apart: Vec<[String; 2]>,
}

#[derive(Debug, Serialize)]
struct HostJson {
    name: String,
    rails: Vec<String>,
    /// Number of rail pairs with each host, in the order of `HostsReport::hosts`.
    pairs: Vec<usize>,
}

/// Reads the rails of all hosts, and prints the result. Waits for hosts until `end` at the latest.
/// Returns false if no order of ranks has a cable between all neighbours.
///
/// # Errors
/// A host does not answer, or the output cannot be written.
pub fn run(names: &[String], ssh: &Ssh, end: Instant, json: Option<Target>) -> Result<bool> {
    report::of_run(json.as_ref(), HostsReport::default(), |mut out, found| {
        let rails = ask(names, ssh, end)?;
        let pair_counts = PairCounts::of(&rails.iter().map(Vec::as_slice).collect::<Vec<_>>());
        *found = HostsReport::of(names, &rails, &pair_counts);
        write!(out, "{}", text(found))?;
        out.flush()?;
        Ok(found.order.is_some())
    })
}

fn ask(names: &[String], ssh: &Ssh, end: Instant) -> Result<Vec<Vec<RailSheet>>> {
    let own = placement::local_host_name();
    let short = |name: &str| {
        name.rsplit('@')
            .next()
            .and_then(|host| host.split('.').next())
            .unwrap_or(name)
            .to_owned()
    };
    let end = end.min(Instant::now() + SSH_ANSWER_TIMEOUT);
    // Start the command on all hosts before waiting for the first answer.
    let asked: Vec<(&String, Option<Remote>)> = names
        .iter()
        .map(|name| {
            let is_here = name == "localhost" || short(name) == short(&own);
            let remote = (!is_here)
                .then(|| ssh.start(name, &["rails", "--json", "-"]))
                .transpose()?;
            Ok((name, remote))
        })
        .collect::<Result<_>>()?;
    asked
        .into_iter()
        .map(|(name, remote)| {
            let Some(remote) = remote else {
                let own = rails::Found::from(verbs::survey()?);
                return Ok(RailSheet::all(&own.rails, &own.pcie_links));
            };
            let text = read_output(name, remote, end)?;
            parse(&text).with_context(|| format!("{name}: nccl-spark rails --json -"))
        })
        .collect()
}

fn read_output(name: &str, mut remote: Remote, end: Instant) -> Result<String> {
    const MAX_OUTPUT_BYTES: usize = 1 << 20;
    let mut text = String::new();
    while let Some(line) = remote.line(end)? {
        text += &line;
        text.push('\n');
        if text.len() > MAX_OUTPUT_BYTES {
            bail!("{name} printed more than {MAX_OUTPUT_BYTES} bytes");
        }
    }
    // The exit status does not matter: a host without a rail prints its JSON and exits with 1.
    if text.trim().is_empty() {
        Err(remote.exit_error())
    } else {
        Ok(text)
    }
}

#[derive(Debug, Deserialize)]
struct Rails {
    error: Option<String>,
    rails: Vec<RailJson>,
    pcie_links: Vec<LinkJson>,
}

/// Parses the JSON in a host's output. The login shell may print other lines first.
fn parse(text: &str) -> Result<Vec<RailSheet>> {
    let start = text.find("{\n").context("the output has no JSON")?;
    let found: Rails = serde_json::from_str(&text[start..]).context(
        "the JSON does not have the fields of this version; install the same version on all hosts",
    )?;
    if let Some(error) = found.error {
        bail!("{}", plain(&error));
    }
    if found.rails.len() > MAX_OFFERED_RAILS {
        bail!(
            "the host lists {} rails; at most {MAX_OFFERED_RAILS} are supported",
            found.rails.len()
        );
    }
    Ok(RailSheet::all(&found.rails, &found.pcie_links))
}

impl HostsReport {
    fn of(names: &[String], rails: &[Vec<RailSheet>], pair_counts: &PairCounts) -> Self {
        let all = 0..names.len();
        let hosts = all.clone().map(|at| HostJson {
            name: names[at].clone(),
            rails: rails[at].iter().map(|rail| rail.name.clone()).collect(),
            pairs: all
                .clone()
                .map(|other| pair_counts.rails(at, other))
                .collect(),
        });
        Self {
            hosts: hosts.collect(),
            order: pair_counts
                .order()
                .map(|order| order.into_iter().map(|at| names[at].clone()).collect()),
            apart: pair_counts
                .pairs_without_rails()
                .into_iter()
                .map(|(one, other)| [names[one].clone(), names[other].clone()])
                .collect(),
        }
    }
}

fn text(found: &HostsReport) -> String {
    let column_width = found
        .hosts
        .iter()
        .map(|host| host.name.len())
        .max()
        .unwrap_or(0)
        .max(5);
    let row = |name: &str, cells: Vec<String>| {
        let cells = cells
            .iter()
            .map(|cell| format!(" {cell:>column_width$}"))
            .collect::<String>();
        format!("{name:<column_width$}{cells}\n")
    };
    let mut page = row(
        "rails",
        found.hosts.iter().map(|host| host.name.clone()).collect(),
    );
    for (at, host) in found.hosts.iter().enumerate() {
        let cell = |(to, pairs): (usize, &usize)| match pairs {
            _ if to == at => "-".to_owned(),
            0 => "none".to_owned(),
            pairs => pairs.to_string(),
        };
        page += &row(
            &host.name,
            host.pairs.iter().enumerate().map(cell).collect(),
        );
    }
    for host in found.hosts.iter().filter(|host| host.rails.is_empty()) {
        page += &format!(
            "{}: no rail found; run `nccl-spark doctor` on it for the reason\n",
            host.name
        );
    }
    match found.order.as_deref() {
        Some(order) => {
            page += &format!("\nRanks in this order: {}\n", order.join(","));
            if let [first, _, ..] = order {
                page += &format!("  {} -- {first}\n", order.join(" -- "));
            }
        }
        None => {
            page += "\nNo order of ranks has a cable between all neighbours, including the last and the first.\n"
        }
    }
    if !found.apart.is_empty() {
        let pairs = found
            .apart
            .iter()
            .map(|pair| pair.join(" and "))
            .collect::<Vec<_>>()
            .join("; ");
        page += &format!(
            "Without a rail in common ({}): {pairs}\n",
            count(found.apart.len(), "pair")
        );
        let ring = found.order.as_ref().map_or(
            "",
            |_| "NCCL_ALGO=Ring in this order keeps collectives off them; ",
        );
        page += &format!("  {ring}NCCL_SPARK_RING_TCP=1 on every host connects them by TCP.\n");
    }
    page
}

#[cfg(test)]
mod tests;
