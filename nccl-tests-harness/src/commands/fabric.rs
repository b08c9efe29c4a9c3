//! `nccl-spark fabric`: injects faults into a job's software fabric, and lists running fabrics.

use crate::fabric::options::parse_factor;
use crate::fabric::parse_fabric_name;
use crate::output;
use crate::output::report::{self, JsonOption, Target};
use anyhow::{Result, anyhow, bail};
use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;
use serde_json::{Value, json};
use softverbs::control::{self, Action, NodeStatus, RailStatus, Status};
use softverbs::path::PathFault;
use softverbs::settings;
use std::io::Write;
use std::path::Path;

/// Options of fabric.
#[derive(Debug, Args)]
pub struct Options {
    #[command(subcommand)]
    what: What,
    /// The fabric, as the run's header names it [default: the only one that runs].
    #[arg(long, global = true, value_name = "NAME", value_parser = parse_fabric_name)]
    fabric_name: Option<String>,
}

/// What to do; a node is a rank of the job.
#[derive(Debug, Subcommand)]
enum What {
    /// Shows the fabrics that run: nodes, processes, each rail's speed, injected faults.
    ///
    /// Exit status: 0 a fabric runs, 1 none does, 2 the command line is wrong.
    Status {
        #[command(flatten)]
        json: JsonOption,
    },
    /// Takes a rail's port down.
    Down(Rail),
    /// Brings a rail's port up again.
    Up(Rail),
    /// Takes a rail's addresses away under its connections, as a network manager does, or adds them
    /// again, at other indices of the GID table.
    Address {
        #[command(flatten)]
        rail: Rail,
        /// What to do with the addresses.
        change: AddressChange,
    },
    /// Takes a rail's function off the bus, as a hotplug handler does: programs lose the device,
    /// then its files disappear.
    Unplug(Rail),
    /// Brings a rail's function back, as a new device of the same name.
    Plug(Rail),
    /// Resets the firmware of a rail's function: it fails, leaves the bus, and is back after half a
    /// second, as a new device of the same name.
    Reset(Rail),
    /// Limits a rail to a part of its full rate.
    Slow {
        #[command(flatten)]
        rail: Rail,
        /// The part: above 0; 1 removes the limit.
        #[arg(value_parser = parse_factor)]
        factor: f64,
    },
    /// Makes a rail answer the next incoming requests with "invalid request", which breaks their
    /// queue pairs.
    Refuse {
        #[command(flatten)]
        rail: Rail,
        /// Number of requests; 0 ends the fault.
        #[arg(allow_negative_numbers = true, value_parser = parse_count)]
        count: u32,
    },
    /// Lets the next queue pairs that connect by a rail fail to resolve the peer's address, which
    /// takes a second each.
    Unresolved {
        #[command(flatten)]
        rail: Rail,
        /// Number of queue pairs; 0 ends the fault.
        #[arg(allow_negative_numbers = true, value_parser = parse_count)]
        count: u32,
    },
    /// Gives the path of a rail a fault that its port does not show, or ends it.
    ///
    /// silent: all packets get lost. crossed-arp: its twin answers ARP for it, so that queue pairs
    /// connected by its IPv4 address reach the twin. switch-mtu: a switch drops packets with more
    /// than 1024 bytes of payload. spanning-tree:SECONDS: a switch port drops all frames in that
    /// time after the port came up; 5 seconds if none are given. loss:PACKETS: one packet in
    /// PACKETS is lost; 1000 if no number is given.
    Path {
        #[command(flatten)]
        rail: Rail,
        /// The fault: silent, crossed-arp, switch-mtu, spanning-tree[:SECONDS] or loss[:PACKETS].
        #[arg(value_parser = PathFault::parse)]
        fault: PathFault,
        /// Ends the fault.
        #[arg(long)]
        off: bool,
    },
}

/// A change of a rail's addresses, as a command of `ip address`.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum AddressChange {
    Del,
    Add,
}

/// The rail argument.
#[derive(Debug, Args)]
struct Rail {
    /// The rail of one node, or with * of all nodes.
    #[arg(value_name = "NODE:RAIL", value_parser = parse_rail)]
    rail: Place,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    node: Option<usize>,
    rail: String,
}

#[derive(Debug, Default, Serialize)]
struct Running {
    fabrics: Vec<Value>,
}

impl Options {
    /// Runs the command. Returns false if there is no running fabric to show.
    ///
    /// # Errors
    /// There is no such fabric, node or rail.
    pub fn run(self) -> Result<bool> {
        let dir = settings::dir().map_err(anyhow::Error::msg)?;
        let name = self.fabric_name.as_deref();
        let (place, action, effect) = match self.what {
            What::Status { json } => return status(&dir, name, json.target),
            What::Down(rail) => (rail, Action::Down, "port down".to_owned()),
            What::Up(rail) => (rail, Action::Up, "port up".to_owned()),
            What::Address { rail, change } => match change {
                AddressChange::Del => (rail, Action::Addresses(false), "no address".to_owned()),
                AddressChange::Add => (rail, Action::Addresses(true), "has addresses".to_owned()),
            },
            What::Unplug(rail) => (rail, Action::Unplug, "unplugged".to_owned()),
            What::Plug(rail) => (rail, Action::Plug, "plugged in".to_owned()),
            What::Reset(rail) => (rail, Action::Reset, "reset".to_owned()),
            What::Slow { rail, factor: 1.0 } => (rail, Action::Slow(1.0), "full rate".to_owned()),
            What::Slow { rail, factor } => (
                rail,
                Action::Slow(factor),
                format!("limited to {factor} of its rate"),
            ),
            What::Refuse { rail, count: 0 } => {
                (rail, Action::Refuse(0), "refuses no requests".to_owned())
            }
            What::Refuse { rail, count: 1 } => (
                rail,
                Action::Refuse(1),
                "refuses the next request".to_owned(),
            ),
            What::Refuse { rail, count } => (
                rail,
                Action::Refuse(count),
                format!("refuses the next {count} requests"),
            ),
            What::Unresolved { rail, count: 0 } => {
                (rail, Action::Unresolved(0), "finds its peers".to_owned())
            }
            What::Unresolved { rail, count } => (
                rail,
                Action::Unresolved(count),
                format!("leaves {count} connections unanswered"),
            ),
            What::Path { rail, fault, off } => {
                let effect = format!("path fault {fault}{}", if off { " ended" } else { "" });
                (rail, Action::Path(fault, !off), effect)
            }
        };
        let name = name.map_or_else(|| only_one(&dir), |name| Ok(name.to_owned()))?;
        let Rail {
            rail: Place { node, rail },
        } = place;
        control::control(&dir, &name, node, &rail, action).map_err(|error| anyhow!(error))?;
        let node = node.map_or_else(|| "every node".to_owned(), |node| format!("node {node}"));
        writeln!(
            output::standard(),
            "fabric {name}: {rail} of {node}: {effect}"
        )?;
        Ok(true)
    }
}

fn only_one(dir: &Path) -> Result<String> {
    let names = control::used(dir);
    match names.as_slice() {
        [name] => Ok(name.clone()),
        [] => bail!("no software fabric runs in {}", dir.display()),
        _ => bail!(
            "several software fabrics run: name one with --fabric-name: {}",
            names.join(", ")
        ),
    }
}

fn status(dir: &Path, name: Option<&str>, json: Option<Target>) -> Result<bool> {
    report::of_run(json.as_ref(), Running::default(), |mut out, running| {
        let names = name.map_or_else(|| control::used(dir), |name| vec![name.to_owned()]);
        for one in &names {
            match control::status(dir, one) {
                Ok(status) => {
                    write!(out, "{}", text(&status))?;
                    running.fabrics.push(as_json(&status));
                }
                // A fabric in the list may have ended in the meantime.
                Err(_) if name.is_none() => {}
                Err(error) => bail!(error),
            }
        }
        if running.fabrics.is_empty() {
            writeln!(out, "no software fabric runs in {}", dir.display())?;
        }
        out.flush()?;
        Ok(!running.fabrics.is_empty())
    })
}

fn text(status: &Status) -> String {
    let Status {
        name,
        folder,
        nodes,
    } = status;
    let plural = if nodes.len() == 1 { "" } else { "s" };
    let mut text = format!(
        "fabric {name}: {} node{plural}, files in {}\n",
        nodes.len(),
        folder.display()
    );
    let width = nodes
        .iter()
        .flat_map(|node| &node.rails)
        .map(|rail| rail.device.len())
        .max()
        .unwrap_or(0);
    for NodeStatus {
        node,
        pids,
        queue_pairs,
        registrations,
        rails,
    } in nodes
    {
        let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
        let processes = match pids.as_slice() {
            [] => "no process yet".to_owned(),
            [pid] => format!("process {pid}"),
            _ => format!("processes {}", pids.join(", ")),
        };
        text += &format!(
            "  node {node} ({processes}): {queue_pairs} queue pairs, {registrations} registrations\n"
        );
        for rail in rails {
            text += &format!("    {:width$}  {}\n", rail.device, state(rail));
        }
    }
    text
}

fn state(rail: &RailStatus) -> String {
    let mut parts = vec![match (rail.full_mbps, rail.now_mbps) {
        _ if rail.is_unplugged => "unplugged".to_owned(),
        _ if rail.is_down => "port down".to_owned(),
        (None, None) => "no rate limit".to_owned(),
        (Some(full), Some(now)) if now < full => {
            format!("{}, slowed from {}", rate(now), rate(full))
        }
        (_, Some(now)) => rate(now),
        (Some(full), None) => rate(full),
    }];
    if rail.is_without_address {
        parts.push("no address".to_owned());
    }
    match rail.refusals {
        0 => {}
        1 => parts.push("refuses the next request".to_owned()),
        count => parts.push(format!("refuses the next {count} requests")),
    }
    if rail.unanswered > 0 {
        parts.push(format!("leaves {} connections unanswered", rail.unanswered));
    }
    parts.extend(rail.path.iter().map(|fault| format!("path fault {fault}")));
    parts.join(", ")
}

fn rate(mbps: f64) -> String {
    if mbps < 1_000.0 {
        format!("{mbps:.1} Mb/s")
    } else {
        format!("{:.2} Gb/s", mbps / 1_000.0)
    }
}

/// Returns the status as JSON. Rates are null if the rail has no rate limit. `sent_bytes` is the
/// number of bytes that the rail has sent since the fabric started: payload, and control data that
/// the ends of connections write to each other.
fn as_json(status: &Status) -> Value {
    let rail_json = |rail: &RailStatus| {
        json!({
            "device": rail.device,
            "full_mbps": rail.full_mbps,
            "now_mbps": rail.now_mbps,
            "down": rail.is_down,
            "without_address": rail.is_without_address,
            "unplugged": rail.is_unplugged,
            "refuses_requests": rail.refusals,
            "unanswered_connections": rail.unanswered,
            "path_faults": rail.path.iter().map(|fault| fault.to_string()).collect::<Vec<_>>(),
            "sent_bytes": rail.sent_bytes,
        })
    };
    let node_json = |node: &NodeStatus| {
        json!({
            "node": node.node,
            "pids": node.pids,
            "queue_pairs": node.queue_pairs,
            "registrations": node.registrations,
            "rails": node.rails.iter().map(rail_json).collect::<Vec<_>>(),
        })
    };
    let nodes = status.nodes.iter().map(node_json).collect::<Vec<_>>();
    json!({ "name": status.name, "folder": status.folder, "nodes": nodes })
}

fn parse_count(text: &str) -> Result<u32, String> {
    text.parse()
        .map_err(|_| "must be a number from 0 on".to_owned())
}

fn parse_rail(text: &str) -> Result<Place, String> {
    match text.split_once(':') {
        Some(("*", rail)) if !rail.is_empty() => Ok(Place {
            node: None,
            rail: rail.to_owned(),
        }),
        Some((node, rail)) if !rail.is_empty() && node.parse::<usize>().is_ok() => Ok(Place {
            node: node.parse().ok(),
            rail: rail.to_owned(),
        }),
        _ => Err("must be NODE:RAIL, as in 1:rocep1s0f0, or *:rocep1s0f0 for all nodes".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use softverbs::path::PathFaults;
    use softverbs::profile::Profile;

    #[test]
    fn rails_are_named_with_their_node() {
        let place = |node, rail: &str| Place {
            node,
            rail: rail.to_owned(),
        };
        assert_eq!(parse_rail("1:a").unwrap(), place(Some(1), "a"));
        assert_eq!(parse_rail("*:a").unwrap(), place(None, "a"));
        assert!(
            parse_rail("a").is_err() && parse_rail("1:").is_err() && parse_rail("x:a").is_err()
        );
    }

    #[test]
    fn a_single_running_fabric_needs_no_name() {
        let dir = tempfile::tempdir().unwrap();
        let profile = Profile::load("unpaced", 1.0).unwrap();
        let error = || format!("{:#}", only_one(dir.path()).unwrap_err());
        assert!(error().contains("no software fabric runs"));
        let a = control::prepare(dir.path(), "a", &profile, 1).unwrap();
        let b = control::prepare(dir.path(), "b", &profile, 1).unwrap();
        assert!(error().ends_with("--fabric-name: a, b"));
        drop(b);
        assert!(
            dir.path().join("b/fabric").exists(),
            "its files are still there"
        );
        assert_eq!(only_one(dir.path()).unwrap(), "a");
        drop(a);
        assert!(error().contains("no software fabric runs"));
    }

    #[test]
    fn the_state_of_a_rail_fits_a_line() {
        let healthy = RailStatus {
            device: "rocep1s0f0".to_owned(),
            full_mbps: Some(112_000.0),
            now_mbps: Some(112_000.0),
            is_down: false,
            is_without_address: false,
            is_unplugged: false,
            refusals: 0,
            unanswered: 0,
            path: PathFaults::default(),
            sent_bytes: 0,
        };
        assert_eq!(state(&healthy), "112.00 Gb/s");
        let slow = RailStatus {
            now_mbps: Some(560.0),
            refusals: 3,
            ..healthy.clone()
        };
        assert_eq!(
            state(&slow),
            "560.0 Mb/s, slowed from 112.00 Gb/s, refuses the next 3 requests"
        );
        let path = PathFaults::default()
            .with(PathFault::Silent, true)
            .with(PathFault::SwitchMtu, true);
        let dead = RailStatus {
            is_without_address: true,
            unanswered: 2,
            path,
            ..healthy.clone()
        };
        assert_eq!(
            state(&dead),
            "112.00 Gb/s, no address, leaves 2 connections unanswered, path fault silent, path fault switch-mtu"
        );
        assert_eq!(
            state(&RailStatus {
                full_mbps: None,
                now_mbps: None,
                ..healthy.clone()
            }),
            "no rate limit"
        );
        let rails = vec![RailStatus {
            is_down: true,
            now_mbps: Some(0.0),
            ..healthy
        }];
        let nodes = vec![NodeStatus {
            node: 0,
            pids: vec![7],
            queue_pairs: 4,
            registrations: 6,
            rails,
        }];
        let shown = text(&Status {
            name: "a".to_owned(),
            folder: "/dev/shm/a".into(),
            nodes,
        });
        assert_eq!(
            shown,
            "fabric a: 1 node, files in /dev/shm/a\n  node 0 (process 7): 4 queue pairs, 6 registrations\n    rocep1s0f0  \
             port down\n"
        );
    }
}
