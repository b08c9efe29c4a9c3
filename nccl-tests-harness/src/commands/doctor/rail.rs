//! A rail as another host knows it, and the rails of two hosts that belong together, by the plugin's
//! own rule.

use crate::commands::rails::RailJson;
use nccl_net_spark::flow::pairing;
use nccl_net_spark::rails::{Rail, Survey};
use nccl_net_spark::wire::fields::{Address, Attachment, RailAdvert};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv6Addr};

/// A rail of a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RailSheet {
    /// Device and port, as `NCCL_IB_HCA` has them.
    pub name: String,
    /// Interface of the rail.
    pub netdev: Option<String>,
    /// The physical port ("p0").
    pub phys_port: Option<String>,
    /// Rails of one number share a PCIe link.
    pub link: u8,
    /// Payload rate of the link in Mb/s; 0 where it is not known.
    pub link_mbps: u32,
    /// Rails of one number share a cable.
    pub cable: u8,
    /// Line rate of the port in Mb/s.
    pub port_mbps: u32,
    /// Rate in Mb/s while the others on the link are as busy.
    pub share_mbps: u32,
    /// Path MTU in bytes.
    pub mtu_bytes: u32,
    /// Its addresses, IPv4 mapped into IPv6, each with the length of its subnet's prefix.
    pub addresses: Vec<(Ipv6Addr, Option<u8>)>,
}

/// Two rails that belong together: places among those of this host and of the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    /// This host's.
    pub here: usize,
    /// The peer's.
    pub there: usize,
    /// Whether their addresses share a subnet. If not, they are paired by their cables, which names alone may show.
    pub shares_subnet: bool,
}

impl RailSheet {
    /// A rail of a survey.
    pub fn of(rail: &Rail, survey: &Survey) -> Self {
        let Attachment { link, link_mbps, cable, port_mbps } = survey.attachment(rail);
        Self {
            name: name(rail),
            netdev: rail.netdev.clone(),
            phys_port: rail.phys_port.clone(),
            link,
            link_mbps,
            cable,
            port_mbps,
            share_mbps: survey.share_of_link_mbps(rail),
            mtu_bytes: rail.path_mtu_bytes,
            addresses: rail.addresses.iter().map(|one| (Ipv6Addr::from(one.gid), one.prefix)).collect(),
        }
    }

    /// A rail as `nccl-spark rails` lists it; `link_mbps` is what its PCIe link carries.
    pub fn listed(rail: &RailJson, link_mbps: u32) -> Self {
        let mapped = |ip: IpAddr| match ip {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        Self {
            name: format!("{}:{}", rail.device, rail.port),
            netdev: rail.netdev.clone(),
            phys_port: rail.physical_port.clone(),
            link: rail.pcie_link,
            link_mbps,
            cable: rail.cable,
            port_mbps: rail.speed_mbps,
            share_mbps: rail.speed_mbps,
            mtu_bytes: rail.path_mtu_bytes,
            addresses: rail.addresses.iter().map(|one| (mapped(one.address), one.prefix)).collect(),
        }
    }

    fn advert(&self) -> RailAdvert {
        RailAdvert {
            name: self.name.clone(),
            phys_port: self.phys_port.clone().unwrap_or_default(),
            attachment: Attachment {
                link: self.link,
                link_mbps: self.link_mbps,
                cable: self.cable,
                port_mbps: self.port_mbps.max(1),
            },
            speed_mbps: self.share_mbps.max(1),
            mtu_bytes: self.mtu_bytes,
            addresses: self.addresses.iter().map(|(ip, prefix)| Address::new(ip.octets(), *prefix)).collect(),
            is_usable: true,
        }
    }
}

/// Device and port of a rail.
pub fn name(rail: &Rail) -> String {
    format!("{}:{}", rail.device, rail.port)
}

/// The rails that a connection from this host to the peer has.
pub fn pairs(here: &[RailSheet], there: &[RailSheet]) -> Vec<Pair> {
    let adverts = |rails: &[RailSheet]| rails.iter().map(RailSheet::advert).collect::<Vec<_>>();
    let found = pairing::pair(&adverts(here), &adverts(there));
    let is_link_local = |gid: [u8; 16]| Ipv6Addr::from(gid).is_unicast_link_local();
    found
        .into_iter()
        .map(|pair| Pair {
            here: pair.connector,
            there: pair.acceptor,
            shares_subnet: !is_link_local(pair.connector_gid) && !is_link_local(pair.acceptor_gid),
        })
        .collect()
}
