//! Warnings: what is wrong with a host's ports or settings, and what to do about it.

use super::port::{ASSUMED_SPEED_MBPS, Obstacle, Port, ipv4_subnet};
use super::{HcaFilter, PcieLink, Rail};

/// All warnings, the costliest first.
pub(super) fn warnings(seen: &[Port], rails: &[Rail], links: &[PcieLink], filter: &HcaFilter) -> Vec<String> {
    let host = Host { seen, rails, links, filter };
    let mut found = Vec::new();
    host.nothing_admitted(&mut found);
    let warned_links = host.filter_within_one_link(&mut found);
    host.half_used_cables(&warned_links, &mut found);
    host.slow_links(&mut found);
    host.named_but_unusable(&mut found);
    host.unknown_wiring(&mut found);
    host.unknown_speed(&mut found);
    host.small_mtu(&mut found);
    host.shared_subnets(&mut found);
    found
}

struct Host<'a> {
    seen: &'a [Port<'a>],
    rails: &'a [Rail],
    links: &'a [PcieLink],
    filter: &'a HcaFilter,
}

impl Host<'_> {
    fn nothing_admitted(&self, found: &mut Vec<String>) {
        if self.seen.is_empty() || self.seen.iter().any(|port| port.is_admitted) {
            return;
        }
        let names: Vec<&str> = self.seen.iter().map(|port| port.facts.device.as_str()).collect();
        found.push(format!("NCCL_IB_HCA matches no device of this host; its devices: {}.", names.join(", ")));
    }

    /// Several functions of one link pass the filter while a usable function of another link does not. Answers with
    /// the links that it warned of.
    fn filter_within_one_link(&self, found: &mut Vec<String>) -> Vec<usize> {
        let mut warned_links = Vec::new();
        for (at, link) in self.links.iter().enumerate() {
            let here: Vec<&Rail> = self.rails.iter().filter(|rail| rail.link == at).collect();
            let Some(payload_mbps) = link.payload_mbps.filter(|_| here.len() > 1) else { continue };
            let left_out = |port: &&Port| {
                let is_in_use = self.links.iter().any(|other| other.slot.as_deref() == port.slot());
                !port.is_admitted && port.obstacle.is_none() && port.slot().is_some() && !is_in_use
            };
            let cables: Vec<_> = here.iter().filter_map(|rail| self.port_of(rail)).map(|p| p.cable()).collect();
            let mut better: Vec<&Port> = self.seen.iter().filter(left_out).collect();
            better.sort_by_key(|port| !cables.contains(&port.cable()));
            let Some(other) = better.first() else { continue };
            let keep = here
                .iter()
                .find(|rail| self.port_of(rail).is_some_and(|port| port.cable() == other.cable()))
                .unwrap_or(&here[0]);
            warned_links.push(at);
            found.push(format!(
                "NCCL_IB_HCA selects {}, which share one PCIe link ({}) and so carry {} together; \
                 set NCCL_IB_HCA={},{} to use both links.",
                list(here.iter().map(|rail| rail.device.as_str())),
                rate_text(link),
                gbps(payload_mbps),
                keep.device,
                other.facts.device,
            ));
        }
        warned_links
    }

    /// A port that is faster than its PCIe link, while another link that leads to its cable carries nothing.
    fn half_used_cables(&self, warned_links: &[usize], found: &mut Vec<String>) {
        let mut done = warned_links.to_vec();
        for rail in self.rails.iter().filter(|rail| rail.twin.is_none()) {
            let link = &self.links[rail.link];
            let Some(payload_mbps) = link.payload_mbps.filter(|payload| *payload < rail.speed_mbps) else { continue };
            let Some(port) = self.port_of(rail).filter(|_| !done.contains(&rail.link)) else { continue };
            let twin = self.seen.iter().find(|other| other.cable() == port.cable() && other.slot() != port.slot());
            let is_elsewhere = |other: &&Port| other.is_rail() && other.slot() != port.slot();
            let gains_nothing = self.seen.iter().filter(is_elsewhere).any(|other| match twin {
                Some(twin) => twin.slot() == other.slot(),
                None => other.adapter_guid() == port.adapter_guid(),
            });
            if gains_nothing {
                continue;
            }
            done.push(rail.link);
            let cure = match twin {
                Some(twin) if !twin.is_admitted => {
                    format!("NCCL_IB_HCA excludes its twin {}, which is on another link", twin.facts.device)
                }
                Some(twin) => {
                    let reason = twin.obstacle.as_ref().map(Obstacle::text).unwrap_or_default();
                    let is_up = matches!(twin.obstacle, Some(Obstacle::NoAddress(_)));
                    let netdev = twin.netdev.as_ref().filter(|_| !is_up);
                    let up = netdev.map(|netdev| format!(" (try: ip link set {netdev} up)"));
                    format!(
                        "its twin {} on another link is not usable: {reason}{}",
                        twin.facts.device,
                        up.unwrap_or_default()
                    )
                }
                None => {
                    "no other function of its cable is visible here (on a DGX Spark each cable has two: check lspci, \
                         and the devices given to a container)"
                        .to_owned()
                }
            };
            found.push(format!(
                "{} carries only {} of its port's {}, which is all that its PCIe link ({}) carries; {cure}.",
                rail.device,
                gbps(payload_mbps),
                gbps(rail.speed_mbps),
                rate_text(link),
            ));
        }
    }

    fn slow_links(&self, found: &mut Vec<String>) {
        for (at, link) in self.links.iter().enumerate() {
            let pci = self.rails.iter().find(|rail| rail.link == at).and_then(|rail| rail.pci.as_ref());
            let Some((current, max)) = pci.and_then(|pci| pci.current.zip(pci.max)) else { continue };
            if current.is_below(max) {
                found.push(format!(
                    "the PCIe link of {} runs at {current} and could run at {max}; on a DGX Spark a BIOS update and a \
                     power cycle (power cable out for a minute) help.",
                    list(link.devices.iter().map(String::as_str)),
                ));
            }
        }
    }

    /// Only where the user asked for the port by its whole name: a port without a cable is normal.
    fn named_but_unusable(&self, found: &mut Vec<String>) {
        for port in self.seen.iter().filter(|port| port.is_admitted) {
            let device = port.facts.device.as_str();
            let shorter = device.char_indices().next_back().map_or("", |(last, _)| &device[..last]);
            let is_named = !self.filter.admits(shorter, Some(port.facts.port));
            if let (true, Some(obstacle)) = (is_named, &port.obstacle) {
                found.push(format!("NCCL_IB_HCA names {device}, which is not usable: {}.", obstacle.text()));
            }
        }
    }

    fn unknown_wiring(&self, found: &mut Vec<String>) {
        let unlisted = self.seen.iter().filter(|port| port.is_rail() && !port.is_in_sysfs);
        let names: Vec<&str> = unlisted.map(|port| port.facts.device.as_str()).collect();
        if !names.is_empty() {
            found.push(format!(
                "sysfs does not list {} (class/infiniband), so which PCIe link and cable it uses is unknown and its port's \
                 speed alone counts; set NCCL_SPARK_SYSFS to where sysfs is mounted.",
                list(names.into_iter()),
            ));
        }
    }

    fn unknown_speed(&self, found: &mut Vec<String>) {
        for port in self.seen.iter().filter(|port| port.is_rail() && port.speed_mbps.is_none()) {
            found.push(format!("{} reports no speed; {} is assumed.", port.facts.device, gbps(ASSUMED_SPEED_MBPS)));
        }
    }

    fn small_mtu(&self, found: &mut Vec<String>) {
        for rail in self.rails.iter().filter(|rail| rail.path_mtu_bytes < FULL_PATH_MTU_BYTES) {
            let netdev = rail.netdev.as_deref().unwrap_or("its interface");
            let now = rail.netdev_mtu_bytes.map(|mtu| format!(" because {netdev} has MTU {mtu}")).unwrap_or_default();
            found.push(format!(
                "{} has a path MTU of {} bytes{now}; set an interface MTU of {ENOUGH_NETDEV_MTU_BYTES} or more on both ends \
                 (ip link set {netdev} mtu 9000) for a path MTU of {FULL_PATH_MTU_BYTES} and about 5 % more bandwidth.",
                rail.device, rail.path_mtu_bytes,
            ));
        }
        let mut mtus = self.rails.iter().map(|rail| rail.path_mtu_bytes);
        if let Some(first) = mtus.next().filter(|first| mtus.any(|mtu| mtu != *first)) {
            found.push(format!(
                "the rails have different path MTUs ({first} bytes and others); set the same MTU on their interfaces."
            ));
        }
    }

    fn shared_subnets(&self, found: &mut Vec<String>) {
        let mut subnets: Vec<(u32, u8)> = Vec::new();
        for subnet in self.rails.iter().flat_map(|rail| rail.addresses.iter().filter_map(ipv4_subnet)) {
            if !subnets.contains(&subnet) {
                subnets.push(subnet);
            }
        }
        for (network, prefix) in subnets {
            let is_in = |rail: &&Rail| rail.addresses.iter().filter_map(ipv4_subnet).any(|s| s == (network, prefix));
            let inside: Vec<&Rail> = self.rails.iter().filter(is_in).collect();
            if inside.len() < 2 {
                continue;
            }
            let are_twins = inside.len() == 2 && inside[0].twin.is_some() && inside[0].cable == inside[1].cable;
            found.push(format!(
                "{}{} are in one subnet ({}/{prefix}): the kernel routes over one of them; give each a subnet of its own.",
                list(inside.iter().map(|rail| rail.device.as_str())),
                if are_twins { ", the twins of one cable," } else { "" },
                std::net::Ipv4Addr::from_bits(network),
            ));
        }
    }

    fn port_of(&self, rail: &Rail) -> Option<&Port<'_>> {
        self.seen.iter().find(|port| port.facts.device == rail.device && port.facts.port == rail.port)
    }
}

/// RoCE's largest path MTU.
const FULL_PATH_MTU_BYTES: u32 = 4096;

/// The interface MTU from which on a port has a path MTU of 4096 bytes (4096 and the RoCE headers).
const ENOUGH_NETDEV_MTU_BYTES: u32 = 4200;

fn rate_text(link: &PcieLink) -> String {
    link.rate.map_or_else(|| "rate unknown".to_owned(), |rate| rate.to_string())
}

/// Mb/s as a person reads it.
pub(super) fn gbps(mbps: u32) -> String {
    let tenths = (u64::from(mbps) + 50) / 100;
    if tenths % 10 == 0 { format!("{} Gb/s", tenths / 10) } else { format!("{}.{} Gb/s", tenths / 10, tenths % 10) }
}

/// Names as a sentence lists them.
pub(super) fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.collect();
    match names.as_slice() {
        [all @ .., last] if !all.is_empty() => format!("{} and {last}", all.join(", ")),
        _ => names.join(""),
    }
}
