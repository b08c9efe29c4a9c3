//! `nccl-spark rails`: which ports of this machine the plugin would merge.

use crate::output::report::{self, JsonOption};
use anyhow::Result;
use clap::Args;
use nccl_net_spark::rails::{Limit, PciFunction, PcieLink, Rail, Refused, Survey};
use serde::Serialize;
use std::io::Write;
use std::net::Ipv6Addr;

/// Options of rails.
#[derive(Debug, Args)]
pub struct Options {
    #[command(flatten)]
    json: JsonOption,
}

/// The machine's rails as JSON. Rates are in Mb/s, one direction.
#[derive(Debug, Default, Serialize)]
struct Found {
    /// What all rails carry together in payload; 0 without a rail.
    expected_mbps: u32,
    /// `cables`, `pcie` or `nothing`.
    limited_by: &'static str,
    /// The speed that NCCL sees.
    announced_mbps: u32,
    rails: Vec<RailJson>,
    unused: Vec<UnusedJson>,
    pcie_links: Vec<LinkJson>,
    warnings: Vec<String>,
}

#[derive(Debug, Serialize)]
struct RailJson {
    device: String,
    port: u8,
    netdev: Option<String>,
    physical_port: Option<String>,
    pci: Option<String>,
    /// An index in `pcie_links`.
    pcie_link: usize,
    cable: usize,
    /// The device of the other function of its cable, on another PCIe link.
    twin: Option<String>,
    speed_mbps: u32,
    path_mtu_bytes: u32,
    netdev_mtu_bytes: Option<u32>,
    addresses: Vec<AddressJson>,
}

#[derive(Debug, Serialize)]
struct AddressJson {
    address: String,
    prefix: Option<u8>,
    gid_index: u16,
}

#[derive(Debug, Serialize)]
struct UnusedJson {
    device: String,
    port: u8,
    netdev: Option<String>,
    physical_port: Option<String>,
    pci: Option<String>,
    reason: String,
}

#[derive(Debug, Serialize)]
struct LinkJson {
    slot: Option<String>,
    rate: Option<String>,
    payload_mbps: Option<u32>,
    devices: Vec<String>,
}

/// Prints which RoCE ports are rails, which are not, and why. False when none is.
///
/// # Errors
/// When the machine cannot be examined, or the output not be written.
pub fn rails(options: Options) -> Result<bool> {
    report::of_run(options.json.target.as_ref(), Found::default(), |mut out, found| {
        let survey = nccl_net_spark::plugin::survey()?;
        write!(out, "{}", nccl_net_spark::rails::report(&survey))?;
        out.flush()?;
        let is_usable = !survey.rails.is_empty();
        *found = survey.into();
        Ok(is_usable)
    })
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
            rails: survey.rails.iter().map(|rail| rail_json(rail, &survey)).collect(),
            unused: survey.refused.into_iter().map(UnusedJson::from).collect(),
            pcie_links: survey.links.into_iter().map(LinkJson::from).collect(),
            warnings: survey.warnings.into_iter().map(|warning| warning.text).collect(),
        }
    }
}

fn rail_json(rail: &Rail, survey: &Survey) -> RailJson {
    let address = |address: &nccl_net_spark::rails::RailAddress| AddressJson {
        address: Ipv6Addr::from(address.gid).to_canonical().to_string(),
        prefix: address.prefix,
        gid_index: address.gid_index,
    };
    RailJson {
        device: rail.device.clone(),
        port: rail.port,
        netdev: rail.netdev.clone(),
        physical_port: rail.phys_port.clone(),
        pci: rail.pci.as_ref().map(|pci| pci.address.clone()),
        pcie_link: rail.link,
        cable: rail.cable,
        twin: rail.twin.map(|at| survey.rails[at].device.clone()),
        speed_mbps: rail.speed_mbps,
        path_mtu_bytes: rail.path_mtu_bytes,
        netdev_mtu_bytes: rail.netdev_mtu_bytes,
        addresses: rail.addresses.iter().map(address).collect(),
    }
}

impl From<Refused> for UnusedJson {
    fn from(Refused { device, port, netdev, phys_port, pci, reason, .. }: Refused) -> Self {
        let pci = pci.map(|PciFunction { address, .. }| address);
        Self { device, port, netdev, physical_port: phys_port, pci, reason }
    }
}

impl From<PcieLink> for LinkJson {
    fn from(PcieLink { slot, devices, rate, payload_mbps }: PcieLink) -> Self {
        Self { slot, rate: rate.map(|rate| rate.to_string()), payload_mbps, devices }
    }
}
