//! Findings about rails: the plugin's own warnings, each with a cure, and faults of the network
//! around the rails.

use super::cures::{JobFacts, group_by_key, list, singular_or_plural};
use super::qos;
use crate::commands::doctor::finding::{Finding, Severity};
use crate::commands::doctor::id::Id;
use crate::commands::doctor::look::{AutomaticProfile, Facts};
use nccl_net_spark::interfaces::{ARP_FIX_COMMAND, Interface};
use nccl_net_spark::rails::{
    LinkLayer, Obstacle, PortState, Rail, Refused, Survey, Warning, WarningKind,
};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub(super) fn judge(facts: &Facts, job_facts: &JobFacts, found: &mut Vec<Finding>) {
    let survey = &facts.survey;
    if survey.rails.is_empty() && !survey.refused.is_empty() {
        no_rail(survey, found);
    }
    found.extend(
        survey
            .warnings
            .iter()
            .map(|warning| of_warning(warning, facts)),
    );
    link_local_only_rails(survey, found);
    foreign_interfaces_in_a_rails_subnet(facts, found);
    automatic_profiles(facts, found);
    bootstrap(facts, job_facts, found);
}

fn no_rail(survey: &Survey, found: &mut Vec<Finding>) {
    for (obstacle, ports) in group_by_key(survey.refused.iter().map(|port| (&port.obstacle, port)))
    {
        let devices: Vec<&str> = ports.iter().map(|port| port.device.as_str()).collect();
        let reason = if ports.len() == 1 {
            obstacle.to_string()
        } else {
            text_for_several(obstacle)
        };
        let text = explained(
            obstacle,
            format!("no rail: {} cannot be used: {reason}", list(&devices)),
        );
        found.push(Finding {
            cure: cure_of(obstacle, &ports),
            ..Id::NoRail.finding(text)
        });
    }
}

fn text_for_several(obstacle: &Obstacle) -> String {
    let text = match obstacle {
        Obstacle::Excluded => "NCCL_IB_HCA excludes them",
        Obstacle::LinkLayer(LinkLayer::InfiniBand) => {
            "their link layer is InfiniBand, not Ethernet"
        }
        Obstacle::LinkLayer(_) => "their link layer is not Ethernet",
        Obstacle::State(PortState::Down) => {
            "the ports are down: no cable, or their interfaces are not up"
        }
        Obstacle::State(PortState::Init) => "the ports are not active yet (state INIT)",
        Obstacle::State(PortState::Armed) => "the ports are not active yet (state ARMED)",
        Obstacle::State(state) => return format!("the ports are not active (state {state:?})"),
        Obstacle::NoGid => {
            "they have no RoCE v2 GID: their interfaces have neither an IPv4 nor an IPv6 address"
        }
        Obstacle::NoAddress(_) => return obstacle.to_string(),
    };
    text.to_owned()
}

/// Adds an explanation to the text about ports without an address.
fn explained(obstacle: &Obstacle, text: String) -> String {
    match obstacle {
        Obstacle::NoGid | Obstacle::NoAddress(_) => with_addresses_explained(&text),
        Obstacle::Excluded | Obstacle::LinkLayer(_) | Obstacle::State(_) => text,
    }
}

/// Adds an explanation in place of a cure. A command would have to name an address, and the right
/// one depends on the other ports and on the other host.
fn with_addresses_explained(text: &str) -> String {
    format!(
        "{}. A function needs an address in a subnet of its own, which only the function at the other end of the cable \
         shares (docs/guide/install.md, Addresses)",
        text.trim_end_matches('.')
    )
}

/// Returns the commands that remove this obstacle from the ports, if commands can.
fn cure_of(obstacle: &Obstacle, ports: &[&Refused]) -> Option<String> {
    let netdevs: Vec<&str> = ports
        .iter()
        .filter_map(|port| port.netdev.as_deref())
        .collect();
    match obstacle {
        Obstacle::Excluded => Some(UNSET_FILTER.to_owned()),
        Obstacle::LinkLayer(_) => None,
        _ if netdevs.is_empty() => None,
        Obstacle::State(_) => {
            let mut port_labels: Vec<&str> = ports
                .iter()
                .filter_map(|port| port.phys_port.as_deref())
                .collect();
            port_labels.sort_unstable();
            port_labels.dedup();
            let several = singular_or_plural(ports, "its port", "their ports").to_owned();
            let port_label = if port_labels.is_empty() {
                several
            } else {
                port_labels.join(" or ")
            };
            let up = each(&netdevs, |netdev| format!("sudo ip link set {netdev} up"));
            Some(format!("{up}    # with a cable in {port_label}"))
        }
        Obstacle::NoGid | Obstacle::NoAddress(_) => None,
    }
}

const UNSET_FILTER: &str = "unset NCCL_IB_HCA";

fn each(names: &[&str], command: impl FnMut(&str) -> String) -> String {
    names
        .iter()
        .copied()
        .map(command)
        .collect::<Vec<_>>()
        .join(" && ")
}

fn of_warning(warning: &Warning, facts: &Facts) -> Finding {
    let survey = &facts.survey;
    let devices: Vec<&str> = warning.devices.iter().map(String::as_str).collect();
    let refused = |at: usize| {
        survey
            .refused
            .iter()
            .find(|one| Some(&one.device.as_str()) == devices.get(at))
    };
    let netdev = |device: &str| {
        let rails = survey.rails.iter().map(|rail| (&rail.device, &rail.netdev));
        let mut all = rails.chain(survey.refused.iter().map(|one| (&one.device, &one.netdev)));
        all.find(|(name, _)| *name == device)
            .and_then(|(_, netdev)| netdev.clone())
            .unwrap_or(device.to_owned())
    };
    let first = netdev(devices.first().copied().unwrap_or_default());
    let mtu = || {
        each(&devices, |device| {
            format!("sudo ip link set {} mtu 9000", netdev(device))
        })
    };
    let (id, cure) = match warning.kind {
        WarningKind::FilterAdmitsNothing => (Id::HcaFilterEmpty, UNSET_FILTER.to_owned()),
        // On a ring or triangle, a filter for a pair of one cable would cut off a neighbour.
        WarningKind::FilterWithinOneLink => (Id::HcaFilterOneLink, UNSET_FILTER.to_owned()),
        WarningKind::NamedButUnusable => {
            let other = refused(0)
                .and_then(|port| cure_of(&port.obstacle, &[port]))
                .map(|cure| format!("{cure}; or: {UNSET_FILTER}"));
            (
                Id::HcaFilterUnusable,
                other.unwrap_or_else(|| UNSET_FILTER.to_owned()),
            )
        }
        WarningKind::HalfUsedCable => {
            let absent = "lspci -d 15b3:    # four functions are expected; in a container: --device /dev/infiniband";
            let Some(twin) = refused(1) else {
                return Id::HalfCable.finding(warning.text.clone()).cured_by(absent);
            };
            let text = explained(&twin.obstacle, warning.text.clone());
            return Finding {
                cure: cure_of(&twin.obstacle, &[twin]),
                ..Id::HalfCable.finding(text)
            };
        }
        WarningKind::SlowLink => {
            let cure =
                "sudo fwupdmgr update && sudo poweroff    # then the power cable out for a minute";
            (Id::SlowPcieLink, cure.to_owned())
        }
        WarningKind::UnknownWiring => (
            Id::UnknownWiring,
            "docker run -v /sys:/sys:ro ...".to_owned(),
        ),
        WarningKind::UnknownSpeed => (Id::UnknownSpeed, format!("ethtool {first}")),
        WarningKind::SmallMtu => (Id::SmallMtu, mtu()),
        WarningKind::UnequalMtus => (Id::UnequalMtus, mtu()),
        WarningKind::SharedSubnet => {
            return Id::SharedSubnet.finding(with_addresses_explained(&warning.text));
        }
        WarningKind::Arp { is_strict } => {
            let loose = if is_strict {
                " net.ipv4.conf.all.rp_filter=2"
            } else {
                ""
            };
            (Id::Arp, format!("sudo {ARP_FIX_COMMAND}{loose}"))
        }
        WarningKind::UnprotectedPriority => (Id::UnprotectedPriority, qos::cure(facts, &devices)),
    };
    id.finding(warning.text.clone()).cured_by(cure)
}

/// Finds rails with only link-local addresses whose twin has IPv4. Such a rail is used only if the
/// peer's unpaired rail on the same cable has a link-local address too.
fn link_local_only_rails(survey: &Survey, found: &mut Vec<Finding>) {
    let has_v4 = |rail: &Rail| {
        rail.addresses
            .iter()
            .any(|address| ip(&address.gid).is_ipv4())
    };
    for rail in survey.rails.iter().filter(|rail| !has_v4(rail)) {
        if let Some(twin) = rail
            .twin
            .map(|at| &survey.rails[at])
            .filter(|twin| has_v4(twin))
        {
            let text = format!(
                "{0} has only link-local addresses, but its twin {1} has IPv4: {0} is used only if the peer's unpaired rail on that cable has a link-local address too",
                rail.device, twin.device
            );
            found.push(Id::LinkLocalOnly.finding(with_addresses_explained(&text)));
        }
    }
}

/// Finds interfaces that are no rail but are in a rail's subnet. The kernel may route the rail's
/// packets through such an interface.
fn foreign_interfaces_in_a_rails_subnet(facts: &Facts, found: &mut Vec<Finding>) {
    let rails = &facts.survey.rails;
    let is_rail = |name: &str| {
        rails
            .iter()
            .any(|rail| rail.netdev.as_deref() == Some(name))
    };
    for interface in facts
        .interfaces
        .iter()
        .filter(|one| !one.is_loopback && !is_rail(&one.name))
    {
        let shared = rails.iter().filter_map(|rail| {
            let mut own = rail
                .addresses
                .iter()
                .filter_map(|own| subnet(ip(&own.gid), own.prefix));
            let shares_subnet = |own| {
                interface
                    .addresses
                    .iter()
                    .any(|other| subnet(other.address.ip(), other.prefix) == Some(own))
            };
            Some((own.find(|own| shares_subnet(*own))?, rail.device.as_str()))
        });
        for ((network, prefix), devices) in group_by_key(shared) {
            let text = format!(
                "{} is in the subnet of {} ({}/{prefix}) and is no rail: the kernel may route the {} packets over it. \
                 Give the rails another subnet (docs/guide/install.md, Addresses)",
                interface.name,
                list(&devices),
                Ipv4Addr::from_bits(network),
                singular_or_plural(&devices, "rail's", "rails'")
            );
            found.push(Id::SubnetClash.finding(text));
        }
    }
}

/// Finds NetworkManager's automatic profiles. Owners wrote netplan files for a function, but such a
/// profile kept the function on DHCP until they deleted it. On a network with a DHCP server the
/// profile may be wanted.
fn automatic_profiles(facts: &Facts, found: &mut Vec<Finding>) {
    let has_v4 = |netdev: &str| {
        let its = facts
            .interfaces
            .iter()
            .find(|interface| interface.name == netdev);
        its.is_some_and(|interface| interface.addresses.iter().any(|one| one.address.is_ipv4()))
    };
    for (has_v4, profiles) in group_by_key(
        facts
            .profiles
            .iter()
            .map(|profile| (has_v4(&profile.netdev), profile)),
    ) {
        let names: Vec<String> = profiles
            .iter()
            .map(|one| format!("{} (\"{}\")", one.netdev, one.name))
            .collect();
        let keeps = singular_or_plural(
            &profiles,
            "automatic profile keeps it",
            "automatic profiles keep them",
        );
        let (severity, follows) = match has_v4 {
            true => (Severity::Note, ": the address can change"),
            false => (Severity::Fragile, ", even if netplan sets an address"),
        };
        let text = format!(
            "{}: NetworkManager's {keeps} on DHCP{follows}",
            list(&names)
        );
        let deleted = profiles
            .iter()
            .map(|one| format!("sudo nmcli con delete {}", profile_word(one)));
        let cure = format!(
            "{} && sudo netplan apply",
            deleted.collect::<Vec<_>>().join(" && ")
        );
        found.push(
            Id::AutomaticProfile
                .finding(text)
                .at(severity)
                .cured_by(cure),
        );
    }
}

/// Returns a profile's name as a shell word, or its UUID if the name has special characters.
fn profile_word(profile: &AutomaticProfile) -> String {
    let is_harmless = profile
        .name
        .chars()
        .all(|c| c.is_alphanumeric() || " ._-".contains(c));
    if is_harmless {
        format!("\"{}\"", profile.name)
    } else {
        profile.uuid.clone()
    }
}

fn bootstrap(facts: &Facts, job_facts: &JobFacts, found: &mut Vec<Finding>) {
    let Some(wanted) = &job_facts.socket_interfaces else {
        return;
    };
    let pair = [("NCCL_SOCKET_IFNAME".to_owned(), wanted.clone())];
    let Ok(config) = nccl_net_spark::config::Config::from_variables(&pair) else {
        return;
    };
    let usable: Vec<&Interface> = facts
        .interfaces
        .iter()
        .filter(|one| one.is_up && !one.addresses.is_empty())
        .collect();
    if facts.interfaces.is_empty()
        || usable
            .iter()
            .any(|one| config.setup.interfaces.admits(&one.name, None))
    {
        return;
    }
    let names: Vec<&str> = usable.iter().map(|one| one.name.as_str()).collect();
    let text = format!(
        "NCCL_SOCKET_IFNAME={wanted} matches none of the interfaces that are up ({})",
        list(&names)
    );
    found.push(
        Id::SocketIfname
            .finding(text)
            .cured_by("unset NCCL_SOCKET_IFNAME"),
    );
}

fn ip(gid: &[u8; 16]) -> IpAddr {
    Ipv6Addr::from(*gid).to_canonical()
}

fn subnet(ip: IpAddr, prefix: Option<u8>) -> Option<(u32, u8)> {
    let prefix = prefix.filter(|prefix| (1..=32).contains(prefix))?;
    match ip {
        IpAddr::V4(ip) => Some((
            ip.to_bits() & (u32::MAX << (32 - u32::from(prefix))),
            prefix,
        )),
        IpAddr::V6(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_obstacle_has_a_text_for_several_ports() {
        for (obstacle, several) in [
            (Obstacle::Excluded, "NCCL_IB_HCA excludes them"),
            (
                Obstacle::LinkLayer(LinkLayer::Unspecified),
                "their link layer is not Ethernet",
            ),
            (
                Obstacle::State(PortState::Down),
                "the ports are down: no cable, or their interfaces are not up",
            ),
            (
                Obstacle::State(PortState::Init),
                "the ports are not active yet (state INIT)",
            ),
            (
                Obstacle::NoGid,
                "they have no RoCE v2 GID: their interfaces have neither an IPv4 nor an IPv6 address",
            ),
        ] {
            assert_eq!(text_for_several(&obstacle), several);
            assert!(
                !several.contains(" it") && obstacle.to_string() != several,
                "{obstacle}"
            );
        }
    }

    #[test]
    fn a_cure_follows_from_the_obstacle() {
        let port = |obstacle| Refused {
            device: "mlx5_0".to_owned(),
            port: 1,
            netdev: Some("eth0".to_owned()),
            phys_port: Some("p0".to_owned()),
            pci: None,
            speed_mbps: None,
            obstacle,
            is_late: false,
        };
        let cure =
            |obstacle: Obstacle| cure_of(&obstacle, &[&port(obstacle.clone())]).unwrap_or_default();
        assert_eq!(cure(Obstacle::Excluded), "unset NCCL_IB_HCA");
        assert_eq!(cure(Obstacle::LinkLayer(LinkLayer::InfiniBand)), "");
        for state in [PortState::Down, PortState::Init, PortState::Other(5)] {
            assert_eq!(
                cure(Obstacle::State(state)),
                "sudo ip link set eth0 up    # with a cable in p0"
            );
        }
        for without in [Obstacle::NoGid, Obstacle::NoAddress("eth0".to_owned())] {
            assert_eq!(cure(without), "");
        }
    }
}
