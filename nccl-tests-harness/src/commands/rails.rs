//! `nccl-spark rails`: the ports of this machine that the plugin would merge.

use crate::fabric::options::FabricOptions;
use crate::fabric::{self, Kind};
use crate::interrupt;
use crate::output::report::{self, JsonOption, Target};
use anyhow::{Context, Result};
use clap::Args;
use host::rails::{Limit, PciFunction, PcieLink, Rail, Refused, Survey, gbps};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::io::Write;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;
use std::process::Command;

/// Options of rails.
#[derive(Debug, Args)]
#[command(mut_arg("fabric", |arg| arg.help("Network whose rails are shown: RDMA devices or a software fabric [default: verbs]")))]
pub struct Options {
    /// Prints a line for each port: device, interface, cable, state (used, unused or down), rate.
    #[arg(long)]
    short: bool,
    #[command(flatten)]
    json: JsonOption,
    #[command(flatten)]
    fabric: FabricOptions,
}

/// The machine's rails as JSON. Rates are in Mb/s, in one direction.
#[derive(Debug, Default, Serialize)]
pub struct Found {
    /// Payload rate of all rails together. 0 without a rail.
    expected_mbps: u32,
    /// What limits `expected_mbps`: `cables`, `pcie` or `nothing`.
    limited_by: &'static str,
    /// The speed that NCCL sees.
    announced_mbps: u32,
    pub rails: Vec<RailJson>,
    unused: Vec<Value>,
    pub pcie_links: Vec<LinkJson>,
    warnings: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct RailJson {
    pub device: String,
    pub port: u8,
    pub netdev: Option<String>,
    pub physical_port: Option<String>,
    pub pci: Option<String>,
    /// Index in `pcie_links`.
    pub pcie_link: u8,
    /// Number of the cable, shared by the rails on it.
    pub cable: u8,
    /// Device of the cable's other function, which is on another PCIe link.
    pub twin: Option<String>,
    pub speed_mbps: u32,
    pub path_mtu_bytes: u32,
    pub netdev_mtu_bytes: Option<u32>,
    pub addresses: Vec<AddressJson>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct AddressJson {
    pub address: IpAddr,
    pub prefix: Option<u8>,
    pub gid_index: u16,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct LinkJson {
    /// PCI address of the slot, without a function number.
    pub slot: Option<String>,
    /// Generation and number of PCIe lanes.
    pub rate: Option<String>,
    pub payload_mbps: Option<u32>,
    pub devices: Vec<String>,
}

/// Prints which RoCE ports are rails, and why the other ports are not. Returns the exit status: 1
/// if there is no rail, else 0.
///
/// # Errors
/// The machine cannot be examined, or the output cannot be written.
pub fn rails(options: Options, program: &Path) -> Result<u8> {
    let Options {
        short,
        json,
        fabric,
    } = options;
    let request = fabric.request(program)?;
    if request.kind == Some(Kind::Soft) {
        interrupt::watch()?;
        let fabric = fabric::set_up(&request, 1, None)?;
        return on_fabric(program, short, json, fabric.environment(0));
    }
    let is_usable = report::of_run(json.target.as_ref(), Found::default(), |mut out, found| {
        let survey = verbs::survey()?;
        let text = if short {
            lines(&survey)
        } else {
            host::rails::report(&survey)
        };
        write!(out, "{text}")?;
        out.flush()?;
        let is_usable = !survey.rails.is_empty();
        *found = survey.into();
        Ok(is_usable)
    })?;
    Ok(u8::from(!is_usable))
}

/// Runs this command again as a child process, because a process cannot put the fabric's variables
/// into its own environment.
fn on_fabric(
    program: &Path,
    short: bool,
    json: JsonOption,
    environment: Vec<(String, String)>,
) -> Result<u8> {
    let mut command = Command::new(program);
    command
        .args(["rails", "--fabric", "verbs"])
        .args(short.then_some("--short"))
        .envs(environment);
    match json.target {
        Some(Target::Output) => command.arg("--json"),
        Some(Target::File(path)) => command.arg("--json").arg(path),
        None => &mut command,
    };
    let status = command
        .status()
        .with_context(|| format!("start {}", program.display()))?;
    Ok(status
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .unwrap_or(1))
}

/// Makes a line for each port, the rails first.
fn lines(survey: &Survey) -> String {
    let unknown = || "-".to_owned();
    let used = survey.rails.iter().map(|rail| {
        let name = format!("{}:{}", rail.device, rail.port);
        let netdev = rail.netdev.clone();
        let rate = gbps(rail.speed_mbps);
        [
            name,
            netdev.unwrap_or_else(unknown),
            survey.cable_name(rail),
            "used".to_owned(),
            rate,
        ]
    });
    let others = survey.refused.iter().map(|port| {
        let (state, rate) = if port.obstacle.is_link() {
            ("down", None)
        } else {
            ("unused", port.speed_mbps)
        };
        let [netdev, cable] =
            [&port.netdev, &port.phys_port].map(|name| name.clone().unwrap_or_else(unknown));
        [
            format!("{}:{}", port.device, port.port),
            netdev,
            cable,
            state.to_owned(),
            rate.map_or_else(unknown, gbps),
        ]
    });
    let ports: Vec<[String; 5]> = used.chain(others).collect();
    let widths = [0, 1, 2, 3].map(|column: usize| {
        ports
            .iter()
            .map(|port| port[column].len())
            .max()
            .unwrap_or(0)
    });
    let line = |port: &[String; 5]| {
        let cells = port
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell:width$}  "));
        cells.collect::<String>() + &port[4] + "\n"
    };
    ports.iter().map(line).collect()
}

impl From<Survey> for Found {
    fn from(survey: Survey) -> Self {
        let payload = survey.payload();
        let limited_by = match payload.limit {
            Limit::Nothing => "nothing",
            Limit::Cables => "cables",
            Limit::PcieLinks => "pcie",
        };
        Self {
            expected_mbps: payload.mbps,
            limited_by,
            announced_mbps: survey.speed_mbps,
            rails: survey
                .rails
                .iter()
                .map(|rail| rail_json(rail, &survey))
                .collect(),
            unused: survey.refused.into_iter().map(unused_json).collect(),
            pcie_links: survey.links.into_iter().map(LinkJson::from).collect(),
            warnings: survey
                .warnings
                .into_iter()
                .map(|warning| warning.text)
                .collect(),
        }
    }
}

fn rail_json(rail: &Rail, survey: &Survey) -> RailJson {
    let address = |address: &host::rails::RailAddress| AddressJson {
        address: Ipv6Addr::from(address.gid).to_canonical(),
        prefix: address.prefix,
        gid_index: address.gid_index,
    };
    RailJson {
        device: rail.device.clone(),
        port: rail.port,
        netdev: rail.netdev.clone(),
        physical_port: rail.phys_port.clone(),
        pci: rail.pci.as_ref().map(|pci| pci.address.clone()),
        pcie_link: rail.link as u8,
        cable: rail.cable as u8,
        twin: rail.twin.map(|at| survey.rails[at].device.clone()),
        speed_mbps: rail.speed_mbps,
        path_mtu_bytes: rail.path_mtu_bytes,
        netdev_mtu_bytes: rail.netdev_mtu_bytes,
        addresses: rail.addresses.iter().map(address).collect(),
    }
}

fn unused_json(port: Refused) -> Value {
    let pci = port.pci.map(|PciFunction { address, .. }| address);
    json!({
        "device": port.device, "port": port.port, "netdev": port.netdev, "physical_port": port.phys_port, "pci": pci,
        "speed_mbps": port.speed_mbps, "reason": port.obstacle.to_string(),
    })
}

impl From<PcieLink> for LinkJson {
    fn from(
        PcieLink {
            slot,
            devices,
            rate,
            payload_mbps,
        }: PcieLink,
    ) -> Self {
        Self {
            slot,
            rate: rate.map(|rate| rate.to_string()),
            payload_mbps,
            devices,
        }
    }
}
