//! `nccl-spark doctor --hosts a,b,c,d`: which hosts have rails in common, and the order of ranks in which no neighbours lack a cable.
//!
//! Each host is asked by ssh what `nccl-spark rails --json -` says there; this host answers for itself. Nothing is measured: addresses
//! and subnets alone are compared (`order`), by the plugin's own rule for pairs.

mod order;

use super::peer::RailSheet;
use super::ssh::{ANSWER, Remote, Ssh};
use crate::output::numbers::count;
use crate::output::plain;
use crate::output::report::{self, Target};
use crate::ranks::seats;
use anyhow::{Context, Result, bail};
use order::Reach;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::io::Write;
use std::net::Ipv6Addr;
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

/// What this host says: by a process of its own, as the others do.
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

/// `nccl-spark rails --json`, as much of it as is needed.
#[derive(Debug, Deserialize)]
struct Rails {
    #[serde(default)]
    error: Option<String>,
    rails: Vec<RailText>,
    pcie_links: Vec<LinkText>,
}

#[derive(Debug, Deserialize)]
struct RailText {
    device: String,
    port: u8,
    netdev: Option<String>,
    physical_port: Option<String>,
    pcie_link: u8,
    cable: u8,
    speed_mbps: u32,
    path_mtu_bytes: u32,
    netdev_mtu_bytes: Option<u32>,
    addresses: Vec<AddressText>,
}

#[derive(Debug, Deserialize)]
struct AddressText {
    address: std::net::IpAddr,
    prefix: Option<u8>,
}

#[derive(Debug, Deserialize)]
struct LinkText {
    payload_mbps: Option<u32>,
}

/// The JSON in a host's output, before which its login may have printed something.
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
    let link_mbps = |link: u8| found.pcie_links.get(usize::from(link)).and_then(|link| link.payload_mbps).unwrap_or(0);
    let rail = |rail: &RailText| RailSheet {
        name: format!("{}:{}", rail.device, rail.port),
        netdev: rail.netdev.clone(),
        phys_port: rail.physical_port.clone(),
        link: rail.pcie_link,
        link_mbps: link_mbps(rail.pcie_link),
        cable: rail.cable,
        port_mbps: rail.speed_mbps,
        share_mbps: rail.speed_mbps,
        mtu_bytes: rail.path_mtu_bytes,
        netdev_mtu_bytes: rail.netdev_mtu_bytes,
        addresses: rail.addresses.iter().map(|one| (mapped(one.address), one.prefix)).collect(),
    };
    Ok(found.rails.iter().map(rail).collect())
}

fn mapped(ip: std::net::IpAddr) -> Ipv6Addr {
    match ip {
        std::net::IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        std::net::IpAddr::V6(ip) => ip,
    }
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
mod tests {
    use super::*;

    fn printed(device: &str, address: &str) -> String {
        format!(
            "Welcome to DGX OS\n{{\n  \"expected_mbps\": 1, \"rails\": [{{\"device\": \"{device}\", \"port\": 1, \"netdev\": null, \
             \"physical_port\": \"p0\", \"pci\": null, \"pcie_link\": 0, \"cable\": 0, \"twin\": null, \"speed_mbps\": 200000, \
             \"path_mtu_bytes\": 4096, \"netdev_mtu_bytes\": 9000, \"addresses\": [{{\"address\": \"{address}\", \"prefix\": 24, \
             \"gid_index\": 3}}]}}], \"unused\": [], \"pcie_links\": [{{\"slot\": null, \"rate\": null, \"payload_mbps\": 112027, \
             \"devices\": []}}], \"warnings\": [], \"ok\": true, \"error\": null}}\n"
        )
    }

    #[test]
    fn what_rails_prints_on_a_host_is_read() {
        let rails = parse(&printed("rocep1s0f0", "192.168.100.1")).unwrap();
        assert_eq!((rails[0].name.as_str(), rails[0].link_mbps), ("rocep1s0f0:1", 112_027));
        assert_eq!(rails[0].addresses, [("::ffff:192.168.100.1".parse().unwrap(), Some(24))]);
        let error = |text: &str| format!("{:#}", parse(text).unwrap_err());
        assert!(error("command not found").contains("no JSON"));
        assert!(error("{\n\"rails\": 7}").contains("not the JSON of this version"));
        let failed = "{\n\"rails\": [], \"pcie_links\": [], \"ok\": false, \"error\": \"libibverbs.so.1 is missing\"}";
        assert!(error(failed).contains("libibverbs.so.1 is missing"));
        assert!(error(&failed.replace("is missing", "\\u001b[2J")).contains("libibverbs.so.1 ?[2J"));
    }

    #[test]
    fn the_page_names_the_order_and_who_is_apart() {
        let hosts =
            [printed("mlx5_0", "192.168.1.1"), printed("mlx5_0", "192.168.2.2"), printed("mlx5_0", "192.168.1.3")];
        let names = ["a", "b", "c"].map(str::to_owned);
        let rails: Vec<_> = hosts.iter().map(|text| parse(text).unwrap()).collect();
        let reach = Reach::of(&rails.iter().map(Vec::as_slice).collect::<Vec<_>>());
        let page = text(&Found::of(&names, &rails, &reach));
        assert!(page.contains("No order of ranks") && page.contains("(2 pairs): a and b; b and c"), "{page}");
        let two = [0, 2].map(|at: usize| rails[at].clone());
        let reach = Reach::of(&two.iter().map(Vec::as_slice).collect::<Vec<_>>());
        let page = text(&Found::of(&[names[0].clone(), names[2].clone()], &two, &reach));
        assert!(page.contains("Ranks in this order: a,c\n  a -- c -- a\n"), "{page}");
    }
}
