//! The facts about a rail that another host needs, and the pairs that the rails of two hosts form
//! by the plugin's own rule.

use crate::commands::rails::{LinkJson, RailJson};
use host::rails::Rail;
use proto::flow::pairing::{self, Route};
use proto::wire::fields::{Address, Attachment, RailAdvert};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv6Addr};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RailSheet {
    /// Device and port, in the form of `NCCL_IB_HCA`.
    pub name: String,
    pub netdev: Option<String>,
    pub phys_port: Option<String>,
    /// Number of the PCIe link. All rails on the link have this number.
    pub link: u8,
    /// Payload rate of the PCIe link in Mb/s, or 0 if unknown.
    pub link_mbps: u32,
    /// Number of the cable. All rails on the cable have this number.
    pub cable: u8,
    /// Line rate of the port in Mb/s.
    pub port_mbps: u32,
    /// Rate in Mb/s while all rails on the PCIe link are equally busy.
    pub share_mbps: u32,
    pub mtu_bytes: u32,
    /// IPv6 or IPv4-mapped addresses, each with its subnet's prefix length.
    pub addresses: Vec<(Ipv6Addr, Option<u8>)>,
}

/// A pair of rails, as indices into the rails of this host and of the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    pub here: usize,
    pub there: usize,
    pub by: PairedBy,
}

/// Reason why two rails are a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PairedBy {
    Subnet,
    /// The rails use link-local addresses. Their ports' names, or the addresses of other rails,
    /// show that both are on one cable.
    Cable,
    Route,
}

impl RailSheet {
    pub fn all(rails: &[RailJson], links: &[LinkJson]) -> Vec<Self> {
        let mapped = |ip: IpAddr| match ip {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        let sheet = |rail: &RailJson| {
            let on_link = rails
                .iter()
                .filter(|other| other.pcie_link == rail.pcie_link);
            let together = on_link
                .map(|other| u64::from(other.speed_mbps))
                .sum::<u64>()
                .max(1);
            let link_mbps = links
                .get(usize::from(rail.pcie_link))
                .and_then(|link| link.payload_mbps)
                .unwrap_or(0);
            let share_mbps = match u64::from(link_mbps) {
                payload if (1..together).contains(&payload) => {
                    (payload * u64::from(rail.speed_mbps) / together) as u32
                }
                _ => rail.speed_mbps,
            };
            Self {
                name: format!("{}:{}", rail.device, rail.port),
                netdev: rail.netdev.clone(),
                phys_port: rail.physical_port.clone(),
                link: rail.pcie_link,
                link_mbps,
                cable: rail.cable,
                port_mbps: rail.speed_mbps,
                share_mbps,
                mtu_bytes: rail.path_mtu_bytes,
                addresses: rail
                    .addresses
                    .iter()
                    .map(|one| (mapped(one.address), one.prefix))
                    .collect(),
            }
        };
        rails.iter().map(sheet).collect()
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
            addresses: self
                .addresses
                .iter()
                .map(|(ip, prefix)| Address::new(ip.octets(), *prefix))
                .collect(),
            is_usable: true,
        }
    }
}

pub fn name(rail: &Rail) -> String {
    format!("{}:{}", rail.device, rail.port)
}

/// Returns the rail pairs of a connection from the peer to this host. `has_route(rail, own, peer)`
/// returns true if this host's kernel has a route from address `own` of `rail`, through the rail's
/// interface, to address `peer`.
pub fn pairs(
    here: &[RailSheet],
    there: &[RailSheet],
    has_route: impl Fn(&RailSheet, Ipv6Addr, Ipv6Addr) -> bool,
) -> Vec<Pair> {
    let adverts = |rails: &[RailSheet]| rails.iter().map(RailSheet::advert).collect::<Vec<_>>();
    let ours = adverts(here);
    let theirs = adverts(there);
    let exists = |route: &Route| {
        has_route(
            &here[route.acceptor],
            route.acceptor_gid.into(),
            route.connector_gid.into(),
        )
    };
    let routes = pairing::existing_routes(&theirs, &ours, exists);
    let is_link_local = |gid: [u8; 16]| Ipv6Addr::from(gid).is_unicast_link_local();
    let pair = |pair: pairing::Pair| {
        let by = match is_link_local(pair.connector_gid) || is_link_local(pair.acceptor_gid) {
            true => PairedBy::Cable,
            false if pair.is_routed => PairedBy::Route,
            false => PairedBy::Subnet,
        };
        Pair {
            here: pair.acceptor,
            there: pair.connector,
            by,
        }
    };
    let mut pairs: Vec<Pair> = pairing::pair(&theirs, &ours, &routes)
        .into_iter()
        .map(pair)
        .collect();
    pairs.sort_by_key(|pair| (pair.here, pair.there));
    pairs
}
