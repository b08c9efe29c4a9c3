//! Warnings: faults of a host's ports or settings, with their cures.

use super::arp::Arp;
use super::capacity::FRAMING_BYTES;
use super::port::{ASSUMED_SPEED_MBPS, Cable, Port, ipv4_subnet};
use super::text::{gbps, list};
use super::{HcaFilter, Obstacle, PcieLink, Rail, Warning, WarningKind};

/// Returns all warnings, the costliest first.
pub(super) fn warnings(
    seen: &[Port],
    rails: &[Rail],
    links: &[PcieLink],
    filter: &HcaFilter,
    arp: &Arp,
) -> Vec<Warning> {
    let host = AdviceInput {
        seen,
        rails,
        links,
        filter,
        arp,
    };
    let mut found = Vec::new();
    host.nothing_admitted(&mut found);
    let warned_links = host.filter_within_one_link(&mut found);
    host.half_used_cables(&warned_links, &mut found);
    host.bonds(&mut found);
    host.slow_links(&mut found);
    host.named_but_unusable(&mut found);
    host.unknown_wiring(&mut found);
    host.unknown_speed(&mut found);
    host.small_mtu(&mut found);
    host.shared_subnets(&mut found);
    found
}

struct AdviceInput<'a> {
    seen: &'a [Port<'a>],
    rails: &'a [Rail],
    links: &'a [PcieLink],
    filter: &'a HcaFilter,
    arp: &'a Arp<'a>,
}

impl AdviceInput<'_> {
    fn nothing_admitted(&self, found: &mut Vec<Warning>) {
        if self.seen.is_empty() || self.seen.iter().any(|port| port.is_admitted) {
            return;
        }
        let names: Vec<&str> = self
            .seen
            .iter()
            .map(|port| port.facts.device.as_str())
            .collect();
        let text = format!(
            "NCCL_IB_HCA matches no device of this host; its devices: {}.",
            names.join(", ")
        );
        found.push(Warning::new(WarningKind::FilterAdmitsNothing, names, text));
    }

    /// Warns of a filter that selects several functions of one link, and leaves out a usable
    /// function of another link that no rail uses. Returns the indices of the links that have a
    /// warning.
    fn filter_within_one_link(&self, found: &mut Vec<Warning>) -> Vec<usize> {
        let mut warned_links = Vec::new();
        for (at, link) in self.links.iter().enumerate() {
            let here: Vec<&Rail> = self.rails.iter().filter(|rail| rail.link == at).collect();
            let Some(payload_mbps) = link.payload_mbps.filter(|_| here.len() > 1) else {
                continue;
            };
            let left_out = |port: &&Port| {
                let is_in_use = self
                    .links
                    .iter()
                    .any(|other| other.slot.as_deref() == port.slot());
                !port.is_admitted && port.obstacle.is_none() && port.slot().is_some() && !is_in_use
            };
            let cables: Vec<_> = here
                .iter()
                .filter_map(|rail| self.port_of(rail))
                .map(|p| p.cable())
                .collect();
            let candidates = self.seen.iter().filter(left_out);
            let Some(other) = candidates.min_by_key(|port| !cables.contains(&port.cable())) else {
                continue;
            };
            warned_links.push(at);
            let text = format!(
                "NCCL_IB_HCA selects {}, which share one PCIe link ({}) and so carry {} together, and excludes {} \
                 on another link; unset NCCL_IB_HCA to use all links.",
                list(here.iter().map(|rail| rail.device.as_str())),
                rate_text(link),
                gbps(payload_mbps),
                other.facts.device,
            );
            found.push(Warning::new(
                WarningKind::FilterWithinOneLink,
                [other.facts.device.as_str()],
                text,
            ));
        }
        warned_links
    }

    /// Warns of a port that is faster than its PCIe link while its twin, the function of the same
    /// cable on another link, is not used. Does not warn if another rail already uses the twin's
    /// link, because the twin would then add nothing. Nor does it warn if the twin is invisible and
    /// a rail uses another link of the adapter. Skips the links in `warned_links`.
    fn half_used_cables(&self, warned_links: &[usize], found: &mut Vec<Warning>) {
        let mut done = warned_links.to_vec();
        for rail in self.rails.iter().filter(|rail| rail.twin.is_none()) {
            let link = &self.links[rail.link];
            let Some(payload_mbps) = link
                .payload_mbps
                .filter(|payload| *payload < rail.speed_mbps)
            else {
                continue;
            };
            let Some(port) = self
                .port_of(rail)
                .filter(|port| !port.is_bond && !done.contains(&rail.link))
            else {
                continue;
            };
            let twin = self
                .seen
                .iter()
                .find(|other| other.cable() == port.cable() && other.slot() != port.slot());
            let is_elsewhere = |other: &&Port| other.is_rail() && other.slot() != port.slot();
            let gains_nothing = self
                .seen
                .iter()
                .filter(is_elsewhere)
                .any(|other| match twin {
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
                    let reason = twin.obstacle.as_ref().map(Obstacle::to_string).unwrap_or_default();
                    let is_down = matches!(twin.obstacle, Some(Obstacle::State(_)));
                    let netdev = twin.netdev.as_ref().filter(|_| is_down);
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
            let text = format!(
                "{} carries only {} of its port's {}, the limit of its PCIe link ({}); {cure}.",
                rail.device,
                gbps(payload_mbps),
                gbps(rail.speed_mbps),
                rate_text(link),
            );
            let devices = std::iter::once(rail.device.as_str())
                .chain(twin.map(|twin| twin.facts.device.as_str()));
            found.push(Warning::new(WarningKind::HalfUsedCable, devices, text));
        }
    }

    fn slow_links(&self, found: &mut Vec<Warning>) {
        for (at, link) in self.links.iter().enumerate() {
            let pci = self
                .rails
                .iter()
                .find(|rail| rail.link == at)
                .and_then(|rail| rail.pci.as_ref());
            let Some((current, max)) = pci.and_then(|pci| pci.current.zip(pci.max)) else {
                continue;
            };
            if current.is_below(max) {
                let text = format!(
                    "the PCIe link of {} runs at {current} and could run at {max}; on a DGX Spark a BIOS update and a \
                     power cycle (power cable out for a minute) help.",
                    list(link.devices.iter().map(String::as_str)),
                );
                found.push(Warning::new(
                    WarningKind::SlowLink,
                    link.devices.iter().map(String::as_str),
                    text,
                ));
            }
        }
    }

    /// Warns of a bond: its ports are one RDMA device on one PCIe link.
    fn bonds(&self, found: &mut Vec<Warning>) {
        for port in self
            .seen
            .iter()
            .filter(|port| port.is_bond && port.is_rail())
        {
            let device = port.facts.device.as_str();
            let link = self
                .links
                .iter()
                .find(|link| link.slot.as_deref() == port.slot());
            let limit = link
                .and_then(|link| Some(format!(", {} at most", gbps(link.payload_mbps?))))
                .unwrap_or_default();
            let text = format!(
                "{device} is the bond {} of several ports (RoCE LAG): they share one PCIe link{limit}; without the \
                 bond, and with an address for each function, the plugin uses every link and survives a lost cable.",
                port.netdev.as_deref().unwrap_or("interface"),
            );
            found.push(Warning::new(WarningKind::Bond, [device], text));
        }
    }

    /// Warns of an unusable port if `NCCL_IB_HCA` has the port's whole name. A prefix such as
    /// `mlx5` also selects ports that nobody needs. A cable of which no port has a link is not
    /// plugged in, which is normal beside other rails: NVIDIA's recipe names all four functions.
    fn named_but_unusable(&self, found: &mut Vec<Warning>) {
        for port in self.seen.iter().filter(|port| port.is_admitted) {
            let device = port.facts.device.as_str();
            let shorter = device
                .char_indices()
                .next_back()
                .map_or("", |(last, _)| &device[..last]);
            let is_named = !self.filter.admits(shorter, Some(port.facts.port));
            let is_unplugged = !self.rails.is_empty()
                && matches!(port.cable(), Cable::Port { .. })
                && self
                    .seen
                    .iter()
                    .filter(|other| other.cable() == port.cable())
                    .all(|other| other.obstacle.as_ref().is_some_and(Obstacle::is_link));
            if is_unplugged {
                continue;
            }
            if let (true, Some(obstacle)) = (is_named, &port.obstacle) {
                let text = format!("NCCL_IB_HCA names {device}, which is not usable: {obstacle}.");
                found.push(Warning::new(WarningKind::NamedButUnusable, [device], text));
            }
        }
    }

    fn unknown_wiring(&self, found: &mut Vec<Warning>) {
        let unlisted = self
            .seen
            .iter()
            .filter(|port| port.is_rail() && !port.is_in_sysfs);
        let names: Vec<&str> = unlisted.map(|port| port.facts.device.as_str()).collect();
        if !names.is_empty() {
            let text = format!(
                "sysfs does not list {} (class/infiniband), so its PCIe link and cable are unknown, and only its port's speed \
                 is used; set NCCL_SPARK_SYSFS to where sysfs is mounted.",
                list(names.iter().copied()),
            );
            found.push(Warning::new(WarningKind::UnknownWiring, names, text));
        }
    }

    fn unknown_speed(&self, found: &mut Vec<Warning>) {
        for port in self
            .seen
            .iter()
            .filter(|port| port.is_rail() && port.speed_mbps.is_none())
        {
            let text = format!(
                "{} reports no speed; {} is assumed.",
                port.facts.device,
                gbps(ASSUMED_SPEED_MBPS)
            );
            found.push(Warning::new(
                WarningKind::UnknownSpeed,
                [port.facts.device.as_str()],
                text,
            ));
        }
    }

    fn small_mtu(&self, found: &mut Vec<Warning>) {
        let mut done: Vec<(u32, Option<u32>)> = Vec::new();
        for rail in self
            .rails
            .iter()
            .filter(|rail| rail.path_mtu_bytes < FULL_PATH_MTU_BYTES)
        {
            let kind = (rail.path_mtu_bytes, rail.netdev_mtu_bytes);
            if done.contains(&kind) {
                continue;
            }
            done.push(kind);
            let alike: Vec<&Rail> = self
                .rails
                .iter()
                .filter(|one| (one.path_mtu_bytes, one.netdev_mtu_bytes) == kind)
                .collect();
            let devices: Vec<&str> = alike.iter().map(|one| one.device.as_str()).collect();
            let mut netdevs: Vec<&str> = alike
                .iter()
                .filter_map(|one| one.netdev.as_deref())
                .collect();
            if netdevs.is_empty() {
                netdevs.push("its interface");
            }
            let has = |names: &[&str]| if names.len() == 1 { "has" } else { "have" };
            let now = kind.1.map(|mtu| {
                format!(
                    " because {} {} MTU {mtu}",
                    list(netdevs.iter().copied()),
                    has(&netdevs)
                )
            });
            let commands: Vec<String> = netdevs
                .iter()
                .map(|netdev| format!("ip link set {netdev} mtu 9000"))
                .collect();
            let text = format!(
                "{} {} a path MTU of {} bytes{}; set an interface MTU of {ENOUGH_NETDEV_MTU_BYTES} or more on both ends ({}) for a \
                 path MTU of {FULL_PATH_MTU_BYTES} and about {} % more bandwidth.",
                list(devices.iter().copied()),
                has(&devices),
                kind.0,
                now.unwrap_or_default(),
                commands.join("; "),
                gain_percent(kind.0),
            );
            found.push(Warning::new(WarningKind::SmallMtu, devices, text));
        }
    }

    /// Warns of rails in one subnet, unless each interface answers ARP only for its own addresses.
    /// With such settings the rails work: the kernel resolves the address of a QP's peer through
    /// the interface of the QP's own address (`rdma_addr_find_l2_eth_by_grh` in Linux), independent
    /// of routes.
    fn shared_subnets(&self, found: &mut Vec<Warning>) {
        let mut subnets: Vec<(u32, u8)> = Vec::new();
        for subnet in self
            .rails
            .iter()
            .flat_map(|rail| rail.addresses.iter().filter_map(ipv4_subnet))
        {
            if !subnets.contains(&subnet) {
                subnets.push(subnet);
            }
        }
        for (network, prefix) in subnets {
            let is_in = |rail: &&Rail| {
                rail.addresses
                    .iter()
                    .filter_map(ipv4_subnet)
                    .any(|s| s == (network, prefix))
            };
            let inside: Vec<&Rail> = self.rails.iter().filter(is_in).collect();
            if inside.len() < 2 || self.arp.is_right(&inside) {
                continue;
            }
            let are_twins =
                inside.len() == 2 && inside[0].twin.is_some() && inside[0].cable == inside[1].cable;
            let text = format!(
                "{}{} are in one subnet ({}/{prefix}): the kernel routes over one of them; give each a subnet of its own.",
                list(inside.iter().map(|rail| rail.device.as_str())),
                if are_twins {
                    ", the twins of one cable,"
                } else {
                    ""
                },
                std::net::Ipv4Addr::from_bits(network),
            );
            found.push(Warning::new(
                WarningKind::SharedSubnet,
                inside.iter().map(|rail| rail.device.as_str()),
                text,
            ));
        }
    }

    fn port_of(&self, rail: &Rail) -> Option<&Port<'_>> {
        self.seen
            .iter()
            .find(|port| port.facts.device == rail.device && port.facts.port == rail.port)
    }
}

/// Returns the bandwidth that the largest path MTU gains over a smaller one, by the framing of the
/// packets: 2 % over 2048 bytes, 6 % over 1024.
fn gain_percent(path_mtu_bytes: u32) -> u64 {
    let framed = |mtu: u64| (mtu + FRAMING_BYTES) as f64 / mtu as f64;
    let gain = framed(u64::from(path_mtu_bytes.max(1))) / framed(FULL_PATH_MTU_BYTES.into());
    ((gain - 1.0) * 100.0).round() as u64
}

/// RoCE's largest path MTU.
const FULL_PATH_MTU_BYTES: u32 = 4096;

/// An interface MTU that suffices for a path MTU of 4096 bytes. The RoCE headers take up to 96
/// bytes more, and the sum is rounded up.
const ENOUGH_NETDEV_MTU_BYTES: u32 = 4200;

fn rate_text(link: &PcieLink) -> String {
    link.rate
        .map_or_else(|| "rate unknown".to_owned(), |rate| rate.to_string())
}
